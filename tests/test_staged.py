"""Staged operations on the simulator: many schedules, all schedules of toy groups, failures, and mutants that must turn red (memory_map S1 to S6)."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from test_mutations import STAGED, mutant

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.errors import Code, Status
from ncclep_py.kernels import ll_dispatch, ll_rank_major_dispatch, ll_staged
from ncclep_py.kernels.ops import OPS
from ncclep_py.simulator import Faults, RaceError, SimulationError, Simulator
from ncclep_py.simulator import staged_ops as simulated
from ncclep_py.simulator.explore import Exhaustive, explore
from ncclep_py.simulator.staged_program import FACTORIES, StagedProgram, StagedRankMajorProgram

LAYOUTS = pytest.mark.parametrize("kind", [StagedProgram, StagedRankMajorProgram], ids=["expert_major", "rank_major"])

TEXTS = (
    "S A X P R S A X P R",                                  # one after the other, one staging slot
    "S0 S1 A0 X0 A1 X1 P00 P11 R0 R1 S0 S1 A1 X1 A0 X0 P02 P13 R3 R2",   # two micro-batches in flight, 2w staging slots
    "D X P00 D X P01 R0 R1 D X C",                          # one payload slot for two, between fused ones
    "D0 D1 X0 X1 P00 R0 P10 R0 P00 R0",                     # one staging slot again and again, nothing else between
    "S0 D1 A0 X0 X1 P00 C1 S1 R0 A1 X1 P10 R0",             # fused operations of another handle in between
)


def group(seed: int, num_ranks: int = 3, tokens: Sequence[int] = (5, 3, 4), effects: Mapping[str, Sequence[str]] | None = None,
          faults: Faults | None = None, epoch: int = 1, blocks: int = 2, kind: type[StagedProgram] = StagedProgram, **more: object) -> StagedProgram:
    """A small group with staging slots."""
    sim = Simulator(num_ranks, seed, ("adversarial", "fair")[seed % 5 == 4], blocks=blocks, effects=effects, faults=faults)
    config = GroupConfig(num_experts=2 * num_ranks, max_dispatch_tokens_per_rank=6, hidden=16, num_topk=2, num_slots=2, num_staging_slots=4)
    return kind(sim, config, tokens[:num_ranks], seed=seed, epoch=epoch, **more)


def play(seed: int, text: str = "", **how: object) -> StagedProgram:
    """One schedule, checked against the oracle."""
    p = group(seed, **how)
    p.play(text or TEXTS[seed % len(TEXTS)])
    p.sim.run()
    p.check()
    return p


# ---- results ---------------------------------------------------------------------------------------------------------------
@LAYOUTS
@pytest.mark.parametrize("text", TEXTS)
def test_many_schedules(text: str, kind: type[StagedProgram]) -> None:
    for seed in range(10):
        play(seed, text, kind=kind, epoch=(1, 2**32 - 2)[seed % 2])


@pytest.mark.parametrize("tokens", [(0,), (4,), (0, 3), (6, 1), (0, 0, 5), (1, 2, 3, 4)], ids=str)
def test_tokens_per_rank(tokens: tuple[int, ...]) -> None:
    for seed in range(8):
        play(seed // 2, num_ranks=len(tokens), tokens=tokens, kind=(StagedProgram, StagedRankMajorProgram)[seed % 2])


@pytest.mark.parametrize("grids", [[(1, 1), (2, 2), (3, 1)], [(4, 2), (1, 4), (5, 3)]], ids=str)
def test_unequal_grids(grids: list[tuple[int, int]]) -> None:
    for seed in range(10):
        play(seed // 2, grids=grids, kind=(StagedProgram, StagedRankMajorProgram)[seed % 2])


def toy(num_ranks: int, text: str, staging: int, factories: Mapping[str, Callable] | None = None,
        kind: type[StagedProgram] = StagedProgram, **more: object) -> Callable:
    """What `explore` builds: ranks of one warp."""
    def build(policy: Exhaustive) -> tuple[Simulator, Callable[[], None]]:
        sim = Simulator(num_ranks, policy=policy, blocks=1, warps=1)
        config = GroupConfig(num_experts=num_ranks, max_dispatch_tokens_per_rank=2, hidden=8, num_topk=1, num_slots=3, num_staging_slots=staging)
        p = kind(sim, config, (1, 1, 1)[:num_ranks], factories=factories, **more)
        p.play(text)
        return sim, p.check

    return build


@pytest.mark.parametrize(("num_ranks", "text", "staging"), [
    (2, "S A X P R S A X P R", 1), (2, "S0 S1 A0 X0 A1 X1 P00 P11 R0 R1", 2), (2, "S0 S1 A1 A0 P00 P11 R1 P11 R0 R1", 2),
    (3, "S A P R P R", 1)])
def test_every_schedule_is_right(num_ranks: int, text: str, staging: int) -> None:
    found = explore(toy(num_ranks, text, staging))
    assert found.complete and found.states > 50


@pytest.mark.parametrize(("num_ranks", "text", "staging"), [(2, "S0 S1 A0 X0 A1 X1 P00 P11 R0 R1", 2), (3, "D P R", 1)])
def test_every_rank_major_schedule_is_right(num_ranks: int, text: str, staging: int) -> None:
    found = explore(toy(num_ranks, text, staging, kind=StagedRankMajorProgram))
    assert found.complete and found.states > 100


@LAYOUTS
def test_replays_with_fixed_slots(kind: type[StagedProgram]) -> None:
    """What a CUDA graph does: the same launches, values and slots again and again, in any order of the graphs, with new data in the same memory."""
    texts = ("D0 X0 C0", "S0 S1 A0 X0 A1 X1 P00 P11 R0 R1", "D1 X1 P12 R2", "S0 A0 P00 P01 R1 R0")
    for seed in range(6):
        p, graphs = group(seed, kind=kind, epoch=2**32 - 3), []
        for text in texts:
            p.play(text)
            graphs.append([list(stream.queue) for stream in p.sim.streams])
            p.sim.run()
            p.check()
            graphs[-1] = (graphs[-1], list(p.dispatched), list(p.combined))
            p.dispatched.clear(), p.combined.clear()
        for step in range(6):
            queues, dispatched, combined = graphs[random.Random(seed * 10 + step).randrange(len(graphs))]
            for d in dispatched:   # twice the tokens, twice the results, to the bit
                for rank, tokens in enumerate(d.tokens):
                    tokens.mul_(2)
                    for received in (d.expected[rank].tokens, d.experts[rank]):
                        received.mul_(2)
                d.received.clear()
            for c in combined:
                for out, want in zip(c.out, c.expected, strict=True):
                    out.fill_(7), want.mul_(2)
            for stream, queue in zip(p.sim.streams, queues, strict=True):
                stream.queue.extend(queue)
            p.sim.run()
            p.dispatched, p.combined = list(dispatched), list(combined)
            p.check()
            p.dispatched.clear(), p.combined.clear()


# ---- failures --------------------------------------------------------------------------------------------------------------
def test_send_halves_wait_for_no_send_half() -> None:
    """Ranks 0 and 2 end their send half of a combine while rank 1 has not begun; with a second staging slot even the next one."""
    p = group(7)
    d = p.dispatch()
    for stage in (0, 1):
        p.send_combine(d, stage, ranks=[0, 2])
    p.sim.run()   # a deadlock would raise
    for stage in (0, 1):
        p.send_combine(d, stage, ranks=[1])
        p.complete_combine(d, stage)
    p.sim.run()
    p.check()


@LAYOUTS
@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_refused_half(half: str, kind: type[StagedProgram]) -> None:
    for seed in range(12):
        p, who = group(seed, kind=kind), seed % 3
        others = [r for r in range(3) if r != who]
        d = p.dispatch()
        if half == "dispatch":
            bad = p.send_dispatch(1, ranks=others)
            p.send_dispatch(1, ranks=[who], status=Status.REFUSED << 24 | 9)
            p.complete_dispatch(bad, ranks=others)
        else:
            p.send_combine(d, ranks=others)
            p.send_combine(d, ranks=[who], status=Status.REFUSED << 24 | 9)
            p.complete_combine(d)
        p.sim.run()
        for rank in range(3):
            record = p.record(rank)
            assert record is not None and (record.code, record.peer, record.seen) == (Code.REFUSED, who, 9)
        p.dispatched.clear(), p.combined.clear()
        p.play("S A X P R P R")
        p.sim.run()
        p.check()


def test_stale_slot_is_told_to_all() -> None:
    p = group(1)
    old, _ = p.dispatch(), p.dispatch()
    p.send_combine(old)
    p.complete_combine(old)
    p.sim.run()
    assert [p.record(rank).code for rank in p.ranks] == [Code.STALE_SLOT] * 3
    p.dispatched.clear(), p.combined.clear()
    p.play("D X P R")
    p.sim.run()
    p.check()


@LAYOUTS
def test_absent_rank_is_named_and_the_next_operations_are_right(kind: type[StagedProgram]) -> None:
    for seed in range(24):
        draw = random.Random(seed)
        who, dies = draw.randrange(3), seed % 2
        faults = Faults(dead={who: draw.randrange(200)}, timeouts=True) if dies else Faults(late={who: draw.randrange(6)}, timeouts=True)
        p = group(seed, faults=faults, kind=kind)
        p.play("S A P R S A P R")
        p.sim.run()
        living = [r for r in range(3) if not (dies and r == who)]
        records = {r: p.record(r) for r in living}
        assert all(record is None or record.culprit == who or rank == who for rank, record in records.items())
        assert len({p.epoch(r) for r in living}) == 1
        if not dies:
            p.dispatched.clear(), p.combined.clear()
            p.play("S A X P R P R")
            p.sim.run()
            p.check()


# ---- mutants ---------------------------------------------------------------------------------------------------------------
def half_of(layout: Layout, half: str, *changes: tuple[str, str]) -> Callable:
    """A half's kernel factory with pieces of its source replaced."""
    if half == "dispatch_send":
        make = ll_dispatch.make_ll_dispatch if layout is Layout.EXPERT_MAJOR else ll_rank_major_dispatch.make_ll_rank_major_dispatch
        return functools.partial(mutant(make, *changes), send_only=True)
    return mutant(FACTORIES[layout][half][0], *changes)


