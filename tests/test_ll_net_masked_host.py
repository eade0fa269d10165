"""Groups with ``enable_mask`` over several teams through the public interface, in the simulator: survivors' results, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_masking import LAYOUTS, TOPK, Rank, config

from ncclep_py import CombineConfig, DispatchConfig, EpError, EpRefusedError, Group, Layout, LocalWorld
from ncclep_py.errors import Code, EpMaskedError
from ncclep_py.ll_net_masked_group import LLNetMaskedGroup
from ncclep_py.simulator import Faults


def run(program: Callable[[Rank], Any], team: int, ranks: int = 4, seed: int = 0, layout: Layout = Layout.EXPERT_MAJOR, **more: object) -> list[Any]:
    def body(comm: Any) -> Any:
        with Group.create(comm, config(ranks, **more)) as group:
            assert isinstance(group, LLNetMaskedGroup)
            return program(Rank(group, layout))

    with LocalWorld(ranks, "sim", team_size=team, seed=seed, mode="adversarial", faults=Faults(timeouts=True, bounded=True)) as world:
        return world.run(body)


def told(r: Rank) -> tuple[int, int]:
    """Code and rank of the async error."""
    error = r.group.async_error()
    assert (error is None) == (r.group.get_async_error() == 0)
    return int(r.group._notice_words[0]), int(r.group._notice_words[4])


TEAMS = pytest.mark.parametrize(("ranks", "team"), [(2, 1), (4, 1), (4, 2), (8, 2)])


@LAYOUTS
@TEAMS
def test_without_a_fault_it_is_the_plain_group(ranks: int, team: int, layout: Layout) -> None:
    def program(r: Rank) -> Any:
        good = []
        for step in range(3):
            r.dispatch(step)
            good.append(r.right(step, r.combine(step), ()))
        r.group.check()
        return good, r.active(), r.group.get_async_error()

    assert run(program, team, ranks, layout=layout) == [([True] * 3, [1] * ranks, 0)] * ranks


@TEAMS
@LAYOUTS
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_never_calls_is_masked_and_out_when_it_comes(ranks: int, team: int, seed: int, layout: Layout) -> None:
    missing = seed % ranks

    def program(r: Rank) -> Any:
        r.dispatch(0)
        good = [r.right(0, r.combine(0), ())]
        if r.rank == missing:
            r.sit_out(4)
        else:
            for step in (1, 2):
                r.dispatch(step)
                good.append(r.right(step, r.combine(step), [missing]))
            r.group.check()
        event = told(r)
        r.dispatch(3)   # the late rank tries
        if r.rank == missing:
            with pytest.raises(EpMaskedError):
                r.group.check()
            r.sit_out()
            return "out"
        good.append(r.right(3, r.combine(3), [missing]))
        return good, r.active(), event

    active = [int(r != missing) for r in range(ranks)]
    assert run(program, team, ranks, seed, layout) == ["out" if r == missing else ([True] * 4, active, (Code.MASKED, missing)) for r in range(ranks)]


@LAYOUTS
@TEAMS
@pytest.mark.parametrize("seed", range(2))
def test_mask_clean_takes_a_rank_back(ranks: int, team: int, seed: int, layout: Layout) -> None:
    missing = (seed + 1) % ranks

    def program(r: Rank) -> Any:
        r.dispatch(0)
        good = [r.right(0, r.combine(0), ())]
        if r.rank == missing:
            r.sit_out(2)
            if seed:
                r.dispatch(9)   # it learns that it is out
                with pytest.raises(EpMaskedError):
                    r.group.check()
        else:
            r.dispatch(1)
            good.append(r.right(1, r.combine(1), [missing]))
            if seed:
                r.dispatch(9)
        r.group.mask_clean()
        cleaned = r.active()
        r.group.error_clear()
        with pytest.raises(EpError, match="combine needs a dispatch"):   # slots are empty
            r.combine(0)
        for step in (3, 4):
            r.dispatch(step)
            good.append(r.right(step, r.combine(step), ()))
        r.group.check()
        return all(good), cleaned, r.active(), r.group.get_async_error()

    assert run(program, team, ranks, seed, layout) == [(True, [1] * ranks, [1] * ranks, 0)] * ranks


def test_mask_clean_leaves_out_who_does_not_come() -> None:
    def program(r: Rank) -> Any:
        if r.rank == 2:
            r.sit_out(3)
            with pytest.raises(EpMaskedError, match="rank 2 came too late to mask_clean"):
                r.group.mask_clean()
            good = True
        else:
            r.dispatch(0)
            r.combine(0)
            r.group.mask_clean()
            good = r.active() == [1, 1, 0, 1]
            r.sit_out()
        if r.rank == 2:
            r.sit_out(2)
        else:
            r.dispatch(1)
            good = good and r.right(1, r.combine(1), [2])
        r.group.mask_clean()   # rank 2 missed one
        r.dispatch(2)
        return good and r.right(2, r.combine(2), ()) and r.active() == [1, 1, 1, 1]

    for team in (1, 2):
        assert run(program, team) == [True] * 4


def test_a_late_rank_is_reported() -> None:
    def program(r: Rank) -> Any:
        if r.rank == 3:
            r.sit_out()
            r.dispatch(1)
            with pytest.raises(EpMaskedError):
                r.group.check()
            r.sit_out()
            return None
        r.dispatch(0)
        r.group.check()
        r.group.error_clear()
        r.dispatch(1)
        r.dispatch(2)
        r.group.check()
        return told(r)

    assert run(program, 2, num_slots=3) == [(Code.CAME_LATE, 3)] * 3 + [None]


def test_a_rank_that_the_program_masks_is_out() -> None:
    def program(r: Rank) -> Any:
        if r.rank == 1:
            r.sit_out(2)
            return None
        r.group.mask_update([1, 0, 1, 1])
        r.dispatch(0)
        return r.right(0, r.combine(0), [1]), r.active(), r.group.get_async_error()

    assert run(program, 2) == [None if r == 1 else (True, [1, 0, 1, 1], 0) for r in range(4)]


def test_masks_that_differ_become_their_union() -> None:
    def program(r: Rank) -> Any:
        if r.rank == 0:
            r.group.mask_update([1, 1, 1, 0])
        r.dispatch(0)
        if r.rank == 3:
            with pytest.raises(EpMaskedError):
                r.group.check()
            r.sit_out()
            return None
        return r.right(0, r.combine(0), [3]), r.active()

    assert run(program, 2) == [(True, [1, 1, 1, 0])] * 3 + [None]


def test_a_wrong_call_is_refused_on_all_and_the_next_is_right() -> None:
    def program(r: Rank) -> bool:
        with pytest.raises((TypeError, EpRefusedError)):
            r.handle.dispatch(torch.zeros(3, 16, dtype=torch.float16 if r.rank == 1 else torch.bfloat16), topk_idx=torch.zeros(3, TOPK).long())
            r.group.check()
        r.group._record_words[0] = 0
        r.dispatch(1)
        return r.right(1, r.combine(1), ())

    assert run(program, 2) == [True] * 4


def test_send_only_does_it_all_at_once() -> None:
    def program(r: Rank) -> bool:
        tokens, ids, weights = r.inputs(0)
        r.received = r.handle.dispatch(tokens, topk_idx=ids, config=DispatchConfig(send_only=True))
        r.handle.complete()
        out = r.handle.combine(r.received.tokens, topk_weights=weights, config=CombineConfig(send_only=True))
        r.handle.complete()
        return r.right(0, out, ())

    assert run(program, 2, num_staging_slots=2) == [True] * 4


def test_epochs_wrap() -> None:
    def program(r: Rank) -> Any:
        good = []
        for step in range(6):
            if step == 2:
                r.group.comm.barrier()
                r.group.start_at(2**32 - 3)
                r.group.comm.barrier()
            r.dispatch(step)
            good.append(r.right(step, r.combine(step), ()))
        return good

    assert run(program, 2) == [[True] * 6] * 4
