"""Training with parameter servers: as torch.optim alone, and undisturbed by others' faults."""

import copy
import re
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.members.async_members import groups, loss_of, new_model, start, train
from torch import nn

from shoal.strategies.asynchronous import loss_watch
from shoal.strategies.asynchronous.async_sgd import AsyncSGD
from shoal_proto.errors import (
    DtypeMismatch,
    GenerationBroken,
    InvalidSpec,
    MemberDrained,
    NonFiniteGradient,
    NoServers,
    ProposalConflict,
    ShapeMismatch,
    ShardNotReady,
    ShoalError,
    UnsupportedOptimizer,
)
from shoal_proto.v1.membership_pb2 import Limits
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.replica import ShardReplica

servers = servers_fixture(2)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.1, weight_decay=1e-3, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, lr=0.01, amsgrad=True, **o),
    "adamw": lambda p, **o: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **o),
    "adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, **o),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_worker_trains_as_torch_alone(servers: ParameterServers, kind: str) -> None:
    """The result is bit for bit that of torch.optim with fused=True, with parameter groups, a
    learning-rate schedule and parameters without a gradient."""
    model = new_model()
    alone = copy.deepcopy(model)
    optimizer = OPTIMIZERS[kind](groups(model))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    strategy = start(servers, model, optimizer)
    reference = OPTIMIZERS[kind](groups(alone), fused=True)
    reference_schedule = torch.optim.lr_scheduler.ExponentialLR(reference, 0.9)
    for step in range(7):
        assert train(strategy, model, range(step, step + 1)) == 1
        schedule.step()
        reference.zero_grad()
        loss_of(alone, step).backward()  # type: ignore[no-untyped-call]
        reference.step()
        reference_schedule.step()
    assert strategy.step == 7
    assert strategy.metrics()["staleness"] == 0.0
    for (name, seen), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(seen, wanted), name
    strategy.close()


def test_a_member_waits_for_the_first_server() -> None:
    """The member logs the wait once, with its end, and trains once a server is there. Without one
    it ends with NoServers, and not before its limit."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    brief = Limits(collective_s=20.0, bring_up_s=20.0, join_s=0.1)
    patient = Limits(collective_s=20.0, bring_up_s=20.0, join_s=60.0)
    with ParameterServers(0) as servers, ThreadPoolExecutor(1) as pool, capture_logs() as logs:
        with pytest.raises(NoServers, match=r"none registered, for \d s.*--join-s"):
            start(servers, model, optimizer, limits=brief)
        logs.clear()
        starting = pool.submit(start, servers, model, optimizer, limits=patient)
        give_up_s = time.monotonic() + 20.0
        while not logs_named(logs, "waiting_for_parameter_servers"):
            assert time.monotonic() < give_up_s, logs
            time.sleep(0.02)
        ((name, (reason, _)),) = servers.shards.waiting("job").items()
        assert name == "w0"
        assert reason == "a parameter server to hold the shards: none registered"
        servers.add("ps-0")
        strategy = starting.result(20.0)
        assert train(strategy, model, range(2)) == 2
        assert not servers.shards.waiting("job")
        strategy.close()
    (waiting,) = logs_named(logs, "waiting_for_parameter_servers")
    assert waiting["limit_s"] == 60.0
    assert re.fullmatch(r"\d\d:\d\d:\d\d", waiting["until"])
    assert logs_named(logs, "parameter_servers_found")


def test_a_member_that_is_to_leave_stops_waiting_for_a_server() -> None:
    """SIGTERM arrives while there is no server yet: the wait ends with the membership, not at its
    limit."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patient = Limits(collective_s=20.0, bring_up_s=20.0, join_s=60.0)
    ended: list[MemberDrained] = []
    with ParameterServers(0) as servers, ThreadPoolExecutor(1) as pool, capture_logs() as logs:
        starting = pool.submit(
            start,
            *(servers, model, optimizer),
            limits=patient,
            ended=lambda: ended[-1] if ended else None,
        )
        while not logs_named(logs, "waiting_for_parameter_servers"):
            assert not starting.done()
            time.sleep(0.02)
        ended.append(MemberDrained("w0 leaves job job", seen="SIGTERM"))
        with pytest.raises(GenerationBroken):
            starting.result(20.0)


