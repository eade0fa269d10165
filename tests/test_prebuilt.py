"""Cubins for other machines: which kernels a group needs, a folder of them, what does not fit, NCCL's device library, the command line."""

import dataclasses
import json
import logging

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
pytest.importorskip("numba.cuda", reason="needs an extra cu12 or cu13")

from ncclep_py import Group, GroupConfig, Layout, LocalWorld, compiled, device_library, local_world, prebuilt, toolchain
from ncclep_py.__main__ import main
from ncclep_py.compile import build
from ncclep_py.config import Algorithm, CombineConfig, CombineQuant, DispatchConfig, DispatchQuant, PassDir
from ncclep_py.handle import CombineInputs, CombineOutputs
from ncclep_py.kernels.shape import Wire
from ncclep_py.recording import kernels_of
from ncclep_py.topology import Topology

HT = Algorithm.HIGH_THROUGHPUT
SMALL = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=4, hidden=256, num_topk=2)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCLEP_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.delenv("NCCLEP_CUBIN_DIR", raising=False)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The kernels of SMALL's EXPERT_MAJOR handles on two ranks, for sm_90."""
    out = tmp_path_factory.mktemp("cubins")
    build(SMALL, Topology(2, 2), ["sm_90"], out, layouts=[Layout.EXPERT_MAJOR])
    return out


def spec(config=SMALL, name="ll_dispatch"):
    return next(s for s in kernels_of(config, Topology(2, 2), 8, layouts=[Layout.EXPERT_MAJOR]) if s.name == name)


# ---- which kernels -----------------------------------------------------------------------------------------------------------
def low(comm, config, staged):
    """Every operation of a LOW_LATENCY group."""
    tokens, ids = torch.zeros(2, config.hidden, dtype=torch.bfloat16), torch.tensor([[0, 5], [3, 1]])
    with Group.create(comm, config) as group:
        for layout in (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR):
            with group.create_handle(layout, ids) as handle:
                weights = torch.ones(2, 2)
                got = handle.dispatch(tokens, topk_weights=weights if layout is Layout.RANK_MAJOR else None)
                handle.combine(got.tokens.clone(), topk_weights=weights)
                if not staged:
                    handle.dispatch(tokens, topk_weights=weights if layout is Layout.RANK_MAJOR else None,
                                    config=DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4))
                    handle.combine(got.tokens, topk_weights=weights)
                else:
                    handle.dispatch(tokens, topk_weights=weights if layout is Layout.RANK_MAJOR else None, config=DispatchConfig(send_only=True))
                    handle.complete()
                    handle.combine(got.tokens, topk_weights=weights, config=CombineConfig(send_only=True))
                    handle.complete()
        if config.enable_mask:
            group.mask_clean()


def packing(comm, config):
    comm.fp4 = True
    with Group.create(comm, config) as group, group.create_handle(Layout.EXPERT_MAJOR, torch.tensor([[0, 5]])) as handle:
        got = handle.dispatch(torch.zeros(1, config.hidden, dtype=torch.bfloat16))
        scales = torch.ones(4, 8, 1)
        handle.combine(CombineInputs(got.tokens, scales=scales), topk_weights=torch.ones(1, 2), config=CombineConfig(quant_recipe=CombineQuant.NVFP4))


def high(comm, config):
    ids, tokens = torch.tensor([[0, 5], [3, 1]]), torch.zeros(2, config.hidden, dtype=torch.bfloat16)
    with Group.create(comm, config) as group:
        for layout in (Layout.FLAT, Layout.EXPERT_MAJOR):
            with group.create_handle(layout, ids) as handle:
                got = handle.dispatch(tokens, topk_weights=torch.ones(2, 2))
                handle.combine(got.tokens.clone())
                if layout is Layout.FLAT:
                    back = handle.dispatch(tokens, config=DispatchConfig(pass_direction=PassDir.BWD))
                    given = CombineInputs(back.tokens, topk_weights=torch.zeros(back.tokens.shape[0], 2))
                    handle.combine(given, CombineOutputs(), CombineConfig(pass_direction=PassDir.BWD))


