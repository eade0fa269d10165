"""Our low latency for the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ncclep_py import CombineOutputs, DispatchConfig, DispatchInputs, DispatchOutputs, DispatchQuant, Group, GroupConfig, Layout
from ncclep_py.bench import oracle
from ncclep_py.bench.arrivals import ll_arrived
from ncclep_py.bench.inputs import sent_rows, tokens_of, turned_back, weights_of
from ncclep_py.bench.routing import routing
from ncclep_py.bench.subject import FLUSH_BYTES, Subject
from ncclep_py.reference import fma32
from ncclep_py.signature import OpKind
from ncclep_py.testing import bits_equal

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.communicator import Communicator

__all__ = ["LLSubject"]

TIMEOUT_NS = 10_000_000_000


class LLSubject(Subject):
    """Experts are the identity (with a recipe they turn rows back, outside what is timed), so every received and every combined row is known and
    compared by its bits; small cases also with the oracle."""

    def __init__(self, comm: Communicator, case: Case, trace: bool = False, **more: Any) -> None:
        super().__init__(comm, case)
        self.group = Group.create(comm, GroupConfig(
            num_experts=case.experts, max_dispatch_tokens_per_rank=case.tokens, hidden=case.hidden, dtype=case.torch_dtype(), num_topk=case.topk,
            max_num_sms=case.sms, timeout_ns=TIMEOUT_NS, trace=trace, **more))
        self.everybody = [routing(case, r).to(comm.device) for r in range(case.ranks)]
        ids = self.everybody[comm.rank]
        self.tokens = tokens_of(case, comm.rank, comm.device)
        self.weights = weights_of(case, comm.rank).to(comm.device)
        self.rank_major, self.quantised = case.layout == "rank_major", case.recipe != "none"
        self.handle = self.group.create_handle(Layout[case.layout.upper()], ids)
        rows, scales = sent_rows(case, self.tokens)
        forwarded = case.recipe == "quant_fwd"
        self.inputs = DispatchInputs(rows if forwarded else self.tokens, self.weights if self.rank_major else None, scales if forwarded else None)
        recipe = {"none": DispatchQuant.NONE, "ds_fp8": DispatchQuant.DS_FP8E3M4, "quant_fwd": DispatchQuant.FWD}[case.recipe]
        self.config = DispatchConfig(quant_recipe=recipe)
        self.want = self._expected(ids.cpu(), turned_back(rows, scales, self.tokens.dtype).cpu().float())
        self.flush = torch.empty(FLUSH_BYTES // case.ranks if comm.backend == "nccl" else 1024, dtype=torch.uint8, device=comm.device)
        self.one = torch.zeros(1, device=comm.device)
        self.out = torch.empty_like(self.tokens)

    def _expected(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What combine must give, on the CPU: the sum of as many equal rows `x` as a token has, in the kernels' order."""
        dtype, sums = self.tokens.dtype, torch.zeros(x.shape)
        if not self.rank_major:
            weights = self.weights.cpu()
            for k in range(self.case.topk):
                sums = torch.where(ids[:, k: k + 1] >= 0, fma32(x, weights[:, k: k + 1].expand_as(x), sums), sums)
            return sums.to(dtype)
        hosts = torch.where(ids >= 0, ids // self.case.local_experts, -1)
        counts = torch.stack([(hosts == p).any(1) for p in range(self.case.ranks)]).sum(0)[:, None]
        for i in range(self.case.ranks):
            sums = torch.where(counts > i, sums + x, sums)
        return sums.to(dtype)

    def dispatch(self) -> DispatchOutputs:
        return self.handle.dispatch(self.inputs, config=self.config)

    def _pair(self, flush: bool = False, experts: bool = False) -> None:
        received = self.dispatch()
        if experts and self.checking:
            self.look(received)
        rows = self.handle.expert_rows()
        if experts and self.quantised:
            assert received.scales is not None
            rows.copy_(received.tokens.float() * received.scales.repeat_interleave(128, 2))
        if flush:
            self.flush.zero_()
        self.handle.combine(rows, CombineOutputs(self.out, self.weights))

    def look(self, received: DispatchOutputs) -> None:
        """Compare what was received."""
        self.right &= ll_arrived(self.case, self.everybody, self.comm.rank, received)
        self.right &= not oracle.is_small(self.case) or oracle.agrees(self.case, self.comm.rank, received, None)

    def pair(self) -> None:
        self._pair()

    def check(self) -> bool:
        self.right, small = True, oracle.is_small(self.case)
        oracle.prepare(self.case, self.tokens.device)
        self.comm.barrier()
        for last in (False, False, True):
            self.checking = last   # looking waits for the device: the first rounds run into each other
            self.out.fill_(float("nan"))
            self._pair(experts=True)
        self.group.check()
        self.right &= bits_equal(self.out.cpu(), self.want)
        return self.right and (not small or oracle.agrees(self.case, self.comm.rank, None, self.out))

    def actions(self) -> dict[str, Callable[[], Any]]:
        return {"dispatch": self.dispatch, "flush": self.flush.zero_, "flushed_pair": lambda: self._pair(flush=True),
                "heads_pair": lambda: [self.group.rendezvous(OpKind.COMBINE) for _ in range(2)],
                "empty_pair": lambda: [self.one.fill_(1) for _ in range(2)]}

    def close(self) -> None:
        self.group.close()
