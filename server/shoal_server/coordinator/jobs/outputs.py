"""Output of members, from their launchers or from the last lines of ended launchers.

A launcher keeps a stream open for requests, and answers each with a call (`Give`).
"""

import asyncio
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from shoal_proto.errors import (
    AccessDenied,
    InvalidSpec,
    JobQuarantined,
    Overloaded,
    Unavailable,
    UnknownMember,
)
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.secrets import digest_of, matches_digest
from shoal_proto.terminal import plain_lines
from shoal_proto.v1 import outputs_pb2 as pb
from shoal_proto.v1.outputs_pb2_grpc import OutputsServicer
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.coordinator.jobs.proofs import check_asker
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.serving.rpc import Context
from shoal_server.status.views import OutputView

PART_BYTES = 64 * 1024
ANSWER_WITHIN_S = 3.0
MAX_PENDING = 256
MAX_WAITING = 64
"""Maximum number of requests queued per launcher."""
MAX_SERVED = 1 << 17
MAX_KEPT_BYTES = 16 << 20
"""Maximum size of all last lines; the oldest are dropped first."""

MemberKey = tuple[str, str]
"""Job and member id."""


@dataclass(eq=False, kw_only=True)
class _Launcher:
    """A launcher that has opened a stream, also after the stream's end. `secrets`: launch secrets
    by member id."""

    host: str
    source: str
    job_secret: str = field(repr=False)
    secrets: dict[str, str] = field(repr=False)
    wanted: asyncio.Queue[pb.OutputWanted | None] = field(
        default_factory=lambda: asyncio.Queue(MAX_WAITING + 1)
    )


@dataclass(frozen=True, kw_only=True)
class _PendingRequest:
    launcher: _Launcher
    member: MemberKey
    answer: asyncio.Future[pb.OutputPart]


@dataclass(frozen=True, kw_only=True)
class _LastLines:
    launcher: _Launcher
    part: pb.OutputPart


class _StreamEnded(Exception):
    """The launcher's stream ended before it answered."""


