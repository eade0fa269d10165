"""`python -m ncclep_py bench`: statistics, bytes, routings, records and comparison by hand; every kind of case checked in the simulator; peers."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing as mp
import os
import pathlib
import sys
import types
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch

from ncclep_py import LocalWorld
from ncclep_py.__main__ import main as command_line
from ncclep_py.bench import command, compare, compile_times, ht_subject, inputs, ll_subject, machine, oracle, processes, record, table
from ncclep_py.bench import routing as routings
from ncclep_py.bench import subject as subjects
from ncclep_py.bench.byte_counts import byte_counts
from ncclep_py.bench.case import IDENTITY, Case
from ncclep_py.bench.ht_subject import HTSubject
from ncclep_py.bench.layer import EpExchange, MoELayer, SplitExchange
from ncclep_py.bench.ll_subject import LLSubject
from ncclep_py.bench.peers import all_to_all, deep_ep, nccl_ep, why_not
from ncclep_py.bench.processes import ProcessWorld, SpinBarrier
from ncclep_py.bench.rank_jobs import PairJob, run_pair
from ncclep_py.bench.statistics import Figure, differ, slowest
from ncclep_py.bench.worlds import Worlds
from ncclep_py.communicator import Communicator

TOY = Case(ranks=2, experts=16, topk=3, hidden=512, tokens=5, sms=2, backend="sim")
SIM = ["bench", "--backend", "sim"]


# ---- statistics ----------------------------------------------------------------------------------------------------------------
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


# ---- bytes and routings --------------------------------------------------------------------------------------------------------
def test_bytes_by_hand() -> None:
    """2 ranks, 4 experts, 3 tokens each; rank 0 sends (0,1) (0,2) (2,3), rank 1 sends (0,1) three times; rows of 1024 bytes."""
    case = Case(ranks=2, experts=4, topk=2, hidden=512, tokens=3, backend="sim")
    load, traffic = [5, 4, 2, 1], [[2, 2], [3, 0]]
    counts = byte_counts(case, load, traffic)
    assert counts.per_pair == (12 * 1024, 12 * 1024) and counts.per_rank == (7 * 1024, 12 * 1024)
    assert counts.physical == ((6 + 12) * 1024, (12 + 6) * 1024)
    by_rank = byte_counts(dataclasses.replace(case, layout="rank_major"), load, traffic)
    assert by_rank.per_rank == (7 * 1024, 7 * 1024) and by_rank.physical == ((6 + 7) * 1024, (7 + 6) * 1024)
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


@pytest.mark.parametrize("name", ["r.pt", "r.npz"])
def test_a_recorded_routing_is_read_back_with_its_weights(name: str, tmp_path: pathlib.Path) -> None:
    recorder = routings.Recorder(16)
    ids = [torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(n + t))[:3] for t in range(4)]) for n in (0, 50)]
    weights = [torch.rand(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    for part, beside in zip(ids, weights, strict=True):
        recorder.add(part.to(torch.int32), beside)
    recorder.save(tmp_path / name)
    case = dataclasses.replace(TOY, routing=str(tmp_path / name))   # 2 ranks of 5 tokens out of 8: rank 1 begins again
    everything, all_weights = torch.cat(ids), torch.cat(weights)
    assert torch.equal(routings.routing(case, 0), everything[:5]) and torch.equal(routings.routing(case, 1), everything[[5, 6, 7, 0, 1]])
    assert torch.equal(inputs.weights_of(case, 0), all_weights[:5]) and torch.equal(inputs.weights_of(case, 1), all_weights[[5, 6, 7, 0, 1]])
    assert not torch.equal(inputs.weights_of(TOY, 0), all_weights[:5])
    assert checked(case) == [True, True] and checked(dataclasses.replace(case, algorithm="ht")) == [True, True]


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


# ---- what is checked before anything is timed ------------------------------------------------------------------------------------
def checked(case: Case, spoil: Any = None) -> list[bool]:
    def program(comm: Any) -> bool:
        subject: Any = (LLSubject if case.algorithm == "ll" else HTSubject)(comm, case)
        if spoil:
            spoil(subject)
        right = subject.check()
        for name, action in subject.actions().items():
            if name not in ("flush", "empty_pair"):
                action()
        if case.algorithm == "ll":
            subject.pair()
        subject.close()
        return right

    with LocalWorld(case.ranks, "sim") as world:
        return world.run(program)


@pytest.mark.parametrize("how", ["uniform", "one_rank", "zipf"])
@pytest.mark.parametrize("kind", [
    {}, {"layout": "rank_major"}, {"recipe": "ds_fp8"}, {"layout": "rank_major", "recipe": "quant_fwd"}, {"dtype": "fp32"},
    {"algorithm": "ht", "layout": "flat", "backward": True}, {"algorithm": "ht", "layout": "expert_major", "alignment": 4},
    {"algorithm": "ht", "layout": "expert_major", "recipe": "quant_fwd", "backward": True}], ids=str)
def test_results_are_known(kind: dict[str, Any], how: str) -> None:
    assert checked(dataclasses.replace(TOY, routing=how, **kind)) == [True, True]


def test_wrong_results_are_seen() -> None:
    ht = dataclasses.replace(TOY, algorithm="ht", layout="flat")
    assert checked(TOY, lambda s: s.weights.mul_(2)) == [False, False]
    assert checked(ht, lambda s: setattr(s, "sources", s.sources.flip(0))) == [False, False]
    assert checked(ht, lambda s: setattr(s, "expected", lambda quantised: s.tokens)) == [False, False]


@pytest.mark.parametrize("small", [True, False], ids=["oracle", "closed form"])
@pytest.mark.parametrize("kind", [
    {}, {"layout": "rank_major"}, {"recipe": "ds_fp8"}, {"algorithm": "ht", "layout": "flat"},
    {"algorithm": "ht", "layout": "expert_major", "alignment": 4, "recipe": "quant_fwd"}], ids=str)
def test_one_wrong_received_value_is_seen_by_either_check(kind: dict[str, Any], small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form and the oracle are each enough: one of them is always right here."""
    case = dataclasses.replace(TOY, **kind)
    names = ["tokens"] + ["scales"] * (case.recipe != "none") + ["topk_idx"] * (case.layout in ("flat", "rank_major"))
    names += ["topk_weights"] * (case.algorithm == "ht" or case.layout == "rank_major")
    module = ll_subject if case.algorithm == "ll" else ht_subject
    monkeypatch.setattr(oracle, "is_small", lambda case: small)
    if small:
        monkeypatch.setattr(module, "ll_arrived" if case.algorithm == "ll" else "ht_arrived", lambda *words: True)

    def spoil(name: str, subject: Any) -> None:
        dispatch = subject.dispatch

        def spoilt() -> Any:
            got = dispatch()
            values = getattr(got, name)
            plane = values[int(got.layout_info.expert_counters.argmax())] if case.algorithm == "ll" and case.layout == "expert_major" else values[0]
            plane.view(-1)[:1].view(torch.uint8)[-1] ^= 1
            return got

        if subject.comm.rank == 0:
            subject.dispatch = spoilt

    for name in names:
        assert checked(case, functools.partial(spoil, name))[0] is False, name
    if not small:
        assert checked(case, lambda subject: setattr(subject, "everybody", [ids.flip(0) for ids in subject.everybody])) == [False, False]


