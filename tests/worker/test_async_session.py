"""Sessions whose members train at their own pace on leased samples."""

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from support.members.async_members import trained
from support.members.thread_members import lone
from support.processes.ranks import Rank, Ranks
from support.training import async_bodies, rank_bodies
from support.training.rank_bodies import BATCH_SIZE, EPOCHS, NUM_SAMPLES, Run

from shoal.data.order import Order
from shoal_client.connection.coordinators import Coordinators
from shoal_client.local.cluster import LocalCluster
from shoal_proto.v1.membership_pb2 import GetJobRequest
from shoal_proto.v1.membership_pb2_grpc import MembershipStub


def start(
    ranks: Ranks,
    cluster: LocalCluster,
    job: str,
    name: str,
    *,
    fault: str = "",
    epochs: int = EPOCHS,
    strategy: str = "async-sgd",
) -> Rank:
    run = Run(
        coordinator=cluster.coordinator,
        job=job,
        member_id=name,
        desired_members=2,
        strategy=strategy,
        fault=fault,
        at_step=2,
        epochs=epochs,
    )
    return ranks.start(rank_bodies.train, run)


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["async-sgd", "async-diloco"])
def test_members_share_out_each_sample_once_an_epoch(cluster: LocalCluster, strategy: str) -> None:
    """Holds for members of any speed, step by step or in rounds."""
    with Ranks() as ranks:
        crew = [start(ranks, cluster, f"{strategy}-once", name, strategy=strategy) for name in "ab"]
        for rank in crew:
            rank.expect("finished")
        found = trained(crew)
    assert len(found) == NUM_SAMPLES * EPOCHS
    assert set(found.values()) == {1}


@pytest.mark.parametrize("strategy", ["async-sgd", "async-diloco"])
def test_drop_last_leaves_out_the_same_samples_as_under_ddp(
    cluster: LocalCluster, strategy: str
) -> None:
    """The samples at the end of each epoch's order are left out, so all batches are whole."""
    inputs, targets = rank_bodies.data()
    data, order = (inputs[:23], targets[:23]), Order(num_samples=23, global_batch_size=5, seed=0)
    found: list[tuple[int, list[int]]] = []
    with lone(cluster) as session:
        model, _ = session.distribute(*rank_bodies.model_and_optimizer(), strategy=strategy)
        for batch in session.batches(data, global_batch_size=5, epochs=2, drop_last=True):
            found.append((batch.epoch, batch.indices))
            with session.step():
                session.backward(rank_bodies.loss_of(model(batch.inputs), batch.targets))
    assert found == [
        (epoch, indices.tolist())
        for epoch in range(2)
        for indices in order.indices(epoch, 0, 20).split(5)
    ]


@pytest.mark.long
def test_samples_of_a_killed_member_are_trained_on_by_the_other(cluster: LocalCluster) -> None:
    """A single batch may count twice: the one whose completion was being reported."""
    with Ranks() as ranks:
        survivor = start(ranks, cluster, "async-kill", "a")
        killed = start(ranks, cluster, "async-kill", "b", fault="kill in forward")
        survivor.expect("finished")
        assert killed.join() == -signal.SIGKILL
        killed.drain()
        found = trained([survivor, killed])
    assert len(found) == NUM_SAMPLES * EPOCHS
    assert found.total() <= NUM_SAMPLES * EPOCHS + BATCH_SIZE


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["async-sgd", "async-diloco"])
def test_a_drained_member_returns_the_samples_that_it_has_not_trained_on(
    cluster: LocalCluster, strategy: str
) -> None:
    """The member leaves after its step, within a round, and ends with 143; each sample still counts
    once."""
    epochs, job = 40, f"{strategy}-drain"
    with Ranks() as ranks:
        stays = start(ranks, cluster, job, "a", epochs=epochs, strategy=strategy)
        drained = start(ranks, cluster, job, "b", epochs=epochs, strategy=strategy)
        drained.expect("committed")
        drained.send_signal(signal.SIGTERM)
        assert drained.expect("exits") == {"code": 143, "reason": "SIGTERM"}
        assert drained.join() == 143
        stays.expect("finished")
        found = trained([stays, drained])
    assert len(found) == NUM_SAMPLES * epochs
    assert set(found.values()) == {1}


def test_a_step_that_was_too_stale_is_taken_again(cluster: LocalCluster, tmp_path: Path) -> None:
    """The same member takes the step again with the same samples; each sample counts once all the
    same."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def run(name: str, gate: str = "") -> Run:
        return Run(
            coordinator=cluster.coordinator,
            job="async-stale",
            member_id=name,
            desired_members=2,
            strategy="async-sgd",
            gate=gate,
        )

    with Ranks() as ranks:
        late = ranks.start(async_bodies.train_fresh_only, run("late", str(gate)))
        other = ranks.start(async_bodies.train_fresh_only, run("other"))
        late.expect("waits")
        other.expect("committed")
        gate.write_bytes(b"")
        late.expect("refused")
        again = late.expect("tried")
        assert late.expect("finished")["rejected"] >= 1
        other.expect("finished")
        found = trained([late, other])
    assert next(data for kind, data in late.seen if kind == "tried") == again
    assert len(found) == NUM_SAMPLES * EPOCHS
    assert set(found.values()) == {1}


@pytest.mark.parametrize(
    ("fault", "epochs", "says"),
    [
        ("inf", 6, "the loss is not finite: "),
        pytest.param("", 45, "the loss has not fallen: ", marks=pytest.mark.long),
    ],
    ids=["infinite", "flat, but must fall"],
)
def test_a_wrong_final_loss_fails_the_member_and_the_job(
    cluster: LocalCluster, fault: str, epochs: int, says: str
) -> None:
    """All samples were trained on: the end of the session raises what the options promise, and the
    job is not shown as one that could go on."""
    run = Run(
        coordinator=cluster.coordinator,
        job=f"async-in-vain-{epochs}",
        member_id="a",
        strategy="async-sgd",
        fault=fault,
        at_step=10,
        epochs=epochs,
    )
    with Ranks() as ranks:
        rank = ranks.start(async_bodies.train_in_vain, run)
        ending, report = rank.expect_any("raised", "finished")
        assert ending == "raised"
        assert report["error"] == "TrainingFailed", report["trace"]
        assert says in report["text"]
    with closing(Coordinators([cluster.coordinator])) as coordinators:
        request = GetJobRequest(job=run.job)
        standing = coordinators.call(lambda c: MembershipStub(c).GetJob, request, timeout_s=10.0)
    assert standing.phase == "failed"
    assert f"TrainingFailed: {report['text']}"[:200] in standing.reason
