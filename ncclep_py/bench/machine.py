"""What a figure was measured on and with, and the bandwidth of device memory in the same run."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["clocks", "floors", "machine"]


def machine(backend: str) -> dict[str, Any]:
    """Machine and versions, for a record; None for what cannot be known."""
    import torch

    from ncclep_py import __version__

    told: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
                            "numba_cuda": _version("numba-cuda"), "ncclep_py": __version__, "commit": _commit(), "nccl": None, "driver": None,
                            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                            "gpu": None, "gpus": 0, "sm_clock_mhz": None, "memory_clock_mhz": None}
    if backend == "nccl":
        from ncclep_py.communicator import _loaded_version
        from ncclep_py.toolchain import version_text

        told |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "nccl": version_text(_loaded_version())}
        told |= _clocks()
    else:
        told["gpu"] = "none: simulated, no times"
    return told


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout the package is in, with ``+`` if it was changed; None where it is not in one."""
    folder = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _clocks() -> dict[str, Any]:
    """Driver and clocks (now, most) by nvidia-smi, where it is."""
    fields = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem")
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"], capture_output=True,
                              text=True, timeout=20)
        driver, sm, most_sm, memory, most_memory = (word.strip() for word in done.stdout.strip().splitlines()[0].split(","))
        return {"driver": driver, "sm_clock_mhz": [int(sm), int(most_sm)], "memory_clock_mhz": [int(memory), int(most_memory)]}
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return {}


def clocks(device: Any) -> dict[str, int] | None:
    """``{"sm", "memory"}`` MHz of a device now, by NVML where pynvml is installed, else by nvidia-smi (which takes a while); None if neither can
    say."""
    import torch

    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(name)
        return {"sm": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM), "memory": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)}
    except Exception:   # noqa: BLE001  (not installed, no driver library, no right to ask)
        pass
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits", f"--id={name}"],
                              capture_output=True, text=True, timeout=20)
        sm, memory = (int(word) for word in done.stdout.strip().split(","))
        return {"sm": sm, "memory": memory}
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


def floors() -> dict[str, Any]:
    """Bandwidths of device memory in GB/s, read and written bytes counted: copy, write-only, read-only; 1 GiB buffers, of one rank alone."""
    import torch

    n = 1 << 30
    a, b = torch.zeros(n // 4, device="cuda"), torch.zeros(n // 4, device="cuda")

    def rate(action: Callable[[], Any], moved: int) -> float:
        for _ in range(3):
            action()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            action()
        end.record()
        torch.cuda.synchronize()
        return round(moved * 10 / start.elapsed_time(end) / 1e6)

    return {"copy_gb_s": rate(lambda: b.copy_(a), 2 * n), "write_gb_s": rate(lambda: b.fill_(1.0), n), "read_gb_s": rate(lambda: a.sum(), n)}
