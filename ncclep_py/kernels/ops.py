"""The vocabulary of the kernels, declared once for the GPU, the simulator and the check of the compiled PTX.

Every operation takes and returns 64-bit signed integers only (addresses, counts, flags), so that no kernel mixes signed and unsigned or slips
into floating point; epochs are 32-bit counters that wrap, and only operations compare or advance them. Scopes:

* ``warp``: all 32 lanes call with equal arguments;
* ``block``: all warps of the block call with equal arguments, and the operation contains the barrier it needs.

`effects` lists an operation's memory accesses, fences and barriers in program order, in PTX words followed by the noun of ``memory_map`` they
touch. The simulator performs them in this order with this strength; ``tests/test_ptx.py`` finds the same list in the compiled device code.
``weak`` accesses are plain ones (ordered only by fences and barriers around them), ``nc`` loads may see memory as it was before the kernel,
``cp.async`` loads the same (into shared memory, where their own warp waits for them).
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from ncclep_py.kernels.ht_net_vocabulary import HT_NET_OPERATIONS, HT_NET_PARAMETERS
from ncclep_py.kernels.ht_vocabulary import HT_OPERATIONS, HT_PARAMETERS
from ncclep_py.kernels.ll_net_masked_vocabulary import LL_NET_MASKED_OPERATIONS, LL_NET_MASKED_PARAMETERS
from ncclep_py.kernels.ll_net_staged_vocabulary import LL_NET_STAGED_OPERATIONS, LL_NET_STAGED_PARAMETERS
from ncclep_py.kernels.ll_net_vocabulary import LL_NET_OPERATIONS, LL_NET_PARAMETERS
from ncclep_py.kernels.mask_vocabulary import MASK_OPERATIONS, MASK_PARAMETERS
from ncclep_py.kernels.net_vocabulary import NET_OPERATIONS, NET_PARAMETERS

__all__ = ["HT_NET_OPS", "LL_NET_OPS", "NET_OPS", "OPS", "PARAMETERS", "Op", "Vocabulary"]


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: C symbol without its ``ep_`` prefix, and the attribute kernels use.
        scope: ``warp`` or ``block``.
        parameters: names of its 64-bit integer parameters, see `PARAMETERS`.
        effects: accesses, fences and barriers in order.
        doc: what it does and what it returns.
        may_fail: it can give up: returns a non-zero code, sets FAIL and writes the error record.
    """

    name: str
    scope: str
    parameters: tuple[str, ...]
    effects: tuple[str, ...]
    doc: str
    may_fail: bool = False


