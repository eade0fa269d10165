"""Mutants of the CUDA side of HIGH_THROUGHPUT operations that the check of ``test_ptx.py`` must not pass."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs an extra cu12 or cu13")

from test_ptx import check, mutated

from ncclep_py import toolchain

BARRIER = "  __syncthreads();\n"
MUTANTS = {
    # what is wrong: (operation to change, old text, new text)
    "no barrier after clearing": ("ht_count", "= 0;\n" + BARRIER, "= 0;\n"),
    "no barrier after counting": ("ht_count", "  }\n" + BARRIER, "  }\n"),
    "no barrier after adding up": ("ht_sum", BARRIER, ""),
    "no barrier after the hits": ("ht_wait_hits", "__syncthreads_or(code)", "code"),
    "no barrier after numbering": ("ht_assign", BARRIER + "  return", "  return"),
    "no barrier before the kept rows are told": ("ht_publish_kept", "1);\n  }\n" + BARRIER, "1);\n  }\n"),
    "no barrier before the kept rows are counted": ("ht_publish_kept", "= 0;\n" + BARRIER, "= 0;\n"),
    "no barrier after the kept rows came": ("ht_store_zones", "__syncthreads_or(code)", "code"),
    "no barrier before the kept rows are added": ("ht_store_zones", BARRIER, ""),
    "routes through the read-only cache": ("ht_publish_kept", "i64 place = ((const i64*)place_table)[i]",
                                           "i64 place = __ldg((const i64*)place_table + i)"),
    "header through the read-only cache": ("ht_map_status", "((const i64*)header)[1]", "__ldg((const i64*)header + 1)"),
    "zones through the read-only cache": ("ht_clear_ids", "= *(const i64*)totals_at(zones, num_local);",
                                          "= __ldg((const i64*)totals_at(zones, num_local));"),
    "tokens without the read-only cache": ("ht_scatter_row", "load_nc(", "load_row("),
    "rows through the read-only cache": ("ht_copy_rows", "load_row(", "load_nc("),
    "weights through the read-only cache": ("ht_gather_weights", "grad = *(const float*)peer_at(window, recv_weights + 4 * at, (place >> 40) / "
                                            "(num_experts / num_ranks))", "grad = __ldg((const float*)peer_at(window, recv_weights + 4 * at, 0))"),
    "volatile zones": ("ht_store_zones", "z[l] = int(begin)", "*(volatile int*)&z[l] = int(begin)"),
}


def rounds() -> list[list[str]]:
    """Mutants that change different operations are compiled together."""
    made: list[list[str]] = []
    for what, (name, _, _) in MUTANTS.items():
        free = next((r for r in made if name not in {MUTANTS[w][0] for w in r}), None)
        if free is None:
            made.append([what])
        else:
            free.append(what)
    return made


@pytest.mark.parametrize("whats", rounds(), ids=lambda whats: f"{len(whats)} mutants")
def test_mutants_are_found(whats: list[str]) -> None:
    source = toolchain.device_source()
    for what in whats:
        name, old, new = MUTANTS[what]
        source = mutated(source, name, old, new)
    found = check(toolchain.compile_device("sm_90", "ptx", source=source).decode().rstrip("\0"))
    assert {what: found.get(MUTANTS[what][0]) for what in whats if MUTANTS[what][0] not in found} == {}
    assert found.keys() == {MUTANTS[what][0] for what in whats}
