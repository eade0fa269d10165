"""Low-latency combine whose rows travel as NVFP4, of groups with ``enable_mask``: like `ll_nvfp4_combine`, without the rows of masked ranks.

Phases: 1 pack, once; then attempts of 2 join (by the last block: all rows of this rank are packed), 3 wait, which commits, 4 rows. Rules: M1 to M6
of ``ncclep_py.member_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.errors import Code
from ncclep_py.kernels.ll_nvfp4_combine import PARAMETERS
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import END, HEAD, MEET, PACK, ROWS, VOTE, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ll_masked_nvfp4_combine"]


def make_ll_masked_nvfp4_combine(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The combine kernel for one shape, over one implementation of the vocabulary. `record` is followed by the async error."""
    RANKS, TOPK, ROW_BYTES, PLANE_ROWS = shape.num_ranks, shape.num_topk, shape.row_bytes, shape.window.plane_rows
    rank_major = shape.layout is Layout.RANK_MAJOR
    PLANES_OF_ALL = RANKS if rank_major else shape.num_experts
    PLANES, CAPACITY = (RANKS, PLANE_ROWS // RANKS) if rank_major else (shape.num_experts // RANKS, PLANE_ROWS)
    plan, mine = shape.window.members, shape.local.members
    assert plan is not None and mine is not None
    ARRIVED, JOINS, DETAILS, VOTES, PIECE_BYTES = shape.window.arrived, plan.joins, plan.details, plan.votes, ROW_BYTES // 64
    EPOCH, BLOCKS_DONE, BLOCKS_PACKED, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.blocks_packed, shape.local.fail
    MASK, OUTCOME, MASKED_AT, WAITED, WROTE = mine.mask, mine.outcome, mine.masked_at, mine.waited, mine.wrote
    ATTEMPTS, AGAIN, NOTICE = 2 * shape.num_ranks + 2, int(Code.AGAIN), 64
    warp_idx, read_epoch, advance_epoch, read_mask = ops.warp_idx, ops.read_epoch, ops.advance_epoch, ops.read_mask
    end_token, warp_token, token_step = ops.end_token, ops.warp_token, ops.token_step
    begin_vector, end_vector, pack_rows, sum_packed_member_row = ops.begin_vector, ops.end_vector, ops.pack_rows, ops.sum_packed_member_row
    publish_join, wait_joins, last_block = ops.publish_join, ops.wait_joins, ops.last_block
    read_header, check_header = ops.read_header, ops.check_header
    conclude, tell_outcome, await_outcome = ops.conclude, ops.tell_outcome, ops.await_outcome
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_masked_nvfp4_combine(window, rank, local, record, row_scales, counters, weights, out, num_tokens, payload, slot, table,  # noqa: ANN001, ANN202
                                header, handle, signature, status, timeout):
        trace = trace_begin()
        fail, waited, wrote = local + FAIL, local + WAITED, local + WROTE
        # ---- 1 pack: my experts' rows ----------------------------------------------------------------------------------
        trace = stamp(trace, PACK)
        held = read_header(header)
        if status == 0:
            if held == handle:   # what is wrong with another one is told after the join: a masked rank should hear that it is one
                pack_rows(payload, slot, rank, counters, row_scales, PLANES, CAPACITY, ROW_BYTES)
        begin, stop = begin_vector(num_tokens, PIECE_BYTES), end_vector(num_tokens, PIECE_BYTES)
        for attempt in range(ATTEMPTS):
            epoch, mask = read_epoch(local + EPOCH), read_mask(local + MASK)
            # ---- 2 join: all blocks have packed ------------------------------------------------------------------------
            trace = stamp(trace, HEAD)
            if last_block(local + BLOCKS_PACKED) == 1:
                if warp_idx() == 0:
                    if (mask >> rank) & 1 == 0:
                        publish_join(window, JOINS, DETAILS, rank, RANKS, epoch, signature, mask, epoch, status)
            # ---- 3 wait and commit -------------------------------------------------------------------------------------
            trace = stamp(trace, WAIT_HEADS)
            code = wait_joins(window, JOINS, DETAILS, VOTES, rank, RANKS, epoch, signature, mask, 1, waited, wrote, fail, record, timeout)
            ended = code
            if code == 0:
                code = check_header(held, handle, rank, epoch, fail, record)
            # ---- 4 rows ------------------------------------------------------------------------------------------------
            trace = stamp(trace, ROWS)
            if code == 0:
                token, end, step = warp_token(num_tokens), end_token(num_tokens), token_step(num_tokens)
                while token < end:   # no range: its length is a 64-bit division
                    sum_packed_member_row(payload, slot, table, weights, out, token, TOPK, PLANES_OF_ALL, RANKS, PLANE_ROWS, ROW_BYTES, begin, stop,
                                          mask)
                    token += step
            trace = stamp(trace, MEET)
            if last_block(local + BLOCKS_DONE) == 1:
                if warp_idx() == 0:
                    code = conclude(window, JOINS, ARRIVED, VOTES, rank, RANKS, local + MASK, local + MASKED_AT, epoch, mask, code,
                                    ATTEMPTS - 1 - attempt, record + NOTICE, fail, record)
                    advance_epoch(local + EPOCH, epoch)
                    tell_outcome(local + OUTCOME, epoch, code)
            if ended != AGAIN:
                break
            trace = stamp(trace, VOTE)
            if await_outcome(local + OUTCOME, epoch, timeout) != AGAIN:
                break
        stamp(trace, END)

    return ll_masked_nvfp4_combine
