"""High-throughput operations that move rows and their weights, on the CPU. See ``ops``."""

from __future__ import annotations

import numpy as np

from ncclep_py.errors import Code, Phase
from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.ht_ops import ONE, _part, _totals, _worker
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.waits import LOW

__all__ = [
    "ht_check_rows",
    "ht_clear_ids",
    "ht_copy_rows",
    "ht_gather_row",
    "ht_gather_weights",
    "ht_scatter_row",
    "ht_scatter_weights",
    "ht_zero_pads",
]


def _table(access: Access, table: int, token: int, num_topk: int) -> list[int]:
    """One token's routes or places."""
    return access.read(table + 8 * token * num_topk, 8 * num_topk).view(np.int64).tolist()


def _row(call: Call, task: Task, window: int, slot: int, route: int, row_bytes: int) -> int:
    """Address of a route's row."""
    return call.sim.peer_address(task, window, slot + (route & LOW) * row_bytes, route >> 32 & 0xFFFF)


def ht_scatter_row(call: Call, task: Task, window: int, slot: int, tokens: int, routes: int, token: int, num_topk: int, row_bytes: int,
                   begin_vector: int, end_vector: int) -> int:
    """A piece of a token's row to its places."""
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    found: list[int] = []
    held = np.zeros(0, np.uint8)

    def load(access: Access) -> None:
        nonlocal held
        held = access.read(tokens + token * row_bytes + begin, size).copy()

    def store(access: Access) -> None:
        for route in found:
            if route >= 0:
                access.write(_row(call, task, window, slot, route, row_bytes) + begin, held)
                call.scheduler.split()

    return call.perform(task, (), {"routes": lambda a: found.extend(_table(a, routes, token, num_topk)), "tokens": load, "slot": store})


