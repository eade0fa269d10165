"""What goes into dispatch and combine and comes out: tensors by name, with shapes, types and what is valid in them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ncclep_py.config import ExpertIdKind

if TYPE_CHECKING:
    import torch

__all__ = ["CombineInputs", "CombineOutputs", "DispatchInputs", "DispatchOutputs", "LayoutInfo"]


@dataclasses.dataclass
class LayoutInfo:
    """Counts of received rows; fields a caller leaves out are allocated.

    Attributes:
        expert_counters: LL EXPERT_MAJOR, ``[L]`` int32: rows received by each local expert. HT, filled by `HTHandle.update`: tokens of each local
            expert (FLAT), or rows of its zone with pads (EXPERT_MAJOR), within the budget.
        src_rank_counters: LL RANK_MAJOR, ``[R]`` int32: rows received from each rank.
        recv_topk_idx_kind: LL RANK_MAJOR and HT FLAT, numbering of received ids, the same on all ranks: from this rank's first expert (LOCAL) or the
            group's.
        expert_offsets: HT EXPERT_MAJOR, ``[L]``: first row of each local expert's zone, within the budget.
        recv_total_counter: HT, ``[1]``: received rows before any drop; EXPERT_MAJOR counts pads.
        expert_counts_unpadded: HT, ``[L]``: rows of each local expert within the budget, without pads.
    """

    expert_counters: torch.Tensor | None = None
    src_rank_counters: torch.Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO
    expert_offsets: torch.Tensor | None = None
    recv_total_counter: torch.Tensor | None = None
    expert_counts_unpadded: torch.Tensor | None = None


@dataclasses.dataclass
class DispatchInputs:
    """What a rank sends.

    Attributes:
        tokens: ``[T, hidden]``, dtype of the group; QUANT_FWD: ``[T, W]`` of any dtype in `recipes.opaque_types`.
        topk_weights: ``[T, K]`` float32, required by RANK_MAJOR, which carries them.
        scales: QUANT_FWD: ``[T, S]`` of a dtype in `recipes.scale_types`; rows of both are multiples of 16 bytes.
    """

    tokens: torch.Tensor
    topk_weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@dataclasses.dataclass
class DispatchOutputs:
    """What a rank received.

    Attributes:
        tokens: EXPERT_MAJOR ``[L, R * M, hidden]``; rows ``[0, expert_counters[l])`` of plane l are valid, in (source rank, token, k) order,
            others are not touched. HT ``[N, hidden]``: FLAT one row per token in (source rank, token) order, EXPERT_MAJOR a zone per local expert in
            that order, pads zero. RANK_MAJOR ``[R, M, hidden]``; rows ``[0, src_rank_counters[s])`` of plane s are valid, in token order.
        topk_weights: RANK_MAJOR ``[R, M, K]`` float32, all K weights of the token; rows after the valid ones are not touched. HT FLAT ``[N, K]``,
            placed like `topk_idx`, 0 elsewhere; HT EXPERT_MAJOR ``[N]``, pads 0.
        topk_idx: RANK_MAJOR ``[R, M, K]`` int32, the expert at each position k if it lives on this rank, else -1; rows after the valid ones are -1.
            HT FLAT ``[N, K]`` int64: the token's experts on this rank, ascending, compacted to the left, then -1.
        scales: QUANT_FWD, DS_FP8: placed like tokens, ``[.., S]`` of the scales' dtype or ``[.., hidden / 128]`` float32. Recipes share the slot with
            the group's rows: tokens and scales are valid until the handle's combine is *called* with other rows, which go where they are.
        layout_info: the counts.
        generation: number of the dispatch that made this.
    """

    tokens: torch.Tensor = None   # type: ignore[assignment]  # set on everything dispatch returns
    topk_weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    layout_info: LayoutInfo = dataclasses.field(default_factory=LayoutInfo)
    generation: int = 0


@dataclasses.dataclass
class CombineInputs:
    """What a rank's experts computed.

    Attributes:
        tokens: same shape and row order as `DispatchOutputs.tokens`; that tensor itself or one in a window of
            `Group.create_window` (no copy), or any other: the rows there are, counted by the tensor that dispatch left them in, are read and
            written once more, ``2 * rows * hidden * itemsize`` bytes (not in a ``send_only`` combine, which sends them from where they are).
            RANK_MAJOR: each row already summed over this rank's experts of the token, weights included.
        topk_weights: for passes that need them; RANK_MAJOR ignores them.
        scales: NVFP4: the fp32 scale of each row, ``[L, R * M, 1]`` or ``[R, M, 1]``. NVFP4 packs rows in place, so these are gone afterwards.
    """

    tokens: torch.Tensor
    topk_weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@dataclasses.dataclass
class CombineOutputs:
    """What a rank gets back.

    Attributes:
        tokens: ``[T, hidden]``; allocated if left out.
        topk_weights: LL EXPERT_MAJOR: ``[T, K]`` float32 router weights. An *input*; the name is `nccl.ep`'s. RANK_MAJOR ignores it.
    """

    tokens: torch.Tensor = None   # type: ignore[assignment]  # set once combine has it
    topk_weights: torch.Tensor | None = None
