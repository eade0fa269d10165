"""What a group's kernels stamp: the buffer on the device, how it is read, and the same from the simulator.

A traced kernel (``kernels/trace_ops.cu``) has a variable `ep_trace` of four words: the buffer's address, the kernel's number, blocks and launches
the buffer has room for. The buffer: ``[blocks]`` u64 launches traced so far, padded to 512 bytes, then ``[blocks][launches]`` stripes of 32 pairs of
u64: {time, kernel << 32 | multiprocessor}, and {time, phase} of each stamp. Launches go round: the newest stay. Every rank loads its own copy of a
kernel, because the variable belongs to the loaded code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ncclep_py.kernels.stamps import Step
from ncclep_py.memory_map import align
from ncclep_py.timeline import Event, events_of

if TYPE_CHECKING:
    from ncclep_py.compiled import CompiledKernel
    from ncclep_py.launch import LoadedKernel
    from ncclep_py.simulator import Simulator

__all__ = ["DeviceTracer", "SimulatedTracer", "Tracer", "buffer_bytes", "parse"]

STAMPS = 32
STRIPE = 16 * STAMPS
LAUNCHES = 256
"""Launches of which a buffer keeps the stamps; a power of two."""


class Tracer:
    """Stamps of one group on one rank."""

    def load(self, compiled: CompiledKernel, device: int) -> LoadedKernel:
        """A copy of a traced kernel's code of this tracer's own."""
        raise NotImplementedError

    def read(self) -> list[Event]:
        """All events so far that are still there; the rank's work must have ended."""
        raise NotImplementedError


class SimulatedTracer(Tracer):
    """Of a rank in the simulator."""

    def __init__(self, simulator: Simulator, rank: int) -> None:
        if simulator.stamps is None:
            simulator.stamps = []
        self.simulator, self.rank, self.begin = simulator, rank, len(simulator.stamps)

    def read(self) -> list[Event]:
        """Events since this tracer was made."""
        return events_of(stamp for stamp in (self.simulator.stamps or [])[self.begin:] if stamp[0] == self.rank)


class DeviceTracer(Tracer):
    """Of a rank on a GPU.

    Attributes:
        buffer: uint8 tensor of `buffer_bytes`, zeroed.
        kernels: names of the kernels loaded, by number.
    """

    def __init__(self, buffer: Any, rank: int, blocks: int, launches: int = LAUNCHES) -> None:
        self.buffer, self.rank, self.blocks, self.launches = buffer, rank, blocks, launches
        self.kernels: list[str] = []

    def load(self, compiled: CompiledKernel, device: int) -> LoadedKernel:
        """A copy of the kernel's code that stamps into this buffer."""
        from cuda.core import Device

        from ncclep_py.launch import LoadedKernel

        Device(device).set_current()
        loaded = LoadedKernel(compiled, device)
        loaded.set_words("ep_trace", (self.buffer.data_ptr(), len(self.kernels), self.blocks, self.launches))
        self.kernels.append(compiled.name)
        return loaded

    def read(self) -> list[Event]:
        """Events of the newest launches."""
        return parse(self.buffer.cpu().numpy(), self.rank, self.blocks, self.launches, self.kernels)


def buffer_bytes(blocks: int, launches: int = LAUNCHES) -> int:
    """Size of a buffer for a grid of `blocks`."""
    return align(8 * blocks, STRIPE) + blocks * launches * STRIPE


def parse(buffer: np.ndarray, rank: int, blocks: int, launches: int, kernels: list[str]) -> list[Event]:
    """Events in a buffer's bytes. A stripe is read up to its END, or to the first stamp that is older than the launch and hence another's."""
    words = buffer.view(np.uint64)
    stripes = words[align(8 * blocks, STRIPE) // 8:].reshape(blocks, launches, STAMPS, 2)
    events = []
    for block in range(blocks):
        count = int(words[block])
        for launch in range(max(0, count - launches), count):
            pairs = [(int(time), int(what)) for time, what in stripes[block, launch % launches]]
            (time, head), stamps = pairs[0], pairs[1:]
            kernel, multiprocessor = kernels[head >> 32], head & 0xFFFFFFFF
            before: tuple[int, int] | None = None
            for now, phase in stamps:
                if now < time:
                    break
                if before is not None:
                    events.append(Event(before[0], now, rank, block, kernel, Step(before[1]).text, launch, multiprocessor))
                before, time = (now, phase), now
                if phase == Step.END:
                    break
    return sorted(events)
