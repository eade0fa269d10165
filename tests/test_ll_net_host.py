"""LOW_LATENCY over several teams through the public interface, in the simulator: the results of one team, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from ncclep_py import (
    DispatchInputs,
    EpError,
    EpRefusedError,
    ExpertIdKind,
    Group,
    GroupConfig,
    Layout,
    LayoutInfo,
    LocalWorld,
)
from ncclep_py import reference as ref
from ncclep_py.__main__ import main
from ncclep_py.ll_net_group import LLNetGroup
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

CONFIG = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=8, hidden=64, num_topk=2, num_slots=2)


def step(group: Group, handle: Any, number: int, *, plain: bool = False) -> bool:
    """One dispatch and combine with experts that double; whether the bits are the oracle's."""
    if handle.layout is Layout.RANK_MAJOR:
        return rank_step(group, handle, number, plain=plain)
    tokens, ids, weights = inputs(group.rank, number)
    got = handle.dispatch(tokens, topk_idx=ids)
    got.tokens.mul_(2)
    out = handle.combine(got.tokens.clone() if plain else got.tokens, topk_weights=weights)
    group.check()
    return bits_equal(out, ref.moe_layer(tokens, ids, weights, [lambda rows: rows * 2] * 8))


def inputs(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids and weights of a rank."""
    count = (8 - rank + number) % 9
    ids = random_routing(rank, count, 2, 8, seed=number, dropped=0.1)
    return stamped_tokens(rank, count, 64, torch.bfloat16, seed=number), ids, weights_like(ids, seed=number)


def rank_step(group: Group, handle: Any, number: int, *, plain: bool) -> bool:
    """The same of RANK_MAJOR: everything that arrives, and rows that come back doubled once for each rank they went to."""
    tokens, ids, weights = zip(*(inputs(rank, number) for rank in range(group.num_ranks)), strict=True)
    mine, globally = group.rank, number % 2 == 0
    received = ref.ll_rank_major_dispatch(tokens, ids, weights, num_experts=8, max_dispatch_tokens_per_rank=8, global_ids=globally)
    given = DispatchInputs(tokens[mine], weights[mine])
    kind = LayoutInfo(recv_topk_idx_kind=ExpertIdKind.GLOBAL if globally else ExpertIdKind.AUTO)
    got, want = handle.dispatch(given, topk_idx=ids[mine], layout_info=kind), received[mine]
    right = torch.equal(got.layout_info.src_rank_counters, want.src_rank_counters) and torch.equal(got.topk_idx, want.topk_idx)
    for source, n in enumerate(want.src_rank_counters.tolist()):
        right &= bits_equal(got.tokens[source, :n], want.tokens[source, :n])
        right &= bits_equal(got.topk_weights[source, :n], want.topk_weights[source, :n])
    got.tokens.mul_(2)
    out = handle.combine(got.tokens.clone() if plain else got.tokens)
    group.check()
    return right and bits_equal(out, ref.ll_rank_major_combine([r.tokens * 2 for r in received], [r.rows for r in received])[mine])


def run(program: Any, team: int, seed: int = 0) -> list[Any]:
    with LocalWorld(4, "sim", team_size=team, seed=seed, mode=("fair", "adversarial")[seed % 2]) as world:
        return world.run(program)


LAYOUTS = (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR)


@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("layouts", [LAYOUTS, LAYOUTS[::-1], LAYOUTS[:1] * 2, LAYOUTS[1:] * 2], ids=["ER", "RE", "EE", "RR"])
def test_several_handles_slots_and_plain_tensors(team: int, layouts: tuple[Layout, Layout]) -> None:
    """Also of both layouts in turn: messages of one are no messages of the other."""
    config = CONFIG if len(set(layouts)) > 1 else dataclasses.replace(CONFIG, slot_layout=layouts[0])

    def program(comm: Any) -> list[bool]:
        with Group.create(comm, config) as group:
            assert isinstance(group, LLNetGroup)
            first, second = (group.create_handle(layout, num_topk=2) for layout in layouts)
            return [step(group, handle, n, plain=n % 3 == 2) for n, handle in enumerate((first, second, first, first, second))]

    for seed in range(3):
        assert run(program, team, seed) == [[True] * 5] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_call_on_one_rank_is_refused_on_all_teams_and_the_next_is_right(layout: Layout) -> None:
    def program(comm: Any) -> tuple[str, bool]:
        with Group.create(comm, CONFIG) as group, group.create_handle(layout, num_topk=2) as handle:
            tokens = torch.zeros(3, 64, dtype=torch.float16 if comm.rank == 1 else torch.bfloat16)
            with pytest.raises((TypeError, EpRefusedError)) as told:
                handle.dispatch(tokens, topk_idx=torch.zeros(3, 2, dtype=torch.int64),
                                topk_weights=torch.zeros(3, 2) if layout is Layout.RANK_MAJOR else None)
            group.check()
            return type(told.value).__name__, step(group, handle, 1)

    assert run(program, 2) == [("TypeError" if r == 1 else "EpRefusedError", True) for r in range(4)]


def test_errors_name_ranks_that_the_network_reaches_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: Any) -> str:
        with Group.create(comm, CONFIG) as group, group.create_handle(Layout.EXPERT_MAJOR, num_topk=2) as handle:
            if comm.rank == 0:
                monkeypatch.setattr(group.network, "lost", lambda: [2, 3])
            with pytest.raises((TypeError, EpRefusedError)) as told:
                handle.dispatch(torch.zeros(3, 64, dtype=torch.float16 if comm.rank == 1 else torch.bfloat16),
                                topk_idx=torch.zeros(3, 2, dtype=torch.int64))
                group.check()
            return str(told.value)

    notes = ["; the network to rank 2, 3 stood still" in text for text in run(program, 2)]
    assert notes == [True, False, False, False]


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


def test_team_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="all teams must be of equal size"):
        LocalWorld(4, "sim", team_size=3)
    with pytest.raises(ValueError, match="team_size must be at most num_ranks = 4, got 8"):
        LocalWorld(4, "sim", team_size=8)


def test_the_demo_runs_over_teams(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--backend", "sim", "--team", "2", "--tokens", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verified"] and told["bitwise_equal_to_reference"]
