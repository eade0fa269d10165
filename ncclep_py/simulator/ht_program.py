"""A toy HIGH_THROUGHPUT group on the simulator: operations enqueued up front, and what the oracle says about their results. See ``program``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ncclep_py import reference as ref
from ncclep_py.config import GroupConfig, Layout
from ncclep_py.errors import Code, ErrorRecord, Phase
from ncclep_py.kernels import ht_combine, ht_count, ht_dispatch, ht_prepare
from ncclep_py.kernels.ht_shape import HTShape
from ncclep_py.signature import OpKind, Signature
from ncclep_py.simulator.engine import POISON, Simulator
from ncclep_py.simulator.program import _same

__all__ = ["HTProgram"]

MODULES: dict[str, Any] = {"count": ht_count, "prepare": ht_prepare, "dispatch": ht_dispatch, "combine": ht_combine}
FACTORIES: dict[str, Callable] = {"count": ht_count.make_ht_count, "prepare": ht_prepare.make_ht_prepare,
                                  "dispatch": ht_dispatch.make_ht_dispatch, "combine": ht_combine.make_ht_combine}


@dataclasses.dataclass
class _Routing:
    """One update: ids and oracle's map, counters as the kernels wrote them."""

    ids: list[torch.Tensor]
    plan: Any
    counters: list[dict[str, np.ndarray]]


