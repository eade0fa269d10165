"""`python -m ncclep_py bench`: dispatch and combine timed after they were checked, beside other libraries, in one record that can be compared."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    from ncclep_py.bench.command import add_arguments as add

    add(parser)


def main(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    from ncclep_py.bench.command import main as run

    return run(options)
