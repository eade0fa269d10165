"""From a kernel's name and shape to a cubin, through the disk cache; needs no GPU. A warm hit imports neither numba nor a compiler."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from ncclep_py import cubin as cubin_file
from ncclep_py import device_library, prebuilt, toolchain
from ncclep_py.kernel_cache import KernelCache, digest_of
from ncclep_py.kernels import (
    ht_combine,
    ht_copy,
    ht_count,
    ht_dispatch,
    ht_net_combine,
    ht_net_dispatch,
    ht_net_prepare,
    ht_prepare,
    ll_combine,
    ll_copy,
    ll_dispatch,
    ll_mask_clean,
    ll_masked_combine,
    ll_masked_dispatch,
    ll_masked_nvfp4_combine,
    ll_masked_rank_major_dispatch,
    ll_net_combine,
    ll_net_dispatch,
    ll_net_mask_clean,
    ll_net_masked_combine,
    ll_net_masked_dispatch,
    ll_net_masked_nvfp4_combine,
    ll_net_masked_rank_major_dispatch,
    ll_net_nvfp4_combine,
    ll_net_rank_major_dispatch,
    ll_net_staged,
    ll_nvfp4_combine,
    ll_rank_major_dispatch,
    ll_staged,
)
from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.kernels.shape import KernelShape

__all__ = ["KERNELS", "CompiledKernel", "KernelSpec", "compile_kernel", "device_ltoir", "fingerprint", "parameters_of"]

KERNELS: dict[str, tuple[Callable[..., Callable[..., None]], tuple[str, ...]]] = {
    "ll_dispatch": (ll_dispatch.make_ll_dispatch, ll_dispatch.PARAMETERS),
    "ll_combine": (ll_combine.make_ll_combine, ll_combine.PARAMETERS),
    "ll_rank_major_dispatch": (ll_rank_major_dispatch.make_ll_rank_major_dispatch, ll_rank_major_dispatch.PARAMETERS),
    "ll_dispatch_send": (ll_staged.make_ll_dispatch_send, ll_dispatch.PARAMETERS),
    "ll_dispatch_complete": (ll_staged.make_ll_dispatch_complete, ll_staged.DISPATCH_COMPLETE_PARAMETERS),
    "ll_rank_major_send": (ll_staged.make_ll_rank_major_send, ll_rank_major_dispatch.PARAMETERS),
    "ll_rank_major_complete": (ll_staged.make_ll_rank_major_complete, ll_staged.RANK_MAJOR_COMPLETE_PARAMETERS),
    "ll_copy": (ll_copy.make_ll_copy, ll_copy.PARAMETERS),
    "ll_combine_send": (ll_staged.make_ll_combine_send, ll_staged.COMBINE_SEND_PARAMETERS),
    "ll_combine_complete": (ll_staged.make_ll_combine_complete, ll_staged.COMBINE_COMPLETE_PARAMETERS),
    "ll_nvfp4_combine": (ll_nvfp4_combine.make_ll_nvfp4_combine, ll_nvfp4_combine.PARAMETERS),
    "ht_count": (ht_count.make_ht_count, ht_count.PARAMETERS),
    "ht_prepare": (ht_prepare.make_ht_prepare, ht_prepare.PARAMETERS),
    "ht_dispatch": (ht_dispatch.make_ht_dispatch, ht_dispatch.PARAMETERS),
    "ht_combine": (ht_combine.make_ht_combine, ht_combine.PARAMETERS),
    "ht_copy": (ht_copy.make_ht_copy, ht_copy.PARAMETERS),
    "ll_net_dispatch": (ll_net_dispatch.make_ll_net_dispatch, ll_net_dispatch.PARAMETERS),
    "ll_net_rank_major_dispatch": (ll_net_rank_major_dispatch.make_ll_net_rank_major_dispatch, ll_net_rank_major_dispatch.PARAMETERS),
    "ll_net_combine": (ll_net_combine.make_ll_net_combine, ll_net_combine.PARAMETERS),
    "ll_net_nvfp4_combine": (ll_net_nvfp4_combine.make_ll_net_nvfp4_combine, ll_net_nvfp4_combine.PARAMETERS),
    "ll_net_dispatch_send": (ll_net_staged.make_ll_net_dispatch_send, ll_net_dispatch.PARAMETERS),
    "ll_net_dispatch_complete": (ll_net_staged.make_ll_net_dispatch_complete, ll_net_staged.DISPATCH_COMPLETE_PARAMETERS),
    "ll_net_rank_major_send": (ll_net_staged.make_ll_net_rank_major_send, ll_net_rank_major_dispatch.PARAMETERS),
    "ll_net_rank_major_complete": (ll_net_staged.make_ll_net_rank_major_complete, ll_net_staged.RANK_MAJOR_COMPLETE_PARAMETERS),
    "ll_net_combine_send": (ll_net_staged.make_ll_net_combine_send, ll_net_staged.COMBINE_SEND_PARAMETERS),
    "ll_net_combine_complete": (ll_net_staged.make_ll_net_combine_complete, ll_net_staged.COMBINE_COMPLETE_PARAMETERS),
    "ll_net_masked_dispatch": (ll_net_masked_dispatch.make_ll_net_masked_dispatch, ll_net_masked_dispatch.PARAMETERS),
    "ll_net_masked_combine": (ll_net_masked_combine.make_ll_net_masked_combine, ll_net_masked_combine.PARAMETERS),
    "ll_net_masked_rank_major_dispatch": (ll_net_masked_rank_major_dispatch.make_ll_net_masked_rank_major_dispatch,
                                          ll_net_masked_rank_major_dispatch.PARAMETERS),
    "ll_net_masked_nvfp4_combine": (ll_net_masked_nvfp4_combine.make_ll_net_masked_nvfp4_combine, ll_net_masked_nvfp4_combine.PARAMETERS),
    "ll_net_mask_clean": (ll_net_mask_clean.make_ll_net_mask_clean, ll_net_mask_clean.PARAMETERS),
    "ht_net_prepare": (ht_net_prepare.make_ht_net_prepare, ht_net_prepare.PARAMETERS),
    "ht_net_dispatch": (ht_net_dispatch.make_ht_net_dispatch, ht_net_dispatch.PARAMETERS),
    "ht_net_combine": (ht_net_combine.make_ht_net_combine, ht_net_combine.PARAMETERS),
    "ll_masked_dispatch": (ll_masked_dispatch.make_ll_masked_dispatch, ll_masked_dispatch.PARAMETERS),
    "ll_masked_combine": (ll_masked_combine.make_ll_masked_combine, ll_masked_combine.PARAMETERS),
    "ll_masked_rank_major_dispatch": (ll_masked_rank_major_dispatch.make_ll_masked_rank_major_dispatch, ll_masked_rank_major_dispatch.PARAMETERS),
    "ll_masked_nvfp4_combine": (ll_masked_nvfp4_combine.make_ll_masked_nvfp4_combine, ll_masked_nvfp4_combine.PARAMETERS),
    "ll_mask_clean": (ll_mask_clean.make_ll_mask_clean, ll_mask_clean.PARAMETERS),
}
"""Factory and run-time parameters by kernel name."""

FP8_CAPABILITY = (8, 9)


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """What is compiled: a name of `KERNELS` and its constants."""

    name: str
    shape: KernelShape | HTShape

    def __post_init__(self) -> None:
        if self.name not in KERNELS:
            raise ValueError(f"name must be one of {', '.join(KERNELS)}, got {self.name!r}")


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A cubin.

    Attributes:
        name: name of `KERNELS`.
        symbol: the kernel's name in the cubin.
        cubin: machine code for one architecture.
        info: arch, key, registers of a thread, bytes of its stack (0: nothing spilled), and seconds of the compilation.
    """

    name: str
    symbol: str
    cubin: bytes = dataclasses.field(repr=False)
    info: dict[str, Any]


