"""The training whose result must not depend on the workers that took part in it."""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from shoal.data.batches import Batch, Loader
from shoal.data.order import Order

NUM_SAMPLES, GLOBAL_BATCH, NUM_TOKENS, VOCABULARY, WIDTH = 1000, 64, 6, 41, 32
PERIOD_STEPS = 400
"""Period of the learning-rate schedule, up and down."""


class TiedModel(nn.Module):
    """Predicts tokens from tokens; the output shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.first(hidden)
        logits: Tensor = self.head(self.second(self.norm(hidden)))
        return logits


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return TiedModel()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def new_schedule(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, PERIOD_STEPS, eta_min=0.002)


def samples() -> tuple[Tensor, Tensor]:
    """Return tokens, and the tokens that follow them."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (NUM_SAMPLES, NUM_TOKENS + 1), generator=generator)
    drawn = steps.cumsum(1) % VOCABULARY
    return drawn[:, :-1], drawn[:, 1:]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def new_loader() -> Loader:
    """Return a loader whose batches depend on the number of the step only."""
    order = Order(num_samples=NUM_SAMPLES, global_batch_size=GLOBAL_BATCH, num_epochs=1_000_000)
    return Loader(samples(), order)


def one_process(num_steps: int) -> dict[str, Tensor]:
    """Return the model after this many steps in one process."""
    return one_process_at([num_steps])[num_steps]


def one_process_at(numbers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """Return the model after each of these numbers of steps in one process."""
    model = new_model()
    optimizer = new_optimizer(model)
    schedule = new_schedule(optimizer)
    loader = new_loader()
    found: dict[int, dict[str, Tensor]] = {}
    done = 0
    for number in sorted(set(numbers)):
        for step in range(done, number):
            train_step(model, optimizer, schedule, loader.synchronous(step, 0, 1))
        done = number
        found[number] = {
            name: tensor.detach().clone() for name, tensor in model.state_dict().items()
        }
    return found


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: CosineAnnealingLR, batch: Batch
) -> None:
    """Take a step on the whole global batch."""
    optimizer.zero_grad()
    loss_of(model(batch.inputs), batch.targets).backward()
    optimizer.step()
    schedule.step()


def save_checkpoint(directory: Path, parts: Mapping[str, Any], step: int) -> None:
    """Write the state of each part after `step` steps, to be loaded after a restart."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, **state}, directory / "checkpoint.new")
    (directory / "checkpoint.new").rename(directory / "checkpoint.pt")


def load_checkpoint(directory: Path, parts: Mapping[str, Any]) -> int:
    """Load the newest state into the parts, if there is one; return its number of steps."""
    path = directory / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


def checkpoint_and_step_s(num_checkpoints: int = 9, num_steps: int = 30) -> tuple[float, float]:
    """Return the seconds of a checkpoint, and of a step without its pause."""
    model = new_model()
    optimizer = new_optimizer(model)
    schedule = new_schedule(optimizer)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    loader = new_loader()
    with tempfile.TemporaryDirectory() as name:
        steps_s = [
            timed(lambda: train_step(model, optimizer, schedule, loader.synchronous(0, 0, 1)))
            for _ in range(num_steps)
        ]
        costs_s = [
            timed(lambda: save_checkpoint(Path(name), parts, 0)) for _ in range(num_checkpoints)
        ]
    return median(costs_s), median(steps_s)


def timed(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def stops_at(directory: Path) -> int | None:
    """Return the step before which to stop, once the bench has written it to the file `stop`."""
    stop = directory / "stop"
    return int(stop.read_text()) if stop.exists() else None


def leave_weights(directory: Path, step: int, weights: dict[str, Any]) -> None:
    """Write the result for the bench to compare; `step`: the number of steps in it."""
    draft = directory / f"draft-{os.getpid()}"
    torch.save({"step": step, "weights": weights}, draft)
    draft.rename(directory / "weights.pt")
