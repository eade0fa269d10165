"""Every kernel compiled for every supported architecture, on any machine: resources, wide accesses, types, NCCL versions, and what a user is told."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
pytest.importorskip("numba.cuda", reason="needs an extra cu12 or cu13")

from ncclep_py import cubin, launch, toolchain
from ncclep_py.config import GroupConfig, Layout
from ncclep_py.kernels.shape import KernelShape, Wire

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK = 512
LL_KERNELS = [name for name in launch.KERNELS if not name.startswith("ht_") and "_net_" not in name]   # the others: test_ht_compile.py


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Compile anew, but everything once only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCLEP_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


def shape(dtype: str = "bf16", idx_bytes: int = 8, num_topk: int = 8, ranks: int = 8, layout: Layout = Layout.EXPERT_MAJOR,
          staging: int = 0) -> KernelShape:
    config = GroupConfig(num_experts=128, max_dispatch_tokens_per_rank=128, hidden=7168, dtype=DTYPES[dtype], num_topk=num_topk,
                         num_staging_slots=staging, enable_mask=staging == 0)
    return KernelShape.build(config, ranks, num_topk, idx_bytes, layout)


def fits(made: launch.CompiledKernel) -> None:
    """No stack, hence nothing spilled, few enough registers for the block we launch, and no 64-bit division, which is a call of a hundred steps."""
    assert made.info["stack"] == 0
    assert not re.search(rb"__cuda_sm\d+_(div|rem)_[su]64", made.cubin)
    assert 0 < made.info["registers"] <= 65536 // BLOCK


# ---- kernels -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("idx_bytes", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LL_KERNELS)
def test_kernel_fits(name, dtype, idx_bytes):
    made = launch.compile_kernel(launch.KernelSpec(name, shape(dtype, idx_bytes)))
    fits(made)
    assert name in made.symbol and made.cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("name", LL_KERNELS)
def test_kernel_fits_with_the_most_experts_per_token_and_one_rank(name):
    fits(launch.compile_kernel(launch.KernelSpec(name, shape(num_topk=32, ranks=1))))


@pytest.mark.parametrize("idx_bytes", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["ll_rank_major_dispatch", "ll_combine", "ll_nvfp4_combine",
                                  "ll_masked_rank_major_dispatch", "ll_masked_combine", "ll_masked_nvfp4_combine"])
def test_rank_major_kernel_fits(name, dtype, idx_bytes):
    fits(launch.compile_kernel(launch.KernelSpec(name, shape(dtype, idx_bytes, layout=Layout.RANK_MAJOR))))
    fits(launch.compile_kernel(launch.KernelSpec(name, shape(dtype, idx_bytes, 32, 1, Layout.RANK_MAJOR))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["ll_dispatch", *(n for n in launch.KERNELS if n.endswith(("_send", "_complete")) and "_net_" not in n)])
def test_kernel_fits_with_staging(name, dtype):
    fits(launch.compile_kernel(launch.KernelSpec(name, shape(dtype, staging=4))))
    fits(launch.compile_kernel(launch.KernelSpec(name, shape(dtype, num_topk=32, ranks=1, staging=4))))


@pytest.mark.parametrize("name", ["ll_rank_major_dispatch", "ll_rank_major_send", "ll_rank_major_complete", "ll_combine_send", "ll_combine_complete",
                                  "ll_copy"])
def test_rank_major_kernel_fits_with_staging(name):
    fits(launch.compile_kernel(launch.KernelSpec(name, shape(layout=Layout.RANK_MAJOR, staging=4))))
    fits(launch.compile_kernel(launch.KernelSpec(name, shape(num_topk=32, ranks=1, layout=Layout.RANK_MAJOR, staging=4))))


WIRES = {"QUANT_FWD": Wire(3584 + 512, 448), "DS_FP8": Wire(7168, 224, True), "DS_FP8 rounded": Wire(7168, 224, True, True)}


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
@pytest.mark.parametrize("recipe", WIRES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_recipe_fits_or_is_refused(arch, recipe, layout):
    if int(arch[3:]) not in supported():
        pytest.skip(f"this NVRTC does not know {arch}")
    name = "ll_dispatch" if layout is Layout.EXPERT_MAJOR else "ll_rank_major_dispatch"
    spec = launch.KernelSpec(name, dataclasses.replace(shape(layout=layout), wire=WIRES[recipe]))
    if arch == "sm_80" and "FP8" in recipe:
        with pytest.raises(NotImplementedError, match="DS_FP8 needs a GPU that converts to E4M3"):
            launch.compile_kernel(spec, arch)
    else:
        fits(launch.compile_kernel(spec, arch))


def test_quantisation_rounds_to_nearest_even_in_one_instruction():
    ptx = {arch: toolchain.compile_device(arch, "ptx").decode() for arch in ("sm_80", "sm_90")}
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx["sm_90"] and "e4m3x2" not in ptx["sm_80"]
    body = re.search(r"ep_quantise_row\([^{]*\{(.*?)\n\}", ptx["sm_90"], re.DOTALL)[1]
    assert "div.rn.f32" in body and "ftz" not in body and "approx" not in body and "fma" not in body


def test_quantisation_reads_what_other_lanes_copied():
    body = re.search(r"ep_quantise_row\([^{]*\{(.*?)\n\}", toolchain.compile_device("sm_90", "ptx").decode(), re.DOTALL)[1]
    at = [body.index(word) for word in ("cp.async.wait_all", "bar.warp.sync", "ld.shared.v4.u32")]
    assert at == sorted(at) and body.index("ld.global.nc") > at[1]


@functools.cache
def supported() -> set[int]:
    from cuda.bindings import nvrtc

    return set(nvrtc.nvrtcGetSupportedArchs()[-1])


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", LL_KERNELS)
def test_kernel_fits_on_other_architectures(name, arch):
    if int(arch[3:]) not in supported():
        pytest.skip(f"this NVRTC does not know {arch}")
    if name.endswith("nvfp4_combine") and arch == "sm_80":
        with pytest.raises(NotImplementedError, match="NVFP4 needs a GPU that converts to E4M3"):
            launch.compile_kernel(launch.KernelSpec(name, shape()), arch)
    else:
        fits(launch.compile_kernel(launch.KernelSpec(name, shape()), arch))


def test_rows_move_in_16_byte_vectors():
    ptx = toolchain.compile_device("sm_90", "ptx").decode()
    bodies = {m[1]: m[2] for m in re.finditer(r"ep_(\w+)\([^{]*\{(.*?)\n\}", ptx, re.DOTALL)}
    for name in ("scatter_row", "gather_row", "sum_row", "push_row", "reduce_row", "copy_row"):
        loads, stores = re.findall(r"\bld\.global\S*\.v4\.u32", bodies[name]), re.findall(r"\bst\.global\S*\.v4\.u32", bodies[name])
        narrow = re.findall(r"\bst(?:\.global)?\.[ufb](?:8|16|32|64)\b", bodies[name])
        assert len(loads) >= 4 and len(stores) >= 2 and not narrow


def test_resources_are_read_from_the_cubin():
    source = 'extern "C" __global__ void k(int* p, int n) { volatile int a[64]; for (int i = 0; i < n; ++i) a[p[i] & 63] = i; p[0] = a[n & 63]; }'
    code = toolchain.link([toolchain.compile_device("sm_90", source=source)], "sm_90")
    assert cubin.entry_symbols(code) == ["k"]
    assert cubin.resources(code)["stack"] >= 256


# ---- types -------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def typed(monkeypatch):
    """Kernels as numba typed them: (types of all variables, LLVM IR)."""
    from numba.cuda import compiler

    seen, compile_cuda = [], compiler.compile_cuda

    def recording(*args, **kwargs):
        made = compile_cuda(*args, **kwargs)
        seen.append((made.type_annotation.typemap, made.library.get_llvm_str()))
        return made

    monkeypatch.setattr(compiler, "compile_cuda", recording)
    return seen


PLAIN = re.compile(r"int64|bool|boolean|none|Literal\[(int|bool)\]\(.*\)|range_(state|iter)_int64|(Pair|pair|Tuple)[<(]int64, bool(ean)?[>)]|"
                   r"(Function|type|class)\(.*\)")


def others(typed) -> set[str]:
    """Types other than int64 and what loops, calls and branches need, and floating point in the code."""
    (types, llvm), = typed
    return {t for t in map(str, types.values()) if not PLAIN.fullmatch(t)} | set(re.findall(r"\b(?:double|float|half)\b", llvm))


@pytest.mark.parametrize("name", LL_KERNELS)
def test_kernel_has_int64_only(name, typed):
    factory, parameters = launch.KERNELS[name]
    toolchain.kernel_ltoir(factory, shape(), parameters, "sm_90")
    assert len(typed[0][0]) > len(parameters)
    assert others(typed) == set()


def _divides(shape, ops):
    first_token = ops.first_token

    def kernel(a):
        first_token(a / 2)

    return kernel


def _mixes(shape, ops):
    first_token, one = ops.first_token, numpy.uint64(1)

    def kernel(a):
        first_token(a + one)

    return kernel


@pytest.mark.parametrize(("factory", "found"), [(_divides, {"float64", "double"}), (_mixes, {"uint64"})])
def test_other_types_are_found(factory, found, typed):
    toolchain.kernel_ltoir(factory, shape(), ("a",), "sm_90")
    assert found <= others(typed)


# ---- NCCL's versions -----------------------------------------------------------------------------------------------------------
def header_folders() -> list[str]:
    """NCCL include folders to compile against, from the environment; continuous integration must give some."""
    named = [p for p in os.environ.get("NCCLEP_TEST_NCCL_HEADERS", "").split(":") if p]
    if not named and os.environ.get("CI") == "true":
        return ["missing"]
    return named or [pytest.param("", marks=pytest.mark.skip(reason="NCCLEP_TEST_NCCL_HEADERS names no NCCL include folders"))]


@pytest.mark.parametrize("folder", header_folders())
def test_device_functions_compile_against(folder):
    assert folder != "missing", "CI must set NCCLEP_TEST_NCCL_HEADERS, see scripts/fetch_nccl_headers.py"
    assert toolchain.nccl_header_version(Path(folder)) >= toolchain.OLDEST_NCCL
    ptx = toolchain.compile_device("sm_90", "ptx", nccl=Path(folder)).decode()
    assert "ep_gather_row" in ptx


def test_loaded_nccl_must_be_that_of_the_headers():
    headers = toolchain.nccl_header_version()
    toolchain.check_loaded_nccl(headers)
    loaded, told = toolchain.version_text(headers + 1), toolchain.version_text(headers)
    with pytest.raises(RuntimeError, match=rf"NCCL {loaded} is loaded.*headers from .* are those of NCCL {told}"):
        toolchain.check_loaded_nccl(headers + 1)
    with pytest.raises(RuntimeError, match=r"NCCL 2\.29\.7 is loaded; ncclep_py needs 2\.30\.0"):
        toolchain.check_loaded_nccl(22907)


# ---- headers: where they are found, and what a user is told -----------------------------------------------------------------------
def fake_nccl(folder: Path) -> Path:
    (folder / "nccl_device" / "impl").mkdir(parents=True)
    (folder / "nccl_device" / "impl" / "ptr__funcs.h").touch()
    (folder / "nccl.h").write_text("#define NCCL_VERSION_CODE 23105\n")
    return folder


def fake_cuda(*folders: Path) -> None:
    for folder, name in zip(folders, ("cuda.h", "cuda/std/cstdint"), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.fixture
def bare(monkeypatch, tmp_path) -> Path:
    """A machine whose only ``nvidia`` wheels are in the folder returned, with nothing in the environment or the system."""
    for name in ("NCCL_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "_wheel_folders", lambda: [tmp_path / "nvidia"])
    monkeypatch.setattr(toolchain, "SYSTEM_NCCL", tmp_path / "none")
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", tmp_path / "none")
    return tmp_path


def test_nccl_home_comes_first(bare, monkeypatch):
    wheel = fake_nccl(bare / "nvidia" / "nccl" / "include")
    assert toolchain.nccl_include() == wheel
    home = fake_nccl(bare / "home" / "include")
    monkeypatch.setenv("NCCL_HOME", str(bare / "home"))
    assert toolchain.nccl_include() == home
    assert toolchain.nccl_header_version() == 23105


def test_missing_nccl_headers_are_named(bare):
    with pytest.raises(ImportError, match=r"no NCCL headers.*ncclep_py\[cu12\].*NCCL_HOME"):
        toolchain.nccl_include()


@pytest.mark.parametrize("where", ["cu12 wheels", "cu13 wheels", "CUDA_HOME"])
def test_cuda_headers_are_found(where, bare, monkeypatch):
    nvidia, home = bare / "nvidia", bare / "cuda"
    folders = {"cu12 wheels": [nvidia / part / "include" for part in ("cuda_runtime", "cuda_cccl")],
               "cu13 wheels": [nvidia / "cu13" / "include", nvidia / "cu13" / "include" / "cccl"],
               "CUDA_HOME": [home / "include", home / "include" / "cccl"]}[where]
    fake_cuda(*folders)
    if where == "CUDA_HOME":
        monkeypatch.setenv("CUDA_HOME", str(home))
    nccl = fake_nccl(nvidia / "nccl" / "include")
    assert toolchain.include_folders()[:2] == [toolchain.KERNEL_FOLDER / "headers", nccl]
    assert toolchain.include_folders()[2:] == folders


def test_missing_cuda_headers_are_named(bare):
    fake_nccl(bare / "nvidia" / "nccl" / "include")
    with pytest.raises(ImportError, match=r"no CUDA headers.*ncclep_py\[cu13\].*CUDA_HOME"):
        toolchain.include_folders()


def test_broken_device_code_names_versions():
    with pytest.raises(RuntimeError, match=r"NVRTC 1\d\.\d cannot compile the device functions for sm_90 against NCCL 2\.\d+\.\d+ in(.|\n)*error"):
        toolchain.compile_device("sm_90", source="int f( {")


# ---- launch --------------------------------------------------------------------------------------------------------------------
def test_shared_bytes():
    assert launch.shared_bytes(shape(), 128, 16) == 3 * 128 * 4 + 8 * 8 * 4
    assert launch.shared_bytes(shape(num_topk=1), 128, 50) == 1536 + 16   # 3 tokens, rounded up
    row = shape().row_bytes
    assert launch.shared_bytes(shape(), 128, 16, 16) == 32 * 8 * 16 + 8 * row          # 8 tokens, two warps on each: half a row per warp
    assert launch.shared_bytes(shape(), 128, 4, 16, 100_000) == 4096 + 374 * 16 * 16   # as much of 16 rows as fits
    quantised = dataclasses.replace(shape(), wire=Wire(shape().row_bytes // 2, shape().row_bytes // 64, True))
    stretches = quantised.row_bytes // 1024
    assert launch.shared_bytes(quantised, 1, 1, 16) == 32 * 8 * 16 + 16 * 1024 * -(-stretches // 16)   # whole stretches
    with pytest.raises(ValueError, match=r"16384 tokens per block \(32768 over 2 blocks\).*at most 204800"):
        launch.shared_bytes(shape(), 32768, 2)


def test_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="ll_dispatch, .*ll_combine, .*got 'll_scatter'"):
        launch.KernelSpec("ll_scatter", shape())


@pytest.mark.parametrize("arch", ["90", "sm_9", "compute_90"])
def test_unknown_architecture_is_named(arch):
    with pytest.raises(ValueError, match="arch must look like sm_90"):
        launch.compile_kernel(launch.KernelSpec("ll_combine", shape()), arch)


def test_self_test_compiles():
    found = launch.self_test()
    assert found["compiled"], found["message"]
    assert found["ran_on_gpu"] is not False, found["message"]
