"""What is installed on this machine, gathered as one plain dict; `doctor` judges it.

Nothing here fails: whatever is absent or does not load is None (or an empty list), and its row says why. torch is imported first, as in a user's
program, since the libnccl that it brings is then the one that everybody gets.

    {"versions": {name: {"version": str | None, "path": str | None, "note": str}},
     "wheels": {name: version},                    # every installed distribution, names normalised
     "toolkit": {"nvrtc" | "nvjitlink" | "nvvm": (major, minor) | None},
     "nccl": {"loaded": int | None, "path", "cuda": (major, minor) | None, "device_api": bool, "headers": int | None, "headers_path",
              "libraries": [every libnccl on the machine], "in_process": [those this process has loaded], "problem": str},
     "row_stack": bool,                            # whether numpy still has what numba-cuda 0.30 calls
     "torch": {"cuda": str | None, "pins_nccl": str | None, "problem": str},
     "driver": {"cuda": (major, minor) | None, "path", "problem": str},
     "gpus": [{"index", "name", "uuid", "sms", "capability", "mig"}],  "p2p": [[bool]],
     "ranks": int | None,                          # ranks on this machine, if a launcher or the user says so
     "environment": {name: value}}
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ncclep_py.nccl_version import version_text
from ncclep_py.network import ENVIRONMENT as NETWORK
from ncclep_py.network import network_facts

__all__ = ["code_text", "gather", "normalised", "pair_text"]

PACKAGES = {
    "numpy": "numpy",
    "torch": "torch",
    "greenlet": "greenlet",
    "numba": "numba",
    "numba-cuda": "numba_cuda",
    "llvmlite": "llvmlite",
    "cuda-core": "cuda.core",
    "cuda-bindings": "cuda.bindings",
    "cuda-pathfinder": "cuda.pathfinder",
    "nccl4py": "nccl.core",
}
"""Distribution name -> module whose folder is reported."""

TOOLKIT = {"nvrtc": "nvrtcVersion", "nvJitLink": "nvJitLinkVersion", "nvvm": "nvvmVersion"}
"""Library of the CUDA toolkit -> function that tells its version."""

ENVIRONMENT = ("NCCL_HOME", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_LSA_TEAM_SIZE", "NCCL_CUMEM_ENABLE", "CUDA_HOME", "CUDA_PATH",
               "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "NCCLEP_CACHE_DIR", "NCCLEP_CACHE_MB", "NCCLEP_COMPILER")
LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
DRIVER_ATTRIBUTES = {"sms": 16, "major": 75, "minor": 76}
"""CUdevice_attribute numbers."""

Pair = tuple[int, int]


def normalised(name: str) -> str:
    """A distribution's name as the package index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def code_text(code: int | None) -> str | None:
    """NCCL's version number as text: 23203 -> '2.32.3'."""
    return None if code is None else version_text(code)


def pair_text(pair: Pair | None) -> str | None:
    """(12, 9) -> '12.9'."""
    return None if pair is None else f"{pair[0]}.{pair[1]}"


def row(version: str | None, path: str | Path | None = None, note: str = "") -> dict[str, Any]:
    """One row of "versions"."""
    return {"version": version, "path": None if path is None else str(path), "note": note}


# ---- Python packages ----------------------------------------------------------------------------------------------------------------------------


def wheels() -> dict[str, str]:
    """Every installed distribution; of two copies the first on the path."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(normalised(name), distribution.version)
    return found


def module_folder(module: str) -> str | None:
    """Where `module` would be imported from, without importing it (a parent package is imported)."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [])
    return places[0] if places else spec.origin


def package_row(name: str, module: str, installed: dict[str, str]) -> dict[str, Any]:
    """Version and folder of a Python package."""
    folder, version = module_folder(module), installed.get(name)
    return row(version, folder, "" if version else "missing" if folder is None else "found, but not installed as a package")


def torch_facts() -> dict[str, Any]:
    """CUDA version that torch was built for, and the NCCL release it pins."""
    facts: dict[str, Any] = {"cuda": None, "pins_nccl": None, "problem": ""}
    try:
        facts["cuda"] = importlib.import_module("torch").version.cuda
    except Exception as error:
        facts["problem"] = f"import failed: {error}"
        return facts
    try:
        requirements = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    pins = [match[1] for line in requirements if (match := re.match(r"nvidia-nccl-cu\d+\s*\(?==\s*([\w.]+)", line))]
    facts["pins_nccl"] = pins[0] if pins else None
    return facts


def torch_note(facts: dict[str, Any]) -> str:
    """The remark behind torch's version."""
    if facts["problem"]:
        return facts["problem"]
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    return f"{build}, pins NCCL {facts['pins_nccl']}" if facts["pins_nccl"] else build


# ---- shared libraries ---------------------------------------------------------------------------------------------------------------------------


