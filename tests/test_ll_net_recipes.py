"""QUANT_FWD and DS_FP8 over several teams, both layouts: the bits of one team, over an adversarial network, and every line is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_mutations import effect_mutants, mutant
from test_recipes import FP8, FP8_ROUNDED, LAYOUTS, Quantised, fwd

from ncclep_py import CombineInputs, DispatchInputs, EpRefusedError, Group, GroupConfig, Layout, LocalWorld, launch
from ncclep_py.kernels.ll_net_dispatch import make_ll_net_dispatch
from ncclep_py.kernels.ll_net_rank_major_dispatch import make_ll_net_rank_major_dispatch
from ncclep_py.kernels.ops import NET_OPS
from ncclep_py.kernels.shape import Wire
from ncclep_py.simulator import RaceError, SimulationError, Simulator
from ncclep_py.simulator.ll_net_program import LLNetProgram, LLNetRankMajorProgram

PROGRAMS: dict[Layout, type[LLNetProgram]] = {Layout.EXPERT_MAJOR: LLNetProgram, Layout.RANK_MAJOR: LLNetRankMajorProgram}
WIRES = {"forwarded": Wire(32, 64), "quantised": Wire(512, 16, True), "rounded": Wire(512, 16, True, True)}


def play(seed: int, layout: Layout, wire: Wire, tokens: Sequence[int] = (3, 1, 2, 3), team: int = 2, blocks: int = 2, effects: Any = None,
         **more: Any) -> LLNetProgram:
    """Three dispatches of one schedule, every received row and scale row checked."""
    sim = Simulator(len(tokens), seed, ("adversarial", "fair")[seed % 5 == 4], blocks=blocks, effects=effects)
    config = GroupConfig(num_experts=2 * len(tokens), max_dispatch_tokens_per_rank=3, hidden=512 if wire.quantise else 16, num_topk=2, num_slots=2,
                         max_token_bytes=0 if wire.quantise else 96)
    p = PROGRAMS[layout](sim, config, tokens, team, seed=seed, wire=wire, **more)
    for slot in (0, 1, 0):
        p.dispatch_quantised(slot)
    sim.run()
    assert not any(p.record(rank) for rank in p.ranks)
    return p


TEAMS = (((3, 1, 2, 3), 2), ((3, 1, 2, 3), 1), ((2, 3), 1), ((1, 0, 2, 3, 1, 2), 3), ((0, 1) * 4, 4), ((1, 1) * 4, 1))
"""Tokens of each rank, and ranks of a team."""


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_of_one_team(layout: Layout, wire: str) -> None:
    for seed, (tokens, team) in enumerate(TEAMS):
        play(seed, layout, WIRES[wire], tokens, team)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grids_and_epochs(layout: Layout) -> None:
    for seed, (blocks, epoch) in enumerate(((1, 2**32 - 2), (5, 2**31 - 2), (7, 1))):
        for wire in WIRES.values():
            play(seed, layout, wire, blocks=blocks, epoch=epoch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_travels_once_with_its_scales(layout: Layout) -> None:
    """2 ranks: HEADs (2 words each), counts (EXPERT_MAJOR), tags and messages; at most one message per token."""
    p = play(1, layout, WIRES["quantised"], (2, 0), 1)
    words = 3 * 2 * (2 + 1 + (layout is Layout.EXPERT_MAJOR))
    assert words < p.network.puts <= words + 3 * 2


# ---- through the public interface ------------------------------------------------------------------------------------------------
def steps(cases: Sequence[Quantised], team: int, seed: int = 0) -> None:
    """Dispatch and combine each case on a handle of its layout, of one group."""
    def program(comm: Any) -> None:
        with Group.create(comm, cases[0].cfg) as group:
            handles = {layout: group.create_handle(layout, num_topk=cases[0].cfg.num_topk) for layout in {c.layout for c in cases}}
            for case in cases:
                case.dispatch(comm.rank, handles[case.layout])
                case.combine(comm.rank, handles[case.layout])
            group.check()

    with LocalWorld(cases[0].ranks, "sim", team_size=team, seed=seed, mode=("fair", "adversarial")[seed % 2]) as world:
        world.run(program)


CONFIG = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=5, hidden=512, num_topk=3, num_slots=2, max_token_bytes=1072)


def some_cases(seed: int) -> list[Quantised]:
    """Recipes, sizes and layouts in turn."""
    sizes = {0: (1024, 48), 3: (16, 512), 6: (512, 16)}
    return [fwd(CONFIG, [1, 5, 3, 0], LAYOUTS[s % 2], sizes[s][0], torch.uint8, sizes[s][1], torch.uint8, s + seed) if s in sizes else
            Quantised(CONFIG, [5, 0, 3, 4], LAYOUTS[s % 2], (FP8, FP8_ROUNDED)[s // 2 % 2], seed=s + seed) for s in range(7)]


@pytest.mark.parametrize("team", [1, 2])
def test_recipes_and_layouts_in_turn(team: int) -> None:
    for seed in range(3):
        steps(some_cases(10 * seed), team, seed)


def test_a_refused_recipe_is_refused_on_all_teams_and_the_next_is_right() -> None:
    case = Quantised(CONFIG, [5, 0, 3, 4], Layout.RANK_MAJOR, FP8)

    def program(comm: Any) -> None:
        with Group.create(comm, CONFIG) as group, group.create_handle(Layout.RANK_MAJOR, num_topk=3) as handle:
            given = case.inputs(comm.rank)
            wrong = DispatchInputs(given.tokens.half(), given.topk_weights) if comm.rank == 2 else given
            with pytest.raises((TypeError, EpRefusedError), match="tokens must have dtype|rank 2 refused"):
                handle.dispatch(wrong, topk_idx=case.ids[comm.rank], config=FP8)
            group.check()
            case.dispatch(comm.rank, handle)
            case.combine(comm.rank, handle)

    with LocalWorld(4, "sim", team_size=2) as world:
        world.run(program)


# ---- every line is needed --------------------------------------------------------------------------------------------------------
FACTORIES = {Layout.EXPERT_MAJOR: ("ll_net_dispatch", make_ll_net_dispatch),
             Layout.RANK_MAJOR: ("ll_net_rank_major_dispatch", make_ll_net_rank_major_dispatch)}
STAGE = {Layout.EXPERT_MAJOR: "stage_row(window, SENT_SCALES, scales, at, first, TOPK, EXPERTS,",
         Layout.RANK_MAJOR: "stage_row(window, SENT_SCALES, scales, at, first, TOPK, RANKS,"}
PLACE = {Layout.EXPERT_MAJOR: "slot", Layout.RANK_MAJOR: "place"}
MUTANTS: dict[str, list[tuple[str, str]]] = {
    "scale rows are not put": [("HEADER_BYTES + SENT_BYTES + SCALE_BYTES,", "HEADER_BYTES + SENT_BYTES,")],
    "rows of the group's size": [("SENT_BYTES, SCALE_BYTES, SCALES = shape.sent_bytes,", "SENT_BYTES, SCALE_BYTES, SCALES = shape.row_bytes,")],
    "scales over rows": [("$, $ + SCALES,", "$, $,")],
    "no scales inside my team": [("scatter_row(payload, $ + SCALES,", "scatter_row(payload, $,")],
    "no quantised scales inside my team": [("spread_row(payload, $ + SCALES, SENT_SCALES,", "spread_row(payload, $ + SCALES, SENT_ROWS,")],
    "scales are not rounded": [("int(shape.wire.round_scales)", "0")],
    "a quantised row is copied over": [("0 if QUANTISE else SENT_BYTES", "SENT_BYTES")],
}


def cases_of(layout: Layout) -> list[Quantised]:
    return [fwd(CONFIG, [5, 2, 3, 4], layout, 512, torch.uint8, 64, torch.uint8), Quantised(CONFIG, [5, 2, 3, 4], layout, FP8_ROUNDED)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", [None, *MUTANTS, "no scales in messages"])
def test_kernel_mutants_are_red(monkeypatch: pytest.MonkeyPatch, layout: Layout, what: str | None) -> None:
    name, factory = FACTORIES[layout]
    changes = {None: [], "no scales in messages": [(STAGE[layout], STAGE[layout].replace("SENT_SCALES", "SENT_ROWS"))]} | MUTANTS
    change = [(old.replace("$", PLACE[layout]), new.replace("$", PLACE[layout])) for old, new in changes[what]]
    monkeypatch.setitem(launch.KERNELS, name, (mutant(factory, *change), launch.KERNELS[name][1]))
    if what is None:
        steps(cases_of(layout), 2)
    else:
        with pytest.raises((AssertionError, SimulationError)):
            for case in cases_of(layout):
                steps([case], 2)


@pytest.mark.parametrize("one_distance", [True, False])
def test_no_row_is_taken_for_a_message(monkeypatch: pytest.MonkeyPatch, one_distance: bool) -> None:
    """Rows full of what begins a message of the next dispatch; were messages of the other layout closer, one would be read out of such a row."""
    source = "HEADER_BYTES, MESSAGE_BYTES = shape.net.header_bytes, shape.net.message_bytes\n"
    closer = source.replace("shape.net.message_bytes", "shape.net.header_bytes + shape.sent_bytes")
    change = [] if one_distance else [(source, closer)]
    name, factory = FACTORIES[Layout.EXPERT_MAJOR]
    monkeypatch.setitem(launch.KERNELS, name, (mutant(factory, *change), launch.KERNELS[name][1]))
    config = GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=6, hidden=64, num_topk=1, dtype=torch.float32, num_slots=2)

    def program(comm: Any) -> bool:
        with Group.create(comm, config) as group:
            ranked, planes = (group.create_handle(layout, num_topk=1) for layout in (Layout.RANK_MAJOR, Layout.EXPERT_MAJOR))
            other = torch.full((6, 1), 1 - comm.rank)
            rows = torch.tensor([2, 1] * 32, dtype=torch.int32).view(torch.float32).repeat(6, 1)   # epoch 2, and that there is one
            ranked.dispatch(DispatchInputs(rows, torch.ones(6, 1)), topk_idx=other)
            sent = 5 + torch.arange(64.).repeat(6, 1)
            got = planes.dispatch(sent, topk_idx=torch.where(torch.arange(6)[:, None] < 1, other, torch.tensor(-1)))
            marks = group._local[group.net.slot_remote(1):][:4 * 2 * 6].view(torch.int32).view(2, 6)
            group.check()
            assert got.layout_info.expert_counters.tolist() == [1] and torch.equal(got.tokens[0, 0], sent[0])
            return marks[1 - comm.rank].tolist() == [0, -1, -1, -1, -1, -1]

    with LocalWorld(2, "sim", team_size=1) as world:
        try:
            right = all(world.run(program))
        except (AssertionError, SimulationError):
            right = False
    assert right == one_distance


MADE = """        if part == 0:
            at = first + warp_idx()
            while at < end:
                quantise_row(window, SENT_ROWS, SENT_SCALES, tokens, at, first, TOPK, RANKS, ROW_BYTES, ROUND, MESSAGE_BYTES, rank)
                at += warps()
