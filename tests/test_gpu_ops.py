"""Operations on the GPU against their twins in numpy, and the message-passing litmus. ``-m gpu``.

The two sides run the same kernel functions over the two implementations of the vocabulary; what they leave in memory must be equal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from litmus import LITMUS_PARAMETERS, make_litmus, run_litmus

from ncclep_py import DispatchInputs, EpError, Group, GroupConfig, Layout, LocalWorld, launch
from ncclep_py.errors import ErrorRecord
from ncclep_py.kernels.ops import Vocabulary
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.testing import bits_equal, first_difference, random_routing, stamped_tokens, weights_like

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
WARPS = 16
LITMUS_ROUNDS = int(os.environ.get("NCCLEP_LITMUS_ROUNDS", 200_000))


@pytest.fixture
def extra_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[Callable[..., None]]:
    """Register a kernel of the test's own, compiled into a cache of its own."""
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path))

    def register(name: str, factory: Callable, parameters: tuple[str, ...]) -> None:
        monkeypatch.setitem(launch.KERNELS, name, (factory, parameters))

    yield register


# ---- who and where ---------------------------------------------------------------------------------------------------
def make_places(shape: KernelShape, ops: Vocabulary) -> Callable[..., None]:
    """Every warp writes what it is told about its share of the work: pairs of values, through `store_header`."""
    block_idx, warp_idx, first_token, end_token, token_part = ops.block_idx, ops.warp_idx, ops.first_token, ops.end_token, ops.token_part
    warp_token, token_step, begin_vector, end_vector, store_header = (
        ops.warp_token, ops.token_step, ops.begin_vector, ops.end_vector, ops.store_header)
    ROW_BYTES = shape.row_bytes

    def places(out, num_tokens, num_blocks):  # noqa: ANN001, ANN202
        at = out + (block_idx() * 16 + warp_idx()) * 80
        store_header(at, block_idx(), warp_idx())
        store_header(at + 16, first_token(num_tokens), end_token(num_tokens))
        store_header(at + 32, token_part(num_tokens), warp_token(num_tokens))
        store_header(at + 48, token_step(num_tokens), num_blocks)
        store_header(at + 64, begin_vector(num_tokens, ROW_BYTES), end_vector(num_tokens, ROW_BYTES))

    return places


