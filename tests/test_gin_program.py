"""The program of the GPU tests over several teams, run in the simulator: its cases are right, and notice what is wrong."""

import gin_program
import pytest
import torch

from ncclep_py import Group, LocalWorld
from ncclep_py.simulator import Faults
from ncclep_py.simulator.network import Network
from ncclep_py.topology import Topology

SIMULATED = ["ll_rank_major", "ll_recipes", "ll_staged", "ll_windows", "ht_expert_major_drop", "own"]   # the others run below, or with two teams


@pytest.mark.parametrize("scenario", SIMULATED)
def test_one_team(scenario):
    assert scenario in gin_program.SCENARIOS
    with LocalWorld(4, "sim") as world:
        world.run(gin_program.program_of(scenario, 4, 4))


@pytest.mark.parametrize("scenario", ["ll_expert_major", "ll_rank_major", "ll_recipes", "ll_staged", "ll_windows", "ht_flat", "own"])
def test_two_teams(scenario):
    with LocalWorld(4, "sim", team_size=2) as world:
        assert world.communicators[0].topology == Topology(4, 2)
        world.run(gin_program.program_of(scenario, 4, 2))


@pytest.mark.parametrize("scenario, operations", [("ll_expert_major", 2), ("ht_expert_major", 4)])
def test_the_cases_again(monkeypatch, scenario, operations):
    """Three cases three times on each of four ranks, every operation waited for."""
    settle, waited = gin_program.settle, []
    monkeypatch.setattr(gin_program, "settle", lambda *given: (waited.append(1), settle(*given)))
    with LocalWorld(4, "sim", team_size=2) as world:
        world.run(gin_program.program_of(scenario, 4, 2, rounds=3))
    assert len(waited) == 3 * 3 * operations * 4


@pytest.mark.parametrize("config, layout", [*((gin_program.LOW, layout) for layout in gin_program.LL_LAYOUTS.values()),
                                            *((config, layout) for layout, config in gin_program.BUDGETED.items())])
def test_what_graphs_are_compared_with(config, layout):
    """A pair that is not captured gives what a captured one must."""
    given = gin_program.pair_inputs(config, 4, 3)
    want = gin_program.replayed(config, layout, 2, *given)

    def program(comm):
        with Group.create(comm, config) as group:
            ids, tokens, weights = (of_ranks[comm.rank] for of_ranks in given)
            out = gin_program.pair(group, gin_program.pair_handle(group, layout), layout, tokens, ids, weights)
            gin_program.equal(out, want[comm.rank], f"rank {comm.rank}")
            return int(out.abs().sum() > 0)

    with LocalWorld(4, "sim", team_size=2) as world:
        assert world.run(program) == [1] * 4


@pytest.mark.parametrize("team", [1, 2, 4])
def test_masks(team):
    more = {"team_size": team} if team < 4 else {}
    with LocalWorld(4, "sim", faults=Faults(timeouts=True, bounded=True), **more) as world:
        world.run(gin_program.program_of("ll_masked", 4, team))


@pytest.mark.parametrize("after", [0, 15, 40, 100, 101, 300])
@pytest.mark.parametrize("team", [1, 2])
def test_a_network_that_falls_silent(monkeypatch, team, after):
    """As the loopback plugin has it: what rank 1 puts and gets vanishes."""
    issue = Network._issue

    def cut(self, task, peer, *given, **more):
        after_these[0] -= 1
        if after_these[0] < 0:
            self.lost |= {pair for other in range(4) if other // team != 1 // team for pair in ((1, other), (other, 1))}
        issue(self, task, peer, *given, **more)

    monkeypatch.setattr(Network, "_issue", cut)
    monkeypatch.setenv("LOOPBACK_LOSE_RANK", "1")
    after_these = [after]
    with LocalWorld(4, "sim", faults=Faults(timeouts=True, bounded=True), team_size=team) as world:
        world.run(gin_program.program_of("ll_masked_lost", 4, team))


@pytest.mark.parametrize("scenario", ["ll_expert_major", "ll_rank_major", "ht_flat"])
def test_a_wrong_bit_is_seen(monkeypatch, scenario):
    """One bit of one combined row differs: the program must say where."""
    module = gin_program.ref
    name = f"{scenario}_combine"
    made = getattr(module, name)

    def wrong(*arguments, **named):
        out = made(*arguments, **named)
        first = next(t for t in (getattr(o, "tokens", o) for o in out) if len(t))
        first.view(torch.int16)[0, 5] ^= 1
        return out

    monkeypatch.setattr(module, name, wrong)
    with LocalWorld(4, "sim") as world, pytest.raises(AssertionError, match="1 of .* differ, first at .0, 5."):
        world.run(gin_program.program_of(scenario, 4, 4))
