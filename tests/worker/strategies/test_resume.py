"""Jobs that lost every member continue from their newest checkpoint, under any strategy."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from support.members.elastic_schedule import Schedule, check_same_weights, elastic, lose_all
from support.processes.ranks import Ranks
from support.training.elastic_bodies import CHECKPOINT_STEPS

import shoal
from shoal.checkpoint.directory import complete
from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("first", "second"), [(("fsdp", 3), ("ddp", 2)), (("ddp", 2), ("zero1", 3))], ids=str
)
def test_a_checkpoint_of_one_strategy_and_world_size_is_read_by_another(
    cluster: LocalCluster, tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    directory = tmp_path / "checkpoints"
    run = elastic(cluster, "resume", optimizer="adamw", checkpoints=str(directory))
    with Ranks() as ranks:
        lost = Schedule(
            ranks, replace(run, strategy=first[0], desired_members=first[1]), tmp_path, seed=1
        )
        lost.start(first[1])
        newest = lose_all(lost, directory, 2)
        assert newest % CHECKPOINT_STEPS == 0
        going_on = Schedule(
            ranks,
            replace(run, job=f"{run.job}-2", strategy=second[0], desired_members=second[1]),
            tmp_path,
            seed=1,
        )
        going_on.start(second[1])
        assert min(data["step"] for _, data in going_on.committed()) >= newest
        check_same_weights(going_on.finish(), run, TOLERANCE)


@pytest.mark.long
def test_training_goes_on_though_checkpoints_cannot_be_written(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The result is delivered, and then the error of the last checkpoint."""
    directory = tmp_path / "checkpoints"
    run = elastic(
        cluster, "unwritten", desired_members=2, strategy="fsdp", checkpoints=str(directory)
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=1)
        schedule.start(2)
        while not complete(directory):
            schedule.alive[0].expect("committed")
        directory.rename(tmp_path / "gone")
        directory.write_text("no directory any more")
        schedule.stop()
        for rank in schedule.alive:
            finished = rank.expect("finished")
            assert finished["step"] > 2 * CHECKPOINT_STEPS
            check_same_weights(finished, run, TOLERANCE)
            assert rank.expect("raised")["error"] == "CheckpointFailed"


def test_a_checkpoint_that_is_read_is_logged_once(tmp_path: Path) -> None:
    def trained(strategy: str, num_epochs: int) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoints = shoal.Checkpoints(tmp_path / strategy, every_steps=1)
        with shoal.join() as session:
            model, _ = session.distribute(model, optimizer, strategy, checkpoints=checkpoints)
            data = (torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
            for batch in session.batches(data, global_batch_size=2, epochs=num_epochs):
                with session.step():
                    outputs = model(batch.inputs)
                    session.backward(torch.nn.functional.cross_entropy(outputs, batch.targets))

    for strategy in ("ddp", "zero1", "local-sgd"):
        trained(strategy, 1)
        with capture_logs() as logs:
            trained(strategy, 2)
        assert [each["step"] for each in logs if each["event"] == "checkpoint_read"] == [2]
