"""Masks over several teams in the simulator: dead, slow and late ranks over an adversarial network; each rule of ``ll_net_member_map`` is needed.

In every schedule the survivors of every operation agree on mask and epoch, and have the oracle's bits under that mask.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_mask_protocol import KINDS, TEXTS, agree_by_epoch, faults_of
from test_mutations import effect_mutants, mutant

from ncclep_py.config import GroupConfig
from ncclep_py.errors import Code
from ncclep_py.kernels.ll_net_mask_clean import make_ll_net_mask_clean
from ncclep_py.kernels.ll_net_masked_combine import make_ll_net_masked_combine
from ncclep_py.kernels.ll_net_masked_dispatch import make_ll_net_masked_dispatch
from ncclep_py.kernels.ll_net_masked_rank_major_dispatch import make_ll_net_masked_rank_major_dispatch
from ncclep_py.kernels.ll_net_masked_shape import LLNetMaskedShape
from ncclep_py.kernels.ll_net_masked_vocabulary import LL_NET_MASKED_OPERATIONS
from ncclep_py.kernels.ops import NET_OPS
from ncclep_py.kernels.shape import KernelShape, Wire
from ncclep_py.simulator import Faults, SimulationError, Simulator, ll_net_masked_ops
from ncclep_py.simulator.ll_net_masked_program import LLNetMaskedProgram, LLNetMaskedRankMajorProgram
from ncclep_py.simulator.network import Network

SEEDS = 120
TEAMS = [(4, 2), (4, 1), (8, 2)]
PROGRAMS = (LLNetMaskedProgram, LLNetMaskedRankMajorProgram)


@pytest.fixture(autouse=True)
def nothing_is_put_to_who_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """T-N2: also in every test here. Only ``mask_clean`` asks for them again."""
    issue = Network._issue

    def checked(self: Network, task: Any, peer: int, *given: Any, **more: Any) -> None:
        told = getattr(self, "told", None)
        may = told is None or task.block.launch.label == "clean" or not told(task.rank) >> peer & 1
        assert may, f"rank {task.rank} puts to rank {peer}, which it told to be out"
        issue(self, task, peer, *given, **more)

    monkeypatch.setattr(Network, "_issue", checked)


def group(sim: Simulator, team: int, seed: int = 0, program: type[LLNetMaskedProgram] | None = None, **more: object) -> LLNetMaskedProgram:
    """A small group; of either layout by `seed`, if `program` does not say which."""
    config = GroupConfig(num_experts=2 * sim.num_ranks, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=2, num_slots=2, enable_mask=True)
    p = (program or PROGRAMS[seed // 4 % 2])(sim, config, (4, 2, 3, 4, 0, 1, 2, 3)[:sim.num_ranks], team, seed=seed, **more)
    p.network.told = lambda rank: int(p.local_word(rank, p.shape.members.told)[0])   # type: ignore[attr-defined]
    return p


def play(seed: int, kind: str = "", ranks: int = 4, team: int = 0, effects: Any = None, **more: object) -> LLNetMaskedProgram:
    """One schedule with a fault, checked."""
    draw = random.Random(seed)
    sim = Simulator(ranks, seed, ("adversarial", "fair")[seed % 2], blocks=2, effects=effects,
                    faults=faults_of(draw, ranks, kind or draw.choice(KINDS)))
    sim.policy.rush = draw.choice((0, 0.002, 0.02, 0.1))
    p = group(sim, team or draw.choice((1, 2)), seed, **more)
    p.network.slow = {draw.randrange(ranks)} if seed % 3 == 0 else set()
    p.play(TEXTS[seed % 3])
    sim.run()
    p.check()
    return p


@pytest.mark.parametrize(("ranks", "team"), TEAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_survivors_agree_and_have_the_oracles_bits(kind: str, ranks: int, team: int) -> None:
    masked = sum(any(e.members() and e.mask() for e in play(seed, kind, ranks, team).ended) for seed in range(5 if ranks == 8 else 16))
    assert masked > 2 or "dead" not in kind


def test_two_ranks() -> None:
    for seed in range(30):
        play(seed, ("dead", "late")[seed % 2], 2, 1)


@pytest.mark.parametrize(("ranks", "team"), [(2, 1), (6, 3), *TEAMS])
def test_without_faults_nobody_is_masked(ranks: int, team: int) -> None:
    for seed in range(4):
        p = group(Simulator(ranks, seed, ("adversarial", "fair")[seed % 2]), team, seed)
        p.play(TEXTS[seed % 3])
        p.sim.run()
        p.check(everybody=True)
        assert p.network.puts and all(p.notice(r) is None and not e.mask() for r in p.ranks for e in p.ended)


def test_epochs_wrap() -> None:
    for seed in range(12):
        sim = Simulator(4, seed, "adversarial", faults=Faults(dead={seed % 4: 40 * seed}, timeouts=True, bounded=True))
        p = group(sim, 1 + seed % 2, seed, epoch=(1 << 32) - 2)
        p.play("D X C D X C")
        sim.run()
        p.check()


def test_unequal_grids() -> None:
    for seed in range(12):
        sim = Simulator(4, seed, ("adversarial", "fair")[seed % 2], faults=Faults(dead={seed % 4: 37 * seed}, timeouts=True, bounded=True))
        p = group(sim, 2, seed, grids=[(1, 1), (3, 2), (2, 3), (6, 1)])
        p.play("D X C D X C")
        sim.run()
        p.check()


def test_who_is_masked_is_told() -> None:
    told = collections.Counter()
    for seed in range(30):
        p = play(seed, "dead")
        last = [e for e in p.ended if e.members()][-1]
        for rank in last.members():
            notice = p.notice(rank)
            assert (notice is not None) == bool(last.mask())
            if notice is not None:
                assert notice.code == Code.MASKED and last.mask() >> notice.peer & 1 and notice.rank == rank
                told[notice.peer] += 1
    assert set(told) == {0, 1, 2, 3}


def late(seed: int, program: type[LLNetMaskedProgram] | None = None, **how: Any) -> LLNetMaskedProgram:
    """A rank comes when the others have gone on without it, and once more when they go on."""
    who = seed % 4
    sim = Simulator(4, seed, ("adversarial", "fair")[seed // 4 % 2], effects=how.pop("effects", None), faults=Faults(timeouts=True, bounded=True))
    p = group(sim, 1 + seed // 8 % 2, seed, program or PROGRAMS[seed // 16 % 2], **how)
    others = [r for r in range(4) if r != who]
    d = p.dispatch(ranks=others)
    sim.run()
    for rank in others:
        p.records[rank][8:] = 0
    p.dispatched, ended = [d], p.ended[:]
    if isinstance(p, LLNetMaskedRankMajorProgram):
        weights, global_ids = p.weights[d.handle]
        more: dict[str, Any] = {"topk_weights": torch.rand(d.topk_idx[who].shape), "src_rank_counters": d.counters[who],
                                "global_ids": int(global_ids)}
    else:
        weights, more = [], {"expert_counters": d.counters[who]}
    p._launch("dispatch", who, 0, d.handle, 0, tokens=d.tokens[who], topk_idx=d.topk_idx[who], **more)
    weights[who:] = [*weights[-1:], *weights[who:-1]]   # by rank
    p._look(d, [who])
    sim.run()
    assert [code for _, _, code in p.ended[-1].ranks.values()] == [Code.EXCLUDED] and p.ended[-1].ranks[who][0] >> who & 1
    p.ended = ended
    p.experts(d, others)
    p.combine(d, others)
    sim.run()
    p.check()
    assert all(e.mask() == 1 << who for e in p.ended)
    assert {(n.code, n.peer) for n in map(p.notice, others) if n} == {(Code.CAME_LATE, who)} and not p.records[who][8]
    before, puts = [w.copy() for w in p.windows], p.network.puts
    for again in (lambda: p.combine(d, [who]), lambda: p.dispatch(ranks=[who])):
        again()
        sim.run()
        assert [code for _, _, code in p.ended[-1].ranks.values()] == [Code.EXCLUDED] and p.network.puts == puts
        assert all((a == b).all() for a, b in zip(p.windows, before, strict=True)), "a rank that is out touched somebody's window"
    return p


def test_a_late_rank_is_out_and_reported_and_changes_nothing() -> None:
    for seed in range(32):
        late(seed)


def differ(seed: int, **how: Any) -> None:
    """Masks differ, as after a ``mask_update`` on some ranks."""
    sim = Simulator(4, seed, ("adversarial", "fair")[seed % 2], effects=how.pop("effects", None), faults=Faults(timeouts=True, bounded=True))
    p = group(sim, 1 + seed // 2 % 2, seed, **how)
    who = seed % 4
    d = p.dispatch() if seed % 2 else None
    p.ended.clear() if d is None else p.experts(d)
    sim.run()
    first = len(p.ended)
    for rank in random.Random(seed).sample([r for r in range(4) if r != who], 1 + seed // 4 % 3):
        p.local_word(rank, p.words.mask)[:] = 1 << who
    if d is not None:
        p.combine(d)
    p.play("D X C D X C")
    sim.run()
    p.check()
    assert all(e.mask() == 1 << who and e.members() == [r for r in range(4) if r != who] for e in p.ended[first:])


def test_masks_that_differ_become_their_union() -> None:
    for seed in range(48):
        differ(seed)


def refused(seed: int, **how: Any) -> None:
    """A refused call, or a stale slot, fails on all alike, whatever dies."""
    draw = random.Random(seed)
    faults = Faults(dead={3: draw.randrange(300)}, timeouts=True, bounded=True) if seed % 2 else None
    sim = Simulator(4, seed, ("adversarial", "fair")[seed // 2 % 2], effects=how.pop("effects", None), faults=faults)
    p = group(sim, 1 + seed // 4 % 2, seed, **how)
    if seed % 3:
        p.dispatch(ranks=[0, 2, 3])
        d = p.dispatch(ranks=[1], status=1 << 24 | 7, handle=1)
        p.combine(d)   # of a slot that was not filled
    else:
        p.combine(p.dispatch(ranks=[]))
    wrong, p.ended = p.ended, []
    p.dispatch()
    sim.run()
    p.check()
    assert {0, 1, 2} <= set(p.ended[-1].members())
    codes = {rank: code for e in wrong for rank, (_, _, code) in e.ranks.items() if rank != 3}
    assert set(codes.values()) <= {Code.REFUSED, Code.STALE_SLOT} and len(codes) == 3


def test_a_refused_call_fails_everywhere_whatever_dies() -> None:
    for seed in range(36):
        refused(seed)


def test_a_different_operation_is_named() -> None:
    p = group(Simulator(4, 1, "adversarial"), 2)
    p.dispatch(0, ranks=[0, 2, 3])
    p.dispatch(1, ranks=[1])
    p.sim.run()
    assert {rank: code for e in p.ended for rank, (_, _, code) in e.ranks.items()} == dict.fromkeys(range(4), Code.MISMATCH)
    assert [p.epoch(r) for r in p.ranks] == [2] * 4


def readmitted(seed: int, **how: Any) -> None:
    """A rank sleeps past the timeout, is masked, and taken back."""
    late = seed % 4
    sim = Simulator(4, seed, ("adversarial", "fair")[seed // 3 % 2], effects=how.pop("effects", None),
                    faults=Faults(late={late: seed % 7}, timeouts=True, bounded=True))
    p = group(sim, 1 + seed // 2 % 2, seed, **how)
    p.play(TEXTS[0])
    sim.run()
    p.check()
    p.ended.clear()
    sim.faults, sim.scheduler.faulty = Faults(), False
    p.clean()
    p.play(TEXTS[0])
    sim.run()
    p.check(everybody=True)
    assert {e.mask() for e in p.ended} == {0}
    p.dispatch()
    p.clean()
    stale = p.combine(p.dispatched[-1])
    sim.run()
    assert {code for _, _, code in p.ended[-1].ranks.values()} == {Code.STALE_SLOT} and p.ended[-1].what is stale, "a slot is not empty"


def at_once(seed: int, **how: Any) -> None:
    """What a rank puts when the others have gone on without it is still on its way when it comes to ``mask_clean``."""
    who = seed % 4
    sim = Simulator(4, seed, "adversarial", effects=how.pop("effects", None), faults=Faults(timeouts=True, bounded=True))
    p = group(sim, 1 + seed // 4 % 2, seed, **how)
    others = [r for r in range(4) if r != who]
    p.play("D X C")
    p.dispatch(ranks=others)
    sim.run()
    p.ended.clear()
    p.network.slow = {who}
    p.dispatch(ranks=[who])
    p.ended.clear()
    p.clean()
    p.play("D X C D X C")
    sim.run()
    p.check(everybody=True)
    assert {e.mask() for e in p.ended} == {0}


def test_a_rank_that_sleeps_past_the_timeout_is_readmitted() -> None:
    for seed in range(40):
        readmitted(seed)


def test_mask_clean_without_a_dead_rank_in_it_keeps_it_masked() -> None:
    for seed in range(24):
        sim = Simulator(4, seed, "adversarial", faults=Faults(dead={seed % 4: 0}, timeouts=True, bounded=True))
        p = group(sim, 1 + seed // 2 % 2, seed)
        p.play("D X C")
        clean = p.clean()
        p.play("D X C")
        sim.run()
        p.check()
        assert clean.mask() == 1 << seed % 4 and clean.members() == [r for r in range(4) if r != seed % 4]


def in_clean(seed: int, **how: Any) -> None:
    """A rank comes to ``mask_clean`` late, or dies in it: who ends it as a member agrees with the others about who is one, and about the epoch."""
    draw = random.Random(seed)
    what = {"late": {seed % 4: draw.randrange(14)}} if seed % 2 else {"dead": {seed % 4: draw.randrange(300)}}
    sim = Simulator(4, seed, ("adversarial", "fair")[seed // 2 % 2], effects=how.pop("effects", None),
                    faults=Faults(timeouts=True, bounded=True, **what))
    p = group(sim, 1 + seed // 4 % 2, seed, **how)
    for _ in range(2):
        p.play("D X C")
        p.clean()
    p.play("D X C")
    sim.run()
    agree_by_epoch(p)


def test_ranks_that_come_to_mask_clean_late_or_die_in_it() -> None:
    for seed in range(80):
        in_clean(seed)


def out_of_step(seed: int, **how: Any) -> None:
    """A rank missed operations, calls of ``mask_clean``, or both: its next operation tells it so, and alone it is no group; then it is taken back."""
    draw, who = random.Random(seed), seed % 4
    sim = Simulator(4, seed, ("adversarial", "fair")[seed // 4 % 2], effects=how.pop("effects", None), faults=Faults(timeouts=True, bounded=True))
    p = group(sim, 1 + seed // 8 % 2, seed, **how)
    others = [r for r in range(4) if r != who]
    p.play("D X C")
    sim.run()
    p.ended.clear()
    cleans = draw.choice((0, 1, 2, 5))
    for _ in range(draw.randrange(3) if cleans else 1):
        p.dispatch(ranks=others)
    for _ in range(cleans):
        p.clean(others)
    sim.run()
    assert all(e.mask() == 1 << who for e in p.ended)
    p.ended.clear()
    if draw.random() < 0.5:
        p.dispatch(ranks=[who])
        sim.run()
        assert [code for _, _, code in p.ended.pop().ranks.values()] == [Code.EXCLUDED]
    alone = p.clean([who])
    sim.run()
    assert alone.ranks[who][2] == Code.EXCLUDED and alone.ranks[who][0] >> who & 1, "who is alone is no group"
    p.ended.clear()
    p.clean()
    p.play("D X C D X C")
    sim.run()
    p.check(everybody=True)
    assert {e.mask() for e in p.ended} == {0}


def dies_joining(seed: int, **how: Any) -> None:
    """A rank dies while it tells the others that it came, or its view, so that some have heard it."""
    draw, who = random.Random(seed), seed % 4
    what, when, faults = draw.choice(("ll_net_send_join", "ll_net_say")), draw.randrange(4), Faults(dead={}, timeouts=True, bounded=True)
    real = getattr(ll_net_masked_ops, what)

    def act(call: Any, task: Any, *values: int) -> int:
        if values[3] == who and task.block.launch.label == "clean":
            faults.dead.setdefault(who, call.scheduler.rank_steps[who] + when)
        return real(call, task, *values)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ll_net_masked_ops, what, act)
        sim = Simulator(4, seed, ("adversarial", "fair")[seed // 4 % 2], effects=how.pop("effects", None), faults=faults)
    p = group(sim, 1 + seed // 8 % 2, seed, **how)
    p.play("D X C")
    p.clean()
    p.play("D X C")
    sim.run()
    p.check()
    assert p.ended[-1].mask() == 1 << who


def test_ranks_that_die_while_they_join() -> None:
    for seed in range(40):
        dies_joining(seed)


def test_a_rank_that_missed_mask_clean_is_out_and_catches_up() -> None:
    for seed in range(32):
        out_of_step(seed)


def test_regions_do_not_overlap() -> None:
    for ranks, team in ((2, 1), (8, 2), (24, 8)):
        config = GroupConfig(num_experts=2 * ranks, max_dispatch_tokens_per_rank=3, hidden=24, num_topk=2, enable_mask=True)
        shape = LLNetMaskedShape.over(KernelShape.build(config, ranks, 2, 8), config, team)
        net, members = shape.net, shape.members
        for regions, end in ((shape.window.regions() + net.regions() + members.regions(), members.total_bytes),
                             (shape.local.regions() + net.local_regions() + members.local_regions(), members.local_bytes)):
            ordered = sorted(regions, key=lambda r: r[1])
            assert all(a[2] <= b[1] for a, b in zip(ordered, ordered[1:], strict=False)) and ordered[-1][2] <= end


# ---- mutants -----------------------------------------------------------------------------------------------------------------
def plain(seed: int, **how: Any) -> None:
    """Nobody is missing."""
    p = group(Simulator(4, seed, ("adversarial", "fair")[seed % 2], effects=how.pop("effects", None)), 1 + seed // 2 % 2, seed, **how)
    p.play("D X C D X C")
    p.sim.run()
    p.check(everybody=True)


def left_out(seed: int, **how: Any) -> None:
    """A rank does not come to a combine, for which rows that it sent in an earlier one are there."""
    who = seed % 4
    sim = Simulator(4, seed, ("adversarial", "fair")[seed % 2], effects=how.pop("effects", None), faults=Faults(timeouts=True, bounded=True))
    p = group(sim, 1 + seed // 2 % 2, seed, **how)
    p.play("D X C")
    d = p.dispatch()
    p.experts(d)
    p.combine(d, [r for r in range(4) if r != who])
    sim.run()
    p.check()
    assert p.ended[-1].mask() == 1 << who


def dies_telling(seed: int, **how: Any) -> None:
    """A rank dies when it has sent and signalled all of an attempt, before it says its view: it is missed, and not reported as one that came late."""
    who, when, real = seed % 4, 1 + seed // 4 % 4, ll_net_masked_ops.ll_net_say
    faults, told = Faults(dead={}, timeouts=True, bounded=True), 0

    def say(call: Any, task: Any, *values: int) -> int:
        nonlocal told
        told += values[3] == who and values[8] == 1
        if values[3] == who and told == when:
            faults.dead[who] = 0
            call.scheduler.split()
        return real(call, task, *values)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ll_net_masked_ops, "ll_net_say", say)
        sim = Simulator(4, seed, ("adversarial", "fair")[seed % 2], effects=how.pop("effects", None), faults=faults)
    p = group(sim, 1 + seed // 2 % 2, seed, **how)
    others, told_of = [r for r in range(4) if r != who], []
    for _ in range(3):
        d = p.dispatch()
        sim.run()
        told_of += map(p.notice, others)
        p.experts(d)
        p.combine(d)
        sim.run()
        told_of += map(p.notice, others)
    p.check()
    assert p.ended[-1].mask() == 1 << who and all(set(others) <= set(e.members()) for e in p.ended), "everybody else commits every operation"
    assert [(n.code, n.peer) for n in told_of if n] == [(Code.MASKED, who)] * 3, "a rank that died is not reported as one that came late"


def quantised(seed: int, **how: Any) -> None:
    """Rows of a recipe, made in their messages."""
    sim = Simulator(4, seed, ("adversarial", "fair")[seed % 2], effects=how.pop("effects", None))
    config = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=3, hidden=512, num_topk=2, num_slots=2, enable_mask=True)
    p = how.pop("program", PROGRAMS[seed // 4 % 2])(sim, config, (3, 1, 2, 3), 1 + seed // 2 % 2, seed=seed, wire=Wire(512, 16, True), **how)
    for slot in (0, 1, 0):
        p.dispatch_quantised(slot)
    sim.run()
    assert not any(p.record(rank) for rank in p.ranks)


SCHEDULES = (play, late, differ, refused, plain, left_out, dies_telling, quantised)


@pytest.mark.parametrize("schedule", [left_out, dies_telling, quantised])
def test_schedules_of_mutants_are_green(schedule: Callable[..., None]) -> None:
    for seed in range(24):
        schedule(seed)


def any_of(seed: int, **how: Any) -> None:
    SCHEDULES[seed % 8](seed // 8, **how)


def first_red(seeds: int = 8 * SEEDS, run: Callable[..., object] = any_of, **how: Any) -> BaseException | None:
    """The first error within `seeds` schedules; None if the mutant survives."""
    for seed in range(seeds):
        try:
            run(seed, **how)
        except (SimulationError, AssertionError, IndexError, KeyError) as error:
            return error
    return None


MAKE = {"dispatch": make_ll_net_masked_dispatch, "rank_major_dispatch": make_ll_net_masked_rank_major_dispatch, "combine": make_ll_net_masked_combine}
OF_LAYOUT = {"dispatch": LLNetMaskedProgram, "rank_major_dispatch": LLNetMaskedRankMajorProgram}


def with_kernel(name: str, made: Callable[..., Any]) -> dict[str, Any]:
    """What makes a group run `made` in the place of a kernel."""
    return {f"make_{name.removeprefix('rank_major_')}": made} | ({"program": OF_LAYOUT[name]} if name in OF_LAYOUT else {})


SEEN = "if seen == mask | SAID:"
KERNEL_MUTANTS: dict[str, Sequence[tuple[str, str]]] = {
    "heads are not waited for": [(
        "                    view = wait_members(comm, window, HEADS, VIEWS, rank, RANKS, TEAM, mask, view, ROUNDS, adds, epoch, signature, waited, "
        "timeout)\n", "")],
    "data is not waited for": [(SEEN, "if 1 == 2:")],
    "data is waited for whatever is missed": [(SEEN, "if 1 == 1:")],
    "data is sent whatever is missed": [("if member == 1 and view == mask | SAID:", "if member == 1:")],
    "no arrived": [("publish_arrived(window, ARRIVED, rank, TEAM, epoch)", "context = 0")],
    "signals of context 0 only": [("while context < CONTEXTS:", "while context < 1:")],
    "every block tells": [("last_block(local + BLOCKS_TOLD) == 1", "1 == 1")],
    "nothing is decided": [("decided, view = heard & DECIDED, heard & ~DECIDED", "view = heard & ~DECIDED")],
    "one round decides": [("decided, view = heard & DECIDED,", "decided, view = DECIDED,")],
    "nobody says what is decided": [("say(comm, window, VIEWS, rank, RANKS, TEAM, silent, ROUNDS, 0, epoch, view)", "turn = 0")],
    "views do not tell that masks differ": [("                            view |= DIFFERS\n", "                            pass\n")],
    "who was told is told again": [("mask & read_mask(local + TOLD)", "0")],
    "who was masked by the program is not told": [("mask & read_mask(local + TOLD)", "mask")],
    "a masked rank takes part": [("member, silent = 1 - ((mask >> rank) & 1), mask", "member, silent = 1, mask")],
    "the epoch stands still": [("                    if code == AGAIN:\n                        advance_epoch(local + EPOCH, epoch)\n", "")],
    "no second attempt": [("            if code != AGAIN:\n                break\n", "            break\n")],
    "results before the outcome": [("        if code == 0:\n            mask = read_mask", "        if 1 == 1:\n            mask = read_mask")],
}
ONLY = {
    "dispatch": {"rows are not counted": [(
        "            count_messages(window, messages, MOST, TOPK, EXPERTS, RANKS, PLANE_ROWS, MESSAGE_BYTES, rank, mask, epoch, "
        "expert_counters)\n", "")],
        "a header without a commit": [("if code == 0:\n                    store_header", "if 1 == 1:\n                    store_header")],
        "rows go to masked ranks": [("                if mask != 0:\n", "                if 1 == 2:\n")]},
    "rank_major_dispatch": {
        "rows are not counted": [(
            "            count_rows(window, messages, slot + IDS, MOST, TOPK, RANKS, PLANE_ROWS, MESSAGE_BYTES, rank, mask, epoch, "
            "src_rank_counters)\n", "")],
        "a header without a commit": [("if code == 0:\n                    store_header", "if 1 == 1:\n                    store_header")],
        "rows go to masked ranks": [("                if mask != 0:\n", "                if 1 == 2:\n")],
        "rows are not kept": [("keep_routes(table, at, first, TOPK, RANKS)", "pass")],
        "rows are numbered by the experts": [("assign_ranks(topk_idx, IDX_BYTES, topk_weights, TOPK, EXPERTS, RANKS,",
                                              "assign_ranks(topk_idx, IDX_BYTES, topk_weights, TOPK, EXPERTS, EXPERTS,")]},
    "combine": {"rows of masked ranks": [("PLANE_ROWS, ROW_BYTES, TYPE, rank,\n                               mask)",
                                          "PLANE_ROWS, ROW_BYTES, TYPE, rank,\n                               0)")],
                "rows of masked ranks, RANK_MAJOR": [("TOPK, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, rank, mask)",
                                                       "TOPK, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, rank, 0)")],
                "rows go to masked ranks": [("if (mask >> (at // MOST)) & 1 == 0:", "if 1 == 1:")]},
}
MUTANTS = {f"{kernel}: {name}": (kernel, change) for kernel in MAKE for name, change in (KERNEL_MUTANTS | ONLY[kernel]).items()}


def test_nothing_changed_is_green() -> None:
    for name, make in MAKE.items():
        assert first_red(100, **with_kernel(name, mutant(make))) is None


SHOWN_BY: dict[str, tuple[Callable[..., None], int]] = {
    "combine: nobody says what is decided": (refused, 51), "rank_major_dispatch: nobody says what is decided": (play, 15),
    "combine: data is sent whatever is missed": (play, 28), "combine: data is waited for whatever is missed": (play, 5),
    "dispatch: data is sent whatever is missed": (play, 9), "rank_major_dispatch: data is sent whatever is missed": (play, 9),
}
"""Mutants that few schedules show, with the first that was found: the search begins there."""


@pytest.mark.parametrize("name", MUTANTS)
def test_kernel_mutant_is_red(name: str) -> None:
    kernel, changes = MUTANTS[name]
    made, error = with_kernel(kernel, mutant(MAKE[kernel], *changes)), None
    if name in SHOWN_BY:
        schedule, seed = SHOWN_BY[name]
        schedule(seed, **with_kernel(kernel, mutant(MAKE[kernel])))   # green without the change
        error = first_red(1, lambda _, **how: schedule(seed, **how), **made)
    assert (error or first_red(**made)) is not None


RULES: dict[str, tuple[str, str, str]] = {
    "T-N2 adds of who is masked are counted on": ("ll_net_conclude_members", "not (mask | following) >> r & 1", "1"),
    "T-N3 heads go to who is not drained": (
        "ll_net_enter_members", "lambda p: all(network.seen(rank, c, 2 * p + 1) >= counts[p] for c in range(contexts))", "lambda p: True"),
    "T-N4 no view ends a wait for data": ("ll_net_wait_member_data", "here, said, stop,", "here, said, lambda: False,"),
    "T-N4 who is missed is forgotten": ("ll_net_wait_member_data", "mask | sum(1 << s for s in missing)", "mask"),
    "T-N5 views are not united": ("ll_net_hear", "        result |= other & ~SAID\n", "        pass\n"),
    "T-N5 who says nothing is not missed": ("ll_net_hear", "result = view | sum(1 << s for s in missing)", "result = view"),
    "T-N5 a round decides by majority": ("ll_net_hear", "unanimous = not missing and all(", "unanimous = not missing and any("),
    "T-N5 a round decides with silent ranks": ("ll_net_hear", "unanimous = not missing and all(", "unanimous = all("),
    "T-N6 what is decided is not heard": ("ll_net_hear", "lambda: bool(decided())", "lambda: False"),
    "T-N7 a rank does not see itself in a view": ("ll_net_hear", " or result >> rank & 1 else", " else"),
    "T-N7 nor while it waits for heads": ("ll_net_wait_members", "here, said, stop,", "here, said, lambda: False,"),
    "T-N9 who comes late is not told": ("ll_net_conclude_members", "events.append((Code.CAME_LATE, r))", "pass"),
    "T-N9 who dies after its adds came late": ("ll_net_conclude_members", "tagged(epoch, int(came))", "tagged(epoch, 0)"),
}


UNSEEN_RULES = {
    "T-N4 no view ends a wait for data": "only time: all that live signal DATA, also those that sent nothing",
    "T-N4 who is missed is forgotten": "who does not signal DATA says no view either, and is missed in round 1",
    "T-N7 a rank does not see itself in a view": "it hears what the others decide, or nobody any more, and is out all the same, only later",
    "T-N9 who dies after its adds came late": "the attempt that follows would say so at once, behind MASKED: seen if the host clears that in between",
}
"""Those that nothing shows here, and why. Each is asserted to survive, so that this list stays true."""


def with_rule(name: str, **how: Any) -> BaseException | None:
    """The first error without a rule."""
    operation, old, new = (RULES | CLEAN_RULES)[name]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ll_net_masked_ops, operation, mutant(getattr(ll_net_masked_ops, operation), (old, new)))
        return first_red(**how)


@pytest.mark.parametrize("name", [name for name in RULES if name not in UNSEEN_RULES])
def test_rule_is_needed(name: str) -> None:
    assert with_rule(name) is not None


@pytest.mark.parametrize("name", UNSEEN_RULES)
def test_rule_that_nothing_shows(name: str) -> None:
    assert with_rule(name, seeds=24) is None


# ---- mutants of mask_clean -------------------------------------------------------------------------------------------------------
def clean_any(seed: int, **how: Any) -> None:
    (readmitted, in_clean, out_of_step, dies_joining, at_once)[seed % 5](seed // 5, **how)


CLEAN_MUTANTS: dict[str, tuple[str, str]] = {
    "nobody waits for the others": (
        "view = wait_joins(comm, window, JOINS, CLEAN_VIEWS, rank, RANKS, TEAM, CONTEXTS, ROUNDS, epoch, timeout)", "view = 0"),
    "one round decides": ("decided, view = heard & DECIDED,", "decided, view = DECIDED,"),
    "nobody says what is decided": ("                say(comm, window, CLEAN_VIEWS, rank, RANKS, TEAM, 0, ROUNDS, 0, epoch, view)\n", ""),
    "who did not come is not told": ("say(comm, window, VIEWS, rank, RANKS, TEAM, mask | (EVERYBODY & ~view), ROUNDS, 1, own, view)", "turn = 0"),
    "who was told before is told again": ("mask | (EVERYBODY & ~view), ROUNDS", "EVERYBODY & ~view, ROUNDS"),
    "those that went on are not asked for": ("if all_stranded(window, JOINS, rank, RANKS, epoch, view) == 0:", "if 1 == 1:"),
    "no adds": ("            signal(comm, rank, RANKS, TEAM, CONTEXTS)\n", ""),
    "nobody goes where the others are": ("epoch = clean_epoch(window, JOINS, rank, RANKS, epoch)", "pass"),
    "the epoch of mask_clean stands still": ("            advance_epoch(local + CLEAN_EPOCH, epoch)\n", ""),
}
CLEAN_RULES: dict[str, tuple[str, str, str]] = {
    "T-N10 adds are not awaited": ("ll_net_wait_joins", "s in team or all(network.seen", "True or all(network.seen"),
    "T-N10 JOIN alone is not enough": ("ll_net_wait_joins", "all(map(fits, values))", "True"),
    "T-N10 all count on from what they counted": (
        "ll_net_readmit", "1 if r in so_far else max(now, held[\"adds\"][r])", "1 if False else held[\"adds\"][r]"),
    "T-N10 adds of the call are not counted": ("ll_net_readmit", "_signed(so_far[r] - now) + 1", "_signed(so_far[r] - now)"),
    "T-N10 calls are not counted in what was made": ("ll_net_readmit", "n + (r != rank)", "n"),
    "T-N10 attempts are not": ("ll_net_conclude_members", "n + (r != rank and not mask >> r & 1)", "n"),
    "T-N10 all go on where they are": ("ll_net_readmit", "if ahead(other, following) > 0", "if False"),
    "T-N10 slots are not empty": ("ll_net_readmit", '"header": (header, [0] * (2 * num_slots))', '"header": (header, [])'),
    "T-N10 nobody knows that it is out": ("ll_net_is_told", "return int(mask", "return 0 and int(mask"),
}


UNSEEN_IN_CLEAN = {
    "one round decides": "two ranks would have to die, one while it joins, one in the round; in operations the same agreement is seen to need it",
    "who was told before is told again": "it overwrites views of the attempt that such a rank missed, but not what was DECIDED there",
    "T-N10 adds are not awaited": "the drain of the next operation awaits them; here a rank whose puts were lost is left out at once",
}
"""Those that nothing shows here, and why. Each is asserted to survive, so that this list stays true."""


def of_clean(name: str, **how: Any) -> BaseException | None:
    """The first error without something."""
    if name in CLEAN_RULES:
        return with_rule(name, run=clean_any, **how)
    return first_red(run=clean_any, make_clean=mutant(make_ll_net_mask_clean, CLEAN_MUTANTS[name]), **how)


@pytest.mark.parametrize("name", [name for name in (*CLEAN_MUTANTS, *CLEAN_RULES) if name not in UNSEEN_IN_CLEAN])
def test_clean_mutant_is_red(name: str) -> None:
    assert of_clean(name) is not None


@pytest.mark.parametrize("name", UNSEEN_IN_CLEAN)
def test_clean_mutant_that_nothing_shows(name: str) -> None:
    assert of_clean(name, seeds=25) is None


# ---- what synchronises -----------------------------------------------------------------------------------------------------------
OPERATIONS = {op[0] for op in LL_NET_MASKED_OPERATIONS}
EFFECTS = {name: effects for name, effects in effect_mutants(OPERATIONS, NET_OPS).items()
           if ("st." not in name or not name.endswith(" net")) and "fence.relaxed" not in name}
"""Without how strong a put is: that is the network's."""
OF_CLEAN = ("ll_net_clean_epoch", "ll_net_is_told", "ll_net_send_join", "ll_net_wait_joins", "ll_net_all_stranded", "ll_net_signal_clean",
            "ll_net_readmit")
