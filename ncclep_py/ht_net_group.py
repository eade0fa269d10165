"""`HTNetGroup`: a HIGH_THROUGHPUT group whose ranks form several teams. Calls, results and errors are those of `HTGroup`; of the arithmetic only this
differs: rows of another team are added up there in fp32, in the same order, and rounded once to the token type before they are sent (see
``reference``). Protocol: ``ncclep_py.ht_net_map``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.ht_group import HTGroup
from ncclep_py.ht_memory_map import HTMaps
from ncclep_py.ht_net_map import HTNetMap
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.shape import Wire
from ncclep_py.plan import device_needs

if TYPE_CHECKING:
    from ncclep_py.communicator import Communicator
    from ncclep_py.network import DeviceCommunicator

__all__ = ["HTNetGroup"]

KERNEL_NAMES = {"ht_prepare": "ht_net_prepare", "ht_dispatch": "ht_net_dispatch", "ht_combine": "ht_net_combine"}


class HTNetGroup(HTGroup):
    """A group over several teams.

    Attributes:
        net: what several teams add to the byte plans.
    """

    network: DeviceCommunicator

    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        """Internal: use `Group.create`."""
        self.network = comm.device_communicator(device_needs(config, comm.topology))
        super().__init__(comm, config)
        self._held.append(self.network)

    def memory(self) -> tuple[int, list[tuple[str, int, int]], int, list[tuple[str, int, int]]]:
        """Internal: bytes and regions of the window and of the local block."""
        net = self.net = HTNetMap.build(self.config, self.num_ranks, self.comm.topology.team_size, self.map, self.local_map)
        return (net.total_bytes, self.map.regions() + net.regions(), net.local_bytes,
                [*self.local_map.regions(), ("COUNT", net.count, net.count + 8)])

    def maps_memory(self, plan: HTMaps, num_topk: int) -> tuple[int, list[tuple[str, int, int]]]:
        """Internal: bytes and regions of a handle's maps."""
        return self.net.maps_bytes(plan, num_topk), plan.regions() + self.net.maps_regions(plan, num_topk)

    def kernel_name(self, name: str) -> str:
        """Internal: the kernel that does what `name` does in one team."""
        return KERNEL_NAMES.get(name, name)

    def ht_shape(self, name: str, num_topk: int, idx_bytes: int, layout: Layout, alignment: int, wire: Wire) -> HTShape:
        """Internal: constants of the kernel `name`."""
        if name not in KERNEL_NAMES:
            return super().ht_shape(name, num_topk, idx_bytes, layout, alignment, wire)
        return HTNetShape.over_teams(self.config, self.num_ranks, self.net.team_size, num_topk, idx_bytes, layout, alignment, self.num_blocks, wire)

    def first_values(self, name: str, backward: bool) -> tuple[int, ...]:
        """Internal: values of a launch before the window."""
        return (self.network.address, int(backward)) if name == "ht_combine" else (self.network.address,)

    def close(self) -> None:
        """As `Group.close`; then the device communicator goes, too."""
        super().close()
        self.network.close()
