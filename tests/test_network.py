"""The simulator's network between teams: what a signal orders, what nothing orders, and what is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from ncclep_py.simulator import DeadlockError, OutOfBoundsError, RaceError, SimulationError, Simulator
from ncclep_py.simulator.network import Network

SIZE = 256
REGIONS = [("STAGING_SENT", 0, 128), ("TAGS", 128, 192), ("STAGING", 192, SIZE)]
SENT, TAG, STAGED, COPY = 0, 128, 192, 224


class Pair:
    """Two teams of one rank, or as told: `body(v, rank, window, memory)` is what rank runs, over the vocabulary `v`."""

    def __init__(self, body: Callable, seed: int, ranks: int = 2, team: int = 1, rail_only: bool = True, mode: str = "adversarial",
                 effects: Mapping[str, Sequence[str]] | None = None, warps: int = 1) -> None:
        self.sim = Simulator(ranks, seed, mode, blocks=1, warps=warps, effects=effects)
        self.network = Network(self.sim, team, 2, rail_only)
        raw = [np.zeros(SIZE + 16, np.uint8) for _ in range(ranks)]
        self.windows = [w[-w.ctypes.data % 16:][:SIZE] for w in raw]
        self.window = self.sim.create_window(self.windows, REGIONS)
        self.scratch = [np.zeros(16, np.int64) for _ in range(ranks)]
        for rank in range(ranks):
            self.sim.register(self.scratch[rank], "scratch", rank)
            self.sim.launch(rank, body, [rank, self.window, self.scratch[rank].ctypes.data])

    def wait(self, source: int, context: int, signal: int, least: int, rank: int) -> int:
        at = self.scratch[rank].ctypes.data
        return self.sim.vocabulary.ht_net_wait_chunk(0, self.window, TAG, source, context, signal, least, rank, 1, at, at + 16, 0)


def message(effects: Mapping[str, Sequence[str]] | None = None, *, fence: bool = True, signal_context: int = 0, wait: bool = True,
            reuse: bool = False) -> Callable[[int], np.ndarray]:
    """A program by seed: rank 0 writes 32 bytes and puts them with a tag to rank 1, which waits and forwards them."""
    def play(seed: int) -> np.ndarray:
        def body(rank: int, window: int, scratch: int) -> None:
            v = pair.sim.vocabulary
            if rank == 0:
                v.ht_net_stage_row(window, 0, window, SENT, source, routes, 0, 1, 32, 0, 1)
                v.ht_net_put(0, window, 1, 0, STAGED, SENT, 32)
                v.ht_net_put_tag(0, window, 1, 0, TAG, 1, 0)
                v.ht_net_signal(0, 1, signal_context, 0, 1)
                if reuse:
                    v.ht_net_stage_row(window, 0, window, SENT, source, routes, 0, 1, 32, 0, 1)
            else:
                if wait:
                    assert pair.wait(0, signal_context, 0, 1, rank) == 0
                v.ht_net_forward_row(window, COPY, window, STAGED, mine, 0, 1, 32, rank)

        pair = Pair(body, seed, effects=effects)
        row, table, own = np.arange(32, dtype=np.uint8), np.array([1 << 32], np.int64), np.array([1 << 32], np.int64)
        source, routes = (pair.sim.register(x, "private", 0).address for x in (row, table))
        mine = pair.sim.register(own, "private", 1).address
        pair.sim.run()
        return pair.windows[1][COPY:COPY + 32].copy()

    return play


def test_a_row_is_there_after_its_signal() -> None:
    play = message()
    for seed in range(40):
        assert (play(seed) == np.arange(32)).all()


@pytest.mark.parametrize("change", [
    {"wait": False}, {"signal_context": 1}, {"reuse": True},
    {"effects": {"ht_net_put": ("st.relaxed.sys net",)}}, {"effects": {"ht_net_put": ("fence.acq_rel.gpu", "st.relaxed.sys net")}},
    {"effects": {"ht_net_wait_chunk": ("ld.relaxed.sys net", "ld.relaxed.sys tag", "bar.sync")}},
], ids=str)
def test_without_one_of_its_parts_it_is_a_race(change: dict) -> None:
    """Not waited for; a signal of another context; source overwritten with the put under way; no fence or too weak a one; no acquire."""
    play = message(**change)
    with pytest.raises((SimulationError, AssertionError)):
        for seed in range(60):
            play(seed)


def test_two_puts_to_the_same_bytes_must_not_be_under_way_together() -> None:
    def body(rank: int, window: int, scratch: int) -> None:
        if rank == 0:
            for context in (0, 1):
                pair.sim.vocabulary.ht_net_put(0, window, 1, context, STAGED, SENT, 32)

    with pytest.raises(RaceError, match="puts to STAGING of rank 1, and a put of .* to it is still under way"):
        for seed in range(20):
            pair = Pair(body, seed)
            pair.sim.run()


@pytest.mark.parametrize("peer, rail_only, fine", [(2, True, True), (3, True, False), (1, True, False), (3, False, True), (1, False, False)])
def test_connections(peer: int, rail_only: bool, fine: bool) -> None:
    def body(rank: int, window: int, scratch: int) -> None:
        if rank == 0:
            pair.sim.vocabulary.ht_net_put(0, window, peer, 0, STAGED, SENT, 32)

    pair = Pair(body, 0, ranks=4, team=2, rail_only=rail_only)
    if fine:
        pair.sim.run()
        assert pair.network.puts == 1
    else:
        with pytest.raises(OutOfBoundsError, match=f"puts to rank {peer} on context 0, but there is no such connection"):
            pair.sim.run()


def test_memory_of_another_team_cannot_be_addressed() -> None:
    def body(rank: int, window: int, scratch: int) -> None:
        pair.sim.vocabulary.publish_arrived(window, TAG, rank, 2, 1)

    pair = Pair(body, 0)
    with pytest.raises(OutOfBoundsError, match="addresses memory of rank ., which is of another team"):
        pair.sim.run()


def three_messages(seed: int, seen: set[tuple[int, int]]) -> None:
    def body(rank: int, window: int, scratch: int) -> None:
        v, at = pair.sim.vocabulary, scratch
        for i in range(3):
            if rank == 0:
                v.ht_net_put_tag(0, window, 1, 0, TAG + 8 * i, 1, 0)
                v.ht_net_signal(0, 1, 0, 5, 1)
            else:
                assert v.ht_net_wait_chunk(0, window, TAG + 8 * i, 0, 0, 5, i + 1, 1, 1, at, at + 16, 0) == 0
                seen.add((i, pair.network.seen(1, 0, 5)))

    pair = Pair(body, seed)
    pair.sim.run()
    assert pair.network.seen(1, 0, 5) == 3


def test_signals_add_up_and_none_overtakes_a_put() -> None:
    """Three messages, each of one tag and one add; whoever sees n of them sees the n'th tag or a later one."""
    seen: set[tuple[int, int]] = set()
    for seed in range(60):
        three_messages(seed, seen)
    assert {(0, 1), (0, 3), (1, 2), (2, 3)} <= seen


