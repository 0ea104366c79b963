"""Actions of a `JobDriver`, for its edge to carry out in order."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shoal_server.core.driver.job_write import JobWrite
from shoal_server.core.generations.roster import GenerationRecord
from shoal_server.core.membership.events import LogJobEvent, Notice


class MemberStream(Protocol):
    """Stream of notices to one process of a member."""

    @property
    def member_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...


StreamT = TypeVar("StreamT", bound=MemberStream)
CallT = TypeVar("CallT")


@dataclass(frozen=True, kw_only=True)
class PersistWrite:
    """Make the write durable, then call `JobDriver.written`, or `fail`. One write is in progress at
    a time."""

    write: JobWrite


@dataclass(frozen=True, kw_only=True)
class PublishRecord:
    """Show the durable record to readers."""

    record: GenerationRecord


@dataclass(frozen=True, kw_only=True)
class SendOnStream(Generic[StreamT]):
    stream: StreamT
    notice: Notice


@dataclass(frozen=True, kw_only=True)
class CloseStream(Generic[StreamT]):
    """Close the stream after its queued notices."""

    stream: StreamT


@dataclass(frozen=True, kw_only=True)
class ForgetMember:
    """Forget a process that is no longer a member."""

    member_id: str
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class AnswerCall(Generic[CallT]):
    """Answer the call, or raise its error. Its effects are durable, unless the error ended the
    driver."""

    call: CallT
    error: Exception | None = None
    """`EventRefused`, or the error that ended the driver."""


Action = (
    PersistWrite
    | PublishRecord
    | SendOnStream[StreamT]
    | CloseStream[StreamT]
    | ForgetMember
    | AnswerCall[CallT]
    | LogJobEvent
)
