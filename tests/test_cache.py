"""The disk cache: what is in its key, and that damage, unwritable folders and many processes at once do no harm."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")

from ncclep_py import compiled, kernel_cache, launch, toolchain
from ncclep_py.config import GroupConfig
from ncclep_py.kernel_cache import KernelCache
from ncclep_py.kernels.shape import KernelShape

SHAPE = KernelShape.build(GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=16, hidden=128, num_topk=2), 2, 2, 8)
SPEC = launch.KernelSpec("ll_combine", SHAPE)
ROOT = Path(__file__).parent.parent

COMPILE = textwrap.dedent("""
    import hashlib, json, sys, time
    started = time.process_time()
    import cuda.core
    from ncclep_py import launch
    from ncclep_py.config import GroupConfig
    from ncclep_py.kernels.shape import KernelShape
    shape = KernelShape.build(GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=16, hidden=128, num_topk=2), 2, 2, 8)
    made = launch.compile_kernel(launch.KernelSpec("ll_combine", shape))
    print(json.dumps({"seconds": time.process_time() - started, "numba": any(m.split(".")[0] in ("numba", "llvmlite") for m in sys.modules),
                      "symbol": made.symbol, "key": made.info["key"], "cubin": hashlib.sha256(made.cubin).hexdigest()}))
