"""Our low latency in halves (``send_only``, ``complete``), and where its rows may live, for the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ncclep_py import CombineConfig, CombineOutputs, DispatchConfig, DispatchOutputs, Layout
from ncclep_py.bench.ll_subject import LLSubject
from ncclep_py.testing import bits_equal

if TYPE_CHECKING:
    from ncclep_py.bench.case import Case
    from ncclep_py.bench.timer import Timer
    from ncclep_py.communicator import Communicator

__all__ = ["StagedSubject"]

SEND, PUSH = DispatchConfig(send_only=True), CombineConfig(send_only=True)
LATE_MS, CYCLES_PER_MS, TRIES = 5, 1_800_000, 3


class StagedSubject(LLSubject):
    """``pair`` is four halves. Beside it: fused pairs with rows in plain tensors and in a window of the caller's own; and for how long a combine
    keeps the streams of the others when rank 1 is `LATE_MS` late, fused and in halves."""

    def __init__(self, comm: Communicator, case: Case, trace: bool = False) -> None:
        layout = Layout[case.layout.upper()]
        super().__init__(comm, case, trace, num_staging_slots=2, slot_layout=layout if layout is Layout.RANK_MAJOR else Layout.UNSET)
        rows = self.dispatch().tokens
        self.handle.combine(rows, self.outputs())
        window = self.group.create_window(rows.nbytes).memory
        self.places = {"plain_tensors_pair": torch.zeros_like(rows), "own_window_pair": window[: rows.nbytes].view(rows.dtype).view(rows.shape)}

    @staticmethod
    def why_not(case: Case) -> str:
        """Why it cannot play a case; empty if it can."""
        return "" if case.algorithm == "ll" and case.recipe == "none" else "halves are measured in ll, without a recipe"

    def outputs(self) -> CombineOutputs:
        """Where combined rows go."""
        return CombineOutputs(self.out, None if self.rank_major else self.weights)

    def _pair(self, flush: bool = False, experts: bool = False) -> None:
        received = self.handle.dispatch(self.inputs, config=SEND)
        self.handle.complete()
        if experts and self.checking:
            self.look(received)
        if flush:
            self.flush.zero_()
        self.handle.combine(received.tokens, self.outputs(), PUSH)
        self.handle.complete()

    def placed(self, rows: torch.Tensor) -> DispatchOutputs:
        """A fused pair whose rows are in `rows`."""
        received = self.handle.dispatch(self.inputs, DispatchOutputs(rows))
        self.handle.combine(rows, self.outputs())
        return received

    def check(self) -> bool:
        right = super().check()
        for rows in self.places.values():
            self.out.fill_(float("nan"))
            self.placed(rows)
            self.group.check()
            right &= bits_equal(self.out.cpu(), self.want)
        return right

    def actions(self) -> dict[str, Callable[[], Any]]:
        def action(name: str) -> Callable[[], Any]:
            return lambda: self.placed(self.places[name])

        return {name: action(name) for name in self.places}

    def more_times(self, timer: Timer) -> dict[str, list[float]]:
        return {name: [self._held_us(timer, staged) for _ in range(TRIES)] for name, staged in (("held_fused", False), ("held_halves", True))}

    def _held_us(self, timer: Timer, staged: bool) -> float:
        """How long a combine keeps my stream before the next kernel may run, while rank 1 is late; 0 for rank 1 itself."""
        rows = self.dispatch().tokens
        self.group.check()
        timer.meet()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.comm.rank == 1:
            torch.cuda._sleep(LATE_MS * CYCLES_PER_MS)
        start.record()
        self.handle.combine(rows, self.outputs(), PUSH if staged else None)
        end.record()
        if staged:
            self.handle.complete()
        self.group.check()
        return 0.0 if self.comm.rank == 1 else start.elapsed_time(end) * 1e3
