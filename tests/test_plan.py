"""Plans: every offset at 64 to 1024 ranks, what a device communicator needs, the choice, the command line."""

import dataclasses
import json

import pytest

from ncclep_py import plan
from ncclep_py.__main__ import main
from ncclep_py.config import Algorithm, GroupConfig, Layout
from ncclep_py.cost_model import MACHINES
from ncclep_py.ht_memory_map import HTWindowMap, ht_local_map
from ncclep_py.kernels.ht_net_shape import HTNetShape
from ncclep_py.memory_map import LocalMap, WindowMap
from ncclep_py.topology import Topology

LL, HT = Algorithm.LOW_LATENCY, Algorithm.HIGH_THROUGHPUT
SCALE = [(ranks, team) for ranks in (64, 128, 256, 512, 1024) for team in (1, 4, 8, 64)]


def config(ranks, algorithm=LL, tokens=128, **more):
    return GroupConfig(num_experts=max(256, ranks), max_dispatch_tokens_per_rank=tokens, hidden=7168, num_topk=8, algorithm=algorithm, **more)


@pytest.mark.parametrize(("ranks", "team"), SCALE)
@pytest.mark.parametrize("algorithm", [LL, HT])
def test_offsets_at_scale(ranks, team, algorithm):
    """No two regions overlap, every word is aligned, all is below what 64-bit signed offsets address; odd sizes included."""
    topology = Topology(ranks, team)
    options = [{}, {"num_slots": 3}, {"tokens": 1}, {"tokens": 129}]
    options += [{"num_staging_slots": 2, "num_slots": 2}] if algorithm is LL else []
    options += [{"slot_layout": Layout.RANK_MAJOR}] if algorithm is LL else []
    for more in options:
        made = plan.make_plan(config(ranks, algorithm, **more), topology)
        assert plan.overlaps(made.regions, made.window_bytes) == ""
        assert made.window_bytes == max(end for _, _, end in made.regions)
        if algorithm is LL:
            local = LocalMap.build(made.config)
            assert plan.overlaps(local.regions(), local.total_bytes) == ""


@pytest.mark.parametrize("team", [1, 8])
def test_masks_over_teams_are_in_the_plan(team):
    """What a group of this config allocates, to the byte."""
    from ncclep_py import Group, LocalWorld

    ranks, small = 16, {"num_experts": 32, "max_dispatch_tokens_per_rank": 3, "hidden": 24, "num_topk": 2}
    made = plan.make_plan(GroupConfig(**small, enable_mask=True), Topology(ranks, team))
    assert plan.overlaps(made.regions, made.window_bytes) == "" and made.window_bytes == max(end for _, _, end in made.regions)
    assert {"VIEWS", "STAGING_OF_RANKS", "STAGING_MESSAGES"} <= {name for name, begin, end in made.regions if end > begin}

    def program(comm):
        with Group.create(comm, made.config) as group:
            return group.window.memory.numel(), group._local.numel(), group.network.needs == made.needs

    with LocalWorld(ranks, "sim", team_size=team) as world:
        assert world.run(program) == [(made.window_bytes, made.local_bytes, True)] * ranks


@pytest.mark.parametrize("ranks", [64, 1024])
def test_words_of_every_source_have_a_place_of_their_own(ranks):
    """First and last word of each source in each table, by the map's arithmetic: 8 bytes apart at least, all inside their region."""
    made = WindowMap.build(config(ranks), ranks)
    regions = {name: (begin, end) for name, begin, end in made.regions()}
    heads = [made.head_bank(epoch)[0] + 16 * source for epoch in (0, 1) for source in range(ranks)]
    counts = [made.counts + 8 * (source * made.num_experts + e) for source in range(ranks) for e in (0, made.num_experts - 1)]
    for name, words, size in (("HEAD", heads, 16), ("COUNTS", counts, 8)):
        assert len(set(words)) == len(words) and all(b - a >= size for a, b in zip(sorted(words), sorted(words)[1:], strict=False))
        assert regions[name][0] == min(words) and max(words) + size <= regions[name][1]
    rows = made.num_local_experts * made.plane_rows
    assert made.slot(0) + rows * made.token_bytes <= regions["ROUTING0"][0]


def test_overlaps_sees_what_it_is_for():
    assert "B begins at 8, inside of A, which ends at 16" in plan.overlaps([("B", 8, 24), ("A", 0, 16)], 24)
    assert "begins at 4, which is no multiple of 8" in plan.overlaps([("A", 4, 16)], 24)
    assert "bytes 0 to 16 of a window of 8" in plan.overlaps([("A", 0, 16)], 8)
    assert "cannot address" in plan.overlaps([("A", 0, 1 << 63)], 1 << 63)
    assert plan.overlaps([("A", 0, 16), ("B", 16, 16), ("C", 16, 24)], 24) == ""


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="must be below 2\\^31"):
        plan.make_plan(config(1024, tokens=4096), Topology(1024, 8))


@pytest.mark.parametrize(("team", "algorithm", "connection", "transport"), [
    (8, LL, "none", "local"), (8, HT, "none", "local"), (4, LL, "full", "direct"), (4, HT, "rail", "hierarchical"), (1, LL, "full", "direct"),
    (1, HT, "rail", "hierarchical")])
