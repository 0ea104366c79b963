"""`fit` of a Keras model in a session: a member may be lost, and the weights are those of one
process that fits the same model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.training import keras_session_bodies as bodies  # before keras: sets its backend

import keras  # isort: skip
import pytest
import torch
from support.members.held_members import replaced_in_step_6
from support.members.thread_members import ThreadJob
from support.processes.ranks import Ranks
from support.training.keras_session_bodies import STEPS, Fit
from torch import nn

import shoal
from shoal.integrations.keras import KerasModule
from shoal.integrations.keras_session import IN_PLACE, SessionBatches
from shoal.integrations.keras_steps import KerasSteps
from shoal.layouts.synced_batchnorm import sync_batchnorm
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer

TOLERANCE = 1e-5  # fp32: members' sums are taken in another order


def check(ended: dict[str, Any], optimizer: str) -> None:
    """Check that the Keras model has weights after `fit`, and that they are those of one
    process."""
    weights, loss = bodies.alone(optimizer)
    assert distance(ended["weights"], weights) <= TOLERANCE
    assert ended["loss"] == pytest.approx(loss, abs=TOLERANCE)


def distance(ours: list[list[float]], theirs: list[list[float]]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in pairs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "earliest"),
    [
        ("zero2", 1),
        pytest.param("tensor", 1, marks=pytest.mark.nightly),
        pytest.param("ddp", 6, marks=pytest.mark.nightly),
    ],
)
def test_fit_goes_on_without_a_lost_member(
    cluster: LocalCluster, tmp_path: Path, strategy: str, earliest: int
) -> None:
    """Member b of two is killed in the midst of step 6, and a standby replaces it. Training
    continues with that step, or with the first step that no copy contains. Keras counts each step
    once."""
    run = Fit(
        coordinator=cluster.coordinator,
        job=f"keras-{strategy}",
        member_id="",
        strategy=strategy,
        num_members=2,
    )
    a, c, _, back_to = replaced_in_step_6(cluster, bodies.fit, run, tmp_path, earliest)
    assert [each["step"] for each in (a, c)] == [STEPS] * 2
    assert [each["iterations"] for each in (a, c)] == [STEPS] * 2
    assert [each["steps"] for each in (a, c)] == [STEPS, STEPS - back_to]
    assert len(a["losses"]) == bodies.EPOCHS
    for each in (a, c):
        check(each, "adamw")


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("ddp", "clipped"),
        ("zero1", "sgd"),
        ("tensor", "sgd"),
        ("fsdp", "nadam"),
        ("zero2", "scheduled"),
        ("local-sgd", "adagrad"),
    ],
)
def test_fit_of_one_member_is_keras_own(
    cluster: LocalCluster, strategy: str, optimizer: str
) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    run = Fit(
        coordinator=cluster.coordinator,
        job=f"keras-alone-{strategy}",
        member_id="a",
        strategy=strategy,
        optimizer=optimizer,
    )
    options = {"validation_data": bodies.data()} if strategy in IN_PLACE else {}
    bodies.fit(lambda kind, **data: events.append((kind, data)), run, **options)
    kind, ended = events[-1]
    assert kind == "finished"
    assert ended["steps"] == ended["step"] == ended["iterations"] == STEPS
    # Under strategies that are not in IN_PLACE, the Keras model has the weights only at the end.
    assert ended["shown"] == [strategy in IN_PLACE] * (STEPS - 1) + [True]
    check(ended, optimizer)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["hsdp", "fsdp-tensor"])
def test_fit_of_two_by_two_members_is_keras_own(cluster: LocalCluster, strategy: str) -> None:
    """Fewer members than four train as under fsdp."""
    run = Fit(
        coordinator=cluster.coordinator,
        job=f"keras-{strategy}",
        member_id="",
        strategy=strategy,
        num_members=4,
    )
    with Ranks() as ranks:
        crew = [ranks.start(bodies.fit, replace(run, member_id=name)) for name in "abcd"]
        for member in crew:
            ended = member.expect("finished")
            assert ended["steps"] == ended["step"] == ended["iterations"] == STEPS
            check(ended, "adamw")


@pytest.mark.parametrize(("hook", "num_steps"), [("on_train_batch_end", 3), ("on_epoch_end", 5)])
def test_a_callback_that_stops_training_on_one_member_ends_the_job(
    cluster: LocalCluster, hook: str, num_steps: int
) -> None:
    """The Keras models of both get the trained weights. An epoch has 5 steps: either stop is in the
    first epoch, and Keras begins no second."""

    def member(member_id: str) -> tuple[int, list[list[float]], list[int]]:
        def stop(number: int, logs: Any = None) -> None:
            if member_id == "a" and session.step_number == num_steps:
                model.stop_training = True

        with job.join(member_id=member_id) as session:
            model = bodies.new_model()
            model.compile(optimizer=bodies.new_optimizer("sgd"), loss="mse")
            session.distribute(model, model.optimizer, "zero2")
            batches = SessionBatches(model, bodies.data(), global_batch_size=12, epochs=3)
            callback = keras.callbacks.LambdaCallback(**{hook: stop})
            history = model.fit(batches, epochs=batches.epochs, verbose=0, callbacks=callback)
            return session.step_number, bodies.weights_of(model), history.epoch

    job = ThreadJob(cluster=cluster, num_members=2)
    (steps, weights, epochs), other = job.results(member, ("a",), ("b",))
    assert (steps, epochs) == (num_steps, [0])
    assert other == (steps, weights, epochs)


def test_stand_ins_are_not_in_the_logs(cluster: LocalCluster) -> None:
    """The second step has a sample for one member only."""

    def member(member_id: str) -> tuple[list[float], list[float]]:
        with job.join(member_id=member_id) as session:
            layer = keras.layers.Dense(1, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((2,)), layer])
            optimizer = keras.optimizers.SGD(0.0)
            model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
            session.distribute(model, optimizer, "ddp")
            samples = (torch.ones(3, 2), torch.tensor([[1.0], [1.0], [5.0]]))
            batches = SessionBatches(model, samples, global_batch_size=2, shuffle=False)
            logged = model.fit(batches, epochs=batches.epochs, verbose=0).history
            return logged["loss"], logged["mae"]

    job = ThreadJob(cluster=cluster, num_members=2)
    found = job.results(member, ("a",), ("b",))
    assert sorted(found) == [([1.0], [1.0]), ([13.0], [3.0])]


class OwnFit(keras.Sequential):  # type: ignore[misc]
    def fit(self, *data: Any, **options: Any) -> Any:
        return super().fit(*data, **options)


class OwnFitWithCallbacks(keras.Sequential):  # type: ignore[misc]
    def fit(self, x: Any, callbacks: Any = None, **options: Any) -> Any:
        return super().fit(x, callbacks=callbacks, **options)


class OwnFitWithMoreCallbacks(keras.Sequential):  # type: ignore[misc]
    def fit(self, x: Any, callbacks: Any = None, **options: Any) -> Any:
        more = (callbacks or []) + [keras.callbacks.TerminateOnNaN()]
        return super().fit(x, callbacks=[*more, keras.callbacks.TerminateOnNaN()], **options)


@pytest.mark.parametrize("kind", [OwnFit, OwnFitWithCallbacks, OwnFitWithMoreCallbacks])
def test_a_model_may_have_its_own_fit(cluster: LocalCluster, kind: type[Any]) -> None:
    def member(member_id: str) -> int:
        def stop(number: int, logs: Any = None) -> None:
            model.stop_training = session.step_number == 3

        with job.join(member_id=member_id) as session:
            model = bodies.new_model(kind=kind)
            model.compile(optimizer=bodies.new_optimizer("sgd"), loss="mse")
            session.distribute(model, model.optimizer, "ddp")
            batches = SessionBatches(model, bodies.data(), global_batch_size=12, epochs=3)
            callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
            model.fit(batches, epochs=batches.epochs, verbose=0, callbacks=callbacks)
            return session.step_number

    job = ThreadJob(cluster=cluster, num_members=1)
    assert job.results(member, ("a",)) == [3]


def test_the_others_wait_for_a_validation_within_fit(cluster: LocalCluster) -> None:
    """Regression: a member that validated longer than the others was expelled as hung."""

    def member(member_id: str) -> list[bool]:
        seen: list[bool] = []
        with job.join(member_id=member_id) as session:
            model = bodies.new_model()
            model.compile(optimizer=bodies.new_optimizer("sgd"), loss="mse")
            session.distribute(model, model.optimizer, "ddp")
            batches = SessionBatches(model, bodies.data(), global_batch_size=12, epochs=2)

            def note(*_: Any, **__: Any) -> None:
                seen.append(session._pause.is_on)

            noting = keras.callbacks.LambdaCallback(
                on_train_batch_end=note, on_test_begin=note, on_test_batch_end=note
            )
            options = {"validation_data": bodies.data(), "callbacks": [noting], "verbose": 0}
            model.fit(batches, epochs=batches.epochs, **options)
            seen.append(session._pause.is_on)
        return seen

    job = ThreadJob(cluster=cluster, num_members=1)
    (seen,) = job.results(member, ("a",))
    assert True in seen, "in the first epoch's validation"
    assert not seen[0], "in its batches"
    assert not seen[-1]


def parameters_of(model: Any) -> list[tuple[Any, torch.nn.Parameter]]:
    return [(v, torch.nn.Parameter(v.value.detach().clone())) for v in model.trainable_variables]


@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam", "adagrad", "scheduled"])
def test_steps_equal_the_optimizers_also_once_its_state_moves_to_another_member(name: str) -> None:
    """The first member takes half of the steps, and a second one, which gets its state, takes the
    rest."""
    model = bodies.new_model()
    plain, ours = bodies.new_optimizer(name), parameters_of(model)
    steps = KerasSteps(bodies.new_optimizer(name), ours)
    for number in range(6):
        if number == 3:
            state, held = steps.state_dict(), [p.detach().clone() for _, p in ours]
            ours = [(v, torch.nn.Parameter(p)) for (v, _), p in zip(ours, held, strict=True)]
            steps = KerasSteps(bodies.new_optimizer(name), ours)
            steps.load_state_dict(state)
        drawn = torch.Generator().manual_seed(number)
        gradients = [torch.randn(p.shape, generator=drawn) for _, p in ours]
        for (_, parameter), gradient in zip(ours, gradients, strict=True):
            parameter.grad = gradient.clone()
        steps.step()
        plain.apply(gradients, model.trainable_variables)
    for variable, parameter in ours:
        assert torch.equal(variable.value, parameter)


@pytest.mark.parametrize("name", ["nadam", "scheduled"])
def test_steps_are_counted_while_the_first_weight_has_no_gradient(name: str) -> None:
    """The schedule and the bias corrections of the other weights go on."""
    model = bodies.new_model()
    plain, ours = bodies.new_optimizer(name), parameters_of(model)
    plain.build(model.trainable_variables)
    steps = KerasSteps(bodies.new_optimizer(name), ours)
    for number in range(6):
        idle = min(number, 1)
        ours[0][1].grad = None
        for _, parameter in ours[idle:]:
            parameter.grad = torch.ones_like(parameter)
        steps.step()
        trained = model.trainable_variables[idle:]
        plain.apply([torch.ones_like(each.value) for each in trained], trained)
    for variable, parameter in ours:
        assert torch.equal(variable.value, parameter)


def test_a_rate_that_the_script_sets_holds_from_the_next_step_on() -> None:
    model = bodies.new_model()
    own = bodies.new_optimizer("sgd")
    parameters = parameters_of(model)
    steps = KerasSteps(own, parameters)
    own.learning_rate = 0.0
    before = [parameter.detach().clone() for _, parameter in parameters]
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    steps.step()
    for (_, parameter), old in zip(parameters, before, strict=True):
        assert torch.equal(parameter, old)
    assert {group["lr"] for group in steps.param_groups} == {0.0}


@pytest.fixture
def session(cluster: LocalCluster) -> Any:
    with shoal.join("keras-refused", coordinator=cluster.coordinator) as joined:
        yield joined


def test_settings_that_a_session_cannot_keep_exact_are_refused(session: shoal.Session) -> None:
    model = bodies.new_model()
    with pytest.raises(InvalidSpec, match="built=True compiled=False"):
        session.distribute(model, bodies.new_optimizer("sgd"))
    for optimizer, message in (
        (keras.optimizers.Adam(clipnorm=1.0), "clipnorm"),
        (keras.optimizers.Adam(gradient_accumulation_steps=2), "global_batch_size"),
        (keras.optimizers.Lamb(), "Lamb"),
    ):
        model.compile(optimizer=optimizer, loss="mse")
        with pytest.raises(UnsupportedOptimizer, match=message):
            session.distribute(model, optimizer)
    for reduction in ("sum", "mean_with_sample_weight"):
        model.compile(optimizer="sgd", loss=keras.losses.MeanSquaredError(reduction=reduction))
        with pytest.raises(InvalidSpec, match=reduction):
            session.distribute(model, model.optimizer)
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(InvalidSpec, match="strategy pipeline"):
        session.distribute(model, model.optimizer, strategy="pipeline")
    with pytest.raises(InvalidSpec, match="BatchNormalization"):
        session.distribute(model, model.optimizer, sync_batchnorm=True)
    with pytest.raises(InvalidSpec, match="in no session"):
        SessionBatches(model, bodies.data(), global_batch_size=12)


def test_a_loss_over_the_items_that_are_not_masked_is_refused(cluster: LocalCluster) -> None:
    """Members' means over different numbers of items do not add up to that of one process."""
    layers = [keras.Input((6,)), keras.layers.Embedding(10, 4, mask_zero=True)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    samples = (torch.arange(48).reshape(8, 6) % 10, torch.zeros(8, 6, 1))
    with (
        pytest.raises(InvalidSpec, match="outputs with a mask"),
        shoal.join("keras-masked", coordinator=cluster.coordinator) as session,
    ):
        session.distribute(model, model.optimizer)
        batches = SessionBatches(model, samples, global_batch_size=8)
        model.fit(batches, epochs=batches.epochs)


def test_a_batch_normalization_that_torch_does_not_sync_is_refused_by_name() -> None:
    """A torch optimizer changes nothing: the layers of the model stay Keras's. Frozen ones use no
    statistics of the batch."""
    seen = keras.layers.BatchNormalization(name="seen")
    layers = [keras.Input((4,)), seen, keras.layers.BatchNormalization(trainable=False)]
    model = nn.Sequential(KerasModule(keras.Sequential(layers)), nn.BatchNorm1d(4))
    with pytest.raises(InvalidSpec, match=r"sync_batchnorm=True, and seen\b(?!,)"):
        sync_batchnorm(model, every=True)
    assert type(model[1]) is nn.BatchNorm1d
    seen.trainable = False
    assert sync_batchnorm(model, every=True) == 1


@pytest.mark.parametrize("place", ["alone", "in a layer", "in a model"])
def test_a_batch_normalization_of_keras_in_a_torch_module_is_refused_by_name(place: str) -> None:
    """Layers and models of Keras are torch modules under its torch backend, but torch does not list
    the layers of a Keras model."""
    seen = keras.layers.BatchNormalization(name="seen")
    inputs = keras.Input((4,))
    modules = {
        "alone": seen,
        "in a layer": keras.layers.TimeDistributed(seen),
        "in a model": keras.Model(inputs, seen(inputs)),
    }
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(modules[place]))
    with pytest.raises(InvalidSpec, match=r"sync_batchnorm=True, and seen\b(?!,)"):
        sync_batchnorm(model, every=True)
    assert type(model[0]) is nn.BatchNorm1d
    seen.trainable = False
    assert sync_batchnorm(model, every=True) == 1


