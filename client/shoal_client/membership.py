"""A worker's membership: background threads keep it, the trainer reads where it stands.

One thread holds the Attend stream, answers every Prepare, finds the leader again after a
fail-over, and tells of a break at once through `on_break`; another sends heartbeats. The trainer's
thread only ever waits here with a time limit.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc
import structlog

from shoal_client.beat_board import BeatSlot
from shoal_client.channel import BackOff, Coordinators, Method
from shoal_client.patience import Patience
from shoal_client.shown import ShownRoster
from shoal_proto import PROTOCOL_VERSION
from shoal_proto.errors import DeadlineExceeded, Fenced, MemberDrained, RetryError, ShoalError
from shoal_proto.status import from_detail, from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

log = structlog.get_logger(__name__)

ATTEND_TIMEOUT_S = 10.0
FIRST_ANSWER_S = 1.0
"""A coordinator that says nothing for so long is left for another, twice as late each time."""
LEAVE_TIMEOUT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Member:
    """Who joins what, and where the coordinators are."""

    coordinators: Sequence[str]
    """host:port of every coordinator replica."""
    spec: pb.JobSpec
    member_id: str
    incarnation: str
    info: pb.MemberInfo
    beat_slot: BeatSlot | None = None
    """Where this host's launcher looks for whom to beat. Without it the member beats by itself."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A planned successor of the generation that trains."""

    record: pb.GenerationRecord
    offer: int
    """The first step not begun; none from there on is begun before `stop_at` is known."""
    stop_at: int | None = None


