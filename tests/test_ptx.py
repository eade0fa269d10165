"""The effects `kernels.ops` declares, found in the PTX that NVRTC makes of the CUDA side; and mutants of it that must not pass.

The check reads each operation's control flow, not its text: NVRTC moves blocks about. It knows which parameter an address comes from, so it can
tell whose memory an access touches. For every operation:

* all accesses to global memory, fences and barriers are declared, with exactly their order, scope and noun (failure path: see `FAILURE`);
* on *every* path from entry to end, what lies between two fences or barriers stays between them, and no fence or barrier is left out
  (a stretch between two barriers may be skipped as a whole: one warp does it for the block);
* *some* path has all declared effects in declared order;
* shared memory that the whole block uses is separated by barriers.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")

from ncclep_py import toolchain
from ncclep_py.kernels.ops import NET_OPS, OPS, Op

POINTERS = ("word", "header", "counter", "fail", "record", "topk_idx", "tokens", "weights", "out", "table", "expert_counters",
            "heads", "arrived", "counts", "slot", "topk_weights", "slot_ids", "slot_weights", "src_rank_counters", "slot_scales", "kept", "copied",
            "origins", "rows", "staging", "target")
POINTERS += ("partials", "hits", "kept_rows", "routes", "place_table", "zones", "expert_offsets", "unpadded", "total", "recv_idx", "recv_weights",
             "grads", "source", "target", "counters", "row_scales")
POINTERS += ("joins", "details", "votes", "members", "masked_at", "outcome", "waited", "wrote", "notice")
NOUN = {"word": "epoch", "counter": "blocks_done", "counts": "count", "heads": "head", "joins": "join", "details": "detail",
        "votes": "vote"}   # parameter -> noun, where they differ
NETWORK = {"gin_put": "st.relaxed.sys net", "gin_put_value": "st.relaxed.sys net", "gin_signal": "st.relaxed.sys net",
           "gin_put_signal": "st.relaxed.sys net", "gin_put_counted": "st.relaxed.sys net", "gin_counter_value": "ld.acquire.sys net",
           "gin_signal_value": "ld.acquire.sys net", "gin_flushed": "ld.acquire.sys net"}   # effects of what operations may call (test_net_ptx)
VOTES = {"ld.relaxed.sys vote", "atom.acq_rel.sys vote", "fence.sc.sys"}   # an attempt that ends early, and the vote of a rank (test_votes_are_total)
ASIDE = {"waited": {"ld.weak waited", "st.weak waited"}, "wrote": {"st.weak wrote"},
         "notice": {"ld.volatile notice", "st.volatile notice", "membar.sys", "fence.sc.sys"}}
FAILURE = {"ld.relaxed.gpu fail", "atom.relaxed.gpu fail", "ld.volatile record", "st.volatile record", "membar.sys", "fence.sc.sys"}


# ---- PTX ------------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Instruction:
    """One instruction; `effect` is its effect in the words of `kernels.ops`, None if it has none outside registers."""

    op: str
    operands: str
    guarded: bool
    effect: str | None = None
    offset: int = 0


def functions(ptx: str) -> dict[str, tuple[list[Instruction], dict[int, list[int]]]]:
    """Instructions of every operation, and which instruction may follow which."""
    found = re.finditer(r"\.func\s+\([^)]*\)\s*ep_(\w+)\((.*?)\n\)?\s*\{(.*?)\n\}", ptx, re.DOTALL)
    return {m[1]: parse(m[1], m[3]) for m in found}


def parse(name: str, body: str) -> tuple[list[Instruction], dict[int, list[int]]]:
    """Instructions and control flow of one function body."""
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"(\$L\w+):", r"\1:;", body)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        text = " ".join(statement.replace("\t", " ").split()).lstrip("{} ").strip()
        if re.fullmatch(r"\$L\w+:", text):
            labels[text[:-1]] = len(code)
        elif text and not text.startswith("."):
            guard, op, operands = re.fullmatch(r"(@!?%\w+ )?([\w.:]+) ?(.*)", text).groups()
            code.append(Instruction(op, operands, guard is not None))
    follow: dict[int, list[int]] = {}
    for i, instruction in enumerate(code):
        root = instruction.op.split(".")[0]
        assert root != "brx" and (root != "call" or called(instruction) in NETWORK), \
            f"ep_{name} has a {instruction.op} {instruction.operands}: an operation must be self-contained"
        after = [labels[instruction.operands]] if root == "bra" else []
        if root not in ("bra", "ret", "exit", "trap") or instruction.guarded:
            after.append(i + 1)
        follow[i] = after
    annotate(name, code)
    return code, follow


def called(i: Instruction) -> str:
    """Name of the function an instruction calls."""
    return re.search(r"\b(gin_\w+|\w+(?=,|$))", i.operands)[1]


def annotate(name: str, code: list[Instruction]) -> None:
    """Give every instruction its effect; follows parameters through registers to the addresses made of them."""
    comes_from: dict[str, set[str]] = {}
    parameters = (OPS | NET_OPS)[name].parameters

    def sources(text: str) -> set[str]:
        return set().union(*(comes_from.get(r, set()) for r in re.findall(r"%\w+|\b[lh]\b", text) if not r.startswith("%p")))

    changed = True
    while changed:
        changed = False
        for i in code:
            kind = i.op.split(".")[0]
            if kind in ("st", "cp", "red", "bar", "fence", "membar", "bra", "ret"):
                continue
            to, _, rest = i.operands.partition("}," if i.operands.startswith("{") else ",")
            if i.op.startswith("ld.param") and "_param_" in rest:
                made = {parameters[int(re.search(r"_param_(\d+)", rest)[1])].replace("rows_window", "window")}
            elif kind in ("ld", "atom"):
                made = {"window"} & sources(rest) if not sources(rest) & set(POINTERS) else set()
            else:
                made = sources(rest)
            for register in re.findall(r"%\w+|\b[lh]\b", to):
                known = comes_from.setdefault(register, set())
                changed |= not made <= known
                known |= made
    for i in code:
        i.effect = effect(i, sources)


def effect(i: Instruction, sources) -> str | None:
    """The effect of one instruction."""
    words = i.op.split(".")
    kind = words[0]
    if kind == "call":
        return NETWORK[called(i)]
    if kind in ("bar", "barrier"):
        return "bar.warp" if "warp" in words else "bar.sync"
    if kind in ("fence", "membar"):
        return i.op
    if i.op == "cp.async.wait_all":
        return i.op
    if kind not in ("ld", "st", "cp", "atom", "red") or "param" in words:
        return None
    if kind == "cp":
        return f"cp.async {'+'.join(sorted(sources(i.operands.split('[')[2]) & set(POINTERS)))}"
    if "shared" in words:
        return f"{kind}.shared"
    address = re.search(r"\[([^]]*)\]", i.operands)[1]
    i.offset = int((re.search(r"\+(-?\d+)", address) or [0, 0])[1])
    where = sources(address)
    whose = sorted(where & set(POINTERS)) or sorted(where & {"window"})
    noun = "+".join(NOUN.get(w, w) for w in whose) or f"unknown memory [{address}]"
    strengths = [w for w in ("relaxed", "acquire", "release", "acq_rel", "volatile", "nc") if w in words]
    scopes = [w for w in ("cta", "cluster", "gpu", "sys") if w in words]
    return ".".join([kind, *(strengths or ["weak"]), *scopes]) + f" {noun}"


# ---- the check --------------------------------------------------------------------------------------------------------------
def is_order(effect: str) -> bool:
    """Fences and barriers, and atomics that are both."""
    return effect.startswith(("bar.sync", "fence", "atom.acq_rel"))


def complaints(op: Op, code: list[Instruction], follow: dict[int, list[int]]) -> list[str]:
    """What is wrong with one compiled operation."""
    ignored = {"bar.warp", "ld.shared", "st.shared", "atom.shared", "cp.async.wait_all"}
    ignored |= {"ld.weak window"} if "window" in op.parameters else set()
    allowed = set(op.effects) | ignored | ({"bar.sync"} if op.scope == "block" else set())
    if "fail" in op.parameters and "record" in op.parameters:
        allowed |= FAILURE
    aside = set(FAILURE).union(*(ASIDE[name] for name in op.parameters if name in ASIDE), VOTES if "votes" in op.parameters else ())
    allowed |= aside - FAILURE
    wrong = [f"undeclared {e}" for e in sorted({i.effect for i in code if i.effect} - allowed)]
    if wrong:
        return wrong
    trace = [None if i.effect in ignored or (i.effect in aside and i.effect not in op.effects) else i.effect for i in code]
    if not some_path(op.effects, trace, follow):
        wrong.append("no path has all effects in declared order")
    wrong += every_path(op, trace, follow) + shared_memory(op, code, follow) + copied(code, follow) + record(code, follow)
    return wrong


def some_path(effects: tuple[str, ...], trace: list[str | None], follow: dict[int, list[int]]) -> bool:
    """Whether the effects occur in order on some path."""
    start = {0}
    for wanted in effects:
        hits = {i for i in reach(start, follow) if i < len(trace) and trace[i] == wanted}
        if not hits:
            return False
        start = {n for i in hits for n in follow[i]}
    return True


def reach(start: set[int], follow: dict[int, list[int]], without: set[int] = frozenset()) -> set[int]:
    """Instructions reachable from `start` (included) without stepping on some."""
    seen, work = set(), list(start)
    while work:
        i = work.pop()
        if i not in seen and i not in without:
            seen.add(i)
            work.extend(follow.get(i, []))
    return seen


def every_path(op: Op, trace: list[str | None], follow: dict[int, list[int]]) -> list[str]:
    """Run all paths through the automaton of declared effects; report the first instructions it cannot take.

    A state is (index of the next effect that must come, whether the stretch between two barriers has begun). Accesses may come any number of
    times, fences exactly in their place. A stretch that has not begun may be skipped as a whole: one warp does it for the block.
    """
    effects, end = op.effects, len(op.effects)

    def gap(at: int) -> int:
        """The next fence or barrier at or after `at`, else the end."""
        return next((i for i in range(at, end) if is_order(effects[i])), end)

    def barrier(at: int) -> int:
        """The next barrier at or after `at`, else the end."""
        return next((i for i in range(at, end) if effects[i] == "bar.sync"), end)

    def step(states: frozenset[tuple[int, bool]], found: str) -> frozenset[tuple[int, bool]]:
        after: set[tuple[int, bool]] = set()
        for at, begun in states:
            if found in effects[at:gap(at)]:
                after.add((at, True))
            order = gap(at)
            if order < end and effects[order] == found:
                after.add((order + 1, found != "bar.sync"))
            if found == "bar.sync" and op.scope == "block" and not begun:
                after.add((at, False))   # one more barrier than declared does no harm
                after |= {(barrier(at) + 1, False)} if barrier(at) < end else set()
        return frozenset(after)

    wrong: set[str] = set()
    seen: set[tuple[int, frozenset[tuple[int, bool]]]] = set()
    work = [(0, frozenset({(0, False)}))]
    while work:
        i, states = work.pop()
        if (i, states) in seen:
            continue
        seen.add((i, states))
        now = step(states, trace[i]) if trace[i] is not None else states
        if not now:
            wrong.add(f"a path comes to {trace[i]} too early or too late, or without the fence or barrier before it")
            continue
        if not follow[i] and not any(gap(at) == end or (not begun and barrier(at) == end) for at, begun in now):
            wrong.add("a path ends without a declared fence or barrier")
        work.extend((n, now) for n in follow[i])
    return sorted(wrong)


def shared_memory(op: Op, code: list[Instruction], follow: dict[int, list[int]]) -> list[str]:
    """The block's shared memory: cleared, barrier, added to, barrier, read."""
    if op.scope != "block":
        return []
    at = {kind: {i for i, c in enumerate(code) if c.effect == kind} for kind in ("st.shared", "atom.shared", "ld.shared", "bar.sync")}
    ends = {i for i in follow if not follow[i]}
    wrong = []
    for first, then, hits in (("st.shared", "atom.shared", at["atom.shared"]), ("atom.shared", "ld.shared", at["ld.shared"]),
                              ("st.shared", "the end", ends), ("atom.shared", "the end", ends)):
        if reach({n for i in at[first] for n in follow[i]}, follow, at["bar.sync"]) & hits:
            wrong.append(f"no barrier between {first} and {then}")
    return wrong


