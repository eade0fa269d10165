"""`ElasticBuffer` without a GPU: what it refuses. With one: tests/test_gpu_ht.py."""

from __future__ import annotations

import pytest
import torch

from ncclep_py.elastic import ElasticBuffer


@pytest.mark.parametrize("rows, width, head", [(0, 8, 1), (8, 0, 1), (8, 8, 0), (8, 8, 9)])
def test_sizes(rows: int, width: int, head: int) -> None:
    with pytest.raises(ValueError, match="rows and width must be at least 1"):
        ElasticBuffer(rows, width, torch.bfloat16, head)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        ElasticBuffer(8, 8, torch.bfloat16, 4)
