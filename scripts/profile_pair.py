"""A few pairs of dispatch and combine and nothing else, for a profiler: all ranks' kernels of an operation are one grid, so that it may run alone.

    ncu --kernel-name regex:fused --launch-skip 4 --launch-count 2 python3 scripts/profile_pair.py --layout expert_major

Operations in order: (HT: update,) dispatch, combine, and again. Without a GPU it runs in the simulator, to see that it works; use small sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Algorithm, DispatchInputs, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.testing import random_routing

LAYOUTS = {"expert_major": Layout.EXPERT_MAJOR, "rank_major": Layout.RANK_MAJOR, "flat": Layout.FLAT}


def pairs(comm: Any, options: argparse.Namespace) -> int:
    """The rank program; how many pairs ran."""
    high = options.layout == "flat"
    more: dict[str, Any] = dict(algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=options.ranks * options.tokens) if high else {}
    config = GroupConfig(num_experts=options.experts, max_dispatch_tokens_per_rank=options.tokens, hidden=options.hidden, num_topk=options.topk,
                         max_num_sms=options.sms, **more)
    ids = random_routing(comm.rank, options.tokens, options.topk, options.experts, seed=1).to(comm.device)
    tokens = torch.randn(options.tokens, options.hidden, dtype=torch.bfloat16, device=comm.device)
    weights = torch.full((options.tokens, options.topk), 1 / options.topk, device=comm.device)
    with Group.create(comm, config) as group:
        handle = group.create_handle(LAYOUTS[options.layout], num_topk=options.topk)
        for _ in range(options.pairs):
            if high:
                handle.update(ids)
                handle.combine(handle.dispatch(tokens, topk_weights=weights).tokens)
            elif options.layout == "rank_major":
                handle.combine(handle.dispatch(DispatchInputs(tokens, weights), topk_idx=ids).tokens)
            else:
                handle.combine(handle.dispatch(tokens, topk_idx=ids).tokens, topk_weights=weights)
            group.check()
    return options.pairs


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line above; the number of pairs of each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="expert_major", help="flat is high throughput")
    for name, value in (("ranks", 8), ("tokens", 128), ("experts", 128), ("topk", 8), ("hidden", 7168), ("sms", 16), ("pairs", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--backend", choices=("auto", "nccl", "sim"), default="auto")
    options = parser.parse_args(arguments)
    real = options.backend == "nccl" or (options.backend == "auto" and torch.cuda.is_available())
    with LocalWorld(options.ranks, "nccl" if real else "sim", fused=real) as world:
        ran = world.run(pairs, options)
    print(f"{options.layout}: {min(ran)} pairs on {options.ranks} ranks")
    return min(ran)


if __name__ == "__main__":
    main()
