#!/usr/bin/env python3
"""Time high-throughput update, dispatch and combine on one GPU shared by several ranks; measures as ``bench_ll.py`` does.

    python3 scripts/bench_ht.py                      # FLAT and EXPERT_MAJOR with 2048 tokens, FLAT with 8192; LocalWorld: all ranks in this process
    python3 scripts/bench_ht.py --processes          # one process per rank; start NVIDIA's MPS first, else their kernels take turns
    python3 scripts/bench_ht.py --sweep              # pairs from 512 to 32,768 tokens per rank
    python3 scripts/bench_ht.py --sms 4              # multiprocessors per rank; with more than 16 there are fewer ranks
    python3 scripts/bench_ht.py --routing zipf       # skewed routing; one_rank: rank 0 gets all
    python3 scripts/bench_ht.py --backward           # both passes: two pairs over one routing

Before anything is timed, where every received row came from and every combined row are compared exactly (experts are the identity, rows random with
a stamp of rank and token). `pair` is one dispatch plus one combine, `step` an update before them: the slope between graphs of 4 and of 16, all ranks
started together, the slowest rank of each replay, median over replays. `floor` is the bytes all ranks read and write in a pair over 4.1 TB/s,
`share` the part of the pair it is.
One-GPU figures: nothing here crosses NVLink. Prints a table, and with --json FILE writes one JSON line per case.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time
import traceback
from typing import Any

import torch

from ncclep_py import (
    Algorithm,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    Communicator,
    DispatchConfig,
    DispatchOutputs,
    Group,
    GroupConfig,
    HandleConfig,
    Layout,
    LocalWorld,
    PassDir,
)

if "bench_ll" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("bench_ll", pathlib.Path(__file__).parent / "bench_ll.py")
    assert _spec is not None and _spec.loader is not None
    sys.modules["bench_ll"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["bench_ll"])
bench_ll: Any = sys.modules["bench_ll"]

SHORT, LONG, WAIT_S, BYTES_PER_US = 4, 16, 120, 4.1e6
BACKWARD, COMBINE_BACKWARD = DispatchConfig(pass_direction=PassDir.BWD), CombineConfig(pass_direction=PassDir.BWD)


def routing(case: dict[str, Any], rank: int) -> torch.Tensor:
    """Distinct expert ids ``[T, K]`` of one rank."""
    if case.get("routing", "uniform") == "zipf":
        return bench_ll.routing(case, rank)
    experts = case["experts"] if case.get("routing", "uniform") == "uniform" else case["experts"] // case["ranks"]
    return torch.rand(case["tokens"], experts, generator=torch.Generator().manual_seed(rank + 1)).topk(case["topk"], 1).indices


def sources(case: dict[str, Any], ids: list[torch.Tensor], rank: int) -> torch.Tensor:
    """``rank << 32 | token`` of every row a rank receives, -1 for a pad, in order."""
    local, found, alignment = case["experts"] // case["ranks"], [], max(case.get("alignment", 0), 1)

    def of(source: int, hit: torch.Tensor) -> torch.Tensor:
        return hit.any(1).nonzero()[:, 0] + (source << 32)

    if case["layout"] == "flat":
        return torch.cat([of(s, i // local == rank) for s, i in enumerate(ids)])
    for e in range(rank * local, (rank + 1) * local):
        zone = torch.cat([of(s, i == e) for s, i in enumerate(ids)])
        found += [zone, zone.new_full((-len(zone) % alignment,), -1)]
    return torch.cat(found)


def rows_of(case: dict[str, Any], ids: list[torch.Tensor]) -> list[int]:
    """Rows every rank receives, without pads."""
    local = case["experts"] // case["ranks"]
    if case["layout"] == "flat":
        return [sum(int((i // local == p).any(1).sum()) for i in ids) for p in range(case["ranks"])]
    return torch.bincount(torch.cat(ids).flatten() // local, minlength=case["ranks"]).tolist()


def moved_mb(case: dict[str, Any], ids: list[torch.Tensor]) -> float:
    """Megabytes all ranks together read and write in a pair; pads, ids, weights and control words left out."""
    return round(2 * case["hidden"] * 2 * (case["ranks"] * case["tokens"] + sum(rows_of(case, ids))) / 1e6, 1)


class Rank(bench_ll.Rank):
    """One rank's inputs, handle and graphs for one case."""

    def __init__(self, comm: Communicator, case: dict[str, Any], meet: Any) -> None:
        self.comm, self.case, self.meet = comm, case, meet
        self.everybody = [routing(case, r).to(comm.device) for r in range(case["ranks"])]
        self.sources = sources(case, self.everybody, comm.rank)
        budget = max(len(sources(case, self.everybody, r)) for r in range(case["ranks"]))
        config = GroupConfig(num_experts=case["experts"], max_dispatch_tokens_per_rank=case["tokens"], hidden=case["hidden"], num_topk=case["topk"],
                             max_num_sms=case["sms"], timeout_ns=10_000_000_000, algorithm=Algorithm.HIGH_THROUGHPUT,
                             max_recv_tokens_per_rank=max(budget, case["tokens"]), num_slots=2 if case.get("backward") else 1)
        self.group = Group.create(comm, config)
        self.ids = self.everybody[comm.rank]
        self.tokens = self.stamped(comm.rank)
        self.weights = torch.rand(self.ids.shape, device=comm.device)
        made = HandleConfig(dispatch_output_per_expert_alignment=case.get("alignment", 0))
        self.handle = self.group.create_handle(Layout[case["layout"].upper()], self.ids, config=made)
        self.out = torch.empty_like(self.tokens)
        self.back = CombineOutputs(torch.empty_like(self.tokens), torch.empty_like(self.weights))

    def stamped(self, rank: int) -> torch.Tensor:
        """Random rows whose first columns hold (rank, token % 128, token // 128), made where they are needed."""
        n, device = self.case["tokens"], self.comm.device
        rows = torch.randn(n, self.case["hidden"], dtype=torch.bfloat16, device=device, generator=torch.Generator(device).manual_seed(rank))
        token = torch.arange(n, device=device)
        rows[:, 0], rows[:, 1], rows[:, 2] = rank, token % 128, token // 128
        return rows

    def dispatch(self) -> DispatchOutputs:
        return self.handle.dispatch(self.tokens, topk_weights=self.weights)

    def pair(self, flush: bool = False, experts: bool = False) -> None:
        self.handle.combine(self.dispatch().tokens, CombineOutputs(self.out))

    def backward(self) -> None:
        received = self.handle.dispatch(self.tokens, config=BACKWARD)
        self.handle.combine(CombineInputs(received.tokens, self.handle.slot_weights(self.handle._slots[1])), self.back, COMBINE_BACKWARD)

    def update(self) -> None:
        self.handle.update(self.ids)

    def step(self) -> None:
        self.update()
        self.pair()

    def check(self, rounds: int = 3) -> bool:
        """Received rows by their stamps, combined rows by all their bits."""
        right = True
        for _ in range(rounds):
            self.out.fill_(float("nan"))
            self.update()
            got, n = self.dispatch(), len(self.sources)
            right &= int(got.layout_info.recv_total_counter[0]) == n   # type: ignore[index]
            stamp = got.tokens[:n, :3].long()
            found = (stamp[:, 0] << 32) + stamp[:, 1] + 128 * stamp[:, 2]
            right &= bool(torch.equal(found, torch.where(self.sources < 0, 0, self.sources)))
            self.handle.combine(got.tokens, CombineOutputs(self.out))
            right &= bool(torch.equal(self.out.view(torch.int16), self.expected().view(torch.int16)))
        if self.case.get("backward"):
            self.backward()
            right &= bool(torch.equal(self.back.tokens.view(torch.int16), self.expected().view(torch.int16)))
        self.group.check()
        return right

    def expected(self) -> torch.Tensor:   # type: ignore[override]
        """What combine must give with identity experts: a fp32 sum of as many equal rows as the token has."""
        local, ranks = self.case["experts"] // self.case["ranks"], torch.arange(self.case["ranks"], device=self.ids.device)
        flat = self.case["layout"] == "flat"
        counts = ((self.ids // local)[:, :, None] == ranks).any(1).sum(1) if flat else torch.full_like(self.ids[:, 0], self.case["topk"])
        sums, x = torch.zeros(self.tokens.shape, device=ranks.device), self.tokens.float()
        for i in range(self.case["topk"]):
            sums = torch.where((counts > i)[:, None], sums + x, sums)
        return sums.bfloat16()

    def slope(self, action: Any) -> list[float]:
        """Microseconds per action between graphs of `SHORT` and of `LONG` actions, so that what a replay costs once drops out."""
        short = statistics.median(self.timed(self.graph(action, SHORT).replay))
        return [(t - short) / (LONG - SHORT) for t in self.timed(self.graph(action, LONG).replay)]

    def host_us(self) -> float:
        """Host microseconds per operation of a step (update, dispatch, combine), eager."""
        self.comm.synchronize()
        self.meet()
        started = time.perf_counter()
        for _ in range(LONG):
            self.step()
        spent = time.perf_counter() - started
        self.group.check()
        return spent / LONG / 3 * 1e6


def measure(comm: Communicator, case: dict[str, Any], meet: Any = None) -> dict[str, Any]:
    """All figures of one rank; `meet` is a host barrier with little skew (default: the communicator's)."""
    rank = Rank(comm, case, meet or comm.barrier)
    result: dict[str, Any] = {"verified": rank.check(1)}
    result["pair_us"] = rank.slope(rank.pair)
    if not case.get("sweep"):
        result["dispatch_us"] = rank.slope(rank.dispatch)
        result["step_us"] = rank.slope(rank.step)
        result["update_us"] = rank.slope(rank.update)
        result["host_us"] = [rank.host_us() for _ in range(3)][1:]
        if case.get("backward"):
            result["both_passes_us"] = rank.slope(lambda: (rank.pair(), rank.backward()))
        result["verified"] = rank.check(1) and result["verified"]
    rank.group.close()
    return result


def summary(case: dict[str, Any], by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank of each replay, then the median over replays."""
    moved = moved_mb(case, [routing(case, r) for r in range(case["ranks"])])
    row = {**case, "moved_mb": moved, "floor_us": round(moved * 1e6 / BYTES_PER_US, 1), "verified": all(r["verified"] for r in by_rank)}
    for key in by_rank[0]:
        if key != "verified":
            slowest = [max(step) for step in zip(*(r[key] for r in by_rank), strict=True)]
            row[key] = round(statistics.median(slowest), 1)
            if key == "pair_us":
                row["pair_us_min_max"] = [round(min(slowest), 1), round(max(slowest), 1)]
    row["share"] = round(row["floor_us"] / row["pair_us"], 3)
    return row


def run_local(case: dict[str, Any]) -> dict[str, Any]:
    with LocalWorld(case["ranks"], "nccl") as world:
        return summary({**case, "mode": "one process"}, world.run(measure, case))


COLUMNS = ("layout", "tokens", "ranks", "sms", "pair_us", "step_us", "update_us", "dispatch_us", "both_passes_us", "host_us", "floor_us", "share",
           "verified")


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in row:
        return f"{row['layout']} {row['tokens']}: {row['error']}"
    return " ".join(f"{row.get(c, '-')!s:>12}" for c in COLUMNS)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What the command line asks for."""
    layouts = [args.layout] if args.layout else ["flat", "expert_major"]
    kinds = [(layout, t) for layout in layouts for t in (args.tokens or [2048])]
    if args.sweep:
        kinds = [(layout, t) for layout in layouts for t in (512, 1024, 2048, 4096, 8192, 16384, 32768)]
    elif not args.tokens and not args.layout:
        kinds.append(("flat", 8192))
    common = {"ranks": min(args.ranks, max(1, 128 // args.sms)), "experts": args.experts, "topk": args.topk, "hidden": args.hidden, "sms": args.sms}
    extra = {name: getattr(args, name) for name in ("alignment", "backward", "sweep") if getattr(args, name)}
    extra |= {} if args.routing == "uniform" else {"routing": args.routing}
    return [{**common, "layout": layout, "tokens": t, **extra} for layout, t in kinds]


def main() -> int:
    """Print a line per case; 1 if a case failed or gave wrong bits."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--processes", action="store_true")
    ap.add_argument("--sweep", action="store_true")
    ap.add_argument("--backward", action="store_true")
    ap.add_argument("--layout", choices=["flat", "expert_major"])
    ap.add_argument("--tokens", type=int, nargs="+", help="tokens per rank (default 2048 and, FLAT, 8192)")
    ap.add_argument("--ranks", type=int, default=8)
    ap.add_argument("--sms", type=int, default=16)
    ap.add_argument("--experts", type=int, default=128)
    ap.add_argument("--topk", type=int, default=8)
    ap.add_argument("--hidden", type=int, default=7168)
    ap.add_argument("--alignment", type=int, default=0, help="of EXPERT_MAJOR zones")
    ap.add_argument("--routing", choices=["uniform", "one_rank", "zipf"], default="uniform", help="who gets the tokens (default uniform)")
    ap.add_argument("--json", metavar="FILE", help="append one JSON line per case")
    args = ap.parse_args()
    print(" ".join(f"{c:>12}" for c in COLUMNS), flush=True)
    bad = 0
    for case in cases(args):
        try:
            row = bench_ll.run_processes(case, measure, summary) if args.processes else run_local(case)
        except Exception:
            row = {**case, "error": traceback.format_exc()[-1500:]}
        torch.cuda.empty_cache()
        bad += "error" in row or not row["verified"]
        print(line(row), flush=True)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(row) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    os._exit(main())   # NCCL's own threads may outlive a failed case
