"""A worker's membership as its trainer sees it: whether it may go on, and with whom.

Background threads keep the membership up (`attendance.py`); the trainer's thread reads where it
stands. Its waits have time limits, which stand still while no coordinator is there.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from shoal_client.connection.coordinators import Coordinators
from shoal_client.liveness.beat_board import Ending
from shoal_client.membership import calls as membership_calls
from shoal_client.membership.attendance import Attendance, Change, OwnPause
from shoal_proto.errors import DeadlineExceeded, Fenced, MemberDrained, ShoalError
from shoal_proto.v1 import membership_pb2 as pb

log = structlog.get_logger(__name__)

ATTEND_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 3.0


class MemberSession(Attendance):
    """See the module. All methods are the trainer's, unless they say otherwise."""

    # --- joining ---

    def join(self, timeout_s: float = ATTEND_TIMEOUT_S) -> None:
        """Become a member.

        Raises Unavailable if no coordinator answers within `timeout_s`, and what the coordinator
        refuses with: JobFinished, StateLost, InvalidSpec, ProposalConflict, ProtocolMismatch.
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
        self,
        fields: Mapping[str, str],
        *,
        synchronous: bool,
        step: int,
        has_state: bool,
        stateless: bool = False,
    ) -> None:
        """State what this member trains; makes it a candidate. Raises ProposalConflict, StateLost.

        `stateless`: no state is ever to be had from members of this job; their scripts keep it.
        """
        proposal = pb.Proposal(
            fields=fields,
            synchronous=synchronous,
            step=step,
            has_state=has_state,
            stateless=stateless,
        )
        with self._changed:
            self._proposal, self._step, self._begun = proposal, step, step - 1
        self._call_for_ever(
            membership_calls.propose, pb.ProposeRequest(token=self.token, proposal=proposal)
        )

    def await_generation(self, above: int, timeout_s: float | None = None) -> pb.GenerationRecord:
        """The next committed record with a number above `above` that has this member in it.

        Waits through aborted attempts and stand-by, `timeout_s` at the most; by default the job's
        join limit, which stands still while no coordinator is there, somebody is paused, or a
        bring-up gets on. Raises what the coordinator refused this member with (ProposalConflict,
        JobFinished, StateLost, Fenced ...), or DeadlineExceeded with the reason for the wait.
        """
        limit_s = timeout_s if timeout_s is not None else self.limits.join_s + ATTEND_TIMEOUT_S
        since_s = time.monotonic()
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
                give_up_s = since_s + limit_s
                if timeout_s is None:
                    give_up_s = self._give_up_s(since_s, limit_s)
                if not self._wait_until(give_up_s):
                    raise DeadlineExceeded(
                        f"no generation above {above} within {limit_s:g} s", seen=self._waiting_for
                    )

    def _wait_until(self, give_up_s: float) -> bool:
        """Wait for a change; whether there was time left for one."""
        left_s = give_up_s - time.monotonic()
        if left_s > 0:
            self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
        return left_s > 0

    # --- training ---

    def begin_step(
        self, step: int, hand_over: Callable[[], None] | None = None
    ) -> pb.GenerationRecord | None:
        """Ask whether step number `step` (0-based) may begin in the current generation.

        None: it has begun. A record: the old generation stops here by agreement; bring this one up
        instead, then ask again. Waits only while the members agree on where to stop, which takes
        no longer than a step of the slowest where a coordinator is there; and, where the next
        generation goes on without this member, until it runs; before that wait it calls
        `hand_over`, once. Raises what ended the membership: MemberDrained after that.
        """
        with self._changed:
            since_s: float | None = None
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
                if change.stop_at is not None and hand_over is not None:
                    self._unlocked(hand_over)
                    hand_over = None
                    continue
                since_s = since_s or time.monotonic()
                give_up_s = max(since_s, self._held_s) + self._boundary_limit_s
                if change.stop_at is None:
                    give_up_s = self._give_up_s(since_s, self._boundary_limit_s)
                if not self._wait_until(give_up_s):
                    raise self._boundary_overdue(change)
            self._begun = step
            return None

    def _unlocked(self, call: Callable[[], None]) -> None:
        """Call it without the lock that is held: it may take long, and notices come meanwhile."""
        self._changed.release()
        try:
            call()
        finally:
            self._changed.acquire()

    @property
    def _boundary_limit_s(self) -> float:
        """For the slowest to finish its step, and, without this member, for the bring-up."""
        return 2 * self.limits.collective_s + self.limits.bring_up_s

    def _boundary_overdue(self, change: Change) -> ShoalError:
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

    def pause(self, reason: str, limit_s: float) -> None:
        """Ask the others to wait for what the trainer does next; `resume` ends it.

        A coordinator that cannot be reached now is told when it is there again: until then no limit
        of the others runs either.
        """
        self._say_pause(OwnPause(reason=reason, limit_s=limit_s, since_s=time.monotonic()))

    def resume(self) -> None:
        """The pause is over."""
        if self._own_pause is not None:
            self._say_pause(replace(self._own_pause, over=True))

    def _say_pause(self, pause: OwnPause) -> None:
        self._own_pause = pause
        try:
            self._coordinators.call(
                membership_calls.pause, self._pause_request(pause), timeout_s=self.limits.lease_s
            )
        except ShoalError as error:
            # What ended the membership is raised where the trainer asks for its next step.
            log.info("pause_not_told", member=self._member.member_id, reason=str(error))

    def is_broken(self, generation: int) -> bool:
        """Whether the generation is over, by a loss or an aborted bring-up. Free to call."""
        return generation in self._broken

    def wait_broken(self, generation: int, timeout_s: float) -> bool:
        """Wait for the break of a generation in which a collective failed; whether it is over."""
        with self._changed:
            return self._changed.wait_for(
                lambda: generation in self._broken or self._failure is not None, timeout_s
            )

    def await_break(self, generation: int, limit_s: float) -> bool:
        """As `wait_broken`, where only the coordinator's word ends the wait: while none is there
        to tell, the time stands still."""
        since_s = time.monotonic()
        with self._changed:
            while generation not in self._broken and self._failure is None:
                if not self._wait_until(self._give_up_s(since_s, limit_s)):
                    return False
            return True

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

    def report_broken(self, error: str, *, own: bool = False, state_lost: bool = False) -> None:
        """Tell the coordinator that a collective of the current generation failed here.

        Of one that was being brought up: `own` if it was this member's own failure, and
        `state_lost` if it holds no whole state with the others, and there is no checkpoint.
        """
        request = pb.ReportBrokenRequest(
            token=self.token, error=error[:1000], own=own, state_lost=state_lost
        )
        self._call_for_ever(membership_calls.report_broken, request)

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
        self._call_for_ever(membership_calls.settle, request)

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
        with self._changed:
            self._leaving = True
        slot = self._member.beat_slot
        if slot is not None:
            # A beat that comes after the word that it left would be refused as a lost member's.
            slot.unclaim()
        if self._admitted and (self._failure is None or drained):
            request = pb.LeaveRequest(token=self.token, completed=completed, reason=reason[:1000])
            try:
                self._coordinators.call(membership_calls.leave, request, timeout_s=timeout_s)
                told = True
            except Fenced as error:
                told = drained  # then the coordinator has let it go already
                if slot is not None and not drained:
                    slot.end(Ending.of(error))
                log.info("leave_not_needed", member=self._member.member_id, reason=str(error))
            except ShoalError as error:
                log.warning("leave_failed", member=self._member.member_id, reason=str(error))
        self.close()
        return told

    def failed_for_good(self, error: ShoalError) -> None:
        """The trainer ends with an error that a process of the same script would end with again.

        The launcher is told, so that it does not try.
        """
        if self._member.beat_slot is not None and Ending.of(error) is Ending.REFUSED:
            self._member.beat_slot.end(Ending.REFUSED)

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


__all__ = ["MemberSession"]
