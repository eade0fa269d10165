"""Routing and rows of the vocabulary on the CPU: counting experts, exchanging counts, assigning rows, moving and adding up rows. See ``ops``."""

from __future__ import annotations

import numpy as np

from ncclep_py.errors import Code, Phase
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, tagged, wait_count

__all__ = ["assign_rows", "count_experts", "fetch_routing", "fetch_row", "gather_row", "publish_counts", "scatter_row", "wait_counts"]


# ---- counts: thread i of a block takes item i; here warp i modulo the number of warps -------------------------------------------------
def _ids(access: Access, topk_idx: int, idx_bytes: int, first: int, end: int, num_experts: int) -> np.ndarray:
    """Expert ids of pairs [first, end), -1 for those outside [0, num_experts)."""
    ids = access.read(topk_idx + first * idx_bytes, (end - first) * idx_bytes).view(np.int64 if idx_bytes == 8 else np.int32)
    return np.where((ids >= 0) & (ids < num_experts), ids, -1)


def count_experts(call: Call, task: Task, topk_idx: int, idx_bytes: int, num_tokens: int, num_topk: int, num_experts: int, first: int,
                  end: int) -> int:
    """My rows per expert, in all and before this block."""
    values, warps = task.block.values, task.block.launch.warps
    if "total" not in values:
        values["total"], values["start"], values["received"] = (np.zeros(num_experts, np.int64) for _ in range(3))

    def count(access: Access) -> None:
        ids = _ids(access, topk_idx, idx_bytes, 0, num_tokens * num_topk, num_experts)
        pairs = np.arange(len(ids))
        mine = (pairs % warps == task.warp) & (ids >= 0)
        for name, chosen in (("total", mine), ("start", mine & (pairs < first * num_topk))):
            call.cell(task, name).write(task, atomic=True)
            values[name] += np.bincount(ids[chosen], minlength=num_experts)

    return call.perform(task, (topk_idx, idx_bytes, num_tokens, num_topk, num_experts, first, end), {"topk_idx": count})


def publish_counts(call: Call, task: Task, window: int, counts: int, rank: int, num_ranks: int, num_experts: int, epoch: int) -> int:
    """My counts to every rank."""
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


def wait_counts(call: Call, task: Task, window: int, counts: int, rank: int, num_ranks: int, num_experts: int, epoch: int, plane_rows: int,
                expert_counters: int, fail: int, record: int, timeout: int) -> int:
    """Add the lower ranks' counts; the last block also adds up what my experts receive."""
    launch, values, local = task.block.launch, task.block.values, num_experts // num_ranks
    sums = task.block.index == launch.blocks - 1
    at = call.sim.peer_address(task, window, counts, rank)

    def add(access: Access, name: str, index: int, count: int) -> None:
        call.cell(task, name).write(task, atomic=True)
        values[name][index] += count

    def wait(access: Access) -> int:
        for i in range(task.warp, (num_ranks if sums else rank) * num_experts, launch.warps):
            source, e = divmod(i, num_experts)
            code, value = wait_count(task, access, access.word(at + 8 * i), epoch, source)
            if code:
                return call.give_up(task, fail, record, Code(code), epoch, Phase.COUNTS, rank, source, source, value >> 32, epoch)
            if source < rank:
                add(access, "start", e, value & LOW)
            if sums and e // local == rank:
                add(access, "received", e % local, value & LOW)
        return 0

    def store(access: Access) -> None:
        if sums:
            call.cell(task, "received").read(task)
            for e in range(task.warp, local, launch.warps):
                access.write(expert_counters + 4 * e, np.array([min(int(values["received"][e]), plane_rows)], np.int32).view(np.uint8))

    return call.perform(task, (window, counts, rank, num_ranks, num_experts, epoch, plane_rows, expert_counters, fail, record, timeout),
                        {"count": wait, "expert_counters": store})