def test_what_is_lost_is_waited_for_in_vain() -> None:
    play = message()
    assert (play(0) == np.arange(32)).all()

    def body(rank: int, window: int, scratch: int) -> None:
        if rank == 0:
            pair.sim.vocabulary.ht_net_signal(0, 1, 0, 0, 1)
        else:
            pair.wait(0, 0, 0, 1, 1)

    pair = Pair(body, 0)
    pair.network.lost.add((0, 1))
    with pytest.raises(DeadlockError, match=r"waits for signals 0 of context 0 from rank 0 \(0 of 1\)"):
        pair.sim.run()


def test_the_network_is_named_in_words() -> None:
    """In every report of a race with something under way."""
    for wrong in ({"wait": False}, {"signal_context": 1}, {"reuse": True}):
        error = None
        for seed in range(60):
            try:
                message(**wrong)(seed)
            except (RaceError, AssertionError) as e:   # the wait on another context may find no tag
                if isinstance(e, RaceError):
                    error = str(e)
                    break
        assert error is not None and "block -2" not in error
        assert "the network from rank 0 to rank 1 on context 0 ht_net_put (test_network.py:" in error.splitlines()[0]
        assert "it takes a signal added behind the put on its context" in error


@pytest.mark.parametrize(("signal", "context", "cause"), [
    (True, 1, "rank 0 ended its kernel without adding to signal 0 of context 0"),
    (False, 0, "rank 0 ended its kernel without adding to signal 0 of context 0")])
def test_a_signal_that_does_not_come_is_the_first_cause(signal: bool, context: int, cause: str) -> None:
    def body(rank: int, window: int, scratch: int) -> None:
        if rank == 0:
            pair.sim.vocabulary.ht_net_put_tag(0, window, 1, 0, TAG, 1, 0)
            if signal:
                pair.sim.vocabulary.ht_net_signal(0, 1, context, 0, 1)
        else:
            pair.wait(0, 0, 0, 1, rank)

    pair = Pair(body, 0)
    with pytest.raises(DeadlockError) as caught:
        pair.sim.run()
    assert f"    rank 1 -> rank 0 (signal 0 of context 0)\n  first cause: {cause}\n" in str(caught.value)
    assert "epoch 0" not in str(caught.value)


def test_a_circle_of_signals() -> None:
    def body(rank: int, window: int, scratch: int) -> None:
        pair.wait(1 - rank, 1, rank, 1, rank)

    pair = Pair(body, 0)
    with pytest.raises(DeadlockError, match="first cause: a circle, whose oldest wait is that of rank 0 for signal 0 of context 1 from rank 1: "
                                            "rank 1 waits itself and did not add to it before"):
        pair.sim.run()
