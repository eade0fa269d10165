"""The cost model against published figures and against this library's own measurements, each with its source and a stated error.

Sources, as named in the cases:
  aiconfigurator: ai-dynamo/aiconfigurator, systems/data/h200_sxm (and h100_sxm)/comm/sglang/0.5.12, wideep_deepep_ll and wideep_deepep_normal:
      DeepEP V1, kernel times, FP8 dispatch (7168 + 224 bytes a row) and bf16 combine, E = 256, K = 8, H = 7168 unless said otherwise.
  legacy.md: deepseek-ai/DeepEP docs/legacy.md, H800 with 400 Gb/s cards; LL in microseconds with 128 tokens; normal kernels with 4096 tokens in GB/s
      of "RDMA bottleneck", whose bytes are rows per (token, node) with the token's own node counted (tests/test_internode.py), experts in at most 4
      nodes.
  fabric-lib.md: perplexityai/pplx-garden docs/fabric-lib.md, DeepEP on H100 with ConnectX-7.
  nccl_ep README: NVIDIA/nccl-extensions nccl_ep/README.md, H100, bf16 both ways, GB/s of (token, expert) pairs, 128 tokens.
  DeepEP README: V2, SM90, 8192 tokens, the same bottleneck bytes.
  README: this project's, one H200 with all ranks on it, microseconds per dispatch + combine pair, chained.
"""

import dataclasses
import math
import random

import pytest

from ncclep_py.config import Algorithm
from ncclep_py.cost_model import DEEPEP_V1, MACHINES, OURS, Machine, Workload, chunk_tokens, distinct, predict, traffic
from ncclep_py.topology import Topology

LL, HT = Algorithm.LOW_LATENCY, Algorithm.HIGH_THROUGHPUT
FITTED, FREE = 0.05, 0.17   # largest error of figures that were fitted, and of those that were not


def workload(ranks=8, tokens=128, hidden=7168, topk=8, experts=256, fp8=True, team=None, **more):
    team = team or min(8, ranks)
    return Workload(Topology(ranks, team), tokens, hidden, experts, topk, hidden + hidden // 32 if fp8 else 0, **more)


def times(machine, algorithm, constants=DEEPEP_V1, **more):
    work = workload(**more)
    return [predict(work, MACHINES[machine], algorithm, combine, constants).total_us for combine in (False, True)]


def close(got, published, error):
    assert abs(got / published - 1) <= error, f"predicted {got:.1f}, published {published}: {100 * (got / published - 1):+.1f} %"


# ---- low latency, one node ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tokens", "dispatch", "combine"), [   # aiconfigurator, h200
    (1, 11.9, 12.6), (8, 12.3, 15.0), (16, 14.2, 18.3), (32, 16.5, 24.6), (64, 23.0, 38.8), (128, 35.1, 67.7), (256, 60.5, 124.5),
    (512, 112.4, 244.1), (1024, 211, 481)])
def test_deepep_ll_h200(tokens, dispatch, combine):
    for got, published in zip(times("h200", LL, tokens=tokens), (dispatch, combine), strict=True):
        close(got, published, FITTED)


@pytest.mark.parametrize(("hidden", "topk", "experts", "dispatch", "combine"), [   # aiconfigurator, h200, not fitted
    (2048, 8, 128, 16.0, 25.4), (4096, 8, 128, 23.3, 40.3), (4096, 10, 512, 31.9, 51.0), (6144, 8, 256, 31.4, 56.5), (6144, 8, 160, 31.8, 64.7),
    (7168, 6, 384, 30.2, 51.1), (7168, 8, 384, 36.5, 64.3)])
def test_deepep_ll_other_shapes(hidden, topk, experts, dispatch, combine):
    for got, published in zip(times("h200", LL, hidden=hidden, topk=topk, experts=experts), (dispatch, combine), strict=True):
        close(got, published, FREE)


@pytest.mark.parametrize(("tokens", "dispatch", "combine"), [   # aiconfigurator, h100, not fitted
    (1, 13.2, 14.4), (8, 14.8, 16.5), (32, 18.0, 26.3), (64, 24.6, 39.7), (128, 36.7, 67.0), (256, 62.6, 129.5)])
