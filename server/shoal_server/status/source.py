"""Interface through which the status endpoint reads its coordinator."""

from collections.abc import Sequence
from typing import Protocol

from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.status.views import (
    GenerationView,
    JobDetail,
    MemberView,
    OutputView,
    PublishedSeriesView,
    Readiness,
    ShardsView,
)


class StatusSource(Protocol):
    """A coordinator, seen from its status page. Answers come from memory, except `generations`,
    `shards` and `output`. Jobs come without what their members reported to the board."""

    def readiness(self) -> Readiness: ...

    def jobs(self) -> Sequence[JobDetail]:
        """List the jobs that this coordinator knows, including ended ones, and ones that are still
        being read from etcd, without their generations."""
        ...

    def job(self, name: str) -> JobDetail | None:
        """A job with its newest generations; None if there is none of that name. Raises Unavailable
        while the job is being read from etcd."""
        ...

    async def generations(self, name: str) -> Sequence[GenerationView]:
        """The newest decided generations of a job, the newest first. Those of a job that ended
        under an earlier leader are read from etcd: raises Unavailable, and JobQuarantined for
        records that do not parse."""
        ...

    def member(self, name: str, member_id: str) -> MemberView | None:
        """A member of a job; None if there is no such member or job."""
        ...

    def process(self, name: str, member_id: str) -> str | None:
        """Public id of the member's current process; None if there is no such member."""
        ...

    async def shards(self, job: str) -> ShardsView | None:
        """Shards of a job; None if it has no parameter shards. Raises Unavailable without etcd, and
        InternalError for records that do not parse."""
        ...

    def weights(self, job: str = "") -> Sequence[PublishedSeriesView]:
        """Series of published weights of a job, or all series if `job` is empty, by name."""
        ...

    async def output(
        self, job: str, member_id: str, who: CallerProof, after: str | None, before: str | None
    ) -> OutputView:
        """Lines that a member printed: the newest ones, or those after or before a position from an
        earlier answer. Raises UnknownJob, UnknownMember, AccessDenied, NotLeader, Unavailable,
        Overloaded, and InvalidSpec for both positions."""
        ...
