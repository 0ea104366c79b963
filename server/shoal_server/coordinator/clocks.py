"""The Clocks service: decides which members may begin a step in jobs with a staleness bound.

The clocks are only in memory. A new leader lets no member advance until each earlier trainer has
reported its clock again, or is lost.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush

import structlog

from shoal_proto.errors import Fenced, MalformedMessage, NotLeader, ShoalError
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import clocks_pb2 as pb
from shoal_proto.v1.clocks_pb2_grpc import ClocksServicer
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.core.clocks import ClockReport, Clocks, ClockStatus, NoClock
from shoal_server.core.positions import ClockPosition
from shoal_server.core.processes import MemberProcess
from shoal_server.serving.rpc import Context

log = structlog.get_logger(__name__)

Authorize = Callable[[Token], Awaitable[None]]
DeclareLost = Callable[[str, MemberProcess, str], Awaitable[None]]
"""Called with (job, member, reason)."""

MAX_WAIT_S = 10.0
MAX_BOUND = 1 << 20
MAX_JOBS = 256
MAX_GIVEN_UP = 64
"""The heap is compacted once it has this many more finished waits than other ones."""


class _Job:
    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self._waiting: list[tuple[ClockPosition, int, asyncio.Event]] = []
        """Heap by the position that each call waits for."""
        self._by_name: dict[str, asyncio.Event] = {}
        """Event of each waiting member, shared by its calls: a retry may be open beside a half-open
        call."""
        self._num_waits = 0

    async def changed(self, who: MemberProcess) -> None:
        """Return once the member may be able to advance or is lost, another of its waits ends, or
        the job is dropped. Raises NoClock if the member has no clock."""
        event = self._by_name.get(who.member_id)
        if event is None or event.is_set():
            event = self._by_name[who.member_id] = asyncio.Event()
        self._num_waits += 1
        if len(self._waiting) > 2 * len(self._by_name) + MAX_GIVEN_UP:
            self._waiting = [each for each in self._waiting if not each[2].is_set()]
            heapify(self._waiting)
        heappush(self._waiting, (self.clocks.threshold(who), self._num_waits, event))
        try:
            await event.wait()
        finally:
            if self._by_name.get(who.member_id) is event:
                del self._by_name[who.member_id]
            event.set()

    def moved(self) -> None:
        horizon = self.clocks.horizon
        while self._waiting and (self._is_over() or self._may_go_on(horizon)):
            heappop(self._waiting)[2].set()

    def wake(self, member_id: str) -> None:
        if event := self._by_name.pop(member_id, None):
            event.set()

    def wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for _, _, event in waiting:
            event.set()

    def _is_over(self) -> bool:
        return self._waiting[0][2].is_set()

    def _may_go_on(self, horizon: ClockPosition | None) -> bool:
        return horizon is not None and self._waiting[0][0] <= horizon


class ClocksService(ClocksServicer):
    """Clocks of all jobs. `authorize` raises for a stale token. A member that keeps others waiting
    for `stuck_after_s` without a step is declared lost."""

    def __init__(
        self,
        authorize: Authorize,
        declare_lost: DeclareLost,
        clock: Callable[[], float],
        *,
        stuck_after_s: float,
    ) -> None:
        self._authorize = authorize
        self._declare_lost = declare_lost
        self._clock = clock
        self._stuck_after_s = stuck_after_s
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    # --- from the coordinator ---

    def inherit(self, job: str, trainers: Iterable[MemberProcess]) -> None:
        """Start a job that trained under another leader, with its trainers' clocks unknown."""
        self.forget(job)
        self._jobs[job] = _Job(Clocks(trainers, self._clock()))

    def member_lost(self, job: str, member_id: str, incarnation: str) -> None:
        """Remove the clock of a process that was lost or left."""
        known = self._jobs.get(job)
        if known is not None:
            known.clocks.remove(MemberProcess(member_id, incarnation))
            known.wake(member_id)
            known.moved()

    def forget(self, job: str) -> None:
        """Drop a job that is reset or taken over. Waiting calls raise NotLeader."""
        known = self._jobs.pop(job, None)
        if known is not None:
            known.wake_all()

    def forget_all(self) -> None:
        """Drop every job. Waiting calls raise NotLeader."""
        jobs, self._jobs = list(self._jobs.values()), OrderedDict()
        for known in jobs:
            known.wake_all()

    # --- for the status page ---

    def clocks(self, job: str) -> Mapping[str, int]:
        """Rounds of the job's members that have a clock."""
        known = self._jobs.get(job)
        return known.clocks.clocks if known else {}

    def waiting(self, job: str) -> Mapping[str, tuple[str, float]]:
        """Members that wait for their next step or push: the reason, and the start of the wait."""
        known = self._jobs.get(job)
        waits = known.clocks.waiting() if known else ()
        return {name: (reason, since_s) for name, reason, since_s in waits}

    # --- from members ---

    async def Advance(self, request: pb.AdvanceRequest, context: Context) -> pb.AdvanceReply:
        _check(request)
        await self._authorize(request.token)
        job = self._job(request.token.job)
        who = MemberProcess(request.token.member_id, request.token.incarnation)
        report = ClockReport(
            position=ClockPosition(request.clock, request.pulled),
            bound=request.bound,
            enters=request.enters,
            begins=request.begins,
        )
        standing = job.clocks.advance(who, report, self._clock())
        job.moved()
        if not standing.allowed and request.wait_s > 0:
            standing = await self._wait(job, request, who)
        return pb.AdvanceReply(
            clock=standing.clock,
            allowed=standing.allowed,
            slowest=standing.slowest,
            reason=standing.reason,
        )

    async def Rest(self, request: pb.RestRequest, context: Context) -> pb.RestReply:
        await self._authorize(request.token)
        job = self._job(request.token.job)
        job.clocks.rest(
            MemberProcess(request.token.member_id, request.token.incarnation), request.clock
        )
        job.moved()
        return pb.RestReply()

    async def _wait(self, job: _Job, request: pb.AdvanceRequest, who: MemberProcess) -> ClockStatus:
        """Return the member's status once it may advance, or at the timeout, after stuck members
        were declared lost. Raises Fenced if the member is lost, NotLeader if the job was
        dropped."""
        try:
            async with asyncio.timeout(min(request.wait_s, MAX_WAIT_S, self._stuck_after_s)):
                while True:
                    standing = self._standing(job, request.token, who)
                    if standing.allowed:
                        return standing
                    await job.changed(who)
        except TimeoutError:
            await self._drop_stuck(request.token.job, job)
            return self._standing(job, request.token, who)

    def _standing(self, job: _Job, token: Token, who: MemberProcess) -> ClockStatus:
        if self._jobs.get(token.job) is not job:
            raise NotLeader(
                f"the clocks of job {token.job} were dropped",
                seen="a job that was reset or taken over, or a coordinator that does not lead"
                " any more",
                details={"leader": ""},
            )
        try:
            standing = job.clocks.decide_clock(who, self._clock())
        except NoClock:
            raise Fenced(
                f"{who.member_id} is not a member of job {token.job} any more",
                seen=f"process {public_id(who.incarnation)}",
                fix="It may have been declared lost: join again.",
            ) from None
        job.moved()  # `decide_clock` may move the member to a round that others wait for
        return standing

    async def _drop_stuck(self, name: str, job: _Job) -> None:
        for who, reason in job.clocks.overdue(self._stuck_after_s, self._clock()):
            log.warning("member_stuck", job=name, member=who.member_id, reason=reason)
            try:
                await self._declare_lost(name, who, reason)
            except ShoalError as error:
                # Most likely the stuck member is gone.
                log.info("stuck_member_not_lost", member=who.member_id, reason=str(error))

    def _job(self, name: str) -> _Job:
        job = self._jobs.setdefault(name, _Job(Clocks()))
        self._jobs.move_to_end(name)
        if len(self._jobs) > MAX_JOBS:
            idle = [n for n, known in self._jobs.items() if known.clocks.is_idle and n != name]
            if idle:
                del self._jobs[idle[0]]
        return job


def _check(request: pb.AdvanceRequest) -> None:
    if request.bound > MAX_BOUND or not request.token.member_id:
        raise MalformedMessage(
            "a clock without a member, or with a bound out of range",
            seen=f"member_id {request.token.member_id!r}, bound {request.bound}",
            expected=f"the member's token, and a bound of at most {MAX_BOUND}",
        )
