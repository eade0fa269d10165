"""Staged operations on the host: what is in flight between `Handle.dispatch` or `Handle.combine` with ``send_only`` and `Handle.complete`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ncclep_py.errors import EpError
from ncclep_py.signature import OpKind

if TYPE_CHECKING:
    from ncclep_py.group import Group
    from ncclep_py.handle import Handle

__all__ = ["SENDS", "Flight", "fixed_values", "take_stage"]

SENDS = {"ll_dispatch_send": "ll_dispatch_complete", "ll_combine_send": "ll_combine_complete"}
"""Complete half of each send half."""


@dataclasses.dataclass
class Flight:
    """One staged operation whose complete half is not enqueued yet.

    Attributes:
        name: kernel of its complete half.
        slot: payload slot of a dispatch, staging slot of a combine.
        own: the operation's own values for that kernel.
        tensors: tensors of both halves; held until the complete half is enqueued.
        result: what the call returned, and `complete` returns again.
        copy_from: rows to copy into the caller's plain tensor at the end, if it gave one.
    """

    name: str
    slot: int
    own: tuple[int, ...]
    tensors: tuple[Any, ...]
    result: Any
    copy_from: Any = None


def take_stage(group: Group, handle_id: int) -> int:
    """A free staging slot, by the same rule on every rank; ``EpError`` on every rank if there is none."""
    owner = group.staging_owner
    if 0 not in owner:
        raise EpError(f"all {len(owner)} staging slots hold combines in flight; complete one, or set GroupConfig.num_staging_slots higher")
    stage = owner.index(0)
    owner[stage] = handle_id
    return stage


def fixed_values(handle: Handle, name: str, slot: int, stage: int) -> tuple[int, ...]:
    """What follows an operation's own values in a staged kernel, up to ``status`` or ``timeout``."""
    group = handle.group
    plan, own, (local, _) = group.map, group.local_map, group.addresses()
    flight = slot if "dispatch" in name else group.config.num_slots + stage
    flying = (local + own.flight(flight), plan.flight(flight))
    if name in ("ll_dispatch_send", "ll_dispatch_complete"):
        signature = group.signature(OpKind.STAGED_DISPATCH, handle.layout, slot, handle.num_topk)
        header = local + own.header(slot)
        if name == "ll_dispatch_complete":
            return (header, *flying, signature)
        return (plan.slot(slot), local + own.table(slot), header, plan.origin(slot), local + own.keep(slot), *flying, handle.id, signature)
    signature = group.signature(OpKind.STAGED_COMBINE, handle.layout, stage, handle.num_topk)
    copied, staging, released = local + own.copy(stage), plan.stage(stage), plan.release(stage)
    if name == "ll_combine_complete":
        return (copied, staging, *flying, released, signature)
    return (local + own.table(slot), copied, local + own.header(slot), plan.origin(slot), local + own.keep(slot), staging, *flying, released,
            handle.id, signature)
