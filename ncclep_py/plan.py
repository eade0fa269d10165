"""`python -m ncclep_py plan`: who talks to whom and how, what it needs of NCCL and of memory, and what it is predicted to cost.

A plan follows from the group's config and the topology alone, so every rank makes the same one. Device communicators are created with its
`DeviceNeeds`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
from typing import Any

from ncclep_py.config import Algorithm, GroupConfig, Layout, TokenType
from ncclep_py.cost_model import GROUP_CHUNKS, MACHINES, OURS, Cost, Machine, Workload, chunk_tokens, predict
from ncclep_py.ht_memory_map import HTWindowMap, ht_local_map
from ncclep_py.ht_net_map import HTNetMap
from ncclep_py.ll_net_member_map import LLNetMemberMap
from ncclep_py.memory_map import LocalMap, WindowMap
from ncclep_py.topology import Topology

__all__ = ["DeviceNeeds", "Plan", "add_arguments", "device_needs", "main", "make_plan", "network_map", "overlaps"]

ADDRESS_LIMIT = 1 << 63
"""Kernels compute offsets in signed 64-bit integers."""

FREE_SIGNALS, FREE_COUNTERS = 16, 16
"""For kernels of the caller's, of each context: signals beside one per rank (a barrier's), and counters."""


@dataclasses.dataclass(frozen=True)
class DeviceNeeds:
    """What a device communicator must provide for the networked peers of a group.

    Attributes:
        connection: ``"none"``, ``"full"`` (any networked peer) or ``"rail"`` (those with my index).
        contexts: independent queues of puts and signals.
        signals: signal words of each context of each rank.
        timeout_ns: nanoseconds a request may wait for room in its queue.
        least_timeout_ns: the same, when other requests have waited so long in vain.
        counters: counters of each context of each rank.
        first_free: the first signal that the group's own operations do not use.
    """

    connection: str = "none"
    contexts: int = 0
    signals: int = 0
    timeout_ns: int = 0
    least_timeout_ns: int = 0
    counters: int = 0
    first_free: int = 0

    @property
    def network(self) -> bool:
        """Whether any peer is networked."""
        return self.connection != "none"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a group of a config does on a topology.

    Attributes:
        topology: ranks and teams.
        config: of the group.
        transport: ``"local"`` (one team), ``"direct"`` (a row goes to each networked rank) or ``"hierarchical"`` (to each remote team, by
            its rail peer).
        needs: of the device communicator.
        chunk_tokens: tokens of a chunk of a hierarchical operation, 0 if there are none: the cost model's choice for the group's most tokens and an
            H200's links.
        best_chunk_tokens: its choice for the tokens and the machine asked for.
        regions: (name, first byte, end byte) of every region of the symmetric window.
        window_bytes, local_bytes: memory of each rank.
        costs: predicted (dispatch, combine) by name of the way: ``ll``, ``ht`` and ``ht direct``, the last for comparison only.
    """

    topology: Topology
    config: GroupConfig
    transport: str
    needs: DeviceNeeds
    chunk_tokens: int
    regions: list[tuple[str, int, int]]
    window_bytes: int
    local_bytes: int
    costs: dict[str, tuple[Cost, Cost]]
    best_chunk_tokens: int = 0

    def pair_us(self, way: str) -> float:
        """Microseconds of dispatch and combine, and of the update that a new routing needs."""
        return sum(cost.total_us for cost in self.costs[way]) + (0.0 if way == "ll" else OURS.update_us)

    def as_dict(self, rank: int = 0) -> dict[str, Any]:
        """Everything in JSON types, with the peers of `rank`."""
        t, direct, networked = self.topology, self.topology.direct_peers(rank), _networked(self, rank)
        return {
            "ranks": t.num_ranks, "team_size": t.team_size, "teams": t.num_teams, "algorithm": self.config.algorithm.name.lower(),
            "transport": self.transport, "rank": rank, "team": t.team_of(rank), "index": t.index_of(rank),
            "direct_peers": [p for p in direct if p != rank], "networked_peers": list(networked),
            "device_communicator": dataclasses.asdict(self.needs), "chunk_tokens": self.chunk_tokens,
            "best_chunk_tokens": self.best_chunk_tokens,
            "window_bytes": self.window_bytes, "local_bytes": self.local_bytes,
            "regions": [{"name": name, "begin": begin, "bytes": end - begin} for name, begin, end in self.regions],
            "predicted_us": {way: {"dispatch": _cost_dict(dispatch), "combine": _cost_dict(combine), "new_pair": round(self.pair_us(way), 1)}
                             for way, (dispatch, combine) in self.costs.items()},
        }


