"""Pulls and pushes over shared memory, sockets and gRPC: the values are equal bit for bit."""

import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from support.clusters.parameter_servers import ParameterServers, servers_fixture

from shoal_client.bulk import arena as client_arena
from shoal_client.bulk import bulk_transport
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import InvalidSpec, Unavailable
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec, StalenessPolicy
from shoal_proto.v1.shards_pb2 import ParameterSpec

DTYPES = {"weight": "float32", "bias": "float32", "wide": "float64", "half": "float16"}
SIZES = {"weight": 900_001, "bias": 70, "wide": 5_003, "half": 7_001}
SCHEMA = [ParameterSpec(name=n, shape=[SIZES[n]], dtype=DTYPES[n]) for n in SIZES]
MOMENTUM = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.1, momentum=0.9)])
TRANSPORTS = {"auto": "shared-memory", "tcp": "tcp", "grpc": "grpc"}


servers = servers_fixture(2)


def drawn(seed: int) -> dict[str, memoryview]:
    rng = np.random.default_rng(seed)
    return {n: memoryview(rng.standard_normal(SIZES[n]).astype(DTYPES[n])).cast("B") for n in SIZES}


def zeros() -> dict[str, memoryview]:
    return {n: memoryview(np.zeros(SIZES[n], dtype=DTYPES[n])).cast("B") for n in SIZES}


def connect(
    servers: ParameterServers, transport: str, *, job: str = "job", member: str = "w0"
) -> ParameterClient:
    token = servers.admit(member, job=job)
    return ParameterClient(
        [servers.coordinator], lambda: token, timeout_s=20.0, transport=transport
    )


def trained(
    servers: ParameterServers, transport: str, optimizer: OptimizerSpec = MOMENTUM
) -> Mapping[str, bytes]:
    """Return the parameters after four pushes, one of which lacks some gradients."""
    with closing(connect(servers, transport, job=f"job-{transport}")) as client:
        client.place(SCHEMA)
        client.create(optimizer, drawn(0))
        values = zeros()
        client.pull(values)
        for seed in range(1, 5):
            gradients = drawn(seed)
            if seed == 2:
                del gradients["bias"], gradients["half"]
            bases = None
            if optimizer.HasField("staleness"):
                bases = {name: memoryview(bytes(value)) for name, value in values.items()}
            result = client.push(gradients, into=values if seed != 3 else None, bases=bases)
            assert set(result.versions.values()) == {seed + 1}
            assert result.retries == 0
            if seed == 3:
                client.pull(values)
        assert set(client.transports.values()) == {TRANSPORTS[transport]}
        assert len(client.transports) == 2
        return {name: bytes(value) for name, value in values.items()}


@pytest.mark.long
def test_every_transport_has_the_same_results(servers: ParameterServers) -> None:
    by_grpc = trained(servers, "grpc")
    assert trained(servers, "auto") == by_grpc
    assert trained(servers, "tcp") == by_grpc


@pytest.mark.long
def test_a_gradient_and_its_base_are_sent_over_every_transport(servers: ParameterServers) -> None:
    """A push sends twice as many bytes as it receives."""
    policy = StalenessPolicy(kind="compensate", strength=0.5)
    optimizer = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.1)], staleness=policy)
    by_grpc = trained(servers, "grpc", optimizer)
    assert trained(servers, "auto", optimizer) == by_grpc
    assert trained(servers, "tcp", optimizer) == by_grpc


def test_two_workers_may_use_different_transports(servers: ParameterServers) -> None:
    """Each worker pulls the updates of the other."""
    with (
        closing(connect(servers, "auto")) as near,
        closing(connect(servers, "tcp", member="w1")) as far,
    ):
        near.place(SCHEMA)
        near.create(MOMENTUM, zeros())
        far.fetch_map()
        far.pull(zeros())
        ones = {n: memoryview(np.ones(SIZES[n], dtype=DTYPES[n])).cast("B") for n in SIZES}
        near.push(ones)
        seen, again = zeros(), zeros()
        far.push(ones, into=seen)
        near.pull(again)
        assert seen == again
        assert np.frombuffer(seen["wide"])[0] == pytest.approx(-0.1 - 0.19)


def test_shards_too_large_for_shared_memory_are_sent_over_the_socket(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_arena, "MAX_ARENA_BYTES", 8192)
    with closing(connect(servers, "auto")) as client:
        client.place(SCHEMA)
        client.create(MOMENTUM, drawn(0))
        values = zeros()
        client.pull(values)
        assert values == drawn(0)
        assert set(client.transports.values()) == {"unix-socket"}


@pytest.mark.long
def test_a_later_call_with_larger_shards_shares_more_memory(servers: ParameterServers) -> None:
    with closing(connect(servers, "auto")) as client:
        shard_map = client.place(SCHEMA)
        client.create(MOMENTUM, drawn(0))
        values = zeros()
        client.pull(values)
        sizes = {s.shard_id: sum(b.num_elements for b in s.blocks) for s in shard_map.shards}
        smallest, largest = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        with closing(connect(servers, "auto", member="w1")) as other:
            other.fetch_map()
            ones = {n: memoryview(np.ones(SIZES[n], dtype=DTYPES[n])).cast("B") for n in SIZES}
            assert other.push(ones, only=[smallest]).versions == {smallest: 2}
            assert other.push(ones, only=[largest]).versions == {largest: 2}
            assert set(other.transports.values()) == {"shared-memory"}
            seen = zeros()
            other.pull(seen)
            client.pull(values)
            assert seen == values


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
def test_more_shards_than_slots_may_be_refused(transport: str) -> None:
    """The server refuses the shards before the client sends them, and no slot stays reserved."""
    with ParameterServers(1) as servers, closing(connect(servers, transport)) as client:
        num_elements = 5 * client_arena.NUM_SLOTS * 2**18
        schema = [ParameterSpec(name="w", shape=[num_elements], dtype="float32")]
        shard_map = client.place(schema)
        assert len(shard_map.shards) > 2 * client_arena.NUM_SLOTS
        values = memoryview(bytearray(4 * num_elements))
        client.create(MOMENTUM, {"w": values})
        client.pull({"w": values})
        for shard in shard_map.shards:
            shard.epoch += 7
        started_s = time.monotonic()
        result = client.push({"w": memoryview(bytes(4 * num_elements))}, into={"w": values})
        assert result.retries == 1
        assert set(result.versions.values()) == {2}
        assert time.monotonic() - started_s < 10.0


def test_a_server_without_memory_to_share_uses_the_socket() -> None:
    """The server has no memory beyond what the parameters need."""
    with (
        ParameterServers(1, memory_limit_bytes=9_000_000) as servers,
        closing(connect(servers, "auto")) as client,
    ):
        client.place(SCHEMA)
        client.create(MOMENTUM, drawn(0))
        values = zeros()
        client.pull(values)
        assert values == drawn(0)
        assert set(client.transports.values()) == {"unix-socket"}


def test_an_unknown_transport_is_refused(servers: ParameterServers) -> None:
    with pytest.raises(InvalidSpec, match="carrier-pigeon"):
        connect(servers, "carrier-pigeon")


def test_a_connection_made_while_the_client_is_closed_is_not_used(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards have no values: a pull over the connection would wait for them."""
    client = connect(servers, "auto")
    client.place(SCHEMA)
    real = bulk_transport.connect

    def connect_amid_close(*arguments: Any) -> Any:
        connection = real(*arguments)
        client.close()
        return connection

    monkeypatch.setattr(bulk_transport, "connect", connect_amid_close)
    with pytest.raises(Unavailable):
        client.pull(zeros())
