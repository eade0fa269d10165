"""Arithmetic of rows: exact fp32 fused multiply-add, and bf16/fp16/fp32 bytes to fp32 and back with one rounding to nearest even."""

from __future__ import annotations

import numpy as np

__all__ = ["fma", "pack", "unpack"]

BF16, FP16 = 0, 1


def fma(x: np.ndarray, w: np.float32 | np.ndarray, total: np.ndarray) -> np.ndarray:
    """fp32(x * w + total), rounded once. All fp32.

    The product is exact in fp64. The fp64 sum is rounded to odd, so that the cast to fp32 rounds as if from the exact sum.
    """
    with np.errstate(all="ignore"):
        product = x.astype(np.float64) * w.astype(np.float64)
        addend = total.astype(np.float64)
        rough = product + addend
        back = rough - product
        lost = (product - (rough - back)) + (addend - back)
        odd = (lost != 0) & np.isfinite(rough) & ((rough.view(np.int64) & 1) == 0)
        if odd.any():
            rough = np.where(odd, np.nextafter(rough, np.where(lost > 0, np.inf, -np.inf)), rough)
        return rough.astype(np.float32)


def unpack(row: np.ndarray, token_type: int) -> np.ndarray:
    """Bytes of a row as fp32."""
    if token_type == BF16:
        return (row.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return row.view(np.float16).astype(np.float32) if token_type == FP16 else row.view(np.float32)


def pack(row: np.ndarray, token_type: int) -> np.ndarray:
    """fp32 as bytes of a row, rounded to nearest even."""
    if token_type == BF16:
        bits = row.view(np.uint32)
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(row), np.uint16(0x7FFF), rounded).view(np.uint8)
    with np.errstate(over="ignore"):
        return (row.astype(np.float16) if token_type == FP16 else row).view(np.uint8)
