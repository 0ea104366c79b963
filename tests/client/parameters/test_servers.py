"""Calls to the servers of a job's shards, and the effect of refusals and hints on them."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import grpc
import pytest

from shoal_client.parameters import servers as module
from shoal_client.parameters.servers import ShardServers
from shoal_proto import routes
from shoal_proto.errors import InvalidSpec, StateLost, Unavailable, WrongEpoch
from shoal_proto.v1.parameters_pb2 import DescribeRequest
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.shards_pb2 import Shard, ShardMap

LIMIT_S = 30.0
A, B, C = (f"127.0.0.1:{port}" for port in (1, 2, 3))


@pytest.fixture
def servers() -> Iterator[ShardServers[str]]:
    """Calls whose stub of a server is the server's address."""
    servers = ShardServers[str](lambda address, channel: address, LIMIT_S)
    yield servers
    servers.close()


def shard_map(*addresses: str) -> ShardMap:
    shards = [
        Shard(shard_id=i, epoch=1, server_id=address, address=address)
        for i, address in enumerate(addresses)
    ]
    return ShardMap(shards=shards)


def moved_to(address: str, shard: Shard) -> WrongEpoch:
    route = routes.Route(shard.shard_id, shard.epoch + 1, address, address)
    return WrongEpoch("it is led elsewhere", details=routes.as_details([route]))


def test_a_redirection_is_followed_before_others_have_answered(servers: ShardServers[str]) -> None:
    found, at_c = shard_map(A, B), threading.Event()

    def attempt(stub: str, shards: Sequence[Shard], timeout_s: float, todo: set[int]) -> None:
        if stub == A:
            raise moved_to(C, shards[0])
        if stub == C:
            at_c.set()
        else:
            assert at_c.wait(LIMIT_S), "C was not called while B was"
        todo.difference_update(shard.shard_id for shard in shards)

    assert servers.run(lambda: found, lambda: None, attempt, 0.0) == 1
    assert [shard.address for shard in found.shards] == [C, B]
    assert [shard.epoch for shard in found.shards] == [2, 1]


def test_calls_to_one_server_are_made_one_after_the_other(servers: ShardServers[str]) -> None:
    """A connection serves one thread at a time."""
    found, refused, calls = shard_map(A, B), threading.Event(), threading.Semaphore()

    def attempt(stub: str, shards: Sequence[Shard], timeout_s: float, todo: set[int]) -> None:
        if stub == A:
            refused.set()
            raise moved_to(B, shards[0])
        assert calls.acquire(blocking=False), "two calls at once"
        assert refused.wait(LIMIT_S)
        todo.difference_update(shard.shard_id for shard in shards)
        calls.release()

    assert servers.run(lambda: found, lambda: None, attempt, 0.0) == 1


def test_a_silent_server_is_named_with_its_shards_and_a_remedy() -> None:
    """The server counts as alive for minutes: its address alone does not say what is missing."""

    def stub_of(address: str, channel: grpc.Channel) -> ParametersStub:
        return ParametersStub(channel)

    servers = ShardServers[ParametersStub](stub_of, 0.3)
    found = shard_map(A, A, A)
    for shard in found.shards:
        shard.server_id = "ps-1"

    def attempt(
        stub: ParametersStub, shards: Sequence[Shard], timeout_s: float, todo: set[int]
    ) -> None:
        stub.Describe(DescribeRequest(), timeout=timeout_s)

    with pytest.raises(Unavailable) as silent:
        servers.run(lambda: found, lambda: None, attempt, 0.0)
    servers.close()
    what = f"no answer from server ps-1 at {A}, the primary of shard 0 and 2 more"
    assert silent.value.what == what
    assert "start it again, with its journal" in silent.value.fix
    assert "`shoal status`" in silent.value.fix


def test_a_cycle_of_redirections_ends() -> None:
    servers = ShardServers[str](lambda address, channel: address, 0.3)
    found = shard_map(A)

    def attempt(stub: str, shards: Sequence[Shard], timeout_s: float, todo: set[int]) -> None:
        raise moved_to(B if stub == A else A, shards[0])

    with pytest.raises(WrongEpoch):
        servers.run(lambda: found, lambda: None, attempt, 0.0)
    servers.close()


