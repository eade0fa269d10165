#!/usr/bin/env python3
"""The first run on a host with several GPUs: preflight, correctness with a rank per GPU, benchmark beside other libraries, and a verdict.

    python3 scripts/several_gpus.py --out DIR             # everything, within ten minutes; DIR gets a JSON file per stage and summary.json
    python3 scripts/several_gpus.py --out DIR --only links bench_ll
    python3 scripts/several_gpus.py --out DIR --plan      # what would run, and for how long at most

Each stage is a process with a time limit of its own; one that fails or hangs does not keep the others from running. Stages, in order: `doctor` (all
versions, the P2P matrix, a self-test), `links` (bandwidth of a copy between each two GPUs, and the time they need to meet), the tests marked `gpu`
with a rank per GPU, and the benchmark. `expected` in summary.json holds each row the verdict wants, with its source. NVLink multicast is not used.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
WHOLE_RUN_S = 600
H200_SMS = 132


@dataclasses.dataclass(frozen=True)
class Stage:
    """A name, a command, and the most seconds it may take."""

    name: str
    command: tuple[str, ...]
    limit_s: int


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a row of the benchmark has to beat: microseconds of one half of the pair, and who published them."""

    algorithm: str
    tokens: int
    recipe: str
    half: str
    published_us: float
    stretch_us: float
    source: str


EXPECTED = (
    Expected("ll", 128, "ds_fp8", "dispatch", 35.1, 28.0, "DeepEP V2, 8 x H200, FP8"),
    Expected("ll", 128, "none", "combine", 67.7, 50.0, "DeepEP V2, 8 x H200, bf16"),
    Expected("ht", 4096, "quant_fwd", "dispatch", 494.0, 420.0, "DeepEP V2, 8 x H200, FP8, 20 SMs"),
    Expected("ht", 4096, "none", "combine", 979.0, 800.0, "DeepEP V2, 8 x H200, bf16, 24 SMs"),
)
"""At H = 7168, K = 8, E = 256 on 8 GPUs."""


