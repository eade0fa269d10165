"""Every byte offset of the symmetric window and of a rank's local block. Pure integers; the only place that computes offsets.

Why a peer never overwrites what somebody still reads (protocol of ``kernels/ll_dispatch.py`` and ``kernels/ll_combine.py``; found by an
explicit-state exploration of all interleavings of three ranks, kept true by the simulator's mutation tests). HEAD(n) of rank q says "q entered
operation n"; it is released after everything q's stream did before. The invariants:

* I1 All ranks issue the same sequence of operations. HEAD carries the operation's signature; a difference is an error naming both.
* I2 Nobody touches remote memory, or rows of its own that peers may see, before HEAD(n) of *all* ranks was acquired, tokens or none.
  So the remote phases of two operations never overlap between ranks, and dispatch may write in place over rows the last combine pulled.
* I3 HEAD(n) follows the completion of all earlier kernels of the stream. Counts are separate words and may go earlier: they carry their
  epoch, are matched with ``==`` and order nothing.
* I4 ARRIVED is one word per source, *stored* by the last block: grids differ between ranks, and a sum could not name who is missing.
* I5 Payload lives in numbered slots chosen on the host and baked into graphs; only control words follow the device-resident epoch.
* I6 A slot is busy from its dispatch until the pull of its last combine is enqueued. Its header {dispatch epoch, handle} and its
  (token, k) -> row table are part of the slot; combine checks the header.
* I7 The epoch advances exactly once per operation, by the last block, also after a refusal or a timeout.
* I8 One decision per operation and rank: the first failure wins a compare-and-swap on FAIL; the last block reads it once and speaks for the
  rank. Blocks still inside a wait do not look at FAIL: they end by their own deadline, and may write rows of an operation that then fails.
* I9 Creation: zero the window, barrier, first epoch 1. ``close()`` ends with a rendezvous, so that nobody unmaps what a peer pulls.

After a failed operation its slot's rows are undefined on every rank, and a late rank that still saw GO may write them until it has ended that
operation, too: experts queued on them must not be trusted, the next dispatch gives them out anew. A rank is blamed by whoever waits for it longest,
so with very unequal deadlines (``timeout_ns`` per rank) a living rank that waits itself may be named.

HEAD has two banks by epoch parity: a combine ends without a rendezvous, so a fast rank may publish HEAD(n+1) while a slow one still
compares HEAD(n); it cannot publish HEAD(n+2) before the slow one published HEAD(n+1). ARRIVED and COUNTS need one bank: their words of
operation n are read before the reader publishes what lets the writer go on.

Staged operations (``kernels/ll_staged.py``; only with ``GroupConfig.num_staging_slots``) are in flight between a send half and a complete half, and
several of them overlap. What the invariants above do not cover:

* S1 A flight is a slot's use by one staged operation: payload slots carry staged dispatches, staging slots staged combines. Every slot has FLIGHT
  words of its own, {signature, epoch, status} of each source: the ARRIVED of that use. So no later operation, fused or staged, overwrites an
  ARRIVED somebody still waits for, but the slot's next use; and that one is held back by S3 or S4.
* S2 A staged dispatch is an operation of the group like a fused one (HEAD, epoch, I1 to I8), but ends without waiting for ARRIVED. Its counts are
  read in its send half only. A fast rank may then publish the counts of operation n + 1 before a slow one has read those of n; hence two banks
  of COUNTS by epoch parity (the writer of n + 2 has seen the slow rank's HEAD of n + 1). Without staging one bank is enough.
* S3 The next dispatch into a payload slot is enqueued after the slot's complete half on every rank (a host rule), and touches nothing before HEAD
  of all ranks (I2), so all ranks have read the slot's FLIGHT words by then.
* S4 A staged combine is no operation of the group: no HEAD, no group epoch, and its send half waits for no rank's send half. Each staging slot is a
  channel with an epoch of its own. Its send half pushes use u once RELEASED of *all* ranks carries u; a rank publishes RELEASED = u + 1 when its
  complete half of use u has read its rows, also after a failure. Nothing else guards the rows. RELEASED lives on the device, so the rule holds
  in graphs replayed in any order. Because the wait is for the complete half of the slot's last use, w operations in flight want 2w staging
  slots: with fewer the result is the same, but a send half may wait for the slowest rank's complete half.
* S5 The send half reads the sender's own rows only, so a staged combine ends the slot's busy time when its send half is enqueued (I6): peers'
  later dispatches follow its HEAD. The place of a row at its owner (source, token, k) travels with the row at dispatch (ORIGINS) and belongs to
  the slot, like the counts of rows received (KEPT). The row table is copied to the staging slot, since the complete half needs it later.
* S6 A send half that fails or refuses tells so in its FLIGHT words; the complete half of every rank sees it there and nowhere else, and FAIL is
  kept per flight. The channel's epoch advances once per send half.

Groups with ``enable_mask`` run kernels of their own with the rules M1 to M7 of ``member_map.py`` in the place of I7 and I8.
"""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.member_map import LocalMembers, WindowMembers

