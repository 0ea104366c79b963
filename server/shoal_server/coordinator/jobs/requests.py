"""Translation of members' calls to events of the core."""

import math
import re

from shoal_proto.errors import InvalidSpec
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.persistence import codec
from shoal_server.core.generations.roster import Generation, Step
from shoal_server.core.membership import events

MAX_ERROR = 500
MAX_REPORT = 1000
_SOURCE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|cu|h|hpp):\d+\]\s*")
"""Source position in a native library's error."""

MemberRequest = (
    pb.ProposeRequest
    | pb.AnswerRequest
    | pb.SettleRequest
    | pb.OfferRequest
    | pb.ReadyRequest
    | pb.ReportBrokenRequest
    | pb.PauseRequest
    | pb.LeaveRequest
)


def joined(request: pb.AttendRequest) -> events.MemberJoined:
    """Event of a member that opens a stream."""
    return events.MemberJoined(
        **_who(request.token),
        spec=codec.spec_from_pb(request.spec, request.token.job_secret),
        info=codec.info_from_pb(request.info),
        generation=Generation(request.token.generation),
    )


def event_of(request: MemberRequest) -> events.MemberEvent:
    """Event of a member's call. Raises InvalidSpec for numbers out of range."""
    who, generation = _who(request.token), Generation(request.token.generation)
    event: events.MemberEvent
    match request:
        case pb.ProposeRequest():
            event = events.TrainingProposed(
                **who, proposal=codec.proposal_from_pb(request.proposal)
            )
        case pb.AnswerRequest():
            event = _answered(who, request)
        case pb.SettleRequest():
            step = Step(request.step)
            event = events.StepReported(
                **who,
                step=step,
                has_state=request.has_state,
                left=generation,
                enough_for_call=request.enough_for_call,
            )
        case pb.OfferRequest():
            event = events.NextStepReached(
                **who,
                generation=Generation(request.generation),
                next_step=Step(request.next_step),
            )
        case pb.ReadyRequest():
            at = Step(request.step) if request.HasField("step") else None
            event = events.ReadinessReported(**who, generation=generation, step=at)
        case pb.ReportBrokenRequest():
            event = events.BreakReported(
                **who,
                generation=generation,
                error=first_line(request.error)[:MAX_REPORT],
                own=request.own,
                state_lost=request.state_lost,
            )
        case pb.PauseRequest():
            event = (
                _paused(who, request)
                if request.paused
                else events.MemberResumed(**who, number=request.pause_number)
            )
        case pb.LeaveRequest() if request.stays or request.closes:
            event = events.MemberWorkDone(
                **who,
                reason=request.reason,
                generation=generation,
                finished=request.stays,
                closes=request.closes,
            )
        case pb.LeaveRequest():
            event = events.MemberLeft(
                **who,
                completed=request.completed,
                reason=request.reason,
                failed=request.failed and not request.completed,
            )
        case _:
            raise AssertionError(f"no event for {type(request).__name__}")
    return event


def first_line(error: str) -> str:
    """First line of an error, without source positions of native libraries."""
    return _SOURCE.sub("", error.strip().partition("\n")[0]).strip()


def _answered(who: dict[str, str], request: pb.AnswerRequest) -> events.RosterAnswered:
    return events.RosterAnswered(
        **who,
        generation=Generation(request.generation),
        digest=request.digest,
        rejections=tuple(
            events.Rejection(field=r.field, seen=r.seen, expected=r.expected)
            for r in request.rejections
        ),
        unreachable=tuple((u.member_id, u.error[:MAX_ERROR]) for u in request.unreachable),
        checkpoint_steps=tuple(Step(step) for step in request.checkpoint_steps),
    )


def _paused(who: dict[str, str], request: pb.PauseRequest) -> events.MemberPaused:
    return events.MemberPaused(
        **who,
        reason=request.reason[:MAX_ERROR],
        limit_s=_seconds("limit_s", request.limit_s, above=0.0),
        elapsed_s=_seconds("elapsed_s", request.elapsed_s),
        number=request.pause_number,
    )


def _seconds(name: str, value: float, above: float = -1.0) -> float:
    if not (math.isfinite(value) and value > above):
        raise InvalidSpec(
            f"{name} is out of range",
            seen=f"{value:g}",
            expected=f"a finite number of seconds above {above:g}",
        )
    return max(value, 0.0)


def _who(token: Token) -> dict[str, str]:
    return {"member_id": token.member_id, "incarnation": token.incarnation}
