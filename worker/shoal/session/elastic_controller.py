"""Control of a member's generations: formation, planned changes, and recovery from breaks."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256

import structlog
import torch

from shoal.data.share_sizes import ShareSizes
from shoal.membership.alone import LoneMember
from shoal.membership.draining import Drained, drained
from shoal.membership.generation import Context, Generation
from shoal.membership.rendezvous_store import RendezvousStores
from shoal.membership.stores import GenerationStores, LoneStores
from shoal.membership.validators import ValidatorSet
from shoal.model.devices import refuse_default_device
from shoal.strategies.base import Strategy
from shoal.tracking.job_log import JobLog
from shoal.tracking.tracker import Tracker
from shoal_client.connection.reach import ProbeListener, check, peers_to_check
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import (
    BringUpFailed,
    GenerationBroken,
    InvalidSpec,
    MalformedMessage,
    MemberDrained,
    RejoinError,
    RetryError,
    ShoalError,
    StateLost,
)
from shoal_proto.v1.membership_pb2 import (
    STATE_ACTION_RECEIVE,
    GenerationRecord,
    Prepare,
    Rejection,
)

log = structlog.get_logger(__name__)

VALIDATION_SHARE = 0.5
"""Share of the time to accept or reject a roster (`limits.prepare_s`) that validators may use. A
quarter is for checks of peers, the rest for messages."""
MAX_FIELD_CHARACTERS = 4096
_MAY_NOT_RECUR = (RuntimeError, MemoryError, OSError)


@dataclass
class CallBetweenSteps:
    """State of shared calls, which all members make together, such as `session.evaluate`."""

    may_be_made: bool = False
    """True once the script has asked for a batch, or begun a step: before that, scripts may be at
    different points."""
    is_under_way: bool = False
    has_too_few: bool = False
    """True if the generation was formed for a shared call, and has too few members for a step."""
    end_step: int = 0
    """Step at which the script left its loop over the batches; 0 while it is in the loop. The state
    must not be rolled back to before this step."""

    def check_end(self, call: str, step: int) -> None:
        """Raise StateLost if the state was rolled back to before the end of the script's loop."""
        if step < self.end_step:
            raise StateLost(
                f"{call} after the loop over the batches cannot use the trained model",
                seen=f"after the loss of members since the loop, the others hold step {step}"
                " at best",
                expected=f"the whole state of step {self.end_step} on the remaining members",
                fix="Run the job again with --fresh, from its newest checkpoint if its script has "
                "checkpoints=. With more copies (copies=2) more members may be lost at once.",
            )


@dataclass
class ProposalDetails:
    """Details of a member's model and batches, besides the fields of its proposal."""

    optional_fields: dict[str, str] = field(default_factory=dict)
    """Values that must be the same on all members that propose them."""
    listings: dict[str, bytes] = field(default_factory=dict)
    """Packed entries that a field's value covers, by the field's name: the coordinator names the
    first entry that differs."""
    shares: ShareSizes | None = None
    """Check that rejects planned changes after which shares would be too small for a layer; None:
    no check. Not sent."""


