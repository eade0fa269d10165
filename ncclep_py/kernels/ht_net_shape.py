"""What is constant in a compiled HIGH_THROUGHPUT kernel over several teams."""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.ht_net_map import HTNetMap
from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.shape import PLAIN, Wire

__all__ = ["HTNetShape"]


@dataclasses.dataclass(frozen=True)
class HTNetShape(HTShape):
    """`HTShape` and the plan of what several teams add to it.

    Attributes:
        net: that plan.
    """

    net: HTNetMap

    @classmethod
    def over_teams(cls, config: GroupConfig, num_ranks: int, team_size: int, num_topk: int, idx_bytes: int, layout: Layout, alignment: int,
                   num_blocks: int, wire: Wire = PLAIN, chunk_tokens: int = 0) -> HTNetShape:
        """The constants for a handle; `chunk_tokens` as in `HTNetMap.build`."""
        one = HTShape.build(config, num_ranks, num_topk, idx_bytes, layout, alignment, num_blocks, wire)
        fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(HTShape)}
        return cls(**fields, net=HTNetMap.build(config, num_ranks, team_size, one.window, one.local, chunk_tokens))
