"""Rows in windows of the caller, in plain tensors, and in the group's window, in the simulator: same bits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ncclep_py import (
    CombineConfig,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    EpError,
    EpRefusedError,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
)
from ncclep_py.config import ZeroCopyMode
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

EXPERTS, HIDDEN, TOPK, MOST, RANKS = 6, 32, 2, 5, 3
LAYOUTS = pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR], ids=lambda layout: layout.name.lower())


def config(**more: object) -> GroupConfig:
    return GroupConfig(**{"num_experts": EXPERTS, "max_dispatch_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOPK} | more)


class Rank:
    """One rank's inputs and calls."""

    def __init__(self, group: Group, layout: Layout, seed: int = 1, tokens: int = 4) -> None:
        self.group, self.rank_major = group, layout is Layout.RANK_MAJOR
        ranks, experts = group.num_ranks, group.config.num_experts
        ids = random_routing(group.rank, tokens, TOPK, experts, seed=seed, dropped=0.2)
        self.x = stamped_tokens(group.rank, tokens, group.config.hidden, torch.bfloat16, seed=seed)
        weights = weights_like(ids, seed=seed + group.rank)
        self.weights = weights.nan_to_num() if self.rank_major else weights
        self.handle = group.create_handle(layout, ids)
        self.shape = (ranks, MOST, group.config.hidden) if self.rank_major else (experts // ranks, ranks * MOST, group.config.hidden)

    def dispatch(self, made: DispatchOutputs | None = None, how: DispatchConfig | None = None) -> DispatchOutputs:
        return self.handle.dispatch(DispatchInputs(self.x, self.weights if self.rank_major else None), made, config=how)

    def combine(self, rows: torch.Tensor, out: torch.Tensor | None = None, how: CombineConfig | None = None) -> torch.Tensor:
        return self.handle.combine(rows, CombineOutputs(out, None if self.rank_major else self.weights), how)

    def window(self) -> torch.Tensor:
        planes, rows, width = self.shape
        size = 2 * planes * rows * width
        return self.group.create_window(size).memory[:size].view(torch.bfloat16).view(self.shape)

    def counts(self, got: DispatchOutputs) -> list[int]:
        found = got.layout_info.src_rank_counters if self.rank_major else got.layout_info.expert_counters
        return found.tolist()


def from_everywhere_to_everywhere(mine: Rank, counts: list[int], want_rows: torch.Tensor, want: torch.Tensor, staged: bool,
                                  release: Callable[[], object]) -> None:
    """Dispatch into windows, a plain tensor and the slot, and combine from each; `release`: after it the windows may be written again."""
    send, push = DispatchConfig(send_only=staged), CombineConfig(send_only=staged)
    places = {"window": mine.window(), "other window": mine.window(), "plain": torch.zeros(mine.shape, dtype=torch.bfloat16)}
    for received in (*places, "slot"):
        for computed in (*places, "slot"):
            for rows in places.values():
                rows.fill_(-3)
            mine.group.comm.barrier()
            made = None if received == "slot" else DispatchOutputs(places[received])
            got = mine.dispatch(made, send)
            mine.handle.complete()
            assert made is None or got.tokens is places[received]
            for plane, n in enumerate(counts):
                assert bits_equal(got.tokens[plane, :n], want_rows[plane, :n]), received
                assert received == "slot" or bool((got.tokens[plane, n:] == -3).all()), f"{received}: unused rows were touched"
            rows = mine.handle.expert_rows() if computed == "slot" else places[computed]
            rows.copy_(got.tokens * 2)
            out = mine.combine(rows, how=push)
            mine.handle.complete()
            assert bits_equal(out, want), (received, computed)
            release()


def run(program: object, **world: object) -> list:
    with LocalWorld(RANKS, "sim", **world) as w:
        return w.run(program)


@LAYOUTS
@pytest.mark.parametrize("staged", [False, True])
def test_rows_anywhere_give_the_same_bits(layout: Layout, staged: bool) -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config(num_staging_slots=4 if staged else 0)) as group:
            mine = Rank(group, layout, tokens=(4, 0, 5)[comm.rank])
            first = mine.dispatch()
            counts, want_rows = mine.counts(first), first.tokens.clone()
            first.tokens.mul_(2)
            want = mine.combine(first.tokens).clone()
            from_everywhere_to_everywhere(mine, counts, want_rows, want, staged, comm.barrier)   # peers may have been reading my window
            group.check()

    for seed in range(2):
        run(program, seed=seed, mode="adversarial")


def test_a_window_is_written_and_read_by_peers_without_a_copy() -> None:
    """The slot keeps what it held: nothing went through it."""
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            mine = Rank(group, Layout.EXPERT_MAJOR)
            rows, slot = mine.window(), group.window.memory[group.map.slot(0): group.map.slot(0) + group.map.slot_bytes]
            mine.dispatch()
            before = slot.clone()
            got = mine.dispatch(DispatchOutputs(rows))
            mine.combine(got.tokens)
            assert torch.equal(slot, before) and bool(rows.any())
            group.check()

    run(program)


