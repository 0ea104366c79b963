"""Bodies of ranks with Keras models; the same bodies run in one process."""

import copy
import os

# Keras reads this variable when it is imported.
os.environ["KERAS_BACKEND"] = "torch"

from typing import Any

import keras
import numpy as np
import torch
from support.processes.worlds import Training
from torch import Tensor, nn

import shoal
from shoal.integrations.keras import GlobalBatches, KerasModule, distribute, whole_weights
from shoal.layouts.base import Layout, World

NUM_SAMPLES, BATCH = 21, 8
Fitted = tuple[dict[str, Tensor], int, int]


def samples() -> tuple[np.ndarray, np.ndarray]:
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_SAMPLES, 6, generator=drawn)
    return x.numpy(), torch.randn(NUM_SAMPLES, 3, generator=drawn).numpy()


def dense_model() -> Any:
    """Make a model with a pair of layers, a single one, and sizes that no rank count divides."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(7, activation="relu"),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def optimizer(name: str) -> Any:
    made = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
        "clipped": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.05),
        "accumulating": lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
    }[name]()
    if name == "adamw":
        made.exclude_from_weight_decay(var_names=["bias"])
    return made


def compiled(name: str) -> Any:
    model = dense_model()
    model.compile(optimizer=optimizer(name), loss="mse")
    return model


def weights(model: Any) -> dict[str, Tensor]:
    """Return weights by position, as paths depend on the layers made in the process before."""
    return {str(i): v.detach().clone() for i, v in enumerate(whole_weights(model).values())}


def fit_alone(name: str) -> dict[str, Tensor]:
    model = compiled(name)
    x, y = samples()
    model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    return {str(i): v.value.detach().clone() for i, v in enumerate(model.variables)}


def fit_each(names: list[str]) -> dict[str, list[Fitted]]:
    """Fit by optimizer: sharded, and split if that strategy supports the optimizer."""
    kinds = {
        name: [fit_sharded] if name == "clipped" else [fit_sharded, fit_split] for name in names
    }
    return {name: [fit(name) for fit in kinds[name]] for name in names}


def fit_sharded(name: str) -> Fitted:
    """Return the weights, the size of this rank's optimizer state, and that of the weights, in
    elements."""
    model = compiled(name)
    model, _ = shoal.distribute(model, model.optimizer, "zero2")
    x, y = samples()
    model.fit(GlobalBatches(x, y, global_batch_size=BATCH, shuffle=False), epochs=3, verbose=0)
    held = sum(int(np.prod(v.shape)) for v in model.optimizer.variables)
    whole = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    return weights(model), held, whole


def fit_split(name: str) -> Fitted:
    """Return the weights, the number of elements that this rank holds, and the number of all."""
    model = dense_model()
    whole = model.count_params()
    model.compile(optimizer=optimizer(name), loss="mse")
    model = distribute(model, "tensor")
    x, y = samples()
    model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    held = sum(v.value.numel() for v in model.trainable_variables)
    return weights(model), held, whole


def sharing_model() -> Any:
    """Make a model in which the first of two layers of a Sequential is also used by itself."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    shared = keras.layers.Dense(7, activation="relu")
    pair = keras.Sequential([shared, keras.layers.Dense(5)])
    return keras.Model(inputs, keras.layers.Concatenate()([pair(inputs), shared(inputs)]))


def outputs_alone() -> Tensor:
    outputs: Tensor = sharing_model()(torch.as_tensor(samples()[0])).detach()
    return outputs


def outputs_of_split() -> Tensor:
    model = sharing_model()
    model.compile(optimizer=optimizer("sgd"), loss="mse")
    outputs: Tensor = distribute(model, "tensor")(torch.as_tensor(samples()[0])).detach()
    return outputs


def embedded_model() -> Any:
    """Make a model with a split embedding, moving averages, and two layers that are not a pair."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(9, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(6),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3, activation="softmax"),
            keras.layers.Dense(3, kernel_regularizer="l2"),
        ]
    )


def words() -> tuple[np.ndarray, np.ndarray]:
    drawn = torch.Generator().manual_seed(8)
    x = torch.randint(9, (16, 4), generator=drawn, dtype=torch.int32)
    return x.numpy(), torch.randn(16, 3, generator=drawn).numpy()


def train_words(model: Any) -> dict[str, Tensor]:
    """Train in the user's own loop, with Keras's optimizer."""
    x, y = (torch.as_tensor(part) for part in words())
    for start in range(0, 16, 8):
        model.zero_grad()
        (
            model(x[start : start + 8], training=True) - y[start : start + 8]
        ).square().mean().backward()
        gradients = [variable.value.grad for variable in model.trainable_variables]
        model.optimizer.apply(gradients, model.trainable_variables)
    return weights(model)


def own_loop() -> dict[str, Tensor]:
    model = embedded_model()
    model.compile(optimizer=optimizer("sgd"), loss="mse")
    return train_words(distribute(model, "tensor"))


def own_loop_alone() -> dict[str, Tensor]:
    model = embedded_model()
    model.compile(optimizer=optimizer("sgd"), loss="mse")
    return train_words(model)


def torch_loop(strategy: str) -> dict[str, Tensor]:
    """Train in a plain torch loop after `shoal.distribute`, and give the weights back to the Keras
    model."""
    model = dense_model()
    optimizer = momentum(model.parameters())
    trained, optimizer = shoal.distribute(model, optimizer, strategy=strategy)
    index, count = shoal.data_share(trained)
    x, y = tensors()
    for start in range(0, 16, 8):
        own = slice(start + index, start + 8, count)
        squared(trained(x[own]), y[own]).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained.give_back(shoal.state_dict(trained))
    return {str(i): v.value.detach().clone() for i, v in enumerate(model.trainable_variables)}


def torch_loop_alone() -> dict[str, Tensor]:
    model = dense_model()
    optimizer = momentum(model.parameters())
    x, y = tensors()
    for start in range(0, 16, 8):
        optimizer.zero_grad()
        squared(model(x[start : start + 8]), y[start : start + 8]).backward()
        optimizer.step()
    return {str(i): v.value.detach().clone() for i, v in enumerate(model.trainable_variables)}


def shares_of_epochs() -> list[list[list[float]]]:
    """Return the samples of this rank's batches in each of two epochs."""
    numbers = np.arange(NUM_SAMPLES, dtype=np.float32)
    batches = GlobalBatches(numbers, numbers, global_batch_size=BATCH, seed=3)
    return [[x.tolist() for x, _ in batches] for _ in range(2)]


_PROTOTYPE = KerasModule(dense_model())


def as_module() -> nn.Module:
    """Copy a prototype, so that all models are the same: Keras has its own seeds."""
    return copy.deepcopy(_PROTOTYPE)


def split(model: nn.Module, world: World) -> Layout:
    return shoal.TensorParallel().lay_out(model, world)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def tensors() -> tuple[Tensor, Tensor]:
    x, y = samples()
    return torch.as_tensor(x), torch.as_tensor(y)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def training() -> Training:
    return Training(
        model=as_module, optimizer=momentum, data=tensors, loss=squared, num_steps=4, batch_size=7
    )