def test_needs(team, algorithm, connection, transport):
    topology = Topology(8, team)
    needs, made = plan.device_needs(config(8, algorithm), topology), plan.make_plan(config(8, algorithm), topology)
    assert (needs.connection, made.transport) == (connection, transport) and made.needs == needs
    assert needs.network is (team < 8) and (needs.contexts > 0) is (needs.signals > 0) is needs.network
    assert (made.best_chunk_tokens in plan.GROUP_CHUNKS) is (made.chunk_tokens in plan.GROUP_CHUNKS) is (transport == "hierarchical")


def test_groups_follow_the_model():
    """Chunks of the group, of its kernels and of the plan are the same, and not always as long."""
    found = []
    for tokens in (512, 65536):
        settings, topology = config(16, HT, tokens=tokens), Topology(16, 8)
        made = plan.make_plan(settings, topology)
        shape = HTNetShape.over_teams(settings, 16, 8, settings.num_topk, 8, Layout.FLAT, 0, 16)
        assert made.chunk_tokens == made.best_chunk_tokens == shape.net.chunk_tokens == plan.network_map(settings, topology).chunk_tokens
        slow = plan.make_plan(settings, topology, dataclasses.replace(MACHINES["h200"], network=1.0))
        assert slow.chunk_tokens == made.chunk_tokens and slow.best_chunk_tokens == 8   # a rank's own links do not decide
        found.append(made.chunk_tokens)
    assert found == [8, 32]


def test_one_team_has_the_plan_of_before():
    for algorithm, maps in ((LL, (WindowMap.build(config(8), 8), LocalMap.build(config(8)))),
                            (HT, (HTWindowMap.build(config(8, HT), 8), ht_local_map(config(8, HT))))):
        made = plan.make_plan(config(8, algorithm), Topology(8, 8))
        assert (made.regions, made.window_bytes, made.local_bytes) == (maps[0].regions(), maps[0].total_bytes, maps[1].total_bytes)


def test_choice():
    """Few tokens: latency decides; many: bytes do."""
    assert plan.fastest(config(64, HT, tokens=1), Topology(64, 8)) is LL
    assert plan.fastest(config(64, HT, tokens=4096), Topology(64, 8), machine=MACHINES["h200"]) is HT


# ---- command line --------------------------------------------------------------------------------------------------------
def run(capsys, *words):
    code = main(["plan", *words])
    return code, capsys.readouterr()


def test_json(capsys):
    code, out = run(capsys, "--ranks", "256", "--team", "8", "--algorithm", "ht", "--tokens", "1024", "--rank", "17", "--json")
    made = json.loads(out.out)
    assert code == 0 and made["ok"] and (made["teams"], made["team"], made["index"]) == (32, 2, 1)
    assert made["direct_peers"] == [16, 18, 19, 20, 21, 22, 23] and len(made["networked_peers"]) == 31
    assert all(p % 8 == 1 for p in made["networked_peers"])
    assert made["device_communicator"]["connection"] == "rail"
    assert set(made["predicted_us"]) == {"ll", "ht", "ht direct"}
    assert made["predicted_us"]["ht"]["dispatch"]["total"] < made["predicted_us"]["ht direct"]["dispatch"]["total"]
    assert sum(r["bytes"] for r in made["regions"]) <= made["window_bytes"]


def test_text(capsys):
    code, out = run(capsys, "--ranks", "16", "--team", "8", "--algorithm", "ll")
    assert code == 0
    for part in ("16 ranks in 2 teams of 8; LOW_LATENCY, direct", "puts to 8 networked ones (8, 9, 10, 11, 12, 13, ...)", "GIN connection full",
                 "SLOT0", "dispatch", "are assumed"):
        assert part in out.out


def test_speeds_matter(capsys):
    slow, fast = (json.loads(run(capsys, "--ranks", "16", "--team", "8", "--network", gb, "--json")[1].out) for gb in ("12.5", "100"))
    assert slow["predicted_us"]["ll"]["dispatch"]["total"] > 1.5 * fast["predicted_us"]["ll"]["dispatch"]["total"]


@pytest.mark.parametrize(("words", "says"), [
    (("--ranks", "10", "--team", "4"), "10 ranks in teams of 4 leave a last team of 2"),
    (("--ranks", "8", "--experts", "100"), "num_experts must be a multiple of the number of ranks: 100 over 8"),
    (("--ranks", "8", "--rank", "8"), "rank must be in [0, 8), got 8"),
    (("--ranks", "8", "--algorithm", "ll", "--layout", "flat"), "layout of LOW_LATENCY must be expert_major or rank_major, got flat"),
    (("--ranks", "8", "--network", "0"), "network must be above 0, got 0.0")])
def test_refused(capsys, words, says):
    code, out = run(capsys, *words)
    assert code == 2 and says in out.err
    code, out = run(capsys, *words, "--json")
    assert code == 2 and not json.loads(out.out)["ok"] and says in json.loads(out.out)["error"]
