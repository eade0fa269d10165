"""Lesson 11: to a GPU of another node. A put lands when it likes; only a signal says that it did.

    python3 scripts/lesson_11_over_gin.py [--backend sim|nccl]

Inside a team (GPUs joined by NVLink) a rank stores into its peer's memory. Between teams there is a network, and NCCL's GIN lets a kernel *put*:
"copy these bytes of my window into the other's". Three things are new:

1. A put comes back at once, and lands any time later, in pieces, in no order with other puts.
2. A *signal* (a counter at the receiver) is added to after all puts that were issued before it on the same *context*, and to the same rank.
   Other contexts know nothing of it. The receiver waits until the counter is high enough.
3. The network reads the sender's bytes when it likes, too: they must not be overwritten before.

Rank 0 puts a row of 32 bytes and a *tag* to rank 1, then adds to its signal; rank 1 waits, looks at the tag, and copies the row. Then the same
without one of its parts. In the simulator every put is delayed, cut and reordered as badly as allowed, so each fault shows. At last the library's
own dispatch and combine between two teams; with nccl over the network, if NCCL offers GIN here, else a sentence says what is missing.

Look at: the right program gives the row in all schedules; without the tag rank 1 reports an operation that did not come; each of the others gives a
race report that names the put and the read.

Try: put a # before `ops.ht_net_signal`. The simulator reports a deadlock and its first cause: rank 0 ended its kernel without adding to signal 0 of
context 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any
from unittest import mock

import in_environment  # noqa: F401
import numpy as np
import torch

from ncclep_py import Algorithm, EpError, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.errors import ErrorRecord
from ncclep_py.simulator import RaceError, Simulator
from ncclep_py.simulator.network import Network

SENT, TAG, STAGED, COPY, SIZE = 0, 128, 192, 224, 256            # places in the window
REGIONS = [("STAGING_SENT", 0, 128), ("TAGS", 128, 192), ("STAGING", 192, SIZE)]
EPOCH, SCHEDULES = 1, 60


def play(seed: int, *, wait: bool = True, tag: bool = True, signal_context: int = 0, reuse: bool = False) -> np.ndarray:
    """One schedule of the two ranks, each a team of its own; what rank 1 copied. Raises what rank 1 reports."""
    sim = Simulator(2, seed, "adversarial", blocks=1, warps=1)
    ops, comm = sim.vocabulary, Network(sim, 1, contexts=2).number
    raw = [np.zeros(SIZE + 16, np.uint8) for _ in range(2)]
    windows = [w[-w.ctypes.data % 16:][:SIZE] for w in raw]
    window = sim.create_window(windows, REGIONS)
    row, to_team_1, mine = np.arange(32, dtype=np.uint8), np.array([1 << 32], np.int64), np.array([1 << 32], np.int64)
    notes = [np.zeros(16, np.int64) for _ in range(2)]
    source, routes = (sim.register(x, "private", 0).address for x in (row, to_team_1))
    place = sim.register(mine, "private", 1).address
    record = [sim.register(n, "notes", r).address for r, n in enumerate(notes)]

    def kernel(rank: int) -> None:
        if rank == 0:
            ops.ht_net_stage_row(window, 0, window, SENT, source, routes, 0, 1, 32, 0, 1)     # the row into my own window
            ops.ht_net_put(comm, window, 1, 0, STAGED, SENT, 32)                              # put it, on context 0
            if tag:
                ops.ht_net_put_tag(comm, window, 1, 0, TAG, EPOCH, 0)                         # and a word that says which operation it is of
            ops.ht_net_signal(comm, 1, signal_context, 0, 1)                                  # signal 0 of rank 1: one more
            if reuse:
                ops.ht_net_stage_row(window, 0, window, SENT, source, routes, 0, 1, 32, 0, 1)   # is the put done with these bytes?
        else:
            code = 0
            if wait:                                                                          # not 0: it did not come, or not of this operation
                code = ops.ht_net_wait_chunk(comm, window, TAG, 0, signal_context, 0, 1, rank, EPOCH, record[1], record[1] + 16, 0)
            if code == 0:
                ops.ht_net_forward_row(window, COPY, window, STAGED, place, 0, 1, 32, rank)

    for rank in range(2):
        sim.launch(rank, kernel, [rank])
    sim.run()
    report = ErrorRecord.read(notes[1][2:])
    if report is not None:
        raise report.exception()
    return windows[1][COPY:COPY + 32].copy()


def first_fault(kind: type[Exception], **wrong: Any) -> Exception:
    """What is said about a program that lacks something, in the first schedule in which it is a `kind`."""
    for seed in range(SCHEDULES):
        try:
            play(seed, **wrong)
        except (RaceError, EpError) as error:
            if isinstance(error, kind):
                return error
    raise AssertionError(f"no schedule shows what is wrong with {wrong}")


def exchange(comm: Any) -> None:
    """A rank of two, each a team of its own: its rows to the other's expert, which doubles them, and back."""
    if comm.topology.num_teams != 2:
        raise RuntimeError("NCCL made one team of both ranks: it read NCCL_LSA_TEAM_SIZE before; run the lesson in a process of its own")
    x, other = torch.arange(64.0, device=comm.device).view(4, 16) + 100 * comm.rank, torch.full((4, 1), 1 - comm.rank, device=comm.device)
    config = GroupConfig(2, 4, 16, torch.float32, num_topk=1, algorithm=Algorithm.HIGH_THROUGHPUT)   # experts, most tokens, columns
    with Group.create(comm, config) as group, group.create_handle(Layout.FLAT, other) as handle:
        rows = handle.dispatch(x, topk_weights=torch.ones(4, 1, device=comm.device)).tokens
        assert (handle.combine(2 * rows) == 2 * x).all()


def over_the_network(backend: str) -> None:
    """`exchange` on both ranks. On a GPU, NCCL is told to make a team of each; it then needs GIN between them."""
    try:
        with mock.patch.dict(os.environ, {"NCCL_LSA_TEAM_SIZE": "1"}), LocalWorld(2, backend, team_size=int(backend == "sim")) as world:
            world.run(exchange)
    except (RuntimeError, ImportError) as why:
        if isinstance(why, EpError):   # it ran, and went wrong
            raise
        sys.exit(f"dispatch and combine between two teams cannot run on this machine: {why}")
    print(f"dispatch and combine between two teams, {backend}: every row came back doubled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    backend = parser.parse_args().backend
    for seed in range(SCHEDULES):
        assert (play(seed) == np.arange(32)).all()
    print(f"put, tag, signal, wait: the row is right in {SCHEDULES} schedules of a network that delays, cuts and reorders\n")
    for text, kind, wrong in (("rank 1 does not wait", RaceError, {"wait": False}), ("rank 0 puts no tag", EpError, {"tag": False}),
                              ("the signal goes over another context than the put", RaceError, {"signal_context": 1}),
                              ("rank 0 overwrites the row while it is being sent", RaceError, {"reuse": True})):
        error = first_fault(kind, **wrong)
        print(f"{text}:\n   {type(error).__name__}: {str(error).splitlines()[0]}\n")
    over_the_network(backend)


if __name__ == "__main__":
    main()
