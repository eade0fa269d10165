"""Every byte offset of HIGH_THROUGHPUT mode: window, local block, maps of a handle. Pure integers; the invariants of ``memory_map`` hold.

Design. Three operations, each with its HEAD and the same life as in LOW_LATENCY (one epoch, one decision per rank, the last block speaks):

* **Update** ``kernels/ht_count.py``, ``kernels/ht_prepare.py``: no host step, capturable. A local kernel counts, for every share of tokens, the
  keys they hit: experts (EXPERT_MAJOR) or destination ranks (FLAT); a token counts once per key. The operation adds the shares up, tells every
  rank its totals as words {epoch, count}, waits for all HEADs and all totals, and has all it needs: first row of every zone (EXPERT_MAJOR: a zone
  per expert, padded to the alignment; FLAT: one zone per rank), plus the rows of lower ranks, lower blocks, lower warps, gives each token its
  final row. A row at or beyond the budget becomes -1 here: this is the writer's clamp, since nothing else makes rows. Every rank knows every
  total, hence who overflows. Under FLAT the counts per expert of a rank that overflows lose what was dropped, which only the sources know: they
  tell it in a second round of words (KEPT), and that rank alone waits for them.
* **Dispatch** ``kernels/ht_dispatch.py``: HEAD of all, then every row is read once and written into its final places at its ranks, with ids and
  weights; then pads and unused ids of the own slot; ARRIVED of all.
* **Combine** ``kernels/ht_combine.py``: HEAD of all, then every token pulls its rows: fp32 sum in ascending (rank, local expert) order, one
  rounding; backward it also pulls the gradient of each of its weights.

What an update tells: ROUTES, per token the rows it is sent to, ascending by expert, and PLACES, per (token, k) where that expert's weight lives. Both
belong to the handle, so that backward uses them again; a slot holds rows, ids and weights only. The maps' header is set last and cleared first: a
dispatch or combine over maps that no update finished refuses by its HEAD.

Why words of an update are not overwritten unread: HITS has two banks by parity. A rank writes HITS(n) before it waits for anybody, but after its
operation n-1 ended, for which it acquired HEAD(n-1) of all ranks, and those had ended operation n-2 and all their reading of HITS(n-2). KEPT is
written after HEAD(n) of all ranks: one bank. Both match by ``==``; words of long ago mean nothing.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.memory_map import HEAD_BANKS, HEAD_BYTES, SLOT_ALIGNMENT, WORD, LocalMap, align

__all__ = ["HTMaps", "HTWindowMap", "chunks_of", "ht_local_map"]

SHARED_WORDS = 40 * 1024
"""32-bit words of shared memory an update may use in a block (160 KiB)."""

MAX_CHUNKS = 16
"""Shares of a block's tokens, each numbered by one warp."""

AUTO_ALIGNMENT = 128
"""Largest alignment for which an automatic budget always suffices."""

ROW_LIMIT = 1 << 31
"""Row numbers have 31 bits."""


