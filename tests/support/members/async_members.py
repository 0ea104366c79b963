"""Asynchronous members without a session, which train a small model."""

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from support.clusters.parameter_servers import ParameterServers
from support.processes.ranks import Rank
from torch import nn

from shoal.membership.generation import Context, Generation
from shoal.strategies.asynchronous.async_sgd import AsyncSGD
from shoal_proto.errors import ShoalError
from shoal_proto.v1.membership_pb2 import GenerationRecord, Limits, Roster, RosterEntry

LIMITS = Limits(collective_s=20.0, bring_up_s=20.0)


class Net(nn.Module):
    """A small convolutional network with a part that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 6 * 6, 10)
        self.extra = nn.Linear(10, 10)

    def forward(self, images: torch.Tensor, *, use_extra: bool = True) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.relu(self.conv(images)).flatten(1))
        return self.extra(scores) if use_extra else scores


def new_model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 1, 8, 8, generator=generator)
    targets = torch.randint(10, (8,), generator=generator)
    return nn.functional.cross_entropy(model(images, use_extra=step % 3 != 0), targets)


def start(
    servers: ParameterServers,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank: int = 0,
    limits: Limits = LIMITS,
    strategy: AsyncSGD | None = None,
    job: str = "job",
    ended: Callable[[], ShoalError | None] = lambda: None,
) -> AsyncSGD:
    """Make a strategy (by default AsyncSGD) enter the first generation, and return it."""
    token = servers.admit(f"w{rank}", job=job, incarnation=f"i{rank}")
    strategy = strategy or AsyncSGD()
    strategy.distribute(model, optimizer)
    strategy.attach(
        Context(
            job=job,
            coordinators=[servers.coordinator],
            token=lambda: token,
            limits=limits,
            ended=ended,
        )
    )
    entry = RosterEntry(member_id=f"w{rank}", rank=rank)
    record = GenerationRecord(roster=Roster(generation=1, entries=[entry]))
    strategy.enter(Generation(record=record, token=token))
    return strategy


def train(strategy: AsyncSGD, model: nn.Module, steps: range) -> int:
    """Train, and return the number of acknowledged steps."""
    acknowledged: list[int] = []
    for step in steps:
        strategy.begin_step()
        strategy.backward(loss_of(model, step), 1.0)
        strategy.end_step(lambda step=step: acknowledged.append(step))  # type: ignore[misc]
    return len(acknowledged)


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Return parameter groups, with the biases in a separate one."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "bias" not in n]},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 0.05},
    ]


def trained(ranks: Iterable[Rank]) -> Counter[tuple[int, int]]:
    """Count, for each sample of each epoch, the committed steps that it was in."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in ranks:
        batch: list[tuple[int, int]] = []
        for kind, data in rank.seen:
            if kind == "tried":
                batch = [(data["epoch"], index) for index in data["indices"]]
            elif kind == "committed":
                found.update(batch)
    return found
