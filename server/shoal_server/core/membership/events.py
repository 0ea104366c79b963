"""Events, notices and effects of a job's membership."""

from dataclasses import dataclass

from shoal_server.core.generations.roster import (
    NO_GENERATION,
    Conflict,
    Generation,
    GenerationRecord,
    GenerationRoster,
    JobSpec,
    MemberInfo,
    Proposal,
    Step,
)
from shoal_server.core.membership.changes import ChangeSummary


@dataclass(frozen=True, kw_only=True)
class MemberEvent:
    """An input of the state machine. Other events than `MemberJoined` are refused or ignored unless
    their `incarnation` is the member's current one."""

    member_id: str
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class MemberJoined(MemberEvent):
    spec: JobSpec
    info: MemberInfo
    generation: Generation = NO_GENERATION
    """Newest generation that the member has entered, or began to bring up; 0: none."""


@dataclass(frozen=True, kw_only=True)
class TrainingProposed(MemberEvent):
    proposal: Proposal


@dataclass(frozen=True, kw_only=True)
class Rejection:
    field: str
    seen: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class RosterAnswered(MemberEvent):
    generation: Generation
    digest: str
    rejections: tuple[Rejection, ...] = ()
    unreachable: tuple[tuple[str, str], ...] = ()
    """Peers that the member could not reach: ids and errors."""
    checkpoint_steps: tuple[Step, ...] = ()
    """Complete checkpoints that the member sees, if needed."""


@dataclass(frozen=True, kw_only=True)
class StepReported(MemberEvent):
    """The trainer has stopped, with the state after `step` optimizer steps."""

    step: Step
    has_state: bool
    left: Generation = NO_GENERATION
    """Newest generation that the trainer has left."""
    enough_for_call: int = 0
    """Number of members that suffice to repeat the shared call in the script; 0: no such call."""


@dataclass(frozen=True, kw_only=True)
class NextStepReached(MemberEvent):
    """The member waits before `next_step` for the boundary."""

    generation: Generation
    next_step: Step


@dataclass(frozen=True, kw_only=True)
class ReadinessReported(MemberEvent):
    generation: Generation
    step: Step | None = None
    """Optimizer steps in the member's state; None: not stated."""


@dataclass(frozen=True, kw_only=True)
class BreakReported(MemberEvent):
    """A collective or a bring-up failed on the member."""

    generation: Generation
    error: str
    own: bool = False
    """True if the bring-up failed on this member itself."""
    state_lost: bool = False
    """True if neither members nor a checkpoint have a complete state."""


@dataclass(frozen=True, kw_only=True)
class StreamDisconnected(MemberEvent):
    """The member's stream broke; the member may reconnect."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatReceived(MemberEvent):
    """State of the trainer in a heartbeat."""

    moved: int = 0
    """Counter that changes while the bring-up makes progress."""
    waits: bool = False
    own_code_s: float = 0.0
    """Time in the script's own code; 0 if the trainer is not in that code, or if unknown."""
    loads: bool = False
    """True if the script waits for a batch."""


@dataclass(frozen=True, kw_only=True)
class ProcessHalted(MemberEvent):
    """A signal halted the process, which may go on."""


@dataclass(frozen=True, kw_only=True)
class ProcessContinued(MemberEvent):
    """A halted process goes on."""


@dataclass(frozen=True, kw_only=True)
class DrainRequested(MemberEvent):
    """The member is to finish its step, hand over and leave."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class MemberPaused(MemberEvent):
    """The member runs the script's own code, and the other members wait for it."""

    reason: str
    limit_s: float
    elapsed_s: float = 0.0
    """Seconds since the pause began; above 0 if the report is repeated."""
    number: int = 0
    """Rising number of a process's pauses; 0: not stated."""


@dataclass(frozen=True, kw_only=True)
class MemberResumed(MemberEvent):
    """The end of a pause."""

    number: int = 0
    """Number of the pause; 0: not stated."""


