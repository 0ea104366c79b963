"""Actor of one job: carries out the actions that `core.driver` decides.

Actions are writes to etcd, notices, replies to waiting calls and timers.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial

import structlog

from shoal_proto.errors import (
    Fenced,
    GenerationBroken,
    NotLeader,
    ShoalError,
    Unavailable,
)
from shoal_proto.incarnation import public_id
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.jobs.streams import Encoder, NewestRosters, NoticeStream
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.durable import DurableJobs
from shoal_server.coordinator.persistence.records import Records
from shoal_server.coordinator.persistence.stored_generations import StoredGenerations
from shoal_server.coordinator.persistence.stored_jobs import StoredJobs
from shoal_server.core.driver.actions import (
    Action,
    AnswerCall,
    CloseStream,
    ForgetMember,
    PersistWrite,
    PublishRecord,
    SendOnStream,
)
from shoal_server.core.driver.job_driver import JobDriver
from shoal_server.core.driver.job_write import JobWrite
from shoal_server.core.driver.liveness import HeartbeatHistory
from shoal_server.core.generations.progress import JobResult
from shoal_server.core.generations.roster import GenerationRecord
from shoal_server.core.job.job import Job
from shoal_server.core.membership.events import (
    EventRefused,
    HeartbeatReceived,
    LogJobEvent,
    MemberEvent,
)
from shoal_server.core.membership.phases import OVER, Phase
from shoal_server.core.processes import MemberProcess
from shoal_server.serving.admission.config import JobLimits
from shoal_server.status.board import DETAILS, StatusBoard
from shoal_server.status.history.change_reports import REPORTED_WITHIN_S

log = structlog.get_logger(__name__)

Call = asyncio.Future[None]


@dataclass(frozen=True, kw_only=True)
class JobDependencies:
    """Dependencies shared by all jobs."""

    jobs: DurableJobs
    stored: StoredJobs
    board: StatusBoard
    clock: Callable[[], float]
    on_lost_leadership: Callable[[str], None]
    on_failed: Callable[[str, Exception], ShoalError]
    """Called with (job, error) if the job cannot continue; returns its callers' error."""
    on_member_lost: Callable[[str, str, str], None]
    """Called with (job, member_id, incarnation) of each member that is gone."""
    on_change: Callable[[str], None]
    """Called with (job) after each step of the state machine, before members are notified."""
    result_of: Callable[[str], JobResult]
    """Called with (job) of an ended job; returns the known part of its result."""
    max_jobs: int = JobLimits.max_jobs


