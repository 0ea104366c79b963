"""The Membership service: submits calls to the jobs' actors."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from shoal_proto.errors import (
    Fenced,
    InvalidSpec,
    ShoalError,
)
from shoal_proto.exit_codes import exit_cause
from shoal_proto.incarnation import public_id
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.protocol import OWN_PROTOCOLS, ProtocolRange
from shoal_proto.status import to_detail
from shoal_proto.traces import tracing
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipServicer
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.coordinator.jobs.operations import JobOperations
from shoal_server.coordinator.jobs.proofs import (
    check_asker,
    check_launcher,
    check_member,
)
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.jobs.requests import MemberRequest, event_of, joined
from shoal_server.coordinator.persistence import codec
from shoal_server.core.membership import events
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import Phase
from shoal_server.serving.access.caller_proof import CallerProof, proof_of_caller
from shoal_server.serving.access.checks import known_caller
from shoal_server.serving.rpc import Context

log = structlog.get_logger(__name__)

Reset = Callable[[str], Awaitable[bool]]
"""Resets a job, as `JobReset.reset`."""


class MembershipService(MembershipServicer):
    def __init__(
        self,
        registry: Registry,
        reset: Reset,
        *,
        http_url: Callable[[], str],
        report_url: Callable[[], str],
    ) -> None:
        self._registry = registry
        self._operations = JobOperations(registry)
        self._reset = reset
        self._http_url = http_url
        self._report_url = report_url

    # Encoded once, since many members get the same notice.
    async def Attend(  # type: ignore[override]
        self, request: pb.AttendRequest, context: Context
    ) -> AsyncIterator[pb.Notice | bytes]:
        protocol = _agreed_protocol(request)
        _check_attendance(request)
        token = request.token
        spec = codec.spec_from_pb(request.spec, token.job_secret)
        if problem := spec.problem():
            raise InvalidSpec(
                f"job {spec.job} cannot have these bounds",
                seen=problem,
                fix="Set 1 <= min_members <= desired_members <= max_members, and last_call_s to at"
                " least 0.",
            )
        self._registry.require_leading()
        self._registry.check_run(token)
        actor = self._registry.find_or_create(spec)
        try:
            check_member(actor.job.spec, token.job_secret, has_members=bool(actor.job.members))
            _check_not_expelled(actor, token)
            stream = actor.open_stream(token.member_id, token.incarnation)
            try:
                with tracing.span("Membership/Attend", token):
                    await actor.submit(joined(request))
                yield self._admitted(actor, protocol)
                while (notice := await stream.notices.get()) is not None:
                    yield notice
            finally:
                actor.end_stream(stream)
        finally:
            await self._registry.drop_if_empty(actor)

    def _admitted(self, actor: JobActor, protocol: int) -> pb.Notice:
        admitted = pb.Admitted(
            limits=codec.limits_to_pb(self._registry.limits),
            phase=actor.job.phase.value,
            http_url=self._report_url(),
            protocol=protocol,
        )
        return pb.Notice(reason=f"admitted: {actor.job.reason}", admitted=admitted)

    async def Propose(self, request: pb.ProposeRequest, context: Context) -> pb.Ack:
        return await self._submit(request)

    async def Answer(self, request: pb.AnswerRequest, context: Context) -> pb.Ack:
        return await self._submit(request)

    async def Settle(self, request: pb.SettleRequest, context: Context) -> pb.Ack:
        return await self._submit(request)

    async def Offer(self, request: pb.OfferRequest, context: Context) -> pb.Ack:
        return await self._submit(request)

    async def Ready(self, request: pb.ReadyRequest, context: Context) -> pb.Ack:
        return await self._submit(request)

    async def ReportBroken(self, request: pb.ReportBrokenRequest, context: Context) -> pb.Ack:
        return await self._submit(request)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.Ack:
        return await self._submit(request)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.Ack:
        return await self._submit(request)

    async def ReportExit(self, request: pb.ReportExitRequest, context: Context) -> pb.Ack:
        """Declare a process lost, on its launcher's report. Does nothing unless the process is the
        present member's. Raises what `check_launcher` raises."""
        actor = self._registry.find(request.job)
        member = _process(actor, request)
        if member is not None:
            check_launcher(actor.job.spec, member, request, known_caller(context))
            how = exit_cause(request.exit_code)
            reason = f"its launcher saw it end ({how})"
            await actor.submit(events.MemberLost(**_identity(member), reason=reason, cause=how))
        return _ack(actor)

    async def ReportHalt(self, request: pb.ReportHaltRequest, context: Context) -> pb.Ack:
        """Mark a process halted or continued, on its launcher's report. Does nothing unless the
        process is the present member's. Raises what `check_launcher` raises."""
        actor = self._registry.find(request.job)
        member = _process(actor, request)
        if member is not None:
            check_launcher(actor.job.spec, member, request, known_caller(context))
            event = events.ProcessHalted if request.halted else events.ProcessContinued
            # An answer that waits for etcd would hold up the report that the process goes on.
            actor.note(event(**_identity(member)))
        return _ack(actor)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.Ack:
        # A member that drains itself gives its incarnation in place of the job's secret. The
        # incarnation then decides which process is meant, not `public_id`, which everybody can
        # read.
        process = public_id(request.incarnation) if request.incarnation else request.public_id
        who = proof_of_caller(
            known_caller(context), request.job_secret, is_itself=bool(request.incarnation)
        )
        actor = await self._operations.drain(
            request.job, request.member_id, request.reason, who, process=process
        )
        return _ack(actor)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        self._registry.require_leading()
        return pb.HeartbeatReply(replies=[self._beat(beat) for beat in request.beats])

    def _beat(self, beat: pb.Beat) -> pb.BeatReply:
        try:
            actor = self._registry.find_for(beat.token)
            actor.authorize(beat.token)
            actor.heartbeat(heartbeat(beat), beat.step)
        except ShoalError as error:
            return pb.BeatReply(error=to_detail(error))
        return pb.BeatReply(generation=actor.job.last_generation, phase=actor.job.phase.value)

    # Encoded, since many hosts request the same roster.
    async def GetRoster(  # type: ignore[override]
        self, request: pb.GetRosterRequest, context: Context
    ) -> bytes:
        return self._registry.find(request.job).rosters.answer(request.digest)

    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.JobStanding:
        return _standing(self._registry.find(request.job))

    async def GetCluster(self, request: pb.GetClusterRequest, context: Context) -> pb.Cluster:
        self._registry.require_leading()
        return pb.Cluster(http_url=self._http_url())

    async def StopJob(self, request: pb.StopJobRequest, context: Context) -> pb.JobStanding:
        return _standing(
            await self._operations.stop(request.job, request.reason, self._who(request, context))
        )

    async def RetryJob(self, request: pb.RetryJobRequest, context: Context) -> pb.JobStanding:
        actor = await self._operations.retry(
            request.job, self._who(request, context), from_scratch=request.from_scratch
        )
        return _standing(actor)

    async def ResetJob(self, request: pb.ResetJobRequest, context: Context) -> pb.ResetJobReply:
        if not is_name(request.job):
            raise InvalidSpec("job is not a valid name", seen=repr(request.job), expected=NAME_RULE)
        digest = await self._registry.secret_digest(request.job)
        check_asker(request.job, digest, self._who(request, context))
        return pb.ResetJobReply(existed=await self._reset(request.job))

    @staticmethod
    def _who(
        request: pb.StopJobRequest | pb.RetryJobRequest | pb.ResetJobRequest, context: Context
    ) -> CallerProof:
        return proof_of_caller(known_caller(context), request.job_secret)

    async def _submit(self, request: MemberRequest) -> pb.Ack:
        event = event_of(request)
        actor = self._registry.find_for(request.token)
        await actor.submit(event)
        return _ack(actor)


