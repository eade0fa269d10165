// Operations for kernels of one's own over several teams. Declared in net_vocabulary.py; follows net_calls.cu in one NVRTC program, compiled with
// EP_TEAMS.

// ---- put -----------------------------------------------------------------------------------------------------------------------------------------
OP ep_net_put_signal(i64 comm, i64 window, i64 peer, i64 context, i64 target_at, i64 source_at, i64 num_bytes, i64 signal, i64 amount) {
  net_release();
  if (lane() == 0) {
    if (num_bytes > 0) gin_put_signal(comm, window, peer, context, target_at, window, source_at, num_bytes, signal, amount);
    else gin_signal(comm, peer, context, signal, amount);
  }
  __syncwarp();
  return 0;
}
OP ep_net_put_counted(i64 comm, i64 window, i64 peer, i64 context, i64 target_at, i64 source_at, i64 num_bytes, i64 which) {
  net_release();
  if (lane() == 0 && num_bytes > 0) gin_put_counted(comm, window, peer, context, target_at, window, source_at, num_bytes, which);
  __syncwarp();
  return 0;
}

// ---- look: lane 0, for all lanes -----------------------------------------------------------------------------------------------------------------
INLINE u64 told_warp(u64 value) { __syncwarp(); return __shfl_sync(~0u, value, 0); }   // the barrier orders what lane 0 acquired
INLINE u64 counter_value(i64 comm, i64 context, i64 which) { return told_warp(lane() == 0 ? gin_counter_value(comm, context, which) : 0); }
OP ep_net_read_signal(i64 comm, i64 context, i64 signal) { return i64(told_warp(lane() == 0 ? gin_signal_value(comm, context, signal) : 0)); }
OP ep_net_read_counter(i64 comm, i64 context, i64 which) { return i64(counter_value(comm, context, which)); }

// ---- wait ----------------------------------------------------------------------------------------------------------------------------------------
INLINE Missing wait_counter(i64 comm, i64 context, i64 which, u64 least, u64 timeout) {
  u64 started = nanoseconds();
  for (;;) {
    bool late = __any_sync(~0u, nanoseconds() - started > timeout);   // looked at before the counter: it gets a last look
    u64 seen = counter_value(comm, context, which);
    if (seen >= least) return {-1, seen};
    if (late) return {0, seen};
  }
}
// Warp 0 has waited: what this means to the block.
INLINE int missed(Missing m, Phase phase, i64 rank, i64 peer, i64 least, i64 epoch, i64 fail, i64 record) {
  if (m.index < 0) return 0;
  if (lane() == 0) give_up(fail, record, TIMEOUT, epoch, phase, rank, peer, peer, i64(m.seen), least);
  return TIMEOUT;
}
OP ep_net_wait_signal(i64 comm, i64 context, i64 signal, i64 least, i64 rank, i64 peer, i64 epoch, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) code = missed(wait_signal(comm, context, signal, u64(least), u64(timeout)), ROWS, rank, peer, least, epoch, fail, record);
  return tell_block(code);
}
OP ep_net_wait_counter(i64 comm, i64 context, i64 which, i64 least, i64 rank, i64 peer, i64 epoch, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) code = missed(wait_counter(comm, context, which, u64(least), u64(timeout)), ROWS, rank, peer, least, epoch, fail, record);
  return tell_block(code);
}
OP ep_net_wait_flushed(i64 comm, i64 context, i64 rank, i64 epoch, i64 fail, i64 record, i64 timeout) {
  int code = 0;
  if (warp() == 0) code = missed({wait_flushed(comm, context, u64(timeout)) ? -1 : 0, 0}, ROWS, rank, rank, 1, epoch, fail, record);
  return tell_block(code);
}

// The i-th rank of other teams; of those of my index if `rails`.
INLINE int networked_peer(i64 rank, i64 num_ranks, i64 team_size, i64 rails, int i) {
  int size = int(team_size), me = int(rank);
  return (rails ? me + size * (1 + i) : me / size * size + size + i) % int(num_ranks);
}
OP ep_net_barrier(i64 comm, i64 context, i64 signal, i64 count, i64 rank, i64 num_ranks, i64 team_size, i64 rails, i64 epoch, i64 fail, i64 record,
                  i64 timeout) {
  int code = 0, n = int(rails ? num_ranks / team_size - 1 : num_ranks - team_size);
  __syncthreads();
  if (warp() == 0) {
    net_release();
    for (int i = 0; i < n; ++i) net_signal(comm, networked_peer(rank, num_ranks, team_size, rails, i), context, signal + rank, 1);
    Missing m = wait_signals(comm, n, u64(timeout), [&](int i) {
      return Awaited{context, signal + networked_peer(rank, num_ranks, team_size, rails, i), u64(count + 1)};
    });
    code = missed(m, HEAD, rank, networked_peer(rank, num_ranks, team_size, rails, max(m.index, 0)), count + 1, epoch, fail, record);
  }
  return tell_block(code);
}
