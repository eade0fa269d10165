"""Lesson 5: combine *pulls*: each rank fetches its tokens' rows from the experts' ranks and adds them up itself.

    python3 scripts/lesson_05_pull_combine.py [--backend sim|nccl]

After a dispatch and the experts, each token wants  out = sum over k of weight[k] * (row of its k-th expert).  The experts could push
their rows back, but then somebody must hold memory for K rows per token, and wait for all of them. In one NVLink domain a rank can as well *load*
from a peer's memory. It still knows where it put each row (dispatch kept a table (token, k) -> row), so combine is

    1 head   tell every rank "my experts' rows are written"        2 wait   for all ranks' heads
    3 rows   for each token: load its K rows from their ranks, multiply, add, store once

One wait, no memory besides the slot the experts wrote into. And because *one* warp adds the K rows, always in the order k = 0, 1, ...,
the bits are the same in every run. Sums of rows that come in whatever order they arrive are not: floating point addition is not associative.

Look at: the same bits under ten different schedules (simulator) or ten runs (GPU), equal to the formula by hand; and that adding up in the
opposite order gives other bits.

Try: in `inputs` round the rows (`.round()`) and make all weights 0.25. Nothing is rounded in the sums then, so the opposite order gives the same
bits, and the assert of `other > 0` fails.
"""

from __future__ import annotations

import argparse
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Group, GroupConfig, Layout, LocalWorld
from ncclep_py.reference import fma32

RANKS, EXPERTS, TOPK, TOKENS, HIDDEN, RUNS = 2, 4, 3, 4, 32, 10


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows ``[T, H]``, expert ids ``[T, K]``, weights ``[T, K]`` of a rank."""
    g = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOPK] for _ in range(TOKENS)])
    return torch.randn(TOKENS, HIDDEN, generator=g), ids, torch.softmax(torch.randn(TOKENS, TOPK, generator=g), 1)


def by_hand(rank: int, order: range) -> torch.Tensor:
    """The formula: expert e multiplies its rows by e + 1; fused multiply-adds in fp32 in the given order of k."""
    tokens, ids, weights = inputs(rank)
    total = torch.zeros(TOKENS, HIDDEN)
    for k in order:
        total = fma32(tokens * (ids[:, k:k + 1] + 1), weights[:, k:k + 1].expand_as(tokens), total)
    return total


def program(comm: Any) -> list[torch.Tensor]:
    """Dispatch, experts in place, combine; ten times on the same inputs."""
    config = GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, dtype=torch.float32,
                         timeout_ns=10_000_000_000)
    results = []
    with Group.create(comm, config) as group:
        tokens, ids, weights = (t.to(comm.device) for t in inputs(comm.rank))
        with group.create_handle(Layout.EXPERT_MAJOR, ids) as handle:
            for _ in range(RUNS):
                received = handle.dispatch(tokens)
                for local in range(EXPERTS // RANKS):
                    received.tokens[local].mul_(comm.rank * (EXPERTS // RANKS) + local + 1)    # the expert, in the window itself
                results.append(handle.combine(received.tokens, topk_weights=weights))
            comm.synchronize()
            group.check()
    return [out.cpu() for out in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    with LocalWorld(RANKS, parser.parse_args().backend, mode="adversarial") as world:   # other orders of warps in each run
        results = world.run(program)
    for rank, runs in enumerate(results):
        right, reverse = by_hand(rank, range(TOPK)), by_hand(rank, range(TOPK - 1, -1, -1))
        same = sum(torch.equal(run, right) for run in runs)
        other = int((right != reverse).sum())
        print(f"rank {rank}: {same} of {RUNS} runs are bit for bit the formula with k = 0, 1, 2; "
              f"with k = 2, 1, 0 {other} of {right.numel()} numbers have other bits")
        assert same == RUNS and other > 0 and torch.allclose(right, reverse)
        print(f"   for example {right[right != reverse][0].item():.9g} and {reverse[right != reverse][0].item():.9g}")
    print("Pulling lets one warp own a token's sum, so its order is ours to choose.")


if __name__ == "__main__":
    main()
