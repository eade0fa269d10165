"""How long a rank's operations wait for each rank: ``GroupConfig(count_waits=True)``, and always with ``enable_mask``.

The kernels are the same; operations that wait for HEAD or ARRIVED are compiled with counters (``-DEP_WAITS``), otherwise they leave no instruction.
Where the counters are, kernels read after FAIL (``memory_map.WAITS``): in the local block, and in the flight of each slot of staged operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclep_py.errors import EpError
from ncclep_py.memory_map import FLIGHT_FAIL, WAITS, WORD

if TYPE_CHECKING:
    import torch

    from ncclep_py.config import GroupConfig
    from ncclep_py.group import Group
    from ncclep_py.topology import Topology

__all__ = ["Waited", "teams_problem"]


def teams_problem(config: GroupConfig, topology: Topology) -> str:
    """Why a group over these teams cannot count waits, if it is to; else nothing."""
    if not config.count_waits or topology.num_teams == 1:
        return ""
    return f"count_waits must be False for ranks in several teams, whose waits are not counted; there are {topology.num_teams} teams"


class Waited:
    """The part of `group.Group` that tells for whom it waited."""

    _waited: torch.Tensor | None

    def waited_ns(self, *, reset: bool = False) -> torch.Tensor:
        """Nanoseconds this rank's operations spent waiting for each rank, ``[R]`` int64 on the device: who is slow? Local, in stream order.

        Counted are the time from a rank's own arrival at an operation until that of the other, and from the end of its own rows until the
        end of the other's; not the time waited for a rank that did not come. Of the simulator, steps of its scheduler.

        Args:
            reset: start again from zero afterwards.

        Raises:
            EpError: the group was created without ``GroupConfig(count_waits=True)`` and without ``enable_mask``: its kernels carry no counters.

        Example:
            >>> import torch
            >>> import ncclep_py as ep
            >>> def program(comm):
            ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1, count_waits=True)
            ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, torch.tensor([[0]])) as handle:
            ...         handle.dispatch(torch.ones(1, 8, dtype=torch.bfloat16))
            ...         return group.waited_ns(reset=True).shape, group.waited_ns().tolist()
            >>> with ep.LocalWorld(2, "sim") as world:
            ...     world.run(program)[0]
            (torch.Size([2]), [0, 0])
        """
        group: Group = self   # type: ignore[assignment]
        group._check_open("waited_ns")
        words = self._waited
        if group.config.enable_mask:
            words = group.member_word("waited_ns", "waited", group.num_ranks)
        if words is None:
            raise EpError("waited_ns() needs kernels that count how long they wait: create the group with GroupConfig(count_waits=True)")
        found = words.clone()
        if reset:
            words.zero_()
        return found

    # ---- inside ------------------------------------------------------------------------------------------------------
    @property
    def counts_waits(self) -> bool:
        """Internal: whether kernels of this group are those with counters. (Those with ``enable_mask`` count by themselves.)"""
        group: Group = self   # type: ignore[assignment]
        return group.config.count_waits and not group.config.enable_mask

    def make_counters(self) -> torch.Tensor | None:
        """Internal: ``[R]`` int64 of zeros, told to the kernels; None if nobody counts."""
        group: Group = self   # type: ignore[assignment]
        if not self.counts_waits:
            return None
        import torch

        counters = group.comm.zeros(group.num_ranks * WORD, [("WAITED", 0, group.num_ranks * WORD)])
        plan, all_blocks, one_block = group.local_map, *WAITS
        flights = [plan.flight(i) + FLIGHT_FAIL for i in range(group.config.num_slots + plan.num_staging)] if plan.num_staging else []
        staging = flights[group.config.num_slots:]
        for fail in (plan.fail, *flights):
            # Not of one block in a staging slot: all blocks of a staged combine wait for RELEASED, and for use long ago.
            for offset in (all_blocks,) if fail in staging else (all_blocks, one_block):
                group._local[fail + offset: fail + offset + WORD].view(torch.int64).fill_(counters.data_ptr())
        return counters.view(torch.int64)
