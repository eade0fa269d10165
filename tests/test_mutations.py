"""Every element of the protocol is needed: remove or weaken one, and some schedule turns red within a bounded number of seeds.

Three kinds of mutants: a changed line of a kernel's source, a changed effect of an operation, and programs that break a rule of ``memory_map``
(with their safe twins). A surviving mutant would be a redundant element or a blind spot of the simulator.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pytest

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.errors import Code, Status
from ncclep_py.kernels import ll_combine, ll_dispatch
from ncclep_py.kernels.ops import OPS, Op
from ncclep_py.signature import OpKind, Signature
from ncclep_py.simulator import Faults, RaceError, SimulationError, Simulator, waits
from ncclep_py.simulator import ops as simulated
from ncclep_py.simulator.program import Program

SEEDS = 200
TEXTS = ("D X C D X C", "D D X C C", "D0 D1 X0 C0 D0 X1 C1")


def play(seed: int, text: str = "", num_ranks: int = 3, tokens: Sequence[int] = (5, 3, 4), effects: Mapping[str, Sequence[str]] | None = None,
         blocks: int = 2, program: Callable[[Program], None] | None = None, group: type[Program] = Program, **factories: Callable) -> None:
    """One schedule of a small group, checked against the oracle."""
    sim = Simulator(num_ranks, seed, ("adversarial", "fair")[seed % 5 == 4], blocks=blocks, effects=effects)
    p = group(sim, GroupConfig(num_experts=2 * num_ranks, max_dispatch_tokens_per_rank=6, hidden=16, num_topk=2, num_slots=2),
                tokens[:num_ranks], seed=seed, **factories)
    if program is None:
        p.play(text or TEXTS[seed % len(TEXTS)])
    else:
        program(p)
    sim.run()
    p.check()


def play_failure(seed: int, group: type[Program] = Program, **how: object) -> None:
    """One schedule in which a rank comes late, dies, refuses, or combines a stale slot: who is to blame must be known to all who live."""
    draw = random.Random(seed)
    kind, who = draw.choice(("late", "dead", "refused", "stale")), draw.randrange(3)
    faults = {"late": Faults(late={who: draw.randrange(4)}, timeouts=True), "dead": Faults(dead={who: draw.randrange(150)}, timeouts=True)}.get(kind)
    sim = Simulator(3, seed, ("adversarial", "fair")[seed % 2], effects=how.pop("effects", None), faults=faults)
    p = group(sim, GroupConfig(num_experts=6, max_dispatch_tokens_per_rank=6, hidden=16, num_topk=2), (5, 3, 4), seed=seed, **how)
    d = p.dispatch()
    if kind == "refused":
        p.dispatch(ranks=[r for r in range(3) if r != who])
        p.dispatch(ranks=[who], status=Status.REFUSED << 24 | 9)
    else:
        p.combine(d)
        newer = p.dispatch()
        d = d if kind == "stale" else newer
    p.combine(d)
    sim.run()
    records = {r: p.record(r) for r in range(3) if not (kind == "dead" and r == who)}
    assert {p.epoch(r) for r in records} == {4 if kind == "refused" else 5}
    for rank, record in records.items():
        if kind in ("late", "dead"):
            assert record is None or record.culprit == who or rank == who
            assert kind == "late" or record is not None
        else:
            assert record is not None and record.code == {"refused": Code.REFUSED, "stale": Code.STALE_SLOT}[kind]
            assert kind == "stale" or (record.peer, record.seen) == (who, 9)


def first_red(seeds: int = SEEDS, **how: object) -> BaseException | None:
    """The first error within `seeds` schedules, every other one with a failure; None if the mutant survives."""
    for seed in range(seeds):
        try:
            (play_failure if seed % 2 and not how.get("program") else play)(seed, **how)
        except (SimulationError, AssertionError) as error:
            return error
    return None


def mutant(factory: Callable, *changes: tuple[str, str]) -> Callable:
    """`factory` with pieces of its source replaced; each must occur exactly once."""
    source = inspect.getsource(factory)
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {factory.__name__}"
        source = source.replace(old, new)
    names = dict(factory.__globals__)
    exec(compile(source, f"mutant of {factory.__name__}", "exec", dont_inherit=True, flags=__import__("__future__").annotations.compiler_flag), names)
    return names[factory.__name__]


# ---- kernels -----------------------------------------------------------------------------------------------------------------
HEAD = """        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, status)
"""
COMBINE_HEAD = HEAD.replace("status)", "header_status(held, handle, status))")
WAIT_HEADS = "code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)"
ARRIVED = """                if warp_idx() == 0:
                    publish_arrived(window, ARRIVED, rank, RANKS, epoch)
                code = wait_arrived(window, ARRIVED, rank, RANKS, epoch, fail, record, timeout)
