"""The network between teams in the simulator: puts that land any time, in pieces and in any order, and signals that wait for puts before them.

A put of a context reads its source bytes when it lands (before, if it is counted or somebody waits for a flush) and writes them at the target, in one
or two pieces; value puts carry their value and land whole. Who acquires a counter or a flush knows of the reads, and of nothing else. A signal
lands after everything issued before it on its (context, source, target); nothing else is ordered. What an issuing warp's last system fence released
travels with puts and signals, and counts for whoever acquires the signal. Of two puts to the same bytes, at least one of them no word, that are under
way at the same time, nobody knows the outcome: an error, like a put to a rank there is no connection to. When things land is the scheduler's choice.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclep_py.simulator.clock import Agent, Clock, widened
from ncclep_py.simulator.errors import OutOfBoundsError, RaceError
from ncclep_py.simulator.policy import NEVER
from ncclep_py.simulator.task import Task

if TYPE_CHECKING:
    from ncclep_py.simulator.engine import Simulator

__all__ = ["Network"]

WIRE = -2
"""Block index of a wire's slot in the ledger."""


@dataclasses.dataclass(eq=False)
class Item:
    """Something under way on a wire: a put (`pieces` of (target, source, size) bytes, `counter` or -1), a value put (`value`) or a signal (`amount`).

    Attributes:
        data: bytes of pieces that have been read.
        unread: how many have not.
    """

    wire: Wire
    kind: str
    clock: Clock
    time: int
    pieces: list[tuple[int, int, int]]
    value: int = 0
    signal: int = 0
    amount: int = 0
    due: bool = False
    landed: bool = False
    counter: int = -1
    unread: int = 0
    data: dict[tuple[int, int, int], np.ndarray] = dataclasses.field(default_factory=dict)

    def show(self, rank: int, piece: Any) -> None:
        """The scheduler delivers `piece` of this item at `rank`."""
        self.wire.network.land(self, piece)


@dataclasses.dataclass(eq=False)
class Reading:
    """That a put reads its source."""

    item: Item

    def show(self, rank: int, piece: Any) -> None:
        """The scheduler lets it read `piece`."""
        self.item.wire.network.read(self.item, piece)


@dataclasses.dataclass(eq=False)
class Wire:
    """(context, source, target): its slot in the ledger, and what was issued on it and has not landed."""

    network: Network
    context: int
    source: int
    target: int
    slot: int
    open: list[Item] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Signal:
    """Value of a signal or counter, and what happened before the adds that landed."""

    value: int = 0
    clock: Clock | None = None


