"""`doctor` started by torchrun or Slurm: every rank examines its own machine, rank 0 tells what all found and where ranks differ.

Reports travel over gloo, so that nothing of NCCL or of a GPU needs to work. Where every rank has a GPU and no error, one NCCL communicator over all
ranks is made, to see teams and GIN as a program would; a watchdog ends ranks that do not come back from it.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from ncclep_py.doctor import examine, finding_lines, table
from ncclep_py.facts import gather

__all__ = ["differences", "main", "ranks_text", "started_by_launcher", "summary", "world"]

ALIKE = ("ncclep_py", "NCCL (libnccl)", "NCCL (nccl.h)")
"""Versions that must be the same on all ranks."""

CONNECT_SECONDS = 120
Report = dict[str, Any]


def world(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int] | None:
    """(rank, ranks, local rank) as torchrun or Slurm says, None for a process alone."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        values = [environment.get(name, "") for name in names]
        if all(value.isdigit() for value in values[:2]) and int(values[1]) > 1:
            return int(values[0]), int(values[1]), int(values[2]) if values[2].isdigit() else 0
    return None


def started_by_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several ranks that can find each other."""
    return world(environment) is not None and "MASTER_ADDR" in environment and "MASTER_PORT" in environment


# ---- judging all reports -------------------------------------------------------------------------------------------------
def ranks_text(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> 'ranks 0-2, 5'; [3] -> 'rank 3'."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _by_value(values: Sequence[Any]) -> str:
    """'2.32.3 on ranks 0-6; 2.30.7 on rank 7', most ranks first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("nothing" if value is None else str(value), []).append(rank)
    return "; ".join(f"{value} on {ranks_text(where)}" for value, where in sorted(ranks.items(), key=lambda item: -len(item[1])))


def differences(reports: Sequence[Report]) -> list[dict[str, str]]:
    """Findings about what differs between ranks, each with level, name and problem."""
    found = []

    def compare(name: str, values: Sequence[Any], level: str = "warn") -> None:
        if len({json.dumps(value, sort_keys=True) for value in values}) > 1:
            found.append({"level": level, "name": name, "problem": _by_value(values), "cure": ""})

    for name in dict.fromkeys(name for report in reports for name in report["versions"]):
        compare(name, [report["versions"].get(name, {}).get("version") for report in reports], "error" if name in ALIKE else "warn")
    for name in dict.fromkeys(name for report in reports for name in report["environment"]):
        if name not in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"):
            compare(f"environment {name}", [report["environment"].get(name) for report in reports])
    compare("GPUs seen", [", ".join(sorted({f"{g['name']}, {g['sms']} SMs" for g in report["gpus"]})) or None for report in reports])
    compare("network cards", [cards_text(report["network"]) for report in reports])
    connected = [report.get("gin") for report in reports]
    troubles = [gin.get("problem") for gin in connected if gin]
    if any(troubles):
        found.append({"level": "error", "name": "NCCL over all ranks", "problem": _by_value(troubles), "cure": ""})
    elif all(connected):
        for name in ("teams", "team_size", "gin", "railed_gin", "device_api"):
            compare(f"NCCL's {name}", [gin[name] for gin in connected if gin], "error")
    return found


def cards_text(network: Mapping[str, Any]) -> str:
    """Network cards in a few words."""
    active = sum(any(port["state"] == "ACTIVE" for port in card["ports"]) for card in network["cards"])
    return f"{len(network['cards'])} cards, {active} active" if network["cards"] else "none"


def summary(reports: Sequence[Report]) -> Report:
    """All of it: every rank's report, differences, and whether all is right."""
    differ = differences(reports)
    ok = all(report["ok"] for report in reports) and all(finding["level"] != "error" for finding in differ)
    return {"ranks": list(reports), "differences": differ, "ok": ok}


def gin_text(gin: Mapping[str, Any] | None) -> str:
    """What NCCL said about teams and GIN."""
    if not gin:
        return "not tried"
    if "problem" in gin:
        return str(gin["problem"])
    return f"{gin['teams']} teams of {gin['team_size']}, GIN {gin['gin']}, on rails {gin['railed_gin']}"


def write(told: Report, out: TextIO) -> None:
    """The summary for people."""
    reports = told["ranks"]
    rows = [("rank", "host", "GPUs", "network cards", "errors", "NCCL over all ranks")]
    rows += [(str(r["rank"]), r["host"], str(len(r["gpus"])), cards_text(r["network"]), str(sum(f["level"] == "error" for f in r["findings"])),
              gin_text(r.get("gin"))) for r in reports]
    out.write("Ranks\n" + "".join(f"  {line}\n" for line in table(rows)) + "\n")
    lines = finding_lines(told["differences"]) or ["ranks do not differ"]
    out.write("Differences\n" + "".join(f"  {line}\n" for line in lines) + "\n")
    same: dict[str, list[int]] = {}
    for report in reports:
        bad = [finding for finding in report["findings"] if finding["level"] in ("warn", "error")]
        same.setdefault(json.dumps(bad, sort_keys=True), []).append(report["rank"])
    for text, ranks in same.items():
        lines = finding_lines(json.loads(text)) or ["all right"]
        out.write(f"Checks of {ranks_text(ranks)}\n" + "".join(f"  {line}\n" for line in lines) + "\n")
    out.write("All right.\n" if told["ok"] else "There are errors.\n")


# ---- running on every rank -----------------------------------------------------------------------------------------------
def _skipped(facts: Report, findings: Sequence[Any]) -> Report:
    return {"compiled": None, "seconds": 0.0, "ran_on_gpu": None, "message": "not tried: the first rank of each machine does it"}


def _connect(rank: int, ranks: int, local: int) -> Report:
    """What NCCL says about one communicator over all ranks; ends the process if it does not come back."""
    from ncclep_py.communicator import probe

    def gone() -> None:
        sys.stderr.write(f"rank {rank}: NCCL made no communicator over {ranks} ranks in {CONNECT_SECONDS} s; NCCL_DEBUG=INFO says where it waits\n")
        sys.stderr.flush()
        os._exit(3)

    watchdog = threading.Timer(CONNECT_SECONDS, gone)
    watchdog.daemon = True
    watchdog.start()
    try:
        return probe(rank, ranks, local)
    except Exception as error:   # a doctor reports whatever is wrong
        return {"problem": f"{type(error).__name__}: {error}"}
    finally:
        watchdog.cancel()


def main(options: Any) -> int:
    """Examine, gather, tell; the exit code is the same on all ranks."""
    import torch.distributed as dist

    place = world()
    if place is None:
        raise RuntimeError("doctor over all ranks needs torchrun's or Slurm's environment")
    rank, ranks, local = place
    report = examine(gather(), _skipped) if local else examine(gather())
    report |= {"rank": rank, "host": socket.gethostname()}
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=CONNECT_SECONDS))
    try:
        ready: list[Any] = [None] * ranks
        dist.all_gather_object(ready, bool(report["gpus"]) and report["ok"])
        if all(ready) and not options.no_connect:
            report["gin"] = _connect(rank, ranks, local)
        everybody: list[Any] = [None] * ranks
        dist.all_gather_object(everybody, report)
    finally:
        if ours:
            dist.destroy_process_group()
    told = summary(everybody)
    if rank == 0:
        sys.stdout.write(json.dumps(told, indent=2) + "\n") if options.json else write(told, sys.stdout)
    return 0 if told["ok"] else 1