class HTProgram:
    """Ranks of one group; every method enqueues one step on all ranks (or those named). Handle i uses slot i."""

    modules, factories = MODULES, FACTORIES

    def __init__(self, sim: Simulator, config: GroupConfig, layout: Layout, num_tokens: Sequence[int], num_topk: int | None = None,
                 idx_bytes: int = 8, alignment: int = 0, int_bytes: int = 4, global_ids: bool = False, epoch: int = 1,
                 grids: Sequence[tuple[int | None, int | None]] | None = None, seed: int = 0, **factories: Callable) -> None:
        """Memory and kernels; `factories` replaces kernel factories (count, prepare, dispatch, combine)."""
        self.sim, self.config, self.layout, self.num_tokens, self.ranks = sim, config, layout, list(num_tokens), range(sim.num_ranks)
        self.num_topk, self.int_bytes, self.global_ids, self.alignment = num_topk or config.num_topk, int_bytes, global_ids, alignment
        self.grids = grids or [(None, None)] * sim.num_ranks
        self.shapes = [self._shape(idx_bytes, layout, alignment, b or sim.blocks) for b, _ in self.grids]
        self.plan = self.shapes[0].window
        self.dtype, self.rng = config.token_type.torch_dtype(), torch.Generator().manual_seed(seed)
        made = self.factories | factories
        self.kernels = [{name: make(shape, sim.vocabulary) for name, make in made.items()} for shape in self.shapes]
        plans = [self._plans(rank) for rank in self.ranks]
        self.windows = [np.zeros(plans[0][0][0] + 256, np.uint8) for _ in self.ranks]
        self.windows = [w[-w.ctypes.data % 256:][:plans[0][0][0]] for w in self.windows]
        for window in self.windows:
            window[:self.plan.slots].view(np.uint64)[:] = (epoch - 1 & 0xFFFFFFFF) << 32
        self.window = sim.create_window(self.windows, plans[0][0][1])
        self.local = [np.zeros(local[0], np.uint8) for _, local, _ in plans]
        self.maps = [[np.zeros(maps[0], np.uint8) for _ in range(config.num_slots)] for _, _, maps in plans]
        self.records = [np.zeros(8, np.int64) for _ in self.ranks]
        for rank in self.ranks:
            self.local[rank].view(np.uint64)[0] = epoch
            sim.register(self.local[rank], "LOCAL", rank, plans[rank][1][1])
            sim.register(self.records[rank], "record", rank)
            for i, maps in enumerate(self.maps[rank]):
                sim.register(maps, f"MAPS{i}", rank, plans[rank][2][1])
        self.routings: dict[int, _Routing] = {}   # the newest of each handle
        self.overflows = False
        self.generations: dict[int, int] = {}   # of each handle's newest dispatch
        self.expected: dict[int, tuple[list[ref.HTDispatch], bool]] = {}   # of each handle's newest dispatch
        self.written: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}   # by its experts
        self.checks: list[Callable[[], None]] = []

    def _shape(self, idx_bytes: int, layout: Layout, alignment: int, blocks: int) -> HTShape:
        return HTShape.build(self.config, self.sim.num_ranks, self.num_topk, idx_bytes, layout, alignment, blocks)

    def _plans(self, rank: int) -> tuple[Any, Any, Any]:
        """(bytes, regions) of the window, the local block and a handle's maps."""
        shape = self.shapes[rank]
        return ((shape.window.total_bytes, shape.window.regions()), (shape.local.total_bytes, shape.local.regions()),
                (shape.maps.total_bytes, shape.maps.regions()))

    def _combined(self, plan: Any, rows: list[torch.Tensor], grads: list[torch.Tensor] | None) -> list[ref.HTCombine]:
        """What the oracle says a combine brings."""
        return (ref.ht_flat_combine if self.layout is Layout.FLAT else ref.ht_expert_major_combine)(plan, rows, grads)

    # ---- operations --------------------------------------------------------------------------------------------------------
    def update(self, handle: int = 0, ids: Sequence[torch.Tensor] | None = None, ranks: Sequence[int] | None = None, status: int = 0) -> None:
        """Enqueue an update with random ids, about one in eight of them dropped and some of them doubled."""
        experts, config, shape = self.config.num_experts, self.config, self.shapes[0]
        made = ids or [torch.randint(-1, experts, (t, self.num_topk), generator=self.rng) for t in self.num_tokens]
        made = [i.to(torch.int64 if shape.idx_bytes == 8 else torch.int32).contiguous() for i in made]
        budget = config.max_recv_tokens_per_rank or None
        plan = ref.ht_flat_map(made, num_experts=experts, max_recv_tokens_per_rank=budget) if self.layout is Layout.FLAT else \
            ref.ht_expert_major_map(made, num_experts=experts, alignment=self.alignment, max_recv_tokens_per_rank=budget)
        local, dtype = experts // len(self.ranks), np.int64 if self.int_bytes == 8 else np.int32
        counters = [{"expert_counters": np.full(local, -7, dtype), "expert_offsets": np.full(local, -7, dtype), "unpadded": np.full(local, -7, dtype),
                     "total": np.full(1, -7, dtype)} for _ in self.ranks]
        self.routings[handle] = routing = _Routing(made, plan, counters)
        self.overflows |= any(n > self.plan.recv_rows for n in plan.recv_total_counter)
        for rank in self.ranks if ranks is None else ranks:
            ids_at = self._register("topk_idx", made[rank], rank)
            maps = self.maps[rank][handle].ctypes.data
            self._launch("count", rank, {"maps": maps, "topk_idx": ids_at, "num_tokens": self.num_tokens[rank]})
            addresses = {name: self._register(name, tensor, rank) for name, tensor in counters[rank].items()}
            self._launch("prepare", rank, addresses | {
                "maps": maps, "topk_idx": ids_at, "num_tokens": self.num_tokens[rank], "int_bytes": self.int_bytes, "handle": (handle + 1) << 32,
                "signature": self._signature(OpKind.UPDATE, 0), "status": status})
        if ranks is None and not status:
            self.checks.append(functools.partial(self._check_counters, routing))

    def dispatch(self, handle: int = 0, backward: bool = False, ranks: Sequence[int] | None = None) -> None:
        """Enqueue a dispatch of random rows."""
        routing = self.routings[handle]
        self.generations[handle] = self.generations.get(handle, 0) + 1
        tokens = [torch.randn(t, self.config.hidden, generator=self.rng).to(self.dtype) for t in self.num_tokens]
        weights = None if backward else [torch.rand(i.shape, generator=self.rng) for i in routing.ids]
        if self.layout is Layout.FLAT:
            expected = ref.ht_flat_dispatch(routing.plan, tokens, weights, global_ids=self.global_ids)
        else:
            expected = ref.ht_expert_major_dispatch(routing.plan, tokens, weights)
        for rank in self.ranks if ranks is None else ranks:
            values = {"tokens": self._register("tokens", tokens[rank], rank), "scales": 0, "rows": self.plan.recv_rows,
                      "weights": self._register("weights", weights[rank], rank) if weights else 0, "global_ids": int(self.global_ids),
                      "cleared": self.plan.recv_rows, "forward": int(not backward),
                      "signature": self._signature_of_dispatch(handle, backward)}
            self._launch("dispatch", rank, values | self._of_handle(rank, handle))
        self.expected[handle] = expected, backward

    def experts(self, handle: int = 0) -> None:
        """Enqueue experts that read what the handle's last dispatch brought and write random rows and weight gradients in its place."""
        routing, rows, grads = self.routings[handle], [], []
        expected, backward = self.expected[handle]
        for rank in self.ranks:
            n = len(routing.plan.row_src[rank])
            shape = (self.plan.recv_rows, self.num_topk) if self.layout is Layout.FLAT else (self.plan.recv_rows,)
            received: list[Any] = []
            rows.append(torch.randn(self.plan.recv_rows, self.config.hidden, generator=self.rng).to(self.dtype))
            grads.append(torch.randn(shape, generator=self.rng))
            ranges = self._ranges(rank, handle, n)
            work = functools.partial(self._run_experts, rank, handle, received, rows[-1][:n], grads[-1][:n])
            self.sim.host(rank, work, reads=ranges, writes=ranges, label="experts")
            self.checks.append(functools.partial(self._check_received, received, expected[rank], n, backward, rank))
        self.written[handle] = rows, grads

    def combine(self, handle: int = 0, backward: bool = False, ranks: Sequence[int] | None = None) -> None:
        """Enqueue a combine of what the experts wrote last."""
        routing, (rows, grads) = self.routings[handle], self.written.get(handle, self._nothing())
        expected = self._combined(routing.plan, rows, grads if backward else None)
        for rank in self.ranks if ranks is None else ranks:
            out = torch.full((self.num_tokens[rank], self.config.hidden), 7.0).to(self.dtype)
            grad = torch.full(routing.ids[rank].shape, 7.0)
            values = {"out": self._register("out", out, rank), "grads": self._register("grads", grad, rank) if backward else 0,
                      "rows": self.plan.recv_rows,
                      "signature": self._signature(OpKind.COMBINE, handle, backward)}
            self._launch("combine", rank, values | self._of_handle(rank, handle))
            if handle in self.written:
                self.checks.append(functools.partial(self._check_combined, out, grad, expected[rank], backward, rank))

    def play(self, text: str) -> None:
        """Enqueue a sequence such as ``U0 D0 X0 C0 B0 X0 G0``: update, dispatch, experts, combine, and the last two backward, with the handle."""
        for step in text.split():
            handle = int(step[1:] or 0)
            if step[0] in "DB":
                self.dispatch(handle, backward=step[0] == "B")
            elif step[0] in "CG":
                self.combine(handle, backward=step[0] == "G")
            else:
                (self.update if step[0] == "U" else self.experts)(handle)

    # ---- results -----------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """``AssertionError`` unless every result is bitwise the oracle's, and no rank failed but by an overflow the oracle has, too."""
        trap = self.overflows and self.shapes[0].trap
        for record in map(ErrorRecord.read, self.records):
            assert record is None or (trap and record.code == Code.OVERFLOW and record.phase == Phase.COUNTS), record.exception()
            assert record is not None or not trap, "an overflow was not recorded"
        for check in self.checks:
            check()

    def epoch(self, rank: int) -> int:
        """Epoch of the next operation of `rank`."""
        return int(self.local[rank].view(np.uint64)[0])

    def record(self, rank: int) -> ErrorRecord | None:
        """The error record of `rank`, taken out."""
        found = ErrorRecord.read(self.records[rank])
        self.records[rank][:] = 0
        return found

    def _check_counters(self, routing: _Routing) -> None:
        for rank in self.ranks:
            got, plan = routing.counters[rank], routing.plan
            assert got["expert_counters"].tolist() == plan.expert_counters[rank].tolist(), f"expert_counters of rank {rank}"
            assert int(got["total"][0]) == plan.recv_total_counter[rank], f"recv_total_counter of rank {rank}"
            if self.layout is Layout.EXPERT_MAJOR:
                assert got["expert_offsets"].tolist() == plan.expert_offsets[rank].tolist(), f"expert_offsets of rank {rank}"
                assert got["unpadded"].tolist() == plan.expert_counts_unpadded[rank].tolist(), f"unpadded counts of rank {rank}"

    def _check_received(self, received: list[Any], want: Any, rows: int, backward: bool, rank: int) -> None:
        tokens, idx, weights, raw = received
        assert _same(tokens[:rows], want.tokens[:rows]), f"rows of rank {rank}"
        assert not self.sim.poison or bool((raw == POISON).all()), f"stray rows at rank {rank}"
        if not backward:
            used = len(want.topk_weights) if self.layout is Layout.FLAT else rows
            assert _same(weights[:used], want.topk_weights[:used]), f"weights of rank {rank}"
            if self.layout is Layout.FLAT:
                assert torch.equal(idx[:used], want.topk_idx[:used]), f"ids of rank {rank}"

    def _check_combined(self, out: torch.Tensor, grad: torch.Tensor, want: Any, backward: bool, rank: int) -> None:
        assert _same(out, want.tokens), f"combined rows of rank {rank}"
        assert not backward or _same(grad, want.topk_weights), f"gradients of rank {rank}"

    # ---- inside ------------------------------------------------------------------------------------------------------------
    def slot_tensors(self, rank: int, slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, ids and weights of a slot."""
        plan, k, raw = self.plan, self.num_topk, torch.from_numpy(self.windows[rank])
        at, n = plan.slot(slot), plan.recv_rows
        rows = raw[at:at + n * plan.row_bytes].view(self.dtype).view(n, -1)
        idx = raw[at + plan.slot_idx:at + plan.slot_idx + n * k * 8].view(torch.int64).view(n, k)
        flat = self.layout is Layout.FLAT
        weights = raw[at + plan.slot_weights:at + plan.slot_weights + n * 4 * (k if flat else 1)].view(torch.float32)
        return rows, idx, weights.view(n, k) if flat else weights

    def _ranges(self, rank: int, slot: int, rows: int) -> list[tuple[int, int]]:
        """(address, bytes) of the used rows and weights of a slot."""
        at, plan = self.windows[rank].ctypes.data + self.plan.slot(slot), self.plan
        return [(at, rows * plan.row_bytes), (at + plan.slot_weights, rows * 4 * (self.num_topk if self.layout is Layout.FLAT else 1))]

    def _nothing(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What experts that do not run write, for combines whose result nobody looks at."""
        n, k = self.plan.recv_rows, self.num_topk
        grads = torch.zeros((n, k) if self.layout is Layout.FLAT else (n,))
        return [torch.zeros(n, self.config.hidden, dtype=self.dtype)] * len(self.ranks), [grads] * len(self.ranks)

    def _run_experts(self, rank: int, slot: int, received: list[Any], rows: torch.Tensor, grads: torch.Tensor) -> None:
        slot_rows, slot_idx, slot_weights = self.slot_tensors(rank, slot)
        received.extend((slot_rows.clone(), slot_idx.clone(), slot_weights.clone(), slot_rows[len(rows):].clone().view(torch.uint8)))
        slot_rows[:len(rows)], slot_weights[:len(grads)] = rows, grads

    def _register(self, name: str, memory: Any, rank: int) -> int:
        return self.sim.register(memory, name, rank).address

    def _signature(self, kind: OpKind, slot: int, backward: bool = False) -> int:
        shape = self.shapes[0]
        return Signature(kind, self.layout, shape.token_type, 0, slot, self.num_topk, shape.row_bytes // 16, int(self.global_ids),
                         backward=int(backward), alignment=shape.alignment.bit_length() - 1).pack()

    def _signature_of_dispatch(self, handle: int, backward: bool = False) -> int:
        return self._signature(OpKind.DISPATCH, handle, backward)

    def _of_handle(self, rank: int, handle: int) -> dict[str, int]:
        at = self.local[rank].ctypes.data
        return {"maps": self.maps[rank][handle].ctypes.data, "num_tokens": self.num_tokens[rank], "slot": self.plan.slot(handle),
                "rows_window": self.window, "rows_at": self.plan.slot(handle),
                "header": at + self.shapes[rank].local.header(handle), "handle": (handle + 1) << 32 | self.generations.get(handle, 0), "status": 0}

    def _launch(self, kind: str, rank: int, values: dict[str, int]) -> None:
        values = values | {"window": self.window, "rank": rank, "local": self.local[rank].ctypes.data, "record": self.records[rank].ctypes.data,
                           "timeout": self.config.wait_ns}
        blocks, warps = self.grids[rank]
        self.sim.launch(rank, self.kernels[rank][kind], [values[p] for p in self.modules[kind].PARAMETERS], blocks, warps, label=kind)
