"""HIGH_THROUGHPUT over several teams as users call it, in the simulator: groups, handles, recipes, refusals, autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ncclep_py import (
    Algorithm,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    Communicator,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    EpRefusedError,
    Group,
    GroupConfig,
    HandleConfig,
    Layout,
    LocalWorld,
    PassDir,
)
from ncclep_py import reference as ref
from ncclep_py.autograd import ep_combine, ep_dispatch
from ncclep_py.ht_net_group import HTNetGroup

TOKENS, K, EXPERTS, HIDDEN = (5, 0, 3, 4), 3, 8, 16
LAYOUTS = (Layout.FLAT, Layout.EXPERT_MAJOR)
BWD = PassDir.BWD


def group_config(**more: Any) -> GroupConfig:
    return GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=5, hidden=HIDDEN, num_topk=K, algorithm=Algorithm.HIGH_THROUGHPUT,
                       num_slots=2, **more)


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, rows and weights of a rank."""
    g = torch.Generator().manual_seed(rank)
    t = TOKENS[rank]
    return torch.randint(-1, EXPERTS, (t, K), generator=g), torch.randn(t, HIDDEN, generator=g).bfloat16(), torch.rand(t, K, generator=g)


INPUTS = [inputs(r) for r in range(4)]


def oracle(layout: Layout, alignment: int = 0, budget: int | None = None) -> Any:
    ids = [i[0] for i in INPUTS]
    if layout is Layout.FLAT:
        return ref.ht_flat_map(ids, num_experts=EXPERTS, max_recv_tokens_per_rank=budget)
    return ref.ht_expert_major_map(ids, num_experts=EXPERTS, alignment=alignment, max_recv_tokens_per_rank=budget)


def combined(layout: Layout, plan: Any, rows: list[torch.Tensor], grads: list[torch.Tensor] | None, team: int) -> list[ref.HTCombine]:
    return (ref.ht_flat_combine if layout is Layout.FLAT else ref.ht_expert_major_combine)(plan, rows, grads, team_size=team)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("plain", [False, True])
def test_forward_and_backward(plain: bool, team: int, layout: Layout) -> None:
    """With an automatic budget, rows in the window or in plain tensors, gradients of weights included; also for a rank without tokens."""
    def program(comm: Communicator) -> tuple:
        ids, x, w = INPUTS[comm.rank]
        with Group.create(comm, group_config()) as group:
            assert isinstance(group, HTNetGroup)
            handle = group.create_handle(layout, ids, config=HandleConfig(4 if layout is Layout.EXPERT_MAJOR else 0))
            n = int(handle.layout_info.recv_total_counter[0])   # type: ignore[index,union-attr]
            out = DispatchOutputs(torch.zeros(n, HIDDEN, dtype=torch.bfloat16)) if plain else None
            got = handle.dispatch(x, out, topk_weights=w)
            rows, weights = got.tokens[:n].clone(), got.topk_weights[:n].clone()   # type: ignore[index]
            y = handle.combine(got.tokens)
            back = handle.dispatch(x * 2, config=DispatchConfig(pass_direction=BWD))
            result = CombineOutputs()
            z = handle.combine(CombineInputs(back.tokens[:n].clone(), topk_weights=weights), result, CombineConfig(pass_direction=BWD))   # type: ignore[index]
            group.check()
            return rows, weights, y, z, result.topk_weights

    with LocalWorld(4, "sim", team_size=team, seed=team) as world:
        results = world.run(program)
    alignment = 4 if layout is Layout.EXPERT_MAJOR else 0
    plan = oracle(layout, alignment)
    make = ref.ht_flat_dispatch if layout is Layout.FLAT else ref.ht_expert_major_dispatch
    forward = make(plan, [i[1] for i in INPUTS], [i[2] for i in INPUTS])
    backward = make(plan, [i[1] * 2 for i in INPUTS])
    y = combined(layout, plan, [d.tokens for d in forward], None, team)
    z = combined(layout, plan, [d.tokens for d in backward], [d.topk_weights for d in forward], team)   # type: ignore[misc]
    for r, (rows, weights, got_y, got_z, grads) in enumerate(results):
        assert torch.equal(rows, forward[r].tokens)
        assert torch.equal(weights, forward[r].topk_weights[:len(weights)])   # type: ignore[index]
        assert torch.equal(got_y, y[r].tokens)
        assert torch.equal(got_z, z[r].tokens)
        assert torch.equal(grads, z[r].topk_weights)   # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_scales_of_a_recipe(layout: Layout) -> None:
    def program(comm: Communicator) -> tuple:
        ids, _, w = INPUTS[comm.rank]
        g = torch.Generator().manual_seed(comm.rank + 10)
        x, s = (torch.randint(0, 255, (len(ids), n), generator=g).to(torch.uint8) for n in (32, 16))
        with Group.create(comm, group_config(max_recv_tokens_per_rank=20, max_token_bytes=64)) as group:
            handle = group.create_handle(layout, ids)
            got = handle.dispatch(DispatchInputs(x, topk_weights=w, scales=s), config=DispatchConfig(quant_recipe=DispatchQuant.FWD))
            group.check()
            return x, s, got.tokens.clone(), got.scales.clone()   # type: ignore[union-attr]

    with LocalWorld(4, "sim", team_size=2) as world:
        results = world.run(program)
    make = ref.ht_flat_dispatch if layout is Layout.FLAT else ref.ht_expert_major_dispatch
    plan = oracle(layout, budget=20)
    expected = make(plan, [r[0] for r in results], [i[2] for i in INPUTS], scales=[r[1] for r in results])
    for r, (_, _, rows, scales) in enumerate(results):
        n = len(plan.row_src[r])
        assert torch.equal(rows[:n], expected[r].tokens[:n])
        assert torch.equal(scales[:n], expected[r].scales[:n])   # type: ignore[index]


