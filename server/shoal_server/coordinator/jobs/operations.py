"""Operations of operators on a job, over gRPC and HTTP."""

from collections.abc import Awaitable, Callable

from shoal_proto.errors import InvalidSpec, UnknownMember
from shoal_proto.incarnation import public_id
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.coordinator.jobs.proofs import check_asker
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.jobs.requests import MAX_ERROR
from shoal_server.core.membership import events
from shoal_server.serving.access.caller_proof import CallerProof


class JobOperations:
    """Operations on jobs. Each raises what `Registry.find` and `check_asker` raise, the job's
    refusal, and the error that ended the job's actor."""

    def __init__(
        self, registry: Registry, take: Callable[[str], Awaitable[object]] | None = None
    ) -> None:
        """`take` takes a snapshot of a job; None: no snapshots."""
        self._registry = registry
        self._take = take

    async def snapshot(self, job: str, who: CallerProof) -> None:
        """Take a snapshot of a job's parameters. Also raises InvalidSpec without `take`, and the
        snapshot's error."""
        self._found(job, who)
        if self._take is None:
            raise InvalidSpec(
                "this coordinator takes no snapshots",
                expected="a coordinator started without --no-parameters",
            )
        await self._take(job)

    async def stop(self, job: str, reason: str, who: CallerProof) -> JobActor:
        """Have a job's members end at a step boundary."""
        actor = self._found(job, who)
        await actor.stop(reason[:MAX_ERROR] or "an operator stopped it")
        return actor

    def _found(self, job: str, who: CallerProof) -> JobActor:
        actor = self._registry.find(job)
        check_asker(job, actor.job.spec.secret_digest, who)
        return actor

    async def retry(self, job: str, who: CallerProof, *, from_scratch: bool = False) -> JobActor:
        """Allow members to join a job that failed, was stopped or is lost; with `from_scratch`, at
        step 0.

        The job refuses if it is finished or has members; with `from_scratch`, if it has parameters
        on servers or a sample ledger; without, if its records were removed.
        """
        self._found(job, who)
        return await self._registry.retry(job, from_scratch=from_scratch)

    async def drain(
        self, job: str, member_id: str, reason: str, who: CallerProof, *, process: str = ""
    ) -> JobActor:
        """Let a member finish its step, hand over and leave. Also raises UnknownMember if there is
        no such member, or if `process` is not its public id."""
        actor = self._found(job, who)
        member = actor.job.members.get(member_id)
        if member is None:
            known = sorted(actor.job.members)
            raise UnknownMember(
                f"job {job} has no member {member_id!r} that could be drained",
                seen=member_id,
                expected=", ".join(known[:10]) + (" ..." if len(known) > 10 else "") or "none",
            )
        current = public_id(member.incarnation)
        if process not in ("", current):
            raise UnknownMember(
                f"member {member_id} of job {job} is another process now",
                seen=f"process {current}",
                expected=f"process {process}",
            )
        event = events.DrainRequested(
            member_id=member_id,
            incarnation=member.incarnation,
            reason=reason[:MAX_ERROR] or "asked to",
        )
        await actor.submit(event)
        return actor
