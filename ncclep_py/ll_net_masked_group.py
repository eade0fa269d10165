"""LOW_LATENCY groups with ``enable_mask`` whose ranks form several teams; calls and results are those of one team. Protocol: ``ll_net_member_map``.

Where the network between two living ranks fails, all go on without either that any of them misses (``ll_net_member_map``), and a rank that hears
nobody goes on alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclep_py.group import Group
from ncclep_py.kernels.ll_net_masked_shape import LLNetMaskedShape
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.ll_net_group import LLNetGroup
from ncclep_py.ll_net_member_map import LLNetMemberMap

if TYPE_CHECKING:
    from ncclep_py.communicator import Communicator
    from ncclep_py.config import GroupConfig

__all__ = ["LLNetMaskedGroup"]

KERNEL_NAMES = {"ll_dispatch": "ll_net_masked_dispatch", "ll_rank_major_dispatch": "ll_net_masked_rank_major_dispatch",
                "ll_combine": "ll_net_masked_combine", "ll_nvfp4_combine": "ll_net_masked_nvfp4_combine", "ll_mask_clean": "ll_net_mask_clean",
                "ll_copy": "ll_copy"}


def _missing(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what} is not built yet for ranks in several teams with enable_mask; leave one of them out, or use one team")


class LLNetMaskedGroup(LLNetGroup):
    """A group over several teams that goes on without ranks that do not come.

    Attributes:
        members: what masks add to the byte plans.
    """

    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        self._lost = False
        super().__init__(comm, config)

    def memory(self) -> tuple[int, list[tuple[str, int, int]], int, list[tuple[str, int, int]]]:
        _, window_regions, _, local_regions = super().memory()
        self.members = LLNetMemberMap.build(self.config, self.num_ranks, self.net)
        return (self.members.total_bytes, window_regions + self.members.regions(), self.members.local_bytes,
                local_regions + self.members.local_regions())

    def kernel_name(self, name: str) -> str:
        if name not in KERNEL_NAMES:
            raise _missing(name)
        return KERNEL_NAMES[name]

    def make_shape(self, name: str, shape: KernelShape) -> KernelShape:
        return shape if name == "ll_copy" else LLNetMaskedShape.over(shape, self.config, self.comm.topology.team_size)

    def clean_values(self) -> tuple[int, ...]:
        return (self.network.address, *super().clean_values())

    def lost_ranks(self) -> bool:
        self._lost = super().lost_ranks()
        return self._lost

    def start_at(self, epoch: int) -> None:
        """As `Group.start_at`."""
        self._window.memory[self.members.views: self.members.returned].zero_()   # a view of an epoch to come is none
        super().start_at(epoch)

    def close(self) -> None:
        """As `Group.close`; with ranks masked out the device communicator, too, stays until the process ends."""
        Group.close(self)
        if not self._lost:
            self.network.close()
