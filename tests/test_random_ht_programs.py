"""Random high-throughput programs in the simulator: updates, both passes, several handles, wrong calls on one rank, budgets; every row checked.

Values are chosen so that every sum is exact: small integers and powers of two, float32 rows.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from ncclep_py import (
    Algorithm,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchOutputs,
    EpError,
    EpRefusedError,
    Group,
    GroupConfig,
    HandleConfig,
    Layout,
    LocalWorld,
    PassDir,
)

SEEDS = 48
KINDS = ("update", "dispatch", "combine", "backward", "wrong update", "wrong dispatch", "wrong combine", "step", "step")
WRONG = ("dtype", "shape", "nothing", "count", "config", "strides")
SAID = ("needs an update before it", "needs a forward dispatch", "needs a backward dispatch", "slots hold dispatches", "the last one was refused",
        "dispatched under an earlier routing")
"""Reasons every rank finds by itself."""


@dataclasses.dataclass
class Plan:
    """What a seed decides."""

    seed: int
    team_size: int = 0   # 0: one team

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.ranks, self.local = draw.choice((1, 2, 2, 3, 4)), draw.choice((1, 2, 3))
        if self.team_size:
            self.ranks = self.team_size * draw.choice((2, 2, 3) if self.team_size == 1 else (2,))
        self.experts = self.ranks * self.local
        self.topk, self.capacity, self.hidden = min(draw.choice((1, 2, 4)), self.experts), draw.choice((1, 3, 6)), draw.choice((4, 8, 20, 64))
        self.slots = draw.choice((1, 2, 3))
        self.handles = [(draw.choice((Layout.FLAT, Layout.EXPERT_MAJOR)), draw.randint(1, self.topk), draw.choice((0, 2, 4)))
                        for _ in range(draw.randint(1, 2))]
        self.steps = [(draw.choice(KINDS), draw.randrange(len(self.handles)), draw.randrange(self.ranks), draw.choice(WRONG))
                      for _ in range(draw.randint(6, 14))]
        self.counts = [[draw.randint(0, self.capacity) for _ in range(self.ranks)] for _ in self.steps]
        self.budget = self.ranks * self.capacity * min(self.topk, self.local) + 4 * self.local

    def ids(self, step: int, rank: int, handle: int) -> torch.Tensor:
        """Routing of a rank by the update in a step."""
        draw, count, topk = torch.Generator().manual_seed(self.seed * 100_003 + step * 101 + rank), self.counts[step][rank], self.handles[handle][1]
        ids = torch.rand(count, self.experts, generator=draw).argsort(1)[:, :topk].clone()
        ids[torch.rand(count, topk, generator=draw) < 0.15] = -1
        return ids

    def tokens(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and weights (for every expert, so that any K finds its own) of a rank under the update of a step."""
        draw, count = torch.Generator().manual_seed(self.seed * 7919 + step * 13 + rank), self.counts[step][rank]
        return (torch.randint(-8, 9, (count, self.hidden), generator=draw).float(),
                2.0 ** torch.randint(-2, 1, (count, self.topk), generator=draw).float())


