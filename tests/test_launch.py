"""The last steps of the host before a grid runs, with stand-ins for the driver: which values go to which stream."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs an extra cu12 or cu13")

from cuda.bindings import driver

from ncclep_py import launch
from ncclep_py.communicator import BLOCK_THREADS, _LoadedKernel
from ncclep_py.handle_rows import HandleRows

PARAMETERS = launch.parameters_of("ll_combine")
NUMBERS = tuple(range(100, 100 + len(PARAMETERS)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been launched: (stream, grid, block, shared bytes, kernel, values), the values read where the driver would read them."""
    told: list[Any] = []

    def record(kernel: Any, x: int, y: int, z: int, block: int, one: int, more: int, shared: int, stream: Any, table: int, extra: int) -> tuple[int]:
        assert (y, z, one, more, extra) == (1, 1, 1, 1, 0)
        pointers = (ctypes.c_void_p * len(PARAMETERS)).from_address(table)
        told.append((stream, x, block, shared, kernel, tuple(ctypes.c_int64.from_address(pointer).value for pointer in pointers)))
        return (0,)

    monkeypatch.setattr(driver, "cuLaunchKernel", record)
    monkeypatch.setattr(launch, "_stream", lambda handle: f"stream {handle}")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: {3: 77}[device], raising=False)
    return told


def loaded() -> Any:
    kernel = SimpleNamespace(name="ll_combine", function="kernel", device=3, allow_shared=lambda num_bytes: None)
    kernel.prepare = lambda *how: launch.LoadedKernel.prepare(kernel, *how)
    return kernel


def test_a_kernel_is_enqueued_on_the_current_stream_with_the_values_of_each_call(launched):
    kernel = _LoadedKernel(loaded(), 4096)
    kernel.enqueue(NUMBERS, 16, "combine")
    kernel.enqueue(NUMBERS[::-1], 16, "combine")
    kernel.enqueue(NUMBERS, 8, "combine")
    assert [what[5] for what in launched] == [NUMBERS, NUMBERS[::-1], NUMBERS]
    assert [what[:5] for what in launched] == [("stream 77", grid, BLOCK_THREADS, 4096, "kernel") for grid in (16, 16, 8)]


def test_one_value_or_all_by_name_can_be_changed(launched):
    made = launch.Launch(loaded(), 4, 32, 0, dict(zip(PARAMETERS, NUMBERS, strict=True)))
    made.set("rank", 5)
    made.enqueue(3)
    assert launched[0][5] == tuple(5 if name == "rank" else n for name, n in zip(PARAMETERS, NUMBERS, strict=True))


def test_without_the_fast_way_torch_is_asked_for_the_stream(launched, monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: {3: SimpleNamespace(cuda_stream=78)}[device])
    _LoadedKernel(loaded(), 0).enqueue(NUMBERS, 1, "combine")
    assert launched[0][0] == "stream 78"


def test_words_of_64_bits_pass_and_larger_ones_are_refused(launched):
    made = launch.Launch(loaded(), 4, 32, 0, (-1, 2**64 - 1, 1 << 63, -(1 << 63), *NUMBERS[4:]))
    made.enqueue(0)
    assert launched[0][5] == (-1, -1, -(1 << 63), -(1 << 63), *NUMBERS[4:])
    made.set("rank", 1 << 64)
    with pytest.raises(ValueError, match="must fit into 64 bits, got 18446744073709551616"):
        made.enqueue(0)


def test_what_the_driver_says_is_raised(launched, monkeypatch):
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *given: (driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda error: (driver.CUresult.CUDA_SUCCESS, f"words of {int(error)}".encode()))
    with pytest.raises(RuntimeError, match="CUDA driver: words of 719"):
        launch.Launch(loaded(), 4, 32, 0, NUMBERS).enqueue(0)


def test_missing_unknown_and_too_few_values_are_named(launched):
    values = dict(zip(PARAMETERS, NUMBERS, strict=True))
    with pytest.raises(ValueError, match="missing or unknown: colour"):
        launch.Launch(loaded(), 4, 32, 0, values | {"colour": 1})
    del values["rank"]
    with pytest.raises(ValueError, match="missing or unknown: rank"):
        launch.Launch(loaded(), 4, 32, 0, values)
    with pytest.raises(ValueError, match=f"takes {len(PARAMETERS)} values, got 2"):
        launch.Launch(loaded(), 4, 32, 0, [1, 2])


def test_counters_made_at_once_are_nobody_elses(monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda *given, _empty=torch.empty, **named: made.append(1) or _empty(*given, **named))
    capturing = [False]
    comm = SimpleNamespace(backend="nccl", device=torch.device("cpu"), capturing=lambda: capturing[0])
    rows = HandleRows()
    rows.group, rows._spare_counters = SimpleNamespace(comm=comm), []   # type: ignore[assignment]
    with torch.inference_mode():
        held = [rows._new_counters(6) for _ in range(100)]
    held[0].add_(1)   # of no inference mode
    assert len(made) == 2 and {(t.dtype, tuple(t.shape)) for t in held} == {(torch.int32, (6,))}
    begins = sorted(t.data_ptr() for t in held)
    assert all(after - before >= 24 for before, after in zip(begins, begins[1:], strict=False))
    rows._spare_counters.clear()
    capturing[0] = True
    assert rows._new_counters(6).numel() == 6 and not rows._spare_counters   # a graph's own memory is nobody else's
