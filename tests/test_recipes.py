"""QUANT_FWD and DS_FP8 dispatch in the simulator, both layouts: bits as the oracle has them, many schedules, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_ll_host import config, handle_of, in_group, run
from test_mutations import mutant
from test_rank_major_host import rank_handle

from ncclep_py import (
    CombineInputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    EpError,
    EpMismatchError,
    EpRefusedError,
    Group,
    GroupConfig,
    Layout,
    compiled,
    launch,
    recipes,
)
from ncclep_py import reference as ref
from ncclep_py.kernels.ll_dispatch import make_ll_dispatch
from ncclep_py.kernels.ll_rank_major_dispatch import make_ll_rank_major_dispatch
from ncclep_py.kernels.shape import KernelShape, Wire
from ncclep_py.simulator import SimulationError
from ncclep_py.simulator.recipe_ops import e4m3, quantise
from ncclep_py.testing import random_routing, weights_like

FWD, FP8 = DispatchConfig(quant_recipe=DispatchQuant.FWD), DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4)
FP8_ROUNDED = DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4, round_scales=True)
LAYOUTS = (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR)


def raw(rows: torch.Tensor) -> torch.Tensor:
    """Rows as bytes; a row of any dtype can be compared so."""
    return rows.contiguous().view(torch.uint8)


def opaque(rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, NaN and all."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, width * dtype.itemsize), dtype=torch.uint8, generator=g).view(dtype)


class Quantised:
    """One dispatch under a recipe: inputs of all ranks, and what the oracle says arrives."""

    device = "cpu"

    def __init__(self, cfg: GroupConfig, counts: Sequence[int], layout: Layout, call: DispatchConfig, *, seed: int = 0, width: int = 0,
                 dtype: torch.dtype = torch.uint8, scale_width: int = 0, scale_dtype: torch.dtype = torch.float32, dropped: float = 0.1) -> None:
        self.cfg, self.layout, self.call, self.ranks = cfg, layout, call, len(counts)
        self.ids = [random_routing(r, n, cfg.num_topk, cfg.num_experts, seed=seed, dropped=dropped) for r, n in enumerate(counts)]
        self.weights = [weights_like(i, seed=seed + r) for r, i in enumerate(self.ids)]
        if call.quant_recipe is DispatchQuant.FWD:
            self.tokens = [opaque(n, width, dtype, 10 * seed + r) for r, n in enumerate(counts)]
            self.scales: list[torch.Tensor | None] = [opaque(n, scale_width, scale_dtype, 77 + 10 * seed + r) for r, n in enumerate(counts)]
            sent = list(zip(self.tokens, self.scales, strict=True))
        else:
            g = torch.Generator().manual_seed(seed)
            sizes = [torch.logspace(-9, 6, max(n, 1))[:n, None] for n in counts]
            self.tokens = [(torch.randn(n, cfg.hidden, generator=g) * s).bfloat16() for n, s in zip(counts, sizes, strict=True)]
            self.scales = [None] * self.ranks
            sent = [ref.quantize_ds_fp8(t, call.round_scales) for t in self.tokens]
        how: dict[str, Any] = {"num_experts": cfg.num_experts, "max_dispatch_tokens_per_rank": cfg.max_dispatch_tokens_per_rank,
                               "scales": [raw(s) for _, s in sent]}
        rows = [raw(t) for t, _ in sent]
        self.received: list[Any] = (ref.ll_expert_major_dispatch(rows, self.ids, **how) if layout is Layout.EXPERT_MAJOR else
                                    ref.ll_rank_major_dispatch(rows, self.ids, self.weights, **how))

    def handle(self, group: Group) -> Any:
        return (handle_of if self.layout is Layout.EXPERT_MAJOR else rank_handle)(group, self.cfg.num_topk)

    def inputs(self, rank: int) -> DispatchInputs:
        scales = self.scales[rank]
        return DispatchInputs(self.tokens[rank].to(self.device), self.weights[rank].to(self.device) if self.layout is Layout.RANK_MAJOR else None,
                              None if scales is None else scales.to(self.device))

    def dispatch(self, rank: int, handle: Any, **more: Any) -> DispatchOutputs:
        got = handle.dispatch(self.inputs(rank), topk_idx=self.ids[rank].to(self.device), config=self.call, **more)
        want, info = self.received[rank], got.layout_info
        counts = (info.expert_counters if self.layout is Layout.EXPERT_MAJOR else info.src_rank_counters).cpu()
        tokens, scales = raw(got.tokens).cpu(), raw(got.scales).cpu()
        assert torch.equal(counts, want.expert_counters if self.layout is Layout.EXPERT_MAJOR else want.src_rank_counters)
        for plane, n in enumerate(counts.tolist()):
            assert torch.equal(tokens[plane, :n], want.tokens[plane, :n]), f"rank {rank}, plane {plane}: rows"
            assert torch.equal(scales[plane, :n], want.scales[plane, :n]), f"rank {rank}, plane {plane}: scales"
        if self.layout is Layout.RANK_MAJOR:
            assert torch.equal(got.topk_idx.cpu(), want.topk_idx)
        return got

    def combine(self, rank: int, handle: Any) -> None:
        """Combine ones of the group's dtype: every token comes back as what its weights, or its ranks, add up to."""
        shape = (*self.received[rank].tokens.shape[:2], self.cfg.hidden)
        rows = torch.ones(shape, dtype=self.cfg.token_type.torch_dtype(), device=self.device)
        weights = torch.ones(self.ids[rank].shape, device=self.device)
        out = handle.combine(CombineInputs(rows), topk_weights=weights)
        parts = [[e // (self.cfg.num_experts // self.ranks) if self.layout is Layout.RANK_MAJOR else k for k, e in enumerate(row) if e >= 0]
                 for row in self.ids[rank].tolist()]
        want = torch.tensor([float(len(set(p))) for p in parts])[:, None].expand(-1, self.cfg.hidden)
        assert torch.equal(out.float().cpu(), want)


def steps(cases: Sequence[Quantised], world: dict[str, Any] | None = None) -> None:
    """Dispatch and combine each case on one handle of its layout."""
    def program(comm: Any, group: Group) -> None:
        handles = {layout: next((c for c in cases if c.layout is layout), cases[0]).handle(group) for layout in {c.layout for c in cases}}
        for case in cases:
            case.dispatch(comm.rank, handles[case.layout])
            case.combine(comm.rank, handles[case.layout])
        group.check()

    in_group(cases[0].ranks, cases[0].cfg, program, **(world or {}))


# ---- QUANT_FWD -----------------------------------------------------------------------------------------------------------
def fwd(cfg: GroupConfig, counts: Sequence[int], layout: Layout, width: int, dtype: torch.dtype, scale_width: int, scale_dtype: torch.dtype,
        seed: int = 0) -> Quantised:
    return Quantised(cfg, counts, layout, FWD, seed=seed, width=width, dtype=dtype, scale_width=scale_width, scale_dtype=scale_dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", recipes.opaque_types(), ids=str)
def test_forwarded_token_types(layout: Layout, dtype: torch.dtype) -> None:
    cfg = config(6, 6, 64, 3, max_token_bytes=144)
    steps([fwd(cfg, [6, 0, 5], layout, 48 // dtype.itemsize, dtype, 4, torch.float32)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", recipes.scale_types(), ids=str)
def test_forwarded_scale_types(layout: Layout, dtype: torch.dtype) -> None:
    cfg = config(6, 6, 64, 3, max_token_bytes=160)
    steps([fwd(cfg, [6, 3, 5], layout, 128, torch.uint8, 32 // dtype.itemsize, dtype)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("width", "scale_bytes"), [(16, 16), (16, 112), (112, 16), (224, 48), (128, 128)])
def test_forwarded_sizes(layout: Layout, width: int, scale_bytes: int) -> None:
    """Rows shorter and longer than the group's 128 bytes; scales longer than rows; the slot filled to its last byte."""
    cfg = config(4, 5, 64, 2, max_token_bytes=272 if width == 224 else 256)
    steps([fwd(cfg, [5, 2], layout, width, torch.uint8, scale_bytes, torch.uint8, seed=s) for s in range(2)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", [{"blocks": 1, "warps": 1}, {"blocks": 5, "warps": 4}, {"blocks": 3, "warps": 3, "mode": "adversarial", "seed": 3}])
def test_forwarded_grids_and_counts(layout: Layout, grid: dict[str, Any]) -> None:
    cfg = config(6, 7, 64, 3, max_token_bytes=160)
    steps([fwd(cfg, counts, layout, 128, torch.uint8, 32, torch.uint8, seed=i) for i, counts in enumerate(([7, 1, 0], [0, 0, 2], [2, 7, 3]))], grid)


# ---- DS_FP8 ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", [FP8, FP8_ROUNDED], ids=["exact", "rounded"])
@pytest.mark.parametrize("hidden", [512, 1536])
def test_quantised_rows(layout: Layout, call: DispatchConfig, hidden: int) -> None:
    cfg = config(6, 9, hidden, 3)
    steps([Quantised(cfg, [9, 0, 5], layout, call, seed=s) for s in range(2)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", [{"blocks": 1, "warps": 1}, {"blocks": 7, "warps": 3}, {"blocks": 2, "warps": 3, "mode": "adversarial", "seed": 3}])
def test_quantised_grids_and_counts(layout: Layout, grid: dict[str, Any]) -> None:
    """Blocks of 128 columns shared out over more warps than there are."""
    cfg = config(6, 7, 512, 3)
    steps([Quantised(cfg, counts, layout, FP8, seed=i) for i, counts in enumerate(([7, 1, 0], [0, 0, 2], [1, 7, 3]))], grid)


def test_many_schedules() -> None:
    cfg = config(4, 3, 512, 2)
    for seed in range(12):
        cases = [Quantised(cfg, [3, 2], LAYOUTS[seed % 2], FP8, seed=seed),
                 fwd(cfg, [1, 3], LAYOUTS[seed // 2 % 2], 512, torch.uint8, 16, torch.float32, seed)]
        steps(cases, {"mode": ("fair", "adversarial")[seed % 2], "seed": seed})


def every_e4m3_and_between() -> torch.Tensor:
    """All values of E4M3, all midpoints of neighbours, and their fp32 neighbours, of both signs."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    up, down = torch.nextafter(middle, torch.tensor(1e9)), torch.nextafter(middle, torch.tensor(0.0))
    all_ = torch.cat([values, middle, up, down, torch.tensor([448.5, 464.0, 1e30])])
    return torch.cat([all_, -all_])


def test_conversion_is_torchs_nearest_even() -> None:
    x = every_e4m3_and_between()
    assert e4m3(x.numpy()).tolist() == x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert e4m3(np.array([np.nan], np.float32)).tolist() == [127]


@pytest.mark.parametrize("rounded", [False, True])
def test_simulated_quantisation_is_the_oracles(rounded: bool) -> None:
    g = torch.Generator().manual_seed(1)
    rows = (torch.randn(200, 512, generator=g) * torch.logspace(-30, 30, 200)[:, None]).bfloat16()
    rows[0], rows[1, ::2] = 0, -0.0
    q, scales = ref.quantize_ds_fp8(rows, rounded)
    for i in range(200):
        got, got_scales = quantise(rows[i].view(torch.uint8).numpy(), rounded)
        assert got.tolist() == q[i].view(torch.uint8).tolist() and got_scales.tolist() == scales[i].tolist()


# ---- outputs and order -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_given_as_plain_tensors(layout: Layout) -> None:
    cfg = config(6, 4, 512, 2)
    case = Quantised(cfg, [4, 3, 0], layout, FP8)

    def program(comm: Any, group: Group) -> None:
        handle = case.handle(group)
        planes = tuple(case.received[0].tokens.shape[:2])
        made = DispatchOutputs(torch.zeros(*planes, 512, dtype=torch.float8_e4m3fn), scales=torch.zeros(*planes, 4))
        rows, scales = made.tokens, made.scales
        got = case.dispatch(comm.rank, handle, outputs=made)
        assert got.tokens is rows and got.scales is scales
        case.combine(comm.rank, handle)
        again = case.dispatch(comm.rank, handle, outputs=DispatchOutputs())
        assert again.tokens.data_ptr() - group.window.address == group.map.slot(0)
        assert case.dispatch(comm.rank, handle).scales is again.scales

    in_group(3, cfg, program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_write_where_combine_reads(layout: Layout) -> None:
    """Without a recipe the received tokens, after one the same bytes with the group's dtype; not before a dispatch, nor after the combine."""
    cfg = config(6, 4, 512, 2, num_slots=2)
    case = Quantised(cfg, [4, 3, 0], layout, FP8)

    def program(comm: Any, group: Group) -> None:
        handle = case.handle(group)
        with pytest.raises(EpError, match="expert_rows needs a dispatch"):
            handle.expert_rows()
        got = case.dispatch(comm.rank, handle)
        rows = handle.expert_rows()
        assert rows.dtype is torch.bfloat16 and rows.shape == (*got.tokens.shape[:2], 512) and rows.data_ptr() == got.tokens.data_ptr()
        rows.fill_(1)
        handle.combine(rows, topk_weights=torch.ones(case.ids[comm.rank].shape))
        with pytest.raises(EpError, match="expert_rows needs a dispatch"):
            handle.expert_rows()
        plain = handle.dispatch(DispatchInputs(case.tokens[comm.rank], case.inputs(comm.rank).topk_weights))
        assert handle.expert_rows() is plain.tokens

    in_group(3, cfg, program)


def test_recipes_and_layouts_in_turn() -> None:
    cfg = config(6, 6, 512, 3, num_slots=2, max_token_bytes=1072)
    steps([Quantised(cfg, [6, 0, 5], LAYOUTS[s % 2], (FP8, FP8_ROUNDED)[s // 2 % 2], seed=s) if s % 3 else
           fwd(cfg, [1, 6, 3], LAYOUTS[s % 2], 1024, torch.uint8, 48, torch.uint8, s) for s in range(8)])


# ---- what is refused -----------------------------------------------------------------------------------------------------------
def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


GOOD = ones(4, 64, dtype=torch.bfloat16)


def forwarded(tokens: torch.Tensor, scales: torch.Tensor | None) -> dict[str, Any]:
    return {"inputs": DispatchInputs(tokens, scales=scales), "config": FWD}


BAD: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "no scales": (lambda: forwarded(GOOD, None), ValueError, "inputs.scales must be given"),
    "rounded": (lambda: forwarded(GOOD, ones(4, 4)) | {"config": DispatchConfig(quant_recipe=DispatchQuant.FWD, round_scales=True)}, ValueError,
                "round_scales must be left out"),
    "flat scales": (lambda: forwarded(GOOD, ones(16)), ValueError, "inputs.scales must have shape"),
    "few scales": (lambda: forwarded(GOOD, ones(3, 4)), ValueError, r"inputs.scales must have shape \[4, any\]"),
    "odd scales": (lambda: forwarded(GOOD, ones(4, 3)), ValueError, "multiple of 16 bytes in QUANT_FWD, got 12"),
    "no columns": (lambda: forwarded(GOOD, ones(4, 0)), ValueError, "got 0 bytes"),
    "scales of another type": (lambda: forwarded(GOOD, ones(4, 4).double()), TypeError, "inputs.scales must have"),
    "tokens of another type": (lambda: forwarded(GOOD.double(), ones(4, 4)), TypeError, "tokens must have dtype"),
    "too wide": (lambda: forwarded(GOOD, ones(4, 12)), ValueError, r"fit 160 bytes a row.*got 128 \+ 48"),
    "outputs of another type": (lambda: {**forwarded(GOOD, ones(4, 4)),
                                         "outputs": DispatchOutputs(torch.zeros(2, 24, 64))}, TypeError, "outputs.tokens must have dtype"),
    "scales out of another width": (lambda: {**forwarded(GOOD, ones(4, 4)),
                                             "outputs": DispatchOutputs(scales=torch.zeros(2, 24, 5))}, ValueError, "outputs.scales must have shape"),
    "hidden of 64": (lambda: {"inputs": DispatchInputs(GOOD), "config": FP8}, ValueError, "hidden must be a multiple of 512 for DS_FP8, got 64"),
}


@pytest.mark.parametrize("which", BAD)
def test_bad_dispatch(which: str) -> None:
    cfg = config(6, 8, 64, 2, max_token_bytes=160)
    case = fwd(cfg, [4, 4, 4], Layout.EXPERT_MAJOR, 64, torch.bfloat16, 8, torch.float32)
    make, error, words = BAD[which]

    def program(comm: Any, group: Group) -> None:
        handle, r = case.handle(group), comm.rank
        arguments: dict[str, Any] = {"inputs": case.inputs(r), "topk_idx": case.ids[r], "config": FWD}
        with pytest.raises(error if r == 1 else EpRefusedError, match=words if r == 1 else "rank 1 refused"):
            handle.dispatch(**(arguments | (make() if r == 1 else {})))
        case.dispatch(r, handle)
        case.combine(r, handle)

    in_group(3, cfg, program)


def test_scales_for_a_recipe_that_makes_them_and_other_dtypes() -> None:
    for dtype, more, words in ((torch.bfloat16, {"scales": ones(2, 4)}, "inputs.scales must be left out of a DS_FP8"),
                               (torch.float16, {}, "DS_FP8 quantises bfloat16 rows, this group's are torch.float16")):
        def program(comm: Any, dtype: torch.dtype = dtype, more: dict[str, Any] = more, words: str = words) -> None:
            with Group.create(comm, config(2, 2, 512, 1, dtype=dtype)) as group, pytest.raises(ValueError, match=words):
                ids = torch.zeros(2, 1, dtype=torch.int64)
                handle_of(group, 1).dispatch(DispatchInputs(ones(2, 512, dtype=dtype), **more), topk_idx=ids, config=FP8)

        run(1, program)


@pytest.mark.parametrize(("mine", "theirs", "field"), [
    (FP8, DispatchConfig(), "recipe"), (FP8, FP8_ROUNDED, "recipe"), ("bf16", "fp16", "token_type"), (16, 32, "scale_vectors")])
def test_ranks_must_send_alike(mine: Any, theirs: Any, field: str) -> None:
    cfg = config(4, 2, 512, 1, max_token_bytes=1088)

    def program(comm: Any, group: Group) -> None:
        handle, how = handle_of(group, 1), mine if comm.rank == 0 else theirs
        tokens, ids = ones(2, 512, dtype=torch.float16 if how == "fp16" else torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
        if isinstance(how, DispatchConfig):
            handle.dispatch(tokens, topk_idx=ids, config=how)
        else:
            handle.dispatch(DispatchInputs(tokens, scales=ones(2, how // 4 if isinstance(how, int) else 4)), topk_idx=ids, config=FWD)
        with pytest.raises(EpMismatchError, match=field):
            group.check()
        comm.barrier()

    in_group(2, cfg, program)


def test_rows_of_a_recipe_are_no_rows_of_combine() -> None:
    cfg = config(4, 2, 512, 1)
    case = Quantised(cfg, [2, 2], Layout.EXPERT_MAJOR, FP8)

    def program(comm: Any, group: Group) -> None:
        handle = case.handle(group)
        got = case.dispatch(comm.rank, handle)
        with pytest.raises((TypeError, EpError), match=r"inputs.tokens must have dtype torch.bfloat16|refused"):
            handle.combine(got.tokens, topk_weights=torch.ones(2, 1))

    in_group(2, cfg, program)


# ---- architectures ---------------------------------------------------------------------------------------------------------------
def test_an_architecture_without_fp8_is_refused_by_a_sentence() -> None:
    shape = KernelShape.build(config(4, 2, 512, 1), 2, 1, 8, wire=Wire(512, 16, True))
    for arch in ("sm_80", "sm_86"):
        with pytest.raises(NotImplementedError, match=f"DS_FP8 needs a GPU that converts to E4M3.*this one is {arch}"):
            compiled.compile_kernel(launch.KernelSpec("ll_dispatch", shape), arch)


# ---- every line of the kernels is needed -----------------------------------------------------------------------------------------
FACTORIES = {Layout.EXPERT_MAJOR: ("ll_dispatch", make_ll_dispatch), Layout.RANK_MAJOR: ("ll_rank_major_dispatch", make_ll_rank_major_dispatch)}
SCALES_PIECE = "begin_vector(num_tokens, SCALE_BYTES), end_vector(num_tokens, SCALE_BYTES)"
MUTANTS = {
    "no scale rows": [("if SCALE_BYTES > 0:", "if SCALE_BYTES < 0:")],
    "scale rows cut like token rows": [(SCALES_PIECE, "begin, stop")],
    "scale rows over token rows": [("scatter_row(payload, place + SCALES,", "scatter_row(payload, place,")],
    "token rows of the group's size": [("PLANE_ROWS, SENT_BYTES, begin", "PLANE_ROWS, ROW_BYTES, begin")],
    "pieces of the group's rows": [("shape.wire.scale_bytes, shape.piece_bytes,", "shape.wire.scale_bytes, shape.row_bytes,")],
    "quantised scales over rows": [("quantise_row(payload, place, place + SCALES,", "quantise_row(payload, place, place,")],
    "scales not rounded": [("PLANE_ROWS, ROW_BYTES, ROUND,", "PLANE_ROWS, ROW_BYTES, 0,")],
    "not quantised": [("if QUANTISE:", "if SCALE_BYTES < 0:")],
    "fetched rows as long as sent ones": [("reserved, GIVEN_BYTES, begin", "reserved, SENT_BYTES, begin")],
    "fetched pieces of sent vectors": [("begin * VECTORS, stop * VECTORS", "begin, stop")],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", [None, *MUTANTS])
def test_kernel_mutants_are_red(monkeypatch: pytest.MonkeyPatch, layout: Layout, what: str | None) -> None:
    name, factory = FACTORIES[layout]
    monkeypatch.setitem(launch.KERNELS, name, (mutant(factory, *(MUTANTS[what] if what else [])), launch.KERNELS[name][1]))
    cfg = config(4, 3, 512, 2, max_token_bytes=1088)

    def cases() -> None:
        for seed in range(2):
            steps([fwd(cfg, [3, 2], layout, 512, torch.uint8, 64, torch.uint8, seed)], {"blocks": 3, "warps": 2, "seed": seed})
            steps([Quantised(cfg, [3, 2], layout, FP8_ROUNDED, seed=seed)], {"blocks": 3, "warps": 2, "seed": seed})

    if what is None:
        cases()
    else:
        with pytest.raises((AssertionError, SimulationError, ValueError)):   # ValueError: numpy's, of a piece of another size
            cases()
