"""Operations of the quantisation recipes on the CPU. See ``ops`` and ``kernels/recipe_ops.cu``."""

from __future__ import annotations

import numpy as np

from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.routing_ops import _row
from ncclep_py.simulator.rows import unpack
from ncclep_py.simulator.task import Task

__all__ = ["e4m3", "quantise", "quantise_row"]

BLOCK, STRETCH = 128, 512


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


def quantise_row(call: Call, task: Task, window: int, slot: int, slot_scales: int, tokens: int, token: int, first: int, num_topk: int,
                 num_experts: int, num_ranks: int, plane_rows: int, row_bytes: int, round_scales: int, begin_stretch: int, end_stretch: int) -> int:
    """A piece of a token's row to its places, quantised."""
    begin, size = 2 * STRETCH * begin_stretch, 2 * STRETCH * (end_stretch - begin_stretch)
    rows_per_rank = num_experts // num_ranks * plane_rows
    made, scales = np.zeros(0, np.uint8), np.zeros(0, np.float32)

    def load(access: Access) -> None:
        nonlocal made, scales
        held = access.read(tokens + token * row_bytes + begin, size)
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
