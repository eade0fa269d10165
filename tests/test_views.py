"""Pictures for a terminal: they show the numbers, fit into the width, and stay readable with many experts and ranks."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_timeline import check_schema

from ncclep_py import demo
from ncclep_py.__main__ import main
from ncclep_py.views import LEAST_WIDTH, MOST_LINES, can_show_blocks, expert_load, routing_counts, traffic


# ---- counts -----------------------------------------------------------------------------------------------------------------
def test_routing_counts_by_hand() -> None:
    ids = [torch.tensor([[0, 1], [3, -1], [2, 3]]), torch.tensor([[9, 0]])]
    with pytest.raises(ValueError, match="^num_experts must be a multiple of the number of ranks, got 3 and ids of 2 ranks$"):
        routing_counts(ids, 3)
    assert routing_counts(ids, 4) == ([2, 1, 1, 2], [[2, 3], [1, 0]])
    assert routing_counts(ids, 4, by_rank=True) == ([2, 1, 1, 2], [[1, 2], [1, 0]])
    assert routing_counts([torch.zeros(0, 2, dtype=torch.int32)] * 2, 2, by_rank=True) == ([0, 0], [[0, 0], [0, 0]])


# ---- bars -------------------------------------------------------------------------------------------------------------------
def bars(text: str) -> dict[str, tuple[int, str]]:
    """Length of each bar, and its figure, by the experts' name."""
    found = re.findall(r"^ *([\d-]+ \([\d-]+\)) [▕|](.*?) {1,}([\d./e+]+(?: / \d+)?)$", text, re.M)
    return {name: (len(bar.rstrip()), figure) for name, bar, figure in found}


@pytest.mark.parametrize("ascii", [False, True])
def test_bars_are_as_long_as_the_numbers(ascii: bool) -> None:
    text = expert_load([4000, 2000, 0, 1], 2, width=60, ascii=ascii)
    assert text.startswith("expert load: 6001 rows for 4 experts; most: expert 0")
    assert "2.67 times the mean of 1500" in " ".join(text.split()) and "without a row: 1" in " ".join(text.split())
    found = bars(text)
    assert {name: int(figure) for name, (_, figure) in found.items()} == {"0 (0)": 4000, "1 (0)": 2000, "2 (1)": 0, "3 (1)": 1}
    full = found["0 (0)"][0]
    assert full > 20 and abs(found["1 (0)"][0] - full / 2) <= 1 and found["2 (1)"][0] == 0
    assert found["3 (1)"][0] == 1   # a little is not nothing


