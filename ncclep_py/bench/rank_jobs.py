"""What each rank of a benchmark runs, in whatever process it lives."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ncclep_py.bench.compile_times import noted
from ncclep_py.bench.subject import measure

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.communicator import Communicator

__all__ = ["LayerJob", "PairJob", "run_layer", "run_pair"]

LENGTHS = {"ll": (20, 100), "ht": (4, 16)}
"""Actions in the two graphs, by algorithm."""

LAYER_STEPS, LAYER_WARM_UP = 10, 3


STAMPED_PAIRS = 4
"""Pairs of a graph whose last one is shown as a timeline."""


@dataclasses.dataclass(frozen=True)
class PairJob:
    """Dispatch and combine of one implementation; `trace`: stamps instead of times."""

    case: Case
    implementation: str = "ncclep_py"
    trace: bool = False


@dataclasses.dataclass(frozen=True)
class LayerJob:
    """The MoE layer over one implementation; `width`: columns between an expert's two matrices."""

    case: Case
    implementation: str
    width: int
    backward: bool


def run_pair(comm: Communicator, job: PairJob, meet: Callable[[], None] | None = None) -> dict[str, Any]:
    """One rank's answer: `bench.subject.measure`'s, seconds until ready, kernels used, most device memory, and stamps."""
    gpu = comm.backend == "nccl"
    _reset_peak(gpu)
    kernels: list[tuple[str, Any]] = []
    end = noted(comm, kernels)
    started = time.perf_counter()
    try:
        subject = _subject(comm, job)
        ready = time.perf_counter() - started
        told = _played(subject, job, meet)
    finally:
        end()
    return told | {"ready_s": ready, "kernels": kernels}


def _played(subject: Any, job: PairJob, meet: Callable[[], None] | None) -> dict[str, Any]:
    from ncclep_py.bench.timer import Timer

    comm, case = subject.comm, job.case
    gpu = comm.backend == "nccl"
    timer = Timer(comm, meet or comm.barrier, *LENGTHS[case.algorithm]) if gpu else None
    told = measure(subject, None if job.trace else timer, case.mode != "local")
    if job.trace:
        from ncclep_py.timeline import to_json

        if timer is not None:   # what the check left is cold and has the host in between
            timer.launched(timer.graph(subject.pair, STAMPED_PAIRS).replay)
        told["stamps"] = to_json(subject.group.timeline())
    subject.close()
    return told | {"peak_memory_bytes": _peak(gpu, subject, case)}


def _subject(comm: Communicator, job: PairJob) -> Any:
    if job.implementation == "ncclep_py":
        if job.case.algorithm == "ll":
            from ncclep_py.bench.ll_subject import LLSubject

            return LLSubject(comm, job.case, job.trace)
        from ncclep_py.bench.ht_subject import HTSubject

        return HTSubject(comm, job.case, job.trace)
    if job.implementation == "ncclep_py staged":
        from ncclep_py.bench.staged_subject import StagedSubject

        return StagedSubject(comm, job.case, job.trace)
    from ncclep_py.bench.peers import subject_of

    return subject_of(job.implementation)(comm, job.case)


def _reset_peak(gpu: bool) -> None:
    import torch

    if gpu:
        gc.collect()   # windows go with the last tensor over them
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(gpu: bool, subject: Any, case: Case) -> int | None:
    """Most bytes torch held (in one process: a rank's share of them), and the window, which is not torch's."""
    import torch

    if not gpu:
        return None
    window = getattr(getattr(subject, "group", None), "window", None)
    return torch.cuda.max_memory_allocated() // (case.ranks if case.mode == "local" else 1) + (window.num_bytes if window is not None else 0)


def run_layer(comm: Communicator, job: LayerJob, meet: Callable[[], None] | None = None) -> dict[str, Any]:
    """Seconds of each step of the layer on this rank, and the mean square of its output, for comparison."""
    import torch

    from ncclep_py.bench.layer import EpExchange, MoELayer, SplitExchange

    layer = MoELayer(job.case, job.width, comm.rank, device=comm.device)
    ours = job.implementation == "ncclep_py"
    if ours:
        exchange: Any = EpExchange(comm, job.case)
    else:
        from ncclep_py.bench.peers.all_to_all import process_group

        exchange = SplitExchange(job.case, process_group(comm))
    x = torch.randn(job.case.tokens, job.case.hidden, generator=torch.Generator().manual_seed(comm.rank)).to(job.case.torch_dtype()).to(comm.device)
    times = []
    warm_up, steps = (LAYER_WARM_UP, LAYER_STEPS) if comm.backend == "nccl" else (1, 1)   # simulated: only checked
    for _ in range(warm_up + steps):
        comm.synchronize()
        (meet or comm.barrier)()
        started = time.perf_counter()
        with torch.set_grad_enabled(job.backward):
            out = layer(x.detach().requires_grad_(job.backward), exchange)
            if job.backward:
                out.float().square().mean().backward()
        comm.synchronize()
        times.append(time.perf_counter() - started)
    if ours:
        exchange.close()
    return {"seconds": times[warm_up:], "square": float(out.detach().float().square().mean())}
