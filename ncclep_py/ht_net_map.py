"""Every byte offset and signal of HIGH_THROUGHPUT over several teams, and why no late put is ever taken for data. Pure integers.

Rank r = team * team_size + index. Ranks of a team address each other's memory as ever. Of other teams a rank knows only its rail peers, the ranks of
the same index; to them it *puts* over the network. The distance of team b from team a is (a - b) modulo the teams; sums take teams in this order.

Design. A token goes once to each remote team that wants it: its row and a header (its rows in the group, its weights) to the rail peer's staging,
which fans it out inside its team, straight into the final rows, and keeps the rows of that fan-out in its maps (REMOTE). Combine goes back the same
way: the rail peer adds the team's rows of the token up in fp32, rounds once to the token type, and puts this one row (backward: and the gradients of
weights) into the source's staging; the source adds its own team's rows and then the remote sums. An update puts a rank's totals (HITS) and what it
kept (KEPT) to its rail peers, and these forward the words inside their teams, so that every rank has the words of all. All this is cut into chunks of
tokens, a channel works on every so many'th chunk, and each (source team, channel) has a signal: sending and receiving go on side by side.

A signal lands after all puts that were issued before it on its context and to its rank. Nothing else orders puts. Every channel's signal gets exactly
`adds` per operation, also in one that is refused or given up, whatever kind of operation it is. The local block counts operations (COUNT), so "the
signal is at least count * adds" says that all puts of that channel in operations before this one have landed. Besides the invariants of
``memory_map``, which hold inside each team:

* H-N1 HEAD(n) goes to a rail peer after all signals of that peer have come up to operation n (the *drain*): everything it ever put here has landed.
  So whoever reads HEAD(n) of a rail peer knows that none of its own earlier puts is under way there, and that nobody there reads them any more.
* H-N2 Data is put after HEAD(n) of *all* ranks. With H-N1 one bank of staging is enough, and no put of an operation that failed can overtake a later
  one at the same place, however late it lands; nor is send staging overwritten while a put reads it, for that put has landed.
* H-N3 A wait for chunk i of a channel is for count * adds + i + 1. The i + 1 adds were issued in order, so the last of those that landed is that of
  chunk i or a later one, and with it all puts of chunk i are there. A late signal of an older operation is part of count * adds.
* H-N4 Before each chunk's signal, and also if the rank gives up, its TAG is put: {epoch, 0}, or {epoch, ABORT, culprit}. So a chunk whose sender gave
  up is not taken for data, and the culprit is known at once. TAGs and staging are read only after the signal. A rank that gives up puts its TAGs
  without HEAD(n) of the peer, so an older TAG may land later and hide one of them: then the chunk counts as not sent, and its sender is named.
* H-N5 HEAD words of ranks of other teams lie in the window of *my* team's rank of the same index; who waits for HEAD of all ranks reads them there.
  They carry their epoch, are compared with ``==`` and order nothing: what they order for, the drain's and the HEAD signals do (a rail peer's). Two
  banks by parity as in ``memory_map``. After a failed operation a HEAD that is older still may land late and hide a newer one: then that
  operation fails, too, in time and by name; nothing is ever written because of it.
* H-N6 Sending waits for nobody after HEAD: all chunks are sent before the first wait for one. So a chunk that does not come is the fault of its
  sender or of the network, or its sender still waits for a HEAD that its receiver has: that wait began earlier, and tells (H-N4), if there is time
  to. KEPT are the exception: they are sent after all HITS have come.
* H-N7 Ranks of other teams never touch my slots, so ARRIVED is a matter of the team: my team has written its own tokens' rows and those it fanned
  out. A failure in another team after all HEADs surfaces there, and here at the next operation, which that rank's host refuses.
* H-N8 HITS and KEPT are put to a place of their own (a put may land in pieces, in any order); after the signal the rail peer copies them, word by
  word, to HITS and KEPT of its team, where they are as in one team. HITS are put from where I read them myself, so they are written after the HEAD
  signals of all rail peers (H-N1): no put of an operation before this one reads them any more, also after any number that were given up.
* H-N9 Who waits for somebody who may himself wait has a longer deadline, so that the other gives up first and tells on whom; if it tells nothing it
  is the culprit itself. With T the deadline for the network: forwarded words, and ARRIVED of the team, have 2 T (a forwarder waits for HEAD signals,
  then for a chunk). KEPT come from ranks that had 2 T for HITS, and HITS of such a rank have come, so its wait began before: their chunks have
  2 1/4 T, words 2 1/2 T. A quarter is for a message and for ranks that begin apart; nobody waits longer. In an update one block waits for the
  network while others wait for its words, and would hold back the last block: so it tells in HEAD at once, and all who wait for words of a rank of
  my team, its own or forwarded ones, look there.
"""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig
from ncclep_py.cost_model import group_chunk_tokens
from ncclep_py.ht_memory_map import HTMaps, HTWindowMap
from ncclep_py.memory_map import SLOT_ALIGNMENT, WORD, LocalMap, align
from ncclep_py.topology import Topology

