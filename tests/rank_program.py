"""What each process of tests/test_gpu_processes.py runs under torchrun."""

from __future__ import annotations

import sys
import time

import torch

from ncclep_py import CombineConfig, Communicator, DispatchConfig, EpError, EpRefusedError, EpTimeoutError, Group, GroupConfig, Layout
from ncclep_py import reference as ref
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

TOKENS, HIDDEN, TOPK = 16, 256, 2


def say(rank: int, text: str) -> None:
    """One line in one write, so that ranks' lines do not mix."""
    sys.stdout.write(f"rank {rank}: {text}\n")
    sys.stdout.flush()


def good_step(group: Group, handle: object, step: int) -> bool:
    """One dispatch and combine of identity experts; whether the bits are the oracle's."""
    rank, experts = group.rank, group.config.num_experts
    ids = random_routing(rank, TOKENS - rank, TOPK, experts, seed=step, dropped=0.1)
    tokens = stamped_tokens(rank, TOKENS - rank, HIDDEN, torch.bfloat16, seed=step)
    weights = weights_like(ids, seed=step)
    got = handle.dispatch(tokens.cuda(), topk_idx=ids.cuda())
    got.tokens.mul_(2)
    out = handle.combine(got.tokens, topk_weights=weights.cuda())
    group.check()
    return bits_equal(out.cpu(), ref.moe_layer(tokens, ids, weights, [lambda rows: rows * 2] * experts))


def replays(group: Group, handle: object, steps: int) -> bool:
    """A captured pair replayed with new routing, weights, tokens and token counts (by -1), and a staged pair in turn."""
    rank, experts = group.rank, group.config.num_experts
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids, weights = torch.zeros(TOKENS, TOPK, dtype=torch.int64, device="cuda"), torch.zeros(TOKENS, TOPK, device="cuda")
    outs, graphs = [], []
    for staged in (False, True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
            got = handle.dispatch(x, topk_idx=ids, config=DispatchConfig(send_only=staged))
            handle.complete()
            got.tokens.mul_(2)
            outs.append(handle.combine(got.tokens, topk_weights=weights, config=CombineConfig(send_only=staged)))
            handle.complete()
    equal = True
    for step in range(steps):
        new_ids = random_routing(rank, TOKENS, TOPK, experts, seed=step, dropped=step % 11 / 10)
        tokens, new_weights = stamped_tokens(rank, TOKENS, HIDDEN, torch.bfloat16, seed=step), weights_like(new_ids, seed=step)
        ids.copy_(new_ids), x.copy_(tokens), weights.copy_(new_weights)
        graphs[step % 2].replay()
        equal &= bits_equal(outs[step % 2].cpu(), ref.moe_layer(tokens, new_ids, new_weights, [lambda rows: rows * 2] * experts))
    group.check()
    return equal


def rank_major_step(group: Group, handle: object, step: int) -> bool:
    """The same in RANK_MAJOR, with rows that tell their rank; whether rows, ids and sums are the oracle's."""
    rank, ranks, experts = group.rank, group.num_ranks, group.config.num_experts
    ids = [random_routing(r, TOKENS - r, TOPK, experts, seed=step, dropped=0.1) for r in range(ranks)]
    tokens = [stamped_tokens(r, TOKENS - r, HIDDEN, torch.bfloat16, seed=step) for r in range(ranks)]
    weights = [weights_like(i, seed=step) for i in ids]
    want = ref.ll_rank_major_dispatch(tokens, ids, weights, num_experts=experts, max_dispatch_tokens_per_rank=TOKENS)
    got = handle.dispatch(tokens[rank].cuda(), topk_idx=ids[rank].cuda(), topk_weights=weights[rank].cuda())
    counts = got.layout_info.src_rank_counters.cpu()
    equal = torch.equal(counts, want[rank].src_rank_counters) and torch.equal(got.topk_idx.cpu(), want[rank].topk_idx)
    for source, n in enumerate(counts.tolist()):
        equal = equal and bits_equal(got.tokens[source, :n].cpu(), want[rank].tokens[source, :n])
    got.tokens.mul_(rank + 1)
    out = handle.combine(got.tokens)
    group.check()
    sums = ref.ll_rank_major_combine([w.tokens * (r + 1) for r, w in enumerate(want)], [w.rows for w in want])
    return equal and bits_equal(out.cpu(), sums[rank])


def main() -> None:
    what = sys.argv[1]
    comm = Communicator.from_environment()
    experts = comm.num_ranks * 2
    config = GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, max_num_sms=8, timeout_ns=3_000_000_000,
                         num_staging_slots=2 if what == "graph" else 0, num_topk=3 if what == "differ" and comm.rank == 1 else TOPK)
    if what == "differ":
        try:
            Group.create(comm, config)
        except ValueError as e:
            say(comm.rank, str(e))
        comm.close()
        return
    with torch.cuda.stream(torch.cuda.Stream()), Group.create(comm, config) as group:
        handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=TOPK)
        by_rank = group.create_handle(Layout.RANK_MAJOR, num_topk=TOPK)
        equal = all([good_step(group, handle, step) and rank_major_step(group, by_rank, step) for step in range(20)])
        if what == "graph":
            equal = equal and replays(group, handle, 100)
        if what in ("refuse", "late"):
            tokens = stamped_tokens(comm.rank, TOKENS, HIDDEN, torch.bfloat16).cuda()
            ids = random_routing(comm.rank, TOKENS, TOPK, experts).cuda()
            comm.barrier()
            if what == "late" and comm.rank == 1:
                time.sleep(5)
            started = time.perf_counter()
            try:
                handle.dispatch(tokens.float() if what == "refuse" and comm.rank == 1 else tokens, topk_idx=ids)
                group.check()
            except (EpRefusedError, EpTimeoutError, TypeError) as e:
                say(comm.rank, f"{type(e).__name__}: {e}")
                if isinstance(e, EpTimeoutError) and (time.perf_counter() - started > 8 or (comm.rank != 1 and e.culprit != 1)):
                    raise RuntimeError("too late, or the wrong culprit") from e
            except EpError as e:
                say(comm.rank, f"unexpected {type(e).__name__}: {e}")
            comm.barrier()
            equal = equal and good_step(group, handle, 99)
        say(comm.rank, "bitwise equal" if equal else "NOT EQUAL")
    comm.close()


if __name__ == "__main__":
    main()
