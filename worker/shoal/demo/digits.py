"""A worker of the demo: `python -m shoal.demo.digits`, in the environment that `shoal run` sets.

It writes an audit of every step and, at the end, the accuracy of its weights on the held-out
images.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.demo.data import Digits, load

LEARNING_RATE = 1e-3
MODEL_SEED = 0


def new_model() -> nn.Sequential:
    """Make a network of 38,282 parameters, with the same weights in every worker."""
    torch.manual_seed(MODEL_SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(options: argparse.Namespace, digits: Digits, directory: Path | None) -> None:
    """Train to the end of the last epoch, and write the result."""
    base = new_model()
    adam = torch.optim.Adam(base.parameters(), lr=LEARNING_RATE)
    with shoal.join() as session, Audit(directory, session.member_id) as audit:
        model, _ = session.distribute(base, adam, strategy=options.strategy)
        batches = session.batches(
            digits.train, global_batch_size=options.global_batch, epochs=options.epochs
        )
        for batch in batches:
            generation = session.generation
            audit.begin(generation, batch.step, batch.epoch, batch.indices)
            with session.step() as step:
                loss = cross_entropy(model(batch.inputs), batch.targets)
                session.backward(loss)
            if step.committed:
                audit.commit(generation, batch.step)
        result = {
            "member": session.member_id,
            "generation": session.generation,
            "steps": session.step_number,
            "test_accuracy": accuracy(base, digits),
            "weights_sha256": weights_digest(base),
        }
    if directory is not None:
        path = directory / f"{result['member']}.{os.getpid()}.result.json"
        path.write_text(json.dumps(result))
    print(f"test accuracy {result['test_accuracy']:.4f} after {result['steps']} steps", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the fraction of held-out images that are classified correctly."""
    predicted = model(digits.test_images).argmax(dim=1)
    return float((predicted == digits.test_digits).double().mean())


def weights_digest(model: nn.Module) -> str:
    """Return a hash of the weights, bit for bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Audit:
    """Record of the steps, from which the count of trained samples is checked.

    Each JSON line of `<member>.<pid>.jsonl` is one write, so a SIGKILL after it loses nothing.
    Without a directory nothing is written.
    """

    def __init__(self, directory: Path | None, member_id: str) -> None:
        self._path = directory / f"{member_id}.{os.getpid()}.jsonl" if directory else None
        self._descriptor = -1

    def __enter__(self) -> "Audit":
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._descriptor = os.open(self._path, flags, 0o644)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def begin(self, generation: int, step: int, epoch: int, positions: Sequence[int]) -> None:
        """Record a step before it can have any effect."""
        self._write("begin", generation, step, epoch=epoch, positions=list(positions))

    def commit(self, generation: int, step: int) -> None:
        """Record a committed step."""
        self._write("commit", generation, step)

    def _write(self, event: str, generation: int, step: int, **more: object) -> None:
        if self._descriptor < 0:
            return
        line = {
            "event": event,
            "at_s": time.monotonic(),
            "generation": generation,
            "step": step,
            **more,
        }
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m shoal.demo.digits", description=__doc__)
    parser.add_argument("--strategy", default="async-sgd", help="async-sgd (default) or ddp")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--global-batch", type=int, default=96)
    parser.add_argument("--data", type=Path, help="file of `shoal.demo.data` (default: sklearn's)")
    parser.add_argument("--directory", type=Path, help="for audit and result; none: not written")
    options = parser.parse_args(arguments)
    train(options, load(options.data), options.directory)


if __name__ == "__main__":
    main()
