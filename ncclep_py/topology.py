"""Which ranks are in one team (NVLink domain), and who of the others is reached how. Pure arithmetic, the same on every rank.

A team is what NCCL calls an LSA team: ranks that can address each other's memory. Rank ``team * team_size + index``. *Direct* peers are those of my
team (loads and stores), *networked* ones all others (puts and signals), and my *rail* are the networked peers with my index, one in each other team.
"""

from __future__ import annotations

import dataclasses

__all__ = ["Topology"]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Ranks in teams of equal size.

    Attributes:
        num_ranks: R.
        team_size: ranks of a team, a divisor of R.

    Example:
        >>> from ncclep_py.topology import Topology
        >>> t = Topology(num_ranks=8, team_size=4)
        >>> t.num_teams, t.team_of(5), t.index_of(5), t.rail_peers(5)
        (2, 1, 1, (1,))
        >>> t.direct_peers(5), t.networked_peers(5)
        ((4, 5, 6, 7), (0, 1, 2, 3))
    """

    num_ranks: int
    team_size: int

    def __post_init__(self) -> None:
        for name, value in (("num_ranks", self.num_ranks), ("team_size", self.team_size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}: {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.team_size > self.num_ranks:
            raise ValueError(f"team_size must be at most num_ranks = {self.num_ranks}, got {self.team_size}")
        if self.num_ranks % self.team_size:
            raise ValueError(f"all teams must be of equal size: {self.num_ranks} ranks in teams of {self.team_size} leave a last team of "
                             f"{self.num_ranks % self.team_size}; start as many ranks on every node")

    @property
    def num_teams(self) -> int:
        """Number of teams, T."""
        return self.num_ranks // self.team_size

    def team_of(self, rank: int) -> int:
        """Team of a rank."""
        return self._checked(rank) // self.team_size

    def index_of(self, rank: int) -> int:
        """Place of a rank in its team."""
        return self._checked(rank) % self.team_size

    def rank_of(self, team: int, index: int) -> int:
        """The rank at a place of a team."""
        if not (0 <= team < self.num_teams and 0 <= index < self.team_size):
            raise ValueError(f"there are {self.num_teams} teams of {self.team_size} ranks, got team {team}, index {index}")
        return team * self.team_size + index

    def is_direct(self, rank: int, peer: int) -> bool:
        """Whether two ranks are of one team; a rank and itself are."""
        return self.team_of(rank) == self.team_of(peer)

    def direct_peers(self, rank: int) -> tuple[int, ...]:
        """The ranks of my team, ascending, myself included."""
        first = self.team_of(rank) * self.team_size
        return tuple(range(first, first + self.team_size))

    def networked_peers(self, rank: int) -> tuple[int, ...]:
        """The ranks of all other teams, ascending."""
        first = self.team_of(rank) * self.team_size
        return (*range(first), *range(first + self.team_size, self.num_ranks))

    def rail_peers(self, rank: int) -> tuple[int, ...]:
        """The rank with my index in each other team, by ascending distance: of the next team first, then of the one after it."""
        team, index = self.team_of(rank), self.index_of(rank)
        return tuple((team + d) % self.num_teams * self.team_size + index for d in range(1, self.num_teams))

    def rail_peer(self, rank: int, team: int) -> int:
        """The rank of `team` with my index."""
        return self.rank_of(team, self.index_of(rank))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be in [0, {self.num_ranks}), got {rank}")
        return rank