""")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(folder: Path) -> subprocess.Popen:
    """A process that compiles the kernel and reports."""
    return subprocess.Popen([sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                            env=os.environ | {"NCCLEP_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)})


def report(process: subprocess.Popen) -> dict:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)


def damage(path: Path, how: str) -> None:
    """Spoil a file."""
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "one bit": whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:],
                      "in its metadata": whole.replace(b'"registers"', b'"registors"', 1), "other": b"x" * 500}[how])


# ---- key -------------------------------------------------------------------------------------------------------------------
def key(**changes: object) -> str:
    return KernelCache.key(compiled.fingerprint(changes.get("spec", SPEC), changes.get("arch", "sm_90"), bool(changes.get("lineinfo"))))


def test_key_is_stable():
    assert key() == key()


def test_key_depends_on_kernel_shape_and_architecture():
    other_shape = KernelShape.build(GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=17, hidden=128, num_topk=2), 2, 2, 8)
    keys = {key(), key(spec=launch.KernelSpec("ll_dispatch", SHAPE)), key(spec=launch.KernelSpec("ll_combine", other_shape)), key(arch="sm_100"),
            key(lineinfo=True)}
    assert len(keys) == 5


def test_key_depends_on_every_version(monkeypatch):
    versions, keys = toolchain.versions(), {key()}
    assert {"numba-cuda", "numba", "llvmlite", "NVRTC", "nvJitLink", "NVVM", "NCCL headers"} <= versions.keys()
    for name in versions:
        monkeypatch.setattr(toolchain, "versions", lambda name=name: versions | {name: "another"})
        keys.add(key())
    assert len(keys) == 1 + len(versions)


@pytest.mark.parametrize("name", ["kernels/lane_ops.cu", "kernels/fabric_ops.cu", "kernels/ops.py", "kernels/ll_combine.py", "kernels/shape.py",
                                  "kernels/headers/nccl_lsa.h", "compiled.py", "toolchain.py"])
def test_key_depends_on_every_source(name, tmp_path, monkeypatch):
    before = key()
    package = Path(launch.__file__).parent
    shutil.copytree(package, tmp_path / "package")
    with open(tmp_path / "package" / name, "a") as file:
        file.write("\n")
    monkeypatch.setattr(kernel_cache, "_PACKAGE", tmp_path / "package")
    kernel_cache.digest_of.cache_clear()
    try:
        assert key() != before
    finally:
        kernel_cache.digest_of.cache_clear()


# ---- entries ---------------------------------------------------------------------------------------------------------------
def test_store_and_load(tmp_path):
    cache = KernelCache(tmp_path / "new" / "folder")
    assert cache.load("a", "1" * 64) is None
    assert cache.store("a", "1" * 64, {"x": 1}, b"code\n\0more")
    assert cache.load("a", "1" * 64) == ({"x": 1}, b"code\n\0more")
    assert cache.load("a", "1" * 32 + "2" * 32) is None   # the file of another key whose name is the same
    assert [p.suffix for p in cache.folder.iterdir()] == [".bin"]


@pytest.mark.parametrize("how", ["empty", "cut", "one bit", "in its metadata", "other"])
def test_damaged_kernel_is_compiled_again_with_one_warning(folder, caplog, how):
    first = launch.compile_kernel(SPEC)
    path, = folder.glob("ll_combine-*.bin")
    damage(path, how)
    with caplog.at_level(logging.WARNING):
        again = launch.compile_kernel(SPEC)
    assert [r.getMessage() for r in caplog.records] == [f"{path} is damaged; compiling again"]
    assert again.info["registers"] == first.info["registers"]
    caplog.clear()
    assert launch.compile_kernel(SPEC) == again
    assert not caplog.records


def test_damaged_device_functions_are_compiled_again(folder, caplog):
    launch.compile_kernel(SPEC)
    path, = folder.glob("device_ops-*.bin")
    damage(path, "cut")
    next(folder.glob("ll_combine-*.bin")).unlink()
    with caplog.at_level(logging.WARNING):
        launch.compile_kernel(SPEC)
    assert len(caplog.records) == 1


def test_works_without_a_folder_to_write(tmp_path, monkeypatch, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")   # unlike a mode, it also stops root
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(blocker / "cache"))
    with caplog.at_level(logging.WARNING):
        made = launch.compile_kernel(SPEC)
    assert made.cubin.startswith(b"\x7fELF")
    assert len(caplog.records) == 1 and "NCCLEP_CACHE_DIR" in caplog.text


# ---- processes -------------------------------------------------------------------------------------------------------------
def test_cold_processes_at_once_agree_and_a_warm_one_is_fast(tmp_path):
    cold = [report(p) for p in [start(tmp_path) for _ in range(4)]]
    assert len({(r["symbol"], r["cubin"]) for r in cold}) == 1
    names = sorted(p.name for p in tmp_path.iterdir())
    assert [n.split("-")[0] for n in names] == ["device_ops", "ll_combine"] and all(n.endswith(".bin") for n in names)
    warm = report(start(tmp_path))
    assert warm["key"] == cold[0]["key"], "the sources or the installation changed while this test ran"
    assert warm["cubin"] == cold[0]["cubin"] and not warm["numba"]
    assert warm["seconds"] < 1   # of the processor: the machine may be busy


# ---- the bound -------------------------------------------------------------------------------------------------------------
def fill(cache: KernelCache, count: int, *, hours: float = 5, size: int = 100_000) -> list[Path]:
    """Entries of `size` bytes, the first used longest ago, the last `hours` ago."""
    paths = []
    for i in range(count):
        key = cache.key({"i": str(i)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NCCLEP_CACHE_MB", "0")
            assert cache.store(f"k{i}", key, {"i": i}, b"x" * size)
        paths.append(cache.path(f"k{i}", key))
        used = time.time() - 3600 * (hours + count - i)
        os.utime(paths[-1], (used, used))
    return paths


def test_entries_used_longest_ago_go_first(folder, monkeypatch):
    cache = KernelCache()
    paths = fill(cache, 12)
    (folder / "notes.txt").write_bytes(b"y" * 2_000_000)
    assert cache.load("k2", cache.key({"i": "2"})) is not None   # used now
    monkeypatch.setenv("NCCLEP_CACHE_MB", "1")
    assert cache.store("new", cache.key({"new": ""}), {}, b"z" * 100_000)
    left = [i for i, path in enumerate(paths) if path.exists()]
    assert left == [2, *range(5, 12)], left
    assert (folder / "notes.txt").exists() and cache.load("new", cache.key({"new": ""})) is not None


def test_no_entry_of_the_last_hour_goes_and_no_bound_keeps_all(folder, monkeypatch):
    cache = KernelCache()
    paths = fill(cache, 30, hours=-30)   # all of them after now - 1 hour
    monkeypatch.setenv("NCCLEP_CACHE_MB", "1")
    cache.trim()
    assert all(path.exists() for path in paths)
    for path in paths:
        os.utime(path, (1, 1))
    monkeypatch.setenv("NCCLEP_CACHE_MB", "0")
    cache.trim()
    assert all(path.exists() for path in paths)
    monkeypatch.setenv("NCCLEP_CACHE_MB", "1")
    cache.trim()
    assert sum(path.exists() for path in paths) == 9


def test_parts_left_behind_go_and_young_ones_stay(folder):
    cache = KernelCache()
    fill(cache, 1)
    old, young = folder / "k-abc.part", folder / "k-def.part"
    old.write_bytes(b"1"), young.write_bytes(b"2")
    os.utime(old, (1, 1))
    cache.trim()
    assert not old.exists() and young.exists()


def test_a_wrong_bound_is_a_sentence(monkeypatch):
    monkeypatch.setenv("NCCLEP_CACHE_MB", "lots")
    with pytest.raises(ValueError, match="NCCLEP_CACHE_MB must be a number of megabytes, or 0 for no bound, got 'lots'"):
        kernel_cache.cache_bytes()


TRIM = textwrap.dedent("""
    import sys
    from ncclep_py.kernel_cache import KernelCache
    cache, me = KernelCache(), sys.argv[1]
    for i in range(40):
        key = cache.key({"who": me, "i": str(i)})
        assert cache.store(f"p{me}_{i}", key, {}, bytes([int(me)]) * 60_000)
        found = cache.load(f"p{me}_{i}", key)
        assert found is not None and found[1] == bytes([int(me)]) * 60_000
    print("good")
""")


def test_many_processes_trim_at_once(folder):
    old = fill(KernelCache(), 30)
    env = os.environ | {"NCCLEP_CACHE_DIR": str(folder), "NCCLEP_CACHE_MB": "1", "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen([sys.executable, "-c", TRIM, str(me)], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) for me in range(6)]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["good"] * 6
    assert not any(path.exists() for path in old) and not list(folder.glob("*.part"))


def test_a_folder_that_cannot_be_written_is_read_and_not_trimmed(folder, monkeypatch):
    cache = KernelCache()
    paths = fill(cache, 2)

    def refuse(*_args, **_kwargs):
        raise PermissionError("read-only")

    for name in ("utime", "unlink"):
        monkeypatch.setattr(kernel_cache.os, name, refuse)
    monkeypatch.setenv("NCCLEP_CACHE_MB", "1")
    assert cache.load("k0", cache.key({"i": "0"})) == ({"i": 0}, b"x" * 100_000)
    cache.trim()
    assert all(path.exists() for path in paths)
