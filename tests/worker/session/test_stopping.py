"""`session.stop`: the job ends where the script says, after the same step on all members."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.members.thread_members import ThreadJob, lone
from support.network import http
from support.training.elastic_bodies import build, layers, order
from support.training.elastic_bodies import numbers as data
from torch.nn.functional import cross_entropy

import shoal
from shoal.data.batches import Loader
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, JobFinished

BATCH = 24
Body = Callable[[Session, Any, shoal.Batch], bool]
"""Trains on the batch, and stops at some step. Returns True if the script leaves its loop."""


def train(session: Session, model: Any, batch: shoal.Batch) -> None:
    session.backward(cross_entropy(model(batch.inputs), batch.targets))


def one_calls_between_steps(session: Session, model: Any, batch: shoal.Batch) -> bool:
    """Call `stop` on one member: the others have begun the next step when they learn of it."""
    with session.step():
        train(session, model, batch)
    if session.is_first and session.step_number == 3:
        session.stop("the loss is low")
    return False


def all_call_in_the_step(session: Session, model: Any, batch: shoal.Batch) -> bool:
    with session.step():
        train(session, model, batch)
        if batch.step == 2:
            session.stop("the loss is low")
    return False


def all_leave_the_loop(session: Session, model: Any, batch: shoal.Batch) -> bool:
    with session.step():
        train(session, model, batch)
    if session.step_number == 3:
        session.stop("the loss is low")
    return session.step_number == 3


def crew(job: ThreadJob, body: Body, strategy: Any) -> list[Any]:
    """Return the step and the model of each of three members, threads of this process."""

    # Threads of a process share its generator, so models are made before.
    made = [build("sgd", "layers") for _ in range(3)]

    def member(model: Any, optimizer: Any) -> Any:
        with job.join() as session:
            replica, optimizer = session.distribute(model, optimizer, strategy=strategy())
            for batch in session.batches(data(), global_batch_size=BATCH, epochs=20):
                if body(session, replica, batch):
                    break
            return session.step_number, dict(session.state_dict())

    return job.results(member, *made)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("strategy", "body"),
    [
        (shoal.DDP, one_calls_between_steps),
        (shoal.DDP, all_call_in_the_step),
        (shoal.DDP, all_leave_the_loop),
        (shoal.FSDP, one_calls_between_steps),
        (shoal.FSDP, all_leave_the_loop),
    ],
)
def test_the_job_finishes_after_the_same_step_on_all_members(
    cluster: LocalCluster, strategy: Any, body: Body
) -> None:
    """The model is that of one process that stops there: no further step is taken."""
    job = ThreadJob(cluster=cluster, num_members=3)
    found = crew(job, body, strategy)
    model, optimizer = build("sgd", "layers")
    loader = Loader(data(), order(BATCH))
    for step in range(3):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    assert [step for step, _ in found] == [3] * 3
    for _, state in found:
        for name, tensor in model.state_dict().items():
            assert torch.allclose(state[name], tensor, rtol=0, atol=1e-6), name
    shown = http.get(f"{cluster.http_url}/api/v1/jobs/{job.name}").text
    assert "stopped by the script: the loss is low" in shown
    with pytest.raises(JobFinished), shoal.join(job.name, coordinator=cluster.coordinator):
        pass


def test_under_local_sgd_the_job_stops_at_the_end_of_the_round(cluster: LocalCluster) -> None:
    job = ThreadJob(cluster=cluster, num_members=3)
    found = crew(job, one_calls_between_steps, lambda: shoal.LocalSGD(every_steps=4))
    assert [step for step, _ in found] == [4] * 3


def test_stop_is_refused_under_async_sgd(cluster: LocalCluster) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lone(cluster) as session:
        session.distribute(model, optimizer, strategy="async-sgd")
        with pytest.raises(InvalidSpec, match=r"session\.stop.*shoal stop JOB"):
            session.stop("enough")
        session.leave(reason="refused")