def ht_scatter_weights(call: Call, task: Task, window: int, recv_idx: int, recv_weights: int, weights: int, routes: int, places: int, token: int,
                       num_topk: int, num_experts: int, num_ranks: int, by_rank: int, global_ids: int) -> int:
    """Weights and ids of a token to its rows."""
    local = num_experts // num_ranks
    route, place = list[int](), list[int]()
    scale = np.zeros(0, np.float32)

    def load(access: Access) -> None:
        nonlocal scale
        scale = access.read(weights + 4 * token * num_topk, 4 * num_topk).view(np.float32).copy()

    def sums() -> dict[int, np.float32]:
        found: dict[int, np.float32] = {}
        with np.errstate(all="ignore"):
            for p, w in zip(place, scale, strict=True):
                if p >= 0:
                    found[p] = w if p not in found else found[p] + w
        return found

    def at(base: int, size: int, rank: int, row: int, column: int) -> int:
        return call.sim.peer_address(task, window, base + size * (row * num_topk + column if by_rank else row), rank)

    def columns() -> list[tuple[int, int, int]]:
        """(rank, row, column) without an id."""
        rows = [(r >> 32 & 0xFFFF, r & LOW, r >> 48) for r in route if r >= 0 and by_rank]
        return [(rank, row, column) for rank, row, used in rows for column in range(used, num_topk)]

    def store_ids(access: Access) -> None:
        for rank, row, column in columns():
            access.write(at(recv_idx, 8, rank, row, column), np.array([-1], np.int64).view(np.uint8))
        for p in sums() if by_rank else ():
            expert = p >> 40
            value = expert if global_ids else expert % local
            access.write(at(recv_idx, 8, expert // local, p & LOW, p >> 32 & 255), np.array([value], np.int64).view(np.uint8))
        call.scheduler.split()

    def store_weights(access: Access) -> None:
        for rank, row, column in columns():
            access.write(at(recv_weights, 4, rank, row, column), np.zeros(4, np.uint8))
        for p, w in sums().items():
            access.write(at(recv_weights, 4, (p >> 40) // local, p & LOW, p >> 32 & 255), np.array([w], np.float32).view(np.uint8))

    return call.perform(task, (), {"routes": lambda a: route.extend(_table(a, routes, token, num_topk)),
                                   "place_table": lambda a: place.extend(_table(a, places, token, num_topk)),
                                   "weights": load, "recv_idx": store_ids, "recv_weights": store_weights})


def ht_zero_pads(call: Call, task: Task, window: int, slot: int, zones: int, rank: int, num_local: int, row_bytes: int) -> int:
    """Pad rows of mine."""
    worker, workers = _worker(task)
    pads: list[int] = []

    def load(access: Access) -> None:
        begin, used, padded = access.read(zones, 12 * num_local).view(np.int32).reshape(3, num_local).tolist()
        every = [b + i for b, n, m in zip(begin, used, padded, strict=True) for i in range(n, m)]
        pads.extend(every[worker::workers])

    def store(access: Access) -> None:
        for row in pads:
            access.write(call.sim.peer_address(task, window, slot + row * row_bytes, rank), np.zeros(row_bytes, np.uint8))

    return call.perform(task, (window, slot, zones, rank, num_local, row_bytes), {"zones": load, "slot": store})


def ht_clear_ids(call: Call, task: Task, window: int, recv_idx: int, recv_weights: int, zones: int, rank: int, num_local: int, num_topk: int,
                 rows: int) -> int:
    """Ids and weights of my slot beyond the received rows."""
    mine = (0, 0)

    def load(access: Access) -> None:
        nonlocal mine
        received = int(access.read(_totals(zones, num_local), 8).view(np.int64)[0])
        mine = _part(received * num_topk, max(rows, received) * num_topk, *_worker(task))

    def store(access: Access, base: int, fill: np.ndarray) -> None:
        access.write(call.sim.peer_address(task, window, base + mine[0] * len(fill), rank), np.tile(fill, mine[1] - mine[0]))

    return call.perform(task, (window, recv_idx, recv_weights, zones, rank, num_local, num_topk, rows), {
        "zones": load, "recv_idx": lambda a: store(a, recv_idx, np.full(8, 255, np.uint8)),
        "recv_weights": lambda a: store(a, recv_weights, np.zeros(4, np.uint8))})


def ht_check_rows(call: Call, task: Task, zones: int, num_local: int, rows: int, rank: int, epoch: int, fail: int, record: int) -> int:
    """Whether the caller sees all received rows."""
    def check(access: Access) -> None:
        received = int(access.read(_totals(zones, num_local), 8).view(np.int64)[0])
        if received > rows:
            call.note(task, fail, record, Code.OVERFLOW, epoch, Phase.SLOT, rank, rank, rank, received, rows)

    return call.perform(task, (zones, num_local, rows, rank, epoch, fail, record), {"zones": check})


# ---- combine ---------------------------------------------------------------------------------------------------------------------
def ht_gather_row(call: Call, task: Task, window: int, slot: int, routes: int, out: int, token: int, num_topk: int, row_bytes: int, token_type: int,
                  begin_vector: int, end_vector: int) -> int:
    """A piece of a combined row."""
    begin, size = 16 * begin_vector, 16 * (end_vector - begin_vector)
    found: list[int] = []
    total = np.zeros(max(size, 0) // (4 if token_type == 2 else 2), np.float32)

    def pull(access: Access) -> None:
        nonlocal total
        for route in found:
            if route >= 0:
                piece = access.read(_row(call, task, window, slot, route, row_bytes) + begin, size)
                total = fma(unpack(piece, token_type), ONE, total)
                call.scheduler.split()

    return call.perform(task, (), {"routes": lambda a: found.extend(_table(a, routes, token, num_topk)), "slot": pull,
                                   "out": lambda a: a.write(out + token * row_bytes + begin, pack(total, token_type))})


def ht_gather_weights(call: Call, task: Task, window: int, recv_weights: int, places: int, grads: int, token: int, num_topk: int, num_experts: int,
                      num_ranks: int, by_rank: int) -> int:
    """Gradients of a token's weights."""
    local = num_experts // num_ranks
    place: list[int] = []
    found = np.zeros(num_topk, np.float32)

    def pull(access: Access) -> None:
        for k, p in enumerate(place):
            if p >= 0:
                row = (p & LOW) * num_topk + (p >> 32 & 255) if by_rank else p & LOW
                found[k] = access.read(call.sim.peer_address(task, window, recv_weights + 4 * row, (p >> 40) // local), 4).view(np.float32)[0]

    return call.perform(task, (), {"place_table": lambda a: place.extend(_table(a, places, token, num_topk)), "recv_weights": pull,
                                   "grads": lambda a: a.write(grads + 4 * token * num_topk, found.view(np.uint8))})


# ---- a caller's own tensors --------------------------------------------------------------------------------------------------------
def ht_copy_rows(call: Call, task: Task, source: int, target: int, zones: int, num_local: int, rows: int, row_bytes: int) -> int:
    """Received rows from one place to another."""
    mine = (0, 0)
    held = np.zeros(0, np.uint8)

    def count(access: Access) -> None:
        nonlocal mine
        received = int(access.read(_totals(zones, num_local), 8).view(np.int64)[0])
        size, (worker, workers) = min(received, rows) * row_bytes, _worker(task)
        begin, end = _part(0, size // 16, worker, workers)   # whole vectors, and the rest to the last
        mine = (16 * begin, size if worker == workers - 1 else 16 * end)

    def load(access: Access) -> None:
        nonlocal held
        held = access.read(source + mine[0], mine[1] - mine[0]).copy()

    return call.perform(task, (), {"zones": count, "source": load, "target": lambda a: a.write(target + mine[0], held)})
