"""The operations that only HIGH_THROUGHPUT kernels over several teams use: name, scope, parameters, effects, doc, may_fail, as in ``ht_vocabulary``.

``net`` stands for the network: a store to it is a put or a signal (its source bytes and its target are what the put names), an acquiring load of it
the wait for a signal. Puts and signals carry what the issuing warp's last system fence released. The protocol is that of ``ncclep_py.ht_net_map``.
"""

from __future__ import annotations

__all__ = ["HT_NET_OPERATIONS", "HT_NET_PARAMETERS"]

HT_NET_PARAMETERS = {
    "comm": "address of the device communicator",
    "team_size": "ranks of a team",
    "channels": "channels of a group",
    "contexts": "contexts of the network",
    "adds": "what each signal of a channel gets per operation",
    "count": "operations of this group (or barriers) before this one",
    "peer": "a rank",
    "context": "context of the network",
    "signal": "number of a signal at the peer",
    "amount": "what is added to the signal",
    "least": "value of the signal (or counter) to wait for",
    "target_at": "window offset at the peer",
    "source_at": "window offset at this rank",
    "num_bytes": "bytes of a put",
    "tag": "window offset of a TAG",
    "low": "low 32 bits of a word",
    "wanted": "team",
    "sent": "window offset of what is to be put",
    "staged": "window offset of what was put here",
    "header_bytes": "bytes of a header",
    "remote_routes": "address of [T - 1, M, K] routes of remote tokens in my team",
    "remote_places": "address of [T - 1, M, K] places of remote tokens in my team",
    "team_bytes": "bytes from one team's staging to the next",
    "net_hits": "window offset of a rail peer's HITS",
    "net_kept": "window offset of a rail peer's KEPT",
    "kept_sent": "window offset of my KEPT for all experts",
    "first_rank": "first rank of a team",
    "rows_window": "NCCL window handle of the rows",
    "forward": "0 in a backward pass",
}
"""Meaning of the parameters."""

_FAILURE = "fail record timeout"
_TEAM = "rank num_ranks team_size"
_SIZES = "num_topk num_experts num_ranks"
_ISSUE = "fence.acq_rel.sys; st.relaxed.sys net"

