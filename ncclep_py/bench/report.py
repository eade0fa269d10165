"""`python -m ncclep_py bench report RECORD.json... -o out.html`: one HTML page that needs nothing else, and its pictures as PNG files beside it."""

from __future__ import annotations

import base64
import html
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ncclep_py.bench import record as records
from ncclep_py.bench import series
from ncclep_py.bench.compare import PREFERRED
from ncclep_py.bench.pictures import (
    SIMULATED,
    Picture,
    draw_timeline,
    heat,
    lines,
    overview,
    png,
    rank_load,
    ratio_bars,
    require_matplotlib,
)
from ncclep_py.bench.series import Row
from ncclep_py.timeline import Event, from_json, last_pair

__all__ = ["main", "page", "pictures", "write"]

MOST_HEAT_MAPS = 6
MOST_BARS = 40
TIMELINE_RANKS = 4

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #111; background: #fff; max-width: 76em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2.2em; border-top: 1px solid #ccc; padding-top: .8em }
figure { margin: 0 } figure img { max-width: 100%; height: auto; border: 1px solid #ddd } figcaption { max-width: 60em; margin: .4em 0 }
table { border-collapse: collapse; font-size: 13px } td, th { border: 1px solid #ccc; padding: .15em .5em; text-align: left; vertical-align: top }
th { background: #f2f2f2 } .wide { overflow-x: auto } .simulated { border: 2px solid #111; padding: .1em .5em; font-weight: bold }
summary { cursor: pointer; color: #333 } @media print { details { display: none } figure { break-inside: avoid } }
"""


# ---- command ---------------------------------------------------------------------------------------------------------------------
def main(names: Sequence[Path], output: Path, *, simulator: bool = True) -> int:
    """Write the report; returns the exit code: 2, with a sentence, if that is impossible.

    Args:
        names: records written by `bench --json`.
        output: the page, ``FILE.html``; its pictures are written beside it as ``FILE-NAME.png``.
        simulator: with timelines the simulator makes.
    """
    try:
        if not names:
            raise ValueError("bench report needs at least one record, a file written by bench --json")
        held = [(name.stem, records.read(name)) for name in names]
        written = write(held, output, simulator=simulator)
    except (ValueError, ImportError, OSError) as e:
        sys.stderr.write(f"{e}\n")
        return 2
    sys.stdout.write(f"{output}: {len(written)} pictures, {output.stat().st_size} bytes\n")
    return 0


def write(held: Sequence[tuple[str, dict[str, Any]]], path: Path, *, simulator: bool = True) -> list[Path]:
    """Write the page to `path` and the pictures beside it; their paths.

    Args:
        held: (name, record) of each record; names tell rows of several records apart.
        path: an ``.html`` file.
        simulator: with timelines of a dispatch and a combine from the simulator.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: two records of the same name.
    """
    require_matplotlib()
    names = [name for name, _ in held]
    if len(set(names)) < len(names):
        raise ValueError(f"records must have file names of their own, got {', '.join(names)}")
    made = pictures(held, simulator=simulator)
    images = [(picture, png(picture)) for picture in made]
    path.write_text(page(held, images), encoding="utf-8")
    written = []
    for picture, image in images:
        written.append(path.with_name(f"{path.stem}-{picture.name}.png"))
        written[-1].write_bytes(image)
    return written


# ---- which pictures --------------------------------------------------------------------------------------------------------------
def pictures(held: Sequence[tuple[str, dict[str, Any]]], *, simulator: bool = True) -> list[Picture]:
    """All pictures the records have numbers for."""
    rows = series.rows_of(held)
    where = conditions(held)
    found = _overview(rows, where)
    found += [lines(panel, f"latency-{i}", "Latency against tokens", "tokens per rank", "microseconds per dispatch + combine",
                    "Floors are no measurement of these cases: nothing can be below them. " + where, log_y=True)
              for i, panel in enumerate(series.latency(rows), 1)]
    found += [lines(panel, f"bandwidth-{i}", "Bandwidth against message size", "MB read and written per rank and pair", "GB/s, all ranks together",
                    "Bytes that ncclep_py reads and writes, for all implementations alike, over the time of the slowest rank. " + where)
              for i, panel in enumerate(series.bandwidth(rows), 1)]
    found += [lines(panel, f"scaling-{i}", "Scaling with multiprocessors", "SMs per rank", "microseconds per dispatch + combine", where)
              for i, panel in enumerate(series.scaling(rows), 1)]
    told = series.ratios(rows)
    if told:
        found.append(ratio_bars(told, f"Whiskers: quartiles of one over the opposite quartile of the other. {where}"))
    return found + _heat_maps(rows, where) + _timelines(rows, where, simulator)


def conditions(held: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Where and when the records were made, in a sentence each."""
    told = []
    for name, record in held:
        machine = record["machine"]
        gpus = machine.get("gpus")
        if not gpus:
            parts = ["the simulator, without a GPU"]
        else:
            parts = [f"{gpus} x {machine['gpu']}" if isinstance(gpus, int) and gpus > 1 else str(machine.get("gpu"))]
        parts += [f"{label} {machine[key]}" for key, label in (("driver", "driver"), ("nccl", "NCCL"), ("torch", "torch"), ("commit", "commit"))
                  if machine.get(key)]
        clock = machine.get("sm_clock_mhz")
        parts += [f"SM clock {' of '.join(map(str, clock)) if isinstance(clock, list) else clock} MHz"] if clock else []
        parts += [str(machine["date"])] if machine.get("date") else []
        parts += [str(machine["note"])] if machine.get("note") else []
        told.append((f"{name}: " if len(held) > 1 else "") + ", ".join(parts))
    return "Run on " + "; ".join(told) + "."


def _overview(rows: Sequence[Row], where: str) -> list[Picture]:
    """All cases whose times mean something, a picture per algorithm, by one figure for all implementations of a case where they share one."""
    found = []
    for algorithm, title in (("ll", "All low-latency cases"), ("ht", "All high-throughput cases")):
        by_case: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            if row.usable and not row.simulated and row["algorithm"] == algorithm:
                by_case.setdefault(row.without(), []).append(row)
        same = {name for name, value in next(iter(by_case), ()) if name != "layout" and all((name, value) in case for case in by_case)}
        bars = []
        for case, group in by_case.items():
            figure = series.common_figure(group)
            for row in group:
                name = figure if figure and row.figure(figure) else next((n for n in PREFERRED if row.figure(n)), None)
                value = row.figure(name) if name else None
                if value is not None:
                    words = series.words_of((n, v) for n, v in case if n not in same)
                    bars.append((f"{words} [{str(name).replace('_', ' ')}]", row.implementation, value.median, value.low, value.high, row.floor_us()))
        if bars:
            note = f" The first {MOST_BARS} of {len(bars)}; the table has all." if len(bars) > MOST_BARS else ""
            shared = series.words_of((n, v) for n, v in next(iter(by_case)) if n in same)
            found.append(overview(f"overview-{algorithm}", title, bars[:MOST_BARS],
                                  f"In all: {shared}.{note} Medians of the slowest rank over replays, whiskers quartiles. A black mark is the time "
                                  f"in which the measured copy bandwidth moves the bytes that ncclep_py reads and writes. {where}"))
    return found


def _heat_maps(rows: Sequence[Row], where: str) -> list[Picture]:
    """Load and traffic of each kind of routing, of its case with most tokens."""
    largest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row.source, row.simulated, *(row[name] for name in ("routing", "ranks", "experts", "topk")))
        if row["expert_load"] and row["traffic"] and (key not in largest or row["tokens"] > largest[key]["tokens"]):
            largest[key] = row
    found: list[Picture] = []
    for number, row in enumerate(list(largest.values())[:MOST_HEAT_MAPS], 1):
        load = row["expert_load"]
        case = series.words_of(row.without("algorithm", "layout", "hidden", "mode", "sms", "dtype", "recipe", "routing", "alignment", "backward"))
        mean, most = sum(load) / len(load), max(load)
        told = (f"{case}. Routing {row['routing']}; most {most} rows for one expert, {most / mean if mean else 0:.3g} times the mean of {mean:.4g}. "
                f"{where}")
        found.append(heat(f"load-{number}", "Expert load", rank_load(row), "expert of the rank", "rank", "rows received by the expert", told,
                          row.simulated))
        found.append(heat(f"traffic-{number}", "Traffic between ranks", row["traffic"], "destination rank", "source rank", "distinct tokens sent",
                          f"{case}. Routing {row['routing']}; the diagonal stays on its rank. {where}", row.simulated))
    return found


def _timelines(rows: Sequence[Row], where: str, simulator: bool) -> list[Picture]:
    found = []
    for number, row in enumerate((row for row in rows if row["stamps"]), 1):
        events, case = last_pair(from_json(row["stamps"])), series.words_of(row.without())
        told = "Scheduler steps, an order of events and no time." if row.simulated else (
            "In-kernel timestamps (global timer) of warp 0 of each block; kernels with stamps are slower than those that were timed.")
        title = "A dispatch and a combine, block by block"
        found.append(draw_timeline(f"timeline-{number}", title, events, f"{case}. {told} {where}", row.simulated))
    if simulator:
        for algorithm, words in (("ll", "Low latency, EXPERT_MAJOR"), ("ht", "High throughput, FLAT, update included")):
            caption = (f"{words}, {TIMELINE_RANKS} ranks, 2 blocks each, 16 tokens per rank, 8 experts, 2 per token. {SIMULATED.capitalize()}: an "
                       "order of events under one seeded schedule; lengths count steps of the scheduler.")
            title = f"A dispatch and a combine in the simulator ({algorithm})"
            found.append(draw_timeline(f"simulated-{algorithm}", title, simulated_events(algorithm), caption, True))
    return found


def simulated_events(algorithm: str, seed: int = 1) -> list[Event]:
    """Events of one dispatch and one combine on `TIMELINE_RANKS` ranks in the simulator."""
    import torch

    from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld

    def program(comm: Any) -> list[Event]:
        more: dict[str, Any] = {"algorithm": Algorithm.HIGH_THROUGHPUT, "max_recv_tokens_per_rank": 16 * TIMELINE_RANKS} if algorithm == "ht" else {}
        with Group.create(comm, GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=16, hidden=64, num_topk=2, trace=True, **more)) as group:
            draw = torch.Generator().manual_seed(comm.rank)
            ids, weights = torch.rand(16, 8, generator=draw).topk(2, 1).indices, torch.full((16, 2), 0.5)
            tokens = torch.randn(16, 64, generator=draw).to(torch.bfloat16)
            with group.create_handle(Layout.FLAT if more else Layout.EXPERT_MAJOR, ids) as handle:
                if more:
                    handle.combine(handle.dispatch(tokens, topk_weights=weights).tokens)
                else:
                    handle.combine(handle.dispatch(tokens).tokens, topk_weights=weights)
            group.check()
            return group.timeline()

    with LocalWorld(TIMELINE_RANKS, "sim", seed=seed) as world:
        return [event for events in world.run(program) for event in events]


# ---- page ------------------------------------------------------------------------------------------------------------------------
def page(held: Sequence[tuple[str, dict[str, Any]]], images: Sequence[tuple[Picture, bytes]]) -> str:
    """The page; pictures are inside it."""
    rows = series.rows_of(held)
    wrong = [row for row in rows if not row.usable]
    parts = ["<h1>ncclep_py: benchmark report</h1>", f"<p>{html.escape(conditions(held))}</p>"]
    if any(row.simulated for row in rows):
        parts.append(f"<p><span class=simulated>{SIMULATED}</span> stands on everything that comes from the simulator.</p>")
    if wrong:
        told = "".join(f"<li>{html.escape(row.implementation)}: {html.escape(series.words_of(row.without()))}: "
                       f"{html.escape(str(row['error'] or 'results differ from the oracle'))}</li>" for row in wrong)
        parts.append(f"<p>Not drawn, because their results were not right or there are none:</p><ul>{told}</ul>")
    for picture, image in images:
        text = base64.b64encode(image).decode()
        mark = f"<span class=simulated>{SIMULATED}</span> " if picture.simulated else ""
        width, height = (round(x * 100) for x in picture.inches)
        parts.append(f'<h2 id="{picture.name}">{html.escape(picture.title)}</h2><figure><img width={width} height={height} '
                     f'alt="{html.escape(picture.title + ". " + picture.caption)}" src="data:image/png;base64,{text}">'
                     f"<figcaption>{mark}{html.escape(picture.caption)}</figcaption></figure>"
                     f"<details><summary>numbers</summary><div class=wide>{_table(picture.header, picture.table)}</div></details>")
    parts += [f"<h2>All figures</h2><div class=wide>{_table(*_figures(rows))}</div>", *_layers(held), "<h2>Machines</h2>", *_machines(held)]
    return ("<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>ncclep_py: benchmark report</title><style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n")


def _table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    return f"<table><tr>{head}</tr>" + "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in line) + "</tr>" for line in body) + "</table>"


def _figures(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per row of the records, microseconds with quartiles, and what else was measured."""
    names = list(dict.fromkeys(name for row in rows for name in row["figures"] or {}))
    others = {"host_us": "host, us per operation", "share_of_copy": "share of copy bandwidth", "peak_memory_bytes": "peak memory, MB"}
    present = [name for name in others if any(row[name] is not None for row in rows)]
    compiled = any(row["compile_s"] for row in rows)
    header = ["case", "implementation", "verified", *(f"{n.replace('_', ' ')}, us" for n in names), *(others[n] for n in present)]
    header += ["compile, s: cold, warm"] * compiled
    body = []
    for row in rows:
        line = [series.words_of(row.without()), row.implementation, ("bit for bit" if row["exact"] else "yes") if row.usable else "NO"]
        for name in names:
            value = row.figure(name)
            line.append("" if value is None else f"{value.median:g} ({value.low:g} to {value.high:g}, {value.replays} replays)")
        for name in present:
            value_of = row[name]
            line.append("" if value_of is None else f"{value_of / 1e6:.1f}" if name == "peak_memory_bytes" else f"{value_of:.3g}"
                        if isinstance(value_of, (int, float)) else str(value_of))
        held = row["compile_s"] or {}
        line += [", ".join("-" if held.get(k) is None else f"{held[k]:.2f}" for k in ("cold", "warm")) if held else ""] * compiled
        body.append(line)
    return header, body


def _layers(held: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    rows = [((name, *layer.items()) if len(held) > 1 else tuple(layer.items())) for name, record in held for layer in record.get("layers") or []]
    if not rows:
        return []
    layers = [layer for _, record in held for layer in record.get("layers") or []]
    header = list(dict.fromkeys(key for layer in layers for key in layer))
    return ["<h2>The example MoE layer</h2>", _table(header, [[str(layer.get(key, "")) for key in header] for layer in layers])]


def _machines(held: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    keys = list(dict.fromkeys(key for _, record in held for key in (*record["machine"], *(record.get("floors") or {}))))
    body = [[key, *("" if (value := {**record["machine"], **(record.get("floors") or {})}.get(key)) is None else str(value) for _, record in held)]
            for key in keys]
    return [f"<div class=wide>{_table(['', *(name for name, _ in held)], body)}</div>"]
