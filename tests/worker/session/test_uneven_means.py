"""A loss that is a mean over something else than samples says of how many, or it is refused:
members with other shares of a batch would train another one."""

import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

import shoal
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

Loss = Callable[[Tensor, Tensor], Tensor]
CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 1.0, 0.5, 2.0])


def ignoring(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, ignore_index=2)


def padded(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each class a token, of which a sample has as many as its target says."""
    tokens = torch.where(torch.arange(5) < targets[:, None], targets[:, None], -100)
    return cross_entropy(outputs[:, None].expand(-1, 5, -1).flatten(0, 1), tokens.flatten())


def by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, weight=CLASS_WEIGHTS)


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    """Deep in a sum of losses."""
    more = outputs.square().mean() + outputs.abs().mean()
    return 2 * cross_entropy(outputs, targets, ignore_index=2, label_smoothing=0.1) / 3 + more


def of_some(outputs: Tensor, targets: Tensor) -> Tensor:
    """As of a task that only some samples have a label for."""
    return cross_entropy(outputs[targets > 0], targets[targets > 0])


def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
    """As language models do it: of each sample the last place is ignored."""
    tokens = pad(targets[:, None].expand(-1, 4), (0, 1), value=-100)
    return cross_entropy(outputs[:, None].expand(-1, 5, -1).flatten(0, 1), tokens.flatten())


def in_turn(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same with the samples behind the places."""
    tokens = pad(targets[:, None].expand(-1, 4), (0, 1), value=-100)
    return cross_entropy(outputs.expand(5, -1, -1).flatten(0, 1), tokens.T.flatten())


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, ignore_index=2, reduction="sum") / 24


def whole(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, label_smoothing=0.1)


def train(cluster: LocalCluster, strategy: str, take: Callable[[Session, Any, Any], None]) -> None:
    """A lone member's first step: what is refused does not depend on who else is there."""
    model, optimizer = build("sgd", "layers")
    with shoal.join(f"mean-{secrets.token_hex(4)}", coordinator=cluster.coordinator) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=24):
            with session.step():
                take(session, model, batch)
            break


def taking(loss: Loss) -> Callable[[Session, Any, Any], None]:
    return lambda session, model, batch: session.backward(loss(model(batch.inputs), batch.targets))


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", [ignoring, padded, by_class, smoothed, of_some])
def test_a_mean_over_something_else_is_refused(
    cluster: LocalCluster, strategy: str, loss: Loss
) -> None:
    with pytest.raises(InvalidSpec, match=r"no mean over samples.*weight="):
        train(cluster, strategy, taking(loss))


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_so_it_is_in_one_call(cluster: LocalCluster, strategy: str) -> None:
    def take(session: Session, _: Any, batch: shoal.Batch) -> None:
        session.forward_backward(batch, by_class)

    with pytest.raises(InvalidSpec, match=r"no mean over samples.*weight="):
        train(cluster, strategy, take)


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", [shifted, in_turn, summed, whole])
def test_what_counts_alike_for_each_sample_is_a_mean_over_samples(
    cluster: LocalCluster, strategy: str, loss: Loss
) -> None:
    train(cluster, strategy, taking(loss))


@pytest.mark.parametrize("strategy", ["tensor", "local-sgd"])
def test_where_members_have_whole_batches_or_train_apart_any_mean_will_do(
    cluster: LocalCluster, strategy: str
) -> None:
    train(cluster, strategy, taking(by_class))


def test_a_weight_says_what_it_is_a_mean_over(cluster: LocalCluster) -> None:
    def take(session: Session, model: Any, batch: shoal.Batch) -> None:
        loss = by_class(model(batch.inputs), batch.targets)
        session.backward(loss, weight=CLASS_WEIGHTS[batch.targets].sum())

    train(cluster, "ddp", take)


@pytest.mark.parametrize("num_parts", [8, 3])
def test_a_script_may_cut_its_batches_itself(cluster: LocalCluster, num_parts: int) -> None:
    def take(session: Session, model: Any, batch: shoal.Batch) -> None:
        for place in range(num_parts):
            rows = slice(place, None, num_parts)
            loss = shifted(model(batch.inputs[rows]), batch.targets[rows])
            session.backward(loss * len(batch.targets[rows]) / len(batch.targets))

    train(cluster, "ddp", take)


def test_a_part_is_looked_at_by_itself(cluster: LocalCluster) -> None:
    def take(session: Session, model: Any, batch: shoal.Batch) -> None:
        for part in batch.parts(2):
            session.backward(by_class(model(part.inputs), part.targets))

    with pytest.raises(InvalidSpec, match=r"for each of 12 samples"):
        train(cluster, "ddp", take)
