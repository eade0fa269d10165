"""LOW_LATENCY groups and handles whose ranks form several teams; calls and results are those of one team. Protocol: ``ncclep_py.ll_net_map``.

With ``enable_mask`` they are those of ``ll_net_masked_group``. Refused by a sentence: with ``zero_copy = ON`` rows of a staged operation that lie in
a user window. A staged dispatch leaves rows in the slot, and a staged combine takes them from there: those of a user window are copied like a plain
tensor's. A second combine of the same dispatch meets all ranks first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncclep_py.config import HandleConfig, Layout
from ncclep_py.errors import Status
from ncclep_py.group import Group
from ncclep_py.handle import Handle
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.ll_net_flight import net_values, signature_of
from ncclep_py.ll_net_map import LLNetMap
from ncclep_py.plan import device_needs
from ncclep_py.signature import OpKind
from ncclep_py.streams import on_stream

if TYPE_CHECKING:
    import torch

    from ncclep_py.communicator import Communicator
    from ncclep_py.config import GroupConfig
    from ncclep_py.inputs_outputs import LayoutInfo
    from ncclep_py.network import DeviceCommunicator

__all__ = ["LLNetGroup", "LLNetHandle"]

KERNEL_NAMES = {"ll_dispatch": "ll_net_dispatch", "ll_rank_major_dispatch": "ll_net_rank_major_dispatch", "ll_combine": "ll_net_combine",
                "ll_nvfp4_combine": "ll_net_nvfp4_combine", "ll_copy": "ll_copy",
                "ll_dispatch_send": "ll_net_dispatch_send", "ll_dispatch_complete": "ll_net_dispatch_complete",
                "ll_rank_major_send": "ll_net_rank_major_send", "ll_rank_major_complete": "ll_net_rank_major_complete",
                "ll_combine_send": "ll_net_combine_send", "ll_combine_complete": "ll_net_combine_complete"}


def _missing(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what} is not built yet for ranks in several teams; leave it out, or use one team")


class LLNetGroup(Group):
    """A group over several teams.

    Attributes:
        net: what several teams add to the byte plans.
    """

    network: DeviceCommunicator

    over_network = True

    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        self.network = comm.device_communicator(device_needs(config, comm.topology))
        super().__init__(comm, config)
        self._held.append(self.network)

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

    def start_at(self, epoch: int) -> None:
        """As `Group.start_at`."""
        self._window.memory[self.net.messages: self.net.returned].zero_()   # a message of an epoch to come is none
        super().start_at(epoch)

    def close(self) -> None:
        """As `Group.close`; then the device communicator goes, too."""
        super().close()
        self.network.close()

    def _meet(self, kind: OpKind, status: int) -> None:
        kernel, plan, own = self._meeting(), self.map, self.local_map
        local, record = self.addresses()
        window = self._window.handle
        values = (self.network.address, window, self.rank, local, record, 0, 0, 0, 0, window, plan.slots, local, local + self.net.remote,
                  local + own.header(self.config.num_slots), 0, self.signature(kind, 0, 0, self.config.num_topk), status, self.config.wait_ns)
        self.comm.submit(kernel, values, self.num_blocks, kind.name.lower(), (), refusing=status != Status.GO)


class LLNetHandle(Handle):
    """A handle of a `LLNetGroup`."""

    group: LLNetGroup

    def _launch(self, name: str, slot: int, status: int, own: tuple[int, ...], tensors: tuple[torch.Tensor, ...], global_ids: bool = False,
                sent: Any = None, place: int = -1) -> None:
        """Submit one operation; `own` are the kernel's values between the record and the slot, for one team."""
        group = self.group
        stamp = self.id << 32 | (self._held if "combine" in name else self._generation)
        signature = signature_of(group, self, name, slot, self._stage, global_ids, sent, place)
        values = (*net_values(group, self, name, slot, self._stage, own, place), stamp, signature, status, group.config.wait_ns)
        self._submit(name, self._kernel(name, None if sent is None else sent.wire), values, status, tensors)

    def _complete_values(self, name: str, slot: int, own: tuple[int, ...], sent: Any, place: int) -> tuple[int, ...]:
        group = self.group
        signature = () if name == "ll_rank_major_complete" else (signature_of(group, self, name, slot, slot, False, sent),)
        return (*net_values(group, self, name, slot, slot, own), *signature, group.config.wait_ns)

    def _pushed(self, slot: int, rows: torch.Tensor) -> torch.Tensor:
        held = self._rows(slot)
        if rows.data_ptr() != held.data_ptr():   # puts read the window only
            self._copy_all([(held, rows)])
            self._packed = False
        return held
