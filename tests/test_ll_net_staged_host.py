"""Staged operations over several teams through the public interface, in the simulator: what one team does, its bits, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import test_staged_host as one_team
import torch
from test_nvfp4 import row_scales
from test_staged_host import PUSH, SEND, config, experts, inputs

from ncclep_py import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    CombineQuant,
    DispatchOutputs,
    EpRefusedError,
    Group,
    Layout,
    LocalWorld,
    ZeroCopyMode,
)
from ncclep_py import reference as ref
from ncclep_py.communicator import Communicator
from ncclep_py.ll_net_group import LLNetGroup
from ncclep_py.simulator import SimulationError
from ncclep_py.testing import bits_equal

SAME: dict[str, Callable[[], None]] = {
    "bits": one_team.test_same_bits_as_fused, "micro-batches": one_team.test_two_micro_batches_of_different_k_in_flight,
    "one slot, 1 staging slot": lambda: one_team.test_one_payload_slot_serves_two_micro_batches(1),
    "one slot, 2 staging slots": lambda: one_team.test_one_payload_slot_serves_two_micro_batches(2),
    "rank_major": one_team.test_rank_major_has_the_same_bits_as_fused,
    "quantised": lambda: one_team.test_quantised_rows_have_the_same_bits_as_fused(Layout.EXPERT_MAJOR),
    "quantised, rank_major": lambda: one_team.test_quantised_rows_have_the_same_bits_as_fused(Layout.RANK_MAJOR),
    "sentences": one_team.test_refusals_are_sentences_on_all_ranks,
    "refused by rank 0": lambda: one_team.test_a_refused_half_is_refused_everywhere_and_the_next_is_right(0),
    "refused by rank 2": lambda: one_team.test_a_refused_half_is_refused_everywhere_and_the_next_is_right(2),
    "staged against fused": one_team.test_a_staged_call_against_a_fused_one_is_named,
    "wrap": one_team.test_the_epoch_of_staging_slots_wraps,
}


def run(program: Callable[[Any], Any], team: int, ranks: int = 4, seed: int = 0) -> list[Any]:
    with LocalWorld(ranks, "sim", team_size=team, seed=seed, mode=("fair", "adversarial")[seed % 2]) as world:
        return world.run(program)


@pytest.mark.parametrize("what", SAME)
def test_as_in_one_team(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(one_team, "run", functools.partial(one_team.run, team_size=1))
    SAME[what]()


@pytest.mark.parametrize(("ranks", "team"), [(2, 1), (4, 2), (6, 2), (6, 3)])
def test_two_micro_batches_in_every_order(ranks: int, team: int) -> None:
    """Halves of two handles in the orders one team allows; between them fused pairs of a third."""
    counts = [(5, 0, 3, 4, 1, 2)[r] for r in range(ranks)]

    def program(comm: Communicator) -> None:
        rank = comm.rank
        with Group.create(comm, config(num_experts=6 if ranks != 4 else 8, num_slots=3)) as group:
            handles = [group.create_handle(Layout.EXPERT_MAJOR, num_topk=2) for _ in range(3)]
            for step in range(4):
                batches = [inputs(rank, 10 * step + b, counts[(rank + step + b) % ranks]) for b in range(3)]
                want = [ref.moe_layer(x, ids, w, [lambda rows, f=f: rows * f for e in range(ranks) for f in factors(group)]) for x, ids, w in batches]
                made = [h.dispatch(x, topk_idx=ids, config=SEND) for h, (x, ids, _) in zip(handles[:2], batches, strict=False)]
                if step % 2:
                    between(group, handles[2], batches[2], want[2])
                for b in ((0, 1), (1, 0))[step // 2]:
                    assert handles[b].complete() is made[b]
                    experts(made[b].tokens)
                outs = [h.combine(g.tokens, topk_weights=w, config=PUSH) for h, g, (_, _, w) in zip(handles, made, batches, strict=False)]
                if not step % 2:
                    between(group, handles[2], batches[2], want[2])
                for b in ((1, 0), (0, 1))[step % 2]:
                    handles[b].complete()
                assert all(bits_equal(a, b) for a, b in zip(outs, want, strict=False))
            group.check()

    def factors(group: Group) -> list[int]:
        return [1 + local % 3 for local in range(group.map.num_local_experts)]

    def between(group: Group, handle: Any, batch: Any, want: torch.Tensor) -> None:
        x, ids, w = batch
        got = handle.dispatch(x, topk_idx=ids)
        experts(got.tokens)
        assert bits_equal(handle.combine(got.tokens, topk_weights=w), want)

    for seed in range(2):
        run(program, team, ranks, seed)


def test_plain_tensors_go_by_way_of_the_slot() -> None:
    """A plain dispatch output is filled by complete; a plain combine input is copied into the slot first, a second one after all puts have landed."""
    def program(comm: Communicator) -> None:
        with Group.create(comm, config(num_experts=8)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2)
            x, ids, w = inputs(comm.rank, 3)
            mine = torch.zeros(2, 4 * 5, 32, dtype=torch.bfloat16)
            got = handle.dispatch(x, DispatchOutputs(mine), topk_idx=ids, config=SEND)
            assert got.tokens is mine and not mine.any()
            handle.complete()
            assert mine.any() == (comm.rank < 3)   # no token wants experts 6 and 7
            for factor in (2, 3, 5):
                out = torch.zeros_like(x)
                assert handle.combine(CombineInputs(mine * factor), CombineOutputs(out, w), PUSH) is out
                handle.complete()
                assert bits_equal(out, ref.moe_layer(x, ids, w, [lambda rows, f=factor: rows * f] * 8))
            assert bits_equal(handle.combine(mine, topk_weights=w), ref.moe_layer(x, ids, w, [lambda rows: rows] * 8))
            group.check()

    for seed in range(3):
        run(program, 2, seed=seed)


def test_zero_copy_refuses_what_would_have_to_be_copied() -> None:
    def program(comm: Communicator) -> None:
        with Group.create(comm, config(num_experts=8, zero_copy=ZeroCopyMode.ON)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2)
            x, ids, w = inputs(comm.rank, 3)
            got = handle.dispatch(x, topk_idx=ids)
            with pytest.raises((ValueError, EpRefusedError), match="inputs.tokens must be left out or lie in a window|refused the call"):
                handle.combine(got.tokens.clone() if comm.rank == 2 else got.tokens, topk_weights=w, config=PUSH)
            out = handle.combine(got.tokens, topk_weights=w, config=PUSH)
            handle.complete()
            group.check()
            assert bits_equal(out, ref.moe_layer(x, ids, w, [lambda rows: rows] * 8))

    run(program, 2)


def again(seed: int) -> None:
    """Combines in halves whose rows are copied into the slot, or packed there, while those of the one before may still be on their way."""
    def program(comm: Communicator) -> None:
        comm.fp4 = True
        with Group.create(comm, config(num_experts=8, hidden=1024)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2)
            _, ids, w = inputs(comm.rank, seed, 5)
            x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
            plain = handle.dispatch(x, topk_idx=ids).tokens.clone()
            scales = row_scales(plain)
            packed = CombineInputs(plain, scales=scales)
            want = handle.combine(packed, topk_weights=w, config=CombineConfig(quant_recipe=CombineQuant.NVFP4))
            got = handle.dispatch(x, config=SEND)
            handle.complete()
            out = handle.combine(got.tokens, topk_weights=w, config=PUSH)
            handle.complete()
            twice = handle.combine(plain * 2, topk_weights=w, config=PUSH)
            handle.complete()
            assert bits_equal(twice, out * 2)
            again = handle.combine(CombineInputs(plain, scales=scales), topk_weights=w, config=CombineConfig(quant_recipe=CombineQuant.NVFP4))
            group.check()
            assert bits_equal(again, want)

    run(program, 1 + seed % 2, seed=seed)


def test_what_is_still_on_its_way_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        again(seed)
    monkeypatch.setattr(LLNetGroup, "over_network", False)
    with pytest.raises((SimulationError, AssertionError)):
        for seed in range(20):
            again(seed)
