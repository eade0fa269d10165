"""From the times of all ranks to a figure with its spread, and whether two figures differ."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

__all__ = ["Figure", "differ", "slowest"]

LEAST_NOISE = 0.02
"""Of a figure: what two runs of the same program on the same machine differ by, however steady each was."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Microseconds.

    Attributes:
        median: over replays, of the slowest rank.
        low, high: quartiles (nearest rank) of the same.
        replays: how many.
    """

    median: float
    low: float
    high: float
    replays: int

    def as_json(self) -> dict[str, float]:
        """For a record; two digits after the point."""
        return {"median_us": round(self.median, 2), "low_us": round(self.low, 2), "high_us": round(self.high, 2), "replays": self.replays}

    @classmethod
    def from_json(cls, held: dict[str, float]) -> Figure:
        """From a record."""
        return cls(held["median_us"], held["low_us"], held["high_us"], int(held["replays"]))

    @property
    def noise(self) -> float:
        """By how much the median may be off: half the distance of the quartiles, at least `LEAST_NOISE` of it."""
        return max((self.high - self.low) / 2, LEAST_NOISE * abs(self.median))


def slowest(by_rank: Sequence[Sequence[float]]) -> Figure:
    """The slowest rank of each replay, then median and quartiles over replays. All ranks have the same number of replays, at least one."""
    counts = {len(times) for times in by_rank}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"every rank needs the same number of times, at least one; got {sorted(counts)}")
    worst = sorted(max(step) for step in zip(*by_rank, strict=True))
    last = len(worst) - 1
    return Figure(statistics.median(worst), worst[round(last / 4)], worst[round(3 * last / 4)], len(worst))


def differ(before: Figure, after: Figure) -> bool:
    """Whether the distance of two figures is more than both noises together."""
    return abs(after.median - before.median) > before.noise + after.noise