def test_an_evaluation_during_fit_of_weights_held_in_parts_is_refused(
    cluster: LocalCluster,
) -> None:
    run = Fit(coordinator=cluster.coordinator, job="keras-stale", member_id="a", strategy="zero2")
    with pytest.raises(InvalidSpec, match="Evaluate after fit"):
        bodies.fit(lambda kind, **data: None, run, validation_data=bodies.data())


@pytest.mark.parametrize(("batch_size", "num_steps"), [(5, 33), (20, 15)])
def test_fit_continues_a_checkpoint_of_another_batch_size_to_the_jobs_end(
    tmp_path: Path, batch_size: int, num_steps: int
) -> None:
    """50 samples, 4 epochs, batches of 10 up to step 7. The job's last step is that of the samples,
    and Keras counts each step once and gets the weights back, also if no step is left."""
    fitted: list[tuple[bodies.Counted, Any]] = []
    for size, every_steps in ((10, 7), (batch_size, num_steps), (batch_size, 100)):
        keras.utils.clear_session()  # The names of layers begin anew, as in a restarted process.
        with shoal.join() as session:
            model = bodies.new_model()
            model.compile(optimizer=bodies.new_optimizer("sgd"), loss="mse")
            if every_steps == 100:
                # Builds the loss, for which Keras's fit needs a batch otherwise.
                model.evaluate(*bodies.data(), verbose=0)
            checkpoints = shoal.Checkpoints(tmp_path, every_steps=every_steps)
            session.distribute(model, model.optimizer, "zero2", checkpoints=checkpoints)
            epochs = 4 if size == batch_size else 2
            batches = SessionBatches(model, bodies.data(), global_batch_size=size, epochs=epochs)
            fitted.append((bodies.Counted(), model))
            model.fit(batches, epochs=epochs, verbose=0, callbacks=[fitted[-1][0]])
    (_, (counted, model), (counted_last, model_last)) = fitted
    assert 7 + counted.steps == num_steps
    assert counted.shown == [False] * (counted.steps - 1) + [True]
    assert len(counted.losses) == 3, "epochs of Keras: the rest of the second, and two more"
    assert counted_last.steps == 0
    assert bodies.weights_of(model_last) == bodies.weights_of(model)
