"""The fused form of kernels: compiled on any machine; which launches of a `LocalWorld` become one grid. It runs in tests/test_gpu_fused.py."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
from test_net_ptx import has_library

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
pytest.importorskip("numba.cuda", reason="needs an extra cu12 or cu13")

from ncclep_py import cubin, fused, launch, local_world, toolchain
from ncclep_py.compiled import KernelSpec, compile_kernel, parameters_of
from ncclep_py.config import Algorithm, GroupConfig, Layout
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.kernels.shape import KernelShape

LL = GroupConfig(num_experts=16, max_dispatch_tokens_per_rank=16, hidden=256, num_topk=2)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCLEP_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


def spec(name: str) -> KernelSpec:
    config = dataclasses.replace(LL, enable_mask="masked" in name)
    return KernelSpec(name, KernelShape.build(config, 4, 2, 8, Layout.RANK_MAJOR if "rank_major" in name else Layout.EXPERT_MAJOR))


@pytest.mark.parametrize("name", ["ll_dispatch", "ll_combine", "ll_rank_major_dispatch", "ll_masked_dispatch"])
def test_fused_kernels_compile(name):
    made = fused.compile_fused(spec(name), "sm_90", 512)
    assert cubin.entry_symbols(made.cubin) == [f"fused_{name}"] == [made.symbol]
    assert made.info["stack"] == 0 and made.info["registers"] <= 128
    assert fused.compile_fused(spec(name), "sm_90", 512).cubin == made.cubin


@pytest.mark.skipif(not has_library(), reason="NCCL here has no libnccl_device.ltoir of 2.32 or newer")
def test_a_fused_kernel_over_teams_is_linked_with_nccls_library():
    config = dataclasses.replace(LL, algorithm=Algorithm.HIGH_THROUGHPUT)
    made = fused.compile_fused(KernelSpec("ht_net_combine", HTNetShape.over_teams(config, 4, 2, 2, 8, Layout.FLAT, 128, 2)), "sm_90", 512)
    assert cubin.entry_symbols(made.cubin) == ["fused_ht_net_combine"] and made.info["registers"] <= 128


def test_the_fused_form_is_another_entry_of_the_cache():
    wanted = spec("ll_combine")
    assert len({fused.compile_fused(wanted, "sm_90", threads).info["key"] for threads in (512, 256)} | {compile_kernel(wanted).info["key"]}) == 3


def test_each_rank_reads_its_row_of_the_table():
    """The entry alone, as PTX: it loads one row of 64-bit values, at blockIdx.y rows from the table's begin, and passes them in order."""
    count = len(parameters_of("ll_combine"))
    source = fused.ENTRY.format(body="body", symbol="fused", threads=512, count=count, types=", ".join(["long long"] * count),
                                values=", ".join(f"mine[{i}]" for i in range(count)))
    ptx = toolchain.compile_device("sm_90", "ptx", source).decode()
    loads = re.findall(r"ld\.global(?:\.nc)?\.u64\s+(%rd\d+), \[%rd\d+(?:\+(\d+))?\]", ptx)
    assert sorted(int(offset or 0) for _, offset in loads) == [8 * i for i in range(count)]
    register = {int(offset or 0): name for name, offset in loads}
    passed = dict(re.findall(r"st\.param\.b64\s+\[param(\d+)[^\]]*\], (%rd\d+)", ptx))
    assert [passed[str(i)] for i in range(count)] == [register[8 * i] for i in range(count)]
    assert "%ctaid.y" in ptx and re.search(rf"mul\.wide\.u32\s+%rd\d+, %r\d+, {8 * count};", ptx)


class Recorder:
    """In the place of a `FusedStream`."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def launch(self, *what: Any) -> None:
        self.launched.append(what)


def request(key: str | None, blocks: int, value: int, ran: list[int], refusing: bool = False, world: Any = None) -> Any:
    info = SimpleNamespace(loaded=SimpleNamespace(compiled=SimpleNamespace(info={"key": key})))

    class State:
        stream = f"stream {value}"

        def __enter__(self) -> None:
            pass

        def __exit__(self, *exc: object) -> None:
            pass

    comm = SimpleNamespace(world=world, own_streams=State, synchronize=lambda: ran.append(100 + value))
    return comm, lambda: ran.append(value), refusing, (SimpleNamespace(fused=info), [value, 7], blocks) if key else None


@pytest.mark.parametrize(("keys", "blocks", "one_grid"), [(("a", "a"), (4, 4), True), (("a", "b"), (4, 4), False), (("a", "a"), (4, 2), False),
                                                           (("a", None), (4, 4), False)])
def test_equal_launches_become_one_grid_and_others_do_not(keys, blocks, one_grid):
    ran: list[int] = []
    world = SimpleNamespace(fused=Recorder())
    told = local_world._call_all([request(k, b, i, ran, world=world) for i, (k, b) in enumerate(zip(keys, blocks, strict=True))])
    assert told == [False, False]
    assert ran == ([] if one_grid else [0, 1])
    assert [what[1:] for what in world.fused.launched] == ([([[0, 7], [1, 7]], 4, ["stream 0", "stream 1"])] if one_grid else [])


def test_a_refusal_is_waited_for_and_a_world_that_does_not_fuse_launches_each():
    ran: list[int] = []
    world = SimpleNamespace(fused=None)
    assert local_world._call_all([request("a", 4, i, ran, refusing=i == 1, world=world) for i in range(2)]) == [True, True]
    assert ran == [0, 1, 100, 101]


def test_values_keep_their_bits():
    assert [launch.signed(v) for v in (0, 5, -1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)] == [0, 5, -1, (1 << 63) - 1, -(1 << 63), -1]


def test_line_information_of_device_functions_can_be_kept():
    made = compile_kernel(spec("ll_combine"), lineinfo=True)
    assert b".debug_line" in made.cubin and b"lane_ops" not in made.cubin and made.info["stack"] == 0


@pytest.mark.parametrize("layout", ["expert_major", "rank_major", "flat"])
def test_the_script_for_profilers_runs(layout: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / "scripts")
    import profile_pair

    small = ["--ranks", "2", "--tokens", "3", "--experts", "4", "--topk", "2", "--hidden", "64"]
    assert profile_pair.main(["--layout", layout, "--backend", "sim", *small]) == 3
    assert f"{layout}: 3 pairs on 2 ranks" in capsys.readouterr().out


def test_the_script_for_host_time_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / "scripts")
    import profile_host

    spent = profile_host.main(["--hidden", "64", "--experts", "8", "--rows", "3"])
    assert all(0 < us < 1000 for us in spent.values()) and len(spent) == 8
    assert "whether a graph is captured" in capsys.readouterr().out
