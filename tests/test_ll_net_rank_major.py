"""LOW_LATENCY RANK_MAJOR over several teams in the simulator: the bits of one team, known failures, and each element is needed."""

from __future__ import annotations

from typing import Any

import pytest
import test_ll_net
import test_ll_net_failures
import torch
from test_ll_net import OTHERS, SHARED
from test_mutations import effect_mutants, mutant

from ncclep_py.errors import Code, Phase
from ncclep_py.kernels.ll_net_combine import make_ll_net_combine
from ncclep_py.kernels.ll_net_rank_major_dispatch import make_ll_net_rank_major_dispatch
from ncclep_py.kernels.ops import NET_OPS
from ncclep_py.simulator import Faults, SimulationError
from ncclep_py.simulator.ll_net_program import LLNetRankMajorProgram

SEEDS = 240


def group(seed: int, *args: Any, **how: Any) -> Any:
    return test_ll_net.group(seed, *args, program=LLNetRankMajorProgram, **how)


def play(seed: int, *args: Any, **how: Any) -> Any:
    return test_ll_net.play(seed, *args, program=LLNetRankMajorProgram, **how)


def play_failure(seed: int, **how: Any) -> None:
    test_ll_net.play_failure(seed, program=LLNetRankMajorProgram, **how)


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
    (4, 1, 8, torch.bfloat16, 1), (12, 4, 24, torch.float16, 3), (16, 3, 8, torch.float32, 5), (36, 32, 520, torch.bfloat16, 2)])
def test_shapes(experts: int, topk: int, hidden: int, dtype: torch.dtype, blocks: int) -> None:
    for seed in range(4):
        play(seed, experts=experts, topk=topk, hidden=hidden, dtype=dtype, blocks=blocks)


def test_a_smaller_topk_and_narrow_ids() -> None:
    for seed in range(4):
        play(seed, topk=4, num_topk=2, idx_bytes=4)


@pytest.mark.parametrize("epoch", [2**31 - 2, 2**32 - 2])
def test_epochs_wrap(epoch: int) -> None:
    for seed in range(4):
        play(seed, epoch=epoch)


ROUTINGS = {"none, some, duplicates": [[5, -1], [-1, 5], [-1, -1]], "all to one": [[7, 6]] * 4, "beyond": [[100, -9], [2, 2]]}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name: str) -> None:
    rows = ROUTINGS[name]
    for seed in range(3):
        p = group(seed, 4, 2, [len(rows)] * 4)
        d = p.dispatch(topk_idx=[torch.tensor(rows) for _ in range(4)])
        p.experts(d)
        p.combine(d)
        p.sim.run()
        p.check()


def test_a_row_travels_once_to_a_rank_and_once_back() -> None:
    """2 ranks in teams of 1: a HEAD (2 words) and a tag each, a message per token that wants the other; back a row per token. No counts."""
    p = group(1, 2, 1, (3, 0), experts=4)
    d = p.dispatch(topk_idx=[torch.tensor([[2, 3], [0, 1], [0, 2]]), torch.zeros(0, 2, dtype=torch.int64)])
    p.experts(d)
    p.combine(d)
    p.sim.run()
    p.check()
    assert p.network.puts == 2 * (2 + 1) + 2 + 2 * (2 + 1) + 2


# ---- failures --------------------------------------------------------------------------------------------------------------------
def test_failures_are_known() -> None:
    for seed in range(150):
        play_failure(seed)


def test_who_was_told_nothing_is_right_and_so_is_what_comes_after() -> None:
    told = [test_ll_net_failures.play(seed, program=LLNetRankMajorProgram) for seed in range(40)]
    assert min(sum(t["failed"] for t in told), sum(t["right"] for t in told)) > 30


@pytest.mark.parametrize("change", [[], [("put_tags(comm, window, tags, rank, RANKS, TEAM, count, epoch, why)", "why = why")]], ids=["", "no tags"])
def test_a_lost_connection_ends_in_time_and_is_told_on(change: list[tuple[str, str]]) -> None:
    """Who is told by a TAG that rank 0 gave up knows that it was on 3; without TAGs nobody does."""
    told = 0
    for seed in range(20):
        p = group(seed, 4, 1, (4, 2, 3, 4), faults=Faults(timeouts=True), make_dispatch=mutant(make_ll_net_rank_major_dispatch, *change))
        p.network.lost |= {(0, 3), (3, 0)}
        p.dispatch()
        p.sim.run()
        records = [p.record(r) for r in range(4)]
        assert any(records) and all(r is None or {r.culprit, r.peer} & {0, 3} for r in records)
        told += sum(r is not None and (r.code, r.phase, {r.culprit, r.peer}) == (Code.ABORTED, Phase.ROWS, {0, 3}) for r in records[1:3])
    assert (told == 0) == bool(change)


# ---- mutants ---------------------------------------------------------------------------------------------------------------------
def first_red(seeds: int = SEEDS, **how: Any) -> BaseException | None:
    for seed in range(seeds):
        try:
            (play_failure if seed % 2 else play)(seed, **how)
        except (SimulationError, AssertionError) as error:
            return error
    return None


