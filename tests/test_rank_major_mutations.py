"""Every element of the RANK_MAJOR kernels and operations is needed: without it, some schedule turns red."""

from __future__ import annotations

import pytest
from test_mutations import (
    COMBINE_MUTANTS,
    DISPATCH_MUTANTS,
    FETCH,
    HEAD,
    OTHER_PROGRAMS,
    effect_mutants,
    first_red,
    mutant,
    play,
    play_failure,
    without_barriers,
)

from ncclep_py.kernels.ll_combine import make_ll_combine
from ncclep_py.kernels.ll_rank_major_dispatch import make_ll_rank_major_dispatch
from ncclep_py.simulator import RaceError
from ncclep_py.simulator.rank_major_program import RankMajorProgram

ARRIVED = """                if warp_idx() == 0:
                    publish_arrived_rows(window, arrived, rank, RANKS, epoch)
            if code == 0 and not SEND:
                code = wait_arrived(window, arrived, rank, RANKS, epoch, fail, record, timeout)
"""
TAKE = """            if code == 0 and not SEND:
                take_arrived_rows(window, arrived, slot + IDS, rank, RANKS, TOPK, PLANE_ROWS, epoch, src_rank_counters)
"""
COUNT = "count_ranks(topk_idx, IDX_BYTES, num_tokens, TOPK, EXPERTS, RANKS, first)\n"
ASSIGN = "assign_ranks(topk_idx, IDX_BYTES, topk_weights, TOPK, EXPERTS, RANKS, PLANE_ROWS, first, end, rank)\n"
ROUTING = "send_routing(window, slot + IDS, slot + WEIGHTS, table, at, first, end, TOPK, EXPERTS, RANKS, PLANE_ROWS, global_ids)\n"
LAST = "        if last_block("
SHARED = ("no wait_heads", "no publish_head", "no store_header", "no advance_epoch", "every block is the last",
          "block 0 is the last")

MUTANTS = {name: DISPATCH_MUTANTS[name] for name in SHARED} | {
    "no wait_arrived": [("code = wait_arrived(window, arrived, rank, RANKS, epoch, fail, record, timeout)", "code = 0")],
    "no publish_arrived_rows": [("publish_arrived_rows(window, arrived, rank, RANKS, epoch)\n", "pass\n")],
    "no fetch_row": [(FETCH, "pass")],
    "no take_arrived_rows": [(TAKE, "")],
    "take_arrived_rows before the wait": [(ARRIVED + TAKE, "".join("    " + line for line in TAKE.splitlines(True)) + ARRIVED)],
    "counts of the next block": [(COUNT, COUNT.replace("first)", "end)"))],
    "no send_routing": [(ROUTING, "pass\n")],
    "every piece sends the routing": [("if begin == 0:", "if 1 == 1:")],
    "arrived by one block too early": [(ARRIVED, ARRIVED.replace("publish_arrived_rows", "pass  # ")),
                                       (LAST, "        if block_idx() == 0:\n            if warp_idx() == 0:\n"
                                              "                publish_arrived_rows(window, arrived, rank, RANKS, epoch)\n" + LAST)],
    "ids cleared before the heads": [(HEAD, "        if last_block(local + BLOCKS_DONE) == 1:\n    " + TAKE.splitlines()[1] + "\n" + HEAD)],
}


def test_nothing_changed_is_green() -> None:
    for seed in range(60):
        for run in (play, play_failure):
            run(seed, group=RankMajorProgram, make_dispatch=mutant(make_ll_rank_major_dispatch), make_combine=mutant(make_ll_combine))


@pytest.mark.parametrize("name", MUTANTS)
def test_dispatch_mutant_is_red(name: str) -> None:
    tokens = (5, 3, 1) if "piece" in name else (5, 3, 4)
    blocks = 5 if "piece" in name else 2
    more = {"tokens": tokens, "blocks": blocks, "program": lambda p: p.play("D X C D X C")} if "piece" in name else {}
    assert first_red(group=RankMajorProgram, make_dispatch=mutant(make_ll_rank_major_dispatch, *MUTANTS[name]), **more) is not None


@pytest.mark.parametrize("name", [name for name in COMBINE_MUTANTS if name != "no fetch_routing"])   # only EXPERT_MAJOR fetches it
def test_combine_mutant_is_red(name: str) -> None:
    assert first_red(group=RankMajorProgram, make_combine=mutant(make_ll_combine, *COMBINE_MUTANTS[name])) is not None


def test_routing_needs_one_of_two_barriers() -> None:
    """assign_ranks fills shared memory; wait_heads has the next barrier."""
    assert isinstance(first_red(group=RankMajorProgram, effects=without_barriers("assign_ranks", "wait_heads")), RaceError)


SURVIVORS = {"assign_ranks: no 2 bar.sync": "wait_heads has a barrier, too, before anybody reads"}


@pytest.mark.parametrize("name", [n for n in effect_mutants(OTHER_PROGRAMS) if n not in SURVIVORS])
def test_effect_mutant_is_red(name: str) -> None:
    assert first_red(group=RankMajorProgram, effects=effect_mutants(OTHER_PROGRAMS)[name]) is not None


@pytest.mark.parametrize("name", SURVIVORS)
def test_surviving_effect_mutant(name: str) -> None:
    assert first_red(seeds=60, group=RankMajorProgram, effects=effect_mutants(OTHER_PROGRAMS)[name]) is None
