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
from ncclep_py.kernels.ops import NET_OPS, Op

SOURCE = "".join((toolchain.KERNEL_FOLDER / name).read_text() for name in (
    "lane_ops.cu", "fabric_ops.cu", "rank_ops.cu", "recipe_ops.cu", "ht_ops.cu", *toolchain.TEAM_SOURCES))
POINTERS = ("sent", "sent_scales", "staged", "messages", "returned", "remote", "tag", "tags", "counts_sent", "net_counts", "hits", "net_hits",
            "net_kept", "kept_sent", "remote_routes", "remote_places")
NOUN = {"tags": "tag", "messages": "staging"}
OWN_NOUN = {"ht_net_count": {"epoch": "count"}, "ht_net_advance": {"epoch": "count"}, "ht_net_stage_header": {"sent": "header_sent"},
            "ht_net_take_header": {"staged": "header_staged"}, "ht_net_forward_weights": {"staged": "header_staged"},
            "ht_net_partial_grads": {"sent": "grads_sent"}, "ht_net_reduce_grads": {"staged": "grads_staged"}} | {
            f"ll_net_{name}_row": {"sent": "sent"} for name in ("send", "stage", "quantise", "spread")}
EITHER = {"ht_net_reduce_grads": "ld.weak grads_staged+recv_weights"}   # of one place or of the other
PUTS_NOTHING = {"ll_net_return_rows"}   # without a row to put there is no fence


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


def check(source: str) -> dict[str, list[str]]:
    """Complaints by operation."""
    compiled = test_ptx.functions(toolchain.compile_device("sm_90", "ptx", source=source, teams=True).decode().rstrip("\0"))
    found = {}
    for name, op in NET_OPS.items():
        wrong = ["missing"] if name not in compiled else complaints(named(op, compiled[name][0]), *compiled[name])
        if name in PUTS_NOTHING:
            wrong = [w for w in wrong if w != "a path ends without a declared fence or barrier"]
        found[name] = wrong
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
}


def test_mutants_are_found():
    source = SOURCE
    mutants = {name: texts for name, texts in MUTANTS.items() if name in NET_OPS}
    for name, (old, new) in mutants.items():
        source = mutated(source, name, old, new)
    assert check(source).keys() == mutants.keys()
