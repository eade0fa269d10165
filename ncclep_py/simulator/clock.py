"""Vector clocks: what each task knows to have happened before now, and who did what at which of its times.

A task is a slot (rank, block, warp), reused by every later kernel of the rank's stream; each rank has one more slot for its host. A slot's time
counts its effects. Knowledge travels only by barriers, by kernel order in a stream, and by fences around relaxed accesses (`Agent.fence`).
"""

from __future__ import annotations

from collections import deque

import numpy as np

__all__ = ["Agent", "Ledger", "Site", "widened"]

Clock = np.ndarray
"""int32 ``[slots]``: for every slot, the last of its times that is known to have happened before."""

Site = tuple[str, str, int, str]
"""Operation, file, line and label of the launch."""

HOST = -1
"""Block index of the host's slot of a rank."""
KEPT_RELEASES = 2000


def widened(clock: Clock, capacity: int) -> Clock:
    """A copy of a clock with room for `capacity` slots; it knows nothing of the new ones."""
    wide = np.zeros(capacity, np.int32)
    wide[: len(clock)] = clock
    return wide


class Ledger:
    """All slots, and the site of every effect they performed.

    Attributes:
        slots: (rank, block, warp) of each slot.
        logs: per slot, the site at each of its times; index 0 is the beginning.
        capacity: length of every clock.
        named: slots that are no warps, in words, for messages.
        releases: the newest (slot, time, scope, what it carried) of all releases wider than a block, for messages.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[tuple[int, int, int]] = []
        self.logs: list[list[Site | None]] = []
        self.named: dict[int, str] = {}
        self.releases: deque[tuple[int, int, str, Clock]] = deque(maxlen=KEPT_RELEASES)
        self._index: dict[tuple[int, int, int], int] = {}

    def slot(self, rank: int, block: int, warp: int) -> int:
        """Index of the slot of (rank, block, warp)."""
        key = (rank, block, warp)
        found = self._index.get(key)
        if found is None:
            found = self._index[key] = len(self.slots)
            self.slots.append(key)
            self.logs.append([None])
        return found

    def count(self, rank: int, blocks: int, warps: int) -> int:
        """Slots there would be with a launch of `blocks` x `warps` on `rank`."""
        return len(self.slots) + sum((rank, b, w) not in self._index for b in range(blocks) for w in range(warps))

    def zero(self) -> Clock:
        """The clock that knows nothing."""
        return np.zeros(self.capacity, np.int32)

    def name(self, slot: int) -> str:
        """A slot in words."""
        if slot in self.named:
            return self.named[slot]
        rank, block, warp = self.slots[slot]
        return f"rank {rank} host" if block == HOST else f"rank {rank} block {block} warp {warp}"

    def describe(self, slot: int, time: int) -> str:
        """Who performed the effect of `slot` at `time`, where in the source."""
        site = self.logs[slot][time] if time < len(self.logs[slot]) else None
        if site is None:
            return f"{self.name(slot)}"
        op, file, line, label = site
        return f"{self.name(slot)} {op} ({file.rsplit('/', 1)[-1]}:{line}, {label})"


class Agent:
    """Ordering state of one running task.

    Attributes:
        clock: what happened before this task's next effect.
        start: the clock at the beginning of the kernel.
        released_gpu: clock of the last release fence of gpu or sys scope, carried by relaxed stores to readers of the same rank.
        released_sys: clock of the last release fence of sys scope, carried to readers of other ranks.
        near: clocks read from stores of the same rank, waiting for an acquire fence of any device-wide scope.
        far: clocks read from stores of other ranks, waiting for an acquire fence of sys scope.
    """

    __slots__ = ("clock", "far", "ledger", "log", "near", "rank", "released_gpu", "released_sys", "slot", "start", "time")

    def __init__(self, ledger: Ledger, slot: int, rank: int, clock: Clock) -> None:
        self.ledger, self.slot, self.rank = ledger, slot, rank
        self.log = ledger.logs[slot]
        self.time = len(self.log) - 1
        self.clock = clock.copy()
        self.start = clock
        self.released_gpu: Clock | None = None
        self.released_sys: Clock | None = None
        self.near: list[Clock] = []
        self.far: list[Clock] = []

    def tick(self, site: Site) -> None:
        """A new effect of this task, at `site`."""
        self.time += 1
        self.clock[self.slot] = self.time
        self.log.append(site)

    def knows(self, slot: int, time: int) -> bool:
        """Whether the effect of `slot` at `time` happened before."""
        return bool(self.clock[slot] >= time)

    def join(self, clock: Clock) -> None:
        """What `clock` knows happened before me, too."""
        np.maximum(self.clock, clock, out=self.clock)

    def take(self, carried_gpu: Clock | None, carried_sys: Clock | None, rank: int) -> None:
        """A relaxed load read a store of `rank` that carries these clocks; they count after the next acquire fence."""
        if rank == self.rank:
            if carried_gpu is not None and not any(c is carried_gpu for c in self.near):
                self.near.append(carried_gpu)
        elif carried_sys is not None and not any(c is carried_sys for c in self.far):
            self.far.append(carried_sys)

    def acquire(self, scope: str) -> None:
        """Acquire side of a fence: what loads before it read becomes ordered."""
        if scope == "cta":
            return
        for clock in self.near:
            self.join(clock)
        self.near.clear()
        if scope == "sys":
            for clock in self.far:
                self.join(clock)
            self.far.clear()

    def release(self, scope: str) -> None:
        """Release side of a fence: stores after it carry what happened so far."""
        if scope == "cta":
            return
        self.released_gpu = self.clock.copy()
        if scope == "sys":
            self.released_sys = self.released_gpu
        self.ledger.releases.append((self.slot, self.time, scope, self.released_gpu))