def copied(code: list[Instruction], follow: dict[int, list[int]]) -> list[str]:
    """Rows in shared memory (16-byte loads) were copied there asynchronously: wait first."""
    loads, waits = ({i for i, c in enumerate(code) if c.op == op} for op in ("ld.shared.v4.u32", "cp.async.wait_all"))
    return ["a copied row is read before it is there"] if loads & reach({0}, follow, waits) else []


def record(code: list[Instruction], follow: dict[int, list[int]]) -> list[str]:
    """The error record: all words, a system fence, then `code`."""
    stores = {i for i, c in enumerate(code) if c.effect == "st.volatile record"}
    if not stores:
        return []
    last = {i for i in stores if code[i].offset == 0}
    fences = {i for i, c in enumerate(code) if c.effect in ("membar.sys", "fence.acq_rel.sys", "fence.sc.sys")}
    if {code[i].offset for i in stores} != set(range(0, 64, 8)):
        return ["the error record is not written as a whole"]
    looks = {i for i, c in enumerate(code) if c.effect == "ld.volatile record" and c.offset == 0}   # whether the record is free
    before = {n for i in looks | stores - last for n in follow[i]}
    return ["no fence between the error record and its code"] if reach(before, follow, fences) & last else []


def check(ptx: str) -> dict[str, list[str]]:
    """Complaints by operation."""
    compiled = functions(ptx)
    found = {name: complaints(op, *compiled[name]) if name in compiled else ["missing"] for name, op in OPS.items()}
    return {name: wrong for name, wrong in found.items() if wrong}


