"""Options of compressions as users write them, and refusals."""

from collections.abc import Callable

import pytest
import torch.distributed as dist
from support.collectives.strategy_runs import enter, take_step
from support.training import equality

import shoal
from shoal.compression import COMPRESSIONS, find_compression
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import InvalidSpec


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_name_gives_the_compression_with_its_defaults(name: str) -> None:
    compression = find_compression(name)
    assert compression.name == name
    assert compression == find_compression(compression)
    assert str(compression).startswith(f"{name}(")


def test_the_text_that_members_compare_has_every_option() -> None:
    assert str(shoal.TopK(ratio=0.02)) == "top-k(ratio=0.02)"
    assert str(shoal.PowerSGD(rank=4)) == "powersgd(rank=4)"
    assert str(shoal.Int8(block=64)) == "int8(block=64)"
    assert str(shoal.OneBit(block=64)) == "one-bit(block=64)"
    assert str(shoal.FP16()) == "fp16()"
    assert str(shoal.BF16()) == "bf16()"


def test_an_unknown_name_is_refused_with_the_known_names() -> None:
    with pytest.raises(InvalidSpec, match=r"'top-q'.*'powersgd', 'top-k'"):
        find_compression("top-q")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (shoal.TopK, {"ratio": 0.0}),
        (shoal.TopK, {"ratio": 1.5}),
        (shoal.TopK, {"ratio": float("nan")}),
        (shoal.PowerSGD, {"rank": 0}),
        (shoal.Int8, {"block": 0}),
        (shoal.Int8, {"block": 12}),
        (shoal.OneBit, {"block": -8}),
    ],
)
def test_options_out_of_range_are_refused(kind: type, options: dict[str, float]) -> None:
    with pytest.raises(InvalidSpec, match=f"{next(iter(options))} is (out of range|not a number)"):
        kind(**options)


@pytest.mark.parametrize("kind", [shoal.DDP, shoal.Zero1])
def test_a_strategy_reports_the_bytes_of_its_gradients(
    kind: Callable[..., SynchronousStrategy],
) -> None:
    """fp16 sends each gradient of two members once, in two bytes a value."""
    num_values = sum(parameter.numel() for parameter in equality.build("sgd", 0)[0].parameters())

    def body() -> dict[str, float]:
        run = equality.run_of("sgd")
        strategy = kind(compression="fp16", find_unused_parameters=True)
        rank, loader = enter(run, strategy), run.loader()
        for step in range(3):
            take_step(strategy, loader.synchronous(step, *rank.share), run.loss)
        dist.barrier()
        strategy.close()
        return dict(strategy.metrics())

    for figures in shoal.run_in_memory(body, 2):
        assert figures["compression_ratio"] == 2.0
        assert figures["bytes_per_step"] == 2 * num_values
        assert figures["bytes_sent"] == 3 * 2 * num_values


def test_ddp_refuses_an_unknown_compression_at_once() -> None:
    with pytest.raises(InvalidSpec, match="there is no compression 'zip'"):
        shoal.DDP(compression="zip")
