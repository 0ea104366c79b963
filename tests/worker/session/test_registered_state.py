"""`session.register`: schedulers and averages count committed steps on all members, also on
joiners."""

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.members.elastic_schedule import Schedule, lose_all
from support.members.thread_members import Killed, ThreadJob, lone, train_alone
from support.processes.ranks import Ranks
from support.training import registered_bodies
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from support.training.registered_bodies import Registering
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

import shoal
from shoal.session.session import Session
from shoal.state.registered.objects import RegisteredState
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, RegisteredStateDiffers

TOLERANCE = 1e-6


class Metric:
    """A total to which the script adds."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def registering(cluster: LocalCluster, strategy: str, **changes: Any) -> Registering:
    whole = strategy in ("ddp", "zero1")
    return Registering(
        coordinator=cluster.coordinator,
        job=f"registered-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy,
        **{"desired_members": 3, "batch_size": 24, "averages": whole, **changes},
    )


def check_as_one_process(finished: Any, run: Registering) -> None:
    expected = registered_bodies.one_process(run, finished["step"])
    assert finished["epochs"] == expected["epochs"]
    assert finished["lr"] == pytest.approx(expected["lr"], rel=1e-9)
    for kind in ("weights", "average"):
        assert finished[kind].keys() == expected[kind].keys()
        for name, own in finished[kind].items():
            difference = (torch.tensor(own) - torch.tensor(expected[kind][name])).abs().max()
            assert difference < TOLERANCE, (kind, name)


@pytest.mark.sampled()
@pytest.mark.parametrize("behind", [True, False], ids=["behind the step", "in the step"])
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("whole", "ddp"),
        ("spread", "fsdp"),
        *(("whole", "zero1"), ("spread", "zero2")),
        *(("spread", "tensor"), ("spread", "pipeline")),
    ],
)
def test_schedule_and_average_are_those_of_one_process_after_a_kill_and_a_join(
    cluster: LocalCluster, tmp_path: Path, kind: str, strategy: str, behind: bool
) -> None:
    """Steps that are taken again count once, and the joiner begins with the others' state."""
    run = registering(cluster, strategy, behind=behind)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5, body=registered_bodies.train)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        check_as_one_process(schedule.finish(), run)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_schedule_and_average_continue_from_a_checkpoint(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The checkpoint includes what the script did after its last step."""
    run = registering(cluster, strategy, behind=True, checkpoints=str(tmp_path / "checkpoints"))
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=6, body=registered_bodies.train)
        schedule.start(3)
        step = lose_all(schedule, Path(run.checkpoints), 2)
        again = Schedule(ranks, run, tmp_path, seed=7, body=registered_bodies.train)
        again.start(3)
        first = next(d for kind, d in again.all[0].seen if kind == "tried")
        assert first["step"] >= step
        check_as_one_process(again.finish(), run)


def test_a_schedule_stepped_within_the_block_acts_after_the_step(
    cluster: LocalCluster,
) -> None:
    """A call within the step's block does not change the rate of that step. A schedule made of
    others steps those itself."""
    model, optimizer = build("sgd", "layers")
    phases = [LinearLR(optimizer, 0.1, total_iters=2), ExponentialLR(optimizer, 0.5)]
    schedule = SequentialLR(optimizer, phases, [2])
    rates = []
    with lone(cluster) as session:
        replica, optimizer = session.distribute(model, optimizer)
        session.register("schedule", schedule)
        for batch in session.batches(data(), global_batch_size=24):
            with session.step():
                schedule.step()
                session.backward(cross_entropy(replica(batch.inputs), batch.targets))
                rates.append(optimizer.param_groups[0]["lr"])
    _, plain = build("sgd", "layers")
    phases = [LinearLR(plain, 0.1, total_iters=2), ExponentialLR(plain, 0.5)]
    expected, reference = [], SequentialLR(plain, phases, [2])
    for _ in rates:
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        reference.step()
    assert rates == expected
    optimizer.step()
    schedule.step()  # the script's own again


def test_a_schedule_or_average_that_is_not_registered_is_refused_by_its_name(
    cluster: LocalCluster,
) -> None:
    """An unregistered object would count a step that did not happen, and begin from zero on a
    joiner."""
    model, optimizer = build("sgd", "layers")
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    schedule, elsewhere = ExponentialLR(optimizer, 0.9), ExponentialLR(other, 0.9)
    average = AveragedModel(model)
    with lone(cluster) as session:
        replica, optimizer = session.distribute(model, optimizer)
        ExponentialLR(optimizer, 0.9)  # is made, and not used
        for batch in session.batches(data(), global_batch_size=24):
            with session.step():
                session.backward(cross_entropy(replica(batch.inputs), batch.targets))
            with pytest.raises(InvalidSpec, match=r"ExponentialLR is used.*session\.register"):
                schedule.step()
            with pytest.raises(InvalidSpec, match=r"AveragedModel is used.*session\.register"):
                average.update_parameters(replica)
            other.step()
            elsewhere.step()


def test_an_average_of_a_part_of_the_model_is_taken_once_the_optimizer_has_stepped(
    cluster: LocalCluster,
) -> None:
    """Holds as for an average of the whole model, for any name of the argument. The average must be
    registered."""
    model, optimizer = build("sgd", "layers")
    part, other = model[0], torch.nn.Linear(2, 2)
    average, unknown, elsewhere = AveragedModel(part), AveragedModel(part), AveragedModel(other)
    with lone(cluster) as session:
        session.register("average", average)
        replica, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(data(), global_batch_size=96):
            with session.step():
                session.backward(cross_entropy(replica(batch.inputs), batch.targets))
                average.update_parameters(model=part)
                elsewhere.update_parameters(other)
                with pytest.raises(InvalidSpec, match=r"AveragedModel is used.*session\.register"):
                    unknown.update_parameters(part)
            if batch.step == 0:  # the first update copies
                assert torch.equal(average.module.weight, part.weight)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_an_average_of_weights_that_are_cut_is_refused_in_the_first_step(
    cluster: LocalCluster, strategy: str
) -> None:
    """The error is not one of torch's after the optimizer has stepped."""
    model, optimizer = build("sgd", "layers")
    average = AveragedModel(model)
    with lone(cluster) as session:
        session.register("average", average)
        replica, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=24):
            with session.step():
                session.backward(cross_entropy(replica(batch.inputs), batch.targets))
                with pytest.raises(
                    InvalidSpec, match="average of weights that this strategy divides"
                ):
                    average.update_parameters(replica)


