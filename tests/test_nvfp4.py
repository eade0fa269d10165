"""NVFP4 combine in the simulator, both layouts: bits as the oracle has them, many schedules, every line needed, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_ll_host import config, in_group, run
from test_mutations import mutant

from ncclep_py import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    CombineQuant,
    DispatchInputs,
    EpError,
    EpMismatchError,
    EpRefusedError,
    EpStaleError,
    EpTimeoutError,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
    compiled,
    launch,
)
from ncclep_py import reference as ref
from ncclep_py.kernels.ll_nvfp4_combine import make_ll_nvfp4_combine
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.simulator import Faults, SimulationError
from ncclep_py.simulator.recipe_ops import HALVES, e2m1, e4m3_value, pack_nvfp4, unpack_nvfp4
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like

NVFP4 = CombineConfig(quant_recipe=CombineQuant.NVFP4)
LAYOUTS = (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR)


def row_scales(rows: torch.Tensor) -> torch.Tensor:
    """The scale the reference recommends for each row: 2688 / amax, 0 for zeros."""
    amax = rows.float().abs().amax(-1, keepdim=True)
    return torch.where(amax == 0, 0.0, 2688 / amax)


class Packed:
    """One dispatch of random rows, experts that make other ones, and what an NVFP4 combine of these must give."""

    device = "cpu"

    def __init__(self, cfg: GroupConfig, counts: Sequence[int], layout: Layout, *, seed: int = 0, dropped: float = 0.1) -> None:
        self.cfg, self.layout, ranks = cfg, layout, len(counts)
        self.ids = [random_routing(r, n, cfg.num_topk, cfg.num_experts, seed=seed, dropped=dropped) for r, n in enumerate(counts)]
        self.weights = [weights_like(i, seed=seed + r) for r, i in enumerate(self.ids)]
        self.tokens = [stamped_tokens(r, n, cfg.hidden, torch.bfloat16, seed=seed) for r, n in enumerate(counts)]
        how: dict[str, int] = {"num_experts": cfg.num_experts, "max_dispatch_tokens_per_rank": cfg.max_dispatch_tokens_per_rank}
        g = torch.Generator().manual_seed(seed)
        received: Any = (ref.ll_expert_major_dispatch(self.tokens, self.ids, **how) if layout is Layout.EXPERT_MAJOR else
                         ref.ll_rank_major_dispatch(self.tokens, self.ids, self.weights, **how))
        shape = received[0].tokens.shape
        sizes = torch.logspace(-20, 10, shape[0] * shape[1]).view(*shape[:2], 1)
        self.rows = [(torch.randn(shape, generator=g) * sizes).bfloat16() for _ in range(ranks)]
        for rows in self.rows:
            rows[..., 16:32] = 0          # a block of zeros
            rows[:, ::3] *= 0             # rows of zeros, with scale 0
            rows[..., 32:48] *= 2.0**-12  # a block whose scale may vanish
        self.scales = [row_scales(rows) for rows in self.rows]
        weights = self.weights if layout is Layout.EXPERT_MAJOR else None
        self.want = ref.ll_nvfp4_combine(self.rows, self.scales, [w.rows for w in received], weights)

    def step(self, rank: int, handle: Any, *, plain: bool = False) -> None:
        """Dispatch, put the experts' rows into the window, or give a tensor, combine, compare."""
        at, em = self.device, self.layout is Layout.EXPERT_MAJOR
        handle.dispatch(DispatchInputs(self.tokens[rank].to(at), None if em else self.weights[rank].to(at)), topk_idx=self.ids[rank].to(at))
        rows = self.rows[rank].to(at) if plain else handle.expert_rows().copy_(self.rows[rank])
        outputs = CombineOutputs(topk_weights=self.weights[rank].to(at))
        out = handle.combine(CombineInputs(rows, scales=self.scales[rank].to(at)), outputs, NVFP4).cpu()
        assert bits_equal(out, self.want[rank]), f"rank {rank}: {first_difference(out, self.want[rank])}"


def steps(cases: Sequence[Packed], world: dict[str, Any] | None = None, **how: bool) -> None:
    def program(comm: Any) -> None:
        comm.fp4 = True
        with Group.create(comm, cases[0].cfg) as group:
            handles = {layout: group.create_handle(layout, num_topk=cases[0].cfg.num_topk) for layout in {c.layout for c in cases}}
            for case in cases:
                case.step(comm.rank, handles[case.layout], **how)
            group.check()

    run(len(cases[0].tokens), program, **(world or {}))


