"""`MaskedProgram` over several teams, for tests, and the same for RANK_MAJOR. See ``program``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ncclep_py.config import GroupConfig
from ncclep_py.kernels import ll_net_mask_clean, ll_net_masked_combine, ll_net_masked_dispatch, ll_net_masked_rank_major_dispatch
from ncclep_py.kernels.ll_net_masked_shape import LLNetMaskedShape
from ncclep_py.kernels.shape import PLAIN, KernelShape, Wire
from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.ll_net_program import LLNetProgram
from ncclep_py.simulator.masked_program import MaskedProgram, MaskedRankMajorProgram
from ncclep_py.simulator.network import Network

__all__ = ["LLNetMaskedProgram", "LLNetMaskedRankMajorProgram"]


class LLNetMaskedProgram(MaskedProgram):
    """Members of every operation must agree, and have what the oracle of one team says under their mask."""

    shape: LLNetMaskedShape
    dispatches: Any = ll_net_masked_dispatch
    make_dispatch_kernel: Any = staticmethod(ll_net_masked_dispatch.make_ll_net_masked_dispatch)

    def __init__(self, sim: Simulator, config: GroupConfig, num_tokens: Sequence[int], team_size: int, *,
                 make_dispatch: Callable | None = None, wire: Wire = PLAIN,
                 make_combine: Callable = ll_net_masked_combine.make_ll_net_masked_combine, **more: Any) -> None:
        """As `MaskedProgram`; `wire`: rows of a recipe, dispatched by `dispatch_quantised` and not combined."""
        self.team_size, self.wire = team_size, wire
        self.network = Network(sim, team_size, min(config.max_dispatch_tokens_per_rank, 4))
        super().__init__(sim, config, num_tokens, make_dispatch=make_dispatch or self.make_dispatch_kernel, make_combine=make_combine,
                         **{"make_clean": ll_net_mask_clean.make_ll_net_mask_clean} | more)
        self.parameters = {"dispatch": self.dispatches.PARAMETERS, "combine": ll_net_masked_combine.PARAMETERS}

    def make_shape(self, shape: KernelShape) -> LLNetMaskedShape:
        return LLNetMaskedShape.over(shape, self.config, self.team_size)

    def sizes(self) -> tuple[int, list[tuple[str, int, int]], int, list[tuple[str, int, int]]]:
        shape = self.shape
        net, more = shape.net, shape.members
        return (more.total_bytes, shape.window.regions() + net.regions() + more.regions(), more.local_bytes,
                shape.local.regions() + net.local_regions() + more.local_regions())

    dispatch_quantised, _bytes, _check_arrived = LLNetProgram.dispatch_quantised, LLNetProgram._bytes, LLNetProgram._check_arrived

    def clean_values(self, rank: int, kind: int) -> tuple[int, ...]:
        return (self.network.number, *super().clean_values(rank, kind))

    def check_agreement(self, everybody: bool = False) -> None:
        """As `MaskedProgram`, of the survivors: what a rank that died said last may have reached nobody."""
        for ended in self.ended:
            for rank in self.sim.scheduler.dead:
                ended.ranks.pop(rank, None)
        super().check_agreement(everybody)

    def _launch_signed(self, kind: str, rank: int, slot: int, handle: int, status: int, signature: Any, more: dict[str, int],
                       **tensors: object) -> None:
        net = self.shape.net
        given = {"comm": self.network.number, "remote": self.local[rank].ctypes.data + net.slot_remote(slot), "rows_valid": 1,
                 "messages": net.slot_messages(slot), "tags": net.tags} | more
        super()._launch_signed(kind, rank, slot, handle, status, signature, given, **tensors)


class LLNetMaskedRankMajorProgram(LLNetMaskedProgram, MaskedRankMajorProgram):
    """`MaskedRankMajorProgram` over teams."""

    dispatches = ll_net_masked_rank_major_dispatch
    make_dispatch_kernel = staticmethod(ll_net_masked_rank_major_dispatch.make_ll_net_masked_rank_major_dispatch)
