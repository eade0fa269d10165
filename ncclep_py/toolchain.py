"""The compilers and headers of the installed wheels: NVRTC for the ``.cu``, numba-cuda for the Python kernels, nvJitLink for both.

Nothing here needs a CUDA device, a driver or a compiler on the machine. The compiler of the Python kernels is imported in `kernel_compiler` and
nowhere else in the package; ``NCCLEP_COMPILER=numba-cuda-mlir`` chooses numba-cuda's successor.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ncclep_py.nccl_version import OLDEST_NCCL, age_problem, header_problem, version_text

__all__ = [
    "COMPILERS",
    "DEVICE_SOURCES",
    "KERNEL_FOLDER",
    "MAX_REGISTERS",
    "OLDEST_NCCL",
    "TEAM_SOURCES",
    "capability",
    "check_loaded_nccl",
    "chosen_compiler",
    "compile_device",
    "compiler_archs",
    "device_source",
    "include_folders",
    "kernel_compiler",
    "kernel_ltoir",
    "link",
    "nccl_header_version",
    "nccl_include",
    "version_text",
    "versions",
]

KERNEL_FOLDER = Path(__file__).parent / "kernels"
DEVICE_SOURCES = ("lane_ops.cu", "fabric_ops.cu", "rank_ops.cu", "recipe_ops.cu", "staged_ops.cu", "ht_ops.cu",
                  "mask_ops.cu", "mask_row_ops.cu", "trace_ops.cu")
"""In the order in which they form one NVRTC program."""

TEAM_SOURCES = ("net_calls.cu", "net_ops.cu", "ht_net_ops.cu", "ll_net_ops.cu", "ll_net_staged_ops.cu", "ll_net_masked_ops.cu")
"""What follows them in the program for kernels over several teams of ranks."""

MAX_REGISTERS = 128
"""Of a thread: 65536 registers of a multiprocessor over a block of 512."""

COMPILERS = {"numba-cuda": "numba", "numba-cuda-mlir": "numba_cuda_mlir"}
"""Distribution and package of what can compile the Python kernels; the first unless ``NCCLEP_COMPILER`` names another."""

SYSTEM_NCCL, SYSTEM_CUDA = Path("/usr/include"), Path("/usr/local/cuda")
_EXTRA = "pip install 'ncclep_py[cu12]' or 'ncclep_py[cu13]'"


# ---- headers -------------------------------------------------------------------------------------------------------------
def _wheel_folders() -> list[Path]:
    """The folders of the ``nvidia`` namespace package."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in spec.submodule_search_locations or ()] if spec else []


def _environment_folder(name: str, *below: str) -> list[Path]:
    """The folder an environment variable names, if it is set."""
    return [Path(os.environ[name], *below)] if os.environ.get(name) else []


def nccl_include() -> Path:
    """Folder with ``nccl.h`` and ``nccl_device``: of NCCL_HOME, else of the wheel, else of the system."""
    places = [*_environment_folder("NCCL_HOME", "include"), *(w / "nccl" / "include" for w in _wheel_folders()), SYSTEM_NCCL]
    for place in places:
        if (place / "nccl.h").is_file() and (place / "nccl_device" / "impl" / "ptr__funcs.h").is_file():
            return place
    looked = ", ".join(map(str, places))
    raise ImportError(f"no NCCL headers with the Device API (nccl.h and nccl_device/) in {looked}; {_EXTRA} brings them, or set NCCL_HOME")


def _cuda_includes() -> list[Path]:
    """Folders that together hold CUDA's ``cuda.h`` and the CUDA C++ core libraries, both from one place."""
    roots = []
    for wheels in _wheel_folders():
        roots += [[wheels / part / "include" for part in ("cuda_runtime", "cuda_cccl")],
                  [wheels / "cu13" / "include", wheels / "cu13" / "include" / "cccl"]]
    for home in [*_environment_folder("CUDA_HOME"), *_environment_folder("CUDA_PATH"), SYSTEM_CUDA]:
        roots.append([home / "include", home / "include" / "cccl"])
    for folders in roots:
        if all(any((f / name).is_file() for f in folders) for name in ("cuda.h", "cuda/std/cstdint")):
            return folders
    looked = ", ".join(str(f) for folders in roots for f in folders)
    raise ImportError(f"no CUDA headers (cuda.h and cuda/std/) in {looked}; {_EXTRA} brings them, or set CUDA_HOME")


def include_folders(nccl: Path | None = None) -> list[Path]:
    """What NVRTC searches, in order: our stand-ins for host headers, NCCL (`nccl`, else the installed one), CUDA."""
    return [KERNEL_FOLDER / "headers", nccl or nccl_include(), *_cuda_includes()]


