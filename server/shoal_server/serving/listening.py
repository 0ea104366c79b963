"""Start and end of a server process: its addresses, its ready file, and the signals to stop."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

import structlog

from shoal_proto.addresses import is_reachable_address, join_address, split_address
from shoal_proto.errors import InvalidSpec
from shoal_proto.tls import identity

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"
SAME_ORDER_S = 2.0
"""Time after the first signal to stop in which further signals count as the same request."""
WILDCARDS = ("", "0.0.0.0", "::")


def write_ready_file(path: Path | None, addresses: dict[str, str]) -> None:
    """Write {"pid", **addresses} as JSON to `path`, if any, whole or not at all."""
    if path is None:
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps({"pid": os.getpid(), **addresses}))
    part.replace(path)


def remove_ready_file(path: Path | None) -> None:
    """Remove the ready file that an earlier process may have left. Call it before the port is
    open: a volume outlives a restarted container."""
    if path is not None:
        path.unlink(missing_ok=True)


class StopRequest:
    """Request to stop by SIGTERM or SIGINT. Construct it on the running loop."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.repeated = asyncio.Event()
        """Set by a signal SAME_ORDER_S or more after the first. Signals before that are copies of
        the first: a scheduler signals every process, and a parent passes the signal on."""
        self._requested_s = 0.0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note, loop)

    def _note(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self.requested.is_set():
            self._requested_s = loop.time()
            self.requested.set()
        elif loop.time() >= self._requested_s + SAME_ORDER_S:
            self.repeated.set()


def listen_address(listen: str, bind: str, option: str = "--listen") -> str:
    """host:port to listen on: `listen` is HOST:PORT, or PORT alone at the address `bind`. Raises
    InvalidSpec for other text; the error names `option`."""
    address = listen if ":" in listen else join_address(bind, listen)
    try:
        split_address(address)
    except InvalidSpec as error:
        raise InvalidSpec(
            f"bad {option}", seen=repr(listen), expected="host:port, or a port"
        ) from error
    return address


def advertised_address(advertise: str, listen: str, port: int) -> str:
    """host:port for others to connect to.

    `advertise` is HOST:PORT, or HOST, which gets `port`; empty: the host of `listen`. A HOST in
    WILDCARDS becomes this machine's name. Raises InvalidSpec for any other text.
    """
    host, number = advertise or split_address(listen)[0], str(port)
    name, colon, last = host.rpartition(":")
    if colon and (":" not in name or name.endswith("]")):
        host, number = name, last
    if host.strip("[]") in WILDCARDS:
        host = socket.gethostname()
    address = join_address(host, number)
    if not is_reachable_address(address):
        raise InvalidSpec(
            "bad --advertise",
            seen=repr(advertise),
            expected="HOST, or HOST:PORT with a port from 1 to 65535",
        )
    return address


def is_loopback(host: str) -> bool:
    """True for a loopback address, or localhost. No name is looked up."""
    host = host.strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def exposed_addresses(listens: Mapping[str, str]) -> dict[str, str]:
    """Addresses (host:port by service) among `listens` that are not on loopback. Raises InvalidSpec
    for text that is not host:port."""
    return {
        name: address
        for name, address in listens.items()
        if not is_loopback(split_address(address)[0])
    }


def warn_of_exposure(listens: Mapping[str, str], etcd: Sequence[str]) -> None:
    """Warn if other machines may reach a port without TLS. Warn too if all ports are on loopback,
    although etcd is on another machine."""
    if (found := exposed_addresses(listens)) and identity.own() is None:
        log.warning(
            "ports_open_to_others",
            **found,
            reason="no TLS and no password: every process that reaches these ports can read"
            " parameters"
            " and end jobs; let only machines of this cluster reach them",
        )
    elif not found and not all(is_loopback(split_address(endpoint)[0]) for endpoint in etcd):
        log.warning(
            "reachable_from_this_host_only",
            **listens,
            reason="etcd is on another machine, and the address announced there is a loopback "
            "address; give --bind ADDRESS if other machines should reach this process",
        )
