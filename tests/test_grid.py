"""Grids: what a rank may use, and what the ranks on one GPU may want together."""

from __future__ import annotations

from typing import Any

import pytest

from ncclep_py import EpRefusedError, Group, GroupConfig, LocalWorld
from ncclep_py.grid import default_blocks, own_problem, shared_problem, whole_gpu


def test_default_blocks() -> None:
    assert [default_blocks(0, share) for share in (1, 16, 132)] == [1, 16, 64]
    assert [default_blocks(most, 16) for most in (1, 16, 132)] == [1, 16, 132]


def test_own_problem() -> None:
    assert own_problem(132, 132) == ""
    assert own_problem(133, 132) == "max_num_sms must be at most what this rank may use of its GPU, 132 multiprocessors, got 133"


def test_ranks_on_one_gpu_together() -> None:
    places = [("a", 132, 100), ("b", 132, 132), ("a", 132, 32), ("b", 132, 1)]
    assert shared_problem(0, places) == shared_problem(2, places) == ""
    assert "133 blocks together (rank 1 132, rank 3 1), but it has 132 multiprocessors" in shared_problem(1, places)
    assert shared_problem(3, places) == shared_problem(1, places)
    assert shared_problem(0, [("", 0, 500), ("", 0, 500)]) == ""


@pytest.mark.parametrize(("seen", "percentage", "least", "most"), [(132, None, 132, 132), (132, 100.0, 132, 132), (18, 12.5, 120, 132),
                                                                  (34, 25.0, 120, 132), (66, 50.0, 120, 132), (2, 1.0, 2, 132),
                                                                  (132, 12.5, 132, 132)])
def test_whole_gpu_is_never_overestimated(seen: int, percentage: float | None, least: int, most: int) -> None:
    """132 multiprocessors, of which a process under MPS sees its percentage, rounded up to whole pairs."""
    assert least <= whole_gpu(seen, percentage) <= most


@pytest.mark.parametrize("sms", [(2, 2, 4), (8, 1, 1)])
def test_too_many_blocks_are_refused_by_all_before_the_window(sms: tuple[int, ...]) -> None:
    """Ranks 0 and 1 share a GPU of 9 multiprocessors, rank 2 has one of its own."""
    def program(comm: Any) -> list[str]:
        comm.gpu = lambda: ("second" if comm.rank == 2 else "first", 9)
        told = []
        for more in (0, 2):
            try:
                Group.create(comm, GroupConfig(6, 4, 16, num_topk=2, max_num_sms=sms[comm.rank] * (1 + more))).close()
            except (ValueError, EpRefusedError) as e:
                told.append(f"{type(e).__name__}: {e}")
        del comm.gpu
        return told

    with LocalWorld(3, "sim") as world:
        told = world.run(program)
    first, second = 3 * (sms[0] + sms[1]), 3 * sms[2]
    for rank in (0, 1):
        assert len(told[rank]) == 1 and told[rank][0].startswith("ValueError: max_num_sms gives the ranks on one GPU")
        assert f"{first} blocks together (rank 0 {3 * sms[0]}, rank 1 {3 * sms[1]}), but it has 9 multiprocessors" in told[rank][0]
    if second > 9:
        assert "rank 2 12" in told[2][0] and told[2][0].startswith("ValueError")
    else:
        assert told[2] == ["EpRefusedError: rank 0 refused to create the group: " + told[0][0].removeprefix("ValueError: ")]
