"""Checks of a caller's tensors. Each raises a sentence naming the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.refusal import Refusal

if TYPE_CHECKING:
    import torch

__all__ = ["Seen", "check_ids", "check_tensor", "check_tokens", "refusal_of", "refused", "stale"]

ALIGNMENT = 16


def refused(error: Exception, why: Refusal) -> Exception:
    """`error`, carrying what to tell the peers."""
    error.refusal = why   # type: ignore[attr-defined]
    return error


def refusal_of(error: BaseException) -> Refusal:
    """What to tell the peers about `error`."""
    from ncclep_py.errors import EpError

    return getattr(error, "refusal", Refusal.EARLIER if isinstance(error, EpError) else Refusal.OTHER)


def check_tensor(name: str, value: Any, shape: Sequence[int | None], dtypes: Sequence[Any], device: torch.device, *, aligned: bool = True) -> None:
    """Check a dense tensor.

    Args:
        name: how the caller calls it.
        value: what came.
        shape: expected sizes, None for any.
        dtypes: allowed torch dtypes.
        device: where it must live.
        aligned: whether its first byte must be at a multiple of 16 bytes.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise refused(TypeError(f"{name} must be a torch tensor, got {type(value).__name__}"), Refusal.TYPE)
    if value.dtype not in dtypes:
        allowed = " or ".join(str(d) for d in dtypes)
        raise refused(TypeError(f"{name} must have dtype {allowed}, got {value.dtype}"), Refusal.TYPE)
    if value.device != device:
        raise refused(ValueError(f"{name} must be on {device}, got {value.device}"), Refusal.DEVICE)
    if not _fits(value.shape, shape):
        wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise refused(ValueError(f"{name} must have shape {wanted}, got {list(value.shape)}"), Refusal.SHAPE)
    if value.layout is not torch.strided:
        raise refused(ValueError(f"{name} must be dense, got layout {value.layout}"), Refusal.MEMORY)
    if value.numel() and not value.is_contiguous():
        raise refused(ValueError(f"{name} must be contiguous, got strides {list(value.stride())} for shape {list(value.shape)}"), Refusal.MEMORY)
    if aligned and value.numel() and value.data_ptr() % ALIGNMENT:
        raise refused(ValueError(f"{name} must start at a multiple of {ALIGNMENT} bytes, got address {value.data_ptr():#x}"), Refusal.MEMORY)


def _fits(sizes: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(sizes) != len(shape):
        return False
    for have, wanted in zip(sizes, shape):   # noqa: B905  (equal lengths; `strict` costs time on the way of every call)
        if wanted is not None and have != wanted:
            return False
    return True


class Seen:
    """Tensors that passed their check in the last call, so that a decoding loop over the same tensors pays for the check once."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, int, Any]] = {}

    def same(self, name: str, value: Any) -> bool:
        """Whether `value` is the tensor that passed as `name`, with the same memory and shape."""
        last = self._last.get(name)
        return last is not None and last[0] is value and last[1] == value.data_ptr() and last[2] == value.shape and value.is_contiguous()

    def passed(self, name: str, value: torch.Tensor) -> None:
        """Remember that `value` passed as `name`."""
        self._last[name] = (value, value.data_ptr(), value.shape)


def check_tokens(name: str, count: int, most: int) -> None:
    """Check a number of tokens against the group's capacity."""
    if count > most:
        raise refused(ValueError(f"{name} must have at most max_dispatch_tokens_per_rank = {most} tokens, got {count}"), Refusal.TOO_MANY_TOKENS)


def check_ids(name: str, topk_idx: torch.Tensor, num_experts: int) -> None:
    """Checked mode: read the ids on the host (synchronises) and refuse the first that is not -1 or in [0, num_experts)."""
    bad = (topk_idx >= num_experts) | (topk_idx < -1)
    if bool(bad.any()):
        token, k = (int(i) for i in bad.nonzero()[0])
        raise refused(ValueError(f"{name} must hold -1 or ids in [0, {num_experts}), got {int(topk_idx[token, k])} at token {token}, position {k}"),
                       Refusal.EXPERT_ID)


def stale(message: str) -> Exception:
    """The exception for rows or slots that something newer took."""
    from ncclep_py.errors import EpStaleError

    return refused(EpStaleError(message), Refusal.STALE)
