// Operations of high-throughput kernels. Declared in ht_vocabulary.py, which also says what keys, columns and chunks are; follows fabric_ops.cu in one
// NVRTC program. Row numbers and counts are 32-bit, addresses 64-bit.

// ---- keys and shared memory ----------------------------------------------------------------------------------------------------------------------
struct Counters {
  int keys, columns;
  u32 *total, *lower, *all, *rank_total, *start;
};
INLINE Counters counters(i64 experts, i64 ranks, i64 by_rank) {
  int keys = int(by_rank ? ranks : experts), columns = int(by_rank ? experts + ranks : experts);
  u32* s = ep_shared;
  return {keys, columns, s, s + columns, s + 2 * columns, s + 3 * columns, s + 3 * columns + ranks};
}
struct Span { int first, end; };   // of tokens
INLINE Span part_of(Span s, int i, int n) {
  int size = s.end - s.first;   // at most 2^20 tokens, over less than 2^11 parts
  return {s.first + size * i / n, s.first + size * (i + 1) / n};
}
INLINE Span block_span(i64 num_tokens) { return part_of({0, int(num_tokens)}, blockIdx.x, gridDim.x); }
INLINE int round_up(u32 n, i64 alignment) { return int((n + u32(alignment) - 1) & ~(u32(alignment) - 1)); }
INLINE int worker() { return blockIdx.x * warps() + warp(); }
INLINE int workers() { return gridDim.x * warps(); }

// One lane per (token, k), as many whole tokens as fit a warp.
struct Pair {
  u32 token;      // lanes of my token
  u32 mates;      // those of them with an expert of my rank
  int first;      // the first of them with my expert
  bool distinct;  // I am the first
  bool leader;    // I am the first of my rank
  int rank;       // of my expert
};
INLINE Pair pair_of(int e, int num_topk, int local) {
  Pair p;
  int begin = lane() / num_topk * num_topk;
  u32 all = num_topk == 32 ? ~0u : (1u << num_topk) - 1;
  p.token = all << begin;
  p.rank = e < 0 ? -1 : int(u32(e) / u32(local));
  u32 same = __match_any_sync(~0u, e) & p.token;
  p.mates = __match_any_sync(~0u, p.rank) & p.token;
  p.first = __ffs(same) - 1;
  p.distinct = e >= 0 && p.first == lane();
  p.leader = e >= 0 && __ffs(p.mates) - 1 == lane();
  return p;
}
const int AHEAD = 4;   // groups of tokens whose ids are loaded before the first is used
INLINE void load_pairs(int* e, i64 topk_idx, i64 idx_bytes, int num_topk, i64 experts, int token, int end) {
  int at_once = 32 / num_topk, mine = lane() / num_topk, k = lane() % num_topk;
  #pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
    int t = token + a * at_once + mine;
    e[a] = mine < at_once && t < end ? load_idx(topk_idx, i64(t) * num_topk + k, idx_bytes, experts) : -1;
  }
}
const int NEAR = 1 << 16;   // a word that is further ahead is one of 2^32 epochs ago
INLINE int wait_tag(u64 word, i64 epoch, u64 started, u64 timeout, u64* value) {
  for (u32 round = 1;; ++round) {
    *value = load_relaxed_sys(word);
    int ahead = later(u32(*value >> 32), u32(epoch));
    if (ahead == 0) return 0;
    if (ahead > 0 && ahead < NEAR) return LEFT_BEHIND;
    if (round % 64 == 0 && nanoseconds() - started > timeout) return TIMEOUT;
  }
}

