"""What is constant in a compiled low-latency kernel over several teams."""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.ll_net_map import LLNetMap

__all__ = ["LLNetShape"]


@dataclasses.dataclass(frozen=True)
class LLNetShape(KernelShape):
    """`KernelShape`, and the plan of what several teams add."""

    net: LLNetMap = None   # type: ignore[assignment]  # always given; the fields before it have defaults

    @classmethod
    def over(cls, shape: KernelShape, config: GroupConfig, team_size: int) -> LLNetShape:
        """The shape of one team with teams of `team_size` ranks."""
        fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(KernelShape)}
        return cls(**fields, net=LLNetMap.build(config, shape.num_ranks, team_size, shape.window, shape.local))