class ElasticController:
    """Controller of one member: passes the generations of its membership on to its strategy.

    The trainer's thread calls all methods, except `_judge`, `_find_unreachable` and
    `_find_checkpoints` (the membership's thread that reads notices), and `_on_break` (any thread).
    """

    def __init__(
        self, member: Member, *, check_peers: str = "never", trackers: Sequence[Tracker] = ()
    ) -> None:
        self.member = member
        self.job_log = JobLog(member.spec.job, member.member_id, trackers)
        self.membership = self._membership_of(member)
        self._check_peers = check_peers if member.coordinators else "never"
        self._probe: ProbeListener | None = None
        self._validators = ValidatorSet({}, member.member_id)
        self.generation: Generation | None = None
        self._strategy: Strategy | None = None
        self.on_entered: Callable[[], None] = lambda: None
        """Called each time the member has entered a generation, before the script continues."""
        self.call = CallBetweenSteps()
        self.details = ProposalDetails()
        self._is_ready = False
        self._proposed = False
        self._newest_number = 0
        self._left = False

    def _membership_of(self, member: Member) -> MemberSession | LoneMember:
        if not member.coordinators:
            return LoneMember(member, self._judge)
        return MemberSession(
            member,
            judge=self._judge,
            find_unreachable=self._find_unreachable,
            find_checkpoints=self._find_checkpoints,
            on_break=self._on_break,
        )

    def attend(self) -> None:
        """Join the job. Raises the coordinator's refusal, DeadlineExceeded if no coordinator admits
        this member in time, or Drained if it was asked to leave meanwhile."""
        with ExitStack() as refused:
            refused.callback(self.job_log.close)
            refused.callback(self._stop_listening)
            if self._check_peers != "never":
                self._listen()
            try:
                with drained():
                    self.membership.join()
            except ShoalError as error:
                self.membership.failed(error)
                raise
            refused.pop_all()
        log.debug("job_joined", job=self.member.spec.job, member=self.member.member_id)

    def set_strategy(self, strategy: Strategy, validators: ValidatorSet) -> None:
        """Set the strategy to train with, and the validators that may reject rosters."""
        if isinstance(self.membership, LoneMember):
            self.membership.check_strategy(strategy.name, synchronous=strategy.synchronous)
        self._validators, self._strategy = validators, strategy
        strategy.attach(
            Context(
                job=self.member.spec.job,
                coordinators=self.member.coordinators,
                token=lambda: self.membership.token,
                limits=self.membership.limits,
                held_until_s=lambda: self.membership.held_until_s,
                is_away=lambda: self.membership.is_disconnected,
                no_generation_follows=lambda: self.membership.no_generation_follows,
                ended=lambda: self.membership.failure,
                stores=self._stores(),
                report_status=self.membership.report_status,
            )
        )

    def _stores(self) -> GenerationStores:
        addresses = self.member.coordinators
        if not addresses:
            return LoneStores()
        return RendezvousStores(addresses, self.member.shared_directory)

    def drop_strategy(self) -> None:
        """Remove the strategy, as it could not distribute the model."""
        self._strategy = None

    @property
    def has_proposed(self) -> bool:
        """True if this member has sent its proposal."""
        return self._proposed

    @property
    def strategy(self) -> Strategy:
        if self._strategy is None:
            raise InvalidSpec(
                "nothing is distributed yet",
                expected="session.distribute(model, optimizer) before batches and steps",
            )
        return self._strategy

    def ensure_generation(self, fields: dict[str, str]) -> Generation:
        """Return the generation in which the next step may begin; form or change it if needed.

        Waits as long as the job's limits allow, then raises DeadlineExceeded. Also raises the
        coordinator's refusal, errors of a bring-up or of the last step's checkpoint, and Drained if
        this member is to leave now.
        """
        try:
            with drained():
                return self._ensure_generation(fields)
        except Drained:
            self._keep_state()
            raise

    def _ensure_generation(self, fields: dict[str, str]) -> Generation:
        strategy = self.strategy
        if self._left:
            raise InvalidSpec("the session is over", expected="a new shoal.join")
        while True:
            if self._is_ready:
                # Again in each new generation, which may owe a checkpoint of the latest step.
                self._finish_last_step(strategy)
            self.call.may_be_made = True
            if not self._is_ready:
                self._form(fields)
                continue
            strategy.note_coordinator_wait(begins=True)
            try:
                record = self.membership.begin_step(
                    strategy.step,
                    self._hand_over_and_leave,
                    steps_before_leaving=strategy.writes_checkpoints,
                )
            finally:
                strategy.note_coordinator_wait(begins=False)
            generation = self.generation
            assert generation is not None
            if record is not None:
                self._hand_over(record)
                strategy.abandon()
                self._is_ready = False
                self._bring_up(record)
            elif not strategy.synchronous:
                return self._follow(generation)
            elif self.call.has_too_few:
                few = f"{generation.world_size} of at least {self.member.spec.min_members} members"
                self._recover(GenerationBroken(f"a call between two steps has ended, with {few}"))
            elif self.membership.is_broken(generation.number):
                self._recover(GenerationBroken(f"generation {generation.number} was broken"))
            else:
                return generation

    def present_or_next_generation(self, fields: dict[str, str]) -> Generation:
        """Return the present generation, or form the next one if it has ended, for calls between
        two steps. Waits and raises what `ensure_generation` raises."""
        with drained():
            if not self._is_ready:
                self._form(fields)
        assert self.generation is not None, "formed"
        return self.generation

    def _finish_last_step(self, strategy: Strategy) -> None:
        if strategy.checkpoint_due:
            # A job that resumes from the checkpoint does not log these values again.
            self.job_log.flush()
        try:
            strategy.between_steps()
            leaves = strategy.leaves_with_checkpoint()
        except Exception as error:
            if not self.is_break(error):
                raise
            self._recover(error)
            return
        if leaves:
            drained = MemberDrained("this member leaves", seen="it was asked to")
            raise strategy.checkpoint_failure or self.membership.failure or drained

    def conclude(self, *, has_batches: bool) -> None:
        """Finish the latest step, as the script takes no further step; its changes since belong to
        that step. Without batches of the session, the last steps are flushed. Raises the errors of
        the strategy's `between_steps` and `flush`, except those that mean a lost peer."""
        if self._left or not self._is_ready:
            return
        try:
            self.strategy.between_steps()
            if not has_batches:
                self.strategy.flush()
        except Exception as error:
            if not self.is_break(error):
                raise
            log.debug("session_end_not_reported", reason=str(error)[:300])

    def _hand_over_and_leave(self) -> None:
        successor = self.membership.successor()
        if successor is not None:
            self._hand_over(successor)

    def _hand_over(self, successor: GenerationRecord) -> None:
        assert self.generation is not None, "a generation is handed over"
        self.job_log.flush()
        stay = {entry.member_id for entry in successor.roster.entries}
        members = {entry.member_id for entry in self.generation.entries}
        try:
            self.strategy.hand_over(leaving=members - stay)
        except (RuntimeError, RetryError, RejoinError) as error:
            # A member was lost: the next generation starts from the copies that exist.
            log.debug("hand_over_failed", reason=str(error)[:300])

    def is_break(self, error: BaseException) -> bool:
        """True if an error in a step means a lost peer, not an error in the script."""
        if self.generation is None or not self.strategy.synchronous:
            return False
        if isinstance(error, GenerationBroken):
            return True
        if isinstance(error, RuntimeError):
            is_broken = self.membership.is_broken(self.generation.number)
            return is_broken or self.strategy.is_failure(error)
        # An aborted collective leaves wrong values, which may fail a check of the script's.
        is_check = isinstance(error, Exception) and not isinstance(error, ShoalError)
        return (is_check or isinstance(error, MalformedMessage)) and self.strategy.has_leftovers()

    def recover(self, error: BaseException) -> None:
        """Roll back to the last committed step after a peer was lost in the generation, and report
        that step.

        If the coordinator does not report the break in time, raises `error` again, or after a hang
        GenerationBroken. Raises InvalidSpec if the members' scripts wait at different points. Also
        raises the coordinator's refusal, and Drained as `ensure_generation` does.
        """
        try:
            with drained():
                self._recover(error)
        except Drained:
            self._keep_state()
            raise

    def _keep_state(self) -> None:
        """Write a checkpoint if this member leaves and no generation continues from its latest
        step. Only the generation's first remaining member writes. Raises CheckpointFailed."""
        generation = self.generation
        if generation is None or self._is_ready or not self.membership.no_generation_follows:
            return
        members = (entry.member_id for entry in generation.entries)
        remaining = (name for name in members if name not in self.membership.lost)
        if next(remaining, "") == self.member.member_id:
            self.strategy.keep_alone()
            if self.strategy.checkpoint_failure:
                raise self.strategy.checkpoint_failure

    def _recover(self, error: BaseException) -> None:
        generation, strategy = self.generation, self.strategy
        assert generation is not None
        if refusal := strategy.refusal_in(generation.number):
            raise refusal from error
        self._is_ready = False
        started_s = time.perf_counter()
        # Cut the group first: members that wait see their connections close.
        strategy.cut(generation.number)
        strategy.abandon()
        self._await_break(generation.number, error)
        noticed_s = time.perf_counter()
        self._settle()
        log.debug(
            "generation_left",
            generation=generation.number,
            step=strategy.step,
            notice_s=round(noticed_s - started_s, 4),
            settle_s=round(time.perf_counter() - noticed_s, 4),
            reason=str(error)[:300],
        )

    def _settle(self) -> None:
        strategy = self.strategy
        enough = self._enough_for_call() if self.call.is_under_way else 0
        self.membership.settle(strategy.step, has_state=strategy.has_state, enough_for_call=enough)

    def _enough_for_call(self) -> int:
        """Return the smallest number of members that can hold the model between two steps."""
        least = self.member.spec.min_members
        return next((n for n in range(1, least) if not self.strategy.refuses(n)), least)

    def pause(self, reason: str, limit_s: float) -> None:
        """Let the other members wait while this member's script does something other than train."""
        if self._strategy is not None and not self._strategy.synchronous:
            # Members at their staleness bound must not wait for this member.
            self._strategy.rest()
        self.membership.pause(reason, limit_s)

    def resume(self) -> None:
        """End the pause."""
        self.membership.resume()

    def leave(self, *, completed: bool, reason: str) -> None:
        """End the membership. May be called twice; the first call counts."""
        if self._left:
            return
        self._left = True
        # Each callback runs, from last to first, even if another one raises.
        with ExitStack() as releases:
            releases.callback(self.job_log.close)
            if self._strategy is not None:
                releases.callback(self._strategy.close)
            releases.callback(self._stop_listening)
            releases.callback(self.membership.leave, completed=completed, reason=reason)
        log.debug("job_left", job=self.member.spec.job, completed=completed, reason=reason)

    def _form(self, fields: dict[str, str]) -> None:
        strategy = self.strategy
        if not self._proposed:
            refuse_default_device()
            self._proposed = True
            self.membership.propose(
                {name: _shortened(value) for name, value in fields.items()},
                synchronous=strategy.synchronous,
                step=strategy.step,
                has_state=strategy.has_state,
                optional_fields=self.details.optional_fields,
                listings=self.details.listings,
            )
        while not self._is_ready:
            started_s = time.perf_counter()
            strategy.note_coordinator_wait(begins=True)
            try:
                record = self.membership.await_generation(above=self._newest_number)
            finally:
                strategy.note_coordinator_wait(begins=False)
            log.debug(
                "generation_agreed",
                generation=record.roster.generation,
                wait_s=round(time.perf_counter() - started_s, 4),
                reason=record.reason,
            )
            self._bring_up(record)

    def _bring_up(self, record: GenerationRecord) -> None:
        """Enter an agreed generation. If that fails, report the step for the next one. Raises
        errors that would recur, and BringUpFailed if this member is left out after several
        attempts."""
        strategy = self.strategy
        generation = Generation(record=record, token=self.membership.token)
        self._newest_number = generation.number
        # A failure may be that of a receiver: this member tries again, as its state would be lost
        # if it left.
        gives = strategy.has_state and any(
            entry.state == STATE_ACTION_RECEIVE for entry in record.roster.entries
        )
        try:
            strategy.enter(generation)
        except Exception as error:  # noqa: BLE001 - logged and reported, and most raised again
            self._recover_from_bring_up(generation.number, error, gives_state=gives)
            return
        self._entered(generation)
        self._is_ready = True
        self.membership.progress(strategy.step)
        if strategy.synchronous:
            self.membership.ready(record)

    def _recover_from_bring_up(self, number: int, error: Exception, *, gives_state: bool) -> None:
        strategy = self.strategy
        lost = isinstance(error, StateLost)
        text = f"{type(error).__name__}: {error}"
        is_own = self._is_own(number, error)
        if is_own:
            # The trace shows no values of variables, as tokens are among them.
            known = isinstance(error, ShoalError)
            trace = {} if known else {"trace": "".join(traceback.format_exception(error))}
            log.error("bring_up_failed", generation=number, reason=text[:300], **trace)
        if is_own and strategy.synchronous:
            # Report at once, so that other members need not detect this member's failure.
            self.membership.report_broken(text, own=True, state_lost=lost)
            # The next attempt may need the memory of this one's objects.
            traceback.clear_frames(error.__traceback__)
        strategy.abandon()
        tries_again = isinstance(error, _MAY_NOT_RECUR) or (gives_state and not lost)
        if is_own and not (strategy.synchronous and tries_again):
            raise error
        try:
            self._await_break(number, error, reported=is_own)
            self._settle()
        except BringUpFailed as left_out:
            raise left_out from error
        if not is_own:
            log.debug("bring_up_broken", generation=number, reason=str(error)[:300])

    def _is_own(self, number: int, error: Exception) -> bool:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RetryError | RejoinError) or self.membership.is_broken(number):
            return False
        return not self.strategy.is_failure(error)

    def _follow(self, generation: Generation) -> Generation:
        """Return the newest generation, and enter it if it is new. Only asynchronous strategies
        call this."""
        token = self.membership.token
        if token.generation > generation.number:
            # The membership's thread has the new record already, as the token has its number.
            record = self.membership.await_generation(above=generation.number, timeout_s=1.0)
            generation = Generation(record=record, token=token)
            self.strategy.enter(generation)
            self._entered(generation)
            self._newest_number = generation.number
        return generation

    def _entered(self, generation: Generation) -> None:
        self.generation = generation
        is_small = generation.world_size < self.member.spec.min_members
        self.call.has_too_few = self.call.is_under_way and is_small
        self.on_entered()
        strategy = self.strategy
        self.job_log.record_generation(
            generation.record, synchronous=strategy.synchronous, step=strategy.step
        )

    def _await_break(self, number: int, error: BaseException, *, reported: bool = False) -> None:
        membership = self.membership
        if membership.is_broken(number):
            return
        hang = self.strategy.hang_report(number)
        if not reported:
            membership.report_broken(hang or f"{type(error).__name__}: {error}")
        if not membership.await_break(number, membership.limits.collective_s):
            raise GenerationBroken(f"generation {number} hung", seen=hang) if hang else error

    # --- before a generation ---

    def _judge(self, prepare: Prepare) -> Sequence[Rejection]:
        world_size = len(prepare.roster.entries)
        expected = self._strategy.refuses(world_size) if self._strategy is not None else ""
        shares = self.details.shares
        if not expected and prepare.roster.planned and shares is not None:
            # A planned change may be refused: present members train on without the new member.
            expected = shares.refuses(world_size)
        if expected:
            return [Rejection(field="world_size", seen=str(world_size), expected=expected)]
        limit_s = VALIDATION_SHARE * self.membership.limits.prepare_s
        return self._validators.rejections(prepare.roster, limit_s)

    def _find_unreachable(self, prepare: Prepare) -> Mapping[str, str]:
        peers = peers_to_check(prepare.roster, self.member.member_id, self._check_peers)
        limit_s = self.membership.limits.probe_s
        unreachable = check(peers, limit_s) if peers and limit_s > 0 else {}
        for peer, seen in unreachable.items():
            log.warning("peer_unreachable", peer=peer, reason=seen)
        return unreachable

    def _find_checkpoints(self) -> Sequence[int]:
        return self._strategy.checkpoint_steps() if self._strategy is not None else ()

    def _listen(self) -> None:
        member = self.member
        try:
            self._probe = ProbeListener(member.info.address, member.member_id, member.incarnation)
        except OSError as error:
            # A host without a free port still trains; its peers cannot check it.
            log.warning("no_probe_port", reason=str(error))
            return
        member.info.probe_port = self._probe.port

    def _stop_listening(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()

    def _on_break(self, generation: int, reason: str) -> None:
        if self._strategy is not None and self._strategy.synchronous:
            self._strategy.cut(generation)


def _shortened(value: str) -> str:
    if len(value) <= MAX_FIELD_CHARACTERS:
        return value
    digest = sha256(value.encode()).hexdigest()
    return f"{value[: MAX_FIELD_CHARACTERS // 4]}... {digest}"
