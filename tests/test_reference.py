"""The oracle against hand-worked cases: expected values come from the specification by hand or from exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from ncclep_py import reference as ref

# The worked micro example (semantics 18): R=2, E=4, L=2, K=2. a, b on rank 0; c, d on rank 1. One number per token.
A, B, C, D = 1.0, 2.0, 3.0, 4.0
MICRO_TOKENS = [torch.tensor([[A], [B]]), torch.tensor([[C], [D]])]
MICRO_IDX = [torch.tensor([[0, 3], [1, -1]]), torch.tensor([[0, 1], [-1, -1]])]
MICRO_WEIGHTS = [torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor([[0.5, 0.6], [0.7, 0.8]])]
NAN, INF = math.nan, math.inf


def column(x: Tensor) -> list[float]:
    """The values of rows that hold one number each."""
    return x.flatten().tolist()


def stamped(counts: list[int]) -> list[Tensor]:
    """Token t of rank s holds the one number 100 * s + t + 1."""
    return [torch.tensor([[100.0 * s + t + 1] for t in range(n)]).reshape(n, 1) for s, n in enumerate(counts)]


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def ll_em(tokens: list[Tensor], topk_idx: list[Tensor], experts: int, cap: int, **more: object) -> list:
    return ref.ll_expert_major_dispatch(tokens, topk_idx, num_experts=experts, max_dispatch_tokens_per_rank=cap, **more)  # type: ignore[arg-type]


def ll_rm(
    tokens: list[Tensor], topk_idx: list[Tensor], weights: list[Tensor], experts: int, cap: int, **more: object
) -> list:
    return ref.ll_rank_major_dispatch(
        tokens, topk_idx, weights, num_experts=experts, max_dispatch_tokens_per_rank=cap, **more
    )  # type: ignore[arg-type]


# ---- fma32 ---------------------------------------------------------------------------------------------------------


def to_float32(exact: Fraction) -> float:
    """The fp32 number nearest to a rational, ties to even, subnormals kept; by integer arithmetic alone."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = 0
    while size / Fraction(2) ** exponent >= 2:
        exponent += 1
    while size / Fraction(2) ** exponent < 1:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    whole, rest = divmod(size, ulp)
    if rest * 2 > ulp or (rest * 2 == ulp and whole % 2):
        whole += 1
    rounded = whole * ulp
    value = INF if rounded >= Fraction(2) ** 128 else float(rounded)
    return value if exact > 0 else -value


def exact_fma(x: float, w: float, acc: float) -> float:
    return to_float32(Fraction(x) * Fraction(w) + Fraction(acc))


def fma(x: float, w: float, acc: float) -> float:
    return float(ref.fma32(torch.tensor(x), torch.tensor(w), torch.tensor(acc)))


U = 2.0**-24  # half an fp32 ulp of 1
NASTY = [
    (1 + 2 * U, 1 + 2 * U, 1.0),  # product needs 47 bits
    (1 + 2 * U, 1 + 2 * U, -1.0),  # cancels the leading bits: mul + add loses the rest
    (U, 1.0, 1.0),  # an exact tie, to even, down
    (U, 1.0, 1 + 2 * U),  # an exact tie, to even, up
    (U, 1 + 2 * U, 1.0),  # above the tie by 2**-47
    (U * (1 + 2 * U), 1.0 - 2 * U, 1.0),  # 2**-70 below the tie: fp64 cannot hold it
    (U * (1 + 2 * U), 1.0 - 2 * U, 1 + 2 * U),  # the same below a tie that would go up
    (2.0**-60, 2.0**-40, 1 + U * 2),  # a hair above a number
    (U + 2.0**-47, 1.0, 1.0),
    (-U, 2.0**-1, 1.0),  # below a power of two, where the spacing halves
    (-U * (1 + 2 * U), 2.0**-1, 1.0),
    (3.4028234663852886e38, 1.0, 1.0),
    (3.4028234663852886e38, 2.0, -3.4028234663852886e38),  # the product alone overflows fp32
    (3.4028234663852886e38, 1.0, 2.0**103),  # overflow tie: to infinity
    (3.4028234663852886e38, 1.0, 2.0**103 - 2.0**79),  # just not
    (2.0**-149, 1.0, 2.0**-149),  # subnormals
    (2.0**-149, 0.5, 0.0),  # half of the smallest: ties to 0
    (2.0**-149, 0.75, 0.0),
    (2.0**-149, 0.5, 2.0**-149),  # 1.5 of the smallest: ties to 2
    (2.0**-100, 2.0**-49, 2.0**-126),
    (2.0**-149, 2.0**-149, 2.0**-126),
    (-(2.0**-149), 2.0**-149, 2.0**-126),
    (2.0**-75, 2.0**-75 * (1 + 2 * U), 2.0**-149),
]


@pytest.mark.parametrize(("x", "w", "acc"), NASTY)
def test_fma_is_exact_on_nasty_cases(x: float, w: float, acc: float) -> None:
    for sign_x in (1, -1):
        for sign_acc in (1, -1):
            args = (sign_x * x, w, sign_acc * acc)
            assert all(float(torch.tensor(a)) == a for a in args), "the case itself must be fp32"
            assert fma(*args) == exact_fma(*args)


def test_fma_differs_from_fp64_then_fp32_where_it_must() -> None:
    # Above 2**24 fp32 holds even integers: 2**24 + 3 is a tie that goes to + 4. The sum here is 2**-46 below it, which
    # fp64 (spacing 2**-28 there) cannot see.
    assert fma(3.0, 1.0, 2.0**24) == 2.0**24 + 4
    tie = torch.tensor([1 - 2.0**-23]), torch.tensor([1 + 2.0**-23])  # product is 1 - 2**-46
    acc32 = torch.tensor([2.0**24 + 2])  # the sum is 2**24 + 3 - 2**-46
    naive = (tie[0].double() * tie[1].double() + acc32.double()).float()
    assert naive.item() == 2.0**24 + 4  # wrong: rounded twice
    assert ref.fma32(*tie, acc32).item() == 2.0**24 + 2
    assert exact_fma(1 - 2.0**-23, 1 + 2.0**-23, 2.0**24 + 2) == 2.0**24 + 2


def test_fma_is_exact_on_random_bits() -> None:
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(-(2**31), 2**31 - 1, (3, 1500), dtype=torch.int64, generator=generator).to(torch.int32)
    exponents = torch.randint(118, 138, raw.shape, generator=generator).int()
    near = (raw & 0x807FFFFF) | (exponents << 23)  # between 2**-9 and 2**11
    tiny = (raw & 0x807FFFFF) | (torch.randint(0, 3, raw.shape, generator=generator).int() << 23)  # about subnormal
    tiny[1] = near[1]
    for x, w, acc in (raw.view(torch.float32), near.view(torch.float32), tiny.view(torch.float32)):
        finite = torch.isfinite(x) & torch.isfinite(w) & torch.isfinite(acc)
        got = ref.fma32(x, w, acc)[finite].tolist()
        want = [exact_fma(*v) for v in zip(x[finite].tolist(), w[finite].tolist(), acc[finite].tolist(), strict=True)]
        assert got == want


def test_fma_is_exact_next_to_ties() -> None:
    # acc = 1 (or 1 + ulp) plus a product within 2**-60 of half an ulp: every one is a double rounding trap for fp64.
    for m in range(1, 200):
        x, w = 1 + m * 2.0**-23, U * (1 - m * 2.0**-23)
        w = float(torch.tensor(w))
        for acc in (1.0, 1 + 2 * U, 2.0**10, -1.0, -1 - 2 * U):
            assert fma(x, w, acc) == exact_fma(x, w, acc)


