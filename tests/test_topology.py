"""Teams, rails and peers: arithmetic against a slow definition, and what is refused."""

import pytest

from ncclep_py.topology import Topology

SHAPES = [(1, 1), (4, 1), (4, 2), (4, 4), (8, 2), (12, 4), (64, 8), (72, 72), (256, 8), (1024, 8)]


@pytest.mark.parametrize(("ranks", "team"), SHAPES)
def test_peers(ranks, team):
    t = Topology(ranks, team)
    assert t.num_teams * team == ranks
    for rank in {0, 1 % ranks, ranks // 2, ranks - 1}:
        direct, networked = t.direct_peers(rank), t.networked_peers(rank)
        assert sorted(direct + networked) == list(range(ranks)) and rank in direct and len(direct) == team
        assert all(t.is_direct(rank, p) for p in direct) and not any(t.is_direct(rank, p) for p in networked)
        assert t.rank_of(t.team_of(rank), t.index_of(rank)) == rank
        rail = t.rail_peers(rank)
        assert sorted(rail) == [p for p in networked if p % team == rank % team]
        assert [(t.team_of(p) - t.team_of(rank)) % t.num_teams for p in rail] == list(range(1, t.num_teams))
        assert all(t.rail_peer(rank, t.team_of(p)) == p for p in rail)


def test_rails_are_mutual():
    t = Topology(24, 4)
    assert all(rank in t.rail_peers(peer) for rank in range(24) for peer in t.rail_peers(rank))


@pytest.mark.parametrize(("ranks", "team", "says"), [
    (10, 4, "10 ranks in teams of 4 leave a last team of 2"), (4, 8, "at most num_ranks = 4, got 8"), (0, 1, "num_ranks must be at least 1"),
    (4, 0, "team_size must be at least 1")])
def test_refused(ranks, team, says):
    with pytest.raises(ValueError, match=says):
        Topology(ranks, team)


def test_refused_arguments():
    with pytest.raises(TypeError, match="team_size must be an int, got bool"):
        Topology(4, True)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\), got 4"):
        Topology(4, 2).team_of(4)
    with pytest.raises(ValueError, match="2 teams of 2 ranks, got team 2"):
        Topology(4, 2).rank_of(2, 0)
