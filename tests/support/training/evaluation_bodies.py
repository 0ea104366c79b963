"""Bodies of members that make shared calls between two steps, during which a member is lost."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.processes.ranks import Report
from support.training import elastic_bodies
from support.training.elastic_bodies import EPOCHS, Elastic, build
from support.training.elastic_bodies import numbers as data
from support.training.rank_bodies import session_of
from torch import nn
from torch.nn.functional import cross_entropy

from shoal.data.batches import Batch
from shoal_proto.errors import InvalidSpec

BATCH = 5
"""Batch size of an evaluation, which does not divide the number of samples."""


@dataclass(frozen=True, kw_only=True)
class Evaluating(Elastic):
    """A member's run. `fault`: "kill in evaluation", "kill before state_dict"."""


def measured(model: nn.Module, batch: Batch) -> dict[str, Any]:
    outputs = model(batch.inputs)
    correct = int((outputs.argmax(1) == batch.targets).sum())
    loss = cross_entropy(outputs, batch.targets, reduction="sum").double()
    return {"samples": len(batch.inputs), "correct": correct, "loss": loss}


def train(report: Report, run: Evaluating) -> None:
    """Train one epoch, with an evaluation and the whole model after step `at_step` and after the
    last."""
    model, optimizer = build(run.optimizer, "layers")
    fault = run.fault

    def measure(batch: Batch) -> dict[str, Any]:
        found = measured(model, batch)
        if fault == "kill in evaluation" and batch.step == 1 and session.step_number > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def look() -> None:
        sums = session.evaluate(data(), measure, batch_size=BATCH)
        metrics = {name: float(value) for name, value in sums.items()}
        measured_at = session.step_number
        if fault == "kill before state_dict":
            os.kill(os.getpid(), signal.SIGKILL)
        state = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        total = session.all_reduce(1)
        # The state may have been rolled back to a copy if a member was lost.
        same = session.step_number == measured_at
        place = {"step": session.step_number, "same": same}
        report("looked", **place, metrics=metrics, state=state, total=total)

    with session_of(run) as session:
        model, optimizer = session.distribute(
            model, optimizer, strategy=elastic_bodies.strategy_of(run)
        )
        for batch in session.batches(data(), global_batch_size=run.batch_size):
            with session.step() as step:
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
            if step.committed:
                report("committed", step=batch.step, generation=session.generation)
            if batch.step == run.at_step and step.committed:
                look()
        fault = ""
        look()
    report("finished", step=session.step_number)


def check(looked: dict[str, Any]) -> None:
    """Check that the metrics are those of one process with the same model."""
    model = elastic_bodies.layers()
    model.load_state_dict({k: torch.tensor(v) for k, v in looked["state"].items()})
    inputs, targets = data()
    with torch.no_grad():
        outputs = model(inputs)
    assert looked["metrics"]["samples"] == len(inputs)
    assert looked["metrics"]["correct"] == int((outputs.argmax(1) == targets).sum())
    loss = float(cross_entropy(outputs, targets, reduction="sum"))
    assert abs(looked["metrics"]["loss"] - loss) < 1e-3


def train_until_joined(report: Report, run: Evaluating) -> None:
    """Evaluate after one step until the file `gate` exists; then train until there are three
    members."""
    model, optimizer = build(run.optimizer, "layers")
    looked = False

    def measure(batch: Batch) -> dict[str, Any]:
        if batch.step == 0:
            report("measuring")
            while not Path(run.gate).exists():
                time.sleep(0.02)
        return measured(model, batch)

    with session_of(run) as session:
        model, optimizer = session.distribute(
            model, optimizer, strategy=elastic_bodies.strategy_of(run)
        )
        batches = session.batches(data(), global_batch_size=run.batch_size, epochs=EPOCHS)
        for batch in batches:
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
            if session.step_number == run.at_step and not looked:
                looked = True
                sums = session.evaluate(data(), measure, batch_size=BATCH)
                report("looked", samples=sums["samples"], world_size=session.world_size)
            if session.step_number > run.at_step and session.world_size == 3:
                session.stop("all are there")
        report("finished", step=session.step_number)


LONE_CALLS = {
    "evaluate": lambda session, model: session.evaluate(
        data(), lambda batch: measured(model, batch), batch_size=BATCH
    ),
    "all_reduce": lambda session, model: session.all_reduce(1),
    "state_dict": lambda session, model: session.state_dict(),
}


def train_with_a_lone_call(report: Report, run: Evaluating) -> None:
    """Train; after step `at_step` only the first member makes the call named `fault`."""
    model, optimizer = build(run.optimizer, "layers")
    try:
        with session_of(run) as session:
            model, optimizer = session.distribute(
                model, optimizer, strategy=elastic_bodies.strategy_of(run)
            )
            for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=EPOCHS):
                with session.step():
                    session.backward(cross_entropy(model(batch.inputs), batch.targets))
                if batch.step == run.at_step and session.is_first:
                    LONE_CALLS[run.fault](session, model)
    except InvalidSpec as error:
        report("refused", text=str(error), generation=session.generation)
