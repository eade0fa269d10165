"""High-throughput combine, FLAT and EXPERT_MAJOR, forward and backward: every rank pulls the rows of its tokens and adds them up.

Phases: 1 head, 2 wait, 3 rows. The operation ends without a rendezvous: the next one's HEAD says that this rank has pulled.
Design and safety: ``ncclep_py.ht_memory_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ht_combine"]

PARAMETERS = ("window", "rank", "local", "record", "maps", "out", "grads", "num_tokens", "rows", "rows_window", "rows_at", "slot",
              "header", "handle", "signature", "status", "timeout")
"""Run-time values of a launch, all 64-bit integers; `grads` is 0 in a forward pass, `rows` are all the caller
gave, -1 for an operation that only meets."""


def make_ht_combine(shape: HTShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, TYPE, BY_RANK = (
        shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, int(shape.token_type), shape.by_rank)
    LOCAL_EXPERTS = shape.num_local
    HEADS, ARRIVED, WEIGHTS = shape.window.heads, shape.window.arrived, shape.window.slot_weights
    EPOCH, BLOCKS_DONE, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.fail
    HEADER, ZONES, ROUTES, PLACES = shape.maps.header, shape.maps.zones, shape.maps.routes, shape.maps.places
    block_idx, warp_idx, read_epoch, advance_epoch = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.advance_epoch
    end_token, warp_token, token_step = ops.end_token, ops.warp_token, ops.token_step
    begin_vector, end_vector = ops.begin_vector, ops.end_vector
    publish_head, wait_heads, publish_abort = ops.publish_head, ops.wait_heads, ops.publish_abort
    read_header, header_status, check_header = ops.read_header, ops.header_status, ops.check_header
    last_block, op_code, clear_fail = ops.last_block, ops.op_code, ops.clear_fail
    trace_begin, stamp = ops.trace_begin, ops.stamp
    map_status, gather_row, gather_weights, check_rows = ops.ht_map_status, ops.ht_gather_row, ops.ht_gather_weights, ops.ht_check_rows

    def ht_combine(window, rank, local, record, maps, out, grads, num_tokens, rows, rows_window, rows_at, slot, header,  # noqa: ANN001, ANN202
                   handle, signature, status, timeout):
        trace = trace_begin()
        held, epoch, fail = read_header(header), read_epoch(local + EPOCH), local + FAIL
        state = map_status(maps + HEADER, handle, status)
        # ---- 1 head: my experts' rows are written ----------------------------------------------------------------------
        trace = stamp(trace, HEAD)
        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, header_status(held, handle, state))
        # ---- 2 wait ----------------------------------------------------------------------------------------------------
        trace = stamp(trace, WAIT_HEADS)
        if state == 0:
            check_header(held, handle, rank, epoch, fail, record)   # all refuse it by my HEAD; my record says more
        code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)
        # ---- 3 rows ----------------------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            begin, stop = begin_vector(num_tokens, ROW_BYTES), end_vector(num_tokens, ROW_BYTES)
            token, end, step = warp_token(num_tokens), end_token(num_tokens), token_step(num_tokens)
            while token < end:   # no range: its length is a 64-bit division
                gather_row(rows_window, rows_at, maps + ROUTES, out, token, TOPK, ROW_BYTES, TYPE, begin, stop)
                if begin == 0:
                    if grads != 0:
                        gather_weights(window, slot + WEIGHTS, maps + PLACES, grads, token, TOPK, EXPERTS, RANKS, BY_RANK)
                token += step
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            code = op_code(fail, epoch)
            if warp_idx() == 0:
                if code != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, epoch, fail)
                elif rows >= 0:
                    check_rows(maps + ZONES, LOCAL_EXPERTS, rows, rank, epoch, fail, record)
                clear_fail(fail)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ht_combine
