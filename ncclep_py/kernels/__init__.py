"""The kernels and the vocabulary they are written in.

| step | kernel | reads | writes |
|---|---|---|---|
| dispatch, EXPERT_MAJOR | ``ll_dispatch`` | tokens, topk_idx, COUNTS, HEAD, ARRIVED | peers' slots, COUNTS, HEAD, ARRIVED, row table, counters |
| dispatch, RANK_MAJOR | ``ll_rank_major_dispatch`` | tokens, topk_idx, weights, HEAD, ARRIVED | peers' slots, HEAD, ARRIVED, row table, counters |
| combine | ``ll_combine`` | rows in peers' slots, row table, weights (EXPERT_MAJOR), HEAD | combined tokens, HEAD |
| combine, NVFP4 | ``ll_nvfp4_combine`` | own rows, rows in peers' slots, row table, weights (EXPERT_MAJOR), HEAD | own rows, combined tokens, HEAD |

A kernel is a Python function in which every value is the same for all 32 lanes of a warp. ``ops`` declares the vocabulary once: the CUDA side
stands in ``lane_ops.cu``, ``fabric_ops.cu`` and ``rank_ops.cu``, the simulator's side in ``ncclep_py.simulator.ops``.
"""
