"""HIGH_THROUGHPUT on a GPU: several ranks of one real NCCL communicator share it; every result against the oracle by bits. ``-m gpu``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_ht_host import BACKWARD, COMBINE_BACKWARD, DROP, LAYOUTS, Case

from ncclep_py import (
    Algorithm,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    EpError,
    EpOverflowError,
    EpRefusedError,
    EpTimeoutError,
    Group,
    GroupConfig,
    Layout,
    LayoutInfo,
    LocalWorld,
)
from ncclep_py import reference as ref
from ncclep_py.elastic import ElasticBuffer
from ncclep_py.testing import bits_equal, first_difference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def config(experts: int, tokens: int, hidden: int, topk: int, **more: Any) -> GroupConfig:
    more = {"max_num_sms": 8, "timeout_ns": 5_000_000_000, "algorithm": Algorithm.HIGH_THROUGHPUT} | more
    return GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, **more)


def equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert bits_equal(got.cpu(), want), f"{what}: {first_difference(got.cpu(), want)}"


def step(case: Case, r: int, handle: Any, inplace: bool = True) -> None:
    """Update and one training step, each result compared."""
    handle.update(case.ids[r].cuda())
    n, want = case.used(r), case.received[r]
    got = handle.dispatch(case.tokens[r].cuda(), layout_info=LayoutInfo(recv_topk_idx_kind=case.kind), topk_weights=case.weights[r].cuda())
    case.check_counts(r, got.layout_info)
    equal(got.tokens[:n], want.tokens[:n], f"rank {r}, rows")
    defined = len(want.topk_weights) if case.flat and case.cfg.max_recv_tokens_per_rank else n
    equal(got.topk_weights[:defined], want.topk_weights[:defined], f"rank {r}, weights")
    if case.flat:
        equal(got.topk_idx[:defined], want.topk_idx[:defined], f"rank {r}, ids")
    rows = case.put(got.tokens, case.rows[r].cuda()) if inplace else case.rows[r].cuda()
    equal(handle.combine(rows), case.combined[r].tokens, f"rank {r}, combined rows")
    got = handle.dispatch(case.gradients[r].cuda(), config=BACKWARD)
    equal(got.tokens[:n], case.back[r].tokens[:n], f"rank {r}, gradient rows")
    into = CombineOutputs()
    out = handle.combine(CombineInputs(case.back_rows[r].cuda(), case.back_weights[r].cuda()), into, COMBINE_BACKWARD)
    equal(out, case.combined_back[r].tokens, f"rank {r}, gradients of tokens")
    equal(into.topk_weights, case.combined_back[r].topk_weights, f"rank {r}, gradients of weights")


def steps(world: LocalWorld, cases: Sequence[Case], inplace: bool = True, epoch: int | None = None) -> None:
    """Training steps over several routings on one handle."""
    def program(comm: Any) -> None:
        with Group.create(comm, cases[0].cfg) as group:
            if epoch is not None:
                group.start_at(epoch)
                comm.barrier()
            handle = cases[0].handle(group, comm.rank)
            for case in cases:
                step(case, comm.rank, handle, inplace)
            group.check()

    world.run(program)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_ranks(ranks: int, layout: Layout) -> None:
    with LocalWorld(ranks, "nccl") as world:
        cfg = config(ranks * 3, 40, 520, min(3, ranks * 3), num_slots=2)
        steps(world, [Case(cfg, layout, [(17 * r + 13 * i) % 41 for r in range(ranks)], seed=i, alignment=8) for i in range(3)])
        cfg = config(ranks, 4, 8, 1, max_recv_tokens_per_rank=4 * ranks)
        steps(world, [Case(cfg, layout, [r % 3 for r in range(ranks)]), Case(cfg, layout, [0] * ranks)], inplace=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_topk_and_ids(dtype: torch.dtype, layout: Layout) -> None:
    with LocalWorld(4, "nccl") as world:
        for topk, hidden, idx in ((1, 8, torch.int32), (2, 136, torch.int64), (9, 2880, torch.int32), (32, 72, torch.int64)):
            cfg = config(44, 300, hidden, topk, dtype=dtype)
            steps(world, [Case(cfg, layout, [300, 1, 0, 77], idx_dtype=idx, global_ids=topk == 2, alignment=16)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_realistic_size(layout: Layout) -> None:
    ranks, tokens, experts, topk, hidden = 8, 64, 128, 8, 7168
    with LocalWorld(ranks, "nccl") as world:
        cfg = config(experts, tokens, hidden, topk, max_num_sms=16)
        steps(world, [Case(cfg, layout, [tokens] * ranks, alignment=64, dropped=0.02)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sms", [1, 3, 16])
def test_grids(sms: int, layout: Layout) -> None:
    with LocalWorld(3, "nccl") as world:
        steps(world, [Case(config(30, 700, 64, 6, max_num_sms=sms), layout, [700, 0, 333], alignment=4)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 5])
def test_epoch_wraps(epoch: int, layout: Layout) -> None:
    with LocalWorld(4, "nccl") as world:
        cfg = config(8, 16, 128, 2)
        steps(world, [Case(cfg, layout, [16, 2, 0, 9], seed=i) for i in range(3)], epoch=epoch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_duplicates_and_ids_out_of_range(layout: Layout) -> None:
    with LocalWorld(3, "nccl") as world:
        ids = [torch.tensor([[3, 3, 5, -1], [5, 5, 5, 5], [0, 9, -7, 0]]), torch.tensor([[1, 4, 1, 4]] * 5), torch.tensor([[-1] * 4] * 2)]
        steps(world, [Case(config(6, 8, 64, 4), layout, [3, 5, 2], ids=ids)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [1, 5])
def test_maps_equal_the_simulators(blocks: int, layout: Layout) -> None:
    """Routes, places and zones as numpy makes them, with chunks of many tokens, few and none, and tokens that do not fill a warp."""
    for topk, counts in ((3, [500, 0, 77]), (32, [90, 3, 1]), (1, [0, 640, 33]), (9, [31, 250, 16])):
        cfg = config(36, 640, 8, topk, max_num_sms=blocks, max_recv_tokens_per_rank=700, overflow_policy=DROP)
        case = Case(cfg, layout, counts, alignment=8)

        def program(comm: Any, cfg: GroupConfig = cfg, case: Case = case) -> list[torch.Tensor]:
            with Group.create(comm, cfg) as group:
                handle = case.handle(group, comm.rank)
                handle.update(case.ids[comm.rank].to(comm.device))
                group.check()
                maps, plan = handle._maps.cpu(), handle._maps_plan
                used = 8 * case.ids[comm.rank].numel()
                return [maps[plan.zones: plan.received + 16], maps[plan.routes: plan.routes + used], maps[plan.places: plan.places + used]]

        with LocalWorld(3, "nccl") as gpu, LocalWorld(3, "sim", blocks=blocks, warps=16) as sim:
            for rank, (found, want) in enumerate(zip(gpu.run(program), sim.run(program), strict=True)):
                for name, a, b in zip(("zones", "routes", "places"), found, want, strict=True):
                    assert torch.equal(a, b), (rank, name, a.view(torch.int64)[:20], b.view(torch.int64)[:20])


# ---- many tokens -----------------------------------------------------------------------------------------------------------------
def flat_rows(ids: Sequence[torch.Tensor], rank: int, local: int) -> torch.Tensor:
    """(source, token) of every FLAT row of a rank, vectorised, ``[n, 2]``."""
    parts = []
    for source, i in enumerate(ids):
        token = ((i // local == rank) & (i >= 0)).any(1).nonzero()[:, 0]
        parts.append(torch.stack([torch.full_like(token, source), token], 1))
    return torch.cat(parts)


def zone_rows(ids: Sequence[torch.Tensor], rank: int, local: int) -> torch.Tensor:
    """(source, token) of every EXPERT_MAJOR row of a rank without padding, ``[n, 2]``."""
    parts = []
    for e in range(rank * local, (rank + 1) * local):
        for source, i in enumerate(ids):
            token = (i == e).any(1).nonzero()[:, 0]
            parts.append(torch.stack([torch.full_like(token, source), token], 1))
    return torch.cat(parts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_no_tokens_to_65536_and_back(layout: Layout) -> None:
    """Tokens per rank grow to 65,536, shrink and grow again on one handle; rows carry (source, token)."""
    ranks, experts, topk, hidden = 4, 20, 4, 16
    most, local = 65536, experts // ranks
    rows_of = flat_rows if layout is Layout.FLAT else zone_rows
    routings = []
    for n in (0, 70, 65536, 9000, 0, 65536):
        g = torch.Generator(device="cuda").manual_seed(n)
        counts = [max(n - 7 * r, 0) for r in range(ranks)]
        routings.append([torch.rand(c, experts, generator=g, device="cuda").topk(topk, 1)[1] for c in counts])

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, config(experts, most, hidden, topk)) as group:
            handle = group.create_handle(layout, num_topk=topk)
            for ids in routings:
                mine = torch.zeros(len(ids[r]), hidden, dtype=torch.bfloat16, device="cuda")
                token = torch.arange(len(ids[r]), device="cuda")
                mine[:, 0], mine[:, 1], mine[:, 2] = r, token % 256, token // 256
                handle.update(ids[r])
                got = handle.dispatch(mine, topk_weights=torch.ones(len(ids[r]), topk, device="cuda"))
                want = rows_of(ids, r, local)
                n = int(got.layout_info.recv_total_counter[0])
                assert n == len(want)
                found = torch.stack([got.tokens[:n, 0].long(), got.tokens[:n, 1].long() + 256 * got.tokens[:n, 2].long()], 1)
                assert torch.equal(found, want)
                got.tokens[:n, 3:] = 1.0
                out = handle.combine(got.tokens)
                hits = ((ids[r] // local).unsqueeze(2) == torch.arange(ranks, device="cuda")).any(1).sum(1) if layout is Layout.FLAT else topk
                assert torch.equal(out[:, 3].long(), torch.zeros(len(mine), dtype=torch.long, device="cuda") + hits)
                group.check()

    with LocalWorld(ranks, "nccl") as world:
        world.run(program)


def test_receive_rows_beyond_2_to_the_31_elements() -> None:
    """2 ranks x 76,800 tokens of 16,384 elements to rank 1: 2.5e9 elements, 5 GB."""
    tokens, hidden = 76800, 16384
    cfg = config(2, tokens, hidden, 1, max_recv_tokens_per_rank=2 * tokens)

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle = group.create_handle(Layout.FLAT, torch.ones(tokens, 1, dtype=torch.int64, device="cuda"))
            token = torch.arange(tokens, device="cuda")
            mine = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")
            mine[:] = ((token % 251) + r)[:, None].to(torch.bfloat16)
            got = handle.dispatch(mine, topk_weights=torch.ones(tokens, 1, device="cuda"))
            if r == 1:
                for source in range(2):
                    for column in (0, hidden - 1):
                        found = got.tokens[source * tokens:(source + 1) * tokens, column].float()
                        assert torch.equal(found, ((token % 251) + source).to(torch.bfloat16).float())
            out = handle.combine(got.tokens)
            assert torch.equal(out[:, -1], mine[:, -1]) and torch.equal(out[:, 0], mine[:, 0])
            group.check()

    with LocalWorld(2, "nccl") as world:
        world.run(program)


# ---- budgets ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drop(layout: Layout) -> None:
    with LocalWorld(4, "nccl") as world:
        for budget in (64, 100, 130):
            cfg = config(8, 64, 64, 3, max_recv_tokens_per_rank=budget, overflow_policy=DROP)
            steps(world, [Case(cfg, layout, [64, 64, 3, 64], alignment=16, seed=budget)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trap_is_an_exception_on_every_rank_and_the_next_step_is_right(layout: Layout) -> None:
    cfg = config(8, 64, 64, 3, max_recv_tokens_per_rank=64)
    bad, good = Case(cfg, layout, [64, 64, 64, 64]), Case(cfg, layout, [9, 0, 3, 4])
    over = next(p for p, n in enumerate(bad.plan.recv_total_counter) if n > 64)

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = bad.handle(group, comm.rank)
            handle.update(bad.ids[comm.rank].cuda())
            with pytest.raises(EpOverflowError, match=f"rank {over} would receive {bad.plan.recv_total_counter[over]} rows"):
                group.check()
            step(good, comm.rank, handle)
            group.check()

    with LocalWorld(4, "nccl") as world:
        world.run(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_query_then_allocate(layout: Layout) -> None:
    cfg = config(12, 50, 72, 3)
    case = Case(cfg, layout, [50, 20, 0], alignment=4)

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, r)
            total = torch.zeros(1, dtype=torch.int64, device="cuda")
            handle.update(case.ids[r].cuda(), LayoutInfo(recv_total_counter=total))
            n = int(total)
            assert n == case.plan.recv_total_counter[r]
            made = DispatchOutputs(torch.empty(n, cfg.hidden, dtype=torch.bfloat16, device="cuda"),
                                   torch.empty((n, 3) if case.flat else (n,), device="cuda"))
            made.topk_idx = torch.empty(n, 3, dtype=torch.int64, device="cuda") if case.flat else None
            handle.dispatch(case.tokens[r].cuda(), made, topk_weights=case.weights[r].cuda())
            equal(made.tokens, case.received[r].tokens, "rows")
            equal(made.topk_weights, case.received[r].topk_weights, "weights")
            equal(handle.combine(case.rows[r].cuda()), case.combined[r].tokens, "combined")
            group.check()

    with LocalWorld(3, "nccl") as world:
        world.run(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opaque_rows_with_scales(layout: Layout) -> None:
    cfg = config(12, 50, 128, 3)
    case = Case(cfg, layout, [50, 20, 0], alignment=4)
    tokens = [torch.randint(0, 256, (len(i), 96), dtype=torch.uint8) for i in case.ids]
    scales = [torch.rand(len(i), 8) for i in case.ids]
    want = (ref.ht_flat_dispatch if case.flat else ref.ht_expert_major_dispatch)(case.plan, tokens, case.weights, scales=scales)

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, r)
            handle.update(case.ids[r].cuda())
            got = handle.dispatch(DispatchInputs(tokens[r].cuda(), case.weights[r].cuda(), scales[r].cuda()),
                                  config=DispatchConfig(quant_recipe=DispatchQuant.FWD))
            equal(got.tokens[: case.used(r)], want[r].tokens, "rows")
            equal(got.scales[: case.used(r)], want[r].scales, "scales")
            equal(handle.combine(case.rows[r].cuda()), case.combined[r].tokens, "combined")

    with LocalWorld(3, "nccl") as world:
        world.run(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_windows_of_the_callers_own(layout: Layout) -> None:
    cfg = config(12, 50, 128, 3, max_recv_tokens_per_rank=240)
    case = Case(cfg, layout, [50, 20, 0], alignment=4)

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            mine = group.create_window(240 * cfg.row_bytes).memory.view(torch.bfloat16).view(240, cfg.hidden)
            handle = case.handle(group, r)
            for _ in range(3):
                handle.update(case.ids[r].cuda())
                got = handle.dispatch(case.tokens[r].cuda(), DispatchOutputs(mine), topk_weights=case.weights[r].cuda())
                equal(got.tokens[: case.used(r)], case.received[r].tokens[: case.used(r)], "rows")
                mine[: len(case.rows[r])] = case.rows[r].cuda()
                equal(handle.combine(mine), case.combined[r].tokens, "combined")
            group.check()

    with LocalWorld(3, "nccl") as world:
        world.run(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_spill_into_host_memory(layout: Layout) -> None:
    """An elastic buffer with 2 MiB of GPU memory as receive buffer, and its rows as combine's input."""
    cfg = config(4, 600, 2048, 2, max_recv_tokens_per_rank=2400)
    case = Case(cfg, layout, [600, 511], alignment=4)

    def program(comm: Any) -> None:
        r = comm.rank
        try:
            buffer = ElasticBuffer(2400, cfg.hidden, torch.bfloat16, 1)
        except RuntimeError as e:
            pytest.skip(str(e))
        with buffer, Group.create(comm, cfg) as group:
            assert 0 < buffer.head_rows < case.used(r) and buffer.gpu_bytes + buffer.host_bytes >= 2400 * cfg.row_bytes
            handle = case.handle(group, r)
            handle.update(case.ids[r].cuda())
            got = handle.dispatch(case.tokens[r].cuda(), DispatchOutputs(buffer.tensor), topk_weights=case.weights[r].cuda())
            n = case.used(r)
            equal(got.tokens[:n] + 0, case.received[r].tokens[:n], "rows")   # by a kernel: memcpy does not reach the tail
            got.tokens[:n].mul_(2)
            want = (ref.ht_flat_combine if case.flat else ref.ht_expert_major_combine)(case.plan, [t.tokens * 2 for t in case.received])
            equal(handle.combine(got.tokens), want[r].tokens, "combined")
            group.check()
            del got

    with LocalWorld(2, "nccl") as world:
        world.run(program)


