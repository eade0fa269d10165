// Fabric operations: what a rank does to and with other ranks, over NCCL's Device API. Declared, with scope and memory order, in ops.py;
// follows lane_ops.cu in one NVRTC program. The only device code that knows NCCL's names.
#include <nccl_lsa.h>

// One address per location and kernel: my own window, too, is reached through its LSA address.
#ifdef EP_TEAMS   // several teams: NCCL counts ranks in mine, we count those of the group
INLINE u64 peer_at(i64 window, i64 offset, i64 peer) { return (u64)ncclGetPeerPointer((ncclWindow_t)window, offset, int(peer)); }
#else
INLINE u64 peer_at(i64 window, i64 offset, i64 peer) { return (u64)ncclGetLsaPointer((ncclWindow_t)window, offset, int(peer)); }
#endif
INLINE u64 tagged(i64 epoch, u32 low) { return u64(u32(epoch)) << 32 | low; }
INLINE i64 head_at(i64 heads, i64 num_ranks, i64 source, i64 epoch) { return heads + ((epoch & 1) * num_ranks + source) * 16; }

// ---- waiting for one word of every rank --------------------------------------------------------------------------------------------------------
// Warp 0 polls until every source's word carries the epoch, or somebody gave up, or the deadline passes. Returns the code and tells who.
struct Verdict { int code, peer, culprit; i64 seen; };

INLINE Verdict judge(u64 word, i64 epoch, int source, bool late) {
  int ahead = later(u32(word >> 32), u32(epoch)), status = u32(word) >> 24 & 3, detail = u32(word) & 0xffffff;
  i64 tag = u32(word >> 32);
  if (ahead > 0) return {LEFT_BEHIND, source, source, tag};
  if (ahead < 0) return {late ? TIMEOUT : -1, source, source, tag};   // -1: keep waiting
  if (status == ABORT) return {ABORTED, source, detail, tag};
  if (status == REFUSE) return {REFUSED, source, source, detail};
  return {0, source, source, tag};
}
INLINE bool ends_wait(int code) { return code == ABORTED || code == LEFT_BEHIND || code == TIMEOUT; }

// Where the nanoseconds waited for each rank are added up, [R] u64: these addresses follow FAIL and its claim, 0 where nobody counts.
enum Waits { OF_ALL_BLOCKS = 16, OF_ONE_BLOCK = 24 };   // memory_map.WAITS
INLINE u64 waits_at(i64 fail, Waits which) {
#ifdef EP_WAITS
  return which == OF_ONE_BLOCK || blockIdx.x == 0 ? *(const u64*)(fail + which) : 0;   // of all blocks the first one counts
#else
  return 0;
#endif
}

// `judged(source, late)` says what a source's word means; `waits` comes from `waits_at`.
template <class Judge>
INLINE Verdict wait_all(int num_ranks, int own, u64 timeout, Judge judged, u64 waits = 0) {
  u64 started = nanoseconds();
#ifdef EP_WAITS
  u32 came = 0;   // bit i: source lane + 32 i, of at most 1024
#endif
  for (u32 round = 1;; ++round) {
    bool late = round % 64 == 0 && nanoseconds() - started > timeout;
    bool pending = false;
    Verdict mine = {0, 0, 0, 0};
    for (int source = lane(); source < num_ranks; source += 32) {
      Verdict v = judged(source, late);
#ifdef EP_WAITS
      u32 it = 1u << source / 32;
      if (waits && v.code >= 0 && v.code != TIMEOUT && !(came & it)) {
        came |= it;
        if (round > 1) add_at(waits + u64(source) * 8, nanoseconds() - started);   // who was here before me was not waited for
      }
#endif
      pending |= v.code < 0;
      bool first = mine.code == 0 || (v.code == REFUSED && source == own);   // my own refusal is no news to my host
      if (v.code > 0 && !ends_wait(mine.code) && (first || ends_wait(v.code))) mine = v;
    }
    u32 urgent = __ballot_sync(~0u, ends_wait(mine.code)), bad = __ballot_sync(~0u, mine.code > 0);
    if (urgent == 0 && __any_sync(~0u, pending)) continue;
    u32 told = __ballot_sync(~0u, mine.code == REFUSED && mine.peer == own);
    int who = urgent ? __ffs(urgent) - 1 : told ? __ffs(told) - 1 : bad ? __ffs(bad) - 1 : 0;
    return {__shfl_sync(~0u, mine.code, who), __shfl_sync(~0u, mine.peer, who), __shfl_sync(~0u, mine.culprit, who),
            (i64)__shfl_sync(~0u, mine.seen, who)};
  }
}

INLINE Verdict wait_words(u64 words, int num_ranks, int own, i64 epoch, u64 timeout, u64 waits = 0) {
  return wait_all(num_ranks, own, timeout, [&](int source, bool late) { return judge(load_acquire_sys(words + u64(source) * 8), epoch, source, late); },
                  waits);
}

