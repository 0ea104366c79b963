"""Bodies of members that fit a Keras model in a session; their processes import this."""

import os

# Keras reads this variable when it is imported.
os.environ["KERAS_BACKEND"] = "torch"

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import torch
from support.processes.ranks import Report
from torch import Tensor

import shoal
from shoal.integrations.keras_session import SessionBatches
from shoal.strategies.base import Strategy

NUM_SAMPLES, BATCH, EPOCHS = 50, 12, 3
STEPS = 5 * EPOCHS
NEVER = -1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A member's part in a test."""

    coordinator: str
    job: str
    member_id: str
    strategy: str = "ddp"
    optimizer: str = "adamw"
    num_members: int = 1
    hold_at: int = NEVER
    """Step in the middle of which the member waits until `gate` is opened."""
    gate: str = ""


def data() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_SAMPLES, 6, generator=drawn)
    return x, torch.randn(NUM_SAMPLES, 3, generator=drawn)


def new_model(wide: int = 7, kind: Any = keras.Sequential) -> Any:
    """Make a model with a pair of layers, a single one, a regulariser, and sizes that no rank count
    divides."""
    keras.utils.set_random_seed(0)
    return kind(
        [
            keras.Input((6,)),
            keras.layers.Dense(wide, activation="relu"),
            keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(3),
        ]
    )


def new_optimizer(name: str) -> Any:
    made = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
        "nadam": lambda: keras.optimizers.Nadam(1e-2),
        "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
        "clipped": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.05),
        "scheduled": lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(1e-2, 4, 0.7)
        ),
    }[name]()
    if name == "adamw":
        made.exclude_from_weight_decay(var_names=["bias"])
    return made


def alone(optimizer: str) -> tuple[list[list[float]], float]:
    """Return weights and loss after the same training by `fit` in one process, without Shoal."""
    model = new_model()
    model.compile(optimizer=new_optimizer(optimizer), loss="mse")
    x, y = data()
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return weights_of(model), model.evaluate(x, y, verbose=0)


def weights_of(model: Any) -> list[list[float]]:
    """Return weights by position, as paths depend on the layers made in the process before."""
    return [v.value.detach().flatten().tolist() for v in model.trainable_variables]


class Counted(keras.callbacks.Callback):
    """Counts Keras's steps and epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.losses: list[float] = []
        self.shown: list[bool] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self.shown.append(not self.model.trainable_variables[0].value.is_meta)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.steps:
            self.losses.append(logs["loss"])


def fit(report: Report, run: Fit, **options: Any) -> None:
    """Run the script of docs/integrations.md, with a gate in it."""
    session = shoal.join(
        run.job,
        coordinator=run.coordinator,
        member_id=run.member_id,
        desired_members=run.num_members,
        max_members=run.num_members,
    )
    with session:
        model = new_model()

        def loss(targets: Tensor, outputs: Tensor) -> Tensor:
            # Keras also calls it with symbols, before the first generation.
            step = session.step_number if session.generation else NEVER
            if isinstance(outputs, Tensor) and session._steps.in_step:
                generation = session.generation
                report("tried", step=step, world_size=session.world_size, generation=generation)
                if step == run.hold_at and session.generation == 1:
                    report("holds")
                    Path(run.gate).read_bytes()
            return keras.losses.mean_squared_error(targets, outputs)

        model.compile(optimizer=new_optimizer(run.optimizer), loss=loss)
        # Eight members would be one shard group by default.
        strategy: str | Strategy = shoal.HSDP(shard=2) if run.strategy == "hsdp" else run.strategy
        session.distribute(model, model.optimizer, strategy=strategy)
        batches = SessionBatches(
            model, data(), global_batch_size=BATCH, epochs=EPOCHS, shuffle=False
        )
        counted = Counted()
        model.fit(batches, epochs=batches.epochs, verbose=0, callbacks=[counted], **options)
        report(
            "finished",
            weights=weights_of(model),
            loss=model.evaluate(*data(), verbose=0),
            step=session.step_number,
            steps=counted.steps,
            losses=counted.losses,
            shown=counted.shown,
            iterations=int(model.optimizer.iterations),
        )
