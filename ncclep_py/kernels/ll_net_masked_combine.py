"""Low-latency combine with masks over several teams: members send rows back to their sources, which add them in k order.

Phases of an attempt: 1 head, 2 send rows back, 3 tell, 4 agree, 5 outcome; of the attempt that commits: 6 rows, without those of masked ranks. Rules:
T-N1 to T-N9 of ``ncclep_py.ll_net_member_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.errors import Code
from ncclep_py.kernels.ll_net_combine import PARAMETERS
from ncclep_py.kernels.ll_net_masked_shape import LLNetMaskedShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, VOTE, WAIT_ARRIVED, WAIT_HEADS
from ncclep_py.ll_net_member_map import DIFFERS, FAILED, SAID

__all__ = ["PARAMETERS", "make_ll_net_masked_combine"]


def make_ll_net_masked_combine(shape: LLNetMaskedShape, ops: Vocabulary) -> Callable[..., None]:
    """The combine kernel for one shape, over one implementation of the vocabulary. `record` is followed by the async error."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, TYPE = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, int(shape.token_type)
    mine = shape.local.members
    assert mine is not None
    PLANE_ROWS, HEADS, ARRIVED = shape.window.plane_rows, shape.window.heads, shape.window.arrived
    EPOCH, BLOCKS_DONE, FAIL, BLOCKS_TOLD = shape.local.epoch, shape.local.blocks_done, shape.local.fail, shape.net.count + 8
    MASK, OUTCOME, MASKED_AT, WAITED = mine.mask, mine.outcome, mine.masked_at, mine.waited
    VIEWS, ROUNDS, ADDS, MADE, TOLD, GO = (
        shape.members.views, shape.members.rounds, shape.members.adds, shape.members.made, shape.members.told, shape.members.go)
    RETURNED, RETURNED_BYTES = shape.members.returned, shape.members.returned_bytes
    TEAM, MOST, CONTEXTS = shape.net.team_size, shape.net.tokens, shape.net.num_contexts
    ATTEMPTS, AGAIN, NOTICE, DECIDED = 2 * shape.num_ranks + 2, int(Code.AGAIN), 64, SAID
    TIMEOUT, RANKS_OF_VIEW = int(Code.TIMEOUT), FAILED - 1
    PATIENCE = 2 * shape.num_ranks * shape.num_ranks   # timeouts that this rank's last block may take
    block_idx, warp_idx, blocks, warps = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps
    read_epoch, advance_epoch, read_mask = ops.read_epoch, ops.advance_epoch, ops.read_mask
    publish_head, enter, wait_members = ops.ht_net_publish_head, ops.ll_net_enter_members, ops.ll_net_wait_members
    read_header, header_status, check_header = ops.read_header, ops.header_status, ops.check_header
    return_rows, gather_row, sum_row = ops.ll_net_return_member_rows, ops.ll_net_gather_member_row, ops.ll_net_sum_member_row
    RANK_MAJOR = shape.layout is Layout.RANK_MAJOR
    publish_arrived, signal, wait_data = ops.ht_net_publish_arrived, ops.ll_net_signal_members, ops.ll_net_wait_member_data
    say, hear, conclude = ops.ll_net_say, ops.ll_net_hear, ops.ll_net_conclude_members
    last_block, tell_outcome, await_view = ops.last_block, ops.tell_outcome, ops.ll_net_await_view
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_net_masked_combine(comm, window, rank, local, record, weights, out, num_tokens, rows_valid, payload, slot, table, remote,  # noqa: ANN001, ANN202
                              header, handle, signature, status, timeout):
        trace = trace_begin()
        fail, waited, adds = local + FAIL, local + WAITED, local + ADDS
        code, epoch, held = AGAIN, read_epoch(local + EPOCH), read_header(header)
        state = header_status(held, handle, status)
        if status == 0 and (read_mask(local + MASK) >> rank) & 1 == 0:
            check_header(held, handle, rank, epoch, fail, record)   # all refuse it by my HEAD; my record says more
        for attempt in range(ATTEMPTS):
            epoch, mask = read_epoch(local + EPOCH), read_mask(local + MASK)
            member, silent = 1 - ((mask >> rank) & 1), mask & read_mask(local + TOLD)
            # ---- 1 head ------------------------------------------------------------------------------------------------
            trace = stamp(trace, HEAD)
            if block_idx() == 0:
                view = mask
                if member == 1:
                    if warp_idx() == 0:
                        publish_head(window, HEADS, rank, RANKS, TEAM, epoch, signature, state)
                    view |= enter(comm, window, HEADS, rank, RANKS, TEAM, CONTEXTS, mask, adds, epoch, signature, state, timeout)
                    view = wait_members(comm, window, HEADS, VIEWS, rank, RANKS, TEAM, mask, view, ROUNDS, adds, epoch, signature, waited, timeout)
                if warp_idx() == 0:
                    tell_outcome(local + GO, epoch, view | SAID)
            trace = stamp(trace, WAIT_HEADS)
            view = await_view(local + GO, epoch, PATIENCE * timeout)   # SAID is missing if that ended by its deadline
            # ---- 2 send rows back --------------------------------------------------------------------------------------
            trace = stamp(trace, ROWS)
            if member == 1 and view == mask | SAID:
                if rows_valid != 0:
                    at = block_idx() * warps() + warp_idx()
                    while at < RANKS * MOST:
                        if (mask >> (at // MOST)) & 1 == 0:
                            return_rows(comm, payload, slot, window, RETURNED, remote, at // MOST, at % MOST, MOST, TOPK, ROW_BYTES, ROW_BYTES,
                                        RETURNED_BYTES, rank, TEAM, CONTEXTS)
                        at += blocks() * warps()
            # ---- 3 tell: the last block speaks for the rank ---------------------------------------------------------------
            trace = stamp(trace, MEET)
            if last_block(local + BLOCKS_TOLD) == 1:
                seen = view
                view = seen & ~SAID
                decided = 0
                if member == 1:
                    if warp_idx() == 0:
                        publish_arrived(window, ARRIVED, rank, TEAM, epoch)
                        context = 0
                        while context < CONTEXTS:
                            signal(comm, rank, RANKS, TEAM, context, mask)
                            context += 1
                    trace = stamp(trace, WAIT_ARRIVED)
                    if seen == mask | SAID:
                        view = wait_data(comm, window, ARRIVED, VIEWS, rank, RANKS, TEAM, CONTEXTS, mask, ROUNDS, adds, epoch, waited, timeout)
                    # ---- 4 agree ---------------------------------------------------------------------------------------
                    trace = stamp(trace, VOTE)
                    turn = 1
                    while turn <= ROUNDS and decided == 0:
                        if view & RANKS_OF_VIEW != mask:
                            view |= DIFFERS
                        if warp_idx() == 0:
                            say(comm, window, VIEWS, rank, RANKS, TEAM, silent, ROUNDS, turn, epoch, view)
                        heard = hear(window, VIEWS, rank, RANKS, mask, ROUNDS, turn, epoch, view, timeout)
                        decided, view = heard & DECIDED, heard & ~DECIDED
                        turn += 1
                # ---- 5 outcome -----------------------------------------------------------------------------------------
                if warp_idx() == 0:
                    if decided != 0 and (view >> rank) & 1 == 0:
                        say(comm, window, VIEWS, rank, RANKS, TEAM, silent, ROUNDS, 0, epoch, view)
                    left = ATTEMPTS - 1 - attempt if decided != 0 else -1
                    code = conclude(comm, window, HEADS, ARRIVED, rank, RANKS, TEAM, adds, local + MADE, local + TOLD, local + MASK,
                                    local + MASKED_AT, epoch, signature, mask, view, left, record + NOTICE, fail, record)
                    if code == AGAIN:
                        advance_epoch(local + EPOCH, epoch)
                    tell_outcome(local + OUTCOME, epoch, code | SAID)
            told = await_view(local + OUTCOME, epoch, PATIENCE * timeout)
            code = told & ~SAID if told != 0 else TIMEOUT
            if code != AGAIN:
                break
        # ---- 6 rows ---------------------------------------------------------------------------------------------------------
        if code == 0:
            mask = read_mask(local + MASK)
            at = block_idx() * warps() + warp_idx()
            while at < num_tokens:
                if RANK_MAJOR:
                    sum_row(window, RETURNED, RETURNED_BYTES, table, out, at, TOPK, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, rank, mask)
                else:
                    gather_row(window, RETURNED, RETURNED_BYTES, table, weights, out, at, TOPK, EXPERTS, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, rank,
                               mask)
                at += blocks() * warps()
        if last_block(local + BLOCKS_DONE) == 1:
            if warp_idx() == 0:
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ll_net_masked_combine
