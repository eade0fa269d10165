"""The compiler of the Python kernels is a choice made in one place; numba-cuda-mlir compiles every kernel, too (skipped where it is absent)."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys
from typing import Any

import pytest

from ncclep_py import compiled, launch, toolchain
from ncclep_py.explain import text

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
WITH_STACK = {"ll_masked_dispatch", "ll_masked_combine", "ll_masked_rank_major_dispatch"}
"""Kernels that numba-cuda-mlir 0.6.0 gives 40 bytes of stack, numba-cuda none."""


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("check_compilers")


def test_the_compiler_is_imported_in_one_file() -> None:
    importing = re.compile(r"^\s*(?:from|import) numba\b|import_module\([^)]*numba", re.MULTILINE)
    found = {path.name for path in (ROOT / "ncclep_py").rglob("*.py") if importing.search(path.read_text())}
    assert found == {"toolchain.py"}


def test_numba_cuda_is_the_default_and_unknown_compilers_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCLEP_COMPILER", raising=False)
    assert toolchain.chosen_compiler() == "numba-cuda"
    monkeypatch.setenv("NCCLEP_COMPILER", "nvcc")
    with pytest.raises(ValueError, match="NCCLEP_COMPILER must be one of numba-cuda, numba-cuda-mlir, got 'nvcc'"):
        toolchain.chosen_compiler()


def test_a_missing_compiler_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLEP_COMPILER", "numba-cuda-mlir")
    monkeypatch.setitem(sys.modules, "numba_cuda_mlir", None)
    monkeypatch.setitem(sys.modules, "numba_cuda_mlir.cuda", None)
    with pytest.raises(ImportError, match="compiling kernels needs numba-cuda-mlir: pip install numba-cuda-mlir"):
        toolchain.kernel_compiler()


def test_what_one_compiler_made_is_not_taken_for_the_other(monkeypatch: pytest.MonkeyPatch, checker: Any) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
    keys = []
    for compiler in toolchain.COMPILERS:
        monkeypatch.setenv("NCCLEP_COMPILER", compiler)
        keys.append(compiled.fingerprint(checker.spec_of("ll_combine"), "sm_90"))
    assert keys[0] != keys[1]


def test_the_script_prints_a_line_per_kernel(checker: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
    assert checker.main(["--compiler", "numba-cuda", "--kernel", "ll_copy"]) == 0
    head, _, line = capsys.readouterr().out.strip().splitlines()
    assert head.startswith("| kernel | numba-cuda ") and re.match(r"\| ll_copy \| \d+ registers \| \d+\.\d \|", line)


def test_the_page_lists_every_kernel() -> None:
    listed = re.findall(r"^\| (\w+) \| \d+ registers.* \| \d+ registers", text("mlir"), re.MULTILINE)
    assert listed == list(launch.KERNELS)


def test_every_kernel_has_the_shape_it_is_made_for(checker: Any) -> None:
    for name in launch.KERNELS:
        shape = checker.spec_of(name).shape
        assert hasattr(shape, "net") == ("_net_" in name) and hasattr(shape, "members") == ("_net_mask" in name), name


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda_mlir") is None, reason="numba-cuda-mlir is not installed: pip install numba-cuda-mlir")
@pytest.mark.parametrize("name", launch.KERNELS)
def test_the_successor_compiles(name: str, checker: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("NCCLEP_COMPILER", "numba-cuda-mlir")
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path))
    made = launch.compile_kernel(checker.spec_of(name))
    assert made.cubin[:4] == b"\x7fELF" and name in made.symbol
    stack = 640 if "_net_" in name else 40 if name in WITH_STACK else 0   # over teams both compilers leave one
    assert made.info["registers"] <= toolchain.MAX_REGISTERS and made.info["stack"] <= stack
