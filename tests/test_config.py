"""What a caller can say about a group, a handle and a call, and the sentence for everything that makes no sense."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ncclep_py import (
    Algorithm,
    CombineConfig,
    CombineQuant,
    DispatchConfig,
    DispatchQuant,
    ExpertIdKind,
    GroupConfig,
    HandleConfig,
    Layout,
    OverflowPolicy,
    PassDir,
    ZeroCopyMode,
)
from ncclep_py.config import DEFAULT_TIMEOUT_NS, TokenType
from ncclep_py.errors import Code, EpMismatchError, EpOverflowError, EpRefusedError, EpStaleError, EpTimeoutError, ErrorRecord, Phase
from ncclep_py.refusal import SENTENCES, Refusal
from ncclep_py.signature import OpKind, Signature

GOOD: dict[str, Any] = {"num_experts": 8, "max_dispatch_tokens_per_rank": 16, "hidden": 64, "num_topk": 2}


def group(**changes: Any) -> GroupConfig:
    return GroupConfig(**{**GOOD, **changes})


# ---- group ---------------------------------------------------------------------------------------------------------------
def test_defaults() -> None:
    c = group()
    assert c.token_type is TokenType.BF16 and c.row_bytes == 128 and c.wait_ns == DEFAULT_TIMEOUT_NS == 100 * 10**9
    assert (c.algorithm, c.num_slots, c.checked, c.max_num_sms) == (Algorithm.LOW_LATENCY, 1, False, 0)
    assert group(timeout_ns=5).wait_ns == 5


LIMITS = {
    "num_experts": (1, 1 << 16), "max_dispatch_tokens_per_rank": (1, 1 << 20), "hidden": (1, 1 << 20), "num_topk": (1, 32),
    "max_recv_tokens_per_rank": (0, None), "max_num_sms": (0, None), "num_slots": (1, 64), "timeout_ns": (0, 1 << 62), "max_token_bytes": (0, None),
}


@pytest.mark.parametrize("field", LIMITS)
def test_whole_numbers(field: str) -> None:
    least, most = LIMITS[field]
    for value in (1.0, "3", None, True, [1]):
        with pytest.raises(TypeError, match=f"^{field} must be an int, got {type(value).__name__}"):
            group(**{field: value})
    for value in (least - 1, -(2**40)) + ((most + 1,) if most else ()):
        span = f"at least {least}" if most is None else f"in \\[{least}, {most}\\]"
        with pytest.raises(ValueError, match=f"^{field} must be {span}, got {value}$"):
            group(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("num_experts", 1 << 16), ("max_dispatch_tokens_per_rank", 1 << 20), ("hidden", 1 << 20),
                                              ("num_slots", 64), ("timeout_ns", 1 << 62), ("max_recv_tokens_per_rank", 1 << 40)])
def test_largest_values(field: str, value: int) -> None:
    assert getattr(group(**{field: value}), field) == value


@pytest.mark.parametrize("topk", [1, 2, 3, 6, 8, 9, 10, 12, 14, 16, 22, 31, 32])
def test_topk_up_to_32(topk: int) -> None:
    assert group(num_topk=topk, num_experts=32).num_topk == topk


def test_topk_above_experts() -> None:
    with pytest.raises(ValueError, match="^num_topk must be at most num_experts = 8, got 9$"):
        group(num_topk=9)


HIDDEN = [4, 8, 64, 96, 128, 136, 512, 520, 2048, 2688, 2880, 3072, 4096, 5120, 6144, 7168, 7176, 8192, 16384]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rows_are_whole_vectors(hidden: int, dtype: torch.dtype) -> None:
    if hidden * dtype.itemsize % 16 == 0:
        assert group(hidden=hidden, dtype=dtype).row_bytes == hidden * dtype.itemsize
    else:
        with pytest.raises(ValueError, match=f"^hidden must make rows of a multiple of 16 bytes, got {hidden} x 2 = {hidden * 2} bytes"):
            group(hidden=hidden, dtype=dtype)


@pytest.mark.parametrize("hidden", [1, 7, 9, 12, 100, 7170])
def test_rows_that_are_not(hidden: int) -> None:
    with pytest.raises(ValueError, match="hidden must make rows of a multiple of 16 bytes"):
        group(hidden=hidden)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.float8_e4m3fn, torch.bool, "bfloat16", 3])
def test_other_types(dtype: Any) -> None:
    with pytest.raises(TypeError, match="GroupConfig.dtype must be torch.bfloat16, torch.float16 or torch.float32, got "):
        group(dtype=dtype)


def test_token_types() -> None:
    for kind, dtype, size in ((TokenType.BF16, torch.bfloat16, 2), (TokenType.FP16, torch.float16, 2), (TokenType.FP32, torch.float32, 4)):
        assert TokenType.of(dtype) is kind and kind.torch_dtype() is dtype and kind.itemsize == size


def test_max_token_bytes() -> None:
    assert group(max_token_bytes=128).row_bytes == group(max_token_bytes=4096).row_bytes == 128
    with pytest.raises(ValueError, match="^max_token_bytes must be at least one row, 128 bytes, got 127$"):
        group(max_token_bytes=127)


def test_algorithm_by_member_or_number() -> None:
    assert group(algorithm=1).algorithm is Algorithm.HIGH_THROUGHPUT
    for value in (2, "ll", None, True):
        with pytest.raises(ValueError, match="^algorithm must be one of Algorithm.LOW_LATENCY, Algorithm.HIGH_THROUGHPUT, got "):
            group(algorithm=value)


def test_experts_over_ranks() -> None:
    for ranks in (1, 2, 4, 8):
        group().check_ranks(ranks)
    for ranks in (3, 5, 16):
        with pytest.raises(ValueError, match=f"^num_experts must be a multiple of the number of ranks: 8 over {ranks}$"):
            group().check_ranks(ranks)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        group().hidden = 8   # type: ignore[misc]


def test_agreed_fields_are_all_but_the_local_ones() -> None:
    fields = group().agreed_fields()
    assert set(fields) == {f.name for f in dataclasses.fields(GroupConfig)} - {"max_num_sms", "timeout_ns", "checked", "trace", "count_waits"}
    assert all(isinstance(v, str) for v in fields.values())
    assert fields == group(dtype=torch.bfloat16, max_num_sms=3, timeout_ns=9, checked=True, trace=True, count_waits=True).agreed_fields()
    for name, value in {"num_experts": 16, "max_dispatch_tokens_per_rank": 8, "hidden": 8, "dtype": torch.float16, "num_topk": 1, "algorithm": 1,
                        "max_recv_tokens_per_rank": 1, "num_slots": 2, "max_token_bytes": 128}.items():
        assert {k for k, v in group(**{name: value}).agreed_fields().items() if v != fields[k]} == {name}


# ---- handle and call --------------------------------------------------------------------------------------------------------
def test_alignment_of_zones() -> None:
    for good in (0, 1, 2, 128, 1 << 20):
        assert HandleConfig(good).dispatch_output_per_expert_alignment == good
    for bad in (3, 6, 127):
        with pytest.raises(ValueError, match=f"^dispatch_output_per_expert_alignment must be 0 or a power of two, got {bad}$"):
            HandleConfig(bad)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        HandleConfig(-1)
    with pytest.raises(TypeError, match="must be an int"):
        HandleConfig(2.0)   # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "quant"), [(DispatchConfig, DispatchQuant), (CombineConfig, CombineQuant)])
def test_members_of_a_calls_config(kind: Any, quant: Any) -> None:
    plain = kind()
    assert plain.pass_direction is PassDir.FWD and plain.quant_recipe is quant.NONE and not plain.send_only
    given = kind(pass_direction=1, quant_recipe=1)
    assert given.pass_direction is PassDir.BWD and given.quant_recipe is quant(1)
    with pytest.raises(ValueError, match="^pass_direction must be one of PassDir.FWD, PassDir.BWD, got 2$"):
        kind(pass_direction=2)
    with pytest.raises(ValueError, match=f"^quant_recipe must be one of {quant.__name__}.NONE"):
        kind(quant_recipe="fp8")


def test_numbers_of_the_enums() -> None:
    """The reference's header says them; a program that passes numbers keeps its meaning."""
    assert [int(m) for m in Algorithm] == [0, 1] and [int(m) for m in PassDir] == [0, 1]
    assert {m.name: int(m) for m in Layout} == {"UNSET": 0, "EXPERT_MAJOR": 1, "RANK_MAJOR": 2, "FLAT": 3}
    assert {m.name: int(m) for m in ZeroCopyMode} == {"AUTO": 0, "OFF": 1, "ON": 2}
    assert {m.name: int(m) for m in OverflowPolicy} == {"AUTO": 0, "TRAP": 1, "DROP": 2}
    assert {m.name: int(m) for m in ExpertIdKind} == {"AUTO": 0, "LOCAL": 1, "GLOBAL": 2}


