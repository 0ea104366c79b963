"""What the edge around a `JobDriver` has to do, in the order in which it is told to."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shoal_server.core.driver.job_write import JobWrite
from shoal_server.core.generations.roster import Record
from shoal_server.core.membership.events import Log, Notice


class MemberStream(Protocol):
    """What carries notices to one process of a member."""

    @property
    def member_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...


StreamT = TypeVar("StreamT", bound=MemberStream)
CallT = TypeVar("CallT")


@dataclass(frozen=True, kw_only=True)
class Persist:
    """Make this durable, then call `JobDriver.written`, or `fail`. One is under way at a time."""

    write: JobWrite


@dataclass(frozen=True, kw_only=True)
class Publish:
    """The record is durable: show it to those who ask."""

    record: Record


@dataclass(frozen=True, kw_only=True)
class Send(Generic[StreamT]):
    stream: StreamT
    notice: Notice


@dataclass(frozen=True, kw_only=True)
class CloseStream(Generic[StreamT]):
    """Nothing more comes; what was sent before still arrives."""

    stream: StreamT


@dataclass(frozen=True, kw_only=True)
class MemberGone:
    """This process is no member any more."""

    member_id: str
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class Reply(Generic[CallT]):
    """All that the call led to is durable: it may return, or raise the error."""

    call: CallT
    error: Exception | None = None
    """`Refused`, or what ended the driver."""


Action = Persist | Publish | Send[StreamT] | CloseStream[StreamT] | MemberGone | Reply[CallT] | Log
