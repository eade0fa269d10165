"""`python -m ncclep_py doctor`: what is installed, what is wrong with it, and what to do.

`facts.gather` looks, the checks here judge: each is a pure function from the facts to findings, so that tests feed it made-up machines.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from ncclep_py.facts import gather, pair_text
from ncclep_py.nccl_version import OLDEST_NCCL, age_problem, header_problem
from ncclep_py.network import missing

__all__ = ["CHECKS", "Finding", "add_arguments", "diagnose", "examine", "main", "show_versions"]

OLDEST_CAPABILITY = (8, 0)

GPU_ROWS = ("numba-cuda", "numba", "llvmlite", "cuda-core", "cuda-bindings", "nccl4py", "nvrtc", "nvJitLink", "nvvm",
            "NCCL (libnccl)", "NCCL (nccl.h)")
"""Rows of "versions" that the GPU path needs, all of them."""

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of one check."""

    level: str  # "ok" | "none" (there is nothing to judge) | "warn" | "error"
    name: str  # of the check
    problem: str = ""  # what is wrong, with the versions and paths found; for "ok" a remark or nothing, for "none" what is missing and who needs it
    cure: str = ""  # what to do about it


# ---- checks -------------------------------------------------------------------------------------------------------------------------------------


def version_of(facts: Facts, name: str) -> str | None:
    """Version of a row of "versions", None if missing."""
    return facts["versions"].get(name, {}).get("version")


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.5.0rc1' -> (2, 5, 0)."""
    return tuple(int(number) for number in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if number)  # type: ignore[index]


def absent(name: str, needed_by: str, *missing: str) -> list[Finding]:
    """A check that has nothing to judge, because these are not there."""
    return [Finding("none", name, f"not installed: {', '.join(missing)}; {needed_by}")]


RUNNING, COMPILING = "needed to run on a GPU", "needed to compile kernels"


def has_cuda_stack(facts: Facts) -> bool:
    """Whether anything of what the GPU path needs is installed."""
    return bool(version_of(facts, "numba-cuda") or version_of(facts, "nccl4py") or facts["nccl"]["loaded"])


def wanted_extra(facts: Facts) -> str:
    """The extra to install here: the CUDA version of torch, else of the driver, decides."""
    torch_cuda, driver_cuda = facts["torch"]["cuda"], facts["driver"]["cuda"]
    major = int(torch_cuda.split(".")[0]) if torch_cuda else driver_cuda[0] if driver_cuda else 12
    return f"pip install '.[cu{13 if major >= 13 else 12}]' in ncclep_py's checkout"


def check_base(facts: Facts) -> list[Finding]:
    """The simulator's needs."""
    missing = [name for name in ("numpy", "torch", "greenlet") if not version_of(facts, name)]
    if missing:
        return [Finding("error", "base packages", f"missing: {', '.join(missing)}", "pip install . in ncclep_py's checkout")]
    if facts["torch"]["problem"]:
        return [Finding("error", "base packages", f"torch: {facts['torch']['problem']}", "reinstall torch")]
    return [Finding("ok", "base packages")]


def check_stack(facts: Facts) -> list[Finding]:
    """Complete GPU path, none (simulator only), or an incomplete one."""
    if not has_cuda_stack(facts):
        if facts["gpus"]:
            return [Finding("warn", "GPU packages", f"{len(facts['gpus'])} GPUs, but no GPU packages: simulator only", wanted_extra(facts))]
        return [Finding("none", "GPU packages", "simulator only: no GPU packages are installed", f"for GPUs: {wanted_extra(facts)}")]
    missing = [name for name in GPU_ROWS if not version_of(facts, name)]
    if missing:
        return [Finding("error", "GPU packages", f"missing: {', '.join(missing)}", wanted_extra(facts))]
    return [Finding("ok", "GPU packages")]


def wheel_major(name: str, version: str) -> tuple[str, int] | None:
    """Library and CUDA major version of one of NVIDIA's wheels; from CUDA 13 on some carry no suffix."""
    if match := re.fullmatch(r"(nvidia-[a-z0-9-]+?)-cu(\d\d)", name):
        return match[1], int(match[2])
    if re.fullmatch(r"nvidia-(cuda-[a-z]+|nvjitlink|nvvm|nvfatbin)", name) and release(version)[:1] >= (13,):
        return name, release(version)[0]
    return None


