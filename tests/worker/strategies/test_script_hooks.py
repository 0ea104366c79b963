"""Hooks of a script on modules: a layout trains a copy of the model, which has the same hooks, and
so has the next generation's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import enter, generation_of, take_step
from support.members.thread_members import lone
from support.training import equality
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_client.local.cluster import LocalCluster
from shoal_proto.v1 import membership_pb2 as pb


class Saves:
    """A script's object that keeps outputs of layers."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs.append(output)

    def by_name(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs.append(output)


def save(outputs: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    outputs.append(output)


class Gate:
    """A hook that computes with another layer of the model."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.layer.get_parameter("weight").mean()


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor"])
def test_hooks_from_before_distribute_call_the_scripts_own_objects(
    cluster: LocalCluster, strategy: str
) -> None:
    """Regression: objects and bound methods were copied, and the script's lists stayed empty."""
    model, optimizer = build("sgd", "layers")
    saves, named, listed = Saves(), Saves(), list[Tensor]()
    model[1].register_forward_hook(saves)
    model[1].register_forward_hook(partial(named.by_name, "1"))
    model[3].register_forward_hook(partial(save, listed))
    with lone(cluster) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=24):
            with session.step():
                loss = cross_entropy(model(batch.inputs), batch.targets)
                kept = [saves.outputs.pop(), named.outputs.pop(), listed.pop()]
                session.backward(loss + sum(each.abs().mean() for each in kept))
                assert not [*saves.outputs, *named.outputs, *listed]
            if batch.step == 1:
                break


def test_a_hook_that_holds_a_layer_computes_with_the_copys_layer(cluster: LocalCluster) -> None:
    ended = []
    for strategy in ("ddp", "zero1"):
        model, optimizer = build("sgd", "layers")
        model[0].register_forward_hook(Gate(model[2]))
        with lone(cluster) as session:
            model, optimizer = session.distribute(model, optimizer, strategy=strategy)
            for batch in session.batches(data(), global_batch_size=24, epochs=1):
                with session.step():
                    session.backward(cross_entropy(model(batch.inputs), batch.targets))
            ended.append(session.state_dict())
    for name, tensor in ended[0].items():
        torch.testing.assert_close(ended[1][name], tensor)


def next_generation(strategy: ShardedStrategy, number: int) -> None:
    strategy.abandon()
    names = ["m0", "m1"]
    kept = dict.fromkeys(names, pb.STATE_ACTION_KEEP)
    strategy.enter(generation_of(names, names[dist.get_rank()], number, kept))


def through_generations(made: Callable[[], ShardedStrategy]) -> None:
    """Check the hooks on a layer, which each generation replaces."""
    strategy = made()
    run = equality.run_of("sgd")
    _, model, _, share = enter(run, strategy)
    calls: list[str] = []

    def called(step: int) -> list[str]:
        calls.clear()
        take_step(strategy, equality.loader().synchronous(step, *share), equality.loss)
        return sorted(set(calls))

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **__: calls.append(name)

    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))
    handles = [
        layer.register_forward_hook(note("forward"), with_kwargs=True),
        layer.register_forward_pre_hook(note("before")),
        layer.register_full_backward_hook(note("backward")),
    ]
    every = ["backward", "before", "forward"]
    assert called(0) == every
    next_generation(strategy, 2)
    assert model.get_submodule(name) is not layer
    assert called(1) == every
    handles[0].remove()
    assert called(2) == every[:2]
    next_generation(strategy, 3)
    assert called(3) == every[:2]
    handles[1].remove()
    handles[2].remove()
    assert called(4) == []
    next_generation(strategy, 4)
    assert called(5) == []
    strategy.close()


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor", "hybrid"])
def test_hooks_that_are_added_while_training_stay_until_they_are_removed(strategy: str) -> None:
    """Regression: the next generation lost them."""
    run_in_memory(through_generations, 2, equality.made(strategy, 2))


def evaluated_in_generations(made: Callable[[], ShardedStrategy]) -> list[int]:
    """Return the number of calls of a hook on the whole model in an evaluation, by generation."""
    strategy, calls = made(), list[str]()

    def hooked(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = equality.build("sgd", seed)
        model.register_forward_hook(lambda *_: calls.append("forward"))
        return model, optimizer

    _, model, *_ = enter(replace(equality.run_of("sgd"), build=hooked), strategy)
    counts = []
    for number in (2, 3, 4):
        calls.clear()
        with torch.no_grad():
            model(equality.samples()[0])
        counts.append(len(calls))
        next_generation(strategy, number)
    strategy.close()
    return counts


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor", "pipeline", "hybrid"])
def test_each_generation_calls_the_same_hooks_in_evaluation(strategy: str) -> None:
    """Regression: under pipeline, hooks on the whole model were called from the second generation
    on only."""
    for counts in run_in_memory(evaluated_in_generations, 2, equality.made(strategy, 2)):
        assert len(set(counts)) == 1
