"""The effects ``kernels.ops`` declares for operations over several teams, found in what NVRTC makes of them; and mutants that must not pass.

The check is that of ``test_ptx.py``. A call of the network counts as the effect ``headers/gin.h`` gives it.
"""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")

import test_ptx
from test_ptx import Instruction, complaints, mutated

from ncclep_py import toolchain
from ncclep_py.kernels.ops import HT_NET_OPS, NET_OPS, Op

SOURCE = "".join((toolchain.KERNEL_FOLDER / name).read_text() for name in (
    "lane_ops.cu", "fabric_ops.cu", "rank_ops.cu", "recipe_ops.cu", "staged_ops.cu", "ht_ops.cu", "mask_ops.cu", *toolchain.TEAM_SOURCES))
POINTERS = ("sent", "sent_scales", "staged", "messages", "returned", "remote", "tag", "tags", "counts_sent", "net_counts", "hits", "net_hits",
            "net_kept", "kept_sent", "remote_routes", "remote_places", "flights", "flight", "flying", "released", "views", "adds", "made", "told",
            "scales")
NOUN = {"tags": "tag", "messages": "staging", "views": "view"}
OWN_NOUN = {"ht_net_count": {"epoch": "count"}, "ht_net_advance": {"epoch": "count"}, "ht_net_stage_header": {"sent": "header_sent"},
            "ht_net_take_header": {"staged": "header_staged"}, "ht_net_forward_weights": {"staged": "header_staged"},
            "ht_net_partial_grads": {"sent": "grads_sent"}, "ht_net_reduce_grads": {"staged": "grads_staged"}} | {
            f"ll_net_{name}_row": {"sent": "sent"} for name in ("send", "stage", "quantise", "spread", "send_member", "send_made")} | {
            "ll_net_return_member_rows": {"returned": "staging"}}
EITHER = {"ht_net_reduce_grads": "ld.weak grads_staged+recv_weights"}   # of one place or of the other
PUTS_NOTHING = {"ll_net_return_rows", "ll_net_return_member_rows", "ll_net_send_member_row", "ll_net_send_made_row"}   # or fences nothing
LAST_BLOCK = {"ll_net_count_member_rows"}   # the others do nothing
STRONGER = {"ll_net_conclude_members": {"ld.acquire.sys head": "ld.relaxed.sys head", "ld.acquire.sys net": "ld.relaxed.sys net"},
            "ll_net_readmit": {"ld.acquire.sys net": "ld.relaxed.sys net"}}   # than what the protocol needs and the simulator knows
TWO_WAYS = {"ll_net_say", "ll_net_return_member_rows", "ll_net_conclude_members", "ll_net_readmit"}   # one for ranks of my team, one for others
NO_TARGET = {"ll_net_return_member_rows"}   # `spread_row` is given 0 for one of its two


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """``test_ptx`` knows these operations, and that `source` is a rank here."""
    monkeypatch.setattr(test_ptx, "POINTERS", tuple(p for p in test_ptx.POINTERS if p != "source") + POINTERS)
    monkeypatch.setattr(test_ptx, "NOUN", test_ptx.NOUN | NOUN)


def named(op: Op, code: list[Instruction]) -> Op:
    """Give the compiled accesses the declared nouns. Places that the compiled code chooses between count as one place, in both."""
    own = {"sent": "staging", "staged": "staging"} | OWN_NOUN.get(op.name, {})
    for i in code:
        access, _, noun = (i.effect or "").partition(" ")
        if noun:
            i.effect = f"{access} {'+'.join(sorted({own.get(w, w) for w in noun.split('+')}))}"
    for i in code:
        i.effect = STRONGER.get(op.name, {}).get(i.effect, i.effect)
    effects = list(op.effects)
    for merged in {i.effect for i in code if "+" in (i.effect or "")} | {EITHER.get(op.name, "")} - {""}:
        access, _, noun = merged.partition(" ")
        same = {f"{access} {n}" for n in noun.split("+")}
        if same <= set(effects):
            effects = [e for n, e in enumerate(effects) if e not in same or n == min(effects.index(s) for s in same)]
            effects = [merged if e in same else e for e in effects]
            for i in code:
                i.effect = merged if i.effect in same else i.effect
    return dataclasses.replace(op, effects=tuple(effects))


def complaints_of(op: Op, code: list[Instruction], follow: dict[int, list[int]]) -> list[str]:
    """`complaints`, but for what is known to be no fault."""
    if op.name in NO_TARGET:
        for i in code:
            i.effect = None if (i.effect or "").startswith("st.weak unknown memory") else i.effect
    wrong = complaints(op, code, follow)
    if op.name in PUTS_NOTHING | LAST_BLOCK:
        wrong = [w for w in wrong if w != "a path ends without a declared fence or barrier"]
    if op.name in TWO_WAYS and set(op.effects) <= {i.effect for i in code}:
        wrong = [w for w in wrong if w != "no path has all effects in declared order"]
    return wrong