def test_a_connection_can_be_opened_ahead_in_the_background(servers: ShardServers[str]) -> None:
    """A call that comes meanwhile waits for the connection, and uses it."""
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def connect(stub: str) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        order.append(f"connected to {stub}")

    def attempt(stub: str, shards: Sequence[Shard], timeout_s: float, todo: set[int]) -> None:
        order.append(f"called {stub}")
        todo.clear()

    servers.connect_ahead(C, connect)
    assert begun.wait(LIMIT_S)
    threading.Timer(0.05, go_on.set).start()
    servers.run(lambda: shard_map(C), lambda: None, attempt, 0.0)
    # A second request does not connect again.
    servers.connect_ahead(C, connect)
    assert order == [f"connected to {C}", f"called {C}"]


def test_a_call_does_not_wait_for_a_connection_that_no_thread_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All threads of the pool may be taken by calls that wait for such connections."""
    monkeypatch.setattr(module, "MAX_SERVERS", 1)
    servers = ShardServers[str](lambda address, channel: address, LIMIT_S)
    begun, go_on, connected = threading.Event(), threading.Event(), list[str]()

    def occupy(stub: str) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)

    def attempt(stub: str, shards: Sequence[Shard], timeout_s: float, todo: set[int]) -> None:
        todo.clear()

    with closing(servers):
        servers.connect_ahead(A, occupy)
        assert begun.wait(LIMIT_S)
        servers.connect_ahead(C, connected.append)
        assert servers.run(lambda: shard_map(C), lambda: None, attempt, 0.0) == 0
        assert connected == []
        go_on.set()


def test_a_failed_connection_ahead_does_not_prevent_a_call(servers: ShardServers[str]) -> None:
    def connect(stub: str) -> None:
        raise Unavailable("nobody listens there yet")

    def attempt(stub: str, shards: Sequence[Shard], timeout_s: float, todo: set[int]) -> None:
        todo.clear()

    servers.connect_ahead(C, connect)
    assert servers.run(lambda: shard_map(C), lambda: None, attempt, 0.0) == 0


@pytest.mark.parametrize("wait_s", [0.0, 30.0])
def test_lost_servers_are_awaited_before_the_shards_are_reported_lost(wait_s: float) -> None:
    """The wait counts from the call's start, and includes the time until the loss is declared."""
    servers = ShardServers[str](lambda address, channel: address, 0.2)
    servers.lost_wait_s = wait_s
    found, begun_s = shard_map(A), time.monotonic()

    def attempt(stub: str, shards: Sequence[Shard], timeout_s: float, todo: set[int]) -> None:
        if time.monotonic() < begun_s + 1.0:
            raise Unavailable("nobody answers")
        if time.monotonic() < begun_s + 1.5:
            raise StateLost("it went with its last server")
        todo.clear()

    if wait_s:
        assert servers.run(lambda: found, lambda: None, attempt, 0.0) > 0
    else:
        with pytest.raises(Unavailable):
            servers.run(lambda: found, lambda: None, attempt, 0.0)
    servers.close()


def test_a_forked_process_may_not_use_its_parents_connections(servers: ShardServers[str]) -> None:
    """The two would read each other's answers, and use the same sequence numbers."""

    def attempt(stub: str, shards: Sequence[Shard], timeout_s: float, todo: set[int]) -> None:
        todo.difference_update(shard.shard_id for shard in shards)

    found = shard_map(A)
    assert servers.run(lambda: found, lambda: None, attempt, 0.0) == 0
    forked = os.fork()
    if not forked:
        exit_code = 2
        try:
            servers.run(lambda: found, lambda: None, attempt, 0.0)
        except InvalidSpec:
            servers.close()
            exit_code = 0 if servers.stubs else 3
        finally:
            os._exit(exit_code)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert servers.run(lambda: found, lambda: None, attempt, 0.0) == 0


def test_a_map_without_shards_is_done_without_a_call(servers: ShardServers[str]) -> None:
    """A job may have only tables, and then no dense shard."""

    def attempt(stub: str, shards: Sequence[Shard], timeout_s: float, todo: set[int]) -> None:
        raise AssertionError("there is no server to call")

    assert servers.run(ShardMap, lambda: None, attempt, 0.0) == 0
