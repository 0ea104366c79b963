"""Bodies of members that train under a strategy while members are killed, join and drain."""

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.models import tensor_models
from support.models.plain_values import Keeps, KeepsCodes, Slips
from support.processes.ranks import Report
from support.training.rank_bodies import Run, session_of
from torch import Tensor, fx, nn

import shoal
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.layouts.base import LossFunction
from shoal.membership.generation import Generation
from shoal.session.session import Session
from shoal.state.peer_copies import PeerCopies
from shoal.strategies import find_strategy
from shoal.strategies.base import Strategy

NUM_SAMPLES = 101
CHECKPOINT_STEPS = 7
EPOCHS = 1000
"""More epochs than any test trains: `stop_file` defines the end."""


@dataclass(frozen=True, kw_only=True)
class Elastic(Run):
    """A member's run."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy."""
    optimizer: str = "sgd"
    model: str = "layers"
    """Name of a model in `MODELS`."""
    checkpoints: str = ""
    """Directory for a checkpoint every few steps; empty: none are written."""
    compiled: str = ""
    """Point at which the script compiles its model: "before" it is distributed, or "behind": after
    that; empty: not at all."""
    stop_file: str = ""
    """File with the step at which all members stop, once the test has decided on it."""


def layers() -> nn.Module:
    """Make a model of layers whose sizes no number of ranks divides."""
    return nn.Sequential(
        *(nn.Linear(20, 17), nn.Tanh(), nn.Linear(17, 13), nn.Tanh()),
        *(nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 5)),
    )


def numbers() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return (
        torch.randn(NUM_SAMPLES, 20, generator=generator),
        torch.randint(0, 5, (NUM_SAMPLES,), generator=generator),
    )


def sentences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(12)
    shape = (NUM_SAMPLES, tensor_models.POSITIONS + 1)
    drawn = torch.randint(tensor_models.VOCABULARY, shape, generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def encoder() -> nn.Module:
    """Make a layer with an attention of four heads."""
    return nn.TransformerEncoderLayer(12, 4, dim_feedforward=16, dropout=0.0, batch_first=True)


def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(13)
    inputs = torch.randn(NUM_SAMPLES, 5, 12, generator=generator)
    return inputs, torch.randn(NUM_SAMPLES, 5, 12, generator=generator)


@dataclass(frozen=True)
class Task:
    """Model, data and loss of a training."""

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: LossFunction


MODELS: Mapping[str, Task] = {
    "layers": Task(layers, numbers, nn.functional.cross_entropy),
    # The output shares the embedding's weight.
    "encoder": Task(encoder, vectors, nn.functional.mse_loss),
    "gpt": Task(tensor_models.tied_gpt, sentences, tensor_models.next_token),
}


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "keeps": Keeps,
    "keeps codes": KeepsCodes,
    "slips at once": lambda parameters: Slips(parameters, {1, 2}, 0),
    "slips later": lambda parameters: Slips(parameters, {1, 2}, 3),
}


def build(optimizer: str, model_name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model and optimizer, which are the same on every member."""
    torch.manual_seed(3)
    model = MODELS[model_name].make()
    if optimizer == "adamw":
        # The attention keys' bias has gradients of rounding errors only, which must make no steps.
        eps = 1e-5 if model_name == "gpt" else 1e-8
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps)
    if optimizer in OPTIMIZERS:
        return model, OPTIMIZERS[optimizer](model.parameters())
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def order(batch_size: int) -> Order:
    """Return the order of all samples over all steps."""
    return Order(num_samples=NUM_SAMPLES, global_batch_size=batch_size, num_epochs=EPOCHS)


def strategy_of(run: Elastic) -> Strategy:
    """Make the run's strategy with its options."""
    return type(find_strategy(run.strategy))(**run.options)


def checkpoints_of(run: Elastic) -> shoal.Checkpoints | None:
    """Return the checkpoints that the run writes, if any."""
    if not run.checkpoints:
        return None
    return shoal.Checkpoints(run.checkpoints, every_steps=CHECKPOINT_STEPS)


def is_over(stop_file: str, step: int) -> bool:
    """True if the members stop before this step; fails if they should have stopped already."""
    stop = Path(stop_file) if stop_file else None
    if stop is None or not stop.exists():
        return False
    at_step = int(stop.read_text())
    assert step <= at_step, "the test decided too late"
    return step == at_step


PLACES = ("forward", "backward", "optimizer", "hook", "gradient")
"""Points of a step at which a fault can be planted."""


class Planted(Exception):
    """A bug in a user's code."""


class RaisesInBackward(torch.autograd.Function):
    """Identity whose backward pass raises."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise Planted("backward")


class Explodes(torch.autograd.Function):
    """Identity whose gradients are not finite."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


def plant(place: str, optimizer: torch.optim.Optimizer) -> None:
    """Make this process fail at this point of the next step, whichever part of the model it
    holds."""

    def bang(*_: Any) -> None:
        raise Planted(place)

    def passing(function: type[torch.autograd.Function]) -> None:
        nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: (
                function.apply(output) if isinstance(output, Tensor) else output  # type: ignore[no-untyped-call]
            )
        )

    if place == "forward":
        nn.modules.module.register_module_forward_pre_hook(bang)
    elif place == "backward":
        passing(RaisesInBackward)
    elif place == "gradient":
        passing(Explodes)
    elif place == "optimizer":
        optimizer.register_step_pre_hook(bang)
    elif place == "hook":
        optimizer.register_step_post_hook(bang)
    else:
        raise AssertionError(place)


