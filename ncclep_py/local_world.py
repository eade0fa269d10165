"""`LocalWorld`: several ranks in this process, on one or several GPUs (real NCCL) or in the simulator.

A rank program is an ordinary function of its communicator, the same as under torchrun. Programs run as cooperative tasks that switch at every
operation: kernels wait for other ranks' kernels, so all ranks' kernels are launched before any program may wait for its device.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.communicator import (
    BLOCK_THREADS,
    Communicator,
    Kernel,
    NcclRank,
    SymmetricWindow,
    _loaded_version,
    _nccl,
    arch_of,
    create_dev_comms,
    finish_window,
    window_of,
)
from ncclep_py.compiled import KernelSpec
from ncclep_py.errors import EpClosedError, EpPeerError, EpRefusedError
from ncclep_py.fused import FusedKernel, FusedStream
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.network import DeviceCommunicator, refuse
from ncclep_py.rank_thread import RankThread
from ncclep_py.topology import Topology

if TYPE_CHECKING:
    import torch

    from ncclep_py.plan import DeviceNeeds
    from ncclep_py.simulator import Faults
    from ncclep_py.tracing import Tracer

__all__ = ["LocalWorld"]

PACKAGE = os.path.dirname(__file__) + os.sep

Program = Callable[..., Any]
_Launch = tuple[Kernel, Sequence[int], int]
"""Kernel, values and blocks of a rank's launch."""


@dataclasses.dataclass
class _Step:
    """What a rank waits for: `perform` is called once with all ranks' `value`s and gives one result per rank."""

    name: str
    value: Any
    perform: Callable[[list[Any]], list[Any]]


@dataclasses.dataclass
class _Task:
    """One rank program."""

    greenlet: Any
    step: _Step | None = None
    result: Any = None
    error: BaseException | None = None
    done: bool = False


