"""Versions with tables on real parameter servers."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial

import grpc
import numpy as np
import pytest
from history.joint_steps import PARAMETERS, StepClient, StepWork, compare_parameters, cut
from history.row_replay import compare, shards_of
from history.rows import Found, RowWorker
from history.twin import checksum
from history.values import Values
from structlog.testing import capture_logs
from support.clusters.parameter_servers import ParameterServers
from support.models.table_specs import OPTIMIZERS
from support.processes.served_process import awaited

from shoal.weights.rows import PublishedRows
from shoal.weights.subscription import Subscription, Weights
from shoal_client.weights.publisher import SeriesPublisher
from shoal_client.weights.reader import SeriesReader
from shoal_difference.codec import apply
from shoal_proto.errors import InvalidSpec, StaleEpoch, VersionGone
from shoal_proto.segments.sealed import SegmentWriter
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_proto.v1.snapshots_pb2 import FreezeReply
from shoal_proto.v1.tables_pb2 import Initialiser, TableSpec
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub, add_WeightSeriesServicer_to_server
from shoal_server.coordinator.publications.service import WeightSeriesService
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.coordinator.snapshots import taking
from shoal_server.coordinator.snapshots.taking import JobPosition, SnapshotTaker
from shoal_server.etcd import keys
from shoal_server.etcd.api import Put, created_at
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.serving.rpc import bind, new_server

TABLE = TableSpec(
    name="users",
    dim=3,
    dtype="float32",
    seed=5,
    initialiser=Initialiser(kind="normal", spread=1.0),
    optimizer=OPTIMIZERS["adam"],
    num_shards=6,
)
NUM_IDS, NUM_WORKERS, NUM_VERSIONS, LIMIT_S = 40, 2, 3, 60.0
SERIES = "job/model"


async def authorized(token: Token) -> None:
    """Accept any member."""


async def no_cursor(job: str) -> None:
    """Return no sample ledger, as of a job that leases no samples."""


@asynccontextmanager
async def published_by(servers: ParameterServers) -> AsyncIterator[str]:
    """Serve a coordinator's WeightSeries service for these servers, and return its address."""
    store = servers.store
    put = Put(keys.LEADER, json.dumps("one").encode())
    condition = created_at(keys.LEADER, (await store.transact((), (put,))).revision)
    leading = LeaderStore(store, lambda: (condition,), lambda reason: None)
    calls = ServerCalls()
    state = JobPosition(cursor=no_cursor, training=lambda job: {})
    service = WeightSeriesService(
        leading,
        calls,
        SnapshotTaker(leading, calls, state).publish,
        authorize=authorized,
        require_leading=lambda: None,
        is_job=lambda job: True,
        clock=lambda: 1_000_000.0,
    )
    server = new_server()
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    add_WeightSeriesServicer_to_server(service, server)
    await server.start()
    try:
        async with service.leading():
            yield address
    finally:
        await server.stop(None)
        await calls.close()


