"""A script without a cluster: `python train.py` trains in its one process."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.checkpoint.directory import complete
from shoal.data.order import CONTENT_FIELD
from shoal.membership.alone import LoneMember
from shoal.membership.join_config import read_config
from shoal_proto.errors import CheckpointFailed, InvalidSpec, ProposalConflict

NUM_SAMPLES, BATCH, EPOCHS = 40, 16, 3
STEPS = EPOCHS * -(-NUM_SAMPLES // BATCH)


@dataclass(frozen=True)
class Trained:
    """Result of a run of this process."""

    steps: int
    weights: dict[str, Tensor]
    batches: Sequence[tuple[Tensor, Tensor]]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
    return inputs, (inputs.sum(dim=1) > 0).long()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    strategy: str,
    *,
    checkpoints: shoal.Checkpoints | None = None,
    stop_after: int = 0,
    validators: tuple[object, ...] = (),
) -> Trained:
    """Run the README's loop."""
    batches = []
    model, optimizer = model_and_optimizer()
    with shoal.join(validators=validators) as session:  # type: ignore[arg-type]
        model, optimizer = session.distribute(model, optimizer, strategy, checkpoints=checkpoints)
        for batch in session.batches(data(), global_batch_size=BATCH, epochs=EPOCHS):
            batches.append((batch.inputs, batch.targets))
            with session.step():
                session.forward_backward(batch, cross_entropy)
            if session.step_number == stop_after:
                signal.raise_signal(signal.SIGTERM)
        assert (session.rank, session.world_size, session.generation) == (0, 1, 1)
        return Trained(session.step_number, dict(session.state_dict()), batches)


def test_optional_fields_of_the_proposal_are_kept_beside_those_of_the_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposed: list[Mapping[str, str]] = []
    propose = LoneMember.propose

    def noted(member: LoneMember, *fields: Any, **more: Any) -> None:
        proposed.append(dict(more["optional_fields"]))
        propose(member, *fields, **more)

    monkeypatch.setattr(LoneMember, "propose", noted)
    train("ddp")
    assert [fields.keys() for fields in proposed] == [{"checkpoints", CONTENT_FIELD}]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "local-sgd"])
def test_trained_weights_are_available_before_the_error_of_the_last_checkpoint(
    tmp_path: Path, strategy: str
) -> None:
    """The batches end and the script's code after them runs; then the session fails."""
    directory = tmp_path / "checkpoints"
    trained = Trained(0, {}, ())
    model, optimizer = model_and_optimizer()
    with pytest.raises(CheckpointFailed, match="checkpoints"), shoal.join() as session:
        checkpoints = shoal.Checkpoints(directory, every_steps=STEPS)
        model, optimizer = session.distribute(model, optimizer, strategy, checkpoints=checkpoints)
        for batch in session.batches(data(), global_batch_size=BATCH, epochs=EPOCHS):
            if batch.step == STEPS - 1:
                directory.write_text("no directory can be made here any more")
            with session.step():
                session.forward_backward(batch, cross_entropy)
        trained = Trained(session.step_number, dict(session.state_dict()), ())
    assert trained.steps == STEPS
    assert set(trained.weights) == set(model.state_dict())


