"""What a caller says about a group and a handle: enums and frozen configs, checked once, with a sentence.

Names and numbers are those of NVIDIA's ``nccl.ep`` 0.1 (``reference``: its header ``nccl_ep.h``), so that a program written for it
keeps its meaning. Nothing here touches a device, torch or numba.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any, TypeVar

from ncclep_py.member_map import MAX_MASKED_RANKS

if TYPE_CHECKING:
    import torch

__all__ = [
    "AUTO",
    "Algorithm",
    "CombineConfig",
    "CombineQuant",
    "DispatchConfig",
    "DispatchQuant",
    "ExpertIdKind",
    "GroupConfig",
    "HandleConfig",
    "Layout",
    "OverflowPolicy",
    "PassDir",
    "TokenType",
    "ZeroCopyMode",
]

AUTO = 0
"""Value of an integer field that the library is to choose."""

MAX_TOPK = 32
DEFAULT_TIMEOUT_NS = 100_000_000_000
ROW_ALIGNMENT = 16
MAX_ROW_BYTES = (1 << 22) - ROW_ALIGNMENT
"""Bytes: every row is a whole number of 16-byte vectors."""


class Algorithm(enum.IntEnum):
    """Latency-bound decoding or bandwidth-bound training and prefill; fixed for a group."""

    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(enum.IntEnum):
    """Order of received rows. (The byte plan of a window is the memory map, never "layout".)"""

    UNSET = 0
    EXPERT_MAJOR = 1
    """LL: ``[num_local_experts, num_ranks * max_dispatch_tokens_per_rank, hidden]``; HT: zones of a 2-D tensor."""
    RANK_MAJOR = 2
    """LL: ``[num_ranks, max_dispatch_tokens_per_rank, hidden]``."""
    FLAT = 3
    """HT: ``[num_recv_tokens, hidden]``, one row per (token, destination rank)."""


class PassDir(enum.IntEnum):
    """Forward or backward; backward exists in HT only."""

    FWD = 0
    BWD = 1


class ZeroCopyMode(enum.IntEnum):
    """Whether user windows are used when given (AUTO), never (OFF), or must be given (ON)."""

    AUTO = 0
    OFF = 1
    ON = 2


class OverflowPolicy(enum.IntEnum):
    """HT with a fixed budget: rows beyond it are left out of the routing. TRAP: besides, every rank raises `EpOverflowError` at a later call or
    ``Group.check()``; DROP: nobody does. AUTO means TRAP."""

    AUTO = 0
    TRAP = 1
    DROP = 2


class ExpertIdKind(enum.IntEnum):
    """Numbering of received expert ids. AUTO means LOCAL."""

    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class DispatchQuant(enum.IntEnum):
    """What dispatch does to a row: nothing, carry bytes and scales, or quantise bf16 to E4M3 with a scale per 128 columns."""

    NONE = 0
    FWD = 1
    DS_FP8E3M4 = 2


class CombineQuant(enum.IntEnum):
    """What combine does to a row on the wire."""

    NONE = 0
    NVFP4 = 1


class TokenType(enum.IntEnum):
    """Element type of token rows, as the kernels number it."""

    BF16 = 0
    FP16 = 1
    FP32 = 2

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is TokenType.FP32 else 2

    @classmethod
    def of(cls, dtype: torch.dtype, argument: str = "dtype") -> TokenType:
        """The token type of a torch dtype; ``TypeError`` names the argument and what is supported."""
        found = {"torch.bfloat16": cls.BF16, "torch.float16": cls.FP16, "torch.float32": cls.FP32}.get(str(dtype))
        if found is None:
            raise TypeError(f"{argument} must be torch.bfloat16, torch.float16 or torch.float32, got {dtype}")
        return found

    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of this token type."""
        import torch

        return (torch.bfloat16, torch.float16, torch.float32)[self]


