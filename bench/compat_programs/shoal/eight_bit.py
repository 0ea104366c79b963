"""An Adam that keeps its moments in 8 bits, by blocks with a scale each, as bitsandbytes does."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shoal

NUM_SAMPLES, BATCH, EPOCHS, BLOCK = 1600, 32, 10, 64


class Adam8bit(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            num_blocks = -(-parameter.numel() // BLOCK)
            state["step"] = torch.zeros(())
            for name in ("mean", "square"):
                state[name] = torch.zeros(num_blocks, BLOCK, dtype=torch.int8)
                state[f"{name}_scale"] = torch.zeros(num_blocks, 1)
        state["step"] += 1
        mean = self.wide(state, "mean", parameter).lerp_(parameter.grad, 1 - beta1)
        square = self.wide(state, "square", parameter)
        square.lerp_(parameter.grad.square().sqrt(), 1 - beta2)
        self.keep(state, "mean", mean)
        self.keep(state, "square", square)
        size = group["lr"] / (1 - beta1 ** float(state["step"]))
        parameter.addcdiv_(
            mean, square / (1 - beta2 ** float(state["step"])) + group["eps"], value=-size
        )

    def wide(self, state, name, like):
        values = state[name] * state[f"{name}_scale"]
        return values.flatten()[: like.numel()].view_as(like)

    def keep(self, state, name, values):
        blocks = nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        scale = (blocks.abs().amax(1, keepdim=True) / 127).clamp_(min=1e-30)
        state[name].copy_((blocks / scale).round())
        state[f"{name}_scale"].copy_(scale)


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 5))
    optimizer = Adam8bit(model.parameters())
    loader = DataLoader(samples(), BATCH)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(loader, epochs=EPOCHS):
            with session.step():
                loss = cross_entropy(model(batch.inputs), batch.targets)
                session.backward(loss)
        if session.is_first:
            torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
