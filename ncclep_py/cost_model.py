"""Predicted time of dispatch and combine for given ranks, teams and link speeds. Plain arithmetic; nothing here touches a device.

The model. An operation takes a fixed time (launch, rendezvous, first and last byte) plus the longest of the times its parts would take alone, since
they overlap:

* **nvlink**: bytes a rank moves to or from direct peers, itself excluded, over its NVLink bandwidth (one direction);
* **network**: bytes to or from networked peers over the bandwidth of its network card, and at least one `message_us` per message and context;
* **memory**: bytes read and written by all ranks of one GPU, over its memory bandwidth;
* **sms** (HIGH_THROUGHPUT): rows a multiprocessor can move per second.

With several teams the fixed time grows by `network_us`. Bandwidths are the data sheets'; a `Constants` holds the share of them that is reached.
Routing is uniform: every token picks K different experts, each set equally likely; how many ranks or teams these fall on is the exact expectation.

What is known about the constants (tests/test_cost_model.py has every figure with its source):

* `DEEPEP_V1` is fitted to figures published for DeepEP V1: two numbers per operation and link. It reproduces the figures it was fitted to within 5 %
  (one node, 1 to 1024 tokens, 4 to 24 multiprocessors; 16 to 256 ranks LL), and within 17 % figures that had no part in the fit: other hidden
  sizes and top-k, H100, H800, NVIDIA's nccl_ep 0.1 on 8 to 64 GPUs, HIGH_THROUGHPUT on 16 to 64 ranks.
* `OURS` has the fixed times and the memory share fitted to this library's own measurements, several ranks on one H200 (within 13 %). Its shares of
  NVLink and network are those of `DEEPEP_V1`: **an assumption**, since this library has not been measured on several GPUs or nodes.
* `message_us` is an assumption in both: no published figure depends on it enough to tell.

Not reproduced, and not meant to be: libraries with another protocol (pplx, UCCL, MORI, Hybrid-EP), network cards that are driven by a processor,
DeepEP where ranks of one node talk over their network cards, skewed routing, and other traffic on the links.
"""

from __future__ import annotations

import dataclasses
import math

from ncclep_py.config import Algorithm, GroupConfig
from ncclep_py.topology import Topology

