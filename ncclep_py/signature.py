"""What an operation is, in 64 bits: carried by HEAD, compared by every rank, readable in an error message."""

from __future__ import annotations

import dataclasses
import enum

from ncclep_py.config import Layout, TokenType

__all__ = ["OpKind", "Signature"]


class OpKind(enum.IntEnum):
    """Kind of an operation on a group."""

    DISPATCH = 1
    COMBINE = 2
    CLOSE = 3
    STAGED_DISPATCH = 4
    STAGED_COMBINE = 5
    UPDATE = 6
    CLEAN = 7


_FIELDS = (("kind", 4), ("layout", 3), ("token_type", 4), ("recipe", 4), ("slot", 6), ("num_topk", 6), ("row_vectors", 20), ("global_ids", 1),
           ("scale_vectors", 8), ("backward", 1), ("alignment", 5))
"""62 bits in all: HEAD carries them in two words beside the epoch and the status."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """Fields that must be equal on all ranks for one operation.

    Attributes:
        kind: `OpKind`.
        layout: `config.Layout`.
        token_type: `config.TokenType`; QUANT_FWD: number of the element type in `recipes.opaque_types`.
        recipe: quantisation recipe, and 4 if its scales are rounded.
        slot: payload slot.
        num_topk: K.
        row_vectors: 16-byte vectors of a row.
        global_ids: numbering of the ids RANK_MAJOR and FLAT receive, 0 from the receiver's first expert, 1 from the group's.
        scale_vectors: 16-byte vectors of a scale row (QUANT_FWD).
        backward: 1 in a backward pass (HT).
        alignment: logarithm of the alignment of zones (HT).
    """

    kind: int
    layout: int
    token_type: int
    recipe: int
    slot: int
    num_topk: int
    row_vectors: int
    global_ids: int = 0
    scale_vectors: int = 0
    backward: int = 0
    alignment: int = 0

    def pack(self) -> int:
        """The signature as a non-negative integer below 2^62."""
        word, shift = 0, 0
        for name, bits in _FIELDS:
            value = int(getattr(self, name))
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} must be in [0, {1 << bits}), got {value}")
            word |= value << shift
            shift += bits
        return word

    @classmethod
    def unpack(cls, word: int) -> Signature:
        """The signature packed in `word`."""
        values = {}
        for name, bits in _FIELDS:
            values[name] = word & ((1 << bits) - 1)
            word >>= bits
        return cls(**values)

    def difference(self, other: Signature) -> str:
        """The fields in which `other` differs, for a sentence: ``slot 0 here, 1 there``."""
        pairs = ((name, self._named(name), other._named(name)) for name, _ in _FIELDS if getattr(self, name) != getattr(other, name))
        return ", ".join(f"{name} {mine} here, {theirs} there" for name, mine, theirs in pairs)

    def _named(self, field: str) -> str:
        """A field's value in words."""
        value = int(getattr(self, field))
        names: dict[str, type[enum.IntEnum]] = {"kind": OpKind, "layout": Layout}
        if self.recipe == 0:   # else the number of another element type
            names["token_type"] = TokenType
        if field in names and value in names[field]._value2member_map_:
            return names[field](value).name.lower()
        return str(value)
