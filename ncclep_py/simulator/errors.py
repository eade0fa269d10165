"""What a run of the simulator can find wrong. Every error carries the seed and the mode that replay it."""

from __future__ import annotations

__all__ = ["DeadlockError", "EndlessError", "OutOfBoundsError", "RaceError", "SimulationError", "UniformityError"]


class SimulationError(RuntimeError):
    """Base of everything the simulator reports.

    Attributes:
        seed: seed of the scheduler; the same seed, mode and program give the same schedule.
        mode: ``fair``, ``adversarial`` or ``explore``.
        schedule: choices of an exhaustive exploration that lead here, None otherwise.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.seed: int | None = None
        self.mode: str | None = None
        self.schedule: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.mode is None:
            return self.message
        how = f"schedule={self.schedule}" if self.schedule is not None else f"seed={self.seed}, mode={self.mode!r}"
        return f"{self.message}\n  replay with {how}"


class RaceError(SimulationError):
    """Two accesses to the same bytes, at least one of them a write, that nothing orders."""


class DeadlockError(SimulationError):
    """Nothing can run, and not everything is done."""


class EndlessError(SimulationError):
    """A kernel that goes on and on."""


class OutOfBoundsError(SimulationError):
    """An access outside of registered memory, or to private memory of another rank."""


class UniformityError(SimulationError):
    """Warps of a block disagree about a block-scope operation."""
