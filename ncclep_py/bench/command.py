"""The command line of the benchmark.

    python -m ncclep_py bench                                       # low latency at 1, 8 and 128 tokens, high throughput at 2048
    python -m ncclep_py bench --algorithm ll --tokens 1 8 32 128 --sms 8 16 --peers all --mode processes --json now.json
    python -m ncclep_py bench --routing zipf one_rank group_limited recorded.pt
    python -m ncclep_py bench --compare before.json                 # this run against an earlier record
    python -m ncclep_py bench compare before.json after.json        # two records
    python -m ncclep_py bench report now.json -o report.html        # pictures (extra: report)
    torchrun --nproc-per-node 8 -m ncclep_py bench --json now.json  # a rank per GPU

Without a GPU it runs in the simulator at toy sizes: everything is checked and nothing is timed. With ``--mode processes`` and several ranks on one
GPU start NVIDIA's MPS first, else their kernels take turns. Exit code 1 if a result was wrong, a case failed, or something became slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ncclep_py.bench import compare as comparison
from ncclep_py.bench import record as records
from ncclep_py.bench.case import DTYPES, RECIPES, Case
from ncclep_py.bench.peers import PEERS, why_not
from ncclep_py.bench.routing import ROUTINGS
from ncclep_py.bench.table import line, table
from ncclep_py.bench.traces import write_traces
from ncclep_py.timeline import add_trace_argument

__all__ = ["add_arguments", "cases", "main"]

TOY = {"ranks": 4, "experts": 8, "topk": 2, "hidden": 64, "sms": 2}
REAL = {"ranks": 8, "experts": 128, "topk": 8, "hidden": 7168, "sms": 16}
TOKENS = {"nccl": {"ll": (1, 8, 128), "ht": (2048,)}, "sim": {"ll": (1, 5), "ht": (12,)}}
BOTH_LAYOUTS = {"ll": ("expert_major", "rank_major"), "ht": ("flat", "expert_major")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options; a sweep is every combination of those that take several values."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("words", nargs="*", metavar="action", help="run (default), compare BEFORE AFTER, report RECORD...")
    parser.add_argument("--algorithm", nargs="+", choices=["ll", "ht"], default=["ll", "ht"])
    parser.add_argument("--layout", nargs="+", choices=["expert_major", "rank_major", "flat"], help="default: both of an algorithm")
    for name, text in (("tokens", "per rank"), ("ranks", ""), ("experts", ""), ("topk", ""), ("hidden", "columns of a row"), ("sms", "per rank")):
        parser.add_argument(f"--{name}", nargs="+", type=int, help=text)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["bf16"])
    parser.add_argument("--recipe", nargs="+", choices=list(RECIPES["ll"]), default=["none"], help="of dispatch")
    parser.add_argument("--routing", nargs="+", default=["uniform"], help=f"{', '.join(ROUTINGS)}, or a file of ncclep_py.bench.routing.record")
    parser.add_argument("--alignment", type=int, default=0, help="ht expert_major: rows a zone is padded to")
    parser.add_argument("--backward", action="store_true", help="ht: both passes, too")
    parser.add_argument("--mode", choices=["auto", "local", "processes", "torchrun"], default="auto",
                        help="one process for all ranks, or one per rank (auto: torchrun where it started us, else local)")
    parser.add_argument("--backend", choices=["auto", "nccl", "sim"], default="auto")
    parser.add_argument("--gpus", type=int, default=0, help="spread the ranks over so many (default: all)")
    parser.add_argument("--peers", nargs="+", choices=["all", *PEERS], default=[], help="other implementations beside ours, where they are installed")
    parser.add_argument("--layer", action="store_true", help="also tokens per second of a MoE layer, ours and over all_to_all_single")
    parser.add_argument("--stamps", action="store_true", help="also a timeline of each case by stamps in the kernels (a run of its own)")
    add_trace_argument(parser)
    parser.add_argument("--json", metavar="FILE", help="write the record")
    parser.add_argument("--compare", metavar="FILE", help="compare with an earlier record")
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="of report")


# ---- what to run ---------------------------------------------------------------------------------------------------------------
def cases(options: argparse.Namespace, backend: str, mode: str, gpus: int) -> list[Case]:
    """Every combination the command line asks for that makes sense; ``ValueError`` if none does, with the reason of the first."""
    base = REAL if backend == "nccl" else TOY
    made, reasons = [], []
    for algorithm in options.algorithm:
        layouts = [x for x in (options.layout or BOTH_LAYOUTS[algorithm]) if x in BOTH_LAYOUTS[algorithm]]
        values = [getattr(options, name) or [base[name]] for name in ("ranks", "experts", "topk", "hidden", "sms")]
        for layout, tokens, dtype, recipe, routing, *sizes in itertools.product(
                layouts, options.tokens or TOKENS[backend][algorithm], options.dtype, options.recipe, options.routing, *values):
            ranks, experts, topk, hidden, sms = sizes
            aligned = options.alignment if algorithm == "ht" and layout == "expert_major" else 0
            try:
                made.append(Case(algorithm, layout, ranks, experts, topk, hidden, tokens, sms, dtype, recipe, routing, aligned,
                                 options.backward and algorithm == "ht", mode, backend, gpus))
            except ValueError as e:
                reasons.append(str(e))
    if not made:
        raise ValueError(reasons[0] if reasons else f"no layout of {', '.join(options.algorithm)} was asked for")
    return made


def _where(options: argparse.Namespace) -> tuple[str, str, int]:
    """Backend, mode and GPUs."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = ("nccl" if there else "sim") if options.backend == "auto" else options.backend
    if backend == "nccl" and not there:
        raise ValueError("backend nccl needs a CUDA GPU and there is none; use --backend sim, which checks and does not time")
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    mode = ("torchrun" if under_torchrun else "local") if options.mode == "auto" else options.mode
    if mode == "torchrun" and "WORLD_SIZE" not in os.environ:
        raise ValueError("mode torchrun needs the environment torchrun sets; start with torchrun -m ncclep_py bench")
    if backend == "sim" and mode != "local":
        raise ValueError(f"the simulator has all ranks in one process, got mode {mode}")
    if options.gpus > there and backend == "nccl":
        raise ValueError(f"gpus must be at most {there}, which this machine has, got {options.gpus}")
    return backend, mode, max(1, options.gpus or there)


