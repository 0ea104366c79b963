"""A member that follows the protocol, except for calls that a test withholds.

The real member core decides, and calls the real Membership service by the generated stubs. There is
no trainer: its part is done at once. So a test can hold a job in any phase, within the
coordinator's time limits.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from support.clusters.coordinator_world import FIELDS
from support.processes.ranks import Rank, Ranks, Report

from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_client.membership.member_core import MemberCore
from shoal_proto.errors import RetryError, ShoalError
from shoal_proto.incarnation import new_incarnation, public_id
from shoal_proto.status import from_detail, from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

WAIT_S = 60.0
PAUSE_S = 0.05
HOST = "h"

PROPOSE, ANSWER, OFFER, READY, SETTLE = "Propose", "Answer", "Offer", "Ready", "Settle"


@dataclass(frozen=True, kw_only=True)
class Script:
    """Identity of a member, and the calls that it withholds."""

    job: str
    member_id: str
    desired: int = 2
    low: int = 1
    high: int = 8
    withholds: frozenset[str] = frozenset()
    """Names of the calls that are postponed until the test releases them."""
    num_wrong_digests: int = 0
    """Number of rosters that the member accepts with a wrong digest, which aborts them."""
    fields: Mapping[str, str] = field(default_factory=lambda: FIELDS)
    pid: int = 1

    @property
    def spec(self) -> pb.JobSpec:
        return pb.JobSpec(
            job=self.job,
            min_members=self.low,
            max_members=self.high,
            desired_members=self.desired,
        )


class ScriptedMember:
    """An incarnation of a member. `on_notice` is called with each notice, on the thread that reads
    the stream."""

    def __init__(
        self,
        coordinators: Sequence[str],
        script: Script,
        on_notice: Callable[[str, pb.Notice], None] = lambda kind, notice: None,
        on_withheld: Callable[[str], None] = lambda act: None,
    ) -> None:
        self.script = script
        self.incarnation = new_incarnation()
        self.notices: list[tuple[str, pb.Notice]] = []
        self.core = MemberCore(self._identity())
        self._coordinators = Coordinators(coordinators)
        self._on_notice = on_notice
        self._on_withheld = on_withheld
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._connected = threading.Event()
        self._connected.set()
        self._withheld = set(script.withholds)
        self._pending: list[tuple[str, Any]] = []
        self._done: list[str] = []
        self._wrong_digests = script.num_wrong_digests
        self._ready_in = 0
        self._proposed = False
        self._settled = 0
        self._rosters: dict[str, pb.Roster] = {}
        """Received rosters, by digest."""
        self._stream: grpc.Call | None = None
        self._has_stream = False
        self._dropped: dict[str, bool] = {}
        """Kinds of notices that are dropped; True for a kind of which one was dropped."""
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._listen, self._beat)
        ]
        self._heartbeat_s = 0.0

    def _identity(self) -> Identity:
        script = self.script
        return Identity(
            spec=script.spec,
            member_id=script.member_id,
            incarnation=self.incarnation,
            public_id=public_id(self.incarnation),
            info=pb.MemberInfo(host=HOST, pid=script.pid, address="127.0.0.1"),
        )

    @property
    def failure(self) -> ShoalError | None:
        return self.core.failure

    @property
    def generation(self) -> int:
        """The newest generation that the member trains in or brings up."""
        return self.core.track.generation

    def start(self) -> "ScriptedMember":
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Disappear without a message."""
        self._closing.set()
        self._connected.set()
        if self._stream is not None:
            self._stream.cancel()
        self._coordinators.close()
        for thread in self._threads:
            thread.join()

    @property
    def name(self) -> str:
        return self.script.member_id

    def token(self, generation: int | None = None) -> Token:
        return Token(
            job=self.script.job,
            generation=self.generation if generation is None else generation,
            member_id=self.script.member_id,
            incarnation=self.incarnation,
        )

    # --- calls of a test ---

    def release(self, *acts: str) -> None:
        """Make the withheld calls of these kinds, and withhold them no longer."""
        with self._changed:
            self._withheld -= set(acts)
            due = [pending for pending in self._pending if pending[0] in acts]
            self._pending = [pending for pending in self._pending if pending[0] not in acts]
        for act, request in due:
            if isinstance(request, ev.GenerationBroughtUp):
                self._come_up(request)
            else:
                self.call(act, request)
                self._note_call(act)

    def call(self, act: str, request: Any, timeout_s: float = WAIT_S) -> Any:
        """Make one call to the leader. Raises its refusal."""
        return self._coordinators.call(
            lambda channel: getattr(MembershipStub(channel), act), request, timeout_s=timeout_s
        )

    def withhold(self, *acts: str) -> None:
        """Withhold calls of these kinds from now on."""
        with self._changed:
            self._withheld |= set(acts)

    def leave(self) -> None:
        """Leave the job, and end this member's threads."""
        self.call("Leave", pb.LeaveRequest(token=self.token(), reason="the test asked for it"))
        self._closing.set()

    def drop_notices(self, *kinds: str) -> None:
        """Drop notices of these kinds from now on, until `attend_again`.

        The member stays connected: it would be removed a second after its stream broke, and a test
        may need longer.
        """
        with self._changed:
            self._dropped |= dict.fromkeys(kinds, False)

    def await_dropped(self, kind: str) -> None:
        """Wait until a notice of this kind was dropped."""
        self._await(lambda: self._dropped[kind], f"a dropped {kind}")

    def attend_again(self) -> None:
        """Attend again, and so receive the notices that were dropped."""
        with self._changed:
            self._dropped.clear()
        self._connected.clear()
        if self._stream is not None:
            self._stream.cancel()
        self.await_stream_broken()
        self._connected.set()

    def await_stream_broken(self) -> None:
        """Wait until the member's stream has broken."""
        self._await(lambda: not self._has_stream, "its stream breaks")

    def await_withheld(self, act: str) -> None:
        """Wait until the member has withheld a call of this kind."""
        self._await(lambda: any(a == act for a, _ in self._pending), f"it withholds {act}")

    def await_call(self, act: str) -> None:
        """Wait until a call of this kind was made."""
        self._await(lambda: act in self._done, f"it has done {act}")

    def await_notice(
        self, kind: str, wanted: Callable[[pb.Notice], bool] = lambda notice: True
    ) -> pb.Notice:
        """Wait for the first such notice and return it."""

        def found() -> pb.Notice | None:
            return next((n for k, n in self.notices if k == kind and wanted(n)), None)

        self._await(lambda: found() is not None, f"a notice {kind}")
        notice = found()
        assert notice is not None
        return notice

    def await_training_with(self, *names: str, above: int = 0) -> int:
        """Wait until the member trains with exactly these members, which include itself.

        Returns the generation, whose number is higher than `above`.
        """

        def wanted() -> int:
            running = {n.running.generation for k, n in self.notices if k == "running"}
            fits = [
                record.roster.generation
                for record in self.outcomes()
                if record.roster.generation in running
                and record.verdict == pb.VERDICT_COMMITTED
                and sorted(e.member_id for e in record.roster.entries) == sorted(names)
            ]
            return max(fits, default=0)

        self._await(lambda: wanted() > above, f"it trains with {', '.join(names)}")
        return wanted()

    def outcomes(self) -> list[pb.GenerationRecord]:
        """Return the records that the member received, in order."""
        return [n.outcome for k, n in list(self.notices) if k == "outcome"]

    def breaks(self) -> list[int]:
        """Return the generations whose breaks the member was notified of."""
        return [getattr(n, "break").generation for k, n in list(self.notices) if k == "break"]

    def failed(self) -> ShoalError:
        """Wait for the error that ends the membership, within a limit."""
        self._await(lambda: self.failure is not None, "the end of its membership", fails=True)
        assert self.failure is not None
        return self.failure

    def ended(self) -> ShoalError:
        """Wait for the error that ends the membership, without a limit."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None)
            assert self.failure is not None
            return self.failure

    def _await(self, holds: Callable[[], bool], what: str, *, fails: bool = False) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: holds() or (self.failure is not None and not fails), WAIT_S
            )
            assert holds(), f"{self.name}: not {what}; {self.failure}; {self.transcript()}"

    def transcript(self) -> str:
        return "; ".join(f"{kind} ({notice.reason})" for kind, notice in self.notices)

    # --- threads ---

    def _listen(self) -> None:
        while not self._closing.is_set() and self.failure is None:
            self._connected.wait()
            address = self._coordinators.current
            try:
                self._attend()
                error: ShoalError | None = None
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error, address)
            except ShoalError as call_error:
                error = call_error
            self._note_stream(False)
            if self._closing.is_set() or not self._connected.is_set():
                continue
            with self._changed:
                self.core.step(ev.StreamEnded(error=error), time.monotonic())
                self._changed.notify_all()
            if isinstance(error, RetryError):
                self._coordinators.choose_next_replica(address, error)
            self._closing.wait(PAUSE_S)

    def _attend(self) -> None:
        request = self.core.identity.attend_request(self.generation)
        stream = MembershipStub(self._coordinators.channel()).Attend(request)
        self._stream = stream
        for notice in stream:
            kind = notice.WhichOneof("kind")
            self._note_stream(True)
            self._complete(notice)
            with self._changed:
                is_dropped = kind in self._dropped
                if is_dropped:
                    self._dropped[kind] = True
                else:
                    self.notices.append((kind, notice))
                self._changed.notify_all()
            if is_dropped:
                continue
            self._on_notice(kind, notice)
            self._take(kind, notice)

    def _complete(self, notice: pb.Notice) -> None:
        """Add the roster to an outcome that has only its number: tests read the notices."""
        if notice.HasField("prepare"):
            self._rosters[notice.prepare.digest] = notice.prepare.roster
        elif notice.HasField("outcome") and not notice.outcome.roster.entries:
            notice.outcome.roster.CopyFrom(self._rosters[notice.outcome.digest])

    def _note_stream(self, has_stream: bool) -> None:
        with self._changed:
            self._has_stream = has_stream
            self._changed.notify_all()

    def _beat(self) -> None:
        while not self._closing.wait(self._heartbeat_s or PAUSE_S):
            if not self._heartbeat_s or not self._connected.is_set():
                continue
            request = pb.HeartbeatRequest(beats=[pb.Beat(token=self.token())])
            try:
                # Sent to the stream's coordinator only: the next heartbeat is due before a retry
                # elsewhere would be useful.
                stub = MembershipStub(self._coordinators.channel())
                reply = stub.Heartbeat(request, timeout=1.0)
            except (grpc.RpcError, RetryError):
                continue
            if reply.replies[0].HasField("error"):
                self._fail(from_detail(reply.replies[0].error))
                return

    def _fail(self, error: ShoalError) -> None:
        with self._changed:
            self.core.step(ev.HeartbeatRefused(error=error), time.monotonic())
            self._changed.notify_all()

    # --- reactions to notices ---

    def _take(self, kind: str, notice: pb.Notice) -> None:
        if kind == "admitted":
            self._heartbeat_s = notice.admitted.limits.heartbeat_s
        refusal = from_detail(notice.refused) if kind == "refused" else None
        self._do(ev.NoticeReceived(notice=notice, refusal=refusal))
        if not self._proposed:
            self._proposed = True
            proposal = pb.Proposal(fields=self.script.fields, synchronous=True)
            self._do(ev.ProposalMade(proposal=proposal))
        self._train_on()

    def _do(self, event: ev.Event) -> None:
        """Submit an event to the core, and carry out its effects, or withhold them."""
        with self._changed:
            due = deque(self.core.step(event, time.monotonic()))
            self._changed.notify_all()
        while due:
            effect = due.popleft()
            if isinstance(effect, ev.CallLeader):
                self._act(type(effect.request).__name__.removesuffix("Request"), effect.request)
            elif isinstance(effect, ev.ValidateRoster):
                digest = "wrong" if self._wrong_digests > 0 else effect.digest
                self._wrong_digests -= 1
                number = effect.prepare.roster.generation
                self._do(ev.RosterValidated(generation=number, digest=digest))
            elif isinstance(effect, ev.RaiseError):
                raise effect.error

    def _train_on(self) -> None:
        """Act as a trainer that finishes its step at once."""
        core, now_s, before = self.core, time.monotonic(), self.generation
        with self._changed:
            decision: object
            if core.track.successor is not None:
                decision = core.begin_step(1_000_000, now_s)
            else:
                decision = core.next_generation(before, now_s, now_s)
        if isinstance(decision, ev.BringUpGeneration):
            with self._changed:
                core.begin_step(0, now_s)
            self._bring_up(ev.GenerationBroughtUp(record=decision.record))
        elif before > self._settled and core.track.is_broken(before):
            self._settled = before
            self._do(ev.TrainerStopped(step=0, has_state=self._ready_in > 0))
            self._train_on()

    def _bring_up(self, brought_up: ev.GenerationBroughtUp) -> None:
        with self._changed:
            withheld = READY in self._withheld
            if withheld:
                self._pending.append((READY, brought_up))
                self._changed.notify_all()
        if withheld:
            self._on_withheld(READY)
        else:
            self._come_up(brought_up)

    def _come_up(self, brought_up: ev.GenerationBroughtUp) -> None:
        self._ready_in = brought_up.record.roster.generation
        self._do(brought_up)

    def _act(self, act: str, request: Any) -> None:
        with self._changed:
            if act in self._withheld:
                self._pending.append((act, request))
                self._changed.notify_all()
                self._on_withheld(act)
                return
        self.call(act, request)
        self._note_call(act)

    def _note_call(self, act: str) -> None:
        with self._changed:
            self._done.append(act)
            self._changed.notify_all()


# --- a member in a separate process, for tests that send signals ---


def live(report: Report, coordinators: Sequence[str], script: Script) -> None:
    """Process body: a member that reports each notice and never ends by itself."""
    member = ScriptedMember(
        coordinators,
        replace(script, pid=os.getpid()),
        lambda kind, notice: report(kind, notice=notice.SerializeToString()),
        lambda act: report("withheld", act=act),
    )
    member.start()
    report("started", incarnation=member.incarnation)
    report("ended", error=type(member.ended()).__name__)


class MemberProcess:
    """A scripted member in a separate process."""

    def __init__(self, ranks: Ranks, coordinators: Sequence[str], script: Script) -> None:
        self.script = script
        self.rank: Rank = ranks.start(live, list(coordinators), script)
        self.incarnation: str = self.rank.expect("started")["incarnation"]

    def await_notice(
        self, kind: str, wanted: Callable[[pb.Notice], bool] = lambda notice: True
    ) -> pb.Notice:
        """Wait for the next such notice and return it."""
        while True:
            notice = pb.Notice.FromString(self.rank.expect(kind)["notice"])
            if wanted(notice):
                return notice

    def send_signal(self, number: int) -> None:
        self.rank.send_signal(number)

    def await_withheld(self, act: str) -> None:
        """Wait until the member has withheld a call of this kind."""
        while self.rank.expect("withheld")["act"] != act:
            pass

    def outcomes(self) -> list[pb.GenerationRecord]:
        """Return the records that the member received, up to the last notice that a test read."""
        return [
            pb.Notice.FromString(data["notice"]).outcome
            for kind, data in self.rank.seen
            if kind == "outcome"
        ]

    def token(self, generation: int) -> Token:
        return Token(
            job=self.script.job,
            generation=generation,
            member_id=self.script.member_id,
            incarnation=self.incarnation,
        )


__all__ = [
    "ANSWER",
    "HOST",
    "OFFER",
    "PROPOSE",
    "READY",
    "SETTLE",
    "MemberProcess",
    "Script",
    "ScriptedMember",
]
