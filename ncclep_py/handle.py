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
In groups with ``enable_mask`` the send half does all of it: what members agree on ends with the operation (``member_map``).

CUDA graphs: every operation may be captured; create the group and the handle before, and use recipes and id types once. All ranks capture the same
operations, each rank its own graph, and replay in the same order (ranks in one process through ``comm.together(graph.replay)``). The number of
tokens is baked in, so that fewer tokens are said by ids of -1; tokens, ids and weights are read at every replay. Tensors of captured calls are kept
until the group is closed, tensors made inside the capture by the graph; the window by the group, which must stay open.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.arguments import ALIGNMENT, Seen, check_ids, check_tensor, check_tokens, refusal_of, refused, stale
from ncclep_py.config import (
    CombineConfig,
    CombineQuant,
    DispatchConfig,
    DispatchQuant,
    ExpertIdKind,
    HandleConfig,
    Layout,
    PassDir,
    ZeroCopyMode,
    _member,
)
from ncclep_py.errors import EpClosedError, EpError, EpRefusedError, Status
from ncclep_py.flight import DONE, REFUSED, SENDS, Flight, fixed_values, take_stage
from ncclep_py.recipes import Sent, check_nvfp4, check_recipe
from ncclep_py.refusal import Refusal
from ncclep_py.signature import OpKind

if TYPE_CHECKING:
    import torch

    from ncclep_py.communicator import Kernel
    from ncclep_py.group import Group
    from ncclep_py.kernels.shape import Wire

__all__ = ["CombineInputs", "CombineOutputs", "DispatchInputs", "DispatchOutputs", "Handle", "LayoutInfo"]


PLAIN_DISPATCH, PLAIN_COMBINE = DispatchConfig(), CombineConfig()   # made once: making one costs microseconds


@dataclasses.dataclass
class LayoutInfo:
    """Counts of received rows; fields a caller leaves out are allocated.

    Attributes:
        expert_counters: LL EXPERT_MAJOR, ``[L]`` int32: rows received by each local expert. HT, filled by `HTHandle.update`: tokens of each local
            expert (FLAT), or rows of its zone with pads (EXPERT_MAJOR), within the budget.
        src_rank_counters: LL RANK_MAJOR, ``[R]`` int32: rows received from each rank.
        recv_topk_idx_kind: LL RANK_MAJOR and HT FLAT, numbering of received ids, the same on all ranks: from this rank's first expert (LOCAL) or the
            group's.
        expert_offsets: HT EXPERT_MAJOR, ``[L]``: first row of each local expert's zone, within the budget.
        recv_total_counter: HT, ``[1]``: received rows before any drop; EXPERT_MAJOR counts pads.
        expert_counts_unpadded: HT, ``[L]``: rows of each local expert within the budget, without pads.
    """

    expert_counters: torch.Tensor | None = None
    src_rank_counters: torch.Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO
    expert_offsets: torch.Tensor | None = None
    recv_total_counter: torch.Tensor | None = None
    expert_counts_unpadded: torch.Tensor | None = None


@dataclasses.dataclass
class DispatchInputs:
    """What a rank sends.

    Attributes:
        tokens: ``[T, hidden]``, dtype of the group; QUANT_FWD: ``[T, W]`` of any dtype in `recipes.opaque_types`.
        topk_weights: ``[T, K]`` float32, required by RANK_MAJOR, which carries them.
        scales: QUANT_FWD: ``[T, S]`` of a dtype in `recipes.scale_types`; rows of both are multiples of 16 bytes.
    """

    tokens: torch.Tensor
    topk_weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@dataclasses.dataclass
