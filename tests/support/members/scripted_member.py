"""A member that does all that the protocol asks of it, or withholds what a test tells it to.

It speaks with the real Membership service by the generated stubs and has no trainer: it says at
once what a trainer's acts would let it say. So a test can hold a job in any phase, for as long as
the coordinator's own time limits let it.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from support.clusters.coordinator_world import FIELDS
from support.processes.ranks import Rank, Ranks, Report

from shoal_client.connection.coordinators import Coordinators
from shoal_proto import PROTOCOL_VERSION
from shoal_proto.digest import roster_digest
from shoal_proto.errors import RetryError, ShoalError
from shoal_proto.incarnation import new_incarnation
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
    """Who a member is, and what it withholds."""

    job: str
    member_id: str
    desired: int = 2
    low: int = 1
    high: int = 8
    withholds: frozenset[str] = frozenset()
    """Names of the acts that are put off until the test releases them."""
    num_wrong_digests: int = 0
    """So many rosters it accepts with a digest that is not theirs, which aborts them."""
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
    """One incarnation of a member. `on_notice` is called with each notice, on its own thread."""

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
        self.failure: ShoalError | None = None
        self.generation = 0
        """The newest generation it trains in or brings up."""
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
        self._change = 0
        self._crossed = False
        self._ready_in = 0
        self._stands: pb.SettleRequest | None = None
        self._broken: set[int] = set()
        self._stream: grpc.Call | None = None
        self._hears = False
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._listen, self._beat)
        ]
        self._heartbeat_s = 0.0

    def start(self) -> "ScriptedMember":
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Vanish without a word."""
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

    # --- what the test does ---

    def release(self, *acts: str) -> None:
        """Do what was withheld, and withhold these acts no longer."""
        with self._changed:
            self._withheld -= set(acts)
            if READY in acts:
                self._ready_in = self.generation
            due = [pending for pending in self._pending if pending[0] in acts]
            self._pending = [pending for pending in self._pending if pending[0] not in acts]
        for act, request in due:
            self.call(act, request)
            self._has_done(act)

    def call(self, act: str, request: Any, timeout_s: float = WAIT_S) -> Any:
        """One call to whoever leads. Raises what it refuses with."""
        return self._coordinators.call(
            lambda channel: getattr(MembershipStub(channel), act), request, timeout_s=timeout_s
        )

    def withhold(self, *acts: str) -> None:
        """Put these acts off from now on."""
        with self._changed:
            self._withheld |= set(acts)

    def leave(self) -> None:
        """End the membership, and with it this member."""
        self.call("Leave", pb.LeaveRequest(token=self.token(), reason="told to"))
        self._closing.set()

    def hang_up(self) -> None:
        """Break the stream, and open none until `call_again`."""
        self._connected.clear()
        if self._stream is not None:
            self._stream.cancel()

    def hears_nothing(self) -> None:
        """Wait until its stream has broken."""
        self._await(lambda: not self._hears, "its stream breaks")

    def call_again(self) -> None:
        self._connected.set()

    def has_withheld(self, act: str) -> None:
        """Wait until the member has put something of the kind off."""
        self._await(lambda: any(a == act for a, _ in self._pending), f"it withholds {act}")

    def has_done(self, act: str) -> None:
        """Wait until an act of the kind was taken."""
        self._await(lambda: act in self._done, f"it has done {act}")

    def told(
        self, kind: str, wanted: Callable[[pb.Notice], bool] = lambda notice: True
    ) -> pb.Notice:
        """The first such notice, as soon as it is there."""

        def found() -> pb.Notice | None:
            return next((n for k, n in self.notices if k == kind and wanted(n)), None)

        self._await(lambda: found() is not None, f"a notice {kind}")
        notice = found()
        assert notice is not None
        return notice

    def trains_with(self, *names: str, above: int = 0) -> int:
        """Wait until it trains with exactly these, itself among them; returns the generation.

        `above`: in a generation with a higher number than this.
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
        """The records it was sent, in that order."""
        return [n.outcome for k, n in list(self.notices) if k == "outcome"]

    def breaks(self) -> list[int]:
        """The generations it was told are over."""
        return [getattr(n, "break").generation for k, n in list(self.notices) if k == "break"]

    def failed(self) -> ShoalError:
        """What ended the membership, as soon as something has."""
        self._await(lambda: self.failure is not None, "the end of its membership", fails=True)
        assert self.failure is not None
        return self.failure

    def ended(self) -> ShoalError:
        """What ended the membership, however long that takes."""
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

    # --- its threads ---

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
            self._hear(False)
            if self._closing.is_set() or not self._connected.is_set():
                continue
            if error is not None and not isinstance(error, RetryError):
                self._fail(error)
            elif error is not None:
                self._coordinators.move_on(address, error)
            self._closing.wait(PAUSE_S)

    def _attend(self) -> None:
        request = pb.AttendRequest(
            protocol=PROTOCOL_VERSION,
            token=self.token(),
            spec=self.script.spec,
            info=pb.MemberInfo(host=HOST, pid=self.script.pid, address="127.0.0.1"),
        )
        stream = MembershipStub(self._coordinators.channel()).Attend(request)
        self._stream = stream
        for notice in stream:
            kind = notice.WhichOneof("kind")
            self._hear(True)
            with self._changed:
                self.notices.append((kind, notice))
                self._changed.notify_all()
            self._on_notice(kind, notice)
            self._take(kind, notice)

    def _hear(self, hears: bool) -> None:
        with self._changed:
            self._hears = hears
            self._changed.notify_all()

    def _beat(self) -> None:
        while not self._closing.wait(self._heartbeat_s or PAUSE_S):
            if not self._heartbeat_s or not self._connected.is_set():
                continue
            request = pb.HeartbeatRequest(beats=[pb.Beat(token=self.token())])
            try:
                # Where its stream is; the next one is due too soon to try again elsewhere.
                stub = MembershipStub(self._coordinators.channel())
                reply = stub.Heartbeat(request, timeout=1.0)
            except (grpc.RpcError, RetryError):
                continue
            if reply.replies[0].HasField("error"):
                self._fail(from_detail(reply.replies[0].error))
                return

    def _fail(self, error: ShoalError) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    # --- what it does about a notice ---

    def _take(self, kind: str, notice: pb.Notice) -> None:
        if kind == "admitted":
            self._admitted(notice.admitted)
        elif kind == "prepare":
            self._prepare(notice.prepare)
        elif kind == "outcome" and notice.outcome.verdict == pb.VERDICT_COMMITTED:
            self._committed(notice.outcome.roster)
        elif kind == "outcome":
            self._aborted(notice.outcome.roster.generation)
        elif kind == "stop_at" and notice.stop_at.generation == self._change:
            self._enter(self._change)
        elif kind == "break":
            self._settle(getattr(notice, "break").generation)
        elif kind == "refused":
            self._fail(from_detail(notice.refused))

    def _act(self, act: str, request: Any) -> None:
        with self._changed:
            if act in self._withheld:
                self._pending.append((act, request))
                self._changed.notify_all()
                self._on_withheld(act)
                return
        self.call(act, request)
        self._has_done(act)

    def _has_done(self, act: str) -> None:
        with self._changed:
            self._done.append(act)
            self._changed.notify_all()

    def _admitted(self, admitted: pb.Admitted) -> None:
        self._heartbeat_s = admitted.limits.heartbeat_s
        holds = self._ready_in > 0
        proposal = pb.Proposal(fields=self.script.fields, synchronous=True, has_state=holds)
        self._act(PROPOSE, pb.ProposeRequest(token=self.token(), proposal=proposal))
        # A new leader knows the records from etcd, not what each member has said since.
        if self._stands is not None:
            self._act(SETTLE, self._stands)
        elif self._ready_in and self._ready_in == self.generation:
            self.call(READY, pb.ReadyRequest(token=self.token()))

    def _prepare(self, prepare: pb.Prepare) -> None:
        digest = roster_digest(prepare.roster)
        if self._wrong_digests:
            self._wrong_digests -= 1
            digest = "wrong"
        number = prepare.roster.generation
        self._act(ANSWER, pb.AnswerRequest(token=self.token(), generation=number, digest=digest))

    def _committed(self, roster: pb.Roster) -> None:
        trains = self.generation > 0 and self.generation not in self._broken
        if roster.generation <= self.generation:
            if roster.generation == self.generation and self._crossed:
                self._offer(roster.generation)
            return
        if not trains or not roster.planned:
            self._enter(roster.generation)
            return
        self._change = roster.generation
        self._offer(roster.generation)

    def _offer(self, generation: int) -> None:
        token = self.token()
        self._act(OFFER, pb.OfferRequest(token=token, generation=generation, next_step=1))

    def _enter(self, generation: int) -> None:
        self._crossed = generation == self._change
        self.generation, self._change, self._stands = generation, 0, None
        request = pb.ReadyRequest(token=self.token())
        if READY not in self._withheld:
            self._ready_in = generation
        self._act(READY, request)

    def _aborted(self, generation: int) -> None:
        if generation == self._change:
            self._change = 0
        if generation == self.generation:
            self._settle(generation)

    def _settle(self, generation: int) -> None:
        # With a successor every generation before it is over too.
        over = {generation, min(generation, self.generation)}
        if over <= self._broken:
            return
        self._broken |= over
        self._change = 0
        self._stands = pb.SettleRequest(token=self.token(), step=0, has_state=self._ready_in > 0)
        self._act(SETTLE, self._stands)


# --- as a process of its own, for what takes a signal ---


def live(report: Report, coordinators: Sequence[str], script: Script) -> None:
    """The process' body: a member that tells of each notice and never ends by itself."""
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
    """A scripted member in a process of its own."""

    def __init__(self, ranks: Ranks, coordinators: Sequence[str], script: Script) -> None:
        self.script = script
        self.rank: Rank = ranks.start(live, list(coordinators), script)
        self.incarnation: str = self.rank.expect("started")["incarnation"]

    def told(
        self, kind: str, wanted: Callable[[pb.Notice], bool] = lambda notice: True
    ) -> pb.Notice:
        """The next such notice."""
        while True:
            notice = pb.Notice.FromString(self.rank.expect(kind)["notice"])
            if wanted(notice):
                return notice

    def send_signal(self, number: int) -> None:
        self.rank.send_signal(number)

    def has_withheld(self, act: str) -> None:
        """Wait until the member has put something of the kind off."""
        while self.rank.expect("withheld")["act"] != act:
            pass

    def outcomes(self) -> list[pb.GenerationRecord]:
        """The records it was sent so far as they were waited for."""
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
