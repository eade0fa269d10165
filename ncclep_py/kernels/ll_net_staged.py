"""Staged operations over several teams: as ``ll_staged`` inside a team, by puts between teams. Safety: ``ncclep_py.ll_net_map``, L-S1 to L-S7.

A staged dispatch is a fused one (``ll_net_dispatch``, ``ll_net_rank_major_dispatch``) cut before its wait for what networked ranks sent; its complete
half copies that to its places. A staged combine puts each row of a networked rank's token from the slot into the staging slot at its source, and
stores those of the team there; the complete half adds up.
"""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.config import Layout
from ncclep_py.kernels.ll_net_dispatch import make_ll_net_dispatch
from ncclep_py.kernels.ll_net_rank_major_dispatch import make_ll_net_rank_major_dispatch
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, HEAD, MEET, ROWS, WAIT_ARRIVED, WAIT_HEADS
from ncclep_py.ll_net_map import FLIGHT_COUNT
from ncclep_py.memory_map import FLIGHT_FAIL, FLIGHT_NEXT

__all__ = ["COMBINE_COMPLETE_PARAMETERS", "COMBINE_SEND_PARAMETERS", "DISPATCH_COMPLETE_PARAMETERS", "RANK_MAJOR_COMPLETE_PARAMETERS",
           "make_ll_net_combine_complete", "make_ll_net_combine_send", "make_ll_net_dispatch_complete", "make_ll_net_dispatch_send",
           "make_ll_net_rank_major_complete", "make_ll_net_rank_major_send"]

DISPATCH_COMPLETE_PARAMETERS = ("comm", "window", "rank", "local", "record", "slot", "remote", "messages", "header", "kept", "flight", "flying",
                                "signature", "timeout")
RANK_MAJOR_COMPLETE_PARAMETERS = ("comm", "window", "rank", "local", "record", "src_rank_counters", "global_ids", "slot", "remote", "messages",
                                  "header", "kept", "flight", "arrived", "timeout")
COMBINE_SEND_PARAMETERS = ("comm", "window", "rank", "local", "record", "num_tokens", "slot", "table", "remote", "copied", "header", "origins",
                           "kept", "rows", "staging", "flight", "flying", "released", "first_signal", "handle", "signature", "status", "timeout")
COMBINE_COMPLETE_PARAMETERS = ("comm", "window", "rank", "local", "record", "weights", "out", "num_tokens", "copied", "staging", "flight", "flying",
                               "released", "first_signal", "signature", "timeout")
"""Run-time values of a launch, all 64-bit integers, named as in ``ll_staged``; `rows`: address of the slot, `first_signal`: of the staging slot."""


