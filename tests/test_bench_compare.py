"""`scripts/bench_compare.py`: which differences are more than noise."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "scripts" / "bench_compare.py"
ROW = {"ranks": 8, "experts": 128, "tokens": 8, "sms": 16, "verified": True, "pair_us": 100.0, "pair_us_min_max": [99.0, 101.0]}


def run(tmp_path: pathlib.Path, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    for name, rows in (("before", before), ("after", after)):
        (tmp_path / name).write_text("a line of something else\n" + "\n".join(map(json.dumps, rows)) + "\n")
    return subprocess.run([sys.executable, SCRIPT, tmp_path / "before", tmp_path / "after"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("after", "word", "code"), [
    ({"pair_us": 103.9}, "same", 0),                                               # noise 2 + 2.078
    ({"pair_us": 104.2}, "slower", 1),
    ({"pair_us": 96.0, "pair_us_min_max": [95.5, 96.5]}, "faster", 0),             # noise 2 + 1.92
    ({"pair_us": 96.1, "pair_us_min_max": [95.5, 96.5]}, "same", 0),
    ({"pair_us": 110.0, "pair_us_min_max": [100.0, 120.0]}, "same", 0),            # noise 2 + 10
    ({"pair_us": 50.0, "verified": False}, "wrong", 1),
    ({"error": "it fell over", "verified": False}, "wrong", 1),
    ({"tokens": 9}, "missing", 1),
])
def test_verdicts(tmp_path: pathlib.Path, after: dict[str, Any], word: str, code: int) -> None:
    done = run(tmp_path, [ROW], [ROW | {"pair_us_min_max": [after.get("pair_us", 100.0)] * 2} | after])
    assert done.returncode == code and word in done.stdout.splitlines()[0].split(), done.stdout + done.stderr


def test_a_case_that_was_wrong_before_is_new(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, [ROW | {"verified": False}], [ROW])
    assert done.returncode == 0 and " new " in done.stdout


def test_nothing_to_compare_is_an_error(tmp_path: pathlib.Path) -> None:
    assert run(tmp_path, [], []).returncode == 1
