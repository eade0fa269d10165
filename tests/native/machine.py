"""Builds the device sources for the CPU, and runs what is enqueued on a `Simulator` with them instead of the simulator's own operations.

Kernels are the package's, compiled by numba for the CPU; operations are the ``.cu`` files, with each inline PTX function replaced by its meaning.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ncclep_py import toolchain
from ncclep_py.kernels.ops import NET_OPS, OPS, Vocabulary
from ncclep_py.simulator import Simulator

__all__ = ["Machine", "source"]

HERE = Path(__file__).parent
SOURCES = ("lane_ops.cu", "fabric_ops.cu", "rank_ops.cu", "recipe_ops.cu", "staged_ops.cu", "ht_ops.cu", "mask_ops.cu", "trace_ops.cu",
           *toolchain.TEAM_SOURCES)
INLINE = {   # function that is PTX: what it does
    "u64 nanoseconds": "return u64(steps);",
    "u64 load_relaxed_sys": "yield(); return *(volatile u64*)p;",
    "u64 load_acquire_sys": "yield(); return *(volatile u64*)p;",
    "void store_relaxed_sys": "*(volatile u64*)p = v;",
    "void fence_system": "",
    "void store_relaxed_gpu": "*(volatile u64*)p = v;",
    "void fence_device": "",
    "void fence_total": "",
    "u64 vote_cas": "u64 old = *(u64*)p; if (old == expected) *(u64*)p = v; return old;",
    "u64 load_relaxed_gpu": "yield(); return *(volatile u64*)p;",
    "u32 count_in": "u32 old = *(u32*)p; *(u32*)p = old >= wrap ? 0 : old + 1; return old;",
    "u64 swap_if": "u64 old = *(u64*)p; if (old == expected) *(u64*)p = v; return old;",
    "void add_at": "*(u64*)p += v;",
    "uint4 load_nc": "return *(uint4*)p;",
    "uint4 load_row": "return *(uint4*)p;",
    "void store_row": "*(uint4*)p = v;",
    "void copy_async": "fail(\"copies to shared memory are not here\", 0, 0);",
    "void wait_copies": "",
    "uint4 load_shared": "fail(\"copies to shared memory are not here\", 0, 0); return {};",
    "int load_idx": "i64 e = bytes == 8 ? ((i64*)base)[i] : ((int*)base)[i]; return e >= 0 && e < experts ? int(e) : -1;",
    "float load_weight": "return *(float*)p;",
    "int over": "return a / b;",
    "u32 e4m3_pair": "return to_e4m3(low) | to_e4m3(high) << 8;",
    "Staging staging": "return {0, 0};",
}
PEER_AT = "INLINE u64 peer_at(i64 window, i64 offset, i64 peer) { return window_at(window, offset, peer); }\n"
BF16 = "r = to_bf16(a[2 * j]) | to_bf16(a[2 * j + 1]) << 16;"
FP16 = "r = to_fp16(a[2 * j]) | to_fp16(a[2 * j + 1]) << 16;"


class Grid(ctypes.Structure):
    """``Grid`` of runner.h."""

    _fields_ = [("rank", ctypes.c_int), ("blocks", ctypes.c_int), ("warps", ctypes.c_int), ("kernel", ctypes.c_int64),
                ("arguments", ctypes.c_int64 * 32)]


def source(old: str = "", new: str = "") -> str:
    """The device sources for the CPU, after a change of their text."""
    text = "".join((toolchain.KERNEL_FOLDER / name).read_text() for name in SOURCES)
    assert old in text
    text = text.replace(old, new)
    text = re.sub(r"#include <(nccl_lsa|gin)\.h>|extern __shared__[^;]*;|typedef [\w ]+ (i64|u64|u32);", "", text)
    text = re.sub(r"#ifdef EP_TEAMS.*?#endif\n", PEER_AT, text, flags=re.DOTALL)
    text = re.sub(r"#ifdef EP_TRACE\n(.*?)(?:#else\n(.*?))?#endif\n", lambda m: m[2] or "", text, flags=re.DOTALL)
    text = text.replace("static __device__ __forceinline__", "static inline")
    for name, body in INLINE.items():
        begin = re.search(rf"INLINE {re.escape(name)}\([^)]*\) \{{", text).end()
        depth, end = 1, begin
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[:begin] + f" {body} }}" + text[end:]
    text = re.sub(r'asm\("cvt\.rn\.bf16x2.*?\);', BF16, text)
    text = re.sub(r'asm\("\{\.reg \.f16 l, h; mov.*?\);', "low = from_fp16(x & 0xffff), high = from_fp16(x >> 16);", text)
    text = re.sub(r'asm\("\{\.reg \.f16 l, h; cvt.*?\);', FP16, text)
    text = text.replace("static __device__", "static")
    assert "asm" not in re.sub(r"//.*", "", text), "PTX that the CPU does not know"
    return '#include "warps.h"\n' + text + '#include "runner.h"\n'


class Machine:
    """The device sources, built into `folder` with `more` options and loaded."""

    def __init__(self, folder: Path, old: str = "", new: str = "", more: tuple[str, ...] = ()) -> None:
        (folder / "native.cc").write_text(source(old, new))
        # not optimised, so that a place of the source is one place of the code
        options = ["-std=c++17", "-O0", "-w", "-fpermissive", "-ffp-contract=off", "-shared", "-fPIC", f"-I{HERE}", *more]
        subprocess.run(["g++", *options, "native.cc", "-o", "native.so"], cwd=folder, check=True, timeout=120)
        self.library = ctypes.CDLL(str(folder / "native.so"))
        self.library.native_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_long]
        self.library.native_run.restype = ctypes.c_char_p
        self.library.native_window.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
        self.library.native_fault.argtypes = [ctypes.c_int, ctypes.c_long]
        self.library.native_setup.argtypes = [ctypes.c_int, ctypes.c_uint64]
        self._compiled: dict[tuple, Any] = {}
        self.vocabulary = Vocabulary({name: self._operation(name, len(op.parameters)) for name, op in (OPS | NET_OPS).items()})

    def _operation(self, name: str, arity: int) -> Any:
        there = hasattr(self.library, f"ep_{name}")   # kernels of one team have others, too, which nobody calls here
        function = self.library[f"ep_{name}" if there else "ep_block_idx"]
        function.argtypes, function.restype = [ctypes.c_int64] * (arity if there else 0), ctypes.c_int64
        return function

    def _kernel(self, factory: Callable, shape: Any, arity: int) -> int:
        import numba

        key = factory, repr(shape)
        if key not in self._compiled:
            self._compiled[key] = numba.cfunc(numba.void(*[numba.int64] * arity))(factory(shape, self.vocabulary))
        return self._compiled[key].address

    def run(self, sim: Simulator, team_size: int, factories: dict[str, Callable], shapes: list[Any], seed: int = 0, missing: int = -1,
            limit: int = 200_000_000, dies: tuple[int, int, int] = (-1, 0, 0)) -> None:
        """Run everything enqueued on `sim`, step by step on all ranks together; rank `missing` does nothing. `AssertionError` if something is wrong.

        Args:
            sim: whose streams are taken, and whose windows.
            team_size: ranks of a team.
            factories: kernel factories by label.
            shapes: of each rank's kernels.
            seed: of who runs next and when puts land.
            missing: a rank that is dead.
            limit: most steps of one launch; a step is a nanosecond of the kernels' clock.
            dies: a rank that stops in the n-th step (from 0), after so many steps of it: (rank, n, steps).
        """
        self.library.native_setup(team_size, seed)
        for window, regions in sim.windows.items():
            for rank, region in enumerate(regions):
                self.library.native_window(rank, window, region.address)
        self.library.native_fault(-1, 0)
        for n, step in enumerate(zip(*(stream.queue for stream in sim.streams), strict=True)):
            if dies[0] >= 0 and n == dies[1]:
                self.library.native_fault(dies[0], dies[2])
            missing = dies[0] if dies[0] >= 0 and n > dies[1] else missing
            live = [(rank, launch) for rank, launch in enumerate(step) if rank != missing]
            if step[0].host:
                for _, launch in live:
                    launch.source()
                continue
            grids = (Grid * len(live))()
            for grid, (rank, launch) in zip(grids, live, strict=True):
                grid.rank, grid.blocks, grid.warps = rank, launch.blocks, launch.warps
                grid.kernel = self._kernel(factories[launch.label], shapes[rank], len(launch.args))
                grid.arguments[:len(launch.args)] = [a - (1 << 64) if a >> 63 == 1 else a for a in launch.args]
            told = self.library.native_run(ctypes.addressof(grids), len(live), limit).decode()
            assert not told, f"{step[0].label}: {told}"