@dataclass(frozen=True, kw_only=True)
class MemberLost(MemberEvent):
    reason: str
    cause: str = ""
    """Reason in a word or two; empty: `reason`."""


@dataclass(frozen=True, kw_only=True)
class MemberLeft(MemberEvent):
    completed: bool
    """True if the member's work is done."""
    reason: str
    failed: bool = False
    """True if the training ended without a usable result."""


@dataclass(frozen=True, kw_only=True)
class MemberWorkDone(MemberEvent):
    """The member has done its work, or closes the job, and does not leave yet."""

    reason: str
    generation: Generation = NO_GENERATION
    finished: bool = False
    """True if the member has no step left."""
    closes: bool = False
    """True if the job admits no further members."""


# Notices.


@dataclass(frozen=True, kw_only=True)
class Notice:
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrepareNotice(Notice):
    roster: GenerationRoster
    digest: str


@dataclass(frozen=True, kw_only=True)
class OutcomeNotice(Notice):
    record: GenerationRecord


@dataclass(frozen=True, kw_only=True)
class StopAtNotice(Notice):
    """The old generation stops before `step`; `generation` begins with that step."""

    generation: Generation
    step: Step


@dataclass(frozen=True, kw_only=True)
class BreakNotice(Notice):
    """The generation is over: the member stops, and reports its step."""

    generation: Generation
    lost_member_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunningNotice(Notice):
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class StandbyNotice(Notice):
    position: int
    """Position among the waiting members, from 1; 0: not stated."""


@dataclass(frozen=True, kw_only=True)
class PausesNotice(Notice):
    """Paused members that other members wait for; if there are many, only the first few."""

    member_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ClosingNotice(Notice):
    """The job admits no further members."""


@dataclass(frozen=True, kw_only=True)
class WaitingNotice(Notice):
    """Number of members without a rank for which the job has room."""

    num_members: int


@dataclass(frozen=True, kw_only=True)
class DrainNotice(Notice):
    """The member is to leave: at its next step boundary if `now`, else at the boundary at which a
    generation without it begins."""

    now: bool
    no_generation_follows: bool = False
    """True, with `now`, if no generation follows."""


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
    """Reason of a refusal, as the parts of an error."""

    kind: str
    what: str
    seen: str = ""
    expected: str = ""
    fix: str = ""
    conflicts: tuple[Conflict, ...] = ()
    replaced_by: str = ""
    """Incarnation that has the member's name now, if any."""


@dataclass(frozen=True, kw_only=True)
class RefusedNotice(Notice):
    refusal: Refusal


# Effects, which the edge carries out in order.


@dataclass(frozen=True, kw_only=True)
class SendNotice:
    member_id: str
    incarnation: str
    notice: Notice


@dataclass(frozen=True, kw_only=True)
class WriteGeneration:
    """Make the record durable before any later effect."""

    record: GenerationRecord


@dataclass(frozen=True, kw_only=True)
class AdmitMember:
    """Give the member its key in etcd."""

    member_id: str
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class ExpelMember:
    """Delete the member's key, which fences the incarnation; end its stream."""

    member_id: str
    incarnation: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LogJobEvent:
    """Record an event for people."""

    kind: str
    reason: str
    member_id: str = ""
    generation: Generation = NO_GENERATION
    summary: ChangeSummary | None = None
    """Changes that led to a running generation."""


@dataclass(frozen=True, kw_only=True)
class SaveJobRecord:
    """Make the job's own record durable before any later effect."""


@dataclass(frozen=True, kw_only=True)
class FinishJob:
    """Make the job's end durable before any later effect."""

    reason: str


Effect = (
    SendNotice
    | WriteGeneration
    | AdmitMember
    | ExpelMember
    | LogJobEvent
    | SaveJobRecord
    | FinishJob
)


class EventRefused(Exception):
    """Raised for a refused event, which leaves the state unchanged."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal
