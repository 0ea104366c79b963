"""A worker's membership: one background thread keeps it, the trainer reads where it stands.

The thread holds the Attend stream, answers every Prepare, sends heartbeats, finds the leader
again after a fail-over, and tells of a break at once through `on_break`. The trainer's thread only
ever waits here with a time limit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2 import (
    GenerationRecord,
    JobSpec,
    Limits,
    MemberInfo,
    Prepare,
    Rejection,
)


@dataclass(frozen=True, kw_only=True)
class Member:
    """Who joins what, and where the coordinators are."""

    coordinators: Sequence[str]
    """host:port of every coordinator replica."""
    spec: JobSpec
    member_id: str
    incarnation: str
    info: MemberInfo


class Membership:
    def __init__(
        self,
        member: Member,
        *,
        judge: Callable[[Prepare], Sequence[Rejection]] = lambda prepare: (),
        on_break: Callable[[int, str], None] = lambda generation, reason: None,
    ) -> None:
        """`judge` and `on_break(generation, reason)` run on the background thread: be quick."""

    limits: Limits
    http_url: str

    def attend(self) -> None:
        """Become a member. Raises Unavailable, JobFinished, InvalidSpec, ProtocolMismatch."""

    def propose(
        self, fields: Mapping[str, str], *, synchronous: bool, step: int, has_state: bool
    ) -> None:
        """State what this member trains; makes it a candidate. Raises ProposalConflict."""

    def await_generation(self, above: int, timeout_s: float | None = None) -> GenerationRecord:
        """The next committed record with a number above `above` that has this member in it.

        Waits through aborted attempts and stand-by. Raises what the coordinator refused this
        member with (ProposalConflict, JobFinished, Fenced ...), or DeadlineExceeded with the
        reason for the wait.
        """

    def planned(self, generation: int) -> GenerationRecord | None:
        """The committed successor of a generation that still runs, if there is one. Free to call.

        On one: `stop = offer(...)`, finish the steps below `stop`, then bring the successor up.
        """

    def offer(self, record: GenerationRecord, next_step: int) -> int:
        """Hold before `next_step` and return the step the old generation stops at (>= next_step).

        Raises GenerationBroken if either generation breaks meanwhile.
        """

    def ready(self, record: GenerationRecord) -> None:
        """Say that the first collective of the generation passed; the token moves to it."""

    def is_broken(self, generation: int) -> bool:
        """Whether the generation is over, by a loss or an aborted bring-up. Free to call."""

    def wait_broken(self, generation: int, timeout_s: float) -> bool:
        """Wait for the break of a generation in which a collective failed."""

    def report_broken(self, error: str) -> None:
        """Tell the coordinator that a collective of the current generation failed here."""

    def settle(self, step: int, *, has_state: bool) -> None:
        """After a break: the trainer stands still with `step` optimizer steps behind its state."""

    def progress(self, step: int) -> None:
        """The step that heartbeats carry. Free to call."""

    def leave(self, *, completed: bool, reason: str) -> None:
        """End the membership and the thread. Never raises for an unreachable coordinator."""

    @property
    def token(self) -> Token: ...

    @property
    def waiting_for(self) -> str:
        """The coordinator's latest reason why this member is not training."""
        ...
