"""The oracle's answer to a whole case: what every rank receives, and what comes back to it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ncclep_py import reference
from ncclep_py.bench.inputs import sent_rows, tokens_of, turned_back, weights_of
from ncclep_py.bench.routing import routing
from ncclep_py.testing import bits_equal

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.handle import DispatchOutputs

__all__ = ["agrees", "is_small", "prepare"]

MOST_ELEMENTS = 1 << 23
"""The oracle copies row by row; above this it would take longer than everything else."""


def is_small(case: Case) -> bool:
    """Whether the oracle plays this case in a few seconds."""
    return case.ranks * case.tokens * case.topk * case.hidden <= MOST_ELEMENTS


@functools.lru_cache(maxsize=2)
def _played(case: Case, device: str) -> tuple[list[Any], list[torch.Tensor]]:
    """Everybody's dispatch and combined rows, experts the identity, on the CPU; `device` is where inputs are made."""
    ids = [routing(case, r) for r in range(case.ranks)]
    sent = [sent_rows(case, tokens_of(case, r, torch.device(device))) for r in range(case.ranks)]
    rows, weights = [x.cpu() for x, _ in sent], [weights_of(case, r) for r in range(case.ranks)]
    scales = [s.cpu() for _, s in sent if s is not None] or None
    if case.algorithm == "ht":
        return _high_throughput(case, ids, rows, weights, scales)
    experts, most = case.experts, case.tokens
    if case.layout == "rank_major":
        by_rank = reference.ll_rank_major_dispatch(rows, ids, weights, num_experts=experts, max_dispatch_tokens_per_rank=most, scales=scales)
        back = [turned_back(d.tokens, d.scales, case.torch_dtype()) for d in by_rank]
        return list(by_rank), reference.ll_rank_major_combine(back, [d.rows for d in by_rank])
    by_expert = reference.ll_expert_major_dispatch(rows, ids, num_experts=experts, max_dispatch_tokens_per_rank=most, scales=scales)
    back = [turned_back(d.tokens, d.scales, case.torch_dtype()) for d in by_expert]
    return list(by_expert), reference.ll_expert_major_combine(back, [d.rows for d in by_expert], weights)


def _high_throughput(case: Case, ids: list[torch.Tensor], rows: list[torch.Tensor], weights: list[torch.Tensor],
                     scales: list[torch.Tensor] | None) -> tuple[list[Any], list[torch.Tensor]]:
    if case.layout == "flat":
        flat = reference.ht_flat_map(ids, num_experts=case.experts)
        got = reference.ht_flat_dispatch(flat, rows, weights, scales=scales)
        back = [turned_back(d.tokens, d.scales, case.torch_dtype()) for d in got]
        return list(got), [c.tokens for c in reference.ht_flat_combine(flat, back)]
    zones = reference.ht_expert_major_map(ids, num_experts=case.experts, alignment=case.alignment)
    got = reference.ht_expert_major_dispatch(zones, rows, weights, scales=scales)
    back = [turned_back(d.tokens, d.scales, case.torch_dtype()) for d in got]
    return list(got), [c.tokens for c in reference.ht_expert_major_combine(zones, back)]


def prepare(case: Case, device: torch.device) -> None:
    """Play a small case now, so that nobody waits for the answer between dispatch and combine, where peers wait with a deadline."""
    if is_small(case):
        _played(case, str(device))


def agrees(case: Case, rank: int, received: DispatchOutputs | None, combined: torch.Tensor | None) -> bool:
    """Whether what a rank received, or what came back to it (None: not asked), is bit for bit what the oracle says. Rows not received are not
    compared."""
    whose = combined if combined is not None else received.tokens if received is not None else torch.empty(0)
    dispatched, back = _played(case, str(whose.device))
    right = combined is None or bits_equal(combined.cpu(), back[rank])
    if received is None:
        return right
    want = dispatched[rank]
    for name in ("tokens", "scales", "topk_idx", "topk_weights"):
        theirs, mine = getattr(want, name, None), getattr(received, name, None)
        if theirs is not None:
            right &= mine is not None and _same_rows(case, want, mine.cpu(), theirs)
    return right


def _same_rows(case: Case, want: Any, mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if case.algorithm == "ht":
        return bits_equal(mine[: len(theirs)], theirs)
    counts = (want.src_rank_counters if case.layout == "rank_major" else want.expert_counters).tolist()
    return all(bits_equal(mine[p, :n], theirs[p, :n]) for p, n in enumerate(counts))
