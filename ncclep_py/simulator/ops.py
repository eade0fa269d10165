"""The vocabulary of ``kernels.ops`` on the CPU. A function per operation says what its accesses mean; the effect table
says in which order they come and how strong they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from greenlet import getcurrent

from ncclep_py.errors import SPREADS, Code, Phase, Status
from ncclep_py.kernels.ops import OPS, Vocabulary
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.share import Share
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, Verdict, tagged, wait_count, wait_words

if TYPE_CHECKING:
    from ncclep_py.simulator.engine import Simulator

__all__ = ["vocabulary"]

Implementation = Callable[..., int]


def vocabulary(sim: Simulator, overrides: Mapping[str, Sequence[str]]) -> Vocabulary:
    """All operations over one simulator; `overrides` replaces the effects of some."""
    unknown = sorted(overrides.keys() - OPS.keys())
    if unknown:
        raise ValueError(f"effects for unknown operations: {unknown}")
    return Vocabulary({name: _operation(sim, name, overrides.get(name, op.effects)) for name, op in OPS.items()})


def _operation(sim: Simulator, name: str, effects: Sequence[str]) -> Callable[..., int]:
    """The function a kernel calls."""
    op = OPS[name]
    call = Call(sim, name, effects, op.scope, op.scope == "block" and "bar.sync" in op.effects)
    implementation: Implementation = globals()["_" + name]
    arity = len(op.parameters)

    def operation(*args: int) -> int:
        task = getcurrent()
        if len(args) != arity:
            raise TypeError(f"{name} takes {arity} arguments {op.parameters}, got {len(args)}")
        frame = sys._getframe(1)
        task.site = (name, frame.f_code.co_filename, frame.f_lineno, task.block.launch.label)
        if sim.events is None:
            return implementation(call, task, *args)
        begin = sim.scheduler.step
        try:
            return implementation(call, task, *args)
        finally:
            if op.effects:
                sim.events.append((task.rank, task.block.index, task.warp, name, task.block.launch.label, begin, sim.scheduler.step))

    operation.__name__, operation.__doc__ = name, op.doc
    return operation


# ---- who and where -----------------------------------------------------------------------------------------------------------
def _block_idx(call: Call, task: Task) -> int:
    return task.block.index


def _warp_idx(call: Call, task: Task) -> int:
    return task.warp


def _first_token(call: Call, task: Task, num_tokens: int) -> int:
    return Share.of(task, num_tokens).first


def _end_token(call: Call, task: Task, num_tokens: int) -> int:
    return Share.of(task, num_tokens).end


def _token_part(call: Call, task: Task, num_tokens: int) -> int:
    return Share.of(task, num_tokens).part


def _warp_token(call: Call, task: Task, num_tokens: int) -> int:
    return Share.of(task, num_tokens).token


def _token_step(call: Call, task: Task, num_tokens: int) -> int:
    return Share.of(task, num_tokens).step


def _begin_vector(call: Call, task: Task, num_tokens: int, row_bytes: int) -> int:
    return Share.of(task, num_tokens).vector(row_bytes, 0)


def _end_vector(call: Call, task: Task, num_tokens: int, row_bytes: int) -> int:
    return Share.of(task, num_tokens).vector(row_bytes, 1)


# ---- epoch and life of an operation ----------------------------------------------------------------------------------------------
def _read_epoch(call: Call, task: Task, word: int) -> int:
    return call.perform(task, (word,), {"epoch": lambda a: int(a.read(word, 8).view(np.uint64)[0]) & LOW})


def _advance_epoch(call: Call, task: Task, word: int, epoch: int) -> int:
    def advance(access: Access) -> None:
        access.write(word, np.array([(epoch + 1) & LOW], np.uint64).view(np.uint8))

    return call.perform(task, (word, epoch), {"epoch": advance})


def _store_header(call: Call, task: Task, header: int, epoch: int, handle: int) -> int:
    def store(access: Access) -> None:
        access.write(header, np.array([epoch, handle], np.int64).view(np.uint8))

    return call.perform(task, (header, epoch, handle), {"header": store})


def _check_header(call: Call, task: Task, header: int, handle: int, rank: int, epoch: int, fail: int, record: int) -> int:
    def check(access: Access) -> int:
        held = int(access.read(header, 16).view(np.int64)[1])
        if held != handle and task.warp == 0:
            call.give_up(task, fail, record, Code.STALE_SLOT, epoch, Phase.SLOT, rank, rank, rank, held, handle)
        return int(held != handle)

    return call.perform(task, (header, handle, rank, epoch, fail, record), {"header": check})


def _last_block(call: Call, task: Task, counter: int) -> int:
    last = task.block.launch.blocks - 1

    def count(access: Access) -> int:
        if task.warp:
            return 0
        before = access.word(counter).stores[-1].value
        access.swap(counter, 0 if before >= last else before + 1)
        return int(before == last)

    return call.perform(task, (counter,), {"blocks_done": count})


def _op_code(call: Call, task: Task, fail: int, epoch: int) -> int:
    def read(access: Access) -> int:
        value = access.load(access.word(fail))
        return value & 0xFF if value >> 32 == epoch else 0

    return call.perform(task, (fail, epoch), {"fail": read})


# ---- head --------------------------------------------------------------------------------------------------------------------------
def _head(heads: int, num_ranks: int, source: int, epoch: int) -> int:
    """Window offset of a HEAD entry."""
    return heads + ((epoch & 1) * num_ranks + source) * 16


def _to_all(call: Call, task: Task, access: Access, window: int, offset: int, num_ranks: int, value: int) -> None:
    """Store a word at the same offset of every rank's window."""
    for peer in range(num_ranks):
        access.store(call.sim.peer_address(task, window, offset, peer), value)
        call.scheduler.split()


