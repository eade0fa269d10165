"""Where the ranks of a benchmark live: processes, torchrun; and what is noted of them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing as mp
import os
import pathlib
import sys
import types
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch

from ncclep_py import LocalWorld
from ncclep_py.__main__ import main as command_line
from ncclep_py.bench import command, compile_times, machine, processes, record
from ncclep_py.bench.case import Case
from ncclep_py.bench.processes import ProcessWorld, SpinBarrier
from ncclep_py.bench.rank_jobs import PairJob, run_pair
from ncclep_py.bench.worlds import Worlds
from ncclep_py.communicator import Communicator

TOY = Case(ranks=2, experts=16, topk=3, hidden=512, tokens=5, sms=2, backend="sim")
SIM = ["bench", "--backend", "sim"]


def _meet(barrier: SpinBarrier, rank: int, told: Any) -> None:
    barrier.rank = rank
    for _ in range(50):
        barrier.wait(20)
    try:
        barrier.abort() if rank == 0 else barrier.wait(20)
    except BrokenBarrierError:
        told.put(rank)


def test_processes_meet_and_learn_that_one_gave_up() -> None:
    context = mp.get_context("fork")
    barrier, told = SpinBarrier(2), context.Queue()
    processes = [context.Process(target=_meet, args=(barrier, rank, told), daemon=True) for rank in range(2)]
    for p in processes:
        p.start()
    assert told.get(timeout=60) == 1


def connected(rank: int, ranks: int, gpus: int, ids: Any) -> types.SimpleNamespace:
    """As over NCCL, rank 0 tells the others what they connect with."""
    if rank == 0:
        for _ in range(ranks - 1):
            ids.put(b"an id")
    elif ids.get(timeout=60) != b"an id":
        raise ValueError("rank 0's id did not come")
    return types.SimpleNamespace(rank=rank, num_ranks=ranks, jobs=[])


def counted(comm: Any, job: str, meet: Any) -> dict[str, Any]:
    """A rank that keeps what it was given; some jobs fail."""
    meet()
    comm.jobs.append(job)
    if job == "fail" and comm.rank == 1:
        raise ValueError("rank 1 cannot")
    if job == "die" and comm.rank == 1:
        os._exit(7)
    meet()
    return {"rank": comm.rank, "jobs": list(comm.jobs)}


def test_processes_are_kept_for_the_next_job_and_a_failure_is_told() -> None:
    world = ProcessWorld(2, connect=connected)
    assert world.run(counted, "a") == [{"rank": rank, "jobs": ["a"]} for rank in range(2)]
    assert world.run(counted, "b") == [{"rank": rank, "jobs": ["a", "b"]} for rank in range(2)]
    with pytest.raises(RuntimeError, match="rank 1 cannot"):   # not that rank 0 waited in vain
        world.run(counted, "fail")
    assert world.closed and not any(p.is_alive() for p in world.processes)
    with pytest.raises(RuntimeError, match="these processes are gone"):
        world.run(counted, "c")


def test_a_process_that_died_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "WAIT_S", 5)
    world = ProcessWorld(1, connect=connected_as_rank_1)
    with pytest.raises(RuntimeError, match="the process of rank 0 ended with exit code 7"):
        world.run(counted, "die")


def connected_as_rank_1(rank: int, ranks: int, gpus: int, ids: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(rank=1, jobs=[])


def _torchrun(rank: int, folder: str, told: Any) -> None:
    """A rank under torchrun, on the CPU: jobs that work, one that fails on rank 1, one after it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    made: list[Any] = []

    def connect() -> Any:
        made.append(types.SimpleNamespace(rank=rank, num_ranks=2, backend="sim", jobs=[], abandon=lambda: made.append("abandoned")))
        return made[-1]

    Communicator.from_environment = staticmethod(connect)   # type: ignore[method-assign]
    worlds, seen = Worlds(), []
    seen.append(worlds.alone(lambda: {"rank": rank}, "torchrun"))
    for name in ("a", "fail", "b"):
        job = types.SimpleNamespace(case=dataclasses.replace(TOY, mode="torchrun"), name=name)
        try:
            seen.append(worlds.answers(job, lambda comm, job, meet: counted(comm, job.name, meet)))
        except RuntimeError as e:
            seen.append("rank 1 cannot" in str(e))
    told.put((rank, seen, made.count("abandoned")))


