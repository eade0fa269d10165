"""One call of one operation by one warp: performs the operation's effects in the order and with the strength of the effect table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ncclep_py.errors import Code, Phase
from ncclep_py.memory_map import WAITS
from ncclep_py.simulator.errors import OutOfBoundsError
from ncclep_py.simulator.task import Cell, Task
from ncclep_py.simulator.words import Word

if TYPE_CHECKING:
    from ncclep_py.simulator.engine import Simulator

__all__ = ["Access", "Call", "Effect", "parse"]

LOW = (1 << 32) - 1
VECTORS = {"tokens", "slot", "rows", "staging", "out"}
"""What operations access as rows of 16-byte vectors."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """One entry of an effect list, e.g. ``st.relaxed.sys head``.

    Attributes:
        kind: ``ld``, ``st``, ``cp``, ``atom``, ``fence`` or ``bar``.
        order: ``async``, ``weak``, ``nc``, ``relaxed``, ``acquire``, ``release``, ``acq_rel`` or ``sync``.
        scope: ``cta``, ``gpu`` or ``sys``; empty for plain accesses and barriers.
        noun: what it touches.
    """

    kind: str
    order: str
    scope: str
    noun: str


@functools.cache
def parse(text: str) -> Effect:
    """The effect written as `text`."""
    words, _, noun = text.strip().partition(" ")
    kind, order, scope = (words.split(".") + [""])[:3]
    plain = order in ("async", "weak", "nc")
    known = kind in ("ld", "st", "cp", "atom", "fence", "bar") and (plain or order in ("relaxed", "acquire", "release", "acq_rel", "sync"))
    if not known or (scope not in ("cta", "gpu", "sys") and not (kind == "bar" or plain)):
        raise ValueError(f"not an effect: {text!r}")
    return Effect(kind, order, scope, noun)


class Access:
    """How a handler touches memory for one effect: with the effect's order and scope."""

    __slots__ = ("agent", "effect", "memory", "scheduler", "sim", "task", "words")

    def __init__(self, task: Task, sim: Simulator, effect: Effect) -> None:
        self.task, self.agent, self.sim, self.effect = task, task.agent, sim, effect
        self.memory, self.words, self.scheduler = sim.memory, sim.words, sim.scheduler

    # ---- bytes ----
    def read(self, address: int, size: int) -> np.ndarray:
        """Bytes of a plain load."""
        self._check_vectors(address)
        return self.memory.read(self.agent, address, size, constant=self.effect.order in ("async", "nc"))

    def write(self, address: int, data: np.ndarray) -> None:
        """A plain store of bytes."""
        self._check_vectors(address)
        self.memory.write(self.agent, address, len(data))[:] = data

    def _check_vectors(self, address: int) -> None:
        """Rows move in vectors of 16 bytes, which a GPU traps on elsewhere."""
        if address % 16 and self.effect.noun in VECTORS and self.task.site[0] != "ht_zero_pads":   # which clears weights of 4 bytes, too
            raise OutOfBoundsError(f"{self.task.at()} accesses a row at {address:#x}, which is not aligned to 16 bytes")

    # ---- words ----
    def word(self, address: int) -> Word:
        """The control word at an address."""
        return self.words.word(self.agent, address)

    def load(self, word: Word) -> int:
        """Load a control word."""
        value = self.words.load(self.agent, word, self.effect.order, self.effect.scope)
        if self.scheduler.eager:
            self.task.seen = hash((self.task.seen, value))
        return value

    def store(self, address: int, value: int) -> None:
        """Store a control word."""
        word = self.word(address)
        self.scheduler.send(word, self.words.store(self.agent, word, value, self.effect.order, self.effect.scope))

    def swap(self, address: int, value: int) -> int:
        """Atomic exchange; the old value."""
        word = self.word(address)
        old, store = self.words.swap(self.agent, word, value, self.effect.order, self.effect.scope)
        self.scheduler.send(word, store)
        return old


