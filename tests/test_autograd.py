"""Differentiable dispatch and combine on the simulator: gradients of a layer over several ranks are those of the layer in one process."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

from ncclep_py import Algorithm, EpError, EpStaleError, Group, GroupConfig, HandleConfig, Layout, LocalWorld
from ncclep_py.autograd import Received, ep_combine, ep_dispatch
from ncclep_py.testing import random_routing

EXPERTS, HIDDEN, WIDTH, TOPK = 6, 16, 24, 2


class Layer(torch.nn.Module):
    """Top-k router and experts; the same seeds on every rank and in the one process."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.router = torch.nn.Parameter(torch.randn(HIDDEN, EXPERTS, generator=g) / 4)
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH, generator=g) / 4)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN, generator=g) / 5)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.softmax(x @ self.router, -1).topk(TOPK, -1)
        return ids.contiguous(), weights / weights.sum(-1, keepdim=True)

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(rows @ self.up[e]) @ self.down[e]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In one process."""
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            out = out + self.expert(e, x) * torch.where(ids == e, weights, 0.0).sum(1, keepdim=True)
        return out

    def received(self, rank: int, local: int, layout: Layout, got: Received) -> torch.Tensor:
        """This rank's experts on what it received, weights included; rows that are not there stay zero."""
        out = torch.zeros_like(got.tokens)
        for i in range(local):
            if layout is Layout.FLAT:
                scale = torch.where(got.topk_idx == i, got.topk_weights, 0.0).sum(1, keepdim=True)
            else:
                begin, size = int(got.layout_info.expert_offsets[i]), int(got.layout_info.expert_counters[i])
                row = torch.arange(len(out))
                scale = torch.where((row >= begin) & (row < begin + size), got.topk_weights, 0.0)[:, None]
            out = out + self.expert(rank * local + i, got.tokens) * scale
        return out


def inputs(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(tokens, HIDDEN, generator=g), torch.randn(tokens, HIDDEN, generator=g)


def steps(layout: Layout, counts: list[int], budget: int, slots: int, checkpoint: bool = False, count: int = 3) -> None:
    """Train a few steps over ranks and in one process; losses, gradients and parameters must agree."""
    ranks, local = len(counts), EXPERTS // len(counts)
    cfg = GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=8, hidden=HIDDEN, dtype=torch.float32, num_topk=TOPK, num_slots=slots,
                      algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=budget)

    def program(comm: Any) -> list[Any]:
        r, layer, told = comm.rank, Layer(), []
        x, want = inputs(r, counts[r])
        x.requires_grad_()
        made = HandleConfig(dispatch_output_per_expert_alignment=4)
        with Group.create(comm, cfg) as group, group.create_handle(layout, num_topk=TOPK, config=made) as handle:
            for _ in range(count):
                layer.zero_grad()
                x.grad = None
                ids, weights = layer.route(x)
                handle.update(ids)

                def moe(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                    rows = None if budget else int(handle.layout_info.recv_total_counter[0])
                    got = ep_dispatch(handle, x, weights, num_rows=rows)
                    return ep_combine(handle, layer.received(r, local, layout, got))

                if checkpoint:
                    from torch.utils.checkpoint import checkpoint as recompute

                    out = recompute(moe, x, weights, use_reentrant=False)
                else:
                    out = moe(x, weights)
                loss = ((out - want) ** 2).sum()
                loss.backward()
                grads = [comm.exchange(p.grad.flatten().tolist()) for p in layer.parameters()]   # every rank holds a part
                for p, parts in zip(layer.parameters(), grads, strict=True):
                    p.grad = torch.tensor(parts).sum(0).view(p.shape)
                    with torch.no_grad():
                        p -= 0.01 * p.grad
                told.append((sum(comm.exchange(float(loss))), x.grad.clone(), [p.grad.clone() for p in layer.parameters()]))
            group.check()
        return told

    with LocalWorld(ranks, "sim", threads=True) as world:
        results = world.run(program)
    layer = Layer()
    pairs = [inputs(r, n) for r, n in enumerate(counts)]
    x, want = torch.cat([p[0] for p in pairs]).requires_grad_(), torch.cat([p[1] for p in pairs])
    for i in range(count):
        layer.zero_grad()
        x.grad = None
        loss = ((layer(x) - want) ** 2).sum()
        loss.backward()
        for told in (r[i] for r in results):
            assert told[0] == pytest.approx(float(loss), rel=1e-5)
            for got, p in zip(told[2], layer.parameters(), strict=True):
                torch.testing.assert_close(got, p.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([r[i][1] for r in results]), x.grad, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for p in layer.parameters():
                p -= 0.01 * p.grad
    assert results[0][-1][0] < results[0][0][0]


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.EXPERT_MAJOR])
@pytest.mark.parametrize("counts, budget, slots", [([8, 5, 3], 64, 1), ([8, 5, 3], 64, 2), ([4, 0], 40, 1), ([6, 8, 1], 0, 2)], ids=str)
def test_training_steps_agree_with_one_process(counts: list[int], budget: int, slots: int, layout: Layout) -> None:
    steps(layout, counts, budget, slots)


