"""Every element of the protocol is needed: remove or weaken one, and some schedule turns red within a bounded number of seeds.

Three kinds of mutants: a changed line of a kernel's source, a changed effect of an operation, and programs that break a rule of ``memory_map``
(with their safe twins). A surviving mutant would be a redundant element or a blind spot of the simulator.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from ncclep_py.config import GroupConfig
from ncclep_py.errors import Code, Status
from ncclep_py.kernels import ll_combine, ll_dispatch
from ncclep_py.kernels.ops import OPS
from ncclep_py.simulator import DeadlockError, Faults, RaceError, SimulationError, Simulator, UniformityError
from ncclep_py.simulator import ops as simulated
from ncclep_py.simulator.program import Program

SEEDS = 200
TEXTS = ("D X C D X C", "D D X C C", "D0 D1 X0 C0 D0 X1 C1")


def play(seed: int, text: str = "", num_ranks: int = 3, tokens: Sequence[int] = (5, 3, 4), effects: Mapping[str, Sequence[str]] | None = None,
         blocks: int = 2, program: Callable[[Program], None] | None = None, **factories: Callable) -> None:
    """One schedule of a small group, checked against the oracle."""
    sim = Simulator(num_ranks, seed, ("adversarial", "fair")[seed % 5 == 4], blocks=blocks, effects=effects)
    p = Program(sim, GroupConfig(num_experts=2 * num_ranks, max_dispatch_tokens_per_rank=6, hidden=16, num_topk=2, num_slots=2),
                tokens[:num_ranks], seed=seed, **factories)
    if program is None:
        p.play(text or TEXTS[seed % len(TEXTS)])
    else:
        program(p)
    sim.run()
    p.check()


def play_failure(seed: int, **how: object) -> None:
    """One schedule in which a rank comes late, dies, refuses, or combines a stale slot: who is to blame must be known to all who live."""
    draw = random.Random(seed)
    kind, who = draw.choice(("late", "dead", "refused", "stale")), draw.randrange(3)
    faults = {"late": Faults(late={who: draw.randrange(4)}, timeouts=True), "dead": Faults(dead={who: draw.randrange(150)}, timeouts=True)}.get(kind)
    sim = Simulator(3, seed, ("adversarial", "fair")[seed % 2], effects=how.pop("effects", None), faults=faults)
    p = Program(sim, GroupConfig(num_experts=6, max_dispatch_tokens_per_rank=6, hidden=16, num_topk=2), (5, 3, 4), seed=seed, **how)
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


def first_red(**how: object) -> BaseException | None:
    """The first error within `SEEDS` schedules, every other one with a failure; None if the mutant survives."""
    for seed in range(SEEDS):
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


def changed(op: str, *effects: str) -> dict[str, Sequence[str]]:
    """Effects of one operation replaced."""
    return {op: effects}


# ---- kernels -----------------------------------------------------------------------------------------------------------------
HEAD = """        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, status)
"""
WAIT_HEADS = "code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)"
ARRIVED = """                if warp_idx() == 0:
                    publish_arrived(window, ARRIVED, rank, RANKS, epoch)
                code = wait_arrived(window, ARRIVED, rank, RANKS, epoch, fail, record, timeout)
