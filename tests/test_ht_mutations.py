"""Every element of the HIGH_THROUGHPUT kernels and operations is needed: without it, some schedule turns red."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from test_mutations import effect_mutants, mutant

from ncclep_py.config import Algorithm, GroupConfig, Layout, OverflowPolicy
from ncclep_py.errors import Code, Status
from ncclep_py.kernels import ht_combine, ht_count, ht_dispatch, ht_prepare
from ncclep_py.kernels.ops import OPS
from ncclep_py.simulator import Faults, SimulationError, Simulator
from ncclep_py.simulator import ht_ops as simulated
from ncclep_py.simulator.ht_program import HTProgram

SEEDS = 160
TOKENS = (5, 3, 4)
TEXTS = ("U D X C B X G", "U D X C U D X C", "U0 U1 D0 D1 X0 C0 X1 C1 B0 X0 G0", "U U U D X C")
FACTORY = {"count": ht_count.make_ht_count, "prepare": ht_prepare.make_ht_prepare, "dispatch": ht_dispatch.make_ht_dispatch,
           "combine": ht_combine.make_ht_combine}


def program(seed: int, effects: Mapping[str, Sequence[str]] | None = None, faults: Faults | None = None, budget: int = 0,
            **factories: object) -> HTProgram:
    sim = Simulator(3, seed, ("adversarial", "fair")[seed % 5 == 4], effects=effects, faults=faults)
    config = GroupConfig(num_experts=6, max_dispatch_tokens_per_rank=6, hidden=(16, 8)[seed % 2], num_topk=2, num_slots=2,
                         algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=budget,
                         overflow_policy=OverflowPolicy.DROP if budget else OverflowPolicy.TRAP)
    return HTProgram(sim, config, (Layout.FLAT, Layout.EXPERT_MAJOR)[seed // 2 % 2], TOKENS, seed=seed, alignment=4, **factories)


def play(seed: int, **how: object) -> None:
    """One schedule of a small group, some with too small or too large a budget, checked against the oracle."""
    p = program(seed, budget=(0, 20, 7)[seed // 3 % 3], **how)
    p.play(TEXTS[seed % len(TEXTS)])
    p.sim.run()
    p.check()


def play_failure(seed: int, **how: object) -> None:
    """One schedule in which a rank comes late, dies, refuses an update, or a slot holds another handle's rows: all who live must know the culprit."""
    draw = random.Random(seed)
    kind, who = draw.choice(("late", "dead", "refused", "stale")), draw.randrange(3)
    faults = {"late": Faults(late={who: draw.randrange(8)}, timeouts=True), "dead": Faults(dead={who: draw.randrange(250)}, timeouts=True)}.get(kind)
    p = program(seed, faults=faults, budget=(0, 6)[seed % 2], **how)
    if kind == "refused":
        p.update(ranks=[r for r in range(3) if r != who])
        p.update(ranks=[who], status=Status.REFUSED << 24 | 2)
        p.play("D B")
    elif kind == "stale":
        p.play("U0 U1 D0 C0")
        p.combine(1)
    else:
        p.play("U D C B G")
    p.sim.run()
    records = {r: p.record(r) for r in range(3) if not (kind == "dead" and r == who)}
    assert {p.epoch(r) for r in records} == {{"refused": 4, "stale": 6}.get(kind, 6)}
    for rank, record in records.items():
        if kind in ("late", "dead"):
            assert record is None or record.culprit == who or rank == who or record.code == Code.REFUSED
            assert kind == "late" or record is not None
        else:
            assert record is not None and record.code == {"refused": Code.REFUSED, "stale": Code.STALE_SLOT}[kind]
            assert kind == "stale" or (record.peer, record.seen) == (who, 2)


