"""Members whose scripts start child processes while they train."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from support.processes.ranks import Report
from support.training.rank_bodies import Run, data, loss_of, model_and_optimizer, session_of

from shoal.session.elastic_controller import ElasticController


def with_a_pool() -> None:
    """Use a pool, which ends its processes by SIGTERM and waits for them."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]


def with_a_fork() -> None:
    """Fork a child, which leaves the block of the session by `sys.exit`."""
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0


WAYS: Mapping[str, Callable[[], None]] = {"pool": with_a_pool, "fork": with_a_fork}


def noted_leaves() -> set[int]:
    """Return a set that gets the id of each process in which a session is left."""
    left_in: set[int] = set()
    leave = ElasticController.leave

    def noted(controller: ElasticController, **how: Any) -> None:
        left_in.add(os.getpid())
        leave(controller, **how)

    ElasticController.leave = noted  # type: ignore[method-assign]
    return left_in


def train(report: Report, run: Run, way: str) -> None:
    """Train all steps, with child processes before two of them."""
    model, optimizer = model_and_optimizer()
    trainer = os.getpid()
    left_in = noted_leaves()
    try:
        with session_of(run) as session:
            replica, optimizer = session.distribute(model, optimizer, strategy=run.strategy)
            for batch in session.batches(
                data(), global_batch_size=run.batch_size, epochs=run.epochs
            ):
                if batch.step in (3, 7):
                    WAYS[way]()
                with session.step():
                    session.backward(loss_of(replica(batch.inputs), batch.targets))
    finally:
        if os.getpid() != trainer:
            # A child must not leave the trainer's session: that would be its exit code 1.
            os._exit(os.getpid() in left_in)
    report("finished", step=session.step_number, generation=session.generation)
