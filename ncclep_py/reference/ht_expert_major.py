"""The oracle: high throughput, EXPERT_MAJOR. See the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ncclep_py.reference.checks import _blank, _check_lists, _checked_ids, _num_local_experts
from ncclep_py.reference.ht_rows import HTCombine, HTDispatch, _ht_copy, _ht_rows, _ht_weight, _sum_teams

__all__ = ["ExpertMajorMap", "ht_expert_major_combine", "ht_expert_major_dispatch", "ht_expert_major_map"]


@dataclass(frozen=True)
class ExpertMajorMap:
    """HT EXPERT_MAJOR routing of all ranks; each list is over ranks. Zones are laid out in full, then cut at C."""

    num_experts: int  # E
    max_recv_tokens_per_rank: int | None  # C, or None: exact size
    topk_idx: list[Tensor]  # per source [T, K] int64, ids outside [0, E) turned to -1
    # per source [T, K] int64, receive row at the owner for expert topk_idx[t, k]; -1: no expert, or dropped
    rows: list[Tensor]
    # per receiver [n, 2] int64, (source rank, token) of each used row, (-1, -1) for a pad; n = min(recv_total_counter,
    # C)
    row_src: list[Tensor]
    row_experts: list[Tensor]  # per receiver [n] int64, local expert of each used row, -1 for a pad
    expert_counters: list[Tensor]  # per receiver [L] int32, rows of each zone within C, pads included
    expert_counts_unpadded: list[Tensor]  # per receiver [L] int32, the same without pads
    expert_offsets: list[Tensor]  # per receiver [L] int32, first row of each zone, at most C
    recv_total_counter: list[int]  # per receiver, sum of the padded zones before any drop


def ht_expert_major_map(
    topk_idx: Sequence[Tensor], *, num_experts: int, alignment: int = 0, max_recv_tokens_per_rank: int | None = None
) -> ExpertMajorMap:
    """HT EXPERT_MAJOR (semantics 6.3, 6.5): a zone per local expert, one row per token, ascending (source, token).

    topk_idx: per source int [T, K]. alignment: rows a zone is padded to (0 and 1: none; else a power of two); an empty
    zone has no pads.
    """
    if alignment < 0 or alignment & (alignment - 1):
        raise ValueError(f"alignment must be 0 or a power of two: got {alignment}")
    num_ranks, align = len(topk_idx), max(alignment, 1)
    local = _num_local_experts(num_experts, num_ranks)
    checked = [_checked_ids(ids, num_experts) for ids in topk_idx]
    ids = [source_ids.tolist() for source_ids in checked]
    places = [torch.full(tuple(source_ids.shape), -1, dtype=torch.int64) for source_ids in checked]
    row_src, row_experts, padded, unpadded, offsets, totals = [], [], [], [], [], []
    for r in range(num_ranks):
        tokens_of_rank = _ht_rows(ids, r, local)
        every_row: list[tuple[int, int, int]] = []  # (source rank, token, local expert); all -1 for a pad
        starts = []
        for expert in range(local):
            starts.append(len(every_row))
            every_row += [(s, t, expert) for s, t, hits in tokens_of_rank if expert in hits]
            while len(every_row) % align:
                every_row.append((-1, -1, -1))
        ends = [*starts[1:], len(every_row)]
        budget = len(every_row) if max_recv_tokens_per_rank is None else max_recv_tokens_per_rank
        kept = every_row[:budget]
        for row, (s, t, expert) in enumerate(kept):
            for k, e in enumerate(ids[s][t] if s >= 0 else []):
                if e == r * local + expert:
                    places[s][t, k] = row
        row_src.append(torch.tensor([[s, t] for s, t, _ in kept], dtype=torch.int64).reshape(-1, 2))
        row_experts.append(torch.tensor([expert for _, _, expert in kept], dtype=torch.int64))
        offsets.append(torch.tensor([min(start, budget) for start in starts], dtype=torch.int32))
        padded.append(
            torch.tensor(
                [min(end, budget) - min(start, budget) for start, end in zip(starts, ends, strict=True)],
                dtype=torch.int32,
            )
        )
        unpadded.append(
            torch.tensor([[x for _, _, x in kept].count(expert) for expert in range(local)], dtype=torch.int32)
        )
        totals.append(len(every_row))
    return ExpertMajorMap(
        num_experts, max_recv_tokens_per_rank, checked, places, row_src, row_experts, padded, unpadded, offsets, totals
    )


def ht_expert_major_dispatch(
    routing: ExpertMajorMap,
    tokens: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None = None,
    *,
    scales: Sequence[Tensor] | None = None,
    fill: float = 0,
) -> list[HTDispatch]:
    """HT EXPERT_MAJOR dispatch. Forward: topk_weights per source fp32 [T, K]. Backward: None, as tokens are gradients.

    tokens: per source [T, H] of any dtype, bits are copied; scales: [T, S]. Unused rows of tokens, scales and weights =
    fill.
    """
    num_ranks = len(tokens)
    _check_lists(len(routing.topk_idx), tokens=tokens, topk_weights=topk_weights, scales=scales)
    local = routing.num_experts // num_ranks
    received = []
    for r in range(num_ranks):
        row_src = routing.row_src[r]
        num_rows = len(row_src) if routing.max_recv_tokens_per_rank is None else routing.max_recv_tokens_per_rank
        weights = None
        if topk_weights is not None:
            weights = _blank((num_rows,), torch.float32, fill)
            for row, ((s, t), expert) in enumerate(zip(row_src.tolist(), routing.row_experts[r].tolist(), strict=True)):
                weights[row] = (
                    _ht_weight(routing.topk_idx[s][t], topk_weights[s][t], expert + r * local) if s >= 0 else 0.0
                )
        row_scales = None if scales is None else _ht_copy(scales, row_src, num_rows, fill)
        received.append(HTDispatch(_ht_copy(tokens, row_src, num_rows, fill), weights, None, row_scales))
    return received


def ht_expert_major_combine(
    routing: ExpertMajorMap,
    recv_tokens: Sequence[Tensor],
    recv_topk_weights: Sequence[Tensor] | None = None,
    *,
    team_size: int | None = None,
) -> list[HTCombine]:
    """HT EXPERT_MAJOR combine: fp32 sum of a token's rows in ascending (rank, local expert) order, no weights.

    One rounding to the token dtype, at the end. recv_tokens: per receiver [N, H], bf16/fp16/fp32. Backward:
    recv_topk_weights per receiver fp32 [N], one gradient per row. team_size: ranks of a team, see `_sum_teams`; None: all
    ranks are one.
    """
    _check_lists(len(routing.topk_idx), recv_tokens=recv_tokens, recv_topk_weights=recv_topk_weights)
    local, hidden = routing.num_experts // len(recv_tokens), recv_tokens[0].shape[1]
    combined = []
    for rank, (ids, places) in enumerate(zip(routing.topk_idx, routing.rows, strict=True)):
        out = torch.zeros(len(ids), hidden, dtype=recv_tokens[0].dtype)
        grads = None if recv_topk_weights is None else torch.zeros(tuple(ids.shape), dtype=torch.float32)
        for t, (token_ids, token_rows) in enumerate(zip(ids.tolist(), places.tolist(), strict=True)):
            row_of_expert = {e: row for e, row in zip(token_ids, token_rows, strict=True) if row >= 0}
            summands = [(e // local, recv_tokens[e // local][row]) for e, row in sorted(row_of_expert.items())]
            out[t] = _sum_teams(summands, rank, len(recv_tokens), team_size, hidden).to(out.dtype)
            for k, (e, row) in enumerate(zip(token_ids, token_rows, strict=True)):
                if grads is not None and recv_topk_weights is not None and row >= 0:
                    grads[t, k] = recv_topk_weights[e // local][row]
        combined.append(HTCombine(out, grads))
    return combined
