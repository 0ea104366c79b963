"""Differences between versions of published weights, compared with exclusive or and zstandard.

    make bench NAME=weight_differences
    .venv/bin/python bench/weight_differences.py --mb 256 --rounds 5

Simulates the effect of a step of Adam on bf16 weights: float32 master weights N(0, 0.028) change by
the learning rate times N(0, 1), clipped at 3. The weights before and after the change, rounded to
bf16, are the two versions. For each rate:

- `weights_difference_changed`: share of the weights whose bf16 value changed;
- `_over_full`: bytes of the difference over bytes of the full version;
- `_over_xor`: bytes of the difference over bytes of the exclusive or, compressed by zstandard at
  level 1, which other systems send;
- `_encode`, `_decode`: GB of the full version per second of CPU time on one core, best of the
  rounds; `_xor`: the same rate for encoding by exclusive or and zstandard.

Each result is compared with the target, bit for bit.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import zstandard
from rows import Row, publish

from shoal_difference import codec

RATE = 3e-7
"""Learning rate at which 0.9 % of the weights change."""
RATES = (3e-7, 1e-6, 3e-6, 1e-5, 1e-4)
T = TypeVar("T")


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def step(count: int, rate: float) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Return the weights before and after a step."""
    draw = np.random.default_rng(0)
    weights = draw.standard_normal(count, np.float32) * np.float32(0.028)
    update = np.clip(draw.standard_normal(count, np.float32), -3, 3) * np.float32(rate)
    return bf16(weights), bf16(weights + update)


def fastest(work: Callable[[], T], rounds: int) -> tuple[float, T]:
    """Return the CPU seconds of the best round, and the result."""
    best_s = float("inf")
    for _ in range(rounds):
        began_s = time.process_time()
        result = work()
        best_s = min(best_s, time.process_time() - began_s)
    return best_s, result


def measured(mb: int, rounds: int) -> Iterator[Row]:
    """Yield rows for each rate, with the rate in their names unless it is RATE."""
    compressor = zstandard.ZstdCompressor(level=1)
    for rate in RATES:
        before, after = step(mb * 2**19, rate)
        into = np.zeros_like(before)

        def encode() -> bytes:
            elements = [(2, before.nbytes)]  # noqa: B023 - called in this turn of the loop
            return b"".join(codec.encode(before, after, elements))  # noqa: B023

        encode_s, difference = fastest(encode, rounds)
        view = memoryview(into).cast("B")
        decode_s, _ = fastest(lambda: codec.apply(before, difference, view), rounds)  # noqa: B023
        assert np.array_equal(into, after)
        xor_s, xor = fastest(
            lambda: compressor.compress((before ^ after).tobytes()),  # noqa: B023
            rounds,
        )
        gigabytes, suffix = before.nbytes / 1e9, "" if rate == RATE else f"_rate_{rate:g}"
        for what, value, unit in (
            ("changed", float(np.mean(before != after)), ""),
            ("over_full", len(difference) / before.nbytes, ""),
            ("over_xor", len(difference) / len(xor), ""),
            ("encode", gigabytes / encode_s, "GB/s"),
            ("decode", gigabytes / decode_s, "GB/s"),
            ("xor", gigabytes / xor_s, "GB/s"),
        ):
            yield Row(
                metric=f"weights_difference_{what}{suffix}", value=value, unit=unit, runs=rounds
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    publish("weight_differences", [*measured(asked.mb, asked.rounds)])


if __name__ == "__main__":
    main()