def _publish_head(call: Call, task: Task, window: int, heads: int, rank: int, num_ranks: int, epoch: int, signature: int, status: int) -> int:
    at = _head(heads, num_ranks, rank, epoch)

    def head(access: Access) -> None:
        call.sim.entered(window, rank, epoch, signature, status == 0)
        _to_all(call, task, access, window, at + 8, num_ranks, tagged(epoch, status))

    return call.perform(task, (window, heads, rank, num_ranks, epoch, signature, status), {
        "signature": lambda a: _to_all(call, task, a, window, at, num_ranks, signature), "head": head})


def _wait_heads(call: Call, task: Task, window: int, heads: int, rank: int, num_ranks: int, epoch: int, signature: int, fail: int, record: int,
                timeout: int) -> int:
    at = call.sim.peer_address(task, window, _head(heads, num_ranks, 0, epoch), rank)
    verdict = Verdict()

    def refuse(expected: int) -> int:
        v = verdict
        return call.give_up(task, fail, record, Code(v.code), epoch, Phase.HEAD, rank, v.peer, v.culprit, v.seen, expected) if v.code else 0

    def head(access: Access) -> int:
        nonlocal verdict
        if task.warp == 0:
            verdict = wait_words(task, access, [access.word(at + 16 * s + 8) for s in range(num_ranks)], epoch, "HEAD")
        return refuse(epoch)

    def compare(access: Access) -> int | None:
        nonlocal verdict
        if task.warp or verdict.code:
            return None
        for source in range(num_ranks):
            theirs = access.load(access.word(at + 16 * source))
            if theirs != signature:
                verdict = Verdict(Code.MISMATCH, source, source, theirs)
                break
        return refuse(signature)

    return call.perform(task, (window, heads, rank, num_ranks, epoch, signature, fail, record, timeout), {"head": head, "signature": compare})


def _publish_abort(call: Call, task: Task, window: int, heads: int, arrived: int, rank: int, num_ranks: int, epoch: int, fail: int) -> int:
    word = 0

    def read(access: Access) -> None:
        nonlocal word
        value = access.load(access.word(fail))
        if value & 0xFF in SPREADS:
            word = tagged(epoch, Status.ABORT << 24 | (value >> 8 & 0xFFFFFF))

    def tell(access: Access, offset: int) -> None:
        if word:
            _to_all(call, task, access, window, offset, num_ranks, word)

    return call.perform(task, (window, heads, arrived, rank, num_ranks, epoch, fail), {
        "fail": read, "head": lambda a: tell(a, _head(heads, num_ranks, rank, epoch) + 8), "arrived": lambda a: tell(a, arrived + 8 * rank)})


# ---- counts: thread i of a block takes item i; here warp i modulo the number of warps -------------------------------------------------
def _ids(access: Access, topk_idx: int, idx_bytes: int, first: int, end: int, num_experts: int) -> np.ndarray:
    """Expert ids of pairs [first, end), -1 for those outside [0, num_experts)."""
    ids = access.read(topk_idx + first * idx_bytes, (end - first) * idx_bytes).view(np.int64 if idx_bytes == 8 else np.int32)
    return np.where((ids >= 0) & (ids < num_experts), ids, -1)


