"""Pictures of a report, drawn by matplotlib without a display: lines, bars, heat maps and timelines that can be read in greyscale."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.bench.series import FIGURES, Panel, Ratio, Row
from ncclep_py.kernels.stamps import Step
from ncclep_py.timeline import Event, Operation, operations, waits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DPI", "SIMULATED", "Picture", "draw_timeline", "heat", "lines", "overview", "png", "ratio_bars", "require_matplotlib", "rank_load"]

DPI = 110
SIMULATED = "simulated, no measurement"
MARKERS, STYLES = "osD^vPX*", ("-", "--", "-.", ":")
INKS = ("#000000", "#c44e00", "#0060a8", "#7a7a7a", "#5b2a86", "#2f7d32")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")
GREYS = ("#404040", "#b0b0b0", "#e0e0e0", "#808080", "#f4f4f4", "#d0d0d0")
MOST_LANES = 64


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture of a report.

    Attributes:
        name: for the file.
        title: above it.
        caption: below it: what it shows, in which unit, under which conditions.
        header, table: the numbers that are drawn.
        inches: width and height.
        draw: draws on an empty figure.
        simulated: it comes from the simulator, and says so.
    """

    name: str
    title: str
    caption: str
    header: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    inches: tuple[float, float]
    draw: Callable[[Figure], None]
    simulated: bool = False


