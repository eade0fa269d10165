"""Timelines: what traced kernels write, read back; the same events from the simulator; who waited for whom; the file for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ncclep_py import Algorithm, CombineConfig, DispatchConfig, EpError, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.kernels.stamps import END, HEAD, ROWS, TEXTS, WAIT_ARRIVED, WAIT_HEADS, WAITS, Step
from ncclep_py.timeline import Event, chrome_trace, events_of, from_json, operations, to_json, waits, write_chrome_trace
from ncclep_py.tracing import STAMPS, buffer_bytes, parse


class Device:
    """Writes a buffer as ``trace_ops.cu`` does."""

    def __init__(self, blocks: int, launches: int) -> None:
        self.blocks, self.launches = blocks, launches
        self.words = np.zeros(buffer_bytes(blocks, launches) // 8, np.uint64)

    def launch(self, block: int, kernel: int, time: int, stamps: list[tuple[int, int]], multiprocessor: int = 7) -> None:
        count = int(self.words[block])
        stripe = -(-8 * self.blocks // 512) * 64 + (block * self.launches + (count & (self.launches - 1))) * 64
        self.words[block] = count + 1
        self.words[stripe: stripe + 2] = time, kernel << 32 | multiprocessor
        at = stripe + 2
        for now, phase in stamps:
            self.words[at: at + 2] = now, phase
            at = at if (at * 8 & 511) == 16 * (STAMPS - 1) else at + 2

    def read(self) -> list[Event]:
        return parse(self.words.view(np.uint8), 3, self.blocks, self.launches, ["ll_dispatch", "ll_combine"])


def test_a_buffer_is_read_as_it_was_written() -> None:
    device = Device(2, 4)
    device.launch(0, 0, 100, [(101, HEAD), (110, WAIT_HEADS), (150, ROWS), (200, END)])
    device.launch(1, 0, 103, [(104, HEAD), (105, WAIT_HEADS), (151, ROWS), (190, END)], 9)
    device.launch(0, 1, 300, [(301, HEAD), (390, END)])
    assert device.read() == sorted([
        Event(101, 110, 3, 0, "ll_dispatch", "publish HEAD", 0, 7), Event(110, 150, 3, 0, "ll_dispatch", "wait for HEAD", 0, 7),
        Event(150, 200, 3, 0, "ll_dispatch", "rows", 0, 7), Event(104, 105, 3, 1, "ll_dispatch", "publish HEAD", 0, 9),
        Event(105, 151, 3, 1, "ll_dispatch", "wait for HEAD", 0, 9), Event(151, 190, 3, 1, "ll_dispatch", "rows", 0, 9),
        Event(301, 390, 3, 0, "ll_combine", "publish HEAD", 1, 7)])


def test_a_buffer_goes_round_and_keeps_the_newest() -> None:
    device = Device(1, 4)
    for i in range(6):
        device.launch(0, i % 2, 1000 * i, [(1000 * i + 1, HEAD), (1000 * i + 5, ROWS), (1000 * i + 9, END)])
    assert [e.launch for e in device.read()] == [2, 2, 3, 3, 4, 4, 5, 5]
    device.launch(0, 0, 6000, [(6001, ROWS)])   # still running: the stripe's old stamps are not its own
    assert [(e.launch, e.phase) for e in device.read()] == [(n, p) for n in (3, 4, 5) for p in ("publish HEAD", "rows")]


def test_too_many_stamps_keep_the_first_and_the_end() -> None:
    device = Device(1, 2)
    device.launch(0, 0, 0, [(i, WAIT_HEADS) for i in range(100)] + [(100, END)])
    events = device.read()
    assert len(events) == STAMPS - 2 and events[0].begin_ns == 0 and events[-1].end_ns == 100


def test_every_phase_has_words_and_a_number_of_its_own() -> None:
    assert TEXTS.keys() == set(Step) and len(set(TEXTS.values())) == len(Step)
    assert all(("wait" in step.text or "meet" in step.text or "agree" in step.text) == (step in WAITS) for step in Step)


# ---- who waits for whom -----------------------------------------------------------------------------------------------------
def hand_made() -> list[Event]:
    """Two ranks, one block: rank 1 comes late to a dispatch, rank 0 is late with its rows."""
    return events_of([
        (0, 0, "ll_dispatch", HEAD, 0), (0, 0, "ll_dispatch", WAIT_HEADS, 1), (1, 0, "ll_dispatch", HEAD, 40), (1, 0, "ll_dispatch", WAIT_HEADS, 42),
        (0, 0, "ll_dispatch", ROWS, 43), (1, 0, "ll_dispatch", ROWS, 44), (1, 0, "ll_dispatch", WAIT_ARRIVED, 50),
        (0, 0, "ll_dispatch", WAIT_ARRIVED, 60), (0, 0, "ll_dispatch", END, 61), (1, 0, "ll_dispatch", END, 62)], unit_ns=1)


def test_the_last_to_come_is_named() -> None:
    found = {(w.event.rank, w.event.phase): (w.culprit, w.told_ns) for w in waits(hand_made())}
    assert found == {(0, "wait for HEAD"): (1, 42), (1, "wait for HEAD"): (1, 42), (0, "wait for ARRIVED"): (0, 60), (1, "wait for ARRIVED"): (0, 60)}


def test_launches_of_one_kernel_are_told_apart() -> None:
    phases = ((HEAD, 0), (ROWS, 5), (END, 10))
    stamps = [(0, block, "ll_combine", phase, time + 10 * n) for n in range(3) for block in (0, 1) for phase, time in phases]
    ops = operations(events_of(stamps, 1))[0]
    assert [(op.begin_ns, op.end_ns, len(op.events)) for op in ops] == [(0, 10, 4), (10, 20, 4), (20, 30, 4)]


def test_chrome_trace_of_a_hand_made_run() -> None:
    trace = chrome_trace(hand_made(), simulated=False)
    rows = trace["traceEvents"]
    assert "no measurement" not in trace["otherData"]["source"] and "no measurement" in chrome_trace([], True)["otherData"]["source"]
    slices = [(r["name"], r["pid"], r["tid"], r["ts"], r["dur"]) for r in rows if r["ph"] == "X"]
    assert ("ll_dispatch", 0, 0, 0.0, 0.061) in slices and ("wait for HEAD", 0, 0, 0.001, 0.042) in slices
    arrows = [(r["ph"], r["name"], r["pid"], r["ts"]) for r in rows if r["ph"] in "sf"]
    assert arrows == [("s", "rank 0 waited for rank 1", 1, 0.042), ("f", "rank 0 waited for rank 1", 0, 0.043),
                      ("s", "rank 1 waited for rank 0", 0, 0.06), ("f", "rank 1 waited for rank 0", 1, 0.062)]


def check_schema(rows: list[dict[str, Any]]) -> None:
    """What Perfetto and chrome://tracing read."""
    assert rows and {r["ph"] for r in rows} <= {"M", "X", "s", "f"}
    for row in rows:
        assert isinstance(row["name"], str) and isinstance(row["pid"], int) and isinstance(row["tid"], int)
        if row["ph"] == "M":
            assert row["name"] in ("process_name", "thread_name", "process_sort_index") and row["args"]
        else:
            assert row["ts"] >= 0
        if row["ph"] == "X":
            assert row["dur"] >= 0
    named = {(r["pid"], r["tid"]) for r in rows if r["name"] == "thread_name"}
    assert {(r["pid"], r["tid"]) for r in rows if r["ph"] == "X"} == named and {r["pid"] for r in rows if r["name"] == "process_name"} == {
        p for p, _ in named}
    starts, ends = ({r["id"] for r in rows if r["ph"] == ph} for ph in "sf")
    assert starts == ends


