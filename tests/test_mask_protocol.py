"""Groups with ``enable_mask`` in the simulator: dead, slow and late ranks under many schedules, with time-outs as the scheduler's choice.

In every schedule the members of every operation agree on mask and epoch, and their results are the oracle's under that mask.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Mapping, Sequence

import pytest

from ncclep_py.config import GroupConfig
from ncclep_py.errors import Code
from ncclep_py.signature import Signature
from ncclep_py.simulator import Faults, Simulator
from ncclep_py.simulator.masked_program import MaskedProgram, MaskedRankMajorProgram

PROGRAMS = (MaskedProgram, MaskedRankMajorProgram)
LAYOUTS = pytest.mark.parametrize("program", PROGRAMS, ids=["expert_major", "rank_major"])
TEXTS = ("D X C D X C", "D D X C C", "D0 D1 X0 C0 D0 X1 C1")


def faults_of(draw: random.Random, ranks: int, kind: str) -> Faults:
    """What goes wrong in one schedule."""
    who = draw.randrange(ranks)
    other = (who + 1) % ranks
    what = {"late": dict(late={who: draw.randrange(10)}), "dead": dict(dead={who: draw.randrange(400)}),
            "slow": dict(slow={who: draw.randrange(400)}),
            "two dead": dict(dead={who: draw.randrange(300), other: draw.randrange(300)}),
            "slow and late": dict(slow={who: draw.randrange(300)}, late={other: draw.randrange(8)}),
            "slow and dead": dict(slow={who: draw.randrange(300)}, dead={other: draw.randrange(300)})}[kind]
    return Faults(timeouts=True, bounded=True, **what)


KINDS = ("late", "dead", "slow", "two dead", "slow and late", "slow and dead")


def play(seed: int, kind: str = "", ranks: int = 0, effects: Mapping[str, Sequence[str]] | None = None, blocks: int = 2, rush: float | None = None,
         **factories: object) -> MaskedProgram:
    """One schedule of a small group with a fault, checked."""
    draw = random.Random(seed)
    ranks = ranks or draw.choice((3, 3, 4))
    kind = kind or draw.choice(KINDS)
    sim = Simulator(ranks, seed, ("adversarial", "fair")[seed % 2], blocks=blocks, effects=effects, faults=faults_of(draw, ranks, kind))
    sim.policy.rush = draw.choice((0, 0.002, 0.02, 0.1)) if rush is None else rush
    p = group(sim, seed, **factories)
    p.play(TEXTS[seed % 3])
    sim.run()
    p.check()
    return p


def group(sim: Simulator, seed: int = 0, program: type[MaskedProgram] | None = None, **more: object) -> MaskedProgram:
    """A small group; of either layout by `seed`, if `program` does not say which."""
    config = GroupConfig(num_experts=2 * sim.num_ranks, max_dispatch_tokens_per_rank=6, hidden=16, num_topk=2, num_slots=2, enable_mask=True)
    return (program or PROGRAMS[seed // 2 % 2])(sim, config, (5, 3, 4, 2, 0)[:sim.num_ranks], seed=seed, **more)


@LAYOUTS
@pytest.mark.parametrize("kind", KINDS)
def test_members_agree_and_have_the_oracles_bits(kind: str, program: type[MaskedProgram]) -> None:
    masked = sum(any(e.members() and e.mask() for e in play(seed, kind, program=program).ended) for seed in range(12))
    assert masked > (0 if kind.startswith("slow") else 2)


@LAYOUTS
@pytest.mark.parametrize("mode", ["fair", "adversarial"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_without_faults_nobody_is_masked(ranks: int, mode: str, program: type[MaskedProgram]) -> None:
    for seed in range(4):
        p = group(Simulator(ranks, seed, mode), seed, program)
        p.play(TEXTS[seed % 3])
        p.sim.run()
        p.check(everybody=True)
        assert all(p.notice(r) is None and not e.mask() for r in p.ranks for e in p.ended)


def test_epochs_wrap() -> None:
    for seed in range(12):
        sim = Simulator(3, seed, "adversarial", faults=Faults(late={seed % 3: seed % 8}, timeouts=True, bounded=True))
        p = group(sim, seed, epoch=(1 << 32) - 2)
        p.play(TEXTS[0])
        p.clean()
        p.play("D X C")
        sim.run()
        p.check()


def test_unequal_grids() -> None:
    for seed in range(12):
        sim = Simulator(3, seed, ("adversarial", "fair")[seed % 2], faults=Faults(dead={seed % 3: 37 * seed % 300}, timeouts=True, bounded=True))
        p = group(sim, seed, grids=[(1, 1), (3, 2), (2, 3)])
        p.play(TEXTS[0])
        sim.run()
        p.check()


def test_who_is_masked_is_told() -> None:
    told = collections.Counter()
    for seed in range(30):
        p = play(seed, "dead", ranks=3)
        last = [e for e in p.ended if e.members()][-1]
        for rank in last.members():
            notice = p.notice(rank)
            assert (notice is not None) == bool(last.mask())
            if notice is not None:
                assert notice.code == Code.MASKED and last.mask() >> notice.peer & 1 and notice.rank == rank
                told[notice.peer] += 1
    assert set(told) == {0, 1, 2}


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_that_sleeps_past_the_timeout_is_readmitted(seed: int) -> None:
    late = seed % 3
    sim = Simulator(3, seed, ("adversarial", "fair")[seed // 3 % 2], faults=Faults(late={late: seed % 7}, timeouts=True, bounded=True))
    p = group(sim, seed)
    p.play(TEXTS[0])
    sim.run()
    p.check()
    p.ended.clear()
    sim.faults, sim.scheduler.faulty = Faults(), False
    p.clean()
    p.play(TEXTS[0])
    sim.run()
    p.check(everybody=True)
    assert {e.mask() for e in p.ended} == {0}


def test_mask_clean_without_a_dead_rank_in_it_keeps_it_masked() -> None:
    for seed in range(20):
        sim = Simulator(3, seed, "adversarial", faults=Faults(dead={seed % 3: 0}, timeouts=True, bounded=True))
        p = group(sim, seed)
        p.play("D X C")
        clean = p.clean()
        p.play("D X C")
        sim.run()
        p.check()
        assert clean.mask() == 1 << seed % 3 and clean.members() == [r for r in range(3) if r != seed % 3]


def agree_by_epoch(p: MaskedProgram) -> None:
    """A rank that missed a mask_clean is out of step with the others' program, but at every epoch there is one group only."""
    at = collections.defaultdict(dict)
    for ended in p.ended:
        for rank in ended.members():
            mask, epoch, _ = ended.ranks[rank]
            at[epoch][rank] = mask
    for epoch, masks in at.items():
        assert len(set(masks.values())) == 1, f"epoch {epoch}, mask by rank: {masks}"


