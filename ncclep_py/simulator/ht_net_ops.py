"""High-throughput operations over several teams on the CPU: the network, words inside a team, rows and headers on their way. See ``ops``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ncclep_py.errors import SPREADS, Code, Phase, Status
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.ht_ops import NEAR, ONE, _array, _hits, _part, _Sizes
from ncclep_py.simulator.ht_row_ops import _row, _table
from ncclep_py.simulator.network import Network
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, ahead, around_status, tagged, wait_words
from ncclep_py.simulator.words import Word

__all__: list[str] = []   # looked up by name


def _network(call: Call, comm: int) -> Network:
    if not 0 <= comm < len(call.sim.networks):
        raise ValueError(f"operations over several teams need a network, and there is no number {comm}: Network(sim, ...)")
    return call.sim.networks[comm]


def _team(rank: int, team_size: int) -> range:
    """Ranks of the team of `rank`."""
    first = rank // team_size * team_size
    return range(first, first + team_size)


def _rails(rank: int, num_ranks: int, team_size: int) -> list[int]:
    """Rail peers by distance."""
    team, index, teams = rank // team_size, rank % team_size, num_ranks // team_size
    return [(team - d) % teams * team_size + index for d in range(1, teams)]


def _local(call: Call, task: Task, window: int, offset: int) -> int:
    """Address in my own window."""
    return call.sim.peer_address(task, window, offset, task.rank)


def _to(call: Call, task: Task, access: Access, window: int, offset: int, ranks: range, value: int) -> None:
    """Store a word at the same offset of some ranks' windows."""
    for peer in ranks:
        access.store(call.sim.peer_address(task, window, offset, peer), value)
        call.scheduler.split()


# ---- who and where ---------------------------------------------------------------------------------------------------------------
def ht_net_blocks(call: Call, task: Task) -> int:
    """Blocks of my grid."""
    return task.block.launch.blocks


def ht_net_warps(call: Call, task: Task) -> int:
    """Warps of my block."""
    return task.block.launch.warps


def ht_net_sync(call: Call, task: Task) -> int:
    """A barrier of the block."""
    return call.perform(task, (), {})


def ht_net_count(call: Call, task: Task, word: int) -> int:
    """Operations so far."""
    return call.perform(task, (word,), {"count": lambda a: int(a.read(word, 8).view(np.int64)[0])})


def ht_net_advance(call: Call, task: Task, word: int, count: int) -> int:
    """One more."""
    return call.perform(task, (word, count), {"count": lambda a: a.write(word, np.array([count + 1], np.int64).view(np.uint8))})


# ---- the network -----------------------------------------------------------------------------------------------------------------
def ht_net_put(call: Call, task: Task, comm: int, window: int, peer: int, context: int, target_at: int, source_at: int, num_bytes: int) -> int:
    """One put."""
    return call.perform(task, (), {"net": lambda a: _network(call, comm).put(task, window, peer, context, target_at, source_at, num_bytes)})


