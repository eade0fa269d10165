"""Each lemma of ``ht_net_map`` lost in turn, in operations, kernels and deadlines, where waits give up by the clock: some schedule turns red."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from deadlines import Links, machine
from test_mutations import mutant

from ncclep_py import ht_net_map
from ncclep_py.config import Algorithm, GroupConfig, Layout, OverflowPolicy
from ncclep_py.errors import ErrorRecord
from ncclep_py.simulator import Faults, RaceError, SimulationError, ht_net_ops, ht_net_program, waits
from ncclep_py.simulator.ht_net_program import FACTORIES, HTNetProgram

SEEDS = 40
GROUPS = ((2, 1), (4, 2), (3, 1), (6, 2))
"""Ranks, and ranks of a team."""
BEFORE = {"U": "U D X C U", "D": "U D X C U", "C": "U D X C D X", "B": "U D X C", "G": "U D X C B X G B X"}
KINDS = {"prepare": "U", "dispatch": "DB", "combine": "CG"}
FAULTS = ("dead", "lost", "slow", "late", "stalled", "cut", "gone")
"""A rank dies; a link loses all from some moment on; a rank's links are slow both ways, or only out; a rank comes late; a link is lost after HEAD;
a rank is not there and takes nothing."""


def program(seed: int, effects: Mapping[str, Sequence[str]] | None = None, **factories: Callable) -> HTNetProgram:
    """A group that has worked for a while comes from `seed`; every other one has fewer channels than chunks."""
    ranks, team = GROUPS[seed % 4]
    budget, channels = (0, 5)[seed % 3 > 0], (16, 2)[seed // 8 % 2]
    config = GroupConfig(num_experts=2 * ranks, max_dispatch_tokens_per_rank=5, hidden=16, num_topk=2, num_slots=2,
                         algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=budget,
                         overflow_policy=OverflowPolicy.DROP if budget else OverflowPolicy.TRAP)
    with mock.patch.object(ht_net_map, "MAX_CHANNELS", channels), mock.patch.object(ht_net_program, "Network", Links):
        sim = machine(ranks, seed, effects=effects, blocks=1 + seed % 3 // 2)
        return HTNetProgram(sim, config, (Layout.FLAT, Layout.EXPERT_MAJOR)[seed // 4 % 2], (3, 4, 2, 3, 5, 1)[:ranks], team,
                            chunk_tokens=1 + seed % 2, seed=seed, alignment=2, **factories)


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


def disturb(p: HTNetProgram, kind: str, fault: str, who: int, draw: random.Random) -> set[int]:
    """Let something go wrong with `who`: the ranks that may be blamed for it."""
    team, network, scheduler = p.team_size, p.network, p.sim.scheduler
    rails = [r for r in p.ranks if r != who and (r - who) % team == 0]
    other = draw.choice(rails)
    if fault in ("slow", "late"):   # both ways, or what it sends
        network.slow_links |= {(who, r) for r in rails} | {(r, who) for r in rails if fault == "slow"}
        return {who, *rails}
    if fault == "lost":
        network.cuts[who, other] = draw.randrange(12)
        return {who, other}
    if fault == "cut":   # after HEAD, and in an update that tells KEPT after HITS: three puts and signals each
        first, end = (3, 12) if kind != "U" else (6, 9) if p.config.max_recv_tokens_per_rank else (3, 6)
        network.cuts[who, other] = draw.randrange(first, end)
        scheduler.tie = p.config.wait_ns // 8   # so nobody else is to blame, even if there was no time to tell
    elif fault == "gone":   # what is put to it does not arrive
        network.cuts |= dict.fromkeys([(r, who) for r in rails], 0)
        p.sim.faults = Faults(dead={who: scheduler.rank_steps[who]}, timeouts=True)
    elif fault == "dead":
        p.sim.faults = Faults(dead={who: scheduler.rank_steps[who] + draw.randrange(draw.choice((10, 120)))}, timeouts=True)
        scheduler.tie = p.config.wait_ns // 8 if kind == "U" else 0
    else:
        p.sim.faults = Faults(late={who: p.sim.streams[who].started}, timeouts=True)
    return {who}


def play(seed: int, kind: str, fault: str, strict: bool = False, times: int = 0, **how: Any) -> HTNetProgram:
    """Something goes wrong in operations of `kind`: results are right, or ranks know who is to blame (of a lost link, if `strict`: its sender)."""
    p, draw = program(seed, **how), random.Random(seed)
    p.play(BEFORE[kind])
    p.sim.run()
    p.check()
    who, p.sim.scheduler.haste = draw.randrange(p.sim.num_ranks), draw.choice((0.02, 0.3, 0.7, 0.97))
    blamed = disturb(p, kind, fault, who, draw)
    several = fault in ("slow", "late", "stalled")
    outcomes = Outcomes(p, kind, times or (1 + seed % 3 if several else 1))
    p.sim.run()
    outcomes.check()
    records = outcomes.records[0]
    for rank, record in records.items():
        if record is None or record.culprit in ({who} if strict else blamed) or (fault == "stalled" and rank == who):
            continue
        raise AssertionError(f"rank {rank} blames {record}")
    if p.network.slow_links:
        p.network.slow_links.clear()
        p.play("U D X C B X G")
        p.sim.run()
        p.check()
    return p


Schedule = tuple[int, str, str]


def first_red(kinds: str, faults: Sequence[str] = FAULTS, seeds: Sequence[int] = range(SEEDS), **how: Any) -> Schedule | None:
    """Seed, kind and fault of the first error; None if the mutant survives."""
    for seed in seeds:
        for kind in kinds:
            for fault in faults:
                try:
                    play(seed, kind, fault, **how)
                except (SimulationError, AssertionError):
                    return seed, kind, fault
    return None


def test_nothing_changed_is_green() -> None:
    for seed in range(2):
        for kind in BEFORE:
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
GAVE_UP = "return value >> 32 == epoch and value >> 24 & 3 == Status.ABORT"
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
    "H-N5 later HEADs, too": ("_judge_head", waits, [(TWICE, TWICE.replace("or verdict.code:", "or verdict.code not in (0, Code.LEFT_BEHIND):")),
                                                     ("return verdict if theirs", "return Verdict() if theirs")]),
    "H-N5 its holder is not to blame": ("ht_net_wait_heads", ht_net_ops, [("peer=holder, culprit=holder", "peer=v.peer")]),
    "H-N9 nobody looks whether the forwarder gave up": ("_forwarded", ht_net_ops, [(GAVE_UP, "return False")]),
}
# ---- kernels -----------------------------------------------------------------------------------------------------------------------
TAG = "put_tag(comm, window, peer, context, TAGS + place * TAG_BYTES + chunk * 8, epoch, why)"
TAG_HITS = "put_tag(comm, window, peer, 0, TAGS + place * TAG_BYTES, epoch, why)"
PUBLISH_HITS = "                publish_hits(window, HITS, rank, RANKS, EXPERTS, BY_RANK, epoch, TEAM)\n"
ENTER_HEAD = "            code = enter(comm"
TELL_AT_ONCE = ("            if code != 0 and warp_idx() == 0:   # at once: my other blocks and my team may wait twice as long\n"
                "                publish_abort(window, HEADS, ARRIVED, rank, RANKS, TEAM, epoch, fail)\n")
TAG_KEPT = "put_tag(comm, window, to * TEAM + index, 0, TAGS + place * TAG_BYTES + 8, epoch, why)"
SIGNAL = "signal(comm, peer, context, team * SIGNALS + 1 + channel, amount)"
SIGNAL_HITS = "signal(comm, peer, 0, team * SIGNALS + 1, 1)"
NEXT_PEER = "distance += warps()\n"
WAIT = """
                for distance in range(1, TEAMS):
                    if code == 0:
                        source = (team + TEAMS - distance) % TEAMS
                        code = wait_chunk(comm, window, TAGS + (distance - 1) * TAG_BYTES + chunk * 8, source * TEAM + index, channel % CONTEXTS,
                                          source * SIGNALS + 1 + channel, count * ADDS + turn + 1, rank, epoch, fail, record, timeout)
