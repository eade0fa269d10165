"""High-throughput update over several teams, second half: totals through rail peers to all ranks, then as in one team.

Phases: 1 head and totals, 2 wait (heads; rail peers' totals, forwarded to my team; totals of all ranks), 3 rows, 4 zones.
Design and safety: ``ncclep_py.ht_net_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Status
from ncclep_py.kernels import ht_prepare
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, TOTALS, WAIT_COUNTS, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ht_net_prepare"]

PARAMETERS = ("comm", *ht_prepare.PARAMETERS)
"""Run-time values of a launch, all 64-bit integers: the device communicator, then as in ``ht_prepare``."""


def make_ht_net_prepare(shape: HTNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, EXPERTS, TOPK, IDX_BYTES, BY_RANK, SHARES = (
        shape.num_ranks, shape.num_experts, shape.num_topk, shape.idx_bytes, shape.by_rank, shape.chunks)
    ALIGNMENT, BUDGET, TRAP = shape.alignment, shape.window.recv_rows, shape.trap
    HEADS, ARRIVED, HITS, KEPT = shape.window.heads, shape.window.arrived, shape.window.hits, shape.window.kept
    EPOCH, BLOCKS_DONE, FAIL, COUNT = shape.local.epoch, shape.local.blocks_done, shape.local.fail, shape.net.count
    HEADER, ZONES, PARTIALS, ROUTES, PLACES = shape.maps.header, shape.maps.zones, shape.maps.partials, shape.maps.routes, shape.maps.places
    TEAM, TEAMS, CHANNELS, ADDS, CONTEXTS = (
        shape.net.team_size, shape.net.num_teams, shape.net.channels, shape.net.adds, shape.net.num_contexts)
    SIGNALS, TAGS, TAG_BYTES, GAVE_UP = shape.net.signals_per_team, shape.net.tags, shape.net.tag_bytes, int(Status.ABORT) << 24
    NET_HITS, HITS_BYTES, NET_KEPT, KEPT_BYTES, KEPT_SENT = (
        shape.net.hits, shape.net.hits_bytes, shape.net.kept, shape.net.kept_bytes, shape.net.kept_sent)
    block_idx, warp_idx, warps, sync = ops.block_idx, ops.warp_idx, ops.ht_net_warps, ops.ht_net_sync
    trace_begin, stamp = ops.trace_begin, ops.stamp
    read_epoch, advance_epoch, read_count, advance_count = ops.read_epoch, ops.advance_epoch, ops.ht_net_count, ops.ht_net_advance
    publish_head, enter, wait_heads, wait_entered = ops.ht_net_publish_head, ops.ht_net_enter, ops.ht_net_wait_heads, ops.ht_net_wait_entered
    put, put_tag, signal, wait_chunk, outcome = ops.ht_net_put, ops.ht_net_put_tag, ops.ht_net_signal, ops.ht_net_wait_chunk, ops.outcome
    last_block, op_code, clear_fail, store_header, publish_abort = (
        ops.last_block, ops.op_code, ops.clear_fail, ops.store_header, ops.ht_net_publish_abort)
    add_up, publish_hits, forward_hits, wait_hits = ops.ht_sum, ops.ht_net_publish_hits, ops.ht_net_forward_hits, ops.ht_net_wait_hits
    assign, overflows, publish_kept, forward_kept = ops.ht_assign, ops.ht_net_overflows, ops.ht_net_publish_kept, ops.ht_net_forward_kept
    wait_kept, store_zones = ops.ht_net_wait_kept, ops.ht_store_zones

    def ht_net_prepare(comm, window, rank, local, record, maps, topk_idx, num_tokens, expert_counters, expert_offsets, unpadded, total,  # noqa: ANN001, ANN202
                       int_bytes, handle, signature, status, timeout):
        trace = trace_begin()
        epoch, fail, count, code = read_epoch(local + EPOCH), local + FAIL, read_count(local + COUNT), 0
        team, index = rank // TEAM, rank % TEAM
        trace = stamp(trace, HEAD)
        # ---- 1 head, and what I will send to my team -----------------------------------------------------------------------
        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, TEAM, epoch, signature, status)
        add_up(maps + PARTIALS, EXPERTS, RANKS, BY_RANK, SHARES)
        if block_idx() == 0:   # one block, so that nobody waits for blocks that have not begun
            code = enter(comm, window, HEADS, rank, RANKS, TEAM, CHANNELS, CONTEXTS, ADDS, count, epoch, signature, status, fail, record, timeout)
        trace = stamp(trace, WAIT_HEADS)
        # ---- 2 wait --------------------------------------------------------------------------------------------------------
        if code == 0:
            code = wait_heads(window, HEADS, rank, RANKS, TEAM, epoch, signature, fail, record, timeout)
        trace = stamp(trace, WAIT_COUNTS)
        if block_idx() == 0:
            if code == 0:
                code = wait_entered(comm, rank, RANKS, TEAM, CHANNELS, count, epoch, fail, record, timeout)
            if code == 0:   # not before: an earlier put may have read my own copy until now
                publish_hits(window, HITS, rank, RANKS, EXPERTS, BY_RANK, epoch, TEAM)
            sync()
            why = 0
            if code != 0:
                why = outcome(fail, epoch, GAVE_UP + rank)
            distance = 1 + warp_idx()
            while distance < TEAMS:
                peer, place = (team + TEAMS - distance) % TEAMS * TEAM + index, TEAMS - distance - 1
                if code == 0:
                    put(comm, window, peer, 0, NET_HITS + place * HITS_BYTES, HITS + ((epoch & 1) * RANKS + rank) * HITS_BYTES, HITS_BYTES)
                put_tag(comm, window, peer, 0, TAGS + place * TAG_BYTES, epoch, why)
                signal(comm, peer, 0, team * SIGNALS + 1, 1)
                distance += warps()
            for distance in range(1, TEAMS):
                source = (team + TEAMS - distance) % TEAMS
                if code == 0:
                    code = wait_chunk(comm, window, TAGS + (distance - 1) * TAG_BYTES, source * TEAM + index, 0, source * SIGNALS + 1,
                                      count * ADDS + 1, rank, epoch, fail, record, timeout)
                if code == 0:
                    forward_hits(window, NET_HITS + (distance - 1) * HITS_BYTES, HITS, rank, RANKS, EXPERTS, BY_RANK, epoch, source * TEAM + index,
                                 TEAM)
            if code != 0 and warp_idx() == 0:   # at once: my other blocks and my team may wait twice as long
                publish_abort(window, HEADS, ARRIVED, rank, RANKS, TEAM, epoch, fail)
        if code == 0:
            code = wait_hits(window, HITS, HEADS, rank, RANKS, TEAM, EXPERTS, BY_RANK, epoch, fail, record, timeout + timeout)
        trace = stamp(trace, ROWS)
        # ---- 3 rows --------------------------------------------------------------------------------------------------------
        if code == 0:
            assign(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, RANKS, BY_RANK, SHARES, ALIGNMENT, BUDGET, rank, maps + ROUTES, maps + PLACES)
        # ---- 4 zones: the last block speaks for the rank -------------------------------------------------------------------
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            trace = stamp(trace, TOTALS)
            code, why = op_code(fail, epoch), 0
            if code == 0:
                publish_kept(window, KEPT, KEPT_SENT, maps + PLACES, num_tokens, TOPK, EXPERTS, RANKS, BY_RANK, BUDGET, rank, epoch, TEAM)
            else:
                why = outcome(fail, epoch, GAVE_UP + rank)
            distance = 1 + warp_idx()
            while distance < TEAMS:
                to, place = (team + TEAMS - distance) % TEAMS, TEAMS - distance - 1
                if code == 0:
                    if BY_RANK == 1:
                        put(comm, window, to * TEAM + index, 0, NET_KEPT + place * KEPT_BYTES, KEPT_SENT + to * KEPT_BYTES, KEPT_BYTES)
                put_tag(comm, window, to * TEAM + index, 0, TAGS + place * TAG_BYTES + 8, epoch, why)
                signal(comm, to * TEAM + index, 0, team * SIGNALS + 1, ADDS - 1)
                for channel in range(1, CHANNELS):
                    signal(comm, to * TEAM + index, channel % CONTEXTS, team * SIGNALS + 1 + channel, ADDS)
                distance += warps()
            sync()   # all warps have looked at FAIL
            if code == 0:
                if overflows(EXPERTS, RANKS, BY_RANK, BUDGET, team * TEAM, TEAM) == 1:
                    for distance in range(1, TEAMS):
                        source = (team + TEAMS - distance) % TEAMS
                        if code == 0:
                            code = wait_chunk(comm, window, TAGS + (distance - 1) * TAG_BYTES + 8, source * TEAM + index, 0, source * SIGNALS + 1,
                                              count * ADDS + 2, rank, epoch, fail, record, 2 * timeout + (timeout >> 2))
                        if code == 0:
                            forward_kept(window, NET_KEPT + (distance - 1) * KEPT_BYTES, KEPT, EXPERTS, RANKS, BY_RANK, BUDGET, rank,
                                         source * TEAM + index, TEAM)
            if code == 0:
                trace = stamp(trace, WAIT_COUNTS)
                code = wait_kept(window, KEPT, HEADS, rank, RANKS, TEAM, EXPERTS, BY_RANK, BUDGET, epoch, fail, record,
                                 2 * timeout + (timeout >> 1))
            if code == 0:
                code = store_zones(window, KEPT, rank, RANKS, EXPERTS, BY_RANK, ALIGNMENT, BUDGET, TRAP, maps + ZONES, expert_counters,
                                   expert_offsets, unpadded, total, int_bytes, epoch, fail, record, timeout)
            if warp_idx() == 0:
                if code != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, TEAM, epoch, fail)
                else:
                    store_header(maps + HEADER, epoch, handle)
                clear_fail(fail)
                advance_count(local + COUNT, count)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ht_net_prepare
