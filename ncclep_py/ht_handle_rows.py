"""Where an `ht_handle.HTHandle`'s rows, ids, weights and counts are: views of its slots and maps, and whether a caller's tensor is used in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.arguments import refused
from ncclep_py.config import ExpertIdKind, ZeroCopyMode
from ncclep_py.inputs_outputs import LayoutInfo
from ncclep_py.refusal import Refusal

if TYPE_CHECKING:
    import torch

    from ncclep_py.ht_group import HTGroup
    from ncclep_py.ht_memory_map import HTMaps

__all__ = ["HTHandleRows"]


class HTHandleRows:
    """The part of `ht_handle.HTHandle` that knows places. Views are made once, since making one costs microseconds."""

    group: HTGroup
    num_topk: int
    _dtype: Any
    _flat: bool
    _maps: torch.Tensor
    _maps_plan: HTMaps
    _views: dict[Any, torch.Tensor]

    def rows(self, slot: int) -> torch.Tensor:
        """Rows of a slot, ``[recv_rows, hidden]``, the same tensor object unless something wrote a graph into it."""
        return self._view(slot, 0, self._dtype, self.group.config.hidden)

    def _received(self, slot: int, place: int, most: int) -> list[tuple[int, int]]:
        """(address, bytes) of the rows received in a slot, or in user window `place`, at most `most` rows."""
        plan = self._maps_plan
        total = int.from_bytes(bytes(self._maps[plan.received + 8: plan.received + 16].tolist()), "little", signed=True)
        begin = self.rows(slot).data_ptr() if place < 0 else self.group.user_windows[place].address
        return [(begin, min(max(total, 0), most) * self.group.config.row_bytes)]

    def slot_idx(self, slot: int) -> torch.Tensor:
        """Received ids of a slot, ``[recv_rows, K]`` int64 (FLAT)."""
        import torch

        return self._view(slot, self.group.map.slot_idx, torch.int64, self.num_topk)

    def slot_weights(self, slot: int) -> torch.Tensor:
        """Received weights of a slot, ``[recv_rows, K]`` (FLAT) or ``[recv_rows]`` float32."""
        import torch

        return self._view(slot, self.group.map.slot_weights, torch.float32, self.num_topk if self._flat else 0)

    def _view(self, slot: int, offset: int, dtype: Any, width: int) -> torch.Tensor:
        """``[recv_rows, width]``, or ``[recv_rows]`` for width 0, of `dtype` at `offset` of a slot."""
        key = (slot, offset, dtype) if width == self.group.config.hidden or offset else (slot, offset, dtype, width)
        view = self._views.get(key)
        if view is None or view.requires_grad:
            rows = self.group.map.recv_rows
            begin = self.group.map.slot(slot) + offset
            flat = self.group.window.memory[begin: begin + rows * max(width, 1) * dtype.itemsize].view(dtype)
            view = self._views[key] = flat.view(rows, width) if width else flat
        return view

    def _place(self, name: str, rows: torch.Tensor | None, slot: int, whole: bool) -> int:
        """Number of the user window (`Group.create_window`) that begins with `rows`, or -1: they are in the slot, or copied from or to it."""
        group, mode = self.group, self.group.config.zero_copy
        if rows is None or rows.data_ptr() == self.rows(slot).data_ptr():
            return -1
        index = next((i for i, w in enumerate(group.user_windows) if 0 <= rows.data_ptr() - w.address < w.num_bytes), -1)
        if index >= 0:
            window, needed = group.user_windows[index], group.map.recv_rows * group.config.row_bytes
            if rows.data_ptr() != window.address:
                at = rows.data_ptr() - window.address
                raise refused(ValueError(f"{name} must begin with the first byte of its window, got byte {at} of window {index}; create a window for "
                                         "each tensor"), Refusal.MEMORY)
            if whole and window.num_bytes < needed:
                raise refused(ValueError(f"{name} must lie in a window of at least {needed} bytes, for the {group.map.recv_rows} rows this rank may "
                                         f"receive, got window {index} of {window.num_bytes}"), Refusal.MEMORY)
        if mode is ZeroCopyMode.ON and (index < 0 or not whole):
            raise refused(ValueError(f"{name} must be left out or lie in a window of Group.create_window, since zero_copy is ON; got "
                                     f"{'rows of a recipe' if index >= 0 else 'a plain tensor'}, which would be copied"), Refusal.MEMORY)
        return index if whole and mode is not ZeroCopyMode.OFF else -1

    def _new(self, shape: Sequence[int], dtype: Any) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=dtype, device=self.group.comm.device)

    def _own_counts(self) -> LayoutInfo:
        """Views of the counts in the handle's maps."""
        import torch

        plan, local = self._maps_plan, self.group.map.num_local_experts
        zones = self._maps[plan.zones: plan.zones + 12 * local].view(torch.int32)
        total = self._maps[plan.received + 8: plan.received + 16].view(torch.int64)
        return LayoutInfo(zones[2 * local:], None, ExpertIdKind.AUTO, None if self._flat else zones[:local], total, zones[local: 2 * local])
