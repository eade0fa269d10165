"""A run as a timeline: which phase each block of each rank was in, who waited for whom, and a file for Perfetto (ui.perfetto.dev) or chrome://tracing.

Events come from the stamps of kernels (``kernels.stamps``), on a GPU (``GroupConfig(trace=True)``, ``Group.timeline``) or in the simulator, in
one shape. Times of the simulator are scheduler steps, drawn as microseconds: an order of events, no measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ncclep_py.kernels.stamps import WAITS, Step

__all__ = ["Event", "Operation", "Wait", "add_trace_argument", "chrome_trace", "events_of", "from_json", "last_pair", "operations", "to_json",
           "waits", "writable", "write_chrome_trace"]

SIMULATED = "simulated, no measurement: one step of the scheduler is drawn as one microsecond"
STEP_NS = 1000
WAITING = frozenset(step.text for step in WAITS)


@dataclasses.dataclass(frozen=True, order=True)
class Event:
    """One phase of one block.

    Attributes:
        begin_ns, end_ns: nanoseconds of the GPU's global timer; simulator: scheduler steps times 1000.
        rank, block: whose.
        kernel: name of the kernel.
        phase: what it did, the text of a ``stamps.Step``.
        launch: kernels this block was in before; tells two launches of one kernel apart.
        multiprocessor: where the block ran, -1 in the simulator.

    Example:
        >>> from ncclep_py.timeline import Event
        >>> Event(1000, 3000, rank=0, block=0, kernel="ll_dispatch", phase="wait for HEAD").waits
        True
    """

    begin_ns: int
    end_ns: int
    rank: int
    block: int
    kernel: str
    phase: str
    launch: int = 0
    multiprocessor: int = -1

    @property
    def waits(self) -> bool:
        """Whether the block did nothing but wait for others."""
        return self.phase in WAITING


@dataclasses.dataclass(frozen=True)
class Operation:
    """One kernel of one rank: its events, in order."""

    rank: int
    kernel: str
    events: tuple[Event, ...]

    @property
    def begin_ns(self) -> int:
        """When its first block began."""
        return self.events[0].begin_ns

    @property
    def end_ns(self) -> int:
        """When its last block ended."""
        return max(e.end_ns for e in self.events)

    def of(self, step: Step) -> list[Event]:
        """Its events of one phase."""
        return [e for e in self.events if e.phase == step.text]


@dataclasses.dataclass(frozen=True)
class Wait:
    """`event` could end when rank `culprit`, the last of all ranks, had published what it waited for: by `told_ns`, where the stamp after the
    publication stands, or the end of the wait, if that came first."""

    event: Event
    culprit: int
    told_ns: int
    culprit_block: int = 0


def events_of(stamps: Iterable[tuple[int, int, str, int, int]], unit_ns: int = STEP_NS) -> list[Event]:
    """Events of (rank, block, kernel, phase, time), each block's in the order in which it wrote them; a phase lasts until the block's next stamp."""
    begun: dict[tuple[int, int], tuple[str, int, int]] = {}
    launches: dict[tuple[int, int], int] = {}
    events = []
    for rank, block, kernel, phase, time in stamps:
        at = (rank, block)
        before = begun.pop(at, None)
        if before is not None and before[0] == kernel:
            events.append(Event(before[2] * unit_ns, time * unit_ns, rank, block, kernel, Step(before[1]).text, launches.get(at, 0)))
        if phase != Step.END:
            begun[at] = (kernel, phase, time)
        else:
            launches[at] = launches.get(at, 0) + 1
    return sorted(events)


def operations(events: Iterable[Event]) -> dict[int, list[Operation]]:
    """The kernels of each rank, in order. Kernels of one rank's stream do not overlap, and a block is in a kernel once."""
    visits: dict[tuple[int, int, int], list[Event]] = {}
    for event in sorted(events):
        visits.setdefault((event.rank, event.block, event.launch), []).append(event)
    found: dict[int, list[tuple[set[int], list[Event]]]] = {}
    for (rank, block, _), visit in sorted(visits.items(), key=lambda item: (item[1][0], item[0])):
        ranks = found.setdefault(rank, [])
        if not ranks or ranks[-1][1][0].kernel != visit[0].kernel or block in ranks[-1][0]:
            ranks.append((set(), []))
        ranks[-1][0].add(block)
        ranks[-1][1].extend(visit)
    return {rank: [Operation(rank, group[0].kernel, tuple(sorted(group))) for _, group in groups] for rank, groups in sorted(found.items())}


# ---- who waits for whom --------------------------------------------------------------------------------------------------------
def waits(events: Iterable[Event]) -> list[Wait]:
    """For every wait for other ranks: whose word came last. Operations are matched between ranks from the last one backwards."""
    by_rank = {rank: [op for op in ops if op.of(Step.HEAD)] for rank, ops in operations(events).items()}
    found = []
    for back in range(1, 1 + min((len(ops) for ops in by_rank.values()), default=0)):
        together = {rank: ops[-back] for rank, ops in by_rank.items()}
        heads = {rank: _told(op) for rank, op in together.items()}
        counts = {rank: max(((e.end_ns, e.block) for e in op.of(Step.COUNT)), default=None) for rank, op in together.items()}
        arrived = {rank: max(((e.begin_ns, e.block) for e in op.of(Step.WAIT_ARRIVED)), default=None) for rank, op in together.items()}
        for op in together.values():
            for step, told in ((Step.WAIT_HEADS, heads), (Step.WAIT_COUNTS, counts), (Step.WAIT_ARRIVED, arrived)):
                known = {r: t for r, t in told.items() if t is not None}
                if len(known) == len(together):
                    culprit = max(known, key=lambda r: (known[r][0], -r))
                    at, block = known[culprit]
                    found += [Wait(event, culprit, min(at, event.end_ns), block) for event in op.of(step)]
    return sorted(found, key=lambda w: w.event)


