"""The page about the vocabulary names every operation with everything that is declared of it, and shows both implementations."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ncclep_py.__main__ import main
from ncclep_py.kernels.ops import NET_OPS, OPS, PARAMETERS
from ncclep_py.vocabulary import cuda_source, page, simulator_source

EVERY = OPS | NET_OPS


def test_the_page_is_complete(capsys: Any) -> None:
    assert main(["vocabulary"]) == 0
    text = capsys.readouterr().out
    sections = dict(zip(re.findall(r"^## (\w+)\(", text, re.M), re.split(r"^## ", text, flags=re.M)[1:], strict=True))
    assert list(sections) == list(EVERY)
    for name, section in sections.items():
        op = EVERY[name]
        assert op.doc in section and f"* scope: {op.scope}\n" in section and "```" not in section
        assert [line for line in op.effects if f"`{line}`" not in section] == []
        assert [p for p in op.parameters if f"* {p}: {PARAMETERS[p]}\n" not in section] == []
        assert ("Returns a code" in section) == op.may_fail and ("no memory" in section) == (not op.effects)


@pytest.mark.parametrize("name", EVERY)
def test_both_implementations_are_shown_whole(name: str) -> None:
    cuda, twin = cuda_source(name), simulator_source(name)
    assert cuda.count("{") == cuda.count("}") > 0 and cuda.count("OP ep_") == 1
    declared = re.search(rf"OP ep_{name}\(([^)]*)\)", cuda)
    assert declared is not None and re.findall(r"i64 (\w+)", declared[1]) == list(EVERY[name].parameters)
    assert re.search(rf"^def _?{name}\(call: Call, task: Task\b", twin, re.M)


def test_one_operation_comes_with_its_sources(capsys: Any) -> None:
    assert main(["vocabulary", "publish_arrived"]) == 0
    text = capsys.readouterr().out
    assert text.count("## ") == 1 and cuda_source("publish_arrived") in text and simulator_source("publish_arrived") in text
    assert len(page(sources=True)) > 3 * len(page())


def test_an_unknown_operation_is_a_sentence(capsys: Any) -> None:
    assert main(["vocabulary", "publish_everything"]) == 2
    assert "no operation is called publish_everything; there are: block_idx" in capsys.readouterr().err
