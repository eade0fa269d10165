"""Every effect of HIGH_THROUGHPUT operations over several teams is needed: without it, or weaker, some schedule turns red.

Most show in ``test_ht_net_mutations``' schedules. The rest needs puts that land after the operation they belong to was given up, or a rank that
stands still while others go on: these are here, and in ``test_ht_net_lemmas``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_ht_net_lemmas as lemmas
from test_ht_net_mutations import play, play_failure
from test_ht_net_mutations import program as group
from test_mutations import effect_mutants

from ncclep_py.errors import Code
from ncclep_py.kernels.ops import HT_NET_OPS
from ncclep_py.simulator import Faults, SimulationError

EFFECTS = {name: effects for name, effects in effect_mutants(HT_NET_OPS, HT_NET_OPS).items() if "st." not in name or not name.endswith(" net")}
"""Without how strong a put is: that is the network's."""
SEEDS = 24
FULL = (5, 8)
"""Seeds with ranks that get more rows than they have room for."""


# ---- schedules -------------------------------------------------------------------------------------------------------------------
def stands_still(seed: int, **how: Any) -> None:
    """A rank stops anywhere; others give up on it, and on operations after that, before it goes on."""
    draw = random.Random(seed)
    who = draw.randrange(2 if seed % 2 else 4)
    p = group(seed, Faults(slow={who: draw.randrange(400)}, timeouts=True), budget=(0, 5)[seed % 3 == 2], **how)
    p.play("U D C B G D C")
    p.sim.run()


def lands_late(seed: int, **how: Any) -> None:
    """Gradients of a combine that was given up land just before headers come to the same places, and are put from the same places."""
    p, draw = lemmas.program(seed, **how), random.Random(seed)
    p.play("U D X C B X")
    p.sim.run()
    p.sim.scheduler.haste = draw.choice((0.02, 0.3, 0.7, 0.97))
    lemmas.disturb(p, "G", draw.choice(("slow", "late")), draw.randrange(p.sim.num_ranks), draw)
    p.play("G")
    p.sim.run()
    p.network.slow_links.clear()
    p.play("D B")
    p.sim.run()
    p.checks.clear()
    for rank in p.ranks:
        p.record(rank)
    p.play("U D X C B X G")
    p.sim.run()
    assert [p.record(rank) for rank in p.ranks] == [None] * len(p.ranks)
    p.check()


def tells_on_whom(seed: int, **how: Any) -> bool:
    """One of three teams cannot enter since the link from another is slow, and tells the third so. Whether the third heard it."""
    draw = random.Random(seed)
    p = lemmas.program(12 * (seed // 2) + (6, 10)[seed % 2], **how)   # three ranks, one block each
    p.play("U D X C B X G")
    p.sim.run()
    there = draw.randrange(3)
    slow, third = (there - 1) % 3, (there + 1) % 3
    p.network.slow_links.add((slow, there))
    p.sim.scheduler.haste = 0.97
    outcomes = lemmas.Outcomes(p, draw.choice("DCU"), 2)
    p.sim.run()
    record = outcomes.records[1][third]
    heard = record is not None and (record.code, record.peer) == (Code.ABORTED, there)
    assert not heard or record.culprit == slow   # type: ignore[union-attr]
    return heard


def lemma(kind: str, fault: str) -> Callable[..., Any]:
    """Something goes wrong in an operation of `kind`."""
    return lambda seed, **how: lemmas.play(seed, kind, fault, **how)


# ---- mutants ---------------------------------------------------------------------------------------------------------------------
WHERE: dict[str, tuple[Callable[..., Any], int]] = {
    # how it shows, and the first seed that is tried
    "ht_net_enter: ld.": (stands_still, 0),
    "ht_net_enter: no 1 fence": (lands_late, 0), "ht_net_enter: fence": (lands_late, 0),
    "ht_net_enter: no 3 bar.sync": (tells_on_whom, 12),   # a warp that does not know why
    "ht_net_wait_chunk: ld.weak tag": (stands_still, 6), "ht_net_wait_chunk: ld.relaxed.gpu tag": (stands_still, 6),   # while another TAG lands
    "ht_net_wait_heads: no 1 bar.sync": (lemma("D", "late"), 2),
    "ht_net_wait_kept: ld.weak head": (lemma("U", "cut"), 0), "ht_net_wait_kept: ld.relaxed.gpu head": (lemma("U", "cut"), 0),
    "ht_net_wait_kept: no 2 bar.sync": (lemma("U", "cut"), 0),
}
AGAIN = "the puts before it in the same warp, if there are any, have the same fence, and this one nothing new to release"
SURVIVORS = {f"ht_net_signal: {what}": AGAIN for what in ("no 0 fence.acq_rel.sys", "fence.acq_rel.gpu", "fence.acq_rel.sys last")} | {
    "ht_net_put_rows: fence.acq_rel.sys first": "what it puts was written before; the routes that it reads are not put",
    "ht_net_wait_arrived: no 1 bar.sync": "only warp 0 goes on, and the end of the kernel is a barrier",
    "ht_net_publish_kept: st.weak kept_sent": "only my own puts read it, after the barrier; relaxed is stronger than needed",
    "ht_net_publish_kept: st.relaxed.gpu kept_sent": "the same",
}
"""Effects whose loss nothing shows, and why. Each is asserted to survive, so that this list stays true."""


def schedules(name: str) -> Iterator[tuple[Callable[..., Any], int]]:
    """Where to look for what the loss called `name` does."""
    for begin, (run, first) in WHERE.items():
        if name.startswith(begin):
            yield from ((run, seed) for seed in range(first, first + SEEDS))
            return
    for seed in (0, *FULL, *range(1, SEEDS)):
        yield from ((play, seed), (play_failure, seed))


def test_nothing_changed_is_green() -> None:
    for seed in range(4):
        for run in (stands_still, lands_late):
            run(seed)
    assert any([tells_on_whom(seed) for seed in range(12, 20)])


@pytest.mark.parametrize("name", [name for name in EFFECTS if name not in SURVIVORS])
def test_effect_mutant_is_red(name: str) -> None:
    for run, seed in schedules(name):
        try:
            run(seed, effects=EFFECTS[name])
        except (SimulationError, AssertionError):
            return
    pytest.fail(f"nothing shows {name}")


@pytest.mark.parametrize("name", SURVIVORS)
def test_surviving_effect_mutant(name: str) -> None:
    for seed in range(3, 6):
        for run in (play, play_failure, stands_still, lands_late):
            run(seed, effects=EFFECTS[name])
