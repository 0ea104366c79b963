"""Averages of compressed gradients over one to four ranks."""

import numpy as np
import pytest
import torch
from support.collectives import compression_ranks as bodies
from support.oracles.compression_twins import PowerSGD, Quantised, TopK, Twin, to_int8, to_sign

import shoal
from shoal.compression import COMPRESSIONS, find_compression

WORLD_SIZES = (2, 3, 4)


def twins(world_size: int) -> dict[str, Twin]:
    return {
        "int8": Quantised(world_size, to_int8, 16),
        "one-bit": Quantised(world_size, to_sign, 8),
        "top-k": TopK(world_size, 0.1),
        "powersgd": PowerSGD(world_size, 2),
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_averages_are_those_of_a_slow_twin_and_the_same_everywhere(world_size: int) -> None:
    """The twin loops over single numbers. Values are fp32, over several steps of error feedback."""
    every = shoal.run_in_memory(bodies.average_each, world_size)
    for name, twin in twins(world_size).items():
        for step in range(bodies.NUM_STEPS):
            ranks = [bodies.gradients(rank, step) for rank in range(world_size)]
            expected = twin.step([{n: t.numpy() for n, t in rank.items()} for rank in ranks])
            for seen in every:
                for parameter, values in expected.items():
                    np.testing.assert_allclose(
                        seen[name][step][parameter].numpy(), values, atol=1e-5, err_msg=name
                    )
    for name in (*twins(world_size), "fp16", "bf16"):
        for step in range(bodies.NUM_STEPS):
            assert len({bodies.checksum(seen[name][step]) for seen in every}) == 1, name
    for name, tolerance in (("fp16", 2e-3), ("bf16", 2e-2)):
        for step in range(bodies.NUM_STEPS):
            exact = bodies.mean_gradients(world_size, step)
            for parameter, mean in exact.items():
                error = (every[0][name][step][parameter] - mean).abs().max()
                assert float(error) < tolerance, name


def test_averages_of_complex_values_keep_both_parts() -> None:
    """Regression: the imaginary part was dropped."""

    def body() -> None:
        on = bodies.wire()
        values = {
            "a": torch.full((3,), complex(on.rank, 2)),
            "b": torch.tensor(complex(4, on.rank)),
        }
        found = find_compression("fp16").compressor().average(values, on)
        assert torch.equal(found["a"], torch.full((3,), complex(0.5, 2)))
        assert torch.equal(found["b"], torch.tensor(complex(4, 0.5)))

    shoal.run_in_memory(body, 2)


@pytest.mark.sampled()
@pytest.mark.parametrize("world_size", [1, *WORLD_SIZES])
def test_nothing_is_lost_though_the_order_of_parameters_changes(world_size: int) -> None:
    """Steps without new gradients send everything held back: the sums become those of the
    gradients."""
    every = shoal.run_in_memory(bodies.drain_each, world_size, 80)
    exact = dict.fromkeys(bodies.SHAPES, 0.0)
    for step in range(bodies.NUM_STEPS):
        mean = bodies.mean_gradients(world_size, step)
        exact = {name: exact[name] + mean[name] for name in bodies.SHAPES}
    for compression in bodies.LOSSY:
        total, _ = every[0][compression.name]
        for name, sums in exact.items():
            # the fraction of the exact sum that may still be held back
            tolerance = 0.02 if compression.name == "one-bit" else 1e-4
            error = float((total[name] - sums).abs().max())
            assert error < tolerance, (compression.name, name, error)
        assert len({tuple(seen[compression.name][1]) for seen in every}) == 1


@pytest.mark.parametrize("world_size", [2])
def test_a_failed_step_leaves_no_residual(world_size: int) -> None:
    for seen in shoal.run_in_memory(bodies.redo_each, world_size):
        for name, (failed, again, following) in seen.items():
            assert failed == again, name
            assert failed != following, name


def test_newcomers_get_the_same_averages_as_ranks_that_stayed() -> None:
    """Ranks that stayed have residuals and factors, newcomers have none."""
    every = shoal.run_in_memory(bodies.join_each, 3)
    for compression in bodies.LOSSY:
        assert len({tuple(seen[compression.name]) for seen in every}) == 1


def formula(name: str, world_size: int, num_values: int) -> int:
    """Return the bytes that a rank sends for a matrix of ten columns and a vector of seven
    values."""
    n, size = world_size, num_values + 7
    share = -(-size // n)
    if name in ("fp16", "bf16"):
        return 2 * (n - 1) * 2 * size // n
    if name == "top-k":
        return 8 * (n - 1) * -(-size // 100)
    if name == "powersgd":
        left, right = num_values // 10 * 4, 10 * 4
        return 2 * (n - 1) * 4 * (left + 7) // n + 2 * (n - 1) * 4 * right // n
    full, bits = (256, 8) if name == "int8" else (128, 1)
    block = min(full, -(-share // 8) * 8)
    blocks = -(-share // block)
    return 2 * (n - 1) * blocks * (4 + block * bits // 8)


@pytest.mark.parametrize("world_size", [1, *WORLD_SIZES])
def test_bytes_are_counted_as_the_formula_says(world_size: int) -> None:
    every = shoal.run_in_memory(bodies.count_each, world_size, 40_000)
    for seen in every:
        for name in COMPRESSIONS:
            sent, plain = seen[name]
            assert plain == 2 * (world_size - 1) * 4 * 40_007 // world_size
            assert sent == formula(name, world_size, 40_000), name
    if world_size == 4:
        ratios = {name: plain / sent for name, (sent, plain) in every[0].items()}
        assert ratios["int8"] > 3.8
        assert ratios["one-bit"] > 25
        assert ratios["top-k"] > 18


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_value_reaches_all_ranks(bad: float) -> None:
    for seen in shoal.run_in_memory(bodies.spread_each, 2, bad):
        assert seen == {name: [False, False] for name in COMPRESSIONS}
