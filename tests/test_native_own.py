"""Operations for kernels of one's own over several teams with their CUDA code, run on the CPU: the same kernel, the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs an extra cu12 or cu13")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from native.machine import Machine
from own_net_kernel import ROUNDS, ROW_BYTES, expected, make_own, sent_rows

from ncclep_py.config import GroupConfig
from ncclep_py.errors import Code, ErrorRecord, Phase
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.simulator import Simulator

CONFIG = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=2)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("native"))


class Run:
    """The kernel on all ranks."""

    def __init__(self, machine: Machine, ranks: int, team: int, seed: int, warps: int = 3, missing: int = -1) -> None:
        self.ranks, self.team = ranks, team
        sim = Simulator(ranks, seed, "fair", blocks=1, warps=warps)
        shape = LLNetShape.over(KernelShape.build(CONFIG, ranks, 2, 8), CONFIG, team)
        self.memory = [np.zeros((2 + ROUNDS) * ranks * ROW_BYTES, np.uint8) for _ in range(ranks)]
        self.out = [np.zeros((ROUNDS * ranks + 1, 2), np.int64) for _ in range(ranks)]
        self.local = [np.zeros(shape.net.local_bytes // 8 + 8, np.int64) for _ in range(ranks)]
        self.records = [np.zeros(8, np.int64) for _ in range(ranks)]
        window = sim.create_window(self.memory, [])
        for rank in range(ranks):
            sent = sent_rows(rank, ranks, team).numpy()
            self.memory[rank][:sent.size] = sent
            held = [a[rank].ctypes.data for a in (self.local, self.records, self.memory, self.out)]
            local, record, memory, out = held
            sim.launch(rank, make_own, [0, 1, rank, local, record, 200_000, window, memory, out, ROW_BYTES, ROUNDS, team], label="own")
        machine.run(sim, team, {"own": make_own}, [shape] * ranks, seed, missing)

    def right(self) -> bool:
        for rank in range(self.ranks):
            told, places = (t.numpy() for t in expected(rank, self.ranks, self.team))
            if not (self.out[rank] == told).all() or not (self.memory[rank].reshape(-1, ROW_BYTES) == places).all():
                return False
        return True


@pytest.mark.parametrize("ranks, team, warps", [(4, 2, 3), (3, 1, 1), (6, 2, 2)])
def test_the_same_bytes(machine: Machine, ranks: int, team: int, warps: int) -> None:
    for seed in range(3):
        assert Run(machine, ranks, team, seed, warps).right()


def test_who_does_not_come_is_named(machine: Machine) -> None:
    run = Run(machine, 4, 2, 0, missing=2)
    for rank in (0, 1):
        record = ErrorRecord.read(run.records[rank])
        assert record is not None and (record.code, record.peer, record.culprit, record.phase) == (Code.TIMEOUT, 2, 2, Phase.ROWS)
        assert run.out[rank][-1, 0] == Code.TIMEOUT


MUTANTS = {   # waits that do not wait show in the PTX (test_net_ops_ptx): here most things are there at once
    "a barrier that signals another number": ("context, signal + rank, 1);", "context, signal, 1);"),
    "a barrier of the next ranks only": ("i < n; ++i) net_signal(comm, networked", "i < 1; ++i) net_signal(comm, networked"),
    "another counter": ("window, source_at, num_bytes, which);", "window, source_at, num_bytes, which + 1);"),
    "a signal of another amount": ("source_at, num_bytes, signal, amount);", "source_at, num_bytes, signal, 0);"),
    "no signal without bytes": ("else gin_signal(comm, peer, context, signal, amount);", ""),
    "a look that only one lane has": ("return __shfl_sync(~0u, value, 0); }   // the barrier", "return value; }   // the barrier"),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_a_mutant_is_found(what: str, tmp_path: Path) -> None:
    wrong = Machine(tmp_path, *MUTANTS[what])
    for seed in range(6):
        try:
            if not Run(wrong, 4, 2, seed).right():
                return
        except AssertionError as e:
            assert "PTX" not in str(e)
            return
    pytest.fail("every run was right")
