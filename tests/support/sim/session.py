"""The shell of the member's real core in virtual time, in place of MemberSession.

It decides nothing. A thread of MemberSession is a generator here, and a wait on its condition is a
`yield`.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from support.sim.errors import RefusedCall
from support.sim.errors import Unavailable as NobodyAnswers
from support.sim.leader import Connection, Leader
from support.sim.releases import Release, said
from support.sim.virtual_time import FOREVER_S, Box, Clock, Process, Steps, Wait, sleep

from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_client.membership.member_core import MemberCore
from shoal_client.membership.rosters import Rosters
from shoal_proto.back_off import BackOff
from shoal_proto.errors import DeadlineExceeded, RetryError, ShoalError, Unavailable
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.jobs.requests import event_of, joined
from shoal_server.coordinator.persistence import codec
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events

Decision = TypeVar("Decision")


class Network(Protocol):
    """The leader, and the network to it."""

    clock: Clock
    limits: Limits

    def find_leader(self) -> Leader | None: ...
    def request(self, leader: Leader | None, event: events.MemberEvent, box: Box) -> None: ...
    def open(
        self, leader: Leader | None, stream: Connection, event: events.MemberJoined
    ) -> None: ...
    def lose(self) -> bool: ...
    def release_of(self) -> Release: ...


def never_fetched(digest: str, timeout_s: float) -> bytes:
    """Fail: a notice omits only a roster that its stream has already shown."""
    raise AssertionError(f"roster {digest} is not known")


class SimSession:
    """Submits events of a simulated process to the core, and carries out the effects."""

    def __init__(
        self,
        process: Process,
        network: Network,
        identity: Identity,
        *,
        judge: Callable[[ev.ValidateRoster], Steps[ev.RosterValidated]],
        on_break: Callable[[int], None],
        on_record: Callable[[events.OutcomeNotice], None] = lambda notice: None,
    ) -> None:
        self.core = MemberCore(identity)
        self.release = network.release_of()
        self.stream: Connection | None = None
        self._process, self._network = process, network
        self._judge, self._on_break, self._on_record = judge, on_break, on_record
        self._leader = self._stream_leader = network.find_leader()
        self._num_events = 0
        self._drain_wishes: list[str] = []
        self._rosters = Rosters(never_fetched)
        self._shown = ""
        """Digest of the newest roster that the current stream has shown."""

    @property
    def _clock(self) -> Clock:
        return self._network.clock

    @property
    def to_leave(self) -> bool:
        return bool(self.core.leaving.reason or self._drain_wishes)

    def drain(self, reason: str) -> None:
        self._drain_wishes.append(reason)
        self._process.changed()

    # --- the core ---

    def decided(
        self, decide: Callable[[float], Decision | ev.WaitUntil | ev.RaiseError]
    ) -> Steps[Decision]:
        while True:
            seen, now_s = self._num_events, self._clock.now_s
            decision = decide(now_s)
            if isinstance(decision, ev.RaiseError):
                raise decision.error
            if not isinstance(decision, ev.WaitUntil):
                return decision
            left_s = min(decision.until_s - now_s, FOREVER_S)
            yield Wait(lambda seen=seen: self._num_events != seen, left_s)

    def do(self, event: ev.Event) -> Steps[None]:
        due = deque(self._step(event))
        while due:
            follows = yield from self._carry_out(due.popleft())
            if follows is not None:
                due.extendleft(reversed(self._step(follows)))

    def _step(self, event: ev.Event) -> list[ev.Effect]:
        effects = self.core.step(event, self._clock.now_s)
        self._num_events += 1
        self._process.changed()
        return effects

    def _carry_out(self, effect: ev.Effect) -> Steps[ev.Event | None]:
        match effect:
            case ev.RaiseError():
                raise effect.error
            case ev.CallLeader():
                return (yield from self._call(effect))
            case ev.OpenStream():
                return (yield from self._hold_stream(effect))
            case ev.ValidateRoster():
                return (yield from self._judge(effect))
            case ev.CancelStream() if self.stream is not None:
                self.stream.break_off()
            case ev.FindLeader():
                self._move_on(self._stream_leader)
            case ev.BreakGeneration():
                self._on_break(effect.generation)
            case ev.AskForDrain():
                self.drain(effect.reason)
            case _:
                pass
        return None

    # --- calls, as Coordinators makes them ---

    def _call(self, call: ev.CallLeader) -> Steps[ev.Event]:
        if call.after_s:
            yield sleep(call.after_s)
        request, token = call.request, self.core.token
        event: events.MemberEvent
        if isinstance(request, pb.DrainRequest):
            event = events.DrainRequested(
                member_id=token.member_id, incarnation=token.incarnation, reason=request.reason
            )
        else:
            assert not isinstance(request, pb.HeartbeatRequest)
            event = event_of(said(request, self.release))
        try:
            yield from self._send(event, call.timeout_s)
        except ShoalError as error:
            return ev.CallEnded(call=call, error=error, chance=self._clock.random.random())
        return ev.CallEnded(call=call)

    def _send(self, event: events.MemberEvent, timeout_s: float) -> Steps[None]:
        clock, back_off = self._clock, BackOff()
        give_up_s = clock.now_s + timeout_s
        while True:
            leader, box = self._leader, Box(self._process.changed)
            self._network.request(leader, event, box)
            # Bound as a default, as the loop assigns `box` again.
            if not (yield Wait(lambda box=box: box.done, give_up_s - clock.now_s)):
                raise DeadlineExceeded("no answer")
            if box.error is None:
                return
            error, pause_s = self._error(box.error), back_off.pause_s(clock.random.random())
            if not isinstance(error, RetryError) or clock.now_s + pause_s >= give_up_s:
                raise error
            self._move_on(leader)
            yield sleep(pause_s)

    def _move_on(self, failed: Leader | None) -> None:
        if self._leader is failed:
            self._leader = self._network.find_leader()

    def _error(self, error: Exception) -> ShoalError:
        """Translate a server's error as the client does."""
        if isinstance(error, RefusedCall):
            return codec.refusal_to_error(error.refusal, self._last_generation())
        assert isinstance(error, NobodyAnswers), error
        return Unavailable(str(error))

    def _last_generation(self) -> int:
        return self._leader.job.last_generation if self._leader is not None else 0

    # --- the stream ---

    def listen(self) -> Steps[None]:
        """Run the thread that holds the streams."""
        yield from self.do(ev.JoinWanted())

    def _hold_stream(self, opening: ev.OpenStream) -> Steps[ev.Event | None]:
        if opening.after_s:
            yield sleep(opening.after_s)
        if self.core.closed:
            return None
        token, clock = opening.request.token, self._clock
        stream = Connection(
            clock,
            token.member_id,
            token.incarnation,
            self._process.changed,
            self._network.lose,
        )
        self.stream, self._shown, self._stream_leader = stream, "", self._leader
        self._network.open(self._leader, stream, joined(said(opening.request, self.release)))
        error: ShoalError
        while True:
            yield Wait(lambda: bool(stream.inbox) or stream.broken)
            item = stream.inbox.pop(0) if stream.inbox else NobodyAnswers("the stream broke")
            if isinstance(item, Exception):
                error = self._error(item)
                break
            try:
                yield from self.do(self._received(item))
            except ShoalError as answer_error:
                error = answer_error
                break
        return ev.StreamEnded(error=error, chance=clock.random.random())

    def _received(self, notice: events.Notice | None) -> ev.NoticeReceived:
        """Encode a notice as coordinator/jobs/streams.py does; None: admitted."""
        if notice is None:
            admitted = pb.Admitted(limits=codec.limits_to_pb(self._network.limits))
            return ev.NoticeReceived(notice=pb.Notice(reason="admitted", admitted=admitted))
        known = isinstance(notice, events.OutcomeNotice) and notice.record.digest == self._shown
        message = codec.notice_to_pb(notice, self._last_generation(), with_roster=not known)
        if isinstance(notice, events.PrepareNotice):
            self._shown = notice.digest
        if isinstance(notice, events.OutcomeNotice):
            self._on_record(notice)
        refusal = None
        if isinstance(notice, events.RefusedNotice):
            refusal = codec.refusal_to_error(notice.refusal, self._last_generation())
        leader = self._stream_leader
        message = said(message, leader.release if leader is not None else self.release)
        return ev.NoticeReceived(notice=self._rosters.complete(message, 0.0), refusal=refusal)

    def pass_drains(self) -> Steps[None]:
        """Run the thread that submits requests to drain."""
        yield Wait(lambda: self.core.admitted)
        while True:
            yield Wait(lambda: bool(self._drain_wishes))
            yield from self.do(ev.DrainWanted(reason=self._drain_wishes.pop(0)))


__all__ = ["Network", "SimSession"]