"""
WAIT_COUNTS = "code = wait_counts(window, counts, rank, RANKS, EXPERTS, epoch, PLANE_ROWS, expert_counters, fail, record, timeout)"
FETCH = "fetch_row(tokens, token, end, reserved, GIVEN_BYTES, begin * VECTORS, stop * VECTORS)"
ROUTING = "fetch_routing(table, weights, token, end, TOPK)"

DISPATCH_MUTANTS = {
    "no wait_heads": [(WAIT_HEADS, "code = 0")],
    "no wait_counts": [(WAIT_COUNTS, "code = 0")],
    "no wait_arrived": [("code = wait_arrived(window, ARRIVED, rank, RANKS, epoch, fail, record, timeout)", "code = 0")],
    "no publish_head": [(HEAD, "")],
    "no publish_arrived": [("publish_arrived(window, ARRIVED, rank, RANKS, epoch)\n", "pass\n")],
    "no publish_counts": [("        publish_counts(window, counts, rank, RANKS, EXPERTS, epoch)\n", "")],
    "no store_header": [("store_header(header, epoch, handle)\n", "pass\n")],
    "no advance_epoch": [("                advance_epoch(local + EPOCH, epoch)\n", "")],
    "every block is the last": [("last_block(local + BLOCKS_DONE) == 1", "1 == 1")],
    "block 0 is the last": [("last_block(local + BLOCKS_DONE) == 1", "block_idx() == 0")],
    "no fetch_row": [(FETCH, "pass")],
    "another row fetched": [(FETCH, FETCH.replace("token,", "end - 1,"))],
    "no assign_rows": [("assign_rows(topk_idx, IDX_BYTES, TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, part, table, rank, epoch, fail, record)",
                        "pass")],
    "arrived by one warp too early": [(ARRIVED, ARRIVED.replace("publish_arrived", "pass  # ")),
                                      ("        if last_block(", "        if block_idx() == 0:\n            if warp_idx() == 0:\n"
                                       "                publish_arrived(window, ARRIVED, rank, RANKS, epoch)\n        if last_block(")],
    "count_experts after the heads, by one warp": [("        count_experts(", "        if warp_idx() == 0: count_experts(")],
}
COMBINE_MUTANTS = {
    "no wait_heads": [(WAIT_HEADS, "code = 0")],
    "no publish_head": [(COMBINE_HEAD, "")],
    "no advance_epoch": [("                advance_epoch(local + EPOCH, epoch)\n", "")],
    "every block is the last": [("last_block(local + BLOCKS_DONE) == 1", "1 == 1")],
    "block 0 is the last": [("last_block(local + BLOCKS_DONE) == 1", "block_idx() == 0")],
    "no fetch_routing": [(ROUTING, "pass")],
    "header read of another slot": [("read_header(header)", "read_header(local)")],
    "no check_header": [("            check_header(held, handle, rank, epoch, fail, record)", "            pass")],
}


def test_nothing_changed_is_green() -> None:
    for seed in range(60):
        for run in (play, play_failure):
            run(seed, make_dispatch=mutant(ll_dispatch.make_ll_dispatch), make_combine=mutant(ll_combine.make_ll_combine))


@pytest.mark.parametrize("name", DISPATCH_MUTANTS)
def test_dispatch_mutant_is_red(name: str) -> None:
    assert first_red(make_dispatch=mutant(ll_dispatch.make_ll_dispatch, *DISPATCH_MUTANTS[name])) is not None


@pytest.mark.parametrize("name", COMBINE_MUTANTS)
def test_combine_mutant_is_red(name: str) -> None:
    assert first_red(make_combine=mutant(ll_combine.make_ll_combine, *COMBINE_MUTANTS[name])) is not None


# ---- effects -----------------------------------------------------------------------------------------------------------------
STAGED = {"count_bank", "outcome", "keep_counters", "store_origins", "copy_table", "count_rows", "push_row", "reduce_row",
          "copy_row"}   # tests/test_staged.py
MASKED = {"read_mask", "next_epoch", "publish_join", "wait_joins", "wait_member_counts", "sum_member_counts", "drop_rows", "gather_member_row",
          "settle", "publish_late", "conclude", "tell_outcome", "await_outcome", "read_verdict", "catch_up", "is_stranded",
          "readmit", "tell_rows", "take_member_rows", "sum_member_row", "sum_packed_member_row"}
"""Tested in tests/test_mask_mutations.py."""
OTHER_PROGRAMS = {"count_ranks", "assign_ranks", "send_routing", "publish_arrived_rows", "take_arrived_rows", "sum_row"}
HIGH_THROUGHPUT = {name for name in OPS if name.startswith("ht_")}
"""Operations that the programs of this file do not use; their mutants stand in tests of their own."""


def effect_mutants(names: Iterable[str] = OPS.keys() - OTHER_PROGRAMS - HIGH_THROUGHPUT - STAGED - MASKED,
                   of: Mapping[str, Op] = OPS) -> dict[str, dict[str, Sequence[str]]]:
    """One effect dropped (fences and barriers), weakened or narrowed, or two swapped, for every operation that synchronises."""
    found = {}
    for op in (of[name] for name in of if name in names):
        for i, effect in enumerate(op.effects):
            before, after = op.effects[:i], op.effects[i + 1:]
            if effect.startswith(("fence", "bar")):
                found[f"{op.name}: no {i} {effect}"] = {op.name: before + after}
            if ".relaxed." in effect:
                weak = effect.replace(".relaxed.sys", ".weak").replace(".relaxed.gpu", ".weak")
                found[f"{op.name}: {weak}"] = {op.name: (*before, weak, *after)}
            if ".sys" in effect:
                found[f"{op.name}: {effect.replace('.sys', '.gpu')}"] = {op.name: (*before, effect.replace(".sys", ".gpu"), *after)}
            if ".acquire." in effect:
                found[f"{op.name}: {effect.replace('acquire', 'relaxed')}"] = {op.name: (*before, effect.replace("acquire", "relaxed"), *after)}
            if "acq_rel.gpu" in effect:
                found[f"{op.name}: {effect.replace('acq_rel', 'relaxed')}"] = {op.name: (*before, effect.replace("acq_rel", "relaxed"), *after)}
            if i and effect.startswith("fence"):
                found[f"{op.name}: {effect} first"] = {op.name: (*op.effects[:i - 1], effect, op.effects[i - 1], *after)}
            if after and effect.startswith("fence"):
                found[f"{op.name}: {effect} last"] = {op.name: (*before, after[0], effect, *after[1:])}
    return found


SURVIVORS = {
    "wait_arrived: no 1 bar.sync": "only warp 0 goes on, and the end of the kernel is a barrier",
    "last_block: no 2 bar.sync": "the vote on who is last; op_code and the waits after it have barriers of their own",
    "op_code: no 1 bar.sync": "the vote is what counts (test_last_block_decides_as_one); it has no memory to order",
    "op_code: ld.weak fail": "last_block orders it for the one thread that reads; relaxed is stronger than needed",
    "publish_abort: ld.weak fail": "last_block orders it; relaxed is stronger than needed",
}
"""Effects whose loss nothing shows in these programs, and why. Each is asserted to survive, so that this list stays true."""


@pytest.mark.parametrize("name", [name for name in effect_mutants() if name not in SURVIVORS])
def test_effect_mutant_is_red(name: str) -> None:
    assert first_red(effects=effect_mutants()[name]) is not None


@pytest.mark.parametrize("name", SURVIVORS)
def test_surviving_effect_mutant(name: str) -> None:
    assert first_red(seeds=60, effects=effect_mutants()[name]) is None


def without_barriers(*ops: str) -> dict[str, Sequence[str]]:
    """Effects of operations without their barriers."""
    return {op: tuple(e for e in OPS[op].effects if e != "bar.sync") for op in ops}


def test_the_last_block_decides_as_one_without_its_second_barrier() -> None:
    """`op_code` is read by one warp and voted on, so that no warp goes its own way, whatever `last_block` orders for the others."""
    for seed in range(300):
        sim = Simulator(2, seed, "adversarial", effects={"last_block": ("bar.sync", "atom.acq_rel.gpu blocks_done")},
                        faults=Faults(late={1: seed % 2}, timeouts=True))
        sim.policy.rush = 0.1
        p = Program(sim, GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1), [4, 4], seed=seed)
        p.play("D D")
        sim.run()


# ---- rules of the memory map: the numbers are those of the exploration in the design review ----------------------------------------
def one_bank(heads: int, num_ranks: int, source: int, epoch: int) -> int:
    """HEAD without banks."""
    return heads + source * 16


@pytest.mark.parametrize("kept", [False, True])
def test_a_failed_dispatch_leaves_nothing_to_combine(kept: bool) -> None:
    change = [("store_header(header, epoch, 0)", "pass")] if kept else []
    sim = Simulator(2, 0, faults=Faults(timeouts=True))
    p = Program(sim, GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1), [4, 4],
                make_dispatch=mutant(ll_dispatch.make_ll_dispatch, *change))
    first = p.dispatch()
    p.dispatch(handle=first.handle, ranks=[0])   # rank 1 never comes
    combined = p.combine(first, ranks=[0])
    sim.run()
    header = p.local[0][p.shape.local.header(0):].view(np.int64)[1]
    assert header == (first.handle if kept else 0) and bool((combined.out[0] == 7.0).all())


def test_one_bank_of_heads_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_head", one_bank)
    assert isinstance(first_red(), AssertionError)


def test_one_word_of_a_head_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other word may still be that of two operations ago: a mismatch that is none."""
    def hasty(high: int, low: int, epoch: int, source: int, late: bool, signature: int) -> waits.Verdict | None:
        verdict = waits._judge(high, epoch, source, late)
        theirs = (high & 0xFFFFFF) << 32 | (high >> 26 & 63) << 56 | low & waits.LOW
        return verdict if verdict is None or verdict.code or theirs == signature else waits.Verdict(Code.MISMATCH, source, source, theirs)

    monkeypatch.setattr(waits, "_judge_head", hasty)
    assert isinstance(first_red(program=sequence("D0 D1 D0 D1 X0 C0")), AssertionError)


