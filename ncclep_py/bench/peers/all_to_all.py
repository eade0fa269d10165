"""Dispatch and combine as one writes them with ``torch.distributed.all_to_all_single``: permute by expert, exchange, un-permute with weights.

Rows travel once per (token, expert). The split sizes come to the host in every dispatch, as `all_to_all_single` wants them there, so a pair cannot be
captured into a graph. ``known_sizes_pair`` is the same with the sizes known beforehand, in a graph: the best it could do, and less than others do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ncclep_py.bench.inputs import tokens_of, weights_of
from ncclep_py.bench.routing import routing
from ncclep_py.bench.subject import Subject

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
        return self.send(tokens, topk_idx.shape[1]), received

    def send(self, tokens: torch.Tensor, topk: int) -> torch.Tensor:
        """The rows of a dispatch with the sizes and the order of the last one; nothing comes to the host."""
        rows = tokens.new_empty(sum(self.splits[1]), tokens.shape[1])
        dist.all_to_all_single(rows, tokens[self.order // topk], self.splits[1], self.splits[0], group=self.group)
        return rows

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
        self.tokens = tokens_of(case, comm.rank, comm.device)
        self.weights = weights_of(case, comm.rank).to(comm.device)
        self.out = torch.empty_like(self.tokens)

    @staticmethod
    def why_not(case: Case) -> str:
        """Why it cannot play a case; empty if it can."""
        return "" if case.recipe == "none" and not case.backward else "all_to_all_single moves rows as they are, forward"

    def pair(self) -> None:
        rows, _ = self.exchange.dispatch(self.tokens, self.ids)
        self.out = self.exchange.combine(rows, self.weights)

    def known_sizes_pair(self) -> None:
        """A pair of the routing of the last `pair`, without asking for its sizes."""
        self.out = self.exchange.combine(self.exchange.send(self.tokens, self.case.topk), self.weights)

    def actions(self) -> dict[str, Callable[[], Any]]:
        return {"known_sizes_pair": self.known_sizes_pair}

    def check(self) -> bool:
        self.pair()
        right = self._right()
        self.known_sizes_pair()
        return right and self._right()

    def _right(self) -> bool:
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
