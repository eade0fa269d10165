"""LL EXPERT_MAJOR through the host's surface, on the simulator: results against the oracle by bits, and every way a call can be wrong."""

from __future__ import annotations

import gc
import pathlib
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ncclep_py import (
    Algorithm,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    CombineQuant,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    EpClosedError,
    EpError,
    EpMismatchError,
    EpOverflowError,
    EpPeerError,
    EpRefusedError,
    EpStaleError,
    Group,
    GroupConfig,
    HandleConfig,
    Layout,
    LayoutInfo,
    LocalWorld,
    PassDir,
    local_world,
)
from ncclep_py import reference as ref
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like

EXPERTS, CAPACITY, HIDDEN, TOPK = 6, 8, 64, 2
LONG, INT = torch.int64, torch.int32
ROOT = pathlib.Path(__file__).resolve().parent.parent


def config(experts: int = EXPERTS, tokens: int = CAPACITY, hidden: int = HIDDEN, topk: int = TOPK, **more: Any) -> GroupConfig:
    return GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, **more)


def transformed(rows: torch.Tensor, rank: int, local: int) -> torch.Tensor:
    """A different, exactly computable change for every expert, so that a wrong expert shows: its sign alternates and it scales by a power of two."""
    for i in range(local):
        e = rank * local + i
        rows[i] *= (-1.0 if e % 2 else 1.0) * 2.0 ** (e % 3)
    return rows


def equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert bits_equal(got, want), f"{what}: {first_difference(got, want) if got.shape == want.shape else (got.shape, want.shape)}"


class Case:
    """Inputs of all ranks for one dispatch and combine, and what the oracle says."""

    def __init__(self, cfg: GroupConfig, counts: Sequence[int], *, topk: int | None = None, seed: int = 0, dropped: float = 0.1,
                 idx_dtype: torch.dtype = LONG, ids: Sequence[torch.Tensor] | None = None, tokens: Sequence[torch.Tensor] | None = None,
                 weights: Sequence[torch.Tensor] | None = None) -> None:
        self.cfg, self.ranks, self.local = cfg, len(counts), cfg.num_experts // len(counts)
        self.ids = list(ids) if ids is not None else [
            random_routing(r, n, topk or cfg.num_topk, cfg.num_experts, seed=1000 * seed + 7, dropped=dropped, dtype=idx_dtype)
            for r, n in enumerate(counts)]
        dtype = cfg.token_type.torch_dtype()
        self.tokens = list(tokens) if tokens is not None else [stamped_tokens(r, n, cfg.hidden, dtype, seed=seed) for r, n in enumerate(counts)]
        self.weights = list(weights) if weights is not None else [weights_like(i, seed=31 * seed + r) for r, i in enumerate(self.ids)]
        self.received = ref.ll_expert_major_dispatch(self.tokens, self.ids, num_experts=cfg.num_experts,
                                                     max_dispatch_tokens_per_rank=cfg.max_dispatch_tokens_per_rank)
        self.combined = ref.ll_expert_major_combine([transformed(w.tokens.clone(), r, self.local) for r, w in enumerate(self.received)],
                                                    [w.rows for w in self.received], self.weights)

    def check_rows(self, rank: int, got: DispatchOutputs) -> None:
        """Counts and used rows are the oracle's."""
        want = self.received[rank]
        counters = got.layout_info.expert_counters
        assert torch.equal(counters, want.expert_counters), (rank, counters, want.expert_counters)
        for expert, n in enumerate(want.expert_counters.tolist()):
            equal(got.tokens[expert, :n], want.tokens[expert, :n], f"rank {rank}, rows of expert {expert}")

    def check_combined(self, rank: int, out: torch.Tensor) -> None:
        equal(out, self.combined[rank], f"rank {rank}, combined rows")

    def dispatch(self, rank: int, handle: Any, **more: Any) -> DispatchOutputs:
        got = handle.dispatch(self.tokens[rank], topk_idx=self.ids[rank], **more)
        self.check_rows(rank, got)
        return got

    def experts(self, rank: int, got: DispatchOutputs) -> torch.Tensor:
        """Run the experts in place."""
        return transformed(got.tokens, rank, self.local)

    def combine(self, rank: int, handle: Any, rows: torch.Tensor, **more: Any) -> torch.Tensor:
        out = handle.combine(rows, topk_weights=self.weights[rank], **more)
        self.check_combined(rank, out)
        return out

    def step(self, rank: int, handle: Any) -> None:
        """Dispatch, experts, combine, each compared with the oracle."""
        self.combine(rank, handle, self.experts(rank, self.dispatch(rank, handle)))


def run(ranks: int, program: Callable[..., Any], **world: Any) -> list[Any]:
    with LocalWorld(ranks, "sim", **world) as w:
        return w.run(program)


def in_group(ranks: int, cfg: GroupConfig, program: Callable[..., Any], **world: Any) -> list[Any]:
    """What `program(comm, group)` returns on every rank."""
    def whole(comm: Any) -> Any:
        with Group.create(comm, cfg) as group:
            return program(comm, group)

    return run(ranks, whole, **world)


def handle_of(group: Group, topk: int = TOPK) -> Any:
    return group.create_handle(Layout.EXPERT_MAJOR, num_topk=topk)


def epoch_of(group: Group) -> int:
    return int(group._local[:8].view(LONG)[0])


def steps(cfg: GroupConfig, cases: Sequence[Case], *, epoch: int | None = None, world: dict[str, Any] | None = None) -> None:
    """Run the cases one after the other on one handle."""
    def program(comm: Any, group: Group) -> int:
        if epoch is not None:
            group.start_at(epoch)
            comm.barrier()
        handle = handle_of(group, int(cases[0].ids[0].shape[1]))
        for case in cases:
            case.step(comm.rank, handle)
        group.check()
        return epoch_of(group)

    ends = in_group(cases[0].ranks, cfg, program, **(world or {}))
    assert ends == [((1 if epoch is None else epoch) + 2 * len(cases)) % 2**32] * cases[0].ranks


# ---- right results -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_ranks_and_uneven_counts(ranks: int) -> None:
    cfg = config(ranks * 3, 9, 40, min(3, ranks * 3))
    steps(cfg, [Case(cfg, [(5 * r + 3 * s) % 10 for r in range(ranks)], seed=s) for s in range(3)])


def test_counts_change_on_every_step_and_the_empty_rank_moves() -> None:
    cfg = config()
    counts = [[8, 8, 8], [0, 3, 8], [5, 0, 1], [1, 7, 0], [0, 0, 6], [0, 0, 0], [8, 1, 8], [0, 2, 0], [3, 0, 0], [8, 8, 8]]
    steps(cfg, [Case(cfg, c, seed=i) for i, c in enumerate(counts)])


