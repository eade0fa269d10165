"""What a program writes between two operations is known to the race checker, so that a kernel of the user's own that reads too early is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_mutations import mutant

from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.kernels.ht_combine import make_ht_combine
from ncclep_py.kernels.ht_dispatch import make_ht_dispatch
from ncclep_py.kernels.ll_combine import make_ll_combine
from ncclep_py.kernels.ll_dispatch import make_ll_dispatch
from ncclep_py.simulator.errors import RaceError
from ncclep_py.testing import random_routing, weights_like

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 3, 4, 16, 6, 2


def program(comm: Any, layout: Layout, name: str = "", factory: Callable[..., Any] | None = None, plain: bool = False) -> int:
    """Twice a dispatch, experts in place and a combine; how many rows were received in all."""
    high = layout is Layout.FLAT
    config = GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK,
                         algorithm=Algorithm.HIGH_THROUGHPUT if high else Algorithm.LOW_LATENCY, max_recv_tokens_per_rank=16 if high else 0)
    ids = random_routing(comm.rank, TOKENS, TOPK, EXPERTS, seed=1)
    weights, received = weights_like(ids, seed=1), 0
    with Group.create(comm, config) as group, group.create_handle(layout, ids) as handle:
        if factory is not None:
            group.use_kernel(name, factory)
        for _ in range(2):
            got = handle.dispatch(torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16), topk_weights=None if layout is Layout.EXPERT_MAJOR else weights)
            rows = got.tokens.clone() if plain else got.tokens
            rows.mul_(2)   # the line a report names
            handle.combine(rows, topk_weights=weights if layout is Layout.EXPERT_MAJOR else None)
        group.check()
        counts = handle.layout_info.recv_total_counter if high else got.layout_info.expert_counters if layout is Layout.EXPERT_MAJOR \
            else got.layout_info.src_rank_counters
        received = int(counts.sum())
    return received


def played(seed: int, *given: Any) -> list[int]:
    with LocalWorld(RANKS, "sim", seed=seed, mode="adversarial") as world:
        return world.run(program, *given)


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR, Layout.FLAT])
def test_our_own_kernels_have_no_race(layout: Layout) -> None:
    for seed in range(10):
        assert sum(played(seed, layout)) > RANKS


NO_HEAD = ("code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)", "code = 0")
NO_ARRIVED = ("code = wait_arrived(window, ARRIVED, rank, RANKS, epoch, fail, record, timeout)", "code = 0")
CASES = {
    "ll_combine reads before HEAD": (Layout.EXPERT_MAJOR, "ll_combine", make_ll_combine, NO_HEAD),
    "ll_combine of RANK_MAJOR reads before HEAD": (Layout.RANK_MAJOR, "ll_combine", make_ll_combine, NO_HEAD),
    "ht_combine reads before HEAD": (Layout.FLAT, "ht_combine", make_ht_combine, NO_HEAD),
    "ll_dispatch ends before ARRIVED": (Layout.EXPERT_MAJOR, "ll_dispatch", make_ll_dispatch, NO_ARRIVED),
    "ht_dispatch ends before ARRIVED": (Layout.FLAT, "ht_dispatch", make_ht_dispatch, NO_ARRIVED),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_that_does_not_wait_is_found(case: str) -> None:
    layout, name, factory, change = CASES[case]
    with pytest.raises(RaceError, match=rf"test_local_world_races\.py:\d+, the program before {name[:2]}_combine"):
        for seed in range(10):
            played(seed, layout, name, mutant(factory, change))
