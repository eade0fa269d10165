"""Every lesson in `scripts/` runs to its last assert, in the simulator and (marked gpu) on a GPU, and keeps the form lessons have."""

from __future__ import annotations

import pathlib
import re
import runpy
import sys
from typing import Any

import pytest
import torch

from ncclep_py import launch

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"
LESSONS = sorted(SCRIPTS.glob("lesson_*.py"))
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
