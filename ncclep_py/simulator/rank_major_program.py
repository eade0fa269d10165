"""`Program` for the RANK_MAJOR layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.errors import ErrorRecord
from ncclep_py.kernels import ll_combine, ll_rank_major_dispatch
from ncclep_py.reference import ll_rank_major_combine
from ncclep_py.reference import ll_rank_major_dispatch as reference_dispatch
from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.program import POISON, Combined, Dispatched, Program, _same

__all__ = ["RankMajorProgram"]


class RankMajorProgram(Program):
    """As `Program`; ``Dispatched.counters`` holds src_rank_counters, ``received`` the slot of a rank as its experts found it."""

    layout = Layout.RANK_MAJOR

    def __init__(self, sim: Simulator, config: GroupConfig, num_tokens: Sequence[int], num_topk: int | None = None, idx_bytes: int = 8,
                 make_dispatch: Callable = ll_rank_major_dispatch.make_ll_rank_major_dispatch, make_combine: Callable = ll_combine.make_ll_combine,
                 **more: object) -> None:
        super().__init__(sim, config, num_tokens, num_topk, idx_bytes, make_dispatch=make_dispatch, make_combine=make_combine, **more)   # type: ignore[arg-type]
        self.parameters = {"dispatch": ll_rank_major_dispatch.PARAMETERS, "combine": ll_combine.PARAMETERS}

    # ---- operations --------------------------------------------------------------------------------------------------------
    def dispatch(self, slot: int = 0, topk_idx: Sequence[torch.Tensor] | None = None, ranks: Sequence[int] | None = None, handle: int | None = None,
                 status: int = 0) -> Dispatched:
        """Enqueue a dispatch of random tokens, ids and weights into `slot`; every other dispatch asks for global ids."""
        self.handles += 1
        experts, idx_type, global_ids = self.config.num_experts, torch.int64 if self.shape.idx_bytes == 8 else torch.int32, self.handles % 2 == 0
        tokens = [torch.randn(t, self.config.hidden, generator=self.rng).to(self.dtype) for t in self.num_tokens]
        ids = topk_idx or [torch.randint(-1, experts, (t, self.num_topk), generator=self.rng) for t in self.num_tokens]
        ids = [i.to(idx_type).contiguous() for i in ids]
        weights = [torch.rand(i.shape, generator=self.rng) for i in ids]
        expected = reference_dispatch(tokens, ids, weights, num_experts=experts, global_ids=global_ids,
                                      max_dispatch_tokens_per_rank=self.config.max_dispatch_tokens_per_rank)
        counters = [np.full(len(self.ranks), -1, np.int32) for _ in self.ranks]
        d = Dispatched(slot, handle or self.handles, tokens, ids, counters, {}, [e.tokens.clone() for e in expected], expected)
        for rank in self.ranks if ranks is None else ranks:
            self._launch("dispatch", rank, slot, d.handle, status, tokens=tokens[rank], topk_idx=ids[rank], topk_weights=weights[rank],
                         src_rank_counters=counters[rank], global_ids=int(global_ids))
        self.dispatched.append(d)
        return d

    def experts(self, d: Dispatched, ranks: Sequence[int] | None = None) -> None:
        """Enqueue experts that read the rows of a dispatch and write theirs in place: row times (1 + source rank)."""
        for planes, e in zip(d.experts, d.expected, strict=True):
            for source, count in enumerate(e.src_rank_counters.tolist()):
                planes[source, :count] = self._expert(planes[source, :count], source)
        for rank in self.ranks if ranks is None else ranks:
            rows = self.rows(d, rank)
            reads = [*rows, *self._routing_bytes(d, rank)]
            self.sim.host(rank, functools.partial(self._run_experts, d, rank), reads=reads, writes=rows, label="experts")

    def combine(self, d: Dispatched, ranks: Sequence[int] | None = None, slot: int | None = None) -> Combined:
        """Enqueue a combine of what the experts left."""
        out = [torch.full((t, self.config.hidden), 7.0).to(self.dtype) for t in self.num_tokens]
        c = Combined(out, ll_rank_major_combine(d.experts, [e.rows for e in d.expected]))
        for rank in self.ranks if ranks is None else ranks:
            self._launch("combine", rank, d.slot if slot is None else slot, d.handle, 0, weights=0, out=out[rank])
        self.combined.append(c)
        return c

    # ---- results -----------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """``AssertionError`` unless every result is bitwise what the oracle says, and no rank failed."""
        for record in map(ErrorRecord.read, self.records):
            assert record is None, record.exception()
        for n, d in enumerate(self.dispatched):
            for rank, want in enumerate(d.expected):
                assert d.counters[rank].tolist() == want.src_rank_counters.tolist(), f"dispatch {n}, counters of rank {rank}"
                if rank in d.received:
                    self._check_received(d.received[rank], want, f"dispatch {n}, rank {rank}")
        for n, c in enumerate(self.combined):
            for rank in self.ranks:
                assert _same(c.out[rank], c.expected[rank]), f"combine {n}, rank {rank}"

    def _check_received(self, slot: torch.Tensor, want: object, where: str) -> None:
        tokens, ids, weights = self._views(slot)
        assert torch.equal(ids, want.topk_idx), f"{where}: ids"   # type: ignore[attr-defined]
        for source, count in enumerate(want.src_rank_counters.tolist()):   # type: ignore[attr-defined]
            for name, got, rows in (("rows", tokens, want.tokens), ("weights", weights, want.topk_weights)):   # type: ignore[attr-defined]
                assert _same(got[source, :count], rows[source, :count]), f"{where}: {name} of source {source}"
                assert not self.sim.poison or bool((got[source, count:].view(torch.uint8) == POISON).all()), f"{where}: stray {name}"

    def rows(self, d: Dispatched, rank: int, spare: bool = False) -> list[tuple[int, int]]:
        """(address, bytes) of the rows that `rank` received, per source; `spare`: of the rows after them."""
        plan, capacity = self.shape.window, self.config.max_dispatch_tokens_per_rank
        at, ranges = self.windows[rank].ctypes.data + plan.slot(d.slot), []
        for source, count in enumerate(d.expected[rank].src_rank_counters.tolist()):
            begin, end = (count, capacity) if spare else (0, count)
            ranges.append((at + (source * capacity + begin) * plan.row_bytes, (end - begin) * plan.row_bytes))
        return ranges

    # ---- inside ------------------------------------------------------------------------------------------------------------
    def _routing_bytes(self, d: Dispatched, rank: int) -> list[tuple[int, int]]:
        """(address, bytes) of all received ids, and of used weights."""
        plan, capacity, width = self.shape.window, self.config.max_dispatch_tokens_per_rank, 4 * self.num_topk
        at = self.windows[rank].ctypes.data + plan.slot(d.slot)
        counts = d.expected[rank].src_rank_counters.tolist()
        return [(at + plan.recv_ids, plan.plane_rows * width)] + [
            (at + plan.recv_weights + source * capacity * width, count * width) for source, count in enumerate(counts)]

    def _views(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, ids and weights in the bytes of a slot."""
        plan, ranks, capacity = self.shape.window, len(self.ranks), self.config.max_dispatch_tokens_per_rank
        width = 4 * self.num_topk * plan.plane_rows

        def part(begin: int, size: int, dtype: torch.dtype) -> torch.Tensor:
            return slot[begin: begin + size].view(dtype).view(ranks, capacity, -1)

        return (part(0, plan.plane_rows * plan.row_bytes, self.dtype), part(plan.recv_ids, width, torch.int32),
                part(plan.recv_weights, width, torch.float32))

    def slot_tensor(self, rank: int, slot: int) -> torch.Tensor:
        """All bytes of a slot."""
        plan = self.shape.window
        return torch.from_numpy(self.windows[rank][plan.slot(slot): plan.slot(slot) + plan.slot_bytes])

    def _run_experts(self, d: Dispatched, rank: int) -> None:
        slot = self.slot_tensor(rank, d.slot)
        d.received.setdefault(rank, slot.clone())
        planes = self._views(slot)[0]
        for source, count in enumerate(d.counters[rank].tolist()):
            if count > 0:
                planes[source, :count] = self._expert(planes[source, :count], source)
