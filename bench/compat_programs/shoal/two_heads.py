"""Two heads on one trunk, each with its own loss, forward pass and backward pass."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import shoal

NUM_SAMPLES, WIDTH, BATCH, EPOCHS = 1600, 48, 32, 10


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh())
        self.heads = nn.ModuleDict({"kind": nn.Linear(WIDTH, 5), "size": nn.Linear(WIDTH, 1)})

    def forward(self, x, head):
        return self.heads[head](self.trunk(x))


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def main():
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(), BATCH)
    with shoal.join() as session:
        strategy = shoal.DDP(find_unused_parameters=True)
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(loader, epochs=EPOCHS):
            inputs, labels = batch.inputs, batch.targets
            with session.step():
                session.backward(cross_entropy(model(inputs, "kind"), labels))
                sizes = inputs.norm(dim=1, keepdim=True)
                session.backward(mse_loss(model(inputs, "size"), sizes))
        if session.is_first:
            torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
