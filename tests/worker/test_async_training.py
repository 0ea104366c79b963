"""Members at their own pace train, by default, what one process trains; otherwise there is a
warning."""

import itertools

import pytest
import torch
from sklearn.datasets import load_digits
from structlog.testing import capture_logs
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.members.async_members import start
from torch import nn
from torch.nn.functional import cross_entropy

from shoal.strategies.asynchronous.async_sgd import AsyncSGD

BATCH = 96
NUM_STEPS = 749
"""Number of steps of 40 epochs of the README's script."""


servers = servers_fixture(2)


def in_turns(servers: ParameterServers, num_members: int, **options: str) -> tuple[float, str]:
    """Train the README's model with members that push in turns: each gradient is as many updates
    behind as there are other members. Returns the share of digits recognised, and the page's
    warning."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    members = []
    for rank in range(num_members):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        strategy = AsyncSGD(**options)  # type: ignore[arg-type]
        members.append((start(servers, model, optimizer, rank=rank, strategy=strategy), model))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    batches = itertools.cycle(order.split(BATCH))
    for number in range(NUM_STEPS):
        strategy, model = members[number % num_members]
        if number >= num_members:
            strategy.end_step(lambda: None)
        chosen = next(batches)
        strategy.begin_step()
        strategy.backward(cross_entropy(model(images[chosen]), labels[chosen]), 1.0)
    first, model = members[0]
    first.finish()
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    warning = first.warning
    for strategy, _ in members:
        strategy.close()
    return right, warning


@pytest.mark.sampled()
@pytest.mark.parametrize("num_members", [3, 8])
def test_the_readmes_settings_train_by_default(servers: ParameterServers, num_members: int) -> None:
    """The rate of 0.1 and momentum of 0.9, found with one process, train without a warning."""
    right, warning = in_turns(servers, num_members)
    assert right >= 0.95
    assert warning == ""


@pytest.mark.long
def test_a_loss_that_does_not_fall_is_warned_of(servers: ParameterServers) -> None:
    """Staleness is not handled here: the log has a line that says what to do, and the page shows
    it."""
    with capture_logs() as logs:
        right, warning = in_turns(servers, 3, staleness="none")
    assert right < 0.5
    assert warning.startswith(("the loss has not fallen: ", "the loss has risen: "))
    logged = [line for line in logs if line["event"] in ("loss_not_falling", "loss_rising")]
    assert logged
    assert logged[0]["log_level"] == "warning"
    assert "Lower the learning rate or the momentum" in logged[0]["fix"]


def test_the_staleness_policy_is_logged(servers: ParameterServers) -> None:
    """Members log it once each, as they distribute their models."""
    model = nn.Linear(2, 2)
    with capture_logs() as logs:
        AsyncSGD().distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    logged = [line for line in logs if line["event"] == "staleness_policy_chosen"]
    assert [line["policy"] for line in logged] == ["staleness='damp'"]
