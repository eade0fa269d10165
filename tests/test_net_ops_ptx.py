"""Operations for kernels of one's own over several teams, as compiled: their declared effects, and mutants of the source that must not pass."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")

import test_ptx
from test_ptx import mutated

from ncclep_py import toolchain
from ncclep_py.kernels.net_vocabulary import NET_OPERATIONS
from ncclep_py.kernels.ops import NET_OPS

OPERATIONS = {op[0]: NET_OPS[op[0]] for op in NET_OPERATIONS}
SOURCE = "".join((toolchain.KERNEL_FOLDER / name).read_text() for name in ("lane_ops.cu", "fabric_ops.cu", "net_calls.cu", "net_ops.cu"))


def compiled(source: str) -> dict:
    return test_ptx.functions(toolchain.compile_device("sm_90", "ptx", source=source, teams=True).decode().rstrip("\0"))


def check(source: str) -> dict[str, list[str]]:
    """Complaints by operation."""
    code = compiled(source)
    found = {name: test_ptx.complaints(op, *code[name]) if name in code else ["missing"] for name, op in OPERATIONS.items()}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_compiled_effects_are_the_declared_ones() -> None:
    assert check(SOURCE) == {}


RELEASE, BLOCK = "  net_release();\n", ("return tell_block(code)", "return code")
MUTANTS: dict[str, tuple[str, str, str]] = {
    # what is wrong: (operation to change, old text, new text)
    "a put with a signal, not released": ("net_put_signal", RELEASE, ""),
    "a counted put, not released": ("net_put_counted", RELEASE, ""),
    "released by some": ("net_put_signal", RELEASE, "  if (num_bytes > 0) net_release();\n"),
    "a counted put of one lane's": ("net_put_counted", RELEASE, "  if (lane() == 0) net_release();\n"),
    "a signal that is not read": ("net_read_signal", "gin_signal_value(comm, context, signal)", "signal"),
    "a counter that is not read": ("net_read_counter", "i64(counter_value(comm, context, which))", "which"),
    "a signal waited for by one warp": ("net_wait_signal", *BLOCK),
    "a counter waited for by one warp": ("net_wait_counter", *BLOCK),
    "a flush waited for by one warp": ("net_wait_flushed", *BLOCK),
    "a flush of nobody": ("net_wait_flushed", "wait_flushed(comm, context, u64(timeout))", "timeout > 0"),
    "a barrier left by one warp": ("net_barrier", *BLOCK),
    "a barrier entered by one warp": ("net_barrier", "  __syncthreads();\n", ""),
    "a barrier that releases nothing": ("net_barrier", "    net_release();\n", ""),
    "a barrier that releases if all is well": ("net_barrier", "    net_release();\n", "    if (n > 3) net_release();\n"),
    "a barrier that nobody waits in": ("net_barrier", "wait_signals(comm, n,", "Missing{-1, 0}; (comm, n,"),
}


def rounds() -> list[list[str]]:
    """Mutants that change different operations are compiled together."""
    made: list[list[str]] = []
    for what, (name, *_) in MUTANTS.items():
        free = next((r for r in made if name not in {MUTANTS[w][0] for w in r}), None)
        if free is None:
            made.append([what])
        else:
            free.append(what)
    return made


@pytest.mark.parametrize("whats", rounds(), ids=lambda whats: f"{len(whats)} mutants")
def test_mutants_are_found(whats: list[str]) -> None:
    source = SOURCE
    for what in whats:
        name, old, new = MUTANTS[what]
        source = mutated(source, name, old, new)
    found = check(source).keys()
    assert {what for what in whats if MUTANTS[what][0] not in found} == set()
    assert found == {MUTANTS[what][0] for what in whats}


def test_each_operation_has_a_mutant() -> None:
    assert OPERATIONS.keys() == {name for name, *_ in MUTANTS.values()}


@pytest.mark.parametrize("name", ["net_wait_counter", "net_wait_flushed"])
def test_every_wait_reads_the_clock(name: str) -> None:
    """An ask that comes again comes by a comparison with the deadline."""
    code, follow = compiled(SOURCE)[name]
    clocks = {i for i, c in enumerate(code) if "%globaltimer" in c.operands}
    asks = {i for i, c in enumerate(code) if c.effect == "ld.acquire.sys net"}
    assert clocks and asks
    for i in asks:
        assert i not in test_ptx.reach(set(follow[i]), follow, clocks)
