"""The oracle: high throughput, FLAT. See the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ncclep_py.reference.checks import _check_lists, _checked_ids, _num_local_experts
from ncclep_py.reference.ht_rows import HTCombine, HTDispatch, _ht_copy, _ht_rows, _ht_weight, _sum_teams

__all__ = ["FlatMap", "ht_flat_combine", "ht_flat_dispatch", "ht_flat_map"]


@dataclass(frozen=True)
class FlatMap:
    """HT FLAT routing of all ranks; each list is over ranks."""

    num_experts: int  # E
    max_recv_tokens_per_rank: int | None  # C, or None: exact size
    topk_idx: list[Tensor]  # per source [T, K] int64, ids outside [0, E) turned to -1
    rows: list[Tensor]  # per source [T, K] int64, receive row at the owner of topk_idx[t, k]; -1: no expert, or dropped
    # per receiver [n, 2] int64, (source rank, token) of each used row, n = min(recv_total_counter, C)
    row_src: list[Tensor]
    # per receiver [n, K] int64, local experts of each used row, ascending, compacted to the left, then -1
    row_experts: list[Tensor]
    expert_counters: list[Tensor]  # per receiver [L] int32, tokens per local expert, dropped ones not counted
    recv_total_counter: list[int]  # per receiver, rows before any drop


def ht_flat_map(
    topk_idx: Sequence[Tensor], *, num_experts: int, max_recv_tokens_per_rank: int | None = None
) -> FlatMap:
    """HT FLAT (semantics 6.2): one row per (token, rank that hosts any of its experts), ascending (source rank, token).

    topk_idx: per source int [T, K]. With C, a receiver's rows with an index >= C are dropped.
    """
    num_ranks, num_topk = len(topk_idx), topk_idx[0].shape[1]
    local = _num_local_experts(num_experts, num_ranks)
    checked = [_checked_ids(ids, num_experts) for ids in topk_idx]
    ids = [source_ids.tolist() for source_ids in checked]
    places = [torch.full(tuple(source_ids.shape), -1, dtype=torch.int64) for source_ids in checked]
    row_src, row_experts, counters, totals = [], [], [], []
    for r in range(num_ranks):
        every_row = _ht_rows(ids, r, local)
        kept = every_row[:max_recv_tokens_per_rank]
        counter = [0] * local
        for row, (s, t, hits) in enumerate(kept):
            for expert in hits:
                counter[expert] += 1
            for k, e in enumerate(ids[s][t]):
                if e - r * local in hits:
                    places[s][t, k] = row
        row_src.append(torch.tensor([[s, t] for s, t, _ in kept], dtype=torch.int64).reshape(-1, 2))
        compacted = [hits + [-1] * (num_topk - len(hits)) for _, _, hits in kept]
        row_experts.append(torch.tensor(compacted, dtype=torch.int64).reshape(-1, num_topk))
        counters.append(torch.tensor(counter, dtype=torch.int32))
        totals.append(len(every_row))
    return FlatMap(num_experts, max_recv_tokens_per_rank, checked, places, row_src, row_experts, counters, totals)


def ht_flat_dispatch(
    routing: FlatMap,
    tokens: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None = None,
    *,
    scales: Sequence[Tensor] | None = None,
    global_ids: bool = False,
    fill: float = 0,
) -> list[HTDispatch]:
    """HT FLAT dispatch. Forward: topk_weights per source fp32 [T, K]. Backward (tokens are gradients): None, then no
    ids and no weights come out.

    tokens: per source [T, H] of any dtype, bits are copied; scales: [T, S]. Unused rows of ids and weights are -1 and
    0, whatever `fill` is.
    """
    num_ranks = len(tokens)
    _check_lists(len(routing.topk_idx), tokens=tokens, topk_weights=topk_weights, scales=scales)
    local = routing.num_experts // num_ranks
    received = []
    for r in range(num_ranks):
        row_src, row_experts = routing.row_src[r], routing.row_experts[r]
        num_rows = len(row_src) if routing.max_recv_tokens_per_rank is None else routing.max_recv_tokens_per_rank
        idx = weights = None
        if topk_weights is not None:
            idx = torch.full((num_rows, row_experts.shape[1]), -1, dtype=torch.int64)
            weights = torch.zeros(num_rows, row_experts.shape[1], dtype=torch.float32)
            for row, (s, t) in enumerate(row_src.tolist()):
                for j, expert in enumerate(e for e in row_experts[row].tolist() if e >= 0):
                    idx[row, j] = expert + r * local if global_ids else expert
                    weights[row, j] = _ht_weight(routing.topk_idx[s][t], topk_weights[s][t], expert + r * local)
        row_scales = None if scales is None else _ht_copy(scales, row_src, num_rows, fill)
        received.append(HTDispatch(_ht_copy(tokens, row_src, num_rows, fill), weights, idx, row_scales))
    return received


def ht_flat_combine(
    routing: FlatMap,
    recv_tokens: Sequence[Tensor],
    recv_topk_weights: Sequence[Tensor] | None = None,
    *,
    team_size: int | None = None,
) -> list[HTCombine]:
    """HT FLAT combine: fp32 sum of a token's rows, one per rank, in ascending rank order, rounded once, no weights.

    recv_tokens: per receiver [N, H], bf16/fp16/fp32. Backward: recv_topk_weights per receiver fp32 [N, K], placed like
    the forward topk_weights. team_size: ranks of a team, see `_sum_teams`; None: all ranks are one.
    """
    _check_lists(len(routing.topk_idx), recv_tokens=recv_tokens, recv_topk_weights=recv_topk_weights)
    local, hidden = routing.num_experts // len(recv_tokens), recv_tokens[0].shape[1]
    combined = []
    for rank, (ids, places) in enumerate(zip(routing.topk_idx, routing.rows, strict=True)):
        out = torch.zeros(len(ids), hidden, dtype=recv_tokens[0].dtype)
        grads = None if recv_topk_weights is None else torch.zeros(tuple(ids.shape), dtype=torch.float32)
        for t, (token_ids, token_rows) in enumerate(zip(ids.tolist(), places.tolist(), strict=True)):
            row_of_rank = {e // local: row for e, row in zip(token_ids, token_rows, strict=True) if row >= 0}
            summands = [(p, recv_tokens[p][row]) for p, row in sorted(row_of_rank.items())]
            out[t] = _sum_teams(summands, rank, len(recv_tokens), team_size, hidden).to(out.dtype)
            for k, (e, row) in enumerate(zip(token_ids, token_rows, strict=True)):
                if grads is not None and recv_topk_weights is not None and row >= 0:
                    column = routing.row_experts[e // local][row].tolist().index(e % local)
                    grads[t, k] = recv_topk_weights[e // local][row, column]
        combined.append(HTCombine(out, grads))
    return combined