def _told(op: Operation) -> tuple[int, int] | None:
    """When and by which block a kernel's HEAD was published: block 0, or the last block of a kernel that packs its rows first."""
    packs = bool(op.of(Step.PACK))
    return max(((e.end_ns, e.block) for e in op.of(Step.HEAD) if packs or e.block == 0), default=None)


def last_pair(events: Iterable[Event]) -> list[Event]:
    """What each rank did from its last dispatch on."""
    found: list[Event] = []
    for ops in operations(events).values():
        starts = [i for i, op in enumerate(ops) if "dispatch" in op.kernel and "complete" not in op.kernel]
        found += [event for op in ops[starts[-1] if starts else 0:] for event in op.events]
    return sorted(found)


# ---- files ---------------------------------------------------------------------------------------------------------------------
def chrome_trace(events: Iterable[Event], simulated: bool) -> dict[str, Any]:
    """`events` as a Chrome trace: a process per rank, a thread per block, a slice per kernel and in it one per phase; an arrow from the rank that
    came last to whoever waited for it. Times in microseconds since the first event."""
    events = sorted(events)
    start = events[0].begin_ns if events else 0
    rows: list[dict[str, Any]] = []
    for rank, block in sorted({(e.rank, e.block) for e in events}):
        if not any(row["pid"] == rank for row in rows):
            rows.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
            rows.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": block, "args": {"name": f"block {block}"}})

    def micro(nanoseconds: int) -> float:
        return round(nanoseconds / 1000, 3)

    for ops in operations(events).values():
        for op in ops:
            for block in sorted({e.block for e in op.events}):
                own = [e for e in op.events if e.block == block]
                rows.append({"ph": "X", "name": op.kernel, "cat": "kernel", "pid": op.rank, "tid": block, "ts": micro(own[0].begin_ns - start),
                             "dur": micro(own[-1].end_ns - own[0].begin_ns), "args": {"multiprocessor": own[0].multiprocessor}})
    told = {wait.event: wait for wait in waits(events)}
    for event in events:
        row: dict[str, Any] = {"ph": "X", "name": event.phase, "cat": "wait" if event.waits else "work", "pid": event.rank, "tid": event.block,
                               "ts": micro(event.begin_ns - start), "dur": micro(event.end_ns - event.begin_ns), "args": {"kernel": event.kernel}}
        wait = told.get(event)
        if wait is not None:
            row["args"]["last rank to come"] = wait.culprit
        rows.append(row)
    for number, wait in enumerate(w for w in told.values() if w.culprit != w.event.rank and w.event.begin_ns < w.told_ns <= w.event.end_ns):
        at = {"cat": "waited for", "name": f"rank {wait.event.rank} waited for rank {wait.culprit}", "id": number}
        rows.append(at | {"ph": "s", "pid": wait.culprit, "tid": wait.culprit_block, "ts": micro(wait.told_ns - start)})
        rows.append(at | {"ph": "f", "bp": "e", "pid": wait.event.rank, "tid": wait.event.block, "ts": micro(wait.event.end_ns - start)})
    source = SIMULATED if simulated else "in-kernel timestamps of the GPU's global timer; stamping itself takes time"
    return {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": {"source": source}}


def write_chrome_trace(events: Iterable[Event], path: str | Path, simulated: bool = False) -> None:
    """Write `chrome_trace` to a file.

    Example:
        >>> import torch
        >>> import ncclep_py as ep
        >>> import json, os, tempfile
        >>> from ncclep_py.timeline import write_chrome_trace
        >>> def program(comm):
        ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1, trace=True)
        ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, torch.tensor([[0]])) as handle:
        ...         handle.dispatch(torch.ones(1, 8, dtype=torch.bfloat16))
        ...         return group.timeline()
        >>> with ep.LocalWorld(2, "sim") as world:
        ...     events = [event for events in world.run(program) for event in events]
        >>> file = os.path.join(tempfile.mkdtemp(), "t.json")
        >>> write_chrome_trace(events, file, simulated=True)   # open it in ui.perfetto.dev
        >>> with open(file) as opened:
        ...     len(json.load(opened)["traceEvents"]) > len(events)
        True
    """
    Path(path).write_text(json.dumps(chrome_trace(events, simulated)))


def to_json(events: Iterable[Event]) -> list[list[Any]]:
    """Events as lists, for a benchmark's record; `from_json` reads them."""
    return [list(dataclasses.astuple(e)) for e in events]


def from_json(rows: Sequence[Sequence[Any]]) -> list[Event]:
    """Events from what `to_json` made."""
    return [Event(*row) for row in rows]


def add_trace_argument(parser: argparse.ArgumentParser) -> None:
    """The option ``--trace FILE`` of a command that runs operations."""
    parser.add_argument("--trace", metavar="FILE", type=writable,
                        help="write a timeline for ui.perfetto.dev or chrome://tracing; kernels are compiled with stamps, which makes them slower")


def writable(path: str) -> str:
    """Type of an option that names a file to write: whether it can be is found out before the run and not after it."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}: {folder} must be a folder that can be written")
    return path
