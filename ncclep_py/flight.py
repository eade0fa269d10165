"""Staged operations on the host: what is in flight between `Handle.dispatch` or `Handle.combine` with ``send_only`` and `Handle.complete`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ncclep_py.errors import EpError
from ncclep_py.signature import OpKind

if TYPE_CHECKING:
    from ncclep_py.group import Group
    from ncclep_py.handle import Handle
    from ncclep_py.recipes import Sent

__all__ = ["DONE", "REFUSED", "SENDS", "Flight", "fixed_values", "take_stage"]

SENDS = {"ll_dispatch_send": "ll_dispatch_complete", "ll_rank_major_send": "ll_rank_major_complete", "ll_combine_send": "ll_combine_complete"}
"""Complete half of each send half."""

DONE = {"dispatch": "done dispatch", "combine": "done combine"}
"""Names of operations of groups with ``enable_mask`` that were called with ``send_only``: they are over, and `complete` only says so."""

REFUSED = ""
"""Name of the complete half of an operation this rank refused: it is enqueued already, and `complete` only frees the staging slot."""


@dataclasses.dataclass
class Flight:
    """One staged operation whose complete half is not enqueued yet.

    Attributes:
        name: kernel of its complete half.
        slot: payload slot of a dispatch, staging slot of a combine.
        own: the operation's own values for that kernel.
        tensors: tensors of both halves; held until the complete half is enqueued.
        result: what the call returned, and `complete` returns again.
        copies: (caller's plain tensor, what to copy into it at the end).
        sent: a dispatch's recipe.
        place: number of the user window a dispatch writes to, -1 for its slot.
    """

    name: str
    slot: int
    own: tuple[int, ...]
    tensors: tuple[Any, ...]
    result: Any
    copies: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    sent: Sent | None = None
    place: int = -1


def take_stage(group: Group, handle_id: int) -> int:
    """A free staging slot, by the same rule on every rank; ``EpError`` on every rank if there is none."""
    owner = group.staging_owner
    if 0 not in owner:
        raise EpError(f"all {len(owner)} staging slots hold combines in flight; complete one, or set GroupConfig.num_staging_slots higher")
    stage = owner.index(0)
    owner[stage] = handle_id
    return stage


def fixed_values(handle: Handle, name: str, slot: int, stage: int, sent: Sent | None, place: int) -> tuple[int, ...]:
    """What follows an operation's own values in the kernels of ``ll_staged`` but the send half of dispatch, up to ``status`` or ``timeout``."""
    group = handle.group
    plan, own, (local, _) = group.map, group.local_map, group.addresses()
    if name == "ll_rank_major_complete":
        return (plan.slot(slot), local + own.header(slot), local + own.keep(slot), local + own.flight(slot), plan.arrival(slot))
    if name == "ll_dispatch_complete":
        named = slot if place < 0 else group.config.num_slots + place
        signature = group.signature(OpKind.STAGED_DISPATCH, handle.layout, named, handle.num_topk, False, sent)
        return (local + own.header(slot), local + own.flight(slot), plan.flight(slot), signature)
    flight = group.config.num_slots + stage
    flying, released = (local + own.flight(flight), plan.flight(flight)), plan.release(stage)
    signature = group.signature(OpKind.STAGED_COMBINE, handle.layout, stage, handle.num_topk)
    if name == "ll_combine_complete":
        return (local + own.copy(stage), plan.stage(stage), *flying, released, signature)
    return (local + own.table(slot), local + own.copy(stage), local + own.header(slot), plan.origin(slot), local + own.keep(slot), plan.stage(stage),
            *flying, released, handle.id, signature)
