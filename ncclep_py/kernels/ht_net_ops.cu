// Operations of high-throughput kernels over several teams. Declared in ht_net_vocabulary.py; follows ht_ops.cu and net_calls.cu in one NVRTC program,
// compiled with EP_TEAMS. The protocol is that of ht_net_map.py.

// ---- who and where -------------------------------------------------------------------------------------------------------------------------------
INLINE int first_of(i64 rank, i64 team_size) { return int(rank) / int(team_size) * int(team_size); }   // first rank of the team
INLINE int rail_peer(i64 rank, i64 num_ranks, i64 team_size, int distance) {
  int size = int(team_size), teams = int(num_ranks) / size, team = int(rank) / size;
  return (team + teams - distance) % teams * size + int(rank) % size;
}
INLINE bool in_team(i64 route, i64 team, i64 team_size) { return route >= 0 && rank_in(route) / int(team_size) == int(team); }
OP ep_ht_net_blocks() { return gridDim.x; }
OP ep_ht_net_warps() { return warps(); }
OP ep_ht_net_sync() { __syncthreads(); return 0; }
OP ep_ht_net_count(i64 word) {
  u64 v = lane() == 0 ? *(const u64*)word : 0;
  return i64(__shfl_sync(~0u, v, 0));
}
OP ep_ht_net_advance(i64 word, i64 count) { if (lane() == 0) *(i64*)word = count + 1; return 0; }

// ---- the network ---------------------------------------------------------------------------------------------------------------------------------
OP ep_ht_net_put(i64 comm, i64 window, i64 peer, i64 context, i64 target_at, i64 source_at, i64 num_bytes) {
  net_release();
  net_put(comm, window, peer, context, target_at, source_at, num_bytes);
  return 0;
}
OP ep_ht_net_put_rows(i64 comm, i64 window, i64 peer, i64 context, i64 target_at, i64 source_at, i64 routes, i64 first, i64 end, i64 num_topk,
                      i64 row_bytes, i64 wanted, i64 team_size) {
  bool wants = false;
  for (int k = 0; k < num_topk; ++k)   // a lane per token
    if (first + lane() < end) wants |= in_team(((const i64*)routes)[(first + lane()) * num_topk + k], wanted, team_size);
  u32 left = __ballot_sync(~0u, wants);
  net_release();
  while (left) {   // neighbours in one put
    int begin = __ffs(left) - 1;
    u32 gap = ~(left >> begin);
    int n = gap ? __ffs(gap) - 1 : 32;
    i64 at = (first + begin) * row_bytes;
    net_put(comm, window, peer, context, target_at + at, source_at + at, n * row_bytes);
    left = begin + n < 32 ? left >> (begin + n) << (begin + n) : 0;
  }
  return 0;
}
OP ep_ht_net_put_tag(i64 comm, i64 window, i64 peer, i64 context, i64 target_at, i64 epoch, i64 low) {
  net_put_value(comm, window, peer, context, target_at, tagged(epoch, u32(low)));
  return 0;
}
OP ep_ht_net_signal(i64 comm, i64 peer, i64 context, i64 signal, i64 amount) {
  net_release();
  net_signal(comm, peer, context, signal, amount);
  return 0;
}
OP ep_ht_net_wait_chunk(i64 comm, i64 window, i64 tag, i64 peer, i64 context, i64 signal, i64 least, i64 rank, i64 epoch, i64 fail, i64 record,
                        i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    Missing m = wait_signal(comm, context, signal, u64(least), u64(timeout));
    if (lane() == 0) {   // who acquired
      i64 culprit = peer, seen = i64(m.seen), expected = least;
      if (m.index >= 0) {
        code = TIMEOUT;
      } else {
        u64 word = load_relaxed_sys(peer_at(window, tag, rank));
        u32 status = u32(word) >> 24 & 3, detail = u32(word) & 0xffffff;
        bool mine = u32(word >> 32) == u32(epoch);
        expected = epoch, seen = mine ? epoch : i64(word >> 32);
        if (!mine) code = TIMEOUT;
        else if (status == ABORT) code = ABORTED, culprit = detail;
        else if (status == REFUSE) code = REFUSED, seen = detail;
      }
      if (code) give_up(fail, record, code, epoch, ROWS, rank, peer, culprit, seen, expected);
    }
    code = __shfl_sync(~0u, code, 0);
  }
  return tell_block(code);
}

