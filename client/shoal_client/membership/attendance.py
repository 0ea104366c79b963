"""A worker's attendance at the coordinator: what its background threads do.

One thread holds the Attend stream, answers every Prepare, finds the leader again after a
fail-over, and tells of a break at once through `on_break`; another sends heartbeats, a third
passes wishes to drain on. `MemberSession` is what the trainer's thread sees of it.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc
import structlog

from shoal_client.connection.coordinators import BackOff, Coordinators, Method
from shoal_client.connection.first_reply import Patience
from shoal_client.liveness.beat_board import Doing, Ending, beat_of
from shoal_client.membership import calls as membership_calls
from shoal_client.membership.member import Member
from shoal_client.membership.shown_roster import ShownRoster
from shoal_proto import PROTOCOL_VERSION
from shoal_proto.errors import MemberDrained, RetryError, ShoalError
from shoal_proto.incarnation import public_id
from shoal_proto.status import from_detail, from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

log = structlog.get_logger(__name__)

FIRST_ANSWER_S = 1.0
"""A coordinator that says nothing for so long is left for another, twice as late each time."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A planned successor of the generation that trains."""

    record: pb.GenerationRecord
    offer: int
    """The first step not begun; none from there on is begun before `stop_at` is known."""
    stop_at: int | None = None


@dataclass(frozen=True, kw_only=True)
class OwnPause:
    """What this member said of its pause, and since when it lasts, by `time.monotonic`."""

    reason: str
    limit_s: float
    since_s: float
    over: bool = False


