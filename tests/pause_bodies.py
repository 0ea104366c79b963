"""Members that pause, or do not and should have: what one of them does."""

import time
from dataclasses import dataclass
from pathlib import Path

from rank_bodies import Run, data, loss_of, model_and_optimizer, session_of
from ranks import Report

import shoal
from shoal_proto.errors import DeadlineExceeded

LIMITS = {"--heartbeat-s": 1.0, "--collective-s": 5.0, "--join-s": 36.0}
EPOCHS = 1000


@dataclass(frozen=True, kw_only=True)
class Pausing(Run):
    """One member's part; `gate` is a file that ends what it does at step `at_step`."""

    pauses: bool = True
    """Whether it says so."""
    is_away: bool = False
    """Whether it does something at that step at all."""
    limit_s: float = 600.0
    early: bool = False
    """Does it before its first batch, not at the step."""
    stop_file: str = ""
    """Holds the step at which all stop, once the test has decided on it."""


def train(report: Report, run: Pausing) -> None:
    """Steps until the stop, the pause between two of them."""
    model, optimizer = model_and_optimizer(seed=1)
    held = not run.is_away
    with session_of(run) as session:
        replica, optimizer = session.distribute(model, optimizer, strategy=run.strategy)
        if run.early and not held:
            held = True
            _be_away(report, session, run)
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=EPOCHS):
            if batch.step >= run.at_step and not held:
                held = True
                _be_away(report, session, run)
            stop = Path(run.stop_file)
            if stop.exists() and batch.step == int(stop.read_text()):
                break
            with session.step() as step:
                session.backward(loss_of(replica(batch.inputs), batch.targets))
            if step.committed:
                place = {"generation": session.generation, "world_size": session.world_size}
                report("committed", step=batch.step, **place)
        report("finished", step=session.step_number)


def _be_away(report: Report, session: shoal.Session, run: Pausing) -> None:
    report("away", generation=session.generation)
    gate = Path(run.gate)
    if run.pauses:
        with session.pause("validation", limit_s=run.limit_s):
            _wait_for(gate)
    else:
        _wait_for(gate)
    report("back", generation=session.generation)


def _wait_for(gate: Path) -> None:
    """The script's own code, which takes as long as the test wants it to."""
    while not gate.exists():
        time.sleep(0.02)


def refused(report: Report, run: Pausing) -> None:
    """Trains until it is told that it is a member no more."""
    try:
        train(report, run)
    except DeadlineExceeded as error:
        report("refused", text=str(error))
