"""End of a membership, wanted by the member or an operator."""

from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_proto.errors import Fenced, JobFinished, MemberDrained, ShoalError, Unavailable
from shoal_proto.short_lists import sendable
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

LEAVE_TIMEOUT_S = 3.0
UNANSWERED_LEAVE_TIMEOUT_S = 0.3
"""Time limit of the call to leave after a drain without an answer."""
LEAVE_NOT_NEEDED = (Fenced, JobFinished, MemberDrained)
"""Answers to a leave of a process that is no member any more."""


def drained(identity: Identity, reason: str) -> MemberDrained:
    """Error that ends the membership of a drained member."""
    return MemberDrained(f"{identity.member_id} leaves job {identity.spec.job}", seen=reason)


class LeaveState:
    """State of a member's leave."""

    def __init__(self) -> None:
        self.reason = ""
        """Empty: no drain."""
        self.is_noticed = False
        self.no_generation_follows = False
        """True if no generation follows the leave."""
        self.is_unanswered = False
        """True if no coordinator answered during the drain."""
        self.has_begun = False
        self.is_acknowledged = False
        self.work_done_request: pb.LeaveRequest | None = None
        """Newest request of `work_done`, if any."""
        self._drained = False

    def request_leave(self, reason: str) -> None:
        """Set the reason to leave, if there is none yet."""
        self.reason = self.reason or reason

    def begin(self, *, drained: bool) -> None:
        """Begin to leave. `drained`: the coordinator has removed the member already."""
        self.has_begun, self._drained = True, drained

    def call_timeout_s(self, timeout_s: float | None) -> float:
        """Time limit for the call to leave."""
        timeout_s = LEAVE_TIMEOUT_S if timeout_s is None else timeout_s
        return min(timeout_s, UNANSWERED_LEAVE_TIMEOUT_S) if self.is_unanswered else timeout_s

    def end_call(self, error: ShoalError | None, member_id: str) -> list[ev.Effect]:
        """Handle the end of the call to leave."""
        if error is None:
            self.is_acknowledged = True
            return []
        fields = {"member": member_id, "reason": str(error)}
        if not isinstance(error, LEAVE_NOT_NEEDED):
            return [ev.LogMessage(event="leave_failed", fields=fields, is_warning=True)]
        self.is_acknowledged = self._drained or not isinstance(error, Fenced)
        if self.is_acknowledged:
            return []  # usual: the coordinator removed the member, or ended the job, before
        return [
            ev.ReportEnding(error=error),
            ev.LogMessage(event="leave_not_needed", fields=fields),
        ]

    @staticmethod
    def not_recorded(error: ShoalError, failure: ShoalError | None) -> ShoalError:
        """Error of a member whose work is done, and whose call to leave was refused or given up.
        `failure`: the error that ended the membership, if any."""
        return Unavailable(
            "no coordinator has recorded that this member's work is done",
            seen="; ".join(str(each) for each in (failure, error) if each is not None),
            expected="an acknowledgement before this process has to end",
            fix="Run the job again once a coordinator answers: it continues from its newest"
            " checkpoint, and is then finished.",
        )

    # --- staying with the work done ---

    def work_done(self, event: ev.WorkDone, token: Token) -> pb.LeaveRequest:
        """Return the request for a member that stays with its work done, or closes the job."""
        before = self.work_done_request or pb.LeaveRequest()
        self.work_done_request = pb.LeaveRequest(
            token=token,
            completed=True,
            reason=sendable(event.reason, 1000),
            stays=event.finished or before.stays,
            closes=event.closes or before.closes,
        )
        return self.work_done_request

    # --- requests ---

    @staticmethod
    def drain_request(identity: Identity, reason: str) -> pb.DrainRequest:
        return pb.DrainRequest(
            job=identity.spec.job,
            member_id=identity.member_id,
            incarnation=identity.incarnation,
            reason=sendable(reason, 1000),
        )
