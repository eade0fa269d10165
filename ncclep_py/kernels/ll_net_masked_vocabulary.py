"""The operations that only LOW_LATENCY kernels with masks over several teams use: name, scope, parameters, effects, doc, as in ``ht_vocabulary``.

Protocol: ``ncclep_py.ll_net_member_map``. Bit r of a view: rank r is missed; then FAILED. Waits do not fail, they return what they miss.
"""

from __future__ import annotations

__all__ = ["LL_NET_MASKED_OPERATIONS", "LL_NET_MASKED_PARAMETERS"]

LL_NET_MASKED_PARAMETERS = {
    "views": "window offset of the views",
    "rounds": "most rounds of an agreement",
    "round": "round of the agreement, from 1; 0 for what is decided",
    "view": "whom this rank misses, and FAILED",
    "silent": "bit r set: rank r was told that it is out",
    "told": "address of the ranks that were told, u64",
    "adds": "address of the attempts in which each rank and I were members, but for the one that masked it, [32] u64",
    "returned_bytes": "bytes of the rows that one rank sends back",
    "made": "address of the adds that I made at each rank, [32] u64",
    "own": "epoch of my next operation",
    "stranded": "1 if I was told that the others went on without me",
}
"""Meaning of the parameters that no other vocabulary has."""

_TEAM = "rank num_ranks team_size"
_SIZES = "num_topk num_experts num_ranks"
_ISSUE = "fence.acq_rel.sys; st.relaxed.sys net"

