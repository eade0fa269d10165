"""Both algorithms over several teams on real NCCL: 8 ranks share a GPU, NCCL_LSA_TEAM_SIZE makes teams of them, and the loopback RMA plugin is the
network between these. Every case runs in a process of its own (tests/gin_program.py), since teams and plugin are chosen when NCCL starts. ``-m gpu``.

The plugin is built here if there is a compiler; NCCLEP_LOOPBACK_RMA names one that was built elsewhere. Where nvJitLink is too old for NCCL's device
library, NCCLEP_CUBIN_DIR must name a folder made by ``python tests/gin_program.py prepare FOLDER`` on another machine.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from gin_program import GPU_ONLY, GRAPHS, SCENARIOS
from loopback_rma import build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ROOT = pathlib.Path(__file__).parent.parent
PROGRAM = str(ROOT / "tests" / "gin_program.py")
RANKS, SECONDS = 8, 150
CASES = [s for s in SCENARIOS if s not in GPU_ONLY]


def why_no_kernels() -> str:
    """Why kernels that use the network cannot be had here, empty if they can."""
    from ncclep_py import device_library

    if os.environ.get("NCCLEP_CUBIN_DIR"):
        return ""
    try:
        from cuda.bindings import nvjitlink

        library = device_library.library_path()
        device_library.check_linker(library, device_library._built_with(library), tuple(nvjitlink.version())[:2])
    except (ImportError, RuntimeError) as e:
        return str(e)
    return ""


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the loopback plugin."""
    named = os.environ.get("NCCLEP_LOOPBACK_RMA")
    if named:
        assert os.path.exists(named), f"NCCLEP_LOOPBACK_RMA names {named}, which does not exist"
        return named
    if why := build.why_not():
        pytest.skip(f"the loopback RMA plugin cannot be built: {why}; build it elsewhere and set NCCLEP_LOOPBACK_RMA")
    return str(build.built(tmp_path_factory.getbasetemp()))


