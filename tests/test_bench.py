"""What `scripts/bench_ll.py` checks before it times anything, on the simulator, for every kind of case."""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import pathlib
import sys
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch

from ncclep_py import LocalWorld

PATH = pathlib.Path(__file__).parent.parent / "scripts" / "bench_ll.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_ll", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FLUSH_BYTES = 1024
    return module


@pytest.mark.parametrize("kind", [{}, {"layout": "rank_major"}, {"recipe": "ds_fp8"}, {"layout": "rank_major", "recipe": "ds_fp8"}], ids=str)
@pytest.mark.parametrize("routing", ["uniform", "one_rank", "zipf"])
def test_results_are_known(bench: Any, kind: dict[str, str], routing: str) -> None:
    case = {"ranks": 2, "experts": 16, "tokens": 5, "sms": 2, "topk": 3, "hidden": 512, "routing": routing, **kind}

    def program(comm: Any) -> bool:
        rank = bench.Rank(comm, case, comm.barrier)
        right = rank.check()
        rank.pair(True)
        rank.group.check()
        rank.group.close()
        return right

    with LocalWorld(2, "sim") as world:
        assert world.run(program) == [True, True]


def test_a_wrong_result_is_seen(bench: Any) -> None:
    case = {"ranks": 1, "experts": 4, "tokens": 2, "sms": 1, "topk": 2, "hidden": 512}

    def program(comm: Any) -> bool:
        rank = bench.Rank(comm, case, comm.barrier)
        rank.weights.mul_(2)
        return rank.check()

    with LocalWorld(1, "sim") as world:
        assert world.run(program) == [False]


def test_routing_and_bytes(bench: Any) -> None:
    case = {"ranks": 4, "experts": 64, "tokens": 200, "topk": 8, "hidden": 512}
    for how in ("uniform", "one_rank", "zipf"):
        ids = bench.routing({**case, "routing": how}, 1)
        assert ids.shape == (200, 8) and all(len(set(row)) == 8 for row in ids.tolist())
        most = int(torch.bincount(ids.flatten(), minlength=64).max())
        assert (int(ids.max()) < 16) == (how == "one_rank") and (most > 150) == (how == "zipf")
    plain = 4 * 200 * (2 + 2 * 8) * 1024 / 1e6
    assert bench.moved_mb(case) == round(plain, 1)
    assert bench.moved_mb({**case, "routing": "one_rank", "layout": "rank_major"}) == round(4 * 200 * 4 * 1024 / 1e6, 1)
    assert bench.moved_mb({**case, "recipe": "ds_fp8"}) == round(plain - 4 * 200 * 8 * (512 - 16) / 1e6, 1)


def _meet(barrier: Any, rank: int, answers: Any) -> None:
    barrier.rank = rank
    for _ in range(50):
        barrier.wait(20)
    try:
        barrier.abort() if rank == 0 else barrier.wait(20)
    except BrokenBarrierError:
        answers.put(rank)


def test_processes_meet_and_learn_that_one_gave_up(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bench_ll", bench)
    context = mp.get_context("fork")
    barrier, answers = bench.SpinBarrier(2), context.Queue()
    processes = [context.Process(target=_meet, args=(barrier, rank, answers), daemon=True) for rank in range(2)]
    for p in processes:
        p.start()
    assert answers.get(timeout=60) == 1
