"""Whether received rows are those the routing says, all of them and in order, compared by their bits on the device.

This is worked out in a few tensor operations, so that it can be done at any size; `bench.oracle` compares small cases with the oracle itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ncclep_py.bench.inputs import sent_rows, tokens_of, weights_of
from ncclep_py.testing import bits_equal

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.handle import DispatchOutputs

__all__ = ["flat_ids", "ht_arrived", "ht_sources", "ll_arrived", "ll_sources"]


def ll_sources(case: Case, ids: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """``source * T + token`` of every row of each plane of a rank, in order; planes are its experts, in rank_major source ranks."""
    first, last = rank * case.local_experts, (rank + 1) * case.local_experts
    if case.layout == "rank_major":
        return [((i >= first) & (i < last)).any(1).nonzero()[:, 0] + s * case.tokens for s, i in enumerate(ids)]
    flat = torch.cat(list(ids)).flatten()
    return [(flat == e).nonzero()[:, 0] // case.topk for e in range(first, last)]


def ll_arrived(case: Case, ids: Sequence[torch.Tensor], rank: int, received: DispatchOutputs) -> bool:
    """Whether a low-latency dispatch brought what it must: counts, rows, scales, in rank_major ids and weights.

    Args:
        ids: ``[T, K]`` of every rank, on the device.
        rank: mine.
        received: what dispatch returned.
    """
    device, planes = received.tokens.device, ll_sources(case, ids, rank)
    parts = [sent_rows(case, tokens_of(case, r, device)) for r in range(case.ranks)]
    rows = torch.cat([part for part, _ in parts])
    scales = torch.cat([beside for _, beside in parts if beside is not None]) if case.recipe != "none" else None
    info = received.layout_info
    counts = info.src_rank_counters if case.layout == "rank_major" else info.expert_counters
    if counts is None or counts.tolist() != [len(plane) for plane in planes]:
        return False
    right = all(bits_equal(received.tokens[p, : len(plane)], rows[plane]) for p, plane in enumerate(planes))
    if scales is not None:
        assert received.scales is not None
        right &= all(bits_equal(received.scales[p, : len(plane)], scales[plane]) for p, plane in enumerate(planes))
    return right and (case.layout != "rank_major" or _routing_arrived(case, ids, rank, received, planes))


def _routing_arrived(case: Case, ids: Sequence[torch.Tensor], rank: int, received: DispatchOutputs, planes: Sequence[torch.Tensor]) -> bool:
    device, first = received.tokens.device, rank * case.local_experts
    everything = torch.cat(list(ids))
    local = torch.where((everything >= first) & (everything < first + case.local_experts), everything - first, -1).to(torch.int32)
    weights = torch.cat([weights_of(case, r) for r in range(case.ranks)]).to(device)
    assert received.topk_idx is not None and received.topk_weights is not None
    for p, plane in enumerate(planes):
        n = len(plane)
        if not (torch.equal(received.topk_idx[p, :n], local[plane]) and bool((received.topk_idx[p, n:] == -1).all())
                and bits_equal(received.topk_weights[p, :n], weights[plane])):
            return False
    return True


def ht_sources(case: Case, ids: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """``source << 32 | token`` of every row a rank receives, -1 for a pad, in order."""
    local, alignment = case.local_experts, max(case.alignment, 1)

    def of(source: int, hit: torch.Tensor) -> torch.Tensor:
        return hit.any(1).nonzero()[:, 0] + (source << 32)

    if case.layout == "flat":
        return torch.cat([of(s, (i >= rank * local) & (i < (rank + 1) * local)) for s, i in enumerate(ids)])
    found = []
    for e in range(rank * local, (rank + 1) * local):
        zone = torch.cat([of(s, i == e) for s, i in enumerate(ids)])
        found += [zone, zone.new_full((-len(zone) % alignment,), -1)]
    return torch.cat(found)


def flat_ids(case: Case, ids: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a rank's local ids of each token ``[T, K]``, ascending, then -1; the column each came from)."""
    first, none = rank * case.local_experts, case.experts
    local = torch.where((ids >= first) & (ids < first + case.local_experts), ids - first, none)
    ordered, column = local.sort(dim=1, stable=True)
    return torch.where(ordered == none, -1, ordered), column


def ht_arrived(case: Case, ids: Sequence[torch.Tensor], rank: int, sources: torch.Tensor, received: DispatchOutputs) -> bool:
    """Whether a high-throughput dispatch brought what it must: count, rows, scales, weights, in FLAT ids; one source rank after the other. In FLAT
    rows of the budget that were not received have ids -1 and weights 0.

    Args:
        ids: ``[T, K]`` of every rank, on the device.
        rank: mine.
        sources: `ht_sources` of this rank.
        received: what dispatch returned.
    """
    total, weights = received.layout_info.recv_total_counter, received.topk_weights
    if total is None or weights is None or int(total[0]) != len(sources):
        return False
    device = received.tokens.device
    pads = (sources < 0).nonzero()[:, 0]
    right = bool((received.tokens[pads].view(torch.uint8) == 0).all()) and bool((weights[pads] == 0).all())
    if case.layout == "flat":
        assert received.topk_idx is not None
        right &= bool((received.topk_idx[len(sources):] == -1).all()) and bool((weights[len(sources):] == 0).all())
    for s in range(case.ranks):
        rows, scales = sent_rows(case, tokens_of(case, s, device))
        at = ((sources >> 32 == s) & (sources >= 0)).nonzero()[:, 0]
        token = sources[at] & 0xFFFFFFFF
        right &= bits_equal(received.tokens[at], rows[token])
        if scales is not None:
            assert received.scales is not None
            right &= bits_equal(received.scales[at], scales[token])
        right &= _ht_routing(case, ids[s], rank, s, at, token, received)
    return right


def _ht_routing(case: Case, ids: torch.Tensor, rank: int, source: int, at: torch.Tensor, token: torch.Tensor, received: DispatchOutputs) -> bool:
    given = weights_of(case, source).to(ids.device)
    assert received.topk_weights is not None
    if case.layout == "flat":
        assert received.topk_idx is not None
        local, column = flat_ids(case, ids, rank)
        wanted = torch.where(local >= 0, given.gather(1, column), 0.0)
        return bool(torch.equal(received.topk_idx[at], local[token])) and bits_equal(received.topk_weights[at], wanted[token])
    info = received.layout_info
    assert info.expert_counters is not None
    ends = info.expert_counters.to(torch.int64).cumsum(0)
    expert = torch.searchsorted(ends, at, right=True) + rank * case.local_experts
    wanted = (given[token] * (ids[token] == expert[:, None])).sum(1)
    return bits_equal(received.topk_weights[at], wanted)
