"""A simulator whose waits give up by the clock, whatever they wait for, and also while a slow link holds things back.

Time stands still while anything can move. When nothing can, the wait whose deadline comes first gives up, or something comes over a slow link. So
the order in which ranks give up is that of their deadlines, and puts land after the operation they belong to.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

from greenlet import getcurrent

from ncclep_py.kernels.ops import NET_OPS, OPS
from ncclep_py.simulator import Faults, Simulator, engine
from ncclep_py.simulator.network import Item, Network
from ncclep_py.simulator.scheduler import Scheduler
from ncclep_py.simulator.task import Task


class Deadlines(Scheduler):
    """A scheduler with a clock.

    Attributes:
        now: nanoseconds since the run began.
        haste: chance that a deadline passes before anything more comes over a slow link, or a stalled rank goes on;
            drawn anew when one passed.
        tie: nanoseconds between two deadlines in which the one who gives up first cannot tell the other, so that either may be first.
    """

    def __init__(self, sim: Simulator) -> None:
        super().__init__(sim)
        self.now, self.haste, self.tie = 0, 0.7, 0

    def start(self, operation: Callable[..., int], at: int, *args: int) -> int:
        """Perform an operation, whose argument number `at` is its timeout."""
        getcurrent().deadline = self.now + self.step + args[at]
        return operation(*args)

    def _inject(self) -> None:
        """Nobody gives up before his time."""

    def _is_slow(self, item: Any) -> bool:
        return isinstance(item, Item) and (item.wire.source, item.wire.target) in self.sim.network.slow_links

    def _unstick(self) -> bool:
        slow = [entry for entry in self.under_way if self._is_slow(entry[2])]
        if len(slow) < len(self.under_way):
            self.under_way = [entry for entry in self.under_way if not self._is_slow(entry[2])]
            heapq.heapify(self.under_way)
            stalled, self.stalled = self.stalled, {}   # between two kernels: nothing of it waits
            super()._unstick()
            self.stalled = stalled
            self.under_way += slow
            heapq.heapify(self.under_way)
            return True
        draw = self.sim.policy.random
        if self.stalled and draw.random() > self.haste:
            return self._resume()
        if (not slow or draw.random() < self.haste) and self._expire():
            return True
        return super()._unstick() if slow else self._resume() if self.stalled else bool(self._check_done())

    def _expire(self) -> bool:
        """The clock goes on to the first deadline, and a wait gives up; False if nobody waits."""
        waits = [t for rank, tasks in enumerate(self.waiting) if rank not in self._absent() for t in tasks if t.waits_for]
        if not waits:
            return False
        first = min(t.deadline for t in waits)
        task = self.sim.policy.random.choice([t for t in waits if t.deadline <= first + self.tie])
        self.now = max(self.now, task.deadline - self.step)
        self.haste = self.sim.policy.random.choice((0.02, 0.5, 0.97))
        task.late = True
        self._wake(task)
        return True


class Links(Network):
    """A network with slow links.

    Attributes:
        slow_links: pairs (source, target); what goes this way takes longer than waits last, or as long as it likes.
        cuts: pair -> how many more things go this way before the rest vanishes.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.slow_links: set[tuple[int, int]] = set()
        self.cuts: dict[tuple[int, int], int] = {}

    def _issue(self, task: Task, peer: int, *what: Any, **more: Any) -> None:
        left = self.cuts.get((task.rank, peer))
        if left != 0:
            super()._issue(task, peer, *what, **more)
        if left:
            self.cuts[task.rank, peer] = left - 1

    def _send(self, item: Any, piece: Any, rank: int, slow: bool = False) -> None:
        super()._send(item, piece, rank, isinstance(item, Item) and (item.wire.source, rank) in self.slow_links)


def machine(num_ranks: int, seed: int, faults: Faults | None = None, effects: Mapping[str, Sequence[str]] | None = None, **more: Any) -> Simulator:
    """A simulator with such a scheduler."""
    with mock.patch.object(engine, "Scheduler", Deadlines):
        sim = Simulator(num_ranks, seed, ("adversarial", "fair")[seed % 5 == 4], faults=faults or Faults(timeouts=True), effects=effects, **more)
    for name, op in (OPS | NET_OPS).items():
        if "timeout" in op.parameters:
            operation = functools.partial(sim.scheduler.start, getattr(sim.vocabulary, name), op.parameters.index("timeout"))
            setattr(sim.vocabulary, name, operation)
    return sim
