"""Communicators and symmetric windows: the host's side of NCCL, and the only file that imports nccl4py.

A `Communicator` is one rank's view. Three kinds share its interface: `NcclCommunicator` (one process per rank), and the two that
``local_world.LocalWorld`` makes for ranks living in one process, on real NCCL or in the simulator.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.grid import whole_gpu
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.network import DeviceCommunicator, create, gin_of, network_facts, refuse, requirements, team_size_of
from ncclep_py.topology import Topology

if TYPE_CHECKING:
    import torch

    from ncclep_py.plan import DeviceNeeds
    from ncclep_py.tracing import Tracer

__all__ = ["Communicator", "Kernel", "NcclCommunicator", "SymmetricWindow"]

EXCHANGE_BYTES = 8192
SHARED_BYTES = 128 * 1024
"""Most dynamic shared memory of our blocks, so that something is left of a multiprocessor for whoever runs beside them."""


class SymmetricWindow:
    """Memory of the same size on every rank that all ranks can address.

    Attributes:
        handle: what kernels are given, an integer.
        memory: uint8 tensor over this rank's part.
        num_bytes: size of each rank's part.
    """

    def __init__(self, handle: int, memory: torch.Tensor, close: Callable[[], None]) -> None:
        self.handle, self.memory, self.num_bytes = handle, memory, memory.numel()
        self.address = memory.data_ptr()
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Give the registration back; idempotent. Tensors over the memory keep the memory itself alive."""
        close, self._close = self._close, None
        if close is not None:
            close()


class Kernel(ABC):
    """A kernel ready to be launched on this communicator's ranks."""

    @abstractmethod
    def enqueue(self, values: Sequence[int], num_blocks: int, label: str) -> None:
        """Launch on the rank's current stream with `values` in the order of the kernel's ``PARAMETERS``."""