# ---- in the simulator ----------------------------------------------------------------------------------------------------------
def program(comm: Any, how: str) -> tuple[list[Event], torch.Tensor]:
    more: dict[str, Any] = {"ht": {"algorithm": Algorithm.HIGH_THROUGHPUT, "max_recv_tokens_per_rank": 32}, "staged": {"num_staging_slots": 2},
                            "masked": {"enable_mask": True}}.get(how, {})
    layout = {"ht": Layout.FLAT, "rank_major": Layout.RANK_MAJOR}.get(how, Layout.EXPERT_MAJOR)
    config = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=8, hidden=32, num_topk=2, trace=how != "plain", **more)
    with Group.create(comm, config) as group:
        draw = torch.Generator().manual_seed(comm.rank)
        ids, weights = torch.randint(0, 4, (8, 2), generator=draw), torch.full((8, 2), 0.5)
        tokens = torch.randn(8, 32, generator=draw).to(torch.bfloat16)
        with group.create_handle(layout, ids) as handle:
            if how == "staged":
                got = handle.dispatch(tokens, config=DispatchConfig(send_only=True))
                handle.complete()
                out = handle.combine(got.tokens, topk_weights=weights, config=CombineConfig(send_only=True))
                handle.complete()
            elif how in ("ht", "rank_major"):
                got = handle.dispatch(tokens, topk_weights=weights)
                out = handle.combine(got.tokens)
            else:
                got = handle.dispatch(tokens)
                out = handle.combine(got.tokens, topk_weights=weights)
        group.check()
        if how == "plain":
            with pytest.raises(EpError, match="create the group with GroupConfig\\(trace=True\\)"):
                group.timeline()
            return [], out
        return group.timeline(), out


