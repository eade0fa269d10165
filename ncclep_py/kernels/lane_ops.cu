// Lane operations: what a warp or a block does by itself. Declared, with scope and memory order, in ops.py; compiled by NVRTC together with
// fabric_ops.cu (this file comes first). Integers are 64-bit throughout; epochs are compared as 32-bit serial numbers, here and nowhere else.
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

#define OP extern "C" __device__ i64
#define INLINE static __device__ __forceinline__

enum Code { TIMEOUT = 1, ABORTED, REFUSED, MISMATCH, LEFT_BEHIND, OVERFLOW, STALE_SLOT };   // errors.Code
enum Phase { HEAD = 1, COUNTS, ROWS, ARRIVED, SLOT };                                      // errors.Phase
const int STALE = 6;   // refusal.Refusal
enum Status { GO = 0, REFUSE = 1, ABORT = 2 };                                            // errors.Status

extern __shared__ __align__(16) u32 ep_shared[];   // total[E], start[E], received[E], rows[tokens of the block][K], rows of tokens on their way

INLINE int lane() { return threadIdx.x & 31; }
INLINE int warp() { return __shfl_sync(~0u, int(threadIdx.x >> 5), 0); }   // a shuffle, so that the compiler knows it is uniform
INLINE int warps() { return blockDim.x >> 5; }
INLINE int tell_block(int code) {   // warp 0's code, at most 32, for the block: __syncthreads_or would only tell whether there is one
  return __syncthreads_count(warp() == 0 && lane() < code);
}
INLINE int later(u32 a, u32 b) { return int(a - b); }   // > 0 if epoch a comes after b
INLINE u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }

