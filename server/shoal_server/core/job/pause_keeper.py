"""Whom all wait for while it runs code of its own: limits stand still, and all are told."""

from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership.events import Paused, PausesNotice, Resumed
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.pauses import Pause, told


class PauseKeeper:
    """The pauses of members that others wait for."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self.told_paused: tuple[str, ...] = ()
        """Whom all were told of last."""

    def pausing(self) -> list[tuple[Member, Pause]]:
        """Who is paused, of those whom others wait for."""
        return [each for each in self._state.table.pauses if self._is_waited_for(each[0])]

    def _is_waited_for(self, member: Member) -> bool:
        if not self._state.attempt_is_synchronous:
            return False
        if self._state.running is None:
            return (
                member.is_in(self._state.attempt or self._state.previous)
                or self._state.previous is None
            )
        return member.is_in(self._state.running) or member.is_in(self._state.attempt)

    def why_paused(self, now_s: float | None = None) -> str:
        """Whom all wait for, and until when at most; empty while nobody is paused."""
        pausing = self.pausing()
        texts = [
            told(member, self._state.rank_of(member), pause, now_s) for member, pause in pausing[:3]
        ]
        more = [f"and {len(pausing) - 3} more"] if len(pausing) > 3 else []
        return "; ".join(texts + more)

    def keep_limits(self, now_s: float) -> None:
        """Before anything is looked at: what passed while somebody was paused counts for no limit.

        Whatever tells of a loss goes on as ever: broken streams, halts, a collective that failed.
        """
        by_s = self._state.table.pauses.hold(now_s, held=bool(self.pausing()))
        if not by_s:
            return
        self._state.deadlines.hold(by_s)
        self._state.table.postpone_drains(by_s)

    def tell(self, now_s: float) -> None:
        """After anything that may change it: tell all whom they wait for, if that is news."""
        paused = tuple(sorted(member.member_id for member, _ in self.pausing()))
        self._state.table.pauses.hold(now_s, held=bool(paused))
        if paused == self.told_paused:
            return
        self.told_paused = paused
        self.tell_all()

    def tell_all(self) -> None:
        """Let the limits of all members begin anew, or stand still while somebody is paused."""
        notice = self.notice()
        for member in self._state.members.values():
            self._state.tell(member, notice)

    def notice(self) -> PausesNotice:
        reason = self.why_paused() or self._state.stage.reason
        return PausesNotice(reason=reason, member_ids=self.told_paused)

    def begin(self, member: Member, event: Paused, now_s: float) -> None:
        known = self._state.table.pauses.of(member)
        pause = self._state.table.pauses.begin(member, event, now_s)
        if known is None and pause is not None:
            text = told(member, self._state.rank_of(member), pause)
            text += f", {pause.limit_s:g} s at the most"
            self._state.log("member_paused", text, member)

    def end(self, member: Member, event: Resumed, now_s: float) -> None:
        pause = self._state.table.pauses.end(member, event.number)
        # What it did meanwhile was announced.
        member.trainer.own_code_since_s = None
        if pause is not None:
            text = f"{member.member_id} goes on after {now_s - pause.since_s:.1f} s: {pause.reason}"
            self._state.log("member_resumed", text, member)