class DispatchOutputs:
    """What a rank received.

    Attributes:
        tokens: EXPERT_MAJOR ``[L, R * M, hidden]``; rows ``[0, expert_counters[l])`` of plane l are valid, in (source rank, token, k) order,
            others are not touched. HT ``[N, hidden]``: FLAT one row per token in (source rank, token) order, EXPERT_MAJOR a zone per local expert in
            that order, pads zero. RANK_MAJOR ``[R, M, hidden]``; rows ``[0, src_rank_counters[s])`` of plane s are valid, in token order.
        topk_weights: RANK_MAJOR ``[R, M, K]`` float32, all K weights of the token; rows after the valid ones are not touched. HT FLAT ``[N, K]``,
            placed like `topk_idx`, 0 elsewhere; HT EXPERT_MAJOR ``[N]``, pads 0.
        topk_idx: RANK_MAJOR ``[R, M, K]`` int32, the expert at each position k if it lives on this rank, else -1; rows after the valid ones are -1.
            HT FLAT ``[N, K]`` int64: the token's experts on this rank, ascending, compacted to the left, then -1.
        scales: QUANT_FWD, DS_FP8: placed like tokens, ``[.., S]`` of the scales' dtype or ``[.., hidden / 128]`` float32. Recipes share the slot with
            the group's rows: tokens and scales are valid until the handle's combine is *called* with other rows, which go where they are.
        layout_info: the counts.
        generation: number of the dispatch that made this.
    """

    tokens: torch.Tensor = None   # type: ignore[assignment]  # set on everything dispatch returns
    topk_weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    layout_info: LayoutInfo = dataclasses.field(default_factory=LayoutInfo)
    generation: int = 0


@dataclasses.dataclass
class CombineInputs:
    """What a rank's experts computed.

    Attributes:
        tokens: same shape and row order as `DispatchOutputs.tokens`; that tensor itself or one in a window of
            `Group.create_window` (no copy), or any other: the rows there are, counted by the tensor that dispatch left them in, are read and
            written once more, ``2 * rows * hidden * itemsize`` bytes (not in a ``send_only`` combine, which sends them from where they are).
            RANK_MAJOR: each row already summed over this rank's experts of the token, weights included.
        topk_weights: for passes that need them; RANK_MAJOR ignores them.
        scales: NVFP4: the fp32 scale of each row, ``[L, R * M, 1]`` or ``[R, M, 1]``. NVFP4 packs rows in place, so these are gone afterwards.
    """

    tokens: torch.Tensor
    topk_weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@dataclasses.dataclass
class CombineOutputs:
    """What a rank gets back.

    Attributes:
        tokens: ``[T, hidden]``; allocated if left out.
        topk_weights: LL EXPERT_MAJOR: ``[T, K]`` float32 router weights. An *input*; the name is `nccl.ep`'s. RANK_MAJOR ignores it.
    """

    tokens: torch.Tensor = None   # type: ignore[assignment]  # set once combine has it
    topk_weights: torch.Tensor | None = None