def test_the_log_of_losses_counts_updates_from_zero(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that trains alone makes one update a step; a new shard has version 1."""
    monkeypatch.setattr(loss_watch, "PATIENCE_UPDATES", 0)
    model = new_model()
    strategy = start(servers, model, torch.optim.SGD(model.parameters(), lr=0.0))
    with capture_logs() as logs:
        for step in range(70):
            strategy.begin_step()
            shown = 2.0 if step < 40 else 0.1
            strategy.backward(loss_of(model, step) * 0.0 + shown, 1.0)
            strategy.end_step(lambda: None)
            if line := logs_named(logs, "loss_falls"):
                assert line[0]["reason"] == f"after {strategy.step} updates"
                break
        else:
            pytest.fail(f"the loss was not seen to fall: {logs}")
    assert logs_named(logs, "loss_not_falling")
    strategy.close()


def logs_named(logs: Sequence[MutableMapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    return [line for line in logs if line["event"] == event]


def test_all_members_start_from_the_values_of_rank_0(servers: ParameterServers) -> None:
    """A member with other initial values takes those of the job."""
    first, second = new_model(0), new_model(1)
    one = start(servers, first, torch.optim.SGD(first.parameters(), lr=0.1))
    wanted = copy.deepcopy(first)
    two = start(servers, second, torch.optim.SGD(second.parameters(), lr=0.1), rank=1)
    for seen, value in zip(second.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(seen, value)
    assert one.has_state
    assert two.has_state
    one.close()
    two.close()


def test_another_member_creates_the_shards_if_rank_0_does_not(servers: ParameterServers) -> None:
    """Rank 0 may die before it has created anything: training starts all the same."""
    model = new_model()
    limits = Limits(collective_s=20.0, bring_up_s=2.0)
    strategy = start(
        servers, model, torch.optim.SGD(model.parameters(), lr=0.1), rank=1, limits=limits
    )
    assert train(strategy, model, range(2)) == 2
    strategy.close()


def test_members_train_side_by_side(servers: ParameterServers) -> None:
    """Pushes of all members count once each, and staleness is measured."""
    models = [new_model(i) for i in range(3)]
    strategies = [
        start(servers, model, torch.optim.SGD(model.parameters(), lr=0.05), rank=rank)
        for rank, model in enumerate(models)
    ]
    counted: list[int] = []

    def work(rank: int) -> None:
        counted.append(train(strategies[rank], models[rank], range(100 * rank, 100 * rank + 10)))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [10, 10, 10]
    train(strategies[0], models[0], range(1))
    assert set(servers.versions().values()) == {1 + 31}
    for strategy in strategies:
        strategy.close()


def test_a_member_that_gets_the_newest_values_waits_for_a_shard_that_is_being_restored(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members train on after an automatic restore, and during a failover."""
    model = new_model()
    strategy = start(servers, model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(strategy, model, range(1))
    loading, look_up = iter(range(2)), Catalog.look_up

    async def found(
        catalog: Catalog, job: str, wanted: Sequence[tuple[int, int]]
    ) -> list[ShardReplica | ShoalError]:
        answers = await look_up(catalog, job, wanted)
        if next(loading, None) is not None:
            answers[0] = ShardNotReady("a snapshot is being loaded")
        return answers

    monkeypatch.setattr(Catalog, "look_up", found)
    strategy.finish()
    assert next(loading, None) is None
    strategy.close()


def test_a_gradient_that_is_not_finite_stops_its_member_only(servers: ParameterServers) -> None:
    """The error names parameter and step, nothing of that step is applied, and others train on."""
    one, two = new_model(), new_model()
    bad = start(servers, one, torch.optim.SGD(one.parameters(), lr=0.1))
    good = start(servers, two, torch.optim.SGD(two.parameters(), lr=0.1), rank=1)
    train(bad, one, range(1))
    bad.begin_step()
    bad.backward(loss_of(one, 1), 1.0)
    assert one.head.bias.grad is not None
    one.head.bias.grad[3] = float("nan")
    with pytest.raises(NonFiniteGradient, match=r"head\.bias") as refused:
        bad.end_step(lambda: None)
    assert refused.value.details == {"parameter": "head.bias", "step": "1"}
    assert bad.step == 1
    assert train(good, two, range(2)) == 2
    assert all(torch.isfinite(p).all() for p in two.parameters())
    assert set(servers.versions().values()) == {4}
    assert train(bad, one, range(1, 2)) == 1
    bad.close()
    good.close()


def test_a_gradient_of_another_kind_is_refused(servers: ParameterServers) -> None:
    """A sparse gradient cannot be pushed; the error says what was expected."""
    model = nn.Module()
    model.rows = nn.Parameter(torch.ones(10, 4))
    strategy = start(servers, model, torch.optim.SGD(model.parameters(), lr=0.1))
    strategy.begin_step()
    found = nn.functional.embedding(torch.tensor([1, 2]), model.rows, sparse=True)
    strategy.backward(found.sum(), 1.0)
    with pytest.raises(DtypeMismatch, match=r"torch\.sparse_coo"):
        strategy.end_step(lambda: None)
    strategy.close()


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
def test_a_layer_of_sparse_gradients_is_refused_at_once(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """The error names the layer to use instead, and not an optimizer that refuses the gradients."""
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True))
    with pytest.raises(InvalidSpec, match=r"0; .*EmbeddingTable.*RowAdam\(counts_rows=False\)"):
        AsyncSGD().distribute(model, optimizer(model.parameters(), lr=0.1))


def test_parameters_of_any_layout_dtype_and_storage_train(servers: ParameterServers) -> None:
    """Layout, dtype and storage are the user's: channels_last, bfloat16, a scalar, moved data."""
    model = nn.Module()
    model.conv = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    model.short = nn.Parameter(torch.ones(33, dtype=torch.bfloat16))
    model.scalar = nn.Parameter(torch.tensor(2.0))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    before = model.conv.detach().clone()
    strategy = start(servers, model, torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(2):
        strategy.begin_step()
        strategy.backward(model.conv.sum() + model.short.sum() + model.scalar, 1.0)
        strategy.end_step(lambda: None)
        model.short.data = model.short.data.clone()
    assert torch.equal(model.conv.detach(), before - 0.5 - 0.5)
    assert torch.equal(model.short.detach(), torch.zeros(33, dtype=torch.bfloat16))
    assert model.scalar.item() == 1.0
    assert torch.equal(model.frozen, torch.ones(3))
    strategy.close()


def test_another_model_or_optimizer_is_refused(servers: ParameterServers) -> None:
    """The error says in what the model differs from the job's, whose values stay."""
    model = new_model()
    strategy = start(servers, model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = nn.Linear(3, 3)
    with pytest.raises(ProposalConflict, match=r"conv\.weight"):
        start(servers, other, torch.optim.SGD(other.parameters(), lr=0.1), rank=1)
    wide = new_model()
    wide.extra = nn.Linear(10, 11)
    with pytest.raises(ShapeMismatch, match=r"extra\.weight: float32 11x10"):
        start(servers, wide, torch.optim.SGD(wide.parameters(), lr=0.1), rank=2)
    assert train(strategy, model, range(1)) == 1
    strategy.close()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_schedule_that_changes_momentum_or_betas_is_refused(
    servers: ParameterServers, kind: str
) -> None:
    """Momentum and betas are not sent with pushes: the step before is the last that trains."""
    model = new_model()
    momentum = {"momentum": 0.9} if kind == "sgd" else {}
    optimizer = OPTIMIZERS[kind](model.parameters(), **momentum)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    strategy = start(servers, model, optimizer)
    assert train(strategy, model, range(1)) == 1
    schedule.step()
    with pytest.raises(InvalidSpec, match=r"(momentum|beta1) changed during training, in step 1"):
        train(strategy, model, range(1, 2))
    strategy.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_has_stepped_is_refused(kind: str) -> None:
    """The servers begin without its state; an optimizer that has not stepped may have some."""
    model = new_model()
    optimizer = OPTIMIZERS[kind](model.parameters(), **({"momentum": 0.9} if kind == "sgd" else {}))
    AsyncSGD().distribute(model, optimizer)
    loss_of(model, 1).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with pytest.raises(UnsupportedOptimizer, match="has taken steps already"):
        AsyncSGD().distribute(model, optimizer)


def test_optimizers_and_parameters_that_servers_cannot_handle_are_refused_at_once() -> None:
    """The refusal of an optimizer or parameter comes before anything is sent, with the kind seen
    and the kinds expected."""
    model = new_model()

    class Mine(torch.optim.SGD):
        pass

    for optimizer in (torch.optim.RMSprop(model.parameters()), Mine(model.parameters(), lr=0.1)):
        with pytest.raises(
            UnsupportedOptimizer, match=r"expected torch\.optim\.SGD, Adagrad, Adam or AdamW"
        ):
            AsyncSGD().distribute(model, optimizer)
    stray = nn.Parameter(torch.ones(3))
    with pytest.raises(InvalidSpec, match="not the model's"):
        AsyncSGD().distribute(model, torch.optim.SGD([*model.parameters(), stray], lr=0.1))
    whole = nn.Module()
    whole.ids = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    with pytest.raises(DtypeMismatch, match=r"torch\.int64"):
        AsyncSGD().distribute(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
