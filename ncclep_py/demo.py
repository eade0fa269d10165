"""The main job: one Mixture-of-Experts layer forward over text, on several ranks, checked against the same layer in one process.

Words of a text become rows of a seeded embedding; a seeded router gives each row its top-k experts and weights; dispatch brings rows to their
experts' ranks, the experts (two-layer perceptrons in torch, bf16) run there, combine brings the results back.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ncclep_py.timeline import Event, add_trace_argument, write_chrome_trace

if TYPE_CHECKING:
    import torch

    from ncclep_py.communicator import Communicator

__all__ = ["TEXT", "Seen", "add_arguments", "main", "run"]

TEXT = """
A router looks at a word and chooses a few experts for it. The experts live on many processors, so the word has to travel. It is written down as a
row of numbers, and the row is sent to every processor that holds one of its experts. There it waits in line with rows from everywhere else, each
in its own place, so that nobody has to push. The experts work through their lines. Some lines are long, because some experts are popular; some are
empty, and their experts rest. When the work is done the results go home: every processor fetches what became of its own words, adds the answers
up with the weights the router gave them, and has one row per word again, in the order in which the words were written.
Nothing in this is hard to say. What is hard is to say it to a thousand threads at once. A thread may not write into a neighbour's memory before the
neighbour has finished reading what was there, and it may not read what a neighbour sends before all of it has come. So processors talk in small
words: I am here; this many rows will come from me; all my rows have arrived. Each word carries a number that counts the steps they take together,
so that a late word is not mistaken for a new one. Whoever waits too long says for whom it waited, and nobody waits for ever.
The same steps run here, on as many ranks as you like: on a graphics processor if there is one, and otherwise in a simulator that plays all the
processors in turn, in an order that it makes up and can repeat. The result must be the same to the last bit, in any order.
"""

VOCABULARY = 4096


@dataclasses.dataclass(frozen=True)
class Job:
    """One demo run; sizes as in the command line."""

    ranks: int
    backend: str
    experts: int
    topk: int
    hidden: int
    tokens: int
    seed: int
    layout: str = "expert_major"
    algorithm: str = "ll"
    trace: bool = False
    team: int = 0


@dataclasses.dataclass
class Seen:
    """What a run shows besides its result.

    Attributes:
        load: tokens of each expert over all steps, ``[E]``.
        rows: rows from each rank to each rank over all steps, ``[R][R]``.
        events: timeline of all ranks, if traced.
    """

    load: list[int] = dataclasses.field(default_factory=list)
    rows: list[list[int]] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's command line."""
    parser.add_argument("--text", metavar="FILE", help="text to run the layer over (default: a text of the project's own)")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default 4)")
    parser.add_argument("--team", type=int, help="simulator: ranks of a team; teams are connected by a network (default: one team)")
    parser.add_argument("--backend", choices=["auto", "sim", "nccl"], default="auto", help="auto: nccl where there is a CUDA GPU, else sim")
    parser.add_argument("--algorithm", choices=["ll", "ht"], default="ll", help="low latency or high throughput (default ll)")
    parser.add_argument("--layout", choices=["expert_major", "rank_major", "flat"], default="expert_major",
                        help="order of received rows; rank_major: ll only, flat: ht only")
    parser.add_argument("--experts", type=int, default=8, help="experts over all ranks (default 8)")
    parser.add_argument("--topk", type=int, default=2, help="experts per token (default 2)")
    parser.add_argument("--hidden", type=int, default=64, help="elements of a row (default 64)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per rank and step (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of embedding, router, experts and schedule (default 0)")
    parser.add_argument("--view", action=argparse.BooleanOptionalAction, help="show expert load and traffic between ranks; default: on a terminal")
    add_trace_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Run the demo for parsed arguments; the exit code is 0 only if the result was verified."""
    problem = _impossible(args)
    if problem is None:
        try:
            seen = Seen()
            result = run(_job(args), _words(args.text), _progress(args), seen)
            if args.trace:
                write_chrome_trace(seen.events, args.trace, simulated=result["backend"] == "sim")
            return _report(args, result, seen)
        except BrokenPipeError:   # nobody reads on
            raise
        except (ValueError, TypeError, OSError, NotImplementedError, RuntimeError, ImportError) as e:
            problem = f"{type(e).__name__}: {e}"
    if args.json:
        sys.stdout.write(json.dumps({"verified": False, "error": problem}) + "\n")
    else:
        sys.stderr.write(problem + "\n")
    return 2


def _impossible(args: argparse.Namespace) -> str | None:
    if (args.algorithm, args.layout) == ("ht", "rank_major"):
        return "--layout rank_major is for --algorithm ll; use expert_major or flat"
    if (args.algorithm, args.layout) == ("ll", "flat"):
        return "--layout flat is for --algorithm ht; use expert_major or rank_major"
    return None


def _job(args: argparse.Namespace) -> Job:
    for name in ("ranks", "experts", "topk", "hidden", "tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.team is not None and args.team < 1:
        raise ValueError(f"--team must be at least 1, got {args.team}")
    if not -(1 << 63) <= args.seed < 1 << 63:
        raise ValueError(f"--seed must fit 64 bits, got {args.seed}")
    if args.topk > args.experts:
        raise ValueError(f"--topk must be at most --experts = {args.experts}, got {args.topk}")
    return Job(args.ranks, args.backend, args.experts, args.topk, args.hidden, args.tokens, args.seed, args.layout, args.algorithm,
               bool(args.trace), args.team or 0)


def _words(path: str | None) -> list[str]:
    """Words and punctuation marks of the text."""
    try:
        text = TEXT if path is None else pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise ValueError(f"--text must be a file that can be read, got {path} ({e.strerror})") from e
    words = re.findall(r"\w+|[^\w\s]", text)
    if not words:
        raise ValueError(f"--text must hold at least one word, got {path} with none")
    return words


def _progress(args: argparse.Namespace) -> Callable[[int, int], None]:
    """Called with (steps done, steps in all)."""
    def show(done: int, steps: int) -> None:
        if not args.json and sys.stderr.isatty():
            sys.stderr.write(f"\rstep {done} of {steps}" + ("\n" if done == steps else ""))
            sys.stderr.flush()
    return show


# ---- the layer ---------------------------------------------------------------------------------------------------------
class Layer:
    """Embedding, router and experts, all seeded; the same on every rank."""

    def __init__(self, job: Job, device: torch.device) -> None:
        import torch

        g = torch.Generator().manual_seed(job.seed)
        width = 2 * job.hidden

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=g) / rows ** 0.5).to(torch.bfloat16).to(device)

        self.job, self.device = job, device
        self.embedding = torch.randn(VOCABULARY, job.hidden, generator=g).to(torch.bfloat16).to(device)
        self.router = torch.randn(job.hidden, job.experts, generator=g).to(device) / job.hidden ** 0.5
        self.up = [matrix(job.hidden, width) for _ in range(job.experts)]
        self.down = [matrix(width, job.hidden) for _ in range(job.experts)]

    def rows(self, words: list[str]) -> torch.Tensor:
        """Embeddings ``[len(words), hidden]`` bf16; a word's id is a stable hash of its letters."""
        import zlib

        import torch

        ids = torch.tensor([zlib.crc32(w.lower().encode()) % VOCABULARY for w in words], dtype=torch.int64, device=self.device)
        return self.embedding[ids].contiguous()

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids ``[T, K]`` int64, weights ``[T, K]`` float32): top-k of a softmax, weights normalised over the k."""
        import torch

        scores = torch.softmax(rows.float() @ self.router, dim=-1)
        weights, ids = scores.topk(self.job.topk, dim=-1)
        return ids.contiguous(), (weights / weights.sum(-1, keepdim=True)).contiguous()

    def expert(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """One expert on rows ``[n, hidden]``. Always computed on the capacity's number of rows, so that a row's bits do not depend on how many
        rows come with it."""
        import torch

        capacity = self.job.ranks * self.job.tokens
        full = rows if len(rows) == capacity else torch.cat([rows, rows.new_zeros(capacity - len(rows), self.job.hidden)])
        return (torch.nn.functional.silu(full @ self.up[index]) @ self.down[index])[: len(rows)]

    def reduced(self, rank: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """RANK_MAJOR: what a rank makes of rows ``[n, hidden]``: the weighted sum of its experts' outputs in k order, fp32, rounded once.

        ids ``[n, K]`` count from the rank's first expert, -1 for experts of other ranks; weights ``[n, K]``.
        """
        import torch

        local = self.job.experts // self.job.ranks
        results = [self.expert(rank * local + i, rows) for i in range(local)]
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for k in range(ids.shape[1]):
            for i, result in enumerate(results):
                total = torch.where(ids[:, k: k + 1] == i, total + result.float() * weights[:, k: k + 1], total)
        return total.to(rows.dtype)

    def flat(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The layer on one rank's rows as FLAT adds it up: per rank in ascending expert order, then over ascending ranks."""
        import torch

        local, order = self.job.experts // self.job.ranks, ids.argsort(1)
        ids, weights = ids.gather(1, order), weights.gather(1, order)
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for p in range(self.job.ranks):
            total += self.reduced(p, rows, torch.where(ids // local == p, ids - p * local, -1), weights).float()
        return total.to(rows.dtype)

    def weighted(self, index: int, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """One expert on rows ``[n, hidden]``, times their weights ``[n]``, rounded."""
        return (self.expert(index, rows).float() * weights[:, None]).to(rows.dtype)

    def expert_major(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The layer on one rank's rows as high-throughput EXPERT_MAJOR adds it up: weighted rows in ascending expert order."""
        import torch

        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for e in range(self.job.experts):
            total += self.weighted(e, rows, torch.where(ids == e, weights, 0.0).sum(1)).float() * (ids == e).any(1)[:, None]
        return total.to(rows.dtype)

    def rank_major(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The layer on one rank's rows as RANK_MAJOR adds it up: per rank first, then over ranks in the order of their first k."""
        import torch

        local = self.job.experts // self.job.ranks
        owners = ids // local
        parts = [self.reduced(p, rows, torch.where(owners == p, ids - p * local, -1), weights) for p in range(self.job.ranks)]
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for k in range(ids.shape[1]):
            first = (owners[:, :k] != owners[:, k: k + 1]).all(1)
            for p, part in enumerate(parts):
                total = torch.where((first & (owners[:, k] == p))[:, None], total + part.float(), total)
        return total.to(rows.dtype)


def _rank_program(comm: Communicator, job: Job, words: list[str],
                  progress: Callable[[int, int], None]) -> tuple[torch.Tensor, torch.Tensor, list[Event]]:
    """What one rank does; returns its combined rows of all steps, their expert ids, both on the CPU, and its timeline."""
    import torch

    from ncclep_py.config import Algorithm, GroupConfig, Layout
    from ncclep_py.group import Group

    layer = Layer(job, comm.device)
    config = GroupConfig(num_experts=job.experts, max_dispatch_tokens_per_rank=job.tokens, hidden=job.hidden, num_topk=job.topk,
                         algorithm=Algorithm.HIGH_THROUGHPUT if job.algorithm == "ht" else Algorithm.LOW_LATENCY,
                         trace=job.trace)
    steps = _steps(job, words)
    results, routed = [], [torch.zeros(0, job.topk, dtype=torch.int64)]
    layout = Layout[job.layout.upper()]
    with Group.create(comm, config) as group, group.create_handle(layout, num_topk=job.topk) as handle:
        local = job.experts // job.ranks
        for step in range(steps):
            rows = layer.rows(_share(job, words, step, comm.rank))
            ids, weights = layer.route(rows)
            routed.append(ids.cpu())
            if job.algorithm == "ht":
                results.append(_high_throughput(comm, layer, handle, rows, ids, weights).cpu())
                if comm.rank == 0:
                    progress(step + 1, steps)
                continue
            if layout is Layout.RANK_MAJOR:
                received = handle.dispatch(rows, topk_idx=ids, topk_weights=weights)
                assert received.topk_idx is not None and received.topk_weights is not None   # RANK_MAJOR has both
                flat = received.tokens.view(-1, job.hidden)
                flat.copy_(layer.reduced(comm.rank, flat, received.topk_idx.view(-1, job.topk), received.topk_weights.view(-1, job.topk)))
            else:
                received = handle.dispatch(rows, topk_idx=ids)
                for i in range(local):
                    received.tokens[i] = layer.expert(comm.rank * local + i, received.tokens[i])
            results.append(handle.combine(received.tokens, topk_weights=weights).cpu())
            if comm.rank == 0:
                progress(step + 1, steps)
        group.check()
        events = group.timeline() if job.trace else []
    return torch.cat(results) if results else torch.zeros(0, job.hidden, dtype=torch.bfloat16), torch.cat(routed), events


def _high_throughput(comm: Communicator, layer: Layer, handle: Any, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One step: the experts' rows get their weights here, combine only adds them up. The numbers of rows are read on the host."""
    received = handle.dispatch(rows, topk_idx=ids, topk_weights=weights)
    counts, local = received.layout_info, layer.job.experts // layer.job.ranks
    if layer.job.layout == "flat":
        n = int(counts.recv_total_counter[0])
        received.tokens[:n] = layer.reduced(comm.rank, received.tokens[:n], received.topk_idx[:n], received.topk_weights[:n])
        return handle.combine(received.tokens)
    for i, (begin, size) in enumerate(zip(counts.expert_offsets.tolist(), counts.expert_counters.tolist(), strict=True)):
        zone = slice(begin, begin + size)
        received.tokens[zone] = layer.weighted(comm.rank * local + i, received.tokens[zone], received.topk_weights[zone])
    return handle.combine(received.tokens)


def _steps(job: Job, words: list[str]) -> int:
    return -(-len(words) // (job.ranks * job.tokens))


def _share(job: Job, words: list[str], step: int, rank: int) -> list[str]:
    """A rank's words of one step; the last step may leave ranks with fewer, or none."""
    first = (step * job.ranks + rank) * job.tokens
    return words[first: first + job.tokens]


def run(job: Job, words: list[str], progress: Callable[[int, int], None] = lambda done, steps: None, seen: Seen | None = None) -> dict[str, Any]:
    """Run the layer on all ranks, then in one process, and compare; `seen` is filled with what there is to look at.

    Returns:
        The object `--json` prints. ``verified`` means: every step's rows within two bf16 steps of the largest value of the one-process layer;
        ``bitwise_equal_to_reference`` means equal bits.
    """
    import torch

    from ncclep_py.local_world import LocalWorld
    from ncclep_py.views import routing_counts

    if job.experts % job.ranks:
        raise ValueError(f"--experts must be a multiple of --ranks, got {job.experts} over {job.ranks}")
    started = time.perf_counter()
    with LocalWorld(job.ranks, job.backend, seed=job.seed, team_size=job.team) as world:
        of_ranks = world.run(_rank_program, job, words, progress)
        backend, device = world.backend, world.communicators[0].device
    seconds = time.perf_counter() - started
    outputs = [rows for rows, _, _ in of_ranks]
    if seen is not None:
        seen.load, seen.rows = routing_counts([ids for _, ids, _ in of_ranks], job.experts, by_rank=job.layout in ("rank_major", "flat"))
        seen.events = [event for _, _, events in of_ranks for event in events]
    want = _one_process(job, words, device)
    got = _in_text_order(job, words, outputs)
    error = float((got.float() - want.float()).abs().max())
    scale = float(want.float().abs().max())
    return {
        "backend": backend, "ranks": job.ranks, "algorithm": job.algorithm, "layout": job.layout, "tokens": len(words), "experts": job.experts,
        "topk": job.topk, "hidden": job.hidden, "steps": _steps(job, words), "verified": error <= scale * 2**-7, "max_abs_error": error,
        "bitwise_equal_to_reference": bool(torch.equal(got.view(torch.int16), want.view(torch.int16))), "seconds": round(seconds, 3),
    }


def _in_text_order(job: Job, words: list[str], outputs: list[torch.Tensor]) -> torch.Tensor:
    import torch

    taken = [0] * job.ranks
    rows = []
    for step in range(_steps(job, words)):
        for rank in range(job.ranks):
            count = len(_share(job, words, step, rank))
            rows.append(outputs[rank][taken[rank]: taken[rank] + count])
            taken[rank] += count
    return torch.cat(rows)


def _one_process(job: Job, words: list[str], device: torch.device) -> torch.Tensor:
    """The same layer without any communication, step by step, on the CPU's copy of the result."""
    import torch

    from ncclep_py.reference import moe_layer

    layer = Layer(job, device)
    experts = [lambda rows, e=e: layer.expert(e, rows.to(device)).cpu() for e in range(job.experts)]
    parts = []
    for first in range(0, len(words), job.ranks * job.tokens):
        shares = [words[i: i + job.tokens] for i in range(first, min(len(words), first + job.ranks * job.tokens), job.tokens)]
        rows = [layer.rows(share) for share in shares]
        routed = [layer.route(r) for r in rows]   # per rank, as the ranks do: the router's bits depend on how many rows it is given
        if job.layout == "rank_major":
            parts += [layer.rank_major(r, *routing).cpu() for r, routing in zip(rows, routed, strict=True)]
            continue
        if job.algorithm == "ht":
            layer_of = layer.flat if job.layout == "flat" else layer.expert_major
            parts += [layer_of(r, *routing).cpu() for r, routing in zip(rows, routed, strict=True)]
            continue
        ids, weights = torch.cat([i for i, _ in routed]), torch.cat([w for _, w in routed])
        parts.append(moe_layer(torch.cat(rows).cpu(), ids.cpu(), weights.cpu(), experts))
    return torch.cat(parts)


def _report(args: argparse.Namespace, result: dict[str, Any], seen: Seen) -> int:
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        where = "the simulator" if result["backend"] == "sim" else "real NCCL"
        sys.stdout.write(
            f"{result['tokens']} tokens through {result['experts']} experts (top {result['topk']}, hidden {result['hidden']}) "
            f"on {result['ranks']} ranks in {where}, {result['steps']} steps, {result['seconds']} s\n"
            f"against the layer in one process: largest difference {result['max_abs_error']:g}, "
            f"{'equal' if result['bitwise_equal_to_reference'] else 'not equal'} bit for bit: "
            f"{'verified' if result['verified'] else 'NOT VERIFIED'}\n")
        if args.view or (args.view is None and sys.stdout.isatty()):
            from ncclep_py.views import can_show_blocks, expert_load, traffic

            width, ascii = shutil.get_terminal_size().columns, not can_show_blocks(sys.stdout)
            sys.stdout.write(f"\n{expert_load(seen.load, args.ranks, width=width, ascii=ascii)}\n\n{traffic(seen.rows, width=width, ascii=ascii)}\n")
        if args.trace:
            sys.stdout.write(f"timeline in {args.trace}: open it in ui.perfetto.dev or chrome://tracing\n")
    return 0 if result["verified"] else 1
