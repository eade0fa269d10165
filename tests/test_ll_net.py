"""LOW_LATENCY over several teams in the simulator: the bits of one team over an adversarial network; failures are known; each element is needed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from deadlines import Links, machine
from test_mutations import effect_mutants, mutant

from ncclep_py.config import GroupConfig
from ncclep_py.errors import Code, Phase, Status
from ncclep_py.kernels.ll_net_combine import make_ll_net_combine
from ncclep_py.kernels.ll_net_dispatch import make_ll_net_dispatch
from ncclep_py.kernels.ll_net_vocabulary import LL_NET_OPERATIONS
from ncclep_py.kernels.ops import NET_OPS
from ncclep_py.ll_net_map import LLNetMap
from ncclep_py.memory_map import LocalMap, WindowMap
from ncclep_py.simulator import Faults, RaceError, SimulationError, Simulator, ll_net_program
from ncclep_py.simulator.ll_net_program import LLNetProgram

SEEDS = 240
TEXTS = ("D X C D X C", "D D X C C", "D0 D1 X0 C0 D0 X1 C1")


def group(seed: int, ranks: int, team: int, tokens: Sequence[int], experts: int = 0, topk: int = 2, most: int = 4, hidden: int = 16,
          dtype: torch.dtype = torch.bfloat16, blocks: int = 2, faults: Faults | None = None, effects: Any = None,
          program: type[LLNetProgram] = LLNetProgram, **more: Any) -> LLNetProgram:
    sim = Simulator(ranks, seed, ("adversarial", "fair")[seed % 5 == 4], blocks=blocks, faults=faults, effects=effects)
    config = GroupConfig(num_experts=experts or 2 * ranks, max_dispatch_tokens_per_rank=most, hidden=hidden, num_topk=topk, num_slots=2, dtype=dtype)
    return program(sim, config, tokens, team, seed=seed, **more)


def play(seed: int, ranks: int = 4, team: int = 2, tokens: Sequence[int] = (4, 2, 3, 4), text: str = "", **how: Any) -> LLNetProgram:
    """One schedule, checked against the oracle of one team."""
    p = group(seed, ranks, team, tokens, **how)
    p.play(text or TEXTS[seed % len(TEXTS)])
    p.sim.run()
    p.check()
    return p


@pytest.mark.parametrize(("ranks", "team"), [(2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (8, 1), (8, 2), (8, 4)])
def test_the_bits_of_one_team(ranks: int, team: int) -> None:
    for seed in range(6):
        p = play(seed, ranks, team, [(3 * r + seed) % 5 for r in range(ranks)])
        assert p.network.puts > 0


@pytest.mark.parametrize("tokens", [(0, 0, 0, 0), (0, 4, 0, 1), (1, 1, 1, 1), (4, 4, 4, 4)])
def test_tokens_per_rank(tokens: tuple[int, ...]) -> None:
    for seed in range(6):
        play(seed, tokens=tokens)


@pytest.mark.parametrize(("experts", "topk", "hidden", "dtype", "blocks"), [
    (4, 1, 8, torch.bfloat16, 1), (12, 4, 24, torch.float16, 3), (16, 3, 8, torch.float32, 5), (20, 3, 520, torch.bfloat16, 2)])
def test_shapes(experts: int, topk: int, hidden: int, dtype: torch.dtype, blocks: int) -> None:
    for seed in range(4):
        play(seed, experts=experts, topk=topk, hidden=hidden, dtype=dtype, blocks=blocks)


@pytest.mark.parametrize("epoch", [2**31 - 2, 2**32 - 2])
def test_epochs_wrap(epoch: int) -> None:
    for seed in range(4):
        play(seed, epoch=epoch)


def test_tokens_without_experts_and_all_to_one() -> None:
    for seed in range(3):
        for rows in ([[-1, -1]], [[5, -1], [-1, 5], [-1, -1]], [[7, 0]] * 4, [[100, -9], [2, 2]]):
            p = group(seed, 4, 2, [len(rows)] * 4)
            d = p.dispatch(topk_idx=[torch.tensor(rows) for _ in range(4)])
            p.experts(d)
            p.combine(d)
            p.sim.run()
            p.check()


def test_nothing_travels_twice_to_a_rank_or_to_my_team() -> None:
    """2 ranks in teams of 1: a HEAD (2 words), counts, a tag, and one message per token that wants the other; back one row per row."""
    p = group(1, 2, 1, (3, 0), experts=4)
    d = p.dispatch(topk_idx=[torch.tensor([[2, 3], [0, 1], [0, 2]]), torch.zeros(0, 2, dtype=torch.int64)])
    p.experts(d)
    p.combine(d)
    p.sim.run()
    p.check()
    assert p.network.puts == 2 * (2 + 1 + 1) + 2 + 2 * (2 + 1) + 3


# ---- failures --------------------------------------------------------------------------------------------------------------------
def play_failure(seed: int, **how: Any) -> None:
    """One schedule in which a rank comes late, dies, refuses, or combines a stale slot: all who live end, and know the culprit."""
    draw = random.Random(seed)
    kind, who = draw.choice(("late", "dead", "refused", "stale")), draw.randrange(4)
    faults = {"late": Faults(late={who: draw.randrange(4)}, timeouts=True), "dead": Faults(dead={who: draw.randrange(250)}, timeouts=True)}.get(kind)
    p = group(seed, 4, (2, 1)[seed % 2], (4, 2, 3, 4), faults=faults, **how)
    d = p.dispatch()
    if kind == "refused":
        p.dispatch(ranks=[r for r in range(4) if r != who])
        p.dispatch(ranks=[who], status=Status.REFUSED << 24 | 9)
    else:
        p.combine(d)
        newer = p.dispatch()
        d = d if kind == "stale" else newer
    p.combine(d)
    p.sim.run()
    records = {r: p.record(r) for r in range(4) if not (kind == "dead" and r == who)}
    assert {p.epoch(r) for r in records} == {4 if kind == "refused" else 5}
    for rank, record in records.items():
        if kind in ("late", "dead"):
            assert named(records, who) or kind == "dead"
            assert kind == "late" or record is None or record.culprit == who or rank == who or record.phase != Phase.HEAD
        else:
            assert record is not None and record.code == {"refused": Code.REFUSED, "stale": Code.STALE_SLOT}[kind]
            assert kind == "stale" or (record.peer, record.seen) == (who, 9)


def named(records: dict[int, Any], who: int) -> bool:
    """Whether every record of a rank other than `who` names it, or, once all had entered, a rank that gave up and could not tell why in time."""
    return all(r is None or rank == who or r.culprit == who or (r.phase != Phase.HEAD and records.get(r.culprit) is not None)
               for rank, r in records.items())


def test_failures_are_known() -> None:
    for seed in range(150):
        play_failure(seed)


def test_a_late_rank_is_named_and_later_operations_are_right() -> None:
    """Puts of the operation that was given up land whenever they like, also after the next has begun."""
    blamed = 0
    for seed in range(60):
        late = seed % 4
        p = group(seed, 4, (2, 1)[seed % 2], (4, 2, 3, 4), faults=Faults(late={late: 0}, timeouts=True))
        p.dispatch()
        p.sim.run()
        records = [p.record(r) for r in range(4)]
        blamed += sum(r is not None and r.culprit == late for r in records)
        assert named(dict(enumerate(records)), late)
        p.dispatched.clear()
        p.sim.faults = Faults()
        p.sim.scheduler.faulty = False
        p.play("D X C")
        p.sim.run()
        p.check()
    assert blamed > 10


def test_a_lost_connection_ends_in_time_and_is_named() -> None:
    for seed in range(30):
        p = group(seed, 4, 2, (4, 2, 3, 4), faults=Faults(timeouts=True))
        p.network.lost |= {(0, 3), (3, 0)}
        p.dispatch()
        p.sim.run()
        records = {r: p.record(r) for r in range(4)}
        assert any(record is not None and record.code in (Code.TIMEOUT, Code.ABORTED) for record in records.values())
        assert all(record is None or {record.culprit, record.peer} & {0, 3} for record in records.values())


def test_a_slow_rail_changes_nothing() -> None:
    for seed in range(10):
        p = group(seed, 4, 2, (4, 2, 3, 4))
        p.network.slow.add(seed % 4)
        p.play("D X C D X C")
        p.sim.run()
        p.check()


# ---- plan ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "team"), [(16, 8), (64, 8), (256, 8), (1024, 4)])
def test_plans_of_many_ranks(ranks: int, team: int) -> None:
    config = GroupConfig(num_experts=ranks, max_dispatch_tokens_per_rank=128, hidden=7168, num_topk=8)
    window, local = WindowMap.build(config, ranks), LocalMap.build(config)
    net = LLNetMap.build(config, ranks, team, window, local)
    for regions, begin, end in ((net.regions(), window.total_bytes, net.total_bytes), (net.local_regions(), local.total_bytes, net.local_bytes)):
        at = begin
        for _, first, last in regions:
            assert at <= first < last and first % 8 == 0
            at = last
        assert at <= end
    assert net.returned - net.messages >= ranks * 128 * (16 + 7168 * 2) and net.message_bytes % 16 == 0


def test_bad_team_sizes_are_refused() -> None:
    config = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=2)
    for team in (0, 3, 4):
        with pytest.raises(ValueError, match=f"team_size must divide num_ranks = 4 and be smaller, got {team}"):
            LLNetMap.build(config, 4, team, WindowMap.build(config, 4), LocalMap.build(config))


# ---- mutants ---------------------------------------------------------------------------------------------------------------------
def first_red(seeds: int = SEEDS, **how: Any) -> BaseException | None:
    for seed in range(seeds):
        try:
            (play_failure if seed % 2 else play)(seed, **how)
        except (SimulationError, AssertionError) as error:
            return error
    return None


DATA = "code = wait_data(comm, window, TAGS, rank, RANKS, TEAM, CONTEXTS, count, epoch, fail, record, timeout)"
HEADS = "code = wait_heads(comm, window, HEADS, rank, RANKS, TEAM, count, epoch, signature, fail, record, timeout)"
TOLD = "last_block(local + BLOCKS_TOLD) == 1"
DONE = "last_block(local + BLOCKS_DONE) == 1"
SHARED = {"no wait for heads": [(HEADS, "code = 0")], "no wait for data": [(DATA, "code = 0")], "every block tells": [(TOLD, "1 == 1")],
          "block 0 tells": [(TOLD, "block_idx() == 0")], "every block is the last": [(DONE, "1 == 1")],
          "no tags": [("put_tags(comm, window, TAGS, rank, RANKS, TEAM, count, epoch, why)", "why = why")],
          "signals of context 0 only": [("while context < CONTEXTS:", "while context < 1:")],
          "the count stands still": [("                advance_count(local + COUNT, count)\n", "")]}
MUTANTS = {f"{kernel}: {name}": (kernel, change) for kernel in ("dispatch", "combine") for name, change in SHARED.items()} | {
    "dispatch: no signal after the counts": ("dispatch", [("                signal(comm, rank, RANKS, TEAM, 0)\n", "")]),
    "dispatch: no wait for counts": ("dispatch", [(
        "code = wait_counts(comm, window, COUNTS, NET_COUNTS, rank, RANKS, TEAM, EXPERTS, count, epoch, PLANE_ROWS, expert_counters, fail, "
        "record,\n                               timeout)", "code = 0")]),
    "dispatch: rows keep their own numbers": ("dispatch", [(
        "            place_rows(TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, part, table, rank, TEAM, epoch, fail, record)\n", "")]),
    "dispatch: no arrived": ("dispatch", [("publish_arrived(window, ARRIVED, rank, TEAM, epoch)", "why = why")]),
    "dispatch: no wait for arrived": ("dispatch", [("code = wait_arrived(window, ARRIVED, rank, TEAM, epoch, fail, record, timeout)", "code = 0")]),
    "dispatch: no counts to other teams": ("dispatch", [
        ("put_counts(comm, window, COUNTS_SENT, NET_COUNTS, rank, RANKS, TEAM, EXPERTS)", "code = 0")]),
    "combine: no rows back": ("combine", [(
        "return_rows(comm, payload, slot, window, RETURNED, remote, at // MOST, at % MOST, MOST, TOPK, ROW_BYTES, ROW_BYTES, CONTEXTS)", "at = at")]),
    "combine: no check of the header": ("combine", [("            check_header(held, handle, rank, epoch, fail, record)", "            pass")]),
}
FACTORY = {"dispatch": make_ll_net_dispatch, "combine": make_ll_net_combine}


def test_nothing_changed_is_green() -> None:
    for seed in range(12):
        lands_late(seed)
    for seed in range(40):
        for run in (play, play_failure):
            run(seed, **{f"make_{name}": mutant(make) for name, make in FACTORY.items()})


@pytest.mark.parametrize("name", MUTANTS)
def test_kernel_mutant_is_red(name: str) -> None:
    kernel, changes = MUTANTS[name]
    assert first_red(**{f"make_{kernel}": mutant(FACTORY[kernel], *changes)}) is not None


OTHERS = {"ll_net_take_token", "ll_net_send_routing", "ll_net_publish_arrived_rows", "ll_net_put_row_tags", "ll_net_take_arrived_rows",
          "ll_net_sum_row", "ll_net_sum_packed_row", "ll_net_stage_row", "ll_net_quantise_row", "ll_net_spread_row"}
"""Operations of RANK_MAJOR and of recipes, whose mutants stand in tests of their own."""
LL_NET = {op[0] for op in LL_NET_OPERATIONS} - OTHERS
EFFECTS = {name: effects for name, effects in effect_mutants(LL_NET, NET_OPS).items() if "st." not in name or not name.endswith(" net")}
"""Without how strong a put is: that is the network's."""
AGAIN = "the operation before it in the same warp has the same fence, and this one nothing new to release"
SURVIVORS = {f"ll_net_signal: {what}": AGAIN for what in ("no 0 fence.acq_rel.sys", "fence.acq_rel.gpu", "fence.acq_rel.sys last")} | {
    "ll_net_enter: no 3 bar.sync": "only whether it failed is used, and wait_heads has a barrier",
    "ll_net_put_tags: ld.relaxed.sys net": "a TAG orders nothing, and is read after a signal", "ll_net_put_tags: ld.acquire.gpu net": "the same",
    "ll_net_wait_data: ld.weak tag": "the signals before it order it", "ll_net_wait_data: ld.relaxed.gpu tag": "the same",
    "ll_net_wait_heads: ld.relaxed.sys head": "a fence of system scope follows before any access to a peer's rows",
    "ll_net_return_rows: fence.acq_rel.sys first": "what it puts was written before this kernel began",
}
"""Effects whose loss nothing shows, and why. Each is asserted to survive, so that this list stays true."""


