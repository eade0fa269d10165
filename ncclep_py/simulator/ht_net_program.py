"""A toy HIGH_THROUGHPUT group over several teams on the simulator, with an adversarial network between rail peers. See ``ht_program``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ncclep_py import reference as ref
from ncclep_py.config import GroupConfig, Layout
from ncclep_py.kernels import ht_count, ht_net_combine, ht_net_dispatch, ht_net_prepare
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.kernels.shape import PLAIN, Wire
from ncclep_py.signature import Signature
from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.ht_program import HTProgram
from ncclep_py.simulator.network import Network
from ncclep_py.simulator.program import _same

__all__ = ["HTNetProgram"]

MODULES: dict[str, Any] = {"count": ht_count, "prepare": ht_net_prepare, "dispatch": ht_net_dispatch, "combine": ht_net_combine}
FACTORIES: dict[str, Callable] = {"count": ht_count.make_ht_count, "prepare": ht_net_prepare.make_ht_net_prepare,
                                  "dispatch": ht_net_dispatch.make_ht_net_dispatch, "combine": ht_net_combine.make_ht_net_combine}


class HTNetProgram(HTProgram):
    """`HTProgram` whose ranks form teams of `team_size`.

    Attributes:
        network: what is between the teams.
    """

    modules, factories = MODULES, FACTORIES

    def __init__(self, sim: Simulator, config: GroupConfig, layout: Layout, num_tokens: Sequence[int], team_size: int, chunk_tokens: int = 2,
                 wire: Wire = PLAIN, **more: Any) -> None:
        """As `HTProgram`; `wire`: rows of another type are dispatched, with scales, and not combined."""
        self.team_size, self.chunk_tokens, self.wire = team_size, chunk_tokens, wire
        super().__init__(sim, config, layout, num_tokens, **more)
        self.network = Network(sim, team_size, self.net.num_contexts, rail_only=True)

    def _shape(self, idx_bytes: int, layout: Layout, alignment: int, blocks: int) -> HTNetShape:
        shape = HTNetShape.over_teams(self.config, self.sim.num_ranks, self.team_size, self.num_topk, idx_bytes, layout, alignment, blocks, self.wire,
                                      self.chunk_tokens)
        self.net = shape.net
        return shape

    def _plans(self, rank: int) -> tuple[Any, Any, Any]:
        shape: Any = self.shapes[rank]
        net, maps, k = shape.net, shape.maps, self.num_topk
        return ((net.total_bytes, [*shape.window.regions(), *net.regions()]),
                (net.local_bytes, [*shape.local.regions(), ("COUNT", net.count, net.count + 8)]),
                (net.maps_bytes(maps, k), [*maps.regions(), *net.maps_regions(maps, k)]))

    def _combined(self, plan: Any, rows: list[torch.Tensor], grads: list[torch.Tensor] | None) -> list[ref.HTCombine]:
        made = ref.ht_flat_combine if self.layout is Layout.FLAT else ref.ht_expert_major_combine
        return made(plan, rows, grads, team_size=self.team_size)

    def _launch(self, kind: str, rank: int, values: dict[str, int]) -> None:
        backward = int(kind == "combine" and Signature.unpack(values["signature"]).backward)
        super()._launch(kind, rank, values | {"comm": self.network.number, "backward": backward})

    def dispatch_quantised(self, handle: int = 0) -> None:
        """Enqueue a dispatch of `wire`'s rows and scales, bytes as they come, and a look at what arrived."""
        routing, wire, plan = self.routings[handle], self.wire, self.plan
        def random_rows(width: int) -> list[torch.Tensor]:
            return [torch.randint(0, 256, (t, width), generator=self.rng).to(torch.uint8) for t in self.num_tokens]

        tokens, scales = random_rows(wire.sent_bytes), random_rows(wire.scale_bytes)
        weights = [torch.rand(i.shape, generator=self.rng) for i in routing.ids]
        make = ref.ht_flat_dispatch if self.layout is Layout.FLAT else ref.ht_expert_major_dispatch
        expected = make(routing.plan, tokens, weights, scales=scales)
        for rank in self.ranks:
            values = {"tokens": self._register("tokens", tokens[rank], rank), "scales": self._register("scales", scales[rank], rank),
                      "weights": self._register("weights", weights[rank], rank), "rows": plan.recv_rows, "cleared": plan.recv_rows, "forward": 1,
                      "global_ids": 0, "signature": self._signature_of_dispatch(handle)}
            self._launch("dispatch", rank, values | self._of_handle(rank, handle))
            n, at, raw = len(routing.plan.row_src[rank]), plan.slot(handle), torch.from_numpy(self.windows[rank])
            got: list[torch.Tensor] = []
            sizes = [(at, n, wire.sent_bytes), (at + plan.recv_rows * wire.sent_bytes, n, wire.scale_bytes)]
            take = functools.partial(self._take, raw, sizes, got)
            address = self.windows[rank].ctypes.data
            self.sim.host(rank, take, reads=[(address + begin, rows * width) for begin, rows, width in sizes], label="experts")
            self.checks.append(functools.partial(self._check_quantised, got, expected[rank], n, rank))

    @staticmethod
    def _take(raw: torch.Tensor, sizes: list[tuple[int, int, int]], got: list[torch.Tensor]) -> None:
        got.extend(raw[begin:begin + rows * width].view(rows, width).clone() for begin, rows, width in sizes)

    @staticmethod
    def _check_quantised(got: list[torch.Tensor], want: ref.HTDispatch, rows: int, rank: int) -> None:
        assert _same(got[0], want.tokens[:rows]), f"rows of rank {rank}"
        assert want.scales is not None
        assert _same(got[1], want.scales[:rows]), f"scales of rank {rank}"

    def puts(self) -> int:
        """Puts so far."""
        return self.network.puts