def check(source: str) -> dict[str, list[str]]:
    """Complaints by operation."""
    compiled = test_ptx.functions(toolchain.compile_device("sm_90", "ptx", source=source, teams=True).decode().rstrip("\0"))
    found = {}
    for name, op in NET_OPS.items():
        found[name] = ["missing"] if name not in compiled else complaints_of(named(op, compiled[name][0]), *compiled[name])
    return {name: wrong for name, wrong in found.items() if wrong}


def test_compiled_effects_are_the_declared_ones():
    assert check(SOURCE) == {}


RELEASE = "  net_release();\n"
MUTANTS = {
    # operation to change: (old text, new text)
    "ht_net_put": (RELEASE, ""),
    "ht_net_signal": (RELEASE, ""),
    "ht_net_put_rows": (RELEASE, ""),
    "ht_net_wait_chunk": ("return tell_block(code)", "return code"),
    "ht_net_publish_arrived": ("  fence_system();   // by every publishing lane\n", ""),
    "ht_net_wait_arrived": ("return tell_block(code)", "return code"),
    "ht_net_sync": ("__syncthreads();", ""),
    "ht_net_enter": ("    net_release();\n", ""),
    "ht_net_wait_heads": ("return tell_block(code)", "return code"),
    "ht_net_stage_header": ("load_weight(weights + 4 * at)", "((const float*)weights)[at]"),
    "ht_net_reduce_row": ("routed_row(rows_window, slot,", "routed_row(rows_window, routes,"),
    "ll_net_enter": ("    net_release();\n", ""),
    "ll_net_wait_heads": ("return tell_block(code)", "return code"),
    "ll_net_publish_counts": ("  __syncthreads();\n", ""),
    "ll_net_put_counts": (RELEASE, ""),
    "ll_net_signal": (RELEASE, ""),
    "ll_net_wait_counts": ("code = __syncthreads_or(code)", "code = code"),
    "ll_net_place_rows": ("  __syncthreads();\n", ""),
    "ll_net_send_row": (RELEASE, ""),
    "ll_net_put_tags": ("gin_signal_value(comm, 0, 2 * peer) > u64(count)", "count >= 0"),
    "ll_net_wait_data": ("load_relaxed_sys(peer_at(window, tags", "*(const u64*)(peer_at(window, tags"),
    "ll_net_take_row": ("*(const u64*)message", "__ldg((const u64*)message)"),
    "ll_net_return_rows": (RELEASE, ""),
    "ll_net_stage_row": ("move_row(tokens +", "move_row(peer_at(window, sent, rank) +"),
    "ll_net_quantise_row": ("peer_at(window, sent_scales +", "peer_at(window, sent +"),
    "ll_net_spread_row": ("spread_row<false>", "spread_row<true>"),
    "ll_net_send_routing": ("((int*)table)", "((volatile int*)table)"),
    "ll_net_take_token": ("*(const u64*)message", "__ldg((const u64*)message)"),
    "ll_net_publish_arrived_rows": ("  fence_system();   // by every publishing lane\n", ""),
    "ll_net_put_row_tags": ("    gin_put_value(", "    if (total[peer]) gin_signal_value(comm, 0, peer);\n    gin_put_value("),
    "ll_net_take_arrived_rows": ("  __syncthreads();\n", ""),
    "ll_net_sum_row": ("mine = peer_at(window, returned +", "mine = peer_at(window, out +"),
    "ll_net_sum_packed_row": ("mine = peer_at(window, returned +", "mine = peer_at(window, out +"),
    "ll_net_gather_row": ("mine = peer_at(window, returned +", "mine = peer_at(window, out +"),
    "ll_net_drain_staged": ("return tell_block(code)", "return code"),
    "ll_net_keep_rows": ("((u32*)kept)[i] = got[i]", "__stcg((u32*)kept + i, got[i]), __threadfence_system()"),
    "ll_net_kept_rows": ("  __syncthreads();\n", ""),
    "ll_net_store_origins": ("*(int*)to =", "*(volatile int*)to ="),
    "ll_net_put_flight": ("gin_signal_value(comm, 0, first_signal + 2 * peer) < u64(least)", "least < 0"),
    "ll_net_signal_sent": (RELEASE, ""),
    "ll_net_wait_flight": ("load_acquire_sys(at), load_acquire_sys(at + 8)", "load_relaxed_sys(at), load_relaxed_sys(at + 8)"),
    "ll_net_wait_released": ("return tell_block(code)", "return code"),
    "ll_net_release": ("    net_release();\n", ""),
    "ll_net_count_team_rows": ("[i]);\n  __syncthreads();", "[i]);"),
    "ll_net_enter_members": ("    net_release();\n", ""),
    "ll_net_wait_members": ("return tell_word(seen)", "return seen"),
    "ll_net_await_view": ("    fence_device();\n", ""),
    "ll_net_signal_members": (RELEASE, ""),
    "ll_net_wait_member_data": ("return tell_word(seen)", "return seen"),
    "ll_net_hear": ("return tell_word(result)", "return result"),
    "ll_net_return_member_rows": (RELEASE, ""),
    "ll_net_signal_clean": (RELEASE, ""),
    "ll_net_push_row": ("push_row(window, origins, rows,", "push_row(window, rows, rows,"),
}


