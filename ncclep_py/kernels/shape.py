"""What is constant in a compiled kernel."""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig, Layout, TokenType
from ncclep_py.memory_map import LocalMap, WindowMap

__all__ = ["KernelShape"]


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """Compile-time constants of the kernels of one (group, K, id type, layout).

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

    @classmethod
    def build(cls, config: GroupConfig, num_ranks: int, num_topk: int, idx_bytes: int, layout: Layout = Layout.EXPERT_MAJOR) -> KernelShape:
        """The constants for a handle of `num_topk` whose ids have `idx_bytes` bytes."""
        return cls(num_ranks, config.num_experts, num_topk, config.row_bytes, config.token_type, idx_bytes,
                   WindowMap.build(config, num_ranks), LocalMap.build(config), layout)
