"""Guarantees for torchrun's agent, with a real coordinator."""

import json
import queue
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from support.network import http
from support.torchrun.handlers import (
    PATIENCE_S,
    Join,
    await_change,
    parameters,
    together,
)
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from shoal.membership.draining import Drained
from shoal.torchrun import create_handler
from shoal_client.local.cluster import LocalCluster
from shoal_client.local.process import ChildCommand, Supervisor
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.membership_pb2 import DrainRequest
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

AGENT = Path(__file__).parents[2] / "support" / "processes" / "torchrun_agent.py"


def port(info: RendezvousInfo) -> int:
    assert info.bootstrap_store_info is not None
    return info.bootstrap_store_info.master_port


def fail(handler: RendezvousHandler) -> None:
    """Shut down as torchrun does after its workers failed for good."""
    with pytest.raises(ChildProcessError):
        try:
            raise ChildProcessError("workers failed")
        finally:
            assert handler.shutdown()


def test_nodes_meet_with_ranks_and_one_store(cluster: LocalCluster) -> None:
    """torchrun finds the backend by its name. Every node gets the same world and the same store for
    its workers, which listens already. The job is over for all once a node has completed."""
    made = [get_rendezvous_handler(parameters(cluster.coordinator, "meet")) for _ in range(2)]
    first, second = made
    assert (first.get_backend(), first.get_run_id()) == ("shoal", "meet")
    assert first.use_agent_store
    infos = together(*made)
    assert sorted(info.rank for info in infos) == [0, 1]
    assert [info.world_size for info in infos] == [2, 2]
    assert port(infos[0]) == port(infos[1])
    infos[0].store.set("agents", b"share")
    assert infos[1].store.get("agents") == b"share"
    client = TCPStore("127.0.0.1", port(infos[1]), timeout=timedelta(seconds=5))
    client.set("workers", "share")
    assert client.get("workers") == b"share"
    assert [h.num_nodes_waiting() for h in made] == [0, 0]
    assert not first.is_closed()
    assert first.shutdown()
    assert second.shutdown()
    assert first.is_closed()
    with pytest.raises(RendezvousClosedError):
        first.next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="finished"):
        get_rendezvous_handler(parameters(cluster.coordinator, "meet"))


def test_a_joiner_is_announced_and_admitted(join: Join) -> None:
    """The last call of a job below its maximum ends at the time of the job's own option. A later
    node is announced to the training node, which keeps rank 0 and gets a new store."""
    first = join(last_call_timeout="0.2")
    (alone,) = together(first)
    assert (alone.rank, alone.world_size) == (0, 1)
    second = join(last_call_timeout="0.2")
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(second.next_rendezvous)
        assert await_change(first) == 1
        info = first.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 2)
        assert (coming.result().rank, port(coming.result())) == (1, port(info))
    assert port(info) != port(alone)
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0


@pytest.mark.long
def test_a_restart_of_one_nodes_workers_restarts_those_of_all_nodes(join: Join) -> None:
    """The other node learns of it, both keep their ranks, and nothing of the old stores is left."""
    handlers = [join(), join()]
    before = together(*handlers)
    before[0].store.set("stale", b"1")
    with ThreadPoolExecutor(1) as thread:
        restarting = thread.submit(handlers[0].next_rendezvous)
        await_change(handlers[1])
        other = handlers[1].next_rendezvous()
        again = restarting.result()
    assert [again.rank, other.rank] == [info.rank for info in before]
    assert again.world_size == other.world_size == 2
    assert port(again) == port(other) != port(before[0])
    assert not again.store.check(["stale"])


def test_a_node_that_fails_leaves_the_job_to_the_others(join: Join) -> None:
    """A spare node waits for longer than its join timeout, and takes the rank at once."""
    handlers = [join(), join()]
    before = together(*handlers)
    with ThreadPoolExecutor(1) as thread:
        spare = thread.submit(join(join_timeout="0.3").next_rendezvous)
        with pytest.raises(TimeoutError):
            spare.result(timeout=1.0)
        assert handlers[0].num_nodes_waiting() == 0
        fail(handlers[1])
        await_change(handlers[0])
        info = handlers[0].next_rendezvous()
        assert (info.rank, info.world_size) == (before[0].rank, 2)
        assert spare.result().rank == before[1].rank


def test_a_drained_node_leaves_and_the_others_go_on(join: Join, cluster: LocalCluster) -> None:
    """Nodes re-form at once after `shoal drain NODE`, and the drained agent ends with 143. Its
    shutdown does not complete the job for the node that stays."""
    handlers = [join(), join()]
    before = together(*handlers)
    stays, leaves = sorted(handlers, key=lambda h: before[handlers.index(h)].rank)
    job = leaves.get_run_id()
    newest = http.get(f"{cluster.http_url}/api/v1/jobs/{job}/generations").json()[0]
    (name,) = [each["member_id"] for each in newest["members"] if each["rank"] == 1]
    with grpc.insecure_channel(cluster.coordinator) as channel:
        request = DrainRequest(job=job, member_id=name, reason="spot notice")
        MembershipStub(channel).Drain(request, timeout=PATIENCE_S)
    with ThreadPoolExecutor(1) as thread:
        await_change(leaves)
        leaving = thread.submit(leaves.next_rendezvous)
        await_change(stays)
        info = stays.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        with pytest.raises(Drained, match="spot notice") as ended:
            leaving.result()
    assert ended.value.code == 143
    assert leaves.shutdown()
    assert stays.num_nodes_waiting() == 0
    assert not stays.is_closed()


