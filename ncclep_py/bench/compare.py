"""Two records case by case, and which differences are more than noise.

Two figures differ if their distance is more than both noises together (``statistics.Figure.noise``). First comes the chained pair, or the first
figure both rows have; then whatever else differs: other figures by the same rule, and single numbers (host time, compile time, memory, a layer's
tokens per second), which have no spread, by `APART`.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from ncclep_py.bench.record import key_of
from ncclep_py.bench.statistics import Figure, differ
from ncclep_py.bench.table import case_of

__all__ = ["Verdict", "compare", "lines", "other_machine"]

APART = {"host_us": 0.25, "compile_s": 0.25, "peak_memory_bytes": 0.1, "tokens_per_s": 0.1}
"""By how much of itself a single number must change to count."""

MACHINE = ("gpu", "gpus", "driver", "nccl", "torch", "cuda", "numba_cuda", "python", "ncclep_py")
PREFERRED = ("chained_pair", "pair", "eager_pair")
WIDTH = 158
BAD = ("slower", "more", "wrong", "missing")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one case: figures before and after (None: none), which figure, a word, and why.

    Words: ``same``, ``faster``, ``slower``, ``new`` (nothing to compare with), ``missing`` (only in the first record), ``wrong`` (verified before,
    not now), ``still wrong``, ``verified`` (no times, as in the simulator), ``more`` and ``less`` (memory).
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


def _others(case: str, old: dict[str, Any], new: dict[str, Any], judged: str) -> list[Verdict]:
    """What else differs of a case that is right in both records."""
    found = []
    for name in old.get("figures") or {}:
        before, after = _figure(old, name), _figure(new, name)
        if name != judged and before and after and differ(before, after):
            noise = f"differ by {abs(after.median - before.median):.1f} us, noise {before.noise + after.noise:.1f} us"
            found.append(Verdict(case, name, before, after, "slower" if after.median > before.median else "faster", noise))
    for name, share in APART.items():
        for label, was, now in _numbers(name, old.get(name), new.get(name)):
            if abs(now - was) > share * was:
                worse = (now < was) if name == "tokens_per_s" else (now > was)
                word = {"peak_memory_bytes": "more" if worse else "less"}.get(name, "slower" if worse else "faster")
                found.append(Verdict(case, label, _one(was), _one(now), word, f"a single number, more than {100 * share:.0f} % apart"))
    return found


def _numbers(name: str, old: Any, new: Any) -> list[tuple[str, float, float]]:
    """(label, before, after) of the numbers both records have under a name."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [(f"{name} {part}", old[part], new[part]) for part in old if old[part] and new.get(part)]
    return [(name, old, new)] if old and new and not isinstance(old, dict) and not isinstance(new, dict) else []


def _one(value: float) -> Figure:
    return Figure(value, value, value, 1)


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Verdict]:
    """All cases of both records, in the order of the first, each with whatever else differs; then the layers."""
    found = []
    for part in ("rows", "layers"):
        old, new = ({_key(row): row for row in record.get(part, ())} for record in (before, after))
        for key in [*old, *(key for key in new if key not in old)]:
            was, now = old.get(key), new.get(key)
            case = _name(was or now or {})
            if part == "layers":   # times of a step are not kept; only its speed
                found += _others(case, was, now, "") if was and now and not (was.get("error") or now.get("error")) else []
                continue
            found.append(_judge(case, was, now))
            if was and now and was.get("verified") and now.get("verified"):
                found += _others(case, was, now, found[-1].figure)
    return found


def _key(row: dict[str, Any]) -> str:
    return key_of(row) + f"{row.get('direction', '')}{row.get('width', '')}"


def other_machine(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each difference of machine and versions, which no verdict knows of."""
    old, new = before.get("machine") or {}, after.get("machine") or {}
    return [f"not the same {name}: {old.get(name)}, now {new.get(name)}" for name in MACHINE if old.get(name) != new.get(name)]


def _name(row: dict[str, Any]) -> str:
    """A row's case for readers; its key if it is of no case there is now."""
    try:
        case = case_of(row)
    except (KeyError, ValueError):
        return key_of(row)
    aligned = [f"alignment {case.alignment}"] * bool(case.alignment)
    where = [case.mode, f"{case.gpus} GPU{'s' * (case.gpus > 1)}"] if case.backend == "nccl" else ["simulated"]
    layer = [f"MoE layer {row['direction']}"] if "direction" in row else []
    return ", ".join([f"{row['implementation']} {case.name()}", *aligned, *where, *layer])


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