def _networked(plan: Plan, rank: int) -> tuple[int, ...]:
    """The networked peers that `rank` puts to."""
    return plan.topology.rail_peers(rank) if plan.needs.connection == "rail" else plan.topology.networked_peers(rank)


def _cost_dict(cost: Cost) -> dict[str, Any]:
    return {"total": round(cost.total_us, 1), "fixed": round(cost.fixed_us, 1), "bound": cost.bound,
            "parts": {name: round(us, 1) for name, us in cost.parts_us.items()},
            "rows": {name: round(rows, 1) for name, rows in dataclasses.asdict(cost.traffic).items()}}


# ---- memory ----------------------------------------------------------------------------------------------------------------
def network_map(config: GroupConfig, topology: Topology, chunk: int = 0) -> Any:
    """The byte plan of what several teams add, None for one team: its ``regions()``, ``num_signals``, ``num_contexts`` and ``total_bytes``."""
    if topology.num_teams == 1:
        return None
    ranks, size = topology.num_ranks, topology.team_size
    if config.algorithm is Algorithm.HIGH_THROUGHPUT:
        return HTNetMap.build(config, ranks, size, HTWindowMap.build(config, ranks), ht_local_map(config), chunk)
    if importlib.util.find_spec("ncclep_py.ll_net_map") is None:
        return None
    plans = WindowMap.build(config, ranks), LocalMap.build(config)
    return importlib.import_module("ncclep_py.ll_net_map").LLNetMap.build(config, ranks, size, *plans)


def member_map(config: GroupConfig, topology: Topology) -> LLNetMemberMap | None:
    """The byte plan of what masks add to that of several teams, None without."""
    if not config.enable_mask or topology.num_teams == 1:
        return None
    return LLNetMemberMap.build(config, topology.num_ranks, network_map(config, topology))


