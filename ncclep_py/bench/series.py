"""What the pictures of a report show, as numbers: from the rows of records to series with their floors. No drawing here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from ncclep_py.bench.case import IDENTITY
from ncclep_py.bench.compare import PREFERRED
from ncclep_py.bench.statistics import Figure

__all__ = ["FIGURES", "OURS", "Panel", "Point", "Ratio", "Row", "Series", "latency", "bandwidth", "ratios", "rows_of", "scaling", "words_of"]

OURS = "ncclep_py"
FIGURES = {"chained_pair": "chained pair: slope between graphs of two lengths", "pair": "pair, graph of many divided by as many",
           "eager_pair": "eager pair, no graph"}
UNITS = {"tokens": "tokens", "sms": "SMs", "ranks": "ranks", "experts": "experts", "topk": "experts per token", "hidden": "columns", "gpus": "GPUs"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a record.

    Attributes:
        held: the row as the record has it.
        source: name of the record, empty if there is only one.
        copy_gb_s: copy bandwidth measured in the same run, None if not known.
    """

    held: dict[str, Any]
    source: str
    copy_gb_s: float | None

    def __getitem__(self, name: str) -> Any:
        return self.held.get(name)

    @property
    def implementation(self) -> str:
        """Whose operations, and of which record if there are several."""
        return str(self.held["implementation"]) + (f" ({self.source})" if self.source else "")

    @property
    def ours(self) -> bool:
        """Whether this is this library."""
        return bool(self.held["implementation"] == OURS)

    @property
    def simulated(self) -> bool:
        """Whether it comes from the simulator."""
        return bool(self.held.get("backend") == "sim")

    @property
    def usable(self) -> bool:
        """Whether its results were right, so that its times mean something."""
        return bool(self.held.get("verified")) and not self.held.get("error")

    def figure(self, name: str) -> Figure | None:
        """A figure of the row."""
        held = (self.held.get("figures") or {}).get(name)
        return Figure.from_json(held) if held else None

    def physical(self) -> int | None:
        """Bytes all ranks read and write for a dispatch and a combine."""
        held = (self.held.get("bytes") or {}).get("physical")
        return sum(held) if held else None

    def floor_us(self) -> float | None:
        """Microseconds in which the copy bandwidth moves the physical bytes."""
        physical = self.physical()
        return physical / (self.copy_gb_s * 1e3) if physical and self.copy_gb_s else None

    def without(self, *names: str) -> tuple[tuple[str, Any], ...]:
        """The case without some of its fields."""
        return tuple((name, self.held.get(name)) for name in IDENTITY if name not in names)


@dataclasses.dataclass(frozen=True)
class Point:
    """`y` at `x`, with the quartiles of the replays."""

    x: float
    y: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Series:
    """Points in the order of x. `floor`: not measured but a bound to measure against."""

    name: str
    points: tuple[Point, ...]
    floor: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """Series that belong into one picture.

    Attributes:
        case: what is the same in all rows, in words.
        figure: which figure, a name of `FIGURES`.
        series: measured ones first.
        rows: the rows they were made of.
    """

    case: str
    figure: str
    series: tuple[Series, ...]
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as long `implementation` takes as we do; `low` and `high` from the quartiles of both."""

    case: str
    implementation: str
    figure: str
    ratio: float
    low: float
    high: float


def rows_of(records: Sequence[tuple[str, dict[str, Any]]]) -> list[Row]:
    """All rows of (name, record) pairs."""
    several = len(records) > 1
    return [Row(row, name if several else "", (record.get("floors") or {}).get("copy_gb_s")) for name, record in records for row in record["rows"]]


def words_of(case: Iterable[tuple[str, Any]]) -> str:
    """A case in words; what is as usual is left out, and fields that are not given."""
    held = dict(case)
    usual = {"recipe": "none", "routing": "uniform", "alignment": 0, "backward": False, "backend": "nccl", "gpus": 1, "budget": "worst"}
    names = {"ll": "low latency", "ht": "high throughput"}
    parts = [names.get(held.pop("algorithm", None), ""), str(held.pop("layout", "") or "").upper()]
    for name, value in held.items():
        if value is None or (name in usual and value == usual[name]):
            continue
        unit = UNITS.get(name)
        if unit:
            parts.append(f"{value} {unit if value != 1 or name == 'topk' else unit[:-1]}")
        else:
            parts.append({"backward": "both passes", "backend": "simulated", "budget": f"{value} budget"}.get(name, str(value)))
    return ", ".join(p for p in parts if p)


def common_figure(rows: Sequence[Row]) -> str | None:
    """The first figure all rows have, else the first any has; figures of different kinds do not belong into one picture."""
    shared = next((name for name in PREFERRED if rows and all(row.figure(name) for row in rows)), None)
    return shared or next((name for name in PREFERRED if any(row.figure(name) for row in rows)), None)


def _panels(rows: Iterable[Row], axis: str, least: int) -> list[tuple[str, str, list[Row]]]:
    """(case, figure, rows) for each set of rows that differ in nothing but `axis` and whose they are, with at least `least` values of it."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.usable and not row.simulated:
            groups.setdefault(row.without(axis, "mode"), []).append(row)
    found = []
    for case, group in groups.items():
        figure = common_figure(group)
        group = [row for row in group if figure and row.figure(figure)]
        if figure and len({row[axis] for row in group}) >= least:
            found.append((words_of(case), figure, group))
    return found