def check_wheel_majors(facts: Facts) -> list[Finding]:
    """One library's wheels for two CUDA majors; NCCL's even overwrite each other."""
    majors: dict[str, set[int]] = {}
    for name, version in facts["wheels"].items():
        if found := wheel_major(name, version):
            majors.setdefault(found[0], set()).add(found[1])
    if not majors:
        return absent("CUDA majors", f"{COMPILING}, unless the system has these libraries", "wheels of CUDA libraries")
    mixed = sorted(name for name, found in majors.items() if len(found) > 1)
    findings = []
    if "nvidia-nccl" in mixed:
        problem = "nvidia-nccl-cu12 and nvidia-nccl-cu13 install into the same folder: the later one overwrote files of the earlier one"
        cure = "pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13, then install one of them again"
        findings.append(Finding("error", "CUDA majors", problem, cure))
    others = [name for name in mixed if name != "nvidia-nccl"]
    if others:
        problem = f"wheels for two CUDA major versions: {', '.join(others)}"
        findings.append(Finding("warn", "CUDA majors", problem, "keep one major version: a fresh environment with one of ncclep_py's extras"))
    return findings or [Finding("ok", "CUDA majors")]


def check_torch_major(facts: Facts) -> list[Finding]:
    """torch and the compiler of one CUDA major."""
    torch_cuda, nvrtc = facts["torch"]["cuda"], facts["toolkit"]["nvrtc"]
    if not version_of(facts, "torch") or not nvrtc:
        return absent("torch's CUDA", RUNNING, "NVRTC" if version_of(facts, "torch") else "torch")
    if not torch_cuda:
        return [Finding("none", "torch's CUDA", f"torch is built for the CPU only; a build for CUDA is {RUNNING}")]
    if int(torch_cuda.split(".")[0]) == nvrtc[0]:
        return [Finding("ok", "torch's CUDA", torch_cuda)]
    problem = f"torch is built for CUDA {torch_cuda}, the compiler packages are of CUDA {pair_text(nvrtc)}"
    return [Finding("warn", "torch's CUDA", problem, wanted_extra(facts))]


def no_nccl(facts: Facts, check: str) -> list[Finding]:
    """A check of the loaded NCCL without one."""
    nccl = facts["nccl"]
    if nccl["path"] is None:
        return absent(check, RUNNING, "NCCL")
    return [Finding("none", check, f"{nccl['path']} cannot be loaded: {nccl['problem']}")]


def check_nccl_age(facts: Facts) -> list[Finding]:
    """NCCL new enough; torch pins older ones."""
    nccl, pin = facts["nccl"], facts["torch"]["pins_nccl"]
    if not nccl["loaded"]:
        return no_nccl(facts, "NCCL version")
    problem = age_problem(nccl["loaded"], nccl["path"])
    if problem is None:
        return [Finding("ok", "NCCL version")]
    if pin and release(pin) < (2, 30):
        return [Finding("error", "NCCL version", f"{problem}. torch {version_of(facts, 'torch')} pins NCCL {pin}", "pip install 'torch>=2.14'")]
    major = facts["nccl"]["cuda"] or facts["driver"]["cuda"] or (12, 0)
    cure = f"pip install 'nvidia-nccl-cu{major[0]}>=2.30.7', and take older ones out of LD_LIBRARY_PATH, LD_PRELOAD and NCCL_HOME"
    return [Finding("error", "NCCL version", problem, cure)]


def check_nccl_headers(facts: Facts) -> list[Finding]:
    """Headers of the loaded library."""
    nccl = facts["nccl"]
    if not nccl["headers"]:
        return absent("NCCL headers", COMPILING, "nccl.h")
    if not nccl["loaded"]:
        return no_nccl(facts, "NCCL headers")
    problem = header_problem(nccl["loaded"], nccl["headers"], nccl["path"], nccl["headers_path"])
    if problem is None:
        return [Finding("ok", "NCCL headers")]
    cure = "set NCCL_HOME to the installation of the library that is loaded, or unset it"
    return [Finding("error", "NCCL headers", problem, cure)]


def check_nccl_copies(facts: Facts) -> list[Finding]:
    """More than one libnccl on the machine: which one is loaded then depends on the order of imports."""
    libraries, inside = facts["nccl"]["libraries"], facts["nccl"]["in_process"]
    if len(inside) > 1:
        problem = f"{len(inside)} NCCL libraries in one process: {', '.join(inside)}; nccl4py calls {facts['nccl']['path']}"
        return [Finding("warn", "NCCL copies", problem, "have torch and nccl4py use the same file: keep one, or name it in LD_PRELOAD")]
    if not libraries:
        return no_nccl(facts, "NCCL copies")
    if len(libraries) < 2:
        return [Finding("ok", "NCCL copies")]
    problem = f"{len(libraries)} NCCL libraries: {', '.join(libraries)}; loaded: {facts['nccl']['path']}"
    return [Finding("warn", "NCCL copies", problem, "remove the ones you do not need, or check that every rank loads the same")]


