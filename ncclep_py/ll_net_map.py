"""Every byte offset and signal of LOW_LATENCY over several teams, and why no late put is ever taken for data. Pure integers.

Rank r = team * team_size + index. Ranks of a team address each other's memory as ever; all others are *networked*: a rank puts to each of them
directly. What is for direct peers goes straight into its final place, as in one team. To a networked rank a row travels once, as a message {epoch, K
global rows, row} into the receiver's staging; a global row names an expert and the number of earlier rows of mine for it, so that sending waits for
no counts. The receiver knows how many rows lower ranks send to its experts (COUNTS inside the team, NET_COUNTS over the network), copies each row to
its place, and keeps where it put it (REMOTE, of the slot). Combine puts each of these rows back to the source's staging, which has a place for every
(token, k); the source adds direct rows and these in k order. So rows, their order and the bits of every sum are those of one team.

In RANK_MAJOR a global row names a rank and the row's place there, which nobody else has a say in; it stands at the first k with that rank. The
message holds K ids and weights, too, and the receiver keeps of the ids those of its own experts. No counts travel: how many rows a rank gets from me
is in my ARRIVED inside the team, in my TAG over the network. Combine puts one row per (token, rank) back, to the place of that k. Under a recipe a
scale row follows the row; DS_FP8 rows are made in send staging once, for networked ranks and for my team. NVFP4 rows are packed in place before
HEAD, as experts write theirs: no put reads a slot's rows then, since the dispatch that filled it, or a meeting since, has seen HEAD of all.

A signal lands after all puts that were issued before it on its context and to its rank; nothing else orders puts. Each networked source has at each
rank a HEAD signal (context 0, one add per operation) and on every context a DATA signal: one add per operation, on context 0 two, the first of them
after the counts, if there are any. These adds are made in every operation, also in one that is refused or given up. The local block counts operations
(COUNT). Besides the invariants of ``memory_map``, which hold inside each team:

* L-N1 HEAD(n) goes to a networked rank after all of that rank's DATA signals have come up to operation n (the *drain*): everything it ever put here
  has landed. Who reads HEAD(n) of a networked rank knows that none of its own earlier puts is under way there, and that nobody there reads them any
  more.
* L-N2 Counts and rows are put, and messages made, after HEAD(n) of *all* ranks. With L-N1 one bank of staging is enough, no put of an operation that
  failed can overtake a later one at the same place, and neither send staging nor the rows of a slot are written while a put still reads them: that
  put has landed.
* L-N3 A wait for what an operation put asks for a value of the signal that counts the adds of all operations before. Of the adds that landed one is
  of this operation, and all puts before it are there; a late add of an older operation is part of the count.
* L-N4 Before the last DATA signal on context 0, and also if the rank gives up, its TAG is put to those whose HEAD has come (L-N2): {epoch, 0} or, of
  a RANK_MAJOR dispatch, {epoch, rows}, below the status; or {epoch, ABORT, culprit}. TAGs, messages and returned rows are read after the signals of
  all contexts, and only if the TAG says that the rank did not give up. A rank whose HEAD came too late for that finds an old TAG, and knows only who
  gave up, not on whom.
* L-N5 A message carries its epoch: staging keeps those of older operations, and only this operation's count. Messages lie at one distance in all
  operations of a group, whatever their layout and recipe: where an epoch is looked for, no operation ever put anything but an epoch.
* L-N6 Sending waits for nobody after HEAD; all of it is signalled before the first wait for a networked rank's data.
* L-N7 ARRIVED is a matter of the team. A failure in another team after all HEADs surfaces where its data is missing.

Staged operations (``kernels/ll_net_staged.py``) keep S1 to S6 of ``memory_map`` inside each team; over the network:

* L-S1 (counting) Adds to one signal are counted, and each lands after all that its source put before it on its context. So who waits for the k-th
  add of a source has all that the source put before its k-th add, whichever adds came, and however many operations are in flight.
* L-S2 A staged dispatch is an operation of the group: HEAD, counts and rows are signalled in its send half, so L-N1 drains its puts like others',
  and the next operation enters when they have landed. What is read in its complete half belongs to the payload slot and is rewritten by the slot's
  next dispatch only (S3): messages received (MESSAGES has a bank per slot), in the place of TAGS FLIGHT words (RANK_MAJOR: ARRIVALS, with the number
  of rows), the counts (KEPT) that give rows their places, and the number of operations to count DATA adds to. HEAD, TAGS, NET_COUNTS and what is
  sent from are read before the next HEAD.
* L-S3 A staged combine is a use of its staging slot, which has signals of its own for every source: RELEASED (context 0) counts uses the source has
  emptied, DATA (every context) one add per use. A rank puts use u after RELEASED of *all* ranks counts u uses, as S4 says for stores.
* L-S4 A rank gives RELEASED of use u after it has read its rows *and* DATA of use u of all networked ranks has come up: no late put can fall on rows
  of a later use. (No late store can: the rank that stores gives its own RELEASED later, and that is waited for, too.) If a use did not come up in
  time the slot is not given back by its complete half; the next send half waits for it again first, with a deadline of its own. Only then does a
  send half wait for other ranks' send halves.
* L-S5 FLIGHT words of use u are put to networked ranks that have released u uses: these have read those of use u - 1. Who finds an old word after
  the DATA adds of a use knows that the rank gave up, not on whom (as L-N4).
* L-S6 Rows of a staged combine are put from the payload slot, and still read when the send half is over. A rank's HEAD therefore follows DATA of all
  uses it has itself sent and not released (the *staged drain*): all ranks issue dispatches and send halves in the same order, so this covers every
  use its peers put before. Nobody writes to a slot before HEAD of all; if the staged drain fails, HEAD says ABORT, to all, and no rank writes.
  (EXPERT_MAJOR dispatches need that. A RANK_MAJOR plane that is still being sent from is written with its own source's tokens, who gave up; who
  meets in a combine waits for TAGS, too.)
  For the same reason a second combine of a slot meets all ranks first, staged or not (the host's rule): rows may then be copied into the slot.
* L-S7 The network is quiet after a CLOSE that succeeds: its HEAD follows both drains.

Rows may be in a user window instead of the slot, ids, weights, REMOTE and staging are where they were. L-N2 holds for it word for word: nothing in
it asks where a put reads. Writers are those of a slot: ranks of the team and the owner (L-N2, after HEAD of all), NVFP4 packing, and experts, of whom
the library knows nothing. A put of a combine reads its row until L-N1 has drained it: rows may be written again after a later HEAD of *all* ranks was
read without a failure, that is after a later dispatch, its send half, or a fused combine, which is the rule of one team. Complete halves and staged
combines read no HEAD of all ranks. A staged combine puts from the slot, into which rows of a user window are copied.

A duplicate expert in a token can overflow a plane; what a networked rank drops then is recorded there, and the token's combined row is undefined.
"""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig, Layout
from ncclep_py.memory_map import SLOT_ALIGNMENT, WORD, LocalMap, WindowMap, align

