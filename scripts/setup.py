#!/usr/bin/env python3
"""Set up a clone and run the main job or the tests, with nothing but python3, venv and pip.

    python3 scripts/setup.py demo [demo arguments]      # e.g. --ranks 8 --json
    python3 scripts/setup.py test [pytest arguments]    # e.g. -m gpu
    python3 scripts/setup.py doctor [doctor arguments]
    python3 scripts/setup.py prepare                    # only set up, with what the tests need

Makes .venv once (NCCLEP_VENV names another place) and reuses it. With a GPU whose driver supports CUDA 13 it installs PyPI's torch and the extra
cu13; without one, torch's small CPU build, which is enough for the simulator, and for the tests the extra cu12, whose toolchain compiles every
kernel without a GPU. A CUDA 12 driver is answered by the simulator too: PyPI's torch has been CUDA 13 since 2.11.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOME = pathlib.Path(os.environ.get("NCCLEP_VENV", ROOT / ".venv"))
CPU_TORCH = ["torch==2.13.0", "--extra-index-url", "https://download.pytorch.org/whl/cpu", "--retries", "1"]


def driver_cuda() -> int:
    """Major CUDA version the GPU driver supports; 0 without a driver or a GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version, count = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) or library.cuDriverGetVersion(ctypes.byref(version)) or library.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return version.value // 1000 if count.value else 0


def plan(action: str, cuda: int) -> list[list[str]]:
    """Arguments of the pip calls that set up for `action` on a machine whose driver supports CUDA `cuda`."""
    testing = action in ("test", "prepare")
    if cuda >= 13:
        return [["-e", f"{ROOT}[cu13,test]" if testing else f"{ROOT}[cu13]"]]
    return [CPU_TORCH, ["-e", f"{ROOT}[cu12,test]" if testing else str(ROOT)]]


def is_whole(home: pathlib.Path) -> bool:
    """Whether an environment is there with its pip, which venv installs last."""
    return (home / "bin" / "python").exists() and any(home.glob("lib/python*/site-packages/pip/__main__.py"))


def prepare(action: str) -> pathlib.Path:
    """The environment's python, with everything `action` needs installed."""
    python = HOME / "bin" / "python"
    wanted = plan(action, driver_cuda())
    marker = HOME / "ncclep-ready.txt"
    note = repr(wanted) + (ROOT / "pyproject.toml").read_text()
    done = marker.read_text().split("\0") if marker.exists() else []
    if note in done:
        return python
    if not is_whole(HOME):
        venv.create(HOME, with_pip=True)   # also completes one whose creation was interrupted
    for arguments in wanted:
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments], check=True)
    marker.write_text("\0".join([*done, note]))
    return python


def main() -> int:
    """Set up, then become the command asked for."""
    action, rest = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    commands = {"demo": ["-m", "ncclep_py", "demo", *rest], "doctor": ["-m", "ncclep_py", "doctor", *rest], "test": ["-m", "pytest", "-q", *rest],
                "prepare": ["-m", "pip", "check"]}
    if action in ("-h", "--help"):
        sys.stdout.write(__doc__ or "")
        return 0
    if action not in commands:
        sys.stderr.write(__doc__ or "")
        return 2
    if sys.version_info < (3, 10) or sys.version_info >= (3, 14):
        sys.stderr.write(f"ncclep_py needs Python 3.10 to 3.13, this is {sys.version.split()[0]}\n")
        return 2
    python = prepare(action)
    return subprocess.run([str(python), *commands[action]], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
