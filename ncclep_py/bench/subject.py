"""What an implementation shows the benchmark, so that all are checked and timed by the same code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ncclep_py.bench.machine import clocks

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.bench.timer import Timer
    from ncclep_py.communicator import Communicator

__all__ = ["Subject", "measure"]

FLUSH_BYTES = 320 << 20


class Subject(ABC):
    """One rank's inputs and buffers of one implementation for one case.

    Attributes:
        capturable: whether a pair can be captured into a graph.
        exact: whether `check` compares bits.
    """

    capturable, exact = True, True

    def __init__(self, comm: Communicator, case: Case) -> None:
        self.comm, self.case = comm, case

    @abstractmethod
    def pair(self) -> None:
        """One dispatch and one combine, experts the identity."""

    @abstractmethod
    def check(self) -> bool:
        """Whether received and combined rows are what they must be."""

    def dispatch(self) -> Any:
        """One dispatch alone, if it can be repeated."""
        raise NotImplementedError

    def actions(self) -> dict[str, Callable[[], Any]]:
        """Further actions to be timed as slopes, by the name of their figure."""
        return {}

    def more_times(self, timer: Timer) -> dict[str, list[float]]:
        """Figures that are no slopes; all ranks call it."""
        return {}

    def close(self) -> None:
        """Give everything back."""
        return None


def measure(subject: Subject, timer: Timer | None, processes: bool) -> dict[str, Any]:
    """Check, time, check again.

    Args:
        subject: what is measured.
        timer: None: only check (the simulator's times say nothing).
        processes: whether ranks are processes of their own.

    Returns:
        ``verified``, lists of microseconds per figure under ``times``, ``host_us`` per operation, ``clocks_mhz`` of rank 0's GPU after the pairs.
    """
    told: dict[str, Any] = {"verified": subject.check(), "exact": subject.exact, "times": {}, "host_us": [], "clocks_mhz": None}
    if timer is not None:
        times = told["times"]
        if subject.capturable:
            times["pair"], times["chained_pair"] = timer.replayed(subject.pair), timer.chained(subject.pair)
            if subject.comm.rank == 0:
                told["clocks_mhz"] = clocks(subject.comm.device)   # at once: they fall when there is nothing to do
            times |= {name: timer.chained(action) for name, action in subject.actions().items() if not name.startswith("flush")}
            times |= _flushed(subject, timer) | subject.more_times(timer)
        if processes:
            times["eager_pair"] = timer.eager(subject.pair)
            if "step" in subject.actions():
                times["eager_step"] = timer.eager(subject.actions()["step"])
        told["host_us"] = [t / 2 for t in timer.host(subject.pair, subject.comm.synchronize)]
        told["verified"] = subject.check() and told["verified"]
        if not subject.capturable:
            _try_captured(subject, timer, told)
    return told


def _try_captured(subject: Subject, timer: Timer, told: dict[str, Any]) -> None:
    """Parts of a subject that cannot be captured as a whole; last, since a capture that fails leaves nothing to go on with."""
    try:
        told["times"] |= {name: timer.chained(action) for name, action in subject.actions().items()}
    except Exception as e:   # noqa: BLE001  (of a library that is not ours)
        told["note"] = f"{', '.join(subject.actions())} could not be captured: {type(e).__name__}: {e}"[:300]


def _flushed(subject: Subject, timer: Timer) -> dict[str, list[float]]:
    """The pair with 320 MB written between dispatch and combine by all ranks together, less what writing alone takes."""
    actions = subject.actions()
    if "flushed_pair" not in actions:
        return {}
    alone = sorted(timer.chained(actions["flush"]))
    middle = alone[len(alone) // 2]
    return {"flushed_pair": [t - middle for t in timer.chained(actions["flushed_pair"])]}