// ---- update ----------------------------------------------------------------------------------------------------------------------------------------
OP ep_ht_count(i64 topk_idx, i64 idx_bytes, i64 num_tokens, i64 num_topk, i64 num_experts, i64 num_ranks, i64 by_rank, i64 chunks, i64 partials,
               i64 header) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  u32 *total = ep_shared, *count = ep_shared + c.columns;
  for (int i = threadIdx.x; i < c.columns + int(chunks) * c.keys; i += blockDim.x) ep_shared[i] = 0;
  __syncthreads();
  int used = min(int(chunks), warps()), k = int(num_topk), at_once = 32 / k, local = int(num_experts / num_ranks);
  if (warp() < used) {
    Span s = part_of(block_span(num_tokens), warp(), used);
    u32* mine = count + warp() * c.keys;
    for (int t = s.first; t < s.end; t += AHEAD * at_once) {
      int e[AHEAD];
      load_pairs(e, topk_idx, idx_bytes, k, num_experts, t, s.end);
      #pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        Pair p = pair_of(e[a], k, local);
        if (by_rank && p.distinct) atomicAdd(&total[e[a]], 1);
        if (by_rank ? p.leader : p.distinct) atomicAdd(&mine[by_rank ? p.rank : e[a]], 1);
      }
    }
  }
  __syncthreads();
  u32* out = (u32*)partials + i64(blockIdx.x) * (c.columns + chunks * c.keys);
  int first_key = c.columns - c.keys;
  for (int i = threadIdx.x; i < c.columns; i += blockDim.x) {
    u32 sum = 0;
    if (i < first_key) sum = total[i];
    else for (int j = 0; j < used; ++j) sum += count[j * c.keys + i - first_key];
    out[i] = sum;
  }
  for (int i = threadIdx.x; i < int(chunks) * c.keys; i += blockDim.x) out[c.columns + i] = count[i];
  if (blockIdx.x == 0 && threadIdx.x == 0) ((i64*)header)[0] = 0, ((i64*)header)[1] = 0;
  return 0;
}
OP ep_ht_sum(i64 partials, i64 num_experts, i64 num_ranks, i64 by_rank, i64 chunks) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  int stride = c.columns + int(chunks) * c.keys, first_key = c.columns - c.keys;
  for (int i = threadIdx.x; i < c.columns; i += blockDim.x) {
    const u32* at = (const u32*)partials + i;
    u32 sum = 0, before = 0;
    #pragma unroll 8
    for (int b = 0; b < int(gridDim.x); ++b) {
      u32 v = at[i64(b) * stride];
      sum += v;
      before += b < int(blockIdx.x) ? v : 0;
    }
    c.total[i] = sum, c.lower[i] = 0, c.all[i] = 0;
    if (i < first_key) continue;
    const u32* mine = (const u32*)partials + i64(blockIdx.x) * stride + c.columns + i - first_key;
    #pragma unroll 8
    for (int j = 0; j < int(chunks); ++j) {
      c.start[j * c.keys + i - first_key] = before;
      before += mine[j * c.keys];
    }
  }
  __syncthreads();
  return 0;
}
INLINE i64 hits_at(i64 hits, i64 num_ranks, i64 num_experts, i64 source, i64 epoch) {
  return hits + ((epoch & 1) * num_ranks + source) * (num_experts + num_ranks) * 8;
}
OP ep_ht_publish_hits(i64 window, i64 hits, i64 rank, i64 num_ranks, i64 num_experts, i64 by_rank, i64 epoch) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  for (u32 i = threadIdx.x; i < u32(num_ranks) * c.columns; i += blockDim.x) {
    u32 peer = i / u32(c.columns), column = i % u32(c.columns);
    store_relaxed_sys(peer_at(window, hits_at(hits, num_ranks, num_experts, rank, epoch) + 8 * column, peer), tagged(epoch, c.total[column]));
  }
  return 0;
}
OP ep_ht_wait_hits(i64 window, i64 hits, i64 rank, i64 num_ranks, i64 num_experts, i64 by_rank, i64 epoch, i64 fail, i64 record, i64 timeout) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  u64 words = peer_at(window, hits_at(hits, num_ranks, num_experts, 0, epoch), rank), started = nanoseconds();
  int code = 0;
  for (u32 i = threadIdx.x; i < u32(num_ranks) * c.columns && !code; i += blockDim.x) {
    u32 source = i / u32(c.columns), column = i % u32(c.columns);
    u64 value;
    code = wait_tag(words + 8 * (source * u32(num_experts + num_ranks) + column), epoch, started, timeout, &value);
    if (code) give_up(fail, record, code, epoch, COUNTS, rank, source, source, value >> 32, epoch);
    else if (u32(value)) {
      atomicAdd(&c.all[column], u32(value));
      if (source < rank) atomicAdd(&c.lower[column], u32(value));
    }
  }
  return __syncthreads_or(code);
}
INLINE void place_zones(Counters c, int experts, int ranks, bool by_rank, i64 alignment) {   // zone starts to `total`, which was published long ago
  int local = experts / ranks;
  for (int p = warp(); p < ranks; p += warps()) {
    u32 run = 0;
    for (int base = 0; base < local && !by_rank; base += 32) {
      int l = base + lane();
      u32 padded = l < local ? round_up(c.all[p * local + l], alignment) : 0, sum = padded;
      #pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        u32 left = __shfl_up_sync(~0u, sum, step);
        if (lane() >= step) sum += left;
      }
      if (l < local) c.total[p * local + l] = run + sum - padded;
      run += __shfl_sync(~0u, sum, 31);
    }
    if (lane() == 0) c.rank_total[p] = by_rank ? c.all[experts + p] : run;
  }
}
OP ep_ht_assign(i64 topk_idx, i64 idx_bytes, i64 num_tokens, i64 num_topk, i64 num_experts, i64 num_ranks, i64 by_rank, i64 chunks, i64 alignment,
                i64 budget, i64 rank, i64 routes, i64 place_table) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  int first_key = c.columns - c.keys, k_all = int(num_topk), at_once = 32 / k_all, local = int(num_experts / num_ranks);
  place_zones(c, int(num_experts), int(num_ranks), by_rank, alignment);
  __syncthreads();
  for (int i = threadIdx.x; i < int(chunks) * c.keys; i += blockDim.x) {
    int key = i % c.keys;
    c.start[i] += c.lower[first_key + key] + (by_rank ? 0 : c.total[key]);
  }
  __syncthreads();
  int used = min(int(chunks), warps());
  if (warp() < used) {
    Span s = part_of(block_span(num_tokens), warp(), used);
    u32* start = c.start + warp() * c.keys;
    int begin = lane() / k_all * k_all, k = lane() - begin;
    u32 lower_lanes = (1u << lane()) - 1;
    for (int t = s.first; t < s.end; t += AHEAD * at_once) {
      int ids[AHEAD];
      load_pairs(ids, topk_idx, idx_bytes, k_all, num_experts, t, s.end);
      #pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        if (t + a * at_once >= s.end) break;
        int e = ids[a];
        Pair p = pair_of(e, k_all, local);
        int key = by_rank ? (p.leader ? p.rank : -1) : (p.distinct ? e : -1);
        u32 same = __match_any_sync(~0u, key), row = ~0u;
        if (key >= 0) row = start[key] + __popc(same & lower_lanes);
        __syncwarp();
        if (key >= 0 && lane() == __ffs(same) - 1) start[key] += __popc(same);
        __syncwarp();
        bool kept = key >= 0 && row < u32(budget);
        u32 kept_lanes = __ballot_sync(~0u, kept) & p.token, distinct_lanes = __ballot_sync(~0u, p.distinct);
        int column = 0, before = 0, at = kept ? key : 0x7fffffff, expert = p.distinct ? e : -1;
        for (int j = 0; j < k_all; ++j) {
          int other = __shfl_sync(~0u, expert, begin + j);
          column += other >= p.rank * local && other < e;
          before += __shfl_sync(~0u, at, begin + j) < at;
        }
        int source = by_rank ? __ffs(p.mates) - 1 : p.first;   // whose row is mine, too
        bool found = __shfl_sync(~0u, int(kept), e < 0 ? lane() : source) && e >= 0;
        u32 my_row = __shfl_sync(~0u, row, e < 0 ? lane() : source);
        int token = t + a * at_once + lane() / k_all;
        if (lane() >= at_once * k_all || token >= s.end) continue;
        i64 base = i64(token) * k_all;
        if (kept) ((i64*)routes)[base + before] = i64(by_rank ? __popc(distinct_lanes & p.mates) : 1) << 48 | i64(p.rank) << 32 | row;
        if (k >= __popc(kept_lanes)) ((i64*)routes)[base + k] = -1;
        ((i64*)place_table)[base + k] = found ? i64(e) << 40 | i64(by_rank ? column : 0) << 32 | my_row : -1;
      }
    }
  }
  __syncthreads();
  return 0;
}
OP ep_ht_publish_kept(i64 window, i64 kept_rows, i64 place_table, i64 num_tokens, i64 num_topk, i64 num_experts, i64 num_ranks, i64 by_rank, i64 budget,
                      i64 rank, i64 epoch) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  int local = int(num_experts / num_ranks);
  bool cut = false;
  for (int p = 0; p < num_ranks; ++p) cut |= by_rank && c.rank_total[p] > u32(budget);
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) c.lower[e] = 0;
  __syncthreads();
  for (i64 i = threadIdx.x; cut && i < num_tokens * num_topk; i += blockDim.x) {
    i64 place = ((const i64*)place_table)[i], first = i - i % num_topk;
    bool counts = place >= 0;
    for (i64 j = first; j < i; ++j) counts = counts && ((const i64*)place_table)[j] != place;
    if (counts) atomicAdd(&c.lower[place >> 40], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; cut && e < num_experts; e += blockDim.x) {
    int p = e / local;
    if (c.rank_total[p] > u32(budget)) store_relaxed_sys(peer_at(window, kept_rows + (rank * local + e % local) * 8, p), tagged(epoch, c.lower[e]));
  }
  return 0;
}
INLINE void put(i64 base, i64 i, i64 bytes, i64 value) {
  if (base == 0) return;
  if (bytes == 8) ((i64*)base)[i] = value;
  else ((int*)base)[i] = int(value);
}
INLINE i64 totals_at(i64 zones, i64 num_local) { return zones + (12 * num_local + 7) / 8 * 8; }
OP ep_ht_store_zones(i64 window, i64 kept_rows, i64 rank, i64 num_ranks, i64 num_experts, i64 by_rank, i64 alignment, i64 budget, i64 trap, i64 zones,
                     i64 expert_counters, i64 expert_offsets, i64 unpadded, i64 total, i64 int_bytes, i64 epoch, i64 fail, i64 record, i64 timeout) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  int local = int(num_experts / num_ranks), code = 0;
  u32 mine = c.rank_total[rank], most = u32(budget);
  bool cut = by_rank && mine > most;
  u32* count = c.all + rank * local;
  if (cut) for (int l = threadIdx.x; l < local; l += blockDim.x) count[l] = 0;
  __syncthreads();
  u64 words = peer_at(window, kept_rows, rank), started = nanoseconds();
  for (u32 i = threadIdx.x; cut && i < u32(num_ranks) * local && !code; i += blockDim.x) {
    u64 value;
    code = wait_tag(words + 8 * i, epoch, started, timeout, &value);
    i64 source = i / u32(local);
    if (code) give_up(fail, record, code, epoch, COUNTS, rank, source, source, value >> 32, epoch);
    else if (u32(value)) atomicAdd(&count[i % u32(local)], u32(value));
  }
  code = __syncthreads_or(code);
  for (int l = threadIdx.x; l < local; l += blockDim.x) {
    u32 n = count[l], begin = by_rank ? 0 : min(c.total[rank * local + l], most), room = by_rank ? n : most - begin;
    u32 rows = min(n, room), padded = by_rank ? n : min(u32(round_up(n, alignment)), room);
    int* z = (int*)zones;
    z[l] = int(begin), z[local + l] = int(rows), z[2 * local + l] = int(padded);
    put(expert_counters, l, int_bytes, padded);
    put(expert_offsets, l, int_bytes, begin);
    put(unpadded, l, int_bytes, rows);
  }
  if (threadIdx.x == 0) {
    i64* totals = (i64*)totals_at(zones, local);
    totals[0] = min(mine, most), totals[1] = mine;
    put(total, 0, int_bytes, mine);
    for (int p = 0; trap && p < num_ranks; ++p) {
      if (c.rank_total[p] <= most) continue;
      note(fail, record, OVERFLOW, epoch, COUNTS, rank, p, p, c.rank_total[p], budget);
      break;
    }
  }
  return code;
}
const int EARLIER = 9;   // refusal.Refusal
OP ep_ht_map_status(i64 header, i64 handle, i64 status) {
  i64 held = ((const i64*)header)[1];
  return status == 0 && (held ^ handle) >> 32 ? i64(REFUSE) << 24 | EARLIER : status;   // whichever of the handle's updates it was
}