class Training:
    """A job whose members push to parameters and to a table in joint steps, and its series."""

    def __init__(self, opened: ExitStack, **servers: int) -> None:
        self.servers = opened.enter_context(ParameterServers(2, **servers))
        running = AsyncExitStack()
        self.address = self.servers.run(running.enter_async_context(published_by(self.servers)))
        opened.callback(lambda: self.servers.run(running.aclose()))
        self.work = StepWork(
            coordinators=[self.servers.coordinator],
            job="job",
            table=TABLE,
            num_ids=NUM_IDS,
            parameters=PARAMETERS,
        )
        self.member = self.client("member")
        opened.callback(self.member.close)
        self.layout: ShardMap = self.member.layout
        token = self.servers.admit("member")
        self.publisher = SeriesPublisher(
            [self.address],
            SERIES,
            lambda: pb.Publisher(token=token),
            options=pb.SeriesOptions(keep=2, copies=2),
        )
        opened.callback(self.publisher.close)
        self.num_published = 0

    def client(self, name: str) -> StepClient:
        token = self.servers.admit(name)
        return StepClient(self.work, name, lambda: token)

    def publish(self) -> pb.VersionRecord:
        self.num_published += 1
        writer = SegmentWriter(4)
        writer.buffer[:] = self.num_published.to_bytes(4, "little")
        layout = pb.Layout(
            tensors=[pb.TensorSpec(name="buffer", dtype="int32", shape=[1])],
            slices=[pb.Slice(tensor=0)],
            segment_bytes=[4],
        )
        return self.publisher.contribute(
            writer.seal(),
            layout,
            publication=self.num_published,
            step=self.num_published,
            tied={},
            timeout_s=LIMIT_S,
        )

    def subscription(
        self, name: str, *, tables: bool, may_be_local: bool | None = None
    ) -> Subscription:
        reader = self.reader(name, may_be_local=may_be_local)
        return Subscription(reader, SERIES, tables=tables)

    def reader(self, name: str, *, may_be_local: bool | None = None) -> SeriesReader:
        return SeriesReader(
            [self.address], SERIES, name, may_be_local=may_be_local, apply_difference=apply
        )

    def check(self, weights: Weights) -> int:
        """Check that the version is the serial replay of whole steps; return their number."""
        stamps = FreezeReply.FromString(weights.version.record.tables_cut).shards
        versions = {each.shard_id: each.version for each in stamps}
        kept, num_steps = cut(self.work, self.layout, versions)
        shards = {(s.table, s.table_index): s.shard_id for s in self.layout.shards if s.table}
        rows = rows_by_shard(weights.tables["users"])
        found = {
            where: Found(version=versions[shards[where]], ids=ids, births=births, values=values)
            for where, (ids, births, values) in rows.items()
        }
        assert set(shards_of(self.work)) <= found.keys()
        compare(kept, found, all_sightings=False)
        own = Values(self.layout)
        for name, buffer in own.buffers().items():
            buffer.cast("B")[:] = weights[name].contiguous().numpy().tobytes()
        dense = [shard for shard in self.layout.shards if not shard.table]
        compare_parameters(
            kept,
            dense,
            {s.shard_id: (versions[s.shard_id], checksum(own.of_shard(s.shard_id))) for s in dense},
        )
        return num_steps


def rows_by_shard(rows: PublishedRows) -> dict[tuple[str, int], tuple[bytes, bytes, bytes]]:
    found = {}
    for index, shard in rows.shards.items():
        at = shard.is_live.nonzero().view(-1)
        columns = (shard.ids[at], shard.births[at], shard.values[at])
        found["users", index] = tuple(each.contiguous().numpy().tobytes() for each in columns)
    return found  # type: ignore[return-value]


@pytest.mark.long
def test_a_version_has_whole_steps_of_parameters_and_rows(opened: ExitStack) -> None:
    """Members take steps meanwhile. A reader that applies each version's changes to its rows has
    the rows of that version."""
    training = Training(opened)
    workers = [
        RowWorker(training.work, name, seed=1, connect=partial(training.client, name))
        for name in (f"worker-{number}" for number in range(NUM_WORKERS))
    ]
    reader = opened.enter_context(training.subscription("reader", tables=True))
    versions: list[Weights] = []
    mirror: dict[int, tuple[float, ...]] = {}
    try:
        for worker in workers:
            worker.start()
        for _ in range(NUM_VERSIONS):
            await_more_steps(workers)
            fetched = reader.fetch(training.publish().number)
            changes = fetched.changes["users"]
            mirror.update(
                zip(changes.ids.tolist(), map(tuple, changes.values.tolist()), strict=True)
            )
            for gone in changes.removed.tolist():
                del mirror[gone]
            everything = fetched.tables["users"].all()
            assert mirror == dict(
                zip(everything.ids.tolist(), map(tuple, everything.values.tolist()), strict=True)
            )
            reader.installed(fetched)
            versions.append(fetched)
    finally:
        for worker in workers:
            worker.stop()
    steps = [training.check(each) for each in versions]
    assert steps == sorted(steps) and steps[0] > 0
    assert [each.version.number for each in versions] == list(range(1, NUM_VERSIONS + 1))


