"""Ranks of a low-latency group in several teams, for tests. See ``program``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ncclep_py import reference as ref
from ncclep_py.config import GroupConfig, Layout
from ncclep_py.kernels import ll_net_combine, ll_net_dispatch, ll_net_rank_major_dispatch, ll_net_staged
from ncclep_py.kernels.ll_net_shape import LLNetShape
from ncclep_py.kernels.shape import PLAIN, KernelShape, Wire
from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.network import Network
from ncclep_py.simulator.program import Program, _same
from ncclep_py.simulator.rank_major_program import RankMajorProgram
from ncclep_py.simulator.staged_program import StagedProgram

__all__ = ["HALVES", "LLNetProgram", "LLNetRankMajorProgram", "LLNetStagedProgram", "LLNetStagedRankMajorProgram"]

COMBINE: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "combine_send": (ll_net_staged.make_ll_net_combine_send, ll_net_staged.COMBINE_SEND_PARAMETERS),
    "combine_complete": (ll_net_staged.make_ll_net_combine_complete, ll_net_staged.COMBINE_COMPLETE_PARAMETERS),
}
HALVES: dict[Layout, dict[str, tuple[Callable, tuple[str, ...]]]] = {
    Layout.EXPERT_MAJOR: COMBINE | {
        "dispatch_send": (ll_net_staged.make_ll_net_dispatch_send, ll_net_dispatch.PARAMETERS),
        "dispatch_complete": (ll_net_staged.make_ll_net_dispatch_complete, ll_net_staged.DISPATCH_COMPLETE_PARAMETERS)},
    Layout.RANK_MAJOR: COMBINE | {
        "dispatch_send": (ll_net_staged.make_ll_net_rank_major_send, ll_net_rank_major_dispatch.PARAMETERS),
        "dispatch_complete": (ll_net_staged.make_ll_net_rank_major_complete, ll_net_staged.RANK_MAJOR_COMPLETE_PARAMETERS)},
}
"""Kernel factory and parameters of each half of a staged operation."""


class LLNetProgram(Program):
    """`Program` over teams of `team_size` ranks; results must be those of one team."""

    shape: LLNetShape
    dispatches: Any = ll_net_dispatch
    make_dispatch_kernel: Any = staticmethod(ll_net_dispatch.make_ll_net_dispatch)

    def __init__(self, sim: Simulator, config: GroupConfig, num_tokens: Sequence[int], team_size: int, *, make_dispatch: Callable | None = None,
                 make_combine: Callable = ll_net_combine.make_ll_net_combine, wire: Wire = PLAIN, **more: Any) -> None:
        """As `Program`; `wire`: rows of a recipe, dispatched by `dispatch_quantised` and not combined."""
        self.team_size, self.wire = team_size, wire
        contexts = min(config.max_dispatch_tokens_per_rank, 4)
        self.network = Network(sim, team_size, contexts)
        super().__init__(sim, config, num_tokens, make_dispatch=make_dispatch or self.make_dispatch_kernel, make_combine=make_combine, **more)
        self.parameters = {"dispatch": self.dispatches.PARAMETERS, "combine": ll_net_combine.PARAMETERS}

    def make_shape(self, shape: KernelShape) -> LLNetShape:
        return LLNetShape.over(shape, self.config, self.team_size)

    def sizes(self) -> tuple[int, list[tuple[str, int, int]], int, list[tuple[str, int, int]]]:
        net, shape = self.shape.net, self.shape
        return net.total_bytes, shape.window.regions() + net.regions(), net.local_bytes, shape.local.regions() + net.local_regions()

    def dispatch_quantised(self, slot: int = 0) -> None:
        """Enqueue a dispatch of `wire`'s rows (bf16 to be quantised, else bytes as they come) and a look at what arrived."""
        self.handles += 1
        wire, rank_major = self.wire, self.layout is Layout.RANK_MAJOR
        ids = [torch.randint(-1, self.config.num_experts, (t, self.num_topk), generator=self.rng) for t in self.num_tokens]
        weights = [torch.rand(i.shape, generator=self.rng) for i in ids]
        scales: list[Any] = [self._bytes(t, wire.scale_bytes) for t in self.num_tokens]
        tokens = [self._bytes(t, wire.sent_bytes) for t in self.num_tokens]
        sent = list(zip(tokens, scales, strict=True))
        if wire.quantise:
            tokens = [torch.randn(t, self.config.hidden, generator=self.rng).bfloat16() for t in self.num_tokens]
            sent = [ref.quantize_ds_fp8(rows, wire.round_scales) for rows in tokens]
        rows, beside = ([part.contiguous().view(torch.uint8) for part in parts] for parts in zip(*sent, strict=True))
        how: dict[str, Any] = {"num_experts": self.config.num_experts, "scales": beside,
                               "max_dispatch_tokens_per_rank": self.config.max_dispatch_tokens_per_rank}
        expected: list[Any] = (ref.ll_rank_major_dispatch(rows, ids, weights, **how) if rank_major
                               else ref.ll_expert_major_dispatch(rows, ids, **how))
        for rank, want in enumerate(expected):
            counts = want.src_rank_counters if rank_major else want.expert_counters
            counters = np.full(len(counts), -1, np.int32)
            more: dict[str, Any] = {"topk_weights": weights[rank], "src_rank_counters": counters, "global_ids": 0} if rank_major else {
                "expert_counters": counters}
            self._launch("dispatch", rank, slot, self.handles, 0, tokens=tokens[rank], topk_idx=ids[rank], scales=scales[rank], **more)
            look = functools.partial(self._check_arrived, rank, slot, counts.tolist(), counters, want)
            begin = self.windows[rank].ctypes.data + self.shape.window.slot(slot)
            at, ranges = begin, []
            for width in (wire.sent_bytes, wire.scale_bytes):
                planes, capacity = want.tokens.shape[:2]
                ranges += [(at + plane * capacity * width, n * width) for plane, n in enumerate(counts.tolist())]
                at += planes * capacity * width
            self.sim.host(rank, look, reads=ranges, label="experts")

    def _bytes(self, rows: int, width: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, width), generator=self.rng).to(torch.uint8)

    def _check_arrived(self, rank: int, slot: int, counts: list[int], counters: np.ndarray, want: Any) -> None:
        """All received rows and scale rows, by bits."""
        assert counters.tolist() == counts, f"counters of rank {rank}"
        at = self.shape.window.slot(slot)
        for name, rows in (("rows", want.tokens), ("scales", want.scales)):
            held = torch.from_numpy(self.windows[rank][at:at + rows.numel()]).view(rows.shape)
            for plane, n in enumerate(counts):
                assert _same(held[plane, :n], rows[plane, :n]), f"{name} of plane {plane} of rank {rank}"
            at += rows.numel()

    def _launch_signed(self, kind: str, rank: int, slot: int, handle: int, status: int, signature: Any, more: dict[str, int],
                       **tensors: object) -> None:
        remote = self.local[rank].ctypes.data + self.shape.net.slot_remote(slot)
        given = {"comm": self.network.number, "remote": remote, "rows_valid": 1, "messages": self.shape.net.slot_messages(slot),
                 "tags": self.shape.net.tags} | more
        super()._launch_signed(kind, rank, slot, handle, status, signature, given, **tensors)


