"""Members that split layers compute each layer together: if one takes another layer than its peers,
they add up values of both, and no error of torch's would say so."""

from typing import Any

import pytest
from support.models.different_layers import refused_to
from support.processes.worlds import run_on_gloo

from shoal.strategies.layout.fsdp_tensor import FSDPTensor
from shoal.strategies.layout.hybrid import Hybrid
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal.strategies.layout.tensor import TensorParallel

STRATEGIES: list[tuple[tuple[type[ShardedStrategy], dict[str, Any]], int]] = [
    ((TensorParallel, {}), 2),
    ((Hybrid, {"pipeline": 1, "tensor": 2}), 4),
    ((FSDPTensor, {"tensor": 2}), 4),
]
IDS = ["tensor", "hybrid", "fsdp-tensor"]


@pytest.mark.sampled()
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("where", ["a step", "an evaluation"])
@pytest.mark.parametrize(("made", "world_size"), STRATEGIES, ids=IDS)
def test_layers_in_another_order_are_refused(
    made: tuple[type[ShardedStrategy], dict[str, Any]], world_size: int, where: str, transport: str
) -> None:
    """Members all refuse, before the step is taken. Regression: the sum was trained into the
    weights of both layers, and evaluations returned it as a result."""
    for refusal in run_on_gloo(world_size, refused_to, (1,), made, "order", where, transport):
        assert "split layers among them computed with different layers" in refusal
        assert "at the outputs of twins.0.2" in refusal
        assert "at the outputs of twins.1.2" in refusal


@pytest.mark.sampled()
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("made", "world_size"), STRATEGIES[:2], ids=IDS[:2])
def test_a_layer_that_is_not_split_and_is_left_out_by_one_is_refused(
    made: tuple[type[ShardedStrategy], dict[str, Any]], world_size: int, transport: str
) -> None:
    """Regression: Gloo terminated the process that received more gradients than it expected."""
    refusals = run_on_gloo(world_size, refused_to, (1,), made, "norm", "a step", transport)
    for refusal in refusals:
        assert "without a gradient of norm.weight" in refusal
        assert "done with its passes" in refusal