def check_device_api(facts: Facts) -> list[Finding]:
    """A libnccl with the Device API's entry points."""
    nccl = facts["nccl"]
    if not nccl["loaded"]:
        return no_nccl(facts, "NCCL Device API")
    if nccl["loaded"] < OLDEST_NCCL:
        return [Finding("none", "NCCL Device API", "not looked for: NCCL is too old")]
    if nccl["device_api"]:
        return [Finding("ok", "NCCL Device API")]
    return [Finding("error", "NCCL Device API", f"{nccl['path']} has no ncclDevCommCreate", "install NVIDIA's own build of NCCL")]


def check_nvjitlink(facts: Facts) -> list[Finding]:
    """nvJitLink reads only LTO-IR of its own major version, made by a compiler no newer than itself."""
    nvrtc, linker = facts["toolkit"]["nvrtc"], facts["toolkit"]["nvjitlink"]
    if not nvrtc or not linker:
        return absent("nvJitLink", COMPILING, *(name for name, found in (("NVRTC", nvrtc), ("nvJitLink", linker)) if not found))
    if linker[0] == nvrtc[0] and linker >= nvrtc:
        return [Finding("ok", "nvJitLink")]
    package = f"nvidia-nvjitlink-cu{nvrtc[0]}" if nvrtc[0] < 13 else "nvidia-nvjitlink"
    problem = f"nvJitLink {pair_text(linker)} cannot link what NVRTC {pair_text(nvrtc)} compiles: it must be of CUDA {nvrtc[0]} and no older"
    return [Finding("error", "nvJitLink", problem, f"pip install '{package}>={pair_text(nvrtc)},<{nvrtc[0] + 1}'")]


def check_ltoir(facts: Facts) -> list[Finding]:
    """NCCL's own device library (GIN only) made by a compiler newer than nvJitLink."""
    made, linker = facts["nccl"]["cuda"], facts["toolkit"]["nvjitlink"]
    needed_by = "needed for several nodes"
    if not linker or not facts["nccl"]["loaded"]:
        missing = [name for name, found in (("NCCL", facts["nccl"]["loaded"]), ("nvJitLink", linker)) if not found]
        return absent("NCCL device library", needed_by, *missing)
    if not made:
        return [Finding("none", "NCCL device library", f"NCCL does not say which CUDA built it; {needed_by}")]
    if linker[0] == made[0] and linker >= made:
        return [Finding("ok", "NCCL device library")]
    problem = (f"NCCL was built with CUDA {pair_text(made)}, nvJitLink is {pair_text(linker)}: NCCL's libnccl_device.ltoir cannot be linked, "
               "so no communication between nodes (GIN); within a node nothing is lost")
    return [Finding("warn", "NCCL device library", problem, f"for several nodes: nvJitLink of CUDA {made[0]}, {pair_text(made)} or newer")]


def check_numpy(facts: Facts) -> list[Finding]:
    """numba-cuda 0.30 uses a numpy function that 2.5 removed."""
    numpy, numba_cuda = version_of(facts, "numpy"), version_of(facts, "numba-cuda")
    if not numpy or not numba_cuda:
        missing = [name for name, found in (("numpy", numpy), ("numba-cuda", numba_cuda)) if not found]
        return absent("numpy", "only together they may not fit", *missing)
    if facts["row_stack"] or release(numba_cuda) >= (0, 31):
        return [Finding("ok", "numpy")]
    return [Finding("error", "numpy", f"numba-cuda {numba_cuda} fails at import with numpy {numpy}", "pip install 'numpy<2.5'")]


def check_driver(facts: Facts) -> list[Finding]:
    """A driver that works and can load what the compiler makes."""
    driver, nvrtc = facts["driver"], facts["toolkit"]["nvrtc"]
    if driver["path"] is None:
        return absent("driver", RUNNING + ("; kernels can be compiled and simulated" if has_cuda_stack(facts) else ""), "libcuda")
    if driver["problem"]:
        return [Finding("warn", "driver", driver["problem"], "check nvidia-smi, and that the GPUs are visible to this container or job")]
    if nvrtc and driver["cuda"] and driver["cuda"][0] < nvrtc[0]:
        problem = f"the driver supports CUDA {pair_text(driver['cuda'])}, the compiler packages are of CUDA {pair_text(nvrtc)}"
        return [Finding("error", "driver", problem, f"a newer driver, or a fresh environment with ncclep_py's extra cu{driver['cuda'][0]}")]
    return [Finding("ok", "driver")]


