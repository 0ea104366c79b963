"""A member of a job as a training script sees it."""

import os
import time
import traceback
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Self

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.crew import Crew
from shoal.data import Batch, Collate, Dataset, Loader, Order, dataset_size, describe
from shoal.health import HealthReporter
from shoal.joining import JoinConfig
from shoal.leases import Leases
from shoal.strategies import find_strategy
from shoal.strategies.base import Generation, Strategy
from shoal_client.samples import SampleRange, Samples
from shoal_proto.errors import InvalidSpec, JobFinished

log = structlog.get_logger(__name__)

HEALTH_INTERVAL_S = 1.0


class Session:
    """Made by `shoal.join`; a member while the `with` block runs.

    Leaving the block normally after the last batch completes the job; leaving it by an exception
    or before the last batch takes only this member out, and the others go on.
    """

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self._crew = Crew(config.member())
        self._fields: dict[str, str] = {}
        self._health: HealthReporter | None = None
        self._leases: Leases | None = None
        self._in_batches = self._all_trained = False
        self._step: Step | None = None
        self._num_attempts = 0
        self._weight = 1.0
        self._leased: SampleRange | None = None
        self._reported_s = 0.0

    def __enter__(self) -> Self:
        self._crew.attend()
        member, membership = self._crew.member, self._crew.membership
        self._health = HealthReporter(
            lambda: membership.http_url,
            self._config.job,
            member.member_id,
            member.incarnation,
            interval_s=HEALTH_INTERVAL_S,
        )
        self._health.update(step=0, device=member.info.device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.leave(reason=f"{type(error).__name__}: {error}")
        elif self._in_batches and not self._all_trained:
            self.leave(reason="left before the last batch")
        else:
            self.leave(reason="all batches were trained on", completed=True)

    def leave(self, *, reason: str, completed: bool = False) -> None:
        """Stop being a member; `completed` ends the job for all. The first call counts."""
        health, self._health = self._health, None
        if health is not None:
            if not completed:
                health.update(last_error=reason)
            health.close()
        leases, self._leases = self._leases, None
        try:
            if leases is not None:
                leases.close()
        finally:
            self._crew.leave(completed=completed, reason=reason)

    # --- what the training script calls ---

    def distribute(
        self, model: nn.Module, optimizer: Optimizer, strategy: str | Strategy = "ddp"
    ) -> tuple[nn.Module, Optimizer]:
        """The model and optimizer to train with from now on, the same over all changes.

        Raises UnknownStrategy, or what the strategy refuses the model or optimizer with.
        """
        if self._fields:
            raise InvalidSpec("a session distributes one model", expected="one distribute()")
        chosen = find_strategy(strategy)
        distributed = chosen.distribute(model, optimizer)
        self._fields = {"strategy": chosen.name, "torch": torch.__version__, **chosen.fields()}
        self._crew.man(chosen)
        return distributed

    def batches(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        collate: Collate | None = None,
    ) -> Iterator[Batch]:
        """This member's part of every batch from the job's present step to its last.

        Train on each within `session.step()`. After a lost peer the same step comes again, cut for
        the members that are left. Asynchronous members get whole batches of the size given.
        """
        order = Order(
            num_samples=dataset_size(dataset),
            global_batch_size=global_batch_size,
            num_epochs=epochs,
            seed=seed,
            shuffle=shuffle,
        )
        strategy = self._crew.strategy
        if self._in_batches:
            raise InvalidSpec("a session goes over its batches once", expected="one batches()")
        self._in_batches = True
        self._fields |= {
            "global_batch": str(global_batch_size),
            "dataset": describe(dataset),
            "seed": str(seed),
            "epochs": str(epochs),
            "shuffle": str(shuffle).lower(),
        }
        loader = Loader(dataset, order, collate)
        return self._together(loader, order) if strategy.synchronous else self._alone(loader, order)

    def step(self) -> "Step":
        """One optimizer step: zeroes gradients at its start, applies and commits them at its end.

        A lost peer inside is recovered from and the step did not happen: `committed` of the object
        stays false. Any other error goes on to the caller, and the member leaves with it.
        """
        if self._step is not None:
            raise InvalidSpec("steps do not nest", seen="session.step() within session.step()")
        return Step(self)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of `loss`, the mean over the batch's samples."""
        if self._step is None:
            raise InvalidSpec("backward outside of a step", expected="with session.step(): ...")
        self._step.loss = loss.detach()
        self._crew.strategy.backward(loss, self._weight)

    # --- where it stands ---

    @property
    def job(self) -> str:
        return self._config.job

    @property
    def member_id(self) -> str:
        return self._crew.member.member_id

    @property
    def strategy(self) -> Strategy:
        """The strategy that `distribute` chose."""
        return self._crew.strategy

    @property
    def generation(self) -> int:
        """Number of the present generation; 0 before the first."""
        return self._crew.generation.number if self._crew.generation else 0

    @property
    def rank(self) -> int:
        return self._present().rank

    @property
    def world_size(self) -> int:
        return self._present().world_size

    @property
    def step_number(self) -> int:
        """Steps committed so far."""
        return self._crew.strategy.step

    def _present(self) -> Generation:
        if self._crew.generation is None:
            raise InvalidSpec(
                "there is no generation yet",
                expected="rank and world size to be asked for from the first batch on",
            )
        return self._crew.generation

    # --- batches ---

    def _together(self, loader: Loader, order: Order) -> Iterator[Batch]:
        crew = self._crew
        while True:
            try:
                generation = crew.stand(self._fields)
                while crew.strategy.step < order.num_steps:
                    batch = loader.synchronous(
                        crew.strategy.step, generation.rank, generation.world_size
                    )
                    yield from self._offered(batch)
                    generation = crew.stand(self._fields)
                if self._finish():
                    break
            except JobFinished:
                # The others saw the last step committed and left while this one recovered.
                if crew.strategy.step < order.num_steps:
                    raise
                break
        self._all_trained = True

    def _finish(self) -> bool:
        try:
            self._crew.strategy.finish()
        except Exception as error:
            if not self._crew.is_break(error):
                raise
            self._crew.fall(error)
            return False
        return True

    def _alone(self, loader: Loader, order: Order) -> Iterator[Batch]:
        crew = self._crew
        crew.stand(self._fields)
        samples = Samples(
            crew.membership.coordinators,
            lambda: crew.membership.token,
            dataset_size=order.num_samples,
            num_epochs=order.num_epochs,
        )
        self._leases = leases = Leases(samples, order.global_batch_size)
        try:
            for span in leases:
                crew.stand(self._fields)
                self._leased = span
                yield from self._offered(
                    loader.leased(span.epoch, span.start, span.stop, crew.strategy.step)
                )
        except JobFinished as finished:
            # Others saw the last sample completed before this member asked for more.
            log.info("job_finished_by_others", job=self.job, reason=str(finished))
        else:
            # What the others did last comes too: from here on the model is the job's result.
            crew.strategy.finish()
        crew.strategy.flush()
        self._all_trained = True

    def _offered(self, batch: Batch) -> Iterator[Batch]:
        self._weight = batch.weight
        attempts = self._num_attempts
        yield batch
        if self._num_attempts == attempts:
            raise InvalidSpec(
                f"the batch of step {batch.step} was not trained on",
                expected="with session.step(): ... for each batch",
            )

    # --- steps ---

    def _begin(self, step: "Step") -> None:
        self._num_attempts += 1
        if not self._in_batches:
            self._crew.stand(self._fields)
        self._crew.strategy.begin_step()
        self._step = step

    def _commit(self, step: "Step") -> None:
        leased, self._leased = self._leased, None
        leases = self._leases
        acknowledged = partial(leases.done, leased) if leases and leased else _nothing
        self._crew.strategy.end_step(acknowledged)
        self._crew.membership.progress(self._crew.strategy.step)
        self._report(step)

    def _report(self, step: "Step") -> None:
        now_s = time.monotonic()
        if self._health is None or now_s - self._reported_s < HEALTH_INTERVAL_S:
            return
        duration_s = time.perf_counter() - step.started_s
        metrics = self._crew.strategy.metrics()
        self._reported_s = now_s
        self._health.update(
            step=self._crew.strategy.step,
            loss=float(step.loss) if step.loss is not None and step.loss.numel() == 1 else None,
            step_time_s=duration_s,
            memory_bytes=_resident_bytes(),
            staleness_steps=metrics.get("staleness"),
        )


class Step:
    """One attempt at an optimizer step; see `Session.step`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.committed = False
        self.loss: Tensor | None = None
        self.started_s = 0.0

    def __enter__(self) -> Self:
        self.started_s = time.perf_counter()
        self._session._begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        session = self._session
        session._step = None
        if error is None:
            try:
                session._commit(self)
            except BaseException as failure:
                if not self._recovers(failure):
                    raise
            else:
                self.committed = True
            return True
        return self._recovers(error)

    def _recovers(self, error: BaseException) -> bool:
        """True: a peer was lost, and this member stands ready for the next generation."""
        crew = self._session._crew
        if crew.is_break(error):
            # The frames below hold the wrapped model and with it the group that is to go.
            traceback.clear_frames(error.__traceback__)
            try:
                crew.fall(error)
            except BaseException as refusal:
                self._session.leave(reason=f"{type(refusal).__name__}: {refusal}")
                raise
            return True
        # At once, so that the others need not find out by waiting for this member.
        self._session.leave(reason=f"{type(error).__name__}: {error}")
        return False


def _nothing() -> None:
    """Nobody waits for the acknowledgement of a step that all members took together."""


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - once a second
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


__all__ = ["Session", "Step"]
