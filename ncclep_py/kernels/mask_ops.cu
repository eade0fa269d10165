// Operations of groups with enable_mask: who is a member is agreed by votes. Rules M1 to M7 of ncclep_py/member_map.py; declared, with scope and
// memory order, in ops.py; follows fabric_ops.cu in one NVRTC program. At most 29 ranks, so one warp has a lane for each.
enum MaskCode { EXCLUDED = 16, MASKED = 17, WROTE_LATE = 18, CAME_LATE = 19, AGAIN = 32 };   // errors.Code; AGAIN never leaves a kernel
enum Vote { WRITES = 0, COMMITS = 1, FAILS = 2, LOCKED = 3, LOCKED_WRITER = 4 };
const u32 LATE_STATUS = 3;                                                                    // errors.Status

INLINE u64 vote_word(i64 epoch, u32 state, u32 low) { return tagged(epoch, state << 29 | low); }
INLINE u32 state_of(u64 vote) { return u32(vote) >> 29; }
INLINE u32 low_of(u64 vote) { return u32(vote) & 0x1fffffff; }
INLINE int distance(u64 word, i64 epoch) { return later(u32(word >> 32), u32(epoch)); }
INLINE u64 vote_cas(u64 p, u64 expected, u64 v) {
  u64 old;
  asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;" : "=l"(old) : "l"(p), "l"(expected), "l"(v) : "memory");
  return old;
}
INLINE void store_relaxed_gpu(u64 p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
INLINE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
INLINE void fence_total() { asm volatile("fence.sc.sys;" ::: "memory"); }

// ---- agreement (M2, M3) ------------------------------------------------------------------------------------------------------------------------
struct Outcome { int code; u32 low; };   // 0: committed under mask `low`; FAILED: for the reason `low`; AGAIN: next mask `low`; LEFT_BEHIND
const int FAILED = 64;

// Warp. Locks the votes of all ranks, then finds or makes the verdict on this attempt. No waits.
INLINE Outcome arbitrate(i64 window, i64 votes, i64 num_ranks, i64 epoch, u32 proposal) {
  bool ended = false, left = false, writer = false;
  u32 state = WRITES;
  u32 low = 0;
  if (lane() < num_ranks) {
    u64 at = peer_at(window, votes, lane()), old = load_relaxed_sys(at);
    for (;;) {
      int ahead = distance(old, epoch);
      state = state_of(old);
      left = ahead > 0, ended = ahead == 0 && (state == COMMITS || state == FAILS), writer = ahead == 0 && state == LOCKED_WRITER;
      low = ahead == 0 && state != WRITES ? low_of(old) : 0;
      if (left || ended || (ahead == 0 && state >= LOCKED)) break;
      writer = ahead == 0;
      u64 found = vote_cas(at, old, vote_word(epoch, writer ? LOCKED_WRITER : LOCKED, proposal));
      if (found == old) break;
      old = found;
    }
  }
  fence_total();   // what I found locked or committed by a plain look is acquired, too
  u32 by = __ballot_sync(~0u, ended);
  if (by) {
    u32 how = __shfl_sync(~0u, state, __ffs(by) - 1);   // of every lane, whether it counts or not
    return {how == COMMITS ? 0 : FAILED, __shfl_sync(~0u, low, __ffs(by) - 1)};
  }
  if (__any_sync(~0u, left)) return {LEFT_BEHIND, 0};
  proposal = (proposal | __reduce_or_sync(~0u, low)) & ~__ballot_sync(~0u, writer);
  int code = AGAIN;
  if (lane() == 0) {
    u64 at = peer_at(window, votes + 8, 0), old = load_relaxed_sys(at);
    for (;;) {
      int ahead = distance(old, epoch);
      if (ahead > 0) { code = LEFT_BEHIND; break; }
      if (ahead == 0) { proposal = low_of(old); break; }
      u64 found = vote_cas(at, old, vote_word(epoch, LOCKED, proposal));
      if (found == old) break;
      old = found;
    }
  }
  fence_total();
  return {__shfl_sync(~0u, code, 0), __shfl_sync(~0u, proposal, 0)};
}
// Warp. The code of an operation whose attempt ended: 0 if it went well, AGAIN, or why it failed, which is recorded.
INLINE int resolve(i64 window, i64 votes, i64 rank, i64 num_ranks, i64 epoch, u32 proposal, i64 phase, i64 fail, i64 record) {
  Outcome o = arbitrate(window, votes, num_ranks, epoch, proposal);
  bool failed = o.code == FAILED, out = o.code == LEFT_BEHIND || (!failed && (o.low >> rank & 1));
  int code = failed ? int(o.low & 255) : out ? int(EXCLUDED) : o.code;
  i64 peer = failed ? o.low >> 8 & 31 : rank, detail = failed ? o.low >> 13 : 0;
  if (code && code != AGAIN && lane() == 0) give_up(fail, record, code, epoch, phase, rank, peer, peer, detail, epoch);
  return code;
}
INLINE bool is_locked(u64 vote, i64 epoch) { int ahead = distance(vote, epoch); return ahead > 0 || (ahead == 0 && state_of(vote) >= LOCKED); }
INLINE void add_waited(i64 waited, u64 nanos) { if (nanos) ((u64*)waited)[lane()] += nanos; }

// ---- join (M1) ---------------------------------------------------------------------------------------------------------------------------------
INLINE i64 bank(i64 epoch, i64 num_ranks, i64 source) { return (epoch & 1) * num_ranks + source; }

OP ep_read_mask(i64 members) { return u32(__shfl_sync(~0u, *(const u32*)members, 0)); }
OP ep_publish_join(i64 window, i64 joins, i64 details, i64 rank, i64 num_ranks, i64 epoch, i64 signature, i64 mask, i64 extra,
                    i64 status) {
  i64 at = bank(epoch, num_ranks, rank);
  for (int peer = lane(); peer < num_ranks; peer += 32) {
    store_relaxed_sys(peer_at(window, details + at * 32, peer), signature);
    store_relaxed_sys(peer_at(window, details + at * 32 + 8, peer), mask);
    store_relaxed_sys(peer_at(window, details + at * 32 + 16, peer), extra);
  }
  fence_system();   // by every publishing lane
  for (int peer = lane(); peer < num_ranks; peer += 32) store_relaxed_sys(peer_at(window, joins + at * 8, peer), tagged(epoch, u32(status)));
  return 0;
}
OP ep_wait_joins(i64 window, i64 joins, i64 details, i64 votes, i64 rank, i64 num_ranks, i64 epoch, i64 signature, i64 mask, i64 commits, i64 waited,
                 i64 wrote, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    bool member = lane() < num_ranks && !(mask >> lane() & 1);
    u64 word_at = peer_at(window, joins + bank(epoch, num_ranks, member ? lane() : rank) * 8, rank), mine = peer_at(window, votes, rank);
    u64 word = 0, vote = 0, started = nanoseconds(), came = started;
    u32 missing = 0, proposal = u32(mask);
    timeout += timeout / 4;   // M4: who waits for counts or ARRIVED of an earlier attempt gives up first
    bool here = !member, stop = mask >> rank & 1;
    for (u32 round = 1; !stop; ++round) {
      if (!here) {
        word = load_relaxed_sys(word_at);
        here = distance(word, epoch) >= 0;
        if (here && round > 1) came = nanoseconds();
      }
      vote = load_relaxed_sys(mine);
      missing = __ballot_sync(~0u, !here);
      bool late = missing && round % 64 == 0 && nanoseconds() - started > timeout;
      stop = __any_sync(~0u, late || is_locked(vote, epoch) || (member && here && distance(word, epoch) > 0));
      if (stop && __any_sync(~0u, late)) proposal |= missing;
      if (!missing) break;
    }
    fence_system();
    vote = __shfl_sync(~0u, vote, 0);
    if (blockIdx.x == 0 && member) add_waited(waited, came - started);
    u32 low = 0;
    if (!stop) {
      u64 from = peer_at(window, details + bank(epoch, num_ranks, member ? lane() : rank) * 32, rank);
      i64 theirs = load_relaxed_sys(from), view = load_relaxed_sys(from + 8);
      u32 refused = __ballot_sync(~0u, member && u32(word) >> 24 == REFUSE), other = __ballot_sync(~0u, member && theirs != signature);
      u32 views = __reduce_or_sync(~0u, member ? u32(view) : 0u);
      int who = refused ? __ffs(refused) - 1 : other ? __ffs(other) - 1 : 0;
      i64 seen = refused ? i64(__shfl_sync(~0u, u32(word) & 0xffff, who)) : (i64)__shfl_sync(~0u, theirs, who);
      stop = views != u32(mask);
      proposal |= views;
      if (!stop && (refused || other)) {
        code = refused ? REFUSED : MISMATCH;
        low = u32(code) | u32(who) << 8 | (refused ? u32(seen) << 13 : 0u);
      }
      u64 want = code ? vote_word(epoch, FAILS, low) : commits ? vote_word(epoch, COMMITS, u32(mask)) : vote_word(epoch, WRITES, 0);
      while (!stop && !(distance(vote, epoch) == 0 && state_of(vote) < LOCKED)) {   // M2, once for the rank
        if (is_locked(vote, epoch)) { stop = true; break; }
        u64 found = 0;
        if (lane() == 0) found = vote_cas(mine, vote, want);
        found = __shfl_sync(~0u, found, 0);
        if (found == vote) {
          if (lane() == 0) *(u64*)wrote = want;   // M6: whether this rank began to write
          break;
        }
        vote = found;
      }
      if (!stop && code && lane() == 0)
        give_up(fail, record, code, epoch, HEAD, rank, who, who, seen, code == MISMATCH ? signature : epoch);
    }
    if (mask >> rank & 1) {
      code = EXCLUDED;
      if (lane() == 0) give_up(fail, record, code, epoch, HEAD, rank, rank, rank, epoch, epoch);
    } else if (stop) {
      code = resolve(window, votes, rank, num_ranks, epoch, proposal, HEAD, fail, record);
    }
  }
  return tell_block(code);
}

