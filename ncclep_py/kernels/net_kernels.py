"""The kernels of groups over several teams: factory and run-time parameters by name. They are linked with NCCL's device library, no others are."""

from __future__ import annotations

from collections.abc import Callable

from ncclep_py.kernels import ll_net_combine, ll_net_dispatch

__all__ = ["NET_KERNELS"]

NET_KERNELS: dict[str, tuple[Callable[..., Callable[..., None]], tuple[str, ...]]] = {
    "ll_net_dispatch": (ll_net_dispatch.make_ll_net_dispatch, ll_net_dispatch.PARAMETERS),
    "ll_net_combine": (ll_net_combine.make_ll_net_combine, ll_net_combine.PARAMETERS),
}
