"""`autograd`'s functions as operators of ``torch.library``, for programs under ``torch.compile``.

    order = new_order(device)                              # outside of what is compiled, as is every handle.update
    rows, scale, ids, stamp, order = dispatch(key_of(handle), num_rows, False, tokens, topk_weights, order)
    tokens, order = combine(key_of(handle), experts(rows) * scale, order, stamp, num_tokens)

Fake implementations give shapes without a device or peers, and outputs alias nothing. The threaded order tensor keeps operations in the program's
order on every rank, forward and (as its gradient) backward, whatever a compiler knows of them. `stamp` is the number of the routing: backward
over another one is an `EpStaleError`.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ncclep_py.arguments import stale
from ncclep_py.autograd import BACKWARD, CHANGED, COMBINE_BACKWARD, needs_threads
from ncclep_py.config import ExpertIdKind, Layout
from ncclep_py.handle import CombineInputs, CombineOutputs, DispatchOutputs, LayoutInfo
from ncclep_py.stamp import trigger

if TYPE_CHECKING:
    from ncclep_py.ht_handle import HTHandle

__all__ = ["combine", "dispatch", "key_of", "new_order"]

_KEYS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_HANDLES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_NEXT = itertools.count(1)


def key_of(handle: HTHandle) -> str:
    """The name by which operators know a handle; text, which compilers never make symbolic.

    Raises:
        EpError: in a `LocalWorld` whose rank programs share a thread: torch keeps what an operator is in the middle of per thread.
    """
    if not handle.group.comm.can_differentiate:
        raise needs_threads("operators of torch.library")
    key = _KEYS.get(handle)
    if key is None:
        key = _KEYS[handle] = str(next(_NEXT))
        _HANDLES[key] = handle
    return key


def new_order(device: torch.device) -> torch.Tensor:
    """The beginning of an order: a tensor that every operation takes and gives anew."""
    return torch.zeros((), device=device, requires_grad=True)


def _handle(key: str, stamp: torch.Tensor | None = None) -> HTHandle:
    """The handle of a name; `stamp` is its routing at the forward pass."""
    handle = _HANDLES.get(key)
    if handle is None:
        raise stale(f"handle {key} is gone; keep a handle until its backward has run")
    if stamp is not None and int(stamp) != handle.routing:
        raise stale(CHANGED)
    return handle


def _shapes(handle: HTHandle, num_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of received weights and ids."""
    flat = handle.layout is Layout.FLAT
    return (num_rows, handle.num_topk) if flat else (num_rows,), (num_rows, handle.num_topk) if flat else (0,)


# ---- forward ---------------------------------------------------------------------------------------------------------------
@torch.library.custom_op("ncclep_py::dispatch", mutates_args=())
def dispatch(key: str, num_rows: int, global_ids: bool, tokens: torch.Tensor, topk_weights: torch.Tensor,
             order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, their weights, ids (empty in EXPERT_MAJOR), the routing's number, and the order."""
    handle = _handle(key)
    weights, ids = _shapes(handle, num_rows)
    made = DispatchOutputs(tokens.new_zeros(num_rows, tokens.shape[1]), topk_weights.new_zeros(weights))
    received = torch.full(ids, -1, dtype=torch.int64, device=tokens.device)
    made.topk_idx = received if handle.layout is Layout.FLAT else None
    kind = LayoutInfo(recv_topk_idx_kind=ExpertIdKind.GLOBAL if global_ids else ExpertIdKind.AUTO)
    handle.dispatch(tokens.contiguous(), made, kind, topk_weights=topk_weights.contiguous())
    handle.copied_out(False)
    assert made.topk_weights is not None
    return made.tokens, made.topk_weights, received, trigger(handle.routing), order.clone()


@dispatch.register_fake
def _(key: str, num_rows: int, global_ids: bool, tokens: torch.Tensor, topk_weights: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights, ids = _shapes(_handle(key), num_rows)
    return (tokens.new_empty(num_rows, tokens.shape[1]), topk_weights.new_empty(weights), tokens.new_empty(ids, dtype=torch.int64),
            torch.empty((), dtype=torch.int64, device="cpu"), torch.empty_like(order))


@torch.library.custom_op("ncclep_py::combine", mutates_args=())
def combine(key: str, rows: torch.Tensor, order: torch.Tensor, stamp: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Combined tokens and the order; `num_tokens` is T, for the fake implementation."""
    return _handle(key, stamp).combine(rows.contiguous()), order.clone()


@combine.register_fake
def _(key: str, rows: torch.Tensor, order: torch.Tensor, stamp: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
    return rows.new_empty(num_tokens, rows.shape[1]), torch.empty_like(order)


# ---- backward --------------------------------------------------------------------------------------------------------------
@torch.library.custom_op("ncclep_py::dispatch_backward", mutates_args=())
def dispatch_backward(key: str, stamp: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor,
                      num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of tokens, of router weights, and the order."""
    into = CombineOutputs()
    tokens = _handle(key, stamp).combine(CombineInputs(rows.contiguous(), weights.contiguous()), into, COMBINE_BACKWARD)
    assert into.topk_weights is not None
    return tokens, into.topk_weights, order.clone()


@dispatch_backward.register_fake
def _(key: str, stamp: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
    return rows.new_empty(num_tokens, rows.shape[1]), weights.new_empty(num_tokens, _handle(key).num_topk), torch.empty_like(order)


@torch.library.custom_op("ncclep_py::combine_backward", mutates_args=())
def combine_backward(key: str, stamp: torch.Tensor, grad: torch.Tensor, order: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows, and the order."""
    made = DispatchOutputs(grad.new_zeros(num_rows, grad.shape[1]))
    handle = _handle(key, stamp)
    handle.dispatch(grad.contiguous(), made, config=BACKWARD)
    handle.copied_out(True)
    return made.tokens, order.clone()


@combine_backward.register_fake
def _(key: str, stamp: torch.Tensor, grad: torch.Tensor, order: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, ...]:
    return grad.new_empty(num_rows, grad.shape[1]), torch.empty_like(order)


# ---- which is whose gradient -------------------------------------------------------------------------------------------------
def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.key, ctx.num_tokens, ctx.stamp = inputs[0], inputs[3].shape[0], _handle(inputs[0]).stamp
    ctx.save_for_backward(output[3])


def _same_routing(ctx: Any) -> torch.Tensor:
    """The saved number. While a compiler traces it is no number yet; what runs, a recomputed one, must be that of the forward pass's own update."""
    saved: torch.Tensor = ctx.saved_tensors[0]
    if type(saved) is torch.Tensor and not ctx.stamp.stands_for(_handle(ctx.key)):
        raise stale(CHANGED)
    return saved


def _of_dispatch(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, ids: Any, stamp: Any, order: torch.Tensor) -> tuple[Any, ...]:
    tokens, router, order = dispatch_backward(ctx.key, _same_routing(ctx), rows, weights, order, ctx.num_tokens)
    return None, None, None, tokens, router, order


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.key, ctx.num_rows, ctx.stamp = inputs[0], inputs[1].shape[0], _handle(inputs[0]).stamp
    ctx.save_for_backward(inputs[3])


def _of_combine(ctx: Any, grad: torch.Tensor, order: torch.Tensor) -> tuple[Any, ...]:
    rows, order = combine_backward(ctx.key, _same_routing(ctx), grad, order, ctx.num_rows)
    return None, rows, order, None, None


dispatch.register_autograd(_of_dispatch, setup_context=_keep_dispatch)
combine.register_autograd(_of_combine, setup_context=_keep_combine)
