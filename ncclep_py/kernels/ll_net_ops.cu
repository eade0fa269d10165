// Operations of low-latency kernels over several teams. Declared in ll_net_vocabulary.py; follows ht_net_ops.cu in one NVRTC program, compiled with
// EP_TEAMS. The protocol is that of ll_net_map.py. A networked rank is a rank of another team; of its two signals 2 * source is HEAD (context 0), and
// 2 * source + 1 DATA (every context, one add per operation, on context 0 two).
INLINE int networked_ranks(i64 num_ranks, i64 team_size) { return int(num_ranks - team_size); }
INLINE int networked(int i, i64 rank, i64 team_size) { return i < first_of(rank, team_size) ? i : i + int(team_size); }   // the i-th, ascending
INLINE Awaited data_signal(int peer, int context, i64 operations) { return {context, 2 * peer + 1, u64(operations) * (context == 0 ? 2 : 1)}; }
INLINE u32* lower_rows() { return total_rows(); }   // [experts of my team]: rows from lower ranks, where my own totals were
INLINE u32* got_rows(i64 num_experts) { return received_rows(num_experts); }   // [R][my experts]: rows from each rank

// ---- head ----------------------------------------------------------------------------------------------------------------------------------------
OP ep_ll_net_enter(i64 comm, i64 window, i64 heads, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 count, i64 epoch, i64 signature,
                   i64 status, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    int peers = networked_ranks(num_ranks, team_size), per_peer = int(contexts);
    i64 at = head_at(heads, num_ranks, rank, epoch);
    auto awaited = [&](int i) { return data_signal(networked(i / per_peer, rank, team_size), i % per_peer, count); };
    Missing m = wait_signals(comm, peers * per_peer, u64(timeout), awaited);
    u32 wet = 0;   // a bit per peer of this lane
    for (int i = lane(), bit = 0; m.index >= 0 && i < peers; i += 32, ++bit)
      for (int c = 0; c < per_peer; ++c) {
        Awaited a = awaited(i * per_peer + c);
        if (gin_signal_value(comm, a.context, a.signal) < a.least) wet |= 1u << bit;
      }
    net_release();
    for (int i = lane(); i < peers; i += 32, wet >>= 1) {
      int peer = networked(i, rank, team_size);
      if (!(wet & 1)) {
        gin_put_value(comm, window, peer, 0, at, head_low(epoch, signature));
        gin_put_value(comm, window, peer, 0, at + 8, head_high(epoch, signature, status));
      }
      gin_signal(comm, peer, 0, 2 * rank, 1);
    }
    if (m.index >= 0) {
      code = TIMEOUT;
      int peer = networked(m.index / per_peer, rank, team_size);
      if (lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, peer, peer, count, count);
    }
  }
  return tell_block(code);
}
OP ep_ll_net_wait_heads(i64 comm, i64 window, i64 heads, i64 rank, i64 num_ranks, i64 team_size, i64 count, i64 epoch, i64 signature, i64 fail,
                        i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    u64 words = peer_at(window, head_at(heads, num_ranks, 0, epoch), rank);
    Verdict v = wait_all(int(num_ranks), int(rank), u64(timeout), [&](int source, bool late) {
      u64 at = words + u64(source) * 16;
      return judge_head(load_acquire_sys(at), load_acquire_sys(at + 8), epoch, signature, source, late);
    });
    i64 expected = v.code == MISMATCH ? signature : epoch;
    if (v.code == 0) {
      Missing m = wait_signals(comm, networked_ranks(num_ranks, team_size), u64(timeout), [&](int i) {
        return Awaited{0, 2 * networked(i, rank, team_size), u64(count + 1)};
      });
      if (m.index >= 0) {
        int peer = networked(m.index, rank, team_size);
        v = {TIMEOUT, peer, peer, count};
        expected = count + 1;
      }
    }
    code = v.code;
    if (code && lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, v.peer, v.culprit, v.seen, expected);
  }
  return tell_block(code);
}

