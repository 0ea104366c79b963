"""Members whose scripts log values of each step to trackers."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from support.processes.ranks import Report
from support.training.elastic_bodies import (
    EPOCHS,
    Elastic,
    build,
    checkpoints_of,
    is_over,
    strategy_of,
)
from support.training.elastic_bodies import numbers as data
from torch.nn.functional import cross_entropy

import shoal
from shoal.tracking.tracker import Tracker

BEHIND_EACH = 10


@dataclass(frozen=True, kw_only=True)
class Logging(Elastic):
    """A member's run."""

    directory: str
    """Directory that trackers write to."""
    trackers: tuple[str, ...] = ("tensorboard",)


def tracker(name: str, directory: Path) -> Tracker:
    """The tracker of that name, below the directory."""
    if name == "tensorboard":
        return shoal.TensorBoard(directory / "tensorboard")
    if name == "wandb":
        return shoal.WandB("tests", directory, mode="offline")
    return shoal.MLflow(f"file:{directory / 'mlruns'}")


def train(report: Report, run: Logging) -> None:
    """Train until the stop: log a value in each step, one after it, and one after every tenth."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    model, optimizer = build(run.optimizer, "layers")
    trackers = [tracker(name, Path(run.directory)) for name in run.trackers]
    with shoal.join(
        run.job,
        coordinator=run.coordinator,
        member_id=run.member_id,
        min_members=run.min_members,
        desired_members=run.desired_members,
        trackers=trackers,
    ) as session:
        model, optimizer = session.distribute(
            model, optimizer, strategy=strategy_of(run), checkpoints=checkpoints_of(run)
        )
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=EPOCHS):
            if is_over(run.stop_file, batch.step):
                break
            tried = {"step": batch.step, "generation": session.generation}
            report("tried", **tried)
            with session.step() as step:
                session.forward_backward(batch, cross_entropy)
                session.log({"in": torch.tensor(float(batch.step + 1))})
            if step.committed:
                session.log({"behind": session.step_number})
                if session.step_number % BEHIND_EACH == 0:
                    session.log({"seldom": session.step_number / BEHIND_EACH})
                report("committed", **tried)
        report("finished", step=session.step_number)
