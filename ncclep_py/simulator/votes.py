"""Votes on the CPU, by which members agree about an attempt, and waits that a locked vote ends. See ``kernels/mask_ops.cu``, ``member_map``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ncclep_py.errors import Code, Phase
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, ahead, tagged
from ncclep_py.simulator.words import Word

__all__ = ["COMMITS", "FAILS", "LOCKED", "LOCKED_WRITER", "MASK_BITS", "WRITES", "Outcome", "arbitrate"]

WRITES, COMMITS, FAILS, LOCKED, LOCKED_WRITER = range(5)
MASK_BITS = (1 << 29) - 1
VOTE_ORDER = "acq_rel"
"""Order of the compare-and-swaps. The fences around them order all that these programs show; the GPU's have it all the same."""
VOTE_SCOPE = "sys"
"""Their scope."""


def _vote(epoch: int, state: int, low: int) -> int:
    return tagged(epoch, state << 29 | low)


def _state(vote: int) -> int:
    return (vote & LOW) >> 29


def _locked(vote: int, epoch: int) -> bool:
    distance = ahead(vote >> 32, epoch)
    return distance > 0 or (distance == 0 and _state(vote) >= LOCKED)


def _cas(call: Call, task: Task, word: Word, expected: int | None, value: int) -> int:
    """Compare-and-swap of the newest value; the old one. `expected` None: never stores."""
    call.scheduler.pause("atom", "vote")
    task.agent.tick(task.site)
    words, last = call.sim.words, word.stores[-1]
    if expected is None or last.value != expected:
        call.sim.memory.check_strong(task.agent, word.region, word.address, writing=False)
        words._take(task.agent, last, VOTE_ORDER, VOTE_SCOPE)
        word.show(task.rank, last)
        found = last.value
    else:
        found, store = words.swap(task.agent, word, value, VOTE_ORDER, VOTE_SCOPE)
        word.show(task.rank, store)
        call.scheduler.send(word, store)
    if call.scheduler.eager:
        task.seen = hash((task.seen, found))
    return found


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended: code 0 (committed under mask `low`), AGAIN (next mask `low`), LEFT_BEHIND, or failed (None) for the reason `low`."""

    code: int | None
    low: int


def arbitrate(call: Call, task: Task, window: int, votes: int, num_ranks: int, epoch: int, proposal: int) -> Outcome:
    """Lock the votes of all ranks, then find or make the verdict on this attempt."""
    ends, left, writers, theirs = [], False, 0, 0
    for peer in range(num_ranks):
        word = call.sim.words.word(task.agent, call.sim.peer_address(task, window, votes, peer))
        while True:
            old = _cas(call, task, word, None, 0)
            distance, state = ahead(old >> 32, epoch), _state(old)
            if distance > 0:
                left = True
            elif distance == 0 and state in (COMMITS, FAILS):
                ends.append((state, old & MASK_BITS))
            elif distance == 0 and state >= LOCKED:
                theirs |= old & MASK_BITS
                writers |= (state == LOCKED_WRITER) << peer
            elif _cas(call, task, word, old, _vote(epoch, LOCKED_WRITER if distance == 0 else LOCKED, proposal)) != old:
                continue
            else:
                writers |= (distance == 0) << peer
            break
    _fence(task)
    if ends:
        state, low = ends[0]
        return Outcome(0 if state == COMMITS else None, low)
    if left:
        return Outcome(Code.LEFT_BEHIND, 0)
    proposal = (proposal | theirs) & ~writers
    word = call.sim.words.word(task.agent, call.sim.peer_address(task, window, votes + 8, 0))
    while True:
        old = _cas(call, task, word, None, 0)
        distance = ahead(old >> 32, epoch)
        if distance > 0:
            return Outcome(Code.LEFT_BEHIND, 0)
        if distance == 0:
            proposal = old & MASK_BITS
        elif _cas(call, task, word, old, _vote(epoch, LOCKED, proposal)) != old:
            continue
        else:
            for peer in {r for r in range(num_ranks) if proposal >> r & 1} - call.sim.memory.outcast:
                call.sim.memory.outcast.add(peer)
                call.sim.memory.forgive(peer)
        _fence(task)
        return Outcome(Code.AGAIN, proposal)


def _fence(task: Task) -> None:
    task.agent.acquire("sys")
    task.agent.release("sys")


def _resolve(call: Call, task: Task, window: int, votes: int, rank: int, num_ranks: int, epoch: int, proposal: int, phase: Phase, fail: int,
             record: int) -> int:
    """Code of an operation whose attempt ended."""
    o = arbitrate(call, task, window, votes, num_ranks, epoch, proposal)
    if o.code is None:
        peer = o.low >> 8 & 31
        return call.give_up(task, fail, record, Code(o.low & 255), epoch, phase, rank, peer, peer, o.low >> 13, epoch)
    if o.code == Code.LEFT_BEHIND or o.low >> rank & 1:
        return call.give_up(task, fail, record, Code.EXCLUDED, epoch, phase, rank, rank, rank, 0, epoch)
    return o.code


def _wait(call: Call, task: Task, access: Access, words: Sequence[tuple[int, Word]], vote: Word, epoch: int, noun: str,
          waited: int) -> tuple[bool, int]:
    """Wait for words of (source, word): whether this attempt ended instead, and the sources that did not come in time. One warp."""
    def tags() -> list[tuple[int, int]]:
        return [(source, ahead(w.peek(task.agent).value >> 32, epoch)) for source, w in words]

    def done() -> bool:
        seen = tags()
        for source, d in seen:   # called whenever a word is delivered
            if d >= 0:
                came.setdefault(source, call.scheduler.step)
        return all(d == 0 for _, d in seen) or any(d > 0 for _, d in seen) or _locked(vote.peek(task.agent).value, epoch)

    def describe() -> tuple[str, list[int]]:
        missing = [source for source, d in tags() if d < 0]
        return f"waits in epoch {epoch} for {noun} of ranks {missing}", missing

    begun = call.scheduler.step
    came: dict[int, int] = {}
    while not done() and not task.late:
        call.scheduler.wait(task, done, describe)
    late, task.late = task.late, False
    missing = sum(1 << source for source, d in tags() if d < 0) if late else 0
    stop = bool(missing) or any(d > 0 for _, d in tags()) or _locked(vote.peek(task.agent).value, epoch)
    if waited:
        for source, step in came.items():
            total = call.sim.memory.write(task.agent, waited + 8 * source, 8).view(np.uint64)
            total += np.uint64(step - begun)
    for _, word in (*words, (0, vote)):
        access.load(word)
    return stop, missing
