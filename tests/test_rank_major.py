"""LL RANK_MAJOR in the simulator: results equal to the oracle in odd shapes and many schedules, and every element of its kernel needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from ncclep_py.config import GroupConfig
from ncclep_py.simulator import Simulator
from ncclep_py.simulator.rank_major_program import RankMajorProgram

MODES = ("fair", "adversarial")


def run(text: str, tokens: Sequence[int], seed: int = 0, mode: str = "adversarial", experts: int = 0, topk: int = 2, hidden: int = 16,
        most: int = 0, dtype: torch.dtype = torch.bfloat16, slots: int = 2, sim: dict | None = None,
        routing: Callable[[int], torch.Tensor] | None = None, **program: object) -> RankMajorProgram:
    """Run a sequence of operations on one rank per entry of `tokens`, and check it."""
    machine = Simulator(len(tokens), seed, mode, **(sim or {}))
    config = GroupConfig(num_experts=experts or 2 * len(tokens), max_dispatch_tokens_per_rank=most or max(max(tokens), 1), hidden=hidden, dtype=dtype,
                         num_topk=topk, num_slots=slots)
    p = RankMajorProgram(machine, config, tokens, seed=seed, **program)
    if routing is None:
        p.play(text)
    else:
        d = p.dispatch(topk_idx=[routing(r) for r in p.ranks])
        p.experts(d), p.combine(d)
    machine.run()
    p.check()
    return p


# ---- results -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [(0,), (3,), (0, 0), (0, 4), (4, 0), (1, 1), (2, 7), (3, 0, 5), (1, 2, 3, 4), (4, 4, 0, 1, 2)], ids=str)
def test_tokens_per_rank(tokens: tuple[int, ...], mode: str) -> None:
    for seed in range(4):
        run("D X C D X C", tokens, seed, mode, most=8)


@pytest.mark.parametrize("text", ["D C C", "D D X C C", "D0 D1 X0 C0 X1 C1 D0 X0 C0", "D1 X1 C1 D1 D0 C0 C1"])
def test_sequences(text: str) -> None:
    for seed in range(10):
        run(text, (3, 4, 2), seed, MODES[seed % 2])


@pytest.mark.parametrize("topk", [1, 3, 5, 7, 8, 31, 32])
def test_topk(topk: int) -> None:
    """Whole tokens per stretch of lanes: 32, 10, 6, 4, 4, 1 and 1."""
    for seed in range(3):
        run("D X C", (5, 2, 0), seed, experts=33, topk=topk)


@pytest.mark.parametrize("per_rank", [1, 3])
def test_experts_per_rank(per_rank: int) -> None:
    for seed in range(4):
        run("D X C", (3, 4, 2), seed, experts=3 * per_rank, topk=3)


@pytest.mark.parametrize("hidden", [8, 24, 136])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows(hidden: int, dtype: torch.dtype) -> None:
    run("D X C", (3, 1), hidden=hidden, dtype=dtype)


@pytest.mark.parametrize("idx_bytes", [4, 8])
def test_id_types(idx_bytes: int) -> None:
    run("D X C", (3, 4), idx_bytes=idx_bytes)


def test_smaller_topk_than_the_group() -> None:
    run("D X C D X C", (3, 4), topk=4, num_topk=1)


@pytest.mark.parametrize("grids", [[(1, 1), (2, 2), (3, 1)], [(4, 2), (1, 4), (5, 3)], [(7, 1), (1, 7), (2, 3)]], ids=str)
@pytest.mark.parametrize("tokens", [(5, 1, 3), (0, 2, 1)], ids=str)
def test_unequal_grids(grids: list[tuple[int, int]], tokens: tuple[int, ...]) -> None:
    """Fewer tokens than blocks, rows split over blocks and warps, rows of one vector split over many."""
    for seed in range(4):
        run("D X C D X C", tokens, seed, grids=grids, hidden=8 if seed % 2 else 72)


@pytest.mark.parametrize("resident", [1, 2])
def test_blocks_that_start_when_others_end(resident: int) -> None:
    for seed in range(6):
        run("D X C D X C", (5, 2, 3), seed, MODES[seed % 2], sim={"blocks": 4, "resident_blocks": resident})


@pytest.mark.parametrize("epoch", [(1 << 31) - 2, (1 << 32) - 3, 0])
def test_epochs_wrap(epoch: int) -> None:
    for seed in range(4):
        run("D X C D X C D C", (2, 3, 1), seed, epoch=epoch)


ROUTINGS = {
    "all to one rank": lambda r: torch.tensor([[0, 1, 0, 1]] * 6),
    "one expert of every rank": lambda r: torch.tensor([[0, 2, 4, -1]] * 6),
    "nobody": lambda r: torch.full((6, 4), -1),
    "ids beyond": lambda r: torch.tensor([[6, 0, -5, 1 << 30]] * 6),
    "duplicates, not side by side": lambda r: torch.tensor([[5, 0, 4, 0]] * 6),
    "every other token": lambda r: torch.tensor([[0, 1, 2, 3], [-1, -1, -1, -1]] * 3),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name: str) -> None:
    for seed in range(3):
        run("", (6, 6, 6), seed, topk=4, most=7, routing=ROUTINGS[name])


def test_many_schedules() -> None:
    for seed in range(80):
        run(("D X C D X C", "D0 D1 X0 C0 D0 X1 C1", "D D X C C")[seed % 3], (3, 1, 2), seed, MODES[seed % 2])
