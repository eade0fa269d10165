"""Operations of the quantisation recipes on the CPU. See ``ops`` and ``kernels/recipe_ops.cu``."""

from __future__ import annotations

import numpy as np

from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.routing_ops import _row
from ncclep_py.simulator.rows import fma, pack, unpack
from ncclep_py.simulator.task import Task

__all__ = ["e2m1", "e4m3", "pack_nvfp4", "pack_rows", "quantise", "quantise_row", "sum_packed_row", "unpack_nvfp4"]

BLOCK, STRETCH = 128, 512
PACKED_STRETCH = 288
"""Bytes of 512 packed columns: 256 of E2M1, 32 E4M3 scales."""

HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32) / 2
"""E2M1 values of the codes 0 to 7."""


def e4m3(x: np.ndarray) -> np.ndarray:
    """fp32 to the bytes of float8_e4m3fn: nearest even, held within +-448."""
    size = np.nan_to_num(np.minimum(np.abs(x).astype(np.float64), 448.0))
    exponent = np.maximum(np.frexp(size)[1] - 1, -6)   # subnormals share the exponent of the smallest normal
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int64)   # in units of the last place; 16 is 8 of the next exponent
    code = np.where(steps < 8, steps, (exponent + 7) * 8 + steps - 8)
    return (np.where(np.isnan(x), 127, code) + np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def quantise(row: np.ndarray, round_scales: bool) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of whole blocks of bf16: (bytes of E4M3, scales fp32)."""
    blocks = unpack(row, 0).reshape(-1, BLOCK)
    amax = np.maximum(np.abs(blocks).max(1), np.float32(1e-4))
    stored, scale = amax * np.float32(1 / 448), np.float32(448) / amax
    if round_scales:
        bits = stored.view(np.uint32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        stored, scale = (exponent << 23).astype(np.uint32).view(np.float32), ((254 - exponent) << 23).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        return e4m3(blocks * scale[:, None]).reshape(-1), stored


def quantise_row(call: Call, task: Task, window: int, slot: int, slot_scales: int, tokens: int, token: int, fetched: int, first: int,
                 reserved: int, num_topk: int, num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, round_scales: int,
                 begin_stretch: int, end_stretch: int) -> int:
    """A piece of a token's row to its places, quantised."""
    begin, size = 2 * STRETCH * begin_stretch, 2 * STRETCH * (end_stretch - begin_stretch)
    rows_per_rank = num_experts // num_ranks * plane_rows
    made, scales = np.zeros(0, np.uint8), np.zeros(0, np.float32)

    def load(access: Access) -> None:
        nonlocal made, scales
        held = task.take("row") if token == fetched else access.read(tokens + token * row_bytes + begin, size)
        if size > 0:
            made, scales = quantise(held, round_scales != 0)

    def to_all(access: Access, offset: int, width: int, data: np.ndarray, at: int) -> None:
        call.cell(task, "rows").read(task)
        for row in task.block.values["rows"][(token - first) * num_topk:(token - first + 1) * num_topk].tolist():
            if row >= 0:
                access.write(_row(call, task, window, offset, row, rows_per_rank, width) + at, data)
                call.scheduler.split()

    return call.perform(task, (), {
        "tokens": load, "slot": lambda a: to_all(a, slot, row_bytes // 2, made, STRETCH * begin_stretch),
        "slot_scales": lambda a: to_all(a, slot_scales, row_bytes // 64, scales.view(np.uint8), 16 * begin_stretch)})


# ---- NVFP4 -------------------------------------------------------------------------------------------------------------------------
def e2m1(y: np.ndarray) -> np.ndarray:
    """fp32 to codes of E2M1: nearest even, held within +-6."""
    size = np.abs(y)
    code = sum((size > at if i % 2 == 0 else size >= at).astype(np.uint8) for i, at in enumerate((HALVES[1:] + HALVES[:-1]) / 2))
    return np.asarray(code, np.uint8) | np.signbit(y).astype(np.uint8) << 3


def e4m3_value(codes: np.ndarray) -> np.ndarray:
    """fp32 of E4M3 bytes that are not negative."""
    return (codes.astype(np.uint32) << 20).view(np.float32) * np.float32(2.0**120)


def pack_nvfp4(row: np.ndarray, g: np.float32) -> np.ndarray:
    """Bytes of a bf16 row as a packed row."""
    blocks, one = unpack(row, 0).reshape(-1, 16), np.float32(1)
    with np.errstate(all="ignore"):
        f = g * (np.abs(blocks).max(1) * np.float32(1 / 6))
        scales = e4m3(f)
        inverse = np.where(f == 0, np.float32(0), one / (e4m3_value(scales) * (one / g if g else np.float32(0))))
        codes = e2m1(blocks * inverse[:, None])
    values = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(-1, 256)
    return np.concatenate([np.concatenate([values, scales.reshape(-1, 32)], 1).reshape(-1), np.array([g], np.float32).view(np.uint8)])


def unpack_nvfp4(packed: np.ndarray, g: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Whole stretches of a packed row as (q, factors), both fp32, a factor per 16 columns; `g`: the row's scale."""
    stretches = packed.reshape(-1, PACKED_STRETCH)
    codes = np.stack([stretches[:, :256] & 15, stretches[:, :256] >> 4], 2).reshape(-1)
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / g
    scales = e4m3_value(np.ascontiguousarray(stretches[:, 256:]).reshape(-1))
    return np.where(codes >= 8, -HALVES[codes & 7], HALVES[codes & 7]), scales * (np.float32(1) if np.isinf(inverse) else inverse)


def pack_rows(call: Call, task: Task, window: int, slot: int, rank: int, counters: int, row_scales: int, own_planes: int, plane_capacity: int,
              row_bytes: int) -> int:
    """This warp's share of the received rows, packed in place."""
    launch, rows = task.block.launch, call.sim.peer_address(task, window, slot, rank)
    mine: list[int] = []
    held: list[np.ndarray] = []
    scales: list[np.float32] = []

    def count(access: Access) -> None:
        before, warps = 0, launch.blocks * launch.warps
        for plane, n in enumerate(access.read(counters, 4 * own_planes).view(np.int32).tolist()):
            mine.extend(plane * plane_capacity + i for i in range(n) if (before + i) % warps == task.block.index * launch.warps + task.warp)
            before += n

    def store(access: Access) -> None:
        for row, data, g in zip(mine, held, scales, strict=True):
            access.write(rows + row * row_bytes, pack_nvfp4(data, g))
            call.scheduler.split()

    def access_rows(access: Access) -> None:
        if access.effect.kind == "st":
            store(access)
        else:
            held.extend(access.read(rows + r * row_bytes, row_bytes).copy() for r in mine)

    return call.perform(task, (), {
        "counters": count, "slot": access_rows,
        "row_scales": lambda a: scales.extend(a.read(row_scales + 4 * r, 4).view(np.float32)[0] for r in mine)})


def sum_packed_row(call: Call, task: Task, window: int, slot: int, table: int, weights: int, out: int, token: int, num_topk: int, num_experts: int,
                   num_ranks: int, plane_rows: int, row_bytes: int, begin_stretch: int, end_stretch: int, mask: int = 0) -> int:
    """A piece of a combined row, without the rows of ranks in `mask`."""
    rows_per_rank = num_experts // num_ranks * plane_rows
    rows: list[int] = []
    parts: list[tuple[int, np.ndarray, np.ndarray]] = []
    w = np.ones(num_topk, np.float32)
    total = np.zeros(max(end_stretch - begin_stretch, 0) * STRETCH, np.float32)

    def pull(access: Access) -> None:
        for k, row in enumerate(rows):
            if row >= 0 and not mask >> row // rows_per_rank & 1:
                at = _row(call, task, window, slot, row, rows_per_rank, row_bytes)
                g = access.read(at + row_bytes // 1024 * PACKED_STRETCH, 4).view(np.float32)[0]
                packed = access.read(at + PACKED_STRETCH * begin_stretch, PACKED_STRETCH * (end_stretch - begin_stretch))
                parts.append((k, *unpack_nvfp4(packed, g)))
                call.scheduler.split()

    def read_weights(access: Access) -> None:
        if weights:
            w[:] = access.read(weights + 4 * token * num_topk, 4 * num_topk).view(np.float32)

    def store(access: Access) -> None:
        nonlocal total
        for k, q, factors in parts:
            total = fma(q, np.repeat(factors * w[k], 16), total)
        access.write(out + token * row_bytes + 1024 * begin_stretch, pack(total, 0))

    return call.perform(task, (), {
        "table": lambda a: rows.extend(a.read(table + 4 * token * num_topk, 4 * num_topk).view(np.int32).tolist()),
        "slot": pull, "weights": read_weights, "out": store})