def _whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """``TypeError`` or ``ValueError`` unless `value` is an int in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: {value!r}")
    if value < least or (most is not None and value > most):
        span = f"at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name} must be {span}, got {value}")


Member = TypeVar("Member", bound=enum.IntEnum)


def _member(name: str, kind: type[Member], value: Any) -> Member:
    """`value` as a member of `kind`, by member or number; ``ValueError`` says which there are."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} must be one of {', '.join(f'{kind.__name__}.{m.name}' for m in kind)}, got {value!r}") from None


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """Everything the ranks of a group must agree on.

    Attributes:
        num_experts: experts over all ranks, a multiple of the number of ranks; expert ``e`` lives on rank ``e // (E / R)``.
        max_dispatch_tokens_per_rank: most tokens a rank feeds into one dispatch; the same on all ranks.
        hidden: elements of a token row. ``hidden * itemsize`` must be a multiple of 16 bytes. If left out, as many as `max_token_bytes` holds.
        dtype: torch dtype of token rows: bfloat16, float16 or float32.
        num_topk: most experts per token of any handle, 1 to 32.
        algorithm: LOW_LATENCY or HIGH_THROUGHPUT.
        max_recv_tokens_per_rank: HT budget of received rows; AUTO sizes by query. LL ignores it.
        max_num_sms: most streaming multiprocessors one operation may use, from 1 (a block runs on each); AUTO takes this rank's share of its GPU, at
            most 64. The ranks on one GPU together may not want more than it has.
        num_slots: payload slots of the symmetric window, i.e. how many dispatches may be live at once.
        slot_layout: LL: the only layout of the group's handles, if there is only one; UNSET allows both. RANK_MAJOR makes slots E / R times smaller.
        num_staging_slots: staging slots for staged operations (``send_only``), each ``M * num_topk`` rows; 0 takes no memory and refuses
            ``send_only``. w staged combines in flight need w of them, and 2w so that none waits for the slowest rank's last `Handle.complete`.
            Over several teams they cost messages of R * M rows for every payload slot but the first, too.
            With ``enable_mask`` there are none, and none are needed: ``send_only`` does the whole operation at once.
        timeout_ns: nanoseconds a device-side wait may last (HT over several teams: up to 2.5 times as long, if for ranks that wait themselves);
            AUTO is 100 s, as in the reference.
        enable_mask: LL: go on without ranks that do not come within ``timeout_ns`` (`Group.mask_query` and what follows it); at most 29 ranks. Its
            kernels are others than those of groups without.
        zero_copy: AUTO: rows given in windows of `Group.create_window` are used where they are, plain tensors copied; OFF: windows are copied, too;
            ON: a tensor that would have to be copied is refused. (Outputs left out live in the group's window in every mode.)
        checked: look at expert ids on the host before a dispatch (costs a host synchronisation) and raise if one is >= num_experts.
        max_token_bytes: most bytes of one dispatched row and its scales (QUANT_FWD); if set it must be at least ``hidden * itemsize``, which is what
            AUTO means.
        overflow_policy: HT: rows beyond ``max_recv_tokens_per_rank`` are left out, and every rank raises `EpOverflowError` (TRAP, which is AUTO) or
            nobody does (DROP, which needs an explicit budget).
        trace: compile kernels with stamps, for `Group.timeline`; they are slower. May differ between ranks.
        count_waits: compile kernels that count how long they wait for each rank, for `Group.waited_ns`, in a group of one team; they read a clock
            whenever a rank comes. Groups with ``enable_mask`` count in any case. May differ between ranks.

    Example:
        >>> import ncclep_py as ep
        >>> config = ep.GroupConfig(num_experts=256, max_dispatch_tokens_per_rank=128, hidden=7168)
        >>> config.token_type.name, config.row_bytes
        ('BF16', 14336)
        >>> ep.GroupConfig(num_experts=256, max_dispatch_tokens_per_rank=128, hidden=7)
        Traceback (most recent call last):
        ValueError: hidden must make rows of a multiple of 16 bytes, got 7 x 2 = 14 bytes
    """

    num_experts: int
    max_dispatch_tokens_per_rank: int
    hidden: int = AUTO
    dtype: Any = None
    num_topk: int = 8
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    max_recv_tokens_per_rank: int = AUTO
    max_num_sms: int = AUTO
    num_slots: int = 1
    slot_layout: Layout = Layout.UNSET
    num_staging_slots: int = 0
    timeout_ns: int = AUTO
    enable_mask: bool = False
    checked: bool = False
    max_token_bytes: int = AUTO
    zero_copy: ZeroCopyMode = ZeroCopyMode.AUTO
    overflow_policy: OverflowPolicy = OverflowPolicy.AUTO
    trace: bool = False
    count_waits: bool = False

    def __post_init__(self) -> None:
        _whole("num_experts", self.num_experts, 1, 1 << 16)
        _whole("max_dispatch_tokens_per_rank", self.max_dispatch_tokens_per_rank, 1, 1 << 20)
        _whole("max_token_bytes", self.max_token_bytes, 0)
        if self.hidden == AUTO and self.max_token_bytes:
            object.__setattr__(self, "hidden", self.max_token_bytes // self.token_type.itemsize)
        _whole("hidden", self.hidden, 1, 1 << 20)
        _whole("num_topk", self.num_topk, 1, MAX_TOPK)
        _whole("max_recv_tokens_per_rank", self.max_recv_tokens_per_rank, 0)
        _whole("max_num_sms", self.max_num_sms, 0)
        _whole("num_slots", self.num_slots, 1, 64)
        _whole("num_staging_slots", self.num_staging_slots, 0, 64)
        _whole("timeout_ns", self.timeout_ns, 0, 1 << 62)
        object.__setattr__(self, "algorithm", _member("algorithm", Algorithm, self.algorithm))
        object.__setattr__(self, "overflow_policy", _member("overflow_policy", OverflowPolicy, self.overflow_policy))
        if self.algorithm is Algorithm.HIGH_THROUGHPUT:
            self._check_budget()
        for name in ("trace", "enable_mask", "count_waits"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}: {getattr(self, name)!r}")
        if self.enable_mask and self.algorithm is not Algorithm.LOW_LATENCY:
            raise ValueError(f"enable_mask must be False for {self.algorithm.name}; only LOW_LATENCY has masks")
        object.__setattr__(self, "slot_layout", _member("slot_layout", Layout, self.slot_layout))
        if self.slot_layout is Layout.FLAT or self.slot_layout and self.algorithm is not Algorithm.LOW_LATENCY:
            raise ValueError(f"slot_layout must be UNSET, or for LOW_LATENCY EXPERT_MAJOR or RANK_MAJOR, got {self.slot_layout.name}")
        object.__setattr__(self, "zero_copy", _member("zero_copy", ZeroCopyMode, self.zero_copy))
        if self.num_topk > self.num_experts:
            raise ValueError(f"num_topk must be at most num_experts = {self.num_experts}, got {self.num_topk}")
        if self.row_bytes % ROW_ALIGNMENT:
            raise ValueError(
                f"hidden must make rows of a multiple of {ROW_ALIGNMENT} bytes, got {self.hidden} x {self.token_type.itemsize} "
                f"= {self.row_bytes} bytes"
            )
        if self.token_bytes > MAX_ROW_BYTES:
            raise ValueError(f"hidden and max_token_bytes must make rows of at most {MAX_ROW_BYTES} bytes, got {self.token_bytes}")
        if self.max_token_bytes and self.max_token_bytes < self.row_bytes:
            raise ValueError(f"max_token_bytes must be at least one row, {self.row_bytes} bytes, got {self.max_token_bytes}")

    def _check_budget(self) -> None:
        """``ValueError`` unless the HT budget fits the other fields."""
        if self.max_recv_tokens_per_rank and self.max_recv_tokens_per_rank < self.max_dispatch_tokens_per_rank:
            raise ValueError(f"max_recv_tokens_per_rank must be AUTO or at least max_dispatch_tokens_per_rank = {self.max_dispatch_tokens_per_rank}, "
                             f"got {self.max_recv_tokens_per_rank}")
        if self.overflow_policy is OverflowPolicy.DROP and not self.max_recv_tokens_per_rank:
            raise ValueError("overflow_policy DROP needs an explicit max_recv_tokens_per_rank, got AUTO")

    @property
    def token_type(self) -> TokenType:
        """Element type of rows; bfloat16 unless given."""
        return TokenType.BF16 if self.dtype is None else TokenType.of(self.dtype, "GroupConfig.dtype")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token row."""
        return self.hidden * self.token_type.itemsize

    @property
    def staging_slots(self) -> int:
        """Staging slots there are: none with ``enable_mask``, whose operations end in their send half (``member_map``)."""
        return 0 if self.enable_mask else self.num_staging_slots

    @property
    def token_bytes(self) -> int:
        """Bytes set aside in a slot for one received row and its scales."""
        return -(-max(self.row_bytes, self.max_token_bytes) // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def wait_ns(self) -> int:
        """Nanoseconds a device-side wait may last."""
        return self.timeout_ns or DEFAULT_TIMEOUT_NS

    def check_ranks(self, num_ranks: int) -> None:
        """``ValueError`` unless the experts divide evenly over `num_ranks`."""
        if self.num_experts % num_ranks:
            raise ValueError(f"num_experts must be a multiple of the number of ranks: {self.num_experts} over {num_ranks}")
        if self.enable_mask and num_ranks > MAX_MASKED_RANKS:
            raise ValueError(f"enable_mask serves at most {MAX_MASKED_RANKS} ranks, got {num_ranks}")

    def agreed_fields(self) -> dict[str, str]:
        """What must be equal on all ranks, as text, for the check at group creation."""
        local = {"max_num_sms", "timeout_ns", "checked", "trace", "count_waits"}
        fields = {f.name: str(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in local}
        return fields | {"dtype": self.token_type.name, "algorithm": self.algorithm.name}


@dataclasses.dataclass(frozen=True)
class HandleConfig:
    """Per-handle choices.

    Attributes:
        dispatch_output_per_expert_alignment: HT EXPERT_MAJOR zones are padded to a multiple of this power of two; 0 and 1 mean none.

    Example:
        >>> import ncclep_py as ep
        >>> ep.HandleConfig(dispatch_output_per_expert_alignment=96)
        Traceback (most recent call last):
        ValueError: dispatch_output_per_expert_alignment must be 0 or a power of two, got 96
    """

    dispatch_output_per_expert_alignment: int = 0

    def __post_init__(self) -> None:
        a = self.dispatch_output_per_expert_alignment
        _whole("dispatch_output_per_expert_alignment", a, 0)
        if a & (a - 1):
            raise ValueError(f"dispatch_output_per_expert_alignment must be 0 or a power of two, got {a}")


@dataclasses.dataclass(frozen=True)
class DispatchConfig:
    """Per-call choices of dispatch, as in `nccl.ep`.

    Example:
        >>> import ncclep_py as ep
        >>> ep.DispatchConfig(quant_recipe=ep.DispatchQuant.DS_FP8E3M4, round_scales=True).send_only
        False
    """

    send_only: bool = False
    round_scales: bool = False
    pass_direction: PassDir = PassDir.FWD
    quant_recipe: DispatchQuant = DispatchQuant.NONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "pass_direction", _member("pass_direction", PassDir, self.pass_direction))
        object.__setattr__(self, "quant_recipe", _member("quant_recipe", DispatchQuant, self.quant_recipe))


@dataclasses.dataclass(frozen=True)
class CombineConfig:
    """Per-call choices of combine, as in `nccl.ep`.

    Example:
        >>> import ncclep_py as ep
        >>> ep.CombineConfig(pass_direction=1).pass_direction.name
        'BWD'
    """

    send_only: bool = False
    pass_direction: PassDir = PassDir.FWD
    quant_recipe: CombineQuant = CombineQuant.NONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "pass_direction", _member("pass_direction", PassDir, self.pass_direction))
        object.__setattr__(self, "quant_recipe", _member("quant_recipe", CombineQuant, self.quant_recipe))
