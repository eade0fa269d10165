"""Registered memory with a shadow: who last wrote and who last read every few bytes, and how plain accesses are checked against it."""

from __future__ import annotations

import bisect
import ctypes
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import count_nonzero  # of small arrays: several times as fast as any()

from ncclep_py.simulator.clock import Agent, Ledger
from ncclep_py.simulator.errors import OutOfBoundsError, RaceError
from ncclep_py.simulator.story import race_story

if typing.TYPE_CHECKING:
    import torch

__all__ = ["LOCAL", "WINDOW", "Memory", "Part", "Region", "bytes_of"]

WINDOW, LOCAL = "window", "local"
PAYLOAD_GRANULE, CONTROL_GRANULE = 16, 4
NEAR = 4096
"""Bytes to which memory is told from which an access went astray."""
LARGE = 1 << 16
"""Bytes from which a tensor without parts is tracked per 16 bytes, not per 4."""


def bytes_of(memory: object) -> tuple[int, np.ndarray]:
    """(address, uint8 view) of a CPU tensor or array; the caller keeps `memory` alive."""
    if isinstance(memory, np.ndarray):
        address, size, contiguous = memory.ctypes.data, memory.nbytes, memory.flags.c_contiguous
    else:
        memory = typing.cast("torch.Tensor", memory)
        address, size, contiguous = memory.data_ptr(), memory.numel() * memory.element_size(), memory.is_contiguous()
        if memory.device.type != "cpu":
            raise ValueError(f"the simulator runs on CPU memory, got a tensor on {memory.device}")
    if not contiguous:
        raise ValueError("the simulator registers contiguous memory only")
    if size == 0:
        return address, np.zeros(0, np.uint8)
    return address, np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)


