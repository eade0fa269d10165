// The network between teams of ranks, over NCCL's Device API for networks (GIN): the only device code that knows GIN's names. A program of its own,
// linked with libnccl_device.ltoir, which holds the bodies, into kernels over several teams and into no others. What each call means: headers/gin.h.
//
// Memory order. Puts and signals come after a system fence of the calling thread (net_calls.cu), and NCCL is told so (FENCED): else it would add a
// fence of its own. A signal is a *strong* one; NCCL's weak ones speak only for the put they come with. The other half is the acquiring load of the
// signal. A word that is put carries its value in the request, so nothing has to be visible before.
//
// No call waits for a peer. A put or signal waits for room in its queue (gin_room.cu, the first part of this program), and if there is none in time it is
// left out, like all later ones to that peer.
#include <nccl_gin.h>
#include <gin.h>

const cuda::thread_scope FENCED = cuda::thread_scope_system;

struct Call {   // what every call needs: a context, and that one thread calls
  ncclDevComm const& comm;
  alignas(16) char room[sizeof(ncclGin_C)];
  ncclCoopAny alone;
  __device__ __forceinline__ Call(i64 address, i64 context) : comm(*(const ncclDevComm*)address) {
    ncclGin_C_init(net(), NCCL_GIN_BACKEND_MASK_ALL, comm, int(context));
    ncclCoopAnyInitThread(&alone);
  }
  __device__ __forceinline__ ncclGin_C* net() { return (ncclGin_C*)room; }
};

struct Ticket : Call {   // good once all that was issued to the peer on the context before has left the queue
  ncclGinRequest_t request;
  __device__ __forceinline__ Ticket(i64 comm, i64 context, i64 peer) : Call(comm, context) {
    ncclGinFlushAsync(net(), ncclTeamWorld(this->comm), unsigned(peer), &request, alone, ncclGinOptFlagsDefault, false, nullptr);
  }
  __device__ __forceinline__ bool good() {   // 0 cycles: NCCL looks once
    return ncclGinWaitTimeout(net(), &request, alone, false, nullptr, cuda::memory_order_relaxed, 0) == ncclSuccess;
  }
};

NET int gin_claim(i64 comm, i64 context, i64 peer) {
  return claim(queue_of(comm, context, peer), &queue_of(comm, 0, peer)->lost, limits_of(comm), [&] { return Ticket(comm, context, peer); });
}
NET void gin_issued(i64 comm, i64 context, i64 peer) { count_after(&queue_of(comm, context, peer)->issued); }

NET void gin_put(i64 comm, i64 window, i64 peer, i64 context, i64 target, i64 source_window, i64 source, i64 num_bytes) {
  if (!gin_claim(comm, context, peer)) return;
  Call call(comm, context);
  ncclGinPut_v3(call.net(), ncclTeamWorld(call.comm), int(peer), (ncclWindow_t)window, target, (ncclWindow_t)source_window, source, num_bytes,
                NCCL_GIN_SIGNAL_TYPE_NONE, nullptr, 0, 0, false, ncclGinSignalAdd, 0, false, 0, call.alone, false, nullptr, FENCED, FENCED,
                ncclGinOptFlagsDefault, ncclGinSegmentTypeDevice);
  gin_issued(comm, context, peer);
}
NET void gin_put_value(i64 comm, i64 window, i64 peer, i64 context, i64 target, u64 value) {
  if (!gin_claim(comm, context, peer)) return;
  Call call(comm, context);
  ncclGinPutValue_v3(call.net(), ncclTeamWorld(call.comm), int(peer), (ncclWindow_t)window, target, value, 8, NCCL_GIN_SIGNAL_TYPE_NONE, nullptr, 0, 0,
                     false, ncclGinSignalAdd, 0, call.alone, false, nullptr, FENCED, FENCED, ncclGinOptFlagsDefault);
  gin_issued(comm, context, peer);
}
NET void gin_signal(i64 comm, i64 peer, i64 context, i64 signal, i64 amount) {
  if (!gin_claim(comm, context, peer)) return;
  Call call(comm, context);
  ncclGinSignal_v3(call.net(), ncclTeamWorld(call.comm), int(peer), NCCL_GIN_SIGNAL_TYPE_INDEXED, nullptr, 0, ncclGinSignal_t(signal), true,
                   ncclGinSignalAdd, amount, call.alone, false, nullptr, FENCED, FENCED, ncclGinOptFlagsDefault);
  gin_issued(comm, context, peer);
}
NET void gin_put_signal(i64 comm, i64 window, i64 peer, i64 context, i64 target, i64 source_window, i64 source, i64 num_bytes, i64 signal,
                        i64 amount) {
  if (!gin_claim(comm, context, peer)) return;
  Call call(comm, context);
  ncclGinPut_v3(call.net(), ncclTeamWorld(call.comm), int(peer), (ncclWindow_t)window, target, (ncclWindow_t)source_window, source, num_bytes,
                NCCL_GIN_SIGNAL_TYPE_INDEXED, nullptr, 0, ncclGinSignal_t(signal), true, ncclGinSignalAdd, amount, false, 0, call.alone, false,
                nullptr, FENCED, FENCED, ncclGinOptFlagsDefault, ncclGinSegmentTypeDevice);
  gin_issued(comm, context, peer);
}
NET void gin_put_counted(i64 comm, i64 window, i64 peer, i64 context, i64 target, i64 source_window, i64 source, i64 num_bytes, i64 counter) {
  if (!gin_claim(comm, context, peer)) return;
  Call call(comm, context);
  ncclGinPut_v3(call.net(), ncclTeamWorld(call.comm), int(peer), (ncclWindow_t)window, target, (ncclWindow_t)source_window, source, num_bytes,
                NCCL_GIN_SIGNAL_TYPE_NONE, nullptr, 0, 0, false, ncclGinSignalAdd, 0, true, ncclGinCounter_t(counter), call.alone, false, nullptr,
                FENCED, FENCED, ncclGinOptFlagsDefault, ncclGinSegmentTypeDevice);
  gin_issued(comm, context, peer);
}
NET u64 gin_signal_value(i64 comm, i64 context, i64 signal) {
  Call call(comm, context);
  return ncclGinReadSignal(call.net(), ncclGinSignal_t(signal), 64, cuda::memory_order_acquire);
}
NET u64 gin_counter_value(i64 comm, i64 context, i64 counter) {
  Call call(comm, context);
  return ncclGinReadCounter(call.net(), ncclGinCounter_t(counter), 56, cuda::memory_order_acquire);   // NCCL's counters have no more bits
}
NET int gin_flushed(i64 comm, i64 context) {
  Call call(comm, context);   // 0 cycles: NCCL looks once; its deadline counts the multiprocessor's clock, ours is in nanoseconds
  return ncclGinFlushTimeout(call.net(), call.alone, cuda::memory_order_acquire, false, nullptr, 0) == ncclSuccess;
}
