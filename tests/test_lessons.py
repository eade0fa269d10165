"""Every lesson in `scripts/` runs to its last assert, in the simulator and (marked gpu) on a GPU, and keeps the form lessons have."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import runpy
import subprocess
import sys
from typing import Any

import pytest
import torch

from ncclep_py import EpMismatchError, EpOverflowError, EpTimeoutError, GroupConfig, compiled, launch
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.simulator import DeadlockError, RaceError

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"
LESSONS = sorted(SCRIPTS.glob("lesson_*.py"))
SHAPE = KernelShape.build(GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=1, hidden=8, num_topk=1, dtype=torch.float32), 2, 1, 8)
by_name = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any) -> Any:
    """Run a lesson as a command; what it printed."""
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path))   # kernels of lessons do not belong into the user's cache
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = dict(launch.KERNELS)

    def run(path: pathlib.Path, backend: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(path), "--backend", backend])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    yield run
    launch.KERNELS.clear()
    launch.KERNELS.update(before)


def test_lessons_are_numbered_without_a_gap() -> None:
    assert [int(path.stem.split("_")[1]) for path in LESSONS] == list(range(1, len(LESSONS) + 1)) and LESSONS


WAITS = "        wait_heads(window, HEADS, rank, RANKS, epoch, 0, local + FAIL, record, timeout)\n\n    return ranks_meet\n\n\ndef program"
TRIES: dict[int, tuple[list[tuple[str, str]], type[Exception], str | None, str]] = {   # changes, error, what it says, what was printed before it
    1: ([("\n        wait_arrived(window, SIGNALS, rank, RANKS, 1, local + FAIL, record, timeout)", "")], RaceError,
        r"gather_row \(.* reads SLOT0.* scatter_row (.|\n)*nothing that rank 1 block 0 warp . ever did is ordered before 2", ""),
    2: ([("fence.acq_rel.gpu", "fence.acq_rel.sys")], AssertionError, None, "scope too small.*\n.*\n   no race in 10 schedules\n$"),
    3: ([("[[2, 0], [3, 0], [2, 1], [0, 3]]", str([[0, 0]] * 4))], EpOverflowError,
        "^rank 1, .*row 8 for an expert of rank 0 is beyond its 8 rows", ""),
    4: ([("            received = handle", "            if comm.rank == 2: return []\n            received = handle")], EpMismatchError,
        "rank 2 called another operation: kind dispatch here, close there", ""),
    5: ([("randn(TOKENS, HIDDEN, generator=g)", "randn(TOKENS, HIDDEN, generator=g).round()"),
         ("torch.softmax(torch.randn(TOKENS, TOPK, generator=g), 1)", "torch.full((TOKENS, TOPK), 0.25)")], AssertionError, None,
        "10 of 10 runs are bit for bit .* with k = 2, 1, 0 0 of 128 numbers have other bits"),
    6: ([('ranks.play("D X C D X C")', 'ranks.play("D X C")')], AssertionError, None, "with one bank:\n   None\n$"),
    7: ([(WAITS, WAITS.replace("epoch", "epoch + 1"))], DeadlockError,
        "first cause: ranks 0, 1, 2, 3 wait for HEAD of epoch 2 of their own, which they did not publish", "version 2:\n$"),
    8: ([("max_recv_tokens_per_rank=RANKS * TOKENS", "max_recv_tokens_per_rank=3")], EpOverflowError,
        "rank 0 would receive 4 rows, but max_recv_tokens_per_rank is 3", ""),
    9: ([("TOPK_IDX = [[[0, 1], ", "TOPK_IDX = [[[0, 2], ")], AssertionError, None,
        r"12 x 6:\n([^1C]*1){9}[^1C]*C, combine \(tokens x received rows\), 6 x 12:\n([^1]*1){9}[^1]*$"),
    10: ([('sum(parts) if name == "router"', 'parts[0] if name == "router"')], AssertionError, None,
         r"the gradient of router +1\.1e\+01  of 3\.7e\+01\n$"),
    11: ([("            ops.ht_net_signal(", "            # ops.ht_net_signal(")], DeadlockError,
         "first cause: rank 0 ended its kernel without adding to signal 0 of context 0", "")}


def test_every_lesson_suggests_a_change_at_its_end() -> None:
    for number, path in enumerate(LESSONS, 1):
        told = path.read_text().split('"""')[1].rstrip().split("\n\n")[-1]
        assert told.startswith("Try: ") and told.count("\n") <= 1, path.name
        assert number in TRIES


