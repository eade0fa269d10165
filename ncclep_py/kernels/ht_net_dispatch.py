"""High-throughput dispatch over several teams: rows of my team straight into their places, rows of other teams through rail peers.

Phases: 1 head, 2 wait (heads of all ranks), 3 send, chunk by chunk: read each row once, 4 receive, chunk by chunk as they come: fan out in my team,
5 arrived (of my team). Design and safety: ``ncclep_py.ht_net_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code, Status
from ncclep_py.kernels import ht_dispatch
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, WAIT_ARRIVED, WAIT_HEADS
from ncclep_py.kernels.stamps import ROWS as MOVE
from ncclep_py.memory_map import align

__all__ = ["PARAMETERS", "make_ht_net_dispatch"]

PARAMETERS = ("comm", *ht_dispatch.PARAMETERS)
"""Run-time values of a launch, all 64-bit integers: the device communicator, then as in ``ht_dispatch``."""


def make_ht_net_dispatch(shape: HTNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, BY_RANK, LOCAL_EXPERTS = (
        shape.num_ranks, shape.num_experts, shape.num_topk, shape.sent_bytes, shape.by_rank, shape.num_local)
    SCALE_BYTES, SCALES = shape.wire.scale_bytes, shape.window.recv_rows * shape.sent_bytes
    HEADS, ARRIVED, IDX, WEIGHTS = shape.window.heads, shape.window.arrived, shape.window.slot_idx, shape.window.slot_weights
    EPOCH, BLOCKS_DONE, FAIL, COUNT = shape.local.epoch, shape.local.blocks_done, shape.local.fail, shape.net.count
    REFUSED, MISMATCH, GAVE_UP = int(Code.REFUSED), int(Code.MISMATCH), int(Status.ABORT) << 24
    HEADER, ZONES, ROUTES, PLACES = shape.maps.header, shape.maps.zones, shape.maps.routes, shape.maps.places
    TEAM, TEAMS, TOKENS, CHUNK, CHUNKS = shape.net.team_size, shape.net.num_teams, shape.net.tokens, shape.net.chunk_tokens, shape.net.chunks
    CHANNELS, ADDS, CONTEXTS, SIGNALS = shape.net.channels, shape.net.adds, shape.net.num_contexts, shape.net.signals_per_team
    TAGS, TAG_BYTES, HEADERS_SENT, HEADERS = shape.net.tags, shape.net.tag_bytes, shape.net.headers_sent, shape.net.headers
    ROWS_SENT, ROWS, TEAM_ROWS, TEAM_HEADERS = shape.net.rows_sent, shape.net.rows, shape.net.team_rows, shape.net.tokens * shape.net.header_bytes
    HEADER_BYTES, STAGED_SCALES = align(20 * shape.num_topk, 16), shape.net.tokens * shape.sent_bytes
    REMOTE_ROUTES, REMOTE_PLACES = shape.net.remote(shape.maps), shape.net.remote(shape.maps) + shape.net.remote_table(shape.num_topk)
    block_idx, warp_idx, blocks, warps, sync = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps, ops.ht_net_sync
    trace_begin, stamp = ops.trace_begin, ops.stamp
    read_epoch, advance_epoch, read_count, advance_count = ops.read_epoch, ops.advance_epoch, ops.ht_net_count, ops.ht_net_advance
    publish_head, enter, wait_heads, wait_entered = ops.ht_net_publish_head, ops.ht_net_enter, ops.ht_net_wait_heads, ops.ht_net_wait_entered
    put, put_rows, put_tag, signal, wait_chunk = ops.ht_net_put, ops.ht_net_put_rows, ops.ht_net_put_tag, ops.ht_net_signal, ops.ht_net_wait_chunk
    publish_abort, publish_arrived, wait_arrived = ops.ht_net_publish_abort, ops.ht_net_publish_arrived, ops.ht_net_wait_arrived
    last_block, op_code, clear_fail, store_header, outcome = ops.last_block, ops.op_code, ops.clear_fail, ops.store_header, ops.outcome
    stage_row, stage_header, take_header = ops.ht_net_stage_row, ops.ht_net_stage_header, ops.ht_net_take_header
    forward_row, scatter_weights, forward_weights = ops.ht_net_forward_row, ops.ht_net_scatter_weights, ops.ht_net_forward_weights
    map_status, zero_pads, clear_ids, check_rows = ops.ht_map_status, ops.ht_zero_pads, ops.ht_clear_ids, ops.ht_check_rows

    def ht_net_dispatch(comm, window, rank, local, record, maps, tokens, weights, scales, num_tokens, rows, cleared, forward, global_ids,  # noqa: ANN001, ANN202
                        rows_window, rows_at, slot, header, handle, signature, status, timeout):
        trace = trace_begin()
        epoch, fail, count, code = read_epoch(local + EPOCH), local + FAIL, read_count(local + COUNT), 0
        team, index = rank // TEAM, rank % TEAM
        trace = stamp(trace, HEAD)
        # ---- 1 head: everything my stream did before is done, and everything my rail peers ever put is here --------------
        if block_idx() == 0:
            state = map_status(maps + HEADER, handle, status)
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, TEAM, epoch, signature, state)
            code = enter(comm, window, HEADS, rank, RANKS, TEAM, CHANNELS, CONTEXTS, ADDS, count, epoch, signature, state, fail, record, timeout)
        trace = stamp(trace, WAIT_HEADS)
        # ---- 2 wait: nobody's memory is touched before all ranks are here ------------------------------------------------
        if code == 0:
            code = wait_heads(window, HEADS, rank, RANKS, TEAM, epoch, signature, fail, record, timeout)
        if code == 0:
            code = wait_entered(comm, rank, RANKS, TEAM, CHANNELS, count, epoch, fail, record, timeout)
        trace = stamp(trace, MOVE)
        # ---- 3 send: my team's rows to their places, the others' to rail peers -------------------------------------------
        channel = block_idx()
        while channel < CHANNELS:
            chunk = channel
            while chunk < CHUNKS:
                first, end = chunk * CHUNK, min(chunk * CHUNK + CHUNK, TOKENS)
                sent, why = min(end, num_tokens), 0
                if code == 0:
                    token = first + warp_idx()
                    while token < end:
                        stage_header(window, HEADERS_SENT, maps + ROUTES, maps + PLACES, weights, token, num_tokens, TOPK, HEADER_BYTES, rank,
                                     forward)
                        token += warps()
                    token = first + warp_idx()
                    while token < sent:
                        stage_row(rows_window, rows_at, window, ROWS_SENT, tokens, maps + ROUTES, token, TOPK, ROW_BYTES, rank, TEAM)
                        if SCALE_BYTES > 0:
                            stage_row(rows_window, rows_at + SCALES, window, ROWS_SENT + STAGED_SCALES, scales, maps + ROUTES, token, TOPK,
                                      SCALE_BYTES, rank, TEAM)
                        if forward != 0:
                            scatter_weights(window, slot + IDX, slot + WEIGHTS, weights, maps + ROUTES, maps + PLACES, token, TOPK, EXPERTS, RANKS,
                                            BY_RANK, global_ids, rank, TEAM)
                        token += warps()
                else:
                    why = outcome(fail, epoch, GAVE_UP + rank)
                sync()
                turn = chunk // CHANNELS
                amount = 1 if chunk + CHANNELS < CHUNKS else ADDS - turn   # the last chunk's signal has the rest
                distance = 1 + warp_idx()
                while distance < TEAMS:
                    to = (team + TEAMS - distance) % TEAMS
                    peer, place, context = to * TEAM + index, TEAMS - distance - 1, channel % CONTEXTS
                    if code == 0:
                        put(comm, window, peer, context, HEADERS + place * TEAM_HEADERS + first * HEADER_BYTES, HEADERS_SENT + first * HEADER_BYTES,
                            (end - first) * HEADER_BYTES)
                        put_rows(comm, window, peer, context, ROWS + place * TEAM_ROWS, ROWS_SENT, maps + ROUTES, first, sent, TOPK, ROW_BYTES, to,
                                 TEAM)
                        if SCALE_BYTES > 0:
                            put_rows(comm, window, peer, context, ROWS + place * TEAM_ROWS + STAGED_SCALES, ROWS_SENT + STAGED_SCALES, maps + ROUTES,
                                     first, sent, TOPK, SCALE_BYTES, to, TEAM)
                    put_tag(comm, window, peer, context, TAGS + place * TAG_BYTES + chunk * 8, epoch, why)
                    signal(comm, peer, context, team * SIGNALS + 1 + channel, amount)
                    distance += warps()
                chunk += CHANNELS
            channel += blocks()
        if code == 0:
            if BY_RANK == 0:
                zero_pads(rows_window, rows_at, maps + ZONES, rank, LOCAL_EXPERTS, ROW_BYTES)
                if SCALE_BYTES > 0:
                    zero_pads(rows_window, rows_at + SCALES, maps + ZONES, rank, LOCAL_EXPERTS, SCALE_BYTES)
                if forward != 0:
                    zero_pads(window, slot + WEIGHTS, maps + ZONES, rank, LOCAL_EXPERTS, 4)
            elif forward != 0:
                clear_ids(window, slot + IDX, slot + WEIGHTS, maps + ZONES, rank, LOCAL_EXPERTS, TOPK, cleared)
        trace = stamp(trace, MOVE)
        # ---- 4 receive: each chunk when it is there ----------------------------------------------------------------------
        channel = block_idx()
        while channel < CHANNELS:
            chunk = channel
            while chunk < CHUNKS:
                first, end, turn = chunk * CHUNK, min(chunk * CHUNK + CHUNK, TOKENS), chunk // CHANNELS
                for distance in range(1, TEAMS):
                    if code == 0:
                        source = (team + TEAMS - distance) % TEAMS
                        code = wait_chunk(comm, window, TAGS + (distance - 1) * TAG_BYTES + chunk * 8, source * TEAM + index, channel % CONTEXTS,
                                          source * SIGNALS + 1 + channel, count * ADDS + turn + 1, rank, epoch, fail, record, timeout)
                    if code == 0:
                        headers_at, rows_in = HEADERS + (distance - 1) * TEAM_HEADERS, ROWS + (distance - 1) * TEAM_ROWS
                        routes = maps + REMOTE_ROUTES + (distance - 1) * TOKENS * TOPK * 8
                        places = maps + REMOTE_PLACES + (distance - 1) * TOKENS * TOPK * 8
                        token = first + warp_idx()
                        while token < end:
                            take_header(window, headers_at, routes, places, token, TOPK, EXPERTS, RANKS, HEADER_BYTES, rank, TEAM)
                            forward_row(rows_window, rows_at, window, rows_in, routes, token, TOPK, ROW_BYTES, rank)
                            if SCALE_BYTES > 0:
                                forward_row(rows_window, rows_at + SCALES, window, rows_in + STAGED_SCALES, routes, token, TOPK, SCALE_BYTES, rank)
                            if forward != 0:
                                forward_weights(window, slot + IDX, slot + WEIGHTS, headers_at, routes, places, token, TOPK, EXPERTS, RANKS, BY_RANK,
                                                global_ids, HEADER_BYTES, rank, TEAM)
                            token += warps()
                chunk += CHANNELS
            channel += blocks()
        # ---- 5 arrived: the last block speaks for the rank ---------------------------------------------------------------
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            code = op_code(fail, epoch)
            if code == 0:
                if warp_idx() == 0:
                    publish_arrived(window, ARRIVED, rank, TEAM, epoch)
                trace = stamp(trace, WAIT_ARRIVED)
                code = wait_arrived(window, ARRIVED, rank, TEAM, epoch, fail, record, timeout + timeout)   # they may wait for chunks
            if warp_idx() == 0:
                if code != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, TEAM, epoch, fail)
                    if code != REFUSED and code != MISMATCH:   # in these nobody wrote a row: what the slot held it still holds
                        store_header(header, epoch, 0)
                else:
                    check_rows(maps + ZONES, LOCAL_EXPERTS, rows, rank, epoch, fail, record)
                    store_header(header, epoch, handle)
                clear_fail(fail)
                advance_count(local + COUNT, count)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ht_net_dispatch
