"""High-throughput operations of an update on the CPU: counting keys, giving rows, zones. See ``ops``; dispatch and combine: ``ht_row_ops``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ncclep_py.errors import Code, Phase, Status
from ncclep_py.refusal import Refusal
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, ahead, tagged
from ncclep_py.simulator.words import Word

__all__ = [
    "ht_assign",
    "ht_count",
    "ht_map_status",
    "ht_publish_hits",
    "ht_publish_kept",
    "ht_store_zones",
    "ht_sum",
    "ht_wait_hits",
]

NEAR = 1 << 16
ONE = np.float32(1)


# ---- keys, shares, words ---------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Number of keys and columns; keys are the last columns."""

    keys: int
    columns: int

    @classmethod
    def of(cls, num_experts: int, num_ranks: int, by_rank: int) -> _Sizes:
        return cls(num_ranks, num_experts + num_ranks) if by_rank else cls(num_experts, num_experts)

    @property
    def first_key(self) -> int:
        return self.columns - self.keys


def _part(first: int, end: int, i: int, n: int) -> tuple[int, int]:
    """Share `i` of `n` of [first, end)."""
    return first + (end - first) * i // n, first + (end - first) * (i + 1) // n


def _chunk(task: Task, num_tokens: int, chunks: int) -> tuple[int, int]:
    """Tokens of this warp's chunk."""
    launch = task.block.launch
    used = min(chunks, launch.warps)
    return _part(*_part(0, num_tokens, task.block.index, launch.blocks), task.warp, used) if task.warp < used else (0, 0)


def _worker(task: Task) -> tuple[int, int]:
    """This warp's number among all warps of the grid, and how many there are."""
    launch = task.block.launch
    return task.block.index * launch.warps + task.warp, launch.blocks * launch.warps


def _ids(access: Access, topk_idx: int, idx_bytes: int, first: int, end: int, num_topk: int, num_experts: int) -> list[list[int]]:
    """Expert ids of tokens [first, end), -1 for those outside [0, num_experts)."""
    size = num_topk * idx_bytes
    raw = access.read(topk_idx + first * size, (end - first) * size).view(np.int64 if idx_bytes == 8 else np.int32)
    return np.where((raw >= 0) & (raw < num_experts), raw, -1).reshape(-1, num_topk).tolist()


