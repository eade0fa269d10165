// Operations of low-latency kernels with masks over several teams. Declared in ll_net_masked_vocabulary.py; follows ll_net_ops.cu in one NVRTC program,
// compiled with EP_TEAMS. The protocol is that of ll_net_member_map.py. At most 29 ranks: a lane for each. Nothing here waits without deadline.
const u32 MISSED = 0x1fffffff, FAILED_VIEW = 1u << 29, SAID = 1u << 30, DIFFERS = 1u << 31;   // bits of a view, as in ll_net_member_map

INLINE bool is_member(i64 mask, i64 num_ranks) { return lane() < num_ranks && !(mask >> lane() & 1); }
INLINE u64 adds_of(i64 adds, bool wanted) { return wanted ? ((const u64*)adds)[lane()] : 0; }
INLINE bool data_here(i64 comm, int peer, i64 contexts, u64 least) {   // acquire, by the lane that looks
  bool all = true;
  for (int c = 0; c < contexts; ++c) all &= gin_signal_value(comm, c, 2 * peer + 1) >= least;
  return all;
}
INLINE i64 view_at(i64 views, i64 num_ranks, i64 rounds, i64 round, i64 epoch, i64 source) {
  return views + (((epoch & 1) * (rounds + 1) + round) * num_ranks + source) * 8;
}
INLINE bool is_said(u64 word, i64 epoch) { return u32(word >> 32) == u32(epoch) && (u32(word) & SAID); }
// Warp. Until `here()` for all lanes, `stop()` for any, or the deadline: the lanes that are not here.
template <class Here, class Stop>
INLINE u32 wait_lanes(u64 timeout, Here here, Stop stop) {
  u64 started = nanoseconds();
  for (u32 round = 1;; ++round) {
    bool late = __any_sync(~0u, round % 16 == 0 && nanoseconds() - started > timeout);   // looked at before the words: they get a last look
    u32 missing = __ballot_sync(~0u, !here());
    if (__any_sync(~0u, stop()) || missing == 0 || late) return missing;
  }
}

// ---- head ----------------------------------------------------------------------------------------------------------------------------------------
OP ep_ll_net_enter_members(i64 comm, i64 window, i64 heads, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 mask, i64 adds, i64 epoch,
                           i64 signature, i64 status, i64 timeout) {
  u32 wet = 0;
  if (warp() == 0) {
    bool far = is_member(mask, num_ranks) && !of_team(lane(), rank, team_size), dry = !far;
    u64 least = adds_of(adds, far);
    wet = wait_lanes(u64(timeout) / 2, [&] { if (!dry) dry = data_here(comm, lane(), contexts, least); return dry; }, [] { return false; });
    net_release();
    i64 at = head_at(heads, num_ranks, rank, epoch);
    if (far && dry) {
      gin_put_value(comm, window, lane(), 0, at, head_low(epoch, signature));
      gin_put_value(comm, window, lane(), 0, at + 8, head_high(epoch, signature, status));
    }
    if (far) gin_signal(comm, lane(), 0, 2 * rank, 1);
    __syncwarp();
  }
  return tell_word(wet);
}
INLINE Verdict head_of(i64 window, i64 heads, i64 num_ranks, i64 rank, int source, i64 epoch, i64 signature) {
  u64 at = peer_at(window, head_at(heads, num_ranks, source, epoch), rank);
  return judge_head(load_acquire_sys(at), load_acquire_sys(at + 8), epoch, signature, source, false);
}
OP ep_ll_net_wait_members(i64 comm, i64 window, i64 heads, i64 views, i64 rank, i64 num_ranks, i64 team_size, i64 mask, i64 view, i64 rounds, i64 adds,
                          i64 epoch, i64 signature, i64 waited, i64 timeout) {
  u32 seen = u32(view);
  if (warp() == 0) {
    bool member = is_member(view, num_ranks), far = member && !of_team(lane(), rank, team_size), done = !member, out = false;
    u64 least = adds_of(adds, far) + 1, started = nanoseconds(), came = started;
    u64 first = peer_at(window, view_at(views, num_ranks, rounds, 1, epoch, member ? lane() : int(rank)), rank);
    int code = 0;
    u32 missing = wait_lanes(u64(timeout + timeout / 4), [&] {
      if (done) return true;
      code = head_of(window, heads, num_ranks, rank, lane(), epoch, signature).code;
      done = code >= 0 && (!far || gin_signal_value(comm, 0, 2 * lane()) >= least);
      if (done) came = nanoseconds();
      return done;
    }, [&] {
      u64 said = member ? load_relaxed_sys(first) : 0;
      out = is_said(said, epoch) && (said >> rank & 1);
      return out;
    });
    if (member && done) add_waited(waited, came - started);
    seen |= __any_sync(~0u, out) ? 1u << rank : missing;
    if (__any_sync(~0u, member && done && code > 0)) seen |= FAILED_VIEW;
  }
  return tell_word(seen);
}
OP ep_ll_net_await_view(i64 outcome, i64 epoch, i64 timeout) {
  u32 view = 0;
  if (warp() == 0) {
    u64 started = nanoseconds(), word = 0;
    for (u32 round = 1;; ++round) {   // block 0 has deadlines of its own; this one is for a grid that does not fit
      bool late = __any_sync(~0u, round % 64 == 0 && nanoseconds() - started > u64(timeout));
      word = load_relaxed_gpu(outcome);
      u32 told = __ballot_sync(~0u, u32(word >> 32) == u32(epoch));   // lanes may have read at different moments
      if (told) { view = u32(__shfl_sync(~0u, u32(word), __ffs(told) - 1)); break; }
      if (late) break;
    }
    fence_device();
  }
  return tell_word(view);
}