// ---- head ----------------------------------------------------------------------------------------------------------------------------------------
INLINE u64 head_low(i64 epoch, i64 signature) { return tagged(epoch, u32(signature)); }
INLINE u64 head_high(i64 epoch, i64 signature, i64 status) { return tagged(epoch, status ? u32(status) : around_status(signature)); }
OP ep_ht_net_publish_head(i64 window, i64 heads, i64 rank, i64 num_ranks, i64 team_size, i64 epoch, i64 signature, i64 status) {
  i64 at = head_at(heads, num_ranks, rank, epoch), first = first_of(rank, team_size);
  u64 low = head_low(epoch, signature), high = head_high(epoch, signature, status);
  u64 to = lane() < team_size ? peer_at(window, at, first + lane()) : 0;
  fence_system();   // by every publishing lane
  for (int i = lane(); i < team_size; i += 32) {
    if (i >= 32) to = peer_at(window, at, first + i);
    store_relaxed_sys(to, low);
    store_relaxed_sys(to + 8, high);
  }
  return 0;
}
OP ep_ht_net_enter(i64 comm, i64 window, i64 heads, i64 rank, i64 num_ranks, i64 team_size, i64 channels, i64 contexts, i64 adds, i64 count, i64 epoch,
                   i64 signature, i64 status, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    int per_peer = int(channels) + 1, rails = int(num_ranks) / int(team_size) - 1;
    i64 at = head_at(heads, num_ranks, rank, epoch);
    auto awaited = [&](int i) {   // signals of a rail peer: HEAD, then the channels'
      int peer = rail_peer(rank, num_ranks, team_size, 1 + i / per_peer), q = i % per_peer - 1;
      i64 base = i64(peer / int(team_size)) * per_peer;
      return q < 0 ? Awaited{0, base, u64(count)} : Awaited{q % int(contexts), base + 1 + q, u64(count * adds)};
    };
    Missing m = wait_signals(comm, rails * per_peer, u64(timeout), awaited);
    u64 wet = 0;   // a bit per distance (modulo 64): not all that this rail peer put is here
    for (int i = lane(); m.index >= 0 && i < rails * per_peer; i += 32) {
      Awaited a = awaited(i);
      if (gin_signal_value(comm, a.context, a.signal) < a.least) wet |= 1ull << (i / per_peer & 63);
    }
    net_release();
    for (int distance = 1; distance <= rails; ++distance) {
      int peer = rail_peer(rank, num_ranks, team_size, distance);
      if (!__any_sync(~0u, wet >> (distance - 1 & 63) & 1)) {
        net_put_value(comm, window, peer, 0, at, head_low(epoch, signature));
        net_put_value(comm, window, peer, 0, at + 8, head_high(epoch, signature, status));
      }
      net_signal(comm, peer, 0, i64(int(rank) / int(team_size)) * per_peer, 1);
    }
    if (m.index >= 0) {
      code = TIMEOUT;
      i64 peer = rail_peer(rank, num_ranks, team_size, 1 + m.index / per_peer);
      if (lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, peer, peer, i64(m.seen), i64(awaited(m.index).least));
    }
  }
  return tell_block(code);
}
OP ep_ht_net_wait_heads(i64 window, i64 heads, i64 rank, i64 num_ranks, i64 team_size, i64 epoch, i64 signature, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    int size = int(team_size), first = first_of(rank, team_size);
    Verdict v = wait_all(int(num_ranks), int(rank), u64(timeout), [&](int source, bool late) {
      int where = source - source % size == first ? int(rank) : first + source % size;   // other teams' words come to my team's rank of that index
      u64 at = peer_at(window, head_at(heads, num_ranks, source, epoch), where);
      return judge_head(load_acquire_sys(at), load_acquire_sys(at + 8), epoch, signature, source, late);
    });
    code = v.code;
    int holder = first + v.peer % size;
    u64 there = code == TIMEOUT ? load_acquire_sys(peer_at(window, head_at(heads, num_ranks, holder, epoch) + 8, rank)) : 0;
    if (code == TIMEOUT && later(u32(there >> 32), u32(epoch)) < 0) v.peer = v.culprit = holder;   // nobody puts to a rank that is not there
    if (code && lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, v.peer, v.culprit, v.seen, code == MISMATCH ? signature : epoch);
  }
  return tell_block(code);
}
OP ep_ht_net_wait_entered(i64 comm, i64 rank, i64 num_ranks, i64 team_size, i64 channels, i64 count, i64 epoch, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    Missing m = wait_signals(comm, int(num_ranks) / int(team_size) - 1, u64(timeout), [&](int i) {
      return Awaited{0, i64(rail_peer(rank, num_ranks, team_size, 1 + i) / int(team_size)) * (channels + 1), u64(count + 1)};
    });
    if (m.index >= 0) {
      code = TIMEOUT;
      i64 peer = rail_peer(rank, num_ranks, team_size, 1 + m.index);
      if (lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, peer, peer, i64(m.seen), count + 1);
    }
  }
  return tell_block(code);
}
OP ep_ht_net_publish_abort(i64 window, i64 heads, i64 arrived, i64 rank, i64 num_ranks, i64 team_size, i64 epoch, i64 fail) {
  u32 why = u32(load_relaxed_gpu(fail)), code = why & 255, culprit = why >> 8;
  if (code != TIMEOUT && code != ABORTED && code != LEFT_BEHIND) return 0;   // every rank sees other reasons itself
  u64 word = tagged(epoch, u32(ABORT) << 24 | culprit);
  i64 at = head_at(heads, num_ranks, rank, epoch), first = first_of(rank, team_size);
  for (int i = lane(); i < team_size; i += 32) {
    store_relaxed_sys(peer_at(window, at + 8, first + i), word);
    store_relaxed_sys(peer_at(window, arrived + rank * 8, first + i), word);
  }
  return 0;
}
OP ep_ht_net_publish_arrived(i64 window, i64 arrived, i64 rank, i64 team_size, i64 epoch) {
  i64 first = first_of(rank, team_size);
  u64 to = lane() < team_size ? peer_at(window, arrived + rank * 8, first + lane()) : 0;
  fence_system();   // by every publishing lane
  for (int i = lane(); i < team_size; i += 32) {
    if (i >= 32) to = peer_at(window, arrived + rank * 8, first + i);
    store_relaxed_sys(to, tagged(epoch, 0));
  }
  return 0;
}
OP ep_ht_net_wait_arrived(i64 window, i64 arrived, i64 rank, i64 team_size, i64 epoch, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    int first = first_of(rank, team_size);
    Verdict v = wait_words(peer_at(window, arrived + i64(first) * 8, rank), int(team_size), int(rank) - first, epoch, u64(timeout));
    code = v.code;
    i64 culprit = code == ABORTED ? v.culprit : first + v.culprit;   // ABORT tells a rank of the group, the others are counted in my team
    if (code && lane() == 0) give_up(fail, record, code, epoch, ARRIVED, rank, first + v.peer, culprit, v.seen, epoch);
  }
  return tell_block(code);
}

