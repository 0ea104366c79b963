"""A loss that is a mean over something else than samples needs a weight, or is refused: members
with other shares of a batch would train another loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.members.thread_members import ThreadJob, lone, train_alone
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
    one_hot,
    pad,
)
from torch.utils.data import default_collate

import shoal
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

Loss = Callable[[Tensor, Tensor], Tensor]
CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 1.0, 0.5, 2.0])


def ignoring(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, ignore_index=2)


def padded(outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss over padded tokens: a sample has as many tokens as its target says."""
    tokens = torch.where(torch.arange(5) < targets[:, None], targets[:, None], -100)
    return cross_entropy(outputs[:, None].expand(-1, 5, -1).flatten(0, 1), tokens.flatten())


def by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, weight=CLASS_WEIGHTS)


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    """An uneven mean deep inside a sum of losses."""
    more = outputs.square().mean() + outputs.abs().mean()
    return 2 * cross_entropy(outputs, targets, ignore_index=2, label_smoothing=0.1) / 3 + more


def of_some(outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of a task for which only some samples have a label."""
    return cross_entropy(outputs[targets > 0], targets[targets > 0])


def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of a language model: the last position of each sample is ignored."""
    tokens = pad(targets[:, None].expand(-1, 4), (0, 1), value=-100)
    return cross_entropy(outputs[:, None].expand(-1, 5, -1).flatten(0, 1), tokens.flatten())


def in_turn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss of `shifted`, with positions first and samples second."""
    tokens = pad(targets[:, None].expand(-1, 4), (0, 1), value=-100)
    return cross_entropy(outputs.expand(5, -1, -1).flatten(0, 1), tokens.T.flatten())


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, ignore_index=2, reduction="sum") / 24


def sum_over_samples(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="sum")


def sum_with_smoothed_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="sum", label_smoothing=0.1)


def variational(outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss as those of variational autoencoders are written."""
    wanted = one_hot(targets, 5).to(outputs)
    distance = binary_cross_entropy_with_logits(outputs, wanted, reduction="sum")
    return distance - 0.5 * torch.sum(1 + outputs - outputs.exp())


def shrinking(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum over something else, in addition to a mean over samples."""
    return cross_entropy(outputs, targets) + 0.1 * mse_loss(
        outputs, torch.zeros_like(outputs), reduction="sum"
    ) / len(targets)


def whole(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, label_smoothing=0.1)


def by_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss as of a detector: the mean over a sample's boxes, then over samples."""
    boxes = zip(outputs, targets, strict=True)
    return torch.stack([cross_entropy(o.expand(2, -1), t.expand(2)) for o, t in boxes]).mean()


def train(cluster: LocalCluster, strategy: str, take: Callable[[Session, Any, Any], None]) -> None:
    """Take a lone member's first step."""

    def body(session: Session, model: Any, _: Any, batch: shoal.Batch) -> None:
        with session.step():
            take(session, model, batch)

    train_alone(cluster, strategy, body, num_steps=1)


def taking(loss: Loss) -> Callable[[Session, Any, Any], None]:
    return lambda session, model, batch: session.backward(loss(model(batch.inputs), batch.targets))


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", [ignoring, padded, by_class, smoothed, of_some])
def test_a_mean_over_something_else_is_refused(
    cluster: LocalCluster, strategy: str, loss: Loss
) -> None:
    with pytest.raises(InvalidSpec, match=r"not a mean over samples.*weight="):
        train(cluster, strategy, taking(loss))


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", [sum_over_samples, sum_with_smoothed_labels, variational])
def test_a_sum_over_samples_is_refused(cluster: LocalCluster, strategy: str, loss: Loss) -> None:
    with pytest.raises(InvalidSpec, match=r"a sum over samples.*loss / len\(batch\.indices\)"):
        train(cluster, strategy, taking(loss))


def test_a_sum_over_samples_with_a_weight_or_of_a_part_is_refused(cluster: LocalCluster) -> None:
    def with_weight(session: Session, model: Any, batch: shoal.Batch) -> None:
        loss = sum_over_samples(model(batch.inputs), batch.targets)
        session.backward(loss, weight=len(batch.targets))

    def in_parts(session: Session, model: Any, batch: shoal.Batch) -> None:
        for part in batch.parts(2):
            session.backward(sum_over_samples(model(part.inputs), part.targets))

    for take in (with_weight, in_parts):
        with pytest.raises(InvalidSpec, match="a sum over samples"):
            train(cluster, "ddp", take)


def test_a_sum_over_all_gathered_rows_is_accepted(cluster: LocalCluster) -> None:
    def take(session: Session, model: Any, batch: shoal.Batch) -> None:
        outputs = session.gather(model(batch.inputs))
        session.backward(sum_over_samples(outputs, session.gather(batch.targets)))

    train(cluster, "ddp", take)


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
@pytest.mark.parametrize(
    ("loss", "refusal"),
    [
        pytest.param(by_class, r"not a mean over samples.*weight=", id="uneven mean"),
        pytest.param(sum_over_samples, r"a sum over samples", id="sum"),
    ],
)
def test_uneven_means_and_sums_are_refused_in_forward_backward(
    cluster: LocalCluster, strategy: str, loss: Loss, refusal: str
) -> None:
    def take(session: Session, _: Any, batch: shoal.Batch) -> None:
        session.forward_backward(batch, loss)

    with pytest.raises(InvalidSpec, match=refusal):
        train(cluster, strategy, take)


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", [shifted, in_turn, summed, shrinking, whole, by_sample])
def test_losses_that_weigh_each_sample_alike_are_accepted(
    cluster: LocalCluster, strategy: str, loss: Loss
) -> None:
    train(cluster, strategy, taking(loss))


@pytest.mark.parametrize("strategy", ["tensor", "local-sgd"])
def test_any_mean_is_accepted_if_members_have_whole_batches_or_train_apart(
    cluster: LocalCluster, strategy: str
) -> None:
    train(cluster, strategy, taking(by_class))


def test_an_uneven_mean_with_its_weight_is_accepted(cluster: LocalCluster) -> None:
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


def test_an_uneven_mean_over_a_part_is_refused(cluster: LocalCluster) -> None:
    def take(session: Session, model: Any, batch: shoal.Batch) -> None:
        for part in batch.parts(2):
            session.backward(by_class(model(part.inputs), part.targets))

    with pytest.raises(InvalidSpec, match=r"differ between the 12 samples"):
        train(cluster, "ddp", take)


class SomeUnreadable(torch.utils.data.Dataset[Any]):
    """A dataset in which one sample in five is None."""

    def __len__(self) -> int:
        return len(data()[0])

    def __getitem__(self, index: int) -> Any:
        inputs, targets = data()
        return None if index % 5 == 0 else (inputs[index], targets[index])


def readable(samples: list[Any]) -> Any:
    return tuple(default_collate([each for each in samples if each is not None]))


def outputs_squared(outputs: Tensor, _: Tensor) -> Tensor:
    """A loss that does not show the number of samples of its mean."""
    return outputs.square().mean()


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hybrid"])
@pytest.mark.parametrize("in_one_call", [False, True])
def test_samples_that_collate_leaves_out_are_refused(
    cluster: LocalCluster, strategy: str, in_one_call: bool
) -> None:
    def body(session: Session, model: Any, batch: shoal.Batch) -> None:
        if in_one_call:
            session.forward_backward(batch, outputs_squared)
        else:
            session.backward(outputs_squared(model(batch.inputs), batch.targets))

    model, optimizer = build("sgd", "layers")
    with lone(cluster) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        batches = session.batches(SomeUnreadable(), global_batch_size=24, collate=readable)
        with pytest.raises(InvalidSpec, match=r"lacks samples.*of 24 samples.*weight="):
            for batch in batches:
                with session.step():
                    body(session, model, batch)


def test_with_a_weight_samples_may_be_left_out(cluster: LocalCluster) -> None:
    """The job trains the mean over the existing samples with any number of members."""

    def body(session: Session, model: Any, batch: shoal.Batch) -> None:
        loss = outputs_squared(model(batch.inputs), batch.targets)
        session.backward(loss, weight=len(batch.targets))

    def member(job: ThreadJob, model: Any, optimizer: Any) -> dict[str, Tensor]:
        with job.join() as session:
            model, _ = session.distribute(model, optimizer)
            for batch in session.batches(
                SomeUnreadable(), global_batch_size=24, epochs=2, collate=readable, drop_last=True
            ):
                with session.step():
                    body(session, model, batch)
            return dict(session.state_dict())

    ends = []
    for num_members in (1, 3):
        job = ThreadJob(cluster=cluster, num_members=num_members)
        # Threads of a process share its generator, so models are made before.
        made = [build("sgd", "layers") for _ in range(num_members)]
        ends += job.results(member, *((job, *each) for each in made))
    for end in ends:
        for name, tensor in end.items():
            torch.testing.assert_close(tensor, ends[0][name], rtol=0, atol=1e-6)
