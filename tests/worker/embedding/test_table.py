"""Embeddings on parameter servers: trained as torch trains them, on whichever servers the rows
are."""

import threading
from collections.abc import Callable

import pytest
import torch
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from torch import nn

from shoal.embedding.options import (
    Admission,
    Eviction,
    RowAdagrad,
    RowAdam,
    RowNormal,
    RowOptimizer,
    RowSGD,
)
from shoal.embedding.table import EmbeddingBagTable, EmbeddingTable
from shoal.membership.generation import Context, Generation
from shoal.strategies.asynchronous.async_diloco import AsyncDiLoCo
from shoal.strategies.asynchronous.async_sgd import AsyncSGD
from shoal_proto.errors import InvalidSpec, NonFiniteGradient, ProposalConflict
from shoal_proto.v1.membership_pb2 import GenerationRecord, Limits, Roster, RosterEntry

NUM_IDS, DIM = 40, 6
LIMITS = Limits(collective_s=20.0, bring_up_s=20.0)


class Model(nn.Module):
    """A model of an embedding, used twice a step, and a dense layer."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.items = embedding
        self.head = nn.Linear(DIM, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.items(ids).mean(dim=1))
        return scores + self.head(self.items(ids[:, :1]).squeeze(1))


def ids_of(step: int) -> torch.Tensor:
    """Ids of a step, with duplicates within a sample and between samples."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(NUM_IDS, (8, 5), generator=generator)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    targets = torch.randint(3, (8,), generator=generator)
    return nn.functional.cross_entropy(model(ids_of(step)), targets)


servers = servers_fixture(2)


def start(
    servers: ParameterServers, model: nn.Module, *, rank: int = 0, compression: str | None = None
) -> AsyncSGD:
    """Return a strategy that has entered the first generation; the dense part steps by SGD."""
    token = servers.admit(f"w{rank}", incarnation=f"i{rank}")
    strategy = AsyncSGD(compression=compression)
    strategy.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    strategy.attach(
        Context(job="job", coordinators=[servers.coordinator], token=lambda: token, limits=LIMITS)
    )
    entry = RosterEntry(member_id=f"w{rank}", rank=rank)
    record = GenerationRecord(roster=Roster(generation=1, entries=[entry]))
    strategy.enter(Generation(record=record, token=token))
    return strategy


def train(strategy: AsyncSGD, model: nn.Module, steps: range) -> None:
    for step in steps:
        strategy.begin_step()
        strategy.backward(loss_of(model, step), 1.0)
        strategy.end_step(lambda: None)


def weight_of(strategy: AsyncSGD, table: EmbeddingTable, num_ids: int = NUM_IDS) -> torch.Tensor:
    """Return all rows as they are now."""
    strategy.begin_step()
    with torch.no_grad():
        return table(torch.arange(num_ids)).clone()