Handler = Callable[[Access], "int | None"]


class Call:
    """What operations are written with."""

    def __init__(self, sim: Simulator, name: str, effects: Sequence[str], scope: str, meets: bool, waits: bool = False) -> None:
        """`meets`: the declared operation ends with all warps agreeing on its result; `waits`: it counts how long it waits for whom."""
        self.sim, self.name, self.scope, self.meets, self.waits = sim, name, scope, meets, waits
        self.effects = [parse(e) for e in effects]
        self.scheduler = sim.scheduler

    def perform(self, task: Task, args: tuple[int, ...], handlers: dict[str, Handler]) -> int:
        """Perform all effects; a handler's result, if it has one, is the operation's. Block scope: the bitwise or over all warps."""
        block_scope, scheduler = self.scope == "block", self.scheduler
        if block_scope:
            task.block.check_call(task, self.name, args)
        result, agreed = 0, False
        for effect in self.effects:
            scheduler.pause(effect.kind, effect.noun)
            if effect.kind == "bar":
                if "bar" in handlers:   # what one warp does before it meets the others
                    result = handlers["bar"](Access(task, self.sim, effect)) or 0
                result, agreed = scheduler.meet(task, result, join=True), True
                continue
            task.agent.tick(task.site)
            if effect.kind == "fence":
                task.agent.acquire(effect.scope)
                task.agent.release(effect.scope)
                continue
            handler = handlers.get(effect.noun)
            if handler is None:
                raise ValueError(f"{self.name} does not know how to access {effect.noun!r}")
            value = handler(Access(task, self.sim, effect))
            if value is not None:
                result, agreed = value, False
        if self.meets and not agreed:
            result = scheduler.meet(task, result, join=False)
        return result

    def cell(self, task: Task, name: str) -> Cell:
        """An array in the block's shared memory."""
        return task.block.cell(name)

    def waits_at(self, task: Task, fail: int, one_block: int) -> int:
        """Where this warp adds up how long it waits for each rank, 0 for nowhere; of waits of all blocks the first block counts."""
        if not self.waits or (task.block.index and not one_block):
            return 0
        return int(self.sim.memory.read(task.agent, fail + WAITS[one_block], 8).view(np.uint64)[0])

    # ---- failure -----------------------------------------------------------------------------------------------------------
    def note(self, task: Task, fail: int, record: int, code: Code, epoch: int, phase: Phase, rank: int, peer: int, culprit: int, seen: int,
             expected: int) -> None:
        """Write the error record, if this is the operation's first and the host has read the last one."""
        if not self._claim(task, fail + 8, epoch, 1):
            return
        held = self.sim.memory.read(task.agent, record, 64).view(np.int64)
        if held[0] == 0:
            out = self.sim.memory.write(task.agent, record, 64).view(np.int64)
            out[:] = (code, epoch, phase, rank, peer, culprit, seen, expected)

    def give_up(self, task: Task, fail: int, record: int, code: Code, epoch: int, phase: Phase, rank: int, peer: int, culprit: int, seen: int,
                expected: int) -> int:
        """This rank fails this operation, unless it already did; writes the record. Returns the code."""
        self._claim(task, fail, epoch, (culprit & 0xFFFFFF) << 8 | code)
        self.note(task, fail, record, code, epoch, phase, rank, peer, culprit, seen, expected)
        return int(code)

    def _claim(self, task: Task, address: int, epoch: int, low: int) -> bool:
        """Compare-and-swap of a word tagged with an epoch: only the first of an epoch succeeds."""
        words, agent = self.sim.words, task.agent
        agent.tick(task.site)
        word = words.word(agent, address)
        last = word.stores[-1]
        if last.value >> 32 == epoch and last.value & 0xFFFFFFFF:   # a claim's low half is never 0; fresh memory's is
            word.show(agent.rank, last)
            return False
        self.scheduler.send(word, words.swap(agent, word, epoch << 32 | low, "relaxed", "gpu")[1])
        return True
