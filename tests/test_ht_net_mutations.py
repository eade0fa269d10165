"""Every lemma of ``ht_net_map`` is needed: kernels and operations without one of its parts turn the simulator red."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from test_mutations import mutant

from ncclep_py.config import Algorithm, GroupConfig, Layout, OverflowPolicy
from ncclep_py.errors import Code, Status
from ncclep_py.simulator import Faults, SimulationError, Simulator
from ncclep_py.simulator.ht_net_program import FACTORIES, HTNetProgram

SEEDS = 40
TOKENS = (3, 4, 2, 3)
TEXTS = ("U D X C B X G", "U D X C U D X C", "U U D X C")


def program(seed: int, faults: Faults | None = None, effects: Mapping[str, Sequence[str]] | None = None, budget: int = 0,
            **factories: Callable) -> HTNetProgram:
    ranks = 2 if seed % 2 else 4
    sim = Simulator(ranks, seed, ("adversarial", "fair")[seed % 5 == 4], blocks=1 + seed % 3 // 2, faults=faults, effects=effects)
    config = GroupConfig(num_experts=2 * ranks, max_dispatch_tokens_per_rank=5, hidden=16, num_topk=2, num_slots=2,
                         algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=budget,
                         overflow_policy=OverflowPolicy.DROP if budget else OverflowPolicy.TRAP)
    return HTNetProgram(sim, config, (Layout.FLAT, Layout.EXPERT_MAJOR)[seed // 2 % 2], TOKENS[:ranks], ranks // 2, chunk_tokens=2, seed=seed,
                        alignment=2, **factories)


def play(seed: int, **how: Any) -> None:
    """One schedule, checked against the oracle."""
    p = program(seed, budget=(0, 5)[seed % 3 == 2], **how)
    p.play(TEXTS[seed % len(TEXTS)])
    p.sim.run()
    p.check()


def play_failure(seed: int, **how: Any) -> None:
    """A rank dies or comes late: all who live must know it, and end all operations."""
    draw = random.Random(seed)
    kind, who = draw.choice(("late", "dead", "refused")), draw.randrange(2 if seed % 2 else 4)
    faults = {"late": Faults(late={who: draw.randrange(6)}, timeouts=True), "dead": Faults(dead={who: draw.randrange(250)}, timeouts=True)}.get(kind)
    p = program(seed, faults, budget=(0, 5)[seed % 3 == 2], **how)
    if kind == "refused":
        p.play("U D X C")
        p.sim.run()
        p.check()
        p.update(ranks=[r for r in p.ranks if r != who])
        p.update(ranks=[who], status=Status.REFUSED << 24 | 2)
        p.play("D B")
    else:
        p.play("U D C B G")
    p.sim.run()
    for rank in p.ranks if kind == "refused" else ():
        record = p.record(rank)
        assert record is not None and (record.code, record.peer, record.seen, p.epoch(rank)) == (Code.REFUSED, who, 2, 7)
    for rank in p.ranks if kind != "refused" else ():
        record = p.record(rank)
        if kind == "dead" and rank == who:
            continue
        assert p.epoch(rank) == 6
        assert kind == "late" or record is not None
        assert record is None or record.culprit == who or rank == who or record.code in (Code.REFUSED, Code.LEFT_BEHIND)


def play_slow_link(seed: int, **how: Any) -> None:
    """Puts land as late as they can, but before anybody gives up (which they do in ``test_ht_net_lemmas``)."""
    p = program(2 * seed + seed % 2, Faults(timeouts=True), **how)
    p.play("U D X C")
    p.sim.run()
    p.checks.clear()
    p.network.slow.add(seed % 2)
    p.play("D" if seed % 3 else "D C")
    p.sim.run()
    for rank in p.ranks:
        p.record(rank)
    p.network.slow.clear()
    if seed % 3 != 2:   # what is still under way lands only when nothing else can move
        p.checks.clear()
        p.play("D X C B X G")
        p.sim.run()
        failed = [r for r in p.ranks if p.record(r) is not None]
        if failed:   # an older HEAD may hide a newer one once
            p.checks.clear()
        else:
            p.check()
    p.checks.clear()
    p.play("U D X C B X G")
    p.sim.run()
    assert [p.record(r) for r in p.ranks] == [None] * len(p.ranks)
    p.check()


def first_red(seeds: int = SEEDS, **how: Any) -> BaseException | None:
    """The first error within `seeds` schedules of each kind; None if the mutant survives."""
    for seed in range(seeds):
        for run in (play, play_failure, play_slow_link):
            try:
                run(seed, **how)
            except (SimulationError, AssertionError) as error:
                return error
    return None


WAIT_HEADS = "code = wait_heads(window, HEADS, rank, RANKS, TEAM, epoch, signature, fail, record, timeout)"
WAIT_ENTERED = "code = wait_entered(comm, rank, RANKS, TEAM, CHANNELS, count, epoch, fail, record, timeout)"
ADVANCE = "                advance_count(local + COUNT, count)\n"
SIGNAL = "signal(comm, peer, context, team * SIGNALS + 1 + channel, amount)"
LEAST = "count * ADDS + turn + 1"
TAG = "put_tag(comm, window, peer, context, TAGS + place * TAG_BYTES + chunk * 8, epoch, why)"
SHARED = {
    "H-N2 no wait_heads": [(WAIT_HEADS, "code = 0")],
    "H-N2 no wait_entered": [(WAIT_ENTERED, "code = 0")],
    "H-N3 COUNT is not advanced": [(ADVANCE, "")],
}
CHUNKED = {
    "H-N3 a chunk too early": [(LEAST, "count * ADDS + turn")],
    "H-N3 every chunk's signal is one": [(SIGNAL, SIGNAL.replace("amount", "1"))],
    "H-N3 signals of one context": [(SIGNAL, SIGNAL.replace("context", "0"))],
    "H-N3 signal before the block's rows are there": [("                sync()\n", "")],
    "H-N4 no TAG": [(TAG, "pass")],
}
MUTANTS = {f"{kernel}: {name}": (kernel, changes) for kernel in ("dispatch", "combine") for name, changes in (SHARED | CHUNKED).items()}
MUTANTS |= {f"prepare: {name}": ("prepare", changes) for name, changes in SHARED.items()} | {
    "dispatch: no rows put": ("dispatch", [("if code == 0:\n                        put(comm", "if 0 == 1:\n                        put(comm")]),
    "dispatch: H-N7 no arrived": ("dispatch", [("publish_arrived(window, ARRIVED, rank, TEAM, epoch)", "pass")]),
    "dispatch: H-N7 no wait for arrived": ("dispatch", [
        ("code = wait_arrived(window, ARRIVED, rank, TEAM, epoch, fail, record, timeout + timeout)", "code = 0")]),
    "prepare: H-N8 HITS without their signal": ("prepare", [("signal(comm, peer, 0, team * SIGNALS + 1, 1)", "pass")]),
    "prepare: H-N8 HITS not waited for": ("prepare", [("count * ADDS + 1, rank", "count * ADDS, rank")]),
    "prepare: H-N8 HITS not forwarded": ("prepare", [("forward_hits(window, NET_HITS + (distance - 1) * HITS_BYTES, HITS, rank, RANKS, EXPERTS, "
                                                      "BY_RANK, epoch, source * TEAM + index,\n                                 TEAM)", "pass")]),
    "prepare: H-N8 KEPT not waited for": ("prepare", [("count * ADDS + 2, rank", "count * ADDS + 1, rank")]),
    "prepare: other channels get nothing": ("prepare", [
        ("signal(comm, to * TEAM + index, channel % CONTEXTS, team * SIGNALS + 1 + channel, ADDS)", "pass")]),
    "prepare: no barrier before FAIL is cleared": ("prepare", [("            sync()   # all warps have looked at FAIL\n", "")]),
    "combine: no barrier before puts": ("combine", [("                sync()\n", "")]),
}
SURVIVORS = ("prepare: H-N2 no wait_entered",)
"""Why: ``test_ht_net_lemmas``, where waits also give up by the clock."""


def test_nothing_changed_is_green() -> None:
    for seed in range(12):
        for run in (play, play_failure, play_slow_link):
            run(seed, **{name: mutant(make) for name, make in FACTORIES.items()})


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in SURVIVORS])
def test_kernel_mutant_is_red(name: str) -> None:
    kernel, changes = MUTANTS[name]
    assert first_red(**{kernel: mutant(FACTORIES[kernel], *changes)}) is not None
