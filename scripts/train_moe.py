#!/usr/bin/env python3
"""Train a small character model with a Mixture-of-Experts layer over several ranks, and check its loss curve against the same model in one process.

    python3 scripts/train_moe.py                                    # 300 steps on the demo's text; GPU if there is one, else the simulator
    python3 scripts/train_moe.py --backend sim --ranks 2 --steps 40 --check
    python3 scripts/train_moe.py --text my.txt --steps 1000
    torchrun --nproc-per-node 4 scripts/train_moe.py                # one process per rank (and GPU, if there are as many)

Every rank holds all of the model but the experts, of which it holds its share, and a part of the batch. The layer: a top-k router, experts (two-layer
perceptrons) reached by `ep_dispatch` and `ep_combine`, which bring the rows of an expert together, and a shared expert every row passes. Gradients of
what all ranks hold are added up over ranks; those of an expert come together at its rank by themselves. --check trains the same model once more in
one process and compares losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
from typing import Any

import in_environment  # noqa: F401
import torch
import torch.distributed as dist

from ncclep_py import Algorithm, Communicator, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.autograd import ep_combine, ep_dispatch
from ncclep_py.demo import TEXT

CONTEXT = 8   # characters a prediction looks at


@dataclasses.dataclass(frozen=True)
class Job:
    ranks: int
    steps: int
    tokens: int    # per rank and step
    hidden: int
    experts: int
    topk: int
    rate: float
    seed: int


class Model(torch.nn.Module):
    """Embeddings of the last characters, a mixture of experts, and the next character. `rank` None: all experts, in one process."""

    def __init__(self, job: Job, characters: int, rank: int | None) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(job.seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g) / shape[-2] ** 0.5

        width, local = 2 * job.hidden, job.experts // job.ranks
        self.job = job
        self.embedding = torch.nn.Parameter(weight(characters, 16))
        self.into = torch.nn.Parameter(weight(16 * CONTEXT, job.hidden))
        self.router = torch.nn.Parameter(weight(job.hidden, job.experts))
        self.shared = torch.nn.ParameterList([weight(job.hidden, width), weight(width, job.hidden)])
        self.out = torch.nn.Parameter(weight(job.hidden, characters))
        up, down = weight(job.experts, job.hidden, width), weight(job.experts, width, job.hidden)
        mine = slice(None) if rank is None else slice(rank * local, (rank + 1) * local)
        self.experts = torch.nn.ParameterList([up[mine].clone(), down[mine].clone()])

    def replicated(self) -> list[torch.nn.Parameter]:
        """What every rank holds."""
        return [self.embedding, self.into, self.router, *self.shared, self.out]

    def grouped(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows ``[sum(counts), hidden]`` through their experts: the first ``counts[0]`` through this module's first one, and so on."""
        up, down = self.experts
        return torch.cat([torch.nn.functional.silu(part @ up[i]) @ down[i] for i, part in enumerate(rows.split(counts))])

    def alone(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What dispatch, experts and combine make of rows ``[T, hidden]``, in one process."""
        order = ids.flatten().argsort(stable=True)
        rows = self.grouped(x[order // self.job.topk], torch.bincount(ids.flatten(), minlength=self.job.experts).tolist())
        return torch.zeros_like(x).index_add(0, order // self.job.topk, rows * weights.flatten()[order, None])

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.softmax(x @ self.router, -1).topk(self.job.topk, -1)
        return ids.contiguous(), weights / weights.sum(-1, keepdim=True)

    def forward(self, contexts: torch.Tensor, handle: Any = None) -> torch.Tensor:
        """Logits ``[T, characters]`` for contexts ``[T, CONTEXT]``; over the ranks if there is a handle."""
        x = torch.tanh(self.embedding[contexts].flatten(1) @ self.into)
        ids, weights = self.route(x)
        if handle is None:
            mixed = self.alone(x, ids, weights)
        else:
            handle.update(ids)
            counts = handle.layout_info.expert_counters.tolist()   # waits for the device: how many rows each expert here gets
            got = ep_dispatch(handle, x, weights, num_rows=sum(counts))
            mixed = ep_combine(handle, self.grouped(got.tokens, counts) * got.topk_weights[:, None])
        up, down = self.shared
        return (x + mixed + torch.nn.functional.silu(x @ up) @ down) @ self.out


def batch(job: Job, text: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts and next characters of all ranks' tokens of a step."""
    at = torch.randint(CONTEXT, len(text), (job.ranks * job.tokens,), generator=torch.Generator().manual_seed(1000 * job.seed + step))
    return text[at[:, None] + torch.arange(-CONTEXT, 0)], text[at]


def sum_over_ranks(comm: Any, tensors: list[Any]) -> list[torch.Tensor]:
    """The sum of each tensor over all ranks, in the same order on each."""
    if dist.is_available() and dist.is_initialized():   # one process per rank: the group that torchrun's communicator was made from
        flat = torch.cat([t.flatten().cpu() for t in tensors])
        dist.all_reduce(flat)
        return [part.view(t.shape).to(t.device) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
    comm.synchronize()   # others are about to read mine
    everybody = comm.exchange(tensors)   # by reference: ranks share this process
    sums = [torch.stack([t.to(comm.device) for t in parts]).sum(0) for parts in zip(*everybody, strict=True)]
    comm.synchronize()
    comm.barrier()       # all have read before anybody writes
    return sums


def train_rank(comm: Any, job: Job, text: torch.Tensor, characters: int, tell: Any = None) -> list[float]:
    """One rank's training; the loss over all ranks of every step."""
    model, losses = Model(job, characters, comm.rank).to(comm.device), []
    optimizer = torch.optim.Adam(model.parameters(), job.rate)
    config = GroupConfig(num_experts=job.experts, max_dispatch_tokens_per_rank=job.tokens, hidden=job.hidden, dtype=torch.float32, num_topk=job.topk,
                         algorithm=Algorithm.HIGH_THROUGHPUT, num_slots=2)
    mine = slice(comm.rank * job.tokens, (comm.rank + 1) * job.tokens)
    with Group.create(comm, config) as group, group.create_handle(Layout.EXPERT_MAJOR, num_topk=job.topk) as handle:
        for step in range(job.steps):
            contexts, following = (t[mine].to(comm.device) for t in batch(job, text, step))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(contexts, handle), following, reduction="sum") / (job.ranks * job.tokens)
            loss.backward()
            shared = model.replicated()
            *grads, total = sum_over_ranks(comm, [*(p.grad for p in shared), loss.detach()])
            for p, grad in zip(shared, grads, strict=True):
                p.grad = grad
            optimizer.step()
            losses.append(float(total))
            if tell is not None and comm.rank == 0:
                tell(step, losses[-1])
        group.check()
    return losses


def train_alone(job: Job, text: torch.Tensor, characters: int) -> list[float]:
    """The same training in one process."""
    model, losses = Model(job, characters, None), []
    optimizer = torch.optim.Adam(model.parameters(), job.rate)
    for step in range(job.steps):
        contexts, following = batch(job, text, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(contexts), following)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def encode(text: str) -> tuple[torch.Tensor, int]:
    """The text as numbers, and how many different characters there are."""
    alphabet = sorted(set(text))
    return torch.tensor([alphabet.index(c) for c in text]), len(alphabet)


def main() -> int:
    """Train and print the loss; 1 if it does not fall, or differs from the one-process curve under --check."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--text", metavar="FILE")
    ap.add_argument("--backend", choices=["auto", "sim", "nccl"], default="auto")
    ap.add_argument("--check", action="store_true", help="compare with the same model in one process")
    for name, value in (("ranks", 4), ("steps", 300), ("tokens", 32), ("hidden", 64), ("experts", 8), ("topk", 2), ("seed", 0)):
        ap.add_argument(f"--{name}", type=int, default=value)
    ap.add_argument("--rate", type=float, default=3e-3)
    args = ap.parse_args()
    job = Job(args.ranks, args.steps, args.tokens, args.hidden, args.experts, args.topk, args.rate, args.seed)
    text, characters = encode(TEXT if args.text is None else pathlib.Path(args.text).read_text(encoding="utf-8", errors="replace"))

    def tell(step: int, loss: float) -> None:
        if step % max(job.steps // 15, 1) == 0 or step == job.steps - 1:
            print(f"step {step:5d}  loss {loss:.4f}", flush=True)

    first_rank = os.environ.get("RANK", "0") == "0"
    if "WORLD_SIZE" in os.environ:
        job, backend = dataclasses.replace(job, ranks=int(os.environ["WORLD_SIZE"])), "nccl"
        losses = train_rank(Communicator.from_environment(), job, text, characters, tell)
    else:
        with LocalWorld(job.ranks, args.backend, threads=True) as world:
            losses, backend = world.run(train_rank, job, text, characters, tell)[0], world.backend
    first, last = sum(losses[:5]) / len(losses[:5]), sum(losses[-5:]) / len(losses[-5:])
    if first_rank:
        print(f"{job.ranks} ranks on {backend}: loss {first:.4f} -> {last:.4f}")
    if not args.check or not first_rank:
        return int(last >= first)
    worst = max(abs(a - b) / b for a, b in zip(losses, train_alone(job, text, characters), strict=True))
    print(f"largest relative difference from the one-process loss: {worst:.2e}")
    return int(last >= first or worst > 1e-2)


if __name__ == "__main__":
    sys.exit(main())
