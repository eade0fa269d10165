"""Operations for kernels of one's own over several teams, on the CPU: puts with a signal or a counter, waits, flush and barrier. See ``ops``."""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.errors import Code, Phase
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.ht_net_ops import _network, _wait_signals
from ncclep_py.simulator.task import Task

__all__: list[str] = []   # looked up by name


def _acquires(access: Access) -> bool:
    return access.effect.order == "acquire" and access.effect.scope == "sys"


# ---- put -------------------------------------------------------------------------------------------------------------------------
def net_put_signal(call: Call, task: Task, comm: int, window: int, peer: int, context: int, target_at: int, source_at: int, num_bytes: int,
                   signal: int, amount: int) -> int:
    """A put, then a signal."""
    def net(access: Access) -> None:
        network = _network(call, comm)
        if num_bytes > 0:
            network.put(task, window, peer, context, target_at, source_at, num_bytes)
        network.signal(task, peer, context, signal, amount)

    return call.perform(task, (), {"net": net})


def net_put_counted(call: Call, task: Task, comm: int, window: int, peer: int, context: int, target_at: int, source_at: int, num_bytes: int,
                    which: int) -> int:
    """A put that is counted."""
    return call.perform(task, (), {"net": lambda a: _network(call, comm).put(task, window, peer, context, target_at, source_at, num_bytes,
                                                                             counter=which)})


# ---- look ------------------------------------------------------------------------------------------------------------------------
def net_read_signal(call: Call, task: Task, comm: int, context: int, signal: int) -> int:
    """A signal's value."""
    def net(access: Access) -> int:
        network = _network(call, comm)
        value = network.seen(task.rank, context, signal)
        if _acquires(access):
            network.acquire(task, context, signal)
        return value

    return call.perform(task, (), {"net": net})


def net_read_counter(call: Call, task: Task, comm: int, context: int, which: int) -> int:
    """A counter's value."""
    def net(access: Access) -> int:
        network = _network(call, comm)
        value = network.counted(task.rank, context, which)
        if _acquires(access):
            network.acquire_counter(task, context, which)
        return value

    return call.perform(task, (), {"net": net})


# ---- wait ------------------------------------------------------------------------------------------------------------------------
def _wait(task: Task, access: Access, ready: Callable[[], bool], describe: Callable[[], str]) -> bool:
    """Wait for something of my own part of the network; whether it came."""
    while not ready() and not task.late:
        access.scheduler.wait(task, ready, lambda: (describe(), []))
    task.late = False
    return ready()


def net_wait_signal(call: Call, task: Task, comm: int, context: int, signal: int, least: int, rank: int, peer: int, epoch: int, fail: int,
                    record: int, timeout: int) -> int:
    """A signal of mine."""
    def net(access: Access) -> int:
        if task.warp or _wait_signals(call, task, access, comm, [(peer, context, signal, least)]) is None:
            return 0
        seen = _network(call, comm).seen(rank, context, signal)
        return call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.ROWS, rank, peer, peer, seen, least)

    return call.perform(task, (comm, context, signal, least, rank, peer, epoch, fail, record, timeout), {"net": net})


def net_wait_counter(call: Call, task: Task, comm: int, context: int, which: int, least: int, rank: int, peer: int, epoch: int, fail: int,
                     record: int, timeout: int) -> int:
    """A counter of mine."""
    network = _network(call, comm)

    def value() -> int:
        return network.counted(rank, context, which)

    def net(access: Access) -> int:
        if task.warp:
            return 0
        network.watchers.add(rank)
        came = _wait(task, access, lambda: value() >= least,
                     lambda: f"waits for counter {which} of context {context}, of puts to rank {peer} ({value()} of {least})")
        if _acquires(access):
            network.acquire_counter(task, context, which)
        return 0 if came else call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.ROWS, rank, peer, peer, value(), least)

    return call.perform(task, (comm, context, which, least, rank, peer, epoch, fail, record, timeout), {"net": net})


def net_wait_flushed(call: Call, task: Task, comm: int, context: int, rank: int, epoch: int, fail: int, record: int, timeout: int) -> int:
    """All my puts on a context have read their sources."""
    network = _network(call, comm)

    def net(access: Access) -> int:
        if task.warp:
            return 0
        network.watchers.add(rank)
        network.hasten(rank, context)
        came = _wait(task, access, lambda: network.flushed(rank, context),
                     lambda: f"waits until the network has read the sources of all puts on context {context}")
        if came and _acquires(access):
            network.acquire_flush(task, context)
        return 0 if came else call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.ROWS, rank, rank, rank, 0, 1)

    return call.perform(task, (comm, context, rank, epoch, fail, record, timeout), {"net": net})


def _networked(rank: int, num_ranks: int, team_size: int, rails: int) -> list[int]:
    """Ranks of other teams, those after mine first; of those of my index if `rails`."""
    step, first = (team_size, rank) if rails else (1, rank // team_size * team_size + team_size - 1)
    return [(first + step * (1 + i)) % num_ranks for i in range(num_ranks // team_size - 1 if rails else num_ranks - team_size)]


def net_barrier(call: Call, task: Task, comm: int, context: int, signal: int, count: int, rank: int, num_ranks: int, team_size: int, rails: int,
                epoch: int, fail: int, record: int, timeout: int) -> int:
    """All ranks of other teams came here, or those of my index."""
    peers = _networked(rank, num_ranks, team_size, rails)

    def net(access: Access) -> int | None:
        if task.warp:
            return None
        network = _network(call, comm)
        if access.effect.kind == "st":
            for peer in peers:
                network.signal(task, peer, context, signal + rank, 1)
                call.scheduler.split()
            return None
        missing = _wait_signals(call, task, access, comm, [(peer, context, signal + peer, count + 1) for peer in peers])
        if missing is None:
            return 0
        seen = network.seen(rank, context, signal + missing)
        return call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.HEAD, rank, missing, missing, seen, count + 1)

    given = (comm, context, signal, count, rank, num_ranks, team_size, rails, epoch, fail, record, timeout)
    return call.perform(task, given, {"net": net})
