"""Cubins made on another machine: ``NCCLEP_CUBIN_DIR`` names a folder of ``python -m ncclep_py compile``, which is only read.

An entry fits if what decides a kernel's meaning is the same here: this package's kernel sources, the kernel's constants, the architecture, and the
NCCL version. The compilers may differ, and need not be here at all. A kernel that is not there, or does not fit, is compiled as ever; what was
different is said in a warning, and in the error where compiling is impossible, too.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

from ncclep_py import toolchain
from ncclep_py.kernel_cache import KernelCache, digest_of

__all__ = ["VARIABLE", "check_loaded", "find", "folder", "meaning", "store"]

_LOG = logging.getLogger(__name__)
_warned: set[str] = set()

VARIABLE = "NCCLEP_CUBIN_DIR"


def folder() -> Path | None:
    """The folder in use, None without one; ``RuntimeError`` if it is not there."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    if not Path(named).is_dir():
        raise RuntimeError(f"{VARIABLE} names {named}, which is no folder; make it with `python -m ncclep_py compile --out {named}`, or unset it")
    return Path(named)


def nccl_version() -> int:
    """Version code of the NCCL that kernels must be of: of the installed headers, where there are none, of the library."""
    try:
        return toolchain.nccl_header_version()
    except ImportError:
        from ncclep_py.communicator import _loaded_version

        return _loaded_version()


def check_loaded(loaded: int) -> None:
    """`toolchain.check_loaded_nccl`, but for a folder's cubins without headers here: `find` then takes those of the loaded version only."""
    try:
        toolchain.nccl_include()
    except ImportError:
        if folder() is not None:
            return
    toolchain.check_loaded_nccl(loaded)


def _constants(value: Any, name: str = "") -> dict[str, str]:
    """A shape's fields by dotted name, so that two can be compared."""
    if not dataclasses.is_dataclass(value):
        return {name: repr(value)}
    return {key: text for field in dataclasses.fields(value)
            for key, text in _constants(getattr(value, field.name), f"{name}.{field.name}".lstrip(".")).items()}


def meaning(spec: Any, arch: str, lineinfo: bool, trace: bool, waits: bool, nccl: int) -> dict[str, str]:
    """What decides what a kernel does, whoever compiles it."""
    return {"kernel": spec.name, "arch": arch, "lineinfo": str(lineinfo), "trace": str(trace), "waits": str(waits),
            "NCCL": toolchain.version_text(nccl),
            "kernel sources": digest_of("kernels/*.py", "kernels/*.cu", "kernels/headers/**/*")} | _constants(spec.shape, "shape")


def store(to: Path, spec: Any, arch: str, made: Any) -> Path:
    """Keep a compiled kernel (`CompiledKernel`) in a folder for other machines."""
    told = meaning(spec, arch, False, False, False, toolchain.nccl_header_version())
    cache, name = KernelCache(to), f"{spec.name}-{arch}"
    key = cache.key(told)
    if not cache.store(name, key, {"info": dict(made.info) | {"key": key}, "meaning": told}, made.cubin):
        raise RuntimeError(f"cannot write cubins to {to}")
    cache.path(name, key).chmod(0o644)   # other users, of other machines, read them
    return cache.path(name, key)


def _architectures(arch: str) -> list[str]:
    """Those whose cubins run on `arch`: its own, then older ones of its major version."""
    major, minor = toolchain.capability(arch)
    return [arch, *(f"sm_{major}{m}" for m in range(minor - 1, -1, -1))]


def find(spec: Any, arch: str, lineinfo: bool = False, trace: bool = False, waits: bool = False) -> tuple[tuple[dict[str, Any], bytes] | None, str]:
    """(info, cubin) from the folder in use, and a sentence about what was not found there; (None, "") without a folder."""
    place = folder()
    if place is None:
        return None, ""
    cache, version = KernelCache(place), nccl_version()
    for other in _architectures(arch):
        key = cache.key(meaning(spec, other, lineinfo, trace, waits, version))
        found = cache.load(f"{spec.name}-{other}", key)
        if found is not None:
            return (found[0]["info"], found[1]), ""
    why = _why_not(cache, spec.name, meaning(spec, arch, lineinfo, trace, waits, version))
    if why not in _warned:
        _warned.add(why)
        _LOG.warning("%s; compiling it here", why)
    return None, why


def _why_not(cache: KernelCache, kernel: str, wanted: dict[str, str]) -> str:
    """What differs between the kernel wanted and the nearest one in the folder."""
    nearest: dict[str, tuple[str, str]] | None = None
    for path in sorted(cache.folder.glob(f"{kernel}-sm_*.bin")):
        told = cache.metadata(path)
        if told is None:
            continue
        have = told["meaning"]
        differ = {name: (have.get(name, "nothing"), wanted.get(name, "nothing")) for name in sorted(have.keys() | wanted.keys())
                  if have.get(name) != wanted.get(name)}
        if nearest is None or len(differ) < len(nearest):
            nearest = differ
    if nearest is None:
        return f"{VARIABLE}={cache.folder} has no {kernel} for {wanted['arch']}"
    if "kernel sources" in nearest:
        return f"{VARIABLE}={cache.folder} has {kernel} of another version of ncclep_py: make the folder anew with this one"
    listed = ", ".join(f"{name} is {have} there, {want} here" for name, (have, want) in list(nearest.items())[:4])
    return f"{VARIABLE}={cache.folder} has {kernel} only for other constants: {listed}{', ...' if len(nearest) > 4 else ''}"
