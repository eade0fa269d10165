"""What travels of a row under each quantisation recipe (`DispatchQuant`, `CombineQuant`), and the checks of its tensors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ncclep_py.arguments import check_tensor, check_tokens, refused
from ncclep_py.config import DispatchConfig, DispatchQuant, GroupConfig, TokenType
from ncclep_py.kernels.shape import Wire
from ncclep_py.refusal import Refusal

if TYPE_CHECKING:
    import torch

    from ncclep_py.communicator import Communicator
    from ncclep_py.handle import DispatchInputs

__all__ = ["Sent", "check_forwardable", "check_nvfp4", "check_quantisable", "check_recipe", "opaque_types", "scale_types"]

FP8_BLOCK = 128
"""Columns that share a scale in DS_FP8."""

FP8_ALIGNMENT = 512
"""DS_FP8: `hidden` is a multiple of this, so that scale rows are whole 16-byte vectors, too."""

MAX_SCALE_BYTES = 255 * 16
"""Most bytes of a scale row in QUANT_FWD."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """Rows as they travel and arrive.

    Attributes:
        wire: for the kernel.
        code: recipe, and whether scales are rounded, for the signature.
        token_code: element type for the signature; every rank must send the same.
        dtype, width: torch dtype and elements of a received row.
        scale_dtype, scale_width: of its scale row.
    """

    wire: Wire
    code: int
    token_code: int
    dtype: Any
    width: int
    scale_dtype: Any
    scale_width: int


def _types(*names: str) -> tuple[Any, ...]:
    """The torch dtypes of these names that this torch has."""
    import torch

    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


def opaque_types() -> tuple[Any, ...]:
    """Token dtypes of QUANT_FWD; packed FP4 is float4_e2m1fn_x2 or uint8, two values a byte."""
    return _types("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "uint8")


def scale_types() -> tuple[Any, ...]:
    """Scale dtypes of QUANT_FWD; E8M0 is float8_e8m0fnu or uint8."""
    return _types("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint8")


def check_recipe(given: DispatchInputs, num_tokens: int, config: DispatchConfig, group: GroupConfig, device: torch.device) -> Sent:
    """Check a dispatch's tokens and scales under a recipe other than NONE, and say how they travel.

    Args:
        given: the caller's inputs.
        num_tokens: tokens of the routing.
        config: the call's config.
        group: the group's config.
        device: of the rank.
    """
    check_tokens("tokens", num_tokens, group.max_dispatch_tokens_per_rank)
    made = _forwarded if config.quant_recipe is DispatchQuant.FWD else _quantised
    return made(given, num_tokens, config, group, device)


def check_quantisable(recipe: str, group: GroupConfig) -> None:
    """``ValueError`` unless rows of the group can be quantised by NVFP4 or DS_FP8."""
    if group.token_type is not TokenType.BF16:
        raise ValueError(f"{recipe} quantises bfloat16 rows, this group's are {group.token_type.torch_dtype()}")
    if group.hidden % FP8_ALIGNMENT:
        raise ValueError(f"hidden must be a multiple of {FP8_ALIGNMENT} for {recipe}, got {group.hidden}")


def check_forwardable(sent: int, beside: int, group: GroupConfig) -> None:
    """``ValueError`` unless QUANT_FWD can send rows of `sent` bytes with `beside` bytes of scales."""
    for name, size in (("tokens", sent), ("inputs.scales", beside)):
        if size == 0 or size % 16:
            raise refused(ValueError(f"{name} must have rows of a multiple of 16 bytes in QUANT_FWD, got {size} bytes"), Refusal.SHAPE)
    if beside > MAX_SCALE_BYTES:
        raise refused(ValueError(f"inputs.scales must have rows of at most {MAX_SCALE_BYTES} bytes, got {beside}"), Refusal.SHAPE)
    if sent + beside > group.token_bytes:
        raise refused(ValueError(f"tokens and inputs.scales must fit {group.token_bytes} bytes a row together (GroupConfig.max_token_bytes), got "
                                 f"{sent} + {beside}"), Refusal.SHAPE)


def check_nvfp4(scales: Any, planes: tuple[int, ...], group: GroupConfig, comm: Communicator) -> None:
    """Check what an NVFP4 combine needs beside its rows.

    Args:
        scales: ``inputs.scales``, ``[*planes, 1]`` float32: the scale of each row, 2688 / (its largest magnitude) or so, 0 for a row of zeros.
        planes: planes of received rows and rows of one.
        group: the group's config.
        comm: the rank's communicator.
    """
    import torch

    if not comm.fp4:
        raise NotImplementedError("NVFP4 quantisation of combine needs a device with FP4 conversions, of compute capability 10.0 or newer, which "
                                  f"rank {comm.rank}'s ({comm.device}) is not; leave CombineConfig.quant_recipe out")
    check_quantisable("NVFP4", group)
    if scales is None:
        raise ValueError("inputs.scales must be given to an NVFP4 combine, one float32 a row")
    check_tensor("inputs.scales", scales, (*planes, 1), (torch.float32,), comm.device, aligned=False)


def _forwarded(given: DispatchInputs, num_tokens: int, config: DispatchConfig, group: GroupConfig, device: torch.device) -> Sent:
    tokens, scales = given.tokens, given.scales
    if config.round_scales:
        raise ValueError("round_scales must be left out of a QUANT_FWD dispatch, which does not touch scales")
    if scales is None:
        raise ValueError("inputs.scales must be given to a QUANT_FWD dispatch")
    check_tensor("tokens", tokens, (num_tokens, None), opaque_types(), device)
    check_tensor("inputs.scales", scales, (num_tokens, None), scale_types(), device)
    width, scale_width = int(tokens.shape[1]), int(scales.shape[1])
    sent, beside = width * tokens.element_size(), scale_width * scales.element_size()
    check_forwardable(sent, beside, group)
    return Sent(Wire(sent, beside), int(DispatchQuant.FWD), opaque_types().index(tokens.dtype), tokens.dtype, width, scales.dtype, scale_width)


def _quantised(given: DispatchInputs, num_tokens: int, config: DispatchConfig, group: GroupConfig, device: torch.device) -> Sent:
    import torch

    check_quantisable("DS_FP8", group)
    if given.scales is not None:
        raise ValueError("inputs.scales must be left out of a DS_FP8 dispatch, which makes them")
    check_tensor("tokens", given.tokens, (num_tokens, group.hidden), (torch.bfloat16,), device)
    blocks, rounded = group.hidden // FP8_BLOCK, bool(config.round_scales)
    return Sent(Wire(group.hidden, 4 * blocks, True, rounded), int(DispatchQuant.DS_FP8E3M4) | rounded << 2, int(TokenType.BF16),
                torch.float8_e4m3fn, group.hidden, torch.float32, blocks)
