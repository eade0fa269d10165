"""Phases of kernels, for timelines: a kernel says ``trace = stamp(trace, WAIT_HEADS)`` where a phase begins.

Stamps cost nothing unless kernels are compiled for tracing (``GroupConfig(trace=True)``): without it the device function is empty and leaves no
instruction. Layout of what traced kernels write: ``ncclep_py.tracing``.
"""

from __future__ import annotations

import enum

__all__ = ["COUNT", "END", "HEAD", "MEET", "PACK", "ROWS", "TOTALS", "VOTE", "WAITS", "WAIT_ARRIVED", "WAIT_COUNTS", "WAIT_HEADS", "Step"]


class Step(enum.IntEnum):
    """Phases, in no order of time; numbers are what traced kernels write."""

    END = 0
    HEAD = 1
    COUNT = 2
    WAIT_HEADS = 3
    WAIT_COUNTS = 4
    ROWS = 5
    MEET = 6
    WAIT_ARRIVED = 7
    PACK = 8
    TOTALS = 9
    VOTE = 10

    @property
    def text(self) -> str:
        """The phase in words."""
        return TEXTS[self]


TEXTS = {
    Step.END: "end", Step.HEAD: "publish HEAD", Step.COUNT: "count", Step.WAIT_HEADS: "wait for HEAD", Step.WAIT_COUNTS: "wait for COUNTS",
    Step.ROWS: "rows", Step.MEET: "meet the other blocks", Step.WAIT_ARRIVED: "wait for ARRIVED",
    Step.PACK: "pack rows", Step.TOTALS: "zones and totals", Step.VOTE: "agree on the outcome",
}

WAITS = (Step.WAIT_HEADS, Step.WAIT_COUNTS, Step.MEET, Step.WAIT_ARRIVED, Step.VOTE)
"""Phases in which a block does nothing but wait for others."""

END, HEAD, COUNT, WAIT_HEADS, WAIT_COUNTS, ROWS, MEET, WAIT_ARRIVED, PACK, TOTALS, VOTE = (int(step) for step in Step)
