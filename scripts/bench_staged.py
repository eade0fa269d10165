"""Staged halves, and where rows live, measured on one GPU that several ranks share (`LocalWorld`, a CUDA graph per rank).

For both layouts, microseconds per dispatch + combine pair of the slowest rank (slope between graphs of `SHORT` and `LONG` pairs, so that what
a replay costs once drops out): fused; in halves; with plain tensors; with windows of the caller's own. And what the halves are for: rank 1 comes
`LATE_MS` late to combine; for how long does that keep the streams of the others, fused and in halves?

    python scripts/bench_staged.py --ranks 8 --sms 16 --tokens 128
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from ncclep_py import CombineConfig, CombineOutputs, DispatchConfig, DispatchInputs, DispatchOutputs, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens

SHORT, LONG, REPLAYS, LATE_MS, CYCLES_PER_MS = 20, 60, 10, 5, 1_800_000
SEND, PUSH = DispatchConfig(send_only=True), CombineConfig(send_only=True)


class Rank:
    """One rank's inputs and calls."""

    def __init__(self, comm: Any, options: argparse.Namespace, layout: Layout) -> None:
        self.comm, self.rank_major, tokens = comm, layout is Layout.RANK_MAJOR, options.tokens
        self.group = Group.create(comm, GroupConfig(
            num_experts=options.experts, max_dispatch_tokens_per_rank=tokens, hidden=options.hidden, num_topk=options.topk, max_num_sms=options.sms,
            num_staging_slots=2, timeout_ns=10**10, slot_layout=layout if self.rank_major else Layout.UNSET))
        ids = random_routing(comm.rank, tokens, options.topk, options.experts)
        x = stamped_tokens(comm.rank, tokens, options.hidden, torch.bfloat16).cuda()
        self.weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(comm.rank)).cuda()
        self.given = DispatchInputs(x, self.weights if self.rank_major else None)
        self.handle, self.out = self.group.create_handle(layout, ids.cuda()), torch.empty_like(x)
        rows = self.dispatch().tokens
        self.combine(rows)
        self.places = {"plain tensors": torch.zeros_like(rows),
                       "the caller's window": self.group.create_window(rows.nbytes).memory[: rows.nbytes].view(rows.dtype).view(rows.shape)}

    def dispatch(self, rows: torch.Tensor | None = None, how: DispatchConfig | None = None) -> DispatchOutputs:
        return self.handle.dispatch(self.given, None if rows is None else DispatchOutputs(rows), config=how)

    def combine(self, rows: torch.Tensor, how: CombineConfig | None = None) -> torch.Tensor:
        return self.handle.combine(rows, CombineOutputs(self.out, None if self.rank_major else self.weights), how)

    def fused(self, place: str = "") -> None:
        self.combine(self.dispatch(self.places.get(place)).tokens)

    def halves(self) -> None:
        rows = self.dispatch(None, SEND).tokens
        self.handle.complete()
        self.combine(rows, PUSH)
        self.handle.complete()

    def timed(self, action: Callable[[], None], repeats: int) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
            for _ in range(repeats):
                action()
        times = []
        for _ in range(REPLAYS + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

            def once(start: torch.cuda.Event = start, end: torch.cuda.Event = end) -> None:
                start.record()
                graph.replay()
                end.record()

            self.comm.together(once)
            torch.cuda.current_stream().synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times[2:])

    def slope(self, action: Callable[[], None]) -> float:
        return (self.timed(action, LONG) - self.timed(action, SHORT)) / (LONG - SHORT)

    def held_ms(self, staged: bool) -> float:
        """How long combine keeps my stream before the next kernel may run, while rank 1 is late."""
        rows = self.dispatch().tokens
        self.group.check()
        self.comm.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.comm.rank == 1:
            torch.cuda._sleep(LATE_MS * CYCLES_PER_MS)
        start.record()
        self.combine(rows, PUSH if staged else None)
        end.record()
        self.handle.complete()
        self.group.check()
        return start.elapsed_time(end)


def program(comm: Any, options: argparse.Namespace, layout: Layout) -> dict[str, float]:
    rank = Rank(comm, options, layout)
    want = rank.out.clone()
    found = {"fused": rank.slope(rank.fused), "in halves": rank.slope(rank.halves)}
    for place in rank.places:
        found[place] = rank.slope(lambda place=place: rank.fused(place))   # type: ignore[misc]
    held = {f"held by combine {name}, rank 1 late, ms": rank.held_ms(staged) for name, staged in (("fused", False), ("in halves", True))}
    for action in (rank.fused, rank.halves, *(lambda place=p: rank.fused(place) for p in rank.places)):
        rank.out.zero_()
        action()
        if not bits_equal(rank.out, want):
            raise SystemExit(f"rank {comm.rank}: wrong bits")
    rank.group.check()
    rank.group.close()
    return found | held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 8), ("sms", 16), ("tokens", 128), ("experts", 128), ("hidden", 7168), ("topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    for layout in (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR):
        with LocalWorld(options.ranks, "nccl", devices=[0] * options.ranks) as world:
            results = world.run(program, options, layout)
        slowest = {name: round(max(r[name] for i, r in enumerate(results) if i != 1 or "held" not in name), 2) for name in results[0]}
        print(json.dumps({"layout": layout.name, **vars(options), **slowest}), flush=True)


if __name__ == "__main__":
    main()
