"""The oracle: what dispatch and combine must return, in plain torch on the CPU, for all ranks at once.

It knows no windows, slots, kernels or processes and imports nothing from the product, so that a mistake in one is not a
mistake in the other. Every list argument has one entry per rank; every loop is the definition, not an optimisation.
Source: the behavioural specification of NCCL EP ("semantics", sections 5 to 7 and 15), with our own choices where it
leaves the result open. These choices are:

order       Low latency rows come in (source rank, token, k) order. (The reference library: arrival order.)
overflow    A low latency row that does not fit its expert plane is dropped and counted, never written elsewhere.
ids         An expert id outside [0, num_experts) counts as -1, "no expert".
duplicates  Low latency: every duplicate of an expert in a token is a row of its own, and may be one too many. High throughput: one row, whose
            weight is the sum of the duplicates' weights in k order; backward, the gradient of that weight goes to every
            duplicate position.
budget      High throughput with max_recv_tokens_per_rank = C loses exactly the rows with an index >= C (the DROP
            policy). TRAP is the same plus an error, wherever recv_total_counter > C.
rounding    LL EXPERT_MAJOR: chain of fp32 fused multiply-adds over k. All else: chain of fp32 adds. Each chain starts
            at +0 and is rounded to the token dtype once, at its end, to nearest even. No sum is rounded per rank or per
            team on the way.

NaN is a value like any other: dispatch copies its bits, combine propagates it (its payload is then unspecified),
unselected rows are never read. Subnormals are kept, not flushed. Errors: ValueError for shapes and sizes that fit no
contract.

Dimensions in comments: R ranks, E experts in all, L = E/R per rank, K = top-k, T tokens of one source rank (may differ, may be 0),
M = max_dispatch_tokens_per_rank, C = max_recv_tokens_per_rank, N rows of a receive buffer, H elements per row, S scales per row.
"""

from __future__ import annotations

from ncclep_py.reference.arithmetic import (
    fma32,
    quantize_ds_fp8,
    quantize_nvfp4,
)
from ncclep_py.reference.ht_expert_major import (
    ExpertMajorMap,
    ht_expert_major_combine,
    ht_expert_major_dispatch,
    ht_expert_major_map,
)
from ncclep_py.reference.ht_flat import (
    FlatMap,
    ht_flat_combine,
    ht_flat_dispatch,
    ht_flat_map,
)
from ncclep_py.reference.ht_rows import (
    HTCombine,
    HTDispatch,
)
from ncclep_py.reference.low_latency import (
    LLExpertMajorDispatch,
    LLRankMajorDispatch,
    ll_expert_major_combine,
    ll_expert_major_dispatch,
    ll_nvfp4_combine,
    ll_rank_major_combine,
    ll_rank_major_dispatch,
    moe_layer,
)

__all__ = [
    "ExpertMajorMap",
    "FlatMap",
    "HTCombine",
    "HTDispatch",
    "LLExpertMajorDispatch",
    "LLRankMajorDispatch",
    "fma32",
    "ht_expert_major_combine",
    "ht_expert_major_dispatch",
    "ht_expert_major_map",
    "ht_flat_combine",
    "ht_flat_dispatch",
    "ht_flat_map",
    "ll_expert_major_combine",
    "ll_expert_major_dispatch",
    "ll_nvfp4_combine",
    "ll_rank_major_combine",
    "ll_rank_major_dispatch",
    "moe_layer",
    "quantize_ds_fp8",
    "quantize_nvfp4",
]
