"""Rows in windows of the caller over several teams, in the simulator: the bits of one team, when to write again, and each part is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_ll_host import config as packed_config
from test_ll_net import DATA, HEADS
from test_mutations import mutant
from test_nvfp4 import NVFP4, Packed
from test_zero_copy import LAYOUTS, Rank, config, from_everywhere_to_everywhere

from ncclep_py import CombineConfig, CombineInputs, CombineOutputs, DispatchConfig, DispatchInputs, DispatchOutputs, Group, Layout, LocalWorld
from ncclep_py.config import GroupConfig, ZeroCopyMode
from ncclep_py.kernels.ll_net_combine import make_ll_net_combine
from ncclep_py.kernels.ll_net_dispatch import make_ll_net_dispatch
from ncclep_py.kernels.ll_net_rank_major_dispatch import make_ll_net_rank_major_dispatch
from ncclep_py.signature import Signature
from ncclep_py.simulator import RaceError, SimulationError, Simulator
from ncclep_py.simulator.ll_net_program import LLNetProgram, LLNetRankMajorProgram
from ncclep_py.testing import bits_equal

TEAMS = ((2, 1), (4, 2), (4, 1))
"""Ranks, and ranks of a team: two teams and four."""


# ---- the public interface --------------------------------------------------------------------------------------------------------
def run(program: Callable[[Any], Any], ranks: int, team: int, seed: int = 0) -> list[Any]:
    with LocalWorld(ranks, "sim", team_size=team, seed=seed, mode=("adversarial", "fair")[seed % 2]) as world:
        return world.run(program)


def settled(comm: Any, group: Group) -> None:
    group.check()
    comm.barrier()


@LAYOUTS
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("ranks", "team"), TEAMS)
def test_rows_anywhere_give_the_same_bits(layout: Layout, staged: bool, ranks: int, team: int) -> None:
    """From every place to every place; what one team gives is wanted."""
    def rows_of(group: Group) -> tuple[Rank, Any, list[int], torch.Tensor, torch.Tensor]:
        mine = Rank(group, layout, tokens=(4, 0, 5, 3)[group.rank])
        got = mine.dispatch()
        counts, want_rows = mine.counts(got), got.tokens.clone()
        got.tokens.mul_(2)
        return mine, got, counts, want_rows, mine.combine(got.tokens).clone()

    def one_team(comm: Any) -> Any:
        with Group.create(comm, config(num_experts=2 * ranks)) as group:
            return rows_of(group)[2:]

    def program(comm: Any) -> None:
        with Group.create(comm, config(num_experts=2 * ranks, num_staging_slots=4 if staged else 0)) as group:
            mine, *_ = rows_of(group)
            counts, want_rows, want = single[comm.rank]

            def release() -> None:
                settled(comm, group)
                mine.dispatch()   # an operation after which the windows may be written again

            from_everywhere_to_everywhere(mine, counts, want_rows, want, staged, release)

    with LocalWorld(ranks, "sim") as world:
        single = world.run(one_team)
    for seed in range(2):
        run(program, ranks, team, seed)


@LAYOUTS
@pytest.mark.parametrize(("ranks", "team"), TEAMS)
def test_windows_in_turn_without_a_meeting(layout: Layout, ranks: int, team: int) -> None:
    """Two windows, each written again after the next operation, over many schedules."""
    def program(comm: Any) -> None:
        with Group.create(comm, config(num_experts=2 * ranks)) as group:
            mine = Rank(group, layout, tokens=(4, 1, 5, 3)[comm.rank])
            first = mine.dispatch()
            first.tokens.mul_(4)
            want, windows = mine.combine(first.tokens).clone(), [mine.window() for _ in range(2)]
            for turn in range(4):
                got = mine.dispatch(DispatchOutputs(windows[turn % 2]))
                got.tokens.mul_(4)
                assert bits_equal(mine.combine(got.tokens), want), turn
            group.check()

    for seed in range(12):
        run(program, ranks, team, seed)


@LAYOUTS
def test_peers_write_and_read_a_window_without_a_copy(layout: Layout) -> None:
    """The slot's rows keep what they held: nothing went through them."""
    def program(comm: Any) -> None:
        with Group.create(comm, config(num_experts=8)) as group:
            mine = Rank(group, layout)
            rows, plan = mine.window(), group.map
            slot = group.window.memory[plan.slot(0): plan.slot(0) + rows.nbytes]
            mine.combine(mine.dispatch().tokens)
            before = slot.clone()
            got = mine.dispatch(DispatchOutputs(rows))
            mine.combine(got.tokens)
            group.check()
            assert torch.equal(slot, before) and bool(rows.any())
            rows.mul_(0)   # what is combined is what is here
            assert not bool(mine.combine(rows).any())
            group.check()

    run(program, 4, 2)


