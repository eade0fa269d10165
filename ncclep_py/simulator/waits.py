"""Waiting for tagged words {epoch << 32 | status << 24 | detail} of other ranks, and what their values mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ncclep_py.errors import Code, Status
from ncclep_py.simulator.call import Access
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.words import Word

__all__ = ["Verdict", "ahead", "tagged", "wait_count", "wait_words"]

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


def ahead(tag: int, epoch: int) -> int:
    """How many epochs `tag` comes after `epoch`, as 32-bit serial numbers."""
    return ((tag - epoch + (1 << 31)) & LOW) - (1 << 31)


def _judge(word: int, epoch: int, source: int, late: bool) -> Verdict | None:
    """What one source's word means; None: keep waiting."""
    tag, status, detail = word >> 32, word >> 24 & 0xFF, word & 0xFFFFFF
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


def _judge_all(task: Task, words: Sequence[Word], epoch: int) -> Verdict | None:
    """Outcome over all sources; None: keep waiting."""
    verdicts = [_judge(w.peek(task.agent).value, epoch, source, task.late) for source, w in enumerate(words)]
    bad = [v for v in verdicts if v is not None and v.code]
    urgent = [v for v in bad if v.code in ENDS_WAIT]
    if urgent:
        return urgent[0]
    if None in verdicts:
        return None
    return bad[0] if bad else Verdict()


def wait_words(task: Task, access: Access, words: Sequence[Word], epoch: int, noun: str) -> Verdict:
    """Wait for a word of every rank."""
    def describe() -> tuple[str, list[int]]:
        tags = [w.peek(task.agent).value >> 32 for w in words]
        missing = [source for source, tag in enumerate(tags) if ahead(tag, epoch) < 0]
        return f"waits in epoch {epoch} for {noun} of ranks {missing}, whose words have epochs {[tags[m] for m in missing]}", missing

    while (verdict := _judge_all(task, words, epoch)) is None:
        access.scheduler.wait(task, lambda: _judge_all(task, words, epoch) is not None, describe)
    task.late = False
    for word in words:
        access.load(word)
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
