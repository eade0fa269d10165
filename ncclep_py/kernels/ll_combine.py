"""Low-latency combine: every rank pulls its tokens' rows from the experts' ranks (EXPERT_MAJOR: K rows, RANK_MAJOR: one per rank) and adds them up.

Phases: 1 head, 2 wait, 3 rows. Numerics: fp32 accumulator from +0, one fused multiply-add per k in ascending order (positions without a row are
skipped; RANK_MAJOR: an addition, no weights), one rounding to the token type; the same bits every run.

My return does not mean that peers have read my rows: their owner may
overwrite them only after the head wait of a later operation (``ncclep_py.memory_map``, I2).
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ll_combine"]

PARAMETERS = ("window", "rank", "local", "record", "weights", "out", "num_tokens", "payload", "slot", "table", "header", "handle", "signature",
              "status", "timeout")
"""Run-time values of a launch, all 64-bit integers."""


def make_ll_combine(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The combine kernel for one shape, over one implementation of the vocabulary."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, TYPE = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, int(shape.token_type)
    PLANE_ROWS, HEADS, ARRIVED = shape.window.plane_rows, shape.window.heads, shape.window.arrived
    EPOCH, BLOCKS_DONE, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.fail
    block_idx, warp_idx, read_epoch, advance_epoch = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.advance_epoch
    end_token, warp_token, token_step = ops.end_token, ops.warp_token, ops.token_step
    begin_vector, end_vector = ops.begin_vector, ops.end_vector
    fetch_routing, gather_row, sum_row = ops.fetch_routing, ops.gather_row, ops.sum_row
    RANK_MAJOR = shape.layout is Layout.RANK_MAJOR
    publish_head, wait_heads, publish_abort = ops.publish_head, ops.wait_heads, ops.publish_abort
    read_header, header_status, check_header = ops.read_header, ops.header_status, ops.check_header
    last_block, op_code, clear_fail = ops.last_block, ops.op_code, ops.clear_fail
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_combine(window, rank, local, record, weights, out, num_tokens, payload, slot, table, header, handle, signature,  # noqa: ANN001, ANN202
                   status, timeout):
        trace = trace_begin()
        held, epoch, fail = read_header(header), read_epoch(local + EPOCH), local + FAIL
        # ---- 1 head: my experts' rows are written ----------------------------------------------------------------------
        trace = stamp(trace, HEAD)
        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, header_status(held, handle, status))
        # ---- 2 wait; meanwhile what only this rank wrote comes ------------------------------------------------------------
        token, end = warp_token(num_tokens), end_token(num_tokens)
        step = token_step(num_tokens)
        begin, stop = begin_vector(num_tokens, ROW_BYTES), end_vector(num_tokens, ROW_BYTES)
        if not RANK_MAJOR:
            fetch_routing(table, weights, token, end, TOPK)
        trace = stamp(trace, WAIT_HEADS)
        if status == 0:
            check_header(held, handle, rank, epoch, fail, record)   # all refuse it by my HEAD; my record says more
        code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)
        # ---- 3 rows ----------------------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            at = token
            while at < end:   # no range: its length is a 64-bit division
                if RANK_MAJOR:
                    sum_row(payload, slot, table, out, at, TOPK, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, begin, stop)
                else:
                    gather_row(payload, slot, table, weights, out, at, token, TOPK, EXPERTS, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, begin, stop)
                at += step
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            code = op_code(fail, epoch)
            if warp_idx() == 0:
                if code != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, epoch, fail)
                clear_fail(fail)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ll_combine
