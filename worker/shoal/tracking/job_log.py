"""Log of a script's values: each is written once, despite losses, joins and repeated steps.

Every member keeps the values of its newest committed steps. The writer is the member whose state
the generation started from, or rank 0 under an asynchronous strategy. If the writer is killed, the
next one writes its own kept values, except those that the trackers already have.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from shoal.tracking.scalars import Scalar, scalars
from shoal.tracking.tracker import OpenRun, Run, RunInUse, Tracker, WriteProgress
from shoal_proto.health import MAX_LOGGED
from shoal_proto.v1.membership_pb2 import STATE_ACTION_INITIAL, GenerationRecord

log = structlog.get_logger(__name__)

WRITE_EACH_S = 1.0
BUSY_EACH_S = 0.2
FLUSH_WITHIN_S = 5.0
"""Longest time that a planned change of members, or a checkpoint, waits for trackers."""
CLOSE_WITHIN_S = 30.0
MAX_KEPT = 10_000
MAX_DROPPED = 100_000
"""Number of dropped steps that are remembered until a tracker shows if it has them."""


class JobLog:
    """Log of one member. All methods are for the trainer's thread; another thread writes."""

    def __init__(self, job: str, member_id: str, trackers: Sequence[Tracker] = ()) -> None:
        self._job = job
        self._member_id = member_id
        self._attempt: dict[str, float] = {}
        self._newest: dict[str, tuple[int, float]] = {}
        self.is_writer = False
        """True if this member writes to the trackers, and reports for the whole job."""
        self._run: Run | None = None
        self._sinks = [_Sink(tracker) for tracker in trackers]
        self._changed = threading.Condition()
        self._wanted, self._done = 0, 0
        self._closed = False
        self._thread: threading.Thread | None = None

    # --- values of the script ---

    def log(
        self, values: Mapping[str, Scalar], *, step: int, in_step: bool, counts: bool = True
    ) -> None:
        """See `Session.log`; `step` is the newest committed step.

        `counts`: False if this member has no sample of the step: values are only checked.
        """
        numbers = scalars(values)
        if not counts:
            return
        if in_step:
            self._attempt |= numbers
        else:
            self._keep(step, numbers)

    def begins(self) -> None:
        """Begin an attempt of a step; discard a failed attempt's values."""
        self._attempt = {}

    def committed(self, step: int) -> None:
        """Keep the values of the attempt, which was committed as this step."""
        attempt, self._attempt = self._attempt, {}
        if attempt:
            self._keep(step, attempt)

    def _keep(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            known = self._newest.get(name)
            fits = known is not None or len(self._newest) < MAX_LOGGED
            if fits and (known is None or known[0] < step):
                self._newest[name] = (step, value)
        if self._sinks:
            with self._changed:
                for sink in self._sinks:
                    sink.keep(step, time.time(), values)
                self._start()

    # --- events of the job ---

    def record_generation(self, record: GenerationRecord, *, synchronous: bool, step: int) -> None:
        """Note that a generation runs: determine its writer, and at the first call the run.

        `step`: number of steps that this member has committed.
        """
        roster = record.roster
        by_id = {entry.member_id: entry for entry in roster.entries}
        first = min(roster.entries, key=lambda entry: entry.rank).member_id
        writer = (roster.source_member_id if synchronous else "") or first
        with self._changed:
            if self._run is None:
                begins = by_id[self._member_id].state == STATE_ACTION_INITIAL and step == 0
                begun_unix_s = record.decided_unix_s if begins else None
                self._run = Run(job=self._job, begun_unix_s=begun_unix_s)
            if writer == self._member_id and not (self.is_writer or synchronous):
                for sink in self._sinks:
                    sink.take_over()
            self.is_writer = writer == self._member_id
            if self.is_writer and self._sinks and self._run.begun_unix_s is not None:
                # Before any value: a member that joins later continues the newest run.
                self._start()
            self._changed.notify_all()

    def newest_values(self) -> dict[str, tuple[int, float]]:
        """Return the newest step and value of each name if this member is the writer, else none."""
        return dict(self._newest) if self.is_writer else {}

    def flush(self, limit_s: float = FLUSH_WITHIN_S) -> None:
        """Wait until each tracker has written all kept values or has failed.

        After `limit_s`, only logs a warning. Does nothing unless this member is the writer.
        """
        with self._changed:
            if self._thread is None or not self.is_writer:
                return
            self._wanted += 1
            number = self._wanted
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._done >= number, limit_s):
                log.warning("trackers_not_flushed", job=self._job, waited_s=limit_s)

    def close(self) -> None:
        """Write the remaining values if this member is the writer, and close the trackers.

        Waits for at most `CLOSE_WITHIN_S`. May be called twice.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_WITHIN_S)
            if self._thread.is_alive():
                log.warning("trackers_not_closed", job=self._job, waited_s=CLOSE_WITHIN_S)

    # --- on the writing thread ---

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shoal-log", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        end_s = math.inf
        while time.monotonic() < end_s:
            with self._changed:
                if any(sink.busy for sink in self._sinks):
                    self._changed.wait(BUSY_EACH_S)
                else:
                    must_wake = partial(self._must_wake, self.is_writer)
                    self._changed.wait_for(must_wake, WRITE_EACH_S)
                if self._closed:
                    end_s = min(end_s, time.monotonic() + CLOSE_WITHIN_S)
                run, wanted, writes = self._run, self._wanted, self.is_writer
            for sink in self._sinks:
                if writes and run is not None:
                    sink.write(run, self._changed)
                else:
                    sink.end()
            with self._changed:
                if not any(sink.busy for sink in self._sinks):
                    self._done = wanted
                    self._changed.notify_all()
                    if end_s < math.inf:
                        break
        for sink in self._sinks:
            sink.end(writes=writes)

    def _must_wake(self, was_writer: bool) -> bool:
        return self._closed or self._wanted > self._done or self.is_writer != was_writer


class _Sink:
    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._name = type(tracker).__name__
        self._kept: dict[int, tuple[float, dict[str, float]]] = {}
        self._open: OpenRun | None = None
        self._written = WriteProgress()
        self._shift: int | None = 0
        """Difference between a step in the tracker and this member's own count. None until this
        member opens the run of another one that counted its own steps.
        """
        self._first: int | None = None
        """Oldest step that was kept since `take_over`."""
        self.busy = False
        self._is_failing = False
        self._dropped: deque[int] = deque(maxlen=MAX_DROPPED)
        """Steps that were dropped while this process could not write; an earlier writer may have
        written some of them.
        """
        self._taken = -1
        """Newest step that is written or is being written, by this member's count."""
        self._num_lost = 0

    def take_over(self) -> None:
        """Write this member's steps from now on, numbered after the last step of the run, since
        each member counts its own steps. Called under the log's lock."""
        self._kept.clear()
        self._dropped.clear()
        self._shift, self._first, self._taken = None, None, -1

    def keep(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Keep a step's values. The first value of a name counts. Called under the log's lock."""
        if self._first is None:
            self._first = step
        _, step_values = self._kept.setdefault(step, (unix_s, {}))
        for name, value in values.items():
            step_values.setdefault(name, value)
        while len(self._kept) > MAX_KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            if self._open is not None and oldest > self._taken:
                self._num_lost += 1
            elif self._open is not None or self._is_failing or self.busy:
                self._dropped.append(oldest)

    def write(self, run: Run, lock: threading.Condition) -> None:
        """Write all kept values that are not written yet. Opens a run that this member began, even
        without values."""
        with lock:
            kept = [(step, at_s, dict(values)) for step, (at_s, values) in self._unwritten()]
            first = self._first or 0
            self._taken = kept[-1][0] if kept else self._taken
        begins = self._open is None and run.begun_unix_s is not None
        if not (kept or begins):
            return
        try:
            if self._open is None:
                self._open = self._tracker.open(run)
                self._written = self._open.written
                with lock:
                    before = kept[0][0] if kept else math.inf
                    self._num_lost += self._num_dropped(before=before)
                    self._dropped.clear()
            if self._shift is None:
                self._shift = max(0, self._written.step + 1 - first)
            self._write(self._open, kept)
        except RunInUse:
            self.busy = bool(kept)
            return
        except Exception as error:  # noqa: BLE001 - any error of any tracker is logged and retried
            self._fails(error)
            return
        if self._is_failing:
            log.info("tracker_writes_resumed", tracker=self._name)
        self.busy = self._is_failing = False

    def _unwritten(self) -> list[tuple[int, tuple[float, dict[str, float]]]]:
        written_step = self._written_step()
        return sorted(item for item in self._kept.items() if item[0] >= written_step)

    def _num_dropped(self, before: float = math.inf) -> int:
        written_step = self._written_step()
        return sum(written_step < step < before for step in self._dropped)

    def _written_step(self) -> int:
        """Return the newest written step, by this member's count."""
        return -1 if self._shift is None else self._written.step - self._shift

    def _write(self, opened: OpenRun, kept: Sequence[tuple[int, float, dict[str, float]]]) -> None:
        shift = self._shift or 0
        for own_step, unix_s, values in kept:
            step = own_step + shift
            rest = self._written.unwritten(step, values)
            if rest:
                opened.write(step, rest, unix_s)
                self._written = self._written.with_new(step, frozenset(rest))
        opened.flush()

    def _fails(self, error: Exception) -> None:
        if not self._is_failing:
            reason = f"{type(error).__name__}: {error}"[:500]
            log.warning("tracker_failed", tracker=self._name, reason=reason)
        self._is_failing = True
        # Half a step may be written, so the progress is read from the tracker again.
        self.end()

    def end(self, *, writes: bool = False) -> None:
        """Close the run, so that another process may write it.

        `writes`: this process is the last writer; values that are not written are reported as lost.
        """
        if writes:
            written_step = self._written_step()
            num_unwritten = sum(1 for step, _ in self._unwritten() if step > written_step)
            if num_lost := self._num_lost + self._num_dropped() + num_unwritten:
                log.error("logged_values_lost", tracker=self._name, num_steps=num_lost)
        opened, self._open = self._open, None
        self.busy = False
        if opened is not None:
            try:
                opened.close()
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("tracker_not_closed", tracker=self._name, reason=str(error)[:500])
