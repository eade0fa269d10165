// The network as operations see it: defined in gin_ops.cu, a program of its own, and joined when a kernel is linked; not inlined, for NCCL's code is
// long and would stand in a kernel a dozen times. One thread calls; ranks are those of the group.
#pragma once
#define NET extern "C" __device__ __noinline__

// Puts `num_bytes` at `source` of my window to `target` of the peer's. The release is the caller's: a system fence by the calling thread, after the
// barrier (__syncwarp, __syncthreads) that orders what other threads wrote. Lands any time, in pieces, in no order with other puts; reads the source
// up to then. Does not wait for it, but for room in the peer's queue: if there is none in time the put is left out, like all later ones to the peer.
NET void gin_put(long long comm, long long window, long long peer, long long context, long long target, long long source_window, long long source,
                 long long num_bytes);
// Puts one aligned 64-bit word, whole. It carries its value along and orders nothing.
NET void gin_put_value(long long comm, long long window, long long peer, long long context, long long target, unsigned long long value);
// Adds to a signal of the peer; the release is the caller's, as for `gin_put`. Strong: whoever sees the sum sees all puts that this thread, or threads
// ordered before it, issued earlier to this peer on this context.
NET void gin_signal(long long comm, long long peer, long long context, long long signal, long long amount);
// `gin_put`, then `gin_signal` to the same peer, in one request.
NET void gin_put_signal(long long comm, long long window, long long peer, long long context, long long target, long long source_window, long long source,
                        long long num_bytes, long long signal, long long amount);
// `gin_put` that adds 1 to a counter of mine when the network is done with the source. At most 1 GiB.
NET void gin_put_counted(long long comm, long long window, long long peer, long long context, long long target, long long source_window,
                         long long source, long long num_bytes, long long counter);
// Value of a signal of mine. Acquire, system scope.
NET unsigned long long gin_signal_value(long long comm, long long context, long long signal);
// Value of a counter of mine (56 bits). Acquire, system scope.
NET unsigned long long gin_counter_value(long long comm, long long context, long long counter);
// Whether everything that was issued on the context, to any peer and by any thread of this GPU, is done with its sources. One look; acquire.
NET int gin_flushed(long long comm, long long context);
