"""How long the kernels of a case take to compile into an empty cache, and to be found again."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["compile_seconds", "noted"]


def noted(comm: Any, into: list[tuple[str, Any]]) -> Callable[[], None]:
    """Let a communicator note the (name, shape) of every kernel it is asked for; returns what ends this."""
    asked, own = comm.kernel, "kernel" in vars(comm)

    def kernel(name: str, shape: Any, *rest: Any) -> Any:
        if (name, shape) not in into:
            into.append((name, shape))
        return asked(name, shape, *rest)

    comm.kernel = kernel

    def end() -> None:
        if own:
            comm.kernel = asked
        else:
            del comm.kernel

    return end


def compile_seconds(kernels: Sequence[tuple[str, Any]], arch: str) -> dict[str, float] | None:
    """``{"cold", "warm"}`` seconds for all of them one after the other; None where no compiler is installed.

    Cold includes the device functions all kernels share, warm reads files.
    """
    try:
        from ncclep_py.compiled import KernelSpec, compile_kernel
    except ImportError:
        return None
    before, told = os.environ.get("NCCLEP_CACHE_DIR"), {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NCCLEP_CACHE_DIR"] = folder
        try:
            for name in ("cold", "warm"):
                started = time.perf_counter()
                for kernel, shape in kernels:
                    compile_kernel(KernelSpec(kernel, shape), arch)
                told[name] = round(time.perf_counter() - started, 3)
        except ImportError:
            return None
        finally:
            if before is None:
                del os.environ["NCCLEP_CACHE_DIR"]
            else:
                os.environ["NCCLEP_CACHE_DIR"] = before
    return told
