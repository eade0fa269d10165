"""What may go wrong in a run: ranks that die, stall or come late, and waits that give up."""

from __future__ import annotations

import dataclasses

__all__ = ["Faults"]


@dataclasses.dataclass(frozen=True)
class Faults:
    """Faults of one run. Row operations and publications are split into several steps while any is set.

    Attributes:
        dead: rank -> number of its steps after which it never runs again; what it stored is still delivered.
        slow: rank -> number of its steps after which it stalls until nobody else can go on without giving up.
        late: rank -> number of stream entries after which it stalls the same way, i.e. between two kernels.
        timeouts: waits may give up: when nothing else can happen, and by choice when all ranks they wait for are dead or stalled. Of several
            waits, those for a dead or stalled rank give up first (deadlines are equal, and those waits began first).
        bounded: a living rank inside a kernel, unless it waits for others, gets on to where it waits or ends within the timeout: waits give up on it
            only if it has become busy since they began.
    """

    dead: dict[int, int] = dataclasses.field(default_factory=dict)
    slow: dict[int, int] = dataclasses.field(default_factory=dict)
    late: dict[int, int] = dataclasses.field(default_factory=dict)
    timeouts: bool = False
    bounded: bool = False