def test_mutants_are_found():
    source = SOURCE
    mutants = {name: texts for name, texts in MUTANTS.items() if name in NET_OPS}
    for name, (old, new) in mutants.items():
        source = mutated(source, name, old, new)
    assert check(source).keys() == mutants.keys()


FENCE = "  fence_system();   // by every publishing lane\n"
WAITED = "    Missing m = wait_signal(comm, context, signal, u64(least), u64(timeout));\n"
TAG_READ = "u64 word = load_relaxed_sys(peer_at(window, tag, rank));"
PUT = "  net_put(comm, window, peer, context, target_at, source_at, num_bytes);\n"
SIGNAL = "  net_signal(comm, peer, context, signal, amount);\n"
BLOCK, VOTE = ("return tell_block(code)", "return code"), ("__syncthreads_or(code)", "code")
HT_MUTANTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    # what is wrong: (operation to change, old and new texts)
    "a put before its fence": ("ht_net_put", [(RELEASE + PUT, PUT + RELEASE)]),
    "rows put with a fence for some": ("ht_net_put_rows", [(RELEASE, "  if (left == 1) net_release();\n")]),
    "no TAG": ("ht_net_put_tag", [("net_put_value(comm, window, peer, context, target_at, tagged(epoch, u32(low)));", "")]),
    "a signal before its fence": ("ht_net_signal", [(RELEASE + SIGNAL, SIGNAL + RELEASE)]),
    "a TAG looked at before its signal": ("ht_net_wait_chunk", [(TAG_READ, ""), (WAITED, TAG_READ + "\n" + WAITED)]),
    "a TAG looked at plainly": ("ht_net_wait_chunk", [("load_relaxed_sys(peer_at(window, tag, rank))", "*(const u64*)peer_at(window, tag, rank)")]),
    "HEAD with a fence by one lane": ("ht_net_publish_head", [("  fence_system();", "  if (lane() == 0) fence_system();")]),
    "a word of HEAD before the fence": ("ht_net_publish_head", [(FENCE, "  if (to) store_relaxed_sys(to, low);\n" + FENCE)]),
    "HEAD to rail peers with a fence only if all went well": ("ht_net_enter", [("    net_release();\n", "    if (m.index < 0) net_release();\n")]),
    "HEAD to rail peers before the fence": ("ht_net_enter", [
        ("    net_release();\n", "    net_put_value(comm, window, 0, 0, at, 0);\n    net_release();\n")]),
    "HEAD signals without a barrier": ("ht_net_wait_entered", [BLOCK]),
    "ABORT told plainly": ("ht_net_publish_abort", [("store_relaxed_sys(peer_at(window, at + 8, first + i), word)",
                                                     "*(u64*)peer_at(window, at + 8, first + i) = word")]),
    "FAIL read plainly": ("ht_net_publish_abort", [("load_relaxed_gpu(fail)", "*(const u64*)fail")]),
    "ARRIVED with a fence by one lane": ("ht_net_publish_arrived", [("  fence_system();", "  if (lane() == 0) fence_system();")]),
    "HITS told plainly": ("ht_net_publish_hits", [
        ("store_relaxed_sys(peer_at(window, at + 8 * column, first + peer), tagged(epoch, c.total[column]))",
         "*(u64*)peer_at(window, at + 8 * column, first + peer) = tagged(epoch, c.total[column])")]),
    "HITS forwarded plainly": ("ht_net_forward_hits", [("store_relaxed_sys(peer_at(window, at + 8 * i, first + m), word)",
                                                        "*(u64*)peer_at(window, at + 8 * i, first + m) = word")]),
    "HITS put here read as constants": ("ht_net_forward_hits", [("= from[i]", "= __ldg(from + i)")]),
    "HITS without a barrier": ("ht_net_wait_hits", [VOTE]),
    "KEPT without a barrier at the end": ("ht_net_publish_kept", [("  }\n  __syncthreads();\n  return 0;", "  }\n  return 0;")]),
    "KEPT told before all are counted": ("ht_net_publish_kept", [("1);\n  }\n  __syncthreads();\n", "1);\n  }\n")]),
    "KEPT forwarded plainly": ("ht_net_forward_kept", [
        ("store_relaxed_sys(peer_at(window, kept_rows + (peer * local + i % local) * 8, owner), from[i])",
         "*(u64*)peer_at(window, kept_rows + (peer * local + i % local) * 8, owner) = from[i]")]),
    "KEPT put here read as constants": ("ht_net_forward_kept", [("from[i])", "__ldg(from + i))")]),
    "KEPT waited for without a barrier": ("ht_net_wait_kept", [VOTE]),
    "the count read as volatile": ("ht_net_count", [("*(const u64*)word", "*(const volatile u64*)word")]),
    "the count advanced as volatile": ("ht_net_advance", [("*(i64*)word", "*(volatile i64*)word")]),
    "tokens past the read-only cache": ("ht_net_stage_row", [("spread_row<true>", "spread_row<false>")]),
    "received rows through the read-only cache": ("ht_net_forward_row", [("spread_row<false>", "spread_row<true>")]),
    "received headers through the read-only cache": ("ht_net_take_header", [("route = from[lane()]", "route = __ldg(from + lane())")]),
    "weights past the read-only cache": ("ht_net_scatter_weights", [("load_weight(weights + 4 * (token * num_topk + lane()))",
                                                                     "((const float*)weights)[token * num_topk + lane()]")]),
    "received weights through the read-only cache": ("ht_net_forward_weights", [("from[lane()] : 0.f", "__ldg(from + lane()) : 0.f")]),
    "a sum of other rows": ("ht_net_partial_row", [("routed_row(rows_window, slot,", "routed_row(rows_window, sent,")]),
    "places through the read-only cache": ("ht_net_partial_grads", [("((const i64*)remote_places)[at]", "__ldg((const i64*)remote_places + at)")]),
    "received gradients as volatile": ("ht_net_reduce_grads", [
        ("*(const float*)peer_at(window, staged", "*(const volatile float*)peer_at(window, staged")]),
}