def run_places(backend: str, blocks: int, counts: list[int], row_bytes: int) -> list[torch.Tensor]:
    shape = KernelShape.build(GroupConfig(num_experts=1, max_dispatch_tokens_per_rank=8, hidden=row_bytes // 2, num_topk=1), 1, 1, 8)

    def program(comm: object) -> list[torch.Tensor]:
        kernel, results = comm.kernel("places", shape, 0, blocks), []
        for count in counts:
            out = torch.zeros(blocks * WARPS * 10, dtype=torch.int64, device=comm.device)
            comm.submit(kernel, (out.data_ptr(), count, blocks), blocks, "places", (out,))
            comm.synchronize()
            results.append(out.cpu())
        return results

    with LocalWorld(1, backend, blocks=blocks, warps=WARPS) as world:
        return world.run(program)[0]


@pytest.mark.parametrize("blocks", [1, 3, 16])
def test_shares_of_the_work(blocks: int, extra_kernel: Callable[..., None]) -> None:
    extra_kernel("places", make_places, ("out", "num_tokens", "num_blocks"))
    counts = [0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 100, 128, 1023]
    for row_bytes in (16, 80, 14336):
        for gpu, sim in zip(run_places("nccl", blocks, counts, row_bytes), run_places("sim", blocks, counts, row_bytes), strict=True):
            assert torch.equal(gpu, sim), first_difference(gpu, sim)


# ---- what operations leave in memory ---------------------------------------------------------------------------------
def state_after(backend: str, config: GroupConfig, ranks: int, counts: list[int], call: str, layout: Layout) -> list[dict[str, object]]:
    """Everything a dispatch and a combine leave behind on each rank."""
    def program(comm: object) -> dict[str, object]:
        with Group.create(comm, config) as group:
            ids = random_routing(comm.rank, counts[comm.rank], config.num_topk, config.num_experts, dropped=0.2)
            if call == "overflow":
                ids[:] = 0
            handle = group.create_handle(layout, ids.to(comm.device))
            tokens = stamped_tokens(comm.rank, counts[comm.rank], config.hidden, config.token_type.torch_dtype()).to(comm.device)
            weights = weights_like(ids).to(comm.device)
            seen: dict[str, object] = {}
            try:
                if call == "refused" and comm.rank == ranks - 1:
                    tokens = tokens.double()
                got = handle.dispatch(DispatchInputs(tokens, weights if layout is Layout.RANK_MAJOR else None))
                if call == "overflow":   # the simulated host knows by now; one of a GPU may, and refuses its combine if it does
                    comm.synchronize()
                out = handle.combine(got.tokens, topk_weights=weights)
                comm.synchronize()
                counters = got.layout_info.src_rank_counters if layout is Layout.RANK_MAJOR else got.layout_info.expert_counters
                seen |= {"counters": counters.cpu(), "out": out.cpu()}
                if layout is Layout.RANK_MAJOR:
                    seen["ids"] = got.topk_idx.cpu()
                if comm.backend == "nccl":
                    seen["record"] = ErrorRecord.read(group._record_words)
                group.check()
            except (EpError, TypeError, ValueError) as e:
                seen["raised"] = f"{type(e).__name__}: {e}"
            comm.synchronize()
            comm.barrier()   # a rank that failed may still tell the others so
            seen["control"] = group.window.memory[: group.map.slots].cpu().clone()
            seen["local"] = group._local.cpu().clone()
            seen["local"][group.local_map.tables:] = 0 if call == "refused" else seen["local"][group.local_map.tables:]
            comm.barrier()
            return seen

    with LocalWorld(ranks, backend, blocks=4, warps=WARPS) as world:
        return world.run(program)


@pytest.mark.parametrize(("call", "layout"), [("good", Layout.EXPERT_MAJOR), ("overflow", Layout.EXPERT_MAJOR), ("refused", Layout.EXPERT_MAJOR),
                                             ("good", Layout.RANK_MAJOR), ("refused", Layout.RANK_MAJOR)])
def test_memory_after_operations_is_equal(call: str, layout: Layout) -> None:
    for dtype, ranks, counts in ((torch.bfloat16, 3, [7, 0, 16]), (torch.float16, 4, [16, 1, 5, 9]), (torch.float32, 2, [16, 16])):
        config = GroupConfig(num_experts=ranks * 2, max_dispatch_tokens_per_rank=16, hidden=72, num_topk=min(3, ranks * 2), dtype=dtype,
                             max_num_sms=4, timeout_ns=5_000_000_000)
        both = (state_after(backend, config, ranks, counts, call, layout) for backend in ("nccl", "sim"))
        for gpu, sim in zip(*both, strict=True):
            for part in ("control", "local"):
                assert torch.equal(gpu[part], sim[part]), f"{part}: {first_difference(gpu[part], sim[part])}"
            told = [re.sub(r"row \d+", "row", str(result.get("raised"))) for result in (gpu, sim)]   # of several overflows any may be the first
            assert told[0] == told[1]
            assert call == "good" or call == "overflow" or "raised" in gpu
            assert "ids" not in gpu or torch.equal(gpu["ids"], sim["ids"])
            if "out" in gpu and "out" in sim:
                assert bits_equal(gpu["out"], sim["out"]) and torch.equal(gpu["counters"], sim["counters"])


# ---- litmus ------------------------------------------------------------------------------------------------------------
def test_message_passing_litmus(extra_kernel: Callable[..., None]) -> None:
    extra_kernel("litmus", make_litmus, LITMUS_PARAMETERS)
    assert run_litmus(LITMUS_ROUNDS, 4096, backend="nccl", warps=WARPS) == 0
