"""Which tokens, and which piece of their rows, a block and a warp work on."""

from __future__ import annotations

import dataclasses

from ncclep_py.simulator.task import Task

__all__ = ["Share"]


@dataclasses.dataclass(frozen=True)
class Share:
    """Tokens [first, end) of a block, and which of the `parts` blocks on them it is; `warp` of `warps`."""

    first: int
    end: int
    part: int
    parts: int
    warp: int
    warps: int

    @classmethod
    def of(cls, task: Task, tokens: int) -> Share:
        """The share of a task in `tokens` tokens."""
        blocks, b = task.block.launch.blocks, task.block.index
        where = (task.warp, task.block.launch.warps)
        if tokens >= blocks:
            return cls(_starts_at(tokens, blocks, b), _starts_at(tokens, blocks, b + 1), 0, 1, *where)
        parts = blocks // tokens if tokens else 1
        if b >= tokens * parts:
            return cls(0, 0, 0, parts, *where)
        return cls(b // parts, b // parts + 1, b % parts, parts, *where)

    @property
    def pieces(self) -> int:
        """Warps on one row."""
        own = self.end - self.first
        return max(1, self.warps // own) if own else 1

    @property
    def step(self) -> int:
        """Rows the block works on at once."""
        return self.warps // self.pieces

    @property
    def token(self) -> int:
        """First token of the warp."""
        row = self.warp // self.pieces
        return self.first + row if row < self.step else self.end

    def vector(self, row_bytes: int, following: int) -> int:
        """First vector of the warp's piece, or of the following one."""
        piece = self.part * self.pieces + self.warp % self.pieces + following
        return _starts_at(row_bytes // 16, self.parts * self.pieces, piece)


def _starts_at(n: int, over: int, i: int) -> int:
    """Where part `i` of `n` things over so many begins: the first parts get one more."""
    size, longer = divmod(n, over)
    return i * size + min(i, longer)
