"""Where the host's time of an eager call goes, with one rank: bursts of pairs as they are, parts of a call alone, and a profile of the functions.

    python3 scripts/profile_host.py --tokens 8

On a GPU the launch is in it. Without one, kernels are left out: what remains is the Python of a call.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import CombineOutputs, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.communicator import NcclCommunicator
from ncclep_py.testing import random_routing

BURSTS = 15


def bursts(action: Callable[[], object], count: int, wait: Callable[[], None]) -> float:
    """Median over bursts of host microseconds per action, the device idle before each."""
    times = []
    for _ in range(BURSTS):
        wait()
        started = time.perf_counter()
        for _ in range(count):
            action()
        times.append((time.perf_counter() - started) / count * 1e6)
    wait()
    return statistics.median(times[3:])


def profile(comm: Any, options: argparse.Namespace) -> dict[str, float]:
    """The rank program: prints the table; microseconds by what was timed."""
    config = GroupConfig(num_experts=options.experts, max_dispatch_tokens_per_rank=128, hidden=options.hidden, num_topk=8, max_num_sms=16)
    ids = random_routing(0, options.tokens, 8, options.experts, seed=1).to(comm.device)
    tokens = torch.randn(options.tokens, options.hidden, device=comm.device).to(torch.bfloat16)
    weights = torch.full((options.tokens, 8), 1 / 8, device=comm.device)
    with Group.create(comm, config) as group:
        handle = group.create_handle(Layout.EXPERT_MAJOR, ids)
        held = CombineOutputs(torch.empty_like(tokens), weights)
        if comm.backend == "sim":
            comm.submit = lambda *given, **named: False

        def pair() -> None:
            handle.combine(handle.dispatch(tokens).tokens, held)

        others = itertools.cycle([(t.clone(), i.clone(), w.clone()) for t, i, w in [(tokens, ids, weights)] * 2])

        def fresh_pair() -> None:
            tokens, ids, weights = next(others)   # not the tensors of the call before: every check is made
            handle.combine(handle.dispatch(tokens, topk_idx=ids).tokens, topk_weights=weights)

        submit = comm.submit

        def without_launch() -> None:
            comm.submit = lambda *given, **named: False
            pair()
            comm.submit = submit

        kept: list[Any] = []
        comm.submit = lambda *given, **named: kept.append(given) or submit(*given, **named)
        pair()
        comm.submit = submit
        dispatch, combine = kept
        parts: dict[str, tuple[Callable[[], object], int]] = {
            "a call, pairs of 20 (as the benchmark)": (pair, 20), "a call, pairs of 200": (pair, 200),
            "a call over other tensors, its result allocated, pairs of 200": (fresh_pair, 200),
            "a call without its launch, pairs of 200": (without_launch, 200),
            "launch of a dispatch": (lambda: submit(*dispatch), 200), "launch of a combine": (lambda: submit(*combine), 200),
            "torch.empty": (lambda: torch.empty((16,), dtype=torch.int32, device=comm.device), 200),
            "whether a graph is captured": (comm.capturing, 200)}
        spent = {name: bursts(action, count, comm.synchronize) / (2 if "a call" in name else 1) for name, (action, count) in parts.items()}
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(200):
            pair()
        profiler.disable()
        group.check()
    print("host, us, medians of bursts:")
    for name, value in spent.items():
        print(f"  {value:7.2f}  {name}")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(options.rows)
    return spent


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """The command line above; the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 8), ("experts", 128), ("hidden", 7168), ("rows", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    if torch.cuda.is_available():
        with NcclCommunicator(1, 0, NcclCommunicator.unique_id()) as comm:
            return profile(comm, options)
    with LocalWorld(1, "sim") as world:
        return world.run(profile, options)[0]


if __name__ == "__main__":
    main()
