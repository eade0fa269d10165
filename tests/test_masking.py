"""Groups with ``enable_mask`` through the host API, in the simulator: who is missing, what the others get, and how a rank comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from ncclep_py import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    CombineQuant,
    DispatchConfig,
    DispatchInputs,
    EpClosedError,
    EpError,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
)
from ncclep_py import reference as ref
from ncclep_py.errors import Code, EpMaskedError, EpRefusedError
from ncclep_py.simulator import Faults
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

TOKENS, HIDDEN, TOPK = 5, 16, 2


def config(ranks: int, **more: object) -> GroupConfig:
    return GroupConfig(num_experts=2 * ranks, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, enable_mask=True, **more)


def world(ranks: int, seed: int = 0) -> LocalWorld:
    return LocalWorld(ranks, "sim", seed=seed, mode="adversarial", faults=Faults(timeouts=True, bounded=True))


class Rank:
    """A rank's inputs of each step, all seeded, and its handle."""

    def __init__(self, group: Group, layout: Layout = Layout.EXPERT_MAJOR) -> None:
        self.group, self.rank, self.layout = group, group.rank, layout
        self.handle = group.create_handle(layout, num_topk=TOPK)

    def inputs(self, step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rank = self.rank if rank is None else rank
        ids = random_routing(rank, TOKENS - rank % 3, TOPK, self.group.config.num_experts, seed=17 * step, dropped=0.1)
        return stamped_tokens(rank, TOKENS - rank % 3, HIDDEN, torch.bfloat16, seed=step), ids, weights_like(ids, seed=step)

    def dispatch(self, step: int) -> torch.Tensor:
        tokens, ids, weights = (x.to(self.group.comm.device) for x in self.inputs(step))
        more = {} if self.layout is Layout.EXPERT_MAJOR else {"topk_weights": weights}
        self.received = self.handle.dispatch(tokens, topk_idx=ids, **more)
        return self.received.tokens

    def combine(self, step: int) -> torch.Tensor:
        more = {"topk_weights": self.inputs(step)[2].to(self.group.comm.device)} if self.layout is Layout.EXPERT_MAJOR else {}
        return self.handle.combine(self.received.tokens, **more)

    def sit_out(self, times: int = 1) -> None:
        for _ in range(times):
            self.group.comm.sit_out()

    def right(self, step: int, out: torch.Tensor, masked: Sequence[int], lost: Sequence[int] = ()) -> bool:
        """Whether `out` has the oracle's bits: dispatch under `masked`, combine under `masked` and `lost`."""
        every = [self.inputs(step, r) for r in range(self.group.num_ranks)]
        if self.layout is Layout.RANK_MAJOR:
            return self._right_by_rank(every, out, masked, lost)
        want = ref.ll_expert_major_dispatch([t for t, _, _ in every], [i for _, i, _ in every], num_experts=self.group.config.num_experts,
                                            max_dispatch_tokens_per_rank=TOKENS, masked=masked)
        counts = self.received.layout_info.expert_counters.tolist()
        assert counts == want[self.rank].expert_counters.tolist()
        sums = ref.ll_expert_major_combine([e.tokens for e in want], [e.rows for e in want], [w for _, _, w in every], masked=[*masked, *lost])
        return bits_equal(out.cpu(), sums[self.rank])

    def _right_by_rank(self, every: Sequence, out: torch.Tensor, masked: Sequence[int], lost: Sequence[int]) -> bool:
        want = ref.ll_rank_major_dispatch(*map(list, zip(*every, strict=True)), num_experts=self.group.config.num_experts,
                                          max_dispatch_tokens_per_rank=TOKENS, masked=masked)
        mine, counts = want[self.rank], self.received.layout_info.src_rank_counters.tolist()
        assert counts == mine.src_rank_counters.tolist() and torch.equal(self.received.topk_idx.cpu(), mine.topk_idx)
        assert all(bits_equal(self.received.tokens[s, :n].cpu(), mine.tokens[s, :n]) for s, n in enumerate(counts))
        sums = ref.ll_rank_major_combine([e.tokens for e in want], [e.rows for e in want], masked=[*masked, *lost])
        return bits_equal(out.cpu(), sums[self.rank])

    def active(self) -> list[int]:
        return self.group.mask_query().tolist()


def run(ranks: int, program: Callable[[Rank], object], seed: int = 0, layout: Layout = Layout.EXPERT_MAJOR, **more: object) -> list:
    def body(comm: object) -> object:
        with Group.create(comm, config(ranks, **more)) as group:
            return program(Rank(group, layout))

    with world(ranks, seed) as w:
        return w.run(body)


LAYOUTS = pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])


