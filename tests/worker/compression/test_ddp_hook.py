"""Compressed averages as the hook of DDP, on real ranks."""

import compression_ranks as bodies
import pytest
from worlds import run_on_gloo

from shoal.compression import COMPRESSIONS

RATIOS = {"fp16": 1.9, "bf16": 1.9, "int8": 3.6, "one-bit": 25, "top-k": 40, "powersgd": 8}
POINTS = 0.03
"""Of 359 test images; one is 0.003."""


def test_digits_are_learned_as_well_and_for_fewer_bytes() -> None:
    """In buckets that DDP orders anew behind the first step."""
    every = run_on_gloo(2, bodies.train_digits, 80, 48)
    for first, second in zip(*(seen.values() for seen in every), strict=True):
        assert first[:2] == second[:2]
    plain, _, uncompressed = every[0].pop("none")
    assert plain > 0.9
    assert uncompressed["compression_ratio"] == 1
    for name, (accuracy, _, metrics) in every[0].items():
        assert accuracy > plain - POINTS, name
        assert metrics["compression_ratio"] > RATIOS[name], name
        ratio = uncompressed["bytes_per_step"] / metrics["bytes_per_step"]
        assert ratio == pytest.approx(metrics["compression_ratio"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_in_no_loss_or_in_that_of_some_ranks(world_size: int) -> None:
    every = run_on_gloo(world_size, bodies.leave_out_each)
    for name in COMPRESSIONS:
        assert len({seen[name][1] for seen in every}) == 1, name
        for same, _, moved in (seen[name] for seen in every):
            assert same, name
            assert moved > 0, name


def test_a_gradient_that_is_no_number_is_named_where_it_is_and_known_to_all() -> None:
    """And no weight has changed."""
    healthy, faulty = run_on_gloo(2, bodies.fault_each)
    for name in ("none", *COMPRESSIONS):
        assert healthy[name] == ("GenerationBroken", ""), name
        assert faulty[name] == ("NonFiniteGradient", "1.bias"), name
