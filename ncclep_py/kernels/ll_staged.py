"""Staged operations: a send half and a complete half, between which the multiprocessors are free.

A staged dispatch is a fused one (``ll_dispatch``, ``ll_rank_major_dispatch``) cut before its wait for ARRIVED. A staged combine moves rows the
other way: the experts' ranks push each row to its place in a staging slot at its source, and the complete half adds them up there, in the order
and with the bits of ``ll_combine``. Its send half waits only until every rank has emptied the staging slot of its last use. Safety:
``ncclep_py.memory_map``, S1 to S6.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.kernels.ll_dispatch import make_ll_dispatch
from ncclep_py.kernels.ll_rank_major_dispatch import make_ll_rank_major_dispatch
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, WAIT_ARRIVED, WAIT_HEADS
from ncclep_py.memory_map import FLIGHT_FAIL, FLIGHT_NEXT

__all__ = ["COMBINE_COMPLETE_PARAMETERS", "COMBINE_SEND_PARAMETERS", "DISPATCH_COMPLETE_PARAMETERS", "RANK_MAJOR_COMPLETE_PARAMETERS",
           "make_ll_combine_complete", "make_ll_combine_send", "make_ll_dispatch_complete", "make_ll_dispatch_send",
           "make_ll_rank_major_complete", "make_ll_rank_major_send"]

DISPATCH_COMPLETE_PARAMETERS = ("window", "rank", "local", "record", "header", "flight", "flying", "signature", "timeout")
RANK_MAJOR_COMPLETE_PARAMETERS = ("window", "rank", "local", "record", "src_rank_counters", "slot", "header", "kept", "flight", "arrived", "timeout")
COMBINE_SEND_PARAMETERS = ("window", "rank", "local", "record", "rows", "num_tokens", "table", "copied", "header", "origins", "kept", "staging",
                           "flight", "flying", "released", "handle", "signature", "status", "timeout")
COMBINE_COMPLETE_PARAMETERS = ("window", "rank", "local", "record", "weights", "out", "num_tokens", "copied", "staging", "flight", "flying",
                               "released", "signature", "timeout")
"""Run-time values of a launch, all 64-bit integers. `flight`: address of the flight in the local block; `flying`: window offset of its words;
`arrived`: window offset of those of a RANK_MAJOR dispatch."""


def make_ll_dispatch_send(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The send half of an EXPERT_MAJOR dispatch: everything but the wait for other ranks' rows."""
    return _named("ll_dispatch_send", make_ll_dispatch(shape, ops, send_only=True))


