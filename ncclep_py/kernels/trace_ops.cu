// Stamps: where a block is, for timelines. Compiled to nothing unless EP_TRACE is defined; declared in ops.py, read by tracing.py.
// Each launch writes one stripe of EP_STAMPS pairs of words: {time, kernel << 32 | multiprocessor}, then {time, phase} for each stamp.
#ifdef EP_TRACE
enum { EP_STAMPS = 32 };
extern "C" { __device__ u64 ep_trace[4]; }   // the buffer (0: none), number of this kernel, blocks, launches (a power of two); set by the host
INLINE u64 traced(int word) {   // volatile: the host writes it when the code is loaded
  u64 v;
  asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(ep_trace + word)) : "memory");
  return v;
}
INLINE void write_pair(u64 at, u64 time, u64 what) {
  asm volatile("st.global.v2.u64 [%0], {%1,%2};" :: "l"(at), "l"(time), "l"(what) : "memory");
}
#endif
OP ep_trace_begin() {
#ifdef EP_TRACE
  u64 buffer = traced(0), kernel = traced(1), blocks = traced(2), launches = traced(3);
  if (buffer == 0 || warp() != 0 || blockIdx.x >= blocks) return 0;
  u64 mine = buffer + 8 * u64(blockIdx.x), count = *(volatile u64*)mine;   // launches this block has traced
  u64 stripe = buffer + (8 * blocks + 511) / 512 * 512 + (u64(blockIdx.x) * launches + (count & (launches - 1))) * (16 * EP_STAMPS);
  __syncwarp();
  if (lane() == 0) {
    u32 multiprocessor;
    asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));
    *(volatile u64*)mine = count + 1;
    write_pair(stripe, nanoseconds(), kernel << 32 | multiprocessor);
  }
  return i64(stripe + 16);
#else
  return 0;
#endif
}
OP ep_stamp(i64 trace, i64 phase) {
#ifdef EP_TRACE
  if (trace == 0) return 0;
  if (lane() == 0) write_pair(u64(trace), nanoseconds(), u64(phase));
  return (trace & 511) == 16 * (EP_STAMPS - 1) ? trace : trace + 16;   // a full stripe keeps its first stamps and the last one
#else
  return 0;
#endif
}
