// What operations over several teams are made of: putting, signalling and waiting by warps, over the calls of headers/gin.h. Follows the other device
// sources in one NVRTC program, compiled with EP_TEAMS; no operation stands here.
#include <gin.h>

// ---- issuing: all lanes with equal arguments ---------------------------------------------------------------------------------------------------------
// What the warp wrote, and what was ordered before that, is visible to the network from here on: lane 0, which issues, has this fence after the warp's
// barrier. (All lanes have it: it costs no more.)
INLINE void net_release() { __syncwarp(); fence_system(); }

INLINE void net_put(i64 comm, i64 window, i64 peer, i64 context, i64 target, i64 source, i64 num_bytes) {   // after net_release
  if (lane() == 0 && num_bytes > 0) gin_put(comm, window, peer, context, target, window, source, num_bytes);
  __syncwarp();
}
INLINE void net_put_value(i64 comm, i64 window, i64 peer, i64 context, i64 target, u64 value) {
  if (lane() == 0) gin_put_value(comm, window, peer, context, target, value);
  __syncwarp();
}
INLINE void net_signal(i64 comm, i64 peer, i64 context, i64 signal, i64 amount) {   // after net_release
  if (lane() == 0) gin_signal(comm, peer, context, signal, amount);
  __syncwarp();
}

// ---- waiting: one warp, all lanes with equal arguments; nobody waits longer than `timeout` nanoseconds ----------------------------------------------
struct Awaited { i64 context, signal; u64 least; };   // signals are never reset, and 64 bits do not wrap
struct Missing { int index; u64 seen; };              // the first of the awaited that did not come, and its value; index -1: all came

// `awaited(i)` is the i-th of n signals. Acquire, system scope: by the lane that looks, so other lanes and warps need a barrier after it.
template <class Which>
INLINE Missing wait_signals(i64 comm, int n, u64 timeout, Which awaited) {
  u64 started = nanoseconds();
  for (u32 round = 1;; ++round) {
    bool late = __any_sync(~0u, round % 16 == 0 && nanoseconds() - started > timeout);   // looked at before the signals: they get a last look
    int missing = 0x7fffffff;
    u64 seen = 0;
    for (int i = lane(); i < n && missing == 0x7fffffff; i += 32) {
      Awaited a = awaited(i);
      u64 value = gin_signal_value(comm, a.context, a.signal);
      if (value < a.least) missing = i, seen = value;
    }
    u32 waiting = __ballot_sync(~0u, missing != 0x7fffffff);
    if (waiting == 0) return {-1, 0};
    if (!late) continue;
    int first = missing;
    #pragma unroll
    for (int step = 16; step; step /= 2) first = min(first, __shfl_xor_sync(~0u, first, step));
    return {first, __shfl_sync(~0u, seen, first % 32)};
  }
}
INLINE Missing wait_signal(i64 comm, i64 context, i64 signal, u64 least, u64 timeout) {
  return wait_signals(comm, 1, timeout, [&](int) { return Awaited{context, signal, least}; });
}

// Whether all puts on the context are done with their sources in time, those of other warps that go on putting included.
INLINE bool wait_flushed(i64 comm, i64 context, u64 timeout) {
  u64 started = nanoseconds();
  for (u32 round = 1;; ++round) {
    bool late = nanoseconds() - started > timeout, done = false;
    if (lane() == 0) done = gin_flushed(comm, context);
    if (__any_sync(~0u, done)) { __syncwarp(); return true; }
    if (__any_sync(~0u, late)) return false;
  }
}
