"""Rows of a record as lines for a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ncclep_py.bench.case import Case
from ncclep_py.bench.record import budget_of

__all__ = ["COLUMNS", "line", "table"]

COLUMNS = ("pair", "chained_pair", "known_sizes_pair", "flushed_pair", "eager_pair", "eager_step", "dispatch", "update", "step", "both_passes",
           "plain_tensors_pair", "own_window_pair", "held_fused", "held_halves", "heads_pair", "empty_pair")
"""Figures, in the order in which they are shown."""

PREPARING = ("all_to_all_single", "deep_ep")
"""Who works out in every pair where rows go; in high throughput ours does so in `update`."""


def case_of(row: dict[str, Any]) -> Case:
    """The case a row is of."""
    return Case(**{field.name: row[field.name] for field in dataclasses.fields(Case) if field.name != "budget"}, budget=budget_of(row))


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
    """Ours beside others of the same case, graphs beside graphs and eager beside eager, the routing prepared in both or in neither."""
    right = [row for row in rows if "error" not in row and row["verified"]]
    ours = {case_of(row): row["figures"] for row in right if row["implementation"] == "ncclep_py"}
    told: dict[str, list[str]] = {}
    for row in right:
        mine, theirs = ours.get(case_of(row), {}), row["figures"]
        if row["implementation"] == "ncclep_py":
            continue
        eager = "eager_step" if row["implementation"] in PREPARING and "eager_step" in mine else "eager_pair"
        for here, there in (("chained_pair", "chained_pair"), ("chained_pair", "known_sizes_pair"), (eager, "eager_pair")):
            if here in mine and there in theirs:
                us, other = mine[here]["median_us"], theirs[there]["median_us"]
                text = f"{row['implementation']} {there} {other:.1f}, our {here} {us:.1f} us: {other / us:.2f}x"
                told.setdefault(case_of(row).name(), []).append(text)
    return [f"{name}: {'; '.join(found)}" for name, found in told.items()]