def test_ranks_that_come_to_mask_clean_late_or_die_in_it() -> None:
    """Whoever ends a mask_clean as a member agrees with the others about who is one, and about the epoch."""
    for seed in range(60):
        draw = random.Random(seed)
        what = {"late": {seed % 3: draw.randrange(14)}} if seed % 2 else {"dead": {seed % 3: draw.randrange(300)}}
        sim = Simulator(3, seed, ("adversarial", "fair")[seed // 2 % 2], faults=Faults(timeouts=True, bounded=True, **what))
        p = group(sim, seed)
        p.play("D X C")
        p.clean()
        p.play("D X C")
        p.clean()
        p.play("D X C")
        sim.run()
        agree_by_epoch(p)


def test_a_refused_call_fails_everywhere_whatever_dies() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        sim = Simulator(3, seed, ("adversarial", "fair")[seed % 2], faults=Faults(dead={2: draw.randrange(60)}, timeouts=True, bounded=True))
        p = group(sim, seed)
        p.dispatch(ranks=[0, 2])
        p.ended.pop()
        p.dispatch(ranks=[1], status=1 << 24 | 7)
        p.ended.pop()
        after = p.dispatch()
        sim.run()
        ended = p.ended[-1]
        assert ended.what is after and {0, 1} <= set(ended.members())
        ended.mask()   # the ranks that live agree, also about the epoch: the refused operation took the same number of attempts


def test_a_different_operation_is_named() -> None:
    p = group(Simulator(3, 1, "adversarial"))
    p.dispatch(0, ranks=[0, 2])
    p.dispatch(1, ranks=[1])
    p.sim.run()
    codes = {rank: code for e in p.ended for rank, (_, _, code) in e.ranks.items()}
    assert codes == dict.fromkeys(range(3), Code.MISMATCH)
    assert [p.epoch(r) for r in p.ranks] == [2, 2, 2]


def test_a_stall_beyond_the_model_is_reported() -> None:
    """A rank stalls inside a kernel for longer than the timeouts and writes when it goes on: whose results are wrong has the async error."""
    late, wrong = 0, 0
    for seed in range(150):
        draw = random.Random(seed)
        who = draw.randrange(3)
        sim = Simulator(3, seed, "fair", faults=Faults(slow={who: draw.randrange(40, 130)}, timeouts=True))
        sim.memory.tolerant, sim.policy.rush = True, 0.05
        p = group(sim, seed)
        p.play("D X C D X C")
        sim.run()
        p.play("D X C")   # members look at the words of masked ranks in every operation
        sim.run()
        p.check_agreement()
        told = {n.code for n in map(p.notice, p.ended[-1].members()) if n}
        late += Code.WROTE_LATE in told
        try:
            p.check()
        except AssertionError:
            wrong += 1
            assert Code.WROTE_LATE in told, f"seed {seed}: {told}"
    assert late > 0


def test_signature_of_mask_clean_is_its_own() -> None:
    assert Signature.unpack(Signature(6, 0, 0, 0, 0, 2, 1).pack()).kind == 6
