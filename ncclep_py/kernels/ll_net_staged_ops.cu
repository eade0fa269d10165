// Operations of staged low-latency kernels over several teams. Declared in ll_net_staged_vocabulary.py; follows ll_net_ops.cu in one NVRTC program,
// compiled with EP_TEAMS. Safety: ll_net_map.py, L-S1 to L-S7. Of the signals of a staging slot f + 2 * source is RELEASED (context 0), and
// f + 2 * source + 1 DATA (every context, one add per use); f = 0 stands for the signals of operations.
const i64 FLIGHT_BYTES = 128, FLIGHT_COUNT = 64;   // memory_map, ll_net_map: after the count of uses sent follows that of uses released
INLINE Missing wait_sent(i64 comm, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 first_signal, i64 times, i64 timeout) {
  int per_peer = int(contexts);
  return wait_signals(comm, networked_ranks(num_ranks, team_size) * per_peer, u64(timeout), [&](int i) {
    int context = i % per_peer;
    i64 adds = first_signal == 0 && context == 0 ? 2 : 1;
    return Awaited{context, first_signal + 2 * networked(i / per_peer, rank, team_size) + 1, u64(times * adds)};
  });
}
INLINE int whose(Missing m, i64 contexts, i64 rank, i64 team_size) { return m.index < 0 ? -1 : networked(m.index / int(contexts), rank, team_size); }

OP ep_ll_net_drain_staged(i64 comm, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 flights, i64 num_staging, i64 epoch, i64 fail,
                          i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0)
    for (int i = 0; i < num_staging && !code; ++i) {
      const i64* uses = (const i64*)(flights + i * FLIGHT_BYTES + FLIGHT_COUNT);
      i64 sent = uses[0];
      if (sent == uses[1]) continue;
      Missing m = wait_sent(comm, rank, num_ranks, team_size, contexts, 2 * num_ranks * (1 + i), sent, timeout);
      __syncwarp();
      int peer = whose(m, contexts, rank, team_size);
      if (peer < 0) continue;
      code = TIMEOUT;
      if (lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, peer, peer, sent, sent);
    }
  return tell_block(code);
}

// ---- dispatch: what its complete half needs later ---------------------------------------------------------------------------------------------------
OP ep_ll_net_keep_rows(i64 kept, i64 num_experts, i64 num_ranks) {
  const u32* got = got_rows(num_experts);
  for (int i = threadIdx.x; blockIdx.x == gridDim.x - 1 && i < num_experts; i += blockDim.x) ((u32*)kept)[i] = got[i];
  return 0;
}
OP ep_ll_net_kept_rows(i64 kept, i64 num_experts, i64 num_ranks) {
  u32* got = got_rows(num_experts);
  for (int i = threadIdx.x; i < num_experts; i += blockDim.x) got[i] = ((const u32*)kept)[i];
  __syncthreads();
  return 0;
}
OP ep_ll_net_store_origins(i64 window, i64 origins, i64 token, i64 first, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 rank,
                           i64 team_size, i64 places) {
  int row = block_row(token, first, num_topk, num_experts);
  bool near_by = of_team(host_of(row, num_experts, num_ranks, plane_rows), rank, team_size);
  u64 to = near_by ? row_at(window, origins, row, int(num_experts) / int(num_ranks) * plane_rows, 4) : 0;
  if (to) *(int*)to = int(rank * places + token * num_topk + lane());
  __syncwarp();
  return 0;
}

