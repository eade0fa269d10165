"""Operations of staged low-latency kernels over several teams on the CPU. See ``ops``."""

from __future__ import annotations

import numpy as np

from ncclep_py.errors import Code, Phase
from ncclep_py.ll_net_map import FLIGHT_COUNT
from ncclep_py.memory_map import FLIGHT_BYTES
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.ht_net_ops import _head, _head_words, _local, _network, _team, _to, _wait_signals
from ncclep_py.simulator.ll_net_ops import _networked
from ncclep_py.simulator.routing_ops import _row
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import Verdict, _choose, _judge_head, tagged

__all__: list[str] = []   # looked up by name


def _sent(peers: list[int], contexts: int, first_signal: int, times: int) -> list[tuple[int, int, int, int]]:
    """DATA signals (source, context, id, least) of so many operations, or uses of a staging slot."""
    return [(p, c, first_signal + 2 * p + 1, times * (2 if first_signal == 0 and c == 0 else 1)) for p in peers for c in range(contexts)]


def _count(access: Access, at: int) -> int:
    return int(access.read(at, 8).view(np.int64)[0])


def ll_net_drain_staged(call: Call, task: Task, comm: int, rank: int, num_ranks: int, team_size: int, contexts: int, flights: int, num_staging: int,
                        epoch: int, fail: int, record: int, timeout: int) -> int:
    """What came up in uses of staging slots that I sent and have not released."""
    due: list[tuple[int, int]] = []

    def count(access: Access) -> None:
        if task.warp == 0:
            for i in range(num_staging):
                at = flights + i * FLIGHT_BYTES + FLIGHT_COUNT
                uses, released = _count(access, at), _count(access, at + 8)
                due.extend([(2 * num_ranks * (1 + i), uses)] if uses != released else [])

    def net(access: Access) -> int:
        for first_signal, uses in due:
            left = _wait_signals(call, task, access, comm, _sent(_networked(rank, num_ranks, team_size), contexts, first_signal, uses))
            if left is not None:
                return call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.HEAD, rank, left, left, uses, uses)
        return 0

    given = (comm, rank, num_ranks, team_size, contexts, flights, num_staging, epoch, fail, record, timeout)
    return call.perform(task, given, {"flights": count, "net": net})


# ---- dispatch --------------------------------------------------------------------------------------------------------------------
def ll_net_keep_rows(call: Call, task: Task, kept: int, num_experts: int, num_ranks: int) -> int:
    """Rows from each source, to the slot."""
    def store(access: Access) -> None:
        if task.block.index == task.block.launch.blocks - 1:
            call.cell(task, "got").read(task)
            got = task.block.values["got"].astype(np.int32).reshape(-1)
            for i in range(task.warp, num_experts, task.block.launch.warps):
                access.write(kept + 4 * i, got[i:i + 1].view(np.uint8))

    return call.perform(task, (kept, num_experts, num_ranks), {"kept": store})


def ll_net_kept_rows(call: Call, task: Task, kept: int, num_experts: int, num_ranks: int) -> int:
    """Rows from each source, of the slot."""
    def load(access: Access) -> None:
        call.cell(task, "got").write(task, atomic=True)   # each warp some of them
        task.block.values["got"] = access.read(kept, 4 * num_experts).view(np.int32).reshape(num_ranks, -1).astype(np.int64)

    return call.perform(task, (kept, num_experts, num_ranks), {"kept": load})


def ll_net_store_origins(call: Call, task: Task, window: int, origins: int, token: int, first: int, num_topk: int, num_experts: int, num_ranks: int,
                         plane_rows: int, rank: int, team_size: int, places: int) -> int:
    """Where a token's rows in my team came from."""
    rows_per_rank = num_experts // num_ranks * plane_rows

    def store(access: Access) -> None:
        call.cell(task, "rows").read(task)
        for k, row in enumerate(task.block.values["rows"][(token - first) * num_topk:(token - first + 1) * num_topk].tolist()):
            if row >= 0 and row // rows_per_rank in _team(rank, team_size):
                at = _row(call, task, window, origins, row, rows_per_rank, 4)
                access.write(at, np.array([rank * places + token * num_topk + k], np.int32).view(np.uint8))
                call.scheduler.split()

    return call.perform(task, (), {"origins": store})


