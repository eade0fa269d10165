"""What the benchmark checks before it times: every kind of case in the simulator, by the oracle and by a closed form, and that faults are seen."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import types
from typing import Any

import pytest
import torch

from ncclep_py import LocalWorld
from ncclep_py.__main__ import main as command_line
from ncclep_py.bench import ht_subject, inputs, ll_subject, oracle
from ncclep_py.bench import routing as routings
from ncclep_py.bench import subject as subjects
from ncclep_py.bench.arrivals import ht_arrived, ll_arrived
from ncclep_py.bench.budget import receive_budget
from ncclep_py.bench.case import Case
from ncclep_py.bench.ht_subject import HTSubject
from ncclep_py.bench.ll_subject import LLSubject
from ncclep_py.bench.staged_subject import StagedSubject

TOY = Case(ranks=2, experts=16, topk=3, hidden=512, tokens=5, sms=2, backend="sim")
SIM = ["bench", "--backend", "sim"]


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


@pytest.mark.parametrize(("changes", "worst", "exact"), [   # experts 0 and 1 are rank 0's, 2 and 3 rank 1's
    ({"layout": "flat"}, 12, 6), ({}, 24, 7), ({"alignment": 8}, 32, 16), ({"alignment": 64}, 2 * 64, 2 * 64),
    ({"tokens": 1, "layout": "flat"}, 2, 2), ({"ranks": 1, "layout": "flat"}, 6, 6), ({"ranks": 1, "alignment": 4}, 24, 12)], ids=str)
def test_the_budget_by_hand_is_what_the_group_is_made_with(changes: dict[str, Any], worst: int, exact: int, tmp_path: pathlib.Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[0, 1], [0, -1], [-1, -1], [0, -1], [2, -1], [-1, -1], [0, 3], [2, 1], [0, -1], [3, -1], [-1, -1], [-1, -1]])
    routings.record(tmp_path / "r.pt", ids, 4)
    case = Case(**{"algorithm": "ht", "ranks": 2, "experts": 4, "topk": 2, "hidden": 64, "tokens": 6, "sms": 2, "backend": "sim",
                   "routing": str(tmp_path / "r.pt")} | changes)
    made: list[int] = []

    class Noted(ht_subject.GroupConfig):
        def __post_init__(self) -> None:
            made.append(self.max_recv_tokens_per_rank)
            super().__post_init__()

    monkeypatch.setattr(ht_subject, "GroupConfig", Noted)
    for kind, rows in (("worst", worst), ("exact", exact)):
        made.clear()
        assert receive_budget(dataclasses.replace(case, budget=kind)) == rows
        assert checked(dataclasses.replace(case, budget=kind)) == [True] * case.ranks and set(made) == {rows}


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


@pytest.mark.parametrize(("kind", "spoil"), [
    ({}, lambda got: got.layout_info.expert_counters.add_(1)), ({"layout": "rank_major"}, lambda got: got.layout_info.src_rank_counters.add_(1)),
    ({"algorithm": "ht", "layout": "flat"}, lambda got: got.layout_info.recv_total_counter.add_(1)),
    ({"algorithm": "ht", "layout": "flat", "topk": 1}, lambda got: got.topk_idx[-1].add_(1)),
    ({"algorithm": "ht", "layout": "flat", "topk": 1}, lambda got: got.topk_weights[-1].add_(1)),
    ({"algorithm": "ht", "alignment": 4}, lambda got: got.tokens[got.layout_info.expert_counts_unpadded[0]].add_(1)),
    ({"algorithm": "ht", "alignment": 4}, lambda got: got.topk_weights[got.layout_info.expert_counts_unpadded[0]:][:1].add_(1))])
def test_wrong_counts_and_pads_are_seen(kind: dict[str, Any], spoil: Any) -> None:
    case = dataclasses.replace(TOY, **kind)

    def program(comm: Any) -> tuple[bool, bool]:
        subject: Any = (LLSubject if case.algorithm == "ll" else HTSubject)(comm, case)
        dispatched = subject.dispatch()
        arrived = functools.partial(ll_arrived, case, subject.everybody, comm.rank)
        if case.algorithm == "ht":
            arrived = functools.partial(ht_arrived, case, subject.everybody, comm.rank, subject.sources)
            assert comm.rank or not case.alignment or int(dispatched.layout_info.expert_counts_unpadded[0]) % 4
        before = arrived(dispatched)
        spoil(dispatched)
        after = arrived(dispatched)
        subject.close()
        return before, after

    with LocalWorld(2, "sim") as world:
        assert world.run(program)[0] == (True, False)


@pytest.mark.parametrize("kind", [{}, {"layout": "rank_major"}, {"algorithm": "ht", "layout": "flat"},
                                  {"algorithm": "ht", "layout": "expert_major"}], ids=str)
def test_tokens_without_experts_are_known(kind: dict[str, Any], tmp_path: pathlib.Path) -> None:
    ids = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(t))[:3] for t in range(10)])
    ids[0], ids[3, 1], ids[7, 2] = -1, -1, -1
    routings.record(tmp_path / "r.pt", ids, 16)
    assert checked(dataclasses.replace(TOY, routing=str(tmp_path / "r.pt"), **kind)) == [True, True]


def test_the_oracle_plays_small_cases_only() -> None:
    assert oracle.is_small(TOY) and oracle.is_small(Case(tokens=8)) and not oracle.is_small(Case(tokens=128))


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


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_halves_and_rows_in_other_places_are_checked(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([*SIM, "--algorithm", "ll", "ht", "--layout", layout, "--tokens", "3", "--ranks", "2", "--staged"]) == 0
    out = capsys.readouterr().out
    assert out.count("ncclep_py staged") == 1 and "WRONG" not in out

    def program(comm: Any) -> list[bool]:
        subject = StagedSubject(comm, dataclasses.replace(TOY, layout=layout))
        right = [subject.check()]
        for action in subject.actions().values():
            action()
        subject.want = subject.want + 1
        right.append(subject.check())
        subject.close()
        return right

    with LocalWorld(2, "sim") as world:
        assert world.run(program) == [[True, False]] * 2