# ---- tests ------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def ptx() -> str:
    return toolchain.compile_device("sm_90", "ptx").decode().rstrip("\0")


@pytest.mark.parametrize("name", OPS)
def test_compiled_effects_are_the_declared_ones(ptx, name):
    compiled = functions(ptx)
    assert compiled.keys() == OPS.keys()
    assert complaints(OPS[name], *compiled[name]) == []


LOADS, STORES = ("ld.relaxed.sys.global.u64", "st.relaxed.sys.global.u64")
ACQUIRES = "ld.acquire.sys.global.u64"
PUBLISHES = {"publish_head", "publish_abort", "publish_counts", "publish_arrived", "publish_arrived_rows"}
HT_WAITS, HT_PUBLISHES = {"ht_wait_hits", "ht_store_zones"}, {"ht_publish_hits", "ht_publish_kept"}
WAITS, PUBLISHES = {"wait_counts", "take_arrived_rows"} | HT_WAITS, PUBLISHES | HT_PUBLISHES
FENCES = {"publish_head", "publish_arrived", "publish_arrived_rows"}
WAITS |= {"take_member_rows", "wait_joins", "wait_member_counts", "sum_member_counts", "settle", "conclude", "read_verdict", "catch_up", "readmit"}
PUBLISHES |= {"publish_join", "publish_late", "tell_rows"}
FENCES |= {"publish_join", "wait_joins", "settle"}
VOTERS = {"wait_joins", "wait_member_counts", "sum_member_counts", "settle", "conclude"}
MAY_FAIL = {op.name for op in OPS.values() if "record" in op.parameters}
FENCE = "  fence_system();   // by every publishing lane\n"