// ---- accesses, one function per strength ---------------------------------------------------------------------------------------------------
INLINE u64 load_relaxed_sys(u64 p) { u64 v; asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
INLINE u64 load_acquire_sys(u64 p) { u64 v; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
INLINE u64 load_relaxed_gpu(u64 p) { u64 v; asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
INLINE void store_relaxed_sys(u64 p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
INLINE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
INLINE u32 count_in(u64 p, u32 wrap) {
  u32 v;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(wrap) : "memory");
  return v;
}
INLINE u64 swap_if(u64 p, u64 expected, u64 v) {
  u64 old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(old) : "l"(p), "l"(expected), "l"(v) : "memory");
  return old;
}
INLINE void add_at(u64 p, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
INLINE uint4 load_nc(u64 p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
INLINE uint4 load_row(u64 p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
INLINE void store_row(u64 p, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
INLINE void copy_async(u32 to, u64 from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
INLINE void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
INLINE uint4 load_shared(u32 p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
  return v;
}
INLINE int load_idx(u64 base, i64 i, i64 bytes, i64 experts) {   // -1 for every id outside [0, experts)
  i64 e;
  if (bytes == 8) {
    asm volatile("ld.global.nc.s64 %0, [%1];" : "=l"(e) : "l"(base + 8 * i));
  } else {
    int narrow;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(narrow) : "l"(base + 4 * i));
    e = narrow;
  }
  return e >= 0 && e < experts ? int(e) : -1;
}
INLINE float load_weight(u64 p) { float w; asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(w) : "l"(p)); return w; }

// ---- failure: the first decision of an operation stands, and one record per operation reaches the host -----------------------------------------
INLINE bool claim(u64 word, u32 epoch, u32 low) {
  u64 old = load_relaxed_gpu(word);
  while (u32(old >> 32) != epoch || u32(old) == 0) {   // a claim's low half is never 0; fresh memory's is
    u64 found = swap_if(word, old, u64(epoch) << 32 | low);
    if (found == old) return true;
    old = found;
  }
  return false;
}
INLINE void note(i64 fail, i64 record, i64 code, i64 epoch, i64 phase, i64 rank, i64 peer, i64 culprit, i64 seen, i64 expected) {
  if (!claim(fail + 8, u32(epoch), 1)) return;
  volatile i64* r = (volatile i64*)record;
  if (r[0] != 0) return;   // the host has not read the last one yet; the first is kept
  const i64 fields[] = {epoch, phase, rank, peer, culprit, seen, expected};
  #pragma unroll
  for (int i = 0; i < 7; ++i) r[1 + i] = fields[i];
  __threadfence_system();
  r[0] = code;
}
INLINE void give_up(i64 fail, i64 record, i64 code, i64 epoch, i64 phase, i64 rank, i64 peer, i64 culprit, i64 seen, i64 expected) {
  claim(fail, u32(epoch), u32(culprit) << 8 | u32(code));
  note(fail, record, code, epoch, phase, rank, peer, culprit, seen, expected);
}

// ---- who and where ---------------------------------------------------------------------------------------------------------------------------
// All integers here are small. A division costs a hundred cycles, so there are few, by way of fp32 where that is exact: (a + 1/2) / b has at least
// 1 / 2b to the next integer, and an error below 3 a * 2^-24 / b.
INLINE int over(int a, int b) {   // floor(a / b), 0 <= a < 2^21
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(float(b)));
  return int((float(a) + 0.5f) * inverse);
}
struct Parts { int size, longer; };   // n things over so many: the first `longer` get one more than `size`
INLINE Parts divide(int n, int over_many) { int q = n < 1 << 21 ? over(n, over_many) : n / over_many; return {q, n - q * over_many}; }
INLINE int starts_at(Parts p, int i) { return i * p.size + min(i, p.longer); }

struct Share { int first, end, part, parts; };   // the tokens of this block, and which of the blocks on them it is
INLINE Share share(int tokens) {
  int blocks = gridDim.x, b = blockIdx.x;
  if (tokens >= blocks) { Parts p = divide(tokens, blocks); return {starts_at(p, b), starts_at(p, b + 1), 0, 1}; }
  if (tokens == 0) return {0, 0, 0, 1};
  int parts = over(blocks, tokens), token = over(b, parts);
  if (token >= tokens) return {0, 0, 0, parts};
  return {token, token + 1, b - token * parts, parts};
}
INLINE int pieces(Share s) { int own = s.end - s.first; return own == 0 ? 1 : max(1, over(warps(), own)); }   // warps on one row

OP ep_block_idx() { return blockIdx.x; }
OP ep_warp_idx() { return warp(); }
OP ep_first_token(i64 num_tokens) { return share(num_tokens).first; }
OP ep_end_token(i64 num_tokens) { return share(num_tokens).end; }
OP ep_token_part(i64 num_tokens) { return share(num_tokens).part; }
OP ep_warp_token(i64 num_tokens) {
  Share s = share(num_tokens);
  int p = pieces(s), row = over(warp(), p);
  return row < over(warps(), p) ? s.first + row : s.end;
}
OP ep_token_step(i64 num_tokens) { return over(warps(), pieces(share(num_tokens))); }
INLINE i64 vector_at(i64 num_tokens, i64 row_bytes, int next) {
  Share s = share(num_tokens);
  int p = pieces(s);
  return starts_at(divide(int(row_bytes / 16), s.parts * p), s.part * p + warp() - over(warp(), p) * p + next);
}
OP ep_begin_vector(i64 num_tokens, i64 row_bytes) { return vector_at(num_tokens, row_bytes, 0); }
OP ep_end_vector(i64 num_tokens, i64 row_bytes) { return vector_at(num_tokens, row_bytes, 1); }

// ---- epoch and life of an operation ----------------------------------------------------------------------------------------------------------
OP ep_read_epoch(i64 word) { return u32(__shfl_sync(~0u, *(const u32*)word, 0)); }
OP ep_advance_epoch(i64 word, i64 epoch) {
  if (lane() == 0) *(u64*)word = u32(epoch + 1);
  return 0;
}
OP ep_clear_fail(i64 fail) {
  if (lane() == 0) ((u64*)fail)[0] = 0, ((u64*)fail)[1] = 0;
  return 0;
}
OP ep_store_header(i64 header, i64 epoch, i64 handle) {
  if (lane() == 0) ((i64*)header)[0] = epoch, ((i64*)header)[1] = handle;
  return 0;
}
OP ep_read_header(i64 header) { return ((const i64*)header)[1]; }   // by every lane: uniform without a shuffle, so nobody waits for it here
OP ep_header_status(i64 held, i64 handle, i64 status) { return status == 0 && held != handle ? i64(REFUSE) << 24 | STALE : status; }
OP ep_check_header(i64 held, i64 handle, i64 rank, i64 epoch, i64 fail, i64 record) {
  if (held != handle && threadIdx.x == 0) give_up(fail, record, STALE_SLOT, epoch, SLOT, rank, rank, rank, held, handle);
  return held == handle ? 0 : STALE_SLOT;
}
OP ep_last_block(i64 counter) {
  __syncthreads();
  u32 before = 0;
  if (threadIdx.x == 0) before = count_in(counter, gridDim.x - 1);   // wraps to 0 by itself
  return __syncthreads_or(threadIdx.x == 0 && before == gridDim.x - 1);
}
OP ep_op_code(i64 fail, i64 epoch) {
  int code = 0;
  if (warp() == 0) {   // one reading: a later one may see what another warp of this block has failed at since
    u64 v = __shfl_sync(~0u, load_relaxed_gpu(fail), 0);
    code = u32(v >> 32) == u32(epoch) ? int(v & 255) : 0;
  }
  return tell_block(code);
}

// ---- counts and rows -------------------------------------------------------------------------------------------------------------------------
INLINE u32* total_rows() { return ep_shared; }
INLINE u32* start_row(i64 experts) { return ep_shared + experts; }
INLINE u32* received_rows(i64 experts) { return ep_shared + 2 * experts; }
INLINE int* block_rows(i64 experts) { return (int*)(ep_shared + 3 * experts); }
struct Staging { u32 base; int vectors; };   // this warp's part of what is left of shared memory
INLINE Staging staging(i64 reserved) {
  u32 size;
  asm("mov.u32 %0, %dynamic_smem_size;" : "=r"(size));
  u32 used = (u32(reserved) * 4 + 15) / 16 * 16;
  int vectors = size > used ? int((size - used) / 16 / u32(warps())) : 0;
  return {u32(__cvta_generic_to_shared(ep_shared)) + used + u32(warp() * vectors * 16), vectors};
}

OP ep_count_experts(i64 topk_idx, i64 idx_bytes, i64 num_tokens, i64 num_topk, i64 num_experts, i64 first, i64 end) {
  u32 *total = total_rows(), *start = start_row(num_experts), *received = received_rows(num_experts);
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) total[e] = 0, start[e] = 0, received[e] = 0;
  __syncthreads();
  int n = int(num_tokens * num_topk), before = int(first * num_topk);   // at most 2^25; a loop of 64 bits is unrolled with a division
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    int e = load_idx(topk_idx, i, idx_bytes, num_experts);
    if (e < 0) continue;
    atomicAdd(&total[e], 1);
    if (i < before) atomicAdd(&start[e], 1);
  }
  __syncthreads();
  return 0;
}
OP ep_assign_rows(i64 topk_idx, i64 idx_bytes, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 first, i64 end, i64 part,
                  i64 table, i64 rank, i64 epoch, i64 fail, i64 record) {
  u32* start = start_row(num_experts);
  int* rows = block_rows(num_experts);
  i64 base = first * num_topk, n = (end - first) * num_topk;
  if (warp() == 0)   // one warp, in order: the row of a pair is the number of earlier pairs with its expert
    for (i64 c = 0; c < n; c += 32) {
      i64 i = c + lane();
      int e = i < n ? load_idx(topk_idx, base + i, idx_bytes, num_experts) : -1;
      u32 same = __match_any_sync(~0u, e);
      int global = -1;
      if (e >= 0) {
        u32 row = start[e] + __popc(same & ((1u << lane()) - 1));
        if (row < plane_rows) global = int(e * plane_rows + row);   // owner * L * P + local expert * P + row
        else { i64 owner = e / (num_experts / num_ranks); note(fail, record, OVERFLOW, epoch, ROWS, rank, owner, owner, row, plane_rows); }
      }
      __syncwarp();
      if (e >= 0 && lane() == __ffs(same) - 1) start[e] += __popc(same);
      __syncwarp();
      if (i < n) {
        rows[i] = global;
        if (part == 0) ((int*)table)[base + i] = global;
      }
    }
  __syncthreads();
  return 0;
}
