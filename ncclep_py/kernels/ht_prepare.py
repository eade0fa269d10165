"""High-throughput update, second half: from all ranks' totals to the final row of each of my tokens.

Phases: 1 head and totals, 2 wait (heads and totals of all ranks), 3 rows, 4 zones. Design and safety: ``ncclep_py.ht_memory_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, TOTALS, WAIT_COUNTS, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ht_prepare"]

PARAMETERS = ("window", "rank", "local", "record", "maps", "topk_idx", "num_tokens", "expert_counters", "expert_offsets", "unpadded", "total",
              "int_bytes", "handle", "signature", "status", "timeout")
"""Run-time values of a launch, all 64-bit integers."""


def make_ht_prepare(shape: HTShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, EXPERTS, TOPK, IDX_BYTES, BY_RANK, CHUNKS = (
        shape.num_ranks, shape.num_experts, shape.num_topk, shape.idx_bytes, shape.by_rank, shape.chunks)
    ALIGNMENT, BUDGET, TRAP = shape.alignment, shape.window.recv_rows, shape.trap
    HEADS, ARRIVED, HITS, KEPT = shape.window.heads, shape.window.arrived, shape.window.hits, shape.window.kept
    EPOCH, BLOCKS_DONE, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.fail
    HEADER, ZONES, PARTIALS, ROUTES, PLACES = shape.maps.header, shape.maps.zones, shape.maps.partials, shape.maps.routes, shape.maps.places
    block_idx, warp_idx, read_epoch, advance_epoch = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.advance_epoch
    publish_head, wait_heads, publish_abort = ops.publish_head, ops.wait_heads, ops.publish_abort
    last_block, op_code, clear_fail, store_header = ops.last_block, ops.op_code, ops.clear_fail, ops.store_header
    add_up, publish_hits, wait_hits, assign = ops.ht_sum, ops.ht_publish_hits, ops.ht_wait_hits, ops.ht_assign
    publish_kept, store_zones = ops.ht_publish_kept, ops.ht_store_zones
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ht_prepare(window, rank, local, record, maps, topk_idx, num_tokens, expert_counters, expert_offsets, unpadded, total,  # noqa: ANN001, ANN202
                   int_bytes, handle, signature, status, timeout):
        trace = trace_begin()
        epoch, fail = read_epoch(local + EPOCH), local + FAIL
        # ---- 1 head, and what I will send to everybody -----------------------------------------------------------------
        trace = stamp(trace, HEAD)
        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, status)
        add_up(maps + PARTIALS, EXPERTS, RANKS, BY_RANK, CHUNKS)
        if block_idx() == 0:   # one block, so that nobody waits for blocks that have not begun
            publish_hits(window, HITS, rank, RANKS, EXPERTS, BY_RANK, epoch)
        # ---- 2 wait ----------------------------------------------------------------------------------------------------
        trace = stamp(trace, WAIT_HEADS)
        code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)
        trace = stamp(trace, WAIT_COUNTS)
        if code == 0:
            code = wait_hits(window, HITS, rank, RANKS, EXPERTS, BY_RANK, epoch, fail, record, timeout)
        # ---- 3 rows ----------------------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            assign(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, RANKS, BY_RANK, CHUNKS, ALIGNMENT, BUDGET, rank, maps + ROUTES, maps + PLACES)
        # ---- 4 zones: the last block speaks for the rank -----------------------------------------------------------------
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            trace = stamp(trace, TOTALS)
            code = op_code(fail, epoch)
            if code == 0:
                publish_kept(window, KEPT, maps + PLACES, num_tokens, TOPK, EXPERTS, RANKS, BY_RANK, BUDGET, rank, epoch)
                code = store_zones(window, KEPT, rank, RANKS, EXPERTS, BY_RANK, ALIGNMENT, BUDGET, TRAP, maps + ZONES, expert_counters,
                                   expert_offsets, unpadded, total, int_bytes, epoch, fail, record, timeout)
            if warp_idx() == 0:
                if code != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, epoch, fail)
                else:
                    store_header(maps + HEADER, epoch, handle)
                clear_fail(fail)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ht_prepare
