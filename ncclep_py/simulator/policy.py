"""Who runs next: fair random choice, adversarial priorities, or a given list of choices. All of them are functions of a seed alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ncclep_py.simulator.engine import Task

__all__ = ["Adversarial", "Fair", "Policy"]

NEVER = 1 << 60
"""A delivery that waits until nothing else can happen."""


class Policy:
    """Choices of one run.

    Attributes:
        random: source of all choices.
        mode: name for messages.
        rush: chance per step that a wait for a dead, slow or late rank ends early by timeout.
    """

    mode = "fair"
    rush = 0.0
    exhaustive = False

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def admit(self, task: Task) -> None:
        """A new task."""

    def pick(self, ready: list[Task], step: int) -> Task:
        """One of `ready` for this step."""
        raise NotImplementedError

    def delay(self) -> int:
        """Steps until a stored word becomes visible to its reader."""
        raise NotImplementedError

    def chooses(self, task: Task, kind: str, noun: str) -> bool:
        """Exhaustive runs: whether to choose again before `task` makes a `kind` of access to `noun`."""
        return True


class Fair(Policy):
    """Every ready task is equally likely; most stores are visible at once."""

    def pick(self, ready: list[Task], step: int) -> Task:
        return ready[int(self.random.random() * len(ready))]

    def delay(self) -> int:
        return 0 if self.random.random() < 0.6 else int(self.random.random() * 30)


class Adversarial(Policy):
    """Random strict priorities of tasks, blocks or ranks with a few change points (PCT); words arrive late, some as late as possible."""

    mode = "adversarial"
    rush = 0.002

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.random
        self.unit = draw.choice(("rank", "block", "warp"))
        horizon = draw.choice((100, 300, 1000, 3000))
        self.changes = {draw.randrange(horizon) for _ in range(draw.randrange(1, 8))}
        self.priorities: dict[tuple[int, ...], float] = {}
        self.floor = 0.0
        self.held_back = draw.choice((0.0, 0.1, 0.4))
        self.slowest = draw.choice((5, 60, 1000))
        self.noise = draw.choice((0.0, 0.0, 0.05))

    def admit(self, task: Task) -> None:
        key = (task.rank, task.block.index, task.warp)[: ("rank", "block", "warp").index(self.unit) + 1]
        task.group = key
        if key not in self.priorities:
            self.priorities[key] = self.random.random() + 1
        task.tiebreak = self.random.random()

    def pick(self, ready: list[Task], step: int) -> Task:
        if self.noise and self.random.random() < self.noise:
            return self.random.choice(ready)
        priorities = self.priorities
        best = max(ready, key=lambda t: (priorities[t.group], t.tiebreak))
        if step in self.changes:
            self.floor -= 1
            priorities[best.group] = self.floor
            best = max(ready, key=lambda t: (priorities[t.group], t.tiebreak))
        return best

    def delay(self) -> int:
        r = self.random.random()
        return NEVER if r < self.held_back else int(self.random.random() ** 2 * self.slowest)