def _named(row: Row, modes: set[Any]) -> str:
    """Whose, and in which mode where there are several."""
    return row.implementation + (f", {row['mode']}" if len(modes) > 1 else "")


def _lines(rows: Sequence[Row], axis: str, figure: str) -> list[Series]:
    by_name: dict[str, dict[float, Figure]] = {}
    modes = {row["mode"] for row in rows}
    for row in rows:
        held = row.figure(figure)
        assert held is not None   # `_panels` took only such rows
        name = _named(row, modes)
        by_name.setdefault(name, {})[float(row[axis])] = held
    return [Series(name, tuple(Point(x, f.median, f.low, f.high) for x, f in sorted(points.items()))) for name, points in by_name.items()]


def _floor(rows: Sequence[Row], axis: str, name: str, value: Any) -> list[Series]:
    """A floor over the axis; nothing where it is not known. The least of several rows at one place."""
    points: dict[float, float] = {}
    for row in rows:
        y = value(row)
        if y:
            points[float(row[axis])] = min(y, points.get(float(row[axis]), y))
    return [Series(name, tuple(Point(x, y, y, y) for x, y in sorted(points.items())), floor=True)] if points else []


def _null(name: str) -> Any:
    def value(row: Row) -> float | None:
        held = row.figure(name)
        return held.median if held else None

    return value


def latency(rows: Iterable[Row], least: int = 2) -> list[Panel]:
    """Microseconds of a pair over tokens per rank, with its floors: a pair of empty kernels, a pair that only exchanges HEADs, and bytes over the
    copy bandwidth."""
    panels = []
    for case, figure, group in _panels(rows, "tokens", least):
        floors = _floor(group, "tokens", "physical bytes / measured copy bandwidth", Row.floor_us)
        floors += _floor(group, "tokens", "pair that only exchanges HEADs", _null("heads_pair"))
        floors += _floor(group, "tokens", "pair of empty kernels", _null("empty_pair"))
        panels.append(Panel(case, figure, (*_lines(group, "tokens", figure), *floors), tuple(group)))
    return panels


def bandwidth(rows: Iterable[Row], least: int = 2) -> list[Panel]:
    """GB/s of physical bytes over physical bytes per rank (MB) of a pair; the measured copy bandwidth is the floor's counterpart, a ceiling."""
    panels = []
    for case, figure, group in _panels(rows, "tokens", least):
        by_name: dict[str, list[Point]] = {}
        sized = [row for row in group if row.physical()]
        modes = {row["mode"] for row in sized}
        for row in sorted(sized, key=lambda r: r.physical() or 0):
            held, moved = row.figure(figure), row.physical()
            assert held is not None and moved is not None
            x, rate = moved / row["ranks"] / 1e6, moved / 1e3
            name = _named(row, modes)
            by_name.setdefault(name, []).append(Point(x, rate / held.median, rate / held.high, rate / held.low))
        if len({p.x for points in by_name.values() for p in points}) < least:
            continue
        series = [Series(name, tuple(points)) for name, points in by_name.items()]
        copies = {row.copy_gb_s for row in sized if row.copy_gb_s}
        ends = sorted({p.x for s in series for p in s.points})
        series += [Series("measured copy bandwidth", tuple(Point(x, c, c, c) for x in (ends[0], ends[-1])), floor=True) for c in sorted(copies)]
        panels.append(Panel(case, figure, tuple(series), tuple(sized)))
    return panels


def scaling(rows: Iterable[Row], least: int = 2) -> list[Panel]:
    """Microseconds of a pair over multiprocessors per rank, and what perfect scaling of our first point would be."""
    panels = []
    for case, figure, group in _panels(rows, "sms", least):
        series = _lines(group, "sms", figure)
        first = next((s for s in series if s.name.startswith(OURS)), series[0])
        start = first.points[0]
        ideal = tuple(Point(p.x, *[start.y * start.x / p.x] * 3) for p in first.points)
        series.append(Series(f"{first.name} at {start.x:g} SMs, halved when SMs double", ideal, floor=True))
        series += _floor(group, "sms", "physical bytes / measured copy bandwidth", Row.floor_us)
        panels.append(Panel(case, figure, tuple(series), tuple(group)))
    return panels


def ratios(rows: Iterable[Row]) -> list[Ratio]:
    """Each other implementation's time over ours, case by case, by the first figure both have; ours in the same record."""
    rows = [row for row in rows if row.usable and not row.simulated]
    ours = {(row.source, row.without("mode")): row for row in rows if row.ours}
    found = []
    for row in rows:
        own = ours.get((row.source, row.without("mode")))
        if row.ours or own is None:
            continue
        figure = next((n for n in PREFERRED if row.figure(n) and own.figure(n)), None)
        if figure is None:
            continue
        theirs, mine = row.figure(figure), own.figure(figure)
        assert theirs is not None and mine is not None
        modes = "" if row["mode"] == own["mode"] else f" (theirs: {row['mode']}, ours: {own['mode']})"
        found.append(Ratio(words_of(row.without("mode")) + modes, row.implementation, figure, theirs.median / mine.median, theirs.low / mine.high,
                           theirs.high / mine.low))
    return found
