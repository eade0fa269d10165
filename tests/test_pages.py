"""Pages and README say what is so: their programs run, the files and tests they name exist."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from ncclep_py.__main__ import main
from ncclep_py.explain import FOLDER, PAGES, text

ROOT = pathlib.Path(__file__).parent.parent
TEXTS = {name: text(name) for name in PAGES} | {"README": (ROOT / "README.md").read_text(encoding="utf-8")}
PROGRAMS = [(name, code) for name, said in TEXTS.items() for code in re.findall(r"^```python\n(.*?)^```", said, re.MULTILINE | re.DOTALL)]


def test_all_pages_are_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(PAGES) and len(PROGRAMS) >= 3


@pytest.mark.parametrize(("name", "code"), PROGRAMS, ids=[f"{name} {i}" for i, (name, _) in enumerate(PROGRAMS)])
def test_programs_run(name: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, f"{name}.md", "exec"), {"__name__": "__main__"})
    if name == "README":
        assert capsys.readouterr().out.strip() == "[0.0, 0.0, 0.0, 0.0]"


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_named_exists(name: str) -> None:
    for path in re.findall(r"`((?:ncclep_py|tests|scripts)/[\w/]+\.(?:py|cu|md))`", TEXTS[name]):
        assert (ROOT / path).is_file(), path
    for path, test in re.findall(r"`(tests/\w+\.py)::(\w+)`", TEXTS[name]):
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
    for script in re.findall(r"python3? scripts/(\w+\.py)", TEXTS[name]):
        assert (ROOT / "scripts" / script).is_file(), script


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert all(name in capsys.readouterr().out for name in ("memory-model",))
    assert main(["explain", "porting"]) == 0
    assert "import ncclep_py as ep" in capsys.readouterr().out
    assert main(["explain", "nothing"]) == 2
    said: Any = capsys.readouterr().err
    assert "page must be one of memory-model, protocol, porting, mlir, got 'nothing'" in said