# ---- results -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", [[3], [4, 0], [2, 5, 1], [0, 0]], ids=str)
def test_counts(layout: Layout, counts: list[int]) -> None:
    cfg = config(len(counts) * 2, 5, 512, 2)
    steps([Packed(cfg, counts, layout, seed=s) for s in range(2)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", [{"blocks": 1, "warps": 1}, {"blocks": 7, "warps": 3}, {"blocks": 2, "warps": 3, "mode": "adversarial", "seed": 3}])
def test_grids_and_wide_rows(layout: Layout, grid: dict[str, Any]) -> None:
    cfg = config(6, 4, 1536, 3)
    steps([Packed(cfg, [4, 1, 3], layout), Packed(cfg, [1, 0, 0], layout, seed=1)], grid)


def test_many_schedules() -> None:
    cfg = config(4, 3, 512, 2)
    for seed in range(20):
        steps([Packed(cfg, [3, 2], LAYOUTS[seed % 2], seed=seed), Packed(cfg, [1, 3], LAYOUTS[seed // 2 % 2], seed=seed + 1)],
              {"mode": ("fair", "adversarial")[seed % 2], "seed": seed}, plain=seed % 3 == 0)


def test_codes_are_nearest_even() -> None:
    ties = (HALVES[1:] + HALVES[:-1]) / 2
    y = np.concatenate([HALVES, ties, np.nextafter(ties, np.float32(9)), np.nextafter(ties, np.float32(0)), np.array([7, 1e9, np.inf], np.float32)])
    y = np.concatenate([y, -y]).astype(np.float32)
    values = torch.tensor(HALVES.tolist(), dtype=torch.float64)
    for got, x in zip(e2m1(y).tolist(), y.tolist(), strict=True):
        distance = (values - min(abs(x), 6)).abs()
        nearest = [i for i in range(8) if distance[i] == distance.min()]
        assert got & 7 == (nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1]) and got >> 3 == int(np.signbit(x))
    every = np.arange(127, dtype=np.uint8)
    assert e4m3_value(every).tolist() == torch.from_numpy(every).view(torch.float8_e4m3fn).float().tolist()


def test_packing_is_the_oracles_quantisation() -> None:
    g = torch.Generator().manual_seed(3)
    rows = (torch.randn(60, 512, generator=g) * torch.logspace(-25, 25, 60)[:, None]).bfloat16()
    rows[:, :16] *= 0
    for scales in (row_scales(rows)[:, 0], torch.zeros(60), torch.full((60,), 1e-30), torch.logspace(-40, 38, 60)):
        q, factors = ref.quantize_nvfp4(rows, scales)
        for i in range(60):
            packed = pack_nvfp4(rows[i].view(torch.uint8).numpy(), np.float32(scales[i]))
            assert len(packed) == 288 + 4
            got, got_factors = unpack_nvfp4(packed[:288], np.float32(scales[i]))
            weigh = factors[i].repeat_interleave(16) != 0   # where a factor is 0, any q is worth 0
            assert torch.equal(torch.from_numpy(got_factors.astype(np.float32)), factors[i])
            assert torch.equal(torch.from_numpy(got.astype(np.float32))[weigh], q[i][weigh])


def test_oracle_by_hand() -> None:
    """One block: 6 is the largest, g = 448, so f = 448, s = 448, factor 1: values of E2M1 are exact, 5 is a tie that goes to 4."""
    row = torch.zeros(1, 16).bfloat16()
    row[0, :6] = torch.tensor([6.0, -1.5, 0.25, 5.0, 0.75, 2.6])
    q, factors = ref.quantize_nvfp4(row, torch.tensor([448.0]))
    assert factors.tolist() == [[1.0]] and q[0, :6].tolist() == [6.0, -1.5, 0.0, 4.0, 1.0, 3.0]
    out = ref.ll_nvfp4_combine([row.view(1, 1, 16)], [torch.tensor([[[448.0]]])], [torch.tensor([[0, -1]])], [torch.tensor([[0.5, 9.0]])])
    assert out[0][0, :4].tolist() == [3.0, -0.75, 0.0, 2.0]


# ---- what is refused -----------------------------------------------------------------------------------------------------
def test_a_device_without_fp4_refuses_by_a_sentence() -> None:
    case = Packed(config(4, 3, 512, 2), [3, 2], Layout.EXPERT_MAJOR)

    def program(comm: Any, group: Group) -> None:
        handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2)
        got = handle.dispatch(case.tokens[comm.rank], topk_idx=case.ids[comm.rank])
        with pytest.raises((NotImplementedError, EpRefusedError), match="needs a device with FP4 conversions.*capability 10.0|refused"):
            inputs = CombineInputs(got.tokens, scales=case.scales[comm.rank])
            handle.combine(inputs, CombineOutputs(topk_weights=case.weights[comm.rank]), NVFP4)
        handle.combine(got.tokens, topk_weights=case.weights[comm.rank])
        group.check()

    in_group(2, case.cfg, program)


BAD: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor | None], type[Exception], str]] = {
    "no scales": ({}, lambda s: None, ValueError, "inputs.scales must be given to an NVFP4 combine"),
    "flat scales": ({}, lambda s: s[..., 0], ValueError, "inputs.scales must have shape"),
    "wide scales": ({}, lambda s: s.double(), TypeError, "inputs.scales must have dtype torch.float32"),
    "hidden": ({"hidden": 256}, lambda s: s, ValueError, "hidden must be a multiple of 512 for NVFP4, got 256"),
    "fp16": ({"dtype": torch.float16}, lambda s: s, ValueError, "NVFP4 quantises bfloat16 rows, this group's are torch.float16"),
}


