"""Lesson 1: how one GPU gives data to another without any call on the receiver's side. Store first, then signal.

    python3 scripts/lesson_01_peer_store_and_signal.py [--backend sim|nccl]

Two ranks share a *symmetric window*: memory of the same size on each of them that both can address. Each rank

1. stores a row of 8 numbers straight into the other rank's window (a *peer store*: nobody has to receive it), then
2. stores one word, the *signal*, into the other rank's window: "what I wrote before is there". It also waits for the signal
   that the other rank sends, and
3. reads the row that it finds in its own window.

The three steps are the three parts of the kernel below. Look at: each rank ends up with the numbers of the other; the signal is an
ordinary number, 1, because this is the first message.

Try: delete the line of `wait_arrived`. The simulator reports a race of `gather_row` with the other rank's `scatter_row`, and that nothing which
that rank ever did is ordered before the read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Group, GroupConfig, LocalWorld, launch
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.own_kernels import register_kernel

PARAMETERS = ("window", "rank", "local", "record", "mine", "to_expert", "table", "from_row", "one", "out", "timeout")


def make_message(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """A factory: sizes are constants of the kernel, operations come from the vocabulary (CUDA or simulator)."""
    EXPERTS, RANKS, ROW_BYTES, PLANE_ROWS = shape.num_experts, shape.num_ranks, shape.row_bytes, shape.window.plane_rows
    SLOT, SIGNALS = shape.window.slots, shape.window.arrived     # where rows and signals live in the window
    BLOCKS_DONE, FAIL = shape.local.blocks_done, shape.local.fail
    warp_idx, last_block, begin_vector, end_vector = ops.warp_idx, ops.last_block, ops.begin_vector, ops.end_vector
    count_experts, assign_rows, scatter_row, gather_row = ops.count_experts, ops.assign_rows, ops.scatter_row, ops.gather_row
    publish_arrived, wait_arrived = ops.publish_arrived, ops.wait_arrived

    def message(window, rank, local, record, mine, to_expert, table, from_row, one, out, timeout):  # noqa: ANN001, ANN202
        # where does my row go? Each rank hosts one "expert": to_expert names the other rank's. Row 0 of it is the place.
        count_experts(to_expert, 8, 1, 1, EXPERTS, 0, 1)
        assign_rows(to_expert, 8, 1, EXPERTS, RANKS, PLANE_ROWS, 0, 1, 0, table, rank, 1, local + FAIL, record)
        begin, end = begin_vector(1, ROW_BYTES), end_vector(1, ROW_BYTES)      # this warp's share of the row
        # ---- 1 store into the peer's window
        scatter_row(window, SLOT, mine, 0, -1, 0, 0, 1, EXPERTS, RANKS, PLANE_ROWS, ROW_BYTES, begin, end)
        # ---- 2 signal, once all warps have stored; wait for the other's
        if last_block(local + BLOCKS_DONE) == 1:
            if warp_idx() == 0:
                publish_arrived(window, SIGNALS, rank, RANKS, 1)
        wait_arrived(window, SIGNALS, rank, RANKS, 1, local + FAIL, record, timeout)
        # ---- 3 read what came into my own window
        gather_row(window, SLOT, from_row, one, out, 0, -1, 1, EXPERTS, RANKS, PLANE_ROWS, ROW_BYTES, 2, begin, end)

    return message


def program(comm: Any) -> tuple[torch.Tensor, list[int]]:
    """One rank. The host only launches; the ranks meet inside of the kernel."""
    config = GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=1, hidden=8, num_topk=1, dtype=torch.float32, max_num_sms=1,
                         timeout_ns=10_000_000_000)
    shape = KernelShape.build(config, 2, 1, 8)
    device, other = comm.device, 1 - comm.rank
    with Group.create(comm, config) as group:      # makes the window, zeroed, on all ranks
        kernel = comm.kernel("message", shape, launch.shared_bytes(shape, 1, 1), 1)
        mine = torch.arange(8.0, device=device)[None] + 100 * (comm.rank + 1)
        out, one = torch.zeros(1, 8, device=device), torch.ones(1, 1, device=device)
        to_expert = torch.tensor([[other]], device=device)
        table = torch.zeros(1, dtype=torch.int32, device=device)
        from_row = torch.tensor([comm.rank * group.map.plane_rows], dtype=torch.int32, device=device)   # the first row of my own expert
        local, record = group.addresses()
        tensors = (mine, to_expert, table, from_row, one, out)
        values = (group.window.handle, comm.rank, local, record, *(t.data_ptr() for t in tensors), config.wait_ns)
        comm.submit(kernel, values, 1, "message", tensors)
        comm.synchronize()
        group.check()                              # raises if a wait ended without its signal
        words = group.window.memory[group.map.arrived:][:16].view(torch.int64).cpu()
        return out[0].cpu(), [int(w) >> 32 for w in words]     # a signal's number is the upper half of its word


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    backend = parser.parse_args().backend
    register_kernel("message", make_message, PARAMETERS)
    with LocalWorld(2, backend, blocks=1) as world:
        results = world.run(program)
    for rank, (row, signals) in enumerate(results):
        print(f"rank {rank} sent     {[100 * (rank + 1) + i for i in range(8)]}")
        print(f"rank {rank} received {row.int().tolist()}, and the signal of rank {1 - rank} in its window is {signals[1 - rank]}")
    for rank, (row, signals) in enumerate(results):
        assert row.tolist() == [100.0 * (2 - rank) + i for i in range(8)] and signals[1 - rank] == 1
    print("Each row came over by plain stores; the signal, stored after it, is how the reader knew.")


if __name__ == "__main__":
    main()
