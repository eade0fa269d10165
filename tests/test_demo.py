"""The demo's command line in the simulator, and what README.md promises: its example runs, its file map is true."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from ncclep_py import demo
from ncclep_py.__main__ import main

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PROMISED = {"backend", "ranks", "algorithm", "layout", "tokens", "verified", "max_abs_error", "bitwise_equal_to_reference", "seconds"}


@pytest.fixture
def text(tmp_path: pathlib.Path) -> Any:
    """Writes a text, returns its file's name."""
    def write(content: str | bytes) -> str:
        path = tmp_path / "text.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["demo", "--backend", "sim", *words])
    out, err = capsys.readouterr()
    return code, out, err


def good(capsys: Any, *words: str) -> dict[str, Any]:
    """Run with --json; the result, which must be verified."""
    code, out, err = run(capsys, "--json", *words)
    assert code == 0 and err == "" and out.count("\n") == 1, (code, out, err)
    result = json.loads(out)
    assert set(result) >= PROMISED
    assert result["verified"] is True and result["bitwise_equal_to_reference"] is True and result["max_abs_error"] == 0.0
    layout = words[words.index("--layout") + 1] if "--layout" in words else "expert_major"
    algorithm = words[words.index("--algorithm") + 1] if "--algorithm" in words else "ll"
    assert (result["backend"], result["algorithm"], result["layout"]) == ("sim", algorithm, layout) and result["seconds"] > 0
    return result


def bad(capsys: Any, *words: str) -> str:
    """Run with and without --json; the sentence, the same in both, exit code 2."""
    code, out, err = run(capsys, "--json", *words)
    assert code == 2 and err == ""
    told = json.loads(out)
    assert told["verified"] is False
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and err == told["error"] + "\n" and "Traceback" not in err
    return told["error"]


def test_default_run(capsys: Any) -> None:
    result = good(capsys)
    assert result["ranks"] == 4 and result["tokens"] == len(re.findall(r"\w+|[^\w\s]", demo.TEXT)) > 300


def test_words_for_people(capsys: Any, text: Any) -> None:
    code, out, err = run(capsys, "--text", text("one two three"), "--ranks", "2", "--experts", "2")
    assert code == 0 and err == "" and "3 tokens through 2 experts (top 2, hidden 64) on 2 ranks in the simulator" in out
    assert out.endswith("equal bit for bit: verified\n")


@pytest.mark.parametrize("words", [
    ["--ranks", "1", "--experts", "1", "--topk", "1", "--hidden", "8", "--tokens", "1"],
    ["--ranks", "3", "--experts", "9", "--topk", "5", "--hidden", "24", "--tokens", "7"],
    ["--ranks", "8", "--experts", "8", "--topk", "8", "--hidden", "40", "--tokens", "3", "--seed", "-5"],
    ["--ranks", "5", "--experts", "35", "--topk", "32", "--hidden", "16", "--tokens", "2", "--seed", "123456789"],
])
def test_odd_sizes(capsys: Any, text: Any, words: list[str]) -> None:
    result = good(capsys, *words, "--text", text("a b c d e f g h i j k l m n o p q, r s."))
    assert result["tokens"] == 21 and result["ranks"] == int(words[1])


def test_more_ranks_than_tokens(capsys: Any, text: Any) -> None:
    assert good(capsys, "--text", text("alone"), "--ranks", "8")["tokens"] == 1
    assert good(capsys, "--text", text("just two"), "--ranks", "4", "--tokens", "1")["tokens"] == 2


def test_last_step_may_be_full_or_not(capsys: Any, text: Any) -> None:
    for words, steps in ((7, 1), (8, 1), (9, 2), (16, 2)):
        assert good(capsys, "--text", text("w " * words), "--ranks", "2", "--tokens", "4")["steps"] == steps


def test_a_text_of_strange_bytes(capsys: Any, text: Any) -> None:
    assert good(capsys, "--text", text(b"\xff\xfe word \x00 na\xc3\xafve \xe4\xb8\xad\xe6\x96\x87"), "--ranks", "2")["tokens"] >= 3


def test_the_same_seed_gives_the_same_rows() -> None:
    job = demo.Job(2, "sim", 4, 2, 16, 4, 3)
    words = ["a", "b", "A", "c"]
    rows = demo.Layer(job, torch.device("cpu")).rows(words)
    assert torch.equal(rows, demo.Layer(job, torch.device("cpu")).rows(words)) and torch.equal(rows[0], rows[2])
    assert not torch.equal(rows, demo.Layer(demo.Job(2, "sim", 4, 2, 16, 4, 4), torch.device("cpu")).rows(words))


@pytest.mark.parametrize("sizes", [(), ("--ranks", "1"), ("--ranks", "3", "--experts", "9", "--topk", "5", "--tokens", "7")], ids=str)
def test_rank_major(capsys: Any, sizes: tuple[str, ...]) -> None:
    told = good(capsys, "--layout", "rank_major", *sizes)
    assert told["layout"] == "rank_major" and told["bitwise_equal_to_reference"]


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
@pytest.mark.parametrize("sizes", [(), ("--ranks", "3", "--experts", "9", "--topk", "4", "--tokens", "11")], ids=str)
def test_high_throughput(capsys: Any, sizes: tuple[str, ...], layout: str) -> None:
    told = good(capsys, "--algorithm", "ht", "--layout", layout, *sizes)
    assert (told["algorithm"], told["layout"]) == ("ht", layout) and told["bitwise_equal_to_reference"]


def test_empty_texts(capsys: Any, text: Any, tmp_path: pathlib.Path) -> None:
    for content in ("", " \n\t\n"):
        assert "--text must hold at least one word" in bad(capsys, "--text", text(content))
    assert "nothing-here.txt" in bad(capsys, "--text", str(tmp_path / "nothing-here.txt"))
    assert str(tmp_path) in bad(capsys, "--text", str(tmp_path))


