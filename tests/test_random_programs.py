"""Random host programs in the simulator: several handles of both layouts, fused and staged pairs, wrong calls on one rank, every row checked.

Values are chosen so that every sum is exact: small integers, weights and experts that are powers of two, float32 rows.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from ncclep_py import (
    CombineConfig,
    DispatchConfig,
    DispatchOutputs,
    EpError,
    EpRefusedError,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
)

SEEDS = 48
WRONG = ("dtype", "shape", "strides", "tokens", "nothing", "too many", "config", "ids", "layout_info", "weights")


@dataclasses.dataclass
class Plan:
    """What a seed decides."""

    seed: int
    team_size: int = 0

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.ranks, self.local = draw.choice((1, 2, 2, 3, 4)), draw.choice((1, 2, 3))
        if self.team_size:
            self.ranks = self.team_size * draw.choice((2, 2, 3) if self.team_size == 1 else (2,))
        self.experts = self.ranks * self.local
        self.topk, self.capacity = min(draw.choice((1, 2, 4)), self.experts), draw.choice((1, 3, 6))
        self.hidden, self.slots, self.staging = draw.choice((4, 8, 20, 64)), draw.choice((1, 2, 3)), draw.choice((0, 0, 2, 4))
        self.handles = [(draw.choice((Layout.EXPERT_MAJOR, Layout.RANK_MAJOR)), draw.randint(1, self.topk), draw.choice((torch.int32, torch.int64)))
                        for _ in range(draw.randint(1, 3))]
        self.steps = [(draw.choice(("dispatch", "combine", "wrong dispatch", "wrong combine", "pair")), draw.randrange(len(self.handles)),
                       draw.randrange(self.ranks), draw.choice(WRONG), draw.random() < 0.5 and self.staging > 0) for _ in range(draw.randint(6, 16))]
        self.counts = [[draw.randint(0, self.capacity) for _ in range(self.ranks)] for _ in self.steps]

    def inputs(self, step: int, rank: int, handle: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, ids and weights of a rank in a step."""
        _, topk, dtype = self.handles[handle]
        draw, count = torch.Generator().manual_seed(self.seed * 100_003 + step * 101 + rank), self.counts[step][rank]
        ids = torch.rand(count, self.experts, generator=draw).argsort(1)[:, :topk].clone()
        ids[torch.rand(count, topk, generator=draw) < 0.15] = -1
        return (torch.randint(-8, 9, (count, self.hidden), generator=draw).float(), ids.to(dtype),
                2.0 ** torch.randint(-2, 1, (count, topk), generator=draw).float())


