"""HIGH_THROUGHPUT through the host's surface, on the simulator: results against the oracle by bits, and every way a call can be wrong."""

from __future__ import annotations

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
    EpRefusedError,
    EpStaleError,
    ExpertIdKind,
    Group,
    GroupConfig,
    HandleConfig,
    Layout,
    LayoutInfo,
    LocalWorld,
    OverflowPolicy,
    PassDir,
    ZeroCopyMode,
)
from ncclep_py import reference as ref
from ncclep_py.group import bytes_per_rank
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like

LAYOUTS = (Layout.FLAT, Layout.EXPERT_MAJOR)
BACKWARD, COMBINE_BACKWARD = DispatchConfig(pass_direction=PassDir.BWD), CombineConfig(pass_direction=PassDir.BWD)
DROP = OverflowPolicy.DROP


def config(experts: int = 6, tokens: int = 8, hidden: int = 64, topk: int = 2, **more: Any) -> GroupConfig:
    return GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, algorithm=Algorithm.HIGH_THROUGHPUT,
                       **more)


def equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert bits_equal(got, want), f"{what}: {first_difference(got, want) if got.shape == want.shape else (got.shape, want.shape)}"


def run(ranks: int, program: Callable[..., Any], **world: Any) -> list[Any]:
    with LocalWorld(ranks, "sim", **world) as w:
        return w.run(program)


