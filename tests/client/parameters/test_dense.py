"""A client's view of parameters on two servers: complete, updated once, with clear errors."""

import threading
import time
from array import array
from collections.abc import Sequence

import pytest
from support.clusters.assignment_records import write_assignments
from support.clusters.parameter_servers import ParameterServers, servers_fixture

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import (
    Fenced,
    InternalError,
    NonFiniteGradient,
    NoServers,
    ProposalConflict,
    ShapeMismatch,
    ShardNotReady,
    ShoalError,
    StateLost,
    Unavailable,
)
from shoal_proto.incarnation import public_id
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete
from shoal_server.etcd.records import assignments as records
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.replica import ShardReplica

SHAPES = {"weight": (100, 70), "bias": (70,), "big": (900, 1000)}
SCHEMA = [ParameterSpec(name=n, shape=s, dtype="float32") for n, s in SHAPES.items()]
SIZES = {"weight": 7000, "bias": 70, "big": 900_000}
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


servers = servers_fixture(2)


def connect(servers: ParameterServers, token: Token, **changes: float) -> ParameterClient:
    return ParameterClient([servers.coordinator], lambda: token, **{"timeout_s": 20.0} | changes)


def filled(value: float) -> dict[str, memoryview]:
    return {n: memoryview(array("f", [value]) * size).cast("B") for n, size in SIZES.items()}


def floats(buffer: memoryview) -> list[float]:
    return list(buffer.cast("f"))


def assert_all(buffers: dict[str, memoryview], value: float) -> None:
    for name, buffer in buffers.items():
        assert set(floats(buffer)) == {value}, name


def trained(servers: ParameterServers, member_id: str = "w0") -> ParameterClient:
    """A client whose parameters are created, all zero."""
    client = connect(servers, servers.admit(member_id))
    client.place(SCHEMA)
    client.create(SGD, filled(0.0))
    client.pull(filled(9.0))
    return client


def test_pushed_values_are_returned_and_pulled_by_others(servers: ParameterServers) -> None:
    """A push returns the new values, and another worker pulls the same. Each of the two servers
    holds a part of the parameters."""
    client = trained(servers)
    shard_map = client.fetch_map()
    assert {shard.server_id for shard in shard_map.shards} == {"ps-0", "ps-1"}
    values = filled(9.0)
    result = client.push(filled(-1.0), into=values)
    assert_all(values, 1.0)
    assert set(result.versions.values()) == {2}
    assert result.staleness_max == result.retries == result.duplicates == 0
    other = connect(servers, servers.admit("w1"))
    other.fetch_map()
    seen = filled(9.0)
    other.pull(seen)
    assert_all(seen, 1.0)
    client.close()
    other.close()


def test_creating_twice_keeps_the_first_values(servers: ParameterServers) -> None:
    client = trained(servers)
    assert client.create(SGD, filled(5.0)) == 0
    values = filled(9.0)
    client.pull(values)
    assert_all(values, 0.0)
    adam = OptimizerSpec(kind="adam", groups=[HyperParameters(lr=1.0, beta1=0.9, beta2=0.9)])
    with pytest.raises(ProposalConflict, match="another optimizer"):
        client.create(adam, filled(5.0))
    client.close()


def test_gradients_may_be_partial(servers: ParameterServers) -> None:
    """A parameter without a gradient does not change; others do."""
    client = trained(servers)
    values = filled(9.0)
    gradients = filled(-1.0)
    del gradients["weight"]
    client.push(gradients, into=values)
    assert set(floats(values["weight"])) == {0.0}
    assert set(floats(values["bias"])) == set(floats(values["big"])) == {1.0}
    client.push({}, into=values)
    assert set(floats(values["bias"])) == {1.0}
    client.close()


