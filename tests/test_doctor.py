"""The doctor's checks against made-up machines, its report, and the command line on this machine."""

import copy
import io
import json
import os
import subprocess
import sys

import pytest

from ncclep_py import doctor
from ncclep_py.doctor import diagnose, examine, finding_lines, gpu_lines, release, wheel_major
from ncclep_py.facts import attempt, code_text, device_count, first_in_process, gpu_facts, local_ranks, mapped, nccl_headers, peer_access
from ncclep_py.nccl_version import age_problem, header_problem

HEALTHY = {
    "versions": {name: {"version": version, "path": f"/site/{name}", "note": ""} for name, version in {
        "ncclep_py": "0.1.0", "python": "3.12.1", "numpy": "2.4.6", "torch": "2.14.1", "greenlet": "3.5.6", "numba": "0.68.1",
        "numba-cuda": "0.30.4", "llvmlite": "0.50.0", "cuda-core": "1.2.2", "cuda-bindings": "13.5.0", "cuda-pathfinder": "1.9.1",
        "nccl4py": "0.6.0", "nvrtc": "13.0", "nvJitLink": "13.5", "nvvm": "2.0", "driver (libcuda)": "13.0",
        "NCCL (libnccl)": "2.30.7", "NCCL (nccl.h)": "2.30.7"}.items()},
    "wheels": {"nvidia-nccl-cu13": "2.30.7", "nvidia-cuda-nvrtc": "13.0.88", "nvidia-nvjitlink": "13.5.37", "nvidia-cudnn-cu13": "9.24.0.43"},
    "toolkit": {"nvrtc": (13, 0), "nvjitlink": (13, 5), "nvvm": (2, 0)},
    "nccl": {"loaded": 23007, "path": "/site/nvidia/nccl/lib/libnccl.so.2", "cuda": (13, 2), "device_api": True, "headers": 23007,
             "headers_path": "/site/nvidia/nccl/include/nccl.h",
             "libraries": ["/site/nvidia/nccl/lib/libnccl.so.2"], "in_process": [], "problem": ""},
    "row_stack": True,
    "torch": {"cuda": "13.0", "pins_nccl": "2.30.7", "problem": ""},
    "driver": {"cuda": (13, 0), "path": "/usr/lib/libcuda.so.1", "problem": ""},
    "gpus": [{"index": i, "name": "NVIDIA H200", "uuid": f"GPU-{i}", "sms": 132, "capability": (9, 0), "mig": False} for i in range(2)],
    "p2p": [[True, True], [True, True]],
    "ranks": None,
    "environment": {},
}


def machine(**changes):
    """The healthy machine with changed facts; "a__b" names an entry within one."""
    facts = copy.deepcopy(HEALTHY)
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        if inner:
            facts[outer][inner] = value
        else:
            facts[outer] = value
    return facts


def without(facts, *rows):
    for name in rows:
        facts["versions"][name] = {"version": None, "path": None, "note": "missing"}
    return facts


def row(version):
    return {"version": version, "path": "/site/x", "note": ""}


def bare():
    """A machine with the base packages only."""
    facts = without(machine(gpus=[], p2p=[], wheels={}, torch__cuda=None, torch__pins_nccl=None), *doctor.GPU_ROWS)
    facts["toolkit"] = dict.fromkeys(("nvrtc", "nvjitlink", "nvvm"))
    facts["driver"] = {"cuda": None, "path": None, "problem": "missing"}
    facts["nccl"] |= {"loaded": None, "path": None, "cuda": None, "device_api": False, "headers": None, "headers_path": None, "libraries": []}
    return facts


def bad(facts):
    return [(finding.level, finding.name) for finding in diagnose(facts) if finding.level not in ("ok", "none")]


def finding(facts, name):
    return next(found for found in diagnose(facts) if found.name == name and found.level != "ok")


def test_what_is_missing_is_never_called_ok():
    """Every check of a machine with the base packages only says what is not there and who would need it, and so does the self-test."""
    found = {f.name: f for f in diagnose(bare())}
    assert found.pop("base packages").level == "ok"
    for name, f in found.items():
        assert f.level == "none" and f.problem, name
        assert any(words in f.problem for words in ("not installed: ", "there is no GPU", "simulator only")), f.problem
    assert "NCCL; needed to run on a GPU" in found["NCCL version"].problem and "libcuda" in found["driver"].problem
    report = examine(bare())
    assert report["findings"][-1]["level"] == "none" and "simulator only" in report["findings"][-1]["problem"]
    assert report["ok"] and report["backends"] == ["sim"]