// ---- dispatch --------------------------------------------------------------------------------------------------------------------------------------
INLINE int rank_in(i64 route) { return int(route >> 32) & 0xffff; }
INLINE i64 route_of(i64 routes, i64 token, i64 num_topk) { return lane() < num_topk ? ((const i64*)routes)[token * num_topk + lane()] : -1; }
INLINE u64 routed_row(i64 window, i64 slot, i64 route, i64 row_bytes) {   // 0 for no row
  return route < 0 ? 0 : peer_at(window, slot + i64(u32(route)) * row_bytes, rank_in(route));
}
OP ep_ht_scatter_row(i64 window, i64 slot, i64 tokens, i64 routes, i64 token, i64 num_topk, i64 row_bytes, i64 begin_vector, i64 end_vector) {
  const int IN_FLIGHT = 7;
  u64 mine = routed_row(window, slot, route_of(routes, token, num_topk), row_bytes);
  u32 live = __ballot_sync(~0u, mine != 0);
  u64 source = tokens + token * row_bytes;
  for (int v = int(begin_vector); v < end_vector && live; v += 32 * IN_FLIGHT) {
    uint4 held[IN_FLIGHT];
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) { int i = v + j * 32 + lane(); if (i < end_vector) held[j] = load_nc(source + 16 * i); }
    for (u32 left = live; left; left &= left - 1) {
      u64 to = __shfl_sync(~0u, mine, __ffs(left) - 1);
      #pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) { int i = v + j * 32 + lane(); if (i < end_vector) store_row(to + 16 * i, held[j]); }
    }
  }
  return 0;
}
OP ep_ht_scatter_weights(i64 window, i64 recv_idx, i64 recv_weights, i64 weights, i64 routes, i64 place_table, i64 token, i64 num_topk, i64 num_experts,
                         i64 num_ranks, i64 by_rank, i64 global_ids) {
  i64 route = route_of(routes, token, num_topk), place = -1, local = num_experts / num_ranks;
  float weight = 0.f, sum = 0.f;
  if (lane() < num_topk) {
    place = ((const i64*)place_table)[token * num_topk + lane()];
    weight = load_weight(weights + 4 * (token * num_topk + lane()));
  }
  for (u32 left = by_rank ? __ballot_sync(~0u, route >= 0) : 0; left; left &= left - 1) {   // columns without an id
    i64 there = __shfl_sync(~0u, route, __ffs(left) - 1), at = i64(u32(there)) * num_topk + lane();
    if (lane() < (there >> 48) || lane() >= num_topk) continue;
    *(i64*)peer_at(window, recv_idx + 8 * at, rank_in(there)) = -1;
    *(float*)peer_at(window, recv_weights + 4 * at, rank_in(there)) = 0.f;
  }
  bool first = true;
  for (int k = 0; k < num_topk; ++k) {   // duplicates of an expert have the same place
    i64 other = __shfl_sync(~0u, place, k);
    float w = __shfl_sync(~0u, weight, k);
    if (other == place) sum = first ? w : sum + w, first = false;
  }
  if (place < 0) return 0;
  u32 expert = u32(place >> 40), peer = expert / u32(local);
  i64 at = i64(u32(place));
  if (by_rank) {
    at = at * num_topk + (place >> 32 & 255);
    *(i64*)peer_at(window, recv_idx + 8 * at, peer) = i64(global_ids ? expert : expert - peer * u32(local));
  }
  *(float*)peer_at(window, recv_weights + 4 * at, peer) = sum;
  return 0;
}
OP ep_ht_zero_pads(i64 window, i64 slot, i64 zones, i64 rank, i64 num_local, i64 row_bytes) {
  const int* z = (const int*)zones;
  int done = 0, vectors = int(row_bytes / 16);
  for (int base = 0; base < num_local; base += 32) {
    int l = base + lane(), first = 0, pads = 0;
    if (l < num_local) first = z[l] + z[num_local + l], pads = z[2 * num_local + l] - z[num_local + l];
    for (u32 left = __ballot_sync(~0u, pads > 0); left; left &= left - 1) {
      int who = __ffs(left) - 1, begin = __shfl_sync(~0u, first, who), n = __shfl_sync(~0u, pads, who);
      int skip = (worker() - done % workers() + workers()) % workers();   // pad number `done + i` of all is worker `(done + i) % workers`'s
      for (int i = skip; i < n; i += workers()) {
        u64 to = peer_at(window, slot + i64(begin + i) * row_bytes, rank);
        for (int v = lane(); v < vectors; v += 32) store_row(to + 16 * v, make_uint4(0, 0, 0, 0));
        if (vectors == 0 && lane() == 0) *(u32*)to = 0;
      }
      done += n;
    }
  }
  return 0;
}
OP ep_ht_clear_ids(i64 window, i64 recv_idx, i64 recv_weights, i64 zones, i64 rank, i64 num_local, i64 num_topk, i64 visible) {
  i64 received = *(const i64*)totals_at(zones, num_local);
  i64* idx = (i64*)peer_at(window, recv_idx, rank);
  float* weights = (float*)peer_at(window, recv_weights, rank);
  #pragma unroll 1   // unrolled, it begins with a 64-bit division
  for (i64 i = received * num_topk + worker() * 32 + lane(); i < visible * num_topk; i += workers() * 32) idx[i] = -1, weights[i] = 0.f;
  return 0;
}
OP ep_ht_check_rows(i64 zones, i64 num_local, i64 visible, i64 rank, i64 epoch, i64 fail, i64 record) {
  i64 received = *(const i64*)totals_at(zones, num_local);
  if (received > visible && lane() == 0) note(fail, record, OVERFLOW, epoch, SLOT, rank, rank, rank, received, visible);
  return 0;
}

