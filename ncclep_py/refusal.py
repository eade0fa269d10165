"""Why a rank's host refuses a call, as the number its peers are told."""

from __future__ import annotations

import enum

__all__ = ["SENTENCES", "Refusal"]


class Refusal(enum.IntEnum):
    """Detail of a HEAD word with status REFUSED."""

    TYPE = 1
    SHAPE = 2
    TOO_MANY_TOKENS = 3
    DEVICE = 4
    MEMORY = 5
    STALE = 6
    EXPERT_ID = 7
    OTHER = 8
    EARLIER = 9
    CLOSED = 10
    ORDER = 11


SENTENCES: dict[int, str] = {
    Refusal.TYPE: "an argument of the wrong type",
    Refusal.SHAPE: "an argument of the wrong shape",
    Refusal.TOO_MANY_TOKENS: "more tokens than max_dispatch_tokens_per_rank",
    Refusal.DEVICE: "a tensor on the wrong device",
    Refusal.MEMORY: "a tensor that is not contiguous or not 16-byte aligned",
    Refusal.STALE: "rows or a slot that something newer took, or whose dispatch failed there",
    Refusal.EXPERT_ID: "an expert id out of range",
    Refusal.OTHER: "an invalid call",
    Refusal.CLOSED: "a handle that is closed",
    Refusal.ORDER: "a call out of order: without a dispatch to combine, without a free slot, or with an operation in flight",
    Refusal.EARLIER: "its device had reported an error of an earlier operation",
}
"""What peers are told, by `Refusal`."""
