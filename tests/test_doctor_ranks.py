"""`doctor` over all ranks: launchers' environments, what differs between ranks, the report, and two real processes over gloo."""

import copy
import io
import json
import os
import socket
import subprocess
import sys

import pytest
from test_doctor import machine

from ncclep_py.doctor import check_network, examine
from ncclep_py.doctor_ranks import differences, ranks_text, started_by_launcher, summary, world, write
from ncclep_py.network import several_teams

CARDS = [{"name": "mlx5_0", "ports": [{"state": "ACTIVE", "rate": "400", "link": "InfiniBand"}]}]
NETWORK = {"cards": CARDS, "peermem": True, "gdrcopy": False, "several_teams": True, "environment": {}}
GIN = {"ranks": 4, "teams": 2, "team_size": 2, "team_rank": 0, "team_stride": 1, "device_api": True, "gin": "GDAKI", "railed_gin": "GDAKI"}


def reports(count=4, **changes):
    made = []
    for rank in range(count):
        facts = machine(**changes)
        facts["network"] = copy.deepcopy(NETWORK)
        report = examine(facts, lambda f, found: {"compiled": None, "seconds": 0.0, "ran_on_gpu": None, "message": ""})
        made.append(report | {"rank": rank, "host": f"node{rank // 2}", "gin": dict(GIN)})
    return made


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, None), ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)), ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "5"}, (5, 16, 5)), ({"RANK": "x", "WORLD_SIZE": "8"}, None)])
def test_world(environment, expected):
    assert world(environment) == expected
    assert not started_by_launcher(environment)   # nobody says where to meet
    assert started_by_launcher(environment | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}) is (expected is not None)


@pytest.mark.parametrize(("ranks", "text"), [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 1, 7, 8], "ranks 0-1, 5, 7-8")])
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text


def test_alike_ranks_do_not_differ():
    assert differences(reports()) == [] and summary(reports())["ok"]


def test_another_nccl_on_one_rank_is_an_error_that_names_it():
    several = reports()
    several[3]["versions"]["NCCL (libnccl)"]["version"] = "2.29.7"
    told = summary(several)
    assert not told["ok"] and told["differences"] == [
        {"level": "error", "name": "NCCL (libnccl)", "problem": "2.30.7 on ranks 0-2; 2.29.7 on rank 3", "cure": ""}]


def test_other_differences_are_told():
    several = reports()
    several[1]["environment"]["NCCL_IB_HCA"] = "mlx5_1"
    several[2]["gpus"] = []
    several[2]["network"]["cards"] = []
    several[3]["gin"] |= {"teams": 4, "team_size": 1}
    found = {f["name"]: f for f in differences(several)}
    assert found["environment NCCL_IB_HCA"]["problem"] == "nothing on ranks 0, 2-3; mlx5_1 on rank 1"
    assert "nothing on rank 2" in found["GPUs seen"]["problem"]
    assert found["network cards"]["problem"] == "1 cards, 1 active on ranks 0-1, 3; none on rank 2"
    assert found["NCCL's teams"] == {"level": "error", "name": "NCCL's teams", "problem": "2 on ranks 0-2; 4 on rank 3", "cure": ""}


def test_report_for_people():
    several = reports()
    several[1]["findings"] = [{"level": "error", "name": "NCCL version", "problem": "too old", "cure": "upgrade"}]
    several[1]["ok"] = False
    several[2]["gin"] = {"problem": "NcclError: unhandled"}
    out = io.StringIO()
    write(summary(several), out)
    text = out.getvalue()
    for part in ("2 teams of 2, GIN GDAKI, on rails GDAKI", "NCCL over all ranks  nothing on ranks 0-1, 3; NcclError: unhandled on rank 2",
                 "Checks of rank 1\n", "error  NCCL version", "-> upgrade", "Checks of ranks 0, 2-3", "node1", "There are errors."):
        assert part in text, text


@pytest.mark.parametrize(("network", "level", "says"), [
    (None, "none", "not installed: NCCL"), (NETWORK, "ok", "mlx5_0"),
    (NETWORK | {"cards": [], "several_teams": False}, "none", "no cards; needed for several nodes"),
    (NETWORK | {"cards": []}, "warn", "there is no network card")])
def test_network_check(network, level, says):
    facts = machine(nccl__loaded=23203)
    facts |= {"network": network} if network else {}
    found, = check_network(facts)
    assert found.level == level and says in found.problem


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, False), ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False), ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
    ({"SLURM_NNODES": "2"}, True), ({"NCCL_LSA_TEAM_SIZE": "2"}, True), ({"WORLD_SIZE": "4"}, False)])
def test_several_teams(environment, expected):
    assert several_teams(environment) is expected


def test_two_processes(tmp_path):
    """Two ranks on this machine, one with another setting; rank 0 tells what differs, both end with the same exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                           "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for rank in range(2):
        own = common | {"RANK": str(rank), "LOCAL_RANK": "1"} | ({"NCCL_IB_HCA": "mlx5_7"} if rank else {})   # local rank 1: no self-test
        started.append(subprocess.Popen([sys.executable, "-m", "ncclep_py", "doctor", "--json", "--no-connect"], env=own, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True))
    try:
        (first, error), (second, _) = (p.communicate(timeout=100) for p in started)
    finally:
        for process in started:
            process.kill()
    assert first, error
    told = json.loads(first)
    assert [r["rank"] for r in told["ranks"]] == [0, 1] and second == ""
    assert any(f["name"] == "environment NCCL_IB_HCA" and f["problem"] == "nothing on rank 0; mlx5_7 on rank 1" for f in told["differences"])
    assert started[0].returncode == started[1].returncode == (0 if told["ok"] else 1)