// ---- counts --------------------------------------------------------------------------------------------------------------------------------------
OP ep_ll_net_publish_counts(i64 window, i64 counts, i64 counts_sent, i64 rank, i64 num_ranks, i64 team_size, i64 num_experts, i64 epoch) {
  const u32* total = total_rows();
  int first = first_of(rank, team_size);
  for (int i = blockIdx.x; i < team_size; i += gridDim.x) {
    u64 words = peer_at(window, counts + rank * num_experts * 8, first + i);
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) store_relaxed_sys(words + 8 * e, tagged(epoch, total[e]));
  }
  u64* ready = (u64*)peer_at(window, counts_sent, rank);
  for (int e = threadIdx.x; blockIdx.x == 0 && e < num_experts; e += blockDim.x) ready[e] = total[e];
  __syncthreads();
  return 0;
}
OP ep_ll_net_put_counts(i64 comm, i64 window, i64 counts_sent, i64 net_counts, i64 rank, i64 num_ranks, i64 team_size, i64 num_experts) {
  i64 size = team_size * (num_experts / num_ranks) * 8;
  net_release();
  for (int i = lane(); i < networked_ranks(num_ranks, team_size); i += 32) {
    int peer = networked(i, rank, team_size);
    gin_put(comm, window, peer, 0, net_counts + rank * size, window, counts_sent + peer / int(team_size) * size, size);
  }
  __syncwarp();
  return 0;
}
OP ep_ll_net_signal(i64 comm, i64 rank, i64 num_ranks, i64 team_size, i64 context) {
  net_release();
  for (int i = lane(); i < networked_ranks(num_ranks, team_size); i += 32) gin_signal(comm, networked(i, rank, team_size), context, 2 * rank + 1, 1);
  __syncwarp();
  return 0;
}
OP ep_ll_net_wait_counts(i64 comm, i64 window, i64 counts, i64 net_counts, i64 rank, i64 num_ranks, i64 team_size, i64 num_experts, i64 count,
                         i64 epoch, i64 plane_rows, i64 expert_counters, i64 fail, i64 record, i64 timeout) {
  u32 *lower = lower_rows(), *got = got_rows(num_experts);
  u32 local = u32(num_experts) / u32(num_ranks), ours = u32(team_size) * local, first = u32(first_of(rank, team_size));
  u32 mine = (u32(rank) - first) * local, peers = u32(networked_ranks(num_ranks, team_size));
  for (u32 e = threadIdx.x; e < ours; e += blockDim.x) lower[e] = 0;
  __syncthreads();
  u64 started = nanoseconds();
  Missing m = wait_signals(comm, int(peers), u64(timeout), [&](int i) {   // by every warp, which then needs no other's acquire
    Awaited a = data_signal(networked(i, rank, team_size), 0, count);
    a.least += 1;
    return a;
  });
  __syncwarp();
  int code = 0;
  if (m.index >= 0) {
    code = TIMEOUT;
    int peer = networked(m.index, rank, team_size);
    if (lane() == 0) give_up(fail, record, code, epoch, COUNTS, rank, peer, peer, count, count);
  }
  auto keep = [&](u32 source, u32 e, u32 rows) {
    if (rows && source < u32(rank)) atomicAdd(&lower[e], rows);
    if (rows && e - mine < local) atomicAdd(&got[source * local + e - mine], rows);
  };
  u64 words = peer_at(window, counts, rank);
  for (u32 i = threadIdx.x; i < u32(team_size) * ours && !code; i += blockDim.x) {
    u32 source = first + i / ours, e = i % ours;
    u64 value;
    code = wait_count(words + 8 * (source * u32(num_experts) + first * local + e), epoch, started, u64(timeout), &value);
    if (code) give_up(fail, record, code, epoch, COUNTS, rank, source, source, value >> 32, epoch);
    else keep(source, e, u32(value));
  }
  const u64* came = (const u64*)peer_at(window, net_counts, rank);
  for (u32 i = threadIdx.x; i < peers * ours && !code; i += blockDim.x) {
    u32 source = u32(networked(int(i / ours), rank, team_size)), e = i % ours;
    keep(source, e, u32(came[source * ours + e]));
  }
  code = __syncthreads_or(code);
  for (u32 l = threadIdx.x; blockIdx.x == gridDim.x - 1 && l < local; l += blockDim.x) {
    u32 received = 0;
    for (u32 source = 0; source < num_ranks; ++source) received += got[source * local + l];
    ((int*)expert_counters)[l] = int(min(received, u32(plane_rows)));
  }
  return code;
}
OP ep_ll_net_place_rows(i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 first, i64 end, i64 part, i64 table, i64 rank, i64 team_size,
                        i64 epoch, i64 fail, i64 record) {
  const u32* lower = lower_rows();
  int* rows = block_rows(num_experts);
  int local = int(num_experts) / int(num_ranks), plane = int(plane_rows), begin = first_of(rank, team_size) * local, ours = int(team_size) * local;
  i64 base = first * num_topk;
  for (int i = threadIdx.x; i < (end - first) * num_topk; i += blockDim.x) {
    int row = rows[i], e = row < 0 ? -1 : row / plane;
    if (row >= 0 && u32(e - begin) < u32(ours)) {
      u32 final = u32(row % plane) + lower[e - begin];
      int owner = e / local;
      if (final >= u32(plane)) note(fail, record, OVERFLOW, epoch, ROWS, rank, owner, owner, final, plane_rows);
      rows[i] = row = final < u32(plane) ? e * plane + int(final) : -1;
    }
    if (part == 0) ((int*)table)[base + i] = row;
  }
  __syncthreads();
  return 0;
}

