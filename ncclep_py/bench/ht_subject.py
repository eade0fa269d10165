"""Our high throughput for the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ncclep_py import (
    Algorithm,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    Group,
    GroupConfig,
    HandleConfig,
    Layout,
    PassDir,
)
from ncclep_py.bench import oracle
from ncclep_py.bench.arrivals import ht_arrived, ht_sources
from ncclep_py.bench.budget import receive_budget
from ncclep_py.bench.inputs import sent_rows, tokens_of, turned_back, weights_of
from ncclep_py.bench.routing import routing
from ncclep_py.bench.subject import FLUSH_BYTES, Subject

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.communicator import Communicator

__all__ = ["HTSubject"]

TIMEOUT_NS = 10_000_000_000
BACKWARD, COMBINE_BACKWARD = DispatchConfig(pass_direction=PassDir.BWD), CombineConfig(pass_direction=PassDir.BWD)


class HTSubject(Subject):
    """Experts are the identity; every bit of every received and of every combined row is compared, small cases also with the oracle."""

    def __init__(self, comm: Communicator, case: Case, trace: bool = False) -> None:
        super().__init__(comm, case)
        everybody = [routing(case, r).to(comm.device) for r in range(case.ranks)]
        self.everybody, self.sources = everybody, ht_sources(case, everybody, comm.rank)
        self.group = Group.create(comm, GroupConfig(
            num_experts=case.experts, max_dispatch_tokens_per_rank=case.tokens, hidden=case.hidden, dtype=case.torch_dtype(), num_topk=case.topk,
            max_num_sms=case.sms, timeout_ns=TIMEOUT_NS, algorithm=Algorithm.HIGH_THROUGHPUT, trace=trace,
            max_recv_tokens_per_rank=receive_budget(case), num_slots=2 if case.backward else 1))
        self.ids = everybody[comm.rank]
        self.tokens = tokens_of(case, comm.rank, comm.device)
        self.weights = weights_of(case, comm.rank).to(comm.device)
        made = HandleConfig(dispatch_output_per_expert_alignment=case.alignment)
        self.handle = self.group.create_handle(Layout[case.layout.upper()], self.ids, config=made)
        self.inputs, self.config = DispatchInputs(self.tokens, self.weights), DispatchConfig()
        self.quantised = case.recipe != "none"
        if self.quantised:
            rows, scales = sent_rows(case, self.tokens)
            self.inputs = DispatchInputs(rows, self.weights, scales)
            self.config = DispatchConfig(quant_recipe=DispatchQuant.FWD)
        self.flush = torch.empty(FLUSH_BYTES // case.ranks if comm.backend == "nccl" else 1024, dtype=torch.uint8, device=comm.device)
        self.out = torch.empty_like(self.tokens)
        self.back = CombineOutputs(torch.empty_like(self.tokens), torch.empty_like(self.weights))

    def dispatch(self) -> DispatchOutputs:
        return self.handle.dispatch(self.inputs, config=self.config)

    def _rows(self, received: DispatchOutputs, experts: bool) -> torch.Tensor:
        """What combine is given: the received rows, or with a recipe those of the window that take their place."""
        if not self.quantised:
            return received.tokens
        rows = self.handle.rows(self.handle._slots[0])
        if experts:
            assert received.scales is not None
            n = len(self.sources)   # of the budget's rows those received
            rows[:n].copy_(received.tokens[:n].float() * received.scales[:n].repeat_interleave(128, 1))
        return rows

    def pair(self, flush: bool = False) -> None:
        received = self.dispatch()
        if flush:
            self.flush.zero_()
        self.handle.combine(self._rows(received, False), CombineOutputs(self.out))

    def backward(self) -> None:
        """The pair of the other pass: gradients of combined rows go out, those of tokens and weights come back."""
        received = self.handle.dispatch(self.tokens, config=BACKWARD)
        self.handle.combine(CombineInputs(received.tokens, self.handle.slot_weights(self.handle._slots[1])), self.back, COMBINE_BACKWARD)

    def update(self) -> None:
        """Prepare the routing anew."""
        self.handle.update(self.ids)

    def step(self) -> None:
        """An update and a pair."""
        self.update()
        self.pair()

    def check(self) -> bool:
        case, rank, small = self.case, self.comm.rank, oracle.is_small(self.case)
        oracle.prepare(case, self.tokens.device)
        self.comm.barrier()
        self.out.fill_(float("nan"))
        self.update()
        got = self.dispatch()
        right = ht_arrived(case, self.everybody, rank, self.sources, got) and (not small or oracle.agrees(case, rank, got, None))
        self.handle.combine(self._rows(got, True), CombineOutputs(self.out))
        right &= self._equal(self.out, self.quantised) and (not small or oracle.agrees(case, rank, None, self.out))
        if case.backward:
            self.backward()
            right &= self._equal(self.back.tokens, False)
        self.group.check()
        return right

    def _equal(self, combined: torch.Tensor, quantised: bool) -> bool:
        return bool(torch.equal(combined.view(torch.uint8), self.expected(quantised).view(torch.uint8)))

    def expected(self, quantised: bool) -> torch.Tensor:
        """What combine must give: an fp32 sum of as many equal rows as the token has, each as it came back from `quantised` rows."""
        ranks = torch.arange(self.case.ranks, device=self.ids.device)
        hosts = torch.where(self.ids >= 0, self.ids // self.case.local_experts, -1)
        counts = (hosts[:, :, None] == ranks).any(1).sum(1) if self.case.layout == "flat" else (self.ids >= 0).sum(1)
        sums, x = torch.zeros(self.tokens.shape, device=ranks.device), self.tokens.float()
        if quantised:
            x = turned_back(self.inputs.tokens, self.inputs.scales, self.tokens.dtype).float()
        for i in range(self.case.topk):
            sums = torch.where((counts > i)[:, None], sums + x, sums)
        return sums.to(self.tokens.dtype)

    def actions(self) -> dict[str, Callable[[], Any]]:
        def both() -> None:
            self.pair()
            self.backward()

        more = {"both_passes": both} if self.case.backward else {}
        return {"dispatch": self.dispatch, "update": self.update, "step": self.step, "flush": self.flush.zero_,
                "flushed_pair": lambda: self.pair(True)} | more

    def close(self) -> None:
        self.group.close()