def test_modes() -> None:
    """ON refuses what would be copied, staged operations on a window among it; OFF copies."""
    def program(comm: Any) -> None:
        send, push = DispatchConfig(send_only=True), CombineConfig(send_only=True)
        for mode in ZeroCopyMode:
            with Group.create(comm, config(num_experts=8, zero_copy=mode, num_staging_slots=2)) as group:
                mine = Rank(group, Layout.EXPERT_MAJOR)
                rows, slot = mine.window(), group.window.memory[group.map.slot(0): group.map.slot(0) + group.map.slot_bytes]
                got = mine.dispatch(DispatchOutputs(rows))
                assert bool(slot.any()) == (mode is ZeroCopyMode.OFF) and bool(rows.any())
                want = mine.combine(got.tokens)
                assert bits_equal(mine.combine(mine.dispatch().tokens), want)
                if mode is ZeroCopyMode.ON:
                    told = r"lie in a window of Group.create_window, since zero_copy is ON; got rows of a staged operation over several teams, which"
                    with pytest.raises(ValueError, match=f"outputs.tokens must be left out or {told}"):
                        mine.dispatch(DispatchOutputs(rows), send)
                    mine.dispatch()
                    with pytest.raises(ValueError, match=f"inputs.tokens must be left out or {told}"):
                        mine.combine(rows, how=push)
                    with pytest.raises(ValueError, match="got a plain tensor"):
                        mine.combine(torch.zeros_like(rows))
                    assert bits_equal(mine.combine(mine.dispatch().tokens), want)
                group.check()

    run(program, 4, 2)


