"""Bodies of members that train a factorisation machine on synthetic clicks."""

import os
import signal
from dataclasses import dataclass

import torch
from support.processes.ranks import Report
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

NUM_CLICKS, NUM_FIELDS, NUM_IDS, DIM = 512, 4, 200, 4
BATCH_SIZE, EPOCHS = 64, 2


@dataclass(frozen=True, kw_only=True)
class Training:
    coordinator: str
    job: str
    member_id: str
    desired_members: int = 1
    dies_at_step: int | None = None


class FactorisationMachine(nn.Module):
    """A factorisation machine (Rendle 2010): pairs of ids interact by products of their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = shoal.EmbeddingBagTable(
            1, mode="sum", optimizer=shoal.RowAdagrad(lr=0.2), init=shoal.RowConstant()
        )
        self.factors = shoal.EmbeddingTable(
            DIM, optimizer=shoal.RowAdagrad(lr=0.2), init=shoal.RowNormal(std=0.1)
        )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        factors = self.factors(ids)
        pairs = factors.sum(dim=1).pow(2) - factors.pow(2).sum(dim=1)
        weights: Tensor = self.weights(ids)
        return self.bias + weights.squeeze(1) + pairs.sum(dim=1) / 2


def clicks() -> TensorDataset:
    """Make ids, and clicks on them that hidden weights of the ids decide."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(NUM_IDS, (NUM_CLICKS, NUM_FIELDS), generator=generator)
    # Every id occurs at least once.
    ids.view(-1)[:NUM_IDS] = torch.arange(NUM_IDS)
    hidden = torch.randn(NUM_IDS, generator=generator)
    return TensorDataset(ids * 10**15, (hidden[ids].sum(dim=1) > 0).float())


def train(report: Report, training: Training) -> None:
    """Train and report the result, or die at step `dies_at_step`."""
    model = FactorisationMachine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    num_samples = 0
    session = shoal.join(
        training.job,
        coordinator=training.coordinator,
        min_members=1,
        max_members=training.desired_members,
        desired_members=training.desired_members,
        member_id=training.member_id,
    )
    with session:
        model, optimizer = session.distribute(model, optimizer, strategy="async-sgd")
        batches = session.batches(clicks(), global_batch_size=BATCH_SIZE, epochs=EPOCHS)
        for batch in batches:
            with session.step():
                scores = model(batch.inputs)
                loss = nn.functional.binary_cross_entropy_with_logits(scores, batch.targets)
                if training.dies_at_step == len(losses):
                    os.kill(os.getpid(), signal.SIGKILL)
                session.backward(loss)
            losses.append(loss.item())
            num_samples += len(batch.indices)
        metrics = session.strategy.metrics()
        with torch.no_grad():
            everything = clicks()
            scores = model(everything.tensors[0])
            last = nn.functional.binary_cross_entropy_with_logits(scores, everything.tensors[1])
            is_known = model.weights(torch.arange(NUM_IDS)[:, None] * 10**15) != 0
    report(
        "finished",
        first_loss=losses[0],
        last_loss=last.item(),
        num_samples=num_samples,
        num_rows_known=int(is_known.sum()),
        rows_made=metrics["table_factors_rows_made"],
        rows_applied=metrics["table_factors_rows_applied"],
    )