"""
WAIT_ENTERED = "code = wait_entered(comm, rank, RANKS, TEAM, CHANNELS, count, epoch, fail, record, timeout)"
SHARED = {
    "H-N2 no wait_entered": [(WAIT_ENTERED, "code = 0")],
    "H-N3 the first chunk's signal for all of a channel": [("count * ADDS + turn + 1", "count * ADDS + 1")],
    "H-N4 TAGs never tell": [(TAG, TAG.replace("why", "0"))],
    "H-N4 TAGs after their signals": [(TAG, "pass"), (SIGNAL, SIGNAL + "\n                    " + TAG)],
    "H-N4 who gives up puts no TAG": [(TAG, "if code == 0: " + TAG)],
    "H-N4 who gives up does not signal": [(SIGNAL, SIGNAL.replace("amount", "amount if code == 0 else 0"))],
    "H-N6 a chunk is waited for before the next is sent": [(NEXT_PEER, NEXT_PEER + WAIT)],
}
KERNELS = {f"{kernel}: {name}": (kernel, changes) for kernel in ("dispatch", "combine") for name, changes in SHARED.items()} | {
    "prepare: H-N2 no wait_entered": ("prepare", SHARED["H-N2 no wait_entered"]),
    "prepare: H-N4 TAGs of HITS never tell": ("prepare", [(TAG_HITS, TAG_HITS.replace("why", "0"))]),
    "prepare: H-N4 no TAG of HITS": ("prepare", [(TAG_HITS, "pass")]),
    "prepare: H-N4 no TAG of KEPT": ("prepare", [(TAG_KEPT, "pass")]),
    "prepare: H-N4 who gives up does not signal HITS": ("prepare", [(SIGNAL_HITS, SIGNAL_HITS.replace(", 1)", ", 1 if code == 0 else 0)"))]),
    "prepare: H-N4 who gives up does not signal KEPT": ("prepare", [("* SIGNALS + 1, ADDS - 1)", "* SIGNALS + 1, ADDS - 1 if code == 0 else 0)")]),
    "prepare: H-N9 HITS as long as their forwarder": ("prepare", [("BY_RANK, epoch, fail, record, timeout + timeout)",
                                                                    "BY_RANK, epoch, fail, record, timeout)")]),
    "prepare: H-N9 KEPT as long as their forwarder": ("prepare", [("(timeout >> 1)", "(timeout >> 2)")]),
    "prepare: H-N9 KEPT chunks as long as HITS": ("prepare", [("2 * timeout + (timeout >> 2)", "2 * timeout")]),
    "prepare: H-N9 who gives up tells when all its blocks have": ("prepare", [(TELL_AT_ONCE, "")]),
    "dispatch: H-N9 ARRIVED as long as chunks": ("dispatch", [("timeout + timeout", "timeout")]),
}

SURVIVORS = {
    "H-N1 drain of channels only": "channel 0's signals come after HEAD on the same context, and of HEAD signals only their number counts",
    "H-N5 later HEADs, too": "who was left behind learns it from the TAGs of its rail peers, which gave up for want of its HEAD",
    "prepare: H-N2 no wait_entered": "a rail peer's last signals of an update follow all it reads of mine there, and the drain waits for them",
}
"""Losses that nothing shows, and why. Each is asserted to survive, so that this list stays true."""
WHERE: dict[str, tuple[str, Sequence[str]]] = {
    # where a loss shows soonest: kinds and faults; all of them for the others
    "H-N1": ("DC", ("late", "slow")), "H-N2": ("DCU", ("slow",)), "H-N3": ("DCBG", ("lost",)), "H-N4": ("DCU", ("lost", "late")),
    "H-N5": ("DC", ("gone", "slow", "stalled")), "H-N6": ("DC", ("cut",)), "H-N9": ("UD", ("cut", "dead")),
}
RARE = {"H-N4 any epoch's TAG": range(121, 121 + SEEDS), "prepare: H-N9 KEPT chunks as long as HITS": range(25, 25 + SEEDS),
        "prepare: H-N9 who gives up tells when all its blocks have": range(53, 53 + SEEDS)}
"""Where to begin when only a few schedules show a loss: two TAGs under way at once, and all of it must come within one deadline; or a rank must die
between two of its words."""


def red(name: str, seeds: Sequence[int]) -> Schedule | None:
    """The first schedule within `seeds` that shows the loss called `name`."""
    kinds, faults = WHERE[name[name.index("H-N"):][:4]]
    if name in KERNELS:
        kernel, changes = KERNELS[name]
        return first_red("".join(k for k in KINDS[kernel] if k in kinds), faults, seeds, **{kernel: mutant(FACTORIES[kernel], *changes)})
    function, module, texts = OPERATIONS[name]
    with changed((module, function, texts)):
        return first_red(kinds, faults, seeds)


@pytest.mark.parametrize("name", [name for name in OPERATIONS | KERNELS if name not in SURVIVORS])
def test_a_lost_lemma_is_red(name: str) -> None:
    found = red(name, RARE.get(name, range(SEEDS)))
    assert found is not None
    play(*found)   # nothing else is wrong with it


@pytest.mark.parametrize("name", SURVIVORS)
def test_surviving_loss(name: str) -> None:
    assert red(name, range(6)) is None


def test_a_tag_of_kept_tells_of_a_failure_before_it() -> None:
    """Who gave up for want of HITS tells in KEPT's TAG on whom. (It may come too late, H-N9: only where it comes in time a loss shows.)"""
    silent = mutant(FACTORIES["prepare"], (TAG_KEPT, TAG_KEPT.replace("why", "0")))

    def named(seed: int, **how: Any) -> bool:
        return first_red("U", ("lost",), [seed], strict=True, **how) is None

    assert any(named(seed) and not named(seed, prepare=silent) for seed in range(SEEDS))


