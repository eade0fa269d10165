"""All schedules of high-throughput programs of two or three ranks with one warp each: right in every one, and the search finds what is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_ht_mutations import FACTORY, MUTANTS, one_bank
from test_mutations import mutant

from ncclep_py.config import Algorithm, GroupConfig, Layout, OverflowPolicy
from ncclep_py.simulator import SimulationError, Simulator
from ncclep_py.simulator import ht_ops as simulated
from ncclep_py.simulator.explore import Exhaustive, explore
from ncclep_py.simulator.ht_program import HTProgram

FLAT, EXPERT_MAJOR = Layout.FLAT, Layout.EXPERT_MAJOR


def toy(num_ranks: int, text: str, layout: Layout, budget: int = 0, **factories: Callable) -> Callable:
    """What `explore` builds; with a budget of 2 all tokens go to rank 0, which overflows."""
    def build(policy: Exhaustive) -> tuple[Simulator, Callable[[], None]]:
        sim = Simulator(num_ranks, policy=policy, blocks=1, warps=1)
        config = GroupConfig(num_experts=num_ranks, max_dispatch_tokens_per_rank=2, hidden=8, num_topk=1, num_slots=2,
                             algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=budget,
                             overflow_policy=OverflowPolicy.DROP if budget else OverflowPolicy.TRAP)
        p = HTProgram(sim, config, layout, [2, 1, 1][:num_ranks], alignment=2, **factories)
        for step in text.split():
            p.update(ids=[torch.zeros(n, 1, dtype=torch.int64) for n in p.num_tokens]) if budget and step[0] == "U" else p.play(step)
        return sim, p.check

    return build


@pytest.mark.parametrize("layout", [FLAT, EXPERT_MAJOR])
@pytest.mark.parametrize("num_ranks, text, budget", [(2, "U D X C B X G", 0), (2, "U U U D", 0), (2, "U0 U1 D0 D1 X0 C0 X1 C1", 0),
                                                     (2, "U D X C U D", 2), (3, "U D", 0)])
def test_every_schedule_is_right(num_ranks: int, text: str, budget: int, layout: Layout) -> None:
    found = explore(toy(num_ranks, text, layout, budget))
    assert found.complete and found.states > 20


@pytest.mark.parametrize("name", ["prepare: no wait_hits", "prepare: no publish_kept", "dispatch: no wait_heads", "dispatch: no wait_arrived",
                                  "combine: no wait_heads"])
def test_finds_broken_kernels(name: str) -> None:
    kernel, changes = MUTANTS[name]
    with pytest.raises((SimulationError, AssertionError)):
        explore(toy(2, "U D X C U D X C", FLAT, 2 if "kept" in name else 0, **{kernel: mutant(FACTORY[kernel], *changes)}), limit=20_000)


def test_finds_one_bank_of_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_hits", one_bank)
    with pytest.raises((SimulationError, AssertionError)):
        explore(toy(2, "U U U D", FLAT), limit=20_000)