def stages(gpus: int, out: pathlib.Path) -> list[Stage]:
    """Everything that is run on `gpus` GPUs."""
    python, bench = sys.executable, (sys.executable, "-m", "ncclep_py", "bench", "--mode", "processes", "--experts", "256")
    ranks = ("--ranks", str(gpus), "--gpus", str(gpus))
    tests = (python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
    return [
        Stage("doctor", (python, "-m", "ncclep_py", "doctor", "--json"), 60),
        Stage("links", (python, __file__, "--links", "--out", str(out)), 50),
        Stage("test_ll", (*tests, "tests/test_gpu_ll.py"), 90),
        Stage("test_ht", (*tests, "tests/test_gpu_ht.py", "-k", "ranks or thousand or missing"), 90),
        Stage("test_graphs", (*tests, "tests/test_gpu_graphs.py"), 30),
        Stage("test_masking", (*tests, "tests/test_gpu_masking.py", "-k", "masked"), 40),
        Stage("test_processes", (*tests, "tests/test_gpu_processes.py", "-k", "bits or named"), 50),
        Stage("bench_ll", (*bench, "--algorithm", "ll", "--layout", "expert_major", "--tokens", "1", "8", "32", "128", "--recipe", "none", "ds_fp8",
                           *ranks, "--sms", "32", "--peers", "all", "--json", str(out / "bench_ll.json")), 80),
        Stage("bench_ht", (*bench, "--algorithm", "ht", "--layout", "flat", "--tokens", "512", "4096", "8192", "--recipe", "none", "quant_fwd",
                           *ranks, "--sms", "24", "--peers", "all", "--json", str(out / "bench_ht.json")), 70),
        Stage("bench_sms", (*bench, "--algorithm", "ll", "ht", "--layout", "expert_major", "flat", "--tokens", "128", *ranks,
                            "--sms", "8", "16", "20", "24", str(H200_SMS), "--json", str(out / "bench_sms.json")), 40),
    ]


def run(stage: Stage, out: pathlib.Path, before: float, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Run one stage unless the whole run's time, which began at `before`, is over; its output goes to a file."""
    left = WHOLE_RUN_S - (clock() - before)
    if left < 5:
        return {"stage": stage.name, "outcome": "left out", "seconds": 0.0}
    started, log = clock(), out / f"{stage.name}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(stage.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=min(stage.limit_s, left)).returncode
            outcome = "passed" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            outcome = f"over after {min(stage.limit_s, left):.0f} s"
    lines = log.read_text(errors="replace").strip().splitlines()
    return {"stage": stage.name, "outcome": outcome, "seconds": round(clock() - started, 1), "last": lines[-1] if lines else ""}


# ---- links ---------------------------------------------------------------------------------------------------------------------
def links() -> dict[str, Any]:
    """GB/s of a copy of 256 MiB between each two GPUs, and microseconds of an operation in which two GPUs do nothing but meet: a flag's way and a
    launch."""
    import torch

    count = torch.cuda.device_count()
    buffers = [torch.zeros(64 << 20, device=f"cuda:{i}") for i in range(count)]
    copies = [[0.0] * count for _ in range(count)]
    for a, b in itertools.permutations(range(count), 2):
        with torch.cuda.device(a):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            buffers[b].copy_(buffers[a])
            start.record()
            for _ in range(4):
                buffers[b].copy_(buffers[a])
            end.record()
            torch.cuda.synchronize(a)
        copies[a][b] = round(4 * buffers[a].nbytes / start.elapsed_time(end) / 1e6, 1)
    del buffers
    return {"gpus": count, "copy_gb_s": copies, "meet_us": {f"{a}-{b}": meet_us(a, b) for a, b in itertools.combinations(range(count), 2)}}


def meet_us(a: int, b: int) -> float:
    """Microseconds of an operation in which two GPUs only exchange HEADs, in a graph."""
    from ncclep_py import Group, GroupConfig, LocalWorld
    from ncclep_py.bench.timer import Timer
    from ncclep_py.signature import OpKind

    def program(comm: Any) -> float:
        config = GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=1, hidden=8, num_topk=1, max_num_sms=1, timeout_ns=10**10)
        with Group.create(comm, config) as group:
            times = Timer(comm, comm.barrier, 20, 100).chained(lambda: group.rendezvous(OpKind.COMBINE))
        return sorted(times)[len(times) // 2]

    with LocalWorld(2, "nccl", devices=[a, b]) as world:
        return round(max(world.run(program)), 2)


# ---- verdict -------------------------------------------------------------------------------------------------------------------
def half_us(row: dict[str, Any], half: str) -> float | None:
    """Microseconds of dispatch, or of the rest of the pair."""
    figures = row.get("figures", {})
    if not row.get("verified") or "dispatch" not in figures or "chained_pair" not in figures:
        return None
    dispatch = figures["dispatch"]["median_us"]
    return dispatch if half == "dispatch" else round(figures["chained_pair"]["median_us"] - dispatch, 2)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each expected row: ours beside the published figure; and each case NVIDIA's library played, too: ours beside it."""
    told = []
    for want in EXPECTED:
        found = [us for row in rows if row["implementation"] == "ncclep_py" and (row["algorithm"], row["tokens"], row["recipe"]) == (
            want.algorithm, want.tokens, want.recipe) and (us := half_us(row, want.half)) is not None]
        best = min(found, default=None)
        word = "not measured" if best is None else "stretch" if best <= want.stretch_us else "ahead" if best < want.published_us else "behind"
        told.append({**dataclasses.asdict(want), "ours_us": best, "verdict": word})
    pairs: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        figure = row.get("figures", {}).get("pair")
        if figure and row.get("verified"):
            case = tuple(row[name] for name in ("algorithm", "layout", "tokens", "recipe", "sms", "ranks"))
            pairs.setdefault(case, {})[row["implementation"]] = figure["median_us"]
    for case, by in pairs.items():
        if {"ncclep_py", "nccl.ep"} <= by.keys():
            told.append({"case": list(case), "ours_us": by["ncclep_py"], "nccl_ep_us": by["nccl.ep"],
                         "verdict": "ahead" if by["ncclep_py"] < by["nccl.ep"] else "behind"})
    return told


def main() -> int:
    """Run the stages; 0 if all passed and no row is behind."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    ap.add_argument("--only", nargs="+", metavar="STAGE")
    ap.add_argument("--plan", action="store_true", help="print the stages and leave")
    ap.add_argument("--gpus", type=int, default=0, help="default: all")
    ap.add_argument("--links", action="store_true", help=argparse.SUPPRESS)
    args = ap.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.links:
        (args.out / "links.json").write_text(json.dumps(links(), indent=1))
        return 0
    import torch

    gpus = args.gpus or torch.cuda.device_count()
    todo = [stage for stage in stages(max(gpus, 1), args.out) if not args.only or stage.name in args.only]
    if args.plan or gpus < 2:
        for stage in todo:
            print(f"{stage.limit_s:4d} s  {stage.name:<12} {' '.join(stage.command)}")
        if not args.plan:
            print(f"this needs at least 2 GPUs, there {'is 1' if gpus == 1 else f'are {gpus}'}", file=sys.stderr)
        return 0 if args.plan else 2
    before, done = time.monotonic(), []
    for stage in todo:
        done.append(run(stage, args.out, before))
        print(f"{done[-1]['seconds']:6.1f} s  {stage.name:<12} {done[-1]['outcome']:<16} {done[-1].get('last', '')[:120]}", flush=True)
    rows = [row for file in sorted(args.out.glob("bench_*.json")) for row in json.loads(file.read_text())["rows"]]
    told = verdicts(rows)
    (args.out / "summary.json").write_text(json.dumps({"gpus": gpus, "stages": done, "expected": told}, indent=1))
    for row in told:
        print(json.dumps(row))
    return int(any(stage["outcome"] != "passed" for stage in done) or any(row["verdict"] == "behind" for row in told))


if __name__ == "__main__":
    sys.exit(main())
