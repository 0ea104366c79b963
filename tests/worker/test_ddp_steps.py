"""Single steps of DDP: refused before they do harm, and undone when they fail."""

from collections.abc import Iterator

import pytest
import torch
from support.models.small_layers import HalfUsed
from torch import Tensor, nn

import shoal
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

DATA = (torch.arange(24.0).reshape(8, 3), torch.arange(8.0))


@pytest.fixture
def session(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Session]:
    """A member of a job of its own; a test may end it with an error."""
    job = "steps-" + str(abs(hash(request.node.name)))
    with shoal.join(job, coordinator=cluster.coordinator) as session:
        yield session


def test_a_parameter_without_gradient_is_refused_by_name(session: Session) -> None:
    """The parameter's bucket was not averaged; a step would let the members drift apart."""
    model = HalfUsed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replica, _ = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(session.batches(DATA, global_batch_size=4))
    with pytest.raises(InvalidSpec, match=r"unused\.weight.*find_unused_parameters"):
        train(session, replica, batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_loss_of_the_plain_model_is_refused(session: Session) -> None:
    """The gradients of the plain model are this member's alone."""
    model = nn.Linear(3, 1)
    session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(session.batches(DATA, global_batch_size=4))
    with pytest.raises(InvalidSpec, match=r"session\.distribute returned"):
        train(session, model, batch)


def test_a_model_may_leave_parameters_out_with_find_unused_parameters(session: Session) -> None:
    """A parameter without a gradient stays unchanged."""
    model = HalfUsed()
    unused = model.unused.weight.detach().clone()
    strategy = shoal.DDP(find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    replica, _ = session.distribute(model, optimizer, strategy=strategy)
    for batch in session.batches(DATA, global_batch_size=4, epochs=2):
        train(session, replica, batch)
    assert session.step_number == 4
    assert torch.equal(model.unused.weight, unused)


def test_a_step_that_fails_leaves_no_trace_in_running_statistics(session: Session) -> None:
    """Statistics change in the forward pass, and would count the batch twice when the step is taken
    again."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    replica, _ = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.001))
    batch = next(session.batches(DATA, global_batch_size=4))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    session.strategy.begin_step()
    replica(batch.inputs).sum()
    assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    session.strategy.abandon()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_evaluating_needs_no_other_member(session: Session) -> None:
    """The plain model answers outside of a step, and without gradients within one."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    replica, _ = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.001))
    batch = next(session.batches(DATA, global_batch_size=4))
    replica.eval()
    with torch.no_grad():
        assert torch.equal(replica(batch.inputs), model(batch.inputs))
    with session.step(), torch.no_grad():
        assert torch.equal(replica(batch.inputs), model(batch.inputs))
        replica.train()
        with torch.enable_grad():
            session.backward(loss_of(replica, batch))


def loss_of(replica: nn.Module, batch: shoal.Batch) -> Tensor:
    return nn.functional.mse_loss(replica(batch.inputs).squeeze(1), batch.targets)


def train(session: Session, replica: nn.Module, batch: shoal.Batch) -> None:
    with session.step():
        session.backward(loss_of(replica, batch))