class Rank:
    """One rank's part of a program."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self.plan, self.group, self.rank = plan, group, group.rank
        self.handles = [group.create_handle(layout, num_topk=topk, idx_dtype=dtype) for layout, topk, dtype in plan.handles]
        self.held: dict[int, tuple[int, DispatchOutputs]] = {}   # dispatched and not combined: step and rows
        self.ever: set[int] = set()

    def play(self) -> None:
        for step, (kind, handle, who, wrong, staged) in enumerate(self.plan.steps):
            wrong = wrong if who == self.rank else ""
            if kind in ("dispatch", "pair"):
                self.dispatch(step, handle, staged)
            if kind in ("combine", "pair"):
                self.combine(handle, staged)
            if kind == "wrong dispatch":
                self.wrong_dispatch(step, handle, wrong, staged)
            if kind == "wrong combine" and handle in self.held:
                self.wrong_combine(handle, wrong)
                self.combine(handle, staged)
        for handle in self.handles:
            handle.close()

    def dispatch(self, step: int, handle: int, staged: bool) -> None:
        tokens, ids, weights = self.plan.inputs(step, self.rank, handle)
        rank_major = self.plan.handles[handle][0] is Layout.RANK_MAJOR
        try:
            got = self.handles[handle].dispatch(tokens, topk_idx=ids, topk_weights=weights if rank_major else None,
                                                config=DispatchConfig(send_only=staged))
        except EpError as e:
            assert "slots hold dispatches" in str(e)
            self.group.check()
            return
        self.handles[handle].complete()
        self.group.check()
        (self.check_rank_major if rank_major else self.check_expert_major)(step, handle, got)
        self.held[handle] = step, got
        self.ever.add(handle)

    def check_expert_major(self, step: int, handle: int, got: DispatchOutputs) -> None:
        """Rows in (source, token, k) order; then the experts work on them."""
        for local in range(self.plan.local):
            expert, rows = self.rank * self.plan.local + local, []
            for source in range(self.plan.ranks):
                tokens, ids, _ = self.plan.inputs(step, source, handle)
                rows += [tokens[t] for t, _ in (ids == expert).nonzero().tolist()]
            assert got.layout_info.expert_counters[local] == len(rows)
            assert torch.equal(got.tokens[local, :len(rows)], torch.stack(rows) if rows else got.tokens[local, :0])
            got.tokens[local].mul_(2.0 ** (expert % 3))

    def check_rank_major(self, step: int, handle: int, got: DispatchOutputs) -> None:
        """Rows in token order with their ids and weights; then the experts work on them."""
        first = self.rank * self.plan.local
        for source in range(self.plan.ranks):
            tokens, ids, weights = self.plan.inputs(step, source, handle)
            mine = (ids >= first) & (ids < first + self.plan.local)
            hit = mine.any(1)
            count, local_ids = int(hit.sum()), torch.where(mine, ids - first, -1)[hit]
            assert got.layout_info.src_rank_counters[source] == count
            assert torch.equal(got.tokens[source, :count], tokens[hit])
            assert torch.equal(got.topk_idx[source, :count].to(ids.dtype), local_ids)
            assert torch.equal(got.topk_weights[source, :count], weights[hit])
            factor = torch.where(mine, weights * 2.0 ** (ids % 3).float(), 0.0)[hit].sum(1, keepdim=True)
            got.tokens[source, :count] *= factor

    def combine(self, handle: int, staged: bool) -> None:
        plan, rank_major = self.plan, self.plan.handles[handle][0] is Layout.RANK_MAJOR
        if handle not in self.held:
            if handle not in self.ever:
                self.combine_of_nothing(handle)
            return
        step, got = self.held.pop(handle)
        tokens, ids, weights = plan.inputs(step, self.rank, handle)
        try:
            combined = self.handles[handle].combine(got.tokens, topk_weights=None if rank_major else weights, config=CombineConfig(send_only=staged))
        except EpError as e:   # a refused dispatch went to another slot, or another handle has this one
            assert "combine needs a dispatch of this handle" in str(e)
            self.group.check()
            return
        self.handles[handle].complete()
        self.group.check()
        factor = torch.where(ids >= 0, weights * 2.0 ** (ids % 3).float(), 0.0).sum(1, keepdim=True)
        assert torch.equal(combined, tokens * factor)

    def combine_of_nothing(self, handle: int) -> None:
        """A right shape, and still no dispatch that went through."""
        plan = self.plan
        shape = (plan.ranks, plan.capacity) if plan.handles[handle][0] is Layout.RANK_MAJOR else (plan.local, plan.ranks * plan.capacity)
        with pytest.raises(EpError, match="combine needs a dispatch of this handle before it"):
            self.handles[handle].combine(torch.zeros(*shape, plan.hidden), topk_weights=torch.zeros(0, plan.handles[handle][1]))
        self.group.check()

    def wrong_dispatch(self, step: int, handle: int, wrong: str, staged: bool) -> None:
        plan = self.plan
        tokens: Any
        ids: Any
        tokens, ids, weights = plan.inputs(step, self.rank, handle)
        count, topk = ids.shape
        more: dict[str, Any] = {"topk_weights": weights} if plan.handles[handle][0] is Layout.RANK_MAJOR else {}
        more["config"] = "fast" if wrong == "config" else DispatchConfig(send_only=staged)
        tokens = {"dtype": tokens.half(), "shape": torch.zeros(count, plan.hidden + 4),
                  "strides": torch.zeros(plan.hidden, count + 2).t()[:count + 2], "tokens": torch.zeros(count + 1, plan.hidden), "nothing": None,
                  "too many": torch.zeros(plan.capacity + 1, plan.hidden)}.get(wrong, tokens)
        ids = torch.zeros(plan.capacity + 1, topk, dtype=ids.dtype) if wrong == "too many" else ids.float() if wrong == "ids" else ids
        if wrong == "layout_info":
            more["layout_info"] = 3
        if wrong == "weights":
            more["topk_weights"] = torch.zeros(count + 2, topk)
        self.is_refused(wrong, lambda: self.handles[handle].dispatch(tokens, topk_idx=ids, **more))

    def wrong_combine(self, handle: int, wrong: str) -> None:
        plan, (step, got) = self.plan, self.held[handle]
        _, ids, weights = plan.inputs(step, self.rank, handle)
        rank_major = plan.handles[handle][0] is Layout.RANK_MAJOR
        more: dict[str, Any] = {} if rank_major else {"topk_weights": weights}
        tokens: Any = {"": got.tokens, "dtype": got.tokens.half(), "shape": torch.zeros(1, 2, 3)}.get(wrong)
        if wrong in ("config", "layout_info"):
            tokens, more["config" if wrong == "config" else "outputs"] = got.tokens, 4
        if wrong == "weights" and not rank_major:
            tokens, more["topk_weights"] = got.tokens, torch.zeros(len(ids) + 1, ids.shape[1])
        self.is_refused(wrong, lambda: self.handles[handle].combine(tokens, **more))

    def is_refused(self, wrong: str, call: Any) -> None:
        """Who called wrongly hears why, everybody else of the refusal; nobody hears more of it later."""
        with pytest.raises((EpError, TypeError, ValueError)) as told:
            call()
        everywhere = any(text in str(told.value) for text in ("slots hold dispatches", "combine needs a dispatch of this handle"))
        assert everywhere or isinstance(told.value, (TypeError, ValueError) if wrong else EpRefusedError), told.value
        self.group.check()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_program_gets_every_row_or_the_right_sentence(seed: int) -> None:
    play(Plan(seed))


@pytest.mark.parametrize("seed", range(24))
def test_over_several_teams_too(seed: int) -> None:
    play(Plan(seed, 1 + seed % 2))


def play(plan: Plan) -> None:
    seed = plan.seed
    config = GroupConfig(num_experts=plan.experts, max_dispatch_tokens_per_rank=plan.capacity, hidden=plan.hidden, num_topk=plan.topk,
                         dtype=torch.float32, num_slots=plan.slots, num_staging_slots=plan.staging)

    def program(comm: Any) -> bool:
        with Group.create(comm, config) as group:
            Rank(plan, group).play()
        return True

    mode = "adversarial" if plan.team_size or seed % 2 else "fair"
    with LocalWorld(plan.ranks, "sim", team_size=plan.team_size, seed=seed, mode=mode) as world:
        assert world.run(program) == [True] * plan.ranks
