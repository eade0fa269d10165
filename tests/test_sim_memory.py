"""Memory of closed groups in the simulator: given back when the last rank has closed, and races with what comes to its addresses are found."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.simulator import OutOfBoundsError, RaceError, Simulator

LL = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=2)
HT = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=16, num_topk=2, algorithm=Algorithm.HIGH_THROUGHPUT)


@pytest.mark.parametrize("config", [LL, HT], ids=["ll", "ht"])
def test_closed_groups_hold_nothing(config: GroupConfig) -> None:
    windows: list[weakref.ref] = []

    def program(comm: object) -> None:
        for _ in range(3):
            with Group.create(comm, config) as group:
                group.create_window(4096)
                windows.append(weakref.ref(comm.world.simulator.windows[group.window.handle][comm.rank].keep))
                layout = Layout.EXPERT_MAJOR if config is LL else Layout.FLAT
                ids, x = torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 16).bfloat16()
                with group.create_handle(layout, ids) as handle:
                    got = handle.dispatch(x, topk_weights=torch.ones(2, 2)) if config is HT else handle.dispatch(x)
                    handle.combine(got.tokens, **({} if config is HT else {"topk_weights": torch.ones(2, 2)}))
                group.check()

    with LocalWorld(2, "sim") as world:
        world.run(program)
        sim = world.simulator
        assert not sim.windows and not sim.memory.regions, [r.name for r in sim.memory.regions]
        gc.collect()
        assert len(windows) == 6 and all(w() is None for w in windows), "a closed group's window is kept alive"


def test_a_window_stays_until_the_last_rank_has_closed() -> None:
    def program(comm: object) -> int:
        window = comm.create_window(256, [])
        comm.barrier()
        if comm.rank == 0:
            window.close()
            window.close()
        comm.barrier()
        left = len(comm.world.simulator.windows)
        comm.barrier()
        window.close()
        comm.barrier()
        return 10 * left + len(comm.world.simulator.windows)

    with LocalWorld(2, "sim") as world:
        assert world.run(program) == [10, 10]


def test_races_are_found_in_a_window_at_the_address_of_an_earlier_one() -> None:
    """The earlier window's accesses are forgotten with it, those of the later one are not; its words are new, too."""
    memories = [np.zeros(1024, np.uint8) for _ in range(2)]
    sim = Simulator(2, 0)
    parts = [("ARRIVED", 0, 512), ("SLOT0", 512, 1024)]
    address = memories[0].ctypes.data

    def word() -> object:
        return sim.words.word(sim.scheduler.current.agent, address)

    seen = []
    for _ in range(2):
        handle = sim.create_window(memories, parts)
        sim.host(0, lambda: seen.append(word()), writes=[(address + 512, 16)], label="one")
        sim.run()
        sim.destroy_window(handle)
    assert seen[0] is not seen[1] and seen[0].region is not seen[1].region
    sim.create_window(memories, parts)
    sim.host(0, None, writes=[(address + 512, 16)], label="writer")
    sim.host(1, None, reads=[(address + 512, 16)], label="reader")
    with pytest.raises(RaceError, match="SLOT0"):
        sim.run()


def test_a_closed_window_cannot_be_reached() -> None:
    memories = [np.zeros(1024, np.uint8) for _ in range(2)]
    sim = Simulator(2, 0)
    sim.destroy_window(sim.create_window(memories))
    sim.host(0, None, writes=[(memories[0].ctypes.data, 16)])
    with pytest.raises(OutOfBoundsError):
        sim.run()


@pytest.mark.parametrize(("at", "size", "told"), [
    (1024, 16, "that begin right behind the end of the window of rank 0 (1024 bytes) and 256 bytes before LOCAL of rank 0 (64 bytes)"),
    (1024 + 40, 8, "that begin 40 bytes behind the end of the window of rank 0 (1024 bytes) and 216 bytes before LOCAL of rank 0 (64 bytes)"),
    (1024 + 250, 8, "that begin 6 bytes before LOCAL of rank 0 (64 bytes) and 250 bytes behind the end of the window of rank 0 (1024 bytes)"),
    (1016, 16, "from byte 1016 of the window of rank 0 (1024 bytes), the last 8 of them behind its end"),
    (-24, 8, "that begin 24 bytes before the window of rank 0 (1024 bytes)"),
    (1024 + 256 + 64 + 5000, 8, "at 0x{:x}, far from all memory")])
@pytest.mark.parametrize("write", [False, True])
def test_an_access_that_went_astray_is_told_from_what_is_near(at: int, size: int, told: str, write: bool) -> None:
    whole = np.zeros(8192, np.uint8)
    window, local = whole[64:64 + 1024], whole[64 + 1024 + 256:][:64]
    sim = Simulator(1)
    sim.create_window([window])
    sim.register(local, "LOCAL", 0)
    address = window.ctypes.data + at
    sim.host(0, None, **{"writes" if write else "reads": [(address, size)]})
    with pytest.raises(OutOfBoundsError) as caught:
        sim.run()
    assert f" accesses {size} bytes {told.format(address)}: nobody registered memory there" in caught.value.message
