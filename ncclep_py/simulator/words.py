"""Control words: 64-bit locations accessed by relaxed operations and atomics, with the history that stale loads may still see."""

from __future__ import annotations

import numpy as np

from ncclep_py.simulator.clock import Agent, Clock, widened
from ncclep_py.simulator.errors import OutOfBoundsError, RaceError
from ncclep_py.simulator.memory import WINDOW, Memory, Part, Region

__all__ = ["Store", "Word", "Words"]

RECENT = 4
"""Newest stores of a word that are checked for sufficient scope."""
HISTORY = 64
"""Stores of one word kept for late readers."""


class Store:
    """One value a word had.

    Attributes:
        index: position in the word's modification order.
        carried_gpu, carried_sys: the writer's release clocks for readers of its own and of other ranks.
        scope: scope of the access, ``weak`` for a plain store.
    """

    __slots__ = ("carried_gpu", "carried_sys", "index", "rank", "scope", "slot", "time", "value")

    def __init__(self, value: int, index: int, slot: int, time: int, rank: int, scope: str, carried_gpu: Clock | None,
                 carried_sys: Clock | None) -> None:
        self.value, self.index, self.slot, self.time, self.rank, self.scope = value, index, slot, time, rank, scope
        self.carried_gpu, self.carried_sys = carried_gpu, carried_sys


class Word:
    """A control word. Loads of one rank see its stores in order, each as late as the scheduler likes unless it happened before the load.

    Attributes:
        stores: its modification order, the newest last.
        seen: per reading rank, index of the newest store delivered to it or read by it.
        reads: per slot, time of its last relaxed load.
        narrow: the same for loads of less than system scope.
    """

    __slots__ = ("address", "narrow", "reads", "region", "seen", "stores")

    def __init__(self, region: Region, address: int) -> None:
        self.region, self.address = region, address
        self.stores = [Store(self._memory()[0].item(), 0, 0, 0, -1, "sys", None, None)]
        self.seen: dict[int, int] = {}
        self.reads: dict[int, int] = {}
        self.narrow: dict[int, int] = {}

    def _memory(self) -> np.ndarray:
        at = self.address - self.region.address
        return self.region.bytes[at:at + 8].view(np.uint64)

    def grow(self, capacity: int) -> None:
        """Make room for clocks of `capacity` slots."""
        for store in self.stores:
            for name in ("carried_gpu", "carried_sys"):
                clock = getattr(store, name)
                if clock is not None and len(clock) < capacity:
                    setattr(store, name, widened(clock, capacity))

    def peek(self, agent: Agent) -> Store:
        """The store a load of this task would read now."""
        stores = self.stores
        first = stores[0].index
        at = max(self.seen.get(agent.rank, 0), first) - first
        clock = agent.clock
        for i in range(len(stores) - 1, at, -1):
            if clock[stores[i].slot] >= stores[i].time:
                return stores[i]
        return stores[at]

    def show(self, rank: int, store: Store) -> None:
        """`store` and all before it become visible to `rank`."""
        if store.index > self.seen.get(rank, 0):
            self.seen[rank] = store.index

    def append(self, value: int, agent: Agent, scope: str, carried_gpu: Clock | None, carried_sys: Clock | None) -> Store:
        """A new value, visible to its own task at once and to others when delivered."""
        store = Store(value, self.stores[-1].index + 1, agent.slot, agent.time, agent.rank, scope, carried_gpu, carried_sys)
        self.stores.append(store)
        if len(self.stores) > 2 * HISTORY:
            del self.stores[:HISTORY]
        self._memory()[0] = value
        return store

    def absorb(self) -> None:
        """The host has written the memory since: its value is the newest, and everybody sees it."""
        value = self._memory()[0].item()
        if value != self.stores[-1].value:
            self.stores = [Store(value, self.stores[-1].index + 1, 0, 0, -1, "sys", None, None)]
            self.seen.clear()

    def check_plain(self, memory: Memory, agent: Agent, region: Region, part: Part, writing: bool) -> None:
        """A plain access touches this word: relaxed accesses that nothing orders with it make a race."""
        where = f"{part.name}[{self.address - region.address - part.begin}] of rank {region.rank}"
        mine = "writes (weak)" if writing else "reads (weak)"
        for store in self.stores:
            if store.scope != "weak" and not agent.knows(store.slot, store.time):
                raise RaceError(memory.sentence(agent, where, mine, store.slot, store.time, "writes (relaxed)"))
        for slot, time in self.reads.items() if writing else ():
            if not agent.knows(slot, time):
                raise RaceError(memory.sentence(agent, where, mine, slot, time, "reads (relaxed)"))


