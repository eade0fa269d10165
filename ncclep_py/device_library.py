"""NCCL's device library, with which kernels that use the network are linked: ``libnccl_device.ltoir`` of the installed NCCL.

Only kernels of groups with several teams need it. It is LTO-IR, which nvJitLink reads if it is of the same CUDA major version and no older than the
compiler that made it. Where it is older, kernels can be made on another machine (``python -m ncclep_py compile``) and used from a folder.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from ncclep_py import toolchain
from ncclep_py.facts import nccl_cuda, pair_text
from ncclep_py.kernel_cache import KernelCache, digest_of

__all__ = ["NETWORK_SOURCES", "check_linker", "library_path", "network_fingerprint", "network_parts", "uses_network"]

NETWORK_SOURCES = ("gin_room.cu", "gin_ops.cu")
"""CUDA side of the network operations, an NVRTC program of its own: it declares NCCL's functions as the library's authors compiled them."""

FIRST_NCCL = 23200
"""NCCL whose library has all functions that ``gin_ops.cu`` calls."""

FIRST_CAPABILITY = (9, 0)
"""The library is made for no older GPU."""

LIBRARY = "libnccl_device.ltoir"


def uses_network(kernel: str) -> bool:
    """Whether a kernel of that name is linked with the library."""
    return "_net_" in kernel


def library_path() -> Path:
    """The library beside the NCCL headers in use; ``RuntimeError`` says what is missing."""
    include = toolchain.nccl_include()
    found = next((folder / LIBRARY for folder in (include.parent / "lib", include.parent / "lib64") if (folder / LIBRARY).is_file()), None)
    version = toolchain.nccl_header_version(include)
    if found is not None and version < FIRST_NCCL:
        raise RuntimeError(f"kernels for several teams need NCCL {toolchain.version_text(FIRST_NCCL)} or newer, {found} is of "
                           f"{toolchain.version_text(version)}: install a newer wheel, set NCCL_HOME, or use cubins made on another machine "
                           "(python -m ncclep_py compile)")
    if found is None:
        why = f"{toolchain.version_text(FIRST_NCCL)} is the first with all of it" if version < FIRST_NCCL else "its installation is not complete"
        raise RuntimeError(f"kernels for several teams need NCCL's {LIBRARY}, but NCCL {toolchain.version_text(version)} in {include.parent} has "
                           f"none: {why}. Install NVIDIA's wheel, set NCCL_HOME, or use cubins made on another machine (python -m ncclep_py compile)")
    return found


@functools.cache
def _built_with(library: Path) -> tuple[int, int] | None:
    """CUDA version NCCL, and so its device library, was built with; None if its libnccl does not tell."""
    return nccl_cuda(str(library.with_name("libnccl.so.2")))


def check_linker(library: Path, made: tuple[int, int] | None, linker: tuple[int, int]) -> None:
    """``RuntimeError`` unless nvJitLink of version `linker` reads LTO-IR made by CUDA `made`."""
    if made is None or (linker[0] == made[0] and linker >= made):
        return
    package = "nvidia-nvjitlink" if made[0] >= 13 else f"nvidia-nvjitlink-cu{made[0]}"
    wanted = pair_text(made)
    raise RuntimeError(f"{library} was made by CUDA {wanted}, which nvJitLink {pair_text(linker)} cannot link: kernels for several teams need "
                       f"nvJitLink of CUDA {made[0]}, {wanted} or newer (pip install '{package}>={wanted},<{made[0] + 1}'), or cubins made where it "
                       "is (python -m ncclep_py compile --arch ... --ranks ... --team ... --out FOLDER, then NCCLEP_CUBIN_DIR=FOLDER)")


@functools.cache
def _digest(library: Path, size: int, changed: int) -> str:
    """SHA-256 of the library's content; size and time of change keep the cached value true."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def network_fingerprint() -> dict[str, str]:
    """What decides the code of the network operations besides what decides that of all others."""
    library = library_path()
    state = library.stat()
    return {"device library": _digest(library, state.st_size, state.st_mtime_ns)}


def network_parts(arch: str, lineinfo: bool, cache: KernelCache, source: str | None = None) -> list[bytes]:
    """LTO-IR of the network operations (`source`, else the package's) and of NCCL's library, to be linked with a kernel and the other operations."""
    from cuda.bindings import nvjitlink

    if toolchain.capability(arch) < FIRST_CAPABILITY:
        raise NotImplementedError(f"kernels for several teams need a GPU of compute capability 9.0 or newer, for which NCCL's {LIBRARY} is made; "
                                  f"this one is {arch}")
    library = library_path()
    check_linker(library, _built_with(library), tuple(nvjitlink.version())[:2])
    text = source or "".join((toolchain.KERNEL_FOLDER / name).read_text() for name in NETWORK_SOURCES)
    parts = {"arch": arch, "lineinfo": str(lineinfo), "source": hashlib.sha256(text.encode()).hexdigest(),
             "headers": digest_of("kernels/headers/**/*", "toolchain.py")} | toolchain.versions()
    name, key = f"network_ops-{arch}", cache.key(parts)
    found = cache.load(name, key)
    if found is None:
        found = {}, toolchain.compile_device(arch, source=text, lineinfo=lineinfo)
        cache.store(name, key, *found)
    return [found[1], library.read_bytes()]