def test_a_call_that_is_wrong_on_one_rank_is_refused_on_all_and_the_next_good_call_is_right() -> None:
    def program(comm: Communicator) -> list[str]:
        ids, x, w = INPUTS[comm.rank]
        told = []
        with Group.create(comm, group_config()) as group:
            handle = group.create_handle(Layout.FLAT, ids)
            try:
                handle.dispatch(x.float() if comm.rank == 2 else x, topk_weights=w)
                group.check()
            except (TypeError, ValueError, EpRefusedError) as error:
                told.append(f"{type(error).__name__}: {error}")
            got = handle.dispatch(x, topk_weights=w)
            y = handle.combine(got.tokens)
            group.check()
            told.append(str(y.shape[0]))
        return told

    with LocalWorld(4, "sim", team_size=2) as world:
        results = world.run(program)
    assert [r[-1] for r in results] == [str(t) for t in TOKENS]
    assert results[2][0].startswith("TypeError")
    assert all(r[0].startswith("EpRefusedError") and "rank 2" in r[0] for i, r in enumerate(results) if i != 2)


def test_two_groups_of_one_world_have_signals_of_their_own() -> None:
    def program(comm: Communicator) -> int:
        ids, x, w = INPUTS[comm.rank]
        with Group.create(comm, group_config()) as one, Group.create(comm, group_config()) as two:
            for group in (one, two, one):
                handle = group.create_handle(Layout.FLAT, ids)
                got = handle.dispatch(x, topk_weights=w)
                handle.combine(got.tokens)
                group.check()
                handle.close()
        return 1

    with LocalWorld(4, "sim", team_size=2, mode="adversarial") as world:
        assert world.run(program) == [1] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autograd_is_the_same_as_in_one_team(layout: Layout) -> None:
    """All sums are exact, so rounding once more for each team changes nothing."""
    def program(comm: Communicator) -> tuple:
        ids, x, w = INPUTS[comm.rank]
        x, w = (x.float() * 8).round().requires_grad_(), (w * 4).round().requires_grad_()
        with Group.create(comm, group_config(dtype=torch.float32, max_recv_tokens_per_rank=40)) as group:
            handle = group.create_handle(layout, ids)
            got = ep_dispatch(handle, x, w)
            y = ep_combine(handle, got.tokens * 2)
            (y.sum() + got.topk_weights.sum() * 3).backward()
            group.check()
            return y.detach(), x.grad, w.grad

    results = []
    for team in (4, 2, 1):
        with LocalWorld(4, "sim", team_size=team, threads=True) as world:
            results.append(world.run(program))
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))


def test_teams_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match="all teams must be of equal size: 4 ranks in teams of 3"):
        LocalWorld(4, "sim", team_size=3)
