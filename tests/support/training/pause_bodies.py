"""Bodies of members that pause, or that should have paused and do not."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from support.processes.ranks import Report
from support.training.rank_bodies import Run, data, loss_of, model_and_optimizer, session_of

import shoal
from shoal.backends.abortable.p2p import AbortableP2P, P2PMessage
from shoal.state import transfer
from shoal_proto.errors import DeadlineExceeded

LIMITS = {"--heartbeat-s": 1.0, "--collective-s": 5.0, "--join-s": 36.0}
EPOCHS = 1000


@dataclass(frozen=True, kw_only=True)
class Pausing(Run):
    """A member's run; the file `gate` ends the member's other code at step `at_step`."""

    pauses: bool = True
    """True if the member announces its other code as a pause."""
    is_away: bool = False
    """True if the member runs other code at that step."""
    limit_s: float = 600.0
    early: bool = False
    """True if the member runs the code before its first batch, and not at the step."""
    stop_file: str = ""
    """File with the step at which all members stop, once the test has decided on it."""


def train(report: Report, run: Pausing) -> None:
    """Train until the step in `stop_file`, with the pause between two steps."""
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
    """Run the script's other code, until the test creates the file."""
    while not gate.exists():
        time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Slow(Run):
    """A member that sends its state over a slow link."""

    transfer_s: float = 0.0
    stop_file: str = ""


NUM_MESSAGES = 32
WIDTH = 512


def train_slowly(report: Report, run: Slow) -> None:
    """Train as `train` does, but send this member's state at the rate of a slow link."""
    _throttle(run.transfer_s)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with session_of(run) as session:
        replica, optimizer = session.distribute(model, optimizer, strategy=run.strategy)
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=EPOCHS):
            if Path(run.stop_file).exists() and batch.step >= int(Path(run.stop_file).read_text()):
                break
            with session.step() as step:
                session.backward(replica(batch.inputs).square().mean())
            if step.committed:
                place = {"generation": session.generation, "world_size": session.world_size}
                report("committed", step=batch.step, **place)


def _throttle(transfer_s: float) -> None:
    """Delay each message that this process sends, so that the whole state takes `transfer_s`."""
    num_bytes = 4 * (6 * WIDTH + WIDTH + 2 * WIDTH * WIDTH + 2 * WIDTH)
    transfer.MESSAGE_BYTES = num_bytes // NUM_MESSAGES
    send = AbortableP2P.send

    def slow(self: AbortableP2P, tensors: list[torch.Tensor], to: int, tag: int = 0) -> P2PMessage:
        time.sleep(transfer_s * tensors[0].nbytes / num_bytes)
        return send(self, tensors, to, tag)

    AbortableP2P.send = slow  # type: ignore[method-assign]


def refused(report: Report, run: Pausing) -> None:
    """Train until this member is refused."""
    try:
        train(report, run)
    except DeadlineExceeded as error:
        report("refused", text=str(error))