// ---- counts and rows of members ----------------------------------------------------------------------------------------------------------------
// Thread. 0 with the value; 1 if this attempt will not get it.
INLINE int member_count(u64 word, u64 mine, i64 epoch, u64 started, u64 timeout, u64* value) {
  for (u32 round = 1;; ++round) {
    *value = load_relaxed_sys(word);
    int ahead = distance(*value, epoch);
    if (ahead == 0) return 0;
    if (ahead > 0 || (round % 64 == 0 && (nanoseconds() - started > timeout || is_locked(load_relaxed_sys(mine), epoch)))) return 1;
  }
}
// Block. After a vote on whether any thread gave up.
INLINE int resolve_block(int gone, i64 window, i64 votes, i64 rank, i64 num_ranks, i64 epoch, i64 mask, i64 fail, i64 record) {
  int code = 0;
  if (gone && warp() == 0) code = resolve(window, votes, rank, num_ranks, epoch, u32(mask), COUNTS, fail, record);
  return tell_block(code);
}
OP ep_wait_member_counts(i64 window, i64 counts, i64 votes, i64 rank, i64 num_ranks, i64 num_experts, i64 epoch, i64 mask, i64 fail, i64 record,
                         i64 timeout) {
  u32* start = start_row(num_experts);
  u64 words = peer_at(window, counts, rank), mine = peer_at(window, votes, rank), started = nanoseconds();
  int gone = 0;
  for (u32 i = threadIdx.x; i < u32(rank * num_experts) && !gone; i += blockDim.x) {
    if (mask >> (i / u32(num_experts)) & 1) continue;
    u64 value;
    gone = member_count(words + 8 * i, mine, epoch, started, timeout, &value);
    if (!gone && u32(value)) atomicAdd(&start[i % u32(num_experts)], u32(value));
  }
  return resolve_block(__syncthreads_or(gone), window, votes, rank, num_ranks, epoch, mask, fail, record);
}
OP ep_sum_member_counts(i64 window, i64 counts, i64 votes, i64 rank, i64 num_ranks, i64 num_experts, i64 epoch, i64 mask, i64 plane_rows,
                        i64 expert_counters, i64 fail, i64 record, i64 timeout) {
  i64 local = num_experts / num_ranks;
  u32* sum = total_rows();   // free: my own counts went out long ago
  for (int l = threadIdx.x; l < local; l += blockDim.x) sum[l] = 0;
  __syncthreads();
  u64 words = peer_at(window, counts + rank * local * 8, rank), mine = peer_at(window, votes, rank), started = nanoseconds();
  int gone = 0;
  for (u32 i = threadIdx.x; i < u32(num_experts) && !gone; i += blockDim.x) {
    u32 peer = i / u32(local);
    if (mask >> peer & 1) continue;
    u64 value;
    gone = member_count(words + 8 * (peer * num_experts + i % u32(local)), mine, epoch, started, timeout, &value);
    if (!gone && u32(value)) atomicAdd(&sum[i % u32(local)], u32(value));
  }
  gone = __syncthreads_or(gone);
  for (int l = threadIdx.x; l < local; l += blockDim.x) ((int*)expert_counters)[l] = int(min(sum[l], u32(plane_rows)));
  return resolve_block(gone, window, votes, rank, num_ranks, epoch, mask, fail, record);
}
OP ep_drop_rows(i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows, i64 first, i64 end, i64 part, i64 table, i64 mask) {
  int* rows = block_rows(num_experts);
  i64 base = first * num_topk;
  u32 per_rank = u32(num_experts / num_ranks * plane_rows);
  int n = int((end - first) * num_topk);
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    if (rows[i] >= 0 && (mask >> (u32(rows[i]) / per_rank) & 1)) {
      rows[i] = -1;
      if (part == 0) ((int*)table)[base + i] = -1;
    }
  __syncthreads();
  return 0;
}
OP ep_gather_member_row(i64 window, i64 slot, i64 table, i64 weights, i64 out, i64 token, i64 num_topk, i64 num_experts, i64 num_ranks,
                        i64 plane_rows, i64 row_bytes, i64 token_type, i64 begin_vector, i64 end_vector, i64 mask) {
  i64 at = token * num_topk + lane(), per_rank = num_experts / num_ranks * plane_rows;
  int row = lane() < num_topk ? ((const int*)table)[at] : -1;
  if (row >= 0 && (mask >> (u32(row) / u32(per_rank)) & 1)) row = -1;
  u64 mine = row_at(window, slot, row, per_rank, row_bytes);
  float weight = mine ? load_weight(weights + 4 * at) : 0.f;
  u32 live = __ballot_sync(~0u, mine != 0);
  u64 to = out + token * row_bytes;
  int begin = int(begin_vector), end = int(end_vector);
  if (token_type == 0) gather<0>(mine, weight, live, to, begin, end);
  else if (token_type == 1) gather<1>(mine, weight, live, to, begin, end);
  else gather<2>(mine, weight, live, to, begin, end);
  return 0;
}