# ---- run -----------------------------------------------------------------------------------------------------------------------
def answers(job: Any, run: Any) -> list[dict[str, Any]]:
    """All ranks' answers to a job of `bench.rank_jobs`, in the mode of its case."""
    case = job.case
    if case.mode == "processes":
        from ncclep_py.bench.processes import run_processes

        return run_processes(job, run, case.ranks, case.gpus)
    if case.mode == "torchrun":
        return _under_torchrun(job, run)
    from ncclep_py.local_world import LocalWorld

    devices = [r % case.gpus for r in range(case.ranks)] if case.backend == "nccl" else None
    with LocalWorld(case.ranks, case.backend, devices=devices, blocks=case.sms, threads=type(job).__name__ == "LayerJob") as world:
        return world.run(run, job)


@functools.cache
def _communicator() -> Any:
    from ncclep_py.communicator import Communicator

    return Communicator.from_environment()


def _under_torchrun(job: Any, run: Any) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    comm = _communicator()
    if job.case.ranks != comm.num_ranks:
        raise ValueError(f"ranks must be torchrun's {comm.num_ranks}, got {job.case.ranks}")
    with torch.cuda.stream(torch.cuda.Stream()):
        mine = run(comm, job)
    everybody: list[Any] = [None] * comm.num_ranks
    dist.all_gather_object(everybody, mine)
    return everybody


