"""`python -m ncclep_py bench`: statistics, bytes, routings, records and comparison by hand, and the command in the simulator."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest
import torch

from ncclep_py.__main__ import main as command_line
from ncclep_py.bench import command, compare, record, table
from ncclep_py.bench import routing as routings
from ncclep_py.bench.byte_counts import byte_counts
from ncclep_py.bench.case import IDENTITY, Case
from ncclep_py.bench.statistics import Figure, differ, slowest

TOY = Case(ranks=2, experts=16, topk=3, hidden=512, tokens=5, sms=2, backend="sim")
SIM = ["bench", "--backend", "sim"]


def test_the_slowest_rank_of_each_replay_then_median_and_quartiles() -> None:
    figure = slowest([[1, 9, 3, 4, 5], [2, 1, 8, 1, 1]])   # slowest: 2 9 8 4 5
    assert figure == Figure(5, 4, 8, 5)
    assert figure.noise == 2 and Figure(100, 99.9, 100.1, 10).noise == 2
    assert Figure.from_json(figure.as_json()) == figure


def test_times_of_different_length_are_refused() -> None:
    for times in ([[1.0], [1.0, 2.0]], [[], []]):
        with pytest.raises(ValueError, match="same number of times, at least one"):
            slowest(times)


@pytest.mark.parametrize(("other", "told"), [(Figure(104, 104, 104, 9), False), (Figure(104.2, 104, 104.3, 9), True),
                                             (Figure(120, 100, 140, 9), False)])
def test_figures_differ_beyond_both_noises(other: Figure, told: bool) -> None:
    assert differ(Figure(100, 100, 100, 9), other) is told


def test_bytes_by_hand() -> None:
    """2 ranks, 4 experts, 3 tokens each; rank 0 sends (0,1) (0,2) (2,3), rank 1 sends (0,1) three times; rows of 1024 bytes."""
    case = Case(ranks=2, experts=4, topk=2, hidden=512, tokens=3, backend="sim")
    load, traffic = [5, 4, 2, 1], [[2, 2], [3, 0]]
    counts = byte_counts(case, load, traffic)
    assert counts.per_pair == (12 * 1024, 12 * 1024) and counts.per_rank == (7 * 1024, 12 * 1024)
    assert counts.physical == ((6 + 12) * 1024, (12 + 6) * 1024)
    by_rank = byte_counts(dataclasses.replace(case, layout="rank_major"), load, traffic)
    assert by_rank.per_rank == (7 * 1024, 7 * 1024) and by_rank.physical == ((6 + 7) * 1024, (7 + 6) * 1024)
    ht = byte_counts(dataclasses.replace(case, algorithm="ht"), load, traffic)
    assert ht.per_rank == (7 * 1024, 7 * 1024) and ht.physical == ((6 + 12) * 1024, (12 + 6) * 1024)
    quantised = byte_counts(dataclasses.replace(case, recipe="ds_fp8"), load, traffic)
    assert quantised.per_rank == (7 * (512 + 16), 12 * 1024) and quantised.physical[0] == 6 * 1024 + 12 * 528
    assert byte_counts(dataclasses.replace(case, recipe="quant_fwd"), load, traffic).physical[0] == (6 + 12) * 528


def test_expert_load_and_traffic_by_hand(tmp_path: pathlib.Path) -> None:
    routings.record(tmp_path / "r.pt", torch.tensor([[0, 1], [0, 2], [3, 2], [1, 0], [0, -1], [1, 0]]), 4)
    case = Case(ranks=2, experts=4, topk=2, hidden=64, tokens=3, routing=str(tmp_path / "r.pt"), backend="sim")
    assert routings.expert_load(case) == [5, 3, 2, 1] and routings.traffic(case) == [[2, 2], [3, 0]]
    assert routings.routing(dataclasses.replace(case, tokens=4), 1).tolist() == [[0, -1], [1, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize("algorithm", ["ll", "ht"])
def test_seeded_routings(algorithm: str) -> None:
    case = Case(algorithm, Case(algorithm=algorithm, layout="expert_major").layout, 4, 64, 8, 64, 200, backend="sim")
    for how in routings.ROUTINGS:
        ids = routings.routing(dataclasses.replace(case, routing=how), 1)
        assert ids.shape == (200, 8) and all(len(set(row)) == 8 for row in ids.tolist())
        most = int(torch.bincount(ids.flatten(), minlength=64).max())
        assert (int(ids.max()) < 16) == (how == "one_rank") and (most > 150) == (how == "zipf")
        groups = max(len(set(row)) for row in (ids // 8).tolist())
        assert groups <= 4 if how == "group_limited" else groups > 1
        assert torch.equal(ids, routings.routing(dataclasses.replace(case, routing=how), 1))


def test_bad_routings_are_named(tmp_path: pathlib.Path) -> None:
    for ids, said in ((torch.tensor([[0, 4]]), r"topk_idx must hold -1 or ids in \[0, 4\), got 0 to 4"),
                      (torch.tensor([0.5]), r"topk_idx must be \[N, K\] int32 or int64"),
                      (torch.tensor([[0, 1], [2, 2], [-1, -1]]), "topk_idx must name an expert once per token, token 1 has 2 twice")):
        with pytest.raises(ValueError, match=said):
            routings.record(tmp_path / "r.pt", ids, 4)
    for weights, said in ((torch.ones(1, 2, dtype=torch.float64), r"topk_weights must be \[1, 2\] float32"), (torch.ones(2, 1), r"got \[2, 1\]")):
        with pytest.raises(ValueError, match=said):
            routings.record(tmp_path / "r.pt", torch.tensor([[0, 3]]), 4, topk_weights=weights)
    with pytest.raises(ValueError, match="path must end in .pt or .npz, got"):
        routings.record(tmp_path / "r.txt", torch.tensor([[0, 3]]), 4)
    routings.record(tmp_path / "r.pt", torch.tensor([[0, 3]]), 4)
    torch.save([1], tmp_path / "other.pt")
    (tmp_path / "text.npz").write_text("no")
    for name, said in (("r.pt", "holds 1 tokens with 2 of 4 experts, the case has 3 of 16"), ("other.pt", "must hold topk_idx and num_experts"),
                       ("none.pt", "routing must be one of uniform, zipf"), ("text.npz", "routing must be one of uniform, zipf")):
        with pytest.raises(ValueError, match=said):
            routings.routing(dataclasses.replace(TOY, routing=str(tmp_path / name)), 0)
    with pytest.raises(ValueError, match="one_rank needs topk to be at most the 8 experts of a rank, got 9"):
        routings.routing(dataclasses.replace(TOY, routing="one_rank", topk=9), 0)
    with pytest.raises(ValueError, match="group_limited needs experts in 8 groups"):
        routings.routing(dataclasses.replace(TOY, routing="group_limited", experts=12), 0)


def test_weights_are_recorded_for_all_tokens_or_none() -> None:
    recorder = routings.Recorder(4)
    recorder.add(torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="topk_weights must be given in every call of add or in none"):
        recorder.add(torch.tensor([[0, 1]]), torch.ones(1, 2))
    with pytest.raises(ValueError, match="nothing was recorded"):
        routings.Recorder(4).save("r.pt")


@pytest.mark.parametrize(("changes", "said"), [
    ({"layout": "flat"}, "layout of a ll case must be one of expert_major, rank_major, got 'flat'"),
    ({"experts": 15}, "multiple of ranks, 2, got 15"),
    ({"topk": 17}, "topk must be at most experts, 16, got 17"), ({"tokens": 0}, "tokens must be at least 1, got 0"),
    ({"recipe": "ds_fp8", "dtype": "fp32"}, "recipe ds_fp8 needs dtype bf16"), ({"recipe": "ds_fp8", "hidden": 64}, "multiple of 512, got 64"),
    ({"backward": True}, "backward needs algorithm ht")])
def test_bad_cases_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(TOY, **changes)


def test_the_command_writes_a_record_without_times_in_the_simulator(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    words = [*SIM, "--tokens", "3", "--dtype", "bf16", "fp32", "--peers", "all", "--layer", "--stamps", "--json", str(file)]
    assert command_line(words) == 0
    out = capsys.readouterr().out
    assert "simulated: results are checked, nothing is timed" in out and "left out, all_to_all_single needs one process per rank" in out
    held = record.read(file)
    assert [(row["algorithm"], row["layout"], row["dtype"]) for row in held["rows"]] == [
        (a, layout, d) for a, layouts in (("ll", ("expert_major", "rank_major")), ("ht", ("flat", "expert_major"))) for layout in layouts
        for d in ("bf16", "fp32")]
    for row in held["rows"]:
        assert row["verified"] and row["exact"] and row["figures"] == {} and row["host_us"] is None and row["share_of_copy"] is None
        assert row["checked_by"] == "closed form and oracle" and row["budget"] == "worst"
        assert row["budget_rows"] == {("ht", "flat"): 4 * 3, ("ht", "expert_major"): 4 * 3 * 2}.get((row["algorithm"], row["layout"]))
        assert set(IDENTITY) < row.keys() and sum(row["expert_load"]) == 4 * 3 * 2 and len(row["traffic"]) == 4 and row["stamps"]
    assert held["floors"] == {} and held["machine"]["gpu"] == "none: simulated, no times" and held["machine"]["torch"] == torch.__version__
    assert [(row["direction"], row["tokens_per_s"]) for row in held["layers"]] == [("forward", None), ("forward+backward", None)]
    assert command_line([*SIM, "--tokens", "3", "--algorithm", "ll", "--compare", str(file)]) == 1   # the others are missing now
    assert "missing" in capsys.readouterr().out
    assert command_line(["bench", "compare", str(file), str(file)]) == 0
    assert capsys.readouterr().out.count("verified") == 8


def test_a_failed_case_is_a_row_and_an_exit_code(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("it fell over")

    monkeypatch.setattr("ncclep_py.bench.worlds.Worlds.answers", fail)
    file = tmp_path / "r.json"
    assert command_line([*SIM, "--algorithm", "ll", "--layout", "expert_major", "--tokens", "3", "--json", str(file)]) == 1
    assert "it fell over" in record.read(file)["rows"][0]["error"] and "ValueError: it fell over" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [
    (["bench", "compare", "a"], "compare needs two records, BEFORE and AFTER, got 1"),
    ([*SIM, "--alignment", "3"], "alignment must be 0 or a power of two, got 3"), ([*SIM, "--alignment", "-4"], "power of two, got -4"),
    (["bench", "report", "x.json", "-o", "/nope/r.html"], "cannot write /nope/r.html: /nope must be a folder that can be written"),
    (["bench", "dance"], "action must be run, compare or report, got dance"),
    ([*SIM, "--mode", "processes"], "the simulator has all ranks in one process, got mode processes"),
    ([*SIM, "--algorithm", "ll", "--layout", "flat"], "no layout of ll was asked for"), ([*SIM, "--experts", "9"], "multiple of ranks, 4, got 9"),
    ([*SIM, "--routing", "zzz"], "routing must be one of uniform, zipf, one_rank, group_limited or a file of bench.routing.record, got zzz: "),
    ([*SIM, "--routing", "uniform", "zzz"], "got zzz: "), ([*SIM, "--routing", "group_limited"], "got 8 experts and topk 2"),
    ([*SIM, "--routing", "one_rank", "--topk", "3"], "routing one_rank needs topk to be at most the 2 experts of a rank, got 3"),
    ([*SIM, "--hidden", "63"], "hidden must make rows of a multiple of 16 bytes, got 63 x 2 = 126 bytes"),
    ([*SIM, "--hidden", "64", "63"], "got 63 x 2 = 126 bytes"),
    (["bench", "--compare", "/nowhere.json"], "cannot be read as a record")])
def test_bad_command_lines_are_sentences(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(words) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and not told.out


def test_a_record_of_something_else_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "r.json").write_text('{"schema": "other"}')
    with pytest.raises(ValueError, match="must be a record with schema ncclep_py.bench/1, got other"):
        record.read(tmp_path / "r.json")


def test_every_combination_is_a_case() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ("--algorithm ll ht --layout expert_major --tokens 8 64 --sms 4 8 --dtype fp32 bf16 --recipe none quant_fwd --backward --alignment 16")
    options = parser.parse_args(words.split())
    made = command.cases(options, "nccl", "local", 1)
    assert len(made) == len(set(made)) == 2 * 2 * 2 * 3   # no recipe with fp32
    assert {(c.algorithm, c.backward, c.alignment) for c in made} == {("ll", False, 0), ("ht", True, 16)}


def test_combinations_that_make_no_sense_are_told(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    file = tmp_path / "r.json"
    words = ["--algorithm", "ht", "--layout", "flat", "rank_major", "--tokens", "3", "--ranks", "2", "3", "--experts", "8", "--json", str(file)]
    assert command_line(["bench", "--backend", "sim", *words]) == 0
    out, held = capsys.readouterr().out, record.read(file)
    told = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert told == [f"left out: {why}" for why in held["left_out"]] and len(told) == 2 and len(held["rows"]) == 1
    assert told[0] == "left out: ht, rank_major: ht has no such layout" and "ht, flat: " in told[1] and told[1].endswith(" (1 combination)")


def row(median: float | None = 100.0, spread: float = 0.0, **changes: Any) -> dict[str, Any]:
    figures = {} if median is None else {"chained_pair": Figure(median, median - spread, median + spread, 10).as_json()}
    return {"implementation": "ncclep_py", **dataclasses.asdict(TOY), "verified": True, "figures": figures} | changes


@pytest.mark.parametrize(("after", "word"), [
    (row(103.9), "same"), (row(104.2), "slower"), (row(95.9), "faster"), (row(96.1), "same"), (row(120.0, 20.0), "same"),
    (row(50.0, verified=False), "wrong"),
    (row(None, error="it fell over", verified=False), "wrong"), (row(100.0, tokens=9), "missing"), (row(None), "verified")])
def test_verdicts(after: dict[str, Any], word: str) -> None:
    verdicts = compare.compare({"rows": [row()]}, {"rows": [after]})
    assert verdicts[0].word == word and verdicts[0].bad == (word in ("slower", "wrong", "missing"))
    assert re.match(rf" *\S+ +\S+ +(\S+ %)?  {word} +ncclep_py ll, ", compare.lines(verdicts)[1])


def test_a_comparison_has_a_header_and_lines_of_a_terminal() -> None:
    before, after = (row(t, routing="/recorded/of/a/model/with/a/long/name/" * 3, recipe="quant_fwd", hidden=512, mode="processes", backend="nccl")
                     for t in (100.0, 150.0))
    header, *told = compare.lines(compare.compare({"rows": [before, row()]}, {"rows": [after]}))
    assert header.split() == ["before", "us", "after", "us", "change", "verdict", "case", "(figure:", "reason)"]
    assert max(map(len, told)) < 160 and len(told) > 2 and " ".join(" ".join(told).split()).startswith("100.0 150.0 +50.0 % slower ncclep_py ll, ")
    assert [line.index("ncclep_py") for line in told if "ncclep_py" in line] == [header.index("case")] * 2
    assert " ".join(" ".join(told).split()).endswith(" simulated (chained_pair: only in the first record)")
    assert compare.lines([]) == []


def test_a_budget_is_of_a_case_of_high_throughput_and_old_records_had_one(capsys: pytest.CaptureFixture[str]) -> None:
    worst, exact = row(algorithm="ht"), row(algorithm="ht", budget="exact")
    assert "budget" not in Case(**{name: worst[name] for name in IDENTITY}).name() and "exact budget" in table.case_of(exact).name()
    old = {name: value for name, value in worst.items() if name != "budget"}
    assert record.key_of(old) == record.key_of(exact) != record.key_of(worst) and table.case_of(old).budget == "exact"
    assert record.key_of(old | {"implementation": "nccl.ep"}) == record.key_of(worst | {"implementation": "nccl.ep"})
    assert record.key_of({name: value for name, value in row().items() if name != "budget"}) == record.key_of(row())
    assert command_line([*SIM, "--algorithm", "ll", "ht", "--layout", "expert_major", "--tokens", "3", "--budget", "exact"]) == 0
    out = capsys.readouterr().out
    assert re.search("ht, .*exact budget: right", out) and out.count("budget") == 1


def told_of(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    return [(v.figure, v.word) for v in compare.compare({"rows": [before]}, {"rows": [after]})[1:]]


def test_every_figure_and_number_is_compared() -> None:
    """What does not differ is not told, but for the pair; three times as much of anything is."""
    full = row(host_us=20.0, compile_s={"cold": 3.0, "warm": 0.1}, peak_memory_bytes=1000)
    full["figures"] |= {name: Figure(50.0, 49.0, 51.0, 10).as_json() for name in ("pair", "step", "update")}
    assert told_of(full, full) == []
    for name in ("pair", "step", "update"):
        for median, word in ((150.0, "slower"), (20.0, "faster"), (51.0, None)):
            changed = full | {"figures": full["figures"] | {name: Figure(median, median - 1, median + 1, 10).as_json()}}
            assert told_of(full, changed) == ([(name, word)] if word else [])
    for name, value, word in (("host_us", 60.0, "slower"), ("host_us", 5.0, "faster"), ("host_us", 24.0, None),
                              ("peak_memory_bytes", 3000, "more"), ("peak_memory_bytes", 300, "less"), ("peak_memory_bytes", 1050, None)):
        assert told_of(full, full | {name: value}) == ([(name, word)] if word else [])
    assert told_of(full, full | {"compile_s": {"cold": 9.0, "warm": 0.1}}) == [("compile_s cold", "slower")]
    assert told_of(full, full | {"verified": False, "host_us": 60.0}) == []


def test_layers_are_compared_by_their_speed() -> None:
    def record_of(speed: int | None, **more: Any) -> dict[str, Any]:
        layer = {**dataclasses.asdict(TOY), "implementation": "ncclep_py", "direction": "forward", "width": 16, "tokens_per_s": speed}
        return {"rows": [], "layers": [layer | more]}

    for speed, words in ((300, ["slower"]), (3000, ["faster"]), (1050, []), (None, [])):
        assert [v.word for v in compare.compare(record_of(1000), record_of(speed))] == words
    assert compare.compare(record_of(1000), record_of(300, direction="forward+backward")) == []
    slow = compare.compare(record_of(1000), record_of(300))
    assert slow[0].bad and "MoE layer forward" in slow[0].case and slow[0].figure == "tokens_per_s"


def test_other_machines_are_told() -> None:
    here = {"gpu": "NVIDIA H200", "nccl": "2.32.3", "commit": "a", "date": "today"}
    assert compare.other_machine({"machine": here}, {"machine": here | {"commit": "b", "date": "tomorrow"}}) == []
    assert compare.other_machine({"machine": here}, {"machine": here | {"gpu": "NVIDIA A100"}}) == ["not the same gpu: NVIDIA H200, now NVIDIA A100"]


def test_what_was_wrong_before_is_new_or_still_wrong() -> None:
    for after, word in ((row(), "new"), (row(verified=False), "still wrong")):
        assert compare.compare({"rows": [row(verified=False)]}, {"rows": [after]})[0].word == word


def test_a_bar_on_a_terminal_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command._progress(1, 4, "a case")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    command._progress(1, 4, "a case")
    command._progress(4, 4, "")
    assert "[######..................] 1/4 a case" in capsys.readouterr().err


def test_a_record_is_json(tmp_path: pathlib.Path) -> None:
    made = record.new_record({"gpu": None}, {})
    record.write(made, tmp_path / "r.json")
    assert record.read(tmp_path / "r.json") == made == json.loads((tmp_path / "r.json").read_text())