// ---- update --------------------------------------------------------------------------------------------------------------------------------------
OP ep_ht_net_publish_hits(i64 window, i64 hits, i64 rank, i64 num_ranks, i64 num_experts, i64 by_rank, i64 epoch, i64 team_size) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  i64 at = hits_at(hits, num_ranks, num_experts, rank, epoch);
  int first = first_of(rank, team_size);
  for (u32 i = threadIdx.x; i < u32(team_size) * c.columns; i += blockDim.x) {
    u32 peer = i / u32(c.columns), column = i % u32(c.columns);
    store_relaxed_sys(peer_at(window, at + 8 * column, first + peer), tagged(epoch, c.total[column]));
  }
  return 0;
}
OP ep_ht_net_forward_hits(i64 window, i64 net_hits, i64 hits, i64 rank, i64 num_ranks, i64 num_experts, i64 by_rank, i64 epoch, i64 peer,
                          i64 team_size) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  i64 at = hits_at(hits, num_ranks, num_experts, peer, epoch);
  int first = first_of(rank, team_size);
  const u64* from = (const u64*)peer_at(window, net_hits, rank);
  for (int i = threadIdx.x; i < c.columns; i += blockDim.x) {
    u64 word = from[i];
    for (int m = 0; m < team_size; ++m) store_relaxed_sys(peer_at(window, at + 8 * i, first + m), word);
  }
  return 0;
}
// A word of `source`, which for another team is forwarded by my team's rank of the same index. HEAD `told` of who stores it may say that it gave up.
struct Forwarded { int code, culprit; u64 seen; };
INLINE Forwarded wait_forwarded(u64 word, u64 told, int blamed, i64 epoch, u64 started, u64 timeout) {
  for (u32 round = 1;; ++round) {
    u64 value = load_relaxed_sys(word);
    int ahead = later(u32(value >> 32), u32(epoch));
    if (ahead == 0) return {0, 0, value};
    if (ahead > 0 && ahead < NEAR) return {LEFT_BEHIND, blamed, value >> 32};
    if (round % 16) continue;
    u64 state = load_relaxed_sys(told);
    if (u32(state >> 32) == u32(epoch) && (u32(state) >> 24 & 3) == ABORT) return {ABORTED, int(u32(state) & 0xffffff), value >> 32};
    if (round % 64 == 0 && nanoseconds() - started > timeout) return {TIMEOUT, blamed, value >> 32};
  }
}
struct Way { int blamed; u64 told; };   // of a source's words to me
INLINE Way way_of(i64 window, i64 heads, int source, i64 rank, i64 num_ranks, i64 team_size, i64 epoch) {
  int size = int(team_size), first = first_of(rank, team_size);
  int forwarder = first + source % size;   // itself, if it is of my team
  return {forwarder == int(rank) ? source : forwarder, peer_at(window, head_at(heads, num_ranks, forwarder, epoch) + 8, rank)};
}
OP ep_ht_net_wait_hits(i64 window, i64 hits, i64 heads, i64 rank, i64 num_ranks, i64 team_size, i64 num_experts, i64 by_rank, i64 epoch, i64 fail,
                       i64 record, i64 timeout) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  u64 words = peer_at(window, hits_at(hits, num_ranks, num_experts, 0, epoch), rank), started = nanoseconds();
  int code = 0;
  for (u32 i = threadIdx.x; i < u32(num_ranks) * c.columns && !code; i += blockDim.x) {
    u32 source = i / u32(c.columns), column = i % u32(c.columns);
    Way w = way_of(window, heads, int(source), rank, num_ranks, team_size, epoch);
    Forwarded f = wait_forwarded(words + 8 * (i64(source) * (num_experts + num_ranks) + column), w.told, w.blamed, epoch, started, u64(timeout));
    code = f.code;
    if (code) give_up(fail, record, code, epoch, COUNTS, rank, w.blamed, f.culprit, i64(f.seen), epoch);
    else if (u32(f.seen)) {
      atomicAdd(&c.all[column], u32(f.seen));
      if (source < u32(rank)) atomicAdd(&c.lower[column], u32(f.seen));
    }
  }
  return __syncthreads_or(code);
}
OP ep_ht_net_overflows(i64 num_experts, i64 num_ranks, i64 by_rank, i64 budget, i64 first_rank, i64 team_size) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  bool any = false;
  for (int p = 0; p < team_size; ++p) any |= by_rank && c.rank_total[first_rank + p] > u32(budget);
  return any;
}
OP ep_ht_net_publish_kept(i64 window, i64 kept_rows, i64 kept_sent, i64 place_table, i64 num_tokens, i64 num_topk, i64 num_experts, i64 num_ranks,
                          i64 by_rank, i64 budget, i64 rank, i64 epoch, i64 team_size) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  int local = int(num_experts / num_ranks), first = first_of(rank, team_size);
  bool cut = false;
  for (int p = 0; p < num_ranks; ++p) cut |= by_rank && c.rank_total[p] > u32(budget);
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) c.lower[e] = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; cut && i < u32(num_tokens * num_topk); i += blockDim.x) {
    u32 k = i % u32(num_topk);
    i64 place = ((const i64*)place_table)[i];
    bool counts = place >= 0;
    for (u32 j = i - k; j < i; ++j) counts = counts && ((const i64*)place_table)[j] != place;
    if (counts) atomicAdd(&c.lower[place >> 40], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; cut && e < num_experts; e += blockDim.x) {
    int p = e / local;
    u64 word = tagged(epoch, c.lower[e]);
    if (c.rank_total[p] > u32(budget) && p >= first && p < first + team_size)
      store_relaxed_sys(peer_at(window, kept_rows + (rank * local + e % local) * 8, p), word);
    store_relaxed_sys(peer_at(window, kept_sent + i64(e) * 8, rank), word);
  }
  __syncthreads();
  return 0;
}
OP ep_ht_net_forward_kept(i64 window, i64 net_kept, i64 kept_rows, i64 num_experts, i64 num_ranks, i64 by_rank, i64 budget, i64 rank, i64 peer,
                          i64 team_size) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  int local = int(num_experts / num_ranks), first = first_of(rank, team_size);
  const u64* from = (const u64*)peer_at(window, net_kept, rank);
  for (int i = threadIdx.x; by_rank && i < int(team_size) * local; i += blockDim.x) {
    int owner = first + i / local;
    if (c.rank_total[owner] <= u32(budget)) continue;
    store_relaxed_sys(peer_at(window, kept_rows + (peer * local + i % local) * 8, owner), from[i]);
  }
  return 0;
}
OP ep_ht_net_wait_kept(i64 window, i64 kept_rows, i64 heads, i64 rank, i64 num_ranks, i64 team_size, i64 num_experts, i64 by_rank, i64 budget,
                       i64 epoch, i64 fail, i64 record, i64 timeout) {
  Counters c = counters(num_experts, num_ranks, by_rank);
  int local = int(num_experts / num_ranks), code = 0;
  bool cut = by_rank && c.rank_total[rank] > u32(budget);
  u64 words = peer_at(window, kept_rows, rank), started = nanoseconds();
  for (u32 i = threadIdx.x; cut && i < u32(num_ranks) * local && !code; i += blockDim.x) {
    Way w = way_of(window, heads, int(i / u32(local)), rank, num_ranks, team_size, epoch);
    Forwarded f = wait_forwarded(words + 8 * i, w.told, w.blamed, epoch, started, u64(timeout));
    code = f.code;
    if (code) give_up(fail, record, code, epoch, COUNTS, rank, w.blamed, f.culprit, i64(f.seen), epoch);
  }
  return __syncthreads_or(code);
}

