"""Imported by scripts before what they need: where that is missing, a sentence says which python has it."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NEEDED = ("torch", "ncclep_py")


def hint(missing: list[str]) -> str:
    """How to start this script with what is missing."""
    python = pathlib.Path(os.environ.get("NCCLEP_VENV", ROOT / ".venv")) / "bin" / "python"
    line = shlex.join([os.path.relpath(python), *sys.argv])
    made = "" if python.exists() else f" after `python3 {os.path.relpath(ROOT / 'scripts' / 'setup.py')} demo`, which makes that environment"
    return f"{sys.executable} has no {' and no '.join(missing)}: use `{line}`{made}"


_missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if _missing:
    sys.exit(hint(_missing))