def make_ll_net_dispatch_send(shape: LLNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The send half of a dispatch: everything but what networked ranks sent."""
    return _named("ll_net_dispatch_send", make_ll_net_dispatch(shape, ops, send_only=True))


def make_ll_net_rank_major_send(shape: LLNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The send half of a RANK_MAJOR dispatch."""
    return _named("ll_net_rank_major_send", make_ll_net_rank_major_dispatch(shape, ops, send_only=True))


def _named(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def make_ll_net_dispatch_complete(shape: LLNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The complete half of dispatch: wait until all rows are here, copy what networked ranks sent to its places."""
    RANKS, EXPERTS, TOPK, PLANE_ROWS = shape.num_ranks, shape.num_experts, shape.num_topk, shape.window.plane_rows
    TEAM, MOST, CONTEXTS, BLOCKS_DONE = shape.net.team_size, shape.net.tokens, shape.net.num_contexts, shape.local.blocks_done
    SENT_BYTES, SCALE_BYTES, SCALES = shape.sent_bytes, shape.wire.scale_bytes, shape.slot_scales
    HEADER_BYTES, MESSAGE_BYTES = shape.net.header_bytes, shape.net.message_bytes
    block_idx, warp_idx, blocks, warps = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps
    read_epoch, read_count, wait_flight, kept_rows = ops.read_epoch, ops.ht_net_count, ops.ll_net_wait_flight, ops.ll_net_kept_rows
    take_row, publish_head, store_header = ops.ll_net_take_row, ops.ht_net_publish_head, ops.store_header
    last_block, op_code, outcome = ops.last_block, ops.op_code, ops.outcome
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_net_dispatch_complete(comm, window, rank, local, record, slot, remote, messages, header, kept, flight, flying,  # noqa: ANN001, ANN202
                                 signature, timeout):
        trace = stamp(trace_begin(), WAIT_ARRIVED)
        epoch, fail, operations = read_epoch(flight), flight + FLIGHT_FAIL, read_count(flight + FLIGHT_COUNT)
        code = wait_flight(comm, window, flying, rank, RANKS, TEAM, CONTEXTS, 0, operations, epoch, signature, fail, record, timeout)
        trace = stamp(trace, ROWS)
        if code == 0:
            kept_rows(kept, EXPERTS, RANKS)
            at = block_idx() * warps() + warp_idx()
            while at < RANKS * MOST:
                if at // MOST // TEAM != rank // TEAM:
                    take_row(window, slot, slot + SCALES, window, messages, remote, at // MOST, at % MOST, MOST, TOPK, EXPERTS, RANKS, PLANE_ROWS,
                             SENT_BYTES, SCALE_BYTES, HEADER_BYTES, MESSAGE_BYTES, rank, epoch, fail, record)
                at += blocks() * warps()
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            if op_code(fail, epoch) != 0:
                if warp_idx() == 0:
                    told = outcome(fail, epoch, 0)
                    if told != 0:
                        publish_head(window, flying, rank, RANKS, TEAM, epoch, signature, told)
                    store_header(header, epoch, 0)   # nobody may combine these rows
        stamp(trace, END)

    return ll_net_dispatch_complete


def make_ll_net_rank_major_complete(shape: LLNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The complete half of a RANK_MAJOR dispatch: the same, then the number of rows, and the ids of unused ones."""
    RANKS, EXPERTS, TOPK, PLANE_ROWS = shape.num_ranks, shape.num_experts, shape.num_topk, shape.window.plane_rows
    TEAM, MOST, CONTEXTS, BLOCKS_DONE = shape.net.team_size, shape.net.tokens, shape.net.num_contexts, shape.local.blocks_done
    SENT_BYTES, SCALE_BYTES, SCALES = shape.sent_bytes, shape.wire.scale_bytes, shape.slot_scales
    HEADER_BYTES, MESSAGE_BYTES, IDS, WEIGHTS = (
        shape.net.routed_header_bytes, shape.net.message_bytes, shape.window.recv_ids, shape.window.recv_weights)
    block_idx, warp_idx, blocks, warps = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps
    read_epoch, read_count, wait_data, wait_arrived = ops.read_epoch, ops.ht_net_count, ops.ll_net_wait_data, ops.ht_net_wait_arrived
    take_token, take_arrived_rows, keep_counters = ops.ll_net_take_token, ops.ll_net_take_arrived_rows, ops.keep_counters
    last_block, op_code, store_header = ops.last_block, ops.op_code, ops.store_header
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_net_rank_major_complete(comm, window, rank, local, record, src_rank_counters, global_ids, slot, remote, messages,  # noqa: ANN001, ANN202
                                   header, kept, flight, arrived, timeout):
        trace = stamp(trace_begin(), WAIT_ARRIVED)
        epoch, fail, operations = read_epoch(flight), flight + FLIGHT_FAIL, read_count(flight + FLIGHT_COUNT)
        code = op_code(fail, epoch)   # a refusal or mismatch ends the send half of every rank, and nothing arrives
        if code == 0:
            code = wait_data(comm, window, arrived, rank, RANKS, TEAM, CONTEXTS, operations - 1, epoch, fail, record, timeout)
        trace = stamp(trace, ROWS)
        if code == 0:
            at = block_idx() * warps() + warp_idx()
            while at < RANKS * MOST:
                if at // MOST // TEAM != rank // TEAM:
                    take_token(window, slot, slot + SCALES, window, slot + IDS, slot + WEIGHTS, messages, remote, at // MOST, at % MOST, MOST, TOPK,
                               EXPERTS, RANKS, PLANE_ROWS, SENT_BYTES, SCALE_BYTES, HEADER_BYTES, MESSAGE_BYTES, global_ids, rank, epoch)
                at += blocks() * warps()
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            trace = stamp(trace, WAIT_ARRIVED)
            code = op_code(fail, epoch)
            if code == 0:
                code = wait_arrived(window, arrived, rank, TEAM, epoch, fail, record, timeout)
            if code == 0:
                take_arrived_rows(window, arrived, arrived, slot + IDS, rank, RANKS, TEAM, TOPK, PLANE_ROWS, epoch, src_rank_counters)
                keep_counters(src_rank_counters, kept, RANKS)
            if warp_idx() == 0:
                if code != 0:
                    store_header(header, epoch, 0)   # nobody may combine these rows
        stamp(trace, END)

    return ll_net_rank_major_complete


def make_ll_net_combine_send(shape: LLNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The send half of combine: every row to its place at its source."""
    RANKS, EXPERTS, TOPK, ROW_BYTES, PLANE_ROWS = shape.num_ranks, shape.num_experts, shape.num_topk, shape.row_bytes, shape.window.plane_rows
    TEAM, MOST, CONTEXTS, BLOCKS_DONE = shape.net.team_size, shape.net.tokens, shape.net.num_contexts, shape.local.blocks_done
    PLACES, PLANES, RANK_MAJOR = MOST * TOPK, EXPERTS // RANKS, shape.layout is Layout.RANK_MAJOR
    block_idx, warp_idx, blocks, warps = ops.block_idx, ops.warp_idx, ops.ht_net_blocks, ops.ht_net_warps
    read_epoch, advance_epoch, read_count, advance_count = ops.read_epoch, ops.advance_epoch, ops.ht_net_count, ops.ht_net_advance
    end_token, warp_token, token_step, begin_vector, end_vector = (
        ops.end_token, ops.warp_token, ops.token_step, ops.begin_vector, ops.end_vector)
    release, wait_arrived, wait_released = ops.ll_net_release, ops.ht_net_wait_arrived, ops.ll_net_wait_released
    read_header, check_header, store_header = ops.read_header, ops.check_header, ops.store_header
    copy_table, return_rows = ops.copy_table, ops.ll_net_return_rows
    count_rows, push_row, count_team_rows, push_team_row = ops.count_rows, ops.push_row, ops.ll_net_count_team_rows, ops.ll_net_push_row
    publish_head, put_flight, signal_sent = ops.ht_net_publish_head, ops.ll_net_put_flight, ops.ll_net_signal_sent
    last_block, outcome = ops.last_block, ops.outcome
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_net_combine_send(comm, window, rank, local, record, num_tokens, slot, table, remote, copied, header, origins, kept,  # noqa: ANN001, ANN202
                            rows, staging, flight, flying, released, first_signal, handle, signature, status, timeout):
        trace = stamp(trace_begin(), WAIT_HEADS)
        epoch, fail, held = read_epoch(flight + FLIGHT_NEXT), flight + FLIGHT_FAIL, read_header(header)
        uses, code = read_count(flight + FLIGHT_COUNT), 0
        # ---- 1 wait: every rank has emptied this staging slot, usually long ago ----------------------------------------
        if block_idx() == 0:   # what my complete half could not give back
            code = release(comm, window, released, flight, rank, RANKS, TEAM, CONTEXTS, first_signal, epoch, 0, fail, record, timeout)
        if code == 0:
            code = wait_arrived(window, released, rank, TEAM, epoch, fail, record, timeout)
        if code == 0:
            code = wait_released(comm, rank, RANKS, TEAM, first_signal, uses, epoch, fail, record, timeout)
        if code == 0:
            if status == 0:
                code = check_header(held, handle, rank, epoch, fail, record)
        # ---- 2 rows, to networked ranks first, and what the complete half must know of them later -----------------------
        trace = stamp(trace, ROWS)
        if code == 0:
            if status == 0:
                at = block_idx() * warps() + warp_idx()
                while at < RANKS * MOST:
                    if at // MOST // TEAM != rank // TEAM:
                        return_rows(comm, window, slot, window, staging, remote, at // MOST, at % MOST, MOST, TOPK, ROW_BYTES, ROW_BYTES, CONTEXTS)
                    at += blocks() * warps()
                copy_table(table, copied, num_tokens, TOPK)
                first = rank // TEAM * TEAM   # RANK_MAJOR: planes are source ranks, those of my team are neighbours
                shift = first * MOST
                if RANK_MAJOR:
                    num_rows = count_rows(kept + 4 * first, TEAM, MOST)
                else:
                    num_rows = count_team_rows(kept, EXPERTS, RANKS, PLANE_ROWS, rank, TEAM)
                begin, stop = begin_vector(num_rows, ROW_BYTES), end_vector(num_rows, ROW_BYTES)
                row, end, step = warp_token(num_rows), end_token(num_rows), token_step(num_rows)
                while row < end:   # no range: its length is a 64-bit division
                    if RANK_MAJOR:
                        push_row(window, origins + 4 * shift, rows + shift * ROW_BYTES, staging, row, TEAM, MOST, rank, PLACES, ROW_BYTES, begin,
                                 stop)
                    else:
                        push_team_row(window, origins, rows, staging, row, PLANES, PLANE_ROWS, EXPERTS, rank, PLACES, ROW_BYTES, begin, stop)
                    row += step
        # ---- 3 the last block speaks for the rank, and nobody waits ------------------------------------------------------
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            trace = stamp(trace, HEAD)
            if warp_idx() == 0:
                told = outcome(fail, epoch, status)
                store_header(flight, epoch, handle)
                publish_head(window, flying, rank, RANKS, TEAM, epoch, signature, told)
                put_flight(comm, window, flying, rank, RANKS, TEAM, first_signal, uses, epoch, signature, told)
                signal_sent(comm, rank, RANKS, TEAM, CONTEXTS, first_signal)
                advance_count(flight + FLIGHT_COUNT, uses)
                advance_epoch(flight + FLIGHT_NEXT, epoch)
        stamp(trace, END)

    return ll_net_combine_send


def make_ll_net_combine_complete(shape: LLNetShape, ops: Vocabulary) -> Callable[..., None]:
    """The complete half of combine: wait for all rows, add them up, give the staging slot back."""
    RANKS, TOPK, ROW_BYTES, TYPE = shape.num_ranks, shape.num_topk, shape.row_bytes, int(shape.token_type)
    TEAM, CONTEXTS, BLOCKS_DONE = shape.net.team_size, shape.net.num_contexts, shape.local.blocks_done
    warp_idx, read_epoch, read_count, wait_flight = ops.warp_idx, ops.read_epoch, ops.ht_net_count, ops.ll_net_wait_flight
    end_token, warp_token, token_step, begin_vector, end_vector = (
        ops.end_token, ops.warp_token, ops.token_step, ops.begin_vector, ops.end_vector)
    publish_head, reduce_row, release = ops.ht_net_publish_head, ops.reduce_row, ops.ll_net_release
    last_block, op_code, outcome = ops.last_block, ops.op_code, ops.outcome
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ll_net_combine_complete(comm, window, rank, local, record, weights, out, num_tokens, copied, staging, flight, flying,  # noqa: ANN001, ANN202
                                released, first_signal, signature, timeout):
        trace = stamp(trace_begin(), WAIT_HEADS)
        epoch, following, fail = read_epoch(flight), read_epoch(flight + FLIGHT_NEXT), flight + FLIGHT_FAIL
        operations = read_count(flight + FLIGHT_COUNT)
        code = wait_flight(comm, window, flying, rank, RANKS, TEAM, CONTEXTS, first_signal, operations, epoch, signature, fail, record, timeout)
        trace = stamp(trace, ROWS)
        if code == 0:
            begin, stop = begin_vector(num_tokens, ROW_BYTES), end_vector(num_tokens, ROW_BYTES)
            token, end, step = warp_token(num_tokens), end_token(num_tokens), token_step(num_tokens)
            while token < end:   # no range: its length is a 64-bit division
                reduce_row(window, staging, rank, copied, weights, out, token, TOPK, ROW_BYTES, TYPE, begin, stop)
                token += step
        trace = stamp(trace, MEET)
        if last_block(local + BLOCKS_DONE) == 1:
            drained = 1
            if op_code(fail, epoch) != 0:
                drained = 0
                if warp_idx() == 0:
                    told = outcome(fail, epoch, 0)
                    if told != 0:
                        publish_head(window, flying, rank, RANKS, TEAM, epoch, signature, told)
            release(comm, window, released, flight, rank, RANKS, TEAM, CONTEXTS, first_signal, following, drained, fail, record, 0)
        stamp(trace, END)

    return ll_net_combine_complete
