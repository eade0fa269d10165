"""Bytes of every option of a LOW_LATENCY group, from the memory maps: ``python -m ncclep_py.sizes`` prints the README's table; with a number of ranks
and of those in a team, the table of ranks in several teams.
"""

from __future__ import annotations

import dataclasses
import sys

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.ll_net_map import LLNetMap
from ncclep_py.ll_net_member_map import LLNetMemberMap
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
        network: over several teams, messages and rows on their way, and where they belong.
    """

    name: str
    slots: int
    staging: int
    control: int
    extra: int = 0
    network: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.slots + self.staging + self.control + self.extra + self.network


def _option(name: str, config: GroupConfig, num_ranks: int, team_size: int = 0, extra: int = 0) -> Option:
    window, local = WindowMap.build(config, num_ranks), LocalMap.build(config)
    staging = window.num_staging * window.staging_bytes + window.num_slots * window.origins_bytes
    slots = window.num_slots * window.slot_bytes
    network = 0
    if team_size:
        net: LLNetMap | LLNetMemberMap = LLNetMap.build(config, num_ranks, team_size, window, local)
        if config.enable_mask:
            net = LLNetMemberMap.build(config, num_ranks, net)   # type: ignore[arg-type]
        network = net.total_bytes - window.total_bytes + net.local_bytes - local.total_bytes
    return Option(name, slots, staging, window.total_bytes - slots - staging + local.total_bytes, extra, network)


def options(config: GroupConfig, num_ranks: int, team_size: int = 0) -> list[Option]:
    """Every option for the sizes in `config`, whose own options do not matter; `team_size`: ranks of each of several teams, 0 for one team."""
    def made(**more: object) -> GroupConfig:
        plain = {"num_slots": 1, "num_staging_slots": 0, "slot_layout": Layout.UNSET, "enable_mask": False}
        return dataclasses.replace(config, **(plain | more))   # type: ignore[arg-type]

    rows = num_ranks * config.max_dispatch_tokens_per_rank * config.row_bytes
    expert_rows, only = config.num_experts // num_ranks * rows, {"slot_layout": Layout.RANK_MAJOR}
    one, staged = "one slot, in place (default)", "staged, two micro-batches: two slots, 4 staging slots"
    kinds = [(one, made()), ("two slots", made(num_slots=2)), ("staged: one slot, 2 staging slots", made(num_staging_slots=2)),
             (staged, made(num_slots=2, num_staging_slots=4))]
    if team_size:
        kinds += [("enable_mask: one slot", made(enable_mask=True)), ("RANK_MAJOR only: one slot", made(**only)),
                  ("RANK_MAJOR only: two slots, 4 staging slots", made(**only, num_slots=2, num_staging_slots=4))]
        return [_option(name, chosen, num_ranks, team_size) for name, chosen in kinds]
    return [
        *(_option(name, chosen, num_ranks) for name, chosen in kinds),
        _option("enable_mask: one slot", made(enable_mask=True), num_ranks),
        _option("a window or plain tensor of the caller's own for EXPERT_MAJOR rows", made(), num_ranks, extra=expert_rows),
        _option("RANK_MAJOR only: one slot", made(**only), num_ranks),
        _option("RANK_MAJOR only: two slots, 4 staging slots", made(**only, num_slots=2, num_staging_slots=4), num_ranks),
        _option("RANK_MAJOR only: a window or plain tensor of the caller's own", made(**only), num_ranks, extra=rows),
    ]


def markdown(config: GroupConfig, num_ranks: int, team_size: int = 0) -> str:
    """The options as a Markdown table, in MB of 10^6 bytes."""
    last = "network" if team_size else "the caller's"
    lines = [f"| per rank, in MB | slots | staging | control | {last} | total |", "|---|---|---|---|---|---|"]
    for o in options(config, num_ranks, team_size):
        more = (o.extra + o.network) / MB
        lines.append(f"| {o.name} | {o.slots / MB:.1f} | {o.staging / MB:.1f} | {o.control / MB:.2f} | {more:.1f} | {o.total / MB:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    ranks, team = (int(text) for text in sys.argv[1:3] or ("8", "0"))
    sys.stdout.write(markdown(GroupConfig(num_experts=256, max_dispatch_tokens_per_rank=128, hidden=7168, num_topk=8), ranks, team) + "\n")
