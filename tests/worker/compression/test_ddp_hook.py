"""Compressed averages as a hook of DDP, on ranks in threads and in processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.collectives import compression_ranks as bodies
from support.processes.ranks import Ranks
from support.processes.worlds import run_on_gloo

import shoal
from shoal.compression import COMPRESSIONS

RATIOS = {"fp16": 1.9, "bf16": 1.9, "int8": 3.6, "one-bit": 20, "top-k": 40, "powersgd": 4}
POINTS = 0.04
"""Largest loss of accuracy, over 359 test images (one image is 0.003). After a hundred steps the
strongest compressions are a few images worse."""


def in_threads(world_size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    return shoal.run_in_memory(body, world_size, *arguments)


@pytest.mark.long
def test_digits_are_learned_as_well_and_for_fewer_bytes() -> None:
    """DDP changes its buckets after the first step."""
    every = in_threads(2, bodies.train_digits, 100, 359)
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


@pytest.mark.sampled()
@pytest.mark.parametrize(("run", "world_size"), [(in_threads, 2), (run_on_gloo, 3)])
def test_ranks_agree_though_layers_are_in_no_loss_or_in_that_of_some_ranks(
    run: Callable[..., list[Any]], world_size: int
) -> None:
    every = run(world_size, bodies.leave_out_each)
    for name in COMPRESSIONS:
        assert len({seen[name][1] for seen in every}) == 1, name
        for same, _, moved in (seen[name] for seen in every):
            assert same, name
            assert moved > 0, name


def test_complex_parameters_train_as_their_real_numbers_do() -> None:
    """Regression: residuals and averages covered half of the numbers; the other half of a low-rank
    average was uninitialised memory."""
    first, second = in_threads(2, bodies.train_complex_each)
    for name, (complex_weights, real_weights) in first.items():
        torch.testing.assert_close(complex_weights, real_weights, msg=name)
        assert torch.equal(complex_weights, second[name][0]), name


def test_a_non_finite_gradient_is_named_on_its_rank_and_fails_all_ranks() -> None:
    """Weights stay unchanged."""
    healthy, faulty = in_threads(2, bodies.fault_each)
    for name in ("none", *COMPRESSIONS):
        assert healthy[name] == ("GenerationBroken", ""), name
        assert faulty[name] == ("NonFiniteGradient", "1.bias"), name


def test_a_trainer_that_waits_for_a_lost_peer_can_be_freed(tmp_path: Path) -> None:
    """The trainer can be freed between two collectives of an average too, where DDP does not wait
    yet."""
    with Ranks() as ranks:
        crew = [
            ranks.start(bodies.stuck_for_good, str(tmp_path / "store"), rank) for rank in range(2)
        ]
        crew[1].expect("stops")
        assert "the test said so" in crew[0].expect("freed")["reason"]
