"""Groups over several teams with ``enable_mask``: who is a member, agreed by words that are put; offsets of what that adds. Pure integers.

In one team ranks agree by compare-and-swap on each other's memory (``member_map``). Over a network there are puts, value puts and signals only, and a
rank that others go on without may have puts under way. The model: a rank is fail-stop, or sleeps between operations as long as it likes; inside an
operation it stalls, and the network delivers, within less than a quarter of the timeout. Every attempt at an operation has an epoch and a mask, on
all its members alike; it commits, fails, or is followed by one under a larger mask, on all members that live alike.

* T-N1 (isolation) A rank writes into another's memory, by store or put, only words and rows that belong to the writer: HEAD, VIEWS, ARRIVED, its
  MESSAGES, its RETURNED rows. Whoever is in the mask has none of them read. So what a late rank writes, when and however torn it lands, is in no
  result, and nobody has to hold it back. Rows for my own team go through MESSAGES and RETURNED, too; only the receiver writes into a payload slot.
* T-N2 (pairs) Signals are counted per pair (ADDS): who enters an attempt adds 1 to HEAD and to DATA of every context at every member of its mask,
  whatever comes of it. Both members of a pair have the same mask, so what is awaited is what was added. Nothing is put to, or signalled at, a rank
  that was masked and TOLD so: puts to a rank that is gone number no more than those of one attempt.
* T-N3 (drain) HEAD(n + 1) goes to a member after all its adds up to n have come, so all it ever put here has landed, its views included (T-N5); a
  member whose adds do not come counts as missing. Who has HEAD(n + 1) of all members may write over what it sends from, and over its words and rows
  at them. What is under way to a *masked* rank may still read the send buffer: it brings that rank rows of another attempt, and it is told so (T-N7).
* T-N4 (giving up) Data are put after HEAD(n) of all members; sending waits for nobody. (A put for which there is no room in its queue within an
  eighth of the timeout is left out, like all later ones to that rank, which misses this one then.) Waits for members' data end when all came, when a
  member's first view differs from the mask, or by their deadline. DATA and ARRIVED are told after a rank's last put, also by one that sent nothing:
  it says so by its view. No view is taken back, so an attempt in which one member lacks another's HEAD or data does not commit.
* T-N5 (views) A view is {whom I miss or anybody told me to miss, FAILED: an operation refused or different, DIFFERS: it is not my mask}. In round 1,
  2, ... a rank says its view to all members of the attempt's mask, hears those of all members not in it, adds to it what they say and who is silent.
  A round in which it heard exactly its own view from all of them *decides*: it says DECIDED to all members, in a word of its own, and leaves. Who
  hears DECIDED decides the same at once, and says so. Views carry epoch and round in a place per (parity, round, source), and a value put comes
  whole.
* T-N6 (agreement) Let r be the first round that decides, of A, view W. Each rank outside W said W in r, the same to all; so the others of them hear
  nothing but W, decide W, too, or miss somebody. These hear DECIDED of A in r + 1 before they could decide otherwise, since they wait for A's
  word: A lives, or it died and is no survivor. Two views of one round cannot both decide: each decider is outside the other's view. An attempt
  commits if what is decided has no DIFFERS: then all members have this mask, and all data; it fails if that has FAILED, but no DIFFERS. Else the
  ranks in it are the next mask of all, also where masks differed (``mask_update``) and it is the mask of some.
* T-N7 A rank that hears itself in a view is out: it fails, and ends later operations before it touches a peer. Views go to all members, so to those
  in them, and in the first attempt after a ``mask_update`` to whom that masked: after that these are TOLD. A late rank finds all words of the
  attempt it missed, for nobody wrote there since: HEAD of all, and views with itself in them.
* T-N8 (bounds) A round that does not decide adds somebody to the views of all that live, or somebody dies in it, or it is the one after: at most
  R + 2 rounds. Deadlines grow, because a member may have waited for a dead one before it says its word: drain 1/2 timeout, HEAD 5/4, data 3/2,
  round r (7 + r) / 4. At most 2 R + 2 attempts. No wait is without deadline.
* T-N9 Adds of a masked rank that come after all say that it came late: the async error. Nothing that it wrote was used (T-N1).
* T-N10 (``mask_clean``) One agreement of T-N5 and T-N6 among all ranks, with words and an epoch of its own. JOIN of a rank tells its next epoch, and
  to each rank how many adds it ever made there (MADE, which counts all attempts it entered, and these calls). A rank waits for JOIN of all and for
  these adds, so all that a member ever put to another has landed, and both know what to count from (T-N2); the others are missing. Who is decided to
  come is a member; all members go on at the largest of their epochs + 1, with empty slots. Whom a member masks only now did not come: it is told by a
  view of the operation it will make next. Whoever was told to be out by then says so in its JOIN; if all members were, those who went on are not
  among them, and all are out: no group forms beside theirs. Who finds JOINs of later calls goes there; who is out of a call, or finds some ranks in
  it and some further on, says so in it and tries the next, twice. All who call add to their signals at the end, so these words are drained, too.

A link that fails between two living ranks makes each, or both, a missing one for the other; views union this, so all go on without either that
anybody misses. If the whole network of a rank fails, its team, which it still reaches, learns both from it and from all others whom they miss, and
goes on alone; if its team is itself only, the others go on without it, and it without them: that nobody hears it, it cannot know.
"""