MUTANTS: dict[str, tuple[str | None, str, str, set[str]]] = {
    # what is wrong: (operation to change, or None for a helper; old text; new text; the operations that must complain)
    "publish_head: no fence": ("publish_head", FENCE, "", {"publish_head"}),
    "publish_head: a word before the fence": ("publish_head", FENCE, "  if (to) store_relaxed_sys(to, low);\n" + FENCE, {"publish_head"}),
    "publish_head: one lane fences": ("publish_head", "  fence_system();", "  if (lane() == 0) fence_system();", {"publish_head"}),
    "wait_heads: no barrier": ("wait_heads", "tell_block(code)", "code", {"wait_heads"}),
    "publish_arrived: no fence": ("publish_arrived", FENCE, "", {"publish_arrived"}),
    "publish_arrived: one lane fences": ("publish_arrived", "  fence_system();", "  if (lane() == 0) fence_system();", {"publish_arrived"}),
    "wait_arrived: no barrier": ("wait_arrived", "tell_block(code)", "code", {"wait_arrived"}),
    "wait_counts: no barrier": ("wait_counts", "__syncthreads_or(code)", "code", {"wait_counts"}),
    "last_block: no barrier before": ("last_block", "__syncthreads();", "", {"last_block"}),
    "last_block: no barrier after": ("last_block", "__syncthreads_or(threadIdx.x == 0 && before == gridDim.x - 1)",
                                     "before == gridDim.x - 1", {"last_block"}),
    "count_experts: no barrier after clearing": ("count_experts", "= 0;\n  __syncthreads();", "= 0;", {"count_experts"}),
    "count_experts: no barrier after adding": ("count_experts", "  __syncthreads();\n  return", "  return", {"count_experts"}),
    "assign_rows: no barrier": ("assign_rows", "__syncthreads();", "", {"assign_rows"}),
    "publish_arrived_rows: no fence": ("publish_arrived_rows", FENCE, "", {"publish_arrived_rows"}),
    "publish_arrived_rows: one lane fences": ("publish_arrived_rows", "  fence_system();", "  if (lane() == 0) fence_system();",
                                              {"publish_arrived_rows"}),
    "take_arrived_rows: no barrier": ("take_arrived_rows", "__syncthreads();", "", {"take_arrived_rows"}),
    "count_ranks: no barrier after clearing": ("count_ranks", "= 0;\n  __syncthreads();", "= 0;", {"count_ranks"}),
    "count_ranks: no barrier after adding": ("count_ranks", "  __syncthreads();\n  return", "  return", {"count_ranks"}),
    "assign_ranks: no barrier at its end": ("assign_ranks", "  __syncthreads();\n  return", "  return", {"assign_ranks"}),
    "send_routing: volatile ids": (None, "*(int*)peer_at(window, slot_ids", "*(volatile int*)peer_at(window, slot_ids", {"send_routing"}),
    "send_routing: weights beside the ids": (None, "slot_weights + place", "slot_ids + place", {"send_routing"}),
    "sum_row: row table through the read-only cache": ("sum_row", "((const int*)table)[token * num_topk + lane()]",
                                                       "__ldg((const int*)table + token * num_topk + lane())", {"sum_row"}),
    "quantise_row: tokens past the read-only cache": (None, "held[j][half] = load_nc(", "held[j][half] = load_row(", {"quantise_row"}),
    "quantise_row: copies not waited for": ("quantise_row", "  wait_copies();", "  ", {"quantise_row"}),
    "pack_rows: counters through the read-only cache": ("pack_rows", "((const int*)counters)[plane]", "__ldg((const int*)counters + plane)",
                                                        {"pack_rows"}),
    "sum_packed_row: volatile rows": (None, "*(const uint2*)(from", "*(const volatile unsigned*)(from) ? uint2() : *(const uint2*)(from",
                                      {"sum_packed_row", "sum_packed_member_row"}),
    "quantise_row: scales beside the rows": ("quantise_row", "row_at(window, slot_scales, max", "row_at(window, slot, max", {"quantise_row"}),
    "publish_abort: plain store to HEAD": ("publish_abort", "store_relaxed_sys(peer_at(window, at + 8, peer), word)",
                                           "*(u64*)peer_at(window, at + 8, peer) = word", {"publish_abort"}),
    "advance_epoch: volatile": ("advance_epoch", "*(u64*)word", "*(volatile u64*)word", {"advance_epoch"}),
    "gather_row: row table through the read-only cache": (None, "return {((const int*)table)[at], load_weight",
                                                          "return {__ldg((const int*)table + at), load_weight", {"gather_row", "fetch_routing"}),
    "scatter_row: copies not waited for": ("scatter_row", "  wait_copies();", "  ", {"scatter_row"}),
    "acquire loads are relaxed": (None, ACQUIRES, LOADS, {"wait_heads", "wait_arrived"}),
    "acquire loads are gpu scope": (None, ACQUIRES, ACQUIRES.replace("sys", "gpu"), {"wait_heads", "wait_arrived"}),
    "relaxed.sys loads are plain": (None, LOADS, "ld.global.u64", WAITS),
    "relaxed.sys loads are gpu scope": (None, LOADS, LOADS.replace("sys", "gpu"), WAITS),
    "relaxed.sys stores are plain": (None, STORES, "st.global.u64", PUBLISHES),
    "relaxed.sys stores are gpu scope": (None, STORES, STORES.replace("sys", "gpu"), PUBLISHES),
    "fence has gpu scope": (None, "fence.acq_rel.sys", "fence.acq_rel.gpu", FENCES),
    "fence is empty": (None, 'asm volatile("fence.acq_rel.sys;" ::: "memory")', 'asm volatile("" ::: "memory")', FENCES),
    "count_in is relaxed": (None, "atom.acq_rel.gpu.global.inc", "atom.relaxed.gpu.global.inc", {"last_block"}),
    "count_in has block scope": (None, "atom.acq_rel.gpu.global.inc", "atom.acq_rel.cta.global.inc", {"last_block"}),
    "FAIL is read plainly": (None, "ld.relaxed.gpu.global.u64", "ld.global.u64",
                             MAY_FAIL | {"op_code", "publish_abort", "outcome", "await_outcome"}),
    "FAIL is claimed within a block": (None, "atom.relaxed.gpu.global.cas", "atom.relaxed.cta.global.cas", MAY_FAIL),
    "rows of the window through the read-only cache": (None, "ld.global.L1::no_allocate.v4.u32", "ld.global.nc.L1::no_allocate.v4.u32",
                                                       {"gather_row", "sum_row", "copy_row", "push_row", "reduce_row", "ht_gather_row",
                                                        "ht_copy_rows", "gather_member_row", "sum_member_row", "pack_rows"}),
    "publish_join: no fence": ("publish_join", FENCE, "", {"publish_join"}),
    "publish_join: one lane fences": ("publish_join", "  fence_system();", "  if (lane() == 0) fence_system();", {"publish_join"}),
    "wait_joins: no fence": ("wait_joins", "    fence_system();", "", {"wait_joins"}),
    "wait_joins: fence only if all went well": ("wait_joins", "    fence_system();", "    if (!stop) fence_system();", {"wait_joins"}),
    "wait_joins: no barrier": ("wait_joins", "tell_block(code)", "code", {"wait_joins"}),
    "settle: no fence": ("settle", "    fence_system();", "", {"settle"}),
    "settle: no barrier": ("settle", "tell_block(code)", "code", {"settle"}),
    "sum_member_counts: no barrier after adding": ("sum_member_counts", "gone = __syncthreads_or(gone);", "", {"sum_member_counts"}),
    "drop_rows: no barrier": ("drop_rows", "__syncthreads();", "", {"drop_rows"}),
    "gather_member_row: row table through the read-only cache": ("gather_member_row", "((const int*)table)[at]", "__ldg((const int*)table + at)",
                                                                {"gather_member_row"}),
    "take_member_rows: no barrier": ("take_member_rows", "__syncthreads();", "", {"take_member_rows"}),
    "members' rows: row table through the read-only cache": (None, "((const int*)table)[at] : -1;\n  return row >= 0",
                                                             "__ldg((const int*)table + at) : -1;\n  return row >= 0",
                                                             {"sum_member_row", "sum_packed_member_row"}),
    "tell_outcome: no fence": ("tell_outcome", "  fence_device();", "", {"tell_outcome"}),
    "await_outcome: no fence": ("await_outcome", "    fence_device();", "", {"await_outcome"}),
    "await_outcome: no barrier": ("await_outcome", "tell_block(code)", "code", {"await_outcome"}),
    "the outcome is told plainly": (None, "st.relaxed.gpu.global.u64", "st.global.u64", {"tell_outcome"}),
    "votes are relaxed": (None, "atom.acq_rel.sys.global.cas", "atom.relaxed.sys.global.cas", VOTERS | {"is_stranded", "readmit"}),
    "votes have gpu scope": (None, "atom.acq_rel.sys.global.cas", "atom.acq_rel.gpu.global.cas", VOTERS | {"is_stranded", "readmit"}),
    "the fence of the outcome has block scope": (None, "fence.acq_rel.gpu", "fence.acq_rel.cta", {"tell_outcome", "await_outcome"}),
    "the fence of the votes is weaker": (None, "fence.sc.sys", "fence.acq_rel.sys", VOTERS),
    "count_rows: no barrier after": ("count_rows", "); });\n  __syncthreads();", "); });", {"count_rows"}),
    "reduce_row: row table through the read-only cache": ("reduce_row", "((const int*)table)[at]", "__ldg((const int*)table + at)", {"reduce_row"}),
    "push_row: origins through the read-only cache": (None, "*(const u32*)peer_at(window, origins + 4 * place, rank)",
                                                      "__ldg((const u32*)peer_at(window, origins + 4 * place, rank))", {"push_row"}),
    "outcome: FAIL is read plainly": ("outcome", "load_relaxed_gpu(fail)", "*(const u64*)fail", {"outcome"}),
    "store_origins: volatile": ("store_origins", "*(int*)to", "*(volatile int*)to", {"store_origins"}),
    "record: no fence before its code": (None, "  __threadfence_system();\n", "", MAY_FAIL),
    "record: code first": (None, "  #pragma unroll\n  for (int i = 0; i < 7; ++i) r[1 + i]",
                           "  r[0] = code;\n  #pragma unroll\n  for (int i = 0; i < 7; ++i) r[1 + i]", MAY_FAIL),
}