class JobActor:
    def __init__(
        self,
        job: Job,
        dependencies: JobDependencies,
        records: Sequence[GenerationRecord] = (),
        *,
        read_records: Callable[[], Awaitable[Sequence[GenerationRecord]]] | None = None,
        generations: StoredGenerations | None = None,
    ) -> None:
        """`read_records` reads older records on demand. `generations`: the numbers of those in
        etcd."""
        self.job = job
        self.inherited_generation = job.last_generation
        """Newest generation from an earlier leader, or from before a quarantine; 0 without one."""
        self.records = Records(records, read_records)
        self._dependencies = dependencies
        self._driver: JobDriver[NoticeStream, Call] = JobDriver(job, dependencies.clock())
        self.rosters = NewestRosters(job.spec.job)
        self._generations = generations or StoredGenerations()
        self._encoder = Encoder(job, self.rosters)
        self._actions: deque[Action[NoticeStream, Call]] = deque()
        self._is_acting = False
        self._writing: asyncio.Task[None] | None = None
        self._cause = copy_context()
        """Context of the newest step, for the trace of the next write."""
        self._woken = asyncio.Event()
        self._wakes_s = -math.inf

    # --- from the services ---

    async def submit(self, event: MemberEvent) -> None:
        """Submit the event to the state machine, and return once the decision is durable.

        Raises the refusal of a refused event once its reason is durable, and the error that ended
        the actor, such as NotLeader or JobQuarantined.
        """
        await self._decided(partial(self._driver.submit, event))

    async def stop(self, reason: str) -> None:
        """Have all members leave at a step boundary; do nothing for a job that is over. Like the
        next three methods, raises the error that ended the actor."""
        await self._decided(partial(self._driver.stop, reason))

    async def abandon(self, reason: str) -> None:
        """Declare the job failed, unless it has members or is over."""
        await self._decided(partial(self._driver.abandon, reason))

    async def keep_result(self, result: JobResult) -> None:
        """Store the result of a job that is over."""
        await self._decided(partial(self._driver.keep_result, result))

    async def retry(self, reason: str, *, from_scratch: bool) -> None:
        """Allow members to join the job again. Raises the job's refusal if it is finished or has
        members, or, without `from_scratch`, if its records were removed."""
        await self._decided(partial(self._driver.retry, reason, from_scratch=from_scratch))

    async def _decided(
        self, decide: Callable[[Call, float], Sequence[Action[NoticeStream, Call]]]
    ) -> None:
        call = asyncio.get_running_loop().create_future()
        with self._failing_job():
            self._apply_step(decide(call, self._dependencies.clock()))
        await self._answered(call)

    async def wait_durable(self, within_s: float) -> None:
        """Wait until all decisions are durable. Raises Unavailable at the timeout, or the write's
        error."""
        call = asyncio.get_running_loop().create_future()
        self._do(self._driver.wait(call, self._dependencies.clock()))
        try:
            async with asyncio.timeout(within_s):
                await self._answered(call)
        except TimeoutError:
            raise Unavailable(
                f"decisions for job {self.job.spec.job} are not in etcd yet",
                seen=f"nothing written within {within_s:g} s",
                expected="an etcd that answers",
            ) from None

    async def _answered(self, call: Call) -> None:
        try:
            await call
        except EventRefused as refused:
            raise codec.refusal_to_error(refused.refusal, self.job.last_generation) from refused

    def open_stream(self, member_id: str, incarnation: str) -> NoticeStream:
        """Open a stream for the member's notices, in place of an earlier one."""
        stream = NoticeStream(member_id=member_id, incarnation=incarnation)
        with self._failing_job():
            self._do(self._driver.open_stream(stream, self._dependencies.clock()))
        return stream

    def end_stream(self, stream: NoticeStream) -> None:
        """End a stream; without another one, the member is disconnected."""
        with self._failing_job():
            self._apply_step(self._driver.end_stream(stream, self._dependencies.clock()))

    def note(self, event: MemberEvent) -> None:
        """Apply an event whose caller does not wait until its effects are durable."""
        with self._failing_job():
            self._apply_step(self._driver.note(event, self._dependencies.clock()))

    def heartbeat(self, event: HeartbeatReceived, step: int) -> None:
        """Record a heartbeat. `step`: the member's step, as reported."""
        with self._failing_job():
            self._driver.heartbeat(event, step, self._dependencies.clock())

    @property
    def has_open_stream(self) -> bool:
        """True if any process, admitted or not, has an open stream."""
        return any(True for _ in self._driver.streams)

    @property
    def is_writing(self) -> bool:
        """True if a decision is not durable yet."""
        return self._driver.is_writing

    @property
    def heartbeats(self) -> Mapping[str, HeartbeatHistory]:
        """Heartbeats by member id."""
        return self._driver.liveness.heartbeats

    def trainers(self) -> list[MemberProcess]:
        """Processes that may train at their own pace: the members of the running and of the newest
        committed roster, if asynchronous."""
        rosters = [r for r in (self.job.previous, self.job.running) if r and not r.synchronous]
        members = [m for roster in rosters for m in self.job.members_of(roster)]
        return [MemberProcess(m.member_id, m.incarnation) for m in members]

    def authorize(self, token: Token) -> None:
        """Raise Fenced unless the token's incarnation is a member; for an expelled incarnation, its
        refusal."""
        member = self.job.members.get(token.member_id)
        if member is None or member.incarnation != token.incarnation:
            if refusal := self.job.table.expelled.get(token.incarnation):
                raise codec.refusal_to_error(refusal, self.job.last_generation)
            replaced = {"replaced_by": public_id(member.incarnation)} if member else {}
            raise Fenced(
                f"{token.member_id} is not a member of job {token.job}",
                seen=f"process {public_id(token.incarnation)}",
                expected=f"process {public_id(member.incarnation)}"
                if member
                else "a process that has joined",
                fix="It may have been declared lost: join again.",
                details={"generation": str(self.job.last_generation), **replaced},
            )

    def authorize_generation(self, token: Token) -> None:
        """Raise what `authorize` raises, and GenerationBroken unless the token's generation is in
        force."""
        self.authorize(token)
        in_force = self.generations_in_force()
        if token.generation not in in_force:
            raise GenerationBroken(
                f"generation {token.generation} of job {token.job} is not in force",
                seen=f"generation {token.generation}",
                expected=f"one of {in_force}" if in_force else "the next one to form",
                fix="Report your step (`Settle`), and wait for the next generation.",
                details={"generation": str(self.job.last_generation)},
            )

    def generations_in_force(self) -> list[int]:
        """Numbers of the running generation and of the one in bring-up."""
        coming = self.job.attempt if self.job.phase is Phase.COMMITTED else None
        return [r.generation for r in (self.job.running, coming) if r is not None]

    async def end(self, why: ShoalError | None = None) -> None:
        """End all streams and waiting calls; members then look for the leader.

        Pending writes are cancelled, because one could otherwise reach etcd in a later term of this
        coordinator.
        """
        actions = self._driver.end(why or NotLeader("this coordinator no longer leads"))
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        self._do(actions)

    @contextmanager
    def _failing_job(self) -> Iterator[None]:
        """Fail the whole job if the block raises: its state may be half-changed."""
        try:
            yield
        except Exception as error:
            failure = self._failure(error)
            self._do(self._driver.fail(failure))
            raise failure from error

    # --- time ---

    async def run(self) -> None:
        """Wake the driver when its timers are due, until the job is over."""
        clock = self._dependencies.clock
        while self.job.phase not in OVER:
            self._woken.clear()
            self._wakes_s = self._driver.wakes_s(clock())
            wait_s = max(self._wakes_s - clock(), 0.0)
            try:
                async with asyncio.timeout(wait_s if math.isfinite(wait_s) else None):
                    await self._woken.wait()
            except TimeoutError:
                pass  # a timer is due
            if self._driver.wakes_s(clock()) <= clock():
                self._apply_step(self._driver.wake(clock()))

    # --- what the driver decides ---

    def _do(self, actions: Sequence[Action[NoticeStream, Call]]) -> None:
        self._actions.extend(actions)
        if self._is_acting:
            return
        self._is_acting = True
        while self._actions:
            action = self._actions.popleft()
            try:
                self._act(action)
            except Exception as error:  # noqa: BLE001 - raised to all callers
                self._give_up(error)
        self._is_acting = False
        is_over = self.job.phase in OVER
        if is_over or self._driver.wakes_s(self._dependencies.clock()) < self._wakes_s:
            self._woken.set()

    def _give_up(self, error: Exception) -> None:
        failure = self._failure(error)
        discarded, self._actions = self._actions, deque()
        for action in discarded:
            if isinstance(action, AnswerCall):
                self._actions.append(AnswerCall(call=action.call, error=failure))
        self._actions.extend(self._driver.fail(failure))

    def _apply_step(self, actions: Sequence[Action[NoticeStream, Call]]) -> None:
        self._cause = copy_context()
        self._dependencies.on_change(self.job.spec.job)
        self._do(actions)

    def _act(self, action: Action[NoticeStream, Call]) -> None:
        match action:
            case PersistWrite():
                writing = self._persist(action.write)
                self._writing = asyncio.get_running_loop().create_task(writing, context=self._cause)
            case PublishRecord():
                self.records.keep(action.record)
            case SendOnStream():
                action.stream.send_notice(action.notice, self._encoder)
            case CloseStream():
                action.stream.end()
            case ForgetMember():
                job = self.job.spec.job
                self._dependencies.on_member_lost(job, action.member_id, action.incarnation)
            case AnswerCall():
                _settle(action.call, action.error)
            case LogJobEvent():
                self._note(action)

    async def _persist(self, write: JobWrite) -> None:
        try:
            await self._dependencies.jobs.persist(self._with_result(write), self._generations)
        except Exception as error:  # noqa: BLE001 - raised to all callers
            self._do(self._driver.fail(self._failure(error)))
        else:
            self._do(self._driver.written(self._dependencies.clock()))

    def _with_result(self, write: JobWrite) -> JobWrite:
        """Add the known result to the write that ends the job: a successor does not know the last
        reported loss."""
        state = write.state
        if state is None or not state.finished or state.tally.result:
            return write
        tally = replace(state.tally, result=self._dependencies.result_of(write.job))
        return replace(write, state=replace(state, tally=tally))

    def _failure(self, error: Exception) -> Exception:
        """Error for all callers, since the state in memory is then ahead of the durable state."""
        if isinstance(error, NotLeader):
            self._dependencies.on_lost_leadership(str(error))
            return error
        log.error("effects_failed", job=self.job.spec.job, error=repr(error))
        return self._dependencies.on_failed(self.job.spec.job, error)

    def _note(self, effect: LogJobEvent) -> None:
        job, board = self.job.spec.job, self._dependencies.board
        if effect.summary is not None:
            board.record_generation(job, effect.summary)
            asyncio.get_running_loop().call_later(REPORTED_WITHIN_S, board.log_due_reports, job)
            return
        (log.debug if effect.kind in DETAILS else log.info)(
            effect.kind,
            job=job,
            member=effect.member_id,
            generation=effect.generation,
            reason=effect.reason,
        )
        board.event(
            job,
            effect.kind,
            effect.reason,
            member_id=effect.member_id,
            generation=effect.generation,
        )


def _settle(call: Call, error: Exception | None) -> None:
    if call.done():
        return
    if error is None:
        call.set_result(None)
    else:
        call.set_exception(error)
