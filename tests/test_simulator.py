"""The simulator on the real kernels: results equal to the oracle in odd shapes and many schedules, failures as designed, and its own reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ncclep_py.config import GroupConfig
from ncclep_py.errors import Code, Phase, Status
from ncclep_py.reference import fma32
from ncclep_py.refusal import Refusal
from ncclep_py.simulator import DeadlockError, Faults, OutOfBoundsError, RaceError, Simulator, UniformityError
from ncclep_py.simulator.program import Program
from ncclep_py.simulator.rows import fma, pack, unpack

MODES = ("fair", "adversarial")


def run(text: str, tokens: Sequence[int], seed: int = 0, mode: str = "adversarial", experts: int = 0, topk: int = 2, hidden: int = 16,
        most: int = 0, dtype: torch.dtype = torch.bfloat16, slots: int = 2, sim: dict | None = None, **program: object) -> Program:
    """Run a sequence of operations on one rank per entry of `tokens`, and check it."""
    machine = Simulator(len(tokens), seed, mode, **(sim or {}))
    config = GroupConfig(num_experts=experts or 2 * len(tokens), max_dispatch_tokens_per_rank=most or max(max(tokens), 1), hidden=hidden, dtype=dtype,
                         num_topk=topk, num_slots=slots)
    p = Program(machine, config, tokens, seed=seed, **program)
    p.play(text)
    machine.run()
    p.check()
    return p


# ---- results -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [(0,), (3,), (0, 0), (0, 4), (4, 0), (1, 1), (2, 7), (3, 0, 5), (1, 2, 3, 4), (4, 4, 0, 1, 2)], ids=str)
def test_tokens_per_rank(tokens: tuple[int, ...], mode: str) -> None:
    for seed in range(4):
        run("D X C D X C", tokens, seed, mode)


@pytest.mark.parametrize("per_rank", [1, 3])
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_experts_per_rank(per_rank: int, topk: int) -> None:
    for seed in range(4):
        run("D X C", (3, 4, 2), seed, experts=3 * per_rank, topk=topk)


@pytest.mark.parametrize("topk", [4, 5, 6, 7, 8, 32])
def test_topk(topk: int) -> None:
    run("D X C", (3, 2), experts=32, topk=topk)


@pytest.mark.parametrize("hidden", [8, 24, 40, 136, 264])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows(hidden: int, dtype: torch.dtype) -> None:
    run("D X C", (3, 1), hidden=hidden, dtype=dtype)


@pytest.mark.parametrize("idx_bytes", [4, 8])
def test_id_types(idx_bytes: int) -> None:
    run("D X C", (3, 4), idx_bytes=idx_bytes)


@pytest.mark.parametrize("grids", [[(1, 1), (2, 2), (3, 1)], [(4, 2), (1, 4), (5, 3)], [(7, 1), (1, 7), (2, 3)]], ids=str)
@pytest.mark.parametrize("tokens", [(5, 1, 3), (0, 2, 1)], ids=str)
def test_unequal_grids(grids: list[tuple[int, int]], tokens: tuple[int, ...]) -> None:
    for seed in range(4):
        run("D X C D X C", tokens, seed, grids=grids, hidden=72)


@pytest.mark.parametrize("resident", [1, 2])
def test_blocks_that_start_when_others_end(resident: int) -> None:
    for seed in range(6):
        run("D X C D X C", (5, 2, 3), seed, MODES[seed % 2], sim={"blocks": 4, "resident_blocks": resident})


@pytest.mark.parametrize("epoch", [(1 << 31) - 2, (1 << 32) - 3, (1 << 32) - 1, 0, 7])
def test_epochs_wrap(epoch: int) -> None:
    for seed in range(4):
        p = run("D X C D X C", (3, 2), seed, epoch=epoch)
        assert [p.epoch(r) for r in p.ranks] == [(epoch + 4) % (1 << 32)] * 2


def routed(ids: Sequence[Sequence[Sequence[int]]], experts: int, most: int) -> Program:
    """Dispatch, experts, combine with given expert ids per rank."""
    sim = Simulator(len(ids), 3, "adversarial")
    p = Program(sim, GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=most, hidden=16, num_topk=len(ids[0][0])), [len(i) for i in ids])
    d = p.dispatch(topk_idx=[torch.tensor(i) for i in ids])
    p.experts(d)
    p.combine(d)
    sim.run()
    return p


def test_all_tokens_to_one_expert() -> None:
    routed([[[3]] * 4, [[3]] * 4, [[3]] * 4, [[3]] * 4], 4, 4).check()


def test_no_expert_in_every_position() -> None:
    for k in range(3):
        row = [0, 1, 3]
        row[k] = -1
        routed([[row, [2, 2, 0]], [[1, 3, 2], row]], 4, 4).check()
    routed([[[-1, -1], [-1, -1]], [[-1, -1]]], 2, 2).check()


def test_ids_out_of_range_count_as_none() -> None:
    routed([[[4, 0], [-7, 1]], [[1000, 3], [2, 2]]], 4, 4).check()


def test_duplicates_in_a_token() -> None:
    routed([[[1, 1, 1], [0, 1, 0]], [[3, 3, 0], [1, 1, 2]]], 4, 4).check()


def test_weights_without_a_row_are_ignored() -> None:
    sim = Simulator(2, 1)
    p = Program(sim, GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=2, hidden=8, num_topk=2), [2, 2])
    d = p.dispatch(topk_idx=[torch.tensor([[-1, 0], [1, -1]]) for _ in range(2)])
    p.combine(d)
    for region in sim.memory.regions:
        if region.name == "weights":
            region.bytes.view(np.float32).reshape(2, 2)[[0, 1], [0, 1]] = np.nan
    sim.run()
    p.check()


def test_overflow_is_recorded_and_the_row_dropped() -> None:
    p = routed([[[1, 1]], [[0, 1]]], 2, 1)   # 3 rows for a plane of 2
    record = p.record(1)
    assert record is not None and (record.code, record.phase, record.peer, record.seen, record.expected) == (Code.OVERFLOW, Phase.ROWS, 1, 2, 2)
    assert p.record(0) is None
    p.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("text", ["D X C D X C", "D D X C", "D C C", "D0 D1 X0 C0 D0 X1 C1 X0 C0"])
def test_sequences_run_ahead(text: str, mode: str) -> None:
    for seed in range(12):
        run(text, (5, 0, 3), seed, mode)


@pytest.mark.parametrize("mode", MODES)
def test_many_schedules(mode: str) -> None:
    for seed in range(300):
        run("D X C", (4, 4, 3), seed, mode)


# ---- arithmetic --------------------------------------------------------------------------------------------------------------------
def test_fma_is_exact() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, (2, 100_000), dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        x, total = bits[0], np.where(np.arange(100_000) % 2, bits[1], bits[0] * np.float32(-1.5))   # every other sum cancels
    for w in (np.float32(1.5), np.float32(-0.3333), np.float32(1e-30), np.float32(0)):
        want = fma32(torch.from_numpy(x), torch.tensor(w), torch.from_numpy(total)).numpy()
        assert np.array_equal(fma(x, w, total), want, equal_nan=True)


@pytest.mark.parametrize("token_type, dtype", list(enumerate((torch.bfloat16, torch.float16, torch.float32))))
def test_rounding_of_rows(token_type: int, dtype: torch.dtype) -> None:
    x = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32).copy()
    want = torch.from_numpy(x).to(dtype)
    got = torch.from_numpy(pack(x, token_type).copy()).view(dtype)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got[~got.isnan()], want[~want.isnan()])
    assert np.array_equal(unpack(pack(x, token_type), token_type), want.float().numpy(), equal_nan=True)


# ---- replay and reports ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_replay_is_exact(mode: str) -> None:
    def timeline(seed: int) -> list:
        return run("D X C", (3, 4), seed, mode, sim={"trace": True}).sim.events

    assert timeline(5) == timeline(5)
    assert timeline(5) != timeline(6)


def test_trace_is_chrome_json(tmp_path: Path) -> None:
    run("D X C", (2, 2), sim={"trace": True}).sim.write_trace(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {"scatter_row", "gather_row", "wait_heads", "experts"} <= {e["name"] for e in events}


def group(num_ranks: int = 2, seed: int = 0, mode: str = "fair", tokens: Sequence[int] = (3, 3, 3), **sim: object) -> Program:
    """A small group to break."""
    machine = Simulator(num_ranks, seed, mode, **sim)
    config = GroupConfig(num_experts=2 * num_ranks, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=2, num_slots=2)
    return Program(machine, config, tokens[:num_ranks], seed=seed)


def test_deadlock_names_who_waits_for_whom() -> None:
    p = group(3)
    p.dispatch(ranks=[0, 2])
    with pytest.raises(DeadlockError, match=r"rank 0 block 0 warp 0 wait_heads \(ll_dispatch.py:\d+, dispatch\): "
                                            r"waits in epoch 1 for HEAD of ranks \[1\], whose words have epochs \[0\]") as caught:
        p.sim.run()
    assert "rank 1: is idle" in str(caught.value) and "seed=0" in str(caught.value)


def test_race_names_both_sides() -> None:
    p = group()
    p.play("D X C X C")
    with pytest.raises(RaceError, match=r"(?s)SLOT0\[\d+:\d+\] of rank \d.*(gather_row \(ll_combine.py:\d+, combine\)|experts).*replay with seed=0"):
        p.sim.run()


def test_access_outside_of_memory_names_the_operation() -> None:
    p = group()
    p.dispatch()
    launch = p.sim.streams[1].queue[0]
    args = list(launch.args)
    args[p.parameters["dispatch"].index("num_tokens")] += 2
    launch.args = tuple(args)
    with pytest.raises(OutOfBoundsError, match=r"rank 1 .* behind .*: nobody registered memory there"):
        p.sim.run()


def test_access_to_private_memory_of_a_peer() -> None:
    p = group()
    a = np.zeros(64, np.uint8)
    address = p.sim.register(a, "secret", 1).address
    p.sim.host(0, None, reads=[(address, 8)])
    with pytest.raises(OutOfBoundsError, match="secret, private memory of rank 1"):
        p.sim.run()


def test_unregistered_memory_is_gone() -> None:
    p = group()
    a = np.zeros(64, np.uint8)
    region = p.sim.register(a, "a", 0)
    p.sim.unregister(region)
    p.sim.host(0, None, reads=[(region.address, 8)])
    with pytest.raises(OutOfBoundsError):
        p.sim.run()


def test_tensors_inside_one_another_share_their_history() -> None:
    p = group()
    a = np.zeros(256, np.uint8)
    inner = p.sim.register(a[64:128], "inner", 0)
    outer = p.sim.register(a, "outer", 0)
    shared = p.sim.register(a[32:96], "shared", 1)   # one process, one tensor, two ranks
    assert [r.address - outer.address for r in (inner, outer, shared)] == [64, 0, 32]
    p.sim.host(0, None, writes=[(inner.address, 64)])
    p.sim.run()
    p.sim.host(1, None, reads=[(shared.address, 64)])
    with pytest.raises(RaceError, match=r"outer\[64:68\]"):
        p.sim.run()
    for region in (outer, inner, shared):
        assert outer in p.sim.memory.regions
        p.sim.unregister(region)
    assert outer not in p.sim.memory.regions


@pytest.mark.parametrize("kernel", [
    lambda ops: lambda c: ops.last_block(c + 8 * ops.warp_idx()),
    lambda ops: lambda c: ops.last_block(c) if ops.warp_idx() else 0,
    lambda ops: lambda c: [ops.last_block(c) for _ in range(1 + ops.warp_idx())],
], ids=["other arguments", "not all warps", "one more"])
def test_block_operations_are_uniform(kernel: object) -> None:
    for seed in range(10):
        sim = Simulator(1, seed)
        memory = np.zeros(128, np.uint8)
        address = sim.register(memory, "counter", 0).address
        sim.launch(0, kernel(sim.vocabulary), (address,))
        with pytest.raises(UniformityError):
            sim.run()


def test_constant_load_of_memory_written_in_the_kernel() -> None:
    sim = Simulator(1, warps=1, blocks=1)
    memory = np.zeros(256, np.uint8)
    at = sim.register(memory, "ids", 0).address
    ops = sim.vocabulary

    def kernel(at: int) -> None:
        ops.store_header(at, 1, 2)
        ops.count_experts(at, 8, 1, 1, 4, 0, 1)

    sim.launch(0, kernel, (at,))
    with pytest.raises(RaceError, match=r"reads ids\[0:4\] of rank 0 with ld.nc"):
        sim.run()


# ---- failures ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_dead_rank_is_named_by_all(mode: str) -> None:
    for seed in range(60):
        dead = seed % 3
        p = group(3, seed, mode, faults=Faults(dead={dead: seed * 2}, timeouts=True))
        for _ in range(2):
            p.combine(p.dispatch())
        p.sim.run()
        for rank in p.ranks:
            if rank != dead:
                record = p.record(rank)
                assert record is not None and record.code in (Code.TIMEOUT, Code.ABORTED) and record.culprit == dead
                assert p.epoch(rank) == 5


@pytest.mark.parametrize("mode", MODES)
def test_late_rank_is_named_and_the_next_operation_is_right(mode: str) -> None:
    codes = set()
    for seed in range(60):
        late = seed % 3
        p = group(3, seed, mode, faults=Faults(late={late: seed % 4}, timeouts=True))
        for _ in range(2):
            p.combine(p.dispatch())
        p.sim.run()
        records = [p.record(rank) for rank in p.ranks]
        for rank, record in enumerate(records):
            if record is not None and record.code == Code.REFUSED:   # by a rank that had no rows to combine: its own record says why
                why = records[record.peer]
                assert record.seen == Refusal.STALE and why is not None and (record.peer == late or why.culprit == late)
            else:
                assert record is None or rank == late or record.culprit == late
        if records[late] is not None:
            codes.add(records[late].code)
        assert [p.epoch(rank) for rank in p.ranks] == [5] * 3
        p.dispatched.clear(), p.combined.clear()
        p.play("D X C")
        p.sim.run()
        p.check()
    assert codes - {Code.REFUSED} and codes <= {Code.ABORTED, Code.LEFT_BEHIND, Code.TIMEOUT, Code.REFUSED}


@pytest.mark.parametrize("mode", MODES)
def test_slow_rank_changes_nothing(mode: str) -> None:
    for seed in range(40):
        p = group(3, seed, mode, faults=Faults(slow={seed % 3: 5 * seed}))
        p.play("D X C D X C")
        p.sim.run()
        p.check()


@pytest.mark.parametrize("mode", MODES)
def test_refused_call_fails_everywhere_and_the_next_is_right(mode: str) -> None:
    for seed in range(20):
        p = group(3, seed, mode)
        p.dispatch(ranks=[0, 2])
        p.dispatch(ranks=[1], status=Status.REFUSED << 24 | 7)
        p.sim.run()
        records = [p.record(rank) for rank in p.ranks]
        assert [(r.code, r.phase, r.peer, r.seen) for r in records if r] == [(Code.REFUSED, Phase.HEAD, 1, 7)] * 3
        p.dispatched.clear()
        p.play("D X C")
        p.sim.run()
        p.check()


def test_different_operations_are_named_on_all_ranks() -> None:
    p = group(2)
    p.dispatch(0, ranks=[0])
    p.dispatch(1, ranks=[1])
    p.sim.run()
    records = [p.record(rank) for rank in p.ranks]
    assert [(r.code, r.peer) for r in records if r] == [(Code.MISMATCH, 1), (Code.MISMATCH, 0)]
    assert "slot 0 here, 1 there" in str(records[0].exception())
    assert [p.epoch(rank) for rank in p.ranks] == [2, 2]


def test_combine_of_an_overwritten_slot() -> None:
    p = group(2)
    old = p.dispatch()
    p.dispatch()
    p.combine(old)
    p.sim.run()
    assert [p.record(rank).code for rank in p.ranks] == [Code.STALE_SLOT] * 2
    assert [p.epoch(rank) for rank in p.ranks] == [4, 4]


def test_last_block_decides_as_one() -> None:
    """A rank that stalls inside a kernel and is left behind: some of its warps see the failure before they branch, others after."""
    for seed in range(300):
        p = group(3, seed, "adversarial", faults=Faults(slow={seed % 3: 60 + seed % 100}, timeouts=True))
        p.sim.policy.rush = 0.05
        p.play("D D D")
        p.sim.run()
