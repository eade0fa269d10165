"""Dispatch and combine as one writes them with ``torch.distributed.all_to_all_single``: permute by expert, exchange, un-permute with weights.

Rows travel once per (token, expert). The split sizes come to the host in every dispatch, as `all_to_all_single` wants them there, so a pair cannot be
captured into a graph.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ncclep_py.bench.routing import routing
from ncclep_py.bench.subject import Subject
from ncclep_py.testing import stamped_tokens

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.communicator import Communicator

__all__ = ["AllToAll", "AllToAllSubject", "process_group"]


class AllToAll:
    """The exchange over a process group.

    Args:
        group: a torch process group (None: the world).
        num_experts: E.
    """

    def __init__(self, num_experts: int, group: Any = None) -> None:
        self.group, self.num_experts, self.ranks = group, num_experts, dist.get_world_size(group)

    def dispatch(self, tokens: torch.Tensor, topk_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of my experts, by (source, expert), and rows per (source, local expert) ``[R, L]`` on the host."""
        ids = topk_idx.flatten()
        order = ids.argsort(stable=True)
        self.order = order[(ids < 0).sum():]   # -1 stands first
        sent = torch.bincount(ids[self.order], minlength=self.num_experts).view(self.ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        self.splits = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = tokens.new_empty(sum(self.splits[1]), tokens.shape[1])
        dist.all_to_all_single(rows, tokens[self.order // topk_idx.shape[1]], self.splits[1], self.splits[0], group=self.group)
        return rows, received

    def combine(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's rows, ``[T, hidden]``, summed in float32."""
        tokens, topk = weights.shape
        back = rows.new_empty(sum(self.splits[0]), rows.shape[1])
        dist.all_to_all_single(back, rows, self.splits[0], self.splits[1], group=self.group)
        sums = torch.zeros(tokens, rows.shape[1], device=rows.device)
        sums.index_add_(0, self.order // topk, back.float() * weights.flatten()[self.order, None])
        return sums.to(rows.dtype)


class AllToAllSubject(Subject):
    """Weighted like low latency's EXPERT_MAJOR; compared to a tolerance, because `index_add_` adds in any order."""

    capturable, exact = False, False

    def __init__(self, comm: Communicator, case: Case) -> None:
        super().__init__(comm, case)
        self.exchange = AllToAll(case.experts, process_group(comm))
        self.ids = routing(case, comm.rank).to(comm.device)
        self.tokens = stamped_tokens(comm.rank, case.tokens, case.hidden, case.torch_dtype()).to(comm.device)
        self.weights = torch.rand(self.ids.shape, generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
        self.out = torch.empty_like(self.tokens)

    @staticmethod
    def why_not(case: Case) -> str:
        """Why it cannot play a case; empty if it can."""
        return "" if case.recipe == "none" and not case.backward else "all_to_all_single moves rows as they are, forward"

    def pair(self) -> None:
        rows, _ = self.exchange.dispatch(self.tokens, self.ids)
        self.out = self.exchange.combine(rows, self.weights)

    def check(self) -> bool:
        self.pair()
        want = self.tokens.float() * torch.where(self.ids >= 0, self.weights, 0.0).sum(1, keepdim=True)
        return bool(torch.allclose(self.out.float(), want, rtol=2e-2, atol=2e-2))


def process_group(comm: Communicator) -> Any:
    """A torch process group of the ranks of `comm` that moves tensors of their device; it stays until the process ends."""
    backend = "nccl" if comm.backend == "nccl" else "gloo"
    if dist.is_initialized():
        return dist.group.WORLD if dist.get_backend() == backend else dist.new_group(backend=backend)
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = comm.exchange(free.getsockname()[1])[0]
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group(backend, rank=comm.rank, world_size=comm.num_ranks)
    return dist.group.WORLD
