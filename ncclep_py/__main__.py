"""`python -m ncclep_py doctor`, `demo`, `bench`, `plan`, `compile` and `vocabulary`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {
    "doctor": "versions, paths, GPUs, and what is wrong with them",
    "demo": "dispatch and combine a few tokens, on GPUs or in the simulator",
    "bench": "time dispatch and combine beside other libraries; compare and draw records",
    "plan": "teams, peers, memory and predicted time of a group, for any number of ranks",
    "compile": "make the kernels of a group for another machine, where there may be no compiler",
    "explain": "pages: memory model, protocol, porting from other libraries, numba-cuda's successor",
    "vocabulary": "the operations kernels are written in, with both implementations",
}
"""Each is a module of this package with `add_arguments(parser)` and `main(options)`, imported only if asked for."""


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are JSON where JSON was asked for."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line; exit code 2."""
        if self.as_json:
            sys.stdout.write(json.dumps({"ok": False, "verified": False, "error": message}) + "\n")
            sys.exit(2)
        super().error(message)


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The command line's parser; only `command` gets its own options."""
    parser = Parser(prog="python -m ncclep_py", description="NCCL EP in Python")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text)
        if name == command:
            importlib.import_module(f"ncclep_py.{name}").add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in words if not word.startswith("-")), None)
    Parser.as_json = "--json" in words and command != "bench"   # which writes a file
    options = build_parser(command).parse_args(words)
    return importlib.import_module(f"ncclep_py.{options.command}").main(options) or 0


if __name__ == "__main__":
    sys.exit(main())
