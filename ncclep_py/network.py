"""GIN, NCCL's GPU-initiated networking: what this machine has for it, what is missing, and the device communicator kernels are given.

Only groups of several teams need any of it. (nccl4py itself is imported by ``communicator`` alone, which hands its objects over.)
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclep_py.nccl_version import version_text

if TYPE_CHECKING:
    import torch

    from ncclep_py.plan import DeviceNeeds

__all__ = ["DeviceCommunicator", "ENVIRONMENT", "create", "gin_of", "missing", "network_facts", "queue_room", "refuse", "requirements",
           "team_size_of"]

FIRST_NCCL = 23100
"""NCCL whose device library kernels can be linked with, and which tells the size of its device communicator."""

ENVIRONMENT = ("NCCL_RMA_PLUGIN", "NCCL_GIN_PLUGIN", "NCCL_NET_PLUGIN", "NCCL_GIN_TYPE", "NCCL_GIN_ENABLE", "NCCL_IB_DISABLE", "NCCL_IB_HCA",
               "NCCL_SOCKET_IFNAME", "NCCL_LSA_TEAM_SIZE")
"""Variables that decide which network NCCL uses, and how ranks form teams."""

CONNECTIONS = {"none": 0, "full": 1, "rail": 2}
"""NCCL's numbers (``ncclGinConnectionType_t``)."""

QUEUE_ROOM = 32
"""``NCCL_NET_MAX_REQUESTS``."""

QUEUE_BYTES, LOST_WORD, LIMITS_BYTES = 32, 3, 128

KINDS = ("PROXY", "GDAKI")
"""Kinds of GIN whose queues are as `kernels/gin_room.cu` takes them: one for each (context, peer), asked without waiting."""


# ---- what there is -------------------------------------------------------------------------------------------------------
def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def several_teams(environment: Mapping[str, str]) -> bool:
    """Whether a launcher starts ranks on several nodes, or NCCL is told to make several teams."""
    values = {name: int(text) for name, text in environment.items() if text.isdigit()}
    return (values.get("WORLD_SIZE", 1) > values.get("LOCAL_WORLD_SIZE", values.get("WORLD_SIZE", 1)) or values.get("SLURM_NNODES", 1) > 1
            or "NCCL_LSA_TEAM_SIZE" in environment)


