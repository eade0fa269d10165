"""Low-latency operations with masks over several teams on the CPU. See ``ops``, ``kernels/ll_net_masked_ops.cu``, ``ll_net_member_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ncclep_py.errors import Code, Phase
from ncclep_py.ll_net_member_map import DIFFERS, FAILED, SAID
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.ht_net_ops import _head, _head_words, _local, _network, _team
from ncclep_py.simulator.ll_net_ops import _networked, _of_token
from ncclep_py.simulator.mask_ops import await_outcome
from ncclep_py.simulator.recipe_ops import PACKED_STRETCH, unpack_nvfp4
from ncclep_py.simulator.routing_ops import _read_rows, _read_weights
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, _judge_head, ahead, tagged
from ncclep_py.simulator.words import Word

__all__: list[str] = []   # looked up by name


def _members(num_ranks: int, out: int) -> list[int]:
    """Ranks that are not in a view."""
    return [r for r in range(num_ranks) if not out >> r & 1]


def _wait(call: Call, task: Task, sources: Sequence[int], here: Callable[[int], bool], said: Callable[[int], bool], stop: Callable[[], bool],
          noun: str, waited: int = 0) -> list[int]:
    """Wait until `here` for all sources, or `stop`: those that did not come. One warp.

    The model of ``ll_net_member_map``: a wait gives up only on ranks that died, or sleep between operations or
    are cut off and have not `said` it before.
    """
    came: dict[int, int] = {}
    begun = call.scheduler.step

    def missing() -> list[int]:
        left = [s for s in sources if not here(s)]
        for s in sources:
            if s not in left:
                came.setdefault(s, call.scheduler.step)
        return left

    def gone(s: int) -> bool:
        stream, scheduler, network = call.sim.streams[s], call.scheduler, call.sim.network
        cut = network is not None and (s, task.rank) in network.lost and not said(s)
        return cut or s in scheduler.dead or (not stream.busy and (s in scheduler.stalled or not stream.queue) and not said(s))

    def describe() -> tuple[str, list[int]]:
        left = missing()
        return f"waits for {noun} of ranks {left}", left if all(map(gone, left)) else []

    while missing() and not stop() and not task.late:
        call.scheduler.wait(task, lambda: not missing() or stop(), describe)
    task.late = False
    if waited:
        for source, step in came.items():
            total = call.sim.memory.write(task.agent, waited + 8 * source, 8).view(np.uint64)
            total += np.uint64(step - begun)
    return missing()


def _sent(word: Word, call: Call, task: Task, fits: Callable[[int], bool]) -> bool:
    """Whether a value that fits was stored in a word, or is on its way there."""
    items = (i for w in call.sim.network.wires.values() if w.target == task.rank for i in w.open) if call.sim.network else ()
    return any(fits(s.value) for s in word.stores[-3:]) or any(i.kind == "value" and i.pieces and i.pieces[0][0] == word.address and fits(i.value)
                                                               for i in items)


def _due(call: Call, task: Task, source: int, context: int, signal: int, least: int) -> bool:
    """Whether a signal will have that value when all that its source sent is here."""
    network = call.sim.network
    assert network is not None   # these operations have one
    wire = network.wires[context, source, task.rank]
    return network.seen(task.rank, context, signal) + sum(i.amount for i in wire.open if i.kind == "signal" and i.signal == signal) >= least


def _read_all(access: Access, words: Sequence[Word]) -> None:
    """What a wait looked at, with its strength."""
    for word in words:
        access.load(word)


def _read_adds(access: Access, adds: int, num_ranks: int) -> list[int]:
    return access.read(adds, 8 * num_ranks).view(np.int64).tolist()


# ---- head ------------------------------------------------------------------------------------------------------------------------
def ll_net_enter_members(call: Call, task: Task, comm: int, window: int, heads: int, rank: int, num_ranks: int, team_size: int, contexts: int,
                         mask: int, adds: int, epoch: int, signature: int, status: int, timeout: int) -> int:
    """Drain, then HEAD to networked members."""
    network, peers = _network(call, comm), [p for p in _networked(rank, num_ranks, team_size) if not mask >> p & 1]
    counts: list[int] = []
    wet: list[int] = []

    def count(access: Access) -> None:
        if not task.warp:
            counts.extend(_read_adds(access, adds, num_ranks))

    def net(access: Access) -> int | None:
        if task.warp:
            return None
        if access.effect.kind == "ld":
            wet.extend(_wait(call, task, peers, lambda p: all(network.seen(rank, c, 2 * p + 1) >= counts[p] for c in range(contexts)),
                             lambda p: all(_due(call, task, p, c, 2 * p + 1, counts[p]) for c in range(contexts)), lambda: False, "DATA"))
            if access.effect.order == "acquire" and access.effect.scope == "sys":
                for p in peers:
                    for c in range(contexts):
                        network.acquire(task, c, 2 * p + 1)
            return sum(1 << p for p in wet)
        call.sim.entered(window, rank, epoch, signature, status == 0, mask)
        for p in peers:
            if p not in wet:
                for half, word in enumerate(_head_words(epoch, signature, status)):
                    network.put_value(task, window, p, 0, _head(heads, num_ranks, rank, epoch) + 8 * half, word)
            network.signal(task, p, 0, 2 * rank, 1)
            call.scheduler.split()
        return None

    given = (comm, window, heads, rank, num_ranks, team_size, contexts, mask, adds, epoch, signature, status, timeout)
    return call.perform(task, given, {"adds": count, "net": net})


def _verdicts(access: Access, call: Call, task: Task, window: int, heads: int, sources: Sequence[int], num_ranks: int, epoch: int,
              signature: int) -> dict[int, int]:
    """What HEAD of each source means: 0 or a code, and TIMEOUT if it is not here."""
    found = {}
    for s in sources:
        at = _local(call, task, window, _head(heads, num_ranks, s, epoch))
        verdict = _judge_head(access.load(access.word(at + 8)), access.load(access.word(at)), epoch, s, True, signature)
        assert verdict is not None
        found[s] = verdict.code
    return found


def ll_net_wait_members(call: Call, task: Task, comm: int, window: int, heads: int, views: int, rank: int, num_ranks: int, team_size: int, mask: int,
                        view: int, rounds: int, adds: int, epoch: int, signature: int, waited: int, timeout: int) -> int:
    """HEAD of all members."""
    network, sources, team = _network(call, comm), [s for s in _members(num_ranks, view) if s != rank], _team(rank, team_size)
    counts: list[int] = []
    first: list[Word] = []
    result = 0

    def count(access: Access) -> None:
        if not task.warp:
            counts.extend(_read_adds(access, adds, num_ranks))

    def head(access: Access) -> int:
        nonlocal result
        if task.warp:
            return 0
        words = {s: [access.word(_local(call, task, window, _head(heads, num_ranks, s, epoch)) + half) for half in (0, 8)] for s in sources}
        first.extend(access.word(_local(call, task, window, _view_at(views, num_ranks, rounds, 1, epoch, s))) for s in sources)

        def stop() -> bool:
            return any(v >> 32 == epoch and v >> rank & 1 for v in (w.peek(task.agent).value for w in first))

        def here(s: int) -> bool:
            return (all(ahead(w.peek(task.agent).value >> 32, epoch) >= 0 for w in words[s])
                    and (s in team or network.seen(rank, 0, 2 * s) > counts[s]))

        def said(s: int) -> bool:
            return (all(_sent(w, call, task, lambda v: ahead(v >> 32, epoch) >= 0) for w in words[s])
                    and (s in team or _due(call, task, s, 0, 2 * s, counts[s] + 1)))

        missing = _wait(call, task, sources, here, said, stop, "HEAD", waited)
        codes = _verdicts(access, call, task, window, heads, [*sources, rank], num_ranks, epoch, signature)
        result = view | (1 << rank if stop() else sum(1 << s for s in missing))
        if any(code and s not in missing for s, code in codes.items()):
            result |= FAILED
        return result

    def net(access: Access) -> None:
        if not task.warp and access.effect.order == "acquire" and access.effect.scope == "sys":
            for s in sources:
                if s not in team:
                    network.acquire(task, 0, 2 * s)

    given = (comm, window, heads, views, rank, num_ranks, team_size, mask, view, rounds, adds, epoch, signature, waited, timeout)
    return call.perform(task, given, {"adds": count, "head": head, "view": lambda a: _read_all(a, first), "net": net})


def ll_net_await_view(call: Call, task: Task, outcome: int, epoch: int, timeout: int) -> int:
    """What a block of this rank told."""
    return await_outcome(call, task, outcome, epoch, timeout)


# ---- rows ------------------------------------------------------------------------------------------------------------------------
def _header(call: Call, task: Task, token: int, first: int, num_topk: int, words: int, header_bytes: int, epoch: int) -> np.ndarray:
    """The first bytes of a token's message."""
    header = np.zeros(header_bytes, np.uint8)
    header[:8].view(np.uint64)[0] = 1 << 32 | epoch
    fields = header[8:8 + 4 * words * num_topk].reshape(words, 4 * num_topk)
    fields[0] = _of_token(call, task, token, first, num_topk).astype(np.int32).view(np.uint8)
    if words == 3:
        for i, name in ((1, "ids"), (2, "weights")):
            call.cell(task, name).read(task)
            fields[i] = np.asarray(task.block.values[name][token - first], np.int32 if i == 1 else np.uint8).view(np.uint8)
    return header


