"""A worker's membership as its trainer uses it: threads, calls and clock around `MemberCore`. One
thread reads the stream of notices, one sends heartbeats, one sends wishes to leave. Limits
on the `WaitClock` do not run while no coordinator is reached; a caller's `timeout_s` does.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import structlog

from shoal_client.connection.certificate_wait import wait_s
from shoal_client.connection.coordinators import CLOSE_WITHIN_S, Coordinators, chance
from shoal_client.connection.held_stream import HeldStream
from shoal_client.liveness.beat_board import MembershipEnding
from shoal_client.liveness.trainer_status import TrainerStatus
from shoal_client.membership import calls
from shoal_client.membership import member_events as ev
from shoal_client.membership.generation_track import GenerationTrack
from shoal_client.membership.host_files import HostFiles
from shoal_client.membership.leaving import drained
from shoal_client.membership.member import Member, MemberHooks, OwnJob
from shoal_client.membership.member_core import MemberCore
from shoal_client.membership.rosters import LOCK_WAIT_S, Rosters
from shoal_proto.errors import DeadlineExceeded, InternalError, ShoalError, TrainingFailed
from shoal_proto.status import from_detail
from shoal_proto.traces import tracing
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

log = structlog.get_logger(__name__)

FIRST_ANSWER_S = 1.0
"""See `HeldStream`."""
LAUNCHER_BEAT_COUNTS_INTERVALS = 1.5
"""A member sends no heartbeat until its launcher's newest is older than this many intervals."""

Decision = TypeVar("Decision")