def _count_experts(call: Call, task: Task, topk_idx: int, idx_bytes: int, num_tokens: int, num_topk: int, num_experts: int, first: int,
                   end: int) -> int:
    values, warps = task.block.values, task.block.launch.warps
    if "total" not in values:
        values["total"], values["start"] = np.zeros(num_experts, np.int64), np.zeros(num_experts, np.int64)

    def count(access: Access) -> None:
        ids = _ids(access, topk_idx, idx_bytes, 0, num_tokens * num_topk, num_experts)
        pairs = np.arange(len(ids))
        mine = (pairs % warps == task.warp) & (ids >= 0)
        for name, chosen in (("total", mine), ("start", mine & (pairs < first * num_topk))):
            call.cell(task, name).write(task, atomic=True)
            values[name] += np.bincount(ids[chosen], minlength=num_experts)

    return call.perform(task, (topk_idx, idx_bytes, num_tokens, num_topk, num_experts, first, end), {"topk_idx": count})


def _publish_counts(call: Call, task: Task, window: int, counts: int, rank: int, num_ranks: int, num_experts: int, epoch: int) -> int:
    launch = task.block.launch

    def publish(access: Access) -> None:
        call.cell(task, "total").read(task)
        total = task.block.values["total"].tolist()
        for peer in range(task.block.index, num_ranks, launch.blocks):
            at = call.sim.peer_address(task, window, counts + rank * num_experts * 8, peer)
            for e in range(task.warp, num_experts, launch.warps):
                access.store(at + 8 * e, tagged(epoch, total[e]))
            call.scheduler.split()

    return call.perform(task, (window, counts, rank, num_ranks, num_experts, epoch), {"count": publish})


def _add_counts(call: Call, task: Task, access: Access, words: Sequence[tuple[int, int, int]], into: str, epoch: int, rank: int, fail: int,
                record: int) -> int:
    """Wait for my share of (address, source, index) words and add each to `into`[index] in shared memory."""
    for address, source, index in words[task.warp::task.block.launch.warps]:
        code, value = wait_count(task, access, access.word(address), epoch, source)
        if code:
            return call.give_up(task, fail, record, Code(code), epoch, Phase.COUNTS, rank, source, source, value >> 32, epoch)
        call.cell(task, into).write(task, atomic=True)
        task.block.values[into][index] += value & LOW
    return 0


