"""Attributes that a script sets on the modules of its model stay in the next generation, whose
modules are new. Buffers that no state holds may not change in a step."""

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import Run, enter, entered, generation_of, take_step
from support.models.seeding import seeded
from support.training import equality
from torch import Tensor, nn

from shoal.backends.in_memory.run import run_in_memory
from shoal.model.module_proxy import unwrap_proxy
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1 import membership_pb2 as pb


class Scaled(nn.Module):
    """A model that caches the positions needed so far, like a cache of angles."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 7)
        self.drop = nn.Dropout(0.5)
        self.outer = nn.Linear(7, 5)
        self.scale = 1.0
        self.num_cached = 0
        self.register_buffer("cached", torch.zeros(0), persistent=False)
        self.last: Tensor | None = None
        self.hidden = (torch.zeros(7), torch.zeros(7))
        self.fixed = (torch.zeros(7), "zeros")
        self.limits = torch.zeros(3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.num_cached < len(inputs):
            self.num_cached = len(inputs)
            self.register_buffer("cached", torch.ones(len(inputs)), persistent=False)
        positions = self.get_buffer("cached")[: len(inputs), None]
        self.last = torch.tanh(self.inner(inputs)) * self.scale
        self.hidden = (self.last[0].detach(), self.hidden[0] + 1.0)
        outputs: Tensor = self.outer(self.drop(self.last)) * positions
        return outputs


class Counting(nn.Module):
    """A model that counts its passes in a buffer outside of its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        passes = self.get_buffer("passes")
        passes += 1
        outputs: Tensor = self.inner(inputs) / passes
        return outputs


def of(kind: type[nn.Module]) -> Run:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        with seeded(seed):
            model = kind()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    return Run(build=build, loader=equality.loader, loss=equality.loss)


def through_two_generations(strategy_name: str) -> None:
    strategy = equality.made(strategy_name, 2)()
    assert isinstance(strategy, ShardedStrategy)
    _, model, _, share = enter(of(Scaled), strategy)
    batch = equality.loader().synchronous(0, *share)
    before = model.get_submodule("drop")
    take_step(strategy, batch, equality.loss)
    model.scale = 0.25
    before.p = 0.125
    model.limits.fill_(2.0)
    hidden = model.hidden
    strategy.abandon()
    names = ["m0", "m1"]
    kept = dict.fromkeys(names, pb.STATE_ACTION_KEEP)
    strategy.enter(generation_of(names, names[dist.get_rank()], 2, kept))
    after = model.get_submodule("drop")
    assert after is not before
    assert (after.p, model.scale) == (0.125, 0.25)
    assert model.limits.tolist() == [2.0] * 3
    torch.testing.assert_close(model.hidden, hidden, rtol=0.0, atol=0.0)
    assert model.hidden is not hidden
    assert model.fixed[1] == "zeros"
    assert model.num_cached == len(model.get_buffer("cached")) == len(batch.inputs)
    assert "cached" not in unwrap_proxy(model).state_dict()
    take_step(strategy, equality.loader().synchronous(1, *share), equality.loss)
    strategy.close()


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor"])
def test_attributes_set_on_modules_stay_in_the_next_generation(strategy: str) -> None:
    run_in_memory(through_two_generations, 2, strategy)


def one_step(strategy_name: str) -> None:
    strategy = equality.made(strategy_name, 2)()
    assert isinstance(strategy, ShardedStrategy)
    share = entered(of(Counting), strategy)
    with pytest.raises(InvalidSpec, match="saw passes"):
        take_step(strategy, equality.loader().synchronous(0, *share), equality.loss)
    assert not strategy.step
    strategy.close()


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor"])
def test_buffers_that_no_state_holds_may_not_change(strategy: str) -> None:
    run_in_memory(one_step, 2, strategy)
