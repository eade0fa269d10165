"""Operations of staged dispatch and combine on the CPU. See ``ops``."""

from __future__ import annotations

import numpy as np

from ncclep_py.errors import SPREADS, Code, Status
from ncclep_py.refusal import Refusal
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.routing_ops import _row
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.task import Task

__all__ = ["copy_row", "copy_table", "count_bank", "count_rows", "keep_counters", "outcome", "push_row", "reduce_row", "store_origins"]

POISON = 0xA5


def count_bank(call: Call, task: Task, counts: int, bank_bytes: int, epoch: int) -> int:
    """Offset of a bank of COUNTS."""
    return counts + (epoch & 1) * bank_bytes


def outcome(call: Call, task: Task, fail: int, epoch: int, status: int) -> int:
    """What to tell about this epoch."""
    def read(access: Access) -> int:
        value = access.load(access.word(fail))
        code = value & 0xFF
        if value >> 32 != epoch or code in (0, Code.REFUSED, Code.MISMATCH):
            return status
        if code == Code.STALE_SLOT:
            return Status.REFUSED << 24 | Refusal.STALE
        assert code in SPREADS
        return Status.ABORT << 24 | (value >> 8 & 0xFFFFFF)

    return call.perform(task, (fail, epoch, status), {"fail": read})


def keep_counters(call: Call, task: Task, expert_counters: int, kept: int, num_planes: int) -> int:
    """Copy the counts, each by the warp that wrote it."""
    mine = range(task.warp, num_planes, task.block.launch.warps)
    held: dict[int, np.ndarray] = {}

    def load(access: Access) -> None:
        held.update({e: access.read(expert_counters + 4 * e, 4).copy() for e in mine})

    def store(access: Access) -> None:
        for e in mine:
            access.write(kept + 4 * e, held[e])

    return call.perform(task, (expert_counters, kept, num_planes), {"expert_counters": load, "kept": store})


def store_origins(call: Call, task: Task, window: int, origins: int, token: int, first: int, num_topk: int, num_experts: int, num_ranks: int,
                  plane_rows: int, rank: int, places: int) -> int:
    """Where a token's rows came from, to their places."""
    def store(access: Access) -> None:
        call.cell(task, "rows").read(task)
        for k, row in enumerate(task.block.values["rows"][(token - first) * num_topk:(token - first + 1) * num_topk].tolist()):
            if row >= 0:
                at = _row(call, task, window, origins, row, num_experts // num_ranks * plane_rows, 4)
                access.write(at, np.array([rank * places + token * num_topk + k], np.int32).view(np.uint8))
                call.scheduler.split()

    return call.perform(task, (), {"origins": store})


def copy_table(call: Call, task: Task, table: int, copied: int, num_tokens: int, num_topk: int) -> int:
    """Copy the row table; a piece per warp of the grid."""
    launch = task.block.launch
    pieces, piece, most = launch.blocks * launch.warps, task.block.index * launch.warps + task.warp, num_tokens * num_topk
    begin, end = most * piece // pieces, most * (piece + 1) // pieces
    held = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal held
        held = access.read(table + 4 * begin, 4 * (end - begin)).copy()

    return call.perform(task, (table, copied, num_tokens, num_topk), {"table": load, "copied": lambda a: a.write(copied + 4 * begin, held)})


def count_rows(call: Call, task: Task, kept: int, num_planes: int, plane_rows: int) -> int:
    """Rows before each plane's first, in shared memory; rows of all."""
    def count(access: Access) -> None:
        if task.warp == 0:
            call.cell(task, "before").write(task)
            counts = access.read(kept, 4 * num_planes).view(np.int32).clip(0, plane_rows)
            task.block.values["before"] = np.concatenate([[0], np.cumsum(counts)])

    call.perform(task, (kept, num_planes, plane_rows), {"kept": count})
    call.cell(task, "before").read(task)
    return int(task.block.values["before"][-1])


def _place(task: Task, row: int, plane_rows: int) -> int:
    """Index in its slot of a row that counts over the planes."""
    before = task.block.values["before"]
    plane = int(np.searchsorted(before[:-1], row, side="right")) - 1
    return plane * plane_rows + row - int(before[plane])


def copy_row(call: Call, task: Task, rows: int, target: int, row: int, num_planes: int, plane_rows: int, row_bytes: int, begin_vector: int,
             end_vector: int) -> int:
    """A piece of a row to another tensor."""
    at, size = _place(task, row, plane_rows) * row_bytes + 16 * begin_vector, 16 * (end_vector - begin_vector)
    held = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal held
        call.cell(task, "before").read(task)
        held = access.read(rows + at, size).copy()

    return call.perform(task, (), {"rows": load, "target": lambda a: a.write(target + at, held)})


def push_row(call: Call, task: Task, window: int, origins: int, rows: int, staging: int, row: int, num_planes: int, plane_rows: int, rank: int,
             places: int, row_bytes: int, begin_vector: int, end_vector: int) -> int:
    """A piece of a received row to its source."""
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    place, origin = _place(task, row, plane_rows), 0
    held = np.zeros(0, np.uint8)

    def read_origin(access: Access) -> None:
        nonlocal origin
        call.cell(task, "before").read(task)
        origin = int(access.read(call.sim.peer_address(task, window, origins + 4 * place, rank), 4).view(np.int32)[0])

    def load(access: Access) -> None:
        nonlocal held
        held = access.read(rows + place * row_bytes + begin, size).copy()

    def store(access: Access) -> None:
        to = call.sim.peer_address(task, window, staging + origin % places * row_bytes, origin // places)
        access.write(to + begin, held)
        call.scheduler.split()

    return call.perform(task, (), {"origins": read_origin, "rows": load, "staging": store})


def reduce_row(call: Call, task: Task, window: int, staging: int, rank: int, table: int, weights: int, out: int, token: int, num_topk: int,
               row_bytes: int, token_type: int, begin_vector: int, end_vector: int) -> int:
    """A piece of a combined row, from my staging slot; its rows are poisoned afterwards, so that a row nobody pushes next time shows."""
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    held = np.zeros(0, np.int32)
    scale = np.zeros(0, np.float32)
    total = np.zeros(max(size, 0) // (4 if token_type == 2 else 2), np.float32)

    def read_table(access: Access) -> None:
        nonlocal held
        held = access.read(table + 4 * token * num_topk, 4 * num_topk).view(np.int32).copy()

    def read_weights(access: Access) -> None:
        nonlocal scale
        scale = np.ones(num_topk, np.float32)
        if weights:
            scale = access.read(weights + 4 * token * num_topk, 4 * num_topk).view(np.float32).copy()

    def pull(access: Access) -> None:
        nonlocal total
        for k in range(num_topk):
            if held[k] >= 0:
                at = call.sim.peer_address(task, window, staging + (token * num_topk + k) * row_bytes + begin, rank)
                piece = access.read(at, size)
                total = fma(unpack(piece, token_type), scale[k], total)
                if call.sim.poison:
                    piece[:] = POISON
                call.scheduler.split()

    return call.perform(task, (), {"table": read_table, "weights": read_weights, "staging": pull,
                                   "out": lambda a: a.write(out + token * row_bytes + begin, pack(total, token_type))})
