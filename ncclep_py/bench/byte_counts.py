"""Bytes of a dispatch and a combine by three formulas, each stated; ids, weights, pads and control words are in none of them.

* ``per_pair``: one row per (token, expert), what a library without deduplication sends: T K rows each way.
* ``per_rank``: one row per (token, distinct rank), self included: the formula of NVIDIA's ``ep_bench``; as there, combine of low latency's
  expert_major counts one per (token, expert).
* ``physical``: what our kernels read and write in device memory: dispatch reads a row once and writes it to each of its places, combine reads these
  and writes one row per token. All ranks together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case

__all__ = ["ByteCounts", "byte_counts"]


@dataclasses.dataclass(frozen=True)
class ByteCounts:
    """Bytes of all ranks together, of dispatch and of combine."""

    per_pair: tuple[int, int]
    per_rank: tuple[int, int]
    physical: tuple[int, int]

    def as_json(self) -> dict[str, list[int]]:
        """For a record."""
        return {field.name: list(getattr(self, field.name)) for field in dataclasses.fields(self)}


def byte_counts(case: Case, load: Sequence[int], traffic: Sequence[Sequence[int]]) -> ByteCounts:
    """Bytes of a case whose experts receive `load` rows ``[E]``, and whose ranks send `traffic` distinct tokens to each other ``[R][R]``."""
    pairs, per_rank, tokens = sum(load), sum(map(sum, traffic)), case.ranks * case.tokens
    rows = pairs if case.layout == "expert_major" else per_rank
    back = rows if case.algorithm == "ll" else per_rank
    return ByteCounts((pairs * case.sent_bytes, pairs * case.row_bytes), (per_rank * case.sent_bytes, back * case.row_bytes),
                      (tokens * _read_bytes(case) + rows * case.sent_bytes, rows * case.row_bytes + tokens * case.row_bytes))


def _read_bytes(case: Case) -> int:
    """Bytes of a row as the caller gives it to dispatch: DS_FP8 quantises while it sends."""
    return case.row_bytes if case.recipe == "ds_fp8" else case.sent_bytes