# ---- what once was wrong ------------------------------------------------------------------------------------------------------------
def test_a_third_update_does_not_write_hits_that_a_put_may_still_read() -> None:
    """H-N8: after two updates that were given up over a slow link."""
    early = mutant(FACTORIES["prepare"], (PUBLISH_HITS, "                pass\n"), (ENTER_HEAD, PUBLISH_HITS[4:] + ENTER_HEAD))
    for seed in range(SEEDS):
        play(seed, "U", "late", times=3)
    with pytest.raises(RaceError, match=r"(?s)^(?=.*ht_net_publish_hits)(?=.*ht_net_put ).* HITS\["):
        for seed in range(SEEDS):
            play(seed, "U", "late", times=3, prepare=early)


def test_who_waits_for_kept_waits_longer_than_their_sender_for_hits() -> None:
    """H-N9: else it names a rank that gave up itself, and is not to blame."""
    short = mutant(FACTORIES["prepare"], ("2 * timeout + (timeout >> 2)", "timeout"), ("2 * timeout + (timeout >> 1)", "2 * timeout"))
    faults = ("dead", "lost", "late")
    seeds = range(SEEDS // 2, SEEDS)
    assert first_red("U", faults, seeds) is None
    assert first_red("U", faults, seeds, prepare=short) is not None


def waited(seed: int, fault: str, **how: Any) -> float:
    """How long an update in which something goes wrong takes, in deadlines, to eighths."""
    p = play(seed, "U", fault, times=1, **how)
    return round(8 * p.sim.scheduler.now / p.config.wait_ns) / 8


def test_an_update_ends_within_two_and_a_half_deadlines() -> None:
    """H-N9: whatever phase a rank or a link is lost in. Each further T in the chain of waits would show."""
    longer = mutant(FACTORIES["prepare"], ("2 * timeout + (timeout >> 2)", "3 * timeout"), ("2 * timeout + (timeout >> 1)", "4 * timeout"))
    faults = ("dead", "lost", "cut", "gone")
    assert {waited(seed, fault) for seed in range(SEEDS // 2) for fault in faults} == {0, 1, 2, 2.25}   # nothing lost in time; a wait of each length
    assert any(waited(seed, fault, prepare=longer) > 2.5 for seed in range(SEEDS) for fault in faults)


def test_who_gives_up_over_the_network_tells_at_once() -> None:
    """H-N9: a link lost before KEPT costs one deadline, since the rank at its end and those beside it do not wait for more from it."""
    late = mutant(FACTORIES["prepare"], (TELL_AT_ONCE, ""))
    assert 2 not in {waited(seed, "lost") for seed in range(SEEDS)}
    assert any(waited(seed, "lost", prepare=late) == 2 for seed in range(SEEDS))
    with changed((ht_net_ops, "_forwarded", [(GAVE_UP, GAVE_UP.replace("return", "return not direct and"))])):
        assert any(waited(seed, "lost") == 2 for seed in range(2 * SEEDS))
