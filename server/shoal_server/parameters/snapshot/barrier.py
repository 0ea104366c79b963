"""The barrier of one job at one server, which keeps each step on one side of a cut.

A *step* is one push of one session to all its shards, on any number of servers; or a push of
gradients and a push of rows that have the same sequence number. A step is in the cut with all its
parts, or not at all:

1. `close`: every server admits only parts of steps that have begun there, and reports these steps.
2. The coordinator merges the steps that have begun anywhere.
3. `drain`: every server admits these steps, and no others, until all of them are applied there.
   Then its shards are cut, and the barrier opens.

While one server still drains, another may admit the next step. The draining server holds back its
part of that step until its shards are cut.

A step may never end, as its member may die half-way. The caller decides how long to wait; then
`give_up_incomplete_steps` returns the incomplete steps. No cut waits for a part that was refused
for good: its member computes it anew, as another step. A cut before that other step has only the
first step's remaining parts; `half_refused_steps` returns such steps.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from shoal_proto.errors import SnapshotFailed
from shoal_server.core.shards.steps import Begun, Shards, StepId

MAX_STEPS = 8
"""Bound on a session's remembered steps, and so on a client's pushes in flight."""
MAX_SESSIONS = 4096


class BarrierPhase(Enum):
    OPEN = "open"
    CLOSED = "closed"
    DRAINING = "draining"


Lacking = Callable[[StepId, Shards], Collection[int]]
"""Returns the shards led by this server that have not applied a step."""


@dataclass(slots=True)
class _StepState:
    shards: Shards
    refused: set[int] = field(default_factory=set)
    has_applied_part: bool = False
    num_inside: int = 0
    applied: bool = False
    """True once every shard here has applied or refused its part."""
    given_up: bool = False
    """True if an earlier cut ended without all parts of the step."""


class SnapshotBarrier:
    """The barrier's state. A method that raises changes nothing."""

    def __init__(self) -> None:
        self.phase = BarrierPhase.OPEN
        self.cut_id = ""
        self._sessions: OrderedDict[str, dict[int, _StepState]] = OrderedDict()
        self._begun: Begun = {}

    def may_enter(self, step: StepId) -> bool:
        """True if a part of the step is admitted now. If not, ask again when the phase changes."""
        if self.phase is BarrierPhase.OPEN or step in self._begun:
            return True
        known = self._sessions.get(step.session, {})
        return step.sequence in known or self._is_outdated(step)

    def enter(self, step: StepId, shards: Shards) -> None:
        """Admit a part of a step for which `may_enter` is true."""
        self._note(step, shards).num_inside += 1

    def refuse(self, step: StepId, shard_id: int) -> None:
        """Note that an admitted part was refused for good."""
        known = self._sessions.get(step.session, {}).get(step.sequence)
        if known is not None:
            known.refused.add(shard_id)

    def note_applied(self, step: StepId) -> None:
        """Note that a shard has applied an admitted part."""
        known = self._sessions.get(step.session, {}).get(step.sequence)
        if known is not None:
            known.has_applied_part = True

    def leave(self, step: StepId, lacking: Lacking) -> None:
        """Note the end of an admitted part."""
        known = self._sessions.get(step.session, {}).get(step.sequence)
        if known is not None:
            known.num_inside -= 1
            self._is_whole(step, known, lacking)

    def add_steps(self, begun: Begun) -> None:
        """Add the steps remembered by a shard that was moved to this server or restored here.

        Until the next check no known step counts as applied: the new shard may lack it.
        """
        for step, shards in begun.items():
            if not self._is_outdated(step):
                self._note(step, shards)
        for known in (known for steps_of in self._sessions.values() for known in steps_of.values()):
            known.applied = False

    def close(self, cut_id: str) -> Begun:
        """Admit no new step; return the steps that have begun here. Raises SnapshotFailed during
        another cut."""
        if self.phase is not BarrierPhase.OPEN:
            raise SnapshotFailed(
                "another snapshot is being taken",
                seen=f"cut {self.cut_id} is {self.phase.value}",
                expected="no other",
                fix="Wait for it to end.",
            )
        self.phase, self.cut_id = BarrierPhase.CLOSED, cut_id
        return {
            StepId(session, sequence): known.shards
            for session, steps in self._sessions.items()
            for sequence, known in steps.items()
        }

    def drain(self, cut_id: str, begun: Begun) -> None:
        """Admit the steps that have begun anywhere. Raises what `check` raises."""
        self.check(cut_id, BarrierPhase.CLOSED)
        self.phase, self._begun = BarrierPhase.DRAINING, dict(begun)
        for step, shards in sorted(begun.items()):
            self._note(step, shards)

    def check(self, cut_id: str, phase: BarrierPhase) -> None:
        """Raise SnapshotFailed unless the barrier is in that phase of that cut."""
        if self.phase is not phase or self.cut_id != cut_id:
            raise SnapshotFailed(
                f"cut {cut_id} is over",
                seen=f"a barrier that is {self.phase.value} {self.cut_id}".rstrip(),
                expected=f"one that is {phase.value}",
                fix="Take another snapshot.",
            )

    def waits_for(self, lacking: Lacking, is_live: Callable[[str], bool]) -> list[StepId]:
        """Return the incomplete steps of the cut that may still become complete here."""
        return [
            step
            for step, known in self._of_cut()
            if not self._is_whole(step, known, lacking)
            and (known.num_inside or not known.given_up)
            and is_live(step.session)
        ]

    def give_up_incomplete_steps(self, lacking: Lacking) -> list[StepId]:
        """Give up the steps of the cut that lack a part here, and return them. A later cut waits
        for them only while a part is in progress."""
        torn = []
        for step, known in self._of_cut():
            if not self._is_whole(step, known, lacking):
                known.given_up = True
                torn.append(step)
        return torn

    def half_refused_steps(self, lacking: Lacking) -> list[StepId]:
        """Return the steps of the cut of which a part was applied here and another one refused for
        good, unless a later step of the session made up for it."""
        return [
            step
            for step, known in self._of_cut()
            if known.has_applied_part and known.refused and not self._is_redone(step, lacking)
        ]

    def _is_redone(self, step: StepId, lacking: Lacking) -> bool:
        steps = self._sessions[step.session]
        known = steps[step.sequence]
        missing = frozenset(lacking(step, known.shards)) & known.refused
        for number, later in steps.items():
            if number > step.sequence and later.has_applied_part:
                pushed = missing if later.shards is None else later.shards
                missing = missing - pushed.difference(lacking(StepId(step.session, number), pushed))
        return not missing

    def open(self, cut_id: str) -> bool:
        """Admit all steps again. False if that cut is not in progress."""
        if self.phase is BarrierPhase.OPEN or self.cut_id != cut_id:
            return False
        self.phase, self.cut_id, self._begun = BarrierPhase.OPEN, "", {}
        return True

    def forget_ended_steps(self) -> None:
        """Forget the steps without a part in progress."""
        in_progress = {
            session: {n: known for n, known in steps.items() if known.num_inside}
            for session, steps in self._sessions.items()
        }
        self._sessions = OrderedDict((name, steps) for name, steps in in_progress.items() if steps)

    def is_quiet(self, is_live: Callable[[str], bool]) -> bool:
        """True if no cut and no part of a step is in progress, and no session is live."""
        return self.phase is BarrierPhase.OPEN and not any(
            is_live(session) or any(known.num_inside for known in steps.values())
            for session, steps in self._sessions.items()
        )

    @staticmethod
    def _is_whole(step: StepId, known: _StepState, lacking: Lacking) -> bool:
        known.applied = known.applied or known.refused.issuperset(lacking(step, known.shards))
        return known.applied

    def _is_outdated(self, step: StepId) -> bool:
        """True if the session has MAX_STEPS remembered steps, and this one is older than all of
        them: its push counts as applied."""
        known = self._sessions.get(step.session, {})
        return len(known) >= MAX_STEPS and step.sequence < min(known)

    def _of_cut(self) -> list[tuple[StepId, _StepState]]:
        # A step that is too old to be remembered was applied, or cannot be completed.
        known_steps = []
        for step in self._begun:
            known = self._sessions.get(step.session, {}).get(step.sequence)
            if known is not None:
                known_steps.append((step, known))
        return known_steps

    def _note(self, step: StepId, shards: Shards) -> _StepState:
        steps = self._sessions.setdefault(step.session, {})
        known = steps.get(step.sequence)
        if known is None:
            known = steps[step.sequence] = _StepState(shards)
            if len(steps) > MAX_STEPS:
                idle = [
                    n for n, each in steps.items() if not each.num_inside and n != step.sequence
                ]
                if idle:
                    del steps[min(idle)]
        elif known.shards is not None and shards is not None:
            known.shards |= shards
        self._sessions.move_to_end(step.session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return known
