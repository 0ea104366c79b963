"""Nodes of torchrun without a coordinator: in any call, every wait ends at the time of its
option."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from support.network.gates import Network, Wire
from support.processes.torchrun_world import Nodes
from support.torchrun import apart
from support.torchrun.handlers import Join, await_change, parameters, together
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from shoal.torchrun import create_handler
from shoal.torchrun.store import TERMINAL_STATE
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

JOIN_S = 3.0
OVER_S = 6.0
"""Extra time on a busy machine; usually it is about two seconds."""
START_S = 90.0


@pytest.fixture
def wire(cluster: LocalCluster) -> Iterator[Wire]:
    """A wire to the coordinator that can be cut."""
    with Network() as network:
        wire = network.wire(cluster.coordinator)
        yield wire
        wire.restore()


@pytest.fixture(params=["cut", "silenced"])
def outage(request: pytest.FixtureRequest, wire: Wire) -> Wire:
    """A wire whose `cut` either refuses connections or drops packets."""
    if request.param == "silenced":
        wire.cut = wire.silence  # type: ignore[method-assign]
    return wire


def options(wire: Wire, **conf: str) -> dict[str, str]:
    return {
        "endpoint": wire.endpoints[0],
        "join_timeout": str(JOIN_S),
        "close_timeout": "1",
        **conf,
    }


def times_out(began_s: float, seconds: float = JOIN_S) -> bool:
    """True if the call took as long as it may, and no longer."""
    return seconds - 0.2 <= time.monotonic() - began_s <= seconds + OVER_S


@pytest.mark.sampled()
def test_a_rendezvous_after_a_failure_times_out(join: Join, outage: Wire) -> None:
    """The node has to report first that its workers failed."""
    node = join(**options(outage, last_call_timeout="0.2"))
    together(node)
    outage.cut()
    began_s = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match=f"within {JOIN_S:g} s"):
        node.next_rendezvous()
    assert times_out(began_s)
    # If the node ends now, that takes no longer than a last try.
    began_s = time.monotonic()
    node.shutdown()
    assert time.monotonic() - began_s <= OVER_S


@pytest.mark.sampled()
def test_a_rendezvous_that_has_begun_times_out(join: Join, outage: Wire) -> None:
    """The node is waiting for other nodes when the coordinator goes."""
    node = join((2, 2), **options(outage))
    with ThreadPoolExecutor(1) as thread:
        began_s = time.monotonic()
        coming = thread.submit(node.next_rendezvous)
        with pytest.raises(TimeoutError):
            coming.result(timeout=0.5)
        outage.cut()
        with pytest.raises(RendezvousTimeoutError, match="2 to 2 nodes"):
            coming.result(timeout=60.0)
        assert times_out(began_s)


@pytest.mark.sampled()
def test_a_first_rendezvous_times_out(join: Join, outage: Wire) -> None:
    node = join(**options(outage))
    outage.cut()
    began_s = time.monotonic()
    with pytest.raises(RendezvousTimeoutError):
        node.next_rendezvous()
    assert times_out(began_s)


def test_a_leave_that_was_not_acknowledged_is_reported_again(join: Join, wire: Wire) -> None:
    node = join(**options(wire, last_call_timeout="0.2"))
    together(node)
    wire.cut()
    assert [node.shutdown(), node.shutdown()] == [False, False]


def test_a_wait_for_others_that_ends_in_a_short_outage_timed_out(join: Join, wire: Wire) -> None:
    """A coordinator that has been away for less than `close_timeout` may answer again."""
    first = join((2, 2), **options(wire, close_timeout="60", join_timeout="60"))
    store = together(first, join((2, 2)))[0].store
    store.add(TERMINAL_STATE, 1)
    wire.cut()
    with pytest.raises(DistStoreError, match="timeout after 2 s"):
        store.wait([TERMINAL_STATE], timedelta(seconds=2.0))
    wire.restore()
    assert first.shutdown()


@pytest.mark.long
def test_a_spare_node_times_out_without_a_coordinator(join: Join, outage: Wire) -> None:
    """A spare node waits without a limit only while a coordinator can call it."""
    together(join((1, 1)))
    spare = join((1, 1), **options(outage))
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(spare.next_rendezvous)
        with pytest.raises(TimeoutError):
            coming.result(timeout=2 * JOIN_S)
        outage.cut()
        began_s = time.monotonic()
        with pytest.raises(RendezvousTimeoutError):
            coming.result(timeout=60.0)
        assert time.monotonic() - began_s <= JOIN_S + OVER_S


@pytest.mark.long
def test_a_node_that_is_cut_off_from_an_agreed_generation_times_out(join: Join, wire: Wire) -> None:
    """A generation is agreed, and one of two nodes is cut off before it can enter. The other waits
    for it, up to the limit."""
    first, second = join((2, 2)), join((2, 2), **options(wire))
    together(first, second)
    with ThreadPoolExecutor(2) as threads:
        coming = threads.submit(first.next_rendezvous)
        await_change(second)
        wire.silence()
        began_s = time.monotonic()
        with pytest.raises(RendezvousTimeoutError):
            second.next_rendezvous()
        assert times_out(began_s)
        # The coordinator declared the second node lost: a third takes its rank.
        third = join((2, 2))
        assert {third.next_rendezvous().world_size, coming.result().world_size} == {2}


@pytest.mark.long
def test_a_node_that_gave_up_can_join_again(join: Join, wire: Wire) -> None:
    """A node that gave up joins again at its next call."""
    node = join(**options(wire, last_call_timeout="0.2"))
    together(node)
    wire.cut()
    with pytest.raises(RendezvousTimeoutError):
        node.next_rendezvous()
    assert not node.is_closed()
    assert node.num_nodes_waiting() == 0
    wire.restore()
    assert node.next_rendezvous().world_size == 1


def test_closing_the_job_fails_within_close_timeout(join: Join, outage: Wire) -> None:
    """`close_timeout` limits the call; its end is an error, as with any backend."""
    node = join(**options(outage, last_call_timeout="0.2"))
    together(node)
    outage.cut()
    began_s = time.monotonic()
    with pytest.raises((RendezvousTimeoutError, RendezvousConnectionError)):
        node.set_closed()
    assert time.monotonic() - began_s <= 1.0 + OVER_S
    assert not node.is_closed()
    outage.restore()
    node.set_closed()
    assert node.is_closed()
    with pytest.raises(RendezvousClosedError):
        join(**options(outage))


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("part", ["coordinator", "etcd"])
def test_a_rendezvous_times_out_if_the_coordinator_or_etcd_is_halted(
    tmp_path: Path, part: str
) -> None:
    """SIGSTOP leaves connections open, but nothing answers, or nothing can be agreed."""
    config = LocalClusterConfig(directory=tmp_path, num_parameter_servers=0)
    with LocalCluster(config) as cluster:
        conf = {"last_call_timeout": "0.2", "join_timeout": str(JOIN_S), "close_timeout": "1"}
        node = create_handler(parameters(cluster.coordinator, "halted", **conf))
        together(node)
        process = cluster.processes[part]
        process.send_signal(signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            with pytest.raises(RendezvousTimeoutError):
                node.next_rendezvous()
            assert times_out(began_s)
            node.shutdown()
        finally:
            process.send_signal(signal.SIGCONT)


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_agents_end_soon_after_their_workers(tmp_path: Path, outage: Wire, fails: bool) -> None:
    """Agents end with the training's own exit code, within `close_timeout` and a few seconds."""
    job = f"outage-{tmp_path.name}"
    with Nodes(endpoint=outage.endpoints[0], job=job, directory=tmp_path) as nodes:
        conf = "last_call_timeout=60,close_timeout=3"
        names = ("first", "second")
        agents = [nodes.start(name, nodes="2", workers=1, conf=conf) for name in names]
        nodes.await_step(lambda step: step["world"] == 2, START_S)
        outage.cut()
        stopped_s = time.monotonic()
        if fails:
            for rank in range(2):
                nodes.touch(f"fail-{rank}-0")
        else:
            nodes.stop()
        codes = [agent.wait(60.0) for agent in agents]
        assert codes == ([1, 1] if fails else [0, 0]), nodes.logs()
        assert time.monotonic() - stopped_s <= 3.0 + 2 * OVER_S, nodes.logs()


@pytest.mark.long
def test_an_agent_that_waits_for_others_ends_soon_after_the_coordinator(
    tmp_path: Path, outage: Wire
) -> None:
    """An agent whose workers are done is in the barrier at the end; the other one trains on, and
    ends as usual."""
    job, script = f"barrier-{tmp_path.name}", Path(apart.__file__)
    endpoint = outage.endpoints[0]
    with Nodes(endpoint=endpoint, job=job, directory=tmp_path, script=script) as nodes:
        conf = "last_call_timeout=60,close_timeout=3"
        first, second = (
            nodes.start(name, nodes="2", workers=1, conf=conf) for name in ("first", "second")
        )
        nodes.await_step(lambda step: step["world"] == 2, START_S)
        nodes.touch("done-first")
        nodes.await_line("first", "node_finished", START_S)
        outage.cut()
        cut_s = time.monotonic()
        assert first.wait(60.0) == 0, nodes.logs()
        assert time.monotonic() - cut_s <= 3.0 + 2 * OVER_S, nodes.logs()
        assert second.exit_code is None, nodes.logs()
        nodes.touch("done-second")
        assert second.wait(60.0) == 0, nodes.logs()