def row_of(case: Case, implementation: str, copy_gb_s: float | None, stamps: bool) -> dict[str, Any]:
    """One row of the record: checked, timed, and what it is made of."""
    from ncclep_py.bench.byte_counts import byte_counts
    from ncclep_py.bench.rank_jobs import PairJob, run_pair
    from ncclep_py.bench.routing import expert_load, traffic
    from ncclep_py.bench.statistics import slowest

    row: dict[str, Any] = {"implementation": implementation, **dataclasses.asdict(case)}
    try:
        got = answers(PairJob(case, implementation), run_pair)
        load, between = expert_load(case), traffic(case)
        moved = byte_counts(case, load, between)
        figures = {name: slowest([answer["times"][name] for answer in got]) for name in got[0]["times"]}
        hosts = [t for answer in got for t in answer["host_us"]]
        memory = [answer["peak_memory_bytes"] for answer in got]
        row |= {"verified": all(answer["verified"] for answer in got), "exact": got[0]["exact"],
                "figures": {name: figure.as_json() for name, figure in figures.items()}, "host_us": round(max(hosts), 1) if hosts else None,
                "compile_s": None, "peak_memory_bytes": max(memory) if None not in memory else None, "bytes": moved.as_json(),
                "share_of_copy": _share(sum(moved.physical), figures, copy_gb_s), "expert_load": load, "traffic": between,
                "ready_s": round(max(answer["ready_s"] for answer in got), 3), "checked_by": _checked_by(case, implementation)}
        if stamps and implementation == "ncclep_py":
            row["stamps"] = [event for answer in answers(PairJob(case, implementation, True), run_pair) for event in answer["stamps"]]
    except Exception:   # noqa: BLE001  (a failed case is a row of the record)
        row["error"] = traceback.format_exc()[-1500:]
    return row


def _checked_by(case: Case, implementation: str) -> str:
    """What results were compared with."""
    from ncclep_py.bench.oracle import is_small

    return "closed form" + (" and oracle" if implementation == "ncclep_py" and is_small(case) else "")


def _share(moved: int, figures: dict[str, Any], copy_gb_s: float | None) -> float | None:
    """Part of the copy bandwidth a pair reaches."""
    figure = figures.get("chained_pair")
    return round(moved / (figure.median * copy_gb_s * 1e3), 3) if figure is not None and copy_gb_s else None


def compile_seconds(case: Case) -> dict[str, float] | None:
    """Seconds to compile a case's kernels into an empty cache, and to find them again; None where no compiler is installed."""
    import tempfile
    import time

    from ncclep_py import GroupConfig, Layout
    from ncclep_py.kernels.shape import KernelShape

    if case.algorithm != "ll":
        return None
    try:
        from ncclep_py.compiled import KernelSpec, compile_kernel
        from ncclep_py.launch import _present_arch

        config = GroupConfig(num_experts=case.experts, max_dispatch_tokens_per_rank=case.tokens, hidden=case.hidden, num_topk=case.topk)
        layout = Layout[case.layout.upper()]
        shape = KernelShape.build(config, case.ranks, case.topk, 8, layout)
        kernels = ["ll_rank_major_dispatch" if case.layout == "rank_major" else "ll_dispatch", "ll_combine"]
        before, told = os.environ.get("NCCLEP_CACHE_DIR"), {}
        with tempfile.TemporaryDirectory() as folder:
            os.environ["NCCLEP_CACHE_DIR"] = folder
            try:
                for name in ("cold", "warm"):
                    started = time.perf_counter()
                    for kernel in kernels:
                        compile_kernel(KernelSpec(kernel, shape), _present_arch() or "sm_90")
                    told[name] = round(time.perf_counter() - started, 3)
            finally:
                os.environ.pop("NCCLEP_CACHE_DIR") if before is None else os.environ.__setitem__("NCCLEP_CACHE_DIR", before)
        return told
    except ImportError:
        return None


