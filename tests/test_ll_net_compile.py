"""LOW_LATENCY kernels over several teams, compiled and linked with NCCL's device library, on any machine that has it; types of all over teams."""

from __future__ import annotations

import dataclasses
import re

import pytest
from test_compile import cache, others, typed  # noqa: F401  (fixtures)
from test_net_ptx import pytestmark  # noqa: F401  (skipped without the library)

from ncclep_py import launch, toolchain
from ncclep_py.config import Algorithm, GroupConfig, Layout
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.kernels.ll_net_masked_shape import LLNetMaskedShape
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.shape import PLAIN, KernelShape, Wire

CONFIG = GroupConfig(num_experts=128, max_dispatch_tokens_per_rank=128, hidden=7168, num_topk=8)
STACK = 320   # of NCCL's calls, and of room for them
"""Bytes of a thread's stack: NCCL keeps its structures there (152); nothing else is spilled in loops."""
MASKED_STACK = STACK + 32   # what lives from attempt to attempt is more than registers hold


STAGED = dataclasses.replace(CONFIG, num_slots=2, num_staging_slots=4)


def shape(layout=Layout.EXPERT_MAJOR, wire=PLAIN, config=CONFIG):
    return LLNetShape.over(KernelShape.build(config, 8, 8, 8, layout, wire), config, 4)


EXPERT_MAJOR, RANK_MAJOR = Layout.EXPERT_MAJOR, Layout.RANK_MAJOR
FORWARDED, QUANTISED = Wire(7168, 448), Wire(7168, 224, True)
COMPILED = [("ll_net_dispatch", EXPERT_MAJOR, PLAIN), ("ll_net_dispatch", EXPERT_MAJOR, FORWARDED), ("ll_net_dispatch", EXPERT_MAJOR, QUANTISED),
            ("ll_net_rank_major_dispatch", RANK_MAJOR, PLAIN), ("ll_net_rank_major_dispatch", RANK_MAJOR, QUANTISED),
            ("ll_net_combine", EXPERT_MAJOR, PLAIN), ("ll_net_combine", RANK_MAJOR, PLAIN), ("ll_net_nvfp4_combine", EXPERT_MAJOR, PLAIN)]


HALVES = [("ll_net_dispatch_send", EXPERT_MAJOR, PLAIN), ("ll_net_dispatch_send", EXPERT_MAJOR, QUANTISED),
          ("ll_net_dispatch_complete", EXPERT_MAJOR, PLAIN), ("ll_net_dispatch_complete", EXPERT_MAJOR, FORWARDED),
          ("ll_net_rank_major_send", RANK_MAJOR, PLAIN), ("ll_net_rank_major_complete", RANK_MAJOR, PLAIN),
          *((f"ll_net_combine_{half}", layout, PLAIN) for half in ("send", "complete") for layout in (EXPERT_MAJOR, RANK_MAJOR))]
IN_FLIGHT = HALVES + [(name, layout, wire) for name, layout, wire in COMPILED if wire is PLAIN]


MASKED = dataclasses.replace(CONFIG, enable_mask=True)
MASKED_KERNELS = [("ll_net_masked_dispatch", EXPERT_MAJOR, PLAIN), ("ll_net_masked_dispatch", EXPERT_MAJOR, FORWARDED),
                  ("ll_net_masked_dispatch", EXPERT_MAJOR, QUANTISED), ("ll_net_masked_rank_major_dispatch", RANK_MAJOR, PLAIN),
                  ("ll_net_masked_rank_major_dispatch", RANK_MAJOR, QUANTISED), ("ll_net_masked_combine", EXPERT_MAJOR, PLAIN),
                  ("ll_net_masked_combine", RANK_MAJOR, PLAIN), ("ll_net_mask_clean", EXPERT_MAJOR, PLAIN),
                  ("ll_net_masked_nvfp4_combine", RANK_MAJOR, PLAIN)]