@pytest.mark.parametrize("number", TRIES)
def test_a_change_that_a_lesson_suggests_does_what_it_says(number: int, play: Any, capsys: Any, tmp_path: pathlib.Path) -> None:
    changes, error, says, printed = TRIES[number]
    text = LESSONS[number - 1].read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "changed.py").write_text(text)
    with pytest.raises(error, match=says):
        play(tmp_path / "changed.py", "sim")
    assert re.search(printed, capsys.readouterr().out)


@by_name
def test_form(path: pathlib.Path) -> None:
    text = path.read_text()
    number = int(path.stem.split("_")[1])
    assert text.startswith(f'"""Lesson {number}: ') and text.count("\n") <= 135
    assert f"    python3 scripts/{path.name}" in text and "Look at:" in text.split('"""')[1]
    assert "assert " in text
    for other in re.findall(r"\blesson (\d+)\b", text):
        assert int(other) <= len(LESSONS), f"{path.name} names lesson {other}, which is not there"


HINTED = [*LESSONS, *(SCRIPTS / f"{name}.py" for name in ("edit_to_result", "profile_pair", "profile_host", "simulate", "train_moe"))]


@pytest.mark.parametrize("path", HINTED, ids=lambda path: path.stem)
@pytest.mark.parametrize("made", [False, True], ids=["no .venv", "a .venv"])
def test_a_python_without_torch_is_told_which_has_it(path: pathlib.Path, made: bool, tmp_path: pathlib.Path) -> None:
    if made:
        (tmp_path / "venv" / "bin").mkdir(parents=True)
        (tmp_path / "venv" / "bin" / "python").touch()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"NCCLEP_VENV": str(tmp_path / "venv")}
    done = subprocess.run([sys.executable, "-S", f"scripts/{path.name}", "--backend", "sim"], cwd=SCRIPTS.parent, env=environment, text=True,
                          capture_output=True, timeout=60, check=False)
    start = os.path.relpath(tmp_path / "venv" / "bin" / "python", SCRIPTS.parent)
    end = "" if made else " after `python3 scripts/setup.py demo`, which makes that environment"
    assert done.returncode == 1 and done.stdout == ""
    without = "no torch" if "sys.path.insert" in path.read_text() else "no torch and no ncclep_py"
    assert done.stderr == f"{sys.executable} has {without}: use `{start} scripts/{path.name} --backend sim`{end}\n"


@by_name
def test_lesson_in_the_simulator(path: pathlib.Path, play: Any) -> None:
    assert len(play(path, "sim").splitlines()) >= 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@by_name
def test_lesson_on_a_gpu(path: pathlib.Path, play: Any) -> None:
    try:
        assert len(play(path, "nccl").splitlines()) >= 3
    except SystemExit as refused:
        if "which reach each other only over GIN" not in str(refused) and "made one team of both ranks" not in str(refused):
            raise
        pytest.skip(str(refused))


GIN = {"ranks": 2, "teams": 2, "team_size": 1, "team_rank": 0, "team_stride": 1, "device_api": True, "gin": "NONE", "railed_gin": "NONE"}
NO_CARD = {"cards": [], "peermem": False, "gdrcopy": False, "environment": {}}


@pytest.mark.parametrize(("railed", "team_size", "says"), [
    ("NONE", 1, "rank 0: 2 ranks form 2 teams of 1, which reach each other only over GIN, and NCCL 2.32.3 offers none: there is no network card"),
    ("PROXY", 2, "NCCL made one team of both ranks: it read NCCL_LSA_TEAM_SIZE before; run the lesson in a process of its own"), ("PROXY", 1, None)])