@LAYOUTS
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_without_a_fault_it_is_the_plain_group(ranks: int, layout: Layout) -> None:
    def program(r: Rank) -> object:
        good = True
        for step in range(3):
            r.dispatch(step)
            good = good and r.right(step, r.combine(step), ())
        r.group.check()
        return good, r.active(), r.group.get_async_error(), r.group.async_error()

    for good, active, flag, error in run(ranks, program, layout=layout):
        assert good and active == [1] * ranks and flag == 0 and error is None


@LAYOUTS
@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_never_calls_is_masked_and_readmitted(missing: int, seed: int, layout: Layout) -> None:
    def program(r: Rank) -> object:
        out, good = None, []
        r.dispatch(0)
        good.append(r.right(0, r.combine(0), ()))
        if r.rank == missing:
            r.sit_out(4)
            seen = None
        else:
            for step in (1, 2):
                r.dispatch(step)
                out = r.combine(step)
                good.append(r.right(step, out, [missing]))
            r.group.check()   # nothing to raise: the operations took place
            seen = r.active(), r.group.get_async_error(), str(r.group.async_error())
        r.group.mask_clean()
        cleaned = r.active()
        r.group.error_clear()
        for step in (3, 4):
            r.dispatch(step)
            good.append(r.right(step, r.combine(step), ()))
        r.group.check()
        return all(good), seen, cleaned, r.active(), r.group.get_async_error()

    for rank, (good, seen, cleaned, active, flag) in enumerate(run(3, program, seed, layout)):
        assert good and cleaned == active == [1, 1, 1] and flag == 0
        if rank != missing:
            assert seen[:2] == ([int(r != missing) for r in range(3)], 1)
            assert f"rank {rank}, operation 3, HEAD phase: rank {missing} did not come in time" in seen[2]


@LAYOUTS
def test_a_rank_lost_between_dispatch_and_combine(layout: Layout) -> None:
    """Its experts' rows are left out, without renormalising the weights."""
    def program(r: Rank) -> object:
        r.dispatch(0)
        if r.rank == 1:
            r.sit_out()
            r.group.mask_clean()
            good = True
        else:
            good = r.right(0, r.combine(0), (), [1])
            r.group.mask_clean()
        with pytest.raises(EpError, match="combine needs a dispatch"):
            r.combine(0)
        return good

    assert all(run(3, program, layout=layout))


@pytest.mark.parametrize("seed", range(4))
def test_a_masked_rank_learns_that_it_is_and_nothing_of_it_takes_place(seed: int) -> None:
    def program(r: Rank) -> object:
        if r.rank != 2:
            good = True
            for step in range(4):
                r.dispatch(step)
                good = good and r.right(step, r.combine(step), [2])
            r.group.check()
            told = r.group.get_async_error()
            r.group.mask_clean()
            return good and told == 1
        r.sit_out()
        for step in range(3):   # where the others combine, dispatch, combine ...
            r.dispatch(step)
            with pytest.raises(EpMaskedError, match="the other ranks went on without this rank, and nothing it calls takes place until mask_clean"):
                r.group.check()
        r.dispatch(9)
        with pytest.raises(EpMaskedError):   # also at the next call, which is a refusal here and nothing there
            r.dispatch(10)
        r.sit_out(2)
        r.group.mask_clean()
        r.group.check()
        return True

    assert all(run(3, program, seed))


def test_two_ranks_at_once_and_everybody_but_one() -> None:
    def program(r: Rank) -> object:
        if r.rank in (1, 3):
            r.sit_out(2)
        else:
            r.dispatch(0)
            assert r.right(0, r.combine(0), (1, 3))
        if r.rank != 0:
            r.sit_out(2)
        else:
            r.dispatch(1)
            assert r.right(1, r.combine(1), (1, 2, 3)) and r.active() == [1, 0, 0, 0]
        r.group.mask_clean()
        r.dispatch(2)
        return r.right(2, r.combine(2), ()) and r.active() == [1] * 4

    assert all(run(4, program))


@pytest.mark.parametrize("seed", range(4))
def test_mask_update_by_one_rank_masks_for_all(seed: int) -> None:
    def program(r: Rank) -> object:
        if r.rank == 1:
            r.group.mask_update([1, 1, 0])
        if r.rank == 2:
            with pytest.raises(ValueError, match="the rank that calls, 2"):
                r.group.mask_update([1, 1, 0])
        r.dispatch(0)
        if r.rank == 2:
            with pytest.raises(EpMaskedError):
                r.group.check()
            r.sit_out()
            good = True
        else:
            good = r.right(0, r.combine(0), [2]) and r.active() == [1, 1, 0]
        r.group.mask_clean()
        return good and r.active() == [1, 1, 1]

    assert all(run(3, program, seed))


