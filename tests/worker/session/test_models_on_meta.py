"""A model made on the meta device trains like the same model made on the host."""

from typing import Any

import pytest
import torch
from support.members.thread_members import ThreadJob
from support.training.elastic_bodies import build, layers, numbers, order
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from shoal.data.batches import Loader
from shoal.state.registered.objects import RegisteredState
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

BATCH, NUM_STEPS = 24, 3


def trained_on_the_host() -> dict[str, Any]:
    model, optimizer = build("sgd", "layers")
    loader = Loader(numbers(), order(BATCH))
    for step in range(NUM_STEPS):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    return dict(model.state_dict())


# Threads share a generator: under "ddp" each member makes the weights, under "fsdp" only one does.
@pytest.mark.parametrize(("strategy", "num_members"), [("ddp", 1), ("fsdp", 2)])
def test_a_meta_model_trains_as_the_same_model_made_on_the_host(
    cluster: LocalCluster, strategy: str, num_members: int
) -> None:
    expected = trained_on_the_host()
    job = ThreadJob(cluster=cluster, num_members=num_members)
    torch.manual_seed(3)  # as `build`

    def member() -> Any:
        with torch.device("meta"):
            model = layers()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        with job.join() as session:
            replica, optimizer = session.distribute(model, optimizer, strategy=strategy)
            for batch in session.batches(numbers(), global_batch_size=BATCH, epochs=20):
                with session.step():
                    session.backward(cross_entropy(replica(batch.inputs), batch.targets))
                    if batch.step == NUM_STEPS - 1:
                        session.stop("enough")
            return dict(session.state_dict())

    for state in job.results(member):
        assert set(state) == set(expected)
        for name, tensor in expected.items():
            assert torch.allclose(state[name], tensor, rtol=0, atol=1e-6), name


def test_an_average_of_a_model_on_meta_is_refused_by_name() -> None:
    """The average would copy the weights to tensors without memory."""
    with torch.device("meta"):
        averaged = AveragedModel(layers())
    registered = RegisteredState()
    with pytest.raises(InvalidSpec, match=r"'ema' has a tensor on the meta device"):
        registered.add("ema", averaged)
    assert not registered