class LocalWorld:
    """`num_ranks` ranks in this process.

    Args:
        num_ranks: R, from 1.
        backend: ``"nccl"`` (needs a CUDA GPU), ``"sim"``, or ``"auto"``: nccl where there is a GPU.
        devices: CUDA device of each rank; default: spread over all visible devices.
        seed, mode: schedule of the simulator, see ``simulator.Simulator``.
        blocks, warps: grid of the simulator's kernels.
        faults: what may go wrong in the simulator, see ``simulator.Faults``.
        threads: run each rank program in a thread of its own (still one at a time), for programs whose backward passes call operations.
        fused: launch each operation of all ranks as one grid (``ncclep_py.fused``), so that profilers and sanitizers, which run one kernel at a
            time, can be used; backend nccl, all ranks on one device. Operations that differ between ranks, and graphs, are launched per rank
            all the same. Default: whether the environment variable NCCLEP_FUSED is 1.
        team_size: simulator: ranks that can address each other's memory, as GPUs of one node; the teams are connected by a network. Default: all.
            (On nccl the environment variable NCCL_LSA_TEAM_SIZE does this.)

    Example:
        >>> import ncclep_py as ep
        >>> def program(comm, factor):
        ...     return [factor * rank for rank in comm.exchange(comm.rank)]   # what all ranks gave
        >>> with ep.LocalWorld(3, "sim") as world:
        ...     world.run(program, 10)
        [[0, 10, 20], [0, 10, 20], [0, 10, 20]]
    """

    def __init__(self, num_ranks: int, backend: str = "auto", *, devices: Sequence[int] | None = None, seed: int = 0, mode: str = "fair",
                 blocks: int = 2, warps: int = 2, faults: Faults | None = None, threads: bool = False,
                 fused: bool | None = None, team_size: int = 0) -> None:
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
            raise TypeError(f"num_ranks must be an int, got {type(num_ranks).__name__}: {num_ranks!r}")
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an int, with which the schedule can be had again, got {type(seed).__name__}: {seed!r}")
        if fused is not None and not isinstance(fused, bool):
            raise TypeError(f"fused must be a bool or None, got {type(fused).__name__}: {fused!r}")
        if backend not in ("auto", "nccl", "sim"):
            raise ValueError(f"backend must be 'auto', 'nccl' or 'sim', got {backend!r}")
        self.num_ranks = num_ranks
        self.backend = _default_backend() if backend == "auto" else backend
        self.threads = threads
        self.fused: FusedStream | None = None
        self._tasks: list[_Task] = []
        self._closed = False
        self.communicators: list[Communicator] = []
        if self.backend == "sim":
            from ncclep_py.simulator import Simulator

            self.simulator = Simulator(num_ranks, seed=seed, mode=mode, blocks=blocks, warps=warps, faults=faults)
            size = Topology(num_ranks, team_size or num_ranks).team_size
            self.simulator.team_size = size if size < num_ranks else 0
            self.communicators = [_SimRank(self, r, self.simulator.team_size) for r in range(num_ranks)]
        else:
            if team_size:
                raise ValueError(f"team_size is for the simulator, got {team_size}; on nccl set the environment variable NCCL_LSA_TEAM_SIZE")
            self._open_nccl(devices, os.environ.get("NCCLEP_FUSED") == "1" if fused is None else fused)

    def _open_nccl(self, devices: Sequence[int] | None, fused: bool) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("backend 'nccl' needs a CUDA GPU and there is none; use backend='sim'")
        where = list(devices) if devices is not None else [r % torch.cuda.device_count() for r in range(self.num_ranks)]
        if len(where) != self.num_ranks:
            raise ValueError(f"devices must name one device per rank, {self.num_ranks}, got {len(where)}")
        if fused and len(set(where)) > 1:
            raise ValueError(f"fused needs all ranks on one device, devices are {where}")
        for device in sorted(set(where)):
            torch.zeros(1, device=f"cuda:{device}")
        comms = _nccl().Communicator.init_all(devices=where)
        self.communicators = [_LocalNcclRank(self, c, r, self.num_ranks, where[r], where.count(where[r])) for r, c in enumerate(comms)]
        self.fused = FusedStream(self.communicators[0].device) if fused else None

    # ---- running rank programs --------------------------------------------------------------------------------------
    def run(self, program: Program, *args: Any) -> list[Any]:
        """Run ``program(communicator, *args)`` for every rank and return the results by rank.

        The first exception of a rank program is raised once all programs have ended; programs still inside an operation then get an
        `EpPeerError`. Not reentrant.

        Raises:
            TypeError: `program` cannot be called.
        """
        from greenlet import greenlet

        if not callable(program):
            raise TypeError(f"program must be a function of a communicator, got {type(program).__name__}: {program!r}")
        if self._closed:
            raise EpClosedError("cannot run: this LocalWorld is closed")
        if self._tasks:
            raise RuntimeError("LocalWorld.run is not reentrant; call it after the running programs have ended")
        if self.threads:
            self._tasks = [_Task(RankThread(_body(program, comm, args), comm.own_streams()))   # type: ignore[attr-defined]
                           for comm in self.communicators]
        else:
            self._tasks = [_Task(greenlet(_body(program, comm, args))) for comm in self.communicators]
        try:
            for rank in range(self.num_ranks):
                self._resume(rank, None)
            while not all(task.done for task in self._tasks):
                self._advance()
        finally:
            tasks, self._tasks = self._tasks, []
        failed = sorted((t.error for t in tasks if t.error is not None), key=_hearsay)
        if failed:
            raise failed[0]
        return [task.result for task in tasks]

    def _resume(self, rank: int, value: Any, error: BaseException | None = None) -> None:
        """Let a rank program go on to its next step or its end."""
        task = self._tasks[rank]
        task.step = None
        with self.communicators[rank].own_streams():   # type: ignore[attr-defined]
            try:
                step = task.greenlet.throw(error) if error is not None else task.greenlet.switch(value)
            except BaseException as e:   # noqa: BLE001  (kept and raised by run)
                task.error, task.done = e, True
                return
        if task.greenlet.dead:
            task.result, task.done = step, True
        else:
            task.step = step

    def _advance(self) -> None:
        """All live ranks wait: perform their common step, or tell them that it cannot happen."""
        waiting = [r for r, task in enumerate(self._tasks) if not task.done]
        steps = [self._tasks[r].step for r in waiting]
        names = sorted({step.name for step in steps if step is not None})
        if len(waiting) < self.num_ranks or len(names) > 1:
            for rank in waiting:
                self._resume(rank, None, EpPeerError(self._why_not(rank, names)))
            return
        try:
            results = steps[0].perform([step.value for step in steps])   # type: ignore[union-attr]
        except Exception as e:   # noqa: BLE001  (each program sees it where it called)
            for rank in waiting:
                self._resume(rank, None, e)
            return
        for rank, result in zip(waiting, results, strict=True):
            self._resume(rank, None, result) if isinstance(result, BaseException) else self._resume(rank, result)

    def _why_not(self, rank: int, names: list[str]) -> str:
        step = self._tasks[rank].step
        called = step.name if step else "an operation"
        ended = [r for r, task in enumerate(self._tasks) if task.done]
        if ended:   # name those with a reason of their own, not those that only heard of it
            ended = [r for r in ended if not isinstance(self._tasks[r].error, EpPeerError)] or ended
            how = [f"rank {r} ended with {type(e).__name__}: {e}" if (e := self._tasks[r].error) else f"rank {r}'s program has ended" for r in ended]
            return f"rank {rank} called {called}, but {'; '.join(how[:3])}"
        return f"rank {rank} called {called}, but other ranks called {', '.join(n for n in names if n != called)}"

    def step(self, step: _Step) -> Any:
        """Called by a rank program's communicator: wait for all ranks, perform, return my result."""
        if self.threads:
            mine = next((task.greenlet for task in self._tasks if task.greenlet.thread is threading.current_thread()), None)
            if mine is None:
                raise RuntimeError(f"{step.name} of a LocalWorld rank must be called inside LocalWorld.run(program)")
            return mine.wait(step)
        from greenlet import getcurrent

        if not any(task.greenlet is getcurrent() for task in self._tasks):
            raise RuntimeError(f"{step.name} of a LocalWorld rank must be called inside LocalWorld.run(program)")
        return getcurrent().parent.switch(step)

    # ---- end --------------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Give everything back; idempotent."""
        if self._closed:
            return
        self._closed = True
        for comm in self.communicators:
            comm.close()

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _hearsay(error: BaseException) -> int:
    """How far an error is from its cause: a rank's own, a peer's failure told by the device, a peer's end told by this world."""
    return 2 if isinstance(error, EpPeerError) else 1 if isinstance(error, EpRefusedError) else 0


