"""The operations for kernels of one's own over several teams: name, scope, parameters, effects, doc, may_fail, as in ``ht_net_vocabulary``.

They put bytes between windows, add to signals of a peer, wait for one's own, and learn from counters and flushes when a source may be written again.
A group over several teams has signals and counters that its own operations do not use (`plan.DeviceNeeds`), for each context. Puts are of at most
1 GiB. ``net`` is the network, as in ``ht_net_vocabulary``; further operations on it are ``ht_net_put``, ``ht_net_put_tag`` and ``ht_net_signal``.
"""

from __future__ import annotations

__all__ = ["NET_OPERATIONS", "NET_PARAMETERS"]

NET_PARAMETERS = {
    "which": "number of a counter of mine",
    "rails": "1: ranks of my index only, those a HIGH_THROUGHPUT group has connections to; 0: all ranks of other teams",
}
"""Meaning of the parameters."""

_FAILURE = "epoch fail record timeout"
_PUT = "comm window peer context target_at source_at num_bytes"
_ISSUE = "fence.acq_rel.sys; st.relaxed.sys net"

NET_OPERATIONS: tuple[tuple, ...] = (
    # ---- put ------------------------------------------------------------------------------------------------------------
    ("net_put_signal", "warp", f"{_PUT} signal amount", _ISSUE,
     "Put bytes of my window to a peer's (none if num_bytes is 0), then add to a signal there, which comes after all puts to it on this context."),
    ("net_put_counted", "warp", f"{_PUT} which", _ISSUE,
     "Put bytes (at least one), and add 1 to counter `which` of this context when the network is done with them here: they may then be written "
     "again. That they are there only a signal tells."),
    # ---- look -----------------------------------------------------------------------------------------------------------
    ("net_read_signal", "warp", "comm context signal", "ld.acquire.sys net", "Acquire, system scope: value of a signal of mine."),
    ("net_read_counter", "warp", "comm context which", "ld.acquire.sys net",
     "Acquire, system scope: value of a counter of mine. If it counts all puts issued with it, all their sources may be written again."),
    # ---- wait -----------------------------------------------------------------------------------------------------------
    ("net_wait_signal", "block", f"comm context signal least rank peer {_FAILURE}", "ld.acquire.sys net; bar.sync",
     "Acquire, system scope: wait for a signal of mine; `peer` is to blame. Non-zero if it does not come.", True),
    ("net_wait_counter", "block", f"comm context which least rank peer {_FAILURE}", "ld.acquire.sys net; bar.sync",
     "Acquire, system scope: wait for a counter of mine, of puts to `peer`. Non-zero if it does not come.", True),
    ("net_wait_flushed", "block", f"comm context rank {_FAILURE}", "ld.acquire.sys net; bar.sync",
     "Acquire, system scope: wait until the network is done with the sources of all puts of this rank on the context. Non-zero, with nobody but "
     "this rank to blame, if it is not.", True),
    ("net_barrier", "block", f"comm context signal count rank num_ranks team_size rails {_FAILURE}",
     f"bar.sync; {_ISSUE}; ld.acquire.sys net; bar.sync",
     "What the block did, and all earlier puts on this context, is ordered before what follows at ranks of other teams, which must all come: signal "
     "`signal` + rank of each tells, and was used in `count` barriers before. One block of the grid calls. Non-zero if one does not come.", True),
)
"""In the order of use."""
