"""The check that members reach each other, over real sockets."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from shoal_client.connection.reach import MAX_PEERS, ProbeListener, check, peers_to_check, ring
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import membership_pb2 as pb

KEEP, RECEIVE = pb.STATE_ACTION_KEEP, pb.STATE_ACTION_RECEIVE
LIMIT_S = 30.0
SHORT_S = 0.3
"""Limit for peers that never answer: the check takes all of it."""


def entry(name: str, port: int = 1, **fields: object) -> pb.RosterEntry:
    given = {
        "public_id": public_id(f"start of {name}"),
        "address": "127.0.0.1",
        "host": name,
    } | fields
    return pb.RosterEntry(member_id=name, probe_port=port, **given)  # type: ignore[arg-type]


@contextmanager
def listening(name: str, address: str = "127.0.0.1") -> Iterator[pb.RosterEntry]:
    """Start a reachable peer, and yield its entry in a roster."""
    listener = ProbeListener(address, name, f"start of {name}")
    try:
        yield entry(name, listener.port)
    finally:
        listener.close()


@contextmanager
def full_backlog() -> Iterator[int]:
    """Yield a port with a full queue of connections, so that packets to it are dropped."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_peers_that_listen_are_reached() -> None:
    """Checks succeed repeatedly, by address and by name, also if the peer's own address is not
    local."""
    with listening("a") as a, listening("b") as b, listening("c", "192.0.2.1") as everywhere:
        named = pb.RosterEntry()
        named.CopyFrom(b)
        named.address = "localhost"
        for _ in range(20):
            assert check([a, b, named, everywhere], LIMIT_S) == {}


def test_a_peer_counts_as_unreached_if_no_socket_can_be_made() -> None:
    """Descriptors are used up here; a host without IPv6 fails in the same way."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = check([entry("a")], LIMIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == {"a": "Too many open files for 127.0.0.1 port 1"}


def test_each_unreachable_peer_has_the_reason() -> None:
    """The check returns the reason for each unreachable peer: its port is closed or drops packets,
    or its address has no route or is not a name."""
    with listening("fine") as fine, full_backlog() as blackhole:
        with listening("left") as left:
            pass
        peers = [
            fine,
            left,
            entry("silent", blackhole),
            entry("astray", address="255.255.255.255"),
            entry("nameless", address="no-such-host.invalid"),
        ]
        found = check(peers, SHORT_S)
    assert found.pop("left") == f"Connection refused at 127.0.0.1 port {left.probe_port}"
    assert found.pop("silent").startswith(f"no answer from 127.0.0.1 port {blackhole} within")
    assert "255.255.255.255 port 1" in found.pop("astray")
    found.pop("nameless", None)  # a slow resolver does not make a peer unreachable
    assert found == {}


def test_another_process_at_the_port_is_not_the_peer() -> None:
    """A peer is unreachable if another incarnation of the member answers at its port."""
    with listening("a") as a:
        a.public_id = public_id("an earlier start of a")
        assert "another process answers" in check([a], LIMIT_S)["a"]


def test_a_peer_that_accepts_connections_without_an_answer_is_reached() -> None:
    """The peer's process may be slow, but the network works."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert check([entry("busy", busy.getsockname()[1])], SHORT_S) == {}


def test_callers_that_disconnect_at_once_do_not_end_the_listener() -> None:
    """The listener answers after fifty such callers."""
    with listening("a") as a:
        for _ in range(50):
            socket.create_connection((a.address, a.probe_port)).close()
        assert check([a], LIMIT_S) == {}


@pytest.mark.parametrize(
    ("when", "checked"),
    [("auto", {"new elsewhere"}), ("always", {"new here", "new elsewhere"}), ("never", set())],
)
def test_only_pairs_with_a_new_member_are_checked(when: str, checked: set[str]) -> None:
    """A member is checked only if it or the checking member is new. By default, pairs on one host
    are left out; a member without a probe port always is."""
    entries = [
        entry("own", host="h1", state=KEEP),
        entry("old elsewhere", host="h2", state=KEEP),
        entry("new elsewhere", host="h2", state=RECEIVE),
        entry("new here", host="h1", state=RECEIVE),
        entry("without", port=0, host="h2", state=RECEIVE),
    ]
    for rank, each in enumerate(entries):
        each.rank = rank
    roster = pb.Roster(entries=entries, synchronous=True)
    assert {e.member_id for e in peers_to_check(roster, "own", when)} == checked
    assert peers_to_check(pb.Roster(entries=entries), "own", "always") == []


@pytest.mark.parametrize("number", [2, MAX_PEERS + 1, MAX_PEERS + 2, 1000])
def test_in_a_large_roster_checks_are_mutual_and_few(number: int) -> None:
    """Each pair is checked from both sides or from none. The checks of a member grow with the
    logarithm of the roster's size."""
    entries = [entry(str(place)) for place in range(number)]
    checked = {
        (str(place), peer.member_id) for place in range(number) for peer in ring(entries, place)
    }
    assert {(b, a) for a, b in checked} == checked
    assert all(a != b for a, b in checked)
    each = number - 1 if number - 1 <= MAX_PEERS else 2 * number.bit_length()
    assert len(checked) <= number * each
