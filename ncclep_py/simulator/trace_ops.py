"""Stamps in the simulator: the phases of a block on a clock that counts scheduler steps."""

from __future__ import annotations

from ncclep_py.simulator.call import Call
from ncclep_py.simulator.task import Task

__all__ = ["trace_begin", "stamp"]


def trace_begin(call: Call, task: Task) -> int:
    """1 in the warp that stamps."""
    return int(call.sim.stamps is not None and task.warp == 0)


def stamp(call: Call, task: Task, trace: int, phase: int) -> int:
    """Note the step at which a phase begins."""
    if trace and call.sim.stamps is not None:
        call.sim.stamps.append((task.rank, task.block.index, task.block.launch.kernel.__name__, phase, call.scheduler.step))
    return trace