// ---- dispatch ------------------------------------------------------------------------------------------------------------------------------------
template <bool CONSTANT>   // the source is never written in this kernel
INLINE void spread_row(u64 source, u64 mine, u64 also, int vectors) {
  const int IN_FLIGHT = 7;
  u32 live = __ballot_sync(~0u, mine != 0);
  if (live == 0 && also == 0) return;
  for (int v = 0; v < vectors; v += 32 * IN_FLIGHT) {
    uint4 held[IN_FLIGHT];
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      int i = v + j * 32 + lane();
      if (i < vectors) held[j] = CONSTANT ? load_nc(source + 16 * i) : load_row(source + 16 * i);
    }
    for (u32 left = live; left; left &= left - 1) {
      u64 to = __shfl_sync(~0u, mine, __ffs(left) - 1);
      #pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) { int i = v + j * 32 + lane(); if (i < vectors) store_row(to + 16 * i, held[j]); }
    }
    #pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) { int i = v + j * 32 + lane(); if (also && i < vectors) store_row(also + 16 * i, held[j]); }
  }
}
OP ep_ht_net_stage_row(i64 rows_window, i64 slot, i64 window, i64 sent, i64 tokens, i64 routes, i64 token, i64 num_topk, i64 row_bytes, i64 rank,
                       i64 team_size) {
  i64 route = route_of(routes, token, num_topk), team = int(rank) / int(team_size);
  bool near_by = in_team(route, team, team_size);
  u64 mine = near_by ? routed_row(rows_window, slot, route, row_bytes) : 0;
  u64 also = __any_sync(~0u, route >= 0 && !near_by) ? peer_at(window, sent + token * row_bytes, rank) : 0;
  spread_row<true>(tokens + token * row_bytes, mine, also, int(row_bytes / 16));
  return 0;
}
OP ep_ht_net_stage_header(i64 window, i64 sent, i64 routes, i64 place_table, i64 weights, i64 token, i64 num_tokens, i64 num_topk, i64 header_bytes,
                          i64 rank, i64 forward) {
  if (lane() >= num_topk) return 0;
  u64 to = peer_at(window, sent + token * header_bytes, rank);
  bool there = token < num_tokens;
  i64 at = token * num_topk + lane();
  ((i64*)to)[lane()] = there ? ((const i64*)routes)[at] : -1;
  ((i64*)to)[num_topk + lane()] = there ? ((const i64*)place_table)[at] : -1;
  if (there && forward) ((float*)(to + 16 * num_topk))[lane()] = load_weight(weights + 4 * at);
  return 0;
}
OP ep_ht_net_take_header(i64 window, i64 staged, i64 remote_routes, i64 remote_places, i64 token, i64 num_topk, i64 num_experts, i64 num_ranks,
                         i64 header_bytes, i64 rank, i64 team_size) {
  if (lane() >= num_topk) return 0;
  const i64* from = (const i64*)peer_at(window, staged + token * header_bytes, rank);
  i64 route = from[lane()], place = from[num_topk + lane()], at = token * num_topk + lane();
  int local = int(num_experts / num_ranks), team = int(rank) / int(team_size);
  ((i64*)remote_routes)[at] = in_team(route, team, team_size) ? route : -1;
  ((i64*)remote_places)[at] = place >= 0 && int(place >> 40) / local / int(team_size) == team ? place : -1;
  return 0;
}
OP ep_ht_net_forward_row(i64 rows_window, i64 slot, i64 window, i64 staged, i64 remote_routes, i64 token, i64 num_topk, i64 row_bytes, i64 rank) {
  u64 mine = routed_row(rows_window, slot, route_of(remote_routes, token, num_topk), row_bytes);
  spread_row<false>(peer_at(window, staged + token * row_bytes, rank), mine, 0, int(row_bytes / 16));
  return 0;
}
INLINE void spread_weights(i64 window, i64 recv_idx, i64 recv_weights, i64 route, i64 place, float weight, i64 num_topk, i64 local, i64 by_rank,
                           i64 global_ids) {   // a lane per k; -1 for what is not to be sent
  for (u32 left = by_rank ? __ballot_sync(~0u, route >= 0) : 0; left; left &= left - 1) {   // columns without an id
    i64 there = __shfl_sync(~0u, route, __ffs(left) - 1), at = i64(u32(there)) * num_topk + lane();
    if (lane() < (there >> 48) || lane() >= num_topk) continue;
    *(i64*)peer_at(window, recv_idx + 8 * at, rank_in(there)) = -1;
    *(float*)peer_at(window, recv_weights + 4 * at, rank_in(there)) = 0.f;
  }
  float sum = 0.f;
  bool first = true;
  for (int k = 0; k < num_topk; ++k) {   // duplicates of an expert have the same place
    i64 other = __shfl_sync(~0u, place, k);
    float w = __shfl_sync(~0u, weight, k);
    if (other == place) sum = first ? w : sum + w, first = false;
  }
  if (place < 0) return;
  int expert = int(place >> 40), owner = expert / int(local);
  i64 at = i64(u32(place));
  if (by_rank) {
    at = at * num_topk + (place >> 32 & 255);
    *(i64*)peer_at(window, recv_idx + 8 * at, owner) = global_ids ? expert : expert - owner * int(local);
  }
  *(float*)peer_at(window, recv_weights + 4 * at, owner) = sum;
}
OP ep_ht_net_scatter_weights(i64 window, i64 recv_idx, i64 recv_weights, i64 weights, i64 routes, i64 place_table, i64 token, i64 num_topk,
                             i64 num_experts, i64 num_ranks, i64 by_rank, i64 global_ids, i64 rank, i64 team_size) {
  i64 route = route_of(routes, token, num_topk), place = route_of(place_table, token, num_topk);
  int local = int(num_experts / num_ranks), team = int(rank) / int(team_size);
  float weight = lane() < num_topk ? load_weight(weights + 4 * (token * num_topk + lane())) : 0.f;
  if (!in_team(route, team, team_size)) route = -1;
  if (place >= 0 && int(place >> 40) / local / int(team_size) != team) place = -1;
  spread_weights(window, recv_idx, recv_weights, route, place, weight, num_topk, local, by_rank, global_ids);
  return 0;
}
OP ep_ht_net_forward_weights(i64 window, i64 recv_idx, i64 recv_weights, i64 staged, i64 remote_routes, i64 remote_places, i64 token, i64 num_topk,
                             i64 num_experts, i64 num_ranks, i64 by_rank, i64 global_ids, i64 header_bytes, i64 rank, i64 team_size) {
  i64 route = route_of(remote_routes, token, num_topk), place = route_of(remote_places, token, num_topk);
  const float* from = (const float*)peer_at(window, staged + token * header_bytes + 16 * num_topk, rank);
  float weight = lane() < num_topk && place >= 0 ? from[lane()] : 0.f;
  spread_weights(window, recv_idx, recv_weights, route, place, weight, num_topk, num_experts / num_ranks, by_rank, global_ids);
  return 0;
}