def test_fma_specials_follow_fp32() -> None:
    assert math.isnan(fma(NAN, 0.0, 1.0)) and math.isnan(fma(1.0, NAN, 1.0)) and math.isnan(fma(1.0, 1.0, NAN))
    assert math.isnan(fma(INF, 0.0, 1.0)) and math.isnan(fma(INF, 1.0, -INF))
    assert fma(INF, 2.0, 1.0) == INF and fma(1.0, 1.0, -INF) == -INF and fma(INF, -1.0, 1e38) == -INF
    assert math.copysign(1, fma(-0.0, 1.0, 0.0)) == 1 and math.copysign(1, fma(1.0, -1.0, 1.0)) == 1
    assert math.copysign(1, fma(-0.0, 1.0, -0.0)) == -1
    assert math.copysign(1, fma(-(2.0**-149), 0.25, 0.0)) == -1  # a tiny negative result rounds to -0
    assert fma(1.0, 1.0, 3.4028234663852886e38) == 3.4028234663852886e38


# ---- low latency, EXPERT_MAJOR -------------------------------------------------------------------------------------


def test_ll_expert_major_micro_example() -> None:
    at0, at1 = ll_em(MICRO_TOKENS, MICRO_IDX, 4, 2, fill=-7)
    assert at0.tokens.shape == (2, 4, 1)
    assert column(at0.tokens) == [A, C, -7, -7, B, C, -7, -7]
    assert column(at1.tokens) == [-7, -7, -7, -7, A, -7, -7, -7]
    assert at0.expert_counters.tolist() == [2, 2] and at1.expert_counters.tolist() == [0, 1]
    assert at0.expert_counters.dtype == torch.int32
    # row id = owner * 8 + local expert * 4 + row
    assert at0.rows.tolist() == [[0, 12], [4, -1]] and at1.rows.tolist() == [[1, 5], [-1, -1]]
    assert at0.rows.dtype == torch.int64 and at0.overflow == at1.overflow == 0 and at0.scales is None


def test_ll_expert_major_micro_combine() -> None:
    # Experts: 0 adds nothing, 1 doubles, 2 nobody, 3 negates. Weights are powers of two, so the sums are exact.
    sent = ll_em(MICRO_TOKENS, MICRO_IDX, 4, 2, fill=NAN)
    processed = [
        sent[0].tokens * torch.tensor([1.0, 2.0])[:, None, None],
        sent[1].tokens * torch.tensor([NAN, -1.0])[:, None, None],
    ]
    weights = [torch.tensor([[0.5, 0.25], [0.5, NAN]]), torch.tensor([[2.0, 4.0], [NAN, NAN]])]
    out0, out1 = ref.ll_expert_major_combine(processed, [s.rows for s in sent], weights)
    assert column(out0) == [0.5 * A - 0.25 * A, 0.5 * 2 * B]
    assert column(out1) == [2 * C + 4 * 2 * C, 0.0]
    assert math.copysign(1, out1[1, 0].item()) == 1
    # Rank 1 masked: a loses its second term and is not renormalised.
    out0, _ = ref.ll_expert_major_combine(processed, [s.rows for s in sent], weights, masked={1})
    assert column(out0) == [0.5 * A, 0.5 * 2 * B]


def test_ll_expert_major_duplicates_take_two_rows() -> None:
    # R=1, E=2: token 0 lists expert 1 twice and expert 0 between.
    (got,) = ll_em(stamped([2]), [ids([1, 0, 1], [1, -1, -1])], 2, 3)
    assert column(got.tokens) == [1, 0, 0, 1, 1, 2]
    assert got.expert_counters.tolist() == [1, 3]
    assert got.rows.tolist() == [[3, 0, 4], [5, -1, -1]]
    rows = torch.tensor([[[10.0], [0], [0]], [[1.0], [2.0], [4.0]]])  # the two copies return different values
    (out,) = ref.ll_expert_major_combine([rows], [got.rows], [torch.tensor([[1.0, 0.5, 8.0], [2.0, NAN, NAN]])])
    assert column(out) == [1 + 5 + 16, 8]


def test_ll_expert_major_overflow_is_dropped_and_counted() -> None:
    # R=1, M=1: a plane has one row; topk [3, 3] needs two.
    (got,) = ll_em(stamped([1]), [ids([3, 3])], 4, 1)
    assert column(got.tokens) == [0, 0, 0, 1]
    assert got.expert_counters.tolist() == [0, 0, 0, 1]
    assert got.rows.tolist() == [[3, -1]] and got.overflow == 1
    (out,) = ref.ll_expert_major_combine([got.tokens], [got.rows], [torch.tensor([[2.0, NAN]])])
    assert column(out) == [2.0]


def test_ll_expert_major_overflow_is_counted_at_the_source() -> None:
    # R=2, M=1, E=2: plane of expert 0 has 2 rows; rank 0 takes both, all three of rank 1's find it full.
    at0, at1 = ll_em(stamped([1, 1]), [ids([0, 0, 1]), ids([0, 0, 0])], 2, 1)
    assert (at0.overflow, at1.overflow) == (0, 3)
    assert at0.rows.tolist() == [[0, 1, 2]] and at1.rows.tolist() == [[-1, -1, -1]]
    assert at0.expert_counters.tolist() == [2] and at1.expert_counters.tolist() == [1]
    assert column(at0.tokens) == [1, 1] and column(at1.tokens) == [1, 0]


def test_ll_expert_major_holes_and_foreign_ids() -> None:
    # -1 at each position, a whole row of them, ids below and above the range.
    idx = [ids([-1, 0, 1], [1, -1, 0], [0, 1, -1], [-1, -1, -1], [2, -5, 99]), ids()]
    idx[1] = torch.zeros(0, 3, dtype=torch.int64)
    at0, at1 = ll_em(stamped([5, 0]), idx, 2, 5)
    assert at0.rows.tolist() == [[-1, 0, 10], [11, -1, 1], [2, 12, -1], [-1, -1, -1], [-1, -1, -1]]
    assert column(at0.tokens)[:4] == [1, 2, 3, 0] and column(at1.tokens)[:4] == [1, 2, 3, 0]
    assert at0.overflow == 0 and tuple(at1.rows.shape) == (0, 3)
    weights = [torch.ones(5, 3), torch.ones(0, 3)]
    out0, out1 = ref.ll_expert_major_combine([at0.tokens, at1.tokens], [at0.rows, at1.rows], weights)
    assert column(out0) == [2, 4, 6, 0, 0] and tuple(out1.shape) == (0, 1)


def test_ll_expert_major_unequal_and_empty_ranks() -> None:
    # R=3, E=3R: tokens 2, 0, 1; everything to expert 8 (rank 2, local 2).
    idx = [ids([8], [8]), torch.zeros(0, 1, dtype=torch.int32), ids([8])]
    at0, at1, at2 = ll_em(stamped([2, 0, 1]), idx, 9, 2)
    assert at0.expert_counters.tolist() == at1.expert_counters.tolist() == [0, 0, 0]
    assert at2.expert_counters.tolist() == [0, 0, 3]
    assert column(at2.tokens[2]) == [1, 2, 201, 0, 0, 0]
    assert at0.rows.tolist() == [[48], [49]] and at2.rows.tolist() == [[50]]  # 2 * 18 + 2 * 6 + row
    nothing = [torch.zeros(0, 1, dtype=torch.int64)] * 3
    for got in ll_em(stamped([0, 0, 0]), nothing, 9, 2, fill=5):
        assert got.expert_counters.tolist() == [0, 0, 0] and set(column(got.tokens)) == {5.0}