def check_gpus(facts: Facts) -> list[Finding]:
    """GPUs new enough and able to reach each other."""
    old = [gpu for gpu in facts["gpus"] if tuple(gpu["capability"]) < OLDEST_CAPABILITY]
    findings = []
    if old:
        names = ", ".join(f"{gpu['index']} ({gpu['name']}, {pair_text(gpu['capability'])})" for gpu in old)
        problem = f"compute capability below {pair_text(OLDEST_CAPABILITY)}: GPU {names}"
        findings.append(Finding("error", "GPUs", problem, "hide them with CUDA_VISIBLE_DEVICES"))
    apart = [(i, j) for i, line in enumerate(facts["p2p"]) for j, reaches in enumerate(line) if not reaches]
    if apart:
        pairs = ", ".join(f"{i}->{j}" for i, j in apart[:8]) + (" ..." if len(apart) > 8 else "")
        findings.append(Finding("warn", "GPUs", f"no peer access: {pairs}; these ranks are not in one LSA team", "see nvidia-smi topo -p2p r"))
    if not facts["gpus"]:
        return [Finding("none", "GPUs", "there is no GPU; the simulator needs none")]
    return findings or [Finding("ok", "GPUs", f"{len(facts['gpus'])}")]


def check_ranks(facts: Facts) -> list[Finding]:
    """More ranks than GPUs."""
    ranks, gpus = facts["ranks"], len(facts["gpus"])
    enabled = facts["environment"].get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if not gpus:
        return [Finding("none", "ranks per GPU", "there is no GPU")]
    if enabled or (ranks is not None and ranks <= gpus):
        return [Finding("ok", "ranks per GPU")]
    cure = "export NCCL_MULTI_RANK_GPU_ENABLE=1 before the processes start"
    if ranks is None:
        return [Finding("ok", "ranks per GPU", "one; for several ranks on one GPU NCCL wants to be told", cure)]
    return [Finding("error", "ranks per GPU", f"{ranks} ranks on {gpus} GPUs, but NCCL refuses a second rank on a GPU unless told", cure)]


def check_network(facts: Facts) -> list[Finding]:
    """What keeps NCCL from connecting several teams; a warning only where there will be several."""
    network = facts.get("network")
    if network is None or not facts["nccl"]["loaded"]:
        return absent("network", "needed for several nodes", "NCCL")
    why, cards = missing(network, facts["nccl"]["loaded"]), ", ".join(card["name"] for card in network["cards"]) or "no cards"
    if not why:
        return [Finding("ok", "network", cards)]
    if not network["several_teams"]:
        return [Finding("none", "network", f"{cards}; needed for several nodes")]
    return [Finding("warn", "network", "; ".join(why), "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET tells what NCCL tries")]


CHECKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    check_base, check_stack, check_wheel_majors, check_torch_major, check_nccl_age, check_nccl_headers, check_nccl_copies, check_device_api,
    check_nvjitlink, check_ltoir, check_numpy, check_driver, check_gpus, check_ranks, check_network)


# ---- report -------------------------------------------------------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> list[Finding]:
    """The findings of all checks."""
    return [finding for check in CHECKS for finding in check(facts)]


