"""Kernels that never end are ended by the simulator, and it says where they were."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_mutations import mutant

from ncclep_py import CombineConfig, DispatchConfig, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.kernels.ll_combine import make_ll_combine
from ncclep_py.simulator.errors import EndlessError, OutOfBoundsError
from ncclep_py.simulator.watchdog import WATCHDOG, Watchdog


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
        world.simulator.most_repeats = 2000
        with pytest.raises(EndlessError, match=r"ll_combine\) is the last of 2000 operations in a row that this warp called with what"):
            world.run(pair, mutant(make_ll_combine, ("                at += step\n", "                at += 0\n")))


def test_loops_over_many_tokens_advance() -> None:
    """However long they are: a limit far below the number of their operations is not reached."""
    def program(comm: Any, tokens: int) -> bool:
        config = GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=tokens, hidden=8, num_topk=2, num_staging_slots=2)
        ids, x = torch.tensor([[0, 1]]).repeat(tokens, 1), torch.ones(tokens, 8, dtype=torch.bfloat16)
        with Group.create(comm, config) as group, group.create_handle(Layout.EXPERT_MAJOR, ids) as handle:
            received = handle.dispatch(x, config=DispatchConfig(send_only=True))
            handle.complete()
            out = handle.combine(received.tokens, topk_weights=torch.full((tokens, 2), 0.5), config=CombineConfig(send_only=True))
            handle.complete()
            return torch.equal(out, x)

    with LocalWorld(1, "sim", blocks=1, warps=1) as world:
        world.simulator.most_repeats = 20
        assert world.run(program, 300) == [True]


def test_a_loop_without_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WATCHDOG, "seconds", 0.5)

    def program(comm: Any) -> None:
        config = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=1)
        with Group.create(comm, config) as group:
            group.run_kernel(make_spinning)

    told = r"last operation of this warp, 0\.5 s ago, and it still runs, now at test_endless\.py:\d+, '(while at < 4|at \+= 0)"
    with LocalWorld(2, "sim") as world, pytest.raises(EndlessError, match=told):
        world.run(program)
    with LocalWorld(2, "sim") as world:   # and the next is right
        world.run(pair, make_ll_combine)


def test_whoever_stands_in_a_debugger_is_left_alone() -> None:
    """A step may then last: the thread looks as if somebody had set a breakpoint in a kernel."""
    watchdog, names = Watchdog(), {"__name__": "pdb", "time": time}
    watchdog.seconds = 0.2
    exec("def prompt():\n    time.sleep(1.2)\n    return 7", names)
    number = watchdog.watch(SimpleNamespace(step=3))   # type: ignore[arg-type]
    try:
        assert names["prompt"]() == 7   # type: ignore[operator]
    finally:
        watchdog.release(number)


def test_rows_are_aligned() -> None:
    crooked = mutant(make_ll_combine, ("gather_row(payload, slot, table", "gather_row(payload, slot + 8, table"))
    with LocalWorld(2, "sim") as world, pytest.raises(OutOfBoundsError, match="accesses a row at 0x[0-9a-f]*8, which is not aligned to 16 bytes"):
        world.run(pair, crooked)