class Network:
    """The network of one simulator whose ranks form teams: made once, before the simulator runs, it becomes ``sim.network``.

    Attributes:
        number: what kernels of several groups tell their networks apart by, ``sim.networks[number]``; each has signals of its own.
        puts: number of puts so far, values included.
        lost: pairs (source, target) of ranks between which everything vanishes from now on.
        slow: ranks to and from which things take as long as they can.
        watchers: ranks that have waited for a counter or a flush.
    """

    def __init__(self, sim: Simulator, team_size: int, contexts: int, rail_only: bool = False, num_signals: int = 1 << 30,
                 num_counters: int = 16) -> None:
        """Connections between all ranks of different teams, or only between those of the same index (`rail_only`); signals and counters of each
        context."""
        if sim.num_ranks % team_size:
            raise ValueError(f"team_size must divide the {sim.num_ranks} ranks, got {team_size}")
        self.sim, self.team_size, self.contexts = sim, team_size, contexts
        self.num_signals, self.num_counters = num_signals, num_counters
        self.signals: dict[tuple[int, int, int], Signal] = {}
        self.counters: dict[tuple[int, int, int], Signal] = {}
        self.unread: dict[tuple[int, int], int] = {}   # pieces of puts, by (source, context)
        self.watchers: set[int] = set()
        self.wires: dict[tuple[int, int, int], Wire] = {}
        self.puts = 0
        self.lost: set[tuple[int, int]] = set()
        self.slow: set[int] = set()
        sim.team_size, sim.network, self.number = team_size, self, len(sim.networks)
        sim.networks.append(self)
        for source in range(sim.num_ranks):
            for target in range(sim.num_ranks):
                if source // team_size == target // team_size or (rail_only and (source - target) % team_size):
                    continue
                for context in range(contexts):
                    slot = sim.ledger.slot(source, WIRE, target * contexts + context)
                    self.wires[context, source, target] = Wire(self, context, source, target, slot)
                    words = f"the network from rank {source} to rank {target} on context {context}"
                    if sim.ledger.named.setdefault(slot, words) != words:   # networks with other contexts share the slot
                        sim.ledger.named[slot] = f"a network from rank {source}"
        more = len(sim.ledger.slots) - sim.ledger.capacity
        if more > 0:
            sim.ledger.capacity = len(sim.ledger.slots)
            sim.memory.grow(sim.ledger.capacity)
            for stream in sim.streams:
                stream.clock = widened(stream.clock, sim.ledger.capacity)

    # ---- operations ----------------------------------------------------------------------------------------------------------
    def put(self, task: Task, window: int, peer: int, context: int, target_at: int, source_at: int, size: int,
            source_window: int | None = None, counter: int = -1) -> None:
        """Put bytes of my window, or of another window of mine; `counter`: it is counted."""
        if counter != -1:
            self._check("counter", counter, self.num_counters, context)
            if size < 1:
                raise OutOfBoundsError(f"a counted put must be of at least one byte, got {size}")
        target = self._at(window, peer, target_at, size)
        source = self._at(window if source_window is None else source_window, task.rank, source_at, size)
        cut = 16 * self.sim.policy.random.randrange(1, size // 16) if size >= 32 and self.sim.policy.random.random() < 0.5 else size
        self._issue(task, peer, context, "put", [(target, source, cut)] + ([(target + cut, source + cut, size - cut)] if cut < size else []),
                    counter=counter)

    def put_value(self, task: Task, window: int, peer: int, context: int, target_at: int, value: int) -> None:
        """Put a word."""
        self._issue(task, peer, context, "value", [(self._at(window, peer, target_at, 8), 0, 8)], value)

    def signal(self, task: Task, peer: int, context: int, signal: int, amount: int) -> None:
        """Add to a signal of the peer."""
        self._check("signal", signal, self.num_signals, context)
        self._issue(task, peer, context, "signal", [], signal=signal, amount=amount)

    def seen(self, rank: int, context: int, signal: int) -> int:
        """Value of a signal of `rank`."""
        self._check("signal", signal, self.num_signals, context)
        found = self.signals.get((rank, context, signal))
        return found.value if found else 0

    def acquire(self, task: Task, context: int, signal: int) -> None:
        """What happened before the adds that landed happened before me."""
        self._join(task, self.signals.get((task.rank, context, signal)))

    def counted(self, rank: int, context: int, counter: int) -> int:
        """Value of a counter of `rank`."""
        self._check("counter", counter, self.num_counters, context)
        found = self.counters.get((rank, context, counter))
        return found.value if found else 0

    def acquire_counter(self, task: Task, context: int, counter: int) -> None:
        """What the counted puts read was read before me."""
        self._join(task, self.counters.get((task.rank, context, counter)))

    def flushed(self, rank: int, context: int) -> bool:
        """Whether all puts of `rank` on a context have read their sources."""
        return not self.unread.get((rank, context), 0)

    def hasten(self, rank: int, context: int) -> None:
        """Somebody waits for a flush: puts may read now and land later."""
        for wire in self._wires_of(rank, context):
            for item in wire.open:
                for piece in item.pieces if item.kind == "put" and item.counter == -1 else ():
                    if piece not in item.data and self.sim.policy.random.random() < 0.5:
                        self._send(Reading(item), piece, rank)

    def acquire_flush(self, task: Task, context: int) -> None:
        """What puts on the context read was read before me."""
        for wire in self._wires_of(task.rank, context):
            task.agent.clock[wire.slot] = len(self.sim.ledger.logs[wire.slot]) - 1

    @staticmethod
    def _join(task: Task, found: Signal | None) -> None:
        if found is not None and found.clock is not None:
            task.agent.join(widened(found.clock, len(task.agent.clock)))

    def forgive(self, rank: int) -> None:
        """What puts to `rank` read and wrote so far is over: its peers go on without it, and it learns that it may have got anything."""
        slots = [w.slot for w in self.wires.values() if w.target == rank]
        for region in self.sim.memory.regions:
            for part in region.parts:
                if part.weak:
                    part.reads[:, slots] = 0
                    part.writes[np.isin(part.writers, slots)] = 0

    # ---- inside ----------------------------------------------------------------------------------------------------------------
    def _check(self, what: str, number: int, limit: int, context: int) -> None:
        if not (0 <= number < limit and 0 <= context < self.contexts):
            raise OutOfBoundsError(f"there is no {what} {number} of context {context}: there are {limit} {what}s of each of {self.contexts} contexts")

    def _wires_of(self, source: int, context: int) -> list[Wire]:
        return [wire for key, wire in self.wires.items() if key[:2] == (context, source)]

    def _at(self, window: int, rank: int, offset: int, size: int) -> int:
        region = self.sim.windows[window][rank]
        if offset < 0 or offset + size > len(region.bytes):
            raise OutOfBoundsError(f"a put of {size} bytes at {offset} of the window of rank {rank}, which has {len(region.bytes)}")
        return region.address + offset

    def _issue(self, task: Task, peer: int, context: int, kind: str, pieces: list[tuple[int, int, int]], value: int = 0, signal: int = 0,
               amount: int = 0, counter: int = -1) -> None:
        wire = self.wires.get((context, task.rank, peer))
        ledger = self.sim.ledger
        if wire is None:
            raise OutOfBoundsError(f"{ledger.describe(task.agent.slot, task.agent.time)} puts to rank {peer} on context {context}, but there is no "
                                   f"such connection: teams have {self.team_size} ranks, there are {self.contexts} contexts")
        self.puts += kind != "signal"
        ledger.logs[wire.slot].append(task.site)
        time = len(ledger.logs[wire.slot]) - 1
        released = task.agent.released_sys
        clock = ledger.zero() if released is None else released.copy()
        for other in self.wires.values():
            for item in other.open if other.target == peer else ():
                if kind == item.kind == "value":   # words are whole; whichever lands last stays
                    continue
                for begin, _, size in item.pieces:
                    if any(begin < b + s and b < begin + size for b, _, s in pieces):
                        where = self._name(peer, max(begin, pieces[0][0]))
                        raise RaceError(f"{ledger.describe(task.agent.slot, task.agent.time)} puts to {where}, and a put of "
                                        f"{ledger.describe(other.slot, item.time)} to it is still under way")
        item = Item(wire, kind, clock, time, pieces, value, signal, amount, counter=counter)
        if kind == "put":
            item.unread = len(pieces)
            self.unread[task.rank, context] = self.unread.get((task.rank, context), 0) + len(pieces)
        if (task.rank, peer) in self.lost:
            return
        wire.open.append(item)
        for piece in [*pieces] if pieces else (None,):
            if counter != -1:
                self._send(Reading(item), piece, task.rank)
            self._send(item, piece, peer, bool(self.slow & {task.rank, peer}))

    def _send(self, item: Any, piece: Any, rank: int, slow: bool = False) -> None:
        scheduler = self.sim.scheduler
        scheduler.sent += 1
        heapq.heappush(scheduler.under_way, (NEVER if slow else scheduler.step + max(self.sim.policy.delay(), 0), scheduler.sent, item, piece, rank))

    def _agent(self, item: Item) -> Agent:
        """Who reads and writes for an item."""
        wire, ledger = item.wire, self.sim.ledger
        agent = Agent(ledger, wire.slot, wire.source, widened(item.clock, ledger.capacity))
        agent.time = item.time
        agent.clock[wire.slot] = item.time
        return agent

    def read(self, item: Item, piece: tuple[int, int, int]) -> None:
        """`piece` of a put is read, if it has not been."""
        if piece in item.data or piece not in item.pieces:
            return
        wire, (_, source, size) = item.wire, piece
        if wire.target in self.sim.memory.outcast:   # from a send buffer that is in use again
            region = self.sim.memory.find(self._agent(item), source, size)
            item.data[piece] = region.bytes[source - region.address:][:size].copy()
        else:
            item.data[piece] = self.sim.memory.read(self._agent(item), source, size).copy()
        item.unread -= 1
        self.unread[wire.source, wire.context] -= 1
        if not item.unread and item.counter != -1:
            clock = self.sim.ledger.zero()
            clock[wire.slot] = item.time
            self._count(self.counters.setdefault((wire.source, wire.context, item.counter), Signal()), 1, clock)
        if wire.source in self.watchers:
            self.sim.scheduler.look(wire.source)

    def land(self, item: Item, piece: Any) -> None:
        """`piece` of an item has come; a signal waits for what was issued before it."""
        wire, sim = item.wire, self.sim
        if item.kind == "signal":
            item.due = True
        else:
            agent, (target, _, size) = self._agent(item), piece
            if item.kind == "put":
                self.read(item, piece)
            item.pieces.remove(piece)
            if item.kind == "put":
                if wire.target in sim.memory.outcast:
                    where = sim.memory.find(agent, target, size)
                    where.bytes[target - where.address:][:size] = item.data.pop(piece)
                else:
                    sim.memory.write(agent, target, size)[:] = item.data.pop(piece)
            else:
                word = sim.words.word(agent, target)
                store = word.append(item.value, agent, "sys", None, None)
                first = wire.target // self.team_size * self.team_size
                for reader in range(first, first + self.team_size):   # all of the team may look at it
                    self._send(word, store, reader)
            if not item.pieces:
                item.landed = True
        kept: list[Item] = []
        for other in wire.open:
            if other.due and all(i.kind == "signal" for i in kept):   # signals do not wait for signals
                self._add(wire, other)
            elif not other.landed:
                kept.append(other)
        wire.open[:] = kept

    def _add(self, wire: Wire, item: Item) -> None:
        signal = self.signals.setdefault((wire.target, wire.context, item.signal), Signal())
        clock = widened(item.clock, self.sim.ledger.capacity)
        clock[wire.slot] = item.time
        self._count(signal, item.amount, clock)

    @staticmethod
    def _count(signal: Signal, amount: int, clock: Clock) -> None:
        signal.value += amount
        signal.clock = clock if signal.clock is None else np.maximum(clock, widened(signal.clock, len(clock)))

    def _name(self, rank: int, address: int) -> str:
        for regions in self.sim.windows.values():
            region = regions[rank]
            if region.address <= address < region.end:
                return f"{region.part(address).name} of rank {rank}"
        return f"rank {rank}"
