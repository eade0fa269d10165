"""Rows of groups with ``enable_mask`` on the CPU. See ``ops`` and ``kernels/mask_row_ops.cu``."""

from __future__ import annotations

import numpy as np

from ncclep_py.simulator import rank_ops, recipe_ops
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.mask_ops import _bank
from ncclep_py.simulator.routing_ops import _row
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, tagged

__all__ = ["drop_rows", "gather_member_row", "sum_member_row", "sum_packed_member_row", "take_member_rows", "tell_rows"]


def drop_rows(call: Call, task: Task, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, first: int, end: int, part: int, table: int,
              mask: int) -> int:
    """Rows for experts of masked ranks become -1; warp 0 does it all."""
    per_rank = num_experts // num_ranks * plane_rows

    def drop(access: Access) -> None:
        if task.warp:
            return
        call.cell(task, "rows").write(task)
        rows = task.block.values["rows"]
        gone = [i for i, row in enumerate(rows.tolist()) if row >= 0 and mask >> (row // per_rank) & 1]
        rows[gone] = -1
        for i in gone if part == 0 else ():
            access.write(table + 4 * (first * num_topk + i), np.array([-1], np.int32).view(np.uint8))

    return call.perform(task, (num_topk, num_experts, num_ranks, plane_rows, first, end, part, table, mask), {"table": drop})


def gather_member_row(call: Call, task: Task, window: int, slot: int, table: int, weights: int, out: int, token: int, num_topk: int,
                      num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, token_type: int, begin_vector: int, end_vector: int,
                      mask: int) -> int:
    """A piece of a combined row, without the rows of masked ranks."""
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    per_rank = num_experts // num_ranks * plane_rows
    rows: list[int] = []
    scale = np.zeros(0, np.float32)
    total = np.zeros(max(size, 0) // (4 if token_type == 2 else 2), np.float32)

    def read_table(access: Access) -> None:
        found = access.read(table + 4 * token * num_topk, 4 * num_topk).view(np.int32).tolist()
        rows.extend(row if row >= 0 and not mask >> (row // per_rank) & 1 else -1 for row in found)

    def read_weights(access: Access) -> None:
        nonlocal scale
        scale = access.read(weights + 4 * token * num_topk, 4 * num_topk).view(np.float32).copy()

    def pull(access: Access) -> None:
        nonlocal total
        for k, row in enumerate(rows):
            if row >= 0:
                piece = access.read(_row(call, task, window, slot, row, per_rank, row_bytes) + begin, size)
                total = fma(unpack(piece, token_type), scale[k], total)
                call.scheduler.split()

    return call.perform(task, (), {"table": read_table, "weights": read_weights, "slot": pull,
                                   "out": lambda a: a.write(out + token * row_bytes + begin, pack(total, token_type))})


def _told_rows_at(details: int, num_ranks: int, source: int, epoch: int) -> int:
    return details + 32 * _bank(epoch, num_ranks, source) + 24


def tell_rows(call: Call, task: Task, window: int, details: int, rank: int, num_ranks: int, epoch: int) -> int:
    """How many rows each rank gets from me."""
    def tell(access: Access) -> None:
        call.cell(task, "total").read(task)
        for peer, rows in enumerate(task.block.values["total"].tolist()):
            access.store(call.sim.peer_address(task, window, _told_rows_at(details, num_ranks, rank, epoch), peer), tagged(epoch, rows))
            call.scheduler.split()

    return call.perform(task, (window, details, rank, num_ranks, epoch), {"detail": tell})


def take_member_rows(call: Call, task: Task, window: int, details: int, slot_ids: int, rank: int, num_ranks: int, num_topk: int, plane_rows: int,
                     epoch: int, mask: int, src_rank_counters: int) -> int:
    """Counts of received rows, and -1 in unused ids."""
    capacity, warps, values = plane_rows // num_ranks, task.block.launch.warps, task.block.values
    sources = range(task.warp, num_ranks, warps)
    values.setdefault("count", np.zeros(num_ranks, np.int64))
    values.setdefault("total", values["count"])   # the same memory

    def take(access: Access) -> None:
        for source in sources:
            at = call.sim.peer_address(task, window, _told_rows_at(details, num_ranks, source, epoch), rank)
            word = access.load(access.word(at))
            call.cell(task, "total").write(task, atomic=True)
            values["count"][source] = word & LOW if word >> 32 == epoch and not mask >> source & 1 else 0

    def store(access: Access) -> None:
        for source in sources:
            access.write(src_rank_counters + 4 * source, np.array([values["count"][source]], np.int32).view(np.uint8))

    def fill(access: Access) -> None:
        call.cell(task, "total").read(task)
        for source, count in enumerate(values["count"].tolist()):   # rows of every source over all warps
            for row in range(count + (task.warp - count) % warps, capacity, warps):
                access.write(call.sim.peer_address(task, window, slot_ids + 4 * num_topk * (source * capacity + row), rank),
                             np.full(4 * num_topk, 0xFF, np.uint8))

    return call.perform(task, (window, details, slot_ids, rank, num_ranks, num_topk, plane_rows, epoch, mask, src_rank_counters),
                        {"detail": take, "src_rank_counters": store, "slot_ids": fill})


def sum_member_row(call: Call, task: Task, *values: int) -> int:
    """`rank_ops.sum_row`, whose last argument is the mask."""
    return rank_ops.sum_row(call, task, *values)


def sum_packed_member_row(call: Call, task: Task, *values: int) -> int:
    """`recipe_ops.sum_packed_row`, whose last argument is the mask."""
    return recipe_ops.sum_packed_row(call, task, *values)
