"""Keys with which a client that gRPC has let in may open a connection of the bulk transport."""

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
"""Given and not used yet; the oldest is forgotten for a new one."""


class Purpose(Enum):
    """What a connection may be used for."""

    CALLS = "pulls and pushes of a job's member"
    REPLICATION = "another server's news of its shards"
    SEGMENTS = "segments of one series of published weights"


@dataclass(frozen=True, slots=True)
class Use:
    """What a key was given for."""

    purpose: Purpose
    caller: Caller | None
    """Who asked for it, where callers have certificates."""
    series: str = ""
    """Of a connection for segments: the series that it is for."""


class Offers:
    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._given: dict[bytes, tuple[float, Use]] = {}
        self._local_name, self._port = "", 0

    def listening(self, local_name: str, port: int) -> None:
        """Connections are taken there from now on; at port 0, nowhere."""
        self._local_name, self._port = local_name, port

    def make(
        self, purpose: Purpose, caller: Caller | None = None, *, series: str = ""
    ) -> OpenBulkReply:
        """A key for one connection; port 0 where none is taken."""
        if not self._port:
            return OpenBulkReply()
        if len(self._given) >= MAX_KEYS:
            del self._given[next(iter(self._given))]
        key = secrets.token_bytes(KEY_BYTES)
        self._given[key] = self._now_s() + VALID_S, Use(purpose, caller, series)
        return OpenBulkReply(key=key, local_name=self._local_name, port=self._port)

    def redeem(self, key: bytes) -> Use | None:
        """What the key was given for; None if it was not, is too old, or is used again."""
        valid_until_s, use = self._given.pop(key, (float("-inf"), None))
        return use if self._now_s() < valid_until_s else None