def test_02_waiting_for_lower_ranks_only_is_red() -> None:
    assert isinstance(first_red(make_dispatch=mutant(ll_dispatch.make_ll_dispatch, (WAIT_HEADS, "code = 0"))), RaceError)


def test_04_dispatch_without_head_is_red() -> None:
    assert first_red(make_dispatch=mutant(ll_dispatch.make_ll_dispatch, (WAIT_HEADS, "code = 0"), (HEAD, ""))) is not None


@pytest.mark.parametrize("third, safe", [(0, False), (1, True)])
def test_08_09_slot_of_a_live_dispatch(third: int, safe: bool) -> None:
    def program(p: Program) -> None:
        a, b = p.dispatch(1), p.dispatch(0)
        p.experts(a), p.combine(a)
        p.dispatch(third)
        p.experts(b), p.combine(b)

    assert (first_red(program=program) is None) == safe


def sequence(text: str) -> Callable[[Program], None]:
    """A program in letters."""
    return lambda p: p.play(text)


def test_10_writing_into_the_slot_of_the_last_combine_is_red() -> None:
    assert isinstance(first_red(program=sequence("D0 X0 C0 X0 C0")), RaceError)


def test_11_alternating_slots_is_green() -> None:
    assert first_red(seeds=60, program=sequence("D0 D1 X0 C0 X1 C1 X0 C0 X1 C1")) is None