def first_red(seeds: int = SEEDS, **how: object) -> BaseException | None:
    """The first error within `seeds` schedules, every third with a failure; None if the mutant survives."""
    for seed in range(seeds):
        try:
            (play_failure if seed % 3 == 2 else play)(seed // 3 if seed % 3 == 2 else seed, **how)
        except (SimulationError, AssertionError) as error:
            return error
    return None


HEAD = """        if block_idx() == 0:
            if warp_idx() == 0:
                publish_head(window, HEADS, rank, RANKS, epoch, signature, {})
"""
STATE_HEAD = HEAD.format("header_status(held, handle, state)")
PLAIN_HEAD, MAP_HEAD = HEAD.format("status"), HEAD.format("map_status(maps + HEADER, handle, status)")
WAIT_HEADS = "code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)"
ADVANCE = "                advance_epoch(local + EPOCH, epoch)\n"
LAST = "last_block(local + BLOCKS_DONE) == 1"
KEPT = "publish_kept(window, KEPT, maps + PLACES, num_tokens, TOPK, EXPERTS, RANKS, BY_RANK, BUDGET, rank, epoch)\n"
WAIT_HITS = "code = wait_hits(window, HITS, rank, RANKS, EXPERTS, BY_RANK, epoch, fail, record, timeout)"
PADS = "zero_pads(rows_window, rows_at, maps + ZONES, rank, LOCAL_EXPERTS, ROW_BYTES)"
WEIGHT_PADS = "zero_pads(window, slot + WEIGHTS, maps + ZONES, rank, LOCAL_EXPERTS, 4)"
CLEAR = "clear_ids(window, slot + IDX, slot + WEIGHTS, maps + ZONES, rank, LOCAL_EXPERTS, TOPK, cleared)"
EARLY_KEPT = f"        if code == 0 and block_idx() == 0:\n            {KEPT}        # ---- 4"
EARLY_ARRIVED = f"        if block_idx() == 0:\n            if warp_idx() == 0:\n                ARRIVED        if {LAST}"
ARRIVED = "publish_arrived(window, ARRIVED, rank, RANKS, epoch)\n"
SHARED = {
    "no wait_heads": [(WAIT_HEADS, "code = 0")],
    "no advance_epoch": [(ADVANCE, "")],
    "every block is the last": [(LAST, "1 == 1")],
    "block 0 is the last": [(LAST, "block_idx() == 0")],
    "no publish_abort": [("publish_abort(window, HEADS, ARRIVED, rank, RANKS, epoch, fail)\n", "pass\n")],
}
MUTANTS = {f"{kernel}: {name}": (kernel, change) for kernel in ("prepare", "dispatch", "combine") for name, change in SHARED.items()} | {
    "prepare: no publish_head": ("prepare", [(PLAIN_HEAD, "")]),
    "prepare: no publish_hits": ("prepare", [("publish_hits(window, HITS, rank, RANKS, EXPERTS, BY_RANK, epoch)", "pass")]),
    "prepare: no wait_hits": ("prepare", [(WAIT_HITS, "code = 0")]),
    "prepare: no add_up": ("prepare", [("add_up(maps + PARTIALS, EXPERTS, RANKS, BY_RANK, CHUNKS)", "pass")]),
    "prepare: no publish_kept": ("prepare", [(KEPT, "pass\n")]),
    "prepare: publish_kept by the first block": ("prepare", [(KEPT, "pass\n"), ("        # ---- 4", EARLY_KEPT)]),
    "prepare: no store_header": ("prepare", [("store_header(maps + HEADER, epoch, handle)", "pass")]),
    "prepare: header in any case": ("prepare", [("                else:\n                    store_header(maps + HEADER, epoch, handle)",
                                                 "                store_header(maps + HEADER, epoch, handle)")]),
    "dispatch: no publish_head": ("dispatch", [(MAP_HEAD, "")]),
    "dispatch: no map_status": ("dispatch", [("map_status(maps + HEADER, handle, status)", "status")]),
    "dispatch: no publish_arrived": ("dispatch", [(ARRIVED, "pass\n")]),
    "dispatch: no wait_arrived": ("dispatch", [("code = wait_arrived(window, ARRIVED, rank, RANKS, epoch, fail, record, timeout)", "code = 0")]),
    "dispatch: no store_header": ("dispatch", [("store_header(header, epoch, handle)", "pass")]),
    "dispatch: arrived by one warp too early": ("dispatch", [(ARRIVED, "pass\n"), (f"        if {LAST}", EARLY_ARRIVED.replace("ARRIVED", ARRIVED))]),
    "dispatch: every piece sends weights": ("dispatch", [("if begin == 0:", "if 1 == 1:")]),
    "dispatch: no pads": ("dispatch", [(PADS, "pass")]),
    "dispatch: no weights of pads": ("dispatch", [(WEIGHT_PADS, "pass")]),
    "dispatch: no clear_ids": ("dispatch", [(CLEAR, "pass")]),
    "combine: no publish_head": ("combine", [(STATE_HEAD, "")]),
    "combine: no check_header": ("combine", [("            check_header(held, handle, rank, epoch, fail, record)", "            pass")]),
    "combine: every piece gathers weights": ("combine", [("if begin == 0:", "if 1 == 1:")]),
}
PROMPT = "it ends without ARRIVED: a peer that still waits for HEADs ends at once by it, else at its own deadline, and blames the same rank"
SURVIVORS = {"prepare: no publish_abort": PROMPT, "combine: no publish_abort": PROMPT, "dispatch: no publish_abort": "see the test of its own"}


def test_nothing_changed_is_green() -> None:
    for seed in range(60):
        for run in (play, play_failure):
            run(seed, **{name: mutant(make) for name, make in FACTORY.items()})


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in SURVIVORS])
def test_kernel_mutant_is_red(name: str) -> None:
    kernel, changes = MUTANTS[name]
    assert first_red(**{kernel: mutant(FACTORY[kernel], *changes)}) is not None


