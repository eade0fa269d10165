"""Which NCCL will do: versions as people write them, and the two rules that the compiler's side and `doctor` both ask for."""

from __future__ import annotations

__all__ = ["OLDEST_NCCL", "age_problem", "header_problem", "version_text"]

OLDEST_NCCL = 23000
"""2.30 is the first with several ranks on one GPU and with the Device API that the kernels are written to."""


def version_text(code: int) -> str:
    """NCCL's version code as text: 23203 is 2.32.3, and before 2.9 2708 is 2.7.8."""
    base = 10000 if code >= 10000 else 1000
    return f"{code // base}.{code % base // 100}.{code % 100}"


def age_problem(loaded: int, path: str = "") -> str | None:
    """Why the loaded library is too old, or None."""
    if loaded >= OLDEST_NCCL:
        return None
    return f"NCCL {version_text(loaded)} is loaded{_from(path)}; ncclep_py needs {version_text(OLDEST_NCCL)} or newer"


def header_problem(loaded: int, headers: int, path: str = "", headers_path: str = "") -> str | None:
    """Why headers and loaded library do not go together, or None."""
    if loaded == headers:
        return None
    return (f"NCCL {version_text(loaded)} is loaded{_from(path)}, but the headers{_from(headers_path)} are those of NCCL {version_text(headers)}; "
            "structures differ between releases, so both must be the same")


def _from(path: str) -> str:
    return f" from {path}" if path else ""