// ---- flights ---------------------------------------------------------------------------------------------------------------------------------------
OP ep_ll_net_put_flight(i64 comm, i64 window, i64 flying, i64 rank, i64 num_ranks, i64 team_size, i64 first_signal, i64 least, i64 epoch,
                        i64 signature, i64 status) {
  i64 at = head_at(flying, num_ranks, rank, epoch);
  for (int i = lane(); i < networked_ranks(num_ranks, team_size); i += 32) {   // words order nothing; the signals after them do
    int peer = networked(i, rank, team_size);
    if (gin_signal_value(comm, 0, first_signal + 2 * peer) < u64(least)) continue;
    gin_put_value(comm, window, peer, 0, at, head_low(epoch, signature));
    gin_put_value(comm, window, peer, 0, at + 8, head_high(epoch, signature, status));
  }
  __syncwarp();
  return 0;
}
OP ep_ll_net_signal_sent(i64 comm, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 first_signal) {
  int peers = networked_ranks(num_ranks, team_size);
  net_release();
  for (int i = lane(); i < peers * int(contexts); i += 32)
    gin_signal(comm, networked(i % peers, rank, team_size), i / peers, first_signal + 2 * rank + 1, 1);
  __syncwarp();
  return 0;
}
OP ep_ll_net_wait_flight(i64 comm, i64 window, i64 flying, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 first_signal, i64 operations,
                         i64 epoch, i64 signature, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    Missing m = wait_sent(comm, rank, num_ranks, team_size, contexts, first_signal, operations, timeout);
    __syncwarp();
    int absent = whose(m, contexts, rank, team_size);
    Verdict v = {absent < 0 ? 0 : TIMEOUT, absent, absent, operations};
    if (absent < 0) {
      u64 words = peer_at(window, head_at(flying, num_ranks, 0, epoch), rank);
      v = wait_all(int(num_ranks), int(rank), u64(timeout), [&](int source, bool late) {
        u64 at = words + u64(source) * 16;
        Verdict one = judge_head(load_acquire_sys(at), load_acquire_sys(at + 8), epoch, signature, source, late);
        bool old = one.code < 0 || one.code == TIMEOUT;   // a networked rank's word is here, or never comes: on whom it gave up it cannot tell
        if (old && !of_team(source, rank, team_size)) one.code = ABORTED;
        return one;
      });
    }
    code = v.code;
    i64 expected = code == MISMATCH ? signature : absent < 0 ? epoch : operations;
    if (code && lane() == 0) give_up(fail, record, code, epoch, absent < 0 ? ARRIVED : ROWS, rank, v.peer, v.culprit, v.seen, expected);
  }
  return tell_block(code);
}
OP ep_ll_net_wait_released(i64 comm, i64 rank, i64 num_ranks, i64 team_size, i64 first_signal, i64 uses, i64 epoch, i64 fail, i64 record,
                           i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    Missing m = wait_signals(comm, networked_ranks(num_ranks, team_size), u64(timeout), [&](int i) {
      return Awaited{0, first_signal + 2 * networked(i, rank, team_size), u64(uses)};
    });
    if (m.index >= 0) {
      code = TIMEOUT;
      int peer = networked(m.index, rank, team_size);
      if (lane() == 0) give_up(fail, record, code, epoch, ARRIVED, rank, peer, peer, i64(m.seen), uses);
    }
  }
  return tell_block(code);
}
OP ep_ll_net_release(i64 comm, i64 window, i64 released, i64 flight, i64 rank, i64 num_ranks, i64 team_size, i64 contexts, i64 first_signal,
                     i64 following, i64 drained, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    i64* uses = (i64*)(flight + FLIGHT_COUNT);
    i64 sent = uses[0], before = uses[1];
    int absent = -1;
    if (sent != before && !drained)
      absent = whose(wait_sent(comm, rank, num_ranks, team_size, contexts, first_signal, sent, timeout), contexts, rank, team_size);
    net_release();
    if (absent >= 0) {
      code = TIMEOUT;
      if (timeout && lane() == 0) give_up(fail, record, code, following, HEAD, rank, absent, absent, sent, sent);
    } else if (sent != before) {
      i64 first = first_of(rank, team_size);
      for (int i = lane(); i < team_size; i += 32) store_relaxed_sys(peer_at(window, released + rank * 8, first + i), tagged(following, 0));
      for (int i = lane(); i < networked_ranks(num_ranks, team_size); i += 32)
        gin_signal(comm, networked(i, rank, team_size), 0, first_signal + 2 * rank, sent - before);
      if (lane() == 0) uses[1] = sent;
    }
  }
  return tell_block(code);
}

// ---- combine ---------------------------------------------------------------------------------------------------------------------------------------
OP ep_ll_net_count_team_rows(i64 kept, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 rank, i64 team_size) {
  u32 *start = start_row(num_experts), *ours = received_rows(num_experts);
  int local = int(num_experts) / int(num_ranks), first = first_of(rank, team_size);
  __syncthreads();   // whoever used this memory before is done
  for (int l = threadIdx.x; l < local; l += blockDim.x) start[l] = ours[l] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < (first + team_size) * local; i += blockDim.x)
    atomicAdd(&(i < first * local ? start : ours)[i % local], ((const u32*)kept)[i]);
  __syncthreads();
  if (warp() == 0) add_up(local, [&](int l) { return min(ours[l], u32(plane_rows) - min(start[l], u32(plane_rows))); });
  __syncthreads();
  return total_rows()[local];
}
OP ep_ll_net_push_row(i64 window, i64 origins, i64 rows, i64 staging, i64 row, i64 num_planes, i64 plane_rows, i64 num_experts, i64 rank, i64 places,
                      i64 row_bytes, i64 begin_vector, i64 end_vector) {
  int plane = plane_of(u32(row), int(num_planes));
  i64 place = i64(plane) * plane_rows + start_row(num_experts)[plane] + (u32(row) - total_rows()[plane]);
  push_row(window, origins, rows, staging, place, rank, places, row_bytes, int(begin_vector), int(end_vector));
  return 0;
}
