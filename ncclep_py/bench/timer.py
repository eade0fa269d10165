"""How everything is timed: graphs replayed by all ranks together, on the device's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ncclep_py.communicator import Communicator

__all__ = ["Timer"]

REPLAYS, WARM_UP = 12, 2
Action = Callable[[], Any]


class Timer:
    """Times actions of one rank, microseconds per action, one figure per replay; every rank calls the same.

    Args:
        comm: the rank's communicator.
        meet: a host barrier with little skew.
        short, long: actions in the two lengths of graph.
    """

    def __init__(self, comm: Communicator, meet: Action, short: int, long: int) -> None:
        self.comm, self.meet, self.short, self.long = comm, meet, short, long

    def graph(self, action: Action, repeats: int) -> torch.cuda.CUDAGraph:
        """A graph of an action's launches on the current stream."""
        import torch

        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
            for _ in range(repeats):
                action()
        return captured

    def launched(self, launch: Action) -> list[float]:
        """Microseconds of each launch after the warm-up, all ranks started together."""
        import torch

        times = []
        for _ in range(REPLAYS):
            torch.cuda.current_stream().synchronize()
            self.meet()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

            def once(start: torch.cuda.Event = start, end: torch.cuda.Event = end) -> None:
                start.record()
                launch()
                end.record()

            self.comm.together(once)
            torch.cuda.current_stream().synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return times[WARM_UP:]

    def replayed(self, action: Action) -> list[float]:
        """In a graph of `short`: a share of what a replay costs once, and of the skew with which hosts start the ranks, is in it."""
        graph = self.graph(action, self.short)
        return [t / self.short for t in self.launched(graph.replay)]

    def chained(self, action: Action) -> list[float]:
        """The slope between graphs of `short` and of `long`, in which what a replay costs once drops out."""
        short = statistics.median(self.launched(self.graph(action, self.short).replay))
        return [(t - short) / (self.long - self.short) for t in self.launched(self.graph(action, self.long).replay)]

    def eager(self, action: Action) -> list[float]:
        """Without a graph, `short` of them one after the other; ranks of one process launch in turns, so only one process per rank is timed so."""
        return [t / self.short for t in self.launched(lambda: [action() for _ in range(self.short)])]

    def host(self, action: Action, check: Action) -> list[float]:
        """Host time per action, eager, without waiting for the device."""
        spent = []
        for _ in range(3):
            self.comm.synchronize()
            self.meet()
            started = time.perf_counter()
            for _ in range(self.short):
                action()
            spent.append((time.perf_counter() - started) / self.short * 1e6)
            check()
        return spent[1:]
