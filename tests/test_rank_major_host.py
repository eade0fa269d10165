"""LL RANK_MAJOR through the host's surface, on the simulator: results against the oracle by bits, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_ll_host import INT, LONG, Case, config, epoch_of, equal, handle_of, in_group

from ncclep_py import (
    CombineInputs,
    CombineOutputs,
    DispatchInputs,
    DispatchOutputs,
    EpMismatchError,
    EpRefusedError,
    EpStaleError,
    ExpertIdKind,
    Group,
    GroupConfig,
    Layout,
    LayoutInfo,
)
from ncclep_py import reference as ref
from ncclep_py.testing import random_routing, stamped_tokens, weights_like


def reduced(tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, first_expert: int) -> torch.Tensor:
    """What a rank's experts make of its rows: per row the sum over its hits of weight * (expert + 1) * row, in fp32, rounded; unused rows stay."""
    made = tokens.clone()
    for source, count in enumerate(counts.tolist()):
        for i in range(count):
            hits = ids[source, i] >= 0
            factor = (weights[source, i][hits] * (ids[source, i][hits] + first_expert + 1)).sum()
            made[source, i] = (tokens[source, i].float() * factor).to(tokens.dtype)
    return made


class RankCase:
    """Inputs of all ranks for one RANK_MAJOR dispatch and combine, and what the oracle says."""

    def __init__(self, cfg: GroupConfig, counts: Sequence[int], *, topk: int | None = None, seed: int = 0, dropped: float = 0.1,
                 idx_dtype: torch.dtype = LONG, kind: ExpertIdKind = ExpertIdKind.AUTO, ids: Sequence[torch.Tensor] | None = None) -> None:
        self.cfg, self.ranks, self.local, self.kind = cfg, len(counts), cfg.num_experts // len(counts), kind
        self.ids = ids or [random_routing(r, n, topk or cfg.num_topk, cfg.num_experts, seed=1000 * seed + 7, dropped=dropped, dtype=idx_dtype)
                           for r, n in enumerate(counts)]
        dtype = cfg.token_type.torch_dtype()
        self.tokens = [stamped_tokens(r, n, cfg.hidden, dtype, seed=seed) for r, n in enumerate(counts)]
        self.weights = [weights_like(i, seed=31 * seed + r) for r, i in enumerate(self.ids)]
        self.global_ids = kind is ExpertIdKind.GLOBAL
        self.received = ref.ll_rank_major_dispatch(self.tokens, self.ids, self.weights, num_experts=cfg.num_experts, global_ids=self.global_ids,
                                                   max_dispatch_tokens_per_rank=cfg.max_dispatch_tokens_per_rank)
        made = [reduced(w.tokens, w.topk_idx, w.topk_weights, w.src_rank_counters, self.first(r)) for r, w in enumerate(self.received)]
        self.combined = ref.ll_rank_major_combine(made, [w.rows for w in self.received])

    def first(self, rank: int) -> int:
        return 0 if self.global_ids else rank * self.local

    def check_rows(self, rank: int, got: DispatchOutputs) -> None:
        want = self.received[rank]
        assert torch.equal(got.layout_info.src_rank_counters, want.src_rank_counters)
        assert got.topk_idx.dtype is INT and torch.equal(got.topk_idx, want.topk_idx)
        for source, n in enumerate(want.src_rank_counters.tolist()):
            equal(got.tokens[source, :n], want.tokens[source, :n], f"rank {rank}, rows of {source}")
            equal(got.topk_weights[source, :n], want.topk_weights[source, :n], f"rank {rank}, weights of {source}")

    def dispatch(self, rank: int, handle: Any, **more: Any) -> DispatchOutputs:
        more.setdefault("layout_info", LayoutInfo(recv_topk_idx_kind=self.kind))
        got = handle.dispatch(DispatchInputs(self.tokens[rank], self.weights[rank]), topk_idx=self.ids[rank], **more)
        self.check_rows(rank, got)
        return got

    def experts(self, rank: int, got: DispatchOutputs) -> torch.Tensor:
        got.tokens.copy_(reduced(got.tokens, got.topk_idx, got.topk_weights, got.layout_info.src_rank_counters, self.first(rank)))
        return got.tokens

    def combine(self, rank: int, handle: Any, rows: torch.Tensor, **more: Any) -> torch.Tensor:
        out = handle.combine(rows, **more)
        equal(out, self.combined[rank], f"rank {rank}, combined rows")
        return out

    def step(self, rank: int, handle: Any) -> None:
        self.combine(rank, handle, self.experts(rank, self.dispatch(rank, handle)))


