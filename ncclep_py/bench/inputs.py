"""What every rank sends, made from a case and a rank alone, so that any rank can work out what it must receive from all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ncclep_py.bench.routing import recorded_weights
from ncclep_py.reference import quantize_ds_fp8
from ncclep_py.testing import stamped_tokens

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case

__all__ = ["sent_rows", "tokens_of", "weights_of"]


def tokens_of(case: Case, rank: int, device: Any) -> torch.Tensor:
    """A rank's rows ``[T, hidden]``: random, the first columns say rank, token % 128, token // 128. High throughput makes them where they are
    needed, because there may be gigabytes of them; the CPU's numbers differ from the GPU's."""
    if case.algorithm == "ll":
        return stamped_tokens(rank, case.tokens, case.hidden, case.torch_dtype()).to(device)
    rows = torch.randn(case.tokens, case.hidden, dtype=case.torch_dtype(), device=device, generator=torch.Generator(device).manual_seed(rank))
    token = torch.arange(case.tokens, device=device)
    rows[:, 0], rows[:, 1], rows[:, 2] = rank, token % 128, token // 128
    return rows


def weights_of(case: Case, rank: int) -> torch.Tensor:
    """A rank's router weights ``[T, K]`` float32 on the CPU: recorded with the routing, else positive and 1 per token together."""
    recorded = recorded_weights(case, rank)
    if recorded is not None:
        return recorded
    weights = torch.rand(case.tokens, case.topk, generator=torch.Generator().manual_seed(rank)) + 0.01
    return weights / weights.sum(1, keepdim=True)


def sent_rows(case: Case, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales as they travel: `tokens` themselves, or with a recipe E4M3 and a float32 scale per 128 columns, on the device of `tokens`.

    What ds_fp8 makes is worked out on the CPU, by the oracle; what a caller of quant_fwd sends may be any bits, made where they are needed.
    """
    if case.recipe == "none":
        return tokens, None
    rows, scales = quantize_ds_fp8(tokens.cpu() if case.recipe == "ds_fp8" else tokens)
    return rows.to(tokens.device), scales.to(tokens.device)


def turned_back(rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows for combine out of received ones: what the experts of a benchmark do."""
    return rows if scales is None else (rows.float() * scales.repeat_interleave(128, -1)).to(dtype)