def _default_backend() -> str:
    import torch

    return "nccl" if torch.cuda.is_available() else "sim"


def _body(program: Program, comm: Communicator, args: tuple[Any, ...]) -> Callable[[Any], Any]:
    return lambda _: program(comm, *args)


class _KeptState:
    """torch state that belongs to a rank program, not to the process: current device and stream, and whether gradients are recorded."""

    def __init__(self, device: int | None) -> None:
        import torch

        self.device, self.gradients = device, torch.is_grad_enabled()
        self.stream = torch.cuda.Stream(device) if device is not None else None

    def begin(self) -> None:
        """In a rank's own thread: take the rank's device and stream, and run backward passes in this thread."""
        import torch

        torch.autograd.set_multithreading_enabled(False)
        if self.device is not None:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.stream)   # type: ignore[arg-type]

    def keep(self) -> None:
        """In a rank's own thread: what operations of this rank are launched on from now on."""
        import torch

        if self.device is not None:
            self.device, self.stream = torch.cuda.current_device(), torch.cuda.current_stream()

    def __enter__(self) -> None:
        import torch

        self.outer_gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(self.gradients)
        if self.device is not None:
            self.outer_device, self.outer_stream = torch.cuda.current_device(), torch.cuda.current_stream()
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.stream)   # type: ignore[arg-type]

    def __exit__(self, *exc: object) -> None:
        import torch

        self.gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(self.outer_gradients)
        if self.device is not None:
            self.device, self.stream = torch.cuda.current_device(), torch.cuda.current_stream()
            torch.cuda.set_device(self.outer_device)
            torch.cuda.set_stream(self.outer_stream)


