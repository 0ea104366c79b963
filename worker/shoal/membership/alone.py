"""Member that trains alone, as no coordinator was named, in one generation. Only checkpoints
outlive the process."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from shoal_client.connection.coordinators import Coordinators
from shoal_client.liveness.trainer_status import TrainerStatus
from shoal_client.membership.member import Member
from shoal_proto.errors import (
    DeadlineExceeded,
    InvalidSpec,
    MemberDrained,
    ProposalConflict,
    ShoalError,
)
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

log = structlog.get_logger(__name__)

GENERATION = 1
LIMITS = pb.Limits(
    heartbeat_s=0.5, prepare_s=10.0, bring_up_s=30.0, collective_s=30.0, join_s=120.0
)
"""Defaults of `shoal coordinator`."""
WITH_SEVERAL = "Start it with `shoal run -n 3 SCRIPT`, which also starts a cluster for it."


class LoneMember:
    """Only member of a job without a coordinator, in place of `MemberSession`, which documents the
    methods."""

    def __init__(
        self, member: Member, judge: Callable[[pb.Prepare], Sequence[pb.Rejection]]
    ) -> None:
        self._member = member
        self._judge = judge
        self._generation = 0
        self._proposal = pb.Proposal()
        self._drain_reason = ""

    # --- joining ---

    def join(self) -> None:
        """Log that this member trains alone."""
        log.warning(
            "training_alone",
            job=self._member.spec.job,
            reason="no coordinator was named",
            fix=WITH_SEVERAL,
        )

    def check_strategy(self, name: str, *, synchronous: bool) -> None:
        """Raise InvalidSpec for a strategy that trains through parameter servers."""
        if not synchronous:
            raise InvalidSpec(
                f"{name} trains through parameter servers, and this process trains alone",
                seen="no coordinator named, neither as an argument nor in SHOAL_COORDINATOR",
                expected="a strategy that needs no servers, such as ddp, or a cluster",
                fix=WITH_SEVERAL,
            )

    def propose(
        self,
        fields: Mapping[str, str],
        *,
        synchronous: bool,
        step: int,
        has_state: bool,
        optional_fields: Mapping[str, str],
        listings: Mapping[str, bytes],
    ) -> None:
        self._proposal = pb.Proposal(
            fields=fields,
            synchronous=synchronous,
            step=step,
            has_state=has_state,
            optional_fields=optional_fields,
            listings=listings,
        )

    def await_generation(self, above: int, timeout_s: float | None = None) -> pb.GenerationRecord:
        """Return the only generation. Raises ProposalConflict if the strategy or a validator
        rejects it, and DeadlineExceeded if `above` is not below its number."""
        if above >= GENERATION:
            raise DeadlineExceeded(f"no generation follows generation {above} of a lone member")
        roster = self._roster()
        if rejections := self._judge(pb.Prepare(roster=roster)):
            raise ProposalConflict(
                "this process cannot train alone",
                seen="; ".join(f"{each.field}: {each.seen}" for each in rejections),
                expected="; ".join(each.expected for each in rejections if each.expected),
                fix=WITH_SEVERAL,
                details={each.field: each.seen for each in rejections},
            )
        self._generation = GENERATION
        return pb.GenerationRecord(
            job=self._member.spec.job,
            roster=roster,
            verdict=pb.VERDICT_COMMITTED,
            reason="it is the only member",
            decided_unix_s=time.time(),
        )

    def _roster(self) -> pb.Roster:
        member = self._member
        entry = pb.RosterEntry(
            member_id=member.member_id,
            host=member.info.host,
            address=member.info.address,
            state=pb.STATE_ACTION_INITIAL,
            step=self._proposal.step,
            public_id=member.identity.public_id,
        )
        return pb.Roster(
            generation=GENERATION,
            entries=[entry],
            source_member_id=member.member_id,
            step=self._proposal.step,
            synchronous=self._proposal.synchronous,
            fields=self._proposal.fields,
        )

    def ready(self, record: pb.GenerationRecord) -> None:
        """Do nothing: no member waits for the report."""

    # --- training ---

    def begin_step(
        self,
        step: int,
        hand_over: Callable[[], None] | None = None,
        *,
        steps_before_leaving: bool = False,
    ) -> pb.GenerationRecord | None:
        if self._drain_reason and not steps_before_leaving:
            raise MemberDrained("this member was asked to leave", seen=self._drain_reason)
        return None

    def progress(self, step: int) -> None:
        """Do nothing: no coordinator needs the step."""

    def report_status(self, status: TrainerStatus) -> None:
        """Do nothing: no heartbeats are sent."""

    def pause(self, reason: str, limit_s: float) -> None:
        """Do nothing: no other member has to wait."""

    def resume(self) -> None:
        """Do nothing: no other member had to wait."""

    def is_broken(self, generation: int) -> bool:
        return False

    def await_break(self, generation: int, limit_s: float) -> bool:
        """Return False: no other member can be lost, so the failure is this process's own."""
        return False

    def report_broken(self, error: str, *, own: bool = False, state_lost: bool = False) -> None:
        """Do nothing: the caller raises the error."""

    def settle(self, step: int, *, has_state: bool, enough_for_call: int = 0) -> None:
        """Do nothing: no coordinator needs the step."""

    # --- leaving ---

    def drain(self, reason: str) -> None:
        self._drain_reason = reason

    @property
    def lost(self) -> frozenset[str]:
        return frozenset()

    @property
    def no_generation_follows(self) -> bool:
        return bool(self._drain_reason)

    def leave(self, *, completed: bool, reason: str) -> bool:
        return True

    def successor(self) -> pb.GenerationRecord | None:
        """Return None: no generation follows."""
        return None

    def failed(self, error: ShoalError) -> None:
        """Do nothing: no launcher waits for the error."""

    # --- state ---

    @property
    def coordinators(self) -> Coordinators:
        raise InvalidSpec("no coordinator was named", seen="a member that trains alone")

    @property
    def token(self) -> Token:
        return self._member.identity.token(self._generation)

    @property
    def limits(self) -> pb.Limits:
        return LIMITS

    @property
    def http_url(self) -> str:
        return ""

    @property
    def failure(self) -> ShoalError | None:
        return None

    @property
    def waiting_for(self) -> str:
        return ""

    @property
    def held_until_s(self) -> float:
        return -math.inf

    @property
    def is_disconnected(self) -> bool:
        return False

    @property
    def away_s(self) -> float:
        return 0.0
