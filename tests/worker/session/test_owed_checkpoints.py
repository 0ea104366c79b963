"""Checkpoints that are due when their generation ends: the next generation writes them."""

from pathlib import Path
from typing import Any

import pytest
from support.members.thread_members import Killed, ThreadJob
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch.nn.functional import cross_entropy

import shoal
from shoal.checkpoint.directory import complete
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster

BATCH = 24


class KilledInWrite(shoal.Checkpoints):
    """Checkpoints of a member that is killed when it is to write the first of them."""

    def begin_write(self, *_: Any, **__: Any) -> None:
        raise Killed


def train(session: Session, strategy: str, checkpoints: shoal.Checkpoints, fault: str = "") -> int:
    """Train one epoch, with an evaluation after each step; return the number of steps."""
    model, optimizer = build("sgd", "layers")
    model, optimizer = session.distribute(model, optimizer, strategy, checkpoints=checkpoints)

    def measure(batch: shoal.Batch) -> dict[str, float]:
        if fault == "in evaluate" and session.step_number == checkpoints.every_steps:
            raise Killed
        return {"samples": batch.num_samples}

    for batch in session.batches(data(), global_batch_size=BATCH):
        with session.step():
            session.backward(cross_entropy(model(batch.inputs), batch.targets))
        session.evaluate(data(), measure, batch_size=BATCH)
        if fault == "drained" and batch.step == 1:
            session.drain("the allocation ends")
    return session.step_number


def outcomes(
    cluster: LocalCluster, directory: Path, strategy: str, every_steps: int, fault: str
) -> list[Any]:
    """Return the results of two members, and of a third one that is killed."""
    job = ThreadJob(cluster=cluster, num_members=3)

    def member(kind: type[shoal.Checkpoints], fault: str) -> int:
        with job.join(min_members=1) as session:
            return train(session, strategy, kind(directory, every_steps=every_steps), fault)

    killed = shoal.Checkpoints if fault == "in evaluate" else KilledInWrite
    others = fault if fault == "drained" else ""
    kinds = [(shoal.Checkpoints, others), (shoal.Checkpoints, others), (killed, fault)]
    return job.outcomes(member, *kinds)


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("ddp", "in evaluate"),
        ("ddp", "in the write"),
        ("fsdp", "in the write"),
        ("local-sgd", "in the write"),
    ],
)
def test_a_checkpoint_of_the_last_step_is_written_though_a_member_is_killed(
    cluster: LocalCluster, tmp_path: Path, strategy: str, fault: str
) -> None:
    """Regression: the others ended with success, and without a checkpoint."""
    num_steps = -(-len(data()[0]) // BATCH)
    *results, error = outcomes(cluster, tmp_path, strategy, num_steps, fault)
    assert results == [num_steps] * 2
    assert isinstance(error, Killed)
    assert list(complete(tmp_path)) == [num_steps]


def test_a_checkpoint_that_a_change_of_members_ends_is_written_in_the_next_generation(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    *results, error = outcomes(cluster, tmp_path, "ddp", 2, "in the write")
    assert isinstance(error, Killed)
    assert 2 in complete(tmp_path), results


def test_the_checkpoint_of_leaving_members_is_written_though_one_is_killed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Regression: the others left as if it had been written."""
    *results, error = outcomes(cluster, tmp_path, "ddp", 1000, "drained")
    assert [type(each) for each in results] == [shoal.Drained] * 2
    assert isinstance(error, Killed)
    assert len(complete(tmp_path)) == 1