def test_staleness_counts_the_pushes_of_others(servers: ParameterServers) -> None:
    """Staleness is the number of updates since the values that the gradient was computed on."""
    first, second = trained(servers), trained(servers, "w1")
    into = filled(9.0)
    first.push(filled(-1.0), into=into)
    first.push(filled(-1.0), into=into)
    result = second.push(filled(-1.0), into=into)
    assert set(result.staleness.values()) == {2}
    assert_all(into, 3.0)
    assert second.push(filled(-1.0), into=into).staleness_max == 0
    first.close()
    second.close()


def test_concurrent_pushes_each_count_once(servers: ParameterServers) -> None:
    clients = [trained(servers, f"w{i}") for i in range(4)]
    failures: list[BaseException] = []

    def push(client: ParameterClient) -> None:
        try:
            into = filled(0.0)
            for _ in range(5):
                client.push(filled(-1.0), into=into)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=push, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    values = filled(9.0)
    clients[0].pull(values)
    assert_all(values, 20.0)
    for client in clients:
        client.close()


def test_a_pull_waits_for_the_first_values(servers: ParameterServers) -> None:
    """A pull waits until the parameters have values. If they get none within the limit, the pull
    raises ShardNotReady."""
    early = connect(servers, servers.admit("w1"))
    early.place(SCHEMA)
    with pytest.raises(ShardNotReady):
        early.pull(filled(9.0), wait_s=0.05)
    values = filled(9.0)
    waiting = threading.Thread(target=early.pull, args=(values,))
    waiting.start()
    trained(servers).close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert_all(values, 0.0)
    early.close()


