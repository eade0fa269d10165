"""Kernels over several teams with their CUDA operations, run on the CPU: results are the oracle's bits, and warps act together where they must."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import test_ll_net_zero_copy
import torch

pytest.importorskip("numba", reason="needs an extra cu12 or cu13")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from native.machine import Machine

from ncclep_py.config import Algorithm, GroupConfig, Layout
from ncclep_py.errors import Code
from ncclep_py.kernels.ll_net_combine import make_ll_net_combine
from ncclep_py.kernels.ll_net_dispatch import make_ll_net_dispatch
from ncclep_py.kernels.ll_net_rank_major_dispatch import make_ll_net_rank_major_dispatch
from ncclep_py.kernels.shape import PLAIN, Wire
from ncclep_py.simulator import Simulator
from ncclep_py.simulator.ht_net_program import FACTORIES, HTNetProgram
from ncclep_py.simulator.ll_net_program import LLNetProgram, LLNetRankMajorProgram

LAYOUTS = (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR)
LL = {layout: {"dispatch": dispatch, "combine": make_ll_net_combine}
      for layout, dispatch in zip(LAYOUTS, (make_ll_net_dispatch, make_ll_net_rank_major_dispatch), strict=True)}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Machine:
    return Machine(tmp_path_factory.mktemp("native"))


def simulator(ranks: int, seed: int, blocks: int = 2) -> Simulator:
    sim = Simulator(ranks, seed, "fair", blocks=blocks)
    sim.poison = False   # nobody tells it when a dispatch begins
    return sim


def low(machine: Machine, tokens: Sequence[int], team: int, seed: int = 0, text: str = "D X C D X C", epoch: int = 1, missing: int = -1,
        blocks: int = 2, layout: Layout = Layout.EXPERT_MAJOR, wire: Wire = PLAIN, **config: Any) -> LLNetProgram:
    settings = {"num_experts": 2 * len(tokens), "max_dispatch_tokens_per_rank": max(*tokens, 1), "hidden": 16, "num_topk": 2} | config
    program = LLNetRankMajorProgram if layout is Layout.RANK_MAJOR else LLNetProgram
    p = program(simulator(len(tokens), seed, blocks), GroupConfig(**settings), tokens, team, seed=seed, epoch=epoch, wire=wire)
    if wire is PLAIN:
        p.play(text)
    else:
        p.dispatch_quantised(0)
        p.dispatch_quantised(0)
    machine.run(p.sim, team, LL[layout], [p.shape] * len(tokens), seed, missing)
    return p


def high(machine: Machine, tokens: Sequence[int], team: int, layout: Layout, seed: int = 0, text: str = "U D X C B X G", chunk_tokens: int = 2,
         missing: int = -1, **config: Any) -> HTNetProgram:
    settings = {"num_experts": 2 * len(tokens), "max_dispatch_tokens_per_rank": max(*tokens, 1), "hidden": 16, "num_topk": 3, "num_slots": 2} | config
    p = HTNetProgram(simulator(len(tokens), seed), GroupConfig(**settings, algorithm=Algorithm.HIGH_THROUGHPUT), layout, tokens, team, seed=seed,
                     chunk_tokens=chunk_tokens)
    p.play(text)
    machine.run(p.sim, team, FACTORIES, p.shapes, seed, missing)
    return p


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, team", [((4, 2, 3, 4), 2), ((3, 4), 1), ((4, 1, 0, 2, 3, 4), 3)], ids=str)
def test_low_latency(machine, tokens, team, layout):
    for seed in range(2):
        low(machine, tokens, team, seed, layout=layout).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("experts, topk, hidden, dtype, blocks", [(12, 4, 264, FP16, 3), (16, 3, 8, FP32, 5), (20, 3, 520, BF16, 1)])
def test_low_latency_shapes(machine, experts, topk, hidden, dtype, blocks, layout):
    low(machine, (9, 2, 12, 4), 2, 1, "D X C", blocks=blocks, num_experts=experts, num_topk=topk, hidden=hidden, dtype=dtype, layout=layout).check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_low_latency_epochs_wrap(machine, layout):
    low(machine, (4, 2, 3, 4), 2, epoch=2**32 - 2, layout=layout).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wire, hidden", [(Wire(32, 64), 16), (Wire(1536, 48, True), 1536), (Wire(2560, 80, True, True), 2560)], ids=str)
def test_low_latency_recipes(machine, wire, hidden, layout):
    """Each rank looks at its rows itself, when the dispatch has run."""
    p = low(machine, (3, 2, 0, 4), 2, 3, layout=layout, wire=wire, hidden=hidden, max_token_bytes=0 if wire.quantise else 96)
    assert not any(p.record(rank) for rank in p.ranks)


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.EXPERT_MAJOR])
@pytest.mark.parametrize("tokens, team, more", [((3, 1, 2, 4), 2, {}), ((2, 0, 5), 1, {"num_topk": 9, "num_experts": 33, "dtype": FP16}),
                                                ((20, 7, 0, 9), 2, {"chunk_tokens": 8, "hidden": 136, "dtype": FP32})], ids=str)
def test_high_throughput(machine, tokens, team, more, layout):
    high(machine, tokens, team, layout, len(tokens), **more).check()


def user_windows(machine: Machine, layout: Layout, tokens: Sequence[int], team: int, seed: int = 0) -> None:
    p = test_ll_net_zero_copy.program(seed, layout, len(tokens), team, tokens)
    p.play("D0 D1 X0 C0 D0 X1 C1")
    machine.run(p.sim, team, LL[layout], [p.shape] * len(tokens), seed, limit=2_000_000)   # what is broken may wait for ever
    p.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, team", [((4, 2, 3, 4), 2), ((3, 4), 1)], ids=str)
def test_low_latency_rows_in_user_windows(machine, tokens, team, layout):
    for seed in range(2):
        user_windows(machine, layout, tokens, team, seed)


@pytest.mark.parametrize("old, new", [("rows_window, slot + i64(place)", "window, slot + i64(place)"),
                                      ("row_at(rows_window, slot,", "row_at(window, slot,"),
                                      ("take(rows_window, slot, place,", "take(window, slot, place,")])
def test_the_wrong_window_is_found(tmp_path, old, new):
    broken = Machine(tmp_path, old, new)
    with pytest.raises(AssertionError):
        for layout in LAYOUTS:
            user_windows(broken, layout, (4, 3, 3, 4), 2)


def test_a_missing_rank_is_named(machine):
    """Every live rank ends, with a record of its own that names the dead one or somebody who gave up on it."""
    for p in (*(low(machine, (4, 2, 3, 4), 2, text="D", missing=3, timeout_ns=1_000_000, layout=layout) for layout in LAYOUTS),
              high(machine, (3, 1, 2, 4), 2, Layout.FLAT, text="U", missing=3, timeout_ns=1_000_000)):
        for rank in range(3):
            found = p.record(rank)
            assert found is not None and found.code in (Code.TIMEOUT, Code.ABORTED), f"rank {rank}: {found}"


@pytest.mark.parametrize("old, new, said", [
    ("place += !own && other < distance;", "place += !own && __shfl_sync(~0u, distance, 0) < distance;", "meet at different places"),
    ("for (int s = 0; s < source; ++s) row +=", "for (int s = 0; s < source - 1; ++s) row +=", "rows of rank"),
    ("if (puts) gin_put(comm, window, host,", "if (puts) gin_put(comm, window, rank,", "of its own team"),
    ("[(w * (end - first) + token - first)", "[(w * (end - first) + first - first)", "ids|rows of rank"),
    ("sent + token * message_bytes, rank), scales_to", "sent, rank), scales_to", "rows of plane"),
    ("place, message + header_bytes + row_bytes, scale_bytes", "place, message + header_bytes, scale_bytes", "scales of plane"),
    ("if (near_by) mine = row_at(rows_window, slot, row, plane_rows", "if (row >= 0) mine = row_at(rows_window, slot, row, plane_rows",
     "addresses memory of rank")])
def test_mutants_are_found(tmp_path, old, new, said):
    broken = Machine(tmp_path, old, new)
    with pytest.raises(AssertionError, match=said):
        low(broken, (4, 3, 3, 4), 2, num_experts=8, num_topk=4, text="D X C", layout=Layout.RANK_MAJOR).check()
        low(broken, (4, 3, 3, 4), 2, wire=Wire(512, 16, True), hidden=512, layout=Layout.RANK_MAJOR)
        high(broken, (3, 1, 2, 4), 2, Layout.FLAT, text="U D X C").check()
        low(broken, (4, 3, 3, 4), 2, num_experts=8, num_topk=4, text="D X C").check()
