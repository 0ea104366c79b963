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
MICRO_BATCH, NUM_PARTS, EPOCHS = 6, 2, 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """A member's part in a test."""

    coordinator: str
    job: str
    member_id: str
    strategy: str = "ddp"
    num_members: int = 2
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
    inputs = torch.randn(48, 6, generator=generator)
    return TensorDataset(inputs, inputs.argmax(dim=1) % 3)


def loop(
    make: Callable[[], Accelerator], on_part: Callable[[], None], behind: Callable[[], None]
) -> nn.Module:
    """Run a training loop as users write it, with either accelerator."""
    accelerator = make()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(data(), MICRO_BATCH)
    schedule = StepLR(optimizer, 2, 0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                on_part()
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    behind()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


ACCELERATED_STEPS = 48 // (MICRO_BATCH * NUM_PARTS) * EPOCHS


def train_with_accelerate(report: Report, run: Run) -> None:
    with joined(run) as session:
        held = Held(session, report, run)
        parts = 0

        def on_part() -> None:
            nonlocal parts
            parts += 1
            held.tried()

        loop(
            lambda: SessionAccelerator(
                session,
                epochs=EPOCHS,
                strategy=run.strategy,
                gradient_accumulation_steps=NUM_PARTS,
                cpu=True,
            ),
            on_part,
            held.hold,
        )
        report("finished", weights=listed(session.state_dict()), step=session.step_number)


def plain_accelerate() -> Mapping[str, Tensor]:
    model = loop(
        lambda: Accelerator(gradient_accumulation_steps=NUM_PARTS, cpu=True), _nothing, _nothing
    )
    return model.state_dict()


def _nothing() -> None:
    """Do nothing: no test observes."""