def test_ll_expert_major_one_expert_per_rank_and_k32() -> None:
    at0, at1 = ll_em(stamped([1, 2]), [ids([1]), ids([0], [1])], 2, 2)
    assert column(at0.tokens) == [101, 0, 0, 0] and column(at1.tokens) == [1, 102, 0, 0]
    order = [(7 * k) % 32 for k in range(32)]  # every expert once
    (got,) = ll_em(stamped([1]), [torch.tensor([order])], 32, 1)
    assert got.rows.tolist() == [order] and got.expert_counters.tolist() == [1] * 32
    processed = (torch.arange(32.0) + 1).reshape(32, 1, 1)
    (out,) = ref.ll_expert_major_combine([processed], [got.rows], [torch.ones(1, 32)])
    assert column(out) == [528.0]


def test_ll_expert_major_masked_ranks() -> None:
    at0, at1 = ll_em(MICRO_TOKENS, MICRO_IDX, 4, 2, masked={1})
    assert at0.expert_counters.tolist() == [1, 1] and column(at0.tokens) == [A, 0, 0, 0, B, 0, 0, 0]
    assert at0.rows.tolist() == [[0, -1], [4, -1]] and at1.rows.tolist() == [[-1, -1], [-1, -1]]
    assert at1.expert_counters.tolist() == [0, 0] and at0.overflow == 0


def test_ll_expert_major_combine_order_rounding_and_specials() -> None:
    def combine(values: list[float], weights: list[float], dtype: torch.dtype) -> Tensor:
        planes = torch.tensor(values, dtype=dtype).reshape(len(values), 1, 1)
        (out,) = ref.ll_expert_major_combine([planes], [torch.arange(len(values))[None]], [torch.tensor([weights])])
        assert out.dtype == dtype
        return out[0, 0]

    big = 2.0**24
    assert combine([big, -big, 1.0], [1, 1, 1], torch.float32) == 1  # (+a, -a, b)
    assert combine([big, 1.0, -big], [1, 1, 1], torch.float32) == 0  # (+a, b, -a): b is lost, as the order says
    assert combine([3.0, 3.0], [1.0, -1.0], torch.bfloat16) == 0
    zero = combine([-0.0, -0.0], [1, 1], torch.bfloat16)
    assert zero == 0 and not torch.signbit(zero)
    assert combine([1.0, 2.0**-8], [1, 1], torch.bfloat16) == 1  # a tie of bf16, to even, down
    assert combine([1 + 2.0**-7, 2.0**-8], [1, 1], torch.bfloat16) == 1 + 2.0**-6  # to even, up
    # Rounded once: 1 + 2**-8 + 2**-16 is above the tie; rounding after each term would lose both.
    assert combine([1.0, 2.0**-8, 2.0**-16], [1, 1, 1], torch.bfloat16) == 1 + 2.0**-7
    assert combine([1.0, 2.0**-11], [1, 1], torch.float16) == 1
    assert combine([60000.0, 60000.0], [1, 1], torch.float16) == INF
    # fma, not mul + add: (1 + u)(1 + u) - 1 keeps u * u, where u = 2**-12 and fp32(1 + 2u + u * u) = 1 + 2u.
    u = 2.0**-12
    assert combine([1.0, 1 + u], [-1.0, 1 + u], torch.float32) == 2 * u + u * u
    assert torch.isnan(combine([NAN, 1.0], [0.0, 1.0], torch.float32))  # weight 0 still multiplies
    assert torch.isnan(combine([INF, 1.0], [0.0, 1.0], torch.float32))
    assert combine([INF, 1.0], [1.0, 1.0], torch.float32) == INF


# ---- opaque rows: bits must survive --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32]
)
def test_dispatch_copies_every_bit(dtype: torch.dtype) -> None:
    pattern = torch.arange(256, dtype=torch.uint8)  # includes NaN payloads, infinities and subnormals of every type
    row = torch.cat([pattern, pattern.flip(0), torch.tensor([1, 0, 128, 127, 1, 0, 128, 255], dtype=torch.uint8)])
    tokens, scales = [row.view(dtype)[None]], [row.flip(0).view(dtype)[None]]
    idx, weights = [ids([1, 0])], [torch.tensor([[0.5, 2.0]])]
    (em,) = ll_em(tokens, idx, 2, 1, scales=scales)
    (rm,) = ll_rm(tokens, idx, weights, 2, 1, scales=scales)
    flat = ref.ht_flat_map(idx, num_experts=2)
    (ht,) = ref.ht_flat_dispatch(flat, tokens, weights, scales=scales)
    zones = ref.ht_expert_major_map(idx, num_experts=2, alignment=2)
    (zone,) = ref.ht_expert_major_dispatch(zones, tokens, weights, scales=scales)
    for got_tokens, got_scales in (
        (em.tokens[0, 0], em.scales[0, 0]),
        (em.tokens[1, 0], em.scales[1, 0]),
        (rm.tokens[0, 0], rm.scales[0, 0]),
        (ht.tokens[0], ht.scales[0]),
        (zone.tokens[0], zone.scales[0]),
        (zone.tokens[2], zone.scales[2]),
    ):
        assert got_tokens.dtype == got_scales.dtype == dtype
        assert torch.equal(bits(got_tokens), row) and torch.equal(bits(got_scales), row.flip(0))
    for pad in (1, 3):
        assert not bits(zone.tokens[pad]).any() and not bits(zone.scales[pad]).any()


# ---- low latency, RANK_MAJOR ---------------------------------------------------------------------------------------


def test_ll_rank_major_micro_example() -> None:
    at0, at1 = ll_rm(MICRO_TOKENS, MICRO_IDX, MICRO_WEIGHTS, 4, 2, fill=-7)
    assert column(at0.tokens) == [A, B, C, -7] and column(at1.tokens) == [A, -7, -7, -7]
    assert at0.topk_idx.tolist() == [[[0, -1], [1, -1]], [[0, 1], [-1, -1]]]
    assert at1.topk_idx.tolist() == [[[-1, 1], [-1, -1]], [[-1, -1], [-1, -1]]]
    assert at0.topk_idx.dtype == torch.int32 and at0.src_rank_counters.dtype == torch.int32
    assert at0.src_rank_counters.tolist() == [2, 1] and at1.src_rank_counters.tolist() == [1, 0]
    want = torch.tensor([[[0.1, 0.2], [0.3, 0.4]], [[0.5, 0.6], [-7.0, -7.0]]])
    assert torch.equal(at0.topk_weights, want)
    # row id = owner * 4 + source * 2 + row, at the first k of each owner
    assert at0.rows.tolist() == [[0, 4], [1, -1]] and at1.rows.tolist() == [[2, -1], [-1, -1]]
    _, at1 = ll_rm(MICRO_TOKENS, MICRO_IDX, MICRO_WEIGHTS, 4, 2, global_ids=True)
    assert at1.topk_idx.tolist() == [[[-1, 3], [-1, -1]], [[-1, -1], [-1, -1]]]


