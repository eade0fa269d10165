"""Waiting for tagged words {epoch << 32 | status << 24 | detail} of other ranks, and what their values mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ncclep_py.errors import Code, Status
from ncclep_py.simulator.call import Access
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.words import Word

__all__ = ["Verdict", "ahead", "around_status", "tagged", "wait_count", "wait_words"]

LOW = (1 << 32) - 1
ENDS_WAIT = (Code.ABORTED, Code.LEFT_BEHIND, Code.TIMEOUT)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of a wait: 0 or a code, whom it is about, who is to blame, and what was seen."""

    code: int = 0
    peer: int = 0
    culprit: int = 0
    seen: int = 0


def tagged(epoch: int, low: int) -> int:
    """A word of `epoch` with 32 low bits."""
    return (epoch & LOW) << 32 | low


def around_status(signature: int) -> int:
    """Bits 32 to 61 of a signature, around bits 24 and 25 of HEAD's second word, which are the status."""
    high = signature >> 32
    return high & 0xFFFFFF | high >> 24 << 26


def ahead(tag: int, epoch: int) -> int:
    """How many epochs `tag` comes after `epoch`, as 32-bit serial numbers."""
    return ((tag - epoch + (1 << 31)) & LOW) - (1 << 31)


def _judge(word: int, epoch: int, source: int, late: bool) -> Verdict | None:
    """What one source's word means; None: keep waiting."""
    tag, status, detail = word >> 32, word >> 24 & 3, word & 0xFFFFFF
    distance = ahead(tag, epoch)
    if distance > 0:
        return Verdict(Code.LEFT_BEHIND, source, source, tag)
    if distance < 0:
        return Verdict(Code.TIMEOUT, source, source, tag) if late else None
    if status == Status.ABORT:
        return Verdict(Code.ABORTED, source, detail, tag)
    if status == Status.REFUSED:
        return Verdict(Code.REFUSED, source, source, detail)
    return Verdict()


def _judge_head(high: int, low: int, epoch: int, source: int, late: bool, signature: int) -> Verdict | None:
    """What the two words of one source's HEAD mean: both must carry the epoch."""
    verdict = _judge(high, epoch, source, late)
    if verdict is None or verdict.code:
        return verdict
    verdict = _judge(low & ~LOW, epoch, source, late)
    if verdict is None or verdict.code:
        return verdict
    theirs = (high & 0xFFFFFF) << 32 | (high >> 26 & 63) << 56 | low & LOW
    return verdict if theirs == signature else Verdict(Code.MISMATCH, source, source, theirs)


def _choose(verdicts: Sequence[Verdict | None], own: int) -> Verdict | None:
    """Outcome over all sources; None: keep waiting."""
    bad = [v for v in verdicts if v is not None and v.code]
    urgent = [v for v in bad if v.code in ENDS_WAIT]
    if urgent:
        return urgent[0]
    if None in verdicts:
        return None
    told = [v for v in bad if v.code == Code.REFUSED and v.peer == own]   # my own refusal is no news to my host
    return (told or bad or [Verdict()])[0]


def wait_words(task: Task, access: Access, words: Sequence[Word], epoch: int, noun: str, own: int, low: Sequence[Word] = (),
               signature: int = 0, first: int = 0, waits: int = 0) -> Verdict:
    """Wait for a word of every rank from `first` on; for HEAD, `low` holds the other word of each; `waits`: where steps waited are added up."""
    begun = access.scheduler.step
    came: dict[int, int] = {}

    def judge() -> Verdict | None:
        seen = [w.peek(task.agent).value for w in words]
        verdicts = ([_judge_head(word, low[source].peek(task.agent).value, epoch, source, task.late, signature) for source, word in enumerate(seen)]
                    if low else [_judge(word, epoch, source, task.late) for source, word in enumerate(seen, first)])
        for source, verdict in enumerate(verdicts, first):   # called whenever a word is delivered
            if verdict is not None and verdict.code != Code.TIMEOUT:
                came.setdefault(source, access.scheduler.step)
        return _choose(verdicts, own)

    def describe() -> tuple[str, list[int]]:
        pairs = zip(words, low or words, strict=True)
        tags = [min((w.peek(task.agent).value >> 32 for w in pair), key=lambda tag: ahead(tag, epoch)) for pair in pairs]
        missing = [source for source, tag in enumerate(tags, first) if ahead(tag, epoch) < 0]
        return f"waits in epoch {epoch} for {noun} of ranks {missing}, whose words have epochs {[tags[m - first] for m in missing]}", missing

    while (verdict := judge()) is None:
        access.scheduler.wait(task, lambda: judge() is not None, describe)
    task.late = False
    for word in (*words, *low):
        access.load(word)
    if waits:
        for source, step in came.items():
            total = access.memory.write(task.agent, waits + 8 * source, 8).view(np.uint64)
            total += np.uint64(step - begun)
    return verdict


def wait_count(task: Task, access: Access, word: Word, epoch: int, source: int) -> tuple[int, int]:
    """Wait for a count of `source`: (code, the word)."""
    def old() -> bool:
        return ahead(word.peek(task.agent).value >> 32, epoch) < 0

    def describe() -> tuple[str, list[int]]:
        return f"waits in epoch {epoch} for COUNTS of rank {source}, whose word has epoch {word.peek(task.agent).value >> 32}", [source]

    while old() and not task.late:
        access.scheduler.wait(task, lambda: not old(), describe)
    timed_out, task.late = task.late, False
    value = access.load(word)
    distance = ahead(value >> 32, epoch)
    if distance < 0 and timed_out:
        return Code.TIMEOUT, value
    return (Code.LEFT_BEHIND if distance > 0 else 0), value
