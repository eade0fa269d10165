"""NVFP4 combine over several teams, both layouts: the bits of one team, a refusal and a lost rank, and every line is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from test_ll_host import config
from test_ll_net import DATA, HEADS, TOLD
from test_mutations import mutant
from test_nvfp4 import LAYOUTS, NVFP4, Packed

from ncclep_py import CombineInputs, CombineOutputs, EpError, EpRefusedError, Group, Layout, LocalWorld, launch
from ncclep_py.kernels.ll_net_nvfp4_combine import make_ll_net_nvfp4_combine
from ncclep_py.simulator import SimulationError


def steps(cases: Sequence[Packed], team: int, seed: int = 0, **how: Any) -> None:
    def program(comm: Any) -> None:
        comm.fp4 = True
        with Group.create(comm, cases[0].cfg) as group:
            handles = {layout: group.create_handle(layout, num_topk=cases[0].cfg.num_topk) for layout in {c.layout for c in cases}}
            for case in cases:
                case.step(comm.rank, handles[case.layout], **how)
            group.check()

    with LocalWorld(len(cases[0].tokens), "sim", team_size=team, seed=seed, mode=("fair", "adversarial")[seed % 2]) as world:
        world.run(program)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("counts", "team"), [([4, 0], 1), ([2, 5, 1], 1), ([3, 1, 0, 5], 2), ([1, 2] * 3, 3), ([1] * 8, 1)], ids=str)
def test_the_bits_of_one_team(layout: Layout, counts: list[int], team: int) -> None:
    cfg = config(len(counts) * 2, 5, 1024, 3)
    steps([Packed(cfg, counts, layout, seed=s) for s in range(2)], team)


def test_layouts_in_turn_over_many_schedules() -> None:
    cfg = config(8, 3, 512, 2, num_slots=2)
    for seed in range(12):
        steps([Packed(cfg, [3, 2, 0, 3], LAYOUTS[s % 2], seed=s) for s in range(seed, seed + 3)], (2, 1)[seed % 2], seed, plain=seed % 3 == 0)


def test_a_stale_combine_on_one_rank_is_refused_on_all_and_the_next_is_right() -> None:
    case = Packed(config(8, 3, 512, 2), [3, 2, 0, 3], Layout.EXPERT_MAJOR)

    def program(comm: Any) -> None:
        comm.fp4, rank = True, comm.rank
        with Group.create(comm, case.cfg) as group, group.create_handle(case.layout, num_topk=2) as handle:
            handle.dispatch(case.tokens[rank], topk_idx=case.ids[rank])
            rows = handle.expert_rows().copy_(case.rows[rank])
            given = CombineInputs(rows, scales=None if rank == 1 else case.scales[rank])
            with pytest.raises((ValueError, EpRefusedError), match="inputs.scales must be given|rank 1 refused"):
                handle.combine(given, CombineOutputs(topk_weights=case.weights[rank]), NVFP4)
            group.check()
            case.step(rank, handle)

    with LocalWorld(4, "sim", team_size=2) as world:
        world.run(program)


def test_a_device_without_fp4_is_refused_by_a_sentence() -> None:
    case = Packed(config(8, 3, 512, 2), [3, 2, 0, 3], Layout.RANK_MAJOR)

    def program(comm: Any) -> None:
        with Group.create(comm, case.cfg) as group, group.create_handle(case.layout, num_topk=2) as handle:
            with pytest.raises(NotImplementedError, match="NVFP4 quantisation of combine needs a device with FP4"):
                case.step(comm.rank, handle)
            group.check()

    with LocalWorld(4, "sim", team_size=2) as world:
        world.run(program)


PACK = "pack_rows(payload, slot, rank, counters, row_scales, PLANES, CAPACITY, ROW_BYTES)"
MUTANTS = {
    "head by the first block": [("last_block(local + BLOCKS_PACKED) == 1", "block_idx() == 0")],
    "no pack": [(PACK, "pass")],
    "packed by every block": [(PACK, PACK + "\n                " + PACK)],
    "no wait for heads": [(HEADS, "code = 0")],
    "no wait for data": [(DATA, "code = 0")],
    "told by the first block": [(TOLD, "block_idx() == 0")],
    "a short put": [("ROW_BYTES // 1024 * 288 + 16", "ROW_BYTES // 1024 * 288")],
    "rows as they are": [("TOPK, ROW_BYTES, PACKED_BYTES, CONTEXTS)", "TOPK, PACKED_BYTES, PACKED_BYTES, CONTEXTS)")],
    "one signal on context 0": [("                signal(comm, rank, RANKS, TEAM, 0)   # context 0 has two in every operation\n", "")],
    "the count stands still": [("                advance_count(local + COUNT, count)\n", "")],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", [None, *MUTANTS])
def test_kernel_mutants_are_red(monkeypatch: pytest.MonkeyPatch, layout: Layout, what: str | None) -> None:
    changed = mutant(make_ll_net_nvfp4_combine, *(MUTANTS[what] if what else []))
    monkeypatch.setitem(launch.KERNELS, "ll_net_nvfp4_combine", (changed, launch.KERNELS["ll_net_nvfp4_combine"][1]))
    cfg = config(8, 3, 512, 2)

    def cases() -> None:
        for seed in range(8):
            steps([Packed(cfg, [3, 2, 3, 3], layout, seed=seed + s) for s in range(2)], (1, 2)[seed % 2], seed + 1)

    if what is None:
        cases()
    else:
        with pytest.raises((AssertionError, SimulationError, EpError)):
            cases()
