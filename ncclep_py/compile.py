"""`python -m ncclep_py compile`: the kernels of a group as cubins in a folder, for machines that cannot make them.

There ``NCCLEP_CUBIN_DIR`` names the folder (``ncclep_py.prebuilt``). Kernels of groups with several teams are linked with NCCL's device library,
which needs an nvJitLink that the machine with the GPUs may lack.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ncclep_py import prebuilt
from ncclep_py.compiled import compile_kernel
from ncclep_py.config import Algorithm, GroupConfig, Layout, TokenType
from ncclep_py.kernels.shape import Wire
from ncclep_py.recipes import check_forwardable, check_quantisable
from ncclep_py.recording import kernels_of
from ncclep_py.toolchain import capability, compiler_archs
from ncclep_py.topology import Topology

__all__ = ["add_arguments", "build", "main"]

GPU_SMS = 132
LEAST_CAPABILITY = (8, 0)
"""The device functions use `redux`."""
OPTIONS = {"num_experts": "--experts", "max_dispatch_tokens_per_rank": "--tokens", "hidden": "--hidden", "num_topk": "--topk", "dtype": "--dtype",
           "algorithm": "--algorithm"}
"""Fields of GroupConfig with an option of their own."""


def build(config: GroupConfig, topology: Topology, archs: list[str], out: Path, multiprocessors: int = GPU_SMS,
          progress: Callable[[str], None] | None = None, **more: Any) -> list[Path]:
    """Compile all kernels of a group for some architectures into a folder; `more` as in `recording.kernels_of`.

    Raises:
        RuntimeError: what the toolchain cannot do, in its words.
    """
    out.mkdir(parents=True, exist_ok=True)
    specs, made = kernels_of(config, topology, multiprocessors, **more), []
    for arch in archs:
        for spec in specs:
            started = time.perf_counter()
            compiled = compile_kernel(spec, arch)
            made.append(prebuilt.store(out, spec, arch, compiled))
            if progress:
                progress(f"{made[-1].name}  {compiled.info['registers']} registers  {time.perf_counter() - started:.1f} s")
    return made


def wire_of(text: str) -> Wire:
    """``ds_fp8``, ``ds_fp8_rounded`` or ``quant_fwd:ROW_BYTES:SCALE_BYTES`` as what is sent of a row; the first two need `hidden` (see `_wires`)."""
    name, *sizes = text.split(":")
    if name == "quant_fwd" and len(sizes) == 2 and all(s.isdigit() for s in sizes):
        return Wire(int(sizes[0]), int(sizes[1]))
    if name in ("ds_fp8", "ds_fp8_rounded") and not sizes:
        return Wire(0, 0, True, name == "ds_fp8_rounded")
    raise argparse.ArgumentTypeError(f"recipe must be nvfp4, ds_fp8, ds_fp8_rounded or quant_fwd:ROW_BYTES:SCALE_BYTES, got {text!r}")


def _wires(recipes: list[str], hidden: int) -> list[Wire]:
    """What dispatch sends under each recipe."""
    found = [wire_of(text) for text in recipes if text != "nvfp4"]
    return [Wire(hidden, hidden // 128 * 4, True, w.round_scales) if w.quantise else w for w in found]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `compile`."""
    parser.add_argument("--arch", default="sm_90", help="architectures, separated by commas, sm_80 or newer (default sm_90)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to put the cubins")
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks (default 8)")
    parser.add_argument("--team", type=int, help="ranks that can address each other's memory (default: all; several teams need kernels of their own)")
    parser.add_argument("--algorithm", choices=("ll", "ht"), default="ll", help="default ll")
    parser.add_argument("--layout", action="append", choices=("expert_major", "rank_major", "flat"), help="of handles; repeatable (default: all)")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of a rank (default 128)")
    parser.add_argument("--experts", type=int, default=256, help="experts over all ranks (default 256)")
    parser.add_argument("--topk", type=int, default=8, help="experts per token (default 8)")
    parser.add_argument("--hidden", type=int, default=7168, help="elements of a row (default 7168)")
    parser.add_argument("--dtype", choices=[t.name.lower() for t in TokenType], default="bf16", help="element type of rows (default bf16)")
    parser.add_argument("--recipe", action="append", default=[], help="nvfp4, ds_fp8, ds_fp8_rounded or quant_fwd:ROW_BYTES:SCALE_BYTES; repeatable")
    parser.add_argument("--config", action="append", default=[], metavar="NAME=VALUE", help="any other integer field of GroupConfig; repeatable")
    parser.add_argument("--idx", choices=("int32", "int64", "both"), default="int64", help="type of expert ids (default int64)")
    parser.add_argument("--alignment", type=int, default=0, help="alignment of HIGH_THROUGHPUT zones (default none)")
    parser.add_argument("--own", action="append", default=[], metavar="FILE.PY:FACTORY", help="a kernel for Group.run_kernel, too; repeatable")
    parser.add_argument("--gpu-sms", type=int, default=GPU_SMS, help=f"a rank's share of its GPU's multiprocessors, if max_num_sms is not set "
                        f"(default {GPU_SMS})")
    parser.add_argument("--list", action="store_true", help="only name the kernels")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _config(options: argparse.Namespace) -> GroupConfig:
    """The group's config of the command line."""
    more: dict[str, Any] = {}
    for text in options.config:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"-?[0-9]+", value):
            raise ValueError(f"--config must be NAME=INTEGER, got {text!r}")
        if name in OPTIONS:
            raise ValueError(f"--config must not name {name}, which is {OPTIONS[name]}")
        if name not in {field.name for field in dataclasses.fields(GroupConfig)}:
            raise ValueError(f"--config must name a field of GroupConfig, got {name!r}")
        more[name] = bool(int(value)) if name in ("enable_mask", "checked", "trace", "count_waits") else int(value)
    algorithm = Algorithm.HIGH_THROUGHPUT if options.algorithm == "ht" else Algorithm.LOW_LATENCY
    return GroupConfig(num_experts=options.experts, max_dispatch_tokens_per_rank=options.tokens, hidden=options.hidden, num_topk=options.topk,
                       dtype=TokenType[options.dtype.upper()].torch_dtype(), algorithm=algorithm, **more)


