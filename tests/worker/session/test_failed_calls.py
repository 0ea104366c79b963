"""A call between two steps that fails on the last member left in it."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.members.thread_members import WAIT_S, Killed, ThreadJob
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch.nn.functional import cross_entropy

from shoal.data.batches import Batch
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import StateLost

AT_STEP = 2


class Failing:
    """A job of two members: one is lost in an evaluation, which then fails on the other."""

    def __init__(self, cluster: LocalCluster, error: Exception, *, caught: bool) -> None:
        self.job = ThreadJob(cluster=cluster, num_members=2)
        self._error = error
        self._caught = caught
        self.alone = threading.Event()
        """Set once one member is left, in the call that is about to fail."""
        self.joins = threading.Event()

    def train(self, name: str) -> int:
        model, optimizer = build("sgd", "layers")
        with self.job.join(member_id=name) as session:
            model, optimizer = session.distribute(model, optimizer)
            for batch in session.batches(data(), global_batch_size=24, epochs=10_000):
                with session.step() as step:
                    session.backward(cross_entropy(model(batch.inputs), batch.targets))
                if step.committed and batch.step == AT_STEP:
                    self._evaluate(session, name)
                if step.committed and batch.step > AT_STEP and session.world_size == 2:
                    session.stop("the one that was left trains with another one")
            return session.step_number

    def _evaluate(self, session: Session, name: str) -> None:
        def measure(batch: Batch) -> dict[str, Any]:
            if name == "b":
                raise Killed
            if name == "a" and session.world_size == 1:
                self.alone.set()
                assert self.joins.wait(WAIT_S)
                raise self._error
            return {"n": len(batch.inputs)}

        try:
            session.evaluate(data(), measure, batch_size=5)
        except type(self._error):
            if not self._caught:
                raise


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("of the script"), KeyError(7)]


def failed(
    cluster: LocalCluster, error: Exception, *, caught: bool
) -> tuple[Future[int], Future[int]]:
    """Return the outcomes of the member that is left, and of one that waits to join."""
    job = Failing(cluster, error, caught=caught)
    with ThreadPoolExecutor(3) as threads:
        left, lost = (threads.submit(job.train, name) for name in "ab")
        assert isinstance(lost.exception(WAIT_S), Killed)
        assert job.alone.wait(WAIT_S)
        joiner = threads.submit(job.train, "c")
        job.job.await_proposal("c")
        job.joins.set()
        left.exception(WAIT_S)
        joiner.exception(WAIT_S)
    return left, joiner


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
def test_a_script_that_goes_on_after_a_failed_call_trains_on_with_joiners(
    cluster: LocalCluster, error: Exception
) -> None:
    left, joiner = failed(cluster, error, caught=True)
    assert left.result() == joiner.result() > AT_STEP


@pytest.mark.long
def test_if_the_last_member_ends_with_the_error_joiners_get_state_lost(
    cluster: LocalCluster,
) -> None:
    left, joiner = failed(cluster, ERRORS[0], caught=False)
    assert left.exception() is ERRORS[0]
    with pytest.raises(StateLost, match="had reached step 3"):
        joiner.result()