// ---- head --------------------------------------------------------------------------------------------------------------------------------------
// {epoch, signature bits 0-31}, {epoch, status, detail or signature bits 32-61}: both words carry the epoch, so that no order between them is
// needed. The status keeps bits 24 and 25 of its word; the signature goes around it.
INLINE u32 around_status(i64 signature) { u32 high = u32(signature >> 32); return (high & 0xffffff) | high >> 24 << 26; }
INLINE Verdict judge_head(u64 low, u64 high, i64 epoch, i64 signature, int source, bool late) {
  Verdict v = judge(high, epoch, source, late);
  if (v.code != 0) return v;
  v = judge(u64(u32(low >> 32)) << 32, epoch, source, late);
  i64 theirs = i64(u64(u32(high) & 0xffffff) << 32 | u64(u32(high) >> 26) << 56 | u32(low));
  if (v.code == 0 && theirs != signature) return {MISMATCH, source, source, theirs};
  return v;
}
OP ep_publish_head(i64 window, i64 heads, i64 rank, i64 num_ranks, i64 epoch, i64 signature, i64 status) {
  i64 at = head_at(heads, num_ranks, rank, epoch);
  u64 low = tagged(epoch, u32(signature)), high = tagged(epoch, status ? u32(status) : around_status(signature));
  u64 to = lane() < num_ranks ? peer_at(window, at, lane()) : 0;   // before the fence: the two take their time together
  fence_system();   // by every publishing lane
  for (int peer = lane(); peer < num_ranks; peer += 32) {
    if (peer >= 32) to = peer_at(window, at, peer);
    store_relaxed_sys(to, low);
    store_relaxed_sys(to + 8, high);
  }
  return 0;
}
OP ep_wait_heads(i64 window, i64 heads, i64 rank, i64 num_ranks, i64 epoch, i64 signature, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    u64 words = peer_at(window, head_at(heads, num_ranks, 0, epoch), rank);
    Verdict v = wait_all(num_ranks, int(rank), timeout, [&](int source, bool late) {
      u64 at = words + u64(source) * 16;
      return judge_head(load_acquire_sys(at), load_acquire_sys(at + 8), epoch, signature, source, late);
    }, waits_at(fail, OF_ALL_BLOCKS));
    code = v.code;
    if (code && lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, v.peer, v.culprit, v.seen, code == MISMATCH ? signature : epoch);
  }
  return tell_block(code);
}
OP ep_publish_abort(i64 window, i64 heads, i64 arrived, i64 rank, i64 num_ranks, i64 epoch, i64 fail) {
  u32 why = u32(load_relaxed_gpu(fail)), code = why & 255, culprit = why >> 8;
  if (code != TIMEOUT && code != ABORTED && code != LEFT_BEHIND) return 0;   // every rank sees other reasons itself
  u64 word = tagged(epoch, u32(ABORT) << 24 | culprit);
  i64 at = head_at(heads, num_ranks, rank, epoch);
  for (int peer = lane(); peer < num_ranks; peer += 32) {
    store_relaxed_sys(peer_at(window, at + 8, peer), word);
    store_relaxed_sys(peer_at(window, arrived + rank * 8, peer), word);
  }
  return 0;
}

// ---- counts ------------------------------------------------------------------------------------------------------------------------------------
OP ep_publish_counts(i64 window, i64 counts, i64 rank, i64 num_ranks, i64 num_experts, i64 epoch) {
  const u32* total = total_rows();
  for (int peer = blockIdx.x; peer < num_ranks; peer += gridDim.x) {
    u64 words = peer_at(window, counts + rank * num_experts * 8, peer);
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) store_relaxed_sys(words + 8 * e, tagged(epoch, total[e]));
  }
  return 0;
}
INLINE int wait_count(u64 word, i64 epoch, u64 started, u64 timeout, u64* value) {
  for (u32 round = 1;; ++round) {
    *value = load_relaxed_sys(word);
    int ahead = later(u32(*value >> 32), u32(epoch));
    if (ahead == 0) return 0;
    if (ahead > 0) return LEFT_BEHIND;
    if (round % 64 == 0 && nanoseconds() - started > timeout) return TIMEOUT;
  }
}
OP ep_wait_counts(i64 window, i64 counts, i64 rank, i64 num_ranks, i64 num_experts, i64 epoch, i64 plane_rows, i64 expert_counters, i64 fail,
                  i64 record, i64 timeout) {
  u32 *start = start_row(num_experts), *received = received_rows(num_experts);
  u32 experts = u32(num_experts), local = experts / u32(num_ranks), mine = u32(rank) * local;   // 32 bits: a 64-bit remainder takes a hundred instructions
  bool sums = blockIdx.x == gridDim.x - 1;   // this block waits for all ranks, and keeps my experts' counts
  u64 words = peer_at(window, counts, rank), started = nanoseconds();
  int code = 0;
  for (u32 i = threadIdx.x; i < u32(sums ? num_ranks : rank) * experts && !code; i += blockDim.x) {
    u32 peer = i / experts, e = i % experts;
    u64 value;
    code = wait_count(words + 8 * i, epoch, started, timeout, &value);
    if (code) give_up(fail, record, code, epoch, COUNTS, rank, peer, peer, value >> 32, epoch);
    if (code || u32(value) == 0) continue;
    if (peer < rank) atomicAdd(&start[e], u32(value));
    if (sums && e - mine < local) atomicAdd(&received[e - mine], u32(value));
  }
  code = __syncthreads_or(code);
  if (sums)
    for (u32 l = threadIdx.x; l < local; l += blockDim.x) ((int*)expert_counters)[l] = int(min(received[l], u32(plane_rows)));
  return code;
}