def test_registering_too_late_or_under_strategies_that_carry_none_is_refused(
    cluster: LocalCluster,
) -> None:
    model, optimizer = build("sgd", "layers")
    with lone(cluster) as session:
        replica, optimizer = session.distribute(model, optimizer)
        session.register("metric", Metric())
        for batch in session.batches(data(), global_batch_size=101):
            with pytest.raises(InvalidSpec, match="'late' is registered too late"):
                session.register("late", Metric())
            with session.step():
                session.backward(cross_entropy(replica(batch.inputs), batch.targets))
    for strategy in ("local-sgd", "async-sgd"):
        model, optimizer = build("sgd", "layers")
        with lone(cluster) as session:
            session.distribute(model, optimizer, strategy=strategy)
            with pytest.raises(InvalidSpec, match=f"{strategy} carries no registered state"):
                session.register("metric", Metric())
            session.leave(reason="refused")


def member(job: ThreadJob, own: float) -> str:
    """Train as one of two threads that adds `own` in each step; return the total or the error."""
    model, optimizer = build("sgd", "layers")
    metric = Metric()
    try:
        with job.join() as session:
            replica, optimizer = session.distribute(model, optimizer)
            session.register("seen", metric)
            for batch in session.batches(data(), global_batch_size=50):
                with session.step() as step:
                    session.backward(cross_entropy(replica(batch.inputs), batch.targets))
                if step.committed:
                    metric.total += own
    except RegisteredStateDiffers as error:
        return str(error)
    return f"{metric.total:g}"


