"""`python -m ncclep_py explain PAGE`: pages about how it works. What they say is tested: their programs run, and the tests they name exist."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["PAGES", "add_arguments", "main", "text"]

FOLDER = Path(__file__).parent / "pages"
PAGES = {
    "memory-model": "strengths, scopes and chains the kernels rely on, and what the simulator makes of them",
    "protocol": "why no rank overwrites what another still reads, and what fails without each rule",
    "porting": "the same program for nccl.ep, DeepEP and ncclep_py",
    "mlir": "kernels compiled with numba-cuda's successor",
}
"""Pages by name."""


def text(page: str) -> str:
    """A page, in Markdown.

    Example:
        >>> from ncclep_py.explain import text
        >>> text("protocol").splitlines()[0].startswith("# ")
        True
    """
    if page not in PAGES:
        raise ValueError(f"page must be one of {', '.join(PAGES)}, got {page!r}")
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("page", nargs="?", help=f"one of {', '.join(PAGES)}; without it, the list")


def main(options: argparse.Namespace) -> int:
    """Print a page, or the list of pages; returns the exit code."""
    try:
        told = "\n".join(f"{name:<14} {what}" for name, what in PAGES.items()) if options.page is None else text(options.page)
    except ValueError as e:
        sys.stderr.write(f"explain: {e}\n")
        return 2
    sys.stdout.write(told.rstrip() + "\n")
    return 0
