"""Lost shards whose loss an operator accepts: they start over, and nothing of the earlier
remains."""

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clusters.parameter_servers import ParameterServers, calls_to_shards

from shoal_client.connection.coordinators import Coordinators
from shoal_client.parameters.calls import ParameterCalls
from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import Gradients
from shoal_client.parameters.tables import TableClient
from shoal_client.progress.samples import SampleClient
from shoal_proto.errors import (
    InvalidSpec,
    NothingLost,
    StateLost,
    Unavailable,
    UnknownJob,
    UnknownShard,
)
from shoal_proto.pieces import OnlyPiece
from shoal_proto.row_hash import shard_of
from shoal_proto.status import from_rpc_error
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import PushReply
from shoal_proto.v1.shards_pb2 import (
    SAMPLES_AFTER_LOSS_ANEW,
    SAMPLES_AFTER_LOSS_KEEP,
    SAMPLES_AFTER_LOSS_UNSAID,
    AcceptLossReply,
    AcceptLossRequest,
    ParameterSpec,
    SamplesAfterLoss,
)
from shoal_proto.v1.shards_pb2_grpc import ShardsStub
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec
from shoal_server.coordinator.shards import controller
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent
from shoal_server.etcd.records import assignments as records
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.status.shards import ShardReader
from shoal_server.status.views import ShardsView

NUM_ELEMENTS = 10
SCHEMA = [
    ParameterSpec(name="v", shape=[NUM_ELEMENTS], dtype="float32"),
    ParameterSpec(name="w", shape=[NUM_ELEMENTS], dtype="float32", group=1),
]
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)] * 2)
LIMIT_S = 20.0
DURABLE = Acknowledgement.ACKNOWLEDGEMENT_DURABLE
TABLE = TableSpec(
    name="users",
    dim=2,
    dtype="float32",
    seed=3,
    initialiser=Initialiser(kind="constant", center=1.0),
    optimizer=RowOptimizer(kind="sgd", lr=1.0),
    num_shards=1,
)


def cluster(opened: ExitStack, num_servers: int) -> ParameterServers:
    """Start servers that keep one copy of each shard."""
    return opened.enter_context(ParameterServers(num_servers, copies=1))


def client(
    opened: ExitStack, servers: ParameterServers, name: str, *, durable: bool = False
) -> ParameterClient:
    token = servers.admit(name)
    level = DURABLE if durable else Acknowledgement.ACKNOWLEDGEMENT_DEFAULT
    made = ParameterClient(
        [servers.coordinator], lambda: token, timeout_s=LIMIT_S, acknowledgement=level
    )
    made.place(SCHEMA)
    return opened.enter_context(closing(made))


def filled(value: float) -> dict[str, memoryview]:
    return {spec.name: memoryview(array("f", [value]) * NUM_ELEMENTS).cast("B") for spec in SCHEMA}


def pulled(of: ParameterClient) -> list[float]:
    """Return the one value of each parameter."""
    values = filled(9.0)
    of.pull(values)
    return [value for data in values.values() for value in sorted(set(data.cast("f")))]


def wait_until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < give_up_s, "the condition does not hold in time"
        time.sleep(0.02)


def lose(servers: ParameterServers, name: str) -> None:
    """Stop the server, and start an empty process under its name."""
    servers.stop(name)
    servers.add(name)


def wait_lost(servers: ParameterServers, num_shards: int) -> None:
    wait_until(lambda: len(lost(servers)) == num_shards)


def lost(servers: ParameterServers) -> list[ShardAssignment]:
    return [each for each in assignments(servers) if each.content is ShardContent.LOST]


def assignments(servers: ParameterServers) -> Iterable[ShardAssignment]:
    entry = servers.run(records.read(servers.store, "job"))
    assert entry is not None
    return entry.assignments.shards


def accept(
    servers: ParameterServers,
    *shard_ids: int,
    job: str = "job",
    dry_run: bool = False,
    samples: SamplesAfterLoss.ValueType = SAMPLES_AFTER_LOSS_UNSAID,
) -> AcceptLossReply:
    request = AcceptLossRequest(
        job=job, shard_ids=shard_ids, by="ann@desk", dry_run=dry_run, samples=samples
    )
    with grpc.insecure_channel(servers.coordinator) as channel:
        try:
            return ShardsStub(channel).AcceptLoss(request, timeout=LIMIT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error, servers.coordinator) from None