def first_red(seeds: int = 150, **how: object) -> BaseException | None:
    """The first error within `seeds` schedules, None if the mutant survives."""
    for seed in range(seeds):
        try:
            play(seed, **how)
        except (SimulationError, AssertionError) as error:
            return error
    return None


RELEASED = "code = wait_arrived(window, released, rank, RANKS, epoch, fail, record, timeout)"
ORIGINS = "store_origins(window, origins, at, first, TOPK, EXPERTS, RANKS, PLANE_ROWS, rank, PLACES)"
MUTANTS = {
    "dispatch_send": {
        "no wait_heads": [("code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)", "code = 0")],
        "no flight word": [("publish_head(window, flying, rank, RANKS, epoch, signature, outcome(fail, epoch, status))", "pass")],
        "no origins": [(ORIGINS, "pass")],
        "no kept counters": [("keep_counters(expert_counters, kept, LOCAL_EXPERTS)", "pass")],
        "epoch not kept": [("                store_header(flight, epoch, handle)\n", "")],
        "no advance_epoch": [("                advance_epoch(local + EPOCH, epoch)\n", "")],
        "every block is the last": [("last_block(local + BLOCKS_DONE) == 1", "1 == 1")],
        "one bank of counts": [("count_bank(COUNTS, COUNT_BANK, epoch)", "COUNTS")],
    },
    "dispatch_complete": {
        "no wait": [("wait_heads(window, flying, rank, RANKS, epoch, signature, fail, record, timeout)", "pass")],
    },
    "combine_send": {
        "no wait for RELEASED": [(RELEASED, "code = 0")],
        "no flight word": [("publish_head(window, flying, rank, RANKS, epoch, signature, outcome(fail, epoch, status))", "pass")],
        "no copy of the table": [("copy_table(table, copied, num_tokens, TOPK)", "pass")],
        "epoch not kept": [("                store_header(flight, epoch, handle)\n", "")],
        "no advance_epoch": [("                advance_epoch(flight + FLIGHT_NEXT, epoch)\n", "")],
        "every block is the last": [("last_block(local + BLOCKS_DONE) == 1", "1 == 1")],
    },
    "combine_complete": {
        "no wait": [("code = wait_heads(window, flying, rank, RANKS, epoch, signature, fail, record, timeout)", "code = 0")],
        "no RELEASED": [("publish_arrived(window, released, rank, RANKS, following)", "pass")],
        "RELEASED before the sums": [("        if code == 0:\n", "        if block_idx() == 0:\n            if warp_idx() == 0:\n"
                                      "                publish_arrived(window, released, rank, RANKS, following)\n        if code == 0:\n"),
                                     ("warp_idx, read_epoch = ops.warp_idx, ops.read_epoch\n",
                                      "warp_idx, read_epoch, block_idx = ops.warp_idx, ops.read_epoch, ops.block_idx\n")],
        "every block is the last": [("last_block(local + BLOCKS_DONE) == 1", "1 == 1")],
    },
}


