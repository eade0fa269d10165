"""Plain-text pictures for a terminal: how loaded the experts are, and which rank sends how much to which.

Both fit into any width from 40 columns and a bounded number of lines: many experts or ranks are drawn in groups.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import torch

__all__ = ["can_show_blocks", "expert_load", "routing_counts", "traffic"]

BARS = {False: " ▏▎▍▌▋▊▉█", True: " #"}
SHADES = {False: " ░▒▓█", True: " .:+#"}
EDGE = "▕"
MOST_LINES = 32
LEAST_WIDTH = 40


def can_show_blocks(stream: TextIO) -> bool:
    """Whether a stream's encoding has the block characters; without them pass ``ascii=True``."""
    try:
        (BARS[False] + SHADES[False] + EDGE).encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def routing_counts(ids: Sequence[torch.Tensor], num_experts: int, *, by_rank: bool = False) -> tuple[list[int], list[list[int]]]:
    """What a routing sends.

    Args:
        ids: of each source rank, ``[T, K]`` expert ids; ids outside ``[0, num_experts)`` count as none.
        num_experts: E, a multiple of the number of ranks.
        by_rank: one row per (token, rank), as in RANK_MAJOR and FLAT; else one per (token, k).

    Returns:
        Tokens for each expert ``[E]``, and rows from each rank to each rank ``[R][R]``.
    """
    import torch

    ranks = len(ids)
    if not ranks or num_experts % ranks:
        raise ValueError(f"num_experts must be a multiple of the number of ranks, got {num_experts} and ids of {ranks} ranks")
    load = torch.zeros(num_experts, dtype=torch.int64)
    rows = []
    for mine in ids:
        mine = mine.detach().cpu().to(torch.int64)
        valid = (mine >= 0) & (mine < num_experts)
        load += torch.bincount(mine[valid], minlength=num_experts)
        owner = torch.where(valid, mine // (num_experts // ranks), ranks)
        if by_rank:
            hit = torch.zeros(len(mine), ranks + 1, dtype=torch.int64).scatter_(1, owner, 1) if mine.numel() else torch.zeros(1, ranks + 1)
            rows.append([int(n) for n in hit.sum(0)[:ranks]])
        else:
            rows.append([int(n) for n in torch.bincount(owner.flatten(), minlength=ranks + 1)[:ranks]])
    return load.tolist(), rows


def expert_load(counts: Sequence[int], num_ranks: int, *, width: int = 80, ascii: bool = False) -> str:
    """Bars of the tokens each expert got, in expert order; more than 32 experts in groups, whose bar is their mean and whose mark the busiest.

    Args:
        counts: tokens of each expert, ``[E]``.
        num_ranks: R; experts are numbered rank after rank.
        width: columns of the terminal.
        ascii: without block characters.
    """
    experts, total = len(counts), sum(counts)
    if not experts or min(counts) < 0 or experts % num_ranks:
        raise ValueError(f"counts must hold the tokens of a multiple of {num_ranks} experts, none negative, got {len(counts)}")
    size = -(-experts // MOST_LINES)
    groups = [(first, counts[first: first + size]) for first in range(0, experts, size)]
    local = experts // num_ranks
    most, mean = max(counts), total / experts
    names = [f"{_span(first, len(g))} ({_span(first // local, (first + len(g) - 1) // local - first // local + 1)})" for first, g in groups]
    figures = [f"{g[0]}" if size == 1 else f"{sum(g) / len(g):.4g} / {max(g)}" for _, g in groups]
    title, unit = ("expert (rank)", "rows") if size == 1 else ("experts (ranks)", "mean / most")
    left, right = max(map(len, (*names, title))), max(map(len, (*figures, unit)))
    room = max(_usable(width) - left - right - 3, 8)
    busiest = counts.index(most)
    ratio = f", {most / mean:.3g} times the mean of {mean:.4g}" if total else ""
    head = f"expert load: {total} rows for {experts} experts; most: expert {busiest} with {most}{ratio}; without a row: {counts.count(0)}"
    lines = [*_wrapped(head, width), f"{title:>{left}}  {'':{room}} {unit:>{right}}"]
    for name, figure, (_, group) in zip(names, figures, groups, strict=True):
        bar = _bar(sum(group) / len(group), most, room, ascii)
        if size > 1 and most:
            at = min(round(max(group) / most * room), room) - 1
            bar = bar[:at] + "|" + bar[at + 1:] if at >= 0 else bar
        lines.append(f"{name:>{left}} {'|' if ascii else EDGE}{bar} {figure:>{right}}")
    if size > 1:
        lines += _wrapped(f"{size} experts to a line; the bar is their mean, | the busiest", width)
    return "\n".join(lines)


def traffic(rows: Sequence[Sequence[int]], *, unit: str = "rows", width: int = 80, ascii: bool = False) -> str:
    """A matrix of what each source rank (line) sends to each destination rank (column), with shades and sums; ranks in groups where they do not fit.

    Args:
        rows: ``[R][R]``, rows or bytes from source to destination; the diagonal stays on the rank.
        unit: what is counted.
        width: columns of the terminal.
        ascii: without shading characters.
    """
    ranks = len(rows)
    if not ranks or any(len(r) != ranks for r in rows):
        raise ValueError(f"rows must be a square matrix, got {ranks} lines of {sorted({len(r) for r in rows})}")
    size = 1
    while True:
        groups = [range(first, min(first + size, ranks)) for first in range(0, ranks, size)]
        cells = [[sum(rows[s][d] for s in line for d in column) for column in groups] for line in groups]
        names = [_span(g[0], len(g)) for g in groups]
        sums = [sum(line) for line in cells]
        columns = [max(len(str(line[c])) + 2 for line in [*cells, [sum(x) for x in zip(*cells, strict=True)]]) for c in range(len(groups))]
        columns = [max(c, len(n) + 1) for c, n in zip(columns, names, strict=True)]
        left, last = max(map(len, (*names, "sum"))), max(len(str(sum(sums))), 3)
        if (left + sum(columns) + last + 3 <= _usable(width) and len(groups) <= MOST_LINES) or size >= ranks:
            break
        size *= 2
    most, total = max(map(max, cells)), sum(sums)
    own = sum(rows[r][r] for r in range(ranks))
    lines = _wrapped(f"traffic: {total} {unit}, {own} of them stay on their rank; lines send, columns receive", width)
    lines.append(" " * left + " |" + "".join(f"{name:>{c}}" for name, c in zip(names, columns, strict=True)) + f" |{'sum':>{last}}")
    shades = SHADES[ascii]
    for name, line, row_sum in zip(names, cells, sums, strict=True):
        shown = "".join(f"{shades[-(-(len(shades) - 1) * value // most) if most else 0]}{value:>{c - 1}}"
                        for value, c in zip(line, columns, strict=True))
        lines.append(f"{name:>{left}} |{shown} |{row_sum:>{last}}")
    received = [sum(column) for column in zip(*cells, strict=True)]
    lines.append(f"{'sum':>{left}} |" + "".join(f"{value:>{c}}" for value, c in zip(received, columns, strict=True)) + f" |{total:>{last}}")
    if size > 1:
        lines.append(f"{size} ranks to a line and column")
    return "\n".join(lines)


def _usable(width: int) -> int:
    return max(width, LEAST_WIDTH)


def _span(first: int, count: int) -> str:
    """`3`, or `4-7`."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _bar(value: float, most: float, room: int, ascii: bool) -> str:
    """A bar of `room` columns, full at `most`."""
    parts = BARS[ascii]
    steps = len(parts) - 1
    filled = round(value / most * room * steps) if most else 0
    if value and not filled:
        filled = 1   # a little is not nothing
    whole, rest = divmod(filled, steps)
    return (parts[-1] * whole + (parts[rest] if rest else "")).ljust(room)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, _usable(width))
