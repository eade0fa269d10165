"""The operations that only LOW_LATENCY kernels over several teams use: name, scope, parameters, effects, doc, may_fail, as in ``ht_vocabulary``.

``net`` stands for the network, as in ``ht_net_vocabulary``, whose operations inside a team these kernels use, too. The protocol is that of
``ncclep_py.ll_net_map``. Signal 2 * source is a source's HEAD, 2 * source + 1 its DATA.
"""

from __future__ import annotations

__all__ = ["LL_NET_OPERATIONS", "LL_NET_PARAMETERS"]

LL_NET_PARAMETERS = {
    "counts_sent": "window offset of my rows per expert",
    "net_counts": "window offset of networked sources' rows for my team's experts",
    "messages": "window offset of messages received",
    "returned": "window offset of rows that came back",
    "tags": "window offset of TAGS",
    "remote": "address of [R, M, K] rows in the slot of received (source, token, k)",
    "most": "most tokens of a rank, M",
    "words": "4-byte words of a (token, k) in shared memory and in a header: 1, its row; RANK_MAJOR 3, row, id and weight",
    "put_bytes": "bytes that are put: of a message header, row and scale row",
    "message_bytes": "bytes from one message to the next",
    "scale_bytes": "bytes of a scale row, 0 for none",
    "sent_scales": "window offset of the scale row of my first message",
}
"""Meaning of the parameters that no other vocabulary has."""

_FAILURE = "fail record timeout"
_TEAM = "rank num_ranks team_size"
_SIZES = "num_topk num_experts num_ranks"
_ISSUE = "fence.acq_rel.sys; st.relaxed.sys net"

