"""Stamps on a GPU: the events of real kernels have the order the protocol demands, and results do not change. ``-m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.kernels.stamps import Step
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like
from ncclep_py.timeline import Event, operations, waits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

RANKS, TOKENS, HIDDEN, ROUNDS = 4, 32, 1024, 20


def program(comm: Any, algorithm: Algorithm, trace: bool) -> tuple[list[Event], torch.Tensor, int]:
    more = {"max_recv_tokens_per_rank": RANKS * TOKENS} if algorithm is Algorithm.HIGH_THROUGHPUT else {}
    config = GroupConfig(num_experts=16, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=4, algorithm=algorithm, max_num_sms=4,
                         timeout_ns=5_000_000_000, trace=trace, **more)
    ids = random_routing(comm.rank, TOKENS, 4, 16, dropped=0.1, dtype=torch.int64)
    weights, tokens = weights_like(ids, seed=comm.rank).cuda(), stamped_tokens(comm.rank, TOKENS, HIDDEN, torch.bfloat16).cuda()
    with Group.create(comm, config) as group:
        layout = Layout.FLAT if more else Layout.EXPERT_MAJOR
        with group.create_handle(layout, ids.cuda()) as handle:
            for _ in range(ROUNDS):
                received = handle.dispatch(tokens, topk_weights=weights) if more else handle.dispatch(tokens)
                out = handle.combine(received.tokens) if more else handle.combine(received.tokens, topk_weights=weights)
        group.check()
        events = group.timeline() if trace else []
        return events, out.cpu(), torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize("algorithm", Algorithm)
def test_timeline_of_real_kernels(algorithm: Algorithm) -> None:
    if algorithm not in (Algorithm.LOW_LATENCY, Algorithm.HIGH_THROUGHPUT):
        pytest.skip("no algorithm of its own")
    results = {}
    for trace in (False, True):
        with LocalWorld(RANKS, "nccl") as world:
            results[trace] = world.run(program, algorithm, trace)
    for (_, plain, _), (_, traced, _) in zip(results[False], results[True], strict=True):
        assert bits_equal(plain, traced)
    events = [e for mine, _, _ in results[True] for e in mine]
    dispatch, combine = ("ht_dispatch", "ht_combine") if algorithm is Algorithm.HIGH_THROUGHPUT else ("ll_dispatch", "ll_combine")
    for rank, ops in operations(events).items():
        names = [op.kernel for op in ops]
        assert names.count(dispatch) == ROUNDS and names.count(combine) >= ROUNDS and 0 <= rank < RANKS
        for a, b in zip(ops, ops[1:], strict=False):
            assert a.end_ns <= b.begin_ns + 2000   # the timer's resolution
        for op in ops:
            assert {e.block for e in op.events} == set(range(4)) and op.end_ns - op.begin_ns < 10**9
            assert all(0 <= e.multiprocessor < results[True][0][2] for e in op.events)
    assert any(w.event.phase == "wait for ARRIVED" for w in waits(events))
    both = [[op for op in ops if op.of(Step.WAIT_HEADS)] for ops in operations(events).values()]
    for together in zip(*both, strict=True):   # nobody is past its wait for HEADs before everybody has entered
        entered = max(min(e.begin_ns for e in op.of(Step.HEAD)) for op in together)
        assert all(e.end_ns + 2000 >= entered for op in together for e in op.of(Step.WAIT_HEADS))