// ---- rows --------------------------------------------------------------------------------------------------------------------------------------
INLINE u64 row_at(i64 window, i64 slot, int row, i64 rows_per_rank, i64 row_bytes) {   // 0 for no row
  u32 rows = u32(rows_per_rank);
  return row < 0 ? 0 : peer_at(window, slot + i64(u32(row) % rows) * row_bytes, u32(row) / rows);
}
OP ep_fetch_row(i64 tokens, i64 token, i64 end, i64 reserved, i64 row_bytes, i64 begin_vector, i64 end_vector) {
  if (token >= end) return 0;
  Staging mine = staging(reserved);
  int n = min(int(end_vector - begin_vector), mine.vectors);
  u64 from = tokens + token * row_bytes + begin_vector * 16;
  for (int v = lane(); v < n; v += 32) copy_async(mine.base + 16 * v, from + 16 * v);
  return 0;
}
OP ep_scatter_row(i64 window, i64 slot, i64 tokens, i64 token, i64 fetched, i64 first, i64 reserved, i64 num_topk, i64 num_experts, i64 num_ranks,
                  i64 plane_rows, i64 row_bytes, i64 begin_vector, i64 end_vector) {
  const int IN_FLIGHT = 12;
  const int* rows = block_rows(num_experts) + (token - first) * num_topk;
  u64 mine = lane() < num_topk ? row_at(window, slot, rows[lane()], num_experts / num_ranks * plane_rows, row_bytes) : 0;
  u32 live = __ballot_sync(~0u, mine != 0);
  u64 source = tokens + token * row_bytes;
  Staging held_back = staging(reserved);
  int begin = int(begin_vector), stop = int(end_vector), staged = token == fetched ? min(stop, begin + held_back.vectors) : begin;
  wait_copies();   // by the lane that started them, and it reads what it copied itself
  for (int v = begin; v < stop && live; v += 32 * IN_FLIGHT) {
    uint4 held[IN_FLIGHT];
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      int i = v + j * 32 + lane();
      if (i < staged) held[j] = load_shared(held_back.base + 16 * (i - begin));
      else if (i < stop) held[j] = load_nc(source + 16 * i);
    }
    for (u32 left = live; left; left &= left - 1) {
      u64 to = __shfl_sync(~0u, mine, __ffs(left) - 1);
      #pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) { int i = v + j * 32 + lane(); if (i < stop) store_row(to + 16 * i, held[j]); }
    }
  }
  return 0;
}

// Arithmetic of one 16-byte vector: ELEMENTS accumulators of fp32.
template <int TYPE> struct Vector;   // TYPE: config.TokenType
template <> struct Vector<0> {       // bf16
  static const int ELEMENTS = 8;
  static __device__ __forceinline__ void add(float* a, u32 x, float w, int j) {
    a[2 * j] = __fmaf_rn(__uint_as_float(x << 16), w, a[2 * j]);
    a[2 * j + 1] = __fmaf_rn(__uint_as_float(x & 0xffff0000u), w, a[2 * j + 1]);
  }
  static __device__ __forceinline__ u32 pack(const float* a, int j) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(a[2 * j + 1]), "f"(a[2 * j]));
    return r;
  }
};
template <> struct Vector<1> {       // fp16
  static const int ELEMENTS = 8;
  static __device__ __forceinline__ void add(float* a, u32 x, float w, int j) {
    float low, high;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(x));
    a[2 * j] = __fmaf_rn(low, w, a[2 * j]);
    a[2 * j + 1] = __fmaf_rn(high, w, a[2 * j + 1]);
  }
  static __device__ __forceinline__ u32 pack(const float* a, int j) {
    u32 r;
    asm("{.reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(r) : "f"(a[2 * j]), "f"(a[2 * j + 1]));
    return r;
  }
};
template <> struct Vector<2> {       // fp32
  static const int ELEMENTS = 4;
  static __device__ __forceinline__ void add(float* a, u32 x, float w, int j) { a[j] = __fmaf_rn(__uint_as_float(x), w, a[j]); }
  static __device__ __forceinline__ u32 pack(const float* a, int j) { return __float_as_uint(a[j]); }
};