# ---- flights ---------------------------------------------------------------------------------------------------------------------
def ll_net_put_flight(call: Call, task: Task, comm: int, window: int, flying: int, rank: int, num_ranks: int, team_size: int, first_signal: int,
                      least: int, epoch: int, signature: int, status: int) -> int:
    """My words to all who are ready for them."""
    network, here = _network(call, comm), list[int]()

    def net(access: Access) -> None:
        if access.effect.kind == "ld":
            here.extend(p for p in _networked(rank, num_ranks, team_size) if network.seen(rank, 0, first_signal + 2 * p) >= least)
            if access.effect.order == "acquire" and access.effect.scope == "sys":
                for peer in here:
                    network.acquire(task, 0, first_signal + 2 * peer)
            return
        for peer in here:
            for half, word in enumerate(_head_words(epoch, signature, status)):
                network.put_value(task, window, peer, 0, _head(flying, num_ranks, rank, epoch) + 8 * half, word)
            call.scheduler.split()

    return call.perform(task, (), {"net": net})


def ll_net_signal_sent(call: Call, task: Task, comm: int, rank: int, num_ranks: int, team_size: int, contexts: int, first_signal: int) -> int:
    """One add to my DATA signal everywhere."""
    def net(access: Access) -> None:
        for context in range(contexts):
            for peer in _networked(rank, num_ranks, team_size):
                _network(call, comm).signal(task, peer, context, first_signal + 2 * rank + 1, 1)
                call.scheduler.split()

    return call.perform(task, (), {"net": net})


def ll_net_wait_flight(call: Call, task: Task, comm: int, window: int, flying: int, rank: int, num_ranks: int, team_size: int, contexts: int,
                       first_signal: int, operations: int, epoch: int, signature: int, fail: int, record: int, timeout: int) -> int:
    """All that was sent, and whether everybody did."""
    came, team = False, _team(rank, team_size)

    def net(access: Access) -> int:
        nonlocal came
        if task.warp:
            return 0
        left = _wait_signals(call, task, access, comm, _sent(_networked(rank, num_ranks, team_size), contexts, first_signal, operations))
        came = left is None
        return 0 if left is None else call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.ROWS, rank, left, left, operations, operations)

    def look(access: Access) -> int | None:
        if not came:
            return None
        low, high = ([access.word(_local(call, task, window, _head(flying, num_ranks, s, epoch) + half)) for s in range(num_ranks)]
                     for half in (0, 8))

        def one(source: int) -> Verdict | None:
            v = _judge_head(high[source].peek(task.agent).value, low[source].peek(task.agent).value, epoch, source, task.late, signature)
            if source not in team and (v is None or v.code == Code.TIMEOUT):   # its words are here, or never come
                return Verdict(Code.ABORTED, source, source, high[source].peek(task.agent).value >> 32)
            return v

        def judge() -> Verdict | None:
            return _choose([one(source) for source in range(num_ranks)], rank)

        def describe() -> tuple[str, list[int]]:
            missing = [source for source in range(num_ranks) if one(source) is None]
            return f"waits in epoch {epoch} for words of the flight of ranks {missing}", missing

        while (v := judge()) is None:
            access.scheduler.wait(task, lambda: judge() is not None, describe)
        task.late = False
        for word in (*high, *low):
            access.load(word)
        expected = signature if v.code == Code.MISMATCH else epoch
        return call.give_up(task, fail, record, Code(v.code), epoch, Phase.ARRIVED, rank, v.peer, v.culprit, v.seen, expected) if v.code else 0

    given = (comm, window, flying, rank, num_ranks, team_size, contexts, first_signal, operations, epoch, signature, fail, record, timeout)
    return call.perform(task, given, {"net": net, "flying": look})


def ll_net_wait_released(call: Call, task: Task, comm: int, rank: int, num_ranks: int, team_size: int, first_signal: int, uses: int, epoch: int,
                         fail: int, record: int, timeout: int) -> int:
    """Networked ranks have emptied the staging slot."""
    def net(access: Access) -> int:
        if task.warp:
            return 0
        left = _wait_signals(call, task, access, comm, [(p, 0, first_signal + 2 * p, uses) for p in _networked(rank, num_ranks, team_size)])
        seen = _network(call, comm).seen(rank, 0, first_signal + 2 * (left or 0))
        return 0 if left is None else call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.ARRIVED, rank, left, left, seen, uses)

    return call.perform(task, (comm, rank, num_ranks, team_size, first_signal, uses, epoch, fail, record, timeout), {"net": net})


