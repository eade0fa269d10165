"""`Handle`: one routing at a time, and the operations on it: dispatch and combine.

Lifetime of outputs that live in the window (the default): `DispatchOutputs.tokens` is valid from its dispatch until the handle's combine; a later
dispatch on the same slot, or a combine, makes it stale, and passing stale tokens to `combine` is refused. After `combine` returns, peers may still
be reading these rows: write to them again only after a later dispatch of the group gave them out again.

Errors: operations are asynchronous, so what a device reports is raised by a later call on the same rank, or by ``Group.check()``. A call whose
arguments are wrong takes part as a refusal: it is one operation on every rank, epochs stay equal and no peer waits; peers in the same process
raise in the same call. A call that finds an earlier failure every rank sees (a refusal, a mismatch, a timeout) raises and is no operation on any
rank. To go on after an error, let every rank call ``Group.check()`` at the same point of the program.

Staged operations (``send_only``, needs `GroupConfig.num_staging_slots`): the call enqueues the send half, `Handle.complete` the rest. Between the two
the multiprocessors are free. One operation of a handle may be in flight; other handles may go on meanwhile. The send half of dispatch waits until
all ranks have entered theirs and have told their counts; that of combine waits for no rank, given a staging slot whose last use all have completed.
Over several teams that of dispatch also waits until what earlier operations put has landed here, and a second combine of one dispatch meets all ranks
first, since rows of the first may still be read. In groups with ``enable_mask`` the send half does all of it: what members agree on ends with the
operation (``member_map``).

CUDA graphs: every operation may be captured; create the group and the handle before, and use recipes and id types once. All ranks capture the same
operations, each rank its own graph, and replay in the same order (ranks in one process through ``comm.together(graph.replay)``). The number of
tokens is baked in, so that fewer tokens are said by ids of -1; tokens, ids and weights are read at every replay. Tensors of captured calls are kept
until the group is closed, tensors made inside the capture by the graph; the window by the group, which must stay open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.arguments import ALIGNMENT, Seen, check_tensor, refusal_of, refused
from ncclep_py.config import CombineConfig, DispatchConfig, ExpertIdKind, HandleConfig, Layout
from ncclep_py.errors import EpError, EpRefusedError, Status
from ncclep_py.flight import DONE, REFUSED, SENDS, Flight, fixed_values, take_stage
from ncclep_py.handle_checks import HandleChecks, _check_kinds, _known_layout, _known_topk
from ncclep_py.inputs_outputs import CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, LayoutInfo
from ncclep_py.recipes import Sent
from ncclep_py.refusal import Refusal
from ncclep_py.signature import OpKind
from ncclep_py.streams import on_stream

if TYPE_CHECKING:
    import torch

    from ncclep_py.communicator import Kernel
    from ncclep_py.group import Group
    from ncclep_py.kernels.shape import Wire

__all__ = ["CombineInputs", "CombineOutputs", "DispatchInputs", "DispatchOutputs", "Handle", "LayoutInfo"]


PLAIN_DISPATCH, PLAIN_COMBINE = DispatchConfig(), CombineConfig()   # made once: making one costs microseconds


class Handle(HandleChecks):
    """Made by `Group.create_handle`.

    Attributes:
        group: the group.
        layout: order of received rows.
        num_topk: K.
    """

    def __init__(self, group: Group, handle_id: int, layout: Layout, topk_idx: torch.Tensor | None, num_topk: int | None, idx_dtype: Any,
                 config: HandleConfig) -> None:
        """Internal: use `Group.create_handle`."""
        import torch

        self.group, self.id, self.layout, self.config = group, handle_id, _known_layout(layout), config
        if group.config.slot_layout not in (Layout.UNSET, self.layout):
            raise ValueError(f"layout must be GroupConfig.slot_layout = {group.config.slot_layout.name}, got {self.layout.name}")
        if topk_idx is None and num_topk is None:
            raise ValueError("create_handle needs topk_idx or num_topk, got neither")
        if topk_idx is not None:
            check_tensor("topk_idx", topk_idx, (None, num_topk), (torch.int32, torch.int64), group.comm.device, aligned=False)
        self.num_topk = _known_topk(int(topk_idx.shape[1]) if topk_idx is not None else num_topk, group.config.num_topk)
        dtype = topk_idx.dtype if topk_idx is not None else idx_dtype or torch.int64
        if dtype not in (torch.int32, torch.int64):
            raise TypeError(f"idx_dtype must be torch.int32 or torch.int64, got {dtype}")
        self._closed = False
        self._slot, self._generation, self._held, self._num_tokens, self._idx_bytes = -1, 0, 0, 0, dtype.itemsize
        self._held_slot = -1   # where the dispatch is that a combine would bring back
        self._packed = False   # whether the slot's rows are no longer what experts wrote
        self._topk_idx: torch.Tensor | None = None
        self._rank_major, capacity = self.layout is Layout.RANK_MAJOR, group.config.max_dispatch_tokens_per_rank
        planes = (group.num_ranks, capacity) if self._rank_major else (group.map.num_local_experts, group.map.plane_rows)
        self._seen, self._row_shape = Seen(), (*planes, group.config.hidden)
        self._row_views: dict[int, torch.Tensor] = {}
        self._routing_views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dispatch_name = "ll_rank_major_dispatch" if self._rank_major else "ll_dispatch"
        self._dtype = group.config.token_type.torch_dtype()
        self._constants: dict[tuple[str, int, int, Sent | None, int], tuple[int, ...]] = {}
        self._counters: Any = None
        self._spare_counters: list[torch.Tensor] = []
        self._sent_views: dict[tuple[int, int, Any, int], torch.Tensor] = {}
        self._flight: Flight | None = None
        self._stage = 0
        self._send_name = "ll_rank_major_send" if self._rank_major else "ll_dispatch_send"
        self._stamping = {self._dispatch_name, self._send_name, "ll_combine", "ll_nvfp4_combine", "ll_combine_send"}
        halves = (self._send_name, SENDS[self._send_name], "ll_combine_send", "ll_combine_complete")
        for name in (self._dispatch_name, "ll_combine", "ll_copy", *(halves if group.config.staging_slots else ())):
            self._kernel(name)
        if topk_idx is not None:
            self.update(topk_idx)

    @on_stream
    def update(self, topk_idx: torch.Tensor) -> None:
        """Bind a new routing. Local, no GPU work; errors in it are raised here and, if it is dispatched nevertheless, on every rank there.

        Args:
            topk_idx: ``[T, K]`` int32 or int64, T <= max_dispatch_tokens_per_rank; ids outside [0, E) count as "no expert". Must stay unchanged
                until the dispatch has run. An expert twice in a token takes two rows of EXPERT_MAJOR, whose planes have room for each token once:
                rows beyond a plane are left out, and their senders raise `EpOverflowError`.

        Example:
            >>> import torch
            >>> import ncclep_py as ep
            >>> def program(comm):
            ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1)
            ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, num_topk=1) as handle:
            ...         handle.update(torch.tensor([[0], [-1], [5]]))   # the last two have no expert
            ...         return handle.dispatch(torch.ones(3, 8, dtype=torch.bfloat16)).layout_info.expert_counters.tolist()
            >>> with ep.LocalWorld(2, "sim") as world:
            ...     world.run(program)
            [[2], [0]]
        """
        self._check_open("update")
        self._topk_idx = None
        self._check_routing(topk_idx)
        self._topk_idx, self._idx_bytes = topk_idx, topk_idx.element_size()

    # ---- dispatch ----------------------------------------------------------------------------------------------------
    @on_stream
    def dispatch(self, inputs: DispatchInputs | torch.Tensor, outputs: DispatchOutputs | None = None, layout_info: LayoutInfo | None = None,
                 config: DispatchConfig | None = None, *, topk_idx: torch.Tensor | None = None,
                 topk_weights: torch.Tensor | None = None) -> DispatchOutputs:
        """Send every token to its experts. Collective, stream-ordered on the current stream.

        Args:
            inputs: tokens ``[T, hidden]``, or `DispatchInputs`.
            outputs: where to put rows; without it they are in the group's window (no copy), and neither is there one if ``outputs.tokens`` is in a
                window of `Group.create_window`. Into other tensors received rows are copied, ``2 * rows * hidden * itemsize`` bytes; unused
                rows are not touched.
            layout_info: where to put ``expert_counters`` or ``src_rank_counters``; allocated without it. RANK_MAJOR: also how to number received ids.
            config: `DispatchConfig`.
            topk_idx: shorthand for `update` before the call; its errors, too, are told to all ranks.
            topk_weights: RANK_MAJOR: the router weights ``[T, K]`` float32, if `inputs` does not hold them.

        Returns:
            `DispatchOutputs`, also if given.

        Raises:
            TypeError, ValueError: an argument is wrong (on this rank; every other rank raises `EpRefusedError`).
            EpError: what a device reported about an earlier operation.

        Example:
            >>> import torch
            >>> import ncclep_py as ep
            >>> def program(comm):
            ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=2)
            ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, num_topk=2) as handle:
            ...         tokens = torch.full((1, 8), 10 + comm.rank, dtype=torch.bfloat16)
            ...         received = handle.dispatch(tokens, topk_idx=torch.tensor([[1, 0]]))
            ...         count = int(received.layout_info.expert_counters[0])
            ...         return received.tokens[0, :count, 0].tolist()
            >>> with ep.LocalWorld(2, "sim") as world:
            ...     world.run(program)
            [[10.0, 11.0], [10.0, 11.0]]
        """
        self._check_group("dispatch")
        with _Refusing(self, "", -1) as refusing:
            self._check_open("dispatch")
            self._check_landed("dispatch")
            slot = self._take_slot()
            staged = isinstance(config, DispatchConfig) and config.send_only and bool(self.group.staging_owner)
            name = self._send_name if staged else self._dispatch_name
            refusing.name, refusing.slot = name, slot   # from here on the operation is known
            self._generation += 1
            given = inputs if isinstance(inputs, DispatchInputs) else DispatchInputs(inputs)
            made = outputs if isinstance(outputs, DispatchOutputs) else DispatchOutputs()
            counts = layout_info if isinstance(layout_info, LayoutInfo) else made.layout_info
            weights: Any = topk_weights if topk_weights is not None else given.topk_weights
            self.group.raise_reported()
            if outputs is not None or layout_info is not None or config is not None:
                _check_kinds(("outputs", outputs, DispatchOutputs), ("layout_info", layout_info, LayoutInfo), ("config", config, DispatchConfig))
            if topk_idx is not None:
                self.update(topk_idx)
            sent = self._check_dispatch(given, weights, made, counts, config or PLAIN_DISPATCH, slot)
            place = self._place("outputs.tokens", made.tokens, slot, sent is None, staged)
        tokens, idx = given.tokens, self._topk_idx
        assert idx is not None   # checked above
        num_tokens = int(tokens.shape[0])
        beside = () if given.scales is None else (given.scales,)
        scales = beside[0].data_ptr() if beside else 0
        if self._rank_major:
            if counts.src_rank_counters is None:
                counts.src_rank_counters = self._new_counters(self.group.num_ranks)
            counters, global_ids = counts.src_rank_counters, counts.recv_topk_idx_kind is ExpertIdKind.GLOBAL
            own: tuple[int, ...] = (tokens.data_ptr(), idx.data_ptr(), weights.data_ptr(), num_tokens, counters.data_ptr(), int(global_ids), scales)
            self._launch(name, slot, Status.GO, own, (tokens, idx, weights, counters, *beside), global_ids, sent, place)
        else:
            if counts.expert_counters is None:
                counts.expert_counters = self._new_counters(self.group.map.num_local_experts)
            own = (tokens.data_ptr(), idx.data_ptr(), num_tokens, counts.expert_counters.data_ptr())
            self._launch(name, slot, Status.GO, (*own, scales), (tokens, idx, counts.expert_counters, *beside), False, sent, place)
        self._packed = False
        # only now: a dispatch known to be refused leaves the earlier one to combine
        self._num_tokens, self._held, self._held_slot = num_tokens, self._generation, slot
        self._counters = counts.src_rank_counters if self._rank_major else counts.expert_counters
        copies: list[tuple[Any, Any]] = []
        received = self._rows(slot) if sent is None else self._sent(slot, 0, sent.dtype, sent.width)
        if made.tokens is None:
            made.tokens = received
        elif place < 0 and made.tokens.data_ptr() != received.data_ptr():
            copies.append((made.tokens, received))
        if sent is not None:
            received = self._sent(slot, self._scales_at(sent), sent.scale_dtype, sent.scale_width)
            if made.scales is None:
                made.scales = received
            elif made.scales.data_ptr() != received.data_ptr():
                copies.append((made.scales, received))
        if self._rank_major:
            for field, routing in zip(("topk_idx", "topk_weights"), self._routing(slot)):   # noqa: B905  (two each)
                held = getattr(made, field)
                if held is None:
                    setattr(made, field, routing)
                elif held.data_ptr() != routing.data_ptr():
                    copies.append((held, routing))
        made.layout_info, made.generation = counts, self._generation
        if staged:
            mine = own[4:6 if self.group.over_network else 5] if self._rank_major else ()   # the counters; over teams also how ids are numbered
            kept = (tokens, idx, weights, *beside, counts.expert_counters, counts.src_rank_counters)
            self._flight = Flight(SENDS[name], slot, mine, tuple(t for t in kept if t is not None), made, copies, sent, place)
        else:
            self._copy_all(copies)
            self._done("dispatch", slot, config, made)
        return made

    # ---- combine -----------------------------------------------------------------------------------------------------
    @on_stream
    def combine(self, inputs: CombineInputs | torch.Tensor, outputs: CombineOutputs | None = None, config: CombineConfig | None = None, *,
                topk_weights: torch.Tensor | None = None) -> torch.Tensor:
        """Bring the experts' rows back and add them up. Collective, stream-ordered on the current stream.

        EXPERT_MAJOR: ``out[t] = sum over k of weight[t, k] * row(t, k)``: fp32 fused multiply-adds in ascending k, one rounding. RANK_MAJOR:
        ``out[t] = sum over ranks of row(t, rank)``: fp32 additions in the order of each rank's first k, one rounding. Zero without experts.

        Args:
            inputs: expert outputs, placed as dispatch placed its rows, or `CombineInputs`.
            outputs: `CombineOutputs`; its ``topk_weights`` holds the router weights.
            config: `CombineConfig`.
            topk_weights: the router weights ``[T, K]`` float32, if `outputs` does not hold them.

        Returns:
            ``[T, hidden]``, the combined tokens (``outputs.tokens`` if given).

        Raises:
            TypeError, ValueError, EpStaleError: an argument is wrong (every other rank raises `EpRefusedError`).
            EpError: what a device reported about an earlier operation.

        Example:
            >>> import torch
            >>> import ncclep_py as ep
            >>> def program(comm):
            ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=2)
            ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, num_topk=2) as handle:
            ...         received = handle.dispatch(torch.ones(1, 8, dtype=torch.bfloat16), topk_idx=torch.tensor([[1, 0]]))
            ...         received.tokens.mul_(1 + comm.rank)   # expert e is on rank e
            ...         return handle.combine(received.tokens, topk_weights=torch.tensor([[0.75, 0.25]]))[0, 0].item()
            >>> with ep.LocalWorld(2, "sim") as world:
            ...     world.run(program)
            [1.75, 1.75]
        """
        self._check_group("combine")
        staged = isinstance(config, CombineConfig) and config.send_only and bool(self.group.staging_owner)
        with contextlib.nullcontext() if staged else _Refusing(self, "", -1):   # a staged combine is no operation of the group
            self._check_open("combine")
            self._check_landed("combine")
            if self._slot < 0 or self._slot != self._held_slot or self.group.slot_owner[self._slot] not in (self.id, -self.id):
                raise refused(EpError("combine needs a dispatch of this handle before it; its slot was never filled or went to another handle"),
                              Refusal.ORDER)
            slot = self._slot
            name = "ll_combine_send" if staged else "ll_combine"
            if staged:
                self._stage = take_stage(self.group, self.id)
        reads_on, again = not staged or self.group.over_network, self.group.slot_combined[slot]
        if reads_on and again:   # peers may still be pulling from this slot: meet first, on all ranks alike
            self.group.rendezvous(OpKind.COMBINE)
        given = inputs if isinstance(inputs, CombineInputs) else CombineInputs(inputs)
        made = outputs if isinstance(outputs, CombineOutputs) else CombineOutputs()
        weights: Any = topk_weights if topk_weights is not None else made.topk_weights
        # free for others, but still mine to combine again; also if this call raises, since peers may not know of that yet
        self.group.slot_combined[slot], self.group.slot_owner[slot] = again or reads_on, -self.id
        with _Refusing(self, name, slot):
            self.group.raise_reported()
            if made is not outputs or config is not None:
                _check_kinds(("outputs", outputs, CombineOutputs), ("config", config, CombineConfig))
            self._check_combine(given, made, weights, config or PLAIN_COMBINE, slot)
            pushes = staged and not self.group.over_network   # from wherever the rows are; puts read the group's window only
            place = -1 if pushes else self._place("inputs.tokens", given.tokens, slot, True, staged)
        if made.tokens is None:
            made.tokens = self._new((self._num_tokens, self.group.config.hidden))
        if self.group.comm.backend == "sim" and not again and (place >= 0 or given.tokens.data_ptr() == self._rows(slot).data_ptr()):
            self.group.comm.touched(self._received(slot, place, self._counters))
        if staged:
            held = (made.tokens,) if self._rank_major else (weights, made.tokens)
            own: tuple[int, ...] = (0 if self._rank_major else weights.data_ptr(), made.tokens.data_ptr(), self._num_tokens)
            pushed = self._pushed(slot, given.tokens)
            self._launch(name, slot, Status.GO, (pushed.data_ptr(), self._num_tokens), (pushed,))
            self._flight = Flight(SENDS[name], self._stage, own, held, made.tokens)
            return made.tokens
        rows = self._rows(slot)
        if place < 0 and given.tokens.data_ptr() != rows.data_ptr():
            self._copy_all([(rows, given.tokens)])
            self._packed = False
        if given.scales is not None:
            self._packed = self._packed or place < 0
            own = (given.scales.data_ptr(), self._counters.data_ptr(), 0 if self._rank_major else weights.data_ptr(), made.tokens.data_ptr(),
                   self._num_tokens)
            self._launch("ll_nvfp4_combine", slot, Status.GO, own,
                         (given.scales, self._counters, made.tokens, *(() if self._rank_major else (weights,))), place=place)
        elif self._rank_major:
            self._launch("ll_combine", slot, Status.GO, (0, made.tokens.data_ptr(), self._num_tokens), (made.tokens,),
                         place=place)
        else:
            self._launch("ll_combine", slot, Status.GO, (weights.data_ptr(), made.tokens.data_ptr(), self._num_tokens), (weights, made.tokens),
                         place=place)
        self._done("combine", slot, config, made.tokens)
        return made.tokens

    def expert_rows(self) -> torch.Tensor:
        """Rows of the window from which combine reads without a copy, ``[L, R * M, hidden]`` or ``[R, M, hidden]`` of the group's dtype.

        Without a recipe these are the received tokens themselves. After QUANT_FWD or DS_FP8 they take the place of received tokens and scales, so
        write them when those have been used, as the second matrix product of an expert does. Valid from this handle's dispatch until its combine.
        """
        self._check_open("give out rows")
        if self._slot < 0 or self.group.slot_owner[self._slot] != self.id:
            raise EpError("expert_rows needs a dispatch of this handle before it, and no combine since")
        return self._rows(self._slot)

    @on_stream
    def complete(self, config: Any = None) -> Any:
        """Enqueue the complete half of this handle's staged operation (``send_only``); without one, nothing happens. Stream-ordered.

        A dispatch's rows and counts, or a combine's tokens, are valid after it; every tensor of the call is kept until then. Collective in that
        every rank must come here before a staging slot is used again. With several operations in flight, handles may be completed in any order.

        Returns:
            What the staged call returned (the same object), or None.

        Raises:
            EpError: what a device reported about an earlier operation; the complete half is enqueued all the same.

        Example:
            >>> import torch
            >>> import ncclep_py as ep
            >>> def program(comm):
            ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1, num_staging_slots=2)
            ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, torch.tensor([[0]])) as handle:
            ...         received = handle.dispatch(torch.ones(1, 8, dtype=torch.bfloat16), config=ep.DispatchConfig(send_only=True))
            ...         handle.complete()   # until here there is time for other work
            ...         combined = handle.combine(received.tokens, topk_weights=torch.ones(1, 1), config=ep.CombineConfig(send_only=True))
            ...         return handle.complete() is combined, combined[0, 0].item()
            >>> with ep.LocalWorld(2, "sim") as world:
            ...     world.run(program)
            [(True, 1.0), (True, 1.0)]
        """
        self._check_open("complete")
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        if flight.name in ("ll_combine_complete", REFUSED):
            self.group.staging_owner[flight.slot] = 0
        if flight.name == REFUSED:
            return None
        if flight.name in DONE.values():
            self.group.raise_reported()
            return flight.result
        self._land(flight.name, flight.slot, flight.own, flight.tensors, flight.sent, flight.place)
        self._copy_all(flight.copies)
        self.group.raise_reported()
        return flight.result

    def _done(self, what: str, slot: int, config: Any, result: Any) -> None:
        """With ``enable_mask`` an operation that was to be sent only is over already: `complete` gives its result."""
        if config is not None and config.send_only:
            self._flight = Flight(DONE[what], slot, (), (), result)

    def _land(self, name: str, slot: int, own: tuple[int, ...], tensors: tuple[torch.Tensor, ...], sent: Sent | None = None,
              place: int = -1) -> None:
        """Submit a complete half."""
        group = self.group
        blocks = group.num_blocks if name == "ll_combine_complete" or group.over_network else 1
        group.keep(tensors)
        kernel = self._kernel(name, sent.wire if sent is not None and group.over_network else None)
        group.comm.submit(kernel, self._complete_values(name, slot, own, sent, place), blocks, name, tensors)
        if self.group.comm.backend == "nccl" and not group.comm.capturing():
            import torch

            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream())   # it may be freed now, by a stream that knows nothing of this one

    def _complete_values(self, name: str, slot: int, own: tuple[int, ...], sent: Sent | None, place: int) -> tuple[int, ...]:
        """What a complete half's kernel gets."""
        fixed = self._fixed(name, slot, slot, False, sent, place)
        return (*fixed[:4], *own, *fixed[4:], self.group.config.wait_ns)

    def close(self) -> None:
        """Give the slot back; local and idempotent. GPU work on it must be done or stream-ordered before what comes next.

        Complete a staged operation before: a combine that is never completed keeps its staging slot until the group is closed.
        """
        if not self._closed:
            self._closed = True
            if self._slot >= 0 and self.group.slot_owner[self._slot] in (self.id, -self.id):
                self.group.slot_owner[self._slot] = 0
            self._topk_idx = None

    destroy = close

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ------------------------------------------------------------------------------------------------------
    def _pushed(self, slot: int, rows: torch.Tensor) -> torch.Tensor:
        """Where a staged combine takes rows from: inside a team, from wherever they are."""
        return rows

    def _copy_all(self, copies: Sequence[tuple[Any, Any]]) -> None:
        """Copy between slots and plain tensors ``[planes, rows, width]``: of rows of whole vectors those that were received, else everything."""
        import torch

        for to, rows in copies:
            width = rows.shape[2] * rows.element_size()
            if width % ALIGNMENT == 0 and to.data_ptr() % ALIGNMENT == 0:
                values = (rows.data_ptr(), to.data_ptr(), self._counters.data_ptr(), rows.shape[0], rows.shape[1], width)
                self.group.comm.run_local(self._kernel("ll_copy"), values, self.group.num_blocks, "ll_copy", (to, rows, self._counters))
            else:
                to.detach().view(torch.uint8).copy_(rows.detach().view(torch.uint8))
        if copies:
            self.group.keep(copies, self._counters)

    def _take_slot(self) -> int:
        """A slot for a new dispatch, by the same rule on every rank: this handle's own if it still has one, else the first free one."""
        owner = self.group.slot_owner
        if self._slot >= 0 and owner[self._slot] in (self.id, -self.id):
            slot = self._slot
        else:
            slot = next((i for i, held in enumerate(owner) if held <= 0), -1)
        if slot < 0:
            raise refused(EpError(f"all {len(owner)} slots hold dispatches that other handles have not combined yet; combine one, close its handle, "
                                  "or set GroupConfig.num_slots higher"), Refusal.ORDER)
        self.group.slot_owner[slot], self.group.slot_combined[slot], self._slot = self.id, False, slot
        return slot

    def _kernel(self, name: str, wire: Wire | None = None) -> Kernel:
        return self.group.kernel(name, self.num_topk, self._idx_bytes if name in (self._dispatch_name, self._send_name) else 8, self.layout, wire)

    def _launch(self, name: str, slot: int, status: int, own: tuple[int, ...], tensors: tuple[torch.Tensor, ...], global_ids: bool = False,
                sent: Sent | None = None, place: int = -1) -> None:
        """Submit one operation; `own` are the kernel's values between the record and the slot."""
        group = self.group
        fixed = self._fixed(name, slot, self._stage, global_ids, sent, place)
        if name in self._stamping:   # what a dispatch leaves in its slot's header, and a combine looks for
            generation = self._held if "combine" in name else self._generation
            fixed = (*fixed[:-2], self.id << 32 | generation, fixed[-1])
        values = (*fixed[:4], *own, *fixed[4:], status, group.config.wait_ns)
        self._submit(name, self._kernel(name, None if sent is None else sent.wire), values, status, tensors)

    def _submit(self, name: str, kernel: Kernel, values: tuple[int, ...], status: int, tensors: tuple[torch.Tensor, ...]) -> None:
        """Submit it; raises if a rank of this process refuses it."""
        group = self.group
        group.keep(tensors)
        refused_here = group.comm.submit(kernel, values, group.num_blocks, name, tensors, refusing=status != Status.GO)
        if name == "ll_combine_send" and (refused_here or status != Status.GO):   # over on this rank: give the staging slot back to the peers
            self._land(SENDS[name], self._stage, (0, 0, 0), ())
            if refused_here:
                group.staging_owner[self._stage] = 0
            else:   # ranks in other processes hold theirs until they complete; so do I, so that all choose the same slots
                self._flight = Flight(REFUSED, self._stage, (), (), None)
        if refused_here:
            group.check()

    def _fixed(self, name: str, slot: int, stage: int, global_ids: bool = False, sent: Sent | None = None, place: int = -1) -> tuple[int, ...]:
        key = (name, slot, stage if name in ("ll_combine_send", "ll_combine_complete") else int(global_ids), sent, place)
        fixed = self._constants.get(key)
        if fixed is None:
            fixed = self._constants[key] = self._fixed_values(name, slot, stage, global_ids, sent, place)
        return fixed

    def _fixed_values(self, name: str, slot: int, stage: int, global_ids: bool, sent: Sent | None, place: int) -> tuple[int, ...]:
        """Kernel values that never change for a slot: first those before, then those after an operation's own."""
        group = self.group
        local, record = group.addresses()
        first = (group.window.handle, group.rank, local, record)
        if name not in (self._dispatch_name, self._send_name, "ll_combine", "ll_nvfp4_combine"):
            return first + fixed_values(self, name, slot, stage, sent, place)
        plan, own, staged = group.map, group.local_map, name == self._send_name
        kind = OpKind.COMBINE if name in ("ll_combine", "ll_nvfp4_combine") else OpKind.STAGED_DISPATCH if staged else OpKind.DISPATCH
        more: tuple[int, ...] = ()
        if kind is not OpKind.COMBINE:
            words = (plan.arrival(slot) if staged else plan.arrived) if self._rank_major else plan.flight(slot) if staged else 0
            more = (plan.origin(slot), local + own.keep(slot), local + own.flight(slot) if staged else 0, words)
        where = (group.window.handle, plan.slot(slot)) if place < 0 else (group.user_windows[place].handle, 0)
        if self._rank_major and kind is not OpKind.COMBINE:
            where = (*where, plan.slot(slot))
        named = slot if place < 0 else group.config.num_slots + place
        return (*first, *where, local + own.table(slot), local + own.header(slot), *more, self.id,
                group.signature(kind, self.layout, named, self.num_topk, global_ids, sent, int(name == "ll_nvfp4_combine")))

    def refuse(self, name: str, slot: int, why: int) -> None:
        """Internal: take part in an operation this rank refuses, so that all ranks refuse it and epochs stay equal."""
        status = Status.REFUSED << 24 | why
        none = 2 if name == "ll_combine_send" else 3 if name == "ll_combine" else 7 if self._rank_major else 5
        self._launch(name, slot, status, (0,) * none, ())


class _Refusing:
    """Turns an exception into a refusal all ranks see, then lets it rise."""

    def __init__(self, handle: Handle, name: str, slot: int) -> None:
        self.handle, self.name, self.slot = handle, name, slot

    def __enter__(self) -> _Refusing:
        return self

    def __exit__(self, exc_type: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, Exception) and not getattr(error, "everywhere", False) and not self.handle.group.comm.capturing():
            try:
                if self.name:
                    self.handle.refuse(self.name, self.slot, refusal_of(error))
                else:
                    self.handle.group.refuse(refusal_of(error))
            except EpRefusedError:   # another rank refuses the same call; my own error says more
                pass
        elif self.name == "ll_combine_send":   # no operation: nothing flies
            self.handle.group.staging_owner[self.handle._stage] = 0