// ---- rows ----------------------------------------------------------------------------------------------------------------------------------------
INLINE int block_row(i64 token, i64 first, i64 num_topk, i64 num_experts) {   // of lane k: the row of (token, k), or what stands for it
  return lane() < num_topk ? block_rows(num_experts)[(token - first) * num_topk + lane()] : -1;
}
INLINE int host_of(int row, i64 num_experts, i64 num_ranks, i64 plane_rows) { return row < 0 ? -1 : row / (int(num_experts) / int(num_ranks) * int(plane_rows)); }
INLINE bool of_team(int host, i64 rank, i64 team_size) { return host >= 0 && u32(host - first_of(rank, team_size)) < u32(team_size); }
INLINE void move_row(u64 source, u64 to, int vectors) {   // of the caller's rows, which nobody writes meanwhile
  const int IN_FLIGHT = 7;
  for (int v = 0; v < vectors; v += 32 * IN_FLIGHT) {
    uint4 held[IN_FLIGHT];
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) { int i = v + j * 32 + lane(); if (i < vectors) held[j] = load_nc(source + 16 * i); }
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) { int i = v + j * 32 + lane(); if (i < vectors) store_row(to + 16 * i, held[j]); }
  }
}
INLINE int networked_host(int row, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 rank, i64 team_size) {   // -1 for none, and for my team
  int host = host_of(row, num_experts, num_ranks, plane_rows);
  return of_team(host, rank, team_size) ? -1 : host;
}
OP ep_ll_net_send_row(i64 comm, i64 window, i64 sent, i64 messages, i64 tokens, i64 token, i64 first, i64 end, i64 num_topk, i64 num_experts,
                      i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 words, i64 header_bytes, i64 put_bytes, i64 message_bytes, i64 rank,
                      i64 team_size, i64 contexts, i64 epoch) {
  int row = block_row(token, first, num_topk, num_experts), host = networked_host(row, num_experts, num_ranks, plane_rows, rank, team_size);
  u32 same = __match_any_sync(~0u, host);
  bool puts = host >= 0 && lane() == __ffs(same) - 1;   // a lane per rank
  if (!__any_sync(~0u, puts)) return 0;
  i64 at = token * message_bytes;
  u64 message = peer_at(window, sent + at, rank);
  if (lane() == 0) *(u64*)message = tagged(1, u32(epoch));
  if (lane() < num_topk) {
    ((int*)message)[2 + lane()] = row;
    for (int w = 1; w < words; ++w)   // id and weight: block_pairs
      ((int*)message)[2 + w * num_topk + lane()] = block_rows(num_experts)[(w * (end - first) + token - first) * num_topk + lane()];
  }
  move_row(tokens + token * row_bytes, message + header_bytes, int(row_bytes / 16));
  net_release();
  if (puts) gin_put(comm, window, host, token % contexts, messages + at, window, sent + at, put_bytes);
  __syncwarp();
  return 0;
}
OP ep_ll_net_stage_row(i64 window, i64 sent, i64 tokens, i64 token, i64 first, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows,
                       i64 row_bytes, i64 message_bytes, i64 rank, i64 team_size) {
  int row = block_row(token, first, num_topk, num_experts);
  if (!__any_sync(~0u, networked_host(row, num_experts, num_ranks, plane_rows, rank, team_size) >= 0)) return 0;
  move_row(tokens + token * row_bytes, peer_at(window, sent + token * message_bytes, rank), int(row_bytes / 16));
  return 0;
}
OP ep_ll_net_quantise_row(i64 window, i64 sent, i64 sent_scales, i64 tokens, i64 token, i64 first, i64 num_topk, i64 num_experts, i64 row_bytes,
                          i64 round_scales, i64 message_bytes, i64 rank) {
  bool wanted = __any_sync(~0u, block_row(token, first, num_topk, num_experts) >= 0);
  u64 to = peer_at(window, sent + token * message_bytes, rank), scales_to = peer_at(window, sent_scales + token * message_bytes, rank);
  quantise(tokens + token * row_bytes, lane() == 0 ? to : 0, scales_to, wanted, int(round_scales), 0, int(row_bytes / 256), 0, 0);
  __syncwarp();
  return 0;
}
OP ep_ll_net_scatter_row(i64 window, i64 slot, i64 tokens, i64 token, i64 first, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows,
                         i64 row_bytes, i64 rank, i64 team_size) {
  int row = block_row(token, first, num_topk, num_experts);
  bool near_by = of_team(host_of(row, num_experts, num_ranks, plane_rows), rank, team_size);
  u64 mine = near_by ? row_at(window, slot, row, int(num_experts) / int(num_ranks) * plane_rows, row_bytes) : 0;
  spread_row<true>(tokens + token * row_bytes, mine, 0, int(row_bytes / 16));
  return 0;
}
OP ep_ll_net_spread_row(i64 window, i64 slot, i64 sent, i64 token, i64 first, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows,
                        i64 row_bytes, i64 message_bytes, i64 rank, i64 team_size) {
  int row = block_row(token, first, num_topk, num_experts);
  bool near_by = of_team(host_of(row, num_experts, num_ranks, plane_rows), rank, team_size);
  u64 mine = near_by ? row_at(window, slot, row, int(num_experts) / int(num_ranks) * plane_rows, row_bytes) : 0;
  spread_row<false>(peer_at(window, sent + token * message_bytes, rank), mine, 0, int(row_bytes / 16));
  return 0;
}
OP ep_ll_net_put_tags(i64 comm, i64 window, i64 tags, i64 rank, i64 num_ranks, i64 team_size, i64 count, i64 epoch, i64 low) {
  for (int i = lane(); i < networked_ranks(num_ranks, team_size); i += 32) {   // a TAG orders nothing; the signals after it do
    int peer = networked(i, rank, team_size);
    if (gin_signal_value(comm, 0, 2 * peer) > u64(count)) gin_put_value(comm, window, peer, 0, tags + 8 * rank, tagged(epoch, u32(low)));
  }
  __syncwarp();
  return 0;
}
OP ep_ll_net_wait_data(i64 comm, i64 window, i64 tags, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 count, i64 epoch, i64 fail,
                       i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    int peers = networked_ranks(num_ranks, team_size), per_peer = int(contexts);
    Missing m = wait_signals(comm, peers * per_peer, u64(timeout), [&](int i) {
      return data_signal(networked(i / per_peer, rank, team_size), i % per_peer, count + 1);
    });
    __syncwarp();
    int first = 0x7fffffff, culprit = 0, told = 0;
    i64 seen = 0;
    for (int i = lane(); m.index < 0 && i < peers && first == 0x7fffffff; i += 32) {
      int peer = networked(i, rank, team_size);
      u64 word = load_relaxed_sys(peer_at(window, tags + 8 * peer, rank));
      int status = u32(word) >> 24 & 3, detail = u32(word) & 0xffffff;
      if (u32(word >> 32) != u32(epoch)) told = ABORTED, culprit = peer, seen = word >> 32;   // it gave up before my HEAD came, so on whom it cannot tell
      else if (status == ABORT) told = ABORTED, culprit = detail, seen = epoch;
      else if (status == REFUSE) told = REFUSED, culprit = peer, seen = detail;
      if (told) first = i;
    }
    int lowest = first;
    #pragma unroll
    for (int step = 16; step; step /= 2) lowest = min(lowest, __shfl_xor_sync(~0u, lowest, step));
    bool bad = lowest != 0x7fffffff;
    if (m.index >= 0) {
      code = TIMEOUT;
      int peer = networked(m.index / per_peer, rank, team_size);
      if (lane() == 0) give_up(fail, record, code, epoch, ROWS, rank, peer, peer, count, count + 1);
    } else if (bad) {
      code = __shfl_sync(~0u, told, lowest % 32);
      if (first == lowest) give_up(fail, record, code, epoch, ROWS, rank, networked(first, rank, team_size), culprit, seen, epoch);
    }
  }
  return tell_block(code);
}
INLINE void take(i64 rows_window, i64 slot, i64 place, u64 from, i64 row_bytes, i64 rank) {   // of lanes with a place
  spread_row<false>(from, place >= 0 ? peer_at(rows_window, slot + place * row_bytes, rank) : 0, 0, int(row_bytes / 16));
}
OP ep_ll_net_take_row(i64 rows_window, i64 slot, i64 slot_scales, i64 window, i64 messages, i64 remote, i64 source, i64 token, i64 most, i64 num_topk,
                      i64 num_experts, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 scale_bytes, i64 header_bytes, i64 message_bytes, i64 rank,
                      i64 epoch, i64 fail, i64 record) {
  const u32* got = got_rows(num_experts);
  int local = int(num_experts) / int(num_ranks), plane = int(plane_rows), place = -1;
  i64 index = source * most + token;
  u64 message = peer_at(window, messages + index * message_bytes, rank);
  bool sent = *(const u64*)message == tagged(1, u32(epoch));   // the same for all lanes; fresh memory has none
  int number = sent && lane() < num_topk ? ((const int*)message)[2 + lane()] : -1, e = number < 0 ? -1 : number / plane - int(rank) * local;
  if (u32(e) < u32(local)) {
    u32 row = u32(number % plane);
    for (int s = 0; s < source; ++s) row += got[s * local + e];
    if (row < u32(plane)) place = e * plane + int(row);
    else note(fail, record, OVERFLOW, epoch, ROWS, rank, rank, rank, row, plane_rows);
  }
  take(rows_window, slot, place, message + header_bytes, row_bytes, rank);
  if (scale_bytes) take(rows_window, slot_scales, place, message + header_bytes + row_bytes, scale_bytes, rank);
  if (lane() < num_topk) ((int*)remote)[index * num_topk + lane()] = place;
  return 0;
}

