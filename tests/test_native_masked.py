"""Masks over teams with their CUDA operations, run on the CPU against a clock: a rank that stops anywhere is masked by all alike, in time."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("numba", reason="needs an extra cu12 or cu13")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from native.machine import Machine

from ncclep_py.config import GroupConfig
from ncclep_py.errors import Code
from ncclep_py.kernels.ll_net_mask_clean import make_ll_net_mask_clean
from ncclep_py.kernels.ll_net_masked_combine import make_ll_net_masked_combine
from ncclep_py.kernels.ll_net_masked_dispatch import make_ll_net_masked_dispatch
from ncclep_py.kernels.ll_net_masked_rank_major_dispatch import make_ll_net_masked_rank_major_dispatch
from ncclep_py.kernels.shape import PLAIN, Wire
from ncclep_py.simulator import Simulator
from ncclep_py.simulator.ll_net_masked_program import LLNetMaskedProgram, LLNetMaskedRankMajorProgram

PROGRAMS = {make_ll_net_masked_dispatch: LLNetMaskedProgram, make_ll_net_masked_rank_major_dispatch: LLNetMaskedRankMajorProgram}
LAYOUTS = pytest.mark.parametrize("dispatch", PROGRAMS, ids=["expert_major", "rank_major"])
COMBINES = 10
"""The step of "D X C D X C" that is the second combine, for which rows of the first are there."""
TIMEOUT = 1_000_000
"""Nanoseconds, i.e. steps: all threads of 4 ranks take some 2000 steps to look at a word once."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Machine:
    return Machine(tmp_path_factory.mktemp("native"))


def run(machine: Machine, tokens: Sequence[int], team: int, seed: int = 0, text: str = "D X C D X C", epoch: int = 1, blocks: int = 2,
        dies: tuple[int, int, int] = (-1, 0, 0), differ: int = 0, dispatch: Any = make_ll_net_masked_dispatch, wire: Wire = PLAIN,
        **config: Any) -> LLNetMaskedProgram:
    settings = {"num_experts": 2 * len(tokens), "max_dispatch_tokens_per_rank": max(*tokens, 1), "hidden": 16, "num_topk": 2,
                "timeout_ns": TIMEOUT} | config
    sim = Simulator(len(tokens), seed, "fair", blocks=blocks)
    sim.poison = False   # nobody tells it when a dispatch begins
    p = PROGRAMS[dispatch](sim, GroupConfig(**settings, enable_mask=True), tokens, team, seed=seed, epoch=epoch, wire=wire)
    if differ:
        p.local_word(0, p.words.mask)[:] = differ
    if wire is PLAIN:
        for n, part in enumerate(text.split(" | ")):
            if n:
                p.clean()
            p.play(part)
    else:
        p.dispatch_quantised(0)
        p.dispatch_quantised(0)
    if dies[0] >= 0:
        sim.scheduler.dead.add(dies[0])
    factories = {"dispatch": dispatch, "combine": make_ll_net_masked_combine, "clean": make_ll_net_mask_clean}
    machine.run(sim, team, factories, [p.shape] * len(tokens), seed, dies=dies)
    return p


@LAYOUTS
@pytest.mark.parametrize(("tokens", "team"), [((4, 2, 3, 4), 2), ((3, 4), 1), ((4, 1, 0, 2, 3, 4), 3)], ids=str)
def test_without_faults(machine: Machine, tokens: tuple[int, ...], team: int, dispatch: Any) -> None:
    for seed in range(2):
        run(machine, tokens, team, seed, dispatch=dispatch).check(everybody=True)


@LAYOUTS
@pytest.mark.parametrize("wire", [Wire(32, 64), Wire(512, 16, True)], ids=["forwarded", "quantised"])
def test_recipes(machine: Machine, dispatch: Any, wire: Wire) -> None:
    """Every received row and scale row is looked at."""
    sizes: dict[str, Any] = {"hidden": 512, "max_token_bytes": 0} if wire.quantise else {"hidden": 16, "max_token_bytes": 96}
    p = run(machine, (3, 1, 2, 3), 2, dispatch=dispatch, wire=wire, **sizes)
    assert not any(p.record(rank) for rank in p.ranks)


