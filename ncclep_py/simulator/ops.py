"""The vocabulary of ``kernels.ops`` on the CPU. A function per operation says what its accesses mean; the effect table
says in which order they come and how strong they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from greenlet import getcurrent

from ncclep_py.errors import SPREADS, Code, Phase, Status
from ncclep_py.kernels.ops import NET_OPS, OPS, Vocabulary
from ncclep_py.refusal import Refusal
from ncclep_py.simulator import (
    ht_net_ops,
    ht_ops,
    ht_row_ops,
    ll_net_masked_ops,
    ll_net_ops,
    ll_net_staged_ops,
    mask_clean_ops,
    mask_ops,
    mask_row_ops,
    net_ops,
    rank_ops,
    recipe_ops,
    routing_ops,
    staged_ops,
    trace_ops,
)
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.share import Share
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, around_status, tagged, wait_words

if TYPE_CHECKING:
    from ncclep_py.simulator.engine import Simulator

__all__ = ["MODULES", "vocabulary"]

Implementation = Callable[..., int]
MODULES = (routing_ops, rank_ops, recipe_ops, staged_ops, ht_ops, ht_row_ops, mask_clean_ops, mask_ops, mask_row_ops, trace_ops, ll_net_masked_ops,
           ll_net_ops, ll_net_staged_ops, ht_net_ops, net_ops)
"""Where operations are, besides this file."""


def vocabulary(sim: Simulator, overrides: Mapping[str, Sequence[str]], waits: bool = False) -> Vocabulary:
    """All operations over one simulator; `overrides` replaces the effects of some; `waits`: they count how long they wait for whom."""
    everything = OPS | NET_OPS
    unknown = sorted(overrides.keys() - everything.keys())
    if unknown:
        raise ValueError(f"effects for unknown operations: {unknown}")
    found = {name: function for module in MODULES[::-1] for name, function in vars(module).items()}
    return Vocabulary({name: _operation(sim, name, overrides.get(name, op.effects), found.get(name) or globals()[f"_{name}"], waits)
                       for name, op in everything.items()})


def _operation(sim: Simulator, name: str, effects: Sequence[str], implementation: Implementation, waits: bool) -> Callable[..., int]:
    """The function a kernel calls."""
    op = OPS.get(name) or NET_OPS[name]
    call = Call(sim, name, effects, op.scope, op.scope == "block" and "bar.sync" in op.effects, waits)
    arity = len(op.parameters)

    def operation(*args: int) -> int:
        task = getcurrent()
        if len(args) != arity:
            raise TypeError(f"{name} takes {arity} arguments {op.parameters}, got {len(args)}")
        frame = sys._getframe(1)
        task.site = (name, frame.f_code.co_filename, frame.f_lineno, task.block.launch.label)
        if op.effects:
            task.note(args, sim.most_repeats)
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


def _clear_fail(call: Call, task: Task, fail: int) -> int:
    def clear(access: Access) -> None:
        access.store(fail, 0)
        access.store(fail + 8, 0)

    return call.perform(task, (fail,), {"fail": clear})


def _store_header(call: Call, task: Task, header: int, epoch: int, handle: int) -> int:
    def store(access: Access) -> None:
        access.write(header, np.array([epoch, handle], np.int64).view(np.uint8))

    return call.perform(task, (header, epoch, handle), {"header": store})


def _read_header(call: Call, task: Task, header: int) -> int:
    return call.perform(task, (header,), {"header": lambda a: int(a.read(header, 16).view(np.int64)[1])})


def _header_status(call: Call, task: Task, held: int, handle: int, status: int) -> int:
    return Status.REFUSED << 24 | Refusal.STALE if status == 0 and held != handle else status


def _check_header(call: Call, task: Task, held: int, handle: int, rank: int, epoch: int, fail: int, record: int) -> int:
    if held != handle and task.warp == 0:
        call.give_up(task, fail, record, Code.STALE_SLOT, epoch, Phase.SLOT, rank, rank, rank, held, handle)
    return 0 if held == handle else int(Code.STALE_SLOT)


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
        if task.warp:
            return 0
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
        if call.sim.windows[window][rank].part(call.sim.peer_address(task, window, at, rank)).name == "HEAD":   # not a flight's word
            call.sim.entered(window, rank, epoch, signature, status == 0)
        _to_all(call, task, access, window, at, num_ranks, tagged(epoch, signature & LOW))
        _to_all(call, task, access, window, at + 8, num_ranks, tagged(epoch, status or around_status(signature)))

    return call.perform(task, (window, heads, rank, num_ranks, epoch, signature, status), {"head": head})


def _wait_heads(call: Call, task: Task, window: int, heads: int, rank: int, num_ranks: int, epoch: int, signature: int, fail: int, record: int,
                timeout: int) -> int:
    at = call.sim.peer_address(task, window, _head(heads, num_ranks, 0, epoch), rank)

    def head(access: Access) -> int:
        if task.warp:
            return 0
        low, high = ([access.word(at + 16 * s + half) for s in range(num_ranks)] for half in (0, 8))
        v = wait_words(task, access, high, epoch, "HEAD", rank, low, signature, waits=call.waits_at(task, fail, 0))
        expected = signature if v.code == Code.MISMATCH else epoch
        return call.give_up(task, fail, record, Code(v.code), epoch, Phase.HEAD, rank, v.peer, v.culprit, v.seen, expected) if v.code else 0

    return call.perform(task, (window, heads, rank, num_ranks, epoch, signature, fail, record, timeout), {"head": head})


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
        v = wait_words(task, access, [access.word(at + 8 * s) for s in range(num_ranks)], epoch, "ARRIVED", rank,
                       waits=call.waits_at(task, fail, 1))
        return call.give_up(task, fail, record, Code(v.code), epoch, Phase.ARRIVED, rank, v.peer, v.culprit, v.seen, epoch) if v.code else 0

    return call.perform(task, (window, arrived, rank, num_ranks, epoch, fail, record, timeout), {"arrived": wait})
