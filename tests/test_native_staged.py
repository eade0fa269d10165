"""Staged kernels over several teams with their CUDA operations, run on the CPU: the oracle's bits, and warps that act together where they must."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("numba", reason="needs an extra cu12 or cu13")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from native.machine import Machine
from test_native import BF16, FP16, FP32, LL, simulator
from test_staged import TEXTS

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.errors import Code
from ncclep_py.simulator.ll_net_program import HALVES, LLNetStagedProgram, LLNetStagedRankMajorProgram

LAYOUTS = (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR)
FACTORIES = {layout: LL[layout] | {half: factory for half, (factory, _) in HALVES[layout].items()} for layout in LAYOUTS}


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Machine:
    return Machine(tmp_path_factory.mktemp("native"))


def staged(machine: Machine, tokens: Sequence[int], team: int, seed: int = 0, text: str = TEXTS[1], epoch: int = 1, missing: int = -1,
           blocks: int = 2, layout: Layout = Layout.EXPERT_MAJOR, **config: Any) -> LLNetStagedProgram:
    settings = {"num_experts": 2 * len(tokens), "max_dispatch_tokens_per_rank": max(*tokens, 1), "hidden": 16, "num_topk": 2, "num_slots": 2,
                "num_staging_slots": 4} | config
    kind = LLNetStagedRankMajorProgram if layout is Layout.RANK_MAJOR else LLNetStagedProgram
    p = kind(simulator(len(tokens), seed, blocks), GroupConfig(**settings), tokens, team_size=team, seed=seed, epoch=epoch)
    p.play(text)
    machine.run(p.sim, team, FACTORIES[layout], [p.shape] * len(tokens), seed, missing)
    return p


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", TEXTS)
def test_bits(machine, text, layout):
    for seed, team in enumerate((2, 1)):
        staged(machine, (4, 2, 0, 4), team, seed, text, layout=layout).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("experts, topk, hidden, dtype, blocks", [(12, 4, 264, FP16, 3), (16, 3, 8, FP32, 5), (200, 3, 520, BF16, 1)])
def test_shapes(machine, experts, topk, hidden, dtype, blocks, layout):
    more = {"num_experts": experts, "num_topk": topk, "hidden": hidden, "dtype": dtype}
    staged(machine, (9, 2, 12, 4), 2, 1, TEXTS[0], blocks=blocks, layout=layout, **more).check()


def test_epochs_wrap_and_more_teams(machine):
    for layout in LAYOUTS:
        staged(machine, (4, 1, 0, 2, 3, 4), 3, epoch=2**32 - 2, layout=layout).check()
        staged(machine, (3, 4), 1, epoch=2**32 - 2, text=TEXTS[3], layout=layout).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", ["S A", "D P00 R0 P00 R0"])
def test_a_missing_rank_is_named(machine, text, layout):
    p = staged(machine, (4, 2, 3, 4), 2, text=text, missing=3, timeout_ns=1_000_000, layout=layout)
    for rank in range(3):
        found = p.record(rank)
        assert found is not None and found.code in (Code.TIMEOUT, Code.ABORTED), f"rank {rank}: {found}"


@pytest.mark.parametrize("old, new, said", [
    ("+ start_row(num_experts)[plane] +", "+", "rows|combine"),
    ("got[i] = ((const u32*)kept)[i];", "got[i] = 0;", "rows of rank"),
    ("if (sent == uses[1]) continue;", "if (lane() != 0) continue;", "meet at different places"),
    ("u64 to = near_by ? row_at(window, origins,", "u64 to = row >= 0 ? row_at(window, origins,", "addresses memory of rank")])
def test_mutants_are_found(tmp_path, old, new, said):
    broken = Machine(tmp_path, old, new)
    with pytest.raises(AssertionError, match=said):
        for seed in range(4):
            staged(broken, (4, 3, 3, 4), 1 + seed % 2, seed, TEXTS[0] + " D X P00 D1 R0 S A X P R", timeout_ns=3_000_000).check()