PARAMETERS = {
    "window": "NCCL window handle",
    "rank": "my rank",
    "num_ranks": "ranks of the group, R",
    "num_experts": "experts of the group, E",
    "num_topk": "experts per token, K",
    "num_tokens": "my tokens in this operation, T",
    "epoch": "this operation's epoch, 0 <= epoch < 2^32",
    "heads": "window offset of HEAD",
    "arrived": "window offset of ARRIVED",
    "counts": "window offset of COUNTS",
    "slot": "window offset of the payload slot",
    "signature": "what this operation is, 64 bits",
    "status": "0 for go, else status << 24 | detail",
    "fail": "address of FAIL and, after it, the claim of the error record, and where waits are counted (memory_map.WAITS)",
    "record": "address of the error record (host memory)",
    "timeout": "nanoseconds a wait may last",
    "topk_idx": "address of [T, K] expert ids",
    "idx_bytes": "bytes of one id, 4 or 8",
    "tokens": "address of [T] rows",
    "scales": "address of the scale rows of [T] rows",
    "weights": "address of [T, K] float32",
    "out": "address of [T] rows",
    "table": "address of the slot's row table, [T, K] int32",
    "header": "address of the slot's header",
    "handle": "id of the handle",
    "held": "what `read_header` returned",
    "expert_counters": "address of [L] int32",
    "topk_weights": "address of [T, K] float32, to be sent",
    "slot_scales": "window offset of the slot's received scale rows",
    "round_scales": "1: scales are powers of two",
    "counters": "address of int32, rows in each of this rank's planes",
    "row_scales": "address of float32, the scale of each row of this rank's planes",
    "own_planes": "planes of received rows on this rank",
    "plane_capacity": "rows of one of them",
    "begin_stretch": "first 512 columns of a piece of the row, counted in 512 columns",
    "end_stretch": "end of the piece",
    "slot_ids": "window offset of the slot's received ids, [R, M, K] int32",
    "slot_weights": "window offset of the slot's received weights, [R, M, K] float32",
    "src_rank_counters": "address of [R] int32",
    "global_ids": "0 if received ids count from the receiver's first expert, 1 if from the group's",
    "plane_rows": "rows of one expert's plane; RANK_MAJOR: of one rank's planes, R * M",
    "row_bytes": "bytes of one row",
    "token_type": "config.TokenType",
    "token": "index of a token",
    "fetched": "the token this warp fetched, -1 for none",
    "reserved": "4-byte words of shared memory in use before the rows that are fetched",
    "first": "first token of this block",
    "end": "end of this block's tokens",
    "part": "0 if this block is the first to work on its tokens",
    "begin_vector": "first 16-byte vector of a piece of the row",
    "end_vector": "end of the piece",
    "word": "address of a 64-bit word",
    "bank_bytes": "bytes from one bank to the other, 0 if there is one bank",
    "kept": "address of the slot's counts of received rows, [L] int32",
    "origins": "window offset of the slot's ORIGINS",
    "copied": "address of the staging slot's row table, [T, K] int32",
    "rows": "address of the slot's rows, or of a tensor like it",
    "staging": "window offset of a staging slot",
    "num_planes": "planes of a slot: local experts, RANK_MAJOR: ranks",
    "places": "places of a rank in a staging slot, M * K",
    "target": "address of a tensor like `rows`",
    "row": "index of a received row, counted over the planes",
    "counter": "address of BLOCKS_DONE",
    "trace": "what `trace_begin` or the last `stamp` returned",
    "phase": "stamps.Step",
} | MASK_PARAMETERS | HT_PARAMETERS | HT_NET_PARAMETERS | LL_NET_PARAMETERS | LL_NET_STAGED_PARAMETERS | LL_NET_MASKED_PARAMETERS | NET_PARAMETERS
"""Meaning of the parameters."""


def _op(name: str, scope: str, parameters: str, effects: str, doc: str, may_fail: bool = False) -> Op:
    listed = tuple(e.strip() for e in effects.split(";") if e.strip())
    return Op(name, scope, tuple(parameters.split()), listed, doc, may_fail)


_FAILURE = "fail record timeout"