@pytest.mark.parametrize(("program", "change", "more"), [
    (lambda comm, config: low(comm, config, False), {}, {"wires": [Wire(512, 16, True)]}),
    (lambda comm, config: low(comm, config, True), {"num_staging_slots": 2}, {}),
    (lambda comm, config: low(comm, config, False), {"enable_mask": True, "timeout_ns": 10**9}, {"wires": [Wire(512, 16, True)]}),
    (packing, {}, {"nvfp4": True, "layouts": [Layout.EXPERT_MAJOR]}),
    (high, {"algorithm": HT}, {})], ids=["ll", "staged", "mask", "nvfp4", "ht"])
def test_all_kernels_a_program_asks_for_are_known_before(monkeypatch, program, change, more):
    asked = set()
    made = local_world._SimRank.kernel

    def kernel(self, name, shape, *rest, **named):
        asked.add((name, repr(shape)))
        return made(self, name, shape, *rest, **named)

    monkeypatch.setattr(local_world._SimRank, "kernel", kernel)
    config = dataclasses.replace(SMALL, hidden=512, max_num_sms=2, **change)
    with LocalWorld(2, backend="sim") as world:
        world.run(program, config)
    known = {(s.name, repr(s.shape)) for s in kernels_of(config, Topology(2, 2), 8, **more)}
    assert asked <= known, sorted(name for name, _ in asked - known)
    assert {name for name, _ in known} == {name for name, _ in asked}   # and nothing is made for nobody


def test_large_groups_take_no_memory():
    config = dataclasses.replace(SMALL, num_experts=1024, hidden=7168, max_dispatch_tokens_per_rank=512, algorithm=HT)
    specs = kernels_of(config, Topology(1024, 1024), 132)
    assert {s.name for s in specs} == {"ht_count", "ht_prepare", "ht_dispatch", "ht_combine", "ht_copy"}


# ---- using a folder ----------------------------------------------------------------------------------------------------------
def nothing_compiles(monkeypatch):
    def refuse(*arguments, **named):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(toolchain, "kernel_ltoir", refuse)
    monkeypatch.setattr(toolchain, "compile_device", refuse)


def test_kernels_come_from_the_folder(monkeypatch, folder, tmp_path):
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(folder))
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path))
    nothing_compiles(monkeypatch)
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    for wanted in kernels_of(SMALL, Topology(2, 2), 8, layouts=[Layout.EXPERT_MAJOR]):
        made = compiled.compile_kernel(wanted, "sm_90")
        assert made.name == wanted.name and made.cubin.startswith(b"\x7fELF") and wanted.name in made.symbol and made.info["arch"] == "sm_90"
    assert before == {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} and not list(tmp_path.iterdir())   # only read


def test_the_compilers_have_no_say(monkeypatch, folder):
    """Another machine has other compilers; the kernel's meaning is the same."""
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(folder))
    monkeypatch.setattr(toolchain, "versions", lambda: {"NVRTC": "99.9"})
    nothing_compiles(monkeypatch)
    assert compiled.compile_kernel(spec(), "sm_90").info["arch"] == "sm_90"


@pytest.mark.parametrize(("change", "arch", "says"), [
    ({"hidden": 512}, "sm_90", "only for other constants: shape.row_bytes is 512 there, 1024 here"),
    ({}, "sm_100", "arch is sm_90 there, sm_100 here"), ({"num_slots": 2}, "sm_90", "num_slots is 1 there, 2 here")])
def test_what_does_not_fit_is_named(monkeypatch, folder, change, arch, says):
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(folder))
    nothing_compiles(monkeypatch)
    with pytest.raises(RuntimeError, match="no compiler here") as told:
        compiled.compile_kernel(spec(dataclasses.replace(SMALL, **change)), arch)
    assert says in str(told.value) and str(folder) in str(told.value)


def test_another_nccl_or_package_does_not_fit(monkeypatch, folder):
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(folder))
    monkeypatch.setattr(toolchain, "nccl_header_version", lambda include=None: 23007)
    found, why = prebuilt.find(spec(), "sm_90")
    assert found is None and "NCCL is" in why and "2.30.7 here" in why
    monkeypatch.undo()
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(folder))
    monkeypatch.setattr(prebuilt, "digest_of", lambda *patterns: "other")
    found, why = prebuilt.find(spec(), "sm_90")
    assert found is None and "of another version of ncclep_py" in why


