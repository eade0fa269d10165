"""Examples in docstrings are true: each runs by itself, as if typed at a prompt, in the simulator; and what people call first has one."""

from __future__ import annotations

import ast
import doctest
import pathlib
import subprocess
import sys

import pytest

import ncclep_py
from ncclep_py.compiled import KERNELS

PACKAGE = pathlib.Path(ncclep_py.__file__).parent
Documented = ast.Module | ast.ClassDef | ast.FunctionDef

NEEDED = (
    "autograd.ep_combine", "autograd.ep_dispatch", "config.CombineConfig", "config.DispatchConfig", "config.GroupConfig", "config.HandleConfig",
    "explain.text", "group.Group", "group.Group.create_handle", "group.Group.create_window", "group.Group.timeline", "group.bytes_per_rank",
    "handle.Handle.combine", "handle.Handle.complete", "handle.Handle.dispatch", "handle.Handle.update", "ht_handle.HTHandle",
    "local_world.LocalWorld", "masking.Masking", "own_kernels.OwnKernels.run_kernel", "own_kernels.OwnKernels.use_kernel",
    "own_kernels.register_kernel", "plan.make_plan", "testing.bits_equal", "testing.first_difference", "testing.random_routing",
    "testing.stamped_tokens", "testing.weights_like", "timeline.Event", "timeline.write_chrome_trace", "topology.Topology", "waited.Waited.waited_ns")
"""Who must have an example. (Not `ElasticBuffer`, which needs a GPU, nor `Communicator`, which `LocalWorld` makes here.)"""


def documented(node: Documented, name: str) -> list[tuple[str, str, int]]:
    """(name, docstring, line) of everything documented in a module, a class or a function."""
    text = ast.get_docstring(node, clean=True)
    found = [(name, text, getattr(node, "lineno", 1))] if text else []
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef):
            found += documented(inner, f"{name}.{inner.name}".lstrip("."))
    return found


def examples_in(folder: pathlib.Path) -> dict[str, doctest.DocTest]:
    """Every docstring with an example, by dotted name without the package's; found in the text, so that nothing is imported for it."""
    found, parser = {}, doctest.DocTestParser()
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        for name, text, line in documented(ast.parse(path.read_text(encoding="utf-8")), module):
            if ">>>" in text:
                found[name] = parser.get_doctest(text, {"__name__": "__main__"}, name, str(path), line)
    return found


EXAMPLES = examples_in(PACKAGE)


def told(example: doctest.DocTest) -> str:
    """What is not as the docstring says; nothing if all is."""
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append, clear_globs=False)
    return "".join(said)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    assert EXAMPLES[name].examples
    known = dict(KERNELS)
    try:
        problem = told(EXAMPLES[name])
    finally:
        KERNELS.clear()
        KERNELS.update(known)
    assert not problem, problem


def test_what_people_call_first_has_one() -> None:
    assert not sorted(set(NEEDED) - set(EXAMPLES))


@pytest.mark.parametrize("code, says", [(">>> 1 + 1\n3", "Expected:\n    3\nGot:\n    2"), (">>> torch.zeros(1)\n", "name 'torch' is not defined"),
                                        (">>> import ncclep_py as ep\n>>> ep.GroupConfig(8, 4, 7)\n", "hidden must make rows")])
def test_an_example_that_is_not_true_is_seen(code: str, says: str, tmp_path: pathlib.Path) -> None:
    """Wrong output, an import it lacks, an error it does not show."""
    indented = code.replace("\n", "\n        ")
    (tmp_path / "some.py").write_text(f'class A:\n    def f(self):\n        """F.\n\n        {indented}\n        """\n')
    (only,) = examples_in(tmp_path).items()
    assert only[0] == "some.A.f" and says in told(only[1])


def test_the_package_is_imported_without_what_examples_use() -> None:
    code = ("import sys, ncclep_py, ncclep_py.config, ncclep_py.topology; "
            "print(sorted({'torch', 'numba', 'numpy', 'cuda.bindings', 'doctest', 'greenlet'} & sys.modules.keys()))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "[]"