def rounds() -> list[list[str]]:
    """Mutants that change different operations are compiled together."""
    made: list[list[str]] = []
    for what, (name, _) in HT_MUTANTS.items():
        free = next((r for r in made if name not in {HT_MUTANTS[w][0] for w in r}), None)
        if free is None:
            made.append([what])
        else:
            free.append(what)
    return made


@pytest.mark.parametrize("whats", rounds(), ids=lambda whats: f"{len(whats)} mutants")
def test_high_throughput_mutants_are_found(whats: list[str]) -> None:
    source = SOURCE
    for what in whats:
        name, texts = HT_MUTANTS[what]
        for old, new in texts:
            source = mutated(source, name, old, new)
    found = check(source).keys()
    assert {what for what in whats if HT_MUTANTS[what][0] not in found} == set()
    assert found == {HT_MUTANTS[what][0] for what in whats}


def test_each_high_throughput_operation_has_a_mutant() -> None:
    assert {name for name, op in HT_NET_OPS.items() if op.effects} <= MUTANTS.keys() | {name for name, _ in HT_MUTANTS.values()}


SHARED = {
    # what is wrong: (old text, new text, the operations of HIGH_THROUGHPUT that must complain)
    "acquiring loads are relaxed": ("ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64", {"ht_net_wait_heads", "ht_net_wait_arrived"}),
    "what is told to my team is told plainly": ("st.relaxed.sys.global.u64", "st.global.u64", {
        "ht_net_publish_head", "ht_net_publish_abort", "ht_net_publish_arrived", "ht_net_publish_hits", "ht_net_forward_hits", "ht_net_publish_kept",
        "ht_net_forward_kept"}),
    "net_release has no fence": ("{ __syncwarp(); fence_system(); }", "{ __syncwarp(); }", {"ht_net_put", "ht_net_put_rows", "ht_net_signal",
                                                                                         "ht_net_enter"}),
}


@pytest.mark.parametrize("what", SHARED)
def test_mutants_of_what_operations_share_are_found(what: str) -> None:
    old, new, guilty = SHARED[what]
    assert check(mutated(SOURCE, None, old, new)).keys() & HT_NET_OPS.keys() == guilty
