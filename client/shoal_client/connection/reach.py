"""Check, before a generation starts, that a member reaches its peers. Each member listens on a
probe port and sends a greeting, made from the member's public id: another process on that port is
not mistaken for the member."""

import errno
import hashlib
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import structlog

from shoal_proto.incarnation import public_id
from shoal_proto.v1.membership_pb2 import STATE_ACTION_KEEP, Roster, RosterEntry

log = structlog.get_logger(__name__)

MAX_PEERS = 64
"""Peers above which each member checks only some: see `ring`."""
BACKLOG = 256
PAUSE_S = 0.1
CHOICES = ("auto", "always", "never")


def greeting(member_id: str, process: str) -> bytes:
    """Greeting of a member's listener. `process`: the public id of its incarnation."""
    identity = hashlib.sha256(f"{member_id}\0{process}".encode()).hexdigest()
    return f"shoal-probe {identity}\n".encode()


class ProbeListener:
    """Greets peers until it is closed. Binds to `address` if this host has it; to every interface
    if `address` is a name, or a gateway's address. Raises OSError if no port is free."""

    def __init__(self, address: str, member_id: str, incarnation: str) -> None:
        self._greeting = greeting(member_id, public_id(incarnation))
        self._socket = _bind(address)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._greet, name="shoal-probe", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._closing.set()
        # Unlike `close`, this wakes the thread in `accept`.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _greet(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._closing.is_set():
                    # Connections wait in the backlog.
                    log.info("probe_not_accepted", reason=str(error))
                    self._closing.wait(PAUSE_S)
                continue
            with connection:
                connection.setblocking(False)
                try:
                    connection.send(self._greeting)  # into the empty buffer of a new connection
                except OSError as error:
                    log.debug("probe_not_answered", reason=str(error))


def _bind(address: str) -> socket.socket:
    try:
        parsed = ip_address(address.strip("[]"))
        family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
        return socket.create_server((str(parsed), 0), family=family, backlog=BACKLOG)
    except (ValueError, OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
            )
        return socket.create_server(("", 0), backlog=BACKLOG)


def peers_to_check(roster: Roster, member_id: str, when: str = "auto") -> list[RosterEntry]:
    """Peers that this member has to reach before it accepts the roster; none in an asynchronous
    job, whose members do not connect to each other.

    Two members that both keep their state have trained together: they do not check each other.
    `when`: "auto" checks peers on other hosts only, "always" all, "never" none."""
    if when == "never" or not roster.synchronous:
        return []
    entries = sorted(roster.entries, key=lambda entry: entry.rank)
    position = next(i for i, entry in enumerate(entries) if entry.member_id == member_id)
    own = entries[position]
    return [
        peer
        for peer in ring(entries, position)
        if peer.probe_port
        and (when == "always" or peer.host != own.host)
        and not peer.state == own.state == STATE_ACTION_KEEP
    ]


