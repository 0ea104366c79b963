"""Bodies of members that draw random numbers in and between the steps of two noisy optimizers."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from support.processes.ranks import Report
from support.training.elastic_bodies import Elastic, layers, strategy_of
from support.training.elastic_bodies import numbers as data
from support.training.rank_bodies import session_of
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from shoal.data.batches import Batch

NUM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Drawing(Elastic):
    """A member's run."""

    has_batches: bool = True
    """False: the script makes its batches itself."""


class Noisy(torch.optim.SGD):
    """An optimizer that adds noise to the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def draw() -> float:
    return float(torch.rand(()))


def measured(batch: Batch) -> dict[str, float]:
    """Draw a number for each sample of an evaluation: members have different numbers of them."""
    return {"noise": float(torch.rand(len(batch.indices)).sum())}


def train(report: Report, run: Drawing) -> None:
    """Train two models for a few steps. Report their weights, and the numbers drawn at each point
    of the loop."""
    torch.manual_seed(3)
    models = [layers(), layers()]
    optimizers = [Noisy(each.parameters(), lr=0.02) for each in models]
    # Members that draw their own samples begin with other numbers.
    torch.manual_seed(int(run.member_id[1:]))
    drawn: dict[str, list[float]] = defaultdict(list)
    with session_of(run) as session:
        (first, second), optimizers = session.distribute(
            models, optimizers, strategy=strategy_of(run)
        )
        given = session.batches(data(), global_batch_size=run.batch_size) if run.has_batches else ()
        own = iter(given)
        for _ in range(NUM_STEPS):
            inputs, targets = data()
            if run.has_batches:
                batch = next(own)
                inputs, targets = batch.inputs, batch.targets
            drawn["before the step"].append(draw())
            with session.step():
                drawn["in the step"].append(draw())
                session.backward(cross_entropy(first(inputs), targets), optimizer=optimizers[0])
                session.update(optimizers[0])
                drawn["after an update"].append(draw())
                session.backward(cross_entropy(second(inputs), targets), optimizer=optimizers[1])
            drawn["after the step"].append(draw())
            if run.has_batches:
                session.evaluate(TensorDataset(data()[0][:3]), measured, batch_size=2)
            with torch.no_grad():
                if run.has_batches:
                    torch.nn.init.normal_(second[0].weight, std=0.1)
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        report("finished", weights=weights, drawn=dict(drawn))
