"""Operations of the RANK_MAJOR layout on the CPU. See ``ops`` and ``kernels/rank_ops.cu``."""

from __future__ import annotations

import numpy as np

from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.routing_ops import _ids
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import tagged

__all__ = ["assign_ranks", "count_ranks", "publish_arrived_rows", "send_routing", "sum_row", "take_arrived_rows"]


def _first_positions(ids: np.ndarray, num_topk: int, local: int) -> list[list[tuple[int, int]]]:
    """Per token (rank, first k with it), in k order."""
    found = []
    for token in ids.reshape(-1, num_topk).tolist():
        first: dict[int, int] = {}
        for k, e in enumerate(token):
            if e >= 0:
                first.setdefault(e // local, k)
        found.append(list(first.items()))
    return found


def count_ranks(call: Call, task: Task, topk_idx: int, idx_bytes: int, num_tokens: int, num_topk: int, num_experts: int, num_ranks: int,
                first: int) -> int:
    """My tokens per rank, in all and before this block; a warp takes some tokens."""
    values, warps = task.block.values, task.block.launch.warps
    for name in ("total", "start"):
        values.setdefault(name, np.zeros(num_ranks, np.int64))

    def count(access: Access) -> None:
        ids = _ids(access, topk_idx, idx_bytes, 0, num_tokens * num_topk, num_experts)
        for token, places in enumerate(_first_positions(ids, num_topk, num_experts // num_ranks)):
            for owner, _ in places if token % warps == task.warp else ():
                for name in ("total", "start") if token < first else ("total",):
                    call.cell(task, name).write(task, atomic=True)
                    values[name][owner] += 1

    return call.perform(task, (topk_idx, idx_bytes, num_tokens, num_topk, num_experts, num_ranks, first), {"topk_idx": count})


def assign_ranks(call: Call, task: Task, topk_idx: int, idx_bytes: int, topk_weights: int, num_topk: int, num_experts: int, num_ranks: int,
                 plane_rows: int, first: int, end: int, rank: int) -> int:
    """Ids, weights and final rows of the block's tokens."""
    values = task.block.values

    def assign(access: Access) -> None:
        if task.warp:
            return
        for name in ("start", "rows", "ids"):
            call.cell(task, name).write(task)
        ids = values["ids"] = _ids(access, topk_idx, idx_bytes, first * num_topk, end * num_topk, num_experts).reshape(-1, num_topk)
        rows = values["rows"] = np.full(ids.size, -1, np.int32)
        for token, places in enumerate(_first_positions(ids, num_topk, num_experts // num_ranks)):
            for owner, k in places:
                rows[token * num_topk + k] = owner * plane_rows + rank * (plane_rows // num_ranks) + values["start"][owner]
                values["start"][owner] += 1

    def load_weights(access: Access) -> None:
        if task.warp == 0:
            call.cell(task, "weights").write(task)
            values["weights"] = access.read(topk_weights + 4 * first * num_topk, 4 * (end - first) * num_topk).reshape(-1, 4 * num_topk).copy()

    return call.perform(task, (topk_idx, idx_bytes, topk_weights, num_topk, num_experts, num_ranks, plane_rows, first, end, rank),
                        {"topk_idx": assign, "topk_weights": load_weights})


def send_routing(call: Call, task: Task, window: int, slot_ids: int, slot_weights: int, table: int, token: int, first: int, end: int, num_topk: int,
                 num_experts: int, num_ranks: int, plane_rows: int, global_ids: int) -> int:
    """Ids and weights of a token to its rows, its rows to the table."""
    values, local = task.block.values, num_experts // num_ranks
    for name in ("rows", "ids", "weights"):
        call.cell(task, name).read(task)
    rows = values["rows"][(token - first) * num_topk:(token - first + 1) * num_topk]
    ids, weights = values["ids"][token - first], values["weights"][token - first]

    def to_all(access: Access, offset: int, routing: bool) -> None:
        for row in rows[rows >= 0].tolist():
            peer, place = divmod(row, plane_rows)
            here = (ids >= peer * local) & (ids < (peer + 1) * local)
            data = np.where(here, ids if global_ids else ids - peer * local, -1).astype(np.int32).view(np.uint8) if routing else weights
            access.write(call.sim.peer_address(task, window, offset + 4 * place * num_topk, peer), data)
            call.scheduler.split()

    return call.perform(task, (), {
        "slot_ids": lambda a: to_all(a, slot_ids, True), "slot_weights": lambda a: to_all(a, slot_weights, False),
        "table": lambda a: a.write(table + 4 * token * num_topk, rows.view(np.uint8))})


def publish_arrived_rows(call: Call, task: Task, window: int, arrived: int, rank: int, num_ranks: int, epoch: int) -> int:
    """ARRIVED with the number of rows."""
    def publish(access: Access) -> None:
        call.cell(task, "total").read(task)
        for peer, rows in enumerate(task.block.values["total"].tolist()):
            access.store(call.sim.peer_address(task, window, arrived + 8 * rank, peer), tagged(epoch, rows))
            call.scheduler.split()

    return call.perform(task, (window, arrived, rank, num_ranks, epoch), {"arrived": publish})


def take_arrived_rows(call: Call, task: Task, window: int, arrived: int, slot_ids: int, rank: int, num_ranks: int, num_topk: int, plane_rows: int,
                      epoch: int, src_rank_counters: int) -> int:
    """Counts of received rows, and -1 in unused ids."""
    at = call.sim.peer_address(task, window, arrived, rank)
    capacity, warps, values = plane_rows // num_ranks, task.block.launch.warps, task.block.values
    sources = range(task.warp, num_ranks, warps)
    values.setdefault("count", np.zeros(num_ranks, np.int64))
    values.setdefault("total", values["count"])   # the same memory; new where a kernel begins with this

    def take(access: Access) -> None:
        for source in sources:
            word = access.load(access.word(at + 8 * source))
            call.cell(task, "total").write(task, atomic=True)
            values["count"][source] = word & 0xFFFFFF if word >> 32 == epoch else 0

    def store(access: Access) -> None:
        for source in sources:
            access.write(src_rank_counters + 4 * source, np.array([values["count"][source]], np.int32).view(np.uint8))

    def fill(access: Access) -> None:
        call.cell(task, "total").read(task)
        for source, count in enumerate(values["count"].tolist()):   # rows of every source over all warps
            for row in range(count + (task.warp - count) % warps, capacity, warps):
                access.write(call.sim.peer_address(task, window, slot_ids + 4 * num_topk * (source * capacity + row), rank),
                             np.full(4 * num_topk, 0xFF, np.uint8))

    return call.perform(task, (window, arrived, slot_ids, rank, num_ranks, num_topk, plane_rows, epoch, src_rank_counters),
                        {"arrived": take, "src_rank_counters": store, "slot_ids": fill})


def sum_row(call: Call, task: Task, window: int, slot: int, table: int, out: int, token: int, num_topk: int, num_ranks: int, plane_rows: int,
            row_bytes: int, token_type: int, begin_vector: int, end_vector: int, mask: int = 0) -> int:
    """A piece of a combined row, without the rows of ranks in `mask`."""
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    rows: list[int] = []
    total = np.zeros(max(size, 0) // (4 if token_type == 2 else 2), np.float32)

    def pull(access: Access) -> None:
        nonlocal total
        for row in rows:
            if row >= 0 and not mask >> row // plane_rows & 1:
                at = call.sim.peer_address(task, window, slot + row % plane_rows * row_bytes + begin, row // plane_rows)
                total = fma(unpack(access.read(at, size), token_type), np.float32(1), total)
                call.scheduler.split()

    return call.perform(task, (), {
        "table": lambda a: rows.extend(a.read(table + 4 * token * num_topk, 4 * num_topk).view(np.int32).tolist()),
        "slot": pull, "out": lambda a: a.write(out + token * row_bytes + begin, pack(total, token_type))})
