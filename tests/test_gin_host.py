"""What a machine lacks for GIN, which teams are refused, what is asked of NCCL, device communicators: with made-up machines and a made-up NCCL."""

import contextlib
import ctypes
import struct
import types

import pytest
import torch

from ncclep_py import Group, GroupConfig, communicator, network
from ncclep_py.config import Algorithm
from ncclep_py.network import DeviceCommunicator, missing, network_facts, queue_room, refuse, requirements, team_size_of
from ncclep_py.plan import DeviceNeeds
from ncclep_py.recording import RecordingCommunicator
from ncclep_py.topology import Topology

FULL, RAIL = DeviceNeeds("full", 4, 16, 5_000, 100, 3), DeviceNeeds("rail", 2, 9, 5_000, 100)


def machine(tmp_path, cards=(), modules="", gdr=False):
    for name, state in cards:
        port = tmp_path / "sys" / "class" / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "link_layer").write_text("InfiniBand\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "modules").write_text(modules)
    if gdr:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / "gdrdrv").write_text("")
    return tmp_path


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name in (*network.ENVIRONMENT, "WORLD_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)


def test_facts_of_a_machine_with_cards(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_GIN_TYPE", "3")
    facts = network_facts(machine(tmp_path, [("mlx5_1", "1: DOWN"), ("mlx5_0", "4: ACTIVE")], "nvidia_peermem 16384 0 - Live 0x0\n", gdr=True))
    assert [c["name"] for c in facts["cards"]] == ["mlx5_0", "mlx5_1"]
    assert facts["cards"][0]["ports"] == [{"state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link": "InfiniBand"}]
    assert facts["peermem"] and facts["gdrcopy"] and facts["environment"] == {"NCCL_GIN_TYPE": "3"}


def test_facts_of_a_machine_with_nothing(tmp_path):
    assert network_facts(tmp_path) == {"cards": [], "peermem": False, "gdrcopy": False, "several_teams": False, "environment": {}}


@pytest.mark.parametrize(("cards", "modules", "environment", "nccl", "says"), [
    ([], "", {}, 23203, ["there is no network card"]),
    ([], "", {"NCCL_RMA_PLUGIN": "/nowhere/x.so"}, 23203, ["the plugin /nowhere/x.so does not exist"]),
    ([("mlx5_0", "1: DOWN")], "nvidia_peermem 1", {}, 23203, ["no port of mlx5_0 is active"]),
    ([("mlx5_0", "4: ACTIVE")], "", {}, 23203, ["nvidia_peermem is not loaded"]),
    ([("mlx5_0", "4: ACTIVE")], "nvidia_peermem 1", {}, 23203, []),
    ([("mlx5_0", "4: ACTIVE")], "nvidia_peermem 1", {}, 23007, ["NCCL 2.30.7 is too old, 2.31.0 is needed"]),
    ([("mlx5_0", "4: ACTIVE")], "nvidia_peermem 1", {"NCCL_IB_DISABLE": "1", "NCCL_GIN_TYPE": "3"}, 23203,
     ["NCCL_IB_DISABLE=1 turns", "NCCL_GIN_TYPE=3 allows this kind only"]),
    ([], "", {"NCCL_GIN_ENABLE": "0", "NCCL_NET_PLUGIN": "aws"}, None, ["NCCL_GIN_ENABLE=0 turns it off"])])
def test_what_is_missing(monkeypatch, tmp_path, cards, modules, environment, nccl, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = missing(network_facts(machine(tmp_path, cards, modules)), nccl)
    assert len(found) == len(says) and all(part in line for part, line in zip(says, found, strict=True))


# ---- teams ---------------------------------------------------------------------------------------------------------------
def gin(**change):
    told = {"ranks": 16, "teams": 2, "team_size": 8, "team_rank": 3, "team_stride": 1, "device_api": True, "gin": "PROXY", "railed_gin": "PROXY"}
    return told | change


NOTHING = {"cards": [], "peermem": False, "gdrcopy": False, "environment": {}}


def test_team_sizes():
    assert team_size_of(11, gin(), NOTHING, 23203) == 8
    assert team_size_of(3, gin(teams=1, team_size=16, railed_gin="NONE", gin="NONE"), NOTHING, 23203) == 16


@pytest.mark.parametrize(("rank", "change", "says"), [
    (3, {"teams": 1, "team_size": 16, "device_api": False}, "cannot all address each other's memory: device API no"),
    (3, {"teams": 3, "team_size": 5}, "teams must hold equally many ranks in a row, but NCCL made 3 of 16 ranks, mine of 5"),
    (3, {"team_stride": 2}, "with stride 2"), (4, {}, "in which I am 3"),
    (3, {"railed_gin": "NONE", "gin": "NONE"},
     "16 ranks form 2 teams of 8, which reach each other only over GIN, and NCCL 2.32.3 offers none: there is no network card")])
def test_teams_that_are_refused(rank, change, says):
    with pytest.raises(RuntimeError, match=says):
        team_size_of(rank, gin(**change), NOTHING, 23203)


@pytest.mark.parametrize(("algorithm", "kernel"), [(Algorithm.LOW_LATENCY, "ll_net_combine"), (Algorithm.HIGH_THROUGHPUT, "ht_net_combine")])
def test_groups_of_several_teams_ask_for_network_kernels(algorithm, kernel):
    config = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=4, hidden=256, num_topk=2, algorithm=algorithm)
    comm = RecordingCommunicator(Topology(4, 2), 8)
    Group.create(comm, config)
    assert kernel in {spec.name for spec in comm.specs}


def test_needs_that_are_refused():
    refuse(0, gin(), FULL, NOTHING, 23203)
    refuse(0, gin(gin="NONE"), RAIL, NOTHING, 23203)
    refuse(0, gin(gin="NONE", railed_gin="NONE"), DeviceNeeds(), NOTHING, 23203)
    for kind in ("GPI", "EFA_GDA"):
        with pytest.raises(RuntimeError, match=f"GIN of kind {kind} between these teams, with which ncclep_py does not work"):
            refuse(0, gin(gin=kind), FULL, NOTHING, 23203)
        with pytest.raises(RuntimeError, match=f"GIN of kind {kind}"):
            refuse(0, gin(railed_gin=kind), RAIL, NOTHING, 23203)
    with pytest.raises(RuntimeError, match="connects only ranks of the same index here .PROXY on rails.: use HIGH_THROUGHPUT"):
        refuse(0, gin(gin="NONE"), FULL, NOTHING, 23203)
    with pytest.raises(RuntimeError, match="NCCL 2.30.7 offers none: NCCL 2.30.7 is too old"):
        refuse(0, gin(), RAIL, NOTHING, 23007)


# ---- device communicators ------------------------------------------------------------------------------------------------
class Resource:
    """As nccl4py's: a structure in host memory."""

    def __init__(self, contexts=4, signals=16, counters=3):
        self.content = ctypes.create_string_buffer(bytes(range(40)), 40)
        self.ptr = ctypes.addressof(self.content)
        self.dev_comm = types.SimpleNamespace(gin_context_count=contexts, gin_signal_count=signals, gin_counter_count=counters)
        self.closed = 0

    def close(self):
        self.closed += 1


class Rank(types.SimpleNamespace):
    """As `NcclRank` sees its communicator."""


def ranks(count, resource=Resource):
    made = []
    for _ in range(count):
        mine = resource()
        comm = types.SimpleNamespace(properties=types.SimpleNamespace(dev_comm_runtime_version_size=40), asked=[])
        comm.create_dev_comm = lambda need, comm=comm, mine=mine: comm.asked.append(need) or mine
        made.append(Rank(comm=comm, device=torch.device("cpu"), resource=mine, num_ranks=count))
    return made


@pytest.fixture
def nccl(monkeypatch):
    core = types.SimpleNamespace(group=contextlib.nullcontext, NCCLDevCommRequirements=lambda **named: types.SimpleNamespace(**named))
    monkeypatch.setattr(communicator, "_nccl", lambda: core)
    return core


def test_what_is_asked_of_nccl(nccl):
    asked = vars(requirements(nccl, FULL))
    assert asked == {"gin_context_count": 4, "gin_signal_count": 16, "gin_counter_count": 3, "gin_connection_type": 1,
                     "gin_strong_signals_required": True, "gin_va_signals_required": False, "gin_exclusive_contexts": True}
    assert requirements(nccl, RAIL).gin_connection_type == 2


def test_requirements_are_those_of_nccl4py():
    core = pytest.importorskip("nccl.core")
    asked = requirements(core, RAIL)
    assert (asked.gin_connection_type, asked.gin_signal_count, asked.gin_context_count) == (core.NcclGinConnectionType.RAIL, 9, 2)
    assert requirements(core, FULL).gin_counter_count == 3


def test_device_communicators_are_copied_to_the_device_and_given_back(nccl):
    several = ranks(3)
    made = communicator.create_dev_comms(several, FULL)
    for rank, device in zip(several, made, strict=True):
        assert bytes((ctypes.c_char * 40).from_address(device.address)) == bytes(range(40)) and device.address != rank.resource.ptr
        limits = struct.unpack("<16Q", (ctypes.c_char * 128).from_address(device.address - 128))
        assert limits == (FULL.timeout_ns, 3, 32, FULL.least_timeout_ns, *[0] * 12)
        assert bytes((ctypes.c_char * (32 * 4 * 3)).from_address(device.address - 128 - 32 * 4 * 3)) == bytes(32 * 4 * 3)   # of (context, rank)
        assert device.needs == FULL and len(rank.comm.asked) == 1
        device.close()
        device.close()
        assert rank.resource.closed == 1 and device.address == 0


def test_ranks_that_were_given_up_are_named(nccl):
    device = communicator.create_dev_comms(ranks(3), FULL)[0]
    assert device.lost() == [] and device.note() == "" and DeviceCommunicator().note() == ""
    lost_word_of_2 = device.address - 128 - 32 * 3 + 24
    ctypes.c_uint64.from_address(lost_word_of_2).value = 1
    assert device.lost() == [2]
    assert device.note() == "the network to rank 2 stood still, nothing is put there any more: when it works again, create the group anew"


def test_files_that_nccl_reads(tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("# NCCL_GIN_PROXY_QUEUE_SIZE=1\nNCCL_GIN_PROXY_QUEUE_SIZE = 8\n")
    assert queue_room({"NCCL_CONF_FILE": str(file)}) == 8
    assert queue_room({"NCCL_CONF_FILE": str(file), "NCCL_GIN_PROXY_QUEUE_SIZE": "4"}) == 4
    (tmp_path / ".nccl.conf").write_text("NCCL_GIN_GDAKI_QP_DEPTH=16\n")
    assert queue_room({"HOME": str(tmp_path)}) == 16


@pytest.mark.parametrize(("told", "room"), [(None, 32), ("4", 4), ("1", 1), ("64", 32), ("0", 32), ("12", 32), ("-1", 32), ("many", 32)])
def test_no_more_requests_than_fit_in_a_queue(told, room):
    assert queue_room({} if told is None else {"NCCL_GIN_PROXY_QUEUE_SIZE": told}) == room


def test_one_team_asks_for_nothing(nccl):
    several = ranks(2)
    assert [d.address for d in communicator.create_dev_comms(several, DeviceNeeds())] == [0, 0] and not several[0].comm.asked
    DeviceCommunicator().close()


@pytest.mark.parametrize(("contexts", "signals", "counters"), [(3, 16, 3), (4, 15, 3), (4, 16, 2)])
def test_less_than_asked_is_refused(nccl, contexts, signals, counters):
    with pytest.raises(RuntimeError, match=f"NCCL gives {contexts} contexts, {signals} signals and {counters} counters, but the group needs "
                                           "4 contexts, 16 signals and 3 counters"):
        communicator.create_dev_comms(ranks(1, lambda: Resource(contexts, signals, counters)), FULL)


def test_an_nccl_that_does_not_tell_the_size(nccl):
    several = ranks(1)
    several[0].comm.properties.dev_comm_runtime_version_size = None
    with pytest.raises(RuntimeError, match="does not tell the size of its device communicator"):
        communicator.create_dev_comms(several, FULL)
