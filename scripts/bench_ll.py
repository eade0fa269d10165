#!/usr/bin/env python3
"""Time the low-latency dispatch + combine pair on one GPU shared by several ranks, and the machine's floors in the same run.

    python3 scripts/bench_ll.py                      # LocalWorld: all ranks in this process
    python3 scripts/bench_ll.py --processes          # one process per rank; start NVIDIA's MPS first, else their kernels take turns
    python3 scripts/bench_ll.py --floors             # copy, write and read bandwidth, empty kernels
    python3 scripts/bench_ll.py --routing zipf       # skewed routing: few experts get most tokens; one_rank: rank 0 gets all

Experts are the identity, so every result is known and compared bit for bit before anything is timed (with a recipe they turn rows back into bf16, and
are left out of what is timed). `moved_mb` counts the bytes all ranks together read and write in a pair. `pair_us` is one dispatch plus one combine:
20 pairs in a CUDA graph, all ranks started together, the slowest rank of each replay, median over replays. That figure holds a twentieth of the
skew with which the host starts the ranks; `chained_pair_us` does not: it is the slope between graphs of 20 and of 100 pairs. `flushed_pair_us` writes
320 MB (all ranks together) between dispatch and combine and takes off what writing alone costs. One-GPU figures: nothing here crosses NVLink.
Prints one JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import statistics
import time
import traceback
from collections.abc import Callable
from threading import BrokenBarrierError
from typing import Any

import torch

from ncclep_py import (
    CombineOutputs,
    Communicator,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuant,
    Group,
    GroupConfig,
    Layout,
    LocalWorld,
)
from ncclep_py.reference import fma32, quantize_ds_fp8
from ncclep_py.signature import OpKind
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens

CASES = [
    dict(ranks=8, experts=128, tokens=128, sms=16),
    dict(ranks=8, experts=128, tokens=8, sms=16),
    dict(ranks=8, experts=128, tokens=1, sms=16),
    dict(ranks=4, experts=256, tokens=128, sms=32),
    dict(ranks=8, experts=128, tokens=128, sms=16, layout="rank_major"),
    dict(ranks=8, experts=128, tokens=128, sms=16, recipe="ds_fp8"),
    dict(ranks=8, experts=128, tokens=128, sms=16, layout="rank_major", recipe="ds_fp8"),
]
PAIRS, CHAIN, REPLAYS, WARM_UP, FLUSH_BYTES, WAIT_S = 20, 100, 12, 2, 320 << 20, 120
Launch = Callable[[], None]


def routing(case: dict[str, Any], rank: int) -> torch.Tensor:
    """Distinct expert ids ``[T, K]`` of one rank: uniform, all of rank 0, or by Zipf's law over experts in an order all ranks share."""
    tokens, topk, experts = case["tokens"], case["topk"], case["experts"]
    how = case.get("routing", "uniform")
    if how == "uniform":
        return random_routing(rank, tokens, topk, experts)
    if how == "one_rank":
        return random_routing(rank, tokens, topk, experts // case["ranks"])
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(7))
    noise = -torch.log(-torch.log(torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank + 99)).clamp(1e-9, 1 - 1e-7)))
    return order[(noise - torch.log(torch.arange(1, experts + 1).float())).topk(topk, 1).indices]