// ---- the end of an attempt ---------------------------------------------------------------------------------------------------------------------
OP ep_settle(i64 window, i64 arrived, i64 votes, i64 rank, i64 num_ranks, i64 epoch, i64 mask, i64 waited, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    bool member = lane() < num_ranks && !(mask >> lane() & 1);
    u64 word_at = peer_at(window, arrived + (member ? lane() : rank) * 8, rank), mine = peer_at(window, votes, rank);
    u64 word = 0, vote = 0, started = nanoseconds(), came = started;
    bool here = !member, stop = false;
    for (u32 round = 1; !stop; ++round) {
      if (!here) {
        word = load_relaxed_sys(word_at);
        here = distance(word, epoch) >= 0;
        if (here && round > 1) came = nanoseconds();
      }
      vote = load_relaxed_sys(mine);
      u32 missing = __ballot_sync(~0u, !here);
      bool late = missing && round % 64 == 0 && nanoseconds() - started > timeout;
      stop = __any_sync(~0u, late || is_locked(vote, epoch) || (member && here && distance(word, epoch) > 0));
      if (!missing) break;
    }
    fence_system();
    if (member) add_waited(waited, came - started);
    if (!stop) {
      u64 found = 0;
      if (lane() == 0) found = vote_cas(mine, vote_word(epoch, WRITES, 0), vote_word(epoch, COMMITS, u32(mask)));
      found = __shfl_sync(~0u, found, 0);
      stop = found != vote_word(epoch, WRITES, 0);
    }
    if (stop) code = resolve(window, votes, rank, num_ranks, epoch, u32(mask), ARRIVED, fail, record);
  }
  return tell_block(code);
}
OP ep_publish_late(i64 window, i64 arrived, i64 rank, i64 num_ranks, i64 epoch, i64 wrote) {
  u64 last = __shfl_sync(~0u, *(const u64*)wrote, 0);   // no fence: nobody reads rows because of this
  for (int peer = lane(); peer < num_ranks && last == vote_word(epoch, WRITES, 0); peer += 32)
    store_relaxed_sys(peer_at(window, arrived + rank * 8, peer), tagged(epoch, LATE_STATUS << 24));
  return 0;
}
INLINE void notify(i64 notice, i64 code, i64 epoch, i64 phase, i64 rank, i64 peer) {   // the first since the host looked, or the worst
  volatile i64* n = (volatile i64*)notice;
  if (n[0] != 0 && (code != WROTE_LATE || n[0] == WROTE_LATE)) return;
  n[1] = epoch, n[2] = phase, n[3] = rank, n[4] = peer, n[5] = peer, n[6] = epoch, n[7] = epoch;
  fence_total();
  n[0] = code;
}
OP ep_conclude(i64 window, i64 joins, i64 arrived, i64 votes, i64 rank, i64 num_ranks, i64 members, i64 masked_at, i64 epoch, i64 mask, i64 code,
               i64 left, i64 notice, i64 fail, i64 record) {
  u32 next = u32(mask);
  if (code == 0) {   // M6: what I pulled may be overwritten if they went on without me meanwhile
    u64 mine = peer_at(window, votes, rank), vote = vote_word(epoch, COMMITS, u32(mask));
    u64 found = lane() == 0 ? vote_cas(mine, vote, vote) : vote;
    if (distance(__shfl_sync(~0u, found, 0), epoch) > 0) {
      code = EXCLUDED;
      if (lane() == 0) give_up(fail, record, code, epoch, ROWS, rank, rank, rank, found >> 32, epoch);
    }
  }
  if (code == AGAIN) {
    u64 verdict = lane() == 0 ? load_relaxed_sys(peer_at(window, votes + 8, 0)) : 0;
    next = low_of(__shfl_sync(~0u, verdict, 0));
    if (left == 0) {
      code = TIMEOUT;
      if (lane() == 0) give_up(fail, record, TIMEOUT, epoch, HEAD, rank, rank, rank, epoch, epoch);
    }
  } else if (code == EXCLUDED) {
    next |= 1u << rank;
  }
  u64* since = (u64*)masked_at;
  u32 more = next & ~u32(mask);
  bool newly = lane() < num_ranks && (more >> lane() & 1) && lane() != rank, old = lane() < num_ranks && (u32(mask) >> lane() & 1) && lane() != rank;
  u64 told = old ? since[lane()] : tagged(epoch, 0);
  u32 came = 0, wrote = 0;
  if (old && u32(told) != 3) {   // M6: words of ranks we went on without
    i64 masked = told >> 32;
    u64 join = load_relaxed_sys(peer_at(window, joins + bank(masked, num_ranks, lane()) * 8, rank));
    u64 row = load_relaxed_sys(peer_at(window, arrived + lane() * 8, rank));
    came = distance(join, masked) == 0 && !(told & 1);
    wrote = u32(row) >> 24 == LATE_STATUS && distance(row, masked) >= -1 && !(told & 2);
  }
  if (newly || came || wrote) since[lane()] = told | came | wrote << 1;
  u32 all_new = __ballot_sync(~0u, newly), all_wrote = __ballot_sync(~0u, wrote), all_came = __ballot_sync(~0u, came);
  if (lane() == 0) {
    if (all_wrote) notify(notice, WROTE_LATE, epoch, ROWS, rank, __ffs(all_wrote) - 1);
    if (all_new) notify(notice, MASKED, epoch, HEAD, rank, __ffs(all_new) - 1);
    if (all_came) notify(notice, CAME_LATE, epoch, HEAD, rank, __ffs(all_came) - 1);
    *(u64*)members = next;
  }
  return code;
}
OP ep_tell_outcome(i64 outcome, i64 epoch, i64 result) {
  fence_device();
  if (lane() == 0) store_relaxed_gpu(outcome, tagged(epoch, u32(result)));
  return 0;
}
OP ep_await_outcome(i64 outcome, i64 epoch, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    u64 started = nanoseconds(), word = 0;
    for (u32 round = 1;; ++round) {   // the last block has deadlines of its own; this one is for a grid that does not fit
      word = load_relaxed_gpu(outcome);
      bool late = round % 64 == 0 && nanoseconds() - started > 8 * timeout;
      u32 told = __ballot_sync(~0u, distance(word, epoch) == 0);   // lanes may have read at different moments
      if (told) { code = int(u32(__shfl_sync(~0u, u32(word), __ffs(told) - 1))); break; }
      if (__any_sync(~0u, late)) { code = TIMEOUT; break; }
    }
    fence_device();
  }
  return tell_block(code);
}

