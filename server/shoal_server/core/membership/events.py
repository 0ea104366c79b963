"""What a job's membership hears (events), tells its members (notices) and asks for (effects)."""

from dataclasses import dataclass

from shoal_server.core.generations.roster import (
    NO_GENERATION,
    Conflict,
    Generation,
    JobSpec,
    MemberInfo,
    Proposal,
    Record,
    Roster,
    Step,
)
from shoal_server.core.membership.changes import Story


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. `incarnation` fences: another one than the member's is refused."""

    member_id: str
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    spec: JobSpec
    info: MemberInfo
    generation: Generation = NO_GENERATION
    """The newest that its trainer was sent into."""


@dataclass(frozen=True, kw_only=True)
class Proposed(Event):
    proposal: Proposal


@dataclass(frozen=True, kw_only=True)
class Rejection:
    field: str
    seen: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class Answered(Event):
    generation: Generation
    digest: str
    rejections: tuple[Rejection, ...] = ()
    unreachable: tuple[tuple[str, str], ...] = ()
    """The peers it could not reach: member_id and what came of the attempt."""
    checkpoint_steps: tuple[Step, ...] = ()
    """Of a roster that can only start from a checkpoint: the complete ones that it sees."""


@dataclass(frozen=True, kw_only=True)
class StepReported(Event):
    """The trainer stands still, with `step` optimizer steps behind its state."""

    step: Step
    has_state: bool
    left: Generation = NO_GENERATION
    """The newest generation it has trained in or brought up; that one is over for it."""
    enough_for_call: int = 0
    """Its script is in a call between two steps, which so many of those in it can make again by
    themselves; 0: it is in none."""


@dataclass(frozen=True, kw_only=True)
class Offered(Event):
    """The trainer holds before `next_step`."""

    generation: Generation
    next_step: Step


@dataclass(frozen=True, kw_only=True)
class BecameReady(Event):
    generation: Generation
    step: Step | None = None
    """Optimizer steps behind the state that it starts from; None: not said."""


@dataclass(frozen=True, kw_only=True)
class Broke(Event):
    """A collective failed under the member, or it could not bring the generation up."""

    generation: Generation
    error: str
    own: bool = False
    """It failed in the bring-up by itself, and not because a peer did."""
    state_lost: bool = False
    """What the members hold together is no whole state, and there is no checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Disconnected(Event):
    """The member's stream broke; it may come back."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Event):
    """What a heartbeat says of the trainer."""

    moved: int = 0
    """Changes as long as its bring-up gets on."""
    waits: bool = False
    """Whether it waits for other members."""
    own_code_s: float = 0.0
    """For how long it has been in the script's own code; 0: it is not, or nobody knows."""
    loads: bool = False
    """Whether it waits there for a batch to be loaded."""


@dataclass(frozen=True, kw_only=True)
class Halted(Event):
    """A signal halted the process; it may go on."""


@dataclass(frozen=True, kw_only=True)
class Continued(Event):
    """A halted process goes on."""


@dataclass(frozen=True, kw_only=True)
class DrainAsked(Event):
    """The member is to finish its step, hand over and leave."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """The trainer runs code of the script's own, and the others are to wait for it."""

    reason: str
    limit_s: float
    elapsed_s: float = 0.0
    """For how long it has, where that is said again."""
    number: int = 0
    """Rises from pause to pause of a process; 0: it does not say."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The pause is over."""

    number: int = 0
    """Which; 0: it does not say."""


@dataclass(frozen=True, kw_only=True)
class Lost(Event):
    reason: str
    cause: str = ""
    """The same in a word or two, for the line that tells the story; empty: the reason."""


@dataclass(frozen=True, kw_only=True)
class Left(Event):
    completed: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkDone(Event):
    """A member that stays says what it is done with: its own work, or the job."""

    reason: str
    generation: Generation = NO_GENERATION
    """The newest that it has entered."""
    finished: bool = False
    """It has no step left; the others may use what it serves."""
    closes: bool = False
    """The job takes in no more members from now on."""


# What members are told.


@dataclass(frozen=True, kw_only=True)
class Notice:
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrepareNotice(Notice):
    roster: Roster
    digest: str


@dataclass(frozen=True, kw_only=True)
class OutcomeNotice(Notice):
    record: Record


@dataclass(frozen=True, kw_only=True)
class StopAtNotice(Notice):
    generation: Generation
    step: Step


@dataclass(frozen=True, kw_only=True)
class BreakNotice(Notice):
    generation: Generation
    lost_member_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunningNotice(Notice):
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class StandbyNotice(Notice):
    position: int


@dataclass(frozen=True, kw_only=True)
class PausesNotice(Notice):
    """Who is paused now, of those whom others wait for."""

    member_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ClosingNotice(Notice):
    """The job takes in no more members."""


@dataclass(frozen=True, kw_only=True)
class WaitingNotice(Notice):
    """Members without a rank that would be in the next roster."""

    num_members: int


@dataclass(frozen=True, kw_only=True)
class DrainNotice(Notice):
    """The member is to leave: at the boundary that will be agreed, or at its next one (`now`)."""

    now: bool
    unreplaced: bool = False
    """With `now`: no generation follows without it."""


class RefusalKind:
    """Names of classes in shoal_proto.errors, which the core does not import."""

    CONFLICT = "ProposalConflict"
    FENCED = "Fenced"
    FINISHED = "JobFinished"
    TIMEOUT = "DeadlineExceeded"
    SPEC = "InvalidSpec"
    UNREACHABLE = "PeersUnreachable"
    STATE_LOST = "StateLost"
    BRING_UP = "BringUpFailed"
    DRAINED = "MemberDrained"
    STOPPED = "JobStopped"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why something was refused, as the parts of an error."""

    kind: str
    what: str
    seen: str = ""
    expected: str = ""
    fix: str = ""
    conflicts: tuple[Conflict, ...] = ()
    replaced_by: str = ""
    """The incarnation that has the member's name now."""


@dataclass(frozen=True, kw_only=True)
class RefusedNotice(Notice):
    refusal: Refusal


# What the edge has to do, in order.


@dataclass(frozen=True, kw_only=True)
class Tell:
    member_id: str
    incarnation: str
    notice: Notice


@dataclass(frozen=True, kw_only=True)
class Write:
    """Make the record durable before anything behind this effect happens."""

    record: Record


@dataclass(frozen=True, kw_only=True)
class Admit:
    """Give the member its key in etcd, under a lease."""

    member_id: str
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class Expel:
    """Take the member's key away, which fences its incarnation everywhere, and end its stream."""

    member_id: str
    incarnation: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Log:
    """Something a person wants to read: the log, the page and `shoal why` show it."""

    kind: str
    reason: str
    member_id: str = ""
    generation: Generation = NO_GENERATION
    story: Story | None = None
    """Of a generation that has come to run."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """Make the job's own record durable, as it is now, before anything behind this happens."""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The job is over, which is durable before anything behind this happens."""

    reason: str


Effect = Tell | Write | Admit | Expel | Log | Save | Finish


class Refused(Exception):
    """An event that the state machine does not take; the state is as it was before."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal
