"""The oracle: shared by the layouts: checks of the arguments, and blank tensors. See the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = []


def _checked_ids(topk_idx: Tensor, num_experts: int) -> Tensor:
    """int64 [T, K]: the ids, with everything outside [0, num_experts) turned to -1."""
    if topk_idx.ndim != 2:
        raise ValueError(f"topk_idx must be [T, K]: got {list(topk_idx.shape)}")
    ids = topk_idx.long()
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)


def _num_local_experts(num_experts: int, num_ranks: int) -> int:
    if num_experts <= 0 or num_experts % num_ranks:
        raise ValueError(f"num_experts must divide evenly over ranks: {num_experts} over {num_ranks}")
    return num_experts // num_ranks


def _check_lists(num_ranks: int, **lists: Sequence[object] | None) -> None:
    for name, values in lists.items():
        if values is not None and len(values) != num_ranks:
            raise ValueError(f"{name} must have one entry per rank: {len(values)} for {num_ranks} ranks")


def _check_sources(tokens: Sequence[Tensor], topk_idx: Sequence[Tensor], max_dispatch_tokens_per_rank: int) -> None:
    _check_lists(len(tokens), topk_idx=topk_idx)
    for s, (rows, ids) in enumerate(zip(tokens, topk_idx, strict=True)):
        if not len(rows) == len(ids) <= max_dispatch_tokens_per_rank:
            limit = max_dispatch_tokens_per_rank
            raise ValueError(f"rank {s}: {len(rows)} tokens, {len(ids)} rows of topk_idx, at most {limit} allowed")


def _blank(shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> Tensor:
    if fill == 0:  # by bytes, because torch cannot fill every packed dtype
        return torch.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)
    return torch.empty(shape, dtype=dtype).fill_(fill)
