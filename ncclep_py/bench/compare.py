"""Two records case by case, and which differences are more than noise.

Two figures differ if their distance is more than both noises together (``statistics.Figure.noise``). Compared is the chained pair, or the first
figure both rows have.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from ncclep_py.bench.record import key_of
from ncclep_py.bench.statistics import Figure, differ
from ncclep_py.bench.table import case_of

__all__ = ["Verdict", "compare", "lines"]

PREFERRED = ("chained_pair", "pair", "eager_pair")
WIDTH = 158
BAD = ("slower", "wrong", "missing")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one case: figures before and after (None: none), which figure, a word, and why.

    Words: ``same``, ``faster``, ``slower``, ``new`` (nothing to compare with), ``missing`` (only in the first record), ``wrong`` (verified before,
    not now), ``still wrong``, ``verified`` (no times, as in the simulator).
    """

    case: str
    figure: str
    before: Figure | None
    after: Figure | None
    word: str
    reason: str = ""

    @property
    def bad(self) -> bool:
        """Whether this is something to look into."""
        return self.word in BAD


def _figure(row: dict[str, Any] | None, name: str) -> Figure | None:
    held = ((row or {}).get("figures") or {}).get(name)
    return Figure.from_json(held) if held else None


def _judge(case: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> Verdict:
    """One case in both records."""
    name = next((n for n in PREFERRED if _figure(old, n) and _figure(new, n)), next((n for n in PREFERRED if _figure(new or old, n)), PREFERRED[0]))
    before, after = _figure(old, name), _figure(new, name)
    if new is None:
        return Verdict(case, name, before, None, "missing", "only in the first record")
    if not new.get("verified"):
        was_right, why = bool(old and old.get("verified")), str(new.get("error", "results differ from the oracle"))
        return Verdict(case, name, before, after, "wrong" if was_right else "still wrong", why[-200:])
    if old is None or not old.get("verified"):
        return Verdict(case, name, None, after, "new", "nothing right to compare with")
    if before is None or after is None:
        return Verdict(case, name, before, after, "verified", "no times in both")
    noise = before.noise + after.noise
    told = f"differ by {abs(after.median - before.median):.1f} us, noise {noise:.1f} us"
    if not differ(before, after):
        return Verdict(case, name, before, after, "same", told)
    return Verdict(case, name, before, after, "slower" if after.median > before.median else "faster", told)


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Verdict]:
    """All cases of both records, in the order of the first."""
    old, new = ({key_of(row): row for row in record["rows"]} for record in (before, after))
    keys = [*old, *(key for key in new if key not in old)]
    return [_judge(_name(old.get(key) or new[key]), old.get(key), new.get(key)) for key in keys]


def _name(row: dict[str, Any]) -> str:
    """A row's case for readers; its key if it is of no case there is now."""
    try:
        case = case_of(row)
    except (KeyError, ValueError):
        return key_of(row)
    aligned = [f"alignment {case.alignment}"] * bool(case.alignment)
    where = [case.mode, f"{case.gpus} GPU{'s' * (case.gpus > 1)}"] if case.backend == "nccl" else ["simulated"]
    return ", ".join([f"{row['implementation']} {case.name()}", *aligned, *where])


def lines(verdicts: list[Verdict]) -> list[str]:
    """A header and a line per case, a long one in several: before, after, change, word, case, reason; none for no case."""
    told = [_columns("before us", "after us", "change", "verdict", "case (figure: reason)")] * bool(verdicts)
    for v in verdicts:
        old, new = ("-" if f is None else f"{f.median:.1f}" for f in (v.before, v.after))
        change = f"{100 * (v.after.median / v.before.median - 1):+.1f} %" if v.before and v.after else ""
        why = f"{v.figure}: {v.reason}" if v.before or v.after else v.reason
        told += textwrap.wrap(_columns(old, new, change, v.word, f"{v.case} ({why})"), WIDTH, subsequent_indent=_columns(*[""] * 5))
    return told


def _columns(before: str, after: str, change: str, word: str, case: str) -> str:
    return f"{before:>9} {after:>9} {change:>9}  {word:<11} {case}"
