"""Layers that some members leave out in a step: collectives of one group would be paired with those
of another, and trained into weights without an error."""

from typing import Any

import pytest
import torch.distributed as dist
from support.collectives.strategy_runs import Run, entered, take_step
from support.models.left_out_layers import refused_to
from support.models.seeding import seeded
from support.processes.worlds import run_on_gloo
from support.training import equality
from torch import Tensor, nn, tanh
from torch.optim import SGD, Optimizer

from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.layout.fsdp import FSDP, HSDP, Zero2
from shoal.strategies.layout.fsdp_tensor import FSDPTensor
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import InvalidSpec

REFUSAL = (
    r"different parameters in step 0.*experts\.1.*by m0"
    r"|different layers at the same time.*m0: at the outputs of experts\.0; m1: .* of experts\.1"
)


class Routed(nn.Module):
    """A model of two experts of one shape. It computes with one of them, chosen by the rank."""

    def __init__(self, *, by_rank: bool) -> None:
        super().__init__()
        self.by_rank = by_rank
        self.inner, self.outer = nn.Linear(6, 7), nn.Linear(7, 5)
        self.experts = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = tanh(self.inner(inputs))
        chosen = dist.get_rank() % 2 if self.by_rank else 0
        outputs: Tensor = self.outer(self.experts[chosen](hidden))
        return outputs


def one_step(strategy_name: str, by_rank: bool) -> None:
    def build(seed: int) -> tuple[nn.Module, Optimizer]:
        with seeded(seed):
            model = Routed(by_rank=by_rank)
        return model, SGD(model.parameters(), lr=0.05)

    strategy = equality.made(strategy_name, 2)()
    assert isinstance(strategy, SynchronousStrategy)
    share = entered(Run(build=build, loader=equality.loader, loss=equality.loss), strategy)
    batch = equality.loader().synchronous(0, *share)
    if by_rank:
        with pytest.raises(InvalidSpec, match=REFUSAL):
            take_step(strategy, batch, equality.loss)
    else:
        take_step(strategy, batch, equality.loss)
    assert strategy.step == (0 if by_rank else 1)
    strategy.close()


@pytest.mark.parametrize("by_rank", [True, False], ids=["one left out by each", "one by all"])
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "tensor", "hybrid"])
def test_layers_that_some_members_leave_out_are_refused(strategy: str, by_rank: bool) -> None:
    """All members refuse before any takes the step. An expert that all leave out is not a fault."""
    run_in_memory(one_step, 2, strategy, by_rank)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    "where", ["drop in a step", "end in a step", "drop in an evaluation", "end in an evaluation"]
)
@pytest.mark.parametrize(
    ("made", "world_size"),
    [
        ((FSDP, {}), 3),
        ((Zero2, {}), 2),
        ((HSDP, {"shard": 2}), 2),
        ((FSDPTensor, {"tensor": 2, "min_split_bytes": 1 << 20}), 4),
    ],
    ids=["fsdp", "zero2", "hsdp", "fsdp-tensor"],
)
def test_a_layer_that_one_member_leaves_out_is_refused_in_shared_memory(
    made: tuple[type[ShardedStrategy], dict[str, Any]], world_size: int, where: str
) -> None:
    """Members all refuse by name, in a step and in an evaluation. Regression: some ended with an
    InternalError; in an evaluation members waited forever, or computed with another layer's
    rows."""
    # Ranks that split layers together work on the same samples.
    ranks = (0, 1) if made[0] is FSDPTensor else (1,)
    for refusal in run_on_gloo(world_size, refused_to, ranks, made, where):
        assert "computed with different layers" in refusal
        assert "of the layer of " in refusal


@pytest.mark.sampled()
@pytest.mark.parametrize("where", ["drop in a step", "end in a step", "drop in an evaluation"])
@pytest.mark.parametrize(
    ("made", "world_size"),
    [
        ((FSDP, {}), 3),
        ((Zero2, {}), 2),
        ((FSDPTensor, {"tensor": 2, "min_split_bytes": 1 << 20}), 4),
    ],
    ids=["fsdp", "zero2", "fsdp-tensor"],
)
def test_a_layer_that_one_member_leaves_out_is_refused_over_gloo(
    made: tuple[type[ShardedStrategy], dict[str, Any]], world_size: int, where: str
) -> None:
    """Regression: Gloo terminated the process that received more than it expected, and the others
    trained on without it."""
    ranks = (0, 1) if made[0] is FSDPTensor else (1,)
    for refusal in run_on_gloo(world_size, refused_to, ranks, made, where, "tcp"):
        assert "computed with different layers" in refusal
        assert "of the layer of " in refusal


@pytest.mark.long
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_layer_that_one_copy_of_the_model_leaves_out_is_refused(transport: str) -> None:
    """The copy's ranks agree with each other, and average their sums with those of the other
    copy."""
    made = (HSDP, {"shard": 2})
    for refusal in run_on_gloo(4, refused_to, (2, 3), made, "drop in a step", transport):
        assert "computed with different layers" in refusal
