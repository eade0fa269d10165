"""Copies received rows between the window and a caller's own tensor. Local: no epoch, no other rank; how many rows there are stays on the device."""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import END, ROWS

__all__ = ["PARAMETERS", "make_ht_copy"]

PARAMETERS = ("maps", "source", "target", "rows", "row_bytes")
"""Run-time values of a launch, all 64-bit integers."""


def make_ht_copy(shape: HTShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    ZONES, LOCAL_EXPERTS = shape.maps.zones, shape.num_local
    copy_rows = ops.ht_copy_rows
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ht_copy(maps, source, target, rows, row_bytes):  # noqa: ANN001, ANN202
        trace = stamp(trace_begin(), ROWS)
        copy_rows(source, target, maps + ZONES, LOCAL_EXPERTS, rows, row_bytes)
        stamp(trace, END)

    return ht_copy
