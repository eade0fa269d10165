"""Dispatch and combine of a HIGH_THROUGHPUT handle as differentiable functions: the gradient of one is the other, backward.

    handle.update(topk_idx)                                    # routing; not differentiable, once per layer and step
    received = ep_dispatch(handle, tokens, topk_weights)       # rows, their weights (and ids, FLAT)
    out = ep_combine(handle, experts(received))                # rows with their weights multiplied in

Every rank calls the same functions in the same order, forward and backward; a rank that receives nothing takes part with rows that are zero. Keep
combine's output connected to dispatch's on every rank (say, do not skip the experts when there are no rows), else a rank misses a backward
operation and its peers time out.

Activation checkpointing (``torch.utils.checkpoint.checkpoint``): a block holds a layer's dispatch, experts and combine; all are recomputed, as
collective operations, right before their backward, and one slot (``num_slots``) is enough. Put the router and `update` into the block, too, with
gradients enabled: blocks may then share a handle. An update outside must stay the handle's newest until backward, else that is an `EpStaleError`;
with ``use_reentrant=True`` it cannot be seen, since the first pass leaves no nodes. A block with dispatch but not its combine needs two slots, else
its backward is an `EpError`.

Rows are copies: nothing that autograd saves lies in the window, and rows that were not received are zero, so that experts may work on all of them.
Costs over the plain calls: a copy of the received rows out of the window and one into it, and clearing the rows of a budget. A handle keeps one
routing: an update between forward and backward is an `EpStaleError` in backward, so use a handle per micro-batch. Gradients of gradients are a
RuntimeError. Backward uses a slot of its own if the group has two; a slot whose rows were copied and that waits for a combine goes to another
dispatch when none is free, and that combine is then an `EpError` on every rank. No host synchronisation with a fixed budget; with AUTO, `num_rows`
says how many rows to expect (read it from ``handle.layout_info.recv_total_counter``, which waits for the device).

In a `LocalWorld` rank programs must run in threads (``LocalWorld(..., threads=True)``); what needs gradients is refused in one without.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ncclep_py.arguments import stale
from ncclep_py.config import CombineConfig, DispatchConfig, ExpertIdKind, Layout, PassDir
from ncclep_py.errors import EpError
from ncclep_py.handle import CombineInputs, CombineOutputs, DispatchOutputs, LayoutInfo
from ncclep_py.stamp import trigger

if TYPE_CHECKING:
    from ncclep_py.ht_handle import HTHandle

__all__ = ["Received", "ep_combine", "ep_dispatch"]

CHANGED = ("the handle was updated between forward and backward; use a handle per micro-batch, and update it after its backward. Of a checkpointed "
           "block, the update belongs in the block, with gradients enabled")
BACKWARD, COMBINE_BACKWARD = DispatchConfig(pass_direction=PassDir.BWD), CombineConfig(pass_direction=PassDir.BWD)


@dataclasses.dataclass
class Received:
    """What `ep_dispatch` returns.

    Attributes:
        tokens: ``[N, hidden]``, zero where nothing was received.
        topk_weights: FLAT ``[N, K]``, EXPERT_MAJOR ``[N]``, float32, 0 where there is none.
        topk_idx: FLAT ``[N, K]`` int64, -1 where there is none; EXPERT_MAJOR None.
        layout_info: the update's counts, on the device.
    """

    tokens: torch.Tensor
    topk_weights: torch.Tensor
    topk_idx: torch.Tensor | None
    layout_info: LayoutInfo


def ep_dispatch(handle: HTHandle, tokens: torch.Tensor, topk_weights: torch.Tensor, *, num_rows: int | None = None,
                global_ids: bool = False) -> Received:
    """Send tokens ``[T, hidden]`` and router weights ``[T, K]`` float32 to their experts; differentiable in both. Collective.

    Args:
        handle: with the routing of a finished `update`.
        tokens: rows, dtype of the group.
        topk_weights: router weights.
        num_rows: N; default the budget. AUTO budgets need it: at least the received rows.
        global_ids: FLAT: number received ids over all experts, not from this rank's first.

    Example:
        >>> import torch
        >>> import ncclep_py as ep
        >>> def program(comm):
        ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1, dtype=torch.float32,
        ...                             algorithm=ep.Algorithm.HIGH_THROUGHPUT)
        ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.FLAT, torch.tensor([[1 - comm.rank]])) as handle:
        ...         x = torch.ones(1, 8, requires_grad=True)
        ...         received = ep.ep_dispatch(handle, x, torch.ones(1, 1), num_rows=1)
        ...         out = ep.ep_combine(handle, received.tokens * (comm.rank + 2))   # the expert of rank r multiplies by r + 2
        ...         out.sum().backward()
        ...         return out[0, 0].item(), x.grad[0, 0].item()
        >>> with ep.LocalWorld(2, "sim", threads=True) as world:
        ...     world.run(program)
        [(3.0, 3.0), (2.0, 2.0)]
    """
    budget = handle.group.config.max_recv_tokens_per_rank
    if num_rows is None and not budget:
        raise ValueError("num_rows must be given while max_recv_tokens_per_rank is AUTO: at least the received rows")
    _check_world(handle, tokens, topk_weights)
    rows, weights, ids = _Dispatch.apply(handle, num_rows if num_rows is not None else budget, global_ids, tokens, topk_weights)
    return Received(rows, weights, ids if handle.layout is Layout.FLAT else None, handle.layout_info)


def ep_combine(handle: HTHandle, rows: torch.Tensor) -> torch.Tensor:
    """Bring rows ``[N, hidden]``, placed as `ep_dispatch` placed them, back and add them up to ``[T, hidden]``; differentiable. Collective.

    Example:
        >>> import torch
        >>> import ncclep_py as ep
        >>> def program(comm):
        ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=2, dtype=torch.float32,
        ...                             algorithm=ep.Algorithm.HIGH_THROUGHPUT)
        ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.FLAT, torch.tensor([[0, 1]])) as handle:
        ...         weights = torch.tensor([[0.25, 0.75]], requires_grad=True)
        ...         received = ep.ep_dispatch(handle, torch.ones(1, 8), weights, num_rows=2)   # a row from each rank
        ...         out = ep.ep_combine(handle, received.tokens * received.topk_weights.sum(1, keepdim=True))
        ...         out.sum().backward()
        ...         return out[0, 0].item(), weights.grad.tolist()
        >>> with ep.LocalWorld(2, "sim", threads=True) as world:
        ...     world.run(program)[0]
        (1.0, [[8.0, 8.0]])
    """
    _check_world(handle, rows)
    return _Combine.apply(handle, rows)


def _check_world(handle: HTHandle, *inputs: torch.Tensor) -> None:
    """Refuse what would wait for ever in backward."""
    if not handle.group.comm.can_differentiate and torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        raise needs_threads("backward passes")


def needs_threads(what: str) -> EpError:
    """The exception for what torch keeps per thread, in a `LocalWorld` whose programs share one."""
    return EpError(f"{what} of a LocalWorld need a thread per rank: LocalWorld(..., threads=True)")


class _Dispatch(torch.autograd.Function):
    """Forward: dispatch. Backward: combine of the gradients, which also brings those of the weights."""

    @staticmethod
    def forward(ctx: Any, handle: HTHandle, num_rows: int, global_ids: bool, tokens: torch.Tensor,
                topk_weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = handle.layout is Layout.FLAT
        shape = (num_rows, handle.num_topk) if flat else (num_rows,)
        made = DispatchOutputs(tokens.new_zeros(num_rows, tokens.shape[1]), topk_weights.new_zeros(shape),
                               topk_idx=torch.full(shape, -1, dtype=torch.int64, device=tokens.device) if flat else None)
        kind = LayoutInfo(recv_topk_idx_kind=ExpertIdKind.GLOBAL if global_ids else ExpertIdKind.AUTO)
        handle.dispatch(tokens.detach().contiguous(), made, kind, topk_weights=topk_weights.detach().contiguous())
        handle.copied_out(False)
        _remember(ctx, handle)
        ids = made.topk_idx if made.topk_idx is not None else torch.empty(0, dtype=torch.int64, device=tokens.device)
        ctx.mark_non_differentiable(ids)
        assert made.topk_weights is not None
        return made.tokens, made.topk_weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        handle, into = _same_routing(ctx), CombineOutputs()
        tokens = handle.combine(CombineInputs(grads[0].contiguous(), grads[1].contiguous()), into, COMBINE_BACKWARD)
        return None, None, None, tokens, into.topk_weights


class _Combine(torch.autograd.Function):
    """Forward: combine. Backward: dispatch of the gradient."""

    @staticmethod
    def forward(ctx: Any, handle: HTHandle, rows: torch.Tensor) -> torch.Tensor:
        out = handle.combine(rows.detach().contiguous())
        ctx.shape = rows.shape
        _remember(ctx, handle)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        handle = _same_routing(ctx)
        made = DispatchOutputs(grads[0].new_zeros(ctx.shape))
        handle.dispatch(grads[0].contiguous(), made, config=BACKWARD)
        handle.copied_out(True)   # no combine follows if neither tokens nor weights need gradients
        return None, made.tokens


def _remember(ctx: Any, handle: HTHandle) -> None:
    """Keep the handle and its routing for backward."""
    ctx.handle, ctx.stamp = handle, handle.stamp
    ctx.save_for_backward(trigger())


def _same_routing(ctx: Any) -> HTHandle:
    """The handle, if it still has the routing of the forward pass; what a checkpoint recomputes has run then, and needs no slot any more."""
    _ = ctx.saved_tensors
    if not ctx.stamp.stands_for(ctx.handle):
        raise stale(CHANGED)
    return ctx.handle
