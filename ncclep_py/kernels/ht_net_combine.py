"""High-throughput combine over several teams: rail peers send the sum of their team's rows of a token, one row per (token, team).

Phases: 1 head, 2 wait, 3 send, chunk by chunk: sums over my team for my rail peers' tokens, 4 rows of my own tokens, chunk by chunk as the
other teams' sums come. Design and safety: ``ncclep_py.ht_net_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Status
from ncclep_py.kernels import ht_combine
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, WAIT_HEADS
from ncclep_py.kernels.stamps import ROWS as MOVE

__all__ = ["PARAMETERS", "make_ht_net_combine"]

PARAMETERS = ("comm", "backward", *ht_combine.PARAMETERS)
"""Run-time values of a launch, all 64-bit integers: the device communicator, 1 in a backward pass (also for a rank without tokens, whose `grads`
have no address), then as in ``ht_combine``."""


def make_ht_net_combine(shape: HTNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, TYPE, BY_RANK = (
        shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, int(shape.token_type), shape.by_rank)
    LOCAL_EXPERTS = shape.num_local
    HEADS, ARRIVED, WEIGHTS = shape.window.heads, shape.window.arrived, shape.window.slot_weights
    EPOCH, BLOCKS_DONE, FAIL, COUNT = shape.local.epoch, shape.local.blocks_done, shape.local.fail, shape.net.count
    HEADER, ZONES, ROUTES, PLACES, GAVE_UP = shape.maps.header, shape.maps.zones, shape.maps.routes, shape.maps.places, int(Status.ABORT) << 24
    TEAM, TEAMS, TOKENS, CHUNK, CHUNKS = shape.net.team_size, shape.net.num_teams, shape.net.tokens, shape.net.chunk_tokens, shape.net.chunks
    CHANNELS, ADDS, CONTEXTS, SIGNALS = shape.net.channels, shape.net.adds, shape.net.num_contexts, shape.net.signals_per_team
    TAGS, TAG_BYTES, GRADS_SENT, GRADS = shape.net.tags, shape.net.tag_bytes, shape.net.headers_sent, shape.net.headers
    ROWS_SENT, ROWS, TEAM_ROWS, TEAM_GRADS = shape.net.rows_sent, shape.net.rows, shape.net.team_rows, shape.net.tokens * shape.net.header_bytes
    GRAD_BYTES = 4 * shape.num_topk
    REMOTE_ROUTES, REMOTE_PLACES = shape.net.remote(shape.maps), shape.net.remote(shape.maps) + shape.net.remote_table(shape.num_topk)
    block_idx, warp_idx, blocks, warps, sync = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps, ops.ht_net_sync
    trace_begin, stamp = ops.trace_begin, ops.stamp
    read_epoch, advance_epoch, read_count, advance_count = ops.read_epoch, ops.advance_epoch, ops.ht_net_count, ops.ht_net_advance
    publish_head, enter, wait_heads, wait_entered = ops.ht_net_publish_head, ops.ht_net_enter, ops.ht_net_wait_heads, ops.ht_net_wait_entered
    put, put_rows, put_tag, signal, wait_chunk = ops.ht_net_put, ops.ht_net_put_rows, ops.ht_net_put_tag, ops.ht_net_signal, ops.ht_net_wait_chunk
    read_header, header_status, check_header = ops.read_header, ops.header_status, ops.check_header
    outcome, publish_abort = ops.outcome, ops.ht_net_publish_abort
    last_block, op_code, clear_fail = ops.last_block, ops.op_code, ops.clear_fail
    partial_row, partial_grads = ops.ht_net_partial_row, ops.ht_net_partial_grads
    reduce_row, reduce_grads = ops.ht_net_reduce_row, ops.ht_net_reduce_grads
    map_status, check_rows = ops.ht_map_status, ops.ht_check_rows

    def ht_net_combine(comm, backward, window, rank, local, record, maps, out, grads, num_tokens, rows, rows_window, rows_at, slot, header,  # noqa: ANN001, ANN202
                       handle, signature, status, timeout):
        trace = trace_begin()
        epoch, fail, count, code = read_epoch(local + EPOCH), local + FAIL, read_count(local + COUNT), 0
        team, index, held = rank // TEAM, rank % TEAM, read_header(header)
        state = map_status(maps + HEADER, handle, status)
        if state == 0:
            check_header(held, handle, rank, epoch, fail, record)   # all refuse it by my HEAD; my record says more
            state = header_status(held, handle, state)
        trace = stamp(trace, HEAD)
        # ---- 1 head: my experts' rows are written, and everything my rail peers ever put is here --------------------------
        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, TEAM, epoch, signature, state)
            code = enter(comm, window, HEADS, rank, RANKS, TEAM, CHANNELS, CONTEXTS, ADDS, count, epoch, signature, state, fail, record, timeout)
        trace = stamp(trace, WAIT_HEADS)
        # ---- 2 wait ------------------------------------------------------------------------------------------------------
        if code == 0:
            code = wait_heads(window, HEADS, rank, RANKS, TEAM, epoch, signature, fail, record, timeout)
        if code == 0:
            code = wait_entered(comm, rank, RANKS, TEAM, CHANNELS, count, epoch, fail, record, timeout)
        trace = stamp(trace, MOVE)
        # ---- 3 send: my team's sums for rail peers -----------------------------------------------------------------------
        channel = block_idx()
        while channel < CHANNELS:
            chunk = channel
            while chunk < CHUNKS:
                first, end, why = chunk * CHUNK, min(chunk * CHUNK + CHUNK, TOKENS), 0
                if code != 0:
                    why = outcome(fail, epoch, GAVE_UP + rank)
                elif rows >= 0:
                    for distance in range(1, TEAMS):
                        token = first + warp_idx()
                        while token < end:
                            partial_row(rows_window, rows_at, window, ROWS_SENT + (distance - 1) * TEAM_ROWS,
                                        maps + REMOTE_ROUTES + (distance - 1) * TOKENS * TOPK * 8, token, TOPK, ROW_BYTES, TYPE, rank)
                            if backward != 0:
                                partial_grads(window, slot + WEIGHTS, GRADS_SENT + (distance - 1) * TOKENS * GRAD_BYTES,
                                              maps + REMOTE_PLACES + (distance - 1) * TOKENS * TOPK * 8, token, TOPK, EXPERTS, RANKS, BY_RANK, rank)
                            token += warps()
                sync()
                turn = chunk // CHANNELS
                amount = 1 if chunk + CHANNELS < CHUNKS else ADDS - turn   # the last chunk's signal has the rest
                distance = 1 + warp_idx()
                while distance < TEAMS:
                    peer, place, context = (team + TEAMS - distance) % TEAMS * TEAM + index, TEAMS - distance - 1, channel % CONTEXTS
                    if code == 0:
                        if rows >= 0:
                            put_rows(comm, window, peer, context, ROWS + place * TEAM_ROWS, ROWS_SENT + (distance - 1) * TEAM_ROWS,
                                     maps + REMOTE_ROUTES + (distance - 1) * TOKENS * TOPK * 8, first, end, TOPK, ROW_BYTES, team, TEAM)
                            if backward != 0:
                                put(comm, window, peer, context, GRADS + place * TEAM_GRADS + first * GRAD_BYTES,
                                    GRADS_SENT + (distance - 1) * TOKENS * GRAD_BYTES + first * GRAD_BYTES, (end - first) * GRAD_BYTES)
                    put_tag(comm, window, peer, context, TAGS + place * TAG_BYTES + chunk * 8, epoch, why)
                    signal(comm, peer, context, team * SIGNALS + 1 + channel, amount)
                    distance += warps()
                chunk += CHANNELS
            channel += blocks()
        trace = stamp(trace, MOVE)
        # ---- 4 rows of my tokens: each chunk when all teams' sums are there ----------------------------------------------
        channel = block_idx()
        while channel < CHANNELS:
            chunk = channel
            while chunk < CHUNKS:
                first, end, turn = chunk * CHUNK, min(chunk * CHUNK + CHUNK, num_tokens), chunk // CHANNELS
                for distance in range(1, TEAMS):
                    if code == 0:
                        source = (team + TEAMS - distance) % TEAMS
                        code = wait_chunk(comm, window, TAGS + (distance - 1) * TAG_BYTES + chunk * 8, source * TEAM + index, channel % CONTEXTS,
                                          source * SIGNALS + 1 + channel, count * ADDS + turn + 1, rank, epoch, fail, record, timeout)
                if code == 0:
                    if rows >= 0:
                        token = first + warp_idx()
                        while token < end:
                            reduce_row(rows_window, rows_at, window, ROWS, maps + ROUTES, out, token, TOPK, ROW_BYTES, TYPE, rank, RANKS, TEAM,
                                       TEAM_ROWS)
                            if backward != 0:
                                reduce_grads(window, slot + WEIGHTS, GRADS, maps + PLACES, grads, token, TOPK, EXPERTS, RANKS, BY_RANK, rank, TEAM,
                                             TEAM_GRADS)
                            token += warps()
                chunk += CHANNELS
            channel += blocks()
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            code = op_code(fail, epoch)
            if warp_idx() == 0:
                if code != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, TEAM, epoch, fail)
                elif rows >= 0:
                    check_rows(maps + ZONES, LOCAL_EXPERTS, rows, rank, epoch, fail, record)
                clear_fail(fail)
                advance_count(local + COUNT, count)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ht_net_combine