def test_modes() -> None:
    def program(comm: object) -> None:
        for mode in ZeroCopyMode:
            with Group.create(comm, config(zero_copy=mode)) as group:
                mine = Rank(group, Layout.EXPERT_MAJOR)
                rows, slot = mine.window(), group.window.memory[group.map.slot(0): group.map.slot(0) + group.map.slot_bytes]
                got = mine.dispatch(DispatchOutputs(rows))
                assert bool(slot.any()) == (mode is ZeroCopyMode.OFF) and bool(rows.any())
                want = mine.combine(got.tokens)
                assert bits_equal(mine.combine(mine.dispatch().tokens), want)
                plain = torch.zeros_like(rows)
                if mode is ZeroCopyMode.ON:
                    with pytest.raises(ValueError, match=r"outputs.tokens must be left out or lie in a window of Group.create_window, "
                                                         r"since zero_copy is ON; got a plain tensor"):
                        mine.dispatch(DispatchOutputs(plain))
                    mine.dispatch()
                    with pytest.raises(ValueError, match="inputs.tokens must be left out or lie in a window"):
                        mine.combine(plain)
                else:
                    assert bits_equal(mine.combine(mine.dispatch(DispatchOutputs(plain)).tokens), want)
                group.check()
        with pytest.raises(ValueError, match="zero_copy must be one of ZeroCopyMode.AUTO"):
            config(zero_copy=7)

    run(program)


@pytest.mark.parametrize("who", [0, 2])
def test_refusals(who: int) -> None:
    """What one rank does wrong is a sentence there and a refusal elsewhere; the next call is right."""
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            mine = Rank(group, Layout.EXPERT_MAJOR)
            want = mine.combine(mine.dispatch().tokens).clone()
            window = group.create_window(4096)
            good = window.memory[:window.num_bytes]
            shifted = good[512: 512 + want.nbytes * 0 + 2 * 2 * RANKS * MOST * HIDDEN].view(torch.bfloat16).view(mine.shape)
            inside = good[: want.nbytes].view(torch.bfloat16).view(want.shape)
            in_slot = group.window.memory[group.map.slot(0):][: want.nbytes].view(torch.bfloat16).view(want.shape)
            for wrong, text in ((lambda: mine.dispatch(DispatchOutputs(shifted)), "outputs.tokens must begin with the first byte of its window, "
                                                                                    "got byte 512 of window 0; create a window for each tensor"),
                                (lambda: mine.combine(mine.handle.expert_rows(), in_slot), "outputs.tokens must not lie in a window"),
                                (lambda: mine.combine(mine.handle.expert_rows(), inside), "outputs.tokens must not lie in a window")):
                mine.dispatch()
                with pytest.raises((ValueError, EpRefusedError)) as raised:
                    if comm.rank == who:
                        wrong()
                    elif "begin" in text:
                        mine.dispatch()
                    else:
                        mine.combine(mine.handle.expert_rows())
                assert text in str(raised.value) if comm.rank == who else f"rank {who} refused the call" in str(raised.value)
                assert bits_equal(mine.combine(mine.dispatch().tokens), want)
            group.check()

    run(program)


def test_ranks_must_give_the_same_window() -> None:
    def program(comm: object) -> str:
        with Group.create(comm, config()) as group:
            mine = Rank(group, Layout.EXPERT_MAJOR)
            windows = [mine.window() for _ in range(2)]
            mine.dispatch(DispatchOutputs(windows[comm.rank % 2]))
            with pytest.raises(EpError) as raised:
                group.check()
            return str(raised.value)

    assert "slot 1 here, 2 there" in run(program)[0]


def test_windows_of_different_sizes_and_bad_sizes() -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            with pytest.raises(ValueError, match="num_bytes must be the same on all ranks: rank 0 has 64, rank 1 has 65, rank 2 has 66"):
                group.create_window(64 + comm.rank)
            for bad in (0, -1, True, 1.5):
                with pytest.raises(ValueError, match="num_bytes must be an int of at least 1"):
                    group.create_window(bad)
        with pytest.raises(EpError, match="closed"):
            group.create_window(64)

    run(program)


def test_tokens_in_a_window_are_refused() -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            mine = Rank(group, Layout.EXPERT_MAJOR)
            x = mine.x
            mine.x = group.window.memory[group.map.slot(0):][: x.nbytes].view(torch.bfloat16).view(x.shape)
            with pytest.raises(ValueError, match="tokens must not lie in a window"):
                mine.dispatch()
            mine.x = x
            mine.dispatch()
            group.check()

    run(program)


@LAYOUTS
def test_plain_outputs_of_a_recipe_get_the_received_rows_only(layout: Layout) -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config(hidden=512)) as group:
            mine = Rank(group, layout)
            quantise = DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4)
            want = mine.dispatch(how=quantise)
            tokens, scales = want.tokens.clone(), want.scales.clone()
            rows, beside = torch.zeros_like(tokens), torch.full_like(scales, -3)
            got = mine.dispatch(DispatchOutputs(rows, scales=beside), quantise)
            for plane, n in enumerate(mine.counts(got)):
                assert torch.equal(rows[plane, :n].view(torch.uint8), tokens[plane, :n].view(torch.uint8))
                assert bits_equal(beside[plane, :n], scales[plane, :n]) and bool((beside[plane, n:] == -3).all())
            group.check()

    run(program)
