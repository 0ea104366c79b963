"""The catalog: shards that a server holds, and those that it is about to lead."""

import asyncio

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto import routes
from shoal_proto.errors import WrongEpoch
from shoal_proto.routes import Route
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.processes import Holder
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.dense import new_dense_shard
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica

SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


def replica(role: ReplicaRole, epoch: int) -> ShardReplica:
    spec = Shard(shard_id=0, epoch=epoch, dtype="float32", blocks=[Block(num_elements=1)])
    return ShardReplica("job", new_dense_shard(spec, SGD, bytearray(4)), role, epoch)


class Elsewhere:
    """Route of every shard to one other server, in epoch 5."""

    def route(self, job: str, shard_id: int) -> Route:
        return Route(shard_id, 5, "ps-1", "10.0.0.2:7710")

    def next_address(self, job: str, shard_id: int) -> str:
        return ""

    def is_kept(self, job: str, shard_id: int) -> bool:
        return False


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(MemoryStore(), Holder("ps-0", "one"))


async def test_a_call_that_arrives_before_a_handover_waits_for_it(catalog: Catalog) -> None:
    """The last primary may redirect pushes before this server has read that it leads the shard."""
    copy = replica(ReplicaRole.BACKUP, 4)
    catalog.add(copy)
    asked = asyncio.create_task(catalog.look_up("job", [(0, 5)]))
    done, _ = await asyncio.wait([asked], timeout=0)
    assert not done
    copy.role, copy.epoch = ReplicaRole.PRIMARY, 5
    await catalog.notify()
    assert await asked == [copy]


async def test_a_call_after_a_handover_is_refused_with_the_new_primary(catalog: Catalog) -> None:
    """A redirection names only a newer epoch than the caller's."""
    catalog.add(replica(ReplicaRole.BACKUP, 5))
    catalog.whereabouts = Elsewhere()
    (refused,) = await catalog.look_up("job", [(0, 4)])
    assert isinstance(refused, WrongEpoch)
    assert routes.from_error(refused) == [Route(0, 5, "ps-1", "10.0.0.2:7710")]
    assert catalog.redirect("job", 0, 5) is None


def test_details_that_are_no_routes_are_ignored() -> None:
    """Details of an error may be of other kinds, or of later releases."""
    route = Route(3, 6, "ps-2", "[::1]:7710")
    details = {"shard 1": "soon", "shard x": "1 a b", "job": "1 a b", "shard 2": "1 a "}
    error = WrongEpoch("elsewhere", details=details | routes.as_details([route]))
    assert routes.from_error(error) == [route]
