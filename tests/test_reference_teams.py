"""The oracle's HIGH_THROUGHPUT combine over several teams against hand-worked sums."""

from __future__ import annotations

import pytest
import torch

from ncclep_py import reference as ref

BIG = 2.0**24   # fp32 holds BIG + 1 as BIG


def combine(layout: str, ids: list[list[list[int]]], rows: list[list[float]], experts: int, dtype: torch.dtype, team_size: int | None) -> list[float]:
    """First element of each rank's first combined token."""
    topk_idx = [torch.tensor(i, dtype=torch.int64).reshape(-1, len(ids[0][0])) for i in ids]
    routing = (ref.ht_flat_map if layout == "flat" else ref.ht_expert_major_map)(topk_idx, num_experts=experts)
    back = [torch.tensor(r, dtype=dtype).reshape(-1, 1) for r in rows]
    made = (ref.ht_flat_combine if layout == "flat" else ref.ht_expert_major_combine)(routing, back, team_size=team_size)   # type: ignore[arg-type]
    return [m.tokens[0, 0].item() for m in made]


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
def test_a_remote_team_rounds_its_sum_once_before_it_is_sent(layout: str) -> None:
    """One token per rank with all four experts. bf16 steps by 2 from 256 on: ranks 2 and 3 send 256 + 1 = 257, which becomes 256."""
    every, rows = [[0, 1, 2, 3]], [[1.0] * 4, [0.0] * 4, [256.0] * 4, [1.0] * 4]
    ids = [every] * 4
    assert combine(layout, ids, rows, 4, torch.bfloat16, None) == [258.0] * 4   # 1 + 0 + 256 + 1
    assert combine(layout, ids, rows, 4, torch.bfloat16, 4) == [258.0] * 4
    # ranks 0 and 1: 1 + 0, then 256 = 257, which rounds to the even 256; ranks 2 and 3: 256 + 1 unrounded, then 1 = 258
    assert combine(layout, ids, rows, 4, torch.bfloat16, 2) == [256.0, 256.0, 258.0, 258.0]
    assert combine(layout, ids, rows, 4, torch.float32, 2) == [258.0] * 4


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
def test_teams_come_own_first_and_then_downwards(layout: str) -> None:
    """Three teams of one. Rank 1: BIG + 1 (rank 0) = BIG, - BIG (rank 2) = 0; rank 0: 1 - BIG + BIG = 1; rank 2: -BIG + BIG + 1 = 1."""
    rows = [[1.0] * 3, [BIG] * 3, [-BIG] * 3]
    assert combine(layout, [[[0, 1, 2]]] * 3, rows, 3, torch.float32, 1) == [1.0, 0.0, 1.0]
    assert combine(layout, [[[0, 1, 2]]] * 3, rows, 3, torch.float32, None) == [0.0] * 3   # ((1 + BIG) - BIG) in one team


def test_rows_of_a_remote_team_add_up_by_rank_and_expert_and_absent_teams_send_nothing() -> None:
    """Rank 0's token has experts 7, 4 and 5 of ranks 3, 2, 2 (two each): ((0 + BIG) + 1) - BIG = 0 in their team, in ascending expert order."""
    ids = [[[7, 4, 5]], [[-1, -1, -1]], [[-1, -1, -1]], [[-1, -1, -1]]]
    assert combine("expert_major", ids, [[], [], [BIG, 1.0], [-BIG]], 8, torch.float32, 2) == [0.0] * 4


def test_gradients_of_weights_do_not_depend_on_teams() -> None:
    routing = ref.ht_flat_map([torch.tensor([[0, 3]]), torch.tensor([[1, 2]])], num_experts=4)
    rows, grads = [torch.ones(2, 1)] * 2, [torch.arange(4.0).reshape(2, 2), torch.arange(4.0, 8).reshape(2, 2)]
    one, two = (ref.ht_flat_combine(routing, rows, grads, team_size=size) for size in (2, 1))
    assert [torch.equal(a.topk_weights, b.topk_weights) for a, b in zip(one, two, strict=True)] == [True, True]   # type: ignore[arg-type]


def test_teams_must_be_equal() -> None:
    routing = ref.ht_flat_map([torch.tensor([[0, 1]])] * 3, num_experts=3)
    with pytest.raises(ValueError, match="team_size must divide the ranks: got 2 for 3 ranks"):
        ref.ht_flat_combine(routing, [torch.ones(3, 1)] * 3, team_size=2)
