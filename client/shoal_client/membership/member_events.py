"""What a member hears (events), asks for (effects) and answers its trainer (decisions)."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal_proto.back_off import BackOff
from shoal_proto.errors import ShoalError
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

# --- what happens: to the stream, to calls ---


@dataclass(frozen=True, kw_only=True)
class NoticeCame:
    """The coordinator says something on the stream."""

    notice: pb.Notice
    refusal: ShoalError | None = None
    """What a notice of the kind `refused` tells."""


@dataclass(frozen=True, kw_only=True)
class StreamEnded:
    """Nothing more comes: the stream failed, or a call failed that a notice gave rise to."""

    error: ShoalError | None
    chance: float = 1.0
    """A random number from 0 to 1, for the pause before the next one."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What this member makes of a roster that it was shown."""

    generation: int
    digest: str
    rejections: Sequence[pb.Rejection] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """The peers that it cannot reach, each with what was seen."""
    checkpoint_steps: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class CallEnded:
    """A call was answered (no error), refused, or got no answer in its time (RetryError)."""

    call: "Call"
    error: ShoalError | None = None
    chance: float = 1.0
    """A random number from 0 to 1, for the pause before it is made again."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatDue:
    """`heartbeat_s` have passed; the rest is what the trainer does, as a `Beat` has it."""

    beaten: bool = False
    """Whether the launcher's heartbeats for this member were accepted of late."""
    moved: int = 0
    waits: bool = False
    own_code_s: float = 0.0
    loads: bool = False


@dataclass(frozen=True, kw_only=True)
class HeartbeatRefused:
    """The coordinator knows no such member any more."""

    error: ShoalError


# --- what the trainer wishes, and says ---


@dataclass(frozen=True, kw_only=True)
class JoinWished:
    within_s: float = 0.0
    """How long it waits to be admitted, for the log."""


@dataclass(frozen=True, kw_only=True)
class Proposed:
    proposal: pb.Proposal


@dataclass(frozen=True, kw_only=True)
class BroughtUp:
    """The first collective of the record's generation passed."""

    record: pb.GenerationRecord


@dataclass(frozen=True, kw_only=True)
class CollectiveFailed:
    error: str
    own: bool = False
    state_lost: bool = False


@dataclass(frozen=True, kw_only=True)
class StoodStill:
    """After a break: so many optimizer steps are behind the trainer's state."""

    step: int
    has_state: bool
    enough_for_call: int = 0


@dataclass(frozen=True, kw_only=True)
class PauseBegan:
    reason: str
    limit_s: float


@dataclass(frozen=True)
class PauseEnded:
    pass


@dataclass(frozen=True, kw_only=True)
class DrainWished:
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaveWished:
    completed: bool
    reason: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class WorkDone:
    """The member stays, without a step left (`finished`), or closes the job to newcomers."""

    reason: str
    finished: bool = False
    closes: bool = False


@dataclass(frozen=True)
class ThreadFailed:
    """The membership cannot go on here: one of its threads ended with something unforeseen."""

    error: ShoalError


@dataclass(frozen=True)
class Closed:
    """Nothing more is sent."""


Event = (
    NoticeCame
    | StreamEnded
    | Judged
    | CallEnded
    | HeartbeatDue
    | HeartbeatRefused
    | JoinWished
    | Proposed
    | BroughtUp
    | CollectiveFailed
    | StoodStill
    | PauseBegan
    | PauseEnded
    | DrainWished
    | LeaveWished
    | WorkDone
    | ThreadFailed
    | Closed
)


Said = Proposed | BroughtUp | StoodStill | CollectiveFailed | WorkDone
"""What the trainer says, until somebody has heard it."""


def beat(event: HeartbeatDue, token: Token, step: int) -> pb.HeartbeatRequest:
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


# --- what follows, in order; carried out by who brought the event ---


class Persistence(enum.Enum):
    """What becomes of a call that got no answer. One that is refused is never made again."""

    UNTIL_ANSWERED = enum.auto()
    """Made again until `give_up_s`: the trainer has nothing to do meanwhile, and it may be said
    twice."""
    WITH_STREAM = enum.auto()
    """The stream that gave rise to it is given up: what matters comes again on the next one."""
    FOR_A_TIME = enum.auto()
    """A wish to drain: made again until `give_up_s`; then the member goes without an answer."""
    ONCE = enum.auto()
    """Noted and left: it is said again to a new leader, or the next one says as much."""
    LAST = enum.auto()
    """The word that this member leaves; who does not hear it finds out by itself."""


FOR_MEMBERS = (Persistence.UNTIL_ANSWERED, Persistence.WITH_STREAM)
"""What only a member says: once the membership has ended it need not be heard."""

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
class Call:
    """One call to whoever leads, within `timeout_s`; its end is an event, `CallEnded`."""

    request: Request
    persistence: Persistence
    timeout_s: float
    after_s: float = 0.0
    """Wait so long before it."""
    since_s: float = 0.0
    """When it was made for the first time."""
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
    """Whoever the stream was at has failed with this: turn to another replica."""

    error: ShoalError


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Say what is against this roster: `Judged`. What is rejected anyway needs no network."""

    prepare: pb.Prepare
    digest: str
    from_checkpoint: bool
    """Whether nobody in the roster holds the job's state."""


@dataclass(frozen=True, kw_only=True)
class Break:
    """The generation is over: cut its collectives."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class AskDrain:
    """Bring the wish again as an event of its own, `DrainWished`."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Ask the launcher for heartbeats."""

    token: Token
    heartbeat_s: float
    patience_s: float


@dataclass(frozen=True)
class Unclaim:
    """No heartbeats any more."""


@dataclass(frozen=True, kw_only=True)
class TellEnding:
    """Let the launcher know what ended the membership, whatever the script makes of it."""

    error: ShoalError


@dataclass(frozen=True, kw_only=True)
class Log:
    event: str
    fields: Mapping[str, object]
    is_warning: bool = False
    is_detail: bool = False
    """Of use to who looks for a fault only."""


@dataclass(frozen=True, kw_only=True)
class Raise:
    """What was asked for ends with this error; the effects behind it are void."""

    error: ShoalError


Effect = (
    Call
    | OpenStream
    | CancelStream
    | FindLeader
    | Judge
    | Break
    | AskDrain
    | Claim
    | Unclaim
    | TellEnding
    | Log
    | Raise
)


# --- what the trainer is answered ---


@dataclass(frozen=True)
class Begun:
    """The step has begun."""


@dataclass(frozen=True, kw_only=True)
class BringUp:
    """Bring this generation up."""

    record: pb.GenerationRecord


@dataclass(frozen=True)
class HandOver:
    """The others go on without this member: give them what they need of it, then ask again."""


@dataclass(frozen=True, kw_only=True)
class WaitUntil:
    """Ask again when something has happened, at the latest then."""

    until_s: float


@dataclass(frozen=True, kw_only=True)
class Over:
    """Whether the generation is over, once there is an answer."""

    over: bool


BEGUN, HAND_OVER = Begun(), HandOver()
