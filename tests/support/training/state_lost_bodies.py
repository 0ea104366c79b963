"""Bodies of members that train until the test ends them; their processes import this."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.processes.ranks import Report
from support.training.rank_bodies import data, loss_of, model_and_optimizer

import shoal
from shoal.membership.generation import Generation
from shoal.membership.join_config import JoinConfig
from shoal.session.session import Session
from shoal.state import shared_exchange
from shoal.state.shared_exchange import SharedExchange
from shoal_proto.errors import UnsupportedOptimizer
from shoal_proto.v1.membership_pb2 import STATE_ACTION_RECEIVE


@dataclass(frozen=True, kw_only=True)
class Run:
    coordinator: str
    job: str
    member_id: str = ""
    strategy: str = "ddp"
    desired: int = 2
    directory: str = ""
    """Directory of checkpoints, one every 5 steps; empty: none are written."""
    low: int = 1
    """Minimum number of members of the job."""
    gives_nothing: str = ""
    """Path of a file; while it exists, the member cannot send its state to a new member."""
    num_failures: int = 0
    """Number of the member's bring-ups that fail for lack of memory."""
    exchange: str = ""
    """Not empty: even small states are sent through shared memory; "stops": this member stops
    at its first such exchange."""


def _run_out_of_memory(session: Session, times: int) -> None:
    strategy: Any = session.strategy
    bring_up, left = strategy._bring_up, iter(range(times))

    def try_to(*arguments: Any) -> None:
        if next(left, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        bring_up(*arguments)

    strategy._bring_up = try_to


def _give_nothing(session: Session, while_exists: str) -> None:
    strategy: Any = session.strategy
    bring_up = strategy._bring_up

    def fail(generation: Generation, *arguments: Any) -> None:
        comes = any(entry.state == STATE_ACTION_RECEIVE for entry in generation.entries)
        if comes and strategy.has_state and Path(while_exists).exists():
            raise UnsupportedOptimizer("the state of Hist cannot be handed to another member")
        bring_up(generation, *arguments)

    strategy._bring_up = fail


def _exchange(how: str) -> None:
    shared_exchange.MIN_BOX_BYTES = 1
    run = SharedExchange.run

    def stop(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        run(*arguments)

    if how == "stops":
        SharedExchange.run = stop  # type: ignore[method-assign]


def train(report: Report, run: Run) -> None:
    """Train, and report "stepped" for each committed step, which takes a few milliseconds."""
    config = JoinConfig(
        job=run.job,
        coordinators=(run.coordinator,),
        member_id=run.member_id,
        min_members=run.low,
        desired_members=run.desired,
    )
    if run.exchange:
        _exchange(run.exchange)
    model, optimizer = model_and_optimizer()
    kept = shoal.Checkpoints(run.directory, every_steps=5) if run.directory else None
    with Session(config) as session:
        model, optimizer = session.distribute(model, optimizer, run.strategy, checkpoints=kept)
        _run_out_of_memory(session, run.num_failures)
        if run.gives_nothing:
            _give_nothing(session, run.gives_nothing)
        for batch in session.batches(data(), global_batch_size=10, epochs=10_000):
            with session.step() as step:
                session.backward(loss_of(model(batch.inputs), batch.targets))
            time.sleep(0.005)
            if step.committed:
                report("stepped", step=session.step_number, generation=session.generation)
