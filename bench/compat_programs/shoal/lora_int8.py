"""Adapters of low rank beside weights that are frozen in 8 bits."""

import sys
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shoal

NUM_SAMPLES, WIDTH, RANK, BATCH, EPOCHS = 1600, 48, 4, 32, 10


class Int8Linear(nn.Module):
    """A linear layer with frozen weights in 8 bits, and a trained adapter."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        frozen = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(frozen, requires_grad=False)
        self.register_buffer("scale", scale)
        self.down = nn.Parameter(torch.randn(RANK, linear.in_features) / RANK)
        self.up = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x):
        frozen = self.weight.to(x.dtype) * self.scale
        return x @ frozen.T + (x @ self.down.T) @ self.up.T


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def main():
    torch.manual_seed(0)
    sizes = (16, WIDTH, WIDTH, 5)
    layers = [Int8Linear(nn.Linear(*pair)) for pair in pairwise(sizes)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loader = DataLoader(samples(), BATCH)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy="zero1")
        for batch in session.batches(loader, epochs=EPOCHS):
            with session.step():
                loss = cross_entropy(model(batch.inputs), batch.targets)
                session.backward(loss)
        if session.is_first:
            torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
