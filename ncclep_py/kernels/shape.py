"""What is constant in a compiled kernel."""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig, Layout, TokenType
from ncclep_py.memory_map import LocalMap, WindowMap

__all__ = ["PLAIN", "KernelShape", "Wire"]


@dataclasses.dataclass(frozen=True)
class Wire:
    """What dispatch sends of a row.

    Attributes:
        sent_bytes: bytes of one sent row, 0 for the group's rows.
        scale_bytes: bytes of the scale row beside it, 0 for none.
        quantise: bf16 rows become E4M3 with a float32 scale per 128 columns while they are sent.
        round_scales: to powers of two, `quantise` only.
    """

    sent_bytes: int = 0
    scale_bytes: int = 0
    quantise: bool = False
    round_scales: bool = False


PLAIN = Wire()
"""Rows as they are."""


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """Compile-time constants of the kernels of one (group, K, id type, layout, recipe).

    Attributes:
        num_ranks: R.
        num_experts: E.
        num_topk: K of the handle.
        row_bytes: bytes of a token row.
        token_type: element type of rows.
        idx_bytes: bytes of an expert id.
        window: byte plan of the window.
        local: byte plan of the local block.
        layout: order of received rows.
        wire: what dispatch sends of a row.
    """

    num_ranks: int
    num_experts: int
    num_topk: int
    row_bytes: int
    token_type: TokenType
    idx_bytes: int
    window: WindowMap
    local: LocalMap
    layout: Layout = Layout.EXPERT_MAJOR
    wire: Wire = PLAIN

    @classmethod
    def build(cls, config: GroupConfig, num_ranks: int, num_topk: int, idx_bytes: int, layout: Layout = Layout.EXPERT_MAJOR,
              wire: Wire = PLAIN) -> KernelShape:
        """The constants for a handle of `num_topk` whose ids have `idx_bytes` bytes."""
        return cls(num_ranks, config.num_experts, num_topk, config.row_bytes, config.token_type, idx_bytes,
                   WindowMap.build(config, num_ranks), LocalMap.build(config), layout, wire)

    @property
    def sent_bytes(self) -> int:
        """Bytes of one row as dispatch sends it."""
        return self.wire.sent_bytes or self.row_bytes

    @property
    def piece_bytes(self) -> int:
        """What warps share out of a row, 16 bytes being the least: sent vectors, or stretches of 512 columns."""
        return self.row_bytes // 64 if self.wire.quantise else self.sent_bytes

    @property
    def given_bytes(self) -> int:
        """Bytes of one row as the caller gives it."""
        return self.row_bytes if self.wire.quantise else self.sent_bytes

    @property
    def piece_vectors(self) -> int:
        """Vectors of a given row for each 16 bytes of `piece_bytes`."""
        return self.given_bytes // self.piece_bytes

    @property
    def slot_scales(self) -> int:
        """Offset of received scale rows in a slot: after all rows."""
        rows = self.window.plane_rows if self.layout is Layout.RANK_MAJOR else self.window.slot_rows
        return rows * self.sent_bytes