def test_a_kernel_that_is_not_there_is_compiled_after_a_warning(monkeypatch, folder, caplog):
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(folder))
    wanted = kernels_of(SMALL, Topology(2, 2), 8, layouts=[Layout.RANK_MAJOR])[1]
    assert wanted.name == "ll_rank_major_dispatch"
    with caplog.at_level(logging.WARNING):
        assert compiled.compile_kernel(wanted, "sm_90").cubin
        compiled.compile_kernel(wanted, "sm_90")
    assert caplog.text.count("has no ll_rank_major_dispatch for sm_90; compiling it here") == 1


def test_a_damaged_file_is_none(monkeypatch, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[:-1] + b"?")
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(tmp_path))
    found, why = prebuilt.find(spec(), "sm_90")
    assert found is None and "has no ll_dispatch" in why


def test_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(tmp_path / "none"))
    with pytest.raises(RuntimeError, match="NCCLEP_CUBIN_DIR names .*none, which is no folder"):
        prebuilt.find(spec(), "sm_90")
    monkeypatch.delenv("NCCLEP_CUBIN_DIR")
    assert prebuilt.find(spec(), "sm_90") == (None, "")


def test_older_cubins_of_the_same_major_version_serve(monkeypatch, folder):
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(folder))
    assert prebuilt.find(spec(), "sm_91")[0] is not None and prebuilt.find(spec(), "sm_89")[0] is None


def test_without_headers_the_loaded_version_decides(monkeypatch, folder):
    here = toolchain.nccl_header_version()

    def missing(*_):
        raise ImportError("no NCCL headers")

    monkeypatch.setattr(toolchain, "nccl_include", missing)
    monkeypatch.setattr("ncclep_py.communicator._loaded_version", lambda: here)
    monkeypatch.setenv("NCCLEP_CUBIN_DIR", str(folder))
    prebuilt.check_loaded(here)
    assert prebuilt.find(spec(), "sm_90")[0] is not None
    monkeypatch.setattr("ncclep_py.communicator._loaded_version", lambda: 23007)
    assert prebuilt.find(spec(), "sm_90")[0] is None
    monkeypatch.delenv("NCCLEP_CUBIN_DIR")
    with pytest.raises(ImportError, match="no NCCL headers"):
        prebuilt.check_loaded(here)


# ---- NCCL's device library -----------------------------------------------------------------------------------------------------
GIN = """
#include <cuda/std/cstdint>
#include <cuda/std/cstddef>
extern "C" __device__ long long ep_probe(long long dev_comm);
typedef unsigned long nv_u64;
struct ncclGin_C; struct ncclDevComm;
__device__ void ncclGin_C_init(ncclGin_C* net, unsigned backends, ncclDevComm const& comm, int context);
extern "C" __device__ long long ep_probe(long long dev_comm) {
  alignas(16) char room[256];
  ncclGin_C_init((ncclGin_C*)room, 4, *(const ncclDevComm*)dev_comm, 0);
  return room[0];
}
extern "C" __global__ void probe(long long dev_comm, long long* out) { *out = ep_probe(dev_comm); }
"""


def has_library():
    try:
        return bool(device_library.library_path())
    except (RuntimeError, ImportError):
        return False


@pytest.mark.skipif(not has_library(), reason="NCCL here has no libnccl_device.ltoir")
def test_linked_with_nccls_own_functions():
    """A function that only NCCL's library has is found there, so nothing stays open in the cubin."""
    from ncclep_py.kernel_cache import KernelCache

    parts = device_library.network_parts("sm_90", False, KernelCache(), source=GIN)
    cubin = toolchain.link(parts, "sm_90")
    assert cubin.startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match="cannot link"):
        toolchain.link(parts[:1], "sm_90")   # without the library


@pytest.mark.parametrize(("made", "linker"), [((12, 9), (12, 9)), ((12, 8), (12, 9)), (None, (12, 9)), ((13, 0), (13, 4))])
def test_linkers_that_can(tmp_path, made, linker):
    device_library.check_linker(tmp_path, made, linker)


@pytest.mark.parametrize(("made", "linker", "says"), [
    ((13, 4), (13, 0), "made by CUDA 13.4, which nvJitLink 13.0 cannot link: .*pip install 'nvidia-nvjitlink>=13.4,<14'.*ncclep_py compile"),
    ((12, 9), (13, 0), "pip install 'nvidia-nvjitlink-cu12>=12.9,<13'"), ((13, 0), (12, 9), "nvJitLink of CUDA 13, 13.0 or newer")])