# ---- graphs ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_replay_with_changing_routing(layout: Layout) -> None:
    """Update, both passes, captured once; replayed with other ids, tokens and weights in the same memory, with eager steps in between."""
    ranks, counts = 4, [24, 5, 0, 17]
    cfg = config(12, 24, 264, 3, max_recv_tokens_per_rank=120, num_slots=2, overflow_policy=DROP)
    cases = [Case(cfg, layout, counts, seed=i, alignment=4) for i in range(12)]

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle, other = cases[0].handle(group, r), cases[0].handle(group, r)
            ids, tokens, weights = cases[0].ids[r].cuda(), cases[0].tokens[r].cuda(), cases[0].weights[r].cuda()
            gradients, rows = cases[0].gradients[r].cuda(), torch.zeros(120, 264, dtype=torch.bfloat16, device="cuda")
            back_rows, back_weights = torch.zeros_like(rows), torch.zeros((120, 3) if cases[0].flat else (120,), device="cuda")
            out, back, into = torch.empty_like(tokens), torch.empty_like(tokens), CombineOutputs(None, torch.empty(counts[r], 3, device="cuda"))
            into.tokens = back
            received = torch.zeros_like(rows)

            def everything() -> None:
                handle.update(ids)
                got = handle.dispatch(tokens, topk_weights=weights)
                received.copy_(got.tokens)
                handle.combine(rows, CombineOutputs(out))
                handle.dispatch(gradients, config=BACKWARD)
                handle.combine(CombineInputs(back_rows, back_weights), into, COMBINE_BACKWARD)

            everything()
            torch.cuda.synchronize()
            comm.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                everything()
            for case in cases:
                ids.copy_(case.ids[r]), tokens.copy_(case.tokens[r]), weights.copy_(case.weights[r]), gradients.copy_(case.gradients[r])
                rows.copy_(case.rows[r]), back_rows.copy_(case.back_rows[r]), back_weights.copy_(case.back_weights[r])
                comm.together(graph.replay)
                group.check()
                n = case.used(r)
                equal(received[:n], case.received[r].tokens[:n], "rows")
                equal(out, case.combined[r].tokens, "combined")
                equal(back, case.combined_back[r].tokens, "gradients of tokens")
                equal(into.topk_weights, case.combined_back[r].topk_weights, "gradients of weights")
                if case is cases[5]:
                    handle.close()   # its slots are the graph's; another handle may have them while no replay is under way
                    step(case, r, other)
                    other.close()

    with LocalWorld(ranks, "nccl") as world:
        world.run(program)


