"""Registered parameter servers, each record under its server's lease."""

from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from shoal_proto.errors import InternalError
from shoal_server.core.processes import Holder
from shoal_server.etcd import keys
from shoal_server.etcd.api import Keyspace
from shoal_server.etcd.json_fields import Fields, UnreadableRecord

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    holder: Holder
    address: str
    """host:port for workers and other servers."""
    is_leaving: bool = False
    """True if the server hands over its shards, and then ends."""
    torch_version: str = ""
    """Empty if the server did not state it."""


def parse(key: str, value: bytes) -> Server:
    """Parse a record below `keys.SERVERS`. Raises InternalError if it does not parse."""
    try:
        record = Fields.parsed(value)
        return Server(
            holder=Holder(key.removeprefix(keys.SERVERS), record.text("incarnation", "")),
            address=record.text("address"),
            is_leaving=record.has("leaving") and record.flag("leaving"),
            torch_version=record.text("torch", ""),
        )
    except UnreadableRecord as error:
        raise InternalError(
            f"the record of parameter server {key.removeprefix(keys.SERVERS)} does not parse",
            seen=f"{value[:80]!r}, {error}",
            expected="JSON with an address",
        ) from error


def parse_all(records: Mapping[str, bytes]) -> list[Server]:
    """Servers of these records; an unreadable one is logged and left out."""
    found = []
    for key, value in records.items():
        try:
            found.append(parse(key, value))
        except InternalError as error:
            log.error("server_record_unreadable", key=key, reason=str(error))
    return found


async def read(store: Keyspace) -> list[Server]:
    snapshot = await store.range(keys.SERVERS)
    return parse_all({item.key: item.value for item in snapshot.items})
