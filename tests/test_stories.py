"""Reports of the simulator read like a story: who, where in which kernel, what to which bytes, what is missing, and who is the first cause."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable

import numpy as np
import pytest
from test_mutations import DISPATCH_MUTANTS, effect_mutants, first_red, mutant

from ncclep_py.config import GroupConfig
from ncclep_py.kernels import ll_combine, ll_dispatch
from ncclep_py.simulator import DeadlockError, Faults, RaceError, Simulator
from ncclep_py.simulator.program import Program


def group(num_ranks: int = 2, seed: int = 0, blocks: int = 2, warps: int = 2, **more: object) -> Program:
    sim = Simulator(num_ranks, seed, blocks=blocks, warps=warps, faults=more.pop("faults", None))
    config = GroupConfig(num_experts=2 * num_ranks, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=2)
    return Program(sim, config, [4] * num_ranks, seed=seed, **more)


def line_of(function: Callable, text: str) -> int:
    """Line of the one source line that holds `text`."""
    lines, first = inspect.getsourcelines(function)
    found = [first + i for i, line in enumerate(lines) if text in line]
    assert len(found) == 1
    return found[0]


# ---- races ------------------------------------------------------------------------------------------------------------------
def test_a_row_overwritten_while_it_is_pulled() -> None:
    p = group(seed=1)
    p.play("D X C X C")
    with pytest.raises(RaceError) as caught:
        p.sim.run()
    story = str(caught.value)
    gather = line_of(ll_combine.make_ll_combine, "gather_row(payload")
    head = line_of(ll_combine.make_ll_combine, "publish_head(window")
    assert re.search(rf"""  who did what:
    1\. rank (\d) block \d warp \d reads SLOT0\[\d+:\d+\] of rank (\d), gather_row \(ll_combine\.py:{gather}, combine\)
       \| gather_row\(payload, slot, table, weights, out, at, token, .*
    2\. rank \2 host writes the same bytes, call \(program\.py:\d+, experts\)
       \| def _run_experts\(self, .*
  what is missing:
    no release/acquire chain leads from 1 to 2: it takes a release of system scope after 1 .* an acquire of system scope that reads the word\.
    The nearest ends at rank \1 block 0 warp 0's publish_head \(ll_combine\.py:{head}, combine\), which is ordered before 2; 1 came \d+ effects .*
    rank \1 block 0 warp 0's last_block \(ll_combine\.py:\d+, combine\) released 1 with gpu scope only, which other ranks cannot acquire\.
  replay with seed=1""", story), story


def test_a_release_of_too_little_scope_is_named() -> None:
    error = first_red(effects=effect_mutants()["publish_arrived: no 0 fence.acq_rel.sys"])
    assert isinstance(error, RaceError)
    assert re.search(r"rank 2 block \d warp \d's last_block \(ll_dispatch\.py:\d+, dispatch\) released 1 with gpu scope only, which other ranks "
                     r"cannot acquire\.", str(error))


def test_an_acquire_that_is_missing_is_told_from_a_release() -> None:
    error = first_red(effects=effect_mutants()["wait_arrived: ld.relaxed.sys arrived"])
    assert isinstance(error, RaceError)
    assert re.search(r"The first release that covers 1 is rank 2 block \d warp 0's publish_arrived \(ll_dispatch\.py:\d+, dispatch\); rank 0 host "
                     r"has acquired nothing that carries it\.", str(error))


def test_bytes_of_a_race_are_all_told() -> None:
    sim = Simulator(2, blocks=1, warps=1)
    memory = np.zeros(256, np.uint8)
    region = sim.register(memory, "both", 0)
    sim.register(memory, "both", 1)
    sim.host(0, None, writes=[(region.address + 64, 64)], label="first")
    sim.run()
    sim.host(1, None, reads=[(region.address + 96, 100)], label="second")
    with pytest.raises(RaceError, match=r"reads both\[96:100\] of rank 0, and") as caught:
        sim.run()
    assert "1. rank 0 host writes both[96:128] of rank 0, call" in str(caught.value)
    assert "The nearest is none: nothing that rank 0 host ever did is ordered before 2." in str(caught.value)
    assert "Nobody has released 1 since." in str(caught.value)


def test_shared_memory_lacks_a_barrier() -> None:
    error = first_red(effects=effect_mutants()["count_experts: no 1 bar.sync"])
    assert isinstance(error, RaceError)
    count = line_of(ll_dispatch.make_ll_dispatch, "        count_experts(topk_idx")
    assert re.search(rf"""    1\. rank \d block \d warp \d writes shared memory 'total', count_experts \(ll_dispatch\.py:{count}, dispatch\)
       \| count_experts\(topk_idx, .*
    2\. rank \d block \d warp \d (reads|writes) the same bytes, .*
       \| .*
  what is missing:
    no release/acquire chain leads from 1 to 2: it takes a barrier of the block\.""", str(error))


def test_lines_of_code_that_has_no_file_are_left_out() -> None:
    error = first_red(make_dispatch=mutant(ll_dispatch.make_ll_dispatch, *DISPATCH_MUTANTS["no wait_arrived"]))
    assert isinstance(error, RaceError) and "(mutant of make_ll_dispatch:" in str(error)
    assert not linecache.getline("mutant of make_ll_dispatch", 1)


# ---- deadlocks --------------------------------------------------------------------------------------------------------------
def stuck(p: Program) -> str:
    with pytest.raises(DeadlockError) as caught:
        p.sim.run()
    return str(caught.value)


def test_a_rank_that_never_came_is_the_first_cause() -> None:
    p = group(3)
    p.dispatch(ranks=[0, 2])
    story = stuck(p)
    assert """  who waits for whom:
    rank 0 -> rank 1 (HEAD of epoch 1)
    rank 2 -> rank 1 (HEAD of epoch 1)
  first cause: rank 1 never entered the operation: its stream is empty after 0 kernels and host calls, and ranks 0, 2 are in the one with number 1
""" in story
    assert story.count("| code = wait_heads(window, HEADS, rank, RANKS, epoch, signature, fail, record, timeout)") == 1


def test_behind_a_chain_of_waits_the_end_is_the_cause() -> None:
    """Rank 2 misses the second operation; 0 and 1 are in it, and wait for nobody but 2."""
    p = group(3)
    p.dispatch()
    p.combine(p.dispatch(ranks=[0, 1]), ranks=[0, 1])
    story = stuck(p)
    assert "rank 0 -> rank 2 (HEAD of epoch 2)\n    rank 1 -> rank 2 (HEAD of epoch 2)\n  first cause: rank 2 never entered the operation" in story


def test_a_word_nobody_published() -> None:
    p = group(2, make_dispatch=mutant(ll_dispatch.make_ll_dispatch, *DISPATCH_MUTANTS["no publish_head"]))
    p.dispatch()
    assert "first cause: ranks 0, 1 wait for HEAD of epoch 1 of their own, which they did not publish" in stuck(p)


def test_a_word_lost_by_one_rank() -> None:
    p = group(2)
    p.dispatch(ranks=[0])
    p.sim.launch(1, lambda: None, (), label="dispatch of another kind")
    assert "first cause: rank 1 ended its kernel without publishing HEAD of epoch 1" in stuck(p)


def test_a_dead_rank_is_the_cause() -> None:
    p = group(2, faults=Faults(dead={1: 3}))
    p.dispatch()
    assert re.search(r"first cause: rank 1 died before it published (HEAD|COUNTS|ARRIVED) of epoch 1", stuck(p))


def test_blocks_that_cannot_begin_are_the_cause() -> None:
    sim = Simulator(1, blocks=2, warps=1, resident_blocks=1, poison=False)
    ops = sim.vocabulary
    fail, record = (sim.register(np.zeros(64, np.uint8), name, 0).address for name in ("FAIL", "RECORD"))
    window = sim.create_window([np.zeros(64, np.uint8)], [("HEAD", 0, 64)])

    def kernel(window: int, fail: int, record: int) -> None:
        if ops.block_idx() == 1:
            ops.publish_head(window, 0, 0, 1, 1, 5, 0)
        ops.wait_heads(window, 0, 0, 1, 1, 5, fail, record, 100)

    sim.launch(0, kernel, (window, fail, record))
    with pytest.raises(DeadlockError, match=r"first cause: rank 0 did not publish HEAD of epoch 1: its blocks \[1\] have not begun, because no more "
                                            r"than 1 run at once and none of these ends"):
        sim.run()


def test_a_circle_is_told_from_its_oldest_wait() -> None:
    """Rank 0 waits in epoch 1 for rank 1, which waits in epoch 2 for rank 0."""
    sim = Simulator(2, blocks=1, warps=1)
    ops = sim.vocabulary
    memories = [np.zeros(16, np.uint8) for _ in range(2)]
    window = sim.create_window(memories, [("ARRIVED", 0, 16)])

    def kernel(window: int, rank: int, fail: int, record: int) -> None:
        ops.wait_arrived(window, 0, rank, 2, 1 + rank, fail, record, 100)

    for rank, memory in enumerate(memories):
        memory.view(np.uint64)[rank] = 1 + rank << 32   # its own word has come
        fail, record = (sim.register(np.zeros(64, np.uint8), name, rank).address for name in ("FAIL", "RECORD"))
        sim.launch(rank, kernel, (window, rank, fail, record))
    with pytest.raises(DeadlockError, match="first cause: a circle, whose oldest wait is that of rank 0 for ARRIVED of epoch 1 of rank 1: rank 1 "
                                            "waits itself and did not publish it before") as caught:
        sim.run()
    assert "    rank 0 -> rank 1 (ARRIVED of epoch 1)\n    rank 1 -> rank 0 (ARRIVED of epoch 2)\n" in str(caught.value)