def ll_net_release(call: Call, task: Task, comm: int, window: int, released: int, flight: int, rank: int, num_ranks: int, team_size: int,
                   contexts: int, first_signal: int, following: int, drained: int, fail: int, record: int, timeout: int) -> int:
    """The staging slot to all ranks, if I have not yet and its last use has come up."""
    network, peers = _network(call, comm), _networked(rank, num_ranks, team_size)
    sent = before = 0
    gives = False

    def count(access: Access) -> None:
        nonlocal sent, before, gives
        if task.warp:
            return
        if access.effect.kind == "ld":
            sent, before = _count(access, flight + FLIGHT_COUNT), _count(access, flight + FLIGHT_COUNT + 8)
            gives = sent != before
        elif gives:
            access.write(flight + FLIGHT_COUNT + 8, np.array([sent], np.int64).view(np.uint8))

    def net(access: Access) -> int | None:
        nonlocal gives
        if not gives or (access.effect.kind == "ld" and drained):
            return None
        if access.effect.kind == "st":
            for peer in peers:
                network.signal(task, peer, 0, first_signal + 2 * rank, sent - before)
                call.scheduler.split()
            return None
        signals = _sent(peers, contexts, first_signal, sent)
        missing = [p for p, c, i, least in signals if network.seen(rank, c, i) < least]
        left = missing[0] if missing and not timeout else _wait_signals(call, task, access, comm, signals)
        if left is None:
            return None
        gives = False
        return call.give_up(task, fail, record, Code.TIMEOUT, following, Phase.HEAD, rank, left, left, sent, sent) if timeout else int(Code.TIMEOUT)

    def give(access: Access) -> None:
        if gives:
            _to(call, task, access, window, released + 8 * rank, _team(rank, team_size), tagged(following, 0))

    given = (comm, window, released, flight, rank, num_ranks, team_size, contexts, first_signal, following, drained, fail, record, timeout)
    return call.perform(task, given, {"flight": count, "net": net, "released": give})


# ---- combine ---------------------------------------------------------------------------------------------------------------------
def ll_net_count_team_rows(call: Call, task: Task, kept: int, num_experts: int, num_ranks: int, plane_rows: int, rank: int, team_size: int) -> int:
    """Rows from my team before each plane's first, and where they begin in the plane."""
    team = _team(rank, team_size)

    def count(access: Access) -> None:
        if task.warp == 0:
            call.cell(task, "before").write(task)
            got = access.read(kept, 4 * num_experts).view(np.int32).reshape(num_ranks, -1).astype(np.int64)
            start = got[:team.start].sum(0).clip(0, plane_rows)
            ours = np.minimum(got[team.start:team.stop].sum(0), plane_rows - start)
            task.block.values["before"], task.block.values["start"] = np.concatenate([[0], np.cumsum(ours)]), start

    call.perform(task, (kept, num_experts, num_ranks, plane_rows, rank, team_size), {"kept": count})
    call.cell(task, "before").read(task)
    return int(task.block.values["before"][-1])


def ll_net_push_row(call: Call, task: Task, window: int, origins: int, rows: int, staging: int, row: int, num_planes: int, plane_rows: int,
                    num_experts: int, rank: int, places: int, row_bytes: int, begin_vector: int, end_vector: int) -> int:
    """A piece of a row received from my team to its source."""
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    before, start = task.block.values["before"], task.block.values["start"]
    plane = int(np.searchsorted(before[:-1], row, side="right")) - 1
    place, origin = plane * plane_rows + int(start[plane]) + row - int(before[plane]), 0
    held = np.zeros(0, np.uint8)

    def read_origin(access: Access) -> None:
        nonlocal origin
        call.cell(task, "before").read(task)
        origin = int(access.read(_local(call, task, window, origins + 4 * place), 4).view(np.int32)[0])

    def load(access: Access) -> None:
        nonlocal held
        held = access.read(rows + place * row_bytes + begin, size).copy()

    def store(access: Access) -> None:
        to = call.sim.peer_address(task, window, staging + origin % places * row_bytes, origin // places)
        access.write(to + begin, held)
        call.scheduler.split()

    return call.perform(task, (), {"origins": read_origin, "rows": load, "staging": store})
