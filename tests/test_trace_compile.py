"""Stamps behind their compile-time switch: without it they leave nothing in the machine code, with it they write time and place."""

from __future__ import annotations

import inspect
import re
import struct
from collections.abc import Callable
from types import FunctionType

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
pytest.importorskip("numba.cuda", reason="needs an extra cu12 or cu13")

from ncclep_py import cubin, toolchain
from ncclep_py.compiled import KERNELS
from ncclep_py.config import Algorithm, GroupConfig, Layout
from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.shape import KernelShape

SAMPLE = ("ll_dispatch", "ll_combine", "ll_rank_major_dispatch", "ll_combine_complete", "ll_masked_combine", "ht_prepare", "ht_dispatch",
          "ht_combine")


def shape_of(name: str) -> KernelShape | HTShape:
    common = dict(num_experts=16, max_dispatch_tokens_per_rank=32, hidden=256, dtype=torch.bfloat16, num_topk=2)
    if name.startswith("ht_"):
        config = GroupConfig(algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=256, **common)
        return HTShape.build(config, 4, 2, 8, Layout.FLAT, 1, 4)
    layout = Layout.RANK_MAJOR if "rank_major" in name else Layout.EXPERT_MAJOR
    masked, staged = "mask" in name, name.endswith(("_send", "_complete"))
    return KernelShape.build(GroupConfig(enable_mask=masked, num_staging_slots=2 * staged, **common), 4, 2, 8, layout)


def without_stamps(factory: Callable) -> Callable:
    """The factory with all that stamps deleted from its source."""
    source = re.sub(r"\n *(trace = )?stamp\([^\n]*\)(?=\n)|\n *trace = trace_begin\(\)(?=\n)|\n *trace_begin, stamp = [^\n]*", "",
                    inspect.getsource(factory))
    assert "stamp" not in source and source != inspect.getsource(factory)
    names = dict(factory.__globals__)
    exec(compile(source, "without stamps", "exec", dont_inherit=True, flags=__import__("__future__").annotations.compiler_flag), names)
    made = names[factory.__name__]
    assert isinstance(made, FunctionType)
    return made


def machine_code(code: bytes) -> list[bytes]:
    """Every executable section of a cubin."""
    table, = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(count)]
    return [code[h[4]: h[4] + h[5]] for h in headers if h[1] == 1 and h[2] & 4]


@pytest.fixture(scope="module")
def device() -> dict[bool, bytes]:
    return {trace: toolchain.compile_device("sm_90", trace=trace) for trace in (False, True)}


@pytest.mark.parametrize("name", SAMPLE)
def test_stamps_change_nothing_unless_compiled_in(name, device):
    factory, parameters = KERNELS[name]
    shape = shape_of(name)

    def built(made: Callable, trace: bool) -> bytes:
        return toolchain.link([toolchain.kernel_ltoir(made, shape, parameters, "sm_90"), device[trace]], "sm_90")

    plain, traced = built(factory, False), built(factory, True)
    assert machine_code(plain) == machine_code(built(without_stamps(factory), False)) != machine_code(traced)
    assert cubin.resources(traced)["stack"] == 0 and cubin.resources(traced)["registers"] <= 128
    assert b"ep_trace" not in plain and b"ep_trace" in traced


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_begins_and_ends_its_stamps(name):
    source = inspect.getsource(KERNELS[name][0])
    if name in ("ll_dispatch_send", "ll_rank_major_send", "ll_net_dispatch_send", "ll_net_rank_major_send"):   # the fused kernel's source
        return
    assert "trace_begin()" in source, f"{name} should stamp its phases, see ncclep_py/kernels/stamps.py"
    body = source[source.index(f"    def {name}("):]
    assert body.count("trace_begin()") == 1 and body.count("stamp(trace, END)") == 1
    assert body.index("trace_begin()") < body.index("stamp(") < body.index("stamp(trace, END)") or "stamp(trace_begin()" in body
    assert body.rstrip().splitlines()[-3:][0].strip() == "stamp(trace, END)"   # the last statement, whatever failed
    assert body.count("= stamp(") >= body.count("= wait_") + body.count(" wait_heads(window")   # each wait is a phase


def bodies(ptx: str) -> dict[str, str]:
    return {m[1]: m[2] for m in re.finditer(r"ep_(\w+)\([^{]*\{(.*?)\n\}", ptx, re.DOTALL)}


def test_device_functions_of_stamps():
    source = "".join((toolchain.KERNEL_FOLDER / name).read_text() for name in ("lane_ops.cu", "trace_ops.cu"))
    off, on = (toolchain.compile_device("sm_90", "ptx", source, trace=trace).decode() for trace in (False, True))
    for name in ("trace_begin", "stamp"):
        left = [line for line in bodies(off)[name].splitlines() if re.match(r"\s*[a-z@]", line)]
        assert {line.split()[0].split(".")[0] for line in left} <= {"mov", "st", "ret;", "ld"} and "global" not in "".join(left)
    assert ".global" not in bodies(off)["stamp"] and "ep_trace" not in re.sub(r"ep_trace_begin", "", off)
    stamp, begin = bodies(on)["stamp"], bodies(on)["trace_begin"]
    assert "%globaltimer" in stamp and stamp.count("st.global.v2.u64") == 1 and "ld.global" not in stamp and "bar." not in stamp
    assert "%smid" in begin and begin.count("ld.volatile.global.u64") >= 4 and begin.count("st.global.v2.u64") == 1
    assert re.search(r"\.visible \.global .*ep_trace\[(4|32)\]", on)


def test_each_loaded_kernel_is_told_where_to_stamp(monkeypatch):
    """The driver's part played by Python: the words a copy of a kernel is given."""
    import ctypes
    from types import SimpleNamespace

    import cuda.core
    from cuda.bindings import driver

    from ncclep_py import launch
    from ncclep_py.tracing import DeviceTracer

    written, ok, size = [], driver.CUresult.CUDA_SUCCESS, [32]

    def init(self: launch.LoadedKernel, compiled: SimpleNamespace, device: int) -> None:
        self.name, self.code = compiled.name, SimpleNamespace(handle=f"library of {compiled.name} on {device}")

    def copy(to: int, source: int, count: int) -> tuple:
        written.append((to, struct.unpack(f"<{count // 8}Q", ctypes.string_at(source, count))))
        return (ok,)

    monkeypatch.setattr(launch.LoadedKernel, "__init__", init)
    monkeypatch.setattr(cuda.core, "Device", lambda device: SimpleNamespace(set_current=lambda: None))
    monkeypatch.setattr(driver, "cuLibraryGetGlobal", lambda library, name: (ok, f"{name.decode()} in {library}", size[0]))
    monkeypatch.setattr(driver, "cuMemcpyHtoD", copy)
    tracer = DeviceTracer(SimpleNamespace(data_ptr=lambda: 0x7000), rank=3, blocks=16)
    for name in ("ll_dispatch", "ll_combine"):
        tracer.load(SimpleNamespace(name=name), 1)
    assert written == [(f"ep_trace in library of {name} on 1", (0x7000, i, 16, 256)) for i, name in enumerate(("ll_dispatch", "ll_combine"))]
    assert tracer.kernels == ["ll_dispatch", "ll_combine"]
    size[0] = 16
    with pytest.raises(RuntimeError, match="ep_trace of ll_copy has 16 bytes, 32 expected"):
        tracer.load(SimpleNamespace(name="ll_copy"), 1)
