"""Shards that take long to copy: they get their copies, and pushes to other shards continue."""

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from structlog.testing import capture_logs
from support.clusters.one_tensor import OneTensor
from support.clusters.parameter_servers import ParameterServers

from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import Gradients
from shoal_client.parameters.tables import TableClient
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.etcd.records import assignments as records
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.shard import workers
from shoal_server.parameters.shard.dense import is_dense
from shoal_server.parameters.shard.versioned import AnyShard, VersionedShard
from shoal_server.parameters.tables.builder import ShardBuilder

PATIENCE = PeerTimeouts(beat_s=0.1, silence_s=0.5)
MODEL = OneTensor(1_500_000)
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
TABLE = TableSpec(
    name="users",
    dim=2,
    dtype="float32",
    seed=3,
    initialiser=Initialiser(kind="constant"),
    optimizer=RowOptimizer(kind="sgd", lr=1.0),
    num_shards=1,
)
IDS = array("q", [5, 6])
USERS = ("users", 0)
finish = ShardBuilder.finish
LIMIT_S = 30.0


class Job:
    """A job with dense shards and one table's shard on `ps-0`; each has one push."""

    def __init__(self, servers: ParameterServers) -> None:
        self._servers = servers
        token = servers.admit("w0")
        self.dense = ParameterClient([servers.coordinator], lambda: token, timeout_s=LIMIT_S)
        self.rows = TableClient([servers.coordinator], lambda: token, timeout_s=LIMIT_S)
        shards = self.dense.place(MODEL.schema, [TABLE]).shards
        self.dense_ids = [shard.shard_id for shard in shards]
        self.table_id = len(shards)
        self.num_pushes = 0
        self.dense.create(SGD, MODEL.filled(0.0))
        self.dense.pull(MODEL.filled(9.0))
        self.rows.fetch_map()
        self.push()
        self.push_rows()

    def push(self) -> None:
        self.num_pushes += 1
        self.dense.push(MODEL.filled(-1.0))

    def push_rows(self) -> None:
        found = self.rows.look_up({USERS: IDS.tobytes()})[USERS]
        gradients = Gradients(
            ids=IDS.tobytes(),
            births=found.births,
            gradients=array("f", [-1.0] * 4).tobytes(),
            base_version=found.version,
            base_epoch=found.epoch,
        )
        self.rows.push({USERS: gradients})

    def values_of_rows(self) -> set[float]:
        return set(array("f", self.rows.look_up({USERS: IDS.tobytes()})[USERS].values))

    def assignment(self, shard_id: int) -> ShardAssignment:
        entry = self._servers.run(records.read(self._servers.store, "job"))
        assert entry is not None
        found = entry.assignments.find(shard_id)
        assert found is not None
        return found

    def in_step(self, shard_ids: list[int]) -> bool:
        return all(self.assignment(shard_id).backups for shard_id in shard_ids)

    def push_until(self, is_so: Callable[[], bool]) -> None:
        """Push to the dense shards until `is_so` returns true."""
        give_up_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < give_up_s
            self.push()

    def close(self) -> None:
        self.dense.close()
        self.rows.close()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParameterServers]:
    """Start a server that treats every shard as a large one."""
    monkeypatch.setattr(workers, "INLINE_BYTES", 0)
    with ParameterServers(1, timeouts=PATIENCE) as servers:
        yield servers


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Count the images of each dense shard, by shard and epoch."""
    taken: Counter[tuple[int, int]] = Counter()
    take = VersionedShard.image

    def counted(self: AnyShard, *, epoch: int) -> ShardImage:
        if is_dense(self):
            taken[self.shard_id, self.spec.epoch] += 1
        return take(self, epoch=epoch)

    monkeypatch.setattr(VersionedShard, "image", counted)
    return taken


@pytest.mark.long
def test_a_copy_that_takes_long_is_waited_for(
    servers: ParameterServers, images: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy takes longer than a peer may be silent. The link does not break, no image is sent
    twice, and other shards get pushes. In the end the copy has every push."""
    go_on = threading.Event()

    def slow(builder: ShardBuilder) -> AnyShard:
        if builder.header.kind == "table":
            assert go_on.wait(LIMIT_S)
        return finish(builder)

    monkeypatch.setattr(ShardBuilder, "finish", slow)
    with capture_logs() as logs, closing(Job(servers)) as job:
        servers.add("ps-1", timeouts=PATIENCE)
        job.push_until(lambda: job.in_step(job.dense_ids))
        enough_s = time.monotonic() + 3 * PATIENCE.silence_s
        job.push_until(lambda: time.monotonic() >= enough_s)
        assert not job.in_step([job.table_id])
        job.push_rows()
        go_on.set()
        job.push_until(lambda: job.in_step([job.table_id]))
        job.push_rows()
        assert [e for e in logs if e["event"] == "replication_link_broke"] == []
        assert set(images.values()) == {1}
        servers.stop("ps-0")
        job.push()
        assert job.values_of_rows() == {3.0}
        values = MODEL.filled(0.0)
        job.dense.pull(values)
        assert set(values["w"].cast("f")) == {float(job.num_pushes)}


@pytest.mark.long
def test_only_an_image_that_fails_is_sent_again(
    servers: ParameterServers, images: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of other shards are sent once."""
    failures = iter([True, True])

    def failing(builder: ShardBuilder) -> AnyShard:
        if builder.header.kind == "table" and next(failures, False):
            raise RuntimeError("a planted failure")
        return finish(builder)

    monkeypatch.setattr(ShardBuilder, "finish", failing)
    with capture_logs() as logs, closing(Job(servers)) as job:
        servers.add("ps-1", timeouts=PATIENCE)
        job.push_until(lambda: job.in_step([*job.dense_ids, job.table_id]))
        assert next(failures, None) is None
        assert set(images.values()) == {1}
        assert [e["event"] for e in logs if e["event"] == "replication_link_broke"] == []
        job.push_rows()
        servers.stop("ps-0")
        job.push()
        assert job.values_of_rows() == {2.0}


def test_a_copy_whose_image_always_fails_is_given_up(
    servers: ParameterServers, images: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is logged; other shards get their copies, and the shard is pushed to."""
    attempts: list[int] = []

    def failing(builder: ShardBuilder) -> AnyShard:
        if builder.header.kind == "table":
            attempts.append(builder.header.shard_id)
            raise RuntimeError("a planted failure")
        return finish(builder)

    monkeypatch.setattr(ShardBuilder, "finish", failing)
    with capture_logs() as logs, closing(Job(servers)) as job:
        servers.add("ps-1", timeouts=PATIENCE)
        job.push_until(lambda: any(e["event"] == "copy_refused" for e in logs))
        assert attempts
        job.push_until(lambda: job.in_step(job.dense_ids))
        assert set(images.values()) == {1}
        job.push_rows()
        assert job.values_of_rows() == {2.0}
