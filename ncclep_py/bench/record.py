"""The record of a benchmark: one JSON object, written by `bench --json`, read by `bench compare` and `bench report`.

``{"schema": SCHEMA, "machine": {...}, "floors": {...}, "rows": [...]}``

* ``machine``: ``gpu``, ``gpus``, ``driver``, ``nccl``, ``torch``, ``cuda``, ``numba_cuda``, ``python``, ``ncclep_py``, ``commit``, ``date`` (UTC),
  ``sm_clock_mhz`` and ``memory_clock_mhz`` (now, most), each a string, a number, a list or None where it cannot be known.
* ``floors``: ``copy_gb_s``, ``write_gb_s``, ``read_gb_s`` of device memory in this run; empty in the simulator.
* ``rows``: one per case and implementation, with every field of ``bench.case.Case`` and
    * ``implementation``: ``ncclep_py``, ``ncclep_py staged`` (in halves), ``nccl.ep``, ``all_to_all_single`` or ``deep_ep``;
    * ``verified``: whether received rows and combined rows were right before and after timing; ``exact``: whether this was compared by bits;
    * ``checked_by``: ``closed form`` (tensor operations; of ours every received and combined bit), small cases of ours ``and oracle``;
    * ``figures``: name -> ``{"median_us", "low_us", "high_us", "replays"}``, microseconds of the slowest rank. ``pair`` is a dispatch and a combine
      in a graph of 20 (ht: 4) divided by as many, ``chained_pair`` the slope between graphs of two lengths, without what a replay costs once;
      ``eager_pair`` and (ht) ``eager_step`` without a graph; ``dispatch`` (slope), ``flushed_pair`` (320 MB written in between, taken off again),
      ``heads_pair``, ``empty_pair``; ht also ``update``, ``step`` (update and pair) and ``both_passes``; of all_to_all_single ``known_sizes_pair``;
      staged: ``plain_tensors_pair``, ``own_window_pair`` (fused, rows elsewhere), ``held_fused``, ``held_halves`` (combine, rank 1 5 ms late).
      Empty in the simulator, whose times say nothing;
    * ``note``: what could not be measured and why, if anything;
    * ``host_us``: host microseconds per operation, eager; ``ready_s``: seconds until the handle was ready;
    * ``compile_s``: ``{"cold", "warm"}`` seconds to compile the case's kernels into an empty cache and to find them again, first row only
    * ``budget_rows``: ht, ours and nccl.ep: rows a rank has room for (``bench.budget``), else None;
    * ``peak_memory_bytes``: most device memory a rank held, torch's and the window; ``bytes``: see ``bench.byte_counts``;
    * ``share_of_copy``: physical bytes over (chained pair x copy bandwidth), or None;
    * ``expert_load`` ``[E]`` rows and ``traffic`` ``[R][R]`` tokens of the routing;
    * ``stamps``: events of a dispatch and a combine (``timeline.to_json``), if asked for; ``error``: what went wrong, instead of all these.
* ``layers``: tokens per second of the example MoE layer, rows with ``implementation``, ``direction`` (forward, forward+backward), ``tokens_per_s``
  (all ranks together) and ``mean_square`` of the output, about the same for both implementations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ncclep_py.bench.case import IDENTITY

__all__ = ["SCHEMA", "budget_of", "key_of", "new_record", "read", "write"]

SCHEMA = "ncclep_py.bench/1"


def new_record(machine: dict[str, Any], floors: dict[str, Any]) -> dict[str, Any]:
    """A record without rows."""
    return {"schema": SCHEMA, "machine": machine, "floors": floors, "rows": [], "layers": []}


def key_of(row: dict[str, Any]) -> str:
    """What is the same in two rows that can be compared."""
    told = {name: value for name, value in row.items() if name != "budget"} | ({"budget": budget_of(row)} if row.get("algorithm") == "ht" else {})
    return " ".join(f"{name}={told[name]}" for name in ("implementation", *IDENTITY) if name in told)


def budget_of(row: dict[str, Any]) -> str:
    """The budget of a row's case. Before there was a choice, ours had the exact one in high throughput and others the worst."""
    exact = row.get("algorithm") == "ht" and str(row["implementation"]).startswith("ncclep_py")
    return str(row.get("budget") or ("exact" if exact else "worst"))


def write(record: dict[str, Any], path: str | Path) -> None:
    """Write a record."""
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read(path: str | Path) -> dict[str, Any]:
    """Read a record; ``ValueError`` for what is none."""
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(f"{path} cannot be read as a record of `bench --json`: {e}") from e
    if not isinstance(held, dict) or held.get("schema") != SCHEMA:
        raise ValueError(f"{path} must be a record with schema {SCHEMA}, got {held.get('schema') if isinstance(held, dict) else type(held).__name__}")
    return held