def test_a_refused_call_is_refused_everywhere() -> None:
    def program(r: Rank) -> object:
        with pytest.raises((TypeError, EpRefusedError)):
            r.handle.dispatch(r.inputs(0)[0].float() if r.rank == 1 else r.inputs(0)[0], topk_idx=r.inputs(0)[1])
        r.dispatch(1)
        return r.right(1, r.combine(1), ()) and r.active() == [1, 1, 1]

    assert all(run(3, program))


def test_mask_clean_leaves_out_who_does_not_come() -> None:
    def program(r: Rank) -> object:
        if r.rank == 2:
            r.sit_out(3)
            good = True
        else:
            r.dispatch(0)
            r.combine(0)
            r.group.mask_clean()
            good = r.active() == [1, 1, 0]
        if r.rank == 2:
            r.sit_out(2)
        else:
            r.dispatch(1)
            good = good and r.right(1, r.combine(1), [2])
        r.group.mask_clean()   # rank 2 missed one
        r.dispatch(2)
        return good and r.right(2, r.combine(2), ()) and r.active() == [1, 1, 1]

    assert all(run(3, program))


def test_waits_are_counted_for_the_rank_that_is_slow() -> None:
    def program(r: Rank) -> object:
        for step in range(4):
            r.dispatch(step)
            r.combine(step)
        waited = r.group.waited_ns(reset=True)
        assert r.group.waited_ns().tolist() == [0] * 3
        return waited

    def slowed(comm: object) -> object:
        with Group.create(comm, config(3)) as group:
            return program(Rank(group))

    with LocalWorld(3, "sim", seed=1) as w:
        fair = w.simulator.policy.pick   # rank 1 runs when nobody else can
        w.simulator.policy.pick = lambda ready, step: fair([t for t in ready if t.rank != 1] or ready, step)
        waited = w.run(slowed)
    assert all(int(waited[rank][1]) > 2 * int(waited[rank][2 - rank]) for rank in (0, 2)), waited
    assert int(waited[1].max()) < min(int(waited[0][1]), int(waited[2][1])) // 3, waited
    assert all(t.dtype == torch.int64 for t in waited)


@LAYOUTS
@pytest.mark.parametrize("missing", [None, 0, 2])
def test_packed_rows_of_members_only(missing: int | None, layout: Layout) -> None:
    """NVFP4 combine with a rank that is lost before it, and again with everybody."""
    ranks, hidden = 3, 512
    cfg = GroupConfig(num_experts=6, max_dispatch_tokens_per_rank=TOKENS, hidden=hidden, num_topk=TOPK, enable_mask=True)
    ids = [random_routing(r, TOKENS - r, TOPK, 6, seed=r, dropped=0.1) for r in range(ranks)]
    tokens, weights = [stamped_tokens(r, TOKENS - r, hidden, torch.bfloat16) for r in range(ranks)], [weights_like(i) for i in ids]
    how = {"num_experts": 6, "max_dispatch_tokens_per_rank": TOKENS}
    by_rank = layout is Layout.RANK_MAJOR
    want = ref.ll_rank_major_dispatch(tokens, ids, weights, **how) if by_rank else ref.ll_expert_major_dispatch(tokens, ids, **how)
    scales = [2688 / w.tokens.float().abs().amax(-1, keepdim=True).clamp(min=1) for w in want]

    def body(comm: object) -> list[torch.Tensor]:
        comm.fp4 = True
        out = []
        with Group.create(comm, cfg) as group:
            handle = group.create_handle(layout, num_topk=TOPK)
            for lost in (None, missing, None):
                got = handle.dispatch(DispatchInputs(tokens[comm.rank], weights[comm.rank] if by_rank else None), topk_idx=ids[comm.rank])
                if lost is not None and lost == comm.rank:
                    comm.sit_out()
                else:
                    inputs, outputs = CombineInputs(got.tokens, scales=scales[comm.rank]), CombineOutputs(topk_weights=weights[comm.rank])
                    out.append(handle.combine(inputs, outputs, CombineConfig(quant_recipe=CombineQuant.NVFP4)))
                if lost is not None:
                    group.mask_clean()
            group.check()
        return out

    for seed in range(4):
        with world(ranks, seed) as w:
            outs = w.run(body)
        for lost, step in ((None, 0), (missing, 1), (None, -1)):
            rows = [torch.where(torch.isin(w.rows, _rows_of(lost, cfg, by_rank)), -1, w.rows) for w in want]
            sums = ref.ll_nvfp4_combine([w.tokens for w in want], scales, rows, None if by_rank else weights)
            assert all(bits_equal(outs[r][step], sums[r]) for r in range(ranks) if r != lost)


