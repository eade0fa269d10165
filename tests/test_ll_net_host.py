"""LOW_LATENCY over several teams through the public interface, in the simulator: the results of one team, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from ncclep_py import (
    DispatchConfig,
    DispatchQuant,
    EpError,
    EpRefusedError,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
)
from ncclep_py import reference as ref
from ncclep_py.__main__ import main
from ncclep_py.ll_net_group import LLNetGroup
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

CONFIG = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=8, hidden=64, num_topk=2, num_slots=2)


def step(group: Group, handle: Any, number: int, *, plain: bool = False) -> bool:
    """One dispatch and combine with experts that double; whether the bits are the oracle's."""
    rank, count = group.rank, (8 - group.rank + number) % 9
    ids = random_routing(rank, count, 2, 8, seed=number, dropped=0.1)
    tokens, weights = stamped_tokens(rank, count, 64, torch.bfloat16, seed=number), weights_like(ids, seed=number)
    got = handle.dispatch(tokens, topk_idx=ids)
    got.tokens.mul_(2)
    out = handle.combine(got.tokens.clone() if plain else got.tokens, topk_weights=weights)
    group.check()
    return bits_equal(out, ref.moe_layer(tokens, ids, weights, [lambda rows: rows * 2] * 8))


def run(program: Any, team: int, seed: int = 0) -> list[Any]:
    with LocalWorld(4, "sim", team_size=team, seed=seed, mode=("fair", "adversarial")[seed % 2]) as world:
        return world.run(program)


@pytest.mark.parametrize("team", [1, 2])
def test_several_handles_slots_and_plain_tensors(team: int) -> None:
    def program(comm: Any) -> list[bool]:
        with Group.create(comm, CONFIG) as group:
            assert isinstance(group, LLNetGroup)
            first, second = (group.create_handle(Layout.EXPERT_MAJOR, num_topk=2) for _ in range(2))
            return [step(group, handle, n, plain=n % 3 == 2) for n, handle in enumerate((first, second, first, first, second))]

    for seed in range(3):
        assert run(program, team, seed) == [[True] * 5] * 4


def test_a_wrong_call_on_one_rank_is_refused_on_all_teams_and_the_next_is_right() -> None:
    def program(comm: Any) -> tuple[str, bool]:
        with Group.create(comm, CONFIG) as group, group.create_handle(Layout.EXPERT_MAJOR, num_topk=2) as handle:
            tokens = torch.zeros(3, 64, dtype=torch.float16 if comm.rank == 1 else torch.bfloat16)
            with pytest.raises((TypeError, EpRefusedError)) as told:
                handle.dispatch(tokens, topk_idx=torch.zeros(3, 2, dtype=torch.int64))
            group.check()
            return type(told.value).__name__, step(group, handle, 1)

    assert run(program, 2) == [("TypeError" if r == 1 else "EpRefusedError", True) for r in range(4)]


def test_combine_without_a_dispatch_is_refused_on_all() -> None:
    def program(comm: Any) -> bool:
        with Group.create(comm, CONFIG) as group, group.create_handle(Layout.EXPERT_MAJOR, num_topk=2) as handle:
            with pytest.raises(EpError, match="combine needs a dispatch of this handle before it"):
                handle.combine(torch.zeros(2, 32, 64, dtype=torch.bfloat16), topk_weights=torch.zeros(0, 2))
            group.check()
            return step(group, handle, 0)

    assert run(program, 2) == [True] * 4


def test_epochs_wrap_and_stale_messages_are_none() -> None:
    def program(comm: Any) -> list[bool]:
        with Group.create(comm, CONFIG) as group, group.create_handle(Layout.EXPERT_MAJOR, num_topk=2) as handle:
            right = [step(group, handle, n) for n in range(2)]
            comm.barrier()
            group.start_at(2**32 - 3)
            comm.barrier()
            return right + [step(group, handle, n) for n in range(4)]

    assert run(program, 2) == [[True] * 6] * 4


@pytest.mark.parametrize(("changes", "said"), [({"enable_mask": True}, "enable_mask"), ({"num_staging_slots": 2}, "num_staging_slots"),
                                                ({"slot_layout": Layout.RANK_MAJOR}, "slot_layout RANK_MAJOR")])
def test_groups_that_are_not_built_are_refused(changes: dict[str, Any], said: str) -> None:
    def program(comm: Any) -> str:
        with pytest.raises(NotImplementedError, match=f"{said} is not built yet for ranks in several teams") as told:
            Group.create(comm, dataclasses.replace(CONFIG, **changes))
        return str(told.value)

    assert len(set(run(program, 2))) == 1


def test_calls_that_are_not_built_are_refused_and_the_next_is_right() -> None:
    def program(comm: Any) -> bool:
        with Group.create(comm, CONFIG) as group, group.create_handle(Layout.EXPERT_MAJOR, num_topk=2) as handle:
            with pytest.raises(NotImplementedError, match="layout RANK_MAJOR is not built yet"):
                group.create_handle(Layout.RANK_MAJOR, num_topk=2)
            with pytest.raises(NotImplementedError, match="create_window is not built yet"):
                group.create_window(1024)
            with pytest.raises(NotImplementedError, match="quant_recipe DS_FP8E3M4 is not built yet"):
                handle.dispatch(torch.zeros(2, 64, dtype=torch.bfloat16), topk_idx=torch.zeros(2, 2, dtype=torch.int64),
                                config=DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4))
            group.check()
            return step(group, handle, 0)

    assert run(program, 2) == [True] * 4


def test_team_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="all teams must be of equal size"):
        LocalWorld(4, "sim", team_size=3)
    with pytest.raises(ValueError, match="team_size must be at most num_ranks = 4, got 8"):
        LocalWorld(4, "sim", team_size=8)


def test_the_demo_runs_over_teams(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--backend", "sim", "--team", "2", "--tokens", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verified"] and told["bitwise_equal_to_reference"]
