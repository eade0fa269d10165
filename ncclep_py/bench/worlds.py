"""Where the ranks of a benchmark live: in this process, in processes it starts, or in those torchrun started."""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Worlds"]

KEPT = ("ncclep_py", "ncclep_py staged", "all_to_all_single")
"""Implementations whose processes play one case after the other; others get new ones for each, as what they leave behind is not ours to know."""

WAIT_S = 120


class Worlds:
    """Runs jobs of `bench.rank_jobs`, each on all ranks of its case."""

    def __init__(self) -> None:
        self.processes: Any = None
        self.of: tuple[Any, ...] = ()
        self.torchrun: tuple[Any, Callable[[], None], Callable[[], None]] | None = None

    def answers(self, job: Any, run: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
        """All ranks' answers, by rank; raises what a rank raised."""
        case = job.case
        if case.mode == "processes":
            return self._in_processes(job, run)
        if case.mode == "torchrun":
            return self._under_torchrun(job, run)
        from ncclep_py.local_world import LocalWorld

        devices = [r % case.gpus for r in range(case.ranks)] if case.backend == "nccl" else None
        with LocalWorld(case.ranks, case.backend, devices=devices, blocks=case.sms, threads=type(job).__name__ == "LayerJob") as world:
            return world.run(run, job)

    def close(self) -> None:
        """End the processes there are."""
        if self.processes is not None:
            self.processes.close()
        self.processes = None

    def alone(self, look: Callable[[], dict[str, Any]], mode: str) -> dict[str, Any]:
        """``look()``; under torchrun on rank 0 while the others wait without their GPUs, and nothing on these."""
        if mode != "torchrun":
            return look()
        import torch.distributed as dist

        comm = self._torchrun_ranks()[0]
        found = look() if comm.rank == 0 else {}
        dist.barrier(group=_gloo())
        return found

    # ---- one process per rank ------------------------------------------------------------------------------------------
    def _in_processes(self, job: Any, run: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
        from ncclep_py.bench.processes import ProcessWorld

        case, kept = job.case, job.implementation in KEPT
        wanted = (job.implementation, case.ranks, case.gpus)
        if self.processes is None or self.processes.closed or self.of != wanted:
            self.close()
            self.processes, self.of = ProcessWorld(case.ranks, case.gpus), wanted
        try:
            return self.processes.run(run, job)
        finally:
            if not kept:
                self.close()

    # ---- torchrun ------------------------------------------------------------------------------------------------------
    def _torchrun_ranks(self) -> tuple[Any, Callable[[], None], Callable[[], None]]:
        """My communicator, a barrier with little skew, and what makes everybody's wait in it fail."""
        if self.torchrun is None:
            import torch

            from ncclep_py.communicator import Communicator

            comm = Communicator.from_environment()
            if comm.backend == "nccl":
                torch.cuda.set_stream(torch.cuda.Stream())
            self.torchrun = comm, *_meeting(comm)
        return self.torchrun

    def _under_torchrun(self, job: Any, run: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
        import torch.distributed as dist

        comm, meet, abort = self._torchrun_ranks()
        if job.case.ranks != comm.num_ranks:
            raise ValueError(f"ranks must be torchrun's {comm.num_ranks}, got {job.case.ranks}")
        try:
            mine = run(comm, job, meet)
        except Exception:   # noqa: BLE001  (all ranks must come to the exchange of answers)
            abort()
            mine = {"error": traceback.format_exc()[-1500:]}
        everybody: list[Any] = [None] * comm.num_ranks
        dist.all_gather_object(everybody, mine, group=_gloo())
        errors = [answer["error"] for answer in everybody if "error" in answer]
        if errors:
            comm.abandon()
            self.torchrun = None   # new ones for the next job
            raise RuntimeError(next((e for e in errors if "BrokenBarrierError" not in e), errors[0]))
        return everybody


@functools.cache
def _gloo() -> Any:
    """A process group of all ranks that needs no GPU."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def _meeting(comm: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Ranks of one machine spin on a file they share; others meet as the communicator does."""
    import socket

    import torch.distributed as dist

    from ncclep_py.bench.processes import SpinBarrier

    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    path = ""
    if comm.rank == 0:
        number, path = tempfile.mkstemp(prefix="ncclep-bench-", dir=folder)
        with os.fdopen(number, "wb") as file:
            file.write(bytes(8 * (comm.num_ranks + 1)))
    told: list[Any] = [None] * comm.num_ranks
    dist.all_gather_object(told, (socket.gethostname(), path), group=_gloo())
    shared = Path(told[0][1])
    try:
        seen = len({host for host, _ in told}) == 1
        barrier = SpinBarrier.in_file(shared, comm.num_ranks, comm.rank) if seen else None
        dist.barrier(group=_gloo())
    finally:
        if comm.rank == 0:
            shared.unlink()
    if barrier is None:
        return comm.barrier, lambda: None
    return lambda: barrier.wait(WAIT_S), barrier.abort
