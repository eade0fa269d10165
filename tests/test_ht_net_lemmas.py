"""Each lemma of ``ht_net_map`` lost in turn, in operations, kernels and deadlines, where waits give up by the clock: some schedule turns red."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from deadlines import Links, machine
from test_mutations import mutant

from ncclep_py import ht_net_map
from ncclep_py.config import Algorithm, GroupConfig, Layout, OverflowPolicy
from ncclep_py.errors import ErrorRecord
from ncclep_py.simulator import Faults, SimulationError, ht_net_ops, ht_net_program, waits
from ncclep_py.simulator.ht_net_program import FACTORIES, HTNetProgram

SEEDS = 40
GROUPS = ((2, 1), (4, 2), (3, 1), (6, 2))
"""Ranks, and ranks of a team."""
BEFORE = {"U": "U D X C U", "D": "U D X C U", "C": "U D X C D X", "B": "U D X C", "G": "U D X C B X G B X"}
KINDS = {"prepare": "U", "dispatch": "DB", "combine": "CG", "": "UDCBG"}
FAULTS = ("dead", "lost", "slow", "late", "stalled")


def program(seed: int, **factories: Callable) -> HTNetProgram:
    """A group that has worked for a while comes from `seed`; every other one has fewer channels than chunks."""
    ranks, team = GROUPS[seed % 4]
    budget, channels = (0, 5)[seed % 3 == 2], (16, 2)[seed // 4 % 2]
    config = GroupConfig(num_experts=2 * ranks, max_dispatch_tokens_per_rank=5, hidden=16, num_topk=2, num_slots=2,
                         algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=budget,
                         overflow_policy=OverflowPolicy.DROP if budget else OverflowPolicy.TRAP)
    with mock.patch.object(ht_net_map, "MAX_CHANNELS", channels), mock.patch.object(ht_net_program, "Network", Links):
        return HTNetProgram(machine(ranks, seed, blocks=1 + seed % 3 // 2), config, (Layout.FLAT, Layout.EXPERT_MAJOR)[seed // 2 % 2],
                            (3, 4, 2, 3, 5, 1)[:ranks], team, chunk_tokens=1 + seed % 2, seed=seed, alignment=2, **factories)


class Outcomes:
    """Records and results of every rank after each of several operations of one kind."""

    def __init__(self, p: HTNetProgram, kind: str, times: int) -> None:
        """Enqueue them."""
        self.p, self.times = p, times
        self.records: list[dict[int, ErrorRecord | None]] = [{} for _ in range(times)]
        self.checks: list[list[Callable[[int], None]]] = []
        for i in range(times):
            p.checks.clear()
            p.play(kind)
            if kind in "DB":
                received: dict[int, Any] = {}
                self.checks.append([functools.partial(self._received, received, *p.expected[0])])
            elif kind == "U":
                self.checks.append([functools.partial(self._counters, [*p.checks])])
            else:
                self.checks.append([functools.partial(self._combined, [*p.checks])])
                received = {}
            for rank in p.ranks:
                p.sim.host(rank, functools.partial(self._collect, self.records[i], received if kind in "DB" else None, rank))
        p.checks.clear()

    def _collect(self, records: dict[int, ErrorRecord | None], received: dict[int, Any] | None, rank: int) -> None:
        records[rank] = self.p.record(rank)
        if received is not None:
            n = len(self.p.routings[0].plan.row_src[rank])
            rows, idx, weights = (t.clone() for t in self.p.slot_tensors(rank, 0))
            received[rank] = [rows, idx, weights, rows[n:].view(torch.uint8)]

    def _received(self, received: dict[int, Any], expected: Sequence[Any], backward: bool, rank: int) -> None:
        self.p._check_received(received[rank], expected[rank], len(self.p.routings[0].plan.row_src[rank]), backward, rank)

    def _counters(self, checks: list[Callable], rank: int) -> None:
        with mock.patch.object(self.p, "ranks", [rank]):
            for check in checks:
                check()

    def _combined(self, checks: list[Any], rank: int) -> None:
        for check in checks:
            if check.args[-1] == rank:
                check()

    def check(self) -> None:
        """Who has no error has the right results; who lives has done all operations."""
        for records, checks in zip(self.records, self.checks, strict=True):
            assert records.keys() | self.p.sim.scheduler.dead == set(self.p.ranks)
            for rank in records:
                for check in checks if records[rank] is None else ():
                    check(rank)


def play(seed: int, kind: str, fault: str, **how: Any) -> tuple[HTNetProgram, Outcomes]:
    """A rank dies, loses a connection or has a slow link in an operation of `kind`: results are right or ranks know who is to blame."""
    p, draw = program(seed, **how), random.Random(seed)
    p.play(BEFORE[kind])
    p.sim.run()
    p.check()
    ranks, team = p.sim.num_ranks, p.team_size
    who = draw.randrange(ranks)
    rails = [r for r in range(ranks) if r != who and (r - who) % team == 0]
    blamed = {who}
    if fault in ("slow", "late", "stalled"):   # both ways, or what it sends
        p.network.slow_links |= {(who, r) for r in rails} | {(r, who) for r in rails if fault == "slow"}
        blamed |= set(rails)
    elif fault == "lost":
        other = draw.choice(rails)
        p.network.cuts[who, other] = draw.randrange(12)
        blamed.add(other)
    elif fault == "dead":
        p.sim.faults = Faults(dead={who: p.sim.scheduler.rank_steps[who] + draw.randrange(draw.choice((10, 120)))}, timeouts=True)
    else:
        p.sim.faults = Faults(late={who: p.sim.streams[who].started}, timeouts=True)
    times = 1 if kind == "U" else 1 + seed % 3   # the second update after one that failed writes HITS that a put may still read (H-N8)
    outcomes = Outcomes(p, kind, times if p.network.slow_links or fault == "stalled" else 1)
    p.sim.run()
    outcomes.check()
    records = outcomes.records[0]
    for rank, record in records.items():
        told = record is None or record.culprit in blamed or (fault == "stalled" and rank == who)
        assert told or (kind == "U" and p.config.max_recv_tokens_per_rank and records.get(record.culprit)), f"rank {rank} blames {record}"   # H-N9
    if p.network.slow_links:
        p.network.slow_links.clear()
        p.play("U D X C B X G")
        p.sim.run()
        p.check()
    return p, outcomes


def first_red(kinds: str, seeds: int = SEEDS, faults: Sequence[str] = FAULTS, **how: Any) -> BaseException | None:
    """The first error; None if the mutant survives."""
    for seed in range(seeds):
        for kind in kinds:
            for fault in faults:
                try:
                    play(seed, kind, fault, **how)
                except (SimulationError, AssertionError) as error:
                    return error
    return None


def test_nothing_changed_is_green() -> None:
    for seed in range(8):
        for kind in KINDS[""]:
            for fault in FAULTS:
                play(seed, kind, fault)


# ---- operations --------------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def changed(*changes: tuple[Any, str, Sequence[tuple[str, str]]]) -> Iterator[None]:
    """Functions of the simulator with pieces of their source replaced: (module, function, (old text, new text) ...)."""
    with contextlib.ExitStack() as stack:
        for module, name, texts in changes:
            stack.enter_context(mock.patch.object(module, name, mutant(getattr(module, name), *texts)))
        yield


ENTER = "ht_net_enter"
DRAIN = "left = _wait_signals(call, task, access, comm, [s for peer in rails for s in ids(peer)])"
DRY = "if dry.get(peer):"
HEAD_SIGNAL = "            network.signal(task, peer, 0"
CHANNEL_SIGNALS = " + [(peer, q % contexts, base + 1 + q, count * adds) for q in range(channels)]"
EPOCH = "if value >> 32 != epoch:"
GAVE_UP = "return not direct and value >> 32 == epoch and value >> 24 & 3 == Status.ABORT"
BANKS = "((epoch & 1) * num_ranks + source)"
JUDGED = "    if verdict is None or verdict.code:\n        return verdict\n"
TWICE = JUDGED + "    verdict = _judge(low & ~LOW, epoch, source, late)\n" + JUDGED
OPERATIONS: dict[str, tuple[str, Any, Sequence[tuple[str, str]]]] = {
    # lemma and what is lost: (function, its module, changes)
    "H-N1 no drain": (ENTER, ht_net_ops, [(DRAIN, "left = None"), (DRY, "if True:")]),
    "H-N1 HEAD although puts are under way": (ENTER, ht_net_ops, [(DRY, "if True:")]),
    "H-N1 drain of HEAD only": (ENTER, ht_net_ops, [(CHANNEL_SIGNALS, "")]),
    "H-N1 drain of channels only": (ENTER, ht_net_ops, [("[(peer, 0, base, count)] + ", "")]),
    "H-N1 drain of one channel": (ENTER, ht_net_ops, [("for q in range(channels)]", "for q in range(1)]")]),
    "H-N1 drain of all but the last operation": (ENTER, ht_net_ops, [("count * adds)", "(count - 1) * adds)")]),
    "H-N1 who is not dry does not signal HEAD": (ENTER, ht_net_ops, [(HEAD_SIGNAL, "            if dry.get(peer): network.signal(task, peer, 0")]),
    "H-N2 no wait for HEAD signals": ("ht_net_wait_entered", ht_net_ops, [("count + 1) for p", "count) for p")]),
    "H-N4 any epoch's TAG": ("ht_net_wait_chunk", ht_net_ops, [(EPOCH, "if False:")]),
    "H-N4 a TAG's culprit is not told": ("ht_net_wait_chunk", ht_net_ops, [("peer, detail, epoch, epoch)", "peer, peer, epoch, epoch)")]),
    "H-N5 one bank": ("_head", ht_net_ops, [(BANKS, "source")]),
    "H-N5 HEAD in my own window": ("ht_net_wait_heads", ht_net_ops, [("else first + source % team_size", "else rank")]),
    "H-N5 later HEADs, too": ("_judge_head", waits, [(TWICE, TWICE.replace("or verdict.code:", "or verdict.code not in (0, Code.LEFT_BEHIND):"))]),
    "H-N5 its holder is not to blame": ("ht_net_wait_heads", ht_net_ops, [("peer=holder, culprit=holder", "peer=v.peer")]),
    "H-N9 nobody looks whether the forwarder gave up": ("_forwarded", ht_net_ops, [(GAVE_UP, "return False")]),
}
if __name__ == "__main__":
    import sys
    import time
    for name, change in OPERATIONS.items():
        if len(sys.argv) > 1 and not __import__("re").search(sys.argv[1], name):
            continue
        t = time.time()
        with changed((change[1], change[0], change[2])):
            error = first_red(KINDS[""], int(sys.argv[2]) if len(sys.argv) > 2 else 8)
        print(name, "|", type(error).__name__, str(error)[:250].replace("\n", " "), round(time.time() - t, 1), flush=True)
