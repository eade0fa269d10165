"""The agreement of ``member_map`` as a model of its own, explored exhaustively: three ranks, every interleaving of single stores and votes, one rank
dying anywhere or sleeping before an operation, time-outs wherever the fault model allows one. And mutants of the rules.

Sequentially consistent, no rows: that memory is ordered as claimed is the simulator's business (``test_mask_protocol``).
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

RANKS = (0, 1, 2)
WRITES, COMMITS, LOCKED, LOCKED_WRITER = range(4)
SLEEP, JOIN, WAIT_JOIN, GATE, ROWS, ARRIVE, WAIT_ARRIVED, COMMIT, PASS, VERDICT, PULL, CHECK, OUT, DEAD, DONE = range(15)
BUSY = {JOIN, GATE, ROWS, ARRIVE, COMMIT, PASS, VERDICT, PULL, CHECK}
BEFORE_JOIN = BUSY | {WAIT_ARRIVED}   # a wait for JOIN lasts longer than one for ARRIVED: that one gives up first if it began first
MOST_ATTEMPTS = 7


class Rank(NamedTuple):
    phase: int = SLEEP
    op: int = 0
    epoch: int = 1
    mask: int = 0
    step: int = 0                 # next peer of a publication or a pass
    proposal: int = 0
    found: tuple = (None, False, 0)   # of a pass: mask of a commit, whether a vote is ahead, writers
    stale: int = 0                # ranks that are busy ever since this rank's wait began
    dirty: bool = False           # rows I pull were overwritten
    seen: tuple = ()              # (epoch, mask) of each operation I completed


class State(NamedTuple):
    ranks: tuple
    joins: tuple      # [at][of]
    arrived: tuple
    votes: tuple      # (epoch, state, low)
    verdict: tuple    # (epoch, mask)
    early: int        # time-outs left while something else can happen


class Violation(AssertionError):
    """A rule is broken."""


def put(table: tuple, i: int, value: object) -> tuple:
    return (*table[:i], value, *table[i + 1:])


class Model:
    """Operations by letter: D (rows, ARRIVED, commit) and C (commits at the join, then pulls)."""

    def __init__(self, ops: str, mortal: int | None, sleeper: int | None, early: int, mutant: str = "") -> None:
        self.ops, self.mortal, self.sleeper, self.mutant = ops, mortal, sleeper, mutant
        zero = tuple((0, 0, 0) for _ in RANKS)
        self.start = State(tuple(Rank() for _ in RANKS), zero, zero, tuple((0, WRITES, 0) for _ in RANKS), (0, 0), early)

    def locked(self, s: State, r: int) -> bool:
        epoch, state, _ = s.votes[r]
        return epoch > s.ranks[r].epoch or (epoch == s.ranks[r].epoch and state >= LOCKED)

    def members(self, me: Rank) -> list[int]:
        return [q for q in RANKS if not me.mask >> q & 1]

    def set(self, s: State, r: int, me: Rank, **more: object) -> State:
        """The rank in its new state; who is no longer busy is no longer so ever since any wait began."""
        was, ranks = s.ranks[r], put(s.ranks, r, me)
        if me.phase in (WAIT_JOIN, WAIT_ARRIVED) and was.phase != me.phase:
            phases = BEFORE_JOIN if me.phase == WAIT_JOIN and self.mutant != "equal deadlines" else BUSY
            busy = sum(1 << q for q in RANKS if q != r and ranks[q].phase in phases)
            ranks = put(ranks, r, me._replace(stale=busy))
        if was.phase in BEFORE_JOIN and me.phase not in BUSY:
            ranks = tuple(q._replace(stale=q.stale & ~(1 << r)) if q.phase != WAIT_JOIN or me.phase not in BEFORE_JOIN else q for q in ranks)
        if me.phase == ROWS:   # M5: nobody else writes, or is going on to write, in another attempt
            for q in RANKS:
                other = ranks[q]
                if q != r and other.phase in (ROWS, ARRIVE) and other.epoch != me.epoch:
                    raise Violation(f"rows of attempts {me.epoch} and {other.epoch} at the same time")
                if q != r and other.phase == PULL and other.epoch != me.epoch:
                    ranks = put(ranks, q, other._replace(dirty=True))
        return s._replace(ranks=ranks, **more)

    # ---- one rank's next steps -------------------------------------------------------------------------------------------------
    def steps(self, s: State, r: int) -> list[State]:
        me = s.ranks[r]
        kind = self.ops[me.op] if me.op < len(self.ops) else ""
        if me.phase == SLEEP:
            return [self.set(s, r, me._replace(phase=JOIN if kind else DONE, step=0))]
        if me.phase == JOIN:
            joins = put(s.joins, me.step, put(s.joins[me.step], r, me.epoch))
            last = me.step == len(RANKS) - 1
            return [self.set(s, r, me._replace(phase=WAIT_JOIN if last else JOIN, step=0 if last else me.step + 1), joins=joins)]
        if me.phase == WAIT_JOIN:
            return self.wait(s, r, s.joins[r], GATE)
        if me.phase == GATE:
            if self.locked(s, r) and self.mutant != "no gate":
                return [self.lock(s, r, me.mask)]
            vote = (me.epoch, COMMITS, me.mask) if kind == "C" else (me.epoch, WRITES, 0)
            return [self.set(s, r, me._replace(phase=PULL if kind == "C" else ROWS, dirty=False), votes=put(s.votes, r, vote))]
        if me.phase == ROWS:
            return [self.set(s, r, me._replace(phase=ARRIVE, step=0))]
        if me.phase == ARRIVE:
            arrived = put(s.arrived, me.step, put(s.arrived[me.step], r, me.epoch))
            last = me.step == len(RANKS) - 1
            return [self.set(s, r, me._replace(phase=WAIT_ARRIVED if last else ARRIVE, step=0 if last else me.step + 1), arrived=arrived)]
        if me.phase == WAIT_ARRIVED:
            return self.wait(s, r, s.arrived[r], COMMIT)
        if me.phase == COMMIT:
            if s.votes[r] != (me.epoch, WRITES, 0) and self.mutant != "commit without a look":
                return [self.lock(s, r, me.mask)]
            return [self.complete(self.set(s, r, me, votes=put(s.votes, r, (me.epoch, COMMITS, me.mask))), r)]
        if me.phase == PASS:
            return [self.look(s, r)]
        if me.phase == VERDICT:
            return [self.decide(s, r)]
        if me.phase == PULL:
            return [self.set(s, r, me._replace(phase=CHECK))]
        if me.phase == CHECK:
            if s.votes[r][0] > me.epoch and self.mutant != "no look after the pull":
                return [self.set(s, r, me._replace(phase=OUT))]
            if me.dirty:
                raise Violation("rows were overwritten while a member pulled them, and it does not know")
            return [self.complete(s, r)]
        return []

    def wait(self, s: State, r: int, words: tuple, then: int) -> list[State]:
        """Steps of a wait but time-outs."""
        me = s.ranks[r]
        tags = [words[q] for q in self.members(me)]
        if self.locked(s, r) or any(t > me.epoch for t in tags):
            return [self.lock(s, r, me.mask)]
        return [self.set(s, r, me._replace(phase=then))] if all(t == me.epoch for t in tags) else []

    def timeout(self, s: State, r: int) -> State | None:
        """A wait gives up, if the model allows."""
        me = s.ranks[r]
        if me.phase not in (WAIT_JOIN, WAIT_ARRIVED):
            return None
        words = s.joins[r] if me.phase == WAIT_JOIN else s.arrived[r]
        missing = sum(1 << q for q in self.members(me) if words[q] < me.epoch)
        if not missing or missing & me.stale:
            return None
        blamed = missing if me.phase == WAIT_JOIN or self.mutant == "arrived masks" else 0
        return self.lock(s, r, me.mask | blamed)

    def lock(self, s: State, r: int, proposal: int) -> State:
        return self.set(s, r, s.ranks[r]._replace(phase=PASS, step=0, proposal=proposal, found=(None, False, 0)))

    def look(self, s: State, r: int) -> State:
        """The next vote of a pass: one compare-and-swap."""
        me = s.ranks[r]
        epoch, state, low = s.votes[me.step]
        commit, ahead, writers = me.found
        votes, proposal = s.votes, me.proposal
        if epoch > me.epoch:
            ahead = True
        elif epoch == me.epoch and state == COMMITS and self.mutant != "commits are overwritten":
            commit = low
        elif epoch == me.epoch and state >= LOCKED:
            proposal |= low if self.mutant != "no help" else 0
            writers |= (state == LOCKED_WRITER) << me.step
        elif not (self.mutant == "lock only oneself" and me.step != r):
            wrote = epoch == me.epoch and self.mutant != "forget who writes"
            votes = put(votes, me.step, (me.epoch, LOCKED_WRITER if wrote else LOCKED, proposal))
            writers |= wrote << me.step
        last = me.step == len(RANKS) - 1
        return self.set(s, r, me._replace(phase=VERDICT if last else PASS, step=0 if last else me.step + 1, proposal=proposal,
                                          found=(commit, ahead, writers)), votes=votes)

    def decide(self, s: State, r: int) -> State:
        """The end of a pass."""
        me = s.ranks[r]
        commit, ahead, writers = me.found
        if commit is not None:
            if commit >> r & 1:
                return self.set(s, r, me._replace(phase=OUT))
            return self.set(s, r, me._replace(phase=PULL, dirty=False)) if self.ops[me.op] == "C" else self.complete(s, r)
        if ahead or s.verdict[0] > me.epoch:
            return self.set(s, r, me._replace(phase=OUT))
        following, verdict = me.proposal & ~writers, s.verdict
        if verdict[0] < me.epoch or self.mutant == "everybody decides":
            verdict = (me.epoch, following)
        following = verdict[1]
        if following >> r & 1:
            return self.set(s, r, me._replace(phase=OUT), verdict=verdict)
        return self.set(s, r, me._replace(phase=JOIN, step=0, epoch=me.epoch + 1, mask=following, proposal=0), verdict=verdict)

    def complete(self, s: State, r: int) -> State:
        me = s.ranks[r]
        asleep = self.sleeper == r or me.op + 1 == len(self.ops)
        after = me._replace(phase=SLEEP if asleep else JOIN, op=me.op + 1, epoch=me.epoch + 1, step=0, proposal=0, found=(None, False, 0),
                            seen=(*me.seen, (me.epoch, me.mask)))
        for q in RANKS:   # agreement
            theirs = s.ranks[q].seen
            if q != r and len(theirs) > me.op and theirs[me.op] != after.seen[me.op]:
                raise Violation(f"operation {me.op}: rank {r} ended it as {after.seen[me.op]}, rank {q} as {theirs[me.op]}")
        return self.set(s, r, after)

    # ---- all -----------------------------------------------------------------------------------------------------------------
    def explore(self, limit: int = 3_000_000) -> int:
        """Number of states; raises `Violation`."""
        seen, stack = {self.start}, [self.start]
        while stack:
            s = stack.pop()
            if any(me.epoch > MOST_ATTEMPTS for me in s.ranks):
                continue   # time-outs without end: longer runs repeat themselves
            after = [t for r in RANKS for t in self.steps(s, r)]
            late = [t for r in RANKS if (t := self.timeout(s, r)) is not None]
            moved = bool(after)
            if not moved:
                after = late
            elif s.early:
                after += [t._replace(early=s.early - 1) for t in late]
            if self.mortal is not None and s.ranks[self.mortal].phase not in (DEAD, OUT, DONE):
                dead = s.ranks[self.mortal]._replace(phase=DEAD)
                after.append(self.set(s, self.mortal, dead))
            if not moved and not late:
                stuck = [r for r in RANKS if s.ranks[r].phase not in (OUT, DEAD, DONE)]
                if stuck and not (self.mortal is not None and after):
                    raise Violation(f"ranks {stuck} wait for ever: {s}")
                self.check_end(s)
            for t in after:
                if t not in seen:
                    seen.add(t)
                    stack.append(t)
            if len(seen) > limit:
                raise RuntimeError(f"more than {limit} states")
        return len(seen)

    def check_end(self, s: State) -> None:
        """Who is out was masked by somebody; and only for a reason, if no wait gave up before it had to."""
        for r in RANKS:
            if s.ranks[r].phase == OUT and not self.start.early and r not in (self.mortal, self.sleeper):
                raise Violation(f"rank {r} did nothing wrong and is out: {s}")
            if s.ranks[r].phase == OUT and not any(s.ranks[q].mask >> r & 1 for q in RANKS if q != r) and not s.verdict[1] >> r & 1:
                raise Violation(f"rank {r} is out, but nobody masked it: {s}")


CASES = [("D", 0, None, 0), ("D", 1, None, 0), ("D", 2, None, 0), ("D", None, 1, 1), ("C", 1, None, 1), ("C", None, 0, 1),
         ("DC", 0, None, 0), ("DC", 2, None, 0), ("CD", 0, None, 0), ("CD", 2, 1, 0), ("DD", 1, None, 0),
         ("CC", 0, 1, 0)]
"""Operations, who may die, who sleeps before operations, time-outs while something else can happen."""


def test_nothing_happens_without_faults() -> None:
    assert Model("DC", None, None, 0).explore() > 1000


@pytest.mark.parametrize("ops, mortal, sleeper, early", CASES)
def test_all_interleavings_agree(ops: str, mortal: int | None, sleeper: int | None, early: int) -> None:
    assert Model(ops, mortal, sleeper, early).explore() > 300


MUTANTS = {"no gate": ("D", 0, None, 1), "commit without a look": ("D", 0, None, 1), "no look after the pull": ("CD", 0, None, 1),
           "commits are overwritten": ("D", 0, None, 1), "lock only oneself": ("D", 0, None, 1), "forget who writes": ("D", 0, None, 1),
           "arrived masks": ("D", 0, None, 0), "everybody decides": ("D", 0, None, 2), "equal deadlines": ("DC", 0, None, 0)}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_red(mutant: str) -> None:
    """Without the rule some interleaving breaks agreement, lets rows of two attempts meet, or masks who did nothing wrong."""
    with pytest.raises(Violation):
        Model(*MUTANTS[mutant], mutant).explore()