// ---- data ----------------------------------------------------------------------------------------------------------------------------------------
struct Message { int host; u64 to, mine; };   // a lane per rank that wants the token: the message there, 0 if it is put; my own, 0 if none is put
INLINE u64 past(u64 message, i64 bytes) { return message ? message + bytes : 0; }
INLINE Message begin_message(i64 window, i64 sent, i64 messages, i64 token, i64 first, i64 end, i64 num_topk, i64 num_experts, i64 num_ranks,
                             i64 plane_rows, i64 words, i64 message_bytes, i64 rank, i64 team_size, i64 epoch) {   // headers are written
  int row = block_row(token, first, num_topk, num_experts), host = host_of(row, num_experts, num_ranks, plane_rows);
  u32 same = __match_any_sync(~0u, host);
  if (lane() != __ffs(same) - 1) host = -1;
  bool near_by = of_team(host, rank, team_size);
  i64 at = token * message_bytes;
  u64 to = near_by ? peer_at(window, messages + at, host) : 0;
  u64 mine = __any_sync(~0u, host >= 0 && !near_by) ? peer_at(window, sent + at, rank) : 0;
  auto header = [&](u64 message) {
    if (lane() == 0) *(u64*)message = tagged(1, u32(epoch));
    if (lane() >= num_topk) return;
    ((int*)message)[2 + lane()] = row;
    for (int w = 1; w < words; ++w)   // id and weight: block_pairs
      ((int*)message)[2 + w * num_topk + lane()] = block_rows(num_experts)[(w * (end - first) + token - first) * num_topk + lane()];
  };
  if (mine) header(mine);
  for (u32 left = __ballot_sync(~0u, near_by); left; left &= left - 1) header(__shfl_sync(~0u, to, __ffs(left) - 1));
  return {host, to, mine};
}
INLINE void put_message(i64 comm, i64 window, Message m, i64 sent, i64 messages, i64 token, i64 message_bytes, i64 put_bytes, i64 contexts) {
  if (!m.mine) return;
  i64 at = token * message_bytes;
  net_release();
  if (m.host >= 0 && !m.to) gin_put(comm, window, m.host, token % contexts, messages + at, window, sent + at, put_bytes);
  __syncwarp();
}
OP ep_ll_net_send_member_row(i64 comm, i64 window, i64 sent, i64 messages, i64 tokens, i64 scales, i64 token, i64 first, i64 end, i64 num_topk,
                             i64 num_experts, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 scale_bytes, i64 words, i64 header_bytes,
                             i64 message_bytes, i64 rank, i64 team_size, i64 contexts, i64 epoch) {
  Message m = begin_message(window, sent, messages, token, first, end, num_topk, num_experts, num_ranks, plane_rows, words, message_bytes, rank,
                            team_size, epoch);
  spread_row<true>(tokens + token * row_bytes, past(m.to, header_bytes), past(m.mine, header_bytes), int(row_bytes / 16));
  if (scale_bytes)
    spread_row<true>(scales + token * scale_bytes, past(m.to, header_bytes + row_bytes), past(m.mine, header_bytes + row_bytes), int(scale_bytes / 16));
  put_message(comm, window, m, sent, messages, token, message_bytes, header_bytes + row_bytes + scale_bytes, contexts);
  return 0;
}
OP ep_ll_net_send_made_row(i64 comm, i64 window, i64 sent, i64 messages, i64 token, i64 first, i64 end, i64 num_topk, i64 num_experts, i64 num_ranks,
                           i64 plane_rows, i64 words, i64 header_bytes, i64 put_bytes, i64 message_bytes, i64 rank, i64 team_size, i64 contexts,
                           i64 epoch) {
  Message m = begin_message(window, sent, messages, token, first, end, num_topk, num_experts, num_ranks, plane_rows, words, message_bytes, rank,
                            team_size, epoch);
  u64 made = peer_at(window, sent + token * message_bytes + header_bytes, rank);
  spread_row<false>(made, past(m.to, header_bytes), 0, int((put_bytes - header_bytes) / 16));
  put_message(comm, window, m, sent, messages, token, message_bytes, put_bytes, contexts);
  return 0;
}
OP ep_ll_net_keep_routes(i64 table, i64 token, i64 first, i64 num_topk, i64 num_ranks) {
  if (lane() < num_topk) ((int*)table)[token * num_topk + lane()] = block_row(token, first, num_topk, num_ranks);
  return 0;
}
OP ep_ll_net_signal_members(i64 comm, i64 rank, i64 num_ranks, i64 team_size, i64 context, i64 mask) {
  net_release();
  if (is_member(mask, num_ranks) && !of_team(lane(), rank, team_size)) gin_signal(comm, lane(), context, 2 * rank + 1, 1);
  __syncwarp();
  return 0;
}
OP ep_ll_net_wait_member_data(i64 comm, i64 window, i64 arrived, i64 views, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 mask, i64 rounds,
                              i64 adds, i64 epoch, i64 waited, i64 timeout) {
  u32 seen = u32(mask);
  if (warp() == 0) {
    bool member = is_member(mask, num_ranks) && lane() != rank, far = member && !of_team(lane(), rank, team_size), done = !member, differs = false;
    u64 least = adds_of(adds, far) + 1, started = nanoseconds(), came = started;
    int source = member ? lane() : int(rank);
    u64 word = peer_at(window, arrived + 8 * source, rank), first = peer_at(window, view_at(views, num_ranks, rounds, 1, epoch, source), rank);
    u32 missing = wait_lanes(u64(timeout + timeout / 2), [&] {
      if (done) return true;
      done = far ? data_here(comm, lane(), contexts, least) : later(u32(load_acquire_sys(word) >> 32), u32(epoch)) >= 0;
      if (done) came = nanoseconds();
      return done;
    }, [&] {
      u64 said = member ? load_relaxed_sys(first) : 0;
      differs = is_said(said, epoch) && u32(said) != (SAID | u32(mask));
      return differs;
    });
    if (member && done) add_waited(waited, came - started);
    if (!__any_sync(~0u, differs)) seen |= missing;
  }
  return tell_word(seen);
}