def test_12_head_before_the_pull_ended_is_red() -> None:
    signature = Signature(OpKind.DISPATCH, Layout.EXPERT_MAJOR, 0, 0, 0, 2, 2).pack()
    early = f"        if block_idx() == 0:\n            if warp_idx() == 0:\n" \
            f"                publish_head(window, HEADS, rank, RANKS, epoch + 1, {signature}, status)\n"
    check = "        # ---- 3 rows"
    error = first_red(program=sequence("D X C D X C"), make_combine=mutant(ll_combine.make_ll_combine, (check, early + check)))
    assert isinstance(error, (RaceError, AssertionError))   # or the poison of the slot's next use, which comes with the head


@pytest.mark.parametrize("skips", [True, False])
def test_19_rank_without_tokens_must_wait(skips: bool) -> None:
    change = [(WAIT_HEADS, f"code = 0\n        if num_tokens > 0:\n            {WAIT_HEADS}")] if skips else []
    error = first_red(seeds=SEEDS if skips else 60, tokens=(0, 3, 4), program=sequence("D0 D1 X0 C0 X1 C1 X0 C0"),
                      make_combine=mutant(ll_combine.make_ll_combine, *change))
    assert (error is not None) == skips


@pytest.mark.parametrize("spare", [False, True])
def test_21_22_owner_writes_rows_after_its_own_combine(spare: bool) -> None:
    def program(p: Program) -> None:
        d = p.dispatch()
        p.experts(d), p.combine(d)
        for rank in p.ranks:
            p.sim.host(rank, None, writes=p.rows(d, rank, spare), label="pads")
        p.play("D X C")

    error = first_red(seeds=60 if spare else SEEDS, program=program)
    assert error is None if spare else isinstance(error, RaceError)