def test_activation_checkpointing() -> None:
    steps(Layout.FLAT, [8, 5, 3], 64, 2, checkpoint=True)


def small(comm: Any, **more: Any) -> Group:
    return Group.create(comm, GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=8, hidden=16, dtype=torch.float32, num_topk=TOPK,
                                          algorithm=Algorithm.HIGH_THROUGHPUT, **more))


def test_an_update_between_forward_and_backward_is_an_error_on_every_rank() -> None:
    def program(comm: Any) -> None:
        with small(comm, max_recv_tokens_per_rank=32) as group:
            ids = random_routing(comm.rank, 4, TOPK, 4)
            handle = group.create_handle(Layout.FLAT, ids)
            x = torch.randn(4, 16, requires_grad=True)
            out = ep_combine(handle, ep_dispatch(handle, x, torch.rand(4, TOPK)).tokens)
            handle.update(ids)
            with pytest.raises(EpStaleError, match="updated between forward and backward"):
                out.sum().backward()
            out = ep_combine(handle, ep_dispatch(handle, x, torch.rand(4, TOPK)).tokens)
            out.sum().backward()
            hits = torch.tensor([len(set(row)) for row in (ids // 2).tolist()])
            assert torch.equal(x.grad, hits[:, None].expand(4, 16).float())

    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


def test_saved_rows_are_not_overwritten_by_the_next_dispatch() -> None:
    """What an expert saves for backward is a copy: a later dispatch into the same slot changes no gradient."""
    def program(comm: Any) -> None:
        with small(comm, max_recv_tokens_per_rank=32) as group:
            ids = random_routing(comm.rank, 4, TOPK, 4)
            a, b = group.create_handle(Layout.FLAT, ids), group.create_handle(Layout.FLAT, ids)
            grads = []
            for disturbed in (False, True):
                x = torch.full((4, 16), 1.0 + comm.rank, requires_grad=True)
                rows = ep_dispatch(a, x, torch.rand(4, TOPK)).tokens
                out = ep_combine(a, rows * rows)
                if disturbed:
                    b.combine(b.dispatch(torch.full((4, 16), 99.0), topk_weights=torch.rand(4, TOPK)).tokens)
                out.sum().backward()
                grads.append(x.grad)
            assert torch.equal(*grads) and float(grads[0].abs().sum()) > 0

    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


@pytest.mark.parametrize("part", ["dispatch", "combine"])
def test_without_threads_gradients_are_refused_and_plain_passes_are_not(part: str) -> None:
    """Backward passes of ranks that share a thread wait for each other for ever; operators abort the process."""
    from ncclep_py import compiled_ops

    def program(comm: Any) -> tuple[list[str], bool]:
        config = GroupConfig(num_experts=6, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=TOPK, algorithm=Algorithm.HIGH_THROUGHPUT,
                             dtype=torch.float32, max_recv_tokens_per_rank=16)
        told, weights = [], torch.ones(4, TOPK)
        with Group.create(comm, config) as group, group.create_handle(Layout.FLAT, random_routing(comm.rank, 4, TOPK, 6)) as handle:
            plain = ep_combine(handle, ep_dispatch(handle, torch.ones(4, 16), weights).tokens)
            try:
                if part == "dispatch":
                    ep_dispatch(handle, torch.ones(4, 16, requires_grad=True), weights)
                else:
                    ep_combine(handle, ep_dispatch(handle, torch.ones(4, 16), weights).tokens.requires_grad_())
            except EpError as e:
                told.append(str(e))
            with pytest.raises(EpError, match=r"operators .* threads=True"):
                compiled_ops.key_of(handle)
            with torch.no_grad():
                again = ep_combine(handle, ep_dispatch(handle, torch.ones(4, 16, requires_grad=True), weights).tokens)
        return told, torch.equal(plain, again)

    with LocalWorld(3, "sim") as world:
        for told, same in world.run(program):
            assert same and len(told) == 1 and "LocalWorld(..., threads=True)" in told[0]


def test_auto_budgets_need_the_number_of_rows() -> None:
    def program(comm: Any) -> None:
        with small(comm) as group:
            handle = group.create_handle(Layout.FLAT, random_routing(comm.rank, 4, TOPK, 4))
            with pytest.raises(ValueError, match="num_rows must be given"):
                ep_dispatch(handle, torch.zeros(4, 16), torch.zeros(4, TOPK))

    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


def test_programs_in_threads_end_with_their_errors() -> None:
    def program(comm: Any) -> int:
        comm.exchange(1)
        if comm.rank == 1:
            raise KeyError("mine")
        comm.exchange(2)
        return 0

    with LocalWorld(3, "sim", threads=True) as world:
        with pytest.raises(KeyError, match="mine"):
            world.run(program)
        assert world.run(lambda comm: comm.exchange(comm.rank)) == [[0, 1, 2]] * 3
        with pytest.raises(RuntimeError, match="must be called inside"):
            world.communicators[0].exchange(1)


def layers(comm: Any, block: str, slots: int, ids_dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Gradient of the input of three layers; `block` is checkpointed: nothing, a layer, its update, too (one handle), or only its dispatch."""
    from torch.utils.checkpoint import checkpoint

    with small(comm, max_recv_tokens_per_rank=16, num_slots=slots) as group:
        handles = [group.create_handle(Layout.FLAT, num_topk=TOPK, idx_dtype=ids_dtype) for _ in range(3)]
        routings = [random_routing(comm.rank, 4, TOPK, 4, seed=seed).to(ids_dtype) for seed in range(3)]
        x = start = torch.linspace(0.1, 1.0 + comm.rank, 64).view(4, 16).requires_grad_()
        for handle, ids in zip(handles, routings, strict=True):
            inside, used = block == "update", handles[0] if block == "update" else handle
            if not inside:
                used.update(ids)

            def rows(x: torch.Tensor, used: Any = used, ids: torch.Tensor = ids, inside: bool = inside) -> torch.Tensor:
                if inside:
                    used.update(ids)
                return torch.sin(ep_dispatch(used, x, torch.ones(4, TOPK)).tokens)

            def layer(x: torch.Tensor, used: Any = used, rows: Any = rows) -> torch.Tensor:
                return ep_combine(used, rows(x))

            if block == "dispatch":
                x = ep_combine(used, checkpoint(rows, x, use_reentrant=False))
            else:
                x = checkpoint(layer, x, use_reentrant=False) if block != "nothing" else layer(x)
        loss = (x ** 2).sum()
        loss.backward(retain_graph=True)
        first = start.grad.clone()
        start.grad = None
        loss.backward()
        group.check()
        assert torch.equal(first, start.grad)
        return first


@pytest.mark.parametrize("block, slots", [("layer", 1), ("layer", 2), ("update", 1), ("dispatch", 2)])
def test_checkpointed_layers(block: str, slots: int) -> None:
    def program(comm: Any) -> None:
        want = layers(comm, "nothing", 2, torch.int32)
        assert torch.equal(layers(comm, block, slots), want) and float(want.abs().sum()) > 0

    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


def test_a_checkpointed_dispatch_without_its_combine_needs_two_slots() -> None:
    def program(comm: Any) -> None:
        with pytest.raises(EpError, match=r"num_slots.*same block"):
            layers(comm, "dispatch", 1)

    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


@pytest.mark.parametrize("how", ["functions", "operators"])
def test_an_update_outside_a_checkpointed_block_must_stay_the_newest(how: str) -> None:
    from torch.utils.checkpoint import checkpoint

    from ncclep_py import compiled_ops as ops

    def program(comm: Any) -> None:
        with small(comm, max_recv_tokens_per_rank=16, num_slots=2) as group:
            handle = group.create_handle(Layout.FLAT, random_routing(comm.rank, 4, TOPK, 4))

            def block(x: torch.Tensor) -> torch.Tensor:
                if how == "functions":
                    return torch.cos(ep_combine(handle, torch.sin(ep_dispatch(handle, x, torch.ones(4, TOPK)).tokens)))
                key = ops.key_of(handle)
                got, _, _, stamp, order = ops.dispatch(key, 16, False, x, torch.ones(4, TOPK), ops.new_order(x.device))
                return torch.cos(ops.combine(key, torch.sin(got), order, stamp, 4)[0])

            x = torch.ones(4, 16, requires_grad=True)
            out = checkpoint(block, x, use_reentrant=False)
            handle.update(random_routing(comm.rank, 4, TOPK, 4, seed=7))
            with pytest.raises(EpStaleError, match="updated between forward and backward"):
                out.sum().backward()

    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


def test_second_derivatives_are_refused() -> None:
    def program(comm: Any) -> None:
        with small(comm, max_recv_tokens_per_rank=16) as group:
            handle = group.create_handle(Layout.FLAT, random_routing(comm.rank, 4, TOPK, 4))
            x = torch.ones(4, 16, requires_grad=True)
            out = ep_combine(handle, ep_dispatch(handle, x, torch.ones(4, TOPK)).tokens ** 3)
            first, = torch.autograd.grad(out.sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="differentiate twice"):
                (first ** 2).sum().backward()

    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


def test_layers_whose_inputs_need_no_gradients_do_not_run_out_of_slots() -> None:
    def program(comm: Any) -> None:
        with small(comm, max_recv_tokens_per_rank=16, num_slots=2) as group:
            handles = [group.create_handle(Layout.FLAT, random_routing(comm.rank, 4, TOPK, 4, seed=seed)) for seed in range(3)]
            scale = torch.ones(16, requires_grad=True)
            for _ in range(2):
                outs = [ep_combine(h, ep_dispatch(h, torch.ones(4, 16), torch.ones(4, TOPK)).tokens * scale) for h in handles]
                torch.stack(outs).sum().backward()
            group.check()
            assert float(scale.grad.sum()) > 0

    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


def test_a_dispatch_takes_a_free_slot_and_else_the_one_that_waits_longest() -> None:
    def program(comm: Any) -> None:
        with small(comm, max_recv_tokens_per_rank=16, num_slots=2) as group:
            a, b, c = (group.create_handle(Layout.FLAT, random_routing(comm.rank, 4, TOPK, 4)) for _ in range(3))

            def rows(handle: Any) -> torch.Tensor:
                return ep_dispatch(handle, torch.ones(4, 16, requires_grad=True), torch.ones(4, TOPK)).tokens

            waits, out = rows(b), ep_combine(a, rows(a))
            out.sum().backward()   # in the slot of its own that was combined
            ep_combine(b, waits)
            _, older, _ = rows(a), rows(b), rows(a)
            ep_combine(c, rows(c))
            ep_combine(a, rows(a))
            with pytest.raises(EpError, match="went to another dispatch"):
                ep_combine(b, older)

    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


# ---- operators, for torch.compile ------------------------------------------------------------------------------------------------
NEEDS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))),
                                    reason="torch's inductor compiles for the CPU with a C++ compiler")


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.EXPERT_MAJOR])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)])
def test_operators_give_the_gradients_of_the_functions(backend: str | None, layout: Layout) -> None:
    """Two layers in a row through the operators, plain and compiled, against `ep_dispatch` and `ep_combine`; new routings without recompiling."""
    from ncclep_py import compiled_ops as ops

    def program(comm: Any) -> None:
        r, tokens, rows = comm.rank, 4, 16
        with small(comm, max_recv_tokens_per_rank=rows, num_slots=2) as group:
            handles = [group.create_handle(layout, num_topk=TOPK) for _ in range(2)]
            keys = [ops.key_of(h) for h in handles]

            def through_operators(x: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
                for key in keys:
                    got, scale, _, stamp, order = ops.dispatch(key, rows, False, x, weights, order)
                    scale = scale.sum(1, keepdim=True) if scale.ndim == 2 else scale[:, None]
                    x, order = ops.combine(key, torch.sin(got) * scale, order, stamp, x.shape[0])
                return x

            def plain(x: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
                for handle in handles:
                    got = ep_dispatch(handle, x, weights)
                    scale = got.topk_weights.sum(1, keepdim=True) if layout is Layout.FLAT else got.topk_weights[:, None]
                    x = ep_combine(handle, torch.sin(got.tokens) * scale)
                return x

            run = torch.compile(through_operators, backend=backend, fullgraph=True) if backend else through_operators
            for seed in range(3):
                for handle in handles:
                    handle.update(random_routing(r, tokens, TOPK, 4, seed=seed))
                g = torch.Generator().manual_seed(10 * seed + r)
                x, weights = torch.randn(tokens, 16, generator=g), torch.rand(tokens, TOPK, generator=g)
                results = []
                for f in (plain, run):
                    a, b = x.clone().requires_grad_(), weights.clone().requires_grad_()
                    out = f(a, b, ops.new_order(x.device))
                    (out ** 2).sum().backward()
                    results.append((out.detach(), a.grad, b.grad))
                for got, want in zip(*results, strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            group.check()

    torch._dynamo.reset()
    with LocalWorld(2, "sim", threads=True) as world:
        world.run(program)


def test_operators_pass_torchs_own_checks_of_fakes() -> None:
    from ncclep_py import compiled_ops as ops

    def program(comm: Any) -> None:
        with small(comm, max_recv_tokens_per_rank=16) as group:
            handle = group.create_handle(Layout.FLAT, random_routing(comm.rank, 4, TOPK, 4))
            args = (ops.key_of(handle), 16, False, torch.randn(4, 16), torch.rand(4, TOPK), torch.zeros(()))
            torch.library.opcheck(ops.dispatch, args, test_utils=("test_schema", "test_faketensor"))

    with LocalWorld(1, "sim", threads=True) as world:
        world.run(program)
