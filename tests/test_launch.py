"""The last steps of the host before a grid runs, with stand-ins for the driver: which values go to which stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs an extra cu12 or cu13")

import cuda.core as core

from ncclep_py import launch
from ncclep_py.communicator import BLOCK_THREADS, _LoadedKernel

PARAMETERS = launch.parameters_of("ll_combine")
NUMBERS = tuple(range(100, 100 + len(PARAMETERS)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been launched: (stream, grid, block, shared bytes, kernel, values)."""
    told: list[Any] = []

    def record(stream: Any, config: Any, kernel: Any, *values: Any) -> None:
        told.append((stream, tuple(config.grid), tuple(config.block), config.shmem_size, kernel, values))

    monkeypatch.setattr(core, "launch", record)
    monkeypatch.setattr(core, "LaunchConfig", lambda grid, block, shmem_size: SimpleNamespace(grid=(grid,), block=(block,), shmem_size=shmem_size))
    monkeypatch.setattr(launch, "_stream", lambda handle: f"stream {handle}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return told


def loaded() -> Any:
    kernel = SimpleNamespace(name="ll_combine", kernel="kernel", allow_shared=lambda num_bytes: None)
    kernel.prepare = lambda *how: launch.LoadedKernel.prepare(kernel, *how)
    return kernel


def test_a_kernel_is_enqueued_on_the_current_stream_with_the_values_of_each_call(launched):
    kernel = _LoadedKernel(loaded(), 4096)
    kernel.enqueue(NUMBERS, 16, "combine")
    kernel.enqueue(NUMBERS[::-1], 16, "combine")
    kernel.enqueue(NUMBERS, 8, "combine")
    assert [what[5] for what in launched] == [NUMBERS, NUMBERS[::-1], NUMBERS]
    assert [what[:5] for what in launched] == [("stream 77", (grid,), (BLOCK_THREADS,), 4096, "kernel") for grid in (16, 16, 8)]


def test_one_value_or_all_by_name_can_be_changed(launched):
    made = launch.Launch(loaded(), 4, 32, 0, dict(zip(PARAMETERS, NUMBERS, strict=True)))
    made.set("rank", 5)
    made.enqueue(3)
    assert launched[0][5] == tuple(5 if name == "rank" else n for name, n in zip(PARAMETERS, NUMBERS, strict=True))


def test_missing_unknown_and_too_few_values_are_named(launched):
    values = dict(zip(PARAMETERS, NUMBERS, strict=True))
    with pytest.raises(ValueError, match="missing or unknown: colour"):
        launch.Launch(loaded(), 4, 32, 0, values | {"colour": 1})
    del values["rank"]
    with pytest.raises(ValueError, match="missing or unknown: rank"):
        launch.Launch(loaded(), 4, 32, 0, values)
    with pytest.raises(ValueError, match=f"takes {len(PARAMETERS)} values, got 2"):
        launch.Launch(loaded(), 4, 32, 0, [1, 2])