def mutated(source: str, name: str | None, old: str, new: str) -> str:
    """The source with one text replaced, in one operation or anywhere; there must be exactly one."""
    at = source.index(f"OP ep_{name}(") if name else 0
    end = source.index("\n}\n", at) + 3 if name else len(source)
    assert source[at:end].count(old) == 1, f"{old!r} should be in {name or 'the sources'} once; change the mutant with the source"
    return source[:at] + source[at:end].replace(old, new) + source[end:]


def only(source: str, name: str) -> str:
    """The source without all operations but one, and what they call; compiles several times as fast."""
    kept, inside = [], False
    for line in source.splitlines(True):
        inside = inside or line.startswith("OP ep_") and not line.startswith(f"OP ep_{name}(")
        if not inside:
            kept.append(line)
        elif line == "}\n" or (line.startswith("OP") and line.endswith("}\n")):
            inside = False
    return "".join(kept)


@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_are_found(what):
    name, old, new, guilty = MUTANTS[what]
    source = mutated(toolchain.device_source(), name, old, new)
    broken = toolchain.compile_device("sm_90", "ptx", source=only(source, name) if name else source).decode().rstrip("\0")
    if name:
        assert guilty == {name} and functions(broken).keys() == {name}   # no other text changed
        assert complaints(OPS[name], *functions(broken)[name]) != []
    else:
        assert check(broken).keys() == guilty