def _hosts(call: Call, task: Task, token: int, first: int, num_topk: int, rows_per_rank: int) -> list[int]:
    """Ranks that want a token."""
    return sorted({row // rows_per_rank for row in _of_token(call, task, token, first, num_topk).tolist() if row >= 0})


def ll_net_send_member_row(call: Call, task: Task, comm: int, window: int, sent: int, messages: int, tokens: int, scales: int, token: int, first: int,
                           end: int, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, scale_bytes: int, words: int,
                           header_bytes: int, message_bytes: int, rank: int, team_size: int, contexts: int, epoch: int) -> int:
    """A token's message to all ranks that want it."""
    at, team = token * message_bytes, _team(rank, team_size)
    hosts = _hosts(call, task, token, first, num_topk, num_experts // num_ranks * plane_rows)
    parts = [_header(call, task, token, first, num_topk, words, header_bytes, epoch)]

    def load(access: Access) -> None:
        begin, size = {"tokens": (tokens, row_bytes), "scales": (scales, scale_bytes)}[access.effect.noun]
        if size:
            parts.append(access.read(begin + token * size, size).copy())

    def stage(access: Access) -> None:
        if any(h not in team for h in hosts):
            access.write(_local(call, task, window, sent + at), np.concatenate(parts))

    def store(access: Access) -> None:
        for peer in hosts:
            if peer in team:
                access.write(call.sim.peer_address(task, window, messages + at, peer), np.concatenate(parts))
                call.scheduler.split()

    def net(access: Access) -> None:
        for peer in hosts:
            if peer not in team:
                _network(call, comm).put(task, window, peer, token % contexts, messages + at, sent + at, sum(map(len, parts)))
                call.scheduler.split()

    return call.perform(task, (), {"tokens": load, "scales": load, "sent": stage, "staging": store, "net": net})


def ll_net_send_made_row(call: Call, task: Task, comm: int, window: int, sent: int, messages: int, token: int, first: int, end: int, num_topk: int,
                         num_experts: int, num_ranks: int, plane_rows: int, words: int, header_bytes: int, put_bytes: int, message_bytes: int,
                         rank: int, team_size: int, contexts: int, epoch: int) -> int:
    """The same, of a message whose rows stand there already."""
    at, team = token * message_bytes, _team(rank, team_size)
    hosts = _hosts(call, task, token, first, num_topk, num_experts // num_ranks * plane_rows)
    header = _header(call, task, token, first, num_topk, words, header_bytes, epoch)
    made = np.zeros(0, np.uint8)

    def sent_row(access: Access) -> None:
        nonlocal made
        if access.effect.kind == "ld":
            if any(h in team for h in hosts):
                made = access.read(_local(call, task, window, sent + at + header_bytes), put_bytes - header_bytes).copy()
        elif any(h not in team for h in hosts):
            access.write(_local(call, task, window, sent + at), header)

    def store(access: Access) -> None:
        for peer in hosts:
            if peer in team:
                access.write(call.sim.peer_address(task, window, messages + at, peer), np.concatenate([header, made]))
                call.scheduler.split()

    def net(access: Access) -> None:
        for peer in hosts:
            if peer not in team:
                _network(call, comm).put(task, window, peer, token % contexts, messages + at, sent + at, put_bytes)
                call.scheduler.split()

    return call.perform(task, (), {"sent": sent_row, "staging": store, "net": net})


def ll_net_keep_routes(call: Call, task: Task, table: int, token: int, first: int, num_topk: int, num_ranks: int) -> int:
    """A token's rows."""
    rows = _of_token(call, task, token, first, num_topk)
    return call.perform(task, (), {"table": lambda a: a.write(table + 4 * token * num_topk, rows.view(np.uint8))})


def ll_net_signal_members(call: Call, task: Task, comm: int, rank: int, num_ranks: int, team_size: int, context: int, mask: int) -> int:
    """One add to my DATA signal at members."""
    def net(access: Access) -> None:
        for peer in _networked(rank, num_ranks, team_size):
            if not mask >> peer & 1:
                _network(call, comm).signal(task, peer, context, 2 * rank + 1, 1)
                call.scheduler.split()

    return call.perform(task, (), {"net": net})


def _view_at(views: int, num_ranks: int, rounds: int, round: int, epoch: int, source: int) -> int:
    """Window offset of a view."""
    return views + (((epoch & 1) * (rounds + 1) + round) * num_ranks + source) * 8


def ll_net_wait_member_data(call: Call, task: Task, comm: int, window: int, arrived: int, views: int, rank: int, num_ranks: int, team_size: int,
                            contexts: int, mask: int, rounds: int, adds: int, epoch: int, waited: int, timeout: int) -> int:
    """All that members sent."""
    network, sources, team = _network(call, comm), [s for s in _members(num_ranks, mask) if s != rank], _team(rank, team_size)
    counts: list[int] = []
    first: list[Word] = []

    def count(access: Access) -> None:
        if not task.warp:
            counts.extend(_read_adds(access, adds, num_ranks))

    def wait(access: Access) -> int:
        if task.warp:
            return 0
        words = {s: access.word(_local(call, task, window, arrived + 8 * s)) for s in sources if s in team}
        first.extend(access.word(_local(call, task, window, _view_at(views, num_ranks, rounds, 1, epoch, s))) for s in sources)

        def stop() -> bool:
            return any(v >> 32 == epoch and v & LOW not in (0, SAID | mask) for v in (w.peek(task.agent).value for w in first))

        def here(s: int) -> bool:
            if s in team:
                return ahead(words[s].peek(task.agent).value >> 32, epoch) >= 0
            return all(network.seen(rank, c, 2 * s + 1) > counts[s] for c in range(contexts))

        def said(s: int) -> bool:
            if s in team:
                return _sent(words[s], call, task, lambda v: ahead(v >> 32, epoch) >= 0)
            return all(_due(call, task, s, c, 2 * s + 1, counts[s] + 1) for c in range(contexts))

        missing = _wait(call, task, sources, here, said, stop, "DATA", waited)
        for word in words.values():
            access.load(word)
        return mask if stop() else mask | sum(1 << s for s in missing)

    def net(access: Access) -> None:
        if not task.warp and access.effect.order == "acquire" and access.effect.scope == "sys":
            for s in sources:
                if s not in team:
                    for c in range(contexts):
                        network.acquire(task, c, 2 * s + 1)

    given = (comm, window, arrived, views, rank, num_ranks, team_size, contexts, mask, rounds, adds, epoch, waited, timeout)
    return call.perform(task, given, {"adds": count, "arrived": wait, "view": lambda a: _read_all(a, first), "net": net})


# ---- agreement -------------------------------------------------------------------------------------------------------------------
def ll_net_say(call: Call, task: Task, comm: int, window: int, views: int, rank: int, num_ranks: int, team_size: int, silent: int, rounds: int,
               round: int, epoch: int, view: int) -> int:
    """My view to all ranks that need to know."""
    at, team = _view_at(views, num_ranks, rounds, round, epoch, rank), _team(rank, team_size)

    def store(access: Access) -> None:
        for peer in _members(num_ranks, silent):
            if peer in team:
                access.store(call.sim.peer_address(task, window, at, peer), tagged(epoch, SAID | view))
                call.scheduler.split()

    def net(access: Access) -> None:
        for peer in _members(num_ranks, silent):
            if peer not in team:
                _network(call, comm).put_value(task, window, peer, 0, at, tagged(epoch, SAID | view))
                call.scheduler.split()

    return call.perform(task, (), {"view": store, "net": net})


def ll_net_hear(call: Call, task: Task, window: int, views: int, rank: int, num_ranks: int, mask: int, rounds: int, round: int, epoch: int, view: int,
                timeout: int) -> int:
    """Views of all others in a round."""
    sources = [s for s in _members(num_ranks, view) if s != rank]

    def hear(access: Access) -> int:
        if task.warp:
            return 0

        def word(s: int, turn: int) -> Word:
            return access.word(_local(call, task, window, _view_at(views, num_ranks, rounds, turn, epoch, s)))

        words, ends = {s: word(s, round) for s in sources}, {s: word(s, 0) for s in sources}

        def fits(value: int) -> bool:
            return value >> 32 == epoch and bool(value & SAID)

        def decided() -> list[int]:
            return [v & LOW for v in (w.peek(task.agent).value for w in ends.values()) if fits(v)]

        def said(s: int) -> bool:
            return _sent(words[s], call, task, fits) or _sent(ends[s], call, task, fits)

        missing = _wait(call, task, sources, lambda s: fits(words[s].peek(task.agent).value), said, lambda: bool(decided()), "views")
        told = [access.load(words[s]) & LOW for s in sources if s not in missing]
        if decided():
            return decided()[0]
        result = view | sum(1 << s for s in missing)
        for other in told:
            result |= other & ~SAID
        unanimous = not missing and all(other == SAID | view for other in told)
        return result | SAID if unanimous or result >> rank & 1 else result

    def bar(access: Access) -> int:
        return 0

    return call.perform(task, (window, views, rank, num_ranks, mask, rounds, round, epoch, view, timeout), {"view": hear})


def ll_net_conclude_members(call: Call, task: Task, comm: int, window: int, heads: int, arrived: int, rank: int, num_ranks: int, team_size: int,
                            adds: int, made: int, told: int, members: int, masked_at: int, epoch: int, signature: int, mask: int, view: int,
                            left: int, notice: int, fail: int, record: int) -> int:
    """How this attempt ends."""
    network, team, code = _network(call, comm), _team(rank, team_size), 0
    following = (view & FAILED - 1) | mask
    counts: list[int] = []
    sums: list[int] = []
    since: list[int] = []
    events: list[tuple[Code, int]] = []
    arrivals: dict[int, int] = {}
    if following >> rank & 1:
        code, following = Code.EXCLUDED, mask | 1 << rank
    elif left < 0:
        code, following = Code.TIMEOUT, mask
    elif view & DIFFERS:
        code = Code.AGAIN if left else Code.TIMEOUT

    def masked(access: Access) -> None:
        if access.effect.kind == "ld":
            since.extend(_read_adds(access, masked_at, num_ranks))
        else:
            access.write(masked_at, np.array(since, np.int64).view(np.uint8))

    def count_made(access: Access) -> None:
        if access.effect.kind == "ld":
            sums.extend(_read_adds(access, made, num_ranks))
        elif not mask >> rank & 1:
            now = [n + (r != rank and not mask >> r & 1) for r, n in enumerate(sums)]
            access.write(made, np.array(now, np.int64).view(np.uint8))

    def count(access: Access) -> None:
        if access.effect.kind == "ld":
            counts.extend(_read_adds(access, adds, num_ranks))
        elif not mask >> rank & 1:
            now = [n + (not (mask | following) >> r & 1) for r, n in enumerate(counts)]
            access.write(adds, np.array(now, np.int64).view(np.uint8))

    def head(access: Access) -> None:
        nonlocal code
        if code == 0 and view & FAILED:
            sources = _members(num_ranks, mask)
            codes = _verdicts(access, call, task, window, heads, sources, num_ranks, epoch, signature)
            order = sorted((s for s, c in codes.items() if c), key=lambda s: (codes[s] != Code.REFUSED, s != rank, s))
            who = order[0]
            at = _local(call, task, window, _head(heads, num_ranks, who, epoch)) + 8
            code = Code(codes[who])
            call.give_up(task, fail, record, code, epoch, Phase.HEAD, rank, who, who, access.load(access.word(at)) & 0xFFFFFF, epoch)

    def look(access: Access) -> None:
        for r in range(num_ranks):
            if r in team:
                arrivals[r] = access.load(access.word(_local(call, task, window, arrived + 8 * r))) >> 32

    def net(access: Access) -> None:
        for r in range(num_ranks):
            if r == rank:
                continue
            if mask >> r & 1 and not since[r]:   # by mask_update
                since[r] = np.array([tagged(epoch, 0)], np.uint64).view(np.int64)[0]
            last = since[r] >> 32 & LOW if mask >> r & 1 else epoch
            came = arrivals[r] == last if r in team else network.seen(rank, 0, 2 * r + 1) > counts[r]
            if mask >> r & 1 and came and not since[r] & 1:
                since[r] |= 1
                events.append((Code.CAME_LATE, r))
            elif following & ~mask & 1 << r and code in (Code.AGAIN, Code.TIMEOUT):
                since[r] = np.array([tagged(epoch, int(came))], np.uint64).view(np.int64)[0]
                events.append((Code.MASKED, r))

    def store(access: Access) -> None:
        access.write(members, np.array([following], np.uint64).view(np.uint8))

    def tell(access: Access) -> None:
        access.write(told, np.array([following], np.uint64).view(np.uint8))

    call.perform(task, (), {"masked_at": masked, "adds": count, "made": count_made, "head": head,
                            "arrived": look, "net": net, "told": tell, "members": store})
    if code in (0, Code.AGAIN):
        for r in {r for r in range(num_ranks) if following >> r & 1} - call.sim.memory.outcast:
            call.sim.memory.outcast.add(r)
            call.sim.memory.forgive(r)
            network.forgive(r)
    for what in (Code.MASKED, Code.CAME_LATE):
        for peer in [r for c, r in events if c == what][:1]:
            held = call.sim.memory.read(task.agent, notice, 64).view(np.int64)
            if held[0] == 0:
                call.sim.memory.write(task.agent, notice, 64).view(np.int64)[:] = (what, epoch, Phase.HEAD, rank, peer, peer, epoch, epoch)
    if code in (Code.EXCLUDED, Code.TIMEOUT):
        return call.give_up(task, fail, record, Code(code), epoch, Phase.HEAD, rank, rank, rank, epoch, epoch)
    return int(code)


# ---- what the members sent -------------------------------------------------------------------------------------------------------
def ll_net_count_messages(call: Call, task: Task, window: int, messages: int, most: int, num_topk: int, num_experts: int, num_ranks: int,
                          plane_rows: int, message_bytes: int, rank: int, mask: int, epoch: int, expert_counters: int) -> int:
    """Rows of each member for my experts."""
    launch, values, local = task.block.launch, task.block.values, num_experts // num_ranks
    if values.get("counted") != epoch:
        values["counted"], values["got"] = epoch, np.zeros((num_ranks, local), np.int64)

    def count(access: Access) -> None:
        for i in range(task.warp, num_ranks * most, launch.warps):
            if mask >> i // most & 1:
                continue
            header = access.read(_local(call, task, window, messages + i * message_bytes), 8 + 4 * num_topk)
            if int(header[:8].view(np.uint64)[0]) == 1 << 32 | epoch:
                for number in header[8:].view(np.int32).tolist():
                    if number >= 0 and number // plane_rows // local == rank:
                        call.cell(task, "got").write(task, atomic=True)
                        values["got"][i // most, number // plane_rows % local] += 1

    def store(access: Access) -> None:
        if task.block.index == launch.blocks - 1:
            call.cell(task, "got").read(task)
            for e in range(task.warp, local, launch.warps):
                received = min(int(values["got"][:, e].sum()), plane_rows)
                access.write(expert_counters + 4 * e, np.array([received], np.int32).view(np.uint8))

    given = (window, messages, most, num_topk, num_experts, num_ranks, plane_rows, message_bytes, rank, mask, epoch, expert_counters)
    return call.perform(task, given, {"staging": count, "expert_counters": store})


def ll_net_count_member_rows(call: Call, task: Task, window: int, messages: int, slot_ids: int, most: int, num_topk: int, num_ranks: int,
                             plane_rows: int, message_bytes: int, rank: int, mask: int, epoch: int, src_rank_counters: int) -> int:
    """Rows of each member, and -1 in unused ids."""
    launch, values, capacity = task.block.launch, task.block.values, plane_rows // num_ranks
    if task.block.index != launch.blocks - 1:
        return 0
    if values.get("counted") != epoch:
        values["counted"], values["total"] = epoch, np.zeros(num_ranks, np.int64)   # the same memory

    def count(access: Access) -> None:
        for i in range(task.warp, num_ranks * most, launch.warps):
            if mask >> i // most & 1:
                continue
            header = access.read(_local(call, task, window, messages + i * message_bytes), 8 + 4 * num_topk)
            if int(header[:8].view(np.uint64)[0]) == 1 << 32 | epoch:
                call.cell(task, "total").write(task, atomic=True)
                values["total"][i // most] += int((header[8:].view(np.int32) // plane_rows == rank).any())

    def store(access: Access) -> None:
        call.cell(task, "total").read(task)
        for source in range(task.warp, num_ranks, launch.warps):
            access.write(src_rank_counters + 4 * source, np.array([values["total"][source]], np.int32).view(np.uint8))

    def fill(access: Access) -> None:
        for source, rows in enumerate(values["total"].tolist()):   # rows of every source over all warps
            for row in range(rows + (task.warp - rows) % launch.warps, capacity, launch.warps):
                access.write(_local(call, task, window, slot_ids + 4 * num_topk * (source * capacity + row)), np.full(4 * num_topk, 0xFF, np.uint8))

    given = (window, messages, slot_ids, most, num_topk, num_ranks, plane_rows, message_bytes, rank, mask, epoch, src_rank_counters)
    return call.perform(task, given, {"staging": count, "src_rank_counters": store, "slot_ids": fill})


def ll_net_return_member_rows(call: Call, task: Task, comm: int, rows_window: int, slot: int, window: int, returned: int, remote: int, source: int,
                              token: int, most: int, num_topk: int, row_bytes: int, put_bytes: int, returned_bytes: int, rank: int, team_size: int,
                              contexts: int) -> int:
    """A received token's rows back to its source."""
    places: list[int] = []
    near_by = source in _team(rank, team_size)
    held: dict[int, np.ndarray] = {}

    def target(k: int) -> int:
        return returned + rank * returned_bytes + (token * num_topk + k) * row_bytes

    def fetch(access: Access) -> None:
        for k, place in enumerate(places):
            if place >= 0 and near_by:
                held[k] = access.read(_local(call, task, rows_window, slot + place * row_bytes), put_bytes).copy()

    def store(access: Access) -> None:
        for k, row in held.items():
            access.write(call.sim.peer_address(task, window, target(k), source), row)
            call.scheduler.split()

    def net(access: Access) -> None:
        for k, place in enumerate(places):
            if place >= 0 and not near_by:
                _network(call, comm).put(task, window, source, token % contexts, target(k), slot + place * row_bytes, put_bytes,
                                         rows_window)
                call.scheduler.split()

    return call.perform(task, (), {"remote": lambda a: places.extend(_read_rows(a, remote + 4 * source * most * num_topk, token, num_topk)),
                                   "slot": fetch, "staging": store, "net": net})


def _rows_back(call: Call, task: Task, access: Access, window: int, returned: int, returned_bytes: int, rows: list[int], token: int,
               rows_per_rank: int, row_bytes: int, mask: int, size: int) -> dict[int, np.ndarray]:
    """First bytes of what members sent back, by k."""
    return {k: access.read(_local(call, task, window, returned + row // rows_per_rank * returned_bytes + (token * len(rows) + k) * row_bytes),
                           size).copy()
            for k, row in enumerate(rows) if row >= 0 and not mask >> row // rows_per_rank & 1}


def ll_net_gather_member_row(call: Call, task: Task, window: int, returned: int, returned_bytes: int, table: int, weights: int, out: int, token: int,
                             num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, token_type: int, rank: int,
                             mask: int) -> int:
    """A combined row of what members sent back."""
    rows: list[int] = []
    pieces: dict[int, np.ndarray] = {}
    scale = np.ones(num_topk, np.float32)

    def read_weights(access: Access) -> None:
        scale[:] = _read_weights(access, weights, token, num_topk)

    def take(access: Access) -> None:
        pieces.update(_rows_back(call, task, access, window, returned, returned_bytes, rows, token, num_experts // num_ranks * plane_rows, row_bytes,
                                 mask, row_bytes))

    def add(access: Access) -> None:
        total = np.zeros(row_bytes // (4 if token_type == 2 else 2), np.float32)
        for k in sorted(pieces):
            total = fma(unpack(pieces[k], token_type), scale[k], total)
        access.write(out + token * row_bytes, pack(total, token_type))

    return call.perform(task, (), {"table": lambda a: rows.extend(_read_rows(a, table, token, num_topk)), "weights": read_weights, "returned": take,
                                   "out": add})


def ll_net_sum_member_row(call: Call, task: Task, window: int, returned: int, returned_bytes: int, table: int, out: int, token: int, num_topk: int,
                          num_ranks: int, plane_rows: int, row_bytes: int, token_type: int, rank: int, mask: int) -> int:
    """The same of RANK_MAJOR."""
    return ll_net_gather_member_row(call, task, window, returned, returned_bytes, table, 0, out, token, num_topk, num_ranks, num_ranks, plane_rows,
                                    row_bytes, token_type, rank, mask)


def ll_net_sum_packed_member_row(call: Call, task: Task, window: int, returned: int, returned_bytes: int, table: int, weights: int, out: int,
                                 token: int, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, rank: int,
                                 mask: int) -> int:
    """A combined row of packed rows that members sent back."""
    size = row_bytes // 1024 * PACKED_STRETCH
    rows: list[int] = []
    parts: dict[int, np.ndarray] = {}
    w = np.ones(num_topk, np.float32)

    def take(access: Access) -> None:
        parts.update(_rows_back(call, task, access, window, returned, returned_bytes, rows, token, num_experts // num_ranks * plane_rows, row_bytes,
                                mask, size + 4))

    def read_weights(access: Access) -> None:
        if weights:
            w[:] = _read_weights(access, weights, token, num_topk)

    def add(access: Access) -> None:
        total = np.zeros(row_bytes // 2, np.float32)
        for k in sorted(parts):
            q, factors = unpack_nvfp4(parts[k][:size], parts[k][size:].copy().view(np.float32)[0])
            total = fma(q, np.repeat(factors * w[k], 16), total)
        access.write(out + token * row_bytes, pack(total, 0))

    return call.perform(task, (), {"table": lambda a: rows.extend(_read_rows(a, table, token, num_topk)), "returned": take, "weights": read_weights,
                                   "out": add})


# ---- mask_clean ------------------------------------------------------------------------------------------------------------------
def _join_at(joins: int, num_ranks: int, epoch: int, source: int) -> int:
    """Window offset of a rank's words."""
    return joins + ((epoch & 1) * num_ranks + source) * 32


def _is_later_join(value: int, epoch: int) -> bool:
    """Not fresh memory, and of a call after this one."""
    return bool(value & 1) and ahead(value >> 32, epoch) > 0


def ll_net_clean_epoch(call: Call, task: Task, window: int, joins: int, rank: int, num_ranks: int, epoch: int) -> int:
    """The latest call that anybody came to."""
    def look(access: Access) -> int:
        if task.warp:
            return 0
        found = epoch
        for i in range(2 * num_ranks):
            value = access.load(access.word(_local(call, task, window, joins + 32 * i)))
            if _is_later_join(value, found):
                found = value >> 32
        return found

    return call.perform(task, (window, joins, rank, num_ranks, epoch), {"join": look})


def ll_net_is_told(call: Call, task: Task, window: int, views: int, rank: int, num_ranks: int, rounds: int, own: int, mask: int) -> int:
    """Whether I am out."""
    def look(access: Access) -> int:
        if task.warp:
            return 0
        words = [access.load(access.word(_local(call, task, window, views + 8 * i))) for i in range(2 * (rounds + 1) * num_ranks)
                 if i % num_ranks != rank]
        return int(mask >> rank & 1 or any(v & SAID and ahead(v >> 32, own) >= 0 and v >> rank & 1 for v in words))

    return call.perform(task, (window, views, rank, num_ranks, rounds, own, mask), {"view": look})


def ll_net_send_join(call: Call, task: Task, comm: int, window: int, joins: int, rank: int, num_ranks: int, team_size: int, made: int, epoch: int,
                     own: int, stranded: int) -> int:
    """My three words to all."""
    at, team = _join_at(joins, num_ranks, epoch, rank), _team(rank, team_size)
    counts: list[int] = []

    def words(peer: int) -> list[int]:
        return [tagged(epoch, 1 | stranded << 1), tagged(epoch, own), tagged(epoch, counts[peer] & LOW)]

    def store(access: Access) -> None:
        for peer in team:
            for i, word in enumerate(words(peer)):
                access.store(call.sim.peer_address(task, window, at + 8 * i, peer), word)
            call.scheduler.split()

    def net(access: Access) -> None:
        for peer in _networked(rank, num_ranks, team_size):
            for i, word in enumerate(words(peer)):
                _network(call, comm).put_value(task, window, peer, 0, at + 8 * i, word)
            call.scheduler.split()

    return call.perform(task, (), {"made": lambda a: counts.extend(_read_adds(a, made, num_ranks)), "join": store, "net": net})


def ll_net_wait_joins(call: Call, task: Task, comm: int, window: int, joins: int, views: int, rank: int, num_ranks: int, team_size: int,
                      contexts: int, rounds: int, epoch: int, timeout: int) -> int:
    """All ranks' words, and all they ever put."""
    network, sources, team = _network(call, comm), [s for s in range(num_ranks) if s != rank], _team(rank, team_size)
    first: list[Word] = []
    signals = [(c, half) for c in range(contexts) for half in (0, 1) if half or c == 0]

    def join(access: Access) -> int:
        if task.warp:
            return 0

        def word(s: int, i: int, turn: int = 0) -> Word:
            return access.word(_local(call, task, window, _join_at(joins, num_ranks, epoch + turn, s) + 8 * i))

        words = {s: [word(s, i) for i in range(3)] for s in sources}
        later = {s: word(s, 0, 1) for s in sources}
        first.extend(access.word(_local(call, task, window, _view_at(views, num_ranks, rounds, 1, epoch, s))) for s in sources)
        came: set[int] = set()
        done: set[int] = set()
        further = False

        def fits(value: int) -> bool:
            return value >> 32 == epoch

        def here(s: int) -> bool:
            nonlocal further
            if s in done:
                return True
            values = [w.peek(task.agent).value for w in words[s]]
            further = further or _is_later_join(values[0], epoch) or _is_later_join(later[s].peek(task.agent).value, epoch)
            if values[0] & 1 and fits(values[0]):
                came.add(s)
            if not (values[0] & 1 and all(map(fits, values))):
                return False
            if s in team or all(network.seen(rank, c, 2 * s + half) >= values[2] & LOW for c, half in signals):
                done.add(s)
            return s in done

        def said(s: int) -> bool:
            def issued(value: int) -> bool:
                return fits(value) and (s in team or all(_due(call, task, s, c, 2 * s + half, value & LOW) for c, half in signals))

            return all(_sent(w, call, task, fits) for w in words[s][:2]) and _sent(words[s][2], call, task, issued)

        def out() -> bool:
            return any(v >> 32 == epoch and v & SAID and v >> rank & 1 for v in (w.peek(task.agent).value for w in first))

        missing = _wait(call, task, sources, here, said, lambda: out() or further, "mask_clean")
        for s in sources:
            for w in (*words[s], later[s]):
                access.load(w)
        if out() or (missing and further and came):
            return 1 << rank
        return FAILED if missing and further else sum(1 << s for s in missing)

    def net(access: Access) -> None:
        if not task.warp and access.effect.order == "acquire" and access.effect.scope == "sys":
            for s in sources:
                if s not in team:
                    for c, half in signals:
                        network.acquire(task, c, 2 * s + half)

    given = (comm, window, joins, views, rank, num_ranks, team_size, contexts, rounds, epoch, timeout)
    return call.perform(task, given, {"join": join, "view": lambda a: _read_all(a, first), "net": net})


def ll_net_all_stranded(call: Call, task: Task, window: int, joins: int, rank: int, num_ranks: int, epoch: int, view: int) -> int:
    """Whether none of those that went on is a member."""
    def look(access: Access) -> int:
        return int(all(access.load(access.word(_local(call, task, window, _join_at(joins, num_ranks, epoch, s)))) & 2
                       for s in _members(num_ranks, view)))

    return call.perform(task, (), {"join": look})


def ll_net_signal_clean(call: Call, task: Task, comm: int, rank: int, num_ranks: int, team_size: int, contexts: int) -> int:
    """One add to all my signals."""
    def net(access: Access) -> None:
        for peer in _networked(rank, num_ranks, team_size):
            _network(call, comm).signal(task, peer, 0, 2 * rank, 1)
            for c in range(contexts):
                _network(call, comm).signal(task, peer, c, 2 * rank + 1, 1)
            call.scheduler.split()

    return call.perform(task, (), {"net": net})


def ll_net_readmit(call: Call, task: Task, comm: int, window: int, joins: int, rank: int, num_ranks: int, team_size: int, epoch: int, code: int,
                   view: int, adds: int, made: int, told: int, members: int, masked_at: int, word: int, header: int, num_slots: int,
                   own: int) -> int:
    """Who is a member, what is awaited of each, and where all go on."""
    network, team = _network(call, comm), _team(rank, team_size)
    held: dict[str, list[int]] = {}
    theirs: dict[int, int] = {}
    so_far: dict[int, int] = {}
    addresses = {"adds": adds, "made": made, "masked_at": masked_at}

    def words(access: Access) -> None:
        noun = access.effect.noun
        if access.effect.kind == "ld":
            held[noun] = _read_adds(access, addresses[noun], num_ranks)
        elif noun == "made":
            access.write(made, np.array([n + (r != rank) for r, n in enumerate(held[noun])], np.int64).view(np.uint8))
        elif not code:
            access.write(addresses[noun], np.array(held[noun], np.int64).view(np.uint8))

    def join(access: Access) -> None:
        for s in _members(num_ranks, view):
            at = _local(call, task, window, _join_at(joins, num_ranks, epoch, s))
            theirs[s], so_far[s] = (access.load(access.word(at + 8 * i)) & LOW for i in (1, 2))

    def net(access: Access) -> None:
        for r in range(num_ranks):
            now = network.seen(rank, 0, 2 * r + 1) if r not in team else 0
            if r not in team:
                held["adds"][r] = now + _signed(so_far[r] - now) + 1 if r in so_far else max(now, held["adds"][r])
            if r in so_far:
                held["masked_at"][r] = 0
            elif r != rank and held["masked_at"][r] == 0:
                held["masked_at"][r] = int(np.array([tagged(own, 0)], np.uint64).view(np.int64)[0])

    def member(access: Access) -> None:
        if access.effect.kind == "ld":
            held["members"] = access.read(members, 8).view(np.int64).tolist()
        else:
            access.write(members, np.array([held["members"][0] | 1 << rank if code else view], np.uint64).view(np.uint8))

    def store(access: Access) -> None:
        if code:
            return
        following = own
        for other in theirs.values():
            following = other if ahead(other, following) > 0 else following
        places = {"told": (told, [view]), "epoch": (word, [(following + 1) & LOW]), "header": (header, [0] * (2 * num_slots))}
        where, data = places[access.effect.noun]
        access.write(where, np.array(data, np.uint64).view(np.uint8))

    call.perform(task, (), {"adds": words, "made": words, "masked_at": words, "members": member, "join": join, "net": net, "told": store,
                            "epoch": store, "header": store})
    if not code:
        call.sim.memory.outcast -= set(_members(num_ranks, view))
        for r in {r for r in range(num_ranks) if view >> r & 1} - call.sim.memory.outcast:
            call.sim.memory.outcast.add(r)
            call.sim.memory.forgive(r)
            network.forgive(r)
    return code


def _signed(value: int) -> int:
    """Of 32 bits."""
    return (value + (1 << 31) & LOW) - (1 << 31)
