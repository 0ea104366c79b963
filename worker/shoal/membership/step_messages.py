"""In which form the members of a generation tell each other of a step.

Members of release 0.1.0 send shorter messages, and do not meet when a generation begins. Where one
of them is in the roster all others do as it does. A coordinator says so in the roster; one of 0.1.0
does not, and then the members find out by themselves, in the generation's store.
"""

import enum

from shoal.membership.generation import Generation
from shoal.torch_private.c10d import Store
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1 import membership_pb2 as pb

FIELD = "step_messages"
"""Of the proposal, where members of the earlier form are refused."""
_COUNT = "step_messages/present"


class StepMessages(enum.IntEnum):
    """As members state it, and a roster what all of them know."""

    UNTOLD = 0
    """By a member or a coordinator of release 0.1.0."""
    EARLIER = 1
    """That of release 0.1.0."""
    PRESENT = 2


def all_know_present(roster: pb.Roster) -> bool:
    """Whether no member is of release 0.1.0, by the word of a coordinator that knows: before any
    member has said so itself."""
    return roster.step_messages >= StepMessages.PRESENT


class FormFinding:
    """One member's part in it, for one generation."""

    def __init__(self, generation: Generation, store: Store | None) -> None:
        """`store`: the generation's; None where no coordinator keeps one."""
        roster = generation.record.roster
        self._world_size = generation.world_size
        self._store = store
        self._form = StepMessages(min(roster.step_messages, StepMessages.PRESENT))
        if FIELD in roster.fields or self._world_size == 1 or store is None:
            self._form = StepMessages.PRESENT

    def announce(self) -> None:
        """Say that this member knows the present form. Before the group is connected."""
        if self._form is StepMessages.UNTOLD and self._store is not None:
            self._store.add(_COUNT, 1)

    def form(self) -> StepMessages:
        """The form. Behind the connecting of the group: all members have announced theirs."""
        if self._form is not StepMessages.UNTOLD or self._store is None:
            return self._form
        knows = self._store.add(_COUNT, 0)
        return StepMessages.PRESENT if knows == self._world_size else StepMessages.EARLIER


def refuse_earlier(form: StepMessages, call: str) -> None:
    """Raise InvalidSpec for what the earlier form of the messages cannot tell."""
    if form is StepMessages.EARLIER:
        raise InvalidSpec(
            f"{call} beside members of release 0.1.0",
            seen="a generation with a member that does not know of it",
            expected="all members of a later release",
            fix="Replace the other workers first, by a script without it (docs/upgrades.md).",
        )
