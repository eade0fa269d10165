"""A toy group on the simulator: all ranks' memory, operations enqueued up front, and what the oracle says about their results.

Used by the tests and by ``scripts/simulate.py``; the product's own host side is ``group`` and ``handle``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.errors import Code, ErrorRecord
from ncclep_py.kernels import ll_combine, ll_dispatch
from ncclep_py.kernels.shape import PLAIN, KernelShape
from ncclep_py.memory_map import FLIGHT_NEXT
from ncclep_py.reference import ll_expert_major_combine, ll_expert_major_dispatch
from ncclep_py.signature import OpKind, Signature
from ncclep_py.simulator.engine import Simulator

__all__ = ["Combined", "Dispatched", "Program"]

POISON = 0xA5


@dataclasses.dataclass
class Dispatched:
    """One dispatch, with one entry per rank in every list.

    Attributes:
        slot: payload slot.
        handle: handle id.
        tokens: ``[T, H]``.
        topk_idx: ``[T, K]``.
        counters: int32 ``[L]``, written by the kernel.
        received: int16 or int32 view ``[L, R * M, ...]`` of the slot as the experts found it, filled in by `Program.experts`.
        experts: what the experts left in the slot, ``[L, R * M, H]``, according to the oracle.
        expected: the oracle's result.
    """

    slot: int
    handle: int
    tokens: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    counters: list[np.ndarray]
    received: dict[int, torch.Tensor]
    experts: list[torch.Tensor]
    expected: list


@dataclasses.dataclass
class Combined:
    """One combine: per rank the output ``[T, H]`` and what the oracle says it is."""

    out: list[torch.Tensor]
    expected: list[torch.Tensor]


class Program:
    """Ranks of one group; methods enqueue one operation on all ranks (or those named) and return what to check after ``sim.run()``.

    Attributes:
        local: per rank, the bytes of its local block.
        records: per rank, the words of its error record.
        combined: all combines enqueued.
        dispatched: all dispatches enqueued.
    """

    layout = Layout.EXPERT_MAJOR
    wire = PLAIN

    def __init__(self, sim: Simulator, config: GroupConfig, num_tokens: Sequence[int], num_topk: int | None = None, idx_bytes: int = 8,
                 epoch: int = 1, grids: Sequence[tuple[int | None, int | None]] | None = None, seed: int = 0,
                 make_dispatch: Callable = ll_dispatch.make_ll_dispatch, make_combine: Callable = ll_combine.make_ll_combine) -> None:
        """Memory and kernels of a group.

        Args:
            sim: the machine.
            config: the group's config.
            num_tokens: tokens of each rank in every operation.
            num_topk: K of the handles; `config.num_topk` if None.
            idx_bytes: 4 or 8, bytes of an expert id.
            epoch: epoch of the first operation.
            grids: (blocks, warps) of each rank's launches; the simulator's default if None.
            seed: seed of the data.
            make_dispatch, make_combine: kernel factories.
        """
        self.sim, self.config, self.num_tokens, self.ranks = sim, config, list(num_tokens), range(sim.num_ranks)
        self.num_topk = num_topk or config.num_topk
        self.shape = self.make_shape(KernelShape.build(config, sim.num_ranks, self.num_topk, idx_bytes, self.layout, self.wire))
        self.dtype, self.rng = config.token_type.torch_dtype(), torch.Generator().manual_seed(seed)
        self.grids = grids or [(None, None)] * sim.num_ranks
        self.kernels = {"dispatch": make_dispatch(self.shape, sim.vocabulary), "combine": make_combine(self.shape, sim.vocabulary)}
        self.parameters = {"dispatch": ll_dispatch.PARAMETERS, "combine": ll_combine.PARAMETERS}
        plan = self.shape.window
        window_bytes, window_regions, local_bytes, local_regions = self.sizes()
        self.windows = [np.zeros(window_bytes, np.uint8) for _ in self.ranks]
        for window in self.windows:   # as an earlier operation would have left them
            window[:plan.slots].view(np.uint64)[:] = (epoch - 1 & 0xFFFFFFFF) << 32
            window[plan.released:plan.released + plan.num_staging * sim.num_ranks * 8].view(np.uint64)[:] = epoch << 32
        self.window = sim.create_window(self.windows, window_regions)
        self.local = [np.zeros(local_bytes, np.uint8) for _ in self.ranks]
        self.records = [np.zeros(8, np.int64) for _ in self.ranks]
        for rank in self.ranks:
            self.local[rank].view(np.uint64)[0] = epoch
            for i in range(plan.num_staging):
                at = self.shape.local.flight(config.num_slots + i) + FLIGHT_NEXT
                self.local[rank][at:at + 8].view(np.uint64)[0] = epoch
            sim.register(self.local[rank], "LOCAL", rank, local_regions)
            sim.register(self.records[rank], "record", rank)
        self.handles = 0
        self.dispatched: list[Dispatched] = []
        self.combined: list[Combined] = []

    def make_shape(self, shape: KernelShape) -> KernelShape:
        """The shape of the kernels, given that of one team."""
        return shape

    def sizes(self) -> tuple[int, list[tuple[str, int, int]], int, list[tuple[str, int, int]]]:
        """Bytes and regions of the window and of the local block."""
        return self.shape.window.total_bytes, self.shape.window.regions(), self.shape.local.total_bytes, self.shape.local.regions()

    # ---- operations --------------------------------------------------------------------------------------------------------
    def dispatch(self, slot: int = 0, topk_idx: Sequence[torch.Tensor] | None = None, ranks: Sequence[int] | None = None, handle: int | None = None,
                 status: int = 0) -> Dispatched:
        """Enqueue a dispatch of random tokens into `slot`."""
        self.handles += 1
        experts, idx_type = self.config.num_experts, torch.int64 if self.shape.idx_bytes == 8 else torch.int32
        tokens = [torch.randn(t, self.config.hidden, generator=self.rng).to(self.dtype) for t in self.num_tokens]
        ids = topk_idx or [torch.randint(-1, experts, (t, self.num_topk), generator=self.rng) for t in self.num_tokens]
        ids = [i.to(idx_type).contiguous() for i in ids]
        expected = ll_expert_major_dispatch(tokens, ids, num_experts=experts, max_dispatch_tokens_per_rank=self.config.max_dispatch_tokens_per_rank)
        counters = [np.full(experts // len(self.ranks), -1, np.int32) for _ in self.ranks]
        d = Dispatched(slot, handle or self.handles, tokens, ids, counters, {}, [e.tokens.clone() for e in expected], expected)
        for rank in self.ranks if ranks is None else ranks:
            self._launch("dispatch", rank, slot, d.handle, status, tokens=tokens[rank], topk_idx=ids[rank], expert_counters=counters[rank])
        self.dispatched.append(d)
        return d

    def experts(self, d: Dispatched, ranks: Sequence[int] | None = None) -> None:
        """Enqueue experts that read the rows of a dispatch and write theirs in place: row times (1 + local expert)."""
        for planes, e in zip(d.experts, d.expected, strict=True):
            for local, count in enumerate(e.expert_counters.tolist()):
                planes[local, :count] = self._expert(planes[local, :count], local)
        for rank in self.ranks if ranks is None else ranks:
            rows = self.rows(d, rank)
            self.sim.host(rank, functools.partial(self._run_experts, d, rank), reads=rows, writes=rows, label="experts")

    def combine(self, d: Dispatched, ranks: Sequence[int] | None = None, slot: int | None = None) -> Combined:
        """Enqueue a combine of what the experts left, with random weights."""
        weights = [torch.rand(t, self.num_topk, generator=self.rng) for t in self.num_tokens]
        out = [torch.full((t, self.config.hidden), 7.0).to(self.dtype) for t in self.num_tokens]
        c = Combined(out, ll_expert_major_combine(d.experts, [e.rows for e in d.expected], weights))
        for rank in self.ranks if ranks is None else ranks:
            self._launch("combine", rank, d.slot if slot is None else slot, d.handle, 0, weights=weights[rank], out=out[rank])
        self.combined.append(c)
        return c

    def play(self, text: str) -> None:
        """Enqueue a sequence such as ``D0 X0 C0 D1``: dispatch, experts, combine with the slot."""
        live: dict[int, Dispatched] = {}
        for step in text.split():
            slot = int(step[1:] or 0)
            if step[0] == "D":
                live[slot] = self.dispatch(slot)
            elif step[0] == "X":
                self.experts(live[slot])
            else:
                self.combine(live[slot])

    # ---- results -----------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """``AssertionError`` unless every result is bitwise what the oracle says, and no rank failed but by an overflow the oracle has, too."""
        overflow = any(e.overflow for d in self.dispatched for e in d.expected)
        for record in map(ErrorRecord.read, self.records):
            assert record is None or (overflow and record.code == Code.OVERFLOW), record.exception()
        for n, d in enumerate(self.dispatched):
            for rank, want in enumerate(d.expected):
                assert d.counters[rank].tolist() == want.expert_counters.tolist(), f"dispatch {n}, counters of rank {rank}"
                if rank in d.received:
                    for local, count in enumerate(want.expert_counters.tolist()):
                        got = d.received[rank][local]
                        assert _same(got[:count], want.tokens[local, :count]), f"dispatch {n}, rows of rank {rank} expert {local}"
                        assert not self.sim.poison or bool((got[count:].view(torch.uint8) == POISON).all()), f"dispatch {n}, rank {rank}: stray rows"
        for n, c in enumerate(self.combined):
            for rank in self.ranks:
                assert _same(c.out[rank], c.expected[rank]), f"combine {n}, rank {rank}"

    def epoch(self, rank: int) -> int:
        """Epoch of the next operation of `rank`."""
        return int(self.local[rank].view(np.uint64)[0])

    def record(self, rank: int) -> ErrorRecord | None:
        """The error record of `rank`, taken out."""
        found = ErrorRecord.read(self.records[rank])
        self.records[rank][:] = 0
        return found

    def rows(self, d: Dispatched, rank: int, spare: bool = False) -> list[tuple[int, int]]:
        """(address, bytes) of the rows that `rank` received, per expert; `spare`: of the rows after them."""
        plan, ranges = self.shape.window, []
        for local, count in enumerate(d.expected[rank].expert_counters.tolist()):
            at = self.windows[rank].ctypes.data + plan.slot(d.slot) + local * plan.plane_rows * plan.row_bytes
            begin, end = (count, plan.plane_rows) if spare else (0, count)
            ranges.append((at + begin * plan.row_bytes, (end - begin) * plan.row_bytes))
        return ranges

    # ---- inside ------------------------------------------------------------------------------------------------------------
    def slot_tensor(self, rank: int, slot: int) -> torch.Tensor:
        """View ``[L, R * M, H]`` of a slot."""
        plan = self.shape.window
        size = plan.num_local_experts * plan.plane_rows * plan.row_bytes
        raw = torch.from_numpy(self.windows[rank][plan.slot(slot):plan.slot(slot) + size])
        return raw.view(self.dtype).view(plan.num_local_experts, plan.plane_rows, self.config.hidden)

    @staticmethod
    def _expert(rows: torch.Tensor, local: int) -> torch.Tensor:
        return (rows.float() * (1 + local)).to(rows.dtype)

    def _run_experts(self, d: Dispatched, rank: int) -> None:
        planes = self.slot_tensor(rank, d.slot)
        d.received.setdefault(rank, planes.clone())
        for local, count in enumerate(d.counters[rank].tolist()):
            if count > 0:
                planes[local, :count] = self._expert(planes[local, :count], local)

    def _launch(self, kind: str, rank: int, slot: int, handle: int, status: int, **tensors: object) -> None:
        signature = Signature(OpKind[kind.upper()], self.layout, self.shape.token_type, 0, slot, self.num_topk, self.shape.row_bytes // 16)
        self._launch_signed(kind, rank, slot, handle, status, signature, {}, **tensors)

    def _launch_signed(self, kind: str, rank: int, slot: int, handle: int, status: int, signature: Signature, more: dict[str, int],
                       **tensors: object) -> None:
        shape, address = self.shape, self.local[rank].ctypes.data
        values = {name: value if isinstance(value, int) else self.sim.register(value, name, rank).address for name, value in tensors.items()}
        values.setdefault("scales", 0)
        values |= {"window": self.window, "rank": rank, "local": address, "record": self.records[rank].ctypes.data, "slot": shape.window.slot(slot),
                   "num_tokens": self.num_tokens[rank], "table": address + shape.local.table(slot), "header": address + shape.local.header(slot),
                   "handle": handle, "signature": signature.pack(), "status": status, "timeout": self.config.wait_ns,
                   "origins": shape.window.origin(slot), "kept": address + shape.local.keep(slot), "flight": 0, "flying": 0,
                   "payload": self.window, "place": shape.window.slot(slot),
                   "arrived": shape.window.arrived} | more
        blocks, warps = self.grids[rank]
        self.sim.launch(rank, self.kernels[kind], [values[p] for p in self.parameters[kind]], blocks, warps, label=kind)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
