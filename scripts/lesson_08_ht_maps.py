"""Lesson 8: high throughput (HT): find out once where all rows go, keep it as a *map*, use it for many operations.

    python3 scripts/lesson_08_ht_maps.py [--backend sim|nccl]

A low-latency dispatch (lesson 4) counts anew each time and sends K rows per token. With thousands of tokens two things are better:

1. Send a token *once* to each rank that hosts any of its experts, with the ids and weights of these experts beside it. Rows stand
   in the order (source rank, token). This layout is called FLAT; a rank's experts pick their rows by id.
2. Make the routing a step of its own, `handle.update(ids)`. It leaves a map: for each token and rank, the row it goes to there. The
   dispatch, the combine, and both of their backward passes follow the same map, in any number, without counting again.

Look at: the rows a token needs in both ways; the map worked out by hand next to what a dispatch delivered; a second dispatch of other
numbers that went the same ways.

Try: `max_recv_tokens_per_rank=3`. Rank 0 would receive 4 rows, so `EpOverflowError` is raised, on every rank.
"""

from __future__ import annotations

import argparse
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld

RANKS, EXPERTS, TOPK, TOKENS, HIDDEN = 2, 4, 2, 3, 8           # experts 0, 1 live on rank 0, experts 2, 3 on rank 1
LOCAL = EXPERTS // RANKS
TOPK_IDX = [[[0, 1], [1, 2], [3, 2]],                          # per rank, per token: its experts
            [[2, 3], [0, 1], [0, 3]]]


def map_by_hand() -> list[list[tuple[int, int]]]:
    """Per receiver, the (source rank, token) of its rows in order."""
    return [[(source, token) for source in range(RANKS) for token, ids in enumerate(TOPK_IDX[source])
             if any(expert // LOCAL == receiver for expert in ids)] for receiver in range(RANKS)]


def program(comm: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """One map, two dispatches and combines; each time the rows, ids and weights received, and what combine returned."""
    config = GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, dtype=torch.float32, num_topk=TOPK,
                         algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=RANKS * TOKENS, timeout_ns=10_000_000_000)
    ids = torch.tensor(TOPK_IDX[comm.rank], device=comm.device)
    results = []
    with Group.create(comm, config) as group, group.create_handle(Layout.FLAT, ids) as handle:      # the map is made here
        for factor in (1, 1000):
            tokens = torch.tensor([[10.0 * comm.rank + t + 1] * HIDDEN for t in range(TOKENS)], device=comm.device) * factor
            weights = torch.tensor([[0.25, 0.75]] * TOKENS, device=comm.device)
            received = handle.dispatch(tokens, topk_weights=weights)
            kept = [t.cpu().clone() for t in (received.tokens, received.topk_idx, received.topk_weights)]
            combined = handle.combine(received.tokens)             # adds a token's rows, one from each rank it went to
            results.append((*kept, combined.cpu()))
        comm.synchronize()
        group.check()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    with LocalWorld(RANKS, parser.parse_args().backend) as world:
        results = world.run(program)
    maps = map_by_hand()
    once, each = sum(map(len, maps)), RANKS * TOKENS * TOPK
    print(f"rows on the way: {each} with a row per (token, expert), {once} with a row per (token, rank)")
    assert once < each
    for rank, rows in enumerate(maps):
        (tokens, ids, weights, _), (again, *_) = results[rank]
        print(f"rank {rank}, row: from (rank, token), first number, local experts and weights; second dispatch")
        for row, (source, token) in enumerate(rows):
            mine = [(e % LOCAL, w) for e, w in zip(TOPK_IDX[source][token], (0.25, 0.75), strict=True) if e // LOCAL == rank]
            came = [(int(e), float(w)) for e, w in zip(ids[row], weights[row], strict=True) if e >= 0]
            print(f"   {row}: from ({source}, {token}), {tokens[row, 0]:g}, {came}; {again[row, 0]:g}")
            assert tokens[row, 0] == 10 * source + token + 1 and again[row, 0] == 1000 * tokens[row, 0]
            assert came == sorted(mine)
        assert all((ids[row] == -1).all() for row in range(len(rows), len(ids)))     # rows after these hold nothing
    for rank in range(RANKS):
        for token, ids in enumerate(TOPK_IDX[rank]):
            copies = len({e // LOCAL for e in ids})
            assert results[rank][0][3][token, 0] == copies * (10 * rank + token + 1)
    print("combine followed the map back: each token is the sum of its copies, one per rank it went to")


if __name__ == "__main__":
    main()