RANK_MAJOR_MUTANTS = {
    "dispatch_send": {
        "no wait_heads": [("code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)", "code = 0")],
        "no ARRIVALS word": [("publish_arrived_rows(window, arrived, rank, RANKS, epoch)", "pass")],
        "no origins": [("store_origins(window, origins, at, first, TOPK, RANKS, RANKS, PLANE_ROWS, rank, PLACES)", "pass")],
        "no routing": [("send_routing(window, slot + IDS, slot + WEIGHTS, table, at, first, end, TOPK, EXPERTS, RANKS, PLANE_ROWS, global_ids)",
                        "pass")],
        "epoch not kept": [("store_header(flight, epoch, handle)", "pass")],
        "no store_header": [("store_header(header, epoch, handle)", "pass")],
        "no advance_epoch": [("                advance_epoch(local + EPOCH, epoch)\n", "")],
        "every block is the last": [("last_block(local + BLOCKS_DONE) == 1", "1 == 1")],
    },
    "dispatch_complete": {
        "no wait": [("code = wait_arrived(window, arrived, rank, RANKS, epoch, fail, record, timeout)", "code = 0")],
        "no take_arrived_rows": [("take_arrived_rows(window, arrived, slot + IDS, rank, RANKS, TOPK, PLANE_ROWS, epoch, src_rank_counters)",
                                  "pass")],
        "no kept counters": [("keep_counters(src_rank_counters, kept, RANKS)", "pass")],
    },
    "combine_send": {"planes are local experts": [("    if shape.layout is Layout.RANK_MAJOR:", "    if False:")]},
}


