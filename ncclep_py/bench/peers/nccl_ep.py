"""NVIDIA's ``nccl.ep`` (wheel nccl-extensions), one process per rank, through its public Python names.

It compiles kernels at run time with the NCCL headers it was built with: where these are not NCCL_HOME's, let NCCLEP_PEER_NCCL_HOME name their folder.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

from ncclep_py.bench.budget import receive_budget
from ncclep_py.bench.inputs import tokens_of, weights_of
from ncclep_py.bench.routing import routing
from ncclep_py.bench.subject import Subject

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.communicator import Communicator

__all__ = ["NcclEpSubject"]

HEADERS = "NCCLEP_PEER_NCCL_HOME"
"""A name of ours: nccl.ep has an NCCL_EP_HOME, the folder of its own headers."""


class NcclEpSubject(Subject):
    """Experts are the identity; combined rows are compared to a relative error of 1e-2, since its sums are rounded between ranks."""

    exact = False

    def __init__(self, comm: Communicator, case: Case, ep: Any = None) -> None:
        super().__init__(comm, case)
        if os.environ.get(HEADERS):
            os.environ["NCCL_HOME"] = os.environ[HEADERS]   # of this process, in which nothing of ours is compiled
        ep = self.ep = importlib.import_module("nccl.ep") if ep is None else ep
        low_latency = case.algorithm == "ll"
        config: dict[str, Any] = dict(num_experts=case.experts, max_dispatch_tokens_per_rank=case.tokens, max_token_bytes=case.row_bytes,
                                      max_num_sms=case.sms, algorithm=ep.Algorithm.LOW_LATENCY if low_latency else ep.Algorithm.HIGH_THROUGHPUT)
        if not low_latency:
            self.rows = receive_budget(case)
            config |= dict(max_recv_tokens_per_rank=self.rows, num_topk=case.topk)
        self.group = ep.Group.create(comm.comm, ep.GroupConfig(**config))   # type: ignore[attr-defined]
        self.ids = routing(case, comm.rank).to(comm.device)
        self.tokens = tokens_of(case, comm.rank, comm.device)
        self.weights = weights_of(case, comm.rank).to(comm.device)
        self.out = torch.zeros_like(self.tokens)
        self.handle_info, self.dispatch_info = None, None
        self.inputs, self.outputs = self._tensors()
        weighted = low_latency and case.layout == "expert_major"
        self.combined = ep.CombineOutputs(tokens=ep.Tensor(self.out), **({"topk_weights": ep.Tensor(self.weights)} if weighted else {}))
        self.combine_inputs = ep.CombineInputs(tokens=ep.Tensor(self.received))
        layout = {"expert_major": ep.Layout.EXPERT_MAJOR, "rank_major": ep.Layout.RANK_MAJOR, "flat": ep.Layout.FLAT}[case.layout]
        comm.synchronize()
        comm.barrier()
        self.handle = self.group.create_handle(layout, ep.Tensor(self.ids), layout_info=self.handle_info, config=ep.HandleConfig(),
                                               stream=_stream())

    @staticmethod
    def why_not(case: Case) -> str:
        """Why it cannot play a case; empty if it can."""
        plain = case.recipe == "none" and case.dtype == "bf16" and not case.backward
        return "" if plain else "only bf16 rows forward, without a recipe, are compared"

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.comm.device)

    def _tensors(self) -> tuple[Any, Any]:
        """Inputs and outputs of dispatch, as each layout wants them."""
        ep, case, view = self.ep, self.case, self.ep.Tensor
        tokens, ranks, topk, local = case.tokens, case.ranks, case.topk, case.local_experts
        inputs = ep.DispatchInputs(tokens=view(self.tokens), topk_weights=view(self.weights))
        if case.algorithm == "ll" and case.layout == "expert_major":
            self.received, counts = self._zeros(local, ranks * tokens, case.hidden), self._zeros(local, dtype=torch.int32)
            self.dispatch_info = ep.LayoutInfo(expert_counters=view(counts))
            return ep.DispatchInputs(tokens=view(self.tokens)), ep.DispatchOutputs(tokens=view(self.received))
        if case.algorithm == "ll":
            self.received = self._zeros(ranks, tokens, case.hidden)
            weights, ids = self._zeros(ranks, tokens, topk, dtype=torch.float32), self._zeros(ranks, tokens, topk, dtype=torch.int32)
            self.dispatch_info = ep.LayoutInfo(src_rank_counters=view(self._zeros(ranks, dtype=torch.int32)))
            return inputs, ep.DispatchOutputs(tokens=view(self.received), topk_weights=view(weights), topk_idx=view(ids))
        self.received = self._zeros(self.rows, case.hidden)
        self.handle_info = ep.LayoutInfo(expert_counters=view(self._zeros(local, dtype=torch.int32)),
                                         recv_total_counter=view(self._zeros(1, dtype=torch.int32)))
        if case.layout == "expert_major":
            return inputs, ep.DispatchOutputs(tokens=view(self.received), topk_weights=view(self._zeros(self.rows, dtype=torch.float32)))
        return inputs, ep.DispatchOutputs(tokens=view(self.received), topk_weights=view(self._zeros(self.rows, topk, dtype=torch.float32)),
                                          topk_idx=view(self._zeros(self.rows, topk, dtype=torch.int64)))

    def pair(self) -> None:
        ep, where = self.ep, _stream()
        self.handle.dispatch(self.inputs, self.outputs, layout_info=self.dispatch_info, config=ep.DispatchConfig(), stream=where)
        self.handle.combine(self.combine_inputs, self.combined, config=ep.CombineConfig(), stream=where)

    def check(self) -> bool:
        for _ in range(3):
            self.pair()
            self.comm.synchronize()
            self.comm.barrier()
        want = self.tokens.float() * self.copies()
        return float((self.out.float() - want).norm() / want.norm()) < 1e-2

    def copies(self) -> torch.Tensor:
        """How often a token comes back: once per row, in low latency's expert_major times the row's weight."""
        case = self.case
        if case.layout == "expert_major":
            there = self.ids >= 0
            return (torch.where(there, self.weights, 0.0) if case.algorithm == "ll" else there.float()).sum(1, keepdim=True)
        hosts, ranks = self.ids // case.local_experts, torch.arange(case.ranks, device=self.ids.device)
        return (hosts[:, :, None] == ranks).any(1).sum(1, keepdim=True).float()


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
