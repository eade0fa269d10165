"""`HTHandle`: routing and operations of a HIGH_THROUGHPUT group: update, dispatch and combine, forward and backward.

Unlike in LOW_LATENCY, `HTHandle.update` is collective and works on the device: it gives every token its final rows, and counts. Training is
``update, dispatch, combine`` and then, over the same routing, ``dispatch(pass_direction=BWD)`` of the gradient of combine's output and
``combine(pass_direction=BWD)`` of the experts' gradients; each direction has a slot of its own if the group has enough (``num_slots``).

Received rows live in the window: `DispatchOutputs` are views of it, valid until the combine of the same direction is called with other rows, or a
later dispatch takes the slot. After `combine` returns, peers may still be reading them. Plain tensors cost one copy of the received rows; how many
these are stays on the device, so nothing here waits for the device, and all of it can be captured if the budget is fixed.

Errors are those of ``handle``. An update that does not fit a budget is an `EpOverflowError` on every rank (unless DROP), at a later call or at
``Group.check()``; what fits has moved by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.arguments import Seen, check_tensor, refusal_of, refused
from ncclep_py.config import (
    CombineConfig,
    DispatchConfig,
    ExpertIdKind,
    HandleConfig,
    Layout,
    PassDir,
    _member,
)
from ncclep_py.errors import EpError, EpRefusedError, Status
from ncclep_py.handle_checks import _check_kinds, _known_topk
from ncclep_py.ht_handle_checks import HTHandleChecks, _known_layout
from ncclep_py.ht_memory_map import AUTO_ALIGNMENT, HTMaps
from ncclep_py.inputs_outputs import CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, LayoutInfo
from ncclep_py.kernels.shape import Wire
from ncclep_py.recipes import Sent
from ncclep_py.refusal import Refusal
from ncclep_py.signature import OpKind, Signature
from ncclep_py.streams import on_stream

if TYPE_CHECKING:
    import torch

    from ncclep_py.communicator import Kernel
    from ncclep_py.ht_group import HTGroup

__all__ = ["HTHandle"]

OWN_VALUES = {"ht_prepare": 7, "ht_dispatch": 8, "ht_combine": 4}
"""Values of a kernel that differ from call to call: between `maps` and `handle`, or `slot`."""

PLAIN_DISPATCH, PLAIN_COMBINE = DispatchConfig(), CombineConfig()


class HTHandle(HTHandleChecks):
    """Made by `Group.create_handle` of a HIGH_THROUGHPUT group.

    Attributes:
        group: the group.
        layout: order of received rows, FLAT or EXPERT_MAJOR.
        num_topk: K.
        layout_info: counts of the newest update, as tensors that the device fills; each update overwrites them.
        stamp: internal: the newest update's `Stamp`.

    Example:
        >>> import torch
        >>> import ncclep_py as ep
        >>> def program(comm):
        ...     config = ep.GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=2, algorithm=ep.Algorithm.HIGH_THROUGHPUT)
        ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.FLAT, torch.tensor([[3, 2]])) as handle:
        ...         received = handle.dispatch(torch.ones(1, 8, dtype=torch.bfloat16), topk_weights=torch.tensor([[0.75, 0.25]]))
        ...         count = int(handle.layout_info.recv_total_counter)   # one row per (token, rank), though both its experts are there
        ...         out = handle.combine(received.tokens)
        ...         return received.topk_idx[:count].tolist(), received.topk_weights[:count].tolist(), out[0, 0].item()
        >>> with ep.LocalWorld(2, "sim") as world:
        ...     world.run(program)
        [([], [], 1.0), ([[0, 1], [0, 1]], [[0.25, 0.75], [0.25, 0.75]], 1.0)]
    """

    def __init__(self, group: HTGroup, handle_id: int, layout: Layout, topk_idx: torch.Tensor | None, num_topk: int | None, idx_dtype: Any,
                 config: HandleConfig, layout_info: LayoutInfo | None) -> None:
        """Internal: use `Group.create_handle`."""
        import torch

        from ncclep_py.stamp import Stamp

        self.group, self.id, self.layout, self.config = group, handle_id, _known_layout(layout), config
        if topk_idx is None and num_topk is None:
            raise ValueError("create_handle needs topk_idx or num_topk, got neither")
        if topk_idx is not None:
            check_tensor("topk_idx", topk_idx, (None, num_topk), (torch.int32, torch.int64), group.comm.device, aligned=False)
        self.num_topk = _known_topk(int(topk_idx.shape[1]) if topk_idx is not None else num_topk, group.config.num_topk)
        dtype = topk_idx.dtype if topk_idx is not None else idx_dtype or torch.int64
        if dtype not in (torch.int32, torch.int64):
            raise TypeError(f"idx_dtype must be torch.int32 or torch.int64, got {dtype}")
        self._flat = self.layout is Layout.FLAT
        self._alignment = 1 if self._flat else max(config.dispatch_output_per_expert_alignment, 1)
        if self._alignment > AUTO_ALIGNMENT and not group.config.max_recv_tokens_per_rank:
            raise ValueError(f"dispatch_output_per_expert_alignment must be at most {AUTO_ALIGNMENT} while max_recv_tokens_per_rank is AUTO, "
                             f"got {self._alignment}")
        self._maps_plan = HTMaps.build(group.config, group.num_ranks, self.num_topk, self.layout, group.num_blocks)
        self._maps = group.comm.zeros(*group.maps_memory(self._maps_plan, self.num_topk))
        self._maps_at = self._maps.data_ptr()
        self._closed = False
        self._slots = [-1, -1]           # of the newest forward and backward dispatch
        self._routings = [-1, -1]        # number of the update under which each was dispatched
        self._routing, self._generation, self._num_tokens, self._idx_bytes = 0, 0, -1, dtype.itemsize
        self._held = [0, 0]   # generation of the dispatch that a combine of each direction brings back
        self._new_stamp = Stamp
        self.stamp = Stamp(0)
        self._topk_idx: torch.Tensor | None = None
        self._seen = Seen()
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}
        self._values: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...], int]] = {}
        self._dtype = group.config.token_type.torch_dtype()
        self._loaded: dict[tuple[str, int, int], Kernel] = {}
        self._own = self.layout_info = self._own_counts()
        for name in ("ht_count", "ht_prepare", "ht_dispatch", "ht_combine", "ht_copy"):
            self._kernel(name)
        if topk_idx is not None:
            self.update(topk_idx, layout_info)

    @property
    def routing(self) -> int:
        """Number of the newest update."""
        return self._routing

    # ---- update ------------------------------------------------------------------------------------------------------
    @on_stream
    def update(self, topk_idx: torch.Tensor, layout_info: LayoutInfo | None = None) -> None:
        """Bind a new routing: count, exchange counts, give every token its rows. Collective, stream-ordered, no host synchronisation, capturable.

        Args:
            topk_idx: ``[T, K]`` int32 or int64, T <= max_dispatch_tokens_per_rank and free to differ between ranks and updates; ids outside [0, E)
                count as "no expert", a duplicate in a token counts once (one row, with the sum of its weights). Must stay unchanged until the update
                has run.
            layout_info: where to put counts: ``expert_counters``, ``expert_offsets``, ``expert_counts_unpadded`` (1-D, at least L entries) and
                ``recv_total_counter`` (1-D, at least one entry), all of one integer dtype, int32 or int64. `HTHandle.layout_info` holds what is
                left out.

        Raises:
            TypeError, ValueError: an argument is wrong (on this rank; every other rank raises `EpRefusedError`).
            EpError: what a device reported about an earlier operation.

        Rows beyond ``max_recv_tokens_per_rank`` are left out; unless ``overflow_policy`` is DROP, every rank raises `EpOverflowError`, later.
        """
        self._check_group("update")
        with _Refusing(self, "", -1, False):
            self._check_open("update")
        group = self.group
        self._topk_idx, self._num_tokens = None, -1
        self._routing += 1
        with _Refusing(self, "ht_prepare", 0, False):
            group.raise_reported()
            _check_kinds(("layout_info", layout_info, LayoutInfo))
            self._check_routing(topk_idx)
            given = (None,) * 4 if layout_info is None else self._check_counts(layout_info)
        maps, ids, num_tokens = self._maps_at, topk_idx.data_ptr(), int(topk_idx.shape[0])
        self._idx_bytes = topk_idx.element_size()
        group.comm.run_local(self._kernel("ht_count"), (maps, ids, num_tokens), group.num_blocks, "ht_count", (topk_idx,))
        tensors = [t for t in given if t is not None]
        pointers, int_bytes = [0 if t is None else t.data_ptr() for t in given], tensors[0].element_size() if tensors else 4
        self._launch("ht_prepare", 0, False, Status.GO, (ids, num_tokens, *pointers, int_bytes), (topk_idx, *tensors))
        self._topk_idx, self._num_tokens = topk_idx, num_tokens
        self.layout_info = own = self._own
        if tensors:
            counters, offsets, unpadded, total = (mine if t is None else t for t, mine in zip(given, (   # noqa: B905  (four each)
                own.expert_counters, own.expert_offsets, own.expert_counts_unpadded, own.recv_total_counter)))
            self.layout_info = LayoutInfo(counters, None, ExpertIdKind.AUTO, offsets, total, unpadded)
        self.stamp = self._new_stamp(self._routing)   # last: a checkpoint may stop its recomputation here

    # ---- dispatch ----------------------------------------------------------------------------------------------------
    @on_stream
    def dispatch(self, inputs: DispatchInputs | torch.Tensor, outputs: DispatchOutputs | None = None, layout_info: LayoutInfo | None = None,
                 config: DispatchConfig | None = None, *, topk_idx: torch.Tensor | None = None,
                 topk_weights: torch.Tensor | None = None) -> DispatchOutputs:
        """Send every token to its rows. Collective, stream-ordered on the current stream, no host synchronisation.

        Args:
            inputs: tokens ``[T, hidden]`` (backward: the gradient of combine's output), or `DispatchInputs`.
            outputs: where to put rows, ids and weights; without it they are in the window (no copy). A fixed budget needs
                ``max_recv_tokens_per_rank`` rows, AUTO as many as ``recv_total_counter`` says; FLAT ids and weights have as many rows as
                tokens. Rows that were not received are not touched; their ids and weights are -1 and 0 (FLAT).
            layout_info: only its ``recv_topk_idx_kind`` is used (FLAT), the same on all ranks.
            config: `DispatchConfig`; ``send_only`` is ignored.
            topk_idx: shorthand for `update` before the call, duplicates as there.
            topk_weights: forward: the router weights ``[T, K]`` float32, if `inputs` does not hold them.

        Returns:
            `DispatchOutputs`, also if given. Its ``layout_info`` holds the update's counts.
        """
        self._check_group("dispatch")
        backward = isinstance(config, DispatchConfig) and config.pass_direction is PassDir.BWD
        with _Refusing(self, "", -1, backward):
            self._check_open("dispatch")
        if topk_idx is not None:
            self.update(topk_idx)
        group = self.group
        plan = group.map
        with _Refusing(self, "", -1, backward):
            slot = self._take_slot(backward)
        self._generation += 1
        given = inputs if isinstance(inputs, DispatchInputs) else DispatchInputs(inputs)
        made = outputs if isinstance(outputs, DispatchOutputs) else DispatchOutputs()
        weights: Any = topk_weights if topk_weights is not None else given.topk_weights
        with _Refusing(self, "ht_dispatch", slot, backward):
            group.raise_reported()
            _check_kinds(("outputs", outputs, DispatchOutputs), ("layout_info", layout_info, LayoutInfo), ("config", config, DispatchConfig))
            kind = ExpertIdKind.AUTO
            if layout_info is not None:
                kind = _member("layout_info.recv_topk_idx_kind", ExpertIdKind, layout_info.recv_topk_idx_kind)
            sent = self._check_dispatch(given, weights, made, config or PLAIN_DISPATCH, backward)
            place = self._place("outputs.tokens", made.tokens, slot, sent is None)
            kernel = self._kernel("ht_dispatch", None if sent is None else sent.wire)
        global_ids = int(self._flat and not backward and kind is ExpertIdKind.GLOBAL)
        visible = plan.recv_rows if made.tokens is None else min(int(made.tokens.shape[0]), plan.recv_rows)
        exposed = visible if group.config.max_recv_tokens_per_rank or made.topk_idx is not None else 0
        scales, tensors = given.scales, [given.tokens] + [t for t in (weights, given.scales) if t is not None]
        own = (given.tokens.data_ptr(), 0 if backward else weights.data_ptr(), 0 if scales is None else scales.data_ptr(), self._num_tokens, visible,
               exposed, int(not backward), global_ids)
        self._launch("ht_dispatch", slot, backward, Status.GO, own, tensors, kernel, global_ids, sent, place)
        # only now: a dispatch known to be refused leaves nothing to combine
        self._routings[backward], self._held[backward] = self._routing, self._generation
        self._deliver(made, slot, sent, backward, place)
        made.layout_info, made.generation = self.layout_info, self._generation
        return made

    def _deliver(self, made: DispatchOutputs, slot: int, sent: Sent | None, backward: bool, place: int) -> None:
        """Set or fill what the caller sees of a dispatch."""
        plan = self.group.map
        fields: list[tuple[str, torch.Tensor]] = [("tokens", self.rows(slot) if sent is None else self._view(slot, 0, sent.dtype, sent.width))]
        if sent is not None:
            fields.append(("scales", self._view(slot, plan.recv_rows * sent.wire.sent_bytes, sent.scale_dtype, sent.scale_width)))
        if not backward:
            fields.append(("topk_weights", self.slot_weights(slot)))
        for name, received in fields:
            held = getattr(made, name)
            if held is None:
                setattr(made, name, received)
            elif name == "tokens" and place >= 0:
                pass   # peers wrote there
            elif held.data_ptr() != received.data_ptr() and held.numel():
                if name == "topk_weights" and self._flat:   # with the zeros after them
                    held.detach()[: plan.recv_rows].copy_(received[: held.shape[0]])
                else:
                    self._copy_rows(received, held)
        if self._flat and not backward:
            ids = self.slot_idx(slot)
            if made.topk_idx is None:
                made.topk_idx = ids
            elif made.topk_idx.data_ptr() != ids.data_ptr():
                made.topk_idx.detach()[: plan.recv_rows].copy_(ids[: made.topk_idx.shape[0]])

    # ---- combine -----------------------------------------------------------------------------------------------------
    @on_stream
    def combine(self, inputs: CombineInputs | torch.Tensor, outputs: CombineOutputs | None = None, config: CombineConfig | None = None, *,
                topk_weights: torch.Tensor | None = None) -> torch.Tensor:
        """Bring rows back and add them up: ``out[t]`` is the fp32 sum of its rows in ascending (rank, local expert) order, rounded once.

        No weights are applied: the experts' rows have theirs in them. Collective, stream-ordered on the current stream.

        Args:
            inputs: rows placed as dispatch placed them, or `CombineInputs`: dispatch's own tensor (or its first rows), or any other ``[N, hidden]``
                with at least the received rows (one copy of these). Backward: with ``topk_weights``, the gradients of the received weights, placed
                and shaped as those.
            outputs: ``tokens`` ``[T, hidden]`` and, backward, ``topk_weights`` ``[T, K]`` float32, the gradients of the router weights; allocated if
                left out. Forward ignores ``topk_weights``.
            config: `CombineConfig`; ``send_only`` is ignored.
            topk_weights: backward: the gradients, if `inputs` does not hold them.

        Returns:
            ``outputs.tokens``.
        """
        self._check_group("combine")
        group, plan = self.group, self.group.map
        backward = isinstance(config, CombineConfig) and config.pass_direction is PassDir.BWD
        slot = self._slots[backward]
        with _Refusing(self, "", -1, backward):
            self._check_open("combine")
            if slot < 0 or group.slot_owner[slot] not in (self.id, -self.id):
                raise refused(EpError(f"combine needs a {'backward' if backward else 'forward'} dispatch of this handle before it; its slot was "
                                      "never filled or went to another dispatch (GroupConfig.num_slots: how many may wait for their combine; under a "
                                      "checkpoint, dispatch and combine belong in the same block)"), Refusal.ORDER)
        again = group.slot_combined[slot]
        if again:   # peers may still be pulling from this slot: meet first, on all ranks alike
            group.rendezvous(OpKind.COMBINE)
        group.slot_combined[slot], group.slot_owner[slot] = True, -self.id
        given = inputs if isinstance(inputs, CombineInputs) else CombineInputs(inputs)
        made = outputs if isinstance(outputs, CombineOutputs) else CombineOutputs()
        grads: Any = topk_weights if topk_weights is not None else given.topk_weights
        with _Refusing(self, "ht_combine", slot, backward):
            group.raise_reported()
            _check_kinds(("outputs", outputs, CombineOutputs), ("config", config, CombineConfig))
            self._check_combine(given, grads, made, outputs, config or PLAIN_COMBINE, slot, backward)
            place = self._place("inputs.tokens", given.tokens, slot, True)
        visible = plan.recv_rows
        for rows, to in ((given.tokens, self.rows(slot)), (grads, self.slot_weights(slot))) if backward else ((given.tokens, self.rows(slot)),):
            if rows.data_ptr() != to.data_ptr() and rows.numel() and (place < 0 or rows is not given.tokens):
                self._copy_rows(rows, to)
            visible = min(visible, int(rows.shape[0]))
        if made.tokens is None:
            made.tokens = self._new((self._num_tokens, group.config.hidden), self._dtype)
        written = [made.tokens]
        if backward:
            import torch

            if made.topk_weights is None:
                made.topk_weights = self._new((self._num_tokens, self.num_topk), torch.float32)
            written.append(made.topk_weights)
        if group.comm.backend == "sim" and not again and (place >= 0 or given.tokens.data_ptr() == self.rows(slot).data_ptr()):
            group.comm.touched(self._received(slot, place, visible))
        own = (made.tokens.data_ptr(), written[1].data_ptr() if backward else 0, self._num_tokens, visible)
        self._launch("ht_combine", slot, backward, Status.GO, own, written, place=place)
        return made.tokens

    @on_stream
    def complete(self, config: Any = None) -> None:
        """Nothing to do: high-throughput operations always complete (``send_only`` is ignored)."""
        self._check_open("complete")

    def close(self) -> None:
        """Give the slots back; local and idempotent. GPU work on them must be done or stream-ordered before what comes next."""
        if not self._closed:
            self._closed = True
            for slot in self._slots:
                if slot >= 0 and self.group.slot_owner[slot] in (self.id, -self.id):
                    self.group.slot_owner[slot] = 0
            self._topk_idx = None
            self.group.comm.give_back(self._maps)

    destroy = close

    def __enter__(self) -> HTHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- slots -------------------------------------------------------------------------------------------------------

    def _take_slot(self, backward: bool) -> int:
        """A slot for a new dispatch, by the same rule on every rank: the direction's own if it still has one, else a free one, in the end that of the
        other direction, whose combine is refused from then on. Before that one goes the oldest slot whose rows were copied out."""
        group, owner, mine = self.group, self.group.slot_owner, (self.id, -self.id)
        slot = self._slots[backward]
        if slot < 0 or owner[slot] not in mine:
            free = [i for i, held in enumerate(owner) if held <= 0 or held == self.id]
            if not free:
                raise refused(EpError(f"all {len(owner)} slots hold dispatches that were not combined yet; combine one, close its handle, or set "
                                      "GroupConfig.num_slots higher"), Refusal.ORDER)
            waiting = [bool(held) and not combined for held, combined in zip(owner, group.slot_combined, strict=True)]
            slot = min(free, key=lambda i: (waiting[i], owner[i] in mine, group.slot_copied[i] if waiting[i] else 0, i))
            if slot == self._slots[not backward]:
                self._slots[not backward] = -1
        group.slot_owner[slot], group.slot_combined[slot], self._slots[backward] = self.id, False, slot
        self._routings[backward] = -1
        return slot

    def copied_out(self, backward: bool) -> None:
        """Internal: the last dispatch's rows were copied out, and perhaps no combine follows: a dispatch that finds no slot free may take theirs."""
        group, slot = self.group, self._slots[backward]
        group.slot_owner[slot], group.slot_copied[slot] = -self.id, max(group.slot_copied) + 1

    def _copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the received rows from one tensor to the other, as many as both have; the count stays on the device."""
        group, rows = self.group, min(int(source.shape[0]), int(target.shape[0]))
        row_bytes = source.element_size() * (int(source.shape[1]) if source.ndim > 1 else 1)
        values = (self._maps_at, source.data_ptr(), target.data_ptr(), rows, row_bytes)
        group.keep(source, target)
        group.comm.run_local(self._kernel("ht_copy"), values, group.num_blocks, "ht_copy", (source, target))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _kernel(self, name: str, wire: Wire | None = None) -> Kernel:
        idx_bytes = self._idx_bytes if name in ("ht_count", "ht_prepare") else 8
        if wire is not None:
            return self.group.ht_kernel(name, self.num_topk, idx_bytes, self.layout, self._alignment, wire)
        changes = self.group.kernel_changes
        found = self._loaded.get((name, idx_bytes, changes))
        if found is None:
            found = self._loaded[name, idx_bytes, changes] = self.group.ht_kernel(name, self.num_topk, idx_bytes, self.layout, self._alignment)
        return found

    def _signature(self, name: str, slot: int, backward: bool, global_ids: int, sent: Sent | None) -> int:
        config, kind = self.group.config, {"ht_prepare": OpKind.UPDATE, "ht_dispatch": OpKind.DISPATCH, "ht_combine": OpKind.COMBINE}[name]
        token, recipe, row, beside = (config.token_type, 0, config.row_bytes, 0) if sent is None else (
            sent.token_code, sent.code, sent.wire.sent_bytes, sent.wire.scale_bytes)
        return Signature(kind, self.layout, token, recipe, slot, self.num_topk, row // 16, global_ids, beside // 16, int(backward),
                         self._alignment.bit_length() - 1).pack()

    def _launch(self, name: str, slot: int, backward: bool, status: int, own: tuple[int, ...], tensors: Sequence[torch.Tensor],
                kernel: Kernel | None = None, global_ids: int = 0, sent: Sent | None = None, place: int = -1) -> None:
        """Submit one operation; `own` are the kernel's values after the maps."""
        group = self.group
        key = (name, slot, backward, global_ids, sent, place)
        fixed = self._values.get(key)
        if fixed is None:
            local, record = group.addresses()
            where: tuple[int, ...] = ()
            if name != "ht_prepare":
                rows = (group.window.handle, group.map.slot(slot)) if place < 0 else (group.user_windows[place].handle, 0)
                where = (*rows, group.map.slot(slot), local + group.local_map.header(slot))
            named = slot if place < 0 else group.config.num_slots + place
            fixed = self._values[key] = ((group.window.handle, group.rank, local, record, self._maps_at),
                                         where, self._signature(name, named, backward, global_ids, sent))
        # what a dispatch leaves in its slot's header, and a combine looks for; of maps only the handle counts
        generation = {"ht_prepare": self._routing, "ht_dispatch": self._generation, "ht_combine": self._held[backward]}[name]
        first = group.first_values(name, backward)
        values = (*first, *fixed[0], *own, *fixed[1], self.id << 32 | generation & 0xFFFFFFFF, fixed[2], status, group.config.wait_ns)
        group.keep(tensors, self._maps)
        if group.comm.submit(kernel or self._kernel(name), values, group.num_blocks, name, tensors, refusing=status != Status.GO):
            group.check()

    def refuse(self, name: str, slot: int, backward: bool, why: int) -> None:
        """Internal: take part in an operation this rank refuses, so that all ranks refuse it and epochs stay equal."""
        self._launch(name, slot, backward, Status.REFUSED << 24 | why, (0,) * OWN_VALUES[name], ())


class _Refusing:
    """Turns an exception into a refusal all ranks see, then lets it rise."""

    def __init__(self, handle: HTHandle, name: str, slot: int, backward: bool) -> None:
        self.handle, self.name, self.slot, self.backward = handle, name, slot, backward

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not getattr(error, "everywhere", False) and not self.handle.group.comm.capturing():
            try:
                if self.name:
                    self.handle.refuse(self.name, self.slot, self.backward, refusal_of(error))
                else:
                    self.handle.group.refuse(refusal_of(error))
            except EpRefusedError:   # another rank refuses the same call; my own error says more
                pass