@pytest.mark.parametrize("kind", [{}, {"layout": "rank_major"}, {"algorithm": "ht", "layout": "flat"},
                                  {"algorithm": "ht", "layout": "expert_major"}], ids=str)
def test_tokens_without_experts_are_known(kind: dict[str, Any], tmp_path: pathlib.Path) -> None:
    ids = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(t))[:3] for t in range(10)])
    ids[0], ids[3, 1], ids[7, 2] = -1, -1, -1
    routings.record(tmp_path / "r.pt", ids, 16)
    assert checked(dataclasses.replace(TOY, routing=str(tmp_path / "r.pt"), **kind)) == [True, True]


def test_the_oracle_plays_small_cases_only() -> None:
    assert oracle.is_small(TOY) and oracle.is_small(Case(tokens=8)) and not oracle.is_small(Case(tokens=128))


# ---- the command ---------------------------------------------------------------------------------------------------------------
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
        assert row["checked_by"] == "closed form and oracle"
        assert set(IDENTITY) < row.keys() and sum(row["expert_load"]) == 4 * 3 * 2 and len(row["traffic"]) == 4 and row["stamps"]
    assert held["floors"] == {} and held["machine"]["gpu"] == "none: simulated, no times" and held["machine"]["torch"] == torch.__version__
    assert [(row["direction"], row["tokens_per_s"]) for row in held["layers"]] == [("forward", None), ("forward+backward", None)]
    assert command_line([*SIM, "--tokens", "3", "--algorithm", "ll", "--compare", str(file)]) == 1   # the others are missing now
    assert "missing" in capsys.readouterr().out
    assert command_line(["bench", "compare", str(file), str(file)]) == 0
    assert capsys.readouterr().out.count("verified") == 8