def _keys(ids: Sequence[int], local: int, by_rank: int) -> list[int]:
    """Distinct keys of a token, ascending."""
    return sorted({e // local if by_rank else e for e in ids if e >= 0})


def _array(task: Task, name: str, size: int) -> np.ndarray:
    """An array of shared memory; whoever comes first makes it."""
    values = task.block.values
    if name not in values or len(values[name]) != size:
        values[name] = np.zeros(size, np.int64)
    return values[name]


def _mine(task: Task, size: int) -> slice:
    """This warp's share of an array's elements."""
    return slice(*_part(0, size, task.warp, task.block.launch.warps))


def _wait_tag(task: Task, access: Access, word: Word, epoch: int, source: int, noun: str) -> tuple[int, int]:
    """Wait for a word of this epoch: (code, value)."""
    def old() -> bool:
        distance = ahead(word.peek(task.agent).value >> 32, epoch)
        return distance != 0 and not 0 < distance < NEAR

    def describe() -> tuple[str, list[int]]:
        return f"waits in epoch {epoch} for {noun} of rank {source}, whose word has epoch {word.peek(task.agent).value >> 32}", [source]

    while old() and not task.late:
        access.scheduler.wait(task, lambda: not old(), describe)
    task.late = False
    value = access.load(word)
    distance = ahead(value >> 32, epoch)
    return 0 if distance == 0 else Code.LEFT_BEHIND if 0 < distance < NEAR else Code.TIMEOUT, value


# ---- update ----------------------------------------------------------------------------------------------------------------------
def ht_count(call: Call, task: Task, topk_idx: int, idx_bytes: int, num_tokens: int, num_topk: int, num_experts: int, num_ranks: int, by_rank: int,
             chunks: int, partials: int, header: int) -> int:
    """Keys of the block's tokens."""
    sizes, local = _Sizes.of(num_experts, num_ranks, by_rank), num_experts // num_ranks
    total, count = _array(task, "total", sizes.columns), _array(task, "count", chunks * sizes.keys)

    def load(access: Access) -> None:
        first, end = _chunk(task, num_tokens, chunks)
        for name in ("total", "count"):
            call.cell(task, name).write(task, atomic=True)
        for ids in _ids(access, topk_idx, idx_bytes, first, end, num_topk, num_experts):
            for key in _keys(ids, local, by_rank):
                count[task.warp * sizes.keys + key] += 1
            if by_rank:
                for e in _keys(ids, local, 0):
                    total[e] += 1

    def store(access: Access) -> None:
        for name in ("total", "count"):
            call.cell(task, name).read(task)
        totals = np.concatenate([total[:sizes.first_key], count.reshape(chunks, sizes.keys).sum(0)])
        words = np.concatenate([totals, count]).astype(np.uint32)
        part = _mine(task, len(words))
        access.write(partials + 4 * (task.block.index * len(words) + part.start), words[part].view(np.uint8))

    def clear(access: Access) -> None:
        if task.block.index == 0 and task.warp == 0:
            access.write(header, np.zeros(16, np.uint8))

    return call.perform(task, (topk_idx, idx_bytes, num_tokens, num_topk, num_experts, num_ranks, by_rank, chunks, partials, header),
                        {"topk_idx": load, "partials": store, "header": clear})


def ht_sum(call: Call, task: Task, partials: int, num_experts: int, num_ranks: int, by_rank: int, chunks: int) -> int:
    """My totals, and what comes before each chunk of the block."""
    sizes, launch = _Sizes.of(num_experts, num_ranks, by_rank), task.block.launch
    total, start = _array(task, "total", sizes.columns), _array(task, "start", chunks * sizes.keys)
    lower, everything = _array(task, "lower", sizes.columns), _array(task, "all", sizes.columns)
    words = sizes.columns + chunks * sizes.keys

    def load(access: Access) -> None:
        found = access.read(partials, 4 * launch.blocks * words).view(np.uint32).reshape(launch.blocks, words).astype(np.int64)
        for name in ("total", "start", "lower", "all"):
            call.cell(task, name).write(task, atomic=True)
        part = _mine(task, sizes.columns)
        lower[part], everything[part] = 0, 0
        total[part] = found[:, part].sum(0)
        mine = found[task.block.index, sizes.columns:].reshape(chunks, sizes.keys)
        before = found[:task.block.index, sizes.first_key:sizes.columns].sum(0) + np.cumsum(mine, 0) - mine
        keys = slice(max(part.start - sizes.first_key, 0), max(part.stop - sizes.first_key, 0))
        start.reshape(chunks, sizes.keys)[:, keys] = before[:, keys]

    return call.perform(task, (partials, num_experts, num_ranks, by_rank, chunks), {"partials": load})


def _hits(hits: int, num_ranks: int, num_experts: int, source: int, epoch: int) -> int:
    """Window offset of a source's totals."""
    return hits + ((epoch & 1) * num_ranks + source) * (num_experts + num_ranks) * 8


def ht_publish_hits(call: Call, task: Task, window: int, hits: int, rank: int, num_ranks: int, num_experts: int, by_rank: int, epoch: int) -> int:
    """My totals to every rank."""
    sizes, warps = _Sizes.of(num_experts, num_ranks, by_rank), task.block.launch.warps

    def publish(access: Access) -> None:
        call.cell(task, "total").read(task)
        total = task.block.values["total"].tolist()
        for peer in range(num_ranks):
            at = call.sim.peer_address(task, window, _hits(hits, num_ranks, num_experts, rank, epoch), peer)
            for column in range(task.warp, sizes.columns, warps):
                access.store(at + 8 * column, tagged(epoch, total[column]))
            call.scheduler.split()

    return call.perform(task, (window, hits, rank, num_ranks, num_experts, by_rank, epoch), {"hits": publish})


def ht_wait_hits(call: Call, task: Task, window: int, hits: int, rank: int, num_ranks: int, num_experts: int, by_rank: int, epoch: int, fail: int,
                 record: int, timeout: int) -> int:
    """All ranks' totals."""
    sizes, values = _Sizes.of(num_experts, num_ranks, by_rank), task.block.values
    at = call.sim.peer_address(task, window, _hits(hits, num_ranks, num_experts, 0, epoch), rank)
    words = [(source, column) for source in range(num_ranks) for column in range(sizes.columns)]

    def wait(access: Access) -> int:
        for source, column in words[task.warp::task.block.launch.warps]:
            code, value = _wait_tag(task, access, access.word(at + 8 * (source * (num_experts + num_ranks) + column)), epoch, source, "HITS")
            if code:
                return call.give_up(task, fail, record, Code(code), epoch, Phase.COUNTS, rank, source, source, value >> 32, epoch)
            for name in ("all", "lower") if source < rank else ("all",):
                call.cell(task, name).write(task, atomic=True)
                values[name][column] += value & LOW
        return 0

    return call.perform(task, (window, hits, rank, num_ranks, num_experts, by_rank, epoch, fail, record, timeout), {"hits": wait})


def ht_assign(call: Call, task: Task, topk_idx: int, idx_bytes: int, num_tokens: int, num_topk: int, num_experts: int, num_ranks: int, by_rank: int,
              chunks: int, alignment: int, budget: int, rank: int, routes: int, places: int) -> int:
    """Routes and places of the block's tokens."""
    sizes, local, values = _Sizes.of(num_experts, num_ranks, by_rank), num_experts // num_ranks, task.block.values
    zone, rank_total = _array(task, "zone", num_experts), _array(task, "rank_total", num_ranks)
    made: list[list[list[int]]] = [[], []]

    def number(access: Access) -> None:
        for name in ("all", "lower", "start"):
            call.cell(task, name).read(task)
        for name in ("zone", "rank_total"):
            call.cell(task, name).write(task, atomic=True)
        counts = values["all"].tolist()
        for p in range(num_ranks):
            run = 0
            for e in range(p * local, (p + 1) * local):
                zone[e] = run
                run += -(-counts[e] // alignment) * alignment
            rank_total[p] = counts[num_experts + p] if by_rank else run
        first, end = _chunk(task, num_tokens, chunks)
        if first == end:
            return
        begin = values["start"][task.warp * sizes.keys:(task.warp + 1) * sizes.keys] + values["lower"][sizes.first_key:]
        rows = (begin if by_rank else begin + zone).tolist()
        for ids in _ids(access, topk_idx, idx_bytes, first, end, num_topk, num_experts):
            found, route = {}, []
            hits = _keys(ids, local, 0)
            for key in _keys(ids, local, by_rank):
                row = rows[key]
                rows[key] += 1
                if row < budget:
                    found[key] = row
                    of_row = sum(e // local == key for e in hits) if by_rank else 1
                    route.append(of_row << 48 | (key if by_rank else key // local) << 32 | row)
            made[0].append(route + [-1] * (num_topk - len(route)))
            place = []
            for e in ids:
                key = e // local if by_rank else e
                column = sum(e // local * local <= other < e for other in hits) if by_rank else 0
                place.append(e << 40 | column << 32 | found[key] if e >= 0 and key in found else -1)
            made[1].append(place)

    def store(access: Access, at: int, rows: list[list[int]]) -> None:
        first, end = _chunk(task, num_tokens, chunks)
        if first < end:
            access.write(at + 8 * first * num_topk, np.array(rows, np.int64).reshape(-1).view(np.uint8))

    return call.perform(
        task, (topk_idx, idx_bytes, num_tokens, num_topk, num_experts, num_ranks, by_rank, chunks, alignment, budget, rank, routes, places),
        {"topk_idx": number, "routes": lambda a: store(a, routes, made[0]), "place_table": lambda a: store(a, places, made[1])})


def ht_publish_kept(call: Call, task: Task, window: int, kept: int, places: int, num_tokens: int, num_topk: int, num_experts: int, num_ranks: int,
                    by_rank: int, budget: int, rank: int, epoch: int) -> int:
    """Rows I send to each expert of a rank that overflows."""
    local, warps = num_experts // num_ranks, task.block.launch.warps
    count = _array(task, "kept", num_experts)
    call.cell(task, "rank_total").read(task)
    full = [bool(by_rank) and total > budget for total in task.block.values["rank_total"].tolist()]

    def load(access: Access) -> None:
        if not any(full):
            return
        first, end = _part(0, num_tokens, task.warp, warps)
        found = access.read(places + 8 * first * num_topk, 8 * (end - first) * num_topk).view(np.int64).reshape(-1, num_topk).tolist()
        call.cell(task, "kept").write(task, atomic=True)
        for row in found:
            for place in {p for p in row if p >= 0}:
                count[place >> 40] += 1

    def publish(access: Access) -> None:
        if not any(full):
            return
        call.cell(task, "kept").read(task)
        for e in range(task.warp, num_experts, warps):
            if full[e // local]:
                access.store(call.sim.peer_address(task, window, kept + (rank * local + e % local) * 8, e // local), tagged(epoch, int(count[e])))
                call.scheduler.split()

    return call.perform(task, (window, kept, places, num_tokens, num_topk, num_experts, num_ranks, by_rank, budget, rank, epoch),
                        {"place_table": load, "kept_rows": publish})


def ht_store_zones(call: Call, task: Task, window: int, kept: int, rank: int, num_ranks: int, num_experts: int, by_rank: int, alignment: int,
                   budget: int, trap: int, zones: int, expert_counters: int, expert_offsets: int, unpadded: int, total: int, int_bytes: int,
                   epoch: int, fail: int, record: int, timeout: int) -> int:
    """Zones of my experts, and counts for the caller."""
    local, values, warps = num_experts // num_ranks, task.block.values, task.block.launch.warps
    for name in ("all", "zone", "rank_total"):
        call.cell(task, name).read(task)
    totals = values["rank_total"].tolist()
    mine = totals[rank]
    cut = bool(by_rank) and mine > budget
    count = _array(task, "final", local)
    at = call.sim.peer_address(task, window, kept, rank)
    rows: list[tuple[int, int, int]] = []

    def wait(access: Access) -> int:
        for i in range(task.warp, num_ranks * local, warps) if cut else ():
            source = i // local
            code, value = _wait_tag(task, access, access.word(at + 8 * i), epoch, source, "KEPT")
            if code:
                return call.give_up(task, fail, record, Code(code), epoch, Phase.COUNTS, rank, source, source, value >> 32, epoch)
            call.cell(task, "final").write(task, atomic=True)
            count[i % local] += value & LOW
        return 0

    def store(access: Access) -> None:
        if cut:
            call.cell(task, "final").read(task)
        for e in range(local):
            n = int(count[e] if cut else values["all"][rank * local + e])
            begin = 0 if by_rank else min(int(values["zone"][rank * local + e]), budget)
            room = n if by_rank else budget - begin
            rows.append((begin, min(n, room), n if by_rank else min(-(-n // alignment) * alignment, room)))
        table = np.array(rows, np.int32).T
        for row in range(3):
            for e in range(task.warp, local, warps):
                access.write(zones + 4 * (row * local + e), table[row, e:e + 1].copy().view(np.uint8))
        if task.warp == 0:
            access.write(_totals(zones, local), np.array([min(mine, budget), mine], np.int64).view(np.uint8))
            full = [p for p in range(num_ranks) if totals[p] > budget]
            if trap and full:
                call.note(task, fail, record, Code.OVERFLOW, epoch, Phase.COUNTS, rank, full[0], full[0], totals[full[0]], budget)

    def tell(column: int, base: int) -> Any:
        def put(access: Access) -> None:
            for e in range(task.warp, local, warps) if base else ():
                _put(access, base, e, int_bytes, rows[e][column])
        return put

    def tell_total(access: Access) -> None:
        if total and task.warp == 0:
            _put(access, total, 0, int_bytes, mine)

    return call.perform(task, (window, kept, rank, num_ranks, num_experts, by_rank, alignment, budget, trap, zones, expert_counters, expert_offsets,
                               unpadded, total, int_bytes, epoch, fail, record, timeout),
                        {"kept_rows": wait, "zones": store, "expert_counters": tell(2, expert_counters), "expert_offsets": tell(0, expert_offsets),
                         "unpadded": tell(1, unpadded), "total": tell_total})


def _put(access: Access, base: int, i: int, int_bytes: int, value: int) -> None:
    access.write(base + i * int_bytes, np.array([value], np.int64 if int_bytes == 8 else np.int32).view(np.uint8))


def _totals(zones: int, num_local: int) -> int:
    """Address of the received totals."""
    return zones + (12 * num_local + 7) // 8 * 8


def ht_map_status(call: Call, task: Task, header: int, handle: int, status: int) -> int:
    """A refusal if the maps are not valid."""
    def check(access: Access) -> int:
        held = int(access.read(header, 16).view(np.int64)[1])
        return Status.REFUSED << 24 | Refusal.EARLIER if status == 0 and held >> 32 != handle >> 32 else status

    return call.perform(task, (header, handle, status), {"header": check})