LL_NET_OPERATIONS: tuple[tuple, ...] = (
    ("ll_net_enter", "block", f"comm window heads {_TEAM} contexts count epoch signature status {_FAILURE}",
     f"ld.acquire.sys net; {_ISSUE}; bar.sync",
     "Drain: wait until all that networked ranks put in earlier operations is here; then put my HEAD to them, and signal it. Non-zero if one's is "
     "not.", True),
    ("ll_net_wait_heads", "block", f"comm window heads {_TEAM} count epoch signature {_FAILURE}", "ld.acquire.sys head; ld.acquire.sys net; bar.sync",
     "Acquire, system scope: `wait_heads` of all ranks, then the HEAD signals of networked ones, after which puts to them are safe.", True),
    ("ll_net_publish_counts", "block", f"window counts counts_sent {_TEAM} num_experts epoch", "st.relaxed.sys count; st.weak counts_sent; bar.sync",
     "`publish_counts` to the ranks of my team; block 0 prepares what is put to others."),
    ("ll_net_put_counts", "warp", f"comm window counts_sent net_counts {_TEAM} num_experts", _ISSUE,
     "Put to each networked rank my rows for its team's experts, on context 0."),
    ("ll_net_signal", "warp", f"comm {_TEAM} context", _ISSUE, "Add 1 to my DATA signal of a context at each networked rank."),
    ("ll_net_wait_counts", "block",
     f"comm window counts net_counts {_TEAM} num_experts count epoch plane_rows expert_counters {_FAILURE}",
     "ld.acquire.sys net; ld.relaxed.sys count; ld.weak net_counts; bar.sync; st.weak expert_counters",
     "Wait for the counts of all ranks for my team's experts. Shared memory: what lower ranks send to each of them, and to each of mine before "
     "each source. The grid's last block writes how many rows my experts receive.", True),
    ("ll_net_place_rows", "block", f"{_SIZES} plane_rows first end part table rank team_size epoch fail record", "st.weak table; bar.sync",
     "Turn numbers among my own rows into final rows, for experts of my team; those beyond a plane become -1 and are recorded."),
    ("ll_net_send_row", "warp",
     f"comm window sent messages tokens token first end {_SIZES} plane_rows row_bytes words header_bytes put_bytes message_bytes rank team_size "
     "contexts epoch", f"ld.nc tokens; st.weak sent; {_ISSUE}",
     "Make the message of a token and put it to every networked rank that hosts one of its experts. Its scale row (row_bytes 0: its row, too) stands "
     "there already."),
    ("ll_net_stage_row", "warp", f"window sent tokens token first {_SIZES} plane_rows row_bytes message_bytes rank team_size",
     "ld.nc tokens; st.weak sent", "Copy a row of a token that networked ranks want to its place in the token's message."),
    ("ll_net_quantise_row", "warp", "window sent sent_scales tokens token first num_topk num_experts row_bytes round_scales message_bytes rank",
     "ld.nc tokens; st.weak sent; st.weak sent_scales", "`quantise_row` into the message of a token that has any expert."),
    ("ll_net_scatter_row", "warp", f"window slot tokens token first {_SIZES} plane_rows row_bytes rank team_size", "ld.nc tokens; st.weak slot",
     "`scatter_row` of a whole row inside my team."),
    ("ll_net_spread_row", "warp", f"window slot sent token first {_SIZES} plane_rows row_bytes message_bytes rank team_size",
     "ld.weak sent; st.weak slot", "`ll_net_scatter_row` of a row that this warp made in the token's message."),
    ("ll_net_put_tags", "warp", f"comm window tags {_TEAM} count epoch low", "ld.acquire.sys net; st.relaxed.sys net",
     "Put my TAG, on context 0, to each networked rank whose HEAD has come."),
    ("ll_net_wait_data", "block", f"comm window tags {_TEAM} contexts count epoch {_FAILURE}", "ld.acquire.sys net; ld.relaxed.sys tag; bar.sync",
     "Acquire, system scope: wait for the DATA signals of networked ranks on all contexts, then look at their TAGS. Non-zero if one does not come, "
     "or gave up.", True),
    ("ll_net_take_row", "warp",
     f"rows_window slot slot_scales window messages remote source token most {_SIZES} plane_rows row_bytes scale_bytes header_bytes message_bytes "
     "rank epoch fail record", "ld.weak staging; st.weak slot; st.weak slot_scales; st.weak remote",
     "Copy a received row and its scale row to their places, and keep them."),
    # ---- RANK_MAJOR ---------------------------------------------------------------------------------------------------
    ("ll_net_send_routing", "warp",
     f"window slot_ids slot_weights table token first end {_SIZES} plane_rows global_ids rank team_size",
     "st.weak table; st.weak slot_ids; st.weak slot_weights", "`send_routing` to the ranks of my team; all its rows to the table."),
    ("ll_net_take_token", "warp",
     f"rows_window slot slot_scales window slot_ids slot_weights messages remote source token most {_SIZES} plane_rows row_bytes scale_bytes "
     "header_bytes message_bytes global_ids rank epoch",
     "ld.weak staging; st.weak slot; st.weak slot_scales; st.weak slot_ids; st.weak slot_weights; st.weak remote",
     "Copy what a message brings to its place: row, scale row, ids (-1 where another rank hosts the expert) and weights; and keep the place."),
    ("ll_net_publish_arrived_rows", "warp", "window arrived rank team_size epoch", "fence.acq_rel.sys; st.relaxed.sys arrived",
     "`publish_arrived_rows` to the ranks of my team."),
    ("ll_net_put_row_tags", "warp", f"comm window tags {_TEAM} epoch", "st.relaxed.sys net",
     "Put my TAG to all networked ranks, whose HEADs have come: nothing failed, and how many rows they get from me."),
    ("ll_net_take_arrived_rows", "block", f"window arrived tags slot_ids {_TEAM} num_topk plane_rows epoch src_rank_counters",
     "ld.relaxed.sys arrived; ld.relaxed.sys tag; st.weak src_rank_counters; bar.sync; st.weak slot_ids",
     "After `ll_net_wait_data` and `ht_net_wait_arrived`: `take_arrived_rows`, of other teams from their TAGs."),
    # ---- combine ------------------------------------------------------------------------------------------------------
    ("ll_net_return_rows", "warp", "comm rows_window slot window returned remote source token most num_topk row_bytes put_bytes contexts",
     f"ld.weak remote; {_ISSUE}", "Put what experts made of a received token's rows back to its source, the first bytes of each."),
    ("ll_net_gather_row", "warp",
     f"rows_window slot window returned table weights out token {_SIZES} plane_rows row_bytes token_type rank team_size",
     "ld.weak table; ld.nc weights; ld.weak slot; ld.weak returned; st.weak out",
     "`gather_row` of a whole row: rows of my team from where they are, others from what came back."),
    ("ll_net_sum_row", "warp", "rows_window slot window returned table out token num_topk num_ranks plane_rows row_bytes token_type rank team_size",
     "ld.weak table; ld.weak slot; ld.weak returned; st.weak out", "`sum_row` of a whole row, from the same places."),
    ("ll_net_sum_packed_row", "warp", f"rows_window slot window returned table weights out token {_SIZES} plane_rows row_bytes rank team_size",
     "ld.weak table; ld.weak slot; ld.weak returned; ld.nc weights; st.weak out", "`sum_packed_row` of a whole row, from the same places."),
)
"""In the order of an operation's life."""
