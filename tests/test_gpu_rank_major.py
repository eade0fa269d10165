"""LL RANK_MAJOR on a GPU: several ranks of one real NCCL communicator share it; every result against the oracle by bits. ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from ncclep_py import CombineOutputs, DispatchInputs, EpRefusedError, ExpertIdKind, Group, GroupConfig, Layout, LayoutInfo, LocalWorld
from ncclep_py import reference as ref
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def config(experts: int, tokens: int, hidden: int, topk: int, **more: object) -> GroupConfig:
    more = {"max_num_sms": 8, "timeout_ns": 5_000_000_000} | more
    return GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, **more)


def transformed(rows: torch.Tensor, counts: torch.Tensor, rank: int) -> torch.Tensor:
    """A different, exactly computable change for every (owner, source), so that a wrong row shows."""
    for source, n in enumerate(counts.tolist()):
        rows[source, :n] *= (-1.0 if (rank + source) % 2 else 1.0) * 2.0 ** ((rank + 2 * source) % 3)
    return rows


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert bits_equal(got, want), f"{what}: {first_difference(got, want)}"


def compare(world: LocalWorld, cfg: GroupConfig, counts: list[int], *, rounds: int = 1, dropped: float = 0.1, epoch: int | None = None,
            idx_dtype: torch.dtype = torch.int64, kind: ExpertIdKind = ExpertIdKind.AUTO, routing: object = None) -> None:
    """Run `rounds` dispatch + combine on all ranks and compare everything dispatched and combined with the oracle."""
    ranks, dtype = world.num_ranks, cfg.token_type.torch_dtype()
    ids = [routing(r) if routing else random_routing(r, counts[r], cfg.num_topk, cfg.num_experts, dropped=dropped, dtype=idx_dtype)
           for r in range(ranks)]
    tokens = [stamped_tokens(r, counts[r], cfg.hidden, dtype) for r in range(ranks)]
    weights = [weights_like(i, seed=r) for r, i in enumerate(ids)]

    def program(comm: object) -> tuple:
        with Group.create(comm, cfg) as group:
            if epoch is not None:
                group.start_at(epoch)
                comm.barrier()
            handle = group.create_handle(Layout.RANK_MAJOR, ids[comm.rank].cuda())
            for _ in range(rounds):
                got = handle.dispatch(DispatchInputs(tokens[comm.rank].cuda(), weights[comm.rank].cuda()),
                                      layout_info=LayoutInfo(recv_topk_idx_kind=kind))
                received = tuple(t.cpu() for t in (got.tokens, got.topk_idx, got.topk_weights, got.layout_info.src_rank_counters))
                transformed(got.tokens, received[3], comm.rank)
                out = handle.combine(got.tokens).cpu()
                group.check()
            return *received, out

    results = world.run(program)
    want = ref.ll_rank_major_dispatch(tokens, ids, weights, num_experts=cfg.num_experts, global_ids=kind is ExpertIdKind.GLOBAL,
                                      max_dispatch_tokens_per_rank=cfg.max_dispatch_tokens_per_rank)
    outputs = ref.ll_rank_major_combine([transformed(w.tokens.clone(), w.src_rank_counters, r) for r, w in enumerate(want)], [w.rows for w in want])
    for r, ((rows, topk_idx, topk_weights, counters, out), w, expect) in enumerate(zip(results, want, outputs, strict=True)):
        assert torch.equal(counters, w.src_rank_counters), (r, counters, w.src_rank_counters)
        assert torch.equal(topk_idx, w.topk_idx), f"rank {r}: {first_difference(topk_idx, w.topk_idx)}"
        for source, n in enumerate(counters.tolist()):
            same(rows[source, :n], w.tokens[source, :n], f"rank {r}, rows of {source}")
            same(topk_weights[source, :n], w.topk_weights[source, :n], f"rank {r}, weights of {source}")
        same(out, expect, f"rank {r}, combined")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks(ranks: int) -> None:
    with LocalWorld(ranks, "nccl") as world:
        compare(world, config(ranks * 3, 17, 520, min(3, ranks * 3)), [(5 * r + 3) % 18 for r in range(ranks)], rounds=2)
        compare(world, config(ranks, 4, 8, 1), [r % 3 for r in range(ranks)])
        compare(world, config(ranks * 4, 16, 64, 4), [0] * ranks)
        compare(world, config(ranks * 4, 1, 7168, 4, max_num_sms=16), [1] * ranks, rounds=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_topk_and_ids(dtype: torch.dtype) -> None:
    with LocalWorld(4, "nccl") as world:
        for topk, hidden, idx, kind in ((1, 8, torch.int32, ExpertIdKind.LOCAL), (2, 136, torch.int64, ExpertIdKind.GLOBAL),
                                        (9, 2880, torch.int32, ExpertIdKind.GLOBAL), (32, 72, torch.int64, ExpertIdKind.LOCAL)):
            compare(world, config(48, 33, hidden, topk, dtype=dtype), [33, 1, 0, 20], idx_dtype=idx, kind=kind)


def test_full_size_and_one_block() -> None:
    with LocalWorld(8, "nccl") as world:
        compare(world, config(128, 128, 7168, 8, max_num_sms=16), [128] * 8, dropped=0.02)
        compare(world, config(64, 64, 512, 8, max_num_sms=1), [64, 3, 0, 7, 64, 1, 2, 9])
        compare(world, config(1024, 128, 512, 8, max_num_sms=4), [128, 127, 1, 0, 33, 65, 128, 99])


def test_one_rank_duplicates_and_ids_out_of_range() -> None:
    with LocalWorld(3, "nccl") as world:
        cfg = config(6, 8, 64, 4)
        compare(world, cfg, [8, 8, 8], routing=lambda r: torch.tensor([[3, 2, 3, 2]] * 8))
        compare(world, cfg, [8, 8, 8], routing=lambda r: torch.tensor([[5, 0, 4, 0], [-1, 3, -1, -1]] * 4))
        compare(world, cfg, [3, 3, 3], routing=lambda r: torch.tensor([[6, -9, 1 << 40, 1], [-1, -1, -1, -1], [0, 5, 5, 2]]))


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3])
def test_epoch_wraps(epoch: int) -> None:
    with LocalWorld(4, "nccl") as world:
        compare(world, config(8, 16, 128, 2), [16, 2, 0, 9], rounds=6, epoch=epoch)


def test_thousand_duplicate_heavy_rounds_without_a_bad_row() -> None:
    """Eight experts of all ranks, half of them twice; integer payload, so every sum is exact; a wrong row, id or weight is counted."""
    ranks, tokens, hidden, topk = 4, 64, 1024, 8
    cfg = config(64, tokens, hidden, topk)

    def program(comm: object) -> int:
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        with Group.create(comm, cfg) as group:
            g = [torch.Generator().manual_seed(i) for i in range(tokens)]
            ids = torch.stack([torch.randint(0, 4, (8,), generator=g[i]) * 16 + i % 16 for i in range(tokens)]).cuda()
            owners = torch.tensor([len(set(row)) for row in (ids // 16).tolist()], device="cuda")
            handle = group.create_handle(Layout.RANK_MAJOR, ids)
            weights = torch.arange(tokens * topk, device="cuda").view(tokens, topk).float()
            base = (torch.arange(tokens, device="cuda") % 16 + comm.rank).to(torch.bfloat16)
            here = (ids // 16 == comm.rank).any(1)   # the same routing on every rank, so I know what I get from each
            n = int(here.sum())
            want_ids = torch.where(ids // 16 == comm.rank, ids - 16 * comm.rank, -1)[here].int()
            for step in range(1000):
                x = (base + step % 7)[:, None].expand(-1, hidden).contiguous()
                got = handle.dispatch(DispatchInputs(x, weights + step))
                bad += (got.topk_idx[:, :n] != want_ids).any(2).sum() + (got.topk_idx[:, n:] != -1).sum()
                bad += (got.topk_weights[:, :n] != (weights + step)[here]).any(2).sum() + (got.layout_info.src_rank_counters != n).sum()
                out = handle.combine(got.tokens)
                bad += (out != x * owners[:, None]).any(1).sum()
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
            handle = group.create_handle(Layout.RANK_MAJOR, ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                got = handle.dispatch(DispatchInputs(x, weights))
                got.tokens.mul_(2)
                handle.combine(got.tokens, CombineOutputs(out))
            kept = []
            for step in range(20):
                ids.copy_(random_routing(comm.rank, 8, 3, 16, seed=step, dropped=step / 20))
                x.copy_(stamped_tokens(comm.rank, 8, 256, torch.bfloat16, seed=step))
                weights.copy_(weights_like(ids, seed=step))
                comm.together(graph.replay)
                kept.append(tuple(t.cpu() for t in (ids, x, weights, out, got.topk_idx, got.layout_info.src_rank_counters)))
            group.check()
            return kept

    with LocalWorld(ranks, "nccl") as world:
        for step in zip(*world.run(program), strict=True):
            want = ref.ll_rank_major_dispatch([s[1] for s in step], [s[0] for s in step], [s[2] for s in step], num_experts=16,
                                              max_dispatch_tokens_per_rank=8)
            sums = ref.ll_rank_major_combine([w.tokens * 2 for w in want], [w.rows for w in want])
            for (_, _, _, out, topk_idx, counters), w, expect in zip(step, want, sums, strict=True):
                assert torch.equal(topk_idx, w.topk_idx) and torch.equal(counters, w.src_rank_counters)
                same(out, expect, "combined")


def test_layouts_in_turn_and_a_refusal() -> None:
    """Two layouts, two K and two id types on one group and one slot, with a refused call in between."""
    cfg = config(12, 16, 264, 4)

    def program(comm: object) -> None:
        with Group.create(comm, cfg) as group:
            rm, em = (group.create_handle(layout, num_topk=k) for layout, k in ((Layout.RANK_MAJOR, 4), (Layout.EXPERT_MAJOR, 2)))
            for step in range(30):
                ids, few = (random_routing(comm.rank, 16, k, 12, seed=step, dtype=d) for k, d in ((4, torch.int32), (2, torch.int64)))
                x = stamped_tokens(comm.rank, 16, 264, torch.bfloat16, seed=step)
                if step % 10 == 3:
                    with pytest.raises((TypeError, EpRefusedError)):
                        bad = x.cuda().float() if comm.rank == 1 else x.cuda()
                        rm.dispatch(DispatchInputs(bad, torch.ones(16, 4, device="cuda")), topk_idx=ids.cuda())
                        group.check()
                got = rm.dispatch(DispatchInputs(x.cuda(), torch.ones(16, 4, device="cuda")), topk_idx=ids.cuda())
                out = rm.combine(got.tokens).cpu()
                owners = torch.tensor([len(set(row)) for row in (ids // 4).tolist()])[:, None]
                sums = torch.zeros(16, 264)
                for i in range(4):
                    sums += torch.where(owners > i, x.float(), 0.0)
                same(out, sums.bfloat16(), f"step {step}, RANK_MAJOR")
                out = em.combine(em.dispatch(x.cuda(), topk_idx=few.cuda()).tokens, topk_weights=torch.full((16, 2), 0.5, device="cuda")).cpu()
                same(out, x, f"step {step}, EXPERT_MAJOR")
            group.check()

    with LocalWorld(3, "nccl") as world:
        world.run(program)
