"""Bytes of every option of a LOW_LATENCY group, from the memory map: ``python -m ncclep_py.sizes`` prints the README's table."""

from __future__ import annotations

import dataclasses
import sys

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.memory_map import LocalMap, WindowMap

__all__ = ["Option", "markdown", "options"]

MB = 1e6


@dataclasses.dataclass(frozen=True)
class Option:
    """Memory of one way to set a group up, on each rank, in bytes.

    Attributes:
        name: what is set.
        slots: payload slots, where received rows live and experts may work in place.
        staging: staging slots, and where rows came from.
        control: control words of the window and the local block.
        extra: windows or tensors of the caller's own.
    """

    name: str
    slots: int
    staging: int
    control: int
    extra: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.slots + self.staging + self.control + self.extra


def _option(name: str, config: GroupConfig, num_ranks: int, extra: int = 0) -> Option:
    window, local = WindowMap.build(config, num_ranks), LocalMap.build(config)
    staging = window.num_staging * window.staging_bytes + window.num_slots * window.origins_bytes
    slots = window.num_slots * window.slot_bytes
    return Option(name, slots, staging, window.total_bytes - slots - staging + local.total_bytes, extra)


def options(config: GroupConfig, num_ranks: int) -> list[Option]:
    """Every option for the sizes in `config`, whose own options do not matter."""
    def made(**more: object) -> GroupConfig:
        plain = {"num_slots": 1, "num_staging_slots": 0, "slot_layout": Layout.UNSET, "enable_mask": False}
        return dataclasses.replace(config, **(plain | more))   # type: ignore[arg-type]

    rows = num_ranks * config.max_dispatch_tokens_per_rank * config.row_bytes
    expert_rows, only = config.num_experts // num_ranks * rows, {"slot_layout": Layout.RANK_MAJOR}
    return [
        _option("one slot, in place (default)", made(), num_ranks),
        _option("two slots", made(num_slots=2), num_ranks),
        _option("staged: one slot, 2 staging slots", made(num_staging_slots=2), num_ranks),
        _option("staged, two micro-batches: two slots, 4 staging slots", made(num_slots=2, num_staging_slots=4), num_ranks),
        _option("enable_mask: one slot", made(enable_mask=True), num_ranks),
        _option("a window or plain tensor of the caller's own for EXPERT_MAJOR rows", made(), num_ranks, expert_rows),
        _option("RANK_MAJOR only: one slot", made(**only), num_ranks),
        _option("RANK_MAJOR only: two slots, 4 staging slots", made(**only, num_slots=2, num_staging_slots=4), num_ranks),
        _option("RANK_MAJOR only: a window or plain tensor of the caller's own", made(**only), num_ranks, rows),
    ]


def markdown(config: GroupConfig, num_ranks: int) -> str:
    """The options as a Markdown table, in MB of 10^6 bytes."""
    lines = ["| per rank, in MB | slots | staging | control | the caller's | total |", "|---|---|---|---|---|---|"]
    lines += [f"| {o.name} | {o.slots / MB:.1f} | {o.staging / MB:.1f} | {o.control / MB:.2f} | {o.extra / MB:.1f} | {o.total / MB:.1f} |"
              for o in options(config, num_ranks)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown(GroupConfig(num_experts=256, max_dispatch_tokens_per_rank=128, hidden=7168, num_topk=8), 8) + "\n")
