"""What is constant in a compiled HIGH_THROUGHPUT kernel."""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig, Layout, OverflowPolicy, TokenType
from ncclep_py.ht_memory_map import HTMaps, HTWindowMap, chunks_of, ht_local_map
from ncclep_py.kernels.shape import PLAIN, Wire
from ncclep_py.memory_map import LocalMap

__all__ = ["HTShape"]


@dataclasses.dataclass(frozen=True)
class HTShape:
    """Compile-time constants of the kernels of one (group, layout, K, id type, row).

    Attributes:
        num_ranks: R.
        num_experts: E.
        num_topk: K of the handle.
        row_bytes: bytes of a token row of the group, which combine adds up.
        wire: what dispatch sends of a row.
        token_type: element type of rows.
        idx_bytes: bytes of an expert id.
        by_rank: 1 for FLAT, 0 for EXPERT_MAJOR.
        alignment: rows a zone is padded to, at least 1.
        chunks: shares of a block's tokens in an update.
        trap: 1 if rows beyond the budget are an error.
        window: byte plan of the window.
        local: byte plan of the local block.
        maps: byte plan of the handle's maps.
    """

    num_ranks: int
    num_experts: int
    num_topk: int
    row_bytes: int
    wire: Wire
    token_type: TokenType
    idx_bytes: int
    by_rank: int
    alignment: int
    chunks: int
    trap: int
    window: HTWindowMap
    local: LocalMap
    maps: HTMaps

    @classmethod
    def build(cls, config: GroupConfig, num_ranks: int, num_topk: int, idx_bytes: int, layout: Layout, alignment: int, num_blocks: int,
              wire: Wire = PLAIN) -> HTShape:
        """The constants for a handle."""
        by_rank = layout is Layout.FLAT
        return cls(num_ranks, config.num_experts, num_topk, config.row_bytes, wire, config.token_type, idx_bytes, int(by_rank),
                   1 if by_rank else max(alignment, 1), chunks_of(config.num_experts, num_ranks, by_rank),
                   int(config.overflow_policy is not OverflowPolicy.DROP), HTWindowMap.build(config, num_ranks), ht_local_map(config),
                   HTMaps.build(config, num_ranks, num_topk, layout, num_blocks))

    @property
    def sent_bytes(self) -> int:
        """Bytes of one sent row."""
        return self.wire.sent_bytes or self.row_bytes

    @property
    def num_local(self) -> int:
        """Experts on one rank, L."""
        return self.num_experts // self.num_ranks

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block of an update."""
        keys, columns = (self.num_ranks, self.num_experts + self.num_ranks) if self.by_rank else (self.num_experts, self.num_experts)
        return 4 * (3 * columns + self.num_ranks + self.chunks * keys)
