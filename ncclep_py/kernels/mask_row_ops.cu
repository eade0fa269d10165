// Rows of groups with enable_mask: RANK_MAJOR, and rows packed as NVFP4. Rules M1 to M7 of ncclep_py/member_map.py; declared, with scope and memory
// order, in mask_vocabulary.py; follows mask_ops.cu in one NVRTC program.
INLINE i64 told_rows_at(i64 details, i64 num_ranks, i64 source, i64 epoch) { return details + bank(epoch, num_ranks, source) * 32 + 24; }

OP ep_tell_rows(i64 window, i64 details, i64 rank, i64 num_ranks, i64 epoch) {
  const u32* total = total_rows();
  for (int peer = lane(); peer < num_ranks; peer += 32)
    store_relaxed_sys(peer_at(window, told_rows_at(details, num_ranks, rank, epoch), peer), tagged(epoch, total[peer]));
  return 0;
}
OP ep_take_member_rows(i64 window, i64 details, i64 slot_ids, i64 rank, i64 num_ranks, i64 num_topk, i64 plane_rows, i64 epoch, i64 mask,
                       i64 src_rank_counters) {
  u32* count = total_rows();   // free: my own counts went out long ago
  for (int source = threadIdx.x; source < num_ranks; source += blockDim.x) {
    u64 word = load_relaxed_sys(peer_at(window, told_rows_at(details, num_ranks, source, epoch), rank));
    u32 rows = u32(word >> 32) == u32(epoch) && !(mask >> source & 1) ? u32(word) : 0;
    count[source] = rows;
    ((int*)src_rank_counters)[source] = int(rows);
  }
  __syncthreads();
  int per_source = int(plane_rows / num_ranks * num_topk);
  int* ids = (int*)peer_at(window, slot_ids, rank);
  for (int source = 0; source < num_ranks; ++source)
    for (int i = int(count[source] * num_topk) + threadIdx.x; i < per_source; i += blockDim.x) ids[i64(source) * per_source + i] = -1;
  return 0;
}
// A token's row for the lane's k: -1 for none, and for those of masked ranks.
INLINE int member_row(i64 table, i64 at, i64 num_topk, u32 per_rank, i64 mask) {
  int row = lane() < num_topk ? ((const int*)table)[at] : -1;
  return row >= 0 && (mask >> (u32(row) / per_rank) & 1) ? -1 : row;
}
OP ep_sum_member_row(i64 window, i64 slot, i64 table, i64 out, i64 token, i64 num_topk, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 token_type,
                     i64 begin_vector, i64 end_vector, i64 mask) {
  int row = member_row(table, token * num_topk + lane(), num_topk, u32(plane_rows), mask);
  sum_rows(row_at(window, slot, row, plane_rows, row_bytes), out + token * row_bytes, token_type, int(begin_vector), int(end_vector));
  return 0;
}
OP ep_sum_packed_member_row(i64 window, i64 slot, i64 table, i64 weights, i64 out, i64 token, i64 num_topk, i64 num_experts, i64 num_ranks,
                            i64 plane_rows, i64 row_bytes, i64 begin_stretch, i64 end_stretch, i64 mask) {
  i64 at = token * num_topk + lane(), per_rank = num_experts / num_ranks * plane_rows;
  int row = member_row(table, at, num_topk, u32(per_rank), mask);
  return sum_packed(row_at(window, slot, row, per_rank, row_bytes), weights, at, out + token * row_bytes, row_bytes, begin_stretch, end_stretch);
}