def parameters_of(name: str) -> tuple[str, ...]:
    """Run-time values a launch of the kernel takes, in order; all 64-bit integers."""
    return KERNELS[name][1]


def _device_fingerprint(arch: str, lineinfo: bool, trace: bool = False, teams: bool = False, waits: bool = False) -> dict[str, str]:
    """Everything that decides the code of the device functions."""
    sources = digest_of("kernels/*.cu", "kernels/headers/**/*", "toolchain.py")
    flags = {"lineinfo": lineinfo, "trace": trace, "teams": teams, "waits": waits}
    return {"arch": arch, "device sources": sources} | {name: str(flag) for name, flag in flags.items()} | toolchain.versions()


def fingerprint(spec: KernelSpec, arch: str, lineinfo: bool = False, trace: bool = False, waits: bool = False) -> dict[str, str]:
    """Everything that decides a kernel's code; the key of the disk cache is its digest."""
    sources = digest_of("kernels/*.py", "compiled.py", "cubin.py", "device_library.py")
    own = {"kernel": spec.name, "shape": repr(spec.shape), "kernel sources": sources}
    teams = device_library.uses_network(spec.name)
    own |= device_library.network_fingerprint() if teams else {}
    return _device_fingerprint(arch, lineinfo, trace, teams, waits) | own | _own_sources(spec)


