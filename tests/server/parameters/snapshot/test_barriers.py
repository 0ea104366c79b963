"""A server's part in a cut: images of all its shards, or of none."""

from typing import cast

import pytest

from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.processes import Holder
from shoal_server.etcd.memory import MemoryStore
from shoal_server.parameters.cluster.fence import Fence
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.dense import new_dense_shard
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.snapshot.barriers import SnapshotBarriers

SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


def new_replica(shard_id: int) -> ShardReplica:
    blocks = [Block(parameter="w", num_elements=4)]
    spec = Shard(shard_id=shard_id, epoch=1, dtype="float32", blocks=blocks)
    return ShardReplica("job", new_dense_shard(spec, SGD, bytearray(16)), ReplicaRole.PRIMARY, 1)


async def test_a_failed_cut_leaves_no_image_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes would continue to copy old values for an open image."""
    catalog = Catalog(MemoryStore(), Holder("ps-0", "one"))
    whole, failing = new_replica(1), new_replica(2)
    for each in (whole, failing):
        assert catalog.add(each)

    def image() -> ShardImage:
        assert whole.state.body.images, "the image of the other shard is made"
        raise MemoryError

    monkeypatch.setattr(failing, "image", image)
    barriers = SnapshotBarriers(catalog, cast(Fence, None))
    begun = barriers.close("job", "cut", limit_s=60.0)
    with pytest.raises(MemoryError):
        await barriers.freeze("job", "cut", begun, wait_s=1.0, take_torn=False)
    assert not whole.state.body.images
