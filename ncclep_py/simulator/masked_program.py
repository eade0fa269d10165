"""`Program` for groups with ``enable_mask``: what every rank ended each operation with, and the oracle under the masks they agreed on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ncclep_py.config import GroupConfig
from ncclep_py.errors import Code, ErrorRecord
from ncclep_py.kernels import ll_mask_clean, ll_masked_combine, ll_masked_dispatch, ll_masked_rank_major_dispatch
from ncclep_py.reference import ll_expert_major_combine, ll_expert_major_dispatch, ll_rank_major_combine, ll_rank_major_dispatch
from ncclep_py.signature import OpKind, Signature
from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.program import POISON, Combined, Dispatched, Program, _same
from ncclep_py.simulator.rank_major_program import RankMajorProgram

__all__ = ["Ended", "MaskedProgram", "MaskedRankMajorProgram"]


@dataclasses.dataclass
class Ended:
    """One operation: ``(mask, epoch, error code)`` per rank that ended it; the code 0 for none."""

    what: Dispatched | Combined | str
    ranks: dict[int, tuple[int, int, int]]

    def members(self) -> list[int]:
        """Ranks that took part to the end."""
        return sorted(r for r, (mask, _, code) in self.ranks.items() if not code and not mask >> r & 1)

    def mask(self) -> int:
        """The mask all members agree on; ``AssertionError`` if they do not."""
        found = {self.ranks[r][:2] for r in self.members()}
        assert len(found) == 1, f"members disagree about (mask, epoch): { {r: self.ranks[r] for r in self.members()} }"
        mask, = {m for m, _ in found}
        assert not any(mask >> r & 1 for r in self.members())
        return mask


class MaskedProgram(Program):
    """Attributes:
        ended: all operations enqueued, with what they ended with.
        notices: per rank, the async error.
    """

    def __init__(self, sim: Simulator, config: GroupConfig, num_tokens: Sequence[int], *,
                 make_dispatch: Callable = ll_masked_dispatch.make_ll_masked_dispatch,
                 make_combine: Callable = ll_masked_combine.make_ll_masked_combine,
                 make_clean: Callable = ll_mask_clean.make_ll_mask_clean, epoch: int = 1, **more: Any) -> None:
        """As `Program`; `config` must have ``enable_mask``."""
        super().__init__(sim, config, num_tokens, make_dispatch=make_dispatch, make_combine=make_combine, epoch=epoch, **more)
        self.clean_kernel = make_clean(self.shape, sim.vocabulary)
        self.records = [np.zeros(16, np.int64) for _ in self.ranks]
        self.ended: list[Ended] = []
        assert self.shape.local.members is not None
        self.words = self.shape.local.members
        for rank in self.ranks:
            sim.register(self.records[rank], "record", rank)
            self.local_word(rank, self.words.clean_epoch)[:] = epoch

    def local_word(self, rank: int, offset: int) -> np.ndarray:
        """A word of a rank's local block."""
        return self.local[rank][offset:offset + 8].view(np.uint64)

    # ---- operations --------------------------------------------------------------------------------------------------------
    def dispatch(self, slot: int = 0, topk_idx: Sequence[torch.Tensor] | None = None, ranks: Sequence[int] | None = None, handle: int | None = None,
                 status: int = 0) -> Dispatched:
        """Enqueue a dispatch of random tokens into `slot`."""
        d = super().dispatch(slot, topk_idx, ranks, handle, status)
        self._look(d, ranks)
        return d

    def experts(self, d: Dispatched, ranks: Sequence[int] | None = None) -> None:
        """Enqueue experts; the rows they touch are known only when they run."""
        for rank in self.ranks if ranks is None else ranks:
            rows: list[tuple[int, int]] = []
            self.sim.host(rank, functools.partial(self._found, d, rank, rows), reads=[(d.counters[rank].ctypes.data, d.counters[rank].nbytes)],
                          label="counters")
            self.sim.host(rank, functools.partial(self._run_experts, d, rank), reads=rows, writes=rows, label="experts")

    def combine(self, d: Dispatched, ranks: Sequence[int] | None = None, slot: int | None = None) -> Combined:
        """Enqueue a combine of what the experts left, with random weights."""
        weights = [torch.rand(t, self.num_topk, generator=self.rng) for t in self.num_tokens]
        c = Combined([torch.full((t, self.config.hidden), 7.0).to(self.dtype) for t in self.num_tokens], weights)
        c.dispatched = d   # type: ignore[attr-defined]
        for rank in self.ranks if ranks is None else ranks:
            self._launch("combine", rank, d.slot if slot is None else slot, d.handle, 0, weights=weights[rank], out=c.out[rank])
        self.combined.append(c)
        self._look(c, ranks)
        return c

    def clean(self, ranks: Sequence[int] | None = None) -> Ended:
        """Enqueue ``mask_clean``."""
        kind = Signature(OpKind.CLEAN, 0, self.shape.token_type, 0, 0, self.num_topk, self.shape.row_bytes // 16).pack()
        for rank in self.ranks if ranks is None else ranks:
            self.sim.launch(rank, self.clean_kernel, self.clean_values(rank, kind), 1, label="clean")
        return self._look("clean", ranks)

    def clean_values(self, rank: int, kind: int) -> tuple[int, ...]:
        """What the kernel gets; `kind`: its signature."""
        return self.window, rank, self.local[rank].ctypes.data, kind, self.config.num_slots, 0

    # ---- results -----------------------------------------------------------------------------------------------------------
    def check(self, everybody: bool = False) -> None:
        """``AssertionError`` unless members of every operation agree and have what the oracle says; `everybody`: all ranks took part in all."""
        self.check_agreement(everybody)
        expected: dict[int, list] = {}
        for ended in self.ended:
            if not ended.members():
                continue
            mask = ended.mask()
            masked = [r for r in self.ranks if mask >> r & 1]
            if isinstance(ended.what, Dispatched):
                d = ended.what
                expected[id(d)] = want = self._oracle(d, masked)
                self._check_dispatch(d, want, ended)
            elif isinstance(ended.what, Combined):
                d = ended.what.dispatched   # type: ignore[attr-defined]
                want = expected[id(d)]
                planes = [e.tokens.clone() for e in want]
                for rank in self.ranks if id(d) in self.ran else ():
                    for plane, count in enumerate(self._counts(want[rank]).tolist()):
                        planes[rank][plane, :count] = self._expert(planes[rank][plane, :count], plane)
                sums = self._sums(planes, [e.rows for e in want], ended.what.expected, masked)
                for rank in ended.members():
                    assert _same(ended.what.out[rank], sums[rank]), f"combine, mask {mask:b}, rank {rank}"

    def check_agreement(self, everybody: bool = False) -> None:
        """``AssertionError`` unless members of every operation agree on the mask and the epoch, and whoever failed was masked.

        Who pulls rows while the others give up on it (they wait for its next operation) fails in an operation that the others completed with it.
        """
        last = 0
        for n, ended in reversed(list(enumerate(self.ended))):
            assert not everybody or ended.members() == list(self.ranks), f"operation {n}: {ended.ranks}"
            if ended.members():
                mask = ended.mask()
                last = mask | (0 if ended.what == "clean" else last)
                for rank, (_, _, code) in ended.ranks.items():
                    assert not code or (code == Code.EXCLUDED and last >> rank & 1), f"operation {n}: rank {rank} failed with {code}: {ended.ranks}"

    def notice(self, rank: int) -> ErrorRecord | None:
        """The async error of a rank, taken out."""
        found = ErrorRecord.read(self.records[rank][8:])
        self.records[rank][8:] = 0
        return found

    # ---- inside ------------------------------------------------------------------------------------------------------------
    ran: set[int] = set()

    def _oracle(self, d: Dispatched, masked: list[int]) -> list:
        """What the oracle says about a dispatch."""
        return ll_expert_major_dispatch(d.tokens, d.topk_idx, num_experts=self.config.num_experts,
                                        max_dispatch_tokens_per_rank=self.config.max_dispatch_tokens_per_rank, masked=masked)

    @staticmethod
    def _sums(planes: list[torch.Tensor], rows: list[torch.Tensor], weights: list[torch.Tensor], masked: list[int]) -> list[torch.Tensor]:
        """What the oracle says about a combine."""
        return ll_expert_major_combine(planes, rows, weights, masked=masked)

    @staticmethod
    def _counts(want: Any) -> torch.Tensor:
        """Rows of each plane."""
        return want.expert_counters

    def _check_dispatch(self, d: Dispatched, want: list, ended: Ended) -> None:
        for rank in ended.members():
            assert d.counters[rank].tolist() == want[rank].expert_counters.tolist(), f"counters of rank {rank}: {ended.ranks}"
            for local, count in enumerate(want[rank].expert_counters.tolist()) if rank in d.received else ():
                got = d.received[rank][local]
                assert _same(got[:count], want[rank].tokens[local, :count]), f"rows of rank {rank} expert {local}: {ended.ranks}"
                assert not self.sim.poison or bool((got[count:].view(torch.uint8) == POISON).all()), f"rank {rank} expert {local}: stray rows"

    def _look(self, what: Dispatched | Combined | str, ranks: Sequence[int] | None) -> Ended:
        """Enqueue a look at mask, epoch and record."""
        ended = Ended(what, {})
        for rank in self.ranks if ranks is None else ranks:
            at = self.local[rank].ctypes.data
            self.sim.host(rank, functools.partial(self._note, ended, rank), reads=[(at + self.words.mask, 8), (at + self.shape.local.epoch, 8)],
                          label="look")
        self.ended.append(ended)
        return ended

    def _note(self, ended: Ended, rank: int) -> None:
        record = ErrorRecord.read(self.records[rank])
        code = int(self.local_word(rank, self.words.outcome)[0]) & 0xFFFFFFFF if ended.what == "clean" else record.code if record else 0
        self.records[rank][:8] = 0
        ended.ranks[rank] = (int(self.local_word(rank, self.words.mask)[0]), self.epoch(rank), code)

    def _excluded(self, rank: int) -> bool:
        return bool(int(self.local_word(rank, self.words.mask)[0]) >> rank & 1)

    def _found(self, d: Dispatched, rank: int, rows: list[tuple[int, int]]) -> None:
        """Rows that a dispatch brought."""
        plan = self.shape.window
        for plane, count in enumerate(d.counters[rank].tolist() if not self._excluded(rank) else ()):
            at = self.windows[rank].ctypes.data + plan.slot(d.slot) + plane * self._capacity() * plan.row_bytes
            rows.append((at, max(count, 0) * plan.row_bytes))

    def _capacity(self) -> int:
        """Rows of one plane."""
        return self.shape.window.plane_rows

    def _run_experts(self, d: Dispatched, rank: int) -> None:
        self.ran = self.ran | {id(d)}
        if not self._excluded(rank):
            super()._run_experts(d, rank)


class MaskedRankMajorProgram(MaskedProgram, RankMajorProgram):
    """The same for RANK_MAJOR."""

    def __init__(self, sim: Simulator, config: GroupConfig, num_tokens: Sequence[int], *,
                 make_dispatch: Callable = ll_masked_rank_major_dispatch.make_ll_masked_rank_major_dispatch, **more: Any) -> None:
        super().__init__(sim, config, num_tokens, make_dispatch=make_dispatch, **more)
        self.weights: dict[int, tuple[list[torch.Tensor], bool]] = {}

    def _launch(self, kind: str, rank: int, slot: int, handle: int, status: int, **tensors: object) -> None:
        if kind == "dispatch":
            weights, _ = self.weights.setdefault(handle, ([], bool(tensors["global_ids"])))
            weights.append(tensors["topk_weights"])   # type: ignore[arg-type]
        super()._launch(kind, rank, slot, handle, status, **tensors)

    def _oracle(self, d: Dispatched, masked: list[int]) -> list:
        weights, global_ids = self.weights[d.handle]
        return ll_rank_major_dispatch(d.tokens, d.topk_idx, weights, num_experts=self.config.num_experts, global_ids=global_ids,
                                      max_dispatch_tokens_per_rank=self.config.max_dispatch_tokens_per_rank, masked=masked)

    @staticmethod
    def _sums(planes: list[torch.Tensor], rows: list[torch.Tensor], weights: list[torch.Tensor], masked: list[int]) -> list[torch.Tensor]:
        return ll_rank_major_combine(planes, rows, masked=masked)

    @staticmethod
    def _counts(want: Any) -> torch.Tensor:
        return want.src_rank_counters

    def _capacity(self) -> int:
        return self.config.max_dispatch_tokens_per_rank

    def _check_dispatch(self, d: Dispatched, want: list, ended: Ended) -> None:
        for rank in ended.members():
            assert d.counters[rank].tolist() == want[rank].src_rank_counters.tolist(), f"counters of rank {rank}: {ended.ranks}"
            if rank in d.received:
                self._check_received(d.received[rank], want[rank], f"rank {rank}: {ended.ranks}")
