"""Lesson 9: the backward pass of a dispatch is a combine, and that of a combine is a dispatch, because they are transposes.

    python3 scripts/lesson_09_backward_as_transpose.py [--backend sim|nccl]

Put the tokens of all ranks under each other, and the rows that all ranks receive, too. Dispatch copies each token to some rows: it is a
matrix D of zeros and ones, one row per received row, with a 1 at the token that it is a copy of:  rows = D @ tokens.
Combine adds up a token's rows:  out = C @ rows.  Everybody whose copy a row is gets it added: C is D transposed.

If y = D x and we know dL/dy, then dL/dx = D^T dL/dy. So the gradient of dispatch *is* a combine (of gradients) over the same map, and
the gradient of combine is a dispatch. Training needs no kernel that inference does not have.

To see a matrix, multiply it with the identity: if token i is the i-th unit row, then what is received is D itself, bit for bit.

Look at: the two matrices, measured with real operations; that one is the other transposed; that autograd's gradients agree exactly.

Try: send token 0 of rank 0 to experts 0 and 2. D has nine ones then, and so has C; only the count of 8 in the assert is wrong.
"""

from __future__ import annotations

import argparse
from typing import Any

import in_environment  # noqa: F401
import torch

from ncclep_py import Algorithm, Group, GroupConfig, Layout, LocalWorld
from ncclep_py.autograd import ep_combine, ep_dispatch

RANKS, EXPERTS, TOKENS = 2, 4, 3
TOPK_IDX = [[[0, 1], [1, 2], [3, 2]], [[2, 3], [0, 1], [0, 3]]]      # experts 0, 1 live on rank 0, experts 2, 3 on rank 1
ROWS = RANKS * TOKENS                                                # room for received rows on each rank
HIDDEN = RANKS * ROWS                                                # wide enough for unit rows of either kind


def whole_numbers(count: int, seed: int) -> torch.Tensor:
    """Random integers as floats: sums of them are exact."""
    return torch.randint(-9, 10, (count, HIDDEN), generator=torch.Generator().manual_seed(seed)).float()


def program(comm: Any) -> dict[str, torch.Tensor]:
    """This rank's rows of D and C, and gradients that autograd finds for whole numbers."""
    config = GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, dtype=torch.float32, num_topk=2,
                         algorithm=Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=ROWS, num_slots=2, timeout_ns=10_000_000_000)
    device, rank, unit = comm.device, comm.rank, torch.eye(HIDDEN, device=comm.device)
    ids, weights = torch.tensor(TOPK_IDX[rank], device=device), torch.full((TOKENS, 2), 0.5, device=device)
    with Group.create(comm, config) as group, group.create_handle(Layout.FLAT, ids) as handle:
        with torch.no_grad():
            d = ep_dispatch(handle, unit[rank * TOKENS:(rank + 1) * TOKENS].contiguous(), weights).tokens       # [ROWS, HIDDEN]
            c = ep_combine(handle, unit[rank * ROWS:(rank + 1) * ROWS].contiguous())                            # [TOKENS, HIDDEN]
        x, y = (whole_numbers(n, seed + rank).to(device).requires_grad_() for n, seed in ((TOKENS, 0), (ROWS, 20)))
        rows = ep_dispatch(handle, x, weights).tokens
        out = ep_combine(handle, rows + y)                      # y: something the experts add
        # a loss whose gradients we choose: those of `rows` (besides what comes back from `out`) and of `out`
        ((rows * whole_numbers(ROWS, 10 + rank).to(device)).sum() + (out * whole_numbers(TOKENS, 30 + rank).to(device)).sum()).backward()
        comm.synchronize()
        group.check()
        return {"D": d.cpu(), "C": c.cpu(), "tokens": x.grad.cpu(), "y": y.grad.cpu()}


def show(name: str, matrix: torch.Tensor) -> None:
    print(f"{name}, {matrix.shape[0]} x {matrix.shape[1]}:")
    for row in matrix.int().tolist():
        print("   " + " ".join(".1"[value] for value in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    with LocalWorld(RANKS, parser.parse_args().backend, threads=True) as world:     # autograd calls operations from threads
        results = world.run(program)
    whole = {name: torch.cat([result[name] for result in results]) for name in results[0]}
    d, c = whole["D"][:, :RANKS * TOKENS], whole["C"]
    show("D, dispatch (received rows x tokens)", d)
    show("C, combine (tokens x received rows)", c)
    assert torch.equal(c, d.T) and int(d.sum()) == 8       # 8 pairs of (token, rank it goes to)
    print("C is D transposed.")
    grads = {name: torch.cat([whole_numbers(count, seed + rank) for rank in range(RANKS)])
             for name, count, seed in (("rows", ROWS, 10), ("out", TOKENS, 30))}
    into_rows = d @ grads["out"]                           # backward of combine
    assert torch.equal(whole["y"], into_rows)
    print("The gradient that autograd found for combine's rows is D times the gradient of its result: a dispatch.")
    assert torch.equal(whole["tokens"], d.T @ (into_rows + grads["rows"]))
    print("The gradient that autograd found for dispatch's tokens is D^T times the gradient of its rows: a combine.")


if __name__ == "__main__":
    main()
