"""Every HIGH_THROUGHPUT kernel compiled for every supported architecture, on any machine: resources, wide accesses, types."""

from __future__ import annotations

import re

import pytest
from test_compile import DTYPES, cache, fits, others, supported, typed  # noqa: F401  (fixtures)

from ncclep_py import launch, toolchain
from ncclep_py.config import Algorithm, GroupConfig, Layout
from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.shape import PLAIN, Wire

HT_KERNELS = [name for name in launch.KERNELS if name.startswith("ht_") and "_net_" not in name]
LAYOUTS = (Layout.FLAT, Layout.EXPERT_MAJOR)


def shape(layout: Layout, dtype: str = "bf16", idx_bytes: int = 8, num_topk: int = 8, ranks: int = 8, wire: Wire = PLAIN) -> HTShape:
    config = GroupConfig(num_experts=128, max_dispatch_tokens_per_rank=2048, hidden=7168, dtype=DTYPES[dtype], num_topk=num_topk,
                         algorithm=Algorithm.HIGH_THROUGHPUT)
    return HTShape.build(config, ranks, num_topk, idx_bytes, layout, 128, 16, wire=wire)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, idx_bytes", [("bf16", 4), ("bf16", 8), ("fp16", 8), ("fp32", 4)])
@pytest.mark.parametrize("name", HT_KERNELS)
def test_kernel_fits(name, dtype, idx_bytes, layout):
    made = launch.compile_kernel(launch.KernelSpec(name, shape(layout, dtype, idx_bytes)))
    fits(made)
    assert name in made.symbol and made.cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HT_KERNELS)
def test_kernel_fits_with_the_most_experts_per_token_one_rank_and_scales(name, layout):
    fits(launch.compile_kernel(launch.KernelSpec(name, shape(layout, num_topk=32, ranks=1, wire=Wire(7168, 224)))))


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", HT_KERNELS)
def test_kernel_fits_on_other_architectures(name, arch):
    if int(arch[3:]) not in supported():
        pytest.skip(f"this NVRTC does not know {arch}")
    for layout in LAYOUTS:
        fits(launch.compile_kernel(launch.KernelSpec(name, shape(layout)), arch))


def test_rows_move_in_16_byte_vectors():
    ptx = toolchain.compile_device("sm_90", "ptx").decode()
    bodies = {m[1]: m[2] for m in re.finditer(r"ep_(\w+)\([^{]*\{(.*?)\n\}", ptx, re.DOTALL)}
    for name in ("ht_scatter_row", "ht_gather_row"):
        loads, stores = re.findall(r"\bld\.global\S*\.v4\.u32", bodies[name]), re.findall(r"\bst\.global\S*\.v4\.u32", bodies[name])
        narrow = re.findall(r"\bst(?:\.global)?\.[ufb](?:8|16|32|64)\b", bodies[name])
        assert len(loads) >= 4 and len(stores) >= 2 and not narrow


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HT_KERNELS)
def test_kernel_has_int64_only(name, layout, typed):  # noqa: F811
    factory, parameters = launch.KERNELS[name]
    toolchain.kernel_ltoir(factory, shape(layout, wire=Wire(7168, 224)), parameters, "sm_90")
    assert len(typed[0][0]) > len(parameters)
    assert others(typed) == set()
