"""A GAN: two models that learn in turn, each with an optimizer of its own."""

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import shoal

NUM_SAMPLES, NOISE, WIDTH, BATCH, EPOCHS = 1600, 4, 48, 32, 12


def network(inputs, outputs):
    layers = [nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def samples():
    """Points on a ring, and the noise that the generator starts from."""
    generator = torch.Generator().manual_seed(1)
    angle = 6.28 * torch.rand(NUM_SAMPLES, generator=generator)
    return TensorDataset(
        torch.stack([angle.cos(), angle.sin()], 1),
        torch.randn(NUM_SAMPLES, NOISE, generator=generator),
    )


def judged(logits, real):
    wanted = torch.full_like(logits, 1.0 if real else 0.0)
    return binary_cross_entropy_with_logits(logits, wanted)


def main():
    torch.manual_seed(0)
    maker, judge = network(NOISE, 2), network(2, 1)
    make_step = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judge_step = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loader = DataLoader(samples(), BATCH)
    with shoal.join() as session:
        (maker, judge), _ = session.distribute([maker, judge], [make_step, judge_step])
        for batch in session.batches(loader, epochs=EPOCHS):
            real, noise = batch.inputs, batch.targets
            with session.step():
                loss = judged(judge(real), True) + judged(judge(maker(noise).detach()), False)
                session.backward(loss, optimizer=judge_step)
                session.update(judge_step)
                loss = judged(judge(maker(noise)), True)
                session.backward(loss, optimizer=make_step)
        weights = {**maker.state_dict(prefix="0."), **judge.state_dict(prefix="1.")}
        if session.is_first:
            torch.save(weights, sys.argv[1])


if __name__ == "__main__":
    main()
