"""What runs: warps as greenlets, the blocks that hold them together, launches and streams."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import greenlet

from ncclep_py.simulator.clock import Agent, Clock, Site
from ncclep_py.simulator.errors import EndlessError, RaceError, UniformityError
from ncclep_py.simulator.story import race_story

__all__ = ["Block", "Cell", "Launch", "Stream", "Task"]


@dataclasses.dataclass(eq=False)
class Launch:
    """One entry of a stream: a kernel with its arguments and grid, or a host function.

    Attributes:
        source: whose line messages about a host function name, or that line.
        counted: in `Stream.started`.
    """

    kernel: Callable[..., None]
    args: tuple[int, ...]
    blocks: int
    warps: int
    label: str
    host: bool = False
    source: Callable[..., object] | tuple[str, int] | None = None
    counted: bool = True


class Stream:
    """Entries of one rank, run one after the other.

    Attributes:
        clock: what happened before the next entry.
        queue: entries that have not begun.
        pending: blocks of the running entry that have not begun.
        running: blocks of the running entry that have begun and not ended.
        started: number of entries begun so far, but for those not counted.
    """

    def __init__(self, rank: int, clock: Clock) -> None:
        self.rank, self.clock = rank, clock
        self.queue: deque[Launch] = deque()
        self.pending: deque[Block] = deque()
        self.running = 0
        self.started = 0
        self.ends: list[Clock] = []

    @property
    def busy(self) -> bool:
        """Whether an entry is running."""
        return bool(self.running or self.pending)


class Cell:
    """One array in a block's shared memory, as a whole: who wrote and who read it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.writers: dict[int, tuple[int, bool]] = {}
        self.readers: dict[int, int] = {}

    def read(self, task: Task) -> None:
        """Check a plain load."""
        if self.name not in task.block.values:
            ledger = task.agent.ledger
            raise RaceError(f"{ledger.describe(task.agent.slot, task.agent.time)} reads shared memory {self.name!r}, which nobody wrote")
        for slot, (time, _) in self.writers.items():
            self._order(task, "reads", slot, time, "writes")
        self.readers[task.agent.slot] = task.agent.time

    def write(self, task: Task, atomic: bool = False) -> None:
        """Check a plain store or an atomic addition."""
        for slot, (time, other) in self.writers.items():
            if not (atomic and other):
                self._order(task, "writes", slot, time, "writes")
        for slot, time in self.readers.items():
            self._order(task, "writes", slot, time, "reads")
        self.writers[task.agent.slot] = (task.agent.time, atomic)

    def _order(self, task: Task, mine: str, slot: int, time: int, theirs: str) -> None:
        if not task.agent.knows(slot, time):
            ledger = task.agent.ledger
            raise RaceError(f"{ledger.describe(task.agent.slot, task.agent.time)} {mine} shared memory {self.name!r}, and "
                            f"{ledger.describe(slot, time)} {theirs} it: no barrier orders the two.\n"
                            + race_story(task.agent, f"shared memory {self.name!r}", mine, slot, time, theirs))


class Block:
    """A block: its warps, its barrier, its shared memory."""

    def __init__(self, launch: Launch, index: int) -> None:
        self.launch, self.index = launch, index
        self.warps: list[Task] = []
        self.ended = 0
        self.calls: list[tuple[str, tuple[int, ...], int, int]] = []
        self.arrived: list[Task] = []
        self.code = 0
        self.values: dict[str, Any] = {}
        self.cells: dict[str, Cell] = {}

    def cell(self, name: str) -> Cell:
        """The shared array `name`."""
        found = self.cells.get(name)
        if found is None:
            found = self.cells[name] = Cell(name)
        return found

    def check_call(self, task: Task, op: str, args: tuple[int, ...]) -> None:
        """All warps make the same block-scope calls in the same order."""
        agent = task.agent
        if task.calls == len(self.calls):
            self.calls.append((op, args, agent.slot, agent.time))
        else:
            other_op, other_args, *who = self.calls[task.calls]
            if (other_op, other_args) != (op, args):
                other = agent.ledger.describe(*who)
                if other_op != op:
                    raise UniformityError(f"warp {task.warp} of rank {task.rank} block {self.index} calls {op} where {other} calls {other_op}")
                raise UniformityError(f"{agent.ledger.describe(agent.slot, agent.time)} calls {op}{args}, but {other} calls it with {other_args}")
        task.calls += 1

    def check_end(self) -> None:
        """A warp ended: no other one may wait for it, and at the end all must have made the same calls."""
        done = [w for w in self.warps if w.dead]
        for warp in done:
            if warp.calls < len(self.calls) and (self.arrived or len(done) == len(self.warps)):
                op = self.calls[warp.calls][0]
                raise UniformityError(f"rank {warp.rank} block {self.index} warp {warp.warp} ended its kernel without the {op} the others call")


class Task(greenlet):
    """One warp of one kernel.

    Attributes:
        agent: its knowledge of what happened before.
        site: where it is in the source.
        ready_when: while it waits for a word: whether it can go on.
        waits_for: while it waits: what for, in words, and the ranks that have not come.
        late: it waited for too long and has to give up.
        began: step at which its last wait began.
        given: what each operation in the source was last called with.
        repeats: calls of operations that touch memory since one was given something new.
        fetched: what it fetched into its own part of shared memory.
    """

    def __init__(self, rank: int, block: Block, warp: int, agent: Agent, parent: greenlet) -> None:
        super().__init__(self._body, parent)
        self.rank, self.block, self.warp, self.agent = rank, block, warp, agent
        launch = block.launch
        source = launch.source or launch.kernel
        code = getattr(getattr(source, "func", source), "__code__", None)
        file, line = source if isinstance(source, tuple) else (code.co_filename, code.co_firstlineno) if code else ("?", 0)
        self.site: Site = ("call" if launch.host else "start", file, line, launch.label)
        self.calls = 0
        self.given: dict[Site, tuple[int, ...]] = {}
        self.repeats = 0
        self.steps = 0
        self.seen = 0
        self.ready_when: Callable[[], bool] | None = None
        self.waits_for: Callable[[], tuple[str, list[int]]] | None = None
        self.late = False
        self.began = 0
        self.ready = False
        self.fetched: dict[str, Any] = {}
        self.group: tuple[int, ...] = ()
        self.tiebreak = 0.0

    def note(self, args: tuple[int, ...], most: int) -> None:
        """Count a call at `site` of an operation that touches memory; `EndlessError` if `most` in a row were given nothing new."""
        self.repeats = self.repeats + 1 if self.given.get(self.site) == args else 0
        self.given[self.site] = args
        if self.repeats > most:
            raise EndlessError(f"{self.at()} is the last of {most} operations in a row that this warp called with what they were called with before "
                               "(Simulator.most_repeats): does a loop not advance?")

    def _body(self) -> None:
        launch = self.block.launch
        launch.kernel(*launch.args)

    def take(self, name: str) -> Any:
        """What this warp fetched as `name`."""
        if name not in self.fetched:
            raise RaceError(f"{self.agent.ledger.describe(self.agent.slot, self.agent.time)} reads the {name} it should have fetched, and did not")
        return self.fetched[name]

    def at(self) -> str:
        """Where this task is, in words."""
        op, file, line, label = self.site
        return f"{self.agent.ledger.name(self.agent.slot)} {op} ({file.rsplit('/', 1)[-1]}:{line}, {label})"
