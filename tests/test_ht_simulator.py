"""HIGH_THROUGHPUT in the simulator: results equal to the oracle in odd shapes and many schedules, failures as designed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ncclep_py.config import Algorithm, GroupConfig, Layout, OverflowPolicy
from ncclep_py.errors import Code, Phase, Status
from ncclep_py.simulator import Faults, Simulator
from ncclep_py.simulator.ht_program import HTProgram

MODES = ("fair", "adversarial")
LAYOUTS = (Layout.FLAT, Layout.EXPERT_MAJOR)
DROP, TRAP = OverflowPolicy.DROP, OverflowPolicy.TRAP
WHOLE = "U D X C B X G U D X C"


def group(tokens: Sequence[int], experts: int = 0, topk: int = 2, hidden: int = 16, most: int = 0, slots: int = 2, **more: Any) -> GroupConfig:
    return GroupConfig(num_experts=experts or 2 * len(tokens), max_dispatch_tokens_per_rank=most or max(max(tokens), 1), hidden=hidden, num_topk=topk,
                       num_slots=slots, algorithm=Algorithm.HIGH_THROUGHPUT, **more)


def run(text: str, layout: Layout, tokens: Sequence[int], seed: int = 0, mode: str = "adversarial", sim: dict | None = None,
        program: dict | None = None, **config: Any) -> HTProgram:
    """Run a sequence of operations on one rank per entry of `tokens`, and check it."""
    machine = Simulator(len(tokens), seed, mode, **(sim or {}))
    p = HTProgram(machine, group(tokens, **config), layout, tokens, seed=seed, **(program or {}))
    p.play(text)
    machine.run()
    p.check()
    return p


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [(0,), (3,), (0, 0), (0, 4), (4, 0), (1, 1), (2, 7), (3, 0, 5), (1, 2, 3, 4), (4, 4, 0, 1, 2), (17, 1)], ids=str)
def test_tokens_per_rank(tokens: tuple[int, ...], layout: Layout) -> None:
    for seed in range(2):
        run(WHOLE, layout, tokens, seed, MODES[seed % 2])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", ["U D X C D X C", "U U D X C", "U D D X C", "U B X G", "U D X C C", "U0 U1 D0 D1 X0 C0 X1 C1 B1 X1 G1 U0 B0 X0 G0"])
def test_sequences(text: str, layout: Layout) -> None:
    for seed in range(4):
        run(text, layout, (3, 4, 2), seed, MODES[seed % 2])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("topk", [1, 3, 5, 7, 8, 9, 16, 31, 32])
def test_topk(topk: int, layout: Layout) -> None:
    run("U D X C B X G", layout, (5, 2, 0), topk, experts=33, topk=topk)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks, per_rank", [(1, 5), (2, 7), (3, 1), (3, 5), (5, 3)])
def test_experts_and_ranks_that_are_no_powers_of_two(ranks: int, per_rank: int, layout: Layout) -> None:
    for seed in range(3):
        run("U D X C B X G", layout, [(3 * r + seed) % 7 for r in range(ranks)], seed, experts=ranks * per_rank, topk=min(4, ranks * per_rank))


@pytest.mark.parametrize("alignment", [0, 1, 2, 8, 64])
def test_alignment(alignment: int) -> None:
    for seed in range(4):
        run(WHOLE, Layout.EXPERT_MAJOR, (6, 2, 3), seed, MODES[seed % 2], program={"alignment": alignment})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [8, 24, 136, 264])
def test_rows(hidden: int, dtype: torch.dtype, layout: Layout) -> None:
    run("U D X C", layout, (3, 1), hidden=hidden, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("idx_bytes, int_bytes, global_ids", [(4, 4, False), (4, 8, True), (8, 4, True), (8, 8, False)])
def test_types_of_integers(idx_bytes: int, int_bytes: int, global_ids: bool, layout: Layout) -> None:
    for seed in range(3):
        run("U D X C", layout, (3, 4, 2), seed, experts=9, program={"idx_bytes": idx_bytes, "int_bytes": int_bytes, "global_ids": global_ids})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grids", [[(1, 1), (2, 2), (3, 1)], [(4, 2), (1, 4), (5, 3)], [(1, 17), (1, 20), (2, 16)]], ids=str)
def test_unequal_grids(grids: list[tuple[int, int]], layout: Layout) -> None:
    for seed in range(2):
        run(WHOLE, layout, (5, 1, 40), seed, "fair", hidden=72, program={"grids": grids})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("resident", [1, 2])
def test_blocks_that_start_when_others_end(resident: int, layout: Layout) -> None:
    for seed in range(3):
        run(WHOLE, layout, (5, 2, 3), seed, MODES[seed % 2], sim={"blocks": 4, "resident_blocks": resident})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epoch", [(1 << 31) - 2, (1 << 32) - 3, (1 << 32) - 1, 0, 7])
def test_epochs_wrap(epoch: int, layout: Layout) -> None:
    for seed in range(3):
        p = run(WHOLE, layout, (3, 2), seed, program={"epoch": epoch})
        assert [p.epoch(r) for r in p.ranks] == [(epoch + 8) % (1 << 32)] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(24))
def test_whatever(seed: int, layout: Layout) -> None:
    """Random everything."""
    d = random.Random(seed)
    ranks, local = d.choice((1, 2, 2, 3, 3, 4, 5)), d.choice((1, 2, 3, 5))
    tokens = [d.choice((0, 1, 2, 3, 5, 8, 13)) for _ in range(ranks)]
    most = max(max(tokens), 1)
    budget = d.choice((0, most, most + 1, most + 4))
    program: dict[str, Any] = {"alignment": d.choice((0, 1, 2, 4, 16)), "idx_bytes": d.choice((4, 8)), "int_bytes": d.choice((4, 8)),
                               "global_ids": d.random() < 0.5, "epoch": d.choice((1, 2, 0, 2**32 - 2, 2**31 - 1))}
    if d.random() < 0.3:
        program["grids"] = [(d.choice((1, 2, 3)), d.choice((1, 2, 5))) for _ in range(ranks)]
    text = d.choice((WHOLE, "U0 U1 D0 D1 X0 C0 X1 C1 B1 X1 G1", "U U D X C", "U B X G"))
    run(text, layout, tokens, seed, d.choice(MODES), experts=ranks * local, topk=min(ranks * local, d.choice((1, 2, 3, 4, 8))),
        max_recv_tokens_per_rank=budget, overflow_policy=d.choice((DROP, TRAP)) if budget else TRAP, program=program)


# ---- budgets -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", [DROP, TRAP])
@pytest.mark.parametrize("budget", [4, 5, 7, 9])
def test_overflow(budget: int, policy: OverflowPolicy, layout: Layout) -> None:
    """All tokens to the experts of rank 1; what does not fit is dropped, and under TRAP every rank knows who, how many, and the budget."""
    tokens, sent = (4, 3, 4), 0
    for seed in range(6):
        machine = Simulator(3, seed, MODES[seed % 2])
        p = HTProgram(machine, group(tokens, 6, max_recv_tokens_per_rank=budget, overflow_policy=policy), layout, tokens, seed=seed, alignment=2)
        ids = [torch.tensor([[2, 3], [2, -1], [3, 2], [3, 5]])[:t] for t in tokens]
        p.update(ids=ids)
        p.play("D X C B X G")
        machine.run()
        sent = p.routings[0].plan.recv_total_counter[1]
        records = [p.record(r) for r in range(3)]
        p.overflows = False
        p.check()
        for rank, record in enumerate(records):
            assert (record is None) == (policy is DROP)
            assert record is None or (record.code, record.phase, record.rank, record.peer, record.seen, record.expected) == (
                Code.OVERFLOW, Phase.COUNTS, rank, 1, sent, budget)
    assert sent > budget


# ---- stale rows ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_a_combine_after_a_dispatch_that_failed_everywhere_is_stale(seed: int, layout: Layout) -> None:
    """Ranks call dispatches that differ, so no row moves and the slot holds the earlier one's; the combine of the later one must not bring these."""
    machine = Simulator(3, seed, MODES[seed % 2])
    p = HTProgram(machine, group((5, 3, 4)), layout, (5, 3, 4), seed=seed)
    p.play("U D X")
    p.dispatch(ranks=[0, 2])
    p.dispatch(ranks=[1], backward=True)
    machine.run()
    assert [p.record(r).code for r in range(3)] == [Code.MISMATCH] * 3
    p.combine()
    machine.run()
    assert [p.record(r).code for r in range(3)] == [Code.STALE_SLOT] * 3
    p.checks.clear()
    p.play("D X C")
    machine.run()
    p.check()