__all__ = ["RECORD_FIELDS", "LocalMap", "WindowMap", "align"]

WORD = 8
HEAD_BYTES = 16
HEAD_BANKS = 2
SLOT_ALIGNMENT = 1024
FLIGHT_BYTES, FLIGHT_NEXT, FLIGHT_FAIL = 128, 16, 32

WAITS = (16, 24)
"""Bytes from a FAIL to the addresses of the nanoseconds waited for each rank: for waits of all blocks, and of one block (``waited``)."""

RECORD_FIELDS = ("code", "epoch", "phase", "rank", "peer", "culprit", "seen", "expected")
"""64-bit words of an error record, in this order. `code` is written last and is 0 while the record is free."""


def align(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


@dataclasses.dataclass(frozen=True)
class WindowMap:
    """Byte plan of the symmetric window, the same on every rank.

    Attributes:
        heads: ``[2 banks][R sources]`` of {signature: u64, epoch << 32 | status << 24 | detail: u64}.
        arrived: ``[R sources]`` of u64 {epoch << 32 | status << 24 | detail}.
        counts: ``[banks][R sources][E]`` of u64 {epoch << 32 | rows that source sends to the expert}; two banks with staging, else one.
        count_bank_bytes: distance of the two banks, 0 if there is one.
        flights: ``[num_slots + num_staging][2 banks][R sources]`` as in `heads`: ARRIVED of staged operations.
        released: ``[num_staging][R sources]`` of u64 {epoch << 32}: the next use of the staging slot may push to that rank.
        arrivals: ``[num_slots][R sources]`` as `arrived`, of staged RANK_MAJOR dispatches (their words tell how many rows there are).
        origins: ``[num_slots][slot_rows]`` int32 after the payload slots: where a received row came from, source * M * K + token * K + k.
        staging: first staging slot, ``[M * num_topk]`` rows; slot ``i`` starts at ``staging + i * staging_bytes``.
        slots: first payload slot; slot ``i`` starts at ``slots + i * slot_bytes``.
        slot_bytes: bytes of one payload slot: rows (EXPERT_MAJOR ``[L, R * M]``, RANK_MAJOR ``[R, M]``), their scales, then RANK_MAJOR's routing.
        plane_rows: rows of one local expert's plane, ``R * M``.
        row_bytes: bytes of a row of the group's token type.
        token_bytes: room for one received row and its scales, at least `row_bytes`.
        recv_ids: RANK_MAJOR, offset in a slot of the received ids ``[R, M, K]`` int32; all rows and scales end before it.
        recv_weights: RANK_MAJOR, offset in a slot of the received weights ``[R, M, K]`` float32.
        total_bytes: size of the window.
        members: words of groups with ``enable_mask``, None without.
        slot_rows: rows a slot has room for, L * R * M, or R * M if it only ever holds RANK_MAJOR rows.
    """

    num_ranks: int
    num_experts: int
    heads: int
    arrived: int
    counts: int
    slots: int
    slot_bytes: int
    num_slots: int
    plane_rows: int
    row_bytes: int
    token_bytes: int
    recv_ids: int
    recv_weights: int
    total_bytes: int
    count_bank_bytes: int = 0
    flights: int = 0
    released: int = 0
    arrivals: int = 0
    origins: int = 0
    origins_bytes: int = 0
    staging: int = 0
    staging_bytes: int = 0
    num_staging: int = 0
    members: WindowMembers | None = None
    slot_rows: int = 0

    @classmethod
    def build(cls, config: GroupConfig, num_ranks: int) -> WindowMap:
        """The plan for one group."""
        experts = config.num_experts
        heads = 0
        arrived = align(heads + HEAD_BANKS * num_ranks * HEAD_BYTES, 128)
        counts = align(arrived + num_ranks * WORD, 128)
        num_staging = config.staging_slots
        count_bank = align(num_ranks * experts * WORD, 128) if num_staging else 0
        flights = align(counts + max(2 * count_bank, num_ranks * experts * WORD), 128 if num_staging else SLOT_ALIGNMENT)
        released = flights + (config.num_slots + num_staging) * HEAD_BANKS * num_ranks * HEAD_BYTES if num_staging else flights
        arrivals = released + num_staging * num_ranks * WORD
        end = arrivals + (config.num_slots * num_ranks * WORD if num_staging else 0)
        members = WindowMembers.build(align(end, 128), num_ranks) if config.enable_mask else None
        slots = align(members.end if members else end, SLOT_ALIGNMENT)
        plane_rows = num_ranks * config.max_dispatch_tokens_per_rank
        if experts * plane_rows >= 1 << 31:
            raise ValueError("num_experts * num_ranks * max_dispatch_tokens_per_rank must be below 2^31 (row ids have 32 bits), got "
                             f"{experts} * {num_ranks} * {config.max_dispatch_tokens_per_rank}")
        slot_rows = plane_rows * (1 if config.slot_layout is Layout.RANK_MAJOR else experts // num_ranks)
        recv_ids = align(slot_rows * config.token_bytes, 128)
        recv_weights = recv_ids + align(plane_rows * config.num_topk * WORD // 2, 128)
        slot_bytes = align(recv_weights + plane_rows * config.num_topk * WORD // 2, SLOT_ALIGNMENT)
        origins = slots + config.num_slots * slot_bytes
        origins_bytes = align(slot_rows * 4, SLOT_ALIGNMENT) if num_staging else 0
        staging = origins + config.num_slots * origins_bytes
        staging_bytes = align(config.max_dispatch_tokens_per_rank * config.num_topk * config.row_bytes, SLOT_ALIGNMENT) if num_staging else 0
        return cls(num_ranks, experts, heads, arrived, counts, slots, slot_bytes, config.num_slots, plane_rows, config.row_bytes,
                   config.token_bytes, recv_ids, recv_weights, staging + num_staging * staging_bytes, count_bank, flights, released, arrivals,
                   origins, origins_bytes, staging, staging_bytes, num_staging, members, slot_rows)

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

    def flight(self, index: int) -> int:
        """Byte offset of the FLIGHT words of payload slot `index`, or of staging slot ``index - num_slots``."""
        return self.flights + index * HEAD_BANKS * self.num_ranks * HEAD_BYTES

    def release(self, index: int) -> int:
        """Byte offset of the RELEASED words of staging slot `index`."""
        return self.released + index * self.num_ranks * WORD

    def arrival(self, index: int) -> int:
        """Byte offset of the ARRIVALS words of payload slot `index`."""
        return self.arrivals + index * self.num_ranks * WORD

    def origin(self, index: int) -> int:
        """Byte offset of the ORIGINS of payload slot `index`."""
        return self.origins + index * self.origins_bytes

    def stage(self, index: int) -> int:
        """Byte offset of staging slot `index`."""
        return self.staging + index * self.staging_bytes

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of every region, for messages of the simulator."""
        named = [("HEAD", self.heads, self.arrived), ("ARRIVED", self.arrived, self.counts),
                 ("COUNTS", self.counts, self.flights if self.num_staging else self.members.joins if self.members else self.slots)]
        end = self.members.joins if self.members else self.slots
        if self.num_staging:
            named += [("FLIGHTS", self.flights, self.released), ("RELEASED", self.released, self.arrivals), ("ARRIVALS", self.arrivals, end)]
        named += self.members.regions() if self.members else []
        for i in range(self.num_slots):
            rows, end = self.slot(i), self.slot(i) + self.slot_bytes
            named += [(f"SLOT{i}", rows, rows + self.recv_ids), (f"ROUTING{i}", rows + self.recv_ids, end)]
        if not self.num_staging:
            return named
        named += [(f"ORIGINS{i}", self.origin(i), self.origin(i) + self.origins_bytes) for i in range(self.num_slots)]
        return named + [(f"STAGING{i}", self.stage(i), self.stage(i) + self.staging_bytes) for i in range(self.num_staging)]


@dataclasses.dataclass(frozen=True)
class LocalMap:
    """Byte plan of a rank's own device memory, which no peer sees.

    Attributes:
        epoch: u64, the epoch of the next operation (low 32 bits count).
        blocks_done: u32 counter of blocks of the running operation; returns to 0.
        fail: two u64: {epoch << 32 | culprit << 8 | code} of the last operation that failed on this rank, and the claim of its record; then the two
            of `WAITS`, 0 unless waits are counted.
        headers: ``[num_slots + 1]`` of {dispatch epoch: u64, handle id: u64}; the last stays zero, for operations without a slot.
        tables: ``[num_slots][M * K]`` int32, global row id of (token, k) in the slot, -1 for none.
        table_bytes: bytes of one slot's table.
        kept: ``[num_slots][E]`` int32, rows of each local expert in the slot (the first L are used).
        flights: ``[num_slots + num_staging]`` of 128 bytes: {epoch, handle} of the flight, epoch of the next one (u64, at 16), FAIL (4 u64, at 32).
        copies: ``[num_staging]`` row tables as in `tables`, of what is in the staging slot.
        total_bytes: size of the block.
        members: words of groups with ``enable_mask``, None without.
    """

    epoch: int
    blocks_done: int
    fail: int
    headers: int
    tables: int
    table_bytes: int
    num_slots: int
    total_bytes: int
    kept: int = 0
    kept_bytes: int = 0
    flights: int = 0
    copies: int = 0
    num_staging: int = 0
    members: LocalMembers | None = None

    @classmethod
    def build(cls, config: GroupConfig) -> LocalMap:
        """The plan for one rank of a group."""
        headers = 384
        tables = align(headers + 2 * WORD * (config.num_slots + 1), 128)
        table_bytes = align(4 * config.max_dispatch_tokens_per_rank * config.num_topk, 128)
        num_staging = config.staging_slots
        kept = tables + config.num_slots * table_bytes
        kept_bytes = align(4 * config.num_experts, 128) if num_staging else 0
        flights = kept + config.num_slots * kept_bytes
        copies = flights + (FLIGHT_BYTES * (config.num_slots + num_staging) if num_staging else 0)
        end = copies + num_staging * table_bytes
        members = LocalMembers.build(end) if config.enable_mask else None
        return cls(0, 128, 256, headers, tables, table_bytes, config.num_slots, members.end if members else end, kept, kept_bytes, flights, copies,
                   num_staging, members)

    @property
    def blocks_packed(self) -> int:
        """u32 counter of blocks that have packed their rows (NVFP4): not `blocks_done`, since a wait may end before all have."""
        return self.blocks_done + 8

    def header(self, slot: int) -> int:
        """Byte offset of a slot's header."""
        return self.headers + 2 * WORD * slot

    def table(self, slot: int) -> int:
        """Byte offset of a slot's (token, k) -> row table."""
        return self.tables + slot * self.table_bytes

    def keep(self, slot: int) -> int:
        """Byte offset of a slot's counts of received rows."""
        return self.kept + slot * self.kept_bytes

    def flight(self, index: int) -> int:
        """Byte offset of the flight of payload slot `index`, or of staging slot ``index - num_slots``."""
        return self.flights + FLIGHT_BYTES * index

    def copy(self, index: int) -> int:
        """Byte offset of the row table of staging slot `index`."""
        return self.copies + index * self.table_bytes

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of every region."""
        named = [("EPOCH", 0, 8), ("BLOCKS_DONE", 128, 144), ("FAIL", 256, 272), ("WAITS", 272, 288), ("SLOT_HEADERS", self.headers, self.tables)]
        named += self.members.regions() if self.members else []
        named += [(f"ROW_TABLE{i}", self.table(i), self.table(i) + self.table_bytes) for i in range(self.num_slots)]
        if not self.num_staging:
            return named
        named += [(f"KEPT{i}", self.keep(i), self.keep(i) + self.kept_bytes) for i in range(self.num_slots)]
        named += [(f"FLIGHT{i}", self.flight(i), self.flight(i) + FLIGHT_BYTES) for i in range(self.num_slots + self.num_staging)]
        return named + [(f"TABLE_COPY{i}", self.copy(i), self.copy(i) + self.table_bytes) for i in range(self.num_staging)]
