"""What the coordinator remembers only to show it: health reports and events, both bounded."""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal_server.status.views import EventView, HealthView

MAX_EVENTS = 1000
MAX_MEMBERS = 4096
MAX_JOBS = 256
MAX_LOSSES = 60
MAX_REASON_LENGTH = 2000


@dataclass(kw_only=True)
class _MemberHealth:
    latest: HealthView
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES))


@dataclass(kw_only=True)
class _JobBoard:
    events: deque[EventView] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    health: OrderedDict[str, _MemberHealth] = field(default_factory=OrderedDict)
    num_reports: int = 0
    highest_step: int = 0
    last_loss: float | None = None
    total_steps: int = 0
    event_counts: Counter[str] = field(default_factory=Counter)


class StatusBoard:
    """Health and events of the newest 256 jobs. It belongs to one event loop and does no I/O.

    Of each job it keeps the newest 1000 events, and the latest report and 60 losses of each of
    the 4096 members that reported last.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._jobs: OrderedDict[str, _JobBoard] = OrderedDict()
        # The clock sets the first id, so that ids go on rising when a coordinator is replaced;
        # in thousandths, so that events of less than 1000 a second cannot overtake it.
        self._last_event_id = int(clock() * 1000)

    def event(
        self, job: str, kind: str, reason: str, *, member_id: str = "", generation: int = 0
    ) -> EventView:
        """Note something that happened. `kind` is in the past tense, as in the log."""
        self._last_event_id += 1
        event = EventView(
            id=self._last_event_id,
            unix_s=self._clock(),
            kind=kind,
            reason=reason[:MAX_REASON_LENGTH],
            member_id=member_id,
            generation=generation,
        )
        board = self._board(job)
        board.events.append(event)
        board.event_counts[kind] += 1
        return event

    def events(self, job: str, *, after: int = 0, limit: int = 100) -> Sequence[EventView]:
        """The oldest `limit` events with an id above `after`, in order."""
        board = self._jobs.get(job)
        found = [e for e in board.events if e.id > after] if board else []
        return found[:limit]

    def last_events(self, job: str, limit: int) -> Sequence[EventView]:
        """The newest `limit` events, in order."""
        board = self._jobs.get(job)
        return list(board.events)[-limit:] if board else ()

    def event_counts(self, job: str) -> Mapping[str, int]:
        """How many events of each kind there were since this coordinator started."""
        board = self._jobs.get(job)
        return dict(board.event_counts) if board else {}

    def report(self, job: str, member_id: str, health: HealthView) -> None:
        """Keep a member's health report; the caller has checked that the member exists."""
        board = self._board(job)
        known = board.health.get(member_id)
        if known is None or known.latest.public_id != health.public_id:
            known = board.health[member_id] = _MemberHealth(latest=health)
            board.total_steps += health.step or 0
        else:
            board.total_steps += max(0, (health.step or 0) - (known.latest.step or 0))
        known.latest = health
        board.num_reports += 1
        board.highest_step = max(board.highest_step, health.step or 0)
        board.health.move_to_end(member_id)
        if len(board.health) > MAX_MEMBERS:
            board.health.popitem(last=False)
        if health.loss is not None:
            board.last_loss = health.loss
        if health.loss is not None and health.step is not None:
            if known.losses and known.losses[-1][0] >= health.step:
                known.losses.pop()  # the step was redone, or reported twice
            known.losses.append((health.step, health.loss))

    def begin_anew(self, job: str) -> None:
        """Drop what members of the job reported: the next run of its name has no steps and no loss
        yet. Events stay, and so do the counts of events and reports."""
        board = self._jobs.get(job)
        if board is not None:
            board.health.clear()
            board.highest_step = board.total_steps = 0
            board.last_loss = None

    def health(self, job: str, member_id: str, process: str) -> HealthView | None:
        """The latest report of that very process, by its public id."""
        known = self._health(job, member_id, process)
        return known.latest if known else None

    def losses(self, job: str, member_id: str, process: str) -> Sequence[tuple[int, float]]:
        """(step, loss) of that process' last reports."""
        known = self._health(job, member_id, process)
        return tuple(known.losses) if known else ()

    def num_reports(self, job: str) -> int:
        """Health reports of the job since this coordinator started."""
        board = self._jobs.get(job)
        return board.num_reports if board else 0

    def highest_step(self, job: str) -> int:
        """The highest step that a member of the job has reported, those that are gone included."""
        board = self._jobs.get(job)
        return board.highest_step if board else 0

    def total_steps(self, job: str) -> int:
        """Of all members of the job together, those that are gone included."""
        board = self._jobs.get(job)
        return board.total_steps if board else 0

    def last_loss(self, job: str) -> float | None:
        """The loss that a member of the job reported last."""
        board = self._jobs.get(job)
        return board.last_loss if board else None

    def _health(self, job: str, member_id: str, process: str) -> _MemberHealth | None:
        board = self._jobs.get(job)
        known = board.health.get(member_id) if board else None
        return known if known and known.latest.public_id == process else None

    def _board(self, job: str) -> _JobBoard:
        board = self._jobs.setdefault(job, _JobBoard())
        self._jobs.move_to_end(job)
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        return board
