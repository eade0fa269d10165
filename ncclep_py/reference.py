"""The oracle: what dispatch and combine must return, in plain torch on the CPU, for all ranks at once.

It knows no windows, slots, kernels or processes and imports nothing from the product, so that a mistake in one is not a
mistake in the other. Every list argument has one entry per rank; every loop is the definition, not an optimisation.
Source: the behavioural specification of NCCL EP ("semantics", sections 5 to 7 and 15), with our own choices where it
leaves the result open. These choices are:

order       Low latency rows come in (source rank, token, k) order. (The reference library: arrival order.)
overflow    A low latency row that does not fit its expert plane is dropped and counted, never written elsewhere.
ids         An expert id outside [0, num_experts) counts as -1, "no expert".
duplicates  Low latency: every duplicate of an expert in a token is a row of its own. High throughput: one row, whose
            weight is the sum of the duplicates' weights in k order; backward, the gradient of that weight goes to every
            duplicate position.
budget      High throughput with max_recv_tokens_per_rank = C loses exactly the rows with an index >= C (the DROP
            policy). TRAP is the same plus an error, wherever recv_total_counter > C.
rounding    LL EXPERT_MAJOR: chain of fp32 fused multiply-adds over k. All else: chain of fp32 adds. Each chain starts
            at +0 and is rounded to the token dtype once, at its end, to nearest even. No sum is rounded per rank or per
            team on the way.

NaN is a value like any other: dispatch copies its bits, combine propagates it (its payload is then unspecified),
unselected rows are never read. Subnormals are kept, not flushed. Errors: ValueError for shapes and sizes that fit no
contract.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "ExpertMajorMap",
    "FlatMap",
    "HTCombine",
    "HTDispatch",
    "LLExpertMajorDispatch",
    "LLRankMajorDispatch",
    "fma32",
    "ht_expert_major_combine",
    "ht_expert_major_dispatch",
    "ht_expert_major_map",
    "ht_flat_combine",
    "ht_flat_dispatch",
    "ht_flat_map",
    "ll_expert_major_combine",
    "ll_expert_major_dispatch",
    "ll_nvfp4_combine",
    "ll_rank_major_combine",
    "ll_rank_major_dispatch",
    "moe_layer",
    "quantize_ds_fp8",
    "quantize_nvfp4",
]

# Dimensions in the comments below: R ranks, E experts in all, L = E/R per rank, K = top-k, T tokens of one source rank
# (may differ, may be 0), M = max_dispatch_tokens_per_rank, C = max_recv_tokens_per_rank, N rows of a receive buffer,
# H elements per row, S scales per row.


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def fma32(x: Tensor, w: Tensor, acc: Tensor) -> Tensor:
    """Fused multiply-add: fp32(x * w + acc) with one rounding, to nearest even. Broadcasts.

    The exact result for all fp32, bf16 and fp16 inputs. x * w is exact in fp64 (2 x 24 bits fit 53, exponents too). The
    fp64 sum need not be: rounding it to fp64 and then to fp32 can be wrong on a tie. So the sum is rounded to odd (an
    inexact result with an even last bit moves to its neighbour on the side of the lost part), after which the cast to
    fp32 rounds as if from the exact value, because fp64 has more than two bits to spare over fp32, subnormals included.
    """
    product, addend = x.double() * w.double(), acc.double()
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)  # Knuth's two-sum: total + lost is the exact sum
    last_bit_even = (total.view(torch.int64) & 1) == 0
    to_odd = torch.isfinite(total) & (lost != 0) & last_bit_even
    side = torch.where(lost > 0, torch.inf, -torch.inf).double()
    return torch.where(to_odd, torch.nextafter(total, side), total).float()


def quantize_ds_fp8(tokens: Tensor, round_scales: bool = False) -> tuple[Tensor, Tensor]:
    """DS_FP8 dispatch quantisation: bf16 [T, H] -> q float8_e4m3fn [T, H] and scales fp32 [T, H/128].

    A value is worth q * scale. Per block of 128 columns, in fp32: amax = max(1e-4, max|x|). The stored scale is amax *
    fp32(1/448), and q = x * (448 / amax) rounded to nearest even and held within +-448. With round_scales the stored
    scale is raised to the next power of two (unless it is one) and q = x / scale. A block that holds NaN or Inf is
    unspecified. H is any multiple of 128 here (nccl_ep asks for 512).
    """
    num_tokens, hidden = tokens.shape
    if tokens.dtype != torch.bfloat16 or hidden % 128:
        raise ValueError(f"tokens must be bfloat16 [T, a multiple of 128]: got {tokens.dtype} {list(tokens.shape)}")
    blocks = tokens.float().reshape(num_tokens, hidden // 128, 128)
    amax = blocks.abs().amax(dim=2).clamp(min=1e-4)
    scale_inv = amax * torch.tensor(1 / 448, dtype=torch.float32)
    scale = torch.tensor(448.0) / amax  # not 448.0 / amax, which torch computes as 448 * (1 / amax), rounded twice
    if round_scales:
        bits = scale_inv.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # biased by 127; +1 unless already a power of two
        scale_inv = (exponent << 23).int().view(torch.float32)
        scale = ((254 - exponent) << 23).int().view(torch.float32)  # the exact reciprocal
    quantized = (blocks * scale[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantized.reshape(num_tokens, hidden), scale_inv


def quantize_nvfp4(rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 combine quantisation: bf16 [N, H], a scale g per row fp32 [N] -> q fp32 [N, H] and block factors fp32 [N, H/16].

    A value is worth q * factor, q one of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives (E2M1). Per block of 16 columns, in
    fp32: f = g * (max|x| * fp32(1/6)), s = f to E4M3 (nearest even, at most 448), q = x * inverse to E2M1 (nearest even, at
    most 6) with inverse = 1 / (s * (1/g)), 0 where f = 0; 1/g counts as 0 for g = 0. The factor is s * (1/g), where an
    infinite 1/g counts as 1. (The reference library: the same with approximate reciprocals.) NaN and Inf are unspecified.
    """
    num_rows, hidden = rows.shape
    if rows.dtype != torch.bfloat16 or hidden % 16 or scales.shape != (num_rows,):
        raise ValueError(f"rows must be bfloat16 [N, a multiple of 16] with N scales: got {rows.dtype} {list(rows.shape)}")
    blocks, g, one = rows.float().reshape(num_rows, hidden // 16, 16), scales.float()[:, None], torch.tensor(1.0)
    f = g * (blocks.abs().amax(dim=2) * torch.tensor(1 / 6, dtype=torch.float32))
    s = f.clamp(max=448).to(torch.float8_e4m3fn).float()
    inverse_g = torch.where(g == 0, 0.0, one / g)
    inverse = torch.where(f == 0, 0.0, one / (s * inverse_g))
    y = (blocks * inverse[:, :, None]).nan_to_num(nan=0.0, posinf=6.0, neginf=-6.0).clamp(-6, 6)
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    q = torch.round(y / step) * step  # torch rounds halves to even
    decode_g = torch.where(torch.isinf(one / g), 1.0, one / g)
    return q.reshape(num_rows, hidden), s * decode_g


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


def _sum32(rows: Iterable[Tensor], hidden: int) -> Tensor:
    """fp32 [H]: +0 + row + row + ..., in the order given."""
    acc = torch.zeros(hidden, dtype=torch.float32)
    for row in rows:
        acc = acc + row.float()
    return acc


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


# ---- shared by the layouts: checks and blank tensors -----------------------------------------------------------------


def _checked_ids(topk_idx: Tensor, num_experts: int) -> Tensor:
    """int64 [T, K]: the ids, with everything outside [0, num_experts) turned to -1."""
    if topk_idx.ndim != 2:
        raise ValueError(f"topk_idx must be [T, K]: got {list(topk_idx.shape)}")
    ids = topk_idx.long()
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)


