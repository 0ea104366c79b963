"""A transformer made on the meta device, as if it did not fit into one host's memory."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shoal

NUM_SAMPLES, VOCABULARY, LENGTH, WIDTH, BATCH, EPOCHS = 960, 61, 16, 32, 16, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(LENGTH, LENGTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.back(self.wide(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.layers(self.tokens(tokens)))


def samples():
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(1, 4, (NUM_SAMPLES, LENGTH + 1), generator=generator)
    drawn = drawn.cumsum(1) % VOCABULARY
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def main():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(), BATCH)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy="fsdp")
        for batch in session.batches(loader, epochs=EPOCHS):
            with session.step():
                loss = cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
                session.backward(loss)
        state = session.state_dict()
        if session.is_first:
            torch.save(state, sys.argv[1])


if __name__ == "__main__":
    main()
