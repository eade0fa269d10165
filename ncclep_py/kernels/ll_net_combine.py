"""Low-latency combine over several teams: rows of networked ranks' tokens are put back to them, those of my team are pulled.

Phases: 1 head, 2 wait, 3 send rows back, 4 tell, 5 rows, added up as in ``ll_combine``: the bits of one team. Design and safety:
``ncclep_py.ll_net_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ll_net_combine"]

PARAMETERS = ("comm", "window", "rank", "local", "record", "weights", "out", "num_tokens", "rows_valid", "payload", "slot", "table", "remote",
              "header", "handle", "signature", "status", "timeout")
"""Run-time values of a launch, all 64-bit integers; `comm`: address of the device communicator, `rows_valid`: 0 in an operation that only meets;
`payload`, `slot`: window and offset of the rows, the group's own or a user's."""


def make_ll_net_combine(shape: LLNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, TYPE = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, int(shape.token_type)
    PLANE_ROWS, HEADS, ARRIVED = shape.window.plane_rows, shape.window.heads, shape.window.arrived
    EPOCH, BLOCKS_DONE, FAIL, COUNT, BLOCKS_TOLD = shape.local.epoch, shape.local.blocks_done, shape.local.fail, shape.net.count, shape.net.count + 8
    TEAM, MOST, CONTEXTS, TAGS, RETURNED = shape.net.team_size, shape.net.tokens, shape.net.num_contexts, shape.net.tags, shape.net.returned
    block_idx, warp_idx, blocks, warps = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps
    read_epoch, advance_epoch, read_count, advance_count = ops.read_epoch, ops.advance_epoch, ops.ht_net_count, ops.ht_net_advance
    publish_head, enter, wait_heads, publish_abort = ops.ht_net_publish_head, ops.ll_net_enter, ops.ll_net_wait_heads, ops.ht_net_publish_abort
    read_header, header_status, check_header = ops.read_header, ops.header_status, ops.check_header
    return_rows, gather_row, sum_row = ops.ll_net_return_rows, ops.ll_net_gather_row, ops.ll_net_sum_row
    RANK_MAJOR = shape.layout is Layout.RANK_MAJOR
    signal, put_tags, wait_data = ops.ll_net_signal, ops.ll_net_put_tags, ops.ll_net_wait_data
    last_block, op_code, outcome, clear_fail = ops.last_block, ops.op_code, ops.outcome, ops.clear_fail
    trace_begin, stamp = ops.trace_begin, ops.stamp
    STAGING, FLIGHTS, drain_staged = shape.net.num_staging, shape.local.flight(shape.local.num_slots), ops.ll_net_drain_staged

    def ll_net_combine(comm, window, rank, local, record, weights, out, num_tokens, rows_valid, payload, slot, table, remote, header,  # noqa: ANN001, ANN202
                       handle, signature, status, timeout):
        trace = trace_begin()
        epoch, fail, count, code = read_epoch(local + EPOCH), local + FAIL, read_count(local + COUNT), 0
        held, drained = read_header(header), 0
        state = header_status(held, handle, status)
        if status == 0:
            check_header(held, handle, rank, epoch, fail, record)   # all refuse it by my HEAD; my record says more
        trace = stamp(trace, HEAD)
        # ---- 1 head: my experts' rows are written, and what networked ranks ever put is here ------------------------------
        if block_idx() == 0:
            if STAGING > 0:
                drained = drain_staged(comm, rank, RANKS, TEAM, CONTEXTS, local + FLIGHTS, STAGING, epoch, fail, record, timeout)
                if drained != 0:   # FAIL is decided, so all warps read the same
                    state = outcome(fail, epoch, state)
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, TEAM, epoch, signature, state)
            code = enter(comm, window, HEADS, rank, RANKS, TEAM, CONTEXTS, count, epoch, signature, state, fail, record, timeout)
            if STAGING > 0:
                if drained != 0:
                    code = drained
            if code != 0:
                if warp_idx() == 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, TEAM, epoch, fail)   # my other blocks wait for that
        # ---- 2 wait -------------------------------------------------------------------------------------------------------
        trace = stamp(trace, WAIT_HEADS)
        if code == 0:
            code = wait_heads(comm, window, HEADS, rank, RANKS, TEAM, count, epoch, signature, fail, record, timeout)
        # ---- 3 send rows back ---------------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            if rows_valid != 0:
                at = block_idx() * warps() + warp_idx()
                while at < RANKS * MOST:
                    if at // MOST // TEAM != rank // TEAM:
                        return_rows(comm, payload, slot, window, RETURNED, remote, at // MOST, at % MOST, MOST, TOPK, ROW_BYTES, ROW_BYTES, CONTEXTS)
                    at += blocks() * warps()
        # ---- 4 tell: the last block speaks for the rank ---------------------------------------------------------------------
        if last_block(local + BLOCKS_TOLD) == 1:
            if warp_idx() == 0:
                why = outcome(fail, epoch, 0)
                if why != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, TEAM, epoch, fail)
                put_tags(comm, window, TAGS, rank, RANKS, TEAM, count, epoch, why)
                signal(comm, rank, RANKS, TEAM, 0)   # context 0 has two in every operation
                context = 0
                while context < CONTEXTS:
                    signal(comm, rank, RANKS, TEAM, context)
                    context += 1
        # ---- 5 rows -------------------------------------------------------------------------------------------------------
        if code == 0:
            code = wait_data(comm, window, TAGS, rank, RANKS, TEAM, CONTEXTS, count, epoch, fail, record, timeout)
        if code == 0:
            at = block_idx() * warps() + warp_idx()
            while at < num_tokens:
                if RANK_MAJOR:
                    sum_row(payload, slot, window, RETURNED, table, out, at, TOPK, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, rank, TEAM)
                else:
                    gather_row(payload, slot, window, RETURNED, table, weights, out, at, TOPK, EXPERTS, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, rank,
                               TEAM)
                at += blocks() * warps()
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            code = op_code(fail, epoch)
            if warp_idx() == 0:
                clear_fail(fail)
                advance_count(local + COUNT, count)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ll_net_combine
