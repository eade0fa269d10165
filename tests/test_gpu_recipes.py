"""QUANT_FWD and DS_FP8 on a GPU, both layouts: bits as the oracle has them. ``-m gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_nvfp4 import NVFP4, Packed
from test_recipes import FP8, FP8_ROUNDED, LAYOUTS, Quantised, every_e4m3_and_between, fwd, raw

from ncclep_py import (
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    EpRefusedError,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
    recipes,
)
from ncclep_py import reference as ref
from ncclep_py.testing import random_routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
needs_fp8 = pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 conversions")


def config(experts: int, tokens: int, hidden: int, topk: int, **more: object) -> GroupConfig:
    more = {"max_num_sms": 8, "timeout_ns": 5_000_000_000} | more
    return GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, **more)


def steps(world: LocalWorld, cases: Sequence[Quantised], rounds: int = 1) -> None:
    """Dispatch and combine each case, on one handle of its layout."""
    for case in cases:
        case.device = "cuda"

    def program(comm: Any) -> None:
        with Group.create(comm, cases[0].cfg) as group:
            handles = {layout: next(c for c in cases if c.layout is layout).handle(group) for layout in {c.layout for c in cases}}
            for _ in range(rounds):
                for case in cases:
                    case.dispatch(comm.rank, handles[case.layout])
                    case.combine(comm.rank, handles[case.layout])
            group.check()

    world.run(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forwarded_types(layout: Layout) -> None:
    cfg = config(12, 17, 128, 3, max_token_bytes=512)
    with LocalWorld(4, "nccl") as world:
        for i, dtype in enumerate(recipes.opaque_types()):
            for j, scale in enumerate(recipes.scale_types()):
                if (i + j) % 3 == 0:
                    steps(world, [fwd(cfg, [17, 0, 5, 1], layout, (240, 48)[i % 2] // dtype.itemsize, dtype, 112 // scale.itemsize, scale, i)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks(ranks: int, layout: Layout) -> None:
    counts = [(5 * r + 9) % 18 for r in range(ranks)]
    with LocalWorld(ranks, "nccl") as world:
        steps(world, [fwd(config(ranks * 4, 17, 1024, 4, max_token_bytes=2048 + 96), counts, layout, 2048, torch.uint8, 96, torch.uint8)], 2)
        if torch.cuda.get_device_capability() >= (8, 9):
            steps(world, [Quantised(config(ranks * 4, 17, 1536, 4), counts, layout, call) for call in (FP8, FP8_ROUNDED)], 2)


@needs_fp8
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_size_and_one_token(layout: Layout) -> None:
    with LocalWorld(8, "nccl") as world:
        steps(world, [Quantised(config(128, 128, 7168, 8, max_num_sms=16), [128] * 8, layout, FP8, dropped=0.02)])
        steps(world, [Quantised(config(128, 1, 7168, 8, max_num_sms=16), [1, 1, 0, 1, 1, 0, 1, 1], layout, FP8_ROUNDED)])


@needs_fp8
def test_every_value_and_every_tie() -> None:
    """Blocks whose scale is a power of two, so that all values of E4M3 and all midpoints that bf16 can hold are converted."""
    values = every_e4m3_and_between().bfloat16()
    values = values[values.abs() <= 448]
    values = torch.cat([values, values.new_zeros(-len(values) % 127)]).view(-1, 127)
    blocks = torch.cat([torch.full((len(values), 1), 448.0).bfloat16(), values], 1)
    blocks = torch.cat([blocks, blocks.new_ones(-len(blocks) % 4, 128)])
    rows = (blocks.view(-1, 512).float() * torch.tensor([2.0**-6, 1.0, 2.0**9]).repeat(len(blocks))[: len(blocks) // 4, None]).bfloat16()
    cfg, count = config(2, 64, 512, 1), len(rows)
    assert count <= 64

    def program(comm: Any) -> list:
        got = []
        with Group.create(comm, cfg) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, torch.zeros(count, 1, dtype=torch.int64, device="cuda"))
            for call in (FP8, FP8_ROUNDED):
                out = handle.dispatch(rows.cuda(), config=call)
                got.append((raw(out.tokens[0, :count]).cpu(), out.scales[0, :count].cpu()))
            group.check()
        return got

    with LocalWorld(1, "nccl") as world:
        for (q, scales), rounded in zip(world.run(program)[0], (False, True), strict=True):
            want, want_scales = ref.quantize_ds_fp8(rows, rounded)
            assert torch.equal(scales, want_scales) and torch.equal(q, raw(want))


@needs_fp8
def test_thousand_rounds_and_recipes_in_turn() -> None:
    """Quantised and plain dispatches of both layouts share a slot; values E4M3 holds exactly; a wrong row is counted."""
    ranks, tokens, hidden = 4, 32, 1024
    cfg = config(16, tokens, hidden, 4)

    def program(comm: Any) -> int:
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        with Group.create(comm, cfg) as group:
            ids = random_routing(comm.rank, tokens, 4, 16).cuda()
            handles = [group.create_handle(layout, ids) for layout in LAYOUTS]
            base = 448.0 - 32 * (torch.arange(tokens, device="cuda") % 7)
            weights = torch.full((tokens, 4), 0.25, device="cuda")
            for step in range(1000):
                em, call = step % 2 == 0, (FP8_ROUNDED, DispatchConfig())[step // 2 % 2]
                x = (base * 2.0 ** (step % 5 - 2))[:, None].expand(-1, hidden).bfloat16().contiguous()
                got = handles[step % 2].dispatch(DispatchInputs(x, None if em else weights), config=call)
                rows = got.tokens
                if got.scales is not None:
                    rows = (rows.float() * got.scales.repeat_interleave(128, 2)).bfloat16()
                if em:
                    out = handles[0].combine(rows, CombineOutputs(topk_weights=weights))
                else:
                    hits = (got.topk_idx >= 0).sum(2, keepdim=True)
                    out = handles[1].combine((rows.float() * hits * 0.25).bfloat16())
                bad += (out != x).any(1).sum()
            group.check()
        return int(bad)

    with LocalWorld(ranks, "nccl") as world:
        assert world.run(program) == [0] * ranks


@needs_fp8
def test_graph_replays() -> None:
    cfg = config(8, 8, 512, 3)

    def program(comm: Any) -> bool:
        with Group.create(comm, cfg) as group:
            ids, x = (torch.arange(24, device="cuda") % 8).view(8, 3), torch.zeros(8, 512, dtype=torch.bfloat16, device="cuda")
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids)
            handle.dispatch(x, config=FP8)   # loads the recipe's kernel
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                got = handle.dispatch(x, config=FP8)
            good = True
            for step in range(20):
                every = [random_routing(r, 8, 3, 8, seed=step, dropped=0.2) for r in range(2)]
                rows = [torch.randn(8, 512, generator=torch.Generator().manual_seed(2 * step + r)).bfloat16() for r in range(2)]
                ids.copy_(every[comm.rank]), x.copy_(rows[comm.rank])
                comm.together(graph.replay)
                sent = [ref.quantize_ds_fp8(t) for t in rows]
                want = ref.ll_expert_major_dispatch([raw(q) for q, _ in sent], every, num_experts=8, max_dispatch_tokens_per_rank=8,
                                                    scales=[s for _, s in sent])[comm.rank]
                for plane, n in enumerate(want.expert_counters.tolist()):
                    good &= torch.equal(raw(got.tokens[plane, :n]).cpu(), want.tokens[plane, :n])
                    good &= torch.equal(got.scales[plane, :n].cpu(), want.scales[plane, :n])
                comm.barrier()
            group.check()
            return good

    with LocalWorld(2, "nccl") as world:
        assert world.run(program) == [True, True]


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0), reason="has FP4 conversions")
def test_nvfp4_is_refused_by_a_sentence() -> None:
    def program(comm: Any) -> None:
        with Group.create(comm, config(4, 4, 512, 2)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, torch.tensor([[0, 3]] * 4, device="cuda"))
            got, weights = handle.dispatch(torch.ones(4, 512, device="cuda").bfloat16()), torch.full((4, 2), 0.5, device="cuda")
            with pytest.raises((NotImplementedError, EpRefusedError), match="needs a device with FP4 conversions|refused"):
                handle.combine(CombineInputs(got.tokens, scales=torch.ones(2, 8, 1, device="cuda")), topk_weights=weights, config=NVFP4)
            out = handle.combine(got.tokens, topk_weights=weights)
            group.check()
            assert (out == 1).all()

    with LocalWorld(2, "nccl") as world:
        world.run(program)


@needs_fp8
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nvfp4_kernel(layout: Layout) -> None:
    """The kernel needs no FP4 instruction, so it is run here on any device, past the refusal."""
    with LocalWorld(4, "nccl") as world:
        for cfg, counts in ((config(8, 17, 512, 3), [17, 0, 5, 1]), (config(32, 16, 7168, 8, max_num_sms=16), [16, 16, 3, 9])):
            cases = [Packed(cfg, counts, layout, seed=s) for s in range(2)]

            def program(comm: Any, cfg: GroupConfig = cfg, cases: list[Packed] = cases) -> None:
                comm.fp4 = True
                with Group.create(comm, cfg) as group:
                    handle = group.create_handle(layout, num_topk=cfg.num_topk)
                    for i, case in enumerate(cases):
                        case.device = "cuda"
                        case.step(comm.rank, handle, plain=i == 1)
                    group.check()

            world.run(program)
