"""How many rows a rank has room for in high throughput, the same for every implementation that has to be told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclep_py.bench.routing import expert_load, traffic

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case

__all__ = ["receive_budget"]


def receive_budget(case: Case) -> int:
    """Rows of a rank: `worst`, what no routing can exceed, or `exact`, the most a rank receives by this routing (at least its own tokens)."""
    if case.budget == "exact":
        return max(_most_received(case), case.tokens)
    sent = case.ranks * case.tokens
    if case.layout == "flat":
        return sent
    local, padding = case.local_experts, max(case.alignment, 1)
    return min(sent * min(case.topk, local) + local * (padding - 1), local * _padded(sent, padding))


def _most_received(case: Case) -> int:
    if case.layout == "flat":
        return max(map(sum, zip(*traffic(case), strict=True)))
    load, local = [_padded(rows, max(case.alignment, 1)) for rows in expert_load(case)], case.local_experts
    return max(sum(load[first: first + local]) for first in range(0, case.experts, local))


def _padded(rows: int, to: int) -> int:
    return -(-rows // to) * to