@pytest.mark.parametrize("which", BAD)
def test_bad_combine(which: str) -> None:
    more, change, error, words = BAD[which]
    cfg = config(**({"experts": 4, "tokens": 3, "hidden": 512, "topk": 2} | more))

    def program(comm: Any) -> None:
        comm.fp4 = True
        with Group.create(comm, cfg) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, torch.tensor([[0, 1], [2, 3], [1, 2]]))
            got = handle.dispatch(torch.ones(3, cfg.hidden).to(cfg.token_type.torch_dtype()))
            scales, weights = change(torch.ones(2, 6, 1)), torch.ones(3, 2)
            with pytest.raises((error, EpRefusedError), match=f"{words}|refused"):
                inputs = CombineInputs(got.tokens, scales=scales if comm.rank or more else torch.ones(2, 6, 1))
                handle.combine(inputs, topk_weights=weights, config=NVFP4)
            handle.dispatch(torch.ones(3, cfg.hidden).to(cfg.token_type.torch_dtype()))
            group.check()

    run(2, program)


def test_packed_rows_are_no_rows() -> None:
    case = Packed(config(4, 3, 512, 2), [3, 2], Layout.EXPERT_MAJOR)

    def program(comm: Any) -> None:
        comm.fp4 = True
        with Group.create(comm, case.cfg) as group:
            handle, weights = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2), case.weights[comm.rank]
            case.step(comm.rank, handle)
            with pytest.raises((EpStaleError, EpRefusedError), match="were packed by an NVFP4 combine|refused"):
                handle.combine(handle._rows(0), topk_weights=weights)
            inputs = CombineInputs(case.rows[comm.rank], scales=case.scales[comm.rank])
            assert bits_equal(handle.combine(inputs, CombineOutputs(topk_weights=weights), NVFP4), case.want[comm.rank])
            case.step(comm.rank, handle)
            group.check()

    run(2, program)


def test_recipes_that_differ_between_ranks() -> None:
    case = Packed(config(4, 3, 512, 2), [3, 2], Layout.EXPERT_MAJOR)

    def program(comm: Any) -> None:
        comm.fp4 = True
        with Group.create(comm, case.cfg) as group:
            handle, r = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2), comm.rank
            got = handle.dispatch(case.tokens[r], topk_idx=case.ids[r])
            handle.combine(CombineInputs(got.tokens, scales=case.scales[r] if r else None), CombineOutputs(topk_weights=case.weights[r]),
                           NVFP4 if r else None)
            with pytest.raises(EpMismatchError, match="recipe"):
                group.check()
            comm.barrier()

    run(2, program)