def _check_archs(archs: list[str]) -> None:
    """``ValueError`` for an architecture no kernel can be compiled for; without a compiler only for what is none."""
    allowed = [arch for arch in compiler_archs() if capability(arch) >= LEAST_CAPABILITY]
    for arch in archs:
        if allowed and capability(arch) not in map(capability, allowed):
            raise ValueError(f"--arch must be of {', '.join(allowed)}, got {arch}")
        capability(arch)


def _made_for(config: GroupConfig, topology: Topology, archs: list[str]) -> str:
    """What the kernels fit, in a line: sizes are constants in them."""
    teams = "one team" if topology.num_teams == 1 else f"{topology.num_teams} teams of {topology.team_size}"
    return (f"{', '.join(archs)}; {config.algorithm.name}, {topology.num_ranks} ranks in {teams}, {config.num_experts} experts, "
            f"top {config.num_topk}, {config.max_dispatch_tokens_per_rank} tokens of a rank, hidden {config.hidden}, "
            f"{config.token_type.name.lower()}")


def _check(options: argparse.Namespace, config: GroupConfig, wires: list[Wire]) -> None:
    """``ValueError`` for kernels no handle of the group could use."""
    high = config.algorithm is Algorithm.HIGH_THROUGHPUT
    if options.gpu_sms < 1:
        raise ValueError(f"--gpu-sms must be at least 1, got {options.gpu_sms}")
    if options.alignment and not high:
        raise ValueError(f"--alignment is for --algorithm ht, got {options.alignment}")
    quantising = ["NVFP4"] * ("nvfp4" in options.recipe) + ["DS_FP8"] * any(wire.quantise for wire in wires)
    for recipe in quantising:
        if high:
            raise ValueError(f"--recipe {recipe.lower()} is for --algorithm ll")
        check_quantisable(recipe, config)
    for wire in wires:
        if not wire.quantise:
            check_forwardable(wire.sent_bytes, wire.scale_bytes, config)


def main(options: argparse.Namespace) -> int:
    """Compile; 2 for what is asked wrongly, 1 for what this machine cannot do."""
    try:
        archs = options.arch.split(",")
        _check_archs(archs)
        topology = Topology(options.ranks, options.ranks if options.team is None else options.team)
        layouts = [Layout[name.upper()] for name in options.layout or ()]
        more: dict[str, Any] = {"layouts": layouts, "wires": _wires(options.recipe, options.hidden), "alignment": options.alignment,
                                "idx_bytes": {"int32": (4,), "int64": (8,), "both": (4, 8)}[options.idx], "nvfp4": "nvfp4" in options.recipe,
                                "own": options.own}
        config = _config(options)
        _check(options, config, more["wires"])
        names = [spec.name for spec in kernels_of(config, topology, options.gpu_sms, **more)]
    except (ValueError, TypeError, AttributeError, NotImplementedError, argparse.ArgumentTypeError) as e:
        return _failed(options, str(e), 2)
    if options.list:
        sys.stdout.write(json.dumps({"ok": True, "kernels": names}) + "\n" if options.json else "".join(f"{name}\n" for name in names))
        return 0
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        return _failed(options, f"--out must be a folder that can be written, got {options.out} ({e.strerror})", 2)
    try:
        files = build(config, topology, archs, options.out, options.gpu_sms, None if options.json else _say, **more)
    except (ImportError, RuntimeError, NotImplementedError) as e:
        return _failed(options, str(e), 1)
    made_for = _made_for(config, topology, archs)
    told = {"ok": True, "out": str(options.out), "files": [f.name for f in files], "nccl": prebuilt.nccl_version(), "made_for": made_for}
    sys.stdout.write(json.dumps(told) + "\n" if options.json else
                     f"{len(files)} cubins for {made_for}\nuse them with {prebuilt.VARIABLE}={options.out}\n")
    return 0


def _say(line: str) -> None:
    """One line of progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _failed(options: argparse.Namespace, why: str, code: int) -> int:
    sys.stdout.write(json.dumps({"ok": False, "error": why}) + "\n") if options.json else sys.stderr.write(f"{why}\n")
    return code
