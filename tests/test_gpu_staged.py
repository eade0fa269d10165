"""Staged operations on a GPU: the bits of the fused ones, work between the halves, and graphs of halves. ``-m gpu``."""

from __future__ import annotations

import time

import pytest
import torch

from ncclep_py import CombineConfig, DispatchConfig, DispatchInputs, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SEND, PUSH = DispatchConfig(send_only=True), CombineConfig(send_only=True)
LAYOUTS = pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])


def config(experts: int, tokens: int, hidden: int, topk: int, **more: object) -> GroupConfig:
    more = {"max_num_sms": 8, "timeout_ns": 5_000_000_000, "num_slots": 2, "num_staging_slots": 4} | more
    return GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, **more)


class Batch:
    """Inputs of one rank, and its calls, fused or staged."""

    def __init__(self, group: Group, layout: Layout, tokens: int, seed: int) -> None:
        c = group.config
        ids = random_routing(group.rank, tokens, c.num_topk, c.num_experts, seed=seed, dropped=0.1)
        self.rank_major = layout is Layout.RANK_MAJOR
        weights = weights_like(ids, seed=seed + group.rank)
        self.weights = (weights.nan_to_num() if self.rank_major else weights).cuda()
        self.x = stamped_tokens(group.rank, tokens, c.hidden, c.token_type.torch_dtype(), seed=seed).cuda()
        self.handle = group.create_handle(layout, ids.cuda())

    def dispatch(self, how: DispatchConfig | None = None) -> object:
        return self.handle.dispatch(DispatchInputs(self.x, self.weights if self.rank_major else None), config=how)

    def combine(self, rows: torch.Tensor, how: CombineConfig | None = None) -> torch.Tensor:
        return self.handle.combine(rows, config=how, topk_weights=None if self.rank_major else self.weights)

    def fused(self) -> torch.Tensor:
        got = self.dispatch()
        experts(got.tokens)
        return self.combine(got.tokens).clone()


def experts(rows: torch.Tensor) -> None:
    rows.mul_((torch.arange(len(rows), device="cuda") % 3 + 1).to(rows.dtype).view(-1, 1, 1))


@LAYOUTS
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_same_bits_as_fused(ranks: int, layout: Layout) -> None:
    def program(comm: object) -> None:
        cases = [config(ranks * 3, 17, 520, min(3, ranks * 3)), config(ranks, 4, 8, 1), config(ranks * 4, 16, 64, 4, dtype=torch.float32)]
        for n, c in enumerate([*cases, config(128, 128, 7168, 8, max_num_sms=16)] if ranks == 8 else cases):
            with Group.create(comm, c) as group:
                batch = Batch(group, layout, (5 * comm.rank + 3) % (c.max_dispatch_tokens_per_rank + 1), n)
                want = batch.fused()
                for _ in range(6):   # through all staging slots and back
                    got = batch.dispatch(SEND)
                    batch.handle.complete()
                    experts(got.tokens)
                    out = batch.combine(got.tokens, PUSH)
                    batch.handle.complete()
                    group.check()
                    assert bits_equal(out, want), first_difference(out, want)

    with LocalWorld(ranks, "nccl") as world:
        world.run(program)


@LAYOUTS
@pytest.mark.parametrize("sms", [1, 8])
def test_two_micro_batches_in_flight(layout: Layout, sms: int) -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config(16, 32, 1024, 4, max_num_sms=sms)) as group:
            a, b = (Batch(group, layout, 32 - comm.rank, seed) for seed in (1, 2))
            want = [batch.fused() for batch in (a, b)]
            for _ in range(50):
                rows = [batch.dispatch(SEND).tokens for batch in (a, b)]
                for batch, received in zip((a, b), rows, strict=True):
                    batch.handle.complete()
                    experts(received)
                outs = [batch.combine(received, PUSH) for batch, received in zip((a, b), rows, strict=True)]
                for batch in (a, b):
                    batch.handle.complete()
                assert all(bits_equal(out, w) for out, w in zip(outs, want, strict=True))
            group.check()

    with LocalWorld(4, "nccl") as world:
        world.run(program)


def test_send_half_of_combine_waits_for_nobody() -> None:
    """Rank 1 is a second late with its send half; rank 0 pushes its rows, runs another kernel and is done long before."""
    def program(comm: object) -> float:
        with Group.create(comm, config(6, 8, 1024, 2)) as group:
            batch = Batch(group, Layout.EXPERT_MAJOR, 8, 0)
            want = batch.fused()
            ones, work = torch.ones(512, 512, device="cuda"), torch.zeros(512, 512, device="cuda")
            torch.matmul(ones, ones, out=work)   # so that nothing is allocated or loaded below
            batch.combine(batch.dispatch().tokens, PUSH)
            batch.handle.complete()
            got = batch.dispatch()
            experts(got.tokens)
            group.check()
            comm.barrier()
            if comm.rank == 1:
                torch.cuda._sleep(2_000_000_000)
            out = batch.combine(got.tokens, PUSH)
            torch.matmul(ones, ones, out=work)
            started = time.perf_counter()
            torch.cuda.current_stream().synchronize()
            seconds = time.perf_counter() - started
            batch.handle.complete()
            group.check()
            assert bits_equal(out, want) and float(work[0, 0]) == 512
            return seconds

    with LocalWorld(3, "nccl") as world:
        seconds = world.run(program)
    assert seconds[0] < 0.2 and seconds[1] > 0.4, seconds   # _sleep counts cycles: about a second


@LAYOUTS
def test_graphs_of_halves(layout: Layout) -> None:
    """One graph per half; another kernel between them; replays with new tokens."""
    def program(comm: object) -> None:
        with Group.create(comm, config(16, 16, 512, 4, num_slots=1, num_staging_slots=1)) as group:
            batch = Batch(group, layout, 16, 0)
            want = batch.fused()
            scale = torch.ones((), device="cuda", dtype=torch.bfloat16)
            base = batch.x.clone()
            graphs, kept = [], {}

            def capture(action: object) -> None:
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1], stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                    action()

            capture(lambda: (batch.x.copy_(base * scale), kept.update(got=batch.dispatch(SEND))))
            capture(lambda: (batch.handle.complete(), experts(kept["got"].tokens), kept.update(out=batch.combine(kept["got"].tokens, PUSH))))
            capture(batch.handle.complete)
            for step in range(40):
                scale.fill_(2.0 ** (step % 5))
                for graph in graphs:
                    comm.together(graph.replay)
                    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
                assert bits_equal(kept["out"], want * scale), first_difference(kept["out"], want * scale)
            group.check()

    with LocalWorld(4, "nccl") as world:
        world.run(program)