// ---- rows of RANK_MAJOR: shared memory is that of rank_ops.cu --------------------------------------------------------------------------------------
OP ep_ll_net_send_routing(i64 window, i64 slot_ids, i64 slot_weights, i64 table, i64 token, i64 first, i64 end, i64 num_topk, i64 num_experts,
                          i64 num_ranks, i64 plane_rows, i64 global_ids, i64 rank, i64 team_size) {
  Pairs pairs = block_pairs(num_ranks, (end - first) * num_topk);
  int row = block_row(token, first, num_topk, num_ranks);
  bool near_by = of_team(host_of(row, num_ranks, num_ranks, plane_rows), rank, team_size);
  i64 at = (token - first) * num_topk + lane();
  int e = -1;
  u32 weight = 0;
  if (lane() < num_topk) {
    e = pairs.ids[at], weight = pairs.weights[at];
    ((int*)table)[token * num_topk + lane()] = row;
  }
  spread_routing(window, slot_ids, slot_weights, near_by ? row : -1, e, weight, num_topk, num_experts, num_ranks, plane_rows, global_ids);
  return 0;
}
OP ep_ll_net_take_token(i64 rows_window, i64 slot, i64 slot_scales, i64 window, i64 slot_ids, i64 slot_weights, i64 messages, i64 remote, i64 source,
                        i64 token, i64 most, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 scale_bytes,
                        i64 header_bytes, i64 message_bytes, i64 global_ids, i64 rank, i64 epoch) {
  i64 index = source * most + token;
  u64 message = peer_at(window, messages + index * message_bytes, rank);
  bool sent = *(const u64*)message == tagged(1, u32(epoch));   // the same for all lanes; fresh memory has none
  const int* words = (const int*)message + 2 + lane();
  int row = -1, e = -1;
  u32 weight = 0;
  if (sent && lane() < num_topk) row = words[0], e = words[num_topk], weight = u32(words[2 * num_topk]);
  if (host_of(row, num_ranks, num_ranks, plane_rows) != rank) row = -1;
  int place = row < 0 ? -1 : row % int(plane_rows);
  take(rows_window, slot, place, message + header_bytes, row_bytes, rank);
  if (scale_bytes) take(rows_window, slot_scales, place, message + header_bytes + row_bytes, scale_bytes, rank);
  spread_routing(window, slot_ids, slot_weights, row, e, weight, num_topk, num_experts, num_ranks, plane_rows, global_ids);
  if (lane() < num_topk) ((int*)remote)[index * num_topk + lane()] = place;
  return 0;
}
OP ep_ll_net_publish_arrived_rows(i64 window, i64 arrived, i64 rank, i64 team_size, i64 epoch) {
  const u32* total = total_rows();
  int first = first_of(rank, team_size);
  fence_system();   // by every publishing lane
  for (int i = lane(); i < team_size; i += 32)
    store_relaxed_sys(peer_at(window, arrived + rank * 8, first + i), tagged(epoch, total[first + i]));   // as publish_arrived_rows
  return 0;
}
OP ep_ll_net_put_row_tags(i64 comm, i64 window, i64 tags, i64 rank, i64 num_ranks, i64 team_size, i64 epoch) {
  const u32* total = total_rows();
  for (int i = lane(); i < networked_ranks(num_ranks, team_size); i += 32) {
    int peer = networked(i, rank, team_size);
    gin_put_value(comm, window, peer, 0, tags + 8 * rank, tagged(epoch, total[peer]));
  }
  __syncwarp();
  return 0;
}
OP ep_ll_net_take_arrived_rows(i64 window, i64 arrived, i64 tags, i64 slot_ids, i64 rank, i64 num_ranks, i64 team_size, i64 num_topk, i64 plane_rows,
                               i64 epoch, i64 src_rank_counters) {
  u32* count = total_rows();   // free: my own counts went out
  u64 told = peer_at(window, arrived, rank), put = peer_at(window, tags, rank);
  for (int source = threadIdx.x; source < num_ranks; source += blockDim.x) {
    u64 word = of_team(source, rank, team_size) ? load_relaxed_sys(told + 8 * u64(source)) : load_relaxed_sys(put + 8 * u64(source));
    count[source] = u32(word) & 0xffffff;   // all have this epoch: they were waited for
    ((int*)src_rank_counters)[source] = int(count[source]);
  }
  __syncthreads();
  clear_ids(window, slot_ids, rank, num_ranks, num_topk, plane_rows);
  return 0;
}

