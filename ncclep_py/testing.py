"""Inputs for tests, demo and benchmark: seeded routings, rows that say where they come from, and comparison by bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["bits_equal", "first_difference", "random_routing", "stamped_tokens", "weights_like"]

_VIEW = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def random_routing(rank: int, num_tokens: int, num_topk: int, num_experts: int, *, seed: int = 1234, dropped: float = 0.0,
                   dtype: Any = None) -> torch.Tensor:
    """Distinct uniform expert ids per token, ``[T, K]``; each position becomes -1 with probability `dropped`.

    Example:
        >>> from ncclep_py.testing import random_routing
        >>> ids = random_routing(rank=0, num_tokens=3, num_topk=2, num_experts=8)
        >>> ids.shape, bool((ids[:, 0] != ids[:, 1]).all())
        (torch.Size([3, 2]), True)
    """
    import torch

    g = torch.Generator().manual_seed(seed + rank)
    rows = [torch.randperm(num_experts, generator=g)[:num_topk] for _ in range(num_tokens)]
    idx = torch.stack(rows) if rows else torch.zeros(0, num_topk, dtype=torch.int64)
    if dropped:
        idx[torch.rand(idx.shape, generator=g) < dropped] = -1
    return idx.to(dtype or torch.int64)


def stamped_tokens(rank: int, num_tokens: int, hidden: int, dtype: Any, *, seed: int = 0) -> torch.Tensor:
    """Random rows ``[T, hidden]`` whose first columns hold (rank, token % 128, token // 128), small integers exact in every token type.

    Example:
        >>> import torch
        >>> from ncclep_py.testing import stamped_tokens
        >>> stamped_tokens(rank=2, num_tokens=130, hidden=8, dtype=torch.bfloat16)[129, :3].tolist()
        [2.0, 1.0, 1.0]
    """
    import torch

    g = torch.Generator().manual_seed(seed * 1000003 + rank)
    rows = torch.randn(num_tokens, hidden, generator=g)
    token = torch.arange(num_tokens, dtype=torch.float32)
    for column, stamp in enumerate((torch.full((num_tokens,), float(rank)), token % 128, token // 128)):
        if column < hidden:
            rows[:, column] = stamp
    return rows.to(dtype)


def weights_like(topk_idx: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    """Positive float32 router weights ``[T, K]`` that sum to 1 per token; NaN where the id is negative, since those must be ignored.

    Example:
        >>> import torch
        >>> from ncclep_py.testing import weights_like
        >>> weights = weights_like(torch.tensor([[4, 1], [3, -1]]))
        >>> round(weights[0].sum().item(), 3), weights[1].isnan().tolist()
        (1.0, [False, True])
    """
    import torch

    g = torch.Generator().manual_seed(seed + 77)
    weights = torch.rand(topk_idx.shape, generator=g) + 0.01
    weights = weights / weights.sum(1, keepdim=True)
    weights[topk_idx.cpu() < 0] = float("nan")
    return weights.to(torch.float32)


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same shape, dtype and bits.

    Example:
        >>> import torch
        >>> from ncclep_py.testing import bits_equal
        >>> bits_equal(torch.tensor([0.0]), torch.tensor([-0.0])), bits_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
        (False, True)
    """
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = getattr(torch, _VIEW[a.element_size()])
    return torch.equal(a.contiguous().view(kind), b.to(a.device).contiguous().view(kind))


def first_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """Where two tensors of the same shape first differ in value, for an assertion's message.

    Example:
        >>> import torch
        >>> from ncclep_py.testing import first_difference
        >>> first_difference(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 3.0]))
        '1 of 3 differ, first at (1,): got 2.0, want 0.0'
    """
    want = want.to(got.device)
    differing = ((got != want) & ~(got.isnan() & want.isnan())).nonzero()
    if not len(differing):
        return "equal"
    at = tuple(int(i) for i in differing[0])
    return f"{len(differing)} of {got.numel()} differ, first at {at}: got {got[at].item()}, want {want[at].item()}"
