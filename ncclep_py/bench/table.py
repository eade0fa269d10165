"""Rows of a record as lines for a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ncclep_py.bench.case import Case

__all__ = ["COLUMNS", "line", "table"]

COLUMNS = ("pair", "chained_pair", "flushed_pair", "eager_pair", "dispatch", "update", "step", "both_passes", "heads_pair", "empty_pair")
"""Figures, in the order in which they are shown."""


def case_of(row: dict[str, Any]) -> Case:
    """The case a row is of."""
    return Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)})


def line(row: dict[str, Any]) -> str:
    """One row: what, whether right, its figures in microseconds."""
    told = f"{row['implementation']:<18} {case_of(row).name()}"
    if "error" in row:
        return f"{told}: {row['error'].strip().splitlines()[-1]}"
    figures = row["figures"]
    parts = [f"{name} {figures[name]['median_us']:.1f}" for name in COLUMNS if name in figures]
    if row.get("host_us") is not None:
        parts.append(f"host {row['host_us']:.0f}/call")
    if row.get("share_of_copy") is not None:
        parts.append(f"{100 * row['share_of_copy']:.0f} % of copy bandwidth")
    return f"{told}: {'right' if row['verified'] else 'WRONG RESULTS'}{', ' + ', '.join(parts) if parts else ''}"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Implementations of the same case side by side: microseconds per chained pair (eager where nothing can be captured), and ours against each."""
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        if "error" not in row and row["verified"]:
            figure = next((row["figures"][n]["median_us"] for n in ("chained_pair", "pair", "eager_pair") if n in row["figures"]), None)
            if figure is not None:
                cases.setdefault(case_of(row).name(), {})[row["implementation"]] = figure
    told = []
    for name, by in cases.items():
        ours = by.get("ncclep_py")
        others = [f"{peer} {us:.1f}" + (f" ({us / ours:.2f}x)" if ours else "") for peer, us in by.items() if peer != "ncclep_py"]
        if ours is not None and others:
            told.append(f"{name}: ncclep_py {ours:.1f}, {', '.join(others)}")
    return told
