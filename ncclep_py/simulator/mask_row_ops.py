"""Rows of groups with ``enable_mask`` on the CPU: RANK_MAJOR, and rows packed as NVFP4. See ``ops`` and ``kernels/mask_row_ops.cu``."""

from __future__ import annotations

import numpy as np

from ncclep_py.simulator import rank_ops, recipe_ops
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.mask_ops import _bank
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW, tagged

__all__ = ["sum_member_row", "sum_packed_member_row", "take_member_rows", "tell_rows"]


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