def test_ll_rank_major_keeps_positions_and_duplicates() -> None:
    # R=2, E=4: token 0 goes to ranks 1, 0, 1 and again expert 2; one row per rank.
    idx = [ids([2, 0, 3, 2]), torch.zeros(0, 4, dtype=torch.int64)]
    weights = [torch.tensor([[1.0, 2.0, 3.0, NAN]]), torch.zeros(0, 4)]
    at0, at1 = ll_rm(stamped([1, 0]), idx, weights, 4, 1)
    assert at0.topk_idx[0, 0].tolist() == [-1, 0, -1, -1] and at1.topk_idx[0, 0].tolist() == [0, -1, 1, 0]
    assert at1.topk_weights[0, 0, :3].tolist() == [1, 2, 3] and torch.isnan(at1.topk_weights[0, 0, 3])
    assert at0.rows.tolist() == [[2, 0, -1, -1]]
    assert at0.src_rank_counters.tolist() == at1.src_rank_counters.tolist() == [1, 0]


def test_ll_rank_major_combine_in_order_of_first_appearance() -> None:
    # Token 0 meets rank 2 first, then 0, then 1: (2**24 - 2**24) + 1 = 1; in rank order it would be lost.
    idx = [ids([2, 0, 2, 1]), torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.int64)]
    weights = [torch.full((1, 4), NAN), torch.zeros(0, 4), torch.zeros(0, 4)]  # combine applies none
    sent = ll_rm(stamped([1, 0, 0]), idx, weights, 3, 1, fill=NAN)
    values = [-(2.0**24), 1.0, 2.0**24]
    back = [torch.full((3, 1, 1), NAN) for _ in range(3)]
    for rows, value in zip(back, values, strict=True):
        rows[0, 0, 0] = value
    all_rows = [s.rows for s in sent]
    out = ref.ll_rank_major_combine(back, all_rows)
    assert column(out[0]) == [1.0] and tuple(out[1].shape) == (0, 1)
    assert column(ref.ll_rank_major_combine(back, all_rows, masked={0})[0]) == [2.0**24]
    assert column(ref.ll_rank_major_combine(back, all_rows, masked={2})[0]) == [-(2.0**24) + 1]


def test_ll_rank_major_round_once_zero_and_mask() -> None:
    idx = [ids([0, 1], [-1, 7])]
    idx.append(ids([-1, -1]))
    sent = ll_rm(stamped([2, 1]), idx, [torch.ones(2, 2), torch.ones(1, 2)], 2, 2)
    assert sent[0].rows.tolist() == [[0, 4], [-1, -1]] and sent[1].rows.tolist() == [[-1, -1]]
    back = [torch.full((2, 2, 1), -0.0, dtype=torch.bfloat16) for _ in range(2)]
    out0, out1 = ref.ll_rank_major_combine(back, [s.rows for s in sent])
    for out in (out0, out1):
        assert out.dtype == torch.bfloat16 and not torch.signbit(out).any() and not out.any()
    at0, at1 = ll_rm(MICRO_TOKENS, MICRO_IDX, MICRO_WEIGHTS, 4, 2, masked={0})
    assert at0.src_rank_counters.tolist() == [0, 0] and at1.src_rank_counters.tolist() == [0, 0]
    assert set(at0.topk_idx.flatten().tolist()) == {-1}


def test_ll_rank_major_with_local_reduction_equals_expert_major() -> None:
    # The user's part: each rank reduces its experts (here: times id + 1) by weight. Exact numbers, so both agree.
    idx, weights = [ids([0, 3, 1], [2, 2, -1]), ids([3, 0, 2])], [torch.tensor([[1.0, 2, 4], [8, 16, 99]])]
    weights.append(torch.tensor([[0.5, 0.25, 2.0]]))
    tokens = stamped([2, 1])
    rank_major = ll_rm(tokens, idx, weights, 4, 2, global_ids=True)
    reduced = []
    for got in rank_major:
        factor = torch.where(got.topk_idx >= 0, got.topk_weights * (got.topk_idx + 1), 0.0).sum(dim=2)
        reduced.append(got.tokens * factor[:, :, None])
    via_rank = ref.ll_rank_major_combine(reduced, [got.rows for got in rank_major])
    expert_major = ll_em(tokens, idx, 4, 2)
    planes = [got.tokens * (torch.arange(2) + 1 + 2 * r)[:, None, None] for r, got in enumerate(expert_major)]
    via_expert = ref.ll_expert_major_combine(planes, [got.rows for got in expert_major], weights)
    # by hand: token 1: 1*1 + 2*4 + 4*2 = 17; token 2 (value 2): (8*3 + 16*3) * 2 = 144; token 101: (2 + .25 + 6) * 101
    assert column(via_rank[0]) == column(via_expert[0]) == [17, 144]
    assert column(via_rank[1]) == column(via_expert[1]) == [8.25 * 101]


# ---- high throughput, FLAT -----------------------------------------------------------------------------------------


def test_ht_flat_micro_example() -> None:
    routing = ref.ht_flat_map(MICRO_IDX, num_experts=4)
    assert routing.recv_total_counter == [3, 1]
    assert [c.tolist() for c in routing.expert_counters] == [[2, 2], [0, 1]]
    assert routing.row_src[0].tolist() == [[0, 0], [0, 1], [1, 0]] and routing.row_src[1].tolist() == [[0, 0]]
    assert routing.rows[0].tolist() == [[0, 0], [1, -1]] and routing.rows[1].tolist() == [[2, 2], [-1, -1]]
    at0, at1 = ref.ht_flat_dispatch(routing, MICRO_TOKENS, MICRO_WEIGHTS)
    assert column(at0.tokens) == [A, B, C] and column(at1.tokens) == [A]
    assert at0.topk_idx.tolist() == [[0, -1], [1, -1], [0, 1]] and at1.topk_idx.tolist() == [[1, -1]]
    assert at0.topk_idx.dtype == torch.int64
    assert torch.equal(at0.topk_weights, torch.tensor([[0.1, 0], [0.3, 0], [0.5, 0.6]]))
    assert torch.equal(at1.topk_weights, torch.tensor([[0.2, 0]]))
    _, at1 = ref.ht_flat_dispatch(routing, MICRO_TOKENS, MICRO_WEIGHTS, global_ids=True)
    assert at1.topk_idx.tolist() == [[3, -1]]
    back = [torch.tensor([[10.0], [20.0], [30.0]]), torch.tensor([[100.0]])]
    out0, out1 = ref.ht_flat_combine(routing, back)
    assert column(out0.tokens) == [110, 20] and column(out1.tokens) == [30, 0] and out0.topk_weights is None


def test_ht_flat_hits_ascend_and_backward_returns_to_positions() -> None:
    # R=2, E=8. Token 0 lists 3, 6, 0, 2: on rank 0 the hits are 0, 2, 3, not in k order.
    idx = [ids([3, 6, 0, 2]), torch.zeros(0, 4, dtype=torch.int32)]
    weights = [torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(0, 4)]
    routing = ref.ht_flat_map(idx, num_experts=8)
    at0, at1 = ref.ht_flat_dispatch(routing, stamped([1, 0]), weights)
    assert at0.topk_idx.tolist() == [[0, 2, 3, -1]] and at0.topk_weights.tolist() == [[3, 4, 1, 0]]
    assert at1.topk_idx.tolist() == [[2, -1, -1, -1]] and at1.topk_weights.tolist() == [[2, 0, 0, 0]]
    grads = [torch.tensor([[30.0, 40.0, 10.0, NAN]]), torch.tensor([[20.0, NAN, NAN, NAN]])]
    out0, out1 = ref.ht_flat_combine(routing, [torch.ones(1, 1), torch.ones(1, 1)], grads)
    assert out0.topk_weights.tolist() == [[10, 20, 30, 40]] and column(out0.tokens) == [2]
    assert tuple(out1.topk_weights.shape) == (0, 4) and tuple(out1.tokens.shape) == (0, 1)
    backward = ref.ht_flat_dispatch(routing, stamped([1, 0]))
    assert column(backward[0].tokens) == [1] and backward[0].topk_idx is None and backward[0].topk_weights is None


