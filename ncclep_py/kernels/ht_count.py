"""High-throughput update, first half: count the keys of my tokens. Local: no epoch, no other rank. Design: ``ncclep_py.ht_memory_map``."""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.stamps import COUNT, END

__all__ = ["PARAMETERS", "make_ht_count"]

PARAMETERS = ("maps", "topk_idx", "num_tokens")
"""Run-time values of a launch, all 64-bit integers."""


def make_ht_count(shape: HTShape, ops: Vocabulary) -> Callable[..., None]:
    """The kernel for one shape, over one implementation of the vocabulary."""
    RANKS, EXPERTS, TOPK, IDX_BYTES, BY_RANK, CHUNKS = (
        shape.num_ranks, shape.num_experts, shape.num_topk, shape.idx_bytes, shape.by_rank, shape.chunks)
    PARTIALS, HEADER = shape.maps.partials, shape.maps.header
    count = ops.ht_count
    trace_begin, stamp = ops.trace_begin, ops.stamp

    def ht_count(maps, topk_idx, num_tokens):  # noqa: ANN001, ANN202
        trace = stamp(trace_begin(), COUNT)
        count(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, RANKS, BY_RANK, CHUNKS, maps + PARTIALS, maps + HEADER)
        stamp(trace, END)

    return ht_count