def test_dispatch_without_publish_abort_is_red() -> None:
    """Whoever waits for ARRIVED of a rank that gave up must hear of the culprit; few schedules get there."""
    with pytest.raises(AssertionError):
        for seed in range(560, 590):
            play_failure(seed, dispatch=mutant(FACTORY["dispatch"], *MUTANTS["dispatch: no publish_abort"][1]))


HT_OPS = [name for name in OPS if name.startswith("ht_")]
EFFECT_SURVIVORS = {"ht_assign: no 3 bar.sync": "last_block begins with a barrier, and nothing before it looks at what was assigned"}


@pytest.mark.parametrize("name", [name for name in effect_mutants(HT_OPS) if name not in EFFECT_SURVIVORS])
def test_effect_mutant_is_red(name: str) -> None:
    assert first_red(effects=effect_mutants(HT_OPS)[name]) is not None


def one_bank(hits: int, num_ranks: int, num_experts: int, source: int, epoch: int) -> int:
    """HITS without banks."""
    return hits + source * (num_experts + num_ranks) * 8


def test_one_bank_of_hits_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_hits", one_bank)
    assert first_red() is not None


def test_an_update_between_dispatch_and_combine_of_another_handle_is_green() -> None:
    for seed in range(20):
        p = program(seed)
        p.update(0, ids=[torch.tensor([[0, 5]] * t) for t in TOKENS])
        p.play("D0 U1 X0 C0 D1 U0 X1 C1")
        p.sim.run()
        p.check()


@pytest.mark.parametrize("kept", [False, True])
def test_a_dispatch_that_timed_out_leaves_nothing_to_combine(kept: bool) -> None:
    change = [("store_header(header, epoch, 0)", "pass")] if kept else []
    p = program(0, faults=Faults(timeouts=True), dispatch=mutant(ht_dispatch.make_ht_dispatch, *change))
    p.play("U D")
    p.dispatch(0, ranks=[0, 1])   # rank 2 never comes
    p.sim.run()
    header = p.local[0][p.shapes[0].local.header(0):][:16].view(np.int64)[1]
    assert (header != 0) == kept
