"""Bad arguments of every command: a sentence that names the option, exit code 2, and no traceback."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ncclep_py.__main__ import COMMANDS, READER_GONE, main

COMPILE = "compile --out unused --list --ranks 2 --experts 4 --topk 2 --tokens 4 --hidden 512"
BAD = {
    "nosuch": "argument command: invalid choice: 'nosuch'",
    "demo --backend sim --ranks 0": "--ranks must be at least 1, got 0",
    "demo --backend sim --seed 9223372036854775808": "--seed must fit 64 bits, got 9223372036854775808",
    "demo --backend sim --team -2": "--team must be at least 1, got -2",
    "demo --backend sim --topk 9": "--topk must be at most --experts = 8, got 9",
    "demo --backend sim --text nosuch.txt": "--text must be a file that can be read, got nosuch.txt (No such file or directory)",
    "demo --backend sim --text .": "--text must be a file that can be read, got . (Is a directory)",
    "demo --layout flat": "--layout flat is for --algorithm ht",
    "bench nosuch": "action must be run, compare or report, got nosuch",
    "bench --backend sim --json nosuch/x.json": "argument --json: cannot write nosuch/x.json:",
    "bench --backend sim --json .": "argument --json: cannot write .:",
    "bench --backend sim --trace nosuch/x.json": "argument --trace: cannot write nosuch/x.json:",
    "bench --backend sim --tokens 0": "tokens must be at least 1, got 0",
    "bench --backend sim --gpus -1": "gpus must be at least 1, or 0 for all, got -1",
    "bench --backend sim --mode processes": "the simulator has all ranks in one process, got mode processes",
    "bench --backend sim --compare nosuch": "nosuch cannot be read as a record of `bench --json`",
    "bench compare a": "compare needs two records, BEFORE and AFTER, got 1",
    "bench compare . .": ". cannot be read as a record of `bench --json`",
    "bench report": "bench report needs at least one record",
    "plan --ranks 0": "num_ranks must be at least 1, got 0",
    "plan --ranks 8 --team 3": "leave a last team of 2",
    "plan --ranks 8 --sms -1": "num_sms must be at least 0, got -1",
    "plan --ranks 8 --max-teams -1": "max_teams must be at least 0, got -1",
    "plan --ranks 8 --rank 8": "rank must be in [0, 8), got 8",
    "plan --ranks 8 --nvlink nan": "nvlink must be above 0, got nan",
    "plan --ranks 8 --ranks-per-gpu 0": "ranks_per_gpu must be above 0, got 0",
    "compile": "the following arguments are required: --out",
    f"{COMPILE} --arch nosuch": "arch must look like sm_90, got 'nosuch'",
    f"{COMPILE} --gpu-sms 0": "--gpu-sms must be at least 1, got 0",
    f"{COMPILE} --gpu-sms -3": "--gpu-sms must be at least 1, got -3",
    f"{COMPILE} --alignment 4": "--alignment is for --algorithm ht, got 4",
    f"{COMPILE} --algorithm ht --alignment 3": "dispatch_output_per_expert_alignment must be 0 or a power of two, got 3",
    f"{COMPILE} --config num_slots=--1": "--config must be NAME=INTEGER, got 'num_slots=--1'",
    f"{COMPILE} --config num_slots=²": "--config must be NAME=INTEGER, got 'num_slots=²'",
    f"{COMPILE} --config nosuch=1": "--config must name a field of GroupConfig, got 'nosuch'",
    f"{COMPILE} --config hidden=64": "--config must not name hidden, which is --hidden",
    f"{COMPILE} --config count_waits=1": "leave GroupConfig.count_waits out",
    f"{COMPILE} --config trace=1": "leave GroupConfig.trace out",
    f"{COMPILE} --recipe quant_fwd:0:16": "tokens must have rows of a multiple of 16 bytes in QUANT_FWD, got 0 bytes",
    f"{COMPILE} --recipe quant_fwd:512:3": "inputs.scales must have rows of a multiple of 16 bytes in QUANT_FWD, got 3 bytes",
    f"{COMPILE} --recipe quant_fwd:1024:16": "must fit 1024 bytes a row together (GroupConfig.max_token_bytes), got 1024 + 16",
    f"{COMPILE} --recipe ds_fp8 --dtype fp32": "DS_FP8 quantises bfloat16 rows, this group's are torch.float32",
    f"{COMPILE} --recipe ds_fp8 --hidden 640": "hidden must be a multiple of 512 for DS_FP8, got 640",
    f"{COMPILE} --recipe nvfp4 --hidden 640": "hidden must be a multiple of 512 for NVFP4, got 640",
    f"{COMPILE} --recipe nvfp4 --algorithm ht": "--recipe nvfp4 is for --algorithm ll",
    f"{COMPILE} --recipe ds_fp8 --algorithm ht": "--recipe ds_fp8 is for --algorithm ll",
    "doctor --ranks 0": "argument --ranks: must be at least 1, got 0",
    "doctor --ranks -1": "argument --ranks: must be at least 1, got -1",
    "doctor extra": "unrecognized arguments: extra",
    "explain nosuch": "page must be one of",
    "explain ../config": "page must be one of",
    "vocabulary nosuch": "no operation is called nosuch",
}


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as e:
        code = int(e.code or 0)
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize("line", BAD)
def test_bad_arguments(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, told = outcome(shlex.split(line), capsys)
    assert code == 2 and BAD[line] in told, told
    assert not list(tmp_path.iterdir())


def test_every_command_is_among_them() -> None:
    assert {line.split()[0] for line in BAD} >= COMMANDS.keys()


@pytest.mark.parametrize("line", [line for line in BAD if line.split()[0] in ("demo", "plan", "compile", "doctor")])
def test_as_json(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = outcome([*shlex.split(line), "--json"], capsys)
    told = json.loads(out)
    assert code == 2 and BAD[line] in told["error"] and not told.get("ok", told.get("verified"))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00 no text", b'{"a": 1}', b"[1, 2]"])
def test_a_file_of_something_else(content: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_bytes(content)
    for line in ("bench compare x x", "bench report x", "bench --backend sim --compare x"):
        code, _, told = outcome(line.split(), capsys)
        assert code == 2 and "x " in told and "record" in told and len(told.splitlines()) == 1, told
    code, _, told = outcome("bench --backend sim --algorithm ll --layout expert_major --tokens 2 --routing x".split(), capsys)
    assert code == 2 and "or a file of bench.routing.record, got x: " in told and len(told.splitlines()) == 1


def test_recipes_that_fit_are_taken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ("--recipe quant_fwd:512:16 --recipe ds_fp8 --recipe nvfp4", "--recipe quant_fwd:512:16 --algorithm ht --alignment 4"):
        code, out, err = outcome(f"{COMPILE} {more}".split(), capsys)
        assert code == 0 and "_dispatch" in out, err


# ---- a reader that goes -------------------------------------------------------------------------------------------------------
LONG = ("vocabulary", "vocabulary wait_arrived", "explain protocol", "doctor", "plan --ranks 16", f"{COMPILE}", "--help", "bench --help",
        "demo --backend sim --ranks 2 --text README.md --hidden 8", "bench --backend sim --algorithm ll --layout rank_major --tokens 1")


@pytest.mark.parametrize("line, unbuffered", [*((line, "") for line in LONG), ("vocabulary", "1"), ("--help", "1")])
def test_a_reader_that_goes_is_no_error(line: str, unbuffered: str, tmp_path: Path) -> None:
    """As with ``| head -1``, but gone before the first byte."""
    read, write = os.pipe()
    os.close(read)
    (tmp_path / "README.md").write_text("two words")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run([sys.executable, "-m", "ncclep_py", *line.split()], stdout=write, stderr=subprocess.PIPE, text=True, timeout=120,
                          cwd=tmp_path, env=environment, check=False)
    os.close(write)
    quiet = "--help" in line and unbuffered   # argparse takes no notice of what it cannot write; what is buffered we write
    assert (done.returncode, done.stderr) == (0 if quiet else READER_GONE, "")


def test_every_command_has_such_a_reader() -> None:
    assert {line.split()[0] for line in LONG} >= COMMANDS.keys()


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("ncclep_py.plan.main", fail)
    with pytest.raises(BrokenPipeError):
        main(["plan", "--ranks", "2"])
