"""Parameters that a script has listed before `distribute`, or in an earlier generation: refused if
nothing trains them any more."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.members.thread_members import Killed, ThreadJob, lone
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

COPIES = ("zero1", "fsdp", "tensor")
NORM = 0.1
Use = Callable[[Session, Sequence[Tensor], shoal.Batch, Any], None]


def clips(session: Session, listed: Sequence[Tensor], batch: shoal.Batch, model: Any) -> None:
    session.forward_backward(batch, cross_entropy)
    nn.utils.clip_grad_norm_(listed, NORM)


def penalises(session: Session, listed: Sequence[Tensor], batch: shoal.Batch, model: Any) -> None:
    penalty = sum(each.abs().sum() for each in listed)
    session.backward(cross_entropy(model(batch.inputs), batch.targets) + 0.01 * penalty)


def train(cluster: LocalCluster, strategy: str, use: Use) -> dict[str, Tensor]:
    """Train on two batches, with a list of parameters from before `distribute`."""
    model, optimizer = build("sgd", "layers")
    listed = [each for each in model.parameters() if each.requires_grad]
    with lone(cluster) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=24):
            with session.step():
                use(session, listed, batch, model)
            if batch.step == 1:
                break
        return {name: tensor.clone() for name, tensor in session.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "use"),
    [*((each, clips) for each in (*COPIES, "pipeline")), *((each, penalises) for each in COPIES)],
)
def test_a_list_from_before_distribute_is_refused(
    cluster: LocalCluster, strategy: str, use: Use
) -> None:
    """Regression: nothing was clipped, and the penalty trained nothing."""
    with pytest.raises(InvalidSpec, match=r"a parameter that the model no longer has.*shape \("):
        train(cluster, strategy, use)


@pytest.mark.parametrize("strategy", ["ddp", "local-sgd", "async-sgd"])
def test_the_scripts_own_parameters_may_be_listed_before_distribute(
    cluster: LocalCluster, strategy: str
) -> None:
    train(cluster, strategy, clips)
    train(cluster, strategy, penalises)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_parameters_of_other_models_may_be_listed_at_any_time(
    cluster: LocalCluster, strategy: str
) -> None:
    """A script may clip a model of its own, pull weights towards their first values, learn from a
    frozen teacher, and list frozen layers of the model."""
    model, optimizer = build("sgd", "layers")
    model[0].requires_grad_(False)
    frozen = list(model[0].parameters())
    teacher, other = copy.deepcopy(model).requires_grad_(False), nn.Linear(20, 5)
    of_teacher, of_other = list(teacher.parameters()), list(other.parameters())
    trains_other = torch.optim.SGD(of_other, lr=0.1)
    with lone(cluster) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=24):
            with session.step():
                for part in batch.parts(2):
                    outputs = model(part.inputs)
                    drift = cross_entropy(outputs, teacher(part.inputs).softmax(1))
                    session.backward(cross_entropy(outputs, part.targets) + drift)
                    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                nn.utils.clip_grad_norm_([*of_teacher, *frozen], NORM)
                cross_entropy(other(batch.inputs), batch.targets).backward()
                assert nn.utils.clip_grad_norm_(of_other, NORM) > NORM
                trains_other.step()
                trains_other.zero_grad()
            if batch.step == 1:
                break
        assert session.step_number == 2


@pytest.mark.parametrize(
    ("strategy", "use"), [("zero1", clips), ("fsdp", clips), ("zero1", penalises)]
)
def test_a_list_from_an_earlier_generation_is_refused(
    cluster: LocalCluster, strategy: str, use: Use
) -> None:
    """Regression: from the loss of a member on, nothing was clipped."""
    job = ThreadJob(cluster=cluster, num_members=2)

    def member(name: str, model: Any, optimizer: Any) -> None:
        with job.join(member_id=name) as session:
            model, optimizer = session.distribute(model, optimizer, strategy=strategy)
            listed: list[Tensor] = []
            for batch in session.batches(data(), global_batch_size=24, epochs=4):
                with session.step():
                    listed = listed or list(model.parameters())
                    if batch.step == 3 and name == "b":
                        raise Killed
                    use(session, listed, batch, model)

    made = [(name, *build("sgd", "layers")) for name in "ab"]
    left, lost = job.outcomes(member, *made)
    assert isinstance(lost, Killed)
    assert isinstance(left, InvalidSpec)
    assert "a parameter that the model no longer has" in str(left)
