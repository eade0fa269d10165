"""The benchmark on a GPU that its ranks share: every kind of case is checked and timed, in one process and in one per rank. ``-m gpu``."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from ncclep_py.timeline import from_json, last_pair, operations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ROOT = pathlib.Path(__file__).parent.parent
SMALL = ("--ranks", "2", "--experts", "8", "--topk", "2", "--hidden", "512", "--sms", "4")


def bench(folder: pathlib.Path, *words: str, seconds: int = 200) -> dict[str, Any]:
    """Run the command; the record."""
    file = folder / "r.json"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-m", "ncclep_py", "bench", *SMALL, *words, "--json", str(file)], env=environment, capture_output=True,
                          text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(file.read_text())


def medians(row: dict[str, Any]) -> dict[str, float]:
    assert "error" not in row and row["verified"], row
    return {name: figure["median_us"] for name, figure in row["figures"].items()}


def test_low_latency_in_one_process(tmp_path: pathlib.Path) -> None:
    held = bench(tmp_path, "--algorithm", "ll", "--tokens", "8", "--recipe", "none", "quant_fwd", "ds_fp8", "--routing", "zipf", "--staged")
    assert [row["implementation"] for row in held["rows"]] == (["ncclep_py", "ncclep_py staged"] + ["ncclep_py"] * 2) * 2
    for row in held["rows"]:
        us = medians(row)
        assert 0 < us["chained_pair"] < 1e4 and row["checked_by"] == "closed form and oracle" and row["peak_memory_bytes"] > 0
        if row["implementation"] == "ncclep_py":
            assert us.keys() >= {"pair", "chained_pair", "flushed_pair", "dispatch", "heads_pair", "empty_pair"} and 0 < row["share_of_copy"] < 1
        else:
            assert us["held_halves"] < 1000 < us["held_fused"] and us.keys() >= {"plain_tensors_pair", "own_window_pair"}
    first = held["rows"][0]
    assert first["compile_s"]["warm"] < first["compile_s"]["cold"] and first["host_us"] > 0
    assert held["floors"]["copy_gb_s"] > 100 and held["machine"]["nccl"] and held["machine"]["gpu"]


def test_high_throughput_in_one_process(tmp_path: pathlib.Path) -> None:
    held = bench(tmp_path, "--algorithm", "ht", "--tokens", "700", "--backward", "--alignment", "16", "--dtype", "bf16", "fp32", "--layer")
    assert len(held["rows"]) == 4
    for row in held["rows"]:
        us = medians(row)
        assert us.keys() >= {"pair", "chained_pair", "dispatch", "update", "step", "both_passes", "flushed_pair"}
        assert us["chained_pair"] < us["both_passes"]
    assert [(row["implementation"], row["direction"]) for row in held["layers"]] == [("ncclep_py", "forward"), ("ncclep_py", "forward+backward")]
    assert all(row["tokens_per_s"] > 0 for row in held["layers"])


def test_one_process_per_rank_beside_all_to_all_single(tmp_path: pathlib.Path) -> None:
    held = bench(tmp_path, "--algorithm", "ll", "ht", "--layout", "expert_major", "--tokens", "8", "32", "--mode", "processes",
                 "--peers", "all_to_all_single", "--layer", seconds=400)
    assert [row["implementation"] for row in held["rows"]] == ["ncclep_py"] * 4 + ["all_to_all_single"] * 4
    for row in held["rows"]:
        us = medians(row)
        assert us["eager_pair"] > 0 and ("chained_pair" in us) == (row["implementation"] == "ncclep_py")
        if row["implementation"] == "all_to_all_single":
            assert us.get("known_sizes_pair", 1.0) > 0 and ("known_sizes_pair" in us) != ("note" in row)
    assert len(held["layers"]) == 4 and all(row["tokens_per_s"] > 0 and "error" not in row for row in held["layers"])


@pytest.mark.parametrize("algorithm, most_us", [("ll", 500), ("ht", 2000)])
def test_the_timeline_is_of_a_pair_without_the_host_in_between(algorithm: str, most_us: float, tmp_path: pathlib.Path) -> None:
    held = bench(tmp_path, "--algorithm", algorithm, "--layout", "expert_major", "--tokens", "64", "--stamps")
    events = last_pair(from_json(held["rows"][0]["stamps"]))
    assert {op.kernel for ops in operations(events).values() for op in ops} == {f"{algorithm}_dispatch", f"{algorithm}_combine"}
    assert max(e.end_ns for e in events) - min(e.begin_ns for e in events) < most_us * 1000


@pytest.mark.parametrize("peer", ["nccl.ep", "deep_ep"])
def test_other_libraries_where_they_are_installed(peer: str, tmp_path: pathlib.Path) -> None:
    from ncclep_py.bench.case import Case
    from ncclep_py.bench.peers import why_not

    reason = why_not(peer, Case(ranks=2, experts=8, topk=2, hidden=7168, tokens=8, sms=16, mode="processes", gpus=min(2, torch.cuda.device_count())))
    if reason:
        pytest.skip(reason)
    held = bench(tmp_path, "--hidden", "7168", "--algorithm", "ll", "--layout", "expert_major", "--tokens", "8", "--sms", "16", "--mode", "processes",
                 "--peers", peer, seconds=400)
    assert [row["implementation"] for row in held["rows"]] == ["ncclep_py", peer] and all(medians(row)["chained_pair"] > 0 for row in held["rows"])