@pytest.mark.parametrize(("half", "name"), [(half, name) for half in MUTANTS for name in MUTANTS[half]])
def test_kernel_mutant_is_red(half: str, name: str) -> None:
    assert first_red(factories={half: half_of(Layout.EXPERT_MAJOR, half, *MUTANTS[half][name])}) is not None


@pytest.mark.parametrize(("half", "name"), [(half, name) for half in RANK_MAJOR_MUTANTS for name in RANK_MAJOR_MUTANTS[half]])
def test_rank_major_kernel_mutant_is_red(half: str, name: str) -> None:
    changed = half_of(Layout.RANK_MAJOR, half, *RANK_MAJOR_MUTANTS[half][name])
    assert first_red(factories={half: changed}, kind=StagedRankMajorProgram) is not None


@LAYOUTS
def test_nothing_changed_is_green(kind: type[StagedProgram]) -> None:
    assert first_red(20, kind=kind, factories={half: half_of(kind.layout, half) for half in FACTORIES[kind.layout]}) is None


@pytest.mark.parametrize("change", [("store_origins(window, origins, at, first, TOPK, RANKS, RANKS, PLANE_ROWS, rank, PLACES)", "pass"),
                                    ("keep_counters(src_rank_counters, kept, RANKS)", "pass")])
def test_fused_rank_major_dispatch_without_what_staged_combines_need_is_red(change: tuple[str, str]) -> None:
    changed = mutant(ll_rank_major_dispatch.make_ll_rank_major_dispatch, change)
    assert first_red(text="D X P R D X P R", make_dispatch=changed, kind=StagedRankMajorProgram) is not None


def test_fused_dispatch_without_origins_is_red() -> None:
    changed = mutant(ll_dispatch.make_ll_dispatch, (ORIGINS, "pass"))
    assert first_red(text="D X P R D X P R", make_dispatch=changed) is not None