def assign_rows(call: Call, task: Task, topk_idx: int, idx_bytes: int, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, first: int,
                end: int, part: int, table: int, rank: int, epoch: int, fail: int, record: int) -> int:
    """Final row of each of the block's pairs."""
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


# ---- rows --------------------------------------------------------------------------------------------------------------------------
def _row(call: Call, task: Task, window: int, slot: int, row: int, rows_per_rank: int, row_bytes: int) -> int:
    """Address of a global row."""
    return call.sim.peer_address(task, window, slot + row % rows_per_rank * row_bytes, row // rows_per_rank)


def fetch_row(call: Call, task: Task, tokens: int, token: int, end: int, reserved: int, row_bytes: int, begin_vector: int,
              end_vector: int) -> int:
    """A piece of a token's row, for later."""
    def fetch(access: Access) -> None:
        if token < end:
            task.fetched["row"] = access.read(tokens + token * row_bytes + 16 * begin_vector, 16 * (end_vector - begin_vector)).copy()

    return call.perform(task, (), {"tokens": fetch})


def scatter_row(call: Call, task: Task, window: int, slot: int, tokens: int, token: int, fetched: int, first: int, reserved: int, num_topk: int,
                num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, begin_vector: int, end_vector: int) -> int:
    """A piece of a token's row to its places."""
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    rows_per_rank = num_experts // num_ranks * plane_rows
    held = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal held
        held = task.take("row") if token == fetched else access.read(tokens + token * row_bytes + begin, size).copy()

    def store(access: Access) -> None:
        call.cell(task, "rows").read(task)
        for row in task.block.values["rows"][(token - first) * num_topk:(token - first + 1) * num_topk].tolist():
            if row >= 0:
                access.write(_row(call, task, window, slot, row, rows_per_rank, row_bytes) + begin, held)
                call.scheduler.split()

    return call.perform(task, (), {"tokens": load, "slot": store})


def _read_rows(access: Access, table: int, token: int, num_topk: int) -> list[int]:
    return access.read(table + 4 * token * num_topk, 4 * num_topk).view(np.int32).tolist()


def _read_weights(access: Access, weights: int, token: int, num_topk: int) -> np.ndarray:
    return access.read(weights + 4 * token * num_topk, 4 * num_topk).view(np.float32).copy()


def fetch_routing(call: Call, task: Task, table: int, weights: int, token: int, end: int, num_topk: int) -> int:
    """Rows and weights of a token, for later."""
    def rows(access: Access) -> None:
        if token < end:
            task.fetched["rows"] = _read_rows(access, table, token, num_topk)

    def scale(access: Access) -> None:
        if token < end:
            task.fetched["weights"] = _read_weights(access, weights, token, num_topk)

    return call.perform(task, (), {"table": rows, "weights": scale})


def gather_row(call: Call, task: Task, window: int, slot: int, table: int, weights: int, out: int, token: int, fetched: int, num_topk: int,
               num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, token_type: int, begin_vector: int, end_vector: int) -> int:
    """A piece of a combined row."""
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    rows_per_rank = num_experts // num_ranks * plane_rows
    rows: list[int] = []
    scale = np.zeros(0, np.float32)
    total = np.zeros(max(size, 0) // (4 if token_type == 2 else 2), np.float32)

    def read_table(access: Access) -> None:
        rows.extend(task.take("rows") if token == fetched else _read_rows(access, table, token, num_topk))

    def read_weights(access: Access) -> None:
        nonlocal scale
        scale = task.take("weights") if token == fetched else _read_weights(access, weights, token, num_topk)

    def pull(access: Access) -> None:
        nonlocal total
        for k, row in enumerate(rows):
            if row >= 0:
                piece = access.read(_row(call, task, window, slot, row, rows_per_rank, row_bytes) + begin, size)
                total = fma(unpack(piece, token_type), scale[k], total)
                call.scheduler.split()

    return call.perform(task, (), {"table": read_table, "weights": read_weights, "slot": pull,
                                   "out": lambda a: a.write(out + token * row_bytes + begin, pack(total, token_type))})
