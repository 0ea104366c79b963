"""Bodies of members that train with accelerate in a session; their processes import this."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from support.processes.ranks import Report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.integrations.accelerate import SessionAccelerator

NEVER = -1
NUM_SAMPLES, NUM_PARTS, EPOCHS = 48, 2, 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """A member's part in a test."""

    coordinator: str
    job: str
    member_id: str
    strategy: str = "ddp"
    num_members: int = 2
    by_epoch: bool = False
    """True if the schedule is stepped after each epoch, between two iterations over the loader."""
    hold_at: int = NEVER
    """Step in the middle of which the member waits until `gate` is opened."""
    gate: str = ""


def joined(run: Run) -> shoal.Session:
    return shoal.join(
        run.job,
        coordinator=run.coordinator,
        member_id=run.member_id,
        desired_members=run.num_members,
        max_members=run.num_members,
    )


class Held:
    """Reports each attempt of a step to the test, and waits in one of them."""

    def __init__(self, session: shoal.Session, report: Report, run: Run) -> None:
        self._session, self._told, self._run = session, report, run

    def tried(self) -> None:
        session = self._session
        self._told(
            "tried",
            step=session.step_number,
            world_size=session.world_size,
            generation=session.generation,
        )

    def hold(self) -> None:
        session, run = self._session, self._run
        if session.step_number == run.hold_at and session.generation == 1:
            self._told("holds")
            Path(run.gate).read_bytes()  # a named pipe: returns once the test has opened it too


def listed(state: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in state.items()}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, inputs.argmax(dim=1) % 3)


def steps_per_epoch(*, by_epoch: bool) -> int:
    """Return a number with which step 6 is the first of an epoch if schedules are stepped there."""
    return 3 if by_epoch else 4


def loop(
    make: Callable[[], Accelerator],
    on_part: Callable[[int], None],
    behind: Callable[[], None],
    *,
    by_epoch: bool = False,
) -> nn.Module:
    """Run a training loop as users write it, with either accelerator. `on_part` gets the number of
    the iteration over the loader."""
    accelerator = make()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    micro_batch = NUM_SAMPLES // NUM_PARTS // steps_per_epoch(by_epoch=by_epoch)
    loader = DataLoader(data(), micro_batch)
    schedule = StepLR(optimizer, 2, 0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                on_part(epoch)
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    behind()
                optimizer.step()
                if not by_epoch:
                    schedule.step()
                optimizer.zero_grad()
        if by_epoch:
            schedule.step()
    return accelerator.unwrap_model(model)


def train_with_accelerate(report: Report, run: Run) -> None:
    with joined(run) as session:
        held = Held(session, report, run)
        loop(
            lambda: SessionAccelerator(
                session,
                epochs=EPOCHS,
                strategy=run.strategy,
                gradient_accumulation_steps=NUM_PARTS,
                cpu=True,
            ),
            lambda _: held.tried(),
            held.hold,
            by_epoch=run.by_epoch,
        )
        report("finished", weights=listed(session.state_dict()), step=session.step_number)


def plain_accelerate(*, by_epoch: bool = False) -> Mapping[str, Tensor]:
    model = loop(
        lambda: Accelerator(gradient_accumulation_steps=NUM_PARTS, cpu=True),
        lambda _: None,
        lambda: None,
        by_epoch=by_epoch,
    )
    return model.state_dict()
