"""The network's CUDA side as compiled: what ``gin_ops.cu`` asks of NCCL, and fences, puts, signals and waits in what operations are made of.

NCCL's own functions are not looked into: that a strong signal comes after earlier puts, and that reading a signal acquires, is NCCL's word.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")

import test_ptx

from ncclep_py import cubin, device_library, toolchain
from ncclep_py.kernel_cache import KernelCache
from ncclep_py.kernels.ops import Op


def has_library() -> bool:
    try:
        return bool(device_library.library_path())
    except (RuntimeError, ImportError):
        return False


def sources(*names: str) -> str:
    return "".join((toolchain.KERNEL_FOLDER / name).read_text() for name in names)


pytestmark = pytest.mark.skipif(not has_library(), reason="NCCL here has no libnccl_device.ltoir of 2.32 or newer")

# ---- gin_room.cu, gin_ops.cu -----------------------------------------------------------------------------------------------------
SYSTEM, ACQUIRE, RELAXED, STRONG, ADD, INDEXED, NO_SIGNAL, ONE_LOOK, COUNTED = "0", "2", "0", "1", "1", "2", "0", "0", "1"
SETUP = {"ncclGin_C_init", "ncclCoopAnyInitThread", "ncclTeamWorld"}
Calls = tuple[tuple[str, dict[int, str]], ...]


def counted(function: str, constants: dict[int, str]) -> Calls:
    """A request: room first, and counted when it was issued."""
    return ("gin_claim", {}), (function, constants), ("gin_issued", {})


ASKED: dict[str, tuple[Calls, set[str]]] = {
    # function: (what it calls, and with which constants, by number of the argument; its own ordered accesses)
    "gin_claim": ((("ncclGinFlushAsync", {5: "0", 6: "0", 7: "0"}), ("ncclGinWaitTimeout", {3: "0", 4: "0", 5: RELAXED, 6: ONE_LOOK})),
                  {"ld.relaxed.gpu.global.u64", "ld.acquire.gpu.global.u64", "atom.relaxed.gpu.global.add.u64", "red.relaxed.gpu.global.max.u64",
                   "red.relaxed.gpu.global.add.u64", "st.relaxed.gpu.global.u64"}),
    "gin_issued": ((), {"red.release.gpu.global.add.u64"}),
    "gin_put": (counted("ncclGinPut_v3", {8: NO_SIGNAL, 15: "0", 20: SYSTEM, 21: SYSTEM, 22: "0", 23: "0"}), set()),
    "gin_put_value": (counted("ncclGinPutValue_v3", {6: "8", 7: NO_SIGNAL, 16: SYSTEM, 17: SYSTEM, 18: "0"}), set()),
    "gin_signal": (counted("ncclGinSignal_v3", {3: INDEXED, 7: STRONG, 8: ADD, 13: SYSTEM, 14: SYSTEM, 15: "0"}), set()),
    "gin_put_signal": (counted("ncclGinPut_v3", {8: INDEXED, 12: STRONG, 13: ADD, 15: "0", 20: SYSTEM, 21: SYSTEM, 22: "0", 23: "0"}), set()),
    "gin_put_counted": (counted("ncclGinPut_v3", {8: NO_SIGNAL, 15: COUNTED, 20: SYSTEM, 21: SYSTEM, 22: "0", 23: "0"}), set()),
    "gin_counter_value": ((("ncclGinReadCounter", {2: "56", 3: ACQUIRE}),), set()),
    "gin_signal_value": ((("ncclGinReadSignal", {2: "64", 3: ACQUIRE}),), set()),
    "gin_flushed": ((("ncclGinFlushTimeout", {2: ACQUIRE, 5: ONE_LOOK}),), set()),
}
ORDERED = r"\b(?:(?:fence|membar|bar|red|atom)\.[\w.]+|st\.(?:global|volatile|relaxed|release)[\w.]*|ld\.(?:volatile|relaxed|acquire)[\w.]*)"


def gin_functions(source: str) -> dict[str, str]:
    """Bodies of the functions of ``gin_ops.cu``."""
    ptx = toolchain.compile_device("sm_90", "ptx", source=source).decode().rstrip("\0")
    return {m[1]: m[2] for m in re.finditer(r"\.func\s+(?:\([^)]*\)\s*)?(gin_\w+)\(.*?\n\)?\s*\{(.*?)\n\}", ptx, re.DOTALL)}


def gin_complaints(name: str, body: str) -> list[str]:
    """What is wrong with one of them."""
    asked, ordered = ASKED[name]
    wrong, others = [], []
    for text in re.split(r"callseq \d+, 0", body)[1:]:
        called = re.search(r"call\.uni\s+(?:\([^)]*\),\s*)?(\w+),", text)[1]
        if mangled := re.match(r"_Z(\d+)", called):
            called = called[mangled.end():][:int(mangled[1])]
        if called in SETUP:
            continue
        others.append(called)
        given = {int(n): value for n, value in re.findall(r"st\.param\.\w+\s+\[param(\d+)\+0\],\s*(\S+?);", text)}
        constants = dict(asked).get(called, {})
        wrong += [f"argument {n} of {called} is {given.get(n)}, not {value}" for n, value in constants.items() if given.get(n) != value]
    wrong += [f"calls {others}, not {asked}"] if others != [function for function, _ in asked] else []
    accesses = set(re.findall(ORDERED, body))
    return wrong + [f"accesses {accesses}, not {ordered}"] * (accesses != ordered)


GIN_MUTANTS = {"a weak signal": ("gin_signal", "ncclGinSignal_t(signal), true", "ncclGinSignal_t(signal), false"),
               "a signal that is set": ("gin_signal", "ncclGinSignalAdd, amount", "ncclGinSignalInc, amount"),
               "a relaxed look": ("gin_signal_value", "64, cuda::memory_order_acquire", "64, cuda::memory_order_relaxed"),
               "a short signal": ("gin_signal_value", "64, cuda", "32, cuda"),
               "a put with a weak signal": ("gin_put_signal", "ncclGinSignal_t(signal), true", "ncclGinSignal_t(signal), false"),
               "a put with a signal without room": ("gin_put_signal", "  if (!gin_claim(comm, context, peer)) return;\n", ""),
               "a put with a signal that it lacks": ("gin_put_signal", "TYPE_INDEXED, nullptr, 0, ncclGin", "TYPE_NONE, nullptr, 0, ncclGin"),
               "a put that counts nothing": ("gin_put_counted", "0, true, ncclGinCounter_t(counter)", "0, false, ncclGinCounter_t(counter)"),
               "a counted put that is not accounted for": ("gin_put_counted", "  gin_issued(comm, context, peer);\n", ""),
               "a relaxed look at a counter": ("gin_counter_value", "56, cuda::memory_order_acquire", "56, cuda::memory_order_relaxed"),
               "more bits than a counter has": ("gin_counter_value", "56, cuda", "64, cuda"),
               "a flush that waits": ("gin_flushed", "nullptr, 0) ==", "nullptr, 1000000) =="),
               "a word of four bytes": ("gin_put_value", "value, 8,", "value, 4,"),
               "a put without room": ("gin_put", "  if (!gin_claim(comm, context, peer)) return;\n", ""),
               "a put that is not counted": ("gin_put", "  gin_issued(comm, context, peer);\n", ""),
               "a ticket that waits": ("gin_claim", "cuda::memory_order_relaxed, 0) ==", "cuda::memory_order_relaxed, 1000000) =="),
               "counted before it is issued, perhaps": ("gin_issued", "red.release.gpu.global.add", "red.relaxed.gpu.global.add"),
               "a ticket from before the count, perhaps": ("gin_claim",
                                                           "{ u64 v; asm volatile(\"ld.acquire.gpu", "{ u64 v; asm volatile(\"ld.relaxed.gpu")}


def test_gin_ops_ask_nccl_for_what_they_say():
    bodies = gin_functions(sources(*device_library.NETWORK_SOURCES))
    assert {name: gin_complaints(name, bodies[name]) for name in bodies} == dict.fromkeys(ASKED, [])


@pytest.mark.parametrize("whats", [("a weak signal", "a relaxed look", "a flush that waits", "a word of four bytes", "a put without room",
                                    "a put with a weak signal", "a put that counts nothing", "a relaxed look at a counter"),
                                   ("a signal that is set", "a short signal", "a put that is not counted", "a ticket that waits",
                                    "a put with a signal without room", "a counted put that is not accounted for", "more bits than a counter has"),
                                   ("counted before it is issued, perhaps", "a ticket from before the count, perhaps",
                                    "a put with a signal that it lacks")], ids=len)
def test_gin_mutants_are_found(whats):
    source = sources(*device_library.NETWORK_SOURCES)
    for what in whats:
        name, old, new = GIN_MUTANTS[what]
        begin = source.index(f"NET int {name}(" if f"NET int {name}(" in source else f" {name}(")
        begin = 0 if old not in source[begin:] else begin   # what gin_room.cu does for it
        assert old in source[begin:]
        source = source[:begin] + source[begin:].replace(old, new, 1)
    wrong = {name for name, body in gin_functions(source).items() if gin_complaints(name, body)}
    assert wrong == {GIN_MUTANTS[what][0] for what in whats}


# ---- net_calls.cu ----------------------------------------------------------------------------------------------------------------
PROBES = {op.name: op for op in (
    Op("probe_put", "warp", ("comm", "window", "peer", "context", "num_bytes"), ("fence.acq_rel.sys", "st.relaxed.sys net"), ""),
    Op("probe_word", "warp", ("comm", "window", "peer", "context"), ("st.relaxed.sys net",), ""),
    Op("probe_signal", "warp", ("comm", "peer", "context"), ("fence.acq_rel.sys", "st.relaxed.sys net"), ""),
    Op("probe_wait", "block", ("comm", "context", "num_ranks", "timeout"), ("ld.acquire.sys net", "bar.sync"), ""),
    Op("probe_flush", "warp", ("comm", "context", "timeout"), ("ld.acquire.sys net",), ""))}
PROBE_SOURCE = sources("lane_ops.cu", "fabric_ops.cu", "net_calls.cu") + """
OP ep_probe_put(i64 comm, i64 window, i64 peer, i64 context, i64 num_bytes) {
  net_release();
  net_put(comm, window, peer, context, 0, 64, num_bytes);
  net_put(comm, window, peer, context, 4096, 64, num_bytes);
  return 0;
}
OP ep_probe_word(i64 comm, i64 window, i64 peer, i64 context) { net_put_value(comm, window, peer, context, 8, tagged(context, 7)); return 0; }
OP ep_probe_signal(i64 comm, i64 peer, i64 context) {
  net_release();
  net_signal(comm, peer, context, 3, 1);
  return 0;
}
OP ep_probe_wait(i64 comm, i64 context, i64 num_ranks, i64 timeout) {
  int code = 0;
  if (warp() == 0) {
    Missing m = wait_signals(comm, int(num_ranks), timeout, [&](int i) { return Awaited{context, i, 5}; });
    code = m.index >= 0 ? TIMEOUT : 0;
  }
  return tell_block(code);
}
OP ep_probe_flush(i64 comm, i64 context, i64 timeout) { return wait_flushed(comm, context, timeout); }
"""


@pytest.fixture
def probes(monkeypatch):
    """Complaints about the probes as compiled, by name, after a change of the text."""
    monkeypatch.setattr(test_ptx, "NET_OPS", PROBES)

    def complaints(old: str = "", new: str = "") -> dict[str, list[str]]:
        assert old in PROBE_SOURCE
        ptx = toolchain.compile_device("sm_90", "ptx", source=PROBE_SOURCE.replace(old, new), teams=True).decode().rstrip("\0")
        compiled = test_ptx.functions(ptx)
        found = {name: test_ptx.complaints(op, *compiled[name]) for name, op in PROBES.items()}
        return {name: wrong for name, wrong in found.items() if wrong}

    return complaints


@pytest.mark.parametrize("old, new, found", [
    ("", "", set()),
    ("{ __syncwarp(); fence_system(); }", "{ __syncwarp(); }", {"probe_put", "probe_signal"}),
    ("  net_release();\n  net_signal(comm, peer, context, 3, 1);", "  net_signal(comm, peer, context, 3, 1);\n  net_release();", {"probe_signal"}),
    ("TIMEOUT : 0;\n  }\n  return tell_block(code);", "TIMEOUT : 0;\n  }\n  return code;", {"probe_wait"})])
def test_fences_and_barriers_are_in_their_places(probes, old, new, found):
    assert probes(old, new).keys() == found


def test_no_wait_without_a_deadline(probes):
    """Every loop that asks NCCL reads the clock."""
    ptx = toolchain.compile_device("sm_90", "ptx", source=PROBE_SOURCE, teams=True).decode().rstrip("\0")
    compiled = test_ptx.functions(ptx)
    for name in ("probe_wait", "probe_flush"):
        code, follow = compiled[name]
        clocks = {i for i, c in enumerate(code) if "%globaltimer" in c.operands}
        asks = {i for i, c in enumerate(code) if c.effect == "ld.acquire.sys net"}
        assert clocks and asks
        for i in asks:   # an ask that comes again comes by a comparison with the deadline, or (several signals, one look) by a counter
            again = test_ptx.reach(set(follow[i]), follow, clocks)
            assert name == "probe_wait" or i not in again


# ---- one team --------------------------------------------------------------------------------------------------------------------
def test_kernels_of_one_team_know_nothing_of_teams():
    whole = toolchain.device_source()
    assert "gin.h" not in whole and whole.count("EP_TEAMS") == 1
    plain = sources("lane_ops.cu", "fabric_ops.cu")
    without = re.sub(r"#ifdef EP_TEAMS.*?#else\n(.*?)#endif\n", r"\1", plain, flags=re.DOTALL)
    assert "EP_TEAMS" in plain and "EP_TEAMS" not in without
    code = [toolchain.compile_device("sm_90", "ptx", source=s) for s in (plain, without)]
    assert code[0] == code[1]


def test_ranks_of_my_team_are_numbered_as_in_the_group():
    def loads(teams: bool) -> int:
        source = sources("lane_ops.cu", "fabric_ops.cu") + "OP ep_at(i64 window, i64 peer) { return peer_at(window, 64, peer); }"
        ptx = toolchain.compile_device("sm_90", "ptx", source=source, teams=teams).decode()
        return len(re.findall(r"\bld\.(?!param)", re.search(r"ep_at\([^{]*\{(.*?)\n\}", ptx, re.DOTALL)[1]))

    assert (loads(False), loads(True)) == (2, 4)   # of the window: base and stride; and my rank in the team and in the group


# ---- linked ----------------------------------------------------------------------------------------------------------------------
KERNEL = """
extern "C" __global__ void all_of_it(i64 comm, i64 window, i64 peer, i64 context, i64 num_bytes, i64 timeout, i64* out) {
  ep_probe_put(comm, window, peer, context, num_bytes);
  ep_probe_word(comm, window, peer, context);
  ep_probe_signal(comm, peer, context);
  *out = ep_probe_wait(comm, context, 8, timeout) + 2 * ep_probe_flush(comm, context, timeout);
}
"""


def test_links_with_nccls_library():
    """For a newer GPU than the library's; kernels for sm_90 are linked in ``test_ht_net_compile``."""
    arch = "sm_100"
    source = PROBE_SOURCE + KERNEL
    parts = [toolchain.compile_device(arch, source=source, teams=True), *device_library.network_parts(arch, False, KernelCache())]
    made = toolchain.link(parts, arch)
    assert cubin.entry_symbols(made) == ["all_of_it"]
    found = cubin.resources(made)
    assert found["registers"] <= toolchain.MAX_REGISTERS and found["stack"] <= 256   # NCCL's descriptors are on the stack


def test_an_older_gpu_is_refused():
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0 or newer.*this one is sm_80"):
        device_library.network_parts("sm_80", False, KernelCache())