SIGNALS = "                signal(comm, rank, RANKS, TEAM, 0)   # context 0 has two in every operation\n"
TAKE = """            if code == 0 and not SEND:
                take_arrived_rows(window, arrived, tags, slot + IDS, rank, RANKS, TEAM, TOPK, PLANE_ROWS, epoch, src_rank_counters)
                if STAGING > 0:
                    keep_counters(src_rank_counters, kept, RANKS)
"""
WAIT = """            if code == 0 and not SEND:
                code = wait_arrived(window, arrived, rank, TEAM, epoch, fail, record, timeout)
"""
DATA = "code = wait_data(comm, window, tags, rank, RANKS, TEAM, CONTEXTS, count, epoch, fail, record, timeout)"
MUTANTS = {name: change for name, change in SHARED.items() if name not in ("no tags", "no wait for data")} | {
    "no wait for data": [(DATA, "code = 0")],
    "no tags of those who do not": [("put_row_tags(comm, window, tags, rank, RANKS, TEAM, epoch)", "why = why")],
    "tags without rows": [("put_row_tags(comm, window, tags, rank, RANKS, TEAM, epoch)",
                           "put_tags(comm, window, tags, rank, RANKS, TEAM, count, epoch, why)")],
    "one signal on context 0": [(SIGNALS, "")],
    "no arrived": [("publish_arrived_rows(window, arrived, rank, TEAM, epoch)", "why = why")],
    "no wait for arrived": [(WAIT, "")],
    "no counts, and ids not cleared": [(TAKE, "")],
    "counts before the wait for arrived": [(WAIT + TAKE, TAKE + WAIT)],
    "counts of the next block": [("TOPK, EXPERTS, RANKS, first)\n", "TOPK, EXPERTS, RANKS, end)\n")],
    "no routing inside my team": [(
        "send_routing(window, slot + IDS, slot + WEIGHTS, table, at, first, end, TOPK, EXPERTS, RANKS, PLANE_ROWS, global_ids, rank, TEAM)",
        "at = at")],
    "no routing in messages": [("HEADER_BYTES + SENT_BYTES + SCALE_BYTES, 3", "HEADER_BYTES + SENT_BYTES + SCALE_BYTES, 1")],
    "a short put": [("HEADER_BYTES + SENT_BYTES + SCALE_BYTES, 3", "HEADER_BYTES + SENT_BYTES + SCALE_BYTES - 16, 3")],
    "messages at half the distance": [("messages + rank * MOST * MESSAGE_BYTES,", "messages + rank * MOST // 2 * MESSAGE_BYTES,")],
    "every block sends what it shares": [("if part == 0:", "if part >= 0:")],
    "no rows inside my team": [("scatter_row(payload, place, tokens, at,", "scatter_row(payload, place, tokens, first,")],
    "the last block alone takes": [("at = block_idx() * warps() + warp_idx()", "at = warp_idx()")],
}
MAKE = {"make_dispatch": make_ll_net_rank_major_dispatch, "make_combine": make_ll_net_combine}
TWO_BLOCKS = {"every block sends what it shares": {"tokens": (1, 1, 1, 1), "blocks": 4}, "the last block alone takes": {"blocks": 3}}


def test_nothing_changed_is_green() -> None:
    for seed in range(40):
        for run in (play, play_failure):
            run(seed, **{name: mutant(make) for name, make in MAKE.items()})


@pytest.mark.parametrize("name", MUTANTS)
def test_kernel_mutant_is_red(name: str) -> None:
    assert MUTANTS[name]
    how = {"make_dispatch": mutant(make_ll_net_rank_major_dispatch, *MUTANTS[name])}
    if name in TWO_BLOCKS:
        with pytest.raises((SimulationError, AssertionError)):
            for seed in range(SEEDS):
                play(seed, **TWO_BLOCKS[name], **how)
    else:
        assert first_red(**how) is not None


@pytest.mark.parametrize("name", [*SHARED, "no rows back"])
def test_combine_mutant_is_red(name: str) -> None:
    change = SHARED.get(name) or [(
        "return_rows(comm, payload, slot, window, RETURNED, remote, at // MOST, at % MOST, MOST, TOPK, ROW_BYTES, ROW_BYTES, CONTEXTS)", "at = at")]
    assert first_red(make_combine=mutant(make_ll_net_combine, *change)) is not None


OWN = {"ll_net_take_token", "ll_net_send_routing", "ll_net_publish_arrived_rows", "ll_net_put_row_tags", "ll_net_take_arrived_rows", "ll_net_sum_row"}
assert OWN <= OTHERS
OWN_EFFECTS = {name: effects for name, effects in effect_mutants(OWN, NET_OPS).items() if "st." not in name or not name.endswith(" net")}
OWN_SURVIVORS = dict.fromkeys(("ll_net_take_arrived_rows: ld.weak tag", "ll_net_take_arrived_rows: ld.relaxed.gpu tag"),
                              "the signals that ll_net_wait_data saw order it")


@pytest.mark.parametrize("name", [n for n in OWN_EFFECTS if n not in OWN_SURVIVORS])
def test_effect_mutant_is_red(name: str) -> None:
    assert first_red(effects=OWN_EFFECTS[name]) is not None
