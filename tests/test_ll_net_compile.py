"""LOW_LATENCY kernels over several teams, compiled and linked with NCCL's device library, on any machine that has it."""

from __future__ import annotations

import re

import pytest
from test_compile import cache  # noqa: F401  (fixture)
from test_net_ptx import pytestmark  # noqa: F401  (skipped without the library)

from ncclep_py import launch, toolchain
from ncclep_py.config import GroupConfig
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.shape import KernelShape

CONFIG = GroupConfig(num_experts=128, max_dispatch_tokens_per_rank=128, hidden=7168, num_topk=8)
STACK = 192
"""Bytes of a thread's stack: NCCL keeps its structures there (152); nothing else is spilled in loops."""


@pytest.mark.parametrize("name", ["ll_net_dispatch", "ll_net_combine"])
def test_kernel_is_linked_and_fits(name):
    made = launch.compile_kernel(launch.KernelSpec(name, LLNetShape.over(KernelShape.build(CONFIG, 8, 8, 8), CONFIG, 4)), "sm_90")
    assert name in made.symbol and made.cubin.startswith(b"\x7fELF")
    assert made.info["registers"] <= toolchain.MAX_REGISTERS and made.info["stack"] <= STACK
    assert not re.search(rb"__cuda_sm\d+_(div|rem)_[su]64", made.cubin)


def test_rows_move_in_16_byte_vectors():
    ptx = toolchain.compile_device("sm_90", "ptx", teams=True).decode()
    bodies = {m[1]: m[2] for m in re.finditer(r"ep_(ll_net_\w+)\([^{]*\{(.*?)\n\}", ptx, re.DOTALL)}
    for name in ("ll_net_send_row", "ll_net_scatter_row", "ll_net_take_row", "ll_net_gather_row"):
        loads, stores = re.findall(r"\bld\.global\S*\.v4\.u32", bodies[name]), re.findall(r"\bst\.global\S*\.v4\.u32", bodies[name])
        assert len(loads) >= 4 and len(stores) >= 2
        assert ("ld.global.nc.L1" in bodies[name]) == (name in ("ll_net_send_row", "ll_net_scatter_row"))   # staging and slots are written meanwhile
