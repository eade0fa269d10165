"""Low-latency operations over several teams on the CPU: messages and rows that come back, and what they are waited for with. See ``ops``."""

from __future__ import annotations

import numpy as np

from ncclep_py.errors import Code, Phase, Status
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.ht_net_ops import _head, _head_words, _local, _network, _team, _to, _wait_signals
from ncclep_py.simulator.recipe_ops import PACKED_STRETCH, quantise, unpack_nvfp4
from ncclep_py.simulator.routing_ops import _read_rows, _read_weights, _row
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, tagged, wait_count, wait_words

__all__: list[str] = []   # looked up by name


def _networked(rank: int, num_ranks: int, team_size: int) -> list[int]:
    """The ranks of other teams."""
    return [peer for peer in range(num_ranks) if peer // team_size != rank // team_size]


def _data(peers: list[int], contexts: int, count: int, now: int) -> list[tuple[int, int, int, int]]:
    """DATA signals (source, context, id, least) of all operations before, and `now` of this one's on context 0 (the last also on the others)."""
    return [(p, c, 2 * p + 1, count * (2 if c == 0 else 1) + (now if c == 0 else now // 2)) for p in peers
            for c in range(contexts if now != 1 else 1)]


# ---- head ------------------------------------------------------------------------------------------------------------------------
def ll_net_enter(call: Call, task: Task, comm: int, window: int, heads: int, rank: int, num_ranks: int, team_size: int, contexts: int, count: int,
                 epoch: int, signature: int, status: int, fail: int, record: int, timeout: int) -> int:
    """Drain, then HEAD to networked ranks."""
    network, peers = _network(call, comm), _networked(rank, num_ranks, team_size)
    dry: set[int] = set()

    def net(access: Access) -> int | None:
        if task.warp:
            return None
        if access.effect.kind == "ld":
            left = _wait_signals(call, task, access, comm, _data(peers, contexts, count, 0))
            dry.update(p for p in peers if all(network.seen(rank, c, i) >= least for _, c, i, least in _data([p], contexts, count, 0)))
            if left is None:
                return 0
            return call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.HEAD, rank, left, left, count, count)
        for peer in peers:
            if peer in dry:
                for half, word in enumerate(_head_words(epoch, signature, status)):
                    network.put_value(task, window, peer, 0, _head(heads, num_ranks, rank, epoch) + 8 * half, word)
            network.signal(task, peer, 0, 2 * rank, 1)
            call.scheduler.split()
        return None

    given = (comm, window, heads, rank, num_ranks, team_size, contexts, count, epoch, signature, status, fail, record, timeout)
    return call.perform(task, given, {"net": net})


def ll_net_wait_heads(call: Call, task: Task, comm: int, window: int, heads: int, rank: int, num_ranks: int, team_size: int, count: int, epoch: int,
                      signature: int, fail: int, record: int, timeout: int) -> int:
    """HEAD of all ranks, then the signals of networked ones."""
    code = 0

    def head(access: Access) -> int:
        nonlocal code
        if task.warp:
            return 0
        words = [[access.word(_local(call, task, window, _head(heads, num_ranks, s, epoch) + half)) for s in range(num_ranks)] for half in (8, 0)]
        v = wait_words(task, access, words[0], epoch, "HEAD", rank, words[1], signature)
        expected = signature if v.code == Code.MISMATCH else epoch
        code = call.give_up(task, fail, record, Code(v.code), epoch, Phase.HEAD, rank, v.peer, v.culprit, v.seen, expected) if v.code else 0
        return code

    def net(access: Access) -> int | None:
        if task.warp or code:
            return None
        left = _wait_signals(call, task, access, comm, [(p, 0, 2 * p, count + 1) for p in _networked(rank, num_ranks, team_size)])
        return 0 if left is None else call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.HEAD, rank, left, left, count, count + 1)

    given = (comm, window, heads, rank, num_ranks, team_size, count, epoch, signature, fail, record, timeout)
    return call.perform(task, given, {"head": head, "net": net})


# ---- counts ----------------------------------------------------------------------------------------------------------------------
def ll_net_publish_counts(call: Call, task: Task, window: int, counts: int, counts_sent: int, rank: int, num_ranks: int, team_size: int,
                          num_experts: int, epoch: int) -> int:
    """My counts to my team, and ready to be put."""
    launch, values = task.block.launch, task.block.values
    mine = range(task.warp, num_experts, launch.warps)

    def publish(access: Access) -> None:
        call.cell(task, "total").read(task)
        for peer in _team(rank, team_size)[task.block.index::launch.blocks]:
            at = call.sim.peer_address(task, window, counts + rank * num_experts * 8, peer)
            for e in mine:
                access.store(at + 8 * e, tagged(epoch, int(values["total"][e])))
            call.scheduler.split()

    def prepare(access: Access) -> None:
        if task.block.index == 0:
            for e in mine:
                access.write(_local(call, task, window, counts_sent + 8 * e), np.array([values["total"][e]], np.int64).view(np.uint8))

    given = (window, counts, counts_sent, rank, num_ranks, team_size, num_experts, epoch)
    return call.perform(task, given, {"count": publish, "counts_sent": prepare})


def ll_net_put_counts(call: Call, task: Task, comm: int, window: int, counts_sent: int, net_counts: int, rank: int, num_ranks: int, team_size: int,
                      num_experts: int) -> int:
    """Each team's share of my counts to its ranks."""
    size = team_size * (num_experts // num_ranks) * 8

    def net(access: Access) -> None:
        for peer in _networked(rank, num_ranks, team_size):
            _network(call, comm).put(task, window, peer, 0, net_counts + rank * size, counts_sent + peer // team_size * size, size)
            call.scheduler.split()

    return call.perform(task, (), {"net": net})


def ll_net_signal(call: Call, task: Task, comm: int, rank: int, num_ranks: int, team_size: int, context: int) -> int:
    """One add to my DATA signal everywhere."""
    def net(access: Access) -> None:
        for peer in _networked(rank, num_ranks, team_size):
            _network(call, comm).signal(task, peer, context, 2 * rank + 1, 1)
            call.scheduler.split()

    return call.perform(task, (), {"net": net})


def ll_net_wait_counts(call: Call, task: Task, comm: int, window: int, counts: int, net_counts: int, rank: int, num_ranks: int, team_size: int,
                       num_experts: int, count: int, epoch: int, plane_rows: int, expert_counters: int, fail: int, record: int, timeout: int) -> int:
    """Counts of all ranks for my team's experts."""
    launch, values, local, team = task.block.launch, task.block.values, num_experts // num_ranks, _team(rank, team_size)
    ours, peers = team_size * local, _networked(rank, num_ranks, team_size)
    if "lower" not in values:
        values["lower"], values["got"] = np.zeros(ours, np.int64), np.zeros((num_ranks, local), np.int64)
    code = 0

    def keep(source: int, e: int, rows: int) -> None:
        if source < rank:
            call.cell(task, "lower").write(task, atomic=True)
            values["lower"][e] += rows
        if e // local == rank - team.start:
            call.cell(task, "got").write(task, atomic=True)
            values["got"][source, e % local] = rows

    def net(access: Access) -> int | None:
        nonlocal code
        left = _wait_signals(call, task, access, comm, _data(peers, 1, count, 1))
        if left is not None:
            code = call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.COUNTS, rank, left, left, count, count)
        return code

    def direct(access: Access) -> int | None:
        nonlocal code
        for i in range(task.warp, team_size * ours, launch.warps):
            source, e = team.start + i // ours, i % ours
            if code:
                break
            at = counts + (source * num_experts + team.start * local + e) * 8
            why, value = wait_count(task, access, access.word(_local(call, task, window, at)), epoch, source)
            if why:
                code = call.give_up(task, fail, record, Code(why), epoch, Phase.COUNTS, rank, source, source, value >> 32, epoch)
                break
            keep(source, e, value & LOW)
        return code

    def networked(access: Access) -> int | None:
        if not code:
            for i in range(task.warp, len(peers) * ours, launch.warps):
                source, e = peers[i // ours], i % ours
                rows = int(access.read(_local(call, task, window, net_counts + (source * ours + e) * 8), 8).view(np.int64)[0])
                keep(source, e, rows)
        return code

    def store(access: Access) -> None:
        if task.block.index == launch.blocks - 1:
            call.cell(task, "got").read(task)
            for e in range(task.warp, local, launch.warps):
                received = min(int(values["got"][:, e].sum()), plane_rows)
                access.write(expert_counters + 4 * e, np.array([received], np.int32).view(np.uint8))

    given = (comm, window, counts, net_counts, rank, num_ranks, team_size, num_experts, count, epoch, plane_rows, expert_counters, fail, record,
             timeout)
    return call.perform(task, given, {"net": net, "count": direct, "net_counts": networked, "expert_counters": store})


def ll_net_place_rows(call: Call, task: Task, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, first: int, end: int, part: int,
                      table: int, rank: int, team_size: int, epoch: int, fail: int, record: int) -> int:
    """Final rows for experts of my team."""
    local, team = num_experts // num_ranks, _team(rank, team_size)

    def store(access: Access) -> None:
        if task.warp:
            return
        call.cell(task, "lower").read(task)
        call.cell(task, "rows").write(task)
        rows = task.block.values["rows"]
        for i, row in enumerate(rows.tolist()):
            owner = row // plane_rows // local
            if row < 0 or owner not in team:
                continue
            final = row % plane_rows + int(task.block.values["lower"][row // plane_rows - team.start * local])
            rows[i] = row // plane_rows * plane_rows + final if final < plane_rows else -1
            if final >= plane_rows:
                call.note(task, fail, record, Code.OVERFLOW, epoch, Phase.ROWS, rank, owner, owner, final, plane_rows)
        if part == 0:
            access.write(table + 4 * first * num_topk, rows.view(np.uint8))

    return call.perform(task, (num_topk, num_experts, num_ranks, plane_rows, first, end, part, table, rank, team_size, epoch, fail, record),
                        {"table": store})


# ---- rows ------------------------------------------------------------------------------------------------------------------------
def _of_token(call: Call, task: Task, token: int, first: int, num_topk: int) -> np.ndarray:
    """The row of each of a token's K, or what stands for it."""
    call.cell(task, "rows").read(task)
    return task.block.values["rows"][(token - first) * num_topk:(token - first + 1) * num_topk]


def _networked_hosts(rows: np.ndarray, rows_per_rank: int, team: range) -> list[int]:
    """Ranks of other teams that rows go to."""
    return sorted({row // rows_per_rank for row in rows.tolist() if row >= 0} - set(team))


def ll_net_send_row(call: Call, task: Task, comm: int, window: int, sent: int, messages: int, tokens: int, token: int, first: int, end: int,
                    num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, words: int, header_bytes: int, put_bytes: int,
                    message_bytes: int, rank: int, team_size: int, contexts: int, epoch: int) -> int:
    """A token's message to all networked ranks that want it."""
    at = token * message_bytes
    row = np.zeros(0, np.uint8)
    header = np.zeros(header_bytes, np.uint8)
    hosts: list[int] = []

    def load(access: Access) -> None:
        nonlocal row
        rows = _of_token(call, task, token, first, num_topk)
        hosts.extend(_networked_hosts(rows, num_experts // num_ranks * plane_rows, _team(rank, team_size)))
        header[:8].view(np.uint64)[0] = 1 << 32 | epoch
        fields = header[8:8 + 4 * words * num_topk].reshape(words, 4 * num_topk)
        fields[0] = rows.astype(np.int32).view(np.uint8)
        if words == 3:
            for i, name in ((1, "ids"), (2, "weights")):
                call.cell(task, name).read(task)
                fields[i] = np.asarray(task.block.values[name][token - first], np.int32 if i == 1 else np.uint8).view(np.uint8)
        row = access.read(tokens + token * row_bytes, row_bytes).copy()

    def stage(access: Access) -> None:
        if hosts:
            access.write(_local(call, task, window, sent + at), np.concatenate([header, row]))

    def net(access: Access) -> None:
        for peer in hosts:
            _network(call, comm).put(task, window, peer, token % contexts, messages + at, sent + at, put_bytes)
            call.scheduler.split()

    return call.perform(task, (), {"tokens": load, "sent": stage, "net": net})


def ll_net_stage_row(call: Call, task: Task, window: int, sent: int, tokens: int, token: int, first: int, num_topk: int, num_experts: int,
                     num_ranks: int, plane_rows: int, row_bytes: int, message_bytes: int, rank: int, team_size: int) -> int:
    """A row into a message that will be put."""
    row = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal row
        rows = _of_token(call, task, token, first, num_topk)
        if _networked_hosts(rows, num_experts // num_ranks * plane_rows, _team(rank, team_size)):
            row = access.read(tokens + token * row_bytes, row_bytes).copy()

    return call.perform(task, (), {"tokens": load, "sent": lambda a: a.write(_local(call, task, window, sent + token * message_bytes), row)})


def ll_net_quantise_row(call: Call, task: Task, window: int, sent: int, sent_scales: int, tokens: int, token: int, first: int, num_topk: int,
                        num_experts: int, row_bytes: int, round_scales: int, message_bytes: int, rank: int) -> int:
    """A row and its scales into a message."""
    made, scales = np.zeros(0, np.uint8), np.zeros(0, np.float32)

    def load(access: Access) -> None:
        nonlocal made, scales
        if (_of_token(call, task, token, first, num_topk) >= 0).any():
            made, scales = quantise(access.read(tokens + token * row_bytes, row_bytes), round_scales != 0)

    def store(access: Access, offset: int, data: np.ndarray) -> None:
        access.write(_local(call, task, window, offset + token * message_bytes), data)

    return call.perform(task, (), {"tokens": load, "sent": lambda a: store(a, sent, made),
                                   "sent_scales": lambda a: store(a, sent_scales, scales.view(np.uint8))})


def ll_net_scatter_row(call: Call, task: Task, window: int, slot: int, tokens: int, token: int, first: int, num_topk: int, num_experts: int,
                       num_ranks: int, plane_rows: int, row_bytes: int, rank: int, team_size: int) -> int:
    """A row to its places in my team."""
    held = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal held
        held = access.read(tokens + token * row_bytes, row_bytes).copy()

    def store(access: Access) -> None:
        rows = _of_token(call, task, token, first, num_topk)
        _to_my_team(call, task, access, window, slot, rows, num_experts // num_ranks * plane_rows, _team(rank, team_size), held)

    return call.perform(task, (), {"tokens": load, "slot": store})


def _to_my_team(call: Call, task: Task, access: Access, window: int, slot: int, rows: np.ndarray, rows_per_rank: int, team: range,
                held: np.ndarray) -> None:
    """One row to those of its places that are in my team."""
    for row in rows.tolist():
        if row >= 0 and row // rows_per_rank in team:
            access.write(_row(call, task, window, slot, row, rows_per_rank, len(held)), held)
            call.scheduler.split()


def ll_net_spread_row(call: Call, task: Task, window: int, slot: int, sent: int, token: int, first: int, num_topk: int, num_experts: int,
                      num_ranks: int, plane_rows: int, row_bytes: int, message_bytes: int, rank: int, team_size: int) -> int:
    """A row of a message to its places in my team."""
    rows_per_rank, team = num_experts // num_ranks * plane_rows, _team(rank, team_size)
    held = np.zeros(0, np.uint8)

    def wanted() -> np.ndarray:
        rows = _of_token(call, task, token, first, num_topk)
        return rows[(rows >= 0) & (rows // rows_per_rank >= team.start) & (rows // rows_per_rank < team.stop)]

    def load(access: Access) -> None:
        nonlocal held
        if len(wanted()):
            held = access.read(_local(call, task, window, sent + token * message_bytes), row_bytes).copy()

    return call.perform(task, (), {"sent": load, "slot": lambda a: _to_my_team(call, task, a, window, slot, wanted(), rows_per_rank, team, held)})


def ll_net_put_tags(call: Call, task: Task, comm: int, window: int, tags: int, rank: int, num_ranks: int, team_size: int, count: int, epoch: int,
                    low: int) -> int:
    """My TAG to all whose HEAD has come."""
    network, here = _network(call, comm), list[int]()

    def net(access: Access) -> None:
        if access.effect.kind == "ld":
            here.extend(p for p in _networked(rank, num_ranks, team_size) if network.seen(rank, 0, 2 * p) > count)
            if access.effect.order == "acquire" and access.effect.scope == "sys":
                for peer in here:
                    network.acquire(task, 0, 2 * peer)
            return
        for peer in here:
            network.put_value(task, window, peer, 0, tags + 8 * rank, tagged(epoch, low))
            call.scheduler.split()

    return call.perform(task, (), {"net": net})


def ll_net_wait_data(call: Call, task: Task, comm: int, window: int, tags: int, rank: int, num_ranks: int, team_size: int, contexts: int, count: int,
                     epoch: int, fail: int, record: int, timeout: int) -> int:
    """All that networked ranks put, and whether one of them gave up."""
    peers, came = _networked(rank, num_ranks, team_size), False

    def net(access: Access) -> int:
        nonlocal came
        if task.warp:
            return 0
        left = _wait_signals(call, task, access, comm, _data(peers, contexts, count, 2))
        came = left is None
        return 0 if came else call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.ROWS, rank, left or 0, left or 0, count, count + 1)

    def look(access: Access) -> int | None:
        if not came:
            return None
        for peer in peers:
            value = access.load(access.word(_local(call, task, window, tags + 8 * peer)))
            if value >> 32 != epoch:   # it gave up before my HEAD came, and could not tell me on whom
                return call.give_up(task, fail, record, Code.ABORTED, epoch, Phase.ROWS, rank, peer, peer, value >> 32, epoch)
            if value >> 24 & 3 == Status.ABORT:
                return call.give_up(task, fail, record, Code.ABORTED, epoch, Phase.ROWS, rank, peer, value & 0xFFFFFF, epoch, epoch)
            if value >> 24 & 3 == Status.REFUSED:
                return call.give_up(task, fail, record, Code.REFUSED, epoch, Phase.ROWS, rank, peer, peer, value & 0xFFFFFF, epoch)
        return 0

    return call.perform(task, (comm, window, tags, rank, num_ranks, team_size, contexts, count, epoch, fail, record, timeout),
                        {"net": net, "tag": look})


def ll_net_take_row(call: Call, task: Task, rows_window: int, slot: int, slot_scales: int, window: int, messages: int, remote: int, source: int,
                    token: int, most: int, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, scale_bytes: int,
                    header_bytes: int, message_bytes: int, rank: int, epoch: int, fail: int, record: int) -> int:
    """A received row to its places."""
    local = num_experts // num_ranks
    at = messages + (source * most + token) * message_bytes
    places = np.full(num_topk, -1, np.int32)
    row = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal row
        message = access.read(_local(call, task, window, at), header_bytes + row_bytes + scale_bytes)
        if int(message[:8].view(np.uint64)[0]) != 1 << 32 | epoch:   # fresh memory has none
            return
        row = message[header_bytes:].copy()
        call.cell(task, "got").read(task)
        for k, number in enumerate(message[8:8 + 4 * num_topk].view(np.int32).tolist()):
            e, mine = number // plane_rows, number % plane_rows
            if number < 0 or e // local != rank:
                continue
            final = mine + int(task.block.values["got"][:source, e % local].sum())
            if final < plane_rows:
                places[k] = e % local * plane_rows + final
            else:
                call.note(task, fail, record, Code.OVERFLOW, epoch, Phase.ROWS, rank, rank, rank, final, plane_rows)

    def store(access: Access, offset: int, data: np.ndarray) -> None:
        for place in places.tolist():
            if place >= 0 and len(data):
                access.write(_local(call, task, rows_window, offset + place * len(data)), data)
                call.scheduler.split()

    def keep(access: Access) -> None:
        access.write(remote + 4 * (source * most + token) * num_topk, places.view(np.uint8))

    return call.perform(task, (), {"staging": load, "slot": lambda a: store(a, slot, row[:row_bytes]),
                                   "slot_scales": lambda a: store(a, slot_scales, row[row_bytes:]), "remote": keep})


# ---- RANK_MAJOR ------------------------------------------------------------------------------------------------------------------
def _ids_at(ids: np.ndarray, peer: int, local: int, global_ids: int) -> np.ndarray:
    """A token's ids as rank `peer` gets them."""
    here = (ids >= peer * local) & (ids < (peer + 1) * local)
    return np.where(here, ids if global_ids else ids - peer * local, -1).astype(np.int32)


def ll_net_send_routing(call: Call, task: Task, window: int, slot_ids: int, slot_weights: int, table: int, token: int, first: int, end: int,
                        num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, global_ids: int, rank: int, team_size: int) -> int:
    """Ids and weights of a token to its rows in my team, all its rows to the table."""
    rows, team = _of_token(call, task, token, first, num_topk), _team(rank, team_size)
    for name in ("ids", "weights"):
        call.cell(task, name).read(task)
    ids, weights = task.block.values["ids"][token - first], task.block.values["weights"][token - first]

    def to_team(access: Access, offset: int, routing: bool) -> None:
        for row in rows[rows >= 0].tolist():
            peer, place = divmod(row, plane_rows)
            if peer in team:
                data = _ids_at(ids, peer, num_experts // num_ranks, global_ids).view(np.uint8) if routing else weights
                access.write(call.sim.peer_address(task, window, offset + 4 * place * num_topk, peer), data)
                call.scheduler.split()

    return call.perform(task, (), {
        "table": lambda a: a.write(table + 4 * token * num_topk, rows.view(np.uint8)), "slot_ids": lambda a: to_team(a, slot_ids, True),
        "slot_weights": lambda a: to_team(a, slot_weights, False)})


def ll_net_take_token(call: Call, task: Task, rows_window: int, slot: int, slot_scales: int, window: int, slot_ids: int, slot_weights: int,
                      messages: int, remote: int, source: int, token: int, most: int, num_topk: int, num_experts: int, num_ranks: int,
                      plane_rows: int, row_bytes: int, scale_bytes: int, header_bytes: int, message_bytes: int, global_ids: int, rank: int,
                      epoch: int) -> int:
    """A received row, its scales, ids and weights to their place."""
    at = messages + (source * most + token) * message_bytes
    places = np.full(num_topk, -1, np.int32)
    parts: dict[str, np.ndarray] = {}
    places_of = {"slot": (rows_window, slot), "slot_scales": (rows_window, slot_scales), "slot_ids": (window, slot_ids),
                 "slot_weights": (window, slot_weights)}

    def load(access: Access) -> None:
        message = access.read(_local(call, task, window, at), header_bytes + row_bytes + scale_bytes)
        if int(message[:8].view(np.uint64)[0]) != 1 << 32 | epoch:   # fresh memory has none
            return
        rows, ids, weights = message[8:8 + 12 * num_topk].reshape(3, 4 * num_topk)
        for k, row in enumerate(rows.view(np.int32).tolist()):
            if row >= 0 and row // plane_rows == rank:
                places[k] = row % plane_rows
        parts.update(slot=message[header_bytes:header_bytes + row_bytes].copy(), slot_scales=message[header_bytes + row_bytes:].copy(),
                     slot_ids=_ids_at(ids.view(np.int32), rank, num_experts // num_ranks, global_ids).view(np.uint8), slot_weights=weights.copy())

    def store(access: Access) -> None:
        for place in places[places >= 0].tolist():
            part, (where, begin) = parts[access.effect.noun], places_of[access.effect.noun]
            if len(part):
                access.write(_local(call, task, where, begin + place * len(part)), part)

    def keep(access: Access) -> None:
        access.write(remote + 4 * (source * most + token) * num_topk, places.view(np.uint8))

    return call.perform(task, (), {"staging": load, "slot": store, "slot_scales": store, "slot_ids": store, "slot_weights": store, "remote": keep})


def ll_net_publish_arrived_rows(call: Call, task: Task, window: int, arrived: int, rank: int, team_size: int, epoch: int) -> int:
    """ARRIVED with the number of rows, to my team."""
    def publish(access: Access) -> None:
        call.cell(task, "total").read(task)
        for peer in _team(rank, team_size):
            _to(call, task, access, window, arrived + 8 * rank, range(peer, peer + 1), tagged(epoch, int(task.block.values["total"][peer])))

    return call.perform(task, (window, arrived, rank, team_size, epoch), {"arrived": publish})


def ll_net_put_row_tags(call: Call, task: Task, comm: int, window: int, tags: int, rank: int, num_ranks: int, team_size: int, epoch: int) -> int:
    """TAGs with the number of rows."""
    def net(access: Access) -> None:
        call.cell(task, "total").read(task)
        for peer in _networked(rank, num_ranks, team_size):
            _network(call, comm).put_value(task, window, peer, 0, tags + 8 * rank, tagged(epoch, int(task.block.values["total"][peer])))
            call.scheduler.split()

    return call.perform(task, (), {"net": net})


def ll_net_take_arrived_rows(call: Call, task: Task, window: int, arrived: int, tags: int, slot_ids: int, rank: int, num_ranks: int, team_size: int,
                             num_topk: int, plane_rows: int, epoch: int, src_rank_counters: int) -> int:
    """Counts of received rows, and -1 in unused ids."""
    launch, values, capacity, team = task.block.launch, task.block.values, plane_rows // num_ranks, _team(rank, team_size)
    sources = range(task.warp, num_ranks, launch.warps)
    values.setdefault("count", np.zeros(num_ranks, np.int64))
    values.setdefault("total", values["count"])   # the same memory; new where a kernel begins with this

    def take(access: Access) -> None:
        for source in sources:
            if (source in team) == (access.effect.noun == "arrived"):
                call.cell(task, "total").write(task, atomic=True)
                at = arrived if source in team else tags
                values["count"][source] = access.load(access.word(_local(call, task, window, at + 8 * source))) & 0xFFFFFF

    def store(access: Access) -> None:
        for source in sources:
            access.write(src_rank_counters + 4 * source, np.array([values["count"][source]], np.int32).view(np.uint8))

    def fill(access: Access) -> None:
        call.cell(task, "total").read(task)
        for source, count in enumerate(values["count"].tolist()):   # rows of every source over all warps
            for row in range(count + (task.warp - count) % launch.warps, capacity, launch.warps):
                access.write(_local(call, task, window, slot_ids + 4 * num_topk * (source * capacity + row)), np.full(4 * num_topk, 0xFF, np.uint8))

    return call.perform(task, (window, arrived, tags, slot_ids, rank, num_ranks, team_size, num_topk, plane_rows, epoch, src_rank_counters),
                        {"arrived": take, "tag": take, "src_rank_counters": store, "slot_ids": fill})


# ---- combine ---------------------------------------------------------------------------------------------------------------------
def ll_net_return_rows(call: Call, task: Task, comm: int, rows_window: int, slot: int, window: int, returned: int, remote: int, source: int,
                       token: int, most: int, num_topk: int, row_bytes: int, put_bytes: int, contexts: int) -> int:
    """A received token's rows back to its source."""
    places: list[int] = []

    def load(access: Access) -> None:
        places.extend(_read_rows(access, remote + 4 * source * most * num_topk, token, num_topk))

    def net(access: Access) -> None:
        for k, place in enumerate(places):
            if place >= 0:
                _network(call, comm).put(task, window, source, token % contexts, returned + (token * num_topk + k) * row_bytes,
                                         slot + place * row_bytes, put_bytes, rows_window)
                call.scheduler.split()

    return call.perform(task, (), {"remote": load, "net": net})


def ll_net_gather_row(call: Call, task: Task, rows_window: int, slot: int, window: int, returned: int, table: int, weights: int, out: int,
                      token: int, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, token_type: int, rank: int,
                      team_size: int) -> int:
    """A combined row, of rows of my team and of what came back."""
    rows_per_rank, team = num_experts // num_ranks * plane_rows, _team(rank, team_size)
    rows: list[int] = []
    pieces: dict[int, np.ndarray] = {}
    scale = np.zeros(0, np.float32)

    def read_table(access: Access) -> None:
        rows.extend(_read_rows(access, table, token, num_topk))

    def read_weights(access: Access) -> None:
        nonlocal scale
        scale = _read_weights(access, weights, token, num_topk)

    def pull(access: Access) -> None:
        for k, row in enumerate(rows):
            if row >= 0 and row // rows_per_rank in team:
                pieces[k] = access.read(_row(call, task, rows_window, slot, row, rows_per_rank, row_bytes), row_bytes).copy()
                call.scheduler.split()

    def take(access: Access) -> None:
        for k, row in enumerate(rows):
            if row >= 0 and row // rows_per_rank not in team:
                pieces[k] = access.read(_local(call, task, window, returned + (token * num_topk + k) * row_bytes), row_bytes).copy()

    def add(access: Access) -> None:
        total = np.zeros(row_bytes // (4 if token_type == 2 else 2), np.float32)
        for k in sorted(pieces):
            total = fma(unpack(pieces[k], token_type), scale[k], total)
        access.write(out + token * row_bytes, pack(total, token_type))

    return call.perform(task, (), {"table": read_table, "weights": read_weights, "slot": pull, "returned": take, "out": add})


def ll_net_sum_row(call: Call, task: Task, rows_window: int, slot: int, window: int, returned: int, table: int, out: int, token: int,
                   num_topk: int, num_ranks: int, plane_rows: int, row_bytes: int, token_type: int, rank: int, team_size: int) -> int:
    """A combined row of RANK_MAJOR, of rows of my team and of what came back."""
    team = _team(rank, team_size)
    rows: list[int] = []
    pieces: dict[int, np.ndarray] = {}

    def pull(access: Access) -> None:
        for k, row in enumerate(rows):
            if row >= 0 and row // plane_rows in team:
                pieces[k] = access.read(_row(call, task, rows_window, slot, row, plane_rows, row_bytes), row_bytes).copy()
                call.scheduler.split()

    def take(access: Access) -> None:
        for k, row in enumerate(rows):
            if row >= 0 and row // plane_rows not in team:
                pieces[k] = access.read(_local(call, task, window, returned + (token * num_topk + k) * row_bytes), row_bytes).copy()

    def add(access: Access) -> None:
        total = np.zeros(row_bytes // (4 if token_type == 2 else 2), np.float32)
        for k in sorted(pieces):
            total = fma(unpack(pieces[k], token_type), np.float32(1), total)
        access.write(out + token * row_bytes, pack(total, token_type))

    return call.perform(task, (), {"table": lambda a: rows.extend(_read_rows(a, table, token, num_topk)), "slot": pull, "returned": take, "out": add})


def ll_net_sum_packed_row(call: Call, task: Task, rows_window: int, slot: int, window: int, returned: int, table: int, weights: int, out: int,
                          token: int, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, rank: int,
                          team_size: int) -> int:
    """A combined row of packed rows of my team and of what came back."""
    rows_per_rank, team, size = num_experts // num_ranks * plane_rows, _team(rank, team_size), row_bytes // 1024 * PACKED_STRETCH
    rows: list[int] = []
    parts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    w = np.ones(num_topk, np.float32)

    def fetch(access: Access) -> None:
        for k, row in enumerate(rows):
            near_by = row // rows_per_rank in team
            if row >= 0 and near_by == (access.effect.noun == "slot"):
                at = (_row(call, task, rows_window, slot, row, rows_per_rank, row_bytes) if near_by
                      else _local(call, task, window, returned + (token * num_topk + k) * row_bytes))
                packed = access.read(at, size + 4)
                parts[k] = unpack_nvfp4(packed[:size], packed[size:].copy().view(np.float32)[0])
                call.scheduler.split()

    def read_weights(access: Access) -> None:
        if weights:
            w[:] = _read_weights(access, weights, token, num_topk)

    def add(access: Access) -> None:
        total = np.zeros(row_bytes // 2, np.float32)
        for k in sorted(parts):
            q, factors = parts[k]
            total = fma(q, np.repeat(factors * w[k], 16), total)
        access.write(out + token * row_bytes, pack(total, 0))

    return call.perform(task, (), {"table": lambda a: rows.extend(_read_rows(a, table, token, num_topk)), "slot": fetch, "returned": fetch,
                                   "weights": read_weights, "out": add})
