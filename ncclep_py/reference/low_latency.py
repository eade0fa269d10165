"""The oracle: low latency, EXPERT_MAJOR and RANK_MAJOR, and a MoE layer in one process. See the package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ncclep_py.reference.arithmetic import _sum32, fma32, quantize_nvfp4
from ncclep_py.reference.checks import _blank, _check_lists, _check_sources, _checked_ids, _num_local_experts

__all__ = [
    "LLExpertMajorDispatch",
    "LLRankMajorDispatch",
    "ll_expert_major_combine",
    "ll_expert_major_dispatch",
    "ll_nvfp4_combine",
    "ll_rank_major_combine",
    "ll_rank_major_dispatch",
    "moe_layer",
]


@dataclass(frozen=True)
class LLExpertMajorDispatch:
    """What one rank has after an LL EXPERT_MAJOR dispatch: the first three as receiver, the last two as source."""

    # [L, R*M, H] token dtype; plane l, rows [0, expert_counters[l]) in (source rank, token, k) order; the others = fill
    tokens: Tensor
    expert_counters: Tensor  # [L] int32, rows of each plane, never above R*M
    scales: Tensor | None  # [L, R*M, S] scale dtype, placed like tokens
    rows: Tensor  # [T, K] int64, where my (token, k) went: owner*(L*R*M) + local_expert*(R*M) + row; -1: nowhere
    overflow: int  # how many of my (token, k) found their plane full


def ll_expert_major_dispatch(
    tokens: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    *,
    num_experts: int,
    max_dispatch_tokens_per_rank: int,
    scales: Sequence[Tensor] | None = None,
    fill: float = 0,
    masked: Collection[int] = (),
) -> list[LLExpertMajorDispatch]:
    """LL EXPERT_MAJOR dispatch (semantics 5.2): one row per (token, k) with an expert.

    Bits are copied, so any dtype and scales do. tokens: per source rank [T, H]; topk_idx: int [T, K]; scales: [T, S].
    Masked ranks send nothing and receive nothing.
    """
    num_ranks = len(tokens)
    local = _num_local_experts(num_experts, num_ranks)
    _check_sources(tokens, topk_idx, max_dispatch_tokens_per_rank)
    _check_lists(num_ranks, scales=scales)
    plane = num_ranks * max_dispatch_tokens_per_rank
    received = [_blank((local, plane, tokens[0].shape[1]), tokens[0].dtype, fill) for _ in range(num_ranks)]
    received_scales = scales and [
        _blank((local, plane, scales[0].shape[1]), scales[0].dtype, fill) for _ in range(num_ranks)
    ]
    counters = torch.zeros(num_ranks, local, dtype=torch.int32)
    rows = [torch.full(tuple(ids.shape), -1, dtype=torch.int64) for ids in topk_idx]
    overflow = [0] * num_ranks
    for s in range(num_ranks):
        for t, ids in enumerate(_checked_ids(topk_idx[s], num_experts).tolist()):
            for k, e in enumerate(ids):
                owner, expert = divmod(e, local)
                if e < 0 or s in masked or owner in masked:
                    continue
                row = int(counters[owner, expert])
                if row >= plane:
                    overflow[s] += 1
                    continue
                counters[owner, expert] += 1
                rows[s][t, k] = owner * local * plane + expert * plane + row
                received[owner][expert, row] = tokens[s][t]
                if scales is not None and received_scales is not None:
                    received_scales[owner][expert, row] = scales[s][t]
    return [
        LLExpertMajorDispatch(
            received[r], counters[r].clone(), received_scales[r] if received_scales else None, rows[r], overflow[r]
        )
        for r in range(num_ranks)
    ]


def ll_expert_major_combine(
    expert_tokens: Sequence[Tensor],
    rows: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    *,
    masked: Collection[int] = (),
) -> list[Tensor]:
    """LL EXPERT_MAJOR combine (semantics 5.6): a chain acc = fma32(row_k, w_k, acc) over ascending k.

    It starts at +0 and is rounded to the token dtype at its end.

    expert_tokens: per owner rank [L, R*M, H], bf16/fp16/fp32; rows: per source rank int64 [T, K] as dispatch returned
    it; topk_weights: fp32 [T, K]. A position with row -1 or a masked owner is skipped, weight and all, without
    renormalisation. Returns per source rank [T, H], every row written.
    """
    _check_lists(len(expert_tokens), rows=rows, topk_weights=topk_weights)
    local, plane, hidden = expert_tokens[0].shape
    flat = [planes.reshape(local * plane, hidden) for planes in expert_tokens]
    combined = []
    for source_rows, weights in zip(rows, topk_weights, strict=True):
        out = torch.zeros(len(source_rows), hidden, dtype=expert_tokens[0].dtype)
        for t, token_rows in enumerate(source_rows.tolist()):
            acc = torch.zeros(hidden, dtype=torch.float32)
            for k, row_id in enumerate(token_rows):
                owner, row = divmod(row_id, local * plane)
                if row_id >= 0 and owner not in masked:
                    acc = fma32(flat[owner][row], weights[t, k], acc)
            out[t] = acc.to(out.dtype)
        combined.append(out)
    return combined


@dataclass(frozen=True)
class LLRankMajorDispatch:
    """What one rank has after an LL RANK_MAJOR dispatch: all as receiver but `rows`, as source."""

    tokens: Tensor  # [R, M, H] token dtype; plane s, rows [0, src_rank_counters[s]) in token order; the others = fill
    # [R, M, K] int32, the expert (local id, or global id) at each position hosted here; -1 elsewhere, and in all unused
    # rows
    topk_idx: Tensor
    topk_weights: Tensor  # [R, M, K] fp32, all K weights of the token, hosted here or not; unused rows = fill
    src_rank_counters: Tensor  # [R] int32, rows of each plane
    scales: Tensor | None  # [R, M, S] scale dtype, placed like tokens
    # [T, K] int64, owner*(R*M) + my rank*M + row at the first k of each distinct owner of my token; -1 at all other
    # positions
    rows: Tensor


def ll_rank_major_dispatch(
    tokens: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    *,
    num_experts: int,
    max_dispatch_tokens_per_rank: int,
    scales: Sequence[Tensor] | None = None,
    global_ids: bool = False,
    fill: float = 0,
    masked: Collection[int] = (),
) -> list[LLRankMajorDispatch]:
    """LL RANK_MAJOR dispatch (semantics 5.3): one row per (token, rank that hosts any of its experts). Positions k are
    kept.

    tokens: per source rank [T, H]; topk_idx: int [T, K]; topk_weights: fp32 [T, K]; scales: [T, S]; global_ids:
    numbering of the returned topk_idx. Masked ranks send nothing and receive nothing.
    """
    num_ranks, num_topk, cap = len(tokens), topk_idx[0].shape[1], max_dispatch_tokens_per_rank
    local = _num_local_experts(num_experts, num_ranks)
    _check_sources(tokens, topk_idx, cap)
    _check_lists(num_ranks, topk_weights=topk_weights, scales=scales)
    results = [
        LLRankMajorDispatch(
            tokens=_blank((num_ranks, cap, tokens[0].shape[1]), tokens[0].dtype, fill),
            topk_idx=torch.full((num_ranks, cap, num_topk), -1, dtype=torch.int32),
            topk_weights=_blank((num_ranks, cap, num_topk), torch.float32, fill),
            src_rank_counters=torch.zeros(num_ranks, dtype=torch.int32),
            scales=None if scales is None else _blank((num_ranks, cap, scales[0].shape[1]), scales[0].dtype, fill),
            rows=torch.full(tuple(topk_idx[r].shape), -1, dtype=torch.int64),
        )
        for r in range(num_ranks)
    ]
    for s in range(num_ranks):
        for t, ids in enumerate(_checked_ids(topk_idx[s], num_experts).tolist()):
            owners = [e // local if e >= 0 else -1 for e in ids]
            for p in range(num_ranks):
                if p not in owners or s in masked or p in masked:
                    continue
                there = results[p]
                row = int(there.src_rank_counters[s])
                there.src_rank_counters[s] += 1
                there.tokens[s, row] = tokens[s][t]
                there.topk_weights[s, row] = topk_weights[s][t]
                if scales is not None and there.scales is not None:
                    there.scales[s, row] = scales[s][t]
                for k, e in enumerate(ids):
                    if owners[k] == p:
                        there.topk_idx[s, row, k] = e if global_ids else e - p * local
                results[s].rows[t, owners.index(p)] = p * num_ranks * cap + s * cap + row
    return results


def ll_rank_major_combine(
    rank_tokens: Sequence[Tensor], rows: Sequence[Tensor], *, masked: Collection[int] = ()
) -> list[Tensor]:
    """LL RANK_MAJOR combine (semantics 5.6): fp32 sum of one row per distinct owner, in the order of its first k.

    The sum is rounded to the token dtype at its end.

    rank_tokens: per owner rank [R, M, H], bf16/fp16/fp32, each row reduced over that rank's experts, weights included,
    by the caller. rows: per source rank int64 [T, K] as dispatch returned it. No weights. Masked owners are skipped.
    Returns per source rank [T, H].
    """
    _check_lists(len(rank_tokens), rows=rows)
    num_ranks, cap, hidden = rank_tokens[0].shape
    flat = [planes.reshape(num_ranks * cap, hidden) for planes in rank_tokens]
    combined = []
    for source_rows in rows:
        out = torch.zeros(len(source_rows), hidden, dtype=rank_tokens[0].dtype)
        for t, token_rows in enumerate(source_rows.tolist()):
            places = [divmod(row_id, num_ranks * cap) for row_id in token_rows if row_id >= 0]
            out[t] = _sum32((flat[owner][row] for owner, row in places if owner not in masked), hidden).to(out.dtype)
        combined.append(out)
    return combined


def ll_nvfp4_combine(
    expert_tokens: Sequence[Tensor],
    scales: Sequence[Tensor],
    rows: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """LL combine of rows that travel as NVFP4 (semantics 5.9): acc = fma32(q, factor * w, acc) over ascending k.

    Arguments as in the combine of the layout, EXPERT_MAJOR with topk_weights, RANK_MAJOR without (w = 1); scales: per owner
    rank fp32, one per row, [planes, rows, 1]. Rows nobody refers to may hold anything.
    """
    _check_lists(len(expert_tokens), scales=scales, rows=rows, topk_weights=topk_weights)
    planes, plane, hidden = expert_tokens[0].shape
    packed: dict[int, tuple[Tensor, Tensor]] = {}
    combined = []
    for source, source_rows in enumerate(rows):
        out = torch.zeros(len(source_rows), hidden, dtype=torch.bfloat16)
        for t, token_rows in enumerate(source_rows.tolist()):
            acc = torch.zeros(hidden, dtype=torch.float32)
            for k, row_id in enumerate(token_rows):
                if row_id < 0:
                    continue
                if row_id not in packed:
                    owner, row = divmod(row_id, planes * plane)
                    g = scales[owner].reshape(planes * plane)[row : row + 1]
                    packed[row_id] = quantize_nvfp4(expert_tokens[owner].reshape(planes * plane, hidden)[row : row + 1], g)
                q, factor = packed[row_id]
                weight = torch.tensor(1.0) if topk_weights is None else topk_weights[source][t, k]
                acc = fma32(q[0], (factor[0] * weight).repeat_interleave(16), acc)
            out[t] = acc.to(out.dtype)
        combined.append(out)
    return combined


def moe_layer(
    tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """A mixture-of-experts layer in one process: out[t] = sum over k of w_k * expert_k(tokens[t]).

    No dispatch takes place. The sum is that of LL EXPERT_MAJOR combine: acc = +0, then acc = fma32(y_k, w_k, acc) for
    ascending k, one rounding to the token dtype. y_k is the expert's output rounded to the token dtype, as it would
    travel. Each expert is called once, on its tokens [n, H] in token order, if it has any; a distributed run agrees bit
    for bit only if a row's result does not depend on the other rows in the call.

    tokens [T, H]; topk_idx int [T, K], ids outside [0, len(experts)) are skipped; topk_weights fp32 [T, K]; returns [T,
    H] in the token dtype.
    """
    expert_of = _checked_ids(topk_idx, len(experts))
    expert_rows: dict[tuple[int, int], Tensor] = {}  # (expert, token) -> y
    for e, expert in enumerate(experts):
        chosen = [t for t, ids in enumerate(expert_of.tolist()) if e in ids]
        if chosen:
            results = expert(tokens[chosen]).to(tokens.dtype)
            expert_rows.update({(e, t): results[i] for i, t in enumerate(chosen)})
    out = torch.zeros_like(tokens)
    for t, ids in enumerate(expert_of.tolist()):
        acc = torch.zeros(tokens.shape[1], dtype=torch.float32)
        for k, e in enumerate(ids):
            if e >= 0:
                acc = fma32(expert_rows[e, t], topk_weights[t, k], acc)
        out[t] = acc.to(tokens.dtype)
    return out