def test_under_torchrun_a_failure_is_known_to_all_ranks_and_the_next_case_goes_on(tmp_path: pathlib.Path) -> None:
    context = mp.get_context("fork")
    told = context.Queue()
    ranks = [context.Process(target=_torchrun, args=(rank, str(tmp_path), told), daemon=True) for rank in range(2)]
    for p in ranks:
        p.start()
    for rank, seen, abandoned in sorted(told.get(timeout=60) for _ in ranks):
        assert seen[0] == ({"rank": 0} if rank == 0 else {})
        assert seen[1] == [{"rank": r, "jobs": ["a"]} for r in range(2)] and seen[2] is True
        assert seen[3] == [{"rank": r, "jobs": ["b"]} for r in range(2)] and abandoned == 1
    assert not list(pathlib.Path("/dev/shm").glob("ncclep-bench-*"))


def test_each_implementation_is_played_in_processes_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options, said = parser.parse_args(["--peers", "all"]), []
    todo = [Case(tokens=tokens, mode="processes") for tokens in (1, 8)]
    played = [(name, case.tokens) for case, name in command._jobs(options, todo, said.append)]
    assert played == [("ncclep_py", 1), ("ncclep_py", 8), ("all_to_all_single", 1), ("all_to_all_single", 8)]
    assert len(said) == 4 and all("is not installed" in text for text in said)


def test_compile_times_are_those_of_the_kernels_a_case_used(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path))
    with LocalWorld(2, "sim") as world:
        kernels = world.run(run_pair, PairJob(dataclasses.replace(TOY, layout="rank_major")))[0]["kernels"]
    names = [name for name, _ in kernels]
    assert {"ll_rank_major_dispatch", "ll_combine"} <= set(names) and len(set(kernels)) == len(kernels)
    compiled: list[tuple[str, str]] = []

    def compile_kernel(spec: Any, arch: str) -> None:
        compiled.append((spec.name, os.environ["NCCLEP_CACHE_DIR"]))

    monkeypatch.setattr("ncclep_py.compiled.compile_kernel", compile_kernel)
    told = compile_times.compile_seconds(kernels, "sm_90")
    assert told is not None and told.keys() == {"cold", "warm"} and min(told.values()) >= 0
    assert [name for name, _ in compiled] == names * 2
    assert len({folder for _, folder in compiled}) == 1 and os.environ["NCCLEP_CACHE_DIR"] == str(tmp_path) != compiled[0][1]