def network_facts(system: Path = Path("/")) -> dict[str, Any]:
    """Network cards, kernel modules and settings of this machine, below `system`:
    {"cards": [{"name", "ports": [{"state", "rate", "link"}]}], "peermem", "gdrcopy", "several_teams", "environment"}."""
    cards = []
    folder = system / "sys" / "class" / "infiniband"
    for card in sorted(folder.iterdir()) if folder.is_dir() else ():
        ports = [{"state": _read(port / "state").partition(": ")[2] or "unknown", "rate": _read(port / "rate"), "link": _read(port / "link_layer")}
                 for port in sorted((card / "ports").iterdir())] if (card / "ports").is_dir() else []
        cards.append({"name": card.name, "ports": ports})
    modules = {line.split()[0] for line in _read(system / "proc" / "modules").splitlines() if line}
    return {"cards": cards, "peermem": bool(modules & {"nvidia_peermem", "nv_peer_mem"}), "gdrcopy": (system / "dev" / "gdrdrv").exists(),
            "several_teams": several_teams(os.environ),
            "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}}


def missing(facts: Mapping[str, Any], nccl: int | None) -> list[str]:
    """What may keep NCCL from offering GIN, most basic first; `facts` from `network_facts`, `nccl` its version code."""
    found, told = [], facts["environment"]
    plugin = told.get("NCCL_RMA_PLUGIN") or told.get("NCCL_GIN_PLUGIN") or told.get("NCCL_NET_PLUGIN")
    active = [c for c in facts["cards"] if any(p["state"] == "ACTIVE" for p in c["ports"])]
    if nccl is not None and nccl < FIRST_NCCL:
        found.append(f"NCCL {version_text(nccl)} is too old, {version_text(FIRST_NCCL)} is needed")
    if told.get("NCCL_GIN_ENABLE") == "0":
        found.append("NCCL_GIN_ENABLE=0 turns it off")
    if not facts["cards"] and not plugin:
        found.append("there is no network card (/sys/class/infiniband is empty) and no plugin for another (NCCL_RMA_PLUGIN)")
    elif not active and not plugin:
        found.append(f"no port of {', '.join(c['name'] for c in facts['cards'])} is active")
    if told.get("NCCL_IB_DISABLE") == "1" and not plugin:
        found.append("NCCL_IB_DISABLE=1 turns InfiniBand and RoCE off")
    if active and not facts["peermem"] and not plugin:
        found.append("nvidia_peermem is not loaded, so a card reaches GPU memory only if its driver and the kernel support DMA-BUF")
    if plugin and not any(os.path.exists(p) for p in plugin.split(",")) and "/" in plugin:
        found.append(f"the plugin {plugin} does not exist")
    if "NCCL_GIN_TYPE" in told:
        found.append(f"NCCL_GIN_TYPE={told['NCCL_GIN_TYPE']} allows this kind only (2 proxy, 3 GDAKI; 4 GPI and 5 EFA do not work here)")
    return found


def gin_of(comm: Any) -> dict[str, Any]:
    """What an nccl4py communicator says about teams and GIN, in JSON types."""
    lsa = comm.team_lsa
    return {"ranks": int(comm.nranks), "teams": int(comm.n_lsa_teams), "team_size": int(lsa.n_ranks), "team_rank": int(lsa.rank),
            "team_stride": int(lsa.stride), "device_api": bool(comm.device_api_support), "gin": getattr(comm.gin_type, "name", "NONE"),
            "railed_gin": getattr(comm.railed_gin_type, "name", "NONE")}


# ---- refusals ------------------------------------------------------------------------------------------------------------
def team_size_of(rank: int, gin: Mapping[str, Any], facts: Mapping[str, Any], nccl: int) -> int:
    """Ranks of a team, from `gin_of`; ``RuntimeError`` for ranks that cannot reach each other, or form teams of another kind than `Topology`'s."""
    ranks, size = gin["ranks"], gin["team_size"]
    if gin["teams"] == 1:
        if not gin["device_api"]:
            raise RuntimeError(f"rank {rank}: the ranks cannot all address each other's memory: device API no, 1 LSA team. Check NCCL_P2P_DISABLE, "
                               "NCCL_CUMEM_ENABLE and the P2P matrix of `python -m ncclep_py doctor`")
        return ranks
    if size * gin["teams"] != ranks or gin["team_stride"] != 1 or gin["team_rank"] != rank % size:
        raise RuntimeError(f"rank {rank}: teams must hold equally many ranks in a row, but NCCL made {gin['teams']} of {ranks} ranks, mine of {size} "
                           f"with stride {gin['team_stride']}, in which I am {gin['team_rank']}: start as many ranks on every node, node by node")
    if gin["railed_gin"] == "NONE":
        raise RuntimeError(_no_gin(rank, gin, facts, nccl))
    return size


def refuse(rank: int, gin: Mapping[str, Any], needs: DeviceNeeds, facts: Mapping[str, Any], nccl: int) -> None:
    """``RuntimeError`` unless the communicator offers what `needs` asks for."""
    if not needs.network:
        return
    if nccl < FIRST_NCCL or gin["railed_gin"] == "NONE":
        raise RuntimeError(_no_gin(rank, gin, facts, nccl))
    kind = gin["gin"] if needs.connection == "full" else gin["railed_gin"]
    if kind not in (*KINDS, "NONE"):
        raise RuntimeError(f"rank {rank}: NCCL offers GIN of kind {kind} between these teams, with which ncclep_py does not work: its queues hold "
                           "requests to several ranks, or do not tell which are done. Set NCCL_GIN_TYPE to 2 (proxy) or 3 (GDAKI)")
    if needs.connection == "full" and gin["gin"] == "NONE":
        raise RuntimeError(f"rank {rank}: LOW_LATENCY over {gin['teams']} teams puts to any networked rank, but NCCL connects only ranks of the same "
                           f"index here ({gin['railed_gin']} on rails): use HIGH_THROUGHPUT, or a network that connects all cards (NCCL_CROSS_NIC)")


def _no_gin(rank: int, gin: Mapping[str, Any], facts: Mapping[str, Any], nccl: int) -> str:
    why = "; ".join(missing(facts, nccl)) or "nothing is obviously missing"
    return (f"rank {rank}: {gin['ranks']} ranks form {gin['teams']} teams of {gin['team_size']}, which reach each other only over GIN, and NCCL "
            f"{version_text(nccl)} offers none: {why}. `python -m ncclep_py doctor` shows what is here; NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET "
            "what NCCL tried")


# ---- the device communicator ----------------------------------------------------------------------------------------------
class DeviceCommunicator:
    """What network operations of a kernel need.

    Attributes:
        address: of NCCL's device communicator in device memory, 0 for a group of one team.
        needs: what it was made for.
    """

    def __init__(self, address: int = 0, needs: DeviceNeeds | None = None, resource: Any = None, memory: torch.Tensor | None = None,
                 size: int = 0) -> None:
        self.address, self.needs = address, needs
        self._resource, self._memory, self._size = resource, memory, size

    def lost(self) -> list[int]:
        """Ranks that nothing is put to any more, for their queues stood still for too long (``kernels/gin_room.cu``). Waits for the stream."""
        import torch

        if self._memory is None or self.needs is None:
            return []
        end = self._memory.numel() - self._size - LIMITS_BYTES
        queues = self._memory[:end].cpu().view(torch.int64).view(-1, QUEUE_BYTES // 8)
        return [rank for rank, queue in enumerate(queues.flip(0)[: len(queues) // self.needs.contexts].tolist()) if queue[LOST_WORD]]

    def note(self) -> str:
        """What to say about them, empty if there are none."""
        lost = self.lost()
        return (f"the network to rank {', '.join(map(str, lost))} stood still, nothing is put there any more: when it works again, create the group "
                "anew") if lost else ""

    def close(self) -> None:
        """Give it back; idempotent. No kernel that uses it may be running."""
        resource, self._resource = self._resource, None
        if resource is not None:
            resource.close()
            self.address = 0


def requirements(nccl: Any, needs: DeviceNeeds) -> Any:
    """`needs` in the words of nccl4py (`nccl`: its core module).

    Signals are strong: one lands after *all* earlier puts of its context and target, which is the order kernels rely on. Contexts are nobody else's:
    what is in their queues is counted.
    """
    return nccl.NCCLDevCommRequirements(
        gin_context_count=needs.contexts, gin_signal_count=needs.signals, gin_counter_count=needs.counters,
        gin_connection_type=CONNECTIONS[needs.connection],
        gin_strong_signals_required=True, gin_va_signals_required=False, gin_exclusive_contexts=True)


def queue_room(environment: Mapping[str, str]) -> int:
    """Requests that certainly fit in the queue of a (context, peer): of NCCL's proxy ``NCCL_NET_MAX_REQUESTS`` times what the network takes at once,
    unless a setting makes it shorter (a power of two; NCCL ignores others); GDAKI's hold 128 unless set."""
    told = [_told(environment, name) for name in ("NCCL_GIN_PROXY_QUEUE_SIZE", "NCCL_GIN_GDAKI_QP_DEPTH")]
    sizes = [size for size in told if size > 0 and size & (size - 1) == 0]
    return min([*sizes, QUEUE_ROOM])


def _told(environment: Mapping[str, str], name: str) -> int:
    """A number NCCL takes from its variables, or from the files it reads when they are unset; 0 for none."""
    files = [environment.get("NCCL_CONF_FILE") or os.path.join(environment.get("HOME", "/"), ".nccl.conf"), "/etc/nccl.conf"]
    lines = [line.partition("=") for file in files for line in _read(Path(file)).splitlines()]
    values = [environment.get(name, ""), *(value.strip() for key, _, value in lines if key.strip() == name)]
    return next((int(value) for value in values if value.isdecimal()), 0)


def _accounts(num_ranks: int, needs: DeviceNeeds) -> bytes:
    """What stands before the device communicator: a `Queue` for each (context, rank), then the `Limits` (``kernels/gin_room.cu``)."""
    limits = struct.pack("<4Q", needs.timeout_ns, num_ranks, queue_room(os.environ), needs.least_timeout_ns)
    return bytes(QUEUE_BYTES * needs.contexts * num_ranks) + limits.ljust(LIMITS_BYTES, b"\0")


def create(comm: Any, resource: Any, needs: DeviceNeeds, num_ranks: int, device: torch.device) -> DeviceCommunicator:
    """The device communicator of a resource that nccl4py made for `needs`, copied to where kernels can read it."""
    import ctypes

    import torch

    size = comm.properties.dev_comm_runtime_version_size
    if not size:
        raise RuntimeError("NCCL does not tell the size of its device communicator; "
                           f"groups of several teams need {version_text(FIRST_NCCL)} or newer and nccl4py 0.6 or newer")
    have = resource.dev_comm
    given = have.gin_context_count, have.gin_signal_count, have.gin_counter_count
    wanted = needs.contexts, needs.signals, needs.counters
    if any(there < least for there, least in zip(given, wanted, strict=True)):
        told = ["{} contexts, {} signals and {} counters".format(*counts) for counts in (given, wanted)]
        raise RuntimeError(f"NCCL gives {told[0]}, but the group needs {told[1]}")
    accounts = _accounts(num_ranks, needs)
    memory = torch.frombuffer(bytearray(accounts + bytes((ctypes.c_char * size).from_address(int(resource.ptr)))), dtype=torch.uint8).to(device)
    return DeviceCommunicator(memory.data_ptr() + len(accounts), needs, resource, memory, size)