def chunks_of(num_experts: int, num_ranks: int, by_rank: bool) -> int:
    """Shares of a block's tokens whose keys are counted separately, as many as shared memory allows."""
    keys, columns = (num_ranks, num_experts + num_ranks) if by_rank else (num_experts, num_experts)
    chunks = min(MAX_CHUNKS, (SHARED_WORDS - 3 * columns - num_ranks) // keys)
    if chunks < 1:
        raise ValueError(f"num_experts must leave room for its counters in shared memory: {num_experts} experts over {num_ranks} ranks need "
                         f"{3 * columns + num_ranks + keys} words, at most {SHARED_WORDS} are available")
    return chunks


@dataclasses.dataclass(frozen=True)
class HTWindowMap:
    """Byte plan of the symmetric window, the same on every rank.

    Attributes:
        heads: as in ``memory_map.WindowMap``.
        arrived: as in ``memory_map.WindowMap``.
        hits: ``[2 banks][R sources][E + R]`` of u64 {epoch << 32 | tokens of that source with the expert, or (FLAT) with the rank}.
        kept: ``[R sources][L]`` of u64 {epoch << 32 | rows of that source for my expert that were not dropped}.
        slots: first payload slot; slot ``i`` starts at ``slots + i * slot_bytes`` with ``[recv_rows]`` rows of `row_bytes`.
        slot_idx: in a slot, ``[recv_rows, K]`` int64 received ids (FLAT).
        slot_weights: in a slot, ``[recv_rows, K]`` float32 received weights (FLAT) or ``[recv_rows]`` (EXPERT_MAJOR).
        recv_rows: rows a rank can receive: the budget, or the worst case if it is AUTO.
        row_bytes: most bytes of a row, its scales included.
        total_bytes: size of the window.
    """

    num_ranks: int
    num_experts: int
    heads: int
    arrived: int
    hits: int
    kept: int
    slots: int
    slot_idx: int
    slot_weights: int
    slot_bytes: int
    num_slots: int
    recv_rows: int
    row_bytes: int
    total_bytes: int

    released: ClassVar[int] = 0      # no staged operations
    num_staging: ClassVar[int] = 0

    @classmethod
    def build(cls, config: GroupConfig, num_ranks: int) -> HTWindowMap:
        """The plan for one group."""
        experts = config.num_experts
        recv_rows = config.max_recv_tokens_per_rank or worst_case(config, num_ranks)
        most = num_ranks * config.max_dispatch_tokens_per_rank * min(config.num_topk, experts // num_ranks)
        if max(most + experts * AUTO_ALIGNMENT, recv_rows) >= ROW_LIMIT:
            raise ValueError(f"rows must be below 2^31 (row numbers have 31 bits): {num_ranks} ranks with max_dispatch_tokens_per_rank = "
                             f"{config.max_dispatch_tokens_per_rank} send up to {most} rows to a rank, whose budget is {recv_rows}")
        arrived = align(HEAD_BANKS * num_ranks * HEAD_BYTES, 128)
        hits = align(arrived + num_ranks * WORD, 128)
        kept = align(hits + 2 * num_ranks * (experts + num_ranks) * WORD, 128)
        slots = align(kept + experts * WORD, SLOT_ALIGNMENT)
        row_bytes = max(config.row_bytes, align(config.max_token_bytes, 16))
        slot_idx = align(recv_rows * row_bytes, 128)
        slot_weights = align(slot_idx + recv_rows * config.num_topk * 8, 128)
        slot_bytes = align(slot_weights + recv_rows * config.num_topk * 4, SLOT_ALIGNMENT)
        return cls(num_ranks, experts, 0, arrived, hits, kept, slots, slot_idx, slot_weights, slot_bytes, config.num_slots, recv_rows,
                   row_bytes, slots + config.num_slots * slot_bytes)

    @property
    def num_local_experts(self) -> int:
        """Experts on one rank."""
        return self.num_experts // self.num_ranks

    def head_bank(self, epoch: int) -> tuple[int, int]:
        """First byte and end of the HEAD bank that operations of `epoch`'s parity use."""
        begin = self.heads + (epoch & 1) * self.num_ranks * HEAD_BYTES
        return begin, begin + self.num_ranks * HEAD_BYTES

    def slot(self, index: int) -> int:
        """Byte offset of payload slot `index`."""
        if not 0 <= index < self.num_slots:
            raise ValueError(f"slot must be in [0, {self.num_slots}), got {index}")
        return self.slots + index * self.slot_bytes

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of every region, for messages of the simulator."""
        named = [("HEAD", self.heads, self.arrived), ("ARRIVED", self.arrived, self.hits), ("HITS", self.hits, self.kept),
                 ("KEPT", self.kept, self.slots)]
        for i in range(self.num_slots):
            at = self.slot(i)
            named += [(f"SLOT{i}", at, at + self.slot_idx), (f"IDX{i}", at + self.slot_idx, at + self.slot_weights),
                      (f"WEIGHTS{i}", at + self.slot_weights, at + self.slot_bytes)]
        return named


def worst_case(config: GroupConfig, num_ranks: int) -> int:
    """Most rows one rank can receive in either layout, with zones padded to at most `AUTO_ALIGNMENT`."""
    local, sent = config.num_experts // num_ranks, num_ranks * config.max_dispatch_tokens_per_rank
    return min(local * align(sent, AUTO_ALIGNMENT), sent * min(config.num_topk, local) + local * (AUTO_ALIGNMENT - 1))


def ht_local_map(config: GroupConfig) -> LocalMap:
    """The plan of a rank's own memory for a group: as in LOW_LATENCY, without row tables, which belong to handles."""
    headers = 384
    end = align(headers + 2 * WORD * (config.num_slots + 1), 128)
    return LocalMap(0, 128, 256, headers, end, 0, config.num_slots, end)


@dataclasses.dataclass(frozen=True)
class HTMaps:
    """Byte plan of a handle's routing, which no peer sees.

    Attributes:
        header: {epoch of the update: u64, handle id: u64}; the id is 0 while there is no valid update.
        zones: ``[3][L]`` int32: first row, rows, and padded rows of each local expert's zone, all within the budget (FLAT: rows per expert), then
            two int64: rows received within the budget, and before any drop.
        partials: ``[blocks]`` of {``[columns]`` totals, ``[chunks][keys]`` counts} u32.
        routes: ``[M][K]`` int64 {ids of the row << 48 | rank << 32 | row}, ascending by expert, then -1.
        places: ``[M][K]`` int64 {expert << 40 | column << 32 | row} of (token, k), -1 for none.
        partial_bytes: bytes of one block's partials.
        total_bytes: size of it all.
    """

    header: int
    zones: int
    partials: int
    routes: int
    places: int
    partial_bytes: int
    num_local: int
    total_bytes: int

    @classmethod
    def build(cls, config: GroupConfig, num_ranks: int, num_topk: int, layout: Layout, num_blocks: int) -> HTMaps:
        """The plan for a handle."""
        experts, by_rank = config.num_experts, layout is Layout.FLAT
        local, chunks = experts // num_ranks, chunks_of(experts, num_ranks, by_rank)
        words = (experts + num_ranks + chunks * num_ranks) if by_rank else (experts + chunks * experts)
        zones = 128
        partials = align(zones + align(12 * local, 8) + 16, 128)
        routes = align(partials + num_blocks * 4 * words, 128)
        table = align(8 * config.max_dispatch_tokens_per_rank * num_topk, 128)
        return cls(0, zones, partials, routes, routes + table, 4 * words, local, routes + 2 * table)

    @property
    def received(self) -> int:
        """Byte offset of the two totals."""
        return self.zones + align(12 * self.num_local, 8)

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of every region."""
        return [("MAP_HEADER", 0, 16), ("ZONES", self.zones, self.partials), ("PARTIALS", self.partials, self.routes),
                ("ROUTES", self.routes, self.places), ("PLACES", self.places, self.total_bytes)]
