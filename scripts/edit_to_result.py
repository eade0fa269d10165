"""How long it takes from an edited kernel to its result: the same file is changed and run again, without a restart.

    python3 scripts/edit_to_result.py [--backend sim|nccl] [--edits 5]

Two ranks, three tokens each. Before every measurement one line of a combine kernel is changed in its file, `Group.use_kernel` reads the file anew,
and the ranks dispatch and combine with it; the result is checked. Printed: the seconds of each edit, and their median. On a GPU the first edit is
warm already, since the device functions were compiled for the group; what remains is numba, the linker and loading.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Group, GroupConfig, Layout, LocalWorld
from ncclep_py.kernels import ll_combine

RANKS, TOKENS = 2, 3


def program(comm: Any, file: Path, edits: int) -> list[float]:
    """Seconds of each edit on this rank."""
    config = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=TOKENS, hidden=64, num_topk=2, max_num_sms=2, timeout_ns=10_000_000_000)
    text, seconds = inspect.getsource(ll_combine), []
    ids = torch.tensor([[0, 2], [1, 3], [3, 0]], device=comm.device)
    tokens, weights = torch.ones(TOKENS, 64, dtype=torch.bfloat16, device=comm.device), torch.full((TOKENS, 2), 0.5, device=comm.device)
    with Group.create(comm, config) as group, group.create_handle(Layout.EXPERT_MAJOR, ids) as handle:
        for edit in range(edits):
            comm.barrier()
            if comm.rank == 0:   # an edit that the compiler cannot see through: another number of nanoseconds to wait
                changed = text.replace("signature, fail, record, timeout)", f"signature, fail, record, timeout + {edit})")
                assert changed != text
                file.write_text(changed)
            comm.barrier()
            started = time.perf_counter()
            group.use_kernel("ll_combine", f"{file}:make_ll_combine")
            combined = handle.combine(handle.dispatch(tokens).tokens, topk_weights=weights)
            group.check()
            seconds.append(time.perf_counter() - started)
            assert torch.equal(combined, tokens)
    return seconds


def measure(backend: str, edits: int) -> list[float]:
    """Seconds from each edit to its result, of the slowest rank, with a cache of its own so that no edit was ever compiled before."""
    before = os.environ.get("NCCLEP_CACHE_DIR")
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["NCCLEP_CACHE_DIR"] = folder
            with LocalWorld(RANKS, backend) as world:
                return [max(times) for times in zip(*world.run(program, Path(folder, "mine.py"), edits), strict=True)]
    finally:
        os.environ.pop("NCCLEP_CACHE_DIR", None)
        if before is not None:
            os.environ["NCCLEP_CACHE_DIR"] = before


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    parser.add_argument("--edits", type=int, default=5)
    options = parser.parse_args(arguments)
    seconds = measure(options.backend, options.edits)
    print(json.dumps({"backend": options.backend, "seconds": [round(s, 3) for s in seconds], "median": round(statistics.median(seconds), 3)}))


if __name__ == "__main__":
    main()
