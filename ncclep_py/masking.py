"""Fault tolerance of a `group.Group`: who is masked out, the async error, and taking ranks back. (How long it waited for whom: ``waited``.)

With ``GroupConfig.enable_mask`` a rank that does not come to an operation within ``timeout_ns`` is masked out: the operation takes place without
it, on all other ranks alike. Dispatch sends nothing to its experts and receives nothing from it; combine leaves out its experts' rows, without
renormalising weights. The rules, and what a rank may do for this to hold, stand in ``member_map.py``:

* a rank may stop for good at any point, or sleep between operations for as long as it likes;
* a rank inside an operation may stall for less than the timeout. A longer stall may let it write rows over those of later operations; when it goes
  on it says so, and the async error tells the others that results since it was masked are suspect;
* the memory of a rank that stopped stays mapped. (The death of a GPU, or of the link to it, is beyond this.)

An operation takes 1.25 timeouts more if ranks do not come, and one more again if a rank stops in the middle of it.

Over several teams (``ll_net_member_map.py``) ranks agree by words that are put, and nobody can write over what others read, so a longer stall harms
no result. A rank is told that it is out by what its next operation finds. If the network of a living rank fails, all go on without either of two
ranks one of which misses the other; a rank that hears nobody goes on alone. An operation takes 1.25 timeouts more if ranks do not come, 1.5 if one
stops in the middle of it, and some two for each that stops while the others agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ncclep_py.errors import Code, EpClosedError, EpError, EpMaskedError, ErrorRecord
from ncclep_py.memory_map import WORD
from ncclep_py.signature import OpKind

if TYPE_CHECKING:
    import torch

    from ncclep_py.group import Group

__all__ = ["MASKED_KERNELS", "Masking"]

MASKED_KERNELS = {"ll_dispatch": "ll_masked_dispatch", "ll_rank_major_dispatch": "ll_masked_rank_major_dispatch", "ll_combine": "ll_masked_combine",
                  "ll_nvfp4_combine": "ll_masked_nvfp4_combine", "ll_mask_clean": "ll_mask_clean", "ll_copy": "ll_copy"}
"""Kernels of groups with ``enable_mask``, by the names of those without."""


class Masking:
    """The part of `group.Group` that needs ``GroupConfig.enable_mask``; `EpError` without it.

    Example:
        >>> import ncclep_py as ep
        >>> def program(comm):
        ...     config = ep.GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1, enable_mask=True)
        ...     group = ep.Group.create(comm, config)
        ...     if comm.rank == 0:
        ...         group.mask_update([1, 0])   # rank 1 is gone, and rank 0 goes on without it
        ...     return group.mask_query().tolist(), group.get_async_error()
        >>> world = ep.LocalWorld(2, "sim")
        >>> world.run(program)
        [([1, 0], 0), ([1, 1], 0)]
    """

    def mask_query(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Which ranks take part, ``[R]`` int32 on the device: 1 active, 0 masked out. Local, in stream order.

        Args:
            out: where to put it; allocated without it.
        """
        group: Group = self   # type: ignore[assignment]
        import torch

        word = group.member_word("mask_query", "mask")
        active = ((word >> torch.arange(group.num_ranks, device=word.device)) & 1 ^ 1).to(torch.int32)
        if out is None:
            return active
        if out.shape != (group.num_ranks,) or out.dtype != torch.int32 or out.device != group.comm.device:
            raise ValueError(f"out must be [{group.num_ranks}] int32 on {group.comm.device}, got {list(out.shape)} {out.dtype} on {out.device}")
        return out.copy_(active)

    def mask_update(self, mask: Sequence[int] | torch.Tensor) -> None:
        """Mask ranks out that the program knows to be gone, from the next operation on. Local, in stream order.

        Every active rank should give the same; where they differ, the next operation masks whomever any of them masks.

        Args:
            mask: R integers on the host, 1 active, 0 masked out. A rank that is masked stays masked (`mask_clean` takes it back).
        """
        group: Group = self   # type: ignore[assignment]
        word = group.member_word("mask_update", "mask")
        values = [int(v) for v in mask]
        if len(values) != group.num_ranks or any(v not in (0, 1) for v in values):
            raise ValueError(f"mask must be {group.num_ranks} integers, 1 active and 0 masked out, got {values}")
        if not values[group.rank]:
            raise ValueError(f"mask must not mask out the rank that calls, {group.rank}")
        word.bitwise_or_(sum(1 << rank for rank, active in enumerate(values) if not active))

    def mask_clean(self) -> None:
        """Take masked ranks back. Collective over all ranks that are to take part; waits for the stream.

        Ranks that come within ``timeout_ns`` of each other are active afterwards, on all of them alike; the others are masked. All go on with
        the same epoch, and with empty slots: what was dispatched before cannot be combined any more. The async error stays (`error_clear`).

        Raises:
            EpMaskedError: this rank came too late; the next common call can take it back.
        """
        group: Group = self   # type: ignore[assignment]
        outcome = group.member_word("mask_clean", "outcome")
        kernel = group.kernel("ll_mask_clean", group.config.num_topk, 8)
        group.comm.submit(kernel, self.clean_values(), 1, "mask_clean", ())
        group.comm.synchronize()
        group.slot_owner = [0] * group.config.num_slots
        group.slot_combined = [False] * group.config.num_slots
        if group._record_words[0] == Code.EXCLUDED:
            group._record_words[0] = 0
        code = int(outcome.cpu()[0]) & 0xFFFFFFFF
        if code == Code.EXCLUDED:
            raise EpMaskedError(f"rank {group.rank} came too late to mask_clean; the other ranks go on without it")
        if code:
            raise EpError(f"mask_clean failed on rank {group.rank}: {Code(code).name.lower()}; ranks called it together with another operation, or "
                          "kept missing each other")

    def get_async_error(self) -> int:
        """1 if a rank was masked out or a masked one came back, since creation or `error_clear`; 0 if not. Local, host only, does not wait."""
        group: Group = self   # type: ignore[assignment]
        group.member_word("get_async_error", "mask")
        return int(group._notice_words[0] != 0)

    def async_error(self) -> EpMaskedError | None:
        """What `get_async_error` is about, as an exception that is not raised: the first such event since `error_clear`, or the
        worst: a masked rank that wrote rows afterwards."""
        group: Group = self   # type: ignore[assignment]
        group.member_word("async_error", "mask")
        record = ErrorRecord.read(group._notice_words)
        return None if record is None else record.exception()   # type: ignore[return-value]

    def error_clear(self) -> None:
        """Forget the async error. Local, host only."""
        group: Group = self   # type: ignore[assignment]
        group.member_word("error_clear", "mask")
        group._notice_words[0] = 0

    def clean_values(self) -> tuple[int, ...]:
        """Internal: what the kernel of `mask_clean` gets."""
        group: Group = self   # type: ignore[assignment]
        return (group.window.handle, group.rank, group.addresses()[0], group.signature(OpKind.CLEAN, 0, 0, group.config.num_topk),
                group.config.num_slots, group.config.wait_ns)

    # ---- inside ------------------------------------------------------------------------------------------------------
    def member_word(self, what: str, name: str, count: int = 1) -> torch.Tensor:
        """Internal: words of the local block, by their name in `member_map.LocalMembers`, as int64."""
        group: Group = self   # type: ignore[assignment]
        import torch

        if group._closed:
            raise EpClosedError(f"cannot {what}: the group is closed")
        if group.local_map.members is None:
            raise EpError(f"{what} needs a group with GroupConfig.enable_mask")
        begin = getattr(group.local_map.members, name)
        return group._local[begin: begin + count * WORD].view(torch.int64)

    def kernel_name(self, name: str) -> str:
        """Internal: the kernel that does what `name` does."""
        group: Group = self   # type: ignore[assignment]
        return MASKED_KERNELS[name] if group.config.enable_mask else name

    def lost_ranks(self) -> bool:
        """Internal: whether the group ends with ranks masked out, which may never come to a collective call. Waits for the stream."""
        group: Group = self   # type: ignore[assignment]
        return group.local_map.members is not None and bool((group.mask_query() == 0).any())

