"""What tests/test_gpu_gin.py runs in a process of its own: every case of both algorithms over several teams, each result against the oracle by bits.

    python tests/gin_program.py run ll_expert_major --teams 2          # 8 ranks here; NCCL_LSA_TEAM_SIZE and NCCL_RMA_PLUGIN are the caller's
    python tests/gin_program.py run ht_flat --teams 2 --backend sim    # the same in the simulator
    torchrun --nproc-per-node 4 tests/gin_program.py run ll_expert_major --teams 2 --processes
    python tests/gin_program.py prepare FOLDER --arch sm_90            # cubins of all of it, for NCCLEP_CUBIN_DIR on a machine that cannot link them
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from own_net_kernel import make_own, own  # noqa: E402
from test_ht_host import BACKWARD, COMBINE_BACKWARD, Case  # noqa: E402

from ncclep_py import (  # noqa: E402
    Algorithm,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    Communicator,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    EpError,
    EpMaskedError,
    EpPeerError,
    EpTimeoutError,
    Group,
    GroupConfig,
    HandleConfig,
    Layout,
    LayoutInfo,
    LocalWorld,
    OverflowPolicy,
    ZeroCopyMode,
)
from ncclep_py import reference as ref  # noqa: E402
from ncclep_py.kernels.shape import Wire  # noqa: E402
from ncclep_py.simulator import Faults  # noqa: E402
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like  # noqa: E402
from ncclep_py.topology import Topology  # noqa: E402

SECONDS, LOST_SECONDS, MASK_SECONDS = 60, 8, 8

LOW = GroupConfig(num_experts=32, max_dispatch_tokens_per_rank=24, hidden=512, num_topk=4, max_num_sms=8, timeout_ns=SECONDS * 10**9)
HIGH = GroupConfig(num_experts=32, max_dispatch_tokens_per_rank=80, hidden=512, num_topk=4, max_num_sms=8, timeout_ns=SECONDS * 10**9,
                   algorithm=Algorithm.HIGH_THROUGHPUT)
DROPPING = GroupConfig(num_experts=32, max_dispatch_tokens_per_rank=80, hidden=512, num_topk=4, max_num_sms=8, timeout_ns=SECONDS * 10**9,
                       algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=100, overflow_policy=OverflowPolicy.DROP)
IN_FLIGHT = dataclasses.replace(LOW, num_slots=2, num_staging_slots=4)
"""Two micro-batches in flight."""
MASKED = dataclasses.replace(LOW, enable_mask=True, timeout_ns=MASK_SECONDS * 10**9)
BUDGETED = {Layout.FLAT: dataclasses.replace(HIGH, max_recv_tokens_per_rank=8 * 80),
            Layout.EXPERT_MAJOR: dataclasses.replace(HIGH, max_recv_tokens_per_rank=8 * 80 * 4 + 4 * 16)}
"""What can be captured: as many rows as there may be, with what zones of four local experts may be padded by."""
WIRES = [Wire(512, 128), Wire(512, 16, True)]
"""QUANT_FWD rows of 512 bytes with 128 of scales, and DS_FP8."""


def equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if got.is_cuda:   # a copy to the host that has to wait holds the driver, and the plugin's copies would wait behind it
        torch.cuda.current_stream(got.device).synchronize()
    assert bits_equal(got.cpu(), want), f"{what}: {first_difference(got.cpu(), want)}"


def settle(comm: Any, group: Group) -> None:
    """Wait for this rank's operations, raise what they reported, and wait for the other ranks, which do the same.

    Between a launch and this nothing else may be asked of the driver: what it does only while no kernel runs (loading a kernel at its first use, or
    allocating) holds it until the kernels of all ranks of this process end, and these may wait for copies of the plugin, which are the driver's, too.
    """
    group.check()
    comm.exchange(None)


def counts_of(ranks: int, most: int) -> list[int]:
    """Tokens of each rank: all, none and some."""
    return [(most, 0, 7 % (most + 1), most // 2)[r % 4] for r in range(ranks)]


# ---- low latency ---------------------------------------------------------------------------------------------------------
class Low:
    """Inputs of all ranks, and what dispatch and combine must give."""

    def __init__(self, ranks: int, layout: Layout, seed: int, masked: Sequence[int] = (), lost: Sequence[int] = ()) -> None:
        """`masked`: ranks masked out in dispatch, `lost`: in combine."""
        self.layout, self.counts, self.local = layout, counts_of(ranks, LOW.max_dispatch_tokens_per_rank), LOW.num_experts // ranks
        self.ids = [random_routing(r, n, LOW.num_topk, LOW.num_experts, seed=1000 * seed + 7, dropped=0.1) for r, n in enumerate(self.counts)]
        self.tokens = [stamped_tokens(r, n, LOW.hidden, torch.bfloat16, seed=seed) for r, n in enumerate(self.counts)]
        self.weights = [weights_like(i, seed=31 * seed + r) for r, i in enumerate(self.ids)]
        sizes = {"num_experts": LOW.num_experts, "max_dispatch_tokens_per_rank": LOW.max_dispatch_tokens_per_rank, "masked": masked}
        lost = lost or masked
        if layout is Layout.EXPERT_MAJOR:
            self.received: Any = ref.ll_expert_major_dispatch(self.tokens, self.ids, **sizes)
            self.made = [self.experts(w.tokens.clone(), r) for r, w in enumerate(self.received)]
            self.combined = ref.ll_expert_major_combine(self.made, [w.rows for w in self.received], self.weights, masked=lost)
        else:
            self.received = ref.ll_rank_major_dispatch(self.tokens, self.ids, self.weights, **sizes)
            self.made = [self.experts(w.tokens.clone(), r) for r, w in enumerate(self.received)]
            self.combined = ref.ll_rank_major_combine(self.made, [w.rows for w in self.received], masked=lost)

    def experts(self, rows: torch.Tensor, rank: int) -> torch.Tensor:
        """A different, exact change of each plane, so that a wrong plane shows."""
        for plane in range(rows.shape[0]):
            rows[plane] *= (-1.0 if (rank + plane) % 2 else 1.0) * 2.0 ** (plane % 3)
        return rows

    def check_combined(self, rank: int, out: Any) -> None:
        """Every row, by bits."""
        equal(out, self.combined[rank], f"rank {rank}, combined")

    def check_received(self, rank: int, got: Any) -> None:
        """Every valid row, with ids and weights where there are some."""
        want = self.received[rank]
        if self.layout is Layout.EXPERT_MAJOR:
            counters = got.layout_info.expert_counters.cpu()
            expected = want.expert_counters
        else:
            counters = got.layout_info.src_rank_counters.cpu()
            expected = want.src_rank_counters
            equal(got.topk_idx, want.topk_idx, f"rank {rank}, ids")
        assert torch.equal(counters, expected), f"rank {rank}: counts {counters.tolist()}, expected {expected.tolist()}"
        for plane, n in enumerate(counters.tolist()):
            equal(got.tokens[plane, :n], want.tokens[plane, :n], f"rank {rank}, plane {plane}")
            if self.layout is Layout.RANK_MAJOR:
                equal(got.topk_weights[plane, :n], want.topk_weights[plane, :n], f"rank {rank}, weights of plane {plane}")


def low(comm: Any, layout: Layout, cases: list[Low]) -> None:
    """Dispatch and combine of several routings on one handle."""
    rank, device = comm.rank, comm.device
    with Group.create(comm, LOW) as group:
        handle = group.create_handle(layout, num_topk=LOW.num_topk)
        for case in cases:
            weights = case.weights[rank].to(device)
            given = DispatchInputs(case.tokens[rank].to(device), weights if layout is Layout.RANK_MAJOR else None)
            got = handle.dispatch(given, topk_idx=case.ids[rank].to(device))
            settle(comm, group)
            case.check_received(rank, got)
            case.experts(got.tokens, rank)
            out = handle.combine(got.tokens, topk_weights=weights)
            settle(comm, group)
            equal(out, case.combined[rank], f"rank {rank}, combined")


class Recipe(Low):
    """`Low`, dispatched under a recipe: random bytes forwarded, or tokens quantised while they are sent."""

    def __init__(self, ranks: int, layout: Layout, kind: DispatchQuant, seed: int) -> None:
        super().__init__(ranks, layout, seed)
        self.kind, g = kind, torch.Generator().manual_seed(seed)
        self.given, self.scales = self.tokens, [None] * ranks
        if kind is DispatchQuant.FWD:
            self.given = [torch.randint(0, 256, (n, WIRES[0].sent_bytes), generator=g).to(torch.uint8) for n in self.counts]
            self.scales: Any = [torch.randint(0, 256, (n, WIRES[0].scale_bytes), generator=g).to(torch.uint8) for n in self.counts]
            sent = list(zip(self.given, self.scales, strict=True))
        else:
            sent = [ref.quantize_ds_fp8(rows) for rows in self.tokens]
        rows, beside = ([part.contiguous().view(torch.uint8) for part in parts] for parts in zip(*sent, strict=True))
        how: Any = {"num_experts": LOW.num_experts, "max_dispatch_tokens_per_rank": LOW.max_dispatch_tokens_per_rank, "scales": beside}
        self.received = (ref.ll_expert_major_dispatch(rows, self.ids, **how) if layout is Layout.EXPERT_MAJOR
                         else ref.ll_rank_major_dispatch(rows, self.ids, self.weights, **how))

    def check_received(self, rank: int, got: Any) -> None:
        """As for plain rows, of bytes; and the scale rows beside them."""
        want, plain = self.received[rank], got.tokens
        got.tokens = plain.view(torch.uint8)
        super().check_received(rank, got)
        got.tokens, scales = plain, got.scales.view(torch.uint8)
        for plane, n in enumerate((want.expert_counters if self.layout is Layout.EXPERT_MAJOR else want.src_rank_counters).tolist()):
            equal(scales[plane, :n], want.scales[plane, :n], f"rank {rank}, {self.kind.name}, scales of plane {plane}")


def low_recipes(comm: Any, cases: list[Recipe]) -> None:
    """QUANT_FWD and DS_FP8 in both layouts: what arrives are the sent or quantised bytes and scales, at the places of the plain rows."""
    rank, device = comm.rank, comm.device
    with Group.create(comm, LOW) as group:
        handles = {layout: group.create_handle(layout, num_topk=LOW.num_topk) for layout in LL_LAYOUTS.values()}
        for case in cases:
            handle, weights, scales = handles[case.layout], case.weights[rank].to(device), case.scales[rank]
            given = DispatchInputs(case.given[rank].to(device), weights if case.layout is Layout.RANK_MAJOR else None,
                                   None if scales is None else scales.to(device))
            got = handle.dispatch(given, topk_idx=case.ids[rank].to(device), config=DispatchConfig(quant_recipe=case.kind))
            settle(comm, group)
            case.check_received(rank, got)
            rows = handle.expert_rows()
            rows.zero_()
            out = handle.combine(rows, topk_weights=weights)
            settle(comm, group)
            equal(out, torch.zeros_like(case.tokens[rank]), f"rank {rank}, zeros combined")


def low_staged(comm: Any, pairs: list[tuple[Low, Low]]) -> None:
    """Pairs of micro-batches in flight, in all orders of their complete halves, and fused calls between."""
    rank, device = comm.rank, comm.device
    send, push = DispatchConfig(send_only=True), CombineConfig(send_only=True)
    with Group.create(comm, IN_FLIGHT) as group:
        both = {layout: [group.create_handle(layout, num_topk=LOW.num_topk) for _ in range(2)] for layout in LL_LAYOUTS.values()}

        def dispatch(handle: Any, case: Low, inputs: tuple[torch.Tensor, ...], config: DispatchConfig | None = None) -> Any:
            tokens, ids, weights = inputs
            return handle.dispatch(DispatchInputs(tokens, weights if case.layout is Layout.RANK_MAJOR else None), topk_idx=ids, config=config)

        for step, batch in enumerate(pairs):
            handles = [both[case.layout][b] for b, case in enumerate(batch)]
            inputs = [tuple(t[rank].to(device) for t in (case.tokens, case.ids, case.weights)) for case in batch]
            settle(comm, group)   # copies to the device ask the driver, too
            made = [dispatch(handle, case, given, send) for handle, case, given in zip(handles, batch, inputs, strict=True)]
            for b in (0, 1) if step % 2 else (1, 0):
                handles[b].complete()
                settle(comm, group)
                batch[b].check_received(rank, made[b])
                batch[b].experts(made[b].tokens, rank)
            settle(comm, group)
            outs = [handles[b].combine(made[b].tokens, topk_weights=inputs[b][2], config=push) for b in range(2)]
            for b in (0, 1) if step // 2 % 2 else (1, 0):
                handles[b].complete()
            settle(comm, group)
            for out, case in zip(outs, batch, strict=True):
                equal(out, case.combined[rank], f"rank {rank}, step {step}, {case.layout.name} combined in halves")
            case, handle = batch[step % 2], handles[step % 2]
            got = dispatch(handle, case, inputs[step % 2])
            settle(comm, group)
            case.experts(got.tokens, rank)
            out = handle.combine(got.tokens, topk_weights=inputs[step % 2][2])
            settle(comm, group)
            equal(out, case.combined[rank], f"rank {rank}, step {step}, {case.layout.name} combined")


def low_windows(comm: Any, cases: list[Low]) -> None:
    """Rows in windows of the caller: peers of my team write and read them, puts read them; each is written again after the next operation."""
    rank, device = comm.rank, comm.device
    with Group.create(comm, dataclasses.replace(LOW, zero_copy=ZeroCopyMode.ON)) as group:
        handles = {layout: group.create_handle(layout, num_topk=LOW.num_topk) for layout in LL_LAYOUTS.values()}
        size = 2 * LOW.hidden * group.map.plane_rows * max(group.map.num_local_experts, 1)
        windows = [group.create_window(size) for _ in range(2)]
        for step, case in enumerate(cases):
            shape, weights = case.received[rank].tokens.shape, case.weights[rank].to(device)
            first, second = (w.memory[:2 * shape.numel()].view(torch.bfloat16).view(shape) for w in (windows[step % 2], windows[1 - step % 2]))
            given = DispatchInputs(case.tokens[rank].to(device), weights if case.layout is Layout.RANK_MAJOR else None)
            got = handles[case.layout].dispatch(given, DispatchOutputs(first), topk_idx=case.ids[rank].to(device))
            settle(comm, group)
            case.check_received(rank, got)
            case.experts(second.copy_(first), rank)
            out = handles[case.layout].combine(second, topk_weights=weights)
            settle(comm, group)
            equal(out, case.combined[rank], f"rank {rank}, step {step}, combined from a window")


# ---- masks ---------------------------------------------------------------------------------------------------------------
class Member:
    """A rank of a group with masks, whose operations are waited for one by one; it may be missing in some."""

    def __init__(self, comm: Any, group: Group) -> None:
        self.comm, self.group, self.rank, self.out = comm, group, comm.rank, False
        self.handles = {layout: group.create_handle(layout, num_topk=LOW.num_topk) for layout in LL_LAYOUTS.values()}
        self.received: Any = None

    def call(self, act: Callable[[], Any] | None) -> Any:
        """One operation of the group, None: without this rank; `out` is set if the others went on without it."""
        made = None
        try:
            if act is None:
                self.comm.sit_out()
            else:
                made = act()
                self.group.check()
        except EpMaskedError:
            self.out = True
        self.comm.exchange(None)   # as `settle`
        return made

    def clean(self) -> None:
        """All ranks take part again."""
        self.out = False
        self.call(self.group.mask_clean)

    def masked(self) -> list[int]:
        """Ranks that this one goes on without."""
        return [r for r, active in enumerate(self.group.mask_query().tolist()) if not active]

    def dispatch(self, case: Low, away: bool = False) -> None:
        """Send; the given tensors are on the device before."""
        device = self.comm.device
        ids, self.weights = case.ids[self.rank].to(device), case.weights[self.rank].to(device)
        given = DispatchInputs(case.tokens[self.rank].to(device), self.weights if case.layout is Layout.RANK_MAJOR else None)
        self.received = self.call(None if away or self.out else lambda: self.handles[case.layout].dispatch(given, topk_idx=ids))

    def combine(self, case: Low, away: bool = False) -> torch.Tensor | None:
        """Have experts change the rows, and bring them back."""
        if not (away or self.out):
            case.experts(self.received.tokens, self.rank)
        return self.call(None if away or self.out else lambda: self.handles[case.layout].combine(self.received.tokens, topk_weights=self.weights))

    def step(self, case: Low, away: bool = False) -> None:
        """Both, compared with what the case says."""
        self.dispatch(case, away)
        if not (away or self.out):
            case.check_received(self.rank, self.received)
        out = self.combine(case, away)
        if not (away or self.out):
            case.check_combined(self.rank, out)


def low_masked(comm: Any, missing: int, cases: dict[str, list[Low]]) -> None:
    """A rank does not come: the others mask it and go on, in both layouts; when it comes it is told so, and so are they; then it is taken back."""
    group = Group.create(comm, MASKED)
    me, away = Member(comm, group), comm.rank == missing
    for case in cases["all"]:
        me.step(case)
    assert not me.masked() and not group.get_async_error()
    for case in cases["masked"]:
        me.step(case, away)
    if not away:
        assert me.masked() == [missing], f"rank {comm.rank}: masked {me.masked()}"
        assert f"rank {missing} did not come in time" in str(group.async_error())
        group.error_clear()
    case = cases["masked"][0]
    me.dispatch(case)   # the missing rank tries
    assert me.out == away, f"rank {comm.rank}: {me.out}"
    out = me.combine(case)
    if not away:
        case.check_combined(comm.rank, out)
        assert isinstance(group.async_error(), EpMaskedError), "the rank that came late is not reported"
    me.clean()
    group.error_clear()
    for case in cases["all"]:
        me.step(case)
    assert not me.out and not me.masked() and not group.get_async_error(), f"rank {comm.rank}: {me.out}, {me.masked()}, {group.async_error()}"
    group.close()


def low_cut(comm: Any, ranks: int, team: int, silent: int, seeds: int = 6) -> None:
    """The network of one rank falls silent (the plugin's doing): whoever is left agrees on who that is, and has the bits of that mask.

    Views unite what any rank misses: if the silent rank has others in its team, which hear it and all others, both it and whom it misses are out.
    """
    group = Group.create(comm, MASKED)
    me = Member(comm, group)
    for seed in range(seeds):
        for layout in LL_LAYOUTS.values():
            case = Low(ranks, layout, seed)
            me.dispatch(case)
            there = me.masked()
            if not me.out:
                case = Low(ranks, layout, seed, there)
                case.check_received(comm.rank, me.received)
            out = me.combine(case)
            if not me.out:
                case = Low(ranks, layout, seed, there, me.masked())
                equal(out, case.combined[comm.rank], f"rank {comm.rank}, combined under mask {me.masked()}")
    left = {rank: masked for rank, (out, masked) in enumerate(comm.exchange((me.out, me.masked()))) if not out}
    assert all(sorted({*range(ranks)} - {*masked}) == [r for r in left if left[r] == masked] for masked in left.values()), left
    mates = {*range(silent // team * team, (silent // team + 1) * team)} if team > 1 else {*range(ranks)}
    assert {*left} >= mates - {silent} and all(silent in masked for rank, masked in left.items() if rank != silent), left
    sys.stdout.write(f"rank {comm.rank}: {'out' if me.out else f'goes on without {me.masked()}'}: {group.async_error()}\n")


# ---- high throughput -----------------------------------------------------------------------------------------------------
def high(comm: Any, cases: list[Case], combined: list[tuple[list[Any], list[Any]]]) -> None:
    """Training steps over several routings on one handle; `combined`: of each case, forward and backward results of all ranks."""
    rank, device = comm.rank, comm.device
    with Group.create(comm, cases[0].cfg) as group:
        handle = cases[0].handle(group, rank)
        for case, (forward, backward) in zip(cases, combined, strict=True):
            handle.update(case.ids[rank].to(device))
            n, want = case.used(rank), case.received[rank]
            got = handle.dispatch(case.tokens[rank].to(device), layout_info=LayoutInfo(recv_topk_idx_kind=case.kind),
                                  topk_weights=case.weights[rank].to(device))
            settle(comm, group)
            case.check_counts(rank, got.layout_info)
            equal(got.tokens[:n], want.tokens[:n], f"rank {rank}, rows")
            defined = len(want.topk_weights) if case.flat and case.cfg.max_recv_tokens_per_rank else n
            equal(got.topk_weights[:defined], want.topk_weights[:defined], f"rank {rank}, weights")
            if case.flat:
                equal(got.topk_idx[:defined], want.topk_idx[:defined], f"rank {rank}, ids")
            out = handle.combine(case.put(got.tokens, case.rows[rank].to(device)))
            settle(comm, group)
            equal(out, forward[rank].tokens, f"rank {rank}, combined rows")
            got = handle.dispatch(case.gradients[rank].to(device), config=BACKWARD)
            settle(comm, group)
            equal(got.tokens[:n], case.back[rank].tokens[:n], f"rank {rank}, gradient rows")
            into = CombineOutputs()
            out = handle.combine(CombineInputs(case.back_rows[rank].to(device), case.back_weights[rank].to(device)), into, COMBINE_BACKWARD)
            settle(comm, group)
            equal(out, backward[rank].tokens, f"rank {rank}, gradients of tokens")
            equal(into.topk_weights, backward[rank].topk_weights, f"rank {rank}, gradients of weights")


def high_cases(ranks: int, team: int, layout: Layout, config: GroupConfig) -> tuple[list[Case], list[Any]]:
    """Three routings, and what combine gives for ranks in teams: partial sums of a team are rounded once."""
    most = config.max_dispatch_tokens_per_rank
    alignment = 0 if layout is Layout.FLAT else 16
    cases = [Case(config, layout, counts, seed=seed, alignment=alignment, ids=None)
             for seed, counts in enumerate((counts_of(ranks, most), [most] * ranks, [3 * r % 5 for r in range(ranks)]))]
    combine = ref.ht_flat_combine if layout is Layout.FLAT else ref.ht_expert_major_combine
    return cases, [(combine(c.plan, c.rows, team_size=team), combine(c.plan, c.back_rows, c.back_weights, team_size=team)) for c in cases]


# ---- graphs --------------------------------------------------------------------------------------------------------------
def replayed(config: GroupConfig, layout: Layout, team: int, ids: list[torch.Tensor], tokens: list[torch.Tensor],
             weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """What `pair` gives on all ranks, by the oracle."""
    if config.algorithm is Algorithm.HIGH_THROUGHPUT:
        case = Case(config, layout, [len(i) for i in ids], ids=ids, alignment=0 if layout is Layout.FLAT else 16)
        flat = layout is Layout.FLAT
        sent = (ref.ht_flat_dispatch if flat else ref.ht_expert_major_dispatch)(case.plan, tokens)
        combine = ref.ht_flat_combine if flat else ref.ht_expert_major_combine
        return [c.tokens for c in combine(case.plan, [r.tokens * factor(rank) for rank, r in enumerate(sent)], team_size=team)]
    sizes: Any = {"num_experts": config.num_experts, "max_dispatch_tokens_per_rank": config.max_dispatch_tokens_per_rank}
    if layout is Layout.EXPERT_MAJOR:
        return [ref.moe_layer(x, i, w, [lambda rows: rows * 2] * config.num_experts) for x, i, w in zip(tokens, ids, weights, strict=True)]
    sent = ref.ll_rank_major_dispatch(tokens, ids, weights, **sizes)
    return ref.ll_rank_major_combine([r.tokens * 2 for r in sent], [r.rows for r in sent])


def factor(rank: int) -> float:
    """What HT's experts of a rank multiply rows by: no two ranks the same, so that what is rounded in a team shows."""
    return 1.3 + 0.37 * rank


def pair_handle(group: Group, layout: Layout) -> Any:
    """A handle for `pair`."""
    aligned = HandleConfig(dispatch_output_per_expert_alignment=16 if layout is Layout.EXPERT_MAJOR else 0)
    high_throughput = group.config.algorithm is Algorithm.HIGH_THROUGHPUT
    return group.create_handle(layout, num_topk=group.config.num_topk, config=aligned if high_throughput else None)


def pair(group: Group, handle: Any, layout: Layout, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Dispatch, experts and combine, nothing waited for; LL's experts double their rows, as the sums of one team are those of several."""
    if group.config.algorithm is Algorithm.HIGH_THROUGHPUT:
        handle.update(ids)
        return handle.combine(handle.dispatch(x, topk_weights=weights).tokens.mul_(factor(group.rank)))
    got = handle.dispatch(DispatchInputs(x, weights if layout is Layout.RANK_MAJOR else None), topk_idx=ids)
    got.tokens.mul_(2)
    return handle.combine(got.tokens, topk_weights=weights)


def pair_inputs(config: GroupConfig, ranks: int, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Ids, tokens and weights of all ranks."""
    most = config.max_dispatch_tokens_per_rank
    ids = [random_routing(r, most, config.num_topk, config.num_experts, seed=step, dropped=step % 7 / 10) for r in range(ranks)]
    tokens = [stamped_tokens(r, most, config.hidden, torch.bfloat16, seed=step) for r in range(ranks)]
    return ids, tokens, [weights_like(i, seed=step).nan_to_num(0) for i in ids]


def replays(comm: Any, config: GroupConfig, layout: Layout, ranks: int, team: int, steps: int = 6) -> None:
    """A captured pair replayed with new routing, tokens and weights."""
    rank, device, most = comm.rank, comm.device, config.max_dispatch_tokens_per_rank
    x = torch.zeros(most, config.hidden, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(most, config.num_topk, dtype=torch.int64, device=device)
    weights = torch.zeros(most, config.num_topk, device=device)
    with Group.create(comm, config) as group:
        handle, graph = pair_handle(group, layout), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
            out = pair(group, handle, layout, x, ids, weights)
        for step in range(steps):
            given = pair_inputs(config, ranks, step)
            for into, of_ranks in zip((ids, x, weights), given, strict=True):
                into.copy_(of_ranks[rank])
            comm.together(graph.replay)
            settle(comm, group)
            equal(out, replayed(config, layout, team, *given)[rank], f"rank {rank}, replay {step}")


# ---- faults --------------------------------------------------------------------------------------------------------------
def lost(comm: Any, config: GroupConfig, layout: Layout, ranks: int) -> None:
    """A rank's network stops answering (the plugin's doing): every rank gets an error within a few deadlines, and nobody hangs.

    Operations are waited for one by one (`settle`).
    """
    config = dataclasses.replace(config, timeout_ns=LOST_SECONDS * 10**9)
    rank, device, most = comm.rank, comm.device, config.max_dispatch_tokens_per_rank
    ids = random_routing(rank, most, config.num_topk, config.num_experts, seed=1).to(device)
    tokens, weights = stamped_tokens(rank, most, config.hidden, torch.bfloat16).to(device), weights_like(ids.cpu()).to(device)
    group = Group.create(comm, config)
    handle, started = group.create_handle(layout, num_topk=config.num_topk), time.monotonic()
    try:
        for _ in range(40):
            if config.algorithm is Algorithm.HIGH_THROUGHPUT:
                handle.update(ids)
                settle(comm, group)
                got = handle.dispatch(tokens, topk_weights=weights)
                settle(comm, group)
                handle.combine(got.tokens)
            else:
                got = handle.dispatch(tokens, topk_idx=ids)
                settle(comm, group)
                handle.combine(got.tokens, topk_weights=weights)
            settle(comm, group)
    except EpError as error:
        took = time.monotonic() - started
        assert isinstance(error, EpTimeoutError | EpPeerError), f"rank {rank}: {type(error).__name__}: {error}"
        assert took < 6 * LOST_SECONDS, f"rank {rank}: the error came after {took:.0f} s"
        sys.stdout.write(f"rank {rank}: {type(error).__name__} after {took:.1f} s: {error}\n")
        return
    raise AssertionError(f"rank {rank}: 40 pairs with a lost rank raised nothing")


# ---- scenarios -----------------------------------------------------------------------------------------------------------
LL_LAYOUTS = {"expert_major": Layout.EXPERT_MAJOR, "rank_major": Layout.RANK_MAJOR}
HT_LAYOUTS = {"flat": Layout.FLAT, "expert_major": Layout.EXPERT_MAJOR}
SCENARIOS = (*(f"ll_{name}" for name in LL_LAYOUTS), "ll_recipes", "ll_staged", "ll_windows", "ll_masked", "ll_lost", "ll_masked_lost",
             *(f"ll_{name}_graph" for name in LL_LAYOUTS), *(f"ht_{name}" for name in HT_LAYOUTS), *(f"ht_{name}_drop" for name in HT_LAYOUTS),
             *(f"ht_{name}_graph" for name in HT_LAYOUTS), "ht_lost", "own")
GRAPHS = tuple(name for name in SCENARIOS if name.endswith("_graph"))
GPU_ONLY = (*GRAPHS, "ll_lost", "ht_lost", "ll_masked_lost")
MISSING = 3
"""The rank that does not come."""


def program_of(scenario: str, ranks: int, team: int, rounds: int = 1) -> Callable[[Any], None]:
    """The rank program of a scenario, the cases of plain rows `rounds` times over; oracles are made once."""
    algorithm, _, rest = scenario.partition("_")
    one_layout = Layout.EXPERT_MAJOR if algorithm == "ll" else Layout.FLAT
    if scenario == "ll_recipes":
        recipes = [Recipe(ranks, layout, kind, 5) for kind in (DispatchQuant.FWD, DispatchQuant.DS_FP8E3M4) for layout in LL_LAYOUTS.values()]
        return lambda comm: low_recipes(comm, recipes)
    if scenario == "ll_staged":
        one, other = LL_LAYOUTS.values()
        kinds = ((one, one), (other, other), (one, other), (other, one))
        pairs = [(Low(ranks, a, seed), Low(ranks, b, seed + 4)) for seed, (a, b) in enumerate(kinds)]
        return lambda comm: low_staged(comm, pairs)
    if scenario == "ll_windows":
        cases = [Low(ranks, layout, seed) for seed in range(2) for layout in LL_LAYOUTS.values()]
        return lambda comm: low_windows(comm, cases)
    if scenario == "ll_masked":
        parts = {"all": [Low(ranks, layout, 1) for layout in LL_LAYOUTS.values()],
                 "masked": [Low(ranks, layout, 2, [MISSING]) for layout in LL_LAYOUTS.values()]}
        return lambda comm: low_masked(comm, MISSING, parts)
    if scenario == "ll_masked_lost":
        return lambda comm: low_cut(comm, ranks, team, int(os.environ["LOOPBACK_LOSE_RANK"]))
    if scenario == "own":
        return lambda comm: own(comm, LOW, settle, equal)
    if scenario in GRAPHS:
        captured = (LL_LAYOUTS if algorithm == "ll" else HT_LAYOUTS)[rest.removesuffix("_graph")]
        return lambda comm: replays(comm, LOW if algorithm == "ll" else BUDGETED[captured], captured, ranks, team, 6 * rounds)
    if rest == "lost":
        return lambda comm: lost(comm, LOW if algorithm == "ll" else HIGH, one_layout, ranks)
    if algorithm == "ll":
        cases = [Low(ranks, LL_LAYOUTS[rest], seed) for seed in range(3)]
        return lambda comm: low(comm, LL_LAYOUTS[rest], cases * rounds)
    layout = HT_LAYOUTS[rest.removesuffix("_drop")]
    steps, combined = high_cases(ranks, team, layout, DROPPING if rest.endswith("_drop") else HIGH)
    return lambda comm: high(comm, steps * rounds, combined * rounds)


def open_plugin() -> ctypes.CDLL | None:
    """The loopback plugin, if it is used; NCCL closes it with its last communicator, and its counts would go with it."""
    path = os.environ.get("NCCL_RMA_PLUGIN")
    return ctypes.CDLL(path) if path and os.path.exists(path) else None


def used_network(plugin: ctypes.CDLL | None) -> str:
    """What the plugin moved in this process, to be sure that it was used."""
    if plugin is None:
        return "no loopback plugin"
    words = (ctypes.c_uint64 * 6)()
    plugin.loopback_counts(words)
    return " ".join(f"{name}={n}" for name, n in zip(("puts", "signals", "landed", "lost", "passed", "rings"), words, strict=True))


def run(options: argparse.Namespace) -> int:
    """Run a scenario and say that all was equal."""
    ranks = int(os.environ["WORLD_SIZE"]) if options.processes else options.ranks
    topology = Topology(ranks, ranks // options.teams)
    program, plugin = program_of(options.scenario, ranks, topology.team_size, options.rounds), open_plugin()
    if options.processes:
        with Communicator.from_environment() as comm, torch.cuda.stream(torch.cuda.Stream()):   # what is captured has a stream of its own
            told = [comm.topology]
            program(comm)
            who = f"rank {comm.rank}: "
    else:
        more: dict[str, Any] = {"team_size": topology.team_size} if options.backend == "sim" and topology.num_teams > 1 else {}
        if options.backend == "sim" and "masked" in options.scenario:
            more["faults"] = Faults(timeouts=True, bounded=True)
        world = LocalWorld(ranks, options.backend, **more)
        told, who = [comm.topology for comm in world.communicators], ""
        world.run(program)
        if not options.scenario.endswith("_lost"):
            world.close()
    assert all(t == topology for t in told), f"NCCL made {told[0]}, {topology} was asked for (NCCL_LSA_TEAM_SIZE)"
    sys.stdout.write(f"{who}{options.scenario}: bitwise equal, {topology.num_teams} teams; {used_network(plugin)}\n")
    sys.stdout.flush()
    if options.scenario.endswith("_lost"):
        os._exit(0)   # ranks are gone: nothing collective can end this
    return 0


def prepare(options: argparse.Namespace) -> int:
    """Compile the kernels of all scenarios and numbers of teams."""
    from ncclep_py.compile import build

    for topology in (*(Topology(options.ranks, options.ranks // teams) for teams in options.teams), Topology(4, 2)):   # the last in processes
        jobs = [(LOW, layout, wires) for layout in LL_LAYOUTS.values() for wires in ([], WIRES)]
        jobs += [(MASKED, layout, wires) for layout in LL_LAYOUTS.values() for wires in ([], WIRES)]
        jobs += [(IN_FLIGHT, layout, []) for layout in LL_LAYOUTS.values()]
        jobs += [(config, layout, []) for config in (HIGH, DROPPING) for layout in HT_LAYOUTS.values()]
        jobs += [(config, layout, []) for layout, config in BUDGETED.items()]
        for config, layout, wires in jobs:   # one at a time: what is not built for several teams must not keep the rest away
            what = f"{topology.num_ranks} ranks in {topology.num_teams} teams, {config.algorithm.name} {layout.name}{' with recipes' * bool(wires)}"
            what += " in flight" * bool(config.num_staging_slots) + " with masks" * config.enable_mask
            try:
                made = build(config, topology, options.arch.split(","), options.out, layouts=[layout], wires=wires,
                             alignment=16 if config.algorithm is Algorithm.HIGH_THROUGHPUT else 0,
                             own=[make_own] if config is LOW and topology.num_teams > 1 else ())
                sys.stdout.write(f"{what}: {len(made)} cubins\n")
            except NotImplementedError as e:
                sys.stdout.write(f"{what}: {e}\n")
    return 0


def main() -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("scenario", choices=SCENARIOS)
    one.add_argument("--ranks", type=int, default=8)
    one.add_argument("--teams", type=int, default=2)
    one.add_argument("--rounds", type=int, default=1)
    one.add_argument("--backend", choices=("nccl", "sim"), default="nccl")
    one.add_argument("--processes", action="store_true")
    all_of_it = commands.add_parser("prepare")
    all_of_it.add_argument("out", type=Path)
    all_of_it.add_argument("--arch", default="sm_90")
    all_of_it.add_argument("--ranks", type=int, default=8)
    all_of_it.add_argument("--teams", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    if options.command == "prepare":
        return prepare(options)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
