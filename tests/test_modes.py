"""The same user code in LOW_LATENCY and HIGH_THROUGHPUT gives the same answer (surprising elsewhere: DeepEP issue 112)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.testing import random_routing, stamped_tokens, weights_like

RANKS, EXPERTS, TOKENS = 4, 8, 6
LOCAL = EXPERTS // RANKS


def config(algorithm: Algorithm) -> GroupConfig:
    return GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS, hidden=32, num_topk=3, dtype=torch.float32, algorithm=algorithm,
                       max_recv_tokens_per_rank=RANKS * TOKENS * 3 if algorithm is Algorithm.HIGH_THROUGHPUT else 0)


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = random_routing(rank, TOKENS - rank, 3, EXPERTS, dropped=0.2)
    return stamped_tokens(rank, TOKENS - rank, 32, torch.float32) / 64, ids, weights_like(ids)


def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rows) * (number + 1)


def one_row_per_rank(comm: Any, handle: Any) -> torch.Tensor:
    """RANK_MAJOR and FLAT: the caller adds up its experts' outputs, each times its weight."""
    x, ids, weights = given(comm.rank)
    handle.update(ids)
    received = handle.dispatch(x, topk_weights=weights)
    out = torch.zeros_like(received.tokens)
    for local in range(LOCAL):
        weight = torch.where(received.topk_idx == local, received.topk_weights, 0.0).sum(-1, keepdim=True)
        out += weight * expert(comm.rank * LOCAL + local, received.tokens)
    return handle.combine(out)


@pytest.mark.parametrize("team", [None, 2])
@pytest.mark.parametrize("algorithm, layout", [(Algorithm.LOW_LATENCY, Layout.RANK_MAJOR), (Algorithm.HIGH_THROUGHPUT, Layout.FLAT)])
def test_one_program_in_both_modes(algorithm: Algorithm, layout: Layout, team: int | None) -> None:
    def program(comm: Any) -> torch.Tensor:
        with Group.create(comm, config(algorithm)) as group, group.create_handle(layout, num_topk=3) as handle:
            out = one_row_per_rank(comm, handle)
            group.check()
            return out.clone()

    with LocalWorld(RANKS, "sim", team_size=team) as world:
        results = world.run(program)
    for rank, out in enumerate(results):
        x, ids, weights = given(rank)
        want = sum(torch.where(ids == e, weights, 0.0).sum(1, keepdim=True) * expert(e, x) for e in range(EXPERTS))
        assert out.shape == x.shape and torch.allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.EXPERT_MAJOR])
def test_weights_given_to_a_combine_that_does_not_apply_them_are_refused(layout: Layout) -> None:
    """In HT the caller applies them. (LL RANK_MAJOR, where the caller does, too, ignores them, as ``nccl.ep`` does.)"""
    def program(comm: Any) -> None:
        x, ids, weights = given(comm.rank)
        with Group.create(comm, config(Algorithm.HIGH_THROUGHPUT)) as group, group.create_handle(layout, ids) as handle:
            received = handle.dispatch(x, topk_weights=weights)
            with pytest.raises(ValueError, match="topk_weights"):
                handle.combine(received.tokens, topk_weights=weights)
            handle.combine(received.tokens)
            group.check()

    with LocalWorld(RANKS, "sim") as world:
        world.run(program)


def test_weights_are_asked_for_where_combine_applies_them() -> None:
    def program(comm: Any) -> None:
        x, ids, weights = given(comm.rank)
        with Group.create(comm, config(Algorithm.LOW_LATENCY)) as group, group.create_handle(Layout.EXPERT_MAJOR, ids) as handle:
            received = handle.dispatch(x)
            with pytest.raises(ValueError, match="topk_weights must be given to an EXPERT_MAJOR combine"):
                handle.combine(received.tokens)
            handle.combine(received.tokens, topk_weights=weights)
            group.check()

    with LocalWorld(RANKS, "sim") as world:
        world.run(program)
