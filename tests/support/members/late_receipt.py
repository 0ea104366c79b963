"""Members of which one receives the others' messages for a step only after their generation is
over."""

import os
import signal
import threading
from typing import Any

from support.processes.ranks import Report
from support.training.rank_bodies import Run, data, loss_of, model_and_optimizer, session_of

from shoal.strategies.base import Strategy

LIMIT_S = 120.0


def train(report: Report, run: Run, transport: str) -> None:
    """Train up to and with step `at_step`. One member leaves, or is killed, after that step.
    Another receives the messages of that step late."""
    os.environ["SHOAL_TRANSPORT"] = transport
    model, optimizer = model_and_optimizer()
    with session_of(run) as session:
        replica, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=run.epochs):
            if batch.step > run.at_step:
                break
            if batch.step == run.at_step and run.fault == "receives late":
                delay_receipt(session.strategy)
            report("tried", step=batch.step, world_size=session.world_size)
            with session.step():
                session.backward(loss_of(replica(batch.inputs), batch.targets))
        if run.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        weights = [parameter.tolist() for parameter in model.parameters()]
    report("finished", weights=weights, step=session.step_number)


def delay_receipt(strategy: Strategy) -> None:
    """Delay the receipt of the others' messages for the present step until the cut."""
    untyped: Any = strategy
    messages, is_cut = untyped._transaction.votes._words, threading.Event()
    receive, cut = messages.receive_values, untyped.cut

    def cut_and_note(generation: int) -> None:
        cut(generation)
        is_cut.set()

    def receive_after_the_cut() -> Any:
        assert is_cut.wait(LIMIT_S), "nobody has left"
        return receive()

    untyped.cut, messages.receive_values = cut_and_note, receive_after_the_cut