class OutputsService(OutputsServicer):
    """Outputs of all members, on the coordinator's event loop."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._serving: dict[MemberKey, list[_Launcher]] = {}
        """Launchers of each member, the newest last: a launcher that has reconnected may have two
        streams.
        """
        self.num_served = 0
        """Number of served members, over all streams."""
        self._pending: dict[str, _PendingRequest] = {}
        """Unanswered requests, by ticket."""
        self._kept: OrderedDict[MemberKey, _LastLines] = OrderedDict()
        self._kept_bytes = 0

    # --- from launchers ---

    async def Serve(
        self, request: pb.ServeOutputRequest, context: Context
    ) -> AsyncIterator[pb.OutputWanted]:
        self._registry.require_leading()
        _check(request)
        if self.num_served + len(request.members) > MAX_SERVED:
            raise Overloaded("too many members' outputs are served", expected=f"{MAX_SERVED}")
        launcher = _Launcher(
            host=request.host,
            source=request.source,
            job_secret=request.job_secret,
            secrets={owner.member_id: owner.launch_secret for owner in request.members},
        )
        members = [(request.job, member_id) for member_id in launcher.secrets]
        for member in members:
            self._serving.setdefault(member, []).append(launcher)
        self.num_served += len(members)
        try:
            yield pb.OutputWanted()
            while (wanted := await launcher.wanted.get()) is not None:
                yield wanted
        finally:
            self.num_served -= len(members)
            for member in members:
                self._remove(member, launcher)
            for pending in self._pending.values():
                if pending.launcher is launcher and not pending.answer.done():
                    pending.answer.set_exception(_StreamEnded())

    def _remove(self, member: MemberKey, launcher: _Launcher) -> None:
        # `forget_all` may have removed all launchers already.
        if launcher in (launchers := self._serving.get(member, [])):
            launchers.remove(launcher)
            if not launchers:
                del self._serving[member]

    async def Give(self, request: pb.GiveOutputRequest, context: Context) -> pb.GiveOutputReply:
        """Pass an answer on to its reader, unless it is late or for another member."""
        pending = self._pending.get(request.ticket)
        is_known = pending is not None and pending.member == (request.job, request.member_id)
        if pending is not None and is_known and not pending.answer.done():
            pending.answer.set_result(request.part)
        return pb.GiveOutputReply()

    async def Keep(self, request: pb.KeepOutputRequest, context: Context) -> pb.KeepOutputReply:
        for last in request.last:
            member = (request.job, last.owner.member_id)
            digest = digest_of(last.owner.launch_secret)
            launchers = [
                each
                for each in self._serving.get(member, ())
                if matches_digest(each.secrets[member[1]], digest)
            ]
            if not launchers:
                raise AccessDenied(
                    f"output of {member[1]} is not accepted from this caller",
                    seen="a launcher without an open stream for this member",
                    expected="the launcher that started the member, while its stream is open",
                )
            self._keep(member, _LastLines(launcher=launchers[-1], part=last.part))
        return pb.KeepOutputReply()

    def _keep(self, member: MemberKey, kept: _LastLines) -> None:
        self._drop(member)
        self._kept[member] = kept
        self._kept_bytes += len(kept.part.data)
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, member: MemberKey) -> None:
        if (kept := self._kept.pop(member, None)) is not None:
            self._kept_bytes -= len(kept.part.data)

    # --- from readers ---

    async def output(
        self, job: str, member_id: str, who: CallerProof, after: str | None, before: str | None
    ) -> OutputView:
        """Lines of a member's output, after or before a position from an earlier answer; else the
        newest.

        For a position of an earlier launcher, `after` gives the newest lines, and `before` none.
        Raises what `Registry.find` raises, but Unavailable for a quarantined job; InvalidSpec for
        both positions, AccessDenied as `check_asker` does, UnknownMember if no launcher has the
        output, Unavailable if the launcher does not answer, Overloaded.
        """
        if after is not None and before is not None:
            raise InvalidSpec("both `after` and `before` are given", expected="one of them")
        actor = self._find(job)
        check_asker(job, actor.job.spec.secret_digest, who)
        member, ended = (job, member_id), ""
        for launcher in reversed(self._serving.get(member, [])):
            if _owns(launcher, actor, member_id):
                try:
                    part = await self._ask(launcher, member, after, before)
                except _StreamEnded:
                    ended = launcher.host
                    continue
                return _view(member, launcher, part, after)
        kept = self._kept.get(member)
        if kept is None and ended:
            raise Unavailable(
                f"the launcher of {member_id} was asked for lines when its stream ended",
                seen=f"no last lines from {ended}",
                fix="Ask again: the launcher may have connected again, here or to a new leader.",
            )
        if kept is None or not _owns(kept.launcher, actor, member_id):
            raise _no_output(actor, member_id)
        part = _cut(kept, after, before)
        return _view(member, kept.launcher, part, after, is_live=False)

    def _find(self, job: str) -> JobActor:
        try:
            return self._registry.find(job)
        except JobQuarantined as why:
            # Access cannot be checked: the job may have a secret.
            raise Unavailable(
                f"output of the members of job {job} is not shown while it is quarantined",
                seen=why.what,
                fix=f"`shoal repair {job}` shows what is wrong with it.",
            ) from why

    async def _ask(
        self, launcher: _Launcher, member: MemberKey, after: str | None, before: str | None
    ) -> pb.OutputPart:
        if (before or after) and not _is_of(launcher, before or after or ""):
            if before:
                return pb.OutputPart()  # the position is an ended launcher's
            after = None
        if len(self._pending) >= MAX_PENDING or launcher.wanted.qsize() >= MAX_WAITING:
            raise Overloaded("too many requests for outputs", fix="Ask again a little later.")
        ticket = secrets.token_hex(16)
        answer = asyncio.get_running_loop().create_future()
        pending = _PendingRequest(launcher=launcher, member=member, answer=answer)
        self._pending[ticket] = pending
        wanted = pb.OutputWanted(ticket=ticket, member_id=member[1], max_bytes=PART_BYTES)
        if after is not None:
            wanted.after = _position(after)
        if before is not None:
            wanted.before = _position(before)
        try:
            launcher.wanted.put_nowait(wanted)
            return await asyncio.wait_for(pending.answer, ANSWER_WITHIN_S)
        except TimeoutError:
            raise Unavailable(
                f"the launcher of {member[1]} does not answer",
                seen=f"nothing from {launcher.host} for {ANSWER_WITHIN_S:g} s",
                expected="the lines that it keeps",
            ) from None
        finally:
            del self._pending[ticket]

    # --- from the coordinator ---

    def forget(self, job: str) -> None:
        """Drop the last lines of a removed or reset job."""
        for member in [each for each in self._kept if each[0] == job]:
            self._drop(member)

    def forget_all(self) -> None:
        """End all streams and drop the last lines."""
        launchers = {id(each): each for serving in self._serving.values() for each in serving}
        self._serving.clear()
        for launcher in launchers.values():
            launcher.wanted.put_nowait(None)
        self._kept.clear()
        self._kept_bytes = 0


def _check(request: pb.ServeOutputRequest) -> None:
    names = [("job", request.job), *(("member_id", each.member_id) for each in request.members)]
    for kind, name in names:
        if not is_name(name):
            raise InvalidSpec(f"{kind} is not a valid name", seen=repr(name), expected=NAME_RULE)
    if not re.fullmatch("[0-9a-f]{1,64}", request.source):
        raise InvalidSpec("bad source", seen=repr(request.source), expected="hexadecimal digits")


def _owns(launcher: _Launcher, actor: JobActor, member_id: str) -> bool:
    """True if the launcher has the job's secret (if the job has one), and started the member's
    process or the member is gone."""
    spec, member = actor.job.spec, actor.job.members.get(member_id)
    if spec.secret_digest and not matches_digest(launcher.job_secret, spec.secret_digest):
        return False
    return member is None or matches_digest(launcher.secrets[member_id], member.info.launch_digest)


def _no_output(actor: JobActor, member_id: str) -> UnknownMember:
    job, member = actor.job.spec.job, actor.job.members.get(member_id)
    if member is None:
        return UnknownMember(
            f"no output of {member_id} of job {job} is kept",
            seen="no member of that id, and no launcher that serves its output",
            expected="a member, or a former member whose launcher runs or left its last lines",
            fix=f"`shoal status --job {job}` lists the members.",
        )
    return UnknownMember(
        f"no launcher passes on the output of {member_id}",
        seen=f"a process on {member.info.host or 'some host'} that no connected launcher started",
        expected="a worker that `shoal run` has started",
        fix="Look at the terminal, or at the log of the program that started the process.",
    )


def _is_of(launcher: _Launcher, position: str) -> bool:
    return position.rpartition("-")[0] == launcher.source


def _position(position: str) -> int:
    return int(position.rpartition("-")[2])


def _cut(kept: _LastLines, after: str | None, before: str | None) -> pb.OutputPart:
    part = kept.part
    start, stop = part.start, part.stop
    if before is not None:
        stop = min(max(_position(before), start), stop) if _is_of(kept.launcher, before) else start
    elif after is not None and _is_of(kept.launcher, after):
        start = min(max(_position(after), start), stop)
    data = part.data[start - part.start : stop - part.start]
    return pb.OutputPart(data=data, start=start, stop=stop, oldest=part.start)


def _view(
    member: MemberKey,
    launcher: _Launcher,
    part: pb.OutputPart,
    after: str | None,
    *,
    is_live: bool = True,
) -> OutputView:
    has_gap = after is not None and (not _is_of(launcher, after) or part.start > _position(after))
    return OutputView(
        job=member[0],
        member_id=member[1],
        host=launcher.host,
        is_live=is_live,
        lines=tuple(plain_lines(part.data)),
        before=f"{launcher.source}-{part.start}" if part.start > part.oldest else None,
        after=f"{launcher.source}-{part.stop}",
        has_gap=has_gap,
    )
