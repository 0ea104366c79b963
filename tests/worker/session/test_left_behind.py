"""Sessions that failed leave nothing in their process: the next session works."""

import os

import pytest
import torch
from support.members import failing_sessions
from support.members.failing_sessions import BY_HANDS, PLACES, Planned, fails_and_trains, train

import shoal
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("alone")
def test_nothing_is_left_of_a_session_wherever_it_failed(place: str) -> None:
    assert fails_and_trains("zero1", place) == []


@pytest.mark.parametrize("place", BY_HANDS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline", "local-sgd"])
@pytest.mark.usefixtures("alone")
def test_nothing_is_left_of_a_failed_session_under_any_strategy(strategy: str, place: str) -> None:
    assert fails_and_trains(strategy, place) == []


@pytest.mark.usefixtures("alone")
def test_state_that_cannot_be_handed_over_fails_one_session_only() -> None:
    """The error comes within the first step, before its commit; then five sessions train."""
    model, optimizer = failing_sessions.model_and_optimizer("state")
    with pytest.raises(UnsupportedOptimizer, match="cannot be handed"):
        train(model, optimizer, "zero1")
    for _ in range(5):
        assert train(*failing_sessions.model_and_optimizer(), "ddp") == 3


@pytest.mark.parametrize("strategy", ["ddp", "local-sgd"])
@pytest.mark.usefixtures("alone")
def test_the_model_of_a_failed_session_trains_in_the_next(strategy: str) -> None:
    model, optimizer = failing_sessions.model_and_optimizer()
    with pytest.raises(Planned):
        train(model, optimizer, strategy, "second loss")
    assert train(model, optimizer, strategy) == 3


@pytest.mark.parametrize("place", ["compared", "twice", "checkpoint"])
@pytest.mark.usefixtures("alone")
def test_a_model_that_was_never_laid_out_trains_in_the_next_session(place: str) -> None:
    model, optimizer = failing_sessions.model_and_optimizer()
    with pytest.raises((Planned, InvalidSpec)):
        train(model, optimizer, "zero1", place)
    assert train(model, optimizer, "zero1") == 3


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.usefixtures("alone")
def test_a_model_whose_weights_a_session_has_taken_is_refused_by_name(strategy: str) -> None:
    """The model would be trained from new initial values, which its modules draw."""
    model, optimizer = failing_sessions.model_and_optimizer()
    with pytest.raises(Planned):
        train(model, optimizer, "zero1", "between")
    other = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InvalidSpec, match=r"went to an earlier session.*made anew"):
        train(model, other, strategy)


@pytest.mark.usefixtures("alone")
def test_a_refused_model_may_be_followed_by_another_in_the_same_session() -> None:
    refused, lbfgs = failing_sessions.model_and_optimizer("refused")
    with shoal.join() as session:
        with pytest.raises(UnsupportedOptimizer):
            session.distribute(refused, lbfgs, "ddp")
        model, _ = session.distribute(*failing_sessions.model_and_optimizer(), "ddp")
        for batch in session.batches(failing_sessions.data(), global_batch_size=8):
            with session.step():
                session.backward(failing_sessions.loss_of(model(batch.inputs), batch.targets))
        assert session.step_number == 3


@pytest.mark.usefixtures("alone")
def test_an_error_at_the_end_of_a_session_does_not_hide_the_scripts_own() -> None:
    """The script may catch its own error, such as KeyboardInterrupt, by its class."""
    model, optimizer = failing_sessions.model_and_optimizer("state")
    optimizer.state[next(model.parameters())].clear()
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, "zero1", "interrupt")


@pytest.mark.parametrize("place", ["refused", "loss", "between", "sample"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "async-sgd"])
@pytest.mark.long
def test_nothing_is_left_of_a_member_of_a_cluster(
    cluster: LocalCluster, strategy: str, place: str
) -> None:
    job = f"left-{strategy}-{place}"
    assert fails_and_trains(strategy, place, job, coordinator=cluster.coordinator) == []