def await_more_steps(workers: list[RowWorker]) -> None:
    for worker in workers:
        wanted = len(worker.successes) + 2

        def is_there(worker: RowWorker = worker, wanted: int = wanted) -> bool:
            return len(worker.successes) >= wanted or not worker.runs

        awaited(is_there, LIMIT_S, f"{worker.name} takes steps")
        assert worker.runs, "the worker has failed"


def push(training: Training, ids: list[int], seed: int) -> None:
    training.member.push(ids, np.random.default_rng(seed))


@pytest.mark.long
def test_rows_of_a_leased_version_stay_and_those_of_a_dropped_one_are_gone(
    opened: ExitStack,
) -> None:
    """Readers without tables get buffers and parameters alone, and fetch fewer bytes."""
    training = Training(opened)
    push(training, list(range(NUM_IDS)), 1)
    first = training.publish()
    fetching = [training.reader(name, may_be_local=False) for name in ("plain", "reader")]
    plain = opened.enter_context(Subscription(fetching[0], SERIES))
    reader = opened.enter_context(Subscription(fetching[1], SERIES, tables=True))
    own = opened.enter_context(training.subscription("own", tables=True))
    before = own.fetch(first.number)
    fetching[1].lease(first.number)
    for seed in range(2, 5):
        push(training, list(range(NUM_IDS)), seed)
        training.publish()
    kept = reader.fetch(first.number)
    assert training.check(kept) == training.check(before) == 1
    names = set(plain.fetch())
    assert names == {"buffer", *(each.name for each in PARAMETERS)}
    assert fetching[0].fetched_bytes < fetching[1].fetched_bytes
    fetching[1].release(first.number)
    reader.installed(kept)
    push(training, [1], 5)
    training.publish()  # one version is kept beside the newest: no longer the first one
    awaited(lambda: first.number not in [v.number for v in plain.versions()], LIMIT_S, "dropped")
    with pytest.raises(VersionGone):
        own.fetch(first.number)


def test_a_replaced_publisher_gets_no_cut(opened: ExitStack) -> None:
    training = Training(opened)
    push(training, [1, 2], 1)
    training.publish()
    token = training.servers.admit("late")
    token.generation = 2
    late = SeriesPublisher([training.address], SERIES, lambda: pb.Publisher(token=token))
    opened.callback(late.close)
    late.begin(LIMIT_S)
    request = pb.CutTablesRequest(
        publisher=pb.Publisher(token=training.servers.admit("member")),
        series=SERIES,
        epoch=1,
        publication=2,
    )
    with (
        grpc.insecure_channel(training.address) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        WeightSeriesStub(channel).CutTables(request, timeout=LIMIT_S)
    assert isinstance(from_rpc_error(refused.value, "it"), StaleEpoch)


def test_more_shards_than_a_version_can_have_are_refused_before_the_cut(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers copy nothing, and pushes do not wait."""
    training = Training(opened)
    push(training, [1, 2], 1)
    num_shards = len(training.layout.shards)
    monkeypatch.setattr(taking, "MAX_WORLD", num_shards)
    with capture_logs() as logs, pytest.raises(InvalidSpec, match=f"saw {num_shards} shards"):
        training.publish()
    # The part of the publisher itself, on both servers.
    assert len([each for each in logs if each["event"] == "segment_held"]) <= 2
    monkeypatch.setattr(taking, "MAX_WORLD", num_shards + 1)
    assert training.publish().number == 1


def test_a_reader_with_tables_is_refused_a_series_without_them(opened: ExitStack) -> None:
    training = Training(opened)
    writer = SegmentWriter(4)
    layout = pb.Layout(
        tensors=[pb.TensorSpec(name="w", dtype="float32", shape=[1])],
        slices=[pb.Slice(tensor=0)],
        segment_bytes=[4],
    )
    training.publisher.contribute(writer.seal(), layout, publication=1, timeout_s=LIMIT_S)
    reader = opened.enter_context(training.subscription("reader", tables=True))
    with pytest.raises(InvalidSpec, match="has no tables"):
        reader.fetch()
