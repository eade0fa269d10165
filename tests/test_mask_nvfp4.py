"""NVFP4 combine of groups with ``enable_mask`` on the simulator: dead, slow and late ranks under many schedules, and mutants of its kernel."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from test_mask_mutations import CONCLUDE, JOINED
from test_mask_protocol import KINDS, LAYOUTS, faults_of
from test_mutations import mutant

from ncclep_py.config import GroupConfig
from ncclep_py.kernels import ll_nvfp4_combine
from ncclep_py.kernels.ll_masked_nvfp4_combine import make_ll_masked_nvfp4_combine
from ncclep_py.reference import ll_nvfp4_combine as reference_combine
from ncclep_py.simulator import SimulationError, Simulator
from ncclep_py.simulator.masked_program import MaskedProgram, MaskedRankMajorProgram
from ncclep_py.simulator.program import Dispatched

SCALE = 448.0
"""Of every row."""


class Packed(MaskedProgram):
    """Combines pack their rows."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **({"make_combine": make_ll_masked_nvfp4_combine} | more))
        self.parameters["combine"] = ll_nvfp4_combine.PARAMETERS
        self.row_scales = [torch.full((self.shape.window.slot_rows,), SCALE) for _ in self.ranks]

    def _launch(self, kind: str, rank: int, slot: int, handle: int, status: int, **tensors: object) -> None:
        if kind == "combine":
            d: Dispatched = next(d for d in reversed(self.dispatched) if d.handle == handle)
            tensors |= {"row_scales": self.row_scales[rank], "counters": d.counters[rank]}
            tensors |= {"weights": 0} if isinstance(self, MaskedRankMajorProgram) else {}
        super()._launch(kind, rank, slot, handle, status, **tensors)

    def _sums(self, planes, rows, weights, masked):   # noqa: ANN001, ANN202
        per_rank = planes[0].shape[0] * planes[0].shape[1]
        kept = [torch.where((r >= 0) & torch.isin(r // per_rank, torch.tensor(masked)), -1, r) for r in rows]
        scales = [torch.full((*p.shape[:2], 1), SCALE) for p in planes]
        return reference_combine(planes, scales, kept, None if isinstance(self, MaskedRankMajorProgram) else weights)


class PackedRankMajor(Packed, MaskedRankMajorProgram):
    """The same for RANK_MAJOR."""


def play(seed: int, kind: str = "", program: type[MaskedProgram] | None = None, **factories: Callable) -> Packed:
    """One schedule with a fault, checked."""
    draw = random.Random(seed)
    kind = kind or draw.choice((*KINDS, "none"))
    packed = {MaskedProgram: Packed, MaskedRankMajorProgram: PackedRankMajor, None: (Packed, PackedRankMajor)[seed // 2 % 2]}[program]
    sim = Simulator(3, seed, ("adversarial", "fair")[seed % 2], blocks=2, faults=None if kind == "none" else faults_of(draw, 3, kind))
    sim.policy.rush = draw.choice((0, 0.002, 0.02, 0.1))
    config = GroupConfig(num_experts=6, max_dispatch_tokens_per_rank=3, hidden=512, num_topk=2, num_slots=2, enable_mask=True)
    p = packed(sim, config, (3, 2, 3), seed=seed, **factories)
    p.play(("D X C D X C", "D0 D1 X0 C0 X1 C1")[seed % 2])
    sim.run()
    p.check(everybody=kind == "none")
    return p


@LAYOUTS
@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_members_agree_and_have_the_oracles_bits(kind: str, program: type[MaskedProgram]) -> None:
    for seed in range(10):
        play(seed, kind, program)


PACK = "pack_rows(payload, slot, rank, counters, row_scales, PLANES, CAPACITY, ROW_BYTES)"
MUTANTS = {
    "no pack": [(PACK, "pass")],
    "join before all have packed": [("if last_block(local + BLOCKS_PACKED) == 1:", "if ops.block_idx() == 0:")],
    "one counter": [("last_block(local + BLOCKS_PACKED)", "last_block(local + BLOCKS_DONE)")],
    "no wait_joins": [(JOINED.format(1), "code = 0")],
    "the join does not commit": [("signature, mask, 1, waited", "signature, mask, 0, waited")],
    "rows of masked ranks": [("                                          mask)", "                                          0)")],
    "packed again in every attempt": [("            ended = code\n", f"            ended = code\n            {PACK}\n")],
    "no conclude": [(CONCLUDE, "")],
    "no second attempt": [("range(ATTEMPTS)", "range(1)")],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_red(name: str) -> None:
    changed = mutant(make_ll_masked_nvfp4_combine, *MUTANTS[name])
    with pytest.raises((SimulationError, AssertionError)):
        for seed in range(250):
            play(seed, make_combine=changed)
