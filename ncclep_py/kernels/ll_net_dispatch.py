"""Low-latency dispatch over several teams, EXPERT_MAJOR: rows straight to their places inside my team, as messages to all others.

Phases: 1 head, 2 counts, 3 send: messages, 4 rows inside my team, 5 tell: arrived, tags and signals, 6 take what networked ranks sent. Rows and
their order are those of one team. Design and safety: ``ncclep_py.ll_net_map``. The send half of a staged dispatch ends with phase 5.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import COUNT as COUNTING
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, WAIT_ARRIVED, WAIT_COUNTS, WAIT_HEADS
from ncclep_py.ll_net_map import FLIGHT_COUNT
from ncclep_py.memory_map import FLIGHT_FAIL

__all__ = ["PARAMETERS", "make_ll_net_dispatch"]

PARAMETERS = ("comm", "window", "rank", "local", "record", "tokens", "topk_idx", "num_tokens", "expert_counters", "scales", "payload", "slot",
              "table", "remote", "messages", "header", "origins", "kept", "flight", "flying", "handle", "signature", "status", "timeout")
"""Run-time values of a launch, all 64-bit integers; `comm`: address of the device communicator, `payload`, `slot`: window and offset of the
rows, the group's own or a user's, `messages`: window offset of the slot's messages;
`flight`, `flying`: only of a send half, see ``ll_net_staged``."""


def make_ll_net_dispatch(shape: LLNetShape, ops: Vocabulary, send_only: bool = False) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary; `send_only`: the send half of a staged dispatch."""
    SEND = send_only
    RANKS, EXPERTS, TOPK, ROW_BYTES, IDX_BYTES = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, shape.idx_bytes
    PLANE_ROWS, HEADS, ARRIVED, COUNTS = shape.window.plane_rows, shape.window.heads, shape.window.arrived, shape.window.counts
    EPOCH, BLOCKS_DONE, FAIL, COUNT, BLOCKS_TOLD = shape.local.epoch, shape.local.blocks_done, shape.local.fail, shape.net.count, shape.net.count + 8
    TEAM, MOST, CONTEXTS, TAGS = shape.net.team_size, shape.net.tokens, shape.net.num_contexts, shape.net.tags
    COUNTS_SENT, NET_COUNTS, SENT = shape.net.counts_sent, shape.net.net_counts, shape.net.sent
    SENT_BYTES, SCALE_BYTES, SCALES = shape.sent_bytes, shape.wire.scale_bytes, shape.slot_scales
    QUANTISE, ROUND = shape.wire.quantise, int(shape.wire.round_scales)
    HEADER_BYTES, MESSAGE_BYTES = shape.net.header_bytes, shape.net.message_bytes
    PUT_BYTES, WORDS = HEADER_BYTES + SENT_BYTES + SCALE_BYTES, 1
    SENT_ROWS, SENT_SCALES, COPIED_BYTES = SENT + HEADER_BYTES, SENT + HEADER_BYTES + SENT_BYTES, 0 if QUANTISE else SENT_BYTES
    REFUSED, MISMATCH = int(Code.REFUSED), int(Code.MISMATCH)
    block_idx, warp_idx, blocks, warps = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps
    read_epoch, advance_epoch, read_count, advance_count = ops.read_epoch, ops.advance_epoch, ops.ht_net_count, ops.ht_net_advance
    first_token, end_token, token_part = ops.first_token, ops.end_token, ops.token_part
    publish_head, enter, wait_heads, publish_abort = ops.ht_net_publish_head, ops.ll_net_enter, ops.ll_net_wait_heads, ops.ht_net_publish_abort
    count_experts, publish_counts, put_counts = ops.count_experts, ops.ll_net_publish_counts, ops.ll_net_put_counts
    signal, wait_counts, assign_rows, place_rows = ops.ll_net_signal, ops.ll_net_wait_counts, ops.assign_rows, ops.ll_net_place_rows
    send_row, scatter_row, take_row = ops.ll_net_send_row, ops.ll_net_scatter_row, ops.ll_net_take_row
    stage_row, quantise_row, spread_row = ops.ll_net_stage_row, ops.ll_net_quantise_row, ops.ll_net_spread_row
    put_tags, wait_data = ops.ll_net_put_tags, ops.ll_net_wait_data
    publish_arrived, wait_arrived = ops.ht_net_publish_arrived, ops.ht_net_wait_arrived
    last_block, op_code, outcome, clear_fail, store_header = ops.last_block, ops.op_code, ops.outcome, ops.clear_fail, ops.store_header
    trace_begin, stamp = ops.trace_begin, ops.stamp
    # with staging only
    STAGING, FLIGHTS, PLACES = shape.net.num_staging, shape.local.flight(shape.local.num_slots), shape.net.tokens * TOPK
    drain_staged, keep_rows, store_origins, put_flight = (
        ops.ll_net_drain_staged, ops.ll_net_keep_rows, ops.ll_net_store_origins, ops.ll_net_put_flight)

    def ll_net_dispatch(comm, window, rank, local, record, tokens, topk_idx, num_tokens, expert_counters, scales, payload, slot,  # noqa: ANN001, ANN202
                        table, remote, messages, header, origins, kept, flight, flying, handle, signature, status, timeout):
        trace = trace_begin()
        epoch, fail = read_epoch(local + EPOCH), flight + FLIGHT_FAIL if SEND else local + FAIL
        count, code, drained = read_count(local + COUNT), 0, 0
        first, end, part = first_token(num_tokens), end_token(num_tokens), token_part(num_tokens)
        trace = stamp(trace, HEAD)
        # ---- 1 head: what my stream did before is done, and what networked ranks ever put is here --------------------------
        if block_idx() == 0:
            if STAGING > 0:
                drained = drain_staged(comm, rank, RANKS, TEAM, CONTEXTS, local + FLIGHTS, STAGING, epoch, fail, record, timeout)
                if drained != 0:   # FAIL is decided, so all warps read the same
                    status = outcome(fail, epoch, status)
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, TEAM, epoch, signature, status)
            code = enter(comm, window, HEADS, rank, RANKS, TEAM, CONTEXTS, count, epoch, signature, status, fail, record, timeout)
            if STAGING > 0:
                if drained != 0:
                    code = drained
            if code != 0:
                if warp_idx() == 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, TEAM, epoch, fail)   # my other blocks wait for that
        trace = stamp(trace, COUNTING)
        count_experts(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, first, end)
        trace = stamp(trace, WAIT_HEADS)
        if code == 0:
            code = wait_heads(comm, window, HEADS, rank, RANKS, TEAM, count, epoch, signature, fail, record, timeout)
        # ---- 2 counts -----------------------------------------------------------------------------------------------------
        if code == 0:
            publish_counts(window, COUNTS, COUNTS_SENT, rank, RANKS, TEAM, EXPERTS, epoch)
        if block_idx() == 0:
            if warp_idx() == 0:
                if code == 0:
                    put_counts(comm, window, COUNTS_SENT, NET_COUNTS, rank, RANKS, TEAM, EXPERTS)
                signal(comm, rank, RANKS, TEAM, 0)
        # ---- 3 send: whole rows, a warp each; they wait for no counts. DS_FP8 rows are made in their messages, also those for my team -----
        if code == 0:
            assign_rows(topk_idx, IDX_BYTES, TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, part, table, rank, epoch, fail, record)
            if part == 0:   # blocks that share tokens leave it to the first
                at = first + warp_idx()
                while at < end:
                    if QUANTISE:
                        quantise_row(window, SENT_ROWS, SENT_SCALES, tokens, at, first, TOPK, EXPERTS, ROW_BYTES, ROUND, MESSAGE_BYTES, rank)
                    elif SCALE_BYTES > 0:
                        stage_row(window, SENT_SCALES, scales, at, first, TOPK, EXPERTS, RANKS, PLANE_ROWS, SCALE_BYTES, MESSAGE_BYTES, rank, TEAM)
                    send_row(comm, window, SENT, messages + rank * MOST * MESSAGE_BYTES, tokens, at, first, end, TOPK, EXPERTS, RANKS, PLANE_ROWS,
                             COPIED_BYTES, WORDS, HEADER_BYTES, PUT_BYTES, MESSAGE_BYTES, rank, TEAM, CONTEXTS, epoch)
                    at += warps()
            trace = stamp(trace, WAIT_COUNTS)
            code = wait_counts(comm, window, COUNTS, NET_COUNTS, rank, RANKS, TEAM, EXPERTS, count, epoch, PLANE_ROWS, expert_counters, fail, record,
                               timeout)
        # ---- 4 rows inside my team ------------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            if STAGING > 0:
                keep_rows(kept, EXPERTS, RANKS)
            place_rows(TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, part, table, rank, TEAM, epoch, fail, record)
            if part == 0:
                at = first + warp_idx()
                while at < end:
                    if QUANTISE:
                        spread_row(payload, slot, SENT_ROWS, at, first, TOPK, EXPERTS, RANKS, PLANE_ROWS, SENT_BYTES, MESSAGE_BYTES, rank, TEAM)
                        spread_row(payload, slot + SCALES, SENT_SCALES, at, first, TOPK, EXPERTS, RANKS, PLANE_ROWS, SCALE_BYTES, MESSAGE_BYTES, rank,
                                   TEAM)
                    else:
                        scatter_row(payload, slot, tokens, at, first, TOPK, EXPERTS, RANKS, PLANE_ROWS, SENT_BYTES, rank, TEAM)
                        if SCALE_BYTES > 0:
                            scatter_row(payload, slot + SCALES, scales, at, first, TOPK, EXPERTS, RANKS, PLANE_ROWS, SCALE_BYTES, rank, TEAM)
                    if STAGING > 0:
                        store_origins(window, origins, at, first, TOPK, EXPERTS, RANKS, PLANE_ROWS, rank, TEAM, PLACES)
                    at += warps()
        # ---- 5 tell: the last block speaks for the rank ---------------------------------------------------------------------
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_TOLD) == 1:
            if warp_idx() == 0:
                why = outcome(fail, epoch, status if SEND else 0)
                if why != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, TEAM, epoch, fail)
                if SEND:
                    publish_head(window, flying, rank, RANKS, TEAM, epoch, signature, why)
                    put_flight(comm, window, flying, rank, RANKS, TEAM, 0, count + 1, epoch, signature, why)
                else:
                    if why == 0:
                        publish_arrived(window, ARRIVED, rank, TEAM, epoch)
                    put_tags(comm, window, TAGS, rank, RANKS, TEAM, count, epoch, why)
                context = 0
                while context < CONTEXTS:
                    signal(comm, rank, RANKS, TEAM, context)
                    context += 1
        # ---- 6 take what networked ranks sent, all blocks together ----------------------------------------------------------
        if code == 0 and not SEND:
            code = wait_data(comm, window, TAGS, rank, RANKS, TEAM, CONTEXTS, count, epoch, fail, record, timeout)
        if code == 0 and not SEND:
            at = block_idx() * warps() + warp_idx()
            while at < RANKS * MOST:
                if at // MOST // TEAM != rank // TEAM:
                    take_row(payload, slot, slot + SCALES, window, messages, remote, at // MOST, at % MOST, MOST, TOPK, EXPERTS, RANKS, PLANE_ROWS,
                             SENT_BYTES, SCALE_BYTES, HEADER_BYTES, MESSAGE_BYTES, rank, epoch, fail, record)
                at += blocks() * warps()
        if last_block(local + BLOCKS_DONE) == 1:
            code = op_code(fail, epoch)
            trace = stamp(trace, WAIT_ARRIVED)
            if code == 0 and not SEND:
                code = wait_arrived(window, ARRIVED, rank, TEAM, epoch, fail, record, timeout)
            if warp_idx() == 0:
                if code == 0:
                    store_header(header, epoch, handle)
                elif code != REFUSED and code != MISMATCH:   # in these nobody wrote a row: what the slot held it still holds
                    store_header(header, epoch, 0)
                if SEND:
                    store_header(flight, epoch, handle)
                    advance_count(flight + FLIGHT_COUNT, count)
                else:
                    clear_fail(fail)
                advance_count(local + COUNT, count)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ll_net_dispatch