def _wait_counts(call: Call, task: Task, window: int, counts: int, rank: int, num_ranks: int, num_experts: int, epoch: int, fail: int, record: int,
                 timeout: int) -> int:
    at = call.sim.peer_address(task, window, counts, rank)
    words = [(at + 8 * i, i // num_experts, i % num_experts) for i in range(rank * num_experts)]
    return call.perform(task, (window, counts, rank, num_ranks, num_experts, epoch, fail, record, timeout), {
        "count": lambda a: _add_counts(call, task, a, words, "start", epoch, rank, fail, record)})


def _assign_rows(call: Call, task: Task, topk_idx: int, idx_bytes: int, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, first: int,
                 end: int, part: int, table: int, rank: int, epoch: int, fail: int, record: int) -> int:
    values = task.block.values

    def assign(access: Access) -> None:
        if task.warp:
            return
        for name in ("start", "rows"):
            call.cell(task, name).write(task)
        start = values["start"]
        rows = values["rows"] = np.full((end - first) * num_topk, -1, np.int32)
        for i, e in enumerate(_ids(access, topk_idx, idx_bytes, first * num_topk, end * num_topk, num_experts).tolist()):
            if e < 0:
                continue
            row, owner = int(start[e]), e // (num_experts // num_ranks)
            start[e] += 1
            if row < plane_rows:
                rows[i] = e * plane_rows + row
            else:
                call.note(task, fail, record, Code.OVERFLOW, epoch, Phase.ROWS, rank, owner, owner, row, plane_rows)

    def store(access: Access) -> None:
        if task.warp == 0 and part == 0:
            access.write(table + 4 * first * num_topk, values["rows"].view(np.uint8))

    return call.perform(task, (topk_idx, idx_bytes, num_topk, num_experts, num_ranks, plane_rows, first, end, part, table, rank, epoch, fail, record),
                        {"topk_idx": assign, "table": store})


def _sum_counts(call: Call, task: Task, window: int, counts: int, rank: int, num_ranks: int, num_experts: int, epoch: int, plane_rows: int,
                expert_counters: int, fail: int, record: int, timeout: int) -> int:
    local = num_experts // num_ranks
    at = call.sim.peer_address(task, window, counts + rank * local * 8, rank)
    words = [(at + 8 * (source * num_experts + e), source, e) for source in range(num_ranks) for e in range(local)]
    values = task.block.values
    values.setdefault("sum", np.zeros(local, np.int64))

    def store(access: Access) -> None:
        call.cell(task, "sum").read(task)
        for e in range(task.warp, local, task.block.launch.warps):
            access.write(expert_counters + 4 * e, np.array([min(int(values["sum"][e]), plane_rows)], np.int32).view(np.uint8))

    return call.perform(
        task, (window, counts, rank, num_ranks, num_experts, epoch, plane_rows, expert_counters, fail, record, timeout),
        {"count": lambda a: _add_counts(call, task, a, words, "sum", epoch, rank, fail, record), "expert_counters": store})


# ---- rows --------------------------------------------------------------------------------------------------------------------------
def _row(call: Call, task: Task, window: int, slot: int, row: int, rows_per_rank: int, row_bytes: int) -> int:
    """Address of a global row."""
    return call.sim.peer_address(task, window, slot + row % rows_per_rank * row_bytes, row // rows_per_rank)


def _scatter_row(call: Call, task: Task, window: int, slot: int, tokens: int, token: int, first: int, num_topk: int, num_experts: int,
                 num_ranks: int, plane_rows: int, row_bytes: int, begin_vector: int, end_vector: int) -> int:
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    rows_per_rank = num_experts // num_ranks * plane_rows
    held = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal held
        held = access.read(tokens + token * row_bytes + begin, size).copy()

    def store(access: Access) -> None:
        call.cell(task, "rows").read(task)
        for row in task.block.values["rows"][(token - first) * num_topk:(token - first + 1) * num_topk].tolist():
            if row >= 0:
                access.write(_row(call, task, window, slot, row, rows_per_rank, row_bytes) + begin, held)
                call.scheduler.split()

    return call.perform(task, (), {"tokens": load, "slot": store})


def _gather_row(call: Call, task: Task, window: int, slot: int, table: int, weights: int, out: int, token: int, num_topk: int, num_experts: int,
                num_ranks: int, plane_rows: int, row_bytes: int, token_type: int, begin_vector: int, end_vector: int) -> int:
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    rows_per_rank = num_experts // num_ranks * plane_rows
    rows: list[int] = []
    scale = np.zeros(0, np.float32)
    total = np.zeros(max(size, 0) // (4 if token_type == 2 else 2), np.float32)

    def read_table(access: Access) -> None:
        rows.extend(access.read(table + 4 * token * num_topk, 4 * num_topk).view(np.int32).tolist())

    def read_weights(access: Access) -> None:
        nonlocal scale
        scale = access.read(weights + 4 * token * num_topk, 4 * num_topk).view(np.float32).copy()

    def pull(access: Access) -> None:
        nonlocal total
        for k, row in enumerate(rows):
            if row >= 0:
                piece = access.read(_row(call, task, window, slot, row, rows_per_rank, row_bytes) + begin, size)
                total = fma(unpack(piece, token_type), scale[k], total)
                call.scheduler.split()

    return call.perform(task, (), {"table": read_table, "weights": read_weights, "slot": pull,
                                   "out": lambda a: a.write(out + token * row_bytes + begin, pack(total, token_type))})


# ---- arrived -----------------------------------------------------------------------------------------------------------------------
def _publish_arrived(call: Call, task: Task, window: int, arrived: int, rank: int, num_ranks: int, epoch: int) -> int:
    return call.perform(task, (window, arrived, rank, num_ranks, epoch), {
        "arrived": lambda a: _to_all(call, task, a, window, arrived + 8 * rank, num_ranks, tagged(epoch, 0))})


def _wait_arrived(call: Call, task: Task, window: int, arrived: int, rank: int, num_ranks: int, epoch: int, fail: int, record: int,
                  timeout: int) -> int:
    at = call.sim.peer_address(task, window, arrived, rank)

    def wait(access: Access) -> int:
        if task.warp:
            return 0
        v = wait_words(task, access, [access.word(at + 8 * s) for s in range(num_ranks)], epoch, "ARRIVED")
        return call.give_up(task, fail, record, Code(v.code), epoch, Phase.ARRIVED, rank, v.peer, v.culprit, v.seen, epoch) if v.code else 0

    return call.perform(task, (window, arrived, rank, num_ranks, epoch, fail, record, timeout), {"arrived": wait})