def test_a_shard_whose_loss_is_accepted_starts_over_and_others_stay(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the versions and the server; the loss is accepted and recorded once. Another
    worker then creates this shard, and finds the other one as it was trained."""
    monkeypatch.setattr(controller, "MEASURE_EACH_S", 0.1)
    servers = cluster(opened, 2)
    first = client(opened, servers, "w0")
    first.create(SGD, filled(0.0))
    for _ in range(3):
        first.push(filled(-1.0))
    first.pull(filled(9.0))
    victim = first.fetch_map().shards[0]
    wait_until(lambda: victim.shard_id in known_versions(servers))
    lose(servers, victim.server_id)
    with pytest.raises(StateLost, match="shoal accept-loss job`") as raised:
        first.push(filled(-1.0))
    details = raised.value.details
    assert (details["shard"], details["servers"]) == (str(victim.shard_id), victim.server_id)
    assert int(details["at_least_version"]) <= int(details["version"]) == 4

    shown = read_view(servers)
    assert [(each.shard_id, each.servers) for each in shown.lost] == [
        (victim.shard_id, (victim.server_id,))
    ]
    with pytest.raises(InvalidSpec, match=r"1 of 2 shards would be given up.*`--samples keep`"):
        accept(servers)
    assert read_view(servers).lost
    (given_up,) = accept(servers, samples=SAMPLES_AFTER_LOSS_KEEP).shards
    assert (given_up.shard_id, given_up.by, given_up.before) == (
        victim.shard_id,
        "ann@desk",
        False,
    )
    (again,) = accept(servers).shards
    assert (again.accepted_unix_s, again.before) == (given_up.accepted_unix_s, True)
    shown = read_view(servers)
    assert not shown.lost
    assert [(each.shard_id, each.by) for each in shown.accepted_losses] == [
        (victim.shard_id, "ann@desk")
    ]
    kinds = [kind for job, kind, reason in servers.events if f"shard {victim.shard_id}" in reason]
    assert kinds == ["shards_lost", "loss_accepted"]

    second = client(opened, servers, "w1")
    assert second.create(SGD, filled(0.5)) == 1
    # The push that failed with the loss was applied to the other shard.
    kept = 1 - victim.group
    assert (pulled(second)[victim.group], pulled(second)[kept]) == (0.5, 4.0)
    second.push(filled(-1.0))
    assert (pulled(second)[victim.group], pulled(second)[kept]) == (1.5, 5.0)


def read_view(servers: ParameterServers) -> ShardsView:
    reader = ShardReader(servers.store)
    try:
        view = servers.run(reader.read("job"))
    finally:
        servers.run(reader.close())
    assert view is not None
    return view


def known_versions(servers: ParameterServers) -> set[int]:
    """Return the shards to which the coordinator knows of pushes."""
    known = servers.losses.versions("job")
    return {shard_id for shard_id, version in known.items() if version > 1}


@pytest.mark.parametrize("has_values", [True, False], ids=["on values", "on none"])
def test_a_retry_of_an_acknowledged_push_is_not_applied_to_the_new_shard(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, has_values: bool
) -> None:
    """The gradient of the repeated push was computed on lost values: the push is refused as
    stale."""
    servers = cluster(opened, 1)
    first = client(opened, servers, "w0")
    first.create(SGD, filled(0.0))
    if has_values:
        first.pull(filled(9.0))
    push, is_acknowledged, goes_on = ParameterCalls.push, threading.Event(), threading.Event()

    def without_answer(*given: Any) -> Iterator[PushReply | OnlyPiece]:
        monkeypatch.setattr(ParameterCalls, "push", push)
        yield from (each for each in push(*given) if isinstance(each, OnlyPiece))
        is_acknowledged.set()
        assert goes_on.wait(LIMIT_S)
        raise Unavailable("the answer was lost")

    monkeypatch.setattr(ParameterCalls, "push", without_answer)
    pool = opened.enter_context(ThreadPoolExecutor(1))
    pushing = pool.submit(first.push, filled(-1.0))
    assert is_acknowledged.wait(LIMIT_S)
    lose(servers, "ps-0")
    wait_lost(servers, 2)
    accept(servers)
    second = client(opened, servers, "w1")
    second.create(SGD, filled(0.5))
    goes_on.set()
    retried = pushing.result(LIMIT_S)
    assert retried.retries > 0 and retried.stale.keys() == {0, 1}
    assert pulled(second) == [0.5, 0.5]
    # A push computed on the current values is applied.
    first.pull(filled(9.0))
    assert not first.push(filled(-1.0)).stale
    assert pulled(second) == [1.5, 1.5]


@pytest.mark.long
def test_rows_have_initial_values_after_an_accepted_loss(opened: ExitStack) -> None:
    """Every call before that fails with the table and the shard. A push of rows that were looked up
    before the loss is not applied to the new shard."""
    servers = cluster(opened, 1)
    token = servers.admit("w0")
    dense = opened.enter_context(closing(ParameterClient([servers.coordinator], lambda: token)))
    dense.place([], [TABLE])
    tables = opened.enter_context(
        closing(TableClient([servers.coordinator], lambda: token, timeout_s=LIMIT_S))
    )
    tables.fetch_map()
    where = ("users", shard_of(7, 1))
    ids = array("q", [7]).tobytes()

    def looked_up() -> Gradients:
        rows = tables.look_up({where: ids})[where]
        return Gradients(
            ids=ids,
            births=bytes(rows.births),
            gradients=array("f", [-1.0, -1.0]).tobytes(),
            base_version=rows.version,
            base_epoch=rows.epoch,
            step=rows.step + 1,
            lr=1.0,
        )

    def values() -> list[float]:
        return list(memoryview(tables.look_up({where: ids})[where].values).cast("f"))

    acknowledged = looked_up()
    tables.push({where: acknowledged})
    assert values() == [2.0, 2.0]
    lose(servers, "ps-0")
    wait_lost(servers, 1)
    for call in (lambda: tables.push({where: acknowledged}), values):
        with pytest.raises(StateLost, match="rows of table users") as raised:
            call()
        assert (raised.value.details["table"], raised.value.details["shard"]) == ("users", "0")
    accept(servers)
    assert values() == [1.0, 1.0]
    assert tables.push({where: acknowledged}).stale.keys() == {where}
    assert values() == [1.0, 1.0]
    tables.push({where: looked_up()})
    assert values() == [2.0, 2.0]


def test_a_journal_that_returns_restores_only_shards_without_an_accepted_loss(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard whose server was away for too long is lost. If the server returns, its journal ends
    the loss, unless the loss was accepted."""
    monkeypatch.setattr(controller, "DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(controller, "MEASURE_EACH_S", 0.2)
    servers = cluster(opened, 0)
    journal = JournalConfig(directory=tmp_path)
    servers.add("ps-0", journal=journal, lease_ttl_s=0.5)
    first = client(opened, servers, "w0", durable=True)
    first.create(SGD, filled(0.0))
    first.push(filled(-1.0))
    servers.stop("ps-0")
    servers.add("ps-1")
    wait_lost(servers, 2)
    with pytest.raises(StateLost, match="start server ps-0 again with its journal"):
        first.push(filled(-1.0))
    accept(servers, 1, samples=SAMPLES_AFTER_LOSS_KEEP)
    second = client(opened, servers, "w1")
    create_only(second, 1, 0.5)
    servers.add("ps-0", journal=journal, lease_ttl_s=0.5)
    wait_until(lambda: not lost(servers))
    assert pulled(second) == [1.0, 0.5]
    (event,) = [reason for _, kind, reason in servers.events if kind == "shards_restored"]
    assert "shard 0" in event
    assert "journal of ps-0" in event


def test_a_worker_may_wait_for_a_lost_shard(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's push is applied, once, when the server returns with its journal."""
    monkeypatch.setattr(controller, "DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(controller, "MEASURE_EACH_S", 0.2)
    servers = cluster(opened, 0)
    journal = JournalConfig(directory=tmp_path)
    servers.add("ps-0", journal=journal, lease_ttl_s=0.5)
    first = client(opened, servers, "w0", durable=True)
    first.create(SGD, filled(0.0))
    first.push(filled(-1.0))
    first.wait_for_lost(60.0)
    pool = opened.enter_context(ThreadPoolExecutor(1))
    servers.stop("ps-0")
    servers.add("ps-1")
    wait_lost(servers, 2)
    waiting = pool.submit(first.push, filled(-1.0))
    servers.add("ps-0", journal=journal, lease_ttl_s=0.5)
    waiting.result(LIMIT_S)
    assert pulled(first) == [2.0, 2.0]


def test_a_wait_for_a_lost_shard_ends_when_its_loss_is_accepted(opened: ExitStack) -> None:
    """The push is refused as stale once another worker has created the shard."""
    servers = cluster(opened, 1)
    first = client(opened, servers, "w0")
    first.create(SGD, filled(0.0))
    first.push(filled(-1.0))
    first.wait_for_lost(60.0)
    pool = opened.enter_context(ThreadPoolExecutor(1))
    lose(servers, "ps-0")
    wait_lost(servers, 2)
    waiting = pool.submit(first.push, filled(-1.0))
    accept(servers)
    client(opened, servers, "w1").create(SGD, filled(0.5))
    assert waiting.result(LIMIT_S).stale.keys() == {0, 1}
    assert pulled(first) == [0.5, 0.5]


def create_only(of: ParameterClient, shard_id: int, value: float) -> None:
    """Create this shard alone, as `create` does for all."""
    with calls_to_shards({shard_id}):
        of.create(SGD, filled(value))


def test_only_losses_can_be_accepted(opened: ExitStack) -> None:
    """A wrong job, a wrong shard, and a shard that is not lost are refused, and nothing changes. A
    dry run changes nothing either."""
    servers = cluster(opened, 1)
    first = client(opened, servers, "w0")
    first.create(SGD, filled(0.0))
    before = assignments(servers)
    with pytest.raises(UnknownJob, match="no job 'joob'"):
        accept(servers, job="joob")
    with pytest.raises(InvalidSpec, match="name of a job"):
        accept(servers, job="a/b")
    with pytest.raises(NothingLost, match="job job has lost no shard"):
        accept(servers)
    with pytest.raises(NothingLost, match="shard 1 of job job is not lost"):
        accept(servers, 1)
    with pytest.raises(UnknownShard, match="no shard 7 in job job"):
        accept(servers, 1, 7)
    assert assignments(servers) == before
    lose(servers, "ps-0")
    wait_lost(servers, 2)
    assert [shard.shard_id for shard in accept(servers, dry_run=True).shards] == [0, 1]
    assert len(lost(servers)) == 2


def trained_on(servers: ParameterServers) -> int:
    """Return the number of completed samples in the job's ledger; -1 without a ledger."""
    counts = servers.run(servers.samples.counts("job"))
    return counts.completed if counts is not None else -1


def train_on(
    opened: ExitStack, servers: ParameterServers, name: str, num_samples: int
) -> SampleClient:
    """Return a member that has trained on so many of 100 samples and holds ten more."""
    token = servers.admit(name)
    coordinators = opened.enter_context(closing(Coordinators([servers.coordinator])))
    samples = SampleClient(coordinators, lambda: token, dataset_size=100, num_epochs=1)
    leased = samples.lease(num_samples).range
    assert leased is not None
    samples.lease(10, [leased])
    return samples


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (SAMPLES_AFTER_LOSS_UNSAID, SAMPLES_AFTER_LOSS_ANEW),
        (SAMPLES_AFTER_LOSS_KEEP, SAMPLES_AFTER_LOSS_KEEP),
    ],
    ids=["by default", "kept"],
)
def test_samples_are_leased_again_if_no_trained_shard_is_left(
    opened: ExitStack,
    choice: SamplesAfterLoss.ValueType,
    expected: SamplesAfterLoss.ValueType,
) -> None:
    """The ledger starts over by default once the losses of all shards are accepted, and late
    reports do not count. The operator may choose to keep it."""
    servers = cluster(opened, 1)
    first = client(opened, servers, "w0")
    first.create(SGD, filled(0.0))
    earlier = train_on(opened, servers, "w0", 80)
    assert trained_on(servers) == 80
    lose(servers, "ps-0")
    wait_lost(servers, 2)
    planned = accept(servers, dry_run=True, samples=choice)
    assert (planned.samples, planned.completed_samples, planned.total_samples) == (
        expected,
        80,
        100,
    )
    assert trained_on(servers) == 80
    assert accept(servers, samples=choice).samples == expected
    anew = expected == SAMPLES_AFTER_LOSS_ANEW
    assert trained_on(servers) == (-1 if anew else 80)
    assert {each.samples_anew for each in read_view(servers).accepted_losses} == {anew}
    (event,) = [reason for _, kind, reason in servers.events if kind == "loss_accepted"]
    message = "the job's samples start over" if anew else "the job's samples stay counted"
    assert f"{message} (80 of 100 samples were trained on)" in event

    earlier.report(earlier.held)
    token = servers.admit("w1")
    coordinators = opened.enter_context(closing(Coordinators([servers.coordinator])))
    samples = SampleClient(coordinators, lambda: token, dataset_size=100, num_epochs=1)
    num_samples, lease = 0, samples.lease(100)
    while lease.range is not None:
        num_samples += lease.range.stop - lease.range.start
        lease = samples.lease(100, [lease.range])
    assert lease.exhausted
    assert num_samples == (100 if anew else 10)