def test_capture_needs_a_budget() -> None:
    cfg = config(4, 8, 64, 2)
    case = Case(cfg, Layout.FLAT, [8, 3])

    def program(comm: Any) -> None:
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, comm.rank)
            step(case, comm.rank, handle)
            tokens, weights = case.tokens[comm.rank].cuda(), case.weights[comm.rank].cuda()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(EpError, match="cannot be captured while max_recv_tokens_per_rank is AUTO"):
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                    handle.dispatch(tokens, topk_weights=weights)
            comm.barrier()
            step(case, comm.rank, handle)

    with LocalWorld(2, "nccl") as world:
        world.run(program)


def test_a_thousand_updates_without_a_bad_row() -> None:
    """Update, dispatch and combine over new routings with exact integer payloads; a wrong row is counted, not averaged away."""
    ranks, most, experts, topk, hidden = 4, 96, 24, 6, 256
    cfg = config(experts, most, hidden, topk, max_recv_tokens_per_rank=ranks * most)
    draw = [[(37 * i + 11 * r) % (most + 1) for r in range(ranks)] for i in range(8)]
    ids = [[torch.rand(n, experts, generator=torch.Generator().manual_seed(100 * i + r)).topk(topk, 1)[1] for r, n in enumerate(counts)]
           for i, counts in enumerate(draw)]

    def program(comm: Any) -> int:
        r = comm.rank
        mine = [i[r].cuda() for i in ids]
        hits = [((i // (experts // ranks)).unsqueeze(2) == torch.arange(ranks, device="cuda")).any(1).sum(1, keepdim=True) for i in mine]
        tokens = [(torch.arange(len(i), device="cuda") % 16 + r).to(torch.bfloat16)[:, None].repeat(1, hidden) for i in mine]
        weights = [torch.ones(len(i), topk, device="cuda") for i in mine]
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        with Group.create(comm, cfg) as group:
            handle = group.create_handle(Layout.FLAT, num_topk=topk)
            for n in range(1000):
                i = n % len(mine)
                handle.update(mine[i])
                got = handle.dispatch(tokens[i], topk_weights=weights[i])
                out = handle.combine(got.tokens)
                bad += (out != (tokens[i].float() * hits[i]).to(torch.bfloat16)).sum()
            group.check()
        return int(bad)

    with LocalWorld(ranks, "nccl") as world:
        assert world.run(program) == [0] * ranks


# ---- failures --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["update", "dispatch", "combine"])
def test_a_refused_call_raises_on_every_rank_and_the_next_is_right(what: str) -> None:
    cfg = config(6, 8, 64, 2)
    case = Case(cfg, Layout.FLAT, [8, 3, 5])

    def wrong(handle: Any, r: int) -> None:
        if what == "update":
            handle.update(case.ids[r].cuda().float() if r == 1 else case.ids[r].cuda())
        elif what == "dispatch":
            handle.dispatch(case.tokens[r].cuda().float() if r == 1 else case.tokens[r].cuda(), topk_weights=case.weights[r].cuda())
        else:
            handle.combine(case.rows[r].cuda().float() if r == 1 else case.rows[r].cuda())

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, r)
            handle.update(case.ids[r].cuda())
            if what == "combine":
                handle.dispatch(case.tokens[r].cuda(), topk_weights=case.weights[r].cuda())
            with pytest.raises(TypeError if r == 1 else EpRefusedError):
                wrong(handle, r)
            step(case, r, handle)
            group.check()

    with LocalWorld(3, "nccl") as world:
        world.run(program)


@pytest.mark.parametrize("what", ["update", "dispatch"])
def test_a_missing_rank_is_named_within_the_timeout(what: str) -> None:
    """Rank 2's kernel is held back by its stream for longer than the others wait."""
    cfg = config(6, 8, 64, 2, timeout_ns=1_000_000_000)
    case = Case(cfg, Layout.FLAT, [8, 3, 5])

    def program(comm: Any) -> None:
        r = comm.rank
        with Group.create(comm, cfg) as group:
            handle = case.handle(group, r)
            step(case, r, handle)
            if what == "dispatch":
                handle.update(case.ids[r].cuda())
            group.check()
            ids, tokens, weights = case.ids[r].cuda(), case.tokens[r].cuda(), case.weights[r].cuda()   # a copy would wait for the stream
            if r == 2:
                torch.cuda._sleep(int(4e9))   # about two seconds
            started = time.perf_counter()
            handle.update(ids) if what == "update" else handle.dispatch(tokens, topk_weights=weights)
            with pytest.raises(EpTimeoutError) as caught:
                group.check()
            assert r == 2 or caught.value.culprit == 2
            assert time.perf_counter() - started < 8
            comm.barrier()
            step(case, r, handle)
            group.check()

    with LocalWorld(3, "nccl") as world:
        world.run(program)
