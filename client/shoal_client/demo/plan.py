"""Trainings of the demo, and the outcome that it reports of each."""

from dataclasses import dataclass

DATASET_SIZE = 1438
"""1,797 images without the 20 % held out for the test."""
MIN_ACCURACY = 0.95


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """A training of the demo."""

    strategy: str
    epochs: int
    global_batch: int
    """Samples in a step of all workers together; if asynchronous, in a step of one worker."""
    synchronous: bool
    num_workers: int = 3
    kill_at: float = 0.25
    """Fraction of the training before the kill."""
    timeout_s: float = 240.0

    @property
    def num_samples(self) -> int:
        return self.epochs * DATASET_SIZE

    @property
    def job(self) -> str:
        return f"digits-{self.strategy}"


PLANS = (
    DemoPlan(strategy="async-sgd", epochs=80, global_batch=96, synchronous=False),
    DemoPlan(strategy="ddp", epochs=80, global_batch=96, synchronous=True),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one training, with the fields of `shoal demo --json`."""

    strategy: str
    test_accuracy: float
    """Accuracy of the final weights on the held-out images."""
    steps: int
    """Committed steps; if asynchronous, applied pushes."""
    samples_per_s: float
    """Kill and recovery included."""
    recovery_s: float
    """Seconds from the SIGKILL to the next step that a surviving worker completed; if synchronous,
    the next step in the generation without the killed worker."""
    pause_s: float
    """See `audit.pause_s`."""
    samples_lost: int
    samples_repeated: int
    replacement_steps: int

    @property
    def good(self) -> bool:
        return self.test_accuracy >= MIN_ACCURACY
