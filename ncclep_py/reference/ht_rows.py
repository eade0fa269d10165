"""The oracle: high throughput: results and rows common to both layouts. See the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ncclep_py.reference.arithmetic import _sum32
from ncclep_py.reference.checks import _blank

__all__ = ["HTCombine", "HTDispatch"]


@dataclass(frozen=True)
class HTDispatch:
    """What one rank receives from an HT dispatch. N = C with a budget, else exactly the used rows. Others = fill."""

    tokens: Tensor  # [N, H] token dtype; EXPERT_MAJOR pad rows are zero
    # FLAT [N, K] fp32, placed like topk_idx, 0 elsewhere; EXPERT_MAJOR [N] fp32, pads 0; backward: None
    topk_weights: Tensor | None
    # FLAT [N, K] int64, local or global ids, ascending, compacted to the left, -1 elsewhere; else None
    topk_idx: Tensor | None
    scales: Tensor | None  # [N, S] scale dtype, placed like tokens, pads zero


@dataclass(frozen=True)
class HTCombine:
    """What one source rank gets back from an HT combine."""

    tokens: Tensor  # [T, H] token dtype
    # backward: [T, K] fp32, gradient of my topk_weights, 0 where there is no expert or its row was dropped; else None
    topk_weights: Tensor | None


def _ht_rows(ids: Sequence[list[list[int]]], rank: int, local: int) -> list[tuple[int, int, list[int]]]:
    """Ascending (source rank, token, ascending distinct local experts) of tokens with an expert on `rank`."""
    rows = []
    for s, source_ids in enumerate(ids):
        for t, token_ids in enumerate(source_ids):
            hits = sorted({e - rank * local for e in token_ids if e >= 0 and e // local == rank})
            if hits:
                rows.append((s, t, hits))
    return rows


def _ht_copy(source: Sequence[Tensor], row_src: Tensor, num_rows: int, fill: float) -> Tensor:
    """[num_rows, width]: row i is source[rank][token] of row_src[i], zero if that is a pad; rows past it = fill."""
    out = _blank((num_rows, source[0].shape[1]), source[0].dtype, fill)
    pad = _blank((1, source[0].shape[1]), source[0].dtype, 0)[0]
    for i, (s, t) in enumerate(row_src.tolist()):
        out[i] = source[s][t] if s >= 0 else pad
    return out


def _sum_teams(places: list[tuple[int, Tensor]], rank: int, num_ranks: int, team_size: int | None, hidden: int) -> Tensor:
    """fp32 [H]: HT sum of (owner rank, row) pairs for a token of `rank`, rows of a team in the order given.

    The rows of the token's own team add up in fp32. Each other team adds its rows up in fp32 and rounds the sum once, to
    the rows' dtype, to send it; these sums then come in the order of the teams before the own one, cyclic: own team - 1,
    own team - 2, ... A team without rows sends nothing.
    """
    size = team_size or num_ranks
    if num_ranks % size:
        raise ValueError(f"team_size must divide the ranks: got {team_size} for {num_ranks} ranks")
    teams = num_ranks // size
    rows: list[list[Tensor]] = [[] for _ in range(teams)]  # by distance
    for owner, row in places:
        rows[(rank // size - owner // size) % teams].append(row)
    own, *others = rows
    return _sum32([*own, *(_sum32(of_team, hidden).to(of_team[0].dtype) for of_team in others if of_team)], hidden)


def _ht_weight(ids: Tensor, weights: Tensor, expert: int) -> Tensor:
    """fp32 scalar: weight of a global expert in one token with ids [K], weights [K]; duplicates add up in k order."""
    first, *others = [weights[k] for k, e in enumerate(ids.tolist()) if e == expert]
    for weight in others:
        first = first + weight
    return first
