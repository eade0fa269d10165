"""Operations for kernels of one's own over several teams, in the simulator: a conversation that uses each, and what a missing part does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deadlines
import numpy as np
import pytest
from test_mutations import effect_mutants

from ncclep_py.errors import Code, ErrorRecord, Phase
from ncclep_py.kernels.net_vocabulary import NET_OPERATIONS
from ncclep_py.kernels.ops import NET_OPS
from ncclep_py.simulator import DeadlockError, OutOfBoundsError, SimulationError, Simulator
from ncclep_py.simulator.network import Network

NAMES = [op[0] for op in NET_OPERATIONS]
RANKS, TEAM, CONTEXTS, COUNTERS = 4, 2, 2, 2
SENT, COUNTED, PUT, GOT, SIZE = 0, 64, 128, 256, 512   # 16 bytes for each rank
REGIONS = [("STAGING_SENT", 0, PUT), ("STAGING_GOT", PUT, SIZE)]
FIRST, SECOND, MEETING, SIGNALS = 0, RANKS, 2 * RANKS, 3 * RANKS


class World:
    """`body(me, warp)` is what each warp of each rank runs."""

    def __init__(self, body: Callable[[World, int, int], None], sim: Simulator, rails: bool = False, network: type[Network] = Network) -> None:
        self.sim, self.v = sim, sim.vocabulary
        self.network = network(sim, TEAM, CONTEXTS, rails, SIGNALS, COUNTERS)
        raw = [np.zeros(SIZE + 16, np.uint8) for _ in range(RANKS)]
        self.windows = [w[-w.ctypes.data % 16:][:SIZE] for w in raw]
        self.window = sim.create_window(self.windows, REGIONS)
        self.local = [np.zeros(16, np.int64) for _ in range(RANKS)]
        for rank in range(RANKS):
            sim.register(self.local[rank], "local", rank)
            sim.launch(rank, self._kernel(body), [rank])

    def _kernel(self, body: Callable[[World, int, int], None]) -> Callable[[int], None]:
        return lambda rank: body(self, rank, self.v.warp_idx())

    def at(self, rank: int, offset: int) -> int:
        return self.windows[rank].ctypes.data + offset

    def failing(self, rank: int) -> tuple[int, int, int, int]:
        """epoch, fail, record, timeout."""
        base = self.local[rank].ctypes.data
        return 1, base, base + 64, 1000

    def record(self, rank: int) -> ErrorRecord | None:
        return ErrorRecord.read(self.local[rank][8:])


def peers(rank: int, rails: bool = False) -> list[int]:
    return [p for p in range(RANKS) if p // TEAM != rank // TEAM and not (rails and (p - rank) % TEAM)]


def conversation(without: str = "", rounds: int = 2, rails: bool = False, counted: bool = True) -> Callable[[World, int, int], None]:
    """Each rank tells each rank of other teams a word twice a round, once with a signal and once counted, out of sources that are used again. What
    follows a wait is done by the warp that did not wait itself. `without`: what is left out, or done wrongly; `counted`: with the second word."""
    def body(world: World, rank: int, warp: int) -> None:
        v, window, more = world.v, world.window, world.failing(rank)
        others = peers(rank, rails)
        for step in range(rounds):
            first, second = 100 * step + 1, 100 * step + 50
            if warp == 0:
                v.store_header(world.at(rank, SENT), step, first + rank)
                for p in others:
                    v.net_put_signal(0, window, p, 0, PUT + 16 * rank, SENT, 16, FIRST + rank, 1)
            for p in others:
                if without != "signal":
                    assert v.net_wait_signal(0, 0, FIRST + p, step + 1, rank, p, *more) == 0
            if without != "flush":
                assert v.net_wait_flushed(0, 1 if without == "the right flush" else 0, rank, *more) == 0
            if warp == 1:
                v.store_header(world.at(rank, SENT), step, 0)
                for p in others:
                    told = v.read_header(world.at(rank, PUT + 16 * p))
                    assert told == first + p, f"{told} of rank {p}"
            if without != "barrier":
                count = 0 if without == "the right count" else step
                assert v.net_barrier(0, 0, MEETING, count, rank, RANKS, TEAM, rails, *more) == 0
            if not counted:
                continue
            if warp == 1:
                v.store_header(world.at(rank, COUNTED), step, second + rank)
                for p in others:
                    v.net_put_counted(0, window, p, 1, GOT + 16 * rank, COUNTED, 16, p % 2 if without == "the right counter" else 1)
            if without != "counter":
                done = len(others) * (step + 1) - (without == "all of the counter")
                assert v.net_wait_counter(0, 1, 1, min(done, step + 1) if without == "the right counter" else done, rank, others[0], *more) == 0
            if warp == 1:
                v.store_header(world.at(rank, COUNTED), step, 0)
                for p in others:
                    v.net_put_signal(0, window, p, 0 if without == "the right context" else 1, 0, 0, 0, SECOND + rank, 3)
            for p in others:
                context = 0 if without == "the right context" else 1
                assert v.net_wait_signal(0, context, SECOND + p, 3 * (step + 1), rank, p, *more) == 0
            if warp == 1:
                for p in others:
                    told = v.read_header(world.at(rank, GOT + 16 * p))
                    assert told == second + p, f"{told} of rank {p}"

    return body


def play(seed: int, body: Callable[[World, int, int], None], effects: Mapping[str, Sequence[str]] | None = None, rails: bool = False) -> World:
    sim = Simulator(RANKS, seed, ("adversarial", "fair")[seed % 5 == 4], blocks=1, warps=2, effects=effects)
    world = World(body, sim, rails)
    sim.run()
    return world


def is_red(seeds: int, body: Callable[[World, int, int], None], effects: Mapping[str, Sequence[str]] | None = None, rails: bool = False) -> bool:
    for seed in range(seeds):
        try:
            play(seed, body, effects, rails)
        except (SimulationError, AssertionError):
            return True
    return False


@pytest.mark.parametrize("rails", [False, True])
def test_a_conversation(rails: bool) -> None:
    for seed in range(60):
        world = play(seed, conversation(rails=rails), rails=rails)
        n = 1 if rails else RANKS - TEAM
        assert all(world.network.counted(r, 1, 1) == 2 * n and world.network.seen(r, 1, SECOND + peers(r)[0]) in (0, 6) for r in range(RANKS))


@pytest.mark.parametrize("without", ["signal", "flush", "the right flush", "barrier", "the right count", "counter", "all of the counter",
                                     "the right counter", "the right context"])
def test_without_a_part_it_is_red(without: str) -> None:
    assert is_red(120, conversation(without))


# ---- effects ---------------------------------------------------------------------------------------------------------------------
def looked_at(world: World, rank: int, warp: int) -> None:
    """A word is waited for in no order, then looked at: who looks acquires."""
    v, more = world.v, world.failing(rank)
    if warp == 0 and rank == 0:
        v.store_header(world.at(0, SENT), 0, 7)
        v.net_put_counted(0, world.window, 2, 0, PUT, SENT, 16, 0)
        v.net_put_signal(0, world.window, 2, 0, 0, 0, 0, FIRST, 1)
    if rank == 0:
        v.net_wait_counter(0, 0, 0, 1, 0, 2, *more)
        if warp == 0:
            assert v.net_read_counter(0, 0, 0) == 1
            v.store_header(world.at(0, SENT), 0, 8)
    if rank == 2:
        v.net_wait_signal(0, 0, FIRST, 1, 2, 0, *more)
        if warp == 0:
            assert v.net_read_signal(0, 0, FIRST) == 1
            assert v.read_header(world.at(2, PUT)) == 7


BLIND = {name: ("ld.relaxed.sys net", "bar.sync") for name in ("net_wait_signal", "net_wait_counter")}
EFFECTS = {name: effects for name, effects in effect_mutants(NAMES, NET_OPS).items() if "st." not in name or not name.endswith(" net")}
"""But for the stores: the network takes what it is given, however it is handed over."""


def test_a_look_acquires() -> None:
    for seed in range(60):
        play(seed, looked_at, BLIND)


def test_each_operation_has_effect_mutants() -> None:
    assert {name.partition(":")[0] for name in EFFECTS} == set(NAMES)


@pytest.mark.parametrize("name", EFFECTS)
def test_an_effect_that_is_lost_is_red(name: str) -> None:
    looks = name.startswith("net_read")
    bodies = [looked_at] if looks else [conversation(), conversation(rounds=3, counted=False)]   # waits may stand in for each other
    assert any(is_red(150, body, (BLIND if looks else {}) | EFFECTS[name]) for body in bodies)


# ---- what is refused -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("call", "told"), [
    (lambda v, w, more: v.net_put_signal(0, w, 1, 0, PUT, SENT, 16, 0, 1), "puts to rank 1 on context 0, but there is no such connection"),
    (lambda v, w, more: v.net_put_signal(0, w, 2, 2, PUT, SENT, 16, 0, 1), "puts to rank 2 on context 2, but there is no such connection"),
    (lambda v, w, more: v.net_put_signal(0, w, 2, 0, PUT, SENT, 16, SIGNALS, 1), "no signal 12 of context 0: there are 12 signals of each of 2"),
    (lambda v, w, more: v.net_put_counted(0, w, 2, 0, PUT, SENT, 16, 2), "no counter 2 of context 0: there are 2 counters of each of 2 contexts"),
    (lambda v, w, more: v.net_put_counted(0, w, 2, 0, PUT, SENT, 0, 0), "a counted put must be of at least one byte, got 0"),
    (lambda v, w, more: v.net_put_counted(0, w, 2, 0, SIZE - 8, SENT, 16, 0), "a put of 16 bytes at 504 of the window of rank 2, which has 512"),
    (lambda v, w, more: v.net_read_signal(0, 2, 0), "no signal 0 of context 2"),
    (lambda v, w, more: v.net_read_counter(0, 0, -2), "no counter -2 of context 0"),
    (lambda v, w, more: v.net_wait_signal(0, 0, -1, 1, 0, 2, *more), "no signal -1 of context 0"),
    (lambda v, w, more: v.net_wait_counter(0, 0, 2, 1, 0, 2, *more), "no counter 2 of context 0"),
    (lambda v, w, more: v.net_barrier(0, 0, SIGNALS - 1, 0, 0, RANKS, TEAM, 0, *more), "no signal 13 of context 0|no signal 14 of context 0"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_what_there_is_not_is_refused(call: Callable[..., int], told: str) -> None:
    def body(world: World, rank: int, warp: int) -> None:
        if rank == 0:
            call(world.v, world.window, world.failing(0))

    sim = Simulator(RANKS, 0, blocks=1, warps=1)
    World(body, sim)
    with pytest.raises(OutOfBoundsError, match=told):
        sim.run()


def test_a_barrier_of_all_ranks_needs_all_connections() -> None:
    with pytest.raises(OutOfBoundsError, match="there is no such connection"):
        play(0, lambda world, rank, warp: world.v.net_barrier(0, 0, 0, 0, rank, RANKS, TEAM, 0, *world.failing(rank)), rails=True)


# ---- deadlines -------------------------------------------------------------------------------------------------------------------
def wait_for(world: World, rank: int, what: str) -> int:
    """Wait for rank 2, to which nothing gets and from which nothing comes."""
    v, more = world.v, world.failing(rank)
    if what == "barrier":
        return v.net_barrier(0, 0, MEETING, 0, rank, RANKS, TEAM, 0, *more)
    if what == "signal":
        return v.net_wait_signal(0, 0, FIRST, 1, rank, 2, *more)
    v.net_put_counted(0, world.window, 2, 0, PUT, SENT, 16, 0)
    return v.net_wait_counter(0, 0, 0, 1, rank, 2, *more) if what == "counter" else v.net_wait_flushed(0, 0, rank, *more)


WAITS = {"signal": (2, Phase.ROWS), "counter": (2, Phase.ROWS), "flush": (0, Phase.ROWS), "barrier": (2, Phase.HEAD)}
TOLD = {"signal": r"waits for signals 0 of context 0 from rank 2 \(0 of 1\)", "barrier": r"waits for signals 10 of context 0 from rank 2 \(0 of 1\)",
        "counter": r"waits for counter 0 of context 0, of puts to rank 2 \(0 of 1\)",
        "flush": "waits until the network has read the sources of all puts on context 0"}


def alone(what: str, codes: list[int], sim: Simulator, network: type[Network]) -> World:
    def body(world: World, rank: int, warp: int) -> None:
        if rank == 0:
            codes.append(wait_for(world, rank, what))
        elif what == "barrier" and rank == 3:
            world.v.net_put_signal(0, world.window, 0, 0, 0, 0, 0, MEETING + 3, 1)

    world = World(body, sim, network=network)
    world.network.lost |= {(0, 2), (2, 0)}
    sim.run()
    return world


@pytest.mark.parametrize("what", WAITS)
def test_nobody_waits_for_ever(what: str) -> None:
    for seed in range(20):
        codes: list[int] = []
        world = alone(what, codes, deadlines.machine(RANKS, seed, blocks=1, warps=1), deadlines.Links)
        record = world.record(0)
        assert codes == [Code.TIMEOUT] and record is not None
        assert (record.code, record.peer, record.culprit, record.phase, record.rank) == (Code.TIMEOUT, WAITS[what][0], *WAITS[what], 0)


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_without_an_end_is_told(what: str) -> None:
    with pytest.raises(DeadlockError, match=TOLD[what]):
        alone(what, [], Simulator(RANKS, 0, blocks=1, warps=1), Network)


def test_every_wait_has_a_deadline() -> None:
    waiting = {name for name in NAMES if NET_OPS[name].may_fail}
    assert waiting == {"net_wait_signal", "net_wait_counter", "net_wait_flushed", "net_barrier"}
    assert all("timeout" in NET_OPS[name].parameters for name in waiting)


# ---- what a counter and a flush do not tell --------------------------------------------------------------------------------------
@pytest.mark.parametrize("flush", [False, True])
def test_data_that_was_read_need_not_be_there(flush: bool) -> None:
    """Rank 0 tells rank 1 of its team, which tells rank 3 by another connection: the word may not have come."""
    def body(world: World, rank: int, warp: int) -> Any:
        v, more = world.v, world.failing(rank)
        if rank == 0:
            v.store_header(world.at(0, SENT), 0, 7)
            v.net_put_counted(0, world.window, 2, 0, PUT, SENT, 16, 0)
            assert (v.net_wait_flushed(0, 0, 0, *more) if flush else v.net_wait_counter(0, 0, 0, 1, 0, 2, *more)) == 0
            v.net_put_signal(0, world.window, 2, 1, 0, 0, 0, FIRST, 1)   # of another context
        elif rank == 2:
            assert v.net_wait_signal(0, 1, FIRST, 1, 2, 0, *more) == 0
            assert v.read_header(world.at(2, PUT)) == 7

    assert is_red(60, body)
