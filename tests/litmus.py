"""A message-passing litmus between two ranks, for the GPU (tests/test_gpu_ops.py) and the simulator (tests/test_litmus.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ncclep_py import Group, GroupConfig, LocalWorld, launch
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.signature import OpKind


def make_litmus(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """Message passing, once per token: all warps write a row into the peer's slot, the block's last barrier, one ARRIVED word; then read what
    the peer wrote into mine. The chain is the one dispatch relies on.

    There is no HEAD, so a rank may be a round ahead: its word of round t + 1 may come before the peer has looked for that of round t, which it
    needs no more to go on. It cannot be two ahead, so words have two banks by the round's parity (the second where COUNTS would be). Rows need
    none: every round of a launch has a row of its own.
    """
    EXPERTS, RANKS, ROW_BYTES, PLANE_ROWS = shape.num_experts, shape.num_ranks, shape.row_bytes, shape.window.plane_rows
    BLOCKS_DONE, FAIL, SLOT = shape.local.blocks_done, shape.local.fail, shape.window.slots
    ARRIVED, BANK = shape.window.arrived, shape.window.counts - shape.window.arrived
    warp_idx, count_experts, assign_rows, scatter_row, gather_row = (
        ops.warp_idx, ops.count_experts, ops.assign_rows, ops.scatter_row, ops.gather_row)
    last_block, publish_arrived, wait_arrived, begin_vector, end_vector = (
        ops.last_block, ops.publish_arrived, ops.wait_arrived, ops.begin_vector, ops.end_vector)

    def litmus(window, rank, local, record, tokens, topk_idx, num_tokens, sent, received, weights, out, epoch, timeout):  # noqa: ANN001, ANN202
        count_experts(topk_idx, 8, num_tokens, 1, EXPERTS, 0, num_tokens)
        assign_rows(topk_idx, 8, 1, EXPERTS, RANKS, PLANE_ROWS, 0, num_tokens, 0, sent, rank, epoch, local + FAIL, record)
        begin, stop = begin_vector(1, ROW_BYTES), end_vector(1, ROW_BYTES)
        code = 0
        for token in range(num_tokens):
            arrived = ARRIVED + (epoch + token & 1) * BANK
            scatter_row(window, SLOT, tokens, token, -1, 0, 0, 1, EXPERTS, RANKS, PLANE_ROWS, ROW_BYTES, begin, stop)
            if last_block(local + BLOCKS_DONE) == 1:
                if warp_idx() == 0:
                    publish_arrived(window, arrived, rank, RANKS, epoch + token)
            if code == 0:
                code = wait_arrived(window, arrived, rank, RANKS, epoch + token, local + FAIL, record, timeout)
            gather_row(window, SLOT, received, weights, out, token, -1, 1, EXPERTS, RANKS, PLANE_ROWS, ROW_BYTES, 2, begin, stop)

    return litmus


LITMUS_PARAMETERS = ("window", "rank", "local", "record", "tokens", "topk_idx", "num_tokens", "sent", "received", "weights", "out", "epoch",
                     "timeout")


def run_litmus(rounds: int, tokens_per_launch: int, **world: Any) -> int:
    """Rows that were not what the peer wrote, over `rounds` rounds between two ranks of a `LocalWorld`."""
    config = GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=tokens_per_launch, hidden=256, num_topk=1, dtype=torch.float32, max_num_sms=1,
                         timeout_ns=10_000_000_000)
    shape = KernelShape.build(config, 2, 1, 8)
    count = tokens_per_launch

    def program(comm: object) -> int:
        bad = torch.zeros((), dtype=torch.int64, device=comm.device)
        with Group.create(comm, config) as group:
            kernel = comm.kernel("litmus", shape, launch.shared_bytes(shape, count, 1), 1)
            local, record = group.addresses()
            ids = torch.full((count, 1), 1 - comm.rank, dtype=torch.int64, device=comm.device)
            ones, out = torch.ones(count, 1, device=comm.device), torch.zeros(count, 256, device=comm.device)
            received = (comm.rank * group.map.slot_rows + torch.arange(count, device=comm.device)).to(torch.int32)
            sent = torch.zeros(count, dtype=torch.int32, device=comm.device)
            both = [torch.zeros(count, 256, device=comm.device) for _ in range(2)]
            for step in range(-(-rounds // count)):
                for rank in range(2):
                    both[rank].copy_((torch.arange(count * 256, device=comm.device) % 8191 + 10007 * (step * 2 + rank)).view(count, 256))
                group.rendezvous(OpKind.COMBINE)   # both ranks have compared the last launch's rows
                mine = both[comm.rank]
                values = (group.window.handle, comm.rank, local, record, mine.data_ptr(), ids.data_ptr(), count, sent.data_ptr(),
                          received.data_ptr(), ones.data_ptr(), out.data_ptr(), step * count + 1, config.wait_ns)
                comm.submit(kernel, values, 1, "litmus", (mine, ids, sent, received, ones, out))
                bad += (out != both[1 - comm.rank]).any(1).sum()
            group.check()
        return int(bad)

    with LocalWorld(2, blocks=1, **world) as made:
        return sum(made.run(program))