class LLNetRankMajorProgram(LLNetProgram, RankMajorProgram):
    """`RankMajorProgram` over teams."""

    dispatches = ll_net_rank_major_dispatch
    make_dispatch_kernel = staticmethod(ll_net_rank_major_dispatch.make_ll_net_rank_major_dispatch)


class LLNetStagedProgram(StagedProgram, LLNetProgram):
    """The same with staged operations; give `team_size` by name."""

    complete_blocks = None

    def halves(self) -> dict[str, tuple[Callable, tuple[str, ...]]]:
        return HALVES[self.layout]

    def _launch_signed(self, kind: str, rank: int, slot: int, handle: int, status: int, signature: Any, more: dict[str, int],
                       **tensors: object) -> None:
        given = {"first_signal": self.shape.net.first_signal(self._stage)} | more
        if kind == "dispatch_complete":   # as `RankMajorProgram.dispatch` chose
            given["global_ids"] = int(handle % 2 == 0)
        if kind == "dispatch_send":
            given["tags"] = self.shape.window.arrival(slot)
        super()._launch_signed(kind, rank, slot, handle, status, signature, given, **tensors)


class LLNetStagedRankMajorProgram(LLNetStagedProgram, LLNetRankMajorProgram):
    """The same for RANK_MAJOR."""
