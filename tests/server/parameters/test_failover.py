"""Servers that die, leave and are added: acknowledged pushes stay, and are applied once."""

from collections.abc import Callable

import grpc
import pytest
from support.clusters.one_tensor import OneTensor
from support.clusters.parameter_servers import ParameterServers, servers_fixture

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import DescribeRequest
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_server.core.shards.assignments import JobAssignments
from shoal_server.etcd import keys
from shoal_server.etcd.records import assignments as records

MODEL = OneTensor(1_500_000)
MOMENTUM = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0, momentum=0.5)])


servers = servers_fixture(2)


def trained(servers: ParameterServers) -> ParameterClient:
    """Return a client whose parameters exist, all zero."""
    token = servers.admit("w0")
    client = ParameterClient([servers.coordinator], lambda: token, timeout_s=30.0)
    return MODEL.create(client, MOMENTUM)


def expected(num_pushes: int) -> float:
    """Return the value after these gradients of -1, with lr 1 and momentum 0.5."""
    value = velocity = 0.0
    for _ in range(num_pushes):
        velocity = 0.5 * velocity + 1.0
        value += velocity
    return value


def assert_pushed(client: ParameterClient, num_pushes: int) -> None:
    values = MODEL.filled(9.0)
    client.pull(values)
    assert set(values["w"].cast("f")) == {expected(num_pushes)}


def wait_until(
    servers: ParameterServers, is_so: Callable[[JobAssignments], bool]
) -> JobAssignments:
    """Wait until the job's assignments are as wanted, and return them."""

    async def follow() -> JobAssignments:
        snapshot = await servers.store.range(keys.ASSIGNMENTS)
        found = records.parse_all("job", snapshot.items)
        if found is not None and is_so(found):
            return found
        async for batch in servers.store.watch(keys.ASSIGNMENTS, snapshot.revision):
            for _ in batch.events:
                entry = await records.read(servers.store, "job")
                assert entry is not None
                if is_so(entry.assignments):
                    return entry.assignments
        raise AssertionError("the watch ended")

    return servers.run(follow())


def is_whole(assignments: JobAssignments) -> bool:
    """True if every shard has its backup, and nothing moves."""
    return all(
        len(h.backups) == assignments.copies - 1 and h.joining is None and h.successor is None
        for h in assignments.shards
    )


def test_every_shard_has_a_backup_from_the_start(servers: ParameterServers) -> None:
    """A shard has a primary and a backup once a worker has pulled."""
    client = trained(servers)
    entry = servers.run(records.read(servers.store, "job"))
    assert entry is not None
    assert is_whole(entry.assignments)
    assert {h.primary.server_id for h in entry.assignments.shards} == {"ps-0", "ps-1"}
    client.close()


@pytest.mark.sampled()
@pytest.mark.parametrize("gone", ["ps-0", "ps-1"])
def test_a_backup_takes_over_with_values_momentum_and_sessions(
    servers: ParameterServers, gone: str
) -> None:
    """The primary ends without notice."""
    client = trained(servers)
    for _ in range(3):
        client.push(MODEL.filled(-1.0))
    servers.stop(gone)
    client.push(MODEL.filled(-1.0))
    assert_pushed(client, 4)
    shard_map = client.fetch_map()
    assert all(shard.server_id != gone for shard in shard_map.shards)
    assert {shard.epoch for shard in shard_map.shards} == {1, 2}
    client.close()


@pytest.mark.long
def test_servers_that_die_in_turn_lose_nothing(servers: ParameterServers) -> None:
    """An empty process replaces each dead server, and gets its copies before the next one dies."""
    client = trained(servers)
    for number, name in enumerate(("ps-0", "ps-1", "ps-0")):
        client.push(MODEL.filled(-1.0))
        wait_until(servers, is_whole)
        servers.stop(name)
        client.push(MODEL.filled(-1.0))
        assert_pushed(client, 2 * number + 2)
        servers.add(name)
    wait_until(servers, is_whole)
    client.close()


def test_a_push_that_is_repeated_at_the_new_primary_is_not_applied_again(
    servers: ParameterServers,
) -> None:
    """Sessions are replicated with the values."""
    client = trained(servers)
    client.push(MODEL.filled(-1.0))
    servers.stop("ps-0")
    client.push(MODEL.filled(-1.0))
    again = ParameterClient([servers.coordinator], lambda: servers.admit("w0"), timeout_s=30.0)
    again.fetch_map()
    # The same incarnation counts from 1 again: both of its pushes are known.
    results = [again.push(MODEL.filled(-1.0)) for _ in range(2)]
    num_shards = len(again.fetch_map().shards)
    assert [result.duplicates for result in results] == [num_shards, num_shards]
    assert_pushed(client, 2)
    client.close()
    again.close()


@pytest.mark.long
def test_a_new_server_gets_shards(servers: ParameterServers) -> None:
    """Pushes continue meanwhile."""
    client = trained(servers)
    servers.add("ps-2")
    pushed = 0

    def is_spread(assignments: JobAssignments) -> bool:
        leaders = {h.primary.server_id for h in assignments.shards}
        return is_whole(assignments) and "ps-2" in leaders

    for _ in range(10):
        client.push(MODEL.filled(-1.0))
        pushed += 1
    wait_until(servers, is_spread)
    client.push(MODEL.filled(-1.0))
    assert_pushed(client, pushed + 1)
    client.close()


@pytest.mark.long
def test_a_server_that_leaves_hands_over_its_shards(servers: ParameterServers) -> None:
    """A leaving server has no shards when it ends, so that the next push needs no retry."""
    client = trained(servers)
    servers.add("ps-2")
    leaver = servers.servers["ps-0"]
    client.push(MODEL.filled(-1.0))
    servers.run(leaver.registration.announce_leaving())
    servers.run(leaver.replicas.wait_empty())
    client.push(MODEL.filled(-1.0))
    servers.stop("ps-0")
    result = client.push(MODEL.filled(-1.0))
    assert result.retries == 0
    assert_pushed(client, 3)
    client.close()


def test_servers_count_the_bytes_pushed_to_each_shard(servers: ParameterServers) -> None:
    """The coordinator balances loads by these counts."""
    client = trained(servers)
    for _ in range(2):
        client.push(MODEL.filled(-1.0))
    pushed = {}
    for server in servers.servers.values():
        with grpc.insecure_channel(server.address) as channel:
            reply = ParametersStub(channel).Describe(DescribeRequest(job="job"))
        pushed |= {shard.shard_id: shard.pushed_bytes for shard in reply.shards}
        sizes = {shard.shard_id: shard.num_bytes for shard in reply.shards}
        assert all(pushed[i] == 2 * size for i, size in sizes.items())
    assert sum(pushed.values()) == 2 * 4 * MODEL.num_elements
    client.close()
