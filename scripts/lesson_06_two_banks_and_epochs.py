"""Lesson 6: signals carry a number, the *epoch*, and HEAD signals stand in two *banks*. We take one bank away and see what breaks.

    python3 scripts/lesson_06_two_banks_and_epochs.py [--backend sim|nccl]

Each operation (a dispatch, a combine) begins like this: every rank stores a word HEAD into the window of every other rank, and waits for
theirs. Operations come one after the other for days; a flag that is set to 1 would have to be cleared, which costs another round of signals. So
a HEAD holds the number of its operation, the epoch: whoever waits in operation n waits until it reads n. Nothing is ever cleared.

But is the word of operation n still there when a slow rank comes to read it? A combine ends without a last signal. So a fast rank may finish
combine n and store HEAD(n + 1) while a slow rank has not yet read its HEAD(n): it is overwritten, and the slow rank is left behind. Therefore
HEAD has two banks: odd epochs use one, even epochs the other. Two are enough: a fast rank cannot reach n + 2 before the slow one has told
n + 1, and that it does only when it is done with n.

Look at: the words in the two banks, two epochs next to each other; then, with one bank, the order of steps in which a rank is left behind.

Try: play `D X C` only once. With one bank nothing fails then: a dispatch ends with a signal of every rank, which it sends after it has read all
HEADs.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Group, GroupConfig, Layout, LocalWorld
from ncclep_py.simulator import Simulator
from ncclep_py.simulator import ops as simulated
from ncclep_py.simulator.program import Program

RANKS = 3


def program(comm: Any) -> list[list[int]]:
    """Two rounds of dispatch and combine; the epochs in each bank of my window after every operation."""
    config = GroupConfig(num_experts=RANKS, max_dispatch_tokens_per_rank=2, hidden=8, num_topk=1, timeout_ns=10_000_000_000)
    seen = []
    with Group.create(comm, config) as group:
        def look() -> None:
            comm.synchronize()
            comm.barrier()      # only so that what we print is of one moment; operations need no barrier
            words = group.window.memory[group.map.heads:][:2 * RANKS * 16].view(torch.int64).view(2, RANKS, 2).cpu()
            seen.append([[int(word) >> 32 for word in bank[:, 1]] for bank in words])
            comm.barrier()

        tokens = torch.ones(2, 8, dtype=torch.bfloat16, device=comm.device)
        ids = torch.full((2, 1), (comm.rank + 1) % RANKS, device=comm.device)
        with group.create_handle(Layout.EXPERT_MAJOR, ids) as handle:
            for _ in range(2):
                received = handle.dispatch(tokens)
                look()
                handle.combine(received.tokens, topk_weights=torch.ones(2, 1, device=comm.device))
                look()
        group.check()
    return seen


def one_bank(heads: int, num_ranks: int, source: int, epoch: int) -> int:
    """Where the simulator finds the HEAD of a rank, if there is one bank: the epoch no longer matters."""
    return heads + source * 16


def first_failure(seeds: int = 200) -> str | None:
    """Play dispatch, experts, combine twice in many orders of steps, without any help from the host in between; what went wrong first."""
    for seed in range(seeds):
        sim = Simulator(RANKS, seed, "adversarial")
        config = GroupConfig(num_experts=2 * RANKS, max_dispatch_tokens_per_rank=6, hidden=16, num_topk=2)
        ranks = Program(sim, config, [5, 3, 4], seed=seed)
        ranks.play("D X C D X C")
        sim.run()
        for record in map(ranks.record, range(RANKS)):      # what a rank's kernels reported
            if record is not None:
                return f"schedule {seed}: {record.exception()}"
        ranks.check()                                       # and all results are right
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    with LocalWorld(RANKS, parser.parse_args().backend) as world:
        seen = world.run(program)[0]
    for number, (even, odd) in enumerate(seen, 1):
        print(f"after operation {number}, in the window of rank 0: epochs in the even bank {even}, in the odd bank {odd}")
    first = max(seen[0][0] + seen[0][1])
    for number, banks in enumerate(seen):
        epoch = first + number
        assert banks[epoch % 2] == [epoch] * RANKS and max(banks[1 - epoch % 2]) == (epoch - 1 if number else max(0, epoch - 1))

    print("\nIn the simulator, with two banks:")
    right = first_failure(40)
    print("   40 orders of steps, all results right" if right is None else right)
    kept = simulated._head
    simulated._head = one_bank
    try:
        broken = first_failure()
    finally:
        simulated._head = kept
    print("with one bank:")
    print(textwrap.indent(textwrap.fill(str(broken), 110), "   "))
    assert right is None and broken is not None


if __name__ == "__main__":
    main()
