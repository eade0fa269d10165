"""Random failures of LOW_LATENCY over several teams: who was told of none has right results, and after them the next operations are right."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from test_ll_net import group, mutant
from test_ll_net import make_ll_net_combine as combine
from test_ll_net import make_ll_net_dispatch as dispatch

from ncclep_py.simulator import Faults, SimulationError
from ncclep_py.simulator.ll_net_program import LLNetProgram
from ncclep_py.simulator.program import Dispatched, _same
from ncclep_py.simulator.task import Launch


def careful_experts(p: LLNetProgram, d: Dispatched) -> None:
    """Experts that run only where the dispatch did not fail: the rows of one that failed belong to nobody."""
    queued = [len(s.queue) for s in p.sim.streams]
    type(p).experts(p, d)
    for rank, stream in enumerate(p.sim.streams):
        (launch,) = list(stream.queue)[queued[rank]:]
        stream.queue.pop()

        def body(rank: int = rank, run: object = launch.kernel) -> None:
            at = p.shape.local.header(d.slot)
            if p.local[rank][at:at + 16].view(np.int64)[1] == d.handle:
                run()   # type: ignore[operator]

        stream.queue.append(Launch(body, (), 1, 1, "experts", host=True, source=launch.source))


def play(seed: int, **how: object) -> Counter[str]:
    """Ranks late or stalled, connections slow or lost, deadlines early; then, with all that over, a dispatch and a combine."""
    draw = random.Random(seed)
    ranks, team = draw.choice(((4, 2), (4, 1), (3, 1), (6, 2)))
    who, kind, seen = draw.randrange(ranks), draw.choice(("late", "slow", "both", "lost")), Counter[str]()
    late, slow = {who: draw.randrange(5)}, {(who + (kind == "both")) % ranks: draw.randrange(400)}
    faults = Faults(late=late if kind in ("late", "both") else {}, slow=slow if kind in ("slow", "both") else {}, timeouts=True)
    tokens = [draw.randrange(5) for _ in range(ranks)]
    p = group(seed, ranks, team, tokens, faults=faults, epoch=draw.choice((1, 2**31 - 2, 2**32 - 2)), **how)   # type: ignore[arg-type]
    p.experts = lambda d: careful_experts(p, d)   # type: ignore[method-assign, assignment, misc]
    p.sim.policy.rush, p.sim.poison = draw.choice((0.002, 0.02, 0.1)), False
    if draw.random() < 0.4:
        p.network.slow.add(draw.randrange(ranks))
    if kind == "lost":
        p.network.lost.add((who, draw.choice([r for r in range(ranks) if r // team != who // team])))
    p.play(draw.choice(("D X C D X C", "D X C", "D0 D1 X0 C0 X1 C1")))
    p.sim.run()
    records = [p.record(rank) for rank in range(ranks)]
    for rank, record in enumerate(records):
        seen["failed" if record else "right"] += 1
        assert record is not None or all(_same(c.out[rank], c.expected[rank]) for c in p.combined), f"rank {rank} was told of no failure"
    assert len({p.epoch(rank) for rank in range(ranks)}) == 1
    if kind != "lost":
        p.dispatched.clear()
        p.combined.clear()
        p.sim.faults, p.sim.scheduler.faulty = Faults(), False
        p.play("D X C")
        p.sim.run()
        p.check()
        seen["after"] += any(records)
    return seen


def test_who_was_told_nothing_is_right_and_so_is_what_comes_after() -> None:
    seen = Counter[str]()
    for seed in range(50):
        seen += play(seed)
    assert min(seen["failed"], seen["right"]) > 40 and seen["after"] > 5


ENTER = "code = enter(comm, window, HEADS, rank, RANKS, TEAM, CONTEXTS, count, epoch, signature, status, fail, record, timeout)"
MUTANTS = {   # what failed operations leave under way, L-N1 to L-N4; all of them are right while nothing fails
    "one drained context": (dispatch, (ENTER, ENTER.replace("CONTEXTS", "1"))),
    "no signal after a failure": (dispatch, ("                signal(comm, rank, RANKS, TEAM, 0)\n",
                                             "                if code == 0:\n                    signal(comm, rank, RANKS, TEAM, 0)\n")),
    "no count of a failed operation": (combine, ("                advance_count(local + COUNT, count)\n",
                                                 "                if code == 0:\n                    advance_count(local + COUNT, count)\n")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_failures_leave_behind(name: str) -> None:
    make, change = MUTANTS[name]
    how = {"make_dispatch" if make is dispatch else "make_combine": mutant(make, change)}
    with pytest.raises((SimulationError, AssertionError)):
        for seed in range(400):
            play(seed, **how)