__all__ = ["HTNetMap"]

MAX_CHANNELS = 16
MAX_CONTEXTS = 4
"""What NCCL offers unless more are asked for; by the cost model, time never grows with their number."""


@dataclasses.dataclass(frozen=True)
class HTNetMap:
    """What is added to the plans of a HIGH_THROUGHPUT group whose ranks form several teams. Slots of remote teams are by distance, from 1.

    Attributes:
        num_teams: T.
        team_size: ranks of a team.
        tokens: most tokens of a rank, M.
        chunk_tokens: tokens of a chunk, at most 32.
        chunks: chunks of M tokens.
        channels: shares of chunks; chunk c belongs to channel c % channels.
        adds: what each channel's signal gets per operation.
        num_contexts: contexts of the network, channel q uses q % num_contexts.
        tags: window offset of ``[T - 1][max(chunks, 2)]`` u64 {epoch, 0 or ABORT and culprit}.
        hits: window offset of ``[T - 1][E + R]`` u64, where rail peers put their HITS.
        kept: window offset of ``[T - 1][team_size * L]`` u64, where rail peers put their KEPT.
        kept_sent: window offset of ``[E]`` u64, my KEPT for all experts.
        headers_sent, headers: ``[M]`` and ``[T - 1][M]`` of `header_bytes` {routes [K] i64, places [K] i64, weights [K] f32}; combine:
            ``[T - 1][M][K]`` float32 gradients, sent and received.
        rows_sent, rows: ``[T - 1][M]`` rows sent and received (dispatch sends the first M to every team); scales follow the rows of each team.
        total_bytes: size of the window.
        count: offset of COUNT, u64, in the local block.
        local_bytes: size of the local block.
    """

    num_ranks: int
    num_teams: int
    team_size: int
    tokens: int
    chunk_tokens: int
    chunks: int
    channels: int
    adds: int
    num_contexts: int
    tags: int
    tag_bytes: int
    hits: int
    hits_bytes: int
    kept: int
    kept_bytes: int
    kept_sent: int
    headers_sent: int
    headers: int
    header_bytes: int
    rows_sent: int
    rows: int
    team_rows: int
    total_bytes: int
    count: int
    local_bytes: int

    @classmethod
    def build(cls, config: GroupConfig, num_ranks: int, team_size: int, window: HTWindowMap, local: LocalMap,
              chunk_tokens: int = 0) -> HTNetMap:
        """The plan for a group of several teams, whose plans for one team are `window` and `local`; `chunk_tokens` 0: the cost model's choice."""
        if not 0 < team_size < num_ranks or num_ranks % team_size:
            raise ValueError(f"team_size must divide num_ranks = {num_ranks} and be smaller, got {team_size}")
        chunk_tokens = chunk_tokens or group_chunk_tokens(config, Topology(num_ranks, team_size))
        if not 0 < chunk_tokens <= 32:
            raise ValueError(f"chunk_tokens must be in [1, 32], got {chunk_tokens}")
        teams, experts, tokens = num_ranks // team_size, config.num_experts, config.max_dispatch_tokens_per_rank
        chunks = -(-tokens // chunk_tokens)
        channels = min(chunks, MAX_CHANNELS)
        adds = max(2, -(-chunks // channels))
        others = teams - 1
        tag_bytes, hits_bytes = max(chunks, 2) * WORD, (experts + num_ranks) * WORD
        kept_bytes = team_size * (experts // num_ranks) * WORD
        tags = align(window.total_bytes, SLOT_ALIGNMENT)
        hits = align(tags + others * tag_bytes, 128)
        kept = align(hits + others * hits_bytes, 128)
        kept_sent = align(kept + others * kept_bytes, 128)
        header_bytes = align(20 * config.num_topk, 16)
        headers_sent = align(kept_sent + experts * WORD, SLOT_ALIGNMENT)
        headers = align(headers_sent + tokens * max(header_bytes, 4 * config.num_topk * others), SLOT_ALIGNMENT)
        rows_sent = align(headers + others * tokens * header_bytes, SLOT_ALIGNMENT)
        team_rows = tokens * window.row_bytes
        rows = align(rows_sent + others * team_rows, SLOT_ALIGNMENT)
        count = align(local.total_bytes, 128)
        return cls(num_ranks, teams, team_size, tokens, chunk_tokens, chunks, channels, adds, min(channels, MAX_CONTEXTS), tags, tag_bytes, hits,
                   hits_bytes, kept, kept_bytes, kept_sent, headers_sent, headers, header_bytes, rows_sent, rows, team_rows,
                   align(rows + others * team_rows, SLOT_ALIGNMENT), count, count + 128)

    @property
    def signals_per_team(self) -> int:
        """Signals a source has at each rail peer: HEAD, then one per channel."""
        return self.channels + 1

    @property
    def num_signals(self) -> int:
        """Signals of a rank."""
        return self.num_teams * self.signals_per_team

    def remote_bytes(self, num_topk: int) -> int:
        """Bytes of REMOTE in a handle's maps: routes and places of ``[T - 1][M][K]``."""
        return 2 * self.remote_table(num_topk)

    def remote_table(self, num_topk: int) -> int:
        """Bytes of one of the two tables."""
        return align(8 * (self.num_teams - 1) * self.tokens * num_topk, 128)

    def remote(self, maps: HTMaps) -> int:
        """Offset of REMOTE in a handle's maps: after what they hold in one team."""
        return align(maps.total_bytes, 128)

    def maps_bytes(self, maps: HTMaps, num_topk: int) -> int:
        """Size of a handle's maps."""
        return self.remote(maps) + self.remote_bytes(num_topk)

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of the added regions of the window."""
        others = self.num_teams - 1
        return [("TAGS", self.tags, self.tags + others * self.tag_bytes), ("NET_HITS", self.hits, self.hits + others * self.hits_bytes),
                ("NET_KEPT", self.kept, self.kept + others * self.kept_bytes), ("KEPT_SENT", self.kept_sent, self.headers_sent),
                ("HEADERS_SENT", self.headers_sent, self.headers), ("HEADERS", self.headers, self.rows_sent),
                ("STAGING_SENT", self.rows_sent, self.rows), ("STAGING_ROWS", self.rows, self.total_bytes)]

    def maps_regions(self, maps: HTMaps, num_topk: int) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of REMOTE in a handle's maps."""
        at, table = self.remote(maps), self.remote_table(num_topk)
        return [("REMOTE_ROUTES", at, at + table), ("REMOTE_PLACES", at + table, at + 2 * table)]