class Part:
    """A named byte range of a region with one granule size.

    Attributes:
        begin, end: bytes, relative to the region.
        granule: bytes per shadow entry.
        words: control words by address (`words.Word`), for parts accessed by relaxed operations.
        weak: whether a plain access ever touched it.
    """

    __slots__ = ("begin", "end", "granule", "name", "reads", "weak", "words", "writers", "writes")

    def __init__(self, name: str, begin: int, end: int, granule: int) -> None:
        self.name, self.begin, self.end, self.granule = name, begin, end, granule
        self.words: dict[int, Any] = {}
        self.weak = False
        self.writers: np.ndarray = np.zeros(0, np.int32)
        self.writes: np.ndarray = self.writers
        self.reads: np.ndarray = self.writers

    def shadow(self, slots: int) -> None:
        """Make the shadow, before the first plain access."""
        n = -(-(self.end - self.begin) // self.granule)
        self.writers, self.writes = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.reads = np.zeros((n, slots), np.int32)
        self.weak = True


class Region:
    """Registered memory of one rank.

    Attributes:
        address, end: first byte and end.
        bytes: uint8 view.
        owner: the region that was registered before and contains this one, if any; it then has the shadow of both.
        ranks: ranks that registered it (a tensor may serve several ranks of one process); `rank` is the first.
        uses: registrations that share this region.
    """

    __slots__ = ("address", "begins", "bytes", "end", "keep", "kind", "name", "owner", "parts", "rank", "ranks", "uses")

    def __init__(self, memory: object, name: str, rank: int, kind: str, parts: Sequence[tuple[str, int, int]]) -> None:
        self.address, self.bytes = bytes_of(memory)
        self.end = self.address + len(self.bytes)
        self.keep, self.name, self.rank, self.kind, self.uses = memory, name, rank, kind, 1
        self.owner: Region | None = None
        self.ranks = {rank}
        self.parts: list[Part] = []
        at = 0
        for part, begin, end in sorted(parts, key=lambda p: p[1]):
            self._add(name, at, begin)
            self._add(part, begin, min(end, len(self.bytes)))
            at = max(at, end)
        self._add(name, at, len(self.bytes))
        self.begins = [p.begin for p in self.parts]

    def _add(self, name: str, begin: int, end: int) -> None:
        if begin < end:
            large = name == self.name and self.kind == LOCAL and end - begin >= LARGE
            payload = large or name.startswith(("SLOT", "STAGING")) and name != "SLOT_HEADERS"
            self.parts.append(Part(name, begin, end, PAYLOAD_GRANULE if payload else CONTROL_GRANULE))

    def split(self, begin: int, end: int) -> list[tuple[Part, int, int]]:
        """(part, begin, end) with bytes relative to the part."""
        i = bisect.bisect_right(self.begins, begin) - 1
        found = []
        while begin < end:
            part = self.parts[i]
            stop = min(end, part.end)
            found.append((part, begin - part.begin, stop - part.begin))
            begin, i = stop, i + 1
        return found

    def part(self, address: int) -> Part:
        """The part that holds `address`."""
        return self.parts[bisect.bisect_right(self.begins, address - self.address) - 1]


class Memory:
    """All registered memory; checks and performs plain accesses.

    Attributes:
        outcast: ranks that others go on without; their reads are not checked.
        tolerant: whether their writes are not checked either, so that what they do to others can be looked at.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.regions: list[Region] = []
        self._bases: list[int] = []
        self.outcast: set[int] = set()
        self.tolerant = False

    # ---- registration --------------------------------------------------------------------------------------------------
    def add(self, region: Region) -> Region:
        """Register; regions inside one another share the shadow of the largest, which begins anew when a larger one comes."""
        if not len(region.bytes):
            return region
        i = max(bisect.bisect_right(self._bases, region.address) - 1, 0)
        inner = []
        while i < len(self.regions) and self.regions[i].address < region.end:
            other = self.regions[i]
            i += 1
            if other.end <= region.address:
                continue
            if other.address <= region.address and region.end <= other.end and (region.rank in other.ranks or other.kind == LOCAL):
                self._own(other, region)
                return region
            if region.address > other.address or other.end > region.end or other.kind == WINDOW or len(other.parts) > 1:
                raise ValueError(f"{region.name} of rank {region.rank} overlaps {other.name} of rank {other.rank}")
            inner.append(other)
        for other in inner:
            self._drop(other)
            self._own(region, other)
        i = bisect.bisect_right(self._bases, region.address)
        self.regions.insert(i, region)
        self._bases.insert(i, region.address)
        return region

    @staticmethod
    def _own(outer: Region, inner: Region) -> None:
        inner.owner = outer
        outer.uses += inner.uses
        outer.ranks |= inner.ranks

    def _drop(self, region: Region) -> None:
        i = self.regions.index(region)
        del self.regions[i], self._bases[i]

    def remove(self, region: Region) -> bool:
        """Forget a region when its last user is gone; whether it is."""
        while region.owner is not None:
            region = region.owner
        region.uses -= 1
        gone = region.uses == 0 and region in self.regions
        if gone:
            self._drop(region)
        return gone

    def grow(self, capacity: int) -> None:
        """Make room for clocks of `capacity` slots."""
        for region in self.regions:
            for part in region.parts:
                if part.weak:
                    part.reads = np.pad(part.reads, ((0, 0), (0, capacity - part.reads.shape[1])))
                for word in part.words.values():
                    word.grow(capacity)

    def find(self, agent: Agent, address: int, size: int) -> Region:
        """The region of an access; `OutOfBoundsError` if there is none this rank may touch."""
        i = bisect.bisect_right(self._bases, address) - 1
        region = self.regions[i] if i >= 0 else None
        if region is None or address + size > region.end:
            raise OutOfBoundsError(f"{self._me(agent)} accesses {size} bytes {self._near(address, size)}: nobody registered memory there")
        if region.kind != WINDOW and agent.rank not in region.ranks:
            raise OutOfBoundsError(f"{self._me(agent)} accesses {region.name}, private memory of rank {region.rank}")
        return region

    # ---- plain accesses ------------------------------------------------------------------------------------------------
    def read(self, agent: Agent, address: int, size: int, constant: bool = False) -> np.ndarray:
        """The bytes at `address` after checking a plain load; `constant`: a load that may see memory as it was before the kernel."""
        if size <= 0:
            return np.zeros(0, np.uint8)
        region = self.find(agent, address, size)
        begin = address - region.address
        if agent.rank in self.outcast:   # what it reads may be anything, and it will learn that
            return region.bytes[begin:begin + size]
        for part, b, e in region.split(begin, begin + size):
            g = self._granules(part, b, e)
            writers, writes = part.writers[g], part.writes[g]
            bad = agent.clock.take(writers) < writes
            if count_nonzero(bad):
                self._race(agent, region, part, g, int(bad.argmax()), "reads", writers, writes, "writes")
            if constant and count_nonzero(late := agent.start.take(writers) < writes):
                i = int(late.argmax())
                where, slot, time = self._where(region, part, g.start + i), int(writers[i]), int(writes[i])
                raise RaceError(f"{self._me(agent)} reads {where} with ld.nc, but it was written during this kernel by "
                                f"{self.ledger.describe(slot, time)}: such a load may see memory as it was before the kernel, whatever orders it.")
            part.reads[g, agent.slot] = agent.time
            for word in self._words(region, part, b, e):
                word.check_plain(self, agent, region, part, writing=False)
        return region.bytes[begin:begin + size]

    def write(self, agent: Agent, address: int, size: int) -> np.ndarray:
        """The bytes at `address`, to be written now, after checking a plain store."""
        if size <= 0:
            return np.zeros(0, np.uint8)
        region = self.find(agent, address, size)
        begin = address - region.address
        if self.tolerant and agent.rank in self.outcast:
            return region.bytes[begin:begin + size]
        for part, b, e in region.split(begin, begin + size):
            g = self._granules(part, b, e)
            writers, writes = part.writers[g], part.writes[g]
            bad = agent.clock.take(writers) < writes
            if count_nonzero(bad):
                self._race(agent, region, part, g, int(bad.argmax()), "writes", writers, writes, "writes")
            unread = part.reads[g] > agent.clock
            if count_nonzero(unread):
                i, slot = (int(x) for x in np.argwhere(unread)[0])
                self._race(agent, region, part, g, i, "writes", slot, part.reads[g][:, slot], "reads")
            writers[:] = agent.slot
            writes[:] = agent.time
            for word in self._words(region, part, b, e):
                word.check_plain(self, agent, region, part, writing=True)
        return region.bytes[begin:begin + size]

    def check_strong(self, agent: Agent, region: Region, address: int, writing: bool) -> None:
        """Check a relaxed access of a 64-bit word against plain accesses to the same bytes."""
        begin = address - region.address
        for part, b, e in region.split(begin, begin + 8):
            if not part.weak:
                continue
            g = self._granules(part, b, e)
            bad = agent.clock.take(part.writers[g]) < part.writes[g]
            if count_nonzero(bad):
                self._race(agent, region, part, g, int(bad.argmax()), "accesses (relaxed)", part.writers[g], part.writes[g], "writes (weak)")
            if writing and count_nonzero(unread := part.reads[g] > agent.clock):
                i, slot = (int(x) for x in np.argwhere(unread)[0])
                self._race(agent, region, part, g, i, "writes (relaxed)", slot, part.reads[g][:, slot], "reads (weak)")

    def forgive(self, rank: int) -> None:
        """What `rank` accessed so far is over: a time-out passed since."""
        slots = [i for i, (r, _, _) in enumerate(self.ledger.slots) if r == rank]
        for region in self.regions:
            for part in region.parts:
                if part.weak:
                    part.reads[:, slots] = 0
                    part.writes[np.isin(part.writers, slots)] = 0

    def _granules(self, part: Part, begin: int, end: int) -> slice:
        if not part.weak:
            part.shadow(self.ledger.capacity)
        return slice(begin // part.granule, -(-end // part.granule))

    @staticmethod
    def _words(region: Region, part: Part, begin: int, end: int) -> list[Any]:
        if not part.words:
            return []
        low, high = region.address + part.begin + begin, region.address + part.begin + end
        return [word for at, word in part.words.items() if at < high and at + 8 > low]

    # ---- messages --------------------------------------------------------------------------------------------------------
    def _me(self, agent: Agent) -> str:
        return self.ledger.describe(agent.slot, agent.time)

    def _near(self, address: int, size: int) -> str:
        """Where bytes outside of all regions begin, as seen from the memory around them."""
        i = bisect.bisect_right(self._bases, address)
        before, after = self.regions[max(i - 1, 0):i], self.regions[i:i + 1]
        found = []
        for region in (*before, *after):
            whose = f"{'the window' if region.kind == WINDOW else region.name} of rank {region.rank} ({len(region.bytes)} bytes)"
            if address < region.address:
                found.append((region.address - address, f"{region.address - address} bytes before {whose}"))
            elif address < region.end:
                return f"from byte {address - region.address} of {whose}, the last {address + size - region.end} of them behind its end"
            else:
                far = f"{address - region.end} bytes" if address > region.end else "right"
                found.append((address - region.end, f"{far} behind the end of {whose}"))
        near = [told for distance, told in sorted(found) if distance <= NEAR]
        return f"that begin {' and '.join(near)}" if near else f"at {address:#x}, far from all memory"

    @staticmethod
    def _where(region: Region, part: Part, granule: int, count: int = 1) -> str:
        begin = granule * part.granule
        return f"{part.name}[{begin}:{min(begin + count * part.granule, part.end - part.begin)}] of rank {region.rank}"

    def _race(self, agent: Agent, region: Region, part: Part, g: slice, i: int, mine: str, slots: np.ndarray | int, times: np.ndarray,
              theirs: str) -> None:
        """`slots` at `times` did `theirs` to granules from ``g.start``; the race is at number `i`."""
        slot, time, count = int(slots if isinstance(slots, int) else slots[i]), int(times[i]), 1
        same = times == time if isinstance(slots, int) else (times == time) & (slots == slot)
        while i + count < len(same) and same[i + count]:
            count += 1
        where = self._where(region, part, g.start + i)
        raise RaceError(self.sentence(agent, where, mine, slot, time, theirs, span=self._where(region, part, g.start + i, count)))

    def sentence(self, agent: Agent, where: str, mine: str, slot: int, time: int, theirs: str, note: str = "", span: str = "") -> str:
        """A race in words: both sides, the bytes, and the ordering that is missing; first as a sentence, then as a story (`span`: all bytes that
        the same two accesses race for)."""
        ledger, known = self.ledger, int(agent.clock[slot])
        rank = ledger.slots[slot][0]
        last = ledger.logs[slot][known] if 0 < known < len(ledger.logs[slot]) else None
        seen = f"only up to its {last[0]} in {last[3]}" if last else "nothing yet"
        how = "no barrier or acq_rel.gpu access" if rank == agent.rank else "no release of system scope after that access, acquired by an acquire,"
        return (f"{self._me(agent)} {mine} {where}, and {ledger.describe(slot, time)} {theirs} it: {how} orders the two. "
                f"Of {ledger.name(slot)}, this warp has seen {seen} (time {known} of {time}).{note}\n"
                + race_story(agent, span or where, mine, slot, time, theirs))
