"""Lesson 3: who writes where? Ranks only tell each other *how many* rows they send; the place of every row follows.

    python3 scripts/lesson_03_counting_and_slots.py [--backend sim|nccl]

In a mixture of experts every token goes to K experts, which live on different ranks (GPUs). Many ranks write rows for the same expert at the same
time. To keep them apart one could let them draw numbers from a shared counter, but then the order of rows would be another one every
time, and each row would cost a trip over the network and back. Instead:

1. each rank counts its rows for every expert, and stores these counts into the window of every other rank;
2. an expert's rows stand in the order (rank, token, k). So the first row of rank r is the sum of the counts of ranks 0 to r - 1, and the
   others follow one by one. This is an exclusive prefix sum, and every rank can do it alone.

The memory for all rows of a dispatch, ``[local experts, ranks * most tokens of a rank]`` rows, is called a *payload slot*: it has room
for the worst case, in which all tokens go to one expert, so nobody ever has to ask whether there is room.

Look at: the places we compute by hand with nothing but counts, and that the rows really came to these places in a real dispatch.

Try: let all tokens of rank 1 choose `[0, 0]`. Expert 0 is to get 10 rows and has room for 8: rank 1 raises `EpOverflowError`, which names row 8.
"""

from __future__ import annotations

import argparse
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Group, GroupConfig, Layout, LocalWorld

RANKS, EXPERTS, TOPK, MOST = 2, 4, 2, 4            # experts 0, 1 live on rank 0, experts 2, 3 on rank 1
TOPK_IDX = [                                       # per rank, per token: the experts it goes to
    [[0, 2], [2, 3], [0, 1]],                      # rank 0 has 3 tokens
    [[2, 0], [3, 0], [2, 1], [0, 3]],              # rank 1 has 4
]


def counts_of(rank: int) -> list[int]:
    """Step 1: rows that a rank sends to each expert."""
    return [sum(ids.count(expert) for ids in TOPK_IDX[rank]) for expert in range(EXPERTS)]


def places_of(rank: int, counts: list[list[int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Step 2: (token, k) -> (expert, row), from the counts of lower ranks."""
    next_row = [sum(counts[lower][expert] for lower in range(rank)) for expert in range(EXPERTS)]
    places = {}
    for token, ids in enumerate(TOPK_IDX[rank]):
        for k, expert in enumerate(ids):
            places[token, k] = (expert, next_row[expert])
            next_row[expert] += 1
    return places


def program(comm: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A real dispatch of rows filled with 10 * rank + token; what came, how many rows, and the counts in my window."""
    config = GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=MOST, hidden=8, num_topk=TOPK, timeout_ns=10_000_000_000)
    with Group.create(comm, config) as group:
        ids = torch.tensor(TOPK_IDX[comm.rank], device=comm.device)
        tokens = torch.tensor([[10 * comm.rank + t] * 8 for t in range(len(ids))], dtype=torch.bfloat16, device=comm.device)
        with group.create_handle(Layout.EXPERT_MAJOR, ids) as handle:
            received = handle.dispatch(tokens)
            comm.synchronize()
            group.check()
            words = group.window.memory[group.map.counts:][:8 * RANKS * EXPERTS].view(torch.int64).cpu()
            counts = (words & 0xFFFFFFFF).view(RANKS, EXPERTS)   # the upper half of a word is the number of the operation
            return received.tokens[:, :, 0].cpu().float(), received.layout_info.expert_counters.cpu(), counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    with LocalWorld(RANKS, parser.parse_args().backend) as world:
        results = world.run(program)
    counts = [counts_of(rank) for rank in range(RANKS)]
    print("rows for experts 0..3 from rank 0:", counts[0], " from rank 1:", counts[1])
    print("a rank that has told its counts knows all of its places:")
    for rank in range(RANKS):
        for (token, k), (expert, row) in places_of(rank, counts).items():
            home, local = divmod(expert, EXPERTS // RANKS)
            value = results[home][0][local, row].item()
            print(f"   rank {rank} token {token} k {k} -> expert {expert} row {row}; a row of {value:g}s is there")
            assert value == 10 * rank + token
    for rank, (planes, received, told) in enumerate(results):
        assert told.tolist() == counts, "every rank's window holds the counts of all ranks"
        total = torch.tensor(counts).sum(0)[rank * 2:rank * 2 + 2]
        assert torch.equal(received, total.to(received.dtype))
        print(f"rank {rank}: its experts got {received.tolist()} rows; there is room for {planes.shape[1]} each")
    print("No row asked for its place, and the order is the same in every run.")


if __name__ == "__main__":
    main()
