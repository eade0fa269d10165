"""`scripts/notebook_dispatch.py`: its cells run from top to bottom, and its pictures are there."""

from __future__ import annotations

import pathlib
import runpy

import pytest

pytest.importorskip("matplotlib", reason="needs the extra report")
PATH = pathlib.Path(__file__).parent.parent / "scripts" / "notebook_dispatch.py"


def test_the_notebook_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NOTEBOOK_FOLDER", str(tmp_path))
    runpy.run_path(str(PATH), run_name="__main__")
    assert "every token came back, doubled" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} == {"1-counts.png", "4-timeline.png"}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("*.png"))


def test_it_has_the_form_of_cells() -> None:
    text = PATH.read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]") and text.count("\n# %%") >= 9 and "assert " in text
