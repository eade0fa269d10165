"""Exceptions of operations, and the record by which a device tells its host what went wrong.

A device writes at most one record (`memory_map.RECORD_FIELDS`) into host memory and goes on; the host raises it at the next call on the group or
at ``Group.check()``.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from ncclep_py.memory_map import RECORD_FIELDS
from ncclep_py.signature import Signature

__all__ = [
    "Code",
    "EpClosedError",
    "EpError",
    "EpMaskedError",
    "EpMismatchError",
    "EpOverflowError",
    "EpPeerError",
    "EpRefusedError",
    "EpStaleError",
    "EpTimeoutError",
    "ErrorRecord",
    "Phase",
    "Status",
]


class Status(enum.IntEnum):
    """Status of a HEAD or ARRIVED word, bits 24 to 31; the low 24 bits are its detail."""

    GO = 0
    REFUSED = 1
    ABORT = 2
    LATE = 3


class Code(enum.IntEnum):
    """Why an operation failed on a rank."""

    TIMEOUT = 1
    ABORTED = 2
    REFUSED = 3
    MISMATCH = 4
    LEFT_BEHIND = 5
    OVERFLOW = 6
    STALE_SLOT = 7
    EXCLUDED = 16
    MASKED = 17
    WROTE_LATE = 18
    CAME_LATE = 19
    AGAIN = 32


SPREADS = (Code.TIMEOUT, Code.ABORTED, Code.LEFT_BEHIND)
"""Codes a rank must tell its peers; every rank sees the others itself."""


NOTICES = {
    Code.MASKED: "did not come in time; the operation took place without it",
    Code.CAME_LATE: "was masked and has come back; it takes no part until mask_clean",
    Code.WROTE_LATE: "was masked while it was writing and wrote rows afterwards; results since it was masked are suspect",
}
"""What the async error of a group with ``enable_mask`` says about a peer."""


class Phase(enum.IntEnum):
    """Where in an operation."""

    HEAD = 1
    COUNTS = 2
    ROWS = 3
    ARRIVED = 4
    SLOT = 5


class EpError(RuntimeError):
    """Base of all errors of a running operation.

    Attributes:
        everywhere: every rank of the group sees this failure of the same operation by itself.
    """

    everywhere = False


class EpTimeoutError(EpError):
    """A rank did not come in time.

    Attributes:
        rank: the rank that raises.
        peer: whom it waited for.
        culprit: the first rank that somebody gave up on.
        phase: `Phase`.
        epoch: epoch of the operation.
    """

    def __init__(self, message: str, record: ErrorRecord) -> None:
        super().__init__(message)
        self.rank, self.peer, self.culprit = record.rank, record.peer, record.culprit
        self.phase, self.epoch = Phase(record.phase), record.epoch


class EpRefusedError(EpError):
    """A peer's host refused this operation; the operation happened nowhere."""


class EpMismatchError(EpError):
    """Ranks called different operations."""


class EpOverflowError(EpError):
    """Rows did not fit and were left out; those that fit are right."""


class EpStaleError(EpError):
    """A slot or an output was used after something newer took its place."""


class EpMaskedError(EpError):
    """Groups with ``enable_mask``: the other ranks went on without this one; `Group.mask_clean` on all ranks takes it back."""


class EpClosedError(EpError):
    """The group, handle or communicator is closed."""


class EpPeerError(EpError):
    """Another rank of this process ended, so the operation cannot happen."""


@dataclasses.dataclass(frozen=True)
class ErrorRecord:
    """One record; fields as in `memory_map.RECORD_FIELDS`."""

    code: int
    epoch: int
    phase: int
    rank: int
    peer: int
    culprit: int
    seen: int
    expected: int

    @classmethod
    def read(cls, words: Any) -> ErrorRecord | None:
        """The record in `words`, or None if there is none."""
        return None if int(words[0]) == 0 else cls(*(int(w) for w in words[: len(RECORD_FIELDS)]))

    def exception(self, refusals: dict[int, str] | None = None) -> EpError:
        """This record as an exception; `refusals` maps a refusal's detail to its sentence."""
        error = self._exception(refusals)
        error.everywhere = self.code not in (Code.OVERFLOW, Code.EXCLUDED, *NOTICES)
        return error

    def _exception(self, refusals: dict[int, str] | None) -> EpError:
        where = f"rank {self.rank}, operation {self.epoch}, {Phase(self.phase).name} phase"
        if self.code == Code.TIMEOUT:
            return EpTimeoutError(f"{where}: rank {self.peer} did not come in time (saw its epoch {self.seen}, waited for {self.expected})", self)
        if self.code == Code.ABORTED:
            return EpTimeoutError(f"{where}: rank {self.peer} gave up because rank {self.culprit} did not come in time", self)
        if self.code == Code.LEFT_BEHIND:
            return EpTimeoutError(f"{where}: rank {self.peer} is already at operation {self.seen}; it gave up waiting for this rank", self)
        if self.code == Code.REFUSED:
            reason = (refusals or {}).get(self.seen, f"reason {self.seen}")
            return EpRefusedError(f"{where}: rank {self.peer} refused the call ({reason}); no data moved on any rank")
        if self.code == Code.MISMATCH:
            mine, theirs = Signature.unpack(self.expected), Signature.unpack(self.seen)
            return EpMismatchError(f"{where}: rank {self.peer} called another operation: {mine.difference(theirs)}")
        if self.code == Code.OVERFLOW and self.phase == Phase.COUNTS:
            return EpOverflowError(f"{where}: rank {self.peer} would receive {self.seen} rows, but max_recv_tokens_per_rank is {self.expected} and "
                                   "overflow_policy TRAP: rows beyond it are left out of this update's routing (as under DROP, which does not raise)")
        if self.code == Code.OVERFLOW and self.phase == Phase.SLOT:
            return EpOverflowError(f"{where}: {self.seen} rows were received, but the caller's tensor has only {self.expected}; the rest is left out")
        if self.code == Code.OVERFLOW:
            return EpOverflowError(f"{where}: row {self.seen} for an expert of rank {self.peer} is beyond its {self.expected} rows and was dropped")
        if self.code == Code.EXCLUDED:
            return EpMaskedError(f"{where}: the other ranks went on without this rank, and nothing it calls takes place until mask_clean")
        if self.code in NOTICES:
            return EpMaskedError(f"{where}: rank {self.peer} {NOTICES[Code(self.code)]}")
        held, wanted = self.seen >> 32, self.expected >> 32   # handle << 32 | its dispatch's generation
        what = f"dispatch {self.seen & 0xFFFFFFFF} of handle {held}, not {self.expected & 0xFFFFFFFF}; a later one was refused, failed or replayed"
        if self.seen == 0:
            what = "no dispatch, the last one failed"
        elif held != wanted:
            what = f"a dispatch of handle {held}, not of handle {wanted}"
        return EpStaleError(f"{where}: the slot holds {what}")