def _agreed_protocol(request: pb.AttendRequest) -> int:
    oldest = request.oldest_protocol or request.protocol
    return OWN_PROTOCOLS.negotiate(ProtocolRange(oldest, request.protocol))


def _check_attendance(request: pb.AttendRequest) -> None:
    for kind, name in (("job", request.spec.job), ("member_id", request.token.member_id)):
        if not is_name(name):
            raise InvalidSpec(f"{kind} is not a valid name", seen=repr(name), expected=NAME_RULE)
    if request.token.job != request.spec.job:
        raise InvalidSpec(
            "the token and the spec name different jobs",
            seen=request.token.job,
            expected=request.spec.job,
        )
    if not request.token.incarnation:
        raise Fenced("the token has no incarnation", expected="a fresh UUID for each process start")


def heartbeat(beat: pb.Beat) -> events.HeartbeatReceived:
    """Event of a heartbeat. A time that is not finite counts as 0."""
    own_code_s = beat.own_code_s if math.isfinite(beat.own_code_s) else 0.0
    return events.HeartbeatReceived(
        **_identity(beat.token),
        moved=beat.moved,
        waits=beat.waits,
        own_code_s=own_code_s,
        loads=beat.loads,
    )


def _check_not_expelled(actor: JobActor, token: Token) -> None:
    """Raise what `JobActor.authorize` raises for a former member, unless the job is completing.
    Only a token of a former member has a generation. This leader may have no record of an expulsion
    by an earlier leader."""
    if token.generation and not actor.job.is_completing:
        actor.authorize(token)


def _identity(who: Token | MemberState) -> dict[str, str]:
    return {"member_id": who.member_id, "incarnation": who.incarnation}


def _process(
    actor: JobActor, request: pb.ReportExitRequest | pb.ReportHaltRequest
) -> MemberState | None:
    member = actor.job.members.get(request.member_id)
    if member is None or (member.info.pid, member.info.host) != (request.pid, request.host):
        return None
    return member


def _ack(actor: JobActor) -> pb.Ack:
    lost = actor.job.loss_refusal
    return pb.Ack(
        generation=actor.job.last_generation,
        phase=actor.job.phase.value,
        lost=to_detail(codec.refusal_to_error(lost, actor.job.last_generation)) if lost else None,
    )


def _standing(actor: JobActor) -> pb.JobStanding:
    job = actor.job
    return pb.JobStanding(
        phase=job.phase.value,
        finished=job.phase is Phase.FINISHED or job.is_completing,
        reason=job.reason,
        member_ids=sorted(job.members),
    )
