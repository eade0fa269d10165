"""The oracle: fp32 sums in stated order, one rounding, and the quantisations of the recipes. See the package."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["fma32", "quantize_ds_fp8", "quantize_nvfp4"]


def fma32(x: Tensor, w: Tensor, acc: Tensor) -> Tensor:
    """Fused multiply-add: fp32(x * w + acc) with one rounding, to nearest even. Broadcasts.

    The exact result for all fp32, bf16 and fp16 inputs. x * w is exact in fp64 (2 x 24 bits fit 53, exponents too). The
    fp64 sum need not be: rounding it to fp64 and then to fp32 can be wrong on a tie. So the sum is rounded to odd (an
    inexact result with an even last bit moves to its neighbour on the side of the lost part), after which the cast to
    fp32 rounds as if from the exact value, because fp64 has more than two bits to spare over fp32, subnormals included.
    """
    product, addend = x.double() * w.double(), acc.double()
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)  # Knuth's two-sum: total + lost is the exact sum
    last_bit_even = (total.view(torch.int64) & 1) == 0
    to_odd = torch.isfinite(total) & (lost != 0) & last_bit_even
    side = torch.where(lost > 0, torch.inf, -torch.inf).double()
    return torch.where(to_odd, torch.nextafter(total, side), total).float()


def quantize_ds_fp8(tokens: Tensor, round_scales: bool = False) -> tuple[Tensor, Tensor]:
    """DS_FP8 dispatch quantisation: bf16 [T, H] -> q float8_e4m3fn [T, H] and scales fp32 [T, H/128].

    A value is worth q * scale. Per block of 128 columns, in fp32: amax = max(1e-4, max|x|). The stored scale is amax *
    fp32(1/448), and q = x * (448 / amax) rounded to nearest even and held within +-448. With round_scales the stored
    scale is raised to the next power of two (unless it is one) and q = x / scale. A block that holds NaN or Inf is
    unspecified. H is any multiple of 128 here (nccl_ep asks for 512).
    """
    num_tokens, hidden = tokens.shape
    if tokens.dtype != torch.bfloat16 or hidden % 128:
        raise ValueError(f"tokens must be bfloat16 [T, a multiple of 128]: got {tokens.dtype} {list(tokens.shape)}")
    blocks = tokens.float().reshape(num_tokens, hidden // 128, 128)
    amax = blocks.abs().amax(dim=2).clamp(min=1e-4)
    scale_inv = amax * torch.tensor(1 / 448, dtype=torch.float32)
    scale = torch.tensor(448.0) / amax  # not 448.0 / amax, which torch computes as 448 * (1 / amax), rounded twice
    if round_scales:
        bits = scale_inv.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # biased by 127; +1 unless already a power of two
        scale_inv = (exponent << 23).int().view(torch.float32)
        scale = ((254 - exponent) << 23).int().view(torch.float32)  # the exact reciprocal
    quantized = (blocks * scale[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantized.reshape(num_tokens, hidden), scale_inv


def quantize_nvfp4(rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 combine quantisation: bf16 [N, H], a scale g per row fp32 [N] -> q fp32 [N, H] and block factors fp32 [N, H/16].

    A value is worth q * factor, q one of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives (E2M1). Per block of 16 columns, in
    fp32: f = g * (max|x| * fp32(1/6)), s = f to E4M3 (nearest even, at most 448), q = x * inverse to E2M1 (nearest even, at
    most 6) with inverse = 1 / (s * (1/g)), 0 where f = 0; 1/g counts as 0 for g = 0. The factor is s * (1/g), where an
    infinite 1/g counts as 1. (The reference library: the same with approximate reciprocals.) NaN and Inf are unspecified.
    """
    num_rows, hidden = rows.shape
    if rows.dtype != torch.bfloat16 or hidden % 16 or scales.shape != (num_rows,):
        raise ValueError(f"rows must be bfloat16 [N, a multiple of 16] with N scales: got {rows.dtype} {list(rows.shape)}")
    blocks, g, one = rows.float().reshape(num_rows, hidden // 16, 16), scales.float()[:, None], torch.tensor(1.0)
    f = g * (blocks.abs().amax(dim=2) * torch.tensor(1 / 6, dtype=torch.float32))
    s = f.clamp(max=448).to(torch.float8_e4m3fn).float()
    inverse_g = torch.where(g == 0, 0.0, one / g)
    inverse = torch.where(f == 0, 0.0, one / (s * inverse_g))
    y = (blocks * inverse[:, :, None]).nan_to_num(nan=0.0, posinf=6.0, neginf=-6.0).clamp(-6, 6)
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    q = torch.round(y / step) * step  # torch rounds halves to even
    decode_g = torch.where(torch.isinf(one / g), 1.0, one / g)
    return q.reshape(num_rows, hidden), s * decode_g


def _sum32(rows: Iterable[Tensor], hidden: int) -> Tensor:
    """fp32 [H]: +0 + row + row + ..., in the order given."""
    acc = torch.zeros(hidden, dtype=torch.float32)
    for row in rows:
        acc = acc + row.float()
    return acc
