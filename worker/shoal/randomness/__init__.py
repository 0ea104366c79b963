"""Randomness that does not depend on membership: drawn from seed, step and sample.

A value is then the same on any number of ranks, in micro-batches, and in a repeated step.

    key_dropout(model)                                       # once, see shoal.randomness.dropout
    with at(seed=7, step=41, first=96, count=32):            # each step: samples 96 to 127 of it
        with part(0, 8): ...                                 # a micro-batch: samples 96 to 103

Set the samples in the backward pass, too: activation checkpointing repeats forward passes in it.

`F.dropout` and `torch.rand` draw from torch's generators: `seed_torch` makes their draws the same
if a step is repeated.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType

import torch

from shoal.step_context import PresentSamples, current, set_current

GAMMA = 0x9E3779B97F4A7C15
_LONG = 0xFFFFFFFFFFFFFFFF


class _SamplePoint:
    # A class: a @contextmanager is several times slower.

    def __init__(self, samples: PresentSamples | None) -> None:
        self._samples = samples

    def __enter__(self) -> None:
        self._before = set_samples(self._samples)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        set_samples(self._before)


def at(*, seed: int, step: int, first: int, count: int) -> AbstractContextManager[None]:
    """Set the samples within the block: `first` to `first + count - 1` of the global batch."""
    return _SamplePoint(PresentSamples(seed=seed, step=step, first=first, count=count))


def part(start: int, stop: int) -> AbstractContextManager[None]:
    """Restrict the block to [start, stop) of the current samples; no effect if none are set."""
    whole = present()
    if whole is None:
        return _SamplePoint(None)
    return _SamplePoint(replace(whole, first=whole.first + start, count=stop - start))


def set_samples(samples: PresentSamples | None) -> PresentSamples | None:
    """Set the samples that this thread computes on; return the samples that were set before."""
    context = current()
    set_current(replace(context, samples=samples))
    return context.samples


def mix(*numbers: int) -> int:
    """Mix several numbers into one seed below 2**63; neighbouring numbers give unrelated seeds."""
    mixed = 0
    for number in numbers:
        mixed = splitmix64(mixed + GAMMA + number)
    return mixed >> 1


def splitmix64(state: int) -> int:
    """Return the output of SplitMix64 for a state (Steele et al. 2014)."""
    mixed = state & _LONG
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _LONG
    return mixed ^ (mixed >> 31)


def seed_torch(seed: int, step: int, *part: int) -> None:
    """Seed torch's generators for a part of a step, such as one share of the batch: a repeated step
    draws the same, on the same number of members."""
    number = mix(seed, step, *part)
    # torch.manual_seed records the caller's stack before CUDA is initialised, which is slow.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


def generator_states() -> Sequence[torch.Tensor]:
    """Return the states of the generators that `seed_torch` seeds, for `restore_generators`."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return states


def restore_generators(states: Sequence[torch.Tensor]) -> None:
    """Set torch's generators to these states."""
    torch.default_generator.set_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def preserved() -> Iterator[None]:
    """Return a context after which torch's generators continue as if nothing was drawn in it."""
    states = generator_states()
    try:
        yield
    finally:
        restore_generators(states)


def sample_generator(index: int = 0, name: str = "") -> torch.Generator:
    """Return a CPU generator for the sample of this index among the current ones: the same draws
    for a sample in a step on any member. `name` separates several uses. Without samples: for sample
    `index`, step 0 and seed 0."""
    samples = present() or PresentSamples(seed=0, step=0, first=0, count=1)
    key = mix(samples.seed, samples.step, digest(name), samples.first + index)
    return torch.Generator().manual_seed(key)


def present() -> PresentSamples | None:
    """Return the samples that this thread computes on; None if none are set, as outside steps."""
    return current().samples


def digest(name: str) -> int:
    """Hash a name to 64 bits, for `mix`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