WARP_0 = "only warp 0 goes on with what it returns"
SIGNALS = "what is put has fences of its own, and so has HEAD of the next attempt; NCCL asks for one before a signal"
COUNTED = "only counts are read by it, nothing that was put"
SURVIVORS: dict[str, str] = {
    "ll_net_enter_members: no 4 bar.sync": WARP_0, "ll_net_wait_members: no 4 bar.sync": WARP_0, "ll_net_wait_member_data: no 4 bar.sync": WARP_0,
    "ll_net_hear: no 1 bar.sync": WARP_0, "ll_net_clean_epoch: no 1 bar.sync": WARP_0, "ll_net_is_told: no 1 bar.sync": WARP_0,
    "ll_net_wait_joins: no 3 bar.sync": WARP_0,
    "ll_net_send_member_row: fence.acq_rel.sys first": "rows for my team, then after it, are published with ARRIVED; what is put was written before",
    "ll_net_send_made_row: fence.acq_rel.sys first": "the same",
    "ll_net_return_member_rows: fence.acq_rel.sys first": "what it puts was written before this kernel began",
    "ll_net_conclude_members: ld.weak net": COUNTED, "ll_net_conclude_members: ld.relaxed.gpu net": COUNTED,
    "ll_net_readmit: ld.weak net": COUNTED, "ll_net_readmit: ld.relaxed.gpu net": COUNTED,
    "ll_net_count_messages: no 0 bar.sync": "ll_net_await_view has one before it", "ll_net_count_member_rows: no 0 bar.sync": "the same",
    "ll_net_count_member_rows: no 5 bar.sync": "last_block has one after it, and nothing in between uses that memory",
    "ll_net_wait_joins: ld.acquire.gpu net": "the drain of the next attempt acquires it, too", "ll_net_wait_joins: ld.relaxed.sys net": "the same",
} | {f"ll_net_signal_{what}: {how}": SIGNALS for what in ("members", "clean")
     for how in ("no 0 fence.acq_rel.sys", "fence.acq_rel.gpu", "fence.acq_rel.sys last")}
"""Effects whose loss nothing shows in these programs, and why. Each is asserted to survive, so that this list stays true."""


def with_effect(name: str, **how: Any) -> BaseException | None:
    """The first error with an effect changed."""
    return first_red(run=clean_any if name.startswith(OF_CLEAN) else any_of, effects=EFFECTS[name], **how)


@pytest.mark.parametrize("name", [name for name in EFFECTS if name not in SURVIVORS])
def test_effect_mutant_is_red(name: str) -> None:
    assert with_effect(name) is not None


@pytest.mark.parametrize("name", SURVIVORS)
def test_surviving_effect_mutant(name: str) -> None:
    assert with_effect(name, seeds=24) is None