def plain(batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Train with the same batches, without Shoal."""
    model, optimizer = model_and_optimizer()
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "zero1", "zero2", "fsdp", "hsdp", "tensor", "fsdp-tensor", "pipeline", "hybrid"),
        "local-sgd",
    ],
)
def test_the_loop_without_a_cluster_trains_as_plain_torch_does(strategy: str) -> None:
    """The process trains without a server. Samples come once an epoch, and the weights are those of
    a loop without Shoal."""
    trained = train(strategy)
    assert trained.steps == STEPS == len(trained.batches)
    seen = torch.cat([inputs for inputs, _ in trained.batches[: STEPS // EPOCHS]])
    torch.testing.assert_close(seen.sum(dim=0), data()[0].sum(dim=0))
    assert len(seen.unique(dim=0)) == NUM_SAMPLES
    expected = plain(trained.batches)
    assert trained.weights.keys() == expected.keys()
    for name, value in trained.weights.items():
        torch.testing.assert_close(value, expected[name])


def test_training_alone_is_logged_in_one_line() -> None:
    with capture_logs() as logs:
        train("ddp")
    [line] = [each for each in logs if each["event"] == "training_alone"]
    assert line["log_level"] == "warning"
    assert "shoal run" in line["fix"]


@pytest.mark.parametrize("strategy", ["async-sgd", "ssp", "bsp", "async-diloco"])
def test_strategies_that_need_servers_are_refused_by_name(strategy: str) -> None:
    with pytest.raises(InvalidSpec, match=f"{strategy} trains through parameter servers"):
        train(strategy)


@pytest.mark.parametrize(
    "environment",
    [
        {"SHOAL_MIN_MEMBERS": "2"},
        {"SHOAL_DESIRED_MEMBERS": "3"},
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"},
        {"LOCAL_WORLD_SIZE": "2"},
        {"SLURM_STEP_NUM_TASKS": "8"},
    ],
)
def test_processes_of_a_cluster_without_its_address_are_refused(
    environment: dict[str, str],
) -> None:
    """A cluster's settings without its address are a mistake, and no request to train alone."""
    with pytest.raises(InvalidSpec, match="no coordinator was named"):
        read_config({"job": "j"}, environment)
    assert read_config({"job": "j"}, environment | {"SHOAL_COORDINATOR": "h:1"}).coordinators


def test_a_validator_is_called_in_a_session_without_a_cluster() -> None:
    def never(roster: shoal.Roster) -> shoal.Reject | None:
        return shoal.Reject(seen="a full disk", expected="room")

    with pytest.raises(ProposalConflict, match="a full disk"):
        train("ddp", validators=(never,))


def test_a_drained_job_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """The process takes one more step and ends with 143; the next run continues from that step."""
    checkpoints = shoal.Checkpoints(tmp_path, every_steps=2)
    with pytest.raises(shoal.Drained) as ended:
        train("fsdp", checkpoints=checkpoints, stop_after=4)
    assert ended.value.code == 143
    trained = train("fsdp", checkpoints=checkpoints)
    assert trained.steps == STEPS
    assert len(trained.batches) == STEPS - 5, "it continues from the step in which the signal came"
    expected = plain(train("ddp").batches)
    for name, value in trained.weights.items():
        torch.testing.assert_close(value, expected[name])


def test_a_drained_job_whose_last_checkpoint_fails_ends_with_that_error(tmp_path: Path) -> None:
    """Exit code 143 would say that the next run continues from this step."""
    directory = tmp_path / "checkpoints"
    model, optimizer = model_and_optimizer()
    with pytest.raises(CheckpointFailed, match="checkpoints"), shoal.join() as session:
        checkpoints = shoal.Checkpoints(directory, every_steps=STEPS)
        model, optimizer = session.distribute(model, optimizer, checkpoints=checkpoints)
        for batch in session.batches(data(), global_batch_size=BATCH, epochs=EPOCHS):
            if batch.step == 2:
                directory.write_text("no directory can be made here any more")
                os.kill(os.getpid(), signal.SIGTERM)
            with session.step():
                session.forward_backward(batch, cross_entropy)


def test_dropout_within_layers_is_warned_of_by_name() -> None:
    """The dropout inside such layers depends on the number of members, unlike that of a dropout
    module."""
    model = nn.TransformerEncoderLayer(8, 2, 16)
    recurrent = nn.ModuleDict(
        {"two": nn.LSTM(6, 8, 2, dropout=0.1), "one": nn.GRU(8, 8), "plain": nn.Dropout(0.1)}
    )
    whole = nn.ModuleDict({"attends": model, "recurrent": recurrent})
    with capture_logs() as logs, shoal.join() as session:
        session.distribute(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    logged = [entry for entry in logs if entry["event"] == "dropout_depends_on_members"]
    assert [entry["modules"] for entry in logged] == ["attends.self_attn, recurrent.two"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_includes_changes_that_the_script_makes_after_its_step(
    tmp_path: Path, strategy: str
) -> None:
    """A script may clip weights, or update a teacher, after the step. This applies to the last step
    too."""
    model, optimizer = model_and_optimizer()
    checkpoints = shoal.Checkpoints(tmp_path, every_steps=STEPS // 3)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy, checkpoints=checkpoints)
        for batch in session.batches(data(), global_batch_size=BATCH, epochs=EPOCHS):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.0).add_(batch.step + 1.0)
    steps = sorted(complete(tmp_path))
    assert steps == [STEPS // 3, 2 * (STEPS // 3), STEPS]
    for step in steps:
        state = {"model": model_and_optimizer()[0].state_dict()}
        dcp.load(state, checkpoint_id=str(tmp_path / f"step-{step:08}"), no_dist=True)
        assert all(bool((each == step).all()) for each in state["model"].values()), step


def _resumed(directory: Path, strategy: str, epochs: int, **settings: Any) -> list[str]:
    """Run a job with a scheduler, from its checkpoint if there is one. Returns the log lines on
    replaced settings."""
    torch.manual_seed(5)
    model: nn.Module = nn.Linear(6, 2)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), **settings)
    checkpoints = shoal.Checkpoints(directory, every_steps=1)
    with capture_logs() as logs, shoal.join() as session:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if strategy != "local-sgd":
            session.register("schedule", schedule)
        model, optimizer = session.distribute(model, optimizer, strategy, checkpoints=checkpoints)
        for batch in session.batches(data(), global_batch_size=NUM_SAMPLES, epochs=epochs):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
                if strategy != "local-sgd":
                    schedule.step()
    return [entry["settings"] for entry in logs if entry["event"] == "settings_from_checkpoint"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd"])
def test_settings_of_the_script_that_a_checkpoint_replaces_are_logged(
    tmp_path: Path, strategy: str
) -> None:
    """The log has no line if the script is unchanged, although a scheduler has changed the rates
    since."""
    assert not _resumed(tmp_path, strategy, 2, lr=0.1)
    assert not _resumed(tmp_path, strategy, 3, lr=0.1)
    (line,) = _resumed(tmp_path, strategy, 4, lr=0.2, amsgrad=True)
    assert "amsgrad of group 0: True in the script, False in the state" in line
    assert "initial_lr of group 0: 0.2 in the script, 0.1 in the state" in line
    assert "; lr of group 0: 0.2 in the script, 0." in line
    assert line.count(" in the state") == 3


def test_a_session_that_was_not_entered_distributes_nothing() -> None:
    """The session would wait for a first generation of which it is not a member. A session that was
    left is refused too."""
    model, optimizer = model_and_optimizer()
    session = shoal.join()
    with pytest.raises(InvalidSpec, match=r"distribute outside a session.*with shoal\.join"):
        session.distribute(model, optimizer)
    with session:
        pass
    with pytest.raises(InvalidSpec, match="outside a session"):
        session.distribute(model, optimizer)