class Attendance:
    """Keeps one member a member, and what it was last told.

    `judge`, `find_unreachable` (the peers that this member cannot reach, each with what was seen),
    `find_checkpoints` (the steps of the complete checkpoints that it sees, asked where nobody in
    the roster holds the job's state) and `on_break(generation, reason)` run on the background
    thread.
    """

    limits: pb.Limits
    http_url: str

    def __init__(
        self,
        member: Member,
        *,
        judge: Callable[[pb.Prepare], Sequence[pb.Rejection]] = lambda prepare: (),
        find_unreachable: Callable[[pb.Prepare], Mapping[str, str]] = lambda prepare: {},
        find_checkpoints: Callable[[], Sequence[int]] = lambda: (),
        on_break: Callable[[int, str], None] = lambda generation, reason: None,
    ) -> None:
        self._member = member
        self._judge = judge
        self._find_unreachable = find_unreachable
        self._find_checkpoints = find_checkpoints
        self._on_break = on_break
        self._coordinators = Coordinators(member.coordinators)
        self.limits = pb.Limits()
        self.http_url = ""
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stream: grpc.Call | None = None
        self._admitted = False
        self._away = True
        """Whether no coordinator holds this member's stream."""
        self._attends_since_s = -math.inf
        self._failure: ShoalError | None = None
        self._proposal: pb.Proposal | None = None
        self._shown = ShownRoster()
        self._record: pb.GenerationRecord | None = None
        self._generation = 0
        self._ready_generation = 0
        self._begun = -1
        self._step = 0
        self._change: Change | None = None
        self._crossed_at: int | None = None
        """Where the old generation stopped, if this one was planned."""
        self._stood_at: pb.SettleRequest | None = None
        """What was said of the stand after the last break, while no generation has followed."""
        self._broken: dict[int, str] = {}
        self._doing = Doing()
        self._pausing: Sequence[str] = ()
        """Whom the others wait for, as the coordinator says."""
        self._released_s = -math.inf
        self._own_pause: OwnPause | None = None
        self._waiting_for = "the coordinator to admit this member"
        self._stands_by = False
        self._drain_reason = ""
        self._leaving = False
        # A signal handler puts into it: a SimpleQueue is safe from there.
        self._drain_asks: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    @property
    def token(self) -> Token:
        """The fencing token as of the generation last returned to the trainer."""
        return self._token(self._generation)

    @property
    def failure(self) -> ShoalError | None:
        """What ended the membership, if something did."""
        return self._failure

    @property
    def held_until_s(self) -> float:
        """Up to when, by `time.monotonic`, no limit of a wait for others ran.

        That is now while somebody is paused, or no coordinator is there to say so. Any thread.
        """
        return time.monotonic() if self._away else self._held_s

    @property
    def _held_s(self) -> float:
        """The same, of what a coordinator says."""
        return time.monotonic() if self._pausing else self._released_s

    @property
    def is_away(self) -> bool:
        """Whether no coordinator holds this member's stream at the moment. Free to call."""
        return self._away

    def does(self, doing: Doing) -> None:
        """What the trainer does, for the heartbeats. Free to call; any thread."""
        self._doing = doing
        if self._member.beat_slot is not None:
            self._member.beat_slot.does(doing)

    def ready(self, record: pb.GenerationRecord) -> None:
        """Say that the first collective of the generation passed, and at which step: see
        `MemberSession.progress`."""
        self._call_for_ever(membership_calls.ready, self._ready_request(record))

    def _ready_request(self, record: pb.GenerationRecord) -> pb.ReadyRequest:
        with self._changed:
            self._ready_generation = record.roster.generation
            if self._proposal is not None and record.roster.synchronous:
                # A leader that comes later is to know that this member holds what all hold.
                self._proposal.has_state = True
                self._proposal.step = max(self._proposal.step, self._step)
        return self._ready_in(record.roster.generation)

    def _ready_in(self, generation: int) -> pb.ReadyRequest:
        return pb.ReadyRequest(token=self._token(generation), step=self._step)

    def _is_in(self, record: pb.GenerationRecord) -> bool:
        own = (self._member.member_id, public_id(self._member.incarnation))
        return any((e.member_id, e.public_id) == own for e in record.roster.entries)

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

    def _call_for_ever(
        self, method_of: Callable[[grpc.Channel], Method[pb.Ack]], request: object
    ) -> None:
        """For the trainer's thread, which has nothing to do meanwhile; all of these may be said
        twice. Raises what ended the membership."""
        try:
            self._coordinators.persist(
                lambda: self._call(method_of, request),
                waits_for=type(request).__name__.removesuffix("Request"),
                gives_up=lambda: self._closing.is_set() or self._failure is not None,
            )
        except RetryError as error:
            raise self._failure or error from None

    def _give_up_s(self, since_s: float, limit_s: float) -> float:
        """When a wait for the coordinator's word is over: while none is there, no time passes."""
        began_s = max(since_s, self._attends_since_s, self._held_s)
        return math.inf if self._away else began_s + limit_s

    def _note_away(self, *, away: bool) -> None:
        with self._changed:
            self._away = away
            self._attends_since_s = time.monotonic()
            self._changed.notify_all()

    def _fail(self, error: ShoalError) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = error
            generation = self._generation
            self._note_ending(error)
            self._changed.notify_all()
        if generation:
            self._on_break(generation, str(error))

    def _note_ending(self, error: ShoalError) -> None:
        """Let the launcher know, whatever the script makes of the error."""
        # Who leaves is no member any more by its own will.
        if self._member.beat_slot is not None and not self._leaving:
            self._member.beat_slot.end(Ending.of(error))

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
                    if self._closing.is_set():
                        # `close` came in between, and found no stream that it could cancel.
                        stream.cancel()
                with patience.until_answered(stream):
                    for notice in stream:
                        patience.answered()
                        if self._away:
                            self._note_away(away=False)
                        back_off.reset()
                        self._take(notice)
                error = None
            except grpc.RpcError as rpc_error:
                error = patience.error(address) or from_rpc_error(rpc_error, address)
            except ShoalError as answer_error:
                # An answer to a notice did not get through, or came too late to count.
                error = answer_error
            self._note_away(away=True)
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
        slot, reached = self._member.beat_slot, True
        while not self._closing.wait(self.limits.heartbeat_s):
            if slot is not None:
                slot.runs()
                if slot.beaten(within_s=1.5 * self.limits.heartbeat_s):
                    continue
            beat = beat_of(self.token, self._step, self._doing)
            try:
                reply = self._coordinators.call(
                    membership_calls.heartbeat,
                    pb.HeartbeatRequest(beats=[beat]),
                    timeout_s=self.limits.lease_s,
                )
            except ShoalError as error:
                if reached:
                    log.info("heartbeat_failed", member=beat.token.member_id, reason=str(error))
                reached = False
                continue
            reached = True
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
            self._stand_still()
        elif kind == "pauses":
            self._take_pauses(notice.pauses.member_ids)
        elif kind == "drain":
            self._take_drain(notice.drain.now, notice.reason)
        elif kind == "refused":
            self._fail(from_detail(notice.refused))

    def _take_admitted(self, admitted: pb.Admitted) -> None:
        with self._changed:
            self.limits, self.http_url = admitted.limits, admitted.http_url
            again, self._admitted = self._admitted, True
            # Who is paused is told next, if anybody is.
            self._pausing, self._released_s = (), time.monotonic()
            own_pause = self._own_pause
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
            self._call(
                membership_calls.propose, pb.ProposeRequest(token=self.token, proposal=proposal)
            )
        if again and own_pause is not None:
            self._call(membership_calls.pause, self._pause_request(own_pause))
        if again and stood_at is not None:
            self._call(membership_calls.settle, stood_at)
        elif again and ready and ready == self._generation:
            self._call(membership_calls.ready, self._ready_in(ready))

    def _answer(self, prepare: pb.Prepare) -> None:
        digest, rejections = self._shown.keep(prepare), self._judge(prepare)
        # What is rejected anyway needs no network.
        unreachable = {} if rejections else self._find_unreachable(prepare)
        states = {entry.state for entry in prepare.roster.entries}
        from_checkpoint = pb.STATE_ACTION_CHECKPOINT in states and not rejections
        answer = pb.AnswerRequest(
            token=self.token,
            generation=prepare.roster.generation,
            digest=digest,
            rejections=rejections,
            unreachable=[
                pb.Unreachable(member_id=peer, error=seen) for peer, seen in unreachable.items()
            ],
            checkpoint_steps=self._find_checkpoints() if from_checkpoint else (),
        )
        self._call(membership_calls.answer, answer)

    def _take_committed(self, record: pb.GenerationRecord) -> None:
        number = record.roster.generation
        if not record.roster.synchronous:
            if self._is_in(record):
                with self._changed:
                    self._record, self._generation = record, number
                    self._changed.notify_all()
                # Not for ever: this thread has a stream to hold. It is said again on attendance.
                self._call(membership_calls.ready, self._ready_request(record))
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
                self._change = Change(record=record, offer=self._begun + 1)
            offer = self._change.offer
        token = self._token(self._generation)
        self._call(
            membership_calls.offer, pb.OfferRequest(token=token, generation=number, next_step=offer)
        )

    def _offer_again(self, number: int) -> None:
        """A new leader collects the offers anew: say where the old generation did stop."""
        if number == self._generation and self._crossed_at is not None:
            token, step = self._token(number), self._crossed_at
            self._call(
                membership_calls.offer,
                pb.OfferRequest(token=token, generation=number, next_step=step),
            )

    def _take_aborted(self, record: pb.GenerationRecord) -> None:
        number = record.roster.generation
        with self._changed:
            if self._change is not None and self._change.record.roster.generation == number:
                self._change = None
            was_committed = self._record is not None and self._record.roster.generation == number
            self._changed.notify_all()
        if was_committed:
            self._take_break(number, record.reason)
            self._stand_still()

    def _stand_still(self) -> None:
        """Speak for a trainer that never saw the generation that is over: it has not moved."""
        with self._changed:
            request = self._stood_at
            if request is None and self._generation == 0 and self._proposal is not None:
                step, has_state = self._proposal.step, self._proposal.has_state
                request = pb.SettleRequest(token=self.token, step=step, has_state=has_state)
        if request is not None:
            self._call(membership_calls.settle, request)

    def _take_stop_at(self, stop: pb.StopAt) -> None:
        with self._changed:
            change = self._change
            if change is not None and change.record.roster.generation == stop.generation:
                self._change = replace(change, stop_at=stop.step)
            self._changed.notify_all()

    def _take_pauses(self, member_ids: Sequence[str]) -> None:
        with self._changed:
            self._pausing, self._released_s = tuple(member_ids), time.monotonic()
            self._changed.notify_all()

    def _pause_request(self, pause: OwnPause) -> pb.PauseRequest:
        return pb.PauseRequest(
            token=self.token,
            paused=not pause.over,
            reason=pause.reason[:1000],
            limit_s=pause.limit_s,
            elapsed_s=time.monotonic() - pause.since_s,
        )

    def _take_drain(self, now: bool, reason: str) -> None:
        log.info("drain_noticed", member=self._member.member_id, now=now, reason=reason)
        with self._changed:
            self._drain_reason = self._drain_reason or reason or "asked to"
            if now:
                # Not through `_fail`: the step that is under way is to end well.
                drained = self._drained(self._drain_reason)
                self._failure = self._failure or drained
                self._note_ending(drained)
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
                self._coordinators.call(
                    membership_calls.drain, request, timeout_s=self.limits.lease_s
                )
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


__all__ = ["Attendance", "Change", "OwnPause"]
