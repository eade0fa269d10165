"""Run random schedules of dispatch, experts, combine on the simulator and check every result bitwise.

    python scripts/simulate.py --schedules 1000 --jobs 2
    python scripts/simulate.py --schedules 1 --seed 17 --mode adversarial --trace run.json      # one schedule again, as a timeline
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import in_environment  # noqa: F401

from ncclep_py.config import GroupConfig  # noqa: E402
from ncclep_py.simulator import Simulator  # noqa: E402
from ncclep_py.simulator.program import Program  # noqa: E402
from ncclep_py.simulator.rank_major_program import RankMajorProgram  # noqa: E402


def run_one(args: argparse.Namespace, seed: int, mode: str) -> str | None:
    """One schedule; what went wrong, or None."""
    sim = Simulator(args.ranks, seed, mode, blocks=args.blocks, warps=args.warps, trace=bool(args.trace))
    config = GroupConfig(num_experts=args.experts, max_dispatch_tokens_per_rank=max(args.tokens, 1), hidden=args.hidden, num_topk=args.topk,
                         num_slots=args.slots)
    group = {"expert_major": Program, "rank_major": RankMajorProgram}[args.layout]
    program = group(sim, config, [args.tokens] * args.ranks, seed=seed)
    try:
        program.play(args.program)
        sim.run()
        program.check()
    except Exception as error:
        return f"seed {seed}, mode {mode}: {type(error).__name__}: {error}"
    finally:
        if args.trace:
            sim.write_trace(args.trace)
    return None


def run_share(work: tuple[argparse.Namespace, int]) -> tuple[int, str | None]:
    """The schedules of one process: how many were run, and the first failure."""
    args, share = work
    import torch

    torch.set_num_threads(1)
    modes = ("fair", "adversarial") if args.mode == "both" else (args.mode,)
    for done, seed in enumerate(range(args.seed + share, args.seed + args.schedules, args.jobs)):
        error = run_one(args, seed, modes[seed % len(modes)])
        if error:
            return done + 1, error
    return len(range(share, args.schedules, args.jobs)), None


def main() -> int:
    """Run all schedules, print the rate and how to replay the first failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, what in (("schedules", 1000, "schedules to run"), ("ranks", 4, "ranks"), ("tokens", 16, "tokens per rank"),
                                ("hidden", 64, "elements of a row, bf16"), ("experts", 8, "experts in all"), ("topk", 2, "experts per token"),
                                ("blocks", 2, "blocks per launch"), ("warps", 2, "warps per block"), ("slots", 2, "payload slots"),
                                ("seed", 0, "first seed"), ("jobs", 2, "processes")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--mode", choices=("fair", "adversarial", "both"), default="both")
    parser.add_argument("--layout", choices=("expert_major", "rank_major"), default="expert_major")
    parser.add_argument("--program", default="D X C", help="operations, e.g. 'D0 D1 X0 C0': dispatch, experts, combine with their slot")
    parser.add_argument("--trace", help="write the (last) schedule as Chrome trace JSON; use with --schedules 1 --jobs 1")
    args = parser.parse_args()
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        results = pool.map(run_share, [(args, share) for share in range(args.jobs)])
    seconds, count = time.perf_counter() - started, sum(done for done, _ in results)
    print(f"{count} schedules of {args.program!r} in {seconds:.1f} s: {60 * count / seconds:.0f} per minute on {args.jobs} processes")
    failures = [error for _, error in results if error]
    for error in failures:
        print(error)
    if failures:
        seed, mode = failures[0].split(":")[0].replace("seed ", "").split(", mode ")
        print(f"replay: python scripts/simulate.py {shlex.join(sys.argv[1:])} --schedules 1 --jobs 1 --seed {seed} --mode {mode}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
