"""What `scripts/bench_ht.py` checks before it times anything, on the simulator."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
from typing import Any

import pytest
import torch

from ncclep_py import LocalWorld

PATH = pathlib.Path(__file__).parent.parent / "scripts" / "bench_ht.py"
CASE = {"ranks": 2, "experts": 16, "tokens": 5, "sms": 2, "topk": 3, "hidden": 32}


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_ht", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(bench: Any, case: dict[str, Any], spoil: Any = None) -> list[bool]:
    def program(comm: Any) -> bool:
        rank = bench.Rank(comm, case, comm.barrier)
        if spoil:
            spoil(rank)
        right = rank.check(2)
        rank.group.close()
        return right

    with LocalWorld(case["ranks"], "sim") as world:
        return world.run(program)


@pytest.mark.parametrize("kind", [{"layout": "flat"}, {"layout": "expert_major", "alignment": 4}, {"layout": "flat", "backward": True}], ids=str)
@pytest.mark.parametrize("routing", ["uniform", "one_rank", "zipf"])
def test_results_are_known(bench: Any, kind: dict[str, Any], routing: str) -> None:
    assert checked(bench, {**CASE, **kind, "routing": routing}) == [True, True]


@pytest.mark.parametrize("name", ["tokens", "sources"])
def test_a_wrong_result_is_seen(bench: Any, name: str) -> None:
    def spoil(rank: Any) -> None:
        if name == "sources":
            rank.sources = rank.sources.flip(0)
        else:
            rank.expected = lambda: rank.tokens

    assert False in checked(bench, {**CASE, "layout": "flat"}, spoil)


def test_bytes_and_cases(bench: Any) -> None:
    ids = [torch.tensor([[0, 1, 9]] * 5), torch.tensor([[8, 9, 10]] * 5)]
    assert bench.rows_of({**CASE, "layout": "flat"}, ids) == [5, 10] and bench.rows_of({**CASE, "layout": "expert_major"}, ids) == [10, 20]
    assert bench.moved_mb({**CASE, "hidden": 500000, "layout": "flat"}, ids) == 2 * 1.0 * (10 + 15)
    args = argparse.Namespace(layout=None, tokens=None, sweep=False, ranks=8, sms=32, experts=128, topk=8, hidden=7168, alignment=0, backward=False,
                              routing="uniform")
    assert [(c["layout"], c["tokens"], c["ranks"]) for c in bench.cases(args)] == [("flat", 2048, 4), ("expert_major", 2048, 4), ("flat", 8192, 4)]