@pytest.mark.parametrize(("facts", "name", "words"), [
    (machine(torch__cuda=None), "torch's CUDA", "built for the CPU only"),
    (without(machine(), "torch"), "torch's CUDA", "not installed: torch"),
    (machine(nccl__loaded=None, nccl__problem="libcudart.so.13: cannot open"), "NCCL version", "cannot be loaded: libcudart.so.13"),
    (machine(nccl__headers=None), "NCCL headers", "not installed: nccl.h; needed to compile kernels"),
    (machine(nccl__cuda=None), "NCCL device library", "does not say which CUDA built it"),
    (machine(nccl__loaded=22809, nccl__headers=22809), "NCCL Device API", "NCCL is too old"),
    (machine(toolkit__nvjitlink=None), "nvJitLink", "not installed: nvJitLink; needed to compile kernels"),
    (without(machine(), "numba-cuda"), "numpy", "not installed: numba-cuda"),
    (machine(driver__path=None), "driver", "not installed: libcuda"),
    (machine(gpus=[], p2p=[]), "ranks per GPU", "there is no GPU"),
    (machine(wheels={}), "CUDA majors", "not installed: wheels of CUDA libraries"),
])
def test_one_thing_missing(facts, name, words):
    found = finding(facts, name)
    assert found.level == "none" and words in found.problem


def test_the_last_line_says_where_it_will_run():
    passed = {"compiled": True, "seconds": 1.0, "ran_on_gpu": None, "message": "compiled"}
    for ran, words in ((None, "All right, in the simulator; nothing was run on a GPU.\n"), (True, "All right, on GPUs and in the simulator.\n")):
        out = io.StringIO()
        doctor.write_report(examine(machine(), lambda *_, ran=ran: passed | {"ran_on_gpu": ran}), out)
        assert out.getvalue().endswith(words)


def test_healthy_machine_has_no_findings():
    assert bad(machine()) == []


def test_simulator_only_is_no_error():
    assert bad(bare()) == []
    stack = next(found for found in diagnose(bare()) if found.name == "GPU packages")
    assert "simulator only" in stack.problem


CASES = [
    (machine(wheels={"nvidia-nccl-cu12": "2.32.3", "nvidia-nccl-cu13": "2.32.3"}), [("error", "CUDA majors")], "overwr"),
    (machine(wheels={"nvidia-cuda-nvrtc-cu12": "12.9.86", "nvidia-cuda-nvrtc": "13.0.88"}), [("warn", "CUDA majors")], "nvidia-cuda-nvrtc"),
    (machine(wheels={"nvidia-cudnn-cu12": "9.2", "nvidia-cudnn-cu13": "9.2"}), [("warn", "CUDA majors")], "nvidia-cudnn"),
    (machine(torch__cuda="12.8"), [("warn", "torch's CUDA")], "12.8"),
    (machine(nccl__loaded=22809, nccl__headers=22809, torch__pins_nccl="2.28.9"), [("error", "NCCL version")], "pins NCCL 2.28.9"),
    (machine(nccl__loaded=22907, nccl__headers=22907, torch__pins_nccl="2.29.7"), [("error", "NCCL version")], "2.29.7"),
    (machine(nccl__loaded=22907, nccl__headers=22907, torch__pins_nccl=None), [("error", "NCCL version")], "/site/nvidia/nccl/lib/libnccl.so.2"),
    (machine(nccl__loaded=23007, nccl__headers=23203), [("error", "NCCL headers")], "2.32.3"),
    (machine(nccl__libraries=["/a/libnccl.so.2", "/b/libnccl.so.2"]), [("warn", "NCCL copies")], "/b/libnccl.so.2"),
    (machine(nccl__in_process=["/a/libnccl.so.2", "/b/libnccl.so.2"]), [("warn", "NCCL copies")], "in one process"),
    (machine(nccl__device_api=False), [("error", "NCCL Device API")], "ncclDevCommCreate"),
    (machine(toolkit__nvrtc=(13, 4), toolkit__nvjitlink=(13, 2)), [("error", "nvJitLink")], "13.4"),
    (machine(toolkit__nvrtc=(13, 0), toolkit__nvjitlink=(12, 9)), [("error", "nvJitLink"), ("warn", "NCCL device library")], "12.9"),
    (machine(toolkit__nvrtc=(12, 9), torch__cuda="12.8", nccl__cuda=None), [("error", "nvJitLink")], "nvJitLink 13.5"),
    (machine(toolkit__nvjitlink=(13, 0)), [("warn", "NCCL device library")], "libnccl_device.ltoir"),
    (machine(row_stack=False, versions=HEALTHY["versions"] | {"numpy": row("2.5.1")}), [("error", "numpy")], "2.5.1"),
    (without(machine(), "nccl4py"), [("error", "GPU packages")], "nccl4py"),
    (without(machine(), "nvJitLink", "nvvm"), [("error", "GPU packages")], "nvJitLink, nvvm"),
    (without(machine(), "torch", "greenlet"), [("error", "base packages")], "torch, greenlet"),
    (machine(torch__problem="import failed: libcudnn"), [("error", "base packages")], "libcudnn"),
    (bare() | {"gpus": HEALTHY["gpus"], "ranks": 2}, [("warn", "GPU packages")], "2 GPUs"),
    (machine(driver__problem="cuInit failed with error 999"), [("warn", "driver")], "999"),
    (machine(driver__cuda=(12, 8)), [("error", "driver")], "12.8"),
    (machine(p2p=[[True, False], [True, True]]), [("warn", "GPUs")], "0->1"),
    (machine(gpus=[HEALTHY["gpus"][0] | {"capability": (7, 5)}], ranks=1), [("error", "GPUs")], "7.5"),
    (machine(ranks=4), [("error", "ranks per GPU")], "4 ranks on 2 GPUs"),
]


