"""Bodies of members with registered state: a scheduler, and an average of the weights."""

from dataclasses import dataclass
from typing import Any

import torch
from support.processes.ranks import Report
from support.training import elastic_bodies
from support.training.elastic_bodies import EPOCHS, Elastic, build, checkpoints_of, is_over, order
from support.training.elastic_bodies import numbers as data
from support.training.rank_bodies import session_of
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal.data.batches import Loader


@dataclass(frozen=True, kw_only=True)
class Registering(Elastic):
    """A member's run."""

    averages: bool = True
    """True if the script keeps an average of the weights, for strategies with whole weights."""
    behind: bool = False
    """True if both are stepped after the step, even if it was not committed; False: within it."""


def made(run: Registering) -> tuple[Any, Any, Any, Any]:
    """Make the model, the optimizer, a schedule, and the average."""
    model, optimizer = build(run.optimizer, "layers")
    schedule = CosineAnnealingLR(optimizer, 40)
    return model, optimizer, schedule, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def train(report: Report, run: Registering) -> None:
    """Train until the step in `stop_file`; report the whole model, the rate and the average."""
    model, optimizer, schedule, average = made(run)
    with session_of(run) as session:
        session.register("schedule", schedule)
        if run.averages:
            session.register("average", average)
        model, optimizer = session.distribute(
            model,
            optimizer,
            strategy=elastic_bodies.strategy_of(run),
            checkpoints=checkpoints_of(run),
        )

        def advance() -> None:
            schedule.step()
            if run.averages:
                average.update_parameters(model)

        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=EPOCHS):
            if is_over(run.stop_file, batch.step):
                break
            tried = {"step": batch.step, "generation": session.generation}
            report("tried", **tried, lr=optimizer.param_groups[0]["lr"])
            with session.step() as step:
                session.forward_backward(batch, cross_entropy)
                if not run.behind:
                    advance()
            if run.behind:
                advance()
            if step.committed:
                report("committed", **tried)
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        report(
            "finished",
            step=session.step_number,
            weights=weights,
            average=listed(average) if run.averages else {},
            lr=optimizer.param_groups[0]["lr"],
            epochs=schedule.last_epoch,
        )


def listed(module: torch.nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


def one_process(run: Registering, num_steps: int) -> dict[str, Any]:
    """Train the same steps in plain torch; return what `train` reports."""
    model, optimizer, schedule, average = made(run)
    loader = Loader(data(), order(run.batch_size))
    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
    return {
        "weights": listed(model),
        "average": listed(average) if run.averages else {},
        "lr": optimizer.param_groups[0]["lr"],
        "epochs": schedule.last_epoch,
    }
