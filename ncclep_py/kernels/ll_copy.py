"""Copies the rows there are, and no others, between a slot and a caller's plain tensor. Local: no epoch, no other rank."""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.kernels.stamps import COUNT, END, ROWS

__all__ = ["PARAMETERS", "make_ll_copy"]

PARAMETERS = ("rows", "target", "counters", "num_planes", "plane_rows", "row_bytes")
"""Run-time values of a launch, all 64-bit integers: addresses of two tensors ``[planes, rows]`` and of the number of rows in each plane (int32)."""


def make_ll_copy(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel, over one implementation of the vocabulary."""
    count_rows, copy_row = ops.count_rows, ops.copy_row
    trace_begin, stamp = ops.trace_begin, ops.stamp
    end_token, warp_token, token_step, begin_vector, end_vector = (
        ops.end_token, ops.warp_token, ops.token_step, ops.begin_vector, ops.end_vector)

    def ll_copy(rows, target, counters, num_planes, plane_rows, row_bytes):  # noqa: ANN001, ANN202
        trace = stamp(trace_begin(), COUNT)
        num_rows = count_rows(counters, num_planes, plane_rows)
        trace = stamp(trace, ROWS)
        begin, stop = begin_vector(num_rows, row_bytes), end_vector(num_rows, row_bytes)
        row, end, step = warp_token(num_rows), end_token(num_rows), token_step(num_rows)
        while row < end:   # no range: its length is a 64-bit division
            copy_row(rows, target, row, num_planes, plane_rows, row_bytes, begin, stop)
            row += step
        stamp(trace, END)

    return ll_copy
