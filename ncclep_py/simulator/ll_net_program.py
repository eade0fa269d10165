"""Ranks of a low-latency group in several teams, for tests. See ``program``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ncclep_py.config import GroupConfig
from ncclep_py.kernels import ll_net_combine, ll_net_dispatch
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.network import Network
from ncclep_py.simulator.program import Program

__all__ = ["LLNetProgram"]


class LLNetProgram(Program):
    """`Program` over teams of `team_size` ranks; results must be those of one team."""

    shape: LLNetShape

    def __init__(self, sim: Simulator, config: GroupConfig, num_tokens: Sequence[int], team_size: int, *,
                 make_dispatch: Callable = ll_net_dispatch.make_ll_net_dispatch, make_combine: Callable = ll_net_combine.make_ll_net_combine,
                 **more: Any) -> None:
        self.team_size = team_size
        contexts = min(config.max_dispatch_tokens_per_rank, 4)
        self.network = Network(sim, team_size, contexts)
        super().__init__(sim, config, num_tokens, make_dispatch=make_dispatch, make_combine=make_combine, **more)
        self.parameters = {"dispatch": ll_net_dispatch.PARAMETERS, "combine": ll_net_combine.PARAMETERS}

    def make_shape(self, shape: KernelShape) -> LLNetShape:
        return LLNetShape.over(shape, self.config, self.team_size)

    def sizes(self) -> tuple[int, list[tuple[str, int, int]], int, list[tuple[str, int, int]]]:
        net, shape = self.shape.net, self.shape
        return net.total_bytes, shape.window.regions() + net.regions(), net.local_bytes, shape.local.regions() + net.local_regions()

    def _launch_signed(self, kind: str, rank: int, slot: int, handle: int, status: int, signature: Any, more: dict[str, int],
                       **tensors: object) -> None:
        remote = self.local[rank].ctypes.data + self.shape.net.slot_remote(slot)
        given = {"comm": self.network.number, "remote": remote, "rows_valid": 1} | more
        super()._launch_signed(kind, rank, slot, handle, status, signature, given, **tensors)