def word_from_the_lane_that_read_it(code: list[Instruction]) -> bool:
    """Whether after a ballot of who has read the outcome its word comes from a lane found at run time, not from a constant one."""
    ballot = next((n for n, i in enumerate(code) if i.op.startswith("vote.sync.ballot")), len(code))
    lane = next((i.operands.split(",")[2].strip() for i in code[ballot:] if i.op.startswith("shfl.sync.idx")), "0")
    written = [i for i in code[ballot:] if i.operands.startswith(lane + ",")]
    return any(not i.op.startswith("mov") or "%" in i.operands.split(",")[1] for i in written)


def test_the_outcome_is_that_of_a_lane_that_has_read_it(ptx):
    """Lanes may read at different moments: lane 0 may hold the word of before."""
    assert word_from_the_lane_that_read_it(functions(ptx)["await_outcome"][0])
    source = toolchain.device_source()
    for old, new in (("__ffs(told) - 1", "0"), ("u32 told = __ballot_sync(", "u32 told = __any_sync(")):
        broken = only(mutated(source, "await_outcome", old, new), "await_outcome")
        made = functions(toolchain.compile_device("sm_90", "ptx", source=broken).decode().rstrip("\0"))
        assert not word_from_the_lane_that_read_it(made["await_outcome"][0]), new
