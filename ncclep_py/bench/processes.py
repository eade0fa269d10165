"""One process per rank on this machine, and a barrier that lets all of them go within microseconds."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import time
import traceback
from collections.abc import Callable
from threading import BrokenBarrierError
from typing import Any

__all__ = ["SpinBarrier", "run_processes"]

WAIT_S = 120
Measure = Callable[[Any, Any, Callable[[], None]], dict[str, Any]]


class SpinBarrier:
    """A barrier between processes that spins, so that all leave it within microseconds; a sleeping one lets them start some hundred apart."""

    def __init__(self, parties: int) -> None:
        self.rounds = mp.get_context("spawn").RawArray("q", parties + 1)   # one count per process, then whether somebody gave up
        self.rank = 0

    def wait(self, timeout: float) -> None:
        """Meet the others; BrokenBarrierError if one gave up or does not come in `timeout` seconds."""
        self.rounds[self.rank] += 1
        mine, until = self.rounds[self.rank], time.perf_counter() + timeout
        while min(self.rounds[:-1]) < mine:
            over = self.rounds[-1] or time.perf_counter() > until
            if over and min(self.rounds[:-1]) < mine:   # again: the last may have come and given up since
                raise BrokenBarrierError

    def abort(self) -> None:
        """Let everybody's wait fail."""
        self.rounds[-1] = 1


def _run(rank: int, ranks: int, gpus: int, case: Any, measure: Measure, ids: Any, barrier: Any, results: Any) -> None:
    import torch

    from ncclep_py.communicator import Communicator

    barrier.rank = rank
    try:
        os.environ["LOCAL_RANK"] = "0"
        if rank == 0:
            unique = Communicator.unique_id()
            for _ in range(ranks - 1):
                ids.put(unique)
        else:
            unique = ids.get(timeout=WAIT_S)
        comm = Communicator.init(ranks, rank, unique, device=rank % gpus)
        with torch.cuda.stream(torch.cuda.Stream()):
            results.put((rank, measure(comm, case, lambda: barrier.wait(WAIT_S))))
    except BaseException:   # noqa: BLE001  (told to whoever started us)
        barrier.abort()
        results.put((rank, {"error": traceback.format_exc()[-1500:]}))


def run_processes(case: Any, measure: Measure, ranks: int, gpus: int = 1) -> list[dict[str, Any]]:
    """``measure(comm, case, meet)`` in one process per rank, and all answers by rank; ``RuntimeError`` if one fails or does not answer.

    Args:
        case: handed through; picklable.
        measure: a function of a module, which children import.
        ranks: number of processes.
        gpus: devices to spread them over.
    """
    context = mp.get_context("spawn")
    ids, barrier, results = context.Queue(), SpinBarrier(ranks), context.Queue()
    processes = [context.Process(target=_run, args=(r, ranks, gpus, case, measure, ids, barrier, results), daemon=True) for r in range(ranks)]
    for p in processes:
        p.start()
    try:
        got = dict(results.get(timeout=2 * WAIT_S) for _ in processes)
    except queue.Empty:
        raise RuntimeError(f"a rank did not answer in {2 * WAIT_S} s") from None
    finally:
        for p in processes:
            p.kill()
    errors = [answer["error"] for answer in got.values() if "error" in answer]
    if errors:   # those that only heard of it say BrokenBarrierError
        raise RuntimeError(next((e for e in errors if "BrokenBarrierError" not in e), errors[0]))
    return [got[r] for r in sorted(got)]