__all__ = ["DEEPEP_V1", "MACHINES", "OURS", "Constants", "Cost", "Machine", "Shares", "Traffic", "Workload", "chunk_tokens", "distinct", "predict",
           "traffic"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a data sheet says, per GPU.

    Attributes:
        nvlink: GB/s of 10^9 bytes in one direction.
        network: GB/s of the GPU's share of the network cards, one direction.
        memory: GB/s, reads and writes together.
        sms: multiprocessors.
        ranks_per_gpu: ranks that share a GPU; above 1 direct peers share its memory, and nothing crosses NVLink.
    """

    nvlink: float
    network: float
    memory: float
    sms: int
    ranks_per_gpu: int = 1

    def __post_init__(self) -> None:
        for name in ("nvlink", "network", "memory", "sms", "ranks_per_gpu"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


MACHINES = {
    "h800": Machine(200, 50, 3350, 132),
    "h100": Machine(450, 50, 3350, 132),
    "h200": Machine(450, 50, 4800, 132),
    "b200": Machine(900, 50, 8000, 148),
}
"""By name, each with one 400 Gb/s network card per GPU."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Constants of one operation, dispatch or combine, of one algorithm.

    Attributes:
        fixed_us: microseconds of an operation that moves nothing.
        nvlink: share of NVLink's bandwidth that is reached.
        network: share of the network card's bandwidth.
        network_us: microseconds more with several teams.
        memory: share of the memory bandwidth.
        sm_gb: GB/s of rows one multiprocessor sends; infinite where it was never the limit.
    """

    fixed_us: float
    nvlink: float
    network: float
    network_us: float
    memory: float
    sm_gb: float = math.inf


@dataclasses.dataclass(frozen=True)
class Constants:
    """A library.

    Attributes:
        ll: LOW_LATENCY's (dispatch, combine).
        ht: HIGH_THROUGHPUT's (dispatch, combine).
        message_us: microseconds between two messages of one context, an assumption.
        row_per_rank: LL dispatch sends a row once to each networked rank, not once per expert.
        update_us: microseconds of an update of HIGH_THROUGHPUT's maps, needed for every new routing.
    """

    ll: tuple[Shares, Shares]
    ht: tuple[Shares, Shares]
    message_us: float
    row_per_rank: bool
    update_us: float = 0.0


DEEPEP_V1 = Constants(
    ll=(Shares(11.2, 0.61, 0.99, 34.0, 0.85), Shares(11.7, 0.51, 0.835, 9.8, 0.85)),
    ht=(Shares(35.0, 0.665, 0.88, 0.0, 0.85, 19.3), Shares(53.0, 0.66, 0.88, 0.0, 0.85, 19.5)),
    message_us=0.05, row_per_rank=False)
"""Also serves for NVIDIA's nccl_ep 0.1, whose LOW_LATENCY is of the same descent."""

OURS = Constants(
    ll=(Shares(10.0, 0.61, 0.99, 34.0, 0.883), Shares(10.0, 0.51, 0.835, 9.8, 0.883)),
    ht=(Shares(17.0, 0.665, 0.88, 34.0, 0.787, 19.3), Shares(17.0, 0.66, 0.88, 34.0, 0.787, 19.5)),
    message_us=0.05, row_per_rank=True, update_us=20.0)
"""Fixed times, the update and memory shares measured, the rest assumed: see the module's text."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is sent, by each rank.

    Attributes:
        topology: ranks and teams.
        num_tokens: tokens of a rank.
        hidden: elements of a row.
        num_experts: experts over all ranks.
        num_topk: experts of a token.
        dispatch_bytes: bytes of a dispatched row with its scales; 0: bf16.
        combine_bytes: bytes of a combined row; 0: bf16.
        num_sms: multiprocessors an operation may use; 0: no limit.
        max_teams: teams the experts of one token may lie in; 0: any.
        per_rank: a received row per (token, rank), else per (token, expert); None: as the algorithm's first layout has it, LOW_LATENCY per expert,
            HIGH_THROUGHPUT per rank.
    """

    topology: Topology
    num_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    dispatch_bytes: int = 0
    combine_bytes: int = 0
    num_sms: int = 0
    max_teams: int = 0
    per_rank: bool | None = None

    def __post_init__(self) -> None:
        if self.num_experts % self.topology.num_ranks:
            raise ValueError(f"num_experts must be a multiple of the number of ranks: {self.num_experts} over {self.topology.num_ranks}")
        if not 1 <= self.num_topk <= self.num_experts:
            raise ValueError(f"num_topk must be in [1, num_experts = {self.num_experts}], got {self.num_topk}")
        for name in ("num_tokens", "dispatch_bytes", "combine_bytes", "num_sms", "max_teams"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    def row_bytes(self, combine: bool) -> int:
        """Bytes of a row of one direction."""
        return (self.combine_bytes if combine else self.dispatch_bytes) or 2 * self.hidden


def distinct(bins: int, num_experts: int, num_topk: int) -> float:
    """Expected number of `bins`, equal shares of the experts, that K different experts fall into."""
    outside, none = num_experts - num_experts // bins, 1.0
    for i in range(num_topk):
        none *= max(0, outside - i) / (num_experts - i)
    return bins * (1 - none)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Expected traffic of a rank in one operation.

    Attributes:
        nvlink_rows: rows to (dispatch) or from (combine) other ranks of its team.
        network_rows: rows over its network card.
        messages: puts over its network card, signals included.
        sent_rows: rows its multiprocessors move.
        memory_rows: rows read and written in the memory of its GPU on its behalf.
    """

    nvlink_rows: float
    network_rows: float
    messages: float
    sent_rows: float
    memory_rows: float


def traffic(work: Workload, algorithm: Algorithm, combine: bool, row_per_rank: bool = True, hierarchical: bool = True) -> Traffic:
    """Rows and messages of one operation.

    Args:
        work, algorithm: what is sent and how.
        combine: combine instead of dispatch.
        row_per_rank: see `Constants`.
        hierarchical: HT: one row per (token, remote team), fanned out there; else one per (token, remote rank).
    """
    t, tokens = work.topology, work.num_tokens
    ranks, size, teams = t.num_ranks, t.team_size, t.num_teams
    own = size / ranks   # share of pairs whose rank is in my team
    reach = min(work.max_teams or teams, teams)   # a token's experts lie in this many teams
    experts = work.num_experts * reach // teams
    ranks_hit, teams_hit = distinct(reach * size, experts, work.num_topk), distinct(reach, experts, work.num_topk)
    low = algorithm is Algorithm.LOW_LATENCY
    rows = tokens * ranks_hit if (not low if work.per_rank is None else work.per_rank) else tokens * work.num_topk
    if low:
        remote = tokens * ranks_hit * (1 - own) if row_per_rank and not combine else rows * (1 - own)
        # a networked row is read, put, received into staging and copied (dispatch) or added up (combine)
        return Traffic(rows * (own - 1 / ranks), remote, remote + (ranks - size if remote else 0), rows,
                       tokens + rows * own + 2 * remote + (rows * (1 - own) if not combine else 0))
    if not hierarchical:
        remote = tokens * ranks_hit * (1 - own)
        return Traffic(rows * own * (size - 1) / size, remote, remote, rows, tokens + rows + 2 * remote)
    remote = tokens * teams_hit * (1 - own)
    # every row reaches its rank from a rank of the rank's own team, which is that rank itself once in `size`
    return Traffic(rows * (size - 1) / size, remote, remote, rows, tokens + rows + 2 * remote)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Predicted microseconds of one operation.

    Attributes:
        total_us: all of it.
        fixed_us: what is not proportional to anything.
        parts_us: by link, what each would take alone; the longest counts.
        bound: name of the longest.
        traffic: the rows behind it.
    """

    total_us: float
    fixed_us: float
    parts_us: dict[str, float]
    bound: str
    traffic: Traffic


def predict(work: Workload, machine: Machine, algorithm: Algorithm, combine: bool, constants: Constants = OURS, *, contexts: int = 4,
            hierarchical: bool = True) -> Cost:
    """Time of one dispatch, or combine, on the slowest of equally loaded ranks.

    Args:
        work, machine, algorithm, combine: what is sent, over what, and how.
        constants: whose implementation.
        contexts: queues a rank's messages are spread over.
        hierarchical: see `traffic`.
    """
    if contexts < 1:
        raise ValueError(f"contexts must be at least 1, got {contexts}")
    shares = (constants.ll if algorithm is Algorithm.LOW_LATENCY else constants.ht)[combine]
    moved, row = traffic(work, algorithm, combine, constants.row_per_rank, hierarchical), work.row_bytes(combine)
    sms = work.num_sms or machine.sms
    per_us = row / 1e3   # GB/s are thousands of bytes per microsecond
    parts = {
        "nvlink": moved.nvlink_rows * per_us / (machine.nvlink * shares.nvlink) if machine.ranks_per_gpu == 1 else 0.0,
        "network": max(moved.network_rows * per_us / (machine.network * shares.network), moved.messages * constants.message_us / contexts),
        "memory": moved.memory_rows * machine.ranks_per_gpu * per_us / (machine.memory * shares.memory),
        "sms": moved.sent_rows * per_us / (sms * shares.sm_gb) if machine.ranks_per_gpu == 1 else 0.0,
    }
    bound = max(parts, key=lambda name: parts[name])
    fixed = shares.fixed_us + (shares.network_us if work.topology.num_teams > 1 else 0.0)
    return Cost(fixed + parts[bound], fixed, parts, bound, moved)


CHUNKS = (8, 16, 32, 64, 128, 256)
GROUP_CHUNKS = (8, 16, 32)   # a lane for each token


def chunk_tokens(work: Workload, machine: Machine, constants: Constants = OURS, *, contexts: int = 4, choices: tuple[int, ...] = CHUNKS) -> int:
    """Tokens of a chunk of a hierarchical operation for which the time that does not overlap is least.

    A chunk is fanned out when all of it is there: the first chunk's way over the network and the last chunk's fan-out overlap with nothing, and every
    chunk costs each remote team one signal.
    """
    t, row = work.topology, work.row_bytes(False) / 1e3
    per_token = distinct(t.num_teams, work.num_experts, work.num_topk) * (1 - t.team_size / t.num_ranks)
    fan_out = distinct(t.num_ranks, work.num_experts, work.num_topk) / t.num_teams
    shares = constants.ht[0]

    def lost(chunk: int) -> float:
        signals = -(-work.num_tokens // chunk) * (t.num_teams - 1)
        return (chunk * per_token * row / (machine.network * shares.network) + chunk * fan_out * row / (machine.nvlink * shares.nvlink)
                + signals * constants.message_us / contexts)

    return min(choices, key=lost)


def group_chunk_tokens(config: GroupConfig, topology: Topology) -> int:
    """`chunk_tokens` of a HIGH_THROUGHPUT group, of those its kernels can have, for its most tokens. Every rank must find the same, so the speeds are
    an H200's whatever the machine: what counts is the share of a chunk's time to a message's."""
    work = Workload(topology, config.max_dispatch_tokens_per_rank, config.hidden, config.num_experts, config.num_topk, config.row_bytes)
    return chunk_tokens(work, MACHINES["h200"], choices=GROUP_CHUNKS)
