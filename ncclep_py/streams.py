"""The `stream` argument that ``nccl.ep``'s calls have: the call runs on that stream instead of torch's current one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

__all__ = ["on_stream"]


def on_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of a group or handle with a keyword `stream`: a torch stream, its handle as an integer, or None for torch's current stream.

    In the simulator there are no streams, and any is taken.
    """
    @functools.wraps(method)
    def call(self: Any, *given: Any, stream: Any = None, **named: Any) -> Any:
        if stream is None:
            return method(self, *given, **named)
        with _current(stream, getattr(self, "group", self).comm):
            return method(self, *given, **named)

    return call


def _current(stream: Any, comm: Any) -> contextlib.AbstractContextManager[Any]:
    import torch

    handle = getattr(stream, "cuda_stream", stream)
    if isinstance(handle, bool) or not isinstance(handle, int):
        raise TypeError(f"stream must be a torch.cuda.Stream or its handle, an int, got {type(stream).__name__}: {stream!r}")
    if comm.backend == "sim":
        return contextlib.nullcontext()
    return torch.cuda.stream(stream if hasattr(stream, "cuda_stream") else torch.cuda.ExternalStream(handle, device=comm.device))
