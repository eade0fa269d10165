"""Staged operations through the public API, in the simulator: bits of the fused ones, micro-batches in flight, and every refusal."""

from __future__ import annotations

import pytest
import torch

from ncclep_py import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    EpError,
    EpRefusedError,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
)
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

SEND, PUSH = DispatchConfig(send_only=True), CombineConfig(send_only=True)
EXPERTS, HIDDEN, TOPK, MOST = 6, 32, 2, 5


def config(**more: object) -> GroupConfig:
    return GroupConfig(**{"num_experts": EXPERTS, "max_dispatch_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOPK, "num_slots": 2,
                          "num_staging_slots": 4} | more)


def inputs(rank: int, seed: int, tokens: int = 4, topk: int = TOPK, **more: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = random_routing(rank, tokens, topk, EXPERTS, seed=seed, dropped=0.2)
    return stamped_tokens(rank, tokens, HIDDEN, torch.bfloat16, seed=seed), ids, weights_like(ids, seed=seed + rank)


def experts(rows: torch.Tensor) -> None:
    rows.mul_((torch.arange(len(rows)) % 3 + 1).view(-1, 1, 1))


def run(program: object, ranks: int = 3, **world: object) -> list:
    with LocalWorld(ranks, "sim", **world) as w:
        return w.run(program)


def test_same_bits_as_fused() -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=TOPK)
            for seed in range(4):
                x, ids, w = inputs(comm.rank, seed, (4, 0, 5)[(comm.rank + seed) % 3])
                fused = handle.dispatch(x, topk_idx=ids)
                counters = fused.layout_info.expert_counters
                rows = [fused.tokens[i, :n].clone() for i, n in enumerate(counters.tolist())]
                experts(fused.tokens)
                want = handle.combine(fused.tokens, topk_weights=w)
                got = handle.dispatch(x, config=SEND)
                assert handle.complete() is got
                assert torch.equal(got.layout_info.expert_counters, counters)
                assert all(bits_equal(got.tokens[i, :len(r)], r) for i, r in enumerate(rows))
                experts(got.tokens)
                out = handle.combine(got.tokens, topk_weights=w, config=PUSH)
                assert handle.complete() is out
                assert bits_equal(out, want)
                again = handle.combine(got.tokens, topk_weights=w)   # the rows are still mine
                assert bits_equal(again, want)
            assert handle.complete() is None
            group.check()

    for seed in range(3):
        run(program, seed=seed, mode="adversarial")


def test_two_micro_batches_of_different_k_in_flight() -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            handles = [group.create_handle(Layout.EXPERT_MAJOR, num_topk=k) for k in (1, 2)]
            for step in range(5):
                batches = [inputs(comm.rank, 10 * step + k, 3 + k, k) for k in (1, 2)]
                want = []
                for handle, (x, ids, w) in zip(handles, batches, strict=True):
                    got = handle.dispatch(x, topk_idx=ids)
                    experts(got.tokens)
                    want.append(handle.combine(got.tokens, topk_weights=w))
                made = [h.dispatch(x, config=SEND) for h, (x, _, _) in zip(handles, batches, strict=True)]
                for h, got in zip(handles, made, strict=True):
                    h.complete()
                    experts(got.tokens)
                outs = [h.combine(g.tokens, topk_weights=w, config=PUSH) for h, g, (_, _, w) in zip(handles, made, batches, strict=True)]
                for h in handles if step % 2 else reversed(handles):
                    h.complete()
                assert all(bits_equal(a, b) for a, b in zip(outs, want, strict=True))
            group.check()

    for seed in range(3):
        run(program, seed=seed, mode="adversarial")