def rank_handle(group: Group, topk: int = 2) -> Any:
    return group.create_handle(Layout.RANK_MAJOR, num_topk=topk)


def steps(cfg: GroupConfig, cases: Sequence[RankCase], *, world: dict[str, Any] | None = None) -> None:
    """Run the cases one after the other on one handle."""
    def program(comm: Any, group: Group) -> int:
        handle = rank_handle(group, int(cases[0].ids[0].shape[1]))
        for case in cases:
            case.step(comm.rank, handle)
        group.check()
        return epoch_of(group)

    assert in_group(cases[0].ranks, cfg, program, **(world or {})) == [1 + 2 * len(cases)] * cases[0].ranks


# ---- right results -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_ranks_and_uneven_counts(ranks: int) -> None:
    cfg = config(ranks * 3, 9, 40, min(3, ranks * 3))
    steps(cfg, [RankCase(cfg, [(5 * r + 3 * s) % 10 for r in range(ranks)], seed=s) for s in range(3)])


def test_more_ranks_than_lanes() -> None:
    cfg = config(33, 2, 8, 3)
    steps(cfg, [RankCase(cfg, [2 - r % 3 for r in range(33)])], world={"blocks": 1, "warps": 1})


def test_counts_change_on_every_step_and_the_empty_rank_moves() -> None:
    cfg = config()
    counts = [[8, 8, 8], [0, 3, 8], [5, 0, 1], [0, 0, 6], [0, 0, 0], [8, 1, 8]]
    steps(cfg, [RankCase(cfg, c, seed=i) for i, c in enumerate(counts)])


