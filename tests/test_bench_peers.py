"""The benchmark's peers: `all_to_all_single` over gloo, the libraries as they are declared, and what stands beside what."""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import os
import pathlib
import types
from typing import Any

import pytest
import torch

from ncclep_py import LocalWorld
from ncclep_py.bench import table
from ncclep_py.bench.budget import receive_budget
from ncclep_py.bench.case import Case
from ncclep_py.bench.layer import EpExchange, MoELayer, SplitExchange
from ncclep_py.bench.peers import all_to_all, deep_ep, nccl_ep, why_not
from ncclep_py.bench.statistics import Figure

TOY = Case(ranks=2, experts=16, topk=3, hidden=512, tokens=5, sms=2, backend="sim")

PEER = dataclasses.replace(TOY, ranks=2, experts=8, topk=2, hidden=64, tokens=6, dtype="fp32")


def _both_ways(rank: int, folder: str, told: Any) -> None:
    """all_to_all_single over gloo: the exchange alone, and the layer with its gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    comm = types.SimpleNamespace(rank=rank, num_ranks=2, device=torch.device("cpu"), backend="sim")
    subject = all_to_all.AllToAllSubject(comm, PEER)   # type: ignore[arg-type]
    right = subject.check()
    subject.ids[0, 0] = -1
    right &= subject.check()
    layer, x = MoELayer(PEER, 16, rank), layer_input(rank)
    out = layer(x, SplitExchange(PEER))
    out.square().sum().backward()
    told.put((rank, right, out.detach().numpy(), x.grad.numpy(), layer.up.grad.numpy()))


def layer_input(rank: int) -> torch.Tensor:
    return torch.randn(PEER.tokens, PEER.hidden, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def test_both_exchanges_are_the_layer_of_one_process(tmp_path: pathlib.Path) -> None:
    context = mp.get_context("fork")
    told = context.Queue()
    processes = [context.Process(target=_both_ways, args=(rank, str(tmp_path), told), daemon=True) for rank in range(2)]
    for p in processes:
        p.start()
    split = {got[0]: got for got in (told.get(timeout=60) for _ in processes)}

    def program(comm: Any) -> tuple[Any, ...]:
        layer, x, exchange = MoELayer(PEER, 16, comm.rank), layer_input(comm.rank), EpExchange(comm, PEER)
        out = layer(x, exchange)
        out.square().sum().backward()
        exchange.close()
        return out.detach(), x.grad, layer.up.grad

    with LocalWorld(2, "sim", threads=True) as world:
        ours = world.run(program)
    alone, inputs = MoELayer(PEER, 16, None), [layer_input(rank) for rank in range(2)]
    outs = [alone(x) for x in inputs]
    sum(out.square().sum() for out in outs).backward()
    for rank in range(2):
        want = outs[rank].detach(), inputs[rank].grad, alone.up.grad[4 * rank: 4 * rank + 4]
        assert split[rank][1] is True
        for mine, theirs, expected in zip(ours[rank], split[rank][2:], want, strict=True):
            assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-4) and torch.allclose(torch.from_numpy(theirs), expected, rtol=1e-4, atol=1e-4)


def test_peers_say_why_they_are_left_out() -> None:
    processes = dataclasses.replace(TOY, mode="processes", backend="nccl", dtype="bf16")
    assert why_not("nccl.ep", processes) == "nccl.ep is not installed" and why_not("deep_ep", processes) == "deep_ep is not installed"
    assert why_not("all_to_all_single", TOY) == "all_to_all_single needs one process per rank" and why_not("all_to_all_single", processes) == ""
    assert "as they are" in why_not("all_to_all_single", dataclasses.replace(processes, recipe="ds_fp8"))
    assert deep_ep.DeepEpSubject.why_not(processes) == "deep_ep needs a GPU per rank"
    assert "expert_major" in deep_ep.DeepEpSubject.why_not(dataclasses.replace(processes, gpus=2, layout="rank_major"))
    assert deep_ep.DeepEpSubject.why_not(dataclasses.replace(processes, gpus=2)) == ""
    assert "only bf16" in nccl_ep.NcclEpSubject.why_not(dataclasses.replace(processes, dtype="fp32"))


class Stand:
    """In the place of a library: every call is kept, with its keywords."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers = answers or {}

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **named: Any) -> Any:
            self.calls.append((name, words, named))
            return self.answers.get(name, self)

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(words, named) for called, words, named in self.calls if called == name]


@pytest.mark.parametrize(("algorithm", "layout", "fields"), [
    ("ll", "expert_major", {"tokens"}), ("ll", "rank_major", {"tokens", "topk_weights", "topk_idx"}),
    ("ht", "flat", {"tokens", "topk_weights", "topk_idx"}), ("ht", "expert_major", {"tokens", "topk_weights"})])