// ---- combine -------------------------------------------------------------------------------------------------------------------------------------
OP ep_ll_net_return_rows(i64 comm, i64 rows_window, i64 slot, i64 window, i64 returned, i64 remote, i64 source, i64 token, i64 most, i64 num_topk,
                         i64 row_bytes, i64 put_bytes, i64 contexts) {
  int place = lane() < num_topk ? ((const int*)remote)[(source * most + token) * num_topk + lane()] : -1;
  if (!__any_sync(~0u, place >= 0)) return 0;
  net_release();
  if (place >= 0)
    gin_put(comm, window, source, token % contexts, returned + (token * num_topk + lane()) * row_bytes, rows_window, slot + i64(place) * row_bytes,
            put_bytes);
  __syncwarp();
  return 0;
}
OP ep_ll_net_gather_row(i64 rows_window, i64 slot, i64 window, i64 returned, i64 table, i64 weights, i64 out, i64 token, i64 num_topk,
                        i64 num_experts, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 token_type, i64 rank, i64 team_size) {
  Routing my = load_routing(table, weights, token, num_topk);
  bool near_by = of_team(host_of(my.row, num_experts, num_ranks, plane_rows), rank, team_size);
  u64 mine = 0;
  if (near_by) mine = row_at(rows_window, slot, my.row, int(num_experts) / int(num_ranks) * plane_rows, row_bytes);
  else if (my.row >= 0) mine = peer_at(window, returned + (token * num_topk + lane()) * row_bytes, rank);
  u32 live = __ballot_sync(~0u, mine != 0);
  u64 to = out + token * row_bytes;
  int end = int(row_bytes / 16);
  if (token_type == 0) gather<0>(mine, my.weight, live, to, 0, end);
  else if (token_type == 1) gather<1>(mine, my.weight, live, to, 0, end);
  else gather<2>(mine, my.weight, live, to, 0, end);
  return 0;
}
OP ep_ll_net_sum_row(i64 rows_window, i64 slot, i64 window, i64 returned, i64 table, i64 out, i64 token, i64 num_topk, i64 num_ranks, i64 plane_rows,
                     i64 row_bytes, i64 token_type, i64 rank, i64 team_size) {
  int row = lane() < num_topk ? ((const int*)table)[token * num_topk + lane()] : -1;
  bool near_by = of_team(host_of(row, num_ranks, num_ranks, plane_rows), rank, team_size);
  u64 mine = 0;
  if (near_by) mine = row_at(rows_window, slot, row, plane_rows, row_bytes);
  else if (row >= 0) mine = peer_at(window, returned + (token * num_topk + lane()) * row_bytes, rank);
  sum_rows(mine, out + token * row_bytes, token_type, 0, int(row_bytes / 16));
  return 0;
}
OP ep_ll_net_sum_packed_row(i64 rows_window, i64 slot, i64 window, i64 returned, i64 table, i64 weights, i64 out, i64 token, i64 num_topk,
                            i64 num_experts, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 rank, i64 team_size) {
  i64 at = token * num_topk + lane();
  int row = lane() < num_topk ? ((const int*)table)[at] : -1;
  bool near_by = of_team(host_of(row, num_experts, num_ranks, plane_rows), rank, team_size);
  u64 mine = 0;
  if (near_by) mine = row_at(rows_window, slot, row, int(num_experts) / int(num_ranks) * plane_rows, row_bytes);
  else if (row >= 0) mine = peer_at(window, returned + at * row_bytes, rank);
  return sum_packed(mine, weights, at, out + token * row_bytes, row_bytes, 0, row_bytes / 1024);
}
