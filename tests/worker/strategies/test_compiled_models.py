"""Models that are compiled before they are distributed: compiled once, and trained as they are."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.collectives.strategy_runs import generation_of, over_the_run, take_step
from torch import Tensor, fx, nn

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.synchronous.ddp import DDP
from shoal.torch_private.compiling import compiled_in_place
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1 import membership_pb2 as pb

from . import test_equality as equality


class Counter:
    """A compiler that leaves graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward


def _graphs_by_generation() -> list[int]:
    """How many graphs were compiled by the end of each of three generations."""
    run, counter, strategy = equality.run_of("sgd"), Counter(), DDP(find_unused_parameters=True)
    over_the_run(strategy)
    model, optimizer = run.build(0)
    compiled = torch.compile(model, backend=counter)
    shown, _ = strategy.distribute(compiled_in_place(compiled), optimizer)
    assert list(shown.state_dict()) == list(model.state_dict())
    found = []
    loader = run.loader()
    for number in (1, 2, 3):
        states = {} if number == 1 else {"m0": pb.STATE_ACTION_KEEP}
        strategy.enter(generation_of(["m0"], "m0", number=number, states=states))
        for _ in range(3):
            take_step(strategy, loader.synchronous(strategy.step, 0, 1), run.loss)
        strategy.abandon()
        found.append(counter.num_graphs)
    strategy.close()
    return found


def test_a_later_generation_compiles_nothing() -> None:
    (found,) = run_in_memory(_graphs_by_generation, 1)
    assert found[0] > 0
    # The second one has the first batch of another size.
    assert found[1] <= found[0] + 1
    assert found[2] == found[1]


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "tensor"])
def test_strategies_that_train_copies_say_so(cluster: LocalCluster, strategy: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled: Any = torch.compile(model, backend=Counter())
    job = f"compiled-{secrets.token_hex(4)}"
    with (
        shoal.join(job, coordinator=cluster.coordinator) as session,
        pytest.raises(InvalidSpec, match=f"strategy {strategy} trains copies.*saw.*torch.compile"),
    ):
        session.distribute(compiled, optimizer, strategy=strategy)
