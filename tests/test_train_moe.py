"""`scripts/train_moe.py` at toy size on the simulator: the loss curve is that of the same model in one process, and falls."""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ncclep_py import LocalWorld
from ncclep_py.demo import TEXT

PATH = pathlib.Path(__file__).parent.parent / "scripts" / "train_moe.py"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("train_moe", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["train_moe"] = importlib.util.module_from_spec(spec)   # dataclasses look there
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PATH.parent))   # as when it is started
        spec.loader.exec_module(module)
    yield module


@pytest.mark.parametrize("ranks, experts, topk", [(1, 3, 2), (3, 6, 3)])
def test_the_loss_curve_is_that_of_one_process(example: Any, ranks: int, experts: int, topk: int) -> None:
    job = example.Job(ranks, 12, 8, 16, experts, topk, 1e-2, 1)
    text, characters = example.encode(TEXT[:600])
    with LocalWorld(ranks, "sim", threads=True) as world:
        curves = world.run(example.train_rank, job, text, characters)
    assert all(curve == curves[0] for curve in curves)
    assert curves[0] == pytest.approx(example.train_alone(job, text, characters), rel=1e-4)
    assert sum(curves[0][-3:]) < 0.95 * sum(curves[0][:3])


def _sum(rank: int, folder: str, told: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sums = sys.modules["train_moe"].sum_over_ranks(None, [torch.full((2, 3), rank + 1.0), torch.tensor(10.0 * rank)])
    told.put([s.tolist() for s in sums])


def test_processes_add_up_their_gradients(example: Any, tmp_path: pathlib.Path) -> None:
    context = mp.get_context("fork")
    told = context.Queue()
    processes = [context.Process(target=_sum, args=(rank, str(tmp_path), told), daemon=True) for rank in range(2)]
    for p in processes:
        p.start()
    assert [told.get(timeout=60) for _ in processes] == [[[[3.0] * 3] * 2, 10.0]] * 2