class Case:
    """One routing of all ranks, inputs of a training step over it, and what the oracle says."""

    def __init__(self, cfg: GroupConfig, layout: Layout, counts: Sequence[int], *, seed: int = 0, alignment: int = 0, global_ids: bool = False,
                 idx_dtype: torch.dtype = torch.int64, ids: Sequence[torch.Tensor] | None = None, dropped: float = 0.1, topk: int = 0) -> None:
        self.cfg, self.layout, self.alignment, self.ranks, self.flat = cfg, layout, alignment, len(counts), layout is Layout.FLAT
        self.kind = ExpertIdKind.GLOBAL if global_ids else ExpertIdKind.AUTO
        topk, dtype = topk or cfg.num_topk, cfg.token_type.torch_dtype()
        self.ids = list(ids) if ids is not None else [
            random_routing(r, n, topk, cfg.num_experts, seed=1000 * seed + 7, dropped=dropped, dtype=idx_dtype) for r, n in enumerate(counts)]
        self.tokens = [stamped_tokens(r, len(i), cfg.hidden, dtype, seed=seed) for r, i in enumerate(self.ids)]
        self.gradients = [stamped_tokens(r, len(i), cfg.hidden, dtype, seed=seed + 50) for r, i in enumerate(self.ids)]
        self.weights = [weights_like(i, seed=31 * seed + r) for r, i in enumerate(self.ids)]
        budget = cfg.max_recv_tokens_per_rank or None
        if self.flat:
            self.plan = ref.ht_flat_map(self.ids, num_experts=cfg.num_experts, max_recv_tokens_per_rank=budget)
            self.received = ref.ht_flat_dispatch(self.plan, self.tokens, self.weights, global_ids=global_ids)
            self.back = ref.ht_flat_dispatch(self.plan, self.gradients)
            combine = ref.ht_flat_combine
        else:
            self.plan = ref.ht_expert_major_map(self.ids, num_experts=cfg.num_experts, alignment=alignment, max_recv_tokens_per_rank=budget)
            self.received = ref.ht_expert_major_dispatch(self.plan, self.tokens, self.weights)
            self.back = ref.ht_expert_major_dispatch(self.plan, self.gradients)
            combine = ref.ht_expert_major_combine
        g = torch.Generator().manual_seed(seed)
        self.rows = [torch.randn(r.tokens.shape, generator=g).to(dtype) for r in self.received]
        self.back_rows = [torch.randn(r.tokens.shape, generator=g).to(dtype) for r in self.received]
        self.back_weights = [torch.randn(r.topk_weights.shape, generator=g) for r in self.received]
        self.combined = combine(self.plan, self.rows)
        self.combined_back = combine(self.plan, self.back_rows, self.back_weights)

    def used(self, rank: int) -> int:
        return len(self.plan.row_src[rank])

    def handle(self, group: Group, rank: int) -> Any:
        made = HandleConfig(dispatch_output_per_expert_alignment=self.alignment)
        return group.create_handle(self.layout, num_topk=self.ids[rank].shape[1], idx_dtype=self.ids[rank].dtype, config=made)

    def check_counts(self, rank: int, info: LayoutInfo) -> None:
        plan = self.plan
        assert info.expert_counters[: self.cfg.num_experts // self.ranks].tolist() == plan.expert_counters[rank].tolist()
        assert int(info.recv_total_counter[0]) == plan.recv_total_counter[rank]
        if not self.flat:
            assert info.expert_offsets.tolist() == plan.expert_offsets[rank].tolist()
            assert info.expert_counts_unpadded.tolist() == plan.expert_counts_unpadded[rank].tolist()

    def check_received(self, rank: int, got: DispatchOutputs, backward: bool = False) -> None:
        n, want = self.used(rank), (self.back if backward else self.received)[rank]
        equal(got.tokens[:n], want.tokens[:n], f"rank {rank}, rows")
        if backward:
            assert got.topk_idx is None and got.topk_weights is None
            return
        defined = len(want.topk_weights) if self.flat else n
        equal(got.topk_weights[:defined], want.topk_weights[:defined], f"rank {rank}, weights")
        if self.flat:
            equal(got.topk_idx[:defined], want.topk_idx[:defined], f"rank {rank}, ids")

    def forward(self, rank: int, handle: Any, outputs: DispatchOutputs | None = None, inplace: bool = True) -> DispatchOutputs:
        got = handle.dispatch(self.tokens[rank], outputs, LayoutInfo(recv_topk_idx_kind=self.kind), topk_weights=self.weights[rank])
        self.check_received(rank, got)
        self.check_counts(rank, got.layout_info)
        out = handle.combine(self.put(got.tokens, self.rows[rank]) if inplace else self.rows[rank])
        equal(out, self.combined[rank].tokens, f"rank {rank}, combined rows")
        return got

    def backward(self, rank: int, handle: Any, inplace: bool = True) -> None:
        got = handle.dispatch(self.gradients[rank], config=BACKWARD)
        self.check_received(rank, got, True)
        into = CombineOutputs()
        rows = self.put(got.tokens, self.back_rows[rank]) if inplace else self.back_rows[rank]
        weights = self.back_weights[rank]
        if rows.shape[0] != weights.shape[0]:
            weights = torch.cat([weights, weights.new_zeros((rows.shape[0] - weights.shape[0], *weights.shape[1:]))])
        out = handle.combine(CombineInputs(rows, weights), into, COMBINE_BACKWARD)
        equal(out, self.combined_back[rank].tokens, f"rank {rank}, gradients of tokens")
        equal(into.topk_weights, self.combined_back[rank].topk_weights, f"rank {rank}, gradients of weights")

    @staticmethod
    def put(into: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        into[: len(rows)] = rows
        return into

    def step(self, rank: int, handle: Any, inplace: bool = True) -> None:
        handle.update(self.ids[rank])
        self.forward(rank, handle, inplace=inplace)
        self.backward(rank, handle, inplace=inplace)


# ---- results -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots, budget, inplace", [(1, 0, True), (2, 0, False), (2, 24, True), (1, 20, False)])
def test_training_steps_with_changing_tokens(slots: int, budget: int, inplace: bool, layout: Layout) -> None:
    cfg = config(num_slots=slots, max_recv_tokens_per_rank=budget, overflow_policy=DROP if budget else 0)
    cases = [Case(cfg, layout, counts, seed=i, alignment=4) for i, counts in enumerate(([8, 3, 5], [0, 8, 1], [8, 8, 8], [0, 0, 0], [2, 0, 7]))]

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = cases[0].handle(group, comm.rank)
            for case in cases:
                case.step(comm.rank, handle, inplace)
            group.check()

    run(3, program)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks, local, topk", [(1, 5, 3), (2, 3, 6), (4, 1, 3), (5, 3, 8)])
def test_ranks_and_experts(ranks: int, local: int, topk: int, layout: Layout) -> None:
    cfg = config(ranks * local, 6, 24, min(topk, ranks * local))
    case = Case(cfg, layout, [(5 * r + 3) % 7 for r in range(ranks)], alignment=8, global_ids=True, idx_dtype=torch.int32)

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            case.step(comm.rank, case.handle(group, comm.rank))
            group.check()

    run(ranks, program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_tokens_than_the_reference_takes(layout: Layout) -> None:
    """8192 is the reference's limit; here 9000 on one rank and few on the other."""
    cfg = config(4, 9000, 8, 2)
    case = Case(cfg, layout, [9000, 3], alignment=128)

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, comm.rank)
            handle.update(case.ids[comm.rank])
            case.forward(comm.rank, handle)

    run(2, program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_odd_sizes(layout: Layout) -> None:
    """Rows and weights large enough that warps share a copy, of sizes that do not divide evenly."""
    cfg = config(4, 67, 264, 3, max_recv_tokens_per_rank=211)
    case = Case(cfg, layout, [67, 50], alignment=4)

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, comm.rank)
            handle.update(case.ids[comm.rank])
            k = (211, 3) if case.flat else (211,)
            made = DispatchOutputs(torch.zeros(211, 264, dtype=torch.bfloat16), torch.zeros(k))
            case.forward(comm.rank, handle, made, inplace=False)
            case.backward(comm.rank, handle, inplace=False)

    run(2, program, blocks=3, warps=5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_duplicate_experts_have_one_row_and_the_sum_of_their_weights(layout: Layout) -> None:
    cfg = config(4, 4, 16, 3)
    ids = [torch.tensor([[3, 3, 1], [2, 2, 2], [0, 3, 0]]), torch.tensor([[1, -1, 1], [7, 9, -5]])]
    case = Case(cfg, layout, [3, 2], ids=ids)

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            case.step(comm.rank, case.handle(group, comm.rank))

    run(2, program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_handles_keep_their_routings(layout: Layout) -> None:
    """Micro-batches: both forward, then both backward, each over its own routing."""
    cfg = config(num_slots=2, topk=3)
    first, second = Case(cfg, layout, [8, 3, 5], seed=1), Case(cfg, layout, [2, 8, 0], seed=2, topk=2)

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group, first.handle(group, comm.rank) as a, second.handle(group, comm.rank) as b:
            for _ in range(2):
                a.update(first.ids[comm.rank])
                b.update(second.ids[comm.rank])
                first.forward(comm.rank, a)
                second.forward(comm.rank, b)
                second.backward(comm.rank, b)
                first.backward(comm.rank, a)
            group.check()

    run(3, program)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_in_the_callers_tensors_and_exact_outputs(dtype: torch.dtype, layout: Layout) -> None:
    """Query, then allocate: update, read the total, allocate exactly that, dispatch; rows beyond are not touched."""
    cfg = config()
    case = Case(cfg, layout, [8, 3, 5], alignment=4)

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, comm.rank)
            info = LayoutInfo(torch.zeros(5, dtype=dtype), None, ExpertIdKind.AUTO, torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=dtype),
                              torch.zeros(2, dtype=dtype))
            handle.update(case.ids[comm.rank], info)
            assert handle.layout_info.expert_counters is info.expert_counters and handle.layout_info.recv_total_counter is info.recv_total_counter
            if layout is Layout.EXPERT_MAJOR:
                assert handle.layout_info.expert_offsets is info.expert_offsets
            case.check_counts(comm.rank, info)
            for spare in (0, 3):
                n, k = int(info.recv_total_counter[0]) + spare, case.ids[0].shape[1]
                made = DispatchOutputs(torch.full((n, cfg.hidden), 5.0, dtype=torch.bfloat16), torch.full((n, k) if case.flat else (n,), 5.0))
                made.topk_idx = torch.full((n, k), 5) if case.flat else None
                got = case.forward(comm.rank, handle, made, inplace=False)
                assert got is made and got.tokens.shape[0] == n
                assert bool((got.tokens[n - spare:] == 5).all())
                if case.flat:
                    assert bool((got.topk_idx[n - spare:] == -1).all()) and bool((got.topk_weights[n - spare:] == 0).all())
                else:
                    assert bool((got.topk_weights[n - spare:] == 5).all())
            group.check()

    run(3, program)


def test_received_ids_are_defined_in_all_rows_of_a_fixed_budget() -> None:
    cfg = config(max_recv_tokens_per_rank=30)
    case = Case(cfg, Layout.FLAT, [2, 0, 1])

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, comm.rank)
            handle.update(case.ids[comm.rank])
            got = case.forward(comm.rank, handle)
            assert got.tokens.shape == (30, cfg.hidden) and got.topk_idx.shape == (30, 2)
            assert int((got.topk_idx >= 0).any(1).sum()) == case.used(comm.rank)

    run(3, program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opaque_rows_with_scales(layout: Layout) -> None:
    """QUANT_FWD: bytes as they are; combine afterwards adds up the group's rows."""
    cfg = config(hidden=128, num_slots=1)
    case = Case(cfg, layout, [8, 3, 5], alignment=4)
    tokens = [torch.randint(0, 256, (len(i), 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(r)) for r, i in enumerate(case.ids)]
    scales = [torch.rand(len(i), 8, generator=torch.Generator().manual_seed(r)) for r, i in enumerate(case.ids)]
    dispatched = ref.ht_flat_dispatch if case.flat else ref.ht_expert_major_dispatch
    want = dispatched(case.plan, tokens, case.weights, scales=scales)

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, r)
            handle.update(case.ids[r])
            for own in (False, True):
                n = case.used(r)
                made = DispatchOutputs(torch.zeros(n, 96, dtype=torch.uint8), None, torch.zeros(n, 8)) if own else None
                got = handle.dispatch(DispatchInputs(tokens[r], case.weights[r], scales[r]), made,
                                      config=DispatchConfig(quant_recipe=DispatchQuant.FWD))
                equal(got.tokens[:n], want[r].tokens[:n], "rows")
                equal(got.scales[:n], want[r].scales[:n], "scales")
                out = handle.combine(case.rows[r])
                equal(out, case.combined[r].tokens, "combined rows")

    run(3, program)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", [ZeroCopyMode.AUTO, ZeroCopyMode.OFF, ZeroCopyMode.ON])
def test_rows_in_windows_of_the_callers_own(mode: ZeroCopyMode, layout: Layout) -> None:
    """Peers write into the caller's window and combine reads there, without a copy unless zero copy is OFF."""
    cfg = config(max_recv_tokens_per_rank=30, zero_copy=mode)
    case = Case(cfg, layout, [8, 3, 5], alignment=4)
    size = 30 * cfg.row_bytes

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            mine = group.create_window(size).memory.view(torch.bfloat16).view(30, cfg.hidden)
            other = group.create_window(size).memory.view(torch.bfloat16).view(30, cfg.hidden)
            handle = case.handle(group, r)
            for _ in range(2):
                handle.update(case.ids[r])
                got = handle.dispatch(case.tokens[r], DispatchOutputs(mine), topk_weights=case.weights[r])
                assert got.tokens is mine
                case.check_received(r, got, False)
                equal(handle.combine(case.put(mine, case.rows[r])), case.combined[r].tokens, "combined from the window")
                got = handle.dispatch(case.gradients[r], DispatchOutputs(other), config=BACKWARD)
                case.check_received(r, got, True)
                into = CombineOutputs()
                rows, grads = case.put(other, case.back_rows[r]), case.back_weights[r]
                equal(handle.combine(CombineInputs(rows, grads), into, COMBINE_BACKWARD), case.combined_back[r].tokens, "gradients")
                equal(into.topk_weights, case.combined_back[r].topk_weights, "gradients of weights")
                handle.dispatch(case.tokens[r], topk_weights=case.weights[r])
            group.check()

    run(3, program)


def test_windows_that_are_refused() -> None:
    cfg = config(max_recv_tokens_per_rank=24, zero_copy=ZeroCopyMode.ON)
    case = Case(cfg, Layout.FLAT, [8, 3, 5])

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            small = group.create_window(23 * cfg.row_bytes + 16)
            large = group.create_window(26 * cfg.row_bytes)
            handle = case.handle(group, r)
            handle.update(case.ids[r])
            rows = large.memory.view(torch.bfloat16).view(26, cfg.hidden)
            tokens = DispatchOutputs(torch.zeros(24, cfg.hidden, dtype=torch.bfloat16))
            for text, made in (("begin with the first byte", DispatchOutputs(rows[1:])), ("left out or lie in a window", tokens)):
                with pytest.raises(ValueError, match=text):
                    handle.dispatch(case.tokens[r], made, topk_weights=case.weights[r])
            with pytest.raises(ValueError, match="at least 3072 bytes, for the 24 rows"):
                handle._place("outputs.tokens", small.memory, 0, True)
            case.forward(r, handle, DispatchOutputs(rows), inplace=True)

    run(3, program)


# ---- budgets -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropped_rows_are_missing_and_nobody_complains(layout: Layout) -> None:
    cfg = config(max_recv_tokens_per_rank=8, overflow_policy=DROP)
    ids = [torch.tensor([[2, 3]] * 8), torch.tensor([[3, 0]] * 3), torch.tensor([[2, 5]] * 5)]
    case = Case(cfg, layout, [8, 3, 5], ids=ids, alignment=2)
    assert case.plan.recv_total_counter[1] > 8

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            case.step(comm.rank, case.handle(group, comm.rank))
            group.check()

    run(3, program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_is_an_exception_on_every_rank_and_the_next_update_is_right(layout: Layout) -> None:
    cfg = config(max_recv_tokens_per_rank=8)
    bad = Case(cfg, layout, [8, 3, 5], ids=[torch.tensor([[2, 3]] * 8), torch.tensor([[3, 0]] * 3), torch.tensor([[2, 5]] * 5)])
    good = Case(cfg, layout, [2, 1, 1])
    wanted = bad.plan.recv_total_counter[1]

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = bad.handle(group, comm.rank)
            handle.update(bad.ids[comm.rank])
            with pytest.raises(EpOverflowError, match=f"rank 1 would receive {wanted} rows, but max_recv_tokens_per_rank is 8"):
                group.check()
            handle.update(bad.ids[comm.rank])
            with pytest.raises(EpOverflowError, match=f"rank 1 would receive {wanted} rows"):
                handle.dispatch(bad.tokens[comm.rank], topk_weights=bad.weights[comm.rank])
            good.step(comm.rank, handle)
            group.check()

    run(3, program)


def test_outputs_with_too_few_rows_are_an_error_and_nothing_is_written_beyond_them() -> None:
    cfg = config()
    case = Case(cfg, Layout.FLAT, [8, 3, 5])

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, comm.rank)
            handle.update(case.ids[comm.rank])
            n = case.used(comm.rank) - 1
            made = DispatchOutputs(torch.zeros(n + 2, cfg.hidden, dtype=torch.bfloat16)[:n])
            handle.dispatch(case.tokens[comm.rank], made, topk_weights=case.weights[comm.rank])
            with pytest.raises(EpOverflowError, match=f"{n + 1} rows were received, but the caller's tensor has only {n}"):
                group.check()
            equal(made.tokens, case.received[comm.rank].tokens[:n], "rows that fit")
            handle.combine(case.rows[comm.rank][:n])
            with pytest.raises(EpOverflowError, match=f"has only {n}"):
                group.check()
            case.forward(comm.rank, handle)

    run(3, program)


# ---- calls that are wrong --------------------------------------------------------------------------------------------------------
SLOT_ROWS = 24


def wrong_calls() -> dict[str, tuple[type[Exception], str, Callable[..., Any]]]:
    """(error on the rank that is wrong, part of its sentence, call); the others get `EpRefusedError`."""
    def dispatch(h: Any, c: Case, r: int, **more: Any) -> Any:
        inputs = DispatchInputs(more.pop("tokens", c.tokens[r]), more.pop("weights", c.weights[r]), more.pop("scales", None))
        return h.dispatch(inputs, more.pop("outputs", None), **more)

    def out(rows: int = SLOT_ROWS, width: int = 64, **more: Any) -> DispatchOutputs:
        return DispatchOutputs(torch.zeros(rows, width, dtype=torch.bfloat16), **more)

    V, T = ValueError, TypeError
    return {
        "update: ids of floats": (T, "topk_idx must have dtype", lambda h, c, r: h.update(c.ids[r].float())),
        "update: other K": (V, "topk_idx must have shape", lambda h, c, r: h.update(c.ids[r][:, :1].contiguous())),
        "update: too many tokens": (V, "at most max_dispatch_tokens_per_rank = 8", lambda h, c, r: h.update(torch.zeros(9, 2, dtype=torch.int64))),
        "update: counters of floats": (T, "layout_info.expert_counters must have dtype",
                                       lambda h, c, r: h.update(c.ids[r], LayoutInfo(torch.zeros(2)))),
        "update: few counters": (V, "layout_info.expert_counters must have at least 2",
                                 lambda h, c, r: h.update(c.ids[r], LayoutInfo(torch.zeros(1, dtype=torch.int32)))),
        "update: two dtypes": (T, "must have one dtype", lambda h, c, r: h.update(c.ids[r], LayoutInfo(
            torch.zeros(2, dtype=torch.int32), recv_total_counter=torch.zeros(1, dtype=torch.int64)))),
        "update: src_rank_counters": (V, "src_rank_counters must be left out",
                                      lambda h, c, r: h.update(c.ids[r], LayoutInfo(None, torch.zeros(3, dtype=torch.int32)))),
        "update: not a LayoutInfo": (T, "layout_info must be a LayoutInfo", lambda h, c, r: h.update(c.ids[r], 3)),
        "dispatch: other tokens": (V, "tokens must have shape", lambda h, c, r: dispatch(h, c, r, tokens=torch.zeros(7, 64, dtype=torch.bfloat16))),
        "dispatch: other dtype": (T, "tokens must have dtype", lambda h, c, r: dispatch(h, c, r, tokens=c.tokens[r].float())),
        "dispatch: no weights": (V, "topk_weights must be given to a forward dispatch", lambda h, c, r: dispatch(h, c, r, weights=None)),
        "dispatch: weights of other shape": (V, "topk_weights must have shape", lambda h, c, r: dispatch(h, c, r, weights=torch.zeros(1, 2))),
        "dispatch: scales without recipe": (V, "inputs.scales must be left out", lambda h, c, r: dispatch(h, c, r, scales=torch.zeros(4, 4))),
        "dispatch: DS_FP8": (V, "quant_recipe must be NONE or FWD",
                             lambda h, c, r: dispatch(h, c, r, config=DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4))),
        "dispatch: outputs of other width": (V, "outputs.tokens must have shape", lambda h, c, r: dispatch(h, c, r, outputs=out(width=32))),
        "dispatch: few rows": (V, "outputs.tokens must have at least max_recv_tokens_per_rank = 24 rows, got 23",
                               lambda h, c, r: dispatch(h, c, r, outputs=out(23))),
        "dispatch: few weights": (V, "outputs.topk_weights must have at least", lambda h, c, r: dispatch(h, c, r, outputs=out(
            topk_weights=torch.zeros(5, 2)))),
        "dispatch: int32 ids": (T, "outputs.topk_idx must have dtype", lambda h, c, r: dispatch(h, c, r, outputs=out(
            topk_idx=torch.zeros(24, 2, dtype=torch.int32)))),
        "dispatch: tokens in the window": (V, "tokens must not lie in a window",
                                           lambda h, c, r: dispatch(h, c, r, tokens=h.rows(0)[: len(c.ids[r])])),
        "dispatch: not a DispatchConfig": (T, "config must be a DispatchConfig", lambda h, c, r: dispatch(h, c, r, config=CombineConfig())),
        "dispatch: not DispatchOutputs": (T, "outputs must be a DispatchOutputs", lambda h, c, r: dispatch(h, c, r, outputs=c.tokens[r])),
        "combine: other width": (V, "inputs.tokens must have shape", lambda h, c, r: h.combine(torch.zeros(24, 32, dtype=torch.bfloat16))),
        "combine: no tensor": (T, "inputs.tokens must be a torch tensor", lambda h, c, r: h.combine(None)),
        "combine: weights in forward": (V, "inputs.topk_weights must be left out",
                                        lambda h, c, r: h.combine(c.rows[r], topk_weights=torch.zeros(24, 2))),
        "combine: scales": (V, "inputs.scales must be left out", lambda h, c, r: h.combine(CombineInputs(c.rows[r], None, torch.zeros(4)))),
        "combine: NVFP4": (V, "quant_recipe must be NONE",
                           lambda h, c, r: h.combine(c.rows[r], config=CombineConfig(quant_recipe=CombineQuant.NVFP4))),
        "combine: outputs of other shape": (V, "outputs.tokens must have shape", lambda h, c, r: h.combine(
            c.rows[r], CombineOutputs(torch.zeros(9, 64, dtype=torch.bfloat16)))),
        "combine: into the window": (V, "outputs.tokens must not lie in a window", lambda h, c, r: h.combine(
            c.rows[r], CombineOutputs(h.rows(1)[: len(c.ids[r])]))),
        "combine: rows of another slot": (EpStaleError, "lies in slot 1 of the window", lambda h, c, r: h.combine(h.rows(1))),
    }


@pytest.mark.parametrize("what", wrong_calls())
def test_a_wrong_call_raises_on_every_rank_and_the_next_is_right(what: str) -> None:
    error, text, call = wrong_calls()[what]
    cfg = config(max_recv_tokens_per_rank=SLOT_ROWS, num_slots=2)
    case = Case(cfg, Layout.FLAT, [8, 3, 5])

    def good(case: Case, handle: Any, r: int) -> None:
        if what.startswith("update"):
            handle.update(case.ids[r])
        elif what.startswith("dispatch"):
            handle.dispatch(case.tokens[r], topk_weights=case.weights[r])
        else:
            handle.combine(case.rows[r])

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, r)
            handle.update(case.ids[r])
            if what.startswith("combine"):
                handle.dispatch(case.tokens[r], topk_weights=case.weights[r])
            with pytest.raises(error if r == 1 else EpRefusedError, match=text if r == 1 else "rank 1 refused the call"):
                call(handle, case, r) if r == 1 else good(case, handle, r)
            if what.startswith("update"):   # nobody may go on with maps that only some have
                with pytest.raises((EpStaleError, EpRefusedError)):
                    handle.dispatch(case.tokens[r], topk_weights=case.weights[r])
            case.step(r, handle)
            group.check()

    run(3, program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_combine_arguments(layout: Layout) -> None:
    cfg = config(max_recv_tokens_per_rank=SLOT_ROWS)
    case = Case(cfg, layout, [8, 3, 5])
    n = SLOT_ROWS

    def program(comm: Any) -> None:
        r = comm.rank
        rows, grads = case.back_rows[r], case.back_weights[r]
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, r)
            handle.update(case.ids[r])
            with pytest.raises(EpError, match="combine needs a backward dispatch"):
                handle.combine(CombineInputs(rows, grads), CombineOutputs(), COMBINE_BACKWARD)
            with pytest.raises(ValueError, match="inputs.topk_weights must be left out of a backward dispatch"):
                handle.dispatch(case.gradients[r], config=BACKWARD, topk_weights=case.weights[r])
            for text, inputs, outputs in (("topk_weights must be given", CombineInputs(rows), CombineOutputs()),
                                          ("outputs must be given", CombineInputs(rows, grads), None),
                                          ("must have shape", CombineInputs(rows, torch.zeros(n, 5, 2)), CombineOutputs()),
                                          ("as many rows as inputs.tokens", CombineInputs(rows, grads[: n - 1].contiguous()), CombineOutputs()),
                                          ("outputs.topk_weights must have shape", CombineInputs(rows, grads),
                                           CombineOutputs(None, torch.zeros(9, 2)))):
                handle.dispatch(case.gradients[r], config=BACKWARD)
                with pytest.raises(ValueError, match=text):
                    handle.combine(inputs, outputs, COMBINE_BACKWARD)
            case.backward(r, handle)

    run(3, program)