def test_deepep_ll_h100(tokens, dispatch, combine):
    for got, published in zip(times("h100", LL, tokens=tokens), (dispatch, combine), strict=True):
        close(got, published, FREE)


# ---- low latency, several nodes -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("machine", "ranks", "dispatch", "combine"), [   # legacy.md (h800) and fabric-lib.md (h100)
    ("h800", 16, 118, 195), ("h800", 32, 155, 273), ("h800", 64, 173, 314), ("h800", 128, 192, 369), ("h800", 256, 194, 360),
    ("h100", 16, 123.9, 203.0), ("h100", 64, 177.9, 325.0)])
def test_deepep_ll_several_nodes(machine, ranks, dispatch, combine):
    for got, published in zip(times(machine, LL, ranks=ranks), (dispatch, combine), strict=True):
        close(got, published, FITTED)


@pytest.mark.parametrize(("ranks", "dispatch", "combine"), [(8, 224.3, 185.2), (16, 76.7, 73.0), (32, 53.6, 50.0), (64, 48.8, 43.8)])
def test_nccl_ep_ll(ranks, dispatch, combine):   # nccl_ep README, not fitted
    pairs = 128 * 8 * 7168 * 2 / 1e3
    for got, published in zip(times("h100", LL, ranks=ranks, fp8=False), (dispatch, combine), strict=True):
        close(got, pairs / published, FREE)


# ---- high throughput ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sms", "tokens", "dispatch", "combine"), [   # aiconfigurator, h200
    (4, 4096, 2056, 3916), (8, 4096, 1067, 2045), (12, 4096, 740, 1414), (16, 4096, 571, 1083), (20, 4096, 494, 996), (24, 4096, 502, 979),
    (24, 128, 48.3, 83.4), (24, 8192, 974, 1835)])
def test_deepep_ht_h200(sms, tokens, dispatch, combine):
    for got, published in zip(times("h200", HT, tokens=tokens, num_sms=sms), (dispatch, combine), strict=True):
        close(got, published, FITTED)


@pytest.mark.parametrize(("machine", "tokens", "ranks", "sms", "dispatch", "combine"), [
    ("h800", 4096, 16, 24, 43, 43), ("h800", 4096, 32, 24, 58, 57), ("h800", 4096, 64, 24, 51, 50),   # legacy.md; the network share is fitted to 32
    ("h100", 8192, 16, 24, 90, 81), ("h100", 8192, 32, 24, 61, 61)])   # DeepEP README: V2 needs fewer multiprocessors for it
def test_deepep_ht_several_nodes(machine, tokens, ranks, sms, dispatch, combine):
    work = workload(ranks=ranks, tokens=tokens, num_sms=sms, max_teams=4)
    nodes = min(4, work.topology.num_teams)
    rows = tokens * distinct(nodes, 256 * nodes // work.topology.num_teams, 8)
    for combine_too, published in ((False, dispatch), (True, combine)):
        got = predict(work, MACHINES[machine], HT, combine_too, DEEPEP_V1)
        close(rows * work.row_bytes(combine_too) / 1e3 / got.total_us, published, FREE)


def test_deepep_ht_one_node_h800():   # legacy.md: 153 and 158 GB/s of rows per (token, rank)
    work = workload(tokens=4096, num_sms=24)
    for combine, published in ((False, 153), (True, 158)):
        rows = 4096 * distinct(8, 256, 8) * work.row_bytes(combine) / 1e3
        close(rows / predict(work, MACHINES["h800"], HT, combine, DEEPEP_V1).total_us, published, FREE)


# ---- this library, one GPU ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("algorithm", "ranks", "tokens", "experts", "per_rank", "published"), [   # README, Measured, "ours chained" of both tables
    (LL, 8, 128, 128, None, 86.0), (LL, 4, 128, 256, None, 48.2), (LL, 8, 8, 128, None, 23.6), (LL, 8, 1, 128, None, 23.0),
    (LL, 8, 128, 128, True, 68.9), (HT, 8, 2048, 128, None, 831.0), (HT, 8, 2048, 128, False, 1131.8), (HT, 8, 8192, 128, None, 3231.9)])