@pytest.mark.parametrize(("topk", "experts"), [(1, 2), (2, 2), (3, 4), (9, 10), (31, 64), (32, 32)])
def test_topk(topk: int, experts: int) -> None:
    cfg = config(experts, 5, 16, topk)
    steps(cfg, [Case(cfg, [5, 2], seed=s) for s in range(2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("idx_dtype", [LONG, INT])
@pytest.mark.parametrize("hidden", [8, 24, 136, 520])
def test_types_and_hidden_sizes(dtype: torch.dtype, idx_dtype: torch.dtype, hidden: int) -> None:
    cfg = config(6, 6, hidden, 3, dtype=dtype)
    steps(cfg, [Case(cfg, [6, 0, 5], idx_dtype=idx_dtype)])


def test_smallest_fp32_row() -> None:
    cfg = config(2, 1, 4, 1, dtype=torch.float32)
    steps(cfg, [Case(cfg, [1, 1], dropped=0.0)])


def test_id_types_may_differ_between_ranks_and_calls() -> None:
    cfg = config()
    wide, narrow = Case(cfg, [8, 3, 5]), Case(cfg, [8, 3, 5], idx_dtype=INT)
    mixed = Case(cfg, [8, 3, 5], ids=[wide.ids[0], narrow.ids[1], wide.ids[2]])
    steps(cfg, [wide, mixed, narrow])
    for a, b in zip(wide.combined, narrow.combined, strict=True):
        assert bits_equal(a, b)


@pytest.mark.parametrize("grid", [
    {"blocks": 1, "warps": 1}, {"blocks": 3, "warps": 2}, {"blocks": 5, "warps": 4}, {"mode": "adversarial", "seed": 5}])
def test_grids_and_schedules(grid: dict[str, Any]) -> None:
    cfg = config()
    steps(cfg, [Case(cfg, [8, 1, 6], seed=s) for s in range(2)], world=grid)


def test_max_num_sms_sets_the_grid_and_may_differ() -> None:
    case = Case(config(), [8, 1, 6])

    def program(comm: Any) -> int:
        with Group.create(comm, config(max_num_sms=1 + comm.rank, timeout_ns=10**9 * (1 + comm.rank), checked=comm.rank == 2)) as group:
            case.step(comm.rank, handle_of(group))
            return group.num_blocks

    assert run(3, program) == [1, 2, 3]


SPECIAL_IDS = {
    "none at all": [[-1, -1]] * 4,
    "first": [[-1, 3]] * 4,
    "last": [[3, -1]] * 4,
    "whole rows": [[-1, -1], [0, 5], [-1, -1], [2, 1]],
    "too large": [[6, 0], [11, 1], [2**31 - 1, 2], [5, 6]],
    "below minus one": [[-2, 0], [1, -(2**31)], [-7, -9], [5, -2]],
    "beyond 32 bits": [[2**33, 0], [2**33 + 1, 1], [2**32, 2**32 + 3], [-(2**40), 4]],
    "duplicates": [[3, 3], [0, 0], [3, -1], [5, 3]],
    "all to one": [[4, -1]] * 4,
}


@pytest.mark.parametrize("which", SPECIAL_IDS)
def test_special_ids(which: str) -> None:
    """Ids outside [0, E) are "no expert"; their weights, NaN here, are never used. A duplicate is a row of its own."""
    ids = torch.tensor(SPECIAL_IDS[which])
    cfg = config()
    weights = torch.tensor([[0.75, 0.5], [-2.0, 0.125], [1.0, 3.0], [0.3, 0.7]])
    weights[(ids < 0) | (ids >= EXPERTS)] = float("nan")
    cases = [Case(cfg, [4] * 3, ids=[ids] * 3, weights=[weights] * 3), Case(cfg, [4, 4, 4])]
    cases.append(Case(cfg, [4] * 3, ids=[ids, cases[1].ids[1], ids], weights=[weights, cases[1].weights[1], weights]))
    if (ids.abs() < 2**31).all():
        cases.append(Case(cfg, [4] * 3, ids=[ids.to(INT)] * 3, weights=[weights] * 3))
    steps(cfg, cases)
    assert all(bool(out.isfinite().all()) for case in cases for out in case.combined)


def test_a_narrow_id_is_not_the_low_half_of_a_wide_one() -> None:
    """2^33 must not become 0, nor 2^32 + 3 become 3."""
    cfg = config()
    ids = torch.tensor([[2**33, 2**32 + 3]])
    case = Case(cfg, [1, 1, 1], ids=[ids] * 3)
    assert all(int(w.expert_counters.sum()) == 0 for w in case.received)
    steps(cfg, [case])


def test_tokens_keep_every_bit() -> None:
    """NaN payloads, infinities, negative zero and subnormals travel as they are, and stay in their own token."""
    cfg = config(topk=1)
    patterns = torch.tensor([0x7FC1, 0x7F81, -1, 0x7F80, -0x80, -0x8000, 1, -0x7FFF], dtype=torch.int16)   # as int16 bits of bfloat16
    tokens = [stamped_tokens(r, 8, HIDDEN, torch.bfloat16) for r in range(3)]
    for t in range(8):
        tokens[1][t, ::3] = patterns[t].view(torch.bfloat16)
    case = Case(cfg, [8] * 3, tokens=tokens, dropped=0.0)

    def program(comm: Any, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        got = case.dispatch(comm.rank, handle := handle_of(group, 1))
        rows = got.tokens.clone()
        return rows, handle.combine(got.tokens, topk_weights=torch.ones(8, 1))

    results = in_group(3, cfg, program)
    sent = torch.cat([t for t in tokens]).view(torch.int16)
    rows = torch.cat([rows[i, : int(case.received[r].expert_counters[i])] for r, (rows, _) in enumerate(results) for i in range(2)]).view(torch.int16)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, sent.tolist()))
    for r, (_, out) in enumerate(results):
        assert torch.equal(out.isnan(), tokens[r].isnan())
        assert torch.equal(out[~tokens[r].isnan()], tokens[r][~tokens[r].isnan()])


def test_nan_in_one_token_stays_there_and_unused_rows_do_not_leak() -> None:
    cfg = config()
    tokens = [stamped_tokens(r, 6, HIDDEN, torch.bfloat16) for r in range(3)]
    tokens[0][2] = float("nan")
    tokens[2][5] = float("inf")
    case = Case(cfg, [6] * 3, tokens=tokens)
    for w in case.weights:
        w.nan_to_num_(0.25)

    def program(comm: Any, group: Group) -> torch.Tensor:
        handle = handle_of(group)
        got = case.dispatch(comm.rank, handle)
        for expert, n in enumerate(got.layout_info.expert_counters.tolist()):
            got.tokens[expert, n:] = float("nan")
        return handle.combine(case.experts(comm.rank, got), topk_weights=case.weights[comm.rank])

    for r, out in enumerate(in_group(3, cfg, program)):
        assert torch.allclose(out, case.combined[r], rtol=0, atol=0, equal_nan=True)   # the payload of a sum's NaN is nobody's promise
        bad = (~out.isfinite()).any(1).nonzero().flatten().tolist()
        used = (case.ids[r] >= 0).any(1)
        assert bad == [t for t in {0: [2], 2: [5]}.get(r, []) if used[t]]


def test_cancellation_is_summed_in_fp32_in_order() -> None:
    cfg = config(3, 2, 8, 3)
    tokens = [torch.full((2, 8), 1.0, dtype=torch.bfloat16) for _ in range(3)]
    weights = torch.tensor([[2.0**24, 1.0, -(2.0**23)], [1.0, 2.0**24, -(2.0**23)]])
    steps(cfg, [Case(cfg, [2] * 3, ids=[torch.tensor([[0, 1, 2], [2, 1, 0]])] * 3, tokens=tokens, weights=[weights] * 3)])


def test_overflow_is_raised_after_the_fact_and_the_rest_is_right() -> None:
    """Duplicates can fill a plane: rows beyond it are dropped, their owners' senders raise, everything else arrives."""
    cfg = config(topk=4)
    ids = torch.tensor([[3, 3, 3, -1]] * 8)
    over, good = Case(cfg, [8] * 3, ids=[ids] * 3), Case(cfg, [8, 2, 0])
    assert [w.overflow > 0 for w in over.received] == [False, True, True]

    def program(comm: Any, group: Group) -> str:
        handle = handle_of(group, 4)
        got = over.dispatch(comm.rank, handle)
        message = ""
        try:
            group.check()
        except EpOverflowError as e:
            message = str(e)
        over.combine(comm.rank, handle, over.experts(comm.rank, got))
        good.step(comm.rank, handle)
        group.check()
        return message

    messages = in_group(3, cfg, program)
    assert messages[0] == ""
    for r in (1, 2):
        assert f"rank {r}" in messages[r] and "expert of rank 1" in messages[r] and "beyond its 24 rows" in messages[r]


def test_overflow_not_asked_for_is_raised_by_a_later_call_and_nothing_hangs() -> None:
    cfg = config(topk=4)
    over, good = Case(cfg, [8] * 3, ids=[torch.tensor([[3, 3, 3, -1]] * 8)] * 3), Case(cfg, [8, 2, 0])

    def program(comm: Any, group: Group) -> tuple[str, int]:
        handle = handle_of(group, 4)
        got = handle.dispatch(over.tokens[comm.rank], topk_idx=over.ids[comm.rank])
        raised = ""
        try:
            handle.combine(got.tokens, topk_weights=over.weights[comm.rank])
            group.check()
        except EpError as e:
            raised = type(e).__name__
        epoch = epoch_of(group)
        good.step(comm.rank, handle)
        return raised, epoch

    results = in_group(3, cfg, program)
    assert results[1][0] == results[2][0] == "EpOverflowError" and len({epoch for _, epoch in results}) == 1


@pytest.mark.parametrize("epoch", [0, 2**31 - 3, 2**31, 2**32 - 5, 2**32 - 1])
def test_epoch_wraps(epoch: int) -> None:
    cfg = config()
    steps(cfg, [Case(cfg, [8, 2, 5], seed=s) for s in range(5)], epoch=epoch)


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 4, 2**32 - 3, 2**32 - 2, 2**32 - 1])
def test_refusal_next_to_the_wrap(start: int) -> None:
    cfg = config()
    case = Case(cfg, [8, 2, 5])

    def program(comm: Any, group: Group) -> int:
        group.start_at(start)
        comm.barrier()
        handle = handle_of(group)
        case.step(comm.rank, handle)
        with pytest.raises(TypeError if comm.rank == 1 else EpRefusedError):
            handle.dispatch(case.tokens[comm.rank].double() if comm.rank == 1 else case.tokens[comm.rank], topk_idx=case.ids[comm.rank])
        case.step(comm.rank, handle)
        return epoch_of(group)

    assert in_group(3, cfg, program) == [(start + 5) % 2**32] * 3


