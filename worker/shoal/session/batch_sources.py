"""Sources of batches: by step for synchronous members, by sample lease for asynchronous ones."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import cast

import structlog

from shoal import randomness
from shoal.data.batches import Batch, Loader
from shoal.data.order import Order
from shoal.membership.draining import Drained
from shoal.membership.generation import Generation
from shoal.session.elastic_controller import ElasticController
from shoal.strategies.leasing import LeasingStrategy, SampleLeases
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_client.progress.ranges import SampleRange
from shoal_proto.errors import InvalidSpec, JobFinished, ShoalError

log = structlog.get_logger(__name__)


class BatchSource(ABC):
    """Source of one member's batches, from the job's present step to its last."""

    def __init__(
        self, controller: ElasticController, fields: dict[str, str], loader: Loader
    ) -> None:
        self._controller = controller
        self._fields = fields
        self._loader = loader
        self._num_attempts = 0
        self._is_trained = False
        self.loading_s = 0.0
        self.batch: Batch | None = None
        self.all_trained = False
        """True if the job's last step is committed: no batch is left for any member."""

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]: ...

    @property
    def order(self) -> Order:
        """Order of the samples; `order.origin` is set just before the first batch is handed out, if
        the job continues from a checkpoint with another batch size."""
        return self._loader.order

    @property
    @abstractmethod
    def num_steps(self) -> int | None:
        """Number of this member's batches in the job; None if it depends on other members' pace."""

    def attempted(self) -> None:
        """Note that a step on the present batch begins. Raises InvalidSpec if one is committed
        already."""
        if self._is_trained and self.batch is not None:
            raise InvalidSpec(
                f"a second step on the batch of step {self.batch.step}",
                seen="a committed step on it",
                expected="one `with session.step():` for each batch of session.batches: the"
                " position in the samples is the number of steps",
                fix="Make all backward passes of a batch in one step. Several optimizers step "
                "within it, one after the other, with session.update(optimizer).",
            )
        self._num_attempts += 1

    def check_batch(self) -> None:  # noqa: B027 - a leased batch is never stale
        """Raise StaleBatch if the step has to be repeated, on a new batch."""

    def trained(self) -> None:
        """Note that the step on the batch is committed."""
        self._is_trained = True

    def acknowledged(self) -> Callable[[], None]:
        """Return the function to call once the step on the present batch can no longer be lost."""
        return _nothing

    def close(self) -> None:
        """Give back leased samples that were not trained on, and end the loading processes."""
        self._loader.close()

    def stop(self) -> bool:
        """Note that the script has left its loop early. After its `session.stop`, wait until all
        members have left their loops, and return True; else return False at once. Raises StateLost
        if `CallBetweenSteps.check_end` does."""
        return False

    def left(self) -> None:  # noqa: B027 - does nothing by default
        """Note that the script's loop has ended, early or at the last batch."""

    def _offer(self, batch: Batch) -> Iterator[Batch]:
        self.batch, self._is_trained = batch, False
        attempts = self._num_attempts
        yield batch
        if self._num_attempts == attempts:
            raise InvalidSpec(
                f"the batch of step {batch.step} was not trained on",
                expected="with session.step(): ... for each batch",
            )


class SynchronousBatches(BatchSource):
    """Batches by number of committed steps: the batch of a failed step is handed out again."""

    _generation: Generation | None = None
    """The generation that the present batch was made for."""

    @property
    def num_steps(self) -> int:
        return self._loader.order.num_steps

    def __iter__(self) -> Iterator[Batch]:
        controller = self._controller
        # Start before connections to peers exist, which a loading process would inherit.
        self._loader.start()
        while True:
            try:
                generation = controller.ensure_generation(self._fields)
                while controller.strategy.step < self._end():
                    yield from self._offer(self._loaded(generation))
                    if self._is_stopped():
                        break
                    generation = controller.ensure_generation(self._fields)
                if self._finish():
                    break
            except JobFinished:
                # The other members committed the last step while this member recovered.
                if controller.strategy.step < self._end():
                    raise
                break
        self._note_end()

    def _loaded(self, generation: Generation) -> Batch:
        strategy = self._controller.strategy
        strategy.note_loading(begins=True)
        began_s = time.perf_counter()
        try:
            return self._loader.synchronous(strategy.step, *strategy.data_share(generation))
        finally:
            self.loading_s += time.perf_counter() - began_s
            strategy.note_loading(begins=False)

    def _is_stopped(self) -> bool:
        strategy = self._strategy
        if strategy.position.stop_at is None:
            return False
        end = self._end()
        return end < self.num_steps and strategy.step >= end

    @property
    def _strategy(self) -> SynchronousStrategy:
        # Not isinstance: twice a step, it would cost more than the rest of this loop.
        return cast(SynchronousStrategy, self._controller.strategy)

    def _end(self) -> int:
        """Return the number of steps after which the job ends, by an agreed early stop if any."""
        strategy = self._strategy
        self._loader.begin_at(strategy.origin)
        stop_at, num_steps = strategy.position.stop_at, self.num_steps
        return num_steps if stop_at is None else min(stop_at, num_steps)

    def stop(self) -> bool:
        strategy = self._controller.strategy
        assert isinstance(strategy, SynchronousStrategy), "others have leased batches"
        if strategy.position.wish is None:
            return False
        self.left()
        self._check_end()
        strategy.position.agree_to_stop(strategy.step)
        with suppress(JobFinished):
            while not self._finish():
                self._controller.ensure_generation(self._fields)
                self._check_end()
        self._note_end()
        return True

    def _check_end(self) -> None:
        self._controller.call.check_end("the end of a job", self._controller.strategy.step)

    def left(self) -> None:
        if self.batch is not None and not self.all_trained:
            # Read the batch's step: a rollback may have lowered the strategy's.
            self._controller.call.end_step = self.batch.step + int(self._is_trained)

    def _offer(self, batch: Batch) -> Iterator[Batch]:
        self._controller.call.end_step = 0
        self._generation = self._controller.generation
        if self.batch is not None and self._controller.strategy.updates_alike:
            # The update left the same generators on all members: a script that draws before it
            # opens the step would draw the same noise for each share.
            randomness.seed_torch(int(self._fields["seed"]), batch.step, batch.first, 0)
        return super()._offer(batch)

    def attempted(self) -> None:
        super().attempted()
        is_stale = self._generation is not self._controller.generation
        self._strategy.position.has_stale_batch = is_stale

    def check_batch(self) -> None:
        self._strategy.position.check_batch()

    def _note_end(self) -> None:
        self.all_trained = True
        self._controller.call.end_step = self._controller.strategy.step

    def _finish(self) -> bool:
        try:
            self._controller.strategy.finish()
        except Exception as error:
            if not self._controller.is_break(error):
                raise
            self._controller.recover(error)
            return False
        return True


