"""One grid for all ranks of a `LocalWorld`, one row of blocks per rank, for profilers and sanitizers.

These run one kernel at a time, and a rank's kernel that waits for its peers' would wait until its deadline. Here the kernel's body is a device
function, and the grid's second index chooses the row of a table with each rank's arguments. The body, and so the protocol, is the same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py import cubin as cubin_file
from ncclep_py import device_library, toolchain
from ncclep_py.compiled import KERNELS, CompiledKernel, KernelSpec, device_ltoir, fingerprint
from ncclep_py.kernel_cache import KernelCache, digest_of

if TYPE_CHECKING:
    import torch

__all__ = ["FusedKernel", "FusedStream", "compile_fused"]

ENTRY = """extern "C" __device__ void {body}({types});
extern "C" __global__ void __launch_bounds__({threads}) {symbol}(const long long* table) {{
  const long long* mine = table + blockIdx.y * {count}ll;
  {body}({values});
}}
"""


def compile_fused(spec: KernelSpec, arch: str, threads: int, waits: bool = False) -> CompiledKernel:
    """The fused form of a kernel, with source lines of the device functions, from the disk cache or compiled now; blocks have `threads` threads."""
    cache, symbol = KernelCache(), f"fused_{spec.name}"
    key = cache.key(fingerprint(spec, arch, lineinfo=True, waits=waits) | {"fused": f"{threads} {digest_of('fused.py')}"})
    found = cache.load(f"{symbol}-{arch}", key)
    if found is None:
        started = time.perf_counter()
        factory, parameters = KERNELS[spec.name]
        count, body = len(parameters), f"body_of_{spec.name}"
        source = ENTRY.format(body=body, symbol=symbol, threads=threads, count=count, types=", ".join(["long long"] * count),
                              values=", ".join(f"mine[{i}]" for i in range(count)))
        teams = device_library.uses_network(spec.name)
        parts = [toolchain.kernel_ltoir(factory, spec.shape, parameters, arch, body, teams),
                 device_ltoir(arch, True, cache, teams=teams, waits=waits),
                 toolchain.compile_device(arch, source=source, lineinfo=True), *(device_library.network_parts(arch, True, cache) if teams else [])]
        code = toolchain.link(parts, arch, lineinfo=True)
        info = {"symbol": symbol, "arch": arch, "key": key, "seconds": round(time.perf_counter() - started, 3)} | cubin_file.resources(code)
        cache.store(f"{symbol}-{arch}", key, info, code)
        found = info, code
    return CompiledKernel(spec.name, symbol, found[1], found[0])


@dataclasses.dataclass
class FusedKernel:
    """A loaded fused kernel and what its blocks take."""

    loaded: Any
    threads: int
    shared_bytes: int

    @classmethod
    def load(cls, spec: KernelSpec, arch: str, threads: int, shared_bytes: int, num_blocks: int, num_ranks: int, multiprocessors: int,
             waits: bool = False) -> FusedKernel:
        """On the current device; ``ValueError`` if the blocks of all ranks would not run at once."""
        from ncclep_py import launch

        loaded = launch.load(compile_fused(spec, arch, threads, waits))
        room = launch.occupancy(loaded, threads, shared_bytes) * multiprocessors
        if num_blocks * num_ranks > room:
            raise ValueError(f"max_num_sms gives the fused {spec.name} {num_ranks} x {num_blocks} blocks, but only {room} run at once on this GPU; "
                             "blocks wait for other ranks, so all must fit")
        return cls(loaded, threads, shared_bytes)

    def launch(self, table: int, num_blocks: int, num_ranks: int, stream: int) -> None:
        """Enqueue ``(num_blocks, num_ranks)`` blocks over the arguments at device address `table`."""
        from cuda.core import LaunchConfig, Stream, launch

        config = LaunchConfig(grid=(num_blocks, num_ranks), block=self.threads, shmem_size=self.shared_bytes)
        launch(Stream.from_handle(stream), config, self.loaded.kernel, table)


class FusedStream:
    """Where the fused grids of a `LocalWorld` run: after everything on all ranks' streams, and before what follows on them."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device, self.stream = device, torch.cuda.Stream(device)
        self.count = 0

    def launch(self, kernel: FusedKernel, rows: Sequence[Sequence[int]], num_blocks: int, streams: Sequence[torch.cuda.Stream]) -> None:
        """One grid with a rank's arguments per row."""
        import torch

        from ncclep_py.launch import signed

        for stream in streams:
            self.stream.wait_event(stream.record_event())
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            host = torch.tensor([[signed(value) for value in row] for row in rows], dtype=torch.int64).pin_memory()
            table = host.to(self.device, non_blocking=True)
            kernel.launch(table.data_ptr(), num_blocks, len(rows), self.stream.cuda_stream)
            done = self.stream.record_event()
        for stream in streams:
            stream.wait_event(done)
        self.count += 1
