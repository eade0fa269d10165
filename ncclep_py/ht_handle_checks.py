"""What `ht_handle.HTHandle` checks of its arguments and of its own state before it takes part in an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncclep_py.arguments import Seen, check_ids, check_tensor, check_tokens, refused, stale
from ncclep_py.config import CombineConfig, CombineQuant, DispatchConfig, DispatchQuant, Layout, _member
from ncclep_py.errors import EpClosedError, EpError, EpStaleError
from ncclep_py.ht_handle_rows import HTHandleRows
from ncclep_py.recipes import Sent, check_recipe
from ncclep_py.refusal import Refusal

if TYPE_CHECKING:
    import torch

    from ncclep_py.inputs_outputs import CombineInputs, CombineOutputs, DispatchInputs, DispatchOutputs, LayoutInfo

__all__ = ["HTHandleChecks"]


class HTHandleChecks(HTHandleRows):
    """The part of `ht_handle.HTHandle` that refuses; what it raises is told to all ranks by the handle."""

    _closed: bool
    _num_tokens: int
    _routing: int
    _routings: list[int]
    _seen: Seen

    def _check_routing(self, topk_idx: Any) -> None:
        import torch

        config = self.group.config
        if not self._seen.same("topk_idx", topk_idx):
            check_tensor("topk_idx", topk_idx, (None, self.num_topk), (torch.int32, torch.int64), self.group.comm.device, aligned=False)
            check_tokens("topk_idx", topk_idx.shape[0], config.max_dispatch_tokens_per_rank)
            self._seen.passed("topk_idx", topk_idx)
        if config.checked:
            if self.group.comm.capturing():
                raise EpError("GroupConfig.checked reads expert ids on the host, which is impossible during graph capture: capture on a group "
                              "without it")
            check_ids("topk_idx", topk_idx, config.num_experts)

    def _check_counts(self, info: LayoutInfo) -> tuple[torch.Tensor | None, ...]:
        """The caller's tensors for counts in the order of the kernel's parameters."""
        import torch

        if info.src_rank_counters is not None:
            raise ValueError("layout_info.src_rank_counters must be left out of a HIGH_THROUGHPUT update")
        local, found = self.group.map.num_local_experts, []
        dtypes = (torch.int32, torch.int64)
        for name, least in (("expert_counters", local), ("expert_offsets", local), ("expert_counts_unpadded", local), ("recv_total_counter", 1)):
            tensor = getattr(info, name)
            if self._flat and name == "expert_offsets":
                tensor = None   # FLAT has no zones
            if tensor is not None and not self._seen.same(name, tensor):
                check_tensor(f"layout_info.{name}", tensor, (None,), dtypes, self.group.comm.device, aligned=False)
                if tensor.shape[0] < least:
                    raise refused(ValueError(f"layout_info.{name} must have at least {least} entries, got {tensor.shape[0]}"), Refusal.SHAPE)
                self._seen.passed(name, tensor)
            found.append(tensor)
        kinds = {t.dtype for t in found if t is not None}
        if len(kinds) > 1:
            raise refused(TypeError(f"layout_info's tensors must have one dtype, got {', '.join(sorted(map(str, kinds)))}"), Refusal.TYPE)
        return tuple(found)

    def _check_dispatch(self, given: DispatchInputs, weights: Any, made: DispatchOutputs, config: DispatchConfig, backward: bool) -> Sent | None:
        group, seen, device = self.group, self._seen, self.group.comm.device
        import torch

        self._check_updated("dispatch")
        if not group.config.max_recv_tokens_per_rank and group.comm.capturing():
            raise EpError("dispatch cannot be captured while max_recv_tokens_per_rank is AUTO; set a budget")
        sent = None
        if config.quant_recipe is DispatchQuant.DS_FP8E3M4:
            raise ValueError("quant_recipe must be NONE or FWD in HIGH_THROUGHPUT, got DS_FP8E3M4")
        if config.quant_recipe is DispatchQuant.FWD:
            sent = check_recipe(given, self._num_tokens, config, group.config, device)
        else:
            _without("a dispatch without recipe", ("inputs.scales", given.scales), ("outputs.scales", made.scales))
            if not seen.same("tokens", given.tokens) or given.tokens.shape[0] != self._num_tokens:
                check_tensor("tokens", given.tokens, (self._num_tokens, group.config.hidden), (self._dtype,), device)
                seen.passed("tokens", given.tokens)
        self._check_outside("tokens", given.tokens)
        if backward:
            _without("a backward dispatch", ("inputs.topk_weights", weights), ("outputs.topk_weights", made.topk_weights),
                     ("outputs.topk_idx", made.topk_idx))
        else:
            self._check_weights("topk_weights", weights, "a forward dispatch (inputs.topk_weights or topk_weights=)")
        if not self._flat:
            _without("an EXPERT_MAJOR dispatch", ("outputs.topk_idx", made.topk_idx))
        width, dtype = (group.config.hidden, self._dtype) if sent is None else (sent.width, sent.dtype)
        shapes: list[tuple[str, Any, tuple[int | None, ...], Any]] = [("tokens", made.tokens, (None, width), dtype)]
        if sent is not None:
            shapes.append(("scales", made.scales, (None, sent.scale_width), sent.scale_dtype))
        k = (None, self.num_topk) if self._flat else (None,)
        shapes += [("topk_weights", made.topk_weights, k, torch.float32), ("topk_idx", made.topk_idx, k, torch.int64)]
        rows = None if made.tokens is None or not isinstance(made.tokens, torch.Tensor) or not made.tokens.ndim else made.tokens.shape[0]
        for name, tensor, shape, kind in shapes:
            if tensor is None:
                continue
            if not seen.same(f"outputs.{name}", tensor):
                check_tensor(f"outputs.{name}", tensor, shape, (kind,), device)
                seen.passed(f"outputs.{name}", tensor)
            self._check_rows(f"outputs.{name}", tensor, rows)
        return sent

    def _check_rows(self, name: str, tensor: torch.Tensor, rows: int | None) -> None:
        """Refuse outputs with too few rows, or with other rows than the tokens."""
        budget, have = self.group.config.max_recv_tokens_per_rank, int(tensor.shape[0])
        if have < budget:
            raise refused(ValueError(f"{name} must have at least max_recv_tokens_per_rank = {budget} rows, got {have}"), Refusal.SHAPE)
        if not budget and rows is not None and have != rows:
            raise refused(ValueError(f"{name} must have as many rows as outputs.tokens, {rows}, got {have}"), Refusal.SHAPE)

    def _check_weights(self, name: str, weights: Any, whose: str) -> None:
        """Refuse router weights that are missing or wrong."""
        import torch

        if weights is None:
            raise ValueError(f"{name} must be given to {whose}")
        if not self._seen.same(name, weights) or weights.shape[0] != self._num_tokens:
            check_tensor(name, weights, (self._num_tokens, self.num_topk), (torch.float32,), self.group.comm.device, aligned=False)
            self._seen.passed(name, weights)

    def _check_combine(self, given: CombineInputs, grads: Any, made: CombineOutputs, outputs: CombineOutputs | None, config: CombineConfig,
                       slot: int, backward: bool) -> None:
        import torch

        group, seen, device = self.group, self._seen, self.group.comm.device
        if config.quant_recipe is not CombineQuant.NONE:
            raise ValueError(f"quant_recipe must be NONE in a HIGH_THROUGHPUT combine, got {config.quant_recipe.name}")
        _without("a HIGH_THROUGHPUT combine", ("inputs.scales", given.scales))
        self._check_updated("combine")
        if self._routings[backward] < 0:
            raise refused(EpError("combine needs a dispatch of this handle before it, and the last one was refused"), Refusal.STALE)
        if self._routings[backward] != self._routing:
            raise stale("the rows to combine were dispatched under an earlier routing; combine before update, or use a handle per routing")
        if given.tokens is not self._views.get((slot, 0, self._dtype)):
            check_tensor("inputs.tokens", given.tokens, (None, group.config.hidden), (self._dtype,), device)
            self._check_place("inputs.tokens", given.tokens, slot, 0)
        if backward:
            if grads is None:
                raise ValueError("topk_weights must be given to a backward combine (inputs.topk_weights or topk_weights=)")
            if outputs is None:
                raise ValueError("outputs must be given to a backward combine (a CombineOutputs, maybe empty): its topk_weights get the gradients")
            check_tensor("inputs.topk_weights", grads, (None, self.num_topk) if self._flat else (None,), (torch.float32,), device)
            self._check_place("inputs.topk_weights", grads, slot, group.map.slot_weights)
            if grads.shape[0] != given.tokens.shape[0]:
                raise refused(ValueError(f"inputs.topk_weights must have as many rows as inputs.tokens, {given.tokens.shape[0]}, got "
                                         f"{grads.shape[0]}"), Refusal.SHAPE)
            if made.topk_weights is not None:
                check_tensor("outputs.topk_weights", made.topk_weights, (self._num_tokens, self.num_topk), (torch.float32,), device, aligned=False)
        else:
            _without("a forward combine", ("inputs.topk_weights", grads))
        if made.tokens is not None:
            if not seen.same("combined", made.tokens) or made.tokens.shape[0] != self._num_tokens:
                check_tensor("outputs.tokens", made.tokens, (self._num_tokens, group.config.hidden), (self._dtype,), device)
                seen.passed("combined", made.tokens)
            self._check_outside("outputs.tokens", made.tokens)

    def _check_open(self, what: str) -> None:
        self._check_group(what)
        if self._closed:
            raise refused(EpClosedError(f"cannot {what}: the handle is closed"), Refusal.CLOSED)

    def _check_group(self, what: str) -> None:
        if self.group._closed:
            raise EpClosedError(f"cannot {what}: the group is closed")

    def _check_updated(self, what: str) -> None:
        if self._num_tokens < 0:
            raise EpStaleError(f"{what} needs an update before it: topk_idx was never given to create_handle or update, or the update was refused")

    def _check_outside(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse tensors in a window, where peers read and write."""
        for window in (self.group.window, *self.group.user_windows):
            if tensor.numel() and -tensor.nbytes < tensor.data_ptr() - window.address < window.num_bytes:
                raise refused(ValueError(f"{name} must not lie in a window, where other ranks read and write meanwhile; give a tensor of your own"),
                              Refusal.MEMORY)

    def _check_place(self, name: str, rows: torch.Tensor, slot: int, offset: int) -> None:
        """Refuse rows that lie in the window, but not in their place in this handle's slot."""
        plan, at = self.group.map, rows.data_ptr() - self.group.window.address
        if rows.numel() and 0 <= at < self.group.window.num_bytes and at != plan.slot(slot) + offset:
            held = (at - plan.slots) // plan.slot_bytes
            raise stale(f"{name} lies in slot {held} of the window, but this handle's last dispatch filled slot {slot}")


def _known_layout(layout: Layout) -> Layout:
    layout = _member("layout", Layout, layout)
    if layout not in (Layout.FLAT, Layout.EXPERT_MAJOR):
        raise ValueError(f"layout must be FLAT or EXPERT_MAJOR for a HIGH_THROUGHPUT group, got {layout.name}")
    return layout


def _without(what: str, *unwanted: tuple[str, Any]) -> None:
    for name, value in unwanted:
        if value is not None:
            raise ValueError(f"{name} must be left out of {what}, got {type(value).__name__}")
