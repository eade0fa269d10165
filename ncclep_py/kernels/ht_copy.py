"""Copies received rows between the window and a caller's own tensor. Local: no epoch, no other rank; how many rows there are stays on the device."""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.ops import Vocabulary

__all__ = ["PARAMETERS", "make_ht_copy"]

PARAMETERS = ("maps", "source", "target", "rows", "row_bytes")
"""Run-time values of a launch, all 64-bit integers."""


def make_ht_copy(shape: HTShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    ZONES, LOCAL_EXPERTS = shape.maps.zones, shape.num_local
    copy_rows = ops.ht_copy_rows

    def ht_copy(maps, source, target, rows, row_bytes):  # noqa: ANN001, ANN202
        copy_rows(source, target, maps + ZONES, LOCAL_EXPERTS, rows, row_bytes)

    return ht_copy