// ---- agreement -----------------------------------------------------------------------------------------------------------------------------------
OP ep_ll_net_say(i64 comm, i64 window, i64 views, i64 rank, i64 num_ranks, i64 team_size, i64 silent, i64 rounds, i64 round, i64 epoch, i64 view) {
  i64 at = view_at(views, num_ranks, rounds, round, epoch, rank);
  u64 word = tagged(epoch, SAID | u32(view));
  if (is_member(silent, num_ranks)) {
    if (of_team(lane(), rank, team_size)) store_relaxed_sys(peer_at(window, at, lane()), word);
    else gin_put_value(comm, window, lane(), 0, at, word);
  }
  __syncwarp();
  return 0;
}
OP ep_ll_net_hear(i64 window, i64 views, i64 rank, i64 num_ranks, i64 mask, i64 rounds, i64 round, i64 epoch, i64 view, i64 timeout) {
  u32 result = u32(view);
  if (warp() == 0) {
    bool awaited = is_member(view, num_ranks) && lane() != rank;
    int source = awaited ? lane() : int(rank);
    u64 word_at = peer_at(window, view_at(views, num_ranks, rounds, round, epoch, source), rank);
    u64 end_at = peer_at(window, view_at(views, num_ranks, rounds, 0, epoch, source), rank), word = 0, end = 0;
    u32 missing = wait_lanes(u64(7 + round) * u64(timeout) / 4, [&] {
      if (awaited && !is_said(word, epoch)) word = load_relaxed_sys(word_at);
      return !awaited || is_said(word, epoch);
    }, [&] {
      if (awaited) end = load_relaxed_sys(end_at);
      return is_said(end, epoch);
    });
    bool told = awaited && is_said(word, epoch);
    u32 ends = __ballot_sync(~0u, is_said(end, epoch)), theirs = told ? u32(word) & ~SAID : 0;
    bool unanimous = missing == 0 && !__any_sync(~0u, told && theirs != u32(view));
    #pragma unroll
    for (int step = 16; step; step /= 2) theirs |= __shfl_xor_sync(~0u, theirs, step);
    result |= missing | theirs;
    if (unanimous || (result >> rank & 1)) result |= SAID;
    if (ends) result = __shfl_sync(~0u, u32(end), __ffs(ends) - 1);
  }
  return tell_word(result);
}
OP ep_ll_net_conclude_members(i64 comm, i64 window, i64 heads, i64 arrived, i64 rank, i64 num_ranks, i64 team_size, i64 adds, i64 made, i64 told,
                              i64 members, i64 masked_at, i64 epoch, i64 signature, i64 mask, i64 view, i64 left, i64 notice, i64 fail, i64 record) {
  bool in_mask = mask >> rank & 1, member = is_member(mask, num_ranks), other = lane() < num_ranks && lane() != rank;
  u32 next = (u32(view) & MISSED) | u32(mask);
  int code = 0;
  if (next >> rank & 1) code = EXCLUDED, next = u32(mask) | 1u << rank;
  else if (left < 0) code = TIMEOUT, next = u32(mask);
  else if (u32(view) & DIFFERS) code = left ? int(AGAIN) : int(TIMEOUT);
  else if (u32(view) & FAILED_VIEW) {   // all HEADs are here, or it would be another attempt
    Verdict v = member ? head_of(window, heads, num_ranks, rank, lane(), epoch, signature) : Verdict{0, 0, 0, 0};
    u32 refused = __ballot_sync(~0u, v.code == REFUSED), bad = __ballot_sync(~0u, v.code > 0);
    int who = refused >> rank & 1 ? int(rank) : refused ? __ffs(refused) - 1 : bad ? __ffs(bad) - 1 : int(rank);
    code = bad ? __shfl_sync(~0u, v.code, who) : int(ABORTED);
    i64 detail = (i64)__shfl_sync(~0u, v.seen, who);
    if (lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, who, who, detail, code == MISMATCH ? signature : epoch);
  }
  if ((code == EXCLUDED || code == TIMEOUT) && lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, rank, rank, epoch, epoch);
  u64 *since = (u64*)masked_at, *counts = (u64*)adds;
  u64 before = other ? since[lane()] : 0, count = other ? counts[lane()] : 0;
  bool unknown = other && (mask >> lane() & 1) && before == 0;   // by mask_update
  if (unknown) before = tagged(epoch, 0);
  u32 last = other && (mask >> lane() & 1) ? u32(before >> 32) : u32(epoch);
  bool came = false;   // all it ever adds is here
  if (other) came = of_team(lane(), rank, team_size) ? u32(load_relaxed_sys(peer_at(window, arrived + 8 * lane(), rank)) >> 32) == last
                                                     : gin_signal_value(comm, 0, 2 * lane() + 1) > count;
  bool late = other && (mask >> lane() & 1) && came && !(before & 1);
  bool newly = other && (next & ~u32(mask)) >> lane() & 1 && (code == AGAIN || code == TIMEOUT);
  if (late) since[lane()] = before | 1;
  else if (unknown) since[lane()] = before;
  else if (newly) since[lane()] = tagged(epoch, came);
  if (member && other && !in_mask) ((u64*)made)[lane()] += 1;
  if (member && other && !in_mask && !(next >> lane() & 1)) counts[lane()] = count + 1;
  u32 all_new = __ballot_sync(~0u, newly), all_late = __ballot_sync(~0u, late);
  if (lane() == 0) {
    if (all_new) notify(notice, MASKED, epoch, HEAD, rank, __ffs(all_new) - 1);
    if (all_late) notify(notice, CAME_LATE, epoch, HEAD, rank, __ffs(all_late) - 1);
    *(u64*)told = next;
    *(u64*)members = next;
  }
  __syncwarp();
  return code;
}

