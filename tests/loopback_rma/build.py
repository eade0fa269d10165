"""Builds the loopback RMA plugin with the machine's C++ compiler: ``python tests/loopback_rma/build.py OUT.so``."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
SOURCE = HERE / "loopback_rma.cc"


def compiler():
    """A C++ compiler, None without one; CXX names another."""
    return next((found for name in (os.environ.get("CXX"), "g++", "c++", "clang++") if name and (found := shutil.which(name))), None)


def include_folders():
    """Headers of NCCL, and of CUDA as NCCL's need them (the compiler's own folder, too, which wheels keep apart)."""
    from ncclep_py import toolchain

    folders = toolchain.include_folders()[1:]
    return folders + [w / "cuda_nvcc" / "include" for w in toolchain._wheel_folders() if (w / "cuda_nvcc" / "include").is_dir()]


def why_not():
    """Why the plugin cannot be built here, empty if it can."""
    if compiler() is None:
        return "no C++ compiler (g++, c++, clang++ or CXX)"
    try:
        folders = include_folders()
    except ImportError as e:
        return str(e)
    if not any((f / "crt" / "host_config.h").is_file() for f in folders):
        return "no crt/host_config.h, which nccl.h needs: install nvidia-cuda-nvcc, or set CUDA_HOME"
    return ""


def build(out, source=SOURCE):
    """Compile `source` to `out`; ``RuntimeError`` with the compiler's words."""
    out = pathlib.Path(out)
    part = out.with_suffix(f".{os.getpid()}.part")
    command = [compiler(), "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC", str(source), "-o",
               str(part), *(f"-isystem{f}" for f in include_folders()), "-ldl", "-lrt", "-pthread"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{ran.stderr}")
    os.replace(part, out)
    return out


def built(folder):
    """The plugin in `folder`, built unless it is there for this source."""
    name = f"libloopback_rma-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    out = pathlib.Path(folder) / name
    return out if out.exists() else build(out)


if __name__ == "__main__":
    sys.exit(why_not() or (build(sys.argv[1]) and 0))
