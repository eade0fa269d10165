"""Compile every kernel with numba-cuda and with its successor numba-cuda-mlir; print registers, spills and seconds of both, side by side.

    python3 scripts/check_compilers.py [--arch sm_90] [--compiler numba-cuda-mlir] [--kernel NAME ...]

Needs no GPU. The successor is not one of our dependencies: `pip install numba-cuda-mlir` beside `ncclep_py[cu12]` or `[cu13]`, Python 3.11 or newer.
Exit code 1 if a kernel did not compile, has a stack, or takes more registers than a block of 512 threads may have. What this printed last stands in
`python -m ncclep_py explain mlir`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Sequence

import torch

from ncclep_py import Algorithm, GroupConfig, Layout, launch, toolchain
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.ll_net_masked_shape import LLNetMaskedShape
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.shape import PLAIN, KernelShape


def spec_of(name: str) -> launch.KernelSpec:
    """The kernel in the size it is measured in: 8 ranks, 128 experts, 8 per token, rows of 7168 bf16."""
    size = dict(num_experts=128, max_dispatch_tokens_per_rank=128, hidden=7168, dtype=torch.bfloat16, num_topk=8)
    if name.startswith("ht_"):
        config = GroupConfig(**size, algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=1024)
        if "_net_" in name:
            return launch.KernelSpec(name, HTNetShape.over_teams(config, 8, 4, 8, 8, Layout.EXPERT_MAJOR, 1, 16, PLAIN))
        return launch.KernelSpec(name, HTShape.build(config, 8, 8, 8, Layout.EXPERT_MAJOR, 1, 16))
    staged = name.endswith(("_send", "_complete"))
    config = GroupConfig(**size, num_staging_slots=2 if staged else 0, enable_mask="mask" in name)
    shape = KernelShape.build(config, 8, 8, 8, Layout.RANK_MAJOR if "rank_major" in name else Layout.EXPERT_MAJOR)
    if "_net_" in name:
        return launch.KernelSpec(name, (LLNetMaskedShape if "mask" in name else LLNetShape).over(shape, config, 4))
    return launch.KernelSpec(name, shape)


def outcome(name: str, compiler: str, arch: str) -> tuple[str, float, bool]:
    """What came of one kernel in words, seconds, and whether it may be used."""
    os.environ["NCCLEP_COMPILER"] = compiler
    started = time.perf_counter()
    try:
        made = launch.compile_kernel(spec_of(name), arch)
    except Exception as e:   # whatever a compiler raises is the answer
        return f"{type(e).__name__}: {str(e).strip().splitlines()[-1][:90]}", time.perf_counter() - started, False
    registers, stack = made.info["registers"], made.info["stack"]
    return f"{registers} registers" + f", {stack} bytes of stack" * bool(stack), time.perf_counter() - started, not stack and registers <= 128


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--compiler", choices=list(toolchain.COMPILERS), action="append", help="only this one; default: both")
    parser.add_argument("--kernel", choices=list(launch.KERNELS), action="append", help="only this one; default: all")
    options = parser.parse_args(arguments)
    compilers, names = options.compiler or list(toolchain.COMPILERS), options.kernel or list(launch.KERNELS)
    missing = [c for c in compilers if c != "numba-cuda" and not _installed(c)]
    if missing:
        print(f"{missing[0]} is not installed: pip install {missing[0]}", file=sys.stderr)
        return 2
    print("| kernel | " + " | ".join(f"{c} {importlib.metadata.version(c)} | seconds" for c in compilers) + " |")
    print("|---" + "|---|---" * len(compilers) + "|")
    good = True
    before = {key: os.environ.get(key) for key in ("NCCLEP_CACHE_DIR", "NCCLEP_COMPILER")}
    try:
        with tempfile.TemporaryDirectory() as folder:   # compile anew, and leave the user's cache alone
            os.environ["NCCLEP_CACHE_DIR"] = folder
            for name in names:
                found = [outcome(name, compiler, options.arch) for compiler in compilers]
                good = good and all(fine for *_, fine in found)
                print(f"| {name} | " + " | ".join(f"{words} | {seconds:.1f}" for words, seconds, _ in found) + " |", flush=True)
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
    return 0 if good else 1


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
