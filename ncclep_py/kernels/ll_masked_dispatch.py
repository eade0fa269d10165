"""Low-latency dispatch, EXPERT_MAJOR, of groups with ``enable_mask``: like `ll_dispatch`, in attempts under a mask all members agree on.

Phases of an attempt: 1 join, 2 count, 3 wait (joins of all members, counts of lower ones), 4 rows (none for experts of masked ranks), 5 arrived and
commit, 6 outcome: the last block tells the others whether another attempt follows. Rules: M1 to M6 of ``ncclep_py.member_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code
from ncclep_py.kernels.ll_dispatch import PARAMETERS
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import COUNT, END, HEAD, MEET, ROWS, VOTE, WAIT_ARRIVED, WAIT_COUNTS, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ll_masked_dispatch"]


def make_ll_masked_dispatch(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The dispatch kernel for one shape, over one implementation of the vocabulary. `record` is followed by the async error."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, IDX_BYTES = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, shape.idx_bytes
    SENT_BYTES, SCALE_BYTES, PIECE_BYTES, SCALES = shape.sent_bytes, shape.wire.scale_bytes, shape.piece_bytes, shape.slot_scales
    QUANTISE, ROUND = shape.wire.quantise, int(shape.wire.round_scales)
    plan, mine = shape.window.members, shape.local.members
    assert plan is not None and mine is not None
    PLANE_ROWS, ARRIVED, COUNTS, JOINS, DETAILS, VOTES = (
        shape.window.plane_rows, shape.window.arrived, shape.window.counts, plan.joins, plan.details, plan.votes)
    EPOCH, BLOCKS_DONE, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.fail
    MASK, OUTCOME, MASKED_AT, WAITED, WROTE = mine.mask, mine.outcome, mine.masked_at, mine.waited, mine.wrote
    ATTEMPTS, AGAIN, EXCLUDED, NOTICE = 2 * shape.num_ranks + 2, int(Code.AGAIN), int(Code.EXCLUDED), 64
    block_idx, warp_idx, read_epoch, advance_epoch, read_mask = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.advance_epoch, ops.read_mask
    first_token, end_token, token_part = ops.first_token, ops.end_token, ops.token_part
    warp_token, token_step, begin_vector, end_vector = ops.warp_token, ops.token_step, ops.begin_vector, ops.end_vector
    publish_join, wait_joins, count_experts, publish_counts = ops.publish_join, ops.wait_joins, ops.count_experts, ops.publish_counts
    wait_member_counts, assign_rows, drop_rows, scatter_row, quantise_row = (
        ops.wait_member_counts, ops.assign_rows, ops.drop_rows, ops.scatter_row, ops.quantise_row)
    last_block, sum_member_counts, publish_arrived, settle = (
        ops.last_block, ops.sum_member_counts, ops.publish_arrived, ops.settle)
    trace_begin, stamp = ops.trace_begin, ops.stamp
    publish_late, store_header, conclude, tell_outcome, await_outcome = (
        ops.publish_late, ops.store_header, ops.conclude, ops.tell_outcome, ops.await_outcome)

    def ll_masked_dispatch(window, rank, local, record, tokens, topk_idx, num_tokens, expert_counters, scales, payload, place, table,  # noqa: ANN001, ANN202
                           header, origins, kept, flight, flying, handle, signature, status, timeout):
        trace = trace_begin()
        fail, waited, wrote = local + FAIL, local + WAITED, local + WROTE
        first, end, part = first_token(num_tokens), end_token(num_tokens), token_part(num_tokens)
        begin, stop = begin_vector(num_tokens, PIECE_BYTES), end_vector(num_tokens, PIECE_BYTES)
        for attempt in range(ATTEMPTS):
            epoch, mask = read_epoch(local + EPOCH), read_mask(local + MASK)
            # ---- 1 join ----------------------------------------------------------------------------------------------
            trace = stamp(trace, HEAD)
            if block_idx() == 0:
                if warp_idx() == 0:
                    if (mask >> rank) & 1 == 0:
                        publish_join(window, JOINS, DETAILS, rank, RANKS, epoch, signature, mask, epoch, status)
            # ---- 2 count ---------------------------------------------------------------------------------------------
            trace = stamp(trace, COUNT)
            count_experts(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, first, end)
            if (mask >> rank) & 1 == 0:
                publish_counts(window, COUNTS, rank, RANKS, EXPERTS, epoch)
            # ---- 3 wait ----------------------------------------------------------------------------------------------
            trace = stamp(trace, WAIT_HEADS)
            code = wait_joins(window, JOINS, DETAILS, VOTES, rank, RANKS, epoch, signature, mask, 0, waited, wrote, fail, record, timeout)
            trace = stamp(trace, WAIT_COUNTS)
            if code == 0:
                code = wait_member_counts(window, COUNTS, VOTES, rank, RANKS, EXPERTS, epoch, mask, fail, record, timeout)
            # ---- 4 rows ----------------------------------------------------------------------------------------------
            trace = stamp(trace, ROWS)
            if code == 0:
                assign_rows(topk_idx, IDX_BYTES, TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, part, table, rank, epoch, fail, record)
                if mask != 0:
                    drop_rows(TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, part, table, mask)
                token, step = warp_token(num_tokens), token_step(num_tokens)
                while token < end:   # no range: its length is a 64-bit division
                    if QUANTISE:
                        quantise_row(payload, place, place + SCALES, tokens, token, -1, first, 0, TOPK, EXPERTS, RANKS,
                                     PLANE_ROWS, ROW_BYTES, ROUND, begin, stop)
                    else:
                        scatter_row(payload, place, tokens, token, -1, first, 0, TOPK, EXPERTS, RANKS, PLANE_ROWS, SENT_BYTES, begin, stop)
                        if SCALE_BYTES > 0:
                            scatter_row(payload, place + SCALES, scales, token, -1, first, 0, TOPK, EXPERTS, RANKS, PLANE_ROWS, SCALE_BYTES,
                                        begin_vector(num_tokens, SCALE_BYTES), end_vector(num_tokens, SCALE_BYTES))
                    token += step
            # ---- 5 arrived and commit ----------------------------------------------------------------------------------
            trace = stamp(trace, MEET)
            if last_block(local + BLOCKS_DONE) == 1:
                trace = stamp(trace, WAIT_ARRIVED)
                if code == 0:
                    code = sum_member_counts(window, COUNTS, VOTES, rank, RANKS, EXPERTS, epoch, mask, PLANE_ROWS, expert_counters, fail, record,
                                             timeout)
                if code == 0:
                    if warp_idx() == 0:
                        publish_arrived(window, ARRIVED, rank, RANKS, epoch)
                    code = settle(window, ARRIVED, VOTES, rank, RANKS, epoch, mask, waited, fail, record, timeout)
                # ---- 6 outcome -----------------------------------------------------------------------------------------
                if warp_idx() == 0:
                    if code == 0:
                        store_header(header, epoch, handle)
                    if code == EXCLUDED:
                        publish_late(window, ARRIVED, rank, RANKS, epoch, wrote)
                    code = conclude(window, JOINS, ARRIVED, VOTES, rank, RANKS, local + MASK, local + MASKED_AT, epoch, mask, code,
                                    ATTEMPTS - 1 - attempt, record + NOTICE, fail, record)
                    advance_epoch(local + EPOCH, epoch)
                    tell_outcome(local + OUTCOME, epoch, code)
            trace = stamp(trace, VOTE)
            if await_outcome(local + OUTCOME, epoch, timeout) != AGAIN:
                break
        stamp(trace, END)

    return ll_masked_dispatch
