"""Members that split layers, of which one leaves some layers out in a step."""

from dataclasses import dataclass

import torch
from support.network.namespaces import Host
from support.processes.ranks import Report
from support.training import elastic_bodies, evaluation_bodies
from support.training.elastic_bodies import EPOCHS, Elastic
from support.training.elastic_bodies import numbers as data
from support.training.rank_bodies import session_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal_proto.errors import InvalidSpec


@dataclass(frozen=True, kw_only=True)
class LeavingOut(Elastic):
    """A member's run."""

    left_out: frozenset[int] = frozenset()
    """Blocks that this member leaves out."""
    in_evaluation: bool = False
    """True if the blocks are left out in an evaluation after the step, not in the step."""


class Blocks(nn.Module):
    """Model with several blocks of one size in sequence."""

    left_out: frozenset[int] = frozenset()
    """Blocks left out by all models of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(20, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(3)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs)
        for number, block in enumerate(self.blocks):
            if number not in Blocks.left_out:
                hidden = hidden + block(hidden)
        outputs: Tensor = self.outer(hidden)
        return outputs


def train_on(report: Report, host: Host, run: LeavingOut) -> None:
    """Train in the network namespace of this host."""
    host.enter()
    train(report, run)


def train(report: Report, run: LeavingOut) -> None:
    """Train all blocks in all steps but one, with an evaluation after that if the run has one."""
    torch.manual_seed(3)
    model: nn.Module = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    try:
        with session_of(run) as session:
            model, optimizer = session.distribute(
                model, optimizer, strategy=elastic_bodies.strategy_of(run)
            )
            for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=EPOCHS):
                differs = batch.step == run.at_step
                Blocks.left_out = run.left_out if differs and not run.in_evaluation else frozenset()
                with session.step():
                    session.backward(cross_entropy(model(batch.inputs), batch.targets))
                report("stepped", step=batch.step, generation=session.generation)
                if differs and run.in_evaluation:
                    Blocks.left_out = run.left_out
                    session.evaluate(
                        data(),
                        lambda batch: evaluation_bodies.measured(model, batch),
                        batch_size=evaluation_bodies.BATCH,
                    )
    except InvalidSpec as error:
        report("refused", text=str(error), generation=session.generation)
