"""`Program` with staged operations, for tests and exploration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.kernels import ll_staged
from ncclep_py.reference import ll_expert_major_combine, ll_expert_major_dispatch
from ncclep_py.signature import OpKind, Signature
from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.program import Combined, Dispatched, Program

__all__ = ["StagedProgram"]

FACTORIES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "dispatch_send": (ll_staged.make_ll_dispatch_send, ll_staged.DISPATCH_SEND_PARAMETERS),
    "dispatch_complete": (ll_staged.make_ll_dispatch_complete, ll_staged.DISPATCH_COMPLETE_PARAMETERS),
    "combine_send": (ll_staged.make_ll_combine_send, ll_staged.COMBINE_SEND_PARAMETERS),
    "combine_complete": (ll_staged.make_ll_combine_complete, ll_staged.COMBINE_COMPLETE_PARAMETERS),
}


class StagedProgram(Program):
    """A toy group whose operations may be staged; `config.num_staging_slots` must be set."""

    def __init__(self, sim: Simulator, config: GroupConfig, num_tokens: Sequence[int], factories: Mapping[str, Callable] | None = None,
                 **more: Any) -> None:
        """`factories` replaces kernel factories by name."""
        super().__init__(sim, config, num_tokens, **more)
        for kind, (factory, parameters) in FACTORIES.items():
            self.kernels[kind] = (factories or {}).get(kind, factory)(self.shape, sim.vocabulary)
            self.parameters[kind] = parameters
        self.flying: dict[tuple[str, int], Any] = {}

    # ---- operations --------------------------------------------------------------------------------------------------------
    def send_dispatch(self, slot: int = 0, ranks: Sequence[int] | None = None, status: int = 0) -> Dispatched:
        """Enqueue the send half of a dispatch of random tokens into `slot`."""
        self.handles += 1
        experts = self.config.num_experts
        tokens = [torch.randn(t, self.config.hidden, generator=self.rng).to(self.dtype) for t in self.num_tokens]
        ids = [torch.randint(-1, experts, (t, self.num_topk), generator=self.rng) for t in self.num_tokens]
        expected = ll_expert_major_dispatch(tokens, ids, num_experts=experts, max_dispatch_tokens_per_rank=self.config.max_dispatch_tokens_per_rank)
        counters = [np.full(experts // len(self.ranks), -1, np.int32) for _ in self.ranks]
        d = Dispatched(slot, self.handles, tokens, ids, counters, {}, [e.tokens.clone() for e in expected], expected)
        for rank in self.ranks if ranks is None else ranks:
            self._stage("dispatch_send", rank, slot, d.handle, status, self._signature(OpKind.STAGED_DISPATCH, slot), slot,
                        tokens=tokens[rank], topk_idx=ids[rank], expert_counters=counters[rank])
        self.dispatched.append(d)
        return d

    def complete_dispatch(self, d: Dispatched, ranks: Sequence[int] | None = None) -> None:
        """Enqueue the complete half."""
        for rank in self.ranks if ranks is None else ranks:
            self._stage("dispatch_complete", rank, d.slot, d.handle, 0, self._signature(OpKind.STAGED_DISPATCH, d.slot), d.slot, blocks=1)

    def send_combine(self, d: Dispatched, stage: int = 0, ranks: Sequence[int] | None = None, status: int = 0) -> Dispatched:
        """Enqueue the send half of a combine of what the experts left, into a staging slot."""
        for rank in self.ranks if ranks is None else ranks:
            rows = self.windows[rank].ctypes.data + self.shape.window.slot(d.slot)
            self._stage("combine_send", rank, d.slot, d.handle, status, self._signature(OpKind.STAGED_COMBINE, stage), self.config.num_slots + stage,
                        more={"rows": rows})
        return d

    def complete_combine(self, d: Dispatched, stage: int = 0, ranks: Sequence[int] | None = None) -> Combined:
        """Enqueue the complete half, with random weights."""
        weights = [torch.rand(t, self.num_topk, generator=self.rng) for t in self.num_tokens]
        out = [torch.full((t, self.config.hidden), 7.0).to(self.dtype) for t in self.num_tokens]
        c = Combined(out, ll_expert_major_combine(d.experts, [e.rows for e in d.expected], weights))
        for rank in self.ranks if ranks is None else ranks:
            self._stage("combine_complete", rank, d.slot, d.handle, 0, self._signature(OpKind.STAGED_COMBINE, stage), self.config.num_slots + stage,
                        weights=weights[rank], out=out[rank])
        self.combined.append(c)
        return c

    def play(self, text: str) -> None:
        """Enqueue a sequence such as ``S0 A0 X0 P00 R0 D1 X1 C1``.

        D, X, C: dispatch, experts, combine with the slot. S, A: send and complete half of a staged dispatch. P: send half of a staged combine of the
        slot, into a staging slot (second digit). R: complete half of the staged combine in a staging slot.
        """
        live: dict[int, Dispatched] = {}
        pushed: dict[int, Dispatched] = {}
        for step in text.split():
            slot, stage = int(step[1:2] or "0"), int(step[2:3] or "0")
            if step[0] == "D":
                live[slot] = self.dispatch(slot)
            elif step[0] == "S":
                live[slot] = self.send_dispatch(slot)
            elif step[0] == "A":
                self.complete_dispatch(live[slot])
            elif step[0] == "X":
                self.experts(live[slot])
            elif step[0] == "P":
                pushed[stage] = self.send_combine(live[slot], stage)
            elif step[0] == "R":
                self.complete_combine(pushed[slot], slot)
            else:
                self.combine(live[slot])

    # ---- inside ------------------------------------------------------------------------------------------------------------
    def _signature(self, kind: OpKind, slot: int) -> Signature:
        return Signature(kind, Layout.EXPERT_MAJOR, self.shape.token_type, 0, slot, self.num_topk, self.shape.row_bytes // 16)

    def _stage(self, kind: str, rank: int, slot: int, handle: int, status: int, signature: Signature, flight: int,
               more: dict[str, int] | None = None, blocks: int | None = None, **tensors: object) -> None:
        address, plan, own = self.local[rank].ctypes.data, self.shape.window, self.shape.local
        values = {"flight": address + own.flight(flight), "flying": plan.flight(flight)} | (more or {})
        stage = flight - self.config.num_slots
        if stage >= 0:
            values |= {"staging": plan.stage(stage), "released": plan.release(stage), "copied": address + own.copy(stage)}
        kept, self.grids = self.grids, [(blocks or b, w) for b, w in self.grids]
        self._launch_signed(kind, rank, slot, handle, status, signature, values, **tensors)
        self.grids = kept
