"""A run as a timeline for chrome://tracing or Perfetto: one process per rank, one thread per warp, one scheduler step per microsecond."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Event", "write_trace"]

Event = tuple[int, int, int, str, str, int, int]
"""rank, block (-1: host), warp, operation, label of the launch, first step, last step."""


def write_trace(path: str | Path, events: Iterable[Event]) -> None:
    """Write `events` as Chrome trace JSON."""
    rows: list[dict[str, object]] = []
    threads: dict[tuple[int, int, int], int] = {}
    for rank, block, warp, op, label, begin, end in events:
        key = (rank, block, warp)
        if key not in threads:
            threads[key] = len(threads)
            name = "host" if block < 0 else f"block {block} warp {warp}"
            rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
            rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": threads[key], "args": {"name": name}})
        rows.append({"ph": "X", "name": op, "cat": label, "pid": rank, "tid": threads[key], "ts": begin, "dur": max(end - begin, 1)})
    Path(path).write_text(json.dumps({"traceEvents": rows}))