def test_rank_major_has_the_same_bits_as_fused() -> None:
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            handle, other = (group.create_handle(Layout.RANK_MAJOR, num_topk=TOPK) for _ in range(2))
            for seed in range(4):
                x, ids, w = inputs(comm.rank, seed, (4, 0, 5)[(comm.rank + seed) % 3])
                w = w.nan_to_num()
                fused = other.dispatch(DispatchInputs(x, w), topk_idx=ids)
                received = [t.clone() for t in (fused.layout_info.src_rank_counters, fused.topk_idx)]
                experts(fused.tokens)
                want = other.combine(fused.tokens)
                plain = torch.zeros_like(fused.topk_idx)
                got = handle.dispatch(DispatchInputs(x, w), DispatchOutputs(topk_idx=plain), topk_idx=ids, config=SEND)
                assert handle.complete() is got and got.topk_idx is plain
                assert all(torch.equal(a, b) for a, b in zip((got.layout_info.src_rank_counters, plain), received, strict=True))
                experts(got.tokens)
                out = handle.combine(got.tokens, config=PUSH)
                assert handle.complete() is out and bits_equal(out, want)
                assert bits_equal(handle.combine(got.tokens), want)
                again = other.dispatch(DispatchInputs(x, w))     # a fused dispatch can be combined in halves, too
                experts(again.tokens)
                out = other.combine(again.tokens, config=PUSH)
                other.complete()
                assert bits_equal(out, want)
            with pytest.raises((TypeError, EpRefusedError)):
                handle.dispatch(DispatchInputs(x.float() if comm.rank == 1 else x, w), topk_idx=ids, config=SEND)
            handle.dispatch(DispatchInputs(x, w), topk_idx=ids, config=SEND)
            handle.complete()
            group.check()

    for seed in range(3):
        run(program, seed=seed, mode="adversarial")


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_quantised_rows_have_the_same_bits_as_fused(layout: Layout) -> None:
    def program(comm: object) -> None:
        x, ids, w = inputs(comm.rank, 3)
        x, given = x.repeat(1, 16), w.nan_to_num() if layout is Layout.RANK_MAJOR else None
        with Group.create(comm, config(hidden=HIDDEN * 16)) as group:
            a, b = (group.create_handle(layout, ids) for _ in range(2))
            want = a.dispatch(DispatchInputs(x, given), config=DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4))
            got = b.dispatch(DispatchInputs(x, given), config=DispatchConfig(send_only=True, quant_recipe=DispatchQuant.DS_FP8E3M4))
            assert b.complete() is got
            counts = want.layout_info.expert_counters if layout is Layout.EXPERT_MAJOR else want.layout_info.src_rank_counters
            for i, n in enumerate(counts.tolist()):
                assert torch.equal(got.tokens[i, :n].view(torch.uint8), want.tokens[i, :n].view(torch.uint8))
                assert bits_equal(got.scales[i, :n], want.scales[i, :n])
            group.check()

    run(program)


@pytest.mark.parametrize("stages", [1, 2])
def test_one_payload_slot_serves_two_micro_batches(stages: int) -> None:
    """The rows leave in the send half, so that the slot can take the next dispatch while the sums are still to come."""
    def program(comm: object) -> None:
        with Group.create(comm, config(num_slots=1, num_staging_slots=stages)) as group:
            a, b = (group.create_handle(Layout.EXPERT_MAJOR, num_topk=TOPK) for _ in range(2))
            for step in range(3):
                (xa, ia, wa), (xb, ib, wb) = inputs(comm.rank, step), inputs(comm.rank, 50 + step)
                got = a.dispatch(xa, topk_idx=ia)
                out_a = a.combine(got.tokens, topk_weights=wa, config=PUSH)
                if stages == 1:
                    a.complete()
                got = b.dispatch(xb, topk_idx=ib)
                out_b = b.combine(got.tokens, topk_weights=wb, config=PUSH)
                a.complete(), b.complete()
                for x, ids, w, out in ((xa, ia, wa, out_a), (xb, ib, wb, out_b)):
                    kept = torch.where(ids >= 0, w, 0).double()
                    want = (x.double() * kept.sum(1, keepdim=True)).float()
                    assert torch.allclose(out.float(), want, rtol=1e-2, atol=1e-2)
            group.check()

    run(program)


