"""A script leaves its loop before the last batch, and a member is lost after that. Calls of the
others return the state of the step that was reached, or raise an error that this state is lost."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from support.members.thread_members import Killed, ThreadJob
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch.nn.functional import cross_entropy

import shoal
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import StateLost

STEPS = 3
"""Steps taken. The newest copy of what a member holds is of step 1 or 0."""
Train = Callable[[shoal.Batch], None]
Loop = Callable[[Session, Any, Train], Any]
"""A loop of (session, batches, train): trains on some batches and leaves. Returns what the script
keeps."""


def stops(session: Session, batches: Any, train: Train) -> None:
    for batch in batches():
        train(batch)
        if session.step_number == STEPS:
            session.stop("the loss is low")
            break


def breaks(session: Session, batches: Any, train: Train) -> None:
    for batch in batches():
        train(batch)
        if session.step_number == STEPS:
            break


def breaks_and_keeps_the_batches(session: Session, batches: Any, train: Train) -> Any:
    kept = batches()
    for batch in kept:
        train(batch)
        if session.step_number == STEPS:
            break
    return kept


def fails_in_its_own_code(session: Session, batches: Any, train: Train) -> None:
    def loop() -> None:
        for batch in batches():
            train(batch)
            if session.step_number == STEPS:
                raise KeyError("a column")

    with suppress(KeyError):
        loop()


def goes_back_in_the_loop(session: Session, batches: Any, train: Train) -> None:
    """Measure the model before the break; member c is lost before it calls."""
    for batch in batches():
        train(batch)
        if session.step_number == STEPS:
            if session.member_id == "c":
                raise Killed
            session.all_reduce(1)
            break


def member(job: ThreadJob, strategy: Any, loop: Loop, act: Any) -> Any:
    def run(name: str, model: Any, optimizer: Any) -> Any:
        with job.join(member_id=name) as session:
            session.distribute(model, optimizer, strategy=strategy())

            def train(batch: shoal.Batch) -> None:
                with session.step():
                    session.forward_backward(batch, cross_entropy)

            def batches() -> Any:
                return session.batches(data(), global_batch_size=24, epochs=20)

            kept = loop(session, batches, train)
            assert kept is None or len(kept) > STEPS
            return act(session, name)

    return run


def crew(cluster: LocalCluster, strategy: Any, loop: Loop, act: Any) -> list[Any]:
    """Return the results or errors of three members, threads of this process."""
    made = [build("sgd", "layers") for _ in range(3)]
    job = ThreadJob(cluster=cluster, num_members=3)
    run = member(job, strategy, loop, act)
    return job.outcomes(run, *((name, *each) for name, each in zip("abc", made, strict=True)))


def saves(session: Session, name: str) -> int:
    if name == "c":
        raise Killed
    session.state_dict()
    return session.step_number


def are_known(survivors: list[Any]) -> None:
    """Check that the survivors report a lost state. The first member that finds out leaves, and
    then the other one may report that less than a whole state is left."""
    assert all(isinstance(each, StateLost) for each in survivors), survivors
    wanted = ("the others hold step", f"expected the whole state of step {STEPS}")
    assert any(all(part in str(each) for part in wanted) for each in survivors), survivors


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("strategy", "loop"),
    [
        (shoal.FSDP, stops),
        (shoal.FSDP, breaks),
        (shoal.FSDP, breaks_and_keeps_the_batches),
        (shoal.FSDP, fails_in_its_own_code),
        (shoal.FSDP, goes_back_in_the_loop),
        (shoal.Zero1, stops),
        (shoal.Pipeline, breaks),
    ],
)
def test_a_call_after_the_loop_returns_no_state_of_an_earlier_step(
    cluster: LocalCluster, strategy: Any, loop: Loop
) -> None:
    *survivors, lost = crew(cluster, strategy, loop, saves)
    assert isinstance(lost, Killed)
    are_known(survivors)


def is_lost_at_the_end(session: Session, name: str) -> int:
    assert session.state_dict()
    if name == "c":
        raise Killed
    return session.step_number


@pytest.mark.parametrize("strategy", [shoal.FSDP, shoal.DDP])
def test_a_stopped_job_ends_with_the_step_that_was_reached(
    cluster: LocalCluster, strategy: Any
) -> None:
    """The job has not finished if the state of that step is lost: no earlier state counts as its
    result."""
    *survivors, lost = crew(cluster, strategy, stops, is_lost_at_the_end)
    assert isinstance(lost, Killed)
    if strategy is shoal.DDP:
        assert survivors == [STEPS] * 2
    else:
        are_known(survivors)


def test_a_loop_that_is_begun_again_continues_after_a_loss(cluster: LocalCluster) -> None:
    def loops_twice(session: Session, batches: Any, train: Train) -> None:
        kept = breaks_and_keeps_the_batches(session, batches, train)
        if session.member_id == "c":
            raise Killed
        for batch in kept:
            train(batch)
            if session.step_number == STEPS + 1:
                break

    def is_left(session: Session, name: str) -> int:
        return session.all_reduce(session.step_number, "min")

    *survivors, lost = crew(cluster, shoal.FSDP, loops_twice, is_left)
    assert isinstance(lost, Killed)
    assert survivors == [STEPS + 1] * 2
