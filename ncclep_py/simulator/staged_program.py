"""`Program` and `RankMajorProgram` with staged operations, for tests and exploration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.kernels import ll_dispatch, ll_rank_major_dispatch, ll_staged
from ncclep_py.signature import OpKind, Signature
from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.program import Combined, Dispatched, Program
from ncclep_py.simulator.rank_major_program import RankMajorProgram

__all__ = ["FACTORIES", "StagedProgram", "StagedRankMajorProgram"]

COMBINE: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "combine_send": (ll_staged.make_ll_combine_send, ll_staged.COMBINE_SEND_PARAMETERS),
    "combine_complete": (ll_staged.make_ll_combine_complete, ll_staged.COMBINE_COMPLETE_PARAMETERS),
}
FACTORIES: dict[Layout, dict[str, tuple[Callable, tuple[str, ...]]]] = {
    Layout.EXPERT_MAJOR: COMBINE | {
        "dispatch_send": (ll_staged.make_ll_dispatch_send, ll_dispatch.PARAMETERS),
        "dispatch_complete": (ll_staged.make_ll_dispatch_complete, ll_staged.DISPATCH_COMPLETE_PARAMETERS)},
    Layout.RANK_MAJOR: COMBINE | {
        "dispatch_send": (ll_staged.make_ll_rank_major_send, ll_rank_major_dispatch.PARAMETERS),
        "dispatch_complete": (ll_staged.make_ll_rank_major_complete, ll_staged.RANK_MAJOR_COMPLETE_PARAMETERS)},
}
"""Kernel factory and parameters of each half."""


class StagedProgram(Program):
    """A toy group whose operations may be staged; `config.num_staging_slots` must be set."""

    complete_blocks: int | None = 1
    """Blocks of the complete half of a dispatch, None for as many as of others."""

    def __init__(self, sim: Simulator, config: GroupConfig, num_tokens: Sequence[int], factories: Mapping[str, Callable] | None = None,
                 **more: Any) -> None:
        """`factories` replaces kernel factories by name."""
        super().__init__(sim, config, num_tokens, **more)
        for kind, (factory, parameters) in self.halves().items():
            self.kernels[kind] = (factories or {}).get(kind, factory)(self.shape, sim.vocabulary)
            self.parameters[kind] = parameters
        self._half, self._stage = "", 0

    def halves(self) -> dict[str, tuple[Callable, tuple[str, ...]]]:
        """Kernel factory and parameters of each half."""
        return FACTORIES[self.layout]

    # ---- operations --------------------------------------------------------------------------------------------------------
    def send_dispatch(self, slot: int = 0, **more: Any) -> Dispatched:
        """`dispatch`, but its send half only."""
        self._half = "dispatch_send"
        try:
            return self.dispatch(slot, **more)
        finally:
            self._half = ""

    def complete_dispatch(self, d: Dispatched, ranks: Sequence[int] | None = None) -> None:
        """The complete half."""
        for rank in self.ranks if ranks is None else ranks:
            self._enqueue("dispatch_complete", rank, d.slot, d.handle, 0, src_rank_counters=d.counters[rank])

    def send_combine(self, d: Dispatched, stage: int = 0, ranks: Sequence[int] | None = None, status: int = 0) -> Dispatched:
        """The send half of a combine of what the experts left, into a staging slot."""
        self._stage = stage
        for rank in self.ranks if ranks is None else ranks:
            rows = self.windows[rank].ctypes.data + self.shape.window.slot(d.slot)
            self._enqueue("combine_send", rank, d.slot, d.handle, status, rows=rows)
        return d

    def complete_combine(self, d: Dispatched, stage: int = 0, ranks: Sequence[int] | None = None) -> Combined:
        """`combine`, but its complete half only."""
        self._half, self._stage = "combine_complete", stage
        try:
            return self.combine(d, ranks)
        finally:
            self._half = ""

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
    def _launch(self, kind: str, rank: int, slot: int, handle: int, status: int, **tensors: object) -> None:
        if self._half:
            self._enqueue(self._half, rank, slot, handle, status, **tensors)
        else:
            super()._launch(kind, rank, slot, handle, status, **tensors)

    def _enqueue(self, half: str, rank: int, slot: int, handle: int, status: int, **tensors: object) -> None:
        """Launch one half."""
        address, plan, own = self.local[rank].ctypes.data, self.shape.window, self.shape.local
        dispatch, stage = half.startswith("dispatch"), self._stage
        flight = slot if dispatch else self.config.num_slots + stage
        signature = Signature(OpKind.STAGED_DISPATCH if dispatch else OpKind.STAGED_COMBINE, self.layout, self.shape.token_type, 0,
                              slot if dispatch else stage, self.num_topk, self.shape.row_bytes // 16)
        values = {"flight": address + own.flight(flight), "flying": plan.flight(flight), "arrived": plan.arrival(slot)}
        if not dispatch:
            values |= {"staging": plan.stage(stage), "released": plan.release(stage), "copied": address + own.copy(stage)}
        grids = self.grids
        if half == "dispatch_complete":
            self.grids = [(self.complete_blocks or blocks, warps) for blocks, warps in grids]
        self._launch_signed(half, rank, slot, handle, status, signature, values, **tensors)
        self.grids = grids


class StagedRankMajorProgram(StagedProgram, RankMajorProgram):
    """The same for RANK_MAJOR."""
