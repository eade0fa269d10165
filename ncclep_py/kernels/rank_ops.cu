// Operations of the RANK_MAJOR layout: a token's row goes once to every rank that hosts any of its experts. Declared, with scope and memory order,
// in ops.py; follows fabric_ops.cu in one NVRTC program.
//
// Shared memory: total[R] and start[R] rows per destination rank, then for every (token, k) of the block its row (-1: none, or the token's row
// stands at an earlier k with the same rank), its expert id and the bits of its weight.
struct Pairs { int* rows; int* ids; u32* weights; };
INLINE Pairs block_pairs(i64 num_ranks, i64 pairs) {
  int* rows = block_rows(num_ranks);
  return {rows, rows + pairs, (u32*)(rows + 2 * pairs)};
}

// A warp looks at whole tokens, a lane at one (token, k). Who speaks for a token and rank: the lane of the first k with that rank.
INLINE int whole_tokens(int num_topk) { return 32 / num_topk; }
INLINE u32 lanes_of_token(int num_topk) { return (~0u >> (32 - num_topk)) << (lane() / num_topk * num_topk); }
INLINE bool speaks(int owner, u32 same, int num_topk) { return owner >= 0 && lane() == __ffs(same & lanes_of_token(num_topk)) - 1; }

OP ep_count_ranks(i64 topk_idx, i64 idx_bytes, i64 num_tokens, i64 num_topk, i64 num_experts, i64 num_ranks, i64 first) {
  u32 *total = total_rows(), *start = start_row(num_ranks);
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) total[r] = 0, start[r] = 0;
  __syncthreads();
  int k = int(num_topk), step = whole_tokens(k) * k, local = int(num_experts / num_ranks), n = int(num_tokens) * k;
  for (int c = warp() * step; c < n; c += warps() * step) {
    int i = c + lane();
    int e = lane() < step && i < n ? load_idx(topk_idx, i, idx_bytes, num_experts) : -1;
    int owner = e < 0 ? -1 : e / local;
    u32 same = __match_any_sync(~0u, owner);
    if (speaks(owner, same, k)) {
      atomicAdd(&total[owner], 1);
      if (i < first * k) atomicAdd(&start[owner], 1);
    }
  }
  __syncthreads();
  return 0;
}
OP ep_assign_ranks(i64 topk_idx, i64 idx_bytes, i64 topk_weights, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 first, i64 end,
                   i64 rank) {
  u32* start = start_row(num_ranks);
  int k = int(num_topk), step = whole_tokens(k) * k, local = int(num_experts / num_ranks), n = int(end - first) * k;
  Pairs pairs = block_pairs(num_ranks, n);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    pairs.ids[i] = load_idx(topk_idx, first * k + i, idx_bytes, num_experts);
    pairs.weights[i] = __float_as_uint(load_weight(topk_weights + 4 * (first * k + i)));
  }
  __syncthreads();
  if (warp() == 0) {   // one warp, in order: a token's row is the number of earlier tokens to that rank
    int mine = int(rank * (plane_rows / num_ranks));
    for (int c = 0; c < n; c += step) {
      int i = c + lane();
      int e = lane() < step && i < n ? pairs.ids[i] : -1;
      int owner = e < 0 ? -1 : e / local;
      u32 same = __match_any_sync(~0u, owner);
      bool speaker = speaks(owner, same, k);
      u32 tokens = __ballot_sync(~0u, speaker) & same;   // of this stretch, that go to my owner
      int row = speaker ? int(owner * plane_rows) + mine + int(start[owner]) + __popc(tokens & ((1u << lane()) - 1)) : -1;
      __syncwarp();
      if (speaker && lane() == __ffs(tokens) - 1) start[owner] += __popc(tokens);
      __syncwarp();
      if (lane() < step && i < n) pairs.rows[i] = row;
    }
  }
  __syncthreads();
  return 0;
}
INLINE void spread_routing(i64 window, i64 slot_ids, i64 slot_weights, int row, int e, u32 weight, i64 num_topk, i64 num_experts, i64 num_ranks,
                           i64 plane_rows, i64 global_ids) {   // to the rows of those lanes that have one
  int k = lane(), local = int(num_experts / num_ranks);
  for (u32 left = __ballot_sync(~0u, row >= 0); left; left &= left - 1) {
    u32 to = u32(__shfl_sync(~0u, row, __ffs(left) - 1)), peer = to / u32(plane_rows);
    i64 place = (i64(to % u32(plane_rows)) * num_topk + k) * 4;
    int here = e - int(peer) * local;
    if (k < num_topk) {
      *(int*)peer_at(window, slot_ids + place, peer) = e < 0 || here < 0 || here >= local ? -1 : global_ids ? e : here;
      *(u32*)peer_at(window, slot_weights + place, peer) = weight;
    }
  }
}
OP ep_send_routing(i64 window, i64 slot_ids, i64 slot_weights, i64 table, i64 token, i64 first, i64 end, i64 num_topk, i64 num_experts, i64 num_ranks,
                   i64 plane_rows, i64 global_ids) {
  Pairs pairs = block_pairs(num_ranks, (end - first) * num_topk);
  int k = lane(), row = -1, e = -1;
  u32 weight = 0;
  i64 at = (token - first) * num_topk + k;
  if (k < num_topk) row = pairs.rows[at], e = pairs.ids[at], weight = pairs.weights[at];
  spread_routing(window, slot_ids, slot_weights, row, e, weight, num_topk, num_experts, num_ranks, plane_rows, global_ids);
  if (k < num_topk) ((int*)table)[token * num_topk + k] = row;
  return 0;
}
OP ep_publish_arrived_rows(i64 window, i64 arrived, i64 rank, i64 num_ranks, i64 epoch) {
  const u32* total = total_rows();
  fence_system();   // by every publishing lane
  for (int peer = lane(); peer < num_ranks; peer += 32)
    store_relaxed_sys(peer_at(window, arrived + rank * 8, peer), tagged(epoch, total[peer]));   // at most 2^20 rows: status stays GO
  return 0;
}
INLINE void clear_ids(i64 window, i64 slot_ids, i64 rank, i64 num_ranks, i64 num_topk, i64 plane_rows) {   // -1 in those of rows nobody filled
  const u32* count = total_rows();   // rows of each source
  int per_source = int(plane_rows / num_ranks * num_topk);
  int* ids = (int*)peer_at(window, slot_ids, rank);
  for (int source = 0; source < num_ranks; ++source)
    for (int i = int(count[source] * num_topk) + threadIdx.x; i < per_source; i += blockDim.x) ids[i64(source) * per_source + i] = -1;
}
OP ep_take_arrived_rows(i64 window, i64 arrived, i64 slot_ids, i64 rank, i64 num_ranks, i64 num_topk, i64 plane_rows, i64 epoch,
                        i64 src_rank_counters) {
  u32* count = total_rows();   // free: my own counts went out with ARRIVED
  u64 words = peer_at(window, arrived, rank);
  for (int source = threadIdx.x; source < num_ranks; source += blockDim.x) {
    u64 word = load_relaxed_sys(words + 8 * u64(source));
    u32 rows = u32(word >> 32) == u32(epoch) ? u32(word) & 0xffffff : 0;
    count[source] = rows;
    ((int*)src_rank_counters)[source] = int(rows);
  }
  __syncthreads();
  clear_ids(window, slot_ids, rank, num_ranks, num_topk, plane_rows);
  return 0;
}

