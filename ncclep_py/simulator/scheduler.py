"""Runs tasks one step at a time: who is ready, who waits, which stores are under way, and what to do when nothing moves."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from greenlet import getcurrent

from ncclep_py.simulator.clock import HOST, Agent
from ncclep_py.simulator.errors import DeadlockError, EndlessError
from ncclep_py.simulator.policy import NEVER
from ncclep_py.simulator.story import deadlock_story, quoted
from ncclep_py.simulator.task import Block, Stream, Task
from ncclep_py.simulator.watchdog import WATCHDOG, Stuck, where
from ncclep_py.simulator.words import Store, Word

if TYPE_CHECKING:
    from ncclep_py.simulator.engine import Simulator

__all__ = ["Scheduler"]


class Scheduler:
    """Scheduling state of one simulator.

    Attributes:
        step: steps so far.
        ready: tasks that can run, in the order in which they became ready.
        waiting: per rank, tasks that wait for a word.
        current: the task that runs, for operations.
        under_way: heap of (step due, number, word, store, reader rank) not yet delivered.
        stalled: ranks held back by a fault, with their ready tasks.
        dead: ranks that will not run again.
    """

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.step = 0
        self.ready: list[Task] = []
        self.waiting: list[list[Task]] = [[] for _ in range(sim.num_ranks)]
        self.under_way: list[tuple[int, int, Word, Store, int]] = []
        self.sent = 0
        self.rank_steps = [0] * sim.num_ranks
        self.stalled: dict[int, list[Task]] = {}
        self.busy_since = [0] * sim.num_ranks
        self.resumed: set[int] = set()
        self.dead: set[int] = set()
        self.running = False
        self.faulty = bool(sim.faults.dead or sim.faults.slow or sim.faults.late or sim.faults.timeouts)
        self.eager = sim.policy.exhaustive
        self.current: Task = None  # type: ignore[assignment]

    # ---- called by tasks -------------------------------------------------------------------------------------------------
    def pause(self, kind: str, noun: str) -> None:
        """Let the scheduler choose again before my next effect, a `kind` of access to `noun`; exhaustive runs do so for few of them."""
        if not self.eager or self.sim.policy.chooses(self.current, kind, noun):
            self.hub.switch()

    def split(self) -> None:
        """A point inside an operation where a faulty rank may stop."""
        if self.faulty:
            self.hub.switch()

    def wait(self, task: Task, ready: Callable[[], bool], describe: Callable[[], tuple[str, list[int]]]) -> None:
        """Sleep until `ready()`, or until the task is told to give up (`Task.late`)."""
        task.ready_when, task.waits_for, task.began = ready, describe, self.step
        self._unready(task)
        self.waiting[task.rank].append(task)
        self.hub.switch()
        task.ready_when = task.waits_for = None

    def meet(self, task: Task, code: int, join: bool) -> int:
        """Barrier of the task's block, which also gives all warps the bitwise or of their codes; `join`: it orders memory."""
        block = task.block
        block.arrived.append(task)
        block.code |= code
        if len(block.arrived) < len(block.warps):
            block.check_end()
            self._unready(task)
            task.waits_for = lambda: (f"waits at the barrier of its block for warps "
                                      f"{[w.warp for w in block.warps if w not in block.arrived]}", [])
            self.hub.switch()
            task.waits_for = None
            return task.met
        if join:
            clock = task.agent.clock.copy()
            for other in block.arrived:
                clock = clock if other is task else np.maximum(clock, other.agent.clock)
            for other in block.arrived:
                other.agent.join(clock)
        for other in block.arrived:
            other.met = block.code
            if other is not task:
                self._make_ready(other)
        block.arrived, block.code = [], 0
        return task.met

    def send(self, word: Word, store: Store) -> None:
        """A store that the owner of the word's memory will see some time."""
        rank = word.region.rank
        delay = self.sim.policy.delay()
        if delay <= 0:
            self._deliver(word, store, rank)
            return
        self.sent += 1
        heapq.heappush(self.under_way, (self.step + delay, self.sent, word, store, rank))

    # ---- the loop ----------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Run until all streams are empty, or raise."""
        self.hub = getcurrent()
        self.ready = [task for task in self.ready if not task.parent.dead]   # left by a run that raised, in a rank program that ended by it
        self.running = True
        policy, events = self.sim.policy, self.sim.events
        watched = WATCHDOG.watch(self)
        try:
            self._start_streams(self.sim.streams)
            while True:
                self.step += 1
                while self.under_way and self.under_way[0][0] <= self.step:
                    self._deliver(*heapq.heappop(self.under_way)[2:])
                if self.faulty:
                    self._inject()
                if not self.ready:
                    if self._unstick():
                        continue
                    break
                task = policy.pick(self.ready, self.step)
                if self.faulty and self._stops(task):
                    continue
                self.current = task
                task.steps += 1
                task.switch()
                if task.dead:
                    self._end(task)
            if events is not None:
                events.sort(key=lambda e: e[5])
        except Stuck as stuck:
            raise EndlessError(f"{self.current.at()} was the last operation of this warp, {WATCHDOG.seconds:g} s ago, and it still runs, now "
                               f"{where(stuck)}: does a loop not advance?") from None
        finally:
            WATCHDOG.release(watched)
            self.running = False

    def _start_streams(self, streams: list[Stream]) -> None:
        """Begin the next entry of every idle stream of `streams`, and as many of its blocks as may run."""
        for stream in streams:
            if not stream.busy and stream.queue:
                rank = stream.rank
                late = self.sim.faults.late.get(rank)
                if late is not None and stream.started >= late and rank not in self.resumed:
                    self.stalled.setdefault(rank, [])
                    continue
                launch = stream.queue.popleft()
                stream.started += launch.counted
                stream.ends = []
                stream.pending.extend(Block(launch, i) for i in range(launch.blocks))
            most = self.sim.resident_blocks or len(stream.pending) + stream.running
            while stream.pending and stream.running < most:
                self._start(stream, stream.pending.popleft())

    def _start(self, stream: Stream, block: Block) -> None:
        ledger = self.sim.ledger
        stream.running += 1
        for warp in range(block.launch.warps):
            slot = ledger.slot(stream.rank, HOST, 0) if block.launch.host else ledger.slot(stream.rank, block.index, warp)
            task = Task(stream.rank, block, warp, Agent(ledger, slot, stream.rank, stream.clock), self.hub)
            block.warps.append(task)
            self.sim.policy.admit(task)
            self._make_ready(task)

    def _end(self, task: Task) -> None:
        """A warp ended; maybe its block, its kernel, and then the next entry of the stream begins."""
        self._unready(task)
        block, stream = task.block, self.sim.streams[task.rank]
        stream.ends.append(task.agent.clock)
        block.ended += 1
        block.check_end()
        if block.ended < len(block.warps):
            return
        stream.running -= 1
        if not stream.busy:
            clock = stream.clock.copy()
            for end in stream.ends:
                clock = np.maximum(clock, end)
            stream.clock = clock
        self._start_streams([stream])

    def _deliver(self, word: Word, store: Store, rank: int) -> None:
        word.show(rank, store)
        self.look(rank)

    def look(self, rank: int) -> None:
        """Tasks of a rank may go on if what they wait for is there."""
        for task in [t for t in self.waiting[rank] if t.ready_when and t.ready_when()]:
            self._wake(task)

    def _wake(self, task: Task) -> None:
        self.waiting[task.rank].remove(task)
        self._make_ready(task)

    def _is_busy(self, rank: int) -> bool:
        """Whether a task of this rank could run."""
        return bool(self.stalled.get(rank)) or any(t.rank == rank for t in self.ready)

    def _make_ready(self, task: Task) -> None:
        task.ready = True
        if self.faulty and not self._is_busy(task.rank):
            self.busy_since[task.rank] = self.step
        (self.stalled[task.rank] if task.rank in self.stalled else self.ready).append(task)

    def _unready(self, task: Task) -> None:
        if task.ready:
            task.ready = False
            held = self.stalled.get(task.rank)
            (held if held is not None and task in held else self.ready).remove(task)

    # ---- faults --------------------------------------------------------------------------------------------------------------
    def _stops(self, task: Task) -> bool:
        """Count a step of the task's rank; whether the rank dies or stalls instead of taking it."""
        rank, faults = task.rank, self.sim.faults
        if self.rank_steps[rank] >= faults.dead.get(rank, NEVER):
            self.die(rank)
            return True
        if self.rank_steps[rank] >= faults.slow.get(rank, NEVER) and rank not in self.resumed:
            self.stalled[rank] = [t for t in self.ready if t.rank == rank]
            self.ready = [t for t in self.ready if t.rank != rank]
            return True
        self.rank_steps[rank] += 1
        return False

    def die(self, rank: int) -> None:
        """A rank never runs again."""
        self.dead.add(rank)
        self.sim.memory.forgive(rank)
        self.ready = [t for t in self.ready if t.rank != rank]
        self.waiting[rank].clear()
        self.stalled.pop(rank, None)

    def _absent(self) -> set[int]:
        idle = {s.rank for s in self.sim.streams if not s.busy and not s.queue} if self.sim.faults.bounded else set()
        return self.dead | set(self.stalled) | idle

    def _within_the_model(self, task: Task, missing: set[int]) -> bool:
        """`Faults.bounded`: whether a wait may give up on these ranks: they are dead, between kernels, wait themselves, or are busy since."""
        if not self.sim.faults.bounded:
            return True
        for rank in missing - self.dead:
            if self.sim.streams[rank].busy and self._is_busy(rank) and task.began >= self.busy_since[rank]:
                return False
        return True

    def _inject(self) -> None:
        """By choice, let a wait for an absent rank give up early."""
        policy = self.sim.policy
        if self.sim.faults.timeouts and policy.rush and policy.random.random() < policy.rush:
            self._give_up(only_absent=True)

    def _give_up(self, only_absent: bool) -> bool:
        """Let one wait time out; False if there is none."""
        absent = self._absent()
        waits = [t for r, tasks in enumerate(self.waiting) if r not in absent for t in tasks]
        missing = [(t, set(t.waits_for()[1])) for t in waits if t.waits_for]
        if self.sim.faults.bounded:
            missing = [(t, ranks) for t, ranks in missing if ranks and self._within_the_model(t, ranks)]
            waits = [t for t, _ in missing]
        direct = [t for t, ranks in missing if ranks and ranks <= absent]
        direct = direct or [t for t, ranks in missing if ranks & absent and not only_absent]
        chosen = direct or ([] if only_absent else waits)
        if not chosen:
            return False
        task = self.sim.policy.random.choice(chosen)
        task.late = True
        self._wake(task)
        return True

    def _unstick(self) -> bool:
        """Nothing is ready: deliver a store, let a wait give up, or let a stalled rank go on. False: all is done."""
        if self.stalled and self.under_way and self.sim.policy.random.random() < 0.2:
            return self._resume()
        if self.under_way:
            due = heapq.heappop(self.under_way)
            if due[0] >= NEVER and len(self.under_way):   # any of the stores held back may come first
                i = self.sim.policy.random.randrange(len(self.under_way) + 1)
                if i:
                    due, self.under_way[i - 1] = self.under_way[i - 1], due
                    heapq.heapify(self.under_way)
            self._deliver(*due[2:])
            return True
        if self.stalled and not (self.sim.faults.timeouts and self.sim.policy.random.random() < 0.75 and self._give_up(False)):
            return self._resume()
        if self.stalled or (self.sim.faults.timeouts and self._give_up(False)):
            return True
        self._check_done()
        return False

    def _resume(self) -> bool:
        """A stalled rank goes on."""
        rank = self.sim.policy.random.choice(sorted(self.stalled))
        self.resumed.add(rank)
        self.ready.extend(self.stalled.pop(rank))
        self._start_streams([self.sim.streams[rank]])
        return True

    def _check_done(self) -> None:
        """Raise unless every stream of a living rank is empty."""
        stuck = [s for s in self.sim.streams if s.busy and s.rank not in self.dead]
        if not stuck:
            return
        lines: list[str] = []
        waiting: list[Task] = []
        told: set[tuple[str, int]] = set()   # lines quoted
        for stream in self.sim.streams:
            tasks = self.waiting[stream.rank] + self._at_barrier(stream)
            waiting += tasks
            for task in (t for t in tasks if t.waits_for):
                lines.append(f"{task.at()}: {task.waits_for()[0]}")   # type: ignore[misc]
                lines += [] if task.site[1:3] in told else quoted(task.site, "    ")
                told.add(task.site[1:3])
            if not stream.busy:
                what = "died" if stream.rank in self.dead else f"is idle after {stream.started} kernels and host calls"
                lines.append(f"rank {stream.rank}: {what}")
        raise DeadlockError("nothing can run:\n  " + "\n  ".join(lines) + "\n" + deadlock_story(self, waiting))

    def _at_barrier(self, stream: Stream) -> list[Task]:
        return [t for t in self.parked_at_barriers() if t.rank == stream.rank]

    def parked_at_barriers(self) -> list[Task]:
        """Tasks that wait for other warps of their block."""
        blocks = {id(t.block): t.block for tasks in self.waiting for t in tasks}
        return [t for block in blocks.values() for t in block.arrived]