"""
SUM = "code = sum_counts(window, COUNTS, rank, RANKS, EXPERTS, epoch, PLANE_ROWS, expert_counters, fail, record, timeout)"
SUM_LATE = ARRIVED + "                if code == 0:\n                    " + SUM + "\n"

DISPATCH_MUTANTS = {
    "no wait_heads": [(WAIT_HEADS, "code = 0")],
    "no wait_counts": [("code = wait_counts(window, COUNTS, rank, RANKS, EXPERTS, epoch, fail, record, timeout)", "code = 0")],
    "no wait_arrived": [("code = wait_arrived(window, ARRIVED, rank, RANKS, epoch, fail, record, timeout)", "code = 0")],
    "no publish_head": [(HEAD, "")],
    "no publish_arrived": [("publish_arrived(window, ARRIVED, rank, RANKS, epoch)\n", "pass\n")],
    "no publish_counts": [("        publish_counts(window, COUNTS, rank, RANKS, EXPERTS, epoch)\n", "")],
    "no store_header": [("store_header(header, epoch, handle)\n", "pass\n")],
    "no advance_epoch": [("                advance_epoch(local + EPOCH, epoch)\n", "")],
    "every block is the last": [("last_block(local + BLOCKS_DONE) == 1", "1 == 1")],
    "block 0 is the last": [("last_block(local + BLOCKS_DONE) == 1", "block_idx() == 0")],
    "sum_counts after arrived": [(SUM, "code = 0"), (ARRIVED, SUM_LATE)],
    "no sum_counts": [(SUM, "code = 0")],
    "no assign_rows": [("assign_rows(topk_idx, IDX_BYTES, TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, part, table, rank, epoch, fail, record)",
                        "pass")],
    "arrived by one warp too early": [(ARRIVED, ARRIVED.replace("publish_arrived", "pass  # ")),
                                      ("        if last_block(", "        if block_idx() == 0:\n            if warp_idx() == 0:\n"
                                       "                publish_arrived(window, ARRIVED, rank, RANKS, epoch)\n        if last_block(")],
    "count_experts after the heads, by one warp": [("        count_experts(", "        if warp_idx() == 0: count_experts(")],
}
COMBINE_MUTANTS = {
    "no wait_heads": [(WAIT_HEADS, "code = 0")],
    "no publish_head": [(HEAD, "")],
    "no advance_epoch": [("                advance_epoch(local + EPOCH, epoch)\n", "")],
    "every block is the last": [("last_block(local + BLOCKS_DONE) == 1", "1 == 1")],
    "block 0 is the last": [("last_block(local + BLOCKS_DONE) == 1", "block_idx() == 0")],
}


def test_nothing_changed_is_green() -> None:
    for seed in range(SEEDS):
        for run in (play, play_failure):
            run(seed, make_dispatch=mutant(ll_dispatch.make_ll_dispatch), make_combine=mutant(ll_combine.make_ll_combine))


@pytest.mark.parametrize("name", DISPATCH_MUTANTS)
def test_dispatch_mutant_is_red(name: str) -> None:
    assert first_red(make_dispatch=mutant(ll_dispatch.make_ll_dispatch, *DISPATCH_MUTANTS[name])) is not None


@pytest.mark.parametrize("name", COMBINE_MUTANTS)
def test_combine_mutant_is_red(name: str) -> None:
    assert first_red(make_combine=mutant(ll_combine.make_ll_combine, *COMBINE_MUTANTS[name])) is not None


# ---- effects -----------------------------------------------------------------------------------------------------------------
def effect_mutants() -> dict[str, dict[str, Sequence[str]]]:
    """One effect dropped (fences and barriers), weakened or narrowed, or two swapped, for every operation that synchronises."""
    found = {}
    for op in OPS.values():
        for i, effect in enumerate(op.effects):
            before, after = op.effects[:i], op.effects[i + 1:]
            if effect.startswith(("fence", "bar")):
                found[f"{op.name}: no {i} {effect}"] = {op.name: before + after}
            if ".relaxed." in effect:
                weak = effect.replace(".relaxed.sys", ".weak").replace(".relaxed.gpu", ".weak")
                found[f"{op.name}: {weak}"] = {op.name: (*before, weak, *after)}
            if ".sys" in effect:
                found[f"{op.name}: {effect.replace('.sys', '.gpu')}"] = {op.name: (*before, effect.replace(".sys", ".gpu"), *after)}
            if "acq_rel.gpu" in effect:
                found[f"{op.name}: {effect.replace('acq_rel', 'relaxed')}"] = {op.name: (*before, effect.replace("acq_rel", "relaxed"), *after)}
            if i and effect.startswith("fence"):
                found[f"{op.name}: {effect} first"] = {op.name: (*op.effects[:i - 1], effect, op.effects[i - 1], *after)}
            if after and effect.startswith("fence"):
                found[f"{op.name}: {effect} last"] = {op.name: (*before, after[0], effect, *after[1:])}
    return found


@pytest.mark.parametrize("name", effect_mutants())
def test_effect_mutant_is_red(name: str) -> None:
    assert first_red(effects=effect_mutants()[name]) is not None
