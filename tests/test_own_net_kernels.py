"""Kernels of one's own over several teams: what they are given, what is refused, how they are compiled, and that a folder of cubins has them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import own_net_kernel
import pytest
import torch

from ncclep_py import Algorithm, Group, GroupConfig, LocalWorld, compiled, device_library, launch, prebuilt
from ncclep_py.compile import build
from ncclep_py.plan import FREE_COUNTERS, FREE_SIGNALS, device_needs
from ncclep_py.recording import kernels_of
from ncclep_py.simulator import SimulationError
from ncclep_py.testing import bits_equal
from ncclep_py.topology import Topology

LOW = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=3, hidden=8, num_topk=2, dtype=torch.float32, timeout_ns=10_000_000_000)
HIGH = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=3, hidden=8, num_topk=2, dtype=torch.float32, timeout_ns=10_000_000_000,
                   algorithm=Algorithm.HIGH_THROUGHPUT)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path / "cache"))
    before = dict(launch.KERNELS)
    yield
    launch.KERNELS.clear()
    launch.KERNELS.update(before)


def settle(comm: Any, group: Group) -> None:
    group.check()
    comm.exchange(None)


def equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert bits_equal(got, want), what


def run(team: int = 2, config: GroupConfig = LOW) -> None:
    with LocalWorld(4, "sim", team_size=team) as world:
        world.run(lambda comm: own_net_kernel.own(comm, config, settle, equal))


# ---- run -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("team", [1, 2])
def test_a_kernel_that_uses_every_operation(team: int) -> None:
    run(team)


def without(name: str) -> Callable[..., Any]:
    """The kernel, in which an operation does nothing."""
    made = own_net_kernel.make_own

    def make_own(shape: Any, ops: Any) -> Any:
        class Fewer:
            def __getattr__(self, asked: str) -> Any:
                return (lambda *args: 0) if asked == name else getattr(ops, asked)

        return made(shape, Fewer())

    return make_own


@pytest.mark.parametrize("name", ["net_wait_signal", "net_wait_counter", "net_wait_flushed", "net_barrier", "net_put_counted"])
def test_it_notices_what_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_net_kernel, "make_own", without(name))
    with pytest.raises((SimulationError, AssertionError, RuntimeError)):
        for _ in range(10):
            run()


def make_tell(shape: Any, ops: Any) -> Any:
    store_header, warp_idx = ops.store_header, ops.warp_idx

    def tell(comm: int, signals: int, out: int) -> None:
        if warp_idx() == 0:
            store_header(out, comm, signals)

    return tell


@pytest.mark.parametrize("config", [LOW, HIGH], ids=lambda c: c.algorithm.name)
def test_comm_and_free_signals_are_known(config: GroupConfig) -> None:
    """Two groups have networks of their own."""
    def program(comm: Any) -> list[list[int]]:
        told = []
        with Group.create(comm, config) as one, Group.create(comm, config) as other:
            for group in (one, other):
                out = torch.zeros(2, dtype=torch.int64)
                group.run_kernel(make_tell, blocks=1, out=out)
                settle(comm, group)
                told.append(out.tolist())
        return told

    needs = device_needs(config, Topology(4, 2))
    assert needs.signals == needs.first_free + 4 + FREE_SIGNALS and needs.counters == FREE_COUNTERS and needs.first_free > 0
    with LocalWorld(4, "sim", team_size=2) as world:
        assert world.run(program) == [[[0, needs.first_free], [1, needs.first_free]]] * 4


def test_signals_and_counters_end_somewhere() -> None:
    def make(shape: Any, ops: Any) -> Any:
        net_read_signal, net_read_counter = ops.net_read_signal, ops.net_read_counter

        def look(comm: int, signals: int, more: int, which: int) -> None:
            net_read_signal(comm, 0, signals + more)
            net_read_counter(comm, 0, which)

        return look

    def program(comm: Any, more: int, which: int) -> None:
        with Group.create(comm, LOW) as group:
            group.run_kernel(make, blocks=1, more=more, which=which)
            settle(comm, group)

    for more, which, told in ((4 + FREE_SIGNALS - 1, FREE_COUNTERS - 1, ""), (4 + FREE_SIGNALS, 0, "there is no signal"),
                              (0, FREE_COUNTERS, "there is no counter 16 of context 0")):
        with LocalWorld(4, "sim", team_size=2) as world:
            if not told:
                world.run(program, more, which)
                continue
            with pytest.raises(Exception, match=told):
                world.run(program, more, which)


# ---- one team --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [LOW, HIGH], ids=lambda c: c.algorithm.name)
def test_one_team_has_no_network(config: GroupConfig) -> None:
    def make(shape: Any, ops: Any) -> Any:
        net_barrier = ops.net_barrier

        def meet(local: int) -> None:
            net_barrier(0, 0, 0, 0, 0, 4, 2, 0, 1, local, local, 0)

        return meet

    def program(comm: Any) -> None:
        with Group.create(comm, config) as group:
            with pytest.raises(ValueError, match="the kernel of make_tell takes comm, .* and this group has none: its 4 ranks form one team"):
                group.run_kernel(make_tell, out=torch.zeros(2, dtype=torch.int64))
            with pytest.raises(AttributeError, match="operation net_barrier is one of kernels over several teams, and this one is for one team"):
                group.run_kernel(make)

    with LocalWorld(4, "sim") as world:
        world.run(program)


# ---- compiled --------------------------------------------------------------------------------------------------------------------
def test_over_several_teams_kernels_are_linked_with_the_network() -> None:
    """Whether or not they take comm: ranks are numbered differently there."""
    def make_plain(shape: Any, ops: Any) -> Any:
        store_header = ops.store_header

        def plain(out: int) -> None:
            store_header(out, 1, 2)

        return plain

    def names(topology: Topology, own: list[Any]) -> list[str]:
        return [spec.name for spec in kernels_of(LOW, topology, 4, own=own) if spec.name.startswith("own")]

    several, one = names(Topology(4, 2), [make_tell, make_plain]), names(Topology(4, 4), [make_plain])
    assert len(several) == 2 and all(map(device_library.uses_network, several))
    assert len(one) == 1 and not device_library.uses_network(one[0])


def has_library() -> bool:
    try:
        return bool(device_library.library_path())
    except (RuntimeError, ImportError):
        return False


@pytest.mark.skipif(not has_library(), reason="NCCL here has no libnccl_device.ltoir of 2.32 or newer")
def test_a_folder_of_cubins_has_them(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled where it can be, by the file's name, and found by the factory's digest where nothing can be compiled."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
    topology, factory = Topology(4, 2), f"{own_net_kernel.__file__}:make_own"
    spec, = (s for s in kernels_of(LOW, topology, 4, own=[own_net_kernel.make_own]) if s.name.startswith("own"))
    monkeypatch.setattr("ncclep_py.compile.kernels_of", lambda *args, **more: [
        s for s in kernels_of(*args, **more) if s.name.startswith("own")])   # the others take a minute
    made, = build(LOW, topology, ["sm_90"], tmp_path / "cubins", 4, own=[factory])
    assert made.name.startswith(spec.name)
    monkeypatch.setenv(prebuilt.VARIABLE, str(tmp_path / "cubins"))
    monkeypatch.setattr(compiled, "_compile", lambda *args: pytest.fail("compiled"))
    found = launch.compile_kernel(spec, "sm_90")
    assert "talk" in found.symbol
