"""Every element of the agreement about members is needed: without it some schedule with a dead, slow or late rank turns red.

Mutants of the kernels, of the effects of their operations, and of the rules M1 to M7 of ``member_map`` in the simulator's side of the votes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from test_mask_protocol import agree_by_epoch, group, play
from test_mutations import MASKED, effect_mutants, mutant

from ncclep_py.errors import Code
from ncclep_py.kernels import ll_mask_clean, ll_masked_combine, ll_masked_dispatch, ll_masked_rank_major_dispatch
from ncclep_py.simulator import Faults, SimulationError, Simulator, votes
from ncclep_py.simulator.masked_program import MaskedProgram, MaskedRankMajorProgram

SEEDS = 150


def clean(seed: int, **more: object) -> None:
    """One schedule in which a rank is late, or dead, and mask_clean is called twice."""
    what = {"late": {seed % 3: 1 + seed % 13}} if seed % 4 else {"dead": {seed % 3: 7 * seed % 300}}
    sim = Simulator(3, seed, ("adversarial", "fair")[seed // 2 % 2], effects=more.pop("effects", None),
                    faults=Faults(timeouts=True, bounded=True, **what))
    p = group(sim, seed, epoch=5, **more)
    p.play("D X C")
    p.clean()
    p.play("D X C")
    p.clean()
    p.play("D X C")
    sim.run()
    agree_by_epoch(p)
    assert not any(code == Code.AGAIN for e in p.ended for _, _, code in e.ranks.values()), "mask_clean found no end"
    if seed % 4:   # the late rank is back, and all can go on together, from the same epoch and with empty slots
        p.ended.clear()
        sim.faults, sim.scheduler.faulty = Faults(), False
        for rank in p.ranks:
            p.records[rank][:] = 0
        p.combine(p.dispatched[-1])
        stale = p.ended.pop()
        p.clean()
        p.play("D X C")
        sim.run()
        p.check(everybody=True)
        assert {e.mask() for e in p.ended} == {0} and stale.ranks.keys() == {0, 1, 2}


def others(seed: int, **how: object) -> None:
    """What a random fault does not show: nobody missing; a refused call; a masked rank that knows it."""
    kind = ("plain", "refused", "quiet")[seed % 3]
    sim = Simulator(3, seed, ("adversarial", "fair")[seed % 2], effects=how.pop("effects", None))
    p = group(sim, seed, **how)
    if kind == "refused":
        p.dispatch(ranks=[0, 2])
        d = p.dispatch(ranks=[1], status=1 << 24 | 7, handle=1)
        p.combine(d)
        p.ended[:2] = []
        sim.run()
        assert {code for e in p.ended for _, _, code in e.ranks.values()} <= {Code.STALE_SLOT, Code.REFUSED}
        assert [p.epoch(r) for r in p.ranks] == [3, 3, 3]
    else:
        p.play("D X C")
        sim.run()
        p.check(everybody=True)
        if kind == "quiet":
            p.local_word(1, p.words.mask)[:] = 0b010
            before = [w.copy() for w in p.windows]
            p.dispatch(ranks=[1]), p.combine(p.dispatched[0], ranks=[1])
            sim.run()
            assert [code for e in p.ended[-2:] for _, _, code in e.ranks.values()] == [Code.EXCLUDED] * 2
            assert all((w == b).all() for w, b in zip(p.windows, before, strict=True)), "a rank that is out touched somebody's window"


def late_writer(seed: int, **how: object) -> None:
    """A rank that stalls in a dispatch for longer than the model allows; members whose rows it may have spoilt must be told."""
    draw = random.Random(seed)
    stalls = Faults(slow={draw.randrange(3): draw.randrange(40, 130)}, timeouts=True)
    sim = Simulator(3, seed, "fair", effects=how.pop("effects", None), faults=stalls)
    p = group(sim, seed, **how)
    sim.memory.tolerant, sim.policy.rush = True, 0.05
    p.play("D X C D X C")
    sim.run()
    p.play("D X C")
    sim.run()
    p.check_agreement()
    told = {n.code for n in map(p.notice, p.ended[-1].members()) if n}
    try:
        p.check()
    except AssertionError:
        assert Code.WROTE_LATE in told, told


def one_token_each(seed: int, **how: object) -> None:
    """More blocks than tokens, so that several work on one row."""
    p = how.pop("program")(Simulator(3, seed, blocks=4), group(Simulator(3)).config, (1, 1, 1), seed=seed, **how)
    p.play("D X C")
    p.sim.run()
    p.check(everybody=True)


def any_of(seed: int, **how: object) -> None:
    """One schedule of one of these."""
    (clean, others, play)[seed % 3](seed // 3, **how)


def first_red(seeds: int = SEEDS, run: Callable[..., object] = any_of, **how: object) -> BaseException | None:
    """The first error within `seeds` schedules; None if the mutant survives."""
    for seed in range(seeds):
        try:
            run(seed, **how)
        except (SimulationError, AssertionError) as error:
            return error
    return None


# ---- kernels -----------------------------------------------------------------------------------------------------------------
DISPATCH, COMBINE, CLEAN = ll_masked_dispatch.make_ll_masked_dispatch, ll_masked_combine.make_ll_masked_combine, ll_mask_clean.make_ll_mask_clean
RANK_MAJOR = ll_masked_rank_major_dispatch.make_ll_masked_rank_major_dispatch
JOIN = "publish_join(window, JOINS, DETAILS, rank, RANKS, epoch, signature, mask, epoch, status)"
JOINED = "code = wait_joins(window, JOINS, DETAILS, VOTES, rank, RANKS, epoch, signature, mask, {}, waited, wrote, fail, record, timeout)"
COUNTS = "code = wait_member_counts(window, COUNTS, VOTES, rank, RANKS, EXPERTS, epoch, mask, fail, record, timeout)"
SETTLE = "code = settle(window, ARRIVED, VOTES, rank, RANKS, epoch, mask, waited, fail, record, timeout)"
CONCLUDE = """                    code = conclude(window, JOINS, ARRIVED, VOTES, rank, RANKS, local + MASK, local + MASKED_AT, epoch, mask, code,
                                    ATTEMPTS - 1 - attempt, record + NOTICE, fail, record)