// ---- combine -----------------------------------------------------------------------------------------------------------------------------------
INLINE int nth_bit(u32 mask, int n) {   // position of the n-th set bit of those there are
  int at = 0;
  #pragma unroll
  for (int width = 16; width; width >>= 1) {
    int below = __popc(mask >> at & ((1u << width) - 1));
    if (n >= below) n -= below, at += width;
  }
  return at & 31;
}
INLINE void sum_rows(u64 mine, u64 to, i64 token_type, int begin, int end) {   // of the lanes that have one, in order
  u32 live = __ballot_sync(~0u, mine != 0);
  mine = __shfl_sync(~0u, mine, nth_bit(live, lane()));   // side by side, so that all rows of up to 8 ranks are in flight together
  live = live ? ~0u >> (32 - __popc(live)) : 0;
  if (token_type == 0) gather<0>(mine, 1.f, live, to, begin, end);   // a fused multiply-add with weight 1 is an addition
  else if (token_type == 1) gather<1>(mine, 1.f, live, to, begin, end);
  else gather<2>(mine, 1.f, live, to, begin, end);
}
OP ep_sum_row(i64 window, i64 slot, i64 table, i64 out, i64 token, i64 num_topk, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 token_type,
              i64 begin_vector, i64 end_vector) {
  u64 mine = lane() < num_topk ? row_at(window, slot, ((const int*)table)[token * num_topk + lane()], plane_rows, row_bytes) : 0;
  sum_rows(mine, out + token * row_bytes, token_type, int(begin_vector), int(end_vector));
  return 0;
}