@pytest.mark.parametrize(("facts", "expected", "word"), CASES, ids=[f"{i}-{case[1][0][1]}" for i, case in enumerate(CASES)])
def test_bad_combination_is_found_once_and_explained(facts, expected, word):
    assert bad(facts) == expected
    found = finding(facts, expected[0][1])
    assert word in found.problem
    assert found.cure


def test_ranks_on_one_gpu_are_fine_once_nccl_is_told():
    assert bad(machine(ranks=4, environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})) == []
    assert bad(machine(ranks=2)) == []


def test_newer_numba_cuda_may_use_newer_numpy():
    versions = HEALTHY["versions"] | {"numpy": row("2.5.1"), "numba-cuda": row("0.31.0")}
    assert bad(machine(versions=versions, row_stack=False)) == []


def test_driver_may_be_newer_than_the_compiler():
    facts = machine(toolkit__nvrtc=(12, 9), toolkit__nvjitlink=(12, 9), torch__cuda=None, nccl__cuda=(12, 9), wheels={"nvidia-nccl-cu12": "2.30.7"})
    assert bad(facts) == []


@pytest.mark.parametrize(("name", "version", "expected"), [
    ("nvidia-nccl-cu12", "2.32.3", ("nvidia-nccl", 12)),
    ("nvidia-cuda-nvrtc-cu12", "12.9.86", ("nvidia-cuda-nvrtc", 12)),
    ("nvidia-cuda-nvrtc", "13.0.88", ("nvidia-cuda-nvrtc", 13)),
    ("nvidia-nvjitlink", "13.5.37", ("nvidia-nvjitlink", 13)),
    ("nvidia-ml-py", "13.580.65", None),
    ("numpy", "2.4.6", None),
])
def test_wheel_major(name, version, expected):
    assert wheel_major(name, version) == expected


def test_nccl_problems_name_versions_and_paths():
    assert age_problem(23203) is None and header_problem(23203, 23203) is None
    assert age_problem(22809, "/x/libnccl.so.2") == "NCCL 2.28.9 is loaded from /x/libnccl.so.2; ncclep_py needs 2.30.0 or newer"
    problem = header_problem(23007, 23203, "/x/libnccl.so.2", "/y/nccl.h")
    assert "NCCL 2.30.7 is loaded from /x/libnccl.so.2, but the headers from /y/nccl.h are those of NCCL 2.32.3" in problem


def test_versions_as_text():
    assert [code_text(code) for code in (23203, 22809, 2708, None)] == ["2.32.3", "2.28.9", "2.7.8", None]
    assert release("2.5.0rc1") == (2, 5, 0)
    assert release("2.13.0+cpu") == (2, 13, 0)


def test_report_is_not_ok_after_an_error_or_a_failed_self_test():
    passed = {"compiled": True, "seconds": 1.0, "ran_on_gpu": None, "message": "compiled"}
    assert examine(machine(), lambda *_: passed)["ok"]
    assert examine(machine(p2p=[[True, False], [False, True]]), lambda *_: passed)["ok"]
    assert not examine(machine(nccl__headers=23203), lambda *_: passed)["ok"]
    assert not examine(machine(), lambda *_: passed | {"compiled": False})["ok"]
    assert not examine(machine(), lambda *_: passed | {"ran_on_gpu": False})["ok"]