class _LocalNcclRank(NcclRank):
    """A rank of a LocalWorld on real NCCL; has a stream of its own."""

    def __init__(self, world: LocalWorld, comm: Any, rank: int, num_ranks: int, device: int, ranks_on_device: int) -> None:
        super().__init__(comm, rank, num_ranks, device, ranks_on_device)
        self.world, self._state, self._closed = world, _KeptState(device), False

    def own_streams(self) -> _KeptState:
        """Context in which this rank's program runs."""
        return self._state

    @property
    def can_differentiate(self) -> bool:
        return self.world.threads   # torch keeps a backward pass's state per thread: two in one, by turns, wait for each other for ever

    def exchange(self, value: Any) -> list[Any]:
        return self.world.step(_Step("a host exchange", value, lambda values: [list(values) for _ in values]))

    def create_window(self, num_bytes: int, regions: Sequence[tuple[str, int, int]]) -> SymmetricWindow:
        return self.world.step(_Step("create_window", (self, num_bytes), _nccl_windows))

    def device_communicator(self, needs: DeviceNeeds) -> DeviceCommunicator:
        def perform(ranks: list[Any]) -> list[Any]:
            for rank in ranks:
                refuse(rank.rank, rank.gin, needs, rank._network_facts, _loaded_version())
            return create_dev_comms(ranks, needs)

        return self.world.step(_Step("device_communicator", self, perform))

    def submit(self, kernel: Kernel, values: Sequence[int], num_blocks: int, label: str, tensors: Sequence[torch.Tensor], *,
               refusing: bool = False) -> bool:
        return self._together(lambda: kernel.enqueue(values, num_blocks, label), refusing, (kernel, values, num_blocks))

    def tracer(self, num_blocks: int) -> Tracer:
        if self.world.fused is not None:
            raise ValueError("GroupConfig(trace=True) stamps each rank's own kernels, and LocalWorld(fused=True) has one kernel for all ranks: use "
                             "one of the two")
        return super().tracer(num_blocks)

    def kernel(self, name: str, shape: KernelShape, shared_bytes: int, num_blocks: int, tracer: Tracer | None = None,
               waits: bool = False) -> Kernel:
        kernel = super().kernel(name, shape, shared_bytes, num_blocks, tracer, waits)
        if self.world.fused is not None:
            kernel.fused = FusedKernel.load(KernelSpec(name, shape), arch_of(self.device), BLOCK_THREADS, shared_bytes, num_blocks,   # type: ignore[attr-defined]
                                            self.num_ranks, self.multiprocessors(), waits)
        return kernel

    def together(self, action: Callable[[], None]) -> None:
        self._together(action, False)

    def sit_out(self) -> None:
        self._together(lambda: None, False)

    def _together(self, action: Callable[[], None], refusing: bool, launch: _Launch | None = None) -> bool:
        if self.capturing():   # nothing runs, so nobody waits
            action()
            return False
        return self.world.step(_Step("an operation", (self, action, refusing, launch), _call_all))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.comm.destroy()


def _call_all(requests: list[Any]) -> list[bool]:
    """Launch for all ranks; if one refuses, wait until the refusal has reached all."""
    world = requests[0][0].world
    if world.fused is None or not _call_fused(world.fused, requests):
        for comm, action, *_ in requests:
            with comm.own_streams():
                action()
    refused = any(refusing for _, _, refusing, _ in requests)
    if refused:
        for comm, *_ in requests:
            with comm.own_streams():
                comm.synchronize()
    return [refused] * len(requests)


def _call_fused(fused: FusedStream, requests: list[Any]) -> bool:
    """Launch one grid for all ranks, if all want the same one."""
    launches = [launch for *_, launch in requests]
    if any(launch is None for launch in launches):
        return False
    if len({(kernel.fused.loaded.compiled.info["key"], num_blocks) for kernel, _, num_blocks in launches}) > 1:
        return False
    kernel, _, num_blocks = launches[0]
    fused.launch(kernel.fused, [values for _, values, _ in launches], num_blocks, [comm.own_streams().stream for comm, *_ in requests])
    return True


def _nccl_windows(requests: list[Any]) -> list[SymmetricWindow]:
    """Windows of all ranks of the process: allocate each, register all in one NCCL group."""
    with _nccl().group():
        parts = [window_of(comm.comm, num_bytes, comm.device.index) for comm, num_bytes in requests]
    return [finish_window(*part, num_bytes, comm.device, comm.rank) for part, (comm, num_bytes) in zip(parts, requests, strict=True)]


