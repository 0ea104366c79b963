"""A member's clock, in a job with a staleness bound."""

import math
import time
from collections.abc import Callable

import structlog

from shoal_client.connection.coordinators import OUTLASTED, Coordinators
from shoal_proto.errors import DeadlineExceeded, ShoalError
from shoal_proto.v1 import clocks_pb2 as pb
from shoal_proto.v1.clocks_pb2_grpc import ClocksStub
from shoal_proto.v1.identity_pb2 import Token

log = structlog.get_logger(__name__)

POLL_S = 5.0
"""Maximum wait of one call: a lost call is soon repeated."""
REPORT_WITHIN_S = 0.25
REPORT_AGAIN_S = 0.5
REST_WITHIN_S = 2.0
ANSWER_WITHIN_S = 5.0
REST_AGAIN_S = 1.0


class Clock:
    """A member's clock. Not thread-safe; `rest` must be the last call.

    A step of a round begins with `begin` and ends with `finished`. Meanwhile the other members that
    take steps are at most `bound` rounds ahead or behind."""

    def __init__(
        self,
        coordinators: Coordinators,
        token: Callable[[], Token],
        *,
        bound: int,
        wait_s: float = 60.0,
        ended: Callable[[], ShoalError | None] = lambda: None,
    ) -> None:
        """`wait_s`: limit on a wait for other members while a coordinator answers. `ended`: returns
        the error that ended the membership, if any; the error ends every wait."""
        self._coordinators = coordinators
        self._token = token
        self._bound = bound
        self._wait_s = wait_s
        self._ended = ended
        self._round = 0
        self._slowest = 0
        self._enters = True
        self._rested_s = self._silent_until_s = -math.inf

    @property
    def round(self) -> int:
        """The round of the present or next step."""
        return self._round

    @property
    def slowest(self) -> int:
        """The lowest clock of all members in the last answer."""
        return self._slowest

    def begin(self) -> bool:
        """Return once a step of this member may begin; True if newer values must be pulled first.
        Waits, also for a coordinator, only if the step is the first (or the first after `rest`), or
        if the last answer does not permit it. Raises DeadlineExceeded, which names the members
        waited for, a refusal, or the error that ended the membership.
        """
        known = self._slowest
        if self._enters or known < self._round - self._bound:
            self._wait(pulled=False)
            return True
        self._report()
        # The coordinator may have moved this member to a newer round.
        return known < self._round - self._bound

    def await_pulled(self) -> None:
        """Return once every member has the values of this round. Raises what `begin` raises."""
        self._wait(pulled=True)

    def finished(self) -> None:
        """End the round once its push is acknowledged."""
        self._round += 1

    def rest(self) -> None:
        """Report that this member takes no steps for now, so that no member waits for it. Repeat
        the call until `begin`: a new leader waits for members whose clocks it does not know. The
        report is sent at most once in REST_AGAIN_S. Raises refusals; a missing answer is only
        logged."""
        now_s = time.monotonic()
        if self._enters and now_s - self._rested_s < REST_AGAIN_S:
            return
        self._enters, self._rested_s = True, now_s
        request = pb.RestRequest(token=self._token(), clock=self._round)
        try:
            self._coordinators.call(
                lambda channel: ClocksStub(channel).Rest, request, timeout_s=REST_WITHIN_S
            )
        except OUTLASTED as error:
            log.info("clock_not_reported", reason=str(error))

    def _report(self) -> None:
        if time.monotonic() < self._silent_until_s:
            return
        try:
            reply = self._call(0.0, REPORT_WITHIN_S, begins=True)
            self._slowest = max(self._slowest, reply.slowest)
            if reply.clock > self._round:
                # The new round takes effect once it is reported.
                self._round = reply.clock
                self._call(0.0, REPORT_WITHIN_S, begins=True)
        except OUTLASTED as error:
            # A later step reports again.
            self._silent_until_s = time.monotonic() + REPORT_AGAIN_S
            log.info("clock_not_reported", reason=str(error))

    def _wait(self, *, pulled: bool) -> None:
        waited_s, reason = 0.0, "no member"
        while waited_s < self._wait_s:
            reply, took_s = self._ask(min(POLL_S, self._wait_s - waited_s), pulled=pulled)
            self._adopt(reply)
            if reply.allowed:
                return
            waited_s, reason = waited_s + took_s, reply.reason
        raise DeadlineExceeded(
            f"this member may not begin its step in round {self._round}",
            seen=f"a wait of {self._wait_s:g} s for {reason}",
            expected=f"every member at most {self._bound} rounds before this one",
            fix="`shoal status` shows the slowest member; or raise the bound.",
        )

    def _ask(self, wait_s: float, *, pulled: bool) -> tuple[pb.AdvanceReply, float]:
        def ask() -> tuple[pb.AdvanceReply, float]:
            sent_s = time.monotonic()
            reply = self._call(wait_s, wait_s + ANSWER_WITHIN_S, pulled=pulled)
            return reply, time.monotonic() - sent_s

        try:
            return self._coordinators.persist(
                ask, waits_for="the others' clocks", gives_up=self._is_over
            )
        except OUTLASTED as error:
            # The member may have been asked to leave.
            raise self._ended() or error from None

    def _is_over(self) -> bool:
        return self._ended() is not None

    def _call(
        self, wait_s: float, timeout_s: float, *, pulled: bool = False, begins: bool = False
    ) -> pb.AdvanceReply:
        request = pb.AdvanceRequest(
            token=self._token(),
            clock=self._round,
            enters=self._enters,
            bound=self._bound,
            pulled=pulled,
            begins=begins,
            wait_s=wait_s,
        )
        return self._coordinators.call(
            lambda channel: ClocksStub(channel).Advance,
            request,
            timeout_s=timeout_s,
            gives_up=self._is_over,
        )

    def _adopt(self, reply: pb.AdvanceReply) -> None:
        if self._enters:
            if reply.allowed:  # otherwise its first round is not known yet
                self._enters, self._round, self._slowest = False, reply.clock, reply.slowest
            return
        self._round, self._slowest = reply.clock, max(self._slowest, reply.slowest)
