"""Timelines of a benchmark's cases as files for ui.perfetto.dev, from the stamps in its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ncclep_py.timeline import from_json, write_chrome_trace

__all__ = ["write_traces"]


def write_traces(record: dict[str, Any], path: str | Path) -> list[tuple[Path, dict[str, Any]]]:
    """Write the stamps of each row that has some: to `path`, or if there are several rows to ``NAME-1.json``, ``NAME-2.json`` and so on, since
    their clocks have nothing to do with each other.

    Returns:
        The files, each with its row.
    """
    path = Path(path)
    rows = [row for row in record["rows"] if row.get("stamps")]
    found = []
    for number, row in enumerate(rows, 1):
        file = path if len(rows) == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        write_chrome_trace(from_json(row["stamps"]), file, simulated=row["backend"] == "sim")
        found.append((file, row))
    return found
