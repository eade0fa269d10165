"""Operations of groups with ``enable_mask`` on the CPU: join, votes, and what follows. See ``ops``, ``kernels/mask_ops.cu``, ``member_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ncclep_py.errors import Code, Phase, Status
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.votes import COMMITS, FAILS, LOCKED, MASK_BITS, WRITES, _cas, _locked, _resolve, _state, _vote, _wait
from ncclep_py.simulator.waits import LOW, ahead, tagged
from ncclep_py.simulator.words import Word

__all__ = ["await_outcome", "conclude", "publish_join", "publish_late", "read_mask", "settle", "sum_member_counts", "tell_outcome", "wait_joins",
           "wait_member_counts"]


def read_mask(call: Call, task: Task, members: int) -> int:
    """Mask of this attempt."""
    return call.perform(task, (members,), {"members": lambda a: int(a.read(members, 8).view(np.uint64)[0]) & LOW})


def _bank(epoch: int, num_ranks: int, source: int) -> int:
    return (epoch & 1) * num_ranks + source


def publish_join(call: Call, task: Task, window: int, joins: int, details: int, rank: int, num_ranks: int, epoch: int, signature: int, mask: int,
                 extra: int, status: int) -> int:
    """JOIN and its details to all ranks."""
    at = _bank(epoch, num_ranks, rank)

    def detail(access: Access) -> None:
        for peer in range(num_ranks):
            for i, value in enumerate((signature, mask, extra)):
                access.store(call.sim.peer_address(task, window, details + 32 * at + 8 * i, peer), value)
            call.scheduler.split()

    def join(access: Access) -> None:
        call.sim.entered(window, rank, epoch, signature, status == 0, mask)
        for peer in range(num_ranks):
            access.store(call.sim.peer_address(task, window, joins + 8 * at, peer), tagged(epoch, status))
            call.scheduler.split()

    return call.perform(task, (window, joins, details, rank, num_ranks, epoch, signature, mask, extra, status), {"detail": detail, "join": join})


def wait_joins(call: Call, task: Task, window: int, joins: int, details: int, votes: int, rank: int, num_ranks: int, epoch: int, signature: int,
               mask: int, commits: int, waited: int, wrote: int, fail: int, record: int, timeout: int) -> int:
    """Wait for JOIN of all members, then vote."""
    def at(offset: int) -> int:
        return call.sim.peer_address(task, window, offset, rank)

    members = [r for r in range(num_ranks) if not mask >> r & 1]
    stop, proposal, code = False, mask, 0

    def join(access: Access) -> None:
        nonlocal stop, proposal
        if task.warp == 0 and rank in members:
            words = [(r, access.word(at(joins + 8 * _bank(epoch, num_ranks, r)))) for r in members]
            stop, missing = _wait(call, task, access, words, access.word(at(votes)), epoch, "JOIN", waited if task.block.index == 0 else 0)
            proposal |= missing

    def vote(access: Access) -> int | None:
        nonlocal stop, proposal, code
        if task.warp:
            return None
        if rank not in members:
            return call.give_up(task, fail, record, Code.EXCLUDED, epoch, Phase.HEAD, rank, rank, rank, epoch, epoch)
        low = 0
        if not stop:
            views = 0
            refused, other = [], []
            for r in members:
                spot = at(details + 32 * _bank(epoch, num_ranks, r))
                theirs, view = access.load(access.word(spot)), access.load(access.word(spot + 8))
                word = access.word(at(joins + 8 * _bank(epoch, num_ranks, r))).peek(task.agent).value
                views |= view
                if word >> 24 & 0xFF == Status.REFUSED:
                    refused.append((r, word & 0xFFFF))
                if theirs != signature:
                    other.append((r, theirs))
            stop = views != mask
            proposal |= views
            who, seen = (refused or other or [(0, 0)])[0]
            if not stop and (refused or other):
                code = Code.REFUSED if refused else Code.MISMATCH
                low = code | who << 8 | (seen << 13 if refused else 0)
            want = _vote(epoch, FAILS, low) if code else _vote(epoch, COMMITS, mask) if commits else _vote(epoch, WRITES, 0)
            stop = stop or not _cast(call, task, access.word(at(votes)), epoch, want, wrote)
            if not stop and code:
                call.give_up(task, fail, record, Code(code), epoch, Phase.HEAD, rank, who, who, seen, signature if code == Code.MISMATCH else epoch)
        if stop:
            code = _resolve(call, task, window, votes, rank, num_ranks, epoch, proposal, Phase.HEAD, fail, record)
        return code

    return call.perform(
        task, (window, joins, details, votes, rank, num_ranks, epoch, signature, mask, commits, waited, wrote, fail, record, timeout),
        {"join": join, "detail": vote})


def _cast(call: Call, task: Task, word: Word, epoch: int, want: int, wrote: int) -> bool:
    """Set my rank's vote, unless another of its blocks did; False if it is locked."""
    old = word.peek(task.agent).value
    while not (ahead(old >> 32, epoch) == 0 and _state(old) < LOCKED):
        if _locked(old, epoch):
            return False
        found = _cas(call, task, word, old, want)
        if found == old:
            call.sim.memory.write(task.agent, wrote, 8).view(np.uint64)[0] = want
            return True
        old = found
    return True


