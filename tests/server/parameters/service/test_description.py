"""Description of a server: refused pushes, and the versions of its copies."""

from array import array
from zlib import crc32

import grpc
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.processes.served_process import awaited

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.v1 import parameters_pb2 as pb
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.shards_pb2 import ParameterSpec, ShardMap

SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0), HyperParameters(lr=1.0)])
SCHEMA = [
    ParameterSpec(name=name, shape=[8], dtype="float32", group=g) for g, name in enumerate("ab")
]
"""Two parameter groups, so two shards."""
WITHIN_S = 10.0


servers = servers_fixture(1)


def created(servers: ParameterServers) -> tuple[ParameterClient, ShardMap]:
    token = servers.admit("w0")
    client = ParameterClient([servers.coordinator], lambda: token, timeout_s=20.0)
    shard_map = client.place(SCHEMA)
    client.create(SGD, {name: memoryview(array("f", [0.0]) * 8).cast("B") for name in "ab"})
    return client, shard_map


def test_a_push_with_an_outdated_epoch_is_counted(servers: ParameterServers) -> None:
    """The push counts as refused for its epoch, and as partial if another part was applied."""
    client, shard_map = created(servers)
    one, other = shard_map.shards
    token = servers.admit("w1", incarnation="two")
    data = array("f", [1.0] * 8).tobytes()
    header = pb.PushHeader(
        token=token,
        sequence=1,
        shards=[
            pb.PushItem(shard_id=one.shard_id, epoch=one.epoch, base_version=1),
            pb.PushItem(shard_id=other.shard_id, epoch=other.epoch + 1, base_version=1),
        ],
    )
    requests = [pb.PushRequest(header=header)]
    for shard in (one, other):
        piece = pb.Piece(shard_id=shard.shard_id, data=data, checksum=crc32(data))
        requests.append(pb.PushRequest(piece=piece))
    with grpc.insecure_channel(one.address) as channel:
        stub = ParametersStub(channel)
        replies = list(stub.Push(iter(requests)))
        outcomes = {each.shard_id: each for reply in replies for each in reply.outcomes}
        shown = stub.Describe(pb.DescribeRequest(job="job"))
        elsewhere = stub.Describe(pb.DescribeRequest(job="another"))
    assert outcomes[other.shard_id].error.kind == "WrongEpoch"
    assert not outcomes[one.shard_id].HasField("error")
    assert (shown.refused_by_epoch, shown.partial_pushes, shown.unfinished_bytes) == (1, 1, 0)
    assert {shard.shard_id: shard.pushes for shard in shown.shards} == {
        one.shard_id: 1,
        other.shard_id: 0,
    }
    assert (elsewhere.refused_by_epoch, elsewhere.partial_pushes) == (0, 0)
    client.close()


def answered(servers: ParameterServers) -> list[pb.DescribeReply] | None:
    """Return the servers' descriptions if all updates are replicated, else None: backups answer
    some milliseconds after an update counts as received."""
    replies = []
    for server in servers.servers.values():
        with grpc.insecure_channel(server.address) as channel:
            replies.append(ParametersStub(channel).Describe(pb.DescribeRequest(job="job")))
    shards = [shard for each in replies for shard in each.shards]
    are_answered = all(
        copy.version == shard.version for shard in shards for copy in shard.copies
    ) and not any(shard.unreplicated_bytes for shard in shards)
    return replies if are_answered else None


def test_a_description_has_the_versions_of_copies(servers: ParameterServers) -> None:
    """Each shard has one copy at its version, which counts as a copy at the other server."""
    servers.add("ps-1")
    client, _ = created(servers)
    gradients = {name: memoryview(array("f", [1.0]) * 8).cast("B") for name in "ab"}
    values = {name: memoryview(array("f", [0.0]) * 8).cast("B") for name in "ab"}
    client.pull(values)
    for _ in range(3):
        client.push(gradients, into=values)
    replies = awaited(lambda: answered(servers), WITHIN_S, "both copies in step")
    shards = [shard for each in replies for shard in each.shards]
    assert len(shards) == 2
    for shard in shards:
        (copy,) = shard.copies
        assert (copy.version, copy.joining) == (shard.version, False) == (4, False)
    assert sum(each.num_copies for each in replies) == 2
    client.close()
