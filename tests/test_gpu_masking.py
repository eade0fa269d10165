"""Groups with ``enable_mask`` on a GPU: ranks in one process, and one process per rank (needs NVIDIA's MPS on one GPU). ``-m gpu``."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch
from test_masking import Rank
from test_nvfp4 import Packed

from ncclep_py import CombineConfig, CombineInputs, CombineOutputs, DispatchConfig, DispatchInputs, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.errors import EpMaskedError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
PROGRAM = pathlib.Path(__file__).parent / "fault_program.py"


def config(ranks: int, **more: object) -> GroupConfig:
    return GroupConfig(num_experts=2 * ranks, max_dispatch_tokens_per_rank=5, hidden=16, num_topk=2, enable_mask=True, max_num_sms=4,
                       timeout_ns=500_000_000, **more)


LAYOUTS = pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])


def run(ranks: int, program: object, layout: Layout = Layout.EXPERT_MAJOR) -> list:
    def body(comm: object) -> object:
        with Group.create(comm, config(ranks)) as group:
            return program(Rank(group, layout))

    with LocalWorld(ranks, "nccl") as world:
        return world.run(body)


@LAYOUTS
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_without_a_fault_it_is_the_plain_group(ranks: int, layout: Layout) -> None:
    def program(r: Rank) -> object:
        good = []
        for step in range(20):
            r.dispatch(step)
            good.append(r.right(step, r.combine(step), ()))
        r.group.check()
        return all(good), r.active(), r.group.get_async_error(), r.group.waited_ns().tolist()

    for good, active, flag, waited in run(ranks, program, layout):
        assert good and active == [1] * ranks and flag == 0
        assert all(0 <= w < 10**9 for w in waited), waited


@LAYOUTS
@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_does_not_call_is_masked_told_and_readmitted(missing: int, layout: Layout) -> None:
    def program(r: Rank) -> object:
        r.dispatch(0)
        good = [r.right(0, r.combine(0), ())]
        if r.rank == missing:
            r.sit_out(3)
            r.dispatch(1)
            with pytest.raises(EpMaskedError):
                r.group.check()
        else:
            for step in (1, 2):
                r.dispatch(step)
                good.append(r.right(step, r.combine(step), [missing]))
            r.group.check()
            assert r.active() == [int(q != missing) for q in range(3)] and r.group.get_async_error() == 1
            assert f"rank {missing} did not come in time" in str(r.group.async_error())
        r.group.mask_clean()
        r.group.error_clear()
        for step in range(3, 8):
            r.dispatch(step)
            good.append(r.right(step, r.combine(step), ()))
        r.group.check()
        return all(good), r.active(), r.group.get_async_error()

    assert run(3, program, layout) == [(True, [1, 1, 1], 0)] * 3


@LAYOUTS
def test_a_rank_lost_between_dispatch_and_combine_and_two_at_once(layout: Layout) -> None:
    def program(r: Rank) -> object:
        r.dispatch(0)
        if r.rank in (1, 3):
            r.sit_out()
            good = True
        else:
            good = r.right(0, r.combine(0), (), [1, 3])
        r.group.mask_clean()
        r.dispatch(1)
        return good and r.right(1, r.combine(1), ()) and r.active() == [1] * 4

    assert all(run(4, program, layout))


@LAYOUTS
def test_send_only_does_the_whole_operation(layout: Layout) -> None:
    def program(r: Rank) -> object:
        good = True
        for step in range(5):
            tokens, ids, weights = (x.cuda() for x in r.inputs(step))
            inputs = DispatchInputs(tokens, weights if layout is Layout.RANK_MAJOR else None)
            r.received = r.handle.dispatch(inputs, topk_idx=ids, config=DispatchConfig(send_only=True))
            assert r.handle.complete() is r.received
            out = r.handle.combine(CombineInputs(r.received.tokens), CombineOutputs(topk_weights=weights), CombineConfig(send_only=True))
            assert r.handle.complete() is out
            good = good and r.right(step, out, ())
        r.group.check()
        return good

    assert all(run(3, program, layout))


@LAYOUTS
def test_packed_rows(layout: Layout) -> None:
    """The kernel of NVFP4 combine under masks; its conversions are made of integers where the device has none."""
    cfg = dataclasses.replace(config(3), num_experts=6, max_dispatch_tokens_per_rank=8, hidden=1024)
    cases = [Packed(cfg, [8, 3, 5], layout, seed=seed) for seed in range(4)]

    def program(comm: object) -> None:
        comm.fp4 = True
        with Group.create(comm, cfg) as group:
            handle = group.create_handle(layout, num_topk=2)
            for case in cases:
                case.device = comm.device
                case.step(comm.rank, handle)
            group.check()

    with LocalWorld(3, "nccl") as made:
        made.run(program)


def test_masks_that_differ_become_their_union() -> None:
    def program(r: Rank) -> object:
        if r.rank == 0:
            r.group.mask_update([1, 1, 0])
        r.dispatch(0)
        if r.rank == 2:
            with pytest.raises(EpMaskedError):
                r.group.check()
            r.sit_out()
            good = True
        else:
            good = r.right(0, r.combine(0), [2]) and r.active() == [1, 1, 0]
        r.group.mask_clean()
        return good and r.active() == [1, 1, 1]

    assert all(run(3, program))


def test_a_graph_goes_on_without_a_rank() -> None:
    """A captured pair replays under whatever mask the device holds: nothing of it is baked in."""
    def program(r: Rank) -> object:
        tokens, ids, weights = (x.cuda() for x in r.inputs(5))
        r.received = r.handle.dispatch(tokens, topk_idx=ids)
        out = r.handle.combine(r.received.tokens, topk_weights=weights)
        r.group.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
            r.received = r.handle.dispatch(tokens, topk_idx=ids)
            out = r.handle.combine(r.received.tokens, topk_weights=weights)
        r.group.comm.together(graph.replay)
        torch.cuda.current_stream().synchronize()
        good = [r.right(5, out, ())]
        r.group.comm.together((lambda: None) if r.rank == 2 else graph.replay)
        torch.cuda.current_stream().synchronize()
        if r.rank != 2:
            good.append(r.right(5, out, [2]))
        r.group.mask_clean()
        return all(good)

    assert all(run(3, program))


# ---- one process per rank ----------------------------------------------------------------------------------------------------------
def processes(ranks: int, what: str, layout: Layout, seconds: int = 100) -> list[subprocess.CompletedProcess[str]]:
    """Run `fault_program.py` on `ranks` processes of this host. (torchrun would end all when one ends.)"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    root = str(PROGRAM.parent.parent)
    common = os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(PROGRAM), what, layout.name.lower()]
    running = [subprocess.Popen(command, env=common | {"RANK": str(r), "LOCAL_RANK": str(r)}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE) for r in range(ranks)]
    done = []
    try:
        for process in running:
            out, err = process.communicate(timeout=seconds)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in running:
            process.kill()
    return done


@LAYOUTS
def test_a_killed_rank_is_masked_by_all_others(layout: Layout) -> None:
    done = processes(4, "kill", layout)
    for rank, process in enumerate(done):
        if rank == 1:
            assert process.returncode == -9
        else:
            assert process.returncode == 0 and "masked right" in process.stdout, process.stdout[-1000:] + process.stderr[-3000:]


@LAYOUTS
def test_a_sleeping_rank_is_masked_told_and_readmitted(layout: Layout) -> None:
    for rank, process in enumerate(processes(4, "sleep", layout)):
        assert process.returncode == 0 and "readmitted right" in process.stdout, process.stdout[-1000:] + process.stderr[-3000:]
        assert ("was told" if rank == 1 else "masked right") in process.stdout