def test_ranks_must_give_the_same_window() -> None:
    def program(comm: Any) -> str:
        with Group.create(comm, config(num_experts=8)) as group:
            mine = Rank(group, Layout.EXPERT_MAJOR)
            windows = [mine.window() for _ in range(2)]
            mine.dispatch(DispatchOutputs(windows[comm.rank // 2]))
            with pytest.raises(Exception, match="slot") as raised:
                group.check()
            return str(raised.value)

    assert "slot 1 here, 2 there" in run(program, 4, 2)[0]


@LAYOUTS
@pytest.mark.parametrize(("counts", "team"), [([3, 2, 0, 3], 2), ([2, 5], 1), ([1, 2, 3, 0], 1)], ids=str)
def test_nvfp4_rows_of_a_window(layout: Layout, counts: list[int], team: int) -> None:
    """They are packed in the window."""
    cases = [Packed(packed_config(2 * len(counts), 5, 512, 2), counts, layout, seed=s) for s in range(2)]

    def program(comm: Any) -> None:
        comm.fp4, rank = True, comm.rank
        with Group.create(comm, cases[0].cfg) as group, group.create_handle(layout, num_topk=2) as handle:
            shape = cases[0].rows[rank].shape
            window = group.create_window(2 * shape.numel()).memory[:2 * shape.numel()].view(torch.bfloat16).view(shape)
            for case in cases:
                given = DispatchInputs(case.tokens[rank], case.weights[rank] if layout is Layout.RANK_MAJOR else None)
                handle.dispatch(given, topk_idx=case.ids[rank])
                window.copy_(case.rows[rank])
                out = handle.combine(CombineInputs(window, scales=case.scales[rank]), CombineOutputs(topk_weights=case.weights[rank]), NVFP4)
                assert bits_equal(out, case.want[rank])
                assert not case.want[rank].any() or not bits_equal(window, case.rows[rank])
            group.check()

    for seed in range(4):
        run(program, len(counts), team, seed)


# ---- kernels, every access seen --------------------------------------------------------------------------------------------------
class UserProgram(LLNetProgram):
    """`LLNetProgram` whose rows are in user windows, one per slot."""

    def __init__(self, sim: Simulator, config: GroupConfig, *values: Any, **named: Any) -> None:
        super().__init__(sim, config, *values, **named)
        sim.poison = False   # it knows the group's slots
        plan = self.shape.window
        self.size = (plan.num_local_experts if self.layout is Layout.EXPERT_MAJOR else 1) * plan.plane_rows * plan.row_bytes
        self.users = [[np.zeros(self.size, np.uint8) for _ in self.ranks] for _ in range(config.num_slots)]
        self.handles_of = [sim.create_window(user, [(f"SLOT_OF_USER{i}", 0, self.size)]) for i, user in enumerate(self.users)]

    def _launch_signed(self, kind: str, rank: int, slot: int, handle: int, status: int, signature: Signature, more: dict[str, int],
                       **tensors: object) -> None:
        given = {"payload": self.handles_of[slot], "place": 0} | ({} if "place" in self.parameters[kind] else {"slot": 0})
        super()._launch_signed(kind, rank, slot, handle, status, signature, more | given, **tensors)

    def slot_tensor(self, rank: int, slot: int) -> torch.Tensor:
        plan = self.shape.window
        return torch.from_numpy(self.users[slot][rank]).view(self.dtype).view(plan.num_local_experts, plan.plane_rows, self.config.hidden)

    def rows(self, d: Any, rank: int, spare: bool = False) -> list[tuple[int, int]]:
        moved = self.users[d.slot][rank].ctypes.data - self.windows[rank].ctypes.data - self.shape.window.slot(d.slot)
        return [(at + moved, size) for at, size in super().rows(d, rank, spare)]

    def write(self, d: Any) -> None:
        """Enqueue that every rank writes its rows of a dispatch again."""
        for rank in self.ranks:
            rows = self.rows(d, rank)
            self.sim.host(rank, lambda: None, writes=rows, label="user")


class UserRankMajorProgram(UserProgram, LLNetRankMajorProgram):
    """The same for RANK_MAJOR: ids and weights stay in the slot."""

    def _run_experts(self, d: Any, rank: int) -> None:
        plan, user = self.shape.window, torch.from_numpy(self.users[d.slot][rank])
        held = torch.from_numpy(self.windows[rank][plan.slot(d.slot):plan.slot(d.slot) + plan.slot_bytes]).clone()
        held[:self.size] = user
        d.received.setdefault(rank, held)
        planes = user.view(self.dtype).view(len(self.ranks), self.config.max_dispatch_tokens_per_rank, -1)
        for source, count in enumerate(d.counters[rank].tolist()):
            planes[source, :count] = self._expert(planes[source, :count], source)


PROGRAMS = {Layout.EXPERT_MAJOR: UserProgram, Layout.RANK_MAJOR: UserRankMajorProgram}
MAKE = {Layout.EXPERT_MAJOR: make_ll_net_dispatch, Layout.RANK_MAJOR: make_ll_net_rank_major_dispatch}
TEXTS = ("D X C D X C", "D D X C C", "D0 D1 X0 C0 D0 X1 C1", "D0 X0 C0 D1 X1 C1 D0 X0 C0")


def program(seed: int, layout: Layout, ranks: int = 4, team: int = 2, tokens: Sequence[int] = (4, 2, 3, 4), **make: Any) -> UserProgram:
    sim = Simulator(ranks, seed, ("adversarial", "fair")[seed % 5 == 4], blocks=2)
    settings = GroupConfig(num_experts=2 * ranks, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=2, num_slots=2)
    return PROGRAMS[layout](sim, settings, tokens[:ranks], team, seed=seed, **make)


def play(seed: int, layout: Layout, *values: Any, **how: Any) -> None:
    p = program(seed, layout, *values, **how)
    p.play(TEXTS[seed % len(TEXTS)])
    p.sim.run()
    p.check()


def rewrite(seed: int, layout: Layout, later: str, **how: Any) -> UserProgram:
    """A combine, `later`, and rows written again."""
    p = program(seed, layout, **how)
    d = p.dispatch(0)
    p.experts(d)
    p.combine(d)
    p.play(later)
    p.write(d)
    p.sim.run()
    return p


@LAYOUTS
@pytest.mark.parametrize(("ranks", "team"), TEAMS)
def test_many_schedules(layout: Layout, ranks: int, team: int) -> None:
    for seed in range(24):
        play(seed, layout, ranks, team)


@LAYOUTS
@pytest.mark.parametrize("later", ["D1", "D1 X1 C1"])
def test_rows_may_be_written_after_the_next_operation(layout: Layout, later: str) -> None:
    for seed in range(24):
        rewrite(seed, layout, later).check()


@LAYOUTS
def test_rows_may_not_be_written_at_once(layout: Layout) -> None:
    """A put still reads them."""
    with pytest.raises(RaceError, match="SLOT_OF_USER0"):
        for seed in range(60):
            rewrite(seed, layout, "")


ENTER = "CONTEXTS, count, epoch, signature, status, fail"
UNHEARD = ((DATA, "code = 0"), ("while at < num_tokens:", "while at < 0:"))
"""A combine that waits for no rows, as if all had failed: nothing but the drain (L-N1) tells when the puts have read theirs."""


@LAYOUTS
@pytest.mark.parametrize("drains", [True, False])
def test_the_drain_alone_makes_writing_safe(layout: Layout, drains: bool) -> None:
    make = {"make_combine": mutant(make_ll_net_combine, *UNHEARD),
            "make_dispatch": mutant(MAKE[layout], *(() if drains else ((ENTER, ENTER.replace("count", "0")),)))}
    said = ""
    for seed in range(40 if drains else 240):
        try:
            rewrite(seed, layout, "D1", **make)
        except RaceError as error:
            said = str(error)
            if drains or "SLOT_OF_USER0" in said:
                break
    assert ("SLOT_OF_USER0" in said) == (not drains) and (not drains or not said), said


PLACE = {Layout.EXPERT_MAJOR: "slot", Layout.RANK_MAJOR: "place"}
MUTANTS = {
    "dispatch: rows of my team to the slot": ("dispatch", "scatter_row(payload, $, tokens,", "scatter_row(window, $, tokens,"),
    "dispatch: rows of other teams to the slot": ("dispatch", "(payload, $, $ + SCALES, window,", "(window, $, $ + SCALES, window,"),
    "dispatch: no wait for heads": ("dispatch", HEADS, "code = 0"),
    "combine: puts from the slot": ("combine", "return_rows(comm, payload,", "return_rows(comm, window,"),
    "combine: puts to a user window": ("combine", "return_rows(comm, payload, slot, window,", "return_rows(comm, payload, slot, payload,"),
    "combine: rows of my team from the slot": ("combine", "gather_row(payload,", "gather_row(window,"),
    "combine: ranks' rows of my team from the slot": ("combine", "sum_row(payload,", "sum_row(window,"),
    "combine: no wait for heads": ("combine", HEADS, "code = 0"),
    "combine: no wait for data": ("combine", DATA, "code = 0"),
}


ONE_LAYOUT = {"combine: rows of my team from the slot": Layout.EXPERT_MAJOR, "combine: ranks' rows of my team from the slot": Layout.RANK_MAJOR}


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in MUTANTS for layout in PROGRAMS if ONE_LAYOUT.get(name, layout) is layout])
def test_kernel_mutant_is_red(name: str, layout: Layout) -> None:
    kernel, old, new = MUTANTS[name]
    factory = MAKE[layout] if kernel == "dispatch" else make_ll_net_combine
    changed = mutant(factory, (old.replace("$", PLACE[layout]), new.replace("$", PLACE[layout])))
    with pytest.raises((SimulationError, AssertionError)):
        for seed in range(60):
            play(seed, layout, **{f"make_{kernel}": changed})
