"""``mask_clean``: all ranks that come within the timeout agree that they are the members from now on (M7 of ``ncclep_py.member_map``).

One block. A rank that missed earlier calls catches up with their epoch first.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import END, HEAD, VOTE, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ll_mask_clean"]

PARAMETERS = ("window", "rank", "local", "signature", "num_slots", "timeout")
"""Run-time values of a launch, all 64-bit integers."""


def make_ll_mask_clean(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS = shape.num_ranks
    plan, mine = shape.window.members, shape.local.members
    assert plan is not None and mine is not None and plan.clean is not None
    JOINS, DETAILS, VOTES, HEADERS, OPERATIONS = plan.clean.joins, plan.clean.details, plan.clean.votes, shape.local.headers, plan.votes
    EPOCH, CLEAN_EPOCH, MASK, OUTCOME, MASKED_AT, WAITED, WROTE = (
        shape.local.epoch, mine.clean_epoch, mine.mask, mine.outcome, mine.masked_at, mine.waited, mine.wrote)
    FAIL, RECORD = mine.scratch, mine.scratch + 64
    ATTEMPTS, AGAIN, EXCLUDED = 2 * shape.num_ranks + 2, int(Code.AGAIN), int(Code.EXCLUDED)
    warp_idx, read_epoch, advance_epoch, next_epoch, read_mask = ops.warp_idx, ops.read_epoch, ops.advance_epoch, ops.next_epoch, ops.read_mask
    trace_begin, stamp = ops.trace_begin, ops.stamp
    publish_join, wait_joins, read_verdict, catch_up, is_stranded, readmit, tell_outcome = (
        ops.publish_join, ops.wait_joins, ops.read_verdict, ops.catch_up, ops.is_stranded, ops.readmit, ops.tell_outcome)

    def ll_mask_clean(window, rank, local, signature, num_slots, timeout):  # noqa: ANN001, ANN202
        trace = trace_begin()
        own, epoch = read_epoch(local + EPOCH), read_epoch(local + CLEAN_EPOCH)
        mask, code, missed = 0, AGAIN, 0
        for _ in range(ATTEMPTS):
            trace = stamp(trace, HEAD)
            if warp_idx() == 0:
                publish_join(window, JOINS, DETAILS, rank, RANKS, epoch, signature, mask, own, 0)
            trace = stamp(trace, WAIT_HEADS)
            code = wait_joins(window, JOINS, DETAILS, VOTES, rank, RANKS, epoch, signature, mask, 1, local + WAITED, local + WROTE, local + FAIL,
                              local + RECORD, timeout)
            if code == AGAIN:
                mask = read_verdict(window, VOTES)
                epoch = next_epoch(epoch)
            elif code == EXCLUDED and missed < 3:   # maybe I missed earlier calls: try again where the others are
                mask, missed = 0, missed + 1
                epoch = next_epoch(catch_up(window, VOTES, RANKS))
            else:
                break
        trace = stamp(trace, VOTE)
        last = catch_up(window, VOTES, RANKS)
        if warp_idx() == 0:
            if code == 0:
                if is_stranded(window, OPERATIONS, rank, RANKS, own, mask, read_mask(local + MASK)) == 1:
                    code = EXCLUDED
            if code == 0:
                readmit(window, DETAILS, OPERATIONS, rank, RANKS, epoch, mask, local + MASK, local + MASKED_AT, local + EPOCH, local + HEADERS,
                        num_slots)
            if code == EXCLUDED:
                epoch = last
            advance_epoch(local + CLEAN_EPOCH, epoch)
            tell_outcome(local + OUTCOME, epoch, code)
        stamp(trace, END)

    return ll_mask_clean