class Handle:
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

    def update(self, topk_idx: torch.Tensor) -> None:
        """Bind a new routing. Local, no GPU work; errors in it are raised here and, if it is dispatched nevertheless, on every rank there.

        Args:
            topk_idx: ``[T, K]`` int32 or int64, T <= max_dispatch_tokens_per_rank; ids outside [0, E) count as "no expert". Must stay unchanged
                until the dispatch has run.
        """
        self._check_open("update")
        self._topk_idx = None
        self._check_routing(topk_idx)
        self._topk_idx, self._idx_bytes = topk_idx, topk_idx.element_size()

    def _check_routing(self, topk_idx: Any) -> None:
        import torch

        check_tensor("topk_idx", topk_idx, (None, self.num_topk), (torch.int32, torch.int64), self.group.comm.device, aligned=False)
        check_tokens("topk_idx", topk_idx.shape[0], self.group.config.max_dispatch_tokens_per_rank)

    # ---- dispatch ----------------------------------------------------------------------------------------------------
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
        """
        self._check_group("dispatch")
        with _Refusing(self, "", -1):
            self._check_open("dispatch")
            self._check_landed("dispatch")
            slot = self._take_slot()
        staged = isinstance(config, DispatchConfig) and config.send_only and bool(self.group.staging_owner)
        name = self._send_name if staged else self._dispatch_name
        self._generation += 1
        given = inputs if isinstance(inputs, DispatchInputs) else DispatchInputs(inputs)
        made = outputs if isinstance(outputs, DispatchOutputs) else DispatchOutputs()
        counts = layout_info if isinstance(layout_info, LayoutInfo) else made.layout_info
        weights: Any = topk_weights if topk_weights is not None else given.topk_weights
        with _Refusing(self, name, slot):
            self.group.raise_reported()
            _check_kinds(("outputs", outputs, DispatchOutputs), ("layout_info", layout_info, LayoutInfo), ("config", config, DispatchConfig))
            if topk_idx is not None:
                self.update(topk_idx)
            sent = self._check_dispatch(given, weights, made, counts, config or PLAIN_DISPATCH, slot)
            place = self._place("outputs.tokens", made.tokens, slot, sent is None)
        tokens, idx = given.tokens, self._topk_idx
        assert idx is not None   # checked above
        num_tokens = int(tokens.shape[0])
        beside = () if given.scales is None else (given.scales,)
        scales = beside[0].data_ptr() if beside else 0
        if self._rank_major:
            if counts.src_rank_counters is None:
                counts.src_rank_counters = self._new((self.group.num_ranks,), "int32")
            counters, global_ids = counts.src_rank_counters, counts.recv_topk_idx_kind is ExpertIdKind.GLOBAL
            own: tuple[int, ...] = (tokens.data_ptr(), idx.data_ptr(), weights.data_ptr(), num_tokens, counters.data_ptr(), int(global_ids), scales)
            self._launch(name, slot, Status.GO, own, (tokens, idx, weights, counters, *beside), global_ids, sent, place)
        else:
            if counts.expert_counters is None:
                counts.expert_counters = self._new((self.group.map.num_local_experts,), "int32")
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
            mine = (counts.src_rank_counters.data_ptr(),) if self._rank_major and counts.src_rank_counters is not None else ()
            kept = (tokens, idx, weights, *beside, counts.expert_counters, counts.src_rank_counters)
            self._flight = Flight(SENDS[name], slot, mine, tuple(t for t in kept if t is not None), made, copies, sent, place)
        else:
            self._copy_all(copies)
            self._done("dispatch", slot, config, made)
        return made

    def _check_dispatch(self, given: DispatchInputs, weights: Any, made: DispatchOutputs, counts: LayoutInfo, config: DispatchConfig,
                        slot: int) -> Sent | None:
        group, seen, plain = self.group, self._seen, config.quant_recipe is DispatchQuant.NONE
        self._check_staged(config.send_only)
        _only_plain(config.pass_direction)
        unwanted: tuple[tuple[str, Any], ...] = (("inputs.scales", given.scales), ("outputs.scales", made.scales)) if plain else ()
        if self._rank_major:
            unwanted += (("layout_info.expert_counters", counts.expert_counters),)
        else:
            unwanted += (("inputs.topk_weights", weights), ("outputs.topk_weights", made.topk_weights), ("outputs.topk_idx", made.topk_idx),
                         ("layout_info.src_rank_counters", counts.src_rank_counters))
        for name, value in unwanted:
            if value is not None:
                _unwanted(name, value, self.layout)
        if self._topk_idx is None:
            raise ValueError("topk_idx must be given to create_handle, update or dispatch before a dispatch")
        sent = None if plain else self._check_sent(given, made, config, slot)
        if plain and (not seen.same("tokens", given.tokens) or given.tokens.shape[0] != self._topk_idx.shape[0]):
            check_tensor("tokens", given.tokens, (None, group.config.hidden), (self._dtype,), group.comm.device)
            check_tokens("tokens", given.tokens.shape[0], group.config.max_dispatch_tokens_per_rank)
            check_tensor("tokens", given.tokens, (self._topk_idx.shape[0], group.config.hidden), (self._dtype,), group.comm.device)
            self._check_outside("tokens", given.tokens)
            seen.passed("tokens", given.tokens)
        if plain and made.tokens is not None:
            check_tensor("outputs.tokens", made.tokens, self._row_shape, (self._dtype,), group.comm.device)
            self._check_place("outputs.tokens", made.tokens, slot)
        if counts.expert_counters is not None and not seen.same("expert_counters", counts.expert_counters):
            import torch

            check_tensor("layout_info.expert_counters", counts.expert_counters, (group.map.num_local_experts,), (torch.int32,), group.comm.device,
                         aligned=False)
            seen.passed("expert_counters", counts.expert_counters)
        if self._rank_major:
            self._check_rank_major(weights, made, counts, slot)
        if group.config.checked:
            if group.comm.capturing():
                raise EpError("GroupConfig.checked reads expert ids on the host, which is impossible during graph capture: capture on a group "
                              "without it")
            check_ids("topk_idx", self._topk_idx, group.config.num_experts)
        return sent

    def _check_sent(self, given: DispatchInputs, made: DispatchOutputs, config: DispatchConfig, slot: int) -> Sent:
        """Check what a recipe sends and where it goes, and load its kernel, so that a device without it refuses before any rank waits."""
        idx, device = self._topk_idx, self.group.comm.device
        assert idx is not None   # checked before
        sent = check_recipe(given, int(idx.shape[0]), config, self.group.config, device)
        for name, value, dtype, width, offset in (("outputs.tokens", made.tokens, sent.dtype, sent.width, 0),
                                                  ("outputs.scales", made.scales, sent.scale_dtype, sent.scale_width, self._scales_at(sent))):
            if value is not None:
                check_tensor(name, value, (*self._row_shape[:2], width), (dtype,), device)
                self._check_place(name, value, slot, offset)
        self._kernel(self._dispatch_name, sent.wire)
        return sent

    def _check_rank_major(self, weights: Any, made: DispatchOutputs, counts: LayoutInfo, slot: int) -> None:
        """Check what only a RANK_MAJOR dispatch has."""
        import torch

        group, seen, idx = self.group, self._seen, self._topk_idx
        assert idx is not None   # checked before
        counts.recv_topk_idx_kind = _member("layout_info.recv_topk_idx_kind", ExpertIdKind, counts.recv_topk_idx_kind)
        if weights is None:
            raise ValueError("topk_weights must be given to a RANK_MAJOR dispatch (inputs.topk_weights or topk_weights=)")
        if not seen.same("dispatched_weights", weights) or weights.shape[0] != idx.shape[0]:
            check_tensor("topk_weights", weights, (idx.shape[0], self.num_topk), (torch.float32,), group.comm.device, aligned=False)
            seen.passed("dispatched_weights", weights)
        if counts.src_rank_counters is not None and not seen.same("src_rank_counters", counts.src_rank_counters):
            check_tensor("layout_info.src_rank_counters", counts.src_rank_counters, (group.num_ranks,), (torch.int32,), group.comm.device,
                         aligned=False)
            seen.passed("src_rank_counters", counts.src_rank_counters)
        for name, value, dtype, offset in (("outputs.topk_idx", made.topk_idx, torch.int32, group.map.recv_ids),
                                           ("outputs.topk_weights", made.topk_weights, torch.float32, group.map.recv_weights)):
            if value is not None:
                check_tensor(name, value, (*self._row_shape[:2], self.num_topk), (dtype,), group.comm.device, aligned=False)
                self._check_place(name, value, slot, offset)

    # ---- combine -----------------------------------------------------------------------------------------------------
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
        if not staged and self.group.slot_combined[slot]:   # peers may still be pulling from this slot: meet first, on all ranks alike
            self.group.rendezvous(OpKind.COMBINE)
        given = inputs if isinstance(inputs, CombineInputs) else CombineInputs(inputs)
        made = outputs if isinstance(outputs, CombineOutputs) else CombineOutputs()
        weights: Any = topk_weights if topk_weights is not None else made.topk_weights
        # free for others, but still mine to combine again; also if this call raises, since peers may not know of that yet
        self.group.slot_combined[slot], self.group.slot_owner[slot] = self.group.slot_combined[slot] or not staged, -self.id
        with _Refusing(self, name, slot):
            self.group.raise_reported()
            _check_kinds(("outputs", outputs, CombineOutputs), ("config", config, CombineConfig))
            self._check_combine(given, made, weights, config or PLAIN_COMBINE, slot)
            place = -1 if staged else self._place("inputs.tokens", given.tokens, slot, True)   # a send half pushes rows from wherever they are
        if made.tokens is None:
            made.tokens = self._new((self._num_tokens, self.group.config.hidden), None)
        if staged:
            held = (made.tokens,) if self._rank_major else (weights, made.tokens)
            own: tuple[int, ...] = (0 if self._rank_major else weights.data_ptr(), made.tokens.data_ptr(), self._num_tokens)
            self._launch(name, slot, Status.GO, (given.tokens.data_ptr(), self._num_tokens), (given.tokens,))
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

    def _check_combine(self, given: CombineInputs, made: CombineOutputs, weights: Any, config: CombineConfig, slot: int) -> None:
        group, seen = self.group, self._seen
        self._check_staged(config.send_only)
        _only_plain(config.pass_direction)
        packs = config.quant_recipe is CombineQuant.NVFP4
        if packs:
            if config.send_only:
                raise ValueError("send_only combines rows as they are; leave quant_recipe out, or combine in one piece")
            check_nvfp4(given.scales, self._row_shape[:2], group.config, group.comm)
            self._kernel("ll_nvfp4_combine")   # loaded before any rank waits
        for name, value in (("inputs.topk_weights", None if self._rank_major else given.topk_weights),
                            ("inputs.scales", None if packs else given.scales)):
            if value is not None:
                _unwanted(name, value, self.layout)
        if given.tokens is not self._row_views.get(slot):
            check_tensor("inputs.tokens", given.tokens, self._row_shape, (self._dtype,), group.comm.device)
            self._check_place("inputs.tokens", given.tokens, slot)
        if self._packed and given.tokens.data_ptr() == self._rows(slot).data_ptr():
            raise stale("inputs.tokens were packed by an NVFP4 combine; give other rows, or dispatch again")
        if self._rank_major:
            pass   # the caller's rows have their weights in them
        elif weights is None:
            raise ValueError("topk_weights must be given to an EXPERT_MAJOR combine (outputs.topk_weights or topk_weights=)")
        elif not seen.same("topk_weights", weights) or weights.shape[0] != self._num_tokens:
            import torch

            check_tensor("topk_weights", weights, (self._num_tokens, self.num_topk), (torch.float32,), group.comm.device, aligned=False)
            seen.passed("topk_weights", weights)
        if made.tokens is not None and (not seen.same("combined", made.tokens) or made.tokens.shape[0] != self._num_tokens):
            check_tensor("outputs.tokens", made.tokens, (self._num_tokens, group.config.hidden), (self._dtype,), group.comm.device)
            self._check_outside("outputs.tokens", made.tokens)
            seen.passed("combined", made.tokens)

    def _check_place(self, name: str, rows: torch.Tensor, slot: int, offset: int = 0) -> None:
        """Refuse rows that lie in the window, but not in their place in this handle's slot."""
        plan, at = self.group.map, rows.data_ptr() - self.group.window.address
        if 0 <= at < self.group.window.num_bytes and at != plan.slot(slot) + offset:
            held = (at - plan.slots) // plan.slot_bytes
            raise stale(f"{name} lies in slot {held} of the window, but this handle's last dispatch filled slot {slot}")

    def _check_outside(self, name: str, value: torch.Tensor) -> None:
        """Refuse a tensor that no peer should see."""
        for window in (self.group.window, *self.group.user_windows):
            if value.numel() and -value.nbytes < value.data_ptr() - window.address < window.num_bytes:
                raise refused(ValueError(f"{name} must not lie in a window, where other ranks read and write meanwhile; give a tensor of your own"),
                              Refusal.MEMORY)

    def _place(self, name: str, rows: Any, slot: int, whole: bool) -> int:
        """Number of the user window that `rows` fill, or -1: the rows are in the slot, or copied from or to it. `whole`: as they are, no recipe."""
        group, mode = self.group, self.group.config.zero_copy
        if rows is None or rows.data_ptr() == self._rows(slot).data_ptr():
            return -1
        index = next((i for i, w in enumerate(group.user_windows) if 0 <= rows.data_ptr() - w.address < w.num_bytes), -1)
        if index >= 0 and rows.data_ptr() != group.user_windows[index].address:
            at = rows.data_ptr() - group.user_windows[index].address
            raise refused(ValueError(f"{name} must begin with the first byte of its window, got byte {at} of window {index}; create a window for "
                                     "each tensor"), Refusal.MEMORY)
        if mode is ZeroCopyMode.ON and (index < 0 or not whole):
            raise refused(ValueError(f"{name} must be left out or lie in a window of Group.create_window, since zero_copy is ON; got "
                                     f"{'rows of a recipe' if index >= 0 else 'a plain tensor'}, which would be copied"), Refusal.MEMORY)
        return index if whole and mode is not ZeroCopyMode.OFF else -1

    def complete(self, config: Any = None) -> Any:
        """Enqueue the complete half of this handle's staged operation (``send_only``); without one, nothing happens. Stream-ordered.

        A dispatch's rows and counts, or a combine's tokens, are valid after it; every tensor of the call is kept until then. Collective in that
        every rank must come here before a staging slot is used again. With several operations in flight, handles may be completed in any order.

        Returns:
            What the staged call returned (the same object), or None.

        Raises:
            EpError: what a device reported about an earlier operation; the complete half is enqueued all the same.
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
        values = (*self._fixed(name, slot, slot, False, sent, place), group.config.wait_ns)
        blocks = group.num_blocks if name == "ll_combine_complete" else 1
        group.keep(tensors)
        group.comm.submit(self._kernel(name), (*values[:4], *own, *values[4:]), blocks, name, tensors)
        if self.group.comm.backend == "nccl" and not group.comm.capturing():
            import torch

            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream())   # it may be freed now, by a stream that knows nothing of this one

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
    def _check_open(self, what: str) -> None:
        self._check_group(what)
        if self._closed:
            raise refused(EpClosedError(f"cannot {what}: the handle is closed"), Refusal.CLOSED)

    def _check_group(self, what: str) -> None:
        if self.group._closed:
            raise EpClosedError(f"cannot {what}: the group is closed")

    def _check_landed(self, what: str) -> None:
        if self._flight is not None and self._flight.name == REFUSED:
            self.complete()
        if self._flight is not None:
            flies = "combine" if "combine" in self._flight.name else "dispatch"
            raise refused(EpError(f"cannot {what}: the handle's {flies} is in flight; call complete() first, or use another handle"), Refusal.ORDER)

    def _check_staged(self, send_only: bool) -> None:
        if send_only and not self.group.staging_owner and not self.group.config.enable_mask:
            raise ValueError("send_only needs staging slots: set GroupConfig.num_staging_slots, two per operation in flight")

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
        free = [i for i, held in enumerate(owner) if held <= 0]
        if self._slot >= 0 and owner[self._slot] in (self.id, -self.id):
            slot = self._slot
        elif free:
            slot = free[0]
        else:
            raise refused(EpError(f"all {len(owner)} slots hold dispatches that other handles have not combined yet; combine one, close its handle, "
                                  "or set GroupConfig.num_slots higher"), Refusal.ORDER)
        self.group.slot_owner[slot], self.group.slot_combined[slot], self._slot = self.id, False, slot
        return slot

    def _rows(self, slot: int) -> torch.Tensor:
        """The rows of a slot, ``[L, R * M, hidden]`` or ``[R, M, hidden]``, the same tensor object unless something wrote a graph into it."""
        rows = self._row_views.get(slot)
        if rows is None or rows.requires_grad:
            begin = self.group.map.slot(slot)
            size = self._row_shape[0] * self._row_shape[1] * self.group.config.row_bytes
            rows = self._row_views[slot] = self.group.window.memory[begin: begin + size].view(self._dtype).view(self._row_shape)
        return rows

    def _scales_at(self, sent: Sent) -> int:
        """Offset of received scales in a slot."""
        return self._row_shape[0] * self._row_shape[1] * sent.wire.sent_bytes

    def _sent(self, slot: int, offset: int, dtype: Any, width: int) -> torch.Tensor:
        """Rows of `width` elements at `offset` of a slot, in planes."""
        key = (slot, offset, dtype, width)
        view = self._sent_views.get(key)
        if view is None:
            planes, rows = self._row_shape[:2]
            begin, size = self.group.map.slot(slot) + offset, planes * rows * width * dtype.itemsize
            view = self._sent_views[key] = self.group.window.memory[begin: begin + size].view(dtype).view(planes, rows, width)
        return view

    def _routing(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Received ids and weights of a slot, ``[R, M, K]`` each."""
        import torch

        views = self._routing_views.get(slot)
        if views is None:
            plan, shape = self.group.map, (*self._row_shape[:2], self.num_topk)
            size = 4 * plan.plane_rows * self.num_topk

            def view(offset: int, dtype: torch.dtype) -> torch.Tensor:
                begin = plan.slot(slot) + offset
                return self.group.window.memory[begin: begin + size].view(dtype).view(shape)

            views = self._routing_views[slot] = view(plan.recv_ids, torch.int32), view(plan.recv_weights, torch.float32)
        return views

    def _new(self, shape: Sequence[int], dtype: str | None) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype) if dtype else self._dtype, device=self.group.comm.device)

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
        kernel = self._kernel(name, None if sent is None else sent.wire)
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

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not getattr(error, "everywhere", False) and not self.handle.group.comm.capturing():
            try:
                if self.name:
                    self.handle.refuse(self.name, self.slot, refusal_of(error))
                else:
                    self.handle.group.refuse(refusal_of(error))
            except EpRefusedError:   # another rank refuses the same call; my own error says more
                pass
        elif error is not None and self.name == "ll_combine_send":   # no operation: nothing flies
            self.handle.group.staging_owner[self.handle._stage] = 0