KERNELS_OF = {"plain": [], "ll": ["ll_dispatch", "ll_combine"], "rank_major": ["ll_rank_major_dispatch", "ll_combine"],
              "staged": ["ll_dispatch_send", "ll_dispatch_complete", "ll_combine_send", "ll_combine_complete"],
              "masked": ["ll_masked_dispatch", "ll_masked_combine"], "ht": ["ht_count", "ht_prepare", "ht_dispatch", "ht_combine"]}


def together_at_heads(events: list[Event]) -> None:
    """In an operation nobody is past its wait for HEADs before everybody has entered (I2 of the memory map)."""
    both = [[op for op in ops if op.of(Step.WAIT_HEADS) and op.of(Step.HEAD) and op.kernel != "ll_combine_send"]
            for ops in operations(events).values()]
    for together in zip(*both, strict=True):
        entered = max(min(e.begin_ns for e in op.of(Step.HEAD)) for op in together)
        assert all(e.end_ns >= entered for op in together for e in op.of(Step.WAIT_HEADS))


@pytest.mark.parametrize("how", [how for how in KERNELS_OF if how != "plain"])
def test_simulated_timeline(how: str, tmp_path: Path) -> None:
    with LocalWorld(2, "sim", seed=5) as world:
        events = [e for mine, _ in world.run(program, how) for e in mine]
    found = operations(events)
    assert {rank: [op.kernel for op in ops] for rank, ops in found.items()} == {0: KERNELS_OF[how], 1: KERNELS_OF[how]}
    for ops in found.values():
        assert all(a.end_ns <= b.begin_ns for a, b in zip(ops, ops[1:], strict=False))
        for op in ops:
            assert {e.block for e in op.events} == ({0} if op.kernel == "ll_dispatch_complete" else {0, 1})
            assert all(a.end_ns == b.begin_ns for block in (0, 1) for a, b in zip(*[[e for e in op.events if e.block == block][i:] for i in (0, 1)],
                                                                                 strict=False))
    assert any(w.event.phase == "wait for HEAD" for w in waits(events))
    together_at_heads(events)
    write_chrome_trace(events, tmp_path / "t.json", simulated=True)
    trace = json.loads((tmp_path / "t.json").read_text())
    check_schema(trace["traceEvents"])
    assert "simulated, no measurement" in trace["otherData"]["source"] and any(r["ph"] == "s" for r in trace["traceEvents"])
    assert from_json(json.loads(json.dumps(to_json(events)))) == events


def test_tracing_changes_neither_the_schedule_nor_the_result() -> None:
    results = {}
    for how in ("plain", "ll"):
        with LocalWorld(2, "sim", seed=3) as world:
            results[how] = [out for _, out in world.run(program, how)], world.simulator.scheduler.step
    assert results["plain"][1] == results["ll"][1]
    assert all(torch.equal(a, b) for a, b in zip(results["plain"][0], results["ll"][0], strict=True))


def test_trace_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="^trace must be a bool, got int: 1$"):
        GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=8, hidden=32, num_topk=2, trace=1)   # type: ignore[arg-type]


def test_a_fused_world_refuses_stamps() -> None:
    from types import SimpleNamespace

    from ncclep_py.local_world import _LocalNcclRank

    rank = _LocalNcclRank.__new__(_LocalNcclRank)
    rank.world = SimpleNamespace(fused=object())   # type: ignore[assignment]
    with pytest.raises(ValueError, match="LocalWorld\\(fused=True\\) has one kernel for all ranks"):
        rank.tracer(4)
