"""A MoE layer's tokens per second, forward and forward with backward: ours beside ``all_to_all_single``, everything else the same.

The layer: a top-k router, experts (two matrices, SiLU between) and a shared expert. Both ways bring the rows of an expert together, read how many
there are on the host, and run each expert's two products on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ncclep_py import Algorithm, Group, GroupConfig, HandleConfig, Layout
from ncclep_py.autograd import ep_combine, ep_dispatch

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.communicator import Communicator

__all__ = ["EpExchange", "MoELayer", "SplitExchange"]

Experts = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
ALIGNMENT = 16


class MoELayer(torch.nn.Module):
    """One rank's share of the layer; `rank` None: all experts, in one process."""

    def __init__(self, case: Case, width: int, rank: int | None, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__()
        dtype, mine = case.torch_dtype(), range(case.experts) if rank is None else range(rank * case.local_experts, (rank + 1) * case.local_experts)

        def drawn(which: int, *shape: int) -> torch.Tensor:   # on the device, and only one's own: all would take long
            draw = torch.Generator(device).manual_seed((seed << 20) + which)
            return (torch.randn(*shape, generator=draw, device=device) / shape[-2] ** 0.5).to(dtype)

        self.topk, parameter = case.topk, torch.nn.Parameter
        self.router, self.shared_up = parameter(drawn(0, case.hidden, case.experts)), parameter(drawn(1, case.hidden, width))
        self.shared_down = parameter(drawn(2, width, case.hidden))
        self.up = parameter(torch.stack([drawn(3 + 2 * expert, case.hidden, width) for expert in mine]))
        self.down = parameter(torch.stack([drawn(4 + 2 * expert, width, case.hidden) for expert in mine]))

    def experts(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Rows ``[N, hidden]`` through their experts: `counts` rows of each local one, in order; rows after these stay zero."""
        parts = list(rows.split([*counts, len(rows) - sum(counts)]))
        done = [torch.nn.functional.silu(part @ self.up[i]) @ self.down[i] for i, part in enumerate(parts[:-1])]
        return torch.cat([*done, torch.zeros_like(parts[-1])])

    def forward(self, x: torch.Tensor, exchange: Any = None) -> torch.Tensor:
        """``[T, hidden]`` to the same; over the ranks of an exchange, or in this process."""
        weights, ids = torch.softmax((x @ self.router).float(), -1).topk(self.topk, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = exchange(x, ids.contiguous(), weights.contiguous(), self.experts) if exchange else self._alone(x, ids, weights)
        return x + mixed + torch.nn.functional.silu(x @ self.shared_up) @ self.shared_down

    def _alone(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=len(self.up)).tolist()
        rows = self.experts(x[order // self.topk], counts) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros(x.shape, device=x.device).index_add(0, order // self.topk, rows.float()).to(x.dtype)


class EpExchange:
    """Ours: HIGH_THROUGHPUT, EXPERT_MAJOR, rows sized by what is received, as the other way has to do, too."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        self.group = Group.create(comm, GroupConfig(
            num_experts=case.experts, max_dispatch_tokens_per_rank=case.tokens, hidden=case.hidden, dtype=case.torch_dtype(), num_topk=case.topk,
            max_num_sms=case.sms, algorithm=Algorithm.HIGH_THROUGHPUT, num_slots=2))
        made = HandleConfig(dispatch_output_per_expert_alignment=ALIGNMENT)
        self.handle = self.group.create_handle(Layout.EXPERT_MAJOR, num_topk=case.topk, config=made)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        self.handle.update(ids)
        assert self.handle.layout_info.expert_counters is not None
        counts = self.handle.layout_info.expert_counters.tolist()
        received = ep_dispatch(self.handle, x, weights, num_rows=sum(counts))
        return ep_combine(self.handle, experts(received.tokens, counts) * received.topk_weights[:, None].to(x.dtype))

    def close(self) -> None:
        """Give the group back."""
        self.group.close()


class _Exchange(torch.autograd.Function):
    """``all_to_all_single`` of rows; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: Any) -> torch.Tensor:
        ctx.splits = received, sent, group
        made = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(made, rows.contiguous(), received, sent, group=group)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        received, sent, group = ctx.splits
        made = grads[0].new_empty(sum(sent), grads[0].shape[1])
        dist.all_to_all_single(made, grads[0].contiguous(), sent, received, group=group)
        return made, None, None, None


class SplitExchange:
    """The same with ``all_to_all_single``: permute by expert, exchange, bring rows of an expert together, and back."""

    def __init__(self, case: Case, group: Any = None) -> None:
        self.case, self.group = case, group

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        case, topk = self.case, ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        sent = torch.bincount(ids.flatten(), minlength=case.experts).view(case.ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        out, back = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = _Exchange.apply(x[order // topk], back, out, self.group)
        of_expert = torch.arange(case.local_experts, device=x.device).repeat(case.ranks).repeat_interleave(received.flatten())
        together = of_expert.argsort(stable=True)
        done = experts(rows[together], received.sum(0).tolist())
        returned = _Exchange.apply(torch.empty_like(done).index_copy(0, together, done), out, back, self.group)
        weighted = returned.float() * weights.flatten()[order, None]
        return torch.zeros(x.shape, device=x.device).index_add(0, order // topk, weighted).to(x.dtype)
