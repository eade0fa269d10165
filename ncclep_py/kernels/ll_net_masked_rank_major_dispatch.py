"""Low-latency dispatch with masks over several teams, RANK_MAJOR: as ``ll_net_masked_dispatch``, a row once to each rank, with its ids and weights.

Phases of an attempt: 1 head, 2 send, 3 tell: arrived and signals, 4 agree, 5 outcome, by the last block for all; of the attempt that commits: 6 take
rows to their places, which the messages name. Rules: T-N1 to T-N9 of ``ncclep_py.ll_net_member_map``. Rows and their order are those of one team.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code
from ncclep_py.kernels.ll_net_masked_shape import LLNetMaskedShape
from ncclep_py.kernels.ll_net_rank_major_dispatch import PARAMETERS
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import COUNT as COUNTING
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, VOTE, WAIT_ARRIVED, WAIT_HEADS
from ncclep_py.ll_net_member_map import DIFFERS, FAILED, SAID

__all__ = ["PARAMETERS", "make_ll_net_masked_rank_major_dispatch"]


def make_ll_net_masked_rank_major_dispatch(shape: LLNetMaskedShape, ops: Vocabulary) -> Callable[..., None]:
    """The dispatch kernel for one shape, over one implementation of the vocabulary. `record` is followed by the async error."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, IDX_BYTES = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, shape.idx_bytes
    mine = shape.local.members
    assert mine is not None
    PLANE_ROWS, HEADS, ARRIVED, SENT = shape.window.plane_rows, shape.window.heads, shape.window.arrived, shape.net.sent
    EPOCH, BLOCKS_DONE, FAIL, BLOCKS_TOLD = shape.local.epoch, shape.local.blocks_done, shape.local.fail, shape.net.count + 8
    MASK, OUTCOME, MASKED_AT, WAITED = mine.mask, mine.outcome, mine.masked_at, mine.waited
    VIEWS, ROUNDS, ADDS, MADE, TOLD, GO = (
        shape.members.views, shape.members.rounds, shape.members.adds, shape.members.made, shape.members.told, shape.members.go)
    TEAM, MOST, CONTEXTS = shape.net.team_size, shape.net.tokens, shape.net.num_contexts
    SENT_BYTES, SCALE_BYTES, SCALES = shape.sent_bytes, shape.wire.scale_bytes, shape.slot_scales
    QUANTISE, ROUND = shape.wire.quantise, int(shape.wire.round_scales)
    HEADER_BYTES, MESSAGE_BYTES, WORDS = shape.net.routed_header_bytes, shape.net.message_bytes, 3
    IDS, WEIGHTS = shape.window.recv_ids, shape.window.recv_weights
    SENT_ROWS, SENT_SCALES, PUT_BYTES = SENT + HEADER_BYTES, SENT + HEADER_BYTES + SENT_BYTES, HEADER_BYTES + SENT_BYTES + SCALE_BYTES
    ATTEMPTS, AGAIN, NOTICE, DECIDED = 2 * shape.num_ranks + 2, int(Code.AGAIN), 64, SAID
    TIMEOUT, RANKS_OF_VIEW = int(Code.TIMEOUT), FAILED - 1
    PATIENCE = 2 * shape.num_ranks * shape.num_ranks   # timeouts that this rank's last block may take
    block_idx, warp_idx, blocks, warps = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps
    read_epoch, advance_epoch, read_mask = ops.read_epoch, ops.advance_epoch, ops.read_mask
    first_token, end_token, token_part = ops.first_token, ops.end_token, ops.token_part
    publish_head, enter, wait_members = ops.ht_net_publish_head, ops.ll_net_enter_members, ops.ll_net_wait_members
    count_ranks, assign_ranks, drop_rows, keep_routes = ops.count_ranks, ops.assign_ranks, ops.drop_rows, ops.ll_net_keep_routes
    send_row, quantise_row, send_made_row = ops.ll_net_send_member_row, ops.ll_net_quantise_row, ops.ll_net_send_made_row
    publish_arrived, signal, wait_data = ops.ht_net_publish_arrived, ops.ll_net_signal_members, ops.ll_net_wait_member_data
    say, hear, conclude = ops.ll_net_say, ops.ll_net_hear, ops.ll_net_conclude_members
    count_rows, take_token = ops.ll_net_count_member_rows, ops.ll_net_take_token
    last_block, store_header, tell_outcome, await_view = ops.last_block, ops.store_header, ops.tell_outcome, ops.ll_net_await_view
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_net_masked_rank_major_dispatch(comm, window, rank, local, record, tokens, topk_idx, topk_weights, num_tokens, src_rank_counters,  # noqa: ANN001, ANN202
                                          global_ids, scales, payload, place, slot, table, remote, messages, header, origins, kept, flight, arrived,
                                          tags, handle, signature, status, timeout):
        trace = trace_begin()
        fail, waited, adds = local + FAIL, local + WAITED, local + ADDS
        first, end, part = first_token(num_tokens), end_token(num_tokens), token_part(num_tokens)
        code, epoch = AGAIN, read_epoch(local + EPOCH)
        for attempt in range(ATTEMPTS):
            epoch, mask = read_epoch(local + EPOCH), read_mask(local + MASK)
            member, silent = 1 - ((mask >> rank) & 1), mask & read_mask(local + TOLD)
            # ---- 1 head ------------------------------------------------------------------------------------------------
            trace = stamp(trace, HEAD)
            if block_idx() == 0:
                view = mask
                if member == 1:
                    if warp_idx() == 0:
                        publish_head(window, HEADS, rank, RANKS, TEAM, epoch, signature, status)
                    view |= enter(comm, window, HEADS, rank, RANKS, TEAM, CONTEXTS, mask, adds, epoch, signature, status, timeout)
                    view = wait_members(comm, window, HEADS, VIEWS, rank, RANKS, TEAM, mask, view, ROUNDS, adds, epoch, signature, waited, timeout)
                if warp_idx() == 0:
                    tell_outcome(local + GO, epoch, view | SAID)
            trace = stamp(trace, WAIT_HEADS)
            view = await_view(local + GO, epoch, PATIENCE * timeout)   # SAID is missing if that ended by its deadline
            # ---- 2 send ------------------------------------------------------------------------------------------------
            trace = stamp(trace, COUNTING)
            if member == 1 and view == mask | SAID:
                count_ranks(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, RANKS, first)
                assign_ranks(topk_idx, IDX_BYTES, topk_weights, TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, rank)
                if mask != 0:
                    drop_rows(TOPK, RANKS, RANKS, PLANE_ROWS, first, end, 1, table, mask)   # keep_routes writes the table
                trace = stamp(trace, ROWS)
                if part == 0:   # blocks that share tokens leave it to the first
                    at = first + warp_idx()
                    while at < end:
                        keep_routes(table, at, first, TOPK, RANKS)
                        if QUANTISE:
                            quantise_row(window, SENT_ROWS, SENT_SCALES, tokens, at, first, TOPK, RANKS, ROW_BYTES, ROUND, MESSAGE_BYTES, rank)
                            send_made_row(comm, window, SENT, messages + rank * MOST * MESSAGE_BYTES, at, first, end, TOPK, RANKS, RANKS, PLANE_ROWS,
                                          WORDS, HEADER_BYTES, PUT_BYTES, MESSAGE_BYTES, rank, TEAM, CONTEXTS, epoch)
                        else:
                            send_row(comm, window, SENT, messages + rank * MOST * MESSAGE_BYTES, tokens, scales, at, first, end, TOPK, RANKS, RANKS,
                                     PLANE_ROWS, SENT_BYTES, SCALE_BYTES, WORDS, HEADER_BYTES, MESSAGE_BYTES, rank, TEAM, CONTEXTS, epoch)
                        at += warps()
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
        # ---- 6 take what members sent, all blocks together ----------------------------------------------------------------
        if code == 0:
            mask = read_mask(local + MASK)
            count_rows(window, messages, slot + IDS, MOST, TOPK, RANKS, PLANE_ROWS, MESSAGE_BYTES, rank, mask, epoch, src_rank_counters)
            at = block_idx() * warps() + warp_idx()
            while at < RANKS * MOST:
                if (mask >> (at // MOST)) & 1 == 0:
                    take_token(payload, place, place + SCALES, window, slot + IDS, slot + WEIGHTS, messages, remote, at // MOST, at % MOST, MOST,
                               TOPK, EXPERTS, RANKS, PLANE_ROWS, SENT_BYTES, SCALE_BYTES, HEADER_BYTES, MESSAGE_BYTES, global_ids, rank, epoch)
                at += blocks() * warps()
        if last_block(local + BLOCKS_DONE) == 1:
            if warp_idx() == 0:
                if code == 0:
                    store_header(header, epoch, handle)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ll_net_masked_rank_major_dispatch
