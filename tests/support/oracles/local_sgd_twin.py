"""Local SGD and DiLoCo in one process, which trains a replica for each member in turn."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.collectives.strategy_runs import PLAIN, StepOptions, take_step_alone
from support.training import equality
from torch import Tensor, nn

from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.strategies.local_sgd.strategy import DiLoCo, LocalSGD

NUM_SAMPLES = 47
EPOCHS = 10_000
"""More epochs than any test trains."""


class Net(nn.Module):
    """Model with running statistics, a counter, a mask that holds infinities, and an unused
    part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 2)
        self.second.bias.requires_grad_(False)
        self.idle = nn.Linear(2, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]).tile(5)[:9])

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.mean.dtype)
        if self.training:
            self.seen += 1
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        hidden = torch.tanh(self.first(inputs)) * torch.exp(self.mask)
        outputs: Tensor = self.second(hidden)
        return outputs


def build(
    optimizer: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a member's initial model and optimizer, which differ for each seed."""
    model = Net().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    if optimizer == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def order(batch_size: int = 10) -> Order:
    """Make the order of 47 samples: batches of 10, and of 7 at an epoch's end, are uneven on three
    or four ranks."""
    return Order(num_samples=NUM_SAMPLES, global_batch_size=batch_size, num_epochs=EPOCHS)


def loader(batch_size: int = 10) -> Loader:
    return Loader(equality.samples(NUM_SAMPLES), order(batch_size))


def strategy_of(name: str, every_steps: int, **options: Any) -> LocalSGD:
    """Make the strategy that the twin imitates."""
    kind = DiLoCo if name == "diloco" else LocalSGD
    return kind(every_steps=every_steps, **options)


@dataclass
class _Replica:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    weight: float = 0.0


class Twin:
    """The state of all members; `train` is one round."""

    def __init__(
        self,
        strategy: str,
        optimizer: str,
        seed: int = 0,
        *,
        batch_size: int = 10,
        step_options: StepOptions = PLAIN,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, _ = build(optimizer, seed, dtype)
        self._first = _Replica(*build(optimizer, seed, dtype))
        self._replicas: dict[str, _Replica] = {}
        self._loader, self._step_options = loader(batch_size), step_options
        own = [parameter.requires_grad_() for parameter in self.model.parameters()]
        self._outer = torch.optim.SGD(own, lr=1.0)
        if strategy == "diloco":
            self._outer = torch.optim.SGD(own, lr=0.7, momentum=0.9, nesterov=True)

    def joins(self, member: str, source: str | None = None) -> None:
        """Add a member with a copy of `source`'s replica; without a source, of the initial one."""
        given = self._replicas[source] if source is not None else self._first
        self._replicas[member] = copy.deepcopy(given)

    def train(self, members: Sequence[str], start: int, stop: int) -> None:
        """Train the steps [start, stop) by these members, in order of rank, and average."""
        replicas = [self._replicas[member] for member in members]
        for rank, replica in enumerate(replicas):
            replica.weight = 0.0
            for step in range(start, stop):
                self._step(replica, step, rank, len(replicas))
        self._average(replicas, len(replicas) * (stop - start))
        for replica in replicas:
            replica.model.load_state_dict(self.model.state_dict())

    def _step(self, replica: _Replica, step: int, rank: int, world_size: int) -> None:
        batch = self._loader.synchronous(step, rank, world_size)
        if batch.weight:
            cross_entropy = nn.functional.cross_entropy
            take_step_alone(
                replica.model, replica.optimizer, batch, cross_entropy, self._step_options
            )
        else:
            replica.model(batch.inputs)
        replica.weight += batch.weight

    @torch.no_grad()
    def _average(self, replicas: list[_Replica], total: float) -> None:
        for name, parameter in self.model.named_parameters():
            mean = sum(r.model.get_parameter(name).detach() * (r.weight / total) for r in replicas)
            parameter.grad = parameter - mean
        self._outer.step()
        assert isinstance(self.model, Net)
        self.model.mean.copy_(
            sum(r.model.get_buffer("mean") * (r.weight / total) for r in replicas)
        )
        self.model.seen.copy_(replicas[0].model.get_buffer("seen"))

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
