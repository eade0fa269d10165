"""The operations that only staged LOW_LATENCY kernels over several teams use, as in ``ll_net_vocabulary``. Safety: ``ncclep_py.ll_net_map``, L-S1 to
L-S7. With `first_signal` f, signal f + 2 * source is a source's RELEASED of a staging slot, f + 2 * source + 1 its DATA; f = 0: of operations.
"""

from __future__ import annotations

__all__ = ["LL_NET_STAGED_OPERATIONS", "LL_NET_STAGED_PARAMETERS"]

LL_NET_STAGED_PARAMETERS = {
    "flights": "address of the flights of all staging slots",
    "num_staging": "staging slots",
    "flight": "address of a flight in the local block",
    "flying": "window offset of a flight's words",
    "released": "window offset of a staging slot's RELEASED words",
    "first_signal": "first of a staging slot's signals, 0 for those of operations",
    "uses": "uses of the staging slot before this one",
    "operations": "operations, or uses of a staging slot, up to this one",
    "following": "epoch of the next use of the staging slot",
    "drained": "1 if the last use of networked ranks is known to have come up",
}
"""Meaning of the parameters that no other vocabulary has."""

_FAILURE = "fail record timeout"
_TEAM = "rank num_ranks team_size"
_SIZES = "num_topk num_experts num_ranks"
_ISSUE = "fence.acq_rel.sys; st.relaxed.sys net"

LL_NET_STAGED_OPERATIONS: tuple[tuple, ...] = (
    ("ll_net_drain_staged", "block", f"comm {_TEAM} contexts flights num_staging epoch {_FAILURE}", "ld.weak flights; ld.acquire.sys net; bar.sync",
     "Acquire, system scope: wait for what networked ranks put in those uses of staging slots that I have sent and not released.", True),
    ("ll_net_keep_rows", "block", "kept num_experts num_ranks", "st.weak kept",
     "After `ll_net_wait_counts`: the slot keeps the rows from each source for each of my experts, [R, L]. The grid's last block."),
    ("ll_net_kept_rows", "block", "kept num_experts num_ranks", "ld.weak kept; bar.sync",
     "Shared memory: those rows again, as `ll_net_take_row` needs them."),
    ("ll_net_store_origins", "warp", f"window origins token first {_SIZES} plane_rows rank team_size places", "st.weak origins",
     "`store_origins` inside my team."),
    ("ll_net_put_flight", "warp", f"comm window flying {_TEAM} first_signal least epoch signature status", "ld.acquire.sys net; st.relaxed.sys net",
     "Put my words of a flight, on context 0, to each networked rank whose HEAD, or RELEASED of the staging slot, counts at least so many."),
    ("ll_net_signal_sent", "warp", f"comm {_TEAM} contexts first_signal", _ISSUE,
     "Add 1 to my DATA signal of a staging slot on all contexts, at each networked rank."),
    ("ll_net_wait_flight", "block", f"comm window flying {_TEAM} contexts first_signal operations epoch signature {_FAILURE}",
     "ld.acquire.sys net; ld.acquire.sys flying; bar.sync",
     "Acquire, system scope: wait for DATA of networked ranks on all contexts, then for the words of my team; look at those of all. Non-zero if one "
     "does not come, refused or gave up.", True),
    ("ll_net_wait_released", "block", f"comm {_TEAM} first_signal uses epoch {_FAILURE}", "ld.acquire.sys net; bar.sync",
     "Acquire, system scope: wait until networked ranks have emptied the staging slot of all earlier uses.", True),
    ("ll_net_release", "block", f"comm window released flight {_TEAM} contexts first_signal following drained {_FAILURE}",
     "ld.weak flight; ld.acquire.sys net; fence.acq_rel.sys; st.relaxed.sys released; st.relaxed.sys net; st.weak flight; bar.sync",
     "Release, system scope: if I have not yet, give the staging slot back to all ranks, provided that what networked ranks put in its last use has "
     "come up: known (`drained`), or waited for; with a timeout of 0 only looked at, and no failure. Non-zero if not.", True),
    ("ll_net_count_team_rows", "block", "kept num_experts num_ranks plane_rows rank team_size", "ld.weak kept; bar.sync",
     "`count_rows` of rows from my team, which are neighbours in each plane."),
    ("ll_net_push_row", "warp", "window origins rows staging row num_planes plane_rows num_experts rank places row_bytes begin_vector end_vector",
     "ld.weak origins; ld.weak rows; st.weak staging", "`push_row` of a row that counts as `ll_net_count_team_rows` does."),
)
"""In the order of an operation's life."""
