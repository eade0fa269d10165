"""Where a `handle.Handle`'s rows, scales, ids and weights are: views of its slot in the window, and whether a caller's tensor is used in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ncclep_py.arguments import refused
from ncclep_py.config import Layout, ZeroCopyMode
from ncclep_py.refusal import Refusal

if TYPE_CHECKING:
    import torch

    from ncclep_py.group import Group
    from ncclep_py.recipes import Sent

__all__ = ["HandleRows"]


SPARE_COUNTERS = 64


class HandleRows:
    """The part of `handle.Handle` that knows places. Views are made once, since making one costs microseconds."""

    group: Group
    layout: Layout
    num_topk: int
    _dtype: Any
    _rank_major: bool
    _routing_views: dict[int, tuple[torch.Tensor, torch.Tensor]]
    _row_shape: tuple[int, int, int]
    _row_views: dict[int, torch.Tensor]
    _sent_views: dict[tuple[int, int, Any, int], torch.Tensor]
    _spare_counters: list[torch.Tensor]

    def _rows(self, slot: int) -> torch.Tensor:
        """The rows of a slot, ``[L, R * M, hidden]`` or ``[R, M, hidden]``, the same tensor object unless something wrote a graph into it."""
        rows = self._row_views.get(slot)
        if rows is None or rows.requires_grad:
            begin = self.group.map.slot(slot)
            size = self._row_shape[0] * self._row_shape[1] * self.group.config.row_bytes
            rows = self._row_views[slot] = self.group.window.memory[begin: begin + size].view(self._dtype).view(self._row_shape)
        return rows

    def _received(self, slot: int, place: int, counts: torch.Tensor) -> list[tuple[int, int]]:
        """(address, bytes) of the rows received in each plane of a slot, or of user window `place`."""
        planes, rows = self._row_shape[:2]
        size = self.group.config.row_bytes
        begin = self._rows(slot).data_ptr() if place < 0 else self.group.user_windows[place].address
        return [(begin + plane * rows * size, min(max(count, 0), rows) * size) for plane, count in enumerate(counts.tolist()[:planes])]

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

    def _place(self, name: str, rows: Any, slot: int, whole: bool, staged: bool) -> int:
        """Number of the user window that `rows` fill, or -1: the rows are in the slot, or copied from or to it. `whole`: as they are, no recipe."""
        group, mode = self.group, self.group.config.zero_copy
        through = staged and group.over_network   # such operations know the slot only
        if rows is None or rows.data_ptr() == self._rows(slot).data_ptr():
            return -1
        index = next((i for i, w in enumerate(group.user_windows) if 0 <= rows.data_ptr() - w.address < w.num_bytes), -1)
        if index >= 0 and rows.data_ptr() != group.user_windows[index].address:
            at = rows.data_ptr() - group.user_windows[index].address
            raise refused(ValueError(f"{name} must begin with the first byte of its window, got byte {at} of window {index}; create a window for "
                                     "each tensor"), Refusal.MEMORY)
        if mode is ZeroCopyMode.ON and (index < 0 or not whole or through):
            what = "a plain tensor" if index < 0 else "rows of a staged operation over several teams" if whole else "rows of a recipe"
            raise refused(ValueError(f"{name} must be left out or lie in a window of Group.create_window, since zero_copy is ON; got "
                                     f"{what}, which would be copied"), Refusal.MEMORY)
        return index if whole and not through and mode is not ZeroCopyMode.OFF else -1

    def _new(self, shape: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=self._dtype, device=self.group.comm.device)

    def _new_counters(self, count: int) -> torch.Tensor:
        """A tensor of counters nobody had before. On a GPU one of many made at once: an allocation costs as much as all checks of a call."""
        import torch

        comm = self.group.comm
        if comm.backend != "nccl" or (not self._spare_counters and comm.capturing()):
            return torch.empty((count,), dtype=torch.int32, device=comm.device)
        if not self._spare_counters:
            with torch.inference_mode(False):   # they outlive the caller's mode
                self._spare_counters = list(torch.empty((SPARE_COUNTERS, count), dtype=torch.int32, device=comm.device).unbind())
        return self._spare_counters.pop()