def lands_late(seed: int, **how: Any) -> None:
    """Puts land after their operation was given up, just before what they read and wrote is written again: what is told of the drain orders that."""
    ranks, team = ((2, 1), (4, 2), (3, 1), (4, 1))[seed % 4]
    with mock.patch.object(ll_net_program, "Network", Links), mock.patch(f"{__name__}.Simulator", machine_like):
        p = group(seed, ranks, team, (4, 2, 3, 4)[:ranks], **how)
    p.sim.poison, draw = False, random.Random(seed)
    p.sim.scheduler.haste, who = draw.choice((0.02, 0.3, 0.7, 0.97)), draw.randrange(ranks)
    others = [r for r in range(ranks) if r // team != who // team]
    p.network.slow_links |= {(who, r) for r in others} | {(r, who) for r in others if seed % 3}   # type: ignore[attr-defined]
    d = p.dispatch()
    if seed % 2:
        p.combine(d)
    p.sim.run()
    p.network.slow_links.clear()   # type: ignore[attr-defined]
    p.dispatched.clear(), p.combined.clear()
    for rank in range(ranks):
        p.record(rank)
    p.play("D X C D X C")
    p.sim.run()
    p.check()


def machine_like(num_ranks: int, seed: int, mode: str, **more: Any) -> Simulator:
    """A simulator whose waits give up by the clock, made like any other."""
    return machine(num_ranks, seed, **more)


@pytest.mark.parametrize("name", [name for name in EFFECTS if name not in SURVIVORS])
def test_effect_mutant_is_red(name: str) -> None:
    if name.startswith("ll_net_enter: "):   # a drain that ends late shows it soonest; else the operation before it has the same fence
        with pytest.raises(RaceError):
            for seed in range(24):
                lands_late(seed, effects=EFFECTS[name])
    else:
        assert first_red(effects=EFFECTS[name]) is not None


@pytest.mark.parametrize("name", SURVIVORS)
def test_surviving_effect_mutant(name: str) -> None:
    for seed in range(6):
        for run in (play, play_failure, lands_late):
            run(seed, effects=EFFECTS[name])
