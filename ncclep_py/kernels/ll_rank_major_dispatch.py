"""Low-latency dispatch, RANK_MAJOR: every token's row once to each rank that hosts any of its experts, straight into its final place.

Phases: 1 head, 2 rows assigned, 3 wait (heads of all ranks), 4 rows with their ids and weights, 5 arrived. A row's place at its rank is
[my rank, number of my earlier tokens to that rank], which nobody else has a say in: no counts travel before the rows, and how many rows there are
travels with ARRIVED. The order is the same every run. Safety: ``ncclep_py.memory_map``; ids of unused rows are set to -1 by their owner once all
have arrived.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import COUNT, END, HEAD, MEET, ROWS, WAIT_ARRIVED, WAIT_HEADS
from ncclep_py.memory_map import FLIGHT_FAIL

__all__ = ["PARAMETERS", "make_ll_rank_major_dispatch"]

PARAMETERS = ("window", "rank", "local", "record", "tokens", "topk_idx", "topk_weights", "num_tokens", "src_rank_counters", "global_ids",
              "scales", "payload", "place", "slot", "table", "header", "origins", "kept", "flight", "arrived", "handle", "signature", "status",
              "timeout")
"""Run-time values of a launch, all 64-bit integers. `payload`, `place`: the window and offset of the rows, the group's own or a user's (ids and
weights are in `slot`); `arrived`: window offset of the words that say so; `flight`: only of a send half."""


def make_ll_rank_major_dispatch(shape: KernelShape, ops: Vocabulary, send_only: bool = False) -> Callable[..., None]:
    """The dispatch kernel for one shape, over one implementation of the vocabulary; `send_only`: the send half of a staged dispatch."""
    SEND = send_only
    RANKS, EXPERTS, TOPK, ROW_BYTES, IDX_BYTES = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, shape.idx_bytes
    SENT_BYTES, SCALE_BYTES, PIECE_BYTES, SCALES = shape.sent_bytes, shape.wire.scale_bytes, shape.piece_bytes, shape.slot_scales
    QUANTISE, ROUND, GIVEN_BYTES, VECTORS = shape.wire.quantise, int(shape.wire.round_scales), shape.given_bytes, shape.piece_vectors
    PLANE_ROWS, HEADS = shape.window.plane_rows, shape.window.heads
    IDS, WEIGHTS = shape.window.recv_ids, shape.window.recv_weights
    EPOCH, BLOCKS_DONE, FAIL = shape.local.epoch, shape.local.blocks_done, shape.local.fail
    REFUSED, MISMATCH = int(Code.REFUSED), int(Code.MISMATCH)
    block_idx, warp_idx, read_epoch, advance_epoch = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.advance_epoch
    first_token, end_token, warp_token, token_step = ops.first_token, ops.end_token, ops.warp_token, ops.token_step
    begin_vector, end_vector, quantise_row = ops.begin_vector, ops.end_vector, ops.quantise_row
    publish_head, wait_heads, publish_abort = ops.publish_head, ops.wait_heads, ops.publish_abort
    count_ranks, assign_ranks, send_routing = ops.count_ranks, ops.assign_ranks, ops.send_routing
    fetch_row, scatter_row = ops.fetch_row, ops.scatter_row
    publish_arrived_rows, wait_arrived, take_arrived_rows = ops.publish_arrived_rows, ops.wait_arrived, ops.take_arrived_rows
    last_block, op_code, clear_fail, store_header = ops.last_block, ops.op_code, ops.clear_fail, ops.store_header
    trace_begin, stamp = ops.trace_begin, ops.stamp
    # for staged combines only: where each row came from, and how many there are
    STAGED, PLACES = shape.window.num_staging > 0, PLANE_ROWS // RANKS * TOPK
    store_origins, keep_counters = ops.store_origins, ops.keep_counters

    def ll_rank_major_dispatch(window, rank, local, record, tokens, topk_idx, topk_weights, num_tokens, src_rank_counters,  # noqa: ANN001, ANN202
                               global_ids, scales, payload, place, slot, table, header, origins, kept, flight, arrived, handle, signature,
                               status, timeout):
        trace = trace_begin()
        epoch, fail = read_epoch(local + EPOCH), flight + FLIGHT_FAIL if SEND else local + FAIL
        first, end = first_token(num_tokens), end_token(num_tokens)
        # ---- 1 head: everything my stream did before is done ---------------------------------------------------------
        trace = stamp(trace, HEAD)
        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, status)
        # ---- 2 rows assigned, and the first row of each warp fetched: while the heads travel ------------------------------
        trace = stamp(trace, COUNT)
        token, step = warp_token(num_tokens), token_step(num_tokens)
        begin, stop = begin_vector(num_tokens, PIECE_BYTES), end_vector(num_tokens, PIECE_BYTES)
        reserved = 3 * RANKS + 3 * (end - first) * TOPK
        fetch_row(tokens, token, end, reserved, GIVEN_BYTES, begin * VECTORS, stop * VECTORS)
        count_ranks(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, RANKS, first)
        assign_ranks(topk_idx, IDX_BYTES, topk_weights, TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, rank)
        # ---- 3 wait: nobody's memory is touched before all ranks are here ----------------------------------------------
        trace = stamp(trace, WAIT_HEADS)
        code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)
        # ---- 4 rows --------------------------------------------------------------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            at = token
            while at < end:   # no range: its length is a 64-bit division
                if QUANTISE:
                    quantise_row(payload, place, place + SCALES, tokens, at, token, first, reserved, TOPK, RANKS, RANKS,
                                 PLANE_ROWS, ROW_BYTES, ROUND, begin, stop)
                else:
                    scatter_row(payload, place, tokens, at, token, first, reserved, TOPK, RANKS, RANKS, PLANE_ROWS, SENT_BYTES, begin, stop)
                    if SCALE_BYTES > 0:
                        scatter_row(payload, place + SCALES, scales, at, -1, first, reserved, TOPK, RANKS, RANKS, PLANE_ROWS, SCALE_BYTES,
                                    begin_vector(num_tokens, SCALE_BYTES), end_vector(num_tokens, SCALE_BYTES))
                if begin == 0:   # of a row's pieces the first
                    send_routing(window, slot + IDS, slot + WEIGHTS, table, at, first, end, TOPK, EXPERTS, RANKS, PLANE_ROWS, global_ids)
                    if STAGED:
                        store_origins(window, origins, at, first, TOPK, RANKS, RANKS, PLANE_ROWS, rank, PLACES)
                at += step
        # ---- 5 arrived: the last block speaks for the rank -------------------------------------------------------------
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            trace = stamp(trace, WAIT_ARRIVED)
            code = op_code(fail, epoch)
            if code == 0:
                if warp_idx() == 0:
                    publish_arrived_rows(window, arrived, rank, RANKS, epoch)
            if code == 0 and not SEND:
                code = wait_arrived(window, arrived, rank, RANKS, epoch, fail, record, timeout)
            if code == 0 and not SEND:
                take_arrived_rows(window, arrived, slot + IDS, rank, RANKS, TOPK, PLANE_ROWS, epoch, src_rank_counters)
                if STAGED:
                    keep_counters(src_rank_counters, kept, RANKS)
            if warp_idx() == 0:
                if code == 0:
                    store_header(header, epoch, handle)
                else:
                    publish_abort(window, HEADS, arrived, rank, RANKS, epoch, fail)
                    if code != REFUSED and code != MISMATCH:   # in these nobody wrote a row: what the slot held it still holds
                        store_header(header, epoch, 0)
                if SEND:
                    store_header(flight, epoch, handle)
                else:
                    clear_fail(fail)
                advance_epoch(local + EPOCH, epoch)
        stamp(trace, END)

    return ll_rank_major_dispatch