def test_calls_out_of_order() -> None:
    cfg = config(num_slots=2)
    case = Case(cfg, Layout.FLAT, [8, 3])

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, r)
            with pytest.raises(EpStaleError, match="dispatch needs an update before it"):
                handle.dispatch(case.tokens[r], topk_weights=case.weights[r])
            handle.update(case.ids[r])
            with pytest.raises(EpError, match="combine needs a dispatch of this handle before it, and the last one was refused"):
                handle.combine(case.rows[r])
            handle.dispatch(case.tokens[r], topk_weights=case.weights[r])
            handle.update(case.ids[r])
            with pytest.raises(EpStaleError, match="dispatched under an earlier routing"):
                handle.combine(case.rows[r])
            case.forward(r, handle)
            equal(handle.combine(case.rows[r]), case.combined[r].tokens, "combined again")
            handle.complete()
            handle.close()
            handle.close()
            with pytest.raises(EpClosedError, match="cannot update: the handle is closed"):
                handle.update(case.ids[r])

    run(2, program)


def test_ranks_that_call_different_operations_are_told_so() -> None:
    cfg = config()
    case = Case(cfg, Layout.EXPERT_MAJOR, [4, 3], alignment=4)

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, r)
            other = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2, config=HandleConfig(dispatch_output_per_expert_alignment=8 if r else 4))
            other.update(case.ids[r])
            with pytest.raises(EpMismatchError, match="alignment"):
                group.check()
            handle.update(case.ids[r])
            handle.dispatch(case.tokens[r], topk_weights=case.weights[r]) if r else handle.dispatch(case.tokens[r], config=BACKWARD)
            with pytest.raises(EpMismatchError, match="backward"):
                group.check()
            case.step(r, handle)

    run(2, program)


