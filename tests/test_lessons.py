"""Every lesson in `scripts/` runs to its last assert, in the simulator and (marked gpu) on a GPU, and keeps the form lessons have."""

from __future__ import annotations

import importlib
import pathlib
import re
import runpy
import sys
from typing import Any

import pytest
import torch

from ncclep_py import GroupConfig, compiled, launch
from ncclep_py.kernels.shape import KernelShape

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"
LESSONS = sorted(SCRIPTS.glob("lesson_*.py"))
SHAPE = KernelShape.build(GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=1, hidden=8, num_topk=1, dtype=torch.float32), 2, 1, 8)
by_name = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any) -> Any:
    """Run a lesson as a command; what it printed."""
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path))   # kernels of lessons do not belong into the user's cache
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = dict(launch.KERNELS)

    def run(path: pathlib.Path, backend: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(path), "--backend", backend])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    yield run
    launch.KERNELS.clear()
    launch.KERNELS.update(before)


def test_lessons_are_numbered_without_a_gap() -> None:
    assert [int(path.stem.split("_")[1]) for path in LESSONS] == list(range(1, len(LESSONS) + 1)) and LESSONS


@by_name
def test_form(path: pathlib.Path) -> None:
    text = path.read_text()
    number = int(path.stem.split("_")[1])
    assert text.startswith(f'"""Lesson {number}: ') and text.count("\n") <= 120
    assert f"    python3 scripts/{path.name}" in text and "Look at:" in text.split('"""')[1]
    assert "assert " in text
    for other in re.findall(r"\blesson (\d+)\b", text):
        assert int(other) <= len(LESSONS), f"{path.name} names lesson {other}, which is not there"


@by_name
def test_lesson_in_the_simulator(path: pathlib.Path, play: Any) -> None:
    assert len(play(path, "sim").splitlines()) >= 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@by_name
def test_lesson_on_a_gpu(path: pathlib.Path, play: Any) -> None:
    assert len(play(path, "nccl").splitlines()) >= 3


# ---- kernels of one's own --------------------------------------------------------------------------------------------------
OWN = """
def make_own(shape, ops):
    read_epoch = ops.read_epoch

    def own(word):
        read_epoch(word + {offset})

    return own
"""


def test_a_kernel_of_ones_own_is_compiled_anew_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the disk cache, for factories that stand in no file, as in a notebook."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
    keys = []
    for offset in (0, 8, 8):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(OWN.format(offset=offset), "<cell>", "exec"), names)
        monkeypatch.setitem(launch.KERNELS, "own", (names["make_own"], ("word",)))
        keys.append(compiled.fingerprint(launch.KernelSpec("own", SHAPE), "sm_90"))
    assert keys[0] != keys[1] == keys[2]
    assert "factory" not in compiled.fingerprint(launch.KernelSpec("ll_combine", SHAPE), "sm_90")


@pytest.mark.parametrize(("lesson", "factory", "name"), [("lesson_01_peer_store_and_signal", "make_message", "message"),
                                                        ("lesson_07_write_your_own_kernel", "make_right", "ranks_meet")])
def test_kernels_of_lessons_compile(lesson: str, factory: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module(lesson)
    monkeypatch.setitem(launch.KERNELS, name, (getattr(module, factory), module.PARAMETERS))
    made = launch.compile_kernel(launch.KernelSpec(name, SHAPE), "sm_90")
    assert made.cubin[:4] == b"\x7fELF" and name in made.symbol
