"""All schedules of a small program: depth-first search over the scheduler's choices, with replay and hashing of states.

Choices are made only before a task loads HEAD, COUNTS or ARRIVED, and between the two steps of a host call. A store follows what its task did before
at once, unless that was a load of the same kind of word: loads commute with each other, so any other place of the store is reached by moving that
load. This is enough for one warp per rank: everything else is private or ordered by what is read there (a signature is read after its HEAD), and the
race detector judges an order of events, not a moment. Stores are visible at once; late ones are the business of the random modes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ncclep_py.simulator.clock import Agent
from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.errors import SimulationError
from ncclep_py.simulator.policy import Policy
from ncclep_py.simulator.task import Task

__all__ = ["Exhaustive", "Explored", "explore"]


@dataclasses.dataclass(frozen=True)
class Explored:
    """Size of an exploration: distinct states, complete or pruned runs, and whether nothing is left."""

    states: int
    runs: int
    complete: bool


class Known(Exception):
    """This state was explored before."""


class Exhaustive(Policy):
    """Follows a list of choices, then takes the first one everywhere and notes the others.

    Attributes:
        taken: choices of this run so far.
        others: alternatives found in this run, as lists of choices.
    """

    mode = "explore"
    exhaustive = True

    def __init__(self, prefix: tuple[int, ...], states: set[int]) -> None:
        super().__init__(0)
        self.prefix, self.states = prefix, states
        self.sim: Simulator | None = None
        self.taken: list[int] = []
        self.loaded: dict[int, str] = {}
        self.others: list[tuple[int, ...]] = []

    def pick(self, ready: list[Task], step: int) -> Task:
        assert self.sim is not None
        for task in ready:
            if task.steps == 0:
                return task
        if len(ready) == 1:
            return ready[0]
        ordered = sorted(ready, key=lambda t: t.agent.slot)
        at = len(self.taken)
        if at < len(self.prefix):
            choice = self.prefix[at]
        else:
            state = fingerprint(self.sim, ordered)
            if state in self.states:
                raise Known
            self.states.add(state)
            self.others += [(*self.taken, i) for i in range(1, len(ordered))]
            choice = 0
        self.taken.append(choice)
        return ordered[choice]

    def delay(self) -> int:
        return 0

    def chooses(self, task: Task, kind: str, noun: str) -> bool:
        if noun not in ("head", "count", "arrived", "hits", "kept_rows", "host"):
            return False
        before = self.loaded.get(task.rank)
        if kind == "ld":
            self.loaded[task.rank] = noun
        return kind == "ld" or before == noun


def explore(build: Callable[[Exhaustive], tuple[Simulator, Callable[[], None] | None]], limit: int = 200_000) -> Explored:
    """Run every schedule of a program, or as many as find `limit` states; raises the first error, with its choices in ``schedule``.

    `build` makes the program anew, always the same, in a ``Simulator(..., policy=policy)``; it returns the simulator and what checks the results.
    """
    states: set[int] = set()
    left: list[tuple[int, ...]] = [()]
    runs = 0
    while left and len(states) < limit:
        policy = Exhaustive(left.pop(), states)
        sim, check = build(policy)
        policy.sim = sim
        runs += 1
        try:
            sim.run()
            if check is not None:
                check()
        except Known:
            pass
        except SimulationError as error:
            error.schedule = tuple(policy.taken)
            raise
        except AssertionError as error:
            raise AssertionError(f"{error}\n  replay with schedule={tuple(policy.taken)}") from error
        left += policy.others
    return Explored(len(states), runs, not left)


def fingerprint(sim: Simulator, ready: list[Task]) -> int:
    """A number for everything the rest of the run depends on: progress, values read, words, and knowledge of what happened before."""
    scheduler = sim.scheduler
    parts = [hash((t.agent.slot, t.steps, t.calls, t.seen, t in ready, _knowledge(t.agent)))
             for t in ready + [w for tasks in scheduler.waiting for w in tasks]]
    parts += [hash((s.rank, s.started, s.clock.tobytes(), s.running)) for s in sim.streams]
    for region in sim.memory.regions:
        for part in region.parts:
            for word in part.words.values():
                last = word.stores[-1]
                carried = b"" if last.carried_sys is None else last.carried_sys.tobytes()
                parts.append(hash((region.name, region.rank, word.address - region.address, last.value, last.slot, last.time, carried)))
    return sum(parts) & 0xFFFFFFFFFFFFFFFF


def _knowledge(agent: Agent) -> tuple[bytes, ...]:
    released = [b"" if c is None else c.tobytes() for c in (agent.released_gpu, agent.released_sys)]
    return (agent.clock.tobytes(), *released, *(c.tobytes() for c in agent.near), *(c.tobytes() for c in agent.far))
