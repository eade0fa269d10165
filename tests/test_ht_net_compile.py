"""HIGH_THROUGHPUT kernels over several teams, compiled and linked with NCCL's device library, on any machine that has it."""

from __future__ import annotations

import re

import pytest
from test_compile import cache  # noqa: F401  (fixture)
from test_net_ptx import pytestmark  # noqa: F401  (skipped without the library)

from ncclep_py import launch, toolchain
from ncclep_py.config import Algorithm, GroupConfig, Layout
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.kernels.ops import HT_NET_OPS

CONFIG = GroupConfig(num_experts=128, max_dispatch_tokens_per_rank=2048, hidden=7168, num_topk=8, algorithm=Algorithm.HIGH_THROUGHPUT)
LAYOUT = {"ht_net_prepare": Layout.FLAT, "ht_net_dispatch": Layout.EXPERT_MAJOR, "ht_net_combine": Layout.FLAT}
STACK = 640
"""Bytes of a thread's stack: NCCL keeps its structures there (176 without any of ours)."""


@pytest.mark.parametrize("name", LAYOUT)
def test_kernel_is_linked_and_fits(name):
    shape = HTNetShape.over_teams(CONFIG, 8, 4, 8, 8, LAYOUT[name], 128, 16)
    made = launch.compile_kernel(launch.KernelSpec(name, shape), "sm_90")
    assert name in made.symbol and made.cubin.startswith(b"\x7fELF")
    assert made.info["registers"] <= toolchain.MAX_REGISTERS and made.info["stack"] <= STACK
    assert not re.search(rb"__cuda_sm\d+_(div|rem)_[su]64", made.cubin)


def test_every_operation_is_there_and_rows_move_in_16_byte_vectors():
    ptx = toolchain.compile_device("sm_90", "ptx", teams=True).decode()
    bodies = {m[1]: m[2] for m in re.finditer(r"ep_(ht_net_\w+)\([^{]*\{(.*?)\n\}", ptx, re.DOTALL)}
    assert bodies.keys() == HT_NET_OPS.keys()
    for name in ("ht_net_stage_row", "ht_net_forward_row", "ht_net_partial_row", "ht_net_reduce_row"):
        loads, stores = re.findall(r"\bld\.global\S*\.v4\.u32", bodies[name]), re.findall(r"\bst\.global\S*\.v4\.u32", bodies[name])
        assert len(loads) >= 4 and len(stores) >= 2
        assert ("ld.global.nc" in bodies[name]) == (name == "ht_net_stage_row")   # staging and slots are written while the kernel runs