def self_test(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    """Compile (and with a GPU run) one kernel: dict(compiled, seconds, ran_on_gpu, message); compiled is None if it was not tried."""
    skipped: dict[str, Any] = {"compiled": None, "seconds": 0.0, "ran_on_gpu": None}
    if not version_of(facts, "numba-cuda"):
        return skipped | {"message": "not tried: numba-cuda is missing (simulator only)"}
    if any(finding.level == "error" for finding in findings):
        return skipped | {"message": "not tried: cure the errors above first"}
    if importlib.util.find_spec("ncclep_py.launch") is None:
        return skipped | {"message": "not tried: this installation has no ncclep_py.launch"}
    try:
        return dict(importlib.import_module("ncclep_py.launch").self_test())
    except Exception as error:
        return skipped | {"compiled": False, "message": f"{type(error).__name__}: {error}"}


def judge_self_test(result: dict[str, Any]) -> list[Finding]:
    """The self-test as findings."""
    if result["compiled"] is False or result["ran_on_gpu"] is False:
        return [Finding("error", "self-test", result["message"], "if the versions above are right, report this with the output of doctor --json")]
    if result["compiled"] is None:
        return [Finding("none", "self-test", result["message"])]
    how = "ran on 2 ranks" if result["ran_on_gpu"] else "compiled, not run: there is no GPU"
    return [Finding("ok", "self-test", f"{result['message']}; {how}")]


def examine(facts: Facts, test: Callable[[Facts, list[Finding]], dict[str, Any]] = self_test) -> dict[str, Any]:
    """Everything that `doctor --json` prints."""
    findings = diagnose(facts)
    result = test(facts, findings)
    findings += judge_self_test(result)
    return {
        "versions": facts["versions"],
        "environment": facts["environment"],
        "gpus": facts["gpus"],
        "p2p": facts["p2p"],
        "network": facts.get("network"),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "self_test": result,
        "ok": all(finding.level != "error" for finding in findings),
        "backends": ["sim"] + ["nccl"] * bool(result["ran_on_gpu"]),
    }


def table(rows: Iterable[Iterable[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def version_lines(versions: dict[str, dict[str, Any]]) -> list[str]:
    """The table of versions and paths."""
    return table((name, row["version"] or "-", " ".join(filter(None, [row["path"], f"({row['note']})" if row["note"] else ""])))
                 for name, row in versions.items())


def gpu_lines(gpus: list[dict[str, Any]], p2p: list[list[bool]]) -> list[str]:
    """The table of GPUs; the last column tells which others each can reach."""
    if not gpus:
        return ["none"]
    reach = [" ".join(str(j) for j, can in enumerate(line) if can and j != i) or "-" for i, line in enumerate(p2p)] or ["?"] * len(gpus)
    return table((str(gpu["index"]), gpu["name"], f"{gpu['sms']} SMs", f"sm_{gpu['capability'][0]}{gpu['capability'][1]}", gpu["uuid"],
                  "MIG instance" if gpu["mig"] else "whole GPU", f"reaches {peers}") for gpu, peers in zip(gpus, reach, strict=True))


def finding_lines(findings: list[dict[str, str]]) -> list[str]:
    """A line for each finding (more if its problem has more), and one for its cure."""
    lines = []
    for finding in findings:
        first, *rest = finding["problem"].splitlines() or [""]
        lines.append(f"{finding['level']:<5}  {finding['name']:<19}  {first}".rstrip())
        lines += [f"{'':<28}{line}" for line in rest if line.strip()]
        if finding["cure"]:
            lines.append(f"{'':<28}-> {finding['cure']}")
    return lines


def write_report(report: dict[str, Any], out: TextIO) -> None:
    """The report for people."""
    sections = {
        "Versions": version_lines(report["versions"]),
        "Environment": table(report["environment"].items()) or ["nothing set that matters here"],
        "GPUs": gpu_lines(report["gpus"], report["p2p"]),
        "Checks": finding_lines(report["findings"]),
    }
    for title, lines in sections.items():
        out.write(f"{title}\n" + "".join(f"  {line}\n" for line in lines) + "\n")
    usable = "on GPUs and in the simulator" if "nccl" in report["backends"] else "in the simulator; nothing was run on a GPU"
    out.write(f"All right, {usable}.\n" if report["ok"] else "There are errors.\n")


def show_versions() -> None:
    """Write the versions and paths of everything that would be loaded to standard output."""
    sys.stdout.write("\n".join(version_lines(gather()["versions"])) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--alone", action="store_true", help="under torchrun or Slurm: look at this rank's machine only")
    parser.add_argument("--no-connect", action="store_true", help="under torchrun or Slurm: make no NCCL communicator over all ranks")
    parser.add_argument("--ranks", type=_count, help="ranks that you will start on this machine (default: what the launcher's environment says)")


def _count(text: str) -> int:
    """Type of an option that counts from one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main(options: argparse.Namespace) -> int:
    """Print the report; the exit code is 1 if there is an error. Under a launcher the report is over all ranks."""
    ranks = importlib.import_module("ncclep_py.doctor_ranks")
    if ranks.started_by_launcher() and not options.alone:
        return int(ranks.main(options))
    report = examine(gather(options.ranks))
    if options.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        write_report(report, sys.stdout)
    return 0 if report["ok"] else 1
