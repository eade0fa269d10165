"""The report: the numbers of its pictures are those of the records, the page needs nothing else, and nothing simulated passes for a measurement."""

from __future__ import annotations

import base64
import dataclasses
import html.parser
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_timeline import check_schema, hand_made

from ncclep_py.__main__ import main
from ncclep_py.bench import record as records
from ncclep_py.bench import report, series
from ncclep_py.bench.byte_counts import byte_counts
from ncclep_py.bench.case import Case
from ncclep_py.timeline import Event, to_json

pytest.importorskip("matplotlib", reason="needs the extra report")

from matplotlib import image
from matplotlib.figure import Figure

from ncclep_py.bench import pictures

README = Path(__file__).parent / "data" / "bench_readme.json"
COPY = 4235.0


def readme() -> dict[str, Any]:
    """README's figures as a record; no run wrote it."""
    held = records.read(README)
    assert "not a run" in held["machine"]["note"]
    return held


def made_up(case: Case, implementation: str = "ncclep_py", **figures: float) -> dict[str, Any]:
    """A row with quartiles of 10 % below and 20 % above."""
    told = {name: {"median_us": v, "low_us": 0.9 * v, "high_us": 1.2 * v, "replays": 20} for name, v in figures.items()}
    load, traffic = [case.ranks * case.tokens * case.topk // case.experts] * case.experts, [[case.tokens] * case.ranks] * case.ranks
    return {"implementation": implementation, **dataclasses.asdict(case), "verified": True, "exact": True, "figures": told, "host_us": 17.5,
            "compile_s": None, "peak_memory_bytes": 3 * 10**8, "bytes": byte_counts(case, load, traffic).as_json(), "share_of_copy": 0.5,
            "expert_load": load, "traffic": traffic}


def record_of(*rows: dict[str, Any], **machine: Any) -> dict[str, Any]:
    held = records.new_record({"gpu": "made-up GPU", "gpus": 2, "driver": "1.2", "nccl": "2.32.3", "sm_clock_mhz": [1980, 1980], **machine},
                              {"copy_gb_s": 4000.0})
    held["rows"] += rows
    return held


def values(panel: series.Panel) -> dict[str, list[tuple[float, float]]]:
    return {s.name: [(p.x, p.y) for p in s.points] for s in panel.series}


# ---- series -----------------------------------------------------------------------------------------------------------------
def test_latency_against_tokens_holds_the_readmes_figures() -> None:
    rows = series.rows_of([("readme", readme())])
    low, high = series.latency(rows)
    assert low.case == "low latency, EXPERT_MAJOR, 8 ranks, 128 experts, 8 experts per token, 7168 columns, 16 SMs, bf16" and low.figure == "pair"
    found = values(low)
    assert found["ncclep_py, processes"] == [(1, 24.9), (8, 27.9)] and found["ncclep_py, local"] == [(128, 91.4)]
    assert found["nccl.ep, processes"] == [(1, 36.3), (8, 40.9), (128, 255.4)]
    assert found["pair of empty kernels"] == [(1, 2.9), (8, 2.9), (128, 2.9)] and found["pair that only exchanges HEADs"][0] == (1, 11.5)
    physical = 2 * 8 * 128 * 9 * 7168 * 2   # both ways, R T (1 + K) rows
    assert found["physical bytes / measured copy bandwidth"][2] == (128, pytest.approx(physical / COPY / 1e3))
    assert [s.floor for s in low.series] == [False] * 3 + [True] * 3
    assert high.figure == "chained_pair" and values(high)["ncclep_py, processes"] == [(2048, 831.7)]


def test_bandwidth_against_message_size() -> None:
    rows = series.rows_of([("a", record_of(made_up(Case(tokens=16), pair=20.0), made_up(Case(tokens=64), pair=40.0)))])
    panel, = series.bandwidth(rows)
    moved = {t: 2 * 8 * t * 9 * 7168 * 2 for t in (16, 64)}
    assert values(panel)["ncclep_py"] == [(pytest.approx(moved[t] / 8 / 1e6), pytest.approx(moved[t] / us / 1e3)) for t, us in ((16, 20), (64, 40))]
    point = panel.series[0].points[0]
    assert point.low == pytest.approx(point.y / 1.2) and point.high == pytest.approx(point.y / 0.9)
    assert [p.y for p in panel.series[1].points] == [4000.0, 4000.0] and panel.series[1].floor


def test_scaling_and_its_ideal() -> None:
    rows = series.rows_of([("a", record_of(*(made_up(Case(sms=n), chained_pair=us, pair=us + 9) for n, us in ((32, 70.0), (8, 160.0), (16, 90.0)))))])
    panel, = series.scaling(rows)
    assert panel.figure == "chained_pair" and values(panel)["ncclep_py"] == [(8, 160.0), (16, 90.0), (32, 70.0)]
    assert values(panel)["ncclep_py at 8 SMs, halved when SMs double"] == [(8, 160.0), (16, 80.0), (32, 40.0)]
    assert series.latency(rows) == []   # one number of tokens is no line


def test_ratios_are_of_one_figure_and_one_case() -> None:
    found = series.ratios(series.rows_of([("readme", readme())]))
    assert [(r.implementation, r.figure, round(r.ratio, 3)) for r in found] == [("nccl.ep", "pair", q) for q in (1.458, 1.466, 2.794, 2.846, 2.493)]
    assert "(theirs: processes, ours: local)" in found[2].case and "theirs" not in found[0].case
    rows = series.rows_of([("a", record_of(made_up(Case(), pair=50.0), made_up(Case(), "deep_ep", pair=100.0),
                                           made_up(Case(tokens=8), "nccl.ep", pair=1.0)))])
    ratio, = series.ratios(rows)
    assert (ratio.ratio, ratio.low, ratio.high) == (2.0, pytest.approx(90 / 60), pytest.approx(120 / 45))


def test_figures_of_different_kinds_are_not_mixed() -> None:
    rows = series.rows_of([("a", record_of(made_up(Case(tokens=8), pair=30.0, chained_pair=25.0), made_up(Case(tokens=64), pair=60.0)))])
    panel, = series.latency(rows)
    assert panel.figure == "pair" and values(panel)["ncclep_py"] == [(8, 30.0), (64, 60.0)]


def test_wrong_and_simulated_rows_have_no_times() -> None:
    wrong = made_up(Case(tokens=8), pair=1.0) | {"verified": False}
    simulated = made_up(Case(tokens=16, backend="sim"), pair=2.0)
    broken = {"implementation": "ncclep_py", **dataclasses.asdict(Case(tokens=4)), "error": "Traceback\nEpTimeoutError: <rank 3>"}
    held = [("a", record_of(wrong, simulated, broken, made_up(Case(tokens=32), pair=3.0)))]
    rows = series.rows_of(held)
    assert series.latency(rows, 1)[0].rows[0]["tokens"] == 32 and len(series.latency(rows, 1)) == 1
    page = report.page(held, [])
    assert "Not drawn" in page and "EpTimeoutError: &lt;rank 3&gt;" in page and "results differ from the oracle" in page
    assert "<span class=simulated>simulated, no measurement</span>" in page


def test_several_records_are_told_apart() -> None:
    held = [(name, record_of(made_up(Case(tokens=8), pair=us), made_up(Case(tokens=64), pair=2 * us))) for name, us in (("old", 40.0), ("new", 30.0))]
    panel, = series.latency(series.rows_of(held))
    assert values(panel)["ncclep_py (old)"] == [(8, 40.0), (64, 80.0)] and values(panel)["ncclep_py (new)"] == [(8, 30.0), (64, 60.0)]
    assert report.conditions(held).startswith("Run on old: 2 x made-up GPU, driver 1.2, NCCL 2.32.3, SM clock 1980 of 1980 MHz; new: ")
    with pytest.raises(ValueError, match="names of their own, got a, a"):
        report.write([("a", held[0][1]), ("a", held[1][1])], Path("never.html"))


# ---- pictures ---------------------------------------------------------------------------------------------------------------
def drawn(picture: pictures.Picture) -> Any:
    figure = Figure(layout="constrained")
    picture.draw(figure)
    return figure


def by_name(held: dict[str, Any], **how: Any) -> dict[str, pictures.Picture]:
    return {p.name: p for p in report.pictures([("r", held)], **{"simulator": False} | how)}


def test_lines_begin_at_zero_or_say_log_and_carry_units() -> None:
    rows = [made_up(Case(tokens=t), who, pair=t + 10.0 + us) for who, us in (("ncclep_py", 0), ("nccl.ep", 9), ("deep_ep", 4)) for t in (1, 8, 64)]
    made = by_name(record_of(*rows, made_up(Case(tokens=64, sms=32), pair=66.0)))
    assert {"overview-ll", "latency-1", "bandwidth-1", "scaling-1", "ratios", "load-1", "traffic-1"} <= made.keys()
    axes = drawn(made["latency-1"]).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens per rank, log scale", "microseconds per dispatch + combine, log scale")
    assert axes.get_xscale() == axes.get_yscale() == "log" and [t.get_text() for t in axes.get_xticklabels()] == ["1", "8", "64"]
    measured = [c[0] for c in axes.containers]
    assert [list(line.get_ydata()) for line in measured] == [[11.0, 18.0, 74.0], [20.0, 27.0, 83.0], [15.0, 22.0, 78.0]]
    assert len({(line.get_marker(), line.get_linestyle()) for line in measured}) == 3   # told apart without colour
    for name in ("bandwidth-1", "scaling-1"):
        axes = drawn(made[name]).axes[0]
        assert axes.get_ylim()[0] == 0 and axes.get_ylabel().endswith(", from zero") and axes.get_xlabel().endswith(", log scale")
    for name in ("overview-ll", "ratios"):
        axes = drawn(made[name]).axes[0]
        assert axes.get_xlim()[0] == 0 and "from zero" in axes.get_xlabel()
    bars = [patch for patch in drawn(made["overview-ll"]).axes[0].patches]
    assert sorted(round(b.get_width(), 1) for b in bars) == sorted([11.0, 18.0, 74.0, 20.0, 27.0, 83.0, 15.0, 22.0, 78.0, 66.0])
    assert len({b.get_hatch() for b in bars}) == 3
    assert all("made-up GPU" in p.caption and "SM clock 1980" in p.caption for p in made.values())


def test_large_numbers_are_whole_and_fit_into_cells() -> None:
    assert [pictures._number(v) for v in (0.25812, 8, 818.72, 9999, 16384, 14886.4)] == ["0.2581", "8", "818.7", "9999", "16384", "14886"]
    cells = (0, 96, 9999, 10914, 99950, 123456, 1e6, 123456789)
    assert [pictures._brief(v) for v in cells] == ["0", "96", "9999", "10.9k", "100k", "123k", "1M", "123M"]


def test_heat_maps_hold_load_and_traffic() -> None:
    row = made_up(Case(tokens=4, ranks=2, experts=4, topk=2, routing="zipf"), pair=9.0) | {"expert_load": [7, 0, 3, 6], "traffic": [[4, 1], [2, 3]]}
    made = by_name(record_of(row))
    shown = drawn(made["load-1"]).axes
    assert shown[0].images[0].get_array().tolist() == [[7, 0], [3, 6]] and shown[0].images[0].get_clim() == (0, 7)
    assert drawn(made["traffic-1"]).axes[0].images[0].get_array().tolist() == [[4, 1], [2, 3]]
    assert "Routing zipf" in made["load-1"].caption and "most 7 rows for one expert, 1.75 times the mean of 4" in made["load-1"].caption
    assert shown[1].get_ylabel() == "rows received by the expert, white is zero"


def test_a_timeline_shows_who_waits_for_whom() -> None:
    row = made_up(Case(ranks=2), pair=9.0) | {"stamps": to_json(hand_made())}
    picture = by_name(record_of(row))["timeline-1"]
    assert not picture.simulated and "In-kernel timestamps" in picture.caption
    assert ("0", "0", "ll_dispatch", "wait for HEAD", "0.042", "rank 1") in picture.table
    axes = drawn(picture).axes[0]
    assert axes.get_xlabel() == "microseconds since the first block began" and axes.get_xlim()[0] == 0
    assert [t.get_text() for t in axes.get_yticklabels()] == ["rank 0  block 0", "rank 1  block 0"]
    arrows = [a for a in axes.texts if getattr(a, "arrow_patch", None) is not None]
    assert sorted((a.xyann[1], a.xy[1]) for a in arrows) == [(0.0, 1.0), (1.0, 0.0)]   # 1 waited for 0, and 0 for 1


def test_a_timeline_of_many_blocks_keeps_those_that_speak() -> None:
    events = [Event(t, t + 5, rank, block, "ll_dispatch", phase) for rank in range(8) for block in range(16)
              for t, phase in ((0, "publish HEAD"), (5, "wait for HEAD"), (10, "rows")) + (((15, "wait for ARRIVED"),) if block == 11 else ())]
    lanes = pictures._lanes(events)
    assert len(lanes) <= pictures.MOST_LANES and all((rank, 11) in lanes and (rank, 0) in lanes for rank in range(8))
    assert "are left out" in pictures.draw_timeline("t", "t", events, "", False).caption


def test_what_the_simulator_made_says_so() -> None:
    row = made_up(Case(ranks=2, backend="sim")) | {"stamps": to_json(hand_made())}
    made = by_name(record_of(row, gpus=0), simulator=True)
    assert made.keys() == {"load-1", "traffic-1", "timeline-1", "simulated-ll", "simulated-ht"} and all(p.simulated for p in made.values())
    assert "Run on the simulator, without a GPU" in made["load-1"].caption and "no time" in made["timeline-1"].caption
    assert drawn(made["simulated-ll"]).axes[0].get_xlabel() == "scheduler steps since the first block began"
    phases = {line[3] for line in made["simulated-ll"].table}
    assert phases == {"wait for HEAD", "wait for COUNTS", "wait for ARRIVED"}
    page = report.page([("r", record_of(row))], [(made["load-1"], b"")])
    assert page.count("simulated, no measurement") >= 2


# ---- page -------------------------------------------------------------------------------------------------------------------
class Page(html.parser.HTMLParser):
    """Tags in order, attributes that fetch something, text."""

    VOID = {"meta", "img", "br"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.open += [tag] * (tag not in self.VOID)
        self.fetched += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action", "poster")]
        self.ids += [v for k, v in attrs if k == "id"]
        assert not any(k.startswith("on") for k, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else_and_holds_everything(tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    written = report.write([("readme", readme())], file)
    page = Page(file.read_text())
    assert page.open == [] and not {"script", "link", "iframe", "object"} & set(page.tags)
    assert page.fetched and all(f.startswith("data:image/png;base64,") for f in page.fetched)
    assert not re.search(r"@import|url\(|https?:", file.read_text().replace("data:image/png", ""))
    names = ["overview-ll", "overview-ht", "latency-1", "latency-2", "bandwidth-1", "bandwidth-2", "ratios", "load-1", "traffic-1", "load-2",
             "traffic-2", "simulated-ll", "simulated-ht"]
    assert page.ids == names and [f.name for f in written] == [f"out-{name}.png" for name in names]
    made = {p.name: p for p in report.pictures([("readme", readme())])}
    for name, path, inside in zip(names, written, page.fetched, strict=True):
        data = path.read_bytes()
        assert base64.b64decode(inside.partition(",")[2]) == data
        pixels = image.imread(io.BytesIO(data))
        width, height = made[name].inches
        assert all(abs(n - inches * pictures.DPI) <= 1 for n, inches in zip(pixels.shape, (height, width), strict=False))
        assert pixels[..., :3].std() > 0.05
    for told in ("24.9 (24.9 to 24.9, 10 replays)", "831.7", "2682", "driver 580.159.04", "not a run", "copy_gb_s", "4235.0", "bit for bit",
                 "low latency, RANK_MAJOR", "1.458", "simulated, no measurement"):
        assert told in page.text, told


def test_the_command_from_a_run_to_a_page(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path / "cache"))
    now, trace, out = tmp_path / "now.json", tmp_path / "trace.json", tmp_path / "r.html"
    words = ["bench", "--backend", "sim", "--algorithm", "ll", "--tokens", "5", "--trace", str(trace), "--json", str(now)]
    assert main(words) == 0
    files = sorted(tmp_path.glob("trace-*.json"))
    assert [f.name for f in files] == ["trace-1.json", "trace-2.json"] and "timeline in" in capsys.readouterr().out
    for file in files:
        held = json.loads(file.read_text())
        check_schema(held["traceEvents"])
        assert "simulated, no measurement" in held["otherData"]["source"]
    assert main(["bench", "report", str(now), "-o", str(out)]) == 0
    assert "pictures" in capsys.readouterr().out
    assert {"load-1", "traffic-1", "timeline-1", "timeline-2"} <= set(Page(out.read_text()).ids)


@pytest.mark.parametrize("content, told", [(None, "cannot be read"), ("{}", "must be a record with schema"), ("[", "cannot be read")])
def test_what_is_no_record_is_refused(content: str | None, told: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "r.json"
    if content is not None:
        file.write_text(content)
    assert report.main([file], tmp_path / "o.html") == 2 and told in capsys.readouterr().err
    assert report.main([], tmp_path / "o.html") == 2 and "at least one record" in capsys.readouterr().err
    assert not (tmp_path / "o.html").exists()


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.main([README], tmp_path / "o.html") == 2
    assert capsys.readouterr().err == "a report is drawn with matplotlib, which is not installed: pip install 'ncclep_py[report]'\n"
