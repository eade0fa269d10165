"""LL EXPERT_MAJOR on a GPU: several ranks of one real NCCL communicator share it; every result against the oracle by bits. ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from ncclep_py import (
    CombineOutputs,
    EpError,
    EpMismatchError,
    EpOverflowError,
    EpRefusedError,
    EpTimeoutError,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
)
from ncclep_py import reference as ref
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def config(experts: int, tokens: int, hidden: int, topk: int, **more: object) -> GroupConfig:
    more = {"max_num_sms": 8, "timeout_ns": 5_000_000_000} | more
    return GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, **more)


def transformed(rows: torch.Tensor, rank: int, local: int) -> torch.Tensor:
    """A different, exactly computable change for every expert, so that a wrong expert shows: its sign alternates and it scales by a power of two."""
    for i in range(local):
        e = rank * local + i
        rows[i] *= (-1.0 if e % 2 else 1.0) * 2.0 ** (e % 3)
    return rows


def compare(world: LocalWorld, cfg: GroupConfig, counts: list[int], *, rounds: int = 1, dropped: float = 0.1, epoch: int | None = None,
            idx_dtype: torch.dtype = torch.int64, routing: object = None) -> list[bool]:
    """Run `rounds` dispatch + combine on all ranks and compare every dispatched and combined row with the oracle. Returns which
    ranks reported rows beyond a plane."""
    ranks, dtype, local = world.num_ranks, cfg.token_type.torch_dtype(), cfg.num_experts // world.num_ranks
    ids = [routing(r) if routing else random_routing(r, counts[r], cfg.num_topk, cfg.num_experts, dropped=dropped, dtype=idx_dtype)
           for r in range(ranks)]
    tokens = [stamped_tokens(r, counts[r], cfg.hidden, dtype) for r in range(ranks)]
    weights = [weights_like(i, seed=r) for r, i in enumerate(ids)]

    def program(comm: object) -> tuple:
        with Group.create(comm, cfg) as group:
            if epoch is not None:
                group.start_at(epoch)
                comm.barrier()
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids[comm.rank].cuda())
            overflow = False
            for _ in range(rounds):
                got = handle.dispatch(tokens[comm.rank].cuda())
                try:
                    group.check()
                except EpOverflowError:
                    overflow = True
                rows, counters = got.tokens.cpu(), got.layout_info.expert_counters.cpu()
                transformed(got.tokens, comm.rank, local)
                out = handle.combine(got.tokens, topk_weights=weights[comm.rank].cuda()).cpu()
                group.check()
            return rows, counters, out, overflow

    results = world.run(program)
    want = ref.ll_expert_major_dispatch(tokens, ids, num_experts=cfg.num_experts, max_dispatch_tokens_per_rank=cfg.max_dispatch_tokens_per_rank)
    for r, (rows, counters, _, _) in enumerate(results):
        assert torch.equal(counters, want[r].expert_counters)
        for expert in range(local):
            n = int(counters[expert])
            assert bits_equal(rows[expert, :n], want[r].tokens[expert, :n]), first_difference(rows[expert, :n], want[r].tokens[expert, :n])
    outputs = ref.ll_expert_major_combine([transformed(w.tokens.clone(), r, local) for r, w in enumerate(want)], [w.rows for w in want], weights)
    for (_, _, out, _), expect in zip(results, outputs, strict=True):
        assert bits_equal(out, expect), first_difference(out, expect)
    assert [w.overflow > 0 for w in want] == [r[3] for r in results]
    return [r[3] for r in results]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_ranks(ranks: int) -> None:
    with LocalWorld(ranks, "nccl") as world:
        compare(world, config(ranks * 3, 17, 520, min(3, ranks * 3)), [(5 * r + 3) % 18 for r in range(ranks)], rounds=2)
        compare(world, config(ranks, 4, 8, 1), [r % 3 for r in range(ranks)])
        compare(world, config(ranks * 4, 16, 64, 4), [0] * ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_topk_and_ids(dtype: torch.dtype) -> None:
    with LocalWorld(4, "nccl") as world:
        for topk, hidden, idx in ((1, 8, torch.int32), (2, 136, torch.int64), (9, 2880, torch.int32), (32, 72, torch.int64)):
            compare(world, config(48, 33, hidden, topk, dtype=dtype), [33, 1, 0, 20], idx_dtype=idx)


def test_full_size_and_one_block() -> None:
    with LocalWorld(8, "nccl") as world:
        compare(world, config(128, 128, 7168, 8, max_num_sms=16), [128] * 8, dropped=0.02)
        compare(world, config(64, 64, 512, 8, max_num_sms=1), [64, 3, 0, 7, 64, 1, 2, 9])


def test_one_expert_duplicates_and_overflow() -> None:
    with LocalWorld(3, "nccl") as world:
        cfg = config(6, 8, 64, 4)
        one = torch.tensor([[3, -1, -1, -1]] * 8)
        assert compare(world, cfg, [8, 8, 8], routing=lambda r: one) == [False] * 3
        assert compare(world, cfg, [3, 0, 3], routing=lambda r: torch.tensor([[3, 3, 5, -1]] * 3)[: 0 if r == 1 else 3]) == [False] * 3
        assert compare(world, cfg, [8, 8, 8], routing=lambda r: torch.tensor([[3, 3, 3, -1]] * 8)) == [False, True, True]


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3])
def test_epoch_wraps(epoch: int) -> None:
    with LocalWorld(4, "nccl") as world:
        compare(world, config(8, 16, 128, 2), [16, 2, 0, 9], rounds=6, epoch=epoch)


def test_thousand_duplicate_heavy_rounds_without_a_bad_row() -> None:
    """All tokens to eight experts, integer payload, so every sum is exact; a wrong row is counted, not averaged away."""
    ranks, tokens, hidden, topk = 4, 64, 1024, 8
    cfg = config(64, tokens, hidden, topk)

    def program(comm: object) -> int:
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        with Group.create(comm, cfg) as group:
            ids = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i)) for i in range(tokens)]).cuda()
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids)
            ones = torch.ones(tokens, topk, device="cuda")
            base = (torch.arange(tokens, device="cuda") % 16 + comm.rank).to(torch.bfloat16)
            for step in range(1000):
                x = (base + step % 7)[:, None].expand(-1, hidden).contiguous()
                got = handle.dispatch(x)
                out = handle.combine(got.tokens, topk_weights=ones)
                bad += (out != x * 8).any(1).sum()
            group.check()
        return int(bad)

    with LocalWorld(ranks, "nccl") as world:
        assert world.run(program) == [0] * ranks


def test_graph_replays_with_new_tokens_routing_and_weights() -> None:
    ranks, cfg = 4, config(16, 8, 256, 3)

    def program(comm: object) -> list:
        with Group.create(comm, cfg) as group:
            ids = torch.zeros(8, 3, dtype=torch.int64, device="cuda")
            x, out = torch.zeros(8, 256, dtype=torch.bfloat16, device="cuda"), torch.zeros(8, 256, dtype=torch.bfloat16, device="cuda")
            weights = torch.zeros(8, 3, device="cuda")
            handle = group.create_handle(Layout.EXPERT_MAJOR, ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                got = handle.dispatch(x)
                got.tokens.mul_(2)
                handle.combine(got.tokens, CombineOutputs(out, weights))
            kept = []
            for step in range(20):
                ids.copy_(random_routing(comm.rank, 8, 3, 16, seed=step, dropped=step / 20))
                x.copy_(stamped_tokens(comm.rank, 8, 256, torch.bfloat16, seed=step))
                weights.copy_(weights_like(ids, seed=step))
                comm.together(graph.replay)
                kept.append((ids.cpu(), x.cpu(), weights.cpu(), out.cpu()))
            group.check()
            return kept

    with LocalWorld(ranks, "nccl") as world:
        for rows in world.run(program):
            for ids, x, weights, out in rows:
                want = ref.moe_layer(x, ids, weights, [lambda t: t * 2] * 16)
                assert bits_equal(out, want), first_difference(out, want)


def test_refusal_mismatch_and_recovery() -> None:
    """One rank's bad call raises there and, at their next call or check, on all others; the next good call is right."""
    def program(comm: object) -> list[str]:
        seen = []
        with Group.create(comm, config(6, 8, 64, 2)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2)
            ids = random_routing(comm.rank, 8, 2, 6).cuda()
            x = stamped_tokens(comm.rank, 8, 64, torch.bfloat16).cuda()
            try:
                handle.dispatch(x.float() if comm.rank == 1 else x, topk_idx=ids)
                group.check()
            except (TypeError, EpRefusedError) as e:
                seen.append(f"{type(e).__name__}: {e}")
            got = handle.dispatch(x, topk_idx=ids)
            out = handle.combine(got.tokens, topk_weights=torch.full((8, 2), 0.5, device="cuda"))
            group.check()
            assert bits_equal(out, x)
            other = group.create_handle(Layout.EXPERT_MAJOR, num_topk=1)
            try:
                (other if comm.rank == 0 else handle).dispatch(x, topk_idx=ids[:, :1].contiguous() if comm.rank == 0 else ids)
                group.check()
            except EpMismatchError as e:
                seen.append(str(e))
        return seen

    with LocalWorld(3, "nccl") as world:
        results = world.run(program)
    assert results[1][0].startswith("TypeError: tokens must have dtype torch.bfloat16, got torch.float32")
    for r in (0, 2):
        assert results[r][0].startswith("EpRefusedError") and "rank 1 refused" in results[r][0]
    assert all("num_topk" in r[1] for r in results)