class CountingCompiler:
    """Compiler that counts graphs and runs them unchanged."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward


def train(report: Report, run: Elastic) -> None:
    """Train until the step in `stop_file`, and report the whole model."""
    model, optimizer = build(run.optimizer, run.model)
    task = MODELS[run.model]
    fault, compiler = run.fault, CountingCompiler()
    if run.compiled == "before":
        model = torch.compile(model, backend=compiler)  # type: ignore[assignment]
    with session_of(run) as session:
        model, optimizer = session.distribute(
            model, optimizer, strategy=strategy_of(run), checkpoints=checkpoints_of(run)
        )
        called: Any = model
        if run.compiled == "behind":
            called = torch.compile(model, backend=compiler)
        last_share = noted_share(session)
        batches = session.batches(task.data(), global_batch_size=run.batch_size, epochs=EPOCHS)
        for batch in batches:
            if is_over(run.stop_file, batch.step):
                break
            tried = {"step": batch.step, "generation": session.generation}
            share = last_share()
            if fault and batch.step >= run.at_step:
                plant(fault, optimizer)
                fault = ""
            report("tried", **tried, share=share, epoch=batch.epoch, indices=batch.indices)
            with session.step() as step:
                if run.compiled == "behind":
                    session.backward(task.loss(called(batch.inputs), batch.targets))
                else:
                    session.forward_backward(batch, task.loss)
            if step.committed:
                report("committed", **tried, graphs=compiler.num_graphs)
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        report("finished", step=session.step_number, weights=weights)


def one_process(run: Elastic, num_steps: int) -> dict[str, Tensor]:
    """Return the model after the same steps in one process."""
    model, optimizer = build(run.optimizer, run.model)
    task = MODELS[run.model]
    loader = Loader(task.data(), order(run.batch_size))
    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def noted_share(session: Session) -> Callable[[], tuple[int, int]]:
    """Return a function that returns the share of the data of which the session made its last
    batch."""
    strategy: Any = session.strategy
    data_share, shares = strategy.data_share, list[tuple[int, int]]()

    def noted(generation: Generation) -> tuple[int, int]:
        shares.append(data_share(generation))
        return shares[-1]

    strategy.data_share = noted
    return lambda: shares[-1]


ENDING_EPOCHS = 2


def copy_when_waited_for() -> None:
    """Delay this process's copies of its state until its trainer waits for them."""
    waited = threading.Event()
    copy, flush = PeerCopies._copy, PeerCopies.flush

    def late(copies: PeerCopies, *arguments: Any) -> float:
        waited.wait()
        return copy(copies, *arguments)

    def waiting(copies: PeerCopies) -> None:
        if copies._busy:
            waited.set()
        flush(copies)

    PeerCopies._copy = late  # type: ignore[method-assign]
    PeerCopies.flush = waiting  # type: ignore[method-assign]


def train_to_the_end(report: Report, run: Elastic) -> None:
    """Train all batches of two epochs, then report the whole model. `fault`: point at which this
    member is killed."""
    model, optimizer = build(run.optimizer, run.model)
    task = MODELS[run.model]
    if run.fault == "in the first step":
        copy_when_waited_for()
    with session_of(run) as session:
        model, optimizer = session.distribute(
            model, optimizer, strategy=strategy_of(run), checkpoints=checkpoints_of(run)
        )
        batches = session.batches(
            task.data(), global_batch_size=run.batch_size, epochs=ENDING_EPOCHS
        )
        for batch in batches:
            if run.fault == "in the first step":
                os.kill(os.getpid(), signal.SIGKILL)
            with session.step():
                session.forward_backward(batch, task.loss)
        if run.fault == "behind the last batch":
            os.kill(os.getpid(), signal.SIGKILL)
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        report("finished", step=session.step_number, weights=weights)
