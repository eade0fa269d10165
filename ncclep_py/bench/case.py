"""`Case`: one point of a benchmark, the same for every implementation."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["BUDGETS", "DTYPES", "IDENTITY", "Case"]

ALGORITHMS = ("ll", "ht")
LAYOUTS = {"ll": ("expert_major", "rank_major"), "ht": ("flat", "expert_major")}
RECIPES = {"ll": ("none", "ds_fp8", "quant_fwd"), "ht": ("none", "quant_fwd")}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MODES = ("local", "processes", "torchrun")
BUDGETS = ("worst", "exact")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        algorithm: ``ll`` or ``ht``.
        layout: order of received rows: ``expert_major``, ``rank_major`` (ll), ``flat`` (ht).
        ranks: R.
        experts: E, a multiple of R.
        topk: K.
        hidden: columns of a row.
        tokens: tokens per rank.
        sms: multiprocessors each rank may use.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        recipe: ``none``, ``ds_fp8`` or ``quant_fwd`` (E4M3 rows with float32 scales per 128 columns, made by the caller), of dispatch.
        routing: a name of ``bench.routing.ROUTINGS``, or the path of a recorded routing.
        alignment: ht expert_major, rows a zone is padded to.
        backward: ht, also measure both passes.
        mode: ``local`` (one process), ``processes`` (one per rank, started here), ``torchrun``.
        backend: ``nccl`` or ``sim``.
        gpus: devices the ranks are spread over.
        budget: ht, rows a rank has room for: what any routing needs (``worst``) or this one (``exact``).
    """

    algorithm: str = "ll"
    layout: str = "expert_major"
    ranks: int = 8
    experts: int = 128
    topk: int = 8
    hidden: int = 7168
    tokens: int = 128
    sms: int = 16
    dtype: str = "bf16"
    recipe: str = "none"
    routing: str = "uniform"
    alignment: int = 0
    backward: bool = False
    mode: str = "local"
    backend: str = "nccl"
    gpus: int = 1
    budget: str = "worst"

    def __post_init__(self) -> None:
        for name, allowed in (("algorithm", ALGORITHMS), ("layout", LAYOUTS.get(self.algorithm, ())), ("dtype", tuple(DTYPES)),
                              ("recipe", RECIPES.get(self.algorithm, ())), ("mode", MODES), ("backend", ("nccl", "sim")),
                              ("budget", BUDGETS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} of a {self.algorithm} case must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("ranks", "experts", "topk", "hidden", "tokens", "sms", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.experts % self.ranks:
            raise ValueError(f"experts must be a multiple of ranks, {self.ranks}, got {self.experts}")
        if self.topk > self.experts:
            raise ValueError(f"topk must be at most experts, {self.experts}, got {self.topk}")
        if self.row_bytes % 16:
            raise ValueError(f"hidden must make rows of a multiple of 16 bytes, got {self.hidden} x {self.itemsize} = {self.row_bytes} bytes")
        if self.recipe != "none" and self.dtype != "bf16":
            raise ValueError(f"recipe {self.recipe} needs dtype bf16, got {self.dtype}")
        if self.recipe != "none" and self.hidden % 512:
            raise ValueError(f"recipe {self.recipe} needs hidden to be a multiple of 512, got {self.hidden}")
        if self.backward and self.algorithm != "ht":
            raise ValueError("backward needs algorithm ht: low latency has no backward pass")

    @property
    def local_experts(self) -> int:
        """Experts on a rank."""
        return self.experts // self.ranks

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a row."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def sent_bytes(self) -> int:
        """Bytes of a row as dispatch sends it, its scales included."""
        return self.hidden + 4 * self.hidden // 128 if self.recipe != "none" else self.hidden * self.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as combine moves it."""
        return self.hidden * self.itemsize

    def torch_dtype(self) -> Any:
        """The torch type of rows."""
        import torch

        return getattr(torch, DTYPES[self.dtype])

    def name(self) -> str:
        """The case in a line."""
        parts = [self.algorithm, self.layout, f"{self.tokens} tokens", f"{self.ranks} ranks x {self.sms} SMs", f"E={self.experts}", f"K={self.topk}",
                 f"H={self.hidden}", self.dtype]
        parts += [self.recipe] * (self.recipe != "none") + [self.routing] * (self.routing != "uniform") + ["backward"] * self.backward
        parts += [f"{self.budget} budget"] * (self.budget != "worst")
        return ", ".join(parts)


IDENTITY = tuple(field.name for field in dataclasses.fields(Case))
"""Fields that say which case a row of a record is."""
