"""Reinforcement learning with rollouts in separate processes: a bandit with eight arms per state.

    shoal up                                                             # in one terminal
    export SHOAL_COORDINATOR=127.0.0.1:7700
    python examples/rl_policy.py rollout                                 # in two more, or twenty
    shoal run -n 2 --job rl examples/rl_policy.py train

The trainer publishes its policy every few steps, and rollouts play with the newest version. They
are not members of the job: start, stop and kill them as you like. Their plays go back to the
trainer as files. Kill a worker: the other worker trains and publishes on, and no rollout notices.
Kill all workers: rollouts continue with the last version, and so do rollouts that start later. If
you start the training again, with `shoal run --fresh`, it publishes the next number.
"""

import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal

SERIES = "rl/policy"
NUM_STATES, NUM_ARMS, NUM_PLAYS, NUM_STEPS = 16, 8, 256, 400
BEST = torch.randint(NUM_ARMS, (NUM_STATES,), generator=torch.Generator().manual_seed(3))
PLAYED = Path(tempfile.gettempdir()) / "shoal-rl-plays"
"""Plays of the rollouts: a file for each round."""


def new_policy() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_STATES, 32), nn.Tanh(), nn.Linear(32, NUM_ARMS))


def logits(policy: nn.Module, states: Tensor) -> Tensor:
    found: Tensor = policy(nn.functional.one_hot(states, NUM_STATES).float())
    return found


def rollout(num_rounds: int) -> None:
    """Play with the newest version, and install the next one between two rounds."""
    policy = new_policy()
    PLAYED.mkdir(exist_ok=True)
    with shoal.subscribe(SERIES) as series:
        series.wait(timeout=300)
        for _ in range(num_rounds):
            newest = series.newest()
            is_new = newest is not None and newest.number > series.version
            if is_new:
                series.fetch("newest", into=policy)
            states = torch.randint(NUM_STATES, (NUM_PLAYS,))
            with torch.no_grad():
                arms = torch.distributions.Categorical(logits=logits(policy, states)).sample()
            rewards = (arms == BEST[states]).float()
            draft = PLAYED / f"{time.monotonic_ns()}-{os.getpid()}.draft"
            torch.save((states, arms, rewards), draft)
            draft.rename(draft.with_suffix(".pt"))
            if is_new:
                print(f"version {series.version}: reward {rewards.mean():.2f}", flush=True)


def plays() -> tuple[Tensor, Tensor, Tensor]:
    """States, arms and rewards of one of the last rounds."""
    while True:
        files = sorted(PLAYED.glob("*.pt"))
        for old in files[:-20]:
            old.unlink(missing_ok=True)
        # Another member may remove an old file meanwhile.
        with suppress(FileNotFoundError, IndexError):
            found: tuple[Tensor, Tensor, Tensor] = torch.load(random.choice(files[-4:]))
            return found
        time.sleep(0.05)


def train() -> None:
    """Train by REINFORCE on the rollouts' plays. Each member reads its own plays."""
    policy = new_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    with shoal.join() as session:
        policy, optimizer = session.distribute(policy, optimizer, strategy="ddp")
        series = session.series("policy", keep=4)
        steps = torch.zeros(NUM_STEPS * 8)
        for batch in session.batches(steps, global_batch_size=8, shuffle=False):
            if batch.step == 0:
                series.publish()
            states, arms, rewards = plays()
            with session.step() as step:
                chosen = logits(policy, states).log_softmax(1).gather(1, arms[:, None])
                session.backward(-(chosen.squeeze(1) * (rewards - 1 / NUM_ARMS)).mean())
            if step.committed and batch.step % 5 == 0:
                series.publish(metadata={"reward": f"{rewards.mean():.3f}"})
        version = series.publish().wait("committed", timeout=60)
        assert version is not None
        print(f"published version {version.number} of step {version.step}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rollout"]:
        rollout(int(sys.argv[2]) if len(sys.argv) > 2 else 100_000)
    else:
        train()