def test_plain_tensors() -> None:
    """A plain dispatch output is filled by complete; a plain combine input is pushed from where it is, without a copy into the window."""
    def program(comm: object) -> None:
        with Group.create(comm, config()) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=TOPK)
            x, ids, w = inputs(comm.rank, 3)
            mine = torch.zeros(EXPERTS // 3, 3 * MOST, HIDDEN, dtype=torch.bfloat16)
            got = handle.dispatch(x, DispatchOutputs(mine), topk_idx=ids, config=SEND)
            assert got.tokens is mine and not mine.any()
            handle.complete()
            rows = group.window.memory[group.map.slot(0):][: mine.numel() * 2].view(torch.bfloat16).view_as(mine)
            assert all(bits_equal(mine[i, :n], rows[i, :n]) and n < 3 * MOST for i, n in enumerate(got.layout_info.expert_counters.tolist()))
            before = rows.clone()
            experts(mine)
            out = torch.zeros_like(x)
            assert handle.combine(CombineInputs(mine), CombineOutputs(out, w), PUSH) is out
            handle.complete()
            assert bits_equal(rows, before)
            assert bits_equal(handle.combine(mine, topk_weights=w), out)
            group.check()

    run(program)


def test_refusals_are_sentences_on_all_ranks() -> None:
    def program(comm: object) -> None:
        x, ids, w = inputs(comm.rank, 3)
        with Group.create(comm, config(num_staging_slots=0)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids)
            for call in (lambda: handle.dispatch(x, config=SEND), lambda: handle.combine(handle.dispatch(x).tokens, topk_weights=w, config=PUSH)):
                with pytest.raises(ValueError, match="send_only needs staging slots: set GroupConfig.num_staging_slots"):
                    call()
        with Group.create(comm, config(num_staging_slots=1)) as group:
            a, b, c = (group.create_handle(Layout.EXPERT_MAJOR, ids) for _ in range(3))
            got = a.dispatch(x, config=SEND)
            for call in (lambda: a.dispatch(x), lambda: a.dispatch(x, config=SEND), lambda: a.combine(got.tokens, topk_weights=w)):
                with pytest.raises(EpError, match=r"the handle's dispatch is in flight; call complete\(\) first, or use another handle"):
                    call()
            other = b.dispatch(x)
            with pytest.raises(EpError, match="all 2 slots hold dispatches"):
                c.dispatch(x, config=SEND)
            a.complete()
            out = a.combine(got.tokens, topk_weights=w, config=PUSH)
            with pytest.raises(EpError, match="all 1 staging slots hold combines in flight; complete one, or set"):
                b.combine(other.tokens, topk_weights=w, config=PUSH)
            with pytest.raises(EpError, match="the handle's combine is in flight"):
                a.combine(got.tokens, topk_weights=w, config=PUSH)
            a.complete()
            assert bits_equal(b.combine(other.tokens, topk_weights=w, config=PUSH), b.complete())
            group.check()
            assert bits_equal(out, b.combine(other.tokens, topk_weights=w))

    run(program)


@pytest.mark.parametrize("who", [0, 2])
def test_a_refused_half_is_refused_everywhere_and_the_next_is_right(who: int) -> None:
    def program(comm: object) -> list[str]:
        x, ids, w = inputs(comm.rank, 3)
        told = []
        with Group.create(comm, config(num_staging_slots=1)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids)
            for _ in range(3):
                with pytest.raises((TypeError, EpRefusedError)) as raised:
                    handle.dispatch(x.float() if comm.rank == who else x, config=SEND)
                told.append(str(raised.value))
                got = handle.dispatch(x, config=SEND)
                handle.complete()
                with pytest.raises((ValueError, EpRefusedError)) as raised:
                    handle.combine(got.tokens, topk_weights=w[:1] if comm.rank == who else w, config=PUSH)
                told.append(str(raised.value))
                assert handle.complete() is None
                out = handle.combine(got.tokens, topk_weights=w, config=PUSH)
                handle.complete()
                group.check()
                assert bits_equal(out, handle.combine(got.tokens, topk_weights=w))
        return told

    results = run(program)
    for rank, told in enumerate(results):
        if rank == who:
            assert told[0].startswith("tokens must have dtype") and told[1].startswith("topk_weights must have shape")
        else:
            assert f"rank {who} refused the call (an argument of the wrong type)" in told[0]
            assert f"rank {who} refused the call (an argument of the wrong shape)" in told[1]


def test_a_refusal_of_another_process_leaves_all_with_the_same_slots() -> None:
    """Where a refusal is not known at once, the others hold their staging slot until they complete; the rank that refused must do so, too."""
    def program(comm: object) -> None:
        submit = comm.submit
        comm.submit = lambda *a, **k: submit(*a, **k) and False
        x, ids, w = inputs(comm.rank, 3)
        with Group.create(comm, config(num_staging_slots=2)) as group:
            a, b = (group.create_handle(Layout.EXPERT_MAJOR, ids) for _ in range(2))
            rows = [h.dispatch(x).tokens for h in (a, b)]
            want = b.combine(rows[1], topk_weights=w)
            for finish in (lambda: a.complete(), lambda: a.dispatch(x)):
                with pytest.raises(ValueError, match="topk_weights must have shape"):
                    a.combine(rows[0], topk_weights=w[:1], config=PUSH)
                assert group.staging_owner == [a.id, 0]
                out = b.combine(rows[1], topk_weights=w, config=PUSH)
                assert group.staging_owner == [a.id, b.id]
                b.complete()
                assert bits_equal(out, want)
                finish()
                assert group.staging_owner == [0, 0]
            group.check()

    run(program, 1)


def test_a_staged_call_against_a_fused_one_is_named() -> None:
    def program(comm: object) -> str:
        x, ids, _ = inputs(comm.rank, 3)
        with Group.create(comm, config()) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids)
            handle.dispatch(x, config=SEND if comm.rank else None)
            with pytest.raises(EpError) as raised:
                group.check()
            handle.complete() if comm.rank == 5 else None
            return str(raised.value)

    told = run(program, 2)
    assert "kind dispatch here, staged_dispatch there" in told[0] and "kind staged_dispatch here, dispatch there" in told[1]


def test_the_epoch_of_staging_slots_wraps() -> None:
    def program(comm: object) -> None:
        x, ids, w = inputs(comm.rank, 3)
        with Group.create(comm, config(num_staging_slots=2)) as group:
            group.start_at(2**32 - 2)
            comm.barrier()
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids)
            want = None
            for _ in range(6):
                got = handle.dispatch(x, config=SEND)
                handle.complete()
                out = handle.combine(got.tokens, topk_weights=w, config=PUSH)
                handle.complete()
                group.check()
                assert want is None or bits_equal(out, want)
                want = out

    run(program)