def test_a_failure_is_forgotten_when_its_epoch_comes_again() -> None:
    cfg = config()
    case = Case(cfg, [8, 2, 5])

    def program(comm: Any, group: Group) -> None:
        handle = handle_of(group)
        case.step(comm.rank, handle)
        with pytest.raises(TypeError if comm.rank == 1 else EpRefusedError):   # operation 3
            handle.dispatch(case.tokens[comm.rank].double() if comm.rank == 1 else case.tokens[comm.rank])
        comm.barrier()
        group.start_at(3)   # as 2^32 good operations would leave it
        comm.barrier()
        case.step(comm.rank, handle)
        group.check()

    in_group(3, cfg, program)


@pytest.mark.parametrize("epoch", [-1, 2**32, 1.0])
def test_start_at_refuses_what_is_no_epoch(epoch: Any) -> None:
    def program(comm: Any) -> None:
        with Group.create(comm, config()) as group, pytest.raises((ValueError, TypeError), match="epoch"):
            group.start_at(epoch)

    run(2, program)


@pytest.mark.parametrize("ranks", [2, 3])
def test_odd_token_counts(ranks: int) -> None:
    cfg = config(ranks * 2, 129, 8)
    steps(cfg, [Case(cfg, [n if r % 2 == 0 else n - 1 for r in range(ranks)], seed=n) for n in (1, 3, 31, 33, 63, 65, 127, 129)])


def test_identical_routing_on_all_ranks_at_full_size() -> None:
    cfg = config(8, 16, 24, 4)
    steps(cfg, [Case(cfg, [16] * 4, ids=[torch.tensor([[5, 4, 0, 7]] * 16)] * 4, weights=[torch.full((16, 4), 0.25)] * 4)])


# ---- where rows and results live ----------------------------------------------------------------------------------------
def test_outputs_given_as_plain_tensors() -> None:
    cfg = config()
    cases = [Case(cfg, [8, 0, 5], seed=s) for s in range(3)]

    def program(comm: Any, group: Group) -> None:
        handle, shape = handle_of(group), (2, 24, HIDDEN)
        for case in cases:
            rows, counters = torch.full(shape, 7, dtype=torch.bfloat16), torch.full((2,), -5, dtype=INT)
            given = DispatchOutputs(rows, layout_info=LayoutInfo(counters))
            got = case.dispatch(comm.rank, handle, outputs=given)
            assert got is given and got.tokens is rows and got.layout_info.expert_counters is counters and got.generation > 0
            out = torch.full((len(case.tokens[comm.rank]), HIDDEN), 7, dtype=torch.bfloat16)
            made = CombineOutputs(out, case.weights[comm.rank])
            assert handle.combine(CombineInputs(case.experts(comm.rank, got)), made) is out
            case.check_combined(comm.rank, out)
            assert made.tokens is out

    in_group(3, cfg, program)


def test_outputs_omitted_lie_in_the_window_and_are_kept() -> None:
    cfg = config()
    case = Case(cfg, [8, 0, 5])

    def program(comm: Any, group: Group) -> None:
        handle = handle_of(group)
        first = case.dispatch(comm.rank, handle)
        assert first.tokens.shape == (2, 24, HIDDEN) and first.tokens.data_ptr() == group.window.address + group.map.slot(0)
        case.combine(comm.rank, handle, case.experts(comm.rank, first))
        counters = LayoutInfo()
        again = handle.dispatch(DispatchInputs(case.tokens[comm.rank]), layout_info=counters)   # the routing is kept, too
        assert again.tokens is first.tokens and again.layout_info is counters and again.generation == first.generation + 1
        case.check_rows(comm.rank, again)
        out = case.combine(comm.rank, handle, case.experts(comm.rank, again))
        assert out.data_ptr() != first.tokens.data_ptr()

    in_group(3, cfg, program)


def test_outputs_object_reused_in_a_loop() -> None:
    cfg = config()
    cases = [Case(cfg, [8, s, 5], seed=s) for s in range(4)]

    def program(comm: Any, group: Group) -> None:
        handle, outputs = handle_of(group), None
        for case in cases:
            outputs = case.dispatch(comm.rank, handle, outputs=outputs)
            case.combine(comm.rank, handle, case.experts(comm.rank, outputs))

    in_group(3, cfg, program)


def test_a_temporary_routing_is_kept_alive() -> None:
    cfg = config()
    case = Case(cfg, [8, 3, 5])

    def program(comm: Any, group: Group) -> None:
        handle = handle_of(group)
        handle.update(case.ids[comm.rank].clone())
        gc.collect()
        junk = [torch.full_like(case.ids[comm.rank], 5) for _ in range(20)]
        got = handle.dispatch(case.tokens[comm.rank].clone())
        case.check_rows(comm.rank, got)
        case.combine(comm.rank, handle, case.experts(comm.rank, got))
        del junk

    in_group(3, cfg, program)


def test_combine_from_the_view_from_a_plain_tensor_and_twice() -> None:
    """Combining again meets all ranks first, so each combine's rows and weights are its own."""
    cfg = config()
    case, other = Case(cfg, [8, 3, 5]), Case(cfg, [8, 3, 5], seed=3)

    def program(comm: Any, group: Group) -> int:
        handle, r = handle_of(group), comm.rank
        got = case.dispatch(r, handle)
        raw = got.tokens.clone()
        rows = case.experts(r, got)
        case.combine(r, handle, rows)
        case.combine(r, handle, rows)
        doubled = handle.combine(case.experts(r, DispatchOutputs(raw.clone())) * 2, topk_weights=case.weights[r])
        equal(doubled, case.combined[r] * 2, "a plain tensor's rows")
        case.combine(r, handle, case.experts(r, DispatchOutputs(raw)))
        other.step(r, handle)
        return epoch_of(group)

    assert in_group(3, cfg, program) == [1 + 1 + 1 + 3 * 2 + 2] * 3