def test_what_a_handle_refuses() -> None:
    def program(comm: Any) -> None:
        with Group.create(comm, config()) as group:
            for layout in (Layout.RANK_MAJOR, Layout.UNSET):
                with pytest.raises(ValueError, match="layout must be FLAT or EXPERT_MAJOR"):
                    group.create_handle(layout, num_topk=2)
            with pytest.raises(ValueError, match="at most 128 while max_recv_tokens_per_rank is AUTO"):
                group.create_handle(Layout.EXPERT_MAJOR, num_topk=2, config=HandleConfig(dispatch_output_per_expert_alignment=256))
            with pytest.raises(ValueError, match="num_topk must be in"):
                group.create_handle(Layout.FLAT, num_topk=3)
            with pytest.raises(ValueError, match="got neither"):
                group.create_handle(Layout.FLAT)

    run(1, program)


def test_configs() -> None:
    with pytest.raises(ValueError, match="max_recv_tokens_per_rank must be AUTO or at least max_dispatch_tokens_per_rank = 8, got 7"):
        config(max_recv_tokens_per_rank=7)
    with pytest.raises(ValueError, match="DROP needs an explicit"):
        config(overflow_policy=DROP)
    with pytest.raises(ValueError, match="overflow_policy must be one of"):
        config(overflow_policy=7)
    sizes = bytes_per_rank(config(128, 2048, 7168, 8, max_recv_tokens_per_rank=16384), 8)
    assert 16384 * (7168 * 2 + 96) <= sizes["slots"] < 16384 * (7168 * 2 + 96) + 4096
    assert sizes["control"] < 1 << 20 and sizes["local"] < 1024


