"""Bytes of every option, worked out by hand for R=8, M=128, E=256, H=7168, K=8 in bf16; and that slots for one layout hold just that."""

from __future__ import annotations

import pytest
import torch

from ncclep_py import Group, GroupConfig, Layout, LocalWorld
from ncclep_py.memory_map import WindowMap
from ncclep_py.sizes import markdown, options
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens

ROW = 2 * 7168
ROUTING = 2 * 8 * 128 * 8 * 4                       # ids and weights, [R, M, K] of 4 bytes each
EXPERT_MAJOR, RANK_MAJOR = 32 * 1024 * ROW, 1024 * ROW
STAGE = 128 * 8 * ROW                               # M * K rows
ORIGINS = {EXPERT_MAJOR: 32 * 1024 * 4, RANK_MAJOR: 1024 * 4}


def config(**more: object) -> GroupConfig:
    return GroupConfig(num_experts=256, max_dispatch_tokens_per_rank=128, hidden=7168, num_topk=8, **more)


def test_by_hand() -> None:
    found = {o.name: o for o in options(config(), 8)}
    assert len(found) == 9
    want = {
        "one slot, in place (default)": (EXPERT_MAJOR + ROUTING, 0, 0),
        "two slots": (2 * (EXPERT_MAJOR + ROUTING), 0, 0),
        "staged: one slot, 2 staging slots": (EXPERT_MAJOR + ROUTING, 2 * STAGE + ORIGINS[EXPERT_MAJOR], 0),
        "staged, two micro-batches: two slots, 4 staging slots": (2 * (EXPERT_MAJOR + ROUTING), 4 * STAGE + 2 * ORIGINS[EXPERT_MAJOR], 0),
        "enable_mask: one slot": (EXPERT_MAJOR + ROUTING, 0, 0),
        "a window or plain tensor of the caller's own for EXPERT_MAJOR rows": (EXPERT_MAJOR + ROUTING, 0, EXPERT_MAJOR),
        "RANK_MAJOR only: one slot": (RANK_MAJOR + ROUTING, 0, 0),
        "RANK_MAJOR only: two slots, 4 staging slots": (2 * (RANK_MAJOR + ROUTING), 4 * STAGE + 2 * ORIGINS[RANK_MAJOR], 0),
        "RANK_MAJOR only: a window or plain tensor of the caller's own": (RANK_MAJOR + ROUTING, 0, RANK_MAJOR),
    }
    assert {name: (o.slots, o.staging, o.extra) for name, o in found.items()} == want
    assert all(0 < o.control < 100_000 and o.total == o.slots + o.staging + o.control + o.extra for o in found.values())
    assert round(found["one slot, in place (default)"].total / 1e6, 1) == 469.8 and round(found["RANK_MAJOR only: one slot"].total / 1e6, 1) == 14.8


def test_options_do_not_depend_on_the_configs_own() -> None:
    assert options(config(num_slots=3, num_staging_slots=2), 8) == options(config(), 8)


def test_table() -> None:
    lines = markdown(config(), 8).splitlines()
    assert len(lines) == 11 and all(line.count("|") == 7 for line in lines)
    assert lines[2] == "| one slot, in place (default) | 469.8 | 0.0 | 0.02 | 0.0 | 469.8 |"


def test_what_several_teams_add() -> None:
    """Messages of all ranks once, with staging once per slot; what was sent, what comes back (with masks: a place per rank), and its places."""
    message, back = 16 * 7 + ROW, 128 * 8 * ROW
    for o in options(config(), 8, 4):
        plain, slots = next(p for p in options(config(), 8) if p.name == o.name), 2 if "two" in o.name else 1
        banks = slots if "staging" in o.name else 1
        assert (o.slots, o.staging, o.control) == (plain.slots, plain.staging, plain.control)
        places = 8 if o.name.startswith("enable_mask") else 1
        told = 128 * message + banks * 8 * 128 * message + places * back + slots * 8 * 128 * 8 * 4
        assert told < o.network < told + 40_000 and o.total == o.slots + o.staging + o.control + o.network, o.name
    assert markdown(config(), 8, 4).splitlines()[0] == "| per rank, in MB | slots | staging | control | network | total |"


def test_slots_for_rank_major_only() -> None:
    """The same results from slots E / R times smaller, and no handle of the other layout."""
    def program(comm: object) -> torch.Tensor:
        results = []
        for only in (Layout.UNSET, Layout.RANK_MAJOR):
            with Group.create(comm, GroupConfig(6, 4, 16, num_topk=2, slot_layout=only, num_staging_slots=1)) as group:
                handle = group.create_handle(Layout.RANK_MAJOR, random_routing(comm.rank, 4, 2, 6))
                x = stamped_tokens(comm.rank, 4, 16, torch.bfloat16)
                results.append(handle.combine(handle.dispatch(x, topk_weights=torch.ones(4, 2)).tokens.mul_(2)).clone())
                if only:
                    with pytest.raises(ValueError, match="layout must be GroupConfig.slot_layout = RANK_MAJOR, got EXPERT_MAJOR"):
                        group.create_handle(Layout.EXPERT_MAJOR, num_topk=2)
                group.check()
        assert bits_equal(*results) and bool(results[0].any())

    with LocalWorld(3, "sim") as world:
        world.run(program)
    small, both = (WindowMap.build(GroupConfig(6, 4, 512, num_topk=2, slot_layout=only), 3) for only in (Layout.RANK_MAJOR, Layout.UNSET))
    assert small.slot_rows == 12 and both.slot_rows == 24 and small.slot_bytes < both.slot_bytes


def test_slot_layout_is_checked() -> None:
    for bad in (Layout.FLAT, 9):
        with pytest.raises(ValueError, match="slot_layout must be"):
            config(slot_layout=bad)
