"""A dispatch that fails on one rank only, with the combine enqueued behind it: no rank may take rows of it without being told."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from test_ht_net_mutations import program as ht_net_program
from test_ll_net import group as ll_net_group
from test_mutations import mutant

from ncclep_py.config import Algorithm, GroupConfig, Layout
from ncclep_py.errors import Code
from ncclep_py.kernels import ht_combine, ht_net_combine, ll_combine, ll_net_combine
from ncclep_py.refusal import Refusal
from ncclep_py.simulator import Faults, SimulationError, Simulator
from ncclep_py.simulator.ht_program import HTProgram
from ncclep_py.simulator.program import Program, _same
from ncclep_py.simulator.task import Launch

CASES: dict[str, tuple[str, Callable[..., Any]]] = {
    "ll": ("D X C", ll_combine.make_ll_combine), "ht": ("U D X C", ht_combine.make_ht_combine),
    "ll_net": ("D X C", ll_net_combine.make_ll_net_combine), "ht_net": ("U D X C", ht_net_combine.make_ht_net_combine)}


def world(kind: str, seed: int, **how: Any) -> Any:
    """A small group of `kind` in which one rank is slow and waits end early."""
    draw = random.Random(seed)
    faults = Faults(slow={draw.randrange(3): draw.randrange(400)}, timeouts=True)
    if kind == "ll_net":
        return ll_net_group(seed, 4, 2, (4, 2, 3, 4), faults=faults, **how)
    if kind == "ht_net":
        return ht_net_program(2 * (seed // 2), faults, **how)
    sim = Simulator(3, seed, "adversarial", faults=faults)
    ht = {"algorithm": Algorithm.HIGH_THROUGHPUT} if kind == "ht" else {}
    config = GroupConfig(num_experts=6, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=2, num_slots=2, **ht)   # type: ignore[arg-type]
    return HTProgram(sim, config, Layout.FLAT, (4, 2, 3), seed=seed, **how) if kind == "ht" else Program(sim, config, (4, 2, 3), seed=seed, **how)


def skip_failed(p: Any) -> None:
    """Experts run only where nothing was reported: rows of a failed dispatch belong to nobody."""
    run_experts = p.experts

    def experts(d: Any) -> None:
        queued = [len(s.queue) for s in p.sim.streams]
        run_experts(d)
        for rank, stream in enumerate(p.sim.streams):
            for _ in range(len(stream.queue) - queued[rank]):
                launch = stream.queue.pop()

                def body(rank: int = rank, run: Any = launch.kernel) -> None:
                    if p.records[rank][0] == 0:
                        run()

                stream.queue.append(Launch(body, (), 1, 1, "experts", host=True, source=launch.source))

    p.experts = experts


def untold(p: Any) -> list[int]:
    """Ranks that were told of no failure and have wrong tokens."""
    def is_right(rank: int) -> bool:
        if isinstance(p, Program):
            return all(_same(c.out[rank], c.expected[rank]) for c in p.combined)
        try:
            for check in (c for c in p.checks if c.func.__name__ == "_check_combined" and c.args[-1] == rank):
                check()
        except AssertionError:
            return False
        return True

    return [rank for rank in p.ranks if p.records[rank][0] == 0 and not is_right(rank)]


def play(kind: str, seeds: int, **how: Any) -> tuple[int, int, int]:
    """Untold wrong ranks, schedules in which ranks were told of a dispatch that failed elsewhere, and schedules in which all was right."""
    wrong = told = right = 0
    for seed in range(seeds):
        p = world(kind, seed, **how)
        p.sim.policy.rush, p.sim.poison = 0.1, False
        skip_failed(p)
        p.play(CASES[kind][0])
        p.sim.run()
        wrong += len(untold(p))
        records = [p.record(rank) for rank in p.ranks]
        told += any(r is not None and r.code == Code.REFUSED and r.seen == Refusal.STALE for r in records)
        right += not any(records)
        assert len({p.epoch(rank) for rank in p.ranks}) == 1
    return wrong, told, right


@pytest.mark.parametrize("kind", CASES)
def test_no_rank_takes_rows_of_a_dispatch_that_failed_elsewhere(kind: str) -> None:
    wrong, told, right = play(kind, 250)
    assert wrong == 0
    assert told > 0 and right > 0


@pytest.mark.parametrize("kind", CASES)
def test_without_the_status_in_head_one_does(kind: str) -> None:
    make = CASES[kind][1]
    status = "status" if kind.startswith("ll") else "state"
    how = mutant(make, (f"header_status(held, handle, {status})", status))
    try:
        wrong, told, _ = play(kind, 250, **{"combine" if kind.startswith("ht") else "make_combine": how})
    except SimulationError:   # it goes by maps that do not hold
        return
    assert wrong > 0 and told == 0
