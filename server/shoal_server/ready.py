"""Telling whoever started this process that it serves, and being told to stop."""

import asyncio
import json
import os
import signal
from pathlib import Path

from shoal_proto.errors import InvalidSpec


def write_ready_file(path: Path | None, addresses: dict[str, str]) -> None:
    """Write {"pid", **addresses} as JSON to `path`, whole or not at all; None writes nothing."""
    if path is None:
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps({"pid": os.getpid(), **addresses}))
    part.replace(path)


def stop_requested() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. Call it on the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises InvalidSpec."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise InvalidSpec("bad address", seen=repr(address), expected="host:port")
    return host.strip("[]"), int(port)


def advertised(advertise: str, listen: str, port: int) -> str:
    """host:port for others to connect to.

    `advertise` is HOST or HOST:PORT; empty: the host that is listened on, or loopback where that
    is every interface.
    """
    if advertise:
        return advertise if ":" in advertise else f"{advertise}:{port}"
    host = split_address(listen)[0]
    return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
