"""Keys for bulk connections, given to clients that gRPC has authenticated."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from shoal_proto.bulk import KEY_BYTES
from shoal_proto.tls.names import Caller
from shoal_proto.v1.parameters_pb2 import OpenBulkReply

VALID_S = 10.0
MAX_KEYS = 1024
"""A new key replaces the oldest unused one."""


class Purpose(Enum):
    """Purpose of a bulk connection, which limits its calls."""

    CALLS = "pulls and pushes of a job's member"
    REPLICATION = "replication of another server's shards"
    SEGMENTS = "segments of one series of published weights"


@dataclass(frozen=True, slots=True)
class PermittedUse:
    purpose: Purpose
    caller: Caller | None
    """None: callers have no certificates."""
    series: str = ""


class BulkOffers:
    """Issues keys for bulk connections, and redeems each key once."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._given: dict[bytes, tuple[float, PermittedUse]] = {}
        self._local_name, self._port = "", 0

    def listening(self, local_name: str, port: int) -> None:
        """Set the addresses at which connections are accepted; port 0: none are accepted."""
        self._local_name, self._port = local_name, port

    def make(
        self, purpose: Purpose, caller: Caller | None = None, *, series: str = ""
    ) -> OpenBulkReply:
        """Make a key for one connection. The reply has port 0 if no connections are accepted."""
        if not self._port:
            return OpenBulkReply()
        if len(self._given) >= MAX_KEYS:
            del self._given[next(iter(self._given))]
        key = secrets.token_bytes(KEY_BYTES)
        self._given[key] = self._now_s() + VALID_S, PermittedUse(purpose, caller, series)
        return OpenBulkReply(key=key, local_name=self._local_name, port=self._port)

    def redeem(self, key: bytes) -> PermittedUse | None:
        """Invalidate a key, and return its use; None if it is unknown, expired or used already."""
        valid_until_s, use = self._given.pop(key, (float("-inf"), None))
        return use if self._now_s() < valid_until_s else None
