"""Which grids may run: blocks wait for other ranks' blocks, so that all of them, of all ranks on one GPU, must be on multiprocessors at once.

Every kernel runs at least one block per multiprocessor (``communicator.NcclRank.kernel`` checks it), so it is enough that the ranks on a GPU together
want no more blocks than it has multiprocessors. Checked at `Group.create`, before anything is launched.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MAX_DEFAULT_BLOCKS", "default_blocks", "own_problem", "shared_problem", "whole_gpu"]

MAX_DEFAULT_BLOCKS = 64
LARGEST_GPU = 200
"""Multiprocessors no GPU has yet."""


def default_blocks(max_num_sms: int, share: int) -> int:
    """Blocks of an operation, given ``GroupConfig.max_num_sms`` and the rank's even share of its GPU."""
    return max_num_sms or min(share, MAX_DEFAULT_BLOCKS)


def own_problem(blocks: int, multiprocessors: int) -> str:
    """What is wrong with a rank's blocks, given the multiprocessors its process may use; empty if nothing is."""
    if blocks > multiprocessors:
        return f"max_num_sms must be at most what this rank may use of its GPU, {multiprocessors} multiprocessors, got {blocks}"
    return ""


def shared_problem(rank: int, places: Sequence[tuple[str, int, int]]) -> str:
    """What is wrong with the blocks of the ranks on `rank`'s GPU together; empty if nothing is.

    Args:
        rank: my rank.
        places: by rank, the GPU's name (empty: it has no limit), its multiprocessors, and the blocks the rank wants.
    """
    gpu, multiprocessors, _ = places[rank]
    mates = [r for r, (other, _, _) in enumerate(places) if other == gpu]
    wanted = [places[r][2] for r in mates]
    if not gpu or sum(wanted) <= multiprocessors:
        return ""
    listed = ", ".join(f"rank {r} {n}" for r, n in zip(mates, wanted))   # noqa: B905  (equal lengths)
    return (f"max_num_sms gives the ranks on one GPU {sum(wanted)} blocks together ({listed}), but it has {multiprocessors} multiprocessors; ranks "
            "wait for each other, so all must run at once: lower max_num_sms, or put fewer ranks on the GPU")


def whole_gpu(multiprocessors: int, percentage: float | None) -> int:
    """Multiprocessors of a GPU of which this process sees `multiprocessors`, at least.

    Under MPS with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE a process sees its portion, rounded up to whole pairs of multiprocessors.
    """
    if percentage is None or not 0 < percentage < 100:
        return multiprocessors
    whole = max(multiprocessors, int((multiprocessors - 2) * 100 / percentage))
    return whole if whole <= LARGEST_GPU else multiprocessors   # what it sees was no portion
