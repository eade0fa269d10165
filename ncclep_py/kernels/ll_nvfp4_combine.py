"""Low-latency combine whose rows travel as NVFP4: every rank packs the rows it received, in place, then all pull and add up packed rows.

Phases: 1 pack, 2 head (by the last block: all rows of this rank are packed), 3 wait, 4 rows. A block of 16 columns has an E4M3 scale, a row an fp32
scale that the caller gives. Numerics: ``reference.quantize_nvfp4``; sums as in `ll_combine`, each term fma(q, scale / row scale * weight, sum).
Packing writes rows before the heads of this operation, as experts do: nobody pulls them before my head (``ncclep_py.memory_map``, I2).
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import END, HEAD, MEET, PACK, ROWS, WAIT_HEADS

__all__ = ["PARAMETERS", "make_ll_nvfp4_combine"]

PARAMETERS = ("window", "rank", "local", "record", "row_scales", "counters", "weights", "out", "num_tokens", "payload", "slot", "table", "header",
              "handle", "signature", "status", "timeout")
"""Run-time values of a launch, all 64-bit integers."""


def make_ll_nvfp4_combine(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The combine kernel for one shape, over one implementation of the vocabulary."""
    RANKS, TOPK, ROW_BYTES, PLANE_ROWS = shape.num_ranks, shape.num_topk, shape.row_bytes, shape.window.plane_rows
    rank_major = shape.layout is Layout.RANK_MAJOR
    PLANES_OF_ALL = RANKS if rank_major else shape.num_experts
    PLANES, CAPACITY = (RANKS, PLANE_ROWS // RANKS) if rank_major else (shape.num_experts // RANKS, PLANE_ROWS)
    HEADS, ARRIVED, PIECE_BYTES = shape.window.heads, shape.window.arrived, ROW_BYTES // 64
    EPOCH, BLOCKS_DONE, BLOCKS_PACKED, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.blocks_packed, shape.local.fail
    warp_idx, read_epoch, advance_epoch = ops.warp_idx, ops.read_epoch, ops.advance_epoch
    end_token, warp_token, token_step = ops.end_token, ops.warp_token, ops.token_step
    begin_vector, end_vector, pack_rows, sum_packed_row = ops.begin_vector, ops.end_vector, ops.pack_rows, ops.sum_packed_row
    publish_head, wait_heads, publish_abort = ops.publish_head, ops.wait_heads, ops.publish_abort
    read_header, header_status, check_header = ops.read_header, ops.header_status, ops.check_header
    last_block, op_code, clear_fail = ops.last_block, ops.op_code, ops.clear_fail
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_nvfp4_combine(window, rank, local, record, row_scales, counters, weights, out, num_tokens, payload, slot, table,  # noqa: ANN001, ANN202
                         header, handle, signature, status, timeout):
        trace = trace_begin()
        held, epoch, fail = read_header(header), read_epoch(local + EPOCH), local + FAIL
        # ---- 1 pack: my experts' rows ----------------------------------------------------------------------------------
        trace = stamp(trace, PACK)
        code = 0
        if status == 0:
            code = check_header(held, handle, rank, epoch, fail, record)
            if code == 0:
                pack_rows(payload, slot, rank, counters, row_scales, PLANES, CAPACITY, ROW_BYTES)
        # ---- 2 head: all blocks have packed ----------------------------------------------------------------------------
        trace = stamp(trace, HEAD)
        if last_block(local + BLOCKS_PACKED) == 1:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, header_status(held, handle, status))
        # ---- 3 wait ----------------------------------------------------------------------------------------------------
        trace = stamp(trace, WAIT_HEADS)
        if wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout) != 0:
            code = 1
        # ---- 4 rows ----------------------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            begin, stop = begin_vector(num_tokens, PIECE_BYTES), end_vector(num_tokens, PIECE_BYTES)
            token, end, step = warp_token(num_tokens), end_token(num_tokens), token_step(num_tokens)
            while token < end:   # no range: its length is a 64-bit division
                sum_packed_row(payload, slot, table, weights, out, token, TOPK, PLANES_OF_ALL, RANKS, PLANE_ROWS, ROW_BYTES, begin, stop)
                token += step
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            code = op_code(fail, epoch)
            if warp_idx() == 0:
                if code != 0:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, epoch, fail)
                clear_fail(fail)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ll_nvfp4_combine
