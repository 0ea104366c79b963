"""Lightning's loops within a session: all members leave them after the same step, and wait for
each other's validation."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer

from shoal.integrations.agreed_stopping import AgreedStopping
from shoal.integrations.lightning_batches import LightningBatches
from shoal.session.session import Session


class AgreedEnd:
    """Replaces a member's own `trainer.should_stop` by `session.stop`.

    Lightning leaves its loops at once, and the callbacks of an early end make shared calls. So the
    member continues until its batches end, as they do on all members. A stop by AgreedStopping
    needs no further batch, as all members share its counters.
    """

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        batches: LightningBatches,
        agreed: list[AgreedStopping],
    ) -> None:
        self._session, self._trainer = session, trainer
        self._batches, self._agreed = batches, agreed
        epochs: Any = trainer.fit_loop
        steps: Any = epochs.epoch_loop
        self._end_epoch: Callable[[], None] = epochs.on_advance_end
        self._end_step: Callable[[Any], None] = steps.on_advance_end
        vars(epochs)["on_advance_end"] = self.end_epoch
        vars(steps)["on_advance_end"] = self.end_step

    def end_step(self, data_fetcher: Any) -> None:
        """Run the end of a step, with its validation."""
        self._share()  # Lightning validates at once if it stops
        self._end_step(data_fetcher)
        self._share()

    def end_epoch(self) -> None:
        self._end_epoch()
        self._share()
        if self._batches.is_over:
            self._trainer.should_stop = True

    def _share(self) -> None:
        trainer = self._trainer
        if self._batches.is_over or any(each.has_stopped for each in self._agreed):
            return
        if trainer.should_stop and trainer.fit_loop._can_stop_early:
            self._session.stop("Lightning stopped the training")
            trainer.should_stop = False


class PausedValidation:
    """Pauses for the batches of a validation, without the hooks after them, which make shared
    calls."""

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self._session, self._trainer = session, trainer
        self._pause = ExitStack()
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        self._run: Callable[[], Any] = loop.run
        self._end: Callable[[], Any] = loop.on_run_end
        vars(loop)["run"], vars(loop)["on_run_end"] = self.run, self.end

    def run(self) -> Any:
        if self._trainer.sanity_checking:
            return self._run()  # before the first batch: no member waits
        with self._pause:
            self._pause.enter_context(self._session.pause_for_library("validation"))
            return self._run()

    def end(self) -> Any:
        self._pause.close()
        return self._end()
