"""`python -m ncclep_py vocabulary`: the page that lists what kernels are written in, made from ``kernels.ops`` and both implementations' sources."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path

from ncclep_py.kernels.ops import NET_OPS, OPS, PARAMETERS

__all__ = ["add_arguments", "cuda_source", "main", "page", "simulator_source"]

KERNELS = Path(__file__).parent / "kernels"
EVERY = OPS | NET_OPS

HEAD = """# Vocabulary of the kernels

Every operation takes and returns 64-bit integers. Scope `warp`: all 32 lanes of a warp call it with equal arguments; `block`: all warps of the block
do, and it contains the barrier it needs. Effects are its memory accesses, fences and barriers in program order, in PTX's words for strength
(`weak`, `relaxed`, `acquire`, `acq_rel`) and scope (`gpu`, `sys`), each followed by what it touches.
"""


def cuda_source(name: str) -> str:
    """File and text of an operation's device function; `KeyError` if no ``.cu`` file of the package has it."""
    for path in sorted(KERNELS.glob("*.cu")):
        text = path.read_text()
        begin = text.find(f"\nOP ep_{name}(") + 1
        if begin:
            depth, end = 0, text.index("{", begin)
            while True:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
                if not depth:
                    return f"// kernels/{path.name}\n{text[begin:end]}"
    raise KeyError(f"no .cu file defines ep_{name}")


def simulator_source(name: str) -> str:
    """File and text of an operation's Python twin; `KeyError` if the simulator does not have it."""
    from ncclep_py.simulator import ops

    function = next((getattr(m, name) for m in ops.MODULES if hasattr(m, name)), None) or getattr(ops, "_" + name, None)
    if function is None:
        raise KeyError(f"the simulator does not define {name}")
    return f"# simulator/{Path(inspect.getfile(function)).name}\n{inspect.getsource(function).rstrip()}"


def page(names: Iterable[str] | None = None, sources: bool = False) -> str:
    """Markdown about the operations named, all if None; `sources`: with both implementations."""
    parts = [HEAD]
    for op in (EVERY[name] for name in names or EVERY):
        fails = " Returns a code that is not 0 if it gives up." if op.may_fail else ""
        parts.append(f"## {op.name}({', '.join(op.parameters)})\n\n{op.doc}{fails}\n\n* scope: {op.scope}\n"
                     f"* effects: {'; '.join(f'`{effect}`' for effect in op.effects) or 'no memory'}\n"
                     + "".join(f"* {parameter}: {PARAMETERS[parameter]}\n" for parameter in op.parameters))
        if sources:
            parts.append(f"```cuda\n{cuda_source(op.name)}\n```\n\n```python\n{simulator_source(op.name)}\n```\n")
    return "\n".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="operations to show, with both implementations; default: all, without")
    parser.add_argument("--source", action="store_true", help="with both implementations, CUDA and simulator")


def main(options: argparse.Namespace) -> int:
    """Print the page; 2 if an operation is unknown."""
    unknown = [name for name in options.names if name not in EVERY]
    if unknown:
        print(f"no operation is called {', '.join(unknown)}; there are: {', '.join(EVERY)}", file=sys.stderr)  # noqa: T201
        return 2
    print(page(options.names or None, options.source or bool(options.names)))  # noqa: T201
    return 0
