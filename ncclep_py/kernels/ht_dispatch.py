"""High-throughput dispatch, FLAT and EXPERT_MAJOR, forward and backward: every row straight into its final places.

Phases: 1 head, 2 wait (heads of all ranks), 3 rows, and pads of my own slot, 4 arrived. Design and safety: ``ncclep_py.ht_memory_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code
from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, WAIT_ARRIVED, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ht_dispatch"]

PARAMETERS = ("window", "rank", "local", "record", "maps", "tokens", "weights", "scales", "num_tokens", "rows", "cleared", "forward", "global_ids",
              "rows_window", "rows_at", "slot", "header", "handle", "signature", "status", "timeout")
"""Run-time values of a launch, all 64-bit integers; `forward` is 0 in a backward pass, which has no weights; `rows` are all a caller sees,
ids and weights of the first `cleared` of them are defined; rows go to `rows_at` of `rows_window`: the slot, or a window of the caller's."""


def make_ht_dispatch(shape: HTShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, BY_RANK, LOCAL_EXPERTS = (
        shape.num_ranks, shape.num_experts, shape.num_topk, shape.sent_bytes, shape.by_rank, shape.num_local)
    SCALE_BYTES, SCALES = shape.wire.scale_bytes, shape.window.recv_rows * shape.sent_bytes
    HEADS, ARRIVED, IDX, WEIGHTS = shape.window.heads, shape.window.arrived, shape.window.slot_idx, shape.window.slot_weights
    EPOCH, BLOCKS_DONE, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.fail
    REFUSED, MISMATCH = int(Code.REFUSED), int(Code.MISMATCH)
    HEADER, ZONES, ROUTES, PLACES = shape.maps.header, shape.maps.zones, shape.maps.routes, shape.maps.places
    block_idx, warp_idx, read_epoch, advance_epoch = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.advance_epoch
    end_token, warp_token, token_step = ops.end_token, ops.warp_token, ops.token_step
    begin_vector, end_vector = ops.begin_vector, ops.end_vector
    publish_head, wait_heads, publish_abort = ops.publish_head, ops.wait_heads, ops.publish_abort
    publish_arrived, wait_arrived = ops.publish_arrived, ops.wait_arrived
    last_block, op_code, clear_fail, store_header = ops.last_block, ops.op_code, ops.clear_fail, ops.store_header
    map_status, scatter_row, scatter_weights = ops.ht_map_status, ops.ht_scatter_row, ops.ht_scatter_weights
    zero_pads, clear_ids, check_rows = ops.ht_zero_pads, ops.ht_clear_ids, ops.ht_check_rows
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ht_dispatch(window, rank, local, record, maps, tokens, weights, scales, num_tokens, rows, cleared, forward, global_ids,  # noqa: ANN001, ANN202
                    rows_window, rows_at, slot, header, handle, signature, status, timeout):
        trace = trace_begin()
        epoch, fail = read_epoch(local + EPOCH), local + FAIL
        # ---- 1 head: everything my stream did before is done ---------------------------------------------------------
        trace = stamp(trace, HEAD)
        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, map_status(maps + HEADER, handle, status))
        # ---- 2 wait: nobody's memory is touched before all ranks are here ----------------------------------------------
        trace = stamp(trace, WAIT_HEADS)
        code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)
        # ---- 3 rows --------------------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            begin, stop = begin_vector(num_tokens, ROW_BYTES), end_vector(num_tokens, ROW_BYTES)
            token, end, step = warp_token(num_tokens), end_token(num_tokens), token_step(num_tokens)
            while token < end:   # no range: its length is a 64-bit division
                scatter_row(rows_window, rows_at, tokens, maps + ROUTES, token, TOPK, ROW_BYTES, begin, stop)
                if begin == 0:
                    if SCALE_BYTES > 0:
                        scatter_row(rows_window, rows_at + SCALES, scales, maps + ROUTES, token, TOPK, SCALE_BYTES, 0, SCALE_BYTES // 16)
                    if forward != 0:
                        scatter_weights(window, slot + IDX, slot + WEIGHTS, weights, maps + ROUTES, maps + PLACES, token, TOPK, EXPERTS, RANKS,
                                        BY_RANK, global_ids)
                token += step
            if BY_RANK == 0:
                zero_pads(rows_window, rows_at, maps + ZONES, rank, LOCAL_EXPERTS, ROW_BYTES)
                if SCALE_BYTES > 0:
                    zero_pads(rows_window, rows_at + SCALES, maps + ZONES, rank, LOCAL_EXPERTS, SCALE_BYTES)
                if forward != 0:
                    zero_pads(window, slot + WEIGHTS, maps + ZONES, rank, LOCAL_EXPERTS, 4)
            elif forward != 0:
                clear_ids(window, slot + IDX, slot + WEIGHTS, maps + ZONES, rank, LOCAL_EXPERTS, TOPK, cleared)
        # ---- 4 arrived: the last block speaks for the rank -------------------------------------------------------------
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            trace = stamp(trace, WAIT_ARRIVED)
            code = op_code(fail, epoch)
            if code == 0:
                if warp_idx() == 0:
                    publish_arrived(window, ARRIVED, rank, RANKS, epoch)
                code = wait_arrived(window, ARRIVED, rank, RANKS, epoch, fail, record, timeout)
            if warp_idx() == 0:
                if code != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, epoch, fail)
                    if code != REFUSED and code != MISMATCH:   # in these nobody wrote a row: what the slot held it still holds
                        store_header(header, epoch, 0)
                else:
                    check_rows(maps + ZONES, LOCAL_EXPERTS, rows, rank, epoch, fail, record)
                    store_header(header, epoch, handle)
                clear_fail(fail)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ht_dispatch