OPS: dict[str, Op] = {op.name: op for op in (
    # ---- who and where: no memory --------------------------------------------------------------------------------
    _op("block_idx", "warp", "", "", "Index of my block in the grid."),
    _op("warp_idx", "warp", "", "", "Index of my warp in the block."),
    _op("first_token", "warp", "num_tokens", "", "First of the tokens this block works on; blocks share tokens if these are fewer."),
    _op("end_token", "warp", "num_tokens", "", "End of the tokens this block works on."),
    _op("token_part", "warp", "num_tokens", "", "Which of the blocks that share my tokens this one is, from 0."),
    _op("warp_token", "warp", "num_tokens", "", "First token of this warp."),
    _op("token_step", "warp", "num_tokens", "", "Distance between two tokens of one warp."),
    _op("begin_vector", "warp", "num_tokens row_bytes", "", "First 16-byte vector of this warp's piece of each of its rows."),
    _op("end_vector", "warp", "num_tokens row_bytes", "", "End of this warp's piece."),
    # ---- timelines: nothing at all unless compiled for tracing, and then in no order with anything ------------------
    _op("trace_begin", "warp", "", "", "The first thing in a kernel that stamps: where its stamps go, 0 where there is nothing to write."),
    _op("stamp", "warp", "trace phase", "", "This block's warp 0 begins `phase` now. Returns where the next stamp goes."),
    # ---- epoch and life of an operation ------------------------------------------------------------------------------
    _op("read_epoch", "warp", "word", "ld.weak epoch", "Epoch of this operation; lane 0's reading, for all lanes."),
    _op("advance_epoch", "warp", "word epoch", "st.weak epoch", "The next operation of the stream has the next epoch (mod 2^32)."),
    _op("clear_fail", "warp", "fail", "st.weak fail", "Nothing failed: so that 2^32 operations later nobody takes this failure for a new one."),
    _op("store_header", "warp", "header epoch handle", "st.weak header", "The slot now holds what `handle` dispatched in `epoch`."),
    _op("read_header", "warp", "header", "ld.weak header", "Handle whose dispatch the slot holds, 0 for none."),
    _op("header_status", "warp", "held handle status", "", "`status`, or a refusal if `held` is not `handle`."),
    _op("check_header", "warp", "held handle rank epoch fail record", "", "Non-zero if `held` is not `handle`.", may_fail=True),
    _op("last_block", "block", "counter", "bar.sync; atom.acq_rel.gpu blocks_done; bar.sync",
        "1 in the block that comes here last, 0 in all others. What the other blocks did before is ordered before what follows."),
    _op("op_code", "block", "fail epoch", "ld.relaxed.gpu fail; bar.sync",
        "Code with which this rank gave up this operation, 0 if it did not; one warp reads, so that the block decides as one."),
    # ---- head ---------------------------------------------------------------------------------------------------
    _op("publish_head", "warp", "window heads rank num_ranks epoch signature status",
        "fence.acq_rel.sys; st.relaxed.sys head",
        "Release, system scope: tell all ranks that I entered this operation, and which it is, in two words that both carry the epoch. "
        "Lanes over ranks."),
    _op("wait_heads", "block", f"window heads rank num_ranks epoch signature {_FAILURE}",
        "ld.acquire.sys head; bar.sync",
        "Acquire, system scope: wait for HEAD of all ranks. Non-zero if one refused, gave up, differs in signature, is ahead or does not come.",
        may_fail=True),
    _op("publish_abort", "warp", "window heads arrived rank num_ranks epoch fail", "ld.relaxed.gpu fail; st.relaxed.sys head; st.relaxed.sys arrived",
        "Tell all ranks that I gave this operation up, and who was the culprit, unless every rank sees the reason itself."),
    # ---- counts -------------------------------------------------------------------------------------------------
    _op("count_experts", "block", "topk_idx idx_bytes num_tokens num_topk num_experts first end", "ld.nc topk_idx; bar.sync",
        "Shared memory: for every expert my rows in all, and my rows before this block's first token. Ids outside [0, E) count as none."),
    _op("publish_counts", "block", "window counts rank num_ranks num_experts epoch", "st.relaxed.sys count",
        "Tell all ranks how many rows I send to each expert, as words {epoch, count}; they order nothing. Blocks over ranks, threads over experts."),
    _op("wait_counts", "block", f"window counts rank num_ranks num_experts epoch plane_rows expert_counters {_FAILURE}",
        "ld.relaxed.sys count; bar.sync; st.weak expert_counters",
        "Add the counts of all lower ranks to the first row of each expert. The grid's last block waits for the higher ranks, too, and writes how "
        "many rows each local expert receives.", may_fail=True),
    _op("assign_rows", "block",
        "topk_idx idx_bytes num_topk num_experts num_ranks plane_rows first end part table rank epoch fail record",
        "ld.nc topk_idx; st.weak table; bar.sync",
        "Final global row of each (token, k) of this block, in (token, k) order, to shared memory and (part 0) to the row table; "
        "a row beyond its plane becomes -1 and is recorded."),
    # ---- rows ---------------------------------------------------------------------------------------------------
    _op("fetch_row", "warp", "tokens token end reserved row_bytes begin_vector end_vector", "cp.async tokens",
        "Start copying a piece of a token's row to shared memory (as much as there is room for), to be scattered later."),
    _op("scatter_row", "warp",
        "window slot tokens token fetched first reserved num_topk num_experts num_ranks plane_rows row_bytes begin_vector end_vector",
        "ld.nc tokens; st.weak slot", "Read a piece of one token row once (of token `fetched`: what `fetch_row` brought), write it to the row's K "
        "final places."),
    _op("fetch_routing", "warp", "table weights token end num_topk", "ld.weak table; ld.nc weights",
        "Shared memory: rows and weights of a token, to be gathered later."),
    _op("gather_row", "warp",
        "window slot table weights out token fetched num_topk num_experts num_ranks plane_rows row_bytes token_type begin_vector end_vector",
        "ld.weak table; ld.nc weights; ld.weak slot; st.weak out",
        "A piece of one combined row: fp32 fused multiply-adds of the K rows in k order, one rounding. Of token `fetched` rows and weights are what "
        "`fetch_routing` brought."),
    # ---- staged operations --------------------------------------------------------------------------------------
    _op("count_bank", "warp", "counts bank_bytes epoch", "", "Window offset of the bank of COUNTS that operations of this epoch's parity use."),
    _op("outcome", "warp", "fail epoch status", "ld.relaxed.gpu fail",
        "What a flight's word tells the peers: `status`, or why this rank failed this epoch, unless every rank sees the reason itself."),
    _op("keep_counters", "block", "expert_counters kept num_planes", "ld.weak expert_counters; st.weak kept",
        "The slot keeps its counts. `last_block` or `take_arrived_rows` has a barrier after they were written."),
    _op("store_origins", "warp", "window origins token first num_topk num_experts num_ranks plane_rows rank places", "st.weak origins",
        "Tell each place of a token's row which (source, token, k) it came from."),
    _op("copy_table", "block", "table copied num_tokens num_topk", "ld.weak table; st.weak copied",
        "The staging slot keeps the row table; all blocks share the work."),
    _op("count_rows", "block", "kept num_planes plane_rows", "ld.weak kept; bar.sync",
        "Shared memory: for every plane the rows before its first. Returns the rows of all."),
    _op("copy_row", "warp", "rows target row num_planes plane_rows row_bytes begin_vector end_vector", "ld.weak rows; st.weak target",
        "A piece of one row to the same place of another tensor."),
    _op("push_row", "warp", "window origins rows staging row num_planes plane_rows rank places row_bytes begin_vector end_vector",
        "ld.weak origins; ld.weak rows; st.weak staging", "A piece of one received row to its place in its source's staging slot."),
    _op("reduce_row", "warp", "window staging rank table weights out token num_topk row_bytes token_type begin_vector end_vector",
        "ld.weak table; ld.nc weights; ld.weak staging; st.weak out", "gather_row (sum_row, if weights is 0) from my staging slot: the same bits."),
    # ---- arrived ------------------------------------------------------------------------------------------------
    _op("publish_arrived", "warp", "window arrived rank num_ranks epoch", "fence.acq_rel.sys; st.relaxed.sys arrived",
        "Release, system scope: all rows of this rank are written. Lanes over ranks."),
    _op("wait_arrived", "block", f"window arrived rank num_ranks epoch {_FAILURE}", "ld.acquire.sys arrived; bar.sync",
        "Acquire, system scope: wait for ARRIVED of all ranks. Non-zero if one gave up, is ahead or does not come.", may_fail=True),
    # ---- recipes ------------------------------------------------------------------------------------------------
    _op("quantise_row", "warp",
        "window slot slot_scales tokens token fetched first reserved num_topk num_experts num_ranks plane_rows row_bytes round_scales begin_stretch "
        "end_stretch",
        "ld.nc tokens; st.weak slot; st.weak slot_scales",
        "`scatter_row` of a bf16 row that becomes E4M3 on the way, with a float32 scale per 128 columns: amax = max(1e-4, max |x|), "
        "scale = amax * (1/448) or the next power of two, value = x * (448 / amax), or x / scale, to nearest even."),
    _op("pack_rows", "warp", "window slot rank counters row_scales own_planes plane_capacity row_bytes",
        "ld.weak counters; ld.weak row_scales; ld.weak slot; st.weak slot",
        "This warp's share of this rank's received rows becomes NVFP4 in place: E2M1 values, an E4M3 scale per 16 columns, the row's scale."),
    _op("sum_packed_row", "warp",
        "window slot table weights out token num_topk num_experts num_ranks plane_rows row_bytes begin_stretch end_stretch",
        "ld.weak table; ld.weak slot; ld.nc weights; st.weak out",
        "`gather_row` of packed rows, bf16 out; without weights (address 0) each weight is 1."),
    # ---- RANK_MAJOR: a row per (token, rank that hosts any of its experts) ---------------------------------------------
    _op("count_ranks", "block", "topk_idx idx_bytes num_tokens num_topk num_experts num_ranks first", "ld.nc topk_idx; bar.sync",
        "Shared memory: for every rank my tokens that go there, and those of them before this block's first token."),
    _op("assign_ranks", "block", "topk_idx idx_bytes topk_weights num_topk num_experts num_ranks plane_rows first end rank",
        "ld.nc topk_idx; ld.nc topk_weights; bar.sync",
        "Shared memory: ids and weights of this block's tokens, and the final global row of each token at every rank it goes to, in token order, "
        "at the first k with that rank. Needs nothing from other ranks."),
    _op("send_routing", "warp", "window slot_ids slot_weights table token first end num_topk num_experts num_ranks plane_rows global_ids",
        "st.weak slot_ids; st.weak slot_weights; st.weak table",
        "The K ids (-1 where another rank hosts the expert) and weights of one token to every rank its row goes to; its rows to the table."),
    _op("publish_arrived_rows", "warp", "window arrived rank num_ranks epoch", "fence.acq_rel.sys; st.relaxed.sys arrived",
        "`publish_arrived` that also tells each rank how many rows it got from me."),
    _op("take_arrived_rows", "block", "window arrived slot_ids rank num_ranks num_topk plane_rows epoch src_rank_counters",
        "ld.relaxed.sys arrived; st.weak src_rank_counters; bar.sync; st.weak slot_ids",
        "After `wait_arrived`: rows received from each rank, and -1 in the ids of all rows that nobody filled."),
    _op("sum_row", "warp", "window slot table out token num_topk num_ranks plane_rows row_bytes token_type begin_vector end_vector",
        "ld.weak table; ld.weak slot; st.weak out",
        "A piece of one combined row: fp32 sum of the token's rows, one per rank, in the order of their first k, one rounding."),
)}
OPS |= {op[0]: _op(*op) for op in (*MASK_OPERATIONS, *HT_OPERATIONS)}
"""All operations by name."""

