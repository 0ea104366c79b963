"""Events, effects and decisions of a member."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal_proto.back_off import BackOff
from shoal_proto.errors import ShoalError
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

# --- events of the stream and of calls ---


@dataclass(frozen=True, kw_only=True)
class NoticeReceived:
    """A notice arrived on the stream."""

    notice: pb.Notice
    refusal: ShoalError | None = None
    """Error in a notice `refused`."""


@dataclass(frozen=True, kw_only=True)
class StreamEnded:
    """The stream ended: it failed, or a call that a notice caused failed."""

    error: ShoalError | None
    chance: float = 1.0
    """Random number from 0 to 1, for the next pause."""


@dataclass(frozen=True, kw_only=True)
class RosterValidated:
    """Answer of this member to a roster."""

    generation: int
    digest: str
    rejections: Sequence[pb.Rejection] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Peers that this member cannot reach, with the error."""
    checkpoint_steps: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class CallEnded:
    """A call was answered, refused, or not answered in its time (RetryError)."""

    call: "CallLeader"
    error: ShoalError | None = None
    chance: float = 1.0
    """Random number from 0 to 1, for the next pause."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatDue:
    """`heartbeat_s` have passed. The fields state the trainer's activity, as in a `Beat`."""

    has_recent_beat: bool = False
    """True if the launcher's heartbeats were accepted recently."""
    moved: int = 0
    waits: bool = False
    own_code_s: float = 0.0
    loads: bool = False


@dataclass(frozen=True, kw_only=True)
class HeartbeatRefused:
    """The coordinator answered a heartbeat with an error."""

    error: ShoalError


# --- requests and reports of the trainer ---


@dataclass(frozen=True, kw_only=True)
class JoinWanted:
    within_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProposalMade:
    proposal: pb.Proposal


@dataclass(frozen=True, kw_only=True)
class GenerationBroughtUp:
    """The first collective of the record's generation passed."""

    record: pb.GenerationRecord


@dataclass(frozen=True, kw_only=True)
class CollectiveFailed:
    error: str
    own: bool = False
    state_lost: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainerStopped:
    """Report after a break: the optimizer steps in the trainer's state."""

    step: int
    has_state: bool
    enough_for_call: int = 0


@dataclass(frozen=True, kw_only=True)
class PauseBegun:
    reason: str
    limit_s: float


@dataclass(frozen=True)
class PauseEnded:
    pass


@dataclass(frozen=True, kw_only=True)
class DrainWanted:
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaveWanted:
    completed: bool
    reason: str
    timeout_s: float | None
    """None: a few seconds; if `completed`, until a coordinator answers or the membership ends."""
    failed: bool = False
    """True if training has ended without a usable result."""


@dataclass(frozen=True, kw_only=True)
class WorkDone:
    """The member stays without a step left (`finished`), or closes the job to newcomers."""

    reason: str
    finished: bool = False
    closes: bool = False


@dataclass(frozen=True)
class ThreadFailed:
    """A thread of the membership ended with an unexpected error."""

    error: ShoalError


@dataclass(frozen=True)
class SessionClosed:
    """The session was closed: no further request is sent."""


Event = (
    NoticeReceived
    | StreamEnded
    | RosterValidated
    | CallEnded
    | HeartbeatDue
    | HeartbeatRefused
    | JoinWanted
    | ProposalMade
    | GenerationBroughtUp
    | CollectiveFailed
    | TrainerStopped
    | PauseBegun
    | PauseEnded
    | DrainWanted
    | LeaveWanted
    | WorkDone
    | ThreadFailed
    | SessionClosed
)


TrainerEvent = ProposalMade | GenerationBroughtUp | TrainerStopped | CollectiveFailed | WorkDone
"""Events that are repeated until they are answered."""


def heartbeat_request(event: HeartbeatDue, token: Token, step: int) -> pb.HeartbeatRequest:
    """A member's own heartbeat."""
    one = pb.Beat(
        token=token,
        step=step,
        moved=event.moved,
        waits=event.waits,
        own_code_s=event.own_code_s,
        loads=event.loads,
    )
    return pb.HeartbeatRequest(beats=[one])


# --- effects, carried out in order by the thread that submitted the event ---