@pytest.mark.parametrize(("words", "told"), [
    (["--algorithm", "ht", "--layout", "rank_major"], "--layout rank_major is for --algorithm ll; use expert_major or flat"),
    (["--layout", "flat"], "--layout flat is for --algorithm ht; use expert_major or rank_major"),
    (["--ranks", "0"], "--ranks must be at least 1, got 0"),
    (["--experts", "-8"], "--experts must be at least 1, got -8"),
    (["--topk", "0"], "--topk must be at least 1, got 0"),
    (["--hidden", "0"], "--hidden must be at least 1, got 0"),
    (["--tokens", "0"], "--tokens must be at least 1, got 0"),
    (["--topk", "9"], "--topk must be at most --experts = 8, got 9"),
    (["--ranks", "3"], "--experts must be a multiple of --ranks, got 8 over 3"),
    (["--hidden", "12"], "hidden must make rows of a multiple of 16 bytes, got 12 x 2 = 24 bytes"),
    (["--topk", "33", "--experts", "40"], "num_topk must be in [1, 32], got 33"),
])
def test_what_cannot_be_run_is_a_sentence(capsys: Any, words: list[str], told: str) -> None:
    assert told in bad(capsys, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_real_nccl_without_a_gpu(capsys: Any) -> None:
    assert "needs a CUDA GPU" in bad(capsys, "--backend", "nccl")


def test_a_missing_package_is_a_sentence(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any) -> None:
        raise ImportError("the nccl backend needs nccl4py")

    monkeypatch.setattr(demo, "run", missing)
    assert bad(capsys) == "ImportError: the nccl backend needs nccl4py"


@pytest.mark.parametrize("words", [["--layout", "token_major"], ["--ranks", "many"], ["--nonsense"]])
def test_the_parser_refuses_the_rest(capsys: Any, words: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(capsys, *words)
    assert raised.value.code == 2 and "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "equal", "code"), [(0.25, False, 1), (float("nan"), False, 1), (1e-4, False, 0)])
def test_exit_code_says_whether_it_was_verified(capsys: Any, monkeypatch: pytest.MonkeyPatch, error: float, equal: bool, code: int) -> None:
    """A wrong layer in one process: off by `error` of its largest value."""
    right = demo._one_process

    def wrong(*args: Any) -> torch.Tensor:
        rows = right(*args).float()
        return (rows + error * rows.abs().max()).to(torch.bfloat16)

    monkeypatch.setattr(demo, "_one_process", wrong)
    got, out, _ = run(capsys, "--json", "--ranks", "2")
    result = json.loads(out)
    assert got == code and result["verified"] is (code == 0) and result["bitwise_equal_to_reference"] is equal
    got, out, _ = run(capsys, "--ranks", "2")
    assert got == code and ("NOT VERIFIED" in out) == (code == 1)


def test_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ncclep_py", "demo", "--backend", "sim", "--ranks", "2", "--json"], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["verified"] is True
    done = subprocess.run([sys.executable, "-m", "ncclep_py", "demo", "--layout", "flat"], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("--layout flat is for --algorithm ht; ")


# ---- README ------------------------------------------------------------------------------------------------------------------
def test_the_readmes_example_runs(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ncclep_py.local_world

    (source,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert "LocalWorld(4)" in source
    monkeypatch.setattr(ncclep_py.local_world, "_default_backend", lambda: "sim")
    torch.manual_seed(0)
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == "[0.0, 0.0, 0.0, 0.0]\n"


def test_the_readmes_file_map_is_true() -> None:
    rows = [line.strip("|").split("|") for line in README.splitlines() if re.match(r"\| `", line)]
    assert len(rows) > 5
    for files, what in rows:
        named = re.findall(r"`([^`]+)`", files)
        folder = ROOT / (named[0] if named[0].endswith("/") else pathlib.Path(named[0]).parent)
        for name in named:
            assert (ROOT / name).exists() or (folder / name).exists(), f"README.md names {name}"
        for name in re.findall(r"`([\w/]+\.(?:py|cu))`", what):
            assert (folder / name).exists(), f"README.md names {name} in {folder}"


def test_files_the_readme_names_elsewhere_exist() -> None:
    for name in re.findall(r"`(?:python3 )?((?:scripts|ncclep_py|tests)/[\w./]+)", README) + re.findall(r"python3 (scripts/\S+)", README):
        assert (ROOT / name).exists(), f"README.md names {name}"


def test_commands_the_readme_names_exist() -> None:
    from ncclep_py.__main__ import COMMANDS

    for command in set(re.findall(r"python -m ncclep_py (\w+)", README)):
        assert command in COMMANDS and importlib.import_module(f"ncclep_py.{command}").main


@pytest.mark.parametrize(("words", "told"), [(["--ranks", "many"], "argument --ranks: invalid int value: 'many'"), (["--layout", "heap"], "--layout"),
                                             (["--nothing"], "--nothing")])
def test_a_bad_command_line_is_json_where_json_was_asked_for(capsys: Any, words: list[str], told: str) -> None:
    for as_json in (True, False):
        with pytest.raises(SystemExit) as ended:
            main(["demo", *words, *(["--json"] if as_json else [])])
        out, err = capsys.readouterr()
        assert ended.value.code == 2
        if as_json:
            assert err == "" and told in json.loads(out)["error"] and json.loads(out)["verified"] is False
        else:
            assert out == "" and told in err


def test_a_team_of_nobody_is_refused(capsys: Any) -> None:
    assert main(["demo", "--backend", "sim", "--team", "0"]) == 2
    assert "--team must be at least 1, got 0" in capsys.readouterr().err
