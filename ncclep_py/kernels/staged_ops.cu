// Operations of staged dispatch and combine; follows fabric_ops.cu in one NVRTC program. Declared in ops.py.
OP ep_count_bank(i64 counts, i64 bank_bytes, i64 epoch) { return counts + (epoch & 1) * bank_bytes; }

OP ep_outcome(i64 fail, i64 epoch, i64 status) {
  u64 v = __shfl_sync(~0u, load_relaxed_gpu(fail), 0);
  u32 code = u32(v) & 255, culprit = u32(v) >> 8;
  if (u32(v >> 32) != u32(epoch) || code == REFUSED || code == MISMATCH) return status;   // nothing, or what every rank sees itself
  if (code == STALE_SLOT) return i64(REFUSE) << 24 | STALE;
  return code ? i64(ABORT) << 24 | culprit : status;
}

OP ep_keep_counters(i64 expert_counters, i64 kept, i64 num_planes) {
  for (int l = threadIdx.x; l < num_planes; l += blockDim.x) ((int*)kept)[l] = ((const int*)expert_counters)[l];
  return 0;
}

OP ep_store_origins(i64 window, i64 origins, i64 token, i64 first, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 rank, i64 places) {
  int row = lane() < num_topk ? block_rows(num_experts)[(token - first) * num_topk + lane()] : -1;
  u64 to = row_at(window, origins, row, num_experts / num_ranks * plane_rows, 4);
  if (to) *(int*)to = int(rank * places + token * num_topk + lane());
  return 0;
}

OP ep_copy_table(i64 table, i64 copied, i64 num_tokens, i64 num_topk) {
  int n = int(num_tokens * num_topk);   // at most 2^25; 64 bits would need a division to unroll
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    ((int*)copied)[i] = ((const int*)table)[i];
  return 0;
}

template <class Rows>
INLINE void add_up(int num_planes, Rows rows) {   // one warp: before[l], rows of the planes before l
  u32 *before = total_rows(), sum = 0;            // [L + 1]
  for (int base = 0; base < num_planes; base += 32) {
    int l = base + lane();
    u32 mine = l < num_planes ? rows(l) : 0, up = mine;
    #pragma unroll
    for (int d = 1; d < 32; d *= 2) { u32 below = __shfl_up_sync(~0u, up, d); if (lane() >= d) up += below; }
    if (l < num_planes) before[l] = sum + up - mine;
    sum += __shfl_sync(~0u, up, 31);
  }
  if (lane() == 0) before[num_planes] = sum;
}
OP ep_count_rows(i64 kept, i64 num_planes, i64 plane_rows) {
  __syncthreads();   // whoever used this memory before is done
  if (warp() == 0) add_up(int(num_planes), [&](int l) { return u32(min(max(((const int*)kept)[l], 0), int(plane_rows))); });
  __syncthreads();
  return total_rows()[num_planes];
}

INLINE int plane_of(u32 row, int num_planes) {   // of a row that counts over the planes, after `add_up`
  const u32* before = total_rows();
  int low = 0, high = num_planes;   // the last plane whose first row is not beyond `row`
  while (high - low > 1) { int middle = (low + high) / 2; if (before[middle] <= row) low = middle; else high = middle; }
  return low;
}
INLINE i64 place_of(u32 row, int num_planes, i64 plane_rows) {
  int plane = plane_of(row, num_planes);
  return i64(plane) * plane_rows + (row - total_rows()[plane]);
}
INLINE void move(u64 from, u64 to, int begin, int end) {
  const int IN_FLIGHT = 7;
  for (int v = begin; v < end; v += 32 * IN_FLIGHT) {
    uint4 held[IN_FLIGHT];
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) { int i = v + j * 32 + lane(); if (i < end) held[j] = load_row(from + 16 * i); }
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) { int i = v + j * 32 + lane(); if (i < end) store_row(to + 16 * i, held[j]); }
  }
}
OP ep_copy_row(i64 rows, i64 target, i64 row, i64 num_planes, i64 plane_rows, i64 row_bytes, i64 begin_vector, i64 end_vector) {
  i64 at = place_of(u32(row), int(num_planes), plane_rows) * row_bytes;
  move(rows + at, target + at, int(begin_vector), int(end_vector));
  return 0;
}

INLINE void push_row(i64 window, i64 origins, i64 rows, i64 staging, i64 place, i64 rank, i64 places, i64 row_bytes, int begin, int end) {
  u32 origin = *(const u32*)peer_at(window, origins + 4 * place, rank), source = origin / u32(places);
  u64 to = peer_at(window, staging + i64(origin - source * u32(places)) * row_bytes, source), from = rows + place * row_bytes;
  move(from, to, begin, end);
}
OP ep_push_row(i64 window, i64 origins, i64 rows, i64 staging, i64 row, i64 num_planes, i64 plane_rows, i64 rank, i64 places, i64 row_bytes,
               i64 begin_vector, i64 end_vector) {
  i64 place = place_of(u32(row), int(num_planes), plane_rows);
  push_row(window, origins, rows, staging, place, rank, places, row_bytes, int(begin_vector), int(end_vector));
  return 0;
}

OP ep_reduce_row(i64 window, i64 staging, i64 rank, i64 table, i64 weights, i64 out, i64 token, i64 num_topk, i64 row_bytes, i64 token_type,
                 i64 begin_vector, i64 end_vector) {
  i64 at = token * num_topk + lane();
  bool holds = lane() < num_topk && ((const int*)table)[at] >= 0;
  u64 mine = holds ? peer_at(window, staging + at * row_bytes, rank) : 0;
  float weight = !mine ? 0.f : weights ? load_weight(weights + 4 * at) : 1.f;   // x * 1 + sum is exact
  u32 live = __ballot_sync(~0u, mine != 0);
  u64 to = out + token * row_bytes;
  int begin = int(begin_vector), end = int(end_vector);
  if (token_type == 0) gather<0>(mine, weight, live, to, begin, end);
  else if (token_type == 1) gather<1>(mine, weight, live, to, begin, end);
  else gather<2>(mine, weight, live, to, begin, end);
  return 0;
}