class _SimKernel(Kernel):
    """A kernel function over the simulator's vocabulary."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def enqueue(self, values: Sequence[int], num_blocks: int, label: str) -> None:
        raise RuntimeError("the simulator runs all ranks of a step at once; submit through the communicator")


class _SimRank(Communicator):
    """A rank of a LocalWorld in the simulator; its tensors live on the CPU."""

    backend = "sim"

    def __init__(self, world: LocalWorld, rank: int, team_size: int = 0) -> None:
        import torch

        self.team_size = team_size
        self.world, self.rank, self.num_ranks, self.ranks_on_device = world, rank, world.num_ranks, world.num_ranks
        self.device, self._state = torch.device("cpu"), _KeptState(None)
        self._kept: list[Any] = []
        self._touched: tuple[Any, ...] = ()

    def own_streams(self) -> _KeptState:
        """Context in which this rank's program runs."""
        return self._state

    @property
    def can_differentiate(self) -> bool:
        return self.world.threads   # torch keeps a backward pass's state per thread: two in one, by turns, wait for each other for ever

    def exchange(self, value: Any) -> list[Any]:
        return self.world.step(_Step("a host exchange", value, lambda values: [list(values) for _ in values]))

    def create_window(self, num_bytes: int, regions: Sequence[tuple[str, int, int]]) -> SymmetricWindow:
        def perform(sizes: list[Any]) -> list[SymmetricWindow]:
            memories = [_cpu_bytes(size) for size in sizes]
            simulator = self.world.simulator
            handle = simulator.create_window([m.numpy() for m in memories], list(regions))
            open_at = set(range(len(memories)))

            def close(rank: int) -> None:
                open_at.discard(rank)
                if not open_at:   # no peer can reach it any more
                    simulator.destroy_window(handle)

            return [SymmetricWindow(handle, m, functools.partial(close, rank)) for rank, m in enumerate(memories)]

        return self.world.step(_Step("create_window", num_bytes, perform))

    def submit(self, kernel: Kernel, values: Sequence[int], num_blocks: int, label: str, tensors: Sequence[torch.Tensor], *,
               refusing: bool = False) -> bool:
        touched, self._touched = self._touched, ()
        return self.world.step(_Step("an operation", (self, kernel, values, num_blocks, label, tensors, touched, refusing), _simulate))

    def touched(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._touched = (ranges, _callers_line())

    def run_local(self, kernel: Kernel, values: Sequence[int], num_blocks: int, label: str, tensors: Sequence[torch.Tensor]) -> None:
        _simulate([(self, kernel, values, num_blocks, label, tensors, (), False)])

    def together(self, action: Callable[[], None]) -> None:
        action()

    def sit_out(self) -> None:
        self.world.step(_Step("an operation", (self, None, (), 0, "nothing", (), (), False), _simulate))

    def device_communicator(self, needs: DeviceNeeds) -> DeviceCommunicator:
        def perform(wanted: list[Any]) -> list[DeviceCommunicator]:
            from ncclep_py.simulator.network import Network

            made = Network(self.world.simulator, self.team_size, needs.contexts, needs.connection == "rail", needs.signals,
                           needs.counters) if needs.network else None
            return [DeviceCommunicator(made.number if made else 0, n) for n in wanted]

        return self.world.step(_Step("device_communicator", needs, perform))

    def zeros(self, num_bytes: int, regions: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        memory = _cpu_bytes(num_bytes)
        self._kept.append(self.world.simulator.register(memory, "LOCAL", self.rank, list(regions)))
        return memory

    def host_words(self, count: int) -> torch.Tensor:
        memory = _cpu_bytes(8 * count)
        self._kept.append(self.world.simulator.register(memory, "RECORD", self.rank, []))
        import torch

        return memory.view(torch.int64)

    def give_back(self, *memories: torch.Tensor) -> None:
        gone = {m.data_ptr() for m in memories}
        for region in [r for r in self._kept if r.address in gone]:
            self._kept.remove(region)
            self.world.simulator.unregister(region)

    def kernel(self, name: str, shape: KernelShape, shared_bytes: int, num_blocks: int, tracer: Tracer | None = None,
               waits: bool = False) -> Kernel:
        from ncclep_py import launch

        simulator = self.world.simulator
        return _SimKernel(launch.KERNELS[name][0](shape, simulator.counting if waits else simulator.vocabulary))

    def tracer(self, num_blocks: int) -> Tracer:
        from ncclep_py.tracing import SimulatedTracer

        return SimulatedTracer(self.world.simulator, self.rank)

    def max_blocks(self) -> int:
        return self.world.simulator.blocks

    def synchronize(self) -> None:
        """Nothing to wait for: a submitted operation has run when `submit` returns. What the host wrote since is taken in."""
        self.world.simulator.words.absorb()

    def close(self) -> None:
        """Nothing is held."""


def _cpu_bytes(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes at an address that is a multiple of 256."""
    import torch

    raw = torch.zeros(num_bytes + 256, dtype=torch.uint8)
    skip = -raw.data_ptr() % 256
    return raw[skip: skip + num_bytes]


def _callers_line() -> tuple[str, int]:
    """File and line of the innermost caller that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _simulate(requests: list[Any]) -> list[Any]:
    """Run one operation of all ranks in the simulator."""
    simulator = requests[0][0].world.simulator
    regions = []
    for comm, kernel, values, num_blocks, label, tensors, touched, _ in requests:
        if touched:
            simulator.host(comm.rank, None, touched[0], touched[0], f"the program before {label}", touched[1], counted=False)
        regions += [simulator.register(t.detach(), f"tensor {i}", comm.rank, []) for i, t in enumerate(tensors) if t.numel()]
        if kernel is not None:
            simulator.launch(comm.rank, kernel.function, tuple(values), blocks=num_blocks, label=label)
    try:
        simulator.run()
    finally:
        for region in regions:
            simulator.unregister(region)
    return [any(request[-1] for request in requests)] * len(requests)