def test_self_test_is_not_tried_without_the_stack_or_after_an_error():
    assert "simulator only" in doctor.self_test(bare(), [])["message"]
    facts = machine(nccl__headers=23203)
    outcome = doctor.self_test(facts, diagnose(facts))
    assert outcome["compiled"] is None and "errors above" in outcome["message"]


def test_self_test_that_raises_is_reported(monkeypatch):
    def explode():
        raise OSError("no space left on device")

    launch = type(sys)("ncclep_py.launch")
    launch.self_test = explode
    monkeypatch.setitem(sys.modules, "ncclep_py.launch", launch)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: launch)
    outcome = doctor.self_test(machine(), [])
    assert outcome["compiled"] is False and outcome["message"] == "OSError: no space left on device"


def test_report_for_people_is_aligned():
    lines = gpu_lines(HEALTHY["gpus"], [[True, False], [True, True]])
    assert lines[0].endswith("reaches -") and lines[1].endswith("reaches 0")
    lines = finding_lines([{"level": "error", "name": "numpy", "problem": "first\nsecond", "cure": "do"}])
    assert [line.strip() for line in lines] == ["error  numpy                first", "second", "-> do"]
    assert lines[0].index("first") == lines[1].index("second") == lines[2].index("->")


def test_headers_of_nccl_home_come_first(tmp_path, monkeypatch):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_VERSION_CODE 23102\n")
    monkeypatch.setenv("NCCL_HOME", str(tmp_path))
    assert nccl_headers() == (23102, str(tmp_path / "include" / "nccl.h"))


def test_ranks_come_from_the_launcher(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_ranks() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4(x2)")
    assert local_ranks() is None


def test_loaded_libraries_are_found():
    assert len(mapped("libc")) == 1
    assert os.path.realpath(first_in_process("libc.so.6", "abort")) == os.path.realpath(mapped("libc")[0])
    assert mapped("libnosuchthing") == []
    assert first_in_process("libnosuchthing.so.1", "abort") is None
    assert first_in_process("libc.so.6", "no_such_function") is None


class Driver:
    """libcuda's calls for two GPUs, the second one a MIG instance that reaches nobody."""

    names = (b"NVIDIA H200", b"NVIDIA H200 MIG 1g.18gb")

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index + 40
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = self.names[device.value - 40]
        return 0

    def cuDeviceGetUuid_v2(self, identity, device):
        identity[:] = range(16)
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = {16: 132, 75: 9, 76: 0}[attribute]
        return 0

    def cuDeviceCanAccessPeer(self, answer, i, j):
        answer._obj.value = int((i, j) == (0, 1))
        return 0


def test_gpus_are_read_through_the_driver():
    whole, mig = (gpu_facts(Driver(), index) for index in range(device_count(Driver())))
    assert whole == {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "sms": 132, "capability": (9, 0),
                     "mig": False}
    assert mig["mig"] and mig["uuid"].startswith("MIG-")
    assert peer_access(Driver(), 2) == [[True, True], [False, True]]


def test_a_driver_without_a_call_costs_only_that_part():
    def old():
        raise AttributeError("cuDeviceGetUuid_v2")

    assert attempt(old) == []


def command(*arguments, isolated=False):
    """Run the command line; isolated: without site-packages, as on a machine with nothing installed."""
    flags = ["-S"] if isolated else []
    return subprocess.run([sys.executable, *flags, "-m", "ncclep_py", *arguments], capture_output=True, text=True, timeout=300, check=False,
                          cwd=doctor.__file__.rsplit("/", 2)[0])


@pytest.mark.slow
def test_json_is_one_object_and_exit_code_follows_ok():
    done = command("doctor", "--json")
    report = json.loads(done.stdout)
    assert set(report) >= {"versions", "gpus", "p2p", "findings", "self_test", "ok"}
    assert done.returncode == (0 if report["ok"] else 1)
    assert report["versions"]["python"]["path"] == sys.executable


def test_a_bare_interpreter_gets_a_report_and_exit_code_1():
    done = command("doctor", "--json", isolated=True)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and not done.stderr
    assert [found["name"] for found in report["findings"] if found["level"] == "error"] == ["base packages"]
    text = command("doctor", isolated=True).stdout
    assert "missing: numpy, torch, greenlet" in text and text.endswith("There are errors.\n")


def test_usage():
    assert command(isolated=True).returncode == 2
    assert command("nonsense", isolated=True).returncode == 2
    done = command("--help", isolated=True)
    assert done.returncode == 0 and "doctor" in done.stdout and "demo" in done.stdout
    assert "--ranks" in command("doctor", "--help", isolated=True).stdout