__all__ = ["FLIGHT_COUNT", "FLIGHT_RELEASED", "LLNetMap"]

MAX_CONTEXTS = 4
FLIGHT_COUNT, FLIGHT_RELEASED = 64, 72
"""In a flight of the local block, u64: operations, or uses of a staging slot, up to the newest sent; uses released."""


@dataclasses.dataclass(frozen=True)
class LLNetMap:
    """What is added to the plans of a LOW_LATENCY group whose ranks form several teams.

    Attributes:
        team_size: ranks of a team.
        tokens: most tokens of a rank, M.
        num_contexts: contexts of the network; token t uses t % num_contexts.
        tags: window offset of ``[R]`` u64 {epoch, 0, rows (RANK_MAJOR dispatch) or ABORT and culprit}.
        counts_sent: window offset of ``[E]`` u64, my rows per expert.
        net_counts: window offset of ``[R][team_size * L]`` u64, rows of each networked source for my team's experts.
        header_bytes: bytes of a message before its row, EXPERT_MAJOR: {1 << 32 | epoch: u64, K global rows: int32}, padded.
        routed_header_bytes: the same, RANK_MAJOR: then K ids, int32, and K weights, float32.
        message_bytes: bytes from one message to the next, whatever is sent: no operation writes a row where another has its epoch.
        sent: window offset of ``[M]`` messages of mine: header, row, scale row.
        messages: window offset of ``[banks][R][M]`` messages received; a bank per payload slot with staging, else one.
        messages_bytes: distance of two banks, 0 if there is one.
        returned: window offset of ``[M * K]`` rows that came back; none with ``enable_mask``.
        total_bytes: size of the window.
        count: offset of COUNT, u64, in the local block; after it a second counter of blocks.
        remote: offset of ``[num_slots][R][M][K]`` int32 in the local block: row in the slot of each received (source, token, k), -1 for none.
        remote_bytes: bytes of one slot's.
        local_bytes: size of the local block.
        num_staging: staging slots.
    """

    num_ranks: int
    team_size: int
    tokens: int
    num_contexts: int
    tags: int
    counts_sent: int
    net_counts: int
    header_bytes: int
    routed_header_bytes: int
    message_bytes: int
    sent: int
    messages: int
    returned: int
    total_bytes: int
    count: int
    remote: int
    remote_bytes: int
    local_bytes: int
    messages_bytes: int = 0
    num_staging: int = 0

    @classmethod
    def build(cls, config: GroupConfig, num_ranks: int, team_size: int, window: WindowMap, local: LocalMap) -> LLNetMap:
        """The plan for a group of several teams, whose plans for one team are `window` and `local`."""
        if not 0 < team_size < num_ranks or num_ranks % team_size:
            raise ValueError(f"team_size must divide num_ranks = {num_ranks} and be smaller, got {team_size}")
        experts, tokens, topk = config.num_experts, config.max_dispatch_tokens_per_rank, config.num_topk
        tags = align(window.total_bytes, SLOT_ALIGNMENT)
        counts_sent = align(tags + num_ranks * WORD, 128)
        net_counts = align(counts_sent + experts * WORD, 128)
        header_bytes, routed_header_bytes = align(WORD + 4 * topk, 16), align(WORD + 12 * topk, 16)
        message_bytes = (header_bytes if config.slot_layout is Layout.EXPERT_MAJOR else routed_header_bytes) + align(window.token_bytes, 16)
        sent = align(net_counts + num_ranks * team_size * (experts // num_ranks) * WORD, SLOT_ALIGNMENT)
        messages = align(sent + tokens * message_bytes, SLOT_ALIGNMENT)
        bank = align(num_ranks * tokens * message_bytes, SLOT_ALIGNMENT)
        returned = messages + bank * (config.num_slots if window.num_staging else 1)
        come_back = 0 if config.enable_mask else tokens * topk * window.row_bytes   # with masks: ll_net_member_map
        count = align(local.total_bytes, 128)
        remote, remote_bytes = count + 128, align(4 * num_ranks * tokens * topk, 128)
        return cls(num_ranks, team_size, tokens, min(tokens, MAX_CONTEXTS), tags, counts_sent, net_counts, header_bytes,
                   routed_header_bytes, message_bytes, sent, messages, returned, align(returned + come_back, SLOT_ALIGNMENT),
                   count, remote, remote_bytes, remote + config.num_slots * remote_bytes, bank if window.num_staging else 0, window.num_staging)

    @property
    def num_signals(self) -> int:
        """Signals of a rank on each context: HEAD and DATA of every source; of each staging slot RELEASED and DATA of every source."""
        return self.first_signal(self.num_staging)

    def first_signal(self, index: int) -> int:
        """First of the signals of staging slot `index`."""
        return 2 * self.num_ranks * (1 + index)

    def slot_messages(self, slot: int) -> int:
        """Window offset of the messages received for a slot."""
        return self.messages + slot * self.messages_bytes

    def slot_remote(self, slot: int) -> int:
        """Offset of a slot's REMOTE in the local block."""
        return self.remote + slot * self.remote_bytes

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of the added regions of the window."""
        return [("TAGS", self.tags, self.counts_sent), ("COUNTS_SENT", self.counts_sent, self.net_counts),
                ("NET_COUNTS", self.net_counts, self.sent), ("STAGING_SENT", self.sent, self.messages),
                ("STAGING_MESSAGES", self.messages, self.returned), ("STAGING_RETURNED", self.returned, self.total_bytes)]

    def local_regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of the added regions of the local block."""
        return [("COUNT", self.count, self.count + 8), ("BLOCKS_DONE2", self.count + 8, self.count + 16), ("REMOTE", self.remote, self.local_bytes)]