def mapped(stem: str) -> list[str]:
    """Files of this process whose name starts with `stem` and a version, such as libnccl.so.2."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and len(line.split(maxsplit=5)) == 6}
    return sorted(name for name in files if re.fullmatch(rf"{re.escape(stem)}\.so[.\d]*", os.path.basename(name)))


def two_ints(library: ctypes.CDLL, function: str) -> Pair | None:
    """Call `function(int*, int*)`, the form in which NVRTC, nvJitLink and NVVM tell their version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    status = getattr(library, function)(ctypes.byref(major), ctypes.byref(minor))
    return None if status else (major.value, minor.value)


def toolkit_library(name: str) -> tuple[Pair | None, dict[str, Any]]:
    """Version and row of a library of the CUDA toolkit, found as numba-cuda and cuda.core find it."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        path = pathfinder.load_nvidia_dynamic_lib(name).abs_path
        version = two_ints(ctypes.CDLL(path), TOOLKIT[name])
    except ImportError:
        return None, row(None, note="missing (not looked for: no cuda-pathfinder)")
    except Exception as error:
        return None, row(None, note=f"missing ({type(error).__name__})")
    return version, row(pair_text(version), path)


def site_folders() -> list[Path]:
    """Folders in which wheels of CUDA libraries lie."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(place) for place in (spec.submodule_search_locations or [] if spec else [])]


def linker_cache(stem: str) -> list[Path]:
    """Libraries that the system's loader knows."""
    try:
        text = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [Path(line.split("=>")[1].strip()) for line in text.splitlines() if "=>" in line and line.strip().startswith(f"{stem}.so")]


def nccl_libraries() -> list[str]:
    """Every libnccl on this machine that some loader could pick, most likely first; each file once."""
    home = os.environ.get("NCCL_HOME")
    folders = [Path(home) / "lib", Path(home) / "lib64"] if home else []
    folders += [Path(place) for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    folders += [place / "nccl" / "lib" for place in site_folders()] + [Path(sys.prefix) / "lib"]
    files = [file for folder in folders for file in sorted(folder.glob("libnccl.so*"))] + linker_cache("libnccl")
    return list(dict.fromkeys(str(file.resolve()) for file in files if file.is_file()))


def nccl4py_library() -> str | None:
    """The libnccl that nccl4py calls; loads it, as creating a communicator would."""
    try:
        bindings = importlib.import_module("nccl.bindings.nccl")
        bindings.get_version()
        return bindings.get_library_path()
    except Exception:
        return None


def first_in_process(name: str, symbol: str) -> str | None:
    """File of the first library of this name that the process has loaded: the one that everybody gets who asks for the name."""
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), symbol), ctypes.c_void_p)
        answer = (ctypes.c_void_p * 4)()   # Dl_info: file name, base, symbol's name, symbol's address
        found = ctypes.CDLL(None).dladdr(address, ctypes.byref(answer))
        return os.fsdecode(ctypes.string_at(answer[0])) if found and answer[0] else None
    except (OSError, AttributeError):
        return None


def nccl_cuda(path: str) -> Pair | None:
    """CUDA release that built this libnccl and its libnccl_device.ltoir, from its banner."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            match = re.search(rb"NCCL version [^+\s\x00]+\+cuda(\d+)\.(\d+)", content)
            return (int(match[1]), int(match[2])) if match else None
    except (OSError, ValueError):
        return None


def nccl_headers() -> tuple[int | None, str | None]:
    """NCCL_VERSION_CODE and path of the nccl.h that the device functions are compiled against (looked for as in `toolchain`)."""
    home = os.environ.get("NCCL_HOME")
    folders = [Path(home) / "include"] if home else []
    folders += [place / "nccl" / "include" for place in site_folders()] + [Path("/usr/include")]
    for file in (folder / "nccl.h" for folder in folders):
        if file.is_file():
            match = re.search(r"^#define\s+NCCL_VERSION_CODE\s+(\d+)", file.read_text(errors="replace"), re.MULTILINE)
            return (int(match[1]) if match else None), str(file)
    return None, None


def nccl_facts() -> dict[str, Any]:
    """The libnccl that this process would use, and its headers."""
    libraries = nccl_libraries()
    path = nccl4py_library() or first_in_process("libnccl.so.2", "ncclGetVersion") or next(iter(libraries), None)
    facts: dict[str, Any] = {"loaded": None, "path": path, "cuda": None, "device_api": False, "problem": "missing"}
    facts["in_process"] = [os.path.realpath(file) for file in mapped("libnccl")]
    facts["libraries"] = list(dict.fromkeys(facts["in_process"] + libraries))
    facts["headers"], facts["headers_path"] = nccl_headers()
    if facts["path"] is None:
        return facts
    try:
        library, code = ctypes.CDLL(facts["path"]), ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError) as error:
        return facts | {"problem": str(error)}
    return facts | {"loaded": code.value, "cuda": nccl_cuda(facts["path"]), "device_api": hasattr(library, "ncclDevCommCreate"), "problem": ""}


# ---- driver and GPUs ----------------------------------------------------------------------------------------------------------------------------


def load_driver() -> tuple[ctypes.CDLL | None, dict[str, Any]]:
    """libcuda (None if it cannot be used) and what it says."""
    facts: dict[str, Any] = {"cuda": None, "path": None, "problem": "missing"}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, facts
    facts["path"] = next(iter(mapped("libcuda")), "libcuda.so.1")
    status, version = driver.cuInit(0), ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) == 0:
        facts["cuda"] = (version.value // 1000, version.value % 1000 // 10)
    facts["problem"] = f"cuInit failed with error {status}" if status else ""
    return (None if status else driver), facts


def gpu_facts(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    """One GPU, or one MIG instance."""
    device, name, identity = ctypes.c_int(), ctypes.create_string_buffer(128), (ctypes.c_ubyte * 16)()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetUuid_v2(identity, device)
    values = {}
    for key, attribute in DRIVER_ATTRIBUTES.items():
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        values[key] = value.value
    text = name.value.decode(errors="replace")
    mig = " MIG " in f"{text} "
    return {"index": index, "name": text, "uuid": f"{'MIG' if mig else 'GPU'}-{uuid.UUID(bytes=bytes(identity))}", "sms": values["sms"],
            "capability": (values["major"], values["minor"]), "mig": mig}


def peer_access(driver: ctypes.CDLL, count: int) -> list[list[bool]]:
    """Whether GPU i can address GPU j's memory; True on the diagonal."""

    def can(i: int, j: int) -> bool:
        answer = ctypes.c_int()
        return driver.cuDeviceCanAccessPeer(ctypes.byref(answer), i, j) == 0 and bool(answer.value)

    return [[i == j or can(i, j) for j in range(count)] for i in range(count)]


