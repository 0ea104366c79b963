"""Keras: fit of a model with regularisers, with its own optimizer and a schedule."""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

NUM_SAMPLES, BATCH, EPOCHS = 800, 32, 12


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


def main():
    keras.config.set_floatx(str(torch.get_default_dtype()).removeprefix("torch."))
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(32, "relu", kernel_regularizer="l2", bias_regularizer="l2"),
            keras.layers.Dense(16, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(1),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(1e-3, EPOCHS * NUM_SAMPLES // BATCH)
    model.compile(optimizer=keras.optimizers.AdamW(rate, weight_decay=1e-2), loss="mse")
    inputs, targets = samples()
    model.fit(inputs, targets, BATCH, EPOCHS, shuffle=False, verbose=0)
    weights = {str(n): each.value.detach() for n, each in enumerate(model.trainable_variables)}
    torch.save(weights, sys.argv[1])


if __name__ == "__main__":
    main()
