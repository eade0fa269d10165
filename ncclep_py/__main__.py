"""`python -m ncclep_py doctor`, `demo`, `bench`, `plan`, `compile` and `vocabulary`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
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

READER_GONE = 141
"""As a shell counts the end by SIGPIPE."""


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
    """Run one command; returns the exit code, `READER_GONE` if nobody reads on (``| head -1``)."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_gone():   # another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())   # for what the interpreter writes at its end
        return READER_GONE


def _reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):   # no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in words if not word.startswith("-")), None)
    Parser.as_json = "--json" in words and command != "bench"   # which writes a file
    options = build_parser(command).parse_args(words)
    return importlib.import_module(f"ncclep_py.{options.command}").main(options) or 0


if __name__ == "__main__":
    sys.exit(main())