def layer_rows(case: Case) -> Iterator[dict[str, Any]]:
    """Tokens per second of the MoE layer, each way and direction; in one process only ours."""
    from ncclep_py.bench.rank_jobs import LayerJob, run_layer

    ht = dataclasses.replace(case, algorithm="ht", layout="expert_major", recipe="none", backward=False, alignment=0)
    for implementation in ("ncclep_py", *(["all_to_all_single"] if case.mode != "local" else [])):
        for backward in (False, True):
            row: dict[str, Any] = {"implementation": implementation, "direction": "forward+backward" if backward else "forward",
                                   **dataclasses.asdict(ht), "width": max(16, case.hidden // 4)}
            try:
                got = answers(LayerJob(ht, implementation, row["width"], backward), run_layer)
                steps = sorted(max(step) for step in zip(*(answer["seconds"] for answer in got), strict=True))
                seconds = steps[len(steps) // 2]
                row |= {"tokens_per_s": round(ht.ranks * ht.tokens / seconds) if case.backend == "nccl" else None,
                        "checksum": round(sum(answer["sum"] for answer in got), 3)}
            except Exception:   # noqa: BLE001  (told in the record)
                row["error"] = traceback.format_exc()[-1500:]
            yield row


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _progress(done: int, all_of_them: int, what: str) -> None:
    """A bar on a terminal."""
    if sys.stderr.isatty():
        filled = 24 * done // all_of_them
        sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (24 - filled)}] {done}/{all_of_them} {what[:70]}")
        sys.stderr.write("\r\x1b[K" if done == all_of_them else "")
        sys.stderr.flush()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything the options ask for; the record."""
    import torch

    from ncclep_py.bench.machine import floors, machine

    backend, mode, gpus = _where(options)
    if mode == "torchrun":
        options.ranks = [int(os.environ["WORLD_SIZE"])]
    todo = cases(options, backend, mode, gpus)
    first = mode != "torchrun" or os.environ["RANK"] == "0"
    tell = _tell if first else lambda text: None
    record = records.new_record(machine(backend), floors() if backend == "nccl" else {})
    torch.cuda.empty_cache()   # ranks in other processes need the memory
    if backend == "sim":
        tell("simulated: results are checked, nothing is timed")
    peers = list(PEERS) if "all" in options.peers else options.peers
    jobs: list[tuple[Case, str]] = []
    for case in todo:
        jobs.append((case, "ncclep_py"))
        for peer in peers:
            reason = why_not(peer, case)
            if reason:
                tell(f"{peer:<18} {case.name()}: left out, {reason}")
            else:
                jobs.append((case, peer))
    for done, (case, implementation) in enumerate(jobs):
        if first:
            _progress(done, len(jobs), f"{implementation} {case.name()}")
        row = row_of(case, implementation, record["floors"].get("copy_gb_s"), options.stamps or bool(options.trace))
        record["rows"].append(row)
        if first:
            _progress(len(jobs), len(jobs), "")
        tell(line(row))
    if first and record["rows"]:
        record["rows"][0]["compile_s"] = compile_seconds(todo[0])
    if options.layer:
        for row in layer_rows(todo[-1]):
            record["layers"].append(row)
            speed = row.get("error", "").strip().splitlines()[-1:] or [f"{row['tokens_per_s'] or 'not timed:'} tokens/s"]
            tell(f"{row['implementation']:<18} MoE layer, {row['direction']}: {speed[0]}")
    for told in table(record["rows"]):
        tell(told)
    return record if first else {**record, "rows": []}


def _bad(record: dict[str, Any]) -> bool:
    return any("error" in row or not row["verified"] for row in record["rows"]) or any("error" in row for row in record["layers"])


def _compared(before: str, after: dict[str, Any]) -> bool:
    """Print the comparison; whether anything is to be looked into."""
    verdicts = comparison.compare(records.read(before), after)
    _tell("\n".join(comparison.lines(verdicts) or ["no case in either record"]))
    return not verdicts or any(v.bad for v in verdicts)


def main(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    action, *files = options.words or ["run"]
    try:
        if action == "compare":
            if len(files) != 2:
                raise ValueError(f"compare needs two records, BEFORE and AFTER, got {len(files)}")
            return int(_compared(files[0], records.read(files[1])))
        if action == "report":
            return importlib.import_module("ncclep_py.bench.report").main([Path(f) for f in files], Path(options.output))
        if action != "run" or files:
            raise ValueError(f"action must be run, compare or report, got {' '.join(options.words)}")
        if options.compare:
            records.read(options.compare)   # before an hour is spent
        record = run(options)
    except ValueError as e:
        sys.stderr.write(f"bench: {e}\n")
        return 2
    if options.json and record["rows"]:
        records.write(record, options.json)
    if options.trace and record["rows"]:
        for file, row in write_traces(record, options.trace):
            _tell(f"timeline in {file}: {row['algorithm']}, {row['layout']}, {row['tokens']} tokens")
    bad = _bad(record)
    if options.compare and record["rows"]:
        bad |= _compared(options.compare, record)
    return int(bad)
