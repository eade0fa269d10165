"""One grid for all ranks on a GPU: the same bits as a grid per rank, and what cannot be fused works beside it. ``-m gpu``."""

from __future__ import annotations

import pytest
import torch
from test_gpu_ll import compare, config

from ncclep_py import Algorithm, EpRefusedError, Group, GroupConfig, Layout, LocalWorld
from ncclep_py import reference as ref
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture
def world():
    with LocalWorld(4, backend="nccl", fused=True) as world:
        yield world


def test_low_latency(world):
    compare(world, config(16, 16, 256, 2), [16, 3, 0, 9], rounds=3)
    assert world.fused.count >= 7   # three pairs, and the rendezvous of close()


def test_high_throughput(world):
    counts, experts, topk, hidden = [40, 3, 0, 64], 16, 2, 256
    ids = [random_routing(r, n, topk, experts, dropped=0.1) for r, n in enumerate(counts)]
    tokens = [stamped_tokens(r, n, hidden, torch.bfloat16) for r, n in enumerate(counts)]
    weights = [weights_like(i, seed=r) for r, i in enumerate(ids)]
    cfg = GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=64, hidden=hidden, num_topk=topk, max_num_sms=8, timeout_ns=5 * 10**9,
                      algorithm=Algorithm.HIGH_THROUGHPUT)

    def program(comm: object) -> torch.Tensor:
        r = comm.rank
        with Group.create(comm, cfg) as group, group.create_handle(Layout.EXPERT_MAJOR, ids[r].cuda()) as handle:
            got = handle.dispatch(tokens[r].cuda(), topk_weights=weights[r].cuda())
            got.tokens.mul_(2)
            out = handle.combine(got.tokens)
            group.check()
            return out.cpu()

    before = world.fused.count
    outs = world.run(program)
    assert world.fused.count > before + 2
    for r, out in enumerate(outs):
        ones = torch.where(ids[r] >= 0, 1.0, 0.0)
        assert bits_equal(out, ref.moe_layer(tokens[r], ids[r], ones, [lambda rows: rows * 2] * experts))


def test_a_call_refused_on_one_rank_only_is_refused_on_all(world):
    def program(comm: object) -> str:
        with Group.create(comm, config(16, 16, 256, 2)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2)
            x = torch.zeros(4, 256 if comm.rank != 2 else 128, dtype=torch.bfloat16, device="cuda")
            ids = torch.zeros(4, 2, dtype=torch.int64, device="cuda")
            with pytest.raises((ValueError, EpRefusedError)) as told:
                handle.dispatch(x, topk_idx=ids)
                group.check()
            return type(told.value).__name__

    assert world.run(program) == ["EpRefusedError", "EpRefusedError", "ValueError", "EpRefusedError"]
