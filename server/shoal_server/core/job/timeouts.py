"""Time limits: what is done once a limit has passed, and when the next limit passes."""

import math
from collections.abc import Iterator

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.job.collecting import Collecting
from shoal_server.core.job.endings import Endings, Removal
from shoal_server.core.job.job_state import JobState
from shoal_server.core.job.running import BringUps, PauseKeeper
from shoal_server.core.membership import refusals
from shoal_server.core.membership.member import MemberState, names_of
from shoal_server.core.membership.pauses import pause_in_words
from shoal_server.core.membership.phases import Phase, Trigger


class Timeouts:
    """Acts on limits that have passed."""

    def __init__(
        self,
        state: JobState,
        *,
        pause_keeper: PauseKeeper,
        endings: Endings,
        removal: Removal,
        bring_ups: BringUps,
        collecting: Collecting,
    ) -> None:
        self._state = state
        self._pause_keeper = pause_keeper
        self._endings = endings
        self._removal = removal
        self._bring_ups = bring_ups
        self._collecting = collecting

    def deadline_passed(self, now_s: float) -> None:
        self._state.deadlines.deadline_s = None
        agreement = self._state.agreement
        if self._state.stage.phase is Phase.ABORTED:
            intact = self._state.running is not None
            self._state.to(
                Trigger.INTACT if intact else Trigger.BACKED_OFF, self._state.stage.reason, now_s
            )
        elif self._state.stage.phase is Phase.PREPARE and agreement is not None:
            self._expel_late(agreement.unanswered, "accept or reject the roster", now_s)
        elif self._state.stage.phase is Phase.COMMITTED and agreement is not None:
            self._bring_up_overdue(agreement, now_s)

    def _bring_up_overdue(self, agreement: Agreement, now_s: float) -> None:
        """Expel the members that hold up a bring-up, or move the deadline if it makes progress.

        A bring-up that makes progress is not late until `longest_bring_up_s` has passed. Members
        that only wait for others are not to blame.
        """
        over_s = self._state.deadlines.bring_up_over_s
        is_over = over_s is not None and now_s >= over_s
        concerned = self._state.members_to_notify(agreement.roster)
        moved_s = max((m.trainer.moved_s for m in concerned), default=float("-inf"))
        if now_s < moved_s + self._state.limits.bring_up_s and not is_over:
            self._state.deadlines.deadline_s = moved_s + self._state.limits.bring_up_s
            # Members that wait for the end of this bring-up restart their limits.
            self._pause_keeper.send_pauses()
            return
        to_stop = self._state.running is not None and agreement.stop_at is None
        late = agreement.unoffered if to_stop and agreement.unoffered else agreement.unready
        waiting = {m.member_id for m in concerned if m.trainer.waits_for_others}
        if late <= waiting:
            names = names_of([m for m in concerned if m.member_id in late])
            limits = self._state.limits
            stuck = f"nothing moved for {limits.bring_up_s:g} s"
            if is_over:
                stuck = f"it was not brought up within {limits.longest_bring_up_s:g} s"
            self._endings.abort(f"{stuck}, and {names} wait for each other", now_s)
            return
        self._expel_late(late - waiting, "bring the generation up", now_s)

    def _expel_late(self, names: set[str], task: str, now_s: float) -> None:
        late = [self._state.members[name] for name in sorted(names) if name in self._state.members]
        attempt = self._state.attempt if self._state.stage.phase is Phase.COMMITTED else None
        if attempt is not None and attempt.synchronous:
            # A member that holds the state waits for members that receive it, so it is not expelled
            # with them. If it hangs too, it will fail to stop after the break.
            late = [m for m in late if not attempt.keeps(m.member_id)] or late
        reason = f"{names_of(late)} did not {task} in time"
        self._endings.abort(reason, now_s)
        for member in late:
            if attempt is not None and attempt.synchronous:
                self._bring_ups.blame(member, attempt.generation, reason, now_s)
            if self._state.members.get(member.member_id) is member:
                self._removal.refuse(member, refusals.timeout(reason), now_s)

    def drop_overdue(self, now_s: float) -> None:
        """Refuse members that are ready and have waited for longer than the join limit, if no
        generation runs. If the job lacks only members (`waits_for_members`), the limit is
        `wait_for_members_s`."""
        self._state.deadlines.overdue_check_s = None
        if self._state.running is not None or self._state.stage.phase is not Phase.COLLECT:
            return
        limit_s = self._state.limits.join_s
        if self._collecting.waits_for_members:
            limit_s = self._state.limits.wait_for_members_s or math.inf
        ready = list(self._state.table.candidates.values())
        left_out = self._state.setbacks.left_out_errors(now_s)
        without = "".join(f"; {name} was left out: {error}" for name, error in left_out)
        seen = f"{self._ready_in_words(ready)}{without}"
        reason = f"no generation formed within {limit_s:g} s: {seen}"
        for member in [m for m in ready if now_s >= self._waits_since_s(m) + limit_s]:
            self._removal.refuse(member, refusals.timeout(reason), now_s)
        # Once no member that keeps the job is left, the join limit applies again.
        again_s = now_s + self._state.limits.join_s
        self._state.deadlines.overdue_check_s = min(
            (
                min(self._waits_since_s(m) + limit_s, again_s)
                for m in self._state.table.candidates.values()
            ),
            default=None,
        )

    def _ready_in_words(self, ready: list[MemberState]) -> str:
        amid = self._collecting.amid_call()
        num_needed = self._collecting.num_needed(amid)
        if not amid:
            return f"{len(ready)} of at least {num_needed} members were ready"
        return (
            f"{names_of(amid)} were in a call between two steps, such as session.evaluate, which"
            f" takes at least {num_needed} of the members that began it;"
            " members that join cannot help"
        )

    def _waits_since_s(self, member: MemberState) -> float:
        return max(
            member.waiting_since_s,
            self._state.stage.since_s,
            self._state.table.pauses.released_s,
        )

    def drop_paused(self, now_s: float) -> None:
        """Remove members whose pause is longer than announced: such a member counts as hung."""
        for member, pause in self._state.table.pauses:
            if now_s >= pause.ends_s and self._state.members.get(member.member_id) is member:
                text = pause_in_words(member, self._state.rank_of(member), pause, now_s)
                self._removal.refuse(member, refusals.pause_over(text, pause.limit_s), now_s)

    def deadlines(self) -> Iterator[float]:
        yield from self._state.table.deadlines()
        yield from self._state.setbacks.next_release_s(self._state.table.candidates)
        yield from (pause.ends_s for _, pause in self._state.table.pauses)
        if self._state.deadlines.suspect_since_s is not None:
            yield self._state.deadlines.suspect_since_s + self._state.limits.reconnect_s
        if not self._pause_keeper.pausing():
            yield from self._pausable_limits()

    def _pausable_limits(self) -> Iterator[float]:
        """Ends of the limits that do not run during a pause."""
        if self._state.deadlines.deadline_s is not None:
            yield self._state.deadlines.deadline_s
        if self._state.deadlines.broken_since_s is not None:
            yield self._state.deadlines.broken_since_s + self._state.limits.collective_s
        if self._state.deadlines.overdue_check_s is not None:
            yield self._state.deadlines.overdue_check_s
        for member in self._state.table.draining.values():
            if not member.drain.is_released and member.drain.since_s is not None:
                yield member.drain.since_s + self._state.limits.drain_s
        if self._state.stage.phase is Phase.COLLECT and not self._state.end.completing:
            yield from self._collect_deadlines()

    def _collect_deadlines(self) -> Iterator[float]:
        if self._state.running is not None:
            yield self._state.stage.since_s + self._state.limits.gather_s
            return
        formable = self._state.table.all_settled and self._collecting.are_enough
        formable = formable and not self._collecting.awaits_state
        if formable and self._state.deadlines.first_proposal_s is not None:
            yield self._state.deadlines.first_proposal_s + self._collecting.last_call_s
