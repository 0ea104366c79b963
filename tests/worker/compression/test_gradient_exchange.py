"""Gradients of a lone member are not averaged, but checked like those of several. Gradients on a
GPU are checked once all of them are computed."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.compression import gradient_exchange
from shoal.model import gradients
from shoal.strategies.rollback.step_snapshot import StepSnapshot
from shoal_proto.errors import NonFiniteGradient


def _new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def _trained(model: nn.Module, *, alone: bool, faulty: str = "") -> Tensor:
    """Return the weights after two steps. The gradient of the parameter `faulty` becomes NaN."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if alone:
        model, optimizer = shoal.distribute(model, optimizer, "ddp")
    for name, parameter in model.named_parameters():
        if name == faulty:
            parameter.register_hook(lambda gradient: gradient * float("nan"))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_one_rank_trains_as_plain_torch_does() -> None:
    """The weights are equal bit for bit: nothing is divided, sent or received."""
    (alone,) = shoal.run_in_memory(lambda: _trained(_new_model(), alone=True), 1)
    assert torch.equal(alone, _trained(_new_model(), alone=False))


def test_one_rank_names_the_parameter_whose_gradient_is_not_finite() -> None:
    with pytest.raises(NonFiniteGradient, match=r"1\.weight") as refused:
        shoal.run_in_memory(lambda: _trained(_new_model(), alone=True, faulty="1.weight"), 1)
    assert refused.value.details["parameter"] == "1.weight"


class Reads(TorchDispatchMode):
    """Counter of the reads of a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, gradient_exchange):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_gradient_on_a_gpu_is_read_while_backward_runs(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """A read would wait for the GPU to compute it, and nothing would be sent meanwhile."""
    _as_on_a_gpu(monkeypatch)
    plain = _new_model()

    def body() -> tuple[int, int]:
        model = copy.deepcopy(plain)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = shoal.distribute(model, optimizer, shoal.DDP(bucket_mb=1e-5))
        loss = model(torch.ones(2, 3)).square().sum()
        with Reads() as backward:
            loss.backward()
        with Reads() as behind:
            optimizer.step()
        return backward.num, behind.num

    for in_backward, behind in shoal.run_in_memory(body, world_size):
        assert in_backward == 0
        assert behind > 0, "the gradients were not checked"


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_parameter_at_fault_is_named_also_from_a_gpu(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    _as_on_a_gpu(monkeypatch)
    plain = _new_model()

    def body() -> Tensor:
        return _trained(copy.deepcopy(plain), alone=True, faulty="1.weight")

    with pytest.raises(NonFiniteGradient, match=r"1\.weight"):
        shoal.run_in_memory(body, world_size)


def test_buffers_are_restored_to_their_values_at_the_start_of_the_step() -> None:
    """A buffer that a module got after the first step is restored too."""
    snapshot, model = StepSnapshot(), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    snapshot.begin(model, {})
    snapshot.settle()
    snapshot.commit()
    model[1].register_buffer("late", torch.zeros(1), persistent=False)
    snapshot.begin(model, {})
    model(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    model[1].late += 1
    assert model[0].num_batches_tracked == 1
    snapshot.restore()
    assert model[0].num_batches_tracked == 0
    assert torch.equal(model[0].running_mean, torch.zeros(2))
    assert torch.equal(model[1].late, torch.zeros(1))
