"""Members that cannot reach each other do not start together: one is excluded, and the others
train."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from support.processes.ranks import Rank, Ranks
from support.training import rank_bodies
from support.training.rank_bodies import Run

from shoal_client.connection.reach import check
from shoal_client.local.cluster import LocalCluster
from shoal_proto.incarnation import public_id
from shoal_proto.v1.membership_pb2 import RosterEntry

NOWHERE = "255.255.255.255"
"""An address to which no connection leads, however the network handles unknown addresses."""


@pytest.fixture
def own_address() -> str:
    """An address of this machine at which other hosts would reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError as error:
            pytest.skip(f"this machine has no address but its loopback's: {error}")
        return str(probe.getsockname()[0])


def test_a_member_with_a_wrong_address_is_excluded_and_the_others_train(
    cluster: LocalCluster, own_address: str
) -> None:
    """The member's error says which members could not reach it, and at which address; no other
    member's training waits for it."""
    with Ranks() as ranks:

        def start(name: str, address: str) -> Rank:
            run = Run(
                coordinator=cluster.coordinator,
                job="reach",
                member_id=name,
                desired_members=3,
                host=f"host-of-{name}",
                address=address,
            )
            return ranks.start(rank_bodies.train, run)

        crew = [start("a", own_address), start("b", own_address)]
        astray = start("c", NOWHERE)
        raised = astray.expect("raised")
        assert raised["error"] == "PeersUnreachable"
        assert "c and others of job reach cannot reach each other" in raised["text"]
        assert "could not reach c: " in raised["text"]
        assert f"at {NOWHERE} port" in raised["text"]
        for rank in crew:
            rank.expect("finished")
            sizes = {data["world_size"] for kind, data in rank.seen if kind == "tried"}
            assert sizes == {2}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@contextmanager
def host_behind_a_wire(own: str, other: str) -> Iterator[str]:
    """Make a network namespace with the address `other`, which this machine reaches from `own`;
    yield its name."""
    name = f"shoal-{os.getpid()}"
    with ExitStack() as stack:
        try:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("link", "add", f"v{os.getpid()}", "type", "veth", "peer", "eth0", "netns", name)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        ip("addr", "add", f"{own}/30", "dev", f"v{os.getpid()}")
        ip("link", "set", f"v{os.getpid()}", "up")
        ip("-n", name, "addr", "add", f"{other}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        yield name


LISTEN = """
import sys
from shoal_client.connection.reach import ProbeListener
listener = ProbeListener(sys.argv[1], "far", "start of far")
print(listener.port, flush=True)
sys.stdin.read()
"""


def test_a_host_whose_answers_are_lost_counts_as_unreachable() -> None:
    """A firewall that lets packets out and none back does this: the host is reported within the
    limit."""
    own, other = "10.255.213.1", "10.255.213.2"
    with host_behind_a_wire(own, other) as namespace:
        inside = ["ip", "netns", "exec", namespace, sys.executable, "-c", LISTEN, other]
        with subprocess.Popen(
            inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            peer = RosterEntry(
                member_id="far", public_id=public_id("start of far"), address=other, probe_port=port
            )
            assert check([peer], 30.0) == {}
            ip("-n", namespace, "route", "add", "blackhole", f"{own}/32")
            assert check([peer], 0.5) == {"far": f"no answer from {other} port {port} within 0.5 s"}
            ip("-n", namespace, "route", "del", "blackhole", f"{own}/32")
            assert check([peer], 30.0) == {}
            process.communicate("", timeout=30)