def _count_members(call: Call, task: Task, access: Access, window: int, votes: int, words: Sequence[tuple[int, int, int]], into: str, epoch: int,
                   rank: int) -> int:
    """Wait for my share of (address, source, index) words and add each to `into`[index] in shared memory; 1 if this attempt ended."""
    vote = access.word(call.sim.peer_address(task, window, votes, rank))
    for address, source, index in words[task.warp::task.block.launch.warps]:
        word = access.word(address)
        stop, _ = _wait(call, task, access, [(source, word)], vote, epoch, "COUNTS", 0)
        if stop:
            return 1
        call.cell(task, into).write(task, atomic=True)
        task.block.values[into][index] += word.peek(task.agent).value & LOW
    return 0


def _resolve_block(call: Call, task: Task, gone: int, window: int, votes: int, rank: int, num_ranks: int, epoch: int, mask: int, fail: int,
                   record: int) -> int:
    """After a vote of the block on whether any warp gave up: its code."""
    code = 0
    if gone and task.warp == 0:
        code = _resolve(call, task, window, votes, rank, num_ranks, epoch, mask, Phase.COUNTS, fail, record)
    return call.scheduler.meet(task, code, join=True)


def wait_member_counts(call: Call, task: Task, window: int, counts: int, votes: int, rank: int, num_ranks: int, num_experts: int, epoch: int,
                       mask: int, fail: int, record: int, timeout: int) -> int:
    """Add the lower members' counts."""
    at = call.sim.peer_address(task, window, counts, rank)
    words = [(at + 8 * i, i // num_experts, i % num_experts) for i in range(rank * num_experts) if not mask >> (i // num_experts) & 1]
    gone = call.perform(task, (window, counts, votes, rank, num_ranks, num_experts, epoch, mask, fail, record, timeout), {
        "count": lambda a: _count_members(call, task, a, window, votes, words, "start", epoch, rank)})
    return _resolve_block(call, task, gone, window, votes, rank, num_ranks, epoch, mask, fail, record)


def sum_member_counts(call: Call, task: Task, window: int, counts: int, votes: int, rank: int, num_ranks: int, num_experts: int, epoch: int,
                      mask: int, plane_rows: int, expert_counters: int, fail: int, record: int, timeout: int) -> int:
    """Rows received per local expert."""
    local = num_experts // num_ranks
    at = call.sim.peer_address(task, window, counts + rank * local * 8, rank)
    words = [(at + 8 * (source * num_experts + e), source, e) for source in range(num_ranks) if not mask >> source & 1 for e in range(local)]
    values = task.block.values
    values.setdefault("sum", np.zeros(local, np.int64))

    def store(access: Access) -> None:
        call.cell(task, "sum").read(task)
        for e in range(task.warp, local, task.block.launch.warps):
            access.write(expert_counters + 4 * e, np.array([min(int(values["sum"][e]), plane_rows)], np.int32).view(np.uint8))

    gone = call.perform(
        task, (window, counts, votes, rank, num_ranks, num_experts, epoch, mask, plane_rows, expert_counters, fail, record, timeout),
        {"count": lambda a: _count_members(call, task, a, window, votes, words, "sum", epoch, rank), "expert_counters": store})
    return _resolve_block(call, task, gone, window, votes, rank, num_ranks, epoch, mask, fail, record)


# ---- the end of an attempt -----------------------------------------------------------------------------------------------------------
def settle(call: Call, task: Task, window: int, arrived: int, votes: int, rank: int, num_ranks: int, epoch: int, mask: int, waited: int, fail: int,
           record: int, timeout: int) -> int:
    """Wait for ARRIVED of all members, then commit."""
    at = call.sim.peer_address(task, window, arrived, rank)
    mine = call.sim.words.word(task.agent, call.sim.peer_address(task, window, votes, rank))
    stop = False

    def wait(access: Access) -> None:
        nonlocal stop
        if task.warp == 0:
            words = [(r, access.word(at + 8 * r)) for r in range(num_ranks) if not mask >> r & 1]
            stop, _ = _wait(call, task, access, words, mine, epoch, "ARRIVED", waited)

    def commit(access: Access) -> int:
        if task.warp:
            return 0
        expected = _vote(epoch, WRITES, 0)
        if stop or _cas(call, task, mine, expected, _vote(epoch, COMMITS, mask)) != expected:
            return _resolve(call, task, window, votes, rank, num_ranks, epoch, mask, Phase.ARRIVED, fail, record)
        return 0

    return call.perform(task, (window, arrived, votes, rank, num_ranks, epoch, mask, waited, fail, record, timeout),
                        {"arrived": wait, "bar": commit})


def publish_late(call: Call, task: Task, window: int, arrived: int, rank: int, num_ranks: int, epoch: int, wrote: int) -> int:
    """ARRIVED with status LATE to all ranks, if this rank began to write."""
    last = 0

    def look(access: Access) -> None:
        nonlocal last
        last = int(access.read(wrote, 8).view(np.uint64)[0])

    def tell(access: Access) -> None:
        for peer in range(num_ranks) if last == _vote(epoch, WRITES, 0) else ():
            access.store(call.sim.peer_address(task, window, arrived + 8 * rank, peer), tagged(epoch, Status.LATE << 24))
            call.scheduler.split()

    return call.perform(task, (window, arrived, rank, num_ranks, epoch, wrote), {"wrote": look, "arrived": tell})


def conclude(call: Call, task: Task, window: int, joins: int, arrived: int, votes: int, rank: int, num_ranks: int, members: int, masked_at: int,
             epoch: int, mask: int, code: int, left: int, notice: int, fail: int, record: int) -> int:
    """Mask of the next attempt, and the async error."""
    if code == 0:   # what I pulled may be overwritten if they went on without me meanwhile
        vote = call.sim.words.word(task.agent, call.sim.peer_address(task, window, votes, rank))
        if ahead(_cas(call, task, vote, None, 0) >> 32, epoch) > 0:
            code = call.give_up(task, fail, record, Code.EXCLUDED, epoch, Phase.ROWS, rank, rank, rank, 0, epoch)
    following, events = mask, []
    old = [r for r in range(num_ranks) if mask >> r & 1 and r != rank]
    told: dict[int, int] = {}
    effects: dict[int, int] = {}

    def verdict(access: Access) -> None:
        nonlocal following
        if code == Code.AGAIN:
            following = access.load(access.word(call.sim.peer_address(task, window, votes + 8, 0))) & MASK_BITS

    def look(access: Access) -> None:
        if not told:
            told.update({r: int(access.read(masked_at + 8 * r, 8).view(np.uint64)[0]) for r in old})

    def masked(access: Access) -> None:
        if access.effect.kind == "ld":
            look(access)
            return
        for r in range(num_ranks):
            if following & ~mask & (1 << r) and r != rank:
                events.append((Code.MASKED, r))
                effects[r] = tagged(epoch, 0)
        for r, value in effects.items():
            access.write(masked_at + 8 * r, np.array([value], np.uint64).view(np.uint8))

    def watch(access: Access, offset: Callable[[int, int], int], late: Callable[[int, int], bool], bit: int, what: Code) -> None:
        for r in old:
            if not told[r] & bit:
                since = told[r] >> 32
                if late(access.load(access.word(call.sim.peer_address(task, window, offset(r, since), rank))), since):
                    events.append((what, r))
                    told[r] = effects[r] = told[r] | bit

    def store(access: Access) -> None:
        value = following | (1 << rank if code == Code.EXCLUDED else 0)
        access.write(members, np.array([value], np.uint64).view(np.uint8))

    call.perform(task, (), {
        "vote": verdict, "masked_at": masked, "members": store,
        "join": lambda a: watch(a, lambda r, since: joins + 8 * _bank(since, num_ranks, r),
                                lambda w, since: ahead(w >> 32, since) == 0, 1, Code.CAME_LATE),
        "arrived": lambda a: watch(a, lambda r, since: arrived + 8 * r,
                                   lambda w, since: w >> 24 & 0xFF == Status.LATE and ahead(w >> 32, since) >= -1, 2, Code.WROTE_LATE)})
    for what in (Code.WROTE_LATE, Code.MASKED, Code.CAME_LATE):
        for peer in [r for c, r in events if c == what][:1]:
            held = call.sim.memory.read(task.agent, notice, 64).view(np.int64)
            if held[0] == 0 or (what == Code.WROTE_LATE and held[0] != what):
                phase = Phase.ROWS if what == Code.WROTE_LATE else Phase.HEAD
                call.sim.memory.write(task.agent, notice, 64).view(np.int64)[:] = (what, epoch, phase, rank, peer, peer, epoch, epoch)
    if code == Code.AGAIN and left == 0:
        return call.give_up(task, fail, record, Code.TIMEOUT, epoch, Phase.HEAD, rank, rank, rank, epoch, epoch)
    return code


def tell_outcome(call: Call, task: Task, outcome: int, epoch: int, result: int) -> int:
    """How this attempt ended, to the other blocks."""
    return call.perform(task, (outcome, epoch, result), {"outcome": lambda a: a.store(outcome, tagged(epoch, result))})


def await_outcome(call: Call, task: Task, outcome: int, epoch: int, timeout: int) -> int:
    """What the last block told; the block's shared memory is new afterwards."""
    def wait(access: Access) -> int:
        if task.warp:
            return 0
        word = access.word(outcome)

        def here() -> bool:
            return ahead(word.peek(task.agent).value >> 32, epoch) == 0

        while not here() and not task.late:
            access.scheduler.wait(task, here, lambda: (f"waits in epoch {epoch} for the outcome of its own last block", []))
        late, task.late = task.late, False
        value = access.load(word)
        return Code.TIMEOUT if late and ahead(value >> 32, epoch) else value & LOW

    code = call.perform(task, (outcome, epoch, timeout), {"outcome": wait})
    values = task.block.values
    if values.get("ended") != epoch:   # the first warp after the barrier
        values.clear()
        values["ended"] = epoch
    return code
