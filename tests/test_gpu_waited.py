"""Waits counted on a GPU: the rank whose stream is held up is the one the others waited for, and results do not change. ``-m gpu``.

Not under MPS, where a process has two hardware queues: a rank's stream that stands still holds up another's, and both are late.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

RANKS, TOKENS, HIDDEN, ROUNDS, CYCLES = 4, 32, 1024, 10, 2_000_000


def program(comm: Any, algorithm: Algorithm, layout: Layout, count: bool) -> tuple[list[int], torch.Tensor]:
    config = GroupConfig(num_experts=16, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=4, algorithm=algorithm, max_num_sms=4,
                         timeout_ns=5_000_000_000, count_waits=count)
    ids = random_routing(comm.rank, TOKENS, 4, 16, dropped=0.1, dtype=torch.int64)
    weights, tokens = weights_like(ids, seed=comm.rank).cuda(), stamped_tokens(comm.rank, TOKENS, HIDDEN, torch.bfloat16).cuda()
    sends, weighs = (None, weights) if layout is Layout.EXPERT_MAJOR else (weights, None)
    with Group.create(comm, config) as group, group.create_handle(layout, ids.cuda()) as handle:
        for turn in range(ROUNDS + 1):
            if turn == 1 and count:   # in the first, ranks wait for each other's kernels to be loaded
                group.check()
                group.waited_ns(reset=True)
            if comm.rank == 1:
                torch.cuda._sleep(CYCLES)
            received = handle.dispatch(tokens, topk_weights=sends)
            out = handle.combine(received.tokens, topk_weights=weighs)
        group.check()
        return group.waited_ns().tolist() if count else [], out.cpu()


@pytest.mark.parametrize("algorithm, layout", [(Algorithm.LOW_LATENCY, Layout.EXPERT_MAJOR), (Algorithm.LOW_LATENCY, Layout.RANK_MAJOR),
                                               (Algorithm.HIGH_THROUGHPUT, Layout.FLAT)])
def test_the_slow_rank_is_waited_for(algorithm: Algorithm, layout: Layout) -> None:
    results = {}
    for count in (False, True):
        with LocalWorld(RANKS, "nccl") as world:
            results[count] = world.run(program, algorithm, layout, count)
    for (_, plain), (_, counted) in zip(results[False], results[True], strict=True):
        assert bits_equal(plain, counted)
    waited = [w for w, _ in results[True]]
    for rank in (0, 2, 3):
        others = [waited[rank][peer] for peer in range(RANKS) if peer not in (1, rank)]
        assert waited[rank][1] > 3 * max(others) and waited[rank][1] > ROUNDS * CYCLES / 10, waited   # 0.1 ns a cycle is faster than any GPU
        assert waited[1][rank] < waited[rank][1], waited