def _known_layout(layout: Layout) -> Layout:
    layout = _member("layout", Layout, layout)
    if layout is Layout.UNSET:
        raise ValueError("layout must be set, got Layout.UNSET")
    if layout is Layout.FLAT:
        raise ValueError("layout must be EXPERT_MAJOR or RANK_MAJOR for a LOW_LATENCY group, got FLAT")
    return layout


def _known_topk(num_topk: int | None, most: int) -> int:
    if isinstance(num_topk, bool) or not isinstance(num_topk, int):
        raise TypeError(f"num_topk must be an int, got {type(num_topk).__name__}")
    if not 1 <= num_topk <= most:
        raise ValueError(f"num_topk must be in [1, {most}] (GroupConfig.num_topk), got {num_topk}")
    return num_topk


def _check_kinds(*arguments: tuple[str, Any, type]) -> None:
    for name, value, kind in arguments:
        if value is not None and not isinstance(value, kind):
            raise refused(TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}"), Refusal.TYPE)


def _unwanted(name: str, value: object, layout: Layout) -> None:
    raise ValueError(f"{name} must be left out of a LOW_LATENCY {layout.name} operation, got {type(value).__name__}")


def _only_plain(direction: PassDir) -> None:
    """Refuse what does not exist in LOW_LATENCY."""
    if direction is not PassDir.FWD:
        raise ValueError(f"pass_direction must be FWD in LOW_LATENCY, got {PassDir(direction).name}")


