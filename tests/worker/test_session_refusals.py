"""Bad input to `shoal.join` and the session: a clear error at once, while the job goes on."""

import multiprocessing

import pytest
import torch
from support.training import rank_bodies
from support.training.elastic_bodies import build, numbers

import shoal
from shoal.membership.join_config import read_config
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import (
    InvalidSpec,
    JobFinished,
    ProposalConflict,
    ShoalError,
    UnknownStrategy,
    UnsupportedOptimizer,
)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"coordinator": "h:1"}, "no job was named"),
        ({"job": "j", "min_members": 2}, "no coordinator was named"),
        ({"job": "j", "coordinator": "nowhere"}, "host:port"),
        ({"job": "a b", "coordinator": "h:1"}, "'a b'"),
        ({"job": "j", "coordinator": "h:1", "min_members": 3, "max_members": 2}, "min_members=3"),
        ({"job": "j", "coordinator": "h:1", "min_members": 0}, "min_members=0"),
    ],
)
def test_bad_arguments_are_refused_before_any_call(given: dict[str, str | int], text: str) -> None:
    """The error names what is wrong."""
    with pytest.raises(InvalidSpec, match=text):
        read_config(given, {})


def test_arguments_come_before_the_environment_and_the_environment_before_defaults() -> None:
    """The environment is that of `shoal run`."""
    environment = {
        "SHOAL_JOB": "env",
        "SHOAL_COORDINATOR": "a:1, b:2",
        "SHOAL_MIN_MEMBERS": "2",
        "SHOAL_MAX_MEMBERS": "4",
        "SHOAL_DESIRED_MEMBERS": "3",
        "SHOAL_MEMBER_ID": "w0",
    }
    config = read_config({"job": "own", "max_members": 9}, environment)
    assert (config.job, config.coordinators, config.member_id) == ("own", ("a:1", "b:2"), "w0")
    assert (config.min_members, config.max_members, config.desired_members) == (2, 9, 3)
    with pytest.raises(InvalidSpec, match=r"SHOAL_MIN_MEMBERS.*'two'"):
        read_config({}, environment | {"SHOAL_MIN_MEMBERS": "two"})


def test_another_default_device_than_the_cpu_is_refused_before_training() -> None:
    """Indices of samples and copies for checkpoints would be on that device."""
    model, optimizer = build("sgd", "layers")
    with shoal.join() as session:
        session.distribute(model, optimizer)
        batches = session.batches(numbers(), global_batch_size=24)
        with torch.device("meta"), pytest.raises(InvalidSpec, match=r"default device.*is meta"):
            next(iter(batches))


@pytest.mark.long
def test_a_spawned_process_that_imports_the_script_does_not_take_the_trainers_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(InvalidSpec, match=r"imports the script.*expected if __name__"):
        shoal.join("digits", coordinator="127.0.0.1:1")


def test_an_unreachable_coordinator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes within the time limit for finding a coordinator."""
    monkeypatch.setenv("SHOAL_ADMISSION_S", "1")
    with (
        pytest.raises(ShoalError, match=r"within 1 s.*127\.0\.0\.1:1\b"),
        shoal.join("j", coordinator="127.0.0.1:1"),
    ):
        pass


def test_wrong_use_of_a_session_is_refused_and_the_job_goes_on(cluster: LocalCluster) -> None:
    """A member tries each wrong use, and then trains to the end."""
    model, optimizer = rank_bodies.model_and_optimizer()
    with shoal.join("refusals", coordinator=cluster.coordinator) as session:
        with pytest.raises(UnknownStrategy, match="'ddp'"):
            session.distribute(model, optimizer, strategy="dpp")
        with pytest.raises(UnsupportedOptimizer, match="LBFGS"):
            session.distribute(model, torch.optim.LBFGS(model.parameters()))
        with pytest.raises(InvalidSpec, match=r"session\.distribute"):
            session.batches(rank_bodies.data(), global_batch_size=5)
        replica, optimizer = session.distribute(model, optimizer)
        with pytest.raises(InvalidSpec, match="global_batch_size"):
            session.batches(rank_bodies.data(), global_batch_size=0)
        with pytest.raises(InvalidSpec, match="no generation yet"):
            _ = session.rank
        for batch in session.batches(rank_bodies.data(), global_batch_size=20):
            with session.step() as step:
                session.backward(rank_bodies.loss_of(replica(batch.inputs), batch.targets))
            assert step.committed
        assert session.step_number == 3
    with (
        pytest.raises(JobFinished) as refused,
        shoal.join("refusals", coordinator=cluster.coordinator),
    ):
        pass
    # The traceback shows the script's line and no inner frames.
    assert [frame.name for frame in refused.traceback][1:] == ["__enter__", "_attend"]


def test_a_plain_backward_in_a_session_is_refused(cluster: LocalCluster) -> None:
    """A plain backward would weight uneven shares wrongly, so the step is refused."""
    model, optimizer = rank_bodies.model_and_optimizer()
    with (
        pytest.raises(InvalidSpec, match=r"session\.backward"),
        shoal.join("plain-backward", coordinator=cluster.coordinator) as session,
    ):
        replica, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(rank_bodies.data(), global_batch_size=20):
            with session.step():
                rank_bodies.loss_of(replica(batch.inputs), batch.targets).backward()


def test_another_model_than_the_jobs_is_refused_and_the_job_goes_on(cluster: LocalCluster) -> None:
    """The refusal names the field; the first member trains on undisturbed."""
    model, optimizer = rank_bodies.model_and_optimizer()
    with shoal.join("conflict", coordinator=cluster.coordinator) as session:
        replica, optimizer = session.distribute(model, optimizer)
        batches = session.batches(rank_bodies.data(), global_batch_size=20)
        next_batch = next(batches)
        other = torch.nn.Linear(6, 2)
        with (
            pytest.raises(ProposalConflict, match=r"'parameter .*\(2, 6\) float32'") as refused,
            shoal.join("conflict", coordinator=cluster.coordinator) as stranger,
        ):
            stranger.distribute(other, torch.optim.SGD(other.parameters(), lr=0.02, momentum=0.9))
            next(stranger.batches(rank_bodies.data(), global_batch_size=20))
        assert "schema" in refused.value.details
        while True:
            with session.step() as step:
                session.backward(
                    rank_bodies.loss_of(replica(next_batch.inputs), next_batch.targets)
                )
            assert step.committed
            try:
                next_batch = next(batches)
            except StopIteration:
                break
        assert session.step_number == 3
