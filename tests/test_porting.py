"""Programs in the manner of ``nccl.ep``: group, handle, input and output structs, dispatch, combine, complete, destroy, each call with its stream.
They name the library `ep`; with torch tensors in the place of its tensor views they are programs for ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ncclep_py as ep
from ncclep_py import LocalWorld
from ncclep_py import reference as ref
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

R, E, K, B, H = 4, 8, 2, 6, 64
L = E // R
STREAM = 0   # a program for a GPU passes torch.cuda.current_stream().cuda_stream


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = random_routing(rank, B, K, E, dropped=0.1)
    weights = weights_like(ids, seed=rank)
    return stamped_tokens(rank, B, H, torch.bfloat16), ids, torch.where(ids >= 0, weights, 0.0)


def low_latency_expert_major(comm: Any) -> torch.Tensor:
    tokens, idx, weights = inputs(comm.rank)
    group = ep.Group.create(comm, ep.GroupConfig(num_experts=E, max_dispatch_tokens_per_rank=B, max_token_bytes=2 * H, max_num_sms=2,
                                                 algorithm=ep.Algorithm.LOW_LATENCY))
    handle = group.create_handle(ep.Layout.EXPERT_MAJOR, idx, config=ep.HandleConfig(), stream=STREAM)
    received, counts, out = torch.zeros(L, R * B, H, dtype=torch.bfloat16), torch.zeros(L, dtype=torch.int32), torch.zeros_like(tokens)
    handle.dispatch(ep.DispatchInputs(tokens=tokens), ep.DispatchOutputs(tokens=received), layout_info=ep.LayoutInfo(expert_counters=counts),
                    config=ep.DispatchConfig(), stream=STREAM)
    for expert, count in enumerate(counts.tolist()):
        received[expert, :count] *= 2
    handle.combine(ep.CombineInputs(tokens=received), ep.CombineOutputs(tokens=out, topk_weights=weights), config=ep.CombineConfig(), stream=STREAM)
    handle.complete(stream=STREAM)
    handle.destroy()
    group.destroy()
    assert bits_equal(out, ref.moe_layer(tokens, idx, weights, [lambda rows: rows * 2] * E))
    return out


def low_latency_rank_major_staged(comm: Any) -> torch.Tensor:
    tokens, idx, weights = inputs(comm.rank)
    group = ep.Group.create(comm, ep.GroupConfig(num_experts=E, max_dispatch_tokens_per_rank=B, max_token_bytes=2 * H, max_num_sms=2,
                                                 algorithm=ep.Algorithm.LOW_LATENCY, num_staging_slots=2))   # what `nccl.ep` has without asking
    handle = group.create_handle(ep.Layout.RANK_MAJOR, idx, config=ep.HandleConfig(), stream=STREAM)
    received, received_weights = torch.zeros(R, B, H, dtype=torch.bfloat16), torch.zeros(R, B, K)
    received_idx, counts, out = torch.zeros(R, B, K, dtype=torch.int32), torch.zeros(R, dtype=torch.int32), torch.zeros_like(tokens)
    handle.dispatch(ep.DispatchInputs(tokens=tokens, topk_weights=weights),
                    ep.DispatchOutputs(tokens=received, topk_weights=received_weights, topk_idx=received_idx),
                    layout_info=ep.LayoutInfo(src_rank_counters=counts), config=ep.DispatchConfig(send_only=True), stream=STREAM)
    handle.complete(stream=STREAM)
    for source, count in enumerate(counts.tolist()):
        mine = torch.where(received_idx[source, :count] >= 0, received_weights[source, :count], 0.0).sum(1, keepdim=True)
        received[source, :count] = (received[source, :count].float() * mine).bfloat16()
    handle.combine(ep.CombineInputs(tokens=received), ep.CombineOutputs(tokens=out), config=ep.CombineConfig(send_only=True), stream=STREAM)
    handle.complete(stream=STREAM)
    handle.destroy()
    group.destroy()
    want = tokens.float() * weights.sum(1, keepdim=True)
    assert torch.allclose(out.float(), want, rtol=2e-2, atol=1e-2) and counts.sum() > 0
    return out


def high_throughput_flat(comm: Any) -> torch.Tensor:
    tokens, idx, weights = inputs(comm.rank)
    rows = R * B
    group = ep.Group.create(comm, ep.GroupConfig(num_experts=E, max_dispatch_tokens_per_rank=B, max_token_bytes=2 * H, max_num_sms=2, num_topk=K,
                                                 algorithm=ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=rows))
    counts, total = torch.zeros(L, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    handle = group.create_handle(ep.Layout.FLAT, idx, layout_info=ep.LayoutInfo(expert_counters=counts, recv_total_counter=total),
                                 config=ep.HandleConfig(), stream=STREAM)
    received, received_weights = torch.zeros(rows, H, dtype=torch.bfloat16), torch.zeros(rows, K)
    received_idx, out = torch.zeros(rows, K, dtype=torch.int64), torch.zeros_like(tokens)
    handle.dispatch(ep.DispatchInputs(tokens=tokens, topk_weights=weights),
                    ep.DispatchOutputs(tokens=received, topk_weights=received_weights, topk_idx=received_idx), config=ep.DispatchConfig(),
                    stream=STREAM)
    handle.combine(ep.CombineInputs(tokens=received), ep.CombineOutputs(tokens=out), config=ep.CombineConfig(), stream=STREAM)
    handle.complete(stream=STREAM)
    handle.destroy()
    group.destroy()
    hosts = torch.where(idx >= 0, idx // L, -1)
    copies = torch.stack([(hosts == rank).any(1) for rank in range(R)]).sum(0)[:, None]
    assert torch.equal(out, (tokens.float() * copies).bfloat16()) and int((received_idx[:, 0] >= 0).sum()) == int(total[0])
    return out


@pytest.mark.parametrize("program", [low_latency_expert_major, low_latency_rank_major_staged, high_throughput_flat], ids=lambda p: p.__name__)
def test_programs_in_the_manner_of_nccl_ep_run(program: Any) -> None:
    with LocalWorld(R, "sim") as world:
        assert len(world.run(program)) == R


def test_hidden_follows_from_max_token_bytes() -> None:
    assert ep.GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=4, max_token_bytes=14336).hidden == 7168
    assert ep.GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=4, max_token_bytes=64, dtype=torch.float32).hidden == 16
    assert ep.GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=4, max_token_bytes=512, hidden=64).hidden == 64
    with pytest.raises(ValueError, match="hidden"):
        ep.GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=4)


def test_streams_are_checked() -> None:
    def program(comm: Any) -> bool:
        with ep.Group.create(comm, ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=2, hidden=8, num_topk=1)) as group:
            with pytest.raises(TypeError, match="stream must be a torch.cuda.Stream or its handle, an int, got str: 'default'"):
                group.create_handle(ep.Layout.EXPERT_MAJOR, num_topk=1, stream="default")
            with pytest.raises(ValueError, match="layout_info must be left out of a LOW_LATENCY handle, got LayoutInfo"):
                group.create_handle(ep.Layout.EXPERT_MAJOR, num_topk=1, layout_info=ep.LayoutInfo())
        return True

    with LocalWorld(1, "sim") as world:
        assert world.run(program) == [True]
