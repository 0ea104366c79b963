"""Script that bench/async_tradeoff.py runs under `shoal run`; its argument is a JSON object."""

import json
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import shoal

NUM_TRAINED = 1437
"""Training samples of the 1,797 digits; the others are held out."""
EPOCHS = 10
BATCH = 32


def network() -> nn.Module:
    """A small convolutional network for images of 8 x 8."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def samples() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels to train on, and held-out ones."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(5))
    trained, held_out = order[:NUM_TRAINED], order[NUM_TRAINED:]
    return (images[trained], labels[trained]), (images[held_out], labels[held_out])


def share_right(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of these digits that the model classifies correctly."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    asked = json.loads(sys.argv[1])
    trained, held_out = samples()
    torch.manual_seed(asked["seed"])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = shoal.AsyncSGD(**asked["options"])
    staleness, began_s = [], 0.0
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        batches = session.batches(
            trained,
            global_batch_size=BATCH,
            epochs=EPOCHS,
            seed=asked["seed"],
        )
        for batch in batches:
            began_s = began_s or time.monotonic()
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
            staleness.append(session.strategy.metrics()["staleness"])
        seconds = time.monotonic() - began_s
        figures = {
            "right": share_right(model, *held_out),
            "steps": len(staleness),
            "staleness": sum(staleness) / max(len(staleness), 1),
            "seconds": seconds,
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