HT_NET_OPS: dict[str, Op] = {op[0]: _op(*op) for op in HT_NET_OPERATIONS}
LL_NET_OPS: dict[str, Op] = {op[0]: _op(*op) for op in (*LL_NET_OPERATIONS, *LL_NET_STAGED_OPERATIONS, *LL_NET_MASKED_OPERATIONS)}
NET_OPS = {op[0]: _op(*op) for op in NET_OPERATIONS} | HT_NET_OPS | LL_NET_OPS
"""Operations of kernels over several teams, which no other kernel is linked with."""


class Vocabulary:
    """One implementation of all operations, as attributes; kernel factories unpack it to locals."""

    def __init__(self, functions: dict[str, object]) -> None:
        missing, unknown = sorted(OPS.keys() - functions.keys()), sorted(functions.keys() - OPS.keys() - NET_OPS.keys())
        if missing or unknown:
            raise ValueError(f"a vocabulary needs every operation of kernels.ops: missing {missing}, unknown {unknown}")
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        """Only for what is not there."""
        if name in NET_OPS:
            raise AttributeError(f"operation {name} is one of kernels over several teams, and this one is for one team")
        close = difflib.get_close_matches(name, OPS | (NET_OPS if "net_put_signal" in self.__dict__ else {}), 1)
        like = f"; did you mean {close[0]}?" if close else ""
        raise AttributeError(f"no operation is called {name}{like} (python -m ncclep_py vocabulary lists them)")