template <int TYPE>
INLINE void gather(u64 mine, float my_weight, u32 live, u64 to, int begin, int end) {
  using V = Vector<TYPE>;
  const int WIDTH = 2, ROWS = 8;   // vectors per lane and rows in flight
  for (int v = begin + lane(); v - lane() < end; v += 32 * WIDTH) {
    float sum[WIDTH][V::ELEMENTS] = {};
    for (u32 left = live, base = 0; left; left >>= ROWS, base += ROWS) {
      uint4 held[ROWS][WIDTH];
      #pragma unroll
      for (int k = 0; k < ROWS; ++k) {
        if (!(left >> k & 1)) continue;
        u64 from = __shfl_sync(~0u, mine, base + k);
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j) if (v + 32 * j < end) held[k][j] = load_row(from + 16 * (v + 32 * j));
      }
      #pragma unroll
      for (int k = 0; k < ROWS; ++k) {
        if (!(left >> k & 1)) continue;
        float w = __shfl_sync(~0u, my_weight, base + k);
        #pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
          if (v + 32 * j >= end) continue;
          V::add(sum[j], held[k][j].x, w, 0), V::add(sum[j], held[k][j].y, w, 1);
          V::add(sum[j], held[k][j].z, w, 2), V::add(sum[j], held[k][j].w, w, 3);
        }
      }
    }
    #pragma unroll
    for (int j = 0; j < WIDTH; ++j)
      if (v + 32 * j < end)
        store_row(to + 16 * (v + 32 * j), make_uint4(V::pack(sum[j], 0), V::pack(sum[j], 1), V::pack(sum[j], 2), V::pack(sum[j], 3)));
  }
}
struct Routing { int row; float weight; };   // of one (token, k), by the lane k
INLINE Routing load_routing(u64 table, u64 weights, i64 token, i64 num_topk) {
  i64 at = token * num_topk + lane();
  if (lane() >= num_topk) return {-1, 0.f};
  return {((const int*)table)[at], load_weight(weights + 4 * at)};
}
INLINE Routing* fetched_routing() { return (Routing*)ep_shared + threadIdx.x; }
OP ep_fetch_routing(i64 table, i64 weights, i64 token, i64 end, i64 num_topk) {
  if (token < end) *fetched_routing() = load_routing(table, weights, token, num_topk);
  return 0;
}
OP ep_gather_row(i64 window, i64 slot, i64 table, i64 weights, i64 out, i64 token, i64 fetched, i64 num_topk, i64 num_experts, i64 num_ranks,
                 i64 plane_rows, i64 row_bytes, i64 token_type, i64 begin_vector, i64 end_vector) {
  Routing my = token == fetched ? *fetched_routing() : load_routing(table, weights, token, num_topk);
  u64 mine = row_at(window, slot, my.row, num_experts / num_ranks * plane_rows, row_bytes);
  u32 live = __ballot_sync(~0u, mine != 0);
  u64 to = out + token * row_bytes;
  int begin = int(begin_vector), end = int(end_vector);
  if (token_type == 0) gather<0>(mine, my.weight, live, to, begin, end);
  else if (token_type == 1) gather<1>(mine, my.weight, live, to, begin, end);
  else gather<2>(mine, my.weight, live, to, begin, end);
  return 0;
}

// ---- arrived -----------------------------------------------------------------------------------------------------------------------------------
OP ep_publish_arrived(i64 window, i64 arrived, i64 rank, i64 num_ranks, i64 epoch) {
  u64 to = lane() < num_ranks ? peer_at(window, arrived + rank * 8, lane()) : 0;   // before the fence: the two take their time together
  fence_system();   // by every publishing lane
  for (int peer = lane(); peer < num_ranks; peer += 32) {
    if (peer >= 32) to = peer_at(window, arrived + rank * 8, peer);
    store_relaxed_sys(to, tagged(epoch, 0));
  }
  return 0;
}
OP ep_wait_arrived(i64 window, i64 arrived, i64 rank, i64 num_ranks, i64 epoch, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    Verdict v = wait_words(peer_at(window, arrived, rank), num_ranks, int(rank), epoch, timeout, waits_at(fail, OF_ONE_BLOCK));
    code = v.code;
    if (code && lane() == 0) give_up(fail, record, code, epoch, ARRIVED, rank, v.peer, v.culprit, v.seen, epoch);
  }
  return tell_block(code);
}