@pytest.mark.parametrize(("topk", "experts"), [(1, 2), (2, 2), (9, 10), (31, 64), (32, 32)])
def test_topk(topk: int, experts: int) -> None:
    cfg = config(experts, 5, 16, topk)
    steps(cfg, [RankCase(cfg, [5, 2], seed=s) for s in range(2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("idx_dtype", [LONG, INT])
def test_types_and_hidden_sizes(dtype: torch.dtype, idx_dtype: torch.dtype) -> None:
    for hidden in (8, 24, 136):
        cfg = config(6, 6, hidden, 3, dtype=dtype)
        steps(cfg, [RankCase(cfg, [6, 0, 5], idx_dtype=idx_dtype, kind=k) for k in (ExpertIdKind.LOCAL, ExpertIdKind.GLOBAL)])


@pytest.mark.parametrize("experts", [3, 1023])
def test_few_and_many_experts(experts: int) -> None:
    """One expert a rank, where rows take more room than EXPERT_MAJOR's, and hundreds."""
    cfg = config(experts, 4, 16, 3)
    steps(cfg, [RankCase(cfg, [4, 1, 3])])


@pytest.mark.parametrize("grid", [{"blocks": 1, "warps": 1}, {"blocks": 5, "warps": 4}, {"mode": "adversarial", "seed": 5}])
def test_grids_and_schedules(grid: dict[str, Any]) -> None:
    cfg = config()
    steps(cfg, [RankCase(cfg, [8, 1, 6], seed=s) for s in range(2)], world=grid)


def test_duplicates_and_ids_out_of_range() -> None:
    cfg = config(6, 4, 16, 4)
    ids = [torch.tensor([[0, 1, 0, 5], [9, -7, 2, 2], [-1, -1, -1, -1], [4, 3, 4, 3]])] * 3
    steps(cfg, [RankCase(cfg, [4, 4, 4], ids=ids)])


# ---- outputs -----------------------------------------------------------------------------------------------------------------
def test_outputs_given_as_plain_tensors() -> None:
    cfg = config()
    case = RankCase(cfg, [8, 3, 5])

    def program(comm: Any, group: Group) -> None:
        handle = rank_handle(group)
        counters = torch.full((3,), -5, dtype=INT)
        made = DispatchOutputs(torch.full((3, 8, 64), 9.0).bfloat16(), torch.full((3, 8, 2), 9.0), None, torch.full((3, 8, 2), 9, dtype=INT))
        got = case.dispatch(comm.rank, handle, outputs=made, layout_info=LayoutInfo(src_rank_counters=counters))
        assert got is made and got.layout_info.src_rank_counters is counters
        assert not any(0 <= t.data_ptr() - group.window.address < group.window.num_bytes for t in (got.tokens, got.topk_idx, got.topk_weights))
        out = torch.empty(len(case.tokens[comm.rank]), 64, dtype=torch.bfloat16)
        assert case.combine(comm.rank, handle, case.experts(comm.rank, got), outputs=CombineOutputs(out)) is out
        group.check()

    in_group(3, cfg, program)


def test_outputs_in_the_window_are_the_same_tensors_in_a_loop() -> None:
    cfg = config()

    def program(comm: Any, group: Group) -> None:
        handle, made = rank_handle(group), DispatchOutputs()
        for step in range(3):
            case = RankCase(cfg, [8, 3, 5], seed=step)
            got = case.dispatch(comm.rank, handle, outputs=made)
            inside = [t.data_ptr() - group.window.address - group.map.slot(0) for t in (got.tokens, got.topk_idx, got.topk_weights)]
            assert inside == [0, group.map.recv_ids, group.map.recv_weights]
            case.combine(comm.rank, handle, case.experts(comm.rank, got))

    in_group(3, cfg, program)


def test_weights_by_keyword_and_weights_that_combine_ignores() -> None:
    cfg = config()
    case = RankCase(cfg, [8, 3, 5])

    def program(comm: Any, group: Group) -> None:
        handle, w = rank_handle(group), case.weights[comm.rank]
        got = handle.dispatch(case.tokens[comm.rank], topk_idx=case.ids[comm.rank], topk_weights=w)
        case.check_rows(comm.rank, got)
        rows = case.experts(comm.rank, got)
        case.combine(comm.rank, handle, CombineInputs(rows, topk_weights=got.topk_weights), outputs=CombineOutputs(topk_weights=w))
        case.combine(comm.rank, handle, rows.clone())

    in_group(3, cfg, program)


# ---- several handles ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_handles_of_other_layout_topk_and_id_type_in_turn(slots: int) -> None:
    cfg = config(6, 8, 64, 4, num_slots=slots)

    def program(comm: Any, group: Group) -> None:
        handles = [rank_handle(group, 2), handle_of(group, 3), rank_handle(group, 4), handle_of(group, 1)]
        for step in range(6):
            cases = [RankCase(cfg, [8, 3, step], topk=2, seed=step, idx_dtype=INT), Case(cfg, [step, 8, 2], topk=3, seed=step),
                     RankCase(cfg, [1, step, 7], topk=4, seed=step, kind=ExpertIdKind.GLOBAL), Case(cfg, [4, 4, 8], topk=1, seed=step)]
            live: list[Any] = []
            for i in (3, 0, 2, 1) if step % 2 else range(4):
                live.append((cases[i], handles[i], cases[i].dispatch(comm.rank, handles[i])))
                if len(live) == slots:
                    case, handle, got = live.pop(0)
                    case.combine(comm.rank, handle, case.experts(comm.rank, got))
            for case, handle, got in live:
                case.combine(comm.rank, handle, case.experts(comm.rank, got))
        group.check()

    in_group(3, cfg, program)


def test_counts_of_an_expert_major_dispatch_are_not_taken_for_new_ones() -> None:
    """Many RANK_MAJOR operations leave EXPERT_MAJOR's count words alone; the next of these must find its own."""
    cfg = config()

    def program(comm: Any, group: Group) -> None:
        em, rm = handle_of(group), rank_handle(group)
        for step in range(4):
            Case(cfg, [8, 3, 5], seed=step).step(comm.rank, em)
            for more in range(3):
                RankCase(cfg, [2, 8, 0], seed=10 * step + more).step(comm.rank, rm)

    in_group(3, cfg, program)


# ---- what is refused -------------------------------------------------------------------------------------------------------------
BAD = {
    "no weights": (lambda c, r: {"inputs": c.tokens[r]}, ValueError, "topk_weights must be given to a RANK_MAJOR dispatch"),
    "wide weights": (lambda c, r: {"inputs": DispatchInputs(c.tokens[r], c.weights[r].double())}, TypeError, "topk_weights must have dtype"),
    "weights of another shape": (lambda c, r: {"inputs": DispatchInputs(c.tokens[r], c.weights[r][:1])}, ValueError, "topk_weights must have shape"),
    "expert_counters": (lambda c, r: {"layout_info": LayoutInfo(expert_counters=torch.zeros(2, dtype=INT))}, ValueError,
                        "expert_counters must be left out of a LOW_LATENCY RANK_MAJOR"),
    "src_rank_counters of another type": (lambda c, r: {"layout_info": LayoutInfo(src_rank_counters=torch.zeros(3, dtype=LONG))}, TypeError,
                                          "src_rank_counters must have dtype torch.int32"),
    "src_rank_counters of another shape": (lambda c, r: {"layout_info": LayoutInfo(src_rank_counters=torch.zeros(4, dtype=INT))}, ValueError,
                                           "src_rank_counters must have shape"),
    "wide ids": (lambda c, r: {"outputs": DispatchOutputs(topk_idx=torch.zeros(3, 8, 2, dtype=LONG))}, TypeError, "topk_idx must have dtype"),
    "flat weights": (lambda c, r: {"outputs": DispatchOutputs(topk_weights=torch.zeros(24, 2))}, ValueError, "outputs.topk_weights must have shape"),
    "rows of the other layout": (lambda c, r: {"outputs": DispatchOutputs(torch.zeros(2, 24, 64).bfloat16())}, ValueError,
                                 r"outputs.tokens must have shape \[3, 8, 64\]"),
    "numbering": (lambda c, r: {"layout_info": LayoutInfo(recv_topk_idx_kind=7)}, ValueError, "recv_topk_idx_kind must be one of"),
    "scales": (lambda c, r: {"inputs": DispatchInputs(c.tokens[r], c.weights[r], c.weights[r])}, ValueError, "inputs.scales must be left out"),
}


@pytest.mark.parametrize("which", BAD)
def test_bad_dispatch(which: str) -> None:
    cfg = config()
    good = RankCase(cfg, [8, 3, 5])
    make, error, words = BAD[which]

    def program(comm: Any, group: Group) -> None:
        handle, r = rank_handle(group), comm.rank
        arguments: dict[str, Any] = {"inputs": DispatchInputs(good.tokens[r], good.weights[r]), "topk_idx": good.ids[r]}
        with pytest.raises(error if r == 1 else EpRefusedError, match=words if r == 1 else "rank 1 refused"):
            handle.dispatch(**(arguments | (make(good, r) if r == 1 else {})))
        good.step(r, handle)
        group.check()

    in_group(3, cfg, program)


def test_a_refused_dispatch_leaves_the_earlier_one() -> None:
    cfg = config()
    first, second = RankCase(cfg, [8, 3, 5]), RankCase(cfg, [2, 8, 8], seed=1)

    def program(comm: Any, group: Group) -> None:
        handle, r = rank_handle(group), comm.rank
        rows = first.experts(r, first.dispatch(r, handle))
        with pytest.raises((TypeError, EpRefusedError)):
            handle.dispatch(DispatchInputs(second.tokens[r].float() if r == 2 else second.tokens[r], second.weights[r]), topk_idx=second.ids[r])
        first.combine(r, handle, rows)
        second.step(r, handle)

    in_group(3, cfg, program)


def test_layouts_and_numberings_that_differ_between_ranks() -> None:
    cfg = config()
    rm, em = RankCase(cfg, [8, 3, 5]), Case(cfg, [8, 3, 5])

    def program(comm: Any, group: Group) -> None:
        handle, r = rank_handle(group), comm.rank
        if r == 0:
            with handle_of(group) as other:
                other.dispatch(em.tokens[r], topk_idx=em.ids[r])
        else:
            handle.dispatch(DispatchInputs(rm.tokens[r], rm.weights[r]), topk_idx=rm.ids[r])
        with pytest.raises(EpMismatchError, match="layout"):
            group.check()
        kind = ExpertIdKind.GLOBAL if r == 0 else ExpertIdKind.LOCAL
        handle.dispatch(DispatchInputs(rm.tokens[r], rm.weights[r]), topk_idx=rm.ids[r], layout_info=LayoutInfo(recv_topk_idx_kind=kind))
        with pytest.raises(EpMismatchError, match="global_ids"):
            group.check()
        rm.step(r, handle)

    in_group(3, cfg, program)


def test_rows_of_another_slot_and_of_the_other_layout_are_refused() -> None:
    cfg = config(num_slots=2)
    a, b = RankCase(cfg, [8, 3, 5]), RankCase(cfg, [2, 8, 8], seed=1)

    def program(comm: Any, group: Group) -> None:
        one, two, r = rank_handle(group), rank_handle(group), comm.rank
        got_a, got_b = a.dispatch(r, one), b.dispatch(r, two)
        a.experts(r, got_a), b.experts(r, got_b)
        with pytest.raises(EpStaleError, match="lies in slot 1 of the window"):
            one.combine(got_b.tokens)
        a.combine(r, one, got_a.tokens)
        with pytest.raises(EpStaleError, match="outputs.topk_idx lies in slot 1"):
            one.dispatch(DispatchInputs(a.tokens[r], a.weights[r]), DispatchOutputs(topk_idx=got_b.topk_idx))
        b.combine(r, two, got_b.tokens)

    in_group(3, cfg, program)
