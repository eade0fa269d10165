"""Masks over several teams with recipes, NVFP4 combine and rows in user windows, both layouts, in the simulator: with all ranks and without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ll_net_recipes import CONFIG as FORMS
from test_ll_net_recipes import some_cases
from test_ll_net_zero_copy import settled
from test_masking import LAYOUTS
from test_nvfp4 import NVFP4, row_scales
from test_recipes import LAYOUTS as BOTH
from test_recipes import Quantised, raw
from test_zero_copy import Rank, config, from_everywhere_to_everywhere

from ncclep_py import (
    CombineInputs,
    CombineOutputs,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    EpMaskedError,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
)
from ncclep_py import reference as ref
from ncclep_py.simulator import Faults
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

RANKS, MISSING = 4, 2
TEAMS = pytest.mark.parametrize("team", [1, 2])


def run(program: Callable[[Any], Any], team: int, seed: int = 0) -> list[Any]:
    faults = Faults(timeouts=True, bounded=True)
    with LocalWorld(RANKS, "sim", team_size=team, seed=seed, mode=("adversarial", "fair")[seed % 2], faults=faults) as world:
        return world.run(program)


def without(case: Quantised, missing: int) -> Quantised:
    """The case as the others see it."""
    sent = ([(t, s) for t, s in zip(case.tokens, case.scales, strict=True)] if case.call.quant_recipe is DispatchQuant.FWD
            else [ref.quantize_ds_fp8(t, case.call.round_scales) for t in case.tokens])
    how: dict[str, Any] = {"num_experts": case.cfg.num_experts, "max_dispatch_tokens_per_rank": case.cfg.max_dispatch_tokens_per_rank,
                           "scales": [raw(s) for _, s in sent], "masked": [missing]}
    rows = [raw(t) for t, _ in sent]
    case.received = (ref.ll_expert_major_dispatch(rows, case.ids, **how) if case.layout is Layout.EXPERT_MAJOR else
                     ref.ll_rank_major_dispatch(rows, case.ids, case.weights, **how))
    return case


@TEAMS
def test_recipes_and_layouts_in_turn(team: int) -> None:
    masked = dataclasses.replace(FORMS, enable_mask=True)
    for seed in range(2):
        cases, later = some_cases(10 * seed), [without(case, MISSING) for case in some_cases(10 * seed + 7)]

        def program(comm: Any, cases: list[Quantised] = cases, later: list[Quantised] = later) -> list[int] | None:
            with Group.create(comm, masked) as group:
                handles = {layout: group.create_handle(layout, num_topk=FORMS.num_topk) for layout in BOTH}
                for case in cases:
                    case.dispatch(comm.rank, handles[case.layout])
                    case.combine(comm.rank, handles[case.layout])
                group.check()
                if comm.rank == MISSING:
                    for _ in range(2 * len(later)):
                        comm.sit_out()
                    return None
                for case in later:
                    case.dispatch(comm.rank, handles[case.layout])
                    rows = torch.zeros((*case.received[comm.rank].tokens.shape[:2], FORMS.hidden), dtype=torch.bfloat16)
                    assert not handles[case.layout].combine(CombineInputs(rows), topk_weights=torch.ones(case.ids[comm.rank].shape)).any()
                group.check()
                return group.mask_query().tolist()

        assert run(program, team, seed) == [None if r == MISSING else [1, 1, 0, 1] for r in range(RANKS)]


@LAYOUTS
@TEAMS
@pytest.mark.parametrize("window", [False, True])
def test_nvfp4_rows_of_members_only(layout: Layout, team: int, window: bool) -> None:
    """With everybody; with a rank that is lost before the combine, then from the dispatch on. Rows are packed where they are, also in a window."""
    cfg = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=5, hidden=512, num_topk=2, enable_mask=True)
    ids = [random_routing(r, 5 - r, 2, 8, seed=r, dropped=0.1) for r in range(RANKS)]
    tokens, weights = [stamped_tokens(r, 5 - r, 512, torch.bfloat16) for r in range(RANKS)], [weights_like(i) for i in ids]
    by_rank, how = layout is Layout.RANK_MAJOR, {"num_experts": 8, "max_dispatch_tokens_per_rank": 5}

    def oracle(masked: list[int], lost: int) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]:
        want = (ref.ll_rank_major_dispatch(tokens, ids, weights, masked=masked, **how) if by_rank else
                ref.ll_expert_major_dispatch(tokens, ids, masked=masked, **how))
        scales = [row_scales(w.tokens) for w in want]
        size = want[0].tokens.shape[0] * want[0].tokens.shape[1]
        rows = [torch.where((w.rows >= 0) & (w.rows // size == lost), -1, w.rows) for w in want]
        return want, scales, ref.ll_nvfp4_combine([w.tokens for w in want], scales, rows, None if by_rank else weights)

    steps = [oracle([], -1), oracle([], MISSING), oracle([MISSING], -1)]

    def program(comm: Any) -> None:
        comm.fp4, rank = True, comm.rank
        with Group.create(comm, cfg) as group, group.create_handle(layout, num_topk=2) as handle:
            shape = steps[0][0][rank].tokens.shape
            windows = [group.create_window(2 * shape.numel()).memory.view(torch.bfloat16)[:shape.numel()].view(shape) for _ in range(2)]
            for number, (want, scales, sums) in enumerate(steps):
                if rank == MISSING and number == 2:
                    comm.sit_out()
                    comm.sit_out()
                    return
                given = DispatchInputs(tokens[rank], weights[rank] if by_rank else None)
                got = handle.dispatch(given, DispatchOutputs(windows[number % 2]) if window else None, topk_idx=ids[rank])
                counts = got.layout_info.src_rank_counters if by_rank else got.layout_info.expert_counters
                assert all(bits_equal(got.tokens[i, :n], want[rank].tokens[i, :n]) for i, n in enumerate(counts.tolist()))
                if rank == MISSING and number == 1:
                    comm.sit_out()
                    continue
                out = handle.combine(CombineInputs(got.tokens, scales=scales[rank]), CombineOutputs(topk_weights=weights[rank]), NVFP4)
                assert bits_equal(out, sums[rank]), f"rank {rank}, step {number}"
            group.check()

    for seed in range(3):
        run(program, team, seed)


@LAYOUTS
@TEAMS
def test_rows_anywhere_give_the_same_bits(layout: Layout, team: int) -> None:
    """From every place to every place, staged calls too; what a group without masks gives is wanted."""
    def rows_of(group: Group) -> tuple[Rank, Any, list[int], torch.Tensor, torch.Tensor]:
        mine = Rank(group, layout, tokens=(4, 0, 5, 3)[group.rank])
        got = mine.dispatch()
        counts, want_rows = mine.counts(got), got.tokens.clone()
        got.tokens.mul_(2)
        return mine, got, counts, want_rows, mine.combine(got.tokens).clone()

    def plain(comm: Any) -> Any:
        with Group.create(comm, config(num_experts=2 * RANKS)) as group:
            return rows_of(group)[2:]

    def program(comm: Any) -> None:
        with Group.create(comm, config(num_experts=2 * RANKS, enable_mask=True)) as group:
            mine, *_ = rows_of(group)
            counts, want_rows, want = single[comm.rank]

            def release() -> None:
                settled(comm, group)
                mine.dispatch()   # an operation after which the windows may be written again

            from_everywhere_to_everywhere(mine, counts, want_rows, want, False, release)

    with LocalWorld(RANKS, "sim") as world:
        single = world.run(plain)
    run(program, team)


@LAYOUTS
def test_a_window_under_a_mask_that_grows(layout: Layout) -> None:
    """Windows in turn, while a rank is lost; who comes late touches nobody's window."""
    def program(comm: Any) -> Any:
        with Group.create(comm, config(num_experts=2 * RANKS, enable_mask=True)) as group:
            mine = Rank(group, layout)
            windows = [mine.window() for _ in range(2)]
            sums = []
            for step in range(4):
                if comm.rank == MISSING and step in (1, 2):
                    comm.sit_out()
                    comm.sit_out()
                    continue
                got = mine.dispatch(DispatchOutputs(windows[step % 2]))
                if comm.rank == MISSING and step == 3:
                    with pytest.raises(EpMaskedError):
                        group.check()
                    comm.sit_out()
                    return None
                windows[1 - step % 2].copy_(got.tokens)
                sums.append(mine.combine(windows[1 - step % 2]).clone())
            group.check()
            assert bits_equal(sums[1], sums[2]) and bits_equal(sums[2], sums[3]) and group.mask_query().tolist() == [1, 1, 0, 1]
            return not bits_equal(sums[0], sums[1])

    for seed in range(3):
        assert True in run(program, 2, seed)
