"""The simulator: ranks x blocks x warps of real kernel functions as cooperative tasks, memory with a race detector, streams, and a scheduler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.signature import OpKind, Signature
from ncclep_py.simulator.clock import HOST, Ledger, widened
from ncclep_py.simulator.errors import OutOfBoundsError, SimulationError
from ncclep_py.simulator.faults import Faults
from ncclep_py.simulator.memory import LOCAL, WINDOW, Memory, Region
from ncclep_py.simulator.ops import vocabulary
from ncclep_py.simulator.policy import Adversarial, Fair, Policy
from ncclep_py.simulator.scheduler import Scheduler
from ncclep_py.simulator.task import Launch, Stream, Task
from ncclep_py.simulator.trace import Event, write_trace
from ncclep_py.simulator.words import Words

if TYPE_CHECKING:
    from ncclep_py.simulator.network import Network

__all__ = ["Simulator"]

POISON = 0xA5
MOST_REPEATS = 20_000


class Simulator:
    """A machine of `num_ranks` GPUs on the CPU.

    Attributes:
        vocabulary: implementation of ``kernels.ops`` with which to build kernels.
        effects: effects of operations where they are not those of ``OPS``.
        events: timeline of the run if `trace`.
        stamps: (rank, block, kernel, phase, step) of every stamp, for `timeline.events_of`; None: not collected.
        poisoned: number of slots poisoned so far, over all ranks.
        team_size: ranks that can address each other's memory, 0 for all.
        most_repeats: calls in a row of operations that touch memory, all with what they were called with before, that a warp may make: a loop
            over tokens gives one of them something new each time round, one that does not advance never does.
        network: what is between teams, the newest of `networks`; it sets itself (``network.Network``).
    """

    def __init__(self, num_ranks: int, seed: int = 0, mode: str = "fair", blocks: int = 2, warps: int = 2, faults: Faults | None = None,
                 trace: bool = False, effects: Mapping[str, Sequence[str]] | None = None, poison: bool = True,
                 resident_blocks: int | None = None, policy: Policy | None = None) -> None:
        """A new machine.

        Args:
            num_ranks: ranks, each one device with one stream.
            seed: seed of all choices.
            mode: ``fair`` or ``adversarial``.
            blocks, warps: grid and block size of launches that do not say.
            faults: what may go wrong.
            trace: collect a timeline.
            effects: operations whose effects differ from ``OPS``, for mutation tests.
            poison: fill a slot with 0xA5 when all ranks have entered a dispatch into it.
            resident_blocks: blocks of a rank that run at once; the others start when one ends. None: all.
            policy: scheduling policy, instead of one made from `mode` and `seed`.
        """
        if mode not in ("fair", "adversarial"):
            raise ValueError(f"mode must be 'fair' or 'adversarial', got {mode!r}")
        self.num_ranks, self.seed, self.blocks, self.warps = num_ranks, seed, blocks, warps
        self.team_size, self.most_repeats = 0, MOST_REPEATS
        self.network: Network | None = None
        self.networks: list[Network] = []
        self.faults, self.poison, self.resident_blocks = faults or Faults(), poison, resident_blocks
        self.ledger = Ledger(num_ranks * (blocks * warps + 1))
        self.memory = Memory(self.ledger)
        self.words = Words(self.memory)
        self.policy = policy or (Fair(seed) if mode == "fair" else Adversarial(seed))
        self.scheduler = Scheduler(self)
        self.streams = [Stream(rank, self.ledger.zero()) for rank in range(num_ranks)]
        self.windows: dict[int, list[Region]] = {}
        self.events: list[Event] | None = [] if trace else None
        self.stamps: list[tuple[int, int, str, int, int]] | None = None
        self.poisoned = 0
        self._handles = itertools.count(1)
        self._entered: dict[tuple[int, int], set[int]] = {}
        for rank in range(num_ranks):
            self.ledger.slot(rank, HOST, 0)
        self.vocabulary: Vocabulary = vocabulary(self, effects or {})
        self.effects = effects or {}

    @functools.cached_property
    def counting(self) -> Vocabulary:
        """`vocabulary` for kernels that count how long they wait for whom."""
        return vocabulary(self, self.effects, waits=True)

    # ---- memory --------------------------------------------------------------------------------------------------------
    def register(self, memory: object, name: str, rank: int, parts: Sequence[tuple[str, int, int]] = ()) -> Region:
        """Make a contiguous CPU tensor or array private memory of `rank`; `parts` are (name, first byte, end byte) for messages."""
        return self.memory.add(Region(memory, name, rank, LOCAL, parts))

    def unregister(self, region: Region) -> None:
        """Forget registered memory; a later access is an error."""
        if self.memory.remove(region):
            self.words.forget(region)

    def create_window(self, memories: Sequence[object], parts: Sequence[tuple[str, int, int]] = ()) -> int:
        """A symmetric window over one array per rank; returns its handle, the same on all ranks."""
        if len(memories) != self.num_ranks:
            raise ValueError(f"a window needs one array per rank: {len(memories)} for {self.num_ranks} ranks")
        handle = next(self._handles)
        self.windows[handle] = [self.memory.add(Region(m, "WINDOW", rank, WINDOW, parts)) for rank, m in enumerate(memories)]
        return handle

    def destroy_window(self, handle: int) -> None:
        """Forget a window."""
        for region in self.windows.pop(handle):
            self.unregister(region)

    def peer_address(self, task: Task, window: int, offset: int, peer: int) -> int:
        """Address of byte `offset` of the window at `peer`."""
        regions = self.windows.get(window)
        if regions is None or not 0 <= peer < self.num_ranks:
            raise OutOfBoundsError(f"{self.ledger.describe(task.agent.slot, task.agent.time)}: no window {window} at rank {peer}")
        if self.team_size and peer // self.team_size != task.rank // self.team_size:
            raise OutOfBoundsError(f"{self.ledger.describe(task.agent.slot, task.agent.time)} addresses memory of rank {peer}, which is of another "
                                   "team")
        return regions[peer].address + offset

    # ---- work ----------------------------------------------------------------------------------------------------------
    def launch(self, rank: int, kernel: Callable[..., None], args: Sequence[int], blocks: int | None = None, warps: int | None = None,
               label: str = "kernel") -> None:
        """Append a kernel to the stream of `rank`."""
        blocks, warps = blocks or self.blocks, warps or self.warps
        self._reserve(rank, blocks, warps)
        self.streams[rank].queue.append(Launch(kernel, tuple(int(a) for a in args), blocks, warps, label))

    def host(self, rank: int, function: Callable[[], Any] | None, reads: Sequence[tuple[int, int]] = (), writes: Sequence[tuple[int, int]] = (),
             label: str = "host", site: tuple[str, int] | None = None, counted: bool = True) -> None:
        """Append to the stream of `rank` something that is no kernel of ours: it reads and writes the (address, bytes) ranges and calls `function`.

        It takes two steps: the accesses begin in the first, `function` runs at the end of the second, and the accesses are checked in both. Messages
        name the file and line of `site`, or of the function; `counted`: `Faults.late` counts it.
        """
        def body() -> None:
            begin = self.scheduler.step
            self._host_step(reads, writes)
            self.scheduler.pause("ld", "host")
            self._host_step(reads, writes)
            if function is not None:
                function()
            if self.events is not None:
                self.events.append((rank, HOST, 0, label, label, begin, self.scheduler.step))

        self.streams[rank].queue.append(Launch(body, (), 1, 1, label, host=True, source=site or function, counted=counted))

    def run(self) -> None:
        """Run all streams to their ends; raises the first `SimulationError`."""
        try:
            self.scheduler.run()
        except SimulationError as error:
            error.seed, error.mode = self.seed, self.policy.mode
            raise

    def write_trace(self, path: str | Path) -> None:
        """Write the timeline as Chrome trace JSON."""
        if self.events is None:
            raise ValueError("a timeline needs Simulator(..., trace=True)")
        write_trace(path, self.events)

    # ---- inside --------------------------------------------------------------------------------------------------------
    def entered(self, window: int, rank: int, epoch: int, signature: int, go: bool, mask: int = 0) -> None:
        """`rank` published HEAD of an operation: after the last one poison the slot of a dispatch, so that a row nobody writes shows."""
        if not self.poison or rank in self.memory.outcast:
            return
        ranks = self._entered.setdefault((window, epoch), set())
        ranks.add(rank if go else -1)
        if len(ranks) < self.num_ranks - mask.bit_count():
            return
        del self._entered[window, epoch]
        operation = Signature.unpack(signature)
        if operation.kind not in (OpKind.DISPATCH, OpKind.STAGED_DISPATCH) or -1 in ranks:
            return
        for region in (r for r in self.windows[window] if not mask >> r.rank & 1):
            for part in region.parts:
                if part.name in [f"{kind}{operation.slot}" for kind in ("SLOT", "ROUTING", "IDX", "WEIGHTS")]:
                    region.bytes[part.begin:part.end] = POISON
                    self.poisoned += part.name.startswith("SLOT")

    def _host_step(self, reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]]) -> None:
        task = self.scheduler.current
        task.agent.tick(task.site)
        for address, size in reads:
            self.memory.read(task.agent, address, size)
        for address, size in writes:
            self.memory.write(task.agent, address, size)

    def _reserve(self, rank: int, blocks: int, warps: int) -> None:
        """Make slots for a launch, and room for them in every clock."""
        for block in range(blocks):
            for warp in range(warps):
                self.ledger.slot(rank, block, warp)
        more = len(self.ledger.slots) - self.ledger.capacity
        if more <= 0:
            return
        if self.scheduler.running:
            raise ValueError("a launch during run() may not be larger than all launches before")
        self.ledger.capacity = len(self.ledger.slots)
        self.memory.grow(self.ledger.capacity)
        for stream in self.streams:
            stream.clock = widened(stream.clock, self.ledger.capacity)