@pytest.mark.parametrize("experts, ranks, width", [(1, 1, 10), (32, 8, 80), (33, 3, 80), (256, 8, 40), (1024, 64, 120), (1024, 64, 41)])
def test_many_experts_fit(experts: int, ranks: int, width: int) -> None:
    counts = [(7 * e) % 50 for e in range(experts)]
    text = expert_load(counts, ranks, width=width)
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES + 8 and max(map(len, lines)) <= max(width, LEAST_WIDTH)
    found = bars(text)
    size = -(-experts // MOST_LINES)
    assert len(found) == -(-experts // size)
    last = list(found)[-1]
    assert re.fullmatch(rf"(\d+-)?{experts - 1} \((\d+-)?{ranks - 1}\)", last)
    if size > 1:
        group = counts[:size]
        assert list(found.values())[0][1] == f"{sum(group) / size:.4g} / {max(group)}" and f"{size} experts to a line" in text


def test_nothing_sent_is_drawn_too() -> None:
    assert "0 rows for 2 experts" in expert_load([0, 0], 2) and "without a row: 2" in expert_load([0, 0], 2)
    assert "traffic: 0 rows" in traffic([[0, 0], [0, 0]])


@pytest.mark.parametrize("call", [lambda: expert_load([], 1), lambda: expert_load([1, 2, 3], 2), lambda: expert_load([1, -1], 2),
                                  lambda: traffic([[1, 2]]), lambda: traffic([])])
def test_impossible_counts_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="must (hold|be)"):
        call()


# ---- matrix -----------------------------------------------------------------------------------------------------------------
def cells(text: str) -> list[list[int]]:
    """Numbers of the matrix, sums left out."""
    lines = [line for line in text.splitlines() if re.match(r" *[\d-]+ \|", line)]
    return [[int(n) for n in re.findall(r"\d+", line.split("|")[1])] for line in lines]


def test_the_matrix_holds_the_numbers_and_their_sums() -> None:
    rows = [[5, 100, 0], [7, 8, 9], [0, 0, 1]]
    text = traffic(rows, unit="KiB", width=60)
    assert cells(text) == rows and text.startswith("traffic: 130 KiB, 14 of them stay on their rank")
    assert re.search(r"^ *sum \| +12 +108 +10 \|130$", text, re.M) and re.search(r"^ *0 \|.*\|105$", text, re.M)
    line = next(line for line in text.splitlines() if line.startswith("  0 |"))
    assert line == "  0 |░  5█ 100   0 |105"
    ascii = traffic(rows, unit="KiB", width=60, ascii=True)
    assert cells(ascii) == rows and ascii.isascii() and expert_load([3, 4], 2, ascii=True).isascii()


@pytest.mark.parametrize("ranks, width", [(1, 40), (8, 80), (16, 60), (64, 200), (64, 40), (63, 80)])
def test_many_ranks_fit(ranks: int, width: int) -> None:
    rows = [[1000 * (s == d) + s for d in range(ranks)] for s in range(ranks)]
    text = traffic(rows, width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= max(width, LEAST_WIDTH) and len(lines) <= MOST_LINES + 8
    shown = cells(text)
    assert sum(map(sum, shown)) == sum(map(sum, rows)) and len({len(line) for line in shown}) == 1
    size = -(-ranks // len(shown))
    assert shown[0][0] == sum(rows[s][d] for s in range(min(size, ranks)) for d in range(min(size, ranks)))


def test_streams_that_cannot_show_blocks() -> None:
    assert can_show_blocks(io.TextIOWrapper(io.BytesIO(), "utf-8")) and not can_show_blocks(io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert not can_show_blocks(io.StringIO())


# ---- in the demo ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [("--layout", "expert_major"), ("--layout", "rank_major"), ("--algorithm", "ht", "--layout", "flat")])
def test_the_demo_shows_load_traffic_and_timeline(words: tuple[str, ...], capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    assert main(["demo", "--backend", "sim", "--ranks", "2", "--tokens", "64", "--view", "--trace", str(file), *words]) == 0
    out = capsys.readouterr().out
    tokens = len(re.findall(r"\w+|[^\w\s]", demo.TEXT))
    assert f"expert load: {2 * tokens} rows for 8 experts" in out and len(bars(out)) == 8
    sent = int(re.search(r"traffic: (\d+) rows", out)[1])   # type: ignore[index]
    assert sent == 2 * tokens if "expert_major" in words else tokens < sent < 2 * tokens
    trace = json.loads(file.read_text())
    check_schema(trace["traceEvents"])
    assert "simulated, no measurement" in trace["otherData"]["source"]
    kernels = {r["name"] for r in trace["traceEvents"] if r.get("cat") == "kernel"}
    assert any("dispatch" in k for k in kernels) and any("combine" in k for k in kernels)


def test_the_demo_shows_nothing_unasked_where_nobody_looks(capsys: Any) -> None:
    assert main(["demo", "--backend", "sim", "--ranks", "2", "--tokens", "200"]) == 0
    assert "traffic" not in capsys.readouterr().out
    assert main(["demo", "--backend", "sim", "--ranks", "2", "--tokens", "200", "--view", "--json"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--trace", str(tmp_path / "missing" / "t.json")])
    assert "must be a folder that can be written" in capsys.readouterr().err
