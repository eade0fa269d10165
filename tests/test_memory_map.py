"""The byte plans: numbers worked out by hand, and rules that hold for every size."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from ncclep_py import GroupConfig
from ncclep_py.group import bytes_per_rank
from ncclep_py.memory_map import HEAD_BANKS, HEAD_BYTES, RECORD_FIELDS, SLOT_ALIGNMENT, WORD, LocalMap, WindowMap, align


def config(experts: int, tokens: int, hidden: int, topk: int = 1, **more: Any) -> GroupConfig:
    return GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, **more)


def check_window(plan: WindowMap, ranks: int, experts: int) -> None:
    """Regions follow each other without a gap or overlap, hold what they must, and start where words and rows may."""
    regions = plan.regions()
    assert [name for name, _, _ in regions] == ["HEAD", "ARRIVED", "COUNTS"] + [f"{part}{i}" for i in range(plan.num_slots)
                                                                                        for part in ("SLOT", "ROUTING")]
    assert regions[0][1] == 0 and regions[-1][2] == plan.total_bytes
    for (_, begin, end), (_, following, _) in zip(regions, regions[1:], strict=False):
        assert begin < end == following
    head, arrived, counts = (end - begin for _, begin, end in regions[:3])
    assert head >= HEAD_BANKS * ranks * HEAD_BYTES and arrived >= ranks * WORD and counts >= ranks * experts * WORD
    assert plan.heads % HEAD_BYTES == plan.arrived % 128 == plan.counts % 128 == plan.slots % SLOT_ALIGNMENT == plan.slot_bytes % SLOT_ALIGNMENT == 0
    rows = experts // ranks * plan.plane_rows * plan.token_bytes
    assert rows <= plan.recv_ids < rows + 128 and plan.recv_ids % 128 == plan.recv_weights % 128 == 0
    routing = (plan.recv_weights - plan.recv_ids, plan.slot_bytes - plan.recv_weights)
    assert min(routing) >= 4 * plan.plane_rows and max(routing) < 4 * 32 * plan.plane_rows + SLOT_ALIGNMENT
    assert plan.num_local_experts == experts // ranks and plan.slot_rows * plan.token_bytes == rows
    for i in range(plan.num_slots):
        assert plan.slot(i) == plan.slots + i * plan.slot_bytes


def test_by_hand_eight_ranks_full_size() -> None:
    """R=8, M=128, E=256, H=7168 bf16: HEAD 2 x 8 x 16, ARRIVED 8 x 8, COUNTS 8 x 256 x 8, a slot of 32 planes of 1024 rows of 14336 bytes."""
    plan = WindowMap.build(config(256, 128, 7168, 8), 8)
    assert (plan.heads, plan.arrived, plan.counts) == (0, 256, 384)        # 256 + 64 = 320, then the next multiple of 128
    assert plan.slots == 17408                                             # 384 + 16384 = 16768, then the next multiple of 1024
    assert (plan.plane_rows, plan.row_bytes, plan.slot_rows) == (1024, 14336, 32768)
    assert plan.recv_ids == 469_762_048                                    # 470 MB of rows
    assert plan.recv_weights == 469_762_048 + 32_768                       # 8 x 128 x 8 ids of 4 bytes
    assert plan.slot_bytes == 469_762_048 + 65_536
    assert plan.total_bytes == 469_844_992
    assert WindowMap.build(config(256, 128, 7168, 8, num_slots=2), 8).total_bytes == 17408 + 2 * 469_827_584


def test_by_hand_smallest() -> None:
    plan = WindowMap.build(config(1, 1, 4, dtype=torch.float32), 1)
    assert (plan.heads, plan.arrived, plan.counts, plan.slots, plan.slot_bytes, plan.total_bytes) == (0, 128, 256, 1024, 1024, 2048)
    assert plan.regions() == [("HEAD", 0, 128), ("ARRIVED", 128, 256), ("COUNTS", 256, 1024), ("SLOT0", 1024, 1152), ("ROUTING0", 1152, 2048)]
    assert (plan.recv_ids, plan.recv_weights) == (128, 256)


def test_room_for_rows_with_scales() -> None:
    """A row of 64 bytes with 20 more, rounded up to 16."""
    plan = WindowMap.build(config(4, 3, 32, 2, max_token_bytes=84), 2)
    assert (plan.row_bytes, plan.token_bytes, plan.recv_ids) == (64, 96, 1152)   # 2 planes x 6 rows x 96
    check_window(plan, 2, 4)


def test_by_hand_odd_ranks_and_two_slots() -> None:
    plan = WindowMap.build(config(21, 5, 24, num_slots=2), 7)
    assert (plan.arrived, plan.counts) == (256, 384)          # 2 x 7 x 16 = 224; 256 + 56 = 312
    assert plan.slots == 2048                                 # 384 + 7 x 21 x 8 = 1560
    assert (plan.recv_ids, plan.recv_weights) == (5120, 5376)   # 3 planes x 35 rows x 48 bytes = 5040; 35 ids of 4 bytes = 140
    assert plan.slot_bytes == 6144
    assert plan.total_bytes == 2048 + 2 * 6144


def test_every_number_of_ranks_and_local_experts() -> None:
    """R from 1 to 1024 and L up to 288, against the same plan in numpy's 64-bit integers."""
    locals_ = [1, 2, 3, 7, 8, 32, 33, 127, 256, 288]
    for ranks in range(1, 1025):
        local = np.array(locals_, np.int64)
        tokens = np.minimum(128, (2**31 - 1) // (ranks * ranks * local))
        counts = -(-(-(-2 * ranks * 16 // 128) * 128 + ranks * 8) // 128) * 128
        slots = -(-(counts + ranks * ranks * local * 8) // 1024) * 1024
        routing = -(-ranks * tokens * 8 * 4 // 128) * 128
        slot = local * (ranks * tokens) * 14336 + routing + ranks * tokens * 8 * 4
        total = slots + 2 * (-(-slot // 1024) * 1024)
        for i, n in enumerate(locals_):
            plan = WindowMap.build(_sizes(ranks * n, int(tokens[i]), 14336, 2), ranks)
            assert (plan.counts, plan.slots, plan.total_bytes) == (counts, slots[i], total[i])
            check_window(plan, ranks, ranks * n)


def _sizes(experts: int, tokens: int, row_bytes: int, slots: int) -> Any:
    """What the plan reads of a config; beyond a real one's limits, too."""
    return types.SimpleNamespace(num_experts=experts, max_dispatch_tokens_per_rank=tokens, row_bytes=row_bytes, token_bytes=row_bytes,
                                 num_slots=slots, num_topk=8, slot_layout=0, staging_slots=0, enable_mask=False)


@pytest.mark.parametrize("tokens", [1, 3, 5, 31, 33, 63, 65, 127, 129, 4095, 4097])
@pytest.mark.parametrize("hidden", [8, 136, 2880])
def test_odd_sizes(tokens: int, hidden: int) -> None:
    for ranks in (1, 2, 3, 5, 6, 7, 8):
        for slots in (1, 2, 64):
            check_window(WindowMap.build(config(ranks * 3, tokens, hidden, num_slots=slots), ranks), ranks, ranks * 3)


def test_sizes_beyond_32_bits_are_plain_numbers() -> None:
    plan = WindowMap.build(config(1024, 2047, (1 << 20) - 4, dtype=torch.float32, num_slots=64), 1024)
    check_window(plan, 1024, 1024)
    assert plan.recv_ids == 1024 * 2047 * (2**22 - 16) and plan.slot(63) == plan.slots + 63 * plan.slot_bytes


@pytest.mark.parametrize(("experts", "ranks", "tokens"), [(1024, 1024, 2048), (65536, 1, 1 << 15), (256, 128, 1 << 16)])
def test_rows_have_31_bit_numbers(experts: int, ranks: int, tokens: int) -> None:
    """The row table is int32: E x R x M row numbers must not wrap."""
    assert WindowMap.build(config(experts, tokens - 1, 8), ranks).plane_rows == ranks * (tokens - 1)
    with pytest.raises(ValueError, match=rf"must be below 2\^31 .*got {experts} \* {ranks} \* {tokens}$"):
        WindowMap.build(config(experts, tokens, 8), ranks)


def test_slot_out_of_range() -> None:
    plan = WindowMap.build(config(8, 8, 8, num_slots=2), 4)
    for bad in (-1, 2):
        with pytest.raises(ValueError, match=rf"slot must be in \[0, 2\), got {bad}"):
            plan.slot(bad)


def test_plans_are_equal_on_all_ranks_and_depend_on_every_size() -> None:
    base = {"experts": 16, "tokens": 8, "hidden": 64, "num_slots": 1}
    assert WindowMap.build(config(**base), 4) == WindowMap.build(config(**base, max_num_sms=3, timeout_ns=1, checked=True), 4)
    for change in ({"experts": 32}, {"tokens": 9}, {"hidden": 128}, {"num_slots": 2}):
        assert WindowMap.build(config(**{**base, **change}), 4) != WindowMap.build(config(**base), 4)
    assert WindowMap.build(config(**base), 8) != WindowMap.build(config(**base), 4)


def test_local_block_by_hand() -> None:
    plan = LocalMap.build(config(256, 128, 7168, 8, num_slots=2))
    assert (plan.epoch, plan.blocks_done, plan.fail, plan.headers) == (0, 128, 256, 384)
    assert plan.tables == 512                                          # 384 + 3 headers of 16 bytes = 432
    assert plan.table_bytes == 128 * 8 * 4 and plan.total_bytes == 512 + 2 * 4096
    assert [plan.header(i) for i in range(3)] == [384, 400, 416] and plan.table(1) == 512 + 4096


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 8, 63, 64])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 1), (3, 5), (129, 9), (4097, 32)])
def test_local_regions(slots: int, tokens: int, topk: int) -> None:
    plan = LocalMap.build(config(32, tokens, 8, topk, num_slots=slots))
    regions = plan.regions()
    for (_, begin, end), (_, following, _) in zip(regions, regions[1:], strict=False):
        assert begin < end <= following
    assert regions[-1][2] == plan.total_bytes
    assert plan.fail + 16 <= plan.headers                              # the word after FAIL says which operation's record was written
    assert plan.header(slots) + 16 <= plan.tables                      # one header more, for operations without a slot
    assert plan.table_bytes >= 4 * tokens * topk and all(plan.table(i) % 128 == 0 for i in range(slots))
    assert all(plan.header(i) % 16 == 0 for i in range(slots + 1))


def test_staging_by_hand() -> None:
    """R=8, M=128, E=256, H=7168, K=8: FLIGHTS of 1 + 4 slots, two banks of counts, ORIGINS of 32768 rows, staging slots of 1024 rows."""
    plan = WindowMap.build(config(256, 128, 7168, 8, num_staging_slots=4), 8)
    assert (plan.counts, plan.count_bank_bytes) == (384, 16384)
    assert plan.flights == 33152 and plan.flight(4) == 33152 + 4 * 256   # 384 + 2 x 16384; 2 banks x 8 ranks x 16 bytes each
    assert plan.released == 34432 and plan.release(3) == 34432 + 3 * 64
    assert plan.arrivals == plan.arrival(0) == 34688 and plan.slots == 34816   # 34688 + 64, then the next multiple of 1024
    assert plan.origins == 34816 + plan.slot_bytes and plan.origins_bytes == 131072
    assert plan.staging_bytes == 14_680_064 and plan.total_bytes == plan.origins + 131072 + 4 * 14_680_064
    local = LocalMap.build(config(256, 128, 7168, 8, num_staging_slots=4))
    assert (local.kept, local.flights) == (512 + 4096, 512 + 4096 + 1024) and local.copies == local.flights + 5 * 128
    assert local.total_bytes == local.copies + 4 * 4096


@pytest.mark.parametrize("staging", [1, 2, 5])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_staging_regions(ranks: int, slots: int, staging: int) -> None:
    c = config(ranks * 3, 5, 24, 3, num_slots=slots, num_staging_slots=staging)
    plan, local = WindowMap.build(c, ranks), LocalMap.build(c)
    for regions, total in ((plan.regions(), plan.total_bytes), (local.regions(), local.total_bytes)):
        for (_, begin, end), (_, following, _) in zip(regions, regions[1:], strict=False):
            assert begin < end <= following
        assert regions[-1][2] == total
    named = {name: (begin, end) for name, begin, end in plan.regions()}
    assert named["COUNTS"][1] - plan.counts >= 2 * plan.count_bank_bytes and plan.count_bank_bytes >= ranks * 3 * ranks * WORD
    assert named["FLIGHTS"][1] - plan.flights >= (slots + staging) * HEAD_BANKS * ranks * HEAD_BYTES
    assert named["RELEASED"][1] - plan.released >= staging * ranks * WORD and plan.flight(0) % HEAD_BYTES == plan.release(0) % WORD == 0
    assert plan.origins_bytes >= 4 * plan.slot_rows and plan.staging_bytes >= 5 * 3 * plan.row_bytes and plan.stage(0) % SLOT_ALIGNMENT == 0
    assert WindowMap.build(config(ranks * 3, 5, 24, 3, num_slots=slots), ranks).total_bytes < plan.total_bytes


def test_align() -> None:
    assert [align(n, 8) for n in (0, 1, 7, 8, 9)] == [0, 8, 8, 8, 16] and align(2**40 + 1, 1024) == 2**40 + 1024


def test_record_fields() -> None:
    assert RECORD_FIELDS[0] == "code" and len(RECORD_FIELDS) == 8


def test_bytes_per_rank_are_the_plans() -> None:
    c = config(256, 128, 7168, 8, num_slots=2)
    told = bytes_per_rank(c, 8)
    assert told["control"] + told["slots"] == WindowMap.build(c, 8).total_bytes and told["local"] == LocalMap.build(c).total_bytes
