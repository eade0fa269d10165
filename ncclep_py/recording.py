"""Which kernels a group will ask for, found by running its host code over a communicator that launches nothing.

No GPU, no NCCL and no other rank are needed, and windows take no memory, since nothing touches them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.communicator import Communicator, Kernel, SymmetricWindow
from ncclep_py.compiled import KernelSpec
from ncclep_py.config import Algorithm, GroupConfig, Layout
from ncclep_py.flight import SENDS
from ncclep_py.topology import Topology

if TYPE_CHECKING:
    import torch

    from ncclep_py.kernels.shape import KernelShape, Wire
    from ncclep_py.own_kernels import Factory
    from ncclep_py.tracing import Tracer

__all__ = ["RecordingCommunicator", "kernels_of"]

NORESERVE = 0x4000
"""Linux: pages of the mapping are only counted when touched."""


class _Recorded(Kernel):
    """A kernel nobody launches."""

    def enqueue(self, values: Sequence[int], num_blocks: int, label: str) -> None:
        """Do nothing."""


class RecordingCommunicator(Communicator):
    """Rank 0 of `topology`'s ranks, for host code only.

    Attributes:
        specs: the kernels asked for, in order, each once.
    """

    backend = "sim"

    def __init__(self, topology: Topology, multiprocessors: int, fp4: bool = False) -> None:
        import torch

        self.rank, self.num_ranks, self.team_size = 0, topology.num_ranks, topology.team_size
        self.device, self.ranks_on_device, self.fp4 = torch.device("cpu"), 1, fp4
        self.specs: list[KernelSpec] = []
        self._multiprocessors = multiprocessors

    def exchange(self, value: Any) -> list[Any]:
        return [value] * self.num_ranks

    def create_window(self, num_bytes: int, regions: Sequence[tuple[str, int, int]]) -> SymmetricWindow:
        return SymmetricWindow(1, _untouched(num_bytes), lambda: None)

    def submit(self, kernel: Kernel, values: Sequence[int], num_blocks: int, label: str, tensors: Sequence[torch.Tensor], *,
               refusing: bool = False) -> bool:
        return False

    def run_local(self, kernel: Kernel, values: Sequence[int], num_blocks: int, label: str, tensors: Sequence[torch.Tensor]) -> None:
        return None

    def together(self, action: Callable[[], None]) -> None:
        return None

    def zeros(self, num_bytes: int, regions: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        return _untouched(num_bytes)

    def host_words(self, count: int) -> torch.Tensor:
        import torch

        return torch.zeros(count, dtype=torch.int64)

    def kernel(self, name: str, shape: KernelShape, shared_bytes: int, num_blocks: int, tracer: Tracer | None = None,
               waits: bool = False) -> Kernel:
        if waits:
            raise NotImplementedError("kernels that count waits are compiled where they run: leave GroupConfig.count_waits out")
        spec = KernelSpec(name, shape)
        if spec not in self.specs:
            self.specs.append(spec)
        return _Recorded()

    def tracer(self, num_blocks: int) -> Tracer:
        raise NotImplementedError("traced kernels are compiled where they run: leave GroupConfig.trace out")

    def max_blocks(self) -> int:
        return self._multiprocessors

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        return None


def _untouched(num_bytes: int) -> torch.Tensor:
    """Zeroed memory that takes none until it is used."""
    import torch

    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def kernels_of(config: GroupConfig, topology: Topology, multiprocessors: int, *, layouts: Sequence[Layout] = (), idx_bytes: Sequence[int] = (8,),
               wires: Sequence[Wire] = (), alignment: int = 0, nvfp4: bool = False, own: Sequence[Factory | str] = ()) -> list[KernelSpec]:
    """All kernels of a group and of its handles, forward and backward.

    Args:
        config: of the group; without ``max_num_sms`` it gets what it would get on a GPU of so many multiprocessors.
        topology: ranks and teams.
        multiprocessors: a rank's share of its GPU.
        layouts: of its handles; none: all the algorithm has.
        idx_bytes: bytes of expert ids, 4 or 8.
        wires: recipes of dispatch besides plain rows.
        alignment: ``HandleConfig.dispatch_output_per_expert_alignment``.
        nvfp4: NVFP4 combine, too.
        own: factories that are given to `Group.run_kernel`, with the group's default layout.
    """
    import torch

    from ncclep_py.config import HandleConfig
    from ncclep_py.group import Group
    from ncclep_py.own_kernels import factory_of

    high = config.algorithm is Algorithm.HIGH_THROUGHPUT
    every: tuple[Layout, ...] = (Layout.FLAT, Layout.EXPERT_MAJOR) if high else (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR)
    if not high and config.slot_layout:
        every = (config.slot_layout,)
    comm = RecordingCommunicator(topology, multiprocessors, fp4=nvfp4)
    with Group.create(comm, config) as group:
        if config.enable_mask:
            group.kernel("ll_mask_clean", config.num_topk, 8)
        for factory in own:
            group.own_kernel(factory_of(factory))
        for layout in layouts or every:
            for size in idx_bytes:
                with group.create_handle(layout, num_topk=config.num_topk, idx_dtype=torch.int32 if size == 4 else torch.int64,
                                         config=HandleConfig(alignment if high and layout is Layout.EXPERT_MAJOR else 0)) as handle:
                    _recipes(handle, high, wires, nvfp4)
    return comm.specs


def _recipes(handle: Any, high: bool, wires: Sequence[Wire], nvfp4: bool) -> None:
    """Ask for the kernels a handle loads when a recipe is first used."""
    staged: tuple[str, ...] = ()
    if not high and handle.group.config.staging_slots:   # over teams the complete half moves rows, too
        staged = (handle._send_name, *((SENDS[handle._send_name],) if handle.group.over_network else ()))
    for wire in wires:
        for name in ("ht_dispatch",) if high else (handle._dispatch_name, *staged):
            handle._kernel(name, wire)
    if nvfp4 and not high:
        handle._kernel("ll_nvfp4_combine")
