"""Sessions that fail at every point where a script can fail, and their traces in the process."""

import gc
import os
import random
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import Dataset

import shoal
from shoal import randomness
from shoal_proto.errors import ShoalError

PLACES = (
    *("refused", "twice", "register", "compared", "concluded", "pause", "batch size"),
    *("sample", "collate", "nested step", "nested session", "loss", "interrupt", "exit"),
    *("second loss", "own step", "between", "loading", "evaluate", "all_reduce", "checkpoint"),
)
BY_HANDS = ("loss", "interrupt", "between", "sample", "register", "twice")
"""Failures that are possible under every strategy."""


class Planned(Exception):
    """The error that a script raises on purpose."""


class Failing(Dataset[Any]):
    """Dataset none of whose samples can be loaded."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        raise Planned("a sample")


class FailingState:
    """An object to register, whose `state_dict` works a few times only."""

    def __init__(self, times: int) -> None:
        self._left = times

    def state_dict(self) -> dict[str, int]:
        self._left -= 1
        if self._left < 0:
            raise Planned("a registered object")
        return {"count": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: it has no state."""


class Remembering(torch.optim.Optimizer):
    """Optimizer with a set in its state, which cannot be sent to another member."""

    per_parameter = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.state[each].setdefault("seen", set()).add(each.grad.clone())


def data() -> tuple[Tensor, Tensor]:
    return torch.ones(24, 4), torch.ones(24, 1)


def model_and_optimizer(place: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Tanh(), nn.Linear(4, 1)
    )
    if place == "refused":
        return model, torch.optim.LBFGS(model.parameters())
    if place == "state":
        return model, Remembering(model.parameters())
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str,
    place: str = "",
    job: str | None = None,
    **given: Any,
) -> int:
    """Train, and fail at `place` if one is given. Returns the number of committed steps."""
    steps = 0
    with shoal.join(job, **given) as session:
        checkpoints = None
        if place == "checkpoint":
            checkpoints = shoal.Checkpoints("/dev/null/no-directory", every_steps=1)
        _, o = session.distribute(model, optimizer, strategy, checkpoints=checkpoints)
        _before_the_loop(session, place, model, optimizer, strategy)
        dataset = Failing() if place == "sample" else data()
        options: dict[str, Any] = {"num_workers": 1} if place == "loading" else {}
        if place == "collate":
            options["collate"] = _raises
        size = 0 if place == "batch size" else 8
        for batch in session.batches(dataset, global_batch_size=size, **options):
            with session.step() as step:
                _in_step(session, place, batch.step)
                session.forward_backward(batch, loss_of)
                if place == "own step":
                    o.step()
            steps += step.committed
            _between(session, place)
    return steps


def _raises(batch: Any) -> Any:
    raise Planned("in a function of the script's")


def _before_the_loop(
    session: shoal.Session, place: str, model: Any, optimizer: Any, strategy: str
) -> None:
    if place == "twice":
        session.distribute(model, optimizer, strategy)
    times = {"register": 0, "compared": 3, "concluded": 8}.get(place)
    if times is not None:
        session.register("failing", FailingState(times))
    if place == "pause":
        with session.pause("validation"):
            raise Planned("in a pause")


def _in_step(session: shoal.Session, place: str, step: int) -> None:
    if place == "loss" or (place == "second loss" and step == 1):
        raise Planned("in the loss")
    if place == "interrupt":
        raise KeyboardInterrupt
    if place == "exit":
        raise SystemExit(3)
    if place == "nested step":
        with session.step():
            pass


def _between(session: shoal.Session, place: str) -> None:
    if place in ("between", "loading"):
        raise Planned("between two steps")
    if place == "evaluate":
        session.evaluate(data(), _raises, batch_size=4)
    if place == "all_reduce":
        session.all_reduce("no number")  # type: ignore[arg-type]
    if place == "nested session":
        train(*model_and_optimizer(), "ddp")


def traces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, object]:
    """Return the state of process, model and optimizer that a session may have changed."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
    }
    modules = {
        name: (
            type(part),
            len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks),
            sorted(vars(part)),
        )
        for name, part in model.named_modules()
    }
    parameters = {
        name: (
            each.requires_grad,
            len(each._backward_hooks or ()),
            len(getattr(each, "_post_accumulate_grad_hooks", None) or ()),
        )
        for name, each in model.named_parameters()
    }
    return {
        "default group": dist.is_initialized(),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "SIGINT": signal.getsignal(signal.SIGINT),
        "frozen": gc.get_freeze_count() > 0,
        # A group's Gloo threads are freed in the background, within seconds.
        "threads": {each.name for each in threading.enumerate()} - {"shoal-free-group"},
        "place": randomness.present(),
        "hooks of all optimizers": len(_global_optimizer_pre_hooks),
        "dtype": torch.get_default_dtype(),
        "torch's generator": torch.get_rng_state().tolist(),
        "Python's generator": random.getstate(),
        "environment": environment,
        "folder": str(Path.cwd()),
        "gradients": torch.is_grad_enabled(),
        "modules": modules,
        "parameters": parameters,
        "optimizer": (
            {name for name in vars(optimizer) if name[0] != "_"},
            len(optimizer._optimizer_step_pre_hooks),
        ),
    }


def fails_and_trains(strategy: str, place: str, job: str = "", **given: Any) -> list[str]:
    """Run a session that fails, and another one. Returns the faults found afterwards."""
    wrong = []
    model, optimizer = model_and_optimizer(place)
    before = traces(model, optimizer)
    try:
        train(model, optimizer, strategy, place, job and f"{job}-fails", **given)
        wrong.append("nothing was raised")
    except BaseException as error:
        if not isinstance(error, Planned | ShoalError | KeyboardInterrupt | SystemExit):
            raise
        notes = getattr(error, "__notes__", [])
        wrong += [f"noted: {note}" for note in notes if note.startswith("Leaving")]
    after = traces(model, optimizer)
    # Under async-sgd, dropout draws from torch's own generator, as the script does.
    watched = before.keys() - ({"torch's generator"} if strategy == "async-sgd" else set())
    wrong += [
        f"{name}: {before[name]} {after[name]}" for name in watched if before[name] != after[name]
    ]
    steps = train(*model_and_optimizer(), strategy, "", job and f"{job}-works", **given)
    if steps != 3:
        wrong.append(f"{steps} steps")
    return wrong