def test_a_late_rank_is_named_and_the_next_call_is_right() -> None:
    """Rank 1's stream is held up past the timeout: everybody raises, epochs stay equal."""
    def program(comm: object) -> str:
        with Group.create(comm, config(6, 8, 64, 2, timeout_ns=200_000_000)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, random_routing(comm.rank, 8, 2, 6).cuda())
            x = stamped_tokens(comm.rank, 8, 64, torch.bfloat16).cuda()
            weights = torch.full((8, 2), 0.5, device="cuda")
            handle.combine(handle.dispatch(x).tokens, topk_weights=weights)
            group.check()
            if comm.rank == 1:
                torch.cuda._sleep(2_000_000_000)
            message = ""
            try:
                handle.dispatch(x)
                group.check()
            except EpTimeoutError as e:
                assert e.culprit == 1 or comm.rank == 1
                message = str(e)
            out = handle.combine(handle.dispatch(x).tokens, topk_weights=weights)
            group.check()
            assert bits_equal(out, x)
            return message

    with LocalWorld(3, "nccl") as world:
        messages = world.run(program)
    assert all(messages) and all("rank 1" in m for m in messages)


def test_first_use_inside_capture_is_refused() -> None:
    def program(comm: object) -> str:
        with Group.create(comm, config(4, 8, 64, 2)) as group:
            handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=2, idx_dtype=torch.int64)
            ids = random_routing(comm.rank, 8, 2, 4, dtype=torch.int32).cuda()
            x = stamped_tokens(comm.rank, 8, 64, torch.bfloat16).cuda()
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(EpError, match="before capturing") as raised, torch.cuda.graph(
                    graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                handle.dispatch(x, topk_idx=ids)
            out = handle.combine(handle.dispatch(x, topk_idx=ids).tokens, topk_weights=torch.full((8, 2), 0.5, device="cuda"))
            group.check()
            assert bits_equal(out, x)
            return str(raised.value)

    with LocalWorld(2, "nccl") as world:
        assert all("ll_dispatch" in m for m in world.run(program))