# ---- failures ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_comes_late_or_dies_is_named(seed: int, layout: Layout) -> None:
    d = random.Random(seed)
    kind, who = d.choice(("late", "dead")), d.randrange(3)
    faults = Faults(late={who: d.randrange(8)}, timeouts=True) if kind == "late" else Faults(dead={who: d.randrange(200)}, timeouts=True)
    machine = Simulator(3, seed, MODES[seed % 2], faults=faults)
    p = HTProgram(machine, group((5, 3, 4), max_recv_tokens_per_rank=5 + seed % 3, overflow_policy=DROP), layout, (5, 3, 4), seed=seed)
    p.play("U D C B G")
    machine.run()
    for rank in range(3):
        if kind == "dead" and rank == who:
            continue
        record = p.record(rank)
        assert p.epoch(rank) == 6
        assert kind == "late" or record is not None
        assert record is None or record.culprit == who or rank == who or record.code == Code.REFUSED, (rank, record)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refused_update_makes_the_next_dispatch_refuse(layout: Layout) -> None:
    for seed in range(10):
        machine = Simulator(3, seed, MODES[seed % 2])
        p = HTProgram(machine, group((2, 3, 1)), layout, (2, 3, 1), seed=seed)
        p.update(ranks=[0, 2])
        p.update(ranks=[1], status=Status.REFUSED << 24 | 2)
        p.dispatch(ranks=[0, 1, 2])
        machine.run()
        records = [p.record(r) for r in range(3)]
        assert [(r.code, r.peer, r.seen, r.epoch) for r in records] == [(Code.REFUSED, 1, 2, 1)] * 3
        assert [p.epoch(r) for r in range(3)] == [3] * 3
        p.play(WHOLE)   # the next good update mends everything
        machine.run()
        p.check()


def test_maps_of_another_handle_are_refused_on_every_rank() -> None:
    for seed in range(6):
        machine = Simulator(2, seed, "adversarial")
        p = HTProgram(machine, group((2, 3)), Layout.FLAT, (2, 3), seed=seed)
        p.update(0)
        p.routings[1] = p.routings[0]
        p.dispatch(1, ranks=[0, 1])
        machine.run()
        assert [(r.code, r.seen) for r in map(p.record, range(2))] == [(Code.REFUSED, 9)] * 2