def device_count(driver: ctypes.CDLL) -> int:
    """GPUs that this process may use."""
    count = ctypes.c_int()
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


# ---- all of it ----------------------------------------------------------------------------------------------------------------------------------


def local_ranks() -> int | None:
    """Ranks on this machine, as a launcher says."""
    values = (os.environ.get(name, "") for name in LOCAL_RANKS)
    return next((int(value) for value in values if value.isdigit()), None)


def has_row_stack() -> bool:
    """Whether numpy has the function that numba-cuda 0.30 needs at import and numpy 2.5 removed."""
    try:
        return hasattr(importlib.import_module("numpy"), "row_stack")
    except Exception:
        return False


def attempt(function: Callable[[], list[Any]]) -> list[Any]:
    """What `function` returns, or nothing: an old driver may lack a call."""
    try:
        return function()
    except (AttributeError, OSError):
        return []


def nccl_note(nccl: dict[str, Any]) -> str:
    """The remark behind NCCL's version."""
    build = f"built with CUDA {pair_text(nccl['cuda'])}" if nccl["cuda"] else ""
    api = "no Device API" if nccl["loaded"] and not nccl["device_api"] else ""
    return ", ".join(filter(None, [nccl["problem"], build, api]))


def gather(ranks: int | None = None) -> dict[str, Any]:
    """All facts about this machine and environment; `ranks` overrides what a launcher says."""
    installed, torch = wheels(), torch_facts()
    versions = {"ncclep_py": row(importlib.import_module("ncclep_py").__version__, Path(__file__).parent)}
    versions["python"] = row(platform.python_version(), sys.executable)
    versions |= {name: package_row(name, module, installed) for name, module in PACKAGES.items()}
    if versions["torch"]["path"]:
        versions["torch"]["note"] = torch_note(torch)
    nccl = nccl_facts()
    toolkit = {}
    for library in TOOLKIT:
        toolkit[library.lower()], versions[library] = toolkit_library(library)
    driver, driver_facts = load_driver()
    versions["driver (libcuda)"] = row(pair_text(driver_facts["cuda"]), driver_facts["path"], driver_facts["problem"])
    versions["NCCL (libnccl)"] = row(code_text(nccl["loaded"]), nccl["path"], nccl_note(nccl))
    versions["NCCL (nccl.h)"] = row(code_text(nccl["headers"]), nccl["headers_path"], "" if nccl["headers"] else "missing")
    count = device_count(driver) if driver else 0
    return {
        "versions": versions,
        "wheels": installed,
        "toolkit": toolkit,
        "nccl": nccl,
        "torch": torch,
        "row_stack": has_row_stack(),
        "driver": driver_facts,
        "gpus": attempt(lambda: [gpu_facts(driver, index) for index in range(count)]) if driver else [],
        "p2p": attempt(lambda: peer_access(driver, count)) if driver else [],
        "ranks": local_ranks() if ranks is None else ranks,
        "network": network_facts(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT + NETWORK if name in os.environ},
    }
