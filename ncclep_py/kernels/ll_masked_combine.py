"""Low-latency combine of groups with ``enable_mask``: like `ll_combine`, without the rows of masked ranks.

Phases: 1 join, 2 wait, which commits: nothing can fail afterwards, so that an attempt ends early for all blocks of all members or for none,
3 rows. Rules: M1 to M6 of ``ncclep_py.member_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.errors import Code
from ncclep_py.kernels.ll_combine import PARAMETERS
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, VOTE, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ll_masked_combine"]


def make_ll_masked_combine(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The combine kernel for one shape, over one implementation of the vocabulary. `record` is followed by the async error."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, TYPE = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, int(shape.token_type)
    plan, mine = shape.window.members, shape.local.members
    assert plan is not None and mine is not None
    PLANE_ROWS, ARRIVED, JOINS, DETAILS, VOTES = shape.window.plane_rows, shape.window.arrived, plan.joins, plan.details, plan.votes
    EPOCH, BLOCKS_DONE, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.fail
    MASK, OUTCOME, MASKED_AT, WAITED, WROTE = mine.mask, mine.outcome, mine.masked_at, mine.waited, mine.wrote
    ATTEMPTS, AGAIN, NOTICE = 2 * shape.num_ranks + 2, int(Code.AGAIN), 64
    block_idx, warp_idx, read_epoch, advance_epoch, read_mask = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.advance_epoch, ops.read_mask
    end_token, warp_token, token_step = ops.end_token, ops.warp_token, ops.token_step
    begin_vector, end_vector = ops.begin_vector, ops.end_vector
    RANK_MAJOR = shape.layout is Layout.RANK_MAJOR
    gather_member_row, sum_member_row = ops.gather_member_row, ops.sum_member_row
    publish_join, wait_joins, last_block = ops.publish_join, ops.wait_joins, ops.last_block
    read_header, check_header = ops.read_header, ops.check_header
    conclude, tell_outcome, await_outcome = ops.conclude, ops.tell_outcome, ops.await_outcome
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_masked_combine(window, rank, local, record, weights, out, num_tokens, payload, slot, table, header, handle,  # noqa: ANN001, ANN202
                          signature, status, timeout):
        trace = trace_begin()
        fail, waited, wrote = local + FAIL, local + WAITED, local + WROTE
        begin, stop = begin_vector(num_tokens, ROW_BYTES), end_vector(num_tokens, ROW_BYTES)
        for attempt in range(ATTEMPTS):
            epoch, mask = read_epoch(local + EPOCH), read_mask(local + MASK)
            # ---- 1 join ----------------------------------------------------------------------------------------------
            trace = stamp(trace, HEAD)
            if block_idx() == 0:
                if warp_idx() == 0:
                    if (mask >> rank) & 1 == 0:
                        publish_join(window, JOINS, DETAILS, rank, RANKS, epoch, signature, mask, epoch, status)
            # ---- 2 wait and commit -------------------------------------------------------------------------------------
            trace = stamp(trace, WAIT_HEADS)
            code = wait_joins(window, JOINS, DETAILS, VOTES, rank, RANKS, epoch, signature, mask, 1, waited, wrote, fail, record, timeout)
            ended = code
            if code == 0:
                code = check_header(read_header(header), handle, rank, epoch, fail, record)
            # ---- 3 rows ------------------------------------------------------------------------------------------------
            trace = stamp(trace, ROWS)
            if code == 0:
                token, end, step = warp_token(num_tokens), end_token(num_tokens), token_step(num_tokens)
                while token < end:   # no range: its length is a 64-bit division
                    if RANK_MAJOR:
                        sum_member_row(payload, slot, table, out, token, TOPK, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, begin, stop, mask)
                    else:
                        gather_member_row(payload, slot, table, weights, out, token, TOPK, EXPERTS, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, begin, stop,
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

    return ll_masked_combine
