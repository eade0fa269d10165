"""Low-latency dispatch, EXPERT_MAJOR: every row straight into its final place at its expert's rank.

Phases: 1 head, 2 count, 3 wait (heads of all ranks, counts of lower ranks), 4 rows, 5 arrived. The row of (token, k) in its expert's plane is
the number of earlier (source rank, token, k) with the same expert, so the order is the same every run. Safety: ``ncclep_py.memory_map``.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import COUNT, END, HEAD, MEET, ROWS, WAIT_ARRIVED, WAIT_COUNTS, WAIT_HEADS
from ncclep_py.memory_map import FLIGHT_FAIL

__all__ = ["PARAMETERS", "make_ll_dispatch"]

PARAMETERS = ("window", "rank", "local", "record", "tokens", "topk_idx", "num_tokens", "expert_counters", "scales", "payload", "place", "table",
              "header", "origins", "kept", "flight", "flying", "handle", "signature", "status", "timeout")
"""Run-time values of a launch, all 64-bit integers. `payload`, `place`: window and offset of the rows, the group's own or a user's;
`flight`, `flying`: only of a send half, see ``ll_staged``."""


def make_ll_dispatch(shape: KernelShape, ops: Vocabulary, send_only: bool = False) -> Callable[..., None]:
    """The dispatch kernel for one shape, over one implementation of the vocabulary; `send_only`: the send half of a staged dispatch."""
    SEND = send_only
    RANKS, EXPERTS, TOPK, ROW_BYTES, IDX_BYTES = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, shape.idx_bytes
    SENT_BYTES, SCALE_BYTES, PIECE_BYTES, SCALES = shape.sent_bytes, shape.wire.scale_bytes, shape.piece_bytes, shape.slot_scales
    QUANTISE, ROUND, GIVEN_BYTES, VECTORS = shape.wire.quantise, int(shape.wire.round_scales), shape.given_bytes, shape.piece_vectors
    PLANE_ROWS, HEADS, ARRIVED, COUNTS = shape.window.plane_rows, shape.window.heads, shape.window.arrived, shape.window.counts
    EPOCH, BLOCKS_DONE, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.fail
    REFUSED, MISMATCH = int(Code.REFUSED), int(Code.MISMATCH)
    block_idx, warp_idx, read_epoch, advance_epoch = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.advance_epoch
    first_token, end_token, token_part = ops.first_token, ops.end_token, ops.token_part
    warp_token, token_step, begin_vector, end_vector = ops.warp_token, ops.token_step, ops.begin_vector, ops.end_vector
    publish_head, wait_heads, publish_abort = ops.publish_head, ops.wait_heads, ops.publish_abort
    count_experts, publish_counts, wait_counts, assign_rows = ops.count_experts, ops.publish_counts, ops.wait_counts, ops.assign_rows
    fetch_row, scatter_row, quantise_row = ops.fetch_row, ops.scatter_row, ops.quantise_row
    publish_arrived, wait_arrived = ops.publish_arrived, ops.wait_arrived
    last_block, op_code, clear_fail, store_header = ops.last_block, ops.op_code, ops.clear_fail, ops.store_header
    trace_begin, stamp = ops.trace_begin, ops.stamp
    # for staged combines only: where each row came from, and how many there are
    STAGED, COUNT_BANK = shape.window.num_staging > 0, shape.window.count_bank_bytes
    LOCAL_EXPERTS, PLACES = EXPERTS // RANKS, PLANE_ROWS // RANKS * TOPK
    count_bank, store_origins, keep_counters, outcome = ops.count_bank, ops.store_origins, ops.keep_counters, ops.outcome

    def ll_dispatch(window, rank, local, record, tokens, topk_idx, num_tokens, expert_counters, scales, payload, place, table, header,  # noqa: ANN001, ANN202
                    origins, kept, flight, flying, handle, signature, status, timeout):
        trace = trace_begin()
        epoch, fail = read_epoch(local + EPOCH), flight + FLIGHT_FAIL if SEND else local + FAIL
        first, end, part = first_token(num_tokens), end_token(num_tokens), token_part(num_tokens)
        counts = count_bank(COUNTS, COUNT_BANK, epoch)
        # ---- 1 head: everything my stream did before is done ---------------------------------------------------------
        trace = stamp(trace, HEAD)
        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, status)
        # ---- 2 count: my rows per expert, told to everybody; meanwhile the first row of each warp comes ------------------
        trace = stamp(trace, COUNT)
        count_experts(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, first, end)
        publish_counts(window, counts, rank, RANKS, EXPERTS, epoch)
        token, step = warp_token(num_tokens), token_step(num_tokens)
        begin, stop = begin_vector(num_tokens, PIECE_BYTES), end_vector(num_tokens, PIECE_BYTES)
        reserved = 3 * EXPERTS + (end - first) * TOPK
        fetch_row(tokens, token, end, reserved, GIVEN_BYTES, begin * VECTORS, stop * VECTORS)
        # ---- 3 wait: nobody's memory is touched before all ranks are here ----------------------------------------------
        trace = stamp(trace, WAIT_HEADS)
        code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)
        trace = stamp(trace, WAIT_COUNTS)
        if code == 0:
            code = wait_counts(window, counts, rank, RANKS, EXPERTS, epoch, PLANE_ROWS, expert_counters, fail, record, timeout)
        # ---- 4 rows --------------------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            assign_rows(topk_idx, IDX_BYTES, TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, part, table, rank, epoch, fail, record)
            at = token
            while at < end:   # no range: its length is a 64-bit division
                if QUANTISE:
                    quantise_row(payload, place, place + SCALES, tokens, at, token, first, reserved, TOPK, EXPERTS, RANKS,
                                 PLANE_ROWS, ROW_BYTES, ROUND, begin, stop)
                else:
                    scatter_row(payload, place, tokens, at, token, first, reserved, TOPK, EXPERTS, RANKS, PLANE_ROWS, SENT_BYTES, begin, stop)
                    if SCALE_BYTES > 0:
                        scatter_row(payload, place + SCALES, scales, at, -1, first, reserved, TOPK, EXPERTS, RANKS, PLANE_ROWS, SCALE_BYTES,
                                    begin_vector(num_tokens, SCALE_BYTES), end_vector(num_tokens, SCALE_BYTES))
                if STAGED and begin == 0:   # the first of the warps on this row
                    store_origins(window, origins, at, first, TOPK, EXPERTS, RANKS, PLANE_ROWS, rank, PLACES)
                at += step
        # ---- 5 arrived: the last block speaks for the rank -------------------------------------------------------------
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            trace = stamp(trace, WAIT_ARRIVED)
            code = op_code(fail, epoch)
            if code == 0:
                if STAGED:
                    keep_counters(expert_counters, kept, LOCAL_EXPERTS)
            if code == 0 and not SEND:
                if warp_idx() == 0:
                    publish_arrived(window, ARRIVED, rank, RANKS, epoch)
                code = wait_arrived(window, ARRIVED, rank, RANKS, epoch, fail, record, timeout)
            if warp_idx() == 0:
                if code == 0:
                    store_header(header, epoch, handle)
                else:
                    publish_abort(window, HEADS, ARRIVED, rank, RANKS, epoch, fail)
                    if code != REFUSED and code != MISMATCH:   # in these nobody wrote a row: what the slot held it still holds
                        store_header(header, epoch, 0)
                if SEND:
                    store_header(flight, epoch, handle)
                    publish_head(window, flying, rank, RANKS, epoch, signature, outcome(fail, epoch, status))
                else:
                    clear_fail(fail)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ll_dispatch