def device_needs(config: GroupConfig, topology: Topology) -> DeviceNeeds:
    """What the group's device communicator must provide."""
    if topology.num_teams == 1:
        return DeviceNeeds()
    network, connection = network_map(config, topology), "rail" if config.algorithm is Algorithm.HIGH_THROUGHPUT else "full"
    free = topology.num_ranks + FREE_SIGNALS
    if network is None:
        return DeviceNeeds(connection, 4, free, config.wait_ns // 4, config.wait_ns // 128, FREE_COUNTERS)
    # who cannot put to one rank must not come late to others (T-N4); with masks, a queue that is slow must not be taken for one that stands still
    room_ns, least = (config.wait_ns // 8, 1) if config.enable_mask else (config.wait_ns // 4, 32)
    return DeviceNeeds(connection, network.num_contexts, network.num_signals + free, room_ns, room_ns // least, FREE_COUNTERS, network.num_signals)


def overlaps(regions: list[tuple[str, int, int]], total_bytes: int) -> str:
    """A sentence if regions overlap, are not in [0, total_bytes), are beyond what kernels can address, or misaligned for 8-byte words; else empty."""
    last = ("the window's begin", 0, 0)
    for region in sorted(regions, key=lambda r: (r[1], r[2])):
        name, begin, end = region
        if begin % 8:
            return f"{name} begins at {begin}, which is no multiple of 8"
        if not begin <= end <= total_bytes < ADDRESS_LIMIT:
            return f"{name} takes bytes {begin} to {end} of a window of {total_bytes}, which kernels cannot address"
        if begin < last[2]:
            return f"{name} begins at {begin}, inside of {last[0]}, which ends at {last[2]}"
        last = region
    return ""


# ---- choice ----------------------------------------------------------------------------------------------------------------
def make_plan(config: GroupConfig, topology: Topology, machine: Machine = MACHINES["h200"], *, num_tokens: int = 0, num_sms: int = 0,
              per_rank: bool | None = None, max_teams: int = 0) -> Plan:
    """The plan of a group.

    Args:
        config: of the group; its ``algorithm`` decides whether rows go directly (LOW_LATENCY) or by the hierarchy (HIGH_THROUGHPUT).
        topology: ranks and teams.
        machine: link speeds the predictions are for.
        num_tokens: tokens of a rank they are for; 0: the config's most.
        num_sms: multiprocessors they are for; 0: the config's, else all.
        per_rank: received rows per (token, rank), see `cost_model.Workload`.
        max_teams: teams the experts of one token may lie in; 0: any.

    Example:
        >>> import ncclep_py as ep
        >>> from ncclep_py.plan import make_plan
        >>> from ncclep_py.topology import Topology
        >>> config = ep.GroupConfig(num_experts=256, max_dispatch_tokens_per_rank=128, hidden=7168)
        >>> plan = make_plan(config, Topology(num_ranks=16, team_size=8))
        >>> plan.transport, plan.needs.connection, plan.pair_us("ll") > plan.pair_us("ht") > 0   # predicted
        ('direct', 'full', True)
    """
    config.check_ranks(topology.num_ranks)
    if num_tokens > config.max_dispatch_tokens_per_rank:
        raise ValueError(f"num_tokens must be at most max_dispatch_tokens_per_rank = {config.max_dispatch_tokens_per_rank}, got {num_tokens}")
    tokens, high = num_tokens or config.max_dispatch_tokens_per_rank, config.algorithm is Algorithm.HIGH_THROUGHPUT
    row = config.row_bytes
    work = Workload(topology, tokens, config.hidden, config.num_experts, config.num_topk, row, row, num_sms or config.max_num_sms, max_teams,
                    per_rank)
    several = topology.num_teams > 1
    transport = "local" if not several else "hierarchical" if high else "direct"
    best = chunk_tokens(work, machine, choices=GROUP_CHUNKS) if transport == "hierarchical" else 0
    network, needs, members = network_map(config, topology), device_needs(config, topology), member_map(config, topology)
    chunk = network.chunk_tokens if transport == "hierarchical" else 0
    plans: tuple[Any, Any] = ((HTWindowMap.build(config, topology.num_ranks), ht_local_map(config)) if high
                              else (WindowMap.build(config, topology.num_ranks), LocalMap.build(config)))
    added = [plan for plan in (network, members) if plan is not None]
    regions = plans[0].regions() + [region for plan in added for region in plan.regions()]
    last = added[-1] if added else plans[0]   # each goes on where the one before ends
    contexts = needs.contexts or 1
    ways = {"ll": (Algorithm.LOW_LATENCY, True), "ht": (Algorithm.HIGH_THROUGHPUT, True)}
    if several:
        ways["ht direct"] = (Algorithm.HIGH_THROUGHPUT, False)
    costs = {way: tuple(predict(work, machine, algorithm, combine, contexts=contexts, hierarchical=hierarchical) for combine in (False, True))
             for way, (algorithm, hierarchical) in ways.items()}
    return Plan(topology, config, transport, needs, chunk, regions, last.total_bytes, getattr(last, "local_bytes", 0) or plans[1].total_bytes,
                costs, best)   # type: ignore[arg-type]


def fastest(config: GroupConfig, topology: Topology, **more: Any) -> Algorithm:
    """The algorithm whose dispatch and combine of a new routing together are predicted to take less time."""
    plan = make_plan(config, topology, **more)
    return Algorithm.LOW_LATENCY if plan.pair_us("ll") <= plan.pair_us("ht") else Algorithm.HIGH_THROUGHPUT


# ---- command line ----------------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `plan`."""
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--team", type=int, help="ranks that can address each other's memory, e.g. GPUs of a node (default: all)")
    parser.add_argument("--algorithm", choices=("auto", "ll", "ht"), default="auto", help="default: whichever is predicted to be faster")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of a rank (default 128)")
    parser.add_argument("--experts", type=int, default=256, help="experts over all ranks (default 256)")
    parser.add_argument("--topk", type=int, default=8, help="experts per token (default 8)")
    parser.add_argument("--hidden", type=int, default=7168, help="elements of a row (default 7168)")
    parser.add_argument("--dtype", choices=[t.name.lower() for t in TokenType], default="bf16", help="element type of rows (default bf16)")
    parser.add_argument("--layout", choices=("expert_major", "rank_major", "flat"), help="order of received rows (default: the algorithm's first)")
    parser.add_argument("--slots", type=int, default=1, help="payload slots (default 1)")
    parser.add_argument("--staging", type=int, default=0, help="LOW_LATENCY staging slots, two per operation in flight (default none)")
    parser.add_argument("--mask", action="store_true", help="LOW_LATENCY that goes on without ranks that do not come (enable_mask)")
    parser.add_argument("--sms", type=int, default=0, help="multiprocessors of an operation (default: all)")
    parser.add_argument("--max-teams", type=int, default=0, help="teams that the experts of one token may lie in (default: any)")
    parser.add_argument("--machine", choices=sorted(MACHINES), default="h200", help="link speeds (default h200)")
    parser.add_argument("--nvlink", type=float, help="GB/s in one direction, instead of the machine's")
    parser.add_argument("--network", type=float, help="GB/s per GPU in one direction, instead of the machine's")
    parser.add_argument("--memory", type=float, help="GB/s of GPU memory, instead of the machine's")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, help="ranks that share a GPU (default 1)")
    parser.add_argument("--rank", type=int, default=0, help="whose peers to show (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _asked(options: argparse.Namespace) -> Plan:
    """The plan the command line asks for."""
    topology = Topology(options.ranks, options.ranks if options.team is None else options.team)
    topology.team_of(options.rank)
    speeds = {name: getattr(options, name) for name in ("nvlink", "network", "memory") if getattr(options, name) is not None}
    machine = dataclasses.replace(MACHINES[options.machine], ranks_per_gpu=options.ranks_per_gpu, **speeds)
    dtype = TokenType[options.dtype.upper()].torch_dtype()

    def config(algorithm: Algorithm) -> GroupConfig:
        only = Layout.RANK_MAJOR if options.layout == "rank_major" and algorithm is Algorithm.LOW_LATENCY else Layout.UNSET
        return GroupConfig(num_experts=options.experts, max_dispatch_tokens_per_rank=options.tokens, hidden=options.hidden, dtype=dtype,
                           num_topk=options.topk, algorithm=algorithm, num_slots=options.slots, slot_layout=only,
                           num_staging_slots=options.staging if algorithm is Algorithm.LOW_LATENCY else 0, enable_mask=options.mask)

    more: dict[str, Any] = {"machine": machine, "num_sms": options.sms, "max_teams": options.max_teams,
                            "per_rank": None if options.layout is None else options.layout != "expert_major"}
    named = {"ll": Algorithm.LOW_LATENCY, "ht": Algorithm.HIGH_THROUGHPUT}
    if options.algorithm in named or options.mask:   # only one of them has masks
        algorithm = named.get(options.algorithm, Algorithm.LOW_LATENCY)
    else:
        algorithm = fastest(config(Algorithm.HIGH_THROUGHPUT), topology, **more)
    allowed = {Algorithm.LOW_LATENCY: ("expert_major", "rank_major"), Algorithm.HIGH_THROUGHPUT: ("flat", "expert_major")}[algorithm]
    if options.layout and options.layout not in allowed:
        raise ValueError(f"layout of {algorithm.name} must be {' or '.join(allowed)}, got {options.layout}")
    return make_plan(config(algorithm), topology, **more)


def text(plan: Plan, rank: int) -> str:
    """The plan for people."""
    t, needs = plan.topology, plan.needs
    networked = _networked(plan, rank)
    lines = [f"{t.num_ranks} ranks in {t.num_teams} teams of {t.team_size}; {plan.config.algorithm.name}, {plan.transport}",
             f"rank {rank}: team {t.team_of(rank)}, index {t.index_of(rank)}; {t.team_size - 1} direct peers, puts to {len(networked)} networked ones"
             + (f" ({', '.join(map(str, networked[:6]))}{', ...' if len(networked) > 6 else ''})" if networked else "")]
    if needs.network:
        chunks = f", chunks of {plan.chunk_tokens} tokens (best for this machine: {plan.best_chunk_tokens})" if plan.chunk_tokens else ""
        lines.append(f"device communicator: GIN connection {needs.connection}, {needs.contexts} contexts, {needs.signals} signals "
                     f"({needs.signals - needs.first_free} of them, and {needs.counters} counters, for kernels of your own){chunks}")
    lines.append(f"memory per rank: window {plan.window_bytes / 1e6:.1f} MB, own {plan.local_bytes / 1e6:.2f} MB")
    lines += [f"  {name:<14} {begin:>14} {end - begin:>14} bytes" for name, begin, end in plan.regions if end > begin]
    lines.append("predicted microseconds (shares of NVLink and network are assumed, see ncclep_py/cost_model.py):")
    for way, pair in plan.costs.items():
        told = [f"{which} {cost.total_us:8.1f} ({cost.bound})" for which, cost in zip(("dispatch", "combine"), pair, strict=True)]
        note = "   for comparison: not built" if way == "ht direct" else ""
        lines.append(f"  {way:<10} {'   '.join(told)}   pair of a new routing {plan.pair_us(way):8.1f}{note}")
    return "\n".join(lines) + "\n"


def main(options: argparse.Namespace) -> int:
    """Print the plan; 2 for what cannot be planned."""
    try:
        plan = _asked(options)
    except (ValueError, NotImplementedError) as e:
        sys.stdout.write(json.dumps({"ok": False, "error": str(e)}) + "\n") if options.json else sys.stderr.write(f"{e}\n")
        return 2
    sys.stdout.write(json.dumps({"ok": True} | plan.as_dict(options.rank)) + "\n" if options.json else text(plan, options.rank))
    return 0
