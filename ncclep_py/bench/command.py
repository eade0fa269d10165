"""The command line of the benchmark.

    python -m ncclep_py bench                                       # low latency at 1, 8 and 128 tokens, high throughput at 2048
    python -m ncclep_py bench --algorithm ll --tokens 1 8 32 128 --sms 8 16 --peers all --mode processes --json now.json
    python -m ncclep_py bench --routing zipf one_rank group_limited recorded.pt
    python -m ncclep_py bench --compare before.json                 # this run against an earlier record
    python -m ncclep_py bench compare before.json after.json        # two records
    python -m ncclep_py bench report now.json -o report.html        # pictures (extra: report)
    torchrun --nproc-per-node 8 -m ncclep_py bench --json now.json  # a rank per GPU

Without a GPU it runs in the simulator at toy sizes: everything is checked and nothing is timed. With ``--mode processes`` and several ranks on one
GPU start NVIDIA's MPS first, else their kernels take turns. Exit code 1 if a result was wrong, a case failed, or, compared with an earlier record,
something became slower or a case of that record is missing; 2 for a command line that makes no sense.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ncclep_py.bench import compare as comparison
from ncclep_py.bench import record as records
from ncclep_py.bench.case import BUDGETS, DTYPES, RECIPES, Case
from ncclep_py.bench.peers import PEERS, why_not
from ncclep_py.bench.routing import ROUTINGS, check_routing
from ncclep_py.bench.table import line, table
from ncclep_py.bench.traces import write_traces
from ncclep_py.bench.worlds import Worlds
from ncclep_py.timeline import add_trace_argument, writable

__all__ = ["add_arguments", "cases", "main"]

TOY = {"ranks": 4, "experts": 8, "topk": 2, "hidden": 64, "sms": 2}
REAL = {"ranks": 8, "experts": 128, "topk": 8, "hidden": 7168, "sms": 16}
TOKENS = {"nccl": {"ll": (1, 8, 128), "ht": (2048,)}, "sim": {"ll": (1, 5), "ht": (12,)}}
LAYER_TOLERANCE = 0.01
BUDGETED = ("ncclep_py", "nccl.ep")   # others take what comes
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
    parser.add_argument("--budget", choices=BUDGETS, default="worst", help="ht: rows a rank has room for, by any routing or by this one")
    parser.add_argument("--backward", action="store_true", help="ht: both passes, too")
    parser.add_argument("--mode", choices=["auto", "local", "processes", "torchrun"], default="auto",
                        help="one process for all ranks, or one per rank (auto: torchrun where it started us, else local)")
    parser.add_argument("--backend", choices=["auto", "nccl", "sim"], default="auto")
    parser.add_argument("--gpus", type=int, default=0, help="spread the ranks over so many (default: all)")
    parser.add_argument("--peers", nargs="+", choices=["all", *PEERS], default=[], help="other implementations beside ours, where they are installed")
    parser.add_argument("--staged", action="store_true", help="ll: also in halves (send_only), with rows in plain tensors and own windows")
    parser.add_argument("--layer", action="store_true", help="also tokens per second of a MoE layer, ours and over all_to_all_single")
    parser.add_argument("--stamps", action="store_true", help="also a timeline of each case by stamps in the kernels (a run of its own)")
    add_trace_argument(parser)
    parser.add_argument("--json", metavar="FILE", type=writable, help="write the record")
    parser.add_argument("--compare", metavar="FILE", help="compare with an earlier record")
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="of report")


# ---- what to run ---------------------------------------------------------------------------------------------------------------
def cases(options: argparse.Namespace, backend: str, mode: str, gpus: int, left_out: list[str] | None = None) -> list[Case]:
    """Every combination the command line asks for that makes sense; ``ValueError`` if none does, or none with some routing or number of columns, with
    the reason of the first. `left_out` gets a line for each reason why others do not."""
    if options.alignment < 0 or options.alignment & (options.alignment - 1):
        raise ValueError(f"alignment must be 0 or a power of two, got {options.alignment}")
    base = REAL if backend == "nccl" else TOY
    made: list[Case] = []
    reasons: list[tuple[str, int, str]] = []
    check = functools.cache(check_routing)   # a recorded one is read once
    for algorithm in options.algorithm:
        layouts = [x for x in (options.layout or BOTH_LAYOUTS[algorithm]) if x in BOTH_LAYOUTS[algorithm]]
        lacking = [x for x in options.layout or () if x not in BOTH_LAYOUTS[algorithm]]
        told = {f"{algorithm}, {layout}: {algorithm} has no such layout": 0 for layout in lacking}
        values = [getattr(options, name) or [base[name]] for name in ("ranks", "experts", "topk", "hidden", "sms")]
        for layout, tokens, dtype, recipe, routing, *sizes in itertools.product(
                layouts, options.tokens or TOKENS[backend][algorithm], options.dtype, options.recipe, options.routing, *values):
            ranks, experts, topk, hidden, sms = sizes
            aligned = options.alignment if algorithm == "ht" and layout == "expert_major" else 0
            try:
                case = Case(algorithm, layout, ranks, experts, topk, hidden, tokens, sms, dtype, recipe, routing, aligned,
                            options.backward and algorithm == "ht", mode, backend, gpus, options.budget if algorithm == "ht" else "worst")
                check(routing, ranks, experts, topk)
                made.append(case)
            except ValueError as e:
                reasons.append((routing, hidden, str(e)))
                told[f"{algorithm}, {layout}: {e}"] = told.get(f"{algorithm}, {layout}: {e}", 0) + 1
        if left_out is not None:
            left_out += [f"{why} ({count} combination{'s' * (count > 1)})" if count else why for why, count in told.items()]
    for routing, hidden, reason in reasons:
        if not any(case.routing == routing for case in made) or not any(case.hidden == hidden for case in made):
            raise ValueError(reason)
    if not made:
        raise ValueError(f"no layout of {', '.join(options.algorithm)} was asked for")
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
    if options.gpus < 0:
        raise ValueError(f"gpus must be at least 1, or 0 for all, got {options.gpus}")
    if options.gpus > there and backend == "nccl":
        raise ValueError(f"gpus must be at most {there}, which this machine has, got {options.gpus}")
    return backend, mode, max(1, options.gpus or there)


# ---- run -----------------------------------------------------------------------------------------------------------------------
def row_of(worlds: Worlds, case: Case, implementation: str, copy_gb_s: float | None, stamps: bool) -> tuple[dict[str, Any], list[Any]]:
    """One row of the record: checked, timed, and what it is made of; and the kernels it used."""
    from ncclep_py.bench.budget import receive_budget
    from ncclep_py.bench.byte_counts import byte_counts
    from ncclep_py.bench.rank_jobs import PairJob, run_pair
    from ncclep_py.bench.routing import expert_load, traffic
    from ncclep_py.bench.statistics import slowest

    row: dict[str, Any] = {"implementation": implementation, **dataclasses.asdict(case)}
    kernels: list[Any] = []
    try:
        got = worlds.answers(PairJob(case, implementation), run_pair)
        load, between = expert_load(case), traffic(case)
        moved = byte_counts(case, load, between)
        figures = {name: slowest([answer["times"][name] for answer in got]) for name in got[0]["times"]}
        hosts = [t for answer in got for t in answer["host_us"]]
        memory = [answer["peak_memory_bytes"] for answer in got]
        row |= {"verified": all(answer["verified"] for answer in got), "exact": got[0]["exact"],
                "figures": {name: figure.as_json() for name, figure in figures.items()}, "host_us": round(max(hosts), 1) if hosts else None,
                "compile_s": None, "peak_memory_bytes": max(memory) if None not in memory else None, "bytes": moved.as_json(),
                "share_of_copy": _share(sum(moved.physical), figures, copy_gb_s), "expert_load": load, "traffic": between,
                "budget_rows": receive_budget(case) if case.algorithm == "ht" and implementation in BUDGETED else None,
                "ready_s": round(max(answer["ready_s"] for answer in got), 3), "checked_by": _checked_by(case, implementation),
                "clocks_mhz": next((answer["clocks_mhz"] for answer in got if answer["clocks_mhz"]), None)}
        kernels = got[0]["kernels"]
        notes = [answer["note"] for answer in got if "note" in answer]
        row |= {"note": notes[0]} if notes else {}
        if stamps and implementation == "ncclep_py":
            row["stamps"] = [event for answer in worlds.answers(PairJob(case, implementation, True), run_pair) for event in answer["stamps"]]
    except Exception:   # noqa: BLE001  (a failed case is a row of the record)
        row["error"] = traceback.format_exc()[-1500:]
    return row, kernels


def _checked_by(case: Case, implementation: str) -> str:
    """What results were compared with."""
    from ncclep_py.bench.oracle import is_small

    return "closed form" + (" and oracle" if implementation.startswith("ncclep_py") and is_small(case) else "")


def _share(moved: int, figures: dict[str, Any], copy_gb_s: float | None) -> float | None:
    """Part of the copy bandwidth a pair reaches."""
    figure = figures.get("chained_pair")
    return round(moved / (figure.median * copy_gb_s * 1e3), 3) if figure is not None and copy_gb_s else None


def layer_rows(worlds: Worlds, case: Case) -> Iterator[dict[str, Any]]:
    """Tokens per second of the MoE layer, each way and direction; in one process only ours. Both ways must give about the same."""
    from ncclep_py.bench.rank_jobs import LayerJob, run_layer

    ht = dataclasses.replace(case, algorithm="ht", layout="expert_major", recipe="none", backward=False, alignment=0)
    first: float | None = None
    for implementation in ("ncclep_py", *(["all_to_all_single"] if case.mode != "local" else [])):
        for backward in (False, True):
            row: dict[str, Any] = {"implementation": implementation, "direction": "forward+backward" if backward else "forward",
                                   **dataclasses.asdict(ht), "width": max(16, case.hidden // 4)}
            try:
                got = worlds.answers(LayerJob(ht, implementation, row["width"], backward), run_layer)
                steps = sorted(max(step) for step in zip(*(answer["seconds"] for answer in got), strict=True))
                seconds, square = steps[len(steps) // 2], sum(answer["square"] for answer in got) / ht.ranks
                first = square if first is None else first
                row |= {"tokens_per_s": round(ht.ranks * ht.tokens / seconds) if case.backend == "nccl" else None, "mean_square": round(square, 5)}
                if not abs(square - first) <= LAYER_TOLERANCE * first:   # also if it is no number
                    row["error"] = f"the layer's output has mean square {square:.5f}, the first way's {first:.5f}"
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

    from ncclep_py.bench.compile_times import compile_seconds
    from ncclep_py.bench.machine import floors, machine
    from ncclep_py.launch import _present_arch

    backend, mode, gpus = _where(options)
    if mode == "torchrun":
        options.ranks = [int(os.environ["WORLD_SIZE"])]
    left_out: list[str] = []
    todo = cases(options, backend, mode, gpus, left_out)
    first = mode != "torchrun" or os.environ["RANK"] == "0"
    tell = _tell if first else lambda text: None
    worlds, compiled = Worlds(), set()
    if backend == "sim":
        tell("simulated: results are checked, nothing is timed")
    for why in left_out:
        tell(f"left out: {why}")
    jobs = _jobs(options, todo, tell)
    try:
        record = records.new_record(machine(backend), worlds.alone(floors, mode) if backend == "nccl" else {})
        record["left_out"] = left_out
        torch.cuda.empty_cache()   # ranks in other processes need the memory
        for done, (case, implementation) in enumerate(jobs):
            if first:
                _progress(done, len(jobs), f"{implementation} {case.name()}")
            row, kernels = row_of(worlds, case, implementation, record["floors"].get("copy_gb_s"), options.stamps or bool(options.trace))
            record["rows"].append(row)
            kind = case.algorithm, case.layout, case.dtype, case.recipe
            if first and backend == "nccl" and kernels and kind not in compiled:   # of each kind once: it takes seconds
                compiled.add(kind)
                row["compile_s"] = compile_seconds(kernels, _present_arch() or "sm_90")
            if first:
                _progress(len(jobs), len(jobs), "")
                _save(record, options)
            tell(line(row))
        for row in layer_rows(worlds, todo[-1]) if options.layer else ():
            record["layers"].append(row)
            speed = row.get("error", "").strip().splitlines()[-1:] or ["right" if row["tokens_per_s"] is None else f"{row['tokens_per_s']} tokens/s"]
            tell(f"{row['implementation']:<18} MoE layer, {row['direction']}: {speed[0]}")
    finally:
        worlds.close()
    for told in table(record["rows"]):
        tell(told)
    return record if first else {**record, "rows": []}


def _jobs(options: argparse.Namespace, todo: list[Case], tell: Callable[[str], None]) -> list[tuple[Case, str]]:
    """Every case and who plays it; one implementation after the other where processes are started for each."""
    from ncclep_py.bench.staged_subject import StagedSubject

    jobs: list[tuple[Case, str]] = []
    for case in todo:
        jobs.append((case, "ncclep_py"))
        if options.staged and not StagedSubject.why_not(case):
            jobs.append((case, "ncclep_py staged"))
        for peer in list(PEERS) if "all" in options.peers else options.peers:
            reason = why_not(peer, case)
            if reason:
                tell(f"{peer:<18} {case.name()}: left out, {reason}")
            else:
                jobs.append((case, peer))
    order = ["ncclep_py", "ncclep_py staged", *PEERS]
    return sorted(jobs, key=lambda job: order.index(job[1])) if todo[0].mode == "processes" else jobs


def _save(record: dict[str, Any], options: argparse.Namespace) -> None:
    """Write what there is: a run may be cut short."""
    if options.json and record["rows"]:
        records.write(record, options.json)


def _bad(record: dict[str, Any]) -> bool:
    return any("error" in row or not row["verified"] for row in record["rows"]) or any("error" in row for row in record["layers"])


def _compared(before: str, after: dict[str, Any]) -> bool:
    """Print the comparison; whether anything is to be looked into."""
    old = records.read(before)
    verdicts = comparison.compare(old, after)
    _tell("\n".join([*comparison.other_machine(old, after), *(comparison.lines(verdicts) or ["no case in either record"])]))
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
            writable(options.output)   # before everything is drawn
            return importlib.import_module("ncclep_py.bench.report").main([Path(f) for f in files], Path(options.output))
        if action != "run" or files:
            raise ValueError(f"action must be run, compare or report, got {' '.join(options.words)}")
        if options.compare:
            records.read(options.compare)   # before an hour is spent
        record = run(options)
    except (ValueError, argparse.ArgumentTypeError) as e:
        sys.stderr.write(f"bench: {e}\n")
        return 2
    _save(record, options)
    if options.trace and record["rows"]:
        for file, row in write_traces(record, options.trace):
            _tell(f"timeline in {file}: {row['algorithm']}, {row['layout']}, {row['tokens']} tokens")
    bad = _bad(record)
    if options.compare and record["rows"]:
        bad |= _compared(options.compare, record)
    return int(bad)