def test_a_spare_node_learns_when_the_job_is_done(join: Join) -> None:
    """The spare node does not wait for a rank that no node will give up."""
    first = join((1, 1))
    together(first)
    with ThreadPoolExecutor(1) as thread:
        spare = thread.submit(join((1, 1)).next_rendezvous)
        first.shutdown()
        with pytest.raises(RendezvousClosedError, match="completed"):
            spare.result(timeout=PATIENCE_S)


def test_too_few_nodes_end_in_a_time_out(join: Join) -> None:
    """The error comes after the join timeout, with the number of nodes expected."""
    with pytest.raises(RendezvousTimeoutError, match="2 to 2 nodes"):
        join((2, 2), join_timeout="0.5").next_rendezvous()


def test_a_loss_while_ranks_are_assigned_ends_in_a_restart(join: Join) -> None:
    """torchrun's agents exchange worker counts after the rendezvous. If a node is lost just then,
    the others must not end: they get some ranks, and learn that it is time to re-form."""
    handlers = [join(), join()]
    infos = together(*handlers)
    lost = next(i for i, info in enumerate(infos) if info.rank == 0)
    fail(handlers[lost])
    left, info = handlers[1 - lost], infos[1 - lost]
    await_change(left)
    info.store.set("torchelastic/role_info/1", '{"role": "r", "rank": 1, "local_world_size": 3}')
    assert json.loads(info.store.get("torchelastic/assigned_ranks/1")) == [3, 6, 3, 6]
    (key,) = info.store.multi_get(["torchelastic/role_info/0"])
    assert json.loads(key)["local_world_size"] == 3
    info.store.multi_set(["torchelastic/assigned_ranks/0"], ["[]"])
    assert left.num_nodes_waiting() > 0
    assert left.next_rendezvous().world_size == 1


@pytest.mark.long
def test_killed_and_frozen_nodes_are_removed_and_a_frozen_one_rejoins(
    cluster: LocalCluster, join: Join
) -> None:
    """A frozen node is removed; when it continues it rejoins by itself, ranked after the one that
    stayed. A killed node is removed, too."""
    first = join()
    entered: queue.SimpleQueue[str] = queue.SimpleQueue()
    command = ChildCommand(
        name="agent",
        arguments=[sys.executable, str(AGENT), cluster.coordinator, first.get_run_id()],
        sink=lambda line: entered.put(line) if line.startswith("{") else None,
    )
    with Supervisor(grace_s=0.2) as supervisor:
        agent = supervisor.spawn(command)
        assert first.next_rendezvous().world_size == 2
        assert json.loads(entered.get(timeout=PATIENCE_S))["world"] == 2

        agent.send_signal(signal.SIGSTOP)
        await_change(first)
        assert first.next_rendezvous().world_size == 1

        agent.send_signal(signal.SIGCONT)
        await_change(first)
        assert first.next_rendezvous().world_size == 2
        assert json.loads(entered.get(timeout=PATIENCE_S)) == {"rank": 1, "world": 2}

        agent.send_signal(signal.SIGKILL)
        await_change(first)
        assert first.next_rendezvous().world_size == 1


def test_without_a_coordinator_the_handler_is_refused(join: Join) -> None:
    """The error comes when torchrun starts, with the address, after the connect timeout."""
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1"):
        create_handler(parameters("127.0.0.1:1", "nobody", connect_timeout="0.3"))


@pytest.mark.parametrize(
    ("endpoint", "run_id", "conf", "words"),
    [
        ("", "j", {}, "--rdzv-endpoint"),
        ("no where:1", "j", {}, "host:port"),
        ("h:1", "none", {}, "--rdzv-id"),
        ("h:1", "a job", {}, "letters, digits"),
        ("h:1", "j", {"last_call": "1"}, "last_call_timeout"),
        ("h:1", "j", {"join_timeout": "soon"}, "join_timeout"),
        ("h:1", "j", {"close_timeout": "0"}, "seconds above 0"),
    ],
)
def test_invalid_options_of_a_rendezvous_are_refused(
    endpoint: str, run_id: str, conf: dict[str, str], words: str
) -> None:
    """The error names the option, before any connection."""
    with pytest.raises(InvalidSpec, match=words):
        create_handler(parameters(endpoint, run_id, **conf))


def test_a_last_call_longer_than_the_coordinator_allows_is_refused(join: Join) -> None:
    """No generation would ever form with such a last call."""
    with pytest.raises(InvalidSpec, match="last_call_timeout"):
        join(last_call_timeout="1000")