class MemberSession:
    """A member's session with the coordinators. Methods are for the trainer's thread, unless
    stated otherwise."""

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
        self._slot = member.beat_slot
        self._own_job = OwnJob(member)
        self._hooks = MemberHooks(
            validate=judge,
            find_unreachable=find_unreachable,
            find_checkpoints=find_checkpoints,
            on_break=on_break,
        )
        self._coordinators = Coordinators(member.coordinators)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._core = MemberCore(member.identity, wait_s())
        """Changed under the lock only, except by `progress`; single values are read without it."""
        self._threads = SessionThreads(lambda error: self._submit(ev.ThreadFailed(error=error)))
        self._joining = tracing.OngoingSpan("Join")
        self._stream = HeldStream(FIRST_ANSWER_S)
        shared: HostFiles | None = None
        if member.shared_directory is not None:
            directory = member.shared_directory / "rosters"
            shared = HostFiles(directory, self._threads.closing, LOCK_WAIT_S)
        self._rosters = Rosters(self._fetched_roster, shared)
        self._status = TrainerStatus()
        self._has_failed = False
        # Its `put` may be called in a signal handler.
        self._drain_wishes: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    # --- joining ---

    def join(self, timeout_s: float | None = None) -> None:
        """Become a member. Raises DeadlineExceeded if no coordinator admits the member within
        `timeout_s` (None: its `admission_s`), MemberDrained if the member is to leave before that,
        or the refusal, such as JobFinished.
        """
        timeout_s = self._member.admission_s if timeout_s is None else timeout_s
        core = self._core
        # This thread opens the stream, reads it, and opens the next one when it ends.
        self._threads.start("shoal-member", lambda: self._submit(ev.JoinWanted(within_s=timeout_s)))
        self._threads.start("shoal-drain", self._ask_for_drain)
        with self._changed:
            self._changed.wait_for(
                lambda: core.admitted or core.failure or core.leaving.reason, timeout=timeout_s
            )
            failure, admitted = core.failure, core.admitted
            if core.leaving.reason and not admitted:
                failure = failure or drained(core.identity, core.leaving.reason)
        if failure is not None or not admitted:
            self.close()
            if failure is not None:
                raise self._own_job.explain(failure)
            raise DeadlineExceeded(
                f"no coordinator admitted this member within {timeout_s:g} s",
                seen=core.waiting_for,
                expected=f"one of {', '.join(self._member.coordinators)} to answer",
                fix="Check that the coordinator and its etcd run: see its /readyz. With"
                " SHOAL_ADMISSION_S a worker waits longer.",
            )
        self._threads.start("shoal-heartbeat", self._beat)

    def propose(
        self,
        fields: Mapping[str, str],
        *,
        synchronous: bool,
        step: int,
        has_state: bool,
        stateless: bool = False,
        optional_fields: Mapping[str, str] = MappingProxyType({}),
        listings: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """State what this member would train. Raises the coordinator's refusal, such as
        ProposalConflict, or a RetryError: see `give_up_at`.

        `optional_fields`: compared only with members that state them too. `listings`: contents of
        fields with digests, to name the first entry that differs. `stateless`: members have no
        state to give; their scripts keep it.
        """
        proposal = pb.Proposal(
            fields=fields,
            synchronous=synchronous,
            step=step,
            has_state=has_state,
            stateless=stateless,
            optional_fields=optional_fields,
            listings=listings,
        )
        self._submit(ev.ProposalMade(proposal=proposal))

    def await_generation(self, above: int, timeout_s: float | None = None) -> pb.GenerationRecord:
        """Wait, through aborted attempts and standby, for the next committed record above `above`
        that includes this member. `timeout_s` None: the join limit plus ADMISSION_S, by the
        `WaitClock`. Raises the coordinator's refusal, or DeadlineExceeded.
        """
        since_s = time.monotonic()
        return self._decided(
            lambda now_s: self._core.next_generation(above, since_s, now_s, timeout_s)
        ).record

    def ready(self, record: pb.GenerationRecord) -> None:
        """Report that the first collective of the generation passed."""
        self._submit(ev.GenerationBroughtUp(record=record))
        self._joining.end()

    def give_up_at(self, time_s: float) -> None:
        """Set the time, by `time.monotonic`, at which the trainer's waits and later calls end with
        a RetryError. It does not apply to `wait_generation_over` and `leave`."""
        with self._lock:
            self._core.clock.give_up_at_s = time_s

    # --- training ---

    def begin_step(
        self,
        step: int,
        hand_over: Callable[[], None] | None = None,
        *,
        steps_before_leaving: bool = False,
    ) -> pb.GenerationRecord | None:
        """Begin step number `step` (0-based) and return None; or return a record if the generation
        stops here by agreement: bring the record's generation up, then ask again.

        Waits while the members agree on the step to stop at: usually for the slowest member's step.
        The time limit does not run while no coordinator is reached. If the next generation does not
        include this member, calls `hand_over` once, waits until that generation runs, and raises
        MemberDrained. Raises DeadlineExceeded without an agreement, and any error that ended the
        membership. `steps_before_leaving`: see `MemberCore.begin_step`.
        """
        core = self._core
        while True:
            handed_over = hand_over is None
            decision = self._decided(
                lambda now_s: core.begin_step(
                    step,
                    now_s,
                    handed_over=handed_over,  # noqa: B023
                    steps_before_leaving=steps_before_leaving,
                )
            )
            if decision is ev.BEGUN:
                return None
            if isinstance(decision, ev.BringUpGeneration):
                return decision.record
            if hand_over is not None:
                # Hand over without the lock: notices arrive meanwhile.
                hand_over()
                hand_over = None

    def progress(self, step: int) -> None:
        """Set the number of committed steps. Cheap to call."""
        self._core.progress(step)
        if self._slot is not None:
            self._slot.progress(step)

    def report_status(self, status: TrainerStatus) -> None:
        """Set the trainer's activity. Cheap to call; any thread."""
        self._status = status
        if self._slot is not None:
            self._slot.report_status(status)

    def pause(self, reason: str, limit_s: float) -> None:
        """Ask the other members to wait while the trainer runs its script's own code, until
        `resume`. Without a coordinator, the pause is reported later.
        """
        self._submit(ev.PauseBegun(reason=reason, limit_s=limit_s))

    def resume(self) -> None:
        """End the pause."""
        self._submit(ev.PauseEnded())

    def is_broken(self, generation: int) -> bool:
        """True if the generation ended by a break (a lost member, a failed collective, an aborted
        bring-up), or was replaced. Cheap to call."""
        return self._core.track.is_broken(generation)

    def await_break(self, generation: int, limit_s: float) -> bool:
        """Wait for the break of a generation in which a collective failed. True if the generation
        or the membership is over, False after `limit_s`, by the `WaitClock`.
        """
        since_s = time.monotonic()
        return self._decided(
            lambda now_s: self._core.judge_break(generation, since_s, limit_s, now_s)
        ).over

    def successor(self) -> pb.GenerationRecord | None:
        """The planned next generation, once members agreed where to stop. Cheap to call."""
        return self._core.track.successor

    def wait_generation_over(self, generation: int, timeout_s: float) -> bool:
        """Wait until a generation is broken or has a successor, or the membership ended. False
        after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._core.is_over(generation), timeout_s)

    def report_broken(self, error: str, *, own: bool = False, state_lost: bool = False) -> None:
        """Report that a collective of the current generation failed. For a failed bring-up: `own`
        if by this member's failure, and `state_lost` if the members hold no complete state, and
        there is no checkpoint.
        """
        self._submit(ev.CollectiveFailed(error=error, own=own, state_lost=state_lost))

    def settle(self, step: int, *, has_state: bool, enough_for_call: int = 0) -> None:
        """Report, after a break, that the trainer has stopped at `step`. Raises the coordinator's
        refusal, such as JobFinished or Fenced, or a RetryError: see `give_up_at`.

        `enough_for_call`: number of members that can repeat the interrupted call (such as
        `evaluate`), or 0 outside of one. No new member joins before the call is repeated.
        """
        event = ev.TrainerStopped(step=step, has_state=has_state, enough_for_call=enough_for_call)
        self._submit(event)

    # --- leaving ---

    def end_work(self, reason: str, *, finished: bool = False, closes: bool = False) -> None:
        """Report that this member's work is done. `finished`: it takes no further step, but stays a
        member. `closes`: the job admits no new members. Raises the coordinator's refusal, or a
        RetryError.
        """
        self._submit(ev.WorkDone(reason=reason, finished=finished, closes=closes))

    def await_others_done(self, generation: int, timeout_s: float, *, away_limit_s: float) -> bool:
        """Wait, with the work done, until the job completes or continues in another generation.
        False after `timeout_s`, or after `away_limit_s` without a coordinator."""
        give_up_s = time.monotonic() + timeout_s
        return self._decided(
            lambda now_s: self._core.others_done(generation, give_up_s, away_limit_s, now_s)
        ).over

    def drain(self, reason: str) -> None:
        """Ask to leave in order. Takes no lock: a signal handler may call it. Training goes on
        until a method that waits, such as `begin_step`, raises MemberDrained.
        """
        self._drain_wishes.put(reason)

    @property
    def draining(self) -> bool:
        """True if this member is to leave."""
        return bool(self._core.leaving.reason)

    @property
    def lost(self) -> frozenset[str]:
        """Members lost in this member's generations. Cheap to call; any thread."""
        return self._core.track.lost

    @property
    def no_generation_follows(self) -> bool:
        """True if no generation follows this member's leave. Any thread."""
        return self._core.leaving.no_generation_follows

    def leave(self, *, completed: bool, reason: str, timeout_s: float | None = None) -> bool:
        """End the membership; True if the coordinator has acknowledged the leave within
        `timeout_s` (None: LEAVE_TIMEOUT_S). Coordinators notice an unanswered leave anyway.

        `completed` without `timeout_s` waits for a coordinator without a limit. Raises Unavailable
        if the membership ends first, for example by a drain.
        """
        if completed:
            self._own_job.completed()
        try:
            self._submit(
                ev.LeaveWanted(
                    completed=completed,
                    reason=reason,
                    timeout_s=timeout_s,
                    failed=self._has_failed and not completed,
                )
            )
            has_left = self._core.leaving.is_acknowledged
            if completed and has_left and self._slot is not None and self._own_job.is_launchers:
                self._slot.end(MembershipEnding.COMPLETED)
        finally:
            self.close()
        return self._core.leaving.is_acknowledged

    def failed(self, error: ShoalError) -> None:
        """Handle an error that ends the trainer, but not the membership. The launcher is notified
        if another process of the script would surely fail the same way (refused), may succeed
        (passing), or is not wanted (drained). `leave` reports a TrainingFailed to the coordinator.
        """
        self._has_failed = isinstance(error, TrainingFailed)
        ending = MembershipEnding.of(error)
        if self.draining and ending in (MembershipEnding.PASSING, MembershipEnding.FENCED):
            ending = MembershipEnding.DRAINED
        if self._slot is not None and ending in (
            MembershipEnding.REFUSED,
            MembershipEnding.PASSING,
            MembershipEnding.DRAINED,
        ):
            self._slot.end(ending, by_script=True)

    def close(self) -> None:
        """Stop the threads and close the connections, without notifying the coordinator."""
        self._threads.closing.set()
        self._drain_wishes.put(None)
        if self._slot is not None:
            self._slot.withdraw()
        self._submit(ev.SessionClosed())
        self._threads.join(within_s=CLOSE_WITHIN_S)
        self._joining.end()
        # A call to a coordinator that hangs ends with its connection.
        self._coordinators.close()
        self._threads.join()

    # --- status ---

    @property
    def coordinators(self) -> Coordinators:
        """Connections to the coordinators, also for calls of other services."""
        return self._coordinators

    @property
    def token(self) -> Token:
        """The fencing token for the generation last returned to the trainer."""
        return self._core.token

    @property
    def limits(self) -> pb.Limits:
        """The job's time limits, after admission."""
        return self._core.limits

    @property
    def http_url(self) -> str:
        """URL for reports to the coordinator, after admission."""
        return self._core.http_url

    @property
    def failure(self) -> ShoalError | None:
        """Error that ended the membership, if any."""
        return self._core.failure

    @property
    def held_until_s(self) -> float:
        """Time, by `time.monotonic`, up to which no limit of a wait for others ran: the current
        time while a member is paused or no coordinator is reached. Any thread.
        """
        return self._core.clock.held_until_s(time.monotonic())

    @property
    def is_disconnected(self) -> bool:
        """True without an open stream from a coordinator. Cheap to call."""
        return self._core.clock.away

    @property
    def away_s(self) -> float:
        """Seconds since the last stream ended; 0 while one is open."""
        return self._core.clock.away_s(time.monotonic())

    @property
    def track(self) -> GenerationTrack:
        """The generations that this member knows. Read-only; any thread."""
        return self._core.track

    @property
    def waiting_for(self) -> str:
        """Text for errors and logs: the reason in the coordinator's newest notice, or the error
        that ended the last stream."""
        return self._core.waiting_for

    @property
    def is_standby(self) -> bool:
        """True if this member is on standby."""
        return self._core.is_standby

    # --- the core: decisions and effects ---

    def _decided(
        self, decide: Callable[[float], Decision | ev.WaitUntil | ev.RaiseError]
    ) -> Decision:
        """Ask for a decision after each event, and at the end of a wait."""
        # The lock of `_changed`, entered directly: this runs in each step, and
        # `Condition.__enter__` is slower, being Python code.
        with self._lock:
            while True:
                now_s = time.monotonic()
                decision = decide(now_s)
                if isinstance(decision, ev.RaiseError):
                    raise decision.error
                if not isinstance(decision, ev.WaitUntil):
                    return decision
                give_up_s = self._core.clock.give_up_at_s
                if now_s >= give_up_s:
                    raise DeadlineExceeded(
                        "the time limit of this wait has passed", seen=self._core.waiting_for
                    )
                left_s = min(decision.until_s, give_up_s) - now_s
                self._changed.wait(min(max(left_s, 0.0), threading.TIMEOUT_MAX))

    def _submit(self, event: ev.Event) -> None:
        """Submit an event; carry out its effects on this thread."""
        due = deque(self._step(event))
        while due:
            follows = self._carry_out(due.popleft())
            if follows is not None:
                due.extendleft(reversed(self._step(follows)))

    def _step(self, event: ev.Event) -> Sequence[ev.Effect]:
        with self._changed:
            effects = self._core.step(event, time.monotonic())
            self._changed.notify_all()
            return effects

    def _carry_out(self, effect: ev.Effect) -> ev.Event | None:
        match effect:
            case ev.RaiseError():
                raise effect.error
            case ev.CallLeader():
                return self._call(effect)
            case ev.OpenStream():
                return self._hold_stream(effect)
            case ev.CancelStream():
                self._stream.close()
            case ev.FindLeader():
                self._coordinators.choose_next_replica(self._stream.address, effect.error)
            case ev.ValidateRoster():
                return self._hooks.validate_roster(effect)
            case ev.BreakGeneration():
                self._hooks.on_break(effect.generation, effect.reason)
            case ev.AskForDrain():
                self._drain_wishes.put(effect.reason)
            case ev.LogMessage():
                level = "debug" if effect.is_detail else "info"
                write = getattr(log, "warning" if effect.is_warning else level)
                write(effect.event, **effect.fields)
            case _:
                self._notify_launcher(effect)
        return None

    def _call(self, call: ev.CallLeader) -> ev.Event:
        if call.after_s:
            self._threads.closing.wait(call.after_s)
        core = self._core
        if isinstance(call.request, pb.HeartbeatRequest):
            return calls.make_call(self._coordinators, call, lambda: core.closed)
        with self._joining.within():
            return calls.make_call(
                self._coordinators, call, lambda: core.closed or core.is_idle(call)
            )

    def _notify_launcher(self, effect: ev.ClaimBeats | ev.UnclaimBeats | ev.ReportEnding) -> None:
        if self._slot is None:
            return
        match effect:
            case ev.ClaimBeats():
                self._slot.claim(
                    effect.token, heartbeat_s=effect.heartbeat_s, patience_s=effect.patience_s
                )
            case ev.UnclaimBeats():
                self._slot.unclaim()
            case ev.ReportEnding():
                ending = self._own_job.ending(effect.error, admitted=bool(self._core.admitted))
                self._slot.end(ending)

    # --- threads ---

    def _hold_stream(self, opening: ev.OpenStream) -> ev.StreamEnded | None:
        if self._threads.closing.wait(opening.after_s):
            return None
        error = self._stream.hold(
            self._coordinators,
            calls.attend(opening.request, self._joining),
            lambda notice: self._submit(self._received(notice)),
        )
        return ev.StreamEnded(error=error, chance=chance())

    def _received(self, notice: pb.Notice) -> ev.NoticeReceived:
        refused = notice.WhichOneof("kind") == "refused"
        refusal = from_detail(notice.refused) if refused else None
        # See `MemberCore._with_stream`.
        whole = self._rosters.complete(notice, self.limits.collective_s / 2)
        return ev.NoticeReceived(notice=whole, refusal=refusal)

    def _fetched_roster(self, digest: str, timeout_s: float) -> bytes:
        request = pb.GetRosterRequest(job=self._core.identity.spec.job, digest=digest)
        return self._coordinators.call(calls.get_roster, request, timeout_s=timeout_s).roster

    def _beat(self) -> None:
        slot = self._slot
        while not self._threads.closing.wait(self.limits.heartbeat_s):
            if slot is not None:
                slot.record_running()
            within_s = LAUNCHER_BEAT_COUNTS_INTERVALS * self.limits.heartbeat_s
            status = self._status
            due = ev.HeartbeatDue(
                has_recent_beat=slot is not None and slot.has_recent_beat(within_s=within_s),
                moved=status.moved,
                waits=status.waits,
                own_code_s=status.own_code_s,
                loads=status.loads,
            )
            try:
                self._submit(due)
            except ShoalError:
                return

    def _ask_for_drain(self) -> None:
        while (reason := self._drain_wishes.get()) is not None:
            self._submit(ev.DrainWanted(reason=reason))


class SessionThreads:
    """Threads of a session. Each ends when `closing` is set, or with an error."""

    def __init__(self, on_failure: Callable[[ShoalError], None]) -> None:
        """`on_failure`: called with a thread's error, on that thread."""
        self._on_failure = on_failure
        self.closing = threading.Event()
        self.running: list[threading.Thread] = []

    def start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(name, target), name=name, daemon=True)
        self.running.append(thread)
        thread.start()

    def join(self, within_s: float | None = None) -> None:
        """Wait for the threads to end, for at most `within_s`."""
        give_up_s = None if within_s is None else time.monotonic() + within_s
        for thread in self.running:
            if thread is not threading.current_thread():
                thread.join(None if give_up_s is None else max(0.0, give_up_s - time.monotonic()))

    def _run(self, name: str, target: Callable[[], None]) -> None:
        try:
            target()
        except ShoalError as error:
            self._on_failure(error)
        except Exception as error:
            failure = InternalError(
                f"a thread of the membership failed: {name}",
                seen=repr(error),
                fix="The log has the traceback. If storage or network failed, start the worker"
                " again; otherwise please report it.",
            )
            failure.__cause__ = error
            # A traceback with its variables can take a second to write.
            self._on_failure(failure)
            log.exception("thread_failed", thread=name)
