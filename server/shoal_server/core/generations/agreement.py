"""Progress of the agreement on one roster, in PREPARE and COMMITTED."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal_server.core.generations.roster import Generation, GenerationRoster, Step


@dataclass(kw_only=True)
class Agreement:
    """An attempt to form a generation. Members are named by id."""

    roster: GenerationRoster
    digest: str
    unanswered: set[str] = field(default_factory=set)
    unready: set[str] = field(default_factory=set)
    """Members that have not passed the first collective."""
    unoffered: set[str] = field(default_factory=set)
    """Members of the old generation that have not offered a boundary."""
    unreachable: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Peers that each member could not reach: their errors."""
    checkpoint_steps: dict[str, frozenset[Step]] = field(default_factory=dict)
    """Complete checkpoints that each member sees."""
    starts_at: Step | None = None
    """Highest step of a ready member, if stated."""
    stop_at: Step | None = None
    """First step that the old generation does not begin, once agreed."""
    is_inherited: bool = False
    """True if an earlier leader began the attempt."""
    _highest_offer: Step | None = None

    @classmethod
    def begin(
        cls,
        roster: GenerationRoster,
        digest: str,
        stopping: Iterable[str] = (),
        *,
        inherited: bool = False,
    ) -> "Agreement":
        """Begin an attempt. `stopping`: members of the old generation that have steps left."""
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
        """True if an old generation has to stop at a common step."""
        return self.roster.planned and self.roster.synchronous

    @property
    def may_have_stopped(self) -> bool:
        """True if a member may have left the old generation. A new leader learns a boundary only
        from new offers."""
        return self.stop_at is not None or self.is_inherited

    def accept(
        self,
        member_id: str,
        unreachable: Mapping[str, str],
        checkpoint_steps: Iterable[Step] = (),
    ) -> bool:
        """Note an acceptance; True once all members have answered."""
        self.unanswered.discard(member_id)
        if self.roster.from_checkpoint:
            self.checkpoint_steps[member_id] = frozenset(checkpoint_steps)
        # Peers outside the roster do not count, nor does the member itself.
        peers = self.unready - {member_id}
        known = {name: what for name, what in unreachable.items() if name in peers}
        if known:
            self.unreachable[member_id] = known
        return not self.unanswered

    def offer(self, member_id: str, step: Step) -> bool:
        """Note an offer; True if it sets the boundary."""
        self._highest_offer = max(self._highest_offer or step, step)
        self.unoffered.discard(member_id)
        if self.unoffered or self.stop_at is not None:
            return False
        self.stop_at = self._highest_offer
        return True

    def ready(self, member_id: str, step: Step | None = None) -> bool:
        """Note that the member's first collective has passed, at `step`; True once all members are
        ready."""
        if step is not None:
            # Members may have trained on before they report.
            self.starts_at = max(self.starts_at or step, step)
        self.unready.discard(member_id)
        return not self.unready

    def best_checkpoint(self) -> Step | None:
        """Return the checkpoint that most members see, the newest of equals."""
        seen = Counter(step for steps in self.checkpoint_steps.values() for step in steps)
        return max(seen, key=lambda step: (seen[step], step), default=None)

    def forget(self, member_id: str) -> None:
        """Stop waiting for a member."""
        self.unanswered.discard(member_id)
        self.unready.discard(member_id)
        self.unoffered.discard(member_id)