class Words:
    """Loads, stores and atomics of control words, in PTX strengths."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._known: dict[int, Word] = {}

    def word(self, agent: Agent, address: int) -> Word:
        """The control word at `address`."""
        found = self._known.get(address)
        if found is not None and found.region.uses and found.region.owner is None:
            if agent.rank in found.region.ranks or found.region.kind == WINDOW:
                return found
        region = self.memory.find(agent, address, 8)
        if (address - region.address) % 8 or address % 8:
            raise OutOfBoundsError(f"{self.memory.ledger.describe(agent.slot, agent.time)}: a control word at an address not aligned to 8 bytes")
        part = region.part(address)
        if address not in part.words:
            part.words[address] = Word(region, address)
        self._known[address] = part.words[address]
        return part.words[address]

    def forget(self, region: Region) -> None:
        """The region is gone: another one at its addresses has words of its own, and the memory may be freed."""
        for part in region.parts:
            for address, word in part.words.items():
                if self._known.get(address) is word:
                    del self._known[address]

    def absorb(self) -> None:
        """Take in what the host wrote into control words between operations."""
        for word in self._known.values():
            word.absorb()

    def load(self, agent: Agent, word: Word, order: str, scope: str) -> int:
        """Value of a load: ``weak``, ``relaxed`` or ``acquire``."""
        store = word.peek(agent)
        word.show(agent.rank, store)
        if order == "weak":
            self.memory.read(agent, word.address, 8)
            return store.value
        self._check_scope(agent, word, scope, writing=False)
        self.memory.check_strong(agent, word.region, word.address, writing=False)
        word.reads[agent.slot] = agent.time
        if scope != "sys":
            word.narrow[agent.slot] = agent.time
        self._take(agent, store, order, scope)
        return store.value

    def store(self, agent: Agent, word: Word, value: int, order: str, scope: str) -> Store:
        """Store with ``weak``, ``relaxed`` or ``release`` order; somebody has to deliver it to its readers."""
        if order == "weak":
            self.memory.write(agent, word.address, 8)
            return word.append(value, agent, "weak", None, None)
        self._check_scope(agent, word, scope, writing=True)
        self.memory.check_strong(agent, word.region, word.address, writing=True)
        return word.append(value, agent, scope, *self._carried(agent, order, scope))

    def swap(self, agent: Agent, word: Word, value: int, order: str, scope: str) -> tuple[int, Store]:
        """Atomic exchange with the newest value; ``relaxed`` or ``acq_rel``. Continues the release sequence. The old value and the store."""
        last = word.stores[-1]
        self._check_scope(agent, word, scope, writing=True)
        self.memory.check_strong(agent, word.region, word.address, writing=True)
        self._take(agent, last, order, scope)
        gpu, sys = self._carried(agent, order, scope)
        if last.rank == agent.rank:
            gpu, sys = _both(gpu, last.carried_gpu), _both(sys, last.carried_sys)
        return last.value, word.append(value, agent, scope, gpu, sys)

    @staticmethod
    def _take(agent: Agent, store: Store, order: str, scope: str) -> None:
        """What a load gets to know: at once if it acquires, else at the next fence."""
        if order not in ("acquire", "acq_rel"):
            agent.take(store.carried_gpu, store.carried_sys, store.rank)
            return
        carried = store.carried_gpu if store.rank == agent.rank else store.carried_sys if scope == "sys" else None
        if carried is not None:
            agent.join(carried)

    @staticmethod
    def _carried(agent: Agent, order: str, scope: str) -> tuple[Clock | None, Clock | None]:
        """Clocks a store carries: of the last fences, or of now if it releases."""
        if order not in ("release", "acq_rel"):
            return agent.released_gpu, agent.released_sys
        now = agent.clock.copy()
        agent.ledger.releases.append((agent.slot, agent.time, scope, now))
        return now, now if scope == "sys" else agent.released_sys

    def _check_scope(self, agent: Agent, word: Word, scope: str, writing: bool) -> None:
        """Unordered relaxed accesses of two ranks, one of them a store, need system scope on both sides."""
        ledger = self.memory.ledger
        mine = f"{'writes' if writing else 'reads'} (relaxed.{scope})"
        for store in word.stores[-RECENT:]:
            if store.rank in (agent.rank, -1) or store.scope == "weak" or (scope == "sys" and store.scope == "sys"):
                continue
            if not agent.knows(store.slot, store.time):
                self._narrow(agent, word, mine, store.slot, store.time, f"writes (relaxed.{store.scope})")
        for slot, time in (word.narrow if scope == "sys" else word.reads).items() if writing else ():
            if ledger.slots[slot][0] != agent.rank and not agent.knows(slot, time):
                self._narrow(agent, word, mine, slot, time, "reads (relaxed)")

    def _narrow(self, agent: Agent, word: Word, mine: str, slot: int, time: int, theirs: str) -> None:
        part = word.region.part(word.address)
        where = f"{part.name}[{word.address - word.region.address - part.begin}] of rank {word.region.rank}"
        raise RaceError(self.memory.sentence(agent, where, mine, slot, time, theirs, " Both accesses need system scope."))


def _both(a: Clock | None, b: Clock | None) -> Clock | None:
    return b if a is None else a if b is None else np.maximum(a, b)