// ---- mask_clean (M7) ---------------------------------------------------------------------------------------------------------------------------
OP ep_next_epoch(i64 epoch) { return u32(epoch + 1); }
INLINE u32 tell_word(u32 word) {   // block; warp 0's, of 32 bits
  if (threadIdx.x == 0) total_rows()[0] = word;
  __syncthreads();
  u32 told = total_rows()[0];
  __syncthreads();
  return told;
}
OP ep_read_verdict(i64 window, i64 votes) {
  u64 verdict = threadIdx.x == 0 ? load_relaxed_sys(peer_at(window, votes + 8, 0)) : 0;   // once for the block: it changes
  return tell_word(low_of(verdict));
}
INLINE u32 latest(u32 mine, u32 ranks, i64 num_ranks) {   // of the lanes in `ranks`; lane r holds rank r's
  u32 most = __shfl_sync(~0u, mine, ranks ? __ffs(ranks) - 1 : 0);
  for (int r = 0; r < num_ranks; ++r) {
    u32 other = __shfl_sync(~0u, mine, r);
    if ((ranks >> r & 1) && later(other, most) > 0) most = other;
  }
  return most;
}
OP ep_catch_up(i64 window, i64 votes, i64 num_ranks) {
  u32 found = 0;
  if (warp() == 0) {   // once for the block: votes change
    u64 vote = load_relaxed_sys(peer_at(window, votes, lane() < num_ranks ? lane() : 0));
    found = latest(u32(vote >> 32), (1u << num_ranks) - 1, num_ranks);
  }
  return tell_word(found);
}
OP ep_is_stranded(i64 window, i64 votes, i64 rank, i64 num_ranks, i64 epoch, i64 mask, i64 before) {
  u64 verdict = lane() == 0 ? vote_cas(peer_at(window, votes + 8, 0), ~0ull, ~0ull) : 0;   // the latest: no vote is all ones
  verdict = __shfl_sync(~0u, verdict, 0);
  u32 they = ~low_of(verdict) & ((1u << num_ranks) - 1);   // went on without me
  bool without_me = !(they >> rank & 1) && (distance(verdict, epoch) >= 0 || (before >> rank & 1));
  return without_me && !(they & ~u32(mask));
}
OP ep_readmit(i64 window, i64 details, i64 votes, i64 rank, i64 num_ranks, i64 epoch, i64 mask, i64 members, i64 masked_at, i64 word, i64 header, i64 num_slots) {
  i64 source = lane() < num_ranks ? lane() : rank;
  u32 theirs = u32(load_relaxed_sys(peer_at(window, details + bank(epoch, num_ranks, source) * 32 + 16, rank)));
  u32 next = latest(theirs, ~u32(mask) & ((1u << num_ranks) - 1), num_ranks) + 1;
  if (lane() < num_ranks) ((u64*)masked_at)[lane()] = tagged(next, 0);
  if (lane() == 0) {
    u64 at = peer_at(window, votes + 8, 0), old = load_relaxed_sys(at), want = vote_word(next - 1, LOCKED, u32(mask));
    while (distance(old, next - 1) < 0) {   // so that who is left out can know (is_stranded)
      u64 found = vote_cas(at, old, want);
      if (found == old) break;
      old = found;
    }
    *(u64*)members = u32(mask);
    *(u64*)word = next;
    for (int i = 0; i < 2 * num_slots; ++i) ((i64*)header)[i] = 0;
  }
  return 0;
}
