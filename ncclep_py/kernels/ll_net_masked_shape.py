"""What is constant in a compiled low-latency kernel with masks over several teams."""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.ll_net_member_map import LLNetMemberMap

__all__ = ["LLNetMaskedShape"]


@dataclasses.dataclass(frozen=True)
class LLNetMaskedShape(LLNetShape):
    """`LLNetShape`, and the plan of what masks add."""

    members: LLNetMemberMap = None   # type: ignore[assignment]  # always given; the fields before it have defaults

    @classmethod
    def over(cls, shape: KernelShape, config: GroupConfig, team_size: int) -> LLNetMaskedShape:
        """The shape of one team with teams of `team_size` ranks."""
        base = LLNetShape.over(shape, config, team_size)
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(LLNetShape)}
        return cls(**fields, members=LLNetMemberMap.build(config, shape.num_ranks, base.net))
