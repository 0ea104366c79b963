"""Errors that torch raises in a step reach the script with a remedy."""

import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.members.thread_members import lone
from torch import Tensor, nn

import shoal
from shoal.session.session import Session
from shoal.strategies.torch_errors import StepState, refusal_of
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec


class Within(torch.autograd.Function):
    """Recomputes a block in the backward pass by its own means, as some libraries do."""

    @staticmethod
    def forward(ctx: Any, block: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(inputs)
        with torch.no_grad():
            return block(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        with torch.enable_grad():
            inputs = inputs.detach().requires_grad_()
            torch.autograd.backward(ctx.block(inputs), gradients)  # type: ignore[no-untyped-call]
        return None, inputs.grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs: Tensor, *, within: bool = False) -> Tensor:
        x = self.first(inputs)
        for _ in range(2):
            x = Within.apply(self.block, x) if within else self.block(x)
        outputs: Tensor = self.last(x)
        return outputs


def run(cluster: LocalCluster, strategy: str, body: Callable[[Session, Any, Tensor], None]) -> None:
    model: Any = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lone(cluster) as session:
        model, _ = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(torch.randn(24, 3), global_batch_size=6):
            with session.step():
                body(session, model, batch.inputs)


def within(session: Session, model: Any, inputs: Tensor) -> None:
    session.backward(model(inputs, within=True).square().mean())


def freed(session: Session, model: Any, inputs: Tensor) -> None:
    outputs = model(inputs)
    session.backward(outputs.square().mean())
    session.backward(outputs.mean())


def written(session: Session, model: Any, inputs: Tensor) -> None:
    outputs = model(inputs).exp()
    loss = outputs.square().mean()
    outputs.zero_()
    session.backward(loss)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_gradient_that_comes_twice_in_a_pass_is_refused(
    cluster: LocalCluster, strategy: str
) -> None:
    """The error names a recomputation in one pass, and a strategy that supports this one."""
    with pytest.raises(InvalidSpec, match=r"gradient twice.*use_reentrant=False.*'fsdp'"):
        run(cluster, strategy, within)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_second_pass_of_a_graph_is_refused(cluster: LocalCluster, strategy: str) -> None:
    """torch's error names an option of its own backward()."""
    with pytest.raises(InvalidSpec, match=r"sum of the losses to session\.backward"):
        run(cluster, strategy, freed)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_write_to_a_tensor_that_backward_needs_is_reported(
    cluster: LocalCluster, strategy: str
) -> None:
    with pytest.raises(InvalidSpec, match=r"written to .* in step 0.*set_detect_anomaly"):
        run(cluster, strategy, written)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_frozen_model_among_several_is_refused(cluster: LocalCluster, strategy: str) -> None:
    """torch's DDP needs a model that trains. The refusal comes before any generation."""
    student, teacher = Net(), Net().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    job = f"errors-{secrets.token_hex(4)}"
    with (
        pytest.raises(InvalidSpec, match=r"model 1 has nothing to train.*Leave a frozen model out"),
        shoal.join(job, coordinator=cluster.coordinator) as session,
    ):
        session.distribute([student, teacher], [optimizer], strategy=strategy)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a script's own"), KeyError("Expected more than 1 value per channel")],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    state = StepState(strategy="ddp", step=0, num_samples=None, syncs_batchnorm=True)
    assert refusal_of(error, state) is None
