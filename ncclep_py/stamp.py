"""`Stamp`: the number of a routing, as the nodes of autograd look at it in backward.

Under ``torch.utils.checkpoint(use_reentrant=False)`` a recomputed `update` gives its routing a new number, but what runs backward are the nodes of
the first pass. So an update saves its number as activations are saved: where it is recomputed, its new number comes back, and elsewhere the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointError

if TYPE_CHECKING:
    from ncclep_py.ht_handle import HTHandle

__all__ = ["Stamp", "trigger"]


class _Keep(torch.autograd.Function):
    """A node whose saved tensor goes through the hooks of where it was made; never run backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(number)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None


class Stamp:
    """Made by an update.

    Attributes:
        number: of the update, or of its newest recomputation known.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        anchor = torch.zeros((), device="cpu", requires_grad=True)
        self._node = _Keep.apply(anchor, trigger(number)).grad_fn if torch.is_grad_enabled() else None

    def stands_for(self, handle: HTHandle) -> bool:
        """Whether the newest update of `handle` is the one of this stamp, or its recomputation."""
        if self.number != handle.routing and self._node is not None:
            try:
                self.number = int(self._node.saved_tensors[0])
            except CheckpointError:   # which gives a tensor once per backward; it has given this one
                pass
        return self.number == handle.routing


def trigger(number: int = 0) -> torch.Tensor:
    """What a node saves so that reading it makes a checkpoint recompute, on the host whatever the default device is."""
    return torch.tensor(number, device="cpu")
