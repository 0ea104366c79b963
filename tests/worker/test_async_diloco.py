"""Members that train alone for a round, and the outer step that servers take on each round."""

import copy
from contextlib import ExitStack, suppress

import pytest
import torch
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.members.async_members import loss_of, new_model, start, train
from torch import Tensor, nn

import shoal
from shoal.strategies.asynchronous.async_diloco import AsyncDiLoCo
from shoal.strategies.asynchronous.async_sgd import AsyncSGD
from shoal.strategies.outer_step import OuterStep
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, NonFiniteGradient, StalePush, UnsupportedOptimizer

EVERY_STEPS = 3


servers = servers_fixture(2)


def train_alone(model: nn.Module, rounds: list[range]) -> None:
    """Train as DiLoCo with one member: rounds of AdamW, and the outer step on each."""
    outer = OuterStep(lr=0.7, momentum=0.9, nesterov=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    velocities: dict[str, Tensor | None] = {}
    for steps in rounds:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                change, velocity = outer.change(p - before[name], velocities.get(name))
                velocities[name] = velocity
                p.copy_(before[name] + change)


def test_one_member_trains_as_diloco_alone(servers: ParameterServers) -> None:
    """Weights are equal to the last bit, with a shorter round at the end."""
    model = new_model()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    strategy = AsyncDiLoCo(every_steps=EVERY_STEPS)
    start(servers, model, optimizer, strategy=strategy)
    assert train(strategy, model, range(7)) == 6
    strategy.finish()
    train_alone(alone, [range(3), range(3, 6), range(6, 7)])
    for (name, seen), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(seen, wanted), name
    assert strategy.step == 7
    assert strategy.metrics()["pushes"] == 3.0
    strategy.close()


def test_samples_count_once_their_round_is_pushed(servers: ParameterServers) -> None:
    """Samples do not count before. A member without samples ends its round at once."""
    model = new_model()
    strategy = AsyncDiLoCo(every_steps=EVERY_STEPS)
    start(servers, model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    acknowledged: list[int] = []
    for step, expected in enumerate(([], [], [0, 1, 2], [0, 1, 2])):
        strategy.begin_step()
        strategy.backward(loss_of(model, step), 1.0)
        strategy.end_step(lambda step=step: acknowledged.append(step))  # type: ignore[misc]
        assert acknowledged == expected
    for _ in range(2):
        strategy.rest()
        assert acknowledged == [0, 1, 2, 3]
    assert set(servers.versions().values()) == {3}
    strategy.close()


@pytest.mark.parametrize("drains", [False, True])
def test_a_loop_without_batches_pushes_its_last_round(cluster: LocalCluster, drains: bool) -> None:
    """No other member takes the steps of that round again, also after a drain."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = AsyncDiLoCo(every_steps=1_000_000)
    with (
        suppress(shoal.Drained),
        shoal.join(f"own-loop-{drains}", coordinator=cluster.coordinator) as session,
    ):
        session.distribute(model, optimizer, strategy)
        while session.step_number < 2 or drains:
            with session.step():
                session.backward(loss_of(model, session.step_number))
            if session.step_number == 2 and drains:
                session.drain("the test asks for it")
    assert strategy.metrics()["pushes"] == 1.0


def test_a_round_that_a_shard_refuses_ends_the_member_and_does_not_count(
    opened: ExitStack,
) -> None:
    """The shards are lost during the round, given up, and created anew by another member."""
    servers = opened.enter_context(ParameterServers(1, copies=1))

    def started(rank: int) -> tuple[AsyncSGD, nn.Module]:
        model, strategy = new_model(), AsyncDiLoCo(every_steps=EVERY_STEPS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        opened.callback(start(servers, model, optimizer, rank=rank, strategy=strategy).close)
        return strategy, model

    started(0)
    strategy, model = started(1)
    assert train(strategy, model, range(1)) == 0
    servers.lose("ps-0")
    servers.accept_loss()
    successor, other = started(0)
    assert train(successor, other, range(3)) == 3
    train(strategy, model, range(1, 2))
    acknowledged: list[int] = []
    strategy.begin_step()
    strategy.backward(loss_of(model, 2), 1.0)
    with pytest.raises(
        StalePush, match=r"a round of 3 steps .* Start this worker again"
    ) as refused:
        strategy.end_step(lambda: acknowledged.append(2))
    assert not strategy.redoes(refused.value)
    assert acknowledged == []
    assert set(servers.versions().values()) == {2}


def test_rounds_of_all_members_count(servers: ParameterServers) -> None:
    """A member continues from values that include the others' pushes."""
    models = [new_model(rank) for rank in range(2)]
    strategies = []
    for rank, model in enumerate(models):
        strategy = AsyncDiLoCo(
            every_steps=EVERY_STEPS,
            outer_lr=0.5,
            outer_momentum=0.0,
            nesterov=False,
            staleness="none",
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start(servers, model, optimizer, rank=rank, strategy=strategy)
        strategies.append(strategy)
    begun = [p.detach().clone() for p in models[0].parameters()]
    local = copy.deepcopy(models)
    for model, steps in zip(local, (range(3), range(3, 6)), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    train(strategies[0], models[0], range(3))
    train(strategies[1], models[1], range(3, 6))
    for seen, before, one, other in zip(
        models[1].parameters(), begun, *(m.parameters() for m in local), strict=True
    ):
        expected = before + 0.5 * (one - before) + 0.5 * (other - before)
        torch.testing.assert_close(seen, expected)
    assert strategies[1].metrics()["staleness"] == 1.0
    for strategy in strategies:
        strategy.close()


def test_a_loss_that_rises_is_warned_of_after_few_rounds(servers: ParameterServers) -> None:
    """A run has few rounds of many steps each: steps count, not rounds."""
    model = new_model()
    strategy = AsyncDiLoCo(every_steps=100)
    start(servers, model, torch.optim.SGD(model.parameters(), lr=0.0), strategy=strategy)
    for step in range(250):
        strategy.begin_step()
        strategy.backward(loss_of(model, 0) * (1 + step), 1.0)
        strategy.end_step(lambda: None)
    assert "the loss has risen" in strategy.warning
    assert strategy.warning.endswith("after 200 of this member's steps")
    strategy.close()


def test_a_step_that_is_not_finite_stops_the_member(servers: ParameterServers) -> None:
    """The member's weights stay finite, and nothing of the step is ever pushed."""
    model = new_model()
    strategy = AsyncDiLoCo(every_steps=EVERY_STEPS)
    start(servers, model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    strategy.begin_step()
    strategy.backward(loss_of(model, 1) * float("nan"), 1.0)
    with pytest.raises(NonFiniteGradient):
        strategy.end_step(lambda: None)
    assert strategy.step == 0
    assert all(p.isfinite().all() for p in model.parameters())
    strategy.close()


@pytest.mark.parametrize(
    "options",
    [{"every_steps": 0}, {"staleness": "compensate"}, {"outer_momentum": 1.0}, {"outer_lr": 0.0}],
)
def test_options_of_async_diloco_out_of_range_are_refused(options: dict[str, object]) -> None:
    """The refusal comes at construction, with the value seen."""
    with pytest.raises(InvalidSpec, match="saw "):
        AsyncDiLoCo(**options)  # type: ignore[arg-type]


def test_an_optimizer_that_asks_for_losses_is_refused() -> None:
    """L-BFGS evaluates losses at points of its own choice, which is impossible here."""
    model = new_model()
    with pytest.raises(UnsupportedOptimizer):
        AsyncDiLoCo().distribute(model, torch.optim.LBFGS(model.parameters()))
