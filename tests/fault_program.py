"""What each process of tests/test_gpu_masking.py runs: ``fault_program.py kill|sleep expert_major|rank_major``.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from ncclep_py import Communicator, Group, GroupConfig, Layout
from ncclep_py import reference as ref
from ncclep_py.errors import EpMaskedError
from ncclep_py.testing import bits_equal, random_routing, stamped_tokens, weights_like

TOKENS, HIDDEN, TOPK, LOST, TIMEOUT_S = 16, 256, 2, 1, 1.0


def say(rank: int, text: str) -> None:
    """One line in one write, so that ranks' lines do not mix."""
    sys.stdout.write(f"rank {rank}: {text}\n")
    sys.stdout.flush()


def inputs(rank: int, experts: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = random_routing(rank, TOKENS - rank, TOPK, experts, seed=step, dropped=0.1)
    return stamped_tokens(rank, TOKENS - rank, HIDDEN, torch.bfloat16, seed=step), ids, weights_like(ids, seed=step)


def right(group: Group, handle: object, step: int, masked: list[int]) -> bool:
    """One dispatch and combine of experts that double; whether counts and bits are the oracle's without the masked ranks."""
    ranks, experts = group.num_ranks, group.config.num_experts
    every = [inputs(r, experts, step) for r in range(ranks)]
    tokens, ids, weights = every[group.rank]
    if handle.layout is Layout.RANK_MAJOR:
        got = handle.dispatch(tokens.cuda(), topk_idx=ids.cuda(), topk_weights=weights.cuda())
        got.tokens.mul_(2)
        out = handle.combine(got.tokens)
        group.check()
        lists = map(list, zip(*every, strict=True))
        told = ref.ll_rank_major_dispatch(*lists, num_experts=experts, max_dispatch_tokens_per_rank=TOKENS, masked=masked)
        summed = ref.ll_rank_major_combine([e.tokens * 2 for e in told], [e.rows for e in told], masked=masked)
        mine = told[group.rank]
        same = torch.equal(got.layout_info.src_rank_counters.cpu(), mine.src_rank_counters) and torch.equal(got.topk_idx.cpu(), mine.topk_idx)
        return same and bits_equal(out.cpu(), summed[group.rank])
    got = handle.dispatch(tokens.cuda(), topk_idx=ids.cuda())
    got.tokens.mul_(2)
    out = handle.combine(got.tokens, topk_weights=weights.cuda())
    group.check()
    want = ref.ll_expert_major_dispatch([t for t, _, _ in every], [i for _, i, _ in every], num_experts=experts, max_dispatch_tokens_per_rank=TOKENS,
                                        masked=masked)
    sums = ref.ll_expert_major_combine([e.tokens * 2 for e in want], [e.rows for e in want], [w for _, _, w in every], masked=masked)
    counts = got.layout_info.expert_counters.cpu()
    return bool(torch.equal(counts, want[group.rank].expert_counters)) and bits_equal(out.cpu(), sums[group.rank])


def survive(group: Group, handle: object) -> None:
    """Three steps without rank LOST."""
    started = time.perf_counter()
    good = all([right(group, handle, step, [LOST]) for step in range(100, 103)])
    seconds = time.perf_counter() - started
    assert seconds < 3 * TIMEOUT_S + 2, f"took {seconds:.1f} s"
    assert group.mask_query().tolist() == [int(r != LOST) for r in range(group.num_ranks)]
    assert group.get_async_error() == 1 and f"rank {LOST} did not come in time" in str(group.async_error()), group.async_error()
    say(group.rank, f"masked {'right' if good else 'WRONG'}: {group.async_error()}")


def main() -> None:
    what = sys.argv[1]
    comm = Communicator.from_environment()
    config = GroupConfig(num_experts=2 * comm.num_ranks, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, max_num_sms=8,
                         timeout_ns=int(TIMEOUT_S * 1e9), enable_mask=True)
    torch.cuda.set_stream(torch.cuda.Stream())
    group = Group.create(comm, config)
    handle = group.create_handle(Layout[sys.argv[2].upper()], num_topk=TOPK)
    good = all([right(group, handle, step, []) for step in range(10)])
    assert group.mask_query().tolist() == [1] * comm.num_ranks and group.get_async_error() == 0
    torch.cuda.synchronize()
    comm.barrier()
    if what == "kill":
        if comm.rank == LOST:
            os.kill(os.getpid(), signal.SIGKILL)   # nothing of it runs on the GPU
        survive(group, handle)
        group.close()
    else:
        if comm.rank == LOST:
            time.sleep(4 * TIMEOUT_S)
            try:   # the others are far ahead
                tokens, ids, weights = (x.cuda() for x in inputs(LOST, config.num_experts, 100))
                handle.dispatch(tokens, topk_idx=ids, **({"topk_weights": weights} if handle.layout is Layout.RANK_MAJOR else {}))
                group.check()
                say(comm.rank, "was NOT told")
            except EpMaskedError as e:
                say(comm.rank, f"was told: {e}")
        else:
            survive(group, handle)
        dist.barrier()
        group.mask_clean()
        group.error_clear()
        good = all([right(group, handle, step, []) for step in range(200, 210)]) and group.mask_query().tolist() == [1] * comm.num_ranks
        assert group.get_async_error() == 0
        say(comm.rank, f"readmitted {'right' if good else 'WRONG'}")
        dist.barrier()
        group.close()
    sys.stdout.flush()
    os._exit(0)   # NCCL's own teardown would wait for the rank that is gone


if __name__ == "__main__":
    main()
