"""All schedules of two or three ranks with one warp each: the protocol holds in every one, and the search finds what is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from test_mutations import COMBINE_MUTANTS, DISPATCH_MUTANTS, mutant, one_bank
from test_rank_major_mutations import MUTANTS as RANK_MAJOR_MUTANTS

from ncclep_py.config import GroupConfig
from ncclep_py.kernels import ll_combine, ll_dispatch
from ncclep_py.kernels.ll_rank_major_dispatch import make_ll_rank_major_dispatch
from ncclep_py.simulator import RaceError, SimulationError, Simulator
from ncclep_py.simulator import ops as simulated
from ncclep_py.simulator.explore import Exhaustive, Explored, explore
from ncclep_py.simulator.program import Program
from ncclep_py.simulator.rank_major_program import RankMajorProgram

Build = Callable[[Exhaustive], tuple[Simulator, Callable[[], None]]]


def toy(num_ranks: int, text: str, tokens: Sequence[int] = (1, 1, 1), group: type[Program] = Program, **factories: Callable) -> Build:
    """What `explore` builds: a sequence of operations on ranks of one warp."""
    def build(policy: Exhaustive) -> tuple[Simulator, Callable[[], None]]:
        sim = Simulator(num_ranks, policy=policy, blocks=1, warps=1)
        config = GroupConfig(num_experts=num_ranks, max_dispatch_tokens_per_rank=2, hidden=8, num_topk=1, num_slots=2)
        p = group(sim, config, tokens[:num_ranks], **factories)
        p.play(text)
        return sim, p.check

    return build


@pytest.mark.parametrize("num_ranks, text", [(2, "D X C D X C"), (2, "D D X C C"), (2, "D0 D1 X0 C0 D0 X1 C1"), (3, "D C"), (3, "D X C"), (3, "D D")])
def test_every_schedule_is_right(num_ranks: int, text: str) -> None:
    found = explore(toy(num_ranks, text))
    assert found.complete and found.states > 50


@pytest.mark.parametrize("num_ranks, text", [(2, "D X C D X C"), (2, "D D X C C"), (2, "D0 D1 X0 C0 D0 X1 C1"), (3, "D X C")])
def test_every_schedule_of_rank_major_is_right(num_ranks: int, text: str) -> None:
    found = explore(toy(num_ranks, text, group=RankMajorProgram))
    assert found.complete and found.states > 100


@pytest.mark.parametrize("name", ["no wait_heads", "no wait_arrived", "no publish_arrived_rows", "no take_arrived_rows"])
def test_finds_broken_rank_major_dispatch(name: str) -> None:
    red(toy(2, "D X C D X C", group=RankMajorProgram, make_dispatch=mutant(make_ll_rank_major_dispatch, *RANK_MAJOR_MUTANTS[name])))


def test_rank_without_tokens() -> None:
    assert explore(toy(3, "D X C", tokens=(0, 1, 2))).complete


def test_two_rounds_on_three_ranks() -> None:
    """The exploration that found the protocol, on the real kernels."""
    found: Explored = explore(toy(3, "D X C D X C"))
    assert found.complete and found.states > 800


def red(build: Build) -> Exception:
    """The first error of an exploration."""
    with pytest.raises((SimulationError, AssertionError)) as caught:
        explore(build, limit=5000)
    return caught.value


def handed_over(**factories: Callable) -> Build:
    """A row of rank 1's slot belongs to rank 1 in the first round, which pulls it, and to rank 0 in the second, which overwrites it."""
    def build(policy: Exhaustive) -> tuple[Simulator, Callable[[], None]]:
        sim = Simulator(2, policy=policy, blocks=1, warps=1)
        p = Program(sim, GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=2, hidden=8, num_topk=1), (1, 1), **factories)
        first = p.dispatch(topk_idx=[torch.tensor([[-1]]), torch.tensor([[1]])])
        p.experts(first), p.combine(first)
        p.dispatch(topk_idx=[torch.tensor([[1]]), torch.tensor([[-1]])])
        return sim, p.check

    return build


def test_a_row_changes_hands() -> None:
    assert explore(handed_over()).complete
    error = red(handed_over(make_dispatch=mutant(ll_dispatch.make_ll_dispatch, *DISPATCH_MUTANTS["no wait_heads"])))
    assert isinstance(error, RaceError)


@pytest.mark.parametrize("name", ["no wait_arrived", "no publish_head", "no publish_counts", "no advance_epoch"])
def test_finds_broken_dispatch(name: str) -> None:
    red(toy(2, "D X C D X C", make_dispatch=mutant(ll_dispatch.make_ll_dispatch, *DISPATCH_MUTANTS[name])))


def test_finds_broken_combine() -> None:
    red(toy(2, "D X C D X C", make_combine=mutant(ll_combine.make_ll_combine, *COMBINE_MUTANTS["no wait_heads"])))


def test_finds_missing_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_head", one_bank)
    red(toy(2, "D X C D"))


def test_schedule_replays() -> None:
    build = toy(2, "D X C X C")   # writes into the slot that peers still pull
    error = red(build)
    assert isinstance(error, RaceError) and error.schedule is not None
    policy = Exhaustive(error.schedule, set())
    sim, _ = build(policy)
    policy.sim = sim
    with pytest.raises(RaceError) as again:
        sim.run()
    assert again.value.message == error.message
