"""End of a session's block: the member leaves and states a reason. The script's error is raised."""

from collections.abc import Callable
from types import TracebackType

import structlog

from shoal.membership.alone import LoneMember
from shoal.membership.draining import Drained
from shoal.session.batch_sources import BatchSource
from shoal.session.distribution import Distribution
from shoal.session.elastic_controller import ElasticController
from shoal.session.shared_calls import note_loss
from shoal.session.step import reason_of, reason_of_end
from shoal_proto.errors import ShoalError

SILENT_DRAIN_S = 5.0
"""Time without a sign of work from loading processes, after which a drained member stops waiting
for a batch."""

log = structlog.get_logger(__name__)


class SessionEnd:
    """Ends the membership of one session, however its block ends."""

    def __init__(
        self,
        controller: ElasticController,
        trained: Distribution,
        source: Callable[[], BatchSource | None],
        leave: Callable[..., None],
    ) -> None:
        """`source()` returns the source of batches, or None; `leave` is `Session.leave`."""
        self._controller = controller
        self._trained = trained
        self._source = source
        self._leave = leave
        self._drain_reason = ""

    def drain(self, reason: str) -> None:
        """Ask to leave in good order. Any thread may call this, also within a signal handler."""
        self._drain_reason = reason
        self._controller.membership.drain(reason)

    def check_drain(self, silent_s: float) -> None:
        """Raise Drained if this member was asked to leave, and either trains alone or its loading
        processes have been silent for SILENT_DRAIN_S. `silent_s`: seconds since their last sign of
        work."""
        is_alone = isinstance(self._controller.membership, LoneMember)
        if self._drain_reason and (is_alone or silent_s >= SILENT_DRAIN_S):
            raise Drained(f"{self._drain_reason}; the next batch was not loaded yet")

    def end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave at the end of the block, as an `__exit__`; `error`: the exception that ended the
        block, if any."""
        try:
            if error is None or isinstance(error, SystemExit):
                self._controller.conclude(has_batches=self._source() is not None)
            completed = error is None and self._has_ended()
        except BaseException as failure:
            self._fail(failure)
            raise
        if error is not None:
            note_loss(error, self._controller)
            self._fail(error)
        elif completed:
            trained = self._controller.strategy if self._trained.fields else None
            self._leave(reason=reason_of_end(trained), completed=True)
        else:
            self._leave(reason="left before the last batch")

    def leave_on_error(self, error: BaseException) -> None:
        """Leave because of an error that the caller raises. A failure meanwhile is logged, and
        added to that error as a note."""
        try:
            self._leave(reason=reason_of(error))
        except Exception as failure:  # noqa: BLE001 - logged, and part of the error that is raised
            if failure is not error:
                text = f"{type(failure).__name__}: {failure}"[:500]
                log.warning("session_failed", reason=text)
                error.add_note(f"Leaving the session failed, too: {text}")

    def _has_ended(self) -> bool:
        """True if the job is complete. Waits for other members if the script called `session.stop`.
        Raises the error of the job's last checkpoint, and what `Strategy.check_result` raises."""
        source = self._source()
        ended = source is None or source.all_trained or source.stop()
        if ended and self._trained.fields:
            strategy = self._controller.strategy
            if strategy.checkpoint_failure:
                raise strategy.checkpoint_failure
            strategy.check_result()
        return ended

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, ShoalError):
            self._controller.membership.failed(error)
        self.leave_on_error(error)
