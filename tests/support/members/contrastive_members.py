"""A contrastive loss over the rows of all members, and bodies of members that train with it."""

import os
import signal
from dataclasses import dataclass

import torch
from support.processes.ranks import Report
from support.training import elastic_bodies
from support.training.elastic_bodies import Elastic
from support.training.rank_bodies import session_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from shoal.data.batches import Batch, Loader
from shoal.data.order import Order
from shoal.session.session import Session
from shoal_proto.errors import InvalidSpec

BATCH, EPOCHS = 64, 2
NUM_SAMPLES = 2 * BATCH + 2
"""Three members have shares of 22, 21 and 21; in the last batch of an epoch one has no share."""


class Towers(nn.Module):
    """A model with two feature vectors for each sample, side by side, and a learned scale."""

    def __init__(self, dropped: float) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Tanh(), nn.Dropout(dropped))
        self.layers = nn.Sequential(nn.Linear(6, 8), hidden, nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        images, texts = self.layers(inputs).chunk(2, 1)
        return torch.cat([normalize(images) * self.scale.exp(), normalize(texts)], 1)


def build(seed: int = 0, dropped: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build in float64, in which another order of sums makes no visible difference."""
    model = Towers(dropped).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def samples(num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 6, generator=generator).double()
    return inputs, inputs


def of_all(features: Tensor) -> Tensor:
    """Compute CLIP's loss over all rows."""
    images, texts = features.chunk(2, 1)
    places, logits = torch.arange(len(features)), images @ texts.T
    return (cross_entropy(logits, places) + cross_entropy(logits.T, places)) / 2


def of_own(own: Tensor, every: Tensor, first: int) -> Tensor:
    """Compute CLIP's loss as a mean over a member's own rows, each against all rows."""
    # A member without samples computes with weight 0, so its places do not matter.
    places = (first + torch.arange(len(own))).clamp(max=len(every) - 1)
    (images, texts), (all_images, all_texts) = own.chunk(2, 1), every.chunk(2, 1)
    by_image = cross_entropy(images @ all_texts.T, places)
    return (by_image + cross_entropy(texts @ all_images.T, places)) / 2


def by_one_process() -> dict[str, Tensor]:
    """Return the weights after all steps in one process."""
    model, optimizer = build()
    order = Order(num_samples=NUM_SAMPLES, global_batch_size=BATCH, num_epochs=EPOCHS)
    loader = Loader(samples(), order)
    for step in range(order.num_steps):
        optimizer.zero_grad()
        of_all(model(loader.synchronous(step, 0, 1).inputs)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def take(session: Session, model: nn.Module, batch: Batch, *, whole: bool = True) -> None:
    """Run the forward and backward pass of a step."""
    outputs = model(batch.inputs)
    every = session.gather(outputs)
    session.backward(of_all(every) if whole else of_own(outputs, every, batch.first))


@dataclass(frozen=True, kw_only=True)
class Contrastive(Elastic):
    """A member's run."""

    whole: bool = True
    """True if the loss covers all rows; False if it is a mean over the member's own rows."""
    gathers: int = 1
    """Number of gathers by this member in step `at_step`."""


def _dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(report: Report, run: Contrastive) -> None:
    """Train all steps; then report the whole model. By fault "forward" the member dies before the
    others have its rows; by "backward", before they have its gradients of their rows."""
    try:
        _train(report, run)
    except InvalidSpec as error:
        report("refused", text=str(error))


def _train(report: Report, run: Contrastive) -> None:
    model, optimizer = build()
    with session_of(run) as session:
        model, optimizer = session.distribute(
            model, optimizer, strategy=elastic_bodies.strategy_of(run)
        )
        for batch in session.batches(samples(), global_batch_size=BATCH, epochs=EPOCHS):
            faulty = run.fault if batch.step == run.at_step else ""
            with session.step() as step:
                outputs = model(batch.inputs)
                if faulty == "forward":
                    _dies()
                every = outputs
                for _ in range(run.gathers if batch.step == run.at_step else 1):
                    every = session.gather(outputs)
                if faulty == "backward":
                    every.register_hook(_dies)
                loss = of_all(every) if run.whole else of_own(outputs, every, batch.first)
                session.backward(loss)
            report("tried", step=batch.step, generation=session.generation, ok=step.committed)
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        report("finished", weights=weights, generation=session.generation)
