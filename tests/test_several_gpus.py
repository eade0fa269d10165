"""`scripts/several_gpus.py` without GPUs: its plan fits ten minutes, stages end in time, and its verdicts are by the figures."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from ncclep_py.__main__ import build_parser

PATH = pathlib.Path(__file__).parent.parent / "scripts" / "several_gpus.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("several_gpus", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["several_gpus"] = module   # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_plan_fits_and_names_what_exists(script: Any, tmp_path: pathlib.Path) -> None:
    made = script.stages(8, tmp_path)
    assert sum(stage.limit_s for stage in made) <= script.WHOLE_RUN_S
    for stage in made:
        for word in stage.command:
            assert not word.startswith("tests/") or (script.ROOT / word).is_file()
        if "bench" in stage.command:
            options = build_parser("bench").parse_args(list(stage.command[stage.command.index("bench"):]))
            assert options.ranks == [8] and options.gpus == 8 and options.json.startswith(str(tmp_path))


def test_without_gpus_it_says_so(tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, PATH, "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and "this needs at least 2 GPUs, there are 0" in done.stderr and "bench_ll" in done.stdout


@pytest.mark.parametrize(("code", "limit", "outcome"), [("print('fine')", 20, "passed"), ("raise SystemExit(3)", 20, "failed (3)"),
                                                        ("import time; time.sleep(60)", 1, "over after 1 s")])
def test_a_stage_ends_in_time(script: Any, tmp_path: pathlib.Path, code: str, limit: int, outcome: str) -> None:
    stage = script.Stage("one", (sys.executable, "-c", code), limit)
    told = script.run(stage, tmp_path, script.time.monotonic())
    assert told["outcome"] == outcome and told["seconds"] < 15
    assert script.run(stage, tmp_path, script.time.monotonic() - 599)["outcome"] == "left out"


def row(implementation: str, tokens: int, recipe: str, dispatch: float | None, pair: float, algorithm: str = "ll",
        verified: bool = True) -> dict[str, Any]:
    figures = {"pair": {"median_us": pair + 1}, "chained_pair": {"median_us": pair}}
    figures |= {} if dispatch is None else {"dispatch": {"median_us": dispatch}}
    return {"implementation": implementation, "algorithm": algorithm, "layout": "expert_major", "tokens": tokens, "recipe": recipe, "sms": 32,
            "ranks": 8, "verified": verified, "figures": figures}


def test_verdicts(script: Any) -> None:
    rows = [row("ncclep_py", 128, "ds_fp8", 30.0, 90.0), row("ncclep_py", 128, "none", 45.0, 94.0), row("nccl.ep", 128, "none", None, 150.0),
            row("ncclep_py", 4096, "quant_fwd", 500.0, 1500.0, "ht"), row("ncclep_py", 4096, "none", 1.0, 2.0, "ht", verified=False),
            row("ncclep_py", 8, "none", 9.0, 20.0), row("nccl.ep", 8, "none", None, 15.0)]
    told = script.verdicts(rows)
    assert [(t["half"], t["ours_us"], t["verdict"]) for t in told[:4]] == [
        ("dispatch", 30.0, "ahead"), ("combine", 49.0, "stretch"), ("dispatch", 500.0, "behind"), ("combine", None, "not measured")]
    assert [(t["ours_us"], t["nccl_ep_us"], t["verdict"]) for t in told[4:]] == [(95.0, 151.0, "ahead"), (21.0, 16.0, "behind")]
    assert json.dumps(told)