def test_ht_flat_hits_ascend_for_far_apart_ids() -> None:
    routing = ref.ht_flat_map([ids([17, 1, 8])], num_experts=24)
    (got,) = ref.ht_flat_dispatch(routing, stamped([1]), [torch.tensor([[1.0, 2.0, 3.0]])])
    assert got.topk_idx.tolist() == [[1, 8, 17]] and got.topk_weights.tolist() == [[2, 3, 1]]


def test_ht_flat_duplicates_sum_in_k_order() -> None:
    # Expert 1 three times with weights 2**24, 1, -2**24: in k order the 1 is lost, so the sum is 0.
    idx, big = [ids([1, 0, 1, 1])], 2.0**24
    weights = [torch.tensor([[big, 5.0, 1.0, -big]])]
    routing = ref.ht_flat_map(idx, num_experts=2)
    (got,) = ref.ht_flat_dispatch(routing, stamped([1]), weights)
    assert got.topk_idx.tolist() == [[0, 1, -1, -1]] and got.topk_weights.tolist() == [[5, 0, 0, 0]]
    assert routing.expert_counters[0].tolist() == [1, 1] and routing.rows[0].tolist() == [[0, 0, 0, 0]]
    (out,) = ref.ht_flat_combine(routing, [torch.tensor([[3.0]])], [torch.tensor([[7.0, 9.0, NAN, NAN]])])
    assert column(out.tokens) == [3] and out.topk_weights.tolist() == [[9, 7, 9, 9]]


def test_ht_weight_of_a_single_hit_is_copied_bit_for_bit() -> None:
    weights = torch.tensor([[-0.0, 0.0]])
    weights.view(torch.int32)[0, 1] = 0x7F800123  # a signalling NaN with a payload
    (flat,) = ref.ht_flat_dispatch(ref.ht_flat_map([ids([0, 1])], num_experts=2), stamped([1]), [weights])
    zones = ref.ht_expert_major_map([ids([0, 1])], num_experts=2)
    (zone,) = ref.ht_expert_major_dispatch(zones, stamped([1]), [weights])
    assert torch.equal(bits(flat.topk_weights[0]), bits(weights[0]))
    assert torch.equal(bits(zone.topk_weights), bits(weights[0]))


@pytest.mark.parametrize(
    ("budget", "tokens", "counters", "grads0", "grads1", "combined"),
    [
        (4, [1, 2, 101, 0], [2, 3], [[1, 2], [0, 4]], [[5, 6]], [1, 1, 1]),
        (3, [1, 2, 101], [2, 3], [[1, 2], [0, 4]], [[5, 6]], [1, 1, 1]),
        (2, [1, 2], [1, 2], [[1, 2], [0, 4]], [[0, 0]], [1, 1, 0]),
        (1, [1], [1, 1], [[1, 2], [0, 0]], [[0, 0]], [1, 0, 0]),
        (0, [], [0, 0], [[0, 0], [0, 0]], [[0, 0]], [0, 0, 0]),
    ],
)
def test_ht_flat_drop(budget: int, tokens: list, counters: list, grads0: list, grads1: list, combined: list) -> None:
    # Rank 0 receives three rows: [0, 1], [-1, 1] of rank 0, then [0, 1] of rank 1. Rank 1 receives none.
    idx = [ids([0, 1], [-1, 1]), ids([0, 1])]
    routing = ref.ht_flat_map(idx, num_experts=4, max_recv_tokens_per_rank=budget)
    assert routing.recv_total_counter == [3, 0] and routing.expert_counters[0].tolist() == counters
    at0, at1 = ref.ht_flat_dispatch(routing, stamped([2, 1]), [torch.ones(2, 2), torch.ones(1, 2)])
    assert column(at0.tokens) == tokens and tuple(at1.tokens.shape) == (budget, 1)
    assert set(at1.topk_idx.flatten().tolist()) <= {-1} and not at1.topk_weights.any()
    every_grad = torch.tensor([[1.0, 2], [4, NAN], [5, 6], [NAN, NAN]])[:budget]
    empty = torch.full((budget, 2), NAN)
    back = [torch.ones(budget, 1), torch.full((budget, 1), NAN)]
    out0, out1 = ref.ht_flat_combine(routing, back, [every_grad, empty])
    assert out0.topk_weights.tolist() == grads0 and out1.topk_weights.tolist() == grads1
    assert column(out0.tokens) + column(out1.tokens) == combined


def test_ht_flat_unused_rows() -> None:
    routing = ref.ht_flat_map(MICRO_IDX, num_experts=4, max_recv_tokens_per_rank=5)
    at0, _ = ref.ht_flat_dispatch(routing, MICRO_TOKENS, MICRO_WEIGHTS, fill=-7)
    assert column(at0.tokens) == [A, B, C, -7, -7]
    assert at0.topk_idx[3:].tolist() == [[-1, -1], [-1, -1]] and at0.topk_weights[3:].tolist() == [[0, 0], [0, 0]]


def test_ht_flat_combine_adds_in_rank_order_and_rounds_once() -> None:
    # k order meets rank 2 first, but the sum is over ranks 0, 1, 2: (1 - 1) + 2**-30 in fp32.
    idx = [ids([2, 1, 0]), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64)]
    routing = ref.ht_flat_map(idx, num_experts=3)
    back = [torch.tensor([[1.0, 1.0, -0.0]]), torch.tensor([[-1.0, 2.0**-8, -0.0]])]
    back.append(torch.tensor([[2.0**-30, 2.0**-16, -0.0]]))
    out = ref.ht_flat_combine(routing, [x.bfloat16() for x in back])[0].tokens
    assert out.dtype == torch.bfloat16
    assert out[0].tolist() == [2.0**-30, 1 + 2.0**-7, 0.0] and not torch.signbit(out[0, 2])


# ---- high throughput, EXPERT_MAJOR ---------------------------------------------------------------------------------


def test_ht_expert_major_micro_example() -> None:
    routing = ref.ht_expert_major_map(MICRO_IDX, num_experts=4, alignment=4)
    assert routing.recv_total_counter == [8, 4]
    assert [c.tolist() for c in routing.expert_counters] == [[4, 4], [0, 4]]
    assert [c.tolist() for c in routing.expert_counts_unpadded] == [[2, 2], [0, 1]]
    assert [o.tolist() for o in routing.expert_offsets] == [[0, 4], [0, 0]]
    assert routing.expert_counters[0].dtype == routing.expert_offsets[0].dtype == torch.int32
    assert routing.rows[0].tolist() == [[0, 0], [4, -1]] and routing.rows[1].tolist() == [[1, 5], [-1, -1]]
    assert routing.row_src[0].tolist()[:3] == [[0, 0], [1, 0], [-1, -1]]
    assert routing.row_experts[0].tolist() == [0, 0, -1, -1, 1, 1, -1, -1]
    at0, at1 = ref.ht_expert_major_dispatch(routing, MICRO_TOKENS, MICRO_WEIGHTS, fill=-7)
    assert column(at0.tokens) == [A, C, 0, 0, B, C, 0, 0] and column(at1.tokens) == [A, 0, 0, 0]
    assert torch.equal(at0.topk_weights, torch.tensor([0.1, 0.5, 0, 0, 0.3, 0.6, 0, 0]))
    assert torch.equal(at1.topk_weights, torch.tensor([0.2, 0, 0, 0])) and at0.topk_idx is None
    back = [torch.tensor([[10.0], [20], [NAN], [NAN], [30], [40], [NAN], [NAN]]), torch.tensor([[100.0], [NAN]])]
    out0, out1 = ref.ht_expert_major_combine(routing, back)
    assert column(out0.tokens) == [110, 30] and column(out1.tokens) == [60, 0] and out1.topk_weights is None