def test_nccl_ep_is_given_what_its_layouts_want(algorithm: str, layout: str, fields: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand()
    stand.Algorithm = types.SimpleNamespace(LOW_LATENCY="ll", HIGH_THROUGHPUT="ht")   # type: ignore[attr-defined]
    stand.Layout = types.SimpleNamespace(EXPERT_MAJOR="em", RANK_MAJOR="rm", FLAT="flat")   # type: ignore[attr-defined]
    stand.Group = types.SimpleNamespace(create=lambda comm, config: stand)   # type: ignore[attr-defined]
    monkeypatch.setattr(nccl_ep, "_stream", lambda: 7)
    monkeypatch.setenv("NCCL_HOME", "ours")
    monkeypatch.setenv("NCCL_EP_HOME", "of nccl.ep, found by itself")
    monkeypatch.setenv("NCCLEP_PEER_NCCL_HOME", "theirs")
    case = dataclasses.replace(TOY, algorithm=algorithm, layout=layout)
    comm: Any = types.SimpleNamespace(rank=0, comm="comm", device=torch.device("cpu"), synchronize=lambda: None, barrier=lambda: None)
    subject = nccl_ep.NcclEpSubject(comm, case, stand)
    assert (os.environ["NCCL_HOME"], os.environ["NCCL_EP_HOME"]) == ("theirs", "of nccl.ep, found by itself")
    config = stand.named("GroupConfig")[0][1]
    assert config["max_token_bytes"] == 1024 and config["num_experts"] == 16 and config["max_num_sms"] == 2
    assert config.get("max_recv_tokens_per_rank") == (None if algorithm == "ll" else 5 * 2 * (3 if layout == "expert_major" else 1))
    if algorithm == "ht":   # as ours
        worst, exact = (dataclasses.replace(case, ranks=8, budget=kind) for kind in ("worst", "exact"))
        nccl_ep.NcclEpSubject(comm, exact, stand)
        assert stand.named("GroupConfig")[1][1]["max_recv_tokens_per_rank"] == receive_budget(exact) < receive_budget(worst)
    assert stand.named("DispatchOutputs")[0][1].keys() == fields
    subject.pair()
    assert stand.named("dispatch")[0][1]["stream"] == 7 and stand.named("combine")[0][1]["stream"] == 7
    subject.out.copy_((subject.tokens.float() * subject.copies()).to(subject.out.dtype))
    assert subject.check()
    subject.out.mul_(1.1)
    assert not subject.check()


def test_deep_ep_is_called_as_it_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep, "process_group", lambda comm: "world")
    comm: Any = types.SimpleNamespace(rank=0, device=torch.device("cpu"))
    tokens = torch.ones(5, 512)
    buffer = Stand({"low_latency_dispatch": ("received", "count", "handle", "event", "hook"), "low_latency_combine": (tokens, "event", "hook"),
                    "get_dispatch_layout": ("to_rank", "to_node", "to_expert", "in_rank", "event"),
                    "dispatch": ("received", "ids", "weights", "counts", "handle", "event"), "combine": (tokens, "weights", "event")})
    made: list[Any] = []

    class Buffer:
        get_low_latency_rdma_size_hint = staticmethod(lambda *sizes: sizes)
        set_num_sms = staticmethod(made.append)

        def __new__(cls, *words: Any, **named: Any) -> Any:
            made.append((words, named))
            return buffer

    library = types.SimpleNamespace(Buffer=Buffer)
    subject = deep_ep.DeepEpSubject(comm, TOY, library)
    subject.pair()
    assert made == [(("world",), {"num_rdma_bytes": (5, 512, 2, 16), "low_latency_mode": True, "num_qps_per_rank": 8})]
    assert buffer.named("low_latency_dispatch")[0][0][2:] == (5, 16) and buffer.named("low_latency_combine")[0][0][::3] == ("received", "handle")
    normal = deep_ep.DeepEpSubject(comm, dataclasses.replace(TOY, algorithm="ht", layout="flat"), library)
    normal.pair()
    assert made[1] == 2 and not normal.capturable
    assert buffer.named("dispatch")[0][1].items() >= {"num_tokens_per_rank": "to_rank", "num_tokens_per_rdma_rank": "to_node",
                                                      "is_token_in_rank": "in_rank", "num_tokens_per_expert": "to_expert"}.items()
    assert buffer.named("combine")[0][0] == ("received", "handle")


def test_like_stands_beside_like() -> None:
    def timed(name: str, case: Case, **figures: float) -> dict[str, Any]:
        held = {figure: Figure(us, us, us, 9).as_json() for figure, us in figures.items()}
        return {"implementation": name, **dataclasses.asdict(case), "verified": True, "figures": held}

    ht = dataclasses.replace(TOY, algorithm="ht")
    rows = [timed("ncclep_py", TOY, chained_pair=10, eager_pair=20), timed("nccl.ep", TOY, chained_pair=30, eager_pair=50),
            timed("all_to_all_single", TOY, known_sizes_pair=40, eager_pair=100),
            timed("ncclep_py", ht, chained_pair=10, eager_pair=20, eager_step=25),
            timed("nccl.ep", ht, eager_pair=50), timed("deep_ep", ht, eager_pair=50), timed("deep_ep", ht, chained_pair=1) | {"verified": False},
            timed("nccl.ep", dataclasses.replace(TOY, tokens=9), chained_pair=1)]
    assert table.table(rows) == [
        f"{TOY.name()}: nccl.ep chained_pair 30.0, our chained_pair 10.0 us: 3.00x; nccl.ep eager_pair 50.0, our eager_pair 20.0 us: 2.50x; "
        "all_to_all_single known_sizes_pair 40.0, our chained_pair 10.0 us: 4.00x; all_to_all_single eager_pair 100.0, our eager_pair 20.0 us: 5.00x",
        f"{ht.name()}: nccl.ep eager_pair 50.0, our eager_pair 20.0 us: 2.50x; deep_ep eager_pair 50.0, our eager_step 25.0 us: 2.00x"]