HT_NET_OPERATIONS: tuple[tuple, ...] = (
    # ---- who and where --------------------------------------------------------------------------------------------------
    ("ht_net_blocks", "warp", "", "", "Blocks of my grid."),
    ("ht_net_warps", "warp", "", "", "Warps of my block."),
    ("ht_net_sync", "block", "", "bar.sync", "What my block did is ordered before what follows."),
    ("ht_net_count", "warp", "word", "ld.weak count", "Operations of this group before this one; lane 0's reading, for all lanes."),
    ("ht_net_advance", "warp", "word count", "st.weak count", "One more."),
    # ---- the network ----------------------------------------------------------------------------------------------------
    ("ht_net_put", "warp", "comm window peer context target_at source_at num_bytes", _ISSUE, "Put bytes of my window to a rail peer's."),
    ("ht_net_put_rows", "warp", "comm window peer context target_at source_at routes first end num_topk row_bytes wanted team_size",
     f"ld.weak routes; {_ISSUE}", "Put the rows of those of tokens [first, end) that have a row in team `wanted`; neighbours in one put."),
    ("ht_net_put_tag", "warp", "comm window peer context target_at epoch low", "st.relaxed.sys net", "Put the word {epoch, low}."),
    ("ht_net_signal", "warp", "comm peer context signal amount", _ISSUE, "Add to a rail peer's signal, after all puts to it on this context."),
    ("ht_net_wait_chunk", "block", f"comm window tag peer context signal least rank epoch {_FAILURE}",
     "ld.acquire.sys net; ld.relaxed.sys tag; bar.sync",
     "Acquire, system scope: wait for a signal, then look at the chunk's TAG. Non-zero if it does not come, or its sender gave up.", True),
    # ---- head -----------------------------------------------------------------------------------------------------------
    ("ht_net_publish_head", "warp", "window heads rank num_ranks team_size epoch signature status", "fence.acq_rel.sys; st.relaxed.sys head",
     "`publish_head` to the ranks of my team."),
    ("ht_net_enter", "block", f"comm window heads {_TEAM} channels contexts adds count epoch signature status {_FAILURE}",
     f"ld.acquire.sys net; {_ISSUE}; bar.sync",
     "Drain: wait until all that my rail peers put in earlier operations is here; then put my HEAD to them, and signal it. Non-zero if one's is not.",
     True),
    ("ht_net_wait_heads", "block", f"window heads {_TEAM} epoch signature {_FAILURE}", "ld.acquire.sys head; bar.sync",
     "`wait_heads` of all ranks; those of other teams are in the window of my team's rank of the same index, which is to blame if it is not here.",
     True),
    ("ht_net_wait_entered", "block", f"comm {_TEAM} channels count epoch {_FAILURE}", "ld.acquire.sys net; bar.sync",
     "Acquire, system scope: wait for the HEAD signals of my rail peers, after which puts to them are safe.", True),
    ("ht_net_publish_abort", "warp", "window heads arrived rank num_ranks team_size epoch fail",
     "ld.relaxed.gpu fail; st.relaxed.sys head; st.relaxed.sys arrived", "`publish_abort` to the ranks of my team."),
    ("ht_net_publish_arrived", "warp", "window arrived rank team_size epoch", "fence.acq_rel.sys; st.relaxed.sys arrived",
     "`publish_arrived` to the ranks of my team."),
    ("ht_net_wait_arrived", "block", f"window arrived rank team_size epoch {_FAILURE}", "ld.acquire.sys arrived; bar.sync",
     "`wait_arrived` of the ranks of my team.", True),
    # ---- update ---------------------------------------------------------------------------------------------------------
    ("ht_net_publish_hits", "block", "window hits rank num_ranks num_experts by_rank epoch team_size", "st.relaxed.sys hits",
     "`ht_publish_hits` to the ranks of my team."),
    ("ht_net_forward_hits", "block", "window net_hits hits rank num_ranks num_experts by_rank epoch peer team_size",
     "ld.weak net_hits; st.relaxed.sys hits", "Tell my team the HITS that rail peer `peer` put here."),
    ("ht_net_wait_hits", "block", f"window hits heads {_TEAM} num_experts by_rank epoch {_FAILURE}",
     "ld.relaxed.sys hits; ld.relaxed.sys head; bar.sync",
     "`ht_wait_hits`. HITS of other teams are forwarded by my team's rank of that index, which may tell (in its HEAD) that it gave up, and on whom; "
     "it is to blame if it does not, so the deadline is twice its own. A rank of my team may tell so of its own HITS, too.", True),
    ("ht_net_overflows", "block", "num_experts num_ranks by_rank budget first_rank team_size", "", "1 if KEPT are told to ranks of this team."),
    ("ht_net_publish_kept", "block", f"window kept_rows kept_sent place_table num_tokens {_SIZES} by_rank budget rank epoch team_size",
     "ld.weak place_table; bar.sync; st.relaxed.sys kept_rows; st.relaxed.sys kept_sent; bar.sync",
     "`ht_publish_kept` to the ranks of my team; for other teams the words are prepared."),
    ("ht_net_forward_kept", "block", "window net_kept kept_rows num_experts num_ranks by_rank budget rank peer team_size",
     "ld.weak net_kept; st.relaxed.sys kept_rows", "Tell the ranks of my team that overflow the KEPT that rail peer `peer` put here."),
    ("ht_net_wait_kept", "block", f"window kept_rows heads {_TEAM} num_experts by_rank budget epoch {_FAILURE}",
     "ld.relaxed.sys kept_rows; ld.relaxed.sys head; bar.sync",
     "Wait for KEPT of all ranks, if this rank overflows, with blame as in `ht_net_wait_hits`; `ht_store_zones` then adds them up.",
     True),
    # ---- dispatch ---------------------------------------------------------------------------------------------------------
    ("ht_net_stage_row", "warp", "rows_window slot window sent tokens routes token num_topk row_bytes rank team_size",
     "ld.weak routes; ld.nc tokens; st.weak slot; st.weak staging",
     "Read a token row once; write it to its rows in my team, and to send staging if another team wants it."),
    ("ht_net_stage_header", "warp", "window sent routes place_table weights token num_tokens num_topk header_bytes rank forward",
     "ld.weak routes; ld.weak place_table; ld.nc weights; st.weak header_sent",
     "Header of one token in send staging; one without rows if there is no such token."),
    ("ht_net_take_header", "warp", f"window staged remote_routes remote_places token {_SIZES} header_bytes rank team_size",
     "ld.weak header_staged; st.weak remote_routes; st.weak remote_places",
     "Keep of a received header what concerns my team."),
    ("ht_net_forward_row", "warp", "rows_window slot window staged remote_routes token num_topk row_bytes rank",
     "ld.weak remote_routes; ld.weak staging; st.weak slot", "Fan a received row out to its rows in my team."),
    ("ht_net_scatter_weights", "warp", f"window recv_idx recv_weights weights routes place_table token {_SIZES} by_rank global_ids rank team_size",
     "ld.weak routes; ld.weak place_table; ld.nc weights; st.weak recv_idx; st.weak recv_weights", "`ht_scatter_weights` inside my team."),
    ("ht_net_forward_weights", "warp",
     f"window recv_idx recv_weights staged remote_routes remote_places token {_SIZES} by_rank global_ids header_bytes rank team_size",
     "ld.weak remote_routes; ld.weak remote_places; ld.weak header_staged; st.weak recv_idx; st.weak recv_weights",
     "`ht_scatter_weights` of a remote token inside my team."),
    # ---- combine ----------------------------------------------------------------------------------------------------------
    ("ht_net_partial_row", "warp", "rows_window slot window sent remote_routes token num_topk row_bytes token_type rank",
     "ld.weak remote_routes; ld.weak slot; st.weak staging",
     "A remote token's sum over my team: fp32 in route order, one rounding, into send staging; nothing if it has no rows here."),
    ("ht_net_partial_grads", "warp", f"window recv_weights sent remote_places token {_SIZES} by_rank rank",
     "ld.weak remote_places; ld.weak recv_weights; st.weak grads_sent", "Gradients of a remote token's weights in my team, into send staging."),
    ("ht_net_reduce_row", "warp",
     "rows_window slot window staged routes out token num_topk row_bytes token_type rank num_ranks team_size team_bytes",
     "ld.weak routes; ld.weak slot; ld.weak staging; st.weak out",
     "One combined row: fp32 sum of my team's rows in route order, then of the other teams' sums by distance, one rounding."),
    ("ht_net_reduce_grads", "warp", f"window recv_weights staged place_table grads token {_SIZES} by_rank rank team_size team_bytes",
     "ld.weak place_table; ld.weak recv_weights; ld.weak grads_staged; st.weak grads", "`ht_gather_weights`, other teams' out of staging."),
)
"""In the order of an operation's life."""