@pytest.mark.parametrize(
    ("alignment", "counters", "offsets", "total"),
    [
        (0, [3, 0, 1, 2], [0, 3, 3, 4], 6),
        (1, [3, 0, 1, 2], [0, 3, 3, 4], 6),
        (2, [4, 0, 2, 2], [0, 4, 4, 6], 8),
        (4, [4, 0, 4, 4], [0, 4, 4, 8], 12),
        (128, [128, 0, 128, 128], [0, 128, 128, 256], 384),
    ],
)
def test_ht_expert_major_alignment(alignment: int, counters: list, offsets: list, total: int) -> None:
    idx = [ids([0, 2], [3, 0], [0, 3])]
    routing = ref.ht_expert_major_map(idx, num_experts=4, alignment=alignment)
    assert routing.expert_counters[0].tolist() == counters and routing.expert_offsets[0].tolist() == offsets
    assert routing.recv_total_counter == [total] and routing.expert_counts_unpadded[0].tolist() == [3, 0, 1, 2]
    zone3 = offsets[3]
    assert routing.rows[0].tolist() == [[0, offsets[2]], [zone3, 1], [2, zone3 + 1]]
    (got,) = ref.ht_expert_major_dispatch(routing, stamped([3]), [torch.ones(3, 2)])
    assert tuple(got.tokens.shape) == (total, 1) and got.topk_weights.sum() == 6 and got.tokens.sum() == 12
    assert column(got.tokens[zone3 : zone3 + 2]) == [2, 3]


# Zones with A=2: expert 0 has rows (0,0), (1,0) and no pad; expert 1 has (0,0), (0,1), (1,0) and a pad; 6 rows.
@pytest.mark.parametrize(
    ("budget", "tokens", "padded", "unpadded", "offsets", "combined", "grads"),
    [
        (7, [1, 101, 1, 2, 101, 0, -7], [2, 4], [2, 3], [0, 2], [2, 1, 2], [[10, 30], [-1, 40], [20, 50]]),
        (6, [1, 101, 1, 2, 101, 0], [2, 4], [2, 3], [0, 2], [2, 1, 2], [[10, 30], [-1, 40], [20, 50]]),
        (5, [1, 101, 1, 2, 101], [2, 3], [2, 3], [0, 2], [2, 1, 2], [[10, 30], [-1, 40], [20, 50]]),
        (4, [1, 101, 1, 2], [2, 2], [2, 2], [0, 2], [2, 1, 1], [[10, 30], [-1, 40], [20, 0]]),
        (2, [1, 101], [2, 0], [2, 0], [0, 2], [1, 0, 1], [[10, 0], [-1, 0], [20, 0]]),
        (1, [1], [1, 0], [1, 0], [0, 1], [1, 0, 0], [[10, 0], [-1, 0], [0, 0]]),
        (0, [], [0, 0], [0, 0], [0, 0], [0, 0, 0], [[0, 0], [-1, 0], [0, 0]]),
    ],
)
def test_ht_expert_major_drop(
    budget: int, tokens: list, padded: list, unpadded: list, offsets: list, combined: list, grads: list
) -> None:
    idx = [ids([0, 1], [-1, 1]), ids([0, 1])]
    routing = ref.ht_expert_major_map(idx, num_experts=4, alignment=2, max_recv_tokens_per_rank=budget)
    assert routing.recv_total_counter == [6, 0]  # what it would have been
    assert routing.expert_counters[0].tolist() == padded and routing.expert_offsets[0].tolist() == offsets
    assert routing.expert_counts_unpadded[0].tolist() == unpadded
    at0, at1 = ref.ht_expert_major_dispatch(
        routing, stamped([2, 1]), [torch.tensor([[1.0, 3], [99, 4]]), torch.tensor([[2.0, 5]])], fill=-7
    )
    assert column(at0.tokens) == tokens and column(at1.tokens) == [-7.0] * budget
    assert at0.topk_weights.tolist() == [1.0, 2, 3, 4, 5, 0, -7][:budget]
    row_grads = torch.tensor([10.0, 20, 30, 40, 50, NAN, NAN])[:budget]
    back = [torch.ones(budget, 1), torch.full((budget, 1), NAN)]
    out0, out1 = ref.ht_expert_major_combine(routing, back, [row_grads, torch.full((budget,), NAN)])
    assert column(out0.tokens) + column(out1.tokens) == combined
    want = [[0 if g == -1 else g for g in row] for row in grads]  # no expert there: 0
    assert out0.topk_weights.tolist() + out1.topk_weights.tolist() == want


def test_ht_expert_major_has_no_flat_rule() -> None:
    # 3 FLAT rows in a budget of 2. A FLAT rule would lose token 3; the slots lose the tail of the last zone, token 2.
    routing = ref.ht_expert_major_map([ids([1], [1], [0])], num_experts=2, max_recv_tokens_per_rank=2)
    (got,) = ref.ht_expert_major_dispatch(routing, stamped([3]), [torch.tensor([[1.0], [2.0], [3.0]])])
    assert column(got.tokens) == [3, 1] and routing.rows[0].tolist() == [[1], [-1], [0]]


def test_ht_expert_major_duplicates_and_backward() -> None:
    # R=2, E=4: token 0 lists 3, 1, 3; expert 3 is one row of weight 1 + 4, its gradient goes to both positions.
    idx = [ids([3, 1, 3]), ids([1, -1, -1])]
    weights = [torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[8.0, NAN, NAN]])]
    routing = ref.ht_expert_major_map(idx, num_experts=4)
    assert [c.tolist() for c in routing.expert_counts_unpadded] == [[0, 2], [0, 1]]
    at0, at1 = ref.ht_expert_major_dispatch(routing, stamped([1, 1]), weights)
    assert column(at0.tokens) == [1, 101] and at0.topk_weights.tolist() == [2, 8]
    assert column(at1.tokens) == [1] and at1.topk_weights.tolist() == [5]
    grads = [torch.tensor([20.0, 80.0]), torch.tensor([50.0])]
    out0, out1 = ref.ht_expert_major_combine(routing, [torch.tensor([[1.0], [2]]), torch.tensor([[4.0]])], grads)
    assert column(out0.tokens) == [5] and column(out1.tokens) == [2]
    assert out0.topk_weights.tolist() == [[50, 20, 50]] and out1.topk_weights.tolist() == [[80, 0, 0]]
    backward = ref.ht_expert_major_dispatch(routing, stamped([1, 1]))
    assert column(backward[0].tokens) == [1, 101] and backward[0].topk_weights is None


