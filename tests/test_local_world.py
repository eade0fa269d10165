"""`LocalWorld`: ranks as cooperative programs in one process. Who waits, who is told what, and what is left afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ncclep_py import Communicator, EpClosedError, EpError, EpPeerError, Group, GroupConfig, Layout, LocalWorld

CONFIG = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1)


def one_step(comm: Any) -> bool:
    """A dispatch and combine whose result is the tokens."""
    with Group.create(comm, CONFIG) as group:
        handle = group.create_handle(Layout.EXPERT_MAJOR, torch.tensor([[comm.rank], [0], [3]]))
        x = torch.full((3, 8), 1.0 + comm.rank).bfloat16()
        return torch.equal(handle.combine(handle.dispatch(x).tokens, topk_weights=torch.ones(3, 1)), x)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_results_by_rank_and_arguments(ranks: int) -> None:
    with LocalWorld(ranks, "sim") as world:
        assert world.run(lambda comm, a, b: (comm.rank, comm.num_ranks, a, b), 5, "x") == [(r, ranks, 5, "x") for r in range(ranks)]
        assert world.run(one_step) == [True] * ranks
        assert world.run(one_step) == [True] * ranks


def test_communicators() -> None:
    with LocalWorld(3, "sim") as world:
        assert world.backend == "sim" and world.num_ranks == 3
        for r, comm in enumerate(world.communicators):
            assert isinstance(comm, Communicator) and (comm.rank, comm.num_ranks, comm.backend, comm.ranks_on_device) == (r, 3, "sim", 3)
            assert comm.device == torch.device("cpu") and not comm.capturing()
            with comm:
                pass


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ((0,), ValueError, "num_ranks must be at least 1, got 0"),
    ((-3,), ValueError, "num_ranks must be at least 1, got -3"),
    ((2.0,), TypeError, "num_ranks must be an int, got float"),
    ((True,), TypeError, "num_ranks must be an int, got bool"),
    (("4",), TypeError, "num_ranks must be an int, got str"),
    ((2, "gpu"), ValueError, "backend must be 'auto', 'nccl' or 'sim', got 'gpu'"),
    ((2, None), ValueError, "backend must be 'auto', 'nccl' or 'sim', got None"),
])
def test_bad_worlds(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LocalWorld(*arguments)


@pytest.mark.parametrize(("name", "value", "words"), [
    ("seed", None, "seed must be an int, .* got NoneType: None"), ("seed", "x", "seed must be an int, .* got str: 'x'"),
    ("fused", 3, "fused must be a bool or None, got int: 3")])
def test_bad_options(name: str, value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        LocalWorld(2, "sim", **{name: value})


def test_a_program_must_be_callable() -> None:
    with LocalWorld(2, "sim") as world:
        with pytest.raises(TypeError, match="program must be a function of a communicator, got NoneType: None"):
            world.run(None)   # type: ignore[arg-type]
        assert world.run(lambda comm: comm.rank) == [0, 1]


def test_bad_schedule() -> None:
    with pytest.raises(ValueError, match="mode must be 'fair' or 'adversarial', got 'unfair'"):
        LocalWorld(2, "sim", mode="unfair")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu() -> None:
    with LocalWorld(2) as world:
        assert world.backend == "sim"
    with pytest.raises(RuntimeError, match="backend 'nccl' needs a CUDA GPU and there is none; use backend='sim'"):
        LocalWorld(2, "nccl")


def test_exchange_and_barrier() -> None:
    def program(comm: Any) -> list[Any]:
        comm.barrier()
        first = comm.exchange({"rank": comm.rank})
        first.append("mine")   # each rank's list is its own
        return [first, comm.exchange(comm.rank * 10)]

    with LocalWorld(3, "sim") as world:
        for got in world.run(program):
            assert got == [[{"rank": 0}, {"rank": 1}, {"rank": 2}, "mine"], [0, 10, 20]]


def test_a_barrier_holds_everybody() -> None:
    log = []

    def program(comm: Any) -> None:
        log.append(("before", comm.rank))
        comm.barrier()
        log.append(("after", comm.rank))

    with LocalWorld(4, "sim") as world:
        world.run(program)
    assert [what for what, _ in log] == ["before"] * 4 + ["after"] * 4


def test_a_window_is_zeroed_and_each_ranks_own() -> None:
    def program(comm: Any) -> tuple[int, int, int]:
        window = comm.create_window(1024, [])
        assert window.num_bytes == 1024 and int(window.memory.sum()) == 0 and window.address % 256 == 0
        window.memory.fill_(comm.rank + 1)
        comm.barrier()
        window.close(), window.close()
        return window.handle, window.address, int(window.memory[5])

    with LocalWorld(3, "sim") as world:
        handles, addresses, values = zip(*world.run(program), strict=True)
    assert len(set(handles)) == 1 and len(set(addresses)) == 3 and values == (1, 2, 3)


# ---- errors --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("culprit", [0, 1, 2, 7])
def test_the_others_learn_why_a_program_raised(culprit: int) -> None:
    told: dict[int, Exception] = {}

    def program(comm: Any) -> None:
        comm.barrier()
        if comm.rank == culprit:
            raise LookupError("lost")
        try:
            comm.barrier()
        except EpPeerError as e:
            told[comm.rank] = e
            raise

    with LocalWorld(8, "sim") as world:
        with pytest.raises(LookupError, match="lost"):
            world.run(program)
        assert sorted(told) == [r for r in range(8) if r != culprit]
        for r, e in told.items():
            assert str(e) == f"rank {r} called a host exchange, but rank {culprit} ended with LookupError: lost"
        assert world.run(lambda comm: comm.exchange(comm.rank)[-1]) == [7] * 8


def test_the_first_error_by_rank_is_raised_and_peer_errors_only_if_there_is_no_other() -> None:
    def program(comm: Any) -> None:
        if comm.rank == 0:
            comm.barrier()
        raise ValueError(f"rank {comm.rank}'s own")

    with LocalWorld(3, "sim") as world:
        with pytest.raises(ValueError, match="rank 1's own"):
            world.run(program)
        with pytest.raises(EpPeerError, match="rank 0 called a host exchange, but rank 1's program has ended; rank 2's program has ended"):
            world.run(lambda comm: comm.barrier() if comm.rank == 0 else None)


def test_a_caught_peer_error_lets_the_program_end_well() -> None:
    def program(comm: Any) -> str:
        if comm.rank == 1:
            return "early"
        with pytest.raises(EpPeerError):
            comm.barrier()
        with pytest.raises(EpPeerError):
            comm.barrier()
        return "told twice"

    with LocalWorld(2, "sim") as world:
        assert world.run(program) == ["told twice", "early"]


@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
def test_even_a_programs_exit_ends_all(ends: type[BaseException]) -> None:
    def program(comm: Any) -> None:
        if comm.rank == 1:
            raise ends("now")
        comm.barrier()

    with LocalWorld(2, "sim") as world:
        with pytest.raises(ends):
            world.run(program)
        assert world.run(one_step) == [True] * 2


def test_different_host_steps() -> None:
    with LocalWorld(4, "sim") as world:
        with pytest.raises(EpPeerError, match="rank 0 called a host exchange, but other ranks called create_window"):
            world.run(lambda comm: comm.create_window(256, []) if comm.rank == 2 else comm.barrier())
        assert world.run(one_step) == [True] * 4


def test_a_dispatch_while_others_are_at_a_barrier() -> None:
    def program(comm: Any) -> None:
        group = Group.create(comm, CONFIG)
        handle = group.create_handle(Layout.EXPERT_MAJOR, torch.tensor([[0]]))
        group._warn.detach()
        if comm.rank == 1:
            handle.dispatch(torch.zeros(1, 8, dtype=torch.bfloat16))
        else:
            comm.barrier()

    with LocalWorld(2, "sim") as world:
        with pytest.raises(EpPeerError, match="rank 0 called a host exchange, but other ranks called an operation"):
            world.run(program)
        assert world.run(one_step) == [True] * 2


def test_run_is_not_reentrant() -> None:
    with LocalWorld(2, "sim") as world:
        def program(comm: Any) -> str:
            with pytest.raises(RuntimeError, match="not reentrant") as raised:
                world.run(lambda c: None)
            comm.barrier()
            return str(raised.value)

        assert len(world.run(program)) == 2
        assert world.run(one_step) == [True] * 2


def test_two_worlds_side_by_side_and_one_inside_the_other() -> None:
    with LocalWorld(2, "sim") as outer, LocalWorld(4, "sim") as inner:
        def program(comm: Any) -> list[bool]:
            comm.barrier()
            got = inner.run(one_step) if comm.rank == 0 else []
            comm.barrier()
            return got

        assert outer.run(program) == [[True] * 4, []]


def test_a_closed_world() -> None:
    world = LocalWorld(2, "sim")
    assert world.run(one_step) == [True] * 2
    world.close(), world.close()
    with pytest.raises(EpClosedError, match="this LocalWorld is closed") as raised:
        world.run(one_step)
    assert isinstance(raised.value, EpError)


def test_collective_calls_outside_of_run() -> None:
    with LocalWorld(2, "sim") as world:
        with pytest.raises(RuntimeError, match=r"a host exchange of a LocalWorld rank must be called inside LocalWorld.run\(program\)"):
            world.communicators[0].barrier()
        with pytest.raises(RuntimeError, match="inside LocalWorld.run"):
            Group.create(world.communicators[0], CONFIG)


def test_whether_gradients_are_recorded_is_each_programs_own() -> None:
    def program(comm: Any) -> list[bool]:
        seen = [torch.is_grad_enabled()]
        if comm.rank == 1:
            torch.set_grad_enabled(False)
        comm.barrier()
        seen.append(torch.is_grad_enabled())
        with torch.no_grad():
            comm.barrier()
            seen.append(torch.is_grad_enabled())
        comm.barrier()
        return [*seen, torch.is_grad_enabled()]

    with LocalWorld(2, "sim") as world:
        assert world.run(program) == [[True, True, False, True], [True, False, False, False]]
    assert torch.is_grad_enabled()


def test_a_seed_repeats_its_schedule() -> None:
    def steps_of(seed: int) -> int:
        with LocalWorld(2, "sim", seed=seed, mode="adversarial") as world:
            assert world.run(one_step) == [True] * 2
            return world.simulator.scheduler.step

    assert steps_of(3) == steps_of(3)