def ht_net_put_rows(call: Call, task: Task, comm: int, window: int, peer: int, context: int, target_at: int, source_at: int, routes: int, first: int,
                    end: int, num_topk: int, row_bytes: int, wanted: int, team_size: int) -> int:
    """Rows that a team wants, neighbours in one put."""
    runs: list[list[int]] = []

    def choose(access: Access) -> None:
        for token in range(first, end):
            if any(r >= 0 and (r >> 32 & 0xFFFF) // team_size == wanted for r in _table(access, routes, token, num_topk)):
                if runs and runs[-1][1] == token:
                    runs[-1][1] += 1
                else:
                    runs.append([token, token + 1])

    def issue(access: Access) -> None:
        for begin, stop in runs:
            at, size = begin * row_bytes, (stop - begin) * row_bytes
            _network(call, comm).put(task, window, peer, context, target_at + at, source_at + at, size)

    return call.perform(task, (), {"routes": choose, "net": issue})


def ht_net_put_tag(call: Call, task: Task, comm: int, window: int, peer: int, context: int, target_at: int, epoch: int, low: int) -> int:
    """A word."""
    return call.perform(task, (), {"net": lambda a: _network(call, comm).put_value(task, window, peer, context, target_at, tagged(epoch, low))})


def ht_net_signal(call: Call, task: Task, comm: int, peer: int, context: int, signal: int, amount: int) -> int:
    """Add to a signal."""
    return call.perform(task, (), {"net": lambda a: _network(call, comm).signal(task, peer, context, signal, amount)})


def _wait_signals(call: Call, task: Task, access: Access, comm: int, signals: Sequence[tuple[int, int, int, int]]) -> int | None:
    """Wait for signals (source, context, id, least): the source of the first that does not come, or None."""
    network = _network(call, comm)

    def missing() -> list[tuple[int, int, int, int]]:
        return [s for s in signals if network.seen(task.rank, s[1], s[2]) < s[3]]

    def describe() -> tuple[str, list[int]]:
        left = missing()
        told = ", ".join(f"{s[2]} of context {s[1]} from rank {s[0]} ({network.seen(task.rank, s[1], s[2])} of {s[3]})" for s in left)
        return f"waits for signals {told}", sorted({s[0] for s in left})

    while missing() and not task.late:
        access.scheduler.wait(task, lambda: not missing(), describe)
    task.late = False
    left = missing()
    if access.effect.order == "acquire" and access.effect.scope == "sys":
        for _, context, signal, _ in signals:
            network.acquire(task, context, signal)
    return left[0][0] if left else None


def ht_net_wait_chunk(call: Call, task: Task, comm: int, window: int, tag: int, peer: int, context: int, signal: int, least: int, rank: int,
                      epoch: int, fail: int, record: int, timeout: int) -> int:
    """A chunk, and whether its sender gave up."""
    came = False

    def wait(access: Access) -> int:
        nonlocal came
        if task.warp:
            return 0
        if _wait_signals(call, task, access, comm, [(peer, context, signal, least)]) is None:
            came = True
            return 0
        seen = _network(call, comm).seen(rank, context, signal)
        return call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.ROWS, rank, peer, peer, seen, least)

    def look(access: Access) -> int | None:
        if not came:
            return None
        value = access.load(access.word(_local(call, task, window, tag)))
        status, detail = value >> 24 & 3, value & 0xFFFFFF
        if value >> 32 != epoch:
            return call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.ROWS, rank, peer, peer, value >> 32, epoch)
        if status == Status.ABORT:
            return call.give_up(task, fail, record, Code.ABORTED, epoch, Phase.ROWS, rank, peer, detail, epoch, epoch)
        if status == Status.REFUSED:
            return call.give_up(task, fail, record, Code.REFUSED, epoch, Phase.ROWS, rank, peer, peer, detail, epoch)
        return 0

    return call.perform(task, (comm, window, tag, peer, context, signal, least, rank, epoch, fail, record, timeout), {"net": wait, "tag": look})


# ---- head ------------------------------------------------------------------------------------------------------------------------
def _head(heads: int, num_ranks: int, source: int, epoch: int) -> int:
    return heads + ((epoch & 1) * num_ranks + source) * 16


def _head_words(epoch: int, signature: int, status: int) -> tuple[int, int]:
    return tagged(epoch, signature & LOW), tagged(epoch, status or around_status(signature))


def ht_net_publish_head(call: Call, task: Task, window: int, heads: int, rank: int, num_ranks: int, team_size: int, epoch: int, signature: int,
                        status: int) -> int:
    """HEAD to my team."""
    at = _local(call, task, window, _head(heads, num_ranks, rank, epoch))

    def head(access: Access) -> None:
        if call.sim.windows[window][rank].part(at).name != "FLIGHTS":
            call.sim.entered(window, rank, epoch, signature, status == 0)
        for half, word in enumerate(_head_words(epoch, signature, status)):
            _to(call, task, access, window, _head(heads, num_ranks, rank, epoch) + 8 * half, _team(rank, team_size), word)

    return call.perform(task, (), {"head": head})