def ring(entries: Sequence[RosterEntry], position: int) -> list[RosterEntry]:
    """Peers to check: all others, or if these are more than MAX_PEERS, peers at distances of powers
    of two in both directions."""
    number = len(entries)
    if number - 1 <= MAX_PEERS:
        return [*entries[:position], *entries[position + 1 :]]
    distances = [1 << k for k in range(number.bit_length()) if 1 << k <= number // 2]
    positions = {(position + sign * d) % number for d in distances for sign in (1, -1)}
    return [entries[index] for index in sorted(positions)]


def check(peers: Iterable[RosterEntry], limit_s: float) -> dict[str, str]:
    """Connect to all peers at once; return the error for each member that was not reached, by id. A
    peer that accepts the connection and sends nothing is busy, and counts as reached. So does a
    peer whose host name is not resolved within half of the limit."""
    give_up_s = time.monotonic() + limit_s
    unreached: dict[str, str] = {}
    named: list[RosterEntry] = []
    # Unlike epoll, poll needs no descriptor: this process may have none left.
    with selectors.PollSelector() as selector:
        for peer in peers:
            try:
                ip_address(peer.address.strip("[]"))
            except ValueError:
                named.append(peer)
            else:
                _connect(selector, peer, peer.address.strip("[]"), unreached)
        for peer, address in _resolved(named, unreached, give_up_s - limit_s / 2):
            _connect(selector, peer, address, unreached)
        try:
            _read_greetings(selector, unreached, give_up_s)
        finally:
            for key in list(selector.get_map().values()):
                attempt: _Attempt = key.data
                if not attempt.connected:
                    unreached[attempt.peer.member_id] = (
                        f"no answer from {_where(attempt.peer)} within {limit_s:g} s"
                    )
                attempt.socket.close()
    return unreached


@dataclass(kw_only=True)
class _Attempt:
    peer: RosterEntry
    socket: socket.socket
    connected: bool = False
    received: bytes = b""


def _where(peer: RosterEntry) -> str:
    return f"{peer.address} port {peer.probe_port}"


def _connect(
    selector: selectors.BaseSelector, peer: RosterEntry, address: str, unreached: dict[str, str]
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        caller = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        # No descriptor is left, or this host has no IPv6.
        unreached[peer.member_id] = f"{error.strerror or error} for {_where(peer)}"
        return
    caller.setblocking(False)
    code = caller.connect_ex((address, peer.probe_port))
    if code not in (0, errno.EINPROGRESS):
        unreached[peer.member_id] = f"{os.strerror(code)} at {_where(peer)}"
        caller.close()
        return
    attempt = _Attempt(peer=peer, socket=caller)
    selector.register(caller, selectors.EVENT_WRITE, attempt)


def _read_greetings(
    selector: selectors.BaseSelector, unreached: dict[str, str], give_up_s: float
) -> None:
    """Read greetings until the time is over, and those that have arrived by then: this process may
    have been slow."""
    while selector.get_map():
        left_s = max(0.0, give_up_s - time.monotonic())
        ready = selector.select(left_s)
        if not ready and left_s == 0.0:
            return
        for key, _ in ready:
            attempt: _Attempt = key.data
            seen = _progress(selector, attempt)
            if seen is None:
                continue
            if seen:
                unreached[attempt.peer.member_id] = f"{seen} at {_where(attempt.peer)}"
            selector.unregister(attempt.socket)
            attempt.socket.close()


def _progress(selector: selectors.BaseSelector, attempt: _Attempt) -> str | None:
    """Advance one attempt; return the error, "" if the peer is reached, None if not known yet."""
    caller, peer = attempt.socket, attempt.peer
    if not attempt.connected:
        if code := caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return os.strerror(code)
        attempt.connected = True
        selector.modify(caller, selectors.EVENT_READ, attempt)
        return None
    expected = greeting(peer.member_id, peer.public_id)
    try:
        part = caller.recv(len(expected) - len(attempt.received))
    except OSError as error:
        return error.strerror or str(error)
    attempt.received += part
    if part and len(attempt.received) < len(expected):
        return None
    return "" if attempt.received == expected else "another process answers"


def _resolved(
    peers: Sequence[RosterEntry], unreached: dict[str, str], give_up_s: float
) -> Iterable[tuple[RosterEntry, str]]:
    """Yield each peer with its IP address. Resolvers have their own time limits: they run on a
    thread that is abandoned when the time is over."""
    if not peers:
        return
    answers: queue.SimpleQueue[tuple[RosterEntry, str, str]] = queue.SimpleQueue()

    def resolve() -> None:
        for peer in peers:
            try:
                known = socket.getaddrinfo(peer.address, None, type=socket.SOCK_STREAM)
                # The listener of a peer with a name accepts IPv4 in any case.
                best = min(known, key=lambda each: each[0] != socket.AF_INET)
                answers.put((peer, str(best[4][0]), ""))
            except OSError as error:
                answers.put((peer, "", f"{error.strerror or error} at {_where(peer)}"))

    threading.Thread(target=resolve, name="shoal-resolve", daemon=True).start()
    for _ in peers:
        try:
            peer, address, seen = answers.get(timeout=max(0.0, give_up_s - time.monotonic()))
        except queue.Empty:
            return  # a slow resolver does not make its peers unreachable
        if seen:
            unreached[peer.member_id] = seen
        else:
            yield peer, address
