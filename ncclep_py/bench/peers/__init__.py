"""Other implementations of the same exchange, checked and timed by the same code where they are installed."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case

__all__ = ["PEERS", "present", "subject_of", "why_not"]

PEERS = {"nccl.ep": ("nccl_ep", "NcclEpSubject"), "all_to_all_single": ("all_to_all", "AllToAllSubject"), "deep_ep": ("deep_ep", "DeepEpSubject")}
"""Module of this package and class, by name of the implementation."""


def present(name: str) -> bool:
    """Whether a peer is installed."""
    if name == "all_to_all_single":
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def subject_of(name: str) -> Any:
    """The class that shows a peer to the benchmark."""
    module, kind = PEERS[name]
    return getattr(importlib.import_module(f"ncclep_py.bench.peers.{module}"), kind)


def why_not(name: str, case: Case) -> str:
    """Why a peer cannot play a case; empty if it can."""
    if not present(name):
        return f"{name} is not installed"
    if case.mode == "local":
        return f"{name} needs one process per rank"
    return subject_of(name).why_not(case)