def test_an_architecture_without_fp8_is_refused_by_a_sentence() -> None:
    shape = KernelShape.build(config(4, 2, 512, 1), 2, 1, 8)
    with pytest.raises(NotImplementedError, match="NVFP4 needs a GPU that converts to E4M3.*this one is sm_80"):
        compiled.compile_kernel(launch.KernelSpec("ll_nvfp4_combine", shape), "sm_80")


# ---- every line of the kernel is needed ------------------------------------------------------------------------------------
HEAD = """        if last_block(local + BLOCKS_PACKED) == 1:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, header_status(held, handle, status))
"""
EARLY = HEAD.replace("last_block(local + BLOCKS_PACKED) == 1", "ops.block_idx() == 0")
WAIT = "wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)"
PACK = "pack_rows(payload, slot, rank, counters, row_scales, PLANES, CAPACITY, ROW_BYTES)"
MUTANTS = {
    "head before packing": [("        # ---- 1 pack", EARLY + "        # ---- 1 pack"), (HEAD, "")],
    "head by the first block": [(HEAD, EARLY)],
    "no wait": [(f"if {WAIT} != 0:", "if code != 0:")],
    "no pack": [(PACK, "pass")],
    "packed by every block": [(PACK, PACK + "\n                " + PACK)],
    "rows cut like bf16": [("ROW_BYTES // 64", "ROW_BYTES")],
    "no advance_epoch": [("                advance_epoch(local + EPOCH, epoch)\n", "")],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", [None, *MUTANTS])
def test_kernel_mutants_are_red(monkeypatch: pytest.MonkeyPatch, layout: Layout, what: str | None) -> None:
    changed = mutant(make_ll_nvfp4_combine, *(MUTANTS[what] if what else []))
    monkeypatch.setitem(launch.KERNELS, "ll_nvfp4_combine", (changed, launch.KERNELS["ll_nvfp4_combine"][1]))
    cfg = config(6, 3, 512, 2)

    def cases() -> None:
        for seed in range(6):
            steps([Packed(cfg, [3, 2, 3], layout, seed=seed)], {"blocks": 2, "warps": 2, "mode": ("fair", "adversarial")[seed % 2], "seed": seed})

    if what is None:
        cases()
    else:
        with pytest.raises((AssertionError, SimulationError, EpError)):
            cases()


def lose_a_rank(seed: int) -> None:
    """Rank 2 does not come to the combine: rank 1 gives up while rank 0 stalls, whose waits then end while some of its blocks still pack."""
    case = Packed(config(6, 3, 512, 2), [3, 2, 3], LAYOUTS[seed % 2], seed=seed)

    def program(comm: Any) -> int:
        comm.fp4 = True
        with contextlib.ExitStack() as open_groups:
            group = Group.create(comm, case.cfg)
            handle, r = group.create_handle(case.layout, num_topk=2), comm.rank
            more = {} if case.layout is Layout.EXPERT_MAJOR else {"topk_weights": case.weights[r]}
            handle.dispatch(case.tokens[r], topk_idx=case.ids[r], **more)
            rows = handle.expert_rows().copy_(case.rows[r])
            if r == 2:
                comm.sit_out()
            else:
                handle.combine(CombineInputs(rows, scales=case.scales[r]), CombineOutputs(topk_weights=case.weights[r]), NVFP4)
                with pytest.raises(EpTimeoutError):
                    group.check()
            open_groups.push(lambda *_: True)
            group._closed = True
            group._warn.detach()
            return int(group._local[:8].view(torch.int64)[0])

    with LocalWorld(3, "sim", seed=seed, mode="adversarial", faults=Faults(timeouts=True, slow={0: 140 + seed})) as world:
        world.simulator.policy.rush = 0.2
        assert world.run(program)[:2] == [3, 3], "the epoch advanced twice, or not at all"


def test_waits_that_end_before_all_blocks_have_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        lose_a_rank(seed)
    one_counter = mutant(make_ll_nvfp4_combine, ("last_block(local + BLOCKS_PACKED)", "last_block(local + BLOCKS_DONE)"))
    monkeypatch.setitem(launch.KERNELS, "ll_nvfp4_combine", (one_counter, launch.KERNELS["ll_nvfp4_combine"][1]))
    with pytest.raises((AssertionError, SimulationError, EpError)):
        for seed in range(60):
            lose_a_rank(seed)