def test_ht_expert_major_combine_order_without_rounding_per_rank() -> None:
    # R=2, E=4; listed 3, 2, 1, 0, summed 0, 1, 2, 3. Column 0: 1 + 2**-8 (a bf16 tie) on rank 0 must not be
    # rounded before rank 1 adds 2**-16. Column 1: (a - a) + b + 0. Column 2: all -0.
    big = 2.0**30
    idx = [ids([3, 2, 1, 0]), torch.zeros(0, 4, dtype=torch.int64)]
    routing = ref.ht_expert_major_map(idx, num_experts=4)
    on0 = torch.tensor([[1.0, big, -0.0], [2.0**-8, -big, -0.0]]).bfloat16()
    on1 = torch.tensor([[2.0**-16, 1.0, -0.0], [0.0, 0.0, -0.0]]).bfloat16()
    out = ref.ht_expert_major_combine(routing, [on0, on1])[0].tokens
    assert out.dtype == torch.bfloat16 and out[0].tolist() == [1 + 2.0**-7, 1, 0] and not torch.signbit(out).any()


def test_ht_no_tokens_anywhere() -> None:
    idx, weights = [torch.zeros(0, 3, dtype=torch.int64)] * 2, [torch.zeros(0, 3)] * 2
    tokens = [torch.zeros(0, 5, dtype=torch.bfloat16)] * 2
    flat, zones = ref.ht_flat_map(idx, num_experts=6), ref.ht_expert_major_map(idx, num_experts=6, alignment=8)
    assert flat.recv_total_counter == zones.recv_total_counter == [0, 0]
    assert zones.expert_offsets[1].tolist() == [0, 0, 0] and flat.expert_counters[1].tolist() == [0, 0, 0]
    for got in ref.ht_flat_dispatch(flat, tokens, weights):
        assert tuple(got.tokens.shape) == (0, 5) and tuple(got.topk_idx.shape) == tuple(got.topk_weights.shape) == (
            0,
            3,
        )
    for got in ref.ht_expert_major_dispatch(zones, tokens, weights):
        assert tuple(got.tokens.shape) == (0, 5) and tuple(got.topk_weights.shape) == (0,)
    for back in (ref.ht_flat_combine(flat, tokens), ref.ht_expert_major_combine(zones, tokens)):
        assert tuple(back[0].tokens.shape) == (0, 5) and back[0].tokens.dtype == torch.bfloat16


def test_ht_three_ranks_three_experts_each_and_foreign_ids() -> None:
    idx = [ids([8, 0], [9, -2]), ids([4, 4]), ids([0, 8], [8, 3], [-1, 5])]
    flat = ref.ht_flat_map(idx, num_experts=9)
    assert [src.tolist() for src in flat.row_src] == [
        [[0, 0], [2, 0]],
        [[1, 0], [2, 1], [2, 2]],
        [[0, 0], [2, 0], [2, 1]],
    ]
    assert [c.tolist() for c in flat.expert_counters] == [[2, 0, 0], [1, 1, 1], [0, 0, 3]]
    assert flat.topk_idx[0].tolist() == [[8, 0], [-1, -1]]
    assert [rows.tolist() for rows in flat.rows] == [[[0, 0], [-1, -1]], [[0, 0]], [[1, 1], [2, 1], [-1, 2]]]
    zones = ref.ht_expert_major_map(idx, num_experts=9, alignment=2)
    assert [c.tolist() for c in zones.expert_counters] == [[2, 0, 0], [2, 2, 2], [0, 0, 4]]
    assert [rows.tolist() for rows in zones.rows] == [[[0, 0], [-1, -1]], [[2, 2]], [[1, 1], [2, 0], [-1, 4]]]


def test_ht_k32_on_one_rank() -> None:
    order = [(7 * k) % 32 for k in range(32)]
    weights = [torch.arange(32.0)[None]]
    (flat,) = ref.ht_flat_dispatch(ref.ht_flat_map([torch.tensor([order])], num_experts=32), stamped([1]), weights)
    assert flat.topk_idx[0].tolist() == list(range(32))
    zones = ref.ht_expert_major_map([torch.tensor([order])], num_experts=32)
    (zone,) = ref.ht_expert_major_dispatch(zones, stamped([1]), weights)
    assert zones.rows[0].tolist() == [order]
    # 7 * 23 = 161 = 5 * 32 + 1, so expert e is at k = 23 e mod 32
    assert zone.topk_weights.tolist() == flat.topk_weights[0].tolist() == [(23 * e) % 32 for e in range(32)]


def test_ht_dispatch_and_combine_are_transposes() -> None:
    # <dispatch(x), y> = <x, combine(y)>, exact in small integers, with drops; for both layouts.
    generator = torch.Generator().manual_seed(3)
    idx = [torch.randint(-1, 6, (n, 3), generator=generator) for n in (4, 0, 3)]
    x = [torch.randint(-9, 9, (n, 2), generator=generator).float() for n in (4, 0, 3)]
    y = [torch.randint(-9, 9, (6, 2), generator=generator).float() for _ in range(3)]
    flat = ref.ht_flat_map(idx, num_experts=6, max_recv_tokens_per_rank=6)
    zones = ref.ht_expert_major_map(idx, num_experts=6, alignment=2, max_recv_tokens_per_rank=6)
    assert max(zones.recv_total_counter) > 6
    for sent, back in (
        (ref.ht_flat_dispatch(flat, x), ref.ht_flat_combine(flat, y)),
        (ref.ht_expert_major_dispatch(zones, x), ref.ht_expert_major_combine(zones, y)),
    ):
        assert sum((d.tokens * v).sum() for d, v in zip(sent, y, strict=True)) == sum(
            (u * c.tokens).sum() for u, c in zip(x, back, strict=True)
        )


# ---- DS_FP8 ----------------------------------------------------------------------------------------------------------

C448 = 0.0022321429569274187  # fp32(1 / 448) = 0x3B124925


def test_ds_fp8_by_hand() -> None:
    row = torch.zeros(1, 256, dtype=torch.bfloat16)
    row[0, :4] = torch.tensor([448.0, -224.0, 1.0, 17.0])  # block 0: scale 1; 17 ties between 16 and 18, to even: 16
    row[0, 4:8] = torch.tensor(
        [19.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10]
    )  # 20; smallest subnormal; ties to 0 and to 2**-8
    row[0, 128:130] = torch.tensor([2.0, -1.0])  # block 1: x * 224
    q, scales = ref.quantize_ds_fp8(row)
    assert q.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert tuple(q.shape) == (1, 256) and tuple(scales.shape) == (1, 2)
    assert q.float()[0, :8].tolist() == [448, -224, 1, 16, 20, 2.0**-9, 0, 2.0**-8]
    assert q.float()[0, 128:131].tolist() == [448, -224, 0]
    # A multiplication by fp32(1/448), not a division: 448 * 0x3B124925 = 1 + 45 * 2**-30 or so, rounded to fp32 = 1.
    assert scales[0].tolist() == [1.0, 2 * C448]


def test_ds_fp8_scale_is_multiplied_not_divided() -> None:
    # The two differ by an ulp for some amax; expected values by exact rational arithmetic.
    amaxes = torch.arange(129, 257).to(torch.bfloat16)  # all exact in bf16
    tokens = torch.zeros(128, 128, dtype=torch.bfloat16)
    tokens[:, 5] = -amaxes
    _, scales = ref.quantize_ds_fp8(tokens)
    want = [to_float32(Fraction(a) * Fraction(C448)) for a in amaxes.tolist()]
    assert scales[:, 0].tolist() == want
    assert want != [to_float32(Fraction(a) / 448) for a in amaxes.tolist()]


