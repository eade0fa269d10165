"""Kernels that never end are ended by the simulator, and it says where they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_mutations import mutant

from ncclep_py import Group, GroupConfig, Layout, LocalWorld
from ncclep_py.kernels.ll_combine import make_ll_combine
from ncclep_py.simulator.errors import EndlessError, OutOfBoundsError
from ncclep_py.simulator.watchdog import WATCHDOG


def pair(comm: Any, factory: Callable[..., Any]) -> None:
    config = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=1)
    with Group.create(comm, config) as group, group.create_handle(Layout.EXPERT_MAJOR, torch.zeros(4, 1, dtype=torch.int64)) as handle:
        group.use_kernel("ll_combine", factory)
        handle.combine(handle.dispatch(torch.ones(4, 16, dtype=torch.bfloat16)).tokens, topk_weights=torch.ones(4, 1))


def make_spinning(shape: Any, ops: Any) -> Callable[..., None]:
    warp_idx = ops.warp_idx

    def spinning(rank):
        at = 0
        while at < 4:
            at += 0 * warp_idx()

    return spinning


make_spinning.PARAMETERS = ("rank",)   # type: ignore[attr-defined]


def test_a_loop_of_operations_that_does_not_advance() -> None:
    with LocalWorld(2, "sim") as world:
        world.simulator.most_steps = 2000
        with pytest.raises(EndlessError, match=r"ll_combine\) took 2000 steps in one kernel and has not ended"):
            world.run(pair, mutant(make_ll_combine, ("                at += step\n", "                at += 0\n")))


def test_the_limit_is_far_above_what_kernels_need() -> None:
    with LocalWorld(2, "sim") as world:
        world.simulator.most_steps = 2000
        world.run(pair, make_ll_combine)


def test_a_loop_without_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WATCHDOG, "seconds", 0.5)

    def program(comm: Any) -> None:
        config = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=1)
        with Group.create(comm, config) as group:
            group.run_kernel(make_spinning)

    told = r"last operation of this warp, 0\.5 s ago, and it still runs, now at test_endless\.py:3[01], '(while at < 4|at \+= 0)"
    with LocalWorld(2, "sim") as world, pytest.raises(EndlessError, match=told):
        world.run(program)
    with LocalWorld(2, "sim") as world:   # and the next is right
        world.run(pair, make_ll_combine)


def test_rows_are_aligned() -> None:
    crooked = mutant(make_ll_combine, ("gather_row(payload, slot, table", "gather_row(payload, slot + 8, table"))
    with LocalWorld(2, "sim") as world, pytest.raises(OutOfBoundsError, match="accesses a row at 0x[0-9a-f]*8, which is not aligned to 16 bytes"):
        world.run(pair, crooked)