def ht_net_enter(call: Call, task: Task, comm: int, window: int, heads: int, rank: int, num_ranks: int, team_size: int, channels: int, contexts: int,
                 adds: int, count: int, epoch: int, signature: int, status: int, fail: int, record: int, timeout: int) -> int:
    """Drain, then HEAD to rail peers."""
    network, dry = _network(call, comm), dict[int, bool]()

    def ids(peer: int) -> list[tuple[int, int, int, int]]:
        base = peer // team_size * (channels + 1)
        return [(peer, 0, base, count)] + [(peer, q % contexts, base + 1 + q, count * adds) for q in range(channels)]

    def net(access: Access) -> int | None:
        if task.warp:
            return None
        rails = _rails(rank, num_ranks, team_size)
        if access.effect.kind == "ld":
            left = _wait_signals(call, task, access, comm, [s for peer in rails for s in ids(peer)])
            dry.update({peer: all(network.seen(rank, s[1], s[2]) >= s[3] for s in ids(peer)) for peer in rails})
            if left is None:
                return 0
            return call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.HEAD, rank, left, left, count, count)
        for peer in rails:
            if dry.get(peer):
                for half, word in enumerate(_head_words(epoch, signature, status)):
                    network.put_value(task, window, peer, 0, _head(heads, num_ranks, rank, epoch) + 8 * half, word)
            network.signal(task, peer, 0, rank // team_size * (channels + 1), 1)
            call.scheduler.split()
        return None

    given = (comm, window, heads, rank, num_ranks, team_size, channels, contexts, adds, count, epoch, signature, status, fail, record, timeout)
    return call.perform(task, given, {"net": net})


def ht_net_wait_heads(call: Call, task: Task, window: int, heads: int, rank: int, num_ranks: int, team_size: int, epoch: int, signature: int,
                      fail: int, record: int, timeout: int) -> int:
    """HEAD of all ranks."""
    def words(access: Access, half: int) -> list[Word]:
        first = rank // team_size * team_size
        found = []
        for source in range(num_ranks):
            where = rank if source // team_size == rank // team_size else first + source % team_size
            found.append(access.word(call.sim.peer_address(task, window, _head(heads, num_ranks, source, epoch) + half, where)))
        return found

    def head(access: Access) -> int:
        if task.warp:
            return 0
        high = words(access, 8)
        v = wait_words(task, access, high, epoch, "HEAD", rank, words(access, 0), signature)
        expected = signature if v.code == Code.MISMATCH else epoch
        holder = rank // team_size * team_size + v.peer % team_size
        if v.code == Code.TIMEOUT and ahead(high[holder].peek(task.agent).value >> 32, epoch) < 0:   # nobody puts to a rank that is not there
            v = dataclasses.replace(v, peer=holder, culprit=holder)
        return call.give_up(task, fail, record, Code(v.code), epoch, Phase.HEAD, rank, v.peer, v.culprit, v.seen, expected) if v.code else 0

    return call.perform(task, (window, heads, rank, num_ranks, team_size, epoch, signature, fail, record, timeout), {"head": head})


def ht_net_wait_entered(call: Call, task: Task, comm: int, rank: int, num_ranks: int, team_size: int, channels: int, count: int, epoch: int,
                        fail: int, record: int, timeout: int) -> int:
    """HEAD signals of rail peers."""
    def wait(access: Access) -> int:
        if task.warp:
            return 0
        rails = _rails(rank, num_ranks, team_size)
        left = _wait_signals(call, task, access, comm, [(p, 0, p // team_size * (channels + 1), count + 1) for p in rails])
        return 0 if left is None else call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.HEAD, rank, left, left, count, count + 1)

    return call.perform(task, (comm, rank, num_ranks, team_size, channels, count, epoch, fail, record, timeout), {"net": wait})


def ht_net_publish_abort(call: Call, task: Task, window: int, heads: int, arrived: int, rank: int, num_ranks: int, team_size: int, epoch: int,
                         fail: int) -> int:
    """ABORT to my team."""
    word = 0

    def read(access: Access) -> None:
        nonlocal word
        value = access.load(access.word(fail))
        if value & 0xFF in SPREADS:
            word = tagged(epoch, Status.ABORT << 24 | (value >> 8 & 0xFFFFFF))

    def tell(access: Access, offset: int) -> None:
        if word:
            _to(call, task, access, window, offset, _team(rank, team_size), word)

    return call.perform(task, (), {"fail": read, "head": lambda a: tell(a, _head(heads, num_ranks, rank, epoch) + 8),
                                   "arrived": lambda a: tell(a, arrived + 8 * rank)})


def ht_net_publish_arrived(call: Call, task: Task, window: int, arrived: int, rank: int, team_size: int, epoch: int) -> int:
    """ARRIVED to my team."""
    return call.perform(task, (), {"arrived": lambda a: _to(call, task, a, window, arrived + 8 * rank, _team(rank, team_size), tagged(epoch, 0))})


def ht_net_wait_arrived(call: Call, task: Task, window: int, arrived: int, rank: int, team_size: int, epoch: int, fail: int, record: int,
                        timeout: int) -> int:
    """ARRIVED of my team."""
    first = rank // team_size * team_size
    at = _local(call, task, window, arrived + 8 * first)

    def wait(access: Access) -> int:
        if task.warp:
            return 0
        v = wait_words(task, access, [access.word(at + 8 * s) for s in range(team_size)], epoch, "ARRIVED", rank, first=first)
        return call.give_up(task, fail, record, Code(v.code), epoch, Phase.ARRIVED, rank, v.peer, v.culprit, v.seen, epoch) if v.code else 0

    return call.perform(task, (window, arrived, rank, team_size, epoch, fail, record, timeout), {"arrived": wait})


# ---- update ----------------------------------------------------------------------------------------------------------------------
def ht_net_publish_hits(call: Call, task: Task, window: int, hits: int, rank: int, num_ranks: int, num_experts: int, by_rank: int, epoch: int,
                        team_size: int) -> int:
    """My totals to my team."""
    sizes, warps = _Sizes.of(num_experts, num_ranks, by_rank), task.block.launch.warps

    def publish(access: Access) -> None:
        call.cell(task, "total").read(task)
        total = task.block.values["total"].tolist()
        for peer in _team(rank, team_size):
            at = call.sim.peer_address(task, window, _hits(hits, num_ranks, num_experts, rank, epoch), peer)
            for column in range(task.warp, sizes.columns, warps):
                access.store(at + 8 * column, tagged(epoch, total[column]))
            call.scheduler.split()

    return call.perform(task, (window, hits, rank, num_ranks, num_experts, by_rank, epoch, team_size), {"hits": publish})


def ht_net_forward_hits(call: Call, task: Task, window: int, net_hits: int, hits: int, rank: int, num_ranks: int, num_experts: int, by_rank: int,
                        epoch: int, peer: int, team_size: int) -> int:
    """A rail peer's totals to my team."""
    columns = range(task.warp, _Sizes.of(num_experts, num_ranks, by_rank).columns, task.block.launch.warps)
    found: dict[int, int] = {}

    def load(access: Access) -> None:
        for c in columns:
            found[c] = int(access.read(_local(call, task, window, net_hits + 8 * c), 8).view(np.uint64)[0])

    def tell(access: Access) -> None:
        for c, value in found.items():
            _to(call, task, access, window, _hits(hits, num_ranks, num_experts, peer, epoch) + 8 * c, _team(rank, team_size), value)

    return call.perform(task, (window, net_hits, hits, rank, num_ranks, num_experts, by_rank, epoch, peer, team_size),
                        {"net_hits": load, "hits": tell})


def _forwarded(call: Call, task: Task, access: Access, word: Word, source: int, noun: str, window: int, heads: int, rank: int, num_ranks: int,
               team_size: int, epoch: int, fail: int, record: int) -> int:
    """Wait for a word of `source`, which for another team's rank is forwarded by my team's rank of the same index; either tells if it gave up."""
    direct, team = source // team_size == rank // team_size, _team(rank, team_size)
    forwarder = source if direct else team[source % team_size]
    heard = Access(task, call.sim, next(e for e in call.effects if e.noun == "head"))   # looked at while it waits
    told = heard.word(_local(call, task, window, _head(heads, num_ranks, forwarder, epoch) + 8))

    def gave_up() -> bool:
        value = told.peek(task.agent).value
        return value >> 32 == epoch and value >> 24 & 3 == Status.ABORT

    def old() -> bool:
        distance = ahead(word.peek(task.agent).value >> 32, epoch)
        return distance != 0 and not 0 < distance < NEAR

    def describe() -> tuple[str, list[int]]:
        how = "" if direct else f" by way of rank {forwarder}"
        return f"waits in epoch {epoch} for {noun} of rank {source}{how}", [source if forwarder == rank else forwarder]

    while old() and not gave_up() and not task.late:
        access.scheduler.wait(task, lambda: not old() or gave_up(), describe)
    task.late = False
    seen, state = access.load(word) >> 32, heard.load(told)
    if seen == epoch:
        return 0
    blamed = source if forwarder == rank else forwarder
    code, culprit = (Code.LEFT_BEHIND if 0 < ahead(seen, epoch) < NEAR else Code.TIMEOUT), blamed
    if gave_up():
        code, culprit = Code.ABORTED, state & 0xFFFFFF
    return call.give_up(task, fail, record, code, epoch, Phase.COUNTS, rank, blamed, culprit, seen, epoch)


def ht_net_wait_hits(call: Call, task: Task, window: int, hits: int, heads: int, rank: int, num_ranks: int, team_size: int, num_experts: int,
                     by_rank: int, epoch: int, fail: int, record: int, timeout: int) -> int:
    """All ranks' totals."""
    sizes, values = _Sizes.of(num_experts, num_ranks, by_rank), task.block.values
    at = _local(call, task, window, _hits(hits, num_ranks, num_experts, 0, epoch))
    words = [(source, column) for source in range(num_ranks) for column in range(sizes.columns)]

    def wait(access: Access) -> int:
        for source, column in words[task.warp::task.block.launch.warps]:
            word = access.word(at + 8 * (source * (num_experts + num_ranks) + column))
            code = _forwarded(call, task, access, word, source, "HITS", window, heads, rank, num_ranks, team_size, epoch, fail, record)
            if code:
                return code
            for name in ("all", "lower") if source < rank else ("all",):
                call.cell(task, name).write(task, atomic=True)
                values[name][column] += access.load(word) & LOW
        return 0

    return call.perform(task, (window, hits, heads, rank, num_ranks, team_size, num_experts, by_rank, epoch, fail, record, timeout),
                        {"hits": wait, "head": lambda a: None})


def ht_net_wait_kept(call: Call, task: Task, window: int, kept: int, heads: int, rank: int, num_ranks: int, team_size: int, num_experts: int,
                     by_rank: int, budget: int, epoch: int, fail: int, record: int, timeout: int) -> int:
    """All ranks' KEPT, if I overflow."""
    local, full = num_experts // num_ranks, _full(call, task, by_rank, budget, range(rank, rank + 1))

    def wait(access: Access) -> int:
        for i in range(task.warp, num_ranks * local, task.block.launch.warps) if full else ():
            word = access.word(_local(call, task, window, kept + 8 * i))
            code = _forwarded(call, task, access, word, i // local, "KEPT", window, heads, rank, num_ranks, team_size, epoch, fail, record)
            if code:
                return code
        return 0

    return call.perform(task, (window, kept, heads, rank, num_ranks, team_size, num_experts, by_rank, budget, epoch, fail, record, timeout),
                        {"kept_rows": wait, "head": lambda a: None})


def _full(call: Call, task: Task, by_rank: int, budget: int, ranks: range) -> list[int]:
    """Ranks to which KEPT are told."""
    call.cell(task, "rank_total").read(task)
    totals = task.block.values["rank_total"].tolist()
    return [p for p in ranks if by_rank and totals[p] > budget]


def ht_net_overflows(call: Call, task: Task, num_experts: int, num_ranks: int, by_rank: int, budget: int, first_rank: int, team_size: int) -> int:
    """Whether KEPT are told to a team."""
    return int(bool(_full(call, task, by_rank, budget, range(first_rank, first_rank + team_size))))


def ht_net_publish_kept(call: Call, task: Task, window: int, kept: int, kept_sent: int, places: int, num_tokens: int, num_topk: int, num_experts: int,
                        num_ranks: int, by_rank: int, budget: int, rank: int, epoch: int, team_size: int) -> int:
    """Rows I send to each expert of a rank that overflows."""
    local, warps = num_experts // num_ranks, task.block.launch.warps
    count, full = _array(task, "kept", num_experts), _full(call, task, by_rank, budget, range(num_ranks))

    def load(access: Access) -> None:
        if not full:
            return
        first, end = _part(0, num_tokens, task.warp, warps)
        found = access.read(places + 8 * first * num_topk, 8 * (end - first) * num_topk).view(np.int64).reshape(-1, num_topk).tolist()
        call.cell(task, "kept").write(task, atomic=True)
        for row in found:
            for place in {p for p in row if p >= 0}:
                count[place >> 40] += 1

    def tell(access: Access, at: Callable[[int], int], mine: bool) -> None:
        if not full:
            return
        call.cell(task, "kept").read(task)
        for e in range(task.warp, num_experts, warps):
            if (e // local in full and e // local in _team(rank, team_size)) if mine else True:
                access.store(at(e), tagged(epoch, int(count[e])))
                call.scheduler.split()

    def at_peer(e: int) -> int:
        return call.sim.peer_address(task, window, kept + (rank * local + e % local) * 8, e // local)

    given = (window, kept, kept_sent, places, num_tokens, num_topk, num_experts, num_ranks, by_rank, budget, rank, epoch, team_size)
    return call.perform(task, given, {
        "place_table": load, "kept_rows": lambda a: tell(a, at_peer, True),
        "kept_sent": lambda a: tell(a, lambda e: _local(call, task, window, kept_sent + 8 * e), False)})


def ht_net_forward_kept(call: Call, task: Task, window: int, net_kept: int, kept: int, num_experts: int, num_ranks: int, by_rank: int, budget: int,
                        rank: int, peer: int, team_size: int) -> int:
    """A rail peer's KEPT to the ranks of my team that overflow."""
    local, team = num_experts // num_ranks, _team(rank, team_size)
    full = _full(call, task, by_rank, budget, team)
    found: dict[tuple[int, int], int] = {}

    def load(access: Access) -> None:
        for i in range(task.warp, team_size * local, task.block.launch.warps):
            if team[i // local] in full:
                found[team[i // local], i % local] = int(access.read(_local(call, task, window, net_kept + 8 * i), 8).view(np.uint64)[0])

    def tell(access: Access) -> None:
        for (owner, e), value in found.items():
            access.store(call.sim.peer_address(task, window, kept + (peer * local + e) * 8, owner), value)
            call.scheduler.split()

    return call.perform(task, (window, net_kept, kept, num_experts, num_ranks, by_rank, budget, rank, peer, team_size),
                        {"net_kept": load, "kept_rows": tell})


# ---- dispatch --------------------------------------------------------------------------------------------------------------------
def _in_team(route: int, rank: int, team_size: int) -> bool:
    return route >= 0 and (route >> 32 & 0xFFFF) // team_size == rank // team_size


def ht_net_stage_row(call: Call, task: Task, rows_window: int, slot: int, window: int, sent: int, tokens: int, routes: int, token: int, num_topk: int,
                     row_bytes: int, rank: int, team_size: int) -> int:
    """A token's row to its places in my team, and to send staging."""
    found: list[int] = []
    held = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal held
        held = access.read(tokens + token * row_bytes, row_bytes).copy()

    def store(access: Access) -> None:
        for route in found:
            if _in_team(route, rank, team_size):
                access.write(_row(call, task, rows_window, slot, route, row_bytes), held)
                call.scheduler.split()

    def stage(access: Access) -> None:
        if any(r >= 0 and not _in_team(r, rank, team_size) for r in found):
            access.write(_local(call, task, window, sent + token * row_bytes), held)

    return call.perform(task, (), {"routes": lambda a: found.extend(_table(a, routes, token, num_topk)), "tokens": load, "slot": store,
                                   "staging": stage})


def ht_net_stage_header(call: Call, task: Task, window: int, sent: int, routes: int, places: int, weights: int, token: int, num_tokens: int,
                        num_topk: int, header_bytes: int, rank: int, forward: int) -> int:
    """A token's header in send staging."""
    header = np.full(header_bytes, 255, np.uint8)
    there = token < num_tokens

    def copy(access: Access, at: int, offset: int, size: int, wanted: bool = True) -> None:
        if there and wanted:
            header[offset: offset + size] = access.read(at + size * token, size)

    size = 8 * num_topk
    return call.perform(task, (), {
        "routes": lambda a: copy(a, routes, 0, size), "place_table": lambda a: copy(a, places, size, size),
        "weights": lambda a: copy(a, weights, 2 * size, size // 2, bool(forward)),
        "header_sent": lambda a: a.write(_local(call, task, window, sent + token * header_bytes), header)})


def ht_net_take_header(call: Call, task: Task, window: int, staged: int, remote_routes: int, remote_places: int, token: int, num_topk: int,
                       num_experts: int, num_ranks: int, header_bytes: int, rank: int, team_size: int) -> int:
    """What of a header concerns my team."""
    local, size = num_experts // num_ranks, 8 * num_topk
    routes, places = list[int](), list[int]()

    def load(access: Access) -> None:
        found = access.read(_local(call, task, window, staged + token * header_bytes), 2 * size).view(np.int64).tolist()
        routes.extend(r if _in_team(r, rank, team_size) else -1 for r in found[:num_topk])
        places.extend(p if p >= 0 and (p >> 40) // local // team_size == rank // team_size else -1 for p in found[num_topk:])

    return call.perform(task, (), {
        "header_staged": load, "remote_routes": lambda a: a.write(remote_routes + token * size, np.array(routes, np.int64).view(np.uint8)),
        "remote_places": lambda a: a.write(remote_places + token * size, np.array(places, np.int64).view(np.uint8))})


def ht_net_forward_row(call: Call, task: Task, rows_window: int, slot: int, window: int, staged: int, remote_routes: int, token: int, num_topk: int,
                       row_bytes: int, rank: int) -> int:
    """A received row to its rows in my team."""
    found: list[int] = []
    held = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal held
        if any(r >= 0 for r in found):
            held = access.read(_local(call, task, window, staged + token * row_bytes), row_bytes).copy()

    def store(access: Access) -> None:
        for route in found:
            if route >= 0:
                access.write(_row(call, task, rows_window, slot, route, row_bytes), held)
                call.scheduler.split()

    return call.perform(task, (), {"remote_routes": lambda a: found.extend(_table(a, remote_routes, token, num_topk)), "staging": load,
                                   "slot": store})


def _only(table: Callable[[Access], list[int]], found: list[int], keep: Callable[[int], bool]) -> Callable[[Access], None]:
    """Load a table into `found`, -1 for what is not to be kept."""
    return lambda access: found.extend(x if keep(x) else -1 for x in table(access))


def _weights(call: Call, task: Task, window: int, recv_idx: int, recv_weights: int, num_topk: int, num_experts: int, num_ranks: int, by_rank: int,
             global_ids: int, route: list[int], place: list[int], scale: list[np.float32]) -> tuple[Callable, Callable]:
    """Stores of ids and of weights to all rows of `route` and `place`, as `ht_scatter_weights` makes them."""
    local = num_experts // num_ranks

    def at(base: int, size: int, rank: int, row: int, column: int) -> int:
        return call.sim.peer_address(task, window, base + size * (row * num_topk + column if by_rank else row), rank)

    def columns() -> list[tuple[int, int, int]]:
        rows = [(r >> 32 & 0xFFFF, r & LOW, r >> 48) for r in route if r >= 0 and by_rank]
        return [(rank, row, column) for rank, row, used in rows for column in range(used, num_topk)]

    def sums() -> dict[int, np.float32]:
        found: dict[int, np.float32] = {}
        with np.errstate(all="ignore"):
            for p, w in zip(place, scale, strict=True):
                if p >= 0:
                    found[p] = w if p not in found else found[p] + w
        return found

    def ids(access: Access) -> None:
        for rank, row, column in columns():
            access.write(at(recv_idx, 8, rank, row, column), np.array([-1], np.int64).view(np.uint8))
        for p in sums() if by_rank else ():
            expert = p >> 40
            access.write(at(recv_idx, 8, expert // local, p & LOW, p >> 32 & 255),
                         np.array([expert if global_ids else expert % local], np.int64).view(np.uint8))
        call.scheduler.split()

    def weights(access: Access) -> None:
        for rank, row, column in columns():
            access.write(at(recv_weights, 4, rank, row, column), np.zeros(4, np.uint8))
        for p, w in sums().items():
            access.write(at(recv_weights, 4, (p >> 40) // local, p & LOW, p >> 32 & 255), np.array([w], np.float32).view(np.uint8))

    return ids, weights


def ht_net_scatter_weights(call: Call, task: Task, window: int, recv_idx: int, recv_weights: int, weights: int, routes: int, places: int, token: int,
                           num_topk: int, num_experts: int, num_ranks: int, by_rank: int, global_ids: int, rank: int, team_size: int) -> int:
    """Weights and ids of a token to its rows in my team."""
    route, place, scale, local = list[int](), list[int](), list[np.float32](), num_experts // num_ranks
    ids, store = _weights(call, task, window, recv_idx, recv_weights, num_topk, num_experts, num_ranks, by_rank, global_ids, route, place, scale)
    return call.perform(task, (), {
        "routes": _only(lambda a: _table(a, routes, token, num_topk), route, lambda r: _in_team(r, rank, team_size)),
        "place_table": _only(lambda a: _table(a, places, token, num_topk), place,
                             lambda p: p >= 0 and (p >> 40) // local // team_size == rank // team_size),
        "weights": lambda a: scale.extend(a.read(weights + 4 * token * num_topk, 4 * num_topk).view(np.float32)),
        "recv_idx": ids, "recv_weights": store})


def ht_net_forward_weights(call: Call, task: Task, window: int, recv_idx: int, recv_weights: int, staged: int, remote_routes: int, remote_places: int,
                           token: int, num_topk: int, num_experts: int, num_ranks: int, by_rank: int, global_ids: int, header_bytes: int, rank: int,
                           team_size: int) -> int:
    """Weights and ids of a remote token to its rows in my team."""
    route, place, scale = list[int](), list[int](), list[np.float32]()
    ids, store = _weights(call, task, window, recv_idx, recv_weights, num_topk, num_experts, num_ranks, by_rank, global_ids, route, place, scale)

    def load(access: Access) -> None:
        at = _local(call, task, window, staged + token * header_bytes + 16 * num_topk)
        scale.extend(access.read(at, 4 * num_topk).view(np.float32).copy())

    return call.perform(task, (), {
        "remote_routes": lambda a: route.extend(_table(a, remote_routes, token, num_topk)),
        "remote_places": lambda a: place.extend(_table(a, remote_places, token, num_topk)),
        "header_staged": load, "recv_idx": ids, "recv_weights": store})


# ---- combine ---------------------------------------------------------------------------------------------------------------------
def ht_net_partial_row(call: Call, task: Task, rows_window: int, slot: int, window: int, sent: int, remote_routes: int, token: int, num_topk: int,
                       row_bytes: int, token_type: int, rank: int) -> int:
    """My team's sum of a remote token."""
    found: list[int] = []
    total = np.zeros(row_bytes // (4 if token_type == 2 else 2), np.float32)

    def pull(access: Access) -> None:
        nonlocal total
        for route in found:
            if route >= 0:
                total = fma(unpack(access.read(_row(call, task, rows_window, slot, route, row_bytes), row_bytes), token_type), ONE, total)
                call.scheduler.split()

    def stage(access: Access) -> None:
        if any(r >= 0 for r in found):
            access.write(_local(call, task, window, sent + token * row_bytes), pack(total, token_type))

    return call.perform(task, (), {"remote_routes": lambda a: found.extend(_table(a, remote_routes, token, num_topk)), "slot": pull,
                                   "staging": stage})


def _grads(call: Call, task: Task, access: Access, window: int, recv_weights: int, place: Sequence[int], num_topk: int, local: int, by_rank: int,
           wanted: Callable[[int], bool], out: np.ndarray) -> None:
    """Gradients at the places that are wanted."""
    for k, p in enumerate(place):
        if p >= 0 and wanted(p):
            row = (p & LOW) * num_topk + (p >> 32 & 255) if by_rank else p & LOW
            out[k] = access.read(call.sim.peer_address(task, window, recv_weights + 4 * row, (p >> 40) // local), 4).view(np.float32)[0]


def ht_net_partial_grads(call: Call, task: Task, window: int, recv_weights: int, sent: int, remote_places: int, token: int, num_topk: int,
                         num_experts: int, num_ranks: int, by_rank: int, rank: int) -> int:
    """Gradients of a remote token's weights in my team."""
    place: list[int] = []
    out, local = np.zeros(num_topk, np.float32), num_experts // num_ranks
    return call.perform(task, (), {
        "remote_places": lambda a: place.extend(_table(a, remote_places, token, num_topk)),
        "recv_weights": lambda a: _grads(call, task, a, window, recv_weights, place, num_topk, local, by_rank, lambda _: True, out),
        "grads_sent": lambda a: a.write(_local(call, task, window, sent + 4 * token * num_topk), out.view(np.uint8))})


def ht_net_reduce_row(call: Call, task: Task, rows_window: int, slot: int, window: int, staged: int, routes: int, out: int, token: int, num_topk: int,
                      row_bytes: int, token_type: int, rank: int, num_ranks: int, team_size: int, team_bytes: int) -> int:
    """A combined row."""
    found: list[int] = []
    total = np.zeros(row_bytes // (4 if token_type == 2 else 2), np.float32)
    teams = num_ranks // team_size

    def add(access: Access, address: int) -> None:
        nonlocal total
        total = fma(unpack(access.read(address, row_bytes), token_type), ONE, total)
        call.scheduler.split()

    def pull(access: Access) -> None:
        for route in found:
            if _in_team(route, rank, team_size):
                add(access, _row(call, task, rows_window, slot, route, row_bytes))

    def take(access: Access) -> None:
        others = {(rank // team_size - (r >> 32 & 0xFFFF) // team_size) % teams for r in found if r >= 0}
        for distance in sorted(others - {0}):
            add(access, _local(call, task, window, staged + (distance - 1) * team_bytes + token * row_bytes))

    return call.perform(task, (), {"routes": lambda a: found.extend(_table(a, routes, token, num_topk)), "slot": pull, "staging": take,
                                   "out": lambda a: a.write(out + token * row_bytes, pack(total, token_type))})


def ht_net_reduce_grads(call: Call, task: Task, window: int, recv_weights: int, staged: int, places: int, grads: int, token: int, num_topk: int,
                        num_experts: int, num_ranks: int, by_rank: int, rank: int, team_size: int, team_bytes: int) -> int:
    """Gradients of a token's weights."""
    place: list[int] = []
    out = np.zeros(num_topk, np.float32)
    local, teams, mine = num_experts // num_ranks, num_ranks // team_size, rank // team_size

    def team_of(p: int) -> int:
        return (p >> 40) // local // team_size

    def take(access: Access) -> None:
        for k, p in enumerate(place):
            if p >= 0 and team_of(p) != mine:
                distance = (mine - team_of(p)) % teams
                at = _local(call, task, window, staged + (distance - 1) * team_bytes + 4 * (token * num_topk + k))
                out[k] = access.read(at, 4).view(np.float32)[0]

    return call.perform(task, (), {
        "place_table": lambda a: place.extend(_table(a, places, token, num_topk)),
        "recv_weights": lambda a: _grads(call, task, a, window, recv_weights, place, num_topk, local, by_rank, lambda p: team_of(p) == mine, out),
        "grads_staged": take, "grads": lambda a: a.write(grads + 4 * token * num_topk, out.view(np.uint8))})