def test_fused_dispatch_with_one_bank_of_counts_is_red() -> None:
    changed = [("count_bank(COUNTS, COUNT_BANK, epoch)", "COUNTS")]
    assert first_red(text="S0 D1 A0 S0 D1 A0", make_dispatch=mutant(ll_dispatch.make_ll_dispatch, *changed),
                     factories={"dispatch_send": half_of(Layout.EXPERT_MAJOR, "dispatch_send", *changed)}) is not None


def test_one_flight_for_two_operations_is_red() -> None:
    """S1: one set of ARRIVED words for all staged dispatches would be overwritten unread (with its two banks: by the third)."""
    def program(policy: Exhaustive) -> tuple[Simulator, Callable[[], None]]:
        sim, check = build(policy)
        for stream in sim.streams:
            for launch in stream.queue:
                for parameters in (ll_dispatch.PARAMETERS, ll_staged.DISPATCH_COMPLETE_PARAMETERS):
                    if len(launch.args) == len(parameters):
                        args = list(launch.args)
                        args[parameters.index("flying")] = flying
                        launch.args = tuple(args)
        return sim, check

    build = toy(2, "S0 S1 S2 A0 A1 A2", 1)
    assert explore(build).complete
    config = GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=2, hidden=8, num_topk=1, num_slots=3, num_staging_slots=1)
    flying = StagedProgram(Simulator(2), config, (1, 1)).shape.window.flight(0)
    with pytest.raises((SimulationError, AssertionError)):
        explore(program)


def test_exploration_finds_a_missing_wait_for_released() -> None:
    changed = {"combine_send": mutant(ll_staged.make_ll_combine_send, (RELEASED, "code = 0"))}
    with pytest.raises((RaceError, AssertionError)):
        explore(toy(2, "D P R P R", 1, changed), limit=5000)


def effects() -> dict[str, dict[str, Sequence[str]]]:
    """Barriers dropped and accesses weakened in operations that only staged kernels use."""
    found = {}
    for name in sorted(STAGED):
        for i, effect in enumerate(OPS[name].effects):
            before, after = OPS[name].effects[:i], OPS[name].effects[i + 1:]
            if effect.startswith("bar"):
                found[f"{name}: no {i} {effect}"] = {name: before + after}
            if ".relaxed." in effect:
                found[f"{name}: {effect.replace('.relaxed.gpu', '.weak')}"] = {name: (*before, effect.replace(".relaxed.gpu", ".weak"), *after)}
    return found


SURVIVORS = {"outcome: ld.weak fail": "last_block orders it; relaxed is stronger than needed"}


@pytest.mark.parametrize("name", effects())
def test_effect_mutants(name: str) -> None:
    error = first_red(25 if name in SURVIVORS else 150, effects=effects()[name])
    assert (error is None) == (name in SURVIVORS)


@pytest.mark.parametrize(("op", "effects"), [
    ("publish_arrived", ("st.relaxed.sys arrived",)), ("wait_arrived", ("ld.relaxed.sys arrived", "bar.sync")),
    ("publish_head", ("st.relaxed.sys head",)), ("wait_heads", ("ld.relaxed.sys head", "bar.sync")),
    ("last_block", ("bar.sync", "atom.relaxed.gpu blocks_done", "bar.sync"))])
def test_fences_of_released_and_flight_words_are_needed(op: str, effects: Sequence[str]) -> None:
    """Without a dispatch in between, only these order the pushes of one use of a staging slot after the sums of the last."""
    assert isinstance(first_red(text="S A X P R P R P R", effects={op: effects}), RaceError)


def test_the_table_copy_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete half that read the payload slot's table would find the next dispatch's."""
    def reduce_from_slot(call: object, task: object, window: int, staging: int, rank: int, table: int, *rest: int) -> int:
        return original(call, task, window, staging, rank, tables[rank], *rest)

    original = simulated.reduce_row
    monkeypatch.setattr(simulated, "reduce_row", reduce_from_slot)
    p = group(3)
    tables = {rank: p.local[rank].ctypes.data + p.shape.local.table(0) for rank in p.ranks}
    p.play("D X P00 D X R0")
    with pytest.raises((SimulationError, AssertionError)):
        p.sim.run()
        p.check()
