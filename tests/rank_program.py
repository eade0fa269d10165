"""What each process of tests/test_gpu_processes.py runs under torchrun."""

from __future__ import annotations

import sys
import time

import torch

from ncclep_py import Communicator, EpError, EpRefusedError, EpTimeoutError, Group, GroupConfig, Layout
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


def main() -> None:
    what = sys.argv[1]
    comm = Communicator.from_environment()
    experts = comm.num_ranks * 2
    config = GroupConfig(num_experts=experts, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, max_num_sms=8, timeout_ns=3_000_000_000,
                         num_topk=3 if what == "differ" and comm.rank == 1 else TOPK)
    if what == "differ":
        try:
            Group.create(comm, config)
        except ValueError as e:
            say(comm.rank, str(e))
        comm.close()
        return
    with torch.cuda.stream(torch.cuda.Stream()), Group.create(comm, config) as group:
        handle = group.create_handle(Layout.EXPERT_MAJOR, num_topk=TOPK)
        equal = all([good_step(group, handle, step) for step in range(20)])
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
