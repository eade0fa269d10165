"""Low-latency combine over several teams whose rows travel as NVFP4: ``ll_net_combine`` of packed rows, which are made as in ``ll_nvfp4_combine``.

Phases: 1 pack, 2 head (by the last block: all rows of this rank are packed), 3 wait, 4 send packed rows back, 5 tell, 6 rows. Design and safety:
``ncclep_py.ll_net_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, PACK, ROWS, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ll_net_nvfp4_combine"]

PARAMETERS = ("comm", "window", "rank", "local", "record", "row_scales", "counters", "weights", "out", "num_tokens", "payload", "slot", "table",
              "remote", "header", "handle", "signature", "status", "timeout")
"""Run-time values of a launch, all 64-bit integers; `comm`: address of the device communicator, `payload`, `slot`: window and offset of the rows."""


def make_ll_net_nvfp4_combine(shape: LLNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, TOPK, ROW_BYTES, PLANE_ROWS = shape.num_ranks, shape.num_topk, shape.row_bytes, shape.window.plane_rows
    rank_major = shape.layout is Layout.RANK_MAJOR
    PLANES_OF_ALL = RANKS if rank_major else shape.num_experts
    PLANES, CAPACITY = (RANKS, PLANE_ROWS // RANKS) if rank_major else (shape.num_experts // RANKS, PLANE_ROWS)
    PACKED_BYTES = ROW_BYTES // 1024 * 288 + 16   # the row's own scale stands in the first 4 of the 16
    HEADS, ARRIVED = shape.window.heads, shape.window.arrived
    EPOCH, BLOCKS_DONE, BLOCKS_PACKED, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.blocks_packed, shape.local.fail
    COUNT, BLOCKS_TOLD = shape.net.count, shape.net.count + 8
    TEAM, MOST, CONTEXTS, TAGS, RETURNED = shape.net.team_size, shape.net.tokens, shape.net.num_contexts, shape.net.tags, shape.net.returned
    block_idx, warp_idx, blocks, warps = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps
    read_epoch, advance_epoch, read_count, advance_count = ops.read_epoch, ops.advance_epoch, ops.ht_net_count, ops.ht_net_advance
    publish_head, enter, wait_heads, publish_abort = ops.ht_net_publish_head, ops.ll_net_enter, ops.ll_net_wait_heads, ops.ht_net_publish_abort
    read_header, header_status, check_header = ops.read_header, ops.header_status, ops.check_header
    pack_rows, return_rows, sum_packed_row = ops.pack_rows, ops.ll_net_return_rows, ops.ll_net_sum_packed_row
    signal, put_tags, wait_data = ops.ll_net_signal, ops.ll_net_put_tags, ops.ll_net_wait_data
    last_block, op_code, outcome, clear_fail = ops.last_block, ops.op_code, ops.outcome, ops.clear_fail
    trace_begin, stamp = ops.trace_begin, ops.stamp
    STAGING, FLIGHTS, drain_staged = shape.net.num_staging, shape.local.flight(shape.local.num_slots), ops.ll_net_drain_staged

    def ll_net_nvfp4_combine(comm, window, rank, local, record, row_scales, counters, weights, out, num_tokens, payload, slot, table,  # noqa: ANN001, ANN202
                             remote, header, handle, signature, status, timeout):
        trace = trace_begin()
        epoch, fail, count, code = read_epoch(local + EPOCH), local + FAIL, read_count(local + COUNT), 0
        held, drained = read_header(header), 0
        # ---- 1 pack: my experts' rows -------------------------------------------------------------------------------------
        trace = stamp(trace, PACK)
        if status == 0:
            if check_header(held, handle, rank, epoch, fail, record) == 0:   # else all refuse it by my HEAD; my record says more
                pack_rows(payload, slot, rank, counters, row_scales, PLANES, CAPACITY, ROW_BYTES)
        # ---- 2 head: all blocks have packed, and what networked ranks ever put is here ------------------------------------
        trace = stamp(trace, HEAD)
        if last_block(local + BLOCKS_PACKED) == 1:
            state = header_status(held, handle, status)
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
        # ---- 3 wait -------------------------------------------------------------------------------------------------------
        trace = stamp(trace, WAIT_HEADS)
        if code == 0:
            code = wait_heads(comm, window, HEADS, rank, RANKS, TEAM, count, epoch, signature, fail, record, timeout)
        # ---- 4 send packed rows back --------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            at = block_idx() * warps() + warp_idx()
            while at < RANKS * MOST:
                if at // MOST // TEAM != rank // TEAM:
                    return_rows(comm, payload, slot, window, RETURNED, remote, at // MOST, at % MOST, MOST, TOPK, ROW_BYTES, PACKED_BYTES, CONTEXTS)
                at += blocks() * warps()
        # ---- 5 tell: the last block speaks for the rank ---------------------------------------------------------------------
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
        # ---- 6 rows -------------------------------------------------------------------------------------------------------
        if code == 0:
            code = wait_data(comm, window, TAGS, rank, RANKS, TEAM, CONTEXTS, count, epoch, fail, record, timeout)
        if code == 0:
            at = block_idx() * warps() + warp_idx()
            while at < num_tokens:
                sum_packed_row(payload, slot, window, RETURNED, table, weights, out, at, TOPK, PLANES_OF_ALL, RANKS, PLANE_ROWS, ROW_BYTES, rank,
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

    return ll_net_nvfp4_combine