OPTIMIZERS: dict[str, tuple[RowOptimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (RowSGD(lr=0.2), lambda p: torch.optim.SGD(p, lr=0.2)),
    "adagrad": (RowAdagrad(lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.2)),
    "sparse_adam": (
        RowAdam(lr=0.02, counts_rows=False),
        lambda p: torch.optim.SparseAdam(p, lr=0.02),
    ),
}


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_worker_trains_as_torch_alone(servers: ParameterServers, kind: str) -> None:
    """The table replaces nn.Embedding(sparse=True) with torch's own optimizer: rows and dense
    parameters are the same after every step."""
    optimizer, alone_optimizer = OPTIMIZERS[kind]
    torch.manual_seed(0)
    table = EmbeddingTable(
        DIM, optimizer=optimizer, init=RowNormal(std=0.5), num_embeddings=NUM_IDS
    )
    model = Model(table)
    strategy = start(servers, model)
    alone = Model(nn.Embedding(NUM_IDS, DIM, sparse=True))
    with torch.no_grad():
        alone.items.weight.copy_(weight_of(strategy, table))
    alone.head.load_state_dict(model.head.state_dict())
    dense = torch.optim.SGD(alone.head.parameters(), lr=0.1)
    sparse = alone_optimizer([alone.items.weight])
    for step in range(6):
        train(strategy, model, range(step, step + 1))
        dense.zero_grad()
        sparse.zero_grad()
        loss_of(alone, step).backward()
        dense.step()
        sparse.step()
        torch.testing.assert_close(weight_of(strategy, table), alone.items.weight.detach())
        torch.testing.assert_close(model.head.weight, alone.head.weight)
    assert strategy.metrics()["table_items_rows_made"] > 0
    strategy.close()


@pytest.mark.long
def test_gradients_are_those_of_autograd(servers: ParameterServers) -> None:
    """Gradients are checked numerically, through lookups with duplicates and padding."""
    table = EmbeddingTable(
        DIM, optimizer=RowSGD(lr=1.0), init=RowNormal(), dtype=torch.float64, padding_idx=3
    )
    model = Model(table).double()
    strategy = start(servers, model)
    before = weight_of(strategy, table)
    assert torch.equal(before[3], torch.zeros(DIM, dtype=torch.float64))
    ids = torch.tensor([[1, 2, 1, 3], [2, 3, 3, 5]])

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, weight, padding_idx=3).pow(3).sum()

    strategy.begin_step()
    strategy.backward(table(ids).pow(3).sum(), 1.0)
    strategy.end_step(lambda: None)
    step_taken = before - weight_of(strategy, table)
    weight = before.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, weight)
    (expected,) = torch.autograd.grad(loss(weight), weight)
    torch.testing.assert_close(step_taken, expected)
    strategy.close()


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_those_of_torch(servers: ParameterServers, mode: str) -> None:
    """Values and gradients are the same, with offsets and with rows of equal length."""
    bag = EmbeddingBagTable(DIM, mode=mode, optimizer=RowSGD(lr=1.0))
    model = nn.ModuleDict({"bag": bag, "head": nn.Linear(1, 1)})
    strategy = start(servers, model)
    before = weight_of_bag(strategy, bag)
    alone = nn.EmbeddingBag(NUM_IDS, DIM, mode=mode, _weight=before.clone())
    ids, offsets = torch.tensor([4, 7, 4, 9, 1, 0]), torch.tensor([0, 3, 3])
    strategy.begin_step()
    out = bag(ids, offsets)
    expected = alone(ids, offsets)
    assert torch.equal(out, expected)
    assert torch.equal(bag(ids.view(2, 3)), alone(ids.view(2, 3)))
    strategy.backward(out.pow(2).sum(), 1.0)
    expected.pow(2).sum().backward()
    strategy.end_step(lambda: None)
    assert alone.weight.grad is not None
    torch.testing.assert_close(weight_of_bag(strategy, bag), before - alone.weight.grad)
    strategy.close()


def weight_of_bag(strategy: AsyncSGD, bag: EmbeddingBagTable) -> torch.Tensor:
    strategy.begin_step()
    with torch.no_grad():
        return bag(torch.arange(NUM_IDS)[:, None]).clone()


@pytest.mark.long
def test_members_share_rows(servers: ParameterServers) -> None:
    """A member looks up what the other has pushed; the pushes of both count."""
    tables = [EmbeddingTable(DIM, optimizer=RowSGD(lr=1.0)) for _ in range(2)]
    models = [Model(table) for table in tables]
    one, two = (start(servers, model, rank=rank) for rank, model in enumerate(models))
    before = weight_of(one, tables[0])
    assert torch.equal(weight_of(two, tables[1]), before)
    for strategy, table in ((one, tables[0]), (two, tables[1])):
        strategy.begin_step()
        strategy.backward(table(torch.tensor([1, 2, 2**62])).sum(), 1.0)
        strategy.end_step(lambda: None)
    expected = before.clone()
    expected[1:3] -= 2.0
    assert torch.equal(weight_of(one, tables[0]), expected)
    assert one.metrics()["table_items_rows_made"] == 3
    assert two.metrics()["table_items_rows_applied"] == 3
    two.begin_step()
    two.backward(tables[1](torch.tensor([1])).sum(), 1.0)
    two.end_step(lambda: None)
    one.finish()
    with torch.no_grad():
        assert torch.equal(tables[0](torch.tensor([1])), expected[1:2] - 1.0)
    one.close()
    two.close()


