"""Handling of a member's calls."""

from dataclasses import replace

from shoal_client.membership import member_events as ev
from shoal_proto.errors import ShoalError
from shoal_proto.v1 import membership_pb2 as pb

ADMISSION_LOGGED_AFTER_S = 1.0
_UNANSWERED_EVENTS = {
    pb.PauseRequest: "pause_not_reported",
    pb.DrainRequest: "drain_not_accepted",
    pb.HeartbeatRequest: "heartbeat_failed",
}


class MemberCalls:
    """Makes effects that repeat calls, and that log the beginning and the end of an outage."""

    def __init__(self, member_id: str) -> None:
        self._member_id = member_id
        self._is_answered = True
        self._joined_s = self._joins_within_s = 0.0
        self._is_wait_logged = False

    def new(
        self,
        request: ev.Request,
        persistence: ev.Persistence,
        timeout_s: float,
        now_s: float,
        give_up_s: float = 0.0,
    ) -> ev.CallLeader:
        return ev.CallLeader(
            request=request,
            persistence=persistence,
            timeout_s=timeout_s,
            since_s=now_s,
            give_up_s=give_up_s,
        )

    def persistent(
        self, request: ev.Request, timeout_s: float, now_s: float, give_up_s: float
    ) -> ev.CallLeader:
        """A call that is repeated until `give_up_s`."""
        within_s = max(0.0, min(timeout_s, give_up_s - now_s))
        return self.new(request, ev.Persistence.UNTIL_ANSWERED, within_s, now_s, give_up_s)

    def joins(self, now_s: float, within_s: float) -> None:
        """Record that the member waits for admission, for at most `within_s`."""
        self._joined_s, self._joins_within_s = now_s, within_s

    def not_admitted(self, error: ShoalError | None, now_s: float) -> list[ev.Effect]:
        """Log, once, that no coordinator has admitted the member for ADMISSION_LOGGED_AFTER_S."""
        waited_s = now_s - self._joined_s
        if self._is_wait_logged or error is None or waited_s < ADMISSION_LOGGED_AFTER_S:
            return []
        self._is_wait_logged = True
        fields = {
            "waits_for": "admission",
            "waits_s": round(self._joins_within_s),
            "reason": str(error),
        }
        return [ev.LogMessage(event="coordinator_disconnected", fields=fields, is_warning=True)]

    def handle_admission(self, now_s: float) -> list[ev.Effect]:
        if not self._is_wait_logged:
            return []
        fields = {"waits_for": "admission", "away_s": round(now_s - self._joined_s, 1)}
        return [ev.LogMessage(event="coordinator_reconnected", fields=fields)]

    def handle_answer(self, call: ev.CallLeader, now_s: float) -> list[ev.Effect]:
        if isinstance(call.request, pb.HeartbeatRequest):
            self._is_answered = True
        if not call.num_failures:
            return []
        away_s = round(now_s - call.since_s, 1)
        fields = {"waits_for": _name(call), "away_s": away_s}
        return [ev.LogMessage(event="coordinator_reconnected", fields=fields)]

    def repeat_call(
        self, call: ev.CallLeader, error: ShoalError, chance: float, now_s: float
    ) -> list[ev.Effect]:
        """Repeat a call until it is given up."""
        left_s = call.give_up_s - now_s
        next_call = replace(
            call,
            after_s=min(call.back_off.pause_s(chance), left_s),
            timeout_s=min(call.timeout_s, left_s),
            num_failures=call.num_failures + 1,
        )
        if call.num_failures:
            return [next_call]
        fields = {"waits_for": _name(call), "reason": str(error)}
        return [
            ev.LogMessage(event="coordinator_disconnected", fields=fields, is_warning=True),
            next_call,
        ]

    def repeat_after_pause(self, call: ev.CallLeader) -> ev.CallLeader:
        """Repeat a call after a pause: some calls fail at once."""
        return replace(call, after_s=call.back_off.pause_s(1.0))

    def give_up_call(self, call: ev.CallLeader, error: ShoalError) -> list[ev.Effect]:
        is_news = not call.num_failures
        if isinstance(call.request, pb.HeartbeatRequest):
            is_news, self._is_answered = self._is_answered, False
        fields = {"member": self._member_id, "reason": str(error)}
        return (
            [ev.LogMessage(event=_UNANSWERED_EVENTS[type(call.request)], fields=fields)]
            if is_news
            else []
        )


def _name(call: ev.CallLeader) -> str:
    return type(call.request).__name__.removesuffix("Request")
