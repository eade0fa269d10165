"""What `handle.Handle` checks of its arguments and of its own state before it takes part in an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncclep_py.arguments import check_ids, check_tensor, check_tokens, refused, stale
from ncclep_py.config import CombineConfig, CombineQuant, DispatchConfig, DispatchQuant, ExpertIdKind, Layout, PassDir, _member
from ncclep_py.errors import EpClosedError, EpError
from ncclep_py.flight import REFUSED
from ncclep_py.handle_rows import HandleRows
from ncclep_py.recipes import Sent, check_nvfp4, check_recipe
from ncclep_py.refusal import Refusal

if TYPE_CHECKING:
    import torch

    from ncclep_py.arguments import Seen
    from ncclep_py.communicator import Kernel
    from ncclep_py.flight import Flight
    from ncclep_py.inputs_outputs import CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, LayoutInfo
    from ncclep_py.kernels.shape import Wire

__all__ = ["HandleChecks"]


class HandleChecks(HandleRows):
    """The part of `handle.Handle` that refuses; what it raises is told to all ranks by the handle."""

    _closed: bool
    _dispatch_name: str
    _flight: Flight | None
    _num_tokens: int
    _packed: bool
    _seen: Seen
    _topk_idx: torch.Tensor | None

    def complete(self, config: Any = None) -> Any:
        """See `handle.Handle`."""
        raise NotImplementedError

    def _kernel(self, name: str, wire: Wire | None = None) -> Kernel:
        raise NotImplementedError

    def _check_routing(self, topk_idx: Any) -> None:
        import torch

        check_tensor("topk_idx", topk_idx, (None, self.num_topk), (torch.int32, torch.int64), self.group.comm.device, aligned=False)
        check_tokens("topk_idx", topk_idx.shape[0], self.group.config.max_dispatch_tokens_per_rank)

    def _check_dispatch(self, given: DispatchInputs, weights: Any, made: DispatchOutputs, counts: LayoutInfo, config: DispatchConfig,
                        slot: int) -> Sent | None:
        group, seen, plain = self.group, self._seen, config.quant_recipe is DispatchQuant.NONE
        self._check_staged(config.send_only)
        _only_plain(config.pass_direction)
        if plain and (given.scales is not None or made.scales is not None):
            _refuse_given(self.layout, ("inputs.scales", given.scales), ("outputs.scales", made.scales))
        if self._rank_major:
            _refuse_given(self.layout, ("layout_info.expert_counters", counts.expert_counters))
        elif not (weights is made.topk_weights is made.topk_idx is counts.src_rank_counters is None):
            _refuse_given(self.layout, ("inputs.topk_weights", weights), ("outputs.topk_weights", made.topk_weights),
                          ("outputs.topk_idx", made.topk_idx), ("layout_info.src_rank_counters", counts.src_rank_counters))
        if self._topk_idx is None:
            raise ValueError("topk_idx must be given to create_handle, update or dispatch before a dispatch")
        sent = None if plain else self._check_sent(given, made, config, slot)
        if plain and (not seen.same("tokens", given.tokens) or given.tokens.shape[0] != self._topk_idx.shape[0]):
            check_tensor("tokens", given.tokens, (None, group.config.hidden), (self._dtype,), group.comm.device)
            if given.tokens.shape[0] != self._topk_idx.shape[0]:
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
        if given.topk_weights is not None or given.scales is not None:
            _refuse_given(self.layout, ("inputs.topk_weights", None if self._rank_major else given.topk_weights),
                          ("inputs.scales", None if packs else given.scales))
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


def _refuse_given(layout: Layout, *unwanted: tuple[str, object]) -> None:
    """``ValueError`` for the first that was given, though an operation of the layout does not take it."""
    for name, value in unwanted:
        if value is not None:
            raise ValueError(f"{name} must be left out of a LOW_LATENCY {layout.name} operation, got {type(value).__name__}")


def _only_plain(direction: PassDir) -> None:
    """Refuse what does not exist in LOW_LATENCY."""
    if direction is not PassDir.FWD:
        raise ValueError(f"pass_direction must be FWD in LOW_LATENCY, got {PassDir(direction).name}")
