"""A kernel of one's own over several teams, which uses every operation there is for such kernels, and the program that runs and checks it.

Each rank has a row for each rank of other teams. A round puts them with a signal, waits for what comes, waits until its own are read, and writes over
them; puts them again, counted, waits for the counter, writes over them, and tells by a signal that they are there; looks at what came first, and
meets all others before the next round puts over that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ncclep_py import Group, GroupConfig

__all__ = ["ROUNDS", "ROW_BYTES", "expected", "make_own", "own", "sent_rows"]

ROUNDS, ROW_BYTES = 3, 2064


def make_own(shape: Any, ops: Any) -> Callable[..., None]:
    """The kernel: one block."""
    RANKS, FAIL = shape.num_ranks, shape.local.fail
    warp_idx, warps, store_header, read_header = ops.warp_idx, ops.ht_net_warps, ops.store_header, ops.read_header
    net_put_signal, net_put_counted = ops.net_put_signal, ops.net_put_counted
    net_read_signal, net_read_counter = ops.net_read_signal, ops.net_read_counter
    net_wait_signal, net_wait_counter = ops.net_wait_signal, ops.net_wait_counter
    net_wait_flushed, net_barrier = ops.net_wait_flushed, ops.net_barrier

    def talk(comm, signals, rank, local, record, timeout, rows_of, memory, out, row_bytes, rounds, team_size):
        first, second = signals + RANKS, signals + 2 * RANKS   # the barrier's come before
        fail, others, failed = local + FAIL, RANKS - team_size, 0
        any_peer = (rank // team_size * team_size + team_size) % RANKS
        for step in range(rounds):
            if failed == 0:
                for peer in range(RANKS):
                    if peer // team_size != rank // team_size:
                        if peer % warps() == warp_idx():
                            net_put_signal(comm, rows_of, peer, 0, (RANKS + rank) * row_bytes, peer * row_bytes, row_bytes, first + rank, 1)
                for peer in range(RANKS):
                    if peer // team_size != rank // team_size:
                        failed |= net_wait_signal(comm, 0, first + peer, step + 1, rank, peer, 1, fail, record, timeout)
                failed |= net_wait_flushed(comm, 0, rank, 1, fail, record, timeout)
                for peer in range(RANKS):
                    if peer // team_size != rank // team_size:
                        if peer % warps() == warp_idx():
                            store_header(memory + peer * row_bytes, 2 * step + 1, rank * 1000 + peer)
                for peer in range(RANKS):
                    if peer // team_size != rank // team_size:
                        if peer % warps() == warp_idx():
                            net_put_counted(comm, rows_of, peer, 1, ((2 + step) * RANKS + rank) * row_bytes, peer * row_bytes, row_bytes, 3)
                failed |= net_wait_counter(comm, 1, 3, (step + 1) * others, rank, any_peer, 1, fail, record, timeout)
                for peer in range(RANKS):
                    if peer // team_size != rank // team_size:
                        if peer % warps() == warp_idx():
                            store_header(memory + peer * row_bytes, 2 * step + 2, rank * 1000 + peer)
                            net_put_signal(comm, rows_of, peer, 1, 0, 0, 0, second + rank, 5)
                for peer in range(RANKS):
                    if peer // team_size != rank // team_size:
                        failed |= net_wait_signal(comm, 1, second + peer, 5 * (step + 1), rank, peer, 1, fail, record, timeout)
                for peer in range(RANKS):
                    if peer // team_size != rank // team_size:
                        if peer % warps() == warp_idx():
                            store_header(out + (step * RANKS + peer) * 16, step, read_header(memory + (RANKS + peer) * row_bytes))
                failed |= net_barrier(comm, 0, signals, step, rank, RANKS, team_size, 0, 1, fail, record, timeout)
        if warp_idx() == 0:
            told = net_read_signal(comm, 1, second + any_peer)
            store_header(out + rounds * RANKS * 16, failed, told * 1000 + net_read_counter(comm, 1, 3))

    return talk


def _row(source: int, peer: int, header: tuple[int, int] | None) -> torch.Tensor:
    """Bytes of the row of `source` for `peer`, with what the kernel wrote to its begin."""
    row = ((torch.arange(ROW_BYTES) * 7 + 31 * source + 5 * peer) % 251).to(torch.uint8)
    if header is not None:
        row[:16] = torch.tensor(header, dtype=torch.int64).view(torch.uint8)
    return row


def sent_rows(rank: int, ranks: int, team: int) -> torch.Tensor:
    """Bytes of a rank's rows at the beginning."""
    return torch.cat([torch.zeros(ROW_BYTES, dtype=torch.uint8) if p // team == rank // team else _row(rank, p, None) for p in range(ranks)])


def expected(rank: int, ranks: int, team: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words that a rank's kernel sees, and its rows at the end."""
    places = torch.zeros((2 + ROUNDS) * ranks, ROW_BYTES, dtype=torch.uint8)
    told = torch.zeros(ROUNDS * ranks + 1, 2, dtype=torch.int64)
    for p in (p for p in range(ranks) if p // team != rank // team):
        places[p] = _row(rank, p, (2 * ROUNDS, rank * 1000 + p))
        places[ranks + p] = _row(p, rank, (2 * ROUNDS - 2, p * 1000 + rank))
        for step in range(ROUNDS):
            places[(2 + step) * ranks + p] = _row(p, rank, (2 * step + 1, p * 1000 + rank))
            begun = int(_row(p, rank, None)[8:16].view(torch.int64)) if step == 0 else p * 1000 + rank
            told[step * ranks + p] = torch.tensor([step, begun])
    told[-1] = torch.tensor([0, 5 * ROUNDS * 1000 + ROUNDS * (ranks - team)])
    return told, places


def own(comm: Any, config: GroupConfig, settle: Callable[[Any, Group], None], equal: Callable[[torch.Tensor, torch.Tensor, str], None]) -> None:
    """Run the kernel, and compare every byte; with one team it is refused by a sentence."""
    rank, ranks, team = comm.rank, comm.num_ranks, comm.topology.team_size
    with Group.create(comm, config) as group:
        if team == ranks:
            with pytest.raises(ValueError, match="the kernel of make_own takes comm, .* and this group has none: its .* ranks form one team"):
                group.run_kernel(make_own)
            return
        window = group.create_window((2 + ROUNDS) * ranks * ROW_BYTES)
        sent, (told, places) = sent_rows(rank, ranks, team), expected(rank, ranks, team)
        window.memory[:len(sent)].copy_(sent)
        out = torch.zeros_like(told, device=comm.device)
        settle(comm, group)
        group.run_kernel(make_own, blocks=1, rows_of=window.handle, memory=window.memory, out=out, row_bytes=ROW_BYTES, rounds=ROUNDS,
                         team_size=team)
        settle(comm, group)
        equal(out, told, f"rank {rank}, words that the kernel saw")
        equal(window.memory[:places.numel()].view(-1, ROW_BYTES), places, f"rank {rank}, rows")