// ---- combine -------------------------------------------------------------------------------------------------------------------------------------
INLINE void sum_rows(u64 mine, u64 to, i64 row_bytes, i64 token_type) {   // of the lanes' rows, in lane order
  u32 live = __ballot_sync(~0u, mine != 0);
  int end = int(row_bytes / 16);
  if (token_type == 0) gather<0>(mine, 1.f, live, to, 0, end);   // x * 1 + sum is x + sum, rounded once
  else if (token_type == 1) gather<1>(mine, 1.f, live, to, 0, end);
  else gather<2>(mine, 1.f, live, to, 0, end);
}
OP ep_ht_net_partial_row(i64 rows_window, i64 slot, i64 window, i64 sent, i64 remote_routes, i64 token, i64 num_topk, i64 row_bytes, i64 token_type,
                         i64 rank) {
  u64 mine = routed_row(rows_window, slot, route_of(remote_routes, token, num_topk), row_bytes);
  if (__any_sync(~0u, mine != 0)) sum_rows(mine, peer_at(window, sent + token * row_bytes, rank), row_bytes, token_type);
  return 0;
}
INLINE float gradient_at(i64 window, i64 recv_weights, i64 place, i64 num_topk, i64 local, i64 by_rank) {
  i64 at = i64(u32(place));
  if (by_rank) at = at * num_topk + (place >> 32 & 255);
  return *(const float*)peer_at(window, recv_weights + 4 * at, int(place >> 40) / int(local));
}
OP ep_ht_net_partial_grads(i64 window, i64 recv_weights, i64 sent, i64 remote_places, i64 token, i64 num_topk, i64 num_experts, i64 num_ranks,
                           i64 by_rank, i64 rank) {
  if (lane() >= num_topk) return 0;
  i64 at = token * num_topk + lane(), place = ((const i64*)remote_places)[at];
  float grad = place >= 0 ? gradient_at(window, recv_weights, place, num_topk, num_experts / num_ranks, by_rank) : 0.f;
  *(float*)peer_at(window, sent + 4 * at, rank) = grad;
  return 0;
}
OP ep_ht_net_reduce_row(i64 rows_window, i64 slot, i64 window, i64 staged, i64 routes, i64 out, i64 token, i64 num_topk, i64 row_bytes, i64 token_type,
                        i64 rank, i64 num_ranks, i64 team_size, i64 team_bytes) {
  int size = int(team_size), teams = int(num_ranks) / size, team = int(rank) / size;
  i64 route = route_of(routes, token, num_topk);
  bool own = in_team(route, team, team_size);
  int distance = route < 0 || own ? 0 : (team + teams - rank_in(route) / size) % teams;
  u32 same = __match_any_sync(~0u, distance), own_lanes = __ballot_sync(~0u, own);
  bool leads = distance > 0 && __ffs(same) - 1 == lane();   // one lane for each other team
  u32 leaders = __ballot_sync(~0u, leads);
  int place = own ? __popc(own_lanes & ((1u << lane()) - 1)) : __popc(own_lanes);   // in the sum
  for (u32 left = leaders; left; left &= left - 1) {
    int other = __shfl_sync(~0u, distance, __ffs(left) - 1);   // by all lanes
    place += !own && other < distance;
  }
  u64 row = own ? routed_row(rows_window, slot, route, row_bytes)
                : leads ? peer_at(window, staged + i64(distance - 1) * team_bytes + token * row_bytes, rank) : 0;
  u64 mine = 0;
  for (u32 left = own_lanes | leaders; left; left &= left - 1) {
    int from = __ffs(left) - 1, to = __shfl_sync(~0u, place, from);
    u64 that = __shfl_sync(~0u, row, from);
    if (lane() == to) mine = that;
  }
  sum_rows(mine, out + token * row_bytes, row_bytes, token_type);
  return 0;
}
OP ep_ht_net_reduce_grads(i64 window, i64 recv_weights, i64 staged, i64 place_table, i64 grads, i64 token, i64 num_topk, i64 num_experts, i64 num_ranks,
                          i64 by_rank, i64 rank, i64 team_size, i64 team_bytes) {
  if (lane() >= num_topk) return 0;
  int size = int(team_size), teams = int(num_ranks) / size, team = int(rank) / size, local = int(num_experts / num_ranks);
  i64 at = token * num_topk + lane(), place = ((const i64*)place_table)[at];
  float grad = 0.f;
  if (place >= 0) {
    int distance = (team + teams - int(place >> 40) / local / size) % teams;
    if (distance == 0) grad = gradient_at(window, recv_weights, place, num_topk, local, by_rank);
    else grad = *(const float*)peer_at(window, staged + i64(distance - 1) * team_bytes + 4 * at, rank);
  }
  ((float*)grads)[at] = grad;
  return 0;
}
