"""Low-latency combine with masks over several teams whose rows travel as NVFP4: ``ll_net_masked_combine`` of packed rows.

Phases: 1 pack, once; of an attempt 2 head (by the last block: all rows of this rank are packed), 3 send packed rows back, 4 tell, 5 agree, 6 outcome;
of the attempt that commits: 7 rows. Rules: T-N1 to T-N9 of ``ncclep_py.ll_net_member_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.errors import Code
from ncclep_py.kernels.ll_net_masked_shape import LLNetMaskedShape
from ncclep_py.kernels.ll_net_nvfp4_combine import PARAMETERS
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, PACK, ROWS, VOTE, WAIT_ARRIVED, WAIT_HEADS
from ncclep_py.ll_net_member_map import DIFFERS, FAILED, SAID

__all__ = ["PARAMETERS", "make_ll_net_masked_nvfp4_combine"]


def make_ll_net_masked_nvfp4_combine(shape: LLNetMaskedShape, ops: Vocabulary) -> Callable[..., None]:
    """The combine kernel for one shape, over one implementation of the vocabulary. `record` is followed by the async error."""
    RANKS, TOPK, ROW_BYTES, PLANE_ROWS = shape.num_ranks, shape.num_topk, shape.row_bytes, shape.window.plane_rows
    rank_major = shape.layout is Layout.RANK_MAJOR
    PLANES_OF_ALL = RANKS if rank_major else shape.num_experts
    PLANES, CAPACITY = (RANKS, PLANE_ROWS // RANKS) if rank_major else (shape.num_experts // RANKS, PLANE_ROWS)
    PACKED_BYTES = ROW_BYTES // 1024 * 288 + 16   # the row's own scale stands in the first 4 of the 16
    mine = shape.local.members
    assert mine is not None
    HEADS, ARRIVED, BLOCKS_PACKED = shape.window.heads, shape.window.arrived, shape.local.blocks_packed
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
    pack_rows, return_rows, sum_packed_row = ops.pack_rows, ops.ll_net_return_member_rows, ops.ll_net_sum_packed_member_row
    publish_arrived, signal, wait_data = ops.ht_net_publish_arrived, ops.ll_net_signal_members, ops.ll_net_wait_member_data
    say, hear, conclude = ops.ll_net_say, ops.ll_net_hear, ops.ll_net_conclude_members
    last_block, tell_outcome, await_view = ops.last_block, ops.tell_outcome, ops.ll_net_await_view
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_net_masked_nvfp4_combine(comm, window, rank, local, record, row_scales, counters, weights, out, num_tokens, payload, slot,  # noqa: ANN001, ANN202
                                    table, remote, header, handle, signature, status, timeout):
        trace = trace_begin()
        fail, waited, adds = local + FAIL, local + WAITED, local + ADDS
        code, epoch, held = AGAIN, read_epoch(local + EPOCH), read_header(header)
        state = header_status(held, handle, status)
        if status == 0 and (read_mask(local + MASK) >> rank) & 1 == 0:
            check_header(held, handle, rank, epoch, fail, record)   # all refuse it by my HEAD; my record says more
        # ---- 1 pack: my experts' rows ----------------------------------------------------------------------------------
        trace = stamp(trace, PACK)
        if status == 0:
            if held == handle:
                pack_rows(payload, slot, rank, counters, row_scales, PLANES, CAPACITY, ROW_BYTES)
        for attempt in range(ATTEMPTS):
            epoch, mask = read_epoch(local + EPOCH), read_mask(local + MASK)
            member, silent = 1 - ((mask >> rank) & 1), mask & read_mask(local + TOLD)
            # ---- 2 head: all blocks have packed ------------------------------------------------------------------------
            trace = stamp(trace, HEAD)
            if last_block(local + BLOCKS_PACKED) == 1:
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
            # ---- 3 send rows back --------------------------------------------------------------------------------------
            trace = stamp(trace, ROWS)
            if member == 1 and view == mask | SAID:
                at = block_idx() * warps() + warp_idx()
                while at < RANKS * MOST:
                    if (mask >> (at // MOST)) & 1 == 0:
                        return_rows(comm, payload, slot, window, RETURNED, remote, at // MOST, at % MOST, MOST, TOPK, ROW_BYTES, PACKED_BYTES,
                                    RETURNED_BYTES, rank, TEAM, CONTEXTS)
                    at += blocks() * warps()
            # ---- 4 tell: the last block speaks for the rank ---------------------------------------------------------------
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
                    # ---- 5 agree ---------------------------------------------------------------------------------------
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
                # ---- 6 outcome -----------------------------------------------------------------------------------------
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
        # ---- 7 rows ---------------------------------------------------------------------------------------------------------
        if code == 0:
            mask = read_mask(local + MASK)
            at = block_idx() * warps() + warp_idx()
            while at < num_tokens:
                sum_packed_row(window, RETURNED, RETURNED_BYTES, table, weights, out, at, TOPK, PLANES_OF_ALL, RANKS, PLANE_ROWS, ROW_BYTES, rank,
                               mask)
                at += blocks() * warps()
        if last_block(local + BLOCKS_DONE) == 1:
            if warp_idx() == 0:
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ll_net_masked_nvfp4_combine