def make_ll_rank_major_send(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The send half of a RANK_MAJOR dispatch."""
    return _named("ll_rank_major_send", make_ll_rank_major_dispatch(shape, ops, send_only=True))


def _named(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def make_ll_dispatch_complete(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The complete half of dispatch: wait until all rows are here."""
    RANKS, BLOCKS_DONE = shape.num_ranks, shape.local.blocks_done
    warp_idx, read_epoch, publish_head, wait_heads = ops.warp_idx, ops.read_epoch, ops.publish_head, ops.wait_heads
    last_block, op_code, outcome, store_header = ops.last_block, ops.op_code, ops.outcome, ops.store_header
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_dispatch_complete(window, rank, local, record, header, flight, flying, signature, timeout):  # noqa: ANN001, ANN202
        trace = stamp(trace_begin(), WAIT_ARRIVED)
        epoch, fail = read_epoch(flight), flight + FLIGHT_FAIL
        wait_heads(window, flying, rank, RANKS, epoch, signature, fail, record, timeout)
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            if op_code(fail, epoch) != 0:
                if warp_idx() == 0:
                    told = outcome(fail, epoch, 0)
                    if told != 0:
                        publish_head(window, flying, rank, RANKS, epoch, signature, told)
                    store_header(header, epoch, 0)   # nobody may combine these rows
        stamp(trace, END)

    return ll_dispatch_complete


def make_ll_rank_major_complete(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The complete half of a RANK_MAJOR dispatch: wait for all rows, take their number, clear the ids of unused rows."""
    RANKS, TOPK, PLANE_ROWS, IDS, BLOCKS_DONE = (
        shape.num_ranks, shape.num_topk, shape.window.plane_rows, shape.window.recv_ids, shape.local.blocks_done)
    warp_idx, read_epoch, wait_arrived, take_arrived_rows = ops.warp_idx, ops.read_epoch, ops.wait_arrived, ops.take_arrived_rows
    keep_counters, last_block, op_code, store_header = ops.keep_counters, ops.last_block, ops.op_code, ops.store_header
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_rank_major_complete(window, rank, local, record, src_rank_counters, slot, header, kept, flight, arrived, timeout):  # noqa: ANN001, ANN202
        trace = stamp(trace_begin(), MEET)
        epoch, fail = read_epoch(flight), flight + FLIGHT_FAIL
        if last_block(local + BLOCKS_DONE) == 1:
            trace = stamp(trace, WAIT_ARRIVED)
            code = op_code(fail, epoch)   # a refusal or mismatch ends the send half of every rank, and nothing arrives
            if code == 0:
                code = wait_arrived(window, arrived, rank, RANKS, epoch, fail, record, timeout)
            if code == 0:
                take_arrived_rows(window, arrived, slot + IDS, rank, RANKS, TOPK, PLANE_ROWS, epoch, src_rank_counters)
                keep_counters(src_rank_counters, kept, RANKS)
            if warp_idx() == 0:
                if code != 0:
                    store_header(header, epoch, 0)   # nobody may combine these rows
        stamp(trace, END)

    return ll_rank_major_complete


def make_ll_combine_send(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The send half of combine: every row to its place at its source."""
    RANKS, EXPERTS, TOPK, ROW_BYTES = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes
    PLANE_ROWS, BLOCKS_DONE = shape.window.plane_rows, shape.local.blocks_done
    PLACES, PLANES = PLANE_ROWS // RANKS * TOPK, EXPERTS // RANKS
    if shape.layout is Layout.RANK_MAJOR:   # planes are source ranks, not local experts
        PLANES, PLANE_ROWS = RANKS, PLANE_ROWS // RANKS
    warp_idx, read_epoch, advance_epoch, store_header = ops.warp_idx, ops.read_epoch, ops.advance_epoch, ops.store_header
    end_token, warp_token, token_step, begin_vector, end_vector = (
        ops.end_token, ops.warp_token, ops.token_step, ops.begin_vector, ops.end_vector)
    wait_arrived, read_header, check_header = ops.wait_arrived, ops.read_header, ops.check_header
    copy_table, count_rows, push_row = ops.copy_table, ops.count_rows, ops.push_row
    last_block, outcome, publish_head = ops.last_block, ops.outcome, ops.publish_head
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_combine_send(window, rank, local, record, rows, num_tokens, table, copied, header, origins,  # noqa: ANN001, ANN202
                        kept, staging, flight, flying, released, handle, signature, status, timeout):
        trace = stamp(trace_begin(), WAIT_HEADS)
        epoch, fail, held = read_epoch(flight + FLIGHT_NEXT), flight + FLIGHT_FAIL, read_header(header)
        # ---- 1 wait: every rank has emptied this staging slot, usually long ago ----------------------------------------
        code = wait_arrived(window, released, rank, RANKS, epoch, fail, record, timeout)
        if code == 0:
            if status == 0:
                code = check_header(held, handle, rank, epoch, fail, record)
        # ---- 2 rows, and what the complete half must know of them later -----------------------------------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            if status == 0:
                copy_table(table, copied, num_tokens, TOPK)
                num_rows = count_rows(kept, PLANES, PLANE_ROWS)
                begin, stop = begin_vector(num_rows, ROW_BYTES), end_vector(num_rows, ROW_BYTES)
                row, end, step = warp_token(num_rows), end_token(num_rows), token_step(num_rows)
                while row < end:   # no range: its length is a 64-bit division
                    push_row(window, origins, rows, staging, row, PLANES, PLANE_ROWS, rank, PLACES, ROW_BYTES, begin, stop)
                    row += step
        # ---- 3 the last block speaks for the rank, and nobody waits ------------------------------------------------------
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            trace = stamp(trace, HEAD)
            if warp_idx() == 0:
                store_header(flight, epoch, handle)
                publish_head(window, flying, rank, RANKS, epoch, signature, outcome(fail, epoch, status))
                advance_epoch(flight + FLIGHT_NEXT, epoch)
        stamp(trace, END)

    return ll_combine_send


def make_ll_combine_complete(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The complete half of combine: wait for all rows, add them up, give the staging slot back."""
    RANKS, TOPK, ROW_BYTES, TYPE = shape.num_ranks, shape.num_topk, shape.row_bytes, int(shape.token_type)
    BLOCKS_DONE = shape.local.blocks_done
    warp_idx, read_epoch = ops.warp_idx, ops.read_epoch
    end_token, warp_token, token_step, begin_vector, end_vector = (
        ops.end_token, ops.warp_token, ops.token_step, ops.begin_vector, ops.end_vector)
    publish_head, wait_heads, reduce_row, publish_arrived = ops.publish_head, ops.wait_heads, ops.reduce_row, ops.publish_arrived
    last_block, outcome = ops.last_block, ops.outcome
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_combine_complete(window, rank, local, record, weights, out, num_tokens, copied, staging, flight, flying, released,  # noqa: ANN001, ANN202
                            signature, timeout):
        trace = stamp(trace_begin(), WAIT_HEADS)
        epoch, following, fail = read_epoch(flight), read_epoch(flight + FLIGHT_NEXT), flight + FLIGHT_FAIL
        code = wait_heads(window, flying, rank, RANKS, epoch, signature, fail, record, timeout)
        trace = stamp(trace, ROWS)
        if code == 0:
            begin, stop = begin_vector(num_tokens, ROW_BYTES), end_vector(num_tokens, ROW_BYTES)
            token, end, step = warp_token(num_tokens), end_token(num_tokens), token_step(num_tokens)
            while token < end:   # no range: its length is a 64-bit division
                reduce_row(window, staging, rank, copied, weights, out, token, TOPK, ROW_BYTES, TYPE, begin, stop)
                token += step
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            if warp_idx() == 0:
                told = outcome(fail, epoch, 0)
                if told != 0:
                    publish_head(window, flying, rank, RANKS, epoch, signature, told)
                publish_arrived(window, released, rank, RANKS, following)   # also after a failure: the next use is right again
        stamp(trace, END)

    return ll_combine_complete
