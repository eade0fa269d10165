"""scripts/setup.py: what it would install where. Nothing is installed here."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "setup.py"


@pytest.fixture
def setup() -> Any:
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cuda", [13, 14])
def test_with_a_gpu_one_call_brings_everything_for_cuda_13(setup: Any, cuda: int) -> None:
    assert setup.plan("demo", cuda) == setup.plan("doctor", cuda) == [["-e", f"{ROOT}[cu13]"]]
    assert setup.plan("test", cuda) == [["-e", f"{ROOT}[cu13,test]"]]


@pytest.mark.parametrize("cuda", [0, 11, 12])
def test_without_one_torch_is_the_small_build_and_comes_first(setup: Any, cuda: int) -> None:
    for action in ("demo", "doctor", "test"):
        torch, mine = setup.plan(action, cuda)
        assert torch[0].startswith("torch==") and "https://download.pytorch.org/whl/cpu" in torch
        assert mine == ["-e", f"{ROOT}[cu12,test]" if action == "test" else str(ROOT)]


def test_every_extra_it_asks_for_exists(setup: Any) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for action in ("demo", "doctor", "test"):
        for cuda in (0, 12, 13):
            target = setup.plan(action, cuda)[-1][-1]
            for extra in filter(None, target.removeprefix(str(ROOT)).strip("[]").split(",")):
                assert f"\n{extra} = [" in text


def test_the_drivers_cuda_is_a_number(setup: Any) -> None:
    assert isinstance(setup.driver_cuda(), int) and setup.driver_cuda() >= 0


def test_no_driver_at_all(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(setup.ctypes, "CDLL", missing)
    assert setup.driver_cuda() == 0


@pytest.mark.parametrize(("failing", "devices", "want"), [(None, 1, 13), (None, 0, 0), ("cuInit", 1, 0), ("cuDeviceGetCount", 1, 0)])
def test_drivers(setup: Any, monkeypatch: pytest.MonkeyPatch, failing: str | None, devices: int, want: int) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:
            return int(failing == "cuInit")

        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = 13020
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = devices
            return int(failing == "cuDeviceGetCount")

    monkeypatch.setattr(setup.ctypes, "CDLL", lambda name: Driver())
    assert setup.driver_cuda() == want


def test_prepare_installs_once_per_plan(setup: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    home, calls = tmp_path / "venv", []
    monkeypatch.setattr(setup, "HOME", home)
    monkeypatch.setattr(setup, "driver_cuda", lambda: 0)

    def create(where: pathlib.Path, with_pip: bool) -> None:
        assert with_pip
        (where / "bin").mkdir(parents=True)
        (where / "bin" / "python").touch()
        (where / "lib" / "python3" / "site-packages" / "pip").mkdir(parents=True)
        (where / "lib" / "python3" / "site-packages" / "pip" / "__main__.py").touch()

    monkeypatch.setattr(setup.venv, "create", create)
    monkeypatch.setattr(setup.subprocess, "run", lambda command, check: calls.append(list(map(str, command))))
    assert setup.prepare("demo") == home / "bin" / "python"
    assert [c[1:4] for c in calls] == [["-m", "pip", "install"]] * 2 and calls[1][-2:] == ["-e", str(ROOT)]
    setup.prepare("demo")
    assert len(calls) == 2
    setup.prepare("test")
    setup.prepare("demo")
    setup.prepare("test")
    assert len(calls) == 4


def test_a_failed_installation_is_not_taken_for_done(setup: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(setup, "HOME", tmp_path)
    monkeypatch.setattr(setup, "driver_cuda", lambda: 0)
    monkeypatch.setattr(setup.venv, "create", lambda where, with_pip: None)

    def fail(command: Any, check: bool) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(setup.subprocess, "run", fail)
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            setup.prepare("demo")
    assert not (tmp_path / "ncclep-ready.txt").exists()


@pytest.mark.parametrize("arguments", [[], ["install"], ["--helpp"]])
def test_anything_else_says_how_to_use_it(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "python3 scripts/setup.py demo" in done.stderr and "python3 scripts/setup.py test" in done.stderr


@pytest.mark.parametrize("version", [(3, 9, 1), (3, 14, 0)])
def test_other_pythons_are_refused_before_anything_is_made(setup: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, version: tuple) -> None:
    monkeypatch.setattr(setup.sys, "argv", ["setup.py", "demo"])
    monkeypatch.setattr(setup.sys, "version_info", version)
    monkeypatch.setattr(setup, "prepare", lambda action: pytest.fail("must not come to this"))
    assert setup.main() == 2
    assert "needs Python 3.10 to 3.13" in capsys.readouterr().err


def test_the_command_and_its_exit_code_pass_through(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(command: list[str], cwd: pathlib.Path, check: bool) -> Any:
        ran.append((command, cwd))
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(setup, "prepare", lambda action: pathlib.Path("/x/python"))
    monkeypatch.setattr(setup.subprocess, "run", run)
    for words, want in ((["demo", "--ranks", "8"], ["-m", "ncclep_py", "demo", "--ranks", "8"]), (["doctor"], ["-m", "ncclep_py", "doctor"]),
                        (["test", "-m", "gpu"], ["-m", "pytest", "-q", "-m", "gpu"])):
        monkeypatch.setattr(setup.sys, "argv", ["setup.py", *words])
        assert setup.main() == 7
        assert ran[-1] == (["/x/python", *want], ROOT)


def test_help_is_no_error() -> None:
    for word in ("-h", "--help"):
        done = subprocess.run([sys.executable, SCRIPT, word], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "setup.py demo" in done.stdout and done.stderr == ""


def test_an_interrupted_environment_is_completed(setup: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Its python is there, pip is not: venv makes the environment before it installs pip."""
    calls: list[list[str]] = []
    setup.venv.create(tmp_path / "env", with_pip=False)
    (tmp_path / "env" / "mine").write_text("kept")
    real = subprocess.run
    monkeypatch.setattr(setup, "HOME", tmp_path / "env")
    monkeypatch.setattr(setup.subprocess, "run", lambda words, **how: real(words, **how) if "install" not in words else calls.append(words))
    assert not setup.is_whole(tmp_path / "env")
    setup.prepare("demo")
    assert setup.is_whole(tmp_path / "env") and (tmp_path / "env" / "mine").exists() and len(calls) == len(setup.plan("demo", setup.driver_cuda()))