def test_what_was_measured_is_kept_when_a_run_is_cut_short(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    play = command.row_of

    def cut(worlds: Any, case: Case, *rest: Any) -> Any:
        if case.layout == "rank_major":
            raise KeyboardInterrupt
        return play(worlds, case, *rest)

    monkeypatch.setattr(command, "row_of", cut)
    with pytest.raises(KeyboardInterrupt):
        command_line([*SIM, "--algorithm", "ll", "--tokens", "2", "--json", str(tmp_path / "r.json")])
    assert [row["layout"] for row in record.read(tmp_path / "r.json")["rows"]] == ["expert_major"]


def test_clocks_are_asked_of_nvml_then_of_nvidia_smi_else_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))
    asked: list[str] = []
    nvml = types.SimpleNamespace(NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=asked.append,
                                 nvmlDeviceGetClockInfo=lambda gpu, kind: 1000 * kind)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert machine.clocks("cuda:0") == {"sm": 1000, "memory": 2000} and asked == ["GPU-1-2"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for out, want in (("1980, 3201\n", {"sm": 1980, "memory": 3201}), ("", None), ("[N/A], 3201", None)):
        monkeypatch.setattr(machine.subprocess, "run", lambda *words, out=out, **named: types.SimpleNamespace(stdout=out))
        assert machine.clocks("cuda:0") == want


def over_gloo(rank: int, ranks: int, gpus: int, ids: Any, folder: str) -> types.SimpleNamespace:
    """A rank whose peers can be reached by gloo only."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    return types.SimpleNamespace(rank=rank, num_ranks=ranks, device=torch.device("cpu"), backend="sim", kernel=None)


def test_a_peer_is_played_in_processes_that_are_kept_for_it_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    made: list[Any] = []

    def world(ranks: int, gpus: int) -> ProcessWorld:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(ProcessWorld(ranks, connect=functools.partial(over_gloo, folder=str(folder))))
        return made[-1]

    monkeypatch.setattr(processes, "ProcessWorld", world)
    worlds, case = Worlds(), dataclasses.replace(TOY, mode="processes", hidden=64)
    try:
        for tokens, routing in ((5, "uniform"), (3, "zipf")):
            got = worlds.answers(PairJob(dataclasses.replace(case, tokens=tokens, routing=routing), "all_to_all_single"), run_pair)
            assert [answer["verified"] for answer in got] == [True, True] and got[0]["kernels"] == [] and not got[0]["exact"]
        assert len(made) == 1
        with pytest.raises(RuntimeError, match="routing must be one of"):
            worlds.answers(PairJob(dataclasses.replace(case, routing="nowhere.pt"), "all_to_all_single"), run_pair)
        assert made[0].closed
        with pytest.raises(RuntimeError, match="nccl"):   # not installed; processes of its own
            worlds.answers(PairJob(case, "nccl.ep"), run_pair)
        assert len(made) == 2 and made[1].closed
    finally:
        worlds.close()


@pytest.mark.parametrize(("other", "wrong"), [(2.01, False), (2.1, True), (float("nan"), True)])
def test_a_layer_that_gives_something_else_is_an_error(other: float, wrong: bool) -> None:
    def answers(job: Any, run: Any) -> list[dict[str, Any]]:
        return [{"seconds": [0.5, 0.5, 9.0], "square": 2.0 if job.implementation == "ncclep_py" else other}] * 2

    case = dataclasses.replace(TOY, mode="processes", backend="nccl")
    rows = list(command.layer_rows(types.SimpleNamespace(answers=answers), case))   # type: ignore[arg-type]
    assert [(row["implementation"], row["direction"], "error" in row) for row in rows] == [
        ("ncclep_py", "forward", False), ("ncclep_py", "forward+backward", False),
        ("all_to_all_single", "forward", wrong), ("all_to_all_single", "forward+backward", wrong)]
    assert rows[0]["tokens_per_s"] == 20


def test_processes_change_with_who_is_played_and_by_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Stand:
        def __init__(self, *wanted: int) -> None:
            self.wanted, self.closed = wanted, False
            made.append(self)

        def run(self, run: Any, job: Any) -> list[dict[str, Any]]:
            return [{"by": made.index(self)}]

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(processes, "ProcessWorld", Stand)
    worlds, case = Worlds(), dataclasses.replace(TOY, mode="processes")
    four = dataclasses.replace(case, ranks=4)
    by = [worlds.answers(PairJob(played, name), run_pair)[0]["by"] for played, name in (
        (case, "ncclep_py"), (case, "ncclep_py"), (four, "ncclep_py"), (four, "all_to_all_single"), (four, "nccl.ep"), (four, "nccl.ep"))]
    assert by == [0, 0, 1, 2, 3, 4] and [world.wanted for world in made] == [(2, 1), (4, 1), (4, 1), (4, 1), (4, 1)]
    assert all(world.closed for world in made) and worlds.processes is None