def test_lesson_11_says_what_is_missing(railed: str, team_size: int, says: str | None, play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a NCCL made up: what it offers is told by its facts, and the ranks are the simulator's."""
    from ncclep_py.local_world import LocalWorld, _SimRank
    from ncclep_py.network import team_size_of
    from ncclep_py.simulator import Simulator

    def fake(self: LocalWorld, devices: Any, fused: bool) -> None:
        assert os.environ["NCCL_LSA_TEAM_SIZE"] == "1"
        team_size_of(0, GIN | {"railed_gin": railed}, NO_CARD, 23203)
        self.simulator = Simulator(self.num_ranks)
        self.simulator.team_size = team_size % self.num_ranks
        self.communicators = [_SimRank(self, rank, team_size) for rank in range(self.num_ranks)]

    monkeypatch.setattr(LocalWorld, "_open_nccl", fake)
    monkeypatch.delenv("NCCL_LSA_TEAM_SIZE", raising=False)
    if says is None:
        assert "between two teams, nccl: every row came back doubled" in play(LESSONS[10], "nccl")
    else:
        with pytest.raises(SystemExit) as refused:
            play(LESSONS[10], "nccl")
        assert f"dispatch and combine between two teams cannot run on this machine: {says}" in str(refused.value)
    assert "NCCL_LSA_TEAM_SIZE" not in os.environ


@pytest.mark.parametrize(("gone", "error", "says"), [
    ("ht_net_put_tag", EpTimeoutError, r"rank 1, operation 1, ROWS phase: rank 0 did not come in time \(saw its epoch 0, waited for 1\)"),
    ("ht_net_signal", DeadlockError, "rank 0 ended its kernel without adding to signal 0 of context 0"),
    ("ht_net_put(", AssertionError, None)])
def test_lesson_11_fails_without_each_of_its_parts(gone: str, error: type[Exception], says: str | None, play: Any, tmp_path: pathlib.Path) -> None:
    text, found = re.subn(rf"(?m)^( +)ops\.{re.escape(gone)}.*", r"\1pass", LESSONS[10].read_text())
    assert found == 1
    (tmp_path / "lesson.py").write_text(text)
    with pytest.raises(error, match=says):
        play(tmp_path / "lesson.py", "sim")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_lesson_11_without_a_gpu(play: Any) -> None:
    with pytest.raises(SystemExit, match="cannot run on this machine: backend 'nccl' needs a CUDA GPU and there is none"):
        play(LESSONS[10], "nccl")


# ---- kernels of one's own --------------------------------------------------------------------------------------------------
OWN = """
def make_own(shape, ops):
    read_epoch = ops.read_epoch

    def own(word):
        read_epoch(word + {offset})

    return own
"""


def test_a_kernel_of_ones_own_is_compiled_anew_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the disk cache, for factories that stand in no file, as in a notebook."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
    keys = []
    for offset in (0, 8, 8):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(OWN.format(offset=offset), "<cell>", "exec"), names)
        monkeypatch.setitem(launch.KERNELS, "own", (names["make_own"], ("word",)))
        keys.append(compiled.fingerprint(launch.KernelSpec("own", SHAPE), "sm_90"))
    assert keys[0] != keys[1] == keys[2]
    assert "factory" not in compiled.fingerprint(launch.KernelSpec("ll_combine", SHAPE), "sm_90")


@pytest.mark.parametrize(("lesson", "factory", "name"), [("lesson_01_peer_store_and_signal", "make_message", "message"),
                                                        ("lesson_07_write_your_own_kernel", "make_right", "ranks_meet")])
def test_kernels_of_lessons_compile(lesson: str, factory: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")
    monkeypatch.setenv("NCCLEP_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module(lesson)
    monkeypatch.setitem(launch.KERNELS, name, (getattr(module, factory), module.PARAMETERS))
    made = launch.compile_kernel(launch.KernelSpec(name, SHAPE), "sm_90")
    assert made.cubin[:4] == b"\x7fELF" and name in made.symbol