def masked_shape(layout, wire):
    return LLNetMaskedShape.over(KernelShape.build(MASKED, 8, 8, 8, layout, wire), MASKED, 4)


@pytest.mark.parametrize(("name", "layout", "wire"), MASKED_KERNELS)
def test_masked_kernel_is_linked_and_fits(name, layout, wire):
    made = launch.compile_kernel(launch.KernelSpec(name, masked_shape(layout, wire)), "sm_90")
    assert name in made.symbol and made.cubin.startswith(b"\x7fELF")
    assert made.info["registers"] <= toolchain.MAX_REGISTERS and made.info["stack"] <= MASKED_STACK
    assert not re.search(rb"__cuda_sm\d+_(div|rem)_[su]64", made.cubin)


@pytest.mark.parametrize(("name", "layout", "wire", "config"), [*((*case, CONFIG) for case in COMPILED), *((*case, STAGED) for case in IN_FLIGHT)])
def test_kernel_is_linked_and_fits(name, layout, wire, config):
    made = launch.compile_kernel(launch.KernelSpec(name, shape(layout, wire, config)), "sm_90")
    assert name in made.symbol and made.cubin.startswith(b"\x7fELF")
    assert made.info["registers"] <= toolchain.MAX_REGISTERS and made.info["stack"] <= STACK
    assert not re.search(rb"__cuda_sm\d+_(div|rem)_[su]64", made.cubin)


def test_rows_move_in_16_byte_vectors():
    ptx = toolchain.compile_device("sm_90", "ptx", teams=True).decode()
    bodies = {m[1]: m[2] for m in re.finditer(r"ep_(ll_net_\w+)\([^{]*\{(.*?)\n\}", ptx, re.DOTALL)}
    reads = ("ll_net_send_row", "ll_net_scatter_row", "ll_net_stage_row", "ll_net_quantise_row", "ll_net_send_member_row")   # of the caller's
    for name in (*reads, "ll_net_spread_row", "ll_net_take_row", "ll_net_take_token", "ll_net_gather_row", "ll_net_sum_row",
                 "ll_net_return_member_rows", "ll_net_gather_member_row", "ll_net_send_made_row", "ll_net_sum_member_row"):
        loads, stores = re.findall(r"\bld\.global\S*\.v4\.u32", bodies[name]), re.findall(r"\bst\.global\S*\.v4\.u32", bodies[name])
        assert len(loads) >= 4 and len(stores) >= 2
        assert ("ld.global.nc.L1" in bodies[name]) == (name in reads)   # staging and slots are written meanwhile


SHAPES = {(name, f"{layout.name}{wire.scale_bytes}"): shape(layout, wire) for name, layout, wire in COMPILED}
SHAPES |= {(name, f"{layout.name}{wire.scale_bytes} staged"): shape(layout, wire, STAGED) for name, layout, wire in IN_FLIGHT}
INTEGERS = re.compile(r"Tuple\((int64|Literal\[int\]\(\d+\))(, (int64|Literal\[int\]\(\d+\)))*\)")   # several assigned in a line
HT = dataclasses.replace(CONFIG, algorithm=Algorithm.HIGH_THROUGHPUT)
SHAPES |= {(name, f"{layout.name}{wire.scale_bytes}"): masked_shape(layout, wire) for name, layout, wire in MASKED_KERNELS}
SHAPES |= {(name, ""): HTNetShape.over_teams(HT, 8, 4, 8, 8, Layout.EXPERT_MAJOR, 128, 16)
           for name in ("ht_net_prepare", "ht_net_dispatch", "ht_net_combine")}


@pytest.mark.parametrize(("name", "which"), SHAPES)
def test_kernel_has_int64_only(name, which, typed):  # noqa: F811
    factory, parameters = launch.KERNELS[name]
    toolchain.kernel_ltoir(factory, SHAPES[name, which], parameters, "sm_90", teams=True)
    assert len(typed[0][0]) > len(parameters)
    assert {t for t in others(typed) if not INTEGERS.fullmatch(t)} == set()