"""
DISPATCH_MUTANTS = {
    "no wait_joins": [(JOINED.format(0), "code = 0")],
    "the join commits": [("signature, mask, 0, waited", "signature, mask, 1, waited")],
    "no publish_join": [(JOIN, "pass")],
    "no wait_member_counts": [(COUNTS, "pass")],
    "no drop_rows": [("drop_rows(TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, part, table, mask)", "pass")],
    "no settle": [(SETTLE, "code = 0")],
    "no conclude": [(CONCLUDE, "")],
    "no advance_epoch": [("advance_epoch(local + EPOCH, epoch)", "pass")],
    "no tell_outcome": [("tell_outcome(local + OUTCOME, epoch, code)", "pass")],
    "no await_outcome": [("if await_outcome(local + OUTCOME, epoch, timeout) != AGAIN:", "if code != AGAIN:")],
    "no second attempt": [("range(ATTEMPTS)", "range(1)")],
    "a masked rank joins": [("                    if (mask >> rank) & 1 == 0:\n                        " + JOIN, "                    " + JOIN)],
    "a masked rank tells counts": [("if (mask >> rank) & 1 == 0:\n                publish_counts", "if 1:\n                publish_counts")],
    "a header without a commit": [("if code == 0:\n                        store_header", "if 1:\n                        store_header")],
    "a late writer says nothing": [("publish_late(window, ARRIVED, rank, RANKS, epoch, wrote)", "pass")],
}
COMBINE_MUTANTS = {
    "no wait_joins": [(JOINED.format(1), "code = 0")],
    "the join does not commit": [("signature, mask, 1, waited", "signature, mask, 0, waited")],
    "rows of masked ranks": [("                                          mask)", "                                          0)")],
    "no conclude": [(CONCLUDE, "")],
    "no await_outcome": [("            if await_outcome(local + OUTCOME, epoch, timeout) != AGAIN:\n                break\n", "")],
    "no second attempt": [("range(ATTEMPTS)", "range(1)")],
}
TELL = """            if block_idx() == 0:
                if warp_idx() == 0:
                    if (mask >> rank) & 1 == 0:
                        tell_rows(window, DETAILS, rank, RANKS, epoch)
"""
ARRIVE = """                    if warp_idx() == 0:
                        publish_arrived(window, ARRIVED, rank, RANKS, epoch)
