"""Staged operations over several teams in the simulator: the bits of one team over an adversarial network, failures, and mutants (L-S1 to L-S7 of
``ll_net_map``)."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from deadlines import Links, machine
from test_ll_net_failures import careful_experts
from test_mutations import effect_mutants, mutant
from test_staged import TEXTS

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.errors import Code, Status
from ncclep_py.kernels import ll_net_combine, ll_net_dispatch, ll_net_rank_major_dispatch
from ncclep_py.kernels.ll_net_staged_vocabulary import LL_NET_STAGED_OPERATIONS
from ncclep_py.kernels.ops import NET_OPS
from ncclep_py.ll_net_map import FLIGHT_COUNT, LLNetMap
from ncclep_py.memory_map import LocalMap, WindowMap
from ncclep_py.signature import OpKind, Signature
from ncclep_py.simulator import DeadlockError, Faults, RaceError, SimulationError, Simulator, ll_net_program
from ncclep_py.simulator.ll_net_program import HALVES, LLNetStagedProgram, LLNetStagedRankMajorProgram
from ncclep_py.simulator.program import Dispatched, _same

MIXED = (*TEXTS, "S0 D1 A0 X0 P00 X1 P11 S0 R1 A0 X0 C0 R0",   # dispatches into slots whose rows are still on their way back
         "D0 D1 X0 P00 X1 C1 S0 R0 A0 X0 P01 P12 R2 R1", "D X P00 S A X P01 R0 P02 R1 R2 D X C")


KINDS = (LLNetStagedProgram, LLNetStagedRankMajorProgram)
LAYOUTS = pytest.mark.parametrize("kind", KINDS, ids=["expert_major", "rank_major"])


def group(seed: int, ranks: int = 4, team: int = 2, tokens: Sequence[int] = (4, 2, 3, 4), faults: Faults | None = None, effects: Any = None,
          blocks: int = 2, most: int = 4, topk: int = 2, hidden: int = 16, kind: type[LLNetStagedProgram] = LLNetStagedProgram,
          **more: Any) -> LLNetStagedProgram:
    sim = Simulator(ranks, seed, ("adversarial", "fair")[seed % 5 == 4], blocks=blocks, effects=effects, faults=faults)
    config = GroupConfig(num_experts=2 * ranks, max_dispatch_tokens_per_rank=most, hidden=hidden, num_topk=topk, num_slots=2, num_staging_slots=4)
    return kind(sim, config, tokens, team_size=team, seed=seed, **more)


def play(seed: int, text: str = "", slow: bool = False, **how: Any) -> LLNetStagedProgram:
    """One schedule, checked against the oracle of one team."""
    p = group(seed, **{"team": (2, 1)[seed % 2]} | how)
    if slow:
        p.network.slow.add(seed % 4)
    p.play(text or MIXED[seed % len(MIXED)])
    p.sim.run()
    p.check()
    return p


# ---- results ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", MIXED)
@LAYOUTS
def test_many_schedules(text: str, kind: type[LLNetStagedProgram]) -> None:
    for seed in range(8):
        assert play(seed, text, kind=kind, epoch=(1, 2**32 - 2)[seed % 2]).network.puts > 0


@pytest.mark.parametrize(("ranks", "team"), [(2, 1), (3, 1), (6, 2), (6, 3), (8, 1), (8, 2), (8, 4)])
@LAYOUTS
def test_teams(ranks: int, team: int, kind: type[LLNetStagedProgram]) -> None:
    for seed in range(4):
        play(seed, ranks=ranks, team=team, kind=kind, tokens=[(3 * r + seed) % 5 for r in range(ranks)])


@pytest.mark.parametrize(("tokens", "topk", "hidden", "blocks"), [((0, 0, 0, 0), 2, 16, 2), ((0, 4, 0, 1), 1, 8, 1), ((9, 2, 12, 4), 4, 264, 3),
                                                                  ((1, 1, 1, 1), 3, 520, 5)])
@LAYOUTS
def test_shapes(tokens: tuple[int, ...], topk: int, hidden: int, blocks: int, kind: type[LLNetStagedProgram]) -> None:
    for seed in range(4):
        play(seed, tokens=tokens, topk=topk, hidden=hidden, blocks=blocks, most=12, kind=kind)


def test_unequal_grids_and_slow_rails() -> None:
    for seed in range(12):
        play(seed, slow=seed % 2 == 0, kind=KINDS[seed // 2 % 2], grids=[(1, 1), (4, 2), (2, 4), (3, 1)])


@LAYOUTS
def test_random_programs(kind: type[LLNetStagedProgram]) -> None:
    """Staged and fused calls of two slots and four staging slots, in any order the host allows."""
    for seed in range(24):
        play(seed, random_text(random.Random(seed)), kind=kind)


def random_text(draw: random.Random) -> str:
    """A sequence for `StagedProgram.play`: slots are free, in flight (S), full (D, A) or made (X); staging slots free or in flight."""
    steps: list[str] = []
    slots, stages = ["free", "free"], [False] * 4
    for _ in range(16):
        slot, stage = draw.randrange(2), draw.randrange(4)
        if slots[slot] == "flying":
            steps.append(f"A{slot}")
            slots[slot] = "full"
        elif slots[slot] == "full" and draw.random() < 0.8:
            steps.append(f"X{slot}")
            slots[slot] = "made"
        elif slots[slot] == "made" and not stages[stage] and draw.random() < 0.6:
            steps.append(f"P{slot}{stage}")
            stages[stage] = True
            slots[slot] = "free"
        elif slots[slot] == "made":
            steps.append(f"C{slot}")
            slots[slot] = "free"
        else:
            staged = draw.random() < 0.6
            steps.append(f"{'DS'[staged]}{slot}")
            slots[slot] = ("full", "flying")[staged]
        if stages[stage] and draw.random() < 0.4:
            steps.append(f"R{stage}")
            stages[stage] = False
    steps += [f"A{i}" for i, held in enumerate(slots) if held == "flying"]
    return " ".join([*steps, *(f"R{i}" for i, flies in enumerate(stages) if flies)])


@LAYOUTS
def test_replays_in_any_order(kind: type[LLNetStagedProgram]) -> None:
    """As a graph does: the same launches and values again and again; what is counted is counted on the device."""
    texts = ("D0 X0 C0", "S0 S1 A0 X0 A1 X1 P00 P11 R0 R1", "D1 X1 P12 R2", "S0 A0 P00 P01 R1 R0")
    for seed in range(4):
        p, graphs = group(seed, kind=kind, epoch=2**32 - 3), []
        for text in texts:
            p.play(text)
            queues = [list(stream.queue) for stream in p.sim.streams]
            p.sim.run()
            p.check()
            graphs.append((queues, list(p.combined)))
            p.dispatched.clear(), p.combined.clear()
        for step in range(6):
            queues, combined = graphs[random.Random(seed * 10 + step).randrange(len(graphs))]
            for c in combined:
                for out in c.out:
                    out.fill_(7)
            for stream, queue in zip(p.sim.streams, queues, strict=True):
                stream.queue.extend(queue)
            p.sim.run()
            p.combined = list(combined)
            p.check()
            p.combined.clear()


# ---- overlap ---------------------------------------------------------------------------------------------------------------------
def send_halves(team: int, **how: Any) -> None:
    """All but rank 1 end two send halves of combines before rank 1 has begun one, whatever the network still carries."""
    p = group(7, team=team, **how)
    p.network.slow.add(3)
    d = p.dispatch()
    p.experts(d)
    for stage in (0, 1):   # an earlier use
        p.send_combine(d, stage)
        p.complete_combine(d, stage)
    for stage in (0, 1):
        p.send_combine(d, stage, ranks=[0, 2, 3])
    p.sim.run()   # a deadlock would raise
    for stage in (0, 1):
        p.send_combine(d, stage, ranks=[1])
        p.complete_combine(d, stage)
    p.sim.run()
    p.check()


@pytest.mark.parametrize("team", [1, 2])
def test_send_halves_of_combines_wait_for_no_send_half(team: int) -> None:
    send_halves(team)
    with pytest.raises(DeadlockError):
        send_halves(team, **mutated("combine_complete", (RELEASE.format("following", "drained", 0), "pass")))


def meet_before_rows_are_written(seed: int, **how: Any) -> None:
    """L-S6 for the host: after a second combine has met all ranks, rows may be copied into the slot, though nothing is complete yet."""
    p = group(seed, team=(2, 1)[seed % 2], **how)
    d = p.dispatch()
    p.experts(d)
    p.send_combine(d, 0)
    before = dataclasses.replace(d, experts=[rows.clone() for rows in d.experts])
    meet(p, d)
    p.experts(d)
    p.send_combine(d, 1)
    p.complete_combine(before, 0)
    p.complete_combine(d, 1)
    p.sim.run()
    p.check()


def test_rows_may_be_written_after_a_meeting() -> None:
    for seed in range(10):
        meet_before_rows_are_written(seed)
    with pytest.raises(RaceError):
        for seed in range(10):
            meet_before_rows_are_written(seed, **mutated("combine", (DRAIN, "drained = 0")))


@LAYOUTS
def test_the_send_half_of_a_dispatch_waits_for_no_row(kind: type[LLNetStagedProgram]) -> None:
    """It ends, on all ranks, while every row and every word of the flight that goes to another team is still on the wire."""
    for seed in range(6):
        p = group(seed, kind=kind)
        send, held = p.network._send, list[tuple[Any, ...]]()
        staged = range(p.shape.net.messages, p.shape.net.returned)

        def hold(item: Any, piece: Any, rank: int, slow: bool = False, p: Any = p, send: Any = send, held: Any = held, staged: Any = staged) -> None:
            row = getattr(item, "kind", "") == "put" and piece[0] - p.windows[rank].ctypes.data in staged
            held.append((item, piece, rank, slow)) if row else send(item, piece, rank, slow)

        p.network._send = hold   # type: ignore[method-assign]
        d = p.send_dispatch()
        p.sim.run()
        assert held and [p.epoch(rank) for rank in range(4)] == [2] * 4
        p.network._send = send   # type: ignore[method-assign]
        for one in held:
            send(*one)
        p.complete_dispatch(d)
        p.experts(d)
        p.combine(d)
        p.sim.run()
        p.check()


# ---- failures --------------------------------------------------------------------------------------------------------------------
@LAYOUTS
@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_refused_half(half: str, kind: type[LLNetStagedProgram]) -> None:
    for seed in range(8):
        p, who = group(seed, team=(2, 1)[seed % 2], kind=kind), seed % 4
        others = [r for r in range(4) if r != who]
        d = p.dispatch()
        if half == "dispatch":
            bad = p.send_dispatch(1, ranks=others)
            p.send_dispatch(1, ranks=[who], status=Status.REFUSED << 24 | 9)
            p.complete_dispatch(bad)
        else:
            p.send_combine(d, ranks=others)
            p.send_combine(d, ranks=[who], status=Status.REFUSED << 24 | 9)
            p.complete_combine(d)
        p.sim.run()
        for rank in range(4):
            record = p.record(rank)
            assert record is not None and (record.code, record.peer, record.seen) == (Code.REFUSED, who, 9)
        p.dispatched.clear(), p.combined.clear()
        p.play("S A X P R P R D X C")
        p.sim.run()
        p.check()


def test_stale_slot_is_told_to_all() -> None:
    p = group(1)
    old, _ = p.dispatch(), p.dispatch()
    p.send_combine(old)
    p.complete_combine(old)
    p.sim.run()
    assert [p.record(rank).code for rank in p.ranks] == [Code.STALE_SLOT] * 4
    p.dispatched.clear(), p.combined.clear()
    p.play("D X P R")
    p.sim.run()
    p.check()


def test_a_difference_is_named() -> None:
    """Ranks that disagree about K of a staging slot's use learn it in the complete half, over the network, too."""
    for team in (2, 1):
        p = group(2, team=team)
        d = p.dispatch()
        for ranks, topk in (([0, 1, 2], 2), ([3], 1)):
            p.num_topk = topk
            p.send_combine(d, ranks=ranks)
        for ranks, topk in (([0, 1, 2], 2), ([3], 1)):
            p.num_topk = topk
            for rank in ranks:
                p._half, p._stage = "combine_complete", 0
                p._launch("combine", rank, 0, d.handle, 0, weights=torch.ones(4, 2), out=torch.zeros(4, 16, dtype=torch.bfloat16))
        p.sim.run()
        told = [p.record(rank) for rank in p.ranks]
        assert [r.code for r in told] == [Code.MISMATCH] * 4 and [r.peer for r in told[:3]] == [3] * 3


