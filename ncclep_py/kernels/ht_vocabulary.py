"""The operations that only HIGH_THROUGHPUT kernels use, as ``kernels.ops`` declares them: name, scope, parameters, effects, doc, may_fail.

Keys are what rows of a zone share: the expert (EXPERT_MAJOR), or the destination rank (FLAT, `by_rank`). A block's tokens are cut into `chunks`
shares, one warp each, so that warps number rows independently of each other and nevertheless in token order. Shared memory of an update:
``total, lower, all [columns], rank_total [R], start [chunks][keys]``; columns are the experts and, by rank, the ranks after them.
"""

from __future__ import annotations

__all__ = ["HT_OPERATIONS", "HT_PARAMETERS"]

HT_PARAMETERS = {
    "by_rank": "1 if keys are destination ranks (FLAT), 0 if they are experts (EXPERT_MAJOR)",
    "chunks": "shares of a block's tokens",
    "alignment": "rows a zone is padded to, a power of two",
    "budget": "most rows of a rank",
    "trap": "1 if rows beyond a budget are an error, 0 if they are dropped silently",
    "partials": "address of the counts of all blocks",
    "hits": "window offset of HITS",
    "kept_rows": "window offset of KEPT",
    "routes": "address of [T, K] {ids << 48 | rank << 32 | row}",
    "place_table": "address of [T, K] {expert << 40 | column << 32 | row}",
    "zones": "address of the zones of my experts and the received totals",
    "num_local": "experts of a rank, L",
    "expert_offsets": "address of [L] first rows of zones, 0 for none",
    "unpadded": "address of [L] rows of zones without pads, 0 for none",
    "total": "address of the number of received rows before any drop, 0 for none",
    "int_bytes": "bytes of a counter, 4 or 8",
    "recv_idx": "window offset of received ids",
    "recv_weights": "window offset of received weights",
    "global_ids": "1 if received ids are global, 0 if they are local",
    "visible": "rows the caller sees",
    "grads": "address of [T, K] float32",
    "source": "address of rows",
    "target": "address of rows",
}
"""Meaning of the parameters."""

_FAILURE = "fail record timeout"
_SIZES = "num_topk num_experts num_ranks"

HT_OPERATIONS: tuple[tuple, ...] = (
    # ---- update ---------------------------------------------------------------------------------------------------------
    ("ht_count", "block", f"topk_idx idx_bytes num_tokens {_SIZES} by_rank chunks partials header",
     "ld.nc topk_idx; bar.sync; st.weak partials; st.weak header",
     "Count the keys of this block's tokens, in all and per chunk; duplicates of an expert in a token count once. The maps become invalid."),
    ("ht_sum", "block", "partials num_experts num_ranks by_rank chunks", "ld.weak partials; bar.sync",
     "Shared memory: my totals, and for each chunk of this block the keys before it in my tokens."),
    ("ht_publish_hits", "block", "window hits rank num_ranks num_experts by_rank epoch", "st.relaxed.sys hits",
     "Tell all ranks my totals as words {epoch, count}; they order nothing. Threads over ranks and columns."),
    ("ht_wait_hits", "block", f"window hits rank num_ranks num_experts by_rank epoch {_FAILURE}", "ld.relaxed.sys hits; bar.sync",
     "Shared memory: the totals of lower ranks, and of all.", True),
    ("ht_assign", "block",
     f"topk_idx idx_bytes num_tokens {_SIZES} by_rank chunks alignment budget rank routes place_table",
     "ld.nc topk_idx; st.weak routes; st.weak place_table; bar.sync",
     "Routes and places of this block's tokens; a row at or beyond the budget becomes -1. Shared memory: starts of zones, rows of ranks."),
    ("ht_publish_kept", "block", f"window kept_rows place_table num_tokens {_SIZES} by_rank budget rank epoch",
     "ld.weak place_table; bar.sync; st.relaxed.sys kept_rows",
     "FLAT: tell every rank that overflows how many of its rows for each of its experts came from me and were not dropped. Must follow all HEADs."),
    ("ht_store_zones", "block",
     "window kept_rows rank num_ranks num_experts by_rank alignment budget trap zones expert_counters expert_offsets unpadded total int_bytes epoch "
     + _FAILURE,
     "ld.relaxed.sys kept_rows; bar.sync; st.weak zones; st.weak expert_counters; st.weak expert_offsets; st.weak unpadded; st.weak total",
     "Zones of my experts and received totals, for dispatch and for the caller. FLAT: wait for KEPT if I overflow. Records any overflow.",
     True),
    ("ht_map_status", "warp", "header handle status", "ld.weak header", "`status`, or a refusal if the maps hold no update of `handle`."),
    # ---- dispatch -----------------------------------------------------------------------------------------------------------
    ("ht_scatter_row", "warp", "window slot tokens routes token num_topk row_bytes begin_vector end_vector",
     "ld.weak routes; ld.nc tokens; st.weak slot", "Read a piece of one token row once, write it to all its places."),
    ("ht_scatter_weights", "warp",
     f"window recv_idx recv_weights weights routes place_table token {_SIZES} by_rank global_ids",
     "ld.weak routes; ld.weak place_table; ld.nc weights; st.weak recv_idx; st.weak recv_weights",
     "Weights (FLAT: and ids) of one token to all its rows; a duplicate expert has the sum of its weights in k order."),
    ("ht_zero_pads", "warp", "window slot zones rank num_local row_bytes", "ld.weak zones; st.weak slot",
     "EXPERT_MAJOR: zero this warp's share of the pad rows of mine at `slot`, of 4 bytes or whole vectors."),
    ("ht_clear_ids", "warp", "window recv_idx recv_weights zones rank num_local num_topk visible",
     "ld.weak zones; st.weak recv_idx; st.weak recv_weights",
     "FLAT: -1 and 0 in this warp's share of the ids and weights of my slot beyond the received rows, up to `visible`."),
    ("ht_check_rows", "warp", "zones num_local visible rank epoch fail record", "ld.weak zones",
     "Record an overflow if more rows were received than the caller's `visible`."),
    # ---- combine ------------------------------------------------------------------------------------------------------------
    ("ht_gather_row", "warp", "window slot routes out token num_topk row_bytes token_type begin_vector end_vector",
     "ld.weak routes; ld.weak slot; st.weak out", "A piece of one combined row: fp32 sum of the token's rows in route order, one rounding."),
    ("ht_gather_weights", "warp", f"window recv_weights place_table grads token {_SIZES} by_rank",
     "ld.weak place_table; ld.weak recv_weights; st.weak grads",
     "Gradients of one token's weights: each from its place, 0 where there is none."),
    # ---- a caller's own tensors -----------------------------------------------------------------------------------------------
    ("ht_copy_rows", "warp", "source target zones num_local visible row_bytes", "ld.weak zones; ld.weak source; st.weak target",
     "Copy this warp's share of the received rows, at most `visible` of them; the count stays on the device."),
)
"""In the order of an operation's life."""
