"""NCCL EP in Python: dispatch and combine of Mixture-of-Experts expert parallelism. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "config": ("AUTO", "Algorithm", "CombineConfig", "CombineQuant", "DispatchConfig", "DispatchQuant", "ExpertIdKind", "GroupConfig",
               "HandleConfig", "Layout", "OverflowPolicy", "PassDir", "ZeroCopyMode"),
    "communicator": ("Communicator",),
    "local_world": ("LocalWorld",),
    "group": ("Group",),
    "handle": ("CombineInputs", "CombineOutputs", "DispatchInputs", "DispatchOutputs", "Handle", "LayoutInfo"),
    "errors": ("EpClosedError", "EpError", "EpMaskedError", "EpMismatchError", "EpOverflowError", "EpPeerError", "EpRefusedError", "EpStaleError",
               "EpTimeoutError"),
    "doctor": ("show_versions",),
    "autograd": ("Received", "ep_combine", "ep_dispatch"),
    "elastic": ("ElasticBuffer",),
    "own_kernels": ("register_kernel",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'ncclep_py' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ncclep_py.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
