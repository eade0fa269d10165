"""Control words of groups with ``enable_mask``: who is a member of the group, decided by all members alike. Part of the memory map.

The problem: ranks that wait for a silent rank must all go on without it, or all with it; and a rank they went on without must not write into
their memory afterwards. The model: a rank is fail-stop (its memory stays readable, as CUDA keeps it for those who mapped it), or stalls inside a
kernel for less than the timeout; between its operations it may sleep as long as it likes. Every *attempt* at an operation has an epoch of its own
and a mask all its members agree on; an attempt either commits or is given up, on all members alike, and then the next one runs under a mask they
agree on, too:

* M1 JOIN(n) takes the place of HEAD(n), with the sender's mask as a detail. A block goes on when JOIN(n) of all members of *its* mask is there,
  and all tell the same mask (I2 with "all members" in the place of "all ranks").
* M2 VOTE of a rank is one word in its own window, changed by compare-and-swap only: WRITES(n) before the first block of the rank touches a peer's
  rows, COMMIT(n) when the rank has seen the operation complete (dispatch: ARRIVED of all members; combine: M1, nothing can fail after that).
  Whoever waits for longer than the timeout, or sees another mask, *locks* the votes of all ranks: LOCKED(n) in the place of anything but
  COMMIT(n), remembering whether it replaced WRITES(n). After one pass nobody can begin to write in n, or commit it, that has not.
* M3 So every pass, whoever makes it, finds the same: if any vote is COMMIT(n), the operation is complete for all (the committer had acquired what
  every member released, and passes it on); else attempt n is dead. Then VERDICT(n), a word in rank 0's window, is decided by compare-and-swap: the
  mask of attempt n + 1. A pass has no waits; who finds its own vote locked makes one itself, so a rank that dies in the middle of one blocks nobody.
* M4 The mask grows only by ranks whose JOIN(n) was missing and whose vote was not WRITES(n): it was locked before it wrote a row of n, and never
  will. A member that is silent *after* its JOIN is not masked: the attempt is given up, and it must show up for JOIN(n + 1) like everybody. It is
  masked only if it stalled for two timeouts inside a kernel, which the model excludes; see M6. Waits for JOIN last a quarter longer than others:
  a member that waits for a dead one's counts or ARRIVED gives up before those wait for its own next JOIN any longer.
  How many rows RANK_MAJOR brings is told before ARRIVED, which a COMMIT follows: who learns of a COMMIT from another rank may not see ARRIVED itself.
* M5 JOIN(n + 1) of a rank follows the end of all its blocks' work in attempt n. With M1: remote phases of two attempts never overlap, so attempt
  n + 1 may write over the rows of n. The epoch advances once per attempt, on all members alike (I7).
* M6 A masked rank finds its vote locked in a later epoch, or the verdict with itself in it: its operation fails there, and all its later ones end
  before they touch a peer, until ``mask_clean``. If it had begun to write (the model was violated), it says so by ARRIVED with status LATE; members
  look at these words in every operation and raise the async error: results since it was masked are suspect.
* M7 ``mask_clean`` is the same agreement among all ranks on words of its own, with an epoch of its own: who comes within the timeout is a member
  afterwards, and all members continue at the largest of their epochs + 1. Slots are empty then. A rank that the others went on without, and that
  meets none of them, is no member: else it would be a group of its own. It knows from VERDICT, which mask_clean sets, too.

Staged operations (``send_only``) do all their work in the send half, and have no staging slots. A dispatch is not over before its members know
whether it is repeated, and by then all rows are there. A combine that pushes rows meets nobody before it does so; a rank that slept while the
others went on without it would push rows of theirs over, and no vote is taken that could hold it back. To take one is to meet.

Agreement by induction: members of attempt n have equal masks, learn the same outcome of n (M3), hence have equal masks in n + 1. A member that
reads a vote of an epoch after its own has been masked: votes of n + 1 change only after JOIN(n + 1) of all members, or when a member waited for a
JOIN(n + 1) for the timeout, and mine is missing as long as I have not resolved n. Two ranks whose masks differ (``mask_update`` with different
masks) and that are both members for each other see it in M1; ranks that mask each other go separate ways, and nobody can tell them.
"""