class Persistence(enum.Enum):
    """Handling of an unanswered call. A refused call is repeated only after a
    CertificateRefused."""

    UNTIL_ANSWERED = enum.auto()
    """Repeated until `give_up_s`, while the trainer waits. The call is idempotent."""
    WITH_STREAM = enum.auto()
    """Not repeated: the stream is closed, and a notice on the next stream causes the call again."""
    FOR_A_TIME = enum.auto()
    """A request to drain: repeated until `give_up_s`; then the member leaves."""
    ONCE = enum.auto()
    """Logged and dropped: a new leader gets the report again, or the next call includes it. The
    report of a pause is repeated with the next heartbeat."""
    LAST = enum.auto()
    """The call to leave. Repeated until `give_up_s` (0: not at all) or the membership ends: a
    coordinator notices a leave by itself, but not that the work is done."""


FOR_MEMBERS = (Persistence.UNTIL_ANSWERED, Persistence.WITH_STREAM)
"""Calls of no use once the membership has ended."""

Request = (
    pb.ProposeRequest
    | pb.AnswerRequest
    | pb.SettleRequest
    | pb.OfferRequest
    | pb.ReadyRequest
    | pb.ReportBrokenRequest
    | pb.PauseRequest
    | pb.LeaveRequest
    | pb.DrainRequest
    | pb.HeartbeatRequest
)


@dataclass(frozen=True, kw_only=True)
class CallLeader:
    """A call to the leader; its end is an event, `CallEnded`."""

    request: Request
    persistence: Persistence
    timeout_s: float
    after_s: float = 0.0
    since_s: float = 0.0
    give_up_s: float = 0.0
    num_failures: int = 0
    back_off: BackOff = field(default_factory=BackOff, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class OpenStream:
    request: pb.AttendRequest
    after_s: float = 0.0


@dataclass(frozen=True)
class CancelStream:
    pass


@dataclass(frozen=True, kw_only=True)
class FindLeader:
    """Choose another coordinator after this error."""

    error: ShoalError


@dataclass(frozen=True, kw_only=True)
class ValidateRoster:
    """Accept or reject the roster; the answer is a `RosterValidated`."""

    prepare: pb.Prepare
    digest: str
    from_checkpoint: bool
    """True if no member of the roster has the job's state."""


@dataclass(frozen=True, kw_only=True)
class BreakGeneration:
    """The generation is over: abort its collectives."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class AskForDrain:
    """Submit the wish to leave again, as a `DrainWanted`."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ClaimBeats:
    """Ask the launcher to send heartbeats for this member."""

    token: Token
    heartbeat_s: float
    patience_s: float


@dataclass(frozen=True)
class UnclaimBeats:
    """Stop the launcher's heartbeats for this member."""


@dataclass(frozen=True, kw_only=True)
class ReportEnding:
    """Report the error that ended the membership to the launcher."""

    error: ShoalError


@dataclass(frozen=True, kw_only=True)
class LogMessage:
    event: str
    fields: Mapping[str, object]
    is_warning: bool = False
    is_detail: bool = False


@dataclass(frozen=True, kw_only=True)
class RaiseError:
    """End the trainer's call with this error; later effects are discarded."""

    error: ShoalError


Effect = (
    CallLeader
    | OpenStream
    | CancelStream
    | FindLeader
    | ValidateRoster
    | BreakGeneration
    | AskForDrain
    | ClaimBeats
    | UnclaimBeats
    | ReportEnding
    | LogMessage
    | RaiseError
)


# --- decisions for the trainer ---


@dataclass(frozen=True)
class StepBegun:
    """The step has begun."""


@dataclass(frozen=True, kw_only=True)
class BringUpGeneration:
    """Bring this generation up."""

    record: pb.GenerationRecord


@dataclass(frozen=True)
class HandOver:
    """Hand over the data that the others need, then ask again."""


@dataclass(frozen=True, kw_only=True)
class WaitUntil:
    """Ask again after the next event, at the latest at this time."""

    until_s: float


@dataclass(frozen=True, kw_only=True)
class GenerationOver:
    """Result of a wait."""

    over: bool


BEGUN, HAND_OVER = StepBegun(), HandOver()