def run(plugin: str, scenario: str, teams: int, *words: str, processes: int = 0, seconds: int = SECONDS, **environment: str) -> str:
    """Run a scenario; its output. A process that does not end is killed with all its children."""
    if teams > 1 and (why := why_no_kernels()):
        pytest.skip(why)
    command: Sequence[str] = [sys.executable, PROGRAM, "run", scenario, "--teams", str(teams), *words]
    if processes:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command[1:], "--processes"]
    own = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if not processes:   # under MPS there are not so many
        own["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"   # a queue for each stream: else the plugin's copies may stand behind a kernel that waits for them
    if teams > 1:
        own |= {"NCCL_RMA_PLUGIN": plugin, "NCCL_LSA_TEAM_SIZE": str((processes or RANKS) // teams)}
    process = subprocess.Popen(command, env=os.environ | own | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{scenario} with {teams} teams did not end within {seconds} s:\n{output[-3000:]}")
    assert process.returncode == 0, output[-4000:]
    assert output.count("bitwise equal") == max(1, processes), output[-4000:]
    return output


def moved(output: str) -> dict[str, int]:
    """What the plugin says it did."""
    line = next(line for line in output.splitlines() if "puts=" in line)
    return {name: int(n) for name, _, n in (word.partition("=") for word in line.split() if "=" in word)}


@pytest.mark.parametrize("teams", [1, 2, 4, 8])
@pytest.mark.parametrize("scenario", CASES)
def test_every_case(plugin: str, scenario: str, teams: int) -> None:
    output = run(plugin, scenario, teams)
    if teams > 1:
        assert moved(output)["puts"] > 0 and moved(output)["signals"] > 0   # the network was really used


@pytest.mark.parametrize("teams", [2, 8])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("scenario", ["ll_expert_major", "ll_rank_major", "ll_masked", "ht_flat", "ht_expert_major", "own"])
def test_delayed_and_reordered(plugin: str, scenario: str, seed: int, teams: int) -> None:
    output = run(plugin, scenario, teams, LOOPBACK_DELAY_US="300", LOOPBACK_REORDER="1", LOOPBACK_SEED=str(seed), seconds=2 * SECONDS)
    assert moved(output)["passed"] > 0   # something really came out of order


@pytest.mark.parametrize("teams", [1, 2, 4, 8])
@pytest.mark.parametrize("scenario", GRAPHS)
def test_graphs(plugin: str, scenario: str, teams: int) -> None:
    run(plugin, scenario, teams)


@pytest.mark.parametrize("scenario", GRAPHS)
def test_graphs_reordered(plugin: str, scenario: str) -> None:
    run(plugin, scenario, 2, LOOPBACK_DELAY_US="300", LOOPBACK_REORDER="1", LOOPBACK_SEED="4", seconds=2 * SECONDS)


@pytest.mark.parametrize("after", [0, 200, 2000])
@pytest.mark.parametrize("teams", [2, 8])
@pytest.mark.parametrize("scenario", ["ll_lost", "ht_lost"])
def test_a_rank_that_stops_answering(plugin: str, scenario: str, teams: int, after: int) -> None:
    """Rank 1 of each connection (on rails: its second team) falls silent, at once or later: an error on every rank within the deadlines, no hang."""
    output = run(plugin, scenario, teams, LOOPBACK_LOSE_RANK="1", LOOPBACK_LOSE_AFTER=str(after))
    assert output.count("EpTimeoutError") + output.count("EpPeerError") >= RANKS and moved(output)["lost"] > 0, output[-3000:]


@pytest.mark.parametrize("teams", [2, 8])
@pytest.mark.parametrize("scenario", ["ll_lost", "ht_lost"])
def test_a_queue_that_does_not_move(plugin: str, scenario: str, teams: int) -> None:
    """As when a network card fails: requests never complete, and queues of four of them fill up. Nobody waits in NCCL, which would be for ever."""
    output = run(plugin, scenario, teams, LOOPBACK_LOSE_RANK="1", LOOPBACK_LOSE_AFTER="9", LOOPBACK_LOSE="never", NCCL_GIN_PROXY_QUEUE_SIZE="4")
    assert output.count("EpTimeoutError") + output.count("EpPeerError") >= RANKS and moved(output)["lost"] > 0, output[-3000:]


@pytest.mark.parametrize("teams", [2, 8])
@pytest.mark.parametrize("scenario", ["ll_expert_major", "ll_rank_major", "ll_masked", "ht_flat", "ht_expert_major"])
def test_queues_of_two_requests(plugin: str, scenario: str, teams: int) -> None:
    run(plugin, scenario, teams, LOOPBACK_DELAY_US="100", LOOPBACK_REORDER="1", LOOPBACK_SEED="7", NCCL_GIN_PROXY_QUEUE_SIZE="2", seconds=2 * SECONDS)


@pytest.mark.parametrize("after", [0, 200, 2000])
@pytest.mark.parametrize("teams", [2, 4, 8])
def test_a_rank_whose_network_falls_silent_is_masked(plugin: str, teams: int, after: int) -> None:
    """With masks no error: the others, or those of its team, go on without it, and have the bits of the mask they agree on."""
    output = run(plugin, "ll_masked_lost", teams, LOOPBACK_LOSE_RANK="1", LOOPBACK_LOSE_AFTER=str(after), seconds=2 * SECONDS)
    assert output.count("goes on without [1") >= RANKS // teams - 1 + (RANKS - 1) * (teams == RANKS) and moved(output)["lost"] > 0, output[-3000:]


@pytest.mark.parametrize("teams", [2, 8])
def test_a_rank_whose_queues_do_not_move_is_masked(plugin: str, teams: int) -> None:
    """As when its network card fails: what it puts, and what is put to it, never completes, in queues of four requests."""
    output = run(plugin, "ll_masked_lost", teams, LOOPBACK_LOSE_RANK="1", LOOPBACK_LOSE_AFTER="9", LOOPBACK_LOSE="never",
                 NCCL_GIN_PROXY_QUEUE_SIZE="4", seconds=2 * SECONDS)
    assert output.count("goes on without [1") >= RANKS // teams - 1 + (RANKS - 1) * (teams == RANKS) and moved(output)["lost"] > 0, output[-3000:]


@pytest.mark.parametrize("scenario", ["ll_expert_major", "ll_rank_major", "ht_flat", "ht_expert_major"])
def test_many_rounds(plugin: str, scenario: str) -> None:
    """The same cases again and again, with puts out of order: counts of signals and of requests go on from round to round."""
    output = run(plugin, scenario, 4, "--rounds", "12", LOOPBACK_DELAY_US="50", LOOPBACK_REORDER="1", LOOPBACK_SEED="11", seconds=2 * SECONDS)
    assert moved(output)["passed"] > 100


@pytest.mark.parametrize("scenario", [*CASES, *GRAPHS])
def test_a_process_per_rank(plugin: str, scenario: str) -> None:
    """Four processes in two teams; needs MPS. Puts between processes go through the plugin's rings in shared memory."""
    output = run(plugin, scenario, 2, processes=4)
    assert sum(int(word.partition("=")[2]) for word in output.split() if word.startswith("rings=")) > 0