def test_ours_on_one_gpu(algorithm, ranks, tokens, experts, per_rank, published):
    work = workload(ranks=ranks, tokens=tokens, experts=experts, fp8=False, num_sms=16, per_rank=per_rank)
    machine = dataclasses.replace(MACHINES["h200"], ranks_per_gpu=ranks)
    costs = [predict(work, machine, algorithm, combine, OURS) for combine in (False, True)]
    close(sum(c.total_us for c in costs), published, 0.13)
    assert {c.bound for c in costs} == {"memory"}


# ---- arithmetic -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("bins", "experts", "topk"), [(8, 256, 8), (2, 8, 8), (4, 4, 1), (32, 64, 8)])
def test_distinct(bins, experts, topk):
    exact = bins * (1 - math.comb(experts - experts // bins, topk) / math.comb(experts, topk))
    assert distinct(bins, experts, topk) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("algorithm", [LL, HT])
@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("team", [1, 2, 4, 8])
def test_traffic_is_what_random_routing_gives(algorithm, hierarchical, team):
    """Counts rows of 4000 randomly routed tokens by hand."""
    t, experts, topk, tokens, draw = Topology(8, team), 32, 3, 4000, random.Random(team)
    nvlink = network = 0
    for n in range(tokens):
        me = n % 8
        owners = [e // 4 for e in draw.sample(range(experts), topk)]
        if algorithm is LL:
            nvlink += sum(t.is_direct(me, r) and r != me for r in owners)
            network += len({r for r in owners if not t.is_direct(me, r)})
        else:
            for r in set(owners):
                writer = me if t.is_direct(me, r) else t.rail_peer(me, t.team_of(r)) if hierarchical else r
                nvlink += writer != r
            remote = {r for r in owners if not t.is_direct(me, r)}
            network += len({t.team_of(r) for r in remote}) if hierarchical else len(remote)
    got = traffic(Workload(t, tokens, 64, experts, topk), algorithm, False, hierarchical=hierarchical)
    assert got.nvlink_rows == pytest.approx(nvlink, rel=0.04)
    assert got.network_rows == pytest.approx(network, rel=0.04)


def test_one_team_has_no_network():
    for algorithm in (LL, HT):
        cost = predict(workload(ranks=8), MACHINES["h200"], algorithm, False)
        assert cost.parts_us["network"] == 0 and cost.traffic.messages == 0


def test_hierarchy_saves_network_bytes_and_more_contexts_help_many_small_messages():
    work = workload(ranks=64, tokens=4096, fp8=False)
    by_team, by_rank = (predict(work, MACHINES["h200"], HT, False, hierarchical=h) for h in (True, False))
    assert by_team.traffic.network_rows < 0.85 * by_rank.traffic.network_rows and by_team.total_us < by_rank.total_us
    small = workload(ranks=64, tokens=128, hidden=64, fp8=False)
    one, four = (predict(small, MACHINES["h200"], LL, False, contexts=n).parts_us["network"] for n in (1, 4))
    assert one == pytest.approx(4 * four)


def test_faster_links_and_fewer_tokens_are_never_slower():
    work = workload(ranks=64, fp8=False)
    for algorithm in (LL, HT):
        last = math.inf
        for network in (12.5, 25, 50, 100, 1000):
            now = predict(work, Machine(450, network, 4800, 132), algorithm, False).total_us
            assert now <= last
            last = now
        assert predict(dataclasses.replace(work, num_tokens=1), MACHINES["h200"], algorithm, False).total_us < predict(
            work, MACHINES["h200"], algorithm, False).total_us


def test_chunks_grow_with_tokens():
    sizes = [chunk_tokens(workload(ranks=64, tokens=n, fp8=False), MACHINES["h200"]) for n in (64, 4096, 65536)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@pytest.mark.parametrize(("change", "says"), [
    ({"experts": 100}, "num_experts must be a multiple of the number of ranks: 100 over 8"), ({"topk": 0}, "num_topk must be in"),
    ({"tokens": -1}, "num_tokens must be at least 0, got -1")])
def test_refused(change, says):
    with pytest.raises(ValueError, match=says):
        workload(**change)


def test_refused_machine_and_contexts():
    with pytest.raises(ValueError, match="network must be above 0, got 0"):
        Machine(450, 0, 4800, 132)
    with pytest.raises(ValueError, match="contexts must be at least 1, got 0"):
        predict(workload(), MACHINES["h200"], LL, False, contexts=0)
