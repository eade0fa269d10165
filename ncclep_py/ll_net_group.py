"""LOW_LATENCY groups and handles whose ranks form several teams; calls and results are those of one team. Protocol: ``ncclep_py.ll_net_map``.

Refused by a sentence: staged operations, masks, user windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncclep_py.config import HandleConfig, Layout
from ncclep_py.errors import Status
from ncclep_py.group import Group
from ncclep_py.handle import Handle
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.ll_net_map import LLNetMap
from ncclep_py.plan import device_needs
from ncclep_py.signature import OpKind
from ncclep_py.streams import on_stream

if TYPE_CHECKING:
    import torch

    from ncclep_py.communicator import Communicator, SymmetricWindow
    from ncclep_py.config import GroupConfig
    from ncclep_py.inputs_outputs import LayoutInfo

__all__ = ["LLNetGroup", "LLNetHandle"]

KERNEL_NAMES = {"ll_dispatch": "ll_net_dispatch", "ll_rank_major_dispatch": "ll_net_rank_major_dispatch", "ll_combine": "ll_net_combine",
                "ll_nvfp4_combine": "ll_net_nvfp4_combine", "ll_copy": "ll_copy"}


def _missing(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what} is not built yet for ranks in several teams; leave it out, or use one team")


class LLNetGroup(Group):
    """A group over several teams.

    Attributes:
        net: what several teams add to the byte plans.
    """

    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        for unwanted, what in ((config.enable_mask, "enable_mask"), (config.num_staging_slots, "num_staging_slots")):
            if unwanted:
                raise _missing(what)
        self.device = comm.device_communicator(device_needs(config, comm.topology))
        super().__init__(comm, config)

    def memory(self) -> tuple[int, list[tuple[str, int, int]], int, list[tuple[str, int, int]]]:
        self.net = LLNetMap.build(self.config, self.num_ranks, self.comm.topology.team_size, self.map, self.local_map)
        return (self.net.total_bytes, self.map.regions() + self.net.regions(), self.net.local_bytes,
                self.local_map.regions() + self.net.local_regions())

    def kernel_name(self, name: str) -> str:
        if name not in KERNEL_NAMES:
            raise _missing(name)
        return KERNEL_NAMES[name]

    def make_shape(self, name: str, shape: KernelShape) -> KernelShape:
        return shape if name == "ll_copy" else LLNetShape.over(shape, self.config, self.comm.topology.team_size)

    @on_stream
    def create_handle(self, layout: Layout, topk_idx: torch.Tensor | None = None, *, num_topk: int | None = None, idx_dtype: Any = None,
                      config: HandleConfig | None = None, layout_info: LayoutInfo | None = None) -> Handle:
        """As `Group.create_handle`."""
        self._check_open("create_handle")
        if layout_info is not None:
            raise ValueError(f"layout_info must be left out of a LOW_LATENCY handle, got {type(layout_info).__name__}; give it to dispatch")
        return LLNetHandle(self, next(self._handle_ids), layout, topk_idx, num_topk, idx_dtype, config or HandleConfig())

    def create_window(self, num_bytes: int) -> SymmetricWindow:
        """Refused: peers of other teams put rows into the group's own window only."""
        raise _missing("create_window")

    def start_at(self, epoch: int) -> None:
        """As `Group.start_at`."""
        self._window.memory[self.net.messages: self.net.returned].zero_()   # a message of an epoch to come is none
        super().start_at(epoch)

    def close(self) -> None:
        """As `Group.close`; then the device communicator goes, too."""
        super().close()
        self.device.close()

    def _meet(self, kind: OpKind, status: int) -> None:
        kernel, plan, own = self._meeting(), self.map, self.local_map
        local, record = self.addresses()
        values = (self.device.address, self._window.handle, self.rank, local, record, 0, 0, 0, 0, plan.slots, local, local + self.net.remote,
                  local + own.header(self.config.num_slots), 0, self.signature(kind, 0, 0, self.config.num_topk), status, self.config.wait_ns)
        self.comm.submit(kernel, values, self.num_blocks, kind.name.lower(), (), refusing=status != Status.GO)


class LLNetHandle(Handle):
    """A handle of a `LLNetGroup`."""

    group: LLNetGroup

    def _launch(self, name: str, slot: int, status: int, own: tuple[int, ...], tensors: tuple[torch.Tensor, ...], global_ids: bool = False,
                sent: Any = None, place: int = -1) -> None:
        """Submit one operation; `own` are the kernel's values between the record and the slot, for one team."""
        group, combine = self.group, name in ("ll_combine", "ll_nvfp4_combine")
        plan, local_map = group.map, group.local_map
        local, record = group.addresses()
        stamp = self.id << 32 | (self._held if combine else self._generation)
        signature = group.signature(OpKind.COMBINE if combine else OpKind.DISPATCH, self.layout, slot, self.num_topk, global_ids, sent,
                                    int(name == "ll_nvfp4_combine"))
        values = (group.device.address, group.window.handle, group.rank, local, record, *own, *((1,) if name == "ll_combine" else ()),
                  plan.slot(slot), local + local_map.table(slot), local + group.net.slot_remote(slot), local + local_map.header(slot), stamp,
                  signature, status, group.config.wait_ns)
        kernel = self._kernel(name, None if sent is None else sent.wire)
        group.keep(tensors)
        if group.comm.submit(kernel, values, group.num_blocks, name, tensors, refusing=status != Status.GO):
            group.check()