LL_NET_MASKED_OPERATIONS: tuple[tuple, ...] = (
    ("ll_net_enter_members", "block", f"comm window heads {_TEAM} contexts mask adds epoch signature status timeout",
     f"ld.weak adds; ld.acquire.sys net; {_ISSUE}; bar.sync",
     "Drain: wait until all that networked members put in earlier attempts is here; then put my HEAD to them, and signal it. The others as bits."),
    ("ll_net_wait_members", "block", f"comm window heads views {_TEAM} mask view rounds adds epoch signature waited timeout",
     "ld.weak adds; ld.acquire.sys head; ld.relaxed.sys view; ld.acquire.sys net; bar.sync",
     "Acquire, system scope: wait for HEAD of all members that are not in `view`, or for a first view with me in it; the view after that."),
    ("ll_net_await_view", "block", "outcome epoch timeout", "ld.relaxed.gpu outcome; fence.acq_rel.gpu; bar.sync",
     "Acquire, gpu scope: what a block of this rank told with `tell_outcome`; 0 if it does not come."),
    ("ll_net_send_member_row", "warp",
     f"comm window sent messages tokens scales token first end {_SIZES} plane_rows row_bytes scale_bytes words header_bytes message_bytes rank "
     "team_size contexts epoch", f"ld.nc tokens; ld.nc scales; st.weak sent; st.weak staging; {_ISSUE}",
     "Make the message of a token, with its scale row, and send it to every rank that hosts one of its experts, mine included."),
    ("ll_net_send_made_row", "warp",
     f"comm window sent messages token first end {_SIZES} plane_rows words header_bytes put_bytes message_bytes rank team_size contexts epoch",
     f"ld.weak sent; st.weak sent; st.weak staging; {_ISSUE}",
     "`ll_net_send_member_row` of a row and a scale row that this warp made in the token's message."),
    ("ll_net_keep_routes", "warp", "table token first num_topk num_ranks", "st.weak table", "RANK_MAJOR: the rows of a token to the table."),
    ("ll_net_signal_members", "warp", f"comm {_TEAM} context mask", _ISSUE, "Add 1 to my DATA signal of a context at each networked member."),
    ("ll_net_wait_member_data", "block", f"comm window arrived views {_TEAM} contexts mask rounds adds epoch waited timeout",
     "ld.weak adds; ld.acquire.sys arrived; ld.relaxed.sys view; ld.acquire.sys net; bar.sync",
     "Acquire, system scope: wait for ARRIVED of my team's members and for DATA of networked ones, or a first view that is not the mask. My view."),
    ("ll_net_say", "warp", f"comm window views {_TEAM} silent rounds round epoch view", "st.relaxed.sys view; st.relaxed.sys net",
     "Tell all ranks but those in `silent` my view in a round."),
    ("ll_net_hear", "block", "window views rank num_ranks mask rounds round epoch view timeout", "ld.relaxed.sys view; bar.sync",
     "Wait for the views of all members that are not in mine, or for what somebody decided. The view after that, with SAID if it is decided."),
    ("ll_net_conclude_members", "warp",
     f"comm window heads arrived {_TEAM} adds made told members masked_at epoch signature mask view left notice fail record",
     "ld.weak masked_at; ld.weak adds; ld.weak made; ld.relaxed.sys head; ld.relaxed.sys arrived; ld.relaxed.sys net; st.weak masked_at; "
     "st.weak adds; st.weak made; st.weak told; st.weak members",
     "The code of this attempt, the mask of the next, and the async error if a rank was masked or a masked one came."),
    ("ll_net_count_messages", "block", f"window messages most {_SIZES} plane_rows message_bytes rank mask epoch expert_counters",
     "bar.sync; ld.weak staging; bar.sync; st.weak expert_counters",
     "Shared memory: rows of each member for my experts, by the messages that came. The grid's last block writes how many rows each receives."),
    ("ll_net_count_member_rows", "block",
     "window messages slot_ids most num_topk num_ranks plane_rows message_bytes rank mask epoch src_rank_counters",
     "bar.sync; ld.weak staging; bar.sync; st.weak src_rank_counters; st.weak slot_ids; bar.sync",
     "RANK_MAJOR: the grid's last block writes how many rows each member sent, and -1 in the ids of all rows that nobody filled."),
    ("ll_net_return_member_rows", "warp",
     "comm rows_window slot window returned remote source token most num_topk row_bytes put_bytes returned_bytes rank team_size contexts",
     f"ld.weak remote; ld.weak slot; st.weak staging; {_ISSUE}",
     "Send what experts made of a received token's rows back to its source, the first bytes of each."),
    ("ll_net_gather_member_row", "warp",
     f"window returned returned_bytes table weights out token {_SIZES} plane_rows row_bytes token_type rank mask",
     "ld.weak table; ld.nc weights; ld.weak returned; st.weak out", "`gather_row` of a whole row from what members sent back."),
    ("ll_net_sum_member_row", "warp",
     "window returned returned_bytes table out token num_topk num_ranks plane_rows row_bytes token_type rank mask",
     "ld.weak table; ld.weak returned; st.weak out", "`sum_row` of a whole row from what members sent back."),
    ("ll_net_sum_packed_member_row", "warp",
     f"window returned returned_bytes table weights out token {_SIZES} plane_rows row_bytes rank mask",
     "ld.weak table; ld.weak returned; ld.nc weights; st.weak out", "`sum_packed_row` of a whole row from what members sent back."),
    # ---- mask_clean ---------------------------------------------------------------------------------------------------
    ("ll_net_clean_epoch", "block", "window joins rank num_ranks epoch", "ld.relaxed.sys join; bar.sync",
     "The latest epoch of `mask_clean` that any rank came to, at least mine."),
    ("ll_net_is_told", "block", "window views rank num_ranks rounds own mask", "ld.relaxed.sys view; bar.sync",
     "Whether others told me that I am out, of an attempt that I have yet to make."),
    ("ll_net_send_join", "warp", f"comm window joins {_TEAM} made epoch own stranded", "ld.weak made; st.relaxed.sys join; st.relaxed.sys net",
     "Tell all ranks that I came to `mask_clean`, my next epoch, and how many adds I made at each."),
    ("ll_net_wait_joins", "block", f"comm window joins views {_TEAM} contexts rounds epoch timeout",
     "ld.relaxed.sys join; ld.relaxed.sys view; ld.acquire.sys net; bar.sync",
     "Wait until all ranks came, and all they ever put is here; or for a first view with me in it. My view; FAILED if I should go where others are."),
    ("ll_net_all_stranded", "warp", "window joins rank num_ranks epoch view", "ld.relaxed.sys join",
     "1 if all that are not in a view were told to be out: those that went on are not among them."),
    ("ll_net_signal_clean", "warp", f"comm {_TEAM} contexts", _ISSUE, "Add 1 to all my signals at all networked ranks."),
    ("ll_net_readmit", "warp",
     f"comm window joins {_TEAM} epoch code view adds made told members masked_at word header num_slots own",
     "ld.weak adds; ld.weak made; ld.weak masked_at; ld.weak members; ld.relaxed.sys join; ld.relaxed.sys net; st.weak adds; st.weak made; "
     "st.weak told; st.weak members; st.weak masked_at; st.weak epoch; st.weak header",
     "The end of `mask_clean`: members, the largest of their epochs + 1, what is awaited of each, empty slots; with a code only that I am out."),
)
"""In the order of an operation's life."""
