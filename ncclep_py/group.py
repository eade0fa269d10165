"""`Group`: what ranks agreed on, their window, their epoch. Operations are called on a `handle.Handle` of the group.

Not thread-safe: one thread at a time may call a group's and its handles' methods, and all on one stream (or ordered by events).
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.communicator import BLOCK_THREADS, Communicator, Kernel, SymmetricWindow
from ncclep_py.config import Algorithm, GroupConfig, HandleConfig, Layout
from ncclep_py.errors import Code, EpClosedError, EpError, EpMaskedError, EpRefusedError, ErrorRecord, Status
from ncclep_py.grid import default_blocks, own_problem, shared_problem
from ncclep_py.masking import Masking
from ncclep_py.memory_map import FLIGHT_NEXT, RECORD_FIELDS, WORD, LocalMap, WindowMap, align
from ncclep_py.own_kernels import OwnKernels
from ncclep_py.refusal import SENTENCES
from ncclep_py.signature import OpKind, Signature
from ncclep_py.streams import on_stream
from ncclep_py.waited import Waited, teams_problem

if TYPE_CHECKING:
    import torch

    from ncclep_py.handle import Handle
    from ncclep_py.inputs_outputs import LayoutInfo
    from ncclep_py.kernels.shape import KernelShape, Wire
    from ncclep_py.network import DeviceCommunicator
    from ncclep_py.recipes import Sent
    from ncclep_py.timeline import Event

__all__ = ["Group"]

FIRST_EPOCH = 1
MAX_PLACES = 64
"""Payload slots and user windows an operation can name (`signature.Signature.slot`)."""


class Group(Masking, OwnKernels, Waited):
    """Expert-parallel operations over the ranks of one communicator. Make one with `Group.create`.

    Attributes:
        comm: the communicator (stays the caller's to close).
        config: `GroupConfig`, equal on all ranks but for ``max_num_sms``, ``timeout_ns``, ``checked``, ``trace`` and ``count_waits``.
        num_blocks: thread blocks of each operation of this rank.

    Example:
        >>> import torch
        >>> import ncclep_py as ep
        >>> def program(comm):
        ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1)
        ...     other = torch.tensor([[1 - comm.rank]])   # my one token goes to the other rank's expert
        ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, other) as handle:
        ...         received = handle.dispatch(torch.full((1, 8), comm.rank + 1, dtype=torch.bfloat16))
        ...         combined = handle.combine(2 * received.tokens, topk_weights=torch.ones(1, 1))
        ...     return combined[0, 0].item()
        >>> with ep.LocalWorld(2, "sim") as world:
        ...     world.run(program)
        [2.0, 4.0]
    """

    network: DeviceCommunicator | None = None
    """What kernels over several teams need; None with one team."""

    over_network = False
    """Whether ranks form several teams: then rows of a staged combine are put out of its slot, and still read after its send half."""

    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        """Internal: use `create`."""
        self.comm, self.config, self.rank, self.num_ranks = comm, config, comm.rank, comm.num_ranks
        self.map, self.local_map = self.plans(config, comm.num_ranks)
        self.num_blocks = default_blocks(config.max_num_sms, comm.max_blocks())
        window_bytes, window_regions, local_bytes, local_regions = self.memory()
        self._window = comm.create_window(window_bytes, window_regions)
        self._local = comm.zeros(local_bytes, local_regions)
        self._waited = self.make_counters()
        self._record = comm.host_words(len(RECORD_FIELDS) * (2 if config.enable_mask else 1))
        self._record_words = self._record.numpy()
        self._notice_words = self._record_words[len(RECORD_FIELDS):]   # the async error
        self._kernels: dict[tuple[str, int, int, Layout, Wire | None], Kernel] = {}
        self.own: dict[str, str] = {}              # kernels of the caller's in the place of ours, both as names of `compiled.KERNELS`
        self.own_loaded: dict[Any, Kernel] = {}    # kernels of the caller's beside ours
        self.kernel_changes = 0
        self._handle_ids = itertools.count(1)
        self.slot_owner: list[int] = [0] * config.num_slots   # handle id, 0: free
        self.slot_combined: list[bool] = [False] * config.num_slots
        self.slot_copied: list[int] = [0] * config.num_slots   # HIGH_THROUGHPUT: order in which waiting rows were copied out
        self.staging_owner: list[int] = [0] * config.staging_slots   # handle id while a staged combine is in flight, 0: free
        self._captured: list[Any] = []
        self.tracer = comm.tracer(self.num_blocks) if config.trace else None
        self.user_windows: list[SymmetricWindow] = []
        self._closed = False
        self.start_at(FIRST_EPOCH)
        self._meets = self._meeting()   # loaded now: close() needs it, and graph capture may
        comm.barrier()
        self._held: list[Any] = [self._window, self._local, self._record, self._waited, self.user_windows]
        self._warn = weakref.finalize(self, _warn_open, self._held, comm.backend == "nccl")

    @classmethod
    def create(cls, comm: Communicator, config: GroupConfig) -> Group:
        """A group over `comm`. Collective and blocking: allocates and registers the window, compares configs.

        Raises:
            ValueError: on every rank, naming the field and all ranks' values, if configs differ; or if experts do not divide over the ranks.
        """
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm must be a Communicator, got {type(comm).__name__}")
        if not isinstance(config, GroupConfig):
            raise TypeError(f"config must be a GroupConfig, got {type(config).__name__}")
        if comm.capturing():
            raise EpError("a group cannot be created during graph capture, since its window must be allocated and registered: create the group and "
                          "its handles before capturing")
        blocks = default_blocks(config.max_num_sms, comm.max_blocks())
        mine = teams_problem(config, comm.topology) or (own_problem(blocks, comm.multiprocessors()) if comm.backend == "nccl" else "")
        answers = comm.exchange([config.agreed_fields(), mine, [*comm.gpu(), blocks]])
        _compare([dict(fields) for fields, _, _ in answers])
        config.check_ranks(comm.num_ranks)
        places = [(gpu, multiprocessors, wanted) for _, _, (gpu, multiprocessors, wanted) in answers]
        mine = mine or shared_problem(comm.rank, places)
        if mine:
            raise ValueError(mine)
        for rank, (_, problem, _) in enumerate(answers):
            problem = problem or shared_problem(rank, places)
            if problem:   # nobody goes on to a collective step that rank will not come to
                raise EpRefusedError(f"rank {rank} refused to create the group: {problem}")
        if config.algorithm is Algorithm.HIGH_THROUGHPUT:
            from ncclep_py.ht_group import HTGroup
            from ncclep_py.ht_net_group import HTNetGroup

            return HTNetGroup(comm, config) if comm.topology.num_teams > 1 else HTGroup(comm, config)
        if comm.topology.num_teams > 1:
            from ncclep_py.ll_net_group import LLNetGroup
            from ncclep_py.ll_net_masked_group import LLNetMaskedGroup

            return LLNetMaskedGroup(comm, config) if config.enable_mask else LLNetGroup(comm, config)
        return cls(comm, config)

    def plans(self, config: GroupConfig, num_ranks: int) -> tuple[WindowMap, LocalMap]:
        """Internal: byte plans of the window and of the local block."""
        return WindowMap.build(config, num_ranks), LocalMap.build(config)

    def memory(self) -> tuple[int, list[tuple[str, int, int]], int, list[tuple[str, int, int]]]:
        """Internal: bytes and regions of the window and of the local block."""
        return self.map.total_bytes, self.map.regions(), self.local_map.total_bytes, self.local_map.regions()

    def make_shape(self, name: str, shape: KernelShape) -> KernelShape:
        """Internal: the constants of a kernel, given those of one team."""
        return shape

    # ---- handles ----------------------------------------------------------------------------------------------------
    @on_stream
    def create_handle(self, layout: Layout, topk_idx: torch.Tensor | None = None, *, num_topk: int | None = None, idx_dtype: Any = None,
                      config: HandleConfig | None = None, layout_info: LayoutInfo | None = None) -> Handle:
        """A handle for `layout`; local, and not for use inside graph capture (it may compile and load kernels).

        Args:
            layout: EXPERT_MAJOR or RANK_MAJOR.
            topk_idx: ``[T, K]`` int32 or int64 expert ids, -1 for none; may instead be given to `Handle.update`, then `num_topk` says K and
                `idx_dtype` the type of ids (default int64). A duplicate in a token takes two rows of EXPERT_MAJOR, where planes have room for
                each token once: rows beyond a plane are left out, and their senders raise `EpOverflowError`.
            num_topk: K if `topk_idx` is not given.
            idx_dtype: torch.int32 or torch.int64 if `topk_idx` is not given.
            config: `HandleConfig`.
            layout_info: must be left out in LOW_LATENCY, where counts come with each dispatch.

        Example:
            >>> import torch
            >>> import ncclep_py as ep
            >>> def program(comm):
            ...     with ep.Group.create(comm, ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1)) as group:
            ...         with group.create_handle(ep.Layout.RANK_MAJOR, num_topk=1) as handle:
            ...             return handle.layout.name
            >>> with ep.LocalWorld(1, "sim") as world:
            ...     world.run(program)
            ['RANK_MAJOR']
        """
        from ncclep_py.handle import Handle

        self._check_open("create_handle")
        if layout_info is not None:
            raise ValueError(f"layout_info must be left out of a LOW_LATENCY handle, got {type(layout_info).__name__}; give it to dispatch")
        return Handle(self, next(self._handle_ids), layout, topk_idx, num_topk, idx_dtype, config or HandleConfig())

    def kernel(self, name: str, num_topk: int, idx_bytes: int, layout: Layout = Layout.EXPERT_MAJOR, wire: Wire | None = None) -> Kernel:
        """Internal: the kernel for K, id type, layout and what is sent of a row, loaded on first use; refused under capture."""
        key = (name, num_topk, idx_bytes, layout, wire)
        if key not in self._kernels:
            if self.comm.capturing():
                raise EpError(f"{name} for {num_topk} experts per token and {idx_bytes}-byte ids is not loaded, and loading is impossible during "
                              "graph capture: create the handle (or call it once) with these before capturing")
            self._kernels[key] = self.loaded(key)
        return self._kernels[key]

    def runs(self, key: Any) -> str:
        """Internal: name of the kernel of ours that stands behind a key of the loaded ones."""
        return self.kernel_name(key[0])

    def shape_of(self, key: Any) -> Any:
        """Internal: constants of the kernel behind a key."""
        from ncclep_py.kernels.shape import PLAIN, KernelShape

        name, num_topk, idx_bytes, layout, wire = key
        shape = KernelShape.build(self.config, self.num_ranks, num_topk, idx_bytes, layout, wire or PLAIN)
        return self.make_shape(self.kernel_name(name) if name else "", shape)

    def loaded(self, key: Any) -> Kernel:
        """Internal: the kernel behind a key, loaded now."""
        shape, name = self.shape_of(key), self.runs(key)
        return self.comm.kernel(self.own.get(name) or name, shape, self.shared_bytes(name, shape), self.num_blocks, self.tracer,
                                self.counts_waits)

    def own_shape(self, layout: Layout) -> Any:
        """Internal: constants of a kernel of the caller's."""
        return self.shape_of(("", self.config.num_topk, 8, layout or Layout.EXPERT_MAJOR, None))

    def shared_bytes(self, name: str, shape: Any) -> int:
        """Internal: bytes of dynamic shared memory of a block of kernel `name`."""
        from ncclep_py import launch

        return launch.shared_bytes(shape, self.config.max_dispatch_tokens_per_rank, self.num_blocks, BLOCK_THREADS // 32,
                                   self.comm.max_shared_bytes())

    # ---- operations --------------------------------------------------------------------------------------------------
    def signature(self, kind: OpKind, layout: int, slot: int, num_topk: int, global_ids: bool = False, sent: Sent | None = None,
                  recipe: int = 0) -> int:
        """Internal: the packed signature of an operation; `sent` for a dispatch with a recipe, `recipe` for a combine."""
        if sent is None:
            return Signature(kind, layout, self.config.token_type, recipe, slot, num_topk, self.config.row_bytes // 16, global_ids).pack()
        beside = 0 if sent.wire.quantise else sent.wire.scale_bytes // 16
        return Signature(kind, layout, sent.token_code, sent.code, slot, num_topk, sent.wire.sent_bytes // 16, global_ids, beside).pack()

    @property
    def window(self) -> Any:
        """The symmetric window."""
        return self._window

    def addresses(self) -> tuple[int, int]:
        """Internal: addresses of the local block and of the error record."""
        return self._local.data_ptr(), self._record.data_ptr()

    def create_window(self, num_bytes: int) -> SymmetricWindow:
        """Memory that all ranks can address, for rows of the caller's own. Collective and blocking; not during graph capture.

        A tensor over its first bytes (``window.memory[:n].view(dtype).view(shape)``) can be given as ``outputs.tokens`` of dispatch, where peers then
        write to it directly, and as ``inputs.tokens`` of combine, where they read from it; on all ranks alike. One tensor per window. Nothing tells
        the library when such rows are used: after a combine peers (over several teams the network, too) may still be reading them, so write to them
        again, or let an NVFP4 combine pack them, only after a later operation of the group that did not fail: a dispatch, its send half, or a combine
        that is not staged. Costs `num_bytes` on every rank, until the group is closed.

        Over several teams peers of my team write and read the window directly; what other teams send is copied into it here, and what goes back is
        put from it. Staged operations use the slot there: rows of a window are copied, or refused if ``zero_copy`` is ON.

        Args:
            num_bytes: size on every rank, the same on all.

        Example:
            >>> import torch
            >>> import ncclep_py as ep
            >>> def program(comm):
            ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1)
            ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, num_topk=1) as handle:
            ...         window = group.create_window(1 * 8 * 8 * 2)                                          # [L, R * M, hidden] of bfloat16
            ...         mine = window.memory.view(torch.bfloat16).view(1, 8, 8)
            ...         outputs = ep.DispatchOutputs(tokens=mine)
            ...         handle.dispatch(torch.ones(1, 8, dtype=torch.bfloat16), outputs, topk_idx=torch.tensor([[0]]))   # peers write here
            ...         handle.combine(mine, topk_weights=torch.ones(1, 1))                                              # and read from here
            ...         group.check()
            ...         return mine[0, :, 0].tolist()
            >>> with ep.LocalWorld(2, "sim") as world:
            ...     world.run(program)[0]
            [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        """
        self._check_open("create_window")
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 1:
            raise ValueError(f"num_bytes must be an int of at least 1, got {num_bytes!r}")
        if self.comm.capturing():
            raise EpError("a window cannot be created during graph capture, since it must be allocated and registered: create it before capturing")
        sizes = self.comm.exchange(num_bytes)
        if len(set(sizes)) > 1:
            raise ValueError("num_bytes must be the same on all ranks: " + ", ".join(f"rank {r} has {n}" for r, n in enumerate(sizes)))
        index = len(self.user_windows)
        if self.config.num_slots + index >= MAX_PLACES:
            raise ValueError(f"a group has at most {MAX_PLACES} slots and windows, this one has {self.config.num_slots} and {index}")
        self.user_windows.append(self.comm.create_window(num_bytes, [(f"SLOT_OF_USER{index}", 0, num_bytes)]))
        return self.user_windows[index]

    def rendezvous(self, kind: OpKind) -> None:
        """Internal: an operation that only meets: afterwards no rank is still pulling rows of an earlier operation from me."""
        self._meet(kind, Status.GO)

    def _meeting(self) -> Kernel:
        """The kernel of operations that only meet."""
        return self.kernel("ll_combine", self.config.num_topk, 8)

    def _meet(self, kind: OpKind, status: int) -> None:
        kernel = self._meets
        local, record = self.addresses()
        header = local + self.local_map.header(self.config.num_slots)
        signature = self.signature(kind, 0, 0, self.config.num_topk)
        window = self._window.handle
        values = (window, self.rank, local, record, 0, 0, 0, window, self.map.slots, local, header, 0, signature, status, self.config.wait_ns)
        self.comm.submit(kernel, values, self.num_blocks, kind.name.lower(), (), refusing=status != Status.GO)

    def keep(self, *held: Any) -> None:
        """Internal: under graph capture, keep what the graph will need on every replay until the group is closed."""
        if self.comm.capturing():
            self._captured.append(held)

    def refuse(self, why: int) -> None:
        """Internal: refuse an operation of which this rank knows no more than that its peers may take part in it."""
        self._meet(OpKind.COMBINE, Status.REFUSED << 24 | why)
        self.check()   # what it reports is my own refusal, if no earlier failure

    def check(self, *, synchronize: bool = True) -> None:
        """Raise what a device of this rank reported, if anything.

        Operations are asynchronous: an error surfaces at the next call on the group or one of its handles, or here.

        Args:
            synchronize: first wait for the rank's current stream, so that all operations so far are covered.
        """
        if synchronize:
            if self.comm.capturing():
                raise EpError("check() waits for the stream, which is impossible during graph capture: call it after the capture or a replay")
            self.comm.synchronize()
        self.raise_reported()

    def timeline(self) -> list[Event]:
        """Of a group with ``GroupConfig(trace=True)``: which phase each block of this rank was in, of at least the last 256 kernels.

        Waits for the rank's current stream. `timeline.write_chrome_trace` writes the events of all ranks to one file.

        Raises:
            EpError: without ``trace=True``.

        Example:
            >>> import torch
            >>> import ncclep_py as ep
            >>> from ncclep_py.timeline import operations
            >>> def program(comm):
            ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1, trace=True)
            ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, torch.tensor([[0]])) as handle:
            ...         handle.dispatch(torch.ones(1, 8, dtype=torch.bfloat16))
            ...         return [operation.kernel for operation in operations(group.timeline())[comm.rank]]
            >>> with ep.LocalWorld(2, "sim") as world:
            ...     world.run(program)[1]
            ['ll_dispatch']
        """
        if self.tracer is None:
            raise EpError("timeline() needs kernels that were compiled with stamps: create the group with GroupConfig(trace=True)")
        self.comm.synchronize()
        return self.tracer.read()

    def raise_reported(self) -> None:
        """Internal: raise and clear the record, if there is one; my own refusals were raised where I made them."""
        if self._record_words[0] == 0:
            return
        record = ErrorRecord.read(self._record_words)
        self._record_words[0] = 0
        if record is not None and not (record.code == Code.REFUSED and record.peer == self.rank):
            error = record.exception(SENTENCES)
            if self.config.enable_mask and record.code == Code.STALE_SLOT:
                error.everywhere = False   # the other members went on
            if self.network is not None and (note := self.network.note()):
                error.args = (f"{error}; {note}", *error.args[1:])
            raise error

    def start_at(self, epoch: int) -> None:
        """Set the epoch of the next operation, in [0, 2^32). For tests of the wrap; every rank must call it between operations."""
        import torch

        if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 1 << 32:
            raise ValueError(f"epoch must be an int in [0, 2^32), got {epoch!r}")
        memory, (begin, end) = self._window.memory, self.map.head_bank(epoch)
        memory[: self.map.slots].view(torch.int64).fill_(_tag(epoch - 1))
        memory[begin:end].view(torch.int64).fill_(_tag(epoch - 2))
        plan, own = self.map, self.local_map
        memory[plan.released: plan.released + plan.num_staging * self.num_ranks * WORD].view(torch.int64).fill_(_tag(epoch))
        for i in range(plan.num_staging):
            at = own.flight(self.config.num_slots + i) + FLIGHT_NEXT
            self._local[at: at + WORD].view(torch.int64).fill_(epoch)
        self._local[self.local_map.epoch: self.local_map.epoch + WORD].view(torch.int64).fill_(epoch)
        if own.members is not None:
            self._local[own.members.clean_epoch: own.members.clean_epoch + WORD].view(torch.int64).fill_(epoch)
        self.comm.synchronize()

    # ---- end ----------------------------------------------------------------------------------------------------------
    def _check_open(self, what: str) -> None:
        if self._closed:
            raise EpClosedError(f"cannot {what}: the group is closed")

    def close(self) -> None:
        """Meet all ranks (so that nobody unmaps rows a peer still pulls), then give the window back. Idempotent; collective.

        The meeting is bounded by ``timeout_ns``; if it fails the window is given back all the same and the error raised. With ranks masked out
        nothing collective follows it: window and communicator stay until the process ends.
        """
        if self._closed:
            return
        self._warn.detach()
        lost = False
        try:
            self.rendezvous(OpKind.CLOSE)   # also without handles: other ranks may have made some
            lost = self.lost_ranks()
            self._closed = True
            if lost:
                self._leave()
                self.comm.abandon()
            self.check()
            if not lost:
                self.comm.barrier()
        except EpMaskedError:
            pass   # known since an earlier call
        finally:
            self._captured.clear()
            self._closed = True
            if not lost:
                for window in (*self.user_windows, self._window):
                    window.close()
                self.comm.give_back(self._local, self._record, *(() if self._waited is None else (self._waited,)))

    def destroy(self) -> None:
        """`close`, by its name in ``nccl.ep``."""
        self.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        if exc_type is None:
            self.close()
        else:   # other ranks may never come; do not wait for them on the way out
            self._closed = True
            self._warn.detach()
            self._leave()

    def _leave(self) -> None:
        """Keep the memory until the process ends: ranks that went another way may still write to it, and the network on their behalf."""
        if self.comm.backend == "nccl":
            _left.append(self._held)


def _tag(epoch: int) -> int:
    """A control word of `epoch` (mod 2^32) with an empty low half, as int64."""
    word = epoch % 2**32 << 32
    return word - (1 << 64) if word >= 1 << 63 else word


_left: list[Any] = []
"""What groups that ended alone held: never freed."""


def _warn_open(held: list[Any], on_gpu: bool) -> None:
    if on_gpu:
        _left.append(held)
    warnings.warn("a ncclep_py Group was dropped without close(); its window stays registered until the process ends", ResourceWarning,
                  stacklevel=2)


def _compare(by_rank: Sequence[dict[str, str]]) -> None:
    """``ValueError`` naming every field whose values differ between ranks."""
    differing = [name for name in by_rank[0] if len({fields.get(name) for fields in by_rank}) > 1]
    if differing:
        told = "; ".join(f"{name}: " + ", ".join(f"rank {r} has {fields.get(name)}" for r, fields in enumerate(by_rank)) for name in differing)
        raise ValueError(f"GroupConfig must be the same on all ranks. {told}")


def table_of(local_map: LocalMap, slot: int, local: int) -> int:
    """Address of a slot's row table."""
    return local + local_map.table(slot)


def bytes_per_rank(config: GroupConfig, num_ranks: int) -> dict[str, int]:
    """Device memory a group takes on each rank, by part, in bytes; HIGH_THROUGHPUT: without the maps of its handles.

    Example:
        >>> import ncclep_py as ep
        >>> from ncclep_py.group import bytes_per_rank
        >>> bytes_per_rank(ep.GroupConfig(num_experts=256, max_dispatch_tokens_per_rank=128, hidden=7168), num_ranks=8)["slots"] >> 20
        448
    """
    if config.algorithm is Algorithm.HIGH_THROUGHPUT:
        from ncclep_py.ht_group import ht_bytes_per_rank

        return ht_bytes_per_rank(config, num_ranks)
    window, local = WindowMap.build(config, num_ranks), LocalMap.build(config)
    return {"control": window.slots, "slots": window.num_slots * window.slot_bytes, "local": align(local.total_bytes, 1),
            "origins": window.num_slots * window.origins_bytes, "staging": window.num_staging * window.staging_bytes}