from __future__ import annotations

import dataclasses

from ncclep_py.config import GroupConfig
from ncclep_py.ll_net_map import LLNetMap
from ncclep_py.memory_map import SLOT_ALIGNMENT, WORD, align

__all__ = ["DIFFERS", "FAILED", "SAID", "LLNetMemberMap"]

FAILED, SAID, DIFFERS = 1 << 29, 1 << 30, 1 << 31
"""Bits of a view beside the ranks: an operation refused or different; in its word: not fresh memory, in what `hear` returns: decided; not all whose
view it is have it for their mask."""


@dataclasses.dataclass(frozen=True)
class LLNetMemberMap:
    """What masks add to the plan of a group over several teams.

    Attributes:
        rounds: most rounds of an agreement.
        views: window offset of ``[2 banks][rounds + 1][R]`` u64 {epoch, SAID and view}; the first of a bank are DECIDED.
        returned: window offset of ``[R][M * K]`` rows that came back, by the rank that hosts the expert.
        returned_bytes: bytes of one rank's.
        total_bytes: size of the window.
        joins: window offset of ``[2 banks][R][4]`` u64 {epoch of mask_clean, and: 1 | told to be out << 1; next epoch; my adds there so far; -}.
        clean_views: window offset of the views of ``mask_clean``, as `views`.
        adds: offset in the local block of ``[32]`` u64: attempts in which that rank and I were members, but for the one that masked it.
        made: offset in the local block of ``[32]`` u64: adds that I made at that rank.
        told: offset in the local block of u64, a bit per rank that was told to be out.
        go: offset in the local block of u64 {epoch, view}: what this rank saw of the HEADs of the attempt.
        local_bytes: size of the local block.
    """

    rounds: int
    views: int
    joins: int
    clean_views: int
    returned: int
    returned_bytes: int
    total_bytes: int
    adds: int
    made: int
    told: int
    go: int
    local_bytes: int

    @classmethod
    def build(cls, config: GroupConfig, num_ranks: int, net: LLNetMap) -> LLNetMemberMap:
        """The plan of a group whose plan without masks is `net`."""
        rounds = num_ranks + 2
        views = align(net.total_bytes, SLOT_ALIGNMENT)
        size = 2 * (rounds + 1) * num_ranks * WORD
        joins = align(views + size, 128)
        clean_views = align(joins + 2 * num_ranks * 4 * WORD, 128)
        returned = align(clean_views + size, SLOT_ALIGNMENT)
        returned_bytes = config.max_dispatch_tokens_per_rank * config.num_topk * config.row_bytes
        adds = align(net.local_bytes, 128)
        end = align(returned + num_ranks * returned_bytes, SLOT_ALIGNMENT)
        return cls(rounds, views, joins, clean_views, returned, returned_bytes, end, adds, adds + 256, adds + 512, adds + 640, adds + 768)

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of the added regions of the window."""
        return [("VIEWS", self.views, self.joins), ("CLEAN_JOINS", self.joins, self.clean_views), ("CLEAN_VIEWS", self.clean_views, self.returned),
                ("STAGING_OF_RANKS", self.returned, self.total_bytes)]

    def local_regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of the added regions of the local block."""
        return [("ADDS", self.adds, self.made), ("MADE", self.made, self.told), ("TOLD", self.told, self.told + 8), ("GO", self.go, self.go + 8)]