# ---- signature -----------------------------------------------------------------------------------------------------------------
WIDTHS = {"kind": 4, "layout": 3, "token_type": 4, "recipe": 4, "slot": 6, "num_topk": 6, "row_vectors": 20}
NOTHING = dict.fromkeys(WIDTHS, 0)


@pytest.mark.parametrize("field", WIDTHS)
def test_signature_round_trip_and_limits(field: str) -> None:
    top = (1 << WIDTHS[field]) - 1
    words = set()
    for value in (0, 1, top // 2, top):
        signature = Signature(**{**NOTHING, field: value})
        word = signature.pack()
        assert 0 <= word < 1 << 62 and Signature.unpack(word) == signature
        words.add(word)
    assert len(words) == len({0, 1, top // 2, top})
    for value in (-1, top + 1):
        with pytest.raises(ValueError, match=f"^{field} must be in \\[0, {top + 1}\\), got {value}$"):
            Signature(**{**NOTHING, field: value}).pack()


def test_signature_of_everything_at_its_largest() -> None:
    full = Signature(*((1 << bits) - 1 for bits in WIDTHS.values()))
    assert full.pack() == (1 << sum(WIDTHS.values())) - 1 and Signature.unpack(full.pack()) == full


def test_signature_holds_the_largest_group() -> None:
    c = group(hidden=(1 << 20) - 4, dtype=torch.float32, num_slots=64, num_experts=32, num_topk=32)
    with pytest.raises(ValueError, match="rows of at most 4194288 bytes, got 4194304"):
        group(hidden=1 << 20, dtype=torch.float32)
    Signature(OpKind.CLOSE, Layout.FLAT, c.token_type, 15, c.num_slots - 1, c.num_topk, c.row_bytes // 16).pack()


def test_signature_difference() -> None:
    a = Signature(OpKind.DISPATCH, 1, 0, 0, 0, 8, 64)
    assert a.difference(a) == ""
    b = dataclasses.replace(a, kind=OpKind.COMBINE, slot=1)
    assert a.difference(b) == "kind dispatch here, combine there, slot 0 here, 1 there"
    assert a.difference(dataclasses.replace(a, kind=9)) == "kind dispatch here, 9 there"


# ---- what a device reports -------------------------------------------------------------------------------------------------------
def record(code: int, phase: int = Phase.HEAD, peer: int = 2, culprit: int = 3, seen: int = 7, expected: int = 9) -> ErrorRecord:
    found = ErrorRecord.read([code, 41, phase, 1, peer, culprit, seen, expected])
    assert found is not None
    return found


@pytest.mark.parametrize(("held", "words"), [(0, "no dispatch, the last one failed"), (2 << 32 | 5, "dispatch of handle 2, not of handle 3"),
                                             (3 << 32 | 4, "dispatch 4 of handle 3, not 5")])
def test_stale_slots_are_told_apart(held: int, words: str) -> None:
    assert words in str(ErrorRecord(Code.STALE_SLOT, 1, 5, 0, 0, 0, held, 3 << 32 | 5).exception())


def test_no_record() -> None:
    assert ErrorRecord.read([0] * 8) is None


@pytest.mark.parametrize(("code", "error", "words"), [
    (Code.TIMEOUT, EpTimeoutError, ("rank 2 did not come in time", "epoch 7", "waited for 9")),
    (Code.ABORTED, EpTimeoutError, ("rank 2 gave up because rank 3",)),
    (Code.LEFT_BEHIND, EpTimeoutError, ("rank 2 is already at operation 7",)),
    (Code.OVERFLOW, EpOverflowError, ("row 7 for an expert of rank 2 is beyond its 9 rows",)),
    (Code.STALE_SLOT, EpStaleError, ("dispatch 7 of handle 0, not 9",)),
])
def test_records_become_sentences(code: Code, error: type[Exception], words: tuple[str, ...]) -> None:
    raised = record(code).exception(SENTENCES)
    assert type(raised) is error and "rank 1, operation 41, HEAD phase" in str(raised)
    for word in words:
        assert word in str(raised)
    if isinstance(raised, EpTimeoutError):
        assert (raised.rank, raised.peer, raised.culprit, raised.phase, raised.epoch) == (1, 2, 3, Phase.HEAD, 41)


def test_a_budget_that_does_not_suffice_says_what_the_policy_does() -> None:
    raised = record(Code.OVERFLOW, Phase.COUNTS).exception()
    assert type(raised) is EpOverflowError and str(raised).endswith(
        "rank 2 would receive 7 rows, but max_recv_tokens_per_rank is 9 and overflow_policy TRAP: rows beyond it are left out of this update's "
        "routing (as under DROP, which does not raise)")


def test_every_refusal_has_a_sentence() -> None:
    assert set(SENTENCES) == set(Refusal)
    for why in Refusal:
        raised = record(Code.REFUSED, seen=why).exception(SENTENCES)
        assert type(raised) is EpRefusedError and f"rank 2 refused the call ({SENTENCES[why]})" in str(raised)
    assert "(reason 200)" in str(record(Code.REFUSED, seen=200).exception(SENTENCES))


def test_mismatch_names_the_fields() -> None:
    mine, theirs = Signature(1, 1, 0, 0, 0, 2, 8), Signature(1, 1, 0, 0, 0, 3, 8)
    raised = record(Code.MISMATCH, seen=theirs.pack(), expected=mine.pack()).exception(SENTENCES)
    assert type(raised) is EpMismatchError and "rank 2 called another operation: num_topk 2 here, 3 there" in str(raised)


def test_failures_that_every_rank_sees() -> None:
    seen = {code: record(code, seen=1, expected=2).exception(SENTENCES).everywhere for code in Code}
    own = {Code.OVERFLOW, Code.EXCLUDED, Code.MASKED, Code.CAME_LATE, Code.WROTE_LATE}
    assert {code for code, everywhere in seen.items() if not everywhere} == own


def test_signature_difference_names_layouts_and_types() -> None:
    a = Signature(OpKind.DISPATCH, Layout.EXPERT_MAJOR, 0, 0, 0, 8, 64)
    assert a.difference(dataclasses.replace(a, layout=Layout.RANK_MAJOR)) == "layout expert_major here, rank_major there"
    assert a.difference(dataclasses.replace(a, token_type=2)) == "token_type bf16 here, fp32 there"
    assert dataclasses.replace(a, recipe=1).difference(dataclasses.replace(a, recipe=1, token_type=2)) == "token_type 0 here, 2 there"