def test_a_failed_case_is_a_row_and_an_exit_code(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    words = [*SIM, "--algorithm", "ll", "--layout", "expert_major", "--tokens", "3", "--routing", "nowhere.pt", "--json", str(file)]
    assert command_line(words) == 1
    assert "routing must be one of uniform" in record.read(file)["rows"][0]["error"] and "nowhere.pt" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [
    (["bench", "compare", "a"], "compare needs two records, BEFORE and AFTER, got 1"),
    (["bench", "dance"], "action must be run, compare or report, got dance"),
    ([*SIM, "--mode", "processes"], "the simulator has all ranks in one process, got mode processes"),
    ([*SIM, "--algorithm", "ll", "--layout", "flat"], "no layout of ll was asked for"), ([*SIM, "--experts", "9"], "multiple of ranks, 4, got 9"),
    (["bench", "--compare", "/nowhere.json"], "cannot be read as a record")])
def test_bad_command_lines_are_sentences(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(words) == 2
    assert said in capsys.readouterr().err


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


# ---- comparison ----------------------------------------------------------------------------------------------------------------
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
    assert word in compare.lines(verdicts)[0].split()


def test_what_was_wrong_before_is_new_or_still_wrong() -> None:
    for after, word in ((row(), "new"), (row(verified=False), "still wrong")):
        assert compare.compare({"rows": [row(verified=False)]}, {"rows": [after]})[0].word == word


# ---- processes and peers -------------------------------------------------------------------------------------------------------
def _meet(barrier: SpinBarrier, rank: int, told: Any) -> None:
    barrier.rank = rank
    for _ in range(50):
        barrier.wait(20)
    try:
        barrier.abort() if rank == 0 else barrier.wait(20)
    except BrokenBarrierError:
        told.put(rank)


def test_processes_meet_and_learn_that_one_gave_up() -> None:
    context = mp.get_context("fork")
    barrier, told = SpinBarrier(2), context.Queue()
    processes = [context.Process(target=_meet, args=(barrier, rank, told), daemon=True) for rank in range(2)]
    for p in processes:
        p.start()
    assert told.get(timeout=60) == 1


def connected(rank: int, ranks: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(rank=rank, num_ranks=ranks, jobs=[])


def counted(comm: Any, job: str, meet: Any) -> dict[str, Any]:
    """A rank that keeps what it was given; some jobs fail."""
    meet()
    comm.jobs.append(job)
    if job == "fail" and comm.rank == 1:
        raise ValueError("rank 1 cannot")
    if job == "die" and comm.rank == 1:
        os._exit(7)
    meet()
    return {"rank": comm.rank, "jobs": list(comm.jobs)}


def test_processes_are_kept_for_the_next_job_and_a_failure_is_told() -> None:
    world = ProcessWorld(2, connect=connected)
    assert world.run(counted, "a") == [{"rank": rank, "jobs": ["a"]} for rank in range(2)]
    assert world.run(counted, "b") == [{"rank": rank, "jobs": ["a", "b"]} for rank in range(2)]
    with pytest.raises(RuntimeError, match="rank 1 cannot"):   # not that rank 0 waited in vain
        world.run(counted, "fail")
    assert world.closed and not any(p.is_alive() for p in world.processes)
    with pytest.raises(RuntimeError, match="these processes are gone"):
        world.run(counted, "c")


def test_a_process_that_died_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "WAIT_S", 5)
    world = ProcessWorld(1, connect=connected_as_rank_1)
    with pytest.raises(RuntimeError, match="the process of rank 0 ended with exit code 7"):
        world.run(counted, "die")


def connected_as_rank_1(rank: int, ranks: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(rank=1, jobs=[])


def _torchrun(rank: int, folder: str, told: Any) -> None:
    """A rank under torchrun, on the CPU: jobs that work, one that fails on rank 1, one after it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    made: list[Any] = []

    def connect() -> Any:
        made.append(types.SimpleNamespace(rank=rank, num_ranks=2, backend="sim", jobs=[], abandon=lambda: made.append("abandoned")))
        return made[-1]

    Communicator.from_environment = staticmethod(connect)   # type: ignore[method-assign]
    worlds, seen = Worlds(), []
    seen.append(worlds.alone(lambda: {"rank": rank}, "torchrun"))
    for name in ("a", "fail", "b"):
        job = types.SimpleNamespace(case=dataclasses.replace(TOY, mode="torchrun"), name=name)
        try:
            seen.append(worlds.answers(job, lambda comm, job, meet: counted(comm, job.name, meet)))
        except RuntimeError as e:
            seen.append("rank 1 cannot" in str(e))
    told.put((rank, seen, made.count("abandoned")))


def test_under_torchrun_a_failure_is_known_to_all_ranks_and_the_next_case_goes_on(tmp_path: pathlib.Path) -> None:
    context = mp.get_context("fork")
    told = context.Queue()
    ranks = [context.Process(target=_torchrun, args=(rank, str(tmp_path), told), daemon=True) for rank in range(2)]
    for p in ranks:
        p.start()
    for rank, seen, abandoned in sorted(told.get(timeout=60) for _ in ranks):
        assert seen[0] == ({"rank": 0} if rank == 0 else {})
        assert seen[1] == [{"rank": r, "jobs": ["a"]} for r in range(2)] and seen[2] is True
        assert seen[3] == [{"rank": r, "jobs": ["b"]} for r in range(2)] and abandoned == 1
    assert not list(pathlib.Path("/dev/shm").glob("ncclep-bench-*"))


def test_each_implementation_is_played_in_processes_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options, said = parser.parse_args(["--peers", "all"]), []
    todo = [Case(tokens=tokens, mode="processes") for tokens in (1, 8)]
    played = [(name, case.tokens) for case, name in command._jobs(options, todo, said.append)]
    assert played == [("ncclep_py", 1), ("ncclep_py", 8), ("all_to_all_single", 1), ("all_to_all_single", 8)]
    assert len(said) == 4 and all("is not installed" in text for text in said)


def test_compile_times_are_those_of_the_kernels_a_case_used(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path))
    with LocalWorld(2, "sim") as world:
        kernels = world.run(run_pair, PairJob(dataclasses.replace(TOY, layout="rank_major")))[0]["kernels"]
    names = [name for name, _ in kernels]
    assert {"ll_rank_major_dispatch", "ll_combine"} <= set(names) and len(set(kernels)) == len(kernels)
    compiled: list[tuple[str, str]] = []

    def compile_kernel(spec: Any, arch: str) -> None:
        compiled.append((spec.name, os.environ["NCCLEP_CACHE_DIR"]))

    monkeypatch.setattr("ncclep_py.compiled.compile_kernel", compile_kernel)
    told = compile_times.compile_seconds(kernels, "sm_90")
    assert told is not None and told.keys() == {"cold", "warm"} and min(told.values()) >= 0
    assert [name for name, _ in compiled] == names * 2
    assert len({folder for _, folder in compiled}) == 1 and os.environ["NCCLEP_CACHE_DIR"] == str(tmp_path) != compiled[0][1]


def test_what_was_measured_is_kept_when_a_run_is_cut_short(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    play = command.row_of

    def cut(worlds: Any, case: Case, *rest: Any) -> Any:
        if case.layout == "rank_major":
            raise KeyboardInterrupt
        return play(worlds, case, *rest)

    monkeypatch.setattr(command, "row_of", cut)
    with pytest.raises(KeyboardInterrupt):
        command_line([*SIM, "--algorithm", "ll", "--tokens", "2", "--json", str(tmp_path / "r.json")])
    assert [row["layout"] for row in record.read(tmp_path / "r.json")["rows"]] == ["expert_major"]


def test_clocks_are_asked_of_nvml_then_of_nvidia_smi_else_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))
    asked: list[str] = []
    nvml = types.SimpleNamespace(NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=asked.append,
                                 nvmlDeviceGetClockInfo=lambda gpu, kind: 1000 * kind)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert machine.clocks("cuda:0") == {"sm": 1000, "memory": 2000} and asked == ["GPU-1-2"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for out, want in (("1980, 3201\n", {"sm": 1980, "memory": 3201}), ("", None), ("[N/A], 3201", None)):
        monkeypatch.setattr(machine.subprocess, "run", lambda *words, out=out, **named: types.SimpleNamespace(stdout=out))
        assert machine.clocks("cuda:0") == want


PEER = dataclasses.replace(TOY, ranks=2, experts=8, topk=2, hidden=64, tokens=6, dtype="fp32")


def _both_ways(rank: int, folder: str, told: Any) -> None:
    """all_to_all_single over gloo: the exchange alone, and the layer with its gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    comm = types.SimpleNamespace(rank=rank, num_ranks=2, device=torch.device("cpu"), backend="sim")
    subject = all_to_all.AllToAllSubject(comm, PEER)   # type: ignore[arg-type]
    right = subject.check()
    subject.ids[0, 0] = -1
    right &= subject.check()
    layer, x = MoELayer(PEER, 16, rank), layer_input(rank)
    out = layer(x, SplitExchange(PEER))
    out.square().sum().backward()
    told.put((rank, right, out.detach().numpy(), x.grad.numpy(), layer.up.grad.numpy()))


def layer_input(rank: int) -> torch.Tensor:
    return torch.randn(PEER.tokens, PEER.hidden, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def test_both_exchanges_are_the_layer_of_one_process(tmp_path: pathlib.Path) -> None:
    context = mp.get_context("fork")
    told = context.Queue()
    processes = [context.Process(target=_both_ways, args=(rank, str(tmp_path), told), daemon=True) for rank in range(2)]
    for p in processes:
        p.start()
    split = {got[0]: got for got in (told.get(timeout=60) for _ in processes)}

    def program(comm: Any) -> tuple[Any, ...]:
        layer, x, exchange = MoELayer(PEER, 16, comm.rank), layer_input(comm.rank), EpExchange(comm, PEER)
        out = layer(x, exchange)
        out.square().sum().backward()
        exchange.close()
        return out.detach(), x.grad, layer.up.grad

    with LocalWorld(2, "sim", threads=True) as world:
        ours = world.run(program)
    alone, inputs = MoELayer(PEER, 16, None), [layer_input(rank) for rank in range(2)]
    outs = [alone(x) for x in inputs]
    sum(out.square().sum() for out in outs).backward()
    for rank in range(2):
        want = outs[rank].detach(), inputs[rank].grad, alone.up.grad[4 * rank: 4 * rank + 4]
        assert split[rank][1] is True
        for mine, theirs, expected in zip(ours[rank], split[rank][2:], want, strict=True):
            assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-4) and torch.allclose(torch.from_numpy(theirs), expected, rtol=1e-4, atol=1e-4)


def test_peers_say_why_they_are_left_out() -> None:
    processes = dataclasses.replace(TOY, mode="processes", backend="nccl", dtype="bf16")
    assert why_not("nccl.ep", processes) == "nccl.ep is not installed" and why_not("deep_ep", processes) == "deep_ep is not installed"
    assert why_not("all_to_all_single", TOY) == "all_to_all_single needs one process per rank" and why_not("all_to_all_single", processes) == ""
    assert "as they are" in why_not("all_to_all_single", dataclasses.replace(processes, recipe="ds_fp8"))
    assert deep_ep.DeepEpSubject.why_not(processes) == "deep_ep needs a GPU per rank"
    assert "expert_major" in deep_ep.DeepEpSubject.why_not(dataclasses.replace(processes, gpus=2, layout="rank_major"))
    assert deep_ep.DeepEpSubject.why_not(dataclasses.replace(processes, gpus=2)) == ""
    assert "only bf16" in nccl_ep.NcclEpSubject.why_not(dataclasses.replace(processes, dtype="fp32"))


class Stand:
    """In the place of a library: every call is kept, with its keywords."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers = answers or {}

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **named: Any) -> Any:
            self.calls.append((name, words, named))
            return self.answers.get(name, self)

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(words, named) for called, words, named in self.calls if called == name]


@pytest.mark.parametrize(("algorithm", "layout", "fields"), [
    ("ll", "expert_major", {"tokens"}), ("ll", "rank_major", {"tokens", "topk_weights", "topk_idx"}),
    ("ht", "flat", {"tokens", "topk_weights", "topk_idx"}), ("ht", "expert_major", {"tokens", "topk_weights"})])
def test_nccl_ep_is_given_what_its_layouts_want(algorithm: str, layout: str, fields: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand()
    stand.Algorithm = types.SimpleNamespace(LOW_LATENCY="ll", HIGH_THROUGHPUT="ht")   # type: ignore[attr-defined]
    stand.Layout = types.SimpleNamespace(EXPERT_MAJOR="em", RANK_MAJOR="rm", FLAT="flat")   # type: ignore[attr-defined]
    stand.Group = types.SimpleNamespace(create=lambda comm, config: stand)   # type: ignore[attr-defined]
    monkeypatch.setattr(nccl_ep, "_stream", lambda: 7)
    case = dataclasses.replace(TOY, algorithm=algorithm, layout=layout)
    comm: Any = types.SimpleNamespace(rank=0, comm="comm", device=torch.device("cpu"), synchronize=lambda: None, barrier=lambda: None)
    subject = nccl_ep.NcclEpSubject(comm, case, stand)
    config = stand.named("GroupConfig")[0][1]
    assert config["max_token_bytes"] == 1024 and config["num_experts"] == 16 and config["max_num_sms"] == 2
    assert config.get("max_recv_tokens_per_rank") == (None if algorithm == "ll" else 5 * 2 * (3 if layout == "expert_major" else 1))
    assert stand.named("DispatchOutputs")[0][1].keys() == fields
    subject.pair()
    assert stand.named("dispatch")[0][1]["stream"] == 7 and stand.named("combine")[0][1]["stream"] == 7
    subject.out.copy_((subject.tokens.float() * subject.copies()).to(subject.out.dtype))
    assert subject.check()
    subject.out.mul_(1.1)
    assert not subject.check()


def test_deep_ep_is_called_as_it_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep, "process_group", lambda comm: "world")
    comm: Any = types.SimpleNamespace(rank=0, device=torch.device("cpu"))
    tokens = torch.ones(5, 512)
    buffer = Stand({"low_latency_dispatch": ("received", "count", "handle", "event", "hook"), "low_latency_combine": (tokens, "event", "hook"),
                    "get_dispatch_layout": ("to_rank", "to_node", "to_expert", "in_rank", "event"),
                    "dispatch": ("received", "ids", "weights", "counts", "handle", "event"), "combine": (tokens, "weights", "event")})
    made: list[Any] = []

    class Buffer:
        get_low_latency_rdma_size_hint = staticmethod(lambda *sizes: sizes)
        set_num_sms = staticmethod(made.append)

        def __new__(cls, *words: Any, **named: Any) -> Any:
            made.append((words, named))
            return buffer

    library = types.SimpleNamespace(Buffer=Buffer)
    subject = deep_ep.DeepEpSubject(comm, TOY, library)
    subject.pair()
    assert made == [(("world",), {"num_rdma_bytes": (5, 512, 2, 16), "low_latency_mode": True, "num_qps_per_rank": 8})]
    assert buffer.named("low_latency_dispatch")[0][0][2:] == (5, 16) and buffer.named("low_latency_combine")[0][0][::3] == ("received", "handle")
    normal = deep_ep.DeepEpSubject(comm, dataclasses.replace(TOY, algorithm="ht", layout="flat"), library)
    normal.pair()
    assert made[1] == 2 and not normal.capturable
    assert buffer.named("dispatch")[0][1].items() >= {"num_tokens_per_rank": "to_rank", "num_tokens_per_rdma_rank": "to_node",
                                                      "is_token_in_rank": "in_rank", "num_tokens_per_expert": "to_expert"}.items()
    assert buffer.named("combine")[0][0] == ("received", "handle")


def test_like_stands_beside_like() -> None:
    def timed(name: str, case: Case, **figures: float) -> dict[str, Any]:
        held = {figure: Figure(us, us, us, 9).as_json() for figure, us in figures.items()}
        return {"implementation": name, **dataclasses.asdict(case), "verified": True, "figures": held}

    ht = dataclasses.replace(TOY, algorithm="ht")
    rows = [timed("ncclep_py", TOY, chained_pair=10, eager_pair=20), timed("nccl.ep", TOY, chained_pair=30, eager_pair=50),
            timed("all_to_all_single", TOY, known_sizes_pair=40, eager_pair=100),
            timed("ncclep_py", ht, chained_pair=10, eager_pair=20, eager_step=25),
            timed("nccl.ep", ht, eager_pair=50), timed("deep_ep", ht, eager_pair=50), timed("deep_ep", ht, chained_pair=1) | {"verified": False},
            timed("nccl.ep", dataclasses.replace(TOY, tokens=9), chained_pair=1)]
    assert table.table(rows) == [
        f"{TOY.name()}: nccl.ep chained_pair 30.0, our chained_pair 10.0 us: 3.00x; nccl.ep eager_pair 50.0, our eager_pair 20.0 us: 2.50x; "
        "all_to_all_single known_sizes_pair 40.0, our chained_pair 10.0 us: 4.00x; all_to_all_single eager_pair 100.0, our eager_pair 20.0 us: 5.00x",
        f"{ht.name()}: nccl.ep eager_pair 50.0, our eager_pair 20.0 us: 2.50x; deep_ep eager_pair 50.0, our eager_step 25.0 us: 2.00x"]


class Clock:
    """In the place of a Timer: calls once, says how long that took by name."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def timed(action: Any, *more: Any) -> list[float]:
            action()
            self.seen.append(name)
            return [float(len(self.seen))] * 3

        return timed


@pytest.mark.parametrize("capturable", [True, False])
def test_everything_is_timed_once_and_what_cannot_be_captured_last(capturable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "clocks", lambda device: {"sm": 1, "memory": 2})
    done: list[str] = []

    class Made(subjects.Subject):
        def pair(self) -> None:
            done.append("pair")

        def check(self) -> bool:
            done.append("check")
            return True

        def actions(self) -> dict[str, Any]:
            if self.capturable:
                return {name: functools.partial(done.append, name) for name in ("step", "flush", "flushed_pair")}
            return {"known": lambda: 1 // 0}

    subject = Made(types.SimpleNamespace(rank=0, device="cpu", synchronize=None), TOY)   # type: ignore[arg-type]
    subject.capturable = capturable
    told = subjects.measure(subject, Clock(), True)   # type: ignore[arg-type]
    assert told["verified"] and done[0] == "check" and done.count("check") == 2
    if capturable:
        assert done[1:] == ["pair", "pair", "step", "flush", "flushed_pair", "pair", "step", "pair", "check"]
        assert told["times"]["flushed_pair"] == [1.0] * 3   # 5 - 4
        assert told["times"].keys() == {"pair", "chained_pair", "step", "flushed_pair", "eager_pair", "eager_step"}
        assert told["clocks_mhz"] == {"sm": 1, "memory": 2} and "note" not in told
    else:
        assert done == ["check", "pair", "pair", "check"] and told["times"].keys() == {"eager_pair"}
        assert told["note"].startswith("known could not be captured: ZeroDivisionError") and told["clocks_mhz"] is None


def test_a_record_is_json(tmp_path: pathlib.Path) -> None:
    made = record.new_record({"gpu": None}, {})
    record.write(made, tmp_path / "r.json")
    assert record.read(tmp_path / "r.json") == made == json.loads((tmp_path / "r.json").read_text())