def _rows_of(lost: int | None, cfg: GroupConfig, by_rank: bool) -> torch.Tensor:
    """Global rows at a rank."""
    size = 3 * TOKENS * (1 if by_rank else cfg.num_experts // 3)
    return torch.arange(0) if lost is None else torch.arange(lost * size, (lost + 1) * size)


@LAYOUTS
@pytest.mark.parametrize("slots", [0, 4])
def test_send_only_does_the_whole_operation(slots: int, layout: Layout) -> None:
    """A program with staged calls runs under masks, too, also without a rank; the order of its calls is held to."""
    send, pull = DispatchConfig(send_only=True), CombineConfig(send_only=True)

    def program(r: Rank) -> object:
        good, other = True, Rank(r.group, layout)
        assert r.group.map.num_staging == 0 and r.handle.complete() is None
        for step in range(3):
            if step == 1 and r.rank == 2:
                r.sit_out(4)
                r.group.mask_clean()
                continue
            masked = [2] if step == 1 else []
            for who, number in ((r, step), (other, step + 10)):   # two micro-batches in flight
                tokens, ids, weights = who.inputs(number)
                sent = DispatchInputs(tokens, weights if layout is Layout.RANK_MAJOR else None)
                who.received = who.handle.dispatch(sent, topk_idx=ids, config=send)
                with pytest.raises(EpError, match="handle's dispatch is in flight; call complete"):
                    who.handle._check_landed("combine")
            for who in (other, r):
                assert who.handle.complete() is who.received
            for who, number in ((r, step), (other, step + 10)):
                outputs = CombineOutputs(topk_weights=who.inputs(number)[2])
                out = who.handle.combine(CombineInputs(who.received.tokens), outputs, pull)
                assert who.handle.complete() is out and who.handle.complete() is None
                good = good and who.right(number, out, masked)
            if step == 1:
                r.group.mask_clean()
        return good

    def body(comm: object) -> object:
        with Group.create(comm, config(3, num_slots=2, num_staging_slots=slots)) as group:
            return program(Rank(group, layout))

    with world(3, 1) as w:
        assert w.run(body) == [True] * 3


def test_without_enable_mask_there_is_none() -> None:
    def program(comm: object) -> None:
        with Group.create(comm, GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=1, hidden=8, num_topk=1)) as group:
            for call in (group.mask_query, lambda: group.mask_update([1]), group.mask_clean, group.get_async_error, group.async_error,
                         group.error_clear):
                with pytest.raises(EpError, match="needs a group with GroupConfig.enable_mask"):
                    call()

    with LocalWorld(1, "sim") as w:
        w.run(program)


def test_arguments() -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config(2)) as group:
            with pytest.raises(ValueError, match="mask must be 2 integers"):
                group.mask_update([1])
            with pytest.raises(ValueError, match="mask must be 2 integers"):
                group.mask_update([1, 2])
            with pytest.raises(ValueError, match=r"out must be \[2\] int32"):
                group.mask_query(torch.zeros(3, dtype=torch.int32))
            out = torch.zeros(2, dtype=torch.int32)
            assert group.mask_query(out) is out and out.tolist() == [1, 1]
        with pytest.raises(EpClosedError, match="cannot mask_query: the group is closed"):
            group.mask_query()

    with world(2) as w:
        w.run(program)
    with pytest.raises(TypeError, match="enable_mask must be a bool"):
        config(2).__class__(num_experts=2, max_dispatch_tokens_per_rank=1, hidden=8, num_topk=1, enable_mask=1)
    with pytest.raises(ValueError, match="enable_mask serves at most 29 ranks, got 30"):
        config(30).check_ranks(30)


def test_codes_have_sentences() -> None:
    from ncclep_py.errors import NOTICES, ErrorRecord

    for code in (Code.EXCLUDED, *NOTICES):
        error = ErrorRecord(code, 7, 1, 2, 1, 1, 7, 7).exception()
        assert isinstance(error, EpMaskedError) and "rank 2, operation 7, HEAD phase" in str(error) and not error.everywhere
