"""`HTGroup`: what a HIGH_THROUGHPUT group has instead of a LOW_LATENCY one: window plan, handles, kernels. Made by ``Group.create``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncclep_py.config import GroupConfig, HandleConfig, Layout
from ncclep_py.errors import EpError, Status
from ncclep_py.group import Group
from ncclep_py.ht_handle import HTHandle
from ncclep_py.ht_memory_map import HTMaps, HTWindowMap, ht_local_map
from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.shape import PLAIN, Wire
from ncclep_py.signature import OpKind, Signature
from ncclep_py.streams import on_stream

if TYPE_CHECKING:
    import torch

    from ncclep_py.communicator import Kernel
    from ncclep_py.handle import LayoutInfo
    from ncclep_py.memory_map import LocalMap

__all__ = ["HTGroup", "ht_bytes_per_rank"]


class HTGroup(Group):
    """A group whose operations are those of `HTHandle`."""

    map: HTWindowMap   # type: ignore[assignment]

    def plans(self, config: GroupConfig, num_ranks: int) -> tuple[Any, LocalMap]:
        """Internal: byte plans of the window and of the local block."""
        return HTWindowMap.build(config, num_ranks), ht_local_map(config)

    @on_stream
    def create_handle(self, layout: Layout, topk_idx: torch.Tensor | None = None, *, num_topk: int | None = None,
                      idx_dtype: Any = None, config: HandleConfig | None = None, layout_info: LayoutInfo | None = None) -> HTHandle:
        """A handle for `layout`, FLAT or EXPERT_MAJOR. Without `topk_idx` local; with it collective, since it is `HTHandle.update`, too.

        Args:
            layout: order of received rows.
            topk_idx: ``[T, K]`` int32 or int64 expert ids, -1 for none.
            num_topk: K if `topk_idx` is not given.
            idx_dtype: torch.int32 or torch.int64 if `topk_idx` is not given.
            config: `HandleConfig`, with the alignment of EXPERT_MAJOR zones; the same on all ranks.
            layout_info: where to put the counts of `topk_idx`, see `HTHandle.update`.
        """
        self._check_open("create_handle")
        return HTHandle(self, next(self._handle_ids), layout, topk_idx, num_topk, idx_dtype, config or HandleConfig(), layout_info)

    def ht_kernel(self, name: str, num_topk: int, idx_bytes: int, layout: Layout, alignment: int, wire: Wire = PLAIN) -> Kernel:
        """Internal: a kernel, loaded on first use; refused under capture."""
        key: Any = (name, num_topk, idx_bytes, layout, alignment, wire)
        if key not in self._kernels:
            if self.comm.capturing():
                raise EpError(f"{name} for {num_topk} experts per token and {idx_bytes}-byte ids is not loaded, and loading is impossible during "
                              "graph capture: create the handle (or call it once) with these before capturing")
            self._kernels[key] = self.loaded(key)
        return self._kernels[key]

    def ht_shape(self, name: str, num_topk: int, idx_bytes: int, layout: Layout, alignment: int, wire: Wire) -> HTShape:
        """Internal: constants of the kernel `name`."""
        return HTShape.build(self.config, self.num_ranks, num_topk, idx_bytes, layout, alignment, self.num_blocks, wire)

    def shape_of(self, key: Any) -> HTShape:
        """Internal: constants of the kernel behind a key of the loaded ones."""
        return self.ht_shape(*key)

    def own_shape(self, layout: Layout) -> HTShape:
        """Internal: constants of a kernel of the caller's."""
        return self.ht_shape("ht_dispatch", self.config.num_topk, 8, layout or Layout.FLAT, 1, PLAIN)

    def shared_bytes(self, name: str, shape: HTShape) -> int:
        """Internal: bytes of dynamic shared memory of a block of kernel `name`."""
        return shape.shared_bytes if name in ("ht_count", "ht_prepare", "ht_net_prepare", "") else 0

    def maps_memory(self, plan: HTMaps, num_topk: int) -> tuple[int, list[tuple[str, int, int]]]:
        """Internal: bytes and regions of a handle's maps."""
        return plan.total_bytes, plan.regions()

    def first_values(self, name: str, backward: bool) -> tuple[int, ...]:
        """Internal: values of a launch before the window."""
        return ()

    def _meeting(self) -> Kernel:
        return self.ht_kernel("ht_combine", self.config.num_topk, 8, Layout.FLAT, 1)

    def _meet(self, kind: OpKind, status: int) -> None:
        config, kernel = self.config, self._meets
        local, record = self.addresses()
        nothing = local + self.local_map.header(config.num_slots)   # the header of no slot and of no maps
        signature = Signature(kind, 0, config.token_type, 0, 0, config.num_topk, config.row_bytes // 16).pack()
        window, slots = self._window.handle, self.map.slots
        values = (*self.first_values("ht_combine", False), window, self.rank, local, record, nothing, 0, 0, 0, -1, window, slots, slots, nothing, 0,
                  signature, status, config.wait_ns)
        self.comm.submit(kernel, values, self.num_blocks, kind.name.lower(), (), refusing=status != Status.GO)


def ht_bytes_per_rank(config: GroupConfig, num_ranks: int) -> dict[str, int]:
    """Device memory a HIGH_THROUGHPUT group takes on each rank, by part, in bytes, without the maps of its handles."""
    window = HTWindowMap.build(config, num_ranks)
    return {"control": window.slots, "slots": window.num_slots * window.slot_bytes, "local": ht_local_map(config).total_bytes}