def test_linkers_that_cannot(tmp_path, made, linker, says):
    with pytest.raises(RuntimeError, match=says):
        device_library.check_linker(tmp_path, made, linker)


def test_an_nccl_without_the_library(monkeypatch, tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "nccl.h").write_text("#define NCCL_VERSION_CODE 23007\n")
    monkeypatch.setattr(toolchain, "nccl_include", lambda: tmp_path / "include")
    with pytest.raises(RuntimeError, match="NCCL 2.30.7 in .* has none: 2.32.0 is the first with all of it.*set NCCL_HOME"):
        device_library.library_path()


# ---- command line --------------------------------------------------------------------------------------------------------------
def run(capsys, *words):
    code = main(["compile", *words])
    return code, capsys.readouterr()


SIZES = ("--ranks", "2", "--experts", "8", "--hidden", "256", "--topk", "2", "--tokens", "4")


def test_compile_command(capsys, tmp_path):
    code, out = run(capsys, "--out", str(tmp_path / "c"), *SIZES, "--layout", "expert_major", "--arch", "sm_90,sm_100", "--json")
    told = json.loads(out.out)
    assert code == 0 and sorted(told["files"]) == sorted(p.name for p in (tmp_path / "c").iterdir())
    assert len(told["files"]) == 6 and {name.split("-")[1] for name in told["files"]} == {"sm_90", "sm_100"}
    assert all(p.stat().st_mode & 0o444 == 0o444 for p in (tmp_path / "c").iterdir())


@pytest.mark.parametrize(("team", "told"), [((), "2 ranks in one team, "), (("--team", "1"), "2 ranks in 2 teams of 1, ")])
def test_what_was_made_is_told(capsys, tmp_path, monkeypatch, team, told):
    monkeypatch.setattr("ncclep_py.compile.build", lambda *args, **more: [tmp_path / "a"])
    words = ("--out", str(tmp_path), *SIZES, *team)
    says = f"sm_90; LOW_LATENCY, {told}8 experts, top 2, 4 tokens of a rank, hidden 256, bf16"
    assert run(capsys, *words)[1].out == f"1 cubins for {says}\nuse them with NCCLEP_CUBIN_DIR={tmp_path}\n"
    assert json.loads(run(capsys, *words, "--json")[1].out)["made_for"] == says


@pytest.mark.parametrize("arch", ["sm_99", "sm_90,sm_99", "sm_75", "sm_99a"])
def test_an_architecture_that_is_none(capsys, tmp_path, arch):
    """NVRTC knows sm_75, but the device functions do not fit it."""
    code, out = run(capsys, "--out", str(tmp_path / "c"), "--arch", arch, *SIZES)
    assert code == 2 and out.err.startswith("--arch must be of sm_80, ") and out.err.endswith(f", got {arch.split(',')[-1]}\n")
    assert ", sm_90, " in out.err and not (tmp_path / "c").exists()


def test_list(capsys, tmp_path):
    more = ("--layout", "rank_major", "--config", "num_staging_slots=2", "--recipe", "nvfp4", "--hidden", "512")
    code, out = run(capsys, "--out", str(tmp_path), "--list", *SIZES, *more)
    assert code == 0 and {"ll_rank_major_send", "ll_combine_complete", "ll_nvfp4_combine"} <= set(out.out.split()) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "says"), [
    (("--arch", "hopper"), "arch must look like sm_90"), (("--team", "3"), "leave a last team of"), (("--recipe", "fp4"), "recipe must be nvfp4"),
    (("--config", "num_slots"), "--config must be NAME=INTEGER"), (("--config", "colour=3"), "colour"), (("--layout", "flat"), "layout must be")])
def test_wrong_words(capsys, tmp_path, words, says):
    code, out = run(capsys, "--out", str(tmp_path), "--ranks", "8", "--json", *words)
    assert code == 2 and says in json.loads(out.out)["error"]


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, capsys, more):
    (tmp_path / "file").write_text("")
    assert main(["compile", "--arch", "sm_90", "--out", str(tmp_path / "file"), *more]) == 2
    said = "".join(capsys.readouterr())
    assert f"--out must be a folder that can be written, got {tmp_path / 'file'}" in said and "Traceback" not in said
