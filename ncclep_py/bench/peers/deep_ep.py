"""DeepEP (``deep_ep.Buffer``), one process per rank and GPU, if it is installed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from ncclep_py.bench.inputs import tokens_of, weights_of
from ncclep_py.bench.peers.all_to_all import process_group
from ncclep_py.bench.routing import routing
from ncclep_py.bench.subject import Subject

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.communicator import Communicator

__all__ = ["DeepEpSubject"]

NVL_BYTES = 2 << 30


class DeepEpSubject(Subject):
    """Low latency: its low-latency kernels, bf16. High throughput: its normal kernels inside one node. Compared to a relative error of 1e-2."""

    exact = False

    def __init__(self, comm: Communicator, case: Case, deep_ep: Any = None) -> None:
        super().__init__(comm, case)
        deep_ep = importlib.import_module("deep_ep") if deep_ep is None else deep_ep
        group = process_group(comm)
        self.low_latency = case.algorithm == "ll"
        kind = deep_ep.Buffer
        if self.low_latency:
            rdma = kind.get_low_latency_rdma_size_hint(case.tokens, case.hidden, case.ranks, case.experts)
            self.buffer = kind(group, num_rdma_bytes=rdma, low_latency_mode=True, num_qps_per_rank=case.local_experts)
        else:
            kind.set_num_sms(case.sms)
            self.buffer = kind(group, NVL_BYTES, 0)
        self.ids = routing(case, comm.rank).to(comm.device)
        self.tokens = tokens_of(case, comm.rank, comm.device)
        self.weights = weights_of(case, comm.rank).to(comm.device)
        self.capturable = self.low_latency   # normal dispatch waits on the host for its counts
        self.out = self.tokens

    @staticmethod
    def why_not(case: Case) -> str:
        """Why it cannot play a case; empty if it can."""
        if case.recipe != "none" or case.dtype != "bf16" or case.backward:
            return "only bf16 rows forward, without a recipe, are compared"
        if case.ranks > case.gpus:
            return "deep_ep needs a GPU per rank"
        layout = "expert_major" if case.algorithm == "ll" else "flat"
        return "" if case.layout == layout else "deep_ep's low latency is expert_major, its high throughput flat"

    def pair(self) -> None:
        case = self.case
        if self.low_latency:
            received, _, handle, _, _ = self.buffer.low_latency_dispatch(self.tokens, self.ids, case.tokens, case.experts, use_fp8=False)
            self.out, _, _ = self.buffer.low_latency_combine(received, self.ids, self.weights, handle)
            return
        to_rank, to_node, to_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.ids, case.experts)
        received, _, _, _, handle, _ = self.buffer.dispatch(
            self.tokens, topk_idx=self.ids, topk_weights=self.weights, num_tokens_per_rank=to_rank, num_tokens_per_rdma_rank=to_node,
            is_token_in_rank=in_rank, num_tokens_per_expert=to_expert)
        self.out, _, _ = self.buffer.combine(received, handle)

    def check(self) -> bool:
        self.pair()
        case = self.case
        copies = torch.where(self.ids >= 0, self.weights, 0.0).sum(1, keepdim=True)
        if not self.low_latency:
            hosts, ranks = self.ids // case.local_experts, torch.arange(case.ranks, device=self.ids.device)
            copies = (hosts[:, :, None] == ranks).any(1).sum(1, keepdim=True).float()
        want = self.tokens.float() * copies
        return float((self.out.float() - want).norm() / want.norm()) < 1e-2
