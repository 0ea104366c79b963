"""A Fourier neural operator: its weights are complex numbers."""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import shoal

NUM_SAMPLES, POINTS, MODES, WIDTH, BATCH, EPOCHS = 640, 32, 8, 12, 16, 8


class Spectral(nn.Module):
    """Mixes channels by the lowest frequencies of a signal."""

    def __init__(self):
        super().__init__()
        drawn = torch.randn(2, WIDTH, WIDTH, MODES) / WIDTH
        self.weight = nn.Parameter(torch.complex(drawn[0], drawn[1]))

    def forward(self, x):
        low = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :MODES], self.weight)
        return torch.fft.irfft(low, n=POINTS)


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.lower = nn.Conv1d(1, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        self.spectral = nn.ModuleList(Spectral() for _ in range(3))
        self.local = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))

    def forward(self, x):
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = x + nn.functional.gelu(spectral(x) + local(x))
        return self.lower(x)


def samples():
    generator = torch.Generator().manual_seed(1)
    signals = torch.randn(NUM_SAMPLES, 1, POINTS, generator=generator).cumsum(-1) / 4
    return TensorDataset(signals, signals.roll(3, -1).sin())


def main():
    torch.manual_seed(0)
    model = Operator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(), BATCH)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(loader, epochs=EPOCHS):
            with session.step():
                loss = mse_loss(model(batch.inputs), batch.targets)
                session.backward(loss)
        if session.is_first:
            torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
