"""Lesson 10: a whole Mixture-of-Experts layer over several ranks, forward and backward, next to the same layer in one process.

    python3 scripts/lesson_10_a_moe_layer.py [--backend sim|nccl]

    router      for each token K experts and their weights                 on the token's rank
    dispatch    rows and weights to the ranks that host these experts      ep_dispatch
    experts     each a small network, on the rows that came                on the expert's rank
    combine     the results back, added up per token                       ep_combine

Only the experts are divided over ranks; the router is the same everywhere. The loss is taken on every token's own rank. One call of
`backward()` sends gradients the same ways back (lesson 9). An expert's gradient is complete on its rank: all tokens that used it
were there. The router's is not: each rank has seen its own tokens only, so these are added up over the ranks.

Look at: the largest difference in the result and in each gradient from the layer in one process, which knows of no ranks.

Try: take `parts[0]` for the router instead of the sum. Its gradient is then wrong by a third of its size: rank 0 has
seen its own tokens only. The assert fails.
"""

from __future__ import annotations

import argparse
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.autograd import ep_combine, ep_dispatch

RANKS, EXPERTS, TOPK, TOKENS, HIDDEN, WIDTH = 3, 6, 2, 5, 16, 24
LOCAL = EXPERTS // RANKS


class MoE(torch.nn.Module):
    """The layer; `rank` None: all experts in one process."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)          # every rank draws the same numbers and keeps its share
        router, up, down = (torch.randn(*shape, generator=g) / 4 for shape in ((HIDDEN, EXPERTS), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)))
        mine = slice(None) if rank is None else slice(rank * LOCAL, (rank + 1) * LOCAL)
        self.router = torch.nn.Parameter(router)
        self.up, self.down = torch.nn.Parameter(up[mine].clone()), torch.nn.Parameter(down[mine].clone())

    def experts(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum over the experts held here of weight * expert(row), for rows ``[N, H]`` with ids and weights ``[N, K]``; id -1: none."""
        out = torch.zeros_like(rows)
        for e in range(len(self.up)):
            weight = torch.where(ids == e, weights, 0.0).sum(1, keepdim=True)       # 0 for rows that did not choose it
            out = out + weight * (torch.nn.functional.silu(rows @ self.up[e]) @ self.down[e])
        return out

    def forward(self, x: torch.Tensor, handle: Any = None) -> torch.Tensor:
        weights, ids = torch.softmax(x @ self.router, 1).topk(TOPK, 1)
        if handle is None:
            return self.experts(x, ids, weights)
        handle.update(ids.contiguous())                                             # the map of this batch (lesson 8)
        received = ep_dispatch(handle, x, weights)                                  # ids count from this rank's first expert
        return ep_combine(handle, self.experts(received.tokens, received.topk_idx, received.topk_weights))


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's tokens, and what the layer should make of them."""
    g = torch.Generator().manual_seed(1 + rank)
    return torch.randn(TOKENS, HIDDEN, generator=g), torch.randn(TOKENS, HIDDEN, generator=g)


def program(comm: Any) -> dict[str, torch.Tensor]:
    """One rank: result and gradients."""
    config = GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, dtype=torch.float32, num_topk=TOPK,
                         algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=RANKS * TOKENS, num_slots=2, timeout_ns=10_000_000_000)
    layer, (x, want) = MoE(comm.rank).to(comm.device), (t.to(comm.device) for t in batch(comm.rank))
    x.requires_grad_()
    with Group.create(comm, config) as group, group.create_handle(Layout.FLAT, num_topk=TOPK) as handle:
        out = layer(x, handle)
        ((out - want) ** 2).sum().backward()
        comm.synchronize()
        group.check()
    return {name: t.detach().cpu() for name, t in (("out", out), ("x", x.grad), ("router", layer.router.grad), ("up", layer.up.grad),
                                                   ("down", layer.down.grad))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    with LocalWorld(RANKS, parser.parse_args().backend, threads=True) as world:
        results = world.run(program)
    alone, (x, want) = MoE(None), (torch.cat(parts) for parts in zip(*map(batch, range(RANKS)), strict=True))
    x.requires_grad_()
    out = alone(x)
    ((out - want) ** 2).sum().backward()
    right = {"out": out.detach(), "x": x.grad, "router": alone.router.grad, "up": alone.up.grad, "down": alone.down.grad}
    print(f"{RANKS} ranks with {LOCAL} of {EXPERTS} experts each, against one process; largest difference of")
    for name, one in right.items():
        parts = [result[name] for result in results]
        many = sum(parts) if name == "router" else torch.cat(parts)     # tokens and experts are divided, the router is everywhere
        print(f"   {'the result' if name == 'out' else 'the gradient of ' + name:26s} {(many - one).abs().max():.1e}  of {one.abs().max():.1e}")
        assert torch.allclose(many, one, rtol=1e-4, atol=1e-4)
    print("The ranks only divided the work; scripts/train_moe.py trains such a layer.")


if __name__ == "__main__":
    main()
