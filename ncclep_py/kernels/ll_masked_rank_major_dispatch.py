"""Low-latency dispatch, RANK_MAJOR, of groups with ``enable_mask``: like `ll_rank_major_dispatch`, in attempts under a mask all members agree on.

Phases of an attempt: 1 join, 2 rows assigned and their number told, 3 wait (joins of all members), 4 rows (none for masked ranks), 5 arrived and
commit, 6 outcome. How many rows there are cannot travel with ARRIVED as without masks: who learns from another rank's vote that the attempt is
complete may not have seen ARRIVED itself. So it travels before, and ARRIVED, hence every COMMIT, comes after it. Rules: M1 to M6 of
``ncclep_py.member_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code
from ncclep_py.kernels.ll_rank_major_dispatch import PARAMETERS
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import COUNT, END, HEAD, MEET, ROWS, VOTE, WAIT_ARRIVED, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ll_masked_rank_major_dispatch"]


def make_ll_masked_rank_major_dispatch(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The dispatch kernel for one shape, over one implementation of the vocabulary. `record` is followed by the async error."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, IDX_BYTES = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, shape.idx_bytes
    SENT_BYTES, SCALE_BYTES, PIECE_BYTES, SCALES = shape.sent_bytes, shape.wire.scale_bytes, shape.piece_bytes, shape.slot_scales
    QUANTISE, ROUND = shape.wire.quantise, int(shape.wire.round_scales)
    plan, mine = shape.window.members, shape.local.members
    assert plan is not None and mine is not None
    PLANE_ROWS, ARRIVED, JOINS, DETAILS, VOTES = shape.window.plane_rows, shape.window.arrived, plan.joins, plan.details, plan.votes
    IDS, WEIGHTS = shape.window.recv_ids, shape.window.recv_weights
    EPOCH, BLOCKS_DONE, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.fail
    MASK, OUTCOME, MASKED_AT, WAITED, WROTE = mine.mask, mine.outcome, mine.masked_at, mine.waited, mine.wrote
    ATTEMPTS, AGAIN, EXCLUDED, NOTICE = 2 * shape.num_ranks + 2, int(Code.AGAIN), int(Code.EXCLUDED), 64
    block_idx, warp_idx, read_epoch, advance_epoch, read_mask = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.advance_epoch, ops.read_mask
    first_token, end_token, warp_token, token_step = ops.first_token, ops.end_token, ops.warp_token, ops.token_step
    begin_vector, end_vector, scatter_row, quantise_row = ops.begin_vector, ops.end_vector, ops.scatter_row, ops.quantise_row
    publish_join, wait_joins, count_ranks, assign_ranks, tell_rows = (
        ops.publish_join, ops.wait_joins, ops.count_ranks, ops.assign_ranks, ops.tell_rows)
    drop_rows, send_routing, take_member_rows = ops.drop_rows, ops.send_routing, ops.take_member_rows
    last_block, publish_arrived, settle = ops.last_block, ops.publish_arrived, ops.settle
    publish_late, store_header, conclude, tell_outcome, await_outcome = (
        ops.publish_late, ops.store_header, ops.conclude, ops.tell_outcome, ops.await_outcome)
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_masked_rank_major_dispatch(window, rank, local, record, tokens, topk_idx, topk_weights, num_tokens, src_rank_counters,  # noqa: ANN001, ANN202
                                      global_ids, scales, payload, place, slot, table, header, origins, kept, flight, arrived, handle,
                                      signature, status, timeout):
        trace = trace_begin()
        fail, waited, wrote = local + FAIL, local + WAITED, local + WROTE
        first, end = first_token(num_tokens), end_token(num_tokens)
        for attempt in range(ATTEMPTS):
            epoch, mask = read_epoch(local + EPOCH), read_mask(local + MASK)
            # ---- 1 join ----------------------------------------------------------------------------------------------
            trace = stamp(trace, HEAD)
            if block_idx() == 0:
                if warp_idx() == 0:
                    if (mask >> rank) & 1 == 0:
                        publish_join(window, JOINS, DETAILS, rank, RANKS, epoch, signature, mask, epoch, status)
            # ---- 2 rows assigned -------------------------------------------------------------------------------------
            trace = stamp(trace, COUNT)
            count_ranks(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, RANKS, first)
            if block_idx() == 0:
                if warp_idx() == 0:
                    if (mask >> rank) & 1 == 0:
                        tell_rows(window, DETAILS, rank, RANKS, epoch)
            assign_ranks(topk_idx, IDX_BYTES, topk_weights, TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, rank)
            if mask != 0:
                drop_rows(TOPK, RANKS, RANKS, PLANE_ROWS, first, end, 1, table, mask)   # send_routing writes the table
            # ---- 3 wait ----------------------------------------------------------------------------------------------
            trace = stamp(trace, WAIT_HEADS)
            code = wait_joins(window, JOINS, DETAILS, VOTES, rank, RANKS, epoch, signature, mask, 0, waited, wrote, fail, record, timeout)
            # ---- 4 rows ----------------------------------------------------------------------------------------------
            trace = stamp(trace, ROWS)
            if code == 0:
                token, step = warp_token(num_tokens), token_step(num_tokens)
                begin, stop = begin_vector(num_tokens, PIECE_BYTES), end_vector(num_tokens, PIECE_BYTES)
                while token < end:   # no range: its length is a 64-bit division
                    if QUANTISE:
                        quantise_row(payload, place, place + SCALES, tokens, token, -1, first, 0, TOPK, RANKS, RANKS,
                                     PLANE_ROWS, ROW_BYTES, ROUND, begin, stop)
                    else:
                        scatter_row(payload, place, tokens, token, -1, first, 0, TOPK, RANKS, RANKS, PLANE_ROWS, SENT_BYTES, begin, stop)
                        if SCALE_BYTES > 0:
                            scatter_row(payload, place + SCALES, scales, token, -1, first, 0, TOPK, RANKS, RANKS, PLANE_ROWS, SCALE_BYTES,
                                        begin_vector(num_tokens, SCALE_BYTES), end_vector(num_tokens, SCALE_BYTES))
                    if begin == 0:   # of a row's pieces the first
                        send_routing(window, slot + IDS, slot + WEIGHTS, table, token, first, end, TOPK, EXPERTS, RANKS, PLANE_ROWS, global_ids)
                    token += step
            # ---- 5 arrived and commit ----------------------------------------------------------------------------------
            trace = stamp(trace, MEET)
            if last_block(local + BLOCKS_DONE) == 1:
                trace = stamp(trace, WAIT_ARRIVED)
                if code == 0:
                    if warp_idx() == 0:
                        publish_arrived(window, ARRIVED, rank, RANKS, epoch)
                    code = settle(window, ARRIVED, VOTES, rank, RANKS, epoch, mask, waited, fail, record, timeout)
                if code == 0:
                    take_member_rows(window, DETAILS, slot + IDS, rank, RANKS, TOPK, PLANE_ROWS, epoch, mask, src_rank_counters)
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

    return ll_masked_rank_major_dispatch
