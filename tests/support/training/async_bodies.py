"""Bodies of members at their own pace: a module that their processes can import."""

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