// ---- combine ---------------------------------------------------------------------------------------------------------------------------------------
OP ep_ht_gather_row(i64 window, i64 slot, i64 routes, i64 out, i64 token, i64 num_topk, i64 row_bytes, i64 token_type, i64 begin_vector,
                    i64 end_vector) {
  u64 mine = routed_row(window, slot, route_of(routes, token, num_topk), row_bytes);
  u32 live = __ballot_sync(~0u, mine != 0);
  u64 to = out + token * row_bytes;
  int begin = int(begin_vector), end = int(end_vector);
  if (token_type == 0) gather<0>(mine, 1.f, live, to, begin, end);   // x * 1 + sum is x + sum, rounded once
  else if (token_type == 1) gather<1>(mine, 1.f, live, to, begin, end);
  else gather<2>(mine, 1.f, live, to, begin, end);
  return 0;
}
OP ep_ht_gather_weights(i64 window, i64 recv_weights, i64 place_table, i64 grads, i64 token, i64 num_topk, i64 num_experts, i64 num_ranks, i64 by_rank) {
  if (lane() >= num_topk) return 0;
  i64 place = ((const i64*)place_table)[token * num_topk + lane()];
  float grad = 0.f;
  if (place >= 0) {
    i64 at = i64(u32(place));
    if (by_rank) at = at * num_topk + (place >> 32 & 255);
    grad = *(const float*)peer_at(window, recv_weights + 4 * at, (place >> 40) / (num_experts / num_ranks));
  }
  ((float*)grads)[token * num_topk + lane()] = grad;
  return 0;
}

// ---- a caller's own tensors ------------------------------------------------------------------------------------------------------------------------
OP ep_ht_copy_rows(i64 source, i64 target, i64 zones, i64 num_local, i64 visible, i64 row_bytes) {
  const int IN_FLIGHT = 4;
  i64 bytes = min(*(const i64*)totals_at(zones, num_local), visible) * row_bytes, vectors = bytes / 16;
  #pragma unroll 1   // unrolled, it begins with a 64-bit division
  for (i64 v = i64(worker()) * 32 * IN_FLIGHT; v < vectors; v += i64(workers()) * 32 * IN_FLIGHT) {
    uint4 held[IN_FLIGHT];
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) { i64 i = v + j * 32 + lane(); if (i < vectors) held[j] = load_row(source + 16 * i); }
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) { i64 i = v + j * 32 + lane(); if (i < vectors) store_row(target + 16 * i, held[j]); }
  }
  i64 word = vectors * 4 + lane();   // visible of 4-byte words
  if (worker() == 0 && word < bytes / 4) ((u32*)target)[word] = ((const u32*)source)[word];
  return 0;
}
