"""HIGH_THROUGHPUT over several teams in the simulator: results equal to the oracle under many schedules and deliveries, failures as designed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import deadlines
import pytest
import torch

from ncclep_py.config import Algorithm, GroupConfig, Layout, OverflowPolicy
from ncclep_py.errors import Code, Phase, Status
from ncclep_py.kernels.shape import Wire
from ncclep_py.simulator import Faults, Simulator, ht_net_program
from ncclep_py.simulator.ht_net_program import HTNetProgram

MODES = ("fair", "adversarial")
LAYOUTS = (Layout.FLAT, Layout.EXPERT_MAJOR)
DROP, TRAP = OverflowPolicy.DROP, OverflowPolicy.TRAP
WHOLE = "U D X C B X G U D X C"


def group(tokens: Sequence[int], experts: int = 0, topk: int = 2, hidden: int = 16, most: int = 0, slots: int = 2, **more: Any) -> GroupConfig:
    return GroupConfig(num_experts=experts or 2 * len(tokens), max_dispatch_tokens_per_rank=most or max(max(tokens), 1), hidden=hidden, num_topk=topk,
                       num_slots=slots, algorithm=Algorithm.HIGH_THROUGHPUT, **more)


def run(text: str, layout: Layout, tokens: Sequence[int], team: int, seed: int = 0, mode: str = "adversarial", sim: dict | None = None,
        program: dict | None = None, **config: Any) -> HTNetProgram:
    """Run a sequence of operations on one rank per entry of `tokens`, in teams of `team`, and check it."""
    machine = Simulator(len(tokens), seed, mode, **(sim or {}))
    p = HTNetProgram(machine, group(tokens, **config), layout, tokens, team, seed=seed, **(program or {}))
    p.play(text)
    machine.run()
    p.check()
    return p


@pytest.mark.parametrize("team, tokens", [
    (2, (3, 1, 2, 4)), (1, (3, 1, 2, 4)), (1, (1, 1)), (1, (0, 3)), (1, (0, 0)), (2, (0, 0, 5, 1)), (2, (4, 0, 0, 0)),
    (3, (2, 0, 1, 3, 5, 1)), (2, (2, 0, 1, 3, 5, 1)), (4, (1, 2, 0, 3, 2, 1, 1, 2)), (2, (1, 2, 0, 3, 2, 1, 1, 2)), (1, (1, 2, 0, 3, 2, 1, 1, 2)),
], ids=str)
def test_teams(tokens: tuple[int, ...], team: int) -> None:
    for seed, layout in enumerate(LAYOUTS):
        run("U D X C B X G", layout, tokens, team, seed, MODES[(seed + team) % 2], topk=3)


@pytest.mark.parametrize("text", ["U D X C D X C", "U U D X C", "U D D X C", "U B X G", "U D X C C", "U0 U1 D0 D1 X0 C0 X1 C1 B1 X1 G1 U0 B0 X0 G0"])
def test_sequences(text: str) -> None:
    for seed, layout in enumerate(LAYOUTS):
        run(text, layout, (3, 2, 1, 3), 1 + seed, seed, MODES[len(text) % 2])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("topk", [1, 9, 32])
def test_topk(topk: int, layout: Layout) -> None:
    run("U D X C B X G", layout, (5, 2, 0), 1, topk, experts=33, topk=topk)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows(dtype: torch.dtype, layout: Layout) -> None:
    run("U D X C", layout, (3, 1, 2, 2), 2, hidden=136, dtype=dtype, topk=6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, chunk", [((40, 3), 32), ((7, 11), 1), ((21, 2), 3)])
def test_chunks_and_channels(tokens: tuple[int, ...], chunk: int, layout: Layout) -> None:
    """More chunks than channels, more channels than blocks, chunks of one token."""
    p = run("U D X C B X G", layout, tokens, 1, 3, "fair", hidden=8, program={"chunk_tokens": chunk})
    assert p.net.chunks == -(-max(tokens) // chunk)
    assert chunk < 3 or p.net.adds >= 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grids", [[(1, 1), (2, 2), (3, 1), (1, 3)], [(4, 2), (1, 4), (5, 3), (2, 2)]], ids=str)
def test_unequal_grids(grids: list[tuple[int, int]], layout: Layout) -> None:
    run(WHOLE, layout, (5, 1, 9, 3), 2, 0, "fair", program={"grids": grids})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_start_when_others_end(layout: Layout) -> None:
    for seed in range(2):
        run("U D X C", layout, (5, 2, 3, 4), 1 + seed % 2, seed, MODES[seed % 2], sim={"blocks": 3, "resident_blocks": 1})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epoch", [(1 << 32) - 3, 0])
def test_epochs_wrap(epoch: int, layout: Layout) -> None:
    for seed in range(2):
        p = run(WHOLE, layout, (3, 2), 1, seed, program={"epoch": epoch})
        assert [p.epoch(r) for r in p.ranks] == [(epoch + 8) % (1 << 32)] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_tokens_to_one_rank(layout: Layout) -> None:
    for seed in range(2):
        machine = Simulator(4, seed, MODES[seed % 2])
        p = HTNetProgram(machine, group((4, 3, 4, 2), 8), layout, (4, 3, 4, 2), 2, seed=seed)
        p.update(ids=[torch.tensor([[6, 7], [7, 7], [6, -1], [9, 6]])[:t] for t in p.num_tokens])
        p.play("D X C B X G")
        machine.run()
        p.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_crosses_once_per_team(layout: Layout) -> None:
    """8 ranks in 2 teams, chunks of one token, all 4 experts of a token in the other team: one put of rows per token, whatever its experts."""
    counts = []
    for ids in ([8, 10, 12, 14], [8, 8, 8, 8]):
        p = HTNetProgram(Simulator(8, 0), group([2] * 8, 16, 4), layout, [2] * 8, 4, chunk_tokens=1)
        p.update(ids=[torch.tensor([[(e + 8 * (r >= 4)) % 16 for e in ids]] * 2) for r in range(8)])
        p.sim.run()
        before = p.puts()
        p.dispatch()
        p.sim.run()
        counts.append(p.puts() - before)
    assert counts == [8 * (2 + 2 * 3)] * 2   # HEAD in two words; of each token header, row and tag


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_scales_of_a_recipe(layout: Layout) -> None:
    for seed in range(2):
        machine, tokens = Simulator(4, seed, MODES[seed % 2]), (3, 0, 5, 2)
        p = HTNetProgram(machine, group(tokens, hidden=32, max_token_bytes=64), layout, tokens, 1 + seed, wire=Wire(32, 16), seed=seed)
        p.update()
        p.dispatch_quantised()
        machine.run()
        p.check()


@pytest.mark.parametrize("seed", range(12))
def test_whatever(seed: int) -> None:
    """Random everything."""
    d, layout = random.Random(seed), LAYOUTS[seed % 2]
    teams, team, local = d.choice((2, 2, 3, 4)), d.choice((1, 1, 2, 3)), d.choice((1, 2, 3))
    ranks = teams * team
    tokens = [d.choice((0, 1, 2, 3, 5, 8)) for _ in range(ranks)]
    most = max(max(tokens), 1)
    budget = d.choice((0, most, most + 1, most + 4))
    program: dict[str, Any] = {"alignment": d.choice((0, 1, 2, 4, 16)), "idx_bytes": d.choice((4, 8)), "int_bytes": d.choice((4, 8)),
                               "global_ids": d.random() < 0.5, "epoch": d.choice((1, 2, 0, 2**32 - 2)), "chunk_tokens": d.choice((1, 2, 3, 32))}
    if d.random() < 0.3:
        program["grids"] = [(d.choice((1, 2, 3)), d.choice((1, 2, 5))) for _ in range(ranks)]
    text = d.choice((WHOLE, "U0 U1 D0 D1 X0 C0 X1 C1 B1 X1 G1", "U B X G"))
    run(text, layout, tokens, team, seed, d.choice(MODES), experts=ranks * local, topk=min(ranks * local, d.choice((1, 2, 3, 4, 8))),
        max_recv_tokens_per_rank=budget, overflow_policy=d.choice((DROP, TRAP)) if budget else TRAP, program=program)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", [DROP, TRAP])
@pytest.mark.parametrize("budget", [4, 7])
def test_overflow(budget: int, policy: OverflowPolicy, layout: Layout) -> None:
    """All tokens to the experts of rank 1; what does not fit is dropped, and under TRAP every rank knows who, how many, and the budget."""
    tokens = (4, 3, 4, 4)
    for seed in range(2):
        machine = Simulator(4, seed, MODES[(seed + budget) % 2])
        p = HTNetProgram(machine, group(tokens, 8, max_recv_tokens_per_rank=budget, overflow_policy=policy), layout, tokens, 1 + seed, seed=seed,
                         alignment=2)
        p.update(ids=[torch.tensor([[2, 3], [2, -1], [3, 2], [3, 5]])[:t] for t in tokens])
        p.play("D X C B X G")
        machine.run()
        sent = p.routings[0].plan.recv_total_counter[1]
        records = [p.record(r) for r in range(4)]
        p.overflows = False
        p.check()
        assert sent > budget
        for rank, record in enumerate(records):
            assert (record is None) == (policy is DROP)
            assert record is None or (record.code, record.phase, record.rank, record.peer, record.seen, record.expected) == (
                Code.OVERFLOW, Phase.COUNTS, rank, 1, sent, budget)


# ---- failures ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(16))
def test_a_rank_that_comes_late_or_dies_is_named(seed: int) -> None:
    d, layout = random.Random(seed), LAYOUTS[seed // 2 % 2]
    kind, who, tokens = d.choice(("late", "dead")), d.randrange(4), (5, 3, 4, 2)
    faults = Faults(late={who: d.randrange(8)}, timeouts=True) if kind == "late" else Faults(dead={who: d.randrange(300)}, timeouts=True)
    machine = Simulator(4, seed, MODES[seed % 2], faults=faults)
    p = HTNetProgram(machine, group(tokens, max_recv_tokens_per_rank=5 + seed % 3, overflow_policy=DROP), layout, tokens, 1 + seed % 2, seed=seed)
    p.play("U D C B G")
    machine.run()
    for rank in range(4):
        if kind == "dead" and rank == who:
            continue
        record = p.record(rank)
        assert p.epoch(rank) == 6
        assert kind == "late" or record is not None
        assert record is None or record.culprit == who or rank == who or record.code == Code.REFUSED, (rank, record)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("team", [1, 2])
def test_a_refused_update_makes_the_next_dispatch_refuse(team: int, layout: Layout) -> None:
    tokens = (2, 3, 1, 2)
    for seed in range(2):
        machine = Simulator(4, seed, MODES[seed % 2])
        p = HTNetProgram(machine, group(tokens), layout, tokens, team, seed=seed)
        p.update(ranks=[0, 2, 3])
        p.update(ranks=[1], status=Status.REFUSED << 24 | 2)
        p.dispatch(ranks=[0, 1, 2, 3])
        machine.run()
        records = [p.record(r) for r in range(4)]
        assert [(r.code, r.peer, r.seen, r.epoch) for r in records] == [(Code.REFUSED, 1, 2, 1)] * 4
        assert [p.epoch(r) for r in range(4)] == [3] * 4
        p.play("U D X C")   # the next good update mends everything
        machine.run()
        p.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_different_operations_are_a_mismatch_on_every_rank_and_the_next_good_call_is_right(layout: Layout) -> None:
    tokens = (2, 3, 1, 2)
    for seed in range(2):
        machine = Simulator(4, seed, MODES[seed % 2])
        p = HTNetProgram(machine, group(tokens), layout, tokens, 2, seed=seed)
        p.play("U")
        p.dispatch(0, ranks=[0, 1, 2])
        p.dispatch(0, backward=True, ranks=[3])
        machine.run()
        assert [p.record(r).code for r in range(4)] == [Code.MISMATCH] * 4   # type: ignore[union-attr]
        p.play("D X C U D X C")
        machine.run()
        p.check()


@pytest.mark.parametrize("seed", range(6))
def test_after_a_slow_link_the_next_good_call_is_right(seed: int) -> None:
    """The link of ranks 1 and 3 is slower in a dispatch than waits last: who gives up names an end of it. What is late lands later, all goes on."""
    tokens = (2, 3, 1, 2)
    with mock.patch.object(ht_net_program, "Network", deadlines.Links):
        p = HTNetProgram(deadlines.machine(4, seed), group(tokens), LAYOUTS[seed % 2], tokens, 2, seed=seed)
    p.play("U")
    p.sim.run()
    p.check()
    p.network.slow_links |= {(1, 3), (3, 1)}
    p.sim.scheduler.haste = 1   # until the first has given up
    p.play("D")
    p.sim.run()
    records = [p.record(r) for r in range(4)]
    assert any(records)
    assert all(record is None or record.culprit in (1, 3) for record in records)
    p.network.slow_links.clear()
    p.checks.clear()
    p.play("U D X C B X G")
    p.sim.run()
    assert [p.record(r) for r in range(4)] == [None] * 4
    p.check()