@pytest.mark.parametrize("own", [1.0, 2.0], ids=["the same", "another"])
def test_registered_state_that_differs_between_members_is_an_error_on_all(
    cluster: LocalCluster, own: float
) -> None:
    job = ThreadJob(cluster=cluster, num_members=2)
    errors = set(job.results(member, (job, 1.0), (job, own)))
    if own == 1.0:
        assert errors == {"3"}
    else:
        assert len(errors) == 1
        assert "state of 'seen' differs after step 3" in errors.pop()


class Breaking(Metric):
    """A metric that raises an error of its own when it is given a state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.append(state["total"])  # type: ignore[attr-defined]


def test_an_object_that_does_not_take_its_state_is_named() -> None:
    """Applies to any error that it raises."""
    registered = RegisteredState()
    registered.add("count", Breaking())
    registered.keep()
    registered.attempt()
    with pytest.raises(InvalidSpec, match=r"'count' cannot load the state.*AttributeError"):
        registered.undo()


def test_an_object_that_raises_in_state_dict_is_named() -> None:
    metric, registered = Metric(), RegisteredState()
    registered.add("count", metric)
    del metric.total
    with pytest.raises(AttributeError) as raised:
        registered.keep()
    assert raised.value.__notes__ == ["It was raised by state_dict of the registered 'count'."]


@pytest.mark.parametrize("given", [True, False])
def test_a_schedule_that_counts_own_steps_is_warned_of_under_async_sgd(
    cluster: LocalCluster, given: bool
) -> None:
    """The schedule would go a third of its way with three members, and the exit code would be 0."""
    model, optimizer = build("sgd", "layers")
    schedule = LambdaLR(optimizer, lambda update: 1 / (1 + update))
    strategy = shoal.AsyncSGD(schedule=schedule if given else None)
    job = f"apart-{secrets.token_hex(4)}"
    with capture_logs() as logs, shoal.join(job, coordinator=cluster.coordinator) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=24, epochs=1):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
            if not given:
                schedule.step()
            if batch.step == 2:
                break
    logged = [each for each in logs if each["event"] == "schedule_counts_own_steps"]
    assert len(logged) == (0 if given else 1)
    assert all("AsyncSGD(schedule=...)" in each["fix"] for each in logged)
    assert schedule.last_epoch == (2 if given else 3)


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_a_schedule_that_a_script_steps_is_refused_under_local_sgd(
    cluster: LocalCluster, strategy: str
) -> None:
    """The schedule would count a round that is taken again twice, and the members' rates would
    differ after a join."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        schedule = StepLR(optimizer, 1)
        with session.step():
            session.backward(cross_entropy(model(batch.inputs), batch.targets))
        schedule.step()

    with pytest.raises(InvalidSpec, match=rf"a StepLR is stepped under.* {strategy}.*batch\.step"):
        train_alone(cluster, strategy, body)


def test_a_member_lost_after_its_vote_leaves_a_committed_step_committed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Regression: a checkpoint was due, for which the members exchange messages: the survivors
    kept the step, and saw that it was not committed."""
    job = ThreadJob(cluster=cluster, num_members=4)

    def member(model: Any, optimizer: Any) -> Any:
        steps = []
        with job.join(min_members=1) as session:
            count = session.register("count", Metric())
            model, optimizer = session.distribute(
                model,
                optimizer,
                strategy=shoal.HSDP(shard=2),
                checkpoints=shoal.Checkpoints(tmp_path, every_steps=3),
            )

            def is_lost(*_: Any) -> None:
                # The members have voted for the third step, and none waits for another to take it.
                if session.step_number == 2 and session.rank == 3:
                    raise Killed

            optimizer.register_step_post_hook(is_lost)
            for batch in session.batches(data(), global_batch_size=24):
                with session.step() as step:
                    session.backward(cross_entropy(model(batch.inputs), batch.targets))
                if step.committed:
                    count.total += 1
                    steps.append(batch.step)
                if session.step_number == 5:
                    break
        return steps, count.total

    ends = job.outcomes(member, *[build("sgd", "layers") for _ in range(4)])
    (lost,) = (each for each in ends if isinstance(each, Exception))
    assert isinstance(lost, Killed), lost
    assert [each for each in ends if each is not lost] == [([0, 1, 2, 3, 4], 5)] * 3
