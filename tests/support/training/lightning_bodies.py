"""Bodies of members that train a LightningModule in a session; their processes import this."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from support.processes.ranks import Report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.integrations.lightning import SessionStrategy

ORDER = Order(num_samples=50, global_batch_size=12, num_epochs=3, seed=5)
MAX_NORM = 0.3
NEVER = -1


@dataclass(frozen=True, kw_only=True)
class Run:
    """A member's part in a test."""

    coordinator: str
    job: str
    member_id: str
    strategy: str = "ddp"
    num_members: int = 2
    epochs: int = ORDER.num_epochs
    validates: bool = False
    scheduled: bool = False
    """True: Lightning's schedulers and batches in parts. False: the script sets the rate."""
    hold_at: int = NEVER
    """Step in the middle of which the member waits until `gate` is opened."""
    gate: str = ""


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ORDER.num_samples, 6, generator=generator)
    return inputs, inputs.argmax(dim=1) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate(0), momentum=0.9)


def rate(step: int) -> float:
    return 0.2 * 0.95**step


def schedules_of(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Make a schedule for every second step, and one for each epoch."""
    return ExponentialLR(optimizer, 0.9), StepLR(optimizer, 2, 0.5)


class Net(LightningModule):
    """A user's module, which also reports each attempt of a step to the test."""

    def __init__(self, session: shoal.Session, report: Report, run: Run) -> None:
        super().__init__()
        self.session, self.report, self.run_of = session, report, run
        self.held = False
        self.validated: list[int] = []
        self.layers = network()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        session, run = self.session, self.run_of
        if not run.scheduled:
            for group in self.optimizers().param_groups:  # type: ignore[union-attr]
                group["lr"] = rate(session.step_number)
        self.report(
            "tried",
            step=session.step_number,
            world_size=session.world_size,
            generation=session.generation,
        )
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        if session.step_number == run.hold_at and session.generation == 1 and not self.held:
            self.held = True
            self.report("holds")
            Path(run.gate).read_bytes()  # a named pipe: returns once the test has opened it too
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.report("validated", step=self.session.step_number, trains=self.layers.training)
        self.validated.append(self.session.step_number)
        assert self.layers(batch[0]).shape == (len(batch[0]), 3)

    def configure_optimizers(self) -> Any:
        own = optimizer_of(self.layers)
        schedules = schedules_of(own) if self.run_of.scheduled else None
        self.layers, optimizer = self.session.distribute(
            self.layers, own, strategy=self.run_of.strategy
        )
        if schedules is None:
            return optimizer
        each, epoch = schedules
        return [optimizer], [{"scheduler": each, "interval": "step", "frequency": 2}, epoch]


def trainer_of(strategy: SessionStrategy, **changes: object) -> Trainer:
    options = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "gradient_clip_val": MAX_NORM,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        **changes,
    }
    return Trainer(strategy=strategy, **options)  # type: ignore[arg-type]


def train(report: Report, run: Run) -> None:
    session = shoal.join(
        run.job,
        coordinator=run.coordinator,
        member_id=run.member_id,
        desired_members=run.num_members,
        max_members=run.num_members,
    )
    with session:
        elastic = SessionStrategy(session)
        parts = {"accumulate_grad_batches": 2} if run.scheduled else {}
        trainer, module = trainer_of(elastic, max_epochs=-1, **parts), Net(session, report, run)
        batches = elastic.batches(
            data(),
            global_batch_size=ORDER.global_batch_size,
            epochs=run.epochs,
            seed=ORDER.seed,
        )
        trainer.fit(
            module, batches, DataLoader(TensorDataset(*data()), 50) if run.validates else None
        )
        weights = {name: value.tolist() for name, value in session.state_dict().items()}
        report(
            "finished",
            weights=weights,
            step=session.step_number,
            trainer_steps=trainer.global_step,
            trainer_epochs=trainer.current_epoch,
            validated=module.validated,
        )


def one_process(*, scheduled: bool = False) -> dict[str, Tensor]:
    """Return the weights after the same training in a plain torch loop."""
    model = network()
    optimizer, loader = optimizer_of(model), Loader(data(), ORDER)
    each, epoch = schedules_of(optimizer)
    for step in range(ORDER.num_steps):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if not scheduled:
            optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        if scheduled and step % 2:
            each.step()
        if scheduled and (step + 1) % ORDER.steps_per_epoch == 0:
            epoch.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
