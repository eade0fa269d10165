"""Lesson 4: a low-latency (LL) dispatch, step by step, as each rank and warp goes through it.

    python3 scripts/lesson_04_ll_dispatch.py [--backend sim|nccl]

Dispatch brings every token's row to the experts the router chose for it, wherever they live. One kernel per rank does it all:

    1 head     tell every rank "I am in operation n"                       publish_head
    2 count    count my rows per expert, tell everybody                    count_experts, publish_counts
    3 wait     until all ranks are in operation n, and for counts          wait_heads, wait_counts
    4 rows     read each token once, store it to its K final places        assign_rows, scatter_row
    5 arrived  tell every rank "my rows are written", wait for theirs      publish_arrived, wait_arrived

Nobody touches a peer's memory before step 3: the peer's experts may still be reading what the last operation brought. Nobody reads
rows before step 5. Two waits per dispatch, and each row crosses the link once, straight to where the expert reads it.
The kernel is `ncclep_py/kernels/ll_dispatch.py`, 50 lines that name these operations.

Look at: the timeline of one run (in the simulator: which step each rank is in as time goes on): no `scatter_row` of anybody begins before
the last rank's `publish_head`. And the rows: each carries the rank and token it came from, in the order (rank, token).

Try: let rank 2 leave before its dispatch (`if comm.rank == 2: return []`). It closes the group where the others dispatch, and `EpMismatchError`
says so.
"""

from __future__ import annotations

import argparse
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Group, GroupConfig, Layout, LocalWorld

RANKS, EXPERTS, TOPK, TOKENS, HIDDEN = 3, 6, 2, 4, 16
STEPS = ("publish_head", "publish_counts", "wait_heads", "wait_counts", "assign_rows", "scatter_row", "publish_arrived", "wait_arrived")


def routing(rank: int) -> torch.Tensor:
    """Token t of rank r goes to experts r + t and r + 2t + 3, modulo 6 (made different where they are equal)."""
    t = torch.arange(TOKENS)
    first, second = (rank + t) % EXPERTS, (rank + 2 * t + 3) % EXPERTS
    return torch.stack([first, torch.where(first == second, (second + 1) % EXPERTS, second)], 1)


def program(comm: Any) -> list[list[tuple[int, int]]]:
    """Dispatch; per local expert, the (rank, token) of its rows as they stand."""
    config = GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, timeout_ns=10_000_000_000)
    with Group.create(comm, config) as group:                   # memory that all ranks can address, once for many dispatches
        tokens = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=comm.device)
        tokens[:, 0], tokens[:, 1] = comm.rank, torch.arange(TOKENS)
        with group.create_handle(Layout.EXPERT_MAJOR, routing(comm.rank).to(comm.device)) as handle:      # one layer's routing
            received = handle.dispatch(tokens)                  # [local experts, ranks * TOKENS, HIDDEN], in the window itself
            counts = received.layout_info.expert_counters       # [local experts]: how many rows of each plane are filled
            comm.synchronize()
            group.check()
            assert received.tokens.shape == (EXPERTS // RANKS, RANKS * TOKENS, HIDDEN)
            return [[(int(row[0]), int(row[1])) for row in plane[:count]]
                    for plane, count in zip(received.tokens.cpu().float(), counts.tolist(), strict=True)]


def timeline(events: list[tuple]) -> None:
    """Print when each rank was in which step; assert the rule of step 3."""
    span = {}
    for rank, _, _, step, _, begin, end in events:      # (rank, block, warp, operation, kernel, first step, last step)
        first, last = span.get((rank, step), (begin, end))
        span[rank, step] = (min(first, begin), max(last, end))
    last = max(end for _, end in span.values())
    print(f"time in the simulator, 0 to {last} steps of warps, one line per rank and step:")
    for step in STEPS:
        for rank in range(RANKS):
            begin, end = (time * 60 // last for time in span[rank, step])
            print(f"   {step:16s} rank {rank}  {'.' * begin}{'#' * max(1, end - begin)}")
    last_head = max(span[rank, "publish_head"][1] for rank in range(RANKS))
    first_row = min(span[rank, "scatter_row"][0] for rank in range(RANKS))
    print(f"the last head was told by step {last_head}, the first row was sent after step {first_row}")
    assert last_head <= first_row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    with LocalWorld(RANKS, parser.parse_args().backend, seed=3, mode="adversarial") as world:
        if world.backend == "sim":
            world.simulator.events = []                         # collect what every warp does when
        results = world.run(program)
        if world.backend == "sim":
            timeline([event for event in world.simulator.events if event[4] == "ll_dispatch" and event[3] in STEPS])
    for rank, planes in enumerate(results):
        for local, rows in enumerate(planes):
            expert = rank * (EXPERTS // RANKS) + local
            print(f"expert {expert} on rank {rank} received (rank, token): {rows}")
            wanted = [(source, token) for source in range(RANKS) for token in range(TOKENS) if expert in routing(source)[token].tolist()]
            assert rows == wanted


if __name__ == "__main__":
    main()