from __future__ import annotations

import dataclasses

__all__ = ["MAX_MASKED_RANKS", "LocalMembers", "WindowMembers"]

MAX_MASKED_RANKS = 29
"""A vote holds a mask in 29 bits."""

WORD = 8
UNIT = 128


def _align(value: int) -> int:
    return -(-value // UNIT) * UNIT


@dataclasses.dataclass(frozen=True)
class WindowMembers:
    """Byte plan of the words in the window; offsets from the window's first byte.

    Attributes:
        joins: ``[2 banks][R sources]`` of u64 {epoch << 32 | status << 24 | detail}.
        details: ``[2 banks][R sources]`` of four u64 {signature, mask, next epoch (`mask_clean`), epoch << 32 | rows (RANK_MAJOR)}.
        votes: u64 vote of the window's rank {epoch << 32 | state << 29 | mask or reason}, then u64 verdict (rank 0's counts).
        clean: the same three for ``mask_clean``.
        end: end of all.
    """

    num_ranks: int
    joins: int
    details: int
    votes: int
    clean: WindowMembers | None
    end: int

    @classmethod
    def build(cls, begin: int, num_ranks: int, clean: bool = True) -> WindowMembers:
        """The plan from byte `begin`, a multiple of 128."""
        details = _align(begin + 2 * num_ranks * WORD)
        votes = _align(details + 2 * num_ranks * 4 * WORD)
        end = votes + UNIT
        more = cls.build(end, num_ranks, False) if clean else None
        return cls(num_ranks, begin, details, votes, more, more.end if more else end)

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of every region."""
        named = [("JOIN", self.joins, self.details), ("DETAIL", self.details, self.votes), ("VOTE", self.votes, self.votes + UNIT)]
        return named + ([(f"CLEAN_{name}", begin, end) for name, begin, end in self.clean.regions()] if self.clean else [])


@dataclasses.dataclass(frozen=True)
class LocalMembers:
    """Byte plan of a rank's own words; offsets from the local block's first byte.

    Attributes:
        mask: u64, bit r set: rank r is masked out.
        outcome: u64 {epoch << 32 | result} of the last attempt; the last block tells the others.
        masked_at: ``[32]`` of u64, epoch in which a masked rank was masked << 32 | what was reported about it since.
        waited: ``[32]`` of u64, nanoseconds waited for each rank.
        wrote: u64, the last vote this rank cast after a join: whether it began to write.
        clean_epoch: u64, epoch of the next ``mask_clean``.
        scratch: FAIL and record of ``mask_clean``, whose result the host reads from `outcome`.
        end: end of all.
    """

    mask: int
    outcome: int
    masked_at: int
    waited: int
    wrote: int
    clean_epoch: int
    scratch: int
    end: int

    @classmethod
    def build(cls, begin: int) -> LocalMembers:
        """The plan from byte `begin`, a multiple of 128."""
        return cls(begin, begin + 128, begin + 256, begin + 512, begin + 768, begin + 776, begin + 896, begin + 1024)

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, first byte, end byte) of every region."""
        return [("MASK", self.mask, self.mask + 8), ("OUTCOME", self.outcome, self.outcome + 8), ("MASKED_AT", self.masked_at, self.waited),
                ("WAITED", self.waited, self.wrote), ("WROTE", self.wrote, self.wrote + 8), ("CLEAN_EPOCH", self.clean_epoch, self.clean_epoch + 8),
                ("CLEAN_FAIL", self.scratch, self.scratch + 16), ("CLEAN_RECORD", self.scratch + 64, self.scratch + 128)]
