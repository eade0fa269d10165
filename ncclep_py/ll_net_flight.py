"""What kernels of LOW_LATENCY groups over several teams get: fused operations, and both halves of staged ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclep_py.signature import OpKind

if TYPE_CHECKING:
    from ncclep_py.ll_net_group import LLNetGroup, LLNetHandle
    from ncclep_py.recipes import Sent

__all__ = ["net_values", "signature_of"]

STAGED = {"ll_dispatch_send": OpKind.STAGED_DISPATCH, "ll_dispatch_complete": OpKind.STAGED_DISPATCH, "ll_rank_major_send": OpKind.STAGED_DISPATCH,
          "ll_combine_send": OpKind.STAGED_COMBINE, "ll_combine_complete": OpKind.STAGED_COMBINE}
"""Kind of operation of the halves whose words carry a signature."""


def signature_of(group: LLNetGroup, handle: LLNetHandle, name: str, slot: int, stage: int, global_ids: bool, sent: Sent | None,
                 place: int = -1) -> int:
    """The signature of an operation in a payload slot or user window `place`, of a staged combine in a staging slot."""
    kind = STAGED.get(name) or (OpKind.COMBINE if "combine" in name else OpKind.DISPATCH)
    named = slot if place < 0 else group.config.num_slots + place
    where = stage if kind is OpKind.STAGED_COMBINE else named
    return group.signature(kind, handle.layout, where, handle.num_topk, global_ids, sent, int(name == "ll_nvfp4_combine"))


def net_values(group: LLNetGroup, handle: LLNetHandle, name: str, slot: int, stage: int, own: tuple[int, ...],
               place: int = -1) -> tuple[int, ...]:
    """Values of a kernel in the order of its parameters, up to `handle`, `signature` or `timeout`.

    `own`: the operation's own, for one team; `place`: number of the user window its rows are in, -1 for the slot; staged ones use the slot.
    """
    plan, local_map, net, (local, record) = group.map, group.local_map, group.net, group.addresses()
    first = (group.network.address, group.window.handle, group.rank, local, record)
    if name == "ll_combine_complete":
        return (*first, *own, *_stage(group, stage))
    at, table, remote, header = plan.slot(slot), local + local_map.table(slot), local + net.slot_remote(slot), local + local_map.header(slot)
    payload = (group.window.handle, at) if place < 0 else (group.user_windows[place].handle, 0)
    if name in ("ll_combine", "ll_nvfp4_combine"):
        return (*first, *own, *((1,) if name == "ll_combine" else ()), *payload, table, remote, header)
    origins, kept, flight = plan.origin(slot), local + local_map.keep(slot), local + local_map.flight(slot)
    messages, flying, arrivals = net.slot_messages(slot), plan.flight(slot), plan.arrival(slot)
    if name == "ll_combine_send":
        rows, num_tokens = own
        copied, *staging = _stage(group, stage)
        return (*first, num_tokens, at, table, remote, copied, header, origins, kept, rows, *staging)
    if name == "ll_dispatch_complete":
        return (*first, at, remote, messages, header, kept, flight, flying)
    if name == "ll_rank_major_complete":
        return (*first, *own, at, remote, messages, header, kept, flight, arrivals)
    if not handle._rank_major:
        words: tuple[int, ...] = (flying,)
    else:
        words = (arrivals, arrivals) if name == "ll_rank_major_send" else (plan.arrived, net.tags)
    routing = (at,) if handle._rank_major else ()   # ids and weights
    return (*first, *own, *payload, *routing, table, remote, messages, header, origins, kept, flight, *words)


def _stage(group: LLNetGroup, stage: int) -> tuple[int, ...]:
    """A staging slot: its row table, rows, flight, the flight's words, RELEASED, and the first of its signals."""
    plan, local_map, (local, _) = group.map, group.local_map, group.addresses()
    number = group.config.num_slots + stage
    return (local + local_map.copy(stage), plan.stage(stage), local + local_map.flight(number), plan.flight(number), plan.release(stage),
            group.net.first_signal(stage))
