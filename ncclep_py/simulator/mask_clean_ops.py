"""Operations of ``mask_clean`` on the CPU. See ``ops``, ``kernels/mask_ops.cu``, and M7 of ``member_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ncclep_py.simulator.call import Access, Call
from ncclep_py.simulator.mask_ops import _bank
from ncclep_py.simulator.task import Task
from ncclep_py.simulator.votes import LOCKED, MASK_BITS, _cas, _vote
from ncclep_py.simulator.waits import LOW, ahead, tagged

__all__ = ["catch_up", "is_stranded", "next_epoch", "read_verdict", "readmit"]


def next_epoch(call: Call, task: Task, epoch: int) -> int:
    """The epoch after this one."""
    return (epoch + 1) & LOW


def read_verdict(call: Call, task: Task, window: int, votes: int) -> int:
    """Mask of the next attempt."""
    at = call.sim.peer_address(task, window, votes + 8, 0)
    return call.perform(task, (window, votes), {"vote": lambda a: a.load(a.word(at)) & MASK_BITS if task.warp == 0 else 0})


def _latest(epochs: Sequence[int]) -> int:
    most = epochs[0]
    for other in epochs[1:]:
        most = other if ahead(other, most) > 0 else most
    return most


def catch_up(call: Call, task: Task, window: int, votes: int, num_ranks: int) -> int:
    """The latest epoch anybody voted in."""
    def look(access: Access) -> int:
        if task.warp:
            return 0
        return _latest([access.load(access.word(call.sim.peer_address(task, window, votes, r))) >> 32 for r in range(num_ranks)])

    return call.perform(task, (window, votes, num_ranks), {"vote": look})


def is_stranded(call: Call, task: Task, window: int, votes: int, rank: int, num_ranks: int, epoch: int, mask: int, before: int) -> int:
    """Whether none of those who went on without me is a member."""
    verdict = _cas(call, task, call.sim.words.word(task.agent, call.sim.peer_address(task, window, votes + 8, 0)), None, 0)
    they = ~verdict & ((1 << num_ranks) - 1)
    without_me = not they >> rank & 1 and (ahead(verdict >> 32, epoch) >= 0 or before >> rank & 1)
    return int(bool(without_me and not they & ~mask))


def readmit(call: Call, task: Task, window: int, details: int, votes: int, rank: int, num_ranks: int, epoch: int, mask: int, members: int,
            masked_at: int, word: int, header: int, num_slots: int) -> int:
    """Members, epoch and empty slots after `mask_clean`."""
    following = 0

    def detail(access: Access) -> None:
        nonlocal following
        spots = [call.sim.peer_address(task, window, details + 32 * _bank(epoch, num_ranks, r) + 16, rank) for r in range(num_ranks)
                 if not mask >> r & 1]
        following = (_latest([access.load(access.word(spot)) & LOW for spot in spots]) + 1) & LOW
        verdict = access.word(call.sim.peer_address(task, window, votes + 8, 0))
        old = _cas(call, task, verdict, None, 0)
        while ahead(old >> 32, following - 1) < 0:   # so that who is left out can know
            found = _cas(call, task, verdict, old, _vote(following - 1, LOCKED, mask))
            if found == old:
                break
            old = found

    def words(address: int, values: Callable[[], list[int]]) -> Callable[[Access], None]:
        def write(access: Access) -> None:
            data = values()
            if data:
                access.write(address, np.array(data, np.uint64).view(np.uint8))

        return write

    call.perform(task, (), {
        "detail": detail, "masked_at": words(masked_at, lambda: [tagged(following, 0)] * num_ranks), "members": words(members, lambda: [mask]),
        "epoch": words(word, lambda: [following]), "header": words(header, lambda: [0] * (2 * num_slots))})
    call.sim.memory.outcast -= {r for r in range(num_ranks) if not mask >> r & 1}
    return 0
