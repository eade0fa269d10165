"""What went wrong, told as a story: who did what at which line of which kernel, and what is missing between them; who waits for whom, and why."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ncclep_py.simulator.clock import HOST, Agent, Ledger, Site

if TYPE_CHECKING:
    from ncclep_py.simulator.scheduler import Scheduler
    from ncclep_py.simulator.task import Task

__all__ = ["deadlock_story", "place", "quoted", "race_story"]

WIDTH = 110
Awaited = tuple[int, str]
"""Epoch of what a rank waits for, 0 if it has none, and what it is: ``HEAD of epoch 1``, ``signal 0 of context 1``."""


# ---- races -----------------------------------------------------------------------------------------------------------------------
def race_story(agent: Agent, where: str, mine: str, slot: int, time: int, theirs: str) -> str:
    """Both accesses in their order, their source lines, and the ordering that is missing.

    Args:
        agent: whose access `mine` comes now.
        where: the bytes, by name.
        mine, theirs: what was done to them, e.g. "reads".
        slot, time: whose access came before, and at which of its times.
    """
    ledger = agent.ledger
    lines = ["  who did what:"]
    for number, (who, at, what, object_) in enumerate(((slot, time, theirs, where), (agent.slot, agent.time, mine, "the same bytes")), 1):
        site = _site(ledger, who, at)
        lines.append(f"    {number}. {ledger.name(who)} {what} {object_}{'' if site is None else f', {place(site)}'}")
        lines += [] if site is None else quoted(site, "       ")
    lines.append("  what is missing:")
    lines += [f"    {line}" for line in _missing(agent, slot, time)]
    return "\n".join(lines)


def _missing(agent: Agent, slot: int, time: int) -> list[str]:
    ledger = agent.ledger
    me, them, far = ledger.name(agent.slot), ledger.name(slot), ledger.slots[slot][0] != agent.rank
    if {slot, agent.slot} & ledger.named.keys():
        needed = ("a signal added behind the put on its context, the wait of the rank that it is for, and a release and acquire between that rank "
                  "and whoever else is to know; for the source alone, a wait for the put's counter or for a flush of its context")
    elif far:
        needed = ("a release of system scope after 1 by whoever knows of it, a word stored after that, and an acquire of system scope that reads the "
                  "word")
    elif ledger.slots[slot][:2] == ledger.slots[agent.slot][:2] and ledger.slots[slot][1] != HOST:
        needed = "a barrier of the block"
    else:
        needed = "a barrier where both are in one block, a release and acquire of gpu scope, or the end of a kernel"
    lines = [f"no release/acquire chain leads from 1 to 2: it takes {needed}."]
    known = int(agent.clock[slot])
    nearest = _site(ledger, slot, known) if known else None
    if nearest is None:
        lines.append(f"The nearest is none: nothing that {them} ever did is ordered before 2.")
    else:
        lines.append(f"The nearest ends at {them}'s {place(nearest)}, which is ordered before 2; 1 came {_effects(time - known)} later.")
    release = next((r for r in ledger.releases if slot < len(r[3]) and r[3][slot] >= time and (r[2] == "sys" or not far)), None)
    narrow = next((r for r in ledger.releases if slot < len(r[3]) and r[3][slot] >= time), None)
    if release is not None:
        whose = f"{ledger.name(release[0])}'s{' own' * (release[0] == slot)}"
        lines.append(f"The first release that covers 1 is {whose} {place(_site(ledger, *release[:2]))}; {me} has acquired nothing that carries it.")
    elif narrow is not None:
        lines.append(f"{ledger.name(narrow[0])}'s {place(_site(ledger, *narrow[:2]))} released 1 with {narrow[2]} scope only, which other ranks "
                     "cannot acquire.")
    else:
        lines.append("Nobody has released 1 since.")
    return lines


def _effects(count: int) -> str:
    return f"{count} effect{'s' * (count != 1)}"


def _site(ledger: Ledger, slot: int, time: int) -> Site | None:
    log = ledger.logs[slot]
    return log[time] if 0 <= time < len(log) else None


def place(site: Site | None) -> str:
    """Operation, file, line and launch of a site."""
    if site is None:
        return "start"
    op, file, line, label = site
    return f"{op} ({file.rsplit('/', 1)[-1]}:{line}, {label})"


def quoted(site: Site, indent: str) -> list[str]:
    """The source line of a site, if its file can be read."""
    text = linecache.getline(site[1], site[2]).strip()
    return [f"{indent}| {text if len(text) <= WIDTH else text[:WIDTH - 3] + '...'}"] if text else []


# ---- deadlocks -------------------------------------------------------------------------------------------------------------------
def deadlock_story(scheduler: Scheduler, waiting: Sequence[Task]) -> str:
    """Who waits for whom, for which epoch, and who is the first cause.

    Args:
        scheduler: of the run that is stuck.
        waiting: tasks that wait for words or at barriers.
    """
    edges: dict[int, dict[int, Awaited]] = {}   # waiting rank -> missing rank -> the oldest it waits for
    for task in waiting:
        text, missing = task.waits_for() if task.waits_for else ("", [])
        for rank in missing:
            what = _awaited(text, rank)
            mine = edges.setdefault(task.rank, {})
            mine[rank] = min(mine.get(rank, what), what)
    lines = ["  who waits for whom:"]
    for rank, missing_of in sorted(edges.items()):
        whom = ", ".join(f"rank {other} ({what})" for other, (_, what) in sorted(missing_of.items()))
        lines.append(f"    rank {rank} -> {whom}")
    return "\n".join([*(lines if edges else []), *(f"  first cause: {line}" for line in _causes(scheduler, waiting, edges))])


def _awaited(text: str, rank: int) -> Awaited:
    """What a wait in words says of a rank it waits for."""
    signal = re.search(rf"signals.*?(\d+) of context (\d+) from rank {rank} ", text)
    if signal:
        return 0, f"signal {signal[1]} of context {signal[2]}"
    found = re.search(r"in epoch (\d+) for (\w+)", text)
    return (int(found[1]), f"{found[2]} of epoch {found[1]}") if found else (0, "a word")


def _causes(scheduler: Scheduler, waiting: Sequence[Task], edges: dict[int, dict[int, Awaited]]) -> list[str]:
    """Ranks that are waited for and wait for nobody; else those that wait for themselves; else the oldest wait of a circle."""
    awaited = {other: what for missing in edges.values() for other, what in missing.items()}
    ends = sorted(awaited.keys() - edges.keys())
    if ends:
        return [_why_absent(scheduler, rank, min(m[rank] for m in edges.values() if rank in m), edges) for rank in ends]
    selfish = sorted(rank for rank, missing in edges.items() if rank in missing)
    if selfish:
        rank = selfish[0]
        what = edges[rank][rank]
        if scheduler.sim.streams[rank].pending:
            return [_why_absent(scheduler, rank, what, edges)]
        which = f"rank{'s' * (len(selfish) > 1)} {', '.join(map(str, selfish))}"
        return [f"{which} wait{'s' * (len(selfish) == 1)} for {what[1]} of their own, which they did not publish"]
    if edges:
        (_, told), rank, other = min((what, rank, other) for rank, missing in edges.items() for other, what in missing.items())
        of = f"{told} from" if _is_signal(told) else f"{told} of"
        return [f"a circle, whose oldest wait is that of rank {rank} for {of} rank {other}: rank {other} waits itself and did "
                f"not {'add to' if _is_signal(told) else 'publish'} it before"]
    return [f"{task.at()} {task.waits_for()[0]}" for task in waiting[:1] if task.waits_for]


def _is_signal(told: str) -> bool:
    return told.startswith("signal ")


def _why_absent(scheduler: Scheduler, rank: int, what: Awaited, edges: dict[int, dict[int, Awaited]]) -> str:
    """Why a rank that waits for nobody did not publish a word, or add to a signal."""
    stream, told = scheduler.sim.streams[rank], what[1]
    do, did, doing = ("add to", "added to", "adding to") if _is_signal(told) else ("publish", "published", "publishing")
    if rank in scheduler.dead:
        return f"rank {rank} died before it {did} {told}"
    if stream.pending:
        blocks = [block.index for block in stream.pending]
        return (f"rank {rank} did not {do} {told}: its blocks {blocks} have not begun, because no more than {stream.running} run at once and none "
                "of these ends")
    if stream.busy:
        return f"rank {rank} did not {do} {told}: its warps wait for each other at a barrier"
    most = max(scheduler.sim.streams[other].started for other in edges)
    if stream.started < most:
        others = [str(r) for r in edges if scheduler.sim.streams[r].started == most]
        return (f"rank {rank} never entered the operation: its stream is empty after {stream.started} kernels and host calls, and "
                f"rank{'s' * (len(others) > 1)} {', '.join(others)} {'are in the one' if len(others) > 1 else 'is in the one'} with number {most}")
    return f"rank {rank} ended its kernel without {doing} {told}"