class Membership:
    """See the module.

    `judge`, `find_unreachable` (the peers that this member cannot reach, each with what was seen)
    and `on_break(generation, reason)` run on the background thread.
    """

    limits: pb.Limits
    http_url: str

    def __init__(
        self,
        member: Member,
        *,
        judge: Callable[[pb.Prepare], Sequence[pb.Rejection]] = lambda prepare: (),
        find_unreachable: Callable[[pb.Prepare], Mapping[str, str]] = lambda prepare: {},
        on_break: Callable[[int, str], None] = lambda generation, reason: None,
    ) -> None:
        self._member = member
        self._judge = judge
        self._find_unreachable = find_unreachable
        self._on_break = on_break
        self._coordinators = Coordinators(member.coordinators)
        self.limits = pb.Limits()
        self.http_url = ""
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stream: grpc.Call | None = None
        self._admitted = False
        self._failure: ShoalError | None = None
        self._proposal: pb.Proposal | None = None
        self._shown = ShownRoster()
        self._record: pb.GenerationRecord | None = None
        self._generation = 0
        self._ready_generation = 0
        self._begun = -1
        self._step = 0
        self._change: _Change | None = None
        self._crossed_at: int | None = None
        """Where the old generation stopped, if this one was planned."""
        self._stood_at: pb.SettleRequest | None = None
        """What was said of the stand after the last break, while no generation has followed."""
        self._broken: dict[int, str] = {}
        self._waiting_for = "the coordinator to admit this member"
        self._stands_by = False
        self._drain_reason = ""
        # A signal handler puts into it: a SimpleQueue is safe from there.
        self._drain_asks: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    # --- joining ---

    def attend(self, timeout_s: float = ATTEND_TIMEOUT_S) -> None:
        """Become a member.

        Raises Unavailable if no coordinator answers within `timeout_s`, and what the coordinator
        refuses with: JobFinished, InvalidSpec, ProposalConflict, ProtocolMismatch.
        """
        self._start("shoal-attend", self._listen)
        with self._changed:
            self._changed.wait_for(lambda: self._admitted or self._failure, timeout=timeout_s)
            failure, admitted = self._failure, self._admitted
        if failure is not None or not admitted:
            self.close()
            raise failure or DeadlineExceeded(
                f"no coordinator admitted this member within {timeout_s:g} s",
                seen=self._waiting_for,
                expected=f"one of {', '.join(self._member.coordinators)} to answer",
                fix="Check that the coordinator and its etcd run: see its /readyz.",
            )
        self._start("shoal-heartbeat", self._beat)
        self._start("shoal-drain", self._ask_for_drain)

    def propose(
        self, fields: Mapping[str, str], *, synchronous: bool, step: int, has_state: bool
    ) -> None:
        """State what this member trains; makes it a candidate. Raises ProposalConflict."""
        proposal = pb.Proposal(
            fields=fields, synchronous=synchronous, step=step, has_state=has_state
        )
        with self._changed:
            self._proposal, self._step, self._begun = proposal, step, step - 1
        self._call(_propose, pb.ProposeRequest(token=self.token, proposal=proposal))

    def await_generation(self, above: int, timeout_s: float | None = None) -> pb.GenerationRecord:
        """The next committed record with a number above `above` that has this member in it.

        Waits through aborted attempts and stand-by, `timeout_s` (default: the job's join limit) at
        the most. Raises what the coordinator refused this member with (ProposalConflict,
        JobFinished, Fenced ...), or DeadlineExceeded with the reason for the wait.
        """
        limit_s = timeout_s if timeout_s is not None else self.limits.join_s + ATTEND_TIMEOUT_S
        give_up_s = time.monotonic() + limit_s
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                record = self._record
                number = record.roster.generation if record else 0
                if record is not None and number > above and number not in self._broken:
                    self._generation = number
                    self._crossed_at = self._stood_at = None
                    return record
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        f"no generation above {above} within {limit_s:g} s", seen=self._waiting_for
                    )
                self._changed.wait(left_s)

    def ready(self, record: pb.GenerationRecord) -> None:
        """Say that the first collective of the generation passed."""
        with self._changed:
            self._ready_generation = record.roster.generation
            if self._proposal is not None and record.roster.synchronous:
                # A leader that comes later is to know that this member holds what all hold.
                self._proposal.has_state = True
                self._proposal.step = max(self._proposal.step, self._step)
        self._call(_ready, pb.ReadyRequest(token=self._token(record.roster.generation)))

    # --- training ---

    def begin_step(self, step: int) -> pb.GenerationRecord | None:
        """Ask whether step number `step` (0-based) may begin in the current generation.

        None: it has begun. A record: the old generation stops here by agreement; bring this one up
        instead, then ask again. Waits only while the members agree on where to stop, which takes
        no longer than a step of the slowest; and, where the next generation goes on without this
        member, until it runs. Raises what ended the membership: MemberDrained after that.
        """
        with self._changed:
            give_up_s: float | None = None
            while True:
                if self._failure is not None:
                    raise self._failure
                change = self._change
                if change is None or self._generation in self._broken:
                    break
                if step < (change.offer if change.stop_at is None else change.stop_at):
                    break
                if change.stop_at is not None and self._is_in(change.record):
                    self._change, self._record = None, change.record
                    self._generation = change.record.roster.generation
                    self._crossed_at = change.stop_at
                    return change.record
                give_up_s = give_up_s or time.monotonic() + self._boundary_limit_s
                if not self._changed.wait(give_up_s - time.monotonic()):
                    raise self._boundary_overdue(change)
            self._begun = step
            return None

    def _is_in(self, record: pb.GenerationRecord) -> bool:
        own = (self._member.member_id, self._member.incarnation)
        return any((e.member_id, e.incarnation) == own for e in record.roster.entries)

    @property
    def _boundary_limit_s(self) -> float:
        """For the slowest to finish its step, and, without this member, for the bring-up."""
        return 2 * self.limits.collective_s + self.limits.bring_up_s

    def _boundary_overdue(self, change: _Change) -> ShoalError:
        if change.stop_at is not None:
            # The others have stopped too, and the coordinator is not there to say how it went on.
            return self._drained("the others' next generation did not report that it runs")
        return DeadlineExceeded(
            "the members did not agree on a step to stop at", seen=self._waiting_for
        )

    def progress(self, step: int) -> None:
        """Steps committed so far, for the heartbeats. Free to call."""
        self._step = step
        if self._member.beat_slot is not None:
            self._member.beat_slot.progress(step)

    def is_broken(self, generation: int) -> bool:
        """Whether the generation is over, by a loss or an aborted bring-up. Free to call."""
        return generation in self._broken

    def wait_broken(self, generation: int, timeout_s: float) -> bool:
        """Wait for the break of a generation in which a collective failed."""
        with self._changed:
            return self._changed.wait_for(
                lambda: generation in self._broken or self._failure is not None, timeout_s
            )

    def successor(self) -> pb.GenerationRecord | None:
        """The planned successor of the current generation, once its members agreed where to stop.

        For who has no steps and so calls `begin_step` only to go over to it. Free to call.
        """
        change = self._change
        return change.record if change is not None and change.stop_at is not None else None

    def wait_over(self, generation: int, timeout_s: float) -> bool:
        """Wait until a generation is broken or has a successor, or the membership ended."""
        with self._changed:
            return self._changed.wait_for(
                lambda: generation in self._broken or bool(self.successor() or self._failure),
                timeout_s,
            )

    def report_broken(self, error: str) -> None:
        """Tell the coordinator that a collective of the current generation failed here."""
        self._call(_report_broken, pb.ReportBrokenRequest(token=self.token, error=error[:1000]))

    def settle(self, step: int, *, has_state: bool) -> None:
        """After a break: the trainer stands still with `step` optimizer steps behind its state.

        Raises JobFinished if others completed the job meanwhile, Fenced if this member was lost.
        """
        with self._changed:
            self._change, self._step, self._begun = None, step, step - 1
            if self._proposal is not None:
                self._proposal.step, self._proposal.has_state = step, has_state
            request = pb.SettleRequest(token=self.token, step=step, has_state=has_state)
            self._stood_at = request
        self._call(_settle, request)

    # --- leaving ---

    def drain(self, reason: str) -> None:
        """Ask to leave in good order: the others agree to go on without this member.

        Returns at once and takes no lock, so that a signal handler may call it. Sooner or later
        `begin_step` or whatever else waits here raises MemberDrained; until then training goes on.
        """
        self._drain_asks.put(reason)

    @property
    def draining(self) -> bool:
        """Whether this member is to leave, asked by itself or by an operator."""
        return bool(self._drain_reason)

    def leave(self, *, completed: bool, reason: str, timeout_s: float = LEAVE_TIMEOUT_S) -> bool:
        """End the membership; return whether the coordinator took note.

        One that cannot be reached within `timeout_s` is logged: it finds out by itself.
        """
        told, drained = False, isinstance(self._failure, MemberDrained)
        if self._admitted and (self._failure is None or drained):
            request = pb.LeaveRequest(token=self.token, completed=completed, reason=reason[:1000])
            try:
                self._coordinators.call(_leave, request, timeout_s=timeout_s)
                told = True
            except Fenced as error:
                told = drained  # then the coordinator has let it go already
                log.info("leave_not_needed", member=self._member.member_id, reason=str(error))
            except ShoalError as error:
                log.warning("leave_failed", member=self._member.member_id, reason=str(error))
        self.close()
        return told

    def close(self) -> None:
        """Stop the threads and the connection without a word to the coordinator."""
        self._closing.set()
        self._drain_asks.put(None)
        if self._member.beat_slot is not None:
            self._member.beat_slot.withdraw()
        with self._changed:
            if self._stream is not None:
                self._stream.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._coordinators.close()

    @property
    def token(self) -> Token:
        """The fencing token as of the generation last returned to the trainer."""
        return self._token(self._generation)

    @property
    def coordinators(self) -> Coordinators:
        """The connection, for the other services of the coordinator."""
        return self._coordinators

    @property
    def waiting_for(self) -> str:
        """The coordinator's latest reason why this member is not training."""
        return self._waiting_for

    @property
    def stands_by(self) -> bool:
        """Whether the job has its maximum of members, of whom this is not one."""
        return self._stands_by

    @property
    def failure(self) -> ShoalError | None:
        """What ended the membership, if something did."""
        return self._failure

    # --- the background threads ---

    def _start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _token(self, generation: int) -> Token:
        member = self._member
        return Token(
            job=member.spec.job,
            generation=generation,
            member_id=member.member_id,
            incarnation=member.incarnation,
        )

    def _call(self, method_of: Callable[[grpc.Channel], Method[pb.Ack]], request: object) -> None:
        try:
            self._coordinators.call(method_of, request, timeout_s=self.limits.join_s)
        except RetryError:
            raise
        except ShoalError as error:
            self._fail(error)
            raise self.failure or error from None

    def _fail(self, error: ShoalError) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = error
            generation = self._generation
            self._changed.notify_all()
        if generation:
            self._on_break(generation, str(error))

    def _listen(self) -> None:
        """Hold the stream; after a failure find who leads now and attend again."""
        back_off, patience = BackOff(), Patience(FIRST_ANSWER_S)
        while not self._closing.is_set() and self._failure is None:
            address = self._coordinators.current
            error: ShoalError | None
            try:
                stub = MembershipStub(self._coordinators.channel())
                stream = stub.Attend(self._attend_request())
                with self._changed:
                    self._stream = stream
                with patience.until_answered(stream):
                    for notice in stream:
                        patience.answered()
                        back_off.reset()
                        self._take(notice)
                error = None
            except grpc.RpcError as rpc_error:
                error = patience.error(address) or from_rpc_error(rpc_error, address)
            except ShoalError as answer_error:
                # An answer to a notice did not get through, or came too late to count.
                error = answer_error
            if self._closing.is_set() or self._failure is not None:
                return
            if error is not None and not isinstance(error, RetryError):
                self._fail(error)
                return
            if error is not None:
                self._waiting_for = str(error)
                self._coordinators.move_on(address, error)
            self._closing.wait(back_off.pause_s())

    def _attend_request(self) -> pb.AttendRequest:
        return pb.AttendRequest(
            protocol=PROTOCOL_VERSION,
            token=self.token,
            spec=self._member.spec,
            info=self._member.info,
            keeps_prepare=True,
        )

    def _beat(self) -> None:
        """Say every `heartbeat_s` that this member lives; learn from the reply if it is fenced.

        While the launcher's beats for this member are accepted, they are enough.
        """
        slot = self._member.beat_slot
        while not self._closing.wait(self.limits.heartbeat_s):
            if slot is not None:
                slot.runs()
                if slot.beaten(within_s=1.5 * self.limits.heartbeat_s):
                    continue
            beat = pb.Beat(token=self.token, step=self._step)
            try:
                reply = self._coordinators.call(
                    _heartbeat,
                    pb.HeartbeatRequest(beats=[beat]),
                    timeout_s=self.limits.lease_s,
                )
            except ShoalError as error:
                log.info("heartbeat_failed", member=beat.token.member_id, reason=str(error))
                continue
            if reply.replies and reply.replies[0].HasField("error"):
                self._fail(from_detail(reply.replies[0].error))
                return

    def _take(self, notice: pb.Notice) -> None:
        """Act on one notice."""
        kind = notice.WhichOneof("kind")
        self._waiting_for = notice.reason or self._waiting_for
        self._stands_by = kind == "standby" or (self._stands_by and kind == "admitted")
        if kind == "admitted":
            self._take_admitted(notice.admitted)
        elif kind == "prepare":
            self._answer(notice.prepare)
        elif kind == "outcome" and notice.outcome.verdict == pb.VERDICT_COMMITTED:
            self._take_committed(self._shown.completed(notice.outcome))
        elif kind == "outcome":
            self._take_aborted(notice.outcome)
        elif kind == "stop_at":
            self._take_stop_at(notice.stop_at)
        elif kind == "break":
            self._take_break(getattr(notice, "break").generation, notice.reason)
        elif kind == "drain":
            self._take_drain(notice.drain.now, notice.reason)
        elif kind == "refused":
            self._fail(from_detail(notice.refused))

    def _take_admitted(self, admitted: pb.Admitted) -> None:
        with self._changed:
            self.limits, self.http_url = admitted.limits, admitted.http_url
            again, self._admitted = self._admitted, True
            proposal, ready, stood_at = self._proposal, self._ready_generation, self._stood_at
            self._changed.notify_all()
        if self._member.beat_slot is not None:
            limits = admitted.limits
            self._member.beat_slot.claim(
                self._token(0), heartbeat_s=limits.heartbeat_s, patience_s=limits.watchdog_s
            )
        if again and self._drain_reason:
            self._drain_asks.put(self._drain_reason)
        # A new leader knows the roster from etcd, not what each member has said since.
        if again and proposal is not None:
            self._call(_propose, pb.ProposeRequest(token=self.token, proposal=proposal))
        if again and stood_at is not None:
            self._call(_settle, stood_at)
        elif again and ready and ready == self._generation:
            self._call(_ready, pb.ReadyRequest(token=self._token(ready)))

    def _answer(self, prepare: pb.Prepare) -> None:
        digest, rejections = self._shown.keep(prepare), self._judge(prepare)
        # What is rejected anyway needs no network.
        unreachable = {} if rejections else self._find_unreachable(prepare)
        answer = pb.AnswerRequest(
            token=self.token,
            generation=prepare.roster.generation,
            digest=digest,
            rejections=rejections,
            unreachable=[
                pb.Unreachable(member_id=peer, error=seen) for peer, seen in unreachable.items()
            ],
        )
        self._call(_answer, answer)

    def _take_committed(self, record: pb.GenerationRecord) -> None:
        number = record.roster.generation
        if not record.roster.synchronous:
            if self._is_in(record):
                with self._changed:
                    self._record, self._generation = record, number
                    self._changed.notify_all()
                self.ready(record)
            return
        if number <= self._generation:
            self._offer_again(number)  # told again after a reconnection
            return
        with self._changed:
            trains = self._generation > 0 and self._generation not in self._broken
            if not trains or not record.roster.planned:
                if self._is_in(record):
                    self._record = record
                    self._changed.notify_all()
                return
            if self._change is None or self._change.record.roster.generation != number:
                self._change = _Change(record=record, offer=self._begun + 1)
            offer = self._change.offer
        token = self._token(self._generation)
        self._call(_offer, pb.OfferRequest(token=token, generation=number, next_step=offer))

    def _offer_again(self, number: int) -> None:
        """A new leader collects the offers anew: say where the old generation did stop."""
        if number == self._generation and self._crossed_at is not None:
            token, step = self._token(number), self._crossed_at
            self._call(_offer, pb.OfferRequest(token=token, generation=number, next_step=step))

    def _take_aborted(self, record: pb.GenerationRecord) -> None:
        number = record.roster.generation
        with self._changed:
            if self._change is not None and self._change.record.roster.generation == number:
                self._change = None
            was_committed = self._record is not None and self._record.roster.generation == number
            self._changed.notify_all()
        if was_committed:
            self._take_break(number, record.reason)

    def _take_stop_at(self, stop: pb.StopAt) -> None:
        with self._changed:
            change = self._change
            if change is not None and change.record.roster.generation == stop.generation:
                self._change = replace(change, stop_at=stop.step)
            self._changed.notify_all()

    def _take_drain(self, now: bool, reason: str) -> None:
        log.info("drain_noticed", member=self._member.member_id, now=now, reason=reason)
        with self._changed:
            self._drain_reason = self._drain_reason or reason or "asked to"
            if now:
                # Not through `_fail`: the step that is under way is to end well.
                self._failure = self._failure or self._drained(self._drain_reason)
            self._changed.notify_all()

    def _drained(self, reason: str) -> MemberDrained:
        return MemberDrained(
            f"{self._member.member_id} leaves job {self._member.spec.job}", seen=reason
        )

    def _ask_for_drain(self) -> None:
        """Pass each wish to drain on to the coordinator."""
        while (reason := self._drain_asks.get()) is not None:
            self._drain_reason = self._drain_reason or reason
            try:
                self._send_drain(reason)
            except RetryError as error:
                # Nobody is there to agree on going on without this member.
                self._take_drain(True, f"{reason}; meanwhile {error}")
            except ShoalError as error:
                # A leader that does not know this member yet is asked again on admission.
                log.info("drain_not_taken", member=self._member.member_id, reason=str(error))

    def _send_drain(self, reason: str) -> None:
        member = self._member
        request = pb.DrainRequest(
            job=member.spec.job,
            member_id=member.member_id,
            incarnation=member.incarnation,
            reason=reason[:1000],
        )
        give_up_s = time.monotonic() + self.limits.drain_s
        while not self._closing.is_set():
            try:
                self._coordinators.call(_drain, request, timeout_s=self.limits.lease_s)
                return
            except RetryError:
                if time.monotonic() >= give_up_s:
                    raise

    def _take_break(self, generation: int, reason: str) -> None:
        with self._changed:
            if generation in self._broken:
                return
            self._broken[generation] = reason
            # With a successor every generation before it is over too.
            self._broken.setdefault(min(generation, self._generation), reason)
            self._changed.notify_all()
        log.info("generation_broken", generation=generation, reason=reason)
        self._on_break(generation, reason)


# Which method of which stub a call goes to, on whatever channel leads at the time.


def _propose(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Propose


def _answer(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Answer


def _settle(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Settle


def _offer(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Offer


def _ready(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Ready


def _report_broken(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).ReportBroken


def _leave(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Leave


def _drain(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Drain


def _heartbeat(channel: grpc.Channel) -> Method[pb.HeartbeatReply]:
    return MembershipStub(channel).Heartbeat