def owners(case: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """Number of distinct ranks each token goes to."""
    return torch.tensor([len(set(row)) for row in (ids // (case["experts"] // case["ranks"])).tolist()])


def moved_mb(case: dict[str, Any]) -> float:
    """Megabytes that all ranks together read and write in a dispatch and a combine; ids, weights and control words left out."""
    row = 2 * case["hidden"]
    sent = row // 2 + case["hidden"] // 32 if "recipe" in case else row
    rows, tokens = 0, case["ranks"] * case["tokens"]
    for rank in range(case["ranks"]):
        ids = routing(case, rank)
        rows += int(owners(case, ids).sum()) if case.get("layout") == "rank_major" else ids.numel()
    return round((tokens * row + rows * sent + rows * row + tokens * row) / 1e6, 1)


def expected(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The combined rows of identity experts: the fused multiply-add chain of every token with its own weights."""
    x, sums = tokens.cpu().float(), torch.zeros(tokens.shape, dtype=torch.float32)
    for k in range(weights.shape[1]):
        sums = fma32(x, weights[:, k: k + 1].cpu().expand_as(x), sums)
    return sums.to(tokens.dtype)


class Rank:
    """One rank's inputs, handle and graphs for one case."""

    def __init__(self, comm: Communicator, case: dict[str, Any], meet: Launch) -> None:
        self.comm, self.case, self.meet = comm, case, meet
        config = GroupConfig(num_experts=case["experts"], max_dispatch_tokens_per_rank=case["tokens"], hidden=case["hidden"], num_topk=case["topk"],
                             max_num_sms=case["sms"], timeout_ns=10_000_000_000)
        self.group = Group.create(comm, config)
        ids = routing(case, comm.rank)
        self.ids = ids.to(comm.device)
        self.tokens = stamped_tokens(comm.rank, case["tokens"], case["hidden"], torch.bfloat16).to(comm.device)
        weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(comm.rank)) + 0.01
        self.weights = (weights / weights.sum(1, keepdim=True)).to(comm.device)
        self.rank_major, self.quantised = case.get("layout") == "rank_major", "recipe" in case
        self.handle = self.group.create_handle(Layout.RANK_MAJOR if self.rank_major else Layout.EXPERT_MAJOR, self.ids)
        self.inputs = DispatchInputs(self.tokens, self.weights if self.rank_major else None)
        self.recipe = DispatchConfig(quant_recipe=DispatchQuant.DS_FP8E3M4 if self.quantised else DispatchQuant.NONE)
        self.want = self.expected(ids)
        self.flush = torch.empty(FLUSH_BYTES // case["ranks"], dtype=torch.uint8, device=comm.device)
        self.out = torch.empty_like(self.tokens)

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        """What combine must give, on the CPU."""
        x = self.tokens.cpu()
        if self.quantised:
            q, scales = quantize_ds_fp8(x)
            x = (q.float() * scales.repeat_interleave(128, 1)).bfloat16()
        if not self.rank_major:
            return expected(x, self.weights)
        counts, sums = owners(self.case, ids)[:, None], torch.zeros(x.shape)
        for i in range(self.case["ranks"]):
            sums = torch.where(counts > i, sums + x.float(), sums)
        return sums.bfloat16()

    def dispatch(self) -> DispatchOutputs:
        return self.handle.dispatch(self.inputs, config=self.recipe)

    def pair(self, flush: bool = False, experts: bool = False) -> None:
        received = self.dispatch()
        rows = self.handle.expert_rows()
        if experts and self.quantised:
            assert received.scales is not None
            rows.copy_(received.tokens.float() * received.scales.repeat_interleave(128, 2))
        if flush:
            self.flush.zero_()
        self.handle.combine(rows, CombineOutputs(self.out, self.weights))

    def check(self, rounds: int = 3) -> bool:
        for _ in range(rounds):
            self.out.fill_(float("nan"))
            self.pair(experts=True)
        self.group.check()
        return bits_equal(self.out.cpu(), self.want)

    def graph(self, action: Launch, repeats: int) -> torch.cuda.CUDAGraph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
            for _ in range(repeats):
                action()
        return captured

    def timed(self, launch: Launch) -> list[float]:
        """Microseconds of each replay after the warm-up."""
        times = []
        for _ in range(REPLAYS):
            torch.cuda.current_stream().synchronize()
            self.meet()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

            def once(start: torch.cuda.Event = start, end: torch.cuda.Event = end) -> None:
                start.record()
                launch()
                end.record()

            self.comm.together(once)
            torch.cuda.current_stream().synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return times[WARM_UP:]

    def replayed(self, action: Launch, repeats: int = PAIRS) -> list[float]:
        graph = self.graph(action, repeats)
        return [t / repeats for t in self.timed(graph.replay)]

    def slope(self, action: Launch) -> list[float]:
        """Microseconds per action between graphs of `PAIRS` and of `CHAIN` actions, so that what a replay costs once drops out."""
        short = statistics.median(self.timed(self.graph(action, PAIRS).replay))
        return [(t - short) / (CHAIN - PAIRS) for t in self.timed(self.graph(action, CHAIN).replay)]

    def host_us(self) -> float:
        """Host microseconds per operation, eager, without waiting for the device (LocalWorld: includes switching between ranks)."""
        self.comm.synchronize()
        self.meet()
        started = time.perf_counter()
        for _ in range(PAIRS):
            self.pair()
        spent = time.perf_counter() - started
        self.group.check()
        return spent / PAIRS / 2 * 1e6


def measure(comm: Communicator, case: dict[str, Any], meet: Launch | None = None) -> dict[str, Any]:
    """All figures of one rank; `meet` is a host barrier with little skew (default: the communicator's)."""
    rank = Rank(comm, case, meet or comm.barrier)
    verified = rank.check()
    one = torch.zeros(1, device=comm.device)
    result: dict[str, Any] = {"verified": verified, "pair_us": rank.replayed(rank.pair)}
    result["chained_pair_us"] = rank.slope(rank.pair)
    result["heads_pair_us"] = rank.slope(lambda: [rank.group.rendezvous(OpKind.COMBINE) for _ in range(2)])
    result["empty_pair_us"] = rank.replayed(lambda: [one.fill_(1) for _ in range(2)])
    result["dispatch_us"] = rank.slope(rank.dispatch)
    flush = statistics.median(rank.slope(lambda: rank.flush.zero_()))
    result["flushed_pair_us"] = [both - flush for both in rank.slope(lambda: rank.pair(True))]
    if meet is not None:
        result["eager_pair_us"] = [t / PAIRS for t in rank.timed(lambda: [rank.pair() for _ in range(PAIRS)])]
    result["host_us"] = [rank.host_us() for _ in range(3)][1:]
    result["verified"] = rank.check(1) and verified
    rank.group.close()
    return result


def summary(case: dict[str, Any], by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank of each replay, then the median over replays."""
    row = {**case, "moved_mb": moved_mb(case), "verified": all(r["verified"] for r in by_rank)}
    for key in by_rank[0]:
        if key != "verified":
            slowest = [max(step) for step in zip(*(r[key] for r in by_rank), strict=True)]
            row[key] = round(statistics.median(slowest), 1)
            if key == "pair_us":
                row["pair_us_min_max"] = [round(min(slowest), 1), round(max(slowest), 1)]
    return row


def run_local(case: dict[str, Any]) -> dict[str, Any]:
    with LocalWorld(case["ranks"], "nccl") as world:
        return summary({**case, "mode": "one process"}, world.run(measure, case))


class SpinBarrier:
    """A barrier between processes that spins, so that all leave it within microseconds; a sleeping one lets them start some hundred apart."""

    def __init__(self, parties: int) -> None:
        self.rounds = mp.get_context("spawn").RawArray("q", parties + 1)   # one count per process, then whether somebody gave up
        self.rank = 0

    def wait(self, timeout: float) -> None:
        """Meet the others; BrokenBarrierError if one gave up or does not come in `timeout` seconds."""
        self.rounds[self.rank] += 1
        mine, until = self.rounds[self.rank], time.perf_counter() + timeout
        while min(self.rounds[:-1]) < mine:
            over = self.rounds[-1] or time.perf_counter() > until
            if over and min(self.rounds[:-1]) < mine:   # again: the last may have come and given up since
                raise BrokenBarrierError

    def abort(self) -> None:
        """Let everybody's wait fail."""
        self.rounds[-1] = 1


def run_process(rank: int, case: dict[str, Any], measured: Callable[..., dict[str, Any]], ids: Any, barrier: Any, results: Any) -> None:
    barrier.rank = rank
    try:
        os.environ["LOCAL_RANK"] = "0"
        if rank == 0:
            unique = Communicator.unique_id()
            for _ in range(case["ranks"] - 1):
                ids.put(unique)
        else:
            unique = ids.get(timeout=WAIT_S)
        comm = Communicator.init(case["ranks"], rank, unique, device=rank % torch.cuda.device_count())
        with torch.cuda.stream(torch.cuda.Stream()):
            results.put((rank, measured(comm, case, lambda: barrier.wait(WAIT_S))))
    except BaseException:
        barrier.abort()
        results.put((rank, {"error": traceback.format_exc()[-1500:]}))


def run_processes(case: dict[str, Any], measured: Callable[..., dict[str, Any]] = measure,
                  summed: Callable[[dict[str, Any], list[dict[str, Any]]], dict[str, Any]] = summary) -> dict[str, Any]:
    """`measured(comm, case, meet)` in one process per rank, and what `summed` makes of their answers; ``error`` if one fails or does not answer."""
    context, case = mp.get_context("spawn"), {**case, "mode": "one process per rank"}
    ids, barrier, results = context.Queue(), SpinBarrier(case["ranks"]), context.Queue()
    processes = [context.Process(target=run_process, args=(r, case, measured, ids, barrier, results), daemon=True) for r in range(case["ranks"])]
    for p in processes:
        p.start()
    try:
        got = dict(results.get(timeout=WAIT_S) for _ in processes)
    except queue.Empty:
        return {**case, "error": f"no answer in {WAIT_S} s"}
    finally:
        for p in processes:
            p.kill()
    errors = [g["error"] for g in got.values() if "error" in g]
    return {**case, "error": errors[0]} if errors else summed(case, [got[r] for r in sorted(got)])


def floors() -> dict[str, Any]:
    """Bandwidths of device memory in GB/s, read and written bytes counted: copy, write-only, read-only; 1 GiB buffers."""
    n = 1 << 30
    a, b = torch.zeros(n // 4, device="cuda"), torch.zeros(n // 4, device="cuda")

    def rate(action: Launch, moved: int) -> float:
        for _ in range(3):
            action()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            action()
        end.record()
        torch.cuda.synchronize()
        return round(moved * 10 / start.elapsed_time(end) / 1e6)

    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_gb_s": rate(lambda: b.copy_(a), 2 * n),
            "write_gb_s": rate(lambda: b.fill_(1.0), n), "read_gb_s": rate(lambda: a.sum(), n)}


def main() -> int:
    """Print one line per case; 1 if a case failed or gave wrong bits."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--processes", action="store_true")
    ap.add_argument("--floors", action="store_true")
    ap.add_argument("--case", type=int, help="index of one case only")
    ap.add_argument("--hidden", type=int, default=7168)
    ap.add_argument("--topk", type=int, default=8)
    ap.add_argument("--routing", choices=["uniform", "one_rank", "zipf"], default="uniform", help="who gets the tokens (default uniform)")
    args = ap.parse_args()
    if args.floors:
        print(json.dumps(floors()), flush=True)
        return 0
    bad = 0
    for case in CASES if args.case is None else [CASES[args.case]]:
        full = {"topk": args.topk, "hidden": args.hidden, **case} | ({} if args.routing == "uniform" else {"routing": args.routing})
        try:
            row = run_processes(full) if args.processes else run_local(full)
        except Exception:
            row = {**full, "error": traceback.format_exc()[-1500:]}
        bad += "error" in row or not row["verified"]
        print(json.dumps(row), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    os._exit(main())   # NCCL's own threads may outlive a failed case