def _own_sources(spec: KernelSpec) -> dict[str, str]:
    """What decides the code of a kernel of somebody else's."""
    factory = KERNELS[spec.name][0]
    if getattr(factory, "__module__", "").startswith("ncclep_py.") and not isinstance(factory, functools.partial):
        return {}
    from ncclep_py.own_kernels import digest_of_factory

    return {"factory": digest_of_factory(factory)}


def device_ltoir(arch: str, lineinfo: bool, cache: KernelCache, trace: bool = False, teams: bool = False, waits: bool = False) -> bytes:
    """The device functions as LTO-IR, through the cache; `teams`: for kernels over several teams of ranks."""
    name, key = f"device_ops-{arch}", cache.key(_device_fingerprint(arch, lineinfo, trace, teams, waits))
    found = cache.load(name, key)
    if found is None:
        found = {}, toolchain.compile_device(arch, lineinfo=lineinfo, trace=trace, teams=teams, waits=waits)
        cache.store(name, key, *found)
    return found[1]


def compile_kernel(spec: KernelSpec, arch: str = "sm_90", *, lineinfo: bool = False, trace: bool = False, waits: bool = False) -> CompiledKernel:
    """The kernel for `arch`, from the disk cache or compiled now. `lineinfo` keeps the source lines of the device
    functions for profilers (numba's for the kernel itself cannot be linked with them: their debug formats differ). `trace`: stamps are written
    (``ncclep_py.tracing``), otherwise they leave nothing behind; so do counters of waits (``ncclep_py.waited``) without `waits`."""
    recipe = "NVFP4" if spec.name.endswith("nvfp4_combine") else "DS_FP8" if spec.shape.wire.quantise else None
    if recipe and toolchain.capability(arch) < FP8_CAPABILITY:
        raise NotImplementedError(f"{recipe} needs a GPU that converts to E4M3, of compute capability 8.9 or newer; this one is {arch}: quantise "
                                  "rows yourself and send them with QUANT_FWD, or leave the recipe out")
    toolchain.capability(arch)
    made, missing = prebuilt.find(spec, arch, lineinfo, trace, waits)
    if made is not None:
        return CompiledKernel(spec.name, made[0]["symbol"], made[1], made[0])
    try:
        return _compile(spec, arch, lineinfo, trace, waits)
    except (ImportError, RuntimeError) as e:
        if missing:
            raise RuntimeError(f"{e}\n{missing}") from e
        raise


def _compile(spec: KernelSpec, arch: str, lineinfo: bool, trace: bool, waits: bool) -> CompiledKernel:
    """The kernel from the disk cache, or compiled now."""
    cache = KernelCache()
    name, key = f"{spec.name}-{arch}", cache.key(fingerprint(spec, arch, lineinfo, trace, waits))
    found = cache.load(name, key)
    if found is not None:
        info, cubin = found
        return CompiledKernel(spec.name, info["symbol"], cubin, info)
    started = time.perf_counter()
    teams = device_library.uses_network(spec.name)
    device = device_ltoir(arch, lineinfo, cache, trace, teams, waits)
    factory, parameters = KERNELS[spec.name]
    network = device_library.network_parts(arch, lineinfo, cache) if teams else []
    cubin = toolchain.link([toolchain.kernel_ltoir(factory, spec.shape, parameters, arch, teams=teams), device, *network], arch, lineinfo)
    symbols = cubin_file.entry_symbols(cubin)
    symbols = [s for s in symbols if spec.name in s] or symbols   # a kernel of somebody else's may be called anything
    if len(symbols) != 1:
        raise RuntimeError(f"the cubin of {spec.name} should hold one kernel, it holds {symbols}")
    info = {"symbol": symbols[0], "arch": arch, "key": key, "seconds": round(time.perf_counter() - started, 3)} | cubin_file.resources(cubin)
    cache.store(name, key, info, cubin)
    return CompiledKernel(spec.name, symbols[0], cubin, info)
