"""The litmus of tests/litmus.py on the simulator: no stale row and no rank left behind in any schedule, and what it relies on is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from litmus import LITMUS_PARAMETERS, make_litmus, run_litmus
from test_mutations import mutant

from ncclep_py import EpError, launch
from ncclep_py.simulator import SimulationError

ONE_BANK = ("(epoch + token & 1) * BANK", "0")
NO_WAIT = ("code = wait_arrived(window, arrived, rank, RANKS, epoch + token, local + FAIL, record, timeout)", "code = 0")
EARLY = ("if last_block(local + BLOCKS_DONE) == 1:\n                if warp_idx() == 0:", "if 1:\n                if warp_idx() == 0:")


def play(monkeypatch: pytest.MonkeyPatch, factory: Callable, seeds: int) -> None:
    monkeypatch.setitem(launch.KERNELS, "litmus", (factory, LITMUS_PARAMETERS))
    for seed in range(seeds):
        assert run_litmus(10, 5, backend="sim", warps=2, seed=seed, mode=("adversarial", "fair")[seed % 3 == 2]) == 0


def test_no_schedule_shows_a_stale_row(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, make_litmus, 40)


@pytest.mark.parametrize("change", [ONE_BANK, NO_WAIT, EARLY], ids=["one bank", "no wait", "arrived before the block has written"])
def test_what_it_relies_on_is_needed(monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]) -> None:
    with pytest.raises((AssertionError, SimulationError, EpError)):
        play(monkeypatch, mutant(make_litmus, change), 60)