def test_rows_that_need_gradients_neither_raise_nor_stick() -> None:
    """Experts with parameters, outside of no_grad: values are taken, no graph is kept in the window."""
    cfg = config()
    case = Case(cfg, [8, 3, 5])

    def program(comm: Any, group: Group) -> None:
        handle, r = handle_of(group), comm.rank
        one = torch.ones(HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        got = case.dispatch(r, handle)
        out = case.combine(r, handle, case.experts(r, DispatchOutputs(got.tokens.clone())) * one)
        assert not got.tokens.requires_grad and not handle._rows(0).requires_grad
        again = case.dispatch(r, handle)
        assert not out.requires_grad and not again.tokens.requires_grad
        for i in range(2):
            again.tokens[i] = case.experts(r, DispatchOutputs(again.tokens.detach().clone()))[i] * one
        case.combine(r, handle, again.tokens)
        third = case.dispatch(r, handle)
        assert not third.tokens.requires_grad and third.tokens.grad_fn is None
        case.combine(r, handle, case.experts(r, third))
        got = handle.dispatch(case.tokens[r].clone().requires_grad_())
        case.check_rows(r, got)
        assert not got.tokens.requires_grad
        equal(handle.combine(case.experts(r, got), topk_weights=case.weights[r].clone().requires_grad_()), case.combined[r], "weights")

    in_group(3, cfg, program)


# ---- several handles ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["Ad Ac Bd Bc", "Ad Bd Ac Bc", "Ad Bd Bc Ac", "Bd Ad Ac Bc", "Ad Bd Ac Ad Bc Ac", "Ad Ad Bd Bd Ac Bc"])
def test_two_handles_with_different_topk(order: str) -> None:
    cfg = config(num_slots=2, topk=3)
    rounds = [{"A": Case(cfg, [(3 * r + s) % 9 for r in range(3)], topk=1, seed=s),
               "B": Case(cfg, [(5 * r + s + 2) % 9 for r in range(3)], topk=3, seed=s + 50)} for s in range(4)]

    def program(comm: Any, group: Group) -> None:
        handles, live = {"A": handle_of(group, 1), "B": handle_of(group, 3)}, {}
        for cases in rounds:
            for name, what in order.split():
                if what == "d":
                    live[name] = cases[name].dispatch(comm.rank, handles[name])
                    cases[name].experts(comm.rank, live[name])
                else:
                    cases[name].combine(comm.rank, handles[name], live[name].tokens)
            if order.startswith("Ad Bd"):
                assert live["A"].tokens.data_ptr() != live["B"].tokens.data_ptr()
        group.check()

    in_group(3, cfg, program)


def test_a_ladder_of_handles_one_per_token_count() -> None:
    cfg = config(topk=2)
    sizes = [1, 2, 4, 8]
    cases = {n: Case(cfg, [n, max(0, n - 1), n], seed=n) for n in sizes}
    order = [8, 1, 4, 2, 2, 8, 4, 1, 1, 8]

    def program(comm: Any, group: Group) -> None:
        handles = {n: handle_of(group) for n in sizes}
        for n in order:
            cases[n].step(comm.rank, handles[n])

    in_group(3, cfg, program)


def test_all_slots_busy_is_said_and_closing_or_combining_frees_one() -> None:
    cfg = config(num_slots=2)
    a, b, c = (Case(cfg, [8, 2, 5], seed=s) for s in range(3))

    def program(comm: Any, group: Group) -> str:
        r, ha, hb, hc = comm.rank, handle_of(group), handle_of(group), handle_of(group)
        rows_a, rows_b = a.dispatch(r, ha), b.dispatch(r, hb)
        with pytest.raises(EpError, match="all 2 slots") as raised:
            hc.dispatch(c.tokens[r], topk_idx=c.ids[r])
        epochs = comm.exchange(epoch_of(group))
        assert len(set(epochs)) == 1
        a.combine(r, ha, a.experts(r, rows_a))
        c.step(r, hc)                       # the combined one was free
        b.combine(r, hb, b.experts(r, rows_b))
        rows_a, rows_b = a.dispatch(r, ha), b.dispatch(r, hb)
        hb.close()
        c.step(r, hc)
        a.combine(r, ha, a.experts(r, rows_a))
        return str(raised.value)

    assert all("num_slots" in m for m in in_group(3, cfg, program))


def test_combine_without_a_dispatch_or_after_its_slot_went_away() -> None:
    cfg = config()
    a, b = Case(cfg, [8, 2, 5]), Case(cfg, [8, 2, 5], seed=1)

    def program(comm: Any, group: Group) -> None:
        r, ha, hb = comm.rank, handle_of(group), handle_of(group)
        rows = torch.zeros(2, 24, HIDDEN, dtype=torch.bfloat16)
        with pytest.raises(EpError, match="combine needs a dispatch"):
            ha.combine(rows, topk_weights=a.weights[r])
        a.step(r, ha)
        got = b.dispatch(r, hb)
        with pytest.raises(EpError, match="combine needs a dispatch"):
            ha.combine(rows, topk_weights=a.weights[r])
        b.combine(r, hb, b.experts(r, got))
        a.step(r, ha)

    in_group(3, cfg, program)


def test_a_tensor_that_passed_once_is_checked_again_when_it_or_the_routing_changed() -> None:
    """The same tensor objects in every call, as in a decoding loop, but with other memory, another size, or another routing."""
    cfg = config()
    first, second = Case(cfg, [5, 5, 5], dropped=0.0), Case(cfg, [3, 3, 3], seed=1, dropped=0.0)

    def program(comm: Any, group: Group) -> None:
        handle, r = handle_of(group), comm.rank
        x, weights, out = first.tokens[r].clone(), first.weights[r].clone(), torch.zeros(5, HIDDEN, dtype=torch.bfloat16)

        def step(case: Case) -> None:
            got = handle.dispatch(x)
            case.check_rows(r, got)
            case.check_combined(r, handle.combine(case.experts(r, got), CombineOutputs(out, weights)))

        def refused(words: str) -> None:
            with pytest.raises(ValueError, match=words):
                handle.dispatch(x)

        handle.update(first.ids[r])
        step(first), step(first)
        handle.update(second.ids[r])
        refused(r"tokens must have shape \[3, 64\], got \[5, 64\]")
        x.data = shifted(second.tokens[r], 1)
        refused("tokens must start at a multiple of 16 bytes")
        x.data = second.tokens[r].clone()
        got = handle.dispatch(x)
        rows = second.experts(r, got)
        with pytest.raises(ValueError, match=r"topk_weights must have shape \[3, 2\], got \[5, 2\]"):
            handle.combine(rows, CombineOutputs(out, weights))
        weights.data = second.weights[r].clone()
        with pytest.raises(ValueError, match=r"outputs.tokens must have shape \[3, 64\], got \[5, 64\]"):
            handle.combine(rows, CombineOutputs(out, weights))
        out.data = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
        second.check_combined(r, handle.combine(rows, CombineOutputs(out, weights)))
        step(second)

    in_group(3, cfg, program)


# ---- calls that must raise -------------------------------------------------------------------------------------------------
Bad = Callable[[Any, Any, Case, int], Any]
"""Called with (group, handle, case, rank)."""


def refused_on(erring: set[int], group: Group, comm: Any, bad: Callable[[], Any], good: Callable[[], Any], error: type[BaseException],
               words: Sequence[str]) -> None:
    """One round in which `erring` ranks make the bad call: they raise `error` with `words`, the others `EpRefusedError`; epochs stay equal."""
    before = epoch_of(group)
    if comm.rank in erring:
        with pytest.raises(error) as raised:
            bad()
        for word in words:
            assert word in str(raised.value), f"{word!r} is not in {raised.value}"
    else:
        with pytest.raises(EpRefusedError) as raised:
            good()
        assert f"rank {comm.rank}," in str(raised.value) and any(f"rank {r} refused" in str(raised.value) for r in erring), raised.value
    assert comm.exchange(epoch_of(group)) == [before + 1] * comm.num_ranks


def bad_dispatch(bad: Bad, error: type[BaseException], words: Sequence[str], cfg: GroupConfig | None = None) -> None:
    """Good step, bad dispatch, good step: for one erring rank, two of them, all of them."""
    cfg = cfg or config()
    case, other = Case(cfg, [8, 3, 5], dropped=0.0), Case(cfg, [2, 8, 0], seed=1)

    def program(comm: Any, group: Group) -> None:
        handle, r = handle_of(group), comm.rank
        case.step(r, handle)
        for erring in ({1}, {0}, {0, 2}, {0, 1, 2}):
            refused_on(erring, group, comm, lambda: bad(group, handle, case, r),
                       lambda: handle.dispatch(case.tokens[r], topk_idx=case.ids[r]), error, words)
            case.step(r, handle)
            other.step(r, handle)
        group.check()

    in_group(3, cfg, program)


def shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, `elements` further in memory."""
    raw = torch.zeros(t.numel() + elements, dtype=t.dtype)
    raw[elements:] = t.flatten()
    return raw[elements:].view(t.shape)


def wide(t: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between columns."""
    return torch.stack([t, t], -1)[..., 0]


def more(t: torch.Tensor, rows: int = CAPACITY + 1) -> torch.Tensor:
    return t[:1].repeat(rows, 1)


def sends(tokens: Callable[[torch.Tensor], Any] = lambda t: t, ids: Callable[[torch.Tensor], Any] = lambda i: i, **kwargs: Any) -> Bad:
    return lambda group, handle, case, r: handle.dispatch(tokens(case.tokens[r]), topk_idx=ids(case.ids[r]), **kwargs)


ROWS = (2, 24, HIDDEN)
BF16 = torch.bfloat16
BAD_DISPATCHES: dict[str, tuple[Bad, type[BaseException], tuple[str, ...]]] = {
    "tokens float32": (sends(lambda t: t.float()), TypeError, ("tokens must have dtype torch.bfloat16, got torch.float32",)),
    "tokens float16": (sends(lambda t: t.half()), TypeError, ("tokens", "torch.float16")),
    "tokens float64": (sends(lambda t: t.double()), TypeError, ("tokens", "torch.float64")),
    "tokens None": (sends(lambda t: None), TypeError, ("tokens must be a torch tensor, got NoneType",)),
    "tokens a list": (sends(lambda t: t.tolist()), TypeError, ("tokens", "got list")),
    "tokens numpy": (sends(lambda t: t.float().numpy()), TypeError, ("tokens", "got ndarray")),
    "tokens elsewhere": (sends(lambda t: t.to("meta")), ValueError, ("tokens must be on cpu, got meta",)),
    "tokens 1-D": (sends(lambda t: t.flatten()), ValueError, ("tokens must have shape [any, 64], got [",)),
    "tokens 3-D": (sends(lambda t: t[None]), ValueError, ("tokens must have shape [any, 64], got [1, ",)),
    "tokens too wide": (sends(lambda t: torch.cat([t, t], 1)), ValueError, ("tokens must have shape [any, 64]", ", 128]")),
    "tokens too few": (sends(lambda t: t[:-1]), ValueError, ("tokens must have shape [",)),
    "tokens transposed": (sends(lambda t: t.t().contiguous().t()), ValueError, ("tokens must be contiguous, got strides [1, ",)),
    "tokens with gaps": (sends(wide), ValueError, ("tokens must be contiguous, got strides [128, 2]",)),
    "tokens sparse": (sends(lambda t: t.to_sparse()), (TypeError, ValueError), ("tokens",)),
    "tokens at 2 bytes": (sends(lambda t: shifted(t, 1)), ValueError, ("tokens must start at a multiple of 16 bytes",)),
    "tokens at 8 bytes": (sends(lambda t: shifted(t, 4)), ValueError, ("tokens must start at a multiple of 16 bytes",)),
    "too many": (sends(more, more), ValueError, ("max_dispatch_tokens_per_rank = 8", "got 9")),
    "too many ids": (sends(ids=more), ValueError, ("topk_idx must have at most max_dispatch_tokens_per_rank = 8 tokens, got 9",)),
    "too many tokens": (sends(more), ValueError, ("tokens must have at most max_dispatch_tokens_per_rank = 8 tokens, got 9",)),
    "ids int16": (sends(ids=lambda i: i.short()), TypeError, ("topk_idx must have dtype torch.int32 or torch.int64, got torch.int16",)),
    "ids float": (sends(ids=lambda i: i.float()), TypeError, ("topk_idx", "torch.float32")),
    "ids a list": (sends(ids=lambda i: i.tolist()), TypeError, ("topk_idx must be a torch tensor, got list",)),
    "ids elsewhere": (sends(ids=lambda i: i.to("meta")), ValueError, ("topk_idx must be on cpu, got meta",)),
    "ids 1-D": (sends(ids=lambda i: i[:, 0].contiguous()), ValueError, ("topk_idx must have shape [any, 2], got [",)),
    "ids of another K": (sends(ids=lambda i: torch.cat([i, i], 1)), ValueError, ("topk_idx must have shape [any, 2]", ", 4]")),
    "ids with gaps": (sends(ids=wide), ValueError, ("topk_idx must be contiguous, got strides [4, 2]",)),
    "weights to dispatch": (sends(lambda t: DispatchInputs(t, topk_weights=torch.ones(len(t), 2))), ValueError, ("inputs.topk_weights",)),
    "scales to dispatch": (sends(lambda t: DispatchInputs(t, scales=torch.ones(len(t), 1))), ValueError, ("inputs.scales",)),
    "weights out": (sends(outputs=DispatchOutputs(topk_weights=torch.ones(2))), ValueError, ("outputs.topk_weights",)),
    "scales out": (sends(outputs=DispatchOutputs(scales=torch.ones(2))), ValueError, ("outputs.scales",)),
    "ids out": (sends(outputs=DispatchOutputs(topk_idx=torch.ones(2))), ValueError, ("outputs.topk_idx",)),
    "rows out of another shape": (sends(outputs=DispatchOutputs(torch.zeros(2, 8, HIDDEN, dtype=BF16))), ValueError,
                                  ("outputs.tokens must have shape [2, 24, 64], got [2, 8, 64]",)),
    "rows out float32": (sends(outputs=DispatchOutputs(torch.zeros(ROWS))), TypeError, ("outputs.tokens", "torch.float32")),
    "rows out elsewhere": (sends(outputs=DispatchOutputs(torch.zeros(ROWS, dtype=BF16, device="meta"))), ValueError, ("outputs.tokens", "got meta")),
    "rows out with gaps": (sends(outputs=DispatchOutputs(wide(torch.zeros(ROWS, dtype=BF16)))), ValueError, ("outputs.tokens must be contiguous",)),
    "outputs a tensor": (sends(outputs=torch.zeros(ROWS, dtype=BF16)), TypeError, ("outputs must be a DispatchOutputs, got Tensor",)),
    "outputs for combine": (sends(outputs=CombineOutputs()), TypeError, ("outputs must be a DispatchOutputs, got CombineOutputs",)),
    "counters int64": (sends(layout_info=LayoutInfo(torch.zeros(2, dtype=LONG))), TypeError, ("layout_info.expert_counters", "torch.int64")),
    "counters too many": (sends(layout_info=LayoutInfo(torch.zeros(6, dtype=INT))), ValueError,
                          ("layout_info.expert_counters must have shape [2], got [6]",)),
    "counters per rank": (sends(layout_info=LayoutInfo(src_rank_counters=torch.zeros(3, dtype=INT))), ValueError, ("layout_info.src_rank_counters",)),
    "layout_info a tensor": (sends(layout_info=torch.zeros(2, dtype=INT)), TypeError, ("layout_info must be a LayoutInfo, got Tensor",)),
    "send_only": (sends(config=DispatchConfig(send_only=True)), ValueError, ("send_only", "num_staging_slots")),
    "backward": (sends(config=DispatchConfig(pass_direction=PassDir.BWD)), ValueError, ("pass_direction must be FWD", "got BWD")),
    "recipe": (sends(config=DispatchConfig(quant_recipe=DispatchQuant.FWD)), ValueError, ("inputs.scales must be given",)),
    "config of combine": (sends(config=CombineConfig()), TypeError, ("config must be a DispatchConfig, got CombineConfig",)),
}


@pytest.mark.parametrize("which", BAD_DISPATCHES)
def test_bad_dispatch(which: str) -> None:
    bad_dispatch(*BAD_DISPATCHES[which])


@pytest.mark.parametrize(("dtype", "bad_id"), [(LONG, 6), (LONG, 11), (LONG, -2), (LONG, 2**31 - 1), (LONG, 2**33), (LONG, -(2**40)), (INT, 6),
                                               (INT, 2**31 - 1), (INT, -(2**31))])
def test_checked_mode_refuses_ids_out_of_range(dtype: torch.dtype, bad_id: int) -> None:
    def bad(group: Group, handle: Any, case: Case, rank: int) -> None:
        ids = case.ids[rank].clone().to(dtype)
        ids[2, 1] = bad_id
        handle.dispatch(case.tokens[rank], topk_idx=ids)

    bad_dispatch(bad, ValueError, (f"topk_idx must hold -1 or ids in [0, 6), got {bad_id} at token 2, position 1",), config(checked=True))


def test_an_update_that_raised_leaves_no_routing() -> None:
    case = Case(config(), [8, 3, 5])

    def bad(group: Group, handle: Any, case: Case, rank: int) -> None:
        with pytest.raises(TypeError, match="topk_idx"):
            handle.update(case.ids[rank].float())
        handle.dispatch(case.tokens[rank])

    bad_dispatch(bad, ValueError, ("topk_idx must be given",))

    def program(comm: Any, group: Group) -> None:
        handle = handle_of(group)
        with pytest.raises(ValueError, match="topk_idx must be given"):
            handle.dispatch(case.tokens[comm.rank])
        case.step(comm.rank, handle)

    in_group(3, config(), program)


def takes(rows: Callable[[torch.Tensor], Any] = lambda t: t, weights: Callable[[torch.Tensor], Any] = lambda w: w, **kwargs: Any) -> Bad:
    return lambda group, handle, case, r: handle.combine(rows(handle.rows_now), topk_weights=weights(case.weights[r]), **kwargs)


BAD_COMBINES: dict[str, tuple[Bad, Any, tuple[str, ...]]] = {
    "rows float32": (takes(lambda t: t.float()), TypeError, ("inputs.tokens must have dtype torch.bfloat16, got torch.float32",)),
    "rows None": (takes(lambda t: None), TypeError, ("inputs.tokens must be a torch tensor, got NoneType",)),
    "rows of dispatch's outputs": (takes(DispatchOutputs), TypeError, ("inputs.tokens must be a torch tensor, got DispatchOutputs",)),
    "rows elsewhere": (takes(lambda t: t.to("meta")), ValueError, ("inputs.tokens must be on cpu, got meta",)),
    "rows 2-D": (takes(lambda t: t.flatten(0, 1)), ValueError, ("inputs.tokens must have shape [2, 24, 64], got [48, 64]",)),
    "rows too few": (takes(lambda t: t[:, :8].contiguous()), ValueError, ("inputs.tokens must have shape [2, 24, 64], got [2, 8, 64]",)),
    "rows with gaps": (takes(wide), ValueError, ("inputs.tokens must be contiguous",)),
    "rows at 2 bytes": (takes(lambda t: shifted(t, 1)), ValueError, ("inputs.tokens must start at a multiple of 16 bytes",)),
    "no weights": (takes(weights=lambda w: None), ValueError, ("topk_weights must be given",)),
    "weights bf16": (takes(weights=lambda w: w.bfloat16()), TypeError, ("topk_weights must have dtype torch.float32, got torch.bfloat16",)),
    "weights float64": (takes(weights=lambda w: w.double()), TypeError, ("topk_weights", "torch.float64")),
    "weights a list": (takes(weights=lambda w: w.tolist()), TypeError, ("topk_weights must be a torch tensor, got list",)),
    "weights elsewhere": (takes(weights=lambda w: w.to("meta")), ValueError, ("topk_weights must be on cpu, got meta",)),
    "weights too few": (takes(weights=lambda w: w[:-1]), ValueError, ("topk_weights must have shape [",)),
    "weights of another K": (takes(weights=lambda w: w[:, :1].contiguous()), ValueError, ("topk_weights must have shape [", ", 1]")),
    "weights with gaps": (takes(weights=wide), ValueError, ("topk_weights must be contiguous",)),
    "out float32": (takes(outputs=CombineOutputs(torch.zeros(8, HIDDEN))), TypeError, ("outputs.tokens", "torch.float32")),
    "out too large": (takes(outputs=CombineOutputs(torch.zeros(9, HIDDEN, dtype=BF16))), ValueError, ("outputs.tokens must have shape [", "[9, 64]")),
    "out elsewhere": (takes(outputs=CombineOutputs(torch.zeros(8, HIDDEN, dtype=BF16, device="meta"))), ValueError, ("outputs.tokens", "got meta")),
    "out at 2 bytes": (lambda g, h, case, r: h.combine(h.rows_now, CombineOutputs(shifted(case.tokens[r], 1)), topk_weights=case.weights[r]),
                       ValueError, ("outputs.tokens must start at a multiple of 16 bytes",)),
    "outputs a tensor": (takes(outputs=torch.zeros(8, HIDDEN, dtype=BF16)), TypeError, ("outputs must be a CombineOutputs, got Tensor",)),
    "scales": (takes(lambda t: CombineInputs(t, scales=torch.ones(1))), ValueError, ("inputs.scales",)),
    "weights as an input": (takes(lambda t: CombineInputs(t, topk_weights=torch.ones(8, 2))), ValueError, ("inputs.topk_weights",)),
    "send_only": (takes(config=CombineConfig(send_only=True)), ValueError, ("send_only", "num_staging_slots")),
    "backward": (takes(config=CombineConfig(pass_direction=PassDir.BWD)), ValueError, ("pass_direction must be FWD", "got BWD")),
    "recipe": (takes(config=CombineConfig(quant_recipe=CombineQuant.NVFP4)), NotImplementedError, ("quantisation",)),
    "config of dispatch": (takes(config=DispatchConfig()), TypeError, ("config must be a CombineConfig, got DispatchConfig",)),
}


@pytest.mark.parametrize("which", BAD_COMBINES)
def test_bad_combine(which: str) -> None:
    """The refused combine leaves the dispatch as it was: the same combine, called right, is right; so is the next dispatch."""
    bad, error, words = BAD_COMBINES[which]
    cfg = config(num_slots=2)
    case, other = Case(cfg, [8, 3, 5], dropped=0.0), Case(cfg, [2, 8, 0], seed=1)

    def program(comm: Any, group: Group) -> None:
        handle, second, r = handle_of(group), handle_of(group), comm.rank
        case.step(r, handle)
        for i, erring in enumerate(({1}, {0}, {0, 2}, {0, 1, 2})):
            got = case.dispatch(r, handle)
            handle.rows_now = case.experts(r, got)
            refused_on(erring, group, comm, lambda: bad(group, handle, case, r),
                       lambda: handle.combine(handle.rows_now, topk_weights=case.weights[r]), error, words)
            if i % 2 == 0:
                case.combine(r, handle, handle.rows_now)
            other.step(r, second)
            other.step(r, handle)
            states = comm.exchange([list(group.slot_owner), list(group.slot_combined)])
            assert all(s == states[0] for s in states), states
        group.check()

    in_group(3, cfg, program)


def test_stale_rows_and_another_handles_slot() -> None:
    """With two slots: rows of the other handle, and rows a handle got before its slot changed, are refused on all ranks."""
    cfg = config(num_slots=2)
    a, b = Case(cfg, [8, 3, 5]), Case(cfg, [8, 3, 5], seed=1)

    def program(comm: Any, group: Group) -> None:
        r, ha, hb = comm.rank, handle_of(group), handle_of(group)
        rows_a, rows_b = a.dispatch(r, ha), b.dispatch(r, hb)
        a.experts(r, rows_a), b.experts(r, rows_b)
        for erring in ({1}, {0, 2}):
            refused_on(erring, group, comm, lambda: hb.combine(rows_a.tokens, topk_weights=b.weights[r]),
                       lambda mine=rows_b: hb.combine(mine.tokens, topk_weights=b.weights[r]), EpStaleError,
                       ("inputs.tokens lies in slot 0", "dispatch filled slot 1"))
            rows_b = b.dispatch(r, hb)
            b.experts(r, rows_b)
        a.combine(r, ha, rows_a.tokens)
        b.combine(r, hb, rows_b.tokens)
        old = a.dispatch(r, ha).tokens          # slot 0
        a.combine(r, ha, a.experts(r, DispatchOutputs(old)))
        b.dispatch(r, hb), b.combine(r, hb, b.experts(r, DispatchOutputs(hb._rows(hb._slot))))
        live = [handle_of(group), handle_of(group)]
        a.dispatch(r, live[0])
        moved = b.dispatch(r, live[1])
        other = live[0]._rows(live[0]._slot)
        assert other.data_ptr() != moved.tokens.data_ptr()
        refused_on({2}, group, comm, lambda: live[1].combine(other, topk_weights=b.weights[r]),
                   lambda: live[1].combine(moved.tokens, topk_weights=b.weights[r]), EpStaleError, ("inputs.tokens lies in slot",))
        a.combine(r, live[0], a.experts(r, DispatchOutputs(other)))

    in_group(3, cfg, program)


def test_rows_given_for_output_must_not_be_another_slots() -> None:
    """`outputs.tokens` inside the window but in another slot would overwrite somebody's live rows."""
    cfg = config(num_slots=2)
    a, b = Case(cfg, [8, 3, 5]), Case(cfg, [8, 3, 5], seed=1)

    def program(comm: Any, group: Group) -> None:
        r, ha, hb = comm.rank, handle_of(group), handle_of(group)
        rows_a = a.dispatch(r, ha)
        refused_on({1}, group, comm, lambda: hb.dispatch(b.tokens[r], DispatchOutputs(rows_a.tokens), topk_idx=b.ids[r]),
                   lambda: hb.dispatch(b.tokens[r], topk_idx=b.ids[r]), EpStaleError, ("outputs.tokens lies in slot 0", "slot 1"))
        a.check_rows(r, rows_a)
        b.step(r, hb)
        a.combine(r, ha, a.experts(r, rows_a))

    in_group(3, cfg, program)


def test_a_refused_dispatch_leaves_the_earlier_one() -> None:
    """A refused dispatch happened nowhere: only the earlier one can be combined, and weights of the refused one do not fit it."""
    cfg = config()
    small, case = Case(cfg, [2, 8, 5], dropped=0.0), Case(cfg, [8, 8, 8], seed=1, dropped=0.0)

    def program(comm: Any, group: Group) -> None:
        handle, r = handle_of(group), comm.rank
        for erring in ({1}, {0}, {0, 1, 2}):
            rows = small.experts(r, small.dispatch(r, handle))
            refused_on(erring, group, comm, lambda: handle.dispatch(case.tokens[r].float(), topk_idx=case.ids[r]),
                       lambda: handle.dispatch(case.tokens[r], topk_idx=case.ids[r]), TypeError, ("tokens",))
            with pytest.raises(EpRefusedError if r == 1 else ValueError, match="refused" if r == 1 else "topk_weights must have shape"):
                handle.combine(rows, topk_weights=case.weights[r])
            small.combine(r, handle, rows)
            case.step(r, handle)

    in_group(3, cfg, program)


@pytest.fixture
def late_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one process per rank: nobody knows in the same call that a peer refused."""
    submit = local_world._SimRank.submit
    monkeypatch.setattr(local_world._SimRank, "submit", lambda *args, **kwargs: submit(*args, **kwargs) and False)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_peers_that_learn_of_a_refusal_at_check(late_news: None, operation: str, slots: int) -> None:
    """The erring rank raises in its call, the others at `check`; slots and epochs are equal afterwards, and the next good calls right."""
    cfg = config(num_slots=slots)
    case, other = Case(cfg, [8, 3, 5], dropped=0.0), Case(cfg, [2, 8, 0], seed=1)

    def program(comm: Any, group: Group) -> None:
        handle, second, r = handle_of(group), handle_of(group), comm.rank
        for erring in (0, 1, 2):
            rows = case.experts(r, case.dispatch(r, handle))
            with pytest.raises(TypeError if r == erring else EpRefusedError, match="dtype" if r == erring else f"rank {erring} refused"):
                if operation == "dispatch":
                    handle.dispatch(case.tokens[r].float() if r == erring else case.tokens[r])
                else:
                    handle.combine(rows, topk_weights=case.weights[r].double() if r == erring else case.weights[r])
                group.check()
            states = comm.exchange([list(group.slot_owner), list(group.slot_combined), epoch_of(group)])
            assert all(s == states[0] for s in states), states
            if operation == "combine" and erring == 1:
                case.combine(r, handle, rows)
            case.step(r, handle)
            if operation == "combine" or slots == 2:
                other.step(r, second)
            case.step(r, handle)
        group.check()

    in_group(3, cfg, program)


# ---- ranks that disagree ---------------------------------------------------------------------------------------------------
def test_peers_that_call_another_operation() -> None:
    cfg = config(num_slots=2)
    case, one = Case(cfg, [8, 3, 5]), Case(cfg, [8, 3, 5], topk=1, seed=2)

    def program(comm: Any) -> list[str]:
        said = []
        with Group.create(comm, cfg) as group:
            handle, narrow, r = handle_of(group), handle_of(group, 1), comm.rank
            case.step(r, handle)

            def both_raise(mine: Callable[[], Any], theirs: Callable[[], Any]) -> None:
                with pytest.raises(EpMismatchError) as raised:
                    (mine if r == 1 else theirs)()
                    group.check()
                said.append(str(raised.value))
                assert len(set(comm.exchange(epoch_of(group)))) == 1

            both_raise(lambda: narrow.dispatch(one.tokens[r], topk_idx=one.ids[r]), lambda: handle.dispatch(case.tokens[r], topk_idx=case.ids[r]))
            handle.close(), narrow.close()
            handle = handle_of(group)
            got = case.dispatch(r, handle)
            both_raise(lambda: handle.combine(got.tokens, topk_weights=case.weights[r]), lambda: handle.dispatch(case.tokens[r]))
            handle.close()
            handle = handle_of(group)
            case.step(r, handle)
        return said

    for r, (topk, kind) in enumerate(run(3, program)):
        peer = 0 if r == 1 else 1
        assert f"rank {peer} called another operation" in topk and "num_topk" in topk
        here, there = ("combine", "dispatch") if r == 1 else ("dispatch", "combine")
        assert f"rank {peer} called another operation" in kind and f"kind {here} here, {there} there" in kind


def test_close_against_dispatch() -> None:
    case = Case(config(), [8, 3, 5])

    def program(comm: Any) -> str:
        group = Group.create(comm, config())
        handle = handle_of(group)
        with pytest.raises(EpMismatchError) as raised:
            if comm.rank == 2:
                group.close()
            else:
                handle.dispatch(case.tokens[comm.rank], topk_idx=case.ids[comm.rank])
                group.check()
        if comm.rank != 2:
            group._warn.detach()
        return str(raised.value)

    messages = run(3, program)
    assert "kind dispatch here, close there" in messages[0] and "kind close here, dispatch there" in messages[2]


def test_different_host_steps_are_an_error_that_names_them() -> None:
    def program(comm: Any) -> None:
        if comm.rank == 1:
            comm.barrier()
        else:
            comm.create_window(1024, [])

    with LocalWorld(3, "sim") as world:
        with pytest.raises(EpPeerError, match="rank 0 called create_window, but other ranks called a host exchange"):
            world.run(program)
        assert world.run(lambda comm: comm.exchange(comm.rank)) == [[0, 1, 2]] * 3


DIFFERING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "num_experts": ({}, {"experts": 9}, "num_experts: rank 0 has 6, rank 1 has 9, rank 2 has 6"),
    "max_dispatch_tokens_per_rank": ({}, {"tokens": 16}, "max_dispatch_tokens_per_rank: rank 0 has 8, rank 1 has 16, rank 2 has 8"),
    "hidden": ({}, {"hidden": 128}, "hidden: rank 0 has 64, rank 1 has 128, rank 2 has 64"),
    "dtype": ({}, {"dtype": torch.float16}, "dtype: rank 0 has BF16, rank 1 has FP16, rank 2 has BF16"),
    "num_topk": ({}, {"topk": 3}, "num_topk: rank 0 has 2, rank 1 has 3, rank 2 has 2"),
    "algorithm": ({}, {"algorithm": Algorithm.HIGH_THROUGHPUT}, "algorithm: rank 0 has LOW_LATENCY, rank 1 has HIGH_THROUGHPUT"),
    "max_recv_tokens_per_rank": ({}, {"max_recv_tokens_per_rank": 7}, "max_recv_tokens_per_rank: rank 0 has 0, rank 1 has 7"),
    "num_slots": ({}, {"num_slots": 2}, "num_slots: rank 0 has 1, rank 1 has 2, rank 2 has 1"),
    "max_token_bytes": ({}, {"max_token_bytes": 256}, "max_token_bytes: rank 0 has 0, rank 1 has 256"),
}


@pytest.mark.parametrize("field", DIFFERING)
def test_configs_that_differ_between_ranks(field: str) -> None:
    common, different, words = DIFFERING[field]
    case = Case(config(), [8, 3, 5])

    def program(comm: Any) -> None:
        with pytest.raises(ValueError, match="GroupConfig must be the same on all ranks") as raised:
            Group.create(comm, config(**(different if comm.rank == 1 else common)))
        assert words in str(raised.value) and str(raised.value).count("rank 1 has") == 1
        with Group.create(comm, config(dtype=torch.bfloat16 if comm.rank else None)) as group:   # the default is bfloat16
            case.step(comm.rank, handle_of(group))

    run(3, program)


def test_two_differing_fields_are_both_named() -> None:
    def program(comm: Any) -> None:
        with pytest.raises(ValueError, match=r"hidden: rank 0 has 64.*num_slots: rank 0 has 1, rank 1 has 2"):
            Group.create(comm, config(hidden=64 << comm.rank, num_slots=1 + comm.rank))

    run(2, program)


def test_a_grid_too_large_on_one_rank_is_told_to_all_before_the_window() -> None:
    """On real NCCL the window's creation is collective: a rank that will not come must say so before it."""
    case = Case(config(), [8, 3, 5])

    def program(comm: Any) -> str:
        comm.backend = "nccl"   # where the limit is checked
        with pytest.raises(ValueError if comm.rank == 1 else EpRefusedError) as raised:
            Group.create(comm, config(max_num_sms=9 if comm.rank == 1 else 2))
        comm.backend = "sim"
        with Group.create(comm, config()) as group:
            case.step(comm.rank, handle_of(group))
        return str(raised.value)

    messages = run(3, program)
    assert messages[1] == "max_num_sms must be at most what this rank may use of its GPU, 2 multiprocessors, got 9"
    assert messages[0] == messages[2] == "rank 1 refused to create the group: " + messages[1]


def test_group_create_refuses_what_it_cannot_do() -> None:
    def program(comm: Any) -> None:
        with pytest.raises(ValueError, match="num_experts must be a multiple of the number of ranks: 7 over 3"):
            Group.create(comm, config(7))
        with pytest.raises(TypeError, match="config must be a GroupConfig, got dict"):
            Group.create(comm, {})   # type: ignore[arg-type]
        with pytest.raises(TypeError, match="comm must be a Communicator, got int"):
            Group.create(3, config())   # type: ignore[arg-type]

    run(3, program)


def test_bad_handles_are_refused_where_they_are_made_and_do_no_harm() -> None:
    case = Case(config(), [8, 3, 5])
    ids = torch.zeros(4, 2, dtype=LONG)
    bad: list[tuple[dict[str, Any], Any, str]] = [
        ({"layout": Layout.UNSET, "num_topk": 2}, ValueError, "layout must be set"),
        ({"layout": Layout.FLAT, "num_topk": 2}, ValueError, "layout must be EXPERT_MAJOR or RANK_MAJOR.*FLAT"),
        ({"layout": "flat", "num_topk": 2}, (ValueError, TypeError), "layout must be"),
        ({"layout": Layout.EXPERT_MAJOR}, ValueError, "needs topk_idx or num_topk"),
        ({"layout": Layout.EXPERT_MAJOR, "num_topk": 0}, ValueError, r"num_topk must be in \[1, 2\].*got 0"),
        ({"layout": Layout.EXPERT_MAJOR, "num_topk": 3}, ValueError, r"num_topk must be in \[1, 2\].*got 3"),
        ({"layout": Layout.EXPERT_MAJOR, "num_topk": 2.0}, TypeError, "num_topk must be an int, got float"),
        ({"layout": Layout.EXPERT_MAJOR, "num_topk": True}, TypeError, "num_topk must be an int, got bool"),
        ({"layout": Layout.EXPERT_MAJOR, "topk_idx": torch.zeros(4, 3, dtype=LONG)}, ValueError, r"num_topk must be in \[1, 2\].*got 3"),
        ({"layout": Layout.EXPERT_MAJOR, "topk_idx": ids.float()}, TypeError, "topk_idx must have dtype.*got torch.float32"),
        ({"layout": Layout.EXPERT_MAJOR, "topk_idx": ids, "num_topk": 1}, ValueError, r"topk_idx must have shape \[any, 1\], got \[4, 2\]"),
        ({"layout": Layout.EXPERT_MAJOR, "topk_idx": torch.zeros(9, 2, dtype=LONG)}, ValueError, "topk_idx must have at most.*= 8 tokens, got 9"),
        ({"layout": Layout.EXPERT_MAJOR, "topk_idx": ids.to("meta")}, ValueError, "topk_idx must be on cpu, got meta"),
        ({"layout": Layout.EXPERT_MAJOR, "num_topk": 2, "idx_dtype": torch.int16}, TypeError, "idx_dtype must be.*got torch.int16"),
    ]

    def program(comm: Any, group: Group) -> None:
        for arguments, error, words in bad:
            if comm.rank == 1:     # only here: making a handle is local
                with pytest.raises(error, match=words):
                    group.create_handle(**arguments)
        case.step(comm.rank, handle_of(group))
        case.step(comm.rank, group.create_handle(Layout.EXPERT_MAJOR, num_topk=2, idx_dtype=INT, config=HandleConfig(4)))

    in_group(3, config(), program)


# ---- lifetime ----------------------------------------------------------------------------------------------------------------
def test_closed_handle_and_group() -> None:
    case = Case(config(), [8, 3, 5])

    def program(comm: Any) -> None:
        r, rows = comm.rank, torch.zeros(ROWS, dtype=BF16)
        group = Group.create(comm, config())
        with handle_of(group) as handle:
            case.step(r, handle)
        handle.close(), handle.destroy()
        for call in (lambda h: h.dispatch(case.tokens[r]), lambda h: h.combine(rows, topk_weights=case.weights[r]), lambda h: h.complete(),
                     lambda h: h.update(case.ids[r])):
            with pytest.raises(EpClosedError, match="the handle is closed"):
                call(handle)
        other = handle_of(group)
        case.step(r, other)
        other.complete()
        group.close(), group.close()
        for call in (lambda h: h.dispatch(case.tokens[r]), lambda h: h.combine(rows, topk_weights=case.weights[r]), lambda h: h.complete(),
                     lambda h: h.update(case.ids[r])):
            with pytest.raises(EpClosedError, match="the group is closed"):
                call(other)
        with pytest.raises(EpClosedError, match="cannot create_handle: the group is closed"):
            handle_of(group)
        other.close()
        with Group.create(comm, config()) as again:
            case.step(r, handle_of(again))

    run(3, program)


def test_a_handle_closed_on_one_rank_only() -> None:
    """The call is refused there, so the others learn at once whose mistake it was."""
    case, told = Case(config(), [8, 3, 5]), {}

    def program(comm: Any) -> None:
        try:
            with Group.create(comm, config()) as group:
                handle = handle_of(group)
                case.step(comm.rank, handle)
                if comm.rank == 1:
                    handle.close()
                case.step(comm.rank, handle)
        except EpError as e:
            told[comm.rank] = e
            raise

    with LocalWorld(3, "sim") as world:
        with pytest.raises(EpClosedError, match="cannot dispatch: the handle is closed"):
            world.run(program)
        for r in (0, 2):
            assert isinstance(told[r], EpRefusedError) and "rank 1 refused the call (a handle that is closed)" in str(told[r])
        world.run(lambda comm: comm.barrier())


EXIT = """
import torch
from ncclep_py import Group, GroupConfig, Layout, LocalWorld

kept = []

def program(comm):
    group = Group.create(comm, GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1))
    handle = group.create_handle(Layout.EXPERT_MAJOR, torch.tensor([[comm.rank]]))
    kept.append((group, handle.dispatch(torch.ones(1, 8).bfloat16())))
    if MISTAKE and comm.rank == 1:
        raise ArithmeticError("mine")
    comm.barrier()

world = LocalWorld(2, "sim")
world.run(program)
"""


@pytest.mark.parametrize("mistake", [False, True])
def test_a_process_that_ends_without_close(mistake: bool) -> None:
    """Exit code 0 (1 with an exception), a warning, and no waiting for anybody."""
    done = subprocess.run([sys.executable, "-W", "always::ResourceWarning", "-c", f"MISTAKE = {mistake}\n{EXIT}"], capture_output=True, text=True,
                          timeout=60, check=False, cwd=ROOT)
    assert done.returncode == int(mistake), done.stderr
    assert done.stderr.count("dropped without close()") >= 1 and ("ArithmeticError: mine" in done.stderr) == mistake


def test_handles_made_on_some_ranks_only_do_not_upset_close() -> None:
    def program(comm: Any) -> str:
        with Group.create(comm, config()) as group:
            if comm.rank == 1:
                handle_of(group)
        return "done"

    assert run(3, program) == ["done"] * 3


def test_a_group_dropped_without_close_warns_and_a_closed_one_does_not() -> None:
    def program(comm: Any, close: bool) -> None:
        group = Group.create(comm, config())
        if close:
            group.close()
        del group
        gc.collect()

    with LocalWorld(2, "sim") as world:
        with pytest.warns(ResourceWarning, match="dropped without close"):
            world.run(program, False)
        with warnings.catch_warnings(record=True) as caught:   # not as errors: nobody sees an exception of a finalizer
            warnings.simplefilter("always")
            world.run(program, True)
        assert not [w for w in caught if "dropped" in str(w.message)]


@pytest.mark.parametrize("backend", ["sim", "nccl"])
def test_memory_of_a_group_that_ended_alone_stays_on_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers, or a network on their behalf, may still write to it. (The simulator gives it back: nothing runs any more.)"""
    left: list[Any] = []
    monkeypatch.setattr("ncclep_py.group._left", left)

    def program(comm: Any) -> Any:
        with pytest.raises(ArithmeticError), Group.create(comm, config()) as group:
            monkeypatch.setattr(comm, "backend", backend)
            window = weakref.ref(group.window)
            raise ArithmeticError
        del group
        gc.collect()
        return window

    with LocalWorld(1, "sim") as world:
        window = world.run(program)[0]
    assert (window() is not None) is (len(left) == 1) is (backend == "nccl")


def test_an_exception_inside_with_group_does_not_hang_and_others_are_told() -> None:
    case = Case(config(), [8, 3, 5])
    told = {}

    def program(comm: Any) -> None:
        try:
            with Group.create(comm, config()) as group:
                handle = handle_of(group)
                case.step(comm.rank, handle)
                if comm.rank == 1:
                    raise KeyError("my own mistake")
                case.step(comm.rank, handle)
        except Exception as e:
            told[comm.rank] = e
            raise

    with LocalWorld(3, "sim") as world:
        with pytest.raises(KeyError, match="my own mistake"):
            world.run(program)
        for r in (0, 2):
            assert isinstance(told[r], EpPeerError) and "rank 1 ended with KeyError" in str(told[r]) and "my own mistake" in str(told[r])

        def again(comm: Any) -> None:
            with Group.create(comm, config()) as group:
                case.step(comm.rank, handle_of(group))

        world.run(again)


def test_a_program_that_ends_early() -> None:
    case = Case(config(), [8, 3, 5])

    def program(comm: Any) -> str:
        group = Group.create(comm, config())
        handle = handle_of(group)
        case.step(comm.rank, handle)
        if comm.rank == 2:
            group._warn.detach()
            return "early"
        with pytest.raises(EpPeerError, match="rank 2's program has ended"):
            handle.dispatch(case.tokens[comm.rank])
        group._warn.detach()
        return "late"

    assert run(3, program) == ["late", "late", "early"]


def test_two_groups_of_one_world_and_groups_one_after_the_other() -> None:
    small, large = config(), config(9, 5, 128, 3, dtype=torch.float32)
    a, b = Case(small, [8, 3, 5]), Case(large, [5, 0, 4])

    def program(comm: Any) -> None:
        for _ in range(2):
            with Group.create(comm, small) as one, Group.create(comm, large) as two:
                ha, hb = handle_of(one), handle_of(two, 3)
                rows_a = a.dispatch(comm.rank, ha)
                b.step(comm.rank, hb)
                a.combine(comm.rank, ha, a.experts(comm.rank, rows_a))

    run(3, program)


def test_many_steps_with_everything_changing() -> None:
    """Counts, routings, slots, handles and refusals in a seeded order; every result by bits."""
    cfg = config(topk=4, num_slots=2)
    g = torch.Generator().manual_seed(11)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    plan = []
    for s in range(25):
        which = draw(2)
        plan.append((which, draw(5) == 0, draw(3), Case(cfg, [draw(9) for _ in range(3)], topk=(1, 4)[which], seed=s + 100,
                                                         dropped=draw(4) / 4, idx_dtype=(INT, LONG)[draw(2)])))

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handles = (handle_of(group, 1), handle_of(group, 4))
            for which, refuse, culprit, case in plan:
                handle = handles[which]
                got = case.dispatch(r, handle)
                case.experts(r, got)
                if refuse:
                    with pytest.raises(TypeError if r == culprit else EpRefusedError):
                        handle.combine(got.tokens, topk_weights=case.weights[r].double() if r == culprit else case.weights[r])
                case.combine(r, handle, got.tokens)
            group.check()

    run(3, program)
