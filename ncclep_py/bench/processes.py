"""One process per rank on this machine, kept for several jobs, and a barrier that lets all of them go within microseconds."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import queue
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

__all__ = ["ProcessWorld", "SpinBarrier"]

WAIT_S = 120
Measure = Callable[[Any, Any, Callable[[], None]], dict[str, Any]]


class SpinBarrier:
    """A barrier between processes that spins, so that all leave it within microseconds; a sleeping one lets them start some hundred apart.

    Args:
        parties: how many meet.
        rounds: ``parties + 1`` int64 words all of them see, zero at first; default: memory that is handed to children.
    """

    def __init__(self, parties: int, rounds: Any = None) -> None:
        # one count per process, then whether somebody gave up
        self.rounds = mp.get_context("spawn").RawArray("q", parties + 1) if rounds is None else rounds
        self.rank = 0

    @classmethod
    def in_file(cls, path: Path, parties: int, rank: int) -> SpinBarrier:
        """For processes somebody else started: the words are a file, which must be there with ``8 * (parties + 1)`` zeros."""
        with path.open("r+b") as file:
            barrier = cls(parties, memoryview(mmap.mmap(file.fileno(), 8 * (parties + 1))).cast("q"))
        barrier.rank = rank
        return barrier

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


def _communicator(rank: int, ranks: int, gpus: int, ids: Any) -> Any:
    import torch

    from ncclep_py.communicator import Communicator

    os.environ["LOCAL_RANK"] = "0"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))   # all ranks make their inputs at the same time
    if rank == 0:
        unique = Communicator.unique_id()
        for _ in range(ranks - 1):
            ids.put(unique)
    else:
        unique = ids.get(timeout=WAIT_S)
    comm = Communicator.init(ranks, rank, unique, device=rank % gpus)
    torch.cuda.set_stream(torch.cuda.Stream())
    return comm


def _serve(rank: int, ranks: int, connect: Callable[..., Any], connected: tuple[Any, ...], orders: Any, barrier: Any, results: Any) -> None:
    """A rank's process: connect once, then a job after the other until one fails or there are no more."""
    barrier.rank = rank
    try:
        comm = connect(rank, ranks, *connected)
        while (order := orders.get()) is not None:
            measure, job = order
            results.put((rank, measure(comm, job, lambda: barrier.wait(WAIT_S))))
    except BaseException:   # noqa: BLE001  (told to whoever started us)
        barrier.abort()
        results.put((rank, {"error": traceback.format_exc()[-1500:]}))
    results.close()
    results.join_thread()
    os._exit(0)   # NCCL's threads may wait for somebody who has failed


class ProcessWorld:
    """`ranks` processes, each with a communicator of its own, spread over `gpus` devices.

    After a job that failed they are gone, and this is closed.

    Args:
        ranks: how many.
        gpus: devices they share.
        connect: ``connect(rank, ranks, gpus, ids)`` makes a rank's communicator; `ids`: a queue all share. Default: over NCCL.
    """

    def __init__(self, ranks: int, gpus: int = 1, connect: Callable[..., Any] | None = None) -> None:
        context = mp.get_context("spawn")
        self.ranks, self.closed = ranks, False
        self.results, barrier = context.Queue(), SpinBarrier(ranks)
        self.orders = [context.Queue() for _ in range(ranks)]
        self.ids = context.Queue()   # kept, like the others: a queue that is collected is gone before its processes have opened it
        self.processes = [context.Process(target=_serve, daemon=True, args=(r, ranks, connect or _communicator, (gpus, self.ids), self.orders[r],
                                                                            barrier, self.results)) for r in range(ranks)]
        for p in self.processes:
            p.start()

    def run(self, measure: Measure, job: Any) -> list[dict[str, Any]]:
        """``measure(comm, job, meet)`` on every rank, and all answers by rank; ``RuntimeError`` if one fails or does not answer.

        Args:
            measure: a function of a module, which children import.
            job: handed through; picklable.
        """
        if self.closed:
            raise RuntimeError("these processes are gone: an earlier job failed, or close was called")
        for orders in self.orders:
            orders.put((measure, job))
        got: dict[int, dict[str, Any]] = {}
        until = time.perf_counter() + 2 * WAIT_S
        try:
            while len(got) < self.ranks:
                rank, answer = self._next(until, got)
                got[rank] = answer
        except queue.Empty:
            self.close()
            raise RuntimeError(f"a rank did not answer in {2 * WAIT_S} s") from None
        errors = [answer["error"] for answer in got.values() if "error" in answer]
        if errors:   # those that only heard of it say BrokenBarrierError
            self.close()
            raise RuntimeError(next((e for e in errors if "BrokenBarrierError" not in e), errors[0]))
        return [got[r] for r in range(self.ranks)]

    def _next(self, until: float, got: dict[int, Any]) -> tuple[int, dict[str, Any]]:
        """An answer; of a process that died without one, that it did."""
        while time.perf_counter() < until:
            try:
                return self.results.get(timeout=1)
            except queue.Empty:
                for rank, p in enumerate(self.processes):
                    if rank not in got and p.exitcode not in (None, 0):
                        return rank, {"error": f"the process of rank {rank} ended with exit code {p.exitcode}"}
        raise queue.Empty

    def close(self) -> None:
        """End the processes; idempotent."""
        if self.closed:
            return
        self.closed = True
        for orders in self.orders:
            orders.put(None)
        until = time.perf_counter() + 5
        for p in self.processes:
            p.join(max(0.0, until - time.perf_counter()))
        for p in self.processes:
            p.kill()