@pytest.mark.parametrize("kind", ["late", "dead", "lost"])
def test_an_absent_rank_is_named(kind: str) -> None:
    """In whichever half: by every rank, or by a rank that gave up and could not tell on whom."""
    told = Counter[Any]()
    for seed in range(60):
        draw = random.Random(seed)
        who = {draw.randrange(4)}
        faults = Faults(late=dict.fromkeys(who, draw.randrange(6)) if kind == "late" else {}, timeouts=True,
                        dead=dict.fromkeys(who, draw.randrange(300)) if kind == "dead" else {})
        p = group(seed, team=(2, 1)[seed % 2], faults=faults, kind=KINDS[seed // 2 % 2])
        if kind == "lost":
            who = {seed % 2, 2 + seed // 2 % 2}
            p.network.lost |= {tuple(who), tuple(reversed(tuple(who)))}   # type: ignore[arg-type]
        p.play("S A P R S A P R")
        p.sim.run()
        living = {r for r in range(4) if not (kind == "dead" and r in who)}
        records = {rank: p.record(rank) for rank in living}
        for rank, r in records.items():
            assert r is None or rank in who or {r.culprit, r.peer} & who or records.get(r.culprit) is not None, f"seed {seed}: {records}"
            told[r and r.phase] += 1
        assert len({p.epoch(r) for r in living}) == 1
        assert kind == "late" or any(records.values())
    assert len(told) > 2   # in several phases


def fail(seed: int, text: str = "S A X P R S A X P R", **how: Any) -> Counter[str]:
    """Ranks late, stalled or dead, connections slow or lost, deadlines early. Who was told of none has right results; with all that over (unless
    somebody is gone) the next operations are right."""
    draw, seen = random.Random(seed), Counter[str]()
    who, kind = draw.randrange(4), draw.choice(("late", "slow", "both", "lost", "dead"))
    late, slow = {who: draw.randrange(7)}, {(who + (kind == "both")) % 4: draw.randrange(400)}
    faults = Faults(late=late if kind in ("late", "both") else {}, slow=slow if kind in ("slow", "both") else {},
                    dead={who: draw.randrange(400)} if kind == "dead" else {}, timeouts=True)
    team = draw.choice((2, 1))
    how.setdefault("kind", KINDS[seed // 2 % 2])
    p = group(seed, team=team, tokens=[draw.randrange(5) for _ in range(4)], faults=faults, epoch=draw.choice((1, 2**32 - 2)), **how)
    p.experts = functools.partial(careful_experts, p)   # type: ignore[method-assign]
    p.sim.policy.rush, p.sim.poison = draw.choice((0.002, 0.02, 0.1)), False
    if draw.random() < 0.4:
        p.network.slow.add(draw.randrange(4))
    other = draw.choice([r for r in range(4) if r // team != who // team])
    if kind == "lost":
        p.network.lost.add((who, other))
    p.play(draw.choice((text, "S0 S1 A0 X0 A1 X1 P00 P11 R0 R1 D X C", "D X P00 D X P01 R0 R1", "D X P R P R P R")))
    p.sim.run()
    living = [r for r in range(4) if not (kind == "dead" and r == who)]
    records = {rank: p.record(rank) for rank in living}
    for rank, record in records.items():
        seen["failed" if record else "right"] += 1
        assert record is not None or all(_same(c.out[rank], c.expected[rank]) for c in p.combined), f"rank {rank} was told of no failure"
    assert len({p.epoch(rank) for rank in living}) == 1
    for i in range(5):   # uses and operations are counted alike, whatever failed
        at = p.shape.local.flight(i) + FLIGHT_COUNT
        assert len({int(p.local[rank][at:at + 8].view(np.int64)[0]) for rank in living}) == 1
    if kind not in ("lost", "dead"):
        p.dispatched.clear(), p.combined.clear()
        p.sim.faults, p.sim.scheduler.faulty = Faults(), False
        p.network.slow.clear()
        p.play(MIXED[-1])
        p.sim.run()
        p.check()
        seen["after"] += any(records.values())
    return seen


def test_who_was_told_nothing_is_right_and_so_is_what_comes_after() -> None:
    seen = Counter[str]()
    for seed in range(120):
        seen += fail(seed)
    assert min(seen["failed"], seen["right"]) > 60 and seen["after"] > 15


# ---- mutants ---------------------------------------------------------------------------------------------------------------------
DISPATCH = {Layout.EXPERT_MAJOR: ll_net_dispatch.make_ll_net_dispatch, Layout.RANK_MAJOR: ll_net_rank_major_dispatch.make_ll_net_rank_major_dispatch}


def half_of(layout: Layout, half: str, *changes: tuple[str, str]) -> Callable[..., Any]:
    """A half's kernel factory with pieces of its source replaced."""
    if half == "dispatch_send":
        return functools.partial(mutant(DISPATCH[layout], *changes), send_only=True)
    return mutant(HALVES[layout][half][0], *changes)


def first_red(seeds: int = 150, **how: Any) -> BaseException | None:
    """The first error within `seeds` schedules, every other one with failures; None if the mutant survives."""
    for seed in range(seeds):
        try:
            (play, fail, play, comes_up_late)[seed % 4](seed // 2 if seed % 4 != 1 else seed, **{"kind": LLNetStagedProgram} | how)
        except (SimulationError, AssertionError) as error:
            return error
    return None


def mutated(kernel: str, *changes: tuple[str, str], layout: Layout = Layout.EXPERT_MAJOR) -> dict[str, Any]:
    """How to play with it."""
    kind = KINDS[layout is Layout.RANK_MAJOR]
    if kernel in HALVES[layout]:
        return {"factories": {kernel: half_of(layout, kernel, *changes)}, "kind": kind}
    made = {"dispatch": DISPATCH[layout], "combine": ll_net_combine.make_ll_net_combine}[kernel]
    return {f"make_{kernel}": mutant(made, *changes), "kind": kind}


DRAIN = "drained = drain_staged(comm, rank, RANKS, TEAM, CONTEXTS, local + FLIGHTS, STAGING, epoch, fail, record, timeout)"
WAIT = "code = wait_flight(comm, window, flying, rank, RANKS, TEAM, CONTEXTS, {}, operations, epoch, signature, fail, record, timeout)"
RELEASE = "release(comm, window, released, flight, rank, RANKS, TEAM, CONTEXTS, first_signal, {}, {}, fail, record, {})"
TEAM_WORDS = "publish_head(window, flying, rank, RANKS, TEAM, epoch, signature, {})"
ORIGINS = "store_origins(window, origins, at, first, TOPK, EXPERTS, RANKS, PLANE_ROWS, rank, TEAM, PLACES)"
LAST = ("last_block(local + BLOCKS_DONE) == 1", "1 == 1")
MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "dispatch": {"no origins": [(ORIGINS, "pass")], "no rows kept": [("keep_rows(kept, EXPERTS, RANKS)", "pass")],
                 "no staged drain": [(DRAIN, "drained = 0")]},
    "dispatch_send": {
        "no origins": [(ORIGINS, "pass")], "no rows kept": [("keep_rows(kept, EXPERTS, RANKS)", "pass")],
        "no staged drain": [(DRAIN, "drained = 0")],
        "no words for my team": [(TEAM_WORDS.format("why"), "pass")],
        "no words for other teams": [("put_flight(comm, window, flying, rank, RANKS, TEAM, 0, count + 1, epoch, signature, why)", "pass")],
        "operations not kept": [("advance_count(flight + FLIGHT_COUNT, count)", "pass")],
        "epoch not kept": [("store_header(flight, epoch, handle)", "pass")],
        "no signals": [("                while context < CONTEXTS:\n", "                while context < 0:\n")],
    },
    "dispatch_complete": {
        "no wait": [(WAIT.format(0), "code = 0")], "no rows kept": [("kept_rows(kept, EXPERTS, RANKS)", "pass")],
        "signals of the operation before": [(WAIT.format(0), WAIT.format(0).replace("operations,", "operations - 1,"))],
        "every block is the last": [LAST],
    },
    "combine_send": {
        "no wait for my team's RELEASED": [("code = wait_arrived(window, released, rank, TEAM, epoch, fail, record, timeout)", "code = 0")],
        "no wait for RELEASED": [("code = wait_released(comm, rank, RANKS, TEAM, first_signal, uses, epoch, fail, record, timeout)", "code = 0")],
        "RELEASED of the use before": [("TEAM, first_signal, uses, epoch, fail,", "TEAM, first_signal, uses - 1, epoch, fail,")],
        "nothing is given back late": [("code = " + RELEASE.format("epoch", 0, "timeout"), "code = 0")],
        "given back late unseen": [(RELEASE.format("epoch", 0, "timeout"), RELEASE.format("epoch", 1, "timeout"))],
        "no rows over the network": [
            ("return_rows(comm, window, slot, window, staging, remote, at // MOST, at % MOST, MOST, TOPK, ROW_BYTES, ROW_BYTES, CONTEXTS)",
             "at = at")],
        "no rows in my team": [
            ("push_team_row(window, origins, rows, staging, row, PLANES, PLANE_ROWS, EXPERTS, rank, PLACES, ROW_BYTES, begin, stop)", "pass")],
        "no copy of the table": [("copy_table(table, copied, num_tokens, TOPK)", "pass")],
        "no words for my team": [(TEAM_WORDS.format("told"), "pass")],
        "no words for other teams": [("put_flight(comm, window, flying, rank, RANKS, TEAM, first_signal, uses, epoch, signature, told)", "pass")],
        "no signals": [("signal_sent(comm, rank, RANKS, TEAM, CONTEXTS, first_signal)", "pass")],
        "signals of one context": [("signal_sent(comm, rank, RANKS, TEAM, CONTEXTS,", "signal_sent(comm, rank, RANKS, TEAM, 1,")],
        "uses not counted": [("advance_count(flight + FLIGHT_COUNT, uses)", "pass")],
        "epoch not kept": [("store_header(flight, epoch, handle)", "pass")],
        "every block is the last": [LAST],
    },
    "combine_complete": {
        "no wait": [(WAIT.format("first_signal"), "code = 0")],
        "signals of the use before": [(WAIT.format("first_signal"), WAIT.format("first_signal").replace("operations,", "operations - 1,"))],
        "given back unseen": [("                drained = 0\n", "")],
        "given back before the sums": [
            ("        if code == 0:\n            begin", "        if block_idx() == 0:\n            " + RELEASE.format("following", 1, 0)
             + "\n        if code == 0:\n            begin"),
            ("    trace_begin, stamp = ops.trace_begin, ops.stamp\n", "    trace_begin, stamp = ops.trace_begin, ops.stamp\n"
             "    block_idx = ops.block_idx\n")],
        "every block is the last": [LAST],
    },
}


ARRIVED = "code = wait_arrived(window, arrived, rank, TEAM, epoch, fail, record, timeout)"
RANK_MAJOR_ORIGINS = "store_origins(window, origins, at, first, TOPK, RANKS, RANKS, PLANE_ROWS, rank, TEAM, PLACES)"
TAKE = "take_arrived_rows(window, arrived, arrived, slot + IDS, rank, RANKS, TEAM, TOPK, PLANE_ROWS, epoch, src_rank_counters)"
RANK_MAJOR_MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "dispatch": {"no origins": [(RANK_MAJOR_ORIGINS, "pass")], "no rows kept": [("keep_counters(src_rank_counters, kept, RANKS)", "pass")],
                 "no staged drain": [(DRAIN, "drained = 0")]},
    "dispatch_send": {
        "no origins": [(RANK_MAJOR_ORIGINS, "pass")], "no staged drain": [(DRAIN, "drained = 0")],
        "no ARRIVALS for my team": [("publish_arrived_rows(window, arrived, rank, TEAM, epoch)", "pass")],
        "no ARRIVALS for other teams": [("put_row_tags(comm, window, tags, rank, RANKS, TEAM, epoch)", "pass")],
        "operations not kept": [("advance_count(flight + FLIGHT_COUNT, count)", "pass")],
        "epoch not kept": [("store_header(flight, epoch, handle)", "pass")],
    },
    "dispatch_complete": {
        "no wait for my team": [(ARRIVED, "code = 0")],
        "no wait for other teams": [
            ("code = wait_data(comm, window, arrived, rank, RANKS, TEAM, CONTEXTS, operations - 1, epoch, fail, record, timeout)", "code = 0")],
        "no rows counted": [(TAKE, "pass")], "no rows kept": [("keep_counters(src_rank_counters, kept, RANKS)", "pass")],
        "every block is the last": [LAST],
    },
    "combine_send": {"another team's planes": [("kept + 4 * first, TEAM", "kept, TEAM")],
                     "another team's rows": [("rows + shift * ROW_BYTES", "rows")],
                     "another team's origins": [("origins + 4 * shift", "origins")]},
}


@pytest.mark.parametrize(("kernel", "name"), [(kernel, name) for kernel in MUTANTS for name in MUTANTS[kernel]])
def test_kernel_mutant_is_red(kernel: str, name: str) -> None:
    assert first_red(**mutated(kernel, *MUTANTS[kernel][name])) is not None


@pytest.mark.parametrize(("kernel", "name"), [(kernel, name) for kernel in RANK_MAJOR_MUTANTS for name in RANK_MAJOR_MUTANTS[kernel]])
def test_rank_major_kernel_mutant_is_red(kernel: str, name: str) -> None:
    assert first_red(**mutated(kernel, *RANK_MAJOR_MUTANTS[kernel][name], layout=Layout.RANK_MAJOR)) is not None


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_nothing_changed_is_green(layout: Layout) -> None:
    halves = {half: half_of(layout, half) for half in HALVES[layout]}
    assert first_red(24, factories=halves, kind=KINDS[layout is Layout.RANK_MAJOR]) is None


def test_one_bank_of_messages_is_red() -> None:
    """L-S2: the messages of a staged dispatch that is not complete would be overwritten by the next dispatch's."""
    def one_bank(p: LLNetStagedProgram) -> None:
        for stream in p.sim.streams:
            for launch in stream.queue:
                for parameters in (ll_net_dispatch.PARAMETERS, HALVES[Layout.EXPERT_MAJOR]["dispatch_complete"][1]):
                    if len(launch.args) == len(parameters):
                        args = list(launch.args)
                        args[parameters.index("messages")] = p.shape.net.messages
                        launch.args = tuple(args)

    with pytest.raises((SimulationError, AssertionError)):
        for seed in range(20):
            p = group(seed)
            p.play("S0 S1 A0 A1 X0 X1 C0 C1")
            one_bank(p)
            p.sim.run()
            p.check()


def comes_up_late(seed: int, **how: Any) -> bool:
    """L-S4: a use of a staging slot that comes up only after some ranks have given up on it. The slot's next use is right, though nothing orders it
    after the first but the slot itself. Whether a rank gave up."""
    p = group(seed, team=(2, 1)[seed % 2], tokens=(4, 4, 4, 4), blocks=1, faults=Faults(timeouts=True), **how)
    a, b = p.dispatch(0), p.dispatch(1)
    p.experts(a), p.experts(b)
    p.sim.run()
    late, send, held = seed // 2 % 4, p.network._send, list[tuple[Any, ...]]()

    def hold(item: Any, piece: Any, rank: int, slow: bool = False) -> None:
        network = getattr(getattr(item, "wire", None), "source", -1) == late
        held.append((item, piece, rank, slow)) if network else send(item, piece, rank, slow)

    p.network._send = hold   # type: ignore[method-assign]
    p.send_combine(a, 0)
    p.complete_combine(a, 0)
    p.sim.run()
    records = [p.record(rank) for rank in p.ranks]
    p.sim.faults, p.sim.scheduler.faulty = Faults(), False
    p.send_combine(b, 0)
    p.complete_combine(b, 0)
    p.network._send = send   # type: ignore[method-assign]
    for one in held:
        send(*one)
    p.sim.run()
    p.combined[:] = p.combined[-1:]
    p.check()
    return any(records)


def test_a_use_that_comes_up_late_harms_no_later_one() -> None:
    assert all(comes_up_late(seed) for seed in range(24))


def drain_fails(seed: int, kernel: str, **how: Any) -> int:
    """L-S6: rows of a staged combine are so slow that their receiver gives up its staged drain in the next operation, before others begin it. How
    many ranks were told of that."""
    draw, team = random.Random(seed), (2, 1)[seed % 2]
    with mock.patch.object(ll_net_program, "Network", Links), mock.patch(f"{__name__}.Simulator", machine_like):
        p = group(seed, team=team, tokens=(4, 4, 4, 4), **how)
    p.sim.poison = False
    d = p.dispatch()
    p.experts(d)
    p.sim.run()
    source = draw.randrange(4)
    target = draw.choice([r for r in p.ranks if r // team != source // team])
    p.network.slow_links.add((source, target))   # type: ignore[attr-defined]
    p.sim.scheduler.haste = 0.97   # type: ignore[attr-defined]
    p.send_combine(d, 0)
    p.sim.faults = Faults(late={r: p.sim.streams[r].started + 1 for r in p.ranks if r != target}, timeouts=True)
    if kernel == "combine":
        meet(p, d)
        for rank in p.ranks:
            p.sim.host(rank, functools.partial(write_if_met, p, d, rank))
    else:
        (p.send_dispatch if kernel == "dispatch_send" else p.dispatch)(0)
    p.sim.run()
    return sum(p.record(rank) is not None for rank in p.ranks)


def machine_like(num_ranks: int, seed: int, mode: str, **more: Any) -> Simulator:
    """A simulator whose waits give up by the clock, made like any other."""
    return machine(num_ranks, seed, **more)


def meet(p: LLNetStagedProgram, d: Dispatched) -> None:
    """Enqueue a combine of nothing: all ranks meet."""
    meets = Signature(OpKind.COMBINE, p.layout, p.shape.token_type, 0, 0, 2, p.shape.row_bytes // 16)
    for rank in p.ranks:
        p._launch_signed("combine", rank, 0, d.handle, 0, meets, {"num_tokens": 0, "rows_valid": 0, "weights": 0, "out": 0})


def write_if_met(p: LLNetStagedProgram, d: Dispatched, rank: int) -> None:
    """Write the rows of a slot, if nothing failed."""
    if not p.records[rank].any():
        for at, size in p.rows(d, rank):
            p.sim.memory.write(p.sim.scheduler.current.agent, at, size)


GIVEN_UP = """                if drained != 0:   # FAIL is decided, so all warps read the same
                    {0} = outcome(fail, epoch, {0})
"""
DRAINED = "            if STAGING > 0:\n                " + DRAIN + "\n" + GIVEN_UP
ITSELF = """            if STAGING > 0:
                if drained != 0:
                    code = drained
"""


def order(name: str, status: str) -> list[tuple[str, str]]:
    """Changes that lose a part of L-S6."""
    drained = DRAINED.format(status)
    return {"HEAD before the staged drain": [(drained, ""), (ITSELF, drained + ITSELF)], "HEAD does not tell": [(GIVEN_UP.format(status), "")],
            "goes on itself": [("                    code = drained\n", "                    pass\n")]}[name]


HALVES_OF_DISPATCH = ("dispatch", "dispatch_send")
LOST_ORDERS = [(kernel, name) for kernel in HALVES_OF_DISPATCH for name in ("HEAD before the staged drain", "HEAD does not tell")]
KEPT_ORDERS = {   # what nothing shows, and why
    ("combine", "HEAD before the staged drain", Layout.EXPERT_MAJOR): "who meets waits for TAGS, too, which say so",
    ("combine", "HEAD does not tell", Layout.EXPERT_MAJOR): "the same",
    ("dispatch", "HEAD does not tell", Layout.RANK_MAJOR): "what is still on its way to a rank lies where only its tokens come, and it gives up",
    ("dispatch_send", "HEAD does not tell", Layout.RANK_MAJOR): "the same",
    **{(kernel, "goes on itself", Layout.EXPERT_MAJOR): "it reads its own HEAD" for kernel in (*HALVES_OF_DISPATCH, "combine")},
}


@pytest.mark.parametrize(("kernel", "name"), LOST_ORDERS)
def test_the_staged_drain_comes_before_head_which_tells_if_it_fails(kernel: str, name: str) -> None:
    with pytest.raises(RaceError, match=r"ll_net_return_rows .* reads SLOT0"):
        for seed in range(12):
            drain_fails(seed, kernel, **mutated(kernel, *order(name, "status")))


@pytest.mark.parametrize("kernel", HALVES_OF_DISPATCH)
def test_the_staged_drain_of_rank_major_comes_before_head(kernel: str) -> None:
    assert first_red(40, **mutated(kernel, *order("HEAD before the staged drain", "status"), layout=Layout.RANK_MAJOR)) is not None


@pytest.mark.parametrize(("kernel", "name", "layout"), KEPT_ORDERS)
def test_surviving_order(kernel: str, name: str, layout: Layout) -> None:
    how = mutated(kernel, *order(name, "state" if kernel == "combine" else "status"), layout=layout)
    for seed in range(6):
        assert drain_fails(seed, kernel, **how) > 0
        if kernel == "combine":
            meet_before_rows_are_written(seed, **how)


@pytest.mark.parametrize("kernel", [*HALVES_OF_DISPATCH, "combine"])
def test_a_staged_drain_that_fails_lets_nobody_write(kernel: str) -> None:
    assert all(drain_fails(seed, kernel) > 1 for seed in range(6))


LL_NET_STAGED = {op[0] for op in LL_NET_STAGED_OPERATIONS}
EFFECTS = {name: effects for name, effects in effect_mutants(LL_NET_STAGED, NET_OPS).items() if "st." not in name or not name.endswith(" net")}
"""Without how strong a put is: that is the network's."""
AGAIN = "the operation before it in the same warp has the same fence, and this one nothing new to release"
SURVIVORS = {f"ll_net_signal_sent: {what}": AGAIN for what in ("no 0 fence.acq_rel.sys", "fence.acq_rel.gpu", "fence.acq_rel.sys last")} | {
    "ll_net_put_flight: ld.acquire.gpu net": "words order nothing, and are read after signals",
    "ll_net_put_flight: ld.relaxed.sys net": "the same",
    "ll_net_release: no 6 bar.sync": "the code is what counts; the waits after it have barriers, or the kernel ends"}


@pytest.mark.parametrize("name", [name for name in EFFECTS if name not in SURVIVORS])
def test_effect_mutant_is_red(name: str) -> None:
    if name.startswith("ll_net_release"):
        with pytest.raises((SimulationError, AssertionError)):
            for seed in range(200):
                comes_up_late(seed, effects=EFFECTS[name])
    else:
        assert first_red(effects=EFFECTS[name]) is not None


# ---- plan ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "team"), [(16, 8), (64, 8), (1024, 4)])
def test_plans_of_many_ranks(ranks: int, team: int) -> None:
    config = GroupConfig(num_experts=ranks, max_dispatch_tokens_per_rank=128, hidden=7168, num_topk=8, num_slots=2, num_staging_slots=4)
    window, local = WindowMap.build(config, ranks), LocalMap.build(config)
    net = LLNetMap.build(config, ranks, team, window, local)
    for regions, begin, end in ((net.regions(), window.total_bytes, net.total_bytes), (net.local_regions(), local.total_bytes, net.local_bytes)):
        at = begin
        for _, first, last in regions:
            assert at <= first < last and first % 8 == 0
            at = last
        assert at <= end
    signals = [net.first_signal(i) for i in range(4)]
    assert signals == [2 * ranks * (1 + i) for i in range(4)] and net.num_signals == 10 * ranks
    assert net.slot_messages(1) - net.slot_messages(0) >= ranks * 128 * net.message_bytes and net.returned >= net.slot_messages(2)
