"""Training over ranks that share a GPU: the loss curve of the example is that of one process, and gradients are those of plain torch. ``-m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_train_moe import example  # noqa: F401  (fixture)

from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld
from ncclep_py import compiled_ops as ops
from ncclep_py.autograd import ep_combine, ep_dispatch
from ncclep_py.demo import TEXT
from ncclep_py.testing import random_routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_loss_curve_is_that_of_one_process(example: Any, ranks: int) -> None:  # noqa: F811
    job = example.Job(ranks, 40, 32, 64, 8, 2, 5e-3, 1)
    text, characters = example.encode(TEXT)
    with LocalWorld(ranks, "nccl", threads=True) as world:
        curves = world.run(example.train_rank, job, text, characters)
    assert all(curve == curves[0] for curve in curves)
    assert curves[0] == pytest.approx(example.train_alone(job, text, characters), rel=1e-3)
    assert sum(curves[0][-3:]) < 0.9 * sum(curves[0][:3])


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.EXPERT_MAJOR])
@pytest.mark.parametrize("how", ["functions", "operators", "aot_eager", "inductor"])
def test_gradients(how: str, layout: Layout) -> None:
    """Experts square their rows and take the weight: every gradient is known."""
    ranks, tokens, experts, topk, hidden = 4, 33, 12, 3, 264
    config = GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=tokens, hidden=hidden, dtype=torch.float32, num_topk=topk, num_slots=2,
                         algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=ranks * tokens * topk, max_num_sms=8, timeout_ns=5_000_000_000)

    def program(comm: Any) -> None:
        with Group.create(comm, config) as group:
            handle = group.create_handle(layout, num_topk=topk)
            key, rows = ops.key_of(handle), config.max_recv_tokens_per_rank

            def summed(weights: torch.Tensor) -> torch.Tensor:
                return weights.sum(1, keepdim=True) if layout is Layout.FLAT else weights[:, None]

            def through_operators(x: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
                got, scale, _, stamp, order = ops.dispatch(key, rows, False, x, weights, order)
                return ops.combine(key, got * got * summed(scale), order, stamp, tokens)[0]

            def through_functions(x: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
                got = ep_dispatch(handle, x, weights)
                return ep_combine(handle, got.tokens * got.tokens * summed(got.topk_weights))

            run = {"functions": through_functions, "operators": through_operators}.get(how)
            run = run or torch.compile(through_operators, backend=how, fullgraph=True)
            for seed in range(3):
                ids = random_routing(comm.rank, tokens, topk, experts, seed=seed, dropped=0.1).cuda()
                handle.update(ids)
                x = torch.randn(tokens, hidden, device="cuda", requires_grad=True)
                weights = torch.rand(tokens, topk, device="cuda", requires_grad=True)
                out = run(x, weights, ops.new_order(x.device))
                gradient = torch.randn_like(out)
                out.backward(gradient)
                total = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True).detach()
                torch.testing.assert_close(out.detach(), x.detach() ** 2 * total, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(x.grad, 2 * x.detach() * total * gradient, rtol=1e-4, atol=1e-5)
                each = (x.detach() ** 2 * gradient).sum(1, keepdim=True).expand(tokens, topk)
                torch.testing.assert_close(weights.grad, torch.where(ids >= 0, each, 0.0), rtol=1e-3, atol=1e-2)
            group.check()

    torch._dynamo.reset()
    with LocalWorld(ranks, "nccl", threads=True) as world:
        world.run(program)
