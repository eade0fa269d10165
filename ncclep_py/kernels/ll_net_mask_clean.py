"""``mask_clean`` over several teams: all ranks that come within the timeout agree that they are the members from now on (T-N10).

One block. A rank that missed earlier calls goes where the others are. Rules: ``ncclep_py.ll_net_member_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code
from ncclep_py.kernels.ll_net_masked_shape import LLNetMaskedShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, VOTE, WAIT_HEADS
from ncclep_py.ll_net_member_map import FAILED, SAID

__all__ = ["PARAMETERS", "make_ll_net_mask_clean"]

PARAMETERS = ("comm", "window", "rank", "local", "signature", "num_slots", "timeout")
"""Run-time values of a launch, all 64-bit integers; `comm`: address of the device communicator."""


def make_ll_net_mask_clean(shape: LLNetMaskedShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, TEAM, CONTEXTS, HEADERS = shape.num_ranks, shape.net.team_size, shape.net.num_contexts, shape.local.headers
    mine, plan = shape.local.members, shape.members
    assert mine is not None
    EPOCH, CLEAN_EPOCH, MASK, OUTCOME, MASKED_AT = shape.local.epoch, mine.clean_epoch, mine.mask, mine.outcome, mine.masked_at
    VIEWS, JOINS, CLEAN_VIEWS, ROUNDS, ADDS, MADE, TOLD = plan.views, plan.joins, plan.clean_views, plan.rounds, plan.adds, plan.made, plan.told
    EVERYBODY, BEHIND, DECIDED, EXCLUDED = (1 << shape.num_ranks) - 1, FAILED, SAID, int(Code.EXCLUDED)
    warp_idx, read_epoch, advance_epoch, read_mask, next_epoch = ops.warp_idx, ops.read_epoch, ops.advance_epoch, ops.read_mask, ops.next_epoch
    clean_epoch, is_told, send_join, wait_joins = ops.ll_net_clean_epoch, ops.ll_net_is_told, ops.ll_net_send_join, ops.ll_net_wait_joins
    say, hear, all_stranded, signal, readmit = (
        ops.ll_net_say, ops.ll_net_hear, ops.ll_net_all_stranded, ops.ll_net_signal_clean, ops.ll_net_readmit)
    trace_begin, stamp, tell_outcome = ops.trace_begin, ops.stamp, ops.tell_outcome

    def ll_net_mask_clean(comm, window, rank, local, signature, num_slots, timeout):  # noqa: ANN001, ANN202
        trace = trace_begin()
        own, mask, epoch = read_epoch(local + EPOCH), read_mask(local + MASK), read_epoch(local + CLEAN_EPOCH)
        out, view, decided, turn, missed = 1 << rank, BEHIND, 0, 1, 0
        # ---- 1 join, where the others are ----------------------------------------------------------------------------
        for _ in range(RANKS + 1):
            trace = stamp(trace, HEAD)
            epoch = clean_epoch(window, JOINS, rank, RANKS, epoch)
            stranded = is_told(window, VIEWS, rank, RANKS, ROUNDS, own, mask)
            if warp_idx() == 0:
                send_join(comm, window, JOINS, rank, RANKS, TEAM, local + MADE, epoch, own, stranded)
            trace = stamp(trace, WAIT_HEADS)
            view = wait_joins(comm, window, JOINS, CLEAN_VIEWS, rank, RANKS, TEAM, CONTEXTS, ROUNDS, epoch, timeout)
            if view == out and missed < 2:   # of a call that was over, or of one that few came to: others may be in the next
                if warp_idx() == 0:
                    say(comm, window, CLEAN_VIEWS, rank, RANKS, TEAM, 0, ROUNDS, 1, epoch, view)
                missed += 1
                epoch = next_epoch(epoch)
            elif view != BEHIND:
                break
        # ---- 2 agree ---------------------------------------------------------------------------------------------------
        trace = stamp(trace, VOTE)
        if view == BEHIND:
            view = out
        while turn <= ROUNDS and decided == 0:
            if warp_idx() == 0:
                say(comm, window, CLEAN_VIEWS, rank, RANKS, TEAM, 0, ROUNDS, turn, epoch, view)
            heard = hear(window, CLEAN_VIEWS, rank, RANKS, 0, ROUNDS, turn, epoch, view, timeout)
            decided, view = heard & DECIDED, heard & ~DECIDED
            turn += 1
        # ---- 3 members ---------------------------------------------------------------------------------------------------
        if warp_idx() == 0:
            code = EXCLUDED
            if decided != 0 and (view >> rank) & 1 == 0:
                say(comm, window, CLEAN_VIEWS, rank, RANKS, TEAM, 0, ROUNDS, 0, epoch, view)
                if all_stranded(window, JOINS, rank, RANKS, epoch, view) == 0:
                    code = 0
                    if view & ~mask != 0:   # ranks that are out from now on, and did not come, look for this in their next operation
                        say(comm, window, VIEWS, rank, RANKS, TEAM, mask | (EVERYBODY & ~view), ROUNDS, 1, own, view)
            signal(comm, rank, RANKS, TEAM, CONTEXTS)
            readmit(comm, window, JOINS, rank, RANKS, TEAM, epoch, code, view, local + ADDS, local + MADE, local + TOLD, local + MASK,
                    local + MASKED_AT, local + EPOCH, local + HEADERS, num_slots, own)
            advance_epoch(local + CLEAN_EPOCH, epoch)
            tell_outcome(local + OUTCOME, epoch, code)
        stamp(trace, END)

    return ll_net_mask_clean
