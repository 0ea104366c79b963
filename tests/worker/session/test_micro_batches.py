"""Loops over `batch.parts` in a session: trained results, and refused loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.members.thread_members import train_alone
from torch import Tensor
from torch.nn.functional import cross_entropy

import shoal
from shoal.randomness import sample_generator
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

STRATEGIES = ("ddp", "fsdp", "tensor", "pipeline", "local-sgd", "async-sgd")
Body = Callable[[Session, Any, shoal.Batch], None]


def run(cluster: LocalCluster, strategy: str, body: Body, num_steps: int = 3) -> dict[str, Tensor]:
    """Take a lone member's steps; return its model's state."""
    chosen: Any = shoal.LocalSGD(every_steps=1) if strategy == "local-sgd" else strategy

    def step(session: Session, model: Any, _: Any, batch: shoal.Batch) -> None:
        with session.step():
            body(session, model, batch)

    return train_alone(cluster, chosen, step, num_steps=num_steps)


def backward(session: Session, model: Any, batch: shoal.Batch) -> None:
    session.backward(cross_entropy(model(batch.inputs), batch.targets))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_train_what_the_whole_batch_trains(cluster: LocalCluster, strategy: str) -> None:
    """Includes one call for both passes, which returns the mean over a part's samples."""

    def whole(session: Session, model: Any, batch: shoal.Batch) -> None:
        session.forward_backward(batch, cross_entropy)

    def in_parts(session: Session, model: Any, batch: shoal.Batch) -> None:
        sizes = []
        for part in batch.parts(5):
            sizes.append(len(part.indices))
            if strategy == "pipeline" or batch.step == 1:
                loss = session.forward_backward(part, cross_entropy)
                assert 0.5 < float(loss) < 4.0
            else:
                backward(session, model, part)
        assert sizes == [5, 5, 5, 5, 4]

    expected, found = run(cluster, strategy, whole), run(cluster, strategy, in_parts)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), name


def ends_early(session: Session, model: Any, batch: shoal.Batch) -> None:
    for part in batch.parts(4):
        backward(session, model, part)
        break


def leaves_one_out(session: Session, model: Any, batch: shoal.Batch) -> None:
    for index, part in enumerate(batch.parts(4)):
        if index != 1:
            backward(session, model, part)


def twice_a_part(session: Session, model: Any, batch: shoal.Batch) -> None:
    for part in batch.parts(4):
        backward(session, model, part)
        backward(session, model, part)


def nested(session: Session, model: Any, batch: shoal.Batch) -> None:
    for part in batch.parts(2):
        for smaller in part.parts(2):
            backward(session, model, smaller)


def two_loops(session: Session, model: Any, batch: shoal.Batch) -> None:
    for _ in range(2):
        for part in batch.parts(2):
            backward(session, model, part)


def behind_the_whole(session: Session, model: Any, batch: shoal.Batch) -> None:
    backward(session, model, batch)
    for part in batch.parts(2):
        backward(session, model, part)


def before_the_whole(session: Session, model: Any, batch: shoal.Batch) -> None:
    for part in batch.parts(2):
        backward(session, model, part)
    backward(session, model, batch)


def none(session: Session, model: Any, batch: shoal.Batch) -> None:
    list(batch.parts(0))


def too_many(session: Session, model: Any, batch: shoal.Batch) -> None:
    list(batch.parts(25))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (ends_early, "only 1 of 4 parts"),
        (leaves_one_out, "part 2 of 4 was not trained on"),
        (twice_a_part, "second backward pass for part 1 of 4"),
        (nested, "parts within parts"),
        (two_loops, "once"),
        (behind_the_whole, "after a backward pass of the whole batch"),
        (before_the_whole, "after the last part"),
        (none, r"batch\.parts\(0\).*1 to 24"),
        (too_many, r"batch\.parts\(25\).*1 to 24"),
    ],
)
def test_loops_that_train_something_else_are_refused(
    cluster: LocalCluster, body: Body, text: str
) -> None:
    with pytest.raises(InvalidSpec, match=text):
        run(cluster, "ddp", body)


def test_dropout_does_not_depend_on_how_a_batch_is_cut(cluster: LocalCluster) -> None:
    """The random numbers of a sample follow from its position in the global batch."""

    drawn: dict[int, Tensor] = {}
    for num_parts in (1, 5):

        def body(
            session: Session, model: Any, batch: shoal.Batch, num_parts: int = num_parts
        ) -> None:
            found = []
            for part in batch.parts(num_parts):
                for index in range(len(part.indices)):
                    found.append(torch.rand(2, generator=sample_generator(index)))
                backward(session, model, part)
            drawn[num_parts] = torch.stack(found)

        run(cluster, "ddp", body, num_steps=1)
    assert torch.equal(drawn[1], drawn[5])


def test_a_loss_is_weighed_by_its_tokens(cluster: LocalCluster) -> None:
    """A third of the samples is padding: parts have different numbers of tokens, and each token
    counts alike."""

    def targets_of(batch: shoal.Batch) -> Tensor:
        padding = torch.tensor(batch.indices) % 3 == 0
        return batch.targets.masked_fill(padding, -100)

    def whole(session: Session, model: Any, batch: shoal.Batch) -> None:
        session.backward(cross_entropy(model(batch.inputs), targets_of(batch)))

    def in_parts(session: Session, model: Any, batch: shoal.Batch) -> None:
        for part in batch.parts(7):
            targets = targets_of(part)
            loss = cross_entropy(model(part.inputs), targets)
            session.backward(loss, weight=(targets != -100).sum())

    # If members have whole batches, a loss needs no weight.
    expected, found = run(cluster, "tensor", whole), run(cluster, "fsdp", in_parts)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_an_invalid_weight_of_a_loss_is_refused(cluster: LocalCluster, weight: float) -> None:
    def body(session: Session, model: Any, batch: shoal.Batch) -> None:
        session.backward(cross_entropy(model(batch.inputs), batch.targets), weight=weight)

    with pytest.raises(InvalidSpec, match="weight of a loss"):
        run(cluster, "ddp", body)


def test_losses_with_and_without_weights_in_one_step_are_refused(cluster: LocalCluster) -> None:
    def body(session: Session, model: Any, batch: shoal.Batch) -> None:
        for index, part in enumerate(batch.parts(2)):
            loss = cross_entropy(model(part.inputs), part.targets)
            session.backward(loss, weight=3 if index else None)

    with pytest.raises(InvalidSpec, match="others have none"):
        run(cluster, "ddp", body)