class LeasedBatches(BatchSource):
    """Batches by the strategy's leases of samples, for members at their own pace."""

    _leases: SampleLeases | None = None
    _leased: SampleRange | None = None

    num_steps = None

    def __iter__(self) -> Iterator[Batch]:
        controller = self._controller
        self._loader.start()
        controller.ensure_generation(self._fields)
        strategy = controller.strategy
        assert isinstance(strategy, LeasingStrategy), "an asynchronous strategy leases samples"
        self._leases = strategy.lease_samples(
            self._loader.order, controller.membership.coordinators
        )
        try:
            for span in self._leases:
                controller.ensure_generation(self._fields)
                if span is None:
                    controller.strategy.rest()
                    continue
                yield from self._offer_until_committed(span)
            controller.strategy.flush()
            # Fetch the other members' last updates: the model is then the job's result.
            controller.strategy.finish()
        except JobFinished as finished:
            # The last sample was completed before this member asked for more.
            log.info("job_finished_by_others", reason=str(finished))
        except Drained:
            self._flush_and_leave()
            raise
        self.all_trained = True

    def _flush_and_leave(self) -> None:
        """Flush this member's last steps before it leaves; if that fails, other members train on
        their samples again."""
        try:
            self._controller.strategy.flush()
        except ShoalError as error:
            log.warning("last_steps_not_acknowledged", reason=str(error))

    def _offer_until_committed(self, span: SampleRange) -> Iterator[Batch]:
        strategy = self._controller.strategy
        step, began_s = strategy.step, time.perf_counter()
        batch = self._loader.leased(
            span.epoch, span.start, span.stop, step, after=partial(self._likely_next, span)
        )
        self.loading_s += time.perf_counter() - began_s
        while strategy.step == step:
            self._leased = span
            yield from self._offer(batch)

    def _likely_next(self, span: SampleRange) -> Iterator[SampleRange]:
        order = self._loader.order
        for start in range(span.stop, order.samples_per_epoch, order.global_batch_size):
            stop = min(start + order.global_batch_size, order.samples_per_epoch)
            yield SampleRange(span.epoch, start, stop)

    def acknowledged(self) -> Callable[[], None]:
        leased, self._leased = self._leased, None
        if self._leases is None or leased is None:
            return _nothing
        return partial(self._leases.done, leased)

    def close(self) -> None:
        super().close()
        leases, self._leases = self._leases, None
        if leases is not None:
            leases.close()


class Batches(Iterator[Batch]):
    """Iterator of `session.batches`. `len()` is the number of steps of the whole job; in an
    asynchronous job it raises TypeError.

    After a loop over the batches, a call between steps raises StateLost if the state was rolled
    back to an earlier step. A later loop continues from the job's present step, or raises
    InvalidSpec if no step was taken on the last batch. After an error, `next` raises that error
    again.
    """

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._batches = iter(source)
        self._is_over = False
        self._failure: BaseException | None = None

    @property
    def order(self) -> Order:
        """See `BatchSource.order`."""
        return self._source.order

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches. Raises InvalidSpec if an earlier loop went past the last
        batch."""
        if self._is_over:
            raise second_loop("the batches of session.batches are over, and a second loop begins")
        try:
            while True:
                try:
                    batch = next(self)
                except StopIteration:
                    return
                yield batch
        finally:
            self._source.left()

    def __next__(self) -> Batch:
        if self._failure is not None:
            raise self._failure
        try:
            return next(self._batches)
        except StopIteration:
            self._is_over = True
            raise
        except BaseException as failure:
            # The generator has ended: a second loop would end at once, as if all was trained.
            self._failure = failure
            raise

    def __len__(self) -> int:
        num_steps = self._source.num_steps
        if num_steps is None:
            raise TypeError("the number of a member's batches depends on the other members' pace")
        return num_steps


def second_loop(what: str) -> InvalidSpec:
    """Return the error for a script that loops once for each epoch: one loop covers all epochs."""
    return InvalidSpec(
        what,
        seen="perhaps one loop for each epoch",
        expected="one loop over session.batches(data, epochs=n) for all epochs",
        fix="batch.epoch is the epoch of a batch. An epoch has ended if"
        " `(len(batches) - batch.step - 1) % steps_per_epoch == 0`. For data that training makes,"
        " such as rollouts, take steps without session.batches: docs/loop.md.",
    )


def _nothing() -> None:
    """Do nothing: a step that all members took together needs no acknowledgement."""
