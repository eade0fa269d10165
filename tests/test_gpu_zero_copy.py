"""Rows in windows of the caller, in plain tensors and in the group's window, on a GPU: same bits everywhere. ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from ncclep_py import (
    CombineConfig,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
)
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
RANKS, EXPERTS, MOST, HIDDEN, TOPK = 4, 16, 32, 1024, 4


def config(**more: object) -> GroupConfig:
    return GroupConfig(**{"num_experts": EXPERTS, "max_dispatch_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOPK, "max_num_sms": 8,
                          "timeout_ns": 5_000_000_000} | more)


class Rank:
    """One rank's inputs and calls."""

    def __init__(self, group: Group, layout: Layout, tokens: int) -> None:
        self.group, self.rank_major = group, layout is Layout.RANK_MAJOR
        ids = random_routing(group.rank, tokens, TOPK, EXPERTS, seed=1, dropped=0.2)
        weights = weights_like(ids, seed=group.rank)
        self.x, self.weights = stamped_tokens(group.rank, tokens, HIDDEN, torch.bfloat16).cuda(), weights.nan_to_num().cuda()
        self.handle = group.create_handle(layout, ids.cuda())
        self.shape = (RANKS, MOST, HIDDEN) if self.rank_major else (EXPERTS // RANKS, RANKS * MOST, HIDDEN)

    def dispatch(self, made: DispatchOutputs | None = None, how: DispatchConfig | None = None) -> DispatchOutputs:
        return self.handle.dispatch(DispatchInputs(self.x, self.weights if self.rank_major else None), made, config=how)

    def combine(self, rows: torch.Tensor, how: CombineConfig | None = None) -> torch.Tensor:
        return self.handle.combine(rows, CombineOutputs(topk_weights=None if self.rank_major else self.weights), how)

    def window(self) -> torch.Tensor:
        size = 2 * self.shape[0] * self.shape[1] * HIDDEN
        return self.group.create_window(size).memory[:size].view(torch.bfloat16).view(self.shape)

    def counts(self, got: DispatchOutputs) -> list[int]:
        found = got.layout_info.src_rank_counters if self.rank_major else got.layout_info.expert_counters
        return found.tolist()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_rows_anywhere_give_the_same_bits(layout: Layout, staged: bool) -> None:
    send, push = DispatchConfig(send_only=staged), CombineConfig(send_only=staged)

    def program(comm: object) -> None:
        only = Layout.RANK_MAJOR if layout is Layout.RANK_MAJOR else Layout.UNSET
        with Group.create(comm, config(num_staging_slots=4 if staged else 0, slot_layout=only)) as group:
            mine = Rank(group, layout, (MOST, 0, 5, 17)[comm.rank])
            first = mine.dispatch()
            counts, want_rows = mine.counts(first), first.tokens.clone()
            first.tokens.mul_(2)
            want = mine.combine(first.tokens).clone()
            places = {"window": mine.window(), "other window": mine.window(), "plain": torch.zeros(mine.shape, dtype=torch.bfloat16, device="cuda")}
            for received in (*places, "slot"):
                for computed in (*places, "slot"):
                    torch.cuda.synchronize()
                    comm.barrier()   # peers may have been reading my windows
                    for rows in places.values():
                        rows.fill_(-3)
                    got = mine.dispatch(None if received == "slot" else DispatchOutputs(places[received]), send)
                    mine.handle.complete()
                    for plane, n in enumerate(counts):
                        assert bits_equal(got.tokens[plane, :n], want_rows[plane, :n]), received
                        assert received == "slot" or bool((got.tokens[plane, n:] == -3).all()), f"{received}: unused rows were touched"
                    rows = mine.handle.expert_rows() if computed == "slot" else places[computed]
                    rows.copy_(got.tokens * 2)
                    out = mine.combine(rows, push)
                    mine.handle.complete()
                    group.check()
                    assert bits_equal(out, want), (received, computed, first_difference(out, want))

    with LocalWorld(RANKS, "nccl") as world:
        world.run(program)


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_plain_outputs_of_a_recipe(layout: Layout) -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            mine, quantise = Rank(group, layout, MOST - comm.rank), DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4)
            want = mine.dispatch(how=quantise)
            tokens, scales = want.tokens.clone(), want.scales.clone()
            rows, beside = torch.zeros_like(tokens), torch.full_like(scales, -3)
            got = mine.dispatch(DispatchOutputs(rows, scales=beside), quantise)
            for plane, n in enumerate(mine.counts(got)):
                assert torch.equal(rows[plane, :n].view(torch.uint8), tokens[plane, :n].view(torch.uint8))
                assert bits_equal(beside[plane, :n], scales[plane, :n]) and bool((beside[plane, n:] == -3).all())
            group.check()

    with LocalWorld(RANKS, "nccl") as world:
        world.run(program)


def test_grids_that_cannot_run_at_once_are_refused() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def program(comm: object) -> str:
        with pytest.raises(ValueError, match="together|what this rank may use") as raised:
            Group.create(comm, config(max_num_sms=sms // RANKS + 1))
        with Group.create(comm, config(max_num_sms=sms // RANKS + (1 if comm.rank == 0 else -1))) as group:   # unequal, but they fit
            mine = Rank(group, Layout.EXPERT_MAJOR, 8)
            assert bits_equal(mine.combine(mine.dispatch().tokens), mine.combine(mine.dispatch().tokens))
            group.check()
        return str(raised.value)

    with LocalWorld(RANKS, "nccl", devices=[0] * RANKS) as world:
        assert all(f"but it has {sms} multiprocessors" in text for text in world.run(program))