@pytest.mark.long
def test_fates_of_rows_are_in_the_metrics(servers: ParameterServers) -> None:
    """Rows that are not admitted yet, and rows for which a full table has no space, are counted as
    such."""
    picky = EmbeddingTable(DIM, admission=Admission(min_pushes=2), name="picky")
    small = EmbeddingTable(
        DIM, eviction=Eviction(max_rows=4, oldest_when_full=False), num_shards=1, name="small"
    )
    model = nn.ModuleDict({"picky": picky, "small": small, "head": nn.Linear(1, 1)})
    strategy = start(servers, model)
    for _ in range(2):
        strategy.begin_step()
        ids = torch.arange(10)
        strategy.backward(picky(ids).sum() + small(ids).sum(), 1.0)
        strategy.end_step(lambda: None)
    metrics = strategy.metrics()
    assert metrics["table_picky_rows_not_admitted"] == metrics["table_picky_rows_made"] == 10
    assert metrics["table_small_rows_made"] == metrics["table_small_rows_applied"] == 4
    assert metrics["table_small_rows_full"] == 12
    strategy.close()


def lookups_of(strategy: AsyncSGD) -> list[int]:
    """Return a list to which the number of rows of each later lookup is appended."""
    client = strategy._tables._connected()
    asked: list[int] = []
    look_up = client.look_up

    def counting(wanted):  # type: ignore[no-untyped-def]
        asked.append(sum(len(ids) // 8 for ids in wanted.values()))
        return look_up(wanted)

    client.look_up = counting  # type: ignore[method-assign]
    return asked


@pytest.mark.sampled()
@pytest.mark.parametrize("bound", [0, 2])
def test_hot_rows_are_kept_within_the_bound(servers: ParameterServers, bound: int) -> None:
    """Rows are looked up at most once in a step. Over steps they are cached as long as the bound
    allows, in steps and in the updates that the worker knows of."""
    table = EmbeddingTable(DIM, optimizer=RowSGD(lr=1.0), staleness_bound=bound, num_shards=1)
    strategy = start(servers, Model(table))
    asked = lookups_of(strategy)
    ids = torch.arange(10)
    first = None
    for _ in range(4):
        strategy.begin_step()
        value = table(ids)
        assert torch.equal(table(ids), value)
        first = value.detach().clone() if first is None else first
        strategy.backward(value.sum(), 1.0)
        strategy.end_step(lambda: None)
    # With a bound of 2, the rows of the first step serve the next two as well.
    assert asked == ([10] * 4 if bound == 0 else [10, 10])
    assert first is not None
    for _ in range(bound):
        strategy.begin_step()
    torch.testing.assert_close(weight_of(strategy, table, 10), first - 4.0)
    asked.clear()
    strategy.finish()
    table(ids)
    assert asked == [10]
    strategy.close()


@pytest.mark.long
def test_prefetched_rows_are_not_looked_up_again(servers: ParameterServers) -> None:
    """Rows that were prefetched are not looked up again, and the result is the same."""
    table = EmbeddingTable(DIM, optimizer=RowSGD(lr=1.0), staleness_bound=1)
    strategy = start(servers, Model(table))
    before = weight_of(strategy, table)
    for _ in range(2):
        strategy.begin_step()
    asked = lookups_of(strategy)
    table.prefetch(torch.tensor([5, 6, 5]))
    for lookup in strategy._tables._ahead:
        lookup.result(20)
    assert torch.equal(table(torch.tensor([5, 6, 7])), before[5:8])
    assert asked == [2, 1]
    strategy.close()


def test_a_step_with_cached_rows_does_not_wait_for_a_prefetch(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the next step are on their way, perhaps from a server that fails over."""
    table = EmbeddingTable(DIM, optimizer=RowSGD(lr=1.0), staleness_bound=2)
    strategy = start(servers, Model(table))
    before = weight_of(strategy, table)
    client = strategy._tables._connected()
    is_called, goes_on = threading.Event(), threading.Event()
    look_up = client.look_up

    def slow(wanted):  # type: ignore[no-untyped-def]
        is_called.set()
        assert goes_on.wait(20), "the step waits for the prefetch"
        return look_up(wanted)

    monkeypatch.setattr(client, "look_up", slow)
    table.prefetch(torch.tensor([NUM_IDS + 1]))
    assert is_called.wait(20)
    strategy.begin_step()
    assert torch.equal(table(torch.tensor([5, 6])), before[5:7])
    assert strategy._tables.collect_gradients() == {}
    goes_on.set()
    for lookup in strategy._tables._ahead:
        lookup.result(20)
    strategy.close()


@pytest.mark.long
def test_a_gradient_that_is_not_finite_is_refused_with_its_row(servers: ParameterServers) -> None:
    """The error comes before anything of the step is sent."""
    table = EmbeddingTable(DIM, optimizer=RowSGD(lr=1.0))
    strategy = start(servers, Model(table))
    before = weight_of(strategy, table)
    strategy.begin_step()
    strategy.backward(
        (table(torch.tensor([4, 17])) * torch.tensor([[1.0], [float("inf")]])).sum(), 1.0
    )
    with pytest.raises(NonFiniteGradient) as refused:
        strategy.end_step(lambda: None)
    assert refused.value.details == {"parameter": "items", "row": "17"}
    assert torch.equal(weight_of(strategy, table), before)
    strategy.close()


@pytest.mark.parametrize(
    "setting, make",
    [
        ("staleness_bound", lambda: EmbeddingTable(DIM, staleness_bound=2**62)),
        ("seed", lambda: EmbeddingTable(DIM, seed=-1)),
        ("num_shards", lambda: EmbeddingTable(DIM, num_shards=2**33)),
        ("embedding_dim", lambda: EmbeddingTable(2**33)),
        ("max_rows", lambda: Eviction(max_rows=-1)),
        ("max_shard_bytes", lambda: Eviction(max_shard_bytes=2**64)),
        ("min_pushes", lambda: Admission(min_pushes=-1)),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(setting: str, make: Callable[[], object]) -> None:
    with pytest.raises(InvalidSpec, match=setting):
        make()


def test_no_row_is_pushed_if_a_dense_gradient_cannot_be_encoded(
    servers: ParameterServers,
) -> None:
    """Otherwise the rows would get the step, and get it again when its samples are trained on
    anew."""
    table = EmbeddingTable(DIM, optimizer=RowSGD(lr=1.0))
    strategy = start(servers, Model(table), compression="fp16")
    before = weight_of(strategy, table, 1)
    strategy.begin_step()
    model = strategy.module
    loss = table(torch.tensor([0])).sum() + 1e6 * model.head.bias.sum()
    strategy.backward(loss, 1.0)
    with pytest.raises(NonFiniteGradient):
        strategy.end_step(lambda: None)
    assert torch.equal(weight_of(strategy, table, 1), before)
    strategy.close()


@pytest.mark.long
def test_wrong_uses_of_a_table_are_refused(servers: ParameterServers) -> None:
    """Errors for ids out of range, ids of another dtype, and tables that conflict or are not
    connected."""
    table = EmbeddingTable(DIM, num_embeddings=10)
    with pytest.raises(InvalidSpec, match="not connected"):
        table(torch.tensor([1]))
    with pytest.raises(IndexError, match="id 10 is out of range"):
        table(torch.tensor([1, 10]))
    with pytest.raises(TypeError, match="float32"):
        table(torch.tensor([1.0]))
    for dim, options in ((0, {}), (-1, {}), (4, {"num_shards": 0}), (4, {"num_embeddings": 0})):
        with pytest.raises(InvalidSpec, match=r"is out of range; saw (0|-1)"):
            EmbeddingTable(dim, **options)
    with pytest.raises(InvalidSpec, match="padding_idx"):
        EmbeddingTable(DIM, num_embeddings=10, padding_idx=10)
    with pytest.raises(InvalidSpec, match="mode"):
        EmbeddingBagTable(DIM, mode="median")
    twins = nn.ModuleList([EmbeddingTable(DIM, name="t"), EmbeddingTable(DIM, name="t")])
    twins.head = nn.Linear(1, 1)
    with pytest.raises(InvalidSpec, match="one name"):
        AsyncSGD().distribute(twins, torch.optim.SGD(twins.parameters(), lr=0.1))
    one = start(servers, Model(EmbeddingTable(DIM)))
    with pytest.raises(ProposalConflict, match="tables differ from those"):
        start(servers, Model(EmbeddingTable(DIM, seed=2)), rank=1)
    one.close()


def test_a_strategy_that_does_not_push_each_step_refuses_tables() -> None:
    """The strategy would train without the gradients of the tables."""
    model = Model(EmbeddingTable(DIM))
    with pytest.raises(
        InvalidSpec, match="async-diloco does not train embedding tables; saw items"
    ):
        AsyncDiLoCo().distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