@pytest.mark.long
def test_a_pull_that_waits_for_lost_shards_waits_until_they_are_restored(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards are lost for longer than a call may take otherwise. Then they have no values yet,
    while a snapshot is loaded."""
    client = connect(servers, servers.admit("w0"), timeout_s=1.0)
    client.place(SCHEMA)
    client.create(SGD, filled(0.0))
    client.wait_for_lost(30.0)
    restored_s, loading = time.monotonic() + 1.1, iter(range(2))
    look_up = Catalog.look_up

    async def found(
        catalog: Catalog, job: str, wanted: Sequence[tuple[int, int]]
    ) -> list[ShardReplica | ShoalError]:
        if time.monotonic() < restored_s:
            return [StateLost("no server has the shard") for _ in wanted]
        if next(loading, None) is not None:
            return [ShardNotReady("a snapshot is being loaded") for _ in wanted]
        return await look_up(catalog, job, wanted)

    monkeypatch.setattr(Catalog, "look_up", found)
    values = filled(9.0)
    client.pull(values)
    assert_all(values, 0.0)
    client.close()


def test_another_model_is_refused_by_name(servers: ParameterServers) -> None:
    """A model that is not the job's is refused with the parameters that differ."""
    trained(servers).close()
    stranger = connect(servers, servers.admit("w1"))
    wider = [ParameterSpec(name="weight", shape=(70, 100), dtype="float32"), *SCHEMA[1:]]
    with pytest.raises(ShapeMismatch) as shape:
        stranger.place(wider)
    assert shape.value.details["weight"] == (
        "saw float32 70x100 in group 0, expected float32 100x70 in group 0"
    )
    with pytest.raises(ProposalConflict) as other:
        stranger.place(SCHEMA[:-1])
    assert "big" in other.value.details
    stranger.close()


def test_wrong_buffers_are_refused_before_anything_is_sent(servers: ParameterServers) -> None:
    """The errors are unknown names, other lengths and read-only buffers."""
    client = trained(servers)
    with pytest.raises(ShapeMismatch, match="no parameter extra"):
        client.push({"extra": memoryview(bytes(4))})
    with pytest.raises(ShapeMismatch, match=r"bias .*saw 140 bytes.*expected 280 bytes"):
        client.push({"bias": memoryview(bytes(140))})
    with pytest.raises(ShapeMismatch, match="cannot be written"):
        client.pull(filled(0.0) | {"bias": memoryview(bytes(280))})
    with pytest.raises(ShapeMismatch, match="none for big"):
        client.pull({name: b for name, b in filled(0.0).items() if name != "big"})
    client.close()
    with pytest.raises(InternalError, match="no shard map"):
        connect(servers, servers.admit("w1")).pull({})


def test_a_gradient_that_is_not_finite_is_refused_with_its_name(servers: ParameterServers) -> None:
    """Other members continue."""
    client, other = trained(servers), trained(servers, "w1")
    gradients = filled(-1.0)
    gradients["bias"] = memoryview(array("f", [0.0] * 69 + [float("nan")])).cast("B")
    with pytest.raises(NonFiniteGradient) as refused:
        client.push(gradients)
    assert refused.value.details == {"parameter": "bias"}
    values = filled(9.0)
    other.push(filled(-1.0), into=values)
    assert set(floats(values["bias"])) == {1.0}
    client.close()
    other.close()


def test_a_fenced_member_changes_nothing(servers: ParameterServers) -> None:
    """Pushes of a member that was declared lost are refused, and those of its successor are
    accepted."""
    client = trained(servers)
    servers.expel("w0")
    successor = connect(servers, servers.admit("w0", incarnation="two"))
    successor.fetch_map()
    with pytest.raises(Fenced, match=f"process {public_id('one')}"):
        client.push(filled(-1.0))
    values = filled(9.0)
    successor.pull(values)
    successor.push(filled(-1.0), into=values)
    assert_all(values, 1.0)
    client.close()
    successor.close()


def test_without_servers_placing_fails() -> None:
    """The error says that no parameter server runs, and how to start one."""
    with ParameterServers(0) as servers:
        client = connect(servers, servers.admit("w0"))
        with pytest.raises(NoServers, match="shoal ps"):
            client.place(SCHEMA)
        client.close()


def test_a_lost_server_is_named() -> None:
    """The error has the address of the only server, which does not come back in time."""
    with ParameterServers(1) as servers:
        client = connect(servers, servers.admit("w0"), timeout_s=1.0)
        client.place(SCHEMA)
        client.create(SGD, filled(0.0))
        address = servers.servers["ps-0"].address
        servers.stop("ps-0")
        with pytest.raises(Unavailable, match=address):
            client.push(filled(-1.0))
        client.close()


def test_pushes_continue_without_a_coordinator(servers: ParameterServers) -> None:
    client = trained(servers)
    values = filled(9.0)
    servers.run(servers.coordinator_server.stop(None))
    client.push(filled(-1.0), into=values)
    assert_all(values, 1.0)
    client.close()


def test_closing_ends_a_call_in_progress(servers: ParameterServers) -> None:
    client = connect(servers, servers.admit("w0"), timeout_s=60.0)
    client.place(SCHEMA)
    failures: list[BaseException] = []
    began = threading.Event()

    def wait() -> None:
        began.set()
        try:
            client.pull(filled(0.0))
        except Unavailable as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    began.wait()
    client.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert len(failures) == 1


@pytest.mark.sampled()
@pytest.mark.parametrize("missed", [False, True])
def test_shards_of_an_earlier_run_are_not_those_of_the_next(
    servers: ParameterServers, missed: bool
) -> None:
    """A job starts over under its name: its servers drop its old shards, even a server that did not
    see the old record's deletion, as after a pause in which etcd compacted its history."""
    trained(servers)
    job = "job"
    before = servers.run(records.read(servers.store, job))
    assert before is not None
    anew = JobAssignments(
        job=job,
        copies=2,
        shards=tuple(
            ShardAssignment(shard_id=h.shard_id, epoch=1, primary=h.primary)
            for h in before.assignments.shards
        ),
        placement_id="the next one",
    )
    if missed:
        servers.run(write_assignments(servers.store, anew))
    else:
        servers.run(
            servers.store.transact(
                (), (records.delete_assignments(job), Delete(keys.shard_map(job)))
            )
        )
    second = connect(servers, servers.admit("w1"))
    second.place(SCHEMA)
    second.create(SGD, filled(5.0))
    pulled = filled(9.0)
    second.pull(pulled)
    assert_all(pulled, 5.0)