def nccl_header_version(include: Path | None = None) -> int:
    """NCCL_VERSION_CODE of the headers kernels are compiled against, e.g. 23203."""
    header = (include or nccl_include()) / "nccl.h"
    found = re.search(r"^\s*#\s*define\s+NCCL_VERSION_CODE\s+(\d+)", header.read_text(errors="replace"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{header} does not define NCCL_VERSION_CODE; is it NCCL's header?")
    return int(found[1])


def check_loaded_nccl(loaded: int, path: str = "") -> None:
    """``RuntimeError`` unless the library of version code `loaded` is the one whose headers kernels are compiled against: they share structs."""
    if problem := age_problem(loaded, path):
        raise RuntimeError(f"{problem}: {_EXTRA}")
    if problem := header_problem(loaded, nccl_header_version(), path, str(nccl_include())):
        raise RuntimeError(f"{problem}: set NCCL_HOME to the loaded one, or install one NCCL (python -m ncclep_py doctor)")


# ---- versions ------------------------------------------------------------------------------------------------------------
def _distribution(name: str) -> str:
    """Version of an installed distribution, or ``absent``."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


@functools.cache
def _library_versions() -> dict[str, str]:
    """Versions of the libraries that cannot change while we run."""
    try:
        from cuda.bindings import nvjitlink, nvrtc, nvvm
    except ImportError as e:
        raise ImportError(f"compiling kernels needs cuda-bindings and cuda-core: {_EXTRA}") from e
    found = {name: _distribution(name) for name in (*COMPILERS, "numba", "llvmlite", "cuda-core", "cuda-bindings")}
    for part in ("cuda-nvrtc", "nvjitlink", "nvvm", "cuda-nvcc", "cuda-runtime", "cuda-cccl"):   # to the patch release, where they are wheels
        found[part] = "/".join(_distribution(f"nvidia-{part}{suffix}") for suffix in ("-cu12", ""))
    error, major, minor = nvrtc.nvrtcVersion()
    if int(error):
        raise RuntimeError(f"NVRTC does not tell its version: {error}")
    return found | {"NVRTC": f"{major}.{minor}", "nvJitLink": str(nvjitlink.version()), "NVVM": f"{nvvm.version()} {nvvm.ir_version()}"}


def versions() -> dict[str, str]:
    """Version of everything that has a say in a compiled kernel, without importing numba."""
    headers = {"NCCL headers": version_text(nccl_header_version()), "includes": ":".join(map(str, include_folders()))}
    return _library_versions() | {"compiler": chosen_compiler()} | headers


# ---- compilers -----------------------------------------------------------------------------------------------------------
def chosen_compiler() -> str:
    """The distribution that compiles Python kernels; ``ValueError`` if ``NCCLEP_COMPILER`` names one we do not know."""
    chosen = os.environ.get("NCCLEP_COMPILER") or next(iter(COMPILERS))
    if chosen not in COMPILERS:
        raise ValueError(f"NCCLEP_COMPILER must be one of {', '.join(COMPILERS)}, got {chosen!r}")
    return chosen


def kernel_compiler() -> tuple[Any, Any]:
    """The chosen compiler's ``cuda`` and ``types`` modules."""
    chosen = chosen_compiler()
    try:
        return tuple(importlib.import_module(f"{COMPILERS[chosen]}.{part}") for part in ("cuda", "types"))   # type: ignore[return-value]
    except ImportError as e:
        cure = f"numba and numba-cuda: {_EXTRA}" if chosen == "numba-cuda" else f"{chosen}: pip install {chosen}"
        raise ImportError(f"compiling kernels needs {cure} ({e})") from e


def device_source(teams: bool = False) -> str:
    """The CUDA side of the vocabulary as one program; `teams`: for kernels over several teams of ranks."""
    return "".join((KERNEL_FOLDER / name).read_text() for name in (*DEVICE_SOURCES, *(TEAM_SOURCES if teams else ())))


def compile_device(arch: str, output: str = "ltoir", source: str | None = None, nccl: Path | None = None, lineinfo: bool = False,
                   trace: bool = False, teams: bool = False, waits: bool = False) -> bytes:
    """`source`, else the package's, by NVRTC to ``ltoir`` or ``ptx``, against the NCCL headers in `nccl`, else the installed ones; `trace`: with
    stamps; `teams`: for kernels over several teams of ranks; `waits`: that count how long they wait.

    NVRTC is called by its own binding: cuda.core's ``Program`` wants a driver to make PTX.
    """
    from cuda.bindings import nvrtc

    folders = include_folders(nccl)
    options = ["-std=c++17", f"-arch={arch}", "-rdc=true", "-default-device", *(f"-I{f}" for f in folders)]
    options += ["-dlto"] * (output == "ltoir") + ["-lineinfo"] * lineinfo + ["-DEP_TRACE"] * trace
    options += ["-DEP_TEAMS"] * teams + ["-DEP_WAITS"] * waits
    program = _nvrtc(nvrtc.nvrtcCreateProgram((source or device_source(teams)).encode(), b"ncclep_py.cu", 0, [], []))
    try:
        error, = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if int(error):
            log = bytearray(_nvrtc(nvrtc.nvrtcGetProgramLogSize(program)))
            _nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC {_library_versions()['NVRTC']} cannot compile the device functions for {arch} against NCCL "
                               f"{version_text(nccl_header_version(folders[1]))} in {folders[1]}:\n{log.rstrip(bytes(1)).decode()}")
        size, code = (nvrtc.nvrtcGetLTOIRSize, nvrtc.nvrtcGetLTOIR) if output == "ltoir" else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        made = bytearray(_nvrtc(size(program)))
        _nvrtc(code(program, made))
        return bytes(made)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compiler_archs() -> list[str]:
    """Architectures NVRTC knows, ``sm_80`` and so on, ascending; none without NVRTC."""
    try:
        from cuda.bindings import nvrtc

        return [f"sm_{number}" for number in sorted(_nvrtc(nvrtc.nvrtcGetSupportedArchs()))]
    except (ImportError, RuntimeError):
        return []


def _nvrtc(result: tuple) -> Any:
    """The value of an NVRTC call, or a ``RuntimeError``."""
    if int(result[0]):
        raise RuntimeError(f"NVRTC: {result[0].name}")
    return result[1] if len(result) == 2 else None


def kernel_ltoir(factory: Callable[..., Callable[..., None]], shape: object, parameters: Sequence[str], arch: str, body: str = "",
                 teams: bool = False) -> bytes:
    """The kernel `factory` makes for `shape`, by numba to LTO-IR that calls the device functions by name; `body`: as a C function of that name;
    `teams`: with the operations over several teams of ranks, too."""
    from ncclep_py.kernels.ops import NET_OPS, OPS, Vocabulary

    ops = OPS | NET_OPS if teams else OPS
    cuda, types = kernel_compiler()
    beside = _for_mlir(cuda, {name: len(op.parameters) for name, op in ops.items()}, arch) if chosen_compiler() == "numba-cuda-mlir" else {}

    def declare(name: str, arity: int) -> object:
        return cuda.declare_device(f"ep_{name}", f"int64({', '.join(['int64'] * arity)})", abi="c", **beside)

    kernel = factory(shape, Vocabulary({name: declare(name, len(op.parameters)) for name, op in ops.items()}))
    code, _ = cuda.compile(kernel, (types.int64,) * len(parameters), device=bool(body), cc=capability(arch), output="ltoir",
                           abi="c" if body else "numba", abi_info={"abi_name": body} if body else None)
    return bytes(code)


def _for_mlir(cuda: Any, arities: dict[str, int], arch: str) -> dict[str, object]:
    """What numba-cuda-mlir 0.6 wants besides: it takes no notice of `cc` but asks for this machine's GPU, which need not be there; and it links
    even where LTO-IR is asked for, so that every operation needs some body (which the LTO-IR it gives back does not contain)."""
    tools: Any = importlib.import_module("numba_cuda_mlir.tools")
    tools._cached_cc = capability(arch)
    return {"link": cuda.LTOIR(_bodies(tuple(sorted(arities.items())), arch))}


@functools.cache
def _bodies(arities: tuple[tuple[str, int], ...], arch: str) -> bytes:
    """Operations that do nothing, as LTO-IR."""
    source = "".join(f'extern "C" __device__ long long ep_{name}({", ".join(["long long"] * arity)}) {{ return 0; }}\n' for name, arity in arities)
    return compile_device(arch, source=source)


def link(parts: Sequence[bytes], arch: str, lineinfo: bool = False) -> bytes:
    """The cubin of LTO-IR parts."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=arch, link_time_optimization=True, max_register_count=MAX_REGISTERS, lineinfo=lineinfo or None)
    linker = Linker(*(ObjectCode.from_ltoir(part) for part in parts), options=options)
    try:
        return bytes(linker.link("cubin").code)
    except Exception as e:
        raise RuntimeError(f"nvJitLink {_library_versions()['nvJitLink']} cannot link a kernel for {arch}: {e}\n{linker.get_error_log()}") from e


def capability(arch: str) -> tuple[int, int]:
    """``sm_90`` or ``sm_90a`` as (9, 0); ``ValueError`` for what is no architecture."""
    found = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", arch)
    if found is None:
        raise ValueError(f"arch must look like sm_90, got {arch!r}")
    return int(found[1]), int(found[2])