def test_ds_fp8_values_are_scaled_by_a_true_division() -> None:
    # Ties of e4m3 tell how the scale was rounded. fp32(448 / 168) = fp32(8/3) is not 8/3, but 57 times
    # it rounds to 152: a tie, to even, 160; 1 / stored scale would give 151.99998, so 144.
    # 448 / 192 = 7/3 likewise: 9 * it is 21, a tie, 20; 448 * fp32(1 / 192) would give 21.000002, so 22.
    tokens = torch.zeros(2, 128, dtype=torch.bfloat16)
    tokens[0, :2], tokens[1, :2] = torch.tensor([168.0, 57.0]), torch.tensor([192.0, 9.0])
    q, _ = ref.quantize_ds_fp8(tokens)
    for x, amax, product in ((57, 168, 152.0), (9, 192, 21.0)):
        assert to_float32(x * Fraction(to_float32(Fraction(448, amax)))) == product
    assert q.float()[:, :2].tolist() == [[448, 160], [448, 20]]


def test_ds_fp8_round_scales_are_powers_of_two() -> None:
    tokens = torch.zeros(5, 128, dtype=torch.bfloat16)
    tokens[:, 0] = torch.tensor([448.0, 450.0, 1.0, 0.0, -3584.0])
    tokens[:, 1] = torch.tensor([-1.0, 1.0, 0.5, 0.0, 8.0])
    q, scales = ref.quantize_ds_fp8(tokens, round_scales=True)
    # amax / 448 = 1 (a power of two, kept), 1.004 -> 2, 0.00223 -> 2**-8, 1e-4 / 448 = 2.2e-7 -> 2**-22, 8
    assert scales[:, 0].tolist() == [1, 2, 2.0**-8, 2.0**-22, 8]
    # 450 / 2 = 225: e4m3 has steps of 16 there, so 224
    assert q.float()[:, 0].tolist() == [448, 224, 256, 0, -448]
    assert q.float()[:, 1].tolist() == [-1, 0.5, 128, 0, 1]


def test_ds_fp8_floor_of_amax() -> None:
    tokens = torch.full((1, 128), 2.0**-20, dtype=torch.bfloat16)  # below 1e-4
    q, scales = ref.quantize_ds_fp8(tokens)
    floor = to_float32(Fraction(1, 10000))
    assert scales.tolist() == [[to_float32(Fraction(floor) * Fraction(C448))]]
    # 2**-20 * 448e4 = 4.27: between 4 and 4.5 (steps of 0.5), nearer to 4.5
    assert set(q.float().flatten().tolist()) == {4.5}


def test_ds_fp8_rounds_every_gap_to_nearest_even() -> None:
    # All positive e4m3 values, from their definition; bf16 holds them and their midpoints exactly. 448 sets scale 1.
    values = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
    values = values[:-1]  # the last code is NaN
    assert values[-1] == 448
    middles = [(low + high) / 2 for low, high in zip(values[:-1], values[1:], strict=True)]
    even = [values[i if i % 2 == 0 else i + 1] for i in range(len(middles))]
    tokens = torch.zeros(2, 128, dtype=torch.bfloat16)
    tokens[0, : len(values)] = torch.tensor(values)
    tokens[1, : len(middles)] = -torch.tensor(middles)
    tokens[1, 127] = 448
    q, _ = ref.quantize_ds_fp8(tokens)
    assert q.float()[0, : len(values)].tolist() == values
    assert (-q.float()[1, : len(middles)]).tolist() == even


def test_ds_fp8_saturates_and_travels() -> None:
    # 448 / amax rounds, so x * scale may exceed 448 by an ulp: never more than 448 may come out.
    tokens = torch.arange(1, 513).to(torch.bfloat16)[:, None].repeat(1, 128)
    q, _ = ref.quantize_ds_fp8(tokens)
    assert set(q.float().flatten().tolist()) == {448.0}
    q, scales = ref.quantize_ds_fp8(MICRO_TOKENS[0].repeat(1, 128).bfloat16())
    (got, _) = ll_em([q, q], MICRO_IDX, 4, 2, scales=[scales, scales])
    assert torch.equal(got.scales[1, 0], scales[1]) and torch.equal(bits(got.tokens[1, 0]), bits(q[1]))
    assert tuple(got.scales.shape) == (2, 4, 1)


# ---- the layer, and refusals -----------------------------------------------------------------------------------------


def test_moe_layer_by_hand_and_against_the_distributed_way() -> None:
    tokens, idx = torch.tensor([[1.0], [2.0], [3.0]]), ids([0, 2], [2, 2], [-1, 5])
    weights = torch.tensor([[0.5, 2.0], [4.0, 8.0], [NAN, NAN]])
    experts = [lambda x: x + 10, lambda x: x / 0, lambda x: x * 3]
    out = ref.moe_layer(tokens, idx, weights, experts)
    assert column(out) == [0.5 * 11 + 2 * 3, 4 * 6 + 8 * 6, 0]
    sent = ll_em([tokens, tokens], [idx, idx], 4, 3)
    planes = [got.tokens.clone() for got in sent]
    planes[0][0] += 10
    planes[1][0] *= 3  # expert 2 lives on rank 1
    for far in ref.ll_expert_major_combine(planes, [got.rows for got in sent], [weights, weights]):
        assert torch.equal(far, out)


def test_moe_layer_sums_by_fma_in_k_order_and_rounds_once() -> None:
    u = 2.0**-12
    out = ref.moe_layer(torch.ones(1, 1), ids([0, 1]), torch.tensor([[-1.0, 1 + u]]), [lambda x: x, lambda x: x + u])
    assert column(out) == [2 * u + u * u]
    tokens = torch.ones(1, 1, dtype=torch.bfloat16)
    experts = [lambda x: x, lambda x: x * 2.0**-8, lambda x: x * 2.0**-16]
    out = ref.moe_layer(tokens, ids([0, 1, 2]), torch.ones(1, 3), experts)
    assert out.dtype == torch.bfloat16 and column(out) == [1 + 2.0**-7]
    # An expert that returns fp32 is rounded as it would be to travel: 1 + 2**-9 becomes 1.
    experts = [lambda x: x.float() + 2.0**-9, lambda x: x]
    out = ref.moe_layer(tokens, ids([0, 1]), torch.tensor([[1.0, -1.0]]), experts)
    assert column(out) == [0]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="divide evenly"):
        ll_em(stamped([1, 1]), [ids([0]), ids([0])], 3, 1)
    with pytest.raises(ValueError, match="at most 1"):
        ll_em(stamped([2]), [ids([0], [0])], 1, 1)
    with pytest.raises(ValueError, match="rank 0: 1 tokens, 2 rows"):
        ll_em(stamped([1]), [ids([0], [0])], 1, 2)
    with pytest.raises(ValueError, match="one entry per rank"):
        ll_em(stamped([1, 1]), [ids([0])], 2, 1)
    with pytest.raises(ValueError, match="power of two"):
        ref.ht_expert_major_map([ids([0])], num_experts=1, alignment=3)
    with pytest.raises(ValueError, match="topk_idx must be"):
        ref.ht_flat_map([torch.zeros(3, 1, 1, dtype=torch.int64)], num_experts=1)
    with pytest.raises(ValueError, match="bfloat16"):
        ref.quantize_ds_fp8(torch.zeros(1, 128))
    with pytest.raises(ValueError, match="bfloat16"):
        ref.quantize_ds_fp8(torch.zeros(1, 100, dtype=torch.bfloat16))