@pytest.mark.parametrize(("experts", "topk", "hidden", "blocks"), [(12, 4, 264, 3), (16, 3, 8, 5), (20, 3, 520, 1)])
def test_shapes(machine: Machine, experts: int, topk: int, hidden: int, blocks: int) -> None:
    for dispatch in PROGRAMS:
        p = run(machine, (9, 2, 12, 4), 2, 1, "D X C", blocks=blocks, num_experts=experts, num_topk=topk, hidden=hidden, dispatch=dispatch)
        p.check(everybody=True)


def test_epochs_wrap(machine: Machine) -> None:
    run(machine, (4, 2, 3, 4), 2, epoch=2**32 - 2).check(everybody=True)


@pytest.mark.parametrize("team", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_a_rank_that_stops_is_masked_by_all_alike(machine: Machine, seed: int, team: int) -> None:
    draw = random.Random(seed)
    dies = (seed % 4, draw.choice((0, 0, 2, 4, 4)), 0 if seed < 2 else draw.randrange(600_000))   # dispatch, between, combine
    p = run(machine, (4, 2, 3, 4), team, seed, dies=dies, dispatch=list(PROGRAMS)[seed // 4 % 2])
    p.check()
    assert {e.mask() for e in p.ended[2:] if e.what != p.ended[0].what} <= {0, 1 << dies[0]} and p.ended[-1].mask() == 1 << dies[0]
    survivors = [r for r in range(4) if r != dies[0]]
    assert {(n.code, n.peer) for n in map(p.notice, survivors) if n} == {(Code.MASKED, dies[0])}


@LAYOUTS
@pytest.mark.parametrize("team", [1, 2])
def test_mask_clean_takes_ranks_back(machine: Machine, team: int, dispatch: Any) -> None:
    """Rank 3 is masked by one rank, and learns it in its dispatch; after `mask_clean` all take part, and after a second one, too."""
    p = run(machine, (4, 2, 3, 4), team, text="D X C | D X C | D X C", differ=0b1000, dispatch=dispatch, epoch=2**32 - 4)
    p.check()
    assert [e.mask() for e in p.ended] == [0b1000] * 2 + [0] * 6 and all(e.members() == [0, 1, 2, 3] for e in p.ended[2:])


@pytest.mark.parametrize("seed", range(4))
def test_mask_clean_without_a_dead_rank_keeps_it_out(machine: Machine, seed: int) -> None:
    p = run(machine, (4, 2, 3, 4), 1 + seed % 2, seed, "D X C | D X C", dies=(seed, (0, 4, 6, 6)[seed], 3000 * seed))
    p.check()
    assert p.ended[-1].mask() == 1 << seed and p.ended[-1].members() == [r for r in range(4) if r != seed]


def test_masks_that_differ_become_their_union(machine: Machine) -> None:
    for team in (1, 2):
        p = run(machine, (4, 2, 3, 4), team, differ=0b1000)
        p.check()
        assert {e.mask() for e in p.ended} == {0b1000} and all(e.ranks[3][2] == Code.EXCLUDED for e in p.ended if 3 in e.ranks)


@pytest.mark.parametrize("old, new", [
    ("theirs |= __shfl_xor_sync(~0u, theirs, step)", "theirs |= 0"),
    ("if (far && dry) {", "if (far && lane() == 0) {"),
    ("returned + rank * returned_bytes + token", "returned + token"),
    ("seen |= __any_sync(~0u, out) ? 1u << rank : missing", "seen |= missing"),
    ("bool kept = host >= 0 && !(mask >> host & 1)", "bool kept = host >= 0"),
    ("atomicAdd(&got[source * local + e], 1u)", "atomicAdd(&got[e], 1u)"),
    ("u32 told = __ballot_sync(~0u, u32(word >> 32) == u32(epoch));", "u32 told = __ballot_sync(~0u, u32(word >> 32) != 0);")])
def test_mutants_are_found(tmp_path: Any, old: str, new: str) -> None:
    broken = Machine(tmp_path, old, new)
    with pytest.raises(AssertionError):
        for team in (1, 2):
            for seed in range(2):
                run(broken, (4, 2, 3, 4), team, seed).check(everybody=True)
                p = run(broken, (4, 2, 3, 4), team, seed, dies=(seed, 0, 0))
                p.check()
                assert p.ended[-1].mask() == 1 << seed
                run(broken, (4, 2, 3, 4), team, seed, dies=(seed, COMBINES, 0)).check()
                p = run(broken, (4, 2, 3, 4), team, seed, differ=0b1000)
                p.check()
                assert {e.mask() for e in p.ended} == {0b1000}