"""
SHARED = ("the join commits", "no publish_join", "no settle", "no conclude", "no advance_epoch", "no tell_outcome", "no await_outcome",
          "no second attempt", "a masked rank joins", "a header without a commit", "a late writer says nothing")
RANK_MAJOR_MUTANTS = {name: DISPATCH_MUTANTS[name] for name in SHARED} | {
    "no wait_joins": [(JOINED.format(0), "code = 0")],
    "no drop_rows": [("drop_rows(TOPK, RANKS, RANKS, PLANE_ROWS, first, end, 1, table, mask)", "pass")],
    "a masked rank tells rows": [(TELL, TELL.replace("if (mask >> rank) & 1 == 0:", "if 1:"))],
    "rows are told after ARRIVED": [(TELL, ""), (ARRIVE, ARRIVE + "                        tell_rows(window, DETAILS, rank, RANKS, epoch)\n")],
    "rows are not told": [(TELL, "")],
    "rows taken before the commit": [("if code == 0:\n                    take_member_rows", "if 1:\n                    take_member_rows")],
    "no take_member_rows": [("take_member_rows(window, DETAILS, slot + IDS, rank, RANKS, TOPK, PLANE_ROWS, epoch, mask, src_rank_counters)", "pass")],
    "every piece sends the routing": [("if begin == 0:", "if 1:")],
}
CLEAN_MUTANTS = {
    "no verdict": [("mask = read_verdict(window, VOTES)", "mask = 0")],
    "the same epoch again": [("epoch = next_epoch(epoch)", "pass")],
    "nobody catches up": [("code == EXCLUDED and missed < 3", "code == EXCLUDED and missed < 0"),
                          ("            if code == EXCLUDED:\n                epoch = last\n", "")],
    "a stranded rank is a group": [("== 1:\n                    code = EXCLUDED", "== 2:\n                    code = EXCLUDED")],
    "no readmit": [("""readmit(window, DETAILS, OPERATIONS, rank, RANKS, epoch, mask, local + MASK, local + MASKED_AT, local + EPOCH, local + HEADERS,
                        num_slots)""", "pass")],
    "own epoch only": [("signature, mask, own, 0)", "signature, mask, 0, 0)")],
}


@pytest.mark.parametrize("program", [MaskedProgram, MaskedRankMajorProgram])
def test_nothing_changed_is_green(program: type[MaskedProgram]) -> None:
    dispatch = DISPATCH if program is MaskedProgram else RANK_MAJOR
    same = {"make_dispatch": mutant(dispatch), "make_combine": mutant(COMBINE), "make_clean": mutant(CLEAN), "program": program}
    assert first_red(45, **same) is None and first_red(20, late_writer, **same) is None


@pytest.mark.parametrize("name", DISPATCH_MUTANTS)
def test_dispatch_mutant_is_red(name: str) -> None:
    run = late_writer if name == "a late writer says nothing" else any_of
    assert first_red(2 * SEEDS, run, program=MaskedProgram, make_dispatch=mutant(DISPATCH, *DISPATCH_MUTANTS[name])) is not None


@pytest.mark.parametrize("name", RANK_MAJOR_MUTANTS)
def test_rank_major_dispatch_mutant_is_red(name: str) -> None:
    run = late_writer if name == "a late writer says nothing" else one_token_each if "piece" in name else any_of
    assert first_red(2 * SEEDS, run, program=MaskedRankMajorProgram, make_dispatch=mutant(RANK_MAJOR, *RANK_MAJOR_MUTANTS[name])) is not None


@pytest.mark.parametrize("name", COMBINE_MUTANTS)
def test_combine_mutant_is_red(name: str) -> None:
    assert first_red(program=MaskedProgram, make_combine=mutant(COMBINE, *COMBINE_MUTANTS[name])) is not None


def test_rank_major_combine_leaves_masked_ranks_out() -> None:
    rows = "sum_member_row(payload, slot, table, out, token, TOPK, RANKS, PLANE_ROWS, ROW_BYTES, TYPE, begin, stop, mask)"
    assert first_red(program=MaskedRankMajorProgram, make_combine=mutant(COMBINE, (rows, rows.replace("mask", "0")))) is not None


@pytest.mark.parametrize("name", CLEAN_MUTANTS)
def test_clean_mutant_is_red(name: str) -> None:
    assert first_red(run=clean, make_clean=mutant(CLEAN, *CLEAN_MUTANTS[name])) is not None


# ---- effects -----------------------------------------------------------------------------------------------------------------
SURVIVORS: dict[str, str] = {
    "wait_joins: ld.weak detail": "JOIN orders it; relaxed is stronger than needed",
    "wait_member_counts: no 1 bar.sync": "the barrier of its second vote is there, too",
    "sum_member_counts: no 3 bar.sync": "the same",
    "conclude: ld.weak vote": "this warp, or the barrier before, has acquired the verdict; relaxed is stronger than needed",
    "read_verdict: ld.weak vote": "the same",
    "read_verdict: ld.relaxed.gpu vote": "the same",
    "read_verdict: no 1 bar.sync": "the block needs it to go on as one; there is no memory to order",
    "catch_up: no 1 bar.sync": "the same",
    "publish_late: st.weak arrived": "who calls it is out, and these programs let it write unchecked (`Memory.tolerant`); tests/test_ptx.py has it",
    "readmit: ld.weak detail": "JOIN orders it; relaxed is stronger than needed",
    "readmit: ld.relaxed.gpu detail": "the same",
}
"""Effects whose loss nothing shows, and why."""


@pytest.mark.parametrize("name", [name for name in effect_mutants(MASKED) if name not in SURVIVORS and "fence.relaxed" not in name])
def test_effect_mutant_is_red(name: str) -> None:
    run = late_writer if name.startswith("publish_late") else any_of
    assert first_red(run=run, effects=effect_mutants(MASKED)[name]) is not None


@pytest.mark.parametrize("name", SURVIVORS)
def test_surviving_effect_mutant(name: str) -> None:
    assert first_red(seeds=9, effects=effect_mutants(MASKED)[name]) is None


def test_votes_have_system_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(votes, "VOTE_SCOPE", "gpu")
    assert first_red() is not None


def test_fences_stand_around_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """That votes are acq_rel themselves shows nowhere."""
    monkeypatch.setattr(votes, "VOTE_ORDER", "relaxed")
    assert first_red(seeds=30) is None