"""


@pytest.mark.parametrize("before", [True, False])
def test_messages_are_made_after_the_heads_of_all(before: bool) -> None:
    """L-N2: before, a put of the last dispatch may still read what lies there. Made once more after them, nothing happens."""
    place = "        # ---- 3 wait" if before else "        # ---- 4 send"
    made = MADE if before else MADE.replace("part == 0:", "part == 0 and code == 0:")
    make = mutant(make_ll_net_rank_major_dispatch, (place, made + place))
    error = None
    for seed in range(40):
        try:
            play(seed, Layout.RANK_MAJOR, WIRES["quantised"], make_dispatch=make)
        except SimulationError as found:
            error = found
            break
    assert isinstance(error, RaceError) == before and (before or error is None)


OWN = {"ll_net_stage_row", "ll_net_quantise_row", "ll_net_spread_row"}


def test_operations_of_recipes_order_nothing() -> None:
    """They have no fence, barrier or strong access whose loss could be tried: send_row releases what they wrote."""
    assert effect_mutants(OWN, NET_OPS) == {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wire", WIRES)
def test_send_row_releases_what_was_made_before_it(layout: Layout, wire: str) -> None:
    effects = {"ll_net_send_row": tuple(e for e in NET_OPS["ll_net_send_row"].effects if not e.startswith("fence"))}
    with pytest.raises(SimulationError):
        for seed in range(20):
            play(seed, layout, WIRES[wire], effects=effects)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_combine_of_ones_after_a_recipe(layout: Layout) -> None:
    """Rows of the group's type take the place of what was quantised, also of what goes back over the network."""
    case = Quantised(CONFIG, [5, 2, 3, 4], layout, FP8)

    def program(comm: Any) -> None:
        with Group.create(comm, CONFIG) as group, group.create_handle(layout, num_topk=3) as handle:
            case.dispatch(comm.rank, handle)
            rows = handle.expert_rows()
            rows.fill_(1)
            weights = torch.ones(case.ids[comm.rank].shape)
            out = handle.combine(CombineInputs(rows), topk_weights=weights)
            local = CONFIG.num_experts // 4
            places = [[e // local if layout is Layout.RANK_MAJOR else k for k, e in enumerate(ids) if e >= 0] for ids in case.ids[comm.rank].tolist()]
            want = [len(set(found)) for found in places]
            assert torch.equal(out.float(), torch.tensor(want).float()[:, None].expand(-1, 512))

    with LocalWorld(4, "sim", team_size=2, seed=1, mode="adversarial") as world:
        world.run(program)