class Rank:
    """One rank's part of a program. Per handle: the step of its newest good update, and which passes hold rows under it."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self.plan, self.group, self.rank = plan, group, group.rank
        self.handles = [group.create_handle(layout, num_topk=topk, config=HandleConfig(dispatch_output_per_expert_alignment=alignment))
                        for layout, topk, alignment in plan.handles]
        self.updated: dict[int, int] = {}
        self.fresh: set[tuple[int, bool]] = set()   # passes whose rows were not combined yet: combining copies scaled rows into the slot

    def play(self) -> None:
        for step, (kind, handle, who, wrong) in enumerate(self.plan.steps):
            mine = wrong if who == self.rank else ""
            if kind in ("update", "step"):
                self.update(step, handle)
            if kind in ("dispatch", "step"):
                self.dispatch(handle, False)
            if kind in ("combine", "step"):
                self.combine(handle, False)
            if kind == "backward":
                self.dispatch(handle, True)
                self.combine(handle, True)
            if kind == "wrong update":
                self.wrong_update(step, handle, mine)
            if kind == "wrong dispatch":
                self.wrong_dispatch(handle, mine)
            if kind == "wrong combine":
                self.wrong_combine(handle, mine)
        for handle in self.handles:
            handle.close()

    # ---- good calls: right, or refused on every rank for a reason each finds by itself -----------------------------------------
    def update(self, step: int, handle: int) -> None:
        self.handles[handle].update(self.plan.ids(step, self.rank, handle))
        self.group.check()
        self.updated[handle] = step

    def good(self, call: Any) -> Any:
        try:
            done = call()
            self.group.check()
        except EpError as e:
            assert any(said in str(e) for said in SAID), e
            self.group.check()
            return None
        return done

    def dispatch(self, handle: int, backward: bool) -> None:
        step, topk = self.updated.get(handle, 0), self.plan.handles[handle][1]
        tokens, weights = self.plan.tokens(step, self.rank)
        config = DispatchConfig(pass_direction=PassDir.BWD) if backward else None
        given = None if backward else weights[:, :topk].contiguous()
        got = self.good(lambda: self.handles[handle].dispatch(tokens, topk_weights=given, config=config))
        if got is not None:
            self.fresh.add((handle, backward))
            self.check_rows(handle, step, got, backward)

    def sources(self, handle: int, step: int) -> list[tuple[int, int, int]]:
        """(source, token, local expert or -1) of every row this rank receives, pads as (-1, -1, -1)."""
        plan, (layout, _, alignment), first = self.plan, self.plan.handles[handle], self.rank * self.plan.local
        found: list[tuple[int, int, int]] = []
        ids = [plan.ids(step, r, handle) for r in range(plan.ranks)]
        if layout is Layout.FLAT:
            mine = set(range(first, first + plan.local))
            return [(s, t, -1) for s in range(plan.ranks) for t, row in enumerate(ids[s].tolist()) if mine & set(row)]
        for local in range(plan.local):
            zone = [(s, t, local) for s in range(plan.ranks) for t in range(len(ids[s])) if (ids[s][t] == first + local).any()]
            found += zone + [(-1, -1, -1)] * (-len(zone) % max(alignment, 1))
        return found

    def check_rows(self, handle: int, step: int, got: DispatchOutputs, backward: bool) -> None:
        rows = self.sources(handle, step)
        assert int(got.layout_info.recv_total_counter[0]) == len(rows)
        for i, (source, token, local) in enumerate(rows):
            tokens, weights = self.plan.tokens(step, source) if source >= 0 else (torch.zeros(1, self.plan.hidden), torch.zeros(1, self.plan.topk))
            assert torch.equal(got.tokens[i], tokens[token]), (i, source, token)
            if not backward and local >= 0:
                k = int((self.plan.ids(step, source, handle)[token] == self.rank * self.plan.local + local).nonzero()[0, 0])
                assert got.topk_weights[i] == weights[token, k]

    def combine(self, handle: int, backward: bool) -> None:
        """Rows come back times 2 to the power of their rank."""
        step = self.updated.get(handle, 0)
        mine, slot = self.handles[handle], self.handles[handle]._slots[backward]
        rows = (mine.rows(slot) if slot >= 0 else torch.zeros(self.plan.budget, self.plan.hidden))
        grads = None
        if backward:
            grads = mine.slot_weights(slot) if slot >= 0 else torch.zeros(self.plan.budget)
        scaled = rows * 2.0 ** self.rank
        config = CombineConfig(pass_direction=PassDir.BWD) if backward else None
        given = CombineInputs(scaled, None if grads is None else torch.ones_like(grads))
        into = CombineOutputs()
        out = self.good(lambda: mine.combine(given, into, config))
        if out is None:
            return
        tokens, _ = self.plan.tokens(step, self.rank)
        ids = self.plan.ids(step, self.rank, handle)
        hosts = torch.where(ids >= 0, ids // self.plan.local, -1)
        flat = self.plan.handles[handle][0] is Layout.FLAT
        factor = torch.stack([((hosts == p).any(1) if flat else (hosts == p).sum(1)).float() * 2.0 ** p for p in range(self.plan.ranks)]).sum(0)
        if (handle, backward) in self.fresh:
            self.fresh.remove((handle, backward))
            assert torch.equal(out, tokens * factor[:, None]), (handle, backward)
            if backward:
                assert torch.equal(into.topk_weights, torch.where(ids >= 0, 1.0, 0.0))

    # ---- wrong calls on one rank ----------------------------------------------------------------------------------------------
    def wrong_update(self, step: int, handle: int, wrong: str) -> None:
        ids: Any = self.plan.ids(step, self.rank, handle)
        topk = ids.shape[1]
        ids = {"dtype": ids.float(), "shape": torch.zeros(2, topk + 1, dtype=torch.int64), "nothing": None,
               "count": torch.zeros(self.plan.capacity + 1, topk, dtype=torch.int64), "config": ids,
               "strides": torch.zeros(topk + 1, 2, dtype=torch.int64).t()[:, :topk]}.get(wrong, ids)
        more = {"layout_info": 3} if wrong in ("config", "strides") else {}
        self.is_refused(wrong, lambda: self.handles[handle].update(ids, **more))
        self.updated.pop(handle, None)

    def wrong_dispatch(self, handle: int, wrong: str) -> None:
        tokens: Any
        tokens, weights = self.plan.tokens(self.updated.get(handle, 0), self.rank)
        more: dict[str, Any] = {"topk_weights": weights[:, : self.plan.handles[handle][1]].contiguous()}
        tokens = {"dtype": tokens.half(), "shape": tokens[:, :-1].contiguous(), "nothing": None,
                  "count": torch.zeros(len(tokens) + 1, self.plan.hidden),
                  "strides": torch.zeros(self.plan.hidden, len(tokens) + 2).t()[:len(tokens) + 2]}.get(wrong, tokens)
        if wrong == "config":
            more["config"] = "fast"
        self.is_refused(wrong, lambda: self.handles[handle].dispatch(tokens, **more))

    def wrong_combine(self, handle: int, wrong: str) -> None:
        slot = self.handles[handle]._slots[0]
        rows: Any = self.handles[handle].rows(slot) if slot >= 0 else torch.zeros(self.plan.budget, self.plan.hidden)
        more: dict[str, Any] = {"config": 4} if wrong == "config" else {}
        rows = {"dtype": rows.half(), "shape": torch.zeros(3, self.plan.hidden + 1), "nothing": None, "count": torch.zeros(2, 2, 2),
                "strides": torch.zeros(self.plan.hidden, 8).t()}.get(wrong, rows)
        self.is_refused(wrong, lambda: self.handles[handle].combine(rows, **more))

    def is_refused(self, wrong: str, call: Any) -> None:
        """Who called wrongly hears why, everybody else of the refusal; nobody hears more of it later."""
        with pytest.raises((EpError, TypeError, ValueError)) as told:
            call()
        everywhere = any(said in str(told.value) for said in SAID)
        assert everywhere or isinstance(told.value, (TypeError, ValueError) if wrong else EpRefusedError), told.value
        self.group.check()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_program_gets_every_row_or_the_right_sentence(seed: int) -> None:
    play(Plan(seed))


@pytest.mark.parametrize("seed", range(12))
def test_over_several_teams_too(seed: int) -> None:
    play(Plan(seed, 1 + seed % 2))


def play(plan: Plan) -> None:
    seed = plan.seed
    config = GroupConfig(num_experts=plan.experts, max_dispatch_tokens_per_rank=plan.capacity, hidden=plan.hidden, num_topk=plan.topk,
                         dtype=torch.float32, num_slots=plan.slots, algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=plan.budget)

    def program(comm: Any) -> bool:
        with Group.create(comm, config) as group:
            Rank(plan, group).play()
        return True

    mode = "adversarial" if plan.team_size or seed % 2 else "fair"
    with LocalWorld(plan.ranks, "sim", team_size=plan.team_size, seed=seed, mode=mode) as world:
        assert world.run(program) == [True] * plan.ranks