def _num_local_experts(num_experts: int, num_ranks: int) -> int:
    if num_experts <= 0 or num_experts % num_ranks:
        raise ValueError(f"num_experts must divide evenly over ranks: {num_experts} over {num_ranks}")
    return num_experts // num_ranks


def _check_lists(num_ranks: int, **lists: Sequence[object] | None) -> None:
    for name, values in lists.items():
        if values is not None and len(values) != num_ranks:
            raise ValueError(f"{name} must have one entry per rank: {len(values)} for {num_ranks} ranks")


def _check_sources(tokens: Sequence[Tensor], topk_idx: Sequence[Tensor], max_dispatch_tokens_per_rank: int) -> None:
    _check_lists(len(tokens), topk_idx=topk_idx)
    for s, (rows, ids) in enumerate(zip(tokens, topk_idx, strict=True)):
        if not len(rows) == len(ids) <= max_dispatch_tokens_per_rank:
            limit = max_dispatch_tokens_per_rank
            raise ValueError(f"rank {s}: {len(rows)} tokens, {len(ids)} rows of topk_idx, at most {limit} allowed")


def _blank(shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> Tensor:
    if fill == 0:  # by bytes, because torch cannot fill every packed dtype
        return torch.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)
    return torch.empty(shape, dtype=dtype).fill_(fill)


# ---- low latency, EXPERT_MAJOR ---------------------------------------------------------------------------------------


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


# ---- low latency, RANK_MAJOR -----------------------------------------------------------------------------------------


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


# ---- high throughput: results common to both layouts -----------------------------------------------------------------


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


# ---- high throughput, FLAT -------------------------------------------------------------------------------------------


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


# ---- high throughput, EXPERT_MAJOR -----------------------------------------------------------------------------------


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