// ---- what members sent ---------------------------------------------------------------------------------------------------------------------------
OP ep_ll_net_count_messages(i64 window, i64 messages, i64 most, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 message_bytes,
                            i64 rank, i64 mask, i64 epoch, i64 expert_counters) {
  u32* got = got_rows(num_experts);
  int local = int(num_experts) / int(num_ranks), plane = int(plane_rows), tokens = int(most);
  __syncthreads();
  for (int i = threadIdx.x; i < num_experts; i += blockDim.x) got[i] = 0;   // [R][my experts]
  __syncthreads();
  for (int i = threadIdx.x; i < int(num_ranks) * tokens; i += blockDim.x) {
    int source = i / tokens;
    u64 message = peer_at(window, messages + i * message_bytes, rank);
    if ((mask >> source & 1) || *(const u64*)message != tagged(1, u32(epoch))) continue;
    for (int k = 0; k < num_topk; ++k) {
      int number = ((const int*)message)[2 + k], e = number < 0 ? -1 : number / plane - int(rank) * local;
      if (u32(e) < u32(local)) atomicAdd(&got[source * local + e], 1u);
    }
  }
  __syncthreads();
  for (int l = threadIdx.x; blockIdx.x == gridDim.x - 1 && l < local; l += blockDim.x) {
    u32 received = 0;
    for (int source = 0; source < num_ranks; ++source) received += got[source * local + l];
    ((int*)expert_counters)[l] = int(min(received, u32(plane_rows)));
  }
  return 0;
}
OP ep_ll_net_count_member_rows(i64 window, i64 messages, i64 slot_ids, i64 most, i64 num_topk, i64 num_ranks, i64 plane_rows, i64 message_bytes,
                               i64 rank, i64 mask, i64 epoch, i64 src_rank_counters) {
  if (blockIdx.x != gridDim.x - 1) return 0;
  u32* count = total_rows();
  int plane = int(plane_rows), tokens = int(most);
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) count[r] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < int(num_ranks) * tokens; i += blockDim.x) {
    int source = i / tokens;
    u64 message = peer_at(window, messages + i * message_bytes, rank);
    if ((mask >> source & 1) || *(const u64*)message != tagged(1, u32(epoch))) continue;
    for (int k = 0; k < num_topk; ++k) {
      int row = ((const int*)message)[2 + k];
      if (row >= 0 && row / plane == rank) atomicAdd(&count[source], 1u);
    }
  }
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) ((int*)src_rank_counters)[r] = int(count[r]);
  clear_ids(window, slot_ids, rank, num_ranks, num_topk, plane_rows);
  __syncthreads();
  return 0;
}
OP ep_ll_net_return_member_rows(i64 comm, i64 rows_window, i64 slot, i64 window, i64 returned, i64 remote, i64 source, i64 token, i64 most,
                                i64 num_topk, i64 row_bytes, i64 put_bytes, i64 returned_bytes, i64 rank, i64 team_size, i64 contexts) {
  int place = lane() < num_topk ? ((const int*)remote)[(source * most + token) * num_topk + lane()] : -1;
  u32 live = __ballot_sync(~0u, place >= 0);
  if (!live) return 0;
  i64 target = returned + rank * returned_bytes + token * num_topk * row_bytes;
  if (of_team(int(source), rank, team_size)) {
    for (; live; live &= live - 1) {
      int k = __ffs(live) - 1;
      u64 from = peer_at(rows_window, slot + __shfl_sync(~0u, place, k) * row_bytes, rank), to = peer_at(window, target + k * row_bytes, source);
      spread_row<false>(from, 0, to, int(put_bytes / 16));
    }
    return 0;
  }
  net_release();
  if (place >= 0)
    gin_put(comm, window, source, token % contexts, target + lane() * row_bytes, rows_window, slot + i64(place) * row_bytes, put_bytes);
  __syncwarp();
  return 0;
}
INLINE u64 row_back(i64 window, i64 returned, i64 returned_bytes, int row, i64 token, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows,
                    i64 row_bytes, i64 rank, i64 mask) {   // of lane k: what the host of its row sent back, 0 for none
  int host = host_of(row, num_experts, num_ranks, plane_rows);
  bool kept = host >= 0 && !(mask >> host & 1);
  return kept ? peer_at(window, returned + host * returned_bytes + (token * num_topk + lane()) * row_bytes, rank) : 0;
}
OP ep_ll_net_gather_member_row(i64 window, i64 returned, i64 returned_bytes, i64 table, i64 weights, i64 out, i64 token, i64 num_topk,
                               i64 num_experts, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 token_type, i64 rank, i64 mask) {
  Routing my = load_routing(table, weights, token, num_topk);
  u64 mine = row_back(window, returned, returned_bytes, my.row, token, num_topk, num_experts, num_ranks, plane_rows, row_bytes, rank, mask);
  u32 live = __ballot_sync(~0u, mine != 0);
  u64 to = out + token * row_bytes;
  int end = int(row_bytes / 16);
  if (token_type == 0) gather<0>(mine, my.weight, live, to, 0, end);
  else if (token_type == 1) gather<1>(mine, my.weight, live, to, 0, end);
  else gather<2>(mine, my.weight, live, to, 0, end);
  return 0;
}
OP ep_ll_net_sum_member_row(i64 window, i64 returned, i64 returned_bytes, i64 table, i64 out, i64 token, i64 num_topk, i64 num_ranks, i64 plane_rows,
                            i64 row_bytes, i64 token_type, i64 rank, i64 mask) {
  int row = lane() < num_topk ? ((const int*)table)[token * num_topk + lane()] : -1;
  u64 mine = row_back(window, returned, returned_bytes, row, token, num_topk, num_ranks, num_ranks, plane_rows, row_bytes, rank, mask);
  sum_rows(mine, out + token * row_bytes, token_type, 0, int(row_bytes / 16));
  return 0;
}
OP ep_ll_net_sum_packed_member_row(i64 window, i64 returned, i64 returned_bytes, i64 table, i64 weights, i64 out, i64 token, i64 num_topk,
                                   i64 num_experts, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 rank, i64 mask) {
  i64 at = token * num_topk + lane();
  int row = lane() < num_topk ? ((const int*)table)[at] : -1;
  u64 mine = row_back(window, returned, returned_bytes, row, token, num_topk, num_experts, num_ranks, plane_rows, row_bytes, rank, mask);
  return sum_packed(mine, weights, at, out + token * row_bytes, row_bytes, 0, row_bytes / 1024);
}

