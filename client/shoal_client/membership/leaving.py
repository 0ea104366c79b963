"""How a membership ends by the member's own will, or an operator's."""

from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_proto.errors import Fenced, MemberDrained, ShoalError
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

UNHEARD_TOLD_S = 0.3
"""Whoever was not heard for the whole of its drain tries once more, and goes."""


def drained(identity: Identity, reason: str) -> MemberDrained:
    """What ends the membership of a member that was asked to leave."""
    return MemberDrained(f"{identity.member_id} leaves job {identity.spec.job}", seen=reason)


class Leaving:
    """What is known of it so far."""

    def __init__(self) -> None:
        self.reason = ""
        """Why this member is to leave by agreement with the others; empty: it is not."""
        self.is_noticed = False
        """Whether the log has said that it is to leave."""
        self.unreplaced = False
        """True if no generation follows without this member."""
        self.is_unheard = False
        """Whether nobody was there to let it go, for as long as it waited for that."""
        self.has_begun = False
        self.was_told = False
        """Whether the coordinator took note."""
        self.stays_as: pb.LeaveRequest | None = None
        """What a member said that stays with its work done, or that closed the job."""
        self._drained = False

    def ask(self, reason: str) -> None:
        """The first reason stands."""
        self.reason = self.reason or reason

    def begin(self, *, drained: bool) -> None:
        """`drained`: the coordinator has let it go already."""
        self.has_begun, self._drained = True, drained

    def told_within_s(self, timeout_s: float) -> float:
        """How long to try to say that this member leaves."""
        return min(timeout_s, UNHEARD_TOLD_S) if self.is_unheard else timeout_s

    def told(self, error: ShoalError | None, member_id: str) -> list[ev.Effect]:
        """What the coordinator made of the word that this member leaves."""
        if error is None:
            self.was_told = True
            return []
        fields = {"member": member_id, "reason": str(error)}
        if not isinstance(error, (Fenced, MemberDrained)):
            return [ev.Log(event="leave_failed", fields=fields, is_warning=True)]
        self.was_told = self._drained or isinstance(error, MemberDrained)
        if self.was_told:
            return []  # it was let go: the word that it leaves came second, as it mostly does
        return [ev.TellEnding(error=error), ev.Log(event="leave_not_needed", fields=fields)]

    # --- staying, with nothing left to do ---

    def work_done(self, event: ev.WorkDone, token: Token) -> pb.LeaveRequest:
        """To say that this member stays, done with its own work or with the job; new leaders hear
        all of it again."""
        before = self.stays_as or pb.LeaveRequest()
        self.stays_as = pb.LeaveRequest(
            token=token,
            completed=True,
            reason=event.reason[:1000],
            stays=event.finished or before.stays,
            closes=event.closes or before.closes,
        )
        return self.stays_as

    # --- requests ---

    @staticmethod
    def drain_request(identity: Identity, reason: str) -> pb.DrainRequest:
        return pb.DrainRequest(
            job=identity.spec.job,
            member_id=identity.member_id,
            incarnation=identity.incarnation,
            reason=reason[:1000],
        )
