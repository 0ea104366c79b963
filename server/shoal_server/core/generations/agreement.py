"""How far the members have come in agreeing on one roster: PREPARE and COMMITTED in numbers."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal_server.core.generations.roster import Generation, Roster, Step


@dataclass(kw_only=True)
class Agreement:
    """One attempt to form a generation. Names its members by id; each counts once."""

    roster: Roster
    digest: str
    """Of the roster; what its members have to accept."""
    unanswered: set[str] = field(default_factory=set)
    """Have neither accepted nor rejected it."""
    unready: set[str] = field(default_factory=set)
    """Have not passed their first collective in it."""
    unoffered: set[str] = field(default_factory=set)
    """In a planned change: train in the old generation and have not offered where to stop."""
    unreachable: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """By member: the peers that it could not reach, and what came of the attempt."""
    checkpoint_steps: dict[str, frozenset[Step]] = field(default_factory=dict)
    """By member: the complete checkpoints it sees, where the roster starts from one."""
    starts_at: Step | None = None
    """The step behind the state that its members start from, once one of them has said it."""
    stop_at: Step | None = None
    """The first step that the old generation does not begin, once agreed."""
    is_inherited: bool = False
    """Whether an earlier leader began it, which may have told members where to stop."""
    _highest_offer: Step | None = None

    @classmethod
    def on(
        cls, roster: Roster, digest: str, stopping: Iterable[str] = (), *, inherited: bool = False
    ) -> "Agreement":
        """Nobody has said anything yet. `stopping`: the members of the old generation."""
        names = set(roster.member_ids)
        agreement = cls(
            roster=roster,
            digest=digest,
            unanswered=set(names),
            unready=names,
            is_inherited=inherited,
        )
        if agreement.has_boundary:
            agreement.unoffered.update(stopping)
        return agreement

    @property
    def generation(self) -> Generation:
        return self.roster.generation

    @property
    def has_boundary(self) -> bool:
        """Whether an old generation has to stop at a step that all its members share."""
        return self.roster.planned and self.roster.synchronous

    @property
    def may_have_stopped(self) -> bool:
        """Whether a member may have left the old generation for this one.

        Where to stop is not durable: a leader that comes later learns it when all offer again.
        """
        return self.stop_at is not None or self.is_inherited

    def accept(
        self,
        member_id: str,
        unreachable: Mapping[str, str],
        checkpoint_steps: Iterable[Step] = (),
    ) -> bool:
        """Take an acceptance in; True once all have accepted."""
        self.unanswered.discard(member_id)
        if self.roster.from_checkpoint:
            self.checkpoint_steps[member_id] = frozenset(checkpoint_steps)
        # Of somebody outside the roster, no word counts.
        known = {name: what for name, what in unreachable.items() if name in self.unready}
        if known:
            self.unreachable[member_id] = known
        return not self.unanswered

    def offer(self, member_id: str, step: Step) -> bool:
        """Take an offer in; True when it was the last and so the boundary stands."""
        self._highest_offer = max(self._highest_offer or step, step)
        self.unoffered.discard(member_id)
        if self.unoffered or self.stop_at is not None:
            return False
        self.stop_at = self._highest_offer
        return True

    def ready(self, member_id: str, step: Step | None = None) -> bool:
        """Take a first collective in, and the step it stands at; True once all have passed it."""
        if step is not None:
            # They start as one. Under a new leader they say it again, and have gone on since.
            self.starts_at = max(self.starts_at or step, step)
        self.unready.discard(member_id)
        return not self.unready

    def best_checkpoint(self) -> Step | None:
        """The newest of those that most members see; None if nobody sees one."""
        seen = Counter(step for steps in self.checkpoint_steps.values() for step in steps)
        return max(seen, key=lambda step: (seen[step], step), default=None)

    def forget(self, member_id: str) -> None:
        """A member has done its work, or left a job that completes: nobody waits for it."""
        self.unanswered.discard(member_id)
        self.unready.discard(member_id)
        self.unoffered.discard(member_id)