// ---- mask_clean (T-N10) --------------------------------------------------------------------------------------------------------------------------
INLINE i64 join_at(i64 joins, i64 num_ranks, i64 epoch, i64 source) { return joins + ((epoch & 1) * num_ranks + source) * 32; }
INLINE bool is_later_join(u64 word, i64 epoch) { return (u32(word) & 1) && later(u32(word >> 32), u32(epoch)) > 0; }   // not fresh memory
OP ep_ll_net_clean_epoch(i64 window, i64 joins, i64 rank, i64 num_ranks, i64 epoch) {
  u32 found = 0;
  if (warp() == 0) {
    u64 at = peer_at(window, joins + (lane() < num_ranks ? lane() : rank) * 32, rank);
    u32 mine = u32(epoch);
    for (int bank = 0; bank < 2; ++bank) {
      u64 word = load_relaxed_sys(at + bank * num_ranks * 32);
      if (is_later_join(word, mine)) mine = u32(word >> 32);
    }
    found = latest(mine, (1u << num_ranks) - 1, num_ranks);
  }
  return tell_word(found);
}
OP ep_ll_net_is_told(i64 window, i64 views, i64 rank, i64 num_ranks, i64 rounds, i64 own, i64 mask) {
  bool out = mask >> rank & 1;
  for (int i = threadIdx.x; i < 2 * (rounds + 1) * num_ranks; i += blockDim.x) {
    u64 word = load_relaxed_sys(peer_at(window, views + 8 * i, rank));
    out |= (u32(word) & SAID) && later(u32(word >> 32), u32(own)) >= 0 && i % int(num_ranks) != rank && (word >> rank & 1);
  }
  return __syncthreads_or(out);
}
OP ep_ll_net_send_join(i64 comm, i64 window, i64 joins, i64 rank, i64 num_ranks, i64 team_size, i64 made, i64 epoch, i64 own, i64 stranded) {
  i64 at = join_at(joins, num_ranks, epoch, rank);
  if (lane() < num_ranks) {
    u64 words[3] = {tagged(epoch, 1 | u32(stranded) << 1), tagged(epoch, u32(own)), tagged(epoch, u32(((const u64*)made)[lane()]))};
    bool near_by = of_team(lane(), rank, team_size);
    for (int i = 0; i < 3; ++i)
      if (near_by) store_relaxed_sys(peer_at(window, at + 8 * i, lane()), words[i]);
      else gin_put_value(comm, window, lane(), 0, at + 8 * i, words[i]);
  }
  __syncwarp();
  return 0;
}
INLINE bool adds_here(i64 comm, int peer, i64 contexts, u32 least) {   // acquire, by the lane that looks
  bool all = later(u32(gin_signal_value(comm, 0, 2 * peer)), least) >= 0;
  for (int c = 0; c < contexts; ++c) all &= later(u32(gin_signal_value(comm, c, 2 * peer + 1)), least) >= 0;
  return all;
}
OP ep_ll_net_wait_joins(i64 comm, i64 window, i64 joins, i64 views, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 rounds, i64 epoch,
                        i64 timeout) {
  u32 seen = 0;
  if (warp() == 0) {
    bool other = lane() < num_ranks && lane() != rank, far = other && !of_team(lane(), rank, team_size), done = !other;
    bool came = false, ahead = false, out = false;
    int source = other ? lane() : int(rank);
    u64 at = peer_at(window, join_at(joins, num_ranks, epoch, source), rank), next = peer_at(window, join_at(joins, num_ranks, epoch + 1, source), rank);
    u64 first = peer_at(window, view_at(views, num_ranks, rounds, 1, epoch, source), rank);
    u32 missing = wait_lanes(u64(timeout + timeout / 4), [&] {
      if (done) return true;
      u64 word = load_relaxed_sys(at), own = load_relaxed_sys(at + 8), made = load_relaxed_sys(at + 16);
      ahead = is_later_join(word, epoch) || is_later_join(load_relaxed_sys(next), epoch);
      came = (u32(word) & 1) && u32(word >> 32) == u32(epoch);
      done = came && u32(own >> 32) == u32(epoch) && u32(made >> 32) == u32(epoch) && (!far || adds_here(comm, lane(), contexts, u32(made)));
      return done;
    }, [&] {
      u64 said = other ? load_relaxed_sys(first) : 0;
      out = is_said(said, epoch) && (said >> rank & 1);
      return out || ahead;
    });
    bool others = missing && __any_sync(~0u, ahead);
    if (__any_sync(~0u, out) || (others && __any_sync(~0u, came))) seen = 1u << rank;   // some are here, some further on: I hold up neither
    else seen = others ? FAILED_VIEW : missing;
  }
  return tell_word(seen);
}
OP ep_ll_net_all_stranded(i64 window, i64 joins, i64 rank, i64 num_ranks, i64 epoch, i64 view) {
  bool member = is_member(view, num_ranks);
  u64 word = load_relaxed_sys(peer_at(window, join_at(joins, num_ranks, epoch, member ? lane() : int(rank)), rank));
  return !__any_sync(~0u, member && !(word & 2));
}
OP ep_ll_net_signal_clean(i64 comm, i64 rank, i64 num_ranks, i64 team_size, i64 contexts) {
  net_release();
  if (lane() < num_ranks && !of_team(lane(), rank, team_size)) {
    gin_signal(comm, lane(), 0, 2 * rank, 1);
    for (int c = 0; c < contexts; ++c) gin_signal(comm, lane(), c, 2 * rank + 1, 1);
  }
  __syncwarp();
  return 0;
}
OP ep_ll_net_readmit(i64 comm, i64 window, i64 joins, i64 rank, i64 num_ranks, i64 team_size, i64 epoch, i64 code, i64 view, i64 adds, i64 made,
                     i64 told, i64 members, i64 masked_at, i64 word, i64 header, i64 num_slots, i64 own) {
  bool other = lane() < num_ranks && lane() != rank, far = other && !of_team(lane(), rank, team_size), in = is_member(view, num_ranks);
  u64 *counts = (u64*)adds, *since = (u64*)masked_at;
  if (other) ((u64*)made)[lane()] += 1;
  if (code) {
    if (lane() == 0) *(u64*)members |= 1u << rank;
    return code;
  }
  u64 at = peer_at(window, join_at(joins, num_ranks, epoch, in ? lane() : int(rank)), rank);
  u32 theirs = u32(load_relaxed_sys(at + 8)), so_far = u32(load_relaxed_sys(at + 16));
  u32 next = latest(theirs, ~u32(view) & ((1u << num_ranks) - 1), num_ranks) + 1;
  if (far) {
    u64 now = gin_signal_value(comm, 0, 2 * lane() + 1);
    counts[lane()] = in ? now + i64(int(so_far - u32(now))) + 1 : now > counts[lane()] ? now : counts[lane()];
  }
  if (other && in) since[lane()] = 0;
  else if (other && since[lane()] == 0) since[lane()] = tagged(own, 0);
  if (lane() == 0) {
    *(u64*)told = u32(view);
    *(u64*)members = u32(view);
    *(u64*)word = next;
    for (int i = 0; i < 2 * num_slots; ++i) ((i64*)header)[i] = 0;
  }
  __syncwarp();
  return 0;
}
