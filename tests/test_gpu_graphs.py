"""CUDA graphs: captured once per rank, replayed with routing, weights, tokens and token counts that change in device memory. ``-m gpu``."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch

from ncclep_py import CombineOutputs, DispatchConfig, DispatchInputs, DispatchOutputs, DispatchQuant, EpError, Group, GroupConfig, Layout, LocalWorld
from ncclep_py import reference as ref
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
EXPERTS, HIDDEN, TOPK, MOST, RANKS = 16, 512, 3, 8, 4


def config(**more: object) -> GroupConfig:
    return GroupConfig(**{"num_experts": EXPERTS, "max_dispatch_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOPK, "max_num_sms": 8,
                          "timeout_ns": 5_000_000_000} | more)


def capture(action: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
        action()
    return graph


def inputs(rank: int, seed: int, tokens: int = MOST, dropped: float = 0.2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids, weights and the combined result with experts that double."""
    ids = random_routing(rank, tokens, TOPK, EXPERTS, seed=seed, dropped=dropped)
    x, weights = stamped_tokens(rank, tokens, HIDDEN, torch.bfloat16, seed=seed), weights_like(ids, seed=seed + rank)
    return x, ids, weights, ref.moe_layer(x, ids, weights, [lambda rows: rows * 2] * EXPERTS)


def on_gpu(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [t.cuda() for t in tensors]


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.view(torch.int16) != b.view(torch.int16)).sum()


def test_thousand_replays_with_new_everything() -> None:
    """Token counts change from all to none by ids of -1; every bit of every result is compared, on the device."""
    def program(comm: object) -> int:
        pool = [on_gpu(inputs(comm.rank, seed, dropped=seed / 20)) for seed in range(21)]
        with Group.create(comm, config()) as group:
            x, ids, weights, want = (t.clone() for t in pool[0])
            out = torch.zeros_like(want)
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids)

            def pair() -> None:
                got = handle.dispatch(x)
                got.tokens.mul_(2)
                handle.combine(got.tokens, CombineOutputs(out, weights))

            graph, bad = capture(pair), torch.zeros((), dtype=torch.int64, device="cuda")
            for step in range(1000):
                for static, new in zip((x, ids, weights, want), pool[step * 8 % 21], strict=True):
                    static.copy_(new)
                out.fill_(7)
                comm.together(graph.replay)
                bad += differing(out, want)
            group.check()
            return int(bad)

    with LocalWorld(RANKS, "nccl") as world:
        assert world.run(program) == [0] * RANKS


@pytest.mark.parametrize("slots", [1, 2])
def test_captures_of_several_token_counts_in_any_order(slots: int) -> None:
    """Two handles (with two slots: two dispatches at once), three token counts each, eager calls in between."""
    def program(comm: object) -> int:
        with Group.create(comm, config(num_slots=slots)) as group:
            handles = [group.create_handle(Layout.EXPERT_MAJOR, num_topk=TOPK) for _ in range(2)]
            bad, graphs, wanted = torch.zeros((), dtype=torch.int64, device="cuda"), [], []   # what only the test needs, the test keeps
            for tokens in (1, 3, MOST, 0):
                for handle in handles:
                    x, ids, weights, want = on_gpu(inputs(comm.rank, tokens, tokens))
                    wanted.append(want)

                    def pair(handle=handle, x=x, ids=ids, weights=weights, want=want) -> None:
                        got = handle.dispatch(x, topk_idx=ids)
                        got.tokens.mul_(2)
                        bad.add_(differing(handle.combine(got.tokens, topk_weights=weights), want))

                    graphs.append(capture(pair))
            draw = random.Random(5)
            for step in range(200):
                comm.together(draw.choice(graphs).replay)
                if step % 20 == 0:
                    x, ids, weights, want = on_gpu(inputs(comm.rank, step, step % (MOST + 1)))
                    got = handles[0].dispatch(x, topk_idx=ids)
                    got.tokens.mul_(2)
                    bad += differing(handles[0].combine(got.tokens, topk_weights=weights), want)
            group.check()
            return int(bad)

    with LocalWorld(RANKS, "nccl") as world:
        assert world.run(program) == [0] * RANKS


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_python_references_dropped_before_replay(layout: Layout, plain: bool) -> None:
    """Inputs, outputs and the handle go out of scope; their memory must not be given to others while the graph needs it."""
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            def build() -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
                x, ids, weights, _ = on_gpu(inputs(comm.rank, 3))
                weights = weights.nan_to_num() if layout is Layout.RANK_MAJOR else weights
                handle = group.create_handle(layout, ids)
                out = torch.zeros(MOST, HIDDEN, dtype=torch.bfloat16, device="cuda")
                rank_major = layout is Layout.RANK_MAJOR
                given = DispatchInputs(x, weights if rank_major else None)
                shape = (RANKS, MOST, HIDDEN) if rank_major else (EXPERTS // RANKS, RANKS * MOST, HIDDEN)

                def pair() -> None:
                    made = DispatchOutputs(torch.zeros(shape, dtype=torch.bfloat16, device="cuda")) if plain else None
                    got = handle.dispatch(given, made)
                    handle.combine(got.tokens.mul_(2), CombineOutputs(out, None if rank_major else weights))

                pair()
                return capture(pair), out, out.clone()

            graph, out, want = build()
            gc.collect()
            torch.cuda.empty_cache()
            junk = [torch.full((n,), 0x5A5A5A5A, dtype=torch.int32, device="cuda") for n in (16, 24, 96, 512, 1024, 4096, 65536) for _ in range(50)]
            for _ in range(5):
                out.fill_(7)
                comm.together(graph.replay)
                assert bits_equal(out, want), first_difference(out, want)
            group.check()
            assert len(junk) and bool(out.any())

    with LocalWorld(RANKS, "nccl") as world:
        world.run(program)


def test_what_cannot_be_captured_is_refused_by_a_sentence() -> None:
    def program(comm: object) -> list[str]:
        told = []

        def refused(action: Callable[[], object]) -> None:
            with pytest.raises(EpError) as raised:
                capture(action)
            told.append(str(raised.value))

        refused(lambda: Group.create(comm, config()))
        x, ids, weights, want = on_gpu(inputs(comm.rank, 1))
        with Group.create(comm, config()) as group, Group.create(comm, config(checked=True)) as checked:
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids)
            refused(lambda: handle.dispatch(x, topk_idx=ids.int()))
            handle.update(ids)
            refused(lambda: handle.dispatch(x, config=DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4)))
            refused(lambda: group.create_handle(Layout.EXPERT_MAJOR, num_topk=2))
            refused(group.check)
            watched = checked.create_handle(Layout.EXPERT_MAJOR, ids)
            refused(lambda: watched.dispatch(x))
            got = handle.dispatch(x)
            got.tokens.mul_(2)
            out = handle.combine(got.tokens, topk_weights=weights)
            group.check()
            assert bits_equal(out, want)
        return told

    with LocalWorld(2, "nccl") as world:
        for told in world.run(program):
            assert "create the group and its handles before capturing" in told[0]
            assert all("create the handle (or call it once) with these before capturing" in t for t in told[1:4])
            assert "call it after the capture" in told[4] and "capture on a group without it" in told[5]