def require_matplotlib() -> None:
    """``ImportError``, saying what to install, if there is no matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as e:
        raise ImportError("a report is drawn with matplotlib, which is not installed: pip install 'ncclep_py[report]'") from e


def png(picture: Picture) -> bytes:
    """A picture as PNG, `inches` x `DPI` pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=picture.inches, dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    picture.draw(figure)
    figure.suptitle(picture.title + (f"\n{SIMULATED}" if picture.simulated else ""), fontsize=11, fontweight="bold")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def _number(value: float) -> str:
    """Four digits, more where whole numbers have more, never an exponent for what is large."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _brief(value: float) -> str:
    """At most five characters up to a billion, for a cell of a heat map."""
    for least, size, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}"


# ---- lines -----------------------------------------------------------------------------------------------------------------
def lines(panel: Panel, name: str, title: str, x_label: str, y_label: str, caption: str, *, log_x: bool = True, log_y: bool = False) -> Picture:
    """Series over one axis. Measured ones have markers and whiskers (quartiles), floors are thin and grey; axes begin at zero or say log."""
    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        measured = [s for s in panel.series if not s.floor]
        for i, series in enumerate(measured):
            x, y = [p.x for p in series.points], [p.y for p in series.points]
            spread = [[max(p.y - p.low, 0.0) for p in series.points], [max(p.high - p.y, 0.0) for p in series.points]]
            axes.errorbar(x, y, yerr=spread, label=series.name, marker=MARKERS[i % len(MARKERS)], linestyle=STYLES[i % len(STYLES)],
                          color=INKS[i % len(INKS)], capsize=3, markersize=6, linewidth=1.6, markerfacecolor="white" if i % 2 else None)
        for i, series in enumerate(s for s in panel.series if s.floor):
            axes.plot([p.x for p in series.points], [p.y for p in series.points], label=series.name, color="#8a8a8a", linewidth=1.0,
                      linestyle=(0, (1 + 2 * i, 2)), marker="_|x"[i % 3], markersize=5)
        handles, labels = axes.get_legend_handles_labels()
        ordered = sorted(zip(handles, labels, strict=True), key=lambda pair: [s.name for s in panel.series].index(pair[1]))
        _axes(axes, sorted({p.x for s in panel.series for p in s.points}), x_label, y_label, log_x, log_y)
        figure.legend(*zip(*ordered, strict=True), loc="outside lower center", ncols=2 if len(ordered) < 7 else 3, fontsize=8, frameon=False)

    table = tuple((s.name + (" (floor)" if s.floor else ""), _number(p.x), _number(p.y), "" if s.floor else f"{_number(p.low)} to {_number(p.high)}")
                  for s in panel.series for p in s.points)
    told = f"{panel.case}. {FIGURES.get(panel.figure, panel.figure)}; markers are medians of the slowest rank, whiskers quartiles. {caption}"
    return Picture(name, title, told, ("series", x_label, y_label, "quartiles"), table, (7.6, 4.8), draw)


def _axes(axes: Axes, ticks: Sequence[float], x_label: str, y_label: str, log_x: bool, log_y: bool) -> None:
    if log_x:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        if len(ticks) <= 14:
            axes.set_xticks(list(ticks), [_number(t) for t in ticks])
    else:
        axes.set_xlim(left=0)
    if log_y:
        from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label + (", log scale" if log_x else ""))
    axes.set_ylabel(y_label + (", log scale" if log_y else ", from zero"))
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


# ---- bars ------------------------------------------------------------------------------------------------------------------
def overview(picture: str, title: str, bars: Sequence[tuple[str, str, float, float, float, float | None]], caption: str) -> Picture:
    """Microseconds of (case, implementation, median, low, high, floor or None), cases from top to bottom."""
    names = list(dict.fromkeys(b[1] for b in bars))
    places: list[float] = []
    ticks: dict[str, list[float]] = {}
    for case, *_ in bars:
        places.append(places[-1] + 1 if case in ticks else (places[-1] if places else -1) + 1.5)
        ticks.setdefault(case, []).append(places[-1])

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        height, floored, told = 0.9, False, set()
        for at, (_, name, median, low, high, floor) in zip(places, bars, strict=True):
            i = names.index(name)
            first = name not in told
            told.add(name)
            axes.barh(at, median, height * 0.9, color=GREYS[i % len(GREYS)], hatch=HATCHES[i % len(HATCHES)], edgecolor="black", linewidth=0.6,
                      xerr=[[median - low], [high - median]], capsize=2, label=name if first else None)
            axes.annotate(f" {_number(median)}", (high, at), va="center", fontsize=8)
            if floor:
                axes.plot([floor, floor], [at - height * 0.45, at + height * 0.45], color="black", linewidth=2.2,
                          label=None if floored else "physical bytes / measured copy bandwidth")
                axes.plot([floor, floor], [at - height * 0.45, at + height * 0.45], color="white", linewidth=0.8)
                floored = True
        axes.set_yticks([sum(t) / len(t) for t in ticks.values()], [_folded(c) for c in ticks], fontsize=8)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.set_ylim(places[-1] + 0.8, places[0] - 0.8)
        axes.set_xlabel("microseconds per dispatch + combine, from zero")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)

    table = tuple((case, name, _number(median), f"{_number(low)} to {_number(high)}", _number(floor) if floor else "")
                  for case, name, median, low, high, floor in bars)
    return Picture(picture, title, caption, ("case", "implementation", "microseconds", "quartiles", "floor, microseconds"), table,
                   (9.2, 1.6 + 0.30 * len(bars) + 0.30 * len(ticks)), draw)


def ratio_bars(ratios: Sequence[Ratio], caption: str) -> Picture:
    """Times of other implementations over ours."""
    names = list(dict.fromkeys(r.implementation for r in ratios))

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for at, ratio in enumerate(ratios):
            i = names.index(ratio.implementation)
            first = not any(r.implementation == ratio.implementation for r in ratios[:at])
            axes.barh(at, ratio.ratio, 0.7, color=GREYS[(i + 1) % len(GREYS)], hatch=HATCHES[(i + 1) % len(HATCHES)], edgecolor="black",
                      linewidth=0.6, xerr=[[ratio.ratio - ratio.low], [ratio.high - ratio.ratio]], capsize=2,
                      label=ratio.implementation if first else None)
            axes.annotate(f" {ratio.ratio:.2f}", (ratio.high, at), va="center", fontsize=8)
        axes.axvline(1, color="black", linewidth=1.2, linestyle="--", label="ncclep_py = 1")
        axes.set_yticks(range(len(ratios)), [_folded(r.case) for r in ratios], fontsize=8)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.set_ylim(len(ratios) - 0.4, -0.6)
        axes.set_xlabel("time of the other implementation / time of ncclep_py, from zero; above 1: ncclep_py is faster")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)

    table = tuple((r.case, r.implementation, r.figure, f"{r.ratio:.3f}", f"{r.low:.3f} to {r.high:.3f}") for r in ratios)
    return Picture("ratios", "Ratio to other implementations", caption, ("case", "implementation", "figure", "ratio", "by quartiles"), table,
                   (9.2, 1.6 + 0.5 * len(ratios)), draw)


def _folded(text: str, width: int = 44) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


# ---- heat maps ---------------------------------------------------------------------------------------------------------------
def heat(name: str, title: str, values: Sequence[Sequence[float]], x_label: str, y_label: str, unit: str, caption: str, simulated: bool) -> Picture:
    """A matrix in shades of grey, white being zero; with its numbers where there is room for them."""
    most = max(map(max, values))

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        image = axes.imshow(values, cmap="Greys", vmin=0, vmax=most or 1, aspect="auto", interpolation="nearest")
        if len(values) <= 16 and len(values[0]) <= 20:
            for y, line in enumerate(values):
                for x, value in enumerate(line):
                    axes.text(x, y, _brief(value), ha="center", va="center", fontsize=7, color="white" if most and value > 0.55 * most else "black")
        for axis, count in ((axes.xaxis, len(values[0])), (axes.yaxis, len(values))):
            step = -(-count // 16)
            axis.set_ticks(range(0, count, step))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        figure.colorbar(image, ax=axes, label=f"{unit}, white is zero")

    header = (y_label + " \\ " + x_label, *map(str, range(len(values[0]))))
    table = tuple((str(y), *map(_number, line)) for y, line in enumerate(values))
    width = min(max(4.6, 1.8 + 0.42 * len(values[0])), 9.2)
    return Picture(name, title, caption, header, table, (width, min(max(3.8, 1.6 + 0.36 * len(values)), 8.0)), draw, simulated)


def rank_load(row: Row) -> list[list[float]]:
    """Rows each expert receives, ``[R][experts of a rank]``."""
    load, ranks = row["expert_load"], row["ranks"]
    local = len(load) // ranks
    return [list(map(float, load[r * local: (r + 1) * local])) for r in range(ranks)]


# ---- timelines -----------------------------------------------------------------------------------------------------------------
PHASES: dict[str, tuple[str, str, str]] = {   # phase -> colour, hatch, name
    "publish HEAD": ("#000000", "", "publish HEAD"), "count": ("#9a9a9a", "", "count"), "rows": ("#4d4d4d", "", "rows"),
    "pack rows": ("#bdbdbd", "...", "pack rows"), "zones and totals": ("#cfcfcf", "++", "zones and totals"),
    "wait for HEAD": ("#ffffff", "////", "wait for HEAD"), "wait for COUNTS": ("#ffffff", "....", "wait for COUNTS"),
    "meet the other blocks": ("#ffffff", "||||", "meet the other blocks of the rank"),
    "wait for ARRIVED": ("#ffffff", "\\\\\\\\", "wait for ARRIVED"),
    "agree on the outcome": ("#ffffff", "xxxx", "agree on the outcome"),
}


def draw_timeline(name: str, title: str, events: Sequence[Event], caption: str, simulated: bool) -> Picture:
    """Phases of every block of every rank, ranks from top to bottom, and an arrow to each rank from the last one it waited for."""
    events = sorted(events)
    start = events[0].begin_ns
    lanes = _lanes(events)
    shown = [e for e in events if (e.rank, e.block) in lanes]
    unit = "scheduler steps" if simulated else "microseconds"

    def draw(figure: Figure) -> None:
        from matplotlib.patches import Patch

        axes = figure.add_subplot()
        for event in shown:
            colour, hatch, _ = PHASES.get(event.phase, ("#ffffff", "oo", event.phase))
            axes.broken_barh([((event.begin_ns - start) / 1e3, (event.end_ns - event.begin_ns) / 1e3)], (lanes[event.rank, event.block] - 0.42, 0.84),
                             facecolor=colour, hatch=hatch, edgecolor="#555555", linewidth=0.4)
        for wait in _arrows(events, lanes):
            (x0, y0), (x1, y1) = wait
            axes.annotate("", ((x1 - start) / 1e3, y1), ((x0 - start) / 1e3, y0),
                          arrowprops={"arrowstyle": "-|>", "color": "#b00000", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0})
        ranks = sorted({rank for rank, _ in lanes})
        for rank in ranks:
            own = [at for (r, _), at in lanes.items() if r == rank]
            if rank != ranks[0]:
                axes.axhline(min(own) - 0.5, color="black", linewidth=0.6)
        axes.set_yticks(list(lanes.values()), [f"rank {r}  block {b}" for r, b in lanes], fontsize=7 if len(lanes) <= 40 else 5)
        axes.set_ylim(max(lanes.values()) + 0.6, -0.6)
        axes.set_xlim(0, max(e.end_ns - start for e in events) / 1e3 * 1.01)
        axes.set_xlabel(f"{unit} since the first block began")
        axes.spines[["top", "right"]].set_visible(False)
        _name_kernels(axes, events, start)
        present = [phase for phase in PHASES if any(e.phase == phase for e in shown)]
        patches: list[Any] = [Patch(facecolor=PHASES[p][0], hatch=PHASES[p][1], edgecolor="#555555", label=PHASES[p][2]) for p in present]
        from matplotlib.lines import Line2D

        patches.append(Line2D([], [], color="#b00000", marker=">", linewidth=1.1, label="the last rank a rank waited for"))
        figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)

    told = waits(events)
    table = tuple((str(w.event.rank), str(w.event.block), w.event.kernel, w.event.phase, _number((w.event.end_ns - w.event.begin_ns) / 1e3),
                   f"rank {w.culprit}") for w in told if (w.event.rank, w.event.block) in lanes)
    left_out = len({(e.rank, e.block) for e in events}) - len(lanes)
    note = (f" {left_out} of {left_out + len(lanes)} blocks are left out: shown are those of each rank that spoke for it, and some others."
            if left_out else "")
    return Picture(name, title, caption + note, ("rank", "block", "kernel", "wait", unit, "last to come"), table,
                   (9.6, min(2.2 + 0.2 * len(lanes), 12.0)), draw, simulated)


def _lanes(events: Sequence[Event]) -> dict[tuple[int, int], int]:
    """Which blocks are drawn, and on which line."""
    blocks: dict[int, list[int]] = {}
    for event in events:
        if event.block not in blocks.setdefault(event.rank, []):
            blocks[event.rank].append(event.block)
    room = max(MOST_LANES // len(blocks), 2)
    lanes: dict[tuple[int, int], int] = {}
    for rank, own in sorted(blocks.items()):
        own.sort()
        if len(own) > room:
            speak = sorted({e.block for e in events if e.rank == rank and e.phase == Step.WAIT_ARRIVED.text})[:room - 1]   # they speak for the rank
            others = [block for block in own if block not in speak]
            some = room - len(speak)
            own = sorted({*speak, *(others[i * len(others) // some] for i in range(some))})
        for block in own:
            lanes[rank, block] = len(lanes)
    return lanes


def _arrows(events: Sequence[Event], lanes: dict[tuple[int, int], int]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """For each rank and kind of wait one that began before the word came, from the block that published the word to the one that waited. Waits too
    short to be seen have none."""
    found, told = [], set()
    least = (max(e.end_ns for e in events) - min(e.begin_ns for e in events)) / 50
    for wait in waits(events):
        event = wait.event
        key = (event.rank, event.kernel, event.phase, wait.culprit)
        late = event.begin_ns < wait.told_ns and wait.culprit != event.rank and event.end_ns - event.begin_ns >= least
        if late and key not in told and (event.rank, event.block) in lanes and any(r == wait.culprit for r, _ in lanes):
            told.add(key)
            source = lanes.get((wait.culprit, wait.culprit_block), min(at for (r, _), at in lanes.items() if r == wait.culprit))
            found.append(((float(wait.told_ns), float(source)), (float(event.end_ns), float(lanes[event.rank, event.block]))))
    return found


def _name_kernels(axes: Axes, events: Sequence[Event], start: int) -> None:
    """The kernels' names above the first rank's lines."""
    first: list[Operation] = next(iter(operations(events).values()))
    for op in first:
        axes.annotate(op.kernel, ((op.begin_ns - start) / 1e3, -0.55), fontsize=8, va="bottom", annotation_clip=False)
