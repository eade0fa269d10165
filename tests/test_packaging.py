"""What importing costs, what a wheel holds, and what pyproject.toml promises."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
HEAVY = ("torch", "numba", "numba_cuda", "cuda", "nccl", "numpy", "greenlet")


def run(code, *flags):
    return subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout


def brought_by(statement):
    """Top packages that `statement` imports; some are there before, from .pth files of site-packages."""
    tops = "{name.split('.')[0] for name in sys.modules}"
    return set(run(f"import sys; before = {tops}; {statement}; print(*{tops} - before)").split())


def test_import_brings_none_of_the_heavy_packages():
    loaded = brought_by("import ncclep_py; dir(ncclep_py)")
    assert "ncclep_py" in loaded
    assert loaded & set(HEAVY) == set()


def test_importing_the_doctor_brings_none_of_them_either():
    assert brought_by("import ncclep_py.doctor") & set(HEAVY) == set()


def test_import_works_with_nothing_installed():
    assert run("import ncclep_py; print(ncclep_py.__version__)", "-S").strip()


def test_import_is_quick():
    def once():
        code = "import time; start = time.perf_counter(); import ncclep_py; print(time.perf_counter() - start)"
        return float(run(code))

    assert min(once() for _ in range(3)) < 0.3


def test_every_exported_name_has_a_module():
    import ncclep_py

    modules = set(ncclep_py._MODULE.values())
    assert [name for name in modules if importlib.util.find_spec(f"ncclep_py.{name}") is None] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of this checkout, as names -> archive."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "ncclep_py", source / "ncclep_py", ignore=shutil.ignore_patterns("__pycache__"))
    out = source / "out"
    code = f"import setuptools.build_meta as backend; backend.build_wheel({str(out)!r})"
    out.mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        yield archive


def test_wheel_is_pure_and_holds_every_file_of_the_package(wheel):
    assert wheel.filename.endswith("-py3-none-any.whl")
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {str(file.relative_to(ROOT)) for file in (ROOT / "ncclep_py").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert held == wanted
    assert [name for name in held if name.endswith(".cu")] and [name for name in held if "/kernels/headers/" in name]


def test_wheel_carries_licence_and_limits(wheel):
    names = wheel.namelist()
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert re.search(r"^Requires-Python: (>=3\.10,<3\.14|<3\.14,>=3\.10)$", metadata, re.MULTILINE)
    assert re.search(r"^Requires-Dist: numpy<2\.5", metadata, re.MULTILINE)


def test_numpy_2_5_is_refused_by_the_resolver_not_at_import():
    packaging = pytest.importorskip("packaging.requirements")
    numpy = next(line for line in re.findall(r'"(numpy[^"]*)"', PYPROJECT))
    assert not packaging.Requirement(numpy).specifier.contains("2.5.0")


def test_extras_keep_one_cuda_major():
    for major, other in ((12, 13), (13, 12)):
        body = re.search(rf"^cu{major} = \[(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)[1]
        assert f"cu{other}" not in body and f"numba-cuda[cu{major}]" in body and f"nvidia-nccl-cu{major}" in body
        assert '"nccl4py>' in body, "nccl4py's own extras bring the CuTe DSL"


def test_gpu_tests_are_left_out_unless_asked_for(tmp_path):
    (tmp_path / "test_two.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_gpu(): pass\ndef test_cpu(): pass\n")

    def collected(*flags):
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*command, *flags, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        return re.findall(r"::(\w+)", done.stdout)

    assert collected() == ["test_cpu"]
    assert collected("-m", "gpu") == ["test_gpu"]


def test_installed_version_is_that_of_the_source():
    try:
        installed = importlib.metadata.version("ncclep_py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed")
    import ncclep_py

    assert installed == ncclep_py.__version__


def test_headers_are_fetched_from_a_wheel_once(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("fetch_nccl_headers", ROOT / "scripts" / "fetch_nccl_headers.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    downloads = []

    def download(package, version, folder):
        downloads.append(version)
        path = folder / "x.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("nvidia/nccl/include/nccl.h", "#define NCCL_VERSION_CODE 1\n")
            archive.writestr("nvidia/nccl/include/nccl_device/core.h", "")
            archive.writestr("nvidia/nccl/lib/libnccl.so.2", "")
        return path

    monkeypatch.setattr(script, "download", download)
    for _ in range(2):
        include = script.fetch("no-such-package", "2.0.1", tmp_path)
    assert downloads == ["2.0.1"]
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()) == [
        "2.0.1/include/nccl.h", "2.0.1/include/nccl_device/core.h"]
    assert include == tmp_path / "2.0.1" / "include"
