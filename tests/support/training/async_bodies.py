"""Bodies of members at their own pace: a module that their processes can import."""

import math
from pathlib import Path

from support.processes.ranks import Report
from support.training.rank_bodies import Run, data, loss_of, model_and_optimizer, session_of

from shoal.strategies.asynchronous.async_sgd import AsyncSGD


def train_fresh_only(report: Report, run: Run) -> None:
    """Train without stale gradients. A member with a gate waits there once, after it computed a
    gradient."""
    model, optimizer = model_and_optimizer(seed=0)
    strategy = AsyncSGD(staleness="reject", reject_above=0)
    waits = bool(run.gate)
    with session_of(run) as session:
        session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=run.epochs):
            report("tried", epoch=batch.epoch, indices=batch.indices)
            with session.step() as step:
                session.backward(loss_of(model(batch.inputs), batch.targets))
                if waits:
                    waits = False
                    report("waits")
                    Path(run.gate).read_bytes()
            report("committed" if step.committed else "refused")
    report("finished", step=session.step_number, rejected=strategy.metrics()["rejected"])


def train_in_vain(report: Report, run: Run) -> None:
    """Train with a learning rate of 0 and a loss that has to fall. With the fault "inf" it need
    not fall, but is infinite from step `run.at_step` on, with finite gradients."""
    model, optimizer = model_and_optimizer(seed=0)
    optimizer.param_groups[0]["lr"] = 0.0
    blows_up = run.fault == "inf"
    with session_of(run) as session:
        session.distribute(model, optimizer, strategy=AsyncSGD(loss_must_fall=not blows_up))
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=run.epochs):
            with session.step():
                loss = loss_of(model(batch.inputs), batch.targets)
                is_infinite = blows_up and session.step_number >= run.at_step
                session.backward(loss + math.inf if is_infinite else loss)
    report("finished", step=session.step_number)