class Communicator(ABC):
    """One rank's view of a set of ranks.

    Attributes:
        rank: my rank.
        num_ranks: number of ranks, R.
        backend: ``"nccl"`` or ``"sim"``.
        device: torch device of this rank's tensors.
        ranks_on_device: ranks that share this rank's device, this one included.
        team_size: ranks that can address each other's memory; the ranks form teams of that many (0: all are one team).
        fp4: whether the device has FP4 conversions, without which NVFP4 is refused. The simulator's is False; set it to try the recipe there.
    """

    rank: int
    num_ranks: int
    backend: str
    device: torch.device
    ranks_on_device: int
    team_size: int = 0
    fp4: bool = False

    @property
    def topology(self) -> Topology:
        """Ranks and teams."""
        return Topology(self.num_ranks, self.team_size or self.num_ranks)

    @property
    def can_differentiate(self) -> bool:
        """Whether operations may be called in a backward pass."""
        return True

    # ---- host steps every rank takes together -----------------------------------------------------------------------
    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """All ranks' `value` (JSON types), by rank. Collective and blocking."""

    @abstractmethod
    def create_window(self, num_bytes: int, regions: Sequence[tuple[str, int, int]]) -> SymmetricWindow:
        """A zeroed window; `regions` names its byte ranges for messages. Collective and blocking."""

    @abstractmethod
    def submit(self, kernel: Kernel, values: Sequence[int], num_blocks: int, label: str, tensors: Sequence[torch.Tensor], *,
               refusing: bool = False) -> bool:
        """Enqueue one operation. In a `LocalWorld` the operation starts when all ranks have submitted theirs.

        Args:
            kernel, values, num_blocks: the launch.
            label: name of the operation, for messages.
            tensors: the caller's tensors whose addresses are among `values`.
            refusing: whether this rank only takes part to refuse.

        Returns:
            Whether a rank of this process is known to refuse; then the operation has ended, and its outcome can be read.
        """

    def touched(self, ranges: Sequence[tuple[int, int]]) -> None:   # noqa: B027  (a GPU does not ask)
        """Tell the simulator's race checker which (address, bytes) the caller may have read and written since the last operation, before the next."""

    def run_local(self, kernel: Kernel, values: Sequence[int], num_blocks: int, label: str, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueue a kernel that neither touches nor waits for other ranks; the arguments are those of `submit`."""
        kernel.enqueue(values, num_blocks, label)

    @abstractmethod
    def together(self, action: Callable[[], None]) -> None:
        """Run `action` (say, a CUDA graph's replay) at the point where all ranks of this process have come: whatever launches kernels that
        wait for other ranks must be launched for all ranks before any rank waits for its device."""

    def device_communicator(self, needs: DeviceNeeds) -> DeviceCommunicator:
        """What kernels need to reach networked peers. Collective and blocking; local if `needs` asks for no network.

        Raises:
            RuntimeError: NCCL does not offer it, and what may be missing.
        """
        return DeviceCommunicator(0, needs)

    # ---- my own resources ---------------------------------------------------------------------------------------------
    @abstractmethod
    def zeros(self, num_bytes: int, regions: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        """Zeroed device memory of this rank that no peer sees, uint8."""

    @abstractmethod
    def host_words(self, count: int) -> torch.Tensor:
        """Zeroed int64 words in host memory that kernels of this rank can write."""

    def give_back(self, *memories: torch.Tensor) -> None:   # noqa: B027  (on a GPU there is nothing to do)
        """No kernel touches these tensors of `zeros` and `host_words` any more."""

    @abstractmethod
    def kernel(self, name: str, shape: KernelShape, shared_bytes: int, num_blocks: int, tracer: Tracer | None = None,
               waits: bool = False) -> Kernel:
        """A loaded kernel. Compiles if it must; refuses grids that could not run at once. With a `tracer` its stamps are written, with `waits` it
        counts how long it waits for whom."""

    @abstractmethod
    def tracer(self, num_blocks: int) -> Tracer:
        """What the kernels of one group, of at most `num_blocks` blocks, stamp."""

    @abstractmethod
    def max_blocks(self) -> int:
        """Blocks this rank may run at once: its share of the device's multiprocessors."""

    def multiprocessors(self) -> int:
        """Multiprocessors this process may use."""
        return self.max_blocks()

    def gpu(self) -> tuple[str, int]:
        """Name of this rank's GPU, the same for all ranks on it, and its multiprocessors; an empty name where grids have no limit."""
        return "", 0

    def max_shared_bytes(self) -> int:
        """Shared memory a block of mine may take."""
        return SHARED_BYTES

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for this rank's current stream."""

    def capturing(self) -> bool:
        """Whether this rank's current stream is being captured into a graph."""
        return False

    def sit_out(self) -> None:
        """For tests of missing ranks: let one operation of the others pass without this rank. (In a `LocalWorld` all ranks come to each.)"""
        return None

    def abandon(self) -> None:
        """Ranks are gone: `close` does nothing collective from now on, and leaves the communicator to the end of the process."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give everything back; idempotent."""

    def barrier(self) -> None:
        """All ranks come here before any goes on."""
        self.exchange(None)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- ways to get one, one process per rank -------------------------------------------------------------------------
    @staticmethod
    def init(num_ranks: int, rank: int, unique_id: bytes, device: int | None = None) -> NcclCommunicator:
        """From a NCCL unique id that rank 0 made (`unique_id`) and told everybody, e.g. by MPI. Collective and blocking."""
        return NcclCommunicator(num_ranks, rank, unique_id, device)

    @staticmethod
    def unique_id() -> bytes:
        """A new NCCL unique id; one rank makes it, all ranks pass it to `init`."""
        return bytes(_nccl().get_unique_id().as_bytes)

    @staticmethod
    def from_process_group(group: Any = None, device: int | None = None) -> NcclCommunicator:
        """A communicator of its own for the ranks of a torch process group (default: the world), whatever its backend."""
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        box: list[Any] = [Communicator.unique_id() if rank == 0 else None]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
        return NcclCommunicator(size, rank, box[0], device)

    @staticmethod
    def from_environment() -> NcclCommunicator:
        """From the environment torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)."""
        import torch.distributed as dist

        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise RuntimeError(f"the environment lacks {', '.join(missing)}; start the program with torchrun, or use LocalWorld")
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return Communicator.from_process_group()


def _nccl() -> Any:
    """nccl4py's core, or a sentence saying what to install."""
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")   # several ranks on one GPU, NCCL >= 2.30; read at communicator creation
    try:
        import nccl.core as nccl
    except ImportError as e:
        raise ImportError("the nccl backend needs nccl4py and NCCL: pip install 'ncclep_py[cu12]' or 'ncclep_py[cu13]'") from e
    return nccl


class _DeviceMemory:
    """Device memory as torch sees it; holds whoever owns the memory."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class _LoadedKernel(Kernel):
    """A compiled kernel on this process's device, with arguments prepared once per grid."""

    def __init__(self, loaded: Any, shared_bytes: int) -> None:
        self.loaded, self.shared_bytes = loaded, shared_bytes
        self.prepared: dict[int, Any] = {}
        self.stream_of = _current_stream()

    def enqueue(self, values: Sequence[int], num_blocks: int, label: str) -> None:
        launch = self.prepared.get(num_blocks)
        if launch is None:
            launch = self.prepared[num_blocks] = self.loaded.prepare(num_blocks, BLOCK_THREADS, self.shared_bytes, values)
        launch.assign(values)
        launch.enqueue(self.stream_of(self.loaded.device))


def _current_stream() -> Callable[[int], int]:
    """A function that gives the handle of torch's current stream on a device; torch's own for compilers, if there is one, is ten times as fast."""
    import torch

    return getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda device: torch.cuda.current_stream(device).cuda_stream)


BLOCK_THREADS = 512
FP4_CAPABILITY = (10, 0)


class NcclRank(Communicator):
    """What ranks on real NCCL share, one process per rank or several ranks in one process."""

    backend = "nccl"

    def __init__(self, comm: Any, rank: int, num_ranks: int, device: int, ranks_on_device: int) -> None:
        import torch

        self.comm, self.rank, self.num_ranks = comm, rank, num_ranks
        self.device = torch.device("cuda", device)
        self.ranks_on_device = ranks_on_device
        self.fp4 = torch.cuda.get_device_capability(self.device) >= FP4_CAPABILITY
        self.gin, self._network_facts = gin_of(comm), network_facts()
        self.team_size = team_size_of(rank, self.gin, self._network_facts, _loaded_version())

    def device_communicator(self, needs: DeviceNeeds) -> DeviceCommunicator:
        refuse(self.rank, self.gin, needs, self._network_facts, _loaded_version())
        return create_dev_comms([self], needs)[0]

    def zeros(self, num_bytes: int, regions: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        import torch

        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def host_words(self, count: int) -> torch.Tensor:
        import torch

        return torch.zeros(count, dtype=torch.int64).pin_memory()

    def kernel(self, name: str, shape: KernelShape, shared_bytes: int, num_blocks: int, tracer: Tracer | None = None,
               waits: bool = False) -> Kernel:
        from ncclep_py import launch, prebuilt

        prebuilt.check_loaded(_loaded_version())
        compiled = launch.compile_kernel(launch.KernelSpec(name, shape), arch_of(self.device), trace=tracer is not None, waits=waits)
        loaded = launch.load(compiled) if tracer is None else tracer.load(compiled, self.device.index)
        per_sm = launch.occupancy(loaded, BLOCK_THREADS, shared_bytes)
        room = per_sm * self.multiprocessors()
        if num_blocks > room:
            raise ValueError(f"max_num_sms gives {name} {num_blocks} blocks, but only {room} run at once on what this rank may use of its GPU; "
                             "blocks wait for other ranks, so all must fit")
        return _LoadedKernel(loaded, shared_bytes)

    def tracer(self, num_blocks: int) -> Tracer:
        from ncclep_py.tracing import DeviceTracer, buffer_bytes

        return DeviceTracer(self.zeros(buffer_bytes(num_blocks), []), self.rank, num_blocks)

    def max_blocks(self) -> int:
        return max(1, min(self.multiprocessors(), self.gpu()[1] // self.ranks_on_device))

    def multiprocessors(self) -> int:
        return _multiprocessors(self.device)

    def gpu(self) -> tuple[str, int]:
        import torch

        limit = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
        whole = whole_gpu(self.multiprocessors(), float(limit) if limit.replace(".", "", 1).isdigit() else None)
        return str(torch.cuda.get_device_properties(self.device).uuid), whole

    def max_shared_bytes(self) -> int:
        from cuda.core import Device

        return min(SHARED_BYTES, Device(self.device.index).properties.max_shared_memory_per_block_optin)

    def synchronize(self) -> None:
        import torch

        torch.cuda.current_stream(self.device).synchronize()

    def capturing(self) -> bool:
        import torch

        return torch.cuda.is_current_stream_capturing()


def _multiprocessors(device: torch.device) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def arch_of(device: torch.device) -> str:
    """A device's architecture as compilers name it."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _loaded_version() -> int:
    """Version code of the NCCL that is loaded, e.g. 23203."""
    version = _nccl().get_version().libnccl
    if version is None:
        raise ImportError("no libnccl is loaded; install the extra cu12 or cu13 of ncclep_py")
    major, minor, patch = (int(part) for part in str(version.version).split(".")[:3])
    return major * 10000 + minor * 100 + patch


def window_of(comm: Any, num_bytes: int, device: int) -> tuple[Any, Any]:
    """(memory, registration) of one rank; call inside ``nccl.group()`` when one process holds several ranks."""
    nccl = _nccl()
    buffer = nccl.mem_alloc(max(num_bytes, 1), device)
    return buffer, comm.register_window(buffer)


def probe(rank: int, ranks: int, local: int) -> dict[str, Any]:
    """What NCCL says about a communicator over all ranks of torch's default process group, `network.gin_of`; collective and blocking."""
    import torch
    import torch.distributed as dist

    nccl, box = _nccl(), [Communicator.unique_id() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    torch.cuda.set_device(local % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    comm = nccl.Communicator.init(nranks=ranks, rank=rank, unique_id=nccl.UniqueId.from_bytes(box[0]))
    try:
        return gin_of(comm)
    finally:
        comm.destroy()


def create_dev_comms(ranks: Sequence[NcclRank], needs: DeviceNeeds) -> list[DeviceCommunicator]:
    """Device communicators of the ranks of this process; collective over all ranks unless `needs` asks for no network."""
    if not needs.network:
        return [DeviceCommunicator(0, needs) for _ in ranks]
    nccl = _nccl()
    with nccl.group():
        made = [rank.comm.create_dev_comm(requirements(nccl, needs)) for rank in ranks]
    return [create(rank.comm, resource, needs, rank.num_ranks, rank.device) for rank, resource in zip(ranks, made)]   # noqa: B905  (equal lengths)


def finish_window(buffer: Any, registration: Any, num_bytes: int, device: torch.device, rank: int) -> SymmetricWindow:
    """The window of one rank once its registration is complete, zeroed."""
    import torch

    if not registration.handle:
        raise RuntimeError(f"rank {rank}: NCCL registered no window (symmetric memory is missing): check NCCL_CUMEM_ENABLE=1 and P2P access")
    memory = torch.as_tensor(_DeviceMemory(int(buffer.handle), num_bytes, buffer), device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    return SymmetricWindow(int(registration.handle), memory, registration.close)


class NcclCommunicator(NcclRank):
    """One process per rank. Made by `Communicator.init`, `from_process_group` or `from_environment`."""

    def __init__(self, num_ranks: int, rank: int, unique_id: bytes, device: int | None = None) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("the nccl backend needs a CUDA GPU; LocalWorld(n, backend='sim') runs without one")
        nccl = _nccl()
        local = int(os.environ.get("LOCAL_RANK", rank))
        index = local % torch.cuda.device_count() if device is None else device
        torch.cuda.set_device(index)
        torch.zeros(1, device="cuda")   # makes the context before NCCL looks for one
        comm = nccl.Communicator.init(nranks=num_ranks, rank=rank, unique_id=nccl.UniqueId.from_bytes(unique_id))
        super().__init__(comm, rank, num_ranks, index, 1)
        uuids = self.exchange(str(torch.cuda.get_device_properties(index).uuid))
        self.ranks_on_device = uuids.count(uuids[rank])
        self._closed = False

    def exchange(self, value: Any) -> list[Any]:
        import torch

        text = json.dumps(value).encode()
        if len(text) > EXCHANGE_BYTES - 8:
            raise ValueError(f"value must be at most {EXCHANGE_BYTES - 8} bytes of JSON, got {len(text)}")
        mine = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text.ljust(EXCHANGE_BYTES - 8)), dtype=torch.uint8).to(self.device)
        everybody = torch.zeros(self.num_ranks * EXCHANGE_BYTES, dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device)
        self.comm.allgather(mine, everybody, stream=stream.cuda_stream)
        stream.synchronize()
        rows = [bytes(row.tolist()) for row in everybody.cpu().view(self.num_ranks, -1)]
        return [json.loads(row[8: 8 + int.from_bytes(row[:8], "little")]) for row in rows]

    def create_window(self, num_bytes: int, regions: Sequence[tuple[str, int, int]]) -> SymmetricWindow:
        buffer, registration = window_of(self.comm, num_bytes, self.device.index)
        window = finish_window(buffer, registration, num_bytes, self.device, self.rank)
        self.barrier()   # nobody's first words may be zeroed away
        return window

    def submit(self, kernel: Kernel, values: Sequence[int], num_blocks: int, label: str, tensors: Sequence[torch.Tensor], *,
               refusing: bool = False) -> bool:
        kernel.enqueue(values, num_blocks, label)
        return False

    def together(self, action: Callable[[], None]) -> None:
        action()

    def abandon(self) -> None:
        self._closed = True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.comm.destroy()
