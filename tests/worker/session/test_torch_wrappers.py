"""DistributedDataParallel left in a script: it would reduce gradients that the session reduces
already."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

REFUSED = r"the distributed model in a DistributedDataParallel.*Leave out the wrapper"


@pytest.fixture
def default_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job() -> str:
    return f"wrapped-{secrets.token_hex(4)}"


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor", "pipeline"])
def test_a_wrapper_around_the_distributed_model_is_refused(
    cluster: LocalCluster, strategy: str
) -> None:
    """The refusal comes before the first batch too, where torch would ask for its own process
    group."""
    model, optimizer = build("sgd", "layers")
    with shoal.join(job(), coordinator=cluster.coordinator) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        with pytest.raises(InvalidSpec, match=REFUSED):
            DistributedDataParallel(model)


@pytest.mark.parametrize("strategy", ["ddp", "local-sgd"])
def test_a_wrapper_around_the_scripts_own_module_or_a_part_is_refused_in_a_step(
    cluster: LocalCluster, strategy: str
) -> None:
    module, optimizer = build("sgd", "layers")
    whole: list[Any] = [module, next(module.children())]
    with shoal.join(job(), coordinator=cluster.coordinator) as session:
        model, optimizer = session.distribute(module, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=24, epochs=1):
            with session.step():
                for each in whole:
                    with pytest.raises(InvalidSpec, match=REFUSED):
                        DistributedDataParallel(each)
                # A separate model is the script's own.
                DistributedDataParallel(nn.Linear(2, 2))
                session.backward(cross_entropy(model(batch.inputs), batch.targets))


@pytest.mark.usefixtures("default_group")
def test_distributing_a_wrapped_model_is_refused(cluster: LocalCluster) -> None:
    model, optimizer = build("sgd", "layers")
    wrapped = DistributedDataParallel(model)
    with (
        shoal.join(job(), coordinator=cluster.coordinator) as session,
        pytest.raises(InvalidSpec, match=r"saw session\.distribute of a DistributedDataParallel"),
    ):
        session.distribute(wrapped, optimizer)


def test_a_model_that_was_distributed_is_refused(cluster: LocalCluster) -> None:
    """A cell of a notebook runs a second time: `model` is what the first session returned."""
    model, optimizer = build("sgd", "layers")
    with shoal.join(job(), coordinator=cluster.coordinator) as session:
        model, optimizer = session.distribute(model, optimizer)
    with (
        shoal.join(job(), coordinator=cluster.coordinator) as session,
        pytest.raises(InvalidSpec, match=r"is distributed already.*Make the model anew"),
    ):
        session.distribute(model, optimizer)