def test_ids_are_checked_in_checked_mode() -> None:
    cfg = config(checked=True)

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = group.create_handle(Layout.FLAT, num_topk=2)
            with pytest.raises(ValueError if comm.rank == 0 else EpRefusedError, match="6 at token 1, position 0" if comm.rank == 0 else "refused"):
                handle.update(torch.tensor([[0, 1], [6 - comm.rank, 2]]))

    run(2, program)


def test_calls_that_raise_before_they_take_part_are_refused_on_every_rank() -> None:
    """A closed handle, nothing to combine, no free slot, on one rank only; the next good step is right."""
    cfg = config()
    case = Case(cfg, Layout.FLAT, [8, 3, 5])

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle, spare = case.handle(group, r), case.handle(group, r)

            def refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
                with pytest.raises(error if r == 1 else EpRefusedError, match=words if r == 1 else "rank 1 refused the call"):
                    call()
                group.check()
                comm.barrier()

            handle.update(case.ids[r])
            case.forward(r, handle)
            held = list(group.slot_owner)
            for call, words in ((lambda: handle.combine(case.rows[r]), "combine needs a forward dispatch"),
                                (lambda: handle.dispatch(case.tokens[r], topk_weights=case.weights[r]), f"all {len(held)} slots hold dispatches")):
                if r == 1:   # as if other handles had them all
                    group.slot_owner[:] = [99] * len(held)
                refused(call, EpError, words)
                group.slot_owner[:] = held
            if r == 1:
                spare.close()
            refused(lambda: spare.update(case.ids[r]), EpClosedError, "cannot update: the handle is closed")
            handle.update(case.ids[r])
            case.forward(r, handle)
            equal(handle.combine(case.rows[r]), case.combined[r].tokens, "after refusals")

    run(3, program)


def test_a_slot_that_holds_another_dispatch_is_named() -> None:
    cfg = config()
    case = Case(cfg, Layout.FLAT, [8, 3])

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, comm.rank)
            handle.update(case.ids[comm.rank])
            case.forward(comm.rank, handle)
            at = group.local_map.header(0)
            group._local[at: at + 16].view(torch.int64)[1] = 77 << 32
            comm.synchronize()
            handle.combine(case.rows[comm.rank])
            with pytest.raises(EpStaleError, match=f"a dispatch of handle 77, not of handle {handle.id}$"):
                group.check()

    run(2, program)
