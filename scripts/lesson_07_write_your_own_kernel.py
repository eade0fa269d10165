"""Lesson 7: write a kernel of your own, run it in the simulator, then on a GPU, change it, and run it again without a restart.

    python3 scripts/lesson_07_write_your_own_kernel.py [--backend sim|nccl]

A kernel is an ordinary Python function over the operations of `ncclep_py/kernels/ops.py`. You write a *factory*: it gets the sizes (constants
of the compiled kernel) and the vocabulary, and returns the kernel. The vocabulary is either the simulator's or CUDA's, so the same text
runs in both. To register it is one line:

    register_kernel("name", factory, names_of_its_parameters)

Under a new name it is a new kernel. In a group that runs, `group.use_kernel("ll_combine", factory)` puts it in the place of ours at once, and
`group.run_kernel(factory, ...)` runs it beside ours. It is compiled anew when the factory, its file or a global it uses has changed.

A kernel holds 64-bit integers, `if`, `while` and calls of operations; all 32 lanes of a warp go the same way. Operations of scope `block` must be
called by all warps of a block.

Here: a *barrier* between ranks, which is a HEAD word to everybody and a wait for theirs. Version 1 has a classic fault: only one warp waits, so
the others end the kernel before the ranks have met. On a GPU this would hang or pass, as luck has it; the simulator says what is wrong.

Look at: what is said about version 1, and that version 2 works after nothing but a new registration; the seconds from an edit to a result.

Try: in version 2 wait for `epoch + 1`. The simulator reports a deadlock and its first cause: all ranks wait for HEAD of epoch 2 of their own, which
they did not publish.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import in_environment  # noqa: F401

from ncclep_py import GroupConfig, LocalWorld, launch
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.own_kernels import register_kernel
from ncclep_py.simulator import SimulationError

RANKS, ROUNDS = 4, 3
PARAMETERS = ("window", "rank", "local", "record", "epoch", "timeout")


def make_wrong(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """Version 1: one warp does everything, it seems."""
    RANKS, HEADS, FAIL = shape.num_ranks, shape.window.heads, shape.local.fail
    warp_idx, publish_head, wait_heads = ops.warp_idx, ops.publish_head, ops.wait_heads

    def ranks_meet(window, rank, local, record, epoch, timeout):  # noqa: ANN001, ANN202
        if warp_idx() == 0:
            publish_head(window, HEADS, rank, RANKS, epoch, 0, 0)
            wait_heads(window, HEADS, rank, RANKS, epoch, 0, local + FAIL, record, timeout)    # scope block, called by one warp

    return ranks_meet


def make_right(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """Version 2: one warp tells, the whole block waits."""
    RANKS, HEADS, FAIL = shape.num_ranks, shape.window.heads, shape.local.fail
    warp_idx, publish_head, wait_heads = ops.warp_idx, ops.publish_head, ops.wait_heads

    def ranks_meet(window, rank, local, record, epoch, timeout):  # noqa: ANN001, ANN202
        if warp_idx() == 0:
            publish_head(window, HEADS, rank, RANKS, epoch, 0, 0)
        wait_heads(window, HEADS, rank, RANKS, epoch, 0, local + FAIL, record, timeout)

    return ranks_meet


def program(comm: Any) -> int:
    """Meet the other ranks three times in a window of our own; returns what went wrong, 0 for nothing."""
    config = GroupConfig(num_experts=RANKS, max_dispatch_tokens_per_rank=1, hidden=8, num_topk=1, max_num_sms=1, timeout_ns=10_000_000_000)
    shape = KernelShape.build(config, RANKS, 1, 8)                 # says where HEAD and FAIL are
    kernel = comm.kernel("ranks_meet", shape, launch.shared_bytes(shape, 1, 1), 1)   # compiled, or the simulator's
    window = comm.create_window(shape.window.total_bytes, shape.window.regions())
    local, record = comm.zeros(shape.local.total_bytes, shape.local.regions()), comm.host_words(8)
    comm.barrier()
    for epoch in range(1, ROUNDS + 1):
        comm.submit(kernel, (window.handle, comm.rank, local.data_ptr(), record.data_ptr(), epoch, config.wait_ns), 1, "ranks_meet", ())
    comm.synchronize()
    comm.barrier()
    code = int(record[0])                                          # kernels write here what failed
    window.close()
    return code


def edit_and_run(factory: Callable[..., Callable[..., None]], backend: str) -> list[int]:
    """What you do in a notebook: register the new version, run it, look."""
    started = time.perf_counter()
    register_kernel("ranks_meet", factory, PARAMETERS)
    with LocalWorld(RANKS, backend, blocks=1) as world:
        codes = world.run(program)
    print(f"   {factory.__name__} on {world.backend}: codes of the ranks {codes}, {time.perf_counter() - started:.2f} s from edit to result")
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    backend = parser.parse_args().backend
    print("version 1, in the simulator first:")
    found = None
    try:
        edit_and_run(make_wrong, "sim")
    except SimulationError as error:
        found = error
    print(f"   {type(found).__name__}: {found}")
    assert found is not None
    print("version 2:")
    assert edit_and_run(make_right, "sim") == [0] * RANKS
    if backend == "nccl":
        assert edit_and_run(make_right, "nccl") == [0] * RANKS


if __name__ == "__main__":
    main()
