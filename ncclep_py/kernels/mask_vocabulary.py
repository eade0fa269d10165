"""The operations that only kernels of groups with ``enable_mask`` use, as ``kernels.ops`` declares them.

Rules: M1 to M7 of ``ncclep_py.member_map``. Besides what is listed, the operations that wait for other ranks and may fail lock votes where an attempt
ends early (``atom.acq_rel.sys``, ``fence.sc.sys``), and `wait_joins` and `settle` set their own rank's vote the same way.
"""

from __future__ import annotations

__all__ = ["MASK_OPERATIONS", "MASK_PARAMETERS"]

MASK_PARAMETERS = {
    "joins": "window offset of JOIN",
    "details": "window offset of the JOINs' details",
    "votes": "window offset of this rank's VOTE; the verdict is the word after it at rank 0",
    "mask": "bit r set: rank r is masked out",
    "extra": "third word of a JOIN's details",
    "commits": "1 if the operation cannot fail once all JOINs are there, so that passing commits it",
    "members": "address of this rank's mask",
    "masked_at": "address of what was reported about masked ranks, [32] u64",
    "outcome": "address of the outcome of the last attempt",
    "result": "code the blocks of this rank end the attempt with",
    "waited": "address of the nanoseconds waited for each rank, [32] u64",
    "wrote": "address of the last vote this rank cast before an operation's rows",
    "code": "code so far",
    "before": "mask before",
    "left": "attempts left",
    "notice": "address of the async error (host memory)",
    "num_slots": "payload slots",
}
"""Meaning of the parameters."""

_FAILURE = "fail record timeout"

MASK_OPERATIONS: tuple[tuple, ...] = (
    ("read_mask", "warp", "members", "ld.weak members", "Mask of this attempt; lane 0's reading, for all lanes."),
    ("next_epoch", "warp", "epoch", "", "The epoch after `epoch` (mod 2^32)."),
    ("publish_join", "warp", "window joins details rank num_ranks epoch signature mask extra status",
        "st.relaxed.sys detail; fence.acq_rel.sys; st.relaxed.sys join",
        "Release, system scope: tell all ranks that I entered this attempt, which operation it is, and my mask. Lanes over ranks."),
    ("wait_joins", "block", f"window joins details votes rank num_ranks epoch signature mask commits waited wrote {_FAILURE}",
        "ld.relaxed.sys join; fence.acq_rel.sys; ld.relaxed.sys detail; bar.sync",
        "Acquire, system scope: wait for JOIN of all members, then vote. 0, AGAIN for another attempt, or why the operation failed.", True),
    ("wait_member_counts", "block", f"window counts votes rank num_ranks num_experts epoch mask {_FAILURE}", "ld.relaxed.sys count; bar.sync",
        "`wait_counts` over members; 0, AGAIN or why the operation failed.", True),
    ("sum_member_counts", "block", f"window counts votes rank num_ranks num_experts epoch mask plane_rows expert_counters {_FAILURE}",
        "ld.relaxed.sys count; bar.sync; st.weak expert_counters; bar.sync",
        "`sum_counts` over members; 0, AGAIN or why the operation failed.", True),
    ("drop_rows", "block", "num_topk num_experts num_ranks plane_rows first end part table mask", "st.weak table; bar.sync",
        "After `assign_rows`: rows for experts of masked ranks become -1."),
    ("gather_member_row", "warp",
        "window slot table weights out token num_topk num_experts num_ranks plane_rows row_bytes token_type begin_vector end_vector mask",
        "ld.weak table; ld.nc weights; ld.weak slot; st.weak out", "`gather_row` without the rows of masked ranks."),
    ("tell_rows", "warp", "window details rank num_ranks epoch", "st.relaxed.sys detail",
        "RANK_MAJOR, after `count_ranks`: tell every rank how many rows it gets from me, in the last word of my JOIN's details. Whoever commits has "
        "seen it: ARRIVED follows."),
    ("take_member_rows", "block", "window details slot_ids rank num_ranks num_topk plane_rows epoch mask src_rank_counters",
        "ld.relaxed.sys detail; st.weak src_rank_counters; bar.sync; st.weak slot_ids",
        "`take_arrived_rows` of a committed attempt: rows received from each member, and -1 in the ids of all rows that nobody filled."),
    ("sum_member_row", "warp", "window slot table out token num_topk num_ranks plane_rows row_bytes token_type begin_vector end_vector mask",
        "ld.weak table; ld.weak slot; st.weak out", "`sum_row` without the rows of masked ranks."),
    ("sum_packed_member_row", "warp",
        "window slot table weights out token num_topk num_experts num_ranks plane_rows row_bytes begin_stretch end_stretch mask",
        "ld.weak table; ld.weak slot; ld.nc weights; st.weak out", "`sum_packed_row` without the rows of masked ranks."),
    ("settle", "block", f"window arrived votes rank num_ranks epoch mask waited {_FAILURE}",
        "ld.relaxed.sys arrived; fence.acq_rel.sys; bar.sync",
        "Acquire, system scope: wait for ARRIVED of all members, then commit. 0, AGAIN or why the operation failed.", True),
    ("publish_late", "warp", "window arrived rank num_ranks epoch wrote", "ld.weak wrote; st.relaxed.sys arrived",
        "Tell all ranks, if I began to write in this attempt, that I may have done so after they had masked me."),
    ("conclude", "warp", "window joins arrived votes rank num_ranks members masked_at epoch mask code left notice fail record",
        "ld.relaxed.sys vote; ld.weak masked_at; ld.relaxed.sys join; ld.relaxed.sys arrived; st.weak masked_at; st.weak members",
        "By the last block: the mask of the next attempt, and the async error if a rank was masked or a masked one came back. Returns the code."),
    ("tell_outcome", "warp", "outcome epoch result", "fence.acq_rel.gpu; st.relaxed.gpu outcome",
        "Release, gpu scope: tell the other blocks how this attempt ended."),
    ("await_outcome", "block", "outcome epoch timeout", "ld.relaxed.gpu outcome; fence.acq_rel.gpu; bar.sync",
        "Acquire, gpu scope: what the last block told."),
    ("read_verdict", "block", "window votes", "ld.relaxed.sys vote; bar.sync", "Mask of the next attempt, after AGAIN."),
    ("catch_up", "block", "window votes num_ranks", "ld.relaxed.sys vote; bar.sync", "The latest epoch anybody voted in."),
    ("is_stranded", "warp", "window votes rank num_ranks epoch mask before", "",
        "1 if the others went on without me, who would be at `epoch` and had mask `before`, and none of them is a member under `mask`."),
    ("readmit", "warp", "window details votes rank num_ranks epoch mask members masked_at word header num_slots",
        "ld.relaxed.sys detail; st.weak masked_at; st.weak members; st.weak epoch; st.weak header",
        "At the end of `mask_clean`: who is a member now (also as a verdict), the largest of the members' epochs + 1, and empty slots."),
)
"""Name, scope, parameters, effects, doc, may_fail."""
