#!/usr/bin/env python3
"""Compare two files of `bench_ll.py` or `bench_ht.py` (JSON lines) case by case, and say which differences are more than noise.

    python3 scripts/bench_compare.py before.jsonl after.jsonl

The noise of a figure is half the distance between its fastest and slowest replay, at least 2 % of it. Two figures differ if their distance is more
than both noises together. Exit code 1 if any case became slower, was verified before and is not now, or is missing from the second file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

IDENTITY = ("algorithm", "layout", "recipe", "routing", "ranks", "experts", "topk", "hidden", "tokens", "sms", "mode")
LEAST_NOISE = 0.02


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one case: microseconds before and after (None: no figure), and a word."""

    case: str
    before: float | None
    after: float | None
    word: str

    @property
    def bad(self) -> bool:
        """Whether this is something to look into."""
        return self.word in ("slower", "wrong", "missing")


def name_of(row: dict[str, Any]) -> str:
    """The fields that say which case a row is."""
    return " ".join(f"{key}={row[key]}" for key in IDENTITY if key in row)


def read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Rows by case; of a case that occurs twice the last."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return {name_of(row): row for row in rows}


def noise(row: dict[str, Any]) -> float:
    """Microseconds by which a row's figure may be off."""
    fastest, slowest = row.get("pair_us_min_max", (row["pair_us"], row["pair_us"]))
    return max((slowest - fastest) / 2, LEAST_NOISE * row["pair_us"])


def usable(row: dict[str, Any] | None) -> bool:
    """Whether a row has a figure whose bits were right."""
    return row is not None and bool(row.get("verified")) and "pair_us" in row


def judge(case: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Verdict:
    """One case in both files."""
    old, new = ((row or {}).get("pair_us") for row in (before, after))
    if after is None:
        return Verdict(case, old, None, "missing")
    if not usable(after):
        return Verdict(case, old, new, "wrong" if usable(before) else "still wrong")
    if before is None or not usable(before):
        return Verdict(case, old, new, "new")
    distance = after["pair_us"] - before["pair_us"]
    if abs(distance) <= noise(before) + noise(after):
        return Verdict(case, old, new, "same")
    return Verdict(case, old, new, "slower" if distance > 0 else "faster")


def compare(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[Verdict]:
    """All cases of both files, in the order of the first."""
    return [judge(case, before.get(case), after.get(case)) for case in [*before, *(c for c in after if c not in before)]]


def main() -> int:
    """Print one line per case."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("before", type=pathlib.Path)
    ap.add_argument("after", type=pathlib.Path)
    args = ap.parse_args()
    verdicts = compare(read(args.before), read(args.after))
    if not verdicts:
        print("no case in either file", file=sys.stderr)
        return 1
    for v in verdicts:
        old, new = ("-" if us is None else f"{us:.1f}" for us in (v.before, v.after))
        change = f"{100 * (v.after / v.before - 1):+.1f} %" if v.before and v.after else ""
        print(f"{old:>9} {new:>9} {change:>9}  {v.word:<11} {v.case}")
    return int(any(v.bad for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
