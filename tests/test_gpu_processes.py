"""One process per rank on one GPU, as under torchrun: needs NVIDIA's MPS, else the ranks' kernels take turns. ``-m gpu``."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ROOT = pathlib.Path(__file__).parent.parent
PROGRAM = str(ROOT / "tests" / "rank_program.py")


def torchrun(ranks: int, *arguments: str, program: Sequence[str] = (PROGRAM,), seconds: int = 150) -> subprocess.CompletedProcess[str]:
    """Run `rank_program.py` (or `program`) on `ranks` processes of this host; all on GPU 0 if there are fewer GPUs than ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program, *arguments]
    root = str(ROOT)
    environment = os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_rank_gets_the_oracles_bits(ranks: int) -> None:
    done = torchrun(ranks, "good")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("bitwise equal") == ranks


def test_graphs_of_each_rank_replay_with_new_routing_and_counts() -> None:
    done = torchrun(3, "graph")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("bitwise equal") == 3


def test_a_refused_call_raises_on_every_rank_and_the_next_is_right() -> None:
    done = torchrun(3, "refuse")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("EpRefusedError") == 2 and done.stdout.count("TypeError") == 1
    assert done.stdout.count("bitwise equal") == 3


def test_a_rank_that_does_not_call_is_named_within_the_timeout() -> None:
    done = torchrun(3, "late")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("EpTimeoutError") == 3, done.stdout
    assert done.stdout.count("bitwise equal") == 3


def test_configs_that_differ_are_named_on_every_rank() -> None:
    done = torchrun(3, "differ")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("num_topk: rank 0 has 2, rank 1 has 3, rank 2 has 2") == 3, done.stdout


def test_the_example_trains_with_a_process_per_rank() -> None:
    done = torchrun(2, "--steps", "30", "--check", program=[str(ROOT / "scripts" / "train_moe.py")])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "2 ranks on nccl: loss" in done.stdout and "largest relative difference" in done.stdout


def test_the_benchmark_runs_under_torchrun(tmp_path: pathlib.Path) -> None:
    words = ["--algorithm", "ll", "--layout", "expert_major", "--tokens", "8", "--experts", "8", "--topk", "2", "--hidden", "256", "--sms", "4"]
    done = torchrun(2, "bench", *words, "--json", str(tmp_path / "r.json"), program=["-m", "ncclep_py"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    row = json.loads((tmp_path / "r.json").read_text())["rows"][0]
    assert row["verified"] and row["mode"] == "torchrun" and row["figures"]["chained_pair"]["median_us"] > 0
